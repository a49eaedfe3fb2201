"""Runs the program: a team of persistent threads, the KV cache, one token or one block of tokens at a time.

In: a path to a GGUF. Out: logits. Next: sampling.py and generate.py.

The caller's thread never computes: it writes the arguments of a run into the control block, raises GO and sleeps until
thread 0 says done. It stays interruptible, so Ctrl-C raises ABORT and the team leaves at its next barrier.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from os import PathLike

import numba
import numpy as np
import psutil

from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import GGUFFile, open_gguf
from hotcold.runtime.kernels import simd, walk
from hotcold.runtime.kernels.cache import compile_cached
from hotcold.runtime.plan import Plan, make_plan
from hotcold.runtime.program import KV_TYPES, Buffers, aligned, lower
from hotcold.runtime.rope import rope_table
from hotcold.runtime.threads import default_threads
from hotcold.runtime.weights import Weights, load_weights

DEFAULT_N_CTX = 4096
N_BATCH = 256  # tokens per block
LOGITS_BYTES = 64 << 20  # for logits of all tokens of a block: bounds the block where the vocabulary is large
MAX_THREADS = 256


def _silent(line: str) -> None:
    del line


class Team:
    """Threads that walk the programs. run() is not reentrant: one caller at a time."""

    def __init__(self, programs: tuple[np.ndarray, np.ndarray], n_threads: int, notify: Callable[[str], None]) -> None:
        self.n_threads = n_threads
        self._programs = programs
        self._memory = aligned(8 * walk.control_words(n_threads))
        self.control = self._memory.view(np.int64)
        self._addr = self._memory.ctypes.data
        record = numba.typeof(programs[0])
        i64 = numba.types.int64
        compile_cached(
            [(walk.serve, (record, record, i64, i64, i64)), (walk.raise_go, (i64,)), (walk.claim_parked, (i64, i64))],
            notify,
        )
        # Queues, because threading's semaphores stay locked when Ctrl-C arrives inside their Python code.
        self._wake: list[queue.SimpleQueue[None]] = [queue.SimpleQueue() for _ in range(n_threads)]
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(t,), name=f"hotcold-{t}", daemon=True) for t in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, t: int) -> None:
        while True:
            said = walk.serve(*self._programs, t, self.n_threads, self._addr)
            if said == 1:
                self._done.put(None)
            elif said == 0:
                self._wake[t].get()
            else:
                return

    def _go(self) -> None:
        walk.raise_go(self._addr)
        for t in range(self.n_threads):
            if walk.claim_parked(self._addr, t):
                self._wake[t].put(None)

    def run(self, arguments: dict[int, int]) -> None:
        """One run to its end. KeyboardInterrupt: the run is abandoned, and the exception goes on."""
        self._abandon()  # one still under way after several Ctrl-C; otherwise nothing
        for word, value in arguments.items():
            self.control[word] = value
        self.control[walk.ABORT] = 0
        try:
            self._go()
            self._wait()
        except BaseException:
            self._abandon()
            raise

    def _wait(self) -> None:
        """Until the last run is finished. The queue only wakes: an interrupt may lose or leave an entry of it."""
        while self.control[walk.FINISHED] != self.control[walk.GO]:
            self._done.get()

    def _abandon(self) -> None:
        """Make the team leave a run that is under way, and wait for that; more Ctrl-C cannot stop the waiting."""
        while True:
            try:
                if self.control[walk.FINISHED] == self.control[walk.GO]:
                    return
                self.control[walk.ABORT] = 1
                for wake in self._wake:  # one may have been left asleep; a worker woken for nothing parks again
                    wake.put(None)
                self._wait()
            except KeyboardInterrupt:
                continue

    def close(self) -> None:
        self._abandon()
        self.control[walk.A_N_TOK] = walk.EXIT
        self._go()
        for thread in self._threads:
            thread.join()


class Engine:
    """A loaded model with one KV cache. Not thread-safe; several engines may live in one process."""

    def __init__(
        self,
        file: GGUFFile,
        config: ModelConfig,
        weights: Weights,
        plan: Plan,
        *,
        n_threads: int,
        n_ctx: int,
        kv_type: str,
        notify: Callable[[str], None],
    ) -> None:
        self.file, self.config, self.weights, self.plan = file, config, weights, plan
        self.n_ctx, self.threads, self.sparsity = n_ctx, n_threads, plan.sparsity
        self.n_past = 0
        self.n_batch = min(N_BATCH, n_ctx)
        _check_memory(config, n_ctx, self.n_batch, kv_type)
        self._buffers = Buffers(config, n_threads, n_ctx, self.n_batch, kv_type)
        self._counts = np.zeros((config.n_layer, n_threads), np.int64)
        self._counted_tokens = 0
        self._tokens = np.zeros(self.n_batch, np.int64)
        self._logits = np.zeros((1, config.n_vocab), np.float32)
        self._tables = self._rope_tables()
        self._team: Team | None = Team(lower(plan, self._buffers), n_threads, notify)

    @classmethod
    def open(
        cls,
        path: str | PathLike[str],
        *,
        sparsity: str = "auto",
        threads: int | None = None,
        n_ctx: int | None = None,
        kv_type: str = "f16",
        notify: Callable[[str], None] = _silent,
    ) -> Engine:
        """Load a model.

        path: a neuron-split GGUF, or a stock one whose types are native (then dense). n_ctx: tokens the KV cache
        holds; None: the model's, at most 4096; 0: the model's. kv_type: "f16" or "f32". notify is called with each
        line a user should know. Raises HotcoldError (GGUFError for a file that cannot be trusted).
        """
        if kv_type not in KV_TYPES:
            raise HotcoldError(f"KV cache type {kv_type!r} is unknown, choose from {', '.join(KV_TYPES)}")
        n_threads = default_threads() if threads is None else threads
        if not 1 <= n_threads <= MAX_THREADS:
            raise HotcoldError(f"--threads {n_threads}: allowed are 1 to {MAX_THREADS}")
        if simd.MISSING:
            raise HotcoldError(f"this CPU lacks {', '.join(simd.MISSING)}: an x86 CPU needs AVX2, F16C and FMA")
        file = open_gguf(path)
        try:
            config = ModelConfig.from_gguf(file)
            weights = load_weights(file, config)
            plan = make_plan(config, weights, sparsity)
            for note in plan.notes:
                notify(note)
            size = _context_size(config, n_ctx, notify)
            return cls(file, config, weights, plan, n_threads=n_threads, n_ctx=size, kv_type=kv_type, notify=notify)
        except BaseException:
            file.close()
            raise

    def _rope_tables(self) -> tuple[np.ndarray, np.ndarray]:
        if self.config.rope is None:
            return np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32)
        factors = self.weights.get("rope_freqs.weight")
        return rope_table(self.config.rope, self.n_ctx, None if factors is None else factors.data)

    # ---- tokens

    def forward(self, tokens: Sequence[int] | np.ndarray, logits: str = "last") -> np.ndarray:
        """Append tokens at position n_past and return f32 logits: "last" [n_vocab], "all" [n, n_vocab], "none" [0].

        Raises HotcoldError when the context is full or a token id is outside the vocabulary. KeyboardInterrupt stops
        it within a fraction of a second; n_past is then what it was.
        """
        ids = self._checked(tokens, logits)
        keep = len(ids) if logits == "all" else 1 if logits == "last" else 0
        out = np.empty((keep, self.config.n_vocab), np.float32)
        step = self.n_batch
        if logits == "all":
            step = max(1, min(step, LOGITS_BYTES // (4 * self.config.n_vocab)))
        start = self.n_past
        try:
            for first in range(0, len(ids), step):
                block = ids[first : first + step]
                done = first + len(block) == len(ids)
                wanted = len(block) if logits == "all" else int(logits == "last" and done)
                rows = out[first : first + wanted] if logits == "all" else out[:wanted]
                self._run(block, rows)
                self.n_past += len(block)
        except BaseException:
            self.n_past = start
            raise
        return out[0] if logits == "last" else out if logits == "all" else out.reshape(-1)

    def _checked(self, tokens: Sequence[int] | np.ndarray, logits: str) -> np.ndarray:
        if self._team is None:
            raise HotcoldError("the model is closed")
        if logits not in ("last", "all", "none"):
            raise HotcoldError(f"logits={logits!r}: choose from last, all, none")
        ids = np.asarray(tokens, np.int64).reshape(-1)
        if not len(ids):
            raise HotcoldError("no tokens to evaluate")
        bad = ids[(ids < 0) | (ids >= self.config.n_vocab)]
        if len(bad):
            raise HotcoldError(f"token id {bad[0]} is outside the vocabulary of {self.config.n_vocab}")
        if self.n_past + len(ids) > self.n_ctx:
            raise HotcoldError(
                f"context is full: {self.n_past} tokens are in it, {len(ids)} more do not fit into {self.n_ctx}; "
                "use a larger --ctx-size or a shorter text"
            )
        return ids

    def _run(self, block: np.ndarray, rows: np.ndarray) -> None:
        """rows: f32 [wanted, n_vocab], contiguous: the logits of the block's last tokens go there."""
        assert self._team is not None
        self._rows = rows  # the team may write there until the run has ended, whatever interrupts this method
        self._tokens[: len(block)] = block
        cos, sin = self._tables
        single = len(block) == 1
        self._team.run(
            {
                walk.A_PROGRAM: 0 if single else 1,
                walk.A_TOKENS: self._tokens.ctypes.data,
                walk.A_N_TOK: len(block),
                walk.A_POS: self.n_past,
                walk.A_FIRST_OUT: len(block) - len(rows),
                walk.A_LOGITS: rows.ctypes.data if len(rows) else self._logits.ctypes.data,
                walk.A_COUNTS: self._counts.ctypes.data,
                walk.A_ARENA: self._buffers.arena,
                walk.A_ARENA_SIZE: self._buffers.arena_size,
                walk.A_COS: cos.ctypes.data,
                walk.A_SIN: sin.ctypes.data,
                walk.A_ROPE_ROW: cos.strides[0],
            }
        )
        self._counted_tokens += single

    def truncate(self, n_past: int) -> None:
        """Forget the tokens at positions n_past and later."""
        if not 0 <= n_past <= self.n_past:
            raise HotcoldError(f"cannot go back to position {n_past}: the context holds {self.n_past} tokens")
        self.n_past = n_past

    # ---- what was computed

    def share_computed(self) -> np.ndarray:
        """float [n_layer]: neurons computed / neurons, over the single tokens since reset_stats(); 1 where none."""
        if self.config.layout == "stock" or not self._counted_tokens:
            return np.ones(self.config.n_layer)
        return self._counts.sum(axis=1) / (self._counted_tokens * np.array(self.config.n_ff, np.float64))

    def reset_stats(self) -> None:
        self._counts[:] = 0
        self._counted_tokens = 0

    def close(self) -> None:
        """Stop the threads and close the file; may be called twice."""
        if self._team is not None:
            self._team.close()
            self._team = None
            self.file.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _check_memory(config: ModelConfig, n_ctx: int, n_batch: int, kv_type: str) -> None:
    """The system would promise any amount and kill the process later: compare with what is free now."""
    needed = Buffers.estimate(config, n_ctx, n_batch, kv_type)
    free = psutil.virtual_memory().available
    if needed > free:
        raise HotcoldError(
            f"a context of {n_ctx} tokens needs {needed / 2**30:.1f} GiB for the KV cache and activations, "
            f"{free / 2**30:.1f} GiB are free: use a smaller --ctx-size"
        )


def _context_size(config: ModelConfig, wanted: int | None, notify: Callable[[str], None]) -> int:
    trained = config.n_ctx_train
    if wanted is None:
        if trained > DEFAULT_N_CTX:
            notify(f"context: {DEFAULT_N_CTX} of the model's {trained} tokens (--ctx-size sets it, 0: all)")
        return min(trained, DEFAULT_N_CTX)
    if wanted == 0:
        return trained
    if wanted < 0:
        raise HotcoldError(f"--ctx-size {wanted}: must be 0 (the model's) or more")
    if wanted > trained and config.rope is None:
        raise HotcoldError(f"--ctx-size {wanted}: this model has learned positions for {trained} tokens only")
    if wanted > trained:
        notify(f"context: {wanted} tokens, but the model was trained on {trained}: later answers may be poor")
    return wanted
