"""Attention of a block of tokens against the KV cache: the sums of attention.py as matrix products.

In: addresses. Out: f32[head_dim] per head and token. Next: walk.py.

Tiles of tokens and the heads of one KV head share the packing of K and V. The cache is taken in chunks of CHUNK
positions, counted from position 0, and each row (one head of one token) keeps its largest score and its sum so far. So
scratch does not grow with the context, and a token has the same bits whichever tokens are in its tile.
"""

from numba import njit

from hotcold.runtime.kernels.attention import CHUNK, LD_SCORES, LOW, exponentials, seen
from hotcold.runtime.kernels.attention_tiles import first_lane
from hotcold.runtime.kernels.blocks import TILE_BYTES, pack_columns, pack_floats
from hotcold.runtime.kernels.formats import F32, Q8_0
from hotcold.runtime.kernels.rows import NONE, ONE, ZERO, copy_row
from hotcold.runtime.kernels.simd import fma_w, load_f32, load_w, splat_w, store_f32, store_w
from hotcold.runtime.kernels.tiles import FLOAT_ROWS, TILE_TOKENS, float_tile
from hotcold.runtime.kernels.vector import exp_w

ROWS = 64  # tokens * heads that share one packing of a chunk
SHARING = 4  # of these, heads at most
_TOP, _SUM, _FACTOR, _STATE = 0, 4, 8, 12  # f32 per row: largest score, sum, what its old sums are multiplied by


def block_bytes(head_dim: int) -> int:
    """Scratch of attend_block besides the panel: scores, states, one panel of K in F32."""
    return ROWS * (LD_SCORES + _STATE) + 64 + 4 * FLOAT_ROWS * (head_dim + 16)


