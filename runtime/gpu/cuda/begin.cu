// The start of a token: control words and the input row come from pinned memory.
// In: what the host wrote before it launched. Out: ctl, x. Next: norm.cu.
#include "common.cuh"

// host_ctl int[16], host_x [n] pinned -> ctl int[16], x [n]. Grid n / 256, block 256.
extern "C" __global__ void __launch_bounds__(256)
begin(const volatile int* host_ctl, const float* host_x, int* ctl, float* __restrict__ x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < CTL_WORDS) ctl[i] = host_ctl[i];
  if (i < n) x[i] = load_system(host_x + i);
}
