// The coefficients of one token from its 24 mixes, C = 4, by one warp.
#pragma once
#include "../common/util.cuh"

struct SinkhornParams {
    int iters;
    float eps;
};

// Of a normal number: a denominator here is at least eps times what it was.
__device__ __forceinline__ float reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
// One step of Newton's from the f32 estimate: 2^-45 or better.
__device__ __forceinline__ double reciprocal(double x) {
    double r = (double)reciprocal((float)x);
    return fma(fma(-x, r, 1.0), r, r);
}

// Lane i < 24 gives mix i and gets coefficient i: pre [4], post [4], comb [4][4] (row j = source copy). All lanes call.
// The order of passes is the reference's. f64 decides: the last passes are f64, from factors that f32 brought on their way, whose
// rounding each pass takes back as it takes back everything else that is not yet balanced.
__device__ __forceinline__ float split_sinkhorn4(double mix, const float* scale, const float* base, SinkhornParams p) {
    constexpr int LAST = 6;  // passes in f64
    int lane = threadIdx.x & 31;
    // Lanes past the last mix repeat it.
    int part = lane < 4 ? 0 : lane < 8 ? 1 : 2;
    double t = mix * (double)scale[part] + (double)base[min(lane, 23)], eps = (double)p.eps;
    // Rows of comb are four neighbouring lanes.
    double mx = fmax(t, __shfl_xor_sync(FULL, t, 1));
    mx = fmax(mx, __shfl_xor_sync(FULL, mx, 2));
    double e = exp(part == 2 ? t - mx : -t), sum = e + __shfl_xor_sync(FULL, e, 1);
    sum += __shfl_xor_sync(FULL, sum, 2);
    double first = part == 2 ? e / sum + eps : part == 0 ? 1.0 / (1.0 + e) + eps : 2.0 / (1.0 + e);
    // From here on every lane holds all of comb: each pass is a few dependent steps, an exchange between lanes would be more.
    // comb stays as it is, and every pass changes a factor per row (u) or per column (v) instead: dividing row j by (its sum + eps) is
    // u_j <- u_j / (u_j s_j + eps) = 1 / (s_j + eps / u_j) with s_j = sum_k comb_jk v_k, and 1/u_j is the last denominator.
    // The same numbers up to rounding, in half the dependent steps. A pair of passes depends on the denominators a, b alone: where it
    // leaves them as they were, bit for bit, so will every later one.
    float comb[16], u[4] = {1, 1, 1, 1}, v[4] = {1, 1, 1, 1}, a[4] = {1, 1, 1, 1}, b[4] = {1, 1, 1, 1}, single = (float)first;
#pragma unroll
    for (int i = 0; i < 16; ++i) comb[i] = __shfl_sync(FULL, single, 8 + i);
    int rough = max(p.iters - LAST, 0);
#pragma unroll 1
    for (int it = 0; it < rough; ++it) {
        bool moved = it == 0;
        if (it) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float s = fmaf(comb[j * 4 + 3], v[3], fmaf(comb[j * 4 + 2], v[2], fmaf(comb[j * 4 + 1], v[1], fmaf(comb[j * 4], v[0], p.eps * a[j]))));
                moved |= s != a[j];
                a[j] = s;
                u[j] = reciprocal(s);
            }
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            float s = fmaf(comb[12 + k], u[3], fmaf(comb[8 + k], u[2], fmaf(comb[4 + k], u[1], fmaf(comb[k], u[0], p.eps * b[k]))));
            moved |= s != b[k];
            b[k] = s;
            v[k] = reciprocal(s);
        }
        if (!moved) break;
    }
    // In f64 lane j of a quad has row and column j.
    int own = lane & 3;
    auto of_own = [&](const float(&x)[4]) { return (double)(own == 0 ? x[0] : own == 1 ? x[1] : own == 2 ? x[2] : x[3]); };
    double row[4], col[4], da = of_own(a), db = of_own(b), du = rough > 1 ? reciprocal(da) : 1.0, dv = rough > 0 ? reciprocal(db) : 1.0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        row[i] = __shfl_sync(FULL, first, 8 + own * 4 + i);
        col[i] = __shfl_sync(FULL, first, 8 + i * 4 + own);
    }
    // c . x over the quad's four x, plus eps * last.
    auto pass = [&](const double(&c)[4], double x, double last) {
        double s = eps * last;
#pragma unroll
        for (int i = 0; i < 4; ++i) s = fma(c[i], __shfl_sync(FULL, x, i, 4), s);
        return s;
    };
#pragma unroll 1
    for (int it = rough; it < p.iters; ++it) {
        if (it) {
            da = pass(row, dv, da);
            du = reciprocal(da);
        }
        db = pass(col, du, db);
        dv = reciprocal(db);
    }
    int at = (lane - 8) & 15;
    double uj = __shfl_sync(FULL, du, at >> 2), vk = __shfl_sync(FULL, dv, at & 3);
    return (float)(part == 2 ? first * (uj * vk) : first);
}
