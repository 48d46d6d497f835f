// index_scores: the indexer's score of every key a query may see, as sortable 16-bit keys.
//
// Maths    score[t][p] = bf16(sum_h f32(bf16(relu(bf16(q[t][h] . key[p])) * w[t][h])))
// Layout   q [T, H, D] bf16 (fp4 values), w [T, H] bf16 (already times the softmax factor); keys: bf16 [rows, D], or packed
//          e2m1 codes [rows, D/2] with e8m0 scales [rows, D/32]; spans [T] int2 {row of position 0, visible positions};
//          keys_out [T, ld] u16: bf16 bits mapped so that unsigned order is score order, 0 = not visible.
//          Candidate form: blocks [T, B] i32 ascending, -1 at the tail; column i stands for position
//          blocks[i / block] * block + i % block, and ld covers B * block columns
// Grid     (any, ceil(T / tq)), block 256: warps stride over tiles of 32 columns of 0..n. Dynamic shared memory
//          tq * 2*ceil(H/16) * (2048 + 16) bytes. tq > 1 shares each widened key among tq queries, which then must have one
//          base row; the candidate form takes tq = 1. D a multiple of 32, at most 128
// Numerics the bf16 roundings are the reference's; q . key is an exact product summed in f32 in another order
// Checked  tests_cuda/check.cu, crates/attention/tests
#include "../common/weights.cuh"

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

template <int F, bool CANDIDATES>
__device__ __forceinline__ void scores(const bf16* q, const bf16* w, const uint8_t* keys, const uint8_t* scales, const int2* spans, const int32_t* blocks,
                                       uint16_t* out, int T, int H, int D, int n, int64_t ld, int tq, int B, int block) {
    extern __shared__ __align__(16) uint8_t smem[];
    int nts = ((H + 15) >> 4) * 2, t0 = blockIdx.y * tq, nq = min(tq, T - t0);
    uint2* frag = reinterpret_cast<uint2*>(smem);                            // [tq][nts][8][32]
    uint32_t* weight = reinterpret_cast<uint32_t*>(frag + tq * nts * 8 * 32);  // [tq][nts*4], two heads a word
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, qd = lane & 3;
    for (int i = warp; i < nq * nts; i += 8) {
        int t = t0 + i / nts, h = (i % nts) * 8 + g;
        uint4 x[4];
        load_x<F>(x, q + ((int64_t)t * H + h) * D, h < H, D, 0, qd);
        uint2* f = frag + i * 8 * 32 + lane;
#define PUT(J) { uint2 b; frag_b<F, J>(x, b.x, b.y); f[J * 32] = b; }
        PUT(0) PUT(1) PUT(2) PUT(3) PUT(4) PUT(5) PUT(6) PUT(7)
#undef PUT
        // The widening's 2^-32 is undone in the weight: rounding does not see a power of two.
        if (lane < 4) {
            int hh = (i % nts) * 8 + 2 * lane;
            float a = hh < H ? __bfloat162float(w[(int64_t)t * H + hh]) : 0.0f, b = hh + 1 < H ? __bfloat162float(w[(int64_t)t * H + hh + 1]) : 0.0f;
            weight[i * 4 + lane] = pack_bf16(a * undo<F>(), b * undo<F>());
        }
    }
    __syncthreads();
    int base = spans[t0].x, most = 0;
    for (int i = 0; i < nq; ++i) most = max(most, spans[t0 + i].y);
    const int32_t* list = blocks + (CANDIDATES ? (int64_t)t0 * B : 0);
    int tiles = (n + 31) >> 5, step = gridDim.x * 8;

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
    int tile = blockIdx.x * 8 + warp;
    Rows16<F> r[2];
    if (tile < tiles && most > 0) fetch(r, tile);
    for (; tile < tiles; tile += step) {
        uint32_t a[2][8][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32_t f[2];
            factors(r[i], f);
            frag_a<0>(r[i], f, a[i][0]); frag_a<1>(r[i], f, a[i][1]); frag_a<2>(r[i], f, a[i][2]); frag_a<3>(r[i], f, a[i][3]);
            frag_a<4>(r[i], f, a[i][4]); frag_a<5>(r[i], f, a[i][5]); frag_a<6>(r[i], f, a[i][6]); frag_a<7>(r[i], f, a[i][7]);
        }
        if (tile + step < tiles && most > 0) fetch(r, tile + step);
        // Lane qd of a quad stores one of the quad's four rows.
        int col = tile * 32 + (qd >> 1) * 16 + (qd & 1) * 8 + g, pos = position(col);
        for (int t = 0; t < nq; ++t) {
            // The sum over heads is a product with ones: the weighted scores are already laid out as its A operand.
            float sum[2][4] = {};
            for (int nt = 0; nt < nts; nt += 2) {
                uint32_t v[2][4];
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
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    uint32_t wt = weight[(t * nts + nt + e) * 4 + qd];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        v[i][2 * e] = mul_bf16x2(relu_bf16x2(acc[e][i][0], acc[e][i][1]), wt);
                        v[i][2 * e + 1] = mul_bf16x2(relu_bf16x2(acc[e][i][2], acc[e][i][3]), wt);
                    }
                }
                constexpr uint32_t ONES = 0x3f803f80u;
                mma_bf16(sum[0], v[0][0], v[0][1], v[0][2], v[0][3], ONES, ONES);
                mma_bf16(sum[1], v[1][0], v[1][1], v[1][2], v[1][3], ONES, ONES);
            }
            float mine = qd == 0 ? sum[0][0] : qd == 1 ? sum[0][2] : qd == 2 ? sum[1][0] : sum[1][2];
            if (col < n) out[(int64_t)(t0 + t) * ld + col] = pos >= 0 && pos < spans[t0 + t].y ? sortable(round_bf16(mine)) : (uint16_t)0;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 2) index_scores_fp4(const bf16* q, const bf16* w, const uint8_t* codes, const uint8_t* scales,
                                                                      const int2* spans, const int32_t* blocks, uint16_t* out, int T, int H, int D, int n,
                                                                      int64_t ld, int tq, int B, int block) {
    if (blocks) scores<FP4, true>(q, w, codes, scales, spans, blocks, out, T, H, D, n, ld, tq, B, block);
    else scores<FP4, false>(q, w, codes, scales, spans, blocks, out, T, H, D, n, ld, tq, B, block);
}
extern "C" __global__ void __launch_bounds__(256, 1) index_scores_bf16(const bf16* q, const bf16* w, const uint8_t* keys, const uint8_t* scales,
                                                                       const int2* spans, const int32_t* blocks, uint16_t* out, int T, int H, int D, int n,
                                                                       int64_t ld, int tq, int B, int block) {
    if (blocks) scores<BF16, true>(q, w, keys, scales, spans, blocks, out, T, H, D, n, ld, tq, B, block);
    else scores<BF16, false>(q, w, keys, scales, spans, blocks, out, T, H, D, n, ld, tq, B, block);
}
