"""Matrix product for many tokens: each weight is read, decoded and packed once for a whole block of tokens.

In: addresses; activations f32 [n_tok][ldx] and act blocks [n_tok][ldxb] (leading dimensions in bytes). Out: f32
[n_tok][ldd]. Next: walk.py.

Small blocks use the same row kernels as single tokens; from PACK_TOKENS on, a panel of rows is packed with lane = row
(tiles.py) and used by every tile of tokens. A result depends neither on the number of threads nor on the other rows.
"""

from numba import njit

from hotcold.runtime.kernels.formats import (
    BF16,
    F16,
    F32,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
)
from hotcold.runtime.kernels.rows import AHEAD, NONE, dot4, row1, row16
from hotcold.runtime.kernels.simd import (
    add_w,
    load_f32,
    load_i32,
    load_w,
    mul_w,
    splat_w,
    store_f32,
    store_w,
    zero_w,
)
from hotcold.runtime.kernels.tiles import (
    FLOAT_ROWS,
    FLOAT_VECTORS,
    LANES,
    TILE_TOKENS,
    WIDE_BLOCK,
    byte_tile,
    byte_tile_halves,
    byte_tile_minimum,
    byte_tile_q8,
    float_tile,
    pack_bf16,
    pack_f16,
    pack_f32,
    pack_q4,
    pack_q4_1,
    pack_q4k,
    pack_q5_0,
    pack_q5_1,
    pack_q5k,
    pack_q6k,
    pack_q8,
)

DEPTH = 2048  # neurons per pass of a down projection: bounds the panel to what the second-level cache holds
TILE_BYTES = 4 * TILE_TOKENS * FLOAT_ROWS


