// What `hotcold doctor` measures a card with.
#include "common.cuh"

// sums[thread] = sum of the x[4 n4] that the thread reads; threads = gridDim.x * blockDim.x
extern "C" __global__ void __launch_bounds__(256) read_memory(const float* __restrict__ x, float* __restrict__ sums,
                                                              int n4) {
  const float4* x4 = reinterpret_cast<const float4*>(x);
  int thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  float sum = 0.f;
#pragma unroll 4
  for (int i = thread; i < n4; i += threads) {
    float4 v = x4[i];
    sum += v.x + v.y + v.z + v.w;
  }
  sums[thread] = sum;
}

// Answers each of the CPU's flags 1..rounds with the same number, as merge and the CPU's workers do; leaves after
// `limit` looks in vain.
extern "C" __global__ void echo(const int* ping, int* pong, int rounds, int limit) {
  for (int round = 1; round <= rounds; round++) {
    int looks = 0;
    while (load_acquire_system(ping) != round)
      if (++looks > limit) return;
    store_release_system(pong, round);
  }
}

extern "C" __global__ void nothing(int unused) {}
