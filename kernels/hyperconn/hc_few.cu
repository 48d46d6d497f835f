// hc_step_few: hc_step of a few tokens in one launch, C = 4.
//
// Maths    as hc_step
// Layout   as hc_step; y [T, dim] bf16 and part [T, slices, 40] f32 are zero before the first use, and left zero
// Grid     (slices + 1 + norms, T), block 128. slices = ceil(dim/64): a block takes 64 columns of a token, each of its warps six rows of fn.
//          Of what these hand on, one block more makes the token's coefficients and norms = 1..=8 blocks the norm (1024 columns each are quick)
// Numerics as hc_step
// Checked  tests_cuda/check.cu, crates/hyperconn/tests
#include "sinkhorn.cuh"
#include "slice.cuh"
#include "sums.cuh"

// A part: the sums of hc_step's, and from NORMS on the sum of y^2 once for each block of the norm.
constexpr int PART = 40, NORMS = 32;

// What blocks hand on: the bits of a value inverted, in memory that was zero. Each value says itself that it is there, so that nothing is
// ordered and nobody counts: all ones is a NaN that no instruction here gives. Who waits zeroes what was its own. Blocks that wait come
// last in a token's row of the grid and are few: those they wait for find room.
__device__ __forceinline__ void hand(void* to, uint32_t bits) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(~bits) : "memory");
}
__device__ __forceinline__ uint32_t handed(const float* from) {
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ uint4 handed(const uint4* from) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}
// Whether both halves of each word are there.
__device__ __forceinline__ bool is_there(const uint4& v) {
    auto missing = [](uint32_t w) { return (w - 0x00010001u) & ~w & 0x80008000u; };
    return !(missing(v.x) | missing(v.y) | missing(v.z) | missing(v.w));
}
// A slice of a token: the new stream there, y, and the slice's part of the sums.
__device__ __forceinline__ void slice(const bf16* x, const bf16* residual, const float* post, const float* comb, const float* pre, const float* fn,
                                      bf16* stream, bf16* y, float* part, int slices, int norms, int dim, int ld_coef) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, d = blockIdx.x * 64 + 2 * lane, column = min(d, dim - 2);
    int64_t t = blockIdx.y;
    bool live = d < dim;
    float2 f[6][4];
    const float* from = fn + (int64_t)warp * 24 * dim + column;
#pragma unroll
    for (int r = 0; r < 6; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c, from += dim) f[r][c] = live ? __ldg(reinterpret_cast<const float2*>(from)) : make_float2(0, 0);
    const bf16* res = residual + t * 4 * dim + column;
    wait_for_previous();
    // All that the columns need is asked for at once, before anything is written that it might wait for.
    uint32_t old[4], added = 0;
    float s[4][2], po[4], cm[4][4], p[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) old[c] = *reinterpret_cast<const uint32_t*>(res + (int64_t)c * dim);
    if (x) {
        added = *reinterpret_cast<const uint32_t*>(x + t * dim + column);
        load4(post + t * ld_coef, po);
#pragma unroll
        for (int j = 0; j < 4; ++j) load4(comb + t * ld_coef + j * 4, cm[j]);
    }
    if (pre) load4(pre + t * ld_coef, p);
    // `stream` may be `residual`: all warps read before one writes.
    if (x && stream == residual) __syncthreads();
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        s[c][0] = live ? bf16_lo(old[c]) : 0.0f;
        s[c][1] = live ? bf16_hi(old[c]) : 0.0f;
    }
    if (x && live) {
        float n[4][2];
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float sum = first_term(cm[0][k], s[0][h]);
#pragma unroll
                for (int j = 1; j < 4; ++j) sum = next_term(sum, cm[j][k], s[j][h]);
                n[k][h] = next_term(sum, po[k], h ? bf16_hi(added) : bf16_lo(added));
            }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            uint32_t both = pack_bf16(n[k][0], n[k][1]);
            s[k][0] = bf16_lo(both);
            s[k][1] = bf16_hi(both);
            if (k == warp) *reinterpret_cast<uint32_t*>(stream + (t * 4 + k) * dim + d) = both;
        }
    }
    // The next kernel's weights would have kept what this one waited for.
    begin_next();
    float v[8], squares = 0.0f;
    if (warp == 0) {
#pragma unroll
        for (int c = 0; c < 4; ++c) squares += s[c][0] * s[c][0] + s[c][1] * s[c][1];
    }
    if (warp == 3 && pre) {
        float yv[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            yv[h] = first_term(p[0], s[0][h]);
#pragma unroll
            for (int c = 1; c < 4; ++c) yv[h] = next_term(yv[h], p[c], s[c][h]);
        }
        uint32_t both = pack_bf16(yv[0], yv[1]);
        if (live) hand(y + t * dim + d, both);
        squares = bf16_lo(both) * bf16_lo(both) + bf16_hi(both) * bf16_hi(both);
    }
#pragma unroll
    for (int r = 0; r < 6; ++r)
        v[r] = (f[r][0].x * s[0][0] + f[r][1].x * s[1][0]) + (f[r][2].x * s[2][0] + f[r][3].x * s[3][0]) +
               ((f[r][0].y * s[0][1] + f[r][1].y * s[1][1]) + (f[r][2].y * s[2][1] + f[r][3].y * s[3][1]));
    v[SS] = squares;
    v[7] = 0.0f;
    float mine = reduce(v);
    part += (t * slices + blockIdx.x) * PART;
    if (lane < 8) hand(part + warp * 8 + lane, __float_as_uint(mine));
    if (warp == 3) {
        mine = __shfl_sync(FULL, mine, SS);
        if (pre && lane < norms) hand(part + NORMS + lane, __float_as_uint(mine));
    }
}

