// sparse_attn_few: sparse_attn of few queries in one launch, head_dim 512, on Hopper.
//
// Maths    as sparse_attn and sparse_attn_combine: q rotated as it is read, softmax with the sink, out turned back, the step's own rows written
// Layout   as theirs, D = 512, rd a multiple of 8, at most 64: q, out [T, H, D] bf16, cos, sin [T, rd/2] f32 or null, sink [H] f32; src [T, D] bf16 or
//          null, rows [T] i32 (-1 = skip), pool [rows, D] of `kind` with scales, no written row being a listed one. A cluster takes 16 heads of a query, and
//          each of its C blocks (suffix _C) an even part of the listed entries, 48 at a time: no block needs to know how many are valid. A warp
//          gathers 64 columns of the rows, multiplies them with the same columns of q, and after the softmax over the block's rows with p: it
//          waits for its own copies alone. A block's o then goes to the blocks that own its columns, and its maxima and sums to all, straight into
//          their shared memory
//          sparse_attn_few_packed takes scopes of any RowKind and gives the same bits
// Grid     (C, T*ceil(H/16)), with src one more in y, clusters of (C, 1, 1), block 256; dynamic shared memory 101664. C = 16 is not portable: the launch
//          must allow it (cudaFuncAttributeNonPortableClusterSizeAllowed)
// Numerics p is rounded to bf16 against the running maximum of the block's tiles; exp by ex2.approx (2 ulp). Parts of o travel as f16, eight
//          values of a head scaled by one power of two (2^-12 of the largest, an eighth of what the output is rounded by); added in f32 in a fixed order
// Checked  tests_cuda/check_attention.cuh, check_packed.cuh
#include "../common/cluster.cuh"
#include "../common/wgmma.cuh"
#include "pack_row.cuh"
#include "rope.cuh"
#include "rows.cuh"
#include <cuda_fp16.h>

constexpr int D = 512, HEADS = 16, TILE = 48, WARPS = 8, SLICE = TILE * 128, LD = TILE + 8;

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Byte of a 16-byte unit of a row within a warp's columns of the tile. One unit of eight rows, and four units of two neighbouring rows, lie in different banks.
__device__ __forceinline__ uint32_t unit_at(int row, int unit) { return row * 128 + ((unit ^ ((row & 1) << 2 | (row >> 1 & 3))) << 4); }

__device__ __forceinline__ uint32_t pack_f16(float lo, float hi) {
    __half2 p = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<uint32_t*>(&p);
}
__device__ __forceinline__ float2 unpack_f16(uint32_t pair) { return __half22float2(*reinterpret_cast<__half2*>(&pair)); }

template <int C>
struct Shared {
    uint8_t kv[WARPS][SLICE];  // 64 columns a warp
    // What each block of the cluster has of this block's columns: pieces of 32 columns as lanes hold them, and the powers of two that f16 was given them in.
    uint4 got[C][16 / C * 64];
    uint32_t back[C][16 / C * 32];
    float part[WARPS][HEADS][LD];  // scores of a warp's columns
    bf16 p[HEADS][LD];
    float2 ml[C][HEADS];           // maximum and sum of each block's rows
    float corr[HEADS], sink[HEADS];
    float turn[2][32];  // cos, sin
    Row rows[TILE];
    uint32_t live[2];
    uint64_t bars[2];
};
static_assert(sizeof(Shared<8>) <= 101664 && sizeof(Shared<16>) == 101664, "what launches ask for: two blocks fit a multiprocessor");

