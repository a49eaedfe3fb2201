"""Attention of one query head against the KV cache, and writing the cache.

In: addresses. The cache of a layer is [n_head_kv][n_ctx][head_dim] for K and for V, F16 or F32. Out: f32[head_dim].
Next: walk.py.
"""

import numpy as np
from numba import njit

from hotcold.runtime.kernels.formats import F16
from hotcold.runtime.kernels.rows import ONE
from hotcold.runtime.kernels.simd import (
    add_w,
    fma,
    fma_w,
    hsum,
    hsum_w,
    load_dup,
    load_f32,
    load_v,
    load_vh,
    load_w,
    load_wh,
    mul_w,
    splat,
    splat_w,
    store_f16,
    store_f32,
    store_v,
    store_w,
    sub_w,
    vmul,
    vzero,
    zero_w,
)
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


@njit
def _scores(kv_type, q, k, n_pos, head_dim, scale, scores):
    """scores[p] = scale * (q . k[p]); returns the largest."""
    top = _LOW
    row = head_dim * (2 if kv_type == F16 else 4)
    for p in range(n_pos):
        a = k + p * row
        s = zero_w()
        for i in range(0, head_dim - 15, 16):
            s = fma_w(load_wh(a + 2 * i) if kv_type == F16 else load_w(a + 4 * i), load_w(q + 4 * i), s)
        y = hsum_w(s)
        if head_dim % 16:
            i = head_dim // 16 * 16
            y += hsum(fma(load_vh(a + 2 * i) if kv_type == F16 else load_v(a + 4 * i), load_v(q + 4 * i), vzero()))
        y *= scale
        store_f32(scores + 4 * p, y)
        top = max(top, y)
    return top


@njit
def attend(kv_type, q, k, v, n_pos, head_dim, scale, scores, out):
    """out = softmax(scale * q k^T) v over n_pos cached positions; head_dim a multiple of 8.

    scores: scratch of n_pos f32 rounded up to 16.
    """
    top = _scores(kv_type, q, k, n_pos, head_dim, scale, scores)
    for p in range(n_pos, (n_pos + 15) // 16 * 16):
        store_f32(scores + 4 * p, _LOW)
    total = zero_w()
    for p in range(0, n_pos, 16):
        e = exp_w(sub_w(load_w(scores + 4 * p), splat_w(top)))
        store_w(scores + 4 * p, e)
        total = add_w(total, e)
    # exp_w clamps at -87, so the padding adds at most 15 * e^-87: nothing in f32, since the largest term is 1
    inv = ONE / hsum_w(total)
    row = head_dim * (2 if kv_type == F16 else 4)
    for i in range(0, head_dim - 15, 16):
        s = zero_w()
        for p in range(n_pos):
            a = v + p * row
            s = fma_w(load_wh(a + 2 * i) if kv_type == F16 else load_w(a + 4 * i),
                      splat_w(load_f32(scores + 4 * p)), s)
        store_w(out + 4 * i, mul_w(s, splat_w(inv)))
    if head_dim % 16:
        i = head_dim // 16 * 16
        t = vzero()
        for p in range(n_pos):
            a = v + p * row
            t = fma(load_vh(a + 2 * i) if kv_type == F16 else load_v(a + 4 * i), load_dup(scores + 4 * p), t)
        store_v(out + 4 * i, vmul(t, splat(inv)))
