// topk_rows: the k highest of a row of sortable 16-bit keys, in ascending order of position.
//
// Maths    the k largest keys, lower position among equals; key 0 is never chosen
// Layout   keys [T, ld] u16; spans [T] int2 {row of position 0, -} or null (then 0); blocks [T, B] i32 or null as in
//          index_scores; out [T, k] i32: row of position 0 + position, -1 at the tail only
// Grid     topk_rows: one block of 1024 per row, n <= 32768. Longer rows: topk_part_hist, topk_part_count,
//          topk_part_write, each (parts, T) blocks of 256, parts = ceil(n / 8192) <= 1024; workspace per row:
//          hist [2048] u32 (zero before the first use, zero again after the last kernel), part [parts][33] u32, header [2] u32.
//          topk_part_once is the three in one where all blocks fit the device at once: counter [2] u32, zero before the first use
// Numerics integers
// Checked  tests_cuda/check.cu, crates/attention/tests
#include "../common/grid.cuh"
#include "../common/util.cuh"

// The thread's 32 consecutive keys, two a register; keys past n read as 0.
__device__ __forceinline__ void load_keys(uint32_t (&v)[16], const uint16_t* row, int at, int n) {
    if (at + 32 <= n && (reinterpret_cast<uintptr_t>(row + at) & 15) == 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint4 p = reinterpret_cast<const uint4*>(row + at)[i];
            v[4 * i] = p.x; v[4 * i + 1] = p.y; v[4 * i + 2] = p.z; v[4 * i + 3] = p.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            uint32_t lo = at + 2 * i < n ? row[at + 2 * i] : 0, hi = at + 2 * i + 1 < n ? row[at + 2 * i + 1] : 0;
            v[i] = lo | hi << 16;
        }
    }
}
#define KEY(v, i) ((v)[(i) >> 1] >> (16 * ((i) & 1)) & 0xffffu)

__device__ __forceinline__ int32_t row_of(int pos, const int2* spans, const int32_t* blocks, int t, int B, int block) {
    int base = spans ? spans[t].x : 0;
    return base + (blocks ? blocks[(int64_t)t * B + pos / block] * block + pos % block : pos);
}

// Exclusive sum over the block of a pair of counts packed as lo | hi << 16 | ..: 64-bit to hold both.
__device__ __forceinline__ uint64_t exclusive(uint64_t v, uint64_t* scratch) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    uint64_t inc = v;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
        uint64_t a = __shfl_up_sync(FULL, inc, o);
        if (lane >= o) inc += a;
    }
    if (lane == 31) scratch[warp] = inc;
    __syncthreads();
    if (warp == 0) {
        uint64_t s = lane < warps ? scratch[lane] : 0;
#pragma unroll
        for (int o = 1; o < 32; o <<= 1) {
            uint64_t a = __shfl_up_sync(FULL, s, o);
            if (lane >= o) s += a;
        }
        scratch[lane] = s;
    }
    __syncthreads();
    return inc - v + (warp ? scratch[warp - 1] : 0);
}

// Writes this thread's chosen keys: all above `thr`, and of those equal to it the first `need_eq` of the row.
// gt/eq: chosen and equal keys before this thread. A chosen key's place is the number of chosen keys before it.
__device__ __forceinline__ void emit(const uint32_t (&v)[16], int at, uint32_t thr, uint32_t need_eq, uint32_t gt, uint32_t eq, int32_t* out, int t,
                                     const int2* spans, const int32_t* blocks, int B, int block) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        uint32_t key = KEY(v, i);
        if (key > thr || (key == thr && key && eq < need_eq)) out[gt + min(eq, need_eq)] = row_of(at + i, spans, blocks, t, B, block);
        gt += key > thr;
        eq += key == thr;
    }
}

