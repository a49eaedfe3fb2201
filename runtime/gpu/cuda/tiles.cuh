// Tiles of a product of activations with a matrix, in shared memory: loading them, multiplying them.
// In: activations (F32, or act blocks), a matrix in any format. Out: F32 sums of a thread's part of the tile. Next:
// matmul.cu.
//
// A tile of results is TOKENS x 64, with 128 threads: each has 1/8 of the tokens and 4 rows of the matrix.
#pragma once
#include "rows.cuh"

constexpr int TILE_THREADS = 128;
constexpr int TILE_ROWS = 64;
constexpr int FLOAT_DEPTH = 32;  // columns of W per step, F32
constexpr int INT_WORDS = 32;    // words of four int8 per step: 128 columns
constexpr int INT_BLOCKS = 4;    // blocks of 32 columns per step

// Activations: F32 [n_tok, ldx], or act blocks, int8 [n_tok, cols] and F32 [n_tok, cols / 32].
struct Input {
  const float* x;
  int ldx;
  const signed char* q;
  const float* d;
};

// Where the results go. y[t][y_first + r] for t < n_tok, r < rows.
struct Output {
  float* y;
  const float* bias;
  int n_tok, rows, ldy, y_first;
  float scale;
  int add;
};

// In shared memory a tile is [k][width]. Groups of 4 columns change places from one group of 4 k to the next, so that
// the threads of a warp that store different k meet different banks. Where column c of k is:
__device__ __forceinline__ int swizzled(int c, int k, int width) { return c ^ (k / 4 * 4 & (width - 4)); }

template <int N>
__device__ __forceinline__ void store_tile(const Output& o, int t0, int r0, const float (&sums)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    int t = t0 + i;
    if (t >= o.n_tok) break;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int r = r0 + j;
      if (r >= o.rows) break;
      float value = sums[i][j];
      if (o.bias != nullptr) value += o.bias[r];
      float* to = o.y + (size_t)t * o.ldy + o.y_first + r;
      *to = (o.add ? *to : 0.f) + o.scale * value;
    }
  }
}

// ---- F32 activations ------------------------------------------------------------------------------------------------

template <int TOKENS>
struct alignas(16) FloatTile {
  float x[FLOAT_DEPTH][TOKENS];
  float w[FLOAT_DEPTH][TILE_ROWS];
};

// x[t0 + t][k0 + k] of a tile, 0 beyond n_tok and depth. A warp reads 32 neighbouring values.
template <int TOKENS>
__device__ __forceinline__ void load_x(FloatTile<TOKENS>& tile, const float* x, int ldx, int t0, int n_tok, int k0,
                                       int depth) {
#pragma unroll
  for (int i = threadIdx.x; i < FLOAT_DEPTH * TOKENS; i += TILE_THREADS) {
    int k = i % FLOAT_DEPTH, t = i / FLOAT_DEPTH;
    bool inside = t0 + t < n_tok && k0 + k < depth;
    tile.x[k][swizzled(t, k, TOKENS)] = inside ? x[(size_t)(t0 + t) * ldx + k0 + k] : 0.f;
  }
}

// Products of one step, added to the sums in order of k.
template <int TOKENS>
__device__ __forceinline__ void add_step(const FloatTile<TOKENS>& tile, float (&sums)[TOKENS / 8][4]) {
  constexpr int N = TOKENS / 8;
  int tr = threadIdx.x % 16 * 4, tt = threadIdx.x / 16 * N;
#pragma unroll 8
  for (int k = 0; k < FLOAT_DEPTH; k++) {
    float x[N];
    if constexpr (N == 8) {
      float4 a = *reinterpret_cast<const float4*>(&tile.x[k][swizzled(tt, k, TOKENS)]);
      float4 b = *reinterpret_cast<const float4*>(&tile.x[k][swizzled(tt + 4, k, TOKENS)]);
      x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    } else {
      float2 a = *reinterpret_cast<const float2*>(&tile.x[k][swizzled(tt, k, TOKENS)]);
      x[0] = a.x, x[1] = a.y;
    }
    float4 w = *reinterpret_cast<const float4*>(&tile.w[k][swizzled(tr, k, TILE_ROWS)]);
#pragma unroll
    for (int i = 0; i < N; i++) {
      sums[i][0] = fmaf(x[i], w.x, sums[i][0]);
      sums[i][1] = fmaf(x[i], w.y, sums[i][1]);
      sums[i][2] = fmaf(x[i], w.z, sums[i][2]);
      sums[i][3] = fmaf(x[i], w.w, sums[i][3]);
    }
  }
}

