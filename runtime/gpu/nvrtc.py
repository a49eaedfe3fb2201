"""CUDA C++ -> machine code of a card's generation, with neither a card nor a driver.

In: a source (source.py), an architecture. Out: a CUBIN, and what each kernel takes: registers, spilled bytes;
cached_code(), which compiles once per machine. Next: cupy_device.py, which loads it.

NVRTC is called through CuPy's binding; what it needs lies in the packages of hotcold[gpu].
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from hotcold.runtime.gpu.device import DeviceError

OPTIONS = ("--std=c++17", "--ftz=true")  # denormal numbers count as 0, as they do on the CPU
ARCHITECTURES = (70, 75, 80, 86, 89, 90, 100, 120)
_KEEP_DAYS = 60  # compiled code that nobody has used for so long goes


@dataclass(frozen=True)
class Resources:
    registers: int  # per thread
    spilled: int  # bytes of local memory that registers were stored to and loaded from
    stack: int  # bytes of local memory in all
    shared: int  # bytes per block, without what the launch adds


@dataclass(frozen=True)
class Compiled:
    cubin: bytes
    kernels: dict[str, Resources]
    log: str


def binding() -> tuple[Any, str]:
    """-> CuPy's NVRTC module, ready; None and the reason where it cannot be used."""
    try:
        nvrtc = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
        try:
            nvrtc.getVersion()
        except Exception:  # CuPy 13 does not look into NVIDIA's packages
            if not preload("libnvrtc.so.1?", "nvrtc64_*.dll"):
                raise
            nvrtc.getVersion()
    except Exception as e:  # a missing package, a missing library, one of another CUDA
        return None, " ".join(f"{type(e).__name__}: {e}".split())
    return nvrtc, ""


def preload(*patterns: str) -> bool:
    """Load libraries of NVIDIA's packages in this order, so that they are found by name; -> whether any is there."""
    found = False
    for pattern in patterns:
        for base in _packages():
            for path in sorted(base.glob(f"*/lib/{pattern}")) + sorted(base.glob(f"*/bin/{pattern}")):
                with contextlib.suppress(OSError):
                    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
                    found = True
    return found


def include_folders() -> list[str]:
    """Where cuda_fp16.h lies: in the packages of NVIDIA for the CUDA of NVRTC, then in an installed toolkit."""
    return [str(folder) for folder in _headers() if (folder / "cuda_fp16.h").is_file()][:1]


def _packages() -> list[Path]:
    try:
        return [Path(base) for base in importlib.import_module("nvidia").__path__]
    except ImportError:
        return []


def _headers() -> Iterator[Path]:
    nvrtc, _ = binding()
    if nvrtc is not None:  # headers of another CUDA may lie beside those of this one
        cuda = nvrtc.getVersion()[0]
        part = "cuda_runtime/include" if cuda < 13 else f"cu{cuda}/include"
        yield from (base / part for base in _packages())
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "include"
    yield Path("/usr/local/cuda/include")


def options() -> tuple[str, ...]:
    """What every compilation of a kernel file gets."""
    return (*OPTIONS, *(f"-I{folder}" for folder in include_folders()))


def compile_cubin(source: str, architecture: int) -> Compiled:
    """Machine code for compute capability architecture / 10. Raises DeviceError with what the compiler says."""
    flags = (f"--gpu-architecture=sm_{architecture}", "--ptxas-options=-v")
    cubin, log = _compile(source, flags, lambda nvrtc, program: nvrtc.getCUBIN(program))
    return Compiled(cubin, resources(log), log)


def cached_code(source: str, architecture: int) -> Path:
    """A file that a card of this architecture can load: compiled now, or kept from before."""
    nvrtc, reason = binding()
    if nvrtc is None:
        raise DeviceError(f"kernels cannot be compiled: {reason}")
    flags, suffix = _target(architecture, nvrtc.getSupportedArchs())
    what = repr((source, flags, OPTIONS, nvrtc.getVersion()))
    folder = Path(platformdirs.user_cache_dir("hotcold", appauthor=False)) / "gpu"
    path = folder / f"{hashlib.sha256(what.encode()).hexdigest()[:24]}{suffix}"
    if not path.is_file():
        get = nvrtc.getCUBIN if suffix == ".cubin" else nvrtc.getPTX
        code, _ = _compile(source, flags, lambda _, program: get(program))
        folder.mkdir(parents=True, exist_ok=True)
        _prune(folder)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(code)
        os.replace(part, path)
    with contextlib.suppress(OSError):
        os.utime(path)
    return path


def _target(architecture: int, supported: tuple[int, ...]) -> tuple[tuple[str, ...], str]:
    """Machine code runs on later cards of the same generation; for others the driver translates PTX."""
    same = [a for a in supported if a // 10 == architecture // 10 and a <= architecture]
    if same:
        return (f"--gpu-architecture=sm_{max(same)}",), ".cubin"
    before = [a for a in supported if a < architecture]
    if not before:
        raise DeviceError(
            f"kernels cannot be compiled for compute capability {architecture / 10}: this NVRTC begins at "
            f"{min(supported) / 10}, install an older one"
        )
    return (f"--gpu-architecture=compute_{max(before)}",), ".ptx"


def _prune(folder: Path) -> None:
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another process removes it as well
            if time.time() - path.stat().st_mtime > _KEEP_DAYS * 86400:
                path.unlink()


def _compile(source: str, flags: tuple[str, ...], result: Callable[[Any, Any], bytes]) -> tuple[bytes, str]:
    nvrtc, reason = binding()
    if nvrtc is None:
        raise DeviceError(f"kernels cannot be compiled: {reason}")
    program = nvrtc.createProgram(source, "kernels.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, (*options(), *flags))
        except nvrtc.NVRTCError as e:
            said = first_error(str(nvrtc.getProgramLog(program)))
            raise DeviceError(f"kernels do not compile for {flags[0].partition('=')[2]}: {said or e}") from e
        return bytes(result(nvrtc, program)), str(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)


def first_error(log: str) -> str:
    """The line of a compiler's report that matters; "" if there is none."""
    lines = [" ".join(line.split()) for line in log.splitlines()]
    return next((line for line in lines if "error" in line), "")


def resources(log: str) -> dict[str, Resources]:
    """What `--ptxas-options=-v` says of each kernel."""
    found: dict[str, Resources] = {}
    parts = re.split(r"Compiling entry function '(\w+)' for '\w+'", log)
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        number = _numbers(text)
        found[name] = Resources(
            registers=number(r"Used (\d+) registers"),
            spilled=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
            stack=number(r"(\d+) bytes stack frame"),
            shared=number(r"(\d+) bytes smem", 0),
        )
    return found


def _numbers(text: str) -> Callable[..., int]:
    def number(pattern: str, missing: int | None = None) -> int:
        match = re.search(pattern, text)
        if match is None and missing is None:
            raise DeviceError(f"the compiler's report cannot be read: {pattern!r} is not in {text[:200]!r}")
        return int(match[1]) if match else int(missing or 0)

    return number
