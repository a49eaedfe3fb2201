// The end of a layer: the GPU's sums, the CPU's sum and the residual.
// In: parts of ffn.cu; what the CPU answered in pinned memory. Out: x. Next: norm.cu of the next layer.
//
// Where the CPU had no neurons there is no wait and no read over the bus. A wait ends: with the answer, when the host
// says stop, when another wait failed before, or after spin_limit looks. Then `status` names the layer and the kernel
// goes on without the answer, so that the rest of the graph runs to its end and the host raises the error.
#include "common.cuh"

constexpr int STOP_EVERY = 16;  // looks at `done` between two at the other words

// Whether the CPU's answer to message `seq` is there. One thread of the block.
__device__ __forceinline__ bool answered(const long long* done, int seq, volatile int* status, const volatile int* stop,
                                         int layer, int spin_limit) {
  for (int looks = 1;; looks++) {
    if (load_acquire_system(done) == seq) return true;
    if (looks % STOP_EVERY == 0 && (*stop || *status)) break;
    if (looks >= spin_limit) break;
    __nanosleep(100);
  }
  if (*status == 0) *status = layer + 1;
  return false;
}

constexpr int MERGE_COLUMNS = 64, MERGE_WAYS = 4;  // of a block: columns, and threads that share a column's slices

// x[c] += scale * (sum over slices of part[s][c] + cpu_out[c] + bias[c]), c < n_embd.
// part [slices, n_embd] or null; count, n: as axpy_down had them (slices behind the list's end are not read).
// cpu_count device memory or null: 0, nothing from the CPU; else cpu_out [n_embd], done (its word becomes
// ctl[CTL_SEQ] + layer), status and stop are pinned. bias [n_embd] or null. Grid n_embd / 64, block (64, 4).
extern "C" __global__ void __launch_bounds__(256)
merge(const float* __restrict__ part, const int* __restrict__ count, const float* __restrict__ bias,
      const int* __restrict__ cpu_count, const float* cpu_out, const long long* done, int* status, const int* stop,
      const int* __restrict__ ctl, float* __restrict__ x, int n, int n_embd, int slices, int layer, float scale,
      int spin_limit) {
  __shared__ float s_sums[MERGE_WAYS][MERGE_COLUMNS];
  __shared__ bool s_answered;
  int c = blockIdx.x * MERGE_COLUMNS + threadIdx.x;
  float sum = 0.f;
  if (part != nullptr && c < n_embd) {
    int listed = count == nullptr ? n : *count, each = max(1, (listed + slices - 1) / slices);
    int used = (listed + each - 1) / each;
#pragma unroll 8
    for (int s = threadIdx.y; s < used; s += MERGE_WAYS) sum += part[(size_t)s * n_embd + c];
  }
  s_sums[threadIdx.y][threadIdx.x] = sum;
  bool asked = cpu_count != nullptr && *cpu_count > 0;  // the same for all blocks
  if (asked && threadIdx.x == 0 && threadIdx.y == 0)
    s_answered = answered(done, ctl[CTL_SEQ] + layer, status, stop, layer, spin_limit);
  __syncthreads();
  if (threadIdx.y || c >= n_embd) return;
#pragma unroll
  for (int w = 1; w < MERGE_WAYS; w++) sum += s_sums[w][threadIdx.x];
  if (asked && s_answered) sum += load_system(cpu_out + c);
  if (bias != nullptr) sum += bias[c];
  x[c] += scale * sum;
}
