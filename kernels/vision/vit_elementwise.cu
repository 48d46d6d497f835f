// vit_elementwise: the tower's activations and residual sum.
//
// Maths    vit_swiglu: bf16(bf16(silu(gate)) * up);  vit_gelu: bf16(x/2 * (1 + erf(x/sqrt 2)));  vit_add: bf16(a + b)
// Layout   vit_swiglu: x [n, 2*inter] bf16, gates first, out [n, inter]; the others: any number of bf16
// Grid     ceil(values/8/256), values = those of the output; block 256
// Numerics vit_swiglu has the CPU's exponential, operation by operation, and vit_add one sum: equal bits. vit_gelu has the library's erf
// Checked  gpu_check correctness (room `vision`), crates/vision/tests
#include "../common/quantise.cuh"

// `exp` of crates/vision/src/ops/exp.rs.
__device__ __forceinline__ float tower_exp(float x) {
    float c = x < -87.3f ? -87.3f : x;
    c = c > 88.8f ? 88.8f : c;
    float shifted = __fmaf_rn(c, 1.44269504f, 12582912.0f), n = __fsub_rn(shifted, 12582912.0f);
    float r = __fmaf_rn(n, 2.1219444e-4f, __fmaf_rn(n, -0.6933594f, c));
    float p = 1.3814461e-3f;
    p = __fmaf_rn(p, r, 8.368781e-3f);
    p = __fmaf_rn(p, r, 4.1668393e-2f);
    p = __fmaf_rn(p, r, 1.666652e-1f);
    p = __fmaf_rn(p, r, 0.49999994f);
    p = __fmaf_rn(p, r, 1.0f);
    p = __fmaf_rn(p, r, 1.0f);
    float power = __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u);
    return x < -87.3f ? 0.0f : __fmul_rn(p, power);
}
__device__ __forceinline__ float gated(float gate, float up) {
    return __fmul_rn(round_bf16(__fdiv_rn(gate, __fadd_rn(1.0f, tower_exp(-gate)))), up);
}
__device__ __forceinline__ float gelu(float x) {
    return __fmul_rn(__fmul_rn(x, 0.5f), __fadd_rn(1.0f, erff(__fmul_rn(x, 0.70710678f))));
}

extern "C" __global__ void __launch_bounds__(256) vit_swiglu(const bf16* x, bf16* out, int64_t values, int inter) {
    int64_t at = ((int64_t)blockIdx.x * 256 + threadIdx.x) * 8;
    if (at >= values) return;
    if ((inter & 7) == 0) {
        // Row t begins at 2 * inter * t, that is inter * t further on than in the output.
        int64_t from = at + quotient(at >> 3, inter >> 3) * inter;
        float g[8], u[8];
        unpack8(*reinterpret_cast<const uint4*>(x + from), g);
        unpack8(*reinterpret_cast<const uint4*>(x + from + inter), u);
#pragma unroll
        for (int j = 0; j < 8; ++j) g[j] = gated(g[j], u[j]);
        *reinterpret_cast<uint4*>(out + at) = pack8(g);
    } else {
        for (int64_t i = at; i < at + 8 && i < values; ++i) {
            int64_t from = i + quotient(i, inter) * inter;
            out[i] = __float2bfloat16_rn(gated(__bfloat162float(x[from]), __bfloat162float(x[from + inter])));
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) vit_gelu(const bf16* x, bf16* out, int64_t values) {
    int64_t at = ((int64_t)blockIdx.x * 256 + threadIdx.x) * 8;
    if (at + 8 <= values) {
        float v[8];
        unpack8(*reinterpret_cast<const uint4*>(x + at), v);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = gelu(v[j]);
        *reinterpret_cast<uint4*>(out + at) = pack8(v);
    } else {
        for (; at < values; ++at) out[at] = __float2bfloat16_rn(gelu(__bfloat162float(x[at])));
    }
}

extern "C" __global__ void __launch_bounds__(256) vit_add(const bf16* a, const bf16* b, bf16* out, int64_t values) {
    int64_t at = ((int64_t)blockIdx.x * 256 + threadIdx.x) * 8;
    if (at + 8 <= values) {
        float v[8], w[8];
        unpack8(*reinterpret_cast<const uint4*>(a + at), v);
        unpack8(*reinterpret_cast<const uint4*>(b + at), w);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = __fadd_rn(v[j], w[j]);
        *reinterpret_cast<uint4*>(out + at) = pack8(v);
    } else {
        for (; at < values; ++at) out[at] = __float2bfloat16_rn(__fadd_rn(__bfloat162float(a[at]), __bfloat162float(b[at])));
    }
}
