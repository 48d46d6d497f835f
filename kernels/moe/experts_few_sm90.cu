// experts_few: the routed experts over tiles of up to 8 tokens, e2m1 weights, on Hopper.
//
// Maths    as experts.cu: up: h = act_quant(bf16(weight * swiglu(bf16(W1 x), bf16(W3 x)))); down: y = bf16(W2 h)
// Layout   xc [T, dim] e4m3 codes, xs [T, dim/32] e8m0 (act_quant); order, tiles, count of group_tokens (tile = 8);
//          weights [P] f32; w1, w3 [n_local, inter, dim/2], w2 [n_local, dim, inter/2], scales [.., K/32];
//          hc [P, inter] codes and hs [P, inter/32] scales by position in `order`; y [P, dim] bf16
// Grid     up: (ceil(inter/64), max_tiles), down: (ceil(dim/128), max_tiles), block 256; dynamic shared memory
//          few_smem(K) = Kg*(256 + 32) + 3*19456, Kg = K/32 rounded up to 8 groups; suffix _t1: tiles of one token
// Numerics e2m1 becomes e4m3 (exact), the tensor core multiplies codes, and each group of 32 is scaled in f32 as the reference
//          does; the core's sum over one group keeps about 14 bits below its largest term
// Checked  tests_cuda/check_moe.cuh
#include "../common/quantise.cuh"
#include "../common/swiglu.cuh"
#include "../common/wgmma.cuh"

constexpr int STAGES = 3, GROUPS = 8;  // groups of 32 columns in a stage
// 128 rows of 128 bytes of codes and one more 16-byte unit, so that eight rows start in eight different bank groups.
constexpr int ROW = 144, STAGE_W = 128 * ROW, STAGE_BYTES = STAGE_W + 128 * GROUPS;

// Four e2m1 codes of even (odd) nibbles as e4m3 bytes: the magnitude moves up to exponent bits 3,4 and mantissa bit 2 (value * 2^-6).
__device__ __forceinline__ uint32_t even_e4m3(uint32_t w) { return ((w << 2) & 0x1c1c1c1cu) | ((w << 4) & 0x80808080u); }
__device__ __forceinline__ uint32_t odd_e4m3(uint32_t w) { return ((w >> 2) & 0x1c1c1c1cu) | (w & 0x80808080u); }

__device__ __forceinline__ void cp_async8(uint32_t dst, const void* src) { asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(dst), "l"(src)); }

// What one thread copies of a stage: 16 bytes of each of four rows (row tid/8 + 32*i of the CTA's 128), and, of the first 128
// threads, the scales of row tid.
struct Copy {
    const uint8_t *w[4], *s;
    bool live[4], live_s;
};

struct FewSmem {
    uint8_t *b, *ring;
    float* sx;
    int gp;
    __device__ FewSmem(uint8_t* p, int K) {
        gp = (K / 32 + GROUPS - 1) / GROUPS * GROUPS;
        b = p;
        sx = reinterpret_cast<float*>(p + gp * 256);
        ring = p + gp * (256 + 32);
    }
};

__device__ __forceinline__ void load_stage(const FewSmem& sm, const Copy& c, int G, int stage, int slot) {
    uint8_t* dst = sm.ring + slot * STAGE_BYTES;
    uint32_t d = smem_addr(dst), at = (threadIdx.x >> 3) * ROW + (threadIdx.x & 7) * 16;
    bool inside = stage * GROUPS + (int)(threadIdx.x & 7) < G;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (inside && c.live[i]) cp_async16(d + at + i * 32 * ROW, c.w[i] + stage * GROUPS * 16);
        else *reinterpret_cast<uint4*>(dst + at + i * 32 * ROW) = make_uint4(0, 0, 0, 0);
    }
    if (threadIdx.x >= 128) return;
    at = STAGE_W + threadIdx.x * GROUPS;
    if (c.live_s && (G & 7) == 0) {
        cp_async8(d + at, c.s + stage * GROUPS);
    } else {
        for (int i = 0; i < GROUPS; ++i) dst[at + i] = c.live_s && stage * GROUPS + i < G ? c.s[stage * GROUPS + i] : 0;
    }
}

// The B operand: tokens' codes as [group][half][token][16], half 0 the even columns of the group, 1 the odd ones.
template <int NTOK, typename RowOf>
__device__ __forceinline__ void load_tokens(const FewSmem& sm, const uint8_t* xc, const uint8_t* xs, int K, int n, RowOf row_of) {
    int G = K >> 5;
    for (int i = threadIdx.x; i < sm.gp * NTOK; i += 256) {
        int m = i / sm.gp, g = i % sm.gp;
        uint4 lo = make_uint4(0, 0, 0, 0), hi = lo;
        float s = 0.0f;
        if (m < n && g < G) {
            int64_t row = row_of(m);
            const uint4* p = reinterpret_cast<const uint4*>(xc + row * K + g * 32);
            uint4 a = p[0], c = p[1];
            lo = make_uint4(prmt(a.x, a.y, 0x6420), prmt(a.z, a.w, 0x6420), prmt(c.x, c.y, 0x6420), prmt(c.z, c.w, 0x6420));
            hi = make_uint4(prmt(a.x, a.y, 0x7531), prmt(a.z, a.w, 0x7531), prmt(c.x, c.y, 0x7531), prmt(c.z, c.w, 0x7531));
            s = e8m0_to_f32(xs[row * G + g]) * 64.0f;  // undoes even_e4m3's 2^-6
        }
        uint8_t* b = sm.b + g * 256 + m * 16;
        *reinterpret_cast<uint4*>(b) = lo;
        *reinterpret_cast<uint4*>(b + 128) = hi;
        sm.sx[m * sm.gp + g] = s;
    }
}