def panel_bytes(cols: int) -> int:
    """Scratch that the product needs for a matrix of `cols` columns, per thread."""
    return TILE_BYTES + max(4 * FLOAT_ROWS * (max(cols, DEPTH) + LANES), WIDE_BLOCK * (cols // 32 + 1))


@njit
def finish(dst, y, bias, row, scale, add):
    """Store one sum with what the operator adds to it: bias, then scale, then the old value."""
    if bias:
        y += load_f32(bias + 4 * row)
    y *= scale
    at = dst + 4 * row
    store_f32(at, load_f32(at) + y if add else y)


@njit
def finish_rows(dst, tile, bias, row, rows, scale, add):
    """finish() of the sums of one token in a tile: `row` and the rows - 1 after it."""
    whole = rows // LANES * LANES
    for j in range(0, whole, LANES):
        y, at = load_w(tile + 4 * j), dst + 4 * (row + j)
        if bias:
            y = add_w(y, load_w(bias + 4 * (row + j)))
        y = mul_w(y, splat_w(scale))
        store_w(at, add_w(load_w(at), y) if add else y)
    for j in range(whole, rows):
        finish(dst, load_f32(tile + 4 * j), bias, row + j, scale, add)


@njit
def pack_bytes(qt, a, stride, last, ids, n, panel):
    """Byte panel (tiles.py) of rows 0..last of a quantized matrix, or of a list of rows."""
    if qt == Q8_0:
        pack_q8(a, stride, last, ids, n // 32, panel)
    elif qt == Q4_0:
        pack_q4(a, stride, last, ids, n // 32, panel)
    elif qt == Q4_1:
        pack_q4_1(a, stride, last, ids, n // 32, panel)
    elif qt == Q5_0:
        pack_q5_0(a, stride, last, ids, n // 32, panel)
    elif qt == Q5_1:
        pack_q5_1(a, stride, last, ids, n // 32, panel)
    elif qt == Q4_K:
        pack_q4k(a, stride, last, ids, n // 32, panel)
    elif qt == Q5_K:
        pack_q5k(a, stride, last, ids, n // 32, panel)
    else:
        pack_q6k(a, stride, last, ids, n // 32, panel)


@njit(inline="always")
def multiply_bytes(qt, panel, n, xb, ldxb, last, out):
    """One tile of sums from a byte panel of n columns: tokens 0..last."""
    if qt == Q6_K:
        byte_tile_halves(panel, n // 32, 4, xb, ldxb, last, out)
    elif qt == Q8_0:
        byte_tile_q8(panel, n // 32, 16, xb, ldxb, last, out)
    elif qt == Q4_0 or qt == Q5_0:
        byte_tile(panel, n // 32, 1 if qt == Q4_0 else 2, xb, ldxb, last, out)
    else:
        byte_tile_minimum(panel, n // 32, 0, xb, ldxb, last, out)


@njit
def pack_floats(qt, a, stride, last, ids, n, panel):
    """panel[k][FLOAT_ROWS] = column k of rows 0..last of a float matrix, or of a list of rows (ids is not 0).

    The last row is repeated to the panel's width.
    """
    for v in range(FLOAT_VECTORS):
        first = min(v * LANES, last)
        base, left, list_ = (a, last - first, ids + 4 * first) if ids else (a + first * stride, last - first, NONE)
        dst = panel + 4 * v * LANES
        if qt == F16:
            pack_f16(base, stride, left, list_, n // 16, dst)
        elif qt == BF16:
            pack_bf16(base, stride, left, list_, n // 16, dst)
        else:
            pack_f32(base, stride, left, list_, n // 16, dst)
        for k in range(n // 16 * 16, n):
            for r in range(LANES):
                row = load_i32(list_ + 4 * min(r, left)) if list_ else min(r, left)
                store_f32(dst + 4 * (k * FLOAT_ROWS + r), row1(qt, base + row * stride, k))


@njit
def few_tokens(o, r0, r1, n_tok, x, ldx, xb, ldxb, dst, ldd):
    """As matmul, each token by itself: the bits of single tokens. Rows stay in the cache while all tokens use them.

    Four rows at a time, a quarter of the range apart, as in matvec.
    """
    q = (r1 - r0 + 3) // 4
    for r in range(r0, r0 + q):
        a, last = o.w + r * o.stride, r1 - 1 - r  # rows past the end are the last one
        a1, a2, a3 = a + min(q, last) * o.stride, a + min(2 * q, last) * o.stride, a + min(3 * q, last) * o.stride
        p = AHEAD
        for t in range(n_tok):
            y = dot4(o.qt, a, a1, a2, a3, p, p, p, p, o.cols, x + t * ldx, xb + t * ldxb)
            p = NONE
            to = dst + t * ldd
            finish(to, y[0], o.bias, r, o.scale, o.add)
            if last >= q:
                finish(to, y[1], o.bias, r + q, o.scale, o.add)
            if last >= 2 * q:
                finish(to, y[2], o.bias, r + 2 * q, o.scale, o.add)
            if last >= 3 * q:
                finish(to, y[3], o.bias, r + 3 * q, o.scale, o.add)


@njit(inline="always")
def matmul(o, r0, r1, n_tok, x, ldx, xb, ldxb, dst, ldd, scratch, ids):
    """dst[t][r] (+)= scale * (row r . x[t] + bias[r]) for r0 <= r < r1: o.qt, o.w, o.stride, o.cols, o.bias, ...

    ids: 0, or a list of rows: then `row r` is the r-th of them.
    """
    quantized = not (o.qt == F32 or o.qt == F16 or o.qt == BF16)
    width = LANES if quantized else FLOAT_ROWS
    panel = scratch + TILE_BYTES
    for r in range(r0, r1, width):
        rows = min(width, r1 - r)
        w, some = (o.w, ids + 4 * r) if ids else (o.w + r * o.stride, NONE)
        if quantized:
            pack_bytes(o.qt, w, o.stride, rows - 1, some, o.cols, panel)
        else:
            pack_floats(o.qt, w, o.stride, rows - 1, some, o.cols, panel)
        for t in range(0, n_tok, TILE_TOKENS):
            tokens = min(TILE_TOKENS, n_tok - t)
            if quantized:
                multiply_bytes(o.qt, panel, o.cols, xb + t * ldxb, ldxb, tokens - 1, scratch)
            else:
                float_tile(panel, o.cols, x + t * ldx, ldx, tokens - 1, scratch)
            for i in range(tokens):
                tile = scratch + 4 * i * width
                if ids and o.bias:
                    for j in range(rows):
                        at = tile + 4 * j
                        store_f32(at, load_f32(at) + load_f32(o.bias + 4 * load_i32(some + 4 * j)))
                finish_rows(dst + (t + i) * ldd, tile, 0 if ids else o.bias, r, rows, o.scale, o.add)


@njit
def pack_columns(qt, w, stride, n0, n1, ids, c0, cols, panel):
    """panel[neuron][FLOAT_ROWS] = weights c0.. of each neuron's down row; columns past the end are 0.

    Neurons n0..n1-1, or those at these places of a list (ids is not 0).
    """
    for n in range(n0, n1):
        a, dst = w + (load_i32(ids + 4 * n) if ids else n) * stride, panel + 4 * (n - n0) * FLOAT_ROWS
        for v in range(FLOAT_VECTORS):
            c = c0 + v * LANES
            if c + LANES <= cols:
                store_w(dst + 4 * v * LANES, row16(qt, a, c))
            else:
                store_w(dst + 4 * v * LANES, zero_w())
                for i in range(max(0, cols - c)):
                    store_f32(dst + 4 * (v * LANES + i), row1(qt, a, c + i))


@njit(inline="always")
def matmul_columns(o, c0, c1, n_tok, x, ldx, dst, ldd, scratch, ids, n_ids):
    """dst[t][c] (+)= scale * (sum over neurons n of x[t][n] * w3[n][c] + bias[c]) for c0 <= c < c1.

    w3, stride3, qt3: down columns, one row per neuron (o.rows of them), o.cols long; x: f32 activations.
    Neurons are added in order of id, those of DEPTH ids at a time. ids: 0, or a list of n_ids neurons in order of id,
    whose activations x holds one beside the other: the same bits as with 0 for the others.
    """
    panel = scratch + TILE_BYTES
    for c in range(c0, c1, FLOAT_ROWS):
        width = min(FLOAT_ROWS, c1 - c)
        n = NONE
        for depth in range(0, o.rows, DEPTH):
            end = min(depth + DEPTH, o.rows)
            if ids:
                end = n
                while end < n_ids and load_i32(ids + 4 * end) < depth + DEPTH:
                    end += 1
            pack_columns(o.qt3, o.w3, o.stride3, n, end, ids, c, o.cols, panel)
            bias = o.bias if depth == 0 else 0
            for t in range(0, n_tok, TILE_TOKENS):
                tokens = min(TILE_TOKENS, n_tok - t)
                float_tile(panel, end - n, x + t * ldx + 4 * n, ldx, tokens - 1, scratch)
                for i in range(tokens):
                    tile = scratch + 4 * i * FLOAT_ROWS
                    finish_rows(dst + (t + i) * ldd, tile, bias, c, width, o.scale, o.add or depth > 0)
            n = end
