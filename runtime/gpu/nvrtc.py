"""CUDA C++ -> machine code of a card's generation, with neither a card nor a driver.

In: a source (source.py), an architecture. Out: a CUBIN, and what each kernel takes: registers, spilled bytes. Next:
cupy_device.py, which compiles with the same options; tests/test_nvrtc.py, which holds every kernel to its bounds.

NVRTC is called through CuPy's binding; what it needs lies in the packages of hotcold[gpu].
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotcold.runtime.gpu.device import DeviceError

OPTIONS = ("--std=c++17", "--restrict")
ARCHITECTURES = (70, 75, 80, 86, 89, 90, 100, 120)
_HEADERS = ("cuda_runtime/include", "cu13/include", "cu12/include")  # in the packages of NVIDIA


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
        nvrtc.getVersion()
    except Exception as e:  # a missing package, a missing library, one of another CUDA
        return None, " ".join(f"{type(e).__name__}: {e}".split())
    return nvrtc, ""


def include_folders() -> list[str]:
    """Where cuda_fp16.h lies: the packages of NVIDIA in this environment, then an installed toolkit."""
    return [str(folder) for folder in _candidates() if (folder / "cuda_fp16.h").is_file()][:1]


def _candidates() -> Iterator[Path]:
    try:
        bases = list(importlib.import_module("nvidia").__path__)
    except ImportError:
        bases = []
    for base in bases:
        yield from (Path(base) / part for part in _HEADERS)
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "include"
    yield Path("/usr/local/cuda/include")


def options() -> tuple[str, ...]:
    """What every compilation of a kernel file gets."""
    return (*OPTIONS, *(f"-I{folder}" for folder in include_folders()))


def compile_cubin(source: str, architecture: int) -> Compiled:
    """Machine code for compute capability architecture / 10. Raises DeviceError with what the compiler says."""
    nvrtc, reason = binding()
    if nvrtc is None:
        raise DeviceError(f"kernels cannot be compiled: {reason}")
    program = nvrtc.createProgram(source, "kernels.cu", (), ())
    try:
        flags = (*options(), f"--gpu-architecture=sm_{architecture}", "--ptxas-options=-v")
        try:
            nvrtc.compileProgram(program, flags)
        except nvrtc.NVRTCError as e:
            said = first_error(str(nvrtc.getProgramLog(program)))
            raise DeviceError(f"kernels do not compile for sm_{architecture}: {said or e}") from e
        log = str(nvrtc.getProgramLog(program))
        return Compiled(bytes(nvrtc.getCUBIN(program)), resources(log), log)
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
