// rms_norm: RMSNorm of bf16 rows, optionally followed by the activation quantisation of the linear that reads it.
//
// Maths    y = bf16(w * (x * rsqrt(mean(x^2) + eps))); fake = fake_quant_fp8(y)
// Layout   x [T, dim] bf16 with row stride ldx, w [dim] bf16 (null: ones), y and fake [T, dim] bf16, either may be null
// Grid     one block per row, block 256 (or fewer for dim < 2048; a multiple of 32); dim a multiple of 32
// Numerics f32 inside, one rounding; eps 1e-20 gives 0 for a zero row, as the reference
// Checked  tests_cuda/check.cu, crates/core/tests
#include "../common/quantise.cuh"

extern "C" __global__ void rms_norm(const bf16* x, const bf16* w, bf16* y, bf16* fake, int dim, int64_t ldx, float eps) {
    __shared__ float scratch[32];
    const uint4* row = reinterpret_cast<const uint4*>(x + blockIdx.x * ldx);
    const uint4* wv = reinterpret_cast<const uint4*>(w);
    int units = dim >> 3;
    float sum = 0.0f;
    for (int u = threadIdx.x; u < units; u += blockDim.x) {
        float v[8];
        unpack8(row[u], v);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += v[i] * v[i];
    }
    sum = block_sum(sum, scratch);
    float r = rsqrtf(sum / (float)dim + eps);
    for (int u0 = 0; u0 < units; u0 += blockDim.x) {
        int u = u0 + threadIdx.x;
        float v[8] = {0, 0, 0, 0, 0, 0, 0, 0}, g[8] = {1, 1, 1, 1, 1, 1, 1, 1};
        if (u < units) {
            unpack8(row[u], v);
            if (w) unpack8(wv[u], g);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = round_bf16(g[i] * (v[i] * r));
        int64_t at = (int64_t)blockIdx.x * units + u;
        if (y && u < units) reinterpret_cast<uint4*>(y)[at] = pack8(v);
        if (fake) {
            fake_quant8(v);
            if (u < units) reinterpret_cast<uint4*>(fake)[at] = pack8(v);
        }
    }
}
