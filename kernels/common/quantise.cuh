// Group quantisation in registers: the steps of act_quant and fp4_act_quant on values already loaded.
#pragma once
#include "util.cuh"

// e8m0 byte of a group's scale for e4m3 codes, from the group's largest magnitude.
__device__ __forceinline__ uint32_t fp8_scale(float amax) { return pow2ceil_e8m0(fmaxf(amax, 1e-4f) * (1.0f / 448.0f)); }
// Dividing by a power of two is exact, so the reference's division and this product agree bit for bit.
__device__ __forceinline__ uint32_t fp8_code(float v, float inv) { return f32_to_e4m3(v * inv); }
// 1 / 2^(b-127); b stays within 105..=254 here because of the floor in fp8_scale.
__device__ __forceinline__ float e8m0_inverse(uint32_t b) { return b >= 254u ? __uint_as_float(0x00400000u) : __uint_as_float((254u - b) << 23); }

// Eight consecutive values of one thread; four neighbouring lanes hold a group of 32. All lanes must call.
__device__ __forceinline__ uint32_t group_scale8(const float (&v)[8]) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(v[i]));
    amax = fmaxf(amax, __shfl_xor_sync(FULL, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(FULL, amax, 2));
    return fp8_scale(amax);
}
__device__ __forceinline__ void fake_quant8(float (&v)[8]) {
    uint32_t s = group_scale8(v);
    float inv = e8m0_inverse(s), scale = e8m0_to_f32(s);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = e4m3_to_f32(fp8_code(v[i], inv)) * scale;
}
__device__ __forceinline__ void unpack8(const uint4& p, float (&v)[8]) {
    v[0] = bf16_lo(p.x); v[1] = bf16_hi(p.x); v[2] = bf16_lo(p.y); v[3] = bf16_hi(p.y);
    v[4] = bf16_lo(p.z); v[5] = bf16_hi(p.z); v[6] = bf16_lo(p.w); v[7] = bf16_hi(p.w);
}
__device__ __forceinline__ uint4 pack8(const float (&v)[8]) {
    return make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}

// Eight consecutive values, already rounded to bf16, as unit `at` (of 8) of whichever outputs are wanted: themselves, their
// act_quant values, or their codes and scales. Groups do not straddle units of four; all lanes must call.
__device__ __forceinline__ void emit8(float (&v)[8], int64_t at, bool live, bf16* plain, bf16* fake, uint8_t* codes, uint8_t* scales) {
    if (plain && live) reinterpret_cast<uint4*>(plain)[at] = pack8(v);
    if (!fake && !codes) return;
    uint32_t s = group_scale8(v), c[8];
    float inv = e8m0_inverse(s), scale = e8m0_to_f32(s);
#pragma unroll
    for (int i = 0; i < 8; ++i) c[i] = fp8_code(v[i], inv);
    if (codes && live) {
        reinterpret_cast<uint2*>(codes)[at] = make_uint2(c[0] | c[1] << 8 | c[2] << 16 | c[3] << 24, c[4] | c[5] << 8 | c[6] << 16 | c[7] << 24);
        if ((at & 3) == 0) scales[at >> 2] = (uint8_t)s;
    }
    if (fake) {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = e4m3_to_f32(c[i]) * scale;
        if (live) reinterpret_cast<uint4*>(fake)[at] = pack8(v);
    }
}

// The fp4 scale of a group: an exact power of two (group 32, e8m0) or an e4m3 value (group 16), as f32.
__device__ __forceinline__ float fp4_scale_e8m0(float amax, uint32_t& byte) {
    byte = pow2ceil_e8m0(fmaxf(amax, 6.0f * 0x1p-126f) * (1.0f / 6.0f));
    return e8m0_to_f32(byte);
}
__device__ __forceinline__ float fp4_scale_e4m3(float amax, uint32_t& byte) {
    byte = f32_to_e4m3(__fdiv_rn(fmaxf(amax, 6.0f * 0x1p-9f), 6.0f));
    return e4m3_to_f32(byte);
}
__device__ __forceinline__ uint32_t fp4_code(float v, float scale) { return f32_to_e2m1(fminf(fmaxf(__fdiv_rn(v, scale), -6.0f), 6.0f)); }

// Where column k of a row sits inside its K block of the tiled activation layout that the Hopper products read.
// Layout: [ceil(K/64)][rows padded to 8][64] bf16; the 64 slots of a row are 8 units of 16 bytes, unit u stored at
// u ^ (row & 7) (the 128-byte swizzle of the tensor core). Slot s = 16*j + 8*h + 2*q + i holds the column that
// lane q of a weight row supplies in slice j: see weights.cuh.
__device__ __forceinline__ int tiled_column_fp8(int s) { return ((s >> 1) & 3) * 16 + (s >> 4) * 4 + ((s >> 3) & 1) * 2 + (s & 1); }
// fp4 blocks are 128 columns: s runs over 0..127 and slots 64.. belong to the next 64-slot block.
__device__ __forceinline__ int tiled_column_fp4(int s) {
    int j = s >> 4;
    return ((s >> 1) & 3) * 32 + (j >> 1) * 8 + (j & 1) * 2 + ((s >> 3) & 1) + 4 * (s & 1);
}
