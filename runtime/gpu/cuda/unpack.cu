// Rows as the file holds them -> rows as the kernels read them.
// In: raw rows at any even address, blocks of Q8_0 (34 bytes) and Q4_0 (18 bytes) or halves. Out: q and d of a matrix,
// apart, so that 16 bytes can be loaded at once. Next: every kernel that reads weights.
//
// Rows are taken as one sequence of blocks, because rows lie one after the other on both sides. Loads are 2 bytes wide:
// 64 bytes per warp, and bound by the bus that the raw rows came over. Expected occupancy: full (16 registers, 2 KiB).

#include "common.cuh"

constexpr int UNPACK_THREADS = 128;
constexpr int UNPACK_BLOCKS = 64;  // weight blocks per CUDA block

// raw [n_blocks][2 + QUANTS] -> q [n_blocks][QUANTS], d [n_blocks]; QUANTS bytes per block of 32 weights
template <int QUANTS>
__device__ __forceinline__ void unpack_blocks(const unsigned char* raw, unsigned* q, __half* d, long long n_blocks) {
  constexpr int PAIRS = 1 + QUANTS / 2;  // two bytes each: d, then the quants
  __shared__ unsigned short s_raw[UNPACK_BLOCKS * PAIRS];
  long long first = (long long)blockIdx.x * UNPACK_BLOCKS;
  int blocks = (int)min((long long)UNPACK_BLOCKS, n_blocks - first);
  const unsigned short* from = reinterpret_cast<const unsigned short*>(raw) + first * PAIRS;
  for (int i = threadIdx.x; i < blocks * PAIRS; i += UNPACK_THREADS) s_raw[i] = from[i];
  __syncthreads();
  constexpr int WORDS = QUANTS / 4;
  for (int i = threadIdx.x; i < blocks * WORDS; i += UNPACK_THREADS) {
    int at = i / WORDS * PAIRS + 1 + i % WORDS * 2;
    q[first * WORDS + i] = s_raw[at] | (unsigned)s_raw[at + 1] << 16;
  }
  for (int i = threadIdx.x; i < blocks; i += UNPACK_THREADS) {
    d[first + i] = __ushort_as_half(s_raw[i * PAIRS]);
  }
}

// Rows first .. first + n - 1 of a matrix from raw [n][cols / 32 * 34].
// q int8 [rows, cols], d half [rows, cols / 32].
extern "C" __global__ void __launch_bounds__(128)
unpack_rows_q8_0(const unsigned char* __restrict__ raw, signed char* __restrict__ q, __half* __restrict__ d,
                 int first, int n, int cols) {
  long long at = (long long)first * (cols / 32);
  unpack_blocks<32>(raw, reinterpret_cast<unsigned*>(q + at * 32), d + at, (long long)n * (cols / 32));
}

// Rows first .. first + n - 1 of a matrix from raw [n][cols / 32 * 18].
// q uint8 [rows, cols / 2], d half [rows, cols / 32].
extern "C" __global__ void __launch_bounds__(128)
unpack_rows_q4_0(const unsigned char* __restrict__ raw, unsigned char* __restrict__ q, __half* __restrict__ d,
                 int first, int n, int cols) {
  long long at = (long long)first * (cols / 32);
  unpack_blocks<16>(raw, reinterpret_cast<unsigned*>(q + at * 16), d + at, (long long)n * (cols / 32));
}

// Rows first .. first + n - 1 of a matrix from raw halves [n][cols], 8 halves per thread.
// q half [rows, cols]; d is not used.
extern "C" __global__ void __launch_bounds__(128)
unpack_rows_f16(const unsigned char* __restrict__ raw, __half* __restrict__ q, __half* __restrict__ d, int first, int n,
                int cols) {
  long long i = ((long long)blockIdx.x * UNPACK_THREADS + threadIdx.x) * 8;
  if (i >= (long long)n * cols) return;
  const unsigned short* from = reinterpret_cast<const unsigned short*>(raw) + i;
  __half* to = q + (long long)first * cols + i;
#pragma unroll
  for (int j = 0; j < 8; j++) to[j] = __ushort_as_half(from[j]);
}
