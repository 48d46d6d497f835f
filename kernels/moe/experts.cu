// experts: the routed experts' products over tiles of up to 8 tokens; the form for few tokens, and the baseline.
//
// Maths    up:   h = fake_quant_fp8(bf16(weight * swiglu(bf16(W1 x), bf16(W3 x))));  down: y = bf16(W2 h)
// Layout   x [T, dim] bf16 fake-quantised; order/tiles/count of group_tokens (tile = 8); weights [P] f32;
//          w1, w3 [n_local, inter, dim], w2 [n_local, dim, inter] as stored (fp4: two codes a byte), their scales as
//          stored; h [P, inter] bf16 and y [P, dim] bf16 indexed by position in `order`
// Grid     up: (inter/32, max_tiles), block 256; down: (ceil(dim/32), max_tiles), block 192.
//          max_tiles = min(P, n_local + P/8); blocks past `count` leave at once. Suffix: the weight format
// Numerics exact products as in fp8_linear; w1 and w3 outputs are rounded to bf16 before the activation
// Checked  tests_cuda/check.cu, crates/moe/tests
#include "../common/quantise.cuh"
#include "../common/swiglu.cuh"
#include "../common/weights.cuh"

template <int F>
__device__ __forceinline__ int64_t weight_bytes(int64_t n, int64_t k) { return F == FP4 ? n * k / 2 : F == FP8 ? n * k : n * k * 2; }
template <int F>
__device__ __forceinline__ int64_t scale_bytes(int64_t n, int64_t k) { return F == FP4 ? n * (k / 32) : F == FP8 ? (n + 31) / 32 * (k / 32) : 0; }

