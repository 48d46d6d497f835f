// Launches of an attention layer, as the crates make them.
#pragma once
#include "harness.cuh"
#include "../attention/rows.cuh"

static size_t attn_smem(int D, int n) { int ldd = (D + 63) / 64 * 64; return 2 * 32 * ldd * 2 + 32 * 33 * 4 + 32 * 40 * 2 + 32 * 4 * 4 + 4 * (size_t)n; }

// Angles that turn the last rd columns of queries, and of what comes out; null: neither.
struct Angles {
    const float *cos = nullptr, *sin = nullptr;
    int rd = 0;
};
// Rows that go to a pool behind attention; null: none.
struct Write {
    const bf16* src = nullptr;
    const int* rows = nullptr;
    void* pool = nullptr;
    uint8_t* scales = nullptr;
    int kind = 0;
};
constexpr size_t FEW_BYTES = 101664;
struct Attn {
    int T, H, D, S;
    bool sm90 = false, packed = false;
    Angles angles = {};
    Write write = {};
    int few = 0;  // blocks of a cluster of sparse_attn_few; 0: the other kernels

    void run(const bf16* q, const Scopes& sc, const float* sink, bf16* out, float* po, float* ml, float scale) const {
        if (few) {
            launch_as({few, false, g_overlap}, fmt("attention/sparse_attn_few_sm90:sparse_attn_few_%s%d", packed ? "packed_" : "", few), dim3(few, T * ((H + 15) / 16) + (write.src != nullptr)),
                      256, FEW_BYTES, q, angles.cos, angles.sin, sc, sink, out, write.src, write.rows, (uint8_t*)write.pool, write.scales, T, H, angles.rd, write.kind, scale);
            return;
        }
        parts(q, sc, sink, out, po, ml, scale);
        if (S > 1) combine(po, ml, sink, out);
    }
    void parts(const bf16* q, const Scopes& sc, const float* sink, bf16* out, float* po, float* ml, float scale) const {
        int n = sc.s[0].n + sc.s[1].n + sc.s[2].n;
        if (sm90)
            launch(packed ? "attention/sparse_attn_sm90:sparse_attn_packed_sm90" : "attention/sparse_attn_sm90", dim3(S, (H + 63) / 64, T), 384,
                   3 * 65536 + 16384 + 1024 + 4 * n, q, angles.cos, angles.sin, sc, sink, out, po, ml, T, H, angles.rd, scale);
        else
            launch(packed ? "attention/sparse_attn:sparse_attn_packed" : "attention/sparse_attn", dim3(S, (H + 31) / 32, T), 256, attn_smem(D, n), q, angles.cos,
                   angles.sin, sc, sink, out, po, ml, T, H, D, angles.rd, scale);
    }
    void combine(const float* po, const float* ml, const float* sink, bf16* out) const {
        launch("attention/sparse_attn_combine", dim3(H + (write.src != nullptr), T), 128, 0, po, ml, sink, angles.cos, angles.sin, out, write.src, write.rows,
               (uint8_t*)write.pool, write.scales, T, H, D, S, angles.rd, write.kind);
    }
};

// query_heads: the heads of one token, and with a kv its window row.
inline void launch_query_heads(int ks, int N, int K, int D, int rd, const bf16* latent, const bf16* norm, const uint8_t* w, const uint8_t* s, bf16* q, const bf16* kv,
                               const bf16* kv_norm, const float* cos, const float* sin, bf16* row) {
    launch_as({ks, false, g_overlap}, "attention/query_heads_sm90:query_heads_m1", dim3(((N + 127) / 128 + (kv != nullptr)) * ks), 256, few_smem(K, ks, 1, false), latent,
              norm, w, s, q, kv, kv_norm, cos, sin, row, N, K, D, rd, 1e-20f, 1e-20f);
}
