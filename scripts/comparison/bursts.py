"""One measured run of a process, and what the rest of the machine did meanwhile.

In: a command. Out: Burst (its output, seconds, memory, and the share of the machine others took). Next: whoever
compares bursts, compare_llama_cpp.py.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hotcold.placement.machine import describe_machine
from hotcold.runtime.bench import peak_rss


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
    track: list[tuple[float, float]] = field(default_factory=list, repr=False)  # (seconds since start, CPU seconds)

    def cores(self, begin: float, end: float) -> float | None:
        """Mean number of cores this process kept busy in a span of its run; None if it is too short to tell."""
        inside = [point for point in self.track if begin <= point[0] <= end]
        if len(inside) < 3:
            return None
        (t0, cpu0), (t1, cpu1) = inside[0], inside[-1]
        return (cpu1 - cpu0) / (t1 - t0)


TRACK_S = 0.05  # between two looks at a burst's CPU time


class Tracker(threading.Thread):
    """Writes down a process's CPU time and memory while it runs, for programs that do not tell them."""

    def __init__(self, pid: int, start: float) -> None:
        super().__init__(daemon=True)
        self.process, self.start_time = psutil.Process(pid), start
        self.points: list[tuple[float, float]] = []
        self.peak_rss = 0  # bytes
        self.done = threading.Event()

    def run(self) -> None:
        while True:
            try:
                times = self.process.cpu_times()
                # What wait4 tells includes the memory that the process had as a copy of ours, before it was another.
                self.peak_rss = max(self.peak_rss, peak_rss(self.process))
            except psutil.Error:  # it has ended
                return
            self.points.append((time.perf_counter() - self.start_time, times.user + times.system))
            if self.done.wait(TRACK_S):
                return


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
        tracker = Tracker(process.pid, start)
        tracker.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)  # Popen.wait would not tell its CPU time
        except KeyboardInterrupt:
            process.kill()
            raise
        finally:
            killer.cancel()
            tracker.done.set()
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - start
        cpu = usage.ru_utime + usage.ru_stime
        others = max(0.0, busy_seconds() - busy - cpu) / wall
        out.seek(0)
        err.seek(0)
        return Burst(
            command=shown,
            status=process.returncode,
            output=out.read().decode(errors="replace"),
            errors="\n".join(err.read().decode(errors="replace").strip().splitlines()[-5:]),
            wall_s=wall,
            cpu_s=cpu,
            peak_rss_mb=tracker.peak_rss / 1e6,
            others=others,
            load_before=load,
            track=tracker.points,
        )


def machine_facts() -> dict[str, str]:
    """Processor, instruction sets that matter, cores, memory, system: what a reader needs to place the figures."""
    machine = describe_machine()
    return {
        "CPU": machine.cpu,
        "CPU model": cpu_model(),
        "instruction sets": ", ".join(machine.features) or "none that the kernels use",
        "cores": f"{machine.allowed} usable of {os.cpu_count()}",
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load average": load_average(),
    }


def cpu_model() -> str:
    """Numbers that tell processors of one name apart, as virtual machines give them; "unknown" where nothing tells."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "unknown"
    found = [re.search(rf"^{field}\s*: (\d+)$", text, re.MULTILINE) for field in ("cpu family", "model", "stepping")]
    family, model, stepping = (match[1] if match else "?" for match in found)
    return f"family {family}, model {model}, stepping {stepping}"


def load_average() -> str:
    return " ".join(f"{x:.2f}" for x in os.getloadavg())
