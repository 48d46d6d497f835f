// fp8_few: y = x W^T with e4m3 weights and up to 16 quantised tokens, on Hopper: codes stay codes up to the registers that feed the
// tensor core.
//
// Maths    as fp8_linear
// Layout   xc [M, K] e4m3 codes and xs [M, K/32] e8m0 (act_quant), w [N, K] u8, s [ceil(N/32), K/32] u8, y [M, N] bf16
// Grid     ceil(N/128) * KS blocks in clusters of KS, block 256; suffix _kA_mB: A blocks split K, up to B tokens.
//          Dynamic shared memory, with g = 4*ceil(ceil(K/128)/KS) groups: 4*18432 + g*(36*B + 16) + max(128, 16*B)
// Numerics common/few_sm90.cuh; the KS parts are added in order
// Checked  tests_cuda/check.cu
#include "../common/few_sm90.cuh"

constexpr int NS = 4;

__device__ __forceinline__ float4 load_cluster(uint32_t addr, uint32_t rank) {
    uint32_t remote;
    float4 v;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(addr), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(remote));
    return v;
}
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

template <int KS, int TOK>
__device__ __forceinline__ void few(const uint8_t* xc, const uint8_t* xs, const uint8_t* w, const uint8_t* s, bf16* y, int M, int N, int K) {
    extern __shared__ __align__(128) uint8_t smem[];
    int tid = threadIdx.x, row0 = blockIdx.x / KS * 128, rank = blockIdx.x % KS, G = K >> 5;
    int total = (K + 127) >> 7, per = (total + KS - 1) / KS, first = min(rank * per, total), count = min(per, total - first);
    Tokens<TOK> x(smem + NS * FEW_STAGE, per * 4);
    float* sw = x.sx + TOK * x.ld;  // [4][gp]
    Segments r;
    r.row_bytes = K;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        r.w[i] = w + (int64_t)(row0 + i * 32) * K;
        r.live[i] = max(0, min(32, N - row0 - i * 32));
    }
    // The second warpgroup also brings the weight's scales; the first of them are asked for ahead of the weights.
    auto scale = [&](int i) {
        int row = min(row0 + 32 * (i / x.gp), N - 1) >> 5, gg = first * 4 + i % x.gp;
        return i < 4 * x.gp && gg < G ? (uint32_t)s[(int64_t)row * G + gg] : 0u;
    };
    auto put_scale = [&](int i, uint32_t e) {
        if (i < 4 * x.gp) sw[i] = first * 4 + i % x.gp < G ? e8m0_to_f32(e) : 0.0f;
    };
    int i0 = tid - 128;
    uint32_t e0 = 0, e1 = 0;
    if (tid >= 128) {
        e0 = scale(i0);
        e1 = scale(i0 + 128);
    }
    few_start<NS>(r, smem, first, count, (K & 127) || row0 + 128 > N, [&] { x.load(xc, xs, K, first * 4, M, [](int m) { return (int64_t)m; }); });
    if (tid >= 128) {
        put_scale(i0, e0);
        put_scale(i0 + 128, e1);
        for (int i = i0 + 256; i < 4 * x.gp; i += 128) put_scale(i, scale(i));
    }
    float acc[TOK == 16 ? 8 : 4] = {};
    few_multiply<TOK, NS>(x, r, smem, sw, first, count, acc);
    // The ring's place is free once everybody is through with its last stage. part [TOK][LD], so that four rows are one load.
    constexpr int LD = 132;
    float* part = reinterpret_cast<float*>(smem);
    int lane = tid & 31, lr = (tid >> 5) * 16 + (lane >> 2), lm = 2 * (lane & 3);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < (TOK == 16 ? 8 : 4); ++i) {
        int m = (i >> 2) * 8 + lm + (i & 1);
        if (m < TOK) part[m * LD + lr + (i >> 1 & 1) * 8] = acc[i];
    }
    if (KS > 1) cluster_barrier();
    else __syncthreads();
    // Four rows of a token a thread, whole warps dealt to the blocks of the cluster.
    for (int i = (rank + tid / 32 * KS) * 32 + (tid & 31); i < 32 * min(TOK, M); i += 256 * KS) {
        int row = (i & 31) * 4, m = i >> 5;
        float4 sum = make_float4(0, 0, 0, 0);
        if (KS == 1) {
            sum = *reinterpret_cast<const float4*>(part + m * LD + row);
        } else {
#pragma unroll
            for (int k = 0; k < KS; ++k) {
                float4 v = load_cluster(smem_addr(part + m * LD + row), k);
                sum.x += v.x; sum.y += v.y; sum.z += v.z; sum.w += v.w;
            }
        }
        bf16* to = y + (int64_t)m * N + row0 + row;
        uint2 packed = make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
        if ((N & 3) == 0) {
            if (row0 + row < N) *reinterpret_cast<uint2*>(to) = packed;
        } else {
            const float v[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (row0 + row + j < N) to[j] = __float2bfloat16_rn(v[j]);
        }
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
