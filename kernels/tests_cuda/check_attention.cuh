// sparse_attn, the steps before a cache, index scores, top-k.
#pragma once
#include "launch_attn.cuh"

struct AttnCase {
    Dev<bf16> q, kv[3];
    Dev<int> idx[3];
    Dev<float> sink;
    int n[3];
    Scopes scopes() const { return {{{kv[0].p, nullptr, idx[0].p, n[0], 0}, {kv[1].p, nullptr, idx[1].p, n[1], 0}, {kv[2].p, nullptr, idx[2].p, n[2], 0}}}; }
};
// holes: share of -1; the first query has no row at all, the second only its last one.
static AttnCase attn_case(int T, int H, int D, int n0, int n1, int n2, int rows, float holes, bool corner) {
    AttnCase c{rand_bf16((size_t)T * H * D), {rand_bf16((size_t)rows * D), rand_bf16((size_t)rows * D), rand_bf16((size_t)rows * D)}, {}, rand_f32(H, 2.0f), {n0, n1, n2}};
    for (int s = 0; s < 3; ++s) {
        std::vector<int> idx((size_t)T * c.n[s]);
        for (auto& v : idx) v = uniform(0, 1) < holes ? -1 : pick(0, rows - 1);
        if (corner)
            for (int t = 0; t < std::min(T, 2); ++t)
                for (int j = 0; j < c.n[s]; ++j) idx[(size_t)t * c.n[s] + j] = t == 1 && s == 2 && j == c.n[s] - 1 ? rows - 1 : -1;
        c.idx[s] = Dev<int>(idx);
    }
    return c;
}
static void check_sparse_attn(int T, int H, int D, int n0, int n1, int n2, int rows, int S, bool corner) {
    auto c = attn_case(T, H, D, n0, n1, n2, rows, 0.2f, corner);
    float scale = powf(D, -0.5f);
    int n = n0 + n1 + n2;
    Dev<bf16> out((size_t)T * H * D);
    Dev<float> po((size_t)S * T * H * D), ml((size_t)S * T * H * 2), want((size_t)T * H * D);
    Attn attn = {T, H, D, S};
    attn.run(c.q.p, c.scopes(), c.sink.p, out.p, po.p, ml.p, scale);
    CUDA(cudaFuncSetAttribute(ref_attn, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 * 1024));
    ref_attn<<<dim3(H, T), 128, n * 8>>>(c.q, c.kv[0], c.idx[0], n0, c.kv[1], c.idx[1], n1, c.kv[2], c.idx[2], n2, c.sink, want, H, D, scale);
    near("sparse_attn", fmt("T%d H%d D%d %d+%d+%d of %d split %d", T, H, D, n0, n1, n2, rows, S), out.get(), want.get(), 5e-3);
    if (D == 512) {
        out.poison(); po.poison(); ml.poison();
        attn.sm90 = true;
        attn.run(c.q.p, c.scopes(), c.sink.p, out.p, po.p, ml.p, scale);
        near("sparse_attn_sm90", fmt("T%d H%d D%d %d+%d+%d of %d split %d", T, H, D, n0, n1, n2, rows, S), out.get(), want.get(), 5e-3);
        for (int few : {16, 8}) {
            out.poison();
            attn.few = few;
            attn.run(c.q.p, c.scopes(), c.sink.p, out.p, po.p, ml.p, scale);
            near("sparse_attn_few", fmt("T%d H%d D%d %d+%d+%d of %d, clusters of %d", T, H, D, n0, n1, n2, rows, few), out.get(), want.get(), 5e-3);
        }
    }
    if (corner) {
        auto o = out.get();
        bool zero = true;
        for (int i = 0; i < H * D; ++i) zero &= to_f(o[i]) == 0.0f;
        report("sparse_attn", "no valid row gives 0", zero, "");
    }
}

