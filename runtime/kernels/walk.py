"""The one function each worker thread runs: wait for work, walk the operator program, meet the others at barriers.

In: the program (array of OP records, made by program.py), the control words, this thread's number. Out: buffers filled
in place. Next: engine.py, which owns threads and buffers.

Work is split inside an operator by rows, tokens, heads or neurons; a record with sync = 1 is followed by a barrier.
Small vector work of the few tokens of the token program is repeated by every thread into private memory: 1 us a token,
cheaper than sharing it.
"""

import numpy as np
from numba import njit

from hotcold.runtime.kernels.attention import attend_few, store_cache
from hotcold.runtime.kernels.attention_block import attend_block
from hotcold.runtime.kernels.blocks import few_tokens, matmul, matmul_columns
from hotcold.runtime.kernels.cold import LATE, SKIPPED, WORKED, WRONG, answer, await_list, take_list
from hotcold.runtime.kernels.ffn import active_columns, sparse_ffn
from hotcold.runtime.kernels.formats import F32, PACK_TOKENS
from hotcold.runtime.kernels.rows import NONE, ONE, ZERO, axpy4, copy_row, part_unit, row_part
from hotcold.runtime.kernels.simd import (
    above16,
    flush_denormals,
    load_f32,
    load_i32,
    load_i64,
    pause,
    read_cycles,
    restore_denormals,
    store_f32,
    store_i32,
    store_i64,
)
from hotcold.runtime.kernels.sync import atomic_load, atomic_store, atomic_swap, barrier, now_ns
from hotcold.runtime.kernels.tiles import FLOAT_ROWS, LANES
from hotcold.runtime.kernels.vector import (
    activate,
    clamp,
    drop_small,
    gate,
    gather,
    layer_norm,
    quantize,
    rms_norm,
    rotate,
)

# One operator. Addresses are int64; `ld_*` are bytes from one token to the next. private = 1: the activations it reads
# (MATMUL, FFN) or writes (NORM, QUANT) are this thread's own copy, in its arena. What else a field means to an operator
# is said where the operator is defined, here and in program.py.
OP = np.dtype(
    [
        (name, np.int64)
        for name in (
            "op", "sync", "layer", "head_only",
            "rows", "cols", "unit",
            "qt", "w", "stride", "qt2", "w2", "stride2", "qt3", "w3", "stride3", "bias", "bias2",
            "src", "ld_src", "srcb", "ld_srcb", "dst", "ld_dst", "dstb", "ld_dstb", "aux", "aux2",
            "private", "window", "flag", "act", "sparse", "add", "quant", "relu", "magnitude", "few",
            "ld_aux", "ld_list", "lengths", "ids",
            "predictor", "qt4", "w4", "stride4", "cols4", "bias4", "hidden", "ld_hidden", "hiddenb", "ld_hiddenb",
            "signs",
            "first", "header", "mail_ids", "mail_values", "mail_h", "mail_out", "done", "desk",
        )
    ]  # fmt: skip
    + [(name, np.float32) for name in ("scale", "threshold", "eps", "threshold4")],
    align=True,
)

EMBED, NORM, QUANT, MATMUL, ROPE, ATTEND, FFN, REDUCE, ACTIVATE, DOWN, HIDDEN, COLUMNS, MARK, LIST, COLD = range(15)
# A block computes all neurons where more than this share fires for one token or another: moving the values of those
# beside each other costs more than the rows of the few that do not fire.
MOST = 15 / 16
CHECKED, COMPUTED = 0, 1  # words of A_COUNTS per layer and thread: key rows read, neurons computed

# Control block: int64 words. The first ones, where threads spin, have a cache line each.
GO, ARRIVED, RELEASED, ABORT, FINISHED = (8 * i for i in range(5))  # GO and FINISHED count runs
TROUBLE = FINISHED + 1  # not 0: why a cold operator made the team stop, LATE or WRONG << 32 | layer
# Arguments of a run, written before GO is raised.
(
    A_PROGRAM, A_TOKENS, A_N_TOK, A_POS, A_FIRST_OUT, A_LOGITS, A_COUNTS, A_ARENA, A_ARENA_SIZE, A_COS, A_SIN,
    A_ROPE_ROW, A_FIRST_OP, A_END_OP, A_CYCLES, A_SEQ, A_PATIENCE, A_STAMPS,
) = range(40, 58)  # fmt: skip
LISTENS, RECEIVED, ANSWERED = 0, 1, 2  # words of A_STAMPS per layer and thread, now_ns(): of a cold operator
OWN = 64  # one line per thread from here: parked flag, last run seen, barriers passed
OWN_PARKED, OWN_SEEN, OWN_PHASE = 0, 1, 2

