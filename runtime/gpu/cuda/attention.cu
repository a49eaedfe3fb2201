// Attention of one token against the KV cache, in two steps: positions are split over blocks, then parts are merged.
// In: q after rope_kv, the cache in halves. Out: F32, and act blocks of it. Next: matvec.cu.
//
// The split depends on the position: short contexts are cut into pieces of 32 positions, long ones into `splits`
// pieces. The grid does not; blocks that have nothing leave at once. A position is a few lanes wide, 8 columns each,
// and what a lane loads of K and V serves all query heads of the block.
#include "vector.cuh"

constexpr int ATTEND_THREADS = 128;
constexpr int ATTEND_HEADS = 4;   // query heads of a block at most; they share a KV head
constexpr int ATTEND_BATCH = 4;   // positions whose loads are in flight together
constexpr float LOWEST = -1e30f;  // below every score, and finite: differences of two are not NaN

// The positions that the token sees, first .. end - 1, in pieces.
struct Seen {
  int first, end, piece;

  __device__ __forceinline__ Seen(int pos, int window, int splits) {
    first = window > 0 ? max(0, pos + 1 - window) : 0;
    end = pos + 1;
    piece = ((end - first + splits - 1) / splits + 31) / 32 * 32;
  }
  __device__ __forceinline__ int pieces() const { return (end - first + piece - 1) / piece; }
};

// What one group of lanes, or one block, knows of a query head: largest score, sum of exponentials, weighted sum of V.
struct Running {
  float top, total, sums[8];

  // Weights of a batch of positions in, from their scores.
  __device__ __forceinline__ void take(float* scores, const bool* valid) {
    float higher = top;
#pragma unroll
    for (int b = 0; b < ATTEND_BATCH; b++) higher = fmaxf(higher, scores[b]);
    float factor = __expf(top - higher);
    top = higher;
    total *= factor;
#pragma unroll
    for (int j = 0; j < 8; j++) sums[j] *= factor;
#pragma unroll
    for (int b = 0; b < ATTEND_BATCH; b++) {
      scores[b] = valid[b] ? __expf(scores[b] - top) : 0.f;
      total += scores[b];
    }
  }
};

// A block's work: positions lo .. hi - 1 of one KV head against some query heads.
struct Work {
  const float* q;      // [heads, head_dim]
  const __half *k, *v;  // [n_ctx, head_dim]
  float* part;         // of the first head; that of the next is `stride` further
  int lo, hi, heads, head_dim, stride;
  float scale;
};

// LANES per position, 8 columns each.
template <int LANES>
__device__ __forceinline__ void attend_positions(const Work& work, Running* heads_of_lane) {
  constexpr int SLOTS = ATTEND_THREADS / LANES;
  int slot = threadIdx.x / LANES, column = threadIdx.x % LANES * 8;
  int heads = work.heads, head_dim = work.head_dim, hi = work.hi;
  bool inside = column < head_dim;
  float query[ATTEND_HEADS][8];
#pragma unroll
  for (int h = 0; h < ATTEND_HEADS; h++)
#pragma unroll
    for (int j = 0; j < 8; j++)
      query[h][j] = h < heads && inside ? work.q[h * head_dim + column + j] * work.scale : 0.f;

  for (int base = work.lo; base < hi; base += SLOTS * ATTEND_BATCH) {  // the same number of rounds for all lanes
    uint4 keys[ATTEND_BATCH], values[ATTEND_BATCH];
    bool valid[ATTEND_BATCH];
#pragma unroll
    for (int b = 0; b < ATTEND_BATCH; b++) {
      int p = base + b * SLOTS + slot;
      valid[b] = p < hi;
      keys[b] = values[b] = make_uint4(0, 0, 0, 0);
      if (valid[b] && inside) {
        keys[b] = *reinterpret_cast<const uint4*>(work.k + (size_t)p * head_dim + column);
        values[b] = *reinterpret_cast<const uint4*>(work.v + (size_t)p * head_dim + column);
      }
    }
    float scores[ATTEND_HEADS][ATTEND_BATCH];
#pragma unroll
    for (int b = 0; b < ATTEND_BATCH; b++) {
      float key[8];
      eight_floats(keys[b], key);
#pragma unroll
      for (int h = 0; h < ATTEND_HEADS; h++) {
        float s = 0.f;
#pragma unroll
        for (int j = 0; j < 8; j++) s = fmaf(query[h][j], key[j], s);
        scores[h][b] = s;
      }
    }
#pragma unroll
    for (int h = 0; h < ATTEND_HEADS; h++) {
      if (h >= heads) continue;  // the same for the whole block
#pragma unroll
      for (int b = 0; b < ATTEND_BATCH; b++) {
#pragma unroll
        for (int s = LANES / 2; s; s >>= 1) scores[h][b] += __shfl_xor_sync(ALL_LANES, scores[h][b], s);
        if (!valid[b]) scores[h][b] = LOWEST;
      }
      heads_of_lane[h].take(scores[h], valid);
    }
#pragma unroll
    for (int b = 0; b < ATTEND_BATCH; b++) {
      float value[8];
      eight_floats(values[b], value);
#pragma unroll
      for (int h = 0; h < ATTEND_HEADS; h++)
        if (h < heads)
#pragma unroll
          for (int j = 0; j < 8; j++) heads_of_lane[h].sums[j] = fmaf(scores[h][b], value[j], heads_of_lane[h].sums[j]);
    }
  }
}

