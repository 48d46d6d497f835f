// sample: the next token from f32 logits, greedy or by the Gumbel-max trick.
//
// Maths    temperature 0: argmax(l). Otherwise argmax(l / t - ln e), e ~ Exp(1): the same choice as the
//          reference's argmax(softmax(l / t) / e), without the softmax
// Layout   logits [R, vocab] f32, out [R] u32; seed and offset select the random stream: one draw per (offset + row, column)
// Grid     one block per row, block 1024
// Numerics ties go to the lower index; NaN logits are never chosen unless all are NaN (then index 0)
// Checked  tests_cuda/check.cu
#include "../common/util.cuh"

// Philox 4x32-10: a counter-based generator, so that a draw depends on its position alone.
__device__ __forceinline__ uint32_t philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t k0, uint32_t k1) {
    uint32_t c3 = 0;
#pragma unroll
    for (int i = 0; i < 10; ++i) {
        uint32_t h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0, h1 = __umulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
        c0 = h1 ^ c1 ^ k0; c1 = l1; c2 = h0 ^ c3 ^ k1; c3 = l0;
        k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
    }
    return c0;
}

extern "C" __global__ void __launch_bounds__(1024) sample(const float* logits, uint32_t* out, int vocab, float temperature, uint64_t seed,
                                                          uint64_t offset) {
    const float* row = logits + (int64_t)blockIdx.x * vocab;
    float best = -INFINITY, inv = temperature > 0.0f ? 1.0f / fmaxf(temperature, 1e-5f) : 1.0f;
    uint32_t arg = 0xffffffffu;
    uint64_t at = offset + blockIdx.x;
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
        float v = row[i] * inv;
        if (temperature > 0.0f) {
            uint32_t bits = philox((uint32_t)i, (uint32_t)at, (uint32_t)(at >> 32), (uint32_t)seed, (uint32_t)(seed >> 32));
            // Uniform in (0, 1): never 0, whose Exp(1) draw would be infinite.
            float u = ((float)(bits >> 8) + 0.5f) * 0x1p-24f;
            v -= logf(-logf(u));
        }
        if (v > best || (v == best && (uint32_t)i < arg)) { best = v; arg = i; }
    }
    __shared__ float sv[32];
    __shared__ uint32_t si[32];
    for (int pass = 0; pass < 2; ++pass) {
#pragma unroll
        for (int o = 16; o; o >>= 1) {
            float v = __shfl_xor_sync(FULL, best, o);
            uint32_t a = __shfl_xor_sync(FULL, arg, o);
            if (v > best || (v == best && a < arg)) { best = v; arg = a; }
        }
        if (pass) break;
        int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        if (lane == 0) { sv[warp] = best; si[warp] = arg; }
        __syncthreads();
        if (warp) return;
        bool live = lane < (int)(blockDim.x >> 5);
        best = live ? sv[lane] : -INFINITY;
        arg = live ? si[lane] : 0xffffffffu;
    }
    if (threadIdx.x == 0) out[blockIdx.x] = arg == 0xffffffffu ? 0u : arg;
}
