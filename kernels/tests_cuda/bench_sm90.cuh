// Products over many tokens.
#pragma once

static void bench_many() {
    int M = 4096;
    for (auto [K, N] : {std::pair{5120, 1280}, {1280, 32768}, {8192, 5120}, {5120, 2304}}) {
        int n = std::min(4, copies_for((double)N * K));
        auto ws = make<Dev<uint8_t>>(n, [&] { return rand_u8((size_t)N * K, 1); });
        auto s = rand_u8((size_t)N * K / 1024, 2);
        auto x = rand_bf16((size_t)M * K);
        Dev<bf16> tiled((size_t)M * K), y((size_t)M * N);
        launch("quant/act_quant:act_quant_tiled", dim3(M), 256, K * 2, x.p, (int*)nullptr, tiled.p, K, (int64_t)K, (int64_t)M, 0, 1);
        CUDA(cudaDeviceSynchronize());
        for (int tok : {256, 128}) {
            int tiles = (N + 127) / 128 * ((M + tok - 1) / tok);
            double us = graph_us([&](int i) {
                launch(fmt("quant/fp8_many_sm90:fp8_many_%d", tok), dim3(std::min(132, tiles)), 384, 4 * tok * 128 + 2 * tok * 144 + 1024, tiled.p, ws[i % n].p, s.p, y.p, M, N, K, (int64_t)M);
            }, 6, 7);
            row(fmt("fp8_many_%d", tok).c_str(), fmt("M%d %d->%d", M, K, N), us, (double)N * K + 2.0 * M * (K + N), 2.0 * M * N * K);
        }
        double us = graph_us([&](int) { launch("quant/act_quant:act_quant_tiled", dim3(M), 256, K * 2, x.p, (int*)nullptr, tiled.p, K, (int64_t)K, (int64_t)M, 0, 1); }, 6, 7);
        row("act_quant_tiled", fmt("M%d K%d", M, K), us, 4.0 * M * K, 0);
    }
}
