"""One measured run of a process, and what the rest of the machine did meanwhile.

In: a command. Out: Burst (its output, seconds, memory, and the share of the machine others took). Next: whoever
compares bursts, compare_llama_cpp.py.
"""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Burst:
    """What one run gave. `others` is the mean number of cores that all other processes kept busy meanwhile."""

    command: str
    status: int
    output: str
    errors: str  # the last lines of stderr
    wall_s: float
    cpu_s: float
    peak_rss_mb: float
    others: float
    load_before: float  # load average over a minute


def busy_seconds() -> float:
    """CPU seconds that the whole machine has spent on anything but idling, stolen time included."""
    times = psutil.cpu_times()._asdict()
    # guest times are part of user and nice already
    return sum(value for name, value in times.items() if name not in ("idle", "iowait", "guest", "guest_nice"))


def wait_for_quiet(limit: float, seconds: float) -> float:
    """Wait up to `seconds` until fewer than `limit` cores are busy. Returns how many were in the last half second."""
    end = time.monotonic() + seconds
    while True:
        start, busy = time.monotonic(), busy_seconds()
        time.sleep(0.5)
        others = (busy_seconds() - busy) / (time.monotonic() - start)
        if others < limit or time.monotonic() > end:
            return others


def run_burst(command: list[str], extra_env: dict[str, str] | None = None, timeout: float = 900.0) -> Burst:
    """Run a command to its end, or to `timeout` seconds (then status is -9). Raises OSError if it cannot start."""
    load = os.getloadavg()[0]
    shown = " ".join([f"{name}={value}" for name, value in (extra_env or {}).items()] + command)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        busy, start = busy_seconds(), time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env={**os.environ, **(extra_env or {})}
        )
        killer = threading.Timer(timeout, process.kill)
        killer.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)  # Popen.wait would not tell its CPU time
        except KeyboardInterrupt:
            process.kill()
            raise
        finally:
            killer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - start
        cpu = usage.ru_utime + usage.ru_stime
        others = max(0.0, busy_seconds() - busy - cpu) / wall
        out.seek(0)
        err.seek(0)
        rss_unit = 1 if platform.system() == "Darwin" else 1024
        return Burst(
            command=shown,
            status=process.returncode,
            output=out.read().decode(errors="replace"),
            errors="\n".join(err.read().decode(errors="replace").strip().splitlines()[-5:]),
            wall_s=wall,
            cpu_s=cpu,
            peak_rss_mb=usage.ru_maxrss * rss_unit / 1e6,
            others=others,
            load_before=load,
        )


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine_facts() -> dict[str, str]:
    """Processor, cores, memory, system: what a reader needs to place the figures."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "CPU": cpu_name(),
        "cores": f"{usable} usable of {os.cpu_count()}",
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load average": " ".join(f"{x:.2f}" for x in os.getloadavg()),
    }
