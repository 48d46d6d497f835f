// Products of few tokens on Hopper: weight bytes stream through shared memory to fp8 tensor-core operands in registers.
//
// A CTA owns 128 rows of W (four segments of 32) and two warpgroups of 64 rows each. All threads copy W into a ring of stages,
// 128 bytes of each row at a time (256 fp4 or 128 fp8 columns), with cp.async: bulk copies of rows this short are slower (measured).
// The tokens are the B operand: e4m3 codes, K-major. Each group of 32 columns is one instruction whose sum is then scaled in f32.
#pragma once
#include "quantise.cuh"
#include "weights.cuh"
#include "wgmma.cuh"

// 128 bytes of a row and one more 16-byte unit, so that eight rows start in eight different bank groups.
constexpr int FEW_ROW = 144, FEW_STAGE = 128 * FEW_ROW;
template <int F>
__device__ constexpr int few_groups() { return F == FP4 ? 8 : 4; }  // groups of 32 columns in a stage

// Rows 32*i .. of the CTA start at w[i], row_bytes apart; their scales (fp4) at s[i], `groups` bytes apart.
struct Segments {
    const uint8_t *w[4], *s[4];
    int live[4];  // rows that exist, 0..32
    int64_t row_bytes;
    int groups;
};

// Four e2m1 codes of even (odd) nibbles as e4m3 bytes: the magnitude moves to exponent bits 3,4 and mantissa bit 2 (value * 2^-6).
__device__ __forceinline__ uint32_t even_e4m3(uint32_t w) { return ((w << 2) & 0x1c1c1c1cu) | ((w << 4) & 0x80808080u); }
__device__ __forceinline__ uint32_t odd_e4m3(uint32_t w) { return ((w >> 2) & 0x1c1c1c1cu) | (w & 0x80808080u); }

// Copies of stage `st` (of the whole rows) into a slot by THREADS threads, the caller's being `tid`. Columns past a row's end and
// rows that do not exist keep what the slot held: see few_start.
template <int THREADS>
__device__ __forceinline__ void few_copy(const Segments& r, uint8_t* slot, int st, int tid) {
    int c = tid & 7, r0 = tid >> 3;
    uint32_t d = smem_addr(slot) + r0 * FEW_ROW + c * 16;
    bool inside = st * 128 + c * 16 < r.row_bytes;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 32; j += THREADS / 8)
            if (inside && r0 + j < r.live[i]) cp_async16(d + (i * 32 + j) * FEW_ROW, r.w[i] + (r0 + j) * r.row_bytes + st * 128 + c * 16);
}

// The tokens. B operand: [group][half][TOK][16] bytes; with one token only its own rows are stored, 32 bytes
// a group, and the other seven rows an instruction reads are whatever follows: columns nobody looks at.
template <int F, int TOK>
struct Tokens {
    static constexpr int HALF = TOK * 16;
    uint8_t* b;
    float* sx;  // [TOK][gp]
    int gp;     // groups, rounded up to whole stages
    __device__ Tokens(uint8_t* p, int gp) : b(p), sx(reinterpret_cast<float*>(p + (size_t)gp * 2 * HALF + 128)), gp(gp) {}
    // Descriptor of group 0; group g is DESC_STEP * g further on.
    __device__ uint64_t desc() const { return desc_plain(smem_addr(b), HALF, 128); }
    static constexpr int DESC_STEP = 2 * HALF / 16;
    // Fills groups first .. for up to `n` tokens; row_of(m) is token m's row of codes [.., K] and scales [.., K/32]. The first
    // warpgroup calls, and must have no copies in flight: the fence would wait for them.
    template <typename RowOf>
    __device__ void load(const uint8_t* xc, const uint8_t* xs, int K, int first, int n, RowOf row_of) {
        int G = K >> 5;
        for (int i = threadIdx.x; i < gp * TOK; i += 128) {
            int m = i / gp, g = i % gp, gg = first + g;
            uint4 lo = make_uint4(0, 0, 0, 0), hi = lo;
            float s = 0.0f;
            if (m < n && gg < G) {
                int64_t row = row_of(m);
                const uint4* p = reinterpret_cast<const uint4*>(xc + row * K + gg * 32);
                uint4 a = p[0], c = p[1];
                s = e8m0_to_f32(xs[row * G + gg]);
                if (F == FP4) {
                    // even_e4m3 / odd_e4m3 order, and their 2^-6 undone.
                    lo = make_uint4(prmt(a.x, a.y, 0x6420), prmt(a.z, a.w, 0x6420), prmt(c.x, c.y, 0x6420), prmt(c.z, c.w, 0x6420));
                    hi = make_uint4(prmt(a.x, a.y, 0x7531), prmt(a.z, a.w, 0x7531), prmt(c.x, c.y, 0x7531), prmt(c.z, c.w, 0x7531));
                    s *= 64.0f;
                } else {
                    lo = a;
                    hi = c;
                }
            }
            uint8_t* at = b + g * 2 * HALF + m * 16;
            *reinterpret_cast<uint4*>(at) = lo;
            *reinterpret_cast<uint4*>(at + HALF) = hi;
            sx[i] = s;
        }
        fence_async_shared();
    }
};

