// bias_round: the end of a product with a bias, from f32 sums.
//
// Maths    out[m][j] = bf16(y[m][j] + bias[j])
// Layout   y [rows, n] f32, bias [n] bf16, out [rows, n] bf16
// Grid     ceil(rows*n/8/256); block 256
// Numerics one rounding. (cuBLAS can add to its output as well, but in some of its kernels to a product that was rounded)
// Checked  gpu_check correctness (room `vision`)
#include "../common/quantise.cuh"

extern "C" __global__ void __launch_bounds__(256) bias_round(const float* y, const bf16* bias, bf16* out, int64_t values, int n) {
    int64_t at = ((int64_t)blockIdx.x * 256 + threadIdx.x) * 8;
    if (at >= values) return;
    int column = (int)(at - quotient(at, n) * n);
    if ((n & 7) == 0) {
        float b[8], v[8];
        unpack8(*reinterpret_cast<const uint4*>(bias + column), b);
        float4 lo = reinterpret_cast<const float4*>(y + at)[0], hi = reinterpret_cast<const float4*>(y + at)[1];
        v[0] = lo.x; v[1] = lo.y; v[2] = lo.z; v[3] = lo.w; v[4] = hi.x; v[5] = hi.y; v[6] = hi.z; v[7] = hi.w;
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = __fadd_rn(v[j], b[j]);
        *reinterpret_cast<uint4*>(out + at) = pack8(v);
    } else {
        for (int64_t i = at; i < at + 8 && i < values; ++i, column = column + 1 == n ? 0 : column + 1)
            out[i] = __float2bfloat16_rn(__fadd_rn(y[i], __bfloat162float(bias[column])));
    }
}
