// embedding: token rows of a bf16 table, written once or to each of the residual stream's copies.
//
// Layout   ids [T] u32, table [rows, dim] bf16 holding vocabulary rows first .. first+rows, out [T, copies, dim] bf16
// Grid     one block per token, block 256; dim a multiple of 8
// Numerics a copy; ids outside the shard give zeros (the all-reduce of a sharded table adds the owner's row)
// Checked  tests_cuda/check.cu, crates/model/tests
#include "../common/util.cuh"

extern "C" __global__ void embedding(const uint32_t* ids, const bf16* table, bf16* out, int dim, int copies, uint32_t first, uint32_t rows) {
    after_previous();
    uint32_t id = ids[blockIdx.x] - first;
    const uint4* src = reinterpret_cast<const uint4*>(table + (int64_t)id * dim);
    uint4* dst = reinterpret_cast<uint4*>(out + (int64_t)blockIdx.x * copies * dim);
    int units = dim >> 3;
    for (int u = threadIdx.x; u < units; u += blockDim.x) {
        uint4 v = id < rows ? src[u] : make_uint4(0, 0, 0, 0);
        for (int c = 0; c < copies; ++c) dst[c * units + u] = v;
    }
}
