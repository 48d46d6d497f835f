// check: every kernel on fresh random data, at odd and at released shapes, against plain references.
//
//     check FATBIN_DIR            prints one line a case; exit status 1 if any fails
#include "reference.cuh"

static const char* FORMAT[] = {"fp8", "fp4", "bf16"};
static int64_t wbytes(int f, int64_t n, int64_t k) { return f == 1 ? n * k / 2 : f == 2 ? n * k * 2 : n * k; }
static int64_t sbytes(int f, int64_t n, int64_t k) { return f == 0 ? (n + 31) / 32 * (k / 32) : f == 1 ? n * (k / 32) : 1; }
static Dev<uint8_t> rand_weight(int f, size_t bytes) {
    if (f != 2) return rand_u8(bytes, f == 0 ? 1 : 0);
    Dev<uint8_t> d(bytes);
    fill_bf16<<<1024, 256>>>((bf16*)d.p, bytes / 2, next_seed(), 0.05f);
    CUDA(cudaDeviceSynchronize());
    return d;
}

// ---- formats ----
__global__ void formats_kernel(float* d4, float* d8, float* d2, uint8_t* e4, uint8_t* e2, const float* in, int n) {
    int i = threadIdx.x;
    d4[i] = e4m3_to_f32(i); d8[i] = e8m0_to_f32(i); d2[i] = e2m1_to_f32(i & 15);
    for (int j = i; j < n; j += 256) { e4[j] = f32_to_e4m3(in[j]); e2[j] = f32_to_e2m1(fminf(fmaxf(in[j], -6.0f), 6.0f)); }
}
static float h_e4m3(int c) {
    int e = c >> 3 & 15, m = c & 7;
    if ((c & 127) == 127) return NAN;
    float v = e ? ldexpf(1 + m / 8.0f, e - 7) : ldexpf(m / 8.0f, -6);
    return c & 128 ? -v : v;
}
static float h_e2m1(int c) {
    static const float t[] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
    return c & 8 ? -t[c & 7] : t[c & 7];
}
// Nearest code of a magnitude, ties to the even one.
template <typename F>
static int nearest(float v, int codes, F value) {
    int best = 0;
    for (int c = 0; c < codes; ++c) {
        double a = fabs((double)value(c) - fabs((double)v)), b = fabs((double)value(best) - fabs((double)v));
        if (a < b || (a == b && !(c & 1))) best = c;
    }
    return best;
}
static int h_enc4(float v) { return nearest(fabsf(fminf(fmaxf(v, -448.f), 448.f)), 127, h_e4m3) | (signbit(v) ? 128 : 0); }
static int h_enc2(float v) { return nearest(fabsf(fminf(fmaxf(v, -6.f), 6.f)), 8, h_e2m1) | (signbit(v) ? 8 : 0); }
static void check_formats() {
    std::vector<float> in;
    for (int c = 0; c < 127; ++c)
        for (float s : {1.f, -1.f}) {
            float a = h_e4m3(c), b = c < 126 ? h_e4m3(c + 1) : 480.f;
            for (float v : {a, (a + b) / 2, nextafterf((a + b) / 2, 0), nextafterf((a + b) / 2, 1e9f)}) in.push_back(s * v);
        }
    for (float v : {.25f, .75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.f, 7.f, 1e-30f, 1e30f, 0.f, -0.f}) { in.push_back(v); in.push_back(-v); }
    for (int i = 0; i < 4000; ++i) in.push_back(normal() * expf(uniform(-12, 8)));
    Dev<float> d4(256), d8(256), d2(256), din(in);
    Dev<uint8_t> e4(in.size()), e2(in.size());
    formats_kernel<<<1, 256>>>(d4, d8, d2, e4, e2, din, (int)in.size());
    std::vector<float> w4, w8, w2;
    for (int c = 0; c < 256; ++c) { w4.push_back(h_e4m3(c)); w8.push_back(c == 255 ? NAN : ldexpf(1, c - 127)); w2.push_back(h_e2m1(c & 15)); }
    auto canon = [](std::vector<float> v) { for (auto& x : v) if (x != x) x = 12345.f; return v; };
    same("formats", "e4m3 decode, 256 codes", canon(d4.get()), canon(w4));
    same("formats", "e8m0 decode, 256 bytes", canon(d8.get()), canon(w8));
    same("formats", "e2m1 decode", d2.get(), w2);
    std::vector<uint8_t> q4, q2;
    for (float v : in) { q4.push_back(h_enc4(v)); q2.push_back(h_enc2(v)); }
    same("formats", fmt("e4m3 encode, %zu values", in.size()), e4.get(), q4);
    same("formats", "e2m1 encode", e2.get(), q2);
}

