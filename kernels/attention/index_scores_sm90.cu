// index_scores_sm90: index_scores of packed keys for 32 heads of 128, one query a grid row, on Hopper.
//
// Maths, layout, roundings as index_scores.cu; hist [T, 2048] u32 or null: scores are also counted by their high 11 bits, as topk_part_hist
//          does
// Grid     (2 per SM, T), block 256: a warpgroup strides over tiles of 128 keys, a warp takes 32 of them; dynamic shared memory
//          8*4*2176 + 4096
// Numerics keys and queries meet as e4m3 codes. A group's 32 products of e2m1 values are multiples of 1/4 below 2^11 in all, which
//          the tensor core adds exactly; four group sums are then scaled and added in f32. Queries are e2m1 values times powers of
//          two (as index_topk's are): exact in e4m3 once a head's power of two is set aside. A query that is not, by chance or because
//          something else made it, is scored in bf16 instead, as index_scores_fp4 does
// Checked  tests_cuda/check.cu
#include "../common/few_sm90.cuh"
#include "../common/wgmma.cuh"
#include "index_scores.cuh"

constexpr int NS = 4, ROWS = 32, STAGE = ROWS * 64 + ROWS * 4;

// Four e2m1 codes of even (odd) nibbles as e4m3 bytes: the magnitude moves to exponent bits 3,4 and mantissa bit 2 (value * 2^-6).
__device__ __forceinline__ uint32_t even_e4m3(uint32_t w) { return ((w << 2) & 0x1c1c1c1cu) | ((w << 4) & 0x80808080u); }
__device__ __forceinline__ uint32_t odd_e4m3(uint32_t w) { return ((w >> 2) & 0x1c1c1c1cu) | (w & 0x80808080u); }
// The even (odd) ones of 32 codes, in the order in which even_e4m3 (odd_e4m3) leaves those of four words.
__device__ __forceinline__ uint4 even_codes(const uint4& a, const uint4& c) {
    return make_uint4(prmt(a.x, a.y, 0x6420), prmt(a.z, a.w, 0x6420), prmt(c.x, c.y, 0x6420), prmt(c.z, c.w, 0x6420));
}
__device__ __forceinline__ uint4 odd_codes(const uint4& a, const uint4& c) {
    return make_uint4(prmt(a.x, a.y, 0x7531), prmt(a.z, a.w, 0x7531), prmt(c.x, c.y, 0x7531), prmt(c.z, c.w, 0x7531));
}

// d (+)= a * b (64 x 32 x 32 e4m3), a in registers as in wgmma_e4m3; d[4j..] are heads 8j.. as in mma_bf16.
__device__ __forceinline__ void wgmma_n32_e4m3(float (&d)[16], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, 0, 1, 1;"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]), "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Whether a byte of w is 0 or 255, which as exponents of an f32 are not the powers of two that they are as e8m0.
__device__ __forceinline__ uint32_t zero_or_ones(uint32_t w) { return (((w - 0x01010101u) & ~w) | ((~w - 0x01010101u) & w)) & 0x80808080u; }

__device__ __forceinline__ void cp_async4(uint32_t dst, const void* src) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src));
}

// One head's group as B operand, [group][half][32 heads][16] bytes; whether it and the head's weight came out exact. Thread 4h + g.
__device__ __forceinline__ bool put_query(const bf16* q, const bf16* w, uint8_t* b, uint32_t* weight) {
    int h = threadIdx.x >> 2, g = threadIdx.x & 3;
    const uint4* p = reinterpret_cast<const uint4*>(q + h * 128 + g * 32);
    float v[32], most = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint4 x = p[i];
        float* o = v + i * 8;
        o[0] = bf16_lo(x.x); o[1] = bf16_hi(x.x); o[2] = bf16_lo(x.y); o[3] = bf16_hi(x.y);
        o[4] = bf16_lo(x.z); o[5] = bf16_hi(x.z); o[6] = bf16_lo(x.w); o[7] = bf16_hi(x.w);
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) most = fmaxf(most, fabsf(v[i]));
    // Multiples of an eighth of the group's leading power of two, up to 15 of them: then sums of products are exact.
    int eg = (int)(__float_as_uint(most) >> 23) - 127;
    float unit = __uint_as_float((uint32_t)(127 + 3 - max(-100, min(100, eg))) << 23);
    bool exact = true;
