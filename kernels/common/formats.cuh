// Number formats on the device: e4m3, e8m0 and e2m1 codes, and their exact widening to bf16.
//
// Everything here is bit arithmetic, so that the same source serves sm_80 (no fp8 instructions) and sm_90.
// The CPU authority is `deepseek_v41_quant::formats`; all 256 / 16 codes are compared in tests_cuda/check.cu.
#pragma once
#include <cuda_bf16.h>
#include <stdint.h>

typedef __nv_bfloat16 bf16;

__device__ __forceinline__ float bf16_bits_to_f32(uint32_t bits) { return __uint_as_float(bits << 16); }
__device__ __forceinline__ float bf16_lo(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_hi(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
// Round to nearest even, NaN kept: the conversion every bf16 output of the model goes through.
__device__ __forceinline__ float round_bf16(float v) { return __bfloat162float(__float2bfloat16_rn(v)); }
__device__ __forceinline__ uint32_t pack_bf16(float lo, float hi) {
    __nv_bfloat162 p = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<uint32_t*>(&p);
}

// e8m0: 2^(b-127). Byte 0 is the subnormal 2^-127, byte 255 is NaN.
__device__ __forceinline__ float e8m0_to_f32(uint32_t b) {
    uint32_t bits = b << 23;
    if (b == 0) bits = 0x00400000u;
    if (b == 255) bits = 0x7fffffffu;
    return __uint_as_float(bits);
}
// The smallest power of two that is not below t, as its e8m0 byte (t is positive and normal).
__device__ __forceinline__ uint32_t pow2ceil_e8m0(float t) {
    uint32_t u = __float_as_uint(t);
    return ((u >> 23) & 255u) + ((u & 0x7fffffu) != 0u);
}

__device__ __forceinline__ float e4m3_to_f32(uint32_t c) {
    uint32_t m = c & 0x7fu;
    if (m == 0x7fu) return __uint_as_float(0x7fffffffu);
    // The 7 low bits sit at the bottom of an f32 exponent; the product moves 2^-120 and handles subnormals.
    float v = __uint_as_float(m << 20) * 0x1p120f;
    return __uint_as_float(__float_as_uint(v) | ((c & 0x80u) << 24));
}
// Round to nearest even, saturating at 448; the sign of zero is kept, NaN gives 0x7f. Chips that have the conversion use it: a tenth of
// the instructions, the same codes.
__device__ __forceinline__ uint32_t f32_to_e4m3(float v) {
#if __CUDA_ARCH__ >= 890
    uint16_t c;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(c) : "f"(0.0f), "f"(v));
    return c;
#else
    uint32_t sign = (__float_as_uint(v) >> 24) & 0x80u;
    if (v != v) return 0x7fu;
    float a = fminf(fabsf(v), 448.0f);
    if (a < 0x1p-6f) return sign | (uint32_t)__float2int_rn(a * 512.0f);
    uint32_t u = __float_as_uint(a);
    u += 0x7ffffu + ((u >> 20) & 1u);
    return sign | ((u >> 20) - (120u << 3));
#endif
}

__device__ __forceinline__ float e2m1_to_f32(uint32_t c) {
    float v = __uint_as_float((c & 7u) << 22) * 0x1p126f;
    return __uint_as_float(__float_as_uint(v) | ((c & 8u) << 28));
}
// Ties go to the even code, hence the alternation of > and >=.
__device__ __forceinline__ uint32_t f32_to_e2m1(float v) {
    float a = fabsf(v);
    uint32_t c = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    return c | ((__float_as_uint(v) >> 28) & 8u);
}

// ---- widening to bf16 pairs, for tensor-core operands ---------------------------------------------
// Codes are placed in the low exponent bits of a bf16, where they mean value * 2^-120 (e4m3) or 2^-126
// (e2m1), subnormals included; one product with a power of two then gives value * scale * 2^-32 exactly.
// The 2^-32 keeps that power inside bf16's exponent range for every e8m0 scale up to 2^33 (e2m1) or 2^39
// (e4m3); larger ones and byte 255 become inf or NaN, never a wrong number. WIDEN_UNDO is applied to the sums.
#define WIDEN_UNDO 0x1p32f

__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t sel) { return __byte_perm(a, b, sel); }

__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
    return d;
}
__device__ __forceinline__ uint32_t e4m3_factor(uint32_t e8m0) { return min(e8m0 + 88u, 255u) * 0x00800080u; }
__device__ __forceinline__ uint32_t e2m1_factor(uint32_t e8m0) { return min(e8m0 + 94u, 255u) * 0x00800080u; }

// Codes in bytes (i, i+1) of w, i = 0 or 2.
template <int I>
__device__ __forceinline__ uint32_t e4m3_pair(uint32_t w, uint32_t factor) {
    uint32_t t = prmt(w, 0, I == 0 ? 0x1404 : 0x3424);
    return mul_bf16x2(((t >> 4) & 0x07f007f0u) | (t & 0x80008000u), factor);
}
// Codes in nibbles (i, i+4) of w, i = 0..3: the pair that one shift can reach. x_pair undoes the order.
template <int I>
__device__ __forceinline__ uint32_t e2m1_pair(uint32_t w, uint32_t factor) {
    uint32_t sign = I == 3 ? w : w << (12 - 4 * I);
    uint32_t mag = I < 2 ? w << (6 - 4 * I) : w >> (4 * I - 6);
    return mul_bf16x2((mag & 0x01c001c0u) | (sign & 0x80008000u), factor);
}
// From 8 bf16 in natural order (words r0..r3), the pair (i, i+4) that matches e2m1_pair<I>.
template <int I>
__device__ __forceinline__ uint32_t x_pair(uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    return I == 0 ? prmt(r0, r2, 0x5410) : I == 1 ? prmt(r0, r2, 0x7632) : I == 2 ? prmt(r1, r3, 0x5410) : prmt(r1, r3, 0x7632);
}
