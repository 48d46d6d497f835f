// Sums of products as the CPU takes them: from 0, each product rounded, then added.
#pragma once
#include "../common/util.cuh"

// 0 + a * b: one instruction, and the sign of a zero as in the sum.
__device__ __forceinline__ float first_term(float a, float b) { return fmaf(a, b, 0.0f); }
__device__ __forceinline__ float next_term(float sum, float a, float b) { return __fadd_rn(sum, __fmul_rn(a, b)); }
