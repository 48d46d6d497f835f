// Loads, reductions and the tensor-core instruction that several kernels share.
#pragma once
#include "formats.cuh"

#define FULL 0xffffffffu

// For a kernel that begins while the one ahead of it still runs (`OVERLAPPING` in src/lib.rs): waits until that has ended and what it wrote is
// there, then lets the kernel behind begin. Before this, a kernel may read what no kernel of a step writes (weights) and nothing else, and
// writes nothing: memory passes from kernel to kernel. Every block comes here, so that no kernel ends before the one ahead of it.
// (Letting the next begin at once, before the wait, puts kernel behind kernel to wait on the multiprocessors, and gains nothing, measured.
// A kernel that waits for little and computes long may let it begin once that little is there: `begin_next`.)
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void begin_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void after_previous() {
    wait_for_previous();
    begin_next();
}

// Weights are read once: keep them out of L1, where the activations live.
__device__ __forceinline__ uint4 load_stream(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
__device__ __forceinline__ uint4 load_cached(const void* p) { return *reinterpret_cast<const uint4*>(p); }

// A quotient in 32-bit arithmetic where the dividend fits, which takes a quarter of the instructions.
__device__ __forceinline__ int64_t quotient(int64_t a, int b) { return a >> 32 ? a / b : (int64_t)((uint32_t)a / (uint32_t)b); }

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(FULL, v, o);
    return v;
}
// In f64, where the last bits of a sum decide the roundings of a whole row.
__device__ __forceinline__ double warp_sum(double v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(FULL, v, o);
    return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(FULL, v, o));
    return v;
}
// Sum over the block in a fixed order, of floats or doubles; `scratch` holds 32. Every thread gets the result.
template <typename F>
__device__ __forceinline__ F block_sum(F v, F* scratch) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n = (blockDim.x + 31) >> 5;
    v = warp_sum(v);
    __syncthreads();
    if (lane == 0) scratch[warp] = v;
    __syncthreads();
    return warp_sum(lane < n ? scratch[lane] : (F)0);
}
// 1 / sqrt(sum / n + eps) of a norm. In f64 the one rounding of each element is the only one, as on the CPU: a factor that is an f32
// ulp off flips roundings all over the row, and an fp8 layer behind it makes per cents of that.
__device__ __forceinline__ double norm_factor(double sum, int n, float eps) { return rsqrt(sum / (double)n + (double)eps); }
// w * (x * r) of a norm, rounded to bf16.
__device__ __forceinline__ float normed(float w, float x, double r) { return round_bf16((float)((double)w * ((double)x * r))); }

// d += a (16x16, row) * b (16x8, col), f32 accumulators. Lane = 4g + q: a0,a2 row g, a1,a3 row g+8;
// k = 2q,2q+1 in a0,a1,b0 and 8+2q.. in a2,a3,b1; d0,d1 row g, d2,d3 row g+8, columns 2q,2q+1.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t a0, const uint32_t a1, const uint32_t a2, const uint32_t a3,
                                         const uint32_t b0, const uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint32_t smem_addr(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr));
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr));
}
__device__ __forceinline__ void cp_async16(uint32_t dst, const void* src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src));
}
__device__ __forceinline__ void cp_async16_or_zeros(uint32_t dst, const void* src, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(there ? 16 : 0));
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;"); }
template <int N>
__device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }
