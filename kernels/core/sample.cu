// sample: a token drawn from a row of logits, with the numbers of the sequence's own generator: the host sampler's choice.
//
// Maths    p = f32(exp((l - max) / t)); kept are p > 0 among the top_k largest, then the fewest of the largest whose p sum to top_p of those, then
//          p >= min_p (-0 is below 0 where equals are told apart); in token order each kept one gets the next u of the generator, and the largest f32(p / sum) / -ln(1 - u) is chosen, the first
//          among equals
// Layout   logits [R, vocab] f32, best [R] u32 (argmax's codes), rows [R] SampleRow; counts [R, 2048] u32 and mass [R, 2048] u64 zeroed; limits
//          [R, 2] u32; part_n [R, parts] u32, part_p [R, parts] f64, part_at [R, parts, 2] u64; ticket [R] u32 zeroed; out [R, 2] u32: the
//          code and how many numbers were drawn. A row whose code is no token keeps it
// Grid     sample_bins (parts, R), sample_limit (1, R) of 1024, sample_count (parts, R), sample_draw (parts, R); block 256; parts = ceil(vocab/2048).
//          sample_bins and sample_limit only where a row has top_k or top_p; without them `limits` is null
// Numerics exp and ln in f64, rounded once; sums of p for top_p in units of 2^-44 of the largest. A row of more than LIST equals or near equals at
//          its limit gives the code 2^32 - 2: the host decides
// Checked  gpu_check correctness (room `sampling`), against the host's sampler
#include "../common/sample.cuh"

#define PART 2048
#define BINS 2048
#define LIST 2048
#define UNDECIDED 0xfffffffeu

typedef unsigned __int128 u128;

struct SampleRow {
    uint64_t state_lo, state_hi, inc_lo, inc_hi;
    float temperature, top_p, min_p;
    uint32_t top_k;
};

__device__ __forceinline__ float weight(float logit, float max, float temperature) {
    return (float)exp((double)__fdiv_rn(__fsub_rn(logit, max), temperature));
}
// Falls with the logit: bin 0 holds the largest. A quarter of a 16th of a nat at temperature 1.
__device__ __forceinline__ int bin_of(float logit, float max, float temperature) {
    float d = __fdiv_rn(__fsub_rn(max, logit), temperature) * 64.0f;
    return d < (float)(BINS - 1) ? (int)d : BINS - 1;
}
// A weight of at most 1 as an integer, so that sums do not depend on their order.
__device__ __forceinline__ unsigned long long mass_of(float p) { return (unsigned long long)((double)p * 0x1p44); }
// Whether a token lies within (value, index), the last one kept.
__device__ __forceinline__ bool within(float logit, uint32_t index, const uint32_t* limit) {
    if (!limit) return true;
    uint32_t v = total_order(logit);
    return v > limit[0] || (v == limit[0] && index <= limit[1]);
}

extern "C" __global__ void __launch_bounds__(256) sample_bins(const float* logits, const uint32_t* best, const SampleRow* rows, uint32_t* counts,
                                                              unsigned long long* mass, int vocab) {
    __shared__ uint32_t n[BINS];
    __shared__ unsigned long long m[BINS];
    int r = blockIdx.y;
    if (best[r] & NO_TOKEN) return;
    const float* row = logits + (int64_t)r * vocab;
    float max = row[best[r]], t = rows[r].temperature;
    for (int b = threadIdx.x; b < BINS; b += 256) n[b] = 0, m[b] = 0;
    __syncthreads();
    int end = min(vocab, (blockIdx.x + 1) * PART);
    for (int i = blockIdx.x * PART + threadIdx.x; i < end; i += 256) {
        int b = bin_of(row[i], max, t);
        atomicAdd(n + b, 1u);
        atomicAdd(m + b, mass_of(weight(row[i], max, t)));
    }
    __syncthreads();
    for (int b = threadIdx.x; b < BINS; b += 256)
        if (n[b]) {
            atomicAdd(counts + (int64_t)r * BINS + b, n[b]);
            atomicAdd(mass + (int64_t)r * BINS + b, m[b]);
        }
}

// The members of one bin in `list`, the largest first and the lower index among equals: (its place in the order, ~index).
// More than LIST of them: false.
__device__ bool gather(const float* row, int vocab, int bin, float max, float t, uint64_t* list, int* size) {
    if (threadIdx.x == 0) *size = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < vocab; i += 1024)
        if (bin_of(row[i], max, t) == bin) {
            int at = atomicAdd(size, 1);
            if (at < LIST) list[at] = (uint64_t)total_order(row[i]) << 32 | (0xffffffffu - (uint32_t)i);
        }
    __syncthreads();
    int n = *size;
    if (n > LIST) return false;
    int padded = 2;
    while (padded < n) padded *= 2;
    for (int i = n + threadIdx.x; i < padded; i += 1024) list[i] = 0;
    for (int k = 2; k <= padded; k *= 2)
        for (int j = k / 2; j; j /= 2) {
            __syncthreads();
            for (int i = threadIdx.x; i < padded; i += 1024) {
                int o = i ^ j;
                if (o > i) {
                    uint64_t a = list[i], b = list[o];
                    if (((i & k) == 0) == (a < b)) list[i] = b, list[o] = a;
                }
            }
        }
    __syncthreads();
    return true;
}