// ---- quantisation ----
static std::vector<bf16> quant_input(size_t n) {
    std::vector<bf16> x(n);
    for (size_t i = 0; i < n; ++i) x[i] = __float2bfloat16(normal() * expf(uniform(-6, 4)));
    for (size_t i = 0; i < std::min<size_t>(n, 32); ++i) x[i] = __float2bfloat16(i == 3 ? -0.f : 0.f);
    return x;
}
static float pow2ceil(float t) { int e; float m = frexpf(t, &e); return ldexpf(1, m == 0.5f ? e - 1 : e); }
static void check_quant() {
    for (auto [T, K] : {std::pair{1, 32}, {3, 96}, {7, 160}, {33, 5120}}) {
        size_t n = (size_t)T * K;
        auto x = quant_input(n);
        Dev<bf16> dx(x), fake(n);
        Dev<uint8_t> codes(n), scales(n / 32);
        launch("quant/act_quant", dim3((n / 8 + 255) / 256), 256, 0, dx.p, codes.p, scales.p, fake.p, (int64_t)(n / 8));
        std::vector<uint8_t> wc(n), ws(n / 32);
        std::vector<bf16> wf(n);
        for (size_t g = 0; g < n / 32; ++g) {
            float a = 0;
            for (int i = 0; i < 32; ++i) a = fmaxf(a, fabsf(to_f(x[g * 32 + i])));
            float s = pow2ceil(fmaxf(a, 1e-4f) * (1.0f / 448.0f));
            int e; frexpf(s, &e);
            ws[g] = e - 1 + 127;
            for (int i = 0; i < 32; ++i) {
                wc[g * 32 + i] = h_enc4(to_f(x[g * 32 + i]) / s);
                wf[g * 32 + i] = __float2bfloat16(h_e4m3(wc[g * 32 + i]) * s);
            }
        }
        same("act_quant codes", fmt("%dx%d", T, K), codes.get(), wc);
        same("act_quant scales", fmt("%dx%d", T, K), scales.get(), ws);
        same("act_quant fake", fmt("%dx%d", T, K), fake.get(), wf);
        for (int group : {32, 16}) {
            Dev<bf16> out(n);
            Dev<uint8_t> c4(n / 2), s4(n / group);
            launch("quant/fake_quant_fp4", dim3((n + 255) / 256), 256, 0, dx.p, out.p, c4.p, s4.p, (int64_t)n, group);
            std::vector<bf16> wo(n);
            std::vector<uint8_t> wp(n / 2);
            for (size_t g = 0; g < n / group; ++g) {
                float a = 0, s;
                for (int i = 0; i < group; ++i) a = fmaxf(a, fabsf(to_f(x[g * group + i])));
                if (group == 32) s = pow2ceil(fmaxf(a, 6 * 0x1p-126f) * (1.0f / 6.0f));
                else s = h_e4m3(h_enc4(fmaxf(a, 6 * 0x1p-9f) / 6.0f));
                for (int i = 0; i < group; ++i) {
                    size_t j = g * group + i;
                    int c = h_enc2(fminf(fmaxf(to_f(x[j]) / s, -6.f), 6.f));
                    wo[j] = __float2bfloat16(h_e2m1(c) * s);
                    wp[j / 2] = j & 1 ? wp[j / 2] | c << 4 : c;
                }
            }
            same("fake_quant_fp4", fmt("%dx%d group %d", T, K, group), out.get(), wo);
            same("fake_quant_fp4 codes", fmt("%dx%d group %d", T, K, group), c4.get(), wp);
        }
        for (int fp4 : {0, 1}) {
            int kp = fp4 ? (K + 127) / 128 * 128 : (K + 63) / 64 * 64, rp = (T + 7) / 8 * 8;
            std::vector<int> rows(T);
            for (int i = 0; i < T; ++i) rows[i] = (i * 5 + 2) % T;
            Dev<int> dr(rows);
            Dev<bf16> tiled((size_t)rp * kp);
            launch("quant/act_quant:act_quant_tiled", dim3(T), 256, kp * 2, dx.p, dr.p, 1, tiled.p, K, (int64_t)K, (int64_t)rp, fp4, 1);
            auto got = tiled.get();
            std::vector<bf16> a, b;
            for (int r = 0; r < T; ++r)
                for (int s = 0; s < kp; ++s) {
                    int kb = s / 64, u = s % 64 / 8, j = fp4 ? s % 128 >> 4 : s % 64 >> 4, q = s >> 1 & 3, h = s >> 3 & 1, i = s & 1;
                    int k = fp4 ? s / 128 * 128 + q * 32 + (j >> 1) * 8 + (j & 1) * 2 + h + 4 * i : kb * 64 + q * 16 + j * 4 + h * 2 + i;
                    a.push_back(got[((size_t)kb * rp + r) * 64 + ((u ^ (r & 7)) * 8) + s % 8]);
                    b.push_back(k < K ? wf[(size_t)rows[r] * K + k] : __float2bfloat16(0));
                }
            same("act_quant_tiled", fmt("%dx%d %s", T, K, fp4 ? "fp4" : "fp8"), a, b);
        }
    }
}

