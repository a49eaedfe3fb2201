"""A timeline of tokens and blocks of prompts: what ran on the GPU when, what each of the CPU's workers did meanwhile,
and who waited. Of a block's layers on the CPU there is one span for all workers.

In: times that kernels and workers note. Out: a file of Chrome's trace format. Next: ui.perfetto.dev shows it.

Kernels note the GPU's clock, workers the system's. How far these are apart is measured before every token or block, by
a kernel that is noted between two looks at the system's clock: they agree within half of that time.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.runtime.atomic import replacing
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gpu.device import Array, Device, Kernel, Stream
from hotcold.runtime.plan import Op, Plan

MAX_RUNS = 200  # tokens and blocks that are kept: some thousand events each
_HOST, _GPU = 1, 2  # processes of the timeline
_MAIN, _EARLY = 0, 1  # streams


class Tracer:
    """Mutable: the events so far. close() writes them."""

    def __init__(
        self, path: str | os.PathLike[str], plan: Plan, device: Device, stamp: Kernel, stamps: Array, n_threads: int,
        notify: Callable[[str], None],
    ) -> None:  # fmt: skip
        """stamps: int64 [2, steps] of the GPU, for the longer of both programs. notify is told where not all was kept.
        Raises HotcoldError where the file cannot be written."""
        self._notify = notify
        self._path, self._plan, self._device, self._kernel, self._stamps = Path(path), plan, device, stamp, stamps
        if not self._path.parent.is_dir():
            raise HotcoldError(f"--trace {self._path}: no such folder: {self._path.parent}")
        self._first = plan.placement.first if plan.placement else 0
        self.workers = np.zeros((plan.config.n_layer, n_threads, 3), np.int64)  # walk.LISTENS and so on
        self._events: list[dict[str, Any]] = []
        self._kept = self._left_out = 0  # tokens and blocks
        self._name(_HOST, "CPU", ["host", *(f"worker {t}" for t in range(n_threads))])
        self._name(_GPU, f"GPU: {device.name}", ["stream", "second stream: predictors"])

    def restart(self) -> None:
        """Forget what was so far."""
        self._events = [e for e in self._events if e["ph"] == "M"]
        self._kept = self._left_out = 0

    def stamp(self, which: int, step: int, stream: Stream) -> None:
        """Queue the noting of a step's begin (0) or end (1)."""
        to = self._stamps[which][step : step + 1]
        self._kernel((1,), (1,), (to,), stream=stream)

    def begin(self, stream: Stream) -> int:
        """Before a token or a block, with nothing under way: the GPU's clock minus the system's, in ns."""
        self.workers[:] = 0
        before = time.perf_counter_ns()
        self.stamp(0, 0, stream)
        self._device.sync(stream)
        after = time.perf_counter_ns()
        return int(self._device.download(self._stamps)[0, 0]) - (before + after) // 2

    def token(self, pos: int, began: int, on_gpu: int, offset: int, *, head: bool) -> None:
        """A token is done: it began at `began`, its layers on the GPU at on_gpu (ns of the system's clock)."""
        if not self._add_run(f"token at {pos}", began, on_gpu):
            return
        self._add_gpu([op for op in self._plan.gpu(many=False) if head or not op.head_only], offset)
        for layer in range(self._first, self._plan.config.n_layer):
            for worker, (listens, received, answered) in enumerate(self.workers[layer].tolist(), 1):
                if not listens or not received:
                    continue
                self._add(_HOST, worker, f"wait {layer}", listens, received, layer=layer)
                if answered >= received:
                    self._add(_HOST, worker, f"cold {layer}", received, answered, layer=layer)
                else:
                    self._events.append({"name": f"skip {layer}", "ph": "i", "s": "t", "pid": _HOST, "tid": worker,
                                         "ts": received / 1e3})  # fmt: skip

    def block(self, n: int, pos: int, began: int, on_gpu: int, offset: int, *, head: bool) -> None:
        """A block of a prompt is done; as token()."""
        if self._add_run(f"block of {n} tokens at {pos}", began, on_gpu):
            self._add_gpu([op for op in self._plan.gpu(many=True) if head or not op.head_only], offset)

    def close(self) -> None:
        """Write the file, whole or not at all."""
        counts = {"tokens and blocks": self._kept, "left out after them": self._left_out}
        content = {"traceEvents": self._events, "displayTimeUnit": "ns", "otherData": counts}
        with replacing(self._path, force=True) as file:
            file.write(json.dumps(content).encode() + b"\n")
        if self._left_out:
            self._notify(f"--trace {self._path}: has the first {self._kept} tokens and blocks of prompts, "
                         f"{self._left_out} more are left out")  # fmt: skip

    def _add_run(self, name: str, began: int, on_gpu: int) -> bool:
        """-> whether there is room for it."""
        if self._kept >= MAX_RUNS:
            self._left_out += 1
            return False
        self._kept += 1
        self._add(_HOST, 0, name, began, time.perf_counter_ns())
        if on_gpu > began:
            self._add(_HOST, 0, "layers of the CPU", began, on_gpu)
        return True

    def _add_gpu(self, ops: list[Op], offset: int) -> None:
        """The first operators of a program, from the GPU's stamps."""
        times = self._device.download(self._stamps) - offset  # [2, steps]
        for step, op in enumerate(ops):
            self._add(_GPU, _EARLY if op.early else _MAIN, _title(op), *times[:, step].tolist(), layer=op.layer)

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

