// The small-M linear product: a memory-bound walk over the stored weight bytes. See quant/fp8_linear.cu.
#pragma once
#include "weights.cuh"

// One CTA: WARPS warps share TILES tiles of 16 rows; WARPS/TILES warps split K and are summed in warp order.
template <int F, int NT, int TILES, typename Out>
__device__ __forceinline__ void linear_tile(const bf16* x, const uint8_t* w, const uint8_t* s, Out* y, int M, int N, int K, int64_t ldx, int64_t ldy) {
    constexpr int WARPS = 8, KW = WARPS / TILES, U = (F == FP4 ? 4 : F == FP8 ? 2 : 1);
    __shared__ float part[WARPS][16][8 * NT];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    int tile = warp % TILES, kw = warp / TILES;
    int row0 = (blockIdx.x * TILES + tile) * 16, tok0 = blockIdx.y * 8 * NT;
    int64_t row_a = min(row0 + g, N - 1), row_b = min(row0 + g + 8, N - 1);
    float acc[NT][4];
#pragma unroll
    for (int t = 0; t < NT; ++t) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0.0f;
    int blocks = (K + 127) >> 7;
    Rows16<F> r[U];
    auto fetch = [&](int kb) {
#pragma unroll
        for (int u = 0; u < U; ++u) load_rows(r[u], w, s, row_a, row_b, K, (kb + u * KW) * 128, q);
    };
    fetch(kw);
    after_previous();
    for (int kb = kw; kb < blocks; kb += KW * U) {
        if (kb > kw) fetch(kb);
#pragma unroll
        for (int u = 0; u < U; ++u) {
            uint4 xs[NT][4];
#pragma unroll
            for (int t = 0; t < NT; ++t) {
                int m = tok0 + t * 8 + g;
                load_x<F>(xs[t], x + m * ldx, m < M, K, (kb + u * KW) * 128, q);
            }
            block_mma<F, NT>(r[u], xs, acc);
        }
    }
#pragma unroll
    for (int t = 0; t < NT; ++t) {
        part[warp][g][t * 8 + 2 * q] = acc[t][0];
        part[warp][g][t * 8 + 2 * q + 1] = acc[t][1];
        part[warp][g + 8][t * 8 + 2 * q] = acc[t][2];
        part[warp][g + 8][t * 8 + 2 * q + 1] = acc[t][3];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TILES * 16 * 8 * NT; i += WARPS * 32) {
        int r = i % (TILES * 16), m = i / (TILES * 16), n = blockIdx.x * TILES * 16 + r;
        if (n >= N || tok0 + m >= M) continue;
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < KW; ++k) sum += part[k * TILES + r / 16][r & 15][m];
        y[(int64_t)(tok0 + m) * ldy + n] = (Out)(sum * undo<F>());
    }
}

// G independent products side by side (blockIdx.z): x [M, G*K], w [G, N, K], y [M, G*N]. G = 1 for a plain linear.
template <int F, int NT, int TILES, typename Out>
__device__ __forceinline__ void linear_grouped(const bf16* x, const uint8_t* w, const uint8_t* s, Out* y, int M, int N, int K) {
    int64_t g = blockIdx.z, G = gridDim.z;
    int64_t wb = F == FP4 ? K / 2 : F == BF16 ? 2 * (int64_t)K : K;
    int64_t sb = F == FP8 ? (int64_t)((N + 31) / 32) * (K / 32) : F == FP4 ? (int64_t)N * (K / 32) : 0;
    linear_tile<F, NT, TILES, Out>(x + g * K, w + g * N * wb, s + g * sb, y + g * N, M, N, K, G * K, G * N);
}
