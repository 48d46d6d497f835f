// The indexer's scores by warp tiles of 32 keys, any width and number of heads: see index_scores.cu.
#pragma once
#include "../common/weights.cuh"
#include "packed.cuh"

// -0 and +0 are one score (a tie is broken by position), NaN sorts last.
__device__ __forceinline__ uint16_t sortable(float v) {
    uint32_t b = __float_as_uint(v == 0.0f ? 0.0f : v) >> 16;
    if (v != v) return 1;
    return (uint16_t)(b & 0x8000u ? ~b : b | 0x8000u);
}

// max(0, .) of two values, each rounded to bf16.
__device__ __forceinline__ uint32_t relu_bf16x2(float lo, float hi) {
    uint32_t d;
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
}

// As factors and frag_a, but widened in two products: a key's scale may be any e8m0 byte, where a weight's is moderate.
__device__ __forceinline__ void key_factors(const Rows16<FP4>& r, uint32_t (&f)[2]) { f[0] = scale_pair(ROW_FP4_E8M0, r.sa); f[1] = scale_pair(ROW_FP4_E8M0, r.sb); }
__device__ __forceinline__ void key_factors(const Rows16<BF16>&, uint32_t (&)[2]) {}
template <int J>
__device__ __forceinline__ void key_frag(const Rows16<FP4>& r, const uint32_t (&f)[2], uint32_t (&o)[4]) {
    const uint32_t one[2] = {E2M1_ONE, E2M1_ONE};
    frag_a<J>(r, one, o);
#pragma unroll
    for (int i = 0; i < 4; ++i) o[i] = mul_bf16x2(o[i], f[i & 1]);
}
template <int J>
__device__ __forceinline__ void key_frag(const Rows16<BF16>& r, const uint32_t (&f)[2], uint32_t (&o)[4]) { frag_a<J>(r, f, o); }

