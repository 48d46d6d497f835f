// group_tokens: which (token, slot) pairs each expert of this rank works on, as tiles of bounded size.
//
// Maths    pairs p = t*k + slot sorted by (expert, p); each expert's run starts at a multiple of `align` and is cut into
//          tiles of `tile` pairs
// Layout   experts [P] u32 (P = T*k). Out: order [places] i32, places = P + min(P, n_local) * (align - 1): the pair at each place,
//          -1 where there is none; inverse [P] i32 (where a pair went, -1 if another rank's), tiles [min(P, n_local + P/tile)] int4
//          {local expert, first position in order, pairs, 0}, count [1] i32 = tiles used
// Grid     one block of 512; max(4 * (17 * n_local + 1), 4 * P for P <= 512) bytes of dynamic shared memory
// Numerics integers; a pair's place comes from ranks, not from the order of atomics, so the result is reproducible
// Checked  tests_cuda/check.cu, crates/moe/tests
#include "../common/util.cuh"

// Up to 512 pairs, a thread each: a pair's place is the number of pairs that sort before it.
__device__ __forceinline__ void group_few(const uint32_t* experts, int32_t* order, int32_t* inverse, int4* tiles, int32_t* count, int P, uint32_t first,
                                          int n_local, int tile, uint32_t* e_s) {
    __shared__ int32_t total;
    int p = threadIdx.x;
    uint32_t e = p < P ? experts[p] - first : 0xffffffffu;
    bool ours = e < (uint32_t)n_local;
    if (p < P) e_s[p] = ours ? e : 0xffffffffu;
    if (p == 0) total = 0;
    __syncthreads();
    int before = 0, rank = 0, same = 0;
    for (int i = 0; i < P; ++i) {
        uint32_t o = e_s[i];
        before += o < e;
        rank += o == e && i < p;
        same += o == e;
    }
    // Tiles of lower experts: each is opened by a pair whose rank is a multiple of the tile size.
    __syncthreads();
    bool opens = ours && rank % tile == 0;
    if (p < P) e_s[p] = opens ? e : 0xffffffffu;
    if (opens) atomicAdd(&total, 1);
    __syncthreads();
    if (ours) {
        order[before + rank] = p;
        if (opens) {
            int at = rank / tile;
            for (int i = 0; i < P; ++i) at += e_s[i] < e;
            tiles[at] = make_int4((int)e, before + rank, min(tile, same - rank), 0);
        }
    }
    if (p < P) inverse[p] = ours ? before + rank : -1;
    if (p == 0) *count = total;
}

extern "C" __global__ void __launch_bounds__(512) group_tokens(const uint32_t* experts, int32_t* order, int32_t* inverse, int4* tiles, int32_t* count,
                                                               int P, uint32_t first, int n_local, int tile, int align) {
    after_previous();
    constexpr int WARPS = 16;
    extern __shared__ int32_t sh[];
    int places = P + min(P, n_local) * (align - 1);
    for (int i = threadIdx.x; i < places; i += blockDim.x) order[i] = -1;
    if (P <= 512 && align == 1) return group_few(experts, order, inverse, tiles, count, P, first, n_local, tile, reinterpret_cast<uint32_t*>(sh));
    int32_t *start = sh, *fill = sh + n_local + 1;  // start [n_local + 1], fill [WARPS][n_local]
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int i = threadIdx.x; i < WARPS * n_local; i += blockDim.x) fill[i] = 0;
    __syncthreads();
    // Each warp owns a contiguous range of pairs and counts its experts.
    int per = ((P + WARPS - 1) / WARPS + 31) & ~31, lo = min(warp * per, P), hi = min(lo + per, P);
    int32_t* mine = fill + warp * n_local;
    for (int p = lo + lane; p < hi; p += 32) {
        uint32_t e = experts[p] - first;
        if (e < (uint32_t)n_local) atomicAdd(&mine[e], 1);
    }
    __syncthreads();
    if (warp == 0) {
        // Exclusive sums of pairs and of tiles over the experts.
        int pairs = 0, n_tiles = 0;
        for (int e0 = 0; e0 < n_local; e0 += 32) {
            int e = e0 + lane, c = 0;
            if (e < n_local)
                for (int w = 0; w < WARPS; ++w) c += fill[w * n_local + e];
            int tc = (c + tile - 1) / tile, room = (c + align - 1) / align * align, sc = room, st = tc;
            for (int o = 1; o < 32; o <<= 1) {
                int a = __shfl_up_sync(FULL, sc, o), b = __shfl_up_sync(FULL, st, o);
                if (lane >= o) { sc += a; st += b; }
            }
            int at = pairs + sc - room, tat = n_tiles + st - tc;
            if (e < n_local) start[e] = at;
            for (int i = 0; i < tc; ++i) tiles[tat + i] = make_int4(e, at + i * tile, min(tile, c - i * tile), 0);
            pairs += __shfl_sync(FULL, sc, 31);
            n_tiles += __shfl_sync(FULL, st, 31);
        }
        if (lane == 0) { start[n_local] = pairs; *count = n_tiles; }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < n_local; e += blockDim.x) {
        int at = start[e];
        for (int w = 0; w < WARPS; ++w) {
            int c = fill[w * n_local + e];
            fill[w * n_local + e] = at;
            at += c;
        }
    }
    __syncthreads();
    for (int p0 = lo; p0 < hi; p0 += 32) {
        int p = p0 + lane;
        uint32_t e = p < hi ? experts[p] - first : 0xffffffffu;
        bool ours = e < (uint32_t)n_local;
        uint32_t same = __match_any_sync(FULL, e);
        int at = ours ? mine[e] + __popc(same & ((1u << lane) - 1)) : -1;
        __syncwarp();
        if (ours && (same & ((1u << lane) - 1)) == 0) mine[e] += __popc(same);
        __syncwarp();
        if (p < hi) inverse[p] = at;
        if (ours) order[at] = p;
    }
}
