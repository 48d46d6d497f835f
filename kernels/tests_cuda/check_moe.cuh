// Gate, grouping, experts, combination.
#pragma once

static void check_gate() {
    for (int func = 0; func < 3; ++func)
        for (auto [T, E, k] : {std::tuple{1, 384, 6}, {5, 6, 3}, {9, 16, 4}, {130, 384, 6}, {3, 128, 3}}) {
            std::vector<float> logits(T * E), bias(E), vl(E);
            std::vector<uint8_t> mask(T);
            for (auto& v : logits) v = roundf(normal() * 40) / 8;  // many ties
            for (auto& v : bias) v = roundf(normal() * 4) / 8;
            for (auto& v : vl) v = roundf(normal() * 4) / 8;
            for (auto& m : mask) m = pick(0, 1);
            logits[0] = -20; logits[1] = 89; logits[2] = 100; logits[3] = -16.7f;
            Dev<float> dl(logits), db(bias), dv(vl), w(T * k), w2(T * k);
            Dev<uint8_t> dm(mask);
            Dev<uint32_t> e(T * k), e2(T * k);
            launch("moe/topk_gate", dim3(T), 128, 8 * E, dl.p, db.p, dv.p, dm.p, (uint32_t*)nullptr, w.p, e.p, T, E, k, func, 1.3f, 1, 1.5f);
            launch("moe/topk_gate", dim3(T), 128, 8 * E, dl.p, db.p, dv.p, dm.p, e.p, w2.p, e2.p, T, E, k, func, 1.3f, 1, 1.5f);
            auto ge = e.get();
            auto gw = w.get();
            bool order_ok = true;
            std::vector<float> want_w;
            for (int t = 0; t < T; ++t) {
                std::vector<double> s(E);
                double mx = -1e30, sum = 0;
                for (int i = 0; i < E; ++i) mx = std::max(mx, (double)logits[t * E + i] / 1.3f);
                for (int i = 0; i < E; ++i) {
                    double x = logits[t * E + i] / 1.3f;
                    s[i] = func == 0 ? exp(x - mx) : func == 1 ? 1 / (1 + exp(-x)) : sqrt(x > 20 ? x : log1p(exp(x)));
                    sum += s[i];
                }
                if (func == 0) for (auto& v : s) v /= sum;
                double total = 0;
                std::vector<bool> used(E);
                for (int j = 0; j < k; ++j) {
                    // Its key must be within rounding of the best that is left, and no equal logit+bias with a lower index may be skipped.
                    int got = ge[t * k + j], best = -1;
                    for (int i = 0; i < E; ++i)
                        if (!used[i] && (best < 0 || s[i] + (mask[t] ? vl : bias)[i] > s[best] + (mask[t] ? vl : bias)[best])) best = i;
                    double kb = s[best] + (mask[t] ? vl : bias)[best], kg = got < E ? s[got] + (mask[t] ? vl : bias)[got] : -1e9;
                    if (used[got] || fabs(kb - kg) > 1e-5 * std::max(1.0, fabs(kb))) order_ok = false;
                    for (int i = 0; i < got; ++i)
                        if (!used[i] && logits[t * E + i] == logits[t * E + got] && (mask[t] ? vl : bias)[i] == (mask[t] ? vl : bias)[got]) order_ok = false;
                    used[got] = true;
                    total += s[got];
                }
                for (int j = 0; j < k; ++j) want_w.push_back((float)(s[ge[t * k + j]] / (total + 1e-20) * 1.5));
            }
            report("topk_gate experts", fmt("func %d T%d E%d k%d", func, T, E, k), order_ok, order_ok ? "order and ties right" : "wrong choice");
            near("topk_gate weights", fmt("func %d T%d E%d k%d", func, T, E, k), gw, want_w, 1e-5);
            same("topk_gate replay", fmt("func %d T%d E%d k%d", func, T, E, k), w2.get(), gw);
        }
}

// Random distinct experts per token, all tokens' slots in one vector; skew sends many tokens to expert 0.
static std::vector<uint32_t> random_experts(int T, int E, int k, bool skew) {
    std::vector<uint32_t> e;
    for (int t = 0; t < T; ++t) {
        std::vector<uint32_t> mine;
        while ((int)mine.size() < k) {
            uint32_t c = skew && mine.empty() ? 0 : pick(0, E - 1);
            if (std::find(mine.begin(), mine.end(), c) == mine.end()) mine.push_back(c);
        }
        e.insert(e.end(), mine.begin(), mine.end());
    }
    return e;
}

