// experts_few, experts_one: the routed experts over tiles of up to 8 tokens, or of a single token, e2m1 weights, on Hopper.
//
// Maths    as experts.cu: up: h = act_quant(bf16(weight * swiglu(bf16(W1 x), bf16(W3 x)))); down: y = bf16(W2 h);
//          experts_one_down ends with moe_combine's sum
// Layout   xc [T, dim] e4m3 codes, xs [T, dim/32] e8m0 (act_quant); w1, w3 [n_local, inter, dim/2], w2 [n_local, dim, inter/2],
//          scales [.., K/32]; hc [P, inter] codes, hs [P, inter/32]; y [P, dim] bf16.
//          few: order, tiles, count of group_tokens (tile = 8), weights [P] f32, hc, hs, y by position in `order`.
//          one: experts [k] u32 and weights [k] f32 straight from the gate, expert ids first .. first + n_local being ours;
//          hc, hs, y by slot; shared [dim] bf16 or null; out [dim] bf16; counter [ceil(dim/128)] u32 (zero before the first use)
// Grid     up: (ceil(inter/64), max_tiles or k), down: (ceil(dim/128), max_tiles or k), block 256; dynamic shared memory, with
//          g = K/32 rounded up to 8: few: 3*18432 + g*288 + 128, one: 5*18432 + g*36 + 128
// Numerics common/few_sm90.cuh: e2m1 becomes e4m3 (exact), the tensor core sums a group's 32 products (about 14 bits below the
//          largest), each sum is scaled and added in f32, as the reference's kernel does
// Checked  tests_cuda/check_moe.cuh
#include "../common/few_sm90.cuh"
#include "../common/swiglu.cuh"

// As many stages as let two CTAs share an SM beside the tokens' operand.
template <int TOK>
constexpr int RING = TOK == 1 ? 5 : 3;

// One CTA's product as part [128][TOK + 1].
template <int TOK, typename RowOf>
__device__ __forceinline__ void product(const Segments& r, const uint8_t* xc, const uint8_t* xs, int K, int n, RowOf row_of, float (*part)[TOK + 1]) {
    extern __shared__ __align__(128) uint8_t smem[];
    int stages = (K + 255) >> 8;
    Tokens<FP4, TOK> x(smem + RING<TOK> * FEW_STAGE, stages * 8);
    bool clean = (K & 255) || r.live[0] + r.live[1] + r.live[2] + r.live[3] < 128;
    few_start<RING<TOK>>(r, smem, 0, stages, clean, [&] { x.load(xc, xs, K, 0, n, row_of); });
    float acc[4] = {0, 0, 0, 0};
    few_multiply<FP4, TOK, RING<TOK>>(x, r, smem, nullptr, 0, stages, acc);
    few_store<TOK>(acc, part);
    __syncthreads();
}

template <int TOK, typename RowOf, typename WeightOf>
__device__ __forceinline__ void up(int expert, int64_t pos, int n, const uint8_t* xc, const uint8_t* xs, const uint8_t* w1, const uint8_t* s1, const uint8_t* w3,
                                   const uint8_t* s3, uint8_t* hc, uint8_t* hs, int dim, int inter, float limit, RowOf row_of, WeightOf weight_of) {
    __shared__ float part[128][TOK + 1];
    int row0 = blockIdx.x * 64, G = dim >> 5;
    Segments r;
    r.row_bytes = dim >> 1;
    r.groups = G;
    // Segments 0 and 2 are gate rows, 1 and 3 the up rows of the same units.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int64_t row = (int64_t)expert * inter + row0 + (i >> 1) * 32;
        r.w[i] = (i & 1 ? w3 : w1) + row * r.row_bytes;
        r.s[i] = (i & 1 ? s3 : s1) + row * G;
        r.live[i] = row0 + (i >> 1) * 32 < inter ? 32 : 0;
    }
    product<TOK>(r, xc, xs, dim, n, row_of, part);
    // A warp per token and 32 units: one quantisation group.
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    for (int i = warp; i < 2 * n; i += 8) {
        int m = i >> 1, half = i & 1;
        if (row0 + half * 32 >= inter) continue;
        float v = round_bf16(weight_of(m) * swiglu_value(round_bf16(part[half * 64 + lane][m]), round_bf16(part[half * 64 + 32 + lane][m]), limit));
        uint32_t s = fp8_scale(warp_max(fabsf(v)));
        int64_t at = (pos + m) * inter + row0 + half * 32;
        hc[at + lane] = (uint8_t)fp8_code(v, e8m0_inverse(s));
        if (lane == 0) hs[at >> 5] = (uint8_t)s;
    }
}

