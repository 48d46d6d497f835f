// topk_gate: routing weights and experts from the gate's logits.
//
// Maths    s = score(logit / temp); pick the k largest s + bias (ties: lower expert); w = s[pick];
//          w /= sum(w) + 1e-20 if norm and k > 1; w *= route_scale. score: 0 softmax, 1 sigmoid, 2 sqrt(softplus)
// Layout   logits [T, E] f32, bias, bias_vl [E] f32 (bias_vl and image_mask [T] u8 may be null), weights [T, k] f32,
//          experts [T, k] u32 in selection order. chosen [T, k] u32 or null: replays given experts with own weights
// Grid     one block of 128 per token, 4*E bytes of dynamic shared memory; E <= 1024, k <= 32
// Numerics f32; softplus is x above 20, log1p(exp x) below, as torch; precise expf: one ulp can flip a route
// Checked  tests_cuda/check.cu, crates/moe/tests
#include "../common/util.cuh"

__device__ __forceinline__ float score_of(float x, int func) {
    if (func == 1) return 1.0f / (1.0f + expf(-x));
    return sqrtf(x > 20.0f ? x : log1pf(expf(x)));
}

// Numbers as unsigned keys in the same order; NaN sorts above everything, as torch's topk has it.
__device__ __forceinline__ uint32_t ordered(float v) {
    uint32_t u = __float_as_uint(v == 0.0f ? 0.0f : v);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

extern "C" __global__ void __launch_bounds__(128) topk_gate(const float* logits, const float* bias, const float* bias_vl, const uint8_t* image_mask,
                                                            const uint32_t* chosen, float* weights, uint32_t* experts, int T, int E, int k, int func,
                                                            float temp, int norm, float route_scale) {
    constexpr int PER = 32;
    extern __shared__ float s[];
    __shared__ float scratch[32];
    int t = blockIdx.x, lane = threadIdx.x & 31;
    const float* row = logits + (int64_t)t * E;
    const float* b = image_mask && bias_vl && image_mask[t] ? bias_vl : bias;
    if (func == 0) {
        float m = -INFINITY, sum = 0.0f;
        for (int e = threadIdx.x; e < E; e += 128) m = fmaxf(m, row[e] / temp);
        m = warp_max(m);
        if (lane == 0) scratch[threadIdx.x >> 5] = m;
        __syncthreads();
        m = fmaxf(fmaxf(scratch[0], scratch[1]), fmaxf(scratch[2], scratch[3]));
        for (int e = threadIdx.x; e < E; e += 128) {
            s[e] = expf(row[e] / temp - m);
            sum += s[e];
        }
        sum = block_sum(sum, scratch);
        for (int e = threadIdx.x; e < E; e += 128) s[e] /= sum;
    } else {
#pragma unroll 1
        for (int e = threadIdx.x; e < E; e += 128) s[e] = score_of(row[e] / temp, func);
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    uint32_t key[PER];
    int n = (E + 31) >> 5;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        int e = i * 32 + lane;
        // Real keys are at least ordered(-inf) = 0x007fffff: 0 marks a taken or missing expert.
        if (i < n) key[i] = e < E && !chosen ? ordered(s[e] + b[e]) : 0;
    }
    uint32_t mine_e = 0;
    float mine_w = 0.0f;
    for (int j = 0; j < k; ++j) {
        uint32_t pick;
        if (chosen) {
            pick = min(chosen[(int64_t)t * k + j], (uint32_t)E - 1);
        } else {
            uint32_t best = 0, at = 0xffffffffu;
#pragma unroll
            for (int i = 0; i < PER; ++i)
                if (i < n && key[i] > best) { best = key[i]; at = i * 32 + lane; }
            uint32_t top = __reduce_max_sync(FULL, best);
            pick = __reduce_min_sync(FULL, best == top ? at : 0xffffffffu);
            if (pick >= (uint32_t)E) pick = 0;
#pragma unroll
            for (int i = 0; i < PER; ++i)
                if (i < n && pick == (uint32_t)(i * 32 + lane)) key[i] = 0;
        }
        if (lane == j) { mine_w = s[pick]; mine_e = pick; }
    }
    if (norm && k > 1) {
        // Summed in selection order by every lane alike.
        float sum = 0.0f;
        for (int j = 0; j < k; ++j) sum += __shfl_sync(FULL, mine_w, j);
        mine_w /= sum + 1e-20f;
    }
    if (lane < k) {
        weights[(int64_t)t * k + lane] = mine_w * route_scale;
        experts[(int64_t)t * k + lane] = mine_e;
    }
}
