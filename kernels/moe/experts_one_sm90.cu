// experts_one: a single token's routed experts and their sum in one launch, e2m1 weights, on Hopper.
//
// Maths    as experts.cu on act_quant(x), then moe_combine: h = bf16(weight * swiglu(bf16(W1 x), bf16(W3 x))); y = bf16(W2 act_quant(h));
//          out = bf16(sum of y in ascending order of experts + shared)
// Layout   x [dim] bf16; experts [k] u32 and weights [k] f32 straight from the gate, ids
//          first .. first + n_local being ours; w1, w3 [n_local, inter, dim/2], w2 [n_local, dim, inter/2], scales [.., K/32];
//          shared [dim] bf16 or null; out [dim] bf16; workspace: h [k, inter] bf16, a row for each of our experts in ascending order;
//          counter [32] u32 (zero before the first use, never touched between launches)
// Grid     1 block an SM, launched cooperatively, block 768; dim and inter multiples of 256, k <= 32, n_local > 0; dynamic shared memory
//          stages * 17/2 * max(dim, inter) + 8*1280 + 9/8 * (dim + k * inter) + 2 * inter, for any 2 to 8 stages
// Numerics codes are widened to f16, exactly; a group's 32 products are summed in f32, each sum is scaled and added in f32
// Checked  tests_cuda/check_moe.cuh
//
// A tile is 16 rows: eight gate rows and the up rows of the same units, or eight rows of W2 of two experts, so that its codes and its scales
// are two contiguous pieces each, which the copy engine fetches. One warp has them fetched, tile after tile through both halves, into a
// ring. Twenty share out a tile's columns and keep the token's values for theirs as operands in registers; one adds up what those have
// summed: units of the first half, rows of the result in the second, of which a block has all experts' in turn. Two have the second
// half's values ready. Blocks wait for each other expert by expert: while the last experts' units are made, the first ones' are there.
//
// Lane 4g + q has group q of four of row g, the 32 codes as they lie in memory. An instruction then sums over four groups, and four of its
// eight columns tell them apart: column c is the token's values where q = c, else zero. The other four columns are those of the rows from 8 on.
#include "../common/few_sm90.cuh"
#include "../common/grid.cuh"
#include "../common/swiglu.cuh"
#include "../common/wgmma.cuh"

// Warps that multiply and that quantise; with those that fetch and that add up they are whole fours, by which registers are handed over.
constexpr int WARPS = 20, QUANTISERS = 2, THREADS = 32 * (WARPS + QUANTISERS + 2);
// Stages of the ring at most; sums of a stage; eights of the result's rows that a block has at once; experts of a token.
constexpr int STAGES = 8, PART = WARPS * 16, ROUND = 16, SLOTS = 32;

// Reads by address. The compiler makes a pointer to shared memory anew wherever it is used; an address it does not know the origin of stays
// in its register.
__device__ __forceinline__ void keep(uint32_t& address) { asm volatile("" : "+r"(address)); }
__device__ __forceinline__ void load_shared16(uint32_t (&v)[4], uint32_t at) {
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at));
}
// An e8m0 scale (byte 0 reads as 0, byte 255 as inf).
__device__ __forceinline__ float load_scale(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at));
    return __uint_as_float(v << 23);
}

// Four values as e4m3 codes of themselves times inv, a byte each.
__device__ __forceinline__ uint32_t fp8_codes(float a, float b, float c, float d, float inv) {
    uint32_t o;
    asm("{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1; cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3; mov.b32 %0, {lo, hi}; }"
        : "=r"(o) : "f"(a * inv), "f"(b * inv), "f"(c * inv), "f"(d * inv));
    return o;
}
// 256 values, eight a lane, as codes, each eight the even and the odd ones as widen_e2m1 pairs them, and the scales of their groups.
__device__ __forceinline__ void quantise256(const uint4& raw, uint8_t* codes, float* scales) {
    int lane = threadIdx.x & 31;
    float v[8];
    unpack8(raw, v);
    uint32_t s = group_scale8(v);
    float inv = e8m0_inverse(s);
    reinterpret_cast<uint2*>(codes)[lane] = make_uint2(fp8_codes(v[0], v[2], v[4], v[6], inv), fp8_codes(v[1], v[3], v[5], v[7], inv));
    if ((lane & 3) == 0) scales[lane >> 2] = e8m0_to_f32(s) * E2M1_UNDO;
}

