"""The sparse FFN of one token as one operator: each thread takes its own neurons from key row to accumulator.

In: one record of the program, activations of this token. Out: this thread's share of the FFN's result, and how many
neurons it computed. Next: walk.py.

Neurons are dealt to threads by id, in chunks of CHUNK, round-robin: sorted neurons would otherwise put all the work
on thread 0. Each thread adds its neurons in order of id, and the reduction adds the threads in order. A neuron whose
activation is 0 adds 0, so skipping it changes no bit: exact equals dense, at the same number of threads.
"""

from numba import njit

from hotcold.runtime.kernels.rows import ZERO, axpy4, dot4, matvec
from hotcold.runtime.kernels.simd import load_f32, load_i32, store_f32, store_i32, store_w, zero_w
from hotcold.runtime.kernels.vector import DRELU, activate

CHUNK = 32
LIST_PADDING = 16  # entries a list may be read past its end


@njit
def own_keys(o, t, n_threads, x, xb, keys):
    """keys[i] = key row i . x (+ bias) for this thread's neurons."""
    for r0 in range(t * CHUNK, o.rows, n_threads * CHUNK):
        r1 = min(r0 + CHUNK, o.rows)
        matvec(o.qt, o.w, o.stride, r0, r1, o.cols, x, xb, keys)
        if o.bias:
            for r in range(r0, r1):
                store_f32(keys + 4 * r, load_f32(keys + 4 * r) + load_f32(o.bias + 4 * r))


@njit
def own_list(o, t, n_threads, keys, ids, values):
    """List this thread's neurons in order of id, with their activation; only those that fire if o.sparse."""
    n = 0
    for r0 in range(t * CHUNK, o.rows, n_threads * CHUNK):
        r1 = min(r0 + CHUNK, o.rows)
        if o.sparse:
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
    activate(o.act, o.threshold, values, values, n)
    for i in range(n, n + 8):  # the last group of four repeats a valid row with weight 0; one more is prefetched
        store_i32(ids + 4 * i, load_i32(ids + 4 * n - 4) if n else 0)
        store_f32(values + 4 * i, ZERO)
    return n


@njit
def add_neurons(o, n, ids, values, x, xb, acc):
    """acc[0:cols] = sum over the listed neurons of activation (* up row . x) * down row."""
    for i in range(0, 4 * o.cols, 64):
        store_w(acc + i, zero_w())
    for i in range(0, n, 4):
        p, c = ids + 4 * i, values + 4 * i
        i0, i1, i2, i3 = load_i32(p), load_i32(p + 4), load_i32(p + 8), load_i32(p + 12)
        c0, c1, c2, c3 = load_f32(c), load_f32(c + 4), load_f32(c + 8), load_f32(c + 12)
        n0, n1, n2, n3 = load_i32(p + 16), load_i32(p + 20), load_i32(p + 24), load_i32(p + 28)  # prefetched meanwhile
        n0, n1, n2, n3 = n0 - i0, n1 - i1, n2 - i2, n3 - i3
        w, s = o.w2, o.stride2
        if w:
            u = dot4(o.qt2, w + i0 * s, w + i1 * s, w + i2 * s, w + i3 * s,
                     n0 * s, n1 * s, n2 * s, n3 * s, o.cols, x, xb)  # fmt: skip
            b = o.bias2
            if b:
                u = (u[0] + load_f32(b + 4 * i0), u[1] + load_f32(b + 4 * i1),
                     u[2] + load_f32(b + 4 * i2), u[3] + load_f32(b + 4 * i3))  # fmt: skip
            if o.act == DRELU:
                u = max(u[0], ZERO), max(u[1], ZERO), max(u[2], ZERO), max(u[3], ZERO)
            c0 *= u[0]
            c1 *= u[1]
            c2 *= u[2]
            c3 *= u[3]
        w, s = o.w3, o.stride3
        axpy4(o.qt3, w + i0 * s, w + i1 * s, w + i2 * s, w + i3 * s,
              n0 * s, n1 * s, n2 * s, n3 * s, c0, c1, c2, c3, o.cols, acc)  # fmt: skip


@njit
def sparse_ffn(o, t, n_threads, x, xb, keys, ids, values, acc):
    """Returns the number of neurons computed. keys is shared (each thread writes its own), the rest is private."""
    own_keys(o, t, n_threads, x, xb, keys)
    n = own_list(o, t, n_threads, keys, ids, values)
    add_neurons(o, n, ids, values, x, xb, acc)
    return n
