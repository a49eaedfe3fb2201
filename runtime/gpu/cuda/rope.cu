// Rotary embedding of queries and keys, norms of their heads, and the write to the KV cache.
// In: q, k, v of one token. Out: q in place; k and v in the cache, in halves. Next: attention.cu.
#include "common.cuh"

constexpr int ROPE_WARPS = 4;  // heads of a block

// Both values of a pair after turning it by the angle of (c, s).
__device__ __forceinline__ float2 turn(float a, float b, float c, float s) {
  return make_float2(a * c - b * s, a * s + b * c);
}

// q [n_head, head_dim], k and v [n_head_kv, head_dim]; q_norm, k_norm [head_dim] or null: of RMS norms per head.
// cosines, sines [n_ctx, n_rot / 2]: the first n_rot dimensions turn, in pairs (2i, 2i + 1) if interleaved, else
// (i, i + n_rot / 2).
// kcache, vcache half [n_head_kv, n_ctx, head_dim], written at position ctl[CTL_POS].
// A warp per head, 4 in a block: grid (n_head + n_head_kv) / 4.
extern "C" __global__ void __launch_bounds__(128)
rope_kv(float* q, const float* __restrict__ k, const float* __restrict__ v, const float* __restrict__ q_norm,
        const float* __restrict__ k_norm, const float* __restrict__ cosines, const float* __restrict__ sines,
        __half* __restrict__ kcache, __half* __restrict__ vcache, const int* __restrict__ ctl, int n_head,
        int n_head_kv, int head_dim, int n_rot, int interleaved, int n_ctx, float eps) {
  int head = blockIdx.x * ROPE_WARPS + (threadIdx.x >> 5), lane = lane_id(), pos = ctl[CTL_POS], half_rot = n_rot / 2;
  if (head >= n_head + n_head_kv) return;  // whole warps
  bool query = head < n_head;
  const float* x = query ? q + head * head_dim : k + (head - n_head) * head_dim;
  const float* w = query ? q_norm : k_norm;
  size_t row = query ? 0 : ((size_t)(head - n_head) * n_ctx + pos) * head_dim;  // of the cache
  float r = 1.f;
  if (w != nullptr) {
    float squares = 0.f;
    for (int i = lane; i < head_dim; i += 32) squares = fmaf(x[i], x[i], squares);
    r = 1.f / sqrtf(warp_sum(squares) / (float)head_dim + eps);
  }
  auto load = [&](int i) { return w == nullptr ? x[i] : x[i] * r * w[i]; };
  auto store = [&](int i, float value) {
    if (query) q[head * head_dim + i] = value;
    else kcache[row + i] = __float2half_rn(value);
  };
  for (int i = lane; i < half_rot; i += 32) {  // a pair is one lane's from first to last
    int a = interleaved ? 2 * i : i, b = interleaved ? a + 1 : i + half_rot;
    float2 turned = turn(load(a), load(b), cosines[(size_t)pos * half_rot + i], sines[(size_t)pos * half_rot + i]);
    store(a, turned.x);
    store(b, turned.y);
  }
  for (int i = n_rot + lane; i < head_dim; i += 32) store(i, load(i));
  if (query) return;
  for (int i = lane; i < head_dim; i += 32) vcache[row + i] = __float2half_rn(v[(head - n_head) * head_dim + i]);
}
