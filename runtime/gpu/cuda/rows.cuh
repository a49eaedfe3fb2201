// Eight weights of a row in F32, for every format: how the kernels of prompts read matrices.
// In: q and d of a matrix; the type of q says the format, as in formats.cuh. Out: float[8]. Next: half.cu, tiles.cuh.
#pragma once
#include "common.cuh"

// Weights c .. c + 7 of a row; c is a multiple of 8.

// q half [rows, cols]; d is not used
__device__ __forceinline__ void load_eight(const __half* q, const __half*, size_t row, int cols, int c, float* w) {
  eight_floats(*reinterpret_cast<const uint4*>(q + row * cols + c), w);
}

// q int8 [rows, cols], d half [rows, cols / 32]
__device__ __forceinline__ void load_eight(const signed char* q, const __half* d, size_t row, int cols, int c,
                                           float* w) {
  uint2 bits = *reinterpret_cast<const uint2*>(q + row * cols + c);
  float scale = __half2float(d[row * (cols / 32) + c / 32]);
#pragma unroll
  for (int j = 0; j < 4; j++) {
    w[j] = scale * (float)(signed char)(bits.x >> 8 * j);
    w[j + 4] = scale * (float)(signed char)(bits.y >> 8 * j);
  }
}

// q uint8 [rows, cols / 2]: byte j of a block holds weight j (low nibble) and j + 16; d half [rows, cols / 32]
__device__ __forceinline__ void load_eight(const unsigned char* q, const __half* d, size_t row, int cols, int c,
                                           float* w) {
  uint2 bits = *reinterpret_cast<const uint2*>(q + row * (cols / 2) + c / 32 * 16 + c % 16);
  float scale = __half2float(d[row * (cols / 32) + c / 32]);
  int nibble = c % 32 / 16 * 4;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    w[j] = scale * (float)((int)(bits.x >> (8 * j + nibble) & 15) - 8);
    w[j + 4] = scale * (float)((int)(bits.y >> (8 * j + nibble) & 15) - 8);
  }
}
