// bench: the kernels at the released shapes, against the memory or the arithmetic ceiling.
//
//     bench FATBIN_DIR [NAME]     medians over replays of a CUDA graph; buffers rotate so that weights come from memory
#include "harness.cuh"
#include "launch_attn.cuh"

template <typename T>
static std::vector<T> make(int n, const std::function<T()>& f) { std::vector<T> v; for (int i = 0; i < n; ++i) v.push_back(f()); return v; }
static int g_size = 0;  // third argument: only this number of tokens, where a bench has several
static int copies_for(double bytes) { return std::max(1, std::min(24, (int)(260e6 / bytes) + 1)); }

static void bench_linear_small() {
    for (auto [K, N] : {std::pair{5120, 1280}, {1280, 32768}, {8192, 5120}, {5120, 2304}}) {
        int n = copies_for((double)N * K);
        auto ws = make<Dev<uint8_t>>(n, [&] { return rand_u8((size_t)N * K, 1); });
        auto ss = make<Dev<uint8_t>>(n, [&] { return rand_u8((size_t)N * K / 1024, 2); });
        for (int M : {1, 4, 8, 12, 16}) {
            auto x = rand_bf16((size_t)M * K);
            Dev<bf16> y((size_t)M * N);
            auto xc = rand_u8((size_t)M * K, 1), xs = rand_u8((size_t)M * K / 32, 2);
            int m = M <= 8 ? 8 : 16, fm = M == 1 ? 1 : m, own = few_split(fm, false, N, K, 1);
            for (int ks = 1; ks <= 8; ++ks) {
                    if (few_smem(K, ks, fm, false) > 200000 || (!g_size && ks != own)) continue;
                    auto once = [&](int i) { launch_few(ks, fm, false, 1, M, N, K, xc.p, xs.p, ws[i % n].p, ss[i % n].p, y.p); };
                    double us = graph_us(once);
                    row(fmt("fp8_few k%d%s", ks, ks == own ? " *" : "").c_str(), fmt("M%d %d->%d", M, K, N), us, (double)N * K * (1 + 1 / 1024.) + 2.0 * M * (K + N), 2.0 * M * N * K);
                }
            if (!g_size) {
                // Launches that overlap, as in captured steps.
                g_overlap = true;
                double us = graph_us([&](int i) { launch_few(own, fm, false, 1, M, N, K, xc.p, xs.p, ws[i % n].p, ss[i % n].p, y.p); });
                g_overlap = false;
                row(fmt("fp8_few k%d over.", own).c_str(), fmt("M%d %d->%d", M, K, N), us, (double)N * K * (1 + 1 / 1024.) + 2.0 * M * (K + N), 2.0 * M * N * K);
            }
            if (g_size || (M != 1 && M != 16)) continue;
            for (int t : {1, 2}) {
                std::string k = fmt("quant/fp8_linear:fp8_linear_m%d_t%d", m, t);
                double us = graph_us([&](int i) { launch(k, dim3((N + 16 * t - 1) / (16 * t), 1, 1), 256, 0, x.p, ws[i % n].p, ss[i % n].p, y.p, M, N, K); });
                row(fmt("fp8_linear_t%d", t).c_str(), fmt("M%d %d->%d", M, K, N), us, (double)N * K * (1 + 1 / 1024.) + 2.0 * M * (K + N), 2.0 * M * N * K);
            }
        }
    }
    // wo_a: eight groups of 4096 -> 1024, fp8 as stored.
    auto ws = make<Dev<uint8_t>>(8, [&] { return rand_u8((size_t)8 * 1024 * 4096, 1); });
    auto s = rand_u8((size_t)8 * 1024 * 4096 / 1024, 2);
    auto x = rand_bf16(8 * 4096);
    Dev<bf16> y(8 * 1024);
    double us = graph_us([&](int i) { launch("quant/fp8_linear:fp8_linear_m8_t1", dim3(64, 1, 8), 256, 0, x.p, ws[i % 8].p, s.p, y.p, 1, 1024, 4096); });
    row("fp8_linear_t1", "wo_a M1 8 groups 4096->1024", us, 8.0 * 1024 * 4096, 2.0 * 8 * 1024 * 4096);
    for (int M : {1, 4, 16}) {
        auto x = rand_bf16((size_t)M * 8 * 4096);
        Dev<bf16> y((size_t)M * 8 * 1024);
        for (int ks = 2; ks <= 8; ++ks) {
            if (!g_size && ks != few_split(M == 1 ? 1 : M <= 8 ? 8 : 16, true, 1024, 4096, 8)) continue;
            us = graph_us([&](int i) { launch_few(ks, M == 1 ? 1 : M <= 8 ? 8 : 16, true, 8, M, 1024, 4096, x.p, ws[i % 8].p, s.p, y.p); });
            row(fmt("fp8_few_plain k%d", ks).c_str(), fmt("wo_a M%d 8 groups 4096->1024", M), us, 8.0 * 1024 * 4096, 2.0 * M * 8 * 1024 * 4096);
        }
    }
}

