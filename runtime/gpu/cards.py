"""Which cards there are, and why one cannot be used.

In: CuPy. Out: find_cards(), which opens none; the checks before one is opened.
Next: cupy_device.py.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from hotcold.runtime.gguf_file import safe_text
from hotcold.runtime.gpu import nvrtc
from hotcold.runtime.gpu.device import DeviceUnavailable

LEAST_CAPABILITY = (7, 0)  # memory flags that the CPU sees need the memory model of Volta
_LEAST_CUDA13 = (7, 5)
_INSUFFICIENT_DRIVER = 35  # cudaError_t
_INSTALL = "pip install 'hotcold[gpu]'"


def find_cards(package: str = "cupy") -> tuple[tuple[str, ...], str]:
    """-> names of the cards that can be used, and why there is none ("" if there is one). Makes no context."""
    try:
        found = usable_cards(load_cupy(package))
        check_compiler()
    except DeviceUnavailable as e:
        return (), e.reason
    except Exception as e:  # whatever a driver has to say must not end the program
        return (), f"CuPy finds no GPU: {line(e)}"
    return tuple(name_of(properties) for properties in found.values()), ""


def usable_cards(cupy: Any) -> dict[int, dict[str, Any]]:
    """-> number of each usable card -> its properties. Raises DeviceUnavailable if there is none."""
    runtime = cupy.cuda.runtime
    cards = {i: runtime.getDeviceProperties(i) for i in range(_count(runtime))}
    problems = {i: _problem(properties, runtime) for i, properties in cards.items()}
    usable = {i: properties for i, properties in cards.items() if not problems[i]}
    if not usable:
        raise DeviceUnavailable(problems[0])
    return usable


def load_cupy(package: str = "cupy") -> Any:
    # All code is loaded at once: what is loaded later, beside a kernel that waits for the CPU, could wait forever.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    try:
        cupy = importlib.import_module(package)
    except Exception as e:
        if isinstance(e, ModuleNotFoundError) and e.name == package:
            raise DeviceUnavailable(f"CuPy is not installed: {_INSTALL}") from None
        raise DeviceUnavailable(f"CuPy cannot be loaded: {line(e)}") from e  # one of another CUDA fails in many ways
    if getattr(cupy.cuda.runtime, "is_hip", False):
        raise DeviceUnavailable("this CuPy is built for ROCm, only CUDA is supported")
    return cupy


def _count(runtime: Any) -> int:
    try:
        n = int(runtime.getDeviceCount())
    except Exception as e:
        if getattr(e, "status", None) != _INSUFFICIENT_DRIVER:
            raise DeviceUnavailable(f"CuPy finds no GPU or driver: {line(e)}") from e
        driver, wanted = int(runtime.driverGetVersion()), int(runtime.runtimeGetVersion())
        if driver == 0:
            raise DeviceUnavailable("there is no NVIDIA driver") from e
        raise DeviceUnavailable(
            f"the NVIDIA driver is for CUDA {_version(driver)}, this CuPy needs CUDA {wanted // 1000}: update the "
            "driver, or install the CuPy of its CUDA"
        ) from e
    if n == 0:
        raise DeviceUnavailable("CuPy finds no GPU")
    return n


def _problem(properties: dict[str, Any], runtime: Any) -> str:
    """Why a card cannot be used; "" if it can."""
    name, capability = name_of(properties), (int(properties["major"]), int(properties["minor"]))
    least = LEAST_CAPABILITY if runtime.runtimeGetVersion() < 13000 else _LEAST_CUDA13
    if capability < least:
        hint = ": install cupy-cuda12x" if capability >= LEAST_CAPABILITY else ""
        return (f"{name} is too old: it has compute capability {capability[0]}.{capability[1]}, at least "
                f"{least[0]}.{least[1]} is needed{hint}")  # fmt: skip
    if not properties.get("canMapHostMemory", 1) or not properties.get("unifiedAddressing", 1):
        return f"{name} cannot read the host's memory"
    return ""


def check_compiler() -> None:
    binding, reason = nvrtc.binding()
    if binding is None:
        raise DeviceUnavailable(f"kernels cannot be compiled ({safe_text(reason, 160)}): {_INSTALL}")
    if not nvrtc.include_folders():
        raise DeviceUnavailable(f"kernels cannot be compiled (cuda_fp16.h is missing): {_INSTALL}")


def name_of(properties: dict[str, Any]) -> str:
    name = properties["name"]
    return safe_text(name.decode(errors="replace") if isinstance(name, bytes) else str(name), 80)


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def line(error: BaseException) -> str:
    return safe_text(" ".join(f"{type(error).__name__}: {error}".split()), 160)
