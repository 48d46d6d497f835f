// Products of few tokens on Hopper: weight bytes stream through shared memory to fp8 tensor-core operands in registers.
//
// A CTA owns 128 rows of W (four segments of 32) and 288 threads: two warpgroups of 64 rows each, and one warp that copies W
// into a ring of stages, 128 bytes of each row at a time (256 fp4 or 128 fp8 columns). The copying warp stands apart because the
// consumers need one proxy fence for the tokens' operand, and a fence waits for its own thread's copies in flight.
// The tokens are the B operand: e4m3 codes, K-major. Each group of 32 columns is one instruction whose sum is then scaled in f32.
#pragma once
#include "quantise.cuh"
#include "weights.cuh"
#include "wgmma.cuh"

// 128 bytes of a row and one more 16-byte unit, so that eight rows start in eight different bank groups.
constexpr int FEW_ROW = 144, FEW_W = 128 * FEW_ROW, FEW_STAGE_FP4 = FEW_W + 128 * 8, FEW_STAGE_FP8 = FEW_W;

template <int F>
struct Few {
    static constexpr int GROUPS = F == FP4 ? 8 : 4;  // groups in a stage
    static constexpr int STAGE = F == FP4 ? FEW_STAGE_FP4 : FEW_STAGE_FP8;
};

// Rows 32*i .. of segment i lie row_bytes apart from w[i], their scales (fp4) `groups` bytes apart from s[i].
struct Segments {
    const uint8_t *w[4], *s[4];
    int live[4];       // rows that exist, 0..32
    int64_t row_bytes;
    int groups;        // of a whole row
};

__device__ __forceinline__ void cp_async8(uint32_t dst, const void* src) { asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(dst), "l"(src)); }

// Four e2m1 codes of even (odd) nibbles as e4m3 bytes: the magnitude moves to exponent bits 3,4 and mantissa bit 2 (value * 2^-6).
__device__ __forceinline__ uint32_t even_e4m3(uint32_t w) { return ((w << 2) & 0x1c1c1c1cu) | ((w << 4) & 0x80808080u); }
__device__ __forceinline__ uint32_t odd_e4m3(uint32_t w) { return ((w >> 2) & 0x1c1c1c1cu) | (w & 0x80808080u); }

// The copying warp: stages first .. first + count of K.
template <int F, int NS>
__device__ __forceinline__ void few_copy(const Segments& r, uint8_t* ring, uint32_t full, uint32_t empty, int first, int count) {
    constexpr int GROUPS = Few<F>::GROUPS, STAGE = Few<F>::STAGE;
    int lane = threadIdx.x & 31, c = lane & 7, r0 = lane >> 3;
    const uint8_t* p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = r.w[i] + r0 * r.row_bytes + c * 16;
    for (int st = 0; st < count; ++st) {
        int slot = st % NS, k = first + st;
        if (st >= NS) mbar_wait(empty + 8 * slot, (st / NS + 1) & 1);
        uint8_t* stage = ring + slot * STAGE;
        uint32_t d = smem_addr(stage) + r0 * FEW_ROW + c * 16;
        bool inside = k * 128 + c * 16 < r.row_bytes;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint8_t* src = p[i] + (int64_t)k * 128;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                if (inside && r0 + 4 * j < r.live[i]) cp_async16(d + (i * 32 + j * 4) * FEW_ROW, src);
                src += 4 * r.row_bytes;
            }
        }
        if (F == FP4) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint8_t* s = r.s[i] + (int64_t)lane * r.groups + k * GROUPS;
                uint32_t at = FEW_W + (i * 32 + lane) * GROUPS;
                if (lane >= r.live[i]) continue;
                if ((r.groups & 7) == 0) {
                    cp_async8(smem_addr(stage) + at, s);
                } else {
                    for (int b = 0; b < GROUPS; ++b) stage[at + b] = k * GROUPS + b < r.groups ? s[b] : 0;
                    __threadfence_block();
                }
            }
        }
        cp_async_arrive(full + 8 * slot);
    }
}

