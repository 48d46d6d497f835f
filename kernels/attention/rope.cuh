// Rotation of adjacent pairs of columns by the angles of a position.
#pragma once
#include "../common/quantise.cuh"

// One pair, each value rounded to bf16. Backwards with -s.
__device__ __forceinline__ void rotate_pair(float& re, float& im, float c, float s) {
    float x = re, y = im;
    re = round_bf16(__fsub_rn(__fmul_rn(x, c), __fmul_rn(y, s)));
    im = round_bf16(__fadd_rn(__fmul_rn(x, s), __fmul_rn(y, c)));
}

// Eight columns of which the first is column p of those that turn, p a multiple of 8; p < 0: none does. cos, sin: the position's rd/2.
__device__ __forceinline__ uint4 rotate8(const uint4& v, const float* cos_t, const float* sin_t, int p) {
    if (p < 0) return v;
    float x[8];
    unpack8(v, x);
    float4 c = *reinterpret_cast<const float4*>(cos_t + (p >> 1)), s = *reinterpret_cast<const float4*>(sin_t + (p >> 1));
    rotate_pair(x[0], x[1], c.x, s.x);
    rotate_pair(x[2], x[3], c.y, s.y);
    rotate_pair(x[4], x[5], c.z, s.z);
    rotate_pair(x[6], x[7], c.w, s.w);
    return pack8(x);
}
