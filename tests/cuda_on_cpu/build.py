"""CUDA C++ -> functions of this CPU.

In: a source from hotcold.runtime.gpu.source. Out: Library, whose kernels take addresses. Next: sim_device.py.

Libraries are kept in a folder of the user's cache, by a hash of all that goes into them; several processes may build at
once.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import platformdirs

from hotcold.runtime.gpu.source import Signature, signatures

SHIM = Path(__file__).with_name("cuda_shim.h")
FLAGS = ("-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-march=native", "-fno-strict-aliasing",
         "-ffp-contract=off", "-w")  # fmt: skip
# The sanitizer: out of bounds and misaligned end the process with a report. ASan must be loaded first: asan_env().
ASAN = ("-O1", "-g", "-fsanitize=address,bounds,alignment", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
KEEP_DAYS = 14


@cache
def compiler() -> tuple[str, str]:
    """-> command and version of the C++ compiler; two empty words where there is none."""
    command = os.environ.get("CXX", "g++")
    if os.name != "posix" or shutil.which(command) is None:
        return "", ""
    done = subprocess.run([command, "--version"], capture_output=True, text=True)
    return (command, done.stdout.partition("\n")[0]) if done.returncode == 0 else ("", "")


def asan_env() -> dict[str, str]:
    """Environment of a Python process that loads libraries built with `asan`; {} where the sanitizer is missing."""
    command, _ = compiler()
    found = [
        subprocess.run([command, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    if not all(os.path.isabs(path) for path in found):
        return {}
    return {**os.environ, "LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0"}


class Library:
    """The kernels of one source, compiled."""

    def __init__(self, source: str, asan: bool = False) -> None:
        self.signatures = signatures(source)
        self._library = ctypes.CDLL(str(built(source, tuple(self.signatures), asan)))

    def run(self, kernel: str, grid: Sequence[int], block: Sequence[int], args: Sequence[object], shared: int,
            schedule: int) -> str:  # fmt: skip
        """Run a kernel to its end; -> what went wrong, "" if nothing. args: addresses and NumPy scalars."""
        cells = np.zeros(len(args), np.int64)  # each argument at the beginning of 8 bytes
        for i, (parameter, value) in enumerate(zip(self.signatures[kernel].parameters, args, strict=True)):
            dtype = np.dtype(np.int64) if parameter.pointer else parameter.dtype
            cells[i : i + 1].view(dtype)[0] = value
        addresses = cells.ctypes.data + 8 * np.arange(len(args), dtype=np.int64)
        error = ctypes.create_string_buffer(600)
        function = getattr(self._library, f"launch_{kernel}")
        three = ctypes.c_uint * 3
        failed = function(
            three(*grid, *[1] * (3 - len(grid))), three(*block, *[1] * (3 - len(block))), ctypes.c_size_t(shared),
            ctypes.c_void_p(addresses.ctypes.data), ctypes.c_uint(schedule), error, ctypes.c_size_t(len(error)),
        )  # fmt: skip
        return error.value.decode(errors="replace") if failed else ""

    def signature(self, kernel: str) -> Signature:
        return self.signatures[kernel]


def built(source: str, kernels: Sequence[str], asan: bool) -> Path:
    """-> the library of a source and its kernels, compiled unless it is in the cache. Raises RuntimeError."""
    command, version = compiler()
    if not command:
        raise RuntimeError("no C++ compiler: install g++ or set CXX")
    flags = (*FLAGS, *(ASAN if asan else ("-O2",)))
    exports = "".join(f"CUDA_ON_CPU_EXPORT({name})\n" for name in kernels)
    text = f"{SHIM.read_text()}\n{source}\n{exports}"
    digest = hashlib.sha256(repr((text, command, version, flags, _cpu())).encode()).hexdigest()[:24]
    folder = Path(platformdirs.user_cache_dir("hotcold", appauthor=False)) / "cuda_on_cpu"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{digest}.so"
    with _locked(folder / f"{digest}.lock"):
        if not library.exists():
            _prune(folder)
            _compile(text, [command, *flags], library)
    os.utime(library)
    return library


def _compile(text: str, command: list[str], library: Path) -> None:
    made = library.with_suffix(f".{os.getpid()}.part")
    done = subprocess.run([*command, "-x", "c++", "-", "-o", str(made)], input=text, capture_output=True, text=True)
    if done.returncode:
        made.unlink(missing_ok=True)
        raise RuntimeError(f"the C++ compiler refuses a kernel file:\n{done.stderr[:4000]}")
    os.replace(made, library)


@cache
def _cpu() -> str:
    """-march=native means another CPU's instructions on another machine with the same home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _prune(folder: Path) -> None:
    for path in folder.iterdir():
        try:
            if time.time() - path.stat().st_mtime > KEEP_DAYS * 86400:
                path.unlink()
        except OSError:
            pass  # another process removes it as well


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