// Rotation and the write of rows within attention, against launches of their own: the same bits.
static void check_attn_ends(int T, int H, int D, int rd, int n0, int n2, int S, bool sm90, int few = 0) {
    auto c = attn_case(T, H, D, n0, 1, n2, 300, 0.2f, false);
    auto cs = rand_f32((size_t)T * rd / 2), sn = rand_f32((size_t)T * rd / 2);
    auto kv = rand_bf16((size_t)T * D);
    std::vector<int> at(T);
    for (int t = 0; t < T; ++t) at[t] = t == 1 ? -1 : 2 * t + 3;
    Dev<int> rows(at);
    Dev<bf16> q((size_t)T * H * D), o((size_t)T * H * D), out((size_t)T * H * D), turned((size_t)T * H * D);
    Dev<float> po((size_t)S * T * H * D), ml((size_t)S * T * H * 2);
    float scale = powf(D, -0.5f);
    bf16* no = nullptr;
    uint8_t* nob = nullptr;
    auto rope = [&](bf16* from, bf16* to, int inverse) {
        launch("attention/norm_rope_quant", dim3((T * H + 3) / 4), 128, 0, from, no, cs.p, sn.p, (int*)nullptr, to, no, nob, nob, T, H, D, rd, 1e-20f, 0, inverse);
    };
    Attn attn = {T, H, D, S, sm90};
    attn.few = few;
    rope(c.q.p, q.p, 0);
    attn.run(q.p, c.scopes(), c.sink.p, o.p, po.p, ml.p, scale);
    rope(o.p, turned.p, 1);
    auto want = S > 1 ? turned.get() : o.get();
    std::string shape = fmt("T%d H%d D%d rope %d split %d%s", T, H, D, rd, S, few ? " few" : sm90 ? " sm90" : "");
    size_t row = 3 + 2 * (size_t)T;
    for (int kind = 0; kind < (S > 1 ? 4 : 1); ++kind) {
        int cd = kind == 0 ? 2 * D : kind == 1 ? D : D / 2, group = kind == 3 ? 16 : 32;
        auto pool = rand_u8(row * cd, 0), scales = rand_u8(row * D / group, 0);
        Dev<uint8_t> pool2(pool.get()), scales2(scales.get());
        if (kind) launch("attention/pack_rows", dim3(T), 128, 0, kv.p, rows.p, pool.p, scales.p, D, kind);
        else launch("attention/write_rows", dim3(T), 128, 0, (uint8_t*)kv.p, rows.p, pool.p, 2 * D);
        attn.angles = {cs.p, sn.p, rd};
        if (S > 1) attn.write = {kv.p, rows.p, pool2.p, scales2.p, kind};
        out.poison(); po.poison(); ml.poison();
        attn.run(c.q.p, c.scopes(), c.sink.p, out.p, po.p, ml.p, scale);
        same("sparse_attn turned", shape, out.get(), want);
        if (S == 1) continue;
        same("sparse_attn rows", shape + fmt(" kind %d", kind), pool2.get(), pool.get());
        same("sparse_attn rows", shape + fmt(" kind %d scales", kind), scales2.get(), scales.get());
    }
}

