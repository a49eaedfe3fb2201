"""A device without a GPU that keeps to hotcold.runtime.gpu.device.Device, and is stricter than a real one.

In: kernels' sources, through build.py. Out: SimDevice. Next: the tests of everything that runs on a device.

Streams are threads that work off a queue each, with random pauses (`jitter`) if wanted. Memory begins as 0xFF, becomes
0xFF again when it is freed, and has guard bytes on both sides. Errors of queued work show at the next sync and stay, as
on a GPU. `counts` counts calls of the protocol, `launches` kernels that really ran, those of replayed graphs included.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cuda_on_cpu.build import Library
from cuda_on_cpu.sim_memory import Memory, SimArray
from cuda_on_cpu.sim_streams import LIMIT, Capture, Captured, Op, SimEvent, SimGraph, SimStream
from hotcold.runtime.gpu.device import DeviceError, DeviceMemoryError, Dim, Host
from hotcold.runtime.gpu.rules import PinnedRanges, check_copy, check_gemm


class SimDevice:
    name = "simulated"
    compute_capability = (7, 0)
    multiprocessors = 4
    context_bytes = 1 << 20
    has_gemm = True

    def __init__(self, jitter: float = 0.0, schedule: int = 0, memory: int = 1 << 33, seed: int = 0,
                 asan: bool = False) -> None:  # fmt: skip
        """jitter: longest pause before an operator, in seconds, but for the long ones of sim_streams.py.
        schedule: of the kernels' threads, see cuda_shim.h."""
        self.jitter, self.schedule, self.total, self.asan = jitter, schedule, memory, asan
        self.error: BaseException | None = None
        self.counts: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.used = self.peak = 0
        self._seed = seed
        self._lock = threading.Lock()
        self._memories: weakref.WeakSet[Memory] = weakref.WeakSet()
        self._pinned = PinnedRanges()
        self._pinned_memories: list[Memory] = []
        self._streams: list[SimStream] = []
        self._capturing: Capture | None = None
        self._failures: dict[tuple[str, bool], int] = {}

    # ---- what tests use beside the protocol

    @property
    def pinned_bytes(self) -> int:
        return self._pinned.n_bytes

    def fail(self, kernel: str, after: int = 0, at_launch: bool = False) -> None:
        """The launch of `kernel` after so many more fails: when it runs, or already when it is called."""
        self._failures[kernel, at_launch] = after

    def check_guards(self) -> None:
        """Raise if a kernel wrote beside the memory that is allocated now."""
        if not all(memory.intact() for memory in [*self._memories, *self._pinned_memories]):
            raise AssertionError("something was written beside a device array")

    def reset_counts(self) -> None:
        self.counts.clear()
        self.launches.clear()

    def _due(self, kernel: str, at_launch: bool) -> bool:
        with self._lock:
            left = self._failures.get((kernel, at_launch))
            if left is None:
                return False
            if left:
                self._failures[kernel, at_launch] = left - 1
                return False
            del self._failures[kernel, at_launch]
            return True

    # ---- kernels

    def module(self, source: str) -> Callable[[str], Any]:
        self._not_capturing("loading a module")
        library = Library(source, self.asan)

        def get(name: str) -> Callable[..., None]:
            if name not in library.signatures:
                raise DeviceError(f"kernel {name}: not in this module")
            signature = library.signatures[name]

            def launch(grid: Dim, block: Dim, args: tuple[Any, ...], *, shared_mem: int = 0, stream: Any) -> None:
                if not signature.check(grid, block, args, shared_mem):
                    return
                self.counts["launch"] += 1
                if self._due(name, True):
                    raise DeviceError(f"kernel {name}: launch failed, as the test wants")
                kept = [a.values if isinstance(a, SimArray) else a for a in args]
                values = [a.ctypes.data if isinstance(a, np.ndarray) else 0 if a is None else a for a in kept]

                def run(kept: object = kept) -> None:
                    if self._due(name, False):
                        raise DeviceError(f"kernel {name}: failed while running, as the test wants")
                    with self._lock:
                        self.launches[name] += 1
                    if problem := library.run(name, grid, block, values, shared_mem, self.schedule):
                        raise DeviceError(f"kernel {name}: {problem}")

                self._put(stream, run)

            return launch

        return get

    # ---- memory

    def empty(self, shape: Dim, dtype: npt.DTypeLike) -> SimArray:
        self._not_capturing("allocating")
        n = int(np.prod(shape)) * np.dtype(dtype).itemsize
        with self._lock:
            free = self.total - self.context_bytes - self.used
            if n > free:
                raise DeviceMemoryError(n, free)
            self.used += n
            self.peak = max(self.peak, self.used)
        memory = Memory(n, 0xFF, self._freed, self.asan)
        self._memories.add(memory)
        return SimArray(memory.payload.view(dtype).reshape(shape), memory)

    def _freed(self, n: int) -> None:
        with self._lock:
            self.used -= n

    def pinned(self, shape: Dim, dtype: npt.DTypeLike) -> tuple[Host, SimArray]:
        self._not_capturing("allocating")
        n = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = Memory(n, 0, lambda _: None, self.asan)  # stays until close()
        self._pinned_memories.append(memory)
        self._pinned.add(memory.payload.ctypes.data, n)
        host = memory.payload.view(dtype).reshape(shape)
        return host, SimArray(host, memory)

    def memory(self) -> tuple[int, int]:
        return self.total - self.context_bytes - self.used, self.total

    def upload(self, values: Host, out: Any = None) -> SimArray:
        self._not_capturing("a copy")
        values = np.asarray(values, order="C")
        target = self.empty(values.shape, values.dtype) if out is None else out
        check_copy("upload", target, values)
        target.values[...] = values
        self.counts["upload"] += 1
        return target

    def download(self, source: Any) -> Host:
        self._not_capturing("a copy")
        self.counts["download"] += 1
        return source.values.copy()

    def h2d(self, target: Any, source: Host, stream: SimStream) -> None:
        check_copy("h2d", target, source)
        self._copy("h2d", target.values, source, source, stream)

    def d2h(self, target: Host, source: Any, stream: SimStream) -> None:
        check_copy("d2h", source, target)
        self._copy("d2h", target, source.values, target, stream)

    def _copy(self, what: str, target: Host, source: Host, host: Host, stream: SimStream) -> None:
        self._pinned.check(what, host)
        if stream.capture is not None:
            raise DeviceError(f"{what} is not allowed while capturing")
        self.counts[what] += 1
        self._put(stream, lambda: np.copyto(target, source))

    def gemm(self, a: Any, b: Any, c: Any, stream: SimStream) -> None:
        if stream.capture is not None:
            raise DeviceError("gemm is not allowed while capturing")
        check_gemm(a, b, c)
        x, w, y = a.values, b.values, c.values
        self.counts["gemm"] += 1
        self._put(stream, lambda: np.copyto(y, x.astype(np.float32) @ w.astype(np.float32).T))

    # ---- order

    def stream(self) -> SimStream:
        self._seed += 1
        self._streams.append(SimStream(self, self._seed, bool(self._streams)))
        return self._streams[-1]

    def event(self) -> SimEvent:
        return SimEvent()

    def _put(self, stream: SimStream, op: Op) -> None:
        if stream.capture is not None:
            stream.capture.branches[stream].append(Captured(work=op))
        else:
            stream.put(op)

    def record(self, event: SimEvent, stream: SimStream) -> None:
        self.counts["record"] += 1
        if stream.capture is not None:
            point, ops = object(), stream.capture.branches[stream]
            stream.capture.points[point] = stream, len(ops)
            ops.append(Captured(record=point))
            event.captured = stream.capture, point
            return
        event.captured = None
        event.wanted += 1
        turn = event.wanted

        stream.put(lambda: event.passed(turn), always=True)

    def wait(self, stream: SimStream, event: SimEvent) -> None:
        self.counts["wait"] += 1
        if event.captured is not None:
            capture, point = event.captured
            if not capture.open or stream.capture not in (None, capture):
                raise DeviceError("wait: the event was recorded in another capture")
            stream.capture = capture
            capture.branches.setdefault(stream, []).append(Captured(wait=point))
            return
        if stream.capture is not None:
            raise DeviceError("wait: the event was recorded outside the capture")
        turn = event.wanted
        stream.put(lambda: self._wait_for(event, turn))

    def _wait_for(self, event: SimEvent, turn: int) -> None:
        end = time.monotonic() + LIMIT
        with event.changed:
            while event.done < turn:
                event.changed.wait(0.05)
                if self.error is not None:
                    return
                if time.monotonic() > end:
                    raise DeviceError(f"an event was not passed within {LIMIT:.0f} s")

    def sync_event(self, event: SimEvent) -> None:
        self._not_capturing("a sync")
        self.counts["sync_event"] += 1
        self._wait_for(event, event.wanted)
        self._raise()

    def sync(self, stream: SimStream) -> None:
        self._not_capturing("a sync")
        self.counts["sync"] += 1
        reached = threading.Event()
        stream.put(reached.set, always=True)
        end = time.monotonic() + LIMIT
        while not reached.wait(0.05):
            if time.monotonic() > end:
                raise DeviceError(f"a stream was not done within {LIMIT:.0f} s")
        self._raise()

    def _raise(self) -> None:
        if self.error is not None:
            raise DeviceError(f"the device failed: {self.error}") from self.error

    # ---- graphs

    @contextmanager
    def _capture(self, stream: SimStream) -> Iterator[Capture]:
        capture = stream.capture = self._capturing = Capture(stream)
        try:
            yield capture
        finally:
            self._capturing, capture.open = None, False
            for joined in capture.branches:
                joined.capture = None

    def capture(self, stream: SimStream, work: Callable[[], None]) -> SimGraph:
        self._not_capturing("another capture")
        with self._capture(stream) as capture:
            work()
        capture.check_joined()
        others = [ops for branch, ops in capture.branches.items() if branch is not stream]
        return SimGraph(capture.branches[stream], others, [self.stream() for _ in others])

    def replay(self, graph: SimGraph, stream: SimStream) -> None:
        if stream.capture is not None:
            raise DeviceError("replay is not allowed while capturing")
        self.counts["replay"] += 1
        branches = (graph.origin, *graph.branches)
        points = {op.record: SimEvent() for branch in branches for op in branch if op.record is not None}
        for where, branch in zip((stream, *graph.streams), branches, strict=True):
            for op in branch:
                if op.record is not None:
                    where.put(partial(points[op.record].passed, 1), always=True)
                elif op.wait is not None:
                    where.put(partial(self._wait_for, points[op.wait], 1))
                elif op.work is not None:
                    where.put(op.work)

    def _not_capturing(self, what: str) -> None:
        if self._capturing is not None:
            raise DeviceError(f"{what} is not allowed while capturing")

    def array_module(self) -> Any:
        return np

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._streams.clear()
        try:
            self.check_guards()
        finally:
            self._pinned.clear()
            self._pinned_memories.clear()

