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
__device__ __forceinline__ uint32_t scale_pair_e8m0(uint32_t byte) {
    // 2^-127 is a subnormal bf16; the exponent of 255 is infinity's, whose lowest bit makes it NaN.
    return (max(byte << 7, 0x40u) | (byte + 1) >> 8) * 0x00010001u;
}
__device__ __forceinline__ uint32_t scale_pair_e4m3(uint32_t byte) {
#if __CUDA_ARCH__ >= 890
    float s;
    asm("{ .reg .b16 a, b; .reg .b32 p; cvt.u16.u32 a, %1; cvt.rn.f16x2.e4m3x2 p, a; mov.b32 {a, b}, p; cvt.f32.f16 %0, a; }" : "=f"(s) : "r"(byte));
#else
    float s = e4m3_to_f32(byte);
#endif
    return pack_bf16(s, s);
}
__device__ __forceinline__ uint32_t scale_pair(int kind, uint32_t byte) { return kind == ROW_FP4_E4M3 ? scale_pair_e4m3(byte) : scale_pair_e8m0(byte); }

// Codes without their scale: formats.cuh places them 2^-120 or 2^-126 too low.
constexpr uint32_t E4M3_ONE = 0x7b807b80u, E2M1_ONE = 0x7e807e80u;

// Eight consecutive codes times their scale, as eight bf16 in natural order.
__device__ __forceinline__ uint4 widen8_e4m3(uint32_t w0, uint32_t w1, uint32_t scale) {
    return make_uint4(mul_bf16x2(e4m3_pair<0>(w0, E4M3_ONE), scale), mul_bf16x2(e4m3_pair<2>(w0, E4M3_ONE), scale),
                      mul_bf16x2(e4m3_pair<0>(w1, E4M3_ONE), scale), mul_bf16x2(e4m3_pair<2>(w1, E4M3_ONE), scale));
}
// Bytes of {a, b} by the nibbles of s; one with its top bit set repeats the sign of its byte (__byte_perm ignores that bit).
__device__ __forceinline__ uint32_t prmt_signed(uint32_t a, uint32_t b, uint32_t s) {
    uint32_t d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(s));
    return d;
}
// The bytes of the eight magnitudes as bf16 are looked up, four codes at a time.
__device__ __forceinline__ uint4 widen8_e2m1(uint32_t w, uint32_t scale) {
    uint32_t o[4], m = w & 0x77777777u, s = w & 0x88888888u;
#pragma unroll
    for (int i = 0; i < 2; ++i, m >>= 16, s >>= 16) {
        uint32_t low = prmt_signed(0xc0800000u, 0xc0804000u, m), high = prmt_signed(0x3f3f3f00u, 0x40404040u, m);
        // 0xff for a negative code, else the byte itself, 0x80.
        high |= prmt_signed(0x80u, 0, s) << 1 & 0x80808080u;
        o[2 * i] = mul_bf16x2(prmt(low, high, 0x5140), scale);
        o[2 * i + 1] = mul_bf16x2(prmt(low, high, 0x7362), scale);
    }
    return make_uint4(o[0], o[1], o[2], o[3]);
}

// Columns 8*unit .. of a row in device memory.
__device__ __forceinline__ uint4 load_unit(const Row& r, int unit) {
    if (r.kind == ROW_BF16) return reinterpret_cast<const uint4*>(r.data)[unit];
    uint32_t scale = scale_pair(r.kind, r.scales[unit >> (group_shift(r.kind) - 3)]);
    if (r.kind != ROW_FP8) return widen8_e2m1(reinterpret_cast<const uint32_t*>(r.data)[unit], scale);
    uint2 w = reinterpret_cast<const uint2*>(r.data)[unit];
    return widen8_e4m3(w.x, w.y, scale);
}