template <int C, bool PACKED>
__device__ __forceinline__ void attend(const bf16* q, const float* cos_t, const float* sin_t, const Scopes& scopes, const float* sink, bf16* out,
                                       const bf16* src, const int32_t* rows, uint8_t* pool, uint8_t* pool_scales, int T, int H, int rd, int kind, float scale) {
    extern __shared__ __align__(128) uint8_t smem[];
    Shared<C>& sh = *reinterpret_cast<Shared<C>*>(smem);
    constexpr int PIECES = 16 / C;  // of 32 columns, that a block puts together
    int groups = (H + HEADS - 1) / HEADS, rank = blockIdx.x, t = blockIdx.y / groups, h0 = blockIdx.y % groups * HEADS;
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, qd = lane & 3;
    bool writes = t == T;  // a cluster beyond the queries'
    uint32_t bars = smem_addr(sh.bars);
    // Not by a warp that reads lists.
    if (!writes && tid == 32 * (WARPS - 1)) {
        mbar_init(bars, 1);
        mbar_init(bars + 8, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        mbar_expect(bars, sizeof(sh.ml));
        mbar_expect(bars + 8, sizeof(sh.got) + sizeof(sh.back));
    }
    if (!writes) cluster_arrive_relaxed();
    int n0 = scopes.s[0].n, n1 = n0 + scopes.s[1].n, all = n1 + scopes.s[2].n, first = all * rank / C, last = all * (rank + 1) / C;
    // Entry base + tid of the three lists, for the first 64 threads.
    auto list_at = [&](int base, int& which) {
        int j = base + tid;
        which = (j >= n0) + (j >= n1);
        const int32_t* idx = which == 0 ? scopes.s[0].idx : which == 1 ? scopes.s[1].idx : scopes.s[2].idx;
        int from = which == 0 ? 0 : which == 1 ? n0 : n1, n = which == 0 ? n0 : which == 1 ? n1 - n0 : all - n1;
        return tid < TILE && j < last ? idx + (int64_t)t * n + (j - from) : nullptr;
    };
    auto list_rows = [&](int entry, int which) {
        Row row = {nullptr, nullptr, -1};
        if (entry >= 0) row = row_of(scopes, (uint32_t)which << SCOPE_SHIFT | (uint32_t)entry, D);
        if (tid < TILE) sh.rows[tid] = row;
        uint32_t live = __ballot_sync(FULL, entry >= 0);
        if (lane == 0) sh.live[warp] = live;
    };
    int which;
    const int32_t* at = tid < 64 ? list_at(first, which) : nullptr;
    const float *cos_q = cos_t + t * (rd >> 1), *sin_q = sin_t + t * (rd >> 1);
    // Columns of k are taken in the order in which a lane finds them in two units of 16 bytes: the same for rows and heads.
    const uint4* q_at = reinterpret_cast<const uint4*>(q) + ((int64_t)t * H + h0 + g) * (D / 8) + warp * 8 + qd;
    bool a_there = h0 + g < H, b_there = h0 + g + 8 < H;
    after_previous();
    if (writes) {
        for (t = rank; t < T; t += C) {
            int64_t row = rows[t];
            if (row < 0 || tid >= 128) continue;
            if (kind != ROW_BF16) pack_row(src + (int64_t)t * D, row, pool, pool_scales, D, kind);
            else if (tid < 64) reinterpret_cast<uint4*>(pool)[row * 64 + tid] = reinterpret_cast<const uint4*>(src)[t * 64 + tid];
        }
        return;
    }
    int entry = at ? *at : -1;
    uint4 qa[2], qb[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        qa[i] = a_there ? q_at[4 * i] : make_uint4(0, 0, 0, 0);
        qb[i] = b_there ? q_at[8 * (D / 8) + 4 * i] : make_uint4(0, 0, 0, 0);
    }
    // The pair of columns that this thread ends with, in each piece.
    int from = (warp & 3) * 8 + (lane & 7), my_head = h0 + (from >> 2) + (lane >> 3 & 1) * 8, col0 = rank * PIECES * 32 + ((warp >> 2) * 2 + (lane >> 4)) * 8 + 2 * (from & 3);
    // What is wanted last is asked for now: behind the rows it would come later than they.
    if (warp == 2 && lane < HEADS) sh.sink[lane] = h0 + lane < H ? sink[h0 + lane] : 0.0f;
    if (warp == 3 && cos_t && lane < rd >> 1) { sh.turn[0][lane] = cos_q[lane]; sh.turn[1][lane] = sin_q[lane]; }
    if (tid < 64) list_rows(entry, which);
    uint32_t slice = smem_addr(sh.kv[warp]);
    uint8_t* kv = sh.kv[warp];
    float o[8][4] = {};
    float c = scale * 1.4426950408889634f, m = -1e30f, l = 0.0f;
    int i4 = lane & 15, head = 2 * warp + (lane >> 4);
    for (int base = first;; base += TILE) {
        if (base > first && tid < 64) {
            int which;
            const int32_t* at = list_at(base, which);
            list_rows(at ? *at : -1, which);
        }
        __syncthreads();
        constexpr int N = PACKED ? TILE / 8 : TILE / 4;
        uint4 w[PACKED ? N : 1];
        uint32_t s8[PACKED ? N : 1];
        if constexpr (PACKED) {
            // Four lanes a row, 16 columns each, which share a scale.
            int two = 2 * (lane & 3);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                int r = 8 * i + (lane >> 2);
                Row row = sh.rows[r];
                if (row.kind > ROW_BF16) {
                    int x = warp * 4 + (lane & 3);
                    s8[i] = row.scales[row.kind == ROW_FP4_E4M3 ? x : x >> 1];
                    if (row.kind == ROW_FP8) w[i] = reinterpret_cast<const uint4*>(row.data)[x];
                    else *reinterpret_cast<uint2*>(&w[i]) = reinterpret_cast<const uint2*>(row.data)[x];
                } else {
                    const uint8_t* p = row.kind < 0 ? reinterpret_cast<const uint8_t*>(q) : row.data + warp * 128 + two * 16;
                    cp_async16_or_zeros(slice + unit_at(r, two), p, row.kind == ROW_BF16);
                    cp_async16_or_zeros(slice + unit_at(r, two + 1), p + 16, row.kind == ROW_BF16);
                }
                if (i & 1) cp_async_commit();
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                int r = 4 * i + (lane >> 3);
                const uint8_t* row = sh.rows[r].data;
                cp_async16_or_zeros(slice + unit_at(r, lane & 7), row ? row + warp * 128 + (lane & 7) * 16 : reinterpret_cast<const uint8_t*>(q), row);
                if (i % 4 == 3) cp_async_commit();
            }
        }
        if (base == first) {
            if (warp == WARPS - 1 && cos_t) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    int p = (qd + 4 * i) * 8 - (64 - rd);
                    qa[i] = rotate8(qa[i], sh.turn[0], sh.turn[1], p);
                    qb[i] = rotate8(qb[i], sh.turn[0], sh.turn[1], p);
                }
            }
            cluster_wait();  // all blocks have begun, and their barriers are there
        }
