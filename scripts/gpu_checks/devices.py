"""The device that is checked: a card, or the one made of the CPU that the tests have.

In: Settings. Out: an open Device; how long queued work takes on it. Next: every part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from gpu_checks.settings import Settings
from hotcold.runtime.gpu.device import Device, open_device


def open_for(settings: Settings) -> Device:
    """Raises DeviceUnavailable."""
    if settings.sim:
        from cuda_on_cpu.sim_device import SimDevice

        return SimDevice()
    return open_device()


def seconds_of(device: Device, stream: Any, work: Callable[[], None], at_least: float = 0.1) -> float:
    """Of one work() that queues something, by the host's clock: best of three series that take so long at least."""
    work()
    device.sync(stream)
    n = 1
    while True:
        found = _series(device, stream, work, n)
        if found * n >= at_least:
            return min(found, *(_series(device, stream, work, n) for _ in range(2)))
        n = min(100 * n, int(n * 1.3 * at_least / max(found * n, 1e-9)) + 1)


def _series(device: Device, stream: Any, work: Callable[[], None], n: int) -> float:
    began = time.perf_counter()
    for _ in range(n):
        work()
    device.sync(stream)
    return (time.perf_counter() - began) / n
