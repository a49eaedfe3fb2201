"""The real device without a card: what it asks of CuPy, what it refuses, what it says when there is no card."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu.build import compiler
from fake_cupy import FakeCudaError, use_fake
from hybrid import config_of, hybrid, shares, steps

from hotcold.runtime.gpu import cublas, cupy_device, nvml, nvrtc
from hotcold.runtime.gpu.cupy_device import CupyDevice
from hotcold.runtime.gpu.device import (
    Device,
    DeviceError,
    DeviceMemoryError,
    DeviceUnavailable,
    find_cards,
    open_device,
)

i32, f32, f16 = np.int32, np.float32, np.float16
needs_compiler = pytest.mark.skipif(not compiler()[0], reason="no C++ compiler")
ADD = r"""
extern "C" __global__ void add(float* x, const float* by, float scale, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += scale * (by ? by[i] : 1.0f);
}
"""


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    return use_fake(monkeypatch, tmp_path)


@pytest.fixture
def device(cupy: Any) -> Any:
    made = open_device()
    cupy.runtime.log.clear()
    return made


# ------------------------------------------------------------------ which card, or why none


def test_the_first_card_that_can_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old, new = {"name": b"Old \x1b[2JCard", "major": 6, "minor": 1}, {"name": "New Card"}
    fake, taken = use_fake(monkeypatch, tmp_path, [old, new]), 80 << 20
    fake.runtime.live[1] = taken, None  # the context, and somebody else's
    assert find_cards() == (("New Card",), "")
    device: Device = open_device()
    assert device.name == "New Card" and device.compute_capability == (8, 6) and device.multiprocessors == 28
    assert device.context_bytes == 64 << 20 and device.memory() == ((1 << 30) - taken, 1 << 30)
    assert device.has_gemm
    assert (device.used, device.peak) == (0, 0)
    device.close()
    with pytest.raises(DeviceUnavailable, match="GPU 0 cannot be used, only 1"):
        open_device(0)


CASES: dict[str, tuple[Callable[[Any], object], str]] = {
    "no driver": (lambda r: (r.fail.update(getDeviceCount=FakeCudaError(35)), setattr(r, "driver", 0)),
                  "there is no NVIDIA driver"),
    "old driver": (lambda r: (r.fail.update(getDeviceCount=FakeCudaError(35)), setattr(r, "driver", 11040)),
                   "the NVIDIA driver is for CUDA 11.4, this CuPy needs CUDA 12: update the driver, or install the "
                   "CuPy of its CUDA"),
    "no card": (lambda r: r.cards.clear(), "CuPy finds no GPU"),
    "broken": (lambda r: r.fail.update(getDeviceCount=FakeCudaError(999, "a\nb \x1b[31m")),
               "CuPy finds no GPU or driver: FakeCudaError: a b"),
    "old card": (lambda r: r.cards[0].update(major=6, minor=1),
                 "Fake Card is too old: it has compute capability 6.1, at least 7.0 is needed"),
    "old for CUDA 13": (lambda r: (r.cards[0].update(major=7, minor=0), setattr(r, "cuda", 13000)),
                        "Fake Card is too old: it has compute capability 7.0, at least 7.5 is needed: install "
                        "cupy-cuda12x"),
    "no mapping": (lambda r: r.cards[0].update(canMapHostMemory=0), "Fake Card cannot read the host's memory"),
    "ROCm": (lambda r: setattr(r, "is_hip", True), "this CuPy is built for ROCm, only CUDA is supported"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_why_there_is_no_gpu(cupy: Any, case: str) -> None:
    change, reason = CASES[case]
    change(cupy.runtime)
    names, said = find_cards()
    assert names == () and said.startswith(reason) and "\n" not in said and "\x1b" not in said
    with pytest.raises(DeviceUnavailable) as e:
        open_device()
    assert e.value.reason == said and str(e.value) == f"no GPU: {said}"


def test_cupy_that_is_missing_or_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    for name, body, reason in (("no_such_cupy", None, "CuPy is not installed: pip install 'hotcold[gpu]'"),
                               ("broken_cupy", "import no_such_thing", "CuPy cannot be loaded: ModuleNotFoundError")):
        if body:
            (tmp_path / f"{name}.py").write_text(body)
            monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(DeviceUnavailable) as e:
            CupyDevice(package=name)
        assert e.value.reason.startswith(reason)


def test_without_a_compiler(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "include_folders", lambda: [])
    assert "cuda_fp16.h is missing" in find_cards()[1]
    monkeypatch.setattr(nvrtc, "binding", lambda: (None, "OSError: libnvrtc.so.12"))
    with pytest.raises(DeviceUnavailable, match=r"kernels cannot be compiled \(OSError: libnvrtc.so.12\): pip install"):
        open_device()


def test_a_context_that_cannot_be_made(cupy: Any) -> None:
    cupy.runtime.fail["free"] = FakeCudaError(46, "cudaErrorDevicesUnavailable")
    with pytest.raises(DeviceUnavailable, match="Fake Card cannot be used: FakeCudaError: cudaErrorDevicesUnavailable"):
        open_device()


def test_context_that_the_driver_does_not_tell(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "used_bytes", lambda pci: None)
    cupy.runtime.live[1] = 100 << 20, None
    assert open_device().context_bytes == 100 << 20  # no more than what is missing of the card's memory
    cupy.runtime.live[1] = 900 << 20, None
    assert open_device(0).context_bytes == 100 << 20  # a second device finds the context made


@needs_compiler
@pytest.mark.parametrize("at_once", [False, True])
def test_code_counts_on_every_device_of_a_process(cupy: Any, monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    """CuPy loads it once and keeps it: a second device sees no memory go, and it is taken all the same."""
    cupy.runtime.live[1] = 64 << 20, None  # the context
    first, found = open_device(), []
    for device in (first, open_device()) if at_once else (first, None):
        if device is None:
            first.close()
            device = open_device()
        before = device.context_bytes, device.memory()[0]
        device.module(ADD)
        device.module(ADD)
        found.append((device.context_bytes - before[0], before[1] - device.memory()[0]))
    code, graphs = cupy.runtime.CODE, cupy_device._GRAPHS
    assert found == [(code + graphs, code), (code + graphs, 0)]
    device.module(ADD + "\n")
    assert device.context_bytes == before[0] + 2 * code + graphs and len(cupy.runtime.code) == 2
    assert device.memory()[0] == (1 << 30) - (64 << 20) - 2 * code  # what it says it takes, but for the graphs to come
    device.close()
    assert device.memory()[0] == (1 << 30) - (64 << 20) - 2 * code  # stays with the process


def test_no_management_library() -> None:
    assert nvml.used_bytes("0000:01:00.0") is None or isinstance(nvml.used_bytes("0000:01:00.0"), int)


# ------------------------------------------------------------------ memory


def test_memory_is_the_drivers(device: Any, cupy: Any) -> None:
    x = device.empty((100,), f32)
    y = device.upload(np.arange(50, dtype=f32))
    assert (device.used, device.peak, device.memory()[0]) == (600, 600, (1 << 30) - 600)
    view = y[10:20]
    del x, y
    gc.collect()
    assert (device.used, device.peak, len(cupy.runtime.live)) == (200, 600, 1)
    assert device.download(view).tolist() == list(range(10, 20))
    with pytest.raises(DeviceMemoryError, match=f"{1 << 30} bytes wanted, {(1 << 30) - 200} free"):
        device.empty((1 << 28,), f32)
    assert "free_all_blocks" in cupy.runtime.log  # what CuPy's own arrays left behind
    device.close()
    assert not cupy.runtime.live and device.used == 0  # even that of arrays which are still held
    assert cupy.runtime.log[-2:] == ["free", "cublas.destroy"]
    del view
    gc.collect()


def test_copies(device: Any, cupy: Any) -> None:
    host, seen = device.pinned((2, 4), f32)
    assert (host == 0).all() and seen.data.ptr == host.ctypes.data
    stream, x = device.stream(), device.upload(np.arange(8, dtype=f32).reshape(2, 4)[:, ::-1])
    device.d2h(host, x, stream)
    device.sync(stream)
    assert host.tolist() == [[3, 2, 1, 0], [7, 6, 5, 4]]
    host[1] = 9
    device.h2d(x[0], host[1], stream)
    device.sync(stream)
    assert device.download(x)[0].tolist() == [9] * 4
    device.upload(np.ones(4, f32), out=x[0])
    assert device.download(x)[0].tolist() == [1] * 4
    # each copy that is done at once waits for the card to have it
    assert cupy.runtime.log.count("memcpy") == cupy.runtime.log.count("streamSynchronize") == 4
    for wrong in (np.zeros(4, f32), host[0, :2], host[:, 0], host.view(i32)[0]):
        with pytest.raises(DeviceError, match="h2d: "):
            device.h2d(x[0], wrong, stream)
    with pytest.raises(DeviceError, match="upload: between float32"):
        device.upload(np.ones(5, f32), out=x[0])
    device.close()
    assert host.sum() == 36 + 6  # pinned memory stays as long as somebody has an array of it


# ------------------------------------------------------------------ kernels, graphs, products


@needs_compiler
def test_kernels(device: Any, cupy: Any) -> None:
    kernels, stream = device.module(ADD), device.stream()
    x, by = device.upload(np.zeros(40, f32)), device.upload(np.arange(40, dtype=f32))
    add = kernels("add")
    add([2], (32,), (x, by, f32(2), i32(40)), stream=stream)
    add((2,), (32,), (x, None, f32(1), i32(40)), stream=stream)
    device.sync(stream)
    assert (device.download(x) == 2 * np.arange(40) + 1).all()
    add((0,), (32,), (x, None, f32(1), i32(40)), stream=stream)
    assert cupy.runtime.log.count("launch add") == 2
    for wrong in ((x, by, 2.0, i32(40)), (x, by, f32(2), 40), (x[::2], by, f32(2), i32(20)), (x, by, f32(2))):
        with pytest.raises(DeviceError, match="kernel add: "):
            add((2,), (32,), wrong, stream=stream)
    with pytest.raises(DeviceError, match="kernel sub: not in this module"):
        kernels("sub")
    cupy.runtime.fail["launch add"] = FakeCudaError(700, "illegal address")
    with pytest.raises(DeviceError, match="kernel add: FakeCudaError: illegal address"):
        add((2,), (32,), (x, by, f32(2), i32(40)), stream=stream)
    cupy.runtime.fail["RawModule"] = FakeCudaError(200, "invalid image")
    with pytest.raises(DeviceError, match="kernels cannot be loaded: FakeCudaError: invalid image"):
        device.module(ADD + "\n")  # another one: this is loaded already


@needs_compiler
def test_graphs(device: Any, cupy: Any) -> None:
    add, stream, x = device.module(ADD)("add"), device.stream(), device.upload(np.zeros(4, f32))
    host, _ = device.pinned((4,), f32)

    def work() -> None:
        for _ in range(3):
            add((1,), (32,), (x, None, f32(1), i32(4)), stream=stream)

    graph = device.capture(stream, work)
    assert device.download(x)[0] == 0 and cupy.runtime.log[-4] == "end_capture"
    device.replay(graph, stream)
    device.replay(graph, stream)
    device.sync(stream)
    assert device.download(x)[0] == 6
    for call in (lambda: device.h2d(x, host, stream), lambda: device.upload(host), lambda: device.sync(stream),
                 lambda: device.empty((1,), f32), lambda: device.pinned((1,), f32), lambda: device.module(ADD),
                 lambda: device.replay(graph, stream), lambda: device.capture(stream, work)):  # fmt: skip
        with pytest.raises(DeviceError, match="not allowed while capturing"):
            device.capture(stream, call)
    cupy.runtime.fail["end_capture"] = FakeCudaError(904, "unjoined")
    with pytest.raises(KeyError):  # not what ending the capture says of it
        device.capture(stream, lambda: {}["missing"])
    with pytest.raises(DeviceError, match="capture: FakeCudaError: unjoined"):
        device.capture(stream, work)


def test_errors_at_syncs(device: Any, cupy: Any) -> None:
    stream, event = device.stream(), device.event()
    device.record(event, stream)
    device.wait(stream, event)
    device.sync_event(event)
    cupy.runtime.fail |= {"synchronize": FakeCudaError(700, "illegal address"), "event.synchronize": FakeCudaError(1)}
    for call in (lambda: device.sync(stream), lambda: device.sync_event(event)):
        with pytest.raises(DeviceError, match="the GPU failed: FakeCudaError"):
            call()
    cupy.runtime.fail |= {"deviceSynchronize": FakeCudaError(700), "free": FakeCudaError(700)}
    device.empty((4,), f32)
    device.close()


def test_gemm(device: Any) -> None:
    rng, stream = np.random.default_rng(0), device.stream()
    a, b = rng.normal(size=(3, 16)).astype(f16), rng.normal(size=(5, 16)).astype(f16)
    x, w, c = device.upload(a), device.upload(b), device.upload(np.ones((3, 5), f32))
    device.gemm(x, w, c, stream)
    np.testing.assert_allclose(device.download(c), a.astype(f32) @ b.astype(f32).T, rtol=1e-5)
    with pytest.raises(DeviceError, match=r"gemm: float16\(3, 16\) by float16\(16, 5\) into float32\(3, 5\)"):
        device.gemm(x, w.reshape(16, 5), c, stream)


def test_without_cublas(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("libcublas.so.12")

    monkeypatch.setattr(cublas, "_binding", missing)
    device = open_device()
    assert not device.has_gemm
    with pytest.raises(DeviceError, match="gemm: cuBLAS is not installed"):
        device.gemm(None, None, None, device.stream())
    device.close()


@needs_compiler
@pytest.mark.parametrize("executor", ["stream", "graph"])
def test_a_model_gives_the_same_bits_as_on_the_simulated_device(
    device: Any, executor: str, tiny_model: Callable[..., Path]
) -> None:
    """The engine keeps to the protocol, and this device does what it says."""
    path, tokens = tiny_model("relu", outtype="q8_0"), [1, 5, 9, 33]
    layers = shares(config_of(path), 1, 0.4)
    with hybrid(path, layers, executor=executor) as engine:
        wanted = np.stack([engine.forward([*tokens, *tokens]), *steps(engine, tokens)])
    before = device.used
    with hybrid(path, layers, executor=executor, device=device) as engine:
        found = np.stack([engine.forward([*tokens, *tokens]), *steps(engine, tokens)])
    assert np.array_equal(found, wanted)
    gc.collect()
    assert device.used == before < device.peak


# ------------------------------------------------------------------ compiled code is kept


class FakeNvrtc:
    NVRTCError = FakeCudaError

    def __init__(self) -> None:
        self.flags: list[tuple[str, ...]] = []

    def getVersion(self) -> tuple[int, int]:
        return 12, 9

    def getSupportedArchs(self) -> tuple[int, ...]:
        return 70, 75, 80, 86, 90

    def createProgram(self, *args: object) -> int:
        return 1

    def compileProgram(self, program: int, flags: tuple[str, ...]) -> None:
        self.flags.append(flags)

    def getProgramLog(self, program: int) -> str:
        return ""

    def getCUBIN(self, program: int) -> bytes:
        return b"cubin"

    def getPTX(self, program: int) -> bytes:
        return b"ptx"

    def destroyProgram(self, program: int) -> None:
        pass


def test_code_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeNvrtc()
    monkeypatch.setattr(nvrtc, "binding", lambda: (fake, ""))
    monkeypatch.setattr(nvrtc.platformdirs, "user_cache_dir", lambda *_, **__: str(tmp_path))
    paths = [nvrtc.cached_code("a", 86) for _ in range(3)]
    assert len(set(paths)) == 1 and paths[0].read_bytes() == b"cubin" and len(fake.flags) == 1
    assert "--gpu-architecture=sm_86" in fake.flags[0] and "--ftz=true" in fake.flags[0]
    assert nvrtc.cached_code("b", 86) != paths[0] and nvrtc.cached_code("a", 75) != paths[0]
    assert nvrtc.cached_code("a", 89) == paths[0]  # the same code runs on the later card of the generation
    ptx = nvrtc.cached_code("a", 120)  # a generation that this compiler does not know: the driver translates
    assert ptx.suffix == ".ptx" and ptx.read_bytes() == b"ptx" and "--gpu-architecture=compute_90" in fake.flags[-1]
    with pytest.raises(DeviceError, match="compute capability 6.1: this NVRTC begins at 7.0"):
        nvrtc.cached_code("a", 61)
    assert {p.suffix for p in (tmp_path / "gpu").iterdir()} == {".cubin", ".ptx"}


def test_libraries_in_packages_of_nvidia(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded: list[str] = []
    for name in ("cuda_nvrtc/lib/libnvrtc.so.12", "cublas/lib/libcublas.so.12", "cublas/lib/libcublasLt.so.12"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(nvrtc, "_packages", lambda: [tmp_path])
    monkeypatch.setattr(ctypes, "CDLL", lambda path, mode: loaded.append(Path(path).name))
    assert nvrtc.preload("libcublasLt.so.1?", "libcublas.so.1?") and not nvrtc.preload("libcufft.so.1?")
    assert loaded == ["libcublasLt.so.12", "libcublas.so.12"]
