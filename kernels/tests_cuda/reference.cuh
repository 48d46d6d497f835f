// References on the device, as plain as possible: one thread an output, f64 sums, no sharing.
#pragma once
#include "harness.cuh"

__device__ inline double ref_weight(int f, const uint8_t* w, const uint8_t* s, int64_t n, int64_t k, int64_t K) {
    if (f == 2) return (double)__bfloat162float(reinterpret_cast<const bf16*>(w)[n * K + k]);
    if (f == 0) return (double)e4m3_to_f32(w[n * K + k]) * (double)e8m0_to_f32(s[(n / 32) * (K / 32) + k / 32]);
    uint32_t c = w[n * (K / 2) + k / 2] >> (4 * (k & 1)) & 15;
    return (double)e2m1_to_f32(c) * (double)e8m0_to_f32(s[n * (K / 32) + k / 32]);
}
__global__ void ref_linear(int f, const bf16* x, const uint8_t* w, const uint8_t* s, float* y, int M, int N, int K, int G) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i >= (int64_t)M * N * G) return;
    int n = i % N, g = i / N % G;
    int64_t m = i / N / G, wb = f == 1 ? (int64_t)N * K / 2 : f == 2 ? (int64_t)N * K * 2 : (int64_t)N * K;
    int64_t sb = f == 0 ? (int64_t)((N + 31) / 32) * (K / 32) : (int64_t)N * (K / 32);
    double sum = 0;
    for (int k = 0; k < K; ++k) sum += (double)__bfloat162float(x[(m * G + g) * K + k]) * ref_weight(f, w + g * wb, s + g * sb, n, k, K);
    y[i] = (float)sum;
}
// h[p][i] of one (pair, inter row), before quantisation: bf16 values.
__global__ void ref_up(int f, const bf16* x, const int32_t* order, const int32_t* expert_at, const float* weights, const uint8_t* w1, const uint8_t* s1,
                       const uint8_t* w3, const uint8_t* s3, bf16* h, int P, int dim, int inter, int k, float limit) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i >= (int64_t)P * inter) return;
    int64_t p = i / inter, n = i % inter, e = expert_at[p];
    if (order[p] < 0) return;
    int64_t wb = f == 1 ? (int64_t)inter * dim / 2 : f == 2 ? (int64_t)inter * dim * 2 : (int64_t)inter * dim;
    int64_t sb = f == 0 ? (int64_t)((inter + 31) / 32) * (dim / 32) : (int64_t)inter * (dim / 32);
    const bf16* xr = x + (int64_t)(order[p] / k) * dim;
    double g = 0, u = 0;
    for (int d = 0; d < dim; ++d) {
        double v = (double)__bfloat162float(xr[d]);
        g += v * ref_weight(f, w1 + e * wb, s1 + e * sb, n, d, dim);
        u += v * ref_weight(f, w3 + e * wb, s3 + e * sb, n, d, dim);
    }
    float gf = round_bf16((float)g), uf = round_bf16((float)u);
    if (limit > 0) { uf = fminf(fmaxf(uf, -limit), limit); gf = fminf(gf, limit); }
    h[i] = __float2bfloat16_rn(weights[order[p]] * (gf / (1.0f + expf(-gf)) * uf));
}
__global__ void ref_down(int f, const bf16* h, const int32_t* order, const int32_t* expert_at, const uint8_t* w2, const uint8_t* s2, float* y, int P, int dim,
                         int inter) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i >= (int64_t)P * dim) return;
    int64_t p = i / dim, n = i % dim, e = expert_at[p];
    if (order[p] < 0) return;
    int64_t wb = f == 1 ? (int64_t)inter * dim / 2 : f == 2 ? (int64_t)inter * dim * 2 : (int64_t)inter * dim;
    int64_t sb = f == 0 ? (int64_t)((dim + 31) / 32) * (inter / 32) : (int64_t)dim * (inter / 32);
    double sum = 0;
    for (int k = 0; k < inter; ++k) sum += (double)__bfloat162float(h[p * inter + k]) * ref_weight(f, w2 + e * wb, s2 + e * sb, n, k, inter);
    y[i] = (float)sum;
}
// One block of 128 per (t, h).
__global__ void ref_attn(const bf16* q, const bf16* kv0, const int* i0, int n0, const bf16* kv1, const int* i1, int n1, const bf16* kv2, const int* i2, int n2,
                         const float* sink, float* out, int H, int D, float scale) {
    extern __shared__ double sc[];
    int h = blockIdx.x, t = blockIdx.y, n = n0 + n1 + n2;
    auto row = [&](int j) -> const bf16* {
        int r;
        if (j < n0) { r = i0[(int64_t)t * n0 + j]; return r < 0 ? nullptr : kv0 + (int64_t)r * D; }
        if (j < n0 + n1) { r = i1[(int64_t)t * n1 + j - n0]; return r < 0 ? nullptr : kv1 + (int64_t)r * D; }
        r = i2[(int64_t)t * n2 + j - n0 - n1];
        return r < 0 ? nullptr : kv2 + (int64_t)r * D;
    };
    const bf16* qr = q + ((int64_t)t * H + h) * D;
    for (int j = threadIdx.x; j < n; j += blockDim.x) {
        const bf16* k = row(j);
        double s = -INFINITY;
        if (k) {
            s = 0;
            for (int d = 0; d < D; ++d) s += (double)__bfloat162float(qr[d]) * (double)__bfloat162float(k[d]);
            s *= scale;
        }
        sc[j] = s;
    }
    __syncthreads();
    double m = -1e30;
    for (int j = 0; j < n; ++j) m = fmax(m, sc[j]);
    double l = exp((double)sink[h] - m);
    for (int j = 0; j < n; ++j) l += exp(sc[j] - m);
    for (int d = threadIdx.x; d < D; d += blockDim.x) {
        double o = 0;
        for (int j = 0; j < n; ++j) {
            const bf16* k = row(j);
            if (k) o += exp(sc[j] - m) * (double)__bfloat162float(k[d]);
        }
        out[((int64_t)t * H + h) * D + d] = (float)(o / l);
    }
}
// Score as f32 before the final rounding, or -inf; packed keys when codes is given.
__global__ void ref_scores(const bf16* q, const bf16* w, const bf16* keys, const uint8_t* codes, const uint8_t* scales, const int2* spans, float* out, int T, int H,
                           int D, int n) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i >= (int64_t)T * n) return;
    int64_t t = i / n, p = i % n, r = spans[t].x + p;
    if (p >= spans[t].y) { out[i] = -INFINITY; return; }
    float sum = 0;
    for (int h = 0; h < H; ++h) {
        double dot = 0;
        for (int d = 0; d < D; ++d)
            dot += (double)__bfloat162float(q[(t * H + h) * D + d]) * (codes ? ref_weight(1, codes, scales, r, d, D) : (double)__bfloat162float(keys[r * D + d]));
        sum += round_bf16(fmaxf(round_bf16((float)dot), 0.0f) * __bfloat162float(w[t * H + h]));
    }
    out[i] = round_bf16(sum);
}
