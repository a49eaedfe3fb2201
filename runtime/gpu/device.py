"""Everything the runtime needs from a GPU, as some twenty calls.

In: nothing. Out: Device (the protocol), open_device(), the errors. Next: cupy_device.py (a real card); the tests have a
second device without a GPU, whose kernels are the same files compiled for the CPU.

Streams run in order, beside each other. An error of queued work shows at a later sync, never earlier. What is queued
keeps no memory alive: who launches keeps the arrays until a sync.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hotcold.runtime.errors import HotcoldError

Dim = tuple[int, ...]
Host = npt.NDArray[Any]
Stream = Any
Event = Any
Graph = Any


class DeviceError(HotcoldError):
    """The device, its driver or a queued kernel failed, or was used against its rules."""


class DeviceMemoryError(DeviceError):
    """An allocation that the device's memory has no room for."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"GPU memory: {wanted} bytes wanted, {free} free")
        self.wanted, self.free = wanted, free


class DeviceUnavailable(DeviceError):
    """There is no GPU that can be used. `reason` completes "no GPU: …" and says what to do, in one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"no GPU: {reason}")
        self.reason = reason


class Array(Protocol):
    """Memory of the device, C-contiguous. Slices along the first axis are views."""

    @property
    def shape(self) -> Dim: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def nbytes(self) -> int: ...
    def __getitem__(self, index: int | slice) -> Array: ...
    def reshape(self, *shape: int) -> Array: ...
    def view(self, dtype: npt.DTypeLike) -> Array: ...


class Kernel(Protocol):
    """Arguments must have the types of the kernel's signature: np.int32, np.float32, np.int64, device arrays or None.

    A grid with a 0 launches nothing. Pinned arrays go in as their device view.
    """

    def __call__(
        self, grid: Dim, block: Dim, args: tuple[Any, ...], *, shared_mem: int = 0, stream: Stream
    ) -> None: ...  # fmt: skip


class Device(Protocol):
    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    context_bytes: int  # of the device's memory, for context and kernels: final once these are loaded; measured
    used: int  # bytes of arrays now
    peak: int  # the most there were at once

    @property
    def has_gemm(self) -> bool:
        """Whether gemm() can be called: cuBLAS is not installed everywhere."""

    def module(self, source: str) -> Callable[[str], Kernel]:
        """Compile CUDA C++ (source.py assembles it) -> its kernels by name, loaded and ready."""

    def empty(self, shape: Dim, dtype: npt.DTypeLike) -> Array:
        """Memory that holds anything. DeviceMemoryError where there is no room. Freed with the last view of it."""

    def pinned(self, shape: Dim, dtype: npt.DTypeLike) -> tuple[Host, Array]:
        """The same zeroed bytes of host memory as the host and as the device see them."""

    def stream(self) -> Stream: ...
    def event(self) -> Event: ...
    def record(self, event: Event, stream: Stream) -> None: ...

    def wait(self, stream: Stream, event: Event) -> None:
        """What is queued in `stream` from now on waits for the event's last record."""

    def sync_event(self, event: Event) -> None: ...

    def sync(self, stream: Stream) -> None:
        """Wait for all that is queued; raise DeviceError if anything failed."""

    def h2d(self, target: Array, source: Host, stream: Stream) -> None:
        """Queue a copy from pinned memory, which is read when the stream gets there. Not while capturing."""

    def d2h(self, target: Host, source: Array, stream: Stream) -> None:
        """Queue a copy into pinned memory. Not while capturing."""

    def upload(self, values: Host, out: Array | None = None) -> Array:
        """Copy any host array to new memory, or to `out`, at once. Not ordered with streams: for loading."""

    def download(self, source: Array) -> Host:
        """Copy to the host at once. Not ordered with streams: sync first."""

    def capture(self, stream: Stream, work: Callable[[], None]) -> Graph:
        """Run work(), whose launches are kept instead of queued. Streams join it by wait() and come back the same way.

        Nothing in it may copy, sync or allocate.
        """

    def replay(self, graph: Graph, stream: Stream) -> None:
        """Queue a captured graph."""

    def memory(self) -> tuple[int, int]:
        """-> bytes free and in all, as the driver counts them: other processes' included."""

    def gemm(self, a: Array, b: Array, c: Array, stream: Stream) -> None:
        """Queue c = a @ b.T. a half [m, k], b half [n, k], c float [m, n]; sums in F32.

        Needs has_gemm. Not while capturing.
        """

    def array_module(self) -> Any:
        """An array package of NumPy's interface on this device, for training; its memory is its own business."""

    def close(self) -> None:
        """Give the memory of all arrays back; every array, stream and graph is void. Context and code may stay."""


def open_device(ordinal: int | None = None) -> Device:
    """The GPU of that number, or the first that can be used, ready. Raises DeviceUnavailable where there is none."""
    from hotcold.runtime.gpu.cupy_device import CupyDevice

    return CupyDevice(ordinal)


def find_cards() -> tuple[tuple[str, ...], str]:
    """-> names of this machine's GPUs that can be used, and why there is none ("" if there is one). Opens none."""
    from hotcold.runtime.gpu import cards

    return cards.find_cards()