// 256 columns of the token as B operand, four groups twice, and the scales of this lane's two columns.
struct Operand {
    uint32_t b[2][4][4];
    float2 scale[2];
    // `codes` are those that belong to column g of the instruction, or 0 for zeros; `scales` those of columns 2q and 2q + 1.
    __device__ __forceinline__ void load(uint32_t codes, uint32_t scales) {
        int lane = threadIdx.x & 31, q = lane & 3;
        bool mine = (lane >> 2 & 3) == q && codes;
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(scale[s].x), "=f"(scale[s].y) : "r"(scales + s * 16 + 8 * (q & 1)));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint32_t c[4] = {};
                if (mine) load_shared16(c, codes + (s * 4 + q) * 32 + i * 16);
#pragma unroll
                for (int j = 0; j < 4; ++j) widen_e4m3(c[j], b[s][2 * i + j / 2][j % 2 * 2], b[s][2 * i + j / 2][j % 2 * 2 + 1]);
            }
        }
    }
    // Row g's sum (q 0, 1) or row g + 8's (q 2, 3) over 256 columns: `codes` are this lane's of row g, row g + 8's are `eight` bytes on; `scales` are
    // those of the row to sum, from the lane's first group on.
    __device__ __forceinline__ float multiply(uint32_t codes, uint32_t eight, uint32_t scales) const {
        bool low = (threadIdx.x & 2) == 0;
        uint32_t lo[2][4], hi[2][4];
        float f[2][2];
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            load_shared16(lo[s], codes + s * 64);
            load_shared16(hi[s], codes + eight + s * 64);
            f[s][0] = load_scale(scales + s * 4);
            f[s][1] = load_scale(scales + s * 4 + 1);
        }
        float d[2][4] = {}, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                uint32_t r0[4], r1[4];
                widen_e2m1(lo[s][i], r0);
                widen_e2m1(hi[s][i], r1);
                mma_f16(d[s], r0[0], r1[0], r0[1], r1[1], b[s][i][0], b[s][i][1]);
                mma_f16(d[s], r0[2], r1[2], r0[3], r1[3], b[s][i][2], b[s][i][3]);
            }
        }
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            sum += (low ? d[s][0] : d[s][2]) * (f[s][0] * scale[s].x);
            sum += (low ? d[s][1] : d[s][3]) * (f[s][1] * scale[s].y);
        }
        return sum + __shfl_xor_sync(FULL, sum, 1);
    }
};

// How a block takes a half: `teams` tiles at a time, each by `sharing` warps.
struct Half {
    int K, sharing, teams;
    // Codes of 16 rows, then their scales.
    __device__ __forceinline__ int bytes() const { return K * 17 / 2; }
};

