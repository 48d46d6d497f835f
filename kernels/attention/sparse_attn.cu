// sparse_attn: attention of each query over its own list of rows, K = V = one shared head, with a sink; baseline.
//
// Maths    s_j = (q . kv_j) * scale; m, l, o by online softmax over tiles; l += exp(sink - m); out = bf16(o / l)
//          with cos, sin q is rotated as it is read, as norm_rope_quant does (out is not turned back: sparse_attn_combine's, or a launch's)
// Layout   q, out [T, H, D] bf16; cos, sin [T, rd/2] f32 or null, rd a multiple of 8; up to three scopes, each kv [rows, D] bf16 and idx [T, n] i32 (-1 = nothing, anywhere);
//          sparse_attn_packed takes scopes of any RowKind, and widens packed rows as it gathers them: the same bits;
//          sink [H] f32. Split form: part_o [S, T, H, D] f32 (unnormalised) and part_ml [S, T, H, 2] f32
// Grid     sparse_attn: (S, ceil(H/32), T), block 256. S = 1 writes `out`; S > 1 writes the parts (out may be null) and
//          sparse_attn_combine follows: (H, T), block 128. Dynamic shared memory sparse_attn_smem(D, n0 + n1 + n2):
//          2*32*ceil64(D)*2 + 32*33*4 + 32*40*2 + 32*4*4 + 4*n bytes. D a multiple of 16, at most 512
// Numerics bf16 operands, f32 sums; p is rounded to bf16 against the running maximum of 32-row tiles over the valid rows in
//          list order (the reference's tiles are 64 wide: the roundings differ by one bf16 ulp of p). No valid row gives 0
// Checked  tests_cuda/check_attention.cuh, check_packed.cuh, crates/attention/tests
#include "rope.cuh"
#include "rows.cuh"

#define HB 32
#define TILE 32

__device__ __forceinline__ uint32_t swizzled(uint32_t base, int row, int unit, int row_bytes) { return base + row * row_bytes + ((unit ^ (row & 7)) << 4); }

