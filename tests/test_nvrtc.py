"""Every kernel compiles for every generation of cards, keeps to its registers, and is the kernel that its text says.

Generations that this NVRTC does not know are skipped: that of CUDA 13 begins at sm_75. With packages of either CUDA:

    pip install -e '.[gpu-cuda13]' pytest && python -m pytest tests/test_nvrtc.py -rs

What a compilation said is kept in the user's cache, by a hash of all that goes into it.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import platformdirs
import pytest

from hotcold.runtime.gpu import nvrtc
from hotcold.runtime.gpu.device import DeviceError
from hotcold.runtime.gpu.nvrtc import ARCHITECTURES, OPTIONS, Resources, compile_cubin, resources
from hotcold.runtime.gpu.source import MAX_SHARED, module_names, module_source, signatures
from hotcold.runtime.threads import default_threads

_BINDING, _REASON = nvrtc.binding()
needs_nvrtc = pytest.mark.skipif(_BINDING is None, reason=f"no NVRTC: {_REASON}")
_KNOWN = _BINDING.getSupportedArchs() if _BINDING else ARCHITECTURES
_VERSION = ".".join(map(str, _BINDING.getVersion())) if _BINDING else ""

# Bytes that a kernel may store to and load from local memory because it lacks registers. All others: none.
MAY_SPILL = {
    "attention_block_64": 128, "attention_block_128": 64, "attention_block_256": 16,  # once per tile of keys
    "matmul_q4_0": 16,  # sm_86, sm_89
    "compact_split": 16,  # sm_100, by NVRTC 13.5
}


def compiled(module: str, architecture: int) -> dict[str, Resources]:
    source = module_source(module)
    what = repr((source, architecture, OPTIONS, _BINDING.getVersion()))
    folder = Path(platformdirs.user_cache_dir("hotcold", appauthor=False)) / "nvrtc"
    kept = folder / f"{hashlib.sha256(what.encode()).hexdigest()[:24]}.json"
    try:
        return {name: Resources(**numbers) for name, numbers in json.loads(kept.read_text()).items()}
    except (OSError, ValueError):
        made = compile_cubin(source, architecture)
    assert made.cubin[:4] == b"\x7fELF"
    folder.mkdir(parents=True, exist_ok=True)
    part = kept.with_suffix(f".{os.getpid()}.{module}.part")
    part.write_text(json.dumps({name: asdict(r) for name, r in made.kernels.items()}))
    os.replace(part, kept)
    return made.kernels


@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_kernels(architecture: int) -> None:
    if architecture not in _KNOWN:
        pytest.skip(f"NVRTC {_VERSION} does not know sm_{architecture}, it begins at sm_{min(_KNOWN)}")
    modules = sorted(module_names(), key=lambda name: -len(module_source(name)))  # the longest first
    with ThreadPoolExecutor(default_threads()) as pool:
        found = dict(zip(modules, pool.map(lambda name: compiled(name, architecture), modules), strict=True))
    spilled = {}
    for module, kernels in found.items():
        assert set(kernels) == set(signatures(module_source(module))), module
        for name, r in kernels.items():
            assert 0 < r.registers <= 255 and r.shared <= MAX_SHARED, name
            if r.spilled > MAY_SPILL.get(name, 0):
                spilled[name] = r
    assert not spilled


@needs_nvrtc
def test_what_the_compiler_refuses_is_an_error_with_its_words() -> None:
    with pytest.raises(DeviceError, match=r'sm_75: k.cu\(2\): error: identifier "oops" is undefined'):
        compile_cubin('#line 1 "k.cu"\nextern "C" __global__ void k(float* x) {\n    oops = 1;\n}', 75)


@needs_nvrtc
def test_spills_are_seen() -> None:
    source = """extern "C" __global__ void __launch_bounds__(1024, 2) greedy(float* x, int n) {
        float v[120];
        #pragma unroll
        for (int i = 0; i < 120; i++) v[i] = x[i * n];
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < 120; i++) x[i * n + 1] = v[i] * v[119 - i];
    }"""
    assert compile_cubin(source, 80).kernels["greedy"].spilled > 100


def test_reports_of_several_versions() -> None:
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a' for 'sm_70'
ptxas info    : Function properties for a
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, 1024 bytes smem, 380 bytes cmem[0]
ptxas info    : Compiling entry function 'b' for 'sm_70'
ptxas info    : Function properties for b
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""
    assert resources(log) == {"a": Resources(40, 12, 16, 1024), "b": Resources(8, 0, 0, 0)}
    assert resources("") == {}
    with pytest.raises(DeviceError, match="cannot be read"):
        resources("Compiling entry function 'a' for 'sm_70'\n")


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(nvrtc.importlib, "import_module", missing)
    assert nvrtc.binding() == (None, "ModuleNotFoundError: No module named 'cupy_backends.cuda.libs.nvrtc'")
    with pytest.raises(DeviceError, match="kernels cannot be compiled: ModuleNotFoundError"):
        compile_cubin("", 70)


def test_headers_of_a_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_fp16.h").touch()
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    monkeypatch.setattr(nvrtc.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    assert nvrtc.include_folders() == [str(tmp_path / "include")]
    assert nvrtc.options() == (*OPTIONS, f"-I{tmp_path / 'include'}")


@pytest.mark.parametrize(("version", "part"), [((12, 9), "cuda_runtime/include"), ((13, 0), "cu13/include")])
def test_headers_are_those_of_the_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: tuple[int, int], part: str
) -> None:
    for folder in ("cuda_runtime/include", "cu13/include"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "cuda_fp16.h").touch()
    monkeypatch.setattr(nvrtc, "_packages", lambda: [tmp_path])
    monkeypatch.setattr(nvrtc, "binding", lambda: (SimpleNamespace(getVersion=lambda: version), ""))
    assert nvrtc.include_folders() == [str(tmp_path / part)]
