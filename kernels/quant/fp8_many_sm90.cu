// fp8_many: y = x W^T with e4m3 weights for many tokens, on Hopper, at the rate of the bf16 tensor core.
//
// Maths    as fp8_linear
// Layout   x from act_quant_tiled (fp4_weights = 0) with rows_pad rows; w [N, K] u8, s [ceil(N/32), K/32] u8; y [M, N] bf16.
//          Groups side by side: every `per` rows of w have K columns of x of their own, one group's after another's (wo_a: quantise = 0)
// Grid     persistent: min(SMs, tiles) blocks of 384 threads, tiles = ceil(N/128) * ceil(M/TOK), TOK = 256, 192 or 128 (suffix);
//          dynamic shared memory 4*TOK*128 + 2*TOK*144 + 1024. K a multiple of 32, N a multiple of 8;
//          per = N, or a multiple of 128 with K a multiple of 64
// Numerics exact bf16 operands (weight codes times scale, widened in registers), f32 sums over K in one chain
// Checked  tests_cuda/check.cu
//
// Weights are the A operand: each warp reads its own 16 rows straight from memory into registers two stages ahead and widens
// them there, so they never touch shared memory. Activations are the B operand: the tiled layout makes a stage (64 columns of
// all the tile's tokens, swizzled) one contiguous piece, which one thread fetches with one bulk copy. Two warpgroups of 64 rows;
// while one widens or stores, the other keeps the tensor core busy.
#include "../common/weights.cuh"
#include "../common/wgmma.cuh"

constexpr int STAGES = 4;

template <int TOK>
__device__ __forceinline__ void mma_step(float (&d)[TOK / 2], const uint32_t (&a)[4], uint64_t b, int acc) {
    if constexpr (TOK == 256) wgmma_n256_bf16(d, a[0], a[1], a[2], a[3], b, acc);
    else if constexpr (TOK == 192) wgmma_n192_bf16(d, a[0], a[1], a[2], a[3], b, acc);
    else wgmma_n128_bf16(d, a[0], a[1], a[2], a[3], b, acc);
}

struct WeightStage {
    uint4 a, b;
    uint32_t s;
};

template <int TOK>
__device__ __forceinline__ void many(const bf16* x, const uint8_t* w, const uint8_t* s, bf16* y, int M, int N, int K, int per, int64_t rows_pad) {
    constexpr int STAGE = TOK * 128, OUT_ROW = 72;  // a staged token: 64 rows of one warpgroup and 8 of padding
    extern __shared__ __align__(1024) uint8_t smem[];
    bf16* stage_out = reinterpret_cast<bf16*>(smem + STAGES * STAGE);
    uint32_t bars = smem_addr(smem + STAGES * STAGE + 2 * TOK * OUT_ROW * 2), full = bars, empty = bars + 8 * STAGES;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    int n_tiles = (N + 127) / 128, m_tiles = (M + TOK - 1) / TOK, tiles = n_tiles * m_tiles, steps = (K + 63) >> 6;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) { mbar_init(full + 8 * i, 1); mbar_init(empty + 8 * i, 8); }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp >= 8) {
        registers_down<24>();
        if (threadIdx.x != 256) return;
        uint32_t dst = smem_addr(smem), at = 0;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            int64_t t0 = (int64_t)(tile % m_tiles) * TOK, k0 = (int64_t)(tile / m_tiles * 128 / per) * steps;
            uint32_t bytes = (uint32_t)min((int64_t)TOK, rows_pad - t0) * 128;
            for (int k = 0; k < steps; ++k, ++at) {
                uint32_t st = at % STAGES;
                if (at >= STAGES) mbar_wait(empty + 8 * st, (at / STAGES + 1) & 1);
                mbar_expect(full + 8 * st, bytes);
                bulk_load(dst + st * STAGE, x + ((k0 + k) * rows_pad + t0) * 64, bytes, full + 8 * st);
            }
        }
        return;
    }
    registers_up<240>();
    int wg = warp >> 2, tid = threadIdx.x & 127;
    uint32_t at = 0, x0 = smem_addr(smem);
    int64_t ks = K >> 5;
    bf16* mine = stage_out + wg * TOK * OUT_ROW;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        int t0 = tile % m_tiles * TOK, row0 = tile / m_tiles * 128 + wg * 64, row = row0 + (warp & 3) * 16;
        const uint8_t *pa = w + (int64_t)min(row + g, N - 1) * K + q * 16, *pb = w + (int64_t)min(row + g + 8, N - 1) * K + q * 16;
        const uint8_t* ps = s + (int64_t)(min(row, N - 1) >> 5) * ks + (q >> 1);
        auto fetch = [&](WeightStage& r, int k) {
            bool live = k * 64 + q * 16 < K;
            r.a = live ? load_stream(pa + k * 64) : make_uint4(0, 0, 0, 0);
            r.b = live ? load_stream(pb + k * 64) : make_uint4(0, 0, 0, 0);
            r.s = live ? __ldg(ps + k * 2) : 0;
        };
        float d[TOK / 2];
        WeightStage next[2];
        fetch(next[0], 0);
        if (steps > 1) fetch(next[1], 1);
        // One stage's products stay in flight while the next stage's weights are widened: two sets of operand registers.
        uint32_t a[2][4][4];
        auto step = [&](WeightStage& r, uint32_t (&o)[4][4], int k) {
            uint32_t st = at % STAGES, f = e4m3_factor(r.s);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                uint32_t wa = word(r.a, j), wb = word(r.b, j);
                o[j][0] = e4m3_pair<0>(wa, f); o[j][1] = e4m3_pair<0>(wb, f);
                o[j][2] = e4m3_pair<2>(wa, f); o[j][3] = e4m3_pair<2>(wb, f);
            }
            if (k + 2 < steps) fetch(r, k + 2);
            mbar_wait(full + 8 * st, at / STAGES & 1);
