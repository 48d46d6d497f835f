// Products of few tokens on Hopper: e4m3 weight bytes stream through shared memory and are widened to f16 tensor-core operands in
// registers.
//
// A CTA owns 128 rows of W, a warp 16 of them, which it streams through a ring of stages of its own with cp.async, 128 bytes of each row at
// a time: warps wait for nobody. (Bulk copies of rows this short are slower, measured.)
// The tokens are the B operand, kept as codes in the order in which lanes take them. Each group of 32 columns is two instructions on f16,
// in which codes and their products are exact, and whose sum is then scaled in f32. (fp8 instructions would take the codes as they are,
// but keep only about 14 bits of a sum.)
#pragma once
#include "quantise.cuh"
#include "weights.cuh"

// A stage of a warp's 16 rows.
constexpr int FEW_STAGE = 16 * 128;

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

// A warp's rows on their way: stages of 128 columns go round a ring, unit c of row r at c ^ (r & 7). What does not exist reads as zeros.
template <int NS>
struct RowStream {
    const uint8_t* src;
    uint32_t ring;
    int rows, left;  // rows that exist from this lane's first on; bytes from its unit to the rows' end
    int64_t row4;    // four rows further on
    // Row `row` of w [N, K] is the warp's first, `first` its first stage.
    __device__ __forceinline__ RowStream(uint8_t* smem, const uint8_t* w, int row, int N, int K, int first) {
        int lane = threadIdx.x & 31, r = lane >> 3, at = first * 128 + (lane & 7) * 16;
        ring = smem_addr(smem) + (threadIdx.x >> 5) * NS * FEW_STAGE;
        rows = N - row - r;
        left = K - at;
        row4 = 4 * (int64_t)K;
        src = w + (int64_t)(rows > 0 ? row + r : 0) * K + at;
    }
    // The next stage, into a slot.
    __device__ __forceinline__ void copy(int slot) {
        int lane = threadIdx.x & 31, r = lane >> 3, c = lane & 7;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            cp_async16_or_zeros(ring + slot * FEW_STAGE + (r + i * 4) * 128 + ((c ^ ((r + i * 4) & 7)) << 4), src + i * row4, left > 0 && rows > i * 4);
        src += 128;
        left -= 128;
    }
    __device__ __forceinline__ void start(int count) {
#pragma unroll
        for (int i = 0; i < NS - 1; ++i) {
            if (i < count) copy(i);
            cp_async_commit();
        }
    }
};

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