// y = rows r * stride of an F16 matrix . x.
template <int TOKENS>
__device__ __forceinline__ void multiply_rows(const __half* q, const __half*, const Input& in, int cols, int stride,
                                              const Output& o) {
  __shared__ FloatTile<TOKENS> tile;
  constexpr int N = TOKENS / 8;
  int t0 = blockIdx.x * TOKENS, r0 = blockIdx.y * TILE_ROWS;
  float sums[N][4] = {};
  for (int k0 = 0; k0 < cols; k0 += FLOAT_DEPTH) {
    load_x(tile, in.x, in.ldx, t0, o.n_tok, k0, cols);
#pragma unroll
    for (int i = threadIdx.x; i < TILE_ROWS * FLOAT_DEPTH / 8; i += TILE_THREADS) {
      int r = i / (FLOAT_DEPTH / 8), k = i % (FLOAT_DEPTH / 8) * 8;
      float w[8] = {};
      if (r0 + r < o.rows && k0 + k < cols) load_eight(q, nullptr, (size_t)(r0 + r) * stride, cols, k0 + k, w);
#pragma unroll
      for (int j = 0; j < 8; j++) tile.w[k + j][swizzled(r, k + j, TILE_ROWS)] = w[j];
    }
    __syncthreads();
    add_step(tile, sums);
    __syncthreads();
  }
  store_tile(o, t0 + threadIdx.x / 16 * N, r0 + threadIdx.x % 16 * 4, sums);
}

// y = sum of v[i] * row i * stride, a row per neuron, i < n; y has the matrix's columns (o.rows of them).
template <int TOKENS, class T>
__device__ __forceinline__ void multiply_columns(const T* q, const __half* d, const float* v, int ldv, int n,
                                                 int stride, const Output& o) {
  __shared__ FloatTile<TOKENS> tile;
  constexpr int N = TOKENS / 8;
  int t0 = blockIdx.x * TOKENS, c0 = blockIdx.y * TILE_ROWS;
  float sums[N][4] = {};
  for (int k0 = 0; k0 < n; k0 += FLOAT_DEPTH) {
    load_x(tile, v, ldv, t0, o.n_tok, k0, n);
#pragma unroll
    for (int i = threadIdx.x; i < FLOAT_DEPTH * TILE_ROWS / 8; i += TILE_THREADS) {
      int k = i / (TILE_ROWS / 8), c = i % (TILE_ROWS / 8) * 8;
      float w[8] = {};
      if (k0 + k < n && c0 + c < o.rows) load_eight(q, d, (size_t)(k0 + k) * stride, o.rows, c0 + c, w);
      *reinterpret_cast<float4*>(&tile.w[k][swizzled(c, k, TILE_ROWS)]) = make_float4(w[0], w[1], w[2], w[3]);
      *reinterpret_cast<float4*>(&tile.w[k][swizzled(c + 4, k, TILE_ROWS)]) = make_float4(w[4], w[5], w[6], w[7]);
    }
    __syncthreads();
    add_step(tile, sums);
    __syncthreads();
  }
  store_tile(o, t0 + threadIdx.x / 16 * N, c0 + threadIdx.x % 16 * 4, sums);
}

// ---- act blocks -----------------------------------------------------------------------------------------------------

template <int TOKENS>
struct alignas(16) IntTile {
  int x[INT_WORDS][TOKENS];
  int w[INT_WORDS][TILE_ROWS];
  float x_scale[INT_BLOCKS][TOKENS];
  float w_scale[INT_BLOCKS][TILE_ROWS];
};

// Column c of four neighbouring words.
template <int WIDTH>
__device__ __forceinline__ void store_words(int (&tile)[INT_WORDS][WIDTH], int c, int k, unsigned a, unsigned b,
                                            unsigned e, unsigned f) {
  int at = swizzled(c, k, WIDTH);
  tile[k][at] = (int)a;
  tile[k + 1][at] = (int)b;
  tile[k + 2][at] = (int)e;
  tile[k + 3][at] = (int)f;
}

// Rows of int8, 16 bytes per load: WIDTH rows first + i * stride, i < n, 4 blocks of 32 from block b0 of n_blocks.
template <int WIDTH>
__device__ __forceinline__ void load_quants(int (&tile)[INT_WORDS][WIDTH], const signed char* q, int first, int n,
                                            int stride, int b0, int n_blocks) {
#pragma unroll
  for (int i = threadIdx.x; i < WIDTH * INT_WORDS / 4; i += TILE_THREADS) {
    int c = i / (INT_WORDS / 4), k = i % (INT_WORDS / 4) * 4, b = b0 + k / 8;
    uint4 bits = make_uint4(0, 0, 0, 0);
    if (first + c < n && b < n_blocks) {
      bits = *reinterpret_cast<const uint4*>(q + ((size_t)(first + c) * stride * n_blocks + b) * 32 + k % 8 * 4);
    }
    store_words(tile, c, k, bits.x, bits.y, bits.z, bits.w);
  }
}

// Four nibbles, each in the lower half of a byte -> four int8 in -8 .. 7. No byte borrows from the next.
__device__ __forceinline__ unsigned centred(unsigned nibbles) {
  return ((nibbles & 0x0f0f0f0fu | 0x80808080u) - 0x08080808u) ^ 0x80808080u;
}

