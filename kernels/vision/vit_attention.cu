// vit_attention: full attention among the patches of each image, several images in one launch.
//
// Maths    s = (q . k) * scale in f32; p = exp(s - m) against a running maximum m of tiles of 64 keys; l = sum p;
//          out = bf16(sum bf16(p) v / l)
// Layout   qkv [N, 3, H, hd] bf16, starts [images + 1] i32 (patches starts[i] .. starts[i+1] are image i's), out [N, H*hd] bf16
// Grid     vit_attention_D: (ceil(largest image/128), H, images); block 128 for D = 32 and 64, 256 for D = 96 and 128; dynamic shared
//          memory 256*(2*D + 16). D is hd or the next of those: columns past hd are zeros. hd a multiple of 4
// Numerics bf16 operands, f32 sums; p is rounded where it meets v and not where it is summed. The exponential is the hardware's. A
//          query's result depends on its own image alone
// Checked  gpu_check correctness (room `vision`), crates/vision/tests
#include "../common/util.cuh"

#define QUERIES 128
#define KEYS 64

// `bytes` of 16 (or 8) from `src`, the rest zeros; with 0 nothing is read.
__device__ __forceinline__ void copy16(uint32_t dst, const void* src, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes));
}
__device__ __forceinline__ void copy8(uint32_t dst, const void* src, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(dst), "l"(src), "r"(bytes));
}
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Rows of hd values, `ld` apart, into rows of D; zeros past `rows` and past hd. A row in shared memory is an odd number of 16-byte
// units, so that the eight rows of a matrix lie in different banks.
template <int D, int ROWS, int THREADS>
__device__ __forceinline__ void load_rows(uint32_t dst, const bf16* src, int64_t ld, int rows, int hd) {
    if ((hd & 7) == 0) {
        constexpr int UNITS = D / 8;
#pragma unroll
        for (int k = 0; k < ROWS * UNITS / THREADS; ++k) {
            int i = threadIdx.x + k * THREADS, r = i / UNITS, u = i % UNITS;
            bool live = r < rows && u * 8 < hd;
            copy16(dst + r * (2 * D + 16) + u * 16, live ? src + r * ld + u * 8 : src, live ? 16 : 0);
        }
    } else {
        // Heads begin at multiples of eight bytes only.
        constexpr int UNITS = D / 4;
        for (int i = threadIdx.x; i < ROWS * UNITS; i += THREADS) {
            int r = i / UNITS, u = i % UNITS;
            bool live = r < rows && u * 4 < hd;
            copy8(dst + r * (2 * D + 16) + u * 8, live ? src + r * ld + u * 4 : src, live ? 8 : 0);
        }
    }
}