static void check_query_heads() {
    for (auto [N, K, D, rd, ks] : {std::tuple{32768, 1280, 512, 64, 1}, {4096, 1280, 128, 64, 4}, {200, 96, 64, 32, 1}, {100, 2336, 256, 128, 3}, {640, 5120, 64, 2, 8}}) {
        auto both = rand_bf16(K + D), norm = rand_bf16(K), kvn = rand_bf16(D);
        auto w = rand_u8((size_t)N * K, 1), s = rand_u8((size_t)(N + 31) / 32 * (K / 32), 2);
        auto c = rand_f32(rd / 2), sn = rand_f32(rd / 2);
        Dev<bf16> y(K), q(N), q2(N), row(D), row2(D);
        bf16* no = nullptr;
        uint8_t* nob = nullptr;
        launch("core/rms_norm", dim3(1), std::min(1024, (K / 8 + 31) / 32 * 32), 0, both.p, norm.p, y.p, no, nob, nob, K, (int64_t)K, 1e-20f);
        launch_as({ks, false, g_overlap}, "quant/fp8_few_sm90:fp8_few_raw_m1", dim3((N + 127) / 128 * ks), 256, few_smem(K, ks, 1, false), y.p, w.p, s.p, q.p, 1, N, K);
        launch("attention/norm_rope_quant", dim3(1), 128, 0, both.p + K, kvn.p, c.p, sn.p, (int*)nullptr, row.p, no, nob, nob, 1, 1, D, rd, 1e-20f, 1, 0);
        launch_query_heads(ks, N, K, D, rd, both.p, norm.p, w.p, s.p, q2.p, both.p + K, kvn.p, c.p, sn.p, row2.p);
        std::string shape = fmt("N%d K%d D%d rope %d, clusters of %d", N, K, D, rd, ks);
        same("query_heads", shape, q2.get(), q.get());
        same("query_heads row", shape, row2.get(), row.get());
        q2.poison();
        launch_query_heads(ks, N, K, D, rd, both.p, norm.p, w.p, s.p, q2.p, no, no, nullptr, nullptr, no);
        same("query_heads alone", shape, q2.get(), q.get());
    }
}
static void check_norm_rope_quant() {
    for (auto [T, H, D, rd] : {std::tuple{3, 1, 512, 64}, {5, 3, 64, 16}, {2, 32, 128, 64}, {7, 1, 96, 32}})
        for (int kind = 0; kind < 4; ++kind)
            for (int norm = 0; norm < 2; ++norm) {
                int N = T * H, group = kind == 3 ? 16 : 32, cd = kind == 1 ? D : D / 2;
                auto x = rand_bf16((size_t)N * D), w = rand_bf16(D);
                std::vector<float> cs, sn;
                for (int i = 0; i < T * rd / 2; ++i) { float a = uniform(-4, 4); cs.push_back(cosf(a)); sn.push_back(sinf(a)); }
                Dev<float> dc(cs), ds(sn);
                Dev<bf16> out((size_t)N * D), pool((size_t)N * D);
                Dev<uint8_t> codes((size_t)N * cd), scales((size_t)N * D / group);
                // The pool form needs one vector a token; with heads, codes are laid out densely.
                std::vector<int> rows(T);
                for (int t = 0; t < T; ++t) rows[t] = t == 1 ? -1 : T - 1 - t;
                Dev<int> dr(rows);
                bool pooled = H == 1;
                launch("attention/norm_rope_quant", dim3((N + 3) / 4), 128, 0, x.p, norm ? w.p : nullptr, dc.p, ds.p, pooled ? dr.p : nullptr, out.p, pooled ? pool.p : nullptr,
                       kind ? codes.p : nullptr, kind ? scales.p : nullptr, T, H, D, rd, 1e-20f, kind, 0);
                auto hx = x.get(), hw = w.get(), ho = out.get();
                std::vector<float> want;
                for (int v = 0; v < N; ++v) {
                    std::vector<float> a(D);
                    double s = 0;
                    for (int d = 0; d < D; ++d) s += (double)to_f(hx[v * D + d]) * to_f(hx[v * D + d]);
                    for (int d = 0; d < D; ++d) {
                        a[d] = to_f(hx[v * D + d]);
                        if (norm) a[d] = to_f(__float2bfloat16((float)(to_f(hw[d]) * (a[d] / sqrt(s / D + 1e-20)))));
                    }
                    for (int p = 0; p < rd / 2; ++p) {
                        float c = cs[v / H * rd / 2 + p], n = sn[v / H * rd / 2 + p], re = a[D - rd + 2 * p], im = a[D - rd + 2 * p + 1];
                        a[D - rd + 2 * p] = to_f(__float2bfloat16(re * c - im * n));
                        a[D - rd + 2 * p + 1] = to_f(__float2bfloat16(re * n + im * c));
                    }
                    for (int g = 0; g < D / group && kind; ++g) {
                        float m = 0;
                        for (int i = 0; i < group; ++i) m = fmaxf(m, fabsf(a[g * group + i]));
                        float sc = kind == 1 ? pow2ceil(fmaxf(m, 1e-4f) * (1.0f / 448.0f)) : kind == 2 ? pow2ceil(fmaxf(m, 6 * 0x1p-126f) * (1.0f / 6.0f)) : h_e4m3(h_enc4(fmaxf(m, 6 * 0x1p-9f) / 6.0f));
                        for (int i = 0; i < group; ++i) {
                            float& y = a[g * group + i];
                            y = kind == 1 ? h_e4m3(h_enc4(y / sc)) * sc : h_e2m1(h_enc2(y / sc)) * sc;
                        }
                    }
                    want.insert(want.end(), a.begin(), a.end());
                }
                std::string shape = fmt("T%d H%d D%d rd%d kind %d%s", T, H, D, rd, kind, norm ? " norm" : "");
                // A norm or rotation one ulp apart can cross a code boundary: exact otherwise.
                near("norm_rope_quant", shape, ho, want, kind >= 2 ? 3e-2 : kind == 1 ? 1e-2 : 2e-3);
                if (pooled) {
                    auto hp = pool.get();
                    bool ok = true;
                    for (int t = 0; t < T; ++t)
                        if (rows[t] >= 0) ok &= !memcmp(&hp[rows[t] * D], &ho[t * D], D * 2);
                    report("norm_rope_quant pool", shape, ok, "rows in place");
                }
                if (kind) {
                    auto hc = codes.get(), hs = scales.get();
                    bool ok = true;
                    for (int v = 0; v < N; ++v) {
                        int r = pooled ? rows[v] : v;
                        if (r < 0) continue;
                        for (int d = 0; d < D; ++d) {
                            float sc = kind == 3 ? h_e4m3(hs[r * (D / group) + d / group]) : ldexpf(1, hs[r * (D / group) + d / group] - 127);
                            float y = kind == 1 ? h_e4m3(hc[r * D + d]) * sc : h_e2m1(hc[r * cd + d / 2] >> (4 * (d & 1)) & 15) * sc;
                            ok &= y == to_f(ho[v * D + d]);
                        }
                    }
                    report("norm_rope_quant codes", shape, ok, "packed form equals the bf16 one");
                }
            }
}

