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
// Grid     hc_step: (slices, ceil(T/per)), block 128, slices = ceil(dim/128), per = tokens of a block. counter given: the
//          last block of a token group finishes it (few tokens); counter null: hc_finish follows, one block of 256 per token
// Numerics f32; sums over dim are taken per slice and then over slices in order: reproducible, whichever block is last
// Checked  tests_cuda/check.cu, crates/hyperconn/tests
#include "../common/quantise.cuh"
#include "sinkhorn.cuh"

// Sums 32 values over the warp at once: lane l returns the total of value l. 31 shuffles instead of 160.
template <int O>
__device__ __forceinline__ void halve(float (&v)[32]) {
    bool up = threadIdx.x & O;
#pragma unroll
    for (int i = 0; i < O; ++i) {
        float send = up ? v[i] : v[i + O], keep = up ? v[i + O] : v[i];
        v[i] = keep + __shfl_xor_sync(FULL, send, O);
    }
    if constexpr (O > 1) halve<O / 2>(v);
}
__device__ __forceinline__ float reduce32(float (&v)[32]) {
    halve<16>(v);
    return v[0];
}

// Mixes to coefficients (first warp) and the norm of y (the other warps, or all of them for long rows).
__device__ __forceinline__ void finish_token(int64_t t, const float* part, int slices, const bf16* y, const float* scale, const float* base, const bf16* w,
                                             float* coef, bf16* out, bf16* fake, uint8_t* codes, uint8_t* scales, int dim, int iters, float hc_eps, float norm_eps) {
    __shared__ float total[32], wsum[32][33];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    __syncthreads();
    {
        // Warps take slices in turn; lane = value. Fixed order: within a warp ascending, then over warps.
        float s = 0.0f;
        for (int i = warp; i < slices; i += warps) s += __ldcg(part + (t * slices + i) * 32 + lane);
        wsum[warp][lane] = s;
        __syncthreads();
        if (warp == 0) {
            s = 0.0f;
            for (int i = 0; i < warps; ++i) s += wsum[i][lane];
            total[lane] = s;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        float m[24], pre[4], post[4], comb[16], r = rsqrtf(total[24] / (4.0f * (float)dim) + norm_eps);
#pragma unroll
        for (int i = 0; i < 24; ++i) m[i] = total[i] * r;
        split_sinkhorn4(m, scale, base, {iters, hc_eps}, pre, post, comb);
        float* o = coef + t * 24;
#pragma unroll
        for (int i = 0; i < 4; ++i) { o[i] = pre[i]; o[4 + i] = post[i]; }
#pragma unroll
        for (int i = 0; i < 16; ++i) o[8 + i] = comb[i];
    }
    if (!w || warp == 0) return;
    float r = rsqrtf(total[25] / (float)dim + norm_eps);
    int units = dim >> 3, tid = threadIdx.x - 32, threads = blockDim.x - 32;
    for (int u0 = 0; u0 < units; u0 += threads) {
        int u = u0 + tid;
        float v[8] = {0, 0, 0, 0, 0, 0, 0, 0}, g[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (u < units) {
            unpack8(__ldcg(reinterpret_cast<const uint4*>(y) + t * units + u), v);
            unpack8(reinterpret_cast<const uint4*>(w)[u], g);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = round_bf16(g[i] * (v[i] * r));
        emit8(v, t * units + u, u < units, out, fake, codes, scales);
    }
}

extern "C" __global__ void __launch_bounds__(128) hc_step(const bf16* x, const bf16* residual, const float* post, const float* comb, const float* pre,
                                                          const float* fn, const float* scale, const float* base, const bf16* w, bf16* stream, float* coef,
                                                          bf16* out, bf16* fake, uint8_t* codes, uint8_t* scales, bf16* y, float* part, uint32_t* counter, int T, int dim, int per,
                                                          int ld_coef, int iters, float hc_eps, float norm_eps) {
    __shared__ float wpart[2][4][32];
    int d = blockIdx.x * 128 + threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    bool live = d < dim;
    int t0 = blockIdx.y * per, t1 = min(t0 + per, T);
    float f[24][4];
#pragma unroll
    for (int r = 0; r < 24; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) f[r][c] = live ? __ldg(fn + ((int64_t)r * 4 + c) * dim + d) : 0.0f;
    for (int t = t0; t < t1; ++t) {
        float s[4] = {0, 0, 0, 0}, v[32];
        const bf16* res = residual + (int64_t)t * 4 * dim + d;
        if (live) {
#pragma unroll
            for (int c = 0; c < 4; ++c) s[c] = __bfloat162float(res[(int64_t)c * dim]);
            if (x) {
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
                    stream[((int64_t)t * 4 + k) * dim + d] = __float2bfloat16_rn(n[k]);
                }
            }
        }
        float yv = 0.0f;
        if (pre) {
            const float* p = pre + (int64_t)t * ld_coef;
#pragma unroll
            for (int c = 0; c < 4; ++c) yv += p[c] * s[c];
            yv = round_bf16(yv);
            if (live) y[(int64_t)t * dim + d] = __float2bfloat16_rn(yv);
        }
#pragma unroll
        for (int r = 0; r < 24; ++r) v[r] = (f[r][0] * s[0] + f[r][1] * s[1]) + (f[r][2] * s[2] + f[r][3] * s[3]);
        v[24] = (s[0] * s[0] + s[1] * s[1]) + (s[2] * s[2] + s[3] * s[3]);
        v[25] = yv * yv;
#pragma unroll
        for (int i = 26; i < 32; ++i) v[i] = 0.0f;
        float mine = reduce32(v);
        float(&wp)[4][32] = wpart[t & 1];
        wp[warp][lane] = mine;
        __syncthreads();
        if (warp == 0) part[((int64_t)t * gridDim.x + blockIdx.x) * 32 + lane] = (wp[0][lane] + wp[1][lane]) + (wp[2][lane] + wp[3][lane]);
    }
    if (!counter) return;
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(counter + blockIdx.y, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int t = t0; t < t1; ++t) finish_token(t, part, gridDim.x, y, scale, base, w, coef, out, fake, codes, scales, dim, iters, hc_eps, norm_eps);
}

extern "C" __global__ void __launch_bounds__(256) hc_finish(const float* part, const bf16* y, const float* scale, const float* base, const bf16* w, float* coef,
                                                            bf16* out, bf16* fake, uint8_t* codes, uint8_t* scales, int slices, int dim, int iters, float hc_eps, float norm_eps) {
    finish_token(blockIdx.x, part, slices, y, scale, base, w, coef, out, fake, codes, scales, dim, iters, hc_eps, norm_eps);
}
