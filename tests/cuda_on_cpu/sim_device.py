"""A device without a GPU that keeps to hotcold.runtime.gpu.device.Device, and is stricter than a real one.

In: kernels' sources, through build.py. Out: SimDevice. Next: the tests of everything that runs on a device.

Streams are threads that work off a queue each, with random pauses (`jitter`) if wanted. Memory begins as 0xFF, becomes
0xFF again when it is freed, and has guard bytes on both sides. Errors of queued work show at the next sync and stay, as
on a GPU. `counts` counts calls of the protocol, `launches` kernels that really ran, those of replayed graphs included.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cuda_on_cpu.build import Library
from hotcold.runtime.gpu.device import DeviceError, DeviceMemoryError, Dim, Host

ALIGN, GUARD = 256, 256  # bytes; memory of a GPU is aligned so as well
LIMIT = 120.0  # seconds until waiting counts as hanging
Op = Callable[[], None]


class SimArray:
    """Memory of the device. Only the device's calls see its values: NumPy would not see a GPU's either."""

    def __init__(self, values: Host, owner: object) -> None:
        self.values, self.owner = values, owner  # owner: what keeps the memory

    shape = property(lambda self: self.values.shape)
    dtype = property(lambda self: self.values.dtype)
    nbytes = property(lambda self: self.values.nbytes)
    size = property(lambda self: self.values.size)
    ndim = property(lambda self: self.values.ndim)
    flags = property(lambda self: self.values.flags)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int | slice) -> SimArray:
        if not isinstance(index, (int, np.integer, slice)):
            raise DeviceError("a device array is sliced along its first axis only")
        if not isinstance(index, slice):
            if not -len(self.values) <= index < len(self.values):
                raise IndexError(index)
            return SimArray(self.values[int(index)][...], self.owner)
        return SimArray(self.values[index], self.owner)

    def reshape(self, *shape: Any) -> SimArray:
        values = self.values.reshape(*shape)
        assert np.shares_memory(values, self.values) or not values.size, "reshape of a view that is not contiguous"
        return SimArray(values, self.owner)

    def view(self, dtype: npt.DTypeLike) -> SimArray:
        return SimArray(self.values.view(dtype), self.owner)

    def __array__(self, *_: Any, **__: Any) -> Host:
        raise DeviceError("a device array was used as one of NumPy: download it")


class _Memory:
    """Bytes with guards; `payload` outlives this object where queued work still refers to it, as 0xFF."""

    def __init__(self, n: int, fill: int, freed: Callable[[int], None]) -> None:
        raw = np.full(n + 2 * GUARD + ALIGN, 0xA5, np.uint8)
        at = GUARD + -(raw.ctypes.data + GUARD) % ALIGN
        self.raw, self.at, self.n = raw, at, n
        self.payload = raw[at : at + n]
        self.payload[...] = fill
        weakref.finalize(self, _Memory._free, self.payload, n, freed)

    @staticmethod
    def _free(payload: Host, n: int, freed: Callable[[int], None]) -> None:
        payload[...] = 0xFF
        freed(n)

    def intact(self) -> bool:
        return bool((self.raw[: self.at] == 0xA5).all() and (self.raw[self.at + self.n :] == 0xA5).all())


class SimEvent:
    def __init__(self) -> None:
        self.wanted = self.done = 0  # records queued, and passed
        self.changed = threading.Condition()
        self.captured: tuple[_Capture, object] | None = None


class SimStream:
    """In-order queue on a thread. After an error of the device only what others wait for is still done."""

    def __init__(self, device: SimDevice, seed: int) -> None:
        self.device, self.capture = device, None  # type: SimDevice, _Capture | None
        self._queue: queue.SimpleQueue[tuple[Op, bool] | None] = queue.SimpleQueue()
        self._random = random.Random(seed)
        self._thread = threading.Thread(target=self._run, name="sim stream", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            op, always = item
            if self.device.jitter and self._random.random() < 0.5:
                time.sleep(self._random.random() * self.device.jitter)
            if self.device.error is None or always:
                try:
                    op()
                except BaseException as e:
                    self.device.error = self.device.error or e

    def put(self, op: Op, always: bool = False) -> None:
        self._queue.put((op, always))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(LIMIT)


@dataclass
class _Captured:
    """One operator of a captured branch: work, or a meeting point that is recorded or waited for."""

    work: Op | None = None
    record: object | None = None
    wait: object | None = None


class _Capture:
    def __init__(self, origin: SimStream) -> None:
        self.origin = origin
        self.branches: dict[SimStream, list[_Captured]] = {origin: []}
        self.points: dict[object, tuple[SimStream, int]] = {}  # meeting point -> its branch, operators before it
        self.open = True

    def check_joined(self) -> None:
        """Everything on other streams must lie before a point that the first stream waits for."""
        covered = dict.fromkeys(self.branches, 0)
        todo = [(self.origin, len(self.branches[self.origin]))]
        while todo:
            stream, upto = todo.pop()
            fresh = self.branches[stream][covered[stream] : upto]
            covered[stream] = max(covered[stream], upto)
            todo += [self.points[op.wait] for op in fresh if op.wait is not None]
        for stream, ops in self.branches.items():
            if any(op.work for op in ops[covered[stream] :]):
                raise DeviceError("capture: a stream that joined was not waited for at the end (unjoined work)")


@dataclass
class SimGraph:
    origin: list[_Captured]
    branches: list[list[_Captured]]
    streams: list[SimStream] = field(default_factory=list)  # of the branches


class SimDevice:
    name = "simulated"
    compute_capability = (7, 0)
    multiprocessors = 4
    context_bytes = 1 << 20
    has_gemm = True

    def __init__(self, jitter: float = 0.0, schedule: int = 0, memory: int = 1 << 33, seed: int = 0,
                 asan: bool = False) -> None:  # fmt: skip
        """jitter: longest pause before an operator, in seconds. schedule: of the kernels' threads, see cuda_shim.h."""
        self.jitter, self.schedule, self.total, self.asan = jitter, schedule, memory, asan
        self.error: BaseException | None = None
        self.counts: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.used = self.peak = self.pinned_bytes = 0
        self._seed = seed
        self._lock = threading.Lock()
        self._memories: weakref.WeakSet[_Memory] = weakref.WeakSet()
        self._pinned: list[tuple[int, int, _Memory]] = []  # address, bytes
        self._streams: list[SimStream] = []
        self._capturing: _Capture | None = None
        self._failures: dict[tuple[str, bool], int] = {}

    # ---- what tests use beside the protocol

    def fail(self, kernel: str, after: int = 0, at_launch: bool = False) -> None:
        """The launch of `kernel` after so many more fails: when it runs, or already when it is called."""
        self._failures[kernel, at_launch] = after

    def check_guards(self) -> None:
        """Raise if a kernel wrote beside the memory that is allocated now."""
        if not all(memory.intact() for memory in [*self._memories, *(m for _, _, m in self._pinned)]):
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
        memory = _Memory(n, 0xFF, self._freed)
        self._memories.add(memory)
        return SimArray(memory.payload.view(dtype).reshape(shape), memory)

    def _freed(self, n: int) -> None:
        with self._lock:
            self.used -= n

    def pinned(self, shape: Dim, dtype: npt.DTypeLike) -> tuple[Host, SimArray]:
        self._not_capturing("allocating")
        n = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = _Memory(n, 0, lambda _: None)  # stays until close()
        self._pinned.append((memory.payload.ctypes.data, n, memory))
        self.pinned_bytes += n
        host = memory.payload.view(dtype).reshape(shape)
        return host, SimArray(host, memory)

    def memory(self) -> tuple[int, int]:
        return self.total - self.context_bytes - self.used, self.total

    def upload(self, values: Host, out: Any = None) -> SimArray:
        self._not_capturing("a copy")
        target = self.empty(values.shape, values.dtype) if out is None else out
        self._same(target, values)
        target.values[...] = values
        self.counts["upload"] += 1
        return target

    def download(self, source: SimArray) -> Host:
        self._not_capturing("a copy")
        self.counts["download"] += 1
        return source.values.copy()

    def h2d(self, target: SimArray, source: Host, stream: SimStream) -> None:
        self._copy("h2d", target.values, source, source, stream, target)

    def d2h(self, target: Host, source: SimArray, stream: SimStream) -> None:
        self._copy("d2h", target, source.values, target, stream, source)

    def _copy(self, what: str, target: Host, source: Host, host: Host, stream: SimStream, array: SimArray) -> None:
        self._same(array, host)
        first = host.ctypes.data
        if not any(begin <= first and first + host.nbytes <= begin + n for begin, n, _ in self._pinned):
            raise DeviceError(f"{what}: the host's array is not pinned")
        if stream.capture is not None:
            raise DeviceError(f"{what}: no copies while capturing")
        self.counts[what] += 1
        self._put(stream, lambda: np.copyto(target, source))

    @staticmethod
    def _same(array: SimArray, host: Host) -> None:
        if not isinstance(array, SimArray) or not isinstance(host, np.ndarray):
            kinds = f"{type(array).__name__} and {type(host).__name__}"
            raise DeviceError(f"copy between {kinds}: not an array of the device and one of NumPy")
        if array.shape != host.shape or array.dtype != host.dtype:
            raise DeviceError(f"copy between {array.dtype}{array.shape} and {host.dtype}{host.shape}: not the same")
        if not array.flags.c_contiguous or not host.flags.c_contiguous:
            raise DeviceError("copy of an array that is not C-contiguous")

    def gemm(self, a: SimArray, b: SimArray, c: SimArray, stream: SimStream, *, add: bool = False) -> None:
        if stream.capture is not None:
            raise DeviceError("gemm: not while capturing")
        m, n, k = (*c.shape, a.shape[-1])
        kinds = (a.dtype, b.dtype, c.dtype) == (np.float16, np.float16, np.float32)
        if not kinds or a.shape != (m, k) or b.shape != (n, k) or not all(x.flags.c_contiguous for x in (a, b, c)):
            raise DeviceError(f"gemm: {a.dtype}{a.shape} by {b.dtype}{b.shape} into {c.dtype}{c.shape}")
        x, w, y = a.values, b.values, c.values

        def run() -> None:
            product = x.astype(np.float32) @ w.astype(np.float32).T
            np.copyto(y, y + product if add else product)

        self.counts["gemm"] += 1
        self._put(stream, run)

    # ---- order

    def stream(self) -> SimStream:
        self._seed += 1
        self._streams.append(SimStream(self, self._seed))
        return self._streams[-1]

    def event(self) -> SimEvent:
        return SimEvent()

    def _put(self, stream: SimStream, op: Op) -> None:
        if stream.capture is not None:
            stream.capture.branches[stream].append(_Captured(work=op))
        else:
            stream.put(op)

    def record(self, event: SimEvent, stream: SimStream) -> None:
        self.counts["record"] += 1
        if stream.capture is not None:
            point, ops = object(), stream.capture.branches[stream]
            stream.capture.points[point] = stream, len(ops)
            ops.append(_Captured(record=point))
            event.captured = stream.capture, point
            return
        event.captured = None
        event.wanted += 1
        turn = event.wanted

        def passed() -> None:
            with event.changed:
                event.done = max(event.done, turn)
                event.changed.notify_all()

        stream.put(passed, always=True)

    def wait(self, stream: SimStream, event: SimEvent) -> None:
        self.counts["wait"] += 1
        if event.captured is not None:
            capture, point = event.captured
            if not capture.open or stream.capture not in (None, capture):
                raise DeviceError("wait: the event was recorded in another capture")
            stream.capture = capture
            capture.branches.setdefault(stream, []).append(_Captured(wait=point))
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
    def _capture(self, stream: SimStream) -> Iterator[_Capture]:
        capture = stream.capture = self._capturing = _Capture(stream)
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
            raise DeviceError("replay: not while capturing")
        self.counts["replay"] += 1
        points: dict[object, SimEvent] = {}
        for branch in (graph.origin, *graph.branches):
            for op in branch:
                if op.record is not None:
                    points[op.record] = SimEvent()
        for where, branch in zip((stream, *graph.streams), (graph.origin, *graph.branches), strict=True):
            for op in branch:
                if op.record is not None:
                    where.put(lambda event=points[op.record]: _pass(event), always=True)
                elif op.wait is not None:
                    where.put(lambda event=points[op.wait]: self._wait_for(event, 1))
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


def _pass(event: SimEvent) -> None:
    with event.changed:
        event.done = 1
        event.changed.notify_all()
