// experts_few: the routed experts over tiles of up to 8 tokens, e2m1 weights, on Hopper.
//
// Maths    as experts.cu: up: h = act_quant(bf16(weight * swiglu(bf16(W1 x), bf16(W3 x)))); down: y = bf16(W2 h)
// Layout   xc [T, dim] e4m3 codes, xs [T, dim/32] e8m0 (act_quant); order, tiles, count of group_tokens (tile = 8);
//          weights [P] f32; w1, w3 [n_local, inter, dim/2], w2 [n_local, dim, inter/2], scales [.., K/32];
//          hc [P, inter] codes and hs [P, inter/32] scales by position in `order`; y [P, dim] bf16
// Grid     up: (inter/32, max_tiles), down: (ceil(dim/64), max_tiles), block 128; dynamic shared memory
//          few_smem(K) = Kg*(256 + 32) + 3*18432, Kg = K/32 rounded up to 16 groups; suffix _t1: tiles of one token
// Numerics e2m1 becomes e4m3 (exact), the tensor core multiplies codes, and each group of 32 is scaled in f32 as the reference
//          does; the core's sum over one group keeps about 14 bits below its largest term
// Checked  tests_cuda/check_moe.cuh
#include "../common/quantise.cuh"
#include "../common/swiglu.cuh"
#include "../common/wgmma.cuh"

constexpr int STAGES = 3, STAGE_GROUPS = 16;
// 256 bytes of codes a row and one more 16-byte unit, so that eight rows start in eight different bank groups.
constexpr int ROW = 272, STAGE_W = 64 * ROW, STAGE_BYTES = STAGE_W + 64 * STAGE_GROUPS;

// Four e2m1 codes of even (odd) nibbles as e4m3 bytes: the magnitude moves up to exponent bits 3,4 and mantissa bit 2 (value * 2^-6).
__device__ __forceinline__ uint32_t even_e4m3(uint32_t w) { return ((w << 2) & 0x1c1c1c1cu) | ((w << 4) & 0x80808080u); }
__device__ __forceinline__ uint32_t odd_e4m3(uint32_t w) { return ((w >> 2) & 0x1c1c1c1cu) | (w & 0x80808080u); }

__device__ __forceinline__ void cp_async8(uint32_t dst, const void* src) { asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(dst), "l"(src)); }

struct Rows64 {
    // Rows 0..31 at wa, 32..63 at wb; scales likewise. `live` rows of each half exist.
    const uint8_t *wa, *wb, *sa, *sb;
    int live_a, live_b;
};

struct FewSmem {
    uint8_t *b, *ring;
    float* sx;
    int gp;
    __device__ FewSmem(uint8_t* p, int K) {
        gp = (K / 32 + STAGE_GROUPS - 1) / STAGE_GROUPS * STAGE_GROUPS;
        b = p;
        sx = reinterpret_cast<float*>(p + gp * 256);
        ring = p + gp * (256 + 32);
    }
};

__device__ __forceinline__ void load_stage(const FewSmem& sm, const Rows64& r, int K, int stage) {
    uint8_t* dst = sm.ring + stage % STAGES * STAGE_BYTES;
    uint32_t d = smem_addr(dst);
    int64_t kb = K >> 1;
    int G = K >> 5, c = threadIdx.x & 15, r0 = threadIdx.x >> 4, g = stage * STAGE_GROUPS + c;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        int row = r0 + 8 * (i & 3);
        uint32_t at = (i * 8 + r0) * ROW + c * 16;
        bool live = g < G && row < (i < 4 ? r.live_a : r.live_b);
        if (live) cp_async16(d + at, (i < 4 ? r.wa : r.wb) + row * kb + g * 16);
        else *reinterpret_cast<uint4*>(dst + at) = make_uint4(0, 0, 0, 0);
    }
    // Scales: a thread takes 8 bytes of one row.
    int row = threadIdx.x >> 1, half = threadIdx.x & 1, g8 = stage * STAGE_GROUPS + half * 8, rr = row & 31;
    const uint8_t* s = (row < 32 ? r.sa : r.sb) + (int64_t)rr * G + g8;
    bool live = rr < (row < 32 ? r.live_a : r.live_b);
    uint32_t at = STAGE_W + row * STAGE_GROUPS + half * 8;
    if (live && (G & 7) == 0 && g8 < G) {
        cp_async8(d + at, s);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) dst[at + i] = live && g8 + i < G ? s[i] : 0;
    }
}

