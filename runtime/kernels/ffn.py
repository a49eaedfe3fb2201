"""The sparse FFN of a few tokens as one operator: each thread takes its own neurons from key row to accumulator.

In: one record of the program, activations of the tokens. Out: this thread's share of the FFN's result, how many key
rows it read and how many neurons it computed. Next: walk.py.

Neurons are dealt to threads by id, in chunks of CHUNK, round-robin: sorted neurons would otherwise put all the work
on thread 0. Each thread adds its neurons in order of id, and the reduction adds the threads in order. A neuron whose
activation is 0 adds 0, so skipping it changes no bit: exact equals dense, at the same number of threads. Every token
has its own list of neurons and its own accumulator, so a token gets the same bits alone and among others; the loops
are nested so that rows which several tokens need come from memory once.

What decides that a neuron is off:
    its key, against the layer's threshold            ReLU family
    |activation * up|, against the threshold          SiLU and GELU with thresholds (o.magnitude): up rows are read too
    a predictor's score (o.predictor), before its key row is read; the key then decides as above
    the GPU (o.predictor), which sends candidates, or neurons that fire with their values; see cold.py
"""

import numpy as np
from numba import njit

from hotcold.runtime.kernels.rows import ZERO, axpy4, dot4, matvec
from hotcold.runtime.kernels.simd import (
    load_f32,
    load_i32,
    load_i64,
    negative16,
    popcount,
    store_f32,
    store_i32,
    store_i64,
    store_w,
    zero_w,
)
from hotcold.runtime.kernels.vector import DRELU, activate

CHUNK = 32
SEGMENT = 512  # neurons whose rows all tokens use before the next ones: so many that they stay in the cache
LIST_PADDING = 16  # entries a list may be read past its end
# o.predictor: scores are rows . hidden values; scores are counts of equal signs; the candidates are listed already;
# the neurons that fire are, with their activated keys.
SCORES, SIGNS, CANDIDATES, VALUES = 1, 2, 3, 4


