"""CuPy's calls as cupy_device.py makes them, on memory of the host: kernels run on the emulator, streams are threads.

In: nothing. Out: fake_cupy(), a module; use_fake(), which puts it in CuPy's place. Strict where CuPy is (argument
types of its compiled functions), with the failures of CUDA that tests ask for. `cubin` files hold the source.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu.build import Library
from cuda_on_cpu.sim_streams import SimStream

from hotcold.runtime.gpu import cublas, nvml, nvrtc


class FakeCudaError(RuntimeError):
    def __init__(self, status: int, text: str = "cudaErrorOfATest") -> None:
        super().__init__(text)
        self.status = status


def at(address: int, n: int) -> np.ndarray:
    """The bytes of an address."""
    if not n:
        return np.empty(0, np.uint8)
    return np.frombuffer(memoryview((ctypes.c_ubyte * n).from_address(address)), np.uint8)


class Runtime:
    hostAllocMapped, hostAllocPortable, memcpyHostToDevice, memcpyDeviceToHost = 2, 1, 1, 2
    is_hip = False
    CODE = 3 << 20  # bytes that a loaded module takes

    def __init__(self, cards: list[dict[str, Any]]) -> None:
        self.cards, self.total, self.live = cards, 1 << 30, {}  # type: ignore[var-annotated]
        self.log: list[str] = []
        self.fail: dict[str, FakeCudaError] = {}  # call -> what it raises
        self.driver, self.cuda = 12090, 12090
        self.streams: dict[int, SimStream] = {}  # by address; of captures: what is kept
        self.jitter, self.error = 0.0, None  # what SimStream asks of its device
        self.current = 0
        self.code: dict[tuple[int, str], Library] = {}  # by card and path; nothing unloads it

    def _may(self, call: str) -> None:
        self.log.append(call)
        if call in self.fail:
            raise self.fail[call]

    def getDeviceCount(self) -> int:
        self._may("getDeviceCount")
        return len(self.cards)

    def getDeviceProperties(self, i: int) -> dict[str, Any]:
        return {"name": b"Fake Card", "major": 8, "minor": 6, "multiProcessorCount": 28} | self.cards[i]

    def deviceGetPCIBusId(self, i: int) -> str:
        return f"0000:0{i}:00.0"

    def driverGetVersion(self) -> int:
        return self.driver

    def runtimeGetVersion(self) -> int:
        return self.cuda

    def memGetInfo(self) -> tuple[int, int]:
        code = self.CODE * sum(card == self.current for card, _ in self.code)
        return self.total - code - sum(n for n, _ in self.live.values()), self.total

    def malloc(self, n: int) -> int:
        self._may("malloc")
        if n > self.memGetInfo()[0]:
            raise FakeCudaError(2, "cudaErrorMemoryAllocation: out of memory")
        raw = np.full(n + 256, 0xFF, np.uint8)
        address = raw.ctypes.data + -raw.ctypes.data % 256
        self.live[address] = n, raw
        return address

    def free(self, address: int) -> None:
        self._may("free")
        if address:
            del self.live[address]

    def memcpy(self, target: int, source: int, n: int, kind: int) -> None:
        self._may("memcpy")
        ctypes.memmove(target, source, n)

    def memcpyAsync(self, target: int, source: int, n: int, kind: int, stream: int) -> None:
        self._may("memcpyAsync")
        self.streams[stream].put(lambda: ctypes.memmove(target, source, n) and None)

    def streamSynchronize(self, stream: int) -> None:
        self._may("streamSynchronize")

    def deviceSynchronize(self) -> None:
        self._may("deviceSynchronize")


class FakeArray:
    """What cupy_device.py and its callers use of cupy.ndarray."""

    def __init__(self, shape: Any, dtype: Any, memptr: SimpleNamespace, values: np.ndarray | None = None) -> None:
        self.memory = memptr
        if values is None:
            n = int(np.prod(shape)) * np.dtype(dtype).itemsize
            values = at(memptr.ptr, n).view(dtype).reshape(shape)
        self.values = values

    shape = property(lambda self: self.values.shape)
    dtype = property(lambda self: self.values.dtype)
    nbytes = property(lambda self: self.values.nbytes)
    flags = property(lambda self: self.values.flags)
    data = property(lambda self: SimpleNamespace(ptr=self.values.ctypes.data))

    def __getitem__(self, index: Any) -> FakeArray:
        return FakeArray(None, None, self.memory, self.values[index][...])

    def reshape(self, *shape: Any) -> FakeArray:
        return FakeArray(None, None, self.memory, self.values.reshape(*shape))

    def view(self, dtype: Any) -> FakeArray:
        return FakeArray(None, None, self.memory, self.values.view(dtype))


class PinnedMemory:
    def __init__(self, size: int, flags: int = 0) -> None:
        assert flags == Runtime.hostAllocMapped | Runtime.hostAllocPortable
        self.raw = np.full(size, 0xEE, np.uint8)
        self.ptr, self.size = self.raw.ctypes.data, size


def pinned_pointer(memory: PinnedMemory, offset: int) -> memoryview:
    return memory.raw.data[offset:]


def wait_for(event: threading.Event) -> None:
    assert event.wait(120)


def fake_cupy(cards: list[dict[str, Any]] | None = None) -> Any:
    """runtime.log has the calls; runtime.fail makes them fail."""
    runtime = Runtime([{}] if cards is None else cards)
    capturing: dict[int, list[Any]] = {}  # stream -> launches

    class Device:
        def __init__(self, ordinal: int) -> None:
            self.id = ordinal

        def use(self) -> None:
            runtime.current = self.id

    class Stream:
        current: Any = None

        def __init__(self, *, non_blocking: bool) -> None:
            assert non_blocking
            self.ptr = id(self)
            self.work = runtime.streams[self.ptr] = SimStream(runtime, 0)

        def __enter__(self) -> None:
            Stream.current = self

        def __exit__(self, *_: object) -> None:
            Stream.current = None

        def wait_event(self, event: Event) -> None:
            runtime._may("wait_event")
            passed = event.passed
            self.work.put(lambda: wait_for(passed))

        def synchronize(self) -> None:
            runtime._may("synchronize")
            done = threading.Event()
            self.work.put(done.set, always=True)
            wait_for(done)
            if runtime.error is not None:
                raise FakeCudaError(719, str(runtime.error))

        def begin_capture(self) -> None:
            runtime._may("begin_capture")
            capturing[self.ptr] = []

        def end_capture(self) -> Graph:
            runtime._may("end_capture")
            return Graph(capturing.pop(self.ptr))

    class Event:
        def __init__(self, *, block: bool, disable_timing: bool) -> None:
            assert not block and disable_timing
            self.passed = threading.Event()
            self.passed.set()  # one that was never recorded keeps nobody waiting

        def record(self, stream: Stream) -> None:
            runtime._may("record")
            self.passed = threading.Event()
            stream.work.put(self.passed.set, always=True)

        def synchronize(self) -> None:
            runtime._may("event.synchronize")
            wait_for(self.passed)

    class Graph:
        def __init__(self, work: list[Any]) -> None:
            self.work = work

        def upload(self, stream: Stream) -> None:
            runtime._may("graph.upload")

        def launch(self, stream: Stream) -> None:
            runtime._may("graph.launch")
            for work in self.work:
                stream.work.put(work)

    class RawModule:
        def __init__(self, *, path: str) -> None:
            runtime._may("RawModule")
            key = runtime.current, path  # CuPy loads a file once per card, for the whole process
            if key not in runtime.code:
                runtime.code[key] = Library(Path(path).read_text())
            self.library = runtime.code[key]

        def get_function(self, name: str) -> SimpleNamespace:
            def function(grid: Any, block: Any, args: Any, shared: int, stream: Stream) -> None:
                assert type(grid) is tuple and type(block) is tuple and type(args) is tuple
                runtime._may(f"launch {name}")
                assert not any(a is None for a in args), "CuPy makes no null pointer of it"
                values = [a.data.ptr if isinstance(a, FakeArray) else a for a in args]

                def work() -> None:
                    problem = self.library.run(name, grid, block, values, shared, 0)
                    assert not problem, problem

                (capturing[stream.ptr].append if stream.ptr in capturing else stream.work.put)(work)

            return SimpleNamespace(kernel=function, num_regs=8)

    def gemm_ex(
        handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, a: int, a_type: int, lda: int,
        b: int, b_type: int, ldb: int, beta: int, c: int, c_type: int, ldc: int, compute: int, algo: int
    ) -> None:  # fmt: skip
        """By columns, as cuBLAS counts."""
        runtime._may("gemmEx")
        assert Stream.current is not None and (a_type, b_type, c_type, compute, algo) == (2, 2, 0, 68, -1)
        assert (transa, transb, handle) == (1, 0, 77)
        left = at(a, 2 * lda * m).view(np.float16).reshape(m, lda)[:, :k].astype(np.float32)  # op(A)[m, k]
        right = at(b, 2 * ldb * n).view(np.float16).reshape(n, ldb)[:, :k].astype(np.float32)  # B.T
        out = at(c, 4 * ldc * n).view(np.float32).reshape(n, ldc)[:, :m]  # C.T
        Stream.current.synchronize()
        scale, keep = (float(at(p, 4).view(np.float32)[0]) for p in (alpha, beta))
        out[...] = scale * (right @ left.T) + (keep * out if keep else 0)

    blas = SimpleNamespace(create=lambda: 77, destroy=lambda handle: runtime._may("cublas.destroy"), gemmEx=gemm_ex,
                           CUBLAS_OP_T=1, CUBLAS_OP_N=0, CUBLAS_COMPUTE_32F=68, CUBLAS_GEMM_DEFAULT=-1)  # fmt: skip
    module: Any = ModuleType("fake_cupy")
    module.ndarray, module.RawModule, module.blas, module.runtime = FakeArray, RawModule, blas, runtime
    module.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=lambda: runtime._may("free_all_blocks"))
    module.cuda = SimpleNamespace(
        runtime=runtime, Device=Device, Stream=Stream, Event=Event, PinnedMemory=PinnedMemory,
        PinnedMemoryPointer=pinned_pointer,
        UnownedMemory=lambda ptr, n, owner, device: SimpleNamespace(ptr=ptr, owner=owner, device=device),
        MemoryPointer=lambda memory, offset: SimpleNamespace(ptr=memory.ptr + offset, memory=memory),
    )  # fmt: skip
    return module


def use_fake(monkeypatch: pytest.MonkeyPatch, folder: Path, cards: list[dict[str, Any]] | None = None) -> Any:
    """CuPy is the fake, with cuBLAS and a compiler that compiles nothing; -> the fake."""
    module = fake_cupy(cards)

    def code(source: str, architecture: int) -> Path:
        path = folder / f"{abs(hash((source, architecture)))}.cubin"
        path.write_text(source)
        return path

    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(nvrtc, "cached_code", code)
    monkeypatch.setattr(nvrtc, "binding", lambda: (module, ""))
    monkeypatch.setattr(nvrtc, "include_folders", lambda: [str(folder)])
    monkeypatch.setattr(cublas, "_binding", lambda: module.blas)
    used = itertools.chain([100 << 20], itertools.repeat(164 << 20))
    monkeypatch.setattr(nvml, "used_bytes", lambda pci: next(used))
    for name in ("_contexts", "_code"):
        monkeypatch.setattr(f"hotcold.runtime.gpu.cupy_device.{name}", {})
    return module
