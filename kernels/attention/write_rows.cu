// write_rows: rows copied into a pool at given places.
//
// Layout   src [T, row_bytes], rows [T] i32 (-1 = skip), pool [rows, row_bytes]; four bytes at a time where row_bytes is a multiple of 4
// Grid     one block per row, block 128
// Numerics a copy
// Checked  tests_cuda/check.cu, crates/attention/tests
#include "../common/util.cuh"

extern "C" __global__ void write_rows(const uint8_t* src, const int32_t* rows, uint8_t* pool, int row_bytes) {
    after_previous();
    int64_t row = rows[blockIdx.x];
    if (row < 0) return;
    if (row_bytes & 3) {
        for (int i = threadIdx.x; i < row_bytes; i += blockDim.x) pool[row * row_bytes + i] = src[(int64_t)blockIdx.x * row_bytes + i];
        return;
    }
    const uint32_t* s = reinterpret_cast<const uint32_t*>(src + (int64_t)blockIdx.x * row_bytes);
    uint32_t* d = reinterpret_cast<uint32_t*>(pool + row * row_bytes);
    for (int i = threadIdx.x; i < row_bytes >> 2; i += blockDim.x) d[i] = s[i];
}
