"""What every device checks before it does something: copies and matrix products. Launches: source.py.

In: arrays as they are passed. Out: DeviceError where a real device would fail, or copy something else. Next:
cupy_device.py, and the simulated device of the tests.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hotcold.runtime.gpu.device import DeviceError, Host


class PinnedRanges:
    """Where the pinned memory of a device lies."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # first address, end
        self.n_bytes = 0

    def add(self, address: int, n: int) -> None:
        self._ranges.append((address, address + n))
        self.n_bytes += n

    def check(self, what: str, host: Host) -> None:
        first = host.ctypes.data
        if not any(begin <= first and first + host.nbytes <= end for begin, end in self._ranges):
            raise DeviceError(f"{what}: the host's array is not pinned")

    def clear(self) -> None:
        self._ranges.clear()
        self.n_bytes = 0


def check_copy(what: str, array: Any, host: Any) -> None:
    """A copy between the device's `array` and NumPy's `host` is one of equal, contiguous bytes."""
    if isinstance(array, np.ndarray) or not hasattr(array, "flags") or not isinstance(host, np.ndarray):
        kinds = f"{type(array).__name__} and {type(host).__name__}"
        raise DeviceError(f"{what}: between {kinds}, not an array of the device and one of NumPy")
    if array.shape != host.shape or array.dtype != host.dtype:
        raise DeviceError(f"{what}: between {array.dtype}{array.shape} and {host.dtype}{host.shape}, not the same")
    if not array.flags.c_contiguous or not host.flags.c_contiguous:
        raise DeviceError(f"{what}: an array is not C-contiguous")


def check_gemm(a: Any, b: Any, c: Any) -> tuple[int, int, int]:
    """-> m, n, k of c[m, n] = a[m, k] @ b[n, k].T"""
    shapes = [tuple(x.shape) for x in (a, b, c)]
    kinds = (a.dtype, b.dtype, c.dtype) == (np.float16, np.float16, np.float32)
    if kinds and all(len(s) == 2 for s in shapes) and all(x.flags.c_contiguous for x in (a, b, c)):
        (m, k), (n, k2), out = shapes
        if k == k2 and out == (m, n):
            return m, n, k
    raise DeviceError(f"gemm: {a.dtype}{shapes[0]} by {b.dtype}{shapes[1]} into {c.dtype}{shapes[2]}")