#pragma unroll
    for (int i = 0; i < 32; ++i) exact &= rintf(v[i] * unit) == v[i] * unit;
    most = fmaxf(most, __shfl_xor_sync(FULL, most, 1));
    most = fmaxf(most, __shfl_xor_sync(FULL, most, 2));
    // The largest becomes 128..255; within that range lie 14 powers of two of group scales.
    int e = (int)(__float_as_uint(most) >> 23) - 127;
    if (most == 0.0f) e = 0;
    exact &= e > -100 && e < 100;
    e = max(-100, min(100, e));
    float up = __uint_as_float((uint32_t)(127 + 7 - e) << 23);
    uint32_t codes[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        codes[i] = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float s = v[i * 4 + j] * up;
            uint32_t c = f32_to_e4m3(s);
            exact &= e4m3_to_f32(c) == s;
            codes[i] |= c << (8 * j);
        }
    }
    uint4 lo = make_uint4(codes[0], codes[1], codes[2], codes[3]), hi = make_uint4(codes[4], codes[5], codes[6], codes[7]);
    uint8_t* at = b + g * 1024 + h * 16;
    *reinterpret_cast<uint4*>(at) = even_codes(lo, hi);
    *reinterpret_cast<uint4*>(at + 512) = odd_codes(lo, hi);
    if (g == 0) {
        // Undoes `up` and the 2^-6 of even_e4m3: rounding does not see a power of two.
        float a = __bfloat162float(w[h]), s = a * __uint_as_float((uint32_t)(127 + e - 7 + 6) << 23);
        exact &= round_bf16(s) == s && (a == 0.0f || (fabsf(s) >= 0x1p-100f && fabsf(s) < 0x1p100f));
        reinterpret_cast<bf16*>(weight)[h] = __float2bfloat16_rn(s);
    }
    return exact;
}

