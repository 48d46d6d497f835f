// hc_many: hc_step for many tokens, with the mixes on the tensor core; hc_finish follows, as after hc_step.
//
// Maths    as hc_step. fn is split into three bf16 pieces (8 bits of mantissa each, f32 in all), and the stream is bf16 by nature:
//          mix = sum over pieces of an exact bf16 product, added in f32
// Layout   as hc_step, C = 4; pieces [ceil(dim/64)][36864] bytes from hc_split_fn (once, when the weights are loaded): the B operands
//          of 64 columns, bf16 [copy][16 columns][8 of the 72 rows][lane][4]; part [T, slices, 32]
// Grid     hc_many: (slices, ceil(T/64)), block 512: a block takes 64 tokens and ceil(tiles/slices) tiles of 64 columns, a thread
//          eight columns of a token; dynamic shared memory 3*40960 + 2*36864 bytes.
//          hc_split_fn: 1-D over tiles*18432, block 256. dim a multiple of 32. `stream` may be `residual`
// Numerics the new stream is bit for bit hc_step's; the sums differ in order
// Checked  tests_cuda/check_stream.cuh
#include "../common/quantise.cuh"
#include "sums.cuh"

// Bytes of a stage, the rows of 64 tokens in 64 columns of four copies and x, and of the operands for 64 columns.
constexpr int NS = 3, COPY = 64 * 128, STAGE = 5 * COPY, PIECES = 4 * 4 * 9 * 32 * 8;

// pieces: see above; fn [24, 4*dim] f32. Columns past dim are zero.
extern "C" __global__ void hc_split_fn(const float* fn, bf16* pieces, int dim, int64_t n) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int at = i & 3, lane = i >> 2 & 31, rest = (int)(i >> 7), tile = rest / 144, row = rest % 9 * 8 + (lane >> 2), c = rest / 36 % 4;
    int d = tile * 64 + rest / 9 % 4 * 16 + (at >> 1) * 8 + (lane & 3) * 2 + (at & 1);
    float v = d < dim ? fn[((int64_t)(row % 24) * 4 + c) * dim + d] : 0.0f;
    bf16 b = __float2bfloat16_rn(v);
    for (int p = row / 24; p > 0; --p) {
        v -= __bfloat162float(b);
        b = __float2bfloat16_rn(v);
    }
    pieces[i] = b;
}

extern "C" __global__ void __launch_bounds__(512, 1) hc_many(const bf16* x, const bf16* residual, const float* post, const float* comb, const float* pre,
                                                             const bf16* pieces, bf16* stream, bf16* y, float* part, int T, int dim, int ld_coef) {
    extern __shared__ __align__(128) uint8_t smem[];  // [NS] STAGE | [2] PIECES
    int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, tt = tid >> 3, u = tid & 7;
    int64_t t = (int64_t)blockIdx.y * 64 + tt;
    bool live = t < T;
    int tiles = (dim + 63) >> 6, per = (tiles + gridDim.x - 1) / gridDim.x, first = blockIdx.x * per, end = min(tiles, first + per);
    // A thread's own units: unit u of its token's row at u ^ (row & 7), so that ldmatrix finds eight rows in eight different bank groups.
    uint8_t* own = smem + tt * 128 + ((u ^ (tt & 7)) << 4);
    // Rows and operands of a tile on their way; what does not exist is zero.
    auto fetch = [&](int tile) {
        if (tile < end) {
            int slot = (tile - first) % NS, d = tile * 64 + u * 8;
            uint8_t* to = own + slot * STAGE;
            if (live && d < dim) {
#pragma unroll
                for (int j = 0; j < 4; ++j) cp_async16(smem_addr(to) + j * COPY, residual + (t * 4 + j) * dim + d);
                if (x) cp_async16(smem_addr(to) + 4 * COPY, x + t * dim + d);
            } else {
#pragma unroll
                for (int j = 0; j < 5; ++j) *reinterpret_cast<uint4*>(to + j * COPY) = make_uint4(0, 0, 0, 0);
            }
        }
    };
    auto fetch_pieces = [&](int tile) {
        if (tile < end) {
            const uint8_t* src = reinterpret_cast<const uint8_t*>(pieces) + (int64_t)tile * PIECES;
            uint32_t dst = smem_addr(smem) + NS * STAGE + ((tile - first) & 1) * PIECES;
            for (int i = tid; i < PIECES / 16; i += 512) cp_async16(dst + i * 16, src + i * 16);
        }
    };
    fetch(first);
    cp_async_commit();
    fetch_pieces(first);
    cp_async_commit();
    fetch(first + 1);
    cp_async_commit();
    float pr[4] = {}, po[4] = {}, cm[16] = {};
    if (live) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (pre) pr[k] = pre[t * ld_coef + k];
            if (x) po[k] = post[t * ld_coef + k];
        }
        if (x)
