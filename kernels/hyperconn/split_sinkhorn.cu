// split_sinkhorn: pre/post/comb coefficients of hyper-connections from their mixes, C = 4.
//
// Maths    pre = sigmoid(m*s0 + b) + eps, post = 2 sigmoid(m*s1 + b), comb = sinkhorn(softmax_row(m*s2 + b) + eps)
// Layout   mixes [T, 24] f32, scale [3], base [24] f32; out [T, 24] f32: pre | post | comb
// Grid     one thread per token, block 128; C == 4 in registers, other C refused on the host
// Numerics all f32; order of the row and column passes as the reference
// Checked  tests_cuda/check.cu, crates/hyperconn/tests
#include "sinkhorn.cuh"

extern "C" __global__ void __launch_bounds__(128) split_sinkhorn(const float* mixes, const float* scale, const float* base, float* out, int T, int iters,
                                                                 float eps) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= T) return;
    float m[24], pre[4], post[4], comb[16];
#pragma unroll
    for (int i = 0; i < 24; ++i) m[i] = mixes[t * 24 + i];
    split_sinkhorn4(m, scale, base, {iters, eps}, pre, post, comb);
    float* o = out + (int64_t)t * 24;
#pragma unroll
    for (int i = 0; i < 4; ++i) { o[i] = pre[i]; o[4 + i] = post[i]; }
#pragma unroll
    for (int i = 0; i < 16; ++i) o[8 + i] = comb[i];
}
