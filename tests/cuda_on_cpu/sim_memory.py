"""Memory of the simulated device.

In: sizes. Out: SimArray, whose values only the device sees; Memory, which has guards and ends as 0xFF. Next:
sim_device.py.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.runtime.gpu.device import DeviceError, Host

ALIGN, GUARD = 256, 256  # bytes; memory of a GPU is aligned so as well
UNCACHED = 2048  # NumPy keeps smaller blocks for itself when they are freed, and poison would stay in them


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


class Memory:
    """Bytes with guards; `payload` outlives this object where queued work still refers to it, as 0xFF."""

    def __init__(self, n: int, fill: int, freed: Callable[[int], None], asan: bool) -> None:
        raw = np.full(max(n + 2 * GUARD + ALIGN, UNCACHED), 0xA5, np.uint8)
        at = GUARD + -(raw.ctypes.data + GUARD) % ALIGN
        self.raw, self.at, self.n = raw, at, n
        self.payload = raw[at : at + n]
        self.payload[...] = fill
        if asan:  # the guards are no kernel's business; the sanitizer forgets them with the allocation
            poison = ctypes.CDLL(None)["__asan_poison_memory_region"]
            for part in (raw[:at], raw[at + n :]):
                poison(ctypes.c_void_p(part.ctypes.data), ctypes.c_size_t(len(part)))
        weakref.finalize(self, Memory._free, self.payload, n, freed)

    @staticmethod
    def _free(payload: Host, n: int, freed: Callable[[int], None]) -> None:
        payload[...] = 0xFF
        freed(n)

    def intact(self) -> bool:
        return bool((self.raw[: self.at] == 0xA5).all() and (self.raw[self.at + self.n :] == 0xA5).all())
