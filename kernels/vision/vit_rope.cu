// vit_rope: the rotation of a grid's rows and columns, on halves of a head.
//
// Maths    lo' = bf16(lo*cos - hi*sin), hi' = bf16(hi*cos + lo*sin), lo and hi the halves of a head; heads from `rotated` on are copied
// Layout   x, out [N, H, 2*rd] bf16 (they may be the same), cos, sin [N, rd] f32; rd even
// Grid     ceil(N*H*units/256), units = rd/8 where rd is a multiple of 8, else rd/2; block 256
// Numerics products and their sum each round to f32, as on the CPU: equal bits
// Checked  gpu_check correctness (room `vision`), crates/vision/tests
#include "../common/quantise.cuh"

__device__ __forceinline__ float turn_lo(float lo, float hi, float c, float s) { return __fsub_rn(__fmul_rn(lo, c), __fmul_rn(hi, s)); }
__device__ __forceinline__ float turn_hi(float lo, float hi, float c, float s) { return __fadd_rn(__fmul_rn(hi, c), __fmul_rn(lo, s)); }

extern "C" __global__ void __launch_bounds__(256) vit_rope(const bf16* x, const float* cosines, const float* sines, bf16* out, int64_t N, int H,
                                                           int rd, int rotated) {
    bool wide = (rd & 7) == 0;
    int units = wide ? rd >> 3 : rd >> 1;
    int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= N * H * units) return;
    int64_t place = quotient(i, units), patch = quotient(place, H), at = place * 2 * rd;
    int u = (int)(i - place * units), head = (int)(place - patch * H);
    const float *cs = cosines + patch * rd, *sn = sines + patch * rd;
    if (wide) {
        const uint4 *lo = reinterpret_cast<const uint4*>(x + at) + u, *hi = reinterpret_cast<const uint4*>(x + at + rd) + u;
        uint4 *lo_out = reinterpret_cast<uint4*>(out + at) + u, *hi_out = reinterpret_cast<uint4*>(out + at + rd) + u;
        if (head >= rotated) {
            uint4 a = *lo, b = *hi;
            *lo_out = a; *hi_out = b;
            return;
        }
        float a[8], b[8], l[8], h[8];
        unpack8(*lo, a);
        unpack8(*hi, b);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float c = cs[u * 8 + j], s = sn[u * 8 + j];
            l[j] = turn_lo(a[j], b[j], c, s);
            h[j] = turn_hi(a[j], b[j], c, s);
        }
        *lo_out = pack8(l);
        *hi_out = pack8(h);
    } else {
        for (int j = 2 * u; j < 2 * u + 2; ++j) {
            float a = __bfloat162float(x[at + j]), b = __bfloat162float(x[at + rd + j]);
            bool turned = head < rotated;
            out[at + j] = __float2bfloat16_rn(turned ? turn_lo(a, b, cs[j], sn[j]) : a);
            out[at + rd + j] = __float2bfloat16_rn(turned ? turn_hi(a, b, cs[j], sn[j]) : b);
        }
    }
}