static void bench_experts() {
    int E = 384, dim = 5120, inter = 2304, k = 6;
    size_t wb = (size_t)inter * dim / 2, sb = (size_t)inter * dim / 32;
    auto w1 = rand_u8(wb * E, 0), w3 = rand_u8(wb * E, 0), w2 = rand_u8(wb * E, 0), s1 = rand_u8(sb * E, 2), s3 = rand_u8(sb * E, 2), s2 = rand_u8(sb * E, 2);
    for (int T : {1, 4, 16, 64}) {
        int P = T * k, max_tiles = std::min(P, E + P / 8), sets = T == 1 ? 10 : 2;
        auto x = rand_bf16((size_t)T * dim, 0.02f);
        auto wt = rand_f32(P);
        std::vector<Dev<uint32_t>> ex;
        std::vector<Dev<int32_t>> order, inverse, count;
        std::vector<Dev<int4>> tiles;
        int used = 0;
        for (int s = 0; s < sets; ++s) {
            std::vector<uint32_t> e;
            for (int t = 0; t < T; ++t) {
                std::vector<int> all(E);
                for (int i = 0; i < E; ++i) all[i] = i;
                std::shuffle(all.begin(), all.end(), g_rng);
                e.insert(e.end(), all.begin(), all.begin() + k);
            }
            std::vector<uint32_t> u = e;
            std::sort(u.begin(), u.end());
            used = std::unique(u.begin(), u.end()) - u.begin();
            ex.emplace_back(e);
            order.emplace_back(P); inverse.emplace_back(P); count.emplace_back(1); tiles.emplace_back(max_tiles);
        }
        Dev<bf16> h((size_t)P * inter), y((size_t)P * dim), out((size_t)T * dim);
        auto grp = [&](int i) { launch("moe/group_tokens", dim3(1), 512, 4 * (17 * E + 1), ex[i].p, order[i].p, inverse[i].p, tiles[i].p, count[i].p, P, 0u, E, 8, 1); };
        auto up = [&](int i) {
            launch("moe/experts:experts_up_fp4", dim3(inter / 32, max_tiles), 256, 0, x.p, order[i].p, tiles[i].p, count[i].p, wt.p, w1.p, s1.p, w3.p, s3.p, h.p, dim, inter, k, 10.0f);
        };
        auto down = [&](int i) { launch("moe/experts:experts_down_fp4", dim3(dim / 32, max_tiles), 192, 0, h.p, tiles[i].p, count[i].p, w2.p, s2.p, y.p, dim, inter); };
        auto comb = [&](int i) { launch("moe/combine:moe_combine", dim3((dim / 8 + 127) / 128, T), 128, 0, y.p, inverse[i].p, ex[i].p, (bf16*)nullptr, out.p, (float*)nullptr, dim, k); };
        for (int i = 0; i < sets; ++i) grp(i);
        double b = (double)used * (wb + sb), fl = 2.0 * P * inter * dim;
        row("group_tokens", fmt("T%d", T), graph_us([&](int i) { grp(i % sets); }), 4.0 * P, 0);
        row("experts_up", fmt("T%d, %d experts", T, used), graph_us([&](int i) { up(i % sets); }), 2 * b, 2 * fl);
        row("experts_down", fmt("T%d", T), graph_us([&](int i) { down(i % sets); }), b, fl);
        if (T == 1) {
            Dev<uint32_t> turns(32);
            turns.zero();
            // On its own, and with launches that overlap, as in captured steps.
            for (bool overlap : {false, true}) {
                g_overlap = overlap;
                row("experts_one", overlap ? "overlapped" : "one after the other", graph_us([&](int i) {
                    launch_cooperative("moe/experts_one_sm90:experts_one", dim3(132), 768, one_smem(dim, inter, k), x.p, ex[i % sets].p, wt.p, w1.p, s1.p, w3.p, s3.p, w2.p, s2.p, h.p,
                                       (bf16*)nullptr, out.p, turns.p, dim, inter, k, 0u, E, 10.0f);
                }), 3 * b, 3 * fl);
            }
            g_overlap = false;
        }
        row("experts all", fmt("T%d", T), graph_us([&](int i) { grp(i % sets); up(i % sets); down(i % sets); comb(i % sets); }), 3 * b, 3 * fl);
    }
}