static void check_cache() {
    std::vector<int> rows = {4, -1, 0, 7};
    Dev<int> dr(rows);
    auto src = rand_u8(4 * 68, 0), pool = rand_u8(9 * 68, 0);
    auto want = pool.get(), hs = src.get();
    for (int i = 0; i < 4; ++i)
        if (rows[i] >= 0) std::copy(hs.begin() + i * 68, hs.begin() + (i + 1) * 68, want.begin() + rows[i] * 68);
    launch("attention/write_rows", dim3(4), 128, 0, src.p, dr.p, pool.p, 68);
    same("write_rows", "4 rows of 68 bytes, one skipped", pool.get(), want);
    for (auto [G, D, r] : {std::tuple{3, 96, 2}, {2, 512, 2}, {1, 64, 4}}) {
        auto kv = rand_f32((size_t)G * r * D, 3), sc = rand_f32((size_t)G * r * D, 5), pk = rand_f32((size_t)4 * D, 3), ps = rand_f32((size_t)4 * D, 5);
        auto w = rand_bf16(D);
        std::vector<int> from(G * r);
        for (int i = 0; i < G * r; ++i) from[i] = i == 0 ? -2 - 3 : i - 1;
        Dev<int> df(from);
        Dev<bf16> out((size_t)G * D);
        launch("attention/compress", dim3(G), std::min(512, (D + 31) / 32 * 32), 4 * D, kv.p, sc.p, pk.p, ps.p, df.p, w.p, out.p, D, r, 1e-20f);
        auto hk = kv.get(), hsc = sc.get(), hpk = pk.get(), hps = ps.get();
        auto hw = w.get();
        std::vector<float> wv;
        for (int g = 0; g < G; ++g) {
            std::vector<double> v(D);
            double sq = 0;
            for (int d = 0; d < D; ++d) {
                double m = -1e30, sum = 0, o = 0;
                auto S = [&](int i) { int x = from[g * r + i]; return x >= 0 ? hsc[x * D + d] : hps[(-2 - x) * D + d]; };
                auto K = [&](int i) { int x = from[g * r + i]; return x >= 0 ? hk[x * D + d] : hpk[(-2 - x) * D + d]; };
                for (int i = 0; i < r; ++i) m = std::max(m, (double)S(i));
                for (int i = 0; i < r; ++i) sum += exp(S(i) - m);
                for (int i = 0; i < r; ++i) o += K(i) * exp(S(i) - m) / sum;
                v[d] = to_f(__float2bfloat16((float)o));
                sq += v[d] * v[d];
            }
            for (int d = 0; d < D; ++d) wv.push_back((float)(to_f(hw[d]) * v[d] / sqrt(sq / D + 1e-20)));
        }
        near("compress", fmt("G%d D%d r%d", G, D, r), out.get(), wv, ONE_ROUNDING);
    }
}

