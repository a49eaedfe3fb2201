// Matrix . vector: q, k, v, attention's output, keys, predictors, logits, and the FFN of stock layouts.
// In: rows of any format; x in F32 for F16 rows, act blocks for the others. Out: F32. Next: rope.cu, compact.cu.
//
// Weights come through once and are not kept in the cache; x stays in the first-level cache of every multiprocessor.
// Rows so long that a thread would start more than four loads are shared by two or four warps, so that a matrix of few
// rows still has enough loads in flight. That depends on the shapes only, and so does the order of additions.
#include "formats.cuh"

template <class T>
__device__ __forceinline__ void matvec(const T* q, const __half* d, const Vector& x, const float* bias, float* y,
                                       int rows, int cols, int stride, float scale, int add, int relu) {
  for (int first = blockIdx.x * blockDim.y; first < rows; first += gridDim.x * blockDim.y) {
    int r = first + threadIdx.y;
    float v = row_sum(r < rows ? dot_share(q, d, (size_t)r * stride, cols, x) : 0.f);
    if (threadIdx.x == 0 && r < rows) {
      if (bias != nullptr) v += bias[r];
      v *= scale;
      if (add) v += y[r];
      y[r] = relu && v < 0.f ? 0.f : v;
    }
  }
}

// y[r] = (add: y[r] +) scale * (row r * stride . x + bias[r]) for r < rows; relu: results below 0 become 0.
// q, d: a matrix of at least (rows - 1) * stride + 1 rows (formats.cuh). x [cols] F32, or xq [cols], xd [cols / 32].
// bias [rows] or null. y [rows]. Block (32 * warps per row, 4 / warps per row), grid one row per blockDim.y.
#define MATVEC(FORMAT, T)                                                                                              \
  extern "C" __global__ void __launch_bounds__(128)                                                                    \
  matvec_##FORMAT(const T* __restrict__ q, const __half* __restrict__ d, const float* __restrict__ x,                  \
                  const signed char* __restrict__ xq, const float* __restrict__ xd, const float* __restrict__ bias,    \
                  float* y, int rows, int cols, int stride, float scale, int add, int relu) {                          \
    matvec(q, d, Vector{x, xq, xd}, bias, y, rows, cols, stride, scale, add, relu);                                    \
  }

MATVEC(f16, __half)
MATVEC(q8_0, signed char)
MATVEC(q4_0, unsigned char)
