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
    // comb stays as it is, and every pass changes a factor per row (u) or per column (v) instead: dividing row j by (its sum + eps) is
    // u_j <- u_j / (u_j s_j + eps) = 1 / (s_j + eps / u_j) with s_j = sum_k comb_jk v_k, and 1/u_j is the last denominator.
    // The same numbers up to rounding, in half the dependent steps.
    float u[4] = {1, 1, 1, 1}, v[4] = {1, 1, 1, 1}, a[4] = {1, 1, 1, 1}, b[4] = {1, 1, 1, 1};
#pragma unroll 1
    for (int it = 0; it < p.iters; ++it) {
        if (it) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                a[j] = (comb[j * 4] * v[0] + comb[j * 4 + 1] * v[1]) + (comb[j * 4 + 2] * v[2] + comb[j * 4 + 3] * v[3]) + p.eps * a[j];
                u[j] = reciprocal(a[j]);
            }
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            b[k] = (comb[k] * u[0] + comb[4 + k] * u[1]) + (comb[8 + k] * u[2] + comb[12 + k] * u[3]) + p.eps * b[k];
            v[k] = reciprocal(b[k]);
        }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) comb[j * 4 + k] *= u[j] * v[k];
}
