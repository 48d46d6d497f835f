// fp8_linear: y = x W^T with e4m3 weights in 32x32 tiles of e8m0 scales; the baseline, and the form for few tokens.
//
// Maths    y[m][n] = bf16(sum_k x[m][k] * e4m3(w[n][k]) * 2^(s[n/32][k/32] - 127))
// Layout   x [M, G*K] bf16 (fake-quantised by act_quant for a quantised linear, plain for wo_a), w [G, N, K] u8,
//          s [G, ceil(N/32), K/32] u8, y [M, G*N] bf16. K a multiple of 32, x and w 16-byte aligned.
// Grid     (ceil(N / (16*TILES)), ceil(M / (8*NT)), G), block 256; suffix _mA_tB: NT = A/8 token tiles, B row tiles.
//          More row tiles leave fewer warps to split K: t2 for K <= 2048, t1 above.
// Numerics weight and activation are exact in bf16, products exact in f32; only the order of the f32 additions
//          differs from the reference. Codes 0x7f/0xff (never stored) read as +-480; a scale above 2^39 gives inf.
// Checked  tests_cuda/check.cu, crates/quant/tests
#include "../common/linear.cuh"

#define KERNEL(NAME, NT, TILES, MINB)                                                                              \
    extern "C" __global__ void __launch_bounds__(256, MINB) NAME(const bf16* x, const uint8_t* w, const uint8_t* s, \
                                                                 bf16* y, int M, int N, int K) {                   \
        linear_grouped<FP8, NT, TILES, bf16>(x, w, s, y, M, N, K);                                                 \
    }
KERNEL(fp8_linear_m8_t1, 1, 1, 3)
KERNEL(fp8_linear_m8_t2, 1, 2, 3)
KERNEL(fp8_linear_m16_t1, 2, 1, 2)
KERNEL(fp8_linear_m16_t2, 2, 2, 2)
KERNEL(fp8_linear_m32_t2, 4, 2, 1)
