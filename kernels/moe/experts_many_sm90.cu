// experts_many: the routed experts for many tokens, e2m1 weights, on Hopper, at the rate of the bf16 tensor core.
//
// Maths    as experts.cu
// Layout   order, tiles, count of group_tokens (tile = 128, align = 8), P its places; x from act_quant_tiled (fp4_weights = 1,
//          rows = order, per = k) with rows_pad = P; weights [T*k] f32; w1, w3 [n_local, inter, dim/2], w2 [n_local, dim, inter/2];
//          h: the same tiled layout of [P, inter], written by `up` and read by `down`; y [P, dim] bf16 by place
// Grid     persistent, one block of 384 per SM; dynamic shared memory 4*32768 + 128*272 + 1024.
//          dim and inter multiples of 32 (up's blocks of 128 units need inter's tiled K padded to 128, which the layout has)
// Numerics exact bf16 operands, f32 sums; otherwise as experts.cu
// Checked  tests_cuda/check_moe.cuh
//
// As quant/fp8_many_sm90.cu: weights go from memory to A registers, tokens are the B operand, fetched by bulk copies. A warpgroup
// holds two 64-row products: gate and up of the same units, or two halves of 128 output rows. The instruction's N follows the
// tile's number of tokens in steps of 16, so that an expert with 70 tokens does not pay for 128.
#include "../common/quantise.cuh"
#include "../common/swiglu.cuh"
#include "../common/weights.cuh"
#include "../common/wgmma.cuh"

constexpr int STAGES = 4, TOK = 128, PANEL = TOK * 128, STAGE = 2 * PANEL, OUT_ROW = 136;

struct Work {
    const uint8_t *w0, *s0, *w1, *s1;  // the two products' weights of one expert
    int rows, K, row0, row1;           // rows of each matrix; this warpgroup's first row in each
};

struct Pipe {
    uint32_t x, full, empty, at;
};

// d0, d1 (+)= 64 rows of each product x N tokens over all of K.
template <int N>
__device__ __forceinline__ void multiply(const Work& wk, Pipe& p, float (&d0)[64], float (&d1)[64]) {
    int warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, steps = (wk.K + 127) >> 7;
    int64_t r0 = min(wk.row0 + warp * 16 + g, wk.rows - 1), r0b = min(wk.row0 + warp * 16 + g + 8, wk.rows - 1);
    int64_t r1 = min(wk.row1 + warp * 16 + g, wk.rows - 1), r1b = min(wk.row1 + warp * 16 + g + 8, wk.rows - 1);
    // Weights are fetched two stages ahead: one is less than the memory's latency.
    Rows16<FP4> a[2], b[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        load_rows(a[i], wk.w0, wk.s0, r0, r0b, wk.K, i * 128, q);
        load_rows(b[i], wk.w1, wk.s1, r1, r1b, wk.K, i * 128, q);
    }
    // Four slices of one product: a panel of 64 columns.
    auto panel = [&](Rows16<FP4>& r, uint32_t (&f)[4][4], float(&d)[64], int h, uint32_t x, int first) {
        uint32_t s[2];
        factors(r, s);
        if (h == 0) { frag_a<0>(r, s, f[0]); frag_a<1>(r, s, f[1]); frag_a<2>(r, s, f[2]); frag_a<3>(r, s, f[3]); }
        else { frag_a<4>(r, s, f[0]); frag_a<5>(r, s, f[1]); frag_a<6>(r, s, f[2]); frag_a<7>(r, s, f[3]); }
#pragma unroll
        for (int j = 0; j < 4; ++j) wgmma_pin(f[j]);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; ++j) wgmma_bf16<N>(d, f[j], desc_swizzle128(x + h * PANEL + j * 32), !first || j > 0);
        wgmma_commit();
    };
    auto step = [&](Rows16<FP4>& ra, Rows16<FP4>& rb, int k) {
        uint32_t st = p.at % STAGES, x = p.x + st * STAGE, f0[4][4], f1[4][4];
        mbar_wait(p.full + 8 * st, p.at / STAGES & 1);
        panel(ra, f0, d0, 0, x, k == 0);
        panel(ra, f1, d0, 1, x, 0);
        if (k + 2 < steps) load_rows(ra, wk.w0, wk.s0, r0, r0b, wk.K, (k + 2) * 128, q);
        wgmma_wait<1>();
        panel(rb, f0, d1, 0, x, k == 0);
        wgmma_wait<1>();
        panel(rb, f1, d1, 1, x, 0);
        if (k + 2 < steps) load_rows(rb, wk.w1, wk.s1, r1, r1b, wk.K, (k + 2) * 128, q);
        wgmma_wait<0>();
        if (lane == 0) mbar_arrive(p.empty + 8 * st);
        ++p.at;
    };
    int k = 0;
    for (; k + 1 < steps; k += 2) {
        step(a[0], b[0], k);
        step(a[1], b[1], k + 1);
    }
    if (k < steps) step(a[0], b[0], k);
}

