// sparse_attn_sm90: sparse_attn for head_dim 512 on Hopper, prefill and decode.
//
// Maths    as sparse_attn.cu, tiles of 64 rows over the query's valid rows
// Layout   as sparse_attn.cu, D = 512, rd at most 64. One CTA: 64 heads of one query. Two warpgroups split D: each multiplies its half of Q (three
//          quarters in registers, as many as fit, the rest in shared memory) with its half of the rows, the partial scores are exchanged through shared memory, both do the same
//          softmax, and each accumulates its half of the output. A third warpgroup gathers rows into two stages of 64 KB
// Grid     (S, ceil(H/64), T), block 384; dynamic shared memory 2*65536 + 4*16384 + 2*8192 + 1024 + 4*n, n = all listed rows.
//          S = 1 writes `out`; S > 1 writes parts for sparse_attn_combine
//          sparse_attn_packed_sm90 takes scopes of any RowKind and gives the same bits
// Numerics p is rounded to bf16 against the running maximum of 64-row tiles, as the reference; exp by ex2.approx (2 ulp)
// Checked  tests_cuda/check_attention.cuh, check_packed.cuh
#include "../common/wgmma.cuh"
#include "rope.cuh"
#include "rows.cuh"

constexpr int Q_REGS = 12;  // of the 16 steps of k: all 16 leave too few registers and serialise the wgmma
constexpr int D = 512, TILE = 64, PANEL = TILE * 128, TILE_BYTES = TILE * D * 2;

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ void store_unit(uint32_t at, const uint4& v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}

__device__ __forceinline__ void produce(const Scopes& scopes, const uint32_t* list, int n, int first, int last, uint8_t* kv, uint32_t full, uint32_t empty) {
    int tid = threadIdx.x - 256, warp = tid >> 5, lane = tid & 31;
    uint32_t base = smem_addr(kv);
    for (int tile = first; tile < last; ++tile) {
        int i = tile - first, s = i & 1;
        if (i >= 2) mbar_wait(empty + 8 * s, ((i >> 1) + 1) & 1);
        uint32_t dst = base + s * TILE_BYTES;
        for (int r = warp; r < TILE; r += 4) {
            int j = tile * TILE + r;
            // Two units of 16 bytes a lane: columns 8*lane.. and 256 + 8*lane...
            uint32_t at = dst + (lane >> 3) * PANEL + r * 128 + (((lane & 7) ^ (r & 7)) << 4);
            if (j < n) {
                const bf16* p = row_ptr(scopes, list[j], D) + lane * 8;
                cp_async16(at, p);
                cp_async16(at + 4 * PANEL, p + 256);
            } else {
                asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(at), "r"(0));
                asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(at + 4 * PANEL), "r"(0));
            }
        }
        if ((tile + 1) * TILE > n) __threadfence_block();  // the zeros above, before the arrival below
        cp_async_arrive(full + 8 * s);
    }
}

// The same of scopes of any RowKind. A packed row's bytes are copied into the memory of the row they become: codes to the first units of
// panels 0 to 3, scales to panel 4. So stages are as large as for bf16 rows. Two lanes copy a row, whose kind and place they alone look up.
__device__ __forceinline__ void produce_packed(const Scopes& scopes, const uint32_t* list, int n, int first, int last, uint8_t* kv, uint32_t full, uint32_t empty) {
    int tid = threadIdx.x - 256, r = tid >> 1, side = tid & 1, x = r & 7;
    uint32_t base = smem_addr(kv) + r * 128;
    for (int tile = first; tile < last; ++tile) {
        int i = tile - first, s = i & 1, j = tile * TILE + r, units = 0;
        Row row = {nullptr, nullptr, -1};
        if (j < n) {
            row = row_of(scopes, list[j], D);
            units = stored_bytes(row.kind, D) >> 4;
        }
        int most = __reduce_max_sync(FULL, units);
        if (i >= 2) mbar_wait(empty + 8 * s, ((i >> 1) + 1) & 1);
        uint32_t dst = base + s * TILE_BYTES;
        if (row.kind == ROW_FP4_E4M3 || (row.kind > ROW_BF16 && side == 0)) cp_async16(dst + 4 * PANEL + ((side ^ x) << 4), row.scales + side * 16);
#pragma unroll 4
        for (int u = side; u < most; u += 2)
            if (u < units) cp_async16(dst + (u >> 3) * PANEL + (((u & 7) ^ x) << 4), row.data + u * 16);
        if (row.kind < 0) {
            for (int u = side; u < 64; u += 2) store_unit(dst + (u >> 3) * PANEL + ((u & 7) << 4), make_uint4(0, 0, 0, 0));
            __threadfence_block();  // the zeros, before the arrival below
        }
        cp_async_arrive(full + 8 * s);
    }
}

