// The FFN's neurons on the GPU: what each listed neuron multiplies its down row by, and the sum of the down rows.
// In: h, lists of compact.cu. Out: values; partial sums. Next: merge.cu.
//
// Lengths of lists are known on the device only: grids are fixed, blocks take neurons until the list ends.
#include "formats.cuh"
#include "vector.cuh"

__device__ __forceinline__ int listed(const int* count, int n) { return count == nullptr ? n : *count; }
__device__ __forceinline__ int listed_id(const int* ids, int i) { return ids == nullptr ? i : ids[i]; }

// Rows that a neuron can have here: its key row (null: the list has its key or value) and its up row (null: not gated).
template <class T>
struct Neurons {
  const T* key_q;
  const __half* key_d;
  const T* up_q;
  const __half* up_d;
  const float *key_bias, *up_bias;
  int cols, up_stride;
};

template <class T>
__device__ __forceinline__ void neuron_values(const Neurons<T>& m, const Vector& x, const int* ids, int count,
                                              float* vals, int raw, int act, float threshold) {
  for (int first = blockIdx.x * blockDim.y; first < count; first += gridDim.x * blockDim.y) {
    int i = first + threadIdx.y, id = i < count ? listed_id(ids, i) : 0;
    float v = 0.f;
    if (m.key_q != nullptr) {
      v = row_sum(i < count ? dot_share(m.key_q, m.key_d, (size_t)id, m.cols, x) : 0.f);
      if (i < count && m.key_bias != nullptr) v += m.key_bias[id];
    } else if (i < count) {
      v = vals[i];
    }
    if (raw || m.key_q != nullptr) v = activate_value(act, threshold, v);
    if (m.up_q != nullptr) {  // the up row of a neuron that is off is not read
      float up = row_sum(i < count && v != 0.f ? dot_share(m.up_q, m.up_d, (size_t)id * m.up_stride, m.cols, x) : 0.f);
      if (i < count && m.up_bias != nullptr) up += m.up_bias[id];
      if (v != 0.f) v = gate_value(act, v, up);
    }
    if (threadIdx.x == 0 && i < count) vals[i] = drop_small(act, threshold, v);
  }
}

// vals[i] for the neurons ids[i], i < *count (ids null: neuron i; count null: n of them):
//     key_q given: act(key row . x + key_bias), else vals[i] as it is, or (raw) act(vals[i])
//     up_q given:  times (up row . x + up_bias) where that is not 0
// key [neurons, cols]; up: row id * up_stride of its matrix. x [cols] F32, or xq, xd as act blocks.
// Block (32 * warps per row, 4 / warps per row), any grid.
#define NEURON_VALUES(FORMAT, T)                                                                                       \
  extern "C" __global__ void __launch_bounds__(128)                                                                    \
  neuron_values_##FORMAT(const T* __restrict__ key_q, const __half* __restrict__ key_d, const T* __restrict__ up_q,    \
                         const __half* __restrict__ up_d, const float* __restrict__ x,                                 \
                         const signed char* __restrict__ xq, const float* __restrict__ xd,                             \
                         const float* __restrict__ key_bias, const float* __restrict__ up_bias,                        \
                         const int* __restrict__ ids, const int* __restrict__ count, float* vals, int n, int cols,     \
                         int up_stride, int raw, int act, float threshold) {                                           \
    Neurons<T> m{key_q, key_d, up_q, up_d, key_bias, up_bias, cols, up_stride};                                        \
    neuron_values(m, Vector{x, xq, xd}, ids, listed(count, n), vals, raw, act, threshold);                             \
  }

NEURON_VALUES(f16, __half)
NEURON_VALUES(q8_0, signed char)
NEURON_VALUES(q4_0, unsigned char)

// ------------------------------------------------------------------ sums of down rows

constexpr int AXPY_LIST = 128;  // neurons that a block looks at together

