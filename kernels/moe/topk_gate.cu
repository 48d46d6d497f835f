// topk_gate: routing weights and experts from the gate's logits.
//
// Maths    s = score(logit / temp); pick the k largest s + bias (ties: lower expert); w = s[pick];
//          w /= sum(w) + 1e-20 if norm and k > 1; w *= route_scale. score: 0 softmax, 1 sigmoid, 2 sqrt(softplus)
// Layout   logits [T, E] f32, bias, bias_vl [E] f32 (bias_vl and image_mask [T] u8 may be null), weights [T, k] f32,
//          experts [T, k] u32 in selection order. chosen [T, k] u32 or null: replays given experts with own weights
// Grid     one warp per token, block 128 (4 tokens); E <= 1024, k <= 32
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
    int t = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (t >= T) return;
    const float* row = logits + (int64_t)t * E;
    const float* b = image_mask && bias_vl && image_mask[t] ? bias_vl : bias;
    float s[PER];
    int n = (E + 31) >> 5;
    if (func == 0) {
        float m = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < PER; ++i) {
            int e = i * 32 + lane;
            s[i] = i < n && e < E ? row[e] / temp : -INFINITY;
            m = fmaxf(m, s[i]);
        }
        m = warp_max(m);
#pragma unroll
        for (int i = 0; i < PER; ++i) {
            s[i] = i < n ? expf(s[i] - m) : 0.0f;
            sum += s[i];
        }
        sum = warp_sum(sum);
#pragma unroll
        for (int i = 0; i < PER; ++i) s[i] /= sum;
    } else {
#pragma unroll
        for (int i = 0; i < PER; ++i) {
            int e = i * 32 + lane;
            if (i < n) s[i] = e < E ? score_of(row[e] / temp, func) : 0.0f;
        }
    }
    uint32_t taken = 0, mine_e = 0;
    float mine_w = 0.0f;
    for (int j = 0; j < k; ++j) {
        uint32_t best_e = 0;
        if (chosen) {
            best_e = min(chosen[(int64_t)t * k + j], (uint32_t)E - 1);
        } else {
            uint32_t key = 0, at = 0xffffffffu;
#pragma unroll
            for (int i = 0; i < PER; ++i) {
                int e = i * 32 + lane;
                if (i < n && e < E && !(taken >> i & 1u)) {
                    uint32_t o = ordered(s[i] + b[e]);
                    if (at == 0xffffffffu || o > key) { key = o; at = e; }
                }
            }
            // Largest key, then lowest expert; a lane with nothing left must not win against a key of 0.
            uint64_t packed = at == 0xffffffffu ? 0ull : ((uint64_t)key << 32 | (0xffffffffu - at));
#pragma unroll
            for (int o = 16; o; o >>= 1) {
                uint64_t other = __shfl_xor_sync(FULL, packed, o);
                packed = other > packed ? other : packed;
            }
            best_e = 0xffffffffu - (uint32_t)packed;
        }
        float w = 0.0f;
#pragma unroll
        for (int i = 0; i < PER; ++i)
            if (i == (int)(best_e >> 5)) w = s[i];
        w = __shfl_sync(FULL, w, best_e & 31);
        if (lane == (int)(best_e & 31)) taken |= 1u << (best_e >> 5);
        if (lane == j) { mine_w = w; mine_e = best_e; }
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
