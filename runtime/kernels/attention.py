"""Attention of single tokens, or a few, against the KV cache, and writing the cache.

In: addresses. The cache of a layer is [n_head_kv][n_ctx] rows of head_dim values for K and for V, F16, F32 or Q8_0.
Out: f32[head_dim] per head and token. Next: attention_block.py (prompts), walk.py.

Positions are taken in chunks of CHUNK, counted from position 0. A chunk gives, for each query head, its largest score,
the sum of its exponentials and its weighted sum of V; the chunks of a head are merged in order. Work is shared out by
position, chunk and head, so a single KV head keeps all threads busy; heads that share a KV head and fall to one thread
share each load of K and V. No result depends on how the work was shared out.
"""

import numpy as np
from numba import njit

from hotcold.runtime.kernels.attention_tiles import (
    HEADS,
    POSITIONS,
    ROW_F16,
    ROW_F32,
    ROW_Q8,
    WIDTH,
    first_lane,
    largest,
    score_tile,
    store_wh,
    value_tile,
)
from hotcold.runtime.kernels.formats import F16, Q8_0, Q8_0_BYTES
from hotcold.runtime.kernels.rows import AHEAD, ONE, ZERO
from hotcold.runtime.kernels.simd import (
    add_w,
    fma_w,
    hmax,
    hsum_w,
    load_f16,
    load_f32,
    load_v,
    load_w,
    max_w,
    mul_w,
    prefetch_l2,
    round_v,
    splat,
    splat_w,
    store_f16,
    store_f32,
    store_s8,
    store_w,
    sub_w,
    vabs,
    vmax,
    vmul,
    zero_w,
)
from hotcold.runtime.kernels.sync import LINE, atomic_add, atomic_store
from hotcold.runtime.kernels.vector import exp_w

CHUNK = 256  # positions: the unit of work and of merging
BLOCK = 64  # positions whose rows stay in the first-level cache while every head and column uses them
QUERIES = 32  # heads of one KV head, of all tokens, that are computed together at most
LD_SCORES = 4 * (CHUNK + 16)  # bytes of a row of scores: room for a last vector, and rows do not share cache sets
FEW_BYTES = QUERIES * LD_SCORES  # scratch of attend_few
LOW = np.float32(-1e30)
_127 = np.float32(127.0)