// Quantised tokens. B operand: [group][token][lane of four][8] codes.
// Rows of scales are padded to 4 above a multiple of 16: the lanes of a quad read four of every second row at once.
template <int TOK>
struct Tokens {
    // Stages of a ring: one token lets three blocks share a multiprocessor, and the copies of more would delay the codes of sixteen.
    static constexpr int TOKENS = TOK, STAGES = TOK == 8 ? 5 : 4;
    uint8_t* b;
    float* sx;  // [TOK][ld]
    int gp;     // groups, rounded up to whole stages
    int ld;
    __device__ Tokens(uint8_t* p, int gp) : b(p), sx(reinterpret_cast<float*>(p + (size_t)gp * 32 * TOK)), gp(gp), ld(TOK == 1 ? gp : gp + (4 - gp & 15)) {}
    // What lane 4g + q multiplies group i by, of tokens 8t ..: its own is token g; with one token, lanes of others have none.
    __device__ __forceinline__ void operand(int i, int t, int g, int q, uint32_t (&o)[4]) const {
        uint2 c = make_uint2(0, 0);
        if (TOK > 1 || g == 0) c = *reinterpret_cast<const uint2*>(b + (i * TOK + 8 * t + (TOK == 1 ? 0 : g)) * 32 + q * 8);
        widen_e4m3(c.x, o[0], o[1]);
        widen_e4m3(c.y, o[2], o[3]);
    }
    // Fills groups first .. for up to `n` tokens of codes xc [.., K] and scales xs [.., K/32]. All 256 threads call. A warp takes four groups,
    // a line of memory, of eight tokens; several loads are under way at once. They go through L1, which another block shares.
    __device__ __forceinline__ void load(const uint8_t* xc, const uint8_t* xs, int K, int first, int n) {
        constexpr int U = TOK == 16 ? 4 : 2, BLOCKS = TOK / 8;
        int G = K >> 5;
        auto token = [](int i) { return TOK == 1 ? 0 : (i & 7) + (i >> 5) % (BLOCKS ? BLOCKS : 1) * 8; };
        auto group = [](int i) { return TOK == 1 ? i : (i >> 5) / (BLOCKS ? BLOCKS : 1) * 4 + (i >> 3 & 3); };
        for (int i0 = threadIdx.x; i0 < gp * TOK; i0 += 256 * U) {
            uint4 a[U], c[U];
            uint32_t s[U];
#pragma unroll
            for (int u = 0; u < U; ++u) {
                int i = i0 + u * 256, m = token(i), gg = first + group(i);
                a[u] = c[u] = make_uint4(0, 0, 0, 0);
                s[u] = 0;
                if (i < gp * TOK && m < n && gg < G) {
                    const uint4* p = reinterpret_cast<const uint4*>(xc + (int64_t)m * K + gg * 32);
                    a[u] = p[0];
                    c[u] = p[1];
                    s[u] = xs[(int64_t)m * G + gg];
                }
            }
#pragma unroll
            for (int u = 0; u < U; ++u) {
                int i = i0 + u * 256, m = token(i), g = group(i);
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

// One token that is quantised here, by every block that takes its columns: a launch less. The codes and the layout of Tokens.
struct RawToken : Tokens<1> {
    using Tokens<1>::Tokens;
    // value(column) gives eight values from a column on, rounded to bf16. All 256 threads call; four lanes take a group.
    template <typename Value>
    __device__ __forceinline__ void load(int K, int first, Value value) {
        int G = K >> 5;
        for (int i0 = 0; i0 < gp * 4; i0 += 256) {
            int i = i0 + threadIdx.x, g = i >> 2, j = i & 3;
            bool there = i < gp * 4 && first + g < G;
            float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            if (there) value((first + g) * 32 + j * 8, v);
            uint32_t s = group_scale8(v), c[8];
            float inv = e8m0_inverse(s);
#pragma unroll
            for (int k = 0; k < 8; ++k) c[k] = fp8_code(v[k], inv);
            if (i >= gp * 4) continue;
            // Columns 8j .. 8j + 3 and the next four belong to two lanes, in their first or second half.
            uint32_t* at = reinterpret_cast<uint32_t*>(b + g * 32 + (j & 1) * 16 + (j >> 1) * 4);
            at[0] = c[0] | c[1] << 8 | c[2] << 16 | c[3] << 24;
            at[2] = c[4] | c[5] << 8 | c[6] << 16 | c[7] << 24;
            if (j == 0) sx[g] = there ? e8m0_to_f32(s) : 0.0f;
        }
    }
};

// Tokens that were not quantised, bf16. B operand: [group][token][lane of four][8] f16. A group is scaled by the power of two that brings its
// largest value into 2^14 ..: f16 then has every bf16 value exactly down to 2^-31 of the largest, and a sum in f32 does not tell the others from 0.
template <int TOK>
struct PlainTokens {
    static constexpr int TOKENS = TOK, STAGES = TOK == 1 ? 4 : 5;
    uint8_t* b;
    float* sx;  // [TOK][ld]
    int gp, ld;
    __device__ PlainTokens(uint8_t* p, int gp) : b(p), sx(reinterpret_cast<float*>(p + (size_t)gp * 64 * TOK)), gp(gp), ld(TOK == 1 ? gp : gp + (4 - gp & 15)) {}
    __device__ __forceinline__ void operand(int i, int t, int g, int q, uint32_t (&o)[4]) const {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (TOK > 1 || g == 0) v = *reinterpret_cast<const uint4*>(b + (i * TOK + 8 * t + (TOK == 1 ? 0 : g)) * 64 + q * 16);
        o[0] = v.x; o[1] = v.y; o[2] = v.z; o[3] = v.w;
    }
    // Fills groups first .. of up to `n` tokens, rows of K columns, ld_x apart. All 256 threads call. Four lanes take a group of a token,
    // eight of them two groups, a line of memory.
    __device__ __forceinline__ void load(const bf16* x, int64_t ld_x, int K, int first, int n) {
        constexpr int U = TOK == 1 ? 2 : 4;
        int G = K >> 5, items = gp * TOK * 4;
        for (int i0 = 0; i0 < items; i0 += 256 * U) {
            uint4 v[U];
#pragma unroll
            for (int u = 0; u < U; ++u) {
                int i = i0 + u * 256 + threadIdx.x, m = (i >> 3) % TOK, g = (i >> 3) / TOK * 2 + (i >> 2 & 1);
                v[u] = make_uint4(0, 0, 0, 0);
                if (i < items && m < n && first + g < G) v[u] = *reinterpret_cast<const uint4*>(x + m * ld_x + (first + g) * 32 + (i & 3) * 8);
            }
#pragma unroll
            for (int u = 0; u < U; ++u) {
                int i = i0 + u * 256 + threadIdx.x, j = i & 3, m = (i >> 3) % TOK, g = (i >> 3) / TOK * 2 + (i >> 2 & 1);
                if (i0 + u * 256 >= items) break;
                const uint32_t w[4] = {v[u].x, v[u].y, v[u].z, v[u].w};
                uint32_t most = 0;
#pragma unroll
                for (int k = 0; k < 4; ++k) most = max(most, max(w[k] & 0x7fffu, w[k] >> 16 & 0x7fffu));
                most = max(most, __shfl_xor_sync(FULL, most, 1));
                most = max(most, __shfl_xor_sync(FULL, most, 2));
                uint32_t e = max(most >> 7, 15u), h[4];
                float f = __uint_as_float((268u - e) << 23);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    __half2 p = __floats2half2_rn(bf16_lo(w[k]) * f, bf16_hi(w[k]) * f);
                    h[k] = *reinterpret_cast<uint32_t*>(&p);
                }
                if (i >= items) continue;
                // Columns 8j .. 8j + 3 and the next four belong to two lanes, in their first or second half.
                uint8_t* at = b + (g * TOK + m) * 64 + (j & 1) * 32 + (j >> 1) * 8;
                *reinterpret_cast<uint2*>(at) = make_uint2(h[0], h[1]);
                *reinterpret_cast<uint2*>(at + 16) = make_uint2(h[2], h[3]);
                if (j == 0) sx[m * ld + g] = m < n && first + g < G ? __uint_as_float((e - 14u) << 23) : 0.0f;
            }
        }
    }
};

__device__ __forceinline__ float pick4(const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
// Byte i of four e8m0 scales as f32 (byte 0 reads as 0, byte 255 as inf).
__device__ __forceinline__ float scale_byte(uint32_t w, int i) { return __uint_as_float((i < 3 ? w << (23 - 8 * i) : w >> 1) & 0x7f800000u); }

// acc += this warp's 16 rows x TOK tokens over `count` stages, the first NS - 1 of which are on their way. sw: [4][gp] f32 scales of the four
// tiles of rows. Lane 4g + q of warp w (of eight): rows 16w + g (acc[4t], acc[4t+1]: tokens 8t + 2q, +1) and + 8.
template <int NS, typename X>
__device__ __forceinline__ void few_multiply(const X& x, RowStream<NS>& rows, const float* sw, int count, float (&acc)[X::TOKENS == 16 ? 8 : 4]) {
    constexpr int TOK = X::TOKENS, MT = TOK == 16 ? 2 : 1;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, tile = warp >> 1;
    uint32_t from = rows.ring + (lane & 15) * 128, unit = lane >> 4, swizzle = lane & 7;
    int tok = TOK == 1 ? 0 : 2 * q;
    const float *x0p = x.sx + tok * x.ld, *x1p = x0p + (TOK > 1 ? x.ld : 0), *swp = sw + tile * x.gp;
    int slot = 0, fill = NS - 1;
    for (int st = 0; st < count; ++st) {
        cp_async_wait<NS - 2>();
        __syncwarp();
        // The warp has read the stage before: its slot takes the stage NS - 1 ahead.
        if (st + NS - 1 < count) rows.copy(fill);
        cp_async_commit();
        uint32_t w = from + slot * FEW_STAGE;
        int at = st * 4;
        float d[4][4 * MT] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // Rows g and g + 8 of the group's first 16 columns, then of the others.
            uint32_t v[4], a[8];
            ldmatrix_x4(v, w + (((i * 2 + unit) ^ swizzle) << 4));
            widen_e4m3(v[0], a[0], a[2]);
            widen_e4m3(v[1], a[1], a[3]);
            widen_e4m3(v[2], a[4], a[6]);
            widen_e4m3(v[3], a[5], a[7]);
#pragma unroll
            for (int t = 0; t < MT; ++t) {
                uint32_t b[4];
                x.operand(at + i, t, g, q, b);
                float(&o)[4] = reinterpret_cast<float(&)[4]>(d[i][4 * t]);
                mma_f16(o, a[0], a[1], a[2], a[3], b[0], b[1]);
                mma_f16(o, a[4], a[5], a[6], a[7], b[2], b[3]);
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
