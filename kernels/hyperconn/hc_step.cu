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
// Grid     (slices, ceil(T/per)), block 256, per = tokens of a block; slices: hc_step ceil(dim/128), hc_step_few ceil(dim/64), which
//          reads fn from twice as many blocks. counter given: the last block of a token group finishes it (few tokens); counter null:
//          hc_finish follows, one block of 128 per token
// Numerics stream and y with the CPU's bits; mixes and norm f32 in a slice of dim, f64 over slices in order and
//          from there on: reproducible, whichever block is last
// Checked  tests_cuda/check.cu, crates/hyperconn/tests
#include "../common/quantise.cuh"
#include "sinkhorn.cuh"
#include "sums.cuh"

// Sums N = 8 or 16 values over the warp at once: lane l returns the total of value l % N. 9 or 16 shuffles instead of 40 or 80.
template <int O, int N>
__device__ __forceinline__ void halve(float (&v)[N]) {
    bool up = threadIdx.x & O;
#pragma unroll
    for (int i = 0; i < O; ++i) {
        float send = up ? v[i] : v[i + O], keep = up ? v[i + O] : v[i];
        v[i] = keep + __shfl_xor_sync(FULL, send, O);
    }
    if constexpr (O > 1) halve<O / 2>(v);
}
template <int N>
__device__ __forceinline__ float reduce(float (&v)[N]) {
    halve<N / 2>(v);
    float s = v[0];
#pragma unroll
    for (int o = N; o < 32; o *= 2) s += __shfl_xor_sync(FULL, s, o);
    return s;
}

// A part holds, for its slice of dim, four times the dots of six rows of fn and two more places; in these: sum of s^2, sum of y^2.
constexpr int SS = 6, YY = 30;
__device__ __forceinline__ int place(int row) { return row / 6 * 8 + row % 6; }

// Adds one to a counter that wraps at `limit`, with what this block wrote before it and what others wrote before theirs ordered around it.
__device__ __forceinline__ uint32_t arrive(uint32_t* counter, uint32_t limit) {
    uint32_t old;
    asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(limit) : "memory");
    return old;
}

// Mixes to coefficients (first warp) and the norm of y (the others).
template <int WARPS>
__device__ __forceinline__ void finish_token(int64_t t, const float* part, int slices, const bf16* y, const float* scale, const float* base, const bf16* w,
                                             float* coef, bf16* out, bf16* fake, uint8_t* codes, uint8_t* scales, int dim, int iters, float hc_eps,
                                             float norm_eps) {
    constexpr int THREADS = WARPS * 32 - 32, PER = (640 + THREADS - 1) / THREADS;
    __shared__ double wsum[WARPS][32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, units = dim >> 3, tid = threadIdx.x - 32;
    const uint4 *yv = reinterpret_cast<const uint4*>(y) + t * units, *wv = reinterpret_cast<const uint4*>(w);
    bool norm = w && warp > 0;
    // The weight too where one block is alone; where many share it, it is near, and registers are blocks.
    constexpr bool AHEAD = WARPS == 8;
    uint4 a[PER], g[AHEAD ? PER : 1];
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        int u = tid + i * THREADS;
        bool live = norm && u < units;
        a[i] = live ? __ldcg(yv + u) : make_uint4(0, 0, 0, 0);
        if (AHEAD) g[i] = live ? wv[u] : make_uint4(0, 0, 0, 0);
    }
    // Warps take slices in turn, a lane per value: a fixed order, whichever block does this. f64: the sums over dim are exact enough
    // that nothing but their parts' own rounding shows.
    double s = 0.0;
#pragma unroll 5
    for (int i = warp; i < slices; i += WARPS) s += __ldcg(part + (t * slices + i) * 32 + lane);
    __syncthreads();  // whoever still reads the last token's sums
    wsum[warp][lane] = s;
    __syncthreads();
    if (warp == 0) {
        s = 0.0;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) s += wsum[i][lane];
        double r = norm_factor(__shfl_sync(FULL, s, SS), 4 * dim, norm_eps);
        float c = split_sinkhorn4(__shfl_sync(FULL, s, place(min(lane, 23))) * r, scale, base, {iters, hc_eps});
        if (lane < 24) coef[t * 24 + lane] = c;
    }
    if (!norm) return;
    s = 0.0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) s += wsum[i][YY];
    double r = norm_factor(s, dim, norm_eps);
    for (int u0 = 0; u0 < units; u0 += THREADS * PER) {
#pragma unroll
        for (int i = 0; i < PER; ++i) {
            int u = u0 + tid + i * THREADS;
            if (u0 + i * THREADS >= units) break;
            float v[8], h[8];
            unpack8(u0 == 0 ? a[i] : u < units ? __ldcg(yv + u) : make_uint4(0, 0, 0, 0), v);
            unpack8(AHEAD && u0 == 0 ? g[i] : u < units ? wv[u] : make_uint4(0, 0, 0, 0), h);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = normed(h[j], v[j], r);
            emit8(v, t * units + u, u < units, out, fake, codes, scales);
        }
    }
}