struct Groups {
    Dev<uint32_t> experts;
    Dev<int32_t> order, inverse, count, expert_at;
    Dev<int4> tiles;
    int max_tiles, P, places;
};
static Groups group(const std::vector<uint32_t>& e, int first, int n_local, int tile, bool check, int align = 1) {
    int P = e.size(), places = P + std::min(P, n_local) * (align - 1), max_tiles = std::min(P, n_local + P / tile);
    Groups g{Dev<uint32_t>(e), Dev<int32_t>(places), Dev<int32_t>(P), Dev<int32_t>(1), Dev<int32_t>(), Dev<int4>(max_tiles), max_tiles, P, places};
    launch("moe/group_tokens", dim3(1), 512, std::max(4 * (17 * n_local + 1), 4 * std::min(P, 512)), g.experts.p, g.order.p, g.inverse.p, g.tiles.p, g.count.p, P, (uint32_t)first, n_local, tile, align);
    std::vector<int32_t> order, inverse(P, -1), at;
    std::vector<int4> tiles;
    for (int x = 0; x < n_local; ++x) {
        while (order.size() % align) { order.push_back(-1); at.push_back(0); }
        int start = order.size();
        for (int p = 0; p < P; ++p)
            if ((int)e[p] == first + x) { inverse[p] = order.size(); order.push_back(p); at.push_back(x); }
        for (int i = start; i < (int)order.size(); i += tile) tiles.push_back(int4{x, i, std::min(tile, (int)order.size() - i), 0});
    }
    order.resize(places, -1);
    at.resize(places, 0);
    if (check) {
        std::string s = fmt("P%d local %d+%d tile %d align %d", P, first, n_local, tile, align);
        same("group_tokens order", s, g.order.get(), order);
        same("group_tokens inverse", s, g.inverse.get(), inverse);
        auto gt = g.tiles.get();
        gt.resize(tiles.size());
        same("group_tokens tiles", s, gt, tiles);
        same("group_tokens count", s, g.count.get(), std::vector<int32_t>{(int)tiles.size()});
    }
    g.expert_at = Dev<int32_t>(at);
    return g;
}

static void check_experts(int f, int T, int E, int k, int dim, int inter, bool skew) {
    auto e = random_experts(T, E, k, skew);
    std::string shape = fmt("%s T%d E%d k%d %dx%d%s", FORMAT[f], T, E, k, dim, inter, skew ? " skew" : "");
    auto g = group(e, 0, E, 8, dim < 1000);
    auto w1 = rand_weight(f, wbytes(f, inter, dim) * E), w3 = rand_weight(f, wbytes(f, inter, dim) * E), w2 = rand_weight(f, wbytes(f, dim, inter) * E);
    auto s1 = rand_u8(sbytes(f, inter, dim) * E, 2), s3 = rand_u8(sbytes(f, inter, dim) * E, 2), s2 = rand_u8(sbytes(f, dim, inter) * E, 2);
    auto x = rand_bf16((size_t)T * dim, f == 2 ? 1.0f : 0.02f), shared = rand_bf16((size_t)T * dim);
    auto weights = rand_f32(g.P);
    Dev<bf16> h((size_t)g.P * inter), y((size_t)g.P * dim), out((size_t)T * dim), rh((size_t)g.P * inter), rq((size_t)g.P * inter);
    Dev<float> ry((size_t)g.P * dim);
    launch(fmt("moe/experts:experts_up_%s", FORMAT[f]), dim3(inter / 32, g.max_tiles), 256, 0, x.p, g.order.p, g.tiles.p, g.count.p, weights.p, w1.p, s1.p, w3.p, s3.p, h.p,
           dim, inter, k, 10.0f);
    launch(fmt("moe/experts:experts_down_%s", FORMAT[f]), dim3((dim + 31) / 32, g.max_tiles), 192, 0, h.p, g.tiles.p, g.count.p, w2.p, s2.p, y.p, dim, inter);
    launch("moe/combine:moe_combine", dim3((dim / 8 + 127) / 128, T), 128, 0, y.p, g.inverse.p, g.experts.p, shared.p, out.p, (float*)nullptr, dim, k);
    ref_up<<<((size_t)g.P * inter + 127) / 128, 128>>>(f, x, g.order, g.expert_at, weights, w1, s1, w3, s3, rh, g.P, dim, inter, k, 10.0f);
    if (f != 2) launch("quant/act_quant", dim3(((size_t)g.P * inter / 8 + 255) / 256), 256, 0, rh.p, (uint8_t*)nullptr, (uint8_t*)nullptr, rq.p, (int64_t)g.P * inter / 8);
    auto want_h = (f == 2 ? rh : rq).get();
    // One bf16 ulp before the quantiser can move a value by an e4m3 step: the norm of the difference stays small.
    near("experts_up", shape, h.get(), want_h, f == 2 ? 5e-3 : 1.5e-2);
    ref_down<<<((size_t)g.P * dim + 127) / 128, 128>>>(f, h, g.order, g.expert_at, w2, s2, ry, g.P, dim, inter);
    near("experts_down", shape, y.get(), ry.get(), ONE_ROUNDING);
    auto hy = y.get(), hs = shared.get();
    auto inv = g.inverse.get();
    std::vector<bf16> want;
    for (int t = 0; t < T; ++t)
        for (int d = 0; d < dim; ++d) {
            std::vector<std::pair<uint32_t, int>> o;
            for (int j = 0; j < k; ++j) o.push_back({e[t * k + j], inv[t * k + j]});
            std::sort(o.begin(), o.end());
            float s = 0;
            for (auto [_, p] : o) s += to_f(hy[(size_t)p * dim + d]);
            want.push_back(__float2bfloat16(s + to_f(hs[(size_t)t * dim + d])));
        }
    same("moe_combine", shape, out.get(), want);
}