// The sums over slices of what they handed on: warps take slices in turn, a lane per value. f64: the sums over dim are exact enough that
// nothing but their parts' own rounding shows.
__device__ __forceinline__ double gathered(float* part, int slices) {
    constexpr int BATCH = 20;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    double s = 0.0;
    part += lane;
    for (int i0 = warp; i0 < slices; i0 += 4 * BATCH) {
        uint32_t v[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) v[i] = i0 + i * 4 < slices ? 0u : ~0u;
        bool there;
        do {
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (v[i] == 0) v[i] = handed(part + (i0 + i * 4) * PART);
            there = true;
#pragma unroll
            for (int i = 0; i < BATCH; ++i) there &= v[i] != 0;
        } while (!there);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) s += (double)__uint_as_float(~v[i]);
    }
    return s;
}

// A token's coefficients.
__device__ __forceinline__ void coefficients(const float* scale, const float* base, float* coef, float* part, int slices, int dim, int iters, float hc_eps,
                                             float norm_eps) {
    __shared__ double wsum[4][32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int64_t t = blockIdx.y;
    MixScale scales(scale, base);
    double over_dim = 0.25 / dim, mix = 0.0;
    part += t * slices * PART;
    float c = 0.0f;
    // The warp that makes them does so twice, first of nothing while it would only wait: instructions that have not run for a while come
    // from memory, line by line, and that takes as long as they do.
#pragma unroll 1
    for (int real = warp > 0; real < 2; ++real) {
        if (real) {
            after_previous();
            wsum[warp][lane] = gathered(part, slices);
            __syncthreads();
            if (warp > 0) {
                for (int i = warp - 1; i < slices; i += 3) part[i * PART + lane] = 0.0f;
                return;
            }
            auto total = [&](int i) { return (wsum[0][i] + wsum[1][i]) + (wsum[2][i] + wsum[3][i]); };
            mix = total(place(min(lane, 23))) * rsqrt(fma(total(SS), over_dim, (double)norm_eps));
        }
        c = split_sinkhorn4(mix, scales, {real ? iters : min(iters, 6), hc_eps});
    }
    if (lane < 24) coef[t * 24 + lane] = c;
}

// A token's norm, of every `norms`th 1024 columns: eight a thread.
__device__ __forceinline__ void norm(const bf16* w, bf16* out, bf16* fake, uint8_t* codes, uint8_t* scales, bf16* y, float* part, int slices, int own,
                                     int norms, int dim, float norm_eps) {
    __shared__ double sums[4];
    int units = dim >> 3, tid = threadIdx.x, first = own * 128 + tid;
    int64_t t = blockIdx.y;
    const uint4* wv = reinterpret_cast<const uint4*>(w);
    uint4 *yv = reinterpret_cast<uint4*>(y) + t * units, g = first < units && w ? wv[first] : make_uint4(0, 0, 0, 0);
    double over_dim = 1.0 / dim, s = 0.0;
    after_previous();
    if (!w) return;
    for (int i = tid; i < slices; i += 128) {
        float* from = part + (t * slices + i) * PART + NORMS + own;
        uint32_t v;
        do v = handed(from);
        while (v == 0);
        s += (double)__uint_as_float(~v);
        *from = 0.0f;
    }
    s = warp_sum(s);
    if ((tid & 31) == 0) sums[tid >> 5] = s;
    __syncthreads();
    NormFactor r(rsqrt(fma((sums[0] + sums[1]) + (sums[2] + sums[3]), over_dim, (double)norm_eps)));
    for (int u0 = own * 128; u0 < units; u0 += norms * 128) {
        int u = u0 + tid;
        bool live = u < units;
        uint4 a = make_uint4(~0u, ~0u, ~0u, ~0u);
        if (live) {
            do a = handed(yv + u);
            while (!is_there(a));
            yv[u] = make_uint4(0, 0, 0, 0);
            if (u != first) g = wv[u];
        }
        float v[8], h[8];
        unpack8(make_uint4(~a.x, ~a.y, ~a.z, ~a.w), v);
        unpack8(g, h);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = r.normed(h[j], v[j]);
        emit8(v, t * units + u, live, out, fake, codes, scales);
    }
}

extern "C" __global__ void __launch_bounds__(128, 4) hc_step_few(const bf16* x, const bf16* residual, const float* post, const float* comb, const float* pre,
                                                                 const float* fn, const float* scale, const float* base, const bf16* w, bf16* stream,
                                                                 float* coef, bf16* out, bf16* fake, uint8_t* codes, uint8_t* scales, bf16* y,
                                                                 float* part, int dim, int ld_coef, int iters, float hc_eps, float norm_eps) {
    int slices = (dim + 63) >> 6, norms = (int)gridDim.x - slices - 1, own = (int)blockIdx.x - slices;
    if (own < 0) slice(x, residual, post, comb, w ? pre : nullptr, fn, stream, y, part, slices, norms, dim, ld_coef);
    else if (own == 0) coefficients(scale, base, coef, part, slices, dim, iters, hc_eps, norm_eps);
    else norm(pre ? w : nullptr, out, fake, codes, scales, y, part, slices, own - 1, norms, dim, norm_eps);
}