// The same of nibbles: 16 bytes are a block.
__device__ __forceinline__ void load_quants(int (&tile)[INT_WORDS][TILE_ROWS], const unsigned char* q, int first, int n,
                                            int stride, int b0, int n_blocks) {
#pragma unroll
  for (int i = threadIdx.x; i < TILE_ROWS * INT_BLOCKS; i += TILE_THREADS) {
    int c = i / INT_BLOCKS, b = i % INT_BLOCKS;
    uint4 bits = make_uint4(0, 0, 0, 0);
    if (first + c < n && b0 + b < n_blocks) {
      bits = *reinterpret_cast<const uint4*>(q + ((size_t)(first + c) * stride * n_blocks + b0 + b) * 16);
    }
    store_words(tile, c, b * 8, centred(bits.x), centred(bits.y), centred(bits.z), centred(bits.w));
    store_words(tile, c, b * 8 + 4, centred(bits.x >> 4), centred(bits.y >> 4), centred(bits.z >> 4),
                centred(bits.w >> 4));
  }
}

__device__ __forceinline__ float as_float(float d) { return d; }
__device__ __forceinline__ float as_float(__half d) { return __half2float(d); }

// Scales of 4 blocks per row, 0 where there is none: what is multiplied by it does not matter.
template <int WIDTH, class D>
__device__ __forceinline__ void load_scales(float (&scales)[INT_BLOCKS][WIDTH], const D* d, int first, int n,
                                            int stride, int b0, int n_blocks) {
  for (int i = threadIdx.x; i < WIDTH * INT_BLOCKS; i += TILE_THREADS) {
    int c = i / INT_BLOCKS, b = i % INT_BLOCKS;
    bool inside = first + c < n && b0 + b < n_blocks;
    scales[b][c] = inside ? as_float(d[(size_t)(first + c) * stride * n_blocks + b0 + b]) : 0.f;
  }
}

// Dot products of one block of 32 columns are integers; each is scaled and added to the F32 sums, in order of blocks.
template <int TOKENS>
__device__ __forceinline__ void add_blocks(const IntTile<TOKENS>& tile, float (&sums)[TOKENS / 8][4]) {
  constexpr int N = TOKENS / 8;
  int tr = threadIdx.x % 16 * 4, tt = threadIdx.x / 16 * N;
#pragma unroll 1
  for (int b = 0; b < INT_BLOCKS; b++) {
    int dots[N][4] = {};
#pragma unroll
    for (int k = b * 8; k < b * 8 + 8; k++) {
      int4 w = *reinterpret_cast<const int4*>(&tile.w[k][swizzled(tr, k, TILE_ROWS)]);
      int x[N];
      if constexpr (N == 8) {
        int4 lo = *reinterpret_cast<const int4*>(&tile.x[k][swizzled(tt, k, TOKENS)]);
        int4 hi = *reinterpret_cast<const int4*>(&tile.x[k][swizzled(tt + 4, k, TOKENS)]);
        x[0] = lo.x, x[1] = lo.y, x[2] = lo.z, x[3] = lo.w, x[4] = hi.x, x[5] = hi.y, x[6] = hi.z, x[7] = hi.w;
      } else {
        int2 two = *reinterpret_cast<const int2*>(&tile.x[k][swizzled(tt, k, TOKENS)]);
        x[0] = two.x, x[1] = two.y;
      }
#pragma unroll
      for (int i = 0; i < N; i++) {
        dots[i][0] = __dp4a(x[i], w.x, dots[i][0]);
        dots[i][1] = __dp4a(x[i], w.y, dots[i][1]);
        dots[i][2] = __dp4a(x[i], w.z, dots[i][2]);
        dots[i][3] = __dp4a(x[i], w.w, dots[i][3]);
      }
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float scale = tile.x_scale[b][tt + i] * tile.w_scale[b][tr + j];
        sums[i][j] = fmaf(scale, (float)dots[i][j], sums[i][j]);
      }
    }
  }
}

// y = rows r * stride of a matrix of blocks . act blocks.
template <int TOKENS, class T>
__device__ __forceinline__ void multiply_rows(const T* q, const __half* d, const Input& in, int cols, int stride,
                                              const Output& o) {
  __shared__ IntTile<TOKENS> tile;
  constexpr int N = TOKENS / 8;
  int t0 = blockIdx.x * TOKENS, r0 = blockIdx.y * TILE_ROWS, n_blocks = cols / 32;
  float sums[N][4] = {};
  for (int b0 = 0; b0 < n_blocks; b0 += INT_BLOCKS) {
    load_quants(tile.x, in.q, t0, o.n_tok, 1, b0, n_blocks);
    load_scales(tile.x_scale, in.d, t0, o.n_tok, 1, b0, n_blocks);
    load_quants(tile.w, q, r0, o.rows, stride, b0, n_blocks);
    load_scales(tile.w_scale, d, r0, o.rows, stride, b0, n_blocks);
    __syncthreads();
    add_blocks(tile, sums);
    __syncthreads();
  }
  store_tile(o, t0 + threadIdx.x / 16 * N, r0 + threadIdx.x % 16 * 4, sums);
}
