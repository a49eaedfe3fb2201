"""How many threads to use: what affinity and cgroup allow, at most one per physical core.

In: the operating system. Out: default_threads(). Next: engine.py.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def cgroup_limit(root: Path = _CGROUP) -> float:
    """CPUs the control group allows (its quota over its period); infinity without a limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()  # version 2
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota = (root / "cpu" / "cpu.cfs_quota_us").read_text()  # version 1
        period = (root / "cpu" / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError):
        return math.inf


def default_threads() -> int:
    """Threads to use when the user names no number: at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = psutil.cpu_count(logical=False) or allowed
    return max(1, int(min(allowed, cores, cgroup_limit())))
