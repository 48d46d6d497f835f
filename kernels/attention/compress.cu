// compress: `ratio` consecutive tokens pooled into one latent by a softmax gate per channel, then RMSNorm.
//
// Maths    p_i = softmax_i(score_i[d]); latent[d] = bf16(sum_i kv_i[d] * p_i); out = bf16(w * latent * rsqrt(mean + eps))
// Layout   kv_new, score_new [T, D] f32 (this chunk's projections); kv_pend, score_pend [slots, D] f32 (rows of open
//          groups); src [G, ratio] i32: token t of this chunk as t, pending row p as -2 - p; w [D] bf16 or null (no norm); out [G, D] bf16
// Grid     one block per group, block min(D, 512) rounded up to 32, 4*D bytes of dynamic shared memory
// Numerics f32 (the norm: f64), pooled value rounded to bf16 before its norm, as the reference
// Checked  tests_cuda/check.cu, crates/attention/tests
#include "../common/util.cuh"

extern "C" __global__ void __launch_bounds__(512) compress(const float* kv_new, const float* score_new, const float* kv_pend, const float* score_pend,
                                                           const int32_t* src, const bf16* w, bf16* out, int D, int ratio, float eps) {
    after_previous();
    __shared__ double scratch[32];
    extern __shared__ float latent[];
    const int32_t* s = src + (int64_t)blockIdx.x * ratio;
    double sq = 0.0;
    for (int d = threadIdx.x; d < D; d += blockDim.x) {
        float m = -INFINITY, sum = 0.0f, v = 0.0f;
        for (int i = 0; i < ratio; ++i) {
            int r = s[i];
            m = fmaxf(m, r >= 0 ? score_new[(int64_t)r * D + d] : score_pend[(int64_t)(-2 - r) * D + d]);
        }
        for (int i = 0; i < ratio; ++i) {
            int r = s[i];
            sum += expf((r >= 0 ? score_new[(int64_t)r * D + d] : score_pend[(int64_t)(-2 - r) * D + d]) - m);
        }
        for (int i = 0; i < ratio; ++i) {
            int r = s[i];
            float p = expf((r >= 0 ? score_new[(int64_t)r * D + d] : score_pend[(int64_t)(-2 - r) * D + d]) - m) / sum;
            v += (r >= 0 ? kv_new[(int64_t)r * D + d] : kv_pend[(int64_t)(-2 - r) * D + d]) * p;
        }
        v = round_bf16(v);
        latent[d] = v;
        sq += (double)v * v;
    }
    double r = norm_factor(block_sum(sq, scratch), D, eps);
    for (int d = threadIdx.x; d < D; d += blockDim.x)
        out[(int64_t)blockIdx.x * D + d] = __float2bfloat16_rn(w ? normed(__bfloat162float(w[d]), latent[d], r) : latent[d]);
}