static void check_attention() {
    check_norm_rope_quant();
    check_cache();
    check_sparse_attn(3, 5, 64, 7, 3, 48, 100, 1, true);
    check_sparse_attn(3, 5, 64, 7, 3, 48, 100, 3, true);
    check_sparse_attn(4, 8, 96, 65, 0, 33, 200, 1, true);
    check_sparse_attn(2, 64, 512, 128, 1, 512, 3000, 1, false);
    check_sparse_attn(1, 64, 512, 128, 1, 512, 3000, 10, false);
    check_sparse_attn(5, 64, 512, 100, 128, 300, 3000, 20, true);
    check_sparse_attn(5, 64, 512, 100, 128, 300, 3000, 3, true);
    check_sparse_attn(3, 37, 512, 30, 20, 80, 3000, 1, true);
    check_sparse_attn(300, 64, 512, 128, 1, 512, 3000, 1, false);
    check_sparse_attn(2, 5, 512, 3, 0, 9, 300, 1, true);
    check_sparse_attn(1, 64, 512, 700, 1, 2500, 3000, 1, false);
    check_query_heads();
    for (bool sm90 : {false, true})
        for (int S : {1, 3, 10}) check_attn_ends(S == 3 ? 5 : 1, 37, 512, S == 3 ? 32 : 64, 128, 512, S, sm90);
    for (int few : {16, 8}) {
        check_attn_ends(1, 64, 512, 64, 128, 512, 2, false, few);
        check_attn_ends(19, 37, 512, 32, 30, 80, 2, false, few);
    }
    check_attn_ends(3, 5, 96, 32, 65, 33, 3, false);
    check_attn_ends(2, 8, 64, 64, 20, 33, 2, false);
}

