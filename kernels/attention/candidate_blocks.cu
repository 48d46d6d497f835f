// block_max: the score of each block of positions, ready for topk_rows; with it, the candidate blocks of a query.
//
// Maths    key[b] = max over the block's positions; the block of the newest visible position is pinned to 65535;
//          0 where no position is visible
// Layout   keys [T, ld] u16 of index_scores, spans [T] int2, out [T, ld_out] u16; then topk_rows(out, spans = null)
// Grid     (ceil(blocks / 256), T), block 256
// Numerics integers
// Checked  tests_cuda/check.cu, crates/attention/tests
#include "../common/util.cuh"

extern "C" __global__ void block_max(const uint16_t* keys, const int2* spans, uint16_t* out, int n, int64_t ld, int64_t ld_out, int block) {
    int b = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y, blocks = (n + block - 1) / block;
    if (b >= blocks) return;
    int visible = min(spans[t].y, n), lo = b * block, hi = min(lo + block, visible);
    uint16_t m = 0;
    for (int i = lo; i < hi; ++i) m = max(m, keys[t * ld + i]);
    // Nothing visible pins nothing: the reference's floor division gives block -1 there.
    if (visible > 0 && (visible - 1) / block == b) m = 65535;
    out[t * ld_out + b] = m;
}