@njit
def own_chunks(o, t, n_threads):
    """range() arguments: where this thread's chunks of neurons o.first..o.rows-1 begin. The first may begin before."""
    behind = (t - o.first // CHUNK) % n_threads  # chunks from that of o.first to this thread's next one
    return (o.first // CHUNK + behind) * CHUNK, o.rows, n_threads * CHUNK


@njit(inline="always")
def own_products(o, t, n_threads, n_tok, x, xb):
    """keys[j][i] = key row i . x[j] (+ bias) for this thread's neurons, all tokens of a chunk together."""
    gap = (n_threads - 1) * CHUNK
    start, end, step = own_chunks(o, t, n_threads)
    for chunk in range(start, end, step):
        r0, r1 = max(chunk, o.first), min(chunk + CHUNK, o.rows)
        for j in range(n_tok):
            keys = o.aux + j * o.ld_aux
            matvec(o.qt, o.w, o.stride, r0, r1, o.cols, x + j * o.ld_src, xb + j * o.ld_srcb, keys, gap)
            if o.bias:
                for r in range(r0, r1):
                    store_f32(keys + 4 * r, load_f32(keys + 4 * r) + load_f32(o.bias + 4 * r))


@njit(inline="always")
def own_list(o, t, n_threads, keys, ids, values):
    """List this thread's neurons in order of id, with their key; only those whose key is above it if o.sparse."""
    n = 0
    start, end, step = own_chunks(o, t, n_threads)
    for chunk in range(start, end, step):
        r0, r1 = max(chunk, o.first), min(chunk + CHUNK, o.rows)
        if o.sparse and not o.magnitude:
            for r in range(r0, r1):
                key = load_f32(keys + 4 * r)
                store_i32(ids + 4 * n, r)
                store_f32(values + 4 * n, key)
                n += not key <= o.threshold  # NaN counts as firing: a broken weight must show
        else:
            for r in range(r0, r1):
                store_i32(ids + 4 * n, r)
                store_f32(values + 4 * n, load_f32(keys + 4 * r))
                n += 1
    return n


@njit
def pad_list(n, ids, values):
    """The last group of four repeats a valid row with weight 0; one more is prefetched."""
    for i in range(n, n + 8):
        store_i32(ids + 4 * i, load_i32(ids + 4 * n - 4) if n else 0)
        store_f32(values + 4 * i, ZERO)


@njit(inline="always")
def own_scores(o, t, n_threads, n_tok, hidden, hiddenb):
    """Scores (into the buffer of the keys) of this thread's neurons: rows of the predictor . hidden values."""
    gap = (n_threads - 1) * CHUNK
    for r0 in range(t * CHUNK, o.rows, n_threads * CHUNK):
        r1 = min(r0 + CHUNK, o.rows)
        for j in range(n_tok):
            matvec(o.qt4, o.w4, o.stride4, r0, r1, o.cols4, hidden + j * o.ld_hidden, hiddenb + j * o.ld_hiddenb,
                   o.aux + j * o.ld_aux, gap)  # fmt: skip


@njit(inline="always")
def sign_scores(o, t, n_threads, x, signs, scores):
    """Scores of this thread's neurons for one token: 2 * (signs of the key row equal to those of x) - cols."""
    words = o.stride4 // 8
    for j in range(words):
        bits = negative16(x + 256 * j) | negative16(x + 256 * j + 64) << 16
        store_i64(signs + 8 * j, bits | negative16(x + 256 * j + 128) << 32 | negative16(x + 256 * j + 192) << 48)
    if o.cols % 64:  # what lies behind x is not part of it
        last = signs + 8 * words - 8
        store_i64(last, load_i64(last) & ((1 << (o.cols % 64)) - 1))
    for r0 in range(t * CHUNK, o.rows, n_threads * CHUNK):
        for r in range(r0, min(r0 + CHUNK, o.rows)):
            different = 0
            for j in range(words):
                different += popcount(load_i64(o.w4 + r * o.stride4 + 8 * j) ^ load_i64(signs + 8 * j))
            store_f32(scores + 4 * r, np.float32(o.cols - 2 * different))


@njit(inline="always")
def own_candidates(o, t, n_threads, scores, ids):
    """List this thread's neurons whose score is above o.threshold4, in order of id."""
    n = 0
    for r0 in range(t * CHUNK, o.rows, n_threads * CHUNK):
        for r in range(r0, min(r0 + CHUNK, o.rows)):
            store_i32(ids + 4 * n, r)
            n += not load_f32(scores + 4 * r) + load_f32(o.bias4 + 4 * r) <= o.threshold4
    return n


@njit
def four_ids(p):
    """Four neurons of a list, and the next four: what is prefetched meanwhile."""
    i0, i1, i2, i3 = load_i32(p), load_i32(p + 4), load_i32(p + 8), load_i32(p + 12)
    n0, n1, n2, n3 = load_i32(p + 16), load_i32(p + 20), load_i32(p + 24), load_i32(p + 28)
    return (i0, i1, i2, i3), (n0 - i0, n1 - i1, n2 - i2, n3 - i3)


@njit
def four_products(qt, w, s, bias, ids, ahead, n, x, xb):
    """Rows `ids` of a matrix . x, plus their biases."""
    y = dot4(qt, w + ids[0] * s, w + ids[1] * s, w + ids[2] * s, w + ids[3] * s,
             ahead[0] * s, ahead[1] * s, ahead[2] * s, ahead[3] * s, n, x, xb)  # fmt: skip
    if bias:
        return (y[0] + load_f32(bias + 4 * ids[0]), y[1] + load_f32(bias + 4 * ids[1]),
                y[2] + load_f32(bias + 4 * ids[2]), y[3] + load_f32(bias + 4 * ids[3]))  # fmt: skip
    return y


@njit(inline="always")
def listed_keys(o, n, ids, x, xb, values):
    """values[i] = key of the i-th listed neuron."""
    for i in range(0, n, 4):
        four, ahead = four_ids(ids + 4 * i)
        y = four_products(o.qt, o.w, o.stride, o.bias, four, ahead, o.cols, x, xb)
        for j, key in enumerate(y):
            store_f32(values + 4 * (i + j), key)


@njit(inline="always")
def listed_up(o, n, ids, x, xb, values):
    """values[i] *= up row of the i-th listed neuron . x"""
    for i in range(0, n, 4):
        four, ahead = four_ids(ids + 4 * i)
        u = four_products(o.qt2, o.w2, o.stride2, o.bias2, four, ahead, o.cols, x, xb)
        for j, up in enumerate(u):
            at = values + 4 * (i + j)
            store_f32(at, load_f32(at) * up)


@njit
def keep_above(threshold, n, ids, values):
    """Keep the listed neurons whose key is above the threshold."""
    kept = 0
    for i in range(n):
        key = load_f32(values + 4 * i)
        store_i32(ids + 4 * kept, load_i32(ids + 4 * i))
        store_f32(values + 4 * kept, key)
        kept += not key <= threshold
    return kept


@njit
def keep_large(o, n, ids, values):
    """Drop values of a magnitude up to the threshold from the list; they become 0 in it where all are computed."""
    kept = 0
    for i in range(n):
        value = load_f32(values + 4 * i)
        small = abs(value) <= o.threshold
        store_i32(ids + 4 * kept, load_i32(ids + 4 * i))
        store_f32(values + 4 * kept, ZERO if small else value)
        kept += not (small and o.sparse)
    return kept


@njit
def add_rows(qt, w, s, ids, ahead, values, n, acc):
    """acc[0:n] += values * rows `ids` of a matrix."""
    axpy4(qt, w + ids[0] * s, w + ids[1] * s, w + ids[2] * s, w + ids[3] * s,
          ahead[0] * s, ahead[1] * s, ahead[2] * s, ahead[3] * s,
          values[0], values[1], values[2], values[3], n, acc)  # fmt: skip


@njit
def four_values(p):
    return load_f32(p), load_f32(p + 4), load_f32(p + 8), load_f32(p + 12)


@njit(inline="always")
def add_four(o, w2, at, values, x, xb, acc):
    """acc += value (* up row . x) * down row of four listed neurons; w2 = 0: without up rows."""
    four, ahead = four_ids(at)
    c = four_values(values)
    if w2:
        u = four_products(o.qt2, w2, o.stride2, o.bias2, four, ahead, o.cols, x, xb)
        if o.act == DRELU:
            u = max(u[0], ZERO), max(u[1], ZERO), max(u[2], ZERO), max(u[3], ZERO)
        c = c[0] * u[0], c[1] * u[1], c[2] * u[2], c[3] * u[3]
    add_rows(o.qt3, o.w3, o.stride3, four, ahead, c, o.cols, acc)


@njit(inline="always")
def add_neurons(o, w2, n_tok, own, x, xb, acc):
    """acc[j] = sum over the listed neurons of token j; all tokens' neurons of a segment before the next segment."""
    ids, values, lengths = o.aux2 + own, o.dstb + own, o.lengths + own
    done = lengths + 8 * n_tok
    for j in range(n_tok):
        store_i64(done + 8 * j, 0)
        for i in range(0, 4 * o.cols, 64):
            store_w(acc + j * o.ld_dst + i, zero_w())
    step = o.rows if n_tok == 1 else SEGMENT
    for end in range(step, o.rows + step, step):
        for j in range(n_tok):
            i, n = load_i64(done + 8 * j), load_i64(lengths + 8 * j)
            at = ids + j * o.ld_list
            while i < n and load_i32(at + 4 * i) < end:
                add_four(o, w2, at + 4 * i, values + j * o.ld_list + 4 * i, x + j * o.ld_src, xb + j * o.ld_srcb,
                         acc + j * o.ld_dst)  # fmt: skip
                i += 4
            store_i64(done + 8 * j, i)


@njit(inline="always")
def list_neurons(o, t, n_threads, j, own, x, xb):
    """Token j's list of neurons that are computed, with their activated values. Returns (key rows read, length)."""
    keys, ids, values = o.aux + j * o.ld_aux, o.aux2 + own + j * o.ld_list, o.dstb + own + j * o.ld_list
    if o.predictor == VALUES:
        checked, n = 0, load_i64(o.lengths + own + 8 * j)
    elif o.predictor:
        if o.predictor == SIGNS:
            sign_scores(o, t, n_threads, x, o.signs + own, keys)
        if o.predictor == CANDIDATES:
            checked = load_i64(o.lengths + own + 8 * j)
        else:
            checked = own_candidates(o, t, n_threads, keys, ids)
        pad_list(checked, ids, values)
        listed_keys(o, checked, ids, x, xb, values)
        n = checked if o.magnitude or not o.sparse else keep_above(o.threshold, checked, ids, values)
    else:
        n = own_list(o, t, n_threads, keys, ids, values)
        checked = 0
        start, end, step = own_chunks(o, t, n_threads)
        for chunk in range(start, end, step):
            checked += min(chunk + CHUNK, o.rows) - max(chunk, o.first)
    if o.predictor != VALUES:
        activate(o.act, o.threshold, values, values, n)
    if o.magnitude:
        if o.w2:
            pad_list(n, ids, values)
            listed_up(o, n, ids, x, xb, values)
        n = keep_large(o, n, ids, values)
    pad_list(n, ids, values)
    return checked, n


@njit(inline="always")
def sparse_ffn(o, t, n_threads, n_tok, own, acc):
    """Returns (key rows read, neurons computed), sums over the tokens. own: bytes to this thread's private buffers.

    src, srcb: x; aux: keys, shared (each thread writes its own neurons'), w = 0: they are there already; aux2, dstb:
    lists of ids and of values, ld_list bytes from one token's to the next; lengths: 2 words a token.
    acc: this thread's accumulators, ld_dst bytes from one token's to the next.
    first: neurons before it are left out (not with a predictor).
    """
    x, xb = o.src + own, o.srcb + own
    if o.predictor == SCORES:
        own_scores(o, t, n_threads, n_tok, o.hidden + own, o.hiddenb + own)
    elif o.w and not o.predictor:
        own_products(o, t, n_threads, n_tok, x, xb)
    checked, computed = 0, 0
    for j in range(n_tok):
        read, n = list_neurons(o, t, n_threads, j, own, x + j * o.ld_src, xb + j * o.ld_srcb)
        store_i64(o.lengths + own + 8 * j, n)
        checked += read
        computed += n
    add_neurons(o, 0 if o.magnitude else o.w2, n_tok, own, x, xb, acc)
    return checked, computed


@njit(inline="always")
def active_columns(o, c0, c1, offset, x, ids, values, dst):
    """dst[c0:c1] = sum over inputs i of x[i] * row i (+ bias), inputs of 0 left out if o.sparse.

    w: one row per input (o.cols of them), c0 a multiple of 64; offset: bytes from a row's start to its column c0.
    dst is padded to a multiple of 64.
    """
    n = 0
    for i in range(o.cols):
        value = load_f32(x + 4 * i)
        store_i32(ids + 4 * n, i)
        store_f32(values + 4 * n, value)
        n += not (o.sparse and value == ZERO)
    pad_list(n, ids, values)
    for c in range(c0, c1, 16):
        store_w(dst + 4 * c, zero_w())
    for i in range(0, n, 4):
        four, ahead = four_ids(ids + 4 * i)
        add_rows(o.qt, o.w + offset, o.stride, four, ahead, four_values(values + 4 * i), c1 - c0, dst + 4 * c0)
    if o.bias:
        for j in range(c0, c1):
            store_f32(dst + 4 * j, load_f32(dst + 4 * j) + load_f32(o.bias + 4 * j))
    return n
