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
// One step of Newton's from an estimate of 20 bits: 2^-39 or better.
__device__ __forceinline__ double reciprocal(double x) {
    double r;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(r) : "d"(x));
    return fma(fma(-x, r, 1.0), r, r);
}
// exp(x) to 2^-42 for |x| up to 700: 2^n times a series in what n leaves of x.
__device__ __forceinline__ double exp_near(double x) {
    constexpr double UNIT = 6755399441055744.0;  // 1.5 * 2^52: a sum with this is rounded to a whole number
    double n = fma(x, 1.4426950408889634, UNIT);
    int k = __double2loint(n);
    double f = fma(n - UNIT, -0.6931471805599453, x), f2 = f * f, f4 = f2 * f2, f8 = f4 * f4;
    double p01 = 1.0 + f, p23 = fma(f, 1.0 / 6, 0.5), p45 = fma(f, 1.0 / 120, 1.0 / 24), p67 = fma(f, 1.0 / 5040, 1.0 / 720);
    double p89 = fma(f, 1.0 / 362880, 1.0 / 40320), low = fma(fma(p67, f2, p45), f4, fma(p23, f2, p01)), high = fma(f2, 1.0 / 3628800, p89);
    return fma(high, f8, low) * __hiloint2double((k + 1023) << 20, 0);
}

// What a lane's mix is scaled and moved by.
struct MixScale {
    float scale, base;
    __device__ __forceinline__ MixScale(const float* scales, const float* bases) {
        int lane = threadIdx.x & 31;
        scale = scales[lane < 4 ? 0 : lane < 8 ? 1 : 2];
        base = bases[min(lane, 23)];
    }
};

// One pass over rows (STRIDE 1) or columns (4) of comb: sums s_i = start(i, last s_i) + sum_k c_ik x_k, and what follows from them.
// Step by step for all four: the steps of one depend on each other.
template <int STRIDE, typename Start, typename Next>
__device__ __forceinline__ void sinkhorn_pass(const float (&c)[16], const float (&x)[4], float (&s)[4], float (&y)[4], Start start, Next next) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = start(i, s[i]);
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[i] = fmaf(c[STRIDE == 1 ? 4 * i + k : i + 4 * k], x[k], s[i]);
    next(s, y);
}
// y_i <- y_i + f_i (e_i + e_i^2 + e_i^3)
__device__ __forceinline__ void sinkhorn_series(const float (&e)[4], const float (&f)[4], float (&y)[4]) {
    float q[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] = fmaf(e[i], e[i], e[i]);
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] = fmaf(e[i], q[i], e[i]);
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = fmaf(f[i], q[i], y[i]);
}

// Lane i < 24 gives mix i and gets coefficient i: pre [4], post [4], comb [4][4] (row j = source copy). All lanes call.
// The order of passes is the reference's. Every lane holds all of comb: a pass is a few dependent steps, an exchange between lanes would
// be more.
__device__ __forceinline__ float split_sinkhorn4(double mix, MixScale m, SinkhornParams p) {
    constexpr float NEAR = 0x1p-6f;
    int lane = threadIdx.x & 31, row = (lane - 8) >> 2 & 3, col = lane & 3;
    // Lanes past the last mix repeat it.
    int part = lane < 4 ? 0 : lane < 8 ? 1 : 2;
    double t = mix * (double)m.scale + (double)m.base, eps = (double)p.eps;
    // Rows of comb are four neighbouring lanes. Any number near the largest keeps the exponential in range.
    float rounded = (float)t, near = fmaxf(rounded, __shfl_xor_sync(FULL, rounded, 1));
    near = fmaxf(near, __shfl_xor_sync(FULL, near, 2));
    double e = part == 2 ? t - (double)near : -t;
    e = exp_near(e > 700.0 ? 700.0 : e < -700.0 ? -700.0 : e);
    double sum = e + __shfl_xor_sync(FULL, e, 1);
    sum += __shfl_xor_sync(FULL, sum, 2);
    double z = (part == 2 ? e : part == 1 ? 2.0 : 1.0) * reciprocal(part == 2 ? sum : 1.0 + e);
    if (part != 1) z += eps;
    float comb[16], u[4] = {1, 1, 1, 1}, v[4] = {1, 1, 1, 1}, a[4] = {1, 1, 1, 1}, b[4] = {1, 1, 1, 1};
    auto spread = [&] {
        float single = (float)z;
#pragma unroll
        for (int i = 0; i < 16; ++i) comb[i] = __shfl_sync(FULL, single, 8 + i);
    };
    spread();
    // comb stays as it is, and every pass changes a factor per row (u) or per column (v) instead: dividing row j by (its sum + eps) is
    // u_j <- u_j / (u_j s_j + eps) = 1 / (s_j + eps / u_j) with s_j = sum_k comb_jk v_k, and 1/u_j is the last denominator.
    int half = (p.iters + 1) / 2, it = 0;
    float far = 1.0f;
    auto last = [&](int, float s) { return p.eps * s; };
    auto divide = [](const float(&s)[4], float(&y)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i] = reciprocal(s[i]);
    };
    // The largest change of a factor, of rows: columns then change by an average of those at most.
    auto watch = [&](const float(&s)[4], float(&y)[4]) {
        far = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) far = fmaxf(far, fabsf(fmaf(-s[i], y[i], 1.0f)));
        divide(s, y);
    };
