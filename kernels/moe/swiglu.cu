// swiglu: the gated activation between an expert's products, and its quantisation.
//
// Maths    u = clamp(up, -limit, limit), g = min(gate, limit) (limit > 0 only); h = bf16(w * (silu(g) * u))
// Layout   gate, up [T, ld] bf16 (ld = row stride, so one product can hold both), weight [T] f32 or null,
//          h [T, inter] bf16, fake [T, inter] bf16 (act_quant values of h), codes [T, inter] u8 and scales [T, inter/32] u8:
//          each output may be null
// Grid     1-D over T*inter/8 threads, block 256; inter a multiple of 32
// Numerics f32 inside, one rounding; the routing weight enters before it
// Checked  tests_cuda/check.cu, crates/moe/tests
#include "../common/quantise.cuh"
#include "../common/swiglu.cuh"

extern "C" __global__ void swiglu(const bf16* gate, const bf16* up, const float* weight, bf16* h, bf16* fake, uint8_t* codes,
                                  uint8_t* scales, int64_t total8, int inter, int64_t ld, float limit) {
    after_previous();
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int units = inter >> 3;
    bool live = i < total8;
    float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (live) {
        int64_t t = i / units, at = t * ld + (i % units) * 8;
        float g[8], u[8], w = weight ? weight[t] : 1.0f;
        unpack8(*reinterpret_cast<const uint4*>(gate + at), g);
        unpack8(*reinterpret_cast<const uint4*>(up + at), u);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = round_bf16(w * swiglu_value(g[j], u[j], limit));
    }
    emit8(v, i, live, h, fake, codes, scales);
}
