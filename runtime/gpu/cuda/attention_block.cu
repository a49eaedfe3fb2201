// Causal attention of a block of tokens over the KV cache, softmax and sums in one pass (flash attention), F32.
// In: q of tokens at positions pos .. pos + n_tok - 1, K and V up to them. Out: f32 [n_tok, n_head, head_dim].
// Next: matmul.cu.
//
// Rows are the (token, head) pairs of one KV head, the heads of its group side by side: they share every load of K and
// V. A CUDA block of 4 warps has 4 * R rows, a warp R of them by itself. Positions come in tiles that are counted from
// position 0, so a row's bits do not depend on the rows beside it: K of a tile is read from shared memory with lane =
// position, then V, in the same place, with lane = dimensions. Each row keeps its largest score and sum so far.
//
//   head_dim up to   R   rows   positions   shared   registers     CUDA blocks per multiprocessor
//              64    8     32          64   25 KiB   124 to 130    3 or 4 (64 KiB of shared memory: 2)
//             128    8     32          64   41 KiB   154 to 168    2 (64 KiB: 1)
//             256    4     16          32   34 KiB   122 to 128    2 (64 KiB: 1)
#include "common.cuh"

constexpr int ATTENTION_THREADS = 128;
constexpr float LOWEST = -1e30f;  // below every score: its exponential is 0 beside any

struct Attention {
  const float* q;        // [n_tok, n_head, head_dim]
  const __half* k_cache;  // [n_head_kv, n_ctx, head_dim]
  const __half* v_cache;
  float* out;  // as q
  int n_tok, pos, n_head, n_head_kv, head_dim, n_ctx, window;
  float scale;
};

// What a row is: its place in q and out, and the positions first <= p < end that it sees.
struct Row {
  size_t at;
  int first, end;
};

__device__ __forceinline__ Row row_of(const Attention& a, int row) {
  int group = a.n_head / a.n_head_kv, tok = row / group, end = a.pos + tok + 1;
  size_t head = (size_t)tok * a.n_head + blockIdx.y * group + row % group;
  return {head * a.head_dim, a.window > 0 ? max(0, end - a.window) : 0, end};
}

// Positions p0 .. of K or V into shared memory, 0 from `end` on. head_dim is a multiple of 8.
template <int WIDTH, int POSITIONS>
__device__ __forceinline__ void load_positions(__half (&tile)[POSITIONS][WIDTH], const __half* from, int p0, int end,
                                               int head_dim) {
  int eights = head_dim / 8;
  for (int i = threadIdx.x; i < POSITIONS * eights; i += ATTENTION_THREADS) {
    int p = i / eights, c = i % eights * 8;
    uint4 bits = make_uint4(0, 0, 0, 0);
    if (p0 + p < end) bits = *reinterpret_cast<const uint4*>(from + (size_t)(p0 + p) * head_dim + c);
    uint2* to = reinterpret_cast<uint2*>(&tile[p][c]);
    to[0] = make_uint2(bits.x, bits.y);
    to[1] = make_uint2(bits.z, bits.w);
  }
}

// 4 (or 2) neighbouring halves from shared memory.
template <int N>
__device__ __forceinline__ void load_halves(const __half* from, float* to) {
  if constexpr (N == 4) {
    uint2 bits = *reinterpret_cast<const uint2*>(from);
    const __half2* pairs = reinterpret_cast<const __half2*>(&bits);
    float2 a = __half22float2(pairs[0]), b = __half22float2(pairs[1]);
    to[0] = a.x, to[1] = a.y, to[2] = b.x, to[3] = b.y;
  } else {
    float2 a = __half22float2(*reinterpret_cast<const __half2*>(from));
    to[0] = a.x, to[1] = a.y;
  }
}

// DIM: head_dim at most; R: rows per warp; P: positions per lane.
template <int DIM, int R, int P>
struct alignas(16) Tile {
  static constexpr int ROWS = 4 * R, POSITIONS = 32 * P, WIDTH = DIM + 4;  // 4 halves more: lanes meet other banks
  static constexpr int RUN = DIM >= 128 ? 4 : 2, RUNS = DIM / 32 / RUN;      // dimensions of a lane: RUNS of RUN
  float q[ROWS][DIM];
  float weights[ROWS][POSITIONS];
  __half positions[POSITIONS][WIDTH];  // K, then V
};