def part_bytes(head_dim: int) -> int:
    """What one chunk gives for one head: f32 largest score, sum; at offset 64 f32[head_dim]."""
    return 64 + 4 * -(-head_dim // 16) * 16


def parts_bytes(n_tok: int, n_head: int, head_dim: int, n_ctx: int) -> int:
    """Memory, shared by the threads, for what the chunks of all heads give before they are merged."""
    return n_tok * n_head * -(-n_ctx // CHUNK) * part_bytes(head_dim)


@njit
def store_cache(kv_type, cache, x, n):
    """Write n f32 values to a cache row; Q8_0 as llama.cpp rounds it (n is a multiple of 32 then)."""
    if kv_type == Q8_0:
        for i in range(n // 32):
            a, o = x + 128 * i, cache + Q8_0_BYTES * i
            v0, v1, v2, v3 = load_v(a), load_v(a + 32), load_v(a + 64), load_v(a + 96)
            top = hmax(vmax(vmax(vabs(v0), vabs(v1)), vmax(vabs(v2), vabs(v3))))
            inverse = splat(_127 / top if top > 0 else ZERO)
            store_f16(o, top / _127)
            store_s8(o + 2, round_v(vmul(v0, inverse)))
            store_s8(o + 10, round_v(vmul(v1, inverse)))
            store_s8(o + 18, round_v(vmul(v2, inverse)))
            store_s8(o + 26, round_v(vmul(v3, inverse)))
        return
    whole = n // 16 * 16
    for i in range(0, whole, 16):
        if kv_type == F16:
            store_wh(cache + 2 * i, load_w(x + 4 * i))
        else:
            store_w(cache + 4 * i, load_w(x + 4 * i))
    for i in range(whole, n):
        if kv_type == F16:
            store_f16(cache + 2 * i, load_f32(x + 4 * i))
        else:
            store_f32(cache + 4 * i, load_f32(x + 4 * i))


# ------------------------------------------------------------------ positions of one token, heads of one KV head


def _by_heads(tiles):
    """run(left, ...) computes as many of `left` heads as the largest tile that they fill, and says how many.

    tiles: for 1, 2 and 4 heads, or for 1 only: each costs compile time.
    """
    one, two, four = tiles[0], tiles[min(1, len(tiles) - 1)], tiles[-1]
    most = 2 ** (len(tiles) - 1)

    @njit
    def single(left, a, b, c, d, e, f, g, h):
        one(a, b, c, d, e, f, g, h)
        return 1

    @njit
    def run(left, a, b, c, d, e, f, g, h):
        if left == 1:
            one(a, b, c, d, e, f, g, h)
            return 1
        if left < most:
            two(a, b, c, d, e, f, g, h)
            return 2
        four(a, b, c, d, e, f, g, h)
        return most

    return run if most > 1 else single


def _scores_of(kind, load1, size, most):
    """Scores for one type of cache row: float types have `size` bytes a value. most: heads that share a load."""
    columns = 16 * kind.vectors
    tile = _by_heads([score_tile(kind, heads) for heads in (1, 2, 4) if heads <= most])

    @njit
    def scores(k, row, n_pos, head_dim, q, heads, out, ahead):
        """out[h][p] = q[h] . k[p]; out rows are LD_SCORES apart and have room for a multiple of POSITIONS."""
        ld, steps = 4 * head_dim, head_dim // columns
        for p in range(0, n_pos, POSITIONS):
            a, last = k + p * row, min(POSITIONS, n_pos - p) - 1
            if ahead:
                for line in range(0, POSITIONS * row, 64):
                    prefetch_l2(a + ahead + line)
            h = 0
            while h < heads:
                h += tile(heads - h, a, row, last, steps, q + h * ld, ld, out + h * LD_SCORES + 4 * p, LD_SCORES)
        if steps * columns < head_dim:
            for h in range(heads):
                for p in range(n_pos):
                    at = out + h * LD_SCORES + 4 * p
                    y = load_f32(at)
                    for i in range(steps * columns, head_dim):
                        y += load1(k + p * row + size * i) * load_f32(q + h * ld + 4 * i)
                    store_f32(at, y)

    return scores


def _values_of(kind, load1, size, most):
    """Weighted sums of V for one type of cache row."""
    step, wide, n_bytes = 16 * kind.vectors, 16 * WIDTH, kind.n_bytes
    tile = _by_heads([value_tile(kind, heads, WIDTH) for heads in (1, 2, 4) if heads <= most])
    narrow = value_tile(kind, 1, kind.vectors)

    @njit
    def values(v, row, n_pos, head_dim, w, heads, out, ld_out, ahead):
        """out[h] += sum over p of w[h][p] * v[p]; rows of w are LD_SCORES apart."""
        # `ahead` is the same for all heads: with 0 for all but the first, LLVM 22 peels a loop and drops half a block.
        for c in range(0, head_dim - wide + 1, wide):
            h = 0
            while h < heads:
                h += tile(heads - h, v + c // step * n_bytes, row, n_pos, w + h * LD_SCORES, LD_SCORES,
                          out + h * ld_out + 4 * c, ld_out, ahead)  # fmt: skip
        for c in range(head_dim // wide * wide, head_dim - step + 1, step):
            for h in range(heads):
                narrow(v + c // step * n_bytes, row, n_pos, w + h * LD_SCORES, 0, out + h * ld_out + 4 * c, 0, ahead)
        for c in range(head_dim // step * step, head_dim):
            for h in range(heads):
                y = load_f32(out + h * ld_out + 4 * c)
                for p in range(n_pos):
                    y += load1(v + p * row + size * c) * load_f32(w + h * LD_SCORES + 4 * p)
                store_f32(out + h * ld_out + 4 * c, y)

    return values


# F32 is for tests. A row of Q8_0 has no columns outside its blocks: its load1 and size are not used.
_scores_f16, _values_f16 = _scores_of(ROW_F16, load_f16, 2, HEADS), _values_of(ROW_F16, load_f16, 2, HEADS)
_scores_q8, _values_q8 = _scores_of(ROW_Q8, load_f16, 0, HEADS), _values_of(ROW_Q8, load_f16, 0, HEADS)
_scores_f32, _values_f32 = _scores_of(ROW_F32, load_f32, 4, 1), _values_of(ROW_F32, load_f32, 4, 1)


@njit(inline="always")
def _scores(kv_type, k, row, n_pos, head_dim, q, heads, out, ahead):
    if kv_type == F16:
        _scores_f16(k, row, n_pos, head_dim, q, heads, out, ahead)
    elif kv_type == Q8_0:
        _scores_q8(k, row, n_pos, head_dim, q, heads, out, ahead)
    else:
        _scores_f32(k, row, n_pos, head_dim, q, heads, out, ahead)


@njit(inline="always")
def _values(kv_type, v, row, n_pos, head_dim, w, heads, out, ld_out, ahead):
    if kv_type == F16:
        _values_f16(v, row, n_pos, head_dim, w, heads, out, ld_out, ahead)
    elif kv_type == Q8_0:
        _values_q8(v, row, n_pos, head_dim, w, heads, out, ld_out, ahead)
    else:
        _values_f32(v, row, n_pos, head_dim, w, heads, out, ld_out, ahead)


@njit
def exponentials(scores, n, scale, top):
    """scores[0:n] = exp(scale * scores - top'); returns top', the larger of `top` and the scaled scores, and the sum.

    Overwrites up to 15 values past the end.
    """
    for p in range(n, (n + 15) // 16 * 16):
        store_f32(scores + 4 * p, LOW)
    tops = splat_w(top)
    for p in range(0, n, 16):
        s = mul_w(load_w(scores + 4 * p), splat_w(scale))
        store_w(scores + 4 * p, s)
        tops = max_w(s, tops)
    top = largest(tops)
    total = zero_w()
    # exp_w clamps at -87, so the padding adds at most 15 * e^-87: nothing in f32, since the largest term is 1
    for p in range(0, n, 16):
        e = exp_w(sub_w(load_w(scores + 4 * p), splat_w(top)))
        store_w(scores + 4 * p, e)
        total = add_w(total, e)
    return top, hsum_w(total)


@njit
def seen(end, window, lo, hi):
    """Which of the positions lo..hi-1 a token at position end-1 sees: first, end."""
    return max(end - window, lo) if window else lo, min(end, hi)


# ------------------------------------------------------------------ a chunk, and merging: o is a record of walk._attend


@njit
def _part(o, tok, head, chunk):
    """Address of what a chunk gives for a head of a token."""
    chunks = (o.aux2 + CHUNK - 1) // CHUNK
    return o.w4 + ((tok * chunks + chunk) * o.rows + head) * o.stride


@njit(inline="always")
def _chunk(o, kv, chunk, first, end, pos, scratch):
    """Queries first..end-1 (token * heads per KV head + head) of KV head `kv` against one chunk."""
    hd, row, group, base = o.unit, o.stride3, o.rows // o.cols, chunk * CHUNK
    k, v = o.w3 + kv * o.aux2 * row, o.aux + kv * o.aux2 * row
    limit = min(base + CHUNK, pos + (end - 1) // group + 1)
    for values in range(2):  # first all scores, then all values
        for p in range(base, limit, BLOCK):
            query = first
            while query < end:
                tok, head = query // group, kv * group + query % group
                n = min(end, (tok + 1) * group) - query
                a, e = seen(pos + tok + 1, o.window, p, min(p + BLOCK, limit))
                w, ahead = scratch + (query - first) * LD_SCORES + 4 * (a - base), 0 if query > first else AHEAD
                if a < e and values:
                    _values(o.qt, v + a * row, row, e - a, hd, w, n, _part(o, tok, head, chunk) + 64, o.stride, ahead)
                elif a < e:
                    _scores(o.qt, k + a * row, row, e - a, hd, o.src + tok * o.ld_src + 4 * head * hd, n, w, ahead)
                query += n
        if values:
            return
        for query in range(first, end):
            tok, head = query // group, kv * group + query % group
            a, e = seen(pos + tok + 1, o.window, base, limit)
            if a < e:
                out = _part(o, tok, head, chunk)
                top, total = exponentials(scratch + (query - first) * LD_SCORES + 4 * (a - base), e - a, o.scale, LOW)
                store_f32(out, top)
                store_f32(out + 4, total)
                for i in range(64, o.stride, 64):
                    store_w(out + i, zero_w())


@njit(inline="always")
def _merge(o, kv, first, end, pos):
    """The chunks of queries first..end-1, in order, to the output."""
    group = o.rows // o.cols
    for query in range(first, end):
        tok, head = query // group, kv * group + query % group
        a, e = seen(pos + tok + 1, o.window, 0, pos + tok + 1)
        top = LOW
        for chunk in range(a // CHUNK, (e - 1) // CHUNK + 1):
            top = max(top, load_f32(_part(o, tok, head, chunk)))
        acc, total = _part(o, tok, head, a // CHUNK), ZERO
        for chunk in range(a // CHUNK, (e - 1) // CHUNK + 1):
            part = _part(o, tok, head, chunk)
            factor = first_lane(exp_w(splat_w(load_f32(part) - top)))
            total += factor * load_f32(part + 4)
            for i in range(64, o.stride, 64):
                old = zero_w() if part == acc else load_w(acc + i)
                store_w(acc + i, fma_w(load_w(part + i), splat_w(factor), old))
        out, inverse = o.dst + tok * o.ld_dst + 4 * head * o.unit, ONE / total
        for i in range(o.unit):
            store_f32(out + 4 * i, load_f32(acc + 64 + 4 * i) * inverse)


@njit
def _item(o, x, n_tok, first, n_pos):
    """The work has a size: KV heads * positions * queries. The item (KV head, chunk, query) in which unit x lies."""
    queries = n_tok * (o.rows // o.cols)
    kv, rest = x // (n_pos * queries), x % (n_pos * queries)
    position = first + rest // queries
    chunk = position // CHUNK
    start = max(first, chunk * CHUNK)
    length = min(first + n_pos, (chunk + 1) * CHUNK) - start
    chunks = (first + n_pos - 1) // CHUNK - first // CHUNK + 1
    return (kv * chunks + chunk - first // CHUNK) * queries + (rest - (start - first) * queries) // length


@njit
def attend_few(o, t, n_threads, n_tok, pos, scratch):
    """dst = softmax(scale * q k^T) v for a few tokens: this thread's share of it. See walk._attend.

    scratch: FEW_BYTES. w4: parts_bytes(), shared by the threads. signs: a counter per KV head, LINE bytes apart, 0
    before and after: whoever does the last item of a KV head merges its chunks.
    """
    queries = n_tok * (o.rows // o.cols)
    first = max(0, pos + 1 - o.window) if o.window else 0  # what any of the tokens sees
    n_pos = pos + n_tok - first
    chunks = (first + n_pos - 1) // CHUNK - first // CHUNK + 1
    work = o.cols * n_pos * queries
    at = _item(o, work * t // n_threads, n_tok, first, n_pos)
    end = _item(o, work * (t + 1) // n_threads, n_tok, first, n_pos)
    while at < end:
        kv, query = at // queries // chunks, at % queries
        n = min(queries - query, end - at, QUERIES)
        _chunk(o, kv, first // CHUNK + at // queries % chunks, query, query + n, pos, scratch)
        at += n
        done = n if chunks == 1 else atomic_add(o.signs + LINE * kv, n) + n
        if done == chunks * queries:
            atomic_store(o.signs + LINE * kv, 0)
            query, n = 0, queries
        if chunks == 1 or done == chunks * queries:
            _merge(o, kv, query, query + n, pos)
