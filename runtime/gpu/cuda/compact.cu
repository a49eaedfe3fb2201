// Which neurons fire, listed: those of the GPU for its own kernels, the CPU's in pinned memory, with the FFN's input.
// In: keys (or a predictor's scores) of a layer. Out: lists in rising order, their lengths, the header that the CPU
// waits for. Next: ffn.cu; on the CPU the cold operator.
//
// The header is one word of 64 bits, seq << 32 | count, written last. A layer without work for the CPU sends that word
// and nothing else.
#include "vector.cuh"

constexpr int COMPACT_THREADS = 1024;
constexpr int COMPACT_EACH = 4;                       // neighbouring neurons of a thread
constexpr int TILE = COMPACT_THREADS * COMPACT_EACH;  // neurons of a round; counts of both lists fit in 16 bits each

__device__ __forceinline__ void send(const float* h, float* mail_h, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) mail_h[i] = h[i];
}

// What the threads of the block wrote before becomes visible to the CPU, then the header.
__device__ __forceinline__ void send_header(long long* header, int seq, int count) {
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) store_release_system(header, (long long)seq << 32 | count);
}

// For plans where the CPU reads the keys of its neurons itself: it can begin as soon as h is there.
// h [n_embd] -> mail_h pinned, header pinned, with `count` for it; cpu_count: the same for `merge`. One block of 1024.
extern "C" __global__ void __launch_bounds__(1024)
post(const float* __restrict__ h, float* __restrict__ mail_h, long long* header, int* __restrict__ cpu_count,
     const int* __restrict__ ctl, int n_embd, int layer, int count) {
  send(h, mail_h, n_embd);
  if (threadIdx.x == 0) *cpu_count = count;
  send_header(header, ctl[CTL_SEQ] + layer, count);
}

// Inclusive sum over the threads of the block before and with this one, and the sum of all (in *all).
// v and all sums hold two counts of 16 bits. s_sums: 32 words that nobody reads any more; one barrier.
__device__ __forceinline__ unsigned block_scan(unsigned v, unsigned* s_sums, unsigned* all) {
  int lane = lane_id(), warp = threadIdx.x >> 5;
#pragma unroll
  for (int s = 1; s < 32; s <<= 1) {
    unsigned below = __shfl_up_sync(ALL_LANES, v, s);
    if (lane >= s) v += below;
  }
  if (lane == 31) s_sums[warp] = v;
  __syncthreads();
  unsigned sums = s_sums[lane];  // every warp adds up the warps for itself: no second barrier
#pragma unroll
  for (int s = 1; s < 32; s <<= 1) {
    unsigned below = __shfl_up_sync(ALL_LANES, sums, s);
    if (lane >= s) sums += below;
  }
  *all = __shfl_sync(ALL_LANES, sums, 31);
  unsigned before = __shfl_sync(ALL_LANES, sums, (warp + 31) & 31);
  return v + (warp ? before : 0u);
}

// The keys of a thread in the round that begins at `start`.
__device__ __forceinline__ void load_keys(const float* values, const float* bias, int start, int n, float* keys) {
#pragma unroll
  for (int j = 0; j < COMPACT_EACH; j++) {
    int i = start + threadIdx.x * COMPACT_EACH + j;
    keys[j] = i < n ? values[i] : 0.f;
    if (bias != nullptr && i < n) keys[j] += bias[i];
  }
}

// values [n]: keys, scores or (act FINAL) final values; bias [n] or null is added to them. A neuron is listed where it
// fires; those below `hot` in gpu_ids, the others in cpu_ids, in order, with their activated values in gpu_vals [hot]
// and cpu_vals [n - hot] (both null: ids only). gpu_count, cpu_count: lengths, in device memory.
// header null: there is no CPU (n = hot; cpu_* and mail_h null). Else cpu_ids, cpu_vals, mail_h [n_embd] and header are
// pinned; h [n_embd] is what is sent.
// totals int64[2] or null: neurons listed for the GPU, for the CPU; they grow.
// One block of 1024 threads.
extern "C" __global__ void __launch_bounds__(1024)
compact_split(const float* __restrict__ values, const float* __restrict__ bias, const float* __restrict__ h,
              int* __restrict__ gpu_ids, float* __restrict__ gpu_vals, int* __restrict__ gpu_count,
              int* __restrict__ cpu_ids, float* __restrict__ cpu_vals, float* __restrict__ mail_h, long long* header,
              int* __restrict__ cpu_count, long long* __restrict__ totals, const int* __restrict__ ctl, int n, int hot,
              int n_embd, int layer, int act, float threshold) {
  __shared__ unsigned s_sums[2][32];
  __shared__ int s_ids[TILE];  // the CPU's neurons of a round: gathered here, then sent side by side
  __shared__ float s_vals[TILE];
  int on_gpu = 0, on_cpu = 0, round = 0;
  float keys[COMPACT_EACH], next[COMPACT_EACH];
  load_keys(values, bias, 0, n, next);
  for (int start = 0; start < n; start += TILE, round ^= 1) {
    int first = start + threadIdx.x * COMPACT_EACH;
    unsigned firing = 0, counts = 0;  // a bit per neuron; CPU << 16 | GPU
#pragma unroll
    for (int j = 0; j < COMPACT_EACH; j++) keys[j] = next[j];
    load_keys(values, bias, start + TILE, n, next);  // on their way while this round is listed
#pragma unroll
    for (int j = 0; j < COMPACT_EACH; j++) {
      float value = activate_value(act, threshold, keys[j]);
      bool on = first + j < n && fires(act, threshold, keys[j], value);
      keys[j] = value;
      firing |= on ? 1u << j : 0u;
      counts += !on ? 0u : first + j < hot ? 1u : 1u << 16;
    }
    unsigned all, end = block_scan(counts, s_sums[round], &all);
    int gpu_at = on_gpu + (int)((end - counts) & 0xffffu), cpu_at = (int)((end - counts) >> 16);
#pragma unroll
    for (int j = 0; j < COMPACT_EACH; j++) {
      if (!(firing >> j & 1)) continue;
      if (first + j < hot) {
        gpu_ids[gpu_at] = first + j;
        if (gpu_vals != nullptr) gpu_vals[gpu_at] = keys[j];
        gpu_at++;
      } else {
        s_ids[cpu_at] = first + j;
        s_vals[cpu_at] = keys[j];
        cpu_at++;
      }
    }
    int sent = (int)(all >> 16);
    if (sent && header != nullptr) {  // the same for the whole block; the next scan's barrier ends the reading
      __syncthreads();
      for (int i = threadIdx.x; i < sent; i += COMPACT_THREADS) {
        cpu_ids[on_cpu + i] = s_ids[i];
        if (cpu_vals != nullptr) cpu_vals[on_cpu + i] = s_vals[i];
      }
    }
    on_gpu += (int)(all & 0xffffu);
    on_cpu += sent;
  }
  if (threadIdx.x == 0) {
    *gpu_count = on_gpu;
    if (cpu_count != nullptr) *cpu_count = on_cpu;
    if (totals != nullptr) {
      totals[0] += on_gpu;
      totals[1] += on_cpu;
    }
  }
  if (header == nullptr) return;
  if (on_cpu) send(h, mail_h, n_embd);
  send_header(header, ctl[CTL_SEQ] + layer, on_cpu);
}
