// topk_gate: routing weights and experts from the gate's logits.
//
// Maths    s = score(logit / temp); pick the k largest s + bias (ties: lower expert); w = s[pick];
//          w /= sum(w) + 1e-20 if norm and k > 1; w *= route_scale. score: 0 softmax, 1 sigmoid, 2 sqrt(softplus)
// Layout   logits [T, E] f32, bias, bias_vl [E] f32 (bias_vl and image_mask [T] u8 may be null), weights [T, k] f32,
//          experts [T, k] u32 in selection order. chosen [T, k] u32 or null: replays given experts with own weights
// Grid     one block of 128 per token, 8*E bytes of dynamic shared memory; E <= 1024, k <= 32
//          gate_one: the product x [dim] bf16 . w [E, dim] bf16 and the routing of one token, ceil(E/4) blocks of 128, the same shared memory;
//          workspaces logits [E] f32, counter [1] u32 (zero before the first use)
// Numerics f32; softplus is x above 20, log1p(exp x) below, as torch; precise expf: one ulp can flip a route
// Checked  tests_cuda/check.cu, crates/moe/tests
#include "../common/quantise.cuh"

__device__ __forceinline__ float score_of(float x, int func) {
    if (func == 1) return 1.0f / (1.0f + expf(-x));
    return sqrtf(x > 20.0f ? x : log1pf(expf(x)));
}