// PARTS threads a column: each forms the new stream there and takes 24 / PARTS of the rows of fn.
template <int PARTS>
__device__ __forceinline__ void step(const bf16* x, const bf16* residual, const float* post, const float* comb, const float* pre, const float* fn,
                                     const float* scale, const float* base, const bf16* w, bf16* stream, float* coef, bf16* out, bf16* fake, uint8_t* codes,
                                     uint8_t* scales, bf16* y, float* part, uint32_t* counter, int T, int dim, int per, int ld_coef, int iters, float hc_eps,
                                     float norm_eps) {
    constexpr int WIDTH = 256 / PARTS, ROWS = 24 / PARTS, VALUES = 32 / PARTS, WARPS = 8 / PARTS;  // WARPS: of one part
    __shared__ float wpart[2][8][VALUES];
    int own = threadIdx.x / WIDTH, d = blockIdx.x * WIDTH + threadIdx.x % WIDTH, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    bool live = d < dim;
    int t0 = blockIdx.y * per, t1 = min(t0 + per, T);
    float f[ROWS][4];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) f[r][c] = live ? __ldg(fn + ((int64_t)(own * ROWS + r) * 4 + c) * dim + d) : 0.0f;
    after_previous();
    for (int t = t0; t < t1; ++t) {
        float s[4] = {0, 0, 0, 0}, v[VALUES];
        const bf16* res = residual + (int64_t)t * 4 * dim + d;
        if (live) {
#pragma unroll
            for (int c = 0; c < 4; ++c) s[c] = __bfloat162float(res[(int64_t)c * dim]);
        }
        // `stream` may be `residual`: all threads of a column read before one writes.
        if (x && stream == residual) __syncthreads();
        if (live && x) {
            float xv = __bfloat162float(x[(int64_t)t * dim + d]), n[4];
            const float *po = post + (int64_t)t * ld_coef, *cm = comb + (int64_t)t * ld_coef;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                float sum = first_term(cm[k], s[0]);
#pragma unroll
                for (int j = 1; j < 4; ++j) sum = next_term(sum, cm[j * 4 + k], s[j]);
                n[k] = round_bf16(next_term(sum, po[k], xv));
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                s[k] = n[k];
                if (own == 0) stream[((int64_t)t * 4 + k) * dim + d] = __float2bfloat16_rn(n[k]);
            }
        }
        float yv = 0.0f;
        if (pre) {
            const float* p = pre + (int64_t)t * ld_coef;
            yv = first_term(p[0], s[0]);
#pragma unroll
            for (int c = 1; c < 4; ++c) yv = next_term(yv, p[c], s[c]);
            yv = round_bf16(yv);
            if (live && own == PARTS - 1) y[(int64_t)t * dim + d] = __float2bfloat16_rn(yv);
        }
#pragma unroll
        for (int i = 0; i < VALUES; ++i) v[i] = 0.0f;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) v[r / 6 * 8 + r % 6] = (f[r][0] * s[0] + f[r][1] * s[1]) + (f[r][2] * s[2] + f[r][3] * s[3]);
        if (own == 0) v[SS] = (s[0] * s[0] + s[1] * s[1]) + (s[2] * s[2] + s[3] * s[3]);
        if (own == PARTS - 1) v[YY % VALUES] = yv * yv;
        float mine = reduce(v);
        float(&wp)[8][VALUES] = wpart[t & 1];
        if (lane < VALUES) wp[warp][lane] = mine;
        __syncthreads();
        if (warp == 0) {
            int w0 = lane / VALUES * WARPS;
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; ++i) sum += wp[w0 + i][lane % VALUES];
            part[((int64_t)t * gridDim.x + blockIdx.x) * 32 + lane] = sum;
        }
    }
    if (!counter) return;
    __shared__ bool last;
    // The barrier in the loop came after everybody's stream and y; what remains, the parts, are the first warp's own.
    if (warp == 0) {
        __syncwarp();
        if (lane == 0) last = arrive(counter + blockIdx.y, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    for (int t = t0; t < t1; ++t)
        finish_token<8>(t, part, gridDim.x, y, scale, base, w, coef, out, fake, codes, scales, dim, iters, hc_eps, norm_eps);
}

extern "C" __global__ void __launch_bounds__(256) hc_step(const bf16* x, const bf16* residual, const float* post, const float* comb, const float* pre,
                                                          const float* fn, const float* scale, const float* base, const bf16* w, bf16* stream, float* coef,
                                                          bf16* out, bf16* fake, uint8_t* codes, uint8_t* scales, bf16* y, float* part, uint32_t* counter,
                                                          int T, int dim, int per, int ld_coef, int iters, float hc_eps, float norm_eps) {
    step<2>(x, residual, post, comb, pre, fn, scale, base, w, stream, coef, out, fake, codes, scales, y, part, counter, T, dim, per, ld_coef, iters, hc_eps, norm_eps);
}
extern "C" __global__ void __launch_bounds__(256) hc_step_few(const bf16* x, const bf16* residual, const float* post, const float* comb, const float* pre,
                                                              const float* fn, const float* scale, const float* base, const bf16* w, bf16* stream, float* coef,
                                                              bf16* out, bf16* fake, uint8_t* codes, uint8_t* scales, bf16* y, float* part, uint32_t* counter,
                                                              int T, int dim, int per, int ld_coef, int iters, float hc_eps, float norm_eps) {
    step<4>(x, residual, post, comb, pre, fn, scale, base, w, stream, coef, out, fake, codes, scales, y, part, counter, T, dim, per, ld_coef, iters, hc_eps, norm_eps);
}

extern "C" __global__ void __launch_bounds__(128, 6) hc_finish(const float* part, const bf16* y, const float* scale, const float* base, const bf16* w, float* coef,
                                                            bf16* out, bf16* fake, uint8_t* codes, uint8_t* scales, int slices, int dim, int iters,
                                                            float hc_eps, float norm_eps) {
    after_previous();
    finish_token<4>(blockIdx.x, part, slices, y, scale, base, w, coef, out, fake, codes, scales, dim, iters, hc_eps, norm_eps);
}
