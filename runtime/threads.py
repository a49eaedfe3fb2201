"""How many threads to use: what affinity and cgroup allow, at most one per physical core.

In: the operating system. Out: default_threads(). Next: engine.py.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def cgroup_limit(root: Path = _CGROUP, own: Path = _OWN) -> float:
    """CPUs the control groups allow (the least quota over period on the way up); infinity without a limit.

    root: where the groups are mounted; own: the file that says which group of which hierarchy this process is in.
    """
    limits = [_quota(root), _quota(root / "cpu")]  # in a container the own group is the root
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:  # number:controllers:path, without controllers in version 2
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        hierarchy = root / "cpu" if controllers else root
        group = Path(path.lstrip("/"))
        limits += [_quota(hierarchy / part) for part in (group, *group.parents) if ".." not in part.parts]
    return min(limits)


def _quota(group: Path) -> float:
    """CPUs that one group allows, by the files of version 2 or 1; infinity if it says nothing."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        pass
    try:
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf


def default_threads() -> int:
    """Threads to use when the user names no number: at least 1."""
    cpus = usable_cpus()
    return max(1, int(min(cpus, psutil.cpu_count(logical=False) or cpus)))


def usable_cpus() -> float:
    """Logical CPUs that affinity and control groups leave to this process; a quota may be a fraction."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, cgroup_limit())
