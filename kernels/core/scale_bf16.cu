// scale_bf16: bf16 values times a factor.
//
// Maths    out = bf16(x * factor), the product in f32
// Layout   x, out [n] bf16
// Grid     1-D over n threads, block 128
// Numerics one rounding of the f32 product
// Checked  tests_cuda/check.cu, crates/attention/tests
#include "../common/util.cuh"

extern "C" __global__ void __launch_bounds__(128) scale_bf16(const bf16* x, bf16* out, int64_t n, float factor) {
    after_previous();
    int64_t i = (int64_t)blockIdx.x * 128 + threadIdx.x;
    if (i < n) out[i] = __float2bfloat16_rn(__fmul_rn(__bfloat162float(x[i]), factor));
}