// The bin (of 2048, by the high 11 bits) that holds the k-th largest key, and the keys above it; threads i of 256 take the
// bins 2047-8i .. 2040-8i, so that an exclusive sum counts from the top. found = {bin, above}, {0, 0} if there are fewer keys.
__device__ __forceinline__ void find_bin(const uint32_t* hist, uint32_t k, uint32_t* found, uint64_t* scratch) {
    uint32_t b[8], sum = 0;
    int i0 = min((int)threadIdx.x, 255);
#pragma unroll
    for (int i = 0; i < 8; ++i) { b[i] = hist[2047 - 8 * i0 - i]; sum += b[i]; }
    if (threadIdx.x >= 256) sum = 0;
    if (threadIdx.x == 0) { found[0] = 0; found[1] = 0; }
    uint32_t above = (uint32_t)exclusive(sum, scratch);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (threadIdx.x < 256 && above < k && above + b[i] >= k) { found[0] = 2047 - 8 * i0 - i; found[1] = above; }
        above += b[i];
    }
    __syncthreads();
}
// Within the bin: the threshold key and how many keys equal to it are chosen. `low` counts the bin's keys by their 5 low
// bits; called by one warp. All keys are chosen when there are fewer than k: then thr = 0.
__device__ __forceinline__ void find_threshold(uint32_t low, uint32_t bin, uint32_t above, uint32_t k, uint32_t& thr, uint32_t& need) {
    int lane = threadIdx.x & 31;
    uint32_t suffix = low;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
        uint32_t a = __shfl_down_sync(FULL, suffix, o);
        if (lane + o < 32) suffix += a;
    }
    uint32_t ok = __ballot_sync(FULL, above + suffix >= k);
    int l = ok ? 31 - __clz(ok) : 0;
    uint32_t ge = __shfl_sync(FULL, suffix, l), at = __shfl_sync(FULL, low, l);
    thr = ok ? bin << 5 | (uint32_t)l : 0;
    need = ok ? k - (above + ge - at) : 0;
}

extern "C" __global__ void __launch_bounds__(1024) topk_rows(const uint16_t* keys, const int2* spans, const int32_t* blocks, int32_t* out, int n, int64_t ld,
                                                             int k, int B, int block) {
    __shared__ uint32_t hist[2048], low[32], found[2], thr_s, need_s, chosen_s;
    __shared__ uint64_t scratch[32];
    int t = blockIdx.x, at = threadIdx.x * 32;
    uint32_t v[16];
    load_keys(v, keys + t * ld, at, n);
    for (int i = threadIdx.x; i < 2048; i += 1024) hist[i] = 0;
    if (threadIdx.x < 32) low[threadIdx.x] = 0;
    __syncthreads();
    if (at < n) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            uint32_t key = KEY(v, i);
            if (key) atomicAdd(&hist[key >> 5], 1);
        }
    }
    __syncthreads();
    find_bin(hist, (uint32_t)k, found, scratch);
    uint32_t bin = found[0];
    if (at < n) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            uint32_t key = KEY(v, i);
            if (key && key >> 5 == bin) atomicAdd(&low[key & 31], 1);
        }
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        uint32_t thr, need;
        find_threshold(low[threadIdx.x], bin, found[1], (uint32_t)k, thr, need);
        if (threadIdx.x == 0) { thr_s = thr; need_s = need; }
    }
    __syncthreads();
    uint32_t thr = thr_s, need_eq = need_s;
    uint64_t mine = 0;
    if (at < n) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            uint32_t key = KEY(v, i);
            mine += (uint64_t)(key > thr) << 32 | (key == thr);
        }
    }
    uint64_t before = exclusive(mine, scratch);
    int32_t* row = out + (int64_t)t * k;
    if (mine) emit(v, at, thr, need_eq, (uint32_t)(before >> 32), (uint32_t)before, row, t, spans, blocks, B, block);
    if (threadIdx.x == 1023) chosen_s = thr ? (uint32_t)k : (uint32_t)((before + mine) >> 32);
    __syncthreads();
    for (int i = chosen_s + threadIdx.x; i < k; i += blockDim.x) row[i] = -1;
}