// Packed rows of a stage become bf16 ones where they lie. The multiplying warps do it, while the tensor core is at the tile before: the
// gathering ones have too few registers to be quick. Warp w of eight takes rows w + 8k, lane l columns 16l.., which share a scale.
__device__ __forceinline__ void widen_rows(const Scopes& scopes, const uint32_t* entries, int left, uint32_t stage) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, mine = warp + 8 * (lane & 7);
    int kind = mine < left ? scopes.s[entries[mine] >> SCOPE_SHIFT].kind : ROW_BF16;
    uint32_t fp8 = __ballot_sync(FULL, kind == ROW_FP8), narrow = __ballot_sync(FULL, kind == ROW_FP4_E4M3), wide = __ballot_sync(FULL, kind == ROW_FP4_E8M0);
    // Every second four lanes take their halves in the other order: eight lanes then store to eight different bank groups.
    uint32_t half = lane >> 2 & 1, x = warp << 4, row = stage + warp * 128;
    uint32_t codes8 = row + (lane >> 3) * PANEL + (((lane & 7) << 4) ^ x) + half * 8, codes4 = row + (lane >> 4) * PANEL + (((lane << 3) & 0x70) ^ x) + (lane & 1) * 8 + half * 4;
    uint32_t scales32 = row + 4 * PANEL + x + (lane >> 1), scales16 = row + 4 * PANEL + ((lane & 16) ^ x) + (lane & 15);
    uint32_t to = row + (lane >> 2) * PANEL + (((lane & 3) << 5 | half << 4) ^ x);
    // Rolled up: the loop that this is part of must stay in the instruction cache.
#pragma unroll 1
    for (int k0 = 0; k0 < 8; k0 += 2) {
        uint32_t w[2][4], scale[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            int k = k0 + j, at = k * 1024;
            if ((fp8 | narrow | wide) >> k & 1) {
                asm volatile("ld.shared.u8 %0, [%1];" : "=r"(scale[j]) : "r"(at + (narrow >> k & 1 ? scales16 : scales32)));
                if (fp8 >> k & 1) {
                    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(w[j][0]), "=r"(w[j][1]) : "r"(at + codes8));
                    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(w[j][2]), "=r"(w[j][3]) : "r"((at + codes8) ^ 8));
                } else {
                    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w[j][0]) : "r"(at + codes4));
                    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w[j][2]) : "r"((at + codes4) ^ 4));
                }
            }
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            int k = k0 + j, at = k * 1024;
            if (fp8 >> k & 1) {
                uint32_t s = scale_pair_e8m0(scale[j]);
                store_unit(at + to, widen8_e4m3(w[j][0], w[j][1], s));
                store_unit((at + to) ^ 16, widen8_e4m3(w[j][2], w[j][3], s));
            } else if ((narrow | wide) >> k & 1) {
                uint32_t s = narrow >> k & 1 ? scale_pair_e4m3(scale[j]) : scale_pair_e8m0(scale[j]);
                store_unit(at + to, widen8_e2m1(w[j][0], s));
                store_unit((at + to) ^ 16, widen8_e2m1(w[j][2], s));
            }
        }
    }
    fence_async_shared();
}

