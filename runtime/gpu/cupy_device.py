"""A real card: the device protocol on CUDA, through CuPy.

In: a card of cards.py. Out: CupyDevice, or DeviceUnavailable with the reason. Next: engine.py.

CuPy is used for what it wraps of CUDA; its array expressions and memory pools are not. Memory comes from the driver and
goes back to it, so that what is counted is what is there. CuPy 13 and 14, CUDA 12 and 13.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.runtime.gpu import nvml, nvrtc
from hotcold.runtime.gpu.cards import check_compiler, line, load_cupy, name_of, usable_cards
from hotcold.runtime.gpu.cublas import Cublas
from hotcold.runtime.gpu.device import Array, DeviceError, DeviceMemoryError, DeviceUnavailable, Dim, Host, Kernel
from hotcold.runtime.gpu.rules import PinnedRanges, check_copy, check_gemm
from hotcold.runtime.gpu.source import signatures

_OUT_OF_MEMORY = 2  # cudaError_t
_CONTEXT_GUESS = 512 << 20  # bytes, where the driver does not say what a context takes
_GRAPHS = 8 << 20  # bytes kept for the graphs of a token, some thousand nodes: the driver says only afterwards
_FAILURES = (RuntimeError, MemoryError)  # what CuPy's exceptions derive from
_NULL = np.uint64(0)  # for None, CuPy's launch gives the driver no value, and the kernel gets an address that is none

# What stays until the process ends, whichever device brought it: bytes of a card's context, and of the code that CuPy
# keeps loaded on it, by file. A later device finds both there, where it could no longer measure them.
_contexts: dict[int, int] = {}
_code: dict[tuple[int, str], int] = {}


class _Block:
    """Memory of the driver, given back once: with the last array in it, or when the device closes."""

    def __init__(self, device: CupyDevice, n: int) -> None:
        self._device, self.n = device, n
        self.address = device._runtime.malloc(n) if n else 0

    def free(self) -> None:
        if self.address:
            self.address, address = 0, self.address
            self._device._freed(address, self.n)

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            with contextlib.suppress(Exception):  # the driver may be gone at the end of the process
                self.free()


class CupyDevice:
    def __init__(self, ordinal: int | None = None, package: str = "cupy") -> None:
        """Raises DeviceUnavailable, with the reason, where the card cannot be used. None: the first that can."""
        self._cupy = load_cupy(package)
        self._runtime = self._cupy.cuda.runtime
        cards = usable_cards(self._cupy)
        ordinal = next(iter(cards)) if ordinal is None else ordinal
        if ordinal not in cards:
            raise DeviceUnavailable(f"GPU {ordinal} cannot be used, only {', '.join(map(str, cards))}")
        properties = cards[ordinal]
        check_compiler()
        self.name = name_of(properties)
        self.compute_capability = (int(properties["major"]), int(properties["minor"]))
        self.multiprocessors = int(properties["multiProcessorCount"])
        self.used = self.peak = 0  # bytes of arrays
        self._device = self._cupy.cuda.Device(ordinal)
        self._blocks: weakref.WeakSet[_Block] = weakref.WeakSet()
        self._pinned = PinnedRanges()
        self._cublas: Cublas | None = None
        self._capturing = False
        self._modules: dict[str, Callable[[str], Kernel]] = {}  # by source
        try:
            self.context_bytes = _contexts.setdefault(ordinal, self._make_context(ordinal))
        except _FAILURES as e:
            raise DeviceUnavailable(f"{self.name} cannot be used: {line(e)}") from e

    def _make_context(self, ordinal: int) -> int:
        """Make the context, and cuBLAS's part of it; -> what they take."""
        pci = str(self._runtime.deviceGetPCIBusId(ordinal))
        before = nvml.used_bytes(pci)
        self._device.use()
        self._runtime.free(0)
        try:
            self._cublas = Cublas()
            self._warm_gemm()
        except (ImportError, DeviceError, *_FAILURES):  # not installed, or of another CUDA: there are kernels as well
            self._cublas = None
        self.peak = 0
        after = nvml.used_bytes(pci)
        free, total = self.memory()
        taken = after - before if before is not None and after is not None else _CONTEXT_GUESS
        return min(max(taken, 0), total - free)

    @property
    def has_gemm(self) -> bool:
        return self._cublas is not None

    def _use(self) -> None:
        """The current card is a matter of the thread."""
        self._device.use()

    def _failed(self, what: str, error: BaseException) -> DeviceError:
        return DeviceError(f"{what}: {line(error)}")

    # ---- kernels

    def module(self, source: str) -> Callable[[str], Kernel]:
        self._not_capturing("loading a module")
        if source in self._modules:
            return self._modules[source]
        if not self._modules:
            self.context_bytes += _GRAPHS
        free = self.memory()[0]
        major, minor = self.compute_capability
        code = nvrtc.cached_code(source, 10 * major + minor)
        table: dict[str, Kernel] = {}
        self._use()
        try:
            module = self._cupy.RawModule(path=str(code))
            for name in signatures(source):
                table[name] = self._kernel(module, name, source)
        except _FAILURES as e:
            raise self._failed("kernels cannot be loaded", e) from e

        def get(name: str) -> Kernel:
            if name not in table:
                raise DeviceError(f"kernel {name}: not in this module")
            return table[name]

        taken = max(0, free - self.memory()[0])  # code, and what its threads may need
        self.context_bytes += _code.setdefault((self._device.id, str(code)), taken)
        self._modules[source] = get
        return get

    def _kernel(self, module: Any, name: str, source: str) -> Kernel:
        signature, raw = signatures(source)[name], module.get_function(name)
        function = raw.kernel
        if raw.num_regs < 1:  # asking loads it: later, in a capture, it could not be loaded
            raise DeviceError(f"kernel {name}: the driver says nothing of it")

        def launch(grid: Dim, block: Dim, args: tuple[Any, ...], *, shared_mem: int = 0, stream: Any) -> None:
            if not signature.check(grid, block, args, shared_mem):
                return
            self._use()
            try:
                values = tuple(_NULL if value is None else value for value in args)
                function(tuple(grid), tuple(block), values, shared_mem, stream)
            except _FAILURES as e:
                raise self._failed(f"kernel {name}", e) from e

        return launch

    # ---- memory

    def empty(self, shape: Dim, dtype: npt.DTypeLike) -> Array:
        n = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._not_capturing("allocating")
        self._use()
        try:
            block = self._block(n)
        except _FAILURES as e:
            if getattr(e, "status", None) == _OUT_OF_MEMORY or isinstance(e, MemoryError):
                raise DeviceMemoryError(n, self.memory()[0]) from e
            raise self._failed("allocating", e) from e
        self._blocks.add(block)
        self.used += n
        self.peak = max(self.peak, self.used)
        return self._array(shape, dtype, block.address, n, block)

    def _block(self, n: int) -> _Block:
        try:
            return _Block(self, n)
        except _FAILURES:  # what array_module() was used for may hold memory that nobody needs
            self._cupy.get_default_memory_pool().free_all_blocks()
            return _Block(self, n)

    def _array(self, shape: Dim, dtype: npt.DTypeLike, address: int, n: int, owner: object) -> Array:
        cuda = self._cupy.cuda
        memory = cuda.UnownedMemory(address, n, owner, self._device.id)
        array: Array = self._cupy.ndarray(shape, dtype, cuda.MemoryPointer(memory, 0))
        return array

    def _freed(self, address: int, n: int) -> None:
        self._use()
        self._runtime.free(address)
        self.used -= n

    def pinned(self, shape: Dim, dtype: npt.DTypeLike) -> tuple[Host, Array]:
        cuda, runtime = self._cupy.cuda, self._runtime
        size, n = int(np.prod(shape)), int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._not_capturing("allocating")
        self._use()
        try:  # not write-combined: reading it would be slow, and the card might see it under another address
            memory = cuda.PinnedMemory(max(n, 1), runtime.hostAllocMapped | runtime.hostAllocPortable)
        except _FAILURES as e:
            raise self._failed(f"{n} bytes of pinned memory", e) from e
        host = np.frombuffer(cuda.PinnedMemoryPointer(memory, 0), np.dtype(dtype), size).reshape(shape)
        host[...] = 0
        self._pinned.add(memory.ptr, n)
        return host, self._array(shape, dtype, memory.ptr, n, memory)

    def memory(self) -> tuple[int, int]:
        self._use()
        free, total = self._runtime.memGetInfo()
        return int(free), int(total)

    def upload(self, values: Host, out: Array | None = None) -> Array:
        values = np.asarray(values, order="C")
        target: Any = self.empty(values.shape, values.dtype) if out is None else out
        check_copy("upload", target, values)
        self._copy_now(target.data.ptr, values.ctypes.data, values.nbytes, self._runtime.memcpyHostToDevice)
        return target

    def download(self, source: Any) -> Host:
        values = np.empty(source.shape, source.dtype)
        check_copy("download", source, values)
        self._copy_now(values.ctypes.data, source.data.ptr, values.nbytes, self._runtime.memcpyDeviceToHost)
        return values

    def _copy_now(self, target: int, source: int, n: int, kind: int) -> None:
        self._not_capturing("a copy")
        self._use()
        try:
            self._runtime.memcpy(target, source, n, kind)
            self._runtime.streamSynchronize(0)  # small copies from pageable memory return before they are there
        except _FAILURES as e:
            raise self._failed("copying", e) from e

    def h2d(self, target: Any, source: Host, stream: Any) -> None:
        check_copy("h2d", target, source)
        self._pinned.check("h2d", source)
        kind = self._runtime.memcpyHostToDevice
        self._copy("h2d", target.data.ptr, source.ctypes.data, source.nbytes, kind, stream)

    def d2h(self, target: Host, source: Any, stream: Any) -> None:
        check_copy("d2h", source, target)
        self._pinned.check("d2h", target)
        kind = self._runtime.memcpyDeviceToHost
        self._copy("d2h", target.ctypes.data, source.data.ptr, target.nbytes, kind, stream)

    def _copy(self, what: str, target: int, source: int, n: int, kind: int, stream: Any) -> None:
        self._not_capturing(what)
        self._use()
        try:
            self._runtime.memcpyAsync(target, source, n, kind, stream.ptr)
        except _FAILURES as e:
            raise self._failed(what, e) from e

    # ---- matrix products

    def gemm(self, a: Any, b: Any, c: Any, stream: Any) -> None:
        self._not_capturing("gemm")
        if self._cublas is None:
            raise DeviceError("gemm: cuBLAS is not installed")
        m, n, k = check_gemm(a, b, c)
        self._use()
        try:
            with stream:  # makes it CuPy's current one
                self._cublas.product(m, n, k, a.data.ptr, b.data.ptr, c.data.ptr)
        except _FAILURES as e:
            raise self._failed("gemm", e) from e

    def _warm_gemm(self) -> None:
        """The first product makes cuBLAS's workspace."""
        a, c, stream = self.empty((64, 64), np.float16), self.empty((64, 64), np.float32), self.stream()
        self.gemm(a, a, c, stream)
        self.sync(stream)

    # ---- order

    def stream(self) -> Any:
        self._use()
        return self._cupy.cuda.Stream(non_blocking=True)

    def event(self) -> Any:
        self._use()
        return self._cupy.cuda.Event(block=False, disable_timing=True)

    def record(self, event: Any, stream: Any) -> None:
        self._call("record", lambda: event.record(stream))

    def wait(self, stream: Any, event: Any) -> None:
        self._call("wait", lambda: stream.wait_event(event))

    def sync_event(self, event: Any) -> None:
        self._not_capturing("a sync")
        self._call("the GPU failed", event.synchronize)

    def sync(self, stream: Any) -> None:
        self._not_capturing("a sync")
        self._call("the GPU failed", stream.synchronize)

    def _call(self, what: str, call: Callable[[], object]) -> None:
        self._use()
        try:
            call()
        except _FAILURES as e:
            raise self._failed(what, e) from e

    def capture(self, stream: Any, work: Callable[[], None]) -> Any:
        self._not_capturing("another capture")
        self._call("capture", stream.begin_capture)
        self._capturing = True
        try:
            work()
        except BaseException:
            with contextlib.suppress(*_FAILURES):  # what it says of a capture that work() broke off
                stream.end_capture()
            raise
        finally:
            self._capturing = False
        try:
            graph = stream.end_capture()
            graph.upload(stream)  # now rather than in the first token
        except _FAILURES as e:
            raise self._failed("capture", e) from e
        return graph

    def replay(self, graph: Any, stream: Any) -> None:
        self._not_capturing("replay")
        self._call("replay", lambda: graph.launch(stream))

    def _not_capturing(self, what: str) -> None:
        if self._capturing:
            raise DeviceError(f"{what} is not allowed while capturing")

    def array_module(self) -> Any:
        self._use()
        return self._cupy

    def close(self) -> None:
        """Context and code stay with the process, and pinned memory with those who still have an array of it: the
        CPU's workers may be reading."""
        self._use()
        with contextlib.suppress(*_FAILURES):  # a device that failed has nothing to wait for
            self._runtime.deviceSynchronize()
        for block in list(self._blocks):
            with contextlib.suppress(*_FAILURES):
                block.free()
        if self._cublas is not None:
            with contextlib.suppress(*_FAILURES):
                self._cublas.close()
            self._cublas = None
        self._modules.clear()
        self._pinned.clear()