// MT tiles of 16 queries a warp: more of them read keys and values from shared memory less often, and take registers.
template <int D, int MT>
__device__ __forceinline__ void attend(const bf16* qkv, const int* starts, bf16* out, int H, int hd, float scale) {
    constexpr int WARPS = QUERIES / (16 * MT), THREADS = 32 * WARPS, ROW = 2 * D + 16, NT = KEYS / 8;
    extern __shared__ __align__(128) uint8_t smem[];
    int first = starts[blockIdx.z], n = starts[blockIdx.z + 1] - first, q0 = blockIdx.x * QUERIES;
    if (q0 >= n) return;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, qd = lane & 3, row8 = lane & 7, mat = lane >> 3;
    int64_t ld = (int64_t)3 * H * hd;
    const bf16* base = qkv + first * ld + (int64_t)blockIdx.y * hd;
    const bf16 *keys = base + H * hd, *values = keys + H * hd;

    // Two stages of keys and values; the queries pass through the second one into registers.
    uint32_t stage0 = smem_addr(smem), stage1 = stage0 + 2 * KEYS * ROW;
    load_rows<D, QUERIES, THREADS>(stage1, base + q0 * ld, ld, n - q0, hd);
    cp_async_commit();
    load_rows<D, KEYS, THREADS>(stage0, keys, ld, n, hd);
    load_rows<D, KEYS, THREADS>(stage0 + KEYS * ROW, values, ld, n, hd);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    uint32_t q[MT][D / 16][4];
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk)
            ldmatrix_x4(q[mt][kk], stage1 + ((warp * MT + mt) * 16 + (mat & 1) * 8 + row8) * ROW + kk * 32 + (mat >> 1) * 16);
    __syncthreads();

    const float none = __int_as_float(0xff800000), c = scale * 1.44269504089f;
    float o[MT][D / 8][4] = {}, m[MT][2], l[MT][2];
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) m[mt][0] = m[mt][1] = none, l[mt][0] = l[mt][1] = 0.0f;

    int tiles = (n + KEYS - 1) / KEYS;
    for (int tile = 0; tile < tiles; ++tile) {
        uint32_t sk = tile & 1 ? stage1 : stage0, sv = sk + KEYS * ROW;
        if (tile + 1 < tiles) {
            uint32_t next = tile & 1 ? stage0 : stage1;
            int at = (tile + 1) * KEYS;
            load_rows<D, KEYS, THREADS>(next, keys + at * ld, ld, n - at, hd);
            load_rows<D, KEYS, THREADS>(next + KEYS * ROW, values + at * ld, ld, n - at, hd);
            cp_async_commit();
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();

        float s[MT][NT][4] = {};
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk)
#pragma unroll
            for (int np = 0; np < NT / 2; ++np) {
                uint32_t b[4];
                ldmatrix_x4(b, sk + (np * 16 + (mat >> 1) * 8 + row8) * ROW + kk * 32 + (mat & 1) * 16);
#pragma unroll
                for (int mt = 0; mt < MT; ++mt) {
                    const uint32_t(&a)[4] = q[mt][kk];
                    mma_bf16(s[mt][2 * np], a[0], a[1], a[2], a[3], b[0], b[1]);
                    mma_bf16(s[mt][2 * np + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
                }
            }
        int live = n - tile * KEYS;
        if (live < KEYS) {
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (nt * 8 + 2 * qd + (i & 1) >= live) s[mt][nt][i] = none;
        }

        uint32_t p[MT][NT][2];
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float top = m[mt][h];
#pragma unroll
                for (int nt = 0; nt < NT; ++nt) top = fmaxf(top, fmaxf(s[mt][nt][2 * h], s[mt][nt][2 * h + 1]));
                top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
                top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
                // Scores of -inf alone would give inf - inf. The difference comes before the factor: it is exactly 0 at the maximum,
                // however large that is.
                float from = top == none ? 0.0f : top, keep = exp2_fast((m[mt][h] - from) * c), sum = 0.0f;
                m[mt][h] = top;
#pragma unroll
                for (int nt = 0; nt < NT; ++nt) {
                    float a = exp2_fast((s[mt][nt][2 * h] - from) * c), b = exp2_fast((s[mt][nt][2 * h + 1] - from) * c);
                    sum += a + b;
                    p[mt][nt][h] = pack_bf16(a, b);
                }
                l[mt][h] = l[mt][h] * keep + sum;
#pragma unroll
                for (int dt = 0; dt < D / 8; ++dt) o[mt][dt][2 * h] *= keep, o[mt][dt][2 * h + 1] *= keep;
            }

#pragma unroll
        for (int j = 0; j < KEYS / 16; ++j)
#pragma unroll
            for (int dp = 0; dp < D / 16; ++dp) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, sv + (j * 16 + (mat & 1) * 8 + row8) * ROW + dp * 32 + (mat >> 1) * 16);
#pragma unroll
                for (int mt = 0; mt < MT; ++mt) {
                    uint32_t a0 = p[mt][2 * j][0], a1 = p[mt][2 * j][1], a2 = p[mt][2 * j + 1][0], a3 = p[mt][2 * j + 1][1];
                    mma_bf16(o[mt][2 * dp], a0, a1, a2, a3, b[0], b[1]);
                    mma_bf16(o[mt][2 * dp + 1], a0, a1, a2, a3, b[2], b[3]);
                }
            }
        __syncthreads();
    }

#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float sum = l[mt][h];
            sum += __shfl_xor_sync(FULL, sum, 1);
            sum += __shfl_xor_sync(FULL, sum, 2);
            int query = q0 + (warp * MT + mt) * 16 + h * 8 + g;
            if (query >= n) continue;
            bf16* to = out + ((int64_t)(first + query) * H + blockIdx.y) * hd;
#pragma unroll
            for (int dt = 0; dt < D / 8; ++dt) {
                int d = dt * 8 + 2 * qd;
                if (d < hd) *reinterpret_cast<uint32_t*>(to + d) = pack_bf16(o[mt][dt][2 * h] / sum, o[mt][dt][2 * h + 1] / sum);
            }
        }
}

#define KERNEL(D, MT)                                                                                                       \
    extern "C" __global__ void __launch_bounds__(512 / (2 * MT), MT) vit_attention_##D(const bf16* qkv, const int* starts, bf16* out, int H, \
                                                                                       int hd, float scale) {              \
        attend<D, MT>(qkv, starts, out, H, hd, scale);                                                                      \
    }
KERNEL(32, 2)
KERNEL(64, 2)
KERNEL(96, 1)
KERNEL(128, 1)
