// Matrices and activations as halves, for products by the library (Device.gemm), and what follows such a product.
// In: matrices in any format, F32 activations. Out: halves; F32 results. Next: tokens.cu.
//
// C[m,n] = A[m,k] . B[n,k]^T: A are activations, B rows of a matrix (rows_to_half), or, for a down projection, whose
// matrix has a row per neuron, its columns (columns_to_half). k is padded with zeros to what the library likes.
//
// Products of an FFN exceed what a half can hold (65504), so every token is divided by a power of two that brings its
// largest value to 2^14 .. 2^15: exact, and values down to 2^-28 of the largest keep all bits of a half.

#include "rows.cuh"

constexpr int HALF_THREADS = 128;

// Rows i * stride of a matrix, i < n -> out half [n, cols]. Grid (n, cols / 8 / 128): 8 weights per thread.
template <class T>
__device__ __forceinline__ void rows_to_half(const T* q, const __half* d, __half* out, int cols, int stride) {
  int c = (blockIdx.y * HALF_THREADS + threadIdx.x) * 8;
  if (c >= cols) return;
  float w[8];
  load_eight(q, d, (size_t)blockIdx.x * stride, cols, c, w);
  __half2* to = reinterpret_cast<__half2*>(out + (size_t)blockIdx.x * cols + c);
#pragma unroll
  for (int j = 0; j < 4; j++) to[j] = __floats2half2_rn(w[2 * j], w[2 * j + 1]);
}

#define ROWS_TO_HALF(FORMAT, T)                                                                               \
  extern "C" __global__ void __launch_bounds__(128)                                                           \
  rows_to_half_##FORMAT(const T* __restrict__ q, const __half* __restrict__ d, __half* __restrict__ out,      \
                        int cols, int stride) {                                                               \
    rows_to_half(q, d, out, cols, stride);                                                                    \
  }

ROWS_TO_HALF(f16, __half)
ROWS_TO_HALF(q8_0, signed char)
ROWS_TO_HALF(q4_0, unsigned char)

// The transpose: out half [cols, ldo], out[c][i] = weight c of row i * stride, 0 for n <= i < ldo.
// Grid (cols / 64, ldo / 64), tiles of 64 x 64 through 8.3 KiB of shared memory: rows are read and written whole.
template <class T>
__device__ __forceinline__ void columns_to_half(const T* q, const __half* d, __half* out, int n, int cols, int ldo,
                                                int stride) {
  __shared__ __half s_tile[64][66];  // [row][column]; 66: neighbours of a column lie in different banks
  int c0 = blockIdx.x * 64, r0 = blockIdx.y * 64;
  for (int i = threadIdx.x; i < 64 * 8; i += HALF_THREADS) {
    int r = i / 8, c = i % 8 * 8;
    float w[8] = {};
    if (r0 + r < n && c0 + c < cols) load_eight(q, d, (size_t)(r0 + r) * stride, cols, c0 + c, w);
#pragma unroll
    for (int j = 0; j < 8; j++) s_tile[r][c + j] = __float2half_rn(w[j]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 64 * 64; i += HALF_THREADS) {
    int c = i / 64, r = i % 64;
    if (c0 + c < cols && r0 + r < ldo) out[(size_t)(c0 + c) * ldo + r0 + r] = s_tile[r][c];
  }
}

#define COLUMNS_TO_HALF(FORMAT, T)                                                                            \
  extern "C" __global__ void __launch_bounds__(128)                                                           \
  columns_to_half_##FORMAT(const T* __restrict__ q, const __half* __restrict__ d, __half* __restrict__ out,   \
                           int n, int cols, int ldo, int stride) {                                            \
    columns_to_half(q, d, out, n, cols, ldo, stride);                                                         \
  }

COLUMNS_TO_HALF(f16, __half)
COLUMNS_TO_HALF(q8_0, signed char)
COLUMNS_TO_HALF(q4_0, unsigned char)

// One token per CUDA block: x[t][x_first + i], i < n -> out half [n_tok, ldo], 0 for n <= i < ldo; scales[t] is the
// power of two it was divided by. A token with an infinite value or NaN keeps it, and its scale is 1.
extern "C" __global__ void __launch_bounds__(256)
to_half(const float* __restrict__ x, __half* __restrict__ out, float* __restrict__ scales, int n, int ldx, int x_first,
        int ldo) {
  __shared__ float s_top[8];
  const float* from = x + (size_t)blockIdx.x * ldx + x_first;
  __half* to = out + (size_t)blockIdx.x * ldo;
  float top = 0.f;
  for (int i = threadIdx.x; i < n; i += 256) top = fmaxf(top, fabsf(from[i]));
#pragma unroll
  for (int s = 16; s; s >>= 1) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, s));
  if (lane_id() == 0) s_top[threadIdx.x >> 5] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < 8; w++) top = fmaxf(top, s_top[w]);
  // Exponents by bits: top = 1.m * 2^e, and the token is divided by 2^(e - 14), within what F32 can hold both ways.
  int exponent = (int)(__float_as_uint(top) >> 23) - 127 - 14;
  exponent = top == 0.f || exponent == 128 - 14 ? 0 : max(exponent, -126);
  float scale = __uint_as_float((unsigned)(exponent + 127) << 23);
  float inverse = __uint_as_float((unsigned)(127 - exponent) << 23);
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
  for (int i = threadIdx.x; i < ldo; i += 256) to[i] = __float2half_rn(i < n ? from[i] * inverse : 0.f);
}

// y[t][y_first + r] = (add: itself +) scale * (scales[t] * c[t][r] + bias[r]). c f32 [n_tok, rows], y f32 [n_tok, ldy].
// Grid (rows / 256, n_tok).
extern "C" __global__ void __launch_bounds__(256)
finish_half(const float* __restrict__ c, const float* __restrict__ scales, const float* __restrict__ bias,
            float* __restrict__ y, int rows, int ldy, int y_first, float scale, int add) {
  int r = blockIdx.x * 256 + threadIdx.x;
  if (r >= rows) return;
  float value = scales[blockIdx.y] * c[(size_t)blockIdx.y * rows + r];
  if (bias != nullptr) value += bias[r];
  float* to = y + (size_t)blockIdx.y * ldy + y_first + r;
  *to = (add ? *to : 0.f) + scale * value;
}