static void check_norm() {
    for (auto [T, dim] : {std::pair{1, 32}, {3, 96}, {5, 1280}, {4, 5120}}) {
        auto x = rand_bf16((size_t)T * dim), w = rand_bf16(dim);
        CUDA(cudaMemset(x.p, 0, dim * 2));  // a zero row
        Dev<bf16> y((size_t)T * dim), fake((size_t)T * dim), want_fake((size_t)T * dim);
        Dev<uint8_t> codes((size_t)T * dim), scales((size_t)T * dim / 32), wcodes((size_t)T * dim), wscales((size_t)T * dim / 32);
        launch("core/rms_norm", dim3(T), std::min(1024, (dim / 8 + 31) / 32 * 32), 0, x.p, w.p, y.p, fake.p, codes.p, scales.p, dim, (int64_t)dim, 1e-20f);
        auto hx = x.get(), hw = w.get();
        std::vector<float> want;
        for (int t = 0; t < T; ++t) {
            double s = 0;
            for (int d = 0; d < dim; ++d) s += (double)to_f(hx[t * dim + d]) * to_f(hx[t * dim + d]);
            for (int d = 0; d < dim; ++d) want.push_back(to_f(hw[d]) * (to_f(hx[t * dim + d]) / sqrt(s / dim + 1e-20)));
        }
        near("rms_norm", fmt("%dx%d", T, dim), y.get(), want, ONE_ROUNDING);
        launch("quant/act_quant", dim3((T * dim / 8 + 255) / 256), 256, 0, y.p, wcodes.p, wscales.p, want_fake.p, (int64_t)(T * dim / 8));
        same("rms_norm codes", fmt("%dx%d", T, dim), codes.get(), wcodes.get());
        same("rms_norm scales", fmt("%dx%d", T, dim), scales.get(), wscales.get());
        same("rms_norm fake", fmt("%dx%d", T, dim), fake.get(), want_fake.get());
    }
    {
        auto x = rand_bf16(1000), got = rand_bf16(1000);
        launch("core/scale_bf16", dim3(8), 128, 0, x.p, got.p, (int64_t)1000, 0.022097087f);
        std::vector<bf16> want;
        for (auto v : x.get()) want.push_back(__float2bfloat16(to_f(v) * 0.022097087f));
        same("scale_bf16", "1000", got.get(), want);
    }
    auto table = rand_bf16(50 * 96);
    std::vector<uint32_t> ids = {3, 49, 0, 60, 17};
    Dev<uint32_t> di(ids);
    Dev<bf16> e(5 * 4 * 96);
    launch("core/embedding", dim3(5), 256, 0, di.p, table.p, e.p, 96, 4, 0u, 50u);
    auto ht = table.get();
    std::vector<bf16> want;
    for (auto id : ids)
        for (int c = 0; c < 4; ++c)
            for (int d = 0; d < 96; ++d) want.push_back(id < 50 ? ht[id * 96 + d] : __float2bfloat16(0));
    same("embedding", "5 ids, 4 copies, one outside", e.get(), want);
}