// A single token in one launch; experts outside first .. first + local are another rank's.
static void check_experts_one(int E, int k, int dim, int inter, int first, int local, int grid) {
    auto e = random_experts(1, E, k, false);
    std::string shape = fmt("E%d k%d %dx%d ours %d+%d grid %d", E, k, dim, inter, first, local, grid);
    auto w1 = rand_weight(1, wbytes(1, inter, dim) * local), w3 = rand_weight(1, wbytes(1, inter, dim) * local), w2 = rand_weight(1, wbytes(1, dim, inter) * local);
    auto s1 = rand_u8(sbytes(1, inter, dim) * local, 2), s3 = rand_u8(sbytes(1, inter, dim) * local, 2), s2 = rand_u8(sbytes(1, dim, inter) * local, 2);
    auto x = rand_bf16(dim, 0.02f), shared = rand_bf16(dim);
    auto weights = rand_f32(k);
    Dev<uint8_t> xc(dim), xs(dim / 32);
    Dev<bf16> fake(dim), h((size_t)k * inter), out(dim);
    Dev<uint32_t> counter(32), ex(e);
    counter.zero();
    launch("quant/act_quant", dim3((dim / 8 + 255) / 256), 256, 0, x.p, xc.p, xs.p, fake.p, (int64_t)dim / 8);
    auto run = [&](const uint32_t* experts, const float* factors, bf16* h, bf16* shared, bf16* out, int k) {
        launch_cooperative("moe/experts_one_sm90:experts_one", dim3(grid), 768, one_smem(dim, inter, k), x.p, experts, factors, w1.p, s1.p, w3.p, s3.p, w2.p, s2.p, h, shared, out, counter.p, dim, inter, k,
                           (uint32_t)first, local, 10.0f);
    };
    run(ex.p, weights.p, h.p, shared.p, out.p, k);
    // Its blocks and warps wait for each other in many ways: whoever comes first, the same bits.
    auto once = out.get();
    bool again = true;
    for (int i = 0; i < 50; ++i) {
        out.poison();
        run(ex.p, weights.p, h.p, shared.p, out.p, k);
        again &= !memcmp(out.get().data(), once.data(), 2 * dim);
    }
    report("experts_one", shape, again, "50 launches more, the same bits");
    std::vector<std::pair<uint32_t, int>> by_id;
    for (int i = 0; i < k; ++i)
        if ((int)e[i] >= first && (int)e[i] < first + local) by_id.push_back({e[i], i});
    std::sort(by_id.begin(), by_id.end());
    int n = by_id.size();
    // Each of ours, and what it gives alone: that is its part of the sum.
    std::vector<int32_t> order, at;
    std::vector<float> factors;
    auto all = weights.get();
    Dev<bf16> alone_h(inter), alone((size_t)std::max(n, 1) * dim), rh((size_t)std::max(n, 1) * inter), hq((size_t)std::max(n, 1) * inter);
    for (int i = 0; i < n; ++i) {
        order.push_back(i);
        at.push_back(by_id[i].first - first);
        factors.push_back(all[by_id[i].second]);
        run(ex.p + by_id[i].second, weights.p + by_id[i].second, alone_h.p, (bf16*)nullptr, alone.p + (size_t)i * dim, 1);
    }
    auto y = alone.get(), sh = shared.get();
    if (n) {
        Dev<int32_t> dorder(order), dat(at);
        Dev<float> dfactors(factors), ry((size_t)n * dim);
        ref_up<<<((size_t)n * inter + 127) / 128, 128>>>(1, fake, dorder, dat, dfactors, w1, s1, w3, s3, rh, n, dim, inter, n, 10.0f);
        auto got = h.get(), want = rh.get();
        got.resize((size_t)n * inter);
        near("experts_one_up", shape, got, want, 5e-3);
        launch("quant/act_quant", dim3(((size_t)n * inter / 8 + 255) / 256), 256, 0, h.p, (uint8_t*)nullptr, (uint8_t*)nullptr, hq.p, (int64_t)n * inter / 8);
        ref_down<<<((size_t)n * dim + 127) / 128, 128>>>(1, hq, dorder, dat, w2, s2, ry, n, dim, inter);
        near("experts_one_down", shape, y, ry.get(), ONE_ROUNDING);
    }
    std::vector<bf16> want;
    for (int d = 0; d < dim; ++d) {
        float sum = 0;
        for (int i = 0; i < n; ++i) sum += to_f(y[(size_t)i * dim + d]);
        want.push_back(__float2bfloat16(sum + to_f(sh[d])));
    }
    same("experts_one out", shape, out.get(), want);
}