static void bench_attn() {
    int H = 64, D = 512;
    for (auto [T, rows, n] : {std::tuple{1, 4224, 640}, {64, 64 * 4224, 640}, {4096, 6144, 640}}) {
        auto q = rand_bf16((size_t)T * H * D), kv = rand_bf16((size_t)rows * D);
        auto sink = rand_f32(H);
        std::vector<int> idx((size_t)T * n);
        for (int t = 0; t < T; ++t)
            for (int j = 0; j < n; ++j) idx[(size_t)t * n + j] = j >= n - 7 ? -1 : (rows > 100000 ? t * 4224 + pick(0, 4223) : pick(0, rows - 1));
        Dev<int> di(idx);
        Scopes sc = {{{kv.p, nullptr, di.p, n, 0}, {}, {}}};
        for (int S : T == 1 ? std::vector<int>{5, 10, 20} : T == 64 ? std::vector<int>{1, 2, 4} : std::vector<int>{1}) {
            Dev<bf16> out((size_t)T * H * D);
            Dev<float> po((size_t)S * T * H * D), ml((size_t)S * T * H * 2);
            double us = graph_us([&](int) {
                Attn{T, H, D, S}.run(q.p, sc, sink.p, out.p, po.p, ml.p, 0.0442f);
            }, T > 1000 ? 2 : 20, 7);
            row("sparse_attn", fmt("T%d, 633 rows, split %d", T, S), us, (double)T * (633 * 1024 + 2 * 65536), 4.0 * T * H * D * 633);
            us = graph_us([&](int) {
                Attn{T, H, D, S, true}.run(q.p, sc, sink.p, out.p, po.p, ml.p, 0.0442f);
            }, T > 1000 ? 2 : 20, 7);
            row("sparse_attn_sm90", fmt("T%d, 633 rows, split %d", T, S), us, (double)T * (633 * 1024 + 2 * 65536), 4.0 * T * H * D * 633);
        }
    }
}