// The B operand: tokens' codes as [group][half][token][16], half 0 the even columns of the group, 1 the odd ones.
template <int NTOK, typename RowOf>
__device__ __forceinline__ void load_tokens(const FewSmem& sm, const uint8_t* xc, const uint8_t* xs, int K, int n, RowOf row_of) {
    int G = K >> 5;
    for (int i = threadIdx.x; i < sm.gp * NTOK; i += 128) {
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

// acc += 64 rows x up to 8 tokens over all of K. NTOK = 1 leaves the columns of other tokens undefined.
template <int NTOK>
__device__ __forceinline__ void few_core(const FewSmem& sm, const Rows64& r, int K, float (&acc)[4]) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    int stages = sm.gp / STAGE_GROUPS;
    uint32_t b0 = smem_addr(sm.b);
    int tok = NTOK == 1 ? 0 : 2 * q;
    for (int st = 0; st < stages; ++st) {
        cp_async_wait<STAGES - 2>();
        fence_async_shared();
        __syncthreads();
        if (st + STAGES - 1 < stages) load_stage(sm, r, K, st + STAGES - 1);
        cp_async_commit();
        const uint8_t* ring = sm.ring + st % STAGES * STAGE_BYTES;
        uint32_t w = smem_addr(ring) + (warp * 16 + (lane & 15)) * ROW + (lane >> 4) * 16;
        const uint8_t* sc = ring + STAGE_W + (warp * 16 + g) * STAGE_GROUPS;
        float d[2][4][4];
        uint32_t a[2][4][4];
        auto finish = [&](int batch, float(&p)[4][4]) {
            uint32_t s0 = *reinterpret_cast<const uint32_t*>(sc + batch * 4), s1 = *reinterpret_cast<const uint32_t*>(sc + 8 * STAGE_GROUPS + batch * 4);
            float4 x0 = *reinterpret_cast<const float4*>(sm.sx + tok * sm.gp + st * STAGE_GROUPS + batch * 4), x1 = x0;
            if (NTOK > 1) x1 = *reinterpret_cast<const float4*>(sm.sx + (tok + 1) * sm.gp + st * STAGE_GROUPS + batch * 4);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float f0 = __uint_as_float((i < 3 ? s0 << (23 - 8 * i) : s0 >> 1) & 0x7f800000u);
                float f1 = __uint_as_float((i < 3 ? s1 << (23 - 8 * i) : s1 >> 1) & 0x7f800000u);
                float u0 = i == 0 ? x0.x : i == 1 ? x0.y : i == 2 ? x0.z : x0.w, u1 = i == 0 ? x1.x : i == 1 ? x1.y : i == 2 ? x1.z : x1.w;
                acc[0] += p[i][0] * (f0 * u0);
                acc[2] += p[i][2] * (f1 * u0);
                if (NTOK > 1) { acc[1] += p[i][1] * (f0 * u1); acc[3] += p[i][3] * (f1 * u1); }
            }
        };
#pragma unroll
        for (int batch = 0; batch < STAGE_GROUPS / 4; ++batch) {
            uint32_t(&ab)[4][4] = a[batch & 1];
            float(&db)[4][4] = d[batch & 1];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint32_t v[4];
                ldmatrix_x4(v, w + (batch * 4 + i * 2) * 16);
                ab[2 * i][0] = even_e4m3(v[0]); ab[2 * i][1] = even_e4m3(v[1]); ab[2 * i][2] = odd_e4m3(v[0]); ab[2 * i][3] = odd_e4m3(v[1]);
                ab[2 * i + 1][0] = even_e4m3(v[2]); ab[2 * i + 1][1] = even_e4m3(v[3]); ab[2 * i + 1][2] = odd_e4m3(v[2]); ab[2 * i + 1][3] = odd_e4m3(v[3]);
            }
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i) wgmma_n8_e4m3(db[i], ab[i], desc_plain(b0 + (st * STAGE_GROUPS + batch * 4 + i) * 256, 128, 128));
            wgmma_commit();
            if (batch) {
                wgmma_wait<1>();
                finish(batch - 1, d[(batch - 1) & 1]);
            }
        }
        wgmma_wait<0>();
        finish(STAGE_GROUPS / 4 - 1, d[1]);
    }
}