#pragma unroll
            for (int j = 0; j < 4; ++j) wgmma_pin(o[j]);
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < 4; ++j) mma_step<TOK>(d, o[j], desc_swizzle128(x0 + st * STAGE + j * 32), k > 0 || j > 0);
            wgmma_commit();
            wgmma_wait<1>();
            if (k > 0 && lane == 0) mbar_arrive(empty + 8 * ((at - 1) % STAGES));
            ++at;
        };
        int k = 0;
        for (; k + 1 < steps; k += 2) {
            step(next[0], a[0], k);
            step(next[1], a[1], k + 1);
        }
        if (k < steps) step(next[0], a[0], k);
        wgmma_wait<0>();
        if (lane == 0) mbar_arrive(empty + 8 * ((at - 1) % STAGES));
        // Out through shared memory: the accumulators hold rows of W across lanes, the result wants them contiguous.
        named_barrier(1 + wg, 128);
#pragma unroll
        for (int j = 0; j < TOK / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                mine[(8 * j + 2 * q + (i & 1)) * OUT_ROW + (warp & 3) * 16 + g + (i >> 1) * 8] = __float2bfloat16_rn(d[4 * j + i] * WIDEN_UNDO);
        }
        named_barrier(1 + wg, 128);
        for (int u = tid; u < TOK * 8; u += 128) {
            int m = u >> 3, n = row0 + (u & 7) * 8;
            if (t0 + m < M && n < N) *reinterpret_cast<uint4*>(y + (int64_t)(t0 + m) * N + n) = *reinterpret_cast<const uint4*>(mine + m * OUT_ROW + (u & 7) * 8);
        }
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) fp8_many_256(const bf16* x, const uint8_t* w, const uint8_t* s, bf16* y, int M, int N, int K, int per,
                                                                   int64_t rows_pad) {
    many<256>(x, w, s, y, M, N, K, per, rows_pad);
}
extern "C" __global__ void __launch_bounds__(384, 1) fp8_many_128(const bf16* x, const uint8_t* w, const uint8_t* s, bf16* y, int M, int N, int K, int per,
                                                                   int64_t rows_pad) {
    many<128>(x, w, s, y, M, N, K, per, rows_pad);
}
extern "C" __global__ void __launch_bounds__(384, 1) fp8_many_192(const bf16* x, const uint8_t* w, const uint8_t* s, bf16* y, int M, int N, int K, int per,
                                                                   int64_t rows_pad) {
    many<192>(x, w, s, y, M, N, K, per, rows_pad);
}
