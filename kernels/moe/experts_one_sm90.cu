// experts_one: a single token's routed experts and their sum in one launch, e2m1 weights, on Hopper.
//
// Maths    as experts.cu on act_quant(x), then moe_combine: h = act_quant(bf16(weight * swiglu(bf16(W1 x), bf16(W3 x)))); y = bf16(W2 h);
//          out = bf16(sum of y in ascending order of experts + shared)
// Layout   x [dim] bf16; experts [k] u32 and weights [k] f32 straight from the gate, ids
//          first .. first + n_local being ours; w1, w3 [n_local, inter, dim/2], w2 [n_local, dim, inter/2], scales [.., K/32];
//          shared [dim] bf16 or null; out [dim] bf16; workspace: hc [k, inter] codes, hs [k, inter/32], y [k, dim] bf16,
//          counter [2 + dim/128] u32 (zero before the first use, never touched between launches)
// Grid     2 blocks an SM, launched cooperatively, block 256; dim and inter multiples of 256, k <= 32, n_local > 0; dynamic shared memory
//          4*17408 + max(dim, inter)/32 * 36
// Numerics codes are widened to f16, exactly; a group's 32 products are summed in f32, each sum is scaled and added in f32
// Checked  tests_cuda/check_moe.cuh
//
// A block walks its tasks (128 rows: 64 gate and the 64 up rows of the same units, or 128 rows of W2), `grid` apart. The weight bytes of
// both halves are one stream: stages of 256 columns of a warp's 16 rows go through a ring of its own, so that warps wait for nobody
// within a task, and while blocks wait for each other between the halves, the first stages of W2 are on their way.
// A stage's eight groups use the eight columns of the instruction's B operand: group j of the token is column j, the rest of the
// operand zero, and the products add up in one accumulator. So a lane gets just the sums it scales, two groups of two rows, and has
// codes of just one group to widen.
#include "../common/grid.cuh"
#include "../common/few_sm90.cuh"
#include "../common/swiglu.cuh"

constexpr int NS = 4, CODES = 16 * 128, STAGE = CODES + 16 * 8;

__device__ __forceinline__ void cp_async8_if(bool wanted, uint32_t dst, const void* src) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.ca.shared.global [%0], [%1], 8; }" ::"r"(dst), "l"(src), "r"((int)wanted));
}

struct Weights {
    const uint8_t *w1, *s1, *w3, *s3, *w2, *s2;
    int dim, inter;
};

// Where this lane copies from: a 16-byte unit of every fourth of its warp's 16 rows, and (half of the lanes) a row's scales.
struct Cursor {
    const uint8_t* src[4];
    const uint8_t* scale;
    int left;  // stages left of the task

    // Starts on 128 rows of local expert e.
    __device__ __forceinline__ void start(const Weights& w, bool down, int block, int64_t e) {
        int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, K = down ? w.inter : w.dim;
        int64_t row_bytes = K >> 1, row;
        const uint8_t *codes, *scales;
        if (down) {
            row = e * w.dim + block * 128 + warp * 16;
            codes = w.w2;
            scales = w.s2;
        } else {
            // Warps 0, 1 and 4, 5 have gate rows, 2, 3 and 6, 7 the up rows of the same units.
            row = e * w.inter + block * 64 + (warp >> 2) * 32 + (warp & 1) * 16;
            codes = warp & 2 ? w.w3 : w.w1;
            scales = warp & 2 ? w.s3 : w.s1;
        }
        left = K >> 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) src[i] = codes + (row + i * 4 + (lane >> 3)) * row_bytes + (lane & 7) * 16;
        scale = scales + (row + (lane & 15)) * (K >> 5);
    }
    // Copies a stage: unit c of row r to c ^ (r & 7).
    __device__ __forceinline__ void copy(uint32_t slot) {
        int lane = threadIdx.x & 31, r = lane >> 3, c = lane & 7;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            cp_async16(slot + (r + i * 4) * 128 + ((c ^ ((r + i * 4) & 7)) << 4), src[i]);
            src[i] += 128;
        }
        cp_async8_if(lane < 16, slot + CODES + lane * 8, scale);
        scale += 8;
        --left;
    }
};

// A thread's groups of a token as they were.
struct Raw {
    uint4 v[2][4];
    __device__ __forceinline__ void load(const bf16* x, int groups) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int g = threadIdx.x + i * 256;
            if (g >= groups) break;
#pragma unroll
            for (int j = 0; j < 4; ++j) v[i][j] = reinterpret_cast<const uint4*>(x)[g * 4 + j];
        }
    }
};

