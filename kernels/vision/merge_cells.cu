// merge_cells: r x r neighbouring patches become one row, channel first; zeros past the grid's edges.
//
// Maths    out[cell][ch*r*r + dy*r + dx] = x[(cy*r + dy)*n_w + cx*r + dx][ch], cells row-major over ceil(n_h/r) x ceil(n_w/r)
// Layout   x [n_h*n_w, c] bf16, out [cells, c*r*r] bf16
// Grid     (ceil(c*r*r/256), cells on y up to 65535 and strided beyond); block 256
// Numerics a copy
// Checked  gpu_check correctness (room `vision`), crates/vision/tests
#include "../common/util.cuh"

extern "C" __global__ void __launch_bounds__(256) merge_cells(const bf16* x, bf16* out, int n_h, int n_w, int c, int r) {
    int cols = (n_w + r - 1) / r, cells = ((n_h + r - 1) / r) * cols, area = r * r, width = c * area;
    int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= width) return;
    int ch = i / area, dy = i % area / r, dx = i % r;
    for (int cell = blockIdx.y; cell < cells; cell += gridDim.y) {
        int y = cell / cols * r + dy, xx = cell % cols * r + dx;
        out[(int64_t)cell * width + i] = y < n_h && xx < n_w ? x[((int64_t)y * n_w + xx) * c + ch] : __float2bfloat16_rn(0.0f);
    }
}