static void check_experts_many(int T, int E, int k, int dim, int inter, bool skew) {
    auto e = random_experts(T, E, k, skew);
    std::string shape = fmt("T%d E%d k%d %dx%d%s", T, E, k, dim, inter, skew ? " skew" : "");
    auto g = group(e, 0, E, 128, false, 8);
    auto w1 = rand_weight(1, wbytes(1, inter, dim) * E), w3 = rand_weight(1, wbytes(1, inter, dim) * E), w2 = rand_weight(1, wbytes(1, dim, inter) * E);
    auto s1 = rand_u8(sbytes(1, inter, dim) * E, 2), s3 = rand_u8(sbytes(1, inter, dim) * E, 2), s2 = rand_u8(sbytes(1, dim, inter) * E, 2);
    auto x = rand_bf16((size_t)T * dim, 0.02f);
    auto weights = rand_f32((size_t)T * k);
    // Tiles start at multiples of 8; a place past the last one of a tile may be read, never used.
    size_t np = g.places, rp = (np + 7) / 8 * 8, kd = (dim + 127) / 128 * 128, ki = (inter + 127) / 128 * 128;
    Dev<bf16> fake((size_t)T * dim), tiled(rp * kd), h(rp * ki), y(np * dim), rh(np * inter), rq(np * inter);
    Dev<float> ry(np * dim);
    launch("quant/act_quant", dim3(((size_t)T * dim / 8 + 255) / 256), 256, 0, x.p, (uint8_t*)nullptr, (uint8_t*)nullptr, fake.p, (int64_t)T * dim / 8);
    launch("quant/act_quant:act_quant_tiled", dim3(np), 256, kd * 2, x.p, g.order.p, k, tiled.p, dim, (int64_t)dim, (int64_t)rp, 1, 1);
    size_t smem = 4 * 32768 + 128 * 272 + 1024;
    launch("moe/experts_many_sm90:experts_many_up", dim3(132), 384, smem, tiled.p, g.order.p, g.tiles.p, g.count.p, weights.p, w1.p, s1.p, w3.p, s3.p, h.p, dim, inter, (int64_t)rp, 10.0f);
    launch("moe/experts_many_sm90:experts_many_down", dim3(132), 384, smem, h.p, g.tiles.p, g.count.p, w2.p, s2.p, y.p, dim, inter, (int64_t)rp);
    ref_up<<<(np * inter + 127) / 128, 128>>>(1, fake, g.order, g.expert_at, weights, w1, s1, w3, s3, rh, np, dim, inter, k, 10.0f);
    launch("quant/act_quant", dim3((np * inter / 8 + 255) / 256), 256, 0, rh.p, (uint8_t*)nullptr, (uint8_t*)nullptr, rq.p, (int64_t)np * inter / 8);
    auto th = h.get(), hr = rq.get(), hy = y.get();
    auto order = g.order.get();
    std::vector<bf16> got, want, flat(np * inter);
    for (size_t r = 0; r < np; ++r) {
        if (order[r] < 0) continue;
        for (int s = 0; s < (int)ki; ++s) {
            int j = s % 128 >> 4, q = s >> 1 & 3, hh = s >> 3 & 1, i = s & 1, c = s / 128 * 128 + q * 32 + (j >> 1) * 8 + (j & 1) * 2 + hh + 4 * i;
            bf16 v = th[((size_t)(s / 64) * rp + r) * 64 + (((s % 64 / 8) ^ (r & 7)) * 8) + s % 8];
            if (c < inter) flat[r * inter + c] = v;
            got.push_back(v);
            want.push_back(c < inter ? hr[r * inter + c] : __float2bfloat16(0));
        }
    }
    near("experts_many_up", shape, got, want, 1.5e-2);
    Dev<bf16> dh(flat);
    ref_down<<<(np * dim + 127) / 128, 128>>>(1, dh, g.order, g.expert_at, w2, s2, ry, np, dim, inter);
    auto hry = ry.get();
    std::vector<bf16> gy;
    std::vector<float> wy;
    for (size_t r = 0; r < np; ++r)
        for (int d = 0; d < dim && order[r] >= 0; ++d) { gy.push_back(hy[r * dim + d]); wy.push_back(hry[r * dim + d]); }
    near("experts_many_down", shape, gy, wy, ONE_ROUNDING);
}

