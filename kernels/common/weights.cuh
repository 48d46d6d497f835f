// Weight rows as tensor-core A operands, widened in registers from the stored bytes.
//
// K is walked in blocks of 128. One 16-byte load of a lane holds C columns (C = 32 fp4, 16 fp8, 8 bf16); lane 4g + q
// of a warp owns, of rows g and g+8 of a 16-row tile, the columns h*4C + q*C .. +C for h < 32/C. Four lanes so read
// 64 contiguous bytes, a lane's columns lie in whole quantisation groups, and a K tail (K is a multiple of 32) is
// whole loads. A sum does not care which k sits in which slot of the instruction as long as both operands
// agree, so slot order is whatever unpacks cheapest: see frag_a / frag_b.
#pragma once
#include "util.cuh"

enum WeightFormat { FP8 = 0, FP4 = 1, BF16 = 2 };

template <int F>
struct Rows16;  // raw bytes of one lane: rows g and g+8, 32 columns

template <>
struct Rows16<FP8> {
    uint4 a[2], b[2];
    uint32_t s[2];  // a 16-row tile lies in one 32-row scale tile
};
template <>
struct Rows16<FP4> {
    uint4 a[1], b[1];
    uint32_t sa, sb;
};
template <>
struct Rows16<BF16> {
    uint4 a[4], b[4];
};
template <int F>
__device__ constexpr int columns() { return F == FP4 ? 32 : F == FP8 ? 16 : 8; }

// row_a, row_b: this lane's rows, already clamped to the matrix; k0: first column of the block. Columns past K read as 0.
template <int F>
__device__ __forceinline__ void load_rows(Rows16<F>& r, const uint8_t* w, const uint8_t* s, int64_t row_a, int64_t row_b, int K, int k0, int q) {
    constexpr int C = columns<F>();
    int64_t row_bytes = F == FP4 ? K >> 1 : F == FP8 ? K : 2 * (int64_t)K, ks = K >> 5;
#pragma unroll
    for (int h = 0; h < 32 / C; ++h) {
        int k = k0 + h * 4 * C + q * C;
        bool live = k < K;
        const uint8_t* p = w + (int64_t)k * 16 / C;
        r.a[h] = live ? load_stream(p + row_a * row_bytes) : make_uint4(0, 0, 0, 0);
        r.b[h] = live ? load_stream(p + row_b * row_bytes) : make_uint4(0, 0, 0, 0);
        if constexpr (F == FP8) r.s[h] = live ? __ldg(s + (row_a >> 5) * ks + (k >> 5)) : 0;
        if constexpr (F == FP4) {
            r.sa = live ? __ldg(s + row_a * ks + (k >> 5)) : 0;
            r.sb = live ? __ldg(s + row_b * ks + (k >> 5)) : 0;
        }
    }
}
// The activations of one token at the same columns; `x` is the token's row.
template <int F>
__device__ __forceinline__ void load_x(uint4 (&v)[4], const bf16* x, bool live, int K, int k0, int q) {
    constexpr int C = columns<F>();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int k = k0 + (i * 8 / C) * 4 * C + q * C + (i * 8) % C;
        v[i] = live && k < K ? load_cached(x + k) : make_uint4(0, 0, 0, 0);
    }
}

__device__ __forceinline__ uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// The A registers of slice j (0..7): 16 of the block's 128 columns.
template <int J>
__device__ __forceinline__ void frag_a(const Rows16<FP8>& r, const uint32_t (&f)[2], uint32_t (&o)[4]) {
    uint32_t fa = f[J >> 2], fb = fa;
    uint32_t wa = word(r.a[J >> 2], J & 3), wb = word(r.b[J >> 2], J & 3);
    o[0] = e4m3_pair<0>(wa, fa); o[1] = e4m3_pair<0>(wb, fb);
    o[2] = e4m3_pair<2>(wa, fa); o[3] = e4m3_pair<2>(wb, fb);
}
template <int J>
__device__ __forceinline__ void frag_a(const Rows16<FP4>& r, const uint32_t (&f)[2], uint32_t (&o)[4]) {
    constexpr int I = (J & 1) * 2;
    uint32_t wa = word(r.a[0], J >> 1), wb = word(r.b[0], J >> 1);
    o[0] = e2m1_pair<I>(wa, f[0]); o[1] = e2m1_pair<I>(wb, f[1]);
    o[2] = e2m1_pair<I + 1>(wa, f[0]); o[3] = e2m1_pair<I + 1>(wb, f[1]);
}
template <int J>
__device__ __forceinline__ void frag_a(const Rows16<BF16>& r, const uint32_t (&)[2], uint32_t (&o)[4]) {
    o[0] = word(r.a[J >> 1], (J & 1) * 2); o[1] = word(r.b[J >> 1], (J & 1) * 2);
    o[2] = word(r.a[J >> 1], (J & 1) * 2 + 1); o[3] = word(r.b[J >> 1], (J & 1) * 2 + 1);
}
// The matching B registers, from this lane's 32 activations in natural order.
template <int F, int J>
__device__ __forceinline__ void frag_b(const uint4 (&x)[4], uint32_t& b0, uint32_t& b1) {
    const uint4& v = x[J >> 1];
    if (F == FP4) {
        constexpr int I = (J & 1) * 2;
        b0 = x_pair<I>(v.x, v.y, v.z, v.w);
        b1 = x_pair<I + 1>(v.x, v.y, v.z, v.w);
    } else {
        b0 = word(v, (J & 1) * 2);
        b1 = word(v, (J & 1) * 2 + 1);
    }
}
// The bf16 pairs that scale a lane's columns: per half for fp8, per row for fp4.
__device__ __forceinline__ void factors(const Rows16<FP8>& r, uint32_t (&f)[2]) { f[0] = e4m3_factor(r.s[0]); f[1] = e4m3_factor(r.s[1]); }
__device__ __forceinline__ void factors(const Rows16<FP4>& r, uint32_t (&f)[2]) { f[0] = e2m1_factor(r.sa); f[1] = e2m1_factor(r.sb); }
__device__ __forceinline__ void factors(const Rows16<BF16>&, uint32_t (&)[2]) {}
template <int F>
__device__ __forceinline__ float undo() { return F == BF16 ? 1.0f : WIDEN_UNDO; }

// One K block of a 16-row tile against NT tiles of 8 tokens, x[t] being this lane's 32 activations of token g.
template <int F, int NT>
__device__ __forceinline__ void block_mma(const Rows16<F>& r, const uint4 (&x)[NT][4], float (&acc)[NT][4]) {
    uint32_t f[2];
    factors(r, f);
#define SLICE(J)                                                            \
    {                                                                       \
        uint32_t a[4], b0, b1;                                              \
        frag_a<J>(r, f, a);                                                 \
        _Pragma("unroll") for (int t = 0; t < NT; ++t) {                    \
            frag_b<F, J>(x[t], b0, b1);                                     \
            mma_bf16(acc[t], a[0], a[1], a[2], a[3], b0, b1);               \
        }                                                                   \
    }
    SLICE(0) SLICE(1) SLICE(2) SLICE(3) SLICE(4) SLICE(5) SLICE(6) SLICE(7)
#undef SLICE
}