// The neurons begin .. end - 1 of the list (AXPY_LIST at most) whose value is not 0, in order, into shared memory;
// returns their number. For the whole block.
__device__ __forceinline__ int gather_active(const int* ids, const float* vals, int begin, int end, int* s_ids,
                                             float* s_vals) {
  __shared__ int s_counts[AXPY_LIST / 32];
  int n = end - begin, lane = lane_id(), total = 0;
  __syncthreads();  // the stretch before is finished
  for (int base = 0; base < n; base += blockDim.x) {
    int i = base + threadIdx.x;
    float v = i < n ? vals[begin + i] : 0.f;
    unsigned active = __ballot_sync(ALL_LANES, v != 0.f);
    if (lane == 0 && i < n) s_counts[i / 32] = __popc(active);
    __syncthreads();
    if (v != 0.f) {
      int at = __popc(active & ((1u << lane) - 1u));
      for (int w = 0; w < i / 32; w++) at += s_counts[w];
      s_ids[at] = listed_id(ids, begin + i);
      s_vals[at] = v;
    }
  }
  __syncthreads();
  for (int w = 0; w < (n + 31) / 32; w++) total += s_counts[w];
  return total;
}

template <class T>
__device__ __forceinline__ void axpy_down(const T* q, const __half* d, const int* ids, const float* vals, int count,
                                          float* part, int n_embd, int stride) {
  constexpr int WIDTH = Unit<T>::WIDTH, ROWS = 4;
  __shared__ int s_ids[AXPY_LIST];
  __shared__ float s_vals[AXPY_LIST];
  int slices = gridDim.y, each = (count + slices - 1) / slices, unit = blockIdx.x * blockDim.x + threadIdx.x;
  int begin = min(blockIdx.y * each, count), end = min(begin + each, count);
  if (begin == end) return;  // merge does not read this slice
  bool inside = unit < n_embd / WIDTH;
  float sums[WIDTH] = {};
  for (; begin < end; begin += AXPY_LIST) {
    int n = gather_active(ids, vals, begin, min(end, begin + AXPY_LIST), s_ids, s_vals);
    if (!inside) continue;
    int i = 0;
    for (; i + ROWS <= n; i += ROWS) {  // the loads of all rows first
      Unit<T> rows[ROWS];
#pragma unroll
      for (int k = 0; k < ROWS; k++) rows[k].load(q, d, (size_t)s_ids[i + k] * stride, n_embd, unit);
#pragma unroll
      for (int k = 0; k < ROWS; k++) rows[k].add_to(sums, s_vals[i + k]);
    }
    for (; i < n; i++) {
      Unit<T> row;
      row.load(q, d, (size_t)s_ids[i] * stride, n_embd, unit);
      row.add_to(sums, s_vals[i]);
    }
  }
  if (!inside) return;
  float4* to = reinterpret_cast<float4*>(part + (size_t)blockIdx.y * n_embd + unit * WIDTH);
#pragma unroll
  for (int j = 0; j < WIDTH; j += 4) to[j / 4] = make_float4(sums[j], sums[j + 1], sums[j + 2], sums[j + 3]);
}

// part[s] = sum of vals[i] * row ids[i] * stride over the i of slice s: the list, of *count entries (null: n), is cut
// into `slices` equal slices. Neurons whose value is 0 are not read. part [slices, n_embd]; slices behind the list's
// end are left as they are.
// Grid (16 bytes of a row per thread, slices), block 32 to 128 threads, a multiple of 32.
#define AXPY_DOWN(FORMAT, T)                                                                                           \
  extern "C" __global__ void __launch_bounds__(128)                                                                    \
  axpy_down_##FORMAT(const T* __restrict__ q, const __half* __restrict__ d, const int* __restrict__ ids,               \
                     const float* __restrict__ vals, const int* __restrict__ count, float* __restrict__ part, int n,   \
                     int n_embd, int stride) {                                                                         \
    axpy_down(q, d, ids, vals, listed(count, n), part, n_embd, stride);                                                \
  }

AXPY_DOWN(f16, __half)
AXPY_DOWN(q8_0, signed char)
AXPY_DOWN(q4_0, unsigned char)
