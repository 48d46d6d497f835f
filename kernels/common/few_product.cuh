// The product of few tokens with e4m3 weights that several kernels share: fp8_few, and query_heads of attention.
//
// Grid     (ceil(N/128) * k, G) blocks of 256 in clusters of any k up to 8, which split K evenly. Dynamic shared memory for TOK tokens, with
//          g = 4*ceil(ceil(K/128)/k) groups: 16384*r + g*(36*TOK + 16) + max(128, 48*TOK), r = X::STAGES;
//          plain tokens g*(68*TOK + 16)
#pragma once
#include "cluster.cuh"
#include "few_sm90.cuh"

// `load` fills tokens of kind X for this block's groups.
template <typename X, typename Load>
__device__ __forceinline__ void few(Load load, const uint8_t* w, const uint8_t* s, bf16* y, int M, int N, int K) {
    constexpr int TOK = X::TOKENS, NS = X::STAGES;
    extern __shared__ __align__(128) uint8_t smem[];
    int tid = threadIdx.x, parts = cluster_size(), row0 = blockIdx.x / parts * 128, rank = blockIdx.x % parts, G = K >> 5;
    int total = (K + 127) >> 7, first = total * rank / parts, count = total * (rank + 1) / parts - first;
    int64_t group = blockIdx.y, ld_y = (int64_t)gridDim.y * N;
    w += group * N * K;
    s += group * ((N + 31) >> 5) * G;
    y += group * N;
    X x(smem + 8 * NS * FEW_STAGE, (total + parts - 1) / parts * 4);
    float* sw = x.sx + TOK * x.ld;  // [4][gp]
    auto scale = [&](int i) {
        int row = min(row0 + 32 * (i / x.gp), N - 1) >> 5, gg = first * 4 + i % x.gp;
        return i < 4 * x.gp && gg < G ? (uint32_t)s[(int64_t)row * G + gg] : 0u;
    };
    auto put_scale = [&](int i, uint32_t e) {
        if (i < 4 * x.gp) sw[i] = first * 4 + i % x.gp < G ? e8m0_to_f32(e) : 0.0f;
    };
    // Weights and their scales are nobody's output: they are on their way before the tokens are waited for. The first scales are asked for
    // ahead of the weights.
    uint32_t e = scale(tid);
    RowStream<NS> rows(smem, w, row0 + (tid >> 5) * 16, N, K, first);
    rows.start(count);
    put_scale(tid, e);
    for (int i = tid + 256; i < 4 * x.gp; i += 256) put_scale(i, scale(i));
    after_previous();
    load(x, group, first * 4);
    __syncthreads();
    float acc[TOK == 16 ? 8 : 4] = {};
    few_multiply<NS>(x, rows, sw, count, acc);
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
    if (parts > 1) cluster_barrier();
    else __syncthreads();
    // Four rows of a token a thread, whole warps dealt to the blocks of the cluster.
    for (int i = (rank + tid / 32 * parts) * 32 + (tid & 31); i < 32 * min(TOK, M); i += 256 * parts) {
        int row = (i & 31) * 4, m = i >> 5;
        float4 sum = make_float4(0, 0, 0, 0);
        if (parts == 1) {
            sum = *reinterpret_cast<const float4*>(part + m * LD + row);
        } else {
            float4 v[8];
#pragma unroll
            for (int k = 0; k < 8; ++k)
                if (k < parts) v[k] = load_cluster(smem_addr(part + m * LD + row), k);
#pragma unroll
            for (int k = 0; k < 8; ++k)
                if (k < parts) { sum.x += v[k].x; sum.y += v[k].y; sum.z += v[k].z; sum.w += v[k].w; }
        }
        bf16* to = y + m * ld_y + row0 + row;
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
    if (parts > 1) cluster_barrier();  // no block leaves while another may read its parts
}
