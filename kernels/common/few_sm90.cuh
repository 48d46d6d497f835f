// Products of few tokens on Hopper: e4m3 weight bytes stream through shared memory and are widened to f16 tensor-core operands in
// registers.
//
// A CTA owns 128 rows of W (four segments of 32) and eight warps of 16 rows each. All threads copy W into a ring of stages, 128 bytes of
// each row at a time, with cp.async: bulk copies of rows this short are slower (measured).
// The tokens are the B operand, kept as codes in the order in which lanes take them. Each group of 32 columns is two instructions on f16,
// in which codes and their products are exact, and whose sum is then scaled in f32. (fp8 instructions would take the codes as they are,
// but keep only about 14 bits of a sum.)
#pragma once
#include "quantise.cuh"
#include "weights.cuh"

// 128 bytes of a row and one more 16-byte unit, so that eight rows start in eight different bank groups.
constexpr int FEW_ROW = 144, FEW_STAGE = 128 * FEW_ROW;

// Rows 32*i .. of the CTA start at w[i], row_bytes apart.
struct Segments {
    const uint8_t* w[4];
    int live[4];  // rows that exist, 0..32
    int64_t row_bytes;
};

// Codes as f16, exactly: all of e4m3 fits, and so do e2m1 values times 2^-14. Two halves a register.
// Four e4m3 codes: the first two, the last two.
__device__ __forceinline__ void widen_e4m3(uint32_t w, uint32_t& lo, uint32_t& hi) {
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b; }" : "=r"(lo), "=r"(hi) : "r"(w));
}
// Eight e2m1 codes as pairs (0, 2), (4, 6), (1, 3), (5, 7): the upper byte of an f16 is sign, exponent bits and mantissa bit.
__device__ __forceinline__ void widen_e2m1(uint32_t w, uint32_t (&o)[4]) {
    uint32_t even = ((w << 1) & 0x0e0e0e0eu) | ((w << 4) & 0x80808080u), odd = ((w >> 3) & 0x0e0e0e0eu) | (w & 0x80808080u);
    o[0] = prmt(even, 0, 0x1404);
    o[1] = prmt(even, 0, 0x3424);
    o[2] = prmt(odd, 0, 0x1404);
    o[3] = prmt(odd, 0, 0x3424);
}
constexpr float E2M1_UNDO = 0x1p14f;

// d += a * b, as mma_bf16, of f16 values.
__device__ __forceinline__ void mma_f16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

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

// A token's 32 codes of a group as its four lanes take them, eight bytes each: lane q of e2m1 rows has the even and the odd ones of codes
// 8q.., as widen_e2m1 pairs them; lane q of e4m3 rows codes 4q.. and 16 + 4q...
template <int F>
__device__ __forceinline__ void lane_codes(const uint4& a, const uint4& c, uint4 (&o)[2]) {
    if (F == FP4) {
        o[0] = make_uint4(prmt(a.x, a.y, 0x6420), prmt(a.x, a.y, 0x7531), prmt(a.z, a.w, 0x6420), prmt(a.z, a.w, 0x7531));
        o[1] = make_uint4(prmt(c.x, c.y, 0x6420), prmt(c.x, c.y, 0x7531), prmt(c.z, c.w, 0x6420), prmt(c.z, c.w, 0x7531));
    } else {
        o[0] = make_uint4(a.x, c.x, a.y, c.y);
        o[1] = make_uint4(a.z, c.z, a.w, c.w);
    }
}

// Four scales of one row from group g0 on, 0 past the end.
__device__ __forceinline__ uint32_t load_scales(const uint8_t* row, int g0, int groups) {
    if ((groups & 3) == 0) return g0 < groups ? __ldg(reinterpret_cast<const uint32_t*>(row + g0)) : 0u;
    uint32_t w = 0;
    for (int i = 0; i < 4; ++i)
        if (g0 + i < groups) w |= (uint32_t)row[g0 + i] << (8 * i);
    return w;
}

// The tokens. B operand: [group][token][lane of four][8] bytes.
// Rows of scales are padded by four: the lanes of a quad read two rows apart, and gp may be a multiple of 16.
template <int TOK>
struct Tokens {
    uint8_t* b;
    float* sx;  // [TOK][ld]
    int gp;     // groups, rounded up to whole stages
    int ld;
    __device__ Tokens(uint8_t* p, int gp) : b(p), sx(reinterpret_cast<float*>(p + (size_t)gp * 32 * TOK)), gp(gp), ld(TOK == 1 ? gp : gp + 4) {}
    // Fills groups first .. for up to `n` tokens; row_of(m) is token m's row of codes [.., K] and scales [.., K/32]. The first
    // warpgroup calls. A warp takes four groups, a line of memory, of eight tokens; several loads are under way at once. They go through
    // L1, which another block shares.
    template <typename RowOf>
    __device__ void load(const uint8_t* xc, const uint8_t* xs, int K, int first, int n, RowOf row_of) {
        constexpr int U = 5, BLOCKS = TOK / 8;
        int G = K >> 5;
        auto token = [](int i) { return TOK == 1 ? 0 : (i & 7) + (i >> 5) % (BLOCKS ? BLOCKS : 1) * 8; };
        auto group = [](int i) { return TOK == 1 ? i : (i >> 5) / (BLOCKS ? BLOCKS : 1) * 4 + (i >> 3 & 3); };
        for (int i0 = threadIdx.x; i0 < gp * TOK; i0 += 128 * U) {
            uint4 a[U], c[U];
            uint32_t s[U];
#pragma unroll
            for (int u = 0; u < U; ++u) {
                int i = i0 + u * 128, m = token(i), gg = first + group(i);
                a[u] = c[u] = make_uint4(0, 0, 0, 0);
                s[u] = 0;
                if (i < gp * TOK && m < n && gg < G) {
                    int64_t row = row_of(m);
                    const uint4* p = reinterpret_cast<const uint4*>(xc + row * K + gg * 32);
                    a[u] = p[0];
                    c[u] = p[1];
                    s[u] = xs[row * G + gg];
                }
            }
#pragma unroll
            for (int u = 0; u < U; ++u) {
                int i = i0 + u * 128, m = token(i), g = group(i);
                if (i >= gp * TOK) break;
                bool there = m < n && first + g < G;
                uint4 lanes[2];
                lane_codes<FP8>(a[u], c[u], lanes);
                uint4* at = reinterpret_cast<uint4*>(b + (g * TOK + m) * 32);
                at[0] = lanes[0];
                at[1] = lanes[1];
                sx[m * ld + g] = there ? e8m0_to_f32(s[u]) : 0.0f;
            }
        }
    }
};

