// Kernels that measure the machine and nothing of hotcold: launches, flags in pinned memory, plain reads and copies.
// In: nothing. Out: what latencies.py times. Next: latencies.py puts common.cuh before it.

// Costs what a launch costs.
extern "C" __global__ void nothing(float* a, int n) {
  if (n < 0) a[0] = 1.f;
}

// Answers each number in `ping` with the same in `pong`. One thread. Gives up after `limit` looks at a number.
extern "C" __global__ void answer(const long long* ping, long long* pong, int n, int limit) {
  for (int i = 1; i <= n; i++) {
    int looks = 0;
    while (load_acquire_system(ping) != i) {
      if (++looks > limit) return;
#ifdef CUDA_ON_CPU
      __nanosleep(100);
#endif
    }
    store_release_system(pong, (long long)i);
  }
}

// Reads n floats, n a multiple of 4: sum[thread] of a grid of any size.
extern "C" __global__ void __launch_bounds__(256) read_all(const float* __restrict__ x, float* sum, long long n) {
  long long step = 4LL * gridDim.x * blockDim.x, first = 4LL * (blockIdx.x * (long long)blockDim.x + threadIdx.x);
  float s = 0.f;
#pragma unroll 4
  for (long long i = first; i < n; i += step) {
    float4 v = *reinterpret_cast<const float4*>(x + i);
    s += v.x + v.y + v.z + v.w;
  }
  sum[first / 4] = s;
}

// Copies n floats, n a multiple of 4.
extern "C" __global__ void __launch_bounds__(256) copy_all(const float* __restrict__ x, float* y, long long n) {
  long long step = 4LL * gridDim.x * blockDim.x;
#pragma unroll 4
  for (long long i = 4LL * (blockIdx.x * (long long)blockDim.x + threadIdx.x); i < n; i += step)
    *reinterpret_cast<float4*>(y + i) = *reinterpret_cast<const float4*>(x + i);
}
