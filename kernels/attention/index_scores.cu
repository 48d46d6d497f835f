// index_scores: the indexer's score of every key a query may see, as sortable 16-bit keys.
//
// Maths    score[t][p] = bf16(sum_h f32(bf16(relu(bf16(q[t][h] . key[p])) * w[t][h])))
// Layout   q [T, H, D] bf16 (fp4 values), w [T, H] bf16 (already times the softmax factor); keys: bf16 [rows, D], or packed
//          e2m1 codes [rows, D/2] with e8m0 scales [rows, D/32]; spans [T] int2 {row of position 0, visible positions};
//          keys_out [T, ld] u16: bf16 bits mapped so that unsigned order is score order, 0 = not visible.
//          Candidate form: blocks [T, B] i32 ascending, -1 at the tail; column i stands for position
//          blocks[i / block] * block + i % block, and ld covers B * block columns
// Grid     (any, ceil(T / tq)), block 256: warps stride over tiles of 32 columns of 0..n. Dynamic shared memory
//          tq * 2*ceil(H/16) * (2048 + 16) bytes. tq > 1 shares each widened key among tq queries, which then must have one
//          base row; the candidate form takes tq = 1. D a multiple of 32, at most 128
// Numerics the bf16 roundings are the reference's; q . key is an exact product summed in f32 in another order
// Checked  tests_cuda/check.cu, crates/attention/tests
#include "index_scores.cuh"

extern "C" __global__ void __launch_bounds__(256, 2) index_scores_fp4(const bf16* q, const bf16* w, const uint8_t* codes, const uint8_t* scales,
                                                                      const int2* spans, const int32_t* blocks, uint16_t* out, int T, int H, int D, int n,
                                                                      int64_t ld, int tq, int B, int block) {
    if (blocks) scores<FP4, true>(q, w, codes, scales, spans, blocks, out, T, H, D, n, ld, tq, B, block);
    else scores<FP4, false>(q, w, codes, scales, spans, blocks, out, T, H, D, n, ld, tq, B, block);
}
extern "C" __global__ void __launch_bounds__(256, 1) index_scores_bf16(const bf16* q, const bf16* w, const uint8_t* keys, const uint8_t* scales,
                                                                       const int2* spans, const int32_t* blocks, uint16_t* out, int T, int H, int D, int n,
                                                                       int64_t ld, int tq, int B, int block) {
    if (blocks) scores<BF16, true>(q, w, keys, scales, spans, blocks, out, T, H, D, n, ld, tq, B, block);
    else scores<BF16, false>(q, w, keys, scales, spans, blocks, out, T, H, D, n, ld, tq, B, block);
}