static Dev<float> reference_linear(int f, const bf16* x, const uint8_t* w, const uint8_t* s, int M, int N, int K, int G) {
    Dev<float> y((size_t)M * N * G);
    ref_linear<<<((size_t)M * N * G + 127) / 128, 128>>>(f, x, w, s, y, M, N, K, G);
    CUDA(cudaDeviceSynchronize());
    return y;
}
static void check_linear() {
    struct Case { int M, N, K, G; };
    for (int f = 0; f < 3; ++f)
        for (Case c : {Case{1, 5, 32, 1}, {3, 96, 96, 1}, {8, 130, 160, 1}, {13, 33, 1280, 3}, {9, 1024, 4096, 2}, {70, 257, 736, 1}, {1, 1280, 5120, 1}, {16, 512, 5120, 1}}) {
            auto w = rand_weight(f, wbytes(f, c.N, c.K) * c.G);
            auto s = rand_u8(sbytes(f, c.N, c.K) * c.G, 2);
            auto x = rand_bf16((size_t)c.M * c.K * c.G);
            auto want = reference_linear(f, x, w, s, c.M, c.N, c.K, c.G).get();
            for (auto [m, t] : {std::pair{8, 1}, {8, 2}, {16, 1}, {16, 2}, {32, 2}}) {
                Dev<bf16> y((size_t)c.M * c.N * c.G);
                dim3 grid((c.N + 16 * t - 1) / (16 * t), (c.M + m - 1) / m, c.G);
                std::string name = f == 0 ? "quant/fp8_linear:fp8_linear" : f == 1 ? "quant/fp4_linear:fp4_linear" : "core/bf16_linear:bf16_linear";
                launch(name + fmt("_m%d_t%d", m, t), grid, 256, 0, x.p, w.p, s.p, y.p, c.M, c.N, c.K);
                near(fmt("%s_linear_m%d_t%d", FORMAT[f], m, t), fmt("M%d N%d K%d G%d", c.M, c.N, c.K, c.G), y.get(), want, ONE_ROUNDING);
                if (f == 2) {
                    Dev<float> yf((size_t)c.M * c.N * c.G);
                    launch(fmt("core/bf16_linear:bf16_linear_f32_m%d_t%d", m, t), grid, 256, 0, x.p, w.p, s.p, yf.p, c.M, c.N, c.K);
                    near(fmt("bf16_linear_f32_m%d_t%d", m, t), fmt("M%d N%d K%d G%d", c.M, c.N, c.K, c.G), yf.get(), want, 1e-5);
                }
            }
        }
}

