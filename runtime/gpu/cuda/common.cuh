// What every kernel file begins with. NVRTC compiles these files for the GPU; in tests g++ compiles them, with
// cuda_on_cpu/cuda_shim.h before them, which defines CUDA_ON_CPU.
#pragma once
#ifndef CUDA_ON_CPU
#include <cuda_fp16.h>

// Shared memory whose size the launch gives: SHARED_DYNAMIC(float, scores);
#define SHARED_DYNAMIC(T, name)                                \
  extern __shared__ __align__(16) unsigned char name##_raw[]; \
  T* const name = reinterpret_cast<T*>(name##_raw)

// Flags in pinned memory, seen by the CPU. A release makes this thread's earlier writes visible before the flag (those
// of other threads too, if a __syncthreads lies in between); an acquire makes reads after it see what came before.
__device__ __forceinline__ int load_acquire_system(const int* p) {
  int v;
  asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(v) : "l"(__cvta_generic_to_global(p)) : "memory");
  return v;
}
__device__ __forceinline__ long long load_acquire_system(const long long* p) {
  long long v;
  asm volatile("ld.acquire.sys.global.s64 %0, [%1];" : "=l"(v) : "l"(__cvta_generic_to_global(p)) : "memory");
  return v;
}
__device__ __forceinline__ void store_release_system(int* p, int v) {
  asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(v) : "memory");
}
__device__ __forceinline__ void store_release_system(long long* p, long long v) {
  asm volatile("st.release.sys.global.s64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(v) : "memory");
}
// A load that no cache may answer: what the CPU wrote before a flag that was acquired.
__device__ __forceinline__ float load_system(const float* p) { return __ldcv(p); }
#endif

constexpr unsigned ALL_LANES = 0xffffffffu;

// Words of the control block ctl, int[16] in device memory: what changes from token to token. Kernels of a captured
// graph keep their arguments, so nothing of this is one.
constexpr int CTL_POS = 0;  // position of the token
constexpr int CTL_SEQ = 1;  // layer l's messages to the CPU and back carry ctl[CTL_SEQ] + l
constexpr int CTL_WORDS = 16;

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }  // blocks are multiples of 32 wide

// Eight halves, as 16 bytes are loaded, in F32.
__device__ __forceinline__ void eight_floats(const uint4& bits, float* to) {
  const __half2* pairs = reinterpret_cast<const __half2*>(&bits);
#pragma unroll
  for (int j = 0; j < 4; j++) {
    float2 pair = __half22float2(pairs[j]);
    to[2 * j] = pair.x;
    to[2 * j + 1] = pair.y;
  }
}

// Every lane gets the sum, added in the same order.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int s = 16; s; s >>= 1) v += __shfl_xor_sync(ALL_LANES, v, s);
  return v;
}

// Every thread of a one-dimensional block gets the sum. s_sums: one float per warp; free for use again on return.
__device__ __forceinline__ float block_sum(float v, float* s_sums) {
  int warps = blockDim.x >> 5;
  v = warp_sum(v);
  if (lane_id() == 0) s_sums[threadIdx.x >> 5] = v;
  __syncthreads();
  v = warp_sum(lane_id() < warps ? s_sums[lane_id()] : 0.f);
  __syncthreads();
  return v;
}
