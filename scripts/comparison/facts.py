"""What was compared: versions of ours, how llama.cpp was built.

In: the programs. Out: lines for the report. Next: report.py.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from comparison.settings import ANSWER_S, FOLDER

# Of cmake's cache, what decides how fast a build for the CPU is; GGML_ switches are shown where they are on.
BUILD_KEYS = ("CMAKE_BUILD_TYPE", "CMAKE_C_FLAGS", "CMAKE_CXX_FLAGS", "CMAKE_CXX_FLAGS_RELEASE", "GGML_CPU_ARM_ARCH")
BUILD_SWITCHES = re.compile(
    r"GGML_(NATIVE|OPENMP|LLAMAFILE|CPU_REPACK|LTO|BLAS|F16C|FMA|BMI2|SSE42|AVX\w*|AMX\w*|BACKEND_DL|CPU_ALL_VARIANTS)"
)


def versions() -> dict[str, str]:
    """Of Python and what the figures depend on; hotcold with its commit."""
    found = {name: importlib.metadata.version(name) for name in ("hotcold", "numpy", "numba", "llvmlite")}
    if git := shutil.which("git"):
        command = [git, "-C", str(FOLDER), "describe", "--always", "--dirty"]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        found["hotcold"] += f" ({commit})" if commit else ""
    return {"Python": platform.python_version(), **found}


def bench_facts(line: dict[str, Any]) -> str:
    """What a line of llama-bench, or of stock_worker.py, says of its build and settings."""
    flash = {-1: "auto", 0: "off", 1: "on", None: "auto"}.get(line.get("flash_attn"), line.get("flash_attn"))
    return (f"build {line.get('build_commit', '?')} ({line.get('build_number', '?')}), "
            f"KV {line.get('type_k', '?')}/{line.get('type_v', '?')}, flash attention {flash}")  # fmt: skip


def build_facts(program: Path) -> str:
    """Compiler and switches of a llama-bench, as far as it and cmake's cache beside it tell."""
    parts = []
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, errors="replace",
                              timeout=ANSWER_S)  # fmt: skip
        parts += [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("built with")]
    except (OSError, subprocess.TimeoutExpired):
        pass
    build = program.resolve().parent.parent
    try:
        cache = dict(re.findall(r"^(\w+):\w+=(.*)$", (build / "CMakeCache.txt").read_text(), re.MULTILINE))
    except (OSError, UnicodeDecodeError):
        return "; ".join([*parts, "no CMakeCache.txt beside it"])
    parts += [f"{key}={cache[key]}" for key in BUILD_KEYS if cache.get(key)]
    parts += [f"{key}=ON" for key, value in cache.items() if value == "ON" and BUILD_SWITCHES.fullmatch(key)]
    changes = build.parent / "changes.txt"  # what get_llama_cpp.sh had to mend in the sources
    if changes.exists():
        parts.append(changes.read_text().strip())
    return "; ".join(parts)