static void check_fp8_few() {
    for (auto [M, N, K] : {std::tuple{1, 5, 32}, {3, 96, 96}, {8, 130, 160}, {13, 333, 736}, {16, 512, 5120}, {1, 1280, 5120}, {5, 2304, 1280}}) {
        auto w = rand_weight(0, wbytes(0, N, K)), s = rand_u8(sbytes(0, N, K), 2);
        auto x = rand_bf16((size_t)M * K);
        Dev<uint8_t> xc((size_t)M * K), xs((size_t)M * K / 32);
        Dev<bf16> fake((size_t)M * K);
        launch("quant/act_quant", dim3((M * K / 8 + 255) / 256), 256, 0, x.p, xc.p, xs.p, fake.p, (int64_t)M * K / 8);
        auto want = reference_linear(0, fake, w, s, M, N, K, 1).get();
        for (int ks : {1, 2, 3, 5, 6, 8})
            for (int m : {1, 8, 16}) {
                if (m < M || few_smem(K, ks, m, false) > 200000) continue;
                Dev<bf16> y((size_t)M * N);
                launch_few(ks, m, false, 1, M, N, K, xc.p, xs.p, w.p, s.p, y.p);
                near(fmt("fp8_few_m%d k%d", m, ks), fmt("M%d N%d K%d", M, N, K), y.get(), want, ONE_ROUNDING);
            }
    }
    // One token that is quantised on the way, and one whose activation is.
    for (auto [N, K] : {std::pair{5, 32}, {333, 736}, {1280, 5120}, {5120, 2304}}) {
        auto w = rand_weight(0, wbytes(0, N, K)), s = rand_u8(sbytes(0, N, K), 2), xc = rand_u8(K, 1), xs = rand_u8(K / 32, 2);
        Dev<bf16> gate(quant_input(K)), up(quant_input(K)), y(N), want(N), h(K);
        for (bool swiglu : {false, true})
            for (int ks : {1, 3, 6, 8}) {
                if (swiglu) launch("moe/swiglu", dim3((K / 8 + 255) / 256), 256, 0, gate.p, up.p, (float*)nullptr, h.p, (bf16*)nullptr, xc.p, xs.p, (int64_t)K / 8, K, (int64_t)K, 10.0f);
                else launch("quant/act_quant", dim3((K / 8 + 255) / 256), 256, 0, gate.p, xc.p, xs.p, (bf16*)nullptr, (int64_t)K / 8);
                launch_few(ks, 1, false, 1, 1, N, K, xc.p, xs.p, w.p, s.p, want.p);
                std::string path = fmt("quant/fp8_few_sm90:fp8_few_%s_m1", swiglu ? "swiglu" : "raw");
                Form form = {ks, false, false};
                dim3 grid((N + 127) / 128 * ks);
                size_t smem = few_smem(K, ks, 1, false);
                if (swiglu) launch_as(form, path, grid, 256, smem, gate.p, up.p, w.p, s.p, y.p, 1, N, K, 10.0f);
                else launch_as(form, path, grid, 256, smem, gate.p, w.p, s.p, y.p, 1, N, K);
                same(fmt("fp8_few_%s_m1 k%d", swiglu ? "swiglu" : "raw", ks), fmt("N%d K%d", N, K), y.get(), want.get());
            }
    }
    // Tokens as they are, of values far apart, some zero.
    for (auto [M, N, K, G] : {std::tuple{1, 32, 32, 1}, {3, 96, 96, 2}, {8, 160, 736, 3}, {13, 64, 160, 5}, {16, 1024, 4096, 2}, {1, 1024, 4096, 8}}) {
        auto w = rand_weight(0, wbytes(0, N, K) * G), s = rand_u8(sbytes(0, N, K) * G, 2);
        std::vector<bf16> hx((size_t)M * K * G);
        for (size_t i = 0; i < hx.size(); ++i) hx[i] = __float2bfloat16(i / 32 % 5 == 3 ? 0.0f : normal() * expf(uniform(-20, i % 7 ? 4 : 60)) * (i / 64 % 3 ? 1.0f : 1e-18f));
        Dev<bf16> x(hx);
        auto want = reference_linear(0, x, w, s, M, N, K, G).get();
        for (int ks : {1, 4, 7})
            for (int m : {1, 8, 16}) {
                if (m < M || few_smem(K, ks, m, true) > 200000) continue;
                Dev<bf16> y((size_t)M * N * G);
                launch_few(ks, m, true, G, M, N, K, x.p, w.p, s.p, y.p);
                near(fmt("fp8_few_plain_m%d k%d", m, ks), fmt("M%d N%d K%d G%d", M, N, K, G), y.get(), want, ONE_ROUNDING);
            }
    }
}