// The token as B operand, [group][lane of four][8], and its scales. A thread has groups tid and tid + 256.
struct Token {
    uint4 lo[2], hi[2];
    uint32_t s[2];
    // Not from L1: other blocks of this launch may have written them.
    __device__ __forceinline__ void load(const uint8_t* codes, const uint8_t* scales, int groups) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int g = threadIdx.x + i * 256;
            if (g >= groups) break;
            lo[i] = __ldcg(reinterpret_cast<const uint4*>(codes) + g * 2);
            hi[i] = __ldcg(reinterpret_cast<const uint4*>(codes) + g * 2 + 1);
            s[i] = __ldcg(scales + g);
        }
    }
    // Of bf16 values, which become codes here: a launch less.
    __device__ __forceinline__ void quantise(const Raw& raw, int groups) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if ((int)threadIdx.x + i * 256 >= groups) break;
            float v[4][8], most = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                unpack8(raw.v[i][j], v[j]);
#pragma unroll
                for (int k = 0; k < 8; ++k) most = fmaxf(most, fabsf(v[j][k]));
            }
            s[i] = fp8_scale(most);
            float inv = e8m0_inverse(s[i]);
            uint32_t w[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                w[j] = 0;
#pragma unroll
                for (int k = 0; k < 4; ++k) w[j] |= fp8_code(v[j >> 1][(j & 1) * 4 + k], inv) << (8 * k);
            }
            lo[i] = make_uint4(w[0], w[1], w[2], w[3]);
            hi[i] = make_uint4(w[4], w[5], w[6], w[7]);
        }
    }
    __device__ __forceinline__ void store(uint8_t* b, float* sx, int groups) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int g = threadIdx.x + i * 256;
            if (g >= groups) break;
            uint4 lanes[2];
            lane_codes<FP4>(lo[i], hi[i], lanes);
            uint4* at = reinterpret_cast<uint4*>(b + g * 32);
            at[0] = lanes[0];
            at[1] = lanes[1];
            sx[g] = e8m0_to_f32(s[i]) * E2M1_UNDO;
        }
    }
};

