// One rounded row as codes and scales, as pack_rows.cu says, by a block of 128.
#pragma once
#include "../common/quantise.cuh"
#include "packed.cuh"

// e8m0 byte of the smallest power of two s with top <= limit * s, of which `shift` and `fraction` are the exponent and mantissa.
__device__ __forceinline__ uint32_t smallest_scale(float top, int shift, uint32_t fraction) {
    uint32_t u = __float_as_uint(top);
    int b = (int)(u >> 23) - shift + ((u & 0x7fffffu) > fraction);
    return (uint32_t)max(1, min(b, 254));
}

__device__ __forceinline__ void pack_row(const bf16* x, int64_t row, uint8_t* codes, uint8_t* scales, int D, int kind) {
    // Four columns a thread; a group is four or eight neighbouring lanes.
    int lane = threadIdx.x & 31, lanes = kind == ROW_FP4_E4M3 ? 4 : 8;
    uint32_t mine = ((1u << lanes) - 1) << (lane & ~(lanes - 1));
    for (int c0 = 0; c0 < D; c0 += 512) {
        int c = c0 + 4 * threadIdx.x;
        uint2 p = c < D ? *reinterpret_cast<const uint2*>(x + c) : make_uint2(0, 0);
        float v[4] = {bf16_lo(p.x), bf16_hi(p.x), bf16_lo(p.y), bf16_hi(p.y)};
        float top = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
        bool nan = v[0] != v[0] || v[1] != v[1] || v[2] != v[2] || v[3] != v[3];
        for (int o = 1; o < lanes; o <<= 1) top = fmaxf(top, __shfl_xor_sync(FULL, top, o));
        nan = __ballot_sync(FULL, nan) & mine;
        uint32_t byte = 1, code[4];
        if (kind == ROW_FP4_E4M3) {
            bool found = top == 0.0f || nan;
            for (uint32_t k = 7; k > 0; --k) {
                float scale = __fdiv_rn(top, e2m1_to_f32(k));
                uint32_t b = f32_to_e4m3(scale);
                bool fits = scale > 0.0f && e4m3_to_f32(b) == scale;
#pragma unroll
                for (int i = 0; i < 4; ++i) fits &= e2m1_to_f32(f32_to_e2m1(__fdiv_rn(v[i], scale))) * scale == v[i];
                fits = (__ballot_sync(FULL, fits) & mine) == mine;
                if (fits && !found) byte = b;
                found |= fits;
                if (__all_sync(FULL, found)) break;
            }
            if (!found) byte = max(1u, f32_to_e4m3(__fdiv_rn(top, 6.0f)));
            float scale = e4m3_to_f32(byte);
#pragma unroll
            for (int i = 0; i < 4; ++i) code[i] = f32_to_e2m1(__fdiv_rn(v[i], scale));
            if (nan) byte = 0x7f;
        } else {
            byte = kind == ROW_FP8 ? smallest_scale(top, 8, 0x600000) : smallest_scale(top, 2, 0x400000);
            float inverse = e8m0_inverse(byte);
#pragma unroll
            for (int i = 0; i < 4; ++i) code[i] = kind == ROW_FP8 ? f32_to_e4m3(v[i] * inverse) : f32_to_e2m1(v[i] * inverse);
            if (nan) byte = 255;
        }
        if (nan) code[0] = code[1] = code[2] = code[3] = 0;
        if (c >= D) continue;
        if (kind == ROW_FP8) *reinterpret_cast<uint32_t*>(codes + row * D + c) = code[0] | code[1] << 8 | code[2] << 16 | code[3] << 24;
        else *reinterpret_cast<uint16_t*>(codes + row * (D >> 1) + (c >> 1)) = (uint16_t)(code[0] | code[1] << 4 | code[2] << 8 | code[3] << 12);
        if ((lane & (lanes - 1)) == 0) scales[row * (D >> group_shift(kind)) + (c >> group_shift(kind))] = (uint8_t)byte;
    }
}
