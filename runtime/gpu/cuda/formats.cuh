// Rows of a matrix on the GPU, 16 bytes at a time.
// In: q and d of a matrix; T, the type of q, says the format:
//     __half         F16    q [rows, cols], cols % 8 == 0; d is not used; meets activations in F32
//     signed char    Q8_0   q [rows, cols], d [rows, cols / 32]; meets act blocks
//     unsigned char  Q4_0   q [rows, cols / 2], byte j of a block: weights j (low nibble) and j + 16; d as above
// Out: dot products, and columns for sums of rows. Next: matvec.cu, ffn.cu.
#pragma once
#include "common.cuh"

constexpr int QUANT_BLOCK = 32;  // weights that share a scale
constexpr int IN_FLIGHT = 4;     // loads of 16 bytes that a thread starts before it uses the first

// A vector of activations: F32, and the same as act blocks (quantize_block in vector.cuh).
struct Vector {
  const float* x;        // [n]
  const signed char* q;  // [n]
  const float* d;        // [n / 32]
};

// 16 bytes of a row: its weights u * WIDTH .. (u + 1) * WIDTH - 1.
template <class T>
struct Unit;

template <>
struct Unit<__half> {
  static constexpr int WIDTH = 8;
  uint4 bits;

  __device__ __forceinline__ void load(const __half* q, const __half*, size_t row, int cols, int u) {
    bits = __ldcs(reinterpret_cast<const uint4*>(q + row * cols) + u);
  }
  __device__ __forceinline__ float2 pair(int j) const {
    return __half22float2(reinterpret_cast<const __half2*>(&bits)[j]);
  }

  // The unit . the same columns of v
  __device__ __forceinline__ float dot(const Vector& v, int u) const {
    const float4* x = reinterpret_cast<const float4*>(v.x) + 2 * u;
    float4 a = x[0], b = x[1];
    float2 w0 = pair(0), w1 = pair(1), w2 = pair(2), w3 = pair(3);
    float sum = w0.x * a.x;
    sum = fmaf(w0.y, a.y, sum);
    sum = fmaf(w1.x, a.z, sum);
    sum = fmaf(w1.y, a.w, sum);
    sum = fmaf(w2.x, b.x, sum);
    sum = fmaf(w2.y, b.y, sum);
    sum = fmaf(w3.x, b.z, sum);
    return fmaf(w3.y, b.w, sum);
  }

  // sums[j] += a * weight j
  __device__ __forceinline__ void add_to(float* sums, float a) const {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float2 w = pair(j);
      sums[2 * j] = fmaf(a, w.x, sums[2 * j]);
      sums[2 * j + 1] = fmaf(a, w.y, sums[2 * j + 1]);
    }
  }
};

template <>
struct Unit<signed char> {
  static constexpr int WIDTH = 16;
  uint4 bits;
  __half d;

  __device__ __forceinline__ void load(const signed char* q, const __half* scales, size_t row, int cols, int u) {
    bits = __ldcs(reinterpret_cast<const uint4*>(q + row * cols) + u);
    d = scales[row * (cols / QUANT_BLOCK) + u / 2];
  }

  __device__ __forceinline__ float dot(const Vector& v, int u) const {
    int4 x = reinterpret_cast<const int4*>(v.q)[u];
    int sum = __dp4a((int)bits.x, x.x, 0);
    sum = __dp4a((int)bits.y, x.y, sum);
    sum = __dp4a((int)bits.z, x.z, sum);
    sum = __dp4a((int)bits.w, x.w, sum);
    return __half2float(d) * v.d[u / 2] * (float)sum;
  }

  __device__ __forceinline__ void add_to(float* sums, float a) const {
    float scaled = a * __half2float(d);
    unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int j = 0; j < 16; j++) sums[j] = fmaf(scaled, (float)(signed char)(words[j / 4] >> 8 * (j % 4)), sums[j]);
  }
};

template <>
struct Unit<unsigned char> {
  static constexpr int WIDTH = 32;
  uint4 bits;
  __half d;

