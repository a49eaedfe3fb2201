// Small vector work that kernels share: quantizing activations, activation functions.
// In: F32 values. Out: act blocks; values. Next: norm.cu, compact.cu, ffn.cu.
#pragma once
#include "common.cuh"

// A warp holds 32 values that follow each other, one per lane -> q of each, and the block's scale d (in every lane).
// The same integers as the CPU makes: q = round(x * (127 / top)), d = top / 127. A block whose top is 0, infinite, NaN,
// or so small that 127 / top overflows, has q = 0; one NaN makes d NaN.
__device__ __forceinline__ signed char quantize_block(float x, float* d) {
  unsigned top_bits = __float_as_uint(fabsf(x));  // as integers, magnitudes have the same order, and NaN is the largest
#pragma unroll
  for (int s = 16; s; s >>= 1) top_bits = max(top_bits, __shfl_xor_sync(ALL_LANES, top_bits, s));
  float top = __uint_as_float(top_bits);
  *d = top * (1.f / 127.f);
  float q = x * (127.f / top);  // infinite or NaN where the top is 0, tiny, infinite or NaN
  return fabsf(q) <= 128.f ? (signed char)__float2int_rn(q) : 0;
}

// One value per lane, at `at` of a vector -> q and d of its act block.
__device__ __forceinline__ void store_act_block(float v, signed char* q, float* d, size_t at) {
  float scale;
  q[at] = quantize_block(v, &scale);
  if (lane_id() == 0) d[at / 32] = scale;
}

// Codes of activation functions: those of kernels/vector.py, and one for values that need none any more.
enum { RELU = 0, DRELU = 1, RELU2 = 2, SILU = 3, GELU = 4, GELU_TANH = 5, FINAL = 6 };

// Comparisons are written so that NaN stays: a broken weight must show.
__device__ __forceinline__ float activate_value(int act, float threshold, float x) {
  switch (act) {
    case RELU:
    case DRELU:
      return x <= threshold ? 0.f : x;
    case RELU2:
      return x <= threshold ? 0.f : x * x;
    case SILU:
      return x / (1.f + expf(-x));
    case GELU:
      return 0.5f * x * (1.f + erff(x * 0.70710678118f));
    case GELU_TANH:  // x * sigmoid(2 z) = x * (1 + tanh z) / 2
      return x / (1.f + expf(-2.f * (x * 0.7978845608f * fmaf(x * x, 0.044715f, 1.f))));
    default:
      return x;
  }
}

// What an activated value becomes by the up row's product.
__device__ __forceinline__ float gate_value(int act, float value, float up) {
  return value * (act == DRELU && up < 0.f ? 0.f : up);
}

// Whether a neuron is computed. ReLU family: its key decides; others: the magnitude of its value.
__device__ __forceinline__ bool fires(int act, float threshold, float key, float value) {
  return act < SILU ? !(key <= threshold) : !(fabsf(value) <= threshold);
}

// Values of functions that are never 0 by themselves become 0 where their magnitude is up to a threshold.
__device__ __forceinline__ float drop_small(int act, float threshold, float value) {
  return act >= SILU && threshold > 0.f && fabsf(value) <= threshold ? 0.f : value;
}
