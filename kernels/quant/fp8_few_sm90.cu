// fp8_few: y = x W^T with e4m3 weights and up to 16 tokens, on Hopper: codes stay codes up to the registers that feed the tensor core.
//
// Maths    as fp8_linear; fp8_few_plain: G products side by side, of tokens that are not quantised; fp8_few_raw, fp8_few_swiglu: of
//          act_quant(x), and of act_quant(swiglu(gate, up)) without a routing weight, one token
// Layout   xc [M, K] e4m3 codes and xs [M, K/32] e8m0 (act_quant), or x [M, G*K], gate, up [K] bf16; w [G, N, K] u8, s [G, ceil(N/32), K/32] u8,
//          y [M, G*N] bf16
// Grid     (ceil(N/128) * k, G) blocks of 256 in clusters of any k up to 8, which split K evenly; suffix _mB: up to B tokens.
//          Dynamic shared memory, with g = 4*ceil(ceil(K/128)/k) groups: 16384*r + g*(36*B + 16) + max(128, 48*B), r = 5 for B = 8, else 4;
//          plain g*(68*B + 16), r = 4 for B = 1, else 5
// Numerics common/few_sm90.cuh; the k parts are added in order
// Checked  tests_cuda/check.cu
#include "../common/few_product.cuh"
#include "../common/swiglu.cuh"

#define FEW(TOK)                                                                                                                           \
    extern "C" __global__ void __launch_bounds__(256, TOK == 1 ? 3 : 2) fp8_few_m##TOK(const uint8_t* xc, const uint8_t* xs, const uint8_t* w,            \
                                                                        const uint8_t* s, bf16* y, int M, int N, int K) {      \
        few<Tokens<TOK>>([&](Tokens<TOK>& x, int64_t, int first) { x.load(xc, xs, K, first, M); }, w, s, y, M, N, K);              \
    }                                                                                                                                     \
    extern "C" __global__ void __launch_bounds__(256, TOK == 1 ? 3 : 2) fp8_few_plain_m##TOK(const bf16* x, const uint8_t* w, const uint8_t* s, bf16* y,  \
                                                                              int M, int N, int K) {                           \
        few<PlainTokens<TOK>>([&](PlainTokens<TOK>& to, int64_t group, int first) { to.load(x + group * K, (int64_t)gridDim.y * K, K, first, M); }, \
                              w, s, y, M, N, K);                                                                                   \
    }
FEW(1)
FEW(8)
FEW(16)

extern "C" __global__ void __launch_bounds__(256, 3) fp8_few_raw_m1(const bf16* x, const uint8_t* w, const uint8_t* s, bf16* y, int M, int N, int K) {
    few<RawToken>([&](RawToken& to, int64_t, int first) {
        to.load(K, first, [&](int column, float(&v)[8]) { unpack8(*reinterpret_cast<const uint4*>(x + column), v); });
    }, w, s, y, M, N, K);
}
extern "C" __global__ void __launch_bounds__(256, 3) fp8_few_swiglu_m1(const bf16* gate, const bf16* up, const uint8_t* w, const uint8_t* s, bf16* y, int M,
                                                                       int N, int K, float limit) {
    few<RawToken>([&](RawToken& to, int64_t, int first) {
        to.load(K, first, [&](int column, float(&v)[8]) {
            float u[8];
            unpack8(*reinterpret_cast<const uint4*>(gate + column), v);
            unpack8(*reinterpret_cast<const uint4*>(up + column), u);
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = round_bf16(swiglu_value(v[i], u[i], limit));
        });
    }, w, s, y, M, N, K);
}