__device__ __forceinline__ float pick4(const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
// Byte i of four e8m0 scales as f32 (byte 0 reads as 0, byte 255 as inf).
__device__ __forceinline__ float scale_byte(uint32_t w, int i) { return __uint_as_float((i < 3 ? w << (23 - 8 * i) : w >> 1) & 0x7f800000u); }

// Four scales of one row from group g0 on, 0 past the end.
__device__ __forceinline__ uint32_t load_scales(const uint8_t* row, int g0, int groups) {
    if ((groups & 3) == 0) return g0 < groups ? __ldg(reinterpret_cast<const uint32_t*>(row + g0)) : 0u;
    uint32_t w = 0;
    for (int i = 0; i < 4; ++i)
        if (g0 + i < groups) w |= (uint32_t)row[g0 + i] << (8 * i);
    return w;
}

// Before the product: the ring's first NS - 1 stages on their way (second warpgroup) while `tokens` builds the B operand (first
// warpgroup). Where rows or columns are missing the ring is cleaned first: a stale NaN code would survive a product with 0.
template <int NS, typename F>
__device__ __forceinline__ void few_start(const Segments& r, uint8_t* ring, int first, int count, bool clean, F tokens) {
    if (clean) {
        for (int i = threadIdx.x; i < NS * FEW_STAGE / 16; i += 256) reinterpret_cast<uint4*>(ring)[i] = make_uint4(0, 0, 0, 0);
        __syncthreads();
    }
    if (threadIdx.x >= 128) {
        for (int i = 0; i < NS - 1; ++i) {
            if (i < count) few_copy<128>(r, ring + i * FEW_STAGE, first + i, threadIdx.x - 128);
            cp_async_commit();
        }
    } else {
        tokens();
        for (int i = 0; i < NS - 1; ++i) cp_async_commit();
    }
}

// acc += this warpgroup's 64 rows x TOK tokens over stages first .. first + count. sw (fp8): [4][gp] f32 scales of the four segments.
// Lane 4g + q of warp w (of eight): rows 16w + g (acc[4t], acc[4t+1]: tokens 8t + 2q, +1) and + 8.
template <int F, int TOK, int NS>
__device__ __forceinline__ void few_multiply(const Tokens<F, TOK>& x, const Segments& r, uint8_t* ring, const float* sw, int first, int count,
                                             float (&acc)[TOK == 16 ? 8 : 4]) {
    constexpr int MT = TOK == 16 ? 2 : 1, GROUPS = few_groups<F>(), BATCHES = GROUPS / 4;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, seg = warp >> 1, row = (warp & 1) * 16 + g;
    uint32_t w0 = smem_addr(ring) + (warp * 16 + (lane & 15)) * FEW_ROW + (lane >> 4) * 16;
    int tok = TOK == 1 ? 0 : 2 * q;
    uint64_t desc = x.desc();
    const float *x0p = x.sx + tok * x.gp, *x1p = x0p + (TOK > 1 ? x.gp : 0), *swp = sw + seg * x.gp;
    // This thread's piece of each segment's rows, one stage further on with every copy.
    const uint8_t* src[4];
    uint32_t dst = smem_addr(ring) + (threadIdx.x >> 3) * FEW_ROW + (threadIdx.x & 7) * 16;
    int ahead = (first + NS - 1) * 128 + (threadIdx.x & 7) * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) src[i] = r.w[i] + (int64_t)(threadIdx.x >> 3) * r.row_bytes + ahead;
    const uint8_t *sp0 = nullptr, *sp1 = nullptr;
    uint32_t next[BATCHES][2] = {};
    bool scaled = false;
    if constexpr (F == FP4) {
        int live = seg == 0 ? r.live[0] : seg == 1 ? r.live[1] : seg == 2 ? r.live[2] : r.live[3];
        const uint8_t* base = seg == 0 ? r.s[0] : seg == 1 ? r.s[1] : seg == 2 ? r.s[2] : r.s[3];
        // Rows that do not exist read row 0's scales: their sums are dropped.
        sp0 = base + (int64_t)(row < live ? row : 0) * r.groups;
        sp1 = base + (int64_t)(row + 8 < live ? row + 8 : 0) * r.groups;
        scaled = live > 0;
#pragma unroll
        for (int b = 0; b < BATCHES; ++b) {
            next[b][0] = scaled ? load_scales(sp0, first * GROUPS + b * 4, r.groups) : 0;
            next[b][1] = scaled ? load_scales(sp1, first * GROUPS + b * 4, r.groups) : 0;
        }
    }
    int slot = 0, fill = NS - 1;
    for (int st = 0; st < count; ++st) {
        int g0 = st * GROUPS;
        uint32_t s[BATCHES][2];
#pragma unroll
        for (int b = 0; b < BATCHES; ++b) { s[b][0] = next[b][0]; s[b][1] = next[b][1]; }
        if constexpr (F == FP4) {
#pragma unroll
            for (int b = 0; b < BATCHES; ++b) {
                next[b][0] = scaled ? load_scales(sp0, (first + st + 1) * GROUPS + b * 4, r.groups) : 0;
                next[b][1] = scaled ? load_scales(sp1, (first + st + 1) * GROUPS + b * 4, r.groups) : 0;
            }
        }
        cp_async_wait<NS - 2>();
        __syncthreads();
        // Everybody has read the stage before: its slot takes the stage NS - 1 ahead.
        if (st + NS - 1 < count) {
            bool inside = ahead < r.row_bytes;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (inside && (int)(threadIdx.x >> 3) < r.live[i]) cp_async16(dst + fill * FEW_STAGE + i * 32 * FEW_ROW, src[i]);
                src[i] += 128;
            }
            ahead += 128;
        }
        cp_async_commit();
        uint32_t w = w0 + slot * FEW_STAGE, a[BATCHES][4][4];
        float d[BATCHES][4][4 * MT];
#pragma unroll
        for (int b = 0; b < BATCHES; ++b) {
#pragma unroll
            for (int i = 0; i < 4; i += F == FP4 ? 2 : 1) {
                uint32_t v[4];
                ldmatrix_x4(v, w + (b * 4 + i) * (F == FP4 ? 16 : 32));
                if constexpr (F == FP4) {
                    // Two groups: words of rows g and g + 8, then the same of the next group.
                    uint32_t(&a0)[4] = a[b][i], (&a1)[4] = a[b][i + 1];
                    a0[0] = even_e4m3(v[0]); a0[1] = even_e4m3(v[1]); a0[2] = odd_e4m3(v[0]); a0[3] = odd_e4m3(v[1]);
                    a1[0] = even_e4m3(v[2]); a1[1] = even_e4m3(v[3]); a1[2] = odd_e4m3(v[2]); a1[3] = odd_e4m3(v[3]);
                } else {
#pragma unroll
                    for (int j = 0; j < 4; ++j) a[b][i][j] = v[j];
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) wgmma_pin(a[b][i]);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i) wgmma_e4m3(d[b][i], a[b][i], desc + (b * 4 + i) * Tokens<F, TOK>::DESC_STEP);
            wgmma_commit();
        }
#pragma unroll
        for (int b = 0; b < BATCHES; ++b) {
            if (b + 1 < BATCHES) wgmma_wait<BATCHES - 1>();
            else wgmma_wait<0>();
            int at = g0 + b * 4;
            float4 f = make_float4(0, 0, 0, 0);
            if constexpr (F == FP8) f = *reinterpret_cast<const float4*>(swp + at);
#pragma unroll
            for (int t = 0; t < MT; ++t) {
                float4 x0 = *reinterpret_cast<const float4*>(x0p + 8 * t * x.gp + at), x1 = x0;
                if (TOK > 1) x1 = *reinterpret_cast<const float4*>(x1p + 8 * t * x.gp + at);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float f0 = F == FP8 ? pick4(f, i) : scale_byte(s[b][0], i), f1 = F == FP8 ? f0 : scale_byte(s[b][1], i);
                    float u0 = pick4(x0, i), u1 = pick4(x1, i);
                    acc[4 * t] += d[b][i][4 * t] * (f0 * u0);
                    acc[4 * t + 2] += d[b][i][4 * t + 2] * (f1 * u0);
                    if (TOK > 1) {
                        acc[4 * t + 1] += d[b][i][4 * t + 1] * (f0 * u1);
                        acc[4 * t + 3] += d[b][i][4 * t + 3] * (f1 * u1);
                    }
                }
            }
        }
        desc += GROUPS * Tokens<F, TOK>::DESC_STEP;
        slot = slot + 1 == NS ? 0 : slot + 1;
        fill = fill + 1 == NS ? 0 : fill + 1;
    }
}

// The sums as part[128][TOK + 1]; the caller synchronises.
template <int TOK>
__device__ __forceinline__ void few_store(const float (&acc)[TOK == 16 ? 8 : 4], float (*part)[TOK + 1]) {
    constexpr int MT = TOK == 16 ? 2 : 1;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
#pragma unroll
    for (int t = 0; t < MT; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int m = 8 * t + 2 * q + (i & 1);
            if (m < TOK) part[warp * 16 + g + (i >> 1) * 8][m] = acc[4 * t + i];
        }
}
