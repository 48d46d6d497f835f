// norm_rope_quant: what a key, a query or a latent goes through between its projection and its cache.
//
// Maths    optional RMSNorm (one bf16 rounding), rotation of the last rd columns (adjacent pairs, one rounding), then
//          kind 0 nothing, 1 fp8 groups of 32 (window KV), 2 fp4 groups of 32 with e8m0 scales (indexer q and k),
//          3 fp4 groups of 16 with e4m3 scales (compressed KV)
// Layout   x [T, H, D] bf16, w [D] bf16 or null (no norm), cos, sin [T, rd/2] f32, out [T, H, D] bf16 or null (may be x);
//          rows [T] i32 or null: pool row of token t, -1 = not stored; pool [rows, D] bf16 or null;
//          codes, scales or null: the packed form at `rows` (at t*H + h without rows): D/2 and D/group bytes a row for
//          fp4, D and D/32 for fp8. inverse 1 rotates back
// Grid     one warp per (t, h), block 128: ceil(T*H/4) blocks; D even, at most 512, with a kind other than 0 a multiple of 32
// Numerics f32 within each step (the norm: f64), bf16 between steps, as the reference; codes are bit for bit the reference's
// Checked  tests_cuda/check.cu, crates/attention/tests
#include "whole_row.cuh"

extern "C" __global__ void __launch_bounds__(128) norm_rope_quant(const bf16* x, const bf16* w, const float* cos_t, const float* sin_t, const int32_t* rows,
                                                                  bf16* out, bf16* pool, uint8_t* codes, uint8_t* scales, int T, int H, int D, int rd,
                                                                  float eps, int kind, int inverse) {
    after_previous();
    constexpr int PER = 16;
    int64_t v = (int64_t)blockIdx.x * 4 + (threadIdx.x >> 5);
    int lane = threadIdx.x & 31, n = (D + 31) >> 5;
    if (v >= (int64_t)T * H) return;
    int64_t t = v / H;
    // The usual widths; others column by column below.
#define WHOLE(N) \
    if (D == 32 * N) return whole_row<N>(x, w, cos_t, sin_t, out, pool, codes, scales, v, t, rows ? rows[t] : v, rd, eps, kind, inverse);
    WHOLE(16) WHOLE(8) WHOLE(4) WHOLE(2)
#undef WHOLE
    float val[PER];
#pragma unroll
    for (int i = 0; i < PER; ++i)
        if (i < n) val[i] = i * 32 + lane < D ? __bfloat162float(x[v * D + i * 32 + lane]) : 0.0f;
    if (w) {
        double sum = 0.0;
#pragma unroll
        for (int i = 0; i < PER; ++i)
            if (i < n) sum += (double)val[i] * val[i];
        double r = norm_factor(warp_sum(sum), D, eps);
#pragma unroll
        for (int i = 0; i < PER; ++i)
            if (i < n && i * 32 + lane < D) val[i] = normed(__bfloat162float(w[i * 32 + lane]), val[i], r);
    }
    int64_t row = rows ? rows[t] : v;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        if (i >= n) break;
        int d = i * 32 + lane, p = d - (D - rd);
        float other = __shfl_xor_sync(FULL, val[i], 1);
        if (p >= 0 && d < D) {
            // Even columns hold the real part: re*c - im*s; odd ones the imaginary part: re*s + im*c.
            float c = cos_t[t * (rd >> 1) + (p >> 1)], s = sin_t[t * (rd >> 1) + (p >> 1)];
            if (inverse) s = -s;
            val[i] = round_bf16(p & 1 ? __fadd_rn(__fmul_rn(other, s), __fmul_rn(val[i], c)) : __fsub_rn(__fmul_rn(val[i], c), __fmul_rn(other, s)));
        }
        if (kind) {
            float amax = fabsf(val[i]);
            for (int o = kind == 3 ? 8 : 16; o; o >>= 1) amax = fmaxf(amax, __shfl_xor_sync(FULL, amax, o));
            uint32_t byte, code;
            if (kind == 1) {
                byte = fp8_scale(amax);
                code = fp8_code(val[i], e8m0_inverse(byte));
                val[i] = e4m3_to_f32(code) * e8m0_to_f32(byte);
                if (codes && row >= 0) codes[row * D + d] = (uint8_t)code;
                if (scales && row >= 0 && lane == 0) scales[row * n + i] = (uint8_t)byte;
            } else {
                float s = kind == 2 ? fp4_scale_e8m0(amax, byte) : fp4_scale_e4m3(amax, byte);
                code = fp4_code(val[i], s);
                val[i] = e2m1_to_f32(code) * s;
                uint32_t next = __shfl_down_sync(FULL, code, 1);
                int group = kind == 2 ? 32 : 16;
                if (codes && row >= 0 && !(lane & 1)) codes[row * (D >> 1) + (d >> 1)] = (uint8_t)(code | next << 4);
                if (scales && row >= 0 && lane % group == 0) scales[row * (D / group) + d / group] = (uint8_t)byte;
            }
        }
        bf16 b = __float2bfloat16_rn(val[i]);
        if (out && d < D) out[v * D + d] = b;
        if (pool && row >= 0 && d < D) pool[row * D + d] = b;
    }
}
