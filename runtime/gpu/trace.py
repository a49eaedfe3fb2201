"""A timeline of tokens: what ran on the GPU when, what each of the CPU's workers did meanwhile, and who waited.

In: times that kernels and workers note. Out: a file of Chrome's trace format. Next: ui.perfetto.dev shows it.

Kernels note the GPU's clock, workers the system's. How far these are apart is measured before every token, by a kernel
that is noted between two looks at the system's clock: they agree within half of that time.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.runtime.atomic import replacing
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gpu.device import Array, Device, Kernel, Stream
from hotcold.runtime.plan import Op, Plan

MAX_TOKENS = 200  # that are kept: some thousand events each
_HOST, _GPU = 1, 2  # processes of the timeline
_MAIN, _EARLY = 0, 1  # streams


class Tracer:
    """Mutable: the events so far. close() writes them."""

    def __init__(
        self, path: str | os.PathLike[str], plan: Plan, device: Device, stamp: Kernel, stamps: Array, n_threads: int
    ) -> None:  # fmt: skip
        """stamps: int64 [2, steps] of the GPU. Raises HotcoldError where the file cannot be written."""
        self._path, self._plan, self._device, self._kernel, self._stamps = Path(path), plan, device, stamp, stamps
        if not self._path.parent.is_dir():
            raise HotcoldError(f"--trace {self._path}: no such folder: {self._path.parent}")
        self._ops = plan.gpu(many=False)
        self.workers = np.zeros((plan.config.n_layer, n_threads, 3), np.int64)  # walk.LISTENS and so on
        self._events: list[dict[str, Any]] = []
        self._tokens = 0
        self._name(_HOST, "CPU", ["host", *(f"worker {t}" for t in range(n_threads))])
        self._name(_GPU, f"GPU: {device.name}", ["stream", "second stream: predictors"])

    def restart(self) -> None:
        """Forget the tokens so far."""
        self._events, self._tokens = [e for e in self._events if e["ph"] == "M"], 0

    @property
    def full(self) -> bool:
        return self._tokens >= MAX_TOKENS

    def stamp(self, which: int, step: int, stream: Stream) -> None:
        """Queue the noting of a step's begin (0) or end (1)."""
        to = self._stamps[which][step : step + 1]
        self._kernel((1,), (1,), (to,), stream=stream)

    def begin(self, stream: Stream) -> int:
        """Before a token, with nothing under way: the GPU's clock minus the system's, in ns."""
        self.workers[:] = 0
        before = time.perf_counter_ns()
        self.stamp(0, 0, stream)
        self._device.sync(stream)
        after = time.perf_counter_ns()
        return int(self._device.download(self._stamps)[0, 0]) - (before + after) // 2

    def token(self, pos: int, began: int, on_gpu: int, offset: int, *, head: bool) -> None:
        """A token is done: it began at `began`, its layers on the GPU at on_gpu (ns of the system's clock)."""
        if self.full:
            return
        self._tokens += 1
        ended = time.perf_counter_ns()
        self._add(_HOST, 0, f"token at {pos}", began, ended)
        if on_gpu > began:
            self._add(_HOST, 0, "layers of the CPU", began, on_gpu)
        times = self._device.download(self._stamps) - offset  # [2, steps]
        for step, op in enumerate(self._ops):
            if head or not op.head_only:
                self._add(_GPU, _EARLY if op.early else _MAIN, _title(op), *times[:, step].tolist(), layer=op.layer)
        for layer in range(self._plan.placement.first if self._plan.placement else 0, self._plan.config.n_layer):
            for worker, (listens, received, answered) in enumerate(self.workers[layer].tolist(), 1):
                if not listens or not received:
                    continue
                self._add(_HOST, worker, f"wait {layer}", listens, received, layer=layer)
                if answered >= received:
                    self._add(_HOST, worker, f"cold {layer}", received, answered, layer=layer)
                else:
                    self._events.append({"name": f"skip {layer}", "ph": "i", "s": "t", "pid": _HOST, "tid": worker,
                                         "ts": received / 1e3})  # fmt: skip

    def block(self, n: int, pos: int, began: int) -> None:
        """A block of a prompt is done."""
        if not self.full:
            self._add(_HOST, 0, f"block of {n} tokens at {pos}", began, time.perf_counter_ns())

    def close(self) -> None:
        """Write the file, whole or not at all."""
        with replacing(self._path, force=True) as file:
            file.write(json.dumps({"traceEvents": self._events, "displayTimeUnit": "ns"}).encode() + b"\n")

    def _add(self, process: int, thread: int, name: str, begin: int, end: int, **more: int) -> None:
        self._events.append({"name": name, "ph": "X", "pid": process, "tid": thread, "ts": begin / 1e3,
                             "dur": max(0, end - begin) / 1e3, "args": more})  # fmt: skip

    def _name(self, process: int, name: str, threads: list[str]) -> None:
        self._events.append({"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}})
        self._events += [{"name": "thread_name", "ph": "M", "pid": process, "tid": n, "args": {"name": thread}}
                         for n, thread in enumerate(threads)]  # fmt: skip


def _title(op: Op) -> str:
    matrix = next((m for m in op.weights if m is not None), None)
    part = ""
    if op.kind in ("matmul", "hidden") and matrix is not None:
        part = " " + matrix.name.removeprefix(f"blk.{op.layer}.").removesuffix(".weight")
    return f"{op.kind}{part}" + (f" {op.layer}" if op.layer >= 0 else "")

