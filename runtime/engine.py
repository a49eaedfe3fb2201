"""Runs the program: the KV cache, one token or one block of tokens at a time.

In: a path to a GGUF. Out: logits. Next: team.py, which computes; then sampling.py and generate.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from typing import TYPE_CHECKING

import numpy as np
import psutil

from hotcold.runtime.buffers import FEW_TOKENS, KV_TYPES, Buffers
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import GGUFFile, open_gguf
from hotcold.runtime.kernels import walk
from hotcold.runtime.kernels.formats import PACK_TOKENS
from hotcold.runtime.mailbox import Mailbox
from hotcold.runtime.plan import Plan, make_plan
from hotcold.runtime.program import lower
from hotcold.runtime.rope import rope_table
from hotcold.runtime.stats import LayerStats, OpTime, layer_stats
from hotcold.runtime.team import Team, check_cpu
from hotcold.runtime.threads import default_threads
from hotcold.runtime.weights import Weights, load_weights

if TYPE_CHECKING:
    from hotcold.runtime.gpu.choose import GpuOptions

DEFAULT_N_CTX = 4096
N_BATCH = 256  # tokens per block
LOGITS_BYTES = 64 << 20  # for logits of all tokens of a block: bounds the block where the vocabulary is large
MAX_THREADS = 256
PATIENCE = 10.0  # seconds the workers wait for a layer's list from the GPU


def _silent(line: str) -> None:
    del line


class Engine:
    """A loaded model with one KV cache; several may live in one process. One caller at a time, but for close()."""

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
        mailbox: Mailbox | None = None,
    ) -> None:
        """mailbox: where cold operators of the plan meet the GPU. The rest: see open()."""
        self.file, self.config, self.weights, self.plan = file, config, weights, plan
        self.n_ctx, self.threads, self.sparsity = n_ctx, n_threads, plan.sparsity
        self.n_past = 0
        self.n_batch = min(N_BATCH, n_ctx)
        _check_memory(config, n_threads, n_ctx, self.n_batch, kv_type, plan.cached_layers)
        self._buffers = Buffers(config, n_threads, n_ctx, self.n_batch, kv_type, plan.cached_layers, mailbox)
        self._counts = np.zeros((config.n_layer, n_threads, 2), np.int64)  # walk.CHECKED, walk.COMPUTED
        self._counted_tokens = 0
        self._tokens = np.zeros(self.n_batch, np.int64)
        self._logits = np.zeros((1, config.n_vocab), np.float32)
        self._tables = self._rope_tables()
        self._programs = lower(plan, self._buffers)
        self._cycles: tuple[np.ndarray, ...] | None = None  # per program: int64 [operators, n_threads]
        self._calls = [0, 0]
        self._team: Team | None = Team(self._programs, n_threads, notify)

    @classmethod
    def open(
        cls,
        path: str | PathLike[str],
        *,
        sparsity: str = "auto",
        threads: int | None = None,
        n_ctx: int | None = None,
        kv_type: str = "f16",
        mmap: bool = True,
        mlock: bool = False,
        notify: Callable[[str], None] = _silent,
        gpu: GpuOptions | None = None,
    ) -> Engine:
        """Load a model.

        path: a neuron-split GGUF, or a stock one whose types are native (then dense). n_ctx: tokens the KV cache
        holds; None: the model's, at most 4096; 0: the model's. kv_type: "f16", "q8_0" or "f32". mmap: False reads the
        file into memory instead of mapping it; mlock: keep it in RAM, where the system allows that. notify is called
        with each line a user should know. gpu: what a GPU is used for; None: nothing.
        Raises HotcoldError (GGUFError for a file that cannot be trusted).
        """
        if kv_type not in KV_TYPES:
            raise HotcoldError(f"KV cache type {kv_type!r} is unknown, choose from {', '.join(KV_TYPES)}")
        for what, value in (("threads", threads), ("n_ctx", n_ctx)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer))):
                raise HotcoldError(f"{what} must be a whole number or None, got {value!r}")
        n_threads = default_threads() if threads is None else int(threads)
        if not 1 <= n_threads <= MAX_THREADS:
            raise HotcoldError(f"--threads {n_threads}: allowed are 1 to {MAX_THREADS}")
        check_cpu()
        file = open_gguf(path, mapped=mmap, notify=notify)
        try:
            if mlock:
                file.lock(notify)
            else:
                file.prefetch()
            config = ModelConfig.from_gguf(file)
            weights = load_weights(file, config)
            size = _context_size(config, n_ctx, notify)
            if gpu is not None:
                from hotcold.runtime.gpu.choose import open_hybrid

                hybrid = open_hybrid(file, config, weights, sparsity, gpu, n_threads=n_threads, n_ctx=size,
                                     n_batch=min(N_BATCH, size), kv_type=kv_type, notify=notify)  # fmt: skip
                if hybrid is not None:
                    return hybrid
            plan = make_plan(config, weights, sparsity)
            for note in plan.notes:
                notify(note)
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
            step = max(PACK_TOKENS, min(step, LOGITS_BYTES // (4 * self.config.n_vocab)))
        with self._undone_by_errors():
            first = 0
            for size in block_sizes(len(ids), step):
                block = ids[first : first + size]
                done = first + size == len(ids)
                wanted = len(block) if logits == "all" else int(logits == "last" and done)
                rows = out[first : first + wanted] if logits == "all" else out[:wanted]
                self._run(block, rows, few=size < PACK_TOKENS)
                self.n_past += size
                first += size
        return out[0] if logits == "last" else out if logits == "all" else out.reshape(-1)

    def verify(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Append up to FEW_TOKENS tokens and return the logits of each, f32 [n, n_vocab]: the bits of one at a time.

        For tokens that may have to be taken back (truncate): all are computed together, and weights read once.
        Raises HotcoldError as forward does, and for more tokens.
        """
        ids = self._checked(tokens, "all")
        if len(ids) > FEW_TOKENS:
            raise HotcoldError(f"{len(ids)} tokens to verify at once, allowed are 1 to {FEW_TOKENS}")
        out = np.empty((len(ids), self.config.n_vocab), np.float32)
        with self._undone_by_errors():
            self._run(ids, out, few=True)
            self.n_past += len(ids)
        return out

    @contextlib.contextmanager
    def _undone_by_errors(self) -> Iterator[None]:
        """Position and counters go back to what they were when a run ends early."""
        start, counted = self.n_past, (self._counts.copy(), self._counted_tokens)
        try:
            yield
        except BaseException:
            self.n_past = start
            self._counts[:], self._counted_tokens = counted
            raise

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

    def _run(self, block: np.ndarray, rows: np.ndarray, few: bool) -> None:
        """rows: f32 [wanted, n_vocab], contiguous: the logits of the block's last tokens. few: by the token program."""
        self.run_ops(not few, 0, len(self._programs[not few]), block, self.n_past, rows)
        self._calls[not few] += 1
        self._counted_tokens += few * len(block)

    def run_ops(
        self, many: bool, first: int, end: int, block: np.ndarray, pos: int, rows: np.ndarray, seq: int = 0,
        patience: float = PATIENCE, stamps: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Operators first..end-1 of the token program, or with `many` of the block program, for tokens at `pos`.

        For cold operators, which compute one token: seq: the mailbox's number of this token; patience: seconds to wait
        for each list; stamps: int64 [n_layer, n_threads, 3], where their times go (walk.LISTENS and so on).
        """
        team = self._team
        if team is None:
            raise HotcoldError("the model was closed while it was computing")
        self._rows = rows  # the team may write there until the run has ended, whatever interrupts this method
        self._tokens[: len(block)] = block
        cos, sin = self._tables
        team.run(
            {
                walk.A_PROGRAM: int(many),
                walk.A_FIRST_OP: first,
                walk.A_END_OP: end,
                walk.A_TOKENS: self._tokens.ctypes.data,
                walk.A_N_TOK: len(block),
                walk.A_POS: pos,
                walk.A_FIRST_OUT: len(block) - len(rows),
                walk.A_LOGITS: rows.ctypes.data if len(rows) else self._logits.ctypes.data,
                walk.A_COUNTS: self._counts.ctypes.data,
                walk.A_ARENA: self._buffers.arena,
                walk.A_ARENA_SIZE: self._buffers.arena_size,
                walk.A_COS: cos.ctypes.data,
                walk.A_SIN: sin.ctypes.data,
                walk.A_ROPE_ROW: cos.strides[0],
                walk.A_CYCLES: 0 if self._cycles is None else self._cycles[many].ctypes.data,
                walk.A_SEQ: seq,
                walk.A_PATIENCE: int(patience * 1e9),
                walk.A_STAMPS: 0 if stamps is None else stamps.ctypes.data,
            }
        )

    def buffer_values(self) -> dict[str, np.ndarray]:
        """f32 views [n_batch, width] of the buffers of a block, by their names in plan.py."""
        return self._buffers.values

    def truncate(self, n_past: int) -> None:
        """Forget the tokens at positions n_past and later."""
        if not 0 <= n_past <= self.n_past:
            raise HotcoldError(f"cannot go back to position {n_past}: the context holds {self.n_past} tokens")
        self.n_past = n_past

    # ---- what was computed

    def layer_stats(self) -> LayerStats:
        """What the single tokens since reset_stats() computed and read."""
        return layer_stats(self.config, self.weights, self.plan, self._counts.sum(axis=1), self._counted_tokens)

    @property
    def cache_token_bytes(self) -> int:
        """Bytes of keys and values that the cache holds per token and layer."""
        return 2 * self.config.n_head_kv * self._buffers.cache_row

    def reset_stats(self) -> None:
        """Count neurons from here on."""
        self._counts[:] = 0
        self._counted_tokens = 0

    def time_ops(self, on: bool) -> None:
        """Take the time of every operator from here on, from 0; or no longer."""
        self._cycles = tuple(np.zeros((len(p), self.threads), np.int64) for p in self._programs) if on else None
        self._calls = [0, 0]

    def op_times(self) -> list[OpTime]:
        """The operators that ran since time_ops(True), in order; empty without it."""
        if self._cycles is None:
            return []
        return [
            OpTime(op, bool(many), calls, cycles.copy())
            for many, calls in enumerate(self._calls)
            for op, cycles in zip(self.plan.cpu(bool(many)), self._cycles[many], strict=True)
            if calls
        ]

    def close(self) -> None:
        """Stop the threads and close the file. May be called twice, and while another thread is in forward()."""
        team, self._team = self._team, None
        if team is not None:
            team.close()
            self.file.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def block_sizes(n_tok: int, step: int) -> list[int]:
    """How a text is cut into blocks of at most `step` tokens.

    None but the only one is shorter than PACK_TOKENS, from where on the kernels of many tokens are used: so every
    token of a text gets the same bits wherever the cuts fall. With a step below 2 * PACK_TOKENS - 1 there may be too
    little to give to the last one: it may then be shorter all the same.
    """
    sizes = [step] * (n_tok // step) + ([n_tok % step] if n_tok % step else [])
    if len(sizes) > 1 and sizes[-1] < PACK_TOKENS:
        missing = min(PACK_TOKENS - sizes[-1], max(0, step - PACK_TOKENS))
        sizes[-2] -= missing
        sizes[-1] += missing
    return sizes


def _check_memory(
    config: ModelConfig, n_threads: int, n_ctx: int, n_batch: int, kv_type: str, cached_layers: int
) -> None:
    """The system would promise any amount and kill the process later: compare with what is free now."""
    needed = Buffers.estimate(config, n_threads, n_ctx, n_batch, kv_type, cached_layers)
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
