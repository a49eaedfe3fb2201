"""This machine: what is there, and how fast it reads memory.

In: the operating system, CuPy if it is installed. Out: Machine (seen) and Hardware (measured), kept in the user's
cache. Next: doctor.py prints both; plan_vram.py places on what was measured.

What cannot be measured is said, with the reason, and is no error.
"""

from __future__ import annotations

import importlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from hotcold.placement.hardware import Hardware, cache_path, load_cached, save_cached
from hotcold.runtime.bandwidth import ReadTest, cpu_name, last_level_cache
from hotcold.runtime.gguf_file import safe_text
from hotcold.runtime.threads import cgroup_limit, default_threads

Say = Callable[[str], None]

_PASSES = 6
_NO_LIMIT = 1 << 60  # control groups of version 1 write a number above it for "none"
_SHOWN_FEATURES = ("avx2", "fma", "f16c", "avxvnni", "avx512f", "avx512bw", "avx512vl", "avx512vnni", "neon", "dotprod")


@dataclass(frozen=True)
class Machine:
    """What is there; nothing in it is measured."""

    cpu: str
    features: tuple[str, ...]  # those that the kernels use
    kernels: str  # the instructions they were written for here: kernels/isa.py
    missing: tuple[str, ...]  # those without which they do not run
    logical: int
    cores: int
    allowed: int  # CPUs that this process may run on
    cgroup: float  # CPUs that control groups allow; infinity: no limit
    threads: int
    cache: int  # bytes of the last-level cache; 0: not known
    ram: int  # bytes; what control groups allow if that is less
    gpus: tuple[str, ...]
    gpu_reason: str  # why there is none that can be used

    def signature(self) -> tuple[object, ...]:
        """What the measured figures depend on."""
        return (self.cpu, self.features, self.logical, self.threads, self.ram, self.gpus)


# ---- what is there


def describe_machine() -> Machine:
    from hotcold.runtime.kernels import isa, simd

    _, gpus, reason = find_gpu()
    logical = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    return Machine(
        cpu=cpu_name(),
        features=tuple(f for f in _SHOWN_FEATURES if f in isa.FEATURES),
        kernels=simd.ISA,
        missing=tuple(simd.MISSING),
        logical=logical,
        cores=psutil.cpu_count(logical=False) or logical,
        allowed=allowed,
        cgroup=cgroup_limit(),
        threads=default_threads(),
        cache=last_level_cache(),
        ram=min(psutil.virtual_memory().total, memory_limit()),
        gpus=gpus,
        gpu_reason=reason,
    )


