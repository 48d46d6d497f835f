// bf16_linear: y = x W^T with bf16 weights, rounded to bf16 or left in f32; for few tokens, and the baseline.
//
// Maths    y[m][n] = sum_k x[m][k] * w[n][k] in f32, one rounding for the bf16 form
// Layout   x [M, G*K] bf16, w [G, N, K] bf16, y [M, G*N] bf16 or f32; `s` is unused (null). K a multiple of 32.
// Grid     as fp8_linear
// Numerics the f32 form is the head, the gate's logits and the compressor's projections: their weights are stored in
//          bf16 and widened, so the products are the reference's f32 products exactly.
// Checked  tests_cuda/check.cu, crates/core/tests
#include "../common/linear.cuh"

#define KERNEL(NAME, NT, TILES, MINB, OUT)                                                                         \
    extern "C" __global__ void __launch_bounds__(256, MINB) NAME(const bf16* x, const uint8_t* w, const uint8_t* s, \
                                                                 OUT* y, int M, int N, int K) {                    \
        linear_grouped<BF16, NT, TILES, OUT>(x, w, s, y, M, N, K);                                                 \
    }
KERNEL(bf16_linear_m8_t1, 1, 1, 3, bf16)
KERNEL(bf16_linear_m8_t2, 1, 2, 3, bf16)
KERNEL(bf16_linear_m16_t1, 2, 1, 2, bf16)
KERNEL(bf16_linear_m16_t2, 2, 2, 2, bf16)
KERNEL(bf16_linear_m32_t2, 4, 2, 1, bf16)
KERNEL(bf16_linear_f32_m8_t1, 1, 1, 3, float)
KERNEL(bf16_linear_f32_m8_t2, 1, 2, 3, float)
KERNEL(bf16_linear_f32_m16_t1, 2, 1, 2, float)
KERNEL(bf16_linear_f32_m16_t2, 2, 2, 2, float)
KERNEL(bf16_linear_f32_m32_t2, 4, 2, 1, float)