// ---- rows longer than one block holds ---------------------------------------------------------------------
// The digit is 11 + 5 bits: bf16 scores share few exponents, and 256 bins would be a handful of hot counters.
// Adds a part's keys to the row's histogram.
__device__ __forceinline__ void add_to_hist(const uint32_t (&v)[16], uint32_t* g) {
    __shared__ uint32_t h[2048];
    for (int i = threadIdx.x; i < 2048; i += 256) h[i] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        uint32_t key = KEY(v, i);
        if (key) atomicAdd(&h[key >> 5], 1);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 2048; i += 256)
        if (h[i]) atomicAdd(&g[i], h[i]);
}
// A part's keys in bins above `bin`, then those in it by their low bits.
__device__ __forceinline__ void count_part(const uint32_t (&v)[16], uint32_t bin, uint32_t* p) {
    __shared__ uint32_t low[32], gt_total;
    if (threadIdx.x < 32) low[threadIdx.x] = 0;
    if (threadIdx.x == 0) gt_total = 0;
    __syncthreads();
    uint32_t gt = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        uint32_t key = KEY(v, i);
        gt += key && key >> 5 > bin;
        if (key && key >> 5 == bin) atomicAdd(&low[key & 31], 1);
    }
    gt = __reduce_add_sync(FULL, gt);
    if ((threadIdx.x & 31) == 0) atomicAdd(&gt_total, gt);
    __syncthreads();
    if (threadIdx.x < 32) p[1 + threadIdx.x] = low[threadIdx.x];
    if (threadIdx.x == 0) p[0] = gt_total;
}
// What the counts of all parts (`pt`) leave to this one.
__device__ __forceinline__ void write_part(const uint32_t (&v)[16], int at, uint32_t bin, uint32_t above, const uint32_t* pt, const int2* spans, const int32_t* blocks,
                                           int32_t* out, int t, int k, int B, int block, uint64_t* scratch) {
    __shared__ uint32_t thr_s, need_s, chosen_s, gt_s, eq_s, all[8][32], earlier[8][32], higher[8];
    int parts = gridDim.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    // Of all parts, and of those before this one, the bin's keys by their low bits; of the latter also the keys of higher bins.
    uint32_t s = 0, e = 0, g = 0;
    for (int p = warp; p < parts; p += 8) {
        uint32_t c = pt[p * 33 + 1 + lane];
        s += c;
        if (p < (int)blockIdx.x) { e += c; g += pt[p * 33]; }
    }
    all[warp][lane] = s;
    earlier[warp][lane] = e;
    if (lane == 0) higher[warp] = g;
    __syncthreads();
    if (warp == 0) {
        s = 0; e = 0; g = 0;
        for (int w = 0; w < 8; ++w) { s += all[w][lane]; e += earlier[w][lane]; g += higher[w]; }
        uint32_t thr, need, key = bin << 5 | (uint32_t)lane;
        find_threshold(s, bin, above, (uint32_t)k, thr, need);
        // Keys above and at the threshold in earlier parts; without a threshold it is 0, and so is the bin.
        uint32_t gt = g + __reduce_add_sync(FULL, key > thr ? e : 0), eq = __reduce_add_sync(FULL, key == thr ? e : 0);
        if (lane == 0) { thr_s = thr; need_s = need; gt_s = gt; eq_s = eq; }
    }
    __syncthreads();
    uint32_t thr = thr_s, need_eq = need_s;
    uint64_t mine = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        uint32_t key = KEY(v, i);
        mine += (uint64_t)(key > thr) << 32 | (key == thr);
    }
    uint64_t before = exclusive(mine, scratch);
    int32_t* row = out + (int64_t)t * k;
    if (mine) emit(v, at, thr, need_eq, gt_s + (uint32_t)(before >> 32), eq_s + (uint32_t)before, row, t, spans, blocks, B, block);
    if (blockIdx.x == gridDim.x - 1) {
        if (threadIdx.x == 255) chosen_s = thr ? (uint32_t)k : gt_s + (uint32_t)((before + mine) >> 32);
        __syncthreads();
        for (int i = chosen_s + threadIdx.x; i < k; i += 256) row[i] = -1;
    }
}
// The histogram is not read any more: it is left zero for the next call.
__device__ __forceinline__ void clear_hist(uint32_t* hist) {
    for (int i = blockIdx.x * 256 + threadIdx.x; i < 2048; i += gridDim.x * 256) hist[i] = 0;
}

