// A row on its way to its cache, by one warp: norm, rotation and rounding as norm_rope_quant.cu has them.
#pragma once
#include "../common/quantise.cuh"
#include "rope.cuh"

// A lane's N consecutive bf16 values, 2 to 16, in as few accesses as there can be.
template <int N>
struct Run {
    uint32_t w[N / 2];
    __device__ __forceinline__ void load(const bf16* p) {
        if constexpr (N == 2) w[0] = *reinterpret_cast<const uint32_t*>(p);
        if constexpr (N == 4) *reinterpret_cast<uint2*>(w) = *reinterpret_cast<const uint2*>(p);
#pragma unroll
        for (int i = 0; i < N / 8; ++i) reinterpret_cast<uint4*>(w)[i] = reinterpret_cast<const uint4*>(p)[i];
    }
    __device__ __forceinline__ void store(bf16* p) const {
        if constexpr (N == 2) *reinterpret_cast<uint32_t*>(p) = w[0];
        if constexpr (N == 4) *reinterpret_cast<uint2*>(p) = *reinterpret_cast<const uint2*>(w);
#pragma unroll
        for (int i = 0; i < N / 8; ++i) reinterpret_cast<uint4*>(p)[i] = reinterpret_cast<const uint4*>(w)[i];
    }
};

// One row of D = 32 * PER columns, PER consecutive ones a lane: everything is loaded before anything is computed.
template <int PER>
__device__ __forceinline__ void whole_row(const bf16* x, const bf16* w, const float* cos_t, const float* sin_t, bf16* out, bf16* pool, uint8_t* codes,
                                          uint8_t* scales, int64_t v, int64_t t, int64_t row, int rd, float eps, int kind, int inverse) {
    constexpr int D = 32 * PER;
    int lane = threadIdx.x & 31, d0 = lane * PER, first = D - rd;
    __align__(16) Run<PER> run, weight;
    run.load(x + v * D + d0);
    if (w) weight.load(w + d0);
    float c[PER / 2], s[PER / 2], val[PER];
#pragma unroll
    for (int j = 0; j < PER / 2; ++j) {
        int p = d0 + 2 * j - first;
        c[j] = p >= 0 ? cos_t[t * (rd >> 1) + (p >> 1)] : 1.0f;
        s[j] = p >= 0 ? sin_t[t * (rd >> 1) + (p >> 1)] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < PER / 2; ++j) { val[2 * j] = bf16_lo(run.w[j]); val[2 * j + 1] = bf16_hi(run.w[j]); }
    if (w) {
        double sum = 0.0;
#pragma unroll
        for (int i = 0; i < PER; ++i) sum += (double)val[i] * val[i];
        double r = norm_factor(warp_sum(sum), D, eps);
#pragma unroll
        for (int j = 0; j < PER / 2; ++j) {
            val[2 * j] = normed(bf16_lo(weight.w[j]), val[2 * j], r);
            val[2 * j + 1] = normed(bf16_hi(weight.w[j]), val[2 * j + 1], r);
        }
    }
#pragma unroll
    for (int j = 0; j < PER / 2; ++j) {
        if (d0 + 2 * j < first) continue;
        rotate_pair(val[2 * j], val[2 * j + 1], c[j], inverse ? -s[j] : s[j]);
    }
    if (kind) {
        float amax = 0.0f;
#pragma unroll
        for (int i = 0; i < PER; ++i) amax = fmaxf(amax, fabsf(val[i]));
        int group = kind == 3 ? 16 : 32;
        for (int o = 1; o * PER < group; o <<= 1) amax = fmaxf(amax, __shfl_xor_sync(FULL, amax, o));
        uint32_t byte, code[PER];
        if (kind == 1) {
            byte = fp8_scale(amax);
            float inv = e8m0_inverse(byte), scale = e8m0_to_f32(byte);
#pragma unroll
            for (int i = 0; i < PER; ++i) { code[i] = fp8_code(val[i], inv); val[i] = e4m3_to_f32(code[i]) * scale; }
            if (codes && row >= 0)
#pragma unroll
                for (int i = 0; i < PER; ++i) codes[row * D + d0 + i] = (uint8_t)code[i];
        } else {
            float scale = kind == 2 ? fp4_scale_e8m0(amax, byte) : fp4_scale_e4m3(amax, byte);
#pragma unroll
            for (int i = 0; i < PER; ++i) { code[i] = fp4_code(val[i], scale); val[i] = e2m1_to_f32(code[i]) * scale; }
            if (codes && row >= 0)
#pragma unroll
                for (int i = 0; i < PER; i += 2) codes[row * (D >> 1) + ((d0 + i) >> 1)] = (uint8_t)(code[i] | code[i + 1] << 4);
        }
        if (scales && row >= 0 && d0 % group == 0) scales[row * (D / group) + d0 / group] = (uint8_t)byte;
    }
#pragma unroll
    for (int j = 0; j < PER / 2; ++j) run.w[j] = pack_bf16(val[2 * j], val[2 * j + 1]);
    if (out) run.store(out + v * D + d0);
    if (pool && row >= 0) run.store(pool + row * D + d0);
}
