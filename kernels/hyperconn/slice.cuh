// What the kernels of a step share: sums over a slice of the columns, and the norm.
#pragma once
#include "../common/quantise.cuh"

// Sums N = 8 or 16 values over the warp at once: lane l returns the total of value l % N. 9 or 16 shuffles instead of 40 or 80.
template <int O, int N>
__device__ __forceinline__ void halve(float (&v)[N]) {
    bool up = threadIdx.x & O;
#pragma unroll
    for (int i = 0; i < O; ++i) {
        float send = up ? v[i] : v[i + O], keep = up ? v[i + O] : v[i];
        v[i] = keep + __shfl_xor_sync(FULL, send, O);
    }
    if constexpr (O > 1) halve<O / 2>(v);
}
template <int N>
__device__ __forceinline__ float reduce(float (&v)[N]) {
    halve<N / 2>(v);
    float s = v[0];
#pragma unroll
    for (int o = N; o < 32; o *= 2) s += __shfl_xor_sync(FULL, s, o);
    return s;
}

// A part holds, for its slice of dim, four times the dots of six rows of fn and two more places; in these: sum of s^2, sum of y^2.
constexpr int SS = 6, YY = 30;
__device__ __forceinline__ int place(int row) { return row / 6 * 8 + row % 6; }

__device__ __forceinline__ void load4(const float* from, float (&v)[4]) {
    float4 f = *reinterpret_cast<const float4*>(from);
    v[0] = f.x; v[1] = f.y; v[2] = f.z; v[3] = f.w;
}

// A norm's factor in two floats: products of it with an f32 then round as in f64, without conversions.
struct NormFactor {
    float hi, lo;
    __device__ __forceinline__ NormFactor(double r) : hi((float)r), lo((float)(r - (double)hi)) {}
    // w * (x * r), rounded to bf16.
    __device__ __forceinline__ float normed(float w, float x) const {
        float p = x * hi, e = fmaf(x, lo, fmaf(x, hi, -p)), q = w * p;
        return round_bf16(q + fmaf(w, e, fmaf(w, p, -q)));
    }
};
