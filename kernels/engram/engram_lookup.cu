// engram_lookup: table rows widened to bf16; the table may lie in GPU memory or in mapped host memory.
//
// Maths    out = bf16(e4m3(code) * 2^(scale - 127)) (exact); rows of another rank's shard read as 0
// Layout   hash [T, ld_hash] u32, its first `cols` columns used; codes [rows, hd] u8, scales [rows, hd/32] u8 (device
//          pointers, or the device addresses of pinned host memory, of any alignment); out [T, cols*hd] bf16
// Grid     hd/16 lanes per row: block 64, ceil(T*cols*(hd/16) / 64) blocks; hd a multiple of 32
// Numerics exact
// Checked  tests_cuda/check.cu, crates/engram/tests
#include "../common/util.cuh"

extern "C" __global__ void __launch_bounds__(64) engram_lookup(const uint32_t* hash, const uint8_t* codes, const uint8_t* scales, bf16* out, int T, int cols,
                                                               int ld_hash, int hd, uint32_t first, uint32_t rows) {
    int per = hd >> 4, i = blockIdx.x * blockDim.x + threadIdx.x, item = i / per, u = i % per;
    if (item >= T * cols) return;
    int64_t row = (uint32_t)(hash[(int64_t)(item / cols) * ld_hash + item % cols] - first);
    uint4 c = make_uint4(0, 0, 0, 0);
    uint32_t s = 127;
    if (row < rows) {
        const uint8_t* from = codes + row * hd + u * 16;
        // A table in a mapped file begins where the file has it; one in GPU memory is aligned.
        if (((uintptr_t)from & 15) == 0) {
            c = load_stream(from);
        } else if (((uintptr_t)from & 7) == 0) {
            uint2 lo = __ldg(reinterpret_cast<const uint2*>(from)), hi = __ldg(reinterpret_cast<const uint2*>(from) + 1);
            c = make_uint4(lo.x, lo.y, hi.x, hi.y);
        } else {
            uint32_t v[4] = {0, 0, 0, 0};
#pragma unroll
            for (int j = 0; j < 16; ++j) v[j >> 2] |= (uint32_t)__ldg(from + j) << (8 * (j & 3));
            c = make_uint4(v[0], v[1], v[2], v[3]);
        }
        s = scales[row * (hd >> 5) + (u >> 1)];
    }
    float f = e8m0_to_f32(s);
    uint32_t w[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        uint32_t v = (j < 2 ? c.x : j < 4 ? c.y : j < 6 ? c.z : c.w) >> (16 * (j & 1));
        w[j] = pack_bf16(e4m3_to_f32(v & 255) * f, e4m3_to_f32(v >> 8 & 255) * f);
    }
    uint4* o = reinterpret_cast<uint4*>(out + (int64_t)item * hd + u * 16);
    o[0] = make_uint4(w[0], w[1], w[2], w[3]);
    o[1] = make_uint4(w[4], w[5], w[6], w[7]);
}
