// Packed rows: codes and scales in two planes, and their exact widening to bf16.
//
// A value was rounded to its format before it was cached, so a code times its scale is the bf16 value that was there: one product in
// f32 and one in bf16 give the same bits. Scale bytes as in formats.cuh: 0 of an e8m0 is 2^-127, 255 is NaN; 0x7f of an e4m3 is NaN.
#pragma once
#include "../common/util.cuh"

// As norm_rope_quant's `kind`: bf16; e4m3 by 32 with e8m0 scales; e2m1 by 32 with e8m0 scales; e2m1 by 16 with e4m3 scales.
enum RowKind { ROW_BF16 = 0, ROW_FP8 = 1, ROW_FP4_E8M0 = 2, ROW_FP4_E4M3 = 3 };

__device__ __forceinline__ int group_shift(int kind) { return kind == ROW_FP4_E4M3 ? 4 : 5; }
// Bytes of a row of D values, scales aside.
__device__ __forceinline__ int stored_bytes(int kind, int D) { return kind == ROW_BF16 ? 2 * D : kind == ROW_FP8 ? D : D >> 1; }

struct Row {
    const uint8_t *data, *scales;
    int kind;
};

// A group's scale as a pair of bf16.
__device__ __forceinline__ uint32_t scale_pair(int kind, uint32_t byte) {
    uint32_t s = byte == 0u ? 0x40u : byte == 255u ? 0x7fffu : byte << 7;
    if (kind == ROW_FP4_E4M3) s = __float_as_uint(e4m3_to_f32(byte)) >> 16;
    return s * 0x00010001u;
}
// Codes without their scale: formats.cuh places them 2^-120 or 2^-126 too low.
constexpr uint32_t E4M3_ONE = 0x7b807b80u, E2M1_ONE = 0x7e807e80u;

// Eight consecutive codes, e4m3 in w0 and w1 or e2m1 in w0, times their scale, as eight bf16 in natural order.
__device__ __forceinline__ uint4 widen8(int kind, uint32_t w0, uint32_t w1, uint32_t scale) {
    uint32_t a, b, c, d;
    if (kind == ROW_FP8) {
        a = e4m3_pair<0>(w0, E4M3_ONE); b = e4m3_pair<2>(w0, E4M3_ONE);
        c = e4m3_pair<0>(w1, E4M3_ONE); d = e4m3_pair<2>(w1, E4M3_ONE);
    } else {
        uint32_t p0 = e2m1_pair<0>(w0, E2M1_ONE), p1 = e2m1_pair<1>(w0, E2M1_ONE), p2 = e2m1_pair<2>(w0, E2M1_ONE), p3 = e2m1_pair<3>(w0, E2M1_ONE);
        a = prmt(p0, p1, 0x5410); b = prmt(p2, p3, 0x5410);
        c = prmt(p0, p1, 0x7632); d = prmt(p2, p3, 0x7632);
    }
    return make_uint4(mul_bf16x2(a, scale), mul_bf16x2(b, scale), mul_bf16x2(c, scale), mul_bf16x2(d, scale));
}

// Columns 8*unit .. of a row in device memory.
__device__ __forceinline__ uint4 load_unit(const Row& r, int unit) {
    if (r.kind == ROW_BF16) return reinterpret_cast<const uint4*>(r.data)[unit];
    uint32_t scale = scale_pair(r.kind, r.scales[unit >> (group_shift(r.kind) - 3)]);
    if (r.kind != ROW_FP8) return widen8(r.kind, reinterpret_cast<const uint32_t*>(r.data)[unit], 0, scale);
    uint2 w = reinterpret_cast<const uint2*>(r.data)[unit];
    return widen8(r.kind, w.x, w.y, scale);
}