template <int TOK>
__device__ __forceinline__ void down(int expert, int64_t pos, int n, const uint8_t* hc, const uint8_t* hs, const uint8_t* w2, const uint8_t* s2, bf16* y, int dim,
                                     int inter) {
    __shared__ float part[128][TOK + 1];
    int row0 = blockIdx.x * 128;
    Segments r;
    r.row_bytes = inter >> 1;
    r.groups = inter >> 5;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int64_t row = (int64_t)expert * dim + row0 + i * 32;
        r.w[i] = w2 + row * r.row_bytes;
        r.s[i] = s2 + row * r.groups;
        r.live[i] = max(0, min(32, dim - row0 - i * 32));
    }
    product<TOK>(r, hc, hs, inter, n, [&](int m) { return pos + m; }, part);
    for (int i = threadIdx.x; i < 128 * n; i += 256) {
        int d = i & 127, m = i >> 7;
        if (row0 + d < dim) y[(pos + m) * dim + row0 + d] = __float2bfloat16_rn(part[d][m]);
    }
}

extern "C" __global__ void __launch_bounds__(256, 2) experts_few_up(const uint8_t* xc, const uint8_t* xs, const int32_t* order, const int4* tiles,
                                                                    const int32_t* count, const float* weights, const uint8_t* w1, const uint8_t* s1,
                                                                    const uint8_t* w3, const uint8_t* s3, uint8_t* hc, uint8_t* hs, int dim, int inter,
                                                                    int k_active, float limit) {
    int4 tile = tiles[blockIdx.y];
    if ((int)blockIdx.y >= *count) return;
    up<8>(tile.x, tile.y, tile.z, xc, xs, w1, s1, w3, s3, hc, hs, dim, inter, limit, [&](int m) { return (int64_t)(order[tile.y + m] / k_active); },
          [&](int m) { return weights[order[tile.y + m]]; });
}
extern "C" __global__ void __launch_bounds__(256, 2) experts_few_down(const uint8_t* hc, const uint8_t* hs, const int4* tiles, const int32_t* count,
                                                                      const uint8_t* w2, const uint8_t* s2, bf16* y, int dim, int inter) {
    int4 tile = tiles[blockIdx.y];
    if ((int)blockIdx.y >= *count) return;
    down<8>(tile.x, tile.y, tile.z, hc, hs, w2, s2, y, dim, inter);
}

extern "C" __global__ void __launch_bounds__(256, 2) experts_one_up(const uint8_t* xc, const uint8_t* xs, const uint32_t* experts, const float* weights,
                                                                    const uint8_t* w1, const uint8_t* s1, const uint8_t* w3, const uint8_t* s3, uint8_t* hc,
                                                                    uint8_t* hs, int dim, int inter, uint32_t first, int n_local, float limit) {
    uint32_t e = experts[blockIdx.y] - first;
    if (e >= (uint32_t)n_local) return;
    up<1>((int)e, blockIdx.y, 1, xc, xs, w1, s1, w3, s3, hc, hs, dim, inter, limit, [](int) { return (int64_t)0; }, [&](int) { return weights[blockIdx.y]; });
}
extern "C" __global__ void __launch_bounds__(256, 2) experts_one_down(const uint8_t* hc, const uint8_t* hs, const uint32_t* experts, const uint8_t* w2,
                                                                      const uint8_t* s2, bf16* y, const bf16* shared, bf16* out, uint32_t* counter, int dim,
                                                                      int inter, uint32_t first, int n_local) {
    __shared__ bool last;
    __shared__ int by_id[32];  // slots in ascending order of experts, -1 for another rank's
    int k = gridDim.y, tid = threadIdx.x;
    uint32_t e = experts[blockIdx.y] - first;
    if (tid < k) {
        uint32_t mine = experts[tid];
        int rank = 0;
        for (int j = 0; j < k; ++j) rank += experts[j] < mine || (experts[j] == mine && j < tid);
        by_id[rank] = mine - first < (uint32_t)n_local ? tid : -1;
    }
    if (e < (uint32_t)n_local) down<1>((int)e, blockIdx.y, 1, hc, hs, w2, s2, y, dim, inter);
    // The last slot to finish these rows adds them up, in ascending order of experts.
    __syncthreads();
    if (tid == 0) {
        __threadfence();
        last = atomicInc(counter + blockIdx.x, k - 1) == k - 1;
    }
    __syncthreads();
    int row = blockIdx.x * 128 + tid;
    if (!last || tid >= 128 || row >= dim) return;
    __threadfence();
    // All slots at once (k <= 8 in flight), then added in their order.
    float sum = 0.0f;
    for (int i0 = 0; i0 < k; i0 += 8) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int slot = i0 + i < k ? by_id[i0 + i] : -1;
            v[i] = slot >= 0 ? __bfloat162float(__ldcg(y + (int64_t)slot * dim + row)) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += v[i];
    }
    if (shared) sum += __bfloat162float(shared[row]);
    out[row] = __float2bfloat16_rn(sum);
}