extern "C" __global__ void __launch_bounds__(256, 2) experts_one(const bf16* xs, const uint32_t* experts, const float* weights,
                                                                 const uint8_t* w1, const uint8_t* s1, const uint8_t* w3, const uint8_t* s3,
                                                                 const uint8_t* w2, const uint8_t* s2, uint8_t* hc, uint8_t* hs, bf16* y, const bf16* shared,
                                                                 bf16* out, uint32_t* counter, int dim, int inter, int k, uint32_t first, int n_local,
                                                                 float limit) {
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ float part[128];
    __shared__ int local[32], by_id[32];  // a slot's expert here, or -1; slots in ascending order of experts, then -1
    __shared__ bool last;
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3;
    int groups = max(dim, inter) >> 5;
    after_previous();
    uint8_t* b = smem + 8 * NS * STAGE;
    float* sx = reinterpret_cast<float*>(b + groups * 32);
    if (warp == 0) {
        int mine = -1;
        if (lane < k && experts[lane] - first < (uint32_t)n_local) mine = experts[lane] - first;
        local[lane] = mine;
        by_id[lane] = -1;
        __syncwarp();
        int rank = 0;
        for (int j = 0; j < k; ++j) rank += local[j] >= 0 && (local[j] < mine || (local[j] == mine && j < lane));
        if (mine >= 0) by_id[rank] = lane;
    }
    __syncthreads();
    const Weights w = {w1, s1, w3, s3, w2, s2, dim, inter};
    int grid = gridDim.x, up_blocks = inter >> 6, down_blocks = dim >> 7, ups = up_blocks * k, downs = down_blocks * k;
    // Tasks of W2 are dealt from the other end: blocks that had fewer of the first half begin. What is walked depends on sizes alone,
    // which keeps loops and descriptors uniform: a slot whose expert is absent is multiplied like the others, and left out of the sum.
    int first_down = grid - 1 - blockIdx.x;
    Cursor at;
    bool ahead_down = false, more = true;
    int ahead = blockIdx.x;
    auto settle = [&] {
        if (!ahead_down && ahead >= ups) {
            ahead_down = true;
            ahead = first_down;
        }
        more = !ahead_down || ahead < downs;
        if (more) at.start(w, ahead_down, ahead_down ? ahead % down_blocks : ahead % up_blocks, max(local[ahead_down ? ahead / down_blocks : ahead / up_blocks], 0));
    };
    uint32_t ring = smem_addr(smem) + warp * NS * STAGE;
    auto put = [&](int slot) {
        if (more) {
            at.copy(ring + slot * STAGE);
            if (at.left == 0) {
                ahead += grid;
                settle();
            }
        }
        cp_async_commit();
    };
    // The token is asked for first: behind the weights it would wait for them.
    Token x;
    {
        Raw raw;
        raw.load(xs, dim >> 5);
        settle();
        for (int i = 0; i < NS - 1; ++i) put(i);
        x.quantise(raw, dim >> 5);
    }
    x.store(b, sx, dim >> 5);
    __syncthreads();

    int slot = 0, fill = NS - 1;
    uint32_t codes = ring + (lane & 15) * 128, unit = lane >> 4, swizzle = lane & 7;
    // 1 where this lane has the codes of a stage's group j: a product keeps or clears them.
    auto mine = [&](int j) { return (uint32_t)(g == j); };
    // part = this task's 128 rows times the token, over `stages` stages.
    auto multiply = [&](int stages) {
        float acc0 = 0.0f, acc1 = 0.0f;
        for (int st = 0; st < stages; ++st) {
            cp_async_wait<NS - 2>();
            __syncwarp();
            // The stage before has been read: its slot takes the stage NS - 1 ahead.
            put(fill);
            uint32_t from = codes + slot * STAGE;
            uint2 c = *reinterpret_cast<const uint2*>(b + (st * 8 + g) * 32 + q * 8);
            uint32_t x0, x1, x2, x3;
            widen_e4m3(c.x, x0, x1);
            widen_e4m3(c.y, x2, x3);
            // Two accumulators: the chain of additions is what takes time.
            float d[2][4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32_t v[4];
                ldmatrix_x4(v, from + (((i * 2 + unit) ^ swizzle) << 4));
                // Words of rows g and g + 8 of one group, then of the next.
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    uint32_t r0[4], r1[4], keep = mine(i * 2 + j);
                    widen_e2m1(v[2 * j], r0);
                    widen_e2m1(v[2 * j + 1], r1);
                    mma_f16(d[j], r0[0], r1[0], r0[1], r1[1], x0 * keep, x1 * keep);
                    mma_f16(d[j], r0[2], r1[2], r0[3], r1[3], x2 * keep, x3 * keep);
                }
            }
            const uint8_t* sc = smem + (warp * NS + slot) * STAGE + CODES + g * 8 + 2 * q;
            uint32_t r0 = *reinterpret_cast<const uint16_t*>(sc), r1 = *reinterpret_cast<const uint16_t*>(sc + 64);
            float2 x = *reinterpret_cast<const float2*>(sx + st * 8 + 2 * q);
            // Of the two, the first has the even groups and the second the odd ones; this lane's columns are 2q and 2q + 1.
            acc0 += d[0][0] * (scale_byte(r0, 0) * x.x);
            acc0 += d[1][1] * (scale_byte(r0, 1) * x.y);
            acc1 += d[0][2] * (scale_byte(r1, 0) * x.x);
            acc1 += d[1][3] * (scale_byte(r1, 1) * x.y);
            slot = slot + 1 == NS ? 0 : slot + 1;
            fill = fill + 1 == NS ? 0 : fill + 1;
        }
        acc0 += __shfl_xor_sync(FULL, acc0, 1);
        acc1 += __shfl_xor_sync(FULL, acc1, 1);
        acc0 += __shfl_xor_sync(FULL, acc0, 2);
        acc1 += __shfl_xor_sync(FULL, acc1, 2);
        __syncthreads();  // whoever still reads the last task's
        if (q == 0) { part[warp * 16 + g] = acc0; part[warp * 16 + g + 8] = acc1; }
        __syncthreads();
    };

    for (int t = blockIdx.x; t < ups; t += grid) {
        multiply(dim >> 8);
        int slot_e = t / up_blocks;
        // A warp for 32 units: one quantisation group. All warps go through it: a branch on warps would cost the loop its uniformity.
        int half = warp & 1;
        float v = round_bf16(weights[slot_e] * swiglu_value(round_bf16(part[half * 64 + lane]), round_bf16(part[half * 64 + 32 + lane]), limit));
        uint32_t s = fp8_scale(warp_max(fabsf(v)));
        int64_t to = (int64_t)slot_e * inter + t % up_blocks * 64 + half * 32;
        if (warp < 2) hc[to + lane] = (uint8_t)fp8_code(v, e8m0_inverse(s));
        if (warp < 2 && lane == 0) hs[to >> 5] = (uint8_t)s;
    }
    grid_barrier(counter, grid);
    for (int t = first_down; t < downs; t += grid) {
        int slot_e = t / down_blocks, block = t % down_blocks, d = block * 128 + tid;
        x.load(hc + (int64_t)slot_e * inter, hs + (int64_t)slot_e * (inter >> 5), inter >> 5);
        x.store(b, sx, inter >> 5);
        __syncthreads();
        multiply(inter >> 8);
        if (tid < 128) y[(int64_t)slot_e * dim + d] = __float2bfloat16_rn(part[tid]);
        // The last slot to finish these rows adds them up, in ascending order of experts.
        __syncthreads();
        if (tid == 0) last = arrive(counter + 2 + block, k - 1) == k - 1u;
        __syncthreads();
        if (!last || tid >= 128) continue;
        float sum = 0.0f;
        for (int i0 = 0; i0 < k; i0 += 8) {
            // All slots at once, then added in their order.
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                int from = i0 + i < k ? by_id[i0 + i] : -1;
                v[i] = from >= 0 ? __bfloat162float(__ldcg(y + (int64_t)from * dim + d)) : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) sum += v[i];
        }
        if (shared) sum += __bfloat162float(shared[d]);
        out[d] = __float2bfloat16_rn(sum);
    }
}
