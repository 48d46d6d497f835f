// query_heads: one token's query heads from their latent, and beside them its window row, on Hopper.
//
// Maths    q = act_quant(rms_norm(latent)) W^T, not rotated; row = rounded as norm_rope_quant's kind 1: rms_norm(kv), rotated
// Layout   latent, norm [K] bf16; w [N, K] e4m3 codes, s [ceil(N/32), K/32] e8m0; q [N] bf16; kv [D] bf16 or null, kv_norm [D] bf16,
//          cos, sin [rd/2] f32, row [D] bf16
// Grid     common/few_product.cuh's, TOK 1; with kv a cluster more, whose first warp makes the row. K a multiple of 32; D 64, 128, 256 or 512
// Numerics as rms_norm, fp8_few_raw_m1 and norm_rope_quant, bit for bit
// Checked  tests_cuda/check_attention.cuh
#include "../common/few_product.cuh"
#include "whole_row.cuh"

extern "C" __global__ void __launch_bounds__(256, 3) query_heads_m1(const bf16* latent, const bf16* norm, const uint8_t* w, const uint8_t* s, bf16* q,
                                                                    const bf16* kv, const bf16* kv_norm, const float* cos_t, const float* sin_t,
                                                                    bf16* row, int N, int K, int D, int rd, float eps, float kv_eps) {
    __shared__ double scratch[32];
    if ((int)blockIdx.x >= ((N + 127) >> 7) * cluster_size()) {
        after_previous();
        if (blockIdx.x % cluster_size() || threadIdx.x >= 32) return;
#define WHOLE(PER) \
    if (D == 32 * PER) return whole_row<PER>(kv, kv_norm, cos_t, sin_t, row, nullptr, nullptr, nullptr, 0, 0, 0, rd, kv_eps, 1, 0);
        WHOLE(16) WHOLE(8) WHOLE(4) WHOLE(2)
#undef WHOLE
        return;
    }
    few<RawToken>([&](RawToken& to, int64_t, int first) {
        // Every block takes the norm of the whole latent: less than a launch.
        double sum = 0.0;
        for (int i = threadIdx.x * 8; i < K; i += 2048) {
            float v[8];
            unpack8(*reinterpret_cast<const uint4*>(latent + i), v);
#pragma unroll
            for (int j = 0; j < 8; ++j) sum += (double)v[j] * v[j];
        }
        double r = norm_factor(block_sum(sum, scratch), K, eps);
        to.load(K, first, [&](int column, float(&v)[8]) {
            float g[8];
            unpack8(*reinterpret_cast<const uint4*>(latent + column), v);
            unpack8(*reinterpret_cast<const uint4*>(norm + column), g);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = normed(g[j], v[j], r);
        });
    }, w, s, q, 1, N, K);
}
