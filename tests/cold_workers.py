"""The workers of an engine whose layers are all on the GPU, and a thread that plays the GPU.

In: feed-forward networks of one_op.py. Out: Workers, Gpu. Next: test_cold.py, test_cold_stress.py.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from one_op import FFN

from hotcold.runtime import plan, program
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.engine import PATIENCE
from hotcold.runtime.kernels import walk
from hotcold.runtime.mailbox import Mailbox
from hotcold.runtime.team import Team


class Workers:
    """modes and hot: per layer, what the GPU sends of it and which of its neurons are there.

    first: the CPU's operators of layer 0, if that is not on the GPU.
    """

    def __init__(
        self, layers: Sequence[FFN], modes: Sequence[str], hot: Sequence[int], n_threads: int,
        first: tuple[plan.Op, ...] = (),
    ) -> None:  # fmt: skip
        self.config = stack(layers)
        self.mailbox = Mailbox(self.config)
        self.buffers = program.Buffers(self.config, n_threads, 8, 8, "f32", 0, self.mailbox)
        ops = [*first]
        for i, (layer, mode, n) in enumerate(zip(layers, modes, hot, strict=True)):
            if first and not i:
                continue
            _, ffn, _ = layer.operators()
            ops.append(plan.Op("cold", i, (f"mail{i}",), (f"out{i}",), ffn.weights, ffn.bias, ffn.bias2, mode=mode,
                               neurons=(n, layer.n_ff)))  # fmt: skip
        self.plan = plan.Plan(self.config, "exact", tuple(ops), ())
        self.programs = program.lower(self.plan, self.buffers)
        self.counts = np.zeros((len(layers), n_threads, 2), np.int64)
        self.stamps = np.zeros((len(layers), n_threads, 3), np.int64)
        self.team = Team(self.programs, n_threads, lambda line: None)

    def run(self, seq: int, patience: float = PATIENCE) -> None:
        """The layers of one token."""
        arguments = {
            walk.A_PROGRAM: 0, walk.A_FIRST_OP: 0, walk.A_END_OP: len(self.programs[0]), walk.A_N_TOK: 1, walk.A_POS: 0,
            walk.A_FIRST_OUT: 0, walk.A_COUNTS: self.counts.ctypes.data, walk.A_ARENA: self.buffers.arena,
            walk.A_ARENA_SIZE: self.buffers.arena_size, walk.A_CYCLES: 0, walk.A_SEQ: seq,
            walk.A_PATIENCE: int(patience * 1e9), walk.A_STAMPS: self.stamps.ctypes.data,
        }  # fmt: skip
        self.team.run(arguments)

    def one(
        self, h: np.ndarray, ids: np.ndarray, vals: np.ndarray | None = None, count: int | None = None, more: int = 0
    ) -> np.ndarray:
        """The answer of the first layer. more: layers after it, which have nothing to do."""
        seq = self.mailbox.next_base()
        self.mailbox.host.h[0, : len(h)] = h
        self.mailbox.host.out[:] = np.nan
        self.mailbox.post(0, seq, ids, vals)
        if count is not None:
            self.mailbox.post_count(0, seq, count)
        for layer in range(1, more + 1):
            self.mailbox.post_count(layer, seq + layer, 0)
        self.run(seq)
        assert self.mailbox.answered(0, seq) == (self.mailbox.host.hdr[0] & 0xFFFFFFFF > 0)
        out: np.ndarray = self.mailbox.host.out[0, : len(h)]
        return out.copy()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.team.close()


def stack(layers: Sequence[FFN]) -> ModelConfig:
    """The configuration of a model of these layers."""
    n, first = len(layers), layers[0].config()
    return replace(first, n_layer=n, n_ff=tuple(f.n_ff for f in layers), thresholds=tuple(f.threshold for f in layers),
                   window=(0,) * n, norm_relu=(False,) * n)  # fmt: skip


class Gpu:
    """Another thread: does `play` for every token it is given, until close(). Its errors are raised by wait()."""

    def __init__(self, play: Callable[[int], None]) -> None:
        self._tokens: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._play = play
        self._thread = threading.Thread(target=self._work, name="gpu", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (seq := self._tokens.get()) is not None:
            try:
                self._play(seq)
                self._done.put(None)
            except BaseException as error:
                self._done.put(error)

    def start(self, seq: int) -> None:
        """Begin another token; those before need not have ended."""
        self._tokens.put(seq)

    def wait(self) -> None:
        """Until a token that was started has ended."""
        error = self._done.get(timeout=120)
        if error is not None:
            raise error

    def close(self) -> None:
        self._tokens.put(None)
        self._thread.join(60)
        assert not self._thread.is_alive()


def wait_for_answer(mailbox: Mailbox, layer: int, seq: int) -> bool:
    """Whether it came; False: the GPU was told to wait for none."""
    for looks in range(10**9):
        if mailbox.answered(layer, seq):
            return True
        if mailbox.host.abort[0]:
            return False
        time.sleep(0 if looks < 100 else 1e-4)
    raise AssertionError