  __device__ __forceinline__ void load(const unsigned char* q, const __half* scales, size_t row, int cols, int u) {
    bits = __ldcs(reinterpret_cast<const uint4*>(q + row * (cols / 2)) + u);
    d = scales[row * (cols / QUANT_BLOCK) + u];
  }

  __device__ __forceinline__ float dot(const Vector& v, int u) const {
    const int4* x = reinterpret_cast<const int4*>(v.q) + 2 * u;
    int4 low = x[0], high = x[1];
    // Weights are nibble - 8: 8 times the sum of the activations is taken off in one go.
    int sum = __dp4a((int)(bits.x & 0x0f0f0f0fu), low.x, 0), all = __dp4a(0x01010101, low.x, 0);
    sum = __dp4a((int)(bits.y & 0x0f0f0f0fu), low.y, sum), all = __dp4a(0x01010101, low.y, all);
    sum = __dp4a((int)(bits.z & 0x0f0f0f0fu), low.z, sum), all = __dp4a(0x01010101, low.z, all);
    sum = __dp4a((int)(bits.w & 0x0f0f0f0fu), low.w, sum), all = __dp4a(0x01010101, low.w, all);
    sum = __dp4a((int)(bits.x >> 4 & 0x0f0f0f0fu), high.x, sum), all = __dp4a(0x01010101, high.x, all);
    sum = __dp4a((int)(bits.y >> 4 & 0x0f0f0f0fu), high.y, sum), all = __dp4a(0x01010101, high.y, all);
    sum = __dp4a((int)(bits.z >> 4 & 0x0f0f0f0fu), high.z, sum), all = __dp4a(0x01010101, high.z, all);
    sum = __dp4a((int)(bits.w >> 4 & 0x0f0f0f0fu), high.w, sum), all = __dp4a(0x01010101, high.w, all);
    return __half2float(d) * v.d[u] * (float)(sum - 8 * all);
  }

  __device__ __forceinline__ void add_to(float* sums, float a) const {
    float scaled = a * __half2float(d);
    unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int j = 0; j < 16; j++) {
      unsigned both = words[j / 4] >> 8 * (j % 4);
      sums[j] = fmaf(scaled, (float)((int)(both & 15u) - 8), sums[j]);
      sums[j + 16] = fmaf(scaled, (float)((int)(both >> 4 & 15u) - 8), sums[j + 16]);
    }
  }
};

// ------------------------------------------------------------------ rows . vector
// A block of threads (32 * warps per row, rows): threadIdx.y is the row, the threads along x share its columns.

constexpr int ROW_THREADS = 128;  // threads of such a block

// This thread's share of row . v; the threads that share a row call it together, their number is blockDim.x.
template <class T>
__device__ __forceinline__ float dot_share(const T* q, const __half* d, size_t row, int cols, const Vector& v) {
  int n = cols / Unit<T>::WIDTH, step = blockDim.x;
  float sums[IN_FLIGHT] = {};
  for (int first = threadIdx.x; first < n; first += IN_FLIGHT * step) {
    Unit<T> units[IN_FLIGHT];
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; k++)
      if (first + k * step < n) units[k].load(q, d, row, cols, first + k * step);
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; k++)
      if (first + k * step < n) sums[k] += units[k].dot(v, first + k * step);
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Sum of v over the threads that share a row; each of them gets it. All threads of the block must call it.
__device__ __forceinline__ float row_sum(float v) {
  __shared__ float s_sums[ROW_THREADS / 32];
  int warps = blockDim.x >> 5;
  v = warp_sum(v);
  if (warps == 1) return v;
  __syncthreads();  // everyone has read the sums of the call before
  if (lane_id() == 0) s_sums[threadIdx.y * warps + (threadIdx.x >> 5)] = v;
  __syncthreads();
  float sum = 0.f;
  for (int w = 0; w < warps; w++) sum += s_sums[threadIdx.y * warps + w];
  return sum;
}
