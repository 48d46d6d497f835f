// The coefficients of one token from its 24 mixes, C = 4, in the registers of one thread.
#pragma once
#include "../common/util.cuh"

struct SinkhornParams {
    int iters;
    float eps;
};

__device__ __forceinline__ float reciprocal(float x) {
    float r;
    asm("rcp.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// mixes m [24] -> pre [4], post [4], comb [4][4] (row j = source copy). The order of passes is the reference's.
__device__ __forceinline__ void split_sinkhorn4(const float (&m)[24], const float* scale, const float* base, SinkhornParams p, float (&pre)[4],
                                                float (&post)[4], float (&comb)[16]) {
    float s0 = scale[0], s1 = scale[1], s2 = scale[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        pre[i] = 1.0f / (1.0f + expf(-(m[i] * s0 + base[i]))) + p.eps;
        post[i] = 2.0f / (1.0f + expf(-(m[4 + i] * s1 + base[4 + i])));
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float r[4], mx = -INFINITY;
#pragma unroll
        for (int k = 0; k < 4; ++k) { r[k] = m[8 + j * 4 + k] * s2 + base[8 + j * 4 + k]; mx = fmaxf(mx, r[k]); }
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < 4; ++k) { r[k] = expf(r[k] - mx); sum += r[k]; }
#pragma unroll
        for (int k = 0; k < 4; ++k) comb[j * 4 + k] = r[k] / sum + p.eps;
    }
    // x / s as x * (1/s): within an ulp of the division, and the iteration contracts, so nothing builds up.
#pragma unroll 1
    for (int it = 0; it < p.iters; ++it) {
        if (it) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float r = reciprocal((comb[j * 4] + comb[j * 4 + 1]) + (comb[j * 4 + 2] + comb[j * 4 + 3]) + p.eps);
#pragma unroll
                for (int k = 0; k < 4; ++k) comb[j * 4 + k] *= r;
            }
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            float r = reciprocal((comb[k] + comb[4 + k]) + (comb[8 + k] + comb[12 + k]) + p.eps);
#pragma unroll
            for (int j = 0; j < 4; ++j) comb[j * 4 + k] *= r;
        }
    }
}