def memory_limit(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that control groups allow; a huge number where they set no limit."""
    files = [root / "memory.max", root / "memory/memory.limit_in_bytes"]
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        group = Path(path.lstrip("/"))
        if ".." in group.parts:
            continue
        if not controllers:
            files += [root / part / "memory.max" for part in (group, *group.parents)]
        elif "memory" in controllers.split(","):
            files += [root / "memory" / part / "memory.limit_in_bytes" for part in (group, *group.parents)]
    limits = [_NO_LIMIT]
    for file in files:
        try:
            limits.append(int(file.read_text()))
        except (OSError, ValueError):
            pass  # not there, or "max"
    return min(limits)


def find_gpu(name: str = "cupy") -> tuple[Any, tuple[str, ...], str]:
    """-> the CuPy module (None without a usable GPU), the cards' names, why there is none."""
    try:
        cupy = importlib.import_module(name)
    except Exception as e:
        if isinstance(e, ModuleNotFoundError) and e.name == name:
            return None, (), "CuPy is not installed: pip install 'hotcold[gpu]'"
        # a CuPy of another CUDA fails in many ways
        return None, (), f"CuPy cannot be loaded: {_line(e)}"
    try:
        runtime = cupy.cuda.runtime
        names = [runtime.getDeviceProperties(i)["name"] for i in range(runtime.getDeviceCount())]
    except Exception as e:
        return None, (), f"CuPy finds no GPU or driver: {_line(e)}"
    if not names:
        return None, (), "CuPy finds no GPU"
    return cupy, tuple(safe_text(n.decode(errors="replace") if isinstance(n, bytes) else str(n), 80) for n in names), ""


def _line(error: Exception) -> str:
    return safe_text(" ".join(f"{type(error).__name__}: {error}".split()), 160)


# ---- measuring


def measure_cpu(threads: int, cache: int, say: Say) -> tuple[float, float]:
    """-> bytes per second that one thread and all threads read from RAM: the best of several passes."""
    test = ReadTest(cache)
    say("reading RAM with one thread")
    one = test.measure(1)
    say(f"reading RAM with {threads} threads")
    return one, max(one, test.measure(threads)) if threads > 1 else one


def measure_gpu(cupy: Any, say: Say) -> dict[str, Any]:
    """Fields of Hardware about the first card. Whatever CuPy raises passes through."""
    say("reading VRAM")
    runtime = cupy.cuda.runtime
    free, total = runtime.memGetInfo()
    n = max(min(512 << 20, free // 4), 1 << 20) // 4
    data = cupy.ones(n, dtype=np.float32)
    read = 4 * n / _gpu_seconds(cupy, lambda: data.sum())
    copied = 8 * n / _gpu_seconds(cupy, lambda: data.copy())
    say("copying over PCIe")
    size = min(4 * n, 128 << 20)
    pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.float32, size // 4)
    target = cupy.empty(size // 4, dtype=np.float32)
    pcie = size / _gpu_seconds(cupy, lambda: target.set(pinned))
    say("waiting for the GPU")
    small, times = cupy.zeros(32, dtype=np.float32), []
    for _ in range(200):
        began = time.perf_counter()
        small += np.float32(1)
        cupy.cuda.get_current_stream().synchronize()
        times.append(time.perf_counter() - began)
    return {"gpu_bandwidth": max(read, copied), "pcie": pcie, "t_sync": float(np.median(times)), "vram": int(total)}


def _gpu_seconds(cupy: Any, work: Callable[[], object]) -> float:
    """Least time of several runs, by the card's own clock."""
    best = math.inf
    for _ in range(_PASSES):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        work()
        end.record()
        end.synchronize()
        best = min(best, cupy.cuda.get_elapsed_time(start, end) / 1e3)
    return max(best, 1e-9)


def busy(machine: Machine) -> str:
    """What to say where other programs keep the CPUs busy; "" where they do not."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load < 0.75 * machine.logical:
        return ""
    return (f"other programs kept the CPUs busy (load {load:.1f} on {machine.logical} CPUs): figures are too low and "
            "are not kept")  # fmt: skip


def measure(machine: Machine, say: Say = lambda _: None) -> tuple[Hardware, str]:
    """-> figures of this machine, and why they are not complete or not to be trusted ("" if all is well)."""
    problem = busy(machine)
    one, all_threads = measure_cpu(machine.threads, machine.cache, say)
    fields: dict[str, Any] = {}
    if machine.gpus:
        try:
            fields = {"gpu": machine.gpus[0], **measure_gpu(find_gpu()[0], say)}
        except Exception as e:  # whatever a driver has to say must not end the program
            problem = f"{machine.gpus[0]} could not be measured: {_line(e)}"
    name = f"this machine: {machine.cpu}, {machine.threads} threads" + (f", {machine.gpus[0]}" if fields else "")
    return Hardware(name=name[:200], cpu_bandwidth=all_threads, cpu_bandwidth_1=one, threads=machine.threads,
                    ram=machine.ram, **fields), problem  # fmt: skip


def machine_hardware(
    refresh: bool = False, say: Say = lambda _: None, machine: Machine | None = None, folder: Path | None = None
) -> Hardware:  # fmt: skip
    """Figures of this machine, from the cache if they were measured before."""
    return figures(machine or describe_machine(), refresh, say, folder)[0]


def figures(machine: Machine, refresh: bool, say: Say, folder: Path | None) -> tuple[Hardware, bool, str]:
    """-> figures, whether they come from the cache, what could not be measured."""
    path = cache_path(machine.signature(), folder)
    cached = None if refresh else load_cached(path)
    if cached is not None:
        return cached, True, ""
    hardware, problem = measure(machine, say)
    if not problem:
        save_cached(path, hardware)
    return hardware, False, problem
