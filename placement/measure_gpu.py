"""How fast a card reads its memory and hears from the CPU.

In: a device. Out: the fields of Hardware that are about it. Next: machine.py, which keeps them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hotcold.runtime.gpu.device import Device, DeviceError, Stream
from hotcold.runtime.gpu.source import module_source

_PASSES = 6
_READ, _COPIED = 512 << 20, 128 << 20  # bytes at most
_ROUNDS, _LOOKS = 400, 20_000_000
_PATIENCE = 5.0  # seconds for an answer
_LAUNCHES, _PER_LAYER = 200, 12  # of the graph that is measured; of a layer, about


def measure_gpu(device: Device, say: Callable[[str], None]) -> dict[str, Any]:
    """Raises DeviceError, with what the driver says."""
    kernels, stream = device.module(module_source("measure")), device.stream()
    free, total = device.memory()
    say("reading VRAM")
    read = _read(device, kernels("read_memory"), stream, max(min(_READ, free // 4), 1 << 20))
    say("copying over PCIe")
    pcie = _copy(device, stream, max(min(_COPIED, free // 8), 1 << 20))
    say("waiting for the GPU")
    return {"gpu_bandwidth": read, "pcie": pcie, "t_sync": _round_trip(device, kernels("echo"), stream),
            "gpu_overhead": _PER_LAYER * _launch(device, kernels("nothing"), stream), "vram": total,
            "gpu_context": device.context_bytes}  # fmt: skip


def _seconds(device: Device, stream: Stream, work: Callable[[], None], times: int) -> float:
    """Least time of one of `times` pieces of work, queued one after another."""
    best = math.inf
    for _ in range(_PASSES):
        device.sync(stream)
        began = time.perf_counter()
        for _ in range(times):
            work()
        device.sync(stream)
        best = min(best, (time.perf_counter() - began) / times)
    return max(best, 1e-9)


def _read(device: Device, kernel: Any, stream: Stream, n_bytes: int) -> float:
    n4, threads = n_bytes // 16, 256
    blocks = 8 * device.multiprocessors
    x, sums = device.empty((4 * n4,), np.float32), device.empty((blocks * threads,), np.float32)

    def work() -> None:
        kernel((blocks,), (threads,), (x, sums, np.int32(n4)), stream=stream)

    return 16 * n4 / _seconds(device, stream, work, 4)


def _copy(device: Device, stream: Stream, n_bytes: int) -> float:
    host, _ = device.pinned((n_bytes,), np.uint8)
    target = device.empty((n_bytes,), np.uint8)
    return n_bytes / _seconds(device, stream, lambda: device.h2d(target, host, stream), 2)


def _round_trip(device: Device, kernel: Any, stream: Stream) -> float:
    """Seconds from a flag that the CPU sets to the answer that it sees: the median."""
    (ping, ping_d), (pong, pong_d) = (device.pinned((1,), np.int32) for _ in range(2))
    kernel((1,), (1,), (ping_d, pong_d, np.int32(_ROUNDS), np.int32(_LOOKS)), stream=stream)
    times = []
    for i in range(1, _ROUNDS + 1):
        began = time.perf_counter()
        ping[0] = i
        while pong[0] != i:
            if time.perf_counter() - began > _PATIENCE:
                device.sync(stream)  # whose error says more, if there is one
                raise DeviceError(f"{device.name}: a kernel did not see the CPU's flag for {_PATIENCE:.0f} s")
        times.append(time.perf_counter() - began)
    device.sync(stream)
    return float(np.median(times))


def _launch(device: Device, kernel: Any, stream: Stream) -> float:
    """Seconds that one kernel of a graph takes which does nothing."""

    def work() -> None:
        for _ in range(_LAUNCHES):
            kernel((1,), (32,), (np.int32(0),), stream=stream)

    graph = device.capture(stream, work)
    return _seconds(device, stream, lambda: device.replay(graph, stream), 1) / _LAUNCHES
