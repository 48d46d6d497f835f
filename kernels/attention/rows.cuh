// The rows a query attends to: up to three scopes, listed one after the other and stripped of their -1 entries.
#pragma once
#include "packed.cuh"

struct Scope {
    const void* kv;         // [rows, D] bf16, or the codes of packed rows
    const uint8_t* scales;  // of packed rows
    const int32_t* idx;     // [T, n]
    int32_t n, kind;        // a RowKind
};
// Passed by value: 96 bytes, three scopes; an absent one has n = 0.
struct Scopes {
    Scope s[3];
};

#define SCOPE_SHIFT 30  // a list entry is scope << 30 | row

__device__ __forceinline__ int64_t row_number(uint32_t entry) { return entry & ((1u << SCOPE_SHIFT) - 1); }
// Where all scopes are bf16.
__device__ __forceinline__ const bf16* row_ptr(const Scopes& sc, uint32_t entry, int D) {
    uint32_t which = entry >> SCOPE_SHIFT;
    const void* base = which == 0 ? sc.s[0].kv : which == 1 ? sc.s[1].kv : sc.s[2].kv;
    return static_cast<const bf16*>(base) + row_number(entry) * D;
}
// Where they may be packed.
__device__ __forceinline__ Row row_of(const Scopes& sc, uint32_t entry, int D) {
    uint32_t which = entry >> SCOPE_SHIFT;
    const void* base = which == 0 ? sc.s[0].kv : which == 1 ? sc.s[1].kv : sc.s[2].kv;
    const uint8_t* scales = which == 0 ? sc.s[0].scales : which == 1 ? sc.s[1].scales : sc.s[2].scales;
    int kind = which == 0 ? sc.s[0].kind : which == 1 ? sc.s[1].kind : sc.s[2].kind;
    int64_t row = row_number(entry);
    return {static_cast<const uint8_t*>(base) + row * stored_bytes(kind, D), scales + row * (D >> group_shift(kind)), kind};
}

// Fills `list` (room for all entries) with query t's valid rows in order, returns their number to every thread.
// All threads of the block call it; the list is visible to all on return.
__device__ __forceinline__ int valid_rows(const Scopes& sc, int t, uint32_t* list) {
    __shared__ int warp_count[32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, n = 0;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        int len = sc.s[i].n;
        const int32_t* idx = sc.s[i].idx + (int64_t)t * len;
        for (int j0 = 0; j0 < len; j0 += blockDim.x) {
            int j = j0 + threadIdx.x, row = j < len ? idx[j] : -1;
            uint32_t mask = __ballot_sync(FULL, row >= 0);
            __syncthreads();
            if (lane == 0) warp_count[warp] = __popc(mask);
            __syncthreads();
            int before = 0, total = 0;
            for (int w = 0; w < warps; ++w) {
                int c = warp_count[w];
                before += w < warp ? c : 0;
                total += c;
            }
            if (row >= 0) list[n + before + __popc(mask & ((1u << lane) - 1))] = (uint32_t)i << SCOPE_SHIFT | (uint32_t)row;
            n += total;
        }
    }
    __syncthreads();
    return n;
}
