"""The team of worker threads that walk the programs.

In: the two programs of program.py. Out: buffers filled, one run after the other. Next: engine.py, its owner.

The caller's thread never computes: it writes the arguments of a run into the control block, raises GO and sleeps until
thread 0 says done. It stays interruptible, so Ctrl-C raises ABORT and the team leaves at its next barrier. A worker
that fails ends the team: those that wait for it are let go, and the caller gets the error.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from hotcold.runtime.buffers import aligned
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.kernels import simd, sync, walk
from hotcold.runtime.kernels.cache import compile_cached
from hotcold.runtime.kernels.cold import LATE, WRONG
from hotcold.runtime.threads import usable_cpus

WAKE_UP = 0.1  # seconds: a signal that arrives just before a thread sleeps is seen only when it wakes
_SPINS, _BROKEN = (walk.RELEASED + offset // 8 for offset in (sync.SPINS, sync.BROKEN))
# Queues, because threading's semaphores stay locked when Ctrl-C arrives inside their Python code.
Wakeups = queue.SimpleQueue


def check_cpu() -> None:
    """Raises HotcoldError where the kernels cannot run."""
    if simd.MISSING:
        raise HotcoldError(f"this CPU lacks {', '.join(simd.MISSING)}: an x86 CPU needs AVX2, F16C and FMA")


def compiled_functions() -> list[tuple[Any, tuple]]:
    """All that a team calls of the kernels: functions and the types of their arguments, for compile_cached()."""
    record, i64 = numba.typeof(np.zeros(1, walk.OP)), numba.types.int64
    return [(walk.serve, (record, record, i64, i64, i64)), (walk.raise_go, (i64,)), (walk.claim_parked, (i64, i64))]


class Team:
    """Threads that walk the programs. Callers from several threads take turns; close() ends a run that is under way."""

    def __init__(self, programs: tuple[np.ndarray, np.ndarray], n_threads: int, notify: Callable[[str], None]) -> None:
        compile_cached(compiled_functions(), notify)
        memory = aligned(8 * walk.control_words(n_threads))
        self.control = memory.view(np.int64)
        self.control[_SPINS] = sync.ALONE if n_threads <= usable_cpus() else sync.CROWDED
        self._wake: list[Wakeups[None]] = [Wakeups() for _ in range(n_threads)]
        self._done: Wakeups[None] = Wakeups()
        self._turn = threading.Lock()
        self._closing = False
        self._errors: list[str] = []  # of workers
        # Before Python 3.13 is_alive() says of a live thread that it has ended, once Ctrl-C has cut such a call short.
        self._ended = [False] * n_threads
        self._failure = ""  # why the team cannot work any more
        self._pid = os.getpid()
        # The threads hold no reference to the team: one that is dropped without close() sends them away.
        self._threads = [
            threading.Thread(
                target=_work,
                args=(programs, memory, t, n_threads, self._wake[t], self._done, self._errors, self._ended),
                name=f"hotcold-{t}", daemon=True,
            )  # fmt: skip
            for t in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()
        self._dismiss = weakref.finalize(self, _dismiss, self.control, self._wake)

    def run(self, arguments: dict[int, int]) -> None:
        """One run to its end. arguments: words of the control block.

        KeyboardInterrupt: the run is abandoned, and the exception goes on. Raises HotcoldError when the team was
        closed, even while it ran, when a worker failed, and in a process forked off after the team was made.
        """
        if os.getpid() != self._pid:
            raise HotcoldError("this model was opened before fork(): its threads are not in this process, open it here")
        with self._turn:
            if not self._dismiss.alive:
                raise HotcoldError("the model is closed")
            self._raise_failure()
            self._abandon()  # one still under way after several Ctrl-C; otherwise nothing
            for word, value in arguments.items():
                self.control[word] = value
            self.control[walk.ABORT] = self.control[walk.TROUBLE] = 0
            if self._closing:
                raise HotcoldError("the model is closed")
            try:
                _go(self.control, self._wake)
                self._wait()
            except BaseException:
                self._abandon()
                raise
            self._raise_failure()
            self._raise_trouble()
            if self.control[walk.ABORT]:
                raise HotcoldError("the model was closed while it was computing")

    def _wait(self) -> None:
        """Until the last run is finished or never will be. The queue only wakes: an interrupt may lose an entry."""
        while not self._over():
            with contextlib.suppress(queue.Empty):
                self._done.get(timeout=WAKE_UP)

    def _over(self) -> bool:
        if self.control[walk.FINISHED] == self.control[walk.GO]:
            return True
        gone = [t for t, ended in enumerate(self._ended) if ended]
        if self._errors or gone:
            self._failure = self._failure or (self._errors or [f"worker {gone[0]} ended in the middle of its work"])[0]
            self._let_go()
        return bool(self._failure)

    def _let_go(self) -> None:
        """Free the workers from waiting for one that failed. When this returns, none of them writes any more."""
        self.control[_BROKEN] = 1
        for wake in self._wake:
            wake.put(None)
        while not all(self._ended):
            with contextlib.suppress(queue.Empty):
                self._done.get(timeout=WAKE_UP)
        for thread in self._threads:
            thread.join()

    def _raise_failure(self) -> None:
        if self._failure:
            raise HotcoldError(f"the model cannot compute any more, open it again: {self._failure}")

    def _raise_trouble(self) -> None:
        """What made a worker end the run. The next run may go well."""
        kind, layer = int(self.control[walk.TROUBLE]) >> 32, int(self.control[walk.TROUBLE]) & 0xFFFFFFFF
        if kind == LATE:
            patience = self.control[walk.A_PATIENCE] / 1e9
            raise HotcoldError(
                f"layer {layer}: waited {patience:g} s for the GPU's list of neurons and none came: the GPU has failed "
                "or is busy with other work; try again, or run without the GPU"
            )
        if kind == WRONG:
            raise HotcoldError(
                f"layer {layer}: what came from the GPU is no list of this layer's cold neurons, which is an error in "
                "hotcold or of the GPU; run without the GPU"
            )

    def _abandon(self) -> None:
        """Make the team leave a run that is under way, and wait for that; more Ctrl-C cannot stop the waiting."""
        while True:
            try:
                if self._over():
                    return
                self.control[walk.ABORT] = 1
                for wake in self._wake:  # one may have been left asleep; a worker woken for nothing parks again
                    wake.put(None)
                self._wait()
            except KeyboardInterrupt:
                continue

    def close(self) -> None:
        """End a run that is under way, in whichever thread, and the worker threads. May be called again."""
        self._closing = True
        if os.getpid() != self._pid:
            return
        self.control[walk.ABORT] = 1
        with self._turn:
            if self._dismiss.alive:
                self._abandon()
                self._dismiss()
                for thread in self._threads:
                    thread.join()


def _work(
    programs: tuple[np.ndarray, np.ndarray],
    memory: np.ndarray,
    t: int,
    n_threads: int,
    wake: Wakeups[None],
    done: Wakeups[None],
    errors: list[str],
    ended: list[bool],
) -> None:
    """A worker thread. memory: the control block; errors: where it says what it failed of; ended: that it is gone."""
    control = memory.view(np.int64)
    try:
        while not control[_BROKEN]:
            said = walk.serve(*programs, t, n_threads, memory.ctypes.data)
            if said == 1:
                done.put(None)
            elif said == 0:
                wake.get()
            else:
                return
    except BaseException as error:
        errors.append(f"worker {t} of {n_threads} failed: {type(error).__name__}: {error}")
    finally:
        ended[t] = True
        done.put(None)


def _go(control: np.ndarray, wake: list[Wakeups[None]]) -> None:
    walk.raise_go(control.ctypes.data)
    for t, sleeper in enumerate(wake):
        if walk.claim_parked(control.ctypes.data, t):
            sleeper.put(None)


def _dismiss(control: np.ndarray, wake: list[Wakeups[None]]) -> None:
    """Tell the workers to leave. No run is under way."""
    control[walk.A_N_TOK] = walk.EXIT
    _go(control, wake)
