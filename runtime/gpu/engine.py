"""The engine of both sides: the CPU's first layers, then the layers of which the GPU has a part or all.

In: a plan with a placement, a device. Out: logits. Next: lower.py says what the GPU runs, streams.py or graph.py how.

A token: the CPU's layers by its workers; x to the GPU; the rest of the layers there, while the workers compute what the
GPU sends them; logits back. Whatever ends a token early (an error, Ctrl-C, close()) stops both sides before it is told:
waits of the GPU end by a word in pinned memory, those of the workers by the team's own.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from hotcold.runtime.config import ModelConfig
from hotcold.runtime.engine import Engine
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import GGUFFile
from hotcold.runtime.gpu.device import Device, DeviceError
from hotcold.runtime.gpu.graph import GraphExecutor
from hotcold.runtime.gpu.lower import Lowering
from hotcold.runtime.gpu.prompt import Prompt
from hotcold.runtime.gpu.shares import shared_stats
from hotcold.runtime.gpu.source import load_kernels
from hotcold.runtime.gpu.staging import Staging
from hotcold.runtime.gpu.state import GpuState
from hotcold.runtime.gpu.streams import Queue, StreamExecutor
from hotcold.runtime.gpu.trace import Tracer
from hotcold.runtime.gpu.weights import DeviceWeights
from hotcold.runtime.kernels.formats import PACK_TOKENS
from hotcold.runtime.mailbox import Mailbox
from hotcold.runtime.plan import Plan
from hotcold.runtime.stats import LayerStats
from hotcold.runtime.weights import Weights

PATIENCE = 20.0  # seconds that one side waits for the other within a token


class HybridEngine(Engine):
    """One caller at a time, but for close(). Engine.open() makes one where a GPU is to be used."""

    def __init__(
        self, file: GGUFFile, config: ModelConfig, weights: Weights, plan: Plan, *, device: Device, executor: str,
        n_threads: int, n_ctx: int, kv_type: str, notify: Callable[[str], None], owns_device: bool = False,
        patience: float = PATIENCE, blocks_from: int | None = None, trace: str | os.PathLike[str] | None = None,
    ) -> None:  # fmt: skip
        """plan: with a placement. owns_device: close() closes it too. blocks_from: tokens from which on a prompt is
        computed in blocks; None: measured, where it costs something. trace: a file for a timeline. Raises HotcoldError
        where VRAM is missing."""
        assert plan.placement is not None
        self.device, self.placement, self._patience = device, plan.placement, patience
        self._owns_device = owns_device
        self._mailbox = Mailbox(config, device.pinned)
        self._busy = threading.Lock()  # held while the GPU works: close() must not take its memory away
        self._failure = ""  # why the GPU cannot work any more
        super().__init__(file, config, weights, plan, n_threads=n_threads, n_ctx=n_ctx, kv_type=kv_type, notify=notify,
                         mailbox=self._mailbox)  # fmt: skip
        self._tracer: Tracer | None = None
        try:
            self._load(executor, trace, notify)
            self._blocks_from = blocks_from or self._measure(notify)
        except BaseException:
            team, self._team = self._team, None
            if team is not None:
                team.close()
            raise

    def _load(self, executor: str, trace: str | os.PathLike[str] | None, notify: Callable[[str], None]) -> None:
        device, plan = self.device, self.plan
        kernels = load_kernels(device)
        self._device_weights = DeviceWeights(device, plan)
        self._state = GpuState(device, plan, self.n_ctx, self.n_batch, self._tables)
        self._stream = device.stream()
        self._staging = Staging(device, self._state["stage"], self._stream)
        self._device_weights.load(self._staging, kernels, self._stream)
        if trace is not None:
            self._tracer = Tracer(trace, plan, device, kernels("stamp"), self._state["stamps"], self.threads, notify)
        stamp = self._tracer.stamp if self._tracer else None
        self._prompt = Prompt(plan, self._device_weights, self._state, self._staging, kernels, device, self._stream,
                              self.n_ctx, stamp)  # fmt: skip
        lowering = Lowering(plan, self._device_weights, self._state, self._mailbox, kernels, device, self.n_ctx,
                            self._patience)  # fmt: skip
        self._queue = Queue(device, lowering.steps(), self._stream, stamp)
        self._executor: StreamExecutor | GraphExecutor
        if executor == "stream":
            self._executor = StreamExecutor(device, plan, self._queue, self._mailbox)
        else:
            self._executor = GraphExecutor(device, plan, self._queue)
        self._n_prefix = sum(op.kind != "cold" for op in plan.cpu(many=False))

    def _measure(self, notify: Callable[[str], None]) -> int:
        """From how many tokens on a block is faster than one token at a time. Nothing is in the context yet.

        A block's time is nearly that of sending the CPU's neurons, so a short one is measured. The result is a power of
        two: which way a prompt goes decides its last bits, and should not hang on a few microseconds.
        """
        if not self._prompt.streamed:
            return PACK_TOKENS
        n = min(PACK_TOKENS, self.n_ctx)
        one, many = (self._seconds(lambda: self._token(0, 0, None)), self._seconds(
            lambda: self._block(np.zeros(n, np.int64), np.empty((0, self.config.n_vocab), np.float32))))  # fmt: skip
        self.reset_stats()
        self._calls = [0, 0]
        if self._tracer:
            self._tracer.restart()
        limit = max(PACK_TOKENS, 1 << math.ceil(math.log2(max(1.0, many / one))))
        sent = self._prompt.streamed / 2**20
        notify(f"GPU: prompts of {limit} tokens and more in blocks, for which {sent:.0f} MiB of neurons are sent there")
        return limit

    @staticmethod
    def _seconds(work: Callable[[], None]) -> float:
        """Of the second run: the first one touches its memory."""
        for _ in range(2):
            began = time.perf_counter()
            work()
            seconds = time.perf_counter() - began
        return max(seconds, 1e-9)

    # ---- tokens

    def _run(self, block: np.ndarray, rows: np.ndarray, few: bool) -> None:
        """rows: f32 [wanted, n_vocab], contiguous: the logits of the block's last tokens."""
        if not few and len(block) >= self._blocks_from:
            self._block(block, rows)
            return
        first_row = len(block) - len(rows)
        for i, token in enumerate(block):
            self._token(token, self.n_past + i, rows[i - first_row] if i >= first_row else None)
        self._counted_tokens += len(block)

    def _token(self, token: int, pos: int, row: np.ndarray | None) -> None:
        """row: f32 [n_vocab], where its logits go."""
        ids = np.array([token], np.int64)
        none = np.empty((0, self.config.n_vocab), np.float32)
        self._check_alive()
        tracer = self._tracer
        began = time.perf_counter_ns()
        self.run_ops(False, 0, self._n_prefix, ids, pos, none)
        with self._on_gpu():
            on_gpu = time.perf_counter_ns()
            offset = tracer.begin(self._stream) if tracer else 0
            seq = self._mailbox.next_base()
            self._state.x[0] = self._buffers.values["x"][0]
            self._state.begin(pos, seq)

            def run_cold(first: int, end: int) -> None:
                first, end = self._n_prefix + first, self._n_prefix + end
                self.run_ops(False, first, end, ids, pos, none, seq=seq, patience=self._patience,
                             stamps=tracer.workers if tracer else None)  # fmt: skip

            self._executor.token(seq, run_cold, head=row is not None)
            if row is not None:
                self._state.fetch_logits(self._stream)
            self.device.sync(self._stream)
            self._check_waits()
            if tracer:
                tracer.token(pos, began, on_gpu, offset, head=row is not None)
            if row is not None:
                row[:] = self._state.logits[0]
        self._calls[0] += 1

    def _block(self, block: np.ndarray, rows: np.ndarray) -> None:
        """Many tokens at once. rows as in _run."""
        n, none = len(block), np.empty((0, self.config.n_vocab), np.float32)
        self._check_alive()
        tracer = self._tracer
        began = time.perf_counter_ns()
        self.run_ops(True, 0, len(self._programs[1]), block, self.n_past, none)
        with self._on_gpu():
            on_gpu = time.perf_counter_ns()
            offset = tracer.begin(self._stream) if tracer else 0
            self._state.x[:n] = self._buffers.values["x"][:n]
            self._prompt.run(n, self.n_past, rows)
            self._staging.settle()
            self.device.sync(self._stream)
            if tracer:
                tracer.block(n, self.n_past, began, on_gpu, offset, head=len(rows) > 0)
        self._calls[1] += 1

    def _check_alive(self) -> None:
        if self._failure:
            raise HotcoldError(f"the model cannot compute any more, open it again: {self._failure}")

    @contextlib.contextmanager
    def _on_gpu(self) -> Iterator[None]:
        """While the GPU works. Whatever goes wrong meanwhile, nothing is under way any more when it is raised."""
        with self._busy:
            if self._team is None:
                raise HotcoldError("the model was closed while it was computing")
            try:
                yield
            except BaseException as error:
                self._stop()
                if self._failure and not isinstance(error, KeyboardInterrupt):
                    raise HotcoldError(f"the GPU failed, open the model again: {self._failure}") from error
                raise

    def _check_waits(self) -> None:
        layer = self._mailbox.given_up
        if layer is not None and self._mailbox.told_to_stop:  # by close(): whoever ends a token otherwise raises
            raise HotcoldError("the model was closed while it was computing")
        if layer is not None:
            raise HotcoldError(
                f"layer {layer}: the GPU waited {self._patience:g} s for the CPU's neurons and they did not come: the "
                "machine is too busy; try again, with fewer --threads, or --gpu off"
            )

    def _stop(self) -> None:
        """Let the GPU run out, without waiting for the workers, which have stopped. More Ctrl-C cannot stop this."""
        while True:
            try:
                self._mailbox.stop_waiting()
                try:
                    for stream in (self._stream, self._queue.side):
                        self.device.sync(stream)
                    self._staging.settle()
                except DeviceError as error:
                    self._failure = self._failure or str(error)
                self._mailbox.reset()
                return
            except KeyboardInterrupt:
                continue

    @contextlib.contextmanager
    def _undone_by_errors(self) -> Iterator[None]:
        """The GPU's counters cannot go back, so after an error all begin again."""
        try:
            with super()._undone_by_errors():
                yield
        except BaseException:
            if not self._failure and self._team is not None:
                self.reset_stats()
            raise

    # ---- what was computed

    def layer_stats(self) -> LayerStats:
        """What the tokens since reset_stats() computed, and where."""
        with self._busy:
            if self._team is None:
                raise HotcoldError("the model is closed")
            listed = self._state.counters()
        skipped, worked = self._mailbox.visits()
        return shared_stats(self.config, self.weights, self.plan, listed, self._counts.sum(axis=1), worked,
                            self._counted_tokens, vram=self.vram_bytes, name=self.device.name)  # fmt: skip

    def reset_stats(self) -> None:
        super().reset_stats()
        with self._busy:
            if self._team is not None:
                self._state.clear("counters")
        self._mailbox.reset_visits()

    @property
    def vram_bytes(self) -> int:
        """Bytes of the GPU's memory that this engine has allocated, and what the driver took before."""
        return self._device_weights.n_bytes + self._state.n_bytes + self.device.context_bytes

    def close(self) -> None:
        """Stop both sides and give the memory back. May be called twice, and while another thread is in forward()."""
        if self._team is None:
            return
        self._mailbox.stop_waiting()
        super().close()
        with self._busy:
            self._stop()
            for name in ("_executor", "_queue", "_prompt", "_staging", "_state", "_device_weights"):
                self.__dict__.pop(name, None)
            if self._owns_device:
                self.device.close()
        tracer, self._tracer = self._tracer, None
        if tracer:
            tracer.close()
