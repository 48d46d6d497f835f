// sparse_attn_combine: the parts of a split sparse_attn put together, in split order.
//
// Maths    m = max m_s; l = sum l_s * exp(m_s - m) + exp(sink - m); out = bf16(sum o_s * exp(m_s - m) / l)
// Layout   part_o [S, T, H, D] f32, part_ml [S, T, H, 2] f32, sink [H] f32, out [T, H, D] bf16
// Grid     (H, T), block 128; D a multiple of 4; S <= 64
// Numerics f32; a query without any valid row has every m_s = -1e30 and gives 0
// Checked  tests_cuda/check.cu
#include "../common/util.cuh"

extern "C" __global__ void __launch_bounds__(128) sparse_attn_combine(const float* part_o, const float* part_ml, const float* sink, bf16* out, int T, int H,
                                                                      int D, int S) {
    after_previous();
    int h = blockIdx.x, t = blockIdx.y;
    int64_t stride = (int64_t)T * H, at = (int64_t)t * H + h;
    __shared__ float weight[64];
    if (threadIdx.x < 32) {
        // One warp, two splits a lane: the weights of all parts, then everybody reads them.
        int lane = threadIdx.x;
        float m0 = -1e30f, l0 = 0.0f, m1 = -1e30f, l1 = 0.0f;
        if (lane < S) { m0 = part_ml[(lane * stride + at) * 2]; l0 = part_ml[(lane * stride + at) * 2 + 1]; }
        if (lane + 32 < S) { m1 = part_ml[((lane + 32) * stride + at) * 2]; l1 = part_ml[((lane + 32) * stride + at) * 2 + 1]; }
        float m = warp_max(fmaxf(m0, m1));
        float w0 = expf(m0 - m), w1 = expf(m1 - m);
        float l = warp_sum(l0 * w0 + l1 * w1) + expf(sink[h] - m);
        weight[lane] = w0 / l;
        weight[lane + 32] = w1 / l;
    }
    __syncthreads();
    for (int d = threadIdx.x * 4; d < D; d += blockDim.x * 4) {
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
        for (int s = 0; s < S; ++s) {
            float4 v = *reinterpret_cast<const float4*>(part_o + (s * stride + at) * D + d);
            float w = weight[s];
            sum.x += v.x * w; sum.y += v.y * w; sum.z += v.z * w; sum.w += v.w * w;
        }
        *reinterpret_cast<uint2*>(out + at * D + d) = make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
    }
}
