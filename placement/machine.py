"""This machine: what is there, and how fast it reads memory.

In: the operating system, a GPU if there is one. Out: Machine (seen) and Hardware (measured), kept in the user's
cache. Next: doctor.py prints both; plan_vram.py places on what was measured.

What cannot be measured is said, with the reason, and is no error.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hotcold.placement.hardware import Hardware, cache_path, load_cached, save_cached
from hotcold.placement.measure_gpu import measure_gpu
from hotcold.runtime.bandwidth import ReadTest, cpu_name, last_level_cache
from hotcold.runtime.gguf_file import safe_text
from hotcold.runtime.gpu.device import find_cards, open_device
from hotcold.runtime.threads import cgroup_limit, default_threads

Say = Callable[[str], None]

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

    gpus, reason = find_cards()
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
            device = open_device()
            try:
                fields = {"gpu": device.name, **measure_gpu(device, say)}
            finally:
                device.close()
        except Exception as e:  # whatever a driver has to say must not end the program
            fields, problem = {}, f"{machine.gpus[0]} could not be measured: {_line(e)}"
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
