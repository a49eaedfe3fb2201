"""Attention of one query head against the KV cache, for one token or for a group of tokens, and writing the cache.

In: addresses. The cache of a layer is [n_head_kv][n_ctx][head_dim] for K and for V, F16 or F32. Out: f32[head_dim]
per token. Next: walk.py.
"""

import math

import numpy as np
from numba import njit

from hotcold.runtime.kernels.blocks import DEPTH, TILE_BYTES, pack_columns, pack_floats
from hotcold.runtime.kernels.formats import F16
from hotcold.runtime.kernels.rows import ONE, ZERO
from hotcold.runtime.kernels.simd import (
    add_w,
    fma_w,
    hsum_w,
    load_f16,
    load_f32,
    load_w,
    load_wh,
    mul_w,
    splat_w,
    store_f16,
    store_f32,
    store_w,
    sub_w,
    zero_w,
)
from hotcold.runtime.kernels.tiles import FLOAT_ROWS, TILE_TOKENS, float_tile
from hotcold.runtime.kernels.vector import exp_w

_LOW = np.float32(-1e30)


@njit
def store_cache(kv_type, cache, x, n):
    """Write n f32 values to a cache row."""
    for i in range(n):
        if kv_type == F16:
            store_f16(cache + 2 * i, load_f32(x + 4 * i))
        else:
            store_f32(cache + 4 * i, load_f32(x + 4 * i))


