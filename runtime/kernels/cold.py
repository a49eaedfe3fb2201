"""The CPU's part of a layer that the GPU computes: the list of neurons it waits for, and the answer it gives.

In: a cold operator's record, the header and the lists that the GPU writes (mailbox.py says what lies where). Out: the
sum of the listed neurons, where the GPU reads it, and the word that says so. Next: walk.py, which runs ffn.py between.

A header is one 64-bit word, sequence number << 32 | length of the list, written after the list. The GPU goes on without
an answer where the length is 0, and may have gone further than the next token's header when a thread looks here: a
number above the awaited one means that there was nothing to do. Waiting is bounded and ends early when the team stops.
"""

from numba import njit

from hotcold.runtime.kernels.ffn import CHUNK, VALUES
from hotcold.runtime.kernels.simd import (
    add_w,
    load_f32,
    load_i32,
    load_w,
    pause,
    store_f32,
    store_i32,
    store_i64,
    store_w,
)
from hotcold.runtime.kernels.sync import (
    BROKEN,
    SPINS,
    atomic_add,
    atomic_claim,
    atomic_load,
    atomic_store,
    now_ns,
    sleep_on,
)
from hotcold.runtime.kernels.vector import quantize

# A layer's line in the CPU's own memory (o.desk), as byte offsets: what header the team has seen, how many threads have
# written their part of the answer, and how often the list was empty, and not.
SEEN, WRITTEN, SKIPPED, WORKED = 0, 8, 16, 24

# What await_list() returns in the place of a length, take_list() WRONG.
STOPPED, LATE, WRONG = -1, -2, -3

_TURNS = 20  # the GPU's own part of a layer takes longer than the team's way to a barrier: so many times its spins
_NAP = 50_000  # ns between two looks after that


@njit(inline="never")
def await_list(header, desk, seq, abort, release, patience):
    """Wait for the header with number `seq`. Returns the length of the list; STOPPED; LATE after `patience` ns.

    abort: the word that asks the team to stop; release: the line of its barrier (sync.py).

    All threads of the team must get the same length, because those that have work meet at a barrier. They do: the first
    that sees the header puts what it means for this step into the team's own word, once, and that is what all return,
    even if the GPU has meanwhile given up and written the next header. The word is only ever of this step or of one
    before: no thread goes on to the next run while another is in this one.
    """
    spins, deadline = _TURNS * atomic_load(release + SPINS), 0
    word = atomic_load(header)
    while word >> 32 < seq:
        if atomic_load(abort) != 0 or atomic_load(release + BROKEN) != 0:
            return STOPPED
        if spins > 0:
            spins -= 1
            pause()
        else:
            now = now_ns()
            if deadline == 0:
                deadline = now + patience
            elif now > deadline:
                return LATE
            sleep_on(desk + SEEN, atomic_load(desk + SEEN), _NAP)
        word = atomic_load(header)
    seen = atomic_load(desk + SEEN)
    if seen >> 32 != seq:
        mine = word if word >> 32 == seq else seq << 32
        found = atomic_claim(desk + SEEN, seen, mine)
        seen = mine if found == seen else found
    return seen & 0xFFFFFFFF


@njit
def _own_part(o, count, t, n_threads, ids, values):
    """This thread's neurons of the list into its own lists. Returns how many, or WRONG.

    The list comes from another device: what is no ascending list of cold neurons must not become an address.
    """
    if count > o.rows - o.first:
        return WRONG
    n, last, chunk, mine = 0, o.first - 1, -1, False
    for i in range(count):
        r = load_i32(o.mail_ids + 4 * i)
        if r <= last or r >= o.rows:
            return WRONG
        last = r
        if r // CHUNK != chunk:
            chunk = r // CHUNK
            mine = chunk % n_threads == t
        if mine:
            store_i32(ids + 4 * n, r)
            if o.predictor == VALUES:
                store_f32(values + 4 * n, load_f32(o.mail_values + 4 * i))
            n += 1
    return n


@njit
def take_list(o, count, t, n_threads, own):
    """The layer's input and this thread's part of the list, into its private buffers. Returns count, or WRONG.

    predictor: CANDIDATES, VALUES, or 0 where the list is all neurons from o.first on and is not sent.
    """
    if o.w or o.w2:
        src = o.src + own
        for i in range(0, 4 * o.cols, 64):
            store_w(src + i, load_w(o.mail_h + i))
        if o.quant:
            quantize(src, o.srcb + own, o.cols)
    if o.predictor:
        n = _own_part(o, count, t, n_threads, o.aux2 + own, o.dstb + own)
        if n == WRONG:
            return WRONG
        store_i64(o.lengths + own, n)
    return count


@njit
def answer(o, r0, r1, n_threads, acc, arena_size, seq):
    """mail_out[r0:r1] = sum over threads of their accumulators, threads in order; the last thread says it is all there.

    acc: thread 0's accumulator, arena_size bytes before the next thread's. r0: a multiple of 16.
    """
    for j in range(4 * r0, 4 * r1, 64):
        s = load_w(acc + j)
        for k in range(1, n_threads):
            s = add_w(s, load_w(acc + k * arena_size + j))
        store_w(o.mail_out + j, s)
    if atomic_add(o.desk + WRITTEN, 1) + 1 == n_threads:
        atomic_store(o.desk + WRITTEN, 0)
        atomic_store(o.done, seq)
