// The clamped gated activation of an expert, in f32.
#pragma once

// a / d for 1 <= d: IEEE division without its branch to a subroutine, around which the compiler keeps nothing in uniform registers.
__device__ __forceinline__ float divide(float a, float d) {
    float r, q;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
    r = fmaf(fmaf(-d, r, 1.0f), r, r);
    q = a * r;
    return fmaf(fmaf(-q, d, a), r, q);
}

__device__ __forceinline__ float swiglu_value(float gate, float up, float limit) {
    if (limit > 0.0f) {
        up = fminf(fmaxf(up, -limit), limit);
        gate = fminf(gate, limit);
    }
    // exp past 1e37 gives a value that no bf16 product with it tells from 0.
    return divide(gate, 1.0f + fminf(expf(-gate), 1e37f)) * up;
}