static void check_fp8_many() {
    for (auto [M, N, K] : {std::tuple{1, 8, 32}, {37, 136, 96}, {300, 264, 736}, {513, 1280, 5120}, {1000, 2304, 1280}, {128, 128, 64}}) {
        auto w = rand_weight(0, wbytes(0, N, K)), s = rand_u8(sbytes(0, N, K), 2);
        auto x = rand_bf16((size_t)M * K);
        size_t kp = (K + 63) / 64 * 64, rp = (M + 7) / 8 * 8;
        Dev<bf16> fake((size_t)M * K), tiled(rp * kp);
        launch("quant/act_quant", dim3(((size_t)M * K / 8 + 255) / 256), 256, 0, x.p, (uint8_t*)nullptr, (uint8_t*)nullptr, fake.p, (int64_t)M * K / 8);
        launch("quant/act_quant:act_quant_tiled", dim3(M), 256, kp * 2, x.p, (int*)nullptr, 1, tiled.p, K, (int64_t)K, (int64_t)rp, 0, 1);
        auto want = reference_linear(0, fake, w, s, M, N, K, 1).get();
        for (int tok : {128, 192, 256}) {
            Dev<bf16> y((size_t)M * N);
            int tiles = (N + 127) / 128 * ((M + tok - 1) / tok);
            launch(fmt("quant/fp8_many_sm90:fp8_many_%d", tok), dim3(std::min(132, tiles)), 384, 4 * tok * 128 + 2 * tok * 144 + 1024, tiled.p, w.p, s.p, y.p, M, N, K, N, (int64_t)rp);
            near(fmt("fp8_many_%d", tok), fmt("M%d N%d K%d", M, N, K), y.get(), want, ONE_ROUNDING);
        }
    }
}
// Groups side by side: each as a product of its own.
static void check_fp8_many_groups() {
    for (auto [M, G, N, K] : {std::tuple{70, 3, 128, 64}, {300, 5, 256, 192}, {513, 8, 1024, 4096}}) {
        auto w = rand_weight(0, wbytes(0, (int64_t)G * N, K)), s = rand_u8(sbytes(0, (int64_t)G * N, K), 2);
        auto x = rand_bf16((size_t)M * G * K);
        int rp = (M + 7) & ~7, all = G * N;
        Dev<bf16> tiled((size_t)rp * G * K), one((size_t)rp * K), y((size_t)M * all), yg((size_t)M * N), part((size_t)M * K);
        launch("quant/act_quant:act_quant_tiled", dim3(M), 256, G * K * 2, x.p, (int*)nullptr, 1, tiled.p, G * K, (int64_t)G * K, (int64_t)rp, 0, 0);
        launch("quant/fp8_many_sm90:fp8_many_128", dim3(132), 384, 4 * 128 * 128 + 2 * 128 * 144 + 1024, tiled.p, w.p, s.p, y.p, M, all, K, N, (int64_t)rp);
        auto got = y.get();
        bool ok = true;
        for (int g = 0; g < G; ++g) {
            CUDA(cudaMemcpy2D(part.p, K * 2, x.p + (size_t)g * K, (size_t)G * K * 2, K * 2, M, cudaMemcpyDeviceToDevice));
            launch("quant/act_quant:act_quant_tiled", dim3(M), 256, K * 2, part.p, (int*)nullptr, 1, one.p, K, (int64_t)K, (int64_t)rp, 0, 0);
            launch("quant/fp8_many_sm90:fp8_many_128", dim3(132), 384, 4 * 128 * 128 + 2 * 128 * 144 + 1024, one.p, w.p + (size_t)g * N * K, s.p + (size_t)g * N * K / 1024, yg.p, M, N, K, N, (int64_t)rp);
            auto want = yg.get();
            for (int m = 0; m < M; ++m) ok &= !memcmp(&got[(size_t)m * all + (size_t)g * N], &want[(size_t)m * N], N * 2);
        }
        report("fp8_many groups", fmt("M%d G%d N%d K%d", M, G, N, K), ok, "the bits of products of their own");
    }
}

#include "check_moe.cuh"
#include "check_attention.cuh"
#include "check_packed.cuh"
#include "check_stream.cuh"

int main(int argc, char** argv) {
    if (argc > 1) g_dir = argv[1];
    std::string only = argc > 2 ? argv[2] : "";
    auto run = [&](const char* name, void (*f)()) { if (only.empty() || only == name) f(); };
    run("formats", check_formats);
    run("quant", check_quant);
    run("norm", check_norm);
    run("linear", check_linear);
    run("few", check_fp8_few);
    run("many", check_fp8_many);
    run("many", check_fp8_many_groups);
    run("moe", check_moe);
    run("attention", check_attention);
    run("packed", check_packed);
    run("index", check_index);
    run("hyperconn", check_hyperconn);
    run("engram", check_engram);
    run("argmax", check_argmax);
    CUDA(cudaDeviceSynchronize());
    printf("%d checks, %d failed\n", g_checks, g_failed);
    return g_failed != 0;
}