// What the groups of lanes know, side by side: [head][slot], and [head][slot][column] for the sums. 17 KiB.
struct Shared {
  float top[ATTEND_HEADS][ATTEND_THREADS / 8], total[ATTEND_HEADS][ATTEND_THREADS / 8];
  float sums[ATTEND_HEADS][ATTEND_THREADS * 8];
};

// Merge what the groups of lanes know, in order, and write it.
template <int LANES>
__device__ __forceinline__ void write_part(const Work& work, const Running* heads_of_lane, Shared& shared) {
  constexpr int SLOTS = ATTEND_THREADS / LANES;
#pragma unroll
  for (int h = 0; h < ATTEND_HEADS; h++) {
    shared.top[h][threadIdx.x / LANES] = heads_of_lane[h].top;
    shared.total[h][threadIdx.x / LANES] = heads_of_lane[h].total;
#pragma unroll
    for (int j = 0; j < 8; j++) shared.sums[h][threadIdx.x * 8 + j] = heads_of_lane[h].sums[j];
  }
  __syncthreads();
  if (threadIdx.x < work.heads) {  // tops become weights
    int h = threadIdx.x;
    float top = LOWEST, total = 0.f;
    for (int s = 0; s < SLOTS; s++) top = fmaxf(top, shared.top[h][s]);
    for (int s = 0; s < SLOTS; s++) {
      shared.top[h][s] = __expf(shared.top[h][s] - top);
      total += shared.top[h][s] * shared.total[h][s];
    }
    work.part[h * work.stride] = top;
    work.part[h * work.stride + 1] = total;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < work.heads * work.head_dim; i += ATTEND_THREADS) {
    int h = i / work.head_dim, c = i % work.head_dim;
    float sum = 0.f;
#pragma unroll
    for (int s = 0; s < SLOTS; s++) sum = fmaf(shared.top[h][s], shared.sums[h][s * LANES * 8 + c], sum);
    work.part[h * work.stride + 2 + c] = sum;
  }
}

template <int LANES>
__device__ __forceinline__ void attend_block(const Work& work, Shared& shared) {
  Running heads_of_lane[ATTEND_HEADS];
#pragma unroll
  for (int h = 0; h < ATTEND_HEADS; h++) heads_of_lane[h] = Running{LOWEST, 0.f, {}};
  attend_positions<LANES>(work, heads_of_lane);
  write_part<LANES>(work, heads_of_lane, shared);
}

// q [n_head, head_dim], head_dim a multiple of 8 up to 256; kcache, vcache half [n_head_kv, n_ctx, head_dim], filled up
// to position ctl[CTL_POS]. window > 0: a token sees itself and the window - 1 before it.
// part [n_head, splits, head_dim + 2]: largest score, sum of exponentials, weighted sum of V.
// Grid (n_head_kv * ceil(heads per KV head / 4), splits), block 128.
extern "C" __global__ void __launch_bounds__(128, 4)
attend_part(const float* __restrict__ q, const __half* __restrict__ kcache, const __half* __restrict__ vcache,
            float* __restrict__ part, const int* __restrict__ ctl, int n_head, int n_head_kv, int head_dim, int n_ctx,
            int window, float scale) {
  __shared__ Shared shared;
  int splits = gridDim.y, split = blockIdx.y;
  Seen seen(ctl[CTL_POS], window, splits);
  int lo = seen.first + split * seen.piece, hi = min(lo + seen.piece, seen.end);
  if (lo >= hi) return;
  int group = n_head / n_head_kv, tiles = (group + ATTEND_HEADS - 1) / ATTEND_HEADS;
  int kv = blockIdx.x / tiles, tile = blockIdx.x % tiles * ATTEND_HEADS, head = kv * group + tile;
  int stride = splits * (head_dim + 2);
  size_t rows = (size_t)kv * n_ctx * head_dim;
  Work work{q + head * head_dim, kcache + rows, vcache + rows, part + (size_t)head * stride + split * (head_dim + 2),
            lo, hi, min(ATTEND_HEADS, group - tile), head_dim, stride, scale};
  if (head_dim <= 64) attend_block<8>(work, shared);
  else if (head_dim <= 128) attend_block<16>(work, shared);
  else attend_block<32>(work, shared);
}

// part of attend_part -> att [n_head, head_dim]; aq, ad: att as act blocks (head_dim % 32 == 0), or null.
// Grid n_head, block head_dim rounded up to a multiple of 32: a thread per column.
extern "C" __global__ void __launch_bounds__(256)
attend_merge(const float* __restrict__ part, float* __restrict__ att, signed char* __restrict__ aq,
             float* __restrict__ ad, const int* __restrict__ ctl, int head_dim, int window, int splits) {
  Seen seen(ctl[CTL_POS], window, splits);
  int pieces = seen.pieces(), stride = head_dim + 2, column = threadIdx.x;
  const float* parts = part + (size_t)blockIdx.x * splits * stride;
  float top = LOWEST, total = 0.f, sum = 0.f;
  for (int s = 0; s < pieces; s++) top = fmaxf(top, parts[s * stride]);
  for (int s = 0; s < pieces; s++) {
    float weight = __expf(parts[s * stride] - top);
    total = fmaf(weight, parts[s * stride + 1], total);
    if (column < head_dim) sum = fmaf(weight, parts[s * stride + 2 + column], sum);
  }
  float value = sum / total;
  int i = blockIdx.x * head_dim + column;
  if (column < head_dim) att[i] = value;
  if (aq != nullptr) store_act_block(value, aq, ad, i);  // all columns are inside then
}
