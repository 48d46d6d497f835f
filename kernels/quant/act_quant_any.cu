// act_quant_any: act_quant in groups of any size with e8m0 or f32 scales; act_values: what codes and e8m0 scales stand for.
//
// Maths    a = max(max|x|, 1e-4); s = a * f32(1/448), e8m0: the power of two above; q = e4m3(clamp(x / s, -448, 448));
//          values: q * s. A group with NaN or an infinity has a NaN scale and NaN codes
// Layout   x [groups, group] bf16; codes [groups, group] u8, scales [groups] u8 (e8m0) or scales_f32 [groups]: each may be null, one
//          of the scale formats decides; fake [groups, group] bf16 or null. act_values: codes, scales u8, out bf16
// Grid     ceil(groups/4), block 128: a warp a group; act_values: ceil(n/256), block 256
// Numerics bit for bit the reference's; a product of act_values is exact in bf16
// Checked  gpu_check correctness
#include "../common/quantise.cuh"

extern "C" __global__ void __launch_bounds__(128) act_quant_any(const bf16* x, uint8_t* codes, uint8_t* scales, float* scales_f32, bf16* fake,
                                                                int64_t groups, int group, int e8m0) {
    int64_t g = (int64_t)blockIdx.x * 4 + (threadIdx.x >> 5);
    int lane = threadIdx.x & 31;
    if (g >= groups) return;
    const bf16* from = x + g * group;
    float amax = 0.0f;
    bool finite = true;
    for (int i = lane; i < group; i += 32) {
        float v = fabsf(__bfloat162float(from[i]));
        finite &= v < INFINITY;
        amax = fmaxf(amax, v);
    }
    amax = warp_max(amax);
    finite = __all_sync(FULL, finite);
    float s = fmaxf(amax, 1e-4f) * (1.0f / 448.0f);
    uint32_t byte = e8m0 ? pow2ceil_e8m0(s) : 0;
    if (e8m0) s = e8m0_to_f32(byte);
    if (!finite) {
        byte = 255;
        s = __uint_as_float(0x7fc00000u);
    }
    if (lane == 0) {
        if (scales) scales[g] = (uint8_t)byte;
        if (scales_f32) scales_f32[g] = s;
    }
    for (int i = lane; i < group; i += 32) {
        uint32_t c = finite ? f32_to_e4m3(__fdiv_rn(__bfloat162float(from[i]), s)) : 0x7fu;
        if (codes) codes[g * group + i] = (uint8_t)c;
        if (fake) fake[g * group + i] = __float2bfloat16_rn(e4m3_to_f32(c) * s);
    }
}

extern "C" __global__ void __launch_bounds__(256) act_values(const uint8_t* codes, const uint8_t* scales, bf16* out, int64_t n, int group) {
    int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i < n) out[i] = __float2bfloat16_rn(e4m3_to_f32(codes[i]) * e8m0_to_f32(scales[i / group]));
}
