// engram_gate: the looked-up value added to each copy of the stream, as far as its key matches that copy.
//
// Maths    dot = sum(h * wq*wk * key) * rsqrt(mean h^2 + eps) * rsqrt(mean key^2 + eps) * dim^-0.5
//          gate = sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot)), 0 where masked; out = bf16(h + gate * value)
// Layout   stream, out [T, C, dim] bf16 (may be the same); kv [T, (C+1)*dim] bf16: C keys, then the value all copies share;
//          wq, wk [C, dim] bf16; mask [T] u8 or null, 1 = pass through
// Grid     (C, T), block 256; dim a multiple of 8
// Numerics f32 inside, one rounding
// Checked  tests_cuda/check.cu, crates/engram/tests
#include "../common/quantise.cuh"

extern "C" __global__ void __launch_bounds__(256) engram_gate(const bf16* stream, const bf16* kv, const bf16* wq, const bf16* wk, const uint8_t* mask, bf16* out,
                                                              int dim, float eps, float scale) {
    __shared__ float scratch[32];
    int64_t t = blockIdx.y, c = blockIdx.x, C = gridDim.x;
    int units = dim >> 3;
    const uint4 *h = reinterpret_cast<const uint4*>(stream) + (t * C + c) * units, *key = reinterpret_cast<const uint4*>(kv) + (t * (C + 1) + c) * units;
    const uint4 *value = reinterpret_cast<const uint4*>(kv) + (t * (C + 1) + C) * units;
    const uint4 *q = reinterpret_cast<const uint4*>(wq) + c * units, *k = reinterpret_cast<const uint4*>(wk) + c * units;
    float dot = 0.0f, hh = 0.0f, kk = 0.0f;
    for (int u = threadIdx.x; u < units; u += blockDim.x) {
        float a[8], b[8], x[8], y[8];
        unpack8(h[u], a); unpack8(key[u], b); unpack8(q[u], x); unpack8(k[u], y);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            dot += a[i] * (x[i] * y[i]) * b[i];
            hh += a[i] * a[i];
            kk += b[i] * b[i];
        }
    }
    dot = block_sum(dot, scratch);
    hh = block_sum(hh, scratch);
    kk = block_sum(kk, scratch);
    dot = dot * (rsqrtf(hh / (float)dim + eps) * rsqrtf(kk / (float)dim + eps)) * scale;
    float gate = 1.0f / (1.0f + expf(-copysignf(sqrtf(fmaxf(fabsf(dot), 1e-6f)), dot)));
    if (mask && mask[t]) gate = 0.0f;
    uint4* o = reinterpret_cast<uint4*>(out) + (t * C + c) * units;
    for (int u = threadIdx.x; u < units; u += blockDim.x) {
        float a[8], v[8];
        unpack8(h[u], a); unpack8(value[u], v);
#pragma unroll
        for (int i = 0; i < 8; ++i) a[i] += gate * v[i];
        o[u] = pack8(a);
    }
}
