// What time it is when the stream gets here, for a trace.
// In: nothing. Out: nanoseconds. Next: trace.py.
#include "common.cuh"

// *to = nanoseconds of a clock of the whole device. One thread.
extern "C" __global__ void __launch_bounds__(32)
stamp(long long* to) {
#ifdef CUDA_ON_CPU
  *to = (long long)clock64();
#else
  long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  *to = now;
#endif
}
