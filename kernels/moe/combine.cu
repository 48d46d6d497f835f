// moe_combine: the routed outputs of a token summed, plus the shared expert.
//
// Maths    out = bf16(sum over the token's pairs in ascending expert order of f32(y[pair]) + f32(shared))
// Layout   y [P, dim] bf16 by position, inverse [P] i32 of group_tokens, experts [T, k] u32, shared [T, dim] bf16 or null,
//          out [T, dim] bf16; out_f32 [T, dim] instead (for an all-reduce across ranks, shared then null)
// Grid     (ceil(dim/8/128), T), block 128; k <= 32
// Numerics f32 sum in the reference's order, one rounding
// Checked  tests_cuda/check.cu, crates/moe/tests
#include "../common/quantise.cuh"

extern "C" __global__ void __launch_bounds__(128) moe_combine(const bf16* y, const int32_t* inverse, const uint32_t* experts, const bf16* shared,
                                                              bf16* out, float* out_f32, int dim, int k) {
    after_previous();
    __shared__ int32_t at[32];
    int64_t t = blockIdx.y;
    if ((int)threadIdx.x < k) {
        // Rank of this slot's expert among the token's (stable for a repeated expert).
        uint32_t e = experts[t * k + threadIdx.x];
        int rank = 0;
        for (int j = 0; j < k; ++j) {
            uint32_t o = experts[t * k + j];
            rank += o < e || (o == e && j < (int)threadIdx.x);
        }
        at[rank] = inverse[t * k + threadIdx.x];
    }
    __syncthreads();
    int u = blockIdx.x * blockDim.x + threadIdx.x, units = dim >> 3;
    if (u >= units) return;
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0}, v[8];
    for (int j = 0; j < k; ++j) {
        if (at[j] < 0) continue;
        unpack8(reinterpret_cast<const uint4*>(y)[(int64_t)at[j] * units + u], v);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += v[i];
    }
    if (shared) {
        unpack8(reinterpret_cast<const uint4*>(shared)[t * units + u], v);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += v[i];
    }
    if (out) reinterpret_cast<uint4*>(out)[t * units + u] = pack8(sum);
    if (out_f32) {
        float4* o = reinterpret_cast<float4*>(out_f32) + (t * units + u) * 2;
        o[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        o[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    }
}
