// The clamped gated activation of an expert, in f32.
#pragma once

__device__ __forceinline__ float swiglu_value(float gate, float up, float limit) {
    if (limit > 0.0f) {
        up = fminf(fmaxf(up, -limit), limit);
        gate = fminf(gate, limit);
    }
    return gate / (1.0f + expf(-gate)) * up;
}