#pragma unroll
        for (int part = 0; part < 3; ++part) {
            if constexpr (PACKED) {
#pragma unroll
                for (int i = 2 * part; i < 2 * part + 2; ++i) {
                    int r = 8 * i + (lane >> 2), k = sh.rows[r].kind;
                    if (k <= ROW_BF16) continue;
                    uint32_t pair = scale_pair(k, s8[i]);
                    uint4 a = k == ROW_FP8 ? widen8_e4m3(w[i].x, w[i].y, pair) : widen8_e2m1(w[i].x, pair);
                    uint4 b = k == ROW_FP8 ? widen8_e4m3(w[i].z, w[i].w, pair) : widen8_e2m1(w[i].y, pair);
                    // Odd rows store their second unit first: eight lanes then store to different banks.
                    int odd = r & 1, two = 2 * (lane & 3);
                    *reinterpret_cast<uint4*>(kv + unit_at(r, two + odd)) = odd ? b : a;
                    *reinterpret_cast<uint4*>(kv + unit_at(r, two + 1 - odd)) = odd ? a : b;
                }
            }
            if (part == 0) cp_async_wait<2>();
            if (part == 1) cp_async_wait<1>();
            if (part == 2) cp_async_wait<0>();
            __syncwarp();
#pragma unroll
            for (int j = 2 * part; j < 2 * part + 2; ++j) {
                float s[4] = {};
                uint4 k0 = *reinterpret_cast<uint4*>(kv + unit_at(8 * j + g, qd)), k1 = *reinterpret_cast<uint4*>(kv + unit_at(8 * j + g, qd + 4));
                mma_bf16(s, qa[0].x, qb[0].x, qa[0].y, qb[0].y, k0.x, k0.y);
                mma_bf16(s, qa[0].z, qb[0].z, qa[0].w, qb[0].w, k0.z, k0.w);
                mma_bf16(s, qa[1].x, qb[1].x, qa[1].y, qb[1].y, k1.x, k1.y);
                mma_bf16(s, qa[1].z, qb[1].z, qa[1].w, qb[1].w, k1.z, k1.w);
                *reinterpret_cast<float2*>(&sh.part[warp][g][8 * j + 2 * qd]) = make_float2(s[0], s[1]);
                *reinterpret_cast<float2*>(&sh.part[warp][g + 8][8 * j + 2 * qd]) = make_float2(s[2], s[3]);
            }
        }
        __syncthreads();
        {
            // A half warp a head, four rows a lane.
            float4 v[WARPS];
            int i = min(i4, TILE / 4 - 1);
#pragma unroll
            for (int w = 0; w < WARPS; ++w) v[w] = *reinterpret_cast<float4*>(&sh.part[w][head][4 * i]);
            uint32_t live = i4 == i ? sh.live[i >> 3] >> (4 * i & 31) : 0;
#pragma unroll
            for (int w = WARPS / 2; w; w >>= 1)
#pragma unroll
                for (int j = 0; j < w; ++j) { v[j].x += v[j + w].x; v[j].y += v[j + w].y; v[j].z += v[j + w].z; v[j].w += v[j + w].w; }
            float s[4] = {live & 1 ? v[0].x * c : -INFINITY, live & 2 ? v[0].y * c : -INFINITY, live & 4 ? v[0].z * c : -INFINITY, live & 8 ? v[0].w * c : -INFINITY};
            float top = fmaxf(fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3])), m);
