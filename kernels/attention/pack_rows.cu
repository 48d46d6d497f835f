// pack_rows: rows that were rounded to fp8 or fp4, as codes and scales at given places of a pool.
//
// Maths    of the scales under which every value of a group is a code exactly, the first: kind 1 and 2 the smallest power of two under
//          which the largest magnitude does not overflow; kind 3 that magnitude over 6, 4, 3, 2, 1.5, 1, 0.5. A group of zeros has
//          scale byte 1; one with a NaN has NaN as its scale and codes of 0
// Layout   src [T, D] bf16, rows [T] i32 (-1 = skip), codes [rows, D] (kind 1) or [rows, D/2], scales [rows, D/32] or [rows, D/16]
//          (kind 3); kinds as norm_rope_quant's
// Grid     one block per row, block 128; D a multiple of the group
// Numerics exact. Values that no scale holds exactly (the CPU refuses them) become the nearest codes
// Checked  tests_cuda/check_packed.cuh, gpu_check (byte for byte the CPU's)
#include "pack_row.cuh"

extern "C" __global__ void __launch_bounds__(128) pack_rows(const bf16* src, const int32_t* rows, uint8_t* codes, uint8_t* scales, int D, int kind) {
    after_previous();
    int64_t row = rows[blockIdx.x];
    if (row >= 0) pack_row(src + (int64_t)blockIdx.x * D, row, codes, scales, D, kind);
}
