// sparse_attn_combine: the parts of a split sparse_attn put together, in split order, and what else ends an attention layer.
//
// Maths    m = max m_s; l = sum l_s * exp(m_s - m) + exp(sink - m); out = bf16(sum o_s * exp(m_s - m) / l); with cos, sin the last rd columns
//          are then turned back, as norm_rope_quant does; with src the step's own rows go to the pool, as write_rows or pack_rows do
// Layout   part_o [S, T, H, D] f32, part_ml [S, T, H, 2] f32, sink [H] f32, out [T, H, D] bf16; cos, sin [T, rd/2] f32 or null, rd a multiple of 4;
//          src [T, D] bf16 or null, rows [T] i32 (-1 = skip), pool [rows, D] bf16 (kind 0) or codes with scales, which nothing else reads
// Grid     (H, T), with src (H + 1, T), block 128; D a multiple of 8; S <= 64
// Numerics f32; a query without any valid row has every m_s = -1e30 and gives 0
// Checked  tests_cuda/check_attention.cuh
#include "pack_row.cuh"
#include "rope.cuh"

extern "C" __global__ void __launch_bounds__(128) sparse_attn_combine(const float* part_o, const float* part_ml, const float* sink, const float* cos_t,
                                                                      const float* sin_t, bf16* out, const bf16* src, const int32_t* rows, uint8_t* pool,
                                                                      uint8_t* scales, int T, int H, int D, int S, int rd, int kind) {
    after_previous();
    int h = blockIdx.x, t = blockIdx.y;
    if (h == H) {
        int64_t row = rows[t];
        src += (int64_t)t * D;
        if (row < 0) return;
        if (kind != ROW_BF16) return pack_row(src, row, pool, scales, D, kind);
        uint4* to = reinterpret_cast<uint4*>(pool) + row * (D >> 3);
        for (int i = threadIdx.x; i < D >> 3; i += 128) to[i] = reinterpret_cast<const uint4*>(src)[i];
        return;
    }
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
        int pair = (d - (D - rd)) >> 1;
        if (cos_t && pair >= 0) {
            const float *c = cos_t + t * (rd >> 1) + pair, *s = sin_t + t * (rd >> 1) + pair;
            float v[4] = {round_bf16(sum.x), round_bf16(sum.y), round_bf16(sum.z), round_bf16(sum.w)};
            rotate_pair(v[0], v[1], c[0], -s[0]);
            rotate_pair(v[2], v[3], c[1], -s[1]);
            sum = make_float4(v[0], v[1], v[2], v[3]);
        }
        *reinterpret_cast<uint2*>(out + at * D + d) = make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
    }
}