extern "C" __global__ void __launch_bounds__(256, 2) index_scores_sm90(const bf16* q, const bf16* w, const uint8_t* codes, const uint8_t* scales,
                                                                       const int2* spans, uint16_t* out, uint32_t* hist, int T, int n, int64_t ld) {
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ uint32_t weight[16], counts[2048];
    // The exchange tells the compiler that a warp's number is the same in all its lanes: loop and descriptors stay uniform.
    int t = blockIdx.y, tid = threadIdx.x, warp = __shfl_sync(FULL, tid >> 5, 0), lane = tid & 31, g = lane >> 2, qd = lane & 3;
    int2 span = spans[t];
    int most = min(span.y, n), tiles = (most + 127) >> 7, step = gridDim.x * 2, tile = blockIdx.x * 2 + (warp >> 2);
    uint8_t* ring = smem + 4096 + warp * NS * STAGE;
    const uint8_t *kc = codes + (int64_t)span.x * 64, *ks = scales + (int64_t)span.x * 4;
    // Unit c of row r lies at c ^ (r >> 1 & 3): eight rows of one unit are in eight different bank groups.
    uint32_t dst = smem_addr(ring) + (lane >> 2) * 64 + (((lane & 3) ^ (lane >> 3 & 3)) << 4);
    // Rows past the visible ones may lie past the pool: row 0 instead, the result is not used.
    auto fetch = [&](int slot, int tile) {
        int pos = tile * 128 + (warp & 3) * 32;
        if (tile < tiles && most > 0) {
            uint32_t to = dst + slot * STAGE, to_scale = smem_addr(ring) + slot * STAGE + ROWS * 64 + lane * 4;
            if (pos + ROWS <= most) {
                const uint8_t* from = kc + (int64_t)pos * 64 + lane * 16;
#pragma unroll
                for (int i = 0; i < 4; ++i) cp_async16(to + i * 512, from + i * 512);
                cp_async4(to_scale, ks + (int64_t)(pos + lane) * 4);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    int p = pos + i * 8 + (lane >> 2);
                    cp_async16(to + i * 512, kc + (int64_t)(p < most ? p : 0) * 64 + (lane & 3) * 16);
                }
                cp_async4(to_scale, ks + (int64_t)(pos + lane < most ? pos + lane : 0) * 4);
            }
        }
        cp_async_commit();
    };
    if (hist)
        for (int i = tid; i < 2048; i += 256) counts[i] = 0;
    auto count = [&](uint16_t key) {
        if (hist && key) atomicAdd(&counts[key >> 5], 1);
    };
    auto add_counts = [&] {
        if (!hist) return;
        __syncthreads();
        for (int i = tid; i < 2048; i += 256)
            if (counts[i]) atomicAdd(&hist[(int64_t)t * 2048 + i], counts[i]);
    };
    // The query's threads copy keys after their fence, which would wait for what they have under way; the others at once.
    bool exact = true;
    if (tid < 128) {
        exact = put_query(q + (int64_t)t * 32 * 128, w + (int64_t)t * 32, smem, weight);
        fence_async_shared();
    }
    for (int i = 0; i < NS - 1; ++i) fetch(i, tile + i * step);
    if (!__syncthreads_and(exact)) {
        cp_async_wait<0>();
        __syncthreads();
        scores<FP4, false>(q, w, codes, scales, spans, nullptr, out, T, 32, 128, n, ld, 1, 0, 8);
        // Each warp counts what it wrote.
        __syncwarp();
        for (int c = (blockIdx.x * 8 + warp) * 32 + lane; c < most; c += gridDim.x * 256) count(out[(int64_t)t * ld + c]);
        add_counts();
        return;
    }
    for (int c = tiles * 128 + blockIdx.x * 256 + tid; c < n; c += gridDim.x * 256) out[(int64_t)t * ld + c] = 0;
    uint32_t ww[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) ww[j] = weight[j * 4 + qd];
    uint64_t desc = desc_plain(smem_addr(smem), 512, 128);
    constexpr uint32_t ONES = 0x3f803f80u;
    for (int slot = 0; tile < tiles; tile += step, slot = (slot + 1) & (NS - 1)) {
        cp_async_wait<NS - 2>();
        __syncwarp();
        fetch((slot + NS - 1) & (NS - 1), tile + (NS - 1) * step);
        const uint8_t* from = ring + slot * STAGE;
        float sum[2][4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int r = half * 16 + (lane & 15);
            uint32_t a[4][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint32_t v[4];
                ldmatrix_x4(v, smem_addr(from) + r * 64 + (((i * 2 + (lane >> 4)) ^ (r >> 1 & 3)) << 4));
                uint32_t(&a0)[4] = a[i * 2], (&a1)[4] = a[i * 2 + 1];
                a0[0] = even_e4m3(v[0]); a0[1] = even_e4m3(v[1]); a0[2] = odd_e4m3(v[0]); a0[3] = odd_e4m3(v[1]);
                a1[0] = even_e4m3(v[2]); a1[1] = even_e4m3(v[3]); a1[2] = odd_e4m3(v[2]); a1[3] = odd_e4m3(v[3]);
            }
            float d[4][16];
#pragma unroll
            for (int i = 0; i < 4; ++i) wgmma_pin(a[i]);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i) wgmma_n32_e4m3(d[i], a[i], desc + i * 64);
            wgmma_commit();
            const uint32_t* sc = reinterpret_cast<const uint32_t*>(from + ROWS * 64) + half * 16 + g;
            uint32_t s0 = sc[0], s1 = sc[8];
            bool unusual = __any_sync(FULL, zero_or_ones(s0) | zero_or_ones(s1));
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float f0 = scale_byte(s0, i), f1 = scale_byte(s1, i);
                if (unusual) { f0 = e8m0_to_f32(s0 >> (8 * i) & 255u); f1 = e8m0_to_f32(s1 >> (8 * i) & 255u); }
#pragma unroll
                for (int j = 0; j < 16; ++j) {
                    float f = j & 2 ? f1 : f0;
                    if (i == 0) d[0][j] *= f;
                    else d[0][j] += d[i][j] * f;
                }
            }
            // The sum over heads is a product with ones, for which the weighted scores already lie as its A operand.
#pragma unroll
            for (int j = 0; j < 4; j += 2)
                mma_bf16(sum[half], mul_bf16x2(relu_bf16x2(d[0][4 * j], d[0][4 * j + 1]), ww[j]), mul_bf16x2(relu_bf16x2(d[0][4 * j + 2], d[0][4 * j + 3]), ww[j]),
                         mul_bf16x2(relu_bf16x2(d[0][4 * j + 4], d[0][4 * j + 5]), ww[j + 1]), mul_bf16x2(relu_bf16x2(d[0][4 * j + 6], d[0][4 * j + 7]), ww[j + 1]), ONES, ONES);
        }
        // Lane qd of a quad stores one of the quad's four rows.
        int col = tile * 128 + (warp & 3) * 32 + (qd >> 1) * 16 + (qd & 1) * 8 + g;
        float mine = qd == 0 ? sum[0][0] : qd == 1 ? sum[0][2] : qd == 2 ? sum[1][0] : sum[1][2];
        uint16_t key = col < most ? sortable(round_bf16(mine)) : (uint16_t)0;
        if (col < n) out[(int64_t)t * ld + col] = key;
        count(key);
    }
    add_counts();
}