// The value that `total_order` made an integer of.
__device__ __forceinline__ float value_of(uint32_t v) { return __uint_as_float(v & 0x80000000u ? v & 0x7fffffffu : ~v); }

// The sum of what the threads before this one have; 1024 threads, `scratch` holds 32.
__device__ uint64_t sum_before(uint64_t v, uint64_t* scratch) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint64_t sum = v;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        uint64_t other = __shfl_up_sync(FULL, sum, o);
        if (lane >= o) sum += other;
    }
    __syncthreads();
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    uint64_t before = sum - v;
    for (int w = 0; w < warp; ++w) before += scratch[w];
    return before;
}

extern "C" __global__ void __launch_bounds__(1024) sample_limit(const float* logits, const uint32_t* best, const SampleRow* rows, const uint32_t* counts,
                                                                const unsigned long long* mass, uint32_t* limits, int vocab) {
    __shared__ uint64_t list[LIST], scratch[32], kept_mass, heavier;
    __shared__ int size, bin;
    __shared__ uint32_t taken;
    int r = blockIdx.x;
    uint32_t* limit = limits + 2 * r;
    if (threadIdx.x == 0) limit[0] = 0, limit[1] = 0xffffffffu;
    if (best[r] & NO_TOKEN) return;
    const float* row = logits + (int64_t)r * vocab;
    SampleRow s = rows[r];
    float max = row[best[r]];
    bool few = s.top_k > 0 && s.top_k < (uint32_t)vocab;
    // Two bins a thread, in order.
    uint64_t n[2], m[2];
    for (int j = 0; j < 2; ++j) {
        int64_t at = (int64_t)r * BINS + 2 * threadIdx.x + j;
        n[j] = counts[at];
        m[j] = mass[at];
    }
    uint64_t n_before = sum_before(n[0] + n[1], scratch), m_before = sum_before(m[0] + m[1], scratch);
    if (threadIdx.x == 1023) kept_mass = m_before + m[0] + m[1];
    __syncthreads();
    int cut = -1;
    if (few) {
        uint64_t c = n_before, sum = m_before;
        for (int j = 0; j < 2; ++j) {
            if (c < s.top_k && s.top_k <= c + n[j]) bin = 2 * threadIdx.x + j, taken = s.top_k - (uint32_t)c, kept_mass = sum;
            c += n[j];
            sum += m[j];
        }
        __syncthreads();
        cut = bin;
        if (!gather(row, vocab, cut, max, s.temperature, list, &size)) {
            if (threadIdx.x == 0) limit[0] = UNDECIDED;
            return;
        }
        if (threadIdx.x == 0) {
            for (uint32_t j = 0; j < taken; ++j) kept_mass += mass_of(weight(value_of((uint32_t)(list[j] >> 32)), max, s.temperature));
            uint64_t last = list[taken - 1];
            limit[0] = (uint32_t)(last >> 32);
            limit[1] = 0xffffffffu - (uint32_t)last;
        }
        __syncthreads();
    }
    if (!(s.top_p < 1.0f)) return;
    uint64_t enough = (uint64_t)ceil((double)kept_mass * (double)s.top_p), sum = m_before;
    for (int j = 0; j < 2; ++j) {
        if (sum < enough && enough <= sum + m[j]) bin = 2 * threadIdx.x + j, heavier = sum;
        sum += m[j];
    }
    __syncthreads();
    if (bin != cut && !gather(row, vocab, bin, max, s.temperature, list, &size)) {
        if (threadIdx.x == 0) limit[0] = UNDECIDED;
        return;
    }
    if (threadIdx.x == 0) {
        uint64_t sum = heavier;
        int end = bin == cut ? (int)taken : size;
        for (int j = 0; j < end; ++j) {
            sum += mass_of(weight(value_of((uint32_t)(list[j] >> 32)), max, s.temperature));
            if (sum >= enough || j == end - 1) {
                limit[0] = (uint32_t)(list[j] >> 32);
                limit[1] = 0xffffffffu - (uint32_t)list[j];
                break;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) sample_count(const float* logits, const uint32_t* best, const SampleRow* rows, const uint32_t* limits,
                                                               uint32_t* part_n, double* part_p, int vocab) {
    __shared__ double scratch[32];
    int r = blockIdx.y, at = r * gridDim.x + blockIdx.x;
    if (best[r] & NO_TOKEN) return;
    const float* row = logits + (int64_t)r * vocab;
    const uint32_t* limit = limits ? limits + 2 * r : nullptr;
    SampleRow s = rows[r];
    float max = row[best[r]];
    double n = 0, sum = 0;
    int end = min(vocab, (blockIdx.x + 1) * PART);
    for (int i = blockIdx.x * PART + threadIdx.x; i < end; i += 256) {
        float p = weight(row[i], max, s.temperature);
        if (p > 0.0f && p >= s.min_p && within(row[i], i, limit)) n += 1, sum += p;
    }
    n = block_sum(n, scratch);
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) part_n[at] = (uint32_t)n, part_p[at] = sum;
}

// The generator's state `steps` steps on.
__device__ __forceinline__ u128 advanced(u128 state, u128 inc, uint32_t steps) {
    u128 mul = (u128)0x2360ED051FC65DA4ull << 64 | 0x4385DF649FCCF645ull, add = inc, all_mul = 1, all_add = 0;
    for (; steps; steps >>= 1) {
        if (steps & 1) { all_mul *= mul; all_add = all_add * mul + add; }
        add = (mul + 1) * add;
        mul *= mul;
    }
    return all_mul * state + all_add;
}

// The larger score, the lower index among equals.
__device__ __forceinline__ void take_better(double& score, uint32_t& index, double other, uint32_t at) {
    if (other > score || (other == score && at < index)) score = other, index = at;
}
// The best of a block of 256, for every thread.
__device__ void best_of_block(double& score, uint32_t& index, double* scores, uint32_t* indices) {
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        double other = __shfl_xor_sync(FULL, score, o);
        uint32_t at = __shfl_xor_sync(FULL, index, o);
        take_better(score, index, other, at);
    }
    __syncthreads();
    if ((threadIdx.x & 31) == 0) scores[threadIdx.x >> 5] = score, indices[threadIdx.x >> 5] = index;
    __syncthreads();
    for (int w = 0; w < 8; ++w) take_better(score, index, scores[w], indices[w]);
}

extern "C" __global__ void __launch_bounds__(256) sample_draw(const float* logits, const uint32_t* best, const SampleRow* rows, const uint32_t* limits,
                                                              const uint32_t* part_n, const double* part_p, unsigned long long* part_at, uint32_t* ticket,
                                                              uint32_t* out, int vocab) {
    __shared__ double scratch[32], scores[8];
    __shared__ uint32_t indices[8], warp_n[8];
    __shared__ bool last;
    int r = blockIdx.y, parts = gridDim.x, part = threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const uint32_t* limit = limits ? limits + 2 * r : nullptr;
    if ((best[r] & NO_TOKEN) || (limit && limit[0] == UNDECIDED)) {
        if (threadIdx.x == 0 && blockIdx.x == 0) out[2 * r] = best[r] & NO_TOKEN ? best[r] : UNDECIDED, out[2 * r + 1] = 0;
        return;
    }
    const float* row = logits + (int64_t)r * vocab;
    SampleRow s = rows[r];
    float max = row[best[r]];
    double own = part < parts ? (double)part_n[r * parts + part] : 0.0;
    uint32_t all = (uint32_t)block_sum(own, scratch), before = (uint32_t)block_sum(part < blockIdx.x ? own : 0.0, scratch);
    double total = block_sum(part < parts ? part_p[r * parts + part] : 0.0, scratch);
    u128 state = (u128)s.state_hi << 64 | s.state_lo, inc = (u128)s.inc_hi << 64 | s.inc_lo;
    double mine = -1.0;
    uint32_t index = 0xffffffffu;
    int end = min(vocab, (blockIdx.x + 1) * PART);
    for (int start = blockIdx.x * PART; start < end; start += 256) {
        int i = start + threadIdx.x;
        float p = i < end ? weight(row[i], max, s.temperature) : 0.0f;
        bool kept = p > 0.0f && p >= s.min_p && within(row[min(i, vocab - 1)], i, limit);
        uint32_t votes = __ballot_sync(FULL, kept);
        __syncthreads();
        if (lane == 0) warp_n[warp] = __popc(votes);
        __syncthreads();
        uint32_t rank = before + __popc(votes & ((1u << lane) - 1));
        for (int w = 0; w < 8; ++w) {
            if (w < warp) rank += warp_n[w];
            before += warp_n[w];
        }
        if (!kept) continue;
        u128 x = advanced(state, inc, rank + 1);
        uint64_t folded = (uint64_t)(x >> 64) ^ (uint64_t)x;
        uint32_t turn = (uint32_t)(x >> 122);
        uint64_t word = folded >> turn | folded << ((64 - turn) & 63);
        double u = (double)(word >> 11) * 0x1p-53;
        take_better(mine, index, (double)(float)((double)p / total) / -log(1.0 - u), i);
    }
    best_of_block(mine, index, scores, indices);
    if (threadIdx.x == 0) {
        unsigned long long* at = part_at + 2 * ((int64_t)r * parts + blockIdx.x);
        at[0] = __double_as_longlong(mine);
        at[1] = index;
        __threadfence();
        last = atomicAdd(ticket + r, 1u) == parts - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    mine = -1.0;
    index = 0xffffffffu;
    if (part < parts) {
        const volatile unsigned long long* at = part_at + 2 * ((int64_t)r * parts + part);
        mine = __longlong_as_double(at[0]);
        index = (uint32_t)at[1];
    }
    best_of_block(mine, index, scores, indices);
    if (threadIdx.x == 0) out[2 * r] = index, out[2 * r + 1] = all;
}
