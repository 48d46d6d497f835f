// split_sinkhorn: mixes to coefficients, C = 4.
//
// Maths    pre = sigmoid(mix * scale0 + base) + eps; post = 2 sigmoid(mix * scale1 + base); comb: row softmax + eps, then `iters`
//          column divisions with a row division before each but the first
// Layout   mixes, out [T, 24] f32 (out: pre | post | comb), scale [3], base [24] f32
// Grid     ceil(T/4), block 128: a warp a token
// Numerics sinkhorn.cuh
// Checked  tests_cuda/check.cu, crates/hyperconn/tests
#include "sinkhorn.cuh"

extern "C" __global__ void __launch_bounds__(128) split_sinkhorn(const float* mixes, const float* scale, const float* base, float* out, int T, int iters,
                                                                 float eps) {
    int64_t t = (int64_t)blockIdx.x * 4 + (threadIdx.x >> 5);
    int lane = threadIdx.x & 31;
    if (t >= T) return;
    float c = split_sinkhorn4((double)mixes[t * 24 + min(lane, 23)], MixScale(scale, base), {iters, eps});
    if (lane < 24) out[t * 24 + lane] = c;
}
