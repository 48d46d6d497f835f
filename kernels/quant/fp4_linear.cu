// fp4_linear: y = x W^T with packed e2m1 weights and one e8m0 scale per row and 32 columns; for few tokens.
//
// Maths    y[m][n] = bf16(sum_k x[m][k] * e2m1(w[n][k]) * 2^(s[n][k/32] - 127))
// Layout   x [M, G*K] bf16 fake-quantised, w [G, N, K/2] u8 (even column in the low nibble), s [G, N, K/32] u8,
//          y [M, G*N] bf16. K a multiple of 32.
// Grid     as fp8_linear
// Numerics exact products as in fp8_linear; a scale above 2^33 gives inf.
// Checked  tests_cuda/check.cu, crates/quant/tests
#include "../common/linear.cuh"

#define KERNEL(NAME, NT, TILES, MINB)                                                                              \
    extern "C" __global__ void __launch_bounds__(256, MINB) NAME(const bf16* x, const uint8_t* w, const uint8_t* s, \
                                                                 bf16* y, int M, int N, int K) {                   \
        linear_grouped<FP4, NT, TILES, bf16>(x, w, s, y, M, N, K);                                                 \
    }
KERNEL(fp4_linear_m8_t1, 1, 1, 3)
KERNEL(fp4_linear_m8_t2, 1, 2, 3)
KERNEL(fp4_linear_m16_t1, 2, 1, 2)
KERNEL(fp4_linear_m16_t2, 2, 2, 2)
KERNEL(fp4_linear_m32_t2, 4, 2, 1)
