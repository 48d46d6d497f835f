// argmax: the most likely token of each row of logits, to which a bias may be added.
//
// Maths    the largest logit + bias, the lowest index among equals
// Layout   logits [R, vocab] f32, stride elements from row to row, bias [R, vocab] f32 or null, out [R] u32: the index; 2^31 + the first
//          index whose sum is NaN or +inf, if there is one; 2^32 - 1 for nothing but -inf. work [R, 2] u64, zero before the first
//          use and left zero
// Grid     (parts, R), block 256; parts about vocab / 2048. The last block of a row writes its result
// Numerics one f32 addition with a bias, else comparisons alone; -0 and 0 are equal
// Checked  tests_cuda/check.cu, gpu_check correctness (room `sampling`)
#include "../common/sample.cuh"

extern "C" __global__ void __launch_bounds__(256) argmax(const float* logits, const float* bias, uint32_t* out, unsigned long long* work, int vocab, int64_t stride) {
    __shared__ uint64_t warp_best[8];
    after_previous();
    int r = blockIdx.y;
    const float* row = logits + r * stride;
    if (bias) bias += (int64_t)r * vocab;
    uint64_t mine = 0;
    for (int i = blockIdx.x * 256 + threadIdx.x; i < vocab; i += gridDim.x * 256) {
        float v = bias ? row[i] + bias[i] : row[i];
        // What no token may be chosen beside is above everything.
        uint32_t top = v < INFINITY ? ordered(v) : 0xffffffffu;
        uint64_t key = (uint64_t)top << 32 | (0xffffffffu - (uint32_t)i);
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
        for (int w = 1; w < 8; ++w) mine = warp_best[w] > mine ? warp_best[w] : mine;
        unsigned long long* best = work + 2 * r;
        atomicMax(best, (unsigned long long)mine);
        __threadfence();
        unsigned int* counter = reinterpret_cast<unsigned int*>(best + 1);
        if (atomicInc(counter, gridDim.x - 1) == gridDim.x - 1) {
            mine = atomicExch(best, 0ull);
            uint32_t top = (uint32_t)(mine >> 32), index = 0xffffffffu - (uint32_t)mine;
            out[r] = top == 0xffffffffu ? NO_TOKEN | index : top <= ordered(-INFINITY) ? 0xffffffffu : index;
        }
    }
}