#pragma unroll
            for (int x = 8; x; x >>= 1) top = fmaxf(top, __shfl_xor_sync(FULL, top, x));
            float p0 = exp2_fast(s[0] - top), p1 = exp2_fast(s[1] - top), p2 = exp2_fast(s[2] - top), p3 = exp2_fast(s[3] - top), corr = exp2_fast(m - top);
            if (i4 < TILE / 4) *reinterpret_cast<uint2*>(&sh.p[head][4 * i4]) = make_uint2(pack_bf16(p0, p1), pack_bf16(p2, p3));
            if (i4 == 15) sh.corr[head] = corr;
            l = l * corr + ((p0 + p1) + (p2 + p3));
            m = top;
        }
        __syncthreads();
        if (base > first) {
            float c0 = sh.corr[g], c1 = sh.corr[g + 8];
#pragma unroll
            for (int j = 0; j < 8; ++j) { o[j][0] *= c0; o[j][1] *= c0; o[j][2] *= c1; o[j][3] *= c1; }
        }
        uint32_t a[TILE / 16][4];
#pragma unroll
        for (int k = 0; k < TILE / 16; ++k) ldmatrix_x4(a[k], smem_addr(&sh.p[lane & 15][k * 16 + (lane >> 4) * 8]));
#pragma unroll
        for (int k = 0; k < TILE / 16; ++k)
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, slice + unit_at(16 * k + (lane & 15), j + (lane >> 4)));
                mma_bf16(o[j], a[k][0], a[k][1], a[k][2], a[k][3], b[0], b[1]);
                mma_bf16(o[j + 1], a[k][0], a[k][1], a[k][2], a[k][3], b[2], b[3]);
            }
        if (base + TILE < last) continue;
        float sum = l;
#pragma unroll
        for (int x = 8; x; x >>= 1) sum += __shfl_xor_sync(FULL, sum, x);
        if (i4 < C) send(in_block(smem_addr(&sh.ml[rank][head]), i4), make_float2(m, sum), in_block(bars, i4));
#pragma unroll
        for (int piece = 0; piece < 2; ++piece) {
            // As f16, eight values of a head in units of one power of two: half the bytes.
            uint32_t half2[8], backs = 0;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float most = 0.0f;
#pragma unroll
                for (int j = 4 * piece; j < 4 * piece + 4; ++j) most = fmaxf(most, fmaxf(fabsf(o[j][2 * r]), fabsf(o[j][2 * r + 1])));
                uint32_t e = max(__float_as_uint(most) >> 23, 15u);
                float factor = __uint_as_float((268 - e) << 23);
                backs |= (e - 14) << (r ? 23 : 7);
#pragma unroll
                for (int j = 0; j < 4; ++j) half2[2 * j + r] = pack_f16(o[4 * piece + j][2 * r] * factor, o[4 * piece + j][2 * r + 1] * factor);
            }
            int mine = warp * 2 + piece, to = mine / PIECES, x = mine % PIECES;
            uint32_t bar = in_block(bars + 8, to), data = in_block(smem_addr(&sh.got[rank][x * 64 + lane]), to);
            send(data, make_uint4(half2[0], half2[1], half2[2], half2[3]), bar);
            send(data + 512, make_uint4(half2[4], half2[5], half2[6], half2[7]), bar);
            send(in_block(smem_addr(&sh.back[rank][x * 32 + lane]), to), backs, bar);
        }
        break;
    }
    // A quarter of a warp a quarter of the blocks: each lane has eight values of one sender's lane `from`, of two heads.
    constexpr int EACH = C / 4;
    int quarter = lane >> 3, ha = from >> 2, hb = ha + 8;
    float wa[EACH], wb[EACH], scale_out;
    {
        mbar_wait_cluster(bars, 0);
        float2 a[EACH], b[EACH];
        float top_a = -1e30f, top_b = -1e30f, sum_a = 0.0f, sum_b = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            a[i] = sh.ml[quarter * EACH + i][ha];
            b[i] = sh.ml[quarter * EACH + i][hb];
            top_a = fmaxf(top_a, a[i].x);
            top_b = fmaxf(top_b, b[i].x);
        }