// The copying thread: for each piece of work, the tile's tokens, two panels of 64 columns a stage.
__device__ __forceinline__ void fetch_tokens(const bf16* x, const int4* tiles, int count, int blocks, int K, int64_t rows_pad, Pipe p) {
    int steps = (K + 127) >> 7;
    for (int i = blockIdx.x; i < count * blocks; i += gridDim.x) {
        int4 tile = tiles[i / blocks];
        uint32_t bytes = (uint32_t)((tile.z + 7) & ~7) * 128;
        for (int k = 0; k < steps; ++k, ++p.at) {
            uint32_t st = p.at % STAGES;
            if (p.at >= STAGES) mbar_wait(p.empty + 8 * st, (p.at / STAGES + 1) & 1);
            mbar_expect(p.full + 8 * st, 2 * bytes);
            for (int h = 0; h < 2; ++h) bulk_load(p.x + st * STAGE + h * PANEL, x + ((2 * k + h) * rows_pad + tile.y) * 64, bytes, p.full + 8 * st);
        }
    }
}

#define SIZES(CALL)                                                                                            \
    switch ((tile.z + 15) >> 4) {                                                                              \
        case 1: CALL(16); break;                                                                               \
        case 2: CALL(32); break;                                                                               \
        case 3: CALL(48); break;                                                                               \
        case 4: CALL(64); break;                                                                               \
        case 5: CALL(80); break;                                                                               \
        case 6: CALL(96); break;                                                                               \
        case 7: CALL(112); break;                                                                              \
        default: CALL(128);                                                                                    \
    }

// Start-up of both kernels; returns false for the threads that are done (the copying warpgroup).
__device__ __forceinline__ bool start(const bf16* x, const int4* tiles, int count, int blocks, int K, int64_t rows_pad, uint8_t* smem, Pipe& p) {
    p.x = smem_addr(smem);
    p.full = smem_addr(smem + STAGES * STAGE + TOK * OUT_ROW * 2);
    p.empty = p.full + 8 * STAGES;
    p.at = 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) { mbar_init(p.full + 8 * i, 1); mbar_init(p.empty + 8 * i, 8); }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= 256) {
        registers_down<24>();
        if (threadIdx.x == 256) fetch_tokens(x, tiles, count, blocks, K, rows_pad, p);
        return false;
    }
    registers_up<240>();
    return true;
}

