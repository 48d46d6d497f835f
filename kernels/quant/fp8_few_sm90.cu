// fp8_few: y = x W^T with e4m3 weights and up to 16 quantised tokens, on Hopper: the weight bytes go from memory to the
// tensor core as they are.
//
// Maths    as fp8_linear
// Layout   xc [M, K] e4m3 codes and xs [M, K/32] e8m0 (act_quant), w [N, K] u8, s [ceil(N/32), K/32] u8, y [M, N] bf16
// Grid     ceil(N/128) * KS blocks in clusters of KS, block 256; suffix _kA_mB: A blocks split K, up to B tokens.
//          Dynamic shared memory, with g = 4*ceil(ceil(K/128)/KS) groups: 4*18432 + g*(36*B + 16) + 128
// Numerics common/few_sm90.cuh; the KS parts are added in order
// Checked  tests_cuda/check.cu
#include "../common/few_sm90.cuh"

constexpr int NS = 4;

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

template <int KS, int TOK>
__device__ __forceinline__ void few(const uint8_t* xc, const uint8_t* xs, const uint8_t* w, const uint8_t* s, bf16* y, int M, int N, int K) {
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ float part[128][TOK + 1];
    int tid = threadIdx.x, row0 = blockIdx.x / KS * 128, rank = blockIdx.x % KS, G = K >> 5;
    int total = (K + 127) >> 7, per = (total + KS - 1) / KS, first = min(rank * per, total), count = min(per, total - first);
    Tokens<FP8, TOK> x(smem + NS * FEW_STAGE, per * 4);
    float* sw = x.sx + TOK * x.gp;  // [4][gp]
    Segments r;
    r.row_bytes = K;
    r.groups = G;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        r.w[i] = w + (int64_t)(row0 + i * 32) * K;
        r.s[i] = nullptr;
        r.live[i] = max(0, min(32, N - row0 - i * 32));
    }
    few_start<NS>(r, smem, first, count, (K & 127) || row0 + 128 > N, [&] {
        for (int i = tid; i < 4 * x.gp; i += 128) {
            int row = min(row0 + 32 * (i / x.gp), N - 1) >> 5, gg = first * 4 + i % x.gp;
            sw[i] = gg < G ? e8m0_to_f32(s[(int64_t)row * G + gg]) : 0.0f;
        }
        x.load(xc, xs, K, first * 4, M, [](int m) { return (int64_t)m; });
    });
    float acc[TOK == 16 ? 8 : 4] = {};
    few_multiply<FP8, TOK, NS>(x, r, smem, sw, first, count, acc);
    few_store<TOK>(acc, part);
    if (KS > 1) cluster_barrier();
    else __syncthreads();
    constexpr int ROWS = 128 / KS;
    for (int i = tid; i < ROWS * TOK; i += 256) {
        int row = rank * ROWS + i % ROWS, m = i / ROWS;
        float sum = 0.0f;
        if (KS == 1) {
            sum = part[row][m];
        } else {
#pragma unroll
            for (int k = 0; k < KS; ++k) sum += load_cluster(smem_addr(&part[row][m]), k);
        }
        if (row0 + row < N && m < M) y[(int64_t)m * N + row0 + row] = __float2bfloat16_rn(sum);
    }
    if (KS > 1) cluster_barrier();  // no block leaves while another may read its parts
}

#define FEW(KS, TOK)                                                                                                                       \
    extern "C" __global__ void __cluster_dims__(KS, 1, 1) __launch_bounds__(256, 2) fp8_few_k##KS##_m##TOK(                                 \
        const uint8_t* xc, const uint8_t* xs, const uint8_t* w, const uint8_t* s, bf16* y, int M, int N, int K) {                          \
        few<KS, TOK>(xc, xs, w, s, y, M, N, K);                                                                                            \
    }
FEW(1, 1)
FEW(2, 1)
FEW(4, 1)
FEW(8, 1)
FEW(1, 8)
FEW(2, 8)
FEW(4, 8)
FEW(8, 8)
FEW(1, 16)
FEW(2, 16)
FEW(4, 16)
FEW(8, 16)