template <bool PACKED>
__device__ __forceinline__ void attend(const bf16* q, const float* cos_t, const float* sin_t, const Scopes& scopes, const float* sink, bf16* out,
                                       float* part_o, float* part_ml, int T, int H, int D, int rd, float scale) {
    after_previous();
    extern __shared__ __align__(128) uint8_t smem[];
    int ldd = (D + 63) & ~63, row_bytes = ldd * 2;
    uint8_t *sq = smem, *skv = sq + HB * row_bytes;
    float* ss = reinterpret_cast<float*>(skv + TILE * row_bytes);  // [HB][33] scores
    bf16* sp = reinterpret_cast<bf16*>(ss + HB * 33);              // [HB][40] probabilities
    float* sm = reinterpret_cast<float*>(sp + HB * 40);            // [HB] max, [HB] sum, [HB] correction
    uint32_t* list = reinterpret_cast<uint32_t*>(sm + HB * 4);
    int t = blockIdx.z, h0 = blockIdx.y * HB, split = blockIdx.x, splits = gridDim.x;
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, qd = lane & 3;

    int n = valid_rows(scopes, t, list);
    int tiles = (n + TILE - 1) / TILE, per = (tiles + splits - 1) / splits;
    int first = min(split * per, tiles), last = min(first + per, tiles);

    for (int i = tid; i < HB * (ldd >> 3); i += 256) {
        int r = i / (ldd >> 3), u = i % (ldd >> 3);
        uint4 v = make_uint4(0, 0, 0, 0);
        if (h0 + r < H && u * 8 < D) {
            v = *reinterpret_cast<const uint4*>(q + ((int64_t)t * H + h0 + r) * D + u * 8);
            if (cos_t) v = rotate8(v, cos_t + t * (rd >> 1), sin_t + t * (rd >> 1), u * 8 - (D - rd));
        }
        *reinterpret_cast<uint4*>(sq + r * row_bytes + ((u ^ (r & 7)) << 4)) = v;
    }
    if (tid < HB) { sm[tid] = -1e30f; sm[HB + tid] = 0.0f; }
    float acc[2][8][4] = {};
    uint32_t aq = smem_addr(sq), akv = smem_addr(skv), ap = smem_addr(sp);
    int nt_total = D >> 3;

    for (int tile = first; tile < last; ++tile) {
        __syncthreads();
        int live = min(TILE, n - tile * TILE);
        for (int i = tid; i < TILE * (ldd >> 3); i += 256) {
            int r = i / (ldd >> 3), u = i % (ldd >> 3);
            uint32_t dst = swizzled(akv, r, u, row_bytes);
            if (PACKED && r < live && u * 8 < D) *reinterpret_cast<uint4*>(skv + (dst - akv)) = load_unit(row_of(scopes, list[tile * TILE + r], D), u);
            else if (r < live && u * 8 < D) cp_async16(dst, row_ptr(scopes, list[tile * TILE + r], D) + u * 8);
            else *reinterpret_cast<uint4*>(skv + (dst - akv)) = make_uint4(0, 0, 0, 0);
        }
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        {
            // Scores: warp = (16 heads, 8 rows), the whole of D.
            int hm = (warp & 1) * 16, rn = (warp >> 1) * 8;
            float s0[4] = {}, s1[4] = {};
            for (int k = 0; k < ldd; k += 32) {
                uint32_t a[4], b[4];
                // Lanes 0..31 give rows rn.., units k/8 .. k/8+3: both k16 steps of the B operand at once.
                ldmatrix_x4(b, swizzled(akv, rn + (lane & 7), (k >> 3) + (lane >> 3), row_bytes));
                ldmatrix_x4(a, swizzled(aq, hm + (lane & 15), (k >> 3) + (lane >> 4), row_bytes));
                mma_bf16(s0, a[0], a[1], a[2], a[3], b[0], b[1]);
                ldmatrix_x4(a, swizzled(aq, hm + (lane & 15), (k >> 3) + 2 + (lane >> 4), row_bytes));
                mma_bf16(s1, a[0], a[1], a[2], a[3], b[2], b[3]);
            }
            float* o = ss + (hm + g) * 33 + rn + 2 * qd;
            o[0] = (s0[0] + s1[0]) * scale; o[1] = (s0[1] + s1[1]) * scale;
            o[8 * 33] = (s0[2] + s1[2]) * scale; o[8 * 33 + 1] = (s0[3] + s1[3]) * scale;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < HB / 8; ++i) {
            int h = warp * (HB / 8) + i;
            float s = lane < live ? ss[h * 33 + lane] : -INFINITY;
            float m_old = sm[h], m = fmaxf(m_old, warp_max(s)), p = expf(s - m), sum = warp_sum(p);
            sp[h * 40 + lane] = __float2bfloat16_rn(p);
            __syncwarp();
            if (lane == 0) {
                float c = expf(m_old - m);
                sm[h] = m; sm[2 * HB + h] = c; sm[HB + h] = sm[HB + h] * c + sum;
            }
        }
        __syncthreads();
        // Values: warp owns the column tiles warp, warp + 8, ... for all 32 heads.
        uint32_t a[2][2][4];
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int k = 0; k < 2; ++k) ldmatrix_x4(a[m][k], ap + ((m * 16 + (lane & 15)) * 40 + k * 16 + (lane >> 4) * 8) * 2);
        float c0 = sm[2 * HB + g], c1 = sm[2 * HB + g + 8], c2 = sm[2 * HB + g + 16], c3 = sm[2 * HB + g + 24];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int nt = warp + i * 8;
            if (nt >= nt_total) break;
            uint32_t b[4];
            ldmatrix_x4_trans(b, swizzled(akv, lane, nt, row_bytes));
            acc[0][i][0] *= c0; acc[0][i][1] *= c0; acc[0][i][2] *= c1; acc[0][i][3] *= c1;
            acc[1][i][0] *= c2; acc[1][i][1] *= c2; acc[1][i][2] *= c3; acc[1][i][3] *= c3;
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                mma_bf16(acc[m][i], a[m][0][0], a[m][0][1], a[m][0][2], a[m][0][3], b[0], b[1]);
                mma_bf16(acc[m][i], a[m][1][0], a[m][1][1], a[m][1][2], a[m][1][3], b[2], b[3]);
            }
        }
    }
    __syncthreads();
    if (splits > 1 && tid < HB && h0 + tid < H) {
        float* ml = part_ml + (((int64_t)split * T + t) * H + h0 + tid) * 2;
        ml[0] = sm[tid]; ml[1] = sm[HB + tid];
    }
    if (splits == 1 && tid < HB) {
        float l = sm[HB + tid] + (h0 + tid < H ? expf(sink[h0 + tid] - sm[tid]) : 0.0f);
        sm[2 * HB + tid] = l;
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int nt = warp + i * 8;
            if (nt >= nt_total) break;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                int h = m * 16 + r * 8 + g, d = nt * 8 + 2 * qd;
                if (h0 + h >= H) continue;
                float v0 = acc[m][i][2 * r], v1 = acc[m][i][2 * r + 1];
                int64_t at = ((int64_t)t * H + h0 + h) * D + d;
                if (splits == 1) {
                    float l = sm[2 * HB + h];
                    *reinterpret_cast<uint32_t*>(out + at) = pack_bf16(v0 / l, v1 / l);
                } else {
                    *reinterpret_cast<float2*>(part_o + (int64_t)split * T * H * D + at) = make_float2(v0, v1);
                }
            }
        }
}

extern "C" __global__ void __launch_bounds__(256) sparse_attn(const bf16* q, const float* cos_t, const float* sin_t, const __grid_constant__ Scopes scopes,
    const float* sink, bf16* out, float* part_o, float* part_ml, int T, int H, int D, int rd, float scale) {
    attend<false>(q, cos_t, sin_t, scopes, sink, out, part_o, part_ml, T, H, D, rd, scale);
}
extern "C" __global__ void __launch_bounds__(256) sparse_attn_packed(const bf16* q, const float* cos_t, const float* sin_t, const __grid_constant__ Scopes scopes,
    const float* sink, bf16* out, float* part_o, float* part_ml, int T, int H, int D, int rd, float scale) {
    attend<true>(q, cos_t, sin_t, scopes, sink, out, part_o, part_ml, T, H, D, rd, scale);
}