// scores[i][j] = q of the warp's row i . K of position lane + 32 j
template <int DIM, int R, int P>
__device__ __forceinline__ void score(const Tile<DIM, R, P>& tile, int row0, int head_dim, float (&scores)[R][P]) {
  int lane = lane_id();
#pragma unroll
  for (int i = 0; i < R; i++) {
#pragma unroll
    for (int j = 0; j < P; j++) scores[i][j] = 0.f;
  }
#pragma unroll 2
  for (int c = 0; c < head_dim; c += 4) {
    float k[P][4];
#pragma unroll
    for (int j = 0; j < P; j++) load_halves<4>(&tile.positions[lane + 32 * j][c], k[j]);
#pragma unroll
    for (int i = 0; i < R; i++) {
      float4 q = *reinterpret_cast<const float4*>(&tile.q[row0 + i][c]);
#pragma unroll
      for (int j = 0; j < P; j++) {
        scores[i][j] = fmaf(q.x, k[j][0], scores[i][j]);
        scores[i][j] = fmaf(q.y, k[j][1], scores[i][j]);
        scores[i][j] = fmaf(q.z, k[j][2], scores[i][j]);
        scores[i][j] = fmaf(q.w, k[j][3], scores[i][j]);
      }
    }
  }
}

// Scores of one row -> exponentials relative to the largest score so far, 0 where the row does not look.
// -> what older sums of the row are multiplied by.
template <int P>
__device__ __forceinline__ float weigh(const float (&scores)[P], float scale, int p, int first, int end, float* weights,
                                       float& top, float& sum) {
  float highest = top;
#pragma unroll
  for (int j = 0; j < P; j++) {
    int at = p + 32 * j;
    if (at >= first && at < end) highest = fmaxf(highest, scores[j] * scale);
  }
#pragma unroll
  for (int s = 16; s; s >>= 1) highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, s));
  float factor = expf(top - highest);
  top = highest;
  sum *= factor;
#pragma unroll
  for (int j = 0; j < P; j++) {
    int at = p + 32 * j;
    float weight = at >= first && at < end ? expf(scores[j] * scale - highest) : 0.f;
    weights[lane_id() + 32 * j] = weight;
    sum += weight;  // of this lane's positions
  }
  return factor;
}

// sums[i] += weights of the warp's row i times V, for this lane's dimensions: RUN * lane + 32 * RUN * run ..
template <int DIM, int R, int P>
__device__ __forceinline__ void add_values(const Tile<DIM, R, P>& tile, int row0, float (&sums)[R][DIM / 32]) {
  typedef Tile<DIM, R, P> T;
  int lane = lane_id();
#pragma unroll 1
  for (int p = 0; p < T::POSITIONS; p += 4) {
    float v[4][DIM / 32];
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
      for (int run = 0; run < T::RUNS; run++) {
        load_halves<T::RUN>(&tile.positions[p + j][T::RUN * (lane + 32 * run)], &v[j][T::RUN * run]);
      }
    }
#pragma unroll
    for (int i = 0; i < R; i++) {
      float4 w = *reinterpret_cast<const float4*>(&tile.weights[row0 + i][p]);
#pragma unroll
      for (int c = 0; c < DIM / 32; c++) {
        sums[i][c] = fmaf(w.x, v[0][c], sums[i][c]);
        sums[i][c] = fmaf(w.y, v[1][c], sums[i][c]);
        sums[i][c] = fmaf(w.z, v[2][c], sums[i][c]);
        sums[i][c] = fmaf(w.w, v[3][c], sums[i][c]);
      }
    }
  }
}

