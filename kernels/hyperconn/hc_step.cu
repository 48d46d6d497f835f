// hc_step: everything between two sublayers in one pass over the residual stream, C = 4:
// hc_post of the sublayer that ended, mixes of the new stream, hc_pre with the carried coefficients, RMSNorm, activation quantisation.
//
// Maths    s = bf16(post[k] * x + sum_j comb[j][k] * residual[j])           (x null: s = residual)
//          mix = (fn . flatten(s)) * rsqrt(mean(s^2) + eps) -> split_sinkhorn -> coef
//          y = bf16(sum_c pre[c] * s[c]);  out = bf16(w * y * rsqrt(mean(y^2) + eps));  then act_quant(out)
// Layout   x [T, dim], residual, stream [T, 4, dim] bf16 (stream may be residual); post [T, 4], comb [T, 4, 4], pre [T, 4] f32,
//          each with row stride ld_coef (24: views into a packed coef); fn [24, 4*dim] f32, scale [3], base [24] f32;
//          w [dim] bf16; coef [T, 24] f32: pre | post | comb; out, fake [T, dim] bf16, codes [T, dim], scales [T, dim/32] u8: each may be null (w null: only coef);
//          workspace: y [T, dim] bf16, part [T, slices, 32] f32, counter [ceil(T/per)] u32 (zero before the first use)
// Grid     hc_step: (slices, ceil(T/per)), block 256, slices = ceil(dim/128), per = tokens of a block. counter given: the
//          last block of a token group finishes it (few tokens); counter null: hc_finish follows, one block of 256 per token
// Numerics f32; sums over dim are taken per slice and then over slices in order: reproducible, whichever block is last
// Checked  tests_cuda/check.cu, crates/hyperconn/tests
#include "../common/quantise.cuh"
#include "sinkhorn.cuh"

// Sums 16 values over the warp at once: lane l returns the total of value l & 15. 16 shuffles instead of 80.
template <int O>
__device__ __forceinline__ void halve(float (&v)[16]) {
    bool up = threadIdx.x & O;
#pragma unroll
    for (int i = 0; i < O; ++i) {
        float send = up ? v[i] : v[i + O], keep = up ? v[i + O] : v[i];
        v[i] = keep + __shfl_xor_sync(FULL, send, O);
    }
    if constexpr (O > 1) halve<O / 2>(v);
}
__device__ __forceinline__ float reduce16(float (&v)[16]) {
    halve<8>(v);
    return v[0] + __shfl_xor_sync(FULL, v[0], 16);
}

// A part holds, for its slice of dim: dots of rows 0..11, sum of s^2, three unused, dots of rows 12..23, sum of y^2, three unused.
constexpr int SS = 12, YY = 28;

