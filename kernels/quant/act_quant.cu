// act_quant: activations to e4m3 with one power-of-two scale per 32 columns, as codes, as bf16 values, or tiled for Hopper.
//
// Maths    a = max(max|x|, 1e-4); s = pow2ceil(a * (1/448)); q = e4m3(clamp(x / s)); fake = bf16(q * s) (exact)
// Layout   x [T, K] bf16; codes [T, K] u8, scales [T, K/32] u8, fake [T, K] bf16: each may be null.
//          act_quant_tiled: row r of the output is x[rows ? rows[r] / per : r] (rows[r] < 0: left as it is); out as described in common/quantise.cuh
// Grid     act_quant: 1-D over T*K/8 threads, block 256. act_quant_tiled: one block of 256 per output row,
//          2*Kp bytes of dynamic shared memory, Kp = K rounded up to 64 (fp8 weights) or 128 (fp4)
// Numerics bit for bit the reference's: division by a power of two is exact, and so is its inverse
// Checked  tests_cuda/check.cu, crates/quant/tests
#include "../common/quantise.cuh"

extern "C" __global__ void act_quant(const bf16* x, uint8_t* codes, uint8_t* scales, bf16* fake, int64_t total8) {
    after_previous();
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    bool live = i < total8;
    float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (live) unpack8(reinterpret_cast<const uint4*>(x)[i], v);
    emit8(v, i, live, nullptr, fake, codes, scales);
}

// fp4_weights: 0 for products with e4m3 weights, 1 with e2m1. rows_pad: rows of `out`, a multiple of 8. quantise: 0
// only reorders (wo_a's activations are not quantised).
extern "C" __global__ void act_quant_tiled(const bf16* x, const int32_t* rows, int per, bf16* out, int K, int64_t ldx, int64_t rows_pad, int fp4_weights,
                                           int quantise) {
    extern __shared__ uint4 row_smem[];
    bf16* row = reinterpret_cast<bf16*>(row_smem);
    int64_t r = blockIdx.x;
    if (rows && rows[r] < 0) return;
    const uint4* src = reinterpret_cast<const uint4*>(x + (rows ? rows[r] / per : r) * ldx);
    int units = K >> 3, kp = fp4_weights ? (K + 127) & ~127 : (K + 63) & ~63;
    for (int u0 = 0; u0 < kp >> 3; u0 += blockDim.x) {
        int u = u0 + threadIdx.x;
        float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (u < units) unpack8(src[u], v);
        if (quantise) fake_quant8(v);
        if (u < kp >> 3) row_smem[u] = pack8(v);
    }
    __syncthreads();
    for (int u = threadIdx.x; u < kp >> 3; u += blockDim.x) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int k = fp4_weights ? (u >> 4) * 128 + tiled_column_fp4((u & 15) * 8 + 2 * i) : (u >> 3) * 64 + tiled_column_fp8((u & 7) * 8 + 2 * i);
            int step = fp4_weights ? 4 : 1;
            w[i] = (uint32_t)__bfloat16_as_ushort(row[k]) | (uint32_t)__bfloat16_as_ushort(row[k + step]) << 16;
        }
        int64_t at = ((int64_t)(u >> 3) * rows_pad + r) * 8 + ((u & 7) ^ (r & 7));
        reinterpret_cast<uint4*>(out)[at] = make_uint4(w[0], w[1], w[2], w[3]);
    }
}
