// hc_many: hc_step for many tokens, with the mixes on the tensor core; hc_finish follows, as after hc_step.
//
// Maths    as hc_step. fn is split into three bf16 pieces (8 bits of mantissa each, f32 in all), and the stream is bf16 by nature:
//          mix = sum over pieces of an exact bf16 product, added in f32
// Layout   as hc_step, C = 4; pieces [3, 24, 4*dim] bf16 from hc_split_fn (once, when the weights are loaded); part [T, slices, 32]
// Grid     hc_many: (slices, ceil(T/128)), block 256, slices = ceil(dim/160): a warp takes 16 tokens, a block 160 columns;
//          dynamic shared memory 128*28*4 + 2*18432 bytes.
//          hc_split_fn: 1-D over 24*4*dim, block 256. dim a multiple of 32. `stream` may be `residual`
// Numerics the new stream is bit for bit hc_step's; the sums differ in order
// Checked  tests_cuda/check_stream.cuh
#include "../common/quantise.cuh"

constexpr int COLUMNS = 160, PIECES = 4 * 72 * 64, COEF = 28;  // a token's 24 coefficients, padded so that eight tokens lie in different banks

extern "C" __global__ void hc_split_fn(const float* fn, bf16* pieces, int64_t n) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = fn[i];
#pragma unroll
    for (int p = 0; p < 3; ++p) {
        bf16 b = __float2bfloat16_rn(v);
        pieces[p * n + i] = b;
        v -= __bfloat162float(b);
    }
}

extern "C" __global__ void __launch_bounds__(256, 2) hc_many(const bf16* x, const bf16* residual, const float* post, const float* comb, const float* pre,
                                                             const bf16* pieces, bf16* stream, bf16* y, float* part, int T, int dim, int ld_coef) {
    extern __shared__ __align__(128) uint8_t smem[];
    float(*coef)[COEF] = reinterpret_cast<float(*)[COEF]>(smem);  // [128]: pre | post | comb
    uint8_t* fs = smem + 128 * COEF * 4;                         // [2][copy][72 rows][32 columns]: the pieces of two blocks
    int64_t fn_row = 4 * (int64_t)dim;
    // The next block's pieces are on their way while this one is multiplied: all warps use the same ones.
    auto fetch = [&](int d, int buf) {
        uint32_t dst = smem_addr(fs) + buf * PIECES;
        for (int i = threadIdx.x; i < PIECES / 16; i += 256) {
            int u = i & 3, row = (i >> 2) % 72, c = (i >> 2) / 72;
            cp_async16(dst + i * 16, pieces + row * fn_row + (int64_t)c * dim + d + u * 8);
        }
    };
    fetch(blockIdx.x * COLUMNS, 0);
    cp_async_commit();
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, tb = blockIdx.y * 128;
    for (int i = threadIdx.x; i < 128 * 24; i += 256) {
        int t = i / 24, c = i % 24;
        float v = 0.0f;
        if (tb + t < T) {
            int64_t at = (int64_t)(tb + t) * ld_coef;
            v = c < 4 ? (pre ? pre[at + c] : 0.0f) : !x ? 0.0f : c < 8 ? post[at + c - 4] : comb[at + c - 8];
        }
        coef[t][c] = v;
    }
    int t0 = tb + warp * 16;
    float acc[9][4] = {}, ss[2] = {0, 0}, yy[2] = {0, 0};
    int d1 = min(dim, (int)(blockIdx.x + 1) * COLUMNS);
    for (int d0 = blockIdx.x * COLUMNS, buf = 0; d0 < d1; d0 += 32, buf ^= 1) {
        cp_async_wait<0>();
        __syncthreads();
        if (d0 + 32 < d1) fetch(d0 + 32, buf ^ 1);
        cp_async_commit();
        if (t0 >= T) continue;
        // Lane 4g + q: tokens g and g + 8, columns q*8 .. +7 of the block; s[row][copy] holds them as four bf16 pairs.
        uint32_t s[2][4][4];
        int d = d0 + q * 8;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int t = t0 + g + 8 * r;
            bool live = t < T;
            const float* cf = coef[warp * 16 + g + 8 * r];
            uint4 in[4], xin = make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int j = 0; j < 4; ++j) in[j] = live ? *reinterpret_cast<const uint4*>(residual + ((int64_t)t * 4 + j) * dim + d) : make_uint4(0, 0, 0, 0);
            if (x && live) xin = *reinterpret_cast<const uint4*>(x + (int64_t)t * dim + d);
            if (x) {
                float xv[8], n[8];
                unpack8(xin, xv);
                float4 po = *reinterpret_cast<const float4*>(cf + 4);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    float p = k == 0 ? po.x : k == 1 ? po.y : k == 2 ? po.z : po.w;
#pragma unroll
                    for (int i = 0; i < 8; ++i) n[i] = 0.0f;
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        float v[8], c = cf[8 + j * 4 + k];
                        unpack8(in[j], v);
#pragma unroll
                        for (int i = 0; i < 8; ++i) n[i] += c * v[i];
                    }
#pragma unroll
                    for (int i = 0; i < 8; ++i) n[i] += p * xv[i];
                    uint4 o = pack8(n);
                    s[r][k][0] = o.x; s[r][k][1] = o.y; s[r][k][2] = o.z; s[r][k][3] = o.w;
                    if (live) *reinterpret_cast<uint4*>(stream + ((int64_t)t * 4 + k) * dim + d) = o;
                }
            } else {
#pragma unroll
                for (int k = 0; k < 4; ++k) { s[r][k][0] = in[k].x; s[r][k][1] = in[k].y; s[r][k][2] = in[k].z; s[r][k][3] = in[k].w; }
            }
            float yv[8] = {0, 0, 0, 0, 0, 0, 0, 0}, sq = 0.0f;
            float4 pr = *reinterpret_cast<const float4*>(cf);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                float v[8], p = k == 0 ? pr.x : k == 1 ? pr.y : k == 2 ? pr.z : pr.w;
                unpack8(make_uint4(s[r][k][0], s[r][k][1], s[r][k][2], s[r][k][3]), v);