template <int F, bool CANDIDATES>
__device__ __forceinline__ void scores(const bf16* q, const bf16* w, const uint8_t* keys, const uint8_t* scales, const int2* spans, const int32_t* blocks,
                                       uint16_t* out, int T, int H, int D, int n, int64_t ld, int tq, int B, int block) {
    extern __shared__ __align__(128) uint8_t scratch[];
    int nts = ((H + 15) >> 4) * 2, t0 = blockIdx.y * tq, nq = min(tq, T - t0);
    uint2* frag = reinterpret_cast<uint2*>(scratch);                           // [tq][nts][8][32]
    uint32_t* weight = reinterpret_cast<uint32_t*>(frag + tq * nts * 8 * 32);  // [tq][nts*4], two heads a word
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, qd = lane & 3;
    int base = spans[t0].x, most = 0;
    for (int i = 0; i < nq; ++i) most = max(most, spans[t0 + i].y);
    const int32_t* list = blocks + (CANDIDATES ? (int64_t)t0 * B : 0);
    // Nothing is scored past the last visible column; columns past it are marked as such below.
    int live = CANDIDATES ? n : min(n, most), tiles = (live + 31) >> 5, step = gridDim.x * 8;

    // Position of column c, or -1.
    auto position = [&](int c) {
        if (c >= n) return -1;
        if (!CANDIDATES) return c;
        int id = list[c / block];
        return id < 0 ? -1 : id * block + c % block;
    };
    auto fetch = [&](Rows16<F>(&r)[2], int tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int pa = position(tile * 32 + i * 16 + g), pb = position(tile * 32 + i * 16 + g + 8);
            // An invisible row may lie past the pool: read row `base` instead, the result is not used.
            pa = pa < 0 || pa >= most ? 0 : pa;
            pb = pb < 0 || pb >= most ? 0 : pb;
            load_rows(r[i], keys, scales, (int64_t)base + pa, (int64_t)base + pb, D, 0, qd);
        }
    };
    for (int i = 0; i < nq; ++i)
        for (int c = tiles * 32 + blockIdx.x * 256 + threadIdx.x; c < n; c += gridDim.x * 256) out[(int64_t)(t0 + i) * ld + c] = 0;
    int tile = blockIdx.x * 8 + warp;
    Rows16<F> r[2];
    // The first keys travel while the queries are laid out.
    if (tile < tiles && most > 0) fetch(r, tile);
    for (int i = warp; i < nq * nts; i += 8) {
        int t = t0 + i / nts, h = (i % nts) * 8 + g;
        uint4 x[4];
        load_x<F>(x, q + ((int64_t)t * H + h) * D, h < H, D, 0, qd);
        uint2* f = frag + i * 8 * 32 + lane;
#define PUT(J) { uint2 b; frag_b<F, J>(x, b.x, b.y); f[J * 32] = b; }
        PUT(0) PUT(1) PUT(2) PUT(3) PUT(4) PUT(5) PUT(6) PUT(7)
#undef PUT
        if (lane < 4) {
            int hh = (i % nts) * 8 + 2 * lane;
            float a = hh < H ? __bfloat162float(w[(int64_t)t * H + hh]) : 0.0f, b = hh + 1 < H ? __bfloat162float(w[(int64_t)t * H + hh + 1]) : 0.0f;
            weight[i * 4 + lane] = pack_bf16(a, b);
        }
    }
    __syncthreads();
    // Weighted scores of one tile of 32 keys and 16 heads (head tiles nt, nt + 1), added to `sum`: the sum over heads is a product with
    // ones, for which the weighted scores already lie as its A operand.
    auto add_heads = [&](float(&sum)[2][4], const float(&a0)[2][4], const float(&a1)[2][4], int nt) {
        constexpr uint32_t ONES = 0x3f803f80u;
        uint32_t w0 = weight[nt * 4 + qd], w1 = weight[nt * 4 + 4 + qd];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            mma_bf16(sum[i], mul_bf16x2(relu_bf16x2(a0[i][0], a0[i][1]), w0), mul_bf16x2(relu_bf16x2(a0[i][2], a0[i][3]), w0),
                     mul_bf16x2(relu_bf16x2(a1[i][0], a1[i][1]), w1), mul_bf16x2(relu_bf16x2(a1[i][2], a1[i][3]), w1), ONES, ONES);
    };
    auto store = [&](const float(&sum)[2][4], int tile, int t) {
        // Lane qd of a quad stores one of the quad's four rows.
        int col = tile * 32 + (qd >> 1) * 16 + (qd & 1) * 8 + g, pos = position(col);
        float mine = qd == 0 ? sum[0][0] : qd == 1 ? sum[0][2] : qd == 2 ? sum[1][0] : sum[1][2];
        if (col < n) out[(int64_t)(t0 + t) * ld + col] = pos >= 0 && pos < spans[t0 + t].y ? sortable(round_bf16(mine)) : (uint16_t)0;
    };
    if (F == FP4 && nq == 1 && nts == 4) {
        // One query of 32 heads: all heads at once, so that a slice of the keys is widened just before its products and the two overlap.
        for (; tile < tiles; tile += step) {
            Rows16<F> now[2] = {r[0], r[1]};
            if (tile + step < tiles && most > 0) fetch(r, tile + step);
            uint32_t f0[2], f1[2];
            key_factors(now[0], f0);
            key_factors(now[1], f1);
            float acc[4][2][4] = {};  // head tile, key tile
#define SLICE(J)                                                                        \
    {                                                                                   \
        uint32_t a0[4], a1[4];                                                          \
        key_frag<J>(now[0], f0, a0);                                                    \
        key_frag<J>(now[1], f1, a1);                                                    \
        _Pragma("unroll") for (int e = 0; e < 4; ++e) {                                 \
            uint2 b = frag[(e * 8 + J) * 32 + lane];                                    \
            mma_bf16(acc[e][0], a0[0], a0[1], a0[2], a0[3], b.x, b.y);                  \
            mma_bf16(acc[e][1], a1[0], a1[1], a1[2], a1[3], b.x, b.y);                  \
        }                                                                               \
    }
            SLICE(0) SLICE(1) SLICE(2) SLICE(3) SLICE(4) SLICE(5) SLICE(6) SLICE(7)
#undef SLICE
            float sum[2][4] = {};
            add_heads(sum, acc[0], acc[1], 0);
            add_heads(sum, acc[2], acc[3], 2);
            store(sum, tile, 0);
        }
        return;
    }
    for (; tile < tiles; tile += step) {
        uint32_t a[2][8][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32_t f[2];
            key_factors(r[i], f);
            key_frag<0>(r[i], f, a[i][0]); key_frag<1>(r[i], f, a[i][1]); key_frag<2>(r[i], f, a[i][2]); key_frag<3>(r[i], f, a[i][3]);
            key_frag<4>(r[i], f, a[i][4]); key_frag<5>(r[i], f, a[i][5]); key_frag<6>(r[i], f, a[i][6]); key_frag<7>(r[i], f, a[i][7]);
        }
        if (tile + step < tiles && most > 0) fetch(r, tile + step);
        for (int t = 0; t < nq; ++t) {
            float sum[2][4] = {};
            for (int nt = 0; nt < nts; nt += 2) {
                float acc[2][2][4] = {};  // head tile, key tile: four independent chains
                const uint2* f = frag + (t * nts + nt) * 8 * 32 + lane;
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    uint2 b0 = f[j * 32], b1 = f[(8 + j) * 32];
                    mma_bf16(acc[0][0], a[0][j][0], a[0][j][1], a[0][j][2], a[0][j][3], b0.x, b0.y);
                    mma_bf16(acc[0][1], a[1][j][0], a[1][j][1], a[1][j][2], a[1][j][3], b0.x, b0.y);
                    mma_bf16(acc[1][0], a[0][j][0], a[0][j][1], a[0][j][2], a[0][j][3], b1.x, b1.y);
                    mma_bf16(acc[1][1], a[1][j][0], a[1][j][1], a[1][j][2], a[1][j][3], b1.x, b1.y);
                }
                add_heads(sum, acc[0], acc[1], t * nts + nt);
            }
            store(sum, tile, t);
        }
    }
}
