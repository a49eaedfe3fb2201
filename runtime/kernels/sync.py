"""Atomics on raw addresses and the barrier of the worker team.

In: addresses of 64-bit words. Out: barrier(), atomic_*, sleep_on(), now_ns(). Next: cold.py, walk.py.

Who waits at a barrier first spins, then sleeps in the kernel until the last to arrive wakes it. Giving the core away by
sched_yield() instead was measured to be 10 to 80 times slower where other programs want the cores: each yield costs
a turn of all of them, while a sleeper that is woken runs next.
"""

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from hotcold.runtime.kernels import isa
from hotcold.runtime.kernels.simd import I32, I64, addr, call, emit, load_i64, pause, pointer

LINE = 64  # bytes; one word per cache line
ABORTED = 1 << 62  # this bit in the release word tells every thread of the team to leave at the same barrier

# Words in the cache line of the release word, as byte offsets from it.
SLEEPERS = 8  # threads that are asleep, or about to be
SPINS = 16  # pauses before a thread goes to sleep; the team's owner sets it
BROKEN = 24  # not 0: a thread will never arrive, so nobody may wait for it
ALONE, CROWDED = 2000, 100  # such pauses where every thread has a core (about 50 us), and where it has not

_NAP = 20_000_000  # ns: so often a sleeper looks whether the team is broken
_MONOTONIC = 6 if "darwin" in isa.target()[0] else 1  # the system's number of the clock
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(isa.target()[0].split("-")[0]) if "linux" in isa.target()[0] else None
_WAIT, _WAKE = 128, 129  # of threads of this process
_TIMESPEC = ir.LiteralStructType([I64, I64])  # seconds, ns


@emit(types.int64, addr)
def atomic_load(b: ir.IRBuilder, a):
    return b.load_atomic(pointer(b, a, I64), "seq_cst", 8)  # not before an earlier atomic_add of the same thread


@emit(types.void, addr, types.int64)
def atomic_store(b: ir.IRBuilder, a, v):
    b.store_atomic(v, pointer(b, a, I64), "release", 8)


@emit(types.int64, addr, types.int64)
def atomic_add(b: ir.IRBuilder, a, v):
    return b.atomic_rmw("add", pointer(b, a, I64), v, "seq_cst")


@emit(types.int64, addr, types.int64)
def atomic_swap(b: ir.IRBuilder, a, v):
    return b.atomic_rmw("xchg", pointer(b, a, I64), v, "seq_cst")


@emit(types.int64, addr, types.int64, types.int64)
def atomic_claim(b: ir.IRBuilder, a, seen, v):
    """Put v where `seen` is. Returns what was there: `seen` if this thread has put v there."""
    return b.extract_value(b.cmpxchg(pointer(b, a, I64), seen, v, "seq_cst", "seq_cst"), 0)


@emit(types.int64)
def now_ns(b: ir.IRBuilder):
    """A clock that only goes forward, in ns; on Windows it moves in steps of some 16 ms."""
    if "windows" in isa.target()[0]:
        return b.mul(call(b, "GetTickCount64", I64), I64(1_000_000))
    cell = cgutils.alloca_once(b, _TIMESPEC)
    call(b, "clock_gettime", I32, I32(_MONOTONIC), b.ptrtoint(cell, I64))
    seconds, rest = (b.load(b.gep(cell, [I32(0), I32(i)])) for i in (0, 1))
    return b.add(b.mul(seconds, I64(1_000_000_000)), rest)


@emit(types.void, addr, types.int64, types.int64)
def sleep_on(b: ir.IRBuilder, word, value, ns):
    """Sleep until wake(word), at most ns; not at all if the low half of the word is no longer that of `value`."""
    if _FUTEX is None:  # as short as the system can
        if "windows" in isa.target()[0]:
            call(b, "SwitchToThread", I32)
        else:
            call(b, "usleep", I32, I32(1))
        return
    cell = cgutils.alloca_once(b, _TIMESPEC)
    b.store(I64(0), b.gep(cell, [I32(0), I32(0)]))
    b.store(ns, b.gep(cell, [I32(0), I32(1)]))
    _futex(b, word, _WAIT, b.and_(value, I64(0xFFFFFFFF)), b.ptrtoint(cell, I64))


@emit(types.void, addr)
def wake(b: ir.IRBuilder, word):
    """Wake all threads that sleep on the word."""
    if _FUTEX is not None:
        _futex(b, word, _WAKE, I64(0x7FFFFFFF), I64(0))


def _futex(b: ir.IRBuilder, word, operation: int, value, timeout) -> None:
    # Found by LLVM in the process (libc); unlike a ctypes pointer it survives Numba's disk cache.
    function = ir.FunctionType(I64, [I64], var_arg=True)
    syscall = cgutils.get_or_insert_function(b.module, function, "syscall")
    b.call(syscall, [I64(_FUTEX), word, I64(operation), value, timeout])


@njit(inline="never")
def wait_phase(word, phase):
    """Wait until the release word shows `phase` (or more) and return it; with ABORTED when the team is broken."""
    for _ in range(load_i64(word + SPINS)):
        value = atomic_load(word)
        if (value & ~ABORTED) >= phase:
            return value
        pause()
    # Counted before the word is looked at again: either this thread sees the release, or the releaser sees the count.
    atomic_add(word + SLEEPERS, 1)
    value = atomic_load(word)
    while (value & ~ABORTED) < phase:
        if atomic_load(word + BROKEN) != 0:
            value = phase | ABORTED
        else:
            sleep_on(word, value, _NAP)
            value = atomic_load(word)
    atomic_add(word + SLEEPERS, -1)
    return value


@njit
def barrier(base, n_threads, phase, abort):
    """Barrier over a monotonic counter: nothing to reset. Returns True when the team must stop here.

    base: address of two lines (arrivals; release, sleepers, spins, broken). phase: this thread's count of barriers,
    this one included. abort: address of the word that asks the team to stop; only the last to arrive reads it, so that
    all threads stop at the same barrier.
    """
    if atomic_add(base, 1) + 1 == phase * n_threads:
        value = phase | (ABORTED if atomic_load(abort) != 0 else 0)
        atomic_swap(base + LINE, value)  # an exchange, because the count is to be read after it
        if atomic_load(base + LINE + SLEEPERS) != 0:
            wake(base + LINE)
    else:
        value = wait_phase(base + LINE, phase)
    return (value & ABORTED) != 0
