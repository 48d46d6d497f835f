// Hyper-connections, Engram, sampling.
#pragma once

static void sinkhorn_host(const double* m, const float* sc, const float* b, int iters, double eps, float* out) {
    double c[16];
    for (int i = 0; i < 4; ++i) {
        out[i] = 1 / (1 + exp(-(m[i] * sc[0] + b[i]))) + eps;
        out[4 + i] = 2 / (1 + exp(-(m[4 + i] * sc[1] + b[4 + i])));
    }
    for (int j = 0; j < 4; ++j) {
        double mx = -1e30, s = 0;
        for (int k = 0; k < 4; ++k) mx = std::max(mx, m[8 + j * 4 + k] * sc[2] + b[8 + j * 4 + k]);
        for (int k = 0; k < 4; ++k) s += c[j * 4 + k] = exp(m[8 + j * 4 + k] * sc[2] + b[8 + j * 4 + k] - mx);
        for (int k = 0; k < 4; ++k) c[j * 4 + k] = c[j * 4 + k] / s + eps;
    }
    for (int it = 0; it < iters; ++it) {
        for (int j = 0; j < 4 && it; ++j) {
            double s = eps;
            for (int k = 0; k < 4; ++k) s += c[j * 4 + k];
            for (int k = 0; k < 4; ++k) c[j * 4 + k] /= s;
        }
        for (int k = 0; k < 4; ++k) {
            double s = eps;
            for (int j = 0; j < 4; ++j) s += c[j * 4 + k];
            for (int j = 0; j < 4; ++j) c[j * 4 + k] /= s;
        }
    }
    for (int i = 0; i < 16; ++i) out[8 + i] = c[i];
}