#pragma unroll
            for (int k = 0; k < 16; ++k) cm[k] = comb[t * ld_coef + k];
    }
    // Warps share the products by 16 tokens and by copy.
    int quarter = warp & 3, copy = warp >> 2, row = quarter * 16 + (lane & 15);
    uint32_t a_row = smem_addr(smem) + copy * COPY + row * 128, swizzle = row & 7, unit = lane >> 4;
    float acc[9][4] = {}, ss = 0.0f, yy = 0.0f;
    for (int tile = first, slot = 0, buf = 0; tile < end; ++tile, buf ^= 1, slot = slot + 1 == NS ? 0 : slot + 1) {
        int d = tile * 64 + u * 8;
        bool there = live && d < dim;
        // This tile's rows; a thread reads what it copied itself, and puts the new stream in their place. Two later copies may last.
        cp_async_wait<2>();
        uint8_t* at = own + slot * STAGE;
        uint4 in[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) in[j] = *reinterpret_cast<const uint4*>(at + j * COPY);
        float yv[8];
        float xv[8];
        if (x) unpack8(*reinterpret_cast<const uint4*>(at + 4 * COPY), xv);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            uint4 s = in[k];
            if (x) {
                float n[8];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float v[8];
                    unpack8(in[j], v);
#pragma unroll
                    for (int i = 0; i < 8; ++i) n[i] = j == 0 ? first_term(cm[k], v[i]) : next_term(n[i], cm[j * 4 + k], v[i]);
                }
#pragma unroll
                for (int i = 0; i < 8; ++i) n[i] = next_term(n[i], po[k], xv[i]);
                s = pack8(n);
                *reinterpret_cast<uint4*>(at + k * COPY) = s;
                if (there) *reinterpret_cast<uint4*>(stream + (t * 4 + k) * dim + d) = s;
            }
            float v[8];
            unpack8(s, v);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                yv[i] = k == 0 ? first_term(pr[0], v[i]) : next_term(yv[i], pr[k], v[i]);
                ss += v[i] * v[i];
            }
        }
        if (pre) {
            uint4 o = pack8(yv);
            unpack8(o, yv);
#pragma unroll
            for (int i = 0; i < 8; ++i) yy += yv[i] * yv[i];
            if (there) *reinterpret_cast<uint4*>(y + t * dim + d) = o;
        }
        // The tile and its operands are here, and everybody is done with those before: their places are free.
        cp_async_wait<1>();
        __syncthreads();
        fetch_pieces(tile + 1);
        cp_async_commit();
        fetch(tile + 2);
        cp_async_commit();
        const uint2* b = reinterpret_cast<const uint2*>(smem + NS * STAGE + buf * PIECES) + copy * 4 * 9 * 32 + lane;
#pragma unroll
        for (int ks = 0; ks < 4; ++ks) {
            uint32_t a[4];
            ldmatrix_x4(a, a_row + slot * STAGE + (((ks * 2 + unit) ^ swizzle) << 4));
#pragma unroll
            for (int nt = 0; nt < 9; ++nt) {
                uint2 v = b[(ks * 9 + nt) * 32];
                mma_bf16(acc[nt], a[0], a[1], a[2], a[3], v.x, v.y);
            }
        }
    }
    // Sums over copies and pieces, in order. [copy][token][72] f32, padded.
    constexpr int LD = 76;
    float* sums = reinterpret_cast<float*>(smem);
    cp_async_wait<0>();
    __syncthreads();
    int g = lane >> 2, q = lane & 3;
#pragma unroll
    for (int nt = 0; nt < 9; ++nt)
#pragma unroll
        for (int r = 0; r < 2; ++r)
            *reinterpret_cast<float2*>(sums + (copy * 64 + quarter * 16 + g + 8 * r) * LD + nt * 8 + 2 * q) = make_float2(acc[nt][2 * r], acc[nt][2 * r + 1]);
#pragma unroll
    for (int o = 1; o < 8; o *= 2) {
        ss += __shfl_xor_sync(FULL, ss, o);
        yy += __shfl_xor_sync(FULL, yy, o);
    }
    __syncthreads();
    if (!live) return;
    // The places of hc_step's part: six rows of fn and two more four times; there, sum of s^2 at 6, sum of y^2 at 30.
    float* o = part + (t * gridDim.x + blockIdx.x) * 32;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        int r = u * 3 + i;
        float sum = 0.0f;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const float* from = sums + (c * 64 + tt) * LD + r;
            sum += from[0] + (from[24] + from[48]);
        }
        o[r / 6 * 8 + r % 6] = sum;
    }
    if (u == 0) { o[6] = ss; o[30] = yy; }
}