template <int NTOK>
__device__ __forceinline__ void up(const uint8_t* xc, const uint8_t* xs, const int32_t* order, const int4* tiles, const int32_t* count, const float* weights,
                                   const uint8_t* w1, const uint8_t* s1, const uint8_t* w3, const uint8_t* s3, uint8_t* hc, uint8_t* hs, int dim, int inter,
                                   int k_active, float limit) {
    if ((int)blockIdx.y >= *count) return;
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ float gu[64][9];
    FewSmem sm(smem, dim);
    int4 tile = tiles[blockIdx.y];
    int row0 = blockIdx.x * 32;
    int64_t wo = ((int64_t)tile.x * inter + row0) * (dim >> 1), so = ((int64_t)tile.x * inter + row0) * (dim >> 5);
    Rows64 r = {w1 + wo, w3 + wo, s1 + so, s3 + so, 32, 32};
    for (int i = 0; i < STAGES - 1; ++i) {
        if (i < sm.gp / STAGE_GROUPS) load_stage(sm, r, dim, i);
        cp_async_commit();
    }
    load_tokens<NTOK>(sm, xc, xs, dim, tile.z, [&](int m) { return (int64_t)(order[tile.y + m] / k_active); });
    float acc[4] = {0, 0, 0, 0};
    few_core<NTOK>(sm, r, dim, acc);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    if (NTOK > 1 || q == 0) {
        gu[warp * 16 + g][2 * q] = acc[0];
        gu[warp * 16 + g + 8][2 * q] = acc[2];
        if (NTOK > 1) { gu[warp * 16 + g][2 * q + 1] = acc[1]; gu[warp * 16 + g + 8][2 * q + 1] = acc[3]; }
    }
    __syncthreads();
    for (int m = warp; m < tile.z; m += 4) {
        float v = round_bf16(weights[order[tile.y + m]] * swiglu_value(round_bf16(gu[lane][m]), round_bf16(gu[32 + lane][m]), limit));
        uint32_t s = fp8_scale(warp_max(fabsf(v)));
        int64_t at = (int64_t)(tile.y + m) * inter + row0;
        hc[at + lane] = (uint8_t)fp8_code(v, e8m0_inverse(s));
        if (lane == 0) hs[at >> 5] = (uint8_t)s;
    }
}

template <int NTOK>
__device__ __forceinline__ void down(const uint8_t* hc, const uint8_t* hs, const int4* tiles, const int32_t* count, const uint8_t* w2, const uint8_t* s2, bf16* y,
                                     int dim, int inter) {
    if ((int)blockIdx.y >= *count) return;
    extern __shared__ __align__(128) uint8_t smem[];
    FewSmem sm(smem, inter);
    int4 tile = tiles[blockIdx.y];
    int row0 = blockIdx.x * 64;
    int64_t row = (int64_t)tile.x * dim + row0, kb = inter >> 1, ks = inter >> 5;
    Rows64 r = {w2 + row * kb, w2 + (row + 32) * kb, s2 + row * ks, s2 + (row + 32) * ks, min(32, dim - row0), min(32, dim - row0 - 32)};
    for (int i = 0; i < STAGES - 1; ++i) {
        if (i < sm.gp / STAGE_GROUPS) load_stage(sm, r, inter, i);
        cp_async_commit();
    }
    load_tokens<NTOK>(sm, hc, hs, inter, tile.z, [&](int m) { return (int64_t)(tile.y + m); });
    float acc[4] = {0, 0, 0, 0};
    few_core<NTOK>(sm, r, inter, acc);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int n = row0 + warp * 16 + g + (i >> 1) * 8, m = 2 * q + (i & 1);
        if (n < dim && m < min(tile.z, NTOK)) y[(int64_t)(tile.y + m) * dim + n] = __float2bfloat16_rn(acc[i]);
    }
}

#define FEW(SUFFIX, NTOK)                                                                                                                        \
    extern "C" __global__ void __launch_bounds__(128, 2) experts_few_up##SUFFIX(                                                                 \
        const uint8_t* xc, const uint8_t* xs, const int32_t* order, const int4* tiles, const int32_t* count, const float* weights,               \
        const uint8_t* w1, const uint8_t* s1, const uint8_t* w3, const uint8_t* s3, uint8_t* hc, uint8_t* hs, int dim, int inter, int k_active,  \
        float limit) {                                                                                                                           \
        up<NTOK>(xc, xs, order, tiles, count, weights, w1, s1, w3, s3, hc, hs, dim, inter, k_active, limit);                                     \
    }                                                                                                                                            \
    extern "C" __global__ void __launch_bounds__(128, 2) experts_few_down##SUFFIX(const uint8_t* hc, const uint8_t* hs, const int4* tiles,       \
                                                                                  const int32_t* count, const uint8_t* w2, const uint8_t* s2,    \
                                                                                  bf16* y, int dim, int inter) {                                 \
        down<NTOK>(hc, hs, tiles, count, w2, s2, y, dim, inter);                                                                                 \
    }
FEW(, 8)
FEW(_t1, 1)