static void check_hc_step(int T, int dim, int per, bool one, bool post) {
    int slices = one ? (dim + 63) / 64 : (dim + 127) / 128, iters = 20, ld = 24;
    auto x = rand_bf16((size_t)T * dim), res = rand_bf16((size_t)T * 4 * dim), w = rand_bf16(dim);
    auto fn = rand_f32((size_t)24 * 4 * dim, 0.05f), scale = rand_f32(3, 1.0f), base = rand_f32(24, 1.0f), cin = rand_f32((size_t)T * 24, 1.0f);
    Dev<bf16> stream((size_t)T * 4 * dim), out((size_t)T * dim), fake((size_t)T * dim), y((size_t)T * dim);
    Dev<float> coef((size_t)T * 24), part((size_t)T * slices * (one ? 40 : 32));
    if (one) { y.zero(); part.zero(); }
    for (int again = 0; again < 20; ++again) {
        if (one) {
            launch("hyperconn/hc_few:hc_step_few", dim3(slices + 1 + (dim + 1023) / 1024, T), 128, 0, post ? x.p : nullptr, res.p, cin.p + 4, cin.p + 8, cin.p, fn.p, scale.p, base.p, w.p, stream.p, coef.p, out.p, fake.p, (uint8_t*)nullptr,
                   (uint8_t*)nullptr, y.p, part.p, dim, ld, iters, 1e-6f, 1e-20f);
            continue;
        }
        launch("hyperconn/hc_step", dim3(slices, (T + per - 1) / per), 256, 0, post ? x.p : nullptr, res.p, cin.p + 4, cin.p + 8, cin.p, fn.p, stream.p, y.p, part.p, T, dim, per, ld);
        launch("hyperconn/hc_step:hc_finish", dim3(T), 128, 0, part.p, y.p, scale.p, base.p, w.p, coef.p, out.p, fake.p, (uint8_t*)nullptr, (uint8_t*)nullptr, slices, dim, iters, 1e-6f, 1e-20f);
    }
    auto hx = x.get(), hr = res.get(), hw = w.get();
    auto hf = fn.get(), hs = scale.get(), hb = base.get(), hc = cin.get();
    std::vector<float> ws, wc, wo;
    auto hst = stream.get();
    for (int t = 0; t < T; ++t) {
        std::vector<float> s(4 * dim);
        for (int k = 0; k < 4; ++k)
            for (int d = 0; d < dim; ++d) {
                double v = hc[t * 24 + 4 + k] * (double)to_f(hx[t * dim + d]);
                for (int j = 0; j < 4; ++j) v += hc[t * 24 + 8 + j * 4 + k] * (double)to_f(hr[(t * 4 + j) * dim + d]);
                ws.push_back((float)v);
                // Later steps use what the kernel rounded: errors of one step do not count twice.
                s[k * dim + d] = post ? to_f(hst[((size_t)t * 4 + k) * dim + d]) : to_f(hr[((size_t)t * 4 + k) * dim + d]);
            }
        double m[24], sq = 0;
        for (auto v : s) sq += (double)v * v;
        for (int r = 0; r < 24; ++r) {
            m[r] = 0;
            for (int i = 0; i < 4 * dim; ++i) m[r] += (double)hf[(size_t)r * 4 * dim + i] * s[i];
            m[r] /= sqrt(sq / (4 * dim) + 1e-20);
        }
        float o[24];
        sinkhorn_host(m, hs.data(), hb.data(), iters, 1e-6, o);
        wc.insert(wc.end(), o, o + 24);
        std::vector<float> yv(dim);
        double ysq = 0;
        for (int d = 0; d < dim; ++d) {
            float v = 0;
            for (int c = 0; c < 4; ++c) v += hc[t * 24 + c] * s[c * dim + d];
            yv[d] = to_f(__float2bfloat16(v));
            ysq += (double)yv[d] * yv[d];
        }
        for (int d = 0; d < dim; ++d) wo.push_back((float)(to_f(hw[d]) * (yv[d] / sqrt(ysq / dim + 1e-20))));
    }
    std::string shape = fmt("T%d dim %d per %d%s%s", T, dim, per, one ? " one launch" : "", post ? "" : " no post");
    if (one) {
        auto zeros = [](size_t n) { return std::vector<uint32_t>(n, 0); };
        Dev<uint32_t> left((size_t)T * dim / 2);
        CUDA(cudaMemcpy(left.p, y.p, left.n * 4, cudaMemcpyDeviceToDevice));
        same("hc_step y", shape + " left zero", left.get(), zeros(left.n));
        Dev<uint32_t> parts(part.n);
        CUDA(cudaMemcpy(parts.p, part.p, parts.n * 4, cudaMemcpyDeviceToDevice));
        same("hc_step part", shape + " left zero", parts.get(), zeros(parts.n));
    }
    if (post) near("hc_step stream", shape, hst, ws, ONE_ROUNDING);
    near("hc_step coef", shape, coef.get(), wc, 1e-5);
    near("hc_step out", shape, out.get(), wo, 4e-3);
    Dev<bf16> wf((size_t)T * dim);
    launch("quant/act_quant", dim3((T * dim / 8 + 255) / 256), 256, 0, out.p, (uint8_t*)nullptr, (uint8_t*)nullptr, wf.p, (int64_t)T * dim / 8);
    same("hc_step fake", shape, fake.get(), wf.get());
    Dev<bf16> y3((size_t)T * dim);
    {
        // The form for many tokens.
        int tiles = (dim + 63) / 64, many = T % 2 ? tiles : (tiles + 2) / 3;
        Dev<bf16> pieces((size_t)tiles * 18432), stream2((size_t)T * 4 * dim), out2((size_t)T * dim);
        Dev<float> coef2((size_t)T * 24), part2((size_t)T * many * 32);
        launch("hyperconn/hc_many:hc_split_fn", dim3(tiles * 72), 256, 0, fn.p, pieces.p, dim, (int64_t)tiles * 18432);
        launch("hyperconn/hc_many", dim3(many, (T + 63) / 64), 512, 3 * 40960 + 2 * 36864, post ? x.p : nullptr, res.p, cin.p + 4, cin.p + 8, cin.p, pieces.p, stream2.p, y3.p, part2.p, T, dim, ld);
        launch("hyperconn/hc_step:hc_finish", dim3(T), 128, 0, part2.p, y3.p, scale.p, base.p, w.p, coef2.p, out2.p, (bf16*)nullptr, (uint8_t*)nullptr, (uint8_t*)nullptr, many, dim, iters, 1e-6f,
               1e-20f);
        if (post) same("hc_many stream", shape, stream2.get(), hst);
        near("hc_many coef", shape, coef2.get(), wc, 1e-5);
        near("hc_many out", shape, out2.get(), wo, 4e-3);
    }
    if (!post) return;
    // The parts against the fused kernel.
    Dev<bf16> st2((size_t)T * 4 * dim), y2((size_t)T * dim);
    std::vector<float> po, cm, pr;
    for (int t = 0; t < T; ++t) {
        pr.insert(pr.end(), &hc[t * 24], &hc[t * 24 + 4]);
        po.insert(po.end(), &hc[t * 24 + 4], &hc[t * 24 + 8]);
        cm.insert(cm.end(), &hc[t * 24 + 8], &hc[t * 24 + 24]);
    }
    Dev<float> dpo(po), dcm(cm), dpr(pr);
    dim3 grid((dim / 8 + 127) / 128, T);
    launch("hyperconn/hc_parts:hc_post", grid, 128, 0, x.p, res.p, dpo.p, dcm.p, st2.p, 4, dim, 4, 16);
    launch("hyperconn/hc_parts:hc_pre", grid, 128, 0, st2.p, dpr.p, y2.p, 4, dim, 4);
    same("hc_post", shape, st2.get(), hst);
    same("hc_pre", shape, y2.get(), y3.get());
    if (!one) same("hc_step y", shape, y.get(), y3.get());
    launch("hyperconn/hc_parts:hc_pre", grid, 128, 0, st2.p, (float*)nullptr, y2.p, 4, dim, 4);
    std::vector<float> mean;
    for (int t = 0; t < T; ++t)
        for (int d = 0; d < dim; ++d) { double s = 0; for (int c = 0; c < 4; ++c) s += to_f(hst[((size_t)t * 4 + c) * dim + d]); mean.push_back(s / 4); }
    near("hc_mean", shape, y2.get(), mean, ONE_ROUNDING);
}
// NaNs of all ones everywhere: what blocks hand on must still be told from memory that holds nothing.
static void check_hc_broken() {
    int T = 2, dim = 96, slices = 2;
    std::vector<uint16_t> ones((size_t)T * 4 * dim, 0xffff);
    Dev<uint16_t> nan(ones);
    auto fn = rand_f32((size_t)24 * 4 * dim), scale = rand_f32(3), base = rand_f32(24), cin = rand_f32((size_t)T * 24);
    auto w = rand_bf16(dim);
    Dev<bf16> stream((size_t)T * 4 * dim), out((size_t)T * dim), y((size_t)T * dim);
    Dev<float> coef((size_t)T * 24), part((size_t)T * slices * 40);
    for (bool post : {true, false}) {
        y.zero(); part.zero(); coef.zero(); out.zero();
        launch("hyperconn/hc_few:hc_step_few", dim3(slices + 2, T), 128, 0, post ? (bf16*)nan.p : nullptr, (bf16*)nan.p, cin.p + 4, cin.p + 8, cin.p, fn.p, scale.p, base.p, w.p, stream.p, coef.p, out.p, (bf16*)nullptr, (uint8_t*)nullptr,
               (uint8_t*)nullptr, y.p, part.p, dim, 24, 20, 1e-6f, 1e-20f);
        bool broken = true;
        for (auto v : coef.get()) broken &= v != v;
        for (auto v : out.get()) broken &= to_f(v) != to_f(v);
        report("hc_step_few", post ? "NaNs" : "NaNs no post", broken, broken ? "all NaN" : "a number");
    }
}
static void check_hyperconn() {
    check_hc_broken();
    check_hc_step(1, 5120, 1, true, true);
    check_hc_step(2, 96, 1, true, true);
    check_hc_step(3, 96, 1, true, true);
    check_hc_step(3, 96, 1, true, false);
    check_hc_step(4, 6144, 1, true, true);
    check_hc_step(37, 256, 8, false, true);
    check_hc_step(9, 5120, 4, false, true);
    check_hc_step(150, 352, 8, false, true);
    check_hc_step(300, 64, 8, false, false);
    int T = 200;
    std::vector<float> m(T * 24), sc = {1.f, 0.7f, 1.3f}, b(24);
    for (auto& v : m) v = normal() * 3;
    for (auto& v : b) v = normal();
    for (int i = 0; i < 24; ++i) { m[i] = i % 5 == 0 ? 80 : -80; m[24 + i] = 0; }
    Dev<float> dm(m), ds(sc), db(b), out(T * 24);
    launch("hyperconn/split_sinkhorn", dim3((T + 3) / 4), 128, 0, dm.p, ds.p, db.p, out.p, T, 20, 1e-6f);
    std::vector<float> want(T * 24);
    for (int t = 0; t < T; ++t) {
        double x[24];
        for (int i = 0; i < 24; ++i) x[i] = m[t * 24 + i];
        sinkhorn_host(x, sc.data(), b.data(), 20, 1e-6, &want[t * 24]);
    }
    near("split_sinkhorn", "200 tokens, logits to +-80", out.get(), want, 1e-5);
}