// acc += this warpgroup's 64 rows x up to 8 tokens over all of K. NTOK = 1 leaves the columns of other tokens undefined.
template <int NTOK>
__device__ __forceinline__ void few_core(const FewSmem& sm, const Copy& c, int K, float (&acc)[4]) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, G = K >> 5;
    int stages = sm.gp / GROUPS, slot = 0, fill = STAGES - 1;
    uint32_t b0 = smem_addr(sm.b), ring0 = smem_addr(sm.ring), w0 = (warp * 16 + (lane & 15)) * ROW + (lane >> 4) * 16;
    const float *x0p = sm.sx + (NTOK == 1 ? 0 : 2 * q) * sm.gp, *x1p = x0p + sm.gp;
    for (int st = 0; st < stages; ++st) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (st + STAGES - 1 < stages) load_stage(sm, c, G, st + STAGES - 1, fill);
        cp_async_commit();
        uint32_t w = ring0 + slot * STAGE_BYTES + w0;
        const uint8_t* sc = sm.ring + slot * STAGE_BYTES + STAGE_W + (warp * 16 + g) * GROUPS;
        float d[2][4][4];
        uint32_t a[2][4][4];
#pragma unroll
        for (int batch = 0; batch < 2; ++batch) {
            uint32_t(&ab)[4][4] = a[batch];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint32_t v[4];
                ldmatrix_x4(v, w + (batch * 4 + i * 2) * 16);
                ab[2 * i][0] = even_e4m3(v[0]); ab[2 * i][1] = even_e4m3(v[1]); ab[2 * i][2] = odd_e4m3(v[0]); ab[2 * i][3] = odd_e4m3(v[1]);
                ab[2 * i + 1][0] = even_e4m3(v[2]); ab[2 * i + 1][1] = even_e4m3(v[3]); ab[2 * i + 1][2] = odd_e4m3(v[2]); ab[2 * i + 1][3] = odd_e4m3(v[3]);
            }
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i) wgmma_e4m3(d[batch][i], ab[i], desc_plain(b0 + (st * GROUPS + batch * 4 + i) * 256, 128, 128));
            wgmma_commit();
        }
        uint2 s0 = *reinterpret_cast<const uint2*>(sc), s1 = *reinterpret_cast<const uint2*>(sc + 8 * GROUPS);
        auto finish = [&](float(&p)[4][4], uint32_t e0, uint32_t e1, int at) {
            float4 x0 = *reinterpret_cast<const float4*>(x0p + at), x1 = NTOK > 1 ? *reinterpret_cast<const float4*>(x1p + at) : x0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float f0 = __uint_as_float((i < 3 ? e0 << (23 - 8 * i) : e0 >> 1) & 0x7f800000u);
                float f1 = __uint_as_float((i < 3 ? e1 << (23 - 8 * i) : e1 >> 1) & 0x7f800000u);
                float u0 = i == 0 ? x0.x : i == 1 ? x0.y : i == 2 ? x0.z : x0.w, u1 = i == 0 ? x1.x : i == 1 ? x1.y : i == 2 ? x1.z : x1.w;
                acc[0] += p[i][0] * (f0 * u0);
                acc[2] += p[i][2] * (f1 * u0);
                if (NTOK > 1) { acc[1] += p[i][1] * (f0 * u1); acc[3] += p[i][3] * (f1 * u1); }
            }
        };
        wgmma_wait<1>();
        finish(d[0], s0.x, s1.x, st * GROUPS);
        wgmma_wait<0>();
        finish(d[1], s0.y, s1.y, st * GROUPS + 4);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        fill = fill + 1 == STAGES ? 0 : fill + 1;
    }
}

// Starts the pipeline, builds the B operand, runs the product.
template <int NTOK, typename RowOf>
__device__ __forceinline__ void few(const Copy& c, const uint8_t* xc, const uint8_t* xs, int K, int n, RowOf row_of, float (&acc)[4]) {
    extern __shared__ __align__(128) uint8_t smem[];
    FewSmem sm(smem, K);
    for (int i = 0; i < STAGES - 1; ++i) {
        if (i < sm.gp / GROUPS) load_stage(sm, c, K >> 5, i, i);
        cp_async_commit();
    }
    load_tokens<NTOK>(sm, xc, xs, K, n, row_of);
    fence_async_shared();
    few_core<NTOK>(sm, c, K, acc);
}