static void check_moe() {
    check_experts_many(5, 6, 3, 96, 64, false);
    check_experts_many(333, 7, 3, 352, 96, true);
    check_experts_many(60, 4, 2, 832, 352, false);
    check_experts_many(100, 8, 6, 5120, 2304, false);
    check_gate();
    check_experts_one(8, 6, 5120, 2304, 0, 8, 132);
    check_experts_one(8, 6, 5120, 2304, 0, 8, 100);
    check_experts_one(6, 3, 512, 256, 0, 6, 132);
    check_experts_one(6, 6, 256, 768, 2, 3, 7);
    check_experts_one(6, 1, 1024, 512, 0, 6, 2);
    check_experts_one(6, 2, 256, 256, 6, 1, 132);
    check_experts_one(4, 3, 5376, 512, 0, 4, 77);
    check_experts_one(5, 2, 512, 5632, 0, 5, 132);
    check_experts_one(40, 32, 256, 512, 3, 33, 132);
    group(random_experts(700, 384, 6, true), 96, 96, 64, true);
    group(random_experts(4096, 384, 6, false), 0, 384, 128, true, 8);
    group(random_experts(7, 16, 3, false), 4, 8, 128, true, 8);
    group(random_experts(1, 384, 6, false), 0, 384, 8, true);
    group(random_experts(80, 384, 6, true), 0, 384, 8, true);
    group(random_experts(85, 6, 3, true), 2, 3, 8, true);
    for (int f = 0; f < 3; ++f) {
        check_experts(f, 5, 6, 3, 96, 64, false);
        check_experts(f, 37, 6, 3, 160, 96, true);
    }
    check_experts(1, 1, 8, 6, 5120, 2304, false);
    check_experts(1, 3, 8, 6, 5120, 2304, true);
    // swiglu on its own
    int T = 7, inter = 96;
    auto gu = rand_bf16(T * 2 * inter, 8.0f);
    auto w = rand_f32(T);
    Dev<bf16> h(T * inter), fake(T * inter), wf(T * inter);
    launch("moe/swiglu", dim3((T * inter / 8 + 255) / 256), 256, 0, gu.p, gu.p + inter, w.p, h.p, fake.p, (uint8_t*)nullptr, (uint8_t*)nullptr, (int64_t)T * inter / 8, inter, (int64_t)2 * inter, 10.0f);
    auto hg = gu.get();
    auto hw = w.get();
    std::vector<float> want;
    for (int t = 0; t < T; ++t)
        for (int i = 0; i < inter; ++i) {
            double a = std::min(10.0f, to_f(hg[t * 2 * inter + i])), b = std::max(-10.0f, std::min(10.0f, to_f(hg[t * 2 * inter + inter + i])));
            want.push_back((float)(hw[t] * (a / (1 + exp(-a)) * b)));
        }
    near("swiglu", "7x96", h.get(), want, ONE_ROUNDING);
    launch("quant/act_quant", dim3((T * inter / 8 + 255) / 256), 256, 0, h.p, (uint8_t*)nullptr, (uint8_t*)nullptr, wf.p, (int64_t)T * inter / 8);
    same("swiglu fake", "7x96", fake.get(), wf.get());
}