__device__ __forceinline__ float pick4(const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
// Byte i of four e8m0 scales as f32 (byte 0 reads as 0, byte 255 as inf).
__device__ __forceinline__ float scale_byte(uint32_t w, int i) { return __uint_as_float((i < 3 ? w << (23 - 8 * i) : w >> 1) & 0x7f800000u); }

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

// acc += this warp's 16 rows x TOK tokens over stages first .. first + count. sw: [4][gp] f32 scales of the four segments.
// Lane 4g + q of warp w (of eight): rows 16w + g (acc[4t], acc[4t+1]: tokens 8t + 2q, +1) and + 8.
template <int TOK, int NS>
__device__ __forceinline__ void few_multiply(const Tokens<TOK>& x, const Segments& r, uint8_t* ring, const float* sw, int first, int count,
                                             float (&acc)[TOK == 16 ? 8 : 4]) {
    constexpr int MT = TOK == 16 ? 2 : 1;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, seg = warp >> 1;
    uint32_t w0 = smem_addr(ring) + (warp * 16 + (lane & 15)) * FEW_ROW + (lane >> 4) * 16;
    int tok = TOK == 1 ? 0 : 2 * q;
    // This lane's codes of token g (and g + 8); with one token, of none where g > 0.
    const uint8_t* codes = x.b + (TOK == 1 ? 0 : g * 32) + q * 8;
    const float *x0p = x.sx + tok * x.ld, *x1p = x0p + (TOK > 1 ? x.ld : 0), *swp = sw + seg * x.gp;
    // This thread's piece of each segment's rows, one stage further on with every copy.
    const uint8_t* src[4];
    uint32_t dst = smem_addr(ring) + (threadIdx.x >> 3) * FEW_ROW + (threadIdx.x & 7) * 16;
    int ahead = (first + NS - 1) * 128 + (threadIdx.x & 7) * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) src[i] = r.w[i] + (int64_t)(threadIdx.x >> 3) * r.row_bytes + ahead;
    int slot = 0, fill = NS - 1;
    for (int st = 0; st < count; ++st) {
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
        uint32_t w = w0 + slot * FEW_STAGE;
        int at = st * 4;
        float d[4][4 * MT] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // Rows g and g + 8 of the group's first 16 columns, then of the others.
            uint32_t v[4], a[8];
            ldmatrix_x4(v, w + i * 32);
            widen_e4m3(v[0], a[0], a[2]);
            widen_e4m3(v[1], a[1], a[3]);
            widen_e4m3(v[2], a[4], a[6]);
            widen_e4m3(v[3], a[5], a[7]);
#pragma unroll
            for (int t = 0; t < MT; ++t) {
                uint2 c = make_uint2(0, 0);
                if (TOK > 1 || g == 0) c = *reinterpret_cast<const uint2*>(codes + ((at + i) * TOK + 8 * t) * 32);
                uint32_t b0, b1, b2, b3;
                widen_e4m3(c.x, b0, b1);
                widen_e4m3(c.y, b2, b3);
                float(&o)[4] = reinterpret_cast<float(&)[4]>(d[i][4 * t]);
                mma_f16(o, a[0], a[1], a[2], a[3], b0, b1);
                mma_f16(o, a[4], a[5], a[6], a[7], b2, b3);
            }
        }
        float4 f = *reinterpret_cast<const float4*>(swp + at);
#pragma unroll
        for (int t = 0; t < MT; ++t) {
            float4 x0 = *reinterpret_cast<const float4*>(x0p + 8 * t * x.ld + at), x1 = x0;
            if (TOK > 1) x1 = *reinterpret_cast<const float4*>(x1p + 8 * t * x.ld + at);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float f0 = pick4(f, i), u0 = pick4(x0, i), u1 = pick4(x1, i);
                acc[4 * t] += d[i][4 * t] * (f0 * u0);
                acc[4 * t + 2] += d[i][4 * t + 2] * (f0 * u0);
                if (TOK > 1) {
                    acc[4 * t + 1] += d[i][4 * t + 1] * (f0 * u1);
                    acc[4 * t + 3] += d[i][4 * t + 3] * (f0 * u1);
                }
            }
        }
        slot = slot + 1 == NS ? 0 : slot + 1;
        fill = fill + 1 == NS ? 0 : fill + 1;
    }
}
