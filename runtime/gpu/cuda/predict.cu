// Scores by signs: how many weights of a key row have the sign of their input. Other predictors are matvec.cu's.
// In: sign planes of the key rows, x. Out: a score per neuron. Next: compact.cu.
#include "common.cuh"

constexpr int SIGN_THREADS = 256;
constexpr int SIGN_LANES = 8;  // lanes per row, 64 signs each at a time

// scores[r] = cols - 2 * (signs of row r that differ from those of x). planes [n, words], words = 2 * ceil(cols / 64):
// bit j % 32 of word j / 32 is set where weight j is below 0. x [cols], scores [n].
// Dynamic shared memory: 4 * words bytes. Block 256 (32 rows), any grid.
extern "C" __global__ void __launch_bounds__(256)
sign_scores(const int* __restrict__ planes, const float* __restrict__ x, float* __restrict__ scores, int n, int cols) {
  SHARED_DYNAMIC(unsigned, s_signs);
  int pairs = (cols + 63) / 64, lane = lane_id();
  for (int w = threadIdx.x >> 5; w < 2 * pairs; w += SIGN_THREADS / 32) {
    int i = w * 32 + lane;
    unsigned negative = __ballot_sync(ALL_LANES, i < cols && x[i] < 0.f);
    if (lane == 0) s_signs[w] = negative;
  }
  __syncthreads();
  constexpr int ROWS = SIGN_THREADS / SIGN_LANES;
  for (int first = blockIdx.x * ROWS; first < n; first += gridDim.x * ROWS) {
    int r = first + threadIdx.x / SIGN_LANES, differ = 0;
    const uint2* row = reinterpret_cast<const uint2*>(planes) + (size_t)min(r, n - 1) * pairs;
#pragma unroll 4
    for (int j = threadIdx.x % SIGN_LANES; j < pairs; j += SIGN_LANES) {
      uint2 signs = __ldcs(row + j);
      differ += __popc(signs.x ^ s_signs[2 * j]) + __popc(signs.y ^ s_signs[2 * j + 1]);
    }
#pragma unroll
    for (int s = SIGN_LANES / 2; s; s >>= 1) differ += __shfl_xor_sync(ALL_LANES, differ, s);
    if (threadIdx.x % SIGN_LANES == 0 && r < n) scores[r] = (float)(cols - 2 * differ);
  }
}