#pragma unroll 1
    for (; it < half && far > NEAR; ++it) {
        if (it) sinkhorn_pass<1>(comb, v, a, u, last, watch);
        sinkhorn_pass<4>(comb, u, b, v, last, divide);
    }
    // Changes never grow from pass to pass. Small ones take a series in e = 1 - s y instead of a division: it is quicker.
    auto series = [](const float(&s)[4], float(&y)[4]) {
        float e[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) e[i] = fmaf(-s[i], y[i], 1.0f);
        sinkhorn_series(e, y, y);
    };
#pragma unroll 1
    for (; it < half; ++it) {
        sinkhorn_pass<1>(comb, v, a, u, last, series);
        sinkhorn_pass<4>(comb, u, b, v, last, series);
    }
    // The other half starts over from the product z, in f64, of what was found: its rows and columns sum to nearly 1, and the factors from
    // here on are 1 + u and 1 + v with small u and v, as are the sums 1 + a and 1 + b. f32 rounds those, and not the values.
    auto pick = [](const float(&x)[4], int i) {
        float even = i & 2 ? x[2] : x[0], odd = i & 2 ? x[3] : x[1];
        return (double)(i & 1 ? odd : even);
    };
    double factor = pick(u, row) * pick(v, col);
    if (part == 2) z *= factor;
    double over_row = z + __shfl_xor_sync(FULL, z, 1), over_col = z + __shfl_xor_sync(FULL, z, 4);
    over_row += __shfl_xor_sync(FULL, over_row, 2);
    over_col += __shfl_xor_sync(FULL, over_col, 24);
    spread();
    float r = (float)(over_row + (eps - 1.0)), c = (float)(over_col + (eps - 1.0)), rows[4], cols[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        rows[i] = __shfl_sync(FULL, r, 8 + 4 * i);
        cols[i] = __shfl_sync(FULL, c, 8 + i);
        u[i] = v[i] = a[i] = b[i] = 0.0f;
    }
    auto of_row = [&](int i, float s) { return fmaf(p.eps, s, rows[i]); };
    auto of_col = [&](int i, float s) { return fmaf(p.eps, s, cols[i]); };
    auto small_series = [](const float(&s)[4], float(&y)[4]) {
        float e[4], f[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) f[i] = 1.0f + y[i];
#pragma unroll
        for (int i = 0; i < 4; ++i) e[i] = fmaf(-s[i], f[i], -y[i]);
        sinkhorn_series(e, f, y);
    };
    auto small_divide = [](const float(&s)[4], float(&y)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i] = -s[i] * reciprocal(1.0f + s[i]);
    };
    if (far > NEAR) {
#pragma unroll 1
        for (; it < p.iters; ++it) {
            sinkhorn_pass<1>(comb, v, a, u, of_row, small_divide);
            sinkhorn_pass<4>(comb, u, b, v, of_col, small_divide);
        }
    }
#pragma unroll 1
    for (; it < p.iters; ++it) {
        sinkhorn_pass<1>(comb, v, a, u, of_row, small_series);
        sinkhorn_pass<4>(comb, u, b, v, of_col, small_series);
    }
    double du = pick(u, row), dv = pick(v, col);
    if (part == 2) z = fma(fma(z, du, z), dv, fma(z, du, z));
    return (float)z;
}