// Numbers as unsigned keys in the same order; NaN sorts above everything, as torch's topk has it.
__device__ __forceinline__ uint32_t ordered(float v) {
    uint32_t u = __float_as_uint(v == 0.0f ? 0.0f : v);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// Token t of a block of 128: `row` its E logits, `s` room for twice as many. A lane has PER experts.
template <int PER>
__device__ __forceinline__ void route_per(const float* row, float* s, const float* bias, const float* bias_vl, const uint8_t* image_mask, const uint32_t* chosen,
                                      float* weights, uint32_t* experts, int t, int E, int k, int func, float temp, int norm, float route_scale) {
    __shared__ float scratch[32];
    int lane = threadIdx.x & 31;
    const float* b = image_mask && bias_vl && image_mask[t] ? bias_vl : bias;
    uint32_t* keys = reinterpret_cast<uint32_t*>(s + E);
    if (func == 0) {
        float m = -INFINITY, sum = 0.0f;
        for (int e = threadIdx.x; e < E; e += 128) m = fmaxf(m, __ldcg(row + e) / temp);
        m = warp_max(m);
        if (lane == 0) scratch[threadIdx.x >> 5] = m;
        __syncthreads();
        m = fmaxf(fmaxf(scratch[0], scratch[1]), fmaxf(scratch[2], scratch[3]));
        for (int e = threadIdx.x; e < E; e += 128) {
            s[e] = expf(__ldcg(row + e) / temp - m);
            sum += s[e];
        }
        sum = block_sum(sum, scratch);
        for (int e = threadIdx.x; e < E; e += 128) {
            s[e] /= sum;
            keys[e] = ordered(s[e] + b[e]);
        }
    } else {
#pragma unroll 1
        for (int e = threadIdx.x; e < E; e += 128) {
            float bias_e = b[e];
            s[e] = score_of(__ldcg(row + e) / temp, func);
            keys[e] = ordered(s[e] + bias_e);
        }
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    uint32_t key[PER];
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        // Real keys are at least ordered(-inf) = 0x007fffff: 0 marks a taken or missing expert.
        int e = i * 32 + lane;
        key[i] = e < E ? keys[e] : 0;
    }
    uint32_t mine_e = 0;
    float mine_w = 0.0f;
#pragma unroll 1
    for (int j = 0; j < k; ++j) {
        uint32_t pick;
        if (chosen) {
            pick = min(chosen[(int64_t)t * k + j], (uint32_t)E - 1);
        } else {
            uint32_t best = 0, at = 0xffffffffu;
#pragma unroll
            for (int i = 0; i < PER; ++i)
                if (key[i] > best) { best = key[i]; at = i * 32 + lane; }
            uint32_t top = __reduce_max_sync(FULL, best);
            pick = __reduce_min_sync(FULL, best == top ? at : 0xffffffffu);
            if (pick >= (uint32_t)E) pick = 0;
#pragma unroll
            for (int i = 0; i < PER; ++i)
                if (pick == (uint32_t)(i * 32 + lane)) key[i] = 0;
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

__device__ __forceinline__ void route(const float* row, float* s, const float* bias, const float* bias_vl, const uint8_t* image_mask, const uint32_t* chosen,
                                      float* weights, uint32_t* experts, int t, int E, int k, int func, float temp, int norm, float route_scale) {
    // Little code: it is fetched anew in every layer.
    if (E <= 384) route_per<12>(row, s, bias, bias_vl, image_mask, chosen, weights, experts, t, E, k, func, temp, norm, route_scale);
    else route_per<32>(row, s, bias, bias_vl, image_mask, chosen, weights, experts, t, E, k, func, temp, norm, route_scale);
}

extern "C" __global__ void __launch_bounds__(128) topk_gate(const float* logits, const float* bias, const float* bias_vl, const uint8_t* image_mask,
                                                            const uint32_t* chosen, float* weights, uint32_t* experts, int T, int E, int k, int func,
                                                            float temp, int norm, float route_scale) {
    after_previous();
    extern __shared__ float s[];
    int t = blockIdx.x;
    route(logits + (int64_t)t * E, s, bias, bias_vl, image_mask, chosen, weights, experts, t, E, k, func, temp, norm, route_scale);
}

// A warp a row of the gate, four rows a block; the block that ends last routes.
extern "C" __global__ void __launch_bounds__(128) gate_one(const bf16* x, const bf16* w, const float* bias, const float* bias_vl, const uint8_t* image_mask,
                                                           float* logits, uint32_t* counter, float* weights, uint32_t* experts, int dim, int E, int k, int func,
                                                           float temp, int norm, float route_scale) {
    constexpr int AHEAD = 10;
    extern __shared__ float s[];
    __shared__ bool last;
    int lane = threadIdx.x & 31, e = blockIdx.x * 4 + (threadIdx.x >> 5), units = dim >> 3;
    const uint4 *row = reinterpret_cast<const uint4*>(w) + (int64_t)e * units, *xs = reinterpret_cast<const uint4*>(x);
    uint4 a[AHEAD];
    auto fetch = [&](int u0) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) a[i] = e < E && u0 + 32 * i < units ? load_stream(row + u0 + 32 * i) : make_uint4(0, 0, 0, 0);
    };
    fetch(lane);
    // Whichever block is last finds the bias near.
    if (threadIdx.x == 0 && blockIdx.x * 32 < E) asm volatile("prefetch.global.L2 [%0];" ::"l"(bias + blockIdx.x * 32));
    if (e < E)
        for (int u = lane + 32 * AHEAD; u < units; u += 32) asm volatile("prefetch.global.L2 [%0];" ::"l"(row + u));
    after_previous();
    if (e < E) {
        float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        for (int u0 = lane; u0 < units; u0 += 32 * AHEAD) {
            uint4 b[AHEAD];
            if (u0 > lane) fetch(u0);
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) b[i] = u0 + 32 * i < units ? xs[u0 + 32 * i] : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                float p[8], q[8];
                unpack8(a[i], p);
                unpack8(b[i], q);
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[j] += p[j] * q[j];
            }
        }
        float v = warp_sum(((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7])));
        if (lane == 0) logits[e] = v;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        // One fence for the block: it covers what the barrier above made visible to this thread.
        __threadfence();
        last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    route(logits, s, bias, bias_vl, image_mask, nullptr, weights, experts, 0, E, k, func, temp, norm, route_scale);
}