EXIT = -1  # number of tokens that tells the workers to leave
IDLE_SPINS = 400  # pauses a worker waits for the next run before it parks in Python: about 20 us


def control_words(n_threads: int) -> int:
    """Length of the control block."""
    return OWN + 8 * n_threads


@njit
def share(total, unit, t, n_threads):
    """This thread's range of `total` items, in whole units."""
    units = (total + unit - 1) // unit
    return min(total, units * t // n_threads * unit), min(total, units * (t + 1) // n_threads * unit)


@njit
def _tokens(o, t, n_threads, first, n_tok):
    """Token range of a vector operator: all of them into private memory, or this thread's part of a shared buffer."""
    if o.private:
        return first, n_tok
    r0, r1 = share(n_tok - first, 1, t, n_threads)
    return first + r0, first + r1


@njit
def _embed(o, t, n_threads, n_tok, tokens, pos):
    r0, r1 = share(n_tok, 1, t, n_threads)
    for i in range(r0, r1):
        dst = o.dst + i * o.ld_dst
        copy_row(o.qt, o.w + load_i64(tokens + 8 * i) * o.stride, o.cols, o.scale, dst)
        if o.w2:  # learned positions
            row = o.w2 + (pos + i) * o.stride2
            axpy4(o.qt2, row, row, row, row, NONE, NONE, NONE, NONE, ONE, ZERO, ZERO, ZERO, o.cols, dst)


@njit
def _norm(o, src, dst, dstb):
    if o.flag:
        layer_norm(src, o.w, o.bias, dst, o.cols, o.eps)
    else:
        rms_norm(src, o.w, dst, o.cols, o.eps)
    if o.relu:
        clamp(dst, dst, o.cols)
    if o.quant:
        quantize(dst, dstb, o.cols)


@njit
def _head_norm(x, w, head_dim, eps):
    if w:
        rms_norm(x, w, x, head_dim, eps)


@njit
def _rope(o, t, n_threads, n_tok, pos, cos, sin, rope_row):
    """rows = n_head, cols = n_head_kv, unit = head_dim; src/dst/dstb = q, k, v; w, w2 = q and k norm weights;
    w3/aux = K/V cache; aux2 = n_ctx; stride3 = bytes of a cache row; qt = cache type; stride = rotated dims."""
    hd = o.unit
    heads = o.rows + o.cols
    i0, i1 = share(n_tok * heads, 1, t, n_threads)
    for item in range(i0, i1):
        tok, head = item // heads, item % heads
        c, s = cos + (pos + tok) * rope_row, sin + (pos + tok) * rope_row
        if head < o.rows:
            q = o.src + tok * o.ld_src + 4 * head * hd
            _head_norm(q, o.w, hd, o.eps)
            rotate(q, o.stride, o.flag, c, s)
        else:
            kv = head - o.rows
            k = o.dst + tok * o.ld_dst + 4 * kv * hd
            v = o.dstb + tok * o.ld_dstb + 4 * kv * hd
            _head_norm(k, o.w2, hd, o.eps)
            rotate(k, o.stride, o.flag, c, s)
            row = (kv * o.aux2 + pos + tok) * o.stride3
            store_cache(o.qt, o.w3 + row, k, hd)
            store_cache(o.qt, o.aux + row, v, hd)


@njit(inline="always")
def _attend(o, t, n_threads, n_tok, pos, scratch, scores):
    """Same fields as _rope; srcb = scores, private; window > 0: a token sees itself and the window - 1 before it.
    w4, stride: what chunks of positions give, and bytes of one such part; signs: a counter per KV head."""
    if not o.few and n_tok >= PACK_TOKENS:
        attend_block(o, t, n_threads, n_tok, pos, scratch, scores)
    else:
        attend_few(o, t, n_threads, n_tok, pos, scores)


@njit(inline="always")
def _matmul(o, t, n_threads, first, n_tok, own, scratch, logits):
    r0, r1 = share(o.rows, FLOAT_ROWS if n_tok - first > 1 else 4, t, n_threads)
    src, srcb = (o.src + own, o.srcb + own) if o.private else (o.src, o.srcb)
    dst = o.dst if o.dst else logits - first * o.ld_dst
    n, (ids, listed) = n_tok - first, _listed(o, own, o.rows)
    if ids:
        r0, r1 = share(listed, LANES, t, n_threads)
    src, srcb, dst = src + first * o.ld_src, srcb + first * o.ld_srcb, dst + first * o.ld_dst
    if o.few or n < PACK_TOKENS and not o.ids:
        few_tokens(o, r0, r1, n, src, o.ld_src, srcb, o.ld_srcb, dst, o.ld_dst)
    else:
        matmul(o, r0, r1, n, src, o.ld_src, srcb, o.ld_srcb, dst, o.ld_dst, scratch, ids)


@njit
def _reduce(o, t, n_threads, n_tok, arena_size):
    """dst += scale * (sum over threads of their accumulators + bias), threads in order."""
    r0, r1 = share(o.cols, 16, t, n_threads)
    for i in range(n_tok):
        src, dst = o.src + i * o.ld_src, o.dst + i * o.ld_dst
        for j in range(r0, r1):
            s = load_f32(src + 4 * j)
            for k in range(1, n_threads):
                s += load_f32(src + k * arena_size + 4 * j)
            if o.bias:
                s += load_f32(o.bias + 4 * j)
            store_f32(dst + 4 * j, load_f32(dst + 4 * j) + s * o.scale)


@njit
def _activate(o, t, n_threads, n_tok, own):
    """src (keys) and srcb (up, 0 if not gated) -> src, tokens split over threads. With a list the values of its neurons
    come to stand one beside the other, as those of srcb do already."""
    r0, r1 = share(n_tok, 1, t, n_threads)
    ids, cols = _listed(o, own, o.cols)
    for i in range(r0, r1):
        p = o.src + i * o.ld_src
        if ids:
            gather(p, ids, cols)
        activate(o.act, o.threshold, p, p, cols)
        if o.srcb:
            gate(o.act, p, o.srcb + i * o.ld_srcb, p, cols)
        if o.magnitude:
            drop_small(o.threshold, p, cols)


@njit
def _mark(o, t, n_threads, n_tok):
    """aux: bits of the neurons that fire for one of the tokens at least; src: keys."""
    r0, r1 = share((o.cols + 15) // 16, 4, t, n_threads)
    for group in range(r0, r1):
        bits = 0
        for i in range(n_tok):
            bits |= above16(o.src + i * o.ld_src + 64 * group, o.threshold)
        store_i32(o.aux + 4 * group, bits)


@njit
def _list(o, own):
    """The marked neurons, into a list of this thread's own, in order. A list of nearly all counts as one of all."""
    n = 0
    for r in range(o.cols):
        store_i32(o.ids + own + 4 * n, r)
        n += load_i32(o.aux + 4 * (r // 16)) >> (r % 16) & 1
    store_i64(o.lengths + own, n if n <= MOST * o.cols else o.cols)


@njit(inline="always")
def _listed(o, own, rows):
    """(list of the neurons of a block, its length): (NONE, rows) where there is none, or all are to be computed."""
    n = load_i64(o.lengths + own) if o.ids else rows
    return (o.ids + own if n < rows else NONE), n


@njit(inline="always")
def _columns(o, t, n_threads, n_tok, own):
    """Product with a matrix that has one row per input; aux, aux2: private lists."""
    c0, c1 = share(o.rows, part_unit(o.qt), t, n_threads)
    offset = row_part(o.qt, c0)
    for i in range(n_tok):
        active_columns(o, c0, c1, offset, o.src + own + i * o.ld_src, o.aux + own, o.aux2 + own, o.dst + i * o.ld_dst)


@njit
def _hidden(o, n_tok, own):
    """A predictor's hidden values: every thread's own copy."""
    for i in range(n_tok):
        src, dst = o.src + i * o.ld_src, o.dst + own + i * o.ld_dst
        if o.relu:
            clamp(src, dst, o.cols)
        else:
            copy_row(F32, src, o.cols, ONE, dst)
        if o.quant:
            quantize(dst, o.dstb + own + i * o.ld_dstb, o.cols)


@njit(inline="always")
def _step(o, t, n_threads, n_tok, pos, first_out, ctl, slot):
    """One operator of the program for this thread. slot: bytes to the accumulator of a cold one, else 0."""
    own = t * load_i64(ctl + 8 * A_ARENA_SIZE)  # from a private buffer of thread 0 to this thread's
    scratch = load_i64(ctl + 8 * A_ARENA) + own
    first = first_out if o.head_only else 0
    if o.op == MATMUL:
        if n_tok > first:
            _matmul(o, t, n_threads, first, n_tok, own, scratch, load_i64(ctl + 8 * A_LOGITS))
    elif o.op == FFN or o.op == COLD:
        checked, n = sparse_ffn(o, t, n_threads, n_tok if o.op == FFN else 1, own, o.dst + own + slot)
        at = load_i64(ctl + 8 * A_COUNTS) + 16 * (o.layer * n_threads + t)
        store_i64(at + 8 * CHECKED, load_i64(at + 8 * CHECKED) + checked)
        store_i64(at + 8 * COMPUTED, load_i64(at + 8 * COMPUTED) + n)
    elif o.op == NORM or o.op == QUANT:
        r0, r1 = _tokens(o, t, n_threads, first, n_tok)
        for i in range(r0, r1):
            src = o.src + i * o.ld_src
            dst = o.dst + i * o.ld_dst + (own if o.private else 0)
            dstb = o.dstb + i * o.ld_dstb + (own if o.private else 0)
            if o.op == NORM:
                _norm(o, src, dst, dstb)
            else:
                quantize(src, dstb, o.cols)
    elif o.op == ROPE:
        _rope(o, t, n_threads, n_tok, pos, load_i64(ctl + 8 * A_COS), load_i64(ctl + 8 * A_SIN),
              load_i64(ctl + 8 * A_ROPE_ROW))
    elif o.op == ATTEND:
        _attend(o, t, n_threads, n_tok, pos, scratch, o.srcb + own)
    elif o.op == REDUCE:
        _reduce(o, t, n_threads, n_tok, load_i64(ctl + 8 * A_ARENA_SIZE))
    elif o.op == ACTIVATE:
        _activate(o, t, n_threads, n_tok, own)
    elif o.op == DOWN:
        c0, c1 = share(o.cols, FLOAT_ROWS, t, n_threads)
        ids, n = _listed(o, own, o.rows)
        matmul_columns(o, c0, c1, n_tok, o.src, o.ld_src, o.dst, o.ld_dst, scratch, ids, n)
    elif o.op == MARK:
        _mark(o, t, n_threads, n_tok)
    elif o.op == LIST:
        _list(o, own)
    elif o.op == COLUMNS:
        _columns(o, t, n_threads, n_tok, own)
    elif o.op == HIDDEN:
        _hidden(o, n_tok, own)
    elif o.op == EMBED:
        _embed(o, t, n_threads, n_tok, load_i64(ctl + 8 * A_TOKENS), pos)


@njit(inline="always")
def _stamp(o, t, n_threads, ctl, which):
    """Note when this thread has got so far in a cold operator."""
    stamps = load_i64(ctl + 8 * A_STAMPS)
    if stamps:
        store_i64(stamps + 24 * (o.layer * n_threads + t) + 8 * which, now_ns())


@njit(inline="always")
def _receive(o, t, n_threads, ctl):
    """Wait for the list of a cold operator. Returns its length, or below 0: the team stops at its next barrier.

    Threads may come to that barrier at different places of the program. All of them stop there, because ABORT was
    raised before the first that leaves out something has arrived.
    """
    _stamp(o, t, n_threads, ctl, LISTENS)
    seq = load_i64(ctl + 8 * A_SEQ) + o.layer
    count = await_list(o.header, o.desk, seq, ctl + 8 * ABORT, ctl + 8 * RELEASED, load_i64(ctl + 8 * A_PATIENCE))
    _stamp(o, t, n_threads, ctl, RECEIVED)
    if t == 0 and count >= 0:
        at = o.desk + (WORKED if count else SKIPPED)
        store_i64(at, load_i64(at) + 1)
    if count > 0:
        count = take_list(o, count, t, n_threads, t * load_i64(ctl + 8 * A_ARENA_SIZE))
    if count == LATE or count == WRONG:
        atomic_store(ctl + 8 * TROUBLE, count << 32 | o.layer)
        atomic_store(ctl + 8 * ABORT, 1)
    return count


@njit
def _slot(o, t, ctl):
    """Bytes to the accumulator that a cold operator uses: one of two in turn, by the number of barriers passed.

    No barrier follows the answer. A thread that is ahead may start on the next list while others still add up the
    accumulators of this one; it comes back to the same accumulator only behind the next operator's barrier.
    """
    return load_i64(ctl + 8 * (OWN + 8 * t + OWN_PHASE)) % 2 * o.ld_dst


@njit(inline="always")
def _answer(o, t, n_threads, ctl, slot):
    """All threads have computed their part of a cold operator: add the parts, and tell the GPU."""
    r0, r1 = share(o.cols, 16, t, n_threads)
    seq = load_i64(ctl + 8 * A_SEQ) + o.layer
    answer(o, r0, r1, n_threads, o.dst + slot, load_i64(ctl + 8 * A_ARENA_SIZE), seq)
    _stamp(o, t, n_threads, ctl, ANSWERED)


@njit
def _meet(t, n_threads, ctl):
    """Barrier. True: the team stops here."""
    phase_word = ctl + 8 * (OWN + 8 * t + OWN_PHASE)
    phase = load_i64(phase_word) + 1
    store_i64(phase_word, phase)
    return barrier(ctl + 8 * ARRIVED, n_threads, phase, ctl + 8 * ABORT)


@njit(inline="always")
def _run(program, t, n_threads, ctl):
    """Operators A_FIRST_OP..A_END_OP-1 for the tokens of this run; ABORT ends it early, for the whole team."""
    n_tok = load_i64(ctl + 8 * A_N_TOK)
    pos = load_i64(ctl + 8 * A_POS)
    first_out = load_i64(ctl + 8 * A_FIRST_OUT)
    end = load_i64(ctl + 8 * A_END_OP)
    cycles = load_i64(ctl + 8 * A_CYCLES)
    for i in range(load_i64(ctl + 8 * A_FIRST_OP), end):
        o = program[i]
        listed, slot = 1, 0
        if o.op == COLD:
            listed, slot = _receive(o, t, n_threads, ctl), _slot(o, t, ctl)
        began = read_cycles() if cycles else 0
        if listed > 0:
            _step(o, t, n_threads, n_tok, pos, first_out, ctl, slot)
        if cycles:
            at = cycles + 8 * (i * n_threads + t)
            store_i64(at, load_i64(at) + read_cycles() - began)
        if o.op == COLD and listed != 0:
            if _meet(t, n_threads, ctl):
                return
            _answer(o, t, n_threads, ctl, slot)
        if o.sync and i < end - 1 and _meet(t, n_threads, ctl):
            return
    _meet(t, n_threads, ctl)  # ends the run, of no operators as well: none may start the next one early


@njit(inline="always")
def _wait(ctl, own, seen):
    """Spin a little for the next run. False: this worker is parked, and will be woken through its semaphore."""
    for _ in range(IDLE_SPINS):
        if atomic_load(ctl + 8 * GO) > seen:
            return True
        pause()
    atomic_swap(own + 8 * OWN_PARKED, 1)
    # A run raised meanwhile either finds the flag (and wakes the semaphore) or is seen here.
    return atomic_load(ctl + 8 * GO) > seen and atomic_swap(own + 8 * OWN_PARKED, 0) == 1


@njit(nogil=True)
def serve(token_program, block_program, t, n_threads, ctl):
    """Body of worker t. Returns 1: a run is finished (only thread 0 says so), 0: parked, -1: leave.

    ctl: address of the control block. The programs are arrays of OP.
    """
    own = ctl + 8 * (OWN + 8 * t)
    while True:
        seen = load_i64(own + 8 * OWN_SEEN)
        if not _wait(ctl, own, seen):
            return 0
        store_i64(own + 8 * OWN_SEEN, seen + 1)
        if load_i64(ctl + 8 * A_N_TOK) == EXIT:
            return -1
        state = flush_denormals()  # arithmetic with them is a hundred times slower
        _run(token_program if load_i64(ctl + 8 * A_PROGRAM) == 0 else block_program, t, n_threads, ctl)
        restore_denormals(state)
        if t == 0:
            atomic_store(ctl + 8 * FINISHED, seen + 1)
            return 1


@njit
def raise_go(ctl):
    """Start a run: everything written before is seen by the workers that see this."""
    atomic_store(ctl + 8 * GO, load_i64(ctl + 8 * GO) + 1)


@njit
def claim_parked(ctl, t):
    """True if worker t is parked; it is then the caller's to wake."""
    return atomic_swap(ctl + 8 * (OWN + 8 * t + OWN_PARKED), 0) == 1
