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
        launch("quant/act_quant:act_quant_tiled", dim3(M), 256, K * 2, x.p, (int*)nullptr, 1, tiled.p, K, (int64_t)K, (int64_t)M, 0, 1);
        CUDA(cudaDeviceSynchronize());
        for (int tok : {256, 192, 128}) {
            int tiles = (N + 127) / 128 * ((M + tok - 1) / tok);
            double us = graph_us([&](int i) {
                launch(fmt("quant/fp8_many_sm90:fp8_many_%d", tok), dim3(std::min(132, tiles)), 384, 4 * tok * 128 + 2 * tok * 144 + 1024, tiled.p, ws[i % n].p, s.p, y.p, M, N, K, N, (int64_t)M);
            }, 6, 7);
            row(fmt("fp8_many_%d", tok).c_str(), fmt("M%d %d->%d", M, K, N), us, (double)N * K + 2.0 * M * (K + N), 2.0 * M * N * K);
        }
        double us = graph_us([&](int) { launch("quant/act_quant:act_quant_tiled", dim3(M), 256, K * 2, x.p, (int*)nullptr, 1, tiled.p, K, (int64_t)K, (int64_t)M, 0, 1); }, 6, 7);
        row("act_quant_tiled", fmt("M%d K%d", M, K), us, 4.0 * M * K, 0);
    }
    int G = 8, K = 4096, N = 1024;
    auto w = rand_u8((size_t)G * N * K, 1), s = rand_u8((size_t)G * N * K / 1024, 2);
    auto x = rand_bf16((size_t)M * G * K);
    Dev<bf16> tiled((size_t)M * G * K), y((size_t)M * G * N);
    auto tile = [&] { launch("quant/act_quant:act_quant_tiled", dim3(M), 256, G * K * 2, x.p, (int*)nullptr, 1, tiled.p, G * K, (int64_t)G * K, (int64_t)M, 0, 0); };
    tile();
    CUDA(cudaDeviceSynchronize());
    row("act_quant_tiled", fmt("wo_a M%d K%d", M, G * K), graph_us([&](int) { tile(); }, 4, 7), 4.0 * M * G * K, 0);
    double us = graph_us([&](int) {
        launch("quant/fp8_many_sm90:fp8_many_256", dim3(132), 384, 4 * 256 * 128 + 2 * 256 * 144 + 1024, tiled.p, w.p, s.p, y.p, M, G * N, K, N, (int64_t)M);
    }, 4, 7);
    row("fp8_many_256", fmt("wo_a M%d 8 groups 4096->1024", M), us, (double)G * N * K + 2.0 * M * G * (K + N), 2.0 * M * G * N * K);
    us = graph_us([&](int) { launch("quant/fp8_linear:fp8_linear_m32_t2", dim3(N / 32, M / 32, G), 256, 0, x.p, w.p, s.p, y.p, M, N, K); }, 2, 5);
    row("fp8_linear_m32_t2", fmt("wo_a M%d 8 groups 4096->1024", M), us, (double)G * N * K + 2.0 * M * G * (K + N), 2.0 * M * G * N * K);
}

static void bench_experts_many() {
    int E = 384, dim = 5120, inter = 2304, k = 6;
    size_t wb = (size_t)inter * dim / 2, sb = (size_t)inter * dim / 32;
    auto w1 = rand_u8(wb * E, 0), w3 = rand_u8(wb * E, 0), w2 = rand_u8(wb * E, 0), s1 = rand_u8(sb * E, 2), s3 = rand_u8(sb * E, 2), s2 = rand_u8(sb * E, 2);
    for (int T : {256, 1024, 4096}) {
        int P = T * k, places = P + std::min(P, E) * 7, rp = (places + 7) / 8 * 8;
        std::vector<uint32_t> e;
        for (int t = 0; t < T; ++t) {
            std::vector<int> all(E);
            for (int i = 0; i < E; ++i) all[i] = i;
            std::shuffle(all.begin(), all.end(), g_rng);
            e.insert(e.end(), all.begin(), all.begin() + k);
        }
        Dev<uint32_t> ex(e);
        Dev<int32_t> order(places), inverse(P), count(1);
        Dev<int4> tiles(std::min(P, E + P / 128));
        auto x = rand_bf16((size_t)T * dim, 0.02f);
        auto wt = rand_f32(P);
        Dev<bf16> tiled((size_t)rp * dim), h((size_t)rp * inter), y((size_t)places * dim), out((size_t)T * dim);
        size_t smem = 4 * 32768 + 128 * 272 + 1024;
        auto grp = [&] { launch("moe/group_tokens", dim3(1), 512, 4 * (17 * E + 1), ex.p, order.p, inverse.p, tiles.p, count.p, P, 0u, E, 128, 8); };
        auto act = [&] { launch("quant/act_quant:act_quant_tiled", dim3(places), 256, dim * 2, x.p, order.p, k, tiled.p, dim, (int64_t)dim, (int64_t)rp, 1, 1); };
        auto up = [&] { launch("moe/experts_many_sm90:experts_many_up", dim3(132), 384, smem, tiled.p, order.p, tiles.p, count.p, wt.p, w1.p, s1.p, w3.p, s3.p, h.p, dim, inter, (int64_t)rp, 10.0f); };
        auto down = [&] { launch("moe/experts_many_sm90:experts_many_down", dim3(132), 384, smem, h.p, tiles.p, count.p, w2.p, s2.p, y.p, dim, inter, (int64_t)rp); };
        auto comb = [&] { launch("moe/combine:moe_combine", dim3((dim / 8 + 127) / 128, T), 128, 0, y.p, inverse.p, ex.p, (bf16*)nullptr, out.p, (float*)nullptr, dim, k); };
        grp();
        act();
        double b = 384.0 * (wb + sb), fl = 2.0 * P * inter * dim;
        row("group_tokens", fmt("T%d", T), graph_us([&](int) { grp(); }, 5, 7), 4.0 * P, 0);
        row("act_quant_tiled", fmt("T%d gathered", T), graph_us([&](int) { act(); }, 5, 7), 4.0 * P * dim, 0);
        row("experts_many_up", fmt("T%d", T), graph_us([&](int) { up(); }, 2, 5), 2 * b, 2 * fl);
        row("experts_many_down", fmt("T%d", T), graph_us([&](int) { down(); }, 2, 5), b, fl);
        row("moe_combine", fmt("T%d", T), graph_us([&](int) { comb(); }, 5, 7), 2.0 * P * dim + 2.0 * T * dim, 0);
        row("experts_many all", fmt("T%d", T), graph_us([&](int) { grp(); act(); up(); down(); comb(); }, 2, 5), 3 * b, 3 * fl);
    }
}