static float unsort(uint16_t k) {
    if (k == 0) return -INFINITY;
    uint32_t b = k & 0x8000 ? k ^ 0x8000 : (uint16_t)~k;
    uint32_t u = b << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
// sm90: the form for 32 heads of 128; coded: queries as the indexer makes them.
static void check_scores(int T, int H, int D, int n, int tq, bool packed, bool cand, bool sm90 = false, bool coded = false) {
    int rows = n + 50, block = 8, B = cand ? 5 : 0;
    auto q = rand_bf16((size_t)T * H * D);
    if (coded) {
        Dev<bf16> fp4((size_t)T * H * D);
        launch("quant/fake_quant_fp4", dim3((T * H * D + 255) / 256), 256, 0, q.p, fp4.p, (uint8_t*)nullptr, (uint8_t*)nullptr, (int64_t)T * H * D, 32);
        CUDA(cudaDeviceSynchronize());
        q = std::move(fp4);
    }
    auto w = rand_bf16((size_t)T * H, 0.1f), keys = rand_bf16((size_t)rows * D);
    auto codes = rand_u8((size_t)rows * D / 2, 0), scales = rand_u8((size_t)rows * D / 32, 2);
    std::vector<int2> spans(T);
    for (int t = 0; t < T; ++t) spans[t] = {cand ? t % 3 : 7, t == 0 ? 0 : t == 1 ? n : pick(1, n)};
    if (T == 1) spans[0].y = n - 3;
    std::vector<int> blocks((size_t)T * B);
    for (int t = 0; t < T && cand; ++t) {
        int id = 0;
        for (int b = 0; b < B; ++b) { blocks[t * B + b] = b == B - 1 && t % 2 ? -1 : id; id += pick(1, 3); }
    }
    Dev<int2> ds(spans);
    Dev<int> db(blocks);
    int cols = cand ? B * block : n, ld = cols + 5;
    Dev<uint16_t> out((size_t)T * ld);
    Dev<uint32_t> counts((size_t)T * 2048);
    counts.zero();
    int nts = (H + 15) / 16 * 2;
    if (sm90) launch("attention/index_scores_sm90", dim3(5, T), 256, 4096 + 8 * 4 * 2176, q.p, w.p, codes.p, scales.p, ds.p, out.p, counts.p, T, cols, (int64_t)ld);
    else launch(packed ? "attention/index_scores:index_scores_fp4" : "attention/index_scores:index_scores_bf16", dim3(3, (T + tq - 1) / tq), 256, tq * nts * 2064, q.p, w.p,
           packed ? codes.p : (uint8_t*)keys.p, scales.p, ds.p, cand ? db.p : nullptr, out.p, T, H, D, cols, (int64_t)ld, tq, B, block);
    Dev<float> ref((size_t)T * n);
    ref_scores<<<((size_t)T * n + 127) / 128, 128>>>(q, w, keys, packed ? codes.p : nullptr, scales, ds, ref, T, H, D, n);
    auto got = out.get();
    auto want = ref.get();
    if (sm90) {
        std::vector<uint32_t> each((size_t)T * 2048);
        for (int t = 0; t < T; ++t)
            for (int c = 0; c < cols; ++c)
                if (uint16_t key = got[(size_t)t * ld + c]) ++each[(size_t)t * 2048 + (key >> 5)];
        same("index_scores_sm90 counts", fmt("T%d n%d", T, n), counts.get(), each);
    }
    size_t off = 0, bad = 0, total = 0;
    for (int t = 0; t < T; ++t)
        for (int c = 0; c < cols; ++c) {
            int pos = cand ? (blocks[t * B + c / block] < 0 ? -1 : blocks[t * B + c / block] * block + c % block) : c;
            float g = unsort(got[(size_t)t * ld + c]), x = pos < 0 || pos >= n ? -INFINITY : want[(size_t)t * n + pos];
            ++total;
            if (g == x) continue;
            if (std::isinf(g) != std::isinf(x) || fabsf(g - x) > 0.03f * std::max(1.0f, fabsf(x))) ++bad;
            else ++off;
        }
    report(sm90 ? "index_scores_sm90" : "index_scores", fmt("%s T%d H%d D%d n%d tq%d%s%s", packed ? "fp4" : "bf16", T, H, D, n, tq, cand ? " cand" : "", coded ? " coded" : ""), bad == 0 && off <= total / 10 + 2,
           fmt("%zu of %zu a rounding apart, %zu wrong", off, total, bad));
}
static void check_topk(int T, int n, int k, int distinct, bool cand) {
    int block = 8, B = (n + block - 1) / block, ld = (n + 7) / 8 * 8 + 8;
    std::vector<uint16_t> keys((size_t)T * ld, 0);
    for (auto& v : keys) v = pick(0, 9) == 0 ? 0 : 0x8000 + 0x3c00 + pick(0, distinct);
    std::vector<int2> spans(T);
    for (int t = 0; t < T; ++t) spans[t] = {t * 1000, n};
    if (T > 1) for (int i = 0; i < n; ++i) keys[ld + i] = i % 97 == 5 ? 0x9000 : 0;  // fewer than k reachable
    std::vector<int> blocks((size_t)T * B);
    for (int t = 0; t < T; ++t) for (int b = 0; b < B; ++b) blocks[t * B + b] = b * 2 + t;
    Dev<uint16_t> dk(keys);
    Dev<int2> ds(spans);
    Dev<int> db(blocks), out((size_t)T * k);
    std::vector<int> want;
    for (int t = 0; t < T; ++t) {
        std::vector<std::pair<int, int>> o;
        for (int i = 0; i < n; ++i) if (keys[(size_t)t * ld + i]) o.push_back({-(int)keys[(size_t)t * ld + i], i});
        std::sort(o.begin(), o.end());
        o.resize(std::min<size_t>(o.size(), k));
        std::vector<int> p;
        for (auto [_, i] : o) p.push_back(t * 1000 + (cand ? blocks[t * B + i / block] * block + i % block : i));
        std::sort(p.begin(), p.end());
        p.resize(k, -1);
        want.insert(want.end(), p.begin(), p.end());
    }
    std::string shape = fmt("T%d n%d k%d distinct %d%s", T, n, k, distinct, cand ? " cand" : "");
    if (n <= 32768) {
        launch("attention/topk_rows", dim3(T), 1024, 0, dk.p, ds.p, cand ? db.p : nullptr, out.p, n, (int64_t)ld, k, B, block);
        same("topk_rows", shape, out.get(), want);
    }
    int parts = (n + 8191) / 8192;
    Dev<uint32_t> hist((size_t)T * 2048), part((size_t)T * parts * 33), header(2 * T);
    hist.zero();
    for (int again = 0; again < 2; ++again) {
        out.poison();
        launch("attention/topk_rows:topk_part_hist", dim3(parts, T), 256, 0, dk.p, hist.p, n, (int64_t)ld);
        launch("attention/topk_rows:topk_part_count", dim3(parts, T), 256, 0, dk.p, hist.p, part.p, header.p, n, (int64_t)ld, k);
        launch("attention/topk_rows:topk_part_write", dim3(parts, T), 256, 0, dk.p, hist.p, part.p, header.p, ds.p, cand ? db.p : nullptr, out.p, n, (int64_t)ld, k, B, block);
    }
    same("topk_part", shape, out.get(), want);
    if (parts * T > 264) return;
    Dev<uint32_t> counter(2);
    counter.zero();
    for (int again = 0; again < 2; ++again) {
        out.poison();
        launch_cooperative("attention/topk_rows:topk_part_once", dim3(parts, T), 256, 0, dk.p, hist.p, part.p, counter.p, ds.p, cand ? db.p : nullptr, out.p, n, (int64_t)ld, k, B, block, 0);
    }
    same("topk_part_once", shape, out.get(), want);
}
static void check_index() {
    for (bool coded : {true, false}) {
        check_scores(1, 32, 128, 1000, 1, true, false, true, coded);
        check_scores(3, 32, 128, 5003, 1, true, false, true, coded);
    }
    check_scores(1, 32, 128, 70001, 1, true, false, true, true);
    for (bool packed : {true, false}) {
        check_scores(1, 32, 128, 1000, 1, packed, false);
        check_scores(3, 27, 96, 1500, 1, packed, false);
        check_scores(5, 32, 128, 200, 1, packed, true);
        check_scores(5, 4, 64, 77, 1, packed, false);
        check_scores(7, 5, 32, 300, 4, packed, false);
        check_scores(9, 32, 128, 513, 4, packed, false);
        check_scores(4, 16, 96, 200, 1, packed, true);
    }
    check_topk(3, 5, 4, 3, false);
    check_topk(3, 300, 48, 20, false);
    check_topk(3, 1000, 512, 3000, true);
    check_topk(2, 20001, 512, 100, false);
    check_topk(2, 32768, 2048, 60, false);
    check_topk(2, 524288, 512, 2000, false);
    check_topk(2, 100003, 512, 5, true);
    int T = 4, n = 77, block = 8, nb = 10;
    std::vector<uint16_t> keys(T * 80);
    for (auto& k : keys) k = pick(1, 60000);
    std::vector<int2> spans = {{0, 0}, {0, 1}, {0, 77}, {0, 33}};
    Dev<uint16_t> dk(keys), out(T * nb);
    Dev<int2> ds(spans);
    launch("attention/candidate_blocks:block_max", dim3(1, T), 256, 0, dk.p, ds.p, out.p, n, (int64_t)80, (int64_t)nb, block);
    std::vector<uint16_t> want;
    for (int t = 0; t < T; ++t)
        for (int b = 0; b < nb; ++b) {
            uint16_t m = 0;
            for (int i = b * 8; i < std::min({b * 8 + 8, n, spans[t].y}); ++i) m = std::max(m, keys[t * 80 + i]);
            want.push_back(spans[t].y > 0 && (spans[t].y - 1) / block == b ? 65535 : m);
        }
    same("block_max", "77 positions, blocks of 8", out.get(), want);
}
