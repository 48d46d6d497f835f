// fp8_few: y = x W^T with e4m3 weights and up to 16 quantised tokens, on Hopper: the weight bytes go from memory to the
// tensor core as they are.
//
// Maths    as fp8_linear
// Layout   xc [M, K] e4m3 codes and xs [M, K/32] e8m0 (act_quant), w [N, K] u8, s [ceil(N/32), K/32] u8, y [M, N] bf16
// Grid     (ceil(N/64) * KS), clusters of KS, block 128; suffix _kA_mB: KS = A blocks split K, up to B tokens.
//          Dynamic shared memory few8_smem(K) = 6*9216 + G*(32*B + 4*B + 8) with G = 4*ceil(ceil(K/128)/KS) groups
// Numerics the tensor core sums the 32 products of a group (about 14 bits below the largest), each sum is scaled and added in f32,
//          as the reference's kernel does; the KS parts are added in order
// Checked  tests_cuda/check.cu
#include "../common/wgmma.cuh"

// 64 rows of 128 bytes and one more 16-byte unit, so that eight rows start in eight different bank groups.
constexpr int STAGES = 6, ROW = 144, STAGE = 64 * ROW;

__device__ __forceinline__ float load_cluster(uint32_t addr, uint32_t rank) {
    uint32_t remote;
    float v;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(addr), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(remote));
    return v;
}
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

template <int KS, int MT>
__device__ __forceinline__ void few(const uint8_t* xc, const uint8_t* xs, const uint8_t* w, const uint8_t* s, bf16* y, int M, int N, int K) {
    constexpr int TOK = 8 * MT;
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ float part[64][TOK + 1];
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3;
    int row0 = blockIdx.x / KS * 64, rank = blockIdx.x % KS, G = K >> 5;
    int total = (K + 127) >> 7, per = (total + KS - 1) / KS, first = min(rank * per, total), count = min(per, total - first), groups = per * 4;
    uint8_t* b = smem + STAGES * STAGE;                        // [group][half][TOK][16]
    float* sx = reinterpret_cast<float*>(b + groups * 32 * TOK);  // [TOK][groups]
    float* sw = sx + groups * TOK;                             // [2][groups]
    uint32_t ring = smem_addr(smem), b0 = smem_addr(b);

    auto load = [&](int st) {
        if (st < count) {
            int slot = st % STAGES, k = (first + st) * 128 + (tid & 7) * 16;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int r = (tid >> 3) + 16 * i;
                uint32_t at = slot * STAGE + r * ROW + (tid & 7) * 16;
                if (row0 + r < N && k < K) cp_async16(ring + at, w + (int64_t)(row0 + r) * K + k);
                else *reinterpret_cast<uint4*>(smem + at) = make_uint4(0, 0, 0, 0);
            }
        }
        cp_async_commit();
    };
    for (int i = 0; i < STAGES - 1; ++i) load(i);
    for (int i = tid; i < groups * TOK; i += 128) {
        int m = i / groups, gr = i % groups, gg = first * 4 + gr;
        bool live = m < M && gg < G;
        const uint4* p = reinterpret_cast<const uint4*>(xc + (int64_t)m * K + gg * 32);
        uint8_t* at = b + gr * 32 * TOK + m * 16;
        *reinterpret_cast<uint4*>(at) = live ? p[0] : make_uint4(0, 0, 0, 0);
        *reinterpret_cast<uint4*>(at + 16 * TOK) = live ? p[1] : make_uint4(0, 0, 0, 0);
        sx[i] = live ? e8m0_to_f32(xs[(int64_t)m * G + gg]) : 0.0f;
    }
    for (int i = tid; i < groups * 2; i += 128) {
        int r = min(row0 + 32 * (i / groups), N - 1) >> 5, gg = first * 4 + i % groups;
        sw[i] = gg < G ? e8m0_to_f32(s[(int64_t)r * G + gg]) : 0.0f;
    }
    fence_async_shared();
    float acc[4 * MT], d[4][4 * MT];
#pragma unroll
    for (int i = 0; i < 4 * MT; ++i) acc[i] = 0.0f;
    auto finish = [&](int st) {
        float4 f = *reinterpret_cast<const float4*>(sw + (warp >> 1) * groups + st * 4);
#pragma unroll
        for (int t = 0; t < MT; ++t) {
            float4 x0 = *reinterpret_cast<const float4*>(sx + (8 * t + 2 * q) * groups + st * 4), x1 = *reinterpret_cast<const float4*>(sx + (8 * t + 2 * q + 1) * groups + st * 4);
            float a0[4] = {f.x * x0.x, f.y * x0.y, f.z * x0.z, f.w * x0.w}, a1[4] = {f.x * x1.x, f.y * x1.y, f.z * x1.z, f.w * x1.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                acc[4 * t] += d[i][4 * t] * a0[i]; acc[4 * t + 1] += d[i][4 * t + 1] * a1[i];
                acc[4 * t + 2] += d[i][4 * t + 2] * a0[i]; acc[4 * t + 3] += d[i][4 * t + 3] * a1[i];
            }
        }
    };
    for (int st = 0; st < count; ++st) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        // Everyone has waited for the products of the stage before: its slot is free.
        load(st + STAGES - 1);
        // Through registers and not from shared memory: copies by cp.async would need a fence that waits for those in flight.
        uint32_t a[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) ldmatrix_x4(a[i], ring + st % STAGES * STAGE + (warp * 16 + (lane & 15)) * ROW + (lane >> 4) * 16 + i * 32);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_e4m3(d[i], a[i], desc_plain(b0 + (st * 4 + i) * 32 * TOK, 16 * TOK, 128));
        wgmma_commit();
        wgmma_wait<0>();
        finish(st);
    }
#pragma unroll
    for (int t = 0; t < MT; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) part[warp * 16 + g + (i >> 1) * 8][8 * t + 2 * q + (i & 1)] = acc[4 * t + i];
    if (KS > 1) cluster_barrier();
    else __syncthreads();
    constexpr int ROWS = 64 / KS;
    for (int i = tid; i < ROWS * TOK; i += 128) {
        int r = rank * ROWS + i % ROWS, m = i / ROWS;
        float sum = 0.0f;
        if (KS == 1) {
            sum = part[r][m];
        } else {
#pragma unroll
            for (int k = 0; k < KS; ++k) sum += load_cluster(smem_addr(&part[r][m]), k);
        }
        if (row0 + r < N && m < M) y[(int64_t)m * N + row0 + r] = __float2bfloat16_rn(sum);
    }
    if (KS > 1) cluster_barrier();  // no block leaves while another may read its parts
}

#define FEW(KS, MT, TOK)                                                                                                                   \
    extern "C" __global__ void __cluster_dims__(KS, 1, 1) __launch_bounds__(128) fp8_few_k##KS##_m##TOK(                                    \
        const uint8_t* xc, const uint8_t* xs, const uint8_t* w, const uint8_t* s, bf16* y, int M, int N, int K) {                          \
        few<KS, MT>(xc, xs, w, s, y, M, N, K);                                                                                             \
    }
FEW(1, 1, 8)
FEW(2, 1, 8)
FEW(4, 1, 8)
FEW(8, 1, 8)
FEW(1, 2, 16)
FEW(2, 2, 16)
FEW(4, 2, 16)
FEW(8, 2, 16)