#pragma unroll
        for (int x = 8; x < 32; x <<= 1) { top_a = fmaxf(top_a, __shfl_xor_sync(FULL, top_a, x)); top_b = fmaxf(top_b, __shfl_xor_sync(FULL, top_b, x)); }
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            wa[i] = exp2_fast(a[i].x - top_a);
            wb[i] = exp2_fast(b[i].x - top_b);
            sum_a += a[i].y * wa[i];
            sum_b += b[i].y * wb[i];
        }
#pragma unroll
        for (int x = 8; x < 32; x <<= 1) { sum_a += __shfl_xor_sync(FULL, sum_a, x); sum_b += __shfl_xor_sync(FULL, sum_b, x); }
        // Without a valid row the maximum is -1e30 and the sink's term inf: the output is 0.
        bool second = lane & 8;
        scale_out = 1.0f / ((second ? sum_b : sum_a) + expf(sh.sink[second ? hb : ha] - (second ? top_b : top_a) * 0.6931471805599453f));
    }
    mbar_wait_cluster(bars + 8, 0);
#pragma unroll
    for (int x = 0; x < PIECES; ++x) {
        float v[8] = {};
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            int s = quarter * EACH + i;
            uint4 u = sh.got[s][x * 64 + (warp >> 2) * 32 + from];
            uint32_t backs = sh.back[s][x * 32 + from];
            float fa = wa[i] * bf16_lo(backs), fb = wb[i] * bf16_hi(backs);
            float2 f = unpack_f16(u.x);
            v[0] += f.x * fa; v[1] += f.y * fa;
            f = unpack_f16(u.y);
            v[2] += f.x * fb; v[3] += f.y * fb;
            f = unpack_f16(u.z);
            v[4] += f.x * fa; v[5] += f.y * fa;
            f = unpack_f16(u.w);
            v[6] += f.x * fb; v[7] += f.y * fb;
        }
        // Each keeps half of what it has, twice: two columns of one head.
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float gone = lane & 16 ? v[i] : v[i + 4];
            v[i] = (lane & 16 ? v[i + 4] : v[i]) + __shfl_xor_sync(FULL, gone, 16);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float gone = lane & 8 ? v[i] : v[i + 2];
            v[i] = (lane & 8 ? v[i + 2] : v[i]) + __shfl_xor_sync(FULL, gone, 8);
        }
        v[0] *= scale_out;
        v[1] *= scale_out;
        int col = col0 + 32 * x;
        if (cos_t && col >= D - rd) {
            v[0] = round_bf16(v[0]); v[1] = round_bf16(v[1]);
            rotate_pair(v[0], v[1], sh.turn[0][(col - (D - rd)) >> 1], -sh.turn[1][(col - (D - rd)) >> 1]);
        }
        if (my_head < H) *reinterpret_cast<uint32_t*>(out + ((int64_t)t * H + my_head) * D + col) = pack_bf16(v[0], v[1]);
    }
}

#define KERNEL(NAME, C, PACKED) \
    extern "C" __global__ void __launch_bounds__(256, 2) sparse_attn_few_##NAME(const bf16* q, const float* cos_t, const float* sin_t, \
        const __grid_constant__ Scopes scopes, const float* sink, bf16* out, const bf16* src, const int32_t* rows, uint8_t* pool, uint8_t* scales, int T, int H, \
        int rd, int kind, float scale) { \
        attend<C, PACKED>(q, cos_t, sin_t, scopes, sink, out, src, rows, pool, scales, T, H, rd, kind, scale); \
    }
KERNEL(8, 8, false)
KERNEL(16, 16, false)
KERNEL(packed_8, 8, true)
KERNEL(packed_16, 16, true)
