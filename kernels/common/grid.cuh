// Blocks of a cooperative launch that wait for each other.
#pragma once
#include <stdint.h>

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t arrive(uint32_t* counter, uint32_t limit) {
    uint32_t old;
    asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(limit) : "memory");
    return old;
}
// All of `blocks` blocks have come here; what they wrote before is seen by all. `counter` is two words, zero before the first use: those
// that have come, and a turn that changes when all have.
__device__ __forceinline__ void grid_barrier(uint32_t* counter, uint32_t blocks) {
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t turn = load_acquire(counter + 1);
        if (arrive(counter, blocks - 1) == blocks - 1) arrive(counter + 1, 0xffffffffu);
        else while (load_acquire(counter + 1) == turn) {}
    }
    __syncthreads();
}