#pragma unroll
                for (int i = 0; i < 8; ++i) { yv[i] += p * v[i]; sq += v[i] * v[i]; }
            }
            ss[r] += sq;
            if (pre) {
                uint4 o = pack8(yv);
                unpack8(o, yv);
#pragma unroll
                for (int i = 0; i < 8; ++i) yy[r] += yv[i] * yv[i];
                if (live) *reinterpret_cast<uint4*>(y + (int64_t)t * dim + d) = o;
            }
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const uint4* f = reinterpret_cast<const uint4*>(fs + buf * PIECES) + (c * 72 + g) * 4 + q;
#pragma unroll
            for (int nt = 0; nt < 9; ++nt) {
                uint4 b = f[nt * 32];
                mma_bf16(acc[nt], s[0][c][0], s[1][c][0], s[0][c][1], s[1][c][1], b.x, b.y);
                mma_bf16(acc[nt], s[0][c][2], s[1][c][2], s[0][c][3], s[1][c][3], b.z, b.w);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        ss[r] += __shfl_xor_sync(FULL, ss[r], 1); ss[r] += __shfl_xor_sync(FULL, ss[r], 2);
        yy[r] += __shfl_xor_sync(FULL, yy[r], 1); yy[r] += __shfl_xor_sync(FULL, yy[r], 2);
        int t = t0 + g + 8 * r;
        if (t >= T) continue;
        // The places of hc_step's part: rows 0..11, sum of s^2 at 12, rows 12..23 from 16, sum of y^2 at 28.
        float* o = part + ((int64_t)t * gridDim.x + blockIdx.x) * 32;
#pragma unroll
        for (int n = 0; n < 3; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int row = 8 * n + 2 * q + i;
                o[row < 12 ? row : row + 4] = acc[n][2 * r + i] + (acc[3 + n][2 * r + i] + acc[6 + n][2 * r + i]);
            }
        if (q == 0) { o[12] = ss[r]; o[28] = yy[r]; }
    }
}