template <bool PACKED>
__device__ __forceinline__ void attend(const bf16* q, const float* cos_t, const float* sin_t, const Scopes& scopes, const float* sink, bf16* out,
                                       float* part_o, float* part_ml, int T, int H, int rd, float scale) {
    extern __shared__ __align__(1024) uint8_t smem[];
    uint8_t* kv = smem;
    float4* exchange = reinterpret_cast<float4*>(smem + 2 * TILE_BYTES);  // [2 parities][2 warpgroups][8][128]
    uint8_t* sq = smem + 2 * TILE_BYTES + 65536;  // [2 warpgroups] panels of 64 x 64
    uint32_t bars = smem_addr(sq + 2 * PANEL), full = bars, empty = bars + 16;
    uint32_t* list = reinterpret_cast<uint32_t*>(sq + 2 * PANEL + 1024);
    int t = blockIdx.z, h0 = blockIdx.y * 64, split = blockIdx.x, splits = gridDim.x;
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; ++s) { mbar_init(full + 8 * s, 128); mbar_init(empty + 8 * s, 8); }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    after_previous();
    int n = valid_rows(scopes, t, list);  // its barriers also publish the mbarriers
    int tiles = (n + TILE - 1) / TILE, per = (tiles + splits - 1) / splits;
    int first = min(split * per, tiles), last = min(first + per, tiles);
    if (threadIdx.x >= 256) {
        registers_down<24>();
        if (PACKED) produce_packed(scopes, list, n, first, last, kv, full, empty);
        else produce(scopes, list, n, first, last, kv, full, empty);
    } else {
        registers_up<240>();
        int wg = threadIdx.x >> 7, tid = threadIdx.x & 127, warp = tid >> 5, lane = tid & 31, g = lane >> 2, qd = lane & 3;
        int r0 = warp * 16 + g, ha = h0 + r0, hb = ha + 8;
        uint32_t qa[Q_REGS][4];
        {
            const bf16 *pa = q + ((int64_t)t * H + ha) * D + wg * 256 + 2 * qd, *pb = pa + 8 * D;
#pragma unroll
            for (int k = 0; k < Q_REGS; ++k) {
                qa[k][0] = ha < H ? *reinterpret_cast<const uint32_t*>(pa + k * 16) : 0;
                qa[k][1] = hb < H ? *reinterpret_cast<const uint32_t*>(pb + k * 16) : 0;
                qa[k][2] = ha < H ? *reinterpret_cast<const uint32_t*>(pa + k * 16 + 8) : 0;
                qa[k][3] = hb < H ? *reinterpret_cast<const uint32_t*>(pb + k * 16 + 8) : 0;
            }
        }
        for (int i = tid; i < 512; i += 128) {
            int r = i >> 3, u = i & 7;
            uint4 v = make_uint4(0, 0, 0, 0);
            if (h0 + r < H) {
                v = *reinterpret_cast<const uint4*>(q + ((int64_t)t * H + h0 + r) * D + wg * 256 + Q_REGS * 16 + u * 8);
                // The second warpgroup's are the columns that turn.
                if (cos_t && wg == 1) v = rotate8(v, cos_t + t * (rd >> 1), sin_t + t * (rd >> 1), u * 8 - (64 - rd));
            }
            *reinterpret_cast<uint4*>(sq + wg * PANEL + r * 128 + ((u ^ (r & 7)) << 4)) = v;
        }
        fence_async_shared();
        named_barrier(2 + wg, 128);
        uint32_t sq0 = smem_addr(sq) + wg * PANEL;
        float o[128];
#pragma unroll
        for (int i = 0; i < 128; ++i) o[i] = 0.0f;
        // Maxima in units of log2: scores are scaled by scale * log2(e).
        float c = scale * 1.4426950408889634f, m0 = -1e30f, m1 = -1e30f, l0 = 0.0f, l1 = 0.0f;
        uint32_t kv0 = smem_addr(kv) + wg * 4 * PANEL;
        if (PACKED && first < last) {
            mbar_wait(full, 0);
            widen_rows(scopes, list + first * TILE, n - first * TILE, smem_addr(kv));
            named_barrier(4, 256);
        }
        for (int tile = first; tile < last; ++tile) {
            int i = tile - first, s = i & 1, live = n - tile * TILE;
            uint32_t at = kv0 + s * TILE_BYTES;
            if (!PACKED) {
                mbar_wait(full + 8 * s, (i >> 1) & 1);
                // The fence is here and not with the copying threads: there it would wait for copies still in flight.
                fence_async_shared();
            }
            float sc[32];
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < Q_REGS; ++k) wgmma_n64_bf16(sc, qa[k][0], qa[k][1], qa[k][2], qa[k][3], desc_swizzle128(at + (k >> 2) * PANEL + (k & 3) * 32), k > 0);
#pragma unroll
            for (int k = Q_REGS; k < 16; ++k) wgmma_n64_bf16_ss(sc, desc_swizzle128(sq0 + (k - Q_REGS) * 32), desc_swizzle128(at + (k >> 2) * PANEL + (k & 3) * 32), 1);
            wgmma_commit();
            wgmma_wait<0>();
            float4* ex = exchange + s * 2048;
#pragma unroll
            for (int j = 0; j < 8; ++j) ex[wg * 1024 + j * 128 + tid] = make_float4(sc[4 * j], sc[4 * j + 1], sc[4 * j + 2], sc[4 * j + 3]);
            named_barrier(1, 256);
            float x0 = m0, x1 = m1;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                float4 v = ex[(wg ^ 1) * 1024 + j * 128 + tid];
                sc[4 * j] += v.x; sc[4 * j + 1] += v.y; sc[4 * j + 2] += v.z; sc[4 * j + 3] += v.w;
#pragma unroll
                for (int e = 0; e < 4; ++e) sc[4 * j + e] = 8 * j + 2 * qd + (e & 1) < live ? sc[4 * j + e] * c : -INFINITY;
                x0 = fmaxf(x0, fmaxf(sc[4 * j], sc[4 * j + 1]));
                x1 = fmaxf(x1, fmaxf(sc[4 * j + 2], sc[4 * j + 3]));
            }
            x0 = fmaxf(x0, __shfl_xor_sync(FULL, x0, 1)); x0 = fmaxf(x0, __shfl_xor_sync(FULL, x0, 2));
            x1 = fmaxf(x1, __shfl_xor_sync(FULL, x1, 1)); x1 = fmaxf(x1, __shfl_xor_sync(FULL, x1, 2));
            float c0 = exp2_fast(m0 - x0), c1 = exp2_fast(m1 - x1);
            l0 *= c0; l1 *= c1;
            if (__any_sync(FULL, x0 != m0 || x1 != m1)) {
#pragma unroll
                for (int j = 0; j < 32; ++j) { o[4 * j] *= c0; o[4 * j + 1] *= c0; o[4 * j + 2] *= c1; o[4 * j + 3] *= c1; }
            }
            m0 = x0; m1 = x1;
            uint32_t p[16];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                float a = exp2_fast(sc[4 * j] - m0), b = exp2_fast(sc[4 * j + 1] - m0), d = exp2_fast(sc[4 * j + 2] - m1), e = exp2_fast(sc[4 * j + 3] - m1);
                l0 += a + b; l1 += d + e;
                p[2 * j] = pack_bf16(a, b); p[2 * j + 1] = pack_bf16(d, e);
            }
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k) wgmma_n256_bf16_t(o, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], desc_swizzle128_t(at + k * 2048, PANEL), 1);
            wgmma_commit();
            bool more = PACKED && tile + 1 < last;
            if (more) {
                mbar_wait(full + 8 * (s ^ 1), ((i + 1) >> 1) & 1);
                widen_rows(scopes, list + (tile + 1) * TILE, live - TILE, smem_addr(kv) + (s ^ 1) * TILE_BYTES);
            }
            wgmma_wait<0>();
            if (lane == 0) mbar_arrive(empty + 8 * s);
            if (more) named_barrier(4, 256);
        }
        l0 += __shfl_xor_sync(FULL, l0, 1); l0 += __shfl_xor_sync(FULL, l0, 2);
        l1 += __shfl_xor_sync(FULL, l1, 1); l1 += __shfl_xor_sync(FULL, l1, 2);
        constexpr float LN2 = 0.6931471805599453f;
        if (splits > 1) {
            int64_t row = ((int64_t)split * T + t) * H;
            if (wg == 0 && qd == 0) {
                // An empty part keeps the reference's -1e30, whatever the units.
                if (ha < H) { part_ml[(row + ha) * 2] = first < last ? m0 * LN2 : -1e30f; part_ml[(row + ha) * 2 + 1] = l0; }
                if (hb < H) { part_ml[(row + hb) * 2] = first < last ? m1 * LN2 : -1e30f; part_ml[(row + hb) * 2 + 1] = l1; }
            }
#pragma unroll
            for (int j = 0; j < 32; ++j) {
                int d = wg * 256 + 8 * j + 2 * qd;
                if (ha < H) *reinterpret_cast<float2*>(part_o + (row + ha) * D + d) = make_float2(o[4 * j], o[4 * j + 1]);
                if (hb < H) *reinterpret_cast<float2*>(part_o + (row + hb) * D + d) = make_float2(o[4 * j + 2], o[4 * j + 3]);
            }
        } else {
            // Without a valid row m is -1e30 and the sink's term is inf: the output is 0.
            float f0 = 1.0f / (l0 + (ha < H ? expf(sink[ha] - m0 * LN2) : 1.0f)), f1 = 1.0f / (l1 + (hb < H ? expf(sink[hb] - m1 * LN2) : 1.0f));
            // Through the (now free) exchange buffer, so that rows leave in 16-byte pieces: 64 rows x 64 columns at a time.
            uint32_t* stage = reinterpret_cast<uint32_t*>(exchange) + wg * 8192;
            named_barrier(1, 256);  // the other warpgroup may still be reading the last scores
#pragma unroll
            for (int part = 0; part < 4; ++part) {
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    int e = part * 8 + j;
                    stage[r0 * 36 + 4 * j + qd] = pack_bf16(o[4 * e] * f0, o[4 * e + 1] * f0);
                    stage[(r0 + 8) * 36 + 4 * j + qd] = pack_bf16(o[4 * e + 2] * f1, o[4 * e + 3] * f1);
                }
                named_barrier(2 + wg, 128);
#pragma unroll
                for (int u = tid; u < 512; u += 128) {
                    int r = u >> 3, h = h0 + r;
                    if (h < H) *reinterpret_cast<uint4*>(out + ((int64_t)t * H + h) * D + wg * 256 + part * 64 + (u & 7) * 8) = *reinterpret_cast<uint4*>(stage + r * 36 + (u & 7) * 4);
                }
                named_barrier(2 + wg, 128);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) sparse_attn_sm90(const bf16* q, const float* cos_t, const float* sin_t, const __grid_constant__ Scopes scopes,
    const float* sink, bf16* out, float* part_o, float* part_ml, int T, int H, int rd, float scale) {
    attend<false>(q, cos_t, sin_t, scopes, sink, out, part_o, part_ml, T, H, rd, scale);
}
extern "C" __global__ void __launch_bounds__(384, 1) sparse_attn_packed_sm90(const bf16* q, const float* cos_t, const float* sin_t, const __grid_constant__ Scopes scopes,
    const float* sink, bf16* out, float* part_o, float* part_ml, int T, int H, int rd, float scale) {
    attend<true>(q, cos_t, sin_t, scopes, sink, out, part_o, part_ml, T, H, rd, scale);
}
