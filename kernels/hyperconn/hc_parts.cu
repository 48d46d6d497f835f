// hc_pre, hc_post, hc_mean: the hyper-connection steps on their own, any C. hc_step fuses them.
//
// Maths    hc_pre:  y = bf16(sum_c pre[c] * stream[c]);  hc_mean: bf16(mean over c)
//          hc_post: out[k] = bf16(post[k] * x + sum_j comb[j][k] * residual[j])
// Layout   stream, residual, out [T, C, dim] bf16, x, y [T, dim] bf16, pre, post [T, C] f32, comb [T, C, C] f32: rows of ld,
//          ld_post and ld_comb elements, so that they may be views of packed coefficients
// Grid     (ceil(dim/8/128), T), block 128; C <= 8, dim a multiple of 8
// Numerics f32 sums over c (over j) in ascending order, products rounded, one rounding to bf16: the bits of the CPU
// Checked  tests_cuda/check.cu, crates/hyperconn/tests
#include "../common/quantise.cuh"

extern "C" __global__ void __launch_bounds__(128) hc_pre(const bf16* stream, const float* pre, bf16* y, int C, int dim, int ld) {
    after_previous();
    int u = blockIdx.x * blockDim.x + threadIdx.x, units = dim >> 3;
    int64_t t = blockIdx.y;
    if (u >= units) return;
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0}, v[8];
    for (int c = 0; c < C; ++c) {
        // pre null: the mean (the sum is divided once at the end, as the reference's mean).
        float p = pre ? pre[t * ld + c] : 1.0f;
        unpack8(reinterpret_cast<const uint4*>(stream)[(t * C + c) * units + u], v);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(p, v[i]));
    }
    if (!pre) {
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] /= (float)C;
    }
    reinterpret_cast<uint4*>(y)[t * units + u] = pack8(sum);
}

extern "C" __global__ void __launch_bounds__(128) hc_post(const bf16* x, const bf16* residual, const float* post, const float* comb, bf16* out, int C, int dim,
                                                          int ld_post, int ld_comb) {
    after_previous();
    int u = blockIdx.x * blockDim.x + threadIdx.x, units = dim >> 3;
    int64_t t = blockIdx.y;
    if (u >= units) return;
    float xv[8];
    unpack8(reinterpret_cast<const uint4*>(x)[t * units + u], xv);
    // Eight registers of input per source copy: read again for each target copy (from L1), so that `out` may be anything but `residual`.
    for (int k = 0; k < C; ++k) {
        float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0}, r[8], p = post[t * ld_post + k];
        for (int j = 0; j < C; ++j) {
            float c = comb[t * ld_comb + j * C + k];
            unpack8(reinterpret_cast<const uint4*>(residual)[(t * C + j) * units + u], r);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(c, r[i]));
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(p, xv[i]));
        reinterpret_cast<uint4*>(out)[(t * C + k) * units + u] = pack8(sum);
    }
}