template <int DIM, int R, int P>
__device__ __forceinline__ void attend(const Attention& a) {
  typedef Tile<DIM, R, P> T;
  __shared__ T tile;
  int lane = lane_id(), row0 = (threadIdx.x >> 5) * R;
  int rows = a.n_tok * (a.n_head / a.n_head_kv);
  int block0 = (gridDim.x - 1 - blockIdx.x) * T::ROWS;  // those that see most first
  for (int i = threadIdx.x; i < T::ROWS * a.head_dim; i += ATTENTION_THREADS) {
    int row = i / a.head_dim, c = i % a.head_dim;
    tile.q[row][c] = a.q[row_of(a, min(block0 + row, rows - 1)).at + c];
  }
  for (int i = threadIdx.x; i < T::POSITIONS * T::WIDTH; i += ATTENTION_THREADS) {
    tile.positions[i / T::WIDTH][i % T::WIDTH] = __float2half_rn(0.f);  // dimensions beyond head_dim
  }
  float top[R], sum[R], sums[R][DIM / 32];
#pragma unroll
  for (int i = 0; i < R; i++) {
    top[i] = LOWEST;
    sum[i] = 0.f;
#pragma unroll
    for (int c = 0; c < DIM / 32; c++) sums[i][c] = 0.f;
  }
  const size_t head = (size_t)blockIdx.y * a.n_ctx * a.head_dim;
  int first = row_of(a, block0).first, end = row_of(a, min(block0 + T::ROWS, rows) - 1).end;
  int my_first = row_of(a, min(block0 + row0, rows - 1)).first;
  int my_end = row_of(a, min(block0 + row0 + R, rows) - 1).end;
  for (int p0 = first / T::POSITIONS * T::POSITIONS; p0 < end; p0 += T::POSITIONS) {
    bool sees = p0 < my_end && p0 + T::POSITIONS > my_first;
    __syncthreads();
    load_positions(tile.positions, a.k_cache + head, p0, end, a.head_dim);
    __syncthreads();
    if (sees) {
      float scores[R][P];
      score(tile, row0, a.head_dim, scores);
#pragma unroll
      for (int i = 0; i < R; i++) {
        Row row = row_of(a, min(block0 + row0 + i, rows - 1));
        float factor = weigh(scores[i], a.scale, p0 + lane, row.first, row.end, tile.weights[row0 + i], top[i], sum[i]);
#pragma unroll
        for (int c = 0; c < DIM / 32; c++) sums[i][c] *= factor;
      }
    }
    __syncthreads();
    load_positions(tile.positions, a.v_cache + head, p0, end, a.head_dim);
    __syncthreads();
    if (sees) add_values(tile, row0, sums);
  }
#pragma unroll
  for (int i = 0; i < R; i++) {
    float total = warp_sum(sum[i]);
    if (block0 + row0 + i >= rows) continue;
    float* to = a.out + row_of(a, block0 + row0 + i).at;
#pragma unroll
    for (int c = 0; c < DIM / 32; c++) {
      int at = T::RUN * (lane + 32 * (c / T::RUN)) + c % T::RUN;
      if (at < a.head_dim) to[at] = sums[i][c] / total;
    }
  }
}

// out[t][h] = softmax(scale * q[t][h] . K) V over the positions token t sees: up to itself, the last `window` if it is
// not 0. Grid (n_tok * n_head / n_head_kv / rows, n_head_kv); 128 threads. head_dim: a multiple of 8.
#define ATTENTION_BLOCK(NAME, DIM, R, P)                                                                              \
  extern "C" __global__ void __launch_bounds__(128, 3)                                                                \
  NAME(const float* __restrict__ q, const __half* __restrict__ k_cache, const __half* __restrict__ v_cache,           \
       float* __restrict__ out, int n_tok, int pos, int n_head, int n_head_kv, int head_dim, int n_ctx, int window,   \
       float scale) {                                                                                                 \
    attend<DIM, R, P>({q, k_cache, v_cache, out, n_tok, pos, n_head, n_head_kv, head_dim, n_ctx, window, scale});     \
  }

ATTENTION_BLOCK(attention_block_64, 64, 8, 2)
ATTENTION_BLOCK(attention_block_128, 128, 8, 2)
ATTENTION_BLOCK(attention_block_256, 256, 4, 1)
