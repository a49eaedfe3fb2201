"""This machine's CPU, and how fast it reads memory: the bound of every figure in tokens per second.

In: a number of threads. Out: a name, bytes per second. Next: bench.py compares a model's speed with it;
placement/machine.py keeps it as a figure of the machine.
"""

from __future__ import annotations

import platform
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from hotcold.runtime.gguf_file import safe_text

_LEAST_BUFFER, _MOST_BUFFER = 256 << 20, 1 << 30  # bytes that are read: more than any cache
_PASSES = 6


def cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return safe_text(found[1] if found else platform.processor() or platform.machine() or "unknown", 100)


def last_level_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes; 0 where the system does not say."""
    units = {"K": 10, "M": 20, "G": 30}
    sizes = [0]
    for path in folder.glob("index*/size"):
        try:
            text = path.read_text().strip()
            shift = units.get(text[-1:], 0)
            sizes.append(int(text[:-1] if shift else text) << shift)
        except (OSError, ValueError):
            continue
    return max(sizes)


class ReadTest:
    """A buffer larger than the caches, read by as many threads as asked. Its memory goes with the object."""

    def __init__(self, cache: int) -> None:
        """cache: bytes of the last-level cache, 0 where it is not known."""
        wanted = min(max(_LEAST_BUFFER, 8 * cache), _MOST_BUFFER, psutil.virtual_memory().available // 4)
        # Written, or every page would be the same empty one.
        self._data = np.ones(max(wanted, 1 << 20) // 8, np.uint64)
        self._read = _compiled_read()
        self._read(self._data[:8])
        self._passes = 0

    def measure(self, threads: int) -> float:
        """Bytes per second that all threads together read: the fastest of the passes of about a second."""
        parts = np.array_split(self._data, threads)
        first = 0.0
        if not self._passes:  # others use the machine too
            first = _best_pass(self._read, parts, _PASSES)
            self._passes = max(_PASSES, min(100, int(first / self._data.nbytes)))
        return max(first, _best_pass(self._read, parts, self._passes))


def _compiled_read() -> Callable[[np.ndarray], Any]:
    from numba import njit

    @njit(nogil=True)
    def read(values):
        """Four streams, which come in faster than one. The sums keep the loop alive."""
        quarter = len(values) // 4
        s0 = s1 = s2 = s3 = np.uint64(0)
        for i in range(quarter):
            s0 ^= values[i]
            s1 ^= values[i + quarter]
            s2 ^= values[i + 2 * quarter]
            s3 ^= values[i + 3 * quarter]
        return s0 ^ s1 ^ s2 ^ s3

    compiled: Callable[[np.ndarray], Any] = read
    return compiled


def _best_pass(read: Callable[[np.ndarray], object], parts: Sequence[np.ndarray], passes: int) -> float:
    """Bytes per second of the fastest pass, from when the first thread starts to when the last one is done."""
    spans = np.zeros((len(parts), passes, 2))
    barrier = threading.Barrier(len(parts))

    def work(number: int) -> None:
        for k in range(passes):
            barrier.wait()
            spans[number, k, 0] = time.perf_counter()
            read(parts[number])
            spans[number, k, 1] = time.perf_counter()

    workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(parts))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = (spans[:, :, 1].max(0) - spans[:, :, 0].min(0)).min()
    return sum(p.nbytes for p in parts) / max(float(seconds), 1e-9)
