"""Atomics on raw addresses and the spin barrier of the worker team.

In: addresses of 64-bit words. Out: barrier(), atomic_*. Next: walk.py.
"""

from llvmlite import ir
from numba import njit, types

from hotcold.runtime.kernels.simd import I64, VOID, X86, addr, call, emit, pointer

# Found by LLVM in the process (libc); unlike a ctypes pointer it survives Numba's disk cache.
sched_yield = types.ExternalFunction("sched_yield", types.int32())

SPINS = 2000  # about 50 us of pausing before the core is given away: more threads than cores must not burn each other
LINE = 64  # bytes; one word per cache line
ABORTED = 1 << 62  # this bit in the release word tells every thread of the team to leave at the same barrier


@emit(types.int64, addr)
def atomic_load(b: ir.IRBuilder, a):
    return b.load_atomic(pointer(b, a, I64), "acquire", 8)


@emit(types.void, addr, types.int64)
def atomic_store(b: ir.IRBuilder, a, v):
    b.store_atomic(v, pointer(b, a, I64), "release", 8)


@emit(types.int64, addr, types.int64)
def atomic_add(b: ir.IRBuilder, a, v):
    return b.atomic_rmw("add", pointer(b, a, I64), v, "seq_cst")


@emit(types.int64, addr, types.int64)
def atomic_swap(b: ir.IRBuilder, a, v):
    return b.atomic_rmw("xchg", pointer(b, a, I64), v, "seq_cst")


@emit(types.void)
def pause(b: ir.IRBuilder):
    if X86:
        call(b, "llvm.x86.sse2.pause", VOID)


@njit(inline="never")
def wait_phase(word, phase):
    """Wait until the release word shows `phase` (or more) and return it."""
    spins = 0
    value = atomic_load(word)
    while (value & ~ABORTED) < phase:
        pause()
        spins += 1
        if spins > SPINS:
            sched_yield()
        value = atomic_load(word)
    return value


@njit
def barrier(base, n_threads, phase, abort):
    """Barrier over a monotonic counter: nothing to reset. Returns True when the team must stop here.

    base: address of two words one LINE apart (arrivals, release). phase: this thread's count of barriers, this one
    included. abort: address of the word that asks the team to stop; only the last to arrive reads it, so that all
    threads stop at the same barrier.
    """
    if atomic_add(base, 1) + 1 == phase * n_threads:
        value = phase | (ABORTED if atomic_load(abort) != 0 else 0)
        atomic_store(base + LINE, value)
    else:
        value = wait_phase(base + LINE, phase)
    return (value & ABORTED) != 0