static void bench_index() {
    int H = 32, D = 128, n = 524288, k = 512;
    auto codes = make<Dev<uint8_t>>(6, [&] { return rand_u8((size_t)n * 64, 0); });
    auto scales = make<Dev<uint8_t>>(6, [&] { return rand_u8((size_t)n * 4, 2); });
    auto q = rand_bf16(H * D), w = rand_bf16(H, 0.1f);
    Dev<int2> span(std::vector<int2>{{0, n}});
    Dev<uint16_t> keys(n), bm(n / 8);
    for (int g : {132, 264}) {
        double us = graph_us([&](int i) {
            launch("attention/index_scores:index_scores_fp4", dim3(g, 1), 256, 4 * 2064, q.p, w.p, codes[i % 6].p, scales[i % 6].p, span.p, (int*)nullptr, keys.p, 1, H, D, n, (int64_t)n, 1, 0, 8);
        });
        row("index_scores fp4", fmt("T1 512K grid %d", g), us, 68.0 * n + 2.0 * n, 2.0 * H * D * n);
        Dev<bf16> coded(H * D);
        launch("quant/fake_quant_fp4", dim3(H * D / 256), 256, 0, q.p, coded.p, (uint8_t*)nullptr, (uint8_t*)nullptr, (int64_t)H * D, 32);
        CUDA(cudaDeviceSynchronize());
        us = graph_us([&](int i) { launch("attention/index_scores_sm90", dim3(g, 1), 256, 4096 + 8 * 4 * 2176, coded.p, w.p, codes[i % 6].p, scales[i % 6].p, span.p, keys.p, (uint32_t*)nullptr, 1, n, (int64_t)n); });
        row("index_scores_sm90", fmt("T1 512K grid %d", g), us, 68.0 * n + 2.0 * n, 2.0 * H * D * n);
    }
    Dev<uint32_t> hist(2048), part(64 * 33), header(2);
    hist.zero();
    Dev<int> out(2048);
    auto topk = [&](uint16_t* src, int len, int kk) {
        int parts = (len + 8191) / 8192;
        launch("attention/topk_rows:topk_part_hist", dim3(parts, 1), 256, 0, src, hist.p, len, (int64_t)len);
        launch("attention/topk_rows:topk_part_count", dim3(parts, 1), 256, 0, src, hist.p, part.p, header.p, len, (int64_t)len, kk);
        launch("attention/topk_rows:topk_part_write", dim3(parts, 1), 256, 0, src, hist.p, part.p, header.p, span.p, (int*)nullptr, out.p, len, (int64_t)len, kk, 0, 8);
    };
    row("topk", "512 of 512K", graph_us([&](int) { topk(keys.p, n, k); }), 2.0 * n, 0);
    row("block_max", "512K", graph_us([&](int) { launch("attention/candidate_blocks:block_max", dim3(n / 8 / 256, 1), 256, 0, keys.p, span.p, bm.p, n, (int64_t)n, (int64_t)n / 8, 8); }), 2.25 * n, 0);
    row("topk", "2048 of 64K blocks", graph_us([&](int) { topk(bm.p, n / 8, 2048); }), n / 4.0, 0);
    row("topk_rows", "512 of 16K", graph_us([&](int) { launch("attention/topk_rows", dim3(1), 1024, 0, keys.p, span.p, (int*)nullptr, out.p, 16384, (int64_t)n, k, 0, 8); }), 32768, 0);
}