static void check_engram() {
    int T = 9, L = 2, N = 4, heads = 3, cols = (N - 1) * heads, vocab = 300;
    std::vector<uint32_t> ids(T), hist(5), map(vocab), primes(L * cols), offs(L * cols);
    std::vector<int64_t> mult(L * N);
    std::vector<uint8_t> dead(T), dh(5, 0);
    for (auto& v : ids) v = pick(0, vocab - 1);
    for (auto& v : hist) v = pick(0, vocab - 1);
    for (auto& v : map) v = pick(0, 200);
    for (int i = 0; i < L * cols; ++i) { primes[i] = 1000003 + 2 * i; offs[i] = i * 1000100; }
    for (auto& v : mult) v = ((int64_t)(g_rng() % 46539438283891ull)) * 2 + 1;
    dead[4] = 1; dh[1] = 1;
    std::vector<int> src(T * N);
    for (int t = 0; t < T; ++t)
        for (int s = 0; s < N; ++s) src[t * N + s] = t >= s ? t - s : (t == 0 && s > 2) ? -1 : -2 - (4 - (s - t - 1));
    src[2 * N + 1] = -1;
    Dev<uint32_t> di(ids), dhs(hist), dm(map), dp(primes), dof(offs), out(T * L * cols);
    Dev<int64_t> dmul(mult);
    Dev<uint8_t> dd(dead), ddh(dh);
    Dev<int> dsrc(src);
    launch("engram/engram_hash", dim3((T * L * cols + 127) / 128), 128, 0, di.p, dhs.p, dsrc.p, dd.p, ddh.p, dm.p, dmul.p, dp.p, dof.p, out.p, T, L, N, heads, 2u);
    std::vector<uint32_t> want;
    for (int t = 0; t < T; ++t)
        for (int l = 0; l < L; ++l) {
            uint64_t roll = 0;
            bool blocked = false;
            for (int s = 0; s < N; ++s) {
                int x = src[t * N + s];
                if (x == -1 || (x >= 0 ? dead[x] : dh[-2 - x])) blocked = true;
                uint64_t term = blocked ? 2 : map[x >= 0 ? ids[x] : hist[-2 - x]];
                roll ^= term * (uint64_t)mult[l * N + s];
                for (int h = 0; h < heads && s; ++h) want.push_back(roll % primes[l * cols + (s - 1) * heads + h] + offs[l * cols + (s - 1) * heads + h]);
            }
        }
    same("engram_hash", "T9 L2 N4 heads 3, dead and missing", out.get(), want);
    for (int hd : {32, 64, 256})
        for (bool host : {false, true}) {
            int rows = 5000, c = 7, tt = 5;
            auto codes = rand_u8((size_t)rows * hd, 1), scales = rand_u8((size_t)rows * hd / 32, 2);
            std::vector<uint32_t> h(tt * (c + 2));
            for (auto& v : h) v = pick(0, rows + 99);
            Dev<uint32_t> dh2(h);
            Dev<bf16> o((size_t)tt * c * hd);
            auto hc = codes.get(), hs = scales.get();
            uint8_t *pc = codes.p, *ps = scales.p, *mc = nullptr, *ms = nullptr;
            if (host) {
                CUDA(cudaHostAlloc(&mc, hc.size(), cudaHostAllocMapped));
                CUDA(cudaHostAlloc(&ms, hs.size(), cudaHostAllocMapped));
                memcpy(mc, hc.data(), hc.size());
                memcpy(ms, hs.data(), hs.size());
                CUDA(cudaHostGetDevicePointer(&pc, mc, 0));
                CUDA(cudaHostGetDevicePointer(&ps, ms, 0));
            }
            launch("engram/engram_lookup", dim3((tt * c * (hd / 16) + 63) / 64), 64, 0, dh2.p, pc, ps, o.p, tt, c, c + 2, hd, 0u, (uint32_t)rows);
            std::vector<bf16> w;
            for (int t = 0; t < tt; ++t)
                for (int j = 0; j < c; ++j)
                    for (int d = 0; d < hd; ++d) {
                        uint32_t r = h[t * (c + 2) + j];
                        w.push_back(__float2bfloat16(r < (uint32_t)rows ? h_e4m3(hc[(size_t)r * hd + d]) * ldexpf(1, hs[(size_t)r * hd / 32 + d / 32] - 127) : 0.f));
                    }
            same("engram_lookup", fmt("hd %d, %s", hd, host ? "mapped host memory" : "device memory"), o.get(), w);
            if (host) { CUDA(cudaFreeHost(mc)); CUDA(cudaFreeHost(ms)); }
        }
    for (auto [TT, C, dim] : {std::tuple{1, 4, 5120}, {5, 4, 96}, {3, 2, 64}}) {
        auto st = rand_bf16((size_t)TT * C * dim), kv = rand_bf16((size_t)TT * (C + 1) * dim), wq = rand_bf16((size_t)C * dim), wk = rand_bf16((size_t)C * dim);
        std::vector<uint8_t> mask(TT, 0);
        if (TT > 1) mask[1] = 1;
        Dev<uint8_t> dmask(mask);
        Dev<bf16> o((size_t)TT * C * dim);
        launch("engram/engram_gate", dim3(C, TT), 256, 0, st.p, kv.p, wq.p, wk.p, dmask.p, o.p, dim, 1e-20f, powf(dim, -0.5f));
        auto s = st.get(), k = kv.get(), a = wq.get(), b = wk.get();
        std::vector<float> w;
        for (int t = 0; t < TT; ++t)
            for (int c = 0; c < C; ++c) {
                double dot = 0, hh = 0, kk = 0;
                for (int d = 0; d < dim; ++d) {
                    double h = to_f(s[(t * C + c) * dim + d]), key = to_f(k[(t * (C + 1) + c) * dim + d]);
                    dot += h * to_f(a[c * dim + d]) * to_f(b[c * dim + d]) * key; hh += h * h; kk += key * key;
                }
                dot *= 1 / sqrt(hh / dim) / sqrt(kk / dim) / sqrt(dim);
                double gate = mask[t] ? 0 : 1 / (1 + exp(-copysign(sqrt(std::max(fabs(dot), 1e-6)), dot)));
                for (int d = 0; d < dim; ++d) w.push_back(to_f(s[(t * C + c) * dim + d]) + gate * to_f(k[(t * (C + 1) + C) * dim + d]));
            }
        near("engram_gate", fmt("T%d C%d dim %d", TT, C, dim), o.get(), w, ONE_ROUNDING);
    }
}

