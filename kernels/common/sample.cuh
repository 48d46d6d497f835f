// What choosing a token shares: an order of floats as integers, and the codes of a choice.
#pragma once
#include "util.cuh"

// Set in a code that is no token.
#define NO_TOKEN 0x80000000u

// Increasing with the value, -0 before 0.
__device__ __forceinline__ uint32_t total_order(float v) {
    uint32_t u = __float_as_uint(v);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
// The same with -0 and 0 equal.
__device__ __forceinline__ uint32_t ordered(float v) { return total_order(v == 0.0f ? 0.0f : v); }