template <int NTOK>
__device__ __forceinline__ void up(const uint8_t* xc, const uint8_t* xs, const int32_t* order, const int4* tiles, const int32_t* count, const float* weights,
                                   const uint8_t* w1, const uint8_t* s1, const uint8_t* w3, const uint8_t* s3, uint8_t* hc, uint8_t* hs, int dim, int inter,
                                   int k_active, float limit) {
    if ((int)blockIdx.y >= *count) return;
    __shared__ float gu[128][9];
    int4 tile = tiles[blockIdx.y];
    int row0 = blockIdx.x * 64, G = dim >> 5, tid = threadIdx.x;
    Copy c;
    // Rows 0..31 and 64..95 of the CTA are gate rows, 32..63 and 96..127 the up rows of the same units.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int n = row0 + (i >> 1) * 32 + (tid >> 3);
        c.live[i] = n < inter;
        c.w[i] = (i & 1 ? w3 : w1) + ((int64_t)tile.x * inter + n) * (dim >> 1) + (tid & 7) * 16;
    }
    int n = row0 + (tid >> 6) * 32 + (tid & 31);
    c.live_s = n < inter;
    c.s = (tid & 32 ? s3 : s1) + ((int64_t)tile.x * inter + n) * G;
    float acc[4] = {0, 0, 0, 0};
    few<NTOK>(c, xc, xs, dim, tile.z, [&](int m) { return (int64_t)(order[tile.y + m] / k_active); }, acc);
    int warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3;
    if (NTOK > 1 || q == 0) {
        gu[warp * 16 + g][2 * q] = acc[0];
        gu[warp * 16 + g + 8][2 * q] = acc[2];
        if (NTOK > 1) { gu[warp * 16 + g][2 * q + 1] = acc[1]; gu[warp * 16 + g + 8][2 * q + 1] = acc[3]; }
    }
    __syncthreads();
    // A warp per token and 32 units: one quantisation group.
    for (int i = warp; i < 2 * tile.z; i += 8) {
        int m = i >> 1, half = i & 1;
        if (row0 + half * 32 >= inter) continue;
        float v = round_bf16(weights[order[tile.y + m]] * swiglu_value(round_bf16(gu[half * 64 + lane][m]), round_bf16(gu[half * 64 + 32 + lane][m]), limit));
        uint32_t s = fp8_scale(warp_max(fabsf(v)));
        int64_t at = (int64_t)(tile.y + m) * inter + row0 + half * 32;
        hc[at + lane] = (uint8_t)fp8_code(v, e8m0_inverse(s));
        if (lane == 0) hs[at >> 5] = (uint8_t)s;
    }
}

template <int NTOK>
__device__ __forceinline__ void down(const uint8_t* hc, const uint8_t* hs, const int4* tiles, const int32_t* count, const uint8_t* w2, const uint8_t* s2, bf16* y,
                                     int dim, int inter) {
    if ((int)blockIdx.y >= *count) return;
    int4 tile = tiles[blockIdx.y];
    int row0 = blockIdx.x * 128, tid = threadIdx.x;
    Copy c;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int n = row0 + i * 32 + (tid >> 3);
        c.live[i] = n < dim;
        c.w[i] = w2 + ((int64_t)tile.x * dim + n) * (inter >> 1) + (tid & 7) * 16;
    }
    c.live_s = row0 + tid < dim;
    c.s = s2 + ((int64_t)tile.x * dim + row0 + tid) * (inter >> 5);
    float acc[4] = {0, 0, 0, 0};
    few<NTOK>(c, hc, hs, inter, tile.z, [&](int m) { return (int64_t)(tile.y + m); }, acc);
    int warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int n = row0 + warp * 16 + g + (i >> 1) * 8, m = 2 * q + (i & 1);
        if (n < dim && m < min(tile.z, NTOK)) y[(int64_t)(tile.y + m) * dim + n] = __float2bfloat16_rn(acc[i]);
    }
}

#define FEW(SUFFIX, NTOK)                                                                                                                        \
    extern "C" __global__ void __launch_bounds__(256, 2) experts_few_up##SUFFIX(                                                                 \
        const uint8_t* xc, const uint8_t* xs, const int32_t* order, const int4* tiles, const int32_t* count, const float* weights,               \
        const uint8_t* w1, const uint8_t* s1, const uint8_t* w3, const uint8_t* s3, uint8_t* hc, uint8_t* hs, int dim, int inter, int k_active,  \
        float limit) {                                                                                                                           \
        up<NTOK>(xc, xs, order, tiles, count, weights, w1, s1, w3, s3, hc, hs, dim, inter, k_active, limit);                                     \
    }                                                                                                                                            \
    extern "C" __global__ void __launch_bounds__(256, 2) experts_few_down##SUFFIX(const uint8_t* hc, const uint8_t* hs, const int4* tiles,       \
                                                                                  const int32_t* count, const uint8_t* w2, const uint8_t* s2,    \
                                                                                  bf16* y, int dim, int inter) {                                 \
        down<NTOK>(hc, hs, tiles, count, w2, s2, y, dim, inter);                                                                                 \
    }
FEW(, 8)
FEW(_t1, 1)