def _attend_of(load16, load1, size):
    """The attention of one token, for one type of cache."""

    @njit
    def scaled_scores(q, k, n_pos, head_dim, scale, scores):
        """scores[p] = scale * (q . k[p]); returns the largest."""
        top = _LOW
        for p in range(n_pos):
            a = k + p * head_dim * size
            s = zero_w()
            for i in range(0, head_dim - 15, 16):
                s = fma_w(load16(a + size * i), load_w(q + 4 * i), s)
            y = hsum_w(s)
            for i in range(head_dim // 16 * 16, head_dim):
                y += load1(a + size * i) * load_f32(q + 4 * i)
            y *= scale
            store_f32(scores + 4 * p, y)
            top = max(top, y)
        return top

    @njit
    def weighted_values(v, n_pos, head_dim, scores, inverse, out):
        """out = inverse * sum over p of scores[p] * v[p]."""
        row = head_dim * size
        for i in range(0, head_dim - 15, 16):
            s = zero_w()
            for p in range(n_pos):
                s = fma_w(load16(v + p * row + size * i), splat_w(load_f32(scores + 4 * p)), s)
            store_w(out + 4 * i, mul_w(s, splat_w(inverse)))
        for i in range(head_dim // 16 * 16, head_dim):
            y = ZERO
            for p in range(n_pos):
                y += load1(v + p * row + size * i) * load_f32(scores + 4 * p)
            store_f32(out + 4 * i, y * inverse)

    @njit
    def attend(q, k, v, n_pos, head_dim, scale, scores, out):
        top = scaled_scores(q, k, n_pos, head_dim, scale, scores)
        for p in range(n_pos, (n_pos + 15) // 16 * 16):
            store_f32(scores + 4 * p, _LOW)
        total = zero_w()
        for p in range(0, n_pos, 16):
            e = exp_w(sub_w(load_w(scores + 4 * p), splat_w(top)))
            store_w(scores + 4 * p, e)
            total = add_w(total, e)
        # exp_w clamps at -87, so the padding adds at most 15 * e^-87: nothing in f32, since the largest term is 1
        weighted_values(v, n_pos, head_dim, scores, ONE / hsum_w(total), out)

    return attend


_attend_f16, _attend_f32 = _attend_of(load_wh, load_f16, 2), _attend_of(load_w, load_f32, 4)


@njit
def attend(kv_type, q, k, v, n_pos, head_dim, scale, scores, out):
    """out = softmax(scale * q k^T) v over n_pos cached positions of one head.

    q, out: f32[head_dim]; k, v: rows of the cache; scores: scratch of n_pos f32 rounded up to 16.
    """
    if kv_type == F16:
        _attend_f16(q, k, v, n_pos, head_dim, scale, scores, out)
    else:
        _attend_f32(q, k, v, n_pos, head_dim, scale, scores, out)


# ------------------------------------------------------------------ many tokens: the same sums as matrix products

QUERIES = 16  # tokens that share one packing of the cache


def attention_bytes(n_ctx: int) -> int:
    """Scratch of attend_block besides the panel: scores of QUERIES tokens against every position."""
    return 4 * QUERIES * (n_ctx + FLOAT_ROWS)


@njit
def _block_scores(kv_type, q, ld_q, n_tok, k, row, n_pos, head_dim, scale, scores, ld_scores, tile, panel):
    """scores[t][p] = scale * (q[t] . k[p]) for all p < n_pos."""
    for p in range(0, n_pos, FLOAT_ROWS):
        rows = min(FLOAT_ROWS, n_pos - p)
        pack_floats(kv_type, k + p * row, row, rows - 1, 0, head_dim, panel)
        for t in range(0, n_tok, TILE_TOKENS):
            tokens = min(TILE_TOKENS, n_tok - t)
            float_tile(panel, head_dim, q + t * ld_q, ld_q, tokens - 1, tile)
            for i in range(tokens):
                at, dst = tile + 4 * i * FLOAT_ROWS, scores + (t + i) * ld_scores + 4 * p
                for j in range(0, 4 * FLOAT_ROWS, 64):
                    store_w(dst + j, mul_w(load_w(at + j), splat_w(scale)))


@njit
def _softmax(scores, first, end, n_pos):
    """In place on scores[first:end], and 0 elsewhere below n_pos (a multiple of 16)."""
    for p in range(first):
        store_f32(scores + 4 * p, ZERO)
    top = _LOW
    for p in range(first, end):
        top = max(top, load_f32(scores + 4 * p))
    total = zero_w()
    p = first
    while p + 16 <= end:
        e = exp_w(sub_w(load_w(scores + 4 * p), splat_w(top)))
        store_w(scores + 4 * p, e)
        total = add_w(total, e)
        p += 16
    y = hsum_w(total)
    while p < end:
        e1 = np.float32(math.exp(load_f32(scores + 4 * p) - top))
        store_f32(scores + 4 * p, e1)
        y += e1
        p += 1
    for p in range(end, n_pos):
        store_f32(scores + 4 * p, ZERO)
    inverse = splat_w(ONE / y)
    for p in range(0, 4 * n_pos, 64):
        store_w(scores + p, mul_w(load_w(scores + p), inverse))


@njit
def _block_values(kv_type, v, row, n_pos, head_dim, scores, ld_scores, n_tok, out, ld_out, tile, panel):
    """out[t] = sum over p of scores[t][p] * v[p], DEPTH positions at a time."""
    for c in range(0, head_dim, FLOAT_ROWS):
        width = min(FLOAT_ROWS, head_dim - c)
        for p in range(0, n_pos, DEPTH):
            end = min(p + DEPTH, n_pos)
            pack_columns(kv_type, v, row, p, end, 0, c, head_dim, panel)
            for t in range(0, n_tok, TILE_TOKENS):
                tokens = min(TILE_TOKENS, n_tok - t)
                float_tile(panel, end - p, scores + t * ld_scores + 4 * p, ld_scores, tokens - 1, tile)
                for i in range(tokens):
                    for j in range(width):
                        at = out + (t + i) * ld_out + 4 * (c + j)
                        y = load_f32(tile + 4 * (i * FLOAT_ROWS + j))
                        store_f32(at, y if p == 0 else load_f32(at) + y)


@njit
def attend_block(kv_type, q, ld_q, n_tok, k, v, pos, window, head_dim, scale, out, ld_out, scratch, scores):
    """attend() for n_tok <= QUERIES tokens at positions pos.. of one head; q, out: f32 rows ld_* bytes apart.

    k, v: the head's whole cache. window > 0: a token sees itself and the window - 1 before it.
    scratch: blocks.panel_bytes(head_dim); scores: attention_bytes(n_ctx).
    """
    base = max(0, pos + 1 - window) if window else 0  # the first position any of the tokens sees
    n_pos = pos + n_tok - base
    row = head_dim * (2 if kv_type == F16 else 4)
    ld_scores = 4 * ((n_pos + FLOAT_ROWS - 1) // FLOAT_ROWS * FLOAT_ROWS)
    panel = scratch + TILE_BYTES
    k, v = k + base * row, v + base * row
    _block_scores(kv_type, q, ld_q, n_tok, k, row, n_pos, head_dim, scale, scores, ld_scores, scratch, panel)
    for t in range(n_tok):
        end = pos + t + 1 - base
        first = max(0, end - window) if window else 0
        _softmax(scores + t * ld_scores, first, end, ld_scores // 4)
    _block_values(kv_type, v, row, n_pos, head_dim, scores, ld_scores, n_tok, out, ld_out, scratch, panel)
