// Products of a block of tokens with a matrix, without a library: y[t] = scale * (W . x[t] + bias).
// In: activations, a matrix in any format. Out: F32, F32 sums. Next: attention_block.cu, tokens.cu.
//
// Tiles of 64 tokens are for prompts, those of 16 (few) for their ends and short ones. A token's sums are added in one
// order in both, so its bits depend neither on the tile nor on the other tokens. Neighbours in a grid take other tokens
// of the same rows, whose weights then come from the second-level cache. No sum has more than one writer.
//
// Registers, by architecture 80 to 160 (few: 56 to 72), are what limits how many CUDA blocks a multiprocessor holds: 3
// to 6, of 12 to 24 warps (few: 7 or 8). The second number of __launch_bounds__ only keeps a compiler from spilling in
// order to fit one more. Shared memory: 16 KiB for F32, 18 KiB for act blocks (few: 10 and 11 KiB).
#include "tiles.cuh"

// y[t][y_first + r] = (add: itself +) scale * (row r * stride of the matrix . x[t] + bias[r]), t < n_tok, r < rows.
// x f32 [n_tok, ldx] for F16, else xq int8 [n_tok, cols] and xd f32 [n_tok, cols / 32]; bias f32 [rows] or null;
// y f32 [n_tok, ldy]. Grid (n_tok / 64 or 16, rows / 64), each rounded up; 128 threads.
#define MATMUL(NAME, T, TOKENS, RESIDENT)                                                                              \
  extern "C" __global__ void __launch_bounds__(128, RESIDENT)                                                          \
  NAME(const T* __restrict__ q, const __half* __restrict__ d, const float* __restrict__ x,                             \
       const signed char* __restrict__ xq, const float* __restrict__ xd, const float* __restrict__ bias,               \
       float* __restrict__ y, int n_tok, int rows, int cols, int stride, int ldx, int ldy, int y_first, float scale,   \
       int add) {                                                                                                      \
    multiply_rows<TOKENS>(q, d, Input{x, ldx, xq, xd}, cols, stride,                                                   \
                          Output{y, bias, n_tok, rows, ldy, y_first, scale, add});                                     \
  }

MATMUL(matmul_f16, __half, 64, 3)
MATMUL(matmul_q8_0, signed char, 64, 3)
MATMUL(matmul_q4_0, unsigned char, 64, 3)
MATMUL(matmul_few_f16, __half, 16, 7)
MATMUL(matmul_few_q8_0, signed char, 16, 7)
MATMUL(matmul_few_q4_0, unsigned char, 16, 7)

// y[t][c] = (add: itself +) scale * (sum over i < n of v[t][v_first + i] * weight c of row i * stride + bias[c]).
// v f32 [n_tok, ldv]: values of neurons; bias f32 [cols] or null; y f32 [n_tok, cols].
// Grid (n_tok / 64 or 16, cols / 64), each rounded up; 128 threads.
#define DOWN(NAME, T, TOKENS)                                                                                          \
  extern "C" __global__ void __launch_bounds__(128)                                                                    \
  NAME(const T* __restrict__ q, const __half* __restrict__ d, const float* __restrict__ v,                             \
       const float* __restrict__ bias, float* __restrict__ y, int n_tok, int n, int cols, int stride, int ldv,         \
       int v_first, float scale, int add) {                                                                            \
    multiply_columns<TOKENS>(q, d, v + v_first, ldv, n, stride, Output{y, bias, n_tok, cols, cols, 0, scale, add});    \
  }

DOWN(down_f16, __half, 64)
DOWN(down_q8_0, signed char, 64)
DOWN(down_q4_0, unsigned char, 64)
DOWN(down_few_f16, __half, 16)
DOWN(down_few_q8_0, signed char, 16)
DOWN(down_few_q4_0, unsigned char, 16)
