// sample: the next token from f32 logits, greedy or by the Gumbel-max trick.
//
// Maths    temperature 0: argmax(l). Otherwise argmax(l / t - ln e), e ~ Exp(1): the same choice as the
//          reference's argmax(softmax(l / t) / e), without the softmax
// Layout   logits [R, vocab] f32, out [R] u32; best [R] u64 and counter [R] u32: workspace, zero before the first use and left zero;
//          seed and offset select the random stream: one draw per (offset + row, column)
// Grid     (parts, R), block 256; parts about vocab / 2048, the last block of a row writes the result
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

__device__ __forceinline__ uint32_t ordered(float v) {
    uint32_t u = __float_as_uint(v == 0.0f ? 0.0f : v);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

extern "C" __global__ void __launch_bounds__(256) sample(const float* logits, uint32_t* out, unsigned long long* best, uint32_t* counter, int vocab,
                                                         float temperature, uint64_t seed, uint64_t offset) {
    __shared__ uint64_t warp_best[8];
    __shared__ bool last;
    int r = blockIdx.y;
    const float* row = logits + (int64_t)r * vocab;
    float inv = temperature > 0.0f ? 1.0f / fmaxf(temperature, 1e-5f) : 1.0f;
    uint64_t mine = 0, at = offset + r;
    for (int i = blockIdx.x * 256 + threadIdx.x; i < vocab; i += gridDim.x * 256) {
        float v = row[i] * inv;
        if (temperature > 0.0f) {
            uint32_t bits = philox((uint32_t)i, (uint32_t)at, (uint32_t)(at >> 32), (uint32_t)seed, (uint32_t)(seed >> 32));
            // Uniform in (0, 1): never 0, whose Exp(1) draw would be infinite.
            float u = ((float)(bits >> 8) + 0.5f) * 0x1p-24f;
            v -= logf(-logf(u));
        }
        // Higher value first, then the lower index; 0 is below every real entry.
        uint64_t key = v == v ? (uint64_t)ordered(v) << 32 | (0xffffffffu - (uint32_t)i) : 0;
        mine = key > mine ? key : mine;
    }
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        uint64_t other = __shfl_xor_sync(FULL, mine, o);
        mine = other > mine ? other : mine;
    }
    if ((threadIdx.x & 31) == 0) warp_best[threadIdx.x >> 5] = mine;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 0; w < 8; ++w) mine = warp_best[w] > mine ? warp_best[w] : mine;
        atomicMax(best + r, (unsigned long long)mine);
        __threadfence();
        last = atomicInc(counter + r, gridDim.x - 1) == gridDim.x - 1;
        if (last) {
            mine = atomicExch(best + r, 0ull);
            out[r] = mine ? 0xffffffffu - (uint32_t)mine : 0u;
        }
    }
}
