"""How many threads are used when nobody says: affinity, physical cores and the control group's quota all limit it."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path

import psutil
import pytest

from hotcold.runtime import threads


def group(root: Path, **files: str) -> Path:
    """A cgroup folder with files; __ in a name is a folder."""
    for name, text in files.items():
        path = root.joinpath(*name.split("__"))
        path = path.with_name(path.name.replace("cpu_max", "cpu.max").replace("cfs", "cpu.cfs"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, math.inf),
        ({"cpu_max": "max 100000\n"}, math.inf),
        ({"cpu_max": "200000 100000\n"}, 2),
        ({"cpu_max": "150000 100000\n"}, 1.5),
        ({"cpu_max": "5000 100000\n"}, 0.05),
        ({"cpu_max": ""}, math.inf),
        ({"cpu_max": "some text here\n"}, math.inf),
        ({"cpu__cfs_quota_us": "300000\n", "cpu__cfs_period_us": "100000\n"}, 3),
        ({"cpu__cfs_quota_us": "-1\n", "cpu__cfs_period_us": "100000\n"}, math.inf),
        ({"cpu__cfs_quota_us": "300000\n"}, math.inf),
    ],
)
def test_cgroup_limit(files: dict[str, str], limit: float, tmp_path: Path) -> None:
    assert threads.cgroup_limit(group(tmp_path, **files), tmp_path / "absent") == limit


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/a/b\n", {"a__b__cpu_max": "max 100000\n", "a__cpu_max": "150000 100000\n"}, 1.5),  # the slice's limit
        ("0::/a/b\n", {"a__b__cpu_max": "300000 100000\n", "a__cpu_max": "max 100000\n"}, 3),
        ("0::/a/b\n", {"c__cpu_max": "100000 100000\n"}, math.inf),
        ("0::/../../a\n", {"cpu_max": "200000 100000\n"}, 2),  # a group above this namespace's root
        ("5:memory:/m\n4:cpu,cpuacct:/d\n", {"cpu__d__cfs_quota_us": "50000\n", "cpu__d__cfs_period_us": "100000\n",
                                             "m__cpu_max": "1 1\n"}, 0.5),
        ("nonsense", {"cpu_max": "100000 100000\n"}, 1),
    ],
)  # fmt: skip
def test_cgroup_limit_of_nested_groups(own: str, files: dict[str, str], limit: float, tmp_path: Path) -> None:
    (tmp_path / "own").write_text(own)
    assert threads.cgroup_limit(group(tmp_path, **files), tmp_path / "own") == limit


@pytest.mark.parametrize(
    ("allowed", "cores", "limit", "expected"),
    [
        (8, 4, math.inf, 4),  # two threads per core
        (2, 4, math.inf, 2),  # taskset
        (8, 8, 3.9, 3),
        (8, 8, 0.05, 1),
        (1, 64, math.inf, 1),
        (6, None, math.inf, 6),  # no topology: virtual machines, ARM
    ],
)
def test_default_threads(
    allowed: int, cores: int | None, limit: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(allowed)), raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: cores)
    monkeypatch.setattr(threads, "cgroup_limit", lambda: limit)
    assert threads.default_threads() == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity masks")
def test_affinity_of_this_process_counts() -> None:
    """In a thread of its own, whose mask ends with it."""
    found = []

    def work() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        found.append(threads.default_threads())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [1]