template <int F>
__device__ __forceinline__ void experts_up(const bf16* x, const int32_t* order, const int4* tiles, const int32_t* count, const float* weights,
                                           const uint8_t* w1, const uint8_t* s1, const uint8_t* w3, const uint8_t* s3, bf16* h, int dim, int inter,
                                           int k_active, float limit) {
    after_previous();
    if ((int)blockIdx.y >= *count) return;
    __shared__ float part[8][4][16][8];  // warp, row tile (gate 0, gate 1, up 0, up 1), row, token
    int4 tile = tiles[blockIdx.y];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    int64_t wo = tile.x * weight_bytes<F>(inter, dim), so = tile.x * scale_bytes<F>(inter, dim);
    int row0 = blockIdx.x * 32;
    bool live = g < tile.z;
    const bf16* xr = x + (int64_t)(live ? order[tile.y + g] / k_active : 0) * dim;
    float acc[4][1][4] = {};
    int blocks = (dim + 127) >> 7;
    for (int kb = warp; kb < blocks; kb += 8) {
        Rows16<F> r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int64_t row = row0 + (i & 1) * 16 + g;
            load_rows(r[i], (i < 2 ? w1 : w3) + wo, (i < 2 ? s1 : s3) + so, row, row + 8, dim, kb * 128, q);
        }
        uint4 xs[1][4];
        load_x<F>(xs[0], xr, live, dim, kb * 128, q);
#pragma unroll
        for (int i = 0; i < 4; ++i) block_mma<F, 1>(r[i], xs, acc[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        *reinterpret_cast<float2*>(&part[warp][i][g][2 * q]) = make_float2(acc[i][0][0], acc[i][0][1]);
        *reinterpret_cast<float2*>(&part[warp][i][g + 8][2 * q]) = make_float2(acc[i][0][2], acc[i][0][3]);
    }
    __syncthreads();
    // A warp per token, a lane per row: one quantisation group.
    int m = warp, i = lane >> 4, rr = lane & 15;
    if (m >= tile.z) return;
    float gate = 0.0f, up = 0.0f;
#pragma unroll
    for (int w = 0; w < 8; ++w) {
        gate += part[w][i][rr][m];
        up += part[w][2 + i][rr][m];
    }
    int pair = order[tile.y + m];
    float v = round_bf16(weights[pair] * swiglu_value(round_bf16(gate * undo<F>()), round_bf16(up * undo<F>()), limit));
    if (F != BF16) {
        uint32_t s = fp8_scale(warp_max(fabsf(v)));
        v = e4m3_to_f32(fp8_code(v, e8m0_inverse(s))) * e8m0_to_f32(s);
    }
    h[(int64_t)(tile.y + m) * inter + row0 + lane] = __float2bfloat16_rn(v);
}

template <int F>
__device__ __forceinline__ void experts_down(const bf16* h, const int4* tiles, const int32_t* count, const uint8_t* w2, const uint8_t* s2, bf16* y,
                                             int dim, int inter) {
    after_previous();
    if ((int)blockIdx.y >= *count) return;
    constexpr int WARPS = 6, U = F == FP4 ? 3 : 1;
    __shared__ float part[WARPS][2][16][8];
    int4 tile = tiles[blockIdx.y];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const uint8_t *w = w2 + tile.x * weight_bytes<F>(dim, inter), *s = s2 + tile.x * scale_bytes<F>(dim, inter);
    int row0 = blockIdx.x * 32;
    bool live = g < tile.z;
    const bf16* hr = h + (int64_t)(tile.y + (live ? g : 0)) * inter;
    float acc[2][1][4] = {};
    int blocks = (inter + 127) >> 7;
    for (int kb = warp; kb < blocks; kb += WARPS * U) {
        Rows16<F> r[U][2];
#pragma unroll
        for (int u = 0; u < U; ++u)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int64_t row = row0 + i * 16 + g;
                load_rows(r[u][i], w, s, min(row, (int64_t)dim - 1), min(row + 8, (int64_t)dim - 1), inter, (kb + u * WARPS) * 128, q);
            }
#pragma unroll
        for (int u = 0; u < U; ++u) {
            uint4 xs[1][4];
            load_x<F>(xs[0], hr, live, inter, (kb + u * WARPS) * 128, q);
            block_mma<F, 1>(r[u][0], xs, acc[0]);
            block_mma<F, 1>(r[u][1], xs, acc[1]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        *reinterpret_cast<float2*>(&part[warp][i][g][2 * q]) = make_float2(acc[i][0][0], acc[i][0][1]);
        *reinterpret_cast<float2*>(&part[warp][i][g + 8][2 * q]) = make_float2(acc[i][0][2], acc[i][0][3]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 32 * tile.z; i += WARPS * 32) {
        int r = i & 31, m = i >> 5;
        if (row0 + r >= dim) continue;
        float sum = 0.0f;
#pragma unroll
        for (int wi = 0; wi < WARPS; ++wi) sum += part[wi][r >> 4][r & 15][m];
        y[(int64_t)(tile.y + m) * dim + row0 + r] = __float2bfloat16_rn(sum * undo<F>());
    }
}

#define EXPERTS(NAME, F)                                                                                                                      \
    extern "C" __global__ void __launch_bounds__(256, 2) experts_up_##NAME(                                                                   \
        const bf16* x, const int32_t* order, const int4* tiles, const int32_t* count, const float* weights, const uint8_t* w1,                \
        const uint8_t* s1, const uint8_t* w3, const uint8_t* s3, bf16* h, int dim, int inter, int k_active, float limit) {                    \
        experts_up<F>(x, order, tiles, count, weights, w1, s1, w3, s3, h, dim, inter, k_active, limit);                                       \
    }                                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(192, 3) experts_down_##NAME(const bf16* h, const int4* tiles, const int32_t* count,          \
                                                                             const uint8_t* w2, const uint8_t* s2, bf16* y, int dim,          \
                                                                             int inter) {                                                     \
        experts_down<F>(h, tiles, count, w2, s2, y, dim, inter);                                                                              \
    }
EXPERTS(fp4, FP4)
EXPERTS(fp8, FP8)
EXPERTS(bf16, BF16)
