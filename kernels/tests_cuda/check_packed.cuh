// Packed rows: written, and attended to beside the bf16 rows they stand for.
#pragma once

// Random codes and scales of moderate size, and the same rows as bf16.
struct PackedRows {
    Dev<uint8_t> codes, scales;
    Dev<bf16> plain;
};
static PackedRows packed_rows(int rows, int D, int kind) {
    int group = kind == ROW_FP4_E4M3 ? 16 : 32, cd = kind == ROW_FP8 ? D : D / 2;
    std::vector<uint8_t> c((size_t)rows * cd), s((size_t)rows * D / group);
    for (auto& v : c) { v = pick(0, 255); if (kind == ROW_FP8 && (v & 0x7f) == 0x7f) v ^= 1; }
    for (auto& v : s) v = kind == ROW_FP4_E4M3 ? pick(1, 0x50) : pick(115, 122);
    std::vector<bf16> p((size_t)rows * D);
    for (size_t r = 0; r < (size_t)rows; ++r)
        for (int d = 0; d < D; ++d) {
            uint8_t sb = s[(r * D + d) / group];
            float scale = kind == ROW_FP4_E4M3 ? h_e4m3(sb) : ldexpf(1, sb - 127);
            float v = kind == ROW_FP8 ? h_e4m3(c[r * D + d]) : h_e2m1(c[r * cd + d / 2] >> (4 * (d & 1)) & 15);
            p[r * D + d] = __float2bfloat16(v * scale);
        }
    return {Dev<uint8_t>(c), Dev<uint8_t>(s), Dev<bf16>(p)};
}

static void check_pack_rows() {
    for (auto [T, D] : {std::pair{3, 32}, {5, 96}, {9, 512}, {2, 1056}})
        for (int kind = 1; kind < 4; ++kind) {
            int group = kind == ROW_FP4_E4M3 ? 16 : 32, cd = kind == ROW_FP8 ? D : D / 2;
            auto rows = packed_rows(T, D, kind);
            std::vector<int> at(T);
            for (int t = 0; t < T; ++t) at[t] = t == 1 ? -1 : T - t;
            Dev<int> da(at);
            Dev<uint8_t> codes((size_t)(T + 1) * cd), scales((size_t)(T + 1) * D / group);
            launch("attention/pack_rows", dim3(T), 128, 0, rows.plain.p, da.p, codes.p, scales.p, D, kind);
            auto hc = codes.get(), hs = scales.get();
            auto hp = rows.plain.get();
            bool ok = true;
            for (int t = 0; t < T; ++t)
                for (int d = 0; d < D && at[t] >= 0; ++d) {
                    uint8_t sb = hs[((size_t)at[t] * D + d) / group];
                    float scale = kind == ROW_FP4_E4M3 ? h_e4m3(sb) : ldexpf(1, sb - 127);
                    float v = kind == ROW_FP8 ? h_e4m3(hc[(size_t)at[t] * D + d]) : h_e2m1(hc[(size_t)at[t] * cd + d / 2] >> (4 * (d & 1)) & 15);
                    ok &= v * scale == to_f(hp[(size_t)t * D + d]);
                }
            report("pack_rows", fmt("T%d D%d kind %d", T, D, kind), ok, "the values that went in");
        }
}

// Three pools of the given kinds against the same pools as bf16: the same bits.
static void check_packed_attn(int T, int H, int D, int n0, int n1, int n2, int rows, int S, const int (&kinds)[3]) {
    auto c = attn_case(T, H, D, n0, n1, n2, rows, 0.2f, true);
    Scopes sc = c.scopes();
    std::vector<PackedRows> packed;
    for (int s = 0; s < 3; ++s) packed.push_back(packed_rows(rows, D, kinds[s] ? kinds[s] : 1));
    for (int s = 0; s < 3; ++s) {
        if (!kinds[s]) continue;
        c.kv[s] = std::move(packed[s].plain);
        sc.s[s] = {packed[s].codes.p, packed[s].scales.p, c.idx[s].p, c.n[s], kinds[s]};
    }
    Scopes plain = c.scopes();
    float scale = powf(D, -0.5f);
    size_t parts = (size_t)S * T * H;
    for (int form : {0, 1, 16, 8}) {
        bool sm90 = form == 1;
        if (form && D != 512) continue;
        std::vector<bf16> outs[2];
        for (int p = 0; p < 2; ++p) {
            Dev<bf16> out((size_t)T * H * D);
            Dev<float> po(parts * D), ml(parts * 2);
            Scopes s = p ? sc : plain;
            Attn attn = {T, H, D, S, sm90, p == 1};
            attn.few = form > 1 ? form : 0;
            attn.run(c.q.p, s, c.sink.p, out.p, po.p, ml.p, scale);
            outs[p] = out.get();
        }
        report(form > 1 ? "sparse_attn_few_packed" : sm90 ? "sparse_attn_packed_sm90" : "sparse_attn_packed", fmt("T%d H%d D%d %d+%d+%d split %d kinds %d %d %d", T, H, D, n0, n1, n2, S, kinds[0], kinds[1], kinds[2]),
               !memcmp(outs[0].data(), outs[1].data(), outs[0].size() * 2), "the bits of bf16 rows");
    }
}

static void check_packed() {
    check_pack_rows();
    check_packed_attn(3, 5, 64, 7, 3, 48, 100, 1, {1, 0, 3});
    check_packed_attn(4, 8, 96, 65, 5, 33, 200, 3, {3, 1, 2});
    check_packed_attn(5, 64, 512, 128, 1, 512, 3000, 1, {1, 0, 3});
    check_packed_attn(2, 64, 512, 128, 1, 512, 3000, 10, {1, 0, 3});
    check_packed_attn(5, 37, 512, 100, 128, 300, 3000, 2, {2, 3, 1});
}