extern "C" __global__ void __launch_bounds__(256) topk_part_hist(const uint16_t* keys, uint32_t* hist, int n, int64_t ld) {
    uint32_t v[16];
    load_keys(v, keys + blockIdx.y * ld, blockIdx.x * 8192 + threadIdx.x * 32, n);
    add_to_hist(v, hist + (int64_t)blockIdx.y * 2048);
}

// header[0] = threshold bin (0 when fewer than k keys are non-zero), header[1] = keys in higher bins.
extern "C" __global__ void __launch_bounds__(256) topk_part_count(const uint16_t* keys, const uint32_t* hist, uint32_t* part, uint32_t* header, int n, int64_t ld,
                                                                  int k) {
    __shared__ uint64_t scratch[32];
    __shared__ uint32_t found[2];
    int t = blockIdx.y;
    uint32_t v[16];
    load_keys(v, keys + t * ld, blockIdx.x * 8192 + threadIdx.x * 32, n);
    find_bin(hist + (int64_t)t * 2048, (uint32_t)k, found, scratch);
    count_part(v, found[0], part + ((int64_t)t * gridDim.x + blockIdx.x) * 33);
    if (threadIdx.x == 0 && blockIdx.x == 0) { header[2 * t] = found[0]; header[2 * t + 1] = found[1]; }
}

extern "C" __global__ void __launch_bounds__(256) topk_part_write(const uint16_t* keys, uint32_t* hist, const uint32_t* part, const uint32_t* header,
                                                                  const int2* spans, const int32_t* blocks, int32_t* out, int n, int64_t ld, int k, int B,
                                                                  int block) {
    __shared__ uint64_t scratch[32];
    int t = blockIdx.y, at = blockIdx.x * 8192 + threadIdx.x * 32;
    uint32_t v[16];
    load_keys(v, keys + t * ld, at, n);
    write_part(v, at, header[2 * t], header[2 * t + 1], part + (int64_t)t * gridDim.x * 33, spans, blocks, out, t, k, B, block, scratch);
    clear_hist(hist + (int64_t)t * 2048);
}

// The three at once, their keys kept in registers; launched cooperatively. counted 1: the histogram is there already.
extern "C" __global__ void __launch_bounds__(256, 2) topk_part_once(const uint16_t* keys, uint32_t* hist, uint32_t* part, uint32_t* counter, const int2* spans,
                                                                 const int32_t* blocks, int32_t* out, int n, int64_t ld, int k, int B, int block,
                                                                 int counted) {
    __shared__ uint64_t scratch[32];
    __shared__ uint32_t found[2];
    int t = blockIdx.y, at = blockIdx.x * 8192 + threadIdx.x * 32;
    uint32_t v[16], grid = gridDim.x * gridDim.y, *own = hist + (int64_t)t * 2048, *counts = part + (int64_t)t * gridDim.x * 33;
    load_keys(v, keys + t * ld, at, n);
    if (!counted) {
        add_to_hist(v, own);
        grid_barrier(counter, grid);
    }
    find_bin(own, (uint32_t)k, found, scratch);
    count_part(v, found[0], counts + blockIdx.x * 33);
    grid_barrier(counter, grid);
    write_part(v, at, found[0], found[1], counts, spans, blocks, out, t, k, B, block, scratch);
    clear_hist(own);
}
