// Norms, and activations as act blocks for products with quantized matrices.
// In: F32 vectors. Out: the same in F32; int8 with a scale per 32. Next: matvec.cu, compact.cu.
#include "vector.cuh"

// h = w * x / sqrt(mean(x^2) + eps), or with layer_norm w * (x - mean) / sqrt(variance + eps) + b. x, w, b, h [n].
// hq [n], hd [n / 32]: h as act blocks (n % 32 == 0), or null. One block of up to 1024 threads, a multiple of 32.
extern "C" __global__ void __launch_bounds__(1024)
norm_token(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ b, float* __restrict__ h,
           signed char* __restrict__ hq, float* __restrict__ hd, int n, float eps, int layer_norm) {
  __shared__ float s_sums[32];
  float mean = 0.f, squares = 0.f;
  if (layer_norm) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) mean += x[i];
    mean = block_sum(mean, s_sums) / (float)n;
  }
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    float v = x[i] - mean;
    squares = fmaf(v, v, squares);
  }
  float r = 1.f / sqrtf(block_sum(squares, s_sums) / (float)n + eps);
  for (int first = threadIdx.x & ~31; first < n; first += blockDim.x) {  // a warp's 32 values: all lanes come along
    int i = first + lane_id();
    float v = 0.f;
    if (i < n) {
      v = (x[i] - mean) * r * w[i];
      if (b != nullptr) v += b[i];
      h[i] = v;
    }
    if (hq != nullptr) store_act_block(v, hq, hd, i);
  }
}

// x [n] -> q [n], d [n / 32]; n % 32 == 0. Grid n / 256, block 256: a warp per 32 values.
extern "C" __global__ void __launch_bounds__(256)
quantize(const float* __restrict__ x, signed char* __restrict__ q, float* __restrict__ d, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if ((i & ~31) >= n) return;  // whole warps
  store_act_block(x[i], q, d, i);
}

// FFN of a stock layout: g [n] keys, u [n] up products or null -> out [n] = act(g) * u; out may be g.
// q [n], d [n / 32]: out as act blocks (n % 32 == 0), or null. Grid n / 256, block 256.
extern "C" __global__ void __launch_bounds__(256)
activate(const float* g, const float* __restrict__ u, float* out, signed char* __restrict__ q, float* __restrict__ d,
         int n, int act, float threshold) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if ((i & ~31) >= n) return;  // whole warps
  float v = 0.f;
  if (i < n) {
    v = activate_value(act, threshold, g[i]);
    if (u != nullptr) v = gate_value(act, v, u[i]);
    v = drop_small(act, threshold, v);
    out[i] = v;
  }
  if (q != nullptr) store_act_block(v, q, d, i);
}