@njit
def attend_block(o, t, n_threads, n_tok, pos, panel, scratch):
    """dst = softmax(scale * q k^T) v for n_tok tokens: this thread's share of it. See walk._attend.

    panel: blocks.panel_bytes(head_dim); scratch: block_bytes(head_dim). Work is dealt in turn: later tokens see more.
    """
    group = o.rows // o.cols
    heads = min(group, SHARING)
    step = ROWS // heads // TILE_TOKENS * TILE_TOKENS
    tiles = (n_tok + step - 1) // step
    if tiles * o.cols * ((group + heads - 1) // heads) < 2 * n_threads:
        heads = 1
    parts = (group + heads - 1) // heads
    for item in range(t, tiles * o.cols * parts, n_threads):
        first = item // (o.cols * parts) * step
        kv, head = item // parts % o.cols, item % parts * heads
        n = min(step, n_tok - first)
        _tile(o, kv, kv * group + head, min(heads, group - head), first, n, pos + first, panel, scratch)


@njit(inline="always")
def _tile(o, kv, head, heads, tok, n_tok, pos, panel, scratch):
    """`heads` heads of one KV head, tokens tok.. of the block, the first of them at position pos."""
    states = scratch + ROWS * LD_SCORES
    for i in range(heads * n_tok):
        store_f32(states + _STATE * i + _TOP, LOW)
        store_f32(states + _STATE * i + _SUM, ZERO)
    q = o.src + tok * o.ld_src + 4 * head * o.unit
    out = o.dst + tok * o.ld_dst + 4 * head * o.unit
    first, _ = seen(pos + 1, o.window, 0, pos + 1)
    for base in range(first // CHUNK * CHUNK, pos + n_tok, CHUNK):
        lo, hi = max(base, first), min(base + CHUNK, pos + n_tok)
        _block_scores(o, kv, heads, n_tok, pos, base, lo, hi, q, panel, scratch)
        for i in range(heads * n_tok):
            _weights(o, pos + i % n_tok + 1, base, lo, hi, scratch + i * LD_SCORES, states + _STATE * i)
        _block_values(o, kv, heads, n_tok, pos, base, lo, hi, out, lo == first, panel, scratch, states)
    for i in range(heads * n_tok):
        at = out + i % n_tok * o.ld_dst + 4 * (i // n_tok) * o.unit
        inverse = ONE / load_f32(states + _STATE * i + _SUM)
        for j in range(o.unit):
            store_f32(at + 4 * j, load_f32(at + 4 * j) * inverse)


@njit(inline="always")
def _pack_keys(o, kv, p, rows, panel, floats):
    """Panel of `rows` positions from p; block formats by way of f32 rows."""
    a = o.w3 + (kv * o.aux2 + p) * o.stride3
    if o.qt != Q8_0:
        pack_floats(o.qt, a, o.stride3, rows - 1, NONE, o.unit, panel)
        return
    for i in range(rows):
        copy_row(o.qt, a + i * o.stride3, o.unit, ONE, floats + 4 * i * o.unit)
    pack_floats(F32, floats, 4 * o.unit, rows - 1, NONE, o.unit, panel)


@njit(inline="always")
def _block_scores(o, kv, heads, n_tok, pos, base, lo, hi, q, panel, scratch):
    """scores[row][p - base] = q . k[p] for lo <= p < hi, where a token of the tile of tokens sees any of it."""
    tile, panel = panel, panel + TILE_BYTES
    floats = scratch + ROWS * (LD_SCORES + _STATE) + 64
    for p in range(lo - (lo - base) % FLOAT_ROWS, hi, FLOAT_ROWS):  # whole panels, as many as a row has room for
        rows = min(FLOAT_ROWS, hi - p)
        _pack_keys(o, kv, p, rows, panel, floats)
        for t in range(0, n_tok, TILE_TOKENS):
            tokens = min(TILE_TOKENS, n_tok - t)
            if p >= pos + t + tokens or (o.window and p + rows <= pos + t + 1 - o.window):
                continue
            for h in range(heads):
                float_tile(panel, o.unit, q + t * o.ld_src + 4 * h * o.unit, o.ld_src, tokens - 1, tile)
                for i in range(tokens):
                    dst = scratch + (h * n_tok + t + i) * LD_SCORES + 4 * (p - base)
                    for j in range(0, 4 * FLOAT_ROWS, 64):
                        store_w(dst + j, load_w(tile + 4 * i * FLOAT_ROWS + j))


@njit(inline="always")
def _weights(o, end, base, lo, hi, scores, state):
    """Scores of one row -> exponentials, 0 where the token does not look; its state follows."""
    a, e = seen(end, o.window, lo, hi)
    if a >= e:
        a, e = hi, hi
        store_f32(state + _FACTOR, ONE)
    else:
        before = load_f32(state + _TOP)
        top, total = exponentials(scores + 4 * (a - base), e - a, o.scale, before)
        factor = first_lane(exp_w(splat_w(before - top)))
        store_f32(state + _TOP, top)
        store_f32(state + _SUM, load_f32(state + _SUM) * factor + total)
        store_f32(state + _FACTOR, factor)
    for p in range(lo, a):
        store_f32(scores + 4 * (p - base), ZERO)
    for p in range(e, hi):
        store_f32(scores + 4 * (p - base), ZERO)


@njit(inline="always")
def _block_values(o, kv, heads, n_tok, pos, base, lo, hi, out, fresh, panel, scratch, states):
    """out[row] = factor * out[row] + sum over lo <= p < hi of weight[row][p] * v[p]; fresh: out holds nothing yet."""
    tile, panel, hd = panel, panel + TILE_BYTES, o.unit
    v = o.aux + kv * o.aux2 * o.stride3
    for c in range(0, hd, FLOAT_ROWS):
        width = min(FLOAT_ROWS, hd - c)
        pack_columns(o.qt, v, o.stride3, lo, hi, NONE, c, hd, panel)
        for t in range(0, n_tok, TILE_TOKENS):
            tokens = min(TILE_TOKENS, n_tok - t)
            n_pos = max(0, min(hi, pos + t + tokens) - lo)
            for h in range(heads):
                row = h * n_tok + t
                float_tile(panel, n_pos, scratch + row * LD_SCORES + 4 * (lo - base), LD_SCORES, tokens - 1, tile)
                for i in range(tokens):
                    factor = ZERO if fresh else load_f32(states + _STATE * (row + i) + _FACTOR)
                    at = out + (t + i) * o.ld_dst + 4 * (h * hd + c)
                    _add_scaled(at, tile + 4 * i * FLOAT_ROWS, width, factor, fresh)


@njit(inline="always")
def _add_scaled(dst, x, n, factor, fresh):
    """dst[0:n] = factor * dst + x; fresh: dst = x, whatever was there."""
    for i in range(0, n - 15, 16):
        y = load_w(x + 4 * i)
        store_w(dst + 4 * i, y if fresh else fma_w(load_w(dst + 4 * i), splat_w(factor), y))
    for i in range(n // 16 * 16, n):
        y1 = load_f32(x + 4 * i)
        store_f32(dst + 4 * i, y1 if fresh else load_f32(dst + 4 * i) * factor + y1)
