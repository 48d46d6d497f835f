// The launches of a decoder layer for one token, one after the other: what each of them costs there.
#pragma once

static void bench_layer() {
    int dim = 5120, H = 64, D = 512, E = 384, inter = 2304, k = 6, rows = 4224, n = 640, sets = 3;
    struct Fp8 { std::vector<Dev<uint8_t>> w, s; };
    auto fp8 = [&](size_t N, size_t K) { return Fp8{make<Dev<uint8_t>>(sets, [&] { return rand_u8(N * K, 1); }), make<Dev<uint8_t>>(sets, [&] { return rand_u8(N * K / 1024, 2); })}; };
    auto wa = fp8(1792, 5120), wq = fp8(32768, 1280), oa = fp8(8192, 4096), ob = fp8(5120, 8192), w13 = fp8(4608, 5120), w2s = fp8(5120, 2304);
    size_t wb = (size_t)inter * dim / 2, sb = (size_t)inter * dim / 32;
    auto w1 = rand_u8(wb * E, 0), w3 = rand_u8(wb * E, 0), w2 = rand_u8(wb * E, 0), s1 = rand_u8(sb * E, 2), s3 = rand_u8(sb * E, 2), s2 = rand_u8(sb * E, 2);
    auto fn = make<Dev<float>>(2 * sets, [&] { return rand_f32((size_t)24 * 4 * dim, 0.05f); });
    auto gate = make<Dev<bf16>>(sets, [&] { return rand_bf16((size_t)E * dim, 0.05f); });
    auto scale = rand_f32(3), base = rand_f32(24), sink = rand_f32(H), bias = rand_f32(E, 0.1f), angles = rand_f32(32);
    auto norm = rand_bf16(dim), kv = rand_bf16((size_t)rows * D), a = rand_bf16(dim), b = rand_bf16(dim), stream = rand_bf16(4 * dim), stream2 = rand_bf16(4 * dim), out = rand_bf16(dim), x = rand_bf16(dim);
    auto coef = rand_f32(24), coef2 = rand_f32(24);
    Dev<bf16> y(dim), lat(1792), q(32768), o(32768), mid(8192), both(4608), shared(dim), h(6 * inter), kvrow(512);
    Dev<float> part(80 * 32), po((size_t)10 * H * D), ml(10 * H * 2), logits(E), gw(k);
    Dev<uint32_t> cnt(4), gcnt(1), turns(32), chosen(k);
    cnt.zero(); gcnt.zero(); turns.zero();
    std::vector<int> idx(n);
    for (auto& v : idx) v = pick(0, rows - 1);
    Dev<int> list(idx), slot(std::vector<int>{5});
    Scopes sc = {{{kv.p, nullptr, list.p, n, 0}, {}, {}}};
    bf16 *no = nullptr;
    uint8_t* nob = nullptr;
    auto raw = [&](Fp8& f, int i, int N, int K, bf16* from, bf16* to) {
        int ks = few_split(1, false, N, K, 1);
        launch_as({ks, false, g_overlap}, "quant/fp8_few_sm90:fp8_few_raw_m1", dim3((N + 127) / 128 * ks), 256, few_smem(K, ks, 1, false), from, f.w[i % sets].p, f.s[i % sets].p, to, 1, N, K);
    };
    auto hcs_step = [&](int i, bf16* sub, bf16* from, float* c, bf16* to, float* co) {
        launch("hyperconn/hc_step:hc_step_few", dim3(80, 1), 256, 0, sub, from, c + 4, c + 8, c, fn[i % (2 * sets)].p, scale.p, base.p, norm.p, to, co, x.p, no, nob, nob, y.p, part.p, cnt.p, 1, dim, 1, 24, 20, 1e-6f, 1e-20f);
    };
    Attn attn = {1, H, D, 10, true, false, {angles.p, angles.p, 64}, {kvrow.p, slot.p, kv.p}};
    using Part = std::pair<const char*, std::function<void(int)>>;
    std::vector<Part> parts = {
        {"hc_step (attention)", [&](int i) { hcs_step(2 * i, a.p, stream.p, coef.p, stream2.p, coef2.p); }},
        {"wq_a, wkv", [&](int i) { raw(wa, i, 1792, 5120, x.p, lat.p); }},
        {"wq_b, row of kv", [&](int i) { launch_query_heads(1, 32768, 1280, D, 64, lat.p, norm.p, wq.w[i % sets].p, wq.s[i % sets].p, q.p, lat.p + 1280, norm.p, angles.p, angles.p, kvrow.p); }},
        {"sparse_attn", [&](int) { attn.parts(q.p, sc, sink.p, o.p, po.p, ml.p, 0.0442f); }},
        {"sparse_attn_combine", [&](int) { attn.combine(po.p, ml.p, sink.p, o.p); }},
        {"wo_a", [&](int i) { launch_few(few_split(1, true, 1024, 4096, 8), 1, true, 8, 1, 1024, 4096, o.p, oa.w[i % sets].p, oa.s[i % sets].p, mid.p); }},
        {"wo_b", [&](int i) { raw(ob, i, 5120, 8192, mid.p, b.p); }},
        {"hc_step (experts)", [&](int i) { hcs_step(2 * i + 1, b.p, stream2.p, coef2.p, stream.p, coef.p); }},
        {"gate", [&](int i) { launch("moe/topk_gate:gate_one", dim3(E / 4), 128, 8 * E, x.p, gate[i % sets].p, bias.p, (float*)nullptr, nob, logits.p, gcnt.p, gw.p, chosen.p, dim, E, k, 2, 1.0f, 1, 1.5f); }},
        {"shared w1, w3", [&](int i) { raw(w13, i, 4608, 5120, x.p, both.p); }},
        {"shared w2", [&](int i) { int ks = few_split(1, false, 5120, 2304, 1); launch_as({ks, false, g_overlap}, "quant/fp8_few_sm90:fp8_few_swiglu_m1", dim3(40 * ks), 256, few_smem(2304, ks, 1, false), both.p, both.p + inter, w2s.w[i % sets].p, w2s.s[i % sets].p, shared.p, 1, 5120, 2304, 10.0f); }},
        {"experts", [&](int) { launch_cooperative("moe/experts_one_sm90:experts_one", dim3(132), 768, one_smem(dim, inter, k), x.p, chosen.p, gw.p, w1.p, s1.p, w3.p, s3.p, w2.p, s2.p, h.p, shared.p, a.p, turns.p, dim, inter, k, 0u, E, 10.0f); }},
    };
    // As steps are captured: the gate on a stream of its own, beside the shared expert.
    cudaStream_t side;
    cudaEvent_t fork, join;
    CUDA(cudaStreamCreate(&side));
    CUDA(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    CUDA(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    auto is = [](const Part& part, const char* name) { return !strncmp(part.first, name, strlen(name)); };
    auto beside = [&](int i) {
        cudaStream_t main = g_stream;
        auto aside = [&](const std::function<void()>& work) {
            CUDA(cudaEventRecord(fork, main));
            CUDA(cudaStreamWaitEvent(side, fork));
            g_stream = side;
            work();
            CUDA(cudaEventRecord(join, side));
            g_stream = main;
        };
        for (auto& each : parts) {
            if (is(each, "experts")) CUDA(cudaStreamWaitEvent(main, join));
            if (is(each, "gate")) aside([&] { each.second(i); });
            else each.second(i);
        }
    };
    double bytes = 0;
    for (auto* f : {&wa, &wq, &oa, &ob, &w13, &w2s}) bytes += (f->w[0].n + f->s[0].n);
    bytes += 3.0 * k * (wb + sb) + 2 * 24 * 4 * dim * 4 + 2.0 * E * dim;
    auto all = [&](int without) { return graph_us([&](int i) { for (int j = 0; j < (int)parts.size(); ++j) if (j != without) parts[j].second(i); }, 12, 11); };
    auto captured = [&] {
        return graph_us([&](int i) {
            beside(i);
        }, 12, 11);
    };
    for (bool overlap : {false, true}) {
        g_overlap = overlap;
        double whole = all(-1);
        row("layer", overlap ? "T1, overlapped" : "T1, one after the other", whole, bytes, 0);
        row("layer", "  the gate beside the shared expert", captured(), bytes, 0);
        for (int j = 0; j < (int)parts.size(); ++j) printf("  without %-24s %7.2f us less\n", parts[j].first, whole - all(j));
    }
    g_overlap = false;
}
