// rms_norm: RMSNorm of bf16 rows, optionally followed by the activation quantisation of the linear that reads it.
//
// Maths    y = bf16(w * (x * rsqrt(mean(x^2) + eps))); then act_quant(y): fake values, or codes and scales
// Layout   x [T, dim] bf16 with row stride ldx, w [dim] bf16 (null: ones), y and fake [T, dim] bf16, codes [T, dim] u8,
//          scales [T, dim/32] u8: each output may be null
// Grid     one block per row, block min(1024, dim/8 rounded up to 32); dim a multiple of 32, at most 16384
// Numerics f64 inside, one rounding; eps 1e-20 gives 0 for a zero row, as the reference
// Checked  tests_cuda/check.cu, crates/core/tests
#include "../common/quantise.cuh"

extern "C" __global__ void __launch_bounds__(1024) rms_norm(const bf16* x, const bf16* w, bf16* y, bf16* fake, uint8_t* codes, uint8_t* scales, int dim,
                                                            int64_t ldx, float eps) {
    after_previous();
    constexpr int PER = 2;
    __shared__ double scratch[32];
    const uint4* row = reinterpret_cast<const uint4*>(x + blockIdx.x * ldx);
    const uint4* wv = reinterpret_cast<const uint4*>(w);
    int units = dim >> 3;
    uint4 v[PER], g[PER];
    double sum = 0.0;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        int u = threadIdx.x + i * blockDim.x;
        v[i] = u < units ? row[u] : make_uint4(0, 0, 0, 0);
        g[i] = u < units && w ? wv[u] : make_uint4(0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u);
        float f[8];
        unpack8(v[i], f);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += (double)f[j] * f[j];
    }
    double r = norm_factor(block_sum(sum, scratch), dim, eps);
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        int u = threadIdx.x + i * blockDim.x;
        if (i * (int)blockDim.x >= units) break;
        float f[8], h[8];
        unpack8(v[i], f);
        unpack8(g[i], h);
#pragma unroll
        for (int j = 0; j < 8; ++j) f[j] = normed(h[j], f[j], r);
        emit8(f, (int64_t)blockIdx.x * units + u, u < units, y, fake, codes, scales);
    }
}