static void bench_hc() {
    int dim = 5120;
    for (int T : {1, 4, 64, 256, 4096}) {
        if (g_size && T != g_size) continue;
        int sets = T == 4096 ? 1 : 8, per = T <= 4 ? 1 : 8, groups = (T + per - 1) / per, slices = T == 1 ? 80 : 40;
        bool one = T <= 4;
        auto x = rand_bf16((size_t)T * dim), res = rand_bf16((size_t)T * 4 * dim), w = rand_bf16(dim);
        auto fn = make<Dev<float>>(sets, [&] { return rand_f32((size_t)24 * 4 * dim, 0.05f); });
        auto scale = rand_f32(3), base = rand_f32(24), cin = rand_f32((size_t)T * 24);
        Dev<bf16> stream((size_t)T * 4 * dim), out((size_t)T * dim), fake((size_t)T * dim), y((size_t)T * dim);
        Dev<float> coef((size_t)T * 24), part((size_t)T * slices * 32);
        Dev<uint32_t> cnt(groups);
        cnt.zero();
        auto finish = [&](int slices) {
            launch("hyperconn/hc_step:hc_finish", dim3(T), 128, 0, part.p, y.p, scale.p, base.p, w.p, coef.p, out.p, fake.p, (uint8_t*)nullptr, (uint8_t*)nullptr, slices, dim, 20, 1e-6f, 1e-20f);
        };
        double bytes = (double)T * dim * 2 * (1 + 4 + 4 + 2);
        if (T < 1000) {
            double us = graph_us([&](int i) {
                launch(T == 1 ? "hyperconn/hc_step:hc_step_few" : "hyperconn/hc_step", dim3(slices, groups), 256, 0, x.p, res.p, cin.p + 4, cin.p + 8, cin.p, fn[i % sets].p, scale.p, base.p, w.p, stream.p, coef.p, out.p, fake.p, (uint8_t*)nullptr, (uint8_t*)nullptr, y.p, part.p,
                       one ? cnt.p : nullptr, T, dim, per, 24, 20, 1e-6f, 1e-20f);
                if (!one) finish(slices);
            });
            row("hc_step", fmt("T%d", T), us, 24.0 * 4 * dim * 4 + bytes, 2.0 * T * 24 * 4 * dim);
        }
        if (T >= 64) {
            Dev<bf16> pieces((size_t)dim / 64 * 18432);
            launch("hyperconn/hc_many:hc_split_fn", dim3(dim / 64 * 72), 256, 0, fn[0].p, pieces.p, dim, (int64_t)dim / 64 * 18432);
            CUDA(cudaDeviceSynchronize());
            int groups = (T + 63) / 64, per = (80 * groups + 131) / 132;
            for (int slices : {(80 + per - 1) / per, (80 + 2 * per - 1) / (2 * per), T == 4096 ? 4 : 80}) {
                Dev<float> part((size_t)T * slices * 32);
                auto many = [&] { launch("hyperconn/hc_many", dim3(slices, groups), 512, 3 * 40960 + 2 * 36864, x.p, res.p, cin.p + 4, cin.p + 8, cin.p, pieces.p, stream.p, y.p, part.p, T, dim, 24); };
                auto end = [&] { launch("hyperconn/hc_step:hc_finish", dim3(T), 128, 0, part.p, y.p, scale.p, base.p, w.p, coef.p, out.p, fake.p, (uint8_t*)nullptr, (uint8_t*)nullptr, slices, dim, 20, 1e-6f, 1e-20f); };
                double us = graph_us([&](int) { many(); end(); }, T > 1000 ? 3 : 20);
                row("hc_many + finish", fmt("T%d, %d slices", T, slices), us, 72.0 * 4 * dim * 2 + bytes, 6.0 * T * 24 * 4 * dim);
                if (T > 1000) row("hc_many alone", fmt("T%d, %d slices", T, slices), graph_us([&](int) { many(); }, 3), bytes, 6.0 * T * 24 * 4 * dim);
            }
        }
    }
}