// Mixes to coefficients (first warp) and the norm of y (the other seven).
__device__ __forceinline__ void finish_token(int64_t t, const float* part, int slices, const bf16* y, const float* scale, const float* base, const bf16* w,
                                             float* coef, bf16* out, bf16* fake, uint8_t* codes, uint8_t* scales, int dim, int iters, float hc_eps,
                                             float norm_eps) {
    constexpr int PER = 3;
    __shared__ float total[32], wsum[8][32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, units = dim >> 3, tid = threadIdx.x - 32;
    const uint4 *yv = reinterpret_cast<const uint4*>(y) + t * units, *wv = reinterpret_cast<const uint4*>(w);
    bool norm = w && warp > 0;
    uint4 a[PER], g[PER];
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        int u = tid + i * 224;
        bool live = norm && u < units;
        a[i] = live ? __ldcg(yv + u) : make_uint4(0, 0, 0, 0);
        g[i] = live ? wv[u] : make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    // Warps take slices in turn, a lane per value: a fixed order, whichever block does this.
    float s = 0.0f;
#pragma unroll 5
    for (int i = warp; i < slices; i += 8) s += __ldcg(part + (t * slices + i) * 32 + lane);
    wsum[warp][lane] = s;
    __syncthreads();
    if (warp == 0) {
        s = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) s += wsum[i][lane];
        total[lane] = s;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        float m[24], pre[4], post[4], comb[16], r = rsqrtf(total[SS] / (4.0f * (float)dim) + norm_eps);
#pragma unroll
        for (int i = 0; i < 24; ++i) m[i] = total[i < 12 ? i : i + 4] * r;
        split_sinkhorn4(m, scale, base, {iters, hc_eps}, pre, post, comb);
        float* o = coef + t * 24;
#pragma unroll
        for (int i = 0; i < 4; ++i) { o[i] = pre[i]; o[4 + i] = post[i]; }
#pragma unroll
        for (int i = 0; i < 16; ++i) o[8 + i] = comb[i];
    }
    if (!norm) return;
    float r = rsqrtf(total[YY] / (float)dim + norm_eps);
    for (int u0 = 0; u0 < units; u0 += 224 * PER) {
#pragma unroll
        for (int i = 0; i < PER; ++i) {
            int u = u0 + tid + i * 224;
            if (u0 + i * 224 >= units) break;
            float v[8], h[8];
            unpack8(u0 == 0 ? a[i] : u < units ? __ldcg(yv + u) : make_uint4(0, 0, 0, 0), v);
            unpack8(u0 == 0 ? g[i] : u < units ? wv[u] : make_uint4(0, 0, 0, 0), h);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = round_bf16(h[j] * (v[j] * r));
            emit8(v, t * units + u, u < units, out, fake, codes, scales);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) hc_step(const bf16* x, const bf16* residual, const float* post, const float* comb, const float* pre,
                                                          const float* fn, const float* scale, const float* base, const bf16* w, bf16* stream, float* coef,
                                                          bf16* out, bf16* fake, uint8_t* codes, uint8_t* scales, bf16* y, float* part, uint32_t* counter,
                                                          int T, int dim, int per, int ld_coef, int iters, float hc_eps, float norm_eps) {
    __shared__ float wpart[2][8][16];
    // Two threads a column: both form the new stream there, each takes twelve of the 24 rows of fn.
    int half = threadIdx.x >> 7, d = blockIdx.x * 128 + (threadIdx.x & 127), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    bool live = d < dim;
    int t0 = blockIdx.y * per, t1 = min(t0 + per, T);
    float f[12][4];
#pragma unroll
    for (int r = 0; r < 12; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) f[r][c] = live ? __ldg(fn + ((int64_t)(half * 12 + r) * 4 + c) * dim + d) : 0.0f;
    for (int t = t0; t < t1; ++t) {
        float s[4] = {0, 0, 0, 0}, v[16];
        const bf16* res = residual + (int64_t)t * 4 * dim + d;
        if (live) {
#pragma unroll
            for (int c = 0; c < 4; ++c) s[c] = __bfloat162float(res[(int64_t)c * dim]);
        }
        // `stream` may be `residual`: both threads of a column read before either writes.
        if (x && stream == residual) __syncthreads();
        if (live && x) {
            float xv = __bfloat162float(x[(int64_t)t * dim + d]), n[4];
            const float *po = post + (int64_t)t * ld_coef, *cm = comb + (int64_t)t * ld_coef;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < 4; ++j) sum += cm[j * 4 + k] * s[j];
                n[k] = round_bf16(sum + po[k] * xv);
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                s[k] = n[k];
                if (half == 0) stream[((int64_t)t * 4 + k) * dim + d] = __float2bfloat16_rn(n[k]);
            }
        }
        float yv = 0.0f;
        if (pre) {
            const float* p = pre + (int64_t)t * ld_coef;
#pragma unroll
            for (int c = 0; c < 4; ++c) yv += p[c] * s[c];
            yv = round_bf16(yv);
            if (live && half) y[(int64_t)t * dim + d] = __float2bfloat16_rn(yv);
        }
#pragma unroll
        for (int r = 0; r < 12; ++r) v[r] = (f[r][0] * s[0] + f[r][1] * s[1]) + (f[r][2] * s[2] + f[r][3] * s[3]);
        v[SS] = half ? yv * yv : (s[0] * s[0] + s[1] * s[1]) + (s[2] * s[2] + s[3] * s[3]);
        v[13] = v[14] = v[15] = 0.0f;
        float mine = reduce16(v);
        float(&wp)[8][16] = wpart[t & 1];
        if (lane < 16) wp[warp][lane] = mine;
        __syncthreads();
        if (warp == 0) {
            int h = lane >> 4 << 2, i = lane & 15;
            part[((int64_t)t * gridDim.x + blockIdx.x) * 32 + lane] = (wp[h][i] + wp[h + 1][i]) + (wp[h + 2][i] + wp[h + 3][i]);
        }
    }
    if (!counter) return;
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        // One fence for the block: it covers what the barrier above made visible to this thread.
        __threadfence();
        last = atomicInc(counter + blockIdx.y, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int t = t0; t < t1; ++t) finish_token(t, part, gridDim.x, y, scale, base, w, coef, out, fake, codes, scales, dim, iters, hc_eps, norm_eps);
}

extern "C" __global__ void __launch_bounds__(256) hc_finish(const float* part, const bf16* y, const float* scale, const float* base, const bf16* w, float* coef,
                                                            bf16* out, bf16* fake, uint8_t* codes, uint8_t* scales, int slices, int dim, int iters,
                                                            float hc_eps, float norm_eps) {
    finish_token(blockIdx.x, part, slices, y, scale, base, w, coef, out, fake, codes, scales, dim, iters, hc_eps, norm_eps);
}
