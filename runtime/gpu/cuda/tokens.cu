// What is done to each token of a block by itself: norms, act blocks, rotary positions, activation functions.
// In: F32 vectors, one token after the other. Out: the same; the KV cache. Next: matmul.cu.
//
// All are bound by memory: 32 registers or fewer, full occupancy.
#include "vector.cuh"

constexpr int TOKEN_THREADS = 256;

// h[t] = w * x[t] / sqrt(mean(x^2) + eps), or with layer_norm w * (x - mean) / sqrt(var + eps) + b.
// x, h f32 [n_tok, n]; hq int8 [n_tok, n], hd f32 [n_tok, n / 32]: act blocks of h, or null. One CUDA block per token.
extern "C" __global__ void __launch_bounds__(256)
norm_tokens(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ b,
            float* __restrict__ h, signed char* __restrict__ hq, float* __restrict__ hd, int n, float eps,
            int layer_norm) {
  __shared__ float s_sums[TOKEN_THREADS / 32];
  size_t at = (size_t)blockIdx.x * n;
  const float* from = x + at;
  float mean = 0.f, squares = 0.f;
  if (layer_norm) {
    for (int i = threadIdx.x; i < n; i += TOKEN_THREADS) mean += from[i];
    mean = block_sum(mean, s_sums) / (float)n;
  }
  for (int i = threadIdx.x; i < n; i += TOKEN_THREADS) squares = fmaf(from[i] - mean, from[i] - mean, squares);
  float r = 1.f / sqrtf(block_sum(squares, s_sums) / (float)n + eps);
  for (int i = threadIdx.x; i < n; i += TOKEN_THREADS) {
    float v = (from[i] - mean) * r * w[i];
    if (b != nullptr) v += b[i];
    h[at + i] = v;
    if (hq != nullptr) store_act_block(v, hq, hd, at + i);  // n is a multiple of 32 then: warps are whole
  }
}

// x[t][x_first + i], i < n -> act blocks hq int8 [n_tok, n], hd f32 [n_tok, n / 32]. Grid (n / 256, n_tok): a warp per
// act block.
extern "C" __global__ void __launch_bounds__(256)
quantize_tokens(const float* __restrict__ x, signed char* __restrict__ hq, float* __restrict__ hd, int n, int ldx,
                int x_first) {
  int i = blockIdx.x * TOKEN_THREADS + threadIdx.x;
  if (i >= n) return;  // whole warps: n is a multiple of 32
  size_t at = (size_t)blockIdx.y * n + i;
  store_act_block(x[(size_t)blockIdx.y * ldx + x_first + i], hq, hd, at);
}

// A head's RMS norm (w not null), by one warp, in place in shared memory.
__device__ __forceinline__ void norm_head(float* head, const float* w, int head_dim, float eps) {
  int lane = lane_id();
  float squares = 0.f;
  for (int i = lane; i < head_dim; i += 32) squares = fmaf(head[i], head[i], squares);
  float r = 1.f / sqrtf(warp_sum(squares) / (float)head_dim + eps);
  for (int i = lane; i < head_dim; i += 32) head[i] = head[i] * r * w[i];
  __syncwarp();
}

// Rotary positions on q (in place) and k; k and v go to the cache, at positions pos .. pos + n_tok - 1.
// q f32 [n_tok, n_head, head_dim]; k, v f32 [n_tok, n_head_kv, head_dim]; q_norm, k_norm f32 [head_dim] or null;
// cos, sin f32 [n_ctx, n_rot / 2]; k_cache, v_cache half [n_head_kv, n_ctx, head_dim]. n_rot 0: nothing turns.
// Pairs are (2i, 2i + 1) when interleaved, else (i, i + n_rot / 2). Grid ((n_head + n_head_kv) / 4, n_tok): a warp per
// head, of 256 values at most.
extern "C" __global__ void __launch_bounds__(128)
rope_kv_tokens(float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v,
              const float* __restrict__ q_norm, const float* __restrict__ k_norm, const float* __restrict__ cos,
              const float* __restrict__ sin, __half* __restrict__ k_cache, __half* __restrict__ v_cache, int pos,
              int n_head, int n_head_kv, int head_dim, int n_rot, int interleaved, int n_ctx, float eps) {
  __shared__ float s_head[4][256];
  int lane = lane_id(), tok = blockIdx.y;
  int head = blockIdx.x * 4 + (threadIdx.x >> 5), kv = head - n_head;
  if (kv >= n_head_kv) return;
  bool query = kv < 0;
  const float* from = query ? q + ((size_t)tok * n_head + head) * head_dim
                            : k + ((size_t)tok * n_head_kv + kv) * head_dim;
  float* mine = s_head[threadIdx.x >> 5];
  for (int i = lane; i < head_dim; i += 32) mine[i] = from[i];
  __syncwarp();
  const float* w = query ? q_norm : k_norm;
  if (w != nullptr) norm_head(mine, w, head_dim, eps);
  int half = n_rot / 2;
  for (int i = lane; i < half; i += 32) {
    int first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : i + half;
    float c = cos[(size_t)(pos + tok) * half + i], s = sin[(size_t)(pos + tok) * half + i];
    float a = mine[first], b = mine[second];
    mine[first] = a * c - b * s;
    mine[second] = a * s + b * c;
  }
  __syncwarp();
  if (query) {
    float* to = q + ((size_t)tok * n_head + head) * head_dim;
    for (int i = lane; i < head_dim; i += 32) to[i] = mine[i];
    return;
  }
  size_t at = ((size_t)kv * n_ctx + pos + tok) * head_dim;
  const float* value = v + ((size_t)tok * n_head_kv + kv) * head_dim;
  for (int i = lane; i < head_dim; i += 32) {
    k_cache[at + i] = __float2half_rn(mine[i]);
    v_cache[at + i] = __float2half_rn(value[i]);
  }
}

// Keys -> what neurons multiply their down rows by: g[t][g_first + i] = act(itself) * u[t][u_first + i], i < n.
// g f32 [n_tok, ldg], u f32 [n_tok, ldu] or null. Codes of act: vector.cuh. Grid (n / 256, n_tok).
extern "C" __global__ void __launch_bounds__(256)
activate_tokens(float* __restrict__ g, const float* __restrict__ u, int n, int ldg, int g_first, int ldu, int u_first,
                int act, float threshold) {
  int i = blockIdx.x * TOKEN_THREADS + threadIdx.x;
  if (i >= n) return;
  float* at = g + (size_t)blockIdx.y * ldg + g_first + i;
  float v = activate_value(act, threshold, *at);
  if (u != nullptr) v = gate_value(act, v, u[(size_t)blockIdx.y * ldu + u_first + i]);
  *at = drop_small(act, threshold, v);
}