// The consumers' view. B operand: token-major inside a group, [group][half][TOK][16] bytes; with one token only its own rows are
// stored, 32 bytes a group, and the other seven rows an instruction reads are whatever follows: columns nobody looks at.
template <int F, int TOK>
struct Tokens {
    static constexpr int HALF = TOK == 1 ? 16 : TOK * 16;
    uint8_t* b;
    float* sx;   // [TOK][gp]
    int gp;      // groups, rounded up to whole stages
    __device__ uint64_t desc(int g) const { return desc_plain(smem_addr(b) + g * 2 * HALF, HALF, 128); }
    __device__ static size_t bytes(int gp) { return (size_t)gp * 2 * HALF + 128 + (size_t)gp * 4 * TOK; }
    __device__ Tokens(uint8_t* p, int gp) : b(p), sx(reinterpret_cast<float*>(p + (size_t)gp * 2 * HALF + 128)), gp(gp) {}
    // Fills groups first .. of up to `n` tokens; row_of(m) is token m's row of codes [.., K] and scales [.., K/32]. 256 threads call.
    template <typename RowOf>
    __device__ void load(const uint8_t* xc, const uint8_t* xs, int K, int first, int n, RowOf row_of) {
        int G = K >> 5;
        for (int i = threadIdx.x; i < gp * TOK; i += 256) {
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
        named_barrier(1, 256);
    }
};

__device__ __forceinline__ float pick4(const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
// Byte i of four e8m0 scales as f32 (byte 0 reads as 0, byte 255 as inf).
__device__ __forceinline__ float scale_byte(uint32_t w, int i) { return __uint_as_float((i < 3 ? w << (23 - 8 * i) : w >> 1) & 0x7f800000u); }

// acc += 64 rows x TOK tokens over `count` stages. sw (fp8): [2 or more 32-row tiles][gp] f32 scales of this warpgroup's rows.
// Lane 4g + q of warp w: rows 16w + g (acc[4t], acc[4t+1]: tokens 8t + 2q, +1) and + 8.
template <int F, int TOK, int NS>
__device__ __forceinline__ void few_multiply(const Tokens<F, TOK>& x, const uint8_t* ring, const float* sw, uint32_t full, uint32_t empty, int count,
                                             float (&acc)[TOK == 16 ? 8 : 4]) {
    constexpr int GROUPS = Few<F>::GROUPS, STAGE = Few<F>::STAGE, BATCHES = GROUPS / 4, MT = TOK == 16 ? 2 : 1;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    uint32_t w0 = smem_addr(ring) + (warp * 16 + (lane & 15)) * FEW_ROW + (lane >> 4) * 16;
    int tok = TOK == 1 ? 0 : 2 * q;
    for (int st = 0; st < count; ++st) {
        int slot = st % NS;
        mbar_wait(full + 8 * slot, st / NS & 1);
        uint32_t w = w0 + slot * STAGE, a[BATCHES][4][4];
        uint32_t s0[2], s1[2];
#pragma unroll
        for (int i = 0; i < BATCHES * 4; i += F == FP4 ? 2 : 1) {
            uint32_t v[4];
            ldmatrix_x4(v, w + i * (F == FP4 ? 16 : 32));
            if constexpr (F == FP4) {
                // Two groups: words of rows g and g + 8, then the same of the next group.
                uint32_t(&b0)[4] = a[i / 4][i % 4], (&b1)[4] = a[i / 4][i % 4 + 1];
                b0[0] = even_e4m3(v[0]); b0[1] = even_e4m3(v[1]); b0[2] = odd_e4m3(v[0]); b0[3] = odd_e4m3(v[1]);
                b1[0] = even_e4m3(v[2]); b1[1] = even_e4m3(v[3]); b1[2] = odd_e4m3(v[2]); b1[3] = odd_e4m3(v[3]);
            } else {
#pragma unroll
                for (int j = 0; j < 4; ++j) a[i / 4][i % 4][j] = v[j];
            }
        }
        if constexpr (F == FP4) {
            const uint8_t* sc = ring + slot * STAGE + FEW_W + (warp * 16 + g) * GROUPS;
            uint2 u = *reinterpret_cast<const uint2*>(sc), v = *reinterpret_cast<const uint2*>(sc + 8 * GROUPS);
            s0[0] = u.x; s0[1] = u.y; s1[0] = v.x; s1[1] = v.y;
        }
        // Everything of this stage is in registers.
        __syncwarp();
        if (lane == 0) mbar_arrive(empty + 8 * slot);
        float d[BATCHES][4][4 * MT];
#pragma unroll
        for (int b = 0; b < BATCHES; ++b) {
#pragma unroll
            for (int i = 0; i < 4; ++i) wgmma_pin(a[b][i]);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i) wgmma_e4m3(d[b][i], a[b][i], x.desc(st * GROUPS + b * 4 + i));
            wgmma_commit();
        }
#pragma unroll
        for (int b = 0; b < BATCHES; ++b) {
            if (b + 1 < BATCHES) wgmma_wait<BATCHES - 1>();
            else wgmma_wait<0>();
            int at = st * GROUPS + b * 4;
            float4 f = make_float4(0, 0, 0, 0);
            if constexpr (F == FP8) f = *reinterpret_cast<const float4*>(sw + (warp >> 1) * x.gp + at);
#pragma unroll
            for (int t = 0; t < MT; ++t) {
                float4 x0 = *reinterpret_cast<const float4*>(x.sx + (tok + 8 * t) * x.gp + at), x1 = x0;
                if (TOK > 1) x1 = *reinterpret_cast<const float4*>(x.sx + (tok + 8 * t + 1) * x.gp + at);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float f0 = F == FP8 ? pick4(f, i) : scale_byte(s0[b], i), f1 = F == FP8 ? f0 : scale_byte(s1[b], i);
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
    }
}

// Barriers of a ring, and a clean ring where rows or columns are missing (a stale NaN code would survive a product with 0).
template <int F, int NS>
__device__ __forceinline__ void few_start(uint8_t* ring, uint32_t full, uint32_t empty, bool clean) {
    if (clean)
        for (int i = threadIdx.x; i < NS * Few<F>::STAGE / 16; i += blockDim.x) reinterpret_cast<uint4*>(ring)[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < NS; ++i) { mbar_init(full + 8 * i, 32); mbar_init(empty + 8 * i, 8); }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
}
