// What every kernel file begins with. NVRTC compiles these files for the GPU; in tests g++ compiles them, with
// cuda_on_cpu/cuda_shim.h before them, which defines CUDA_ON_CPU.
#pragma once
#ifndef CUDA_ON_CPU
#include <cuda_fp16.h>

// Shared memory whose size the launch gives: SHARED_DYNAMIC(float, scores);
#define SHARED_DYNAMIC(T, name)                                  \
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