static void check_argmax() {
    for (int vocab : {5, 320, 129280})
        for (bool biased : {false, true}) {
            // Rows further apart than they are long.
            int stride = vocab + (biased ? 3 : 0);
            std::vector<float> l(5 * stride), b(5 * vocab);
            for (auto& v : l) v = roundf(normal() * 8);  // ties at the top
            for (auto& v : b) v = roundf(normal() * 4);
            l[3 * stride + 2] = NAN;
            for (int i = 0; i < vocab; ++i) l[4 * stride + i] = -INFINITY;
            Dev<float> dl(l), db(b);
            Dev<uint32_t> out(5);
            Dev<uint64_t> work(10);
            work.zero();
            dim3 grid(std::min(64, std::max(1, vocab / 2048)), 5);
            for (int again = 0; again < 2; ++again)
                launch("core/argmax", grid, 256, 0, dl.p, biased ? db.p : (float*)nullptr, out.p, work.p, vocab, (int64_t)stride);
            std::vector<uint32_t> want;
            for (int r = 0; r < 3; ++r) {
                std::vector<float> row(&l[r * stride], &l[r * stride] + vocab);
                for (int i = 0; biased && i < vocab; ++i) row[i] += b[r * vocab + i];
                want.push_back(std::max_element(row.begin(), row.end()) - row.begin());
            }
            want.push_back(0x80000002u);
            want.push_back(0xffffffffu);
            same("argmax", fmt("vocab %d, ties, a NaN, only -inf%s", vocab, biased ? ", a bias" : ""), out.get(), want);
        }
}