// Tiles of the first half: eights of units, `stride` apart.
struct UpWalk {
    int unit, of, units, stride;
    __device__ __forceinline__ UpWalk(int first, int units, int stride) : unit(first), of(0), units(units), stride(stride) { settle(); }
    __device__ __forceinline__ void settle() {
        for (; unit >= units; unit -= units) ++of;
    }
    __device__ __forceinline__ void next() {
        unit += stride;
        settle();
    }
};
// Tiles of the second half: of a round of eights of rows, pair after pair of experts.
struct DownWalk {
    int at, pair, base, octets, pairs;
    __device__ __forceinline__ DownWalk(int octets, int pairs) : at(0), pair(0), base(0), octets(octets), pairs(pairs) {}
    __device__ __forceinline__ void next() {
        if (++at < min(ROUND, octets - base)) return;
        at = 0;
        if (++pair < pairs) return;
        pair = 0;
        base += ROUND;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) experts_one(const bf16* xs, const uint32_t* experts, const float* weights,
                                                                     const uint8_t* w1, const uint8_t* s1, const uint8_t* w3, const uint8_t* s3,
                                                                     const uint8_t* w2, const uint8_t* s2, bf16* h, const bf16* shared, bf16* out,
                                                                     uint32_t* counter, int dim, int inter, int k, uint32_t first, int n_local, float limit) {
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ __align__(8) uint64_t bars[3 * STAGES + SLOTS];
    __shared__ int ours[SLOTS];
    __shared__ float factors[SLOTS], sums[ROUND][8];
    __shared__ __align__(16) bf16 common[ROUND][8];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, grid = gridDim.x, most = max(dim, inter), slot = most * 17 / 2;
    __shared__ int quotients[8];
    int last_octet = grid - 1 - blockIdx.x, beside = STAGES * PART * 4 + (dim + k * inter) / 8 * 9 + 2 * inter;
    Half up = {dim, min(dim >> 8, WARPS), 1}, down = {inter, min(inter >> 8, WARPS), 1};
    uint32_t full = smem_addr(bars), done = full + 8 * STAGES, free = done + 8 * STAGES, ready = free + 8 * STAGES;
    // One after the other within a warp: each has a few.
    if (lane == 0) {
        if (warp < STAGES) {
            mbar_init(full + 8 * warp, 1);
            mbar_init(done + 8 * warp, WARPS);
            mbar_init(free + 8 * warp, 1);
        }
        for (int i = warp; i < k; i += THREADS / 32) mbar_init(ready + 8 * i, QUANTISERS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    // Divisions take a while: one warp makes all at once.
    if (warp == WARPS) {
        uint32_t dynamic, over = 1, under = 1;
        asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(dynamic));
        if (lane == 0) { over = dynamic - beside; under = slot; }
        if (lane == 1) { over = max(0, (dim >> 3) - last_octet + grid - 1); under = grid; }
        if (lane == 2) { over = most; under = min(dim, inter); }
        if (lane == 3) { over = WARPS; under = up.sharing; }
        if (lane == 4) { over = WARPS; under = down.sharing; }
        if (lane == 5) { over = 65536; under = up.sharing; }
        if (lane == 6) { over = 65536; under = down.sharing; }
        if (lane < 8) quotients[lane] = over / under;
    }
    __syncthreads();
    int stages = min(STAGES, quotients[0]), octets = quotients[1];
    // Smaller tiles than the ring is made for: as many as there are warps and room for.
    (dim < inter ? up : down).teams = quotients[2];
    up.teams = min(up.teams, quotients[3]);
    down.teams = min(down.teams, quotients[4]);
    float* parts = reinterpret_cast<float*>(smem + stages * slot);
    uint8_t* x_codes = smem + stages * slot + STAGES * PART * 4;
    float* x_scales = reinterpret_cast<float*>(x_codes + dim);
    uint8_t* h_codes = x_codes + dim / 8 * 9;
    float* h_scales = reinterpret_cast<float*>(h_codes + k * inter);
    uint4* raw = reinterpret_cast<uint4*>(h_codes + k * inter / 8 * 9);
    after_previous();
    int id = lane < k ? (int)min(experts[lane] - first, 0x7fffffffu) : 0x7fffffff;
    float weight = warp == WARPS && lane < k ? weights[lane] : 0.0f;
    int n = __popc(__ballot_sync(FULL, id < n_local)), pairs = max(1, (n + 1) >> 1);
    // Tiles from the block's first on, and how far apart its are. Units and rows are dealt from opposite ends: blocks that have fewer of the
    // one have more of the other.
    int units = inter >> 3, up_tiles = n * units - blockIdx.x, down_tiles = octets * pairs;
    int stage = 0, parity = 0;
    auto advance = [&] {
        if (++stage == stages) { stage = 0; parity ^= 1; }
    };

    if (warp < WARPS) {
        registers_up<88>();
        for (int s = warp; s < dim >> 8; s += WARPS) quantise256(reinterpret_cast<const uint4*>(xs)[s * 32 + lane], x_codes + s * 256, x_scales + s * 8);
        named_barrier(1, 32 * WARPS);
        int g = lane >> 2, q = lane & 3, row = q < 2 ? g : g + 8, span = stages * slot;
        uint32_t ring = smem_addr(smem), bar = full, sums_at = smem_addr(parts) + (warp * 16 + row) * 4, offset = 0;
        keep(ring);
        keep(bar);
        keep(sums_at);
        Operand x;
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
            const Half w = half ? down : up;
            // Of `left` tiles from the block's next on, those `apart` are the block's, and the warp's is `ahead` from there.
            int stride = half ? 1 : grid, apart = w.teams * stride, team = warp * (quotients[5 + half] + 1) >> 16, slice = warp - team * w.sharing;
            int ahead = team < w.teams ? team * stride : 1 << 30, tile = team, until = 0, pair = -1, base = 0;
            uint32_t eight = 4 * w.K, codes = ring + team * w.bytes() + g * (w.K >> 1) + q * 16, scales = ring + team * w.bytes() + 8 * w.K + row * (w.K >> 5) + 2 * (q & 1);
#pragma unroll 1
            for (int left = half ? down_tiles : up_tiles; left > 0; left -= apart) {
                if (left > ahead) {
                    float sum = 0.0f;
                    int s = slice;
                    do {
                        if (tile >= until || w.sharing < w.K >> 8) {
                            // Other columns, or other experts: the token's values for them.
                            uint32_t values = smem_addr(x_codes), factors = smem_addr(x_scales);
                            if (!half) {
                                until = 1 << 30;
                            } else {
                                if (tile >= until) {
                                    for (; tile >= until; until += min(ROUND, octets - base))
                                        if (++pair == pairs) { pair = 0; base += ROUND; }
                                    for (int i = 2 * pair; i < min(n, 2 * pair + 2); ++i) mbar_wait(ready + 8 * i, 0);
                                }
                                int of = 2 * pair + (g >> 2);
                                values = of < n ? smem_addr(h_codes) + of * inter : 0;
                                factors = smem_addr(h_scales) + min(2 * pair + (q >> 1), k - 1) * (inter >> 3);
                            }
                            x.load(values ? values + s * 256 : 0, factors + s * 32);
                        }
                        mbar_wait(bar, parity);
                        sum += x.multiply(codes + offset + s * 128, eight, scales + offset + s * 8);
                        s += w.sharing;
                    } while (s < w.K >> 8);
                    if (!(q & 1)) asm volatile("st.shared.f32 [%0], %1;" ::"r"(sums_at), "f"(sum) : "memory");
                } else {
                    mbar_wait(bar, parity);
                }
                __syncwarp();
                if (lane == 0) mbar_arrive(bar + 8 * STAGES);
                tile += w.teams;
                bar += 8;
                sums_at += PART * 4;
                offset += slot;
                if (offset == span) {
                    bar -= 8 * stages;
                    sums_at -= stages * PART * 4;
                    offset = 0;
                    parity ^= 1;
                }
            }
        }
    } else {
        registers_down<40>();
        if (warp == WARPS) {
            // Ours in ascending order, and their weights.
            int rank = 0;
            for (int j = 0; j < k; ++j) {
                int other = __shfl_sync(FULL, id, j);
                rank += other < id || (other == id && j < lane);
            }
            if (id < n_local) {
                ours[rank] = id;
                factors[rank] = weight;
            }
            __syncwarp();
            // Lanes 0 .. 3 have the two pieces of codes and of scales fetched.
            int which = lane & 1;
            bool scales = lane & 2;
            auto fetch = [&](const Half& w, const uint8_t* from, int t, int of, int eight) {
                if (lane >= 4 || of >= n) return;
                uint32_t bar = full + 8 * stage, bytes = scales ? w.K >> 2 : w.K * 4;
                asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
                bulk_load(smem_addr(smem) + stage * slot + t * w.bytes() + (scales ? 8 * w.K : 0) + which * bytes, from + (int64_t)eight * bytes, bytes, bar);
            };
            UpWalk at(blockIdx.x, units, grid);
            DownWalk to(octets, pairs);
            int filled = 0;
#pragma unroll 1
            for (int half = 0; half < 2; ++half) {
                const Half w = half ? down : up;
                const uint8_t* from = scales ? (half ? s2 : which ? s3 : s1) : (half ? w2 : which ? w3 : w1);
#pragma unroll 1
                for (int left = half ? down_tiles : up_tiles, stride = half ? 1 : grid; left > 0;) {
                    if (filled == stages) mbar_wait(free + 8 * stage, parity ^ 1);
                    else ++filled;
                    for (int t = 0; t < w.teams && left > 0; ++t, left -= stride) {
                        if (half) {
                            int of = 2 * to.pair + which;
                            fetch(w, from, t, of, ours[min(of, SLOTS - 1)] * (dim >> 3) + last_octet + (to.base + to.at) * grid);
                            to.next();
                        } else {
                            fetch(w, from, t, at.of, ours[at.of] * units + at.unit);
                            at.next();
                        }
                    }
                    __syncwarp();
                    if (lane == 0) mbar_arrive(full + 8 * stage);
                    advance();
                }
            }
        } else if (warp <= WARPS + QUANTISERS) {
            // An expert's units are there when its count's upper half is another than now; no block comes to that before this has been read.
            uint32_t count = lane < k ? load_acquire(counter + lane) : 0;
            named_barrier(2, 32 * (QUANTISERS + 1));
            int self = 32 * (warp - WARPS - 1);
            for (int i = 0; i < n; ++i) {
                uint32_t before = __shfl_sync(FULL, count, i) >> 16;
                while (load_acquire(counter + i) >> 16 == before) {}
                for (int j = self + lane; j < units; j += 32 * QUANTISERS) cp_async16(smem_addr(raw + j), h + (int64_t)i * inter + j * 8);
                cp_async_commit();
                cp_async_wait<0>();
                // Three at a time, for one waits for itself; what is past the end is done as the first again.
                for (int first = self; first < units; first += 3 * 32 * QUANTISERS) {
                    uint4 v[3];
                    int j[3];
#pragma unroll
                    for (int u = 0; u < 3; ++u) {
                        j[u] = first + 32 * QUANTISERS * u;
                        if (j[u] >= units) j[u] = first;
                        v[u] = raw[j[u] + lane];
                    }
#pragma unroll
                    for (int u = 0; u < 3; ++u) quantise256(v[u], h_codes + i * inter + j[u] * 8, h_scales + (i * inter >> 5) + j[u] / 4);
                }
                __syncwarp();
                if (lane == 0) mbar_arrive(ready + 8 * i);
            }
        } else {
            int passed = 0;
            named_barrier(2, 32 * (QUANTISERS + 1));
            // There are no more units here of experts before `to`. All that come add up to 2^16.
            uint32_t share = blockIdx.x == 0 ? 0x10001u - grid : 1;
            auto pass = [&](int to) {
                __syncwarp();
                for (; passed < to; ++passed)
                    if (lane == 0) asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter + passed), "r"(share) : "memory");
            };
            UpWalk at(blockIdx.x, units, grid);
            DownWalk to(octets, pairs);
            pass(min(at.of, n));
#pragma unroll 1
            for (int half = 0; half < 2; ++half) {
                const Half w = half ? down : up;
#pragma unroll 1
                for (int left = half ? down_tiles : up_tiles, stride = half ? 1 : grid; left > 0;) {
                    mbar_wait(done + 8 * stage, parity);
#pragma unroll 1
                    for (int t = 0; t < w.teams; ++t, left -= stride) {
                        bool there = left > 0;
                        float v = 0.0f;
                        if (there) {
                            const float* p = parts + stage * PART + t * w.sharing * 16 + (lane & 15);
                            for (int s = lane >> 4; s < w.sharing; s += 2) v += p[s * 16];
                        }
                        if (t == w.teams - 1) {
                            __syncwarp();
                            if (lane == 0) mbar_arrive(free + 8 * stage);
                        }
                        if (there) {
                            v = round_bf16(v + __shfl_xor_sync(FULL, v, 16));
                            float upper = __shfl_down_sync(FULL, v, 8);
                            if (!half) {
                                float value = factors[at.of] * swiglu_value(v, upper, limit);
                                if (lane < 8) h[(int64_t)at.of * inter + at.unit * 8 + lane] = __float2bfloat16_rn(value);
                                at.next();
                                pass(min(at.of, n));
                            } else {
                                int eight = last_octet + (to.base + to.at) * grid;
                                if (shared && to.pair == 0 && lane == 0) cp_async16(smem_addr(common[to.at]), shared + eight * 8);
                                float sum = to.pair ? sums[to.at][lane & 7] : 0.0f;
                                if (2 * to.pair < n) sum += v;
                                if (2 * to.pair + 1 < n) sum += upper;
                                if (lane < 8) sums[to.at][lane] = sum;
                                if (to.pair == pairs - 1) {
                                    cp_async_commit();
                                    cp_async_wait<0>();
                                    __syncwarp();
                                    if (shared) sum += __bfloat162float(common[to.at][lane & 7]);
                                    if (lane < 8) out[eight * 8 + lane] = __float2bfloat16_rn(sum);
                                }
                            }
                        }
                        if (half) to.next();
                    }
                    advance();
                }
            }
        }
    }
}