extern "C" __global__ void __launch_bounds__(384, 1) experts_many_up(const bf16* x, const int32_t* order, const int4* tiles, const int32_t* count_p,
                                                                     const float* weights, const uint8_t* w1, const uint8_t* s1, const uint8_t* w3,
                                                                     const uint8_t* s3, bf16* h, int dim, int inter, int64_t rows_pad, float limit) {
    extern __shared__ __align__(1024) uint8_t smem[];
    bf16* out = reinterpret_cast<bf16*>(smem + STAGES * STAGE);  // [token][128 units]
    int blocks = (inter + 127) / 128, count = *count_p;
    Pipe p;
    if (!start(x, tiles, count, blocks, dim, rows_pad, smem, p)) return;
    int wg = threadIdx.x >> 7, warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    for (int i = blockIdx.x; i < count * blocks; i += gridDim.x) {
        int4 tile = tiles[i / blocks];
        int unit0 = i % blocks * 128;
        int64_t wb = (int64_t)tile.x * inter * (dim >> 1), sb = (int64_t)tile.x * inter * (dim >> 5);
        Work wk = {w1 + wb, s1 + sb, w3 + wb, s3 + sb, inter, dim, unit0 + wg * 64, unit0 + wg * 64};
        float gate[64], up[64];
#define CALL(N) multiply<N>(wk, p, gate, up)
        SIZES(CALL)
#undef CALL
        // Activation into [token][unit], then quantised there, 32 units of a token at a time, then out in tiled order.
#pragma unroll
        for (int j = 0; j < TOK / 8; ++j) {
            if (8 * j >= tile.z) break;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                int m = 8 * j + 2 * q + (e & 1), u = wg * 64 + warp * 16 + g + (e >> 1) * 8;
                float w = m < tile.z ? weights[order[tile.y + m]] : 0.0f;
                float v = w * swiglu_value(round_bf16(gate[4 * j + e] * WIDEN_UNDO), round_bf16(up[4 * j + e] * WIDEN_UNDO), limit);
                out[m * OUT_ROW + u] = __float2bfloat16_rn(unit0 + u < inter ? v : 0.0f);
            }
        }
        named_barrier(1, 256);
        int items = tile.z * 16;
        for (int b = 0; b < items; b += 256) {
            int it = b + threadIdx.x;
            float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            uint4* at = reinterpret_cast<uint4*>(out + (it >> 4) * OUT_ROW + (it & 15) * 8);
            if (it < items) unpack8(*at, v);
            fake_quant8(v);
            if (it < items) *at = pack8(v);
        }
        named_barrier(1, 256);
        for (int it = threadIdx.x; it < items; it += 256) {
            int m = it >> 4, u = it & 15;
            const bf16* row = out + m * OUT_ROW;
            uint32_t w[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                int c = tiled_column_fp4(u * 8 + 2 * e);
                w[e] = (uint32_t)__bfloat16_as_ushort(row[c]) | (uint32_t)__bfloat16_as_ushort(row[c + 4]) << 16;
            }
            int64_t place = tile.y + m;
            reinterpret_cast<uint4*>(h)[((int64_t)(unit0 / 64 + (u >> 3)) * rows_pad + place) * 8 + ((u & 7) ^ (place & 7))] = make_uint4(w[0], w[1], w[2], w[3]);
        }
        named_barrier(1, 256);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) experts_many_down(const bf16* h, const int4* tiles, const int32_t* count_p, const uint8_t* w2,
                                                                       const uint8_t* s2, bf16* y, int dim, int inter, int64_t rows_pad) {
    extern __shared__ __align__(1024) uint8_t smem[];
    int blocks = (dim + 255) / 256, count = *count_p;
    Pipe p;
    if (!start(h, tiles, count, blocks, inter, rows_pad, smem, p)) return;
    int wg = threadIdx.x >> 7, tid = threadIdx.x & 127, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3;
    bf16* out = reinterpret_cast<bf16*>(smem + STAGES * STAGE) + wg * 64 * OUT_ROW;  // [64 tokens][128 rows] of this warpgroup
    for (int i = blockIdx.x; i < count * blocks; i += gridDim.x) {
        int4 tile = tiles[i / blocks];
        int row0 = i % blocks * 256 + wg * 128;
        const uint8_t *w = w2 + (int64_t)tile.x * dim * (inter >> 1), *s = s2 + (int64_t)tile.x * dim * (inter >> 5);
        Work wk = {w, s, w, s, dim, inter, row0, row0 + 64};
        float d0[64], d1[64];
#define CALL(N) multiply<N>(wk, p, d0, d1)
        SIZES(CALL)
#undef CALL
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (half * 64 >= tile.z) break;
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    int m = 8 * j + 2 * q + (e & 1), u = warp * 16 + g + (e >> 1) * 8, at = 4 * (half * 8 + j) + e;
                    out[m * OUT_ROW + u] = __float2bfloat16_rn(d0[at] * WIDEN_UNDO);
                    out[m * OUT_ROW + 64 + u] = __float2bfloat16_rn(d1[at] * WIDEN_UNDO);
                }
            named_barrier(1 + wg, 128);
            for (int it = tid; it < 64 * 16; it += 128) {
                int m = half * 64 + (it >> 4), n = row0 + (it & 15) * 8;
                if (m < tile.z && n < dim) *reinterpret_cast<uint4*>(y + (int64_t)(tile.y + m) * dim + n) = *reinterpret_cast<const uint4*>(out + (it >> 4) * OUT_ROW + (it & 15) * 8);
            }
            named_barrier(1 + wg, 128);
        }
    }
}
