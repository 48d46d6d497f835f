// fake_quant_fp4: values rounded to e2m1 with a scale per group, kept as bf16; and the packed form of the same.
//
// Maths    group 32: s = pow2ceil(max(amax, 6*2^-126) * (1/6)); group 16: s = e4m3(max(amax, 6*2^-9) / 6)
//          q = e2m1(clamp(x / s, -6, 6)), ties to the even code; out = bf16(q * s)
// Layout   x, out [n] bf16 (out may be x); codes [n/2] u8, even column in the low nibble, scales [n/group] u8: may be null
// Grid     1-D, one thread per value, block 256; n a multiple of 32
// Numerics bit for bit the reference's (true divisions)
// Checked  tests_cuda/check.cu, crates/quant/tests
#include "../common/quantise.cuh"

extern "C" __global__ void fake_quant_fp4(const bf16* x, bf16* out, uint8_t* codes, uint8_t* scales, int64_t n, int group) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    bool live = i < n;
    float v = live ? __bfloat162float(x[i]) : 0.0f, amax = fabsf(v);
    for (int o = group >> 1; o; o >>= 1) amax = fmaxf(amax, __shfl_xor_sync(FULL, amax, o));
    uint32_t byte;
    float s = group == 32 ? fp4_scale_e8m0(amax, byte) : fp4_scale_e4m3(amax, byte);
    uint32_t c = fp4_code(v, s);
    uint32_t next = __shfl_down_sync(FULL, c, 1);
    if (!live) return;
    if (out) out[i] = __float2bfloat16_rn(e2m1_to_f32(c) * s);
    if (codes && !(i & 1)) codes[i >> 1] = (uint8_t)(c | next << 4);
    if (scales && i % group == 0) scales[i / group] = (uint8_t)byte;
}
