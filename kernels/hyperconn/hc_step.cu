// hc_step: everything between two sublayers in one pass over the residual stream, C = 4:
// hc_post of the sublayer that ended, mixes of the new stream, hc_pre with the carried coefficients, RMSNorm, activation quantisation.
//
// Maths    s = bf16(post[k] * x + sum_j comb[j][k] * residual[j])           (x null: s = residual)
//          mix = (fn . flatten(s)) * rsqrt(mean(s^2) + eps) -> split_sinkhorn -> coef
//          y = bf16(sum_c pre[c] * s[c]);  out = bf16(w * y * rsqrt(mean(y^2) + eps));  then act_quant(out)
// Layout   x [T, dim], residual, stream [T, 4, dim] bf16 (stream may be residual); post [T, 4], comb [T, 4, 4], pre [T, 4] f32,
//          each with row stride ld_coef (24: views into a packed coef); fn [24, 4*dim] f32, scale [3], base [24] f32;
//          w [dim] bf16; coef [T, 24] f32: pre | post | comb; out, fake [T, dim] bf16, codes [T, dim], scales [T, dim/32] u8: each may be null (w null: only coef);
//          workspace: y [T, dim] bf16, part [T, slices, 32] f32
// Grid     (slices, ceil(T/per)), block 256, per = tokens of a block, slices = ceil(dim/128); hc_finish follows, one block of 128 per token
// Numerics stream and y with the CPU's bits; mixes and norm f32 in a slice of dim, f64 over slices in order and from there on
//          (coefficients: sinkhorn.cuh)
// Checked  tests_cuda/check.cu, crates/hyperconn/tests
#include "sinkhorn.cuh"
#include "slice.cuh"
#include "sums.cuh"

// A thread takes a column, forms the new stream there, and half of the rows of fn: two threads a column.
extern "C" __global__ void __launch_bounds__(256, 3) hc_step(const bf16* x, const bf16* residual, const float* post, const float* comb, const float* pre,
                                                          const float* fn, bf16* stream, bf16* y, float* part, int T, int dim, int per, int ld_coef) {
    __shared__ float wpart[2][8][16];
    int own = threadIdx.x >> 7, d = blockIdx.x * 128 + (threadIdx.x & 127), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    bool live = d < dim;
    int t0 = blockIdx.y * per, t1 = min(t0 + per, T);
    float f[12][4];
    const float* from = fn + (int64_t)own * 48 * dim + d;
#pragma unroll
    for (int r = 0; r < 12; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c, from += dim) f[r][c] = live ? __ldg(from) : 0.0f;
    after_previous();
    for (int t = t0; t < t1; ++t) {
        float s[4] = {0, 0, 0, 0}, v[16], p[4];
        const bf16* res = residual + (int64_t)t * 4 * dim + d;
        if (live) {
#pragma unroll
            for (int c = 0; c < 4; ++c) s[c] = __bfloat162float(res[(int64_t)c * dim]);
        }
        if (pre) load4(pre + (int64_t)t * ld_coef, p);  // before anything is written, which it might wait for
        // `stream` may be `residual`: all threads of a column read before one writes.
        if (x && stream == residual) __syncthreads();
        if (live && x) {
            float xv = __bfloat162float(x[(int64_t)t * dim + d]), n[4], po[4], cm[4][4];
            load4(post + (int64_t)t * ld_coef, po);
#pragma unroll
            for (int j = 0; j < 4; ++j) load4(comb + (int64_t)t * ld_coef + j * 4, cm[j]);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                float sum = first_term(cm[0][k], s[0]);
#pragma unroll
                for (int j = 1; j < 4; ++j) sum = next_term(sum, cm[j][k], s[j]);
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
            yv = first_term(p[0], s[0]);
#pragma unroll
            for (int c = 1; c < 4; ++c) yv = next_term(yv, p[c], s[c]);
            yv = round_bf16(yv);
            if (live && own == 1) y[(int64_t)t * dim + d] = __float2bfloat16_rn(yv);
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) v[i] = 0.0f;
#pragma unroll
        for (int r = 0; r < 12; ++r) v[place(r)] = (f[r][0] * s[0] + f[r][1] * s[1]) + (f[r][2] * s[2] + f[r][3] * s[3]);
        if (own == 0) v[SS] = (s[0] * s[0] + s[1] * s[1]) + (s[2] * s[2] + s[3] * s[3]);
        if (own == 1) v[YY - 16] = yv * yv;
        float mine = reduce(v);
        float(&wp)[8][16] = wpart[t & 1];
        if (lane < 16) wp[warp][lane] = mine;
        __syncthreads();
        if (warp == 0) {
            int w0 = lane / 16 * 4, i = lane & 15;
            part[((int64_t)t * gridDim.x + blockIdx.x) * 32 + lane] = (wp[w0][i] + wp[w0 + 1][i]) + (wp[w0 + 2][i] + wp[w0 + 3][i]);
        }
    }
}

// The first warp makes a token's coefficients from its mixes, the others the norm of y.
extern "C" __global__ void __launch_bounds__(128, 6) hc_finish(const float* part, const bf16* y, const float* scale, const float* base, const bf16* w, float* coef,
                                                            bf16* out, bf16* fake, uint8_t* codes, uint8_t* scales, int slices, int dim, int iters,
                                                            float hc_eps, float norm_eps) {
    constexpr int THREADS = 96, PER = (640 + THREADS - 1) / THREADS;
    __shared__ double wsum[4][32];
    after_previous();
    int64_t t = blockIdx.x;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, units = dim >> 3, tid = threadIdx.x - 32;
    const uint4 *yv = reinterpret_cast<const uint4*>(y) + t * units, *wv = reinterpret_cast<const uint4*>(w);
    bool norm = w && warp > 0;
    uint4 a[PER];
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        int u = tid + i * THREADS;
        a[i] = norm && u < units ? __ldcg(yv + u) : make_uint4(0, 0, 0, 0);
    }
    // Warps take slices in turn, a lane per value. f64: the sums over dim are exact enough that nothing but their parts' own rounding shows.
    double s = 0.0;
#pragma unroll 5
    for (int i = warp; i < slices; i += 4) s += __ldcg(part + (t * slices + i) * 32 + lane);
    wsum[warp][lane] = s;
    __syncthreads();
    auto total = [&](int i) { return (wsum[0][i] + wsum[1][i]) + (wsum[2][i] + wsum[3][i]); };
    if (warp == 0) {
        double r = norm_factor(total(SS), 4 * dim, norm_eps);
        float c = split_sinkhorn4(total(place(min(lane, 23))) * r, MixScale(scale, base), {iters, hc_eps});
        if (lane < 24) coef[t * 24 + lane] = c;
        return;
    }
    if (!norm) return;
    NormFactor r(norm_factor(total(YY), dim, norm_eps));
    for (int u0 = 0; u0 < units; u0 += THREADS * PER) {
#pragma unroll
        for (int i = 0; i < PER; ++i) {
            int u = u0 + tid + i * THREADS;
            if (u0 + i * THREADS >= units) break;
            float v[8], h[8];
            unpack8(u0 == 0 ? a[i] : u < units ? __ldcg(yv + u) : make_uint4(0, 0, 0, 0), v);
            unpack8(u < units ? wv[u] : make_uint4(0, 0, 0, 0), h);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = r.normed(h[j], v[j]);
            emit8(v, t * units + u, u < units, out, fake, codes, scales);
        }
    }
}