static void bench_small() {
    int dim = 5120;
    uint32_t rows = 16000000;
    auto codes = rand_u8((size_t)rows * 256, 1), scales = rand_u8((size_t)rows * 8, 2);
    uint8_t *mc, *ms, *pc, *ps;
    size_t hrows = 8000000;
    CUDA(cudaHostAlloc(&mc, hrows * 256, cudaHostAllocMapped));
    CUDA(cudaHostAlloc(&ms, hrows * 8, cudaHostAllocMapped));
    memset(ms, 120, hrows * 8);
    CUDA(cudaHostGetDevicePointer(&pc, mc, 0));
    CUDA(cudaHostGetDevicePointer(&ps, ms, 0));
    for (int T : {1, 4, 64, 1024}) {
        std::vector<Dev<uint32_t>> h, hh;
        for (int s = 0; s < 20; ++s) {
            std::vector<uint32_t> v(T * 24), u(T * 24);
            for (auto& x : v) x = pick(0, rows - 1);
            for (auto& x : u) x = pick(0, hrows - 1);
            h.emplace_back(v);
            hh.emplace_back(u);
        }
        Dev<bf16> o((size_t)T * 6144);
        auto go = [&](uint32_t* hash, uint8_t* c, uint8_t* s) { launch("engram/engram_lookup", dim3((T * 24 * 16 + 63) / 64), 64, 0, hash, c, s, o.p, T, 24, 24, 256, 0u, rows); };
        row("engram_lookup", fmt("T%d device", T), graph_us([&](int i) { go(h[i].p, codes.p, scales.p); }), T * 24 * 264.0 + T * 24 * 512.0, 0);
        row("engram_lookup", fmt("T%d mapped host", T), graph_us([&](int i) { go(hh[i].p, pc, ps); }), T * 24 * 264.0, 0);
    }
    CUDA(cudaFreeHost(mc));
    CUDA(cudaFreeHost(ms));
    auto st = rand_bf16(4 * dim), kv = rand_bf16(5 * dim), wq = rand_bf16(4 * dim), wk = rand_bf16(4 * dim), w = rand_bf16(dim), x = rand_bf16(dim);
    Dev<bf16> o(4 * dim), f(dim);
    row("engram_gate", "T1", graph_us([&](int) { launch("engram/engram_gate", dim3(4, 1), 256, 0, st.p, kv.p, wq.p, wk.p, (uint8_t*)nullptr, o.p, dim, 1e-20f, 0.014f); }), 40.0 * dim, 0);
    row("rms_norm", "T1 5120 + quant", graph_us([&](int) { launch("core/rms_norm", dim3(1), 640, 0, x.p, w.p, o.p, f.p, (uint8_t*)nullptr, (uint8_t*)nullptr, dim, (int64_t)dim, 1e-20f); }), 8.0 * dim, 0);
    auto gl = rand_f32(384, 4), gb = rand_f32(384);
    Dev<float> gw(6);
    Dev<uint32_t> ge(6);
    row("topk_gate", "T1 6 of 384", graph_us([&](int) { launch("moe/topk_gate", dim3(1), 128, 8 * 384, gl.p, gb.p, (float*)nullptr, (uint8_t*)nullptr, (uint32_t*)nullptr, gw.p, ge.p, 1, 384, 6, 2, 1.0f, 1, 1.5f); }), 3072, 0);
    auto lw = make<Dev<uint8_t>>(70, [&] { Dev<uint8_t> d(384 * 5120 * 2); fill_bf16<<<256, 256>>>((bf16*)d.p, 384 * 5120, next_seed(), 0.05f); return d; });
    Dev<float> lg(384);
    row("gate logits", "M1 5120->384 f32", graph_us([&](int i) { launch("core/bf16_linear:bf16_linear_f32_m8_t1", dim3(24, 1, 1), 256, 0, x.p, lw[i % 70].p, (uint8_t*)nullptr, lg.p, 1, 384, 5120); }), 384 * 5120 * 2.0, 0);
    auto hw = rand_bf16((size_t)129280 * 5120, 0.05f);
    Dev<float> logits(129280);
    row("head", "M1 5120->129280 f32", graph_us([&](int) { launch("core/bf16_linear:bf16_linear_f32_m8_t1", dim3(8080, 1, 1), 256, 0, x.p, (uint8_t*)hw.p, (uint8_t*)nullptr, logits.p, 1, 129280, 5120); }, 4), 129280.0 * 5120 * 2, 0);
    Dev<uint32_t> tok(1);
    Dev<uint64_t> work(2);
    work.zero();
    row("argmax", "129280", graph_us([&](int) { launch("core/argmax", dim3(63, 1), 256, 0, logits.p, tok.p, work.p, 129280); }), 129280 * 4.0, 0);
}

#include "bench_sm90.cuh"
#include "bench_layer.cuh"

int main(int argc, char** argv) {
    if (argc > 1) g_dir = argv[1];
    std::string only = argc > 2 ? argv[2] : "";
    if (argc > 3) g_size = atoi(argv[3]);
    cudaDeviceProp p;
    CUDA(cudaGetDeviceProperties(&p, 0));
    printf("%s, %d SMs; %% of %.0f GB/s and %.0f TFLOP/s\n", p.name, p.multiProcessorCount, CEIL_GBS, CEIL_TFLOPS);
    auto run = [&](const char* name, void (*f)()) { if (only.empty() || only == name) f(); };
    run("linear", bench_linear_small);
    run("experts", bench_experts);
    run("attn", bench_attn);
    run("index", bench_index);
    run("hc", bench_hc);
    run("small", bench_small);
    run("many", bench_many);
    run("experts_many", bench_experts_many);
    run("layer", bench_layer);
    CUDA(cudaDeviceSynchronize());
}
