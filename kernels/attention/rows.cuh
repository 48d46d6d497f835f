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
// All threads of the block call it, blockDim.x of them a multiple of 32, at most 512; the list is visible to all on return.
// All lists are read at once: one wait for memory, whatever their number.
__device__ __forceinline__ int valid_rows(const Scopes& sc, int t, uint32_t* list) {
    constexpr int U = 2;
    __shared__ int warp_count[2][U * 16];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, n = 0;
    int n0 = (int)sc.s[0].n, n1 = n0 + (int)sc.s[1].n, all = n1 + (int)sc.s[2].n, turn = 0;
    for (int j0 = 0; j0 < all; j0 += U * blockDim.x, turn ^= 1) {
        int row[U], which[U];
#pragma unroll
        for (int u = 0; u < U; ++u) {
            int j = j0 + u * blockDim.x + threadIdx.x;
            which[u] = (j >= n0) + (j >= n1);
            // Field by field: a choice of structs would be a copy in memory.
            const int32_t* idx = which[u] == 0 ? sc.s[0].idx : which[u] == 1 ? sc.s[1].idx : sc.s[2].idx;
            int first = which[u] == 0 ? 0 : which[u] == 1 ? n0 : n1, len = which[u] == 0 ? n0 : which[u] == 1 ? n1 - n0 : all - n1;
            row[u] = j < all ? idx[(int64_t)t * len + j - first] : -1;
        }
        uint32_t mask[U];
#pragma unroll
        for (int u = 0; u < U; ++u) {
            mask[u] = __ballot_sync(FULL, row[u] >= 0);
            if (lane == 0) warp_count[turn][u * warps + warp] = __popc(mask[u]);
        }
        // The other half of the counts may still be read by those behind.
        __syncthreads();
        int c = lane < U * warps ? warp_count[turn][lane] : 0, before = c;
#pragma unroll
        for (int o = 1; o < 32; o <<= 1) {
            int v = __shfl_up_sync(FULL, before, o);
            if (lane >= o) before += v;
        }
        int total = __shfl_sync(FULL, before, 31);
        before -= c;
#pragma unroll
        for (int u = 0; u < U; ++u) {
            int at = n + __shfl_sync(FULL, before, u * warps + warp) + __popc(mask[u] & ((1u << lane) - 1));
            if (row[u] >= 0) list[at] = (uint32_t)which[u] << SCOPE_SHIFT | (uint32_t)row[u];
        }
        n += total;
    }
    __syncthreads();
    return n;
}
