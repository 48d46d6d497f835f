// engram_hash: the table rows of each token's n-grams.
//
// Maths    term_s = id of the token s places back, or pad once any nearer place is missing or dead;
//          rolling = term_0*m_0 ^ .. ^ term_s*m_s; column (s-1)*heads + h of the (s+1)-gram: rolling % prime + offset
// Layout   ids [T] u32 and history [*] u32 (raw token ids); source [T, N] i32: place s of token t as an index into ids, an
//          index h into history as -2 - h, or -1 before the start; dead [T], dead_history [*] u8 or null (1 = image);
//          map [vocab] u32; multipliers [L, N] i64; primes, offsets [L, (N-1)*heads] u32; out [T, L, (N-1)*heads] u32
// Grid     one thread per (t, layer, column): 1-D, block 128; N <= 8
// Numerics integers; products stay below 2^63, so the remainder is of a non-negative number
// Checked  tests_cuda/check.cu, crates/engram/tests
#include "../common/util.cuh"

extern "C" __global__ void __launch_bounds__(128) engram_hash(const uint32_t* ids, const uint32_t* history, const int32_t* source, const uint8_t* dead,
                                                              const uint8_t* dead_history, const uint32_t* map, const int64_t* multipliers,
                                                              const uint32_t* primes, const uint32_t* offsets, uint32_t* out, int T, int L, int N, int heads,
                                                              uint32_t pad) {
    int cols = (N - 1) * heads, i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= T * L * cols) return;
    int col = i % cols, layer = i / cols % L, t = i / (cols * L), last = col / heads + 1;
    bool blocked = false;
    uint64_t rolling = 0;
    for (int s = 0; s <= last; ++s) {
        int src = source[t * N + s];
        bool old = src <= -2;
        if (src == -1 || (old ? dead_history && dead_history[-2 - src] : dead && dead[src])) blocked = true;
        uint64_t term = pad;
        if (!blocked) term = map[old ? history[-2 - src] : ids[src]];
        rolling ^= term * (uint64_t)multipliers[layer * N + s];
    }
    out[i] = (uint32_t)(rolling % primes[layer * cols + col]) + offsets[layer * cols + col];
}
