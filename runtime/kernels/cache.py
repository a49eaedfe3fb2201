"""Where compiled kernels are kept, so that they are compiled once per machine and never served stale.

In: the kernels' source files. Out: compile_cached(). Next: team.py, which says what is compiled.

Numba's own check sees only the file that holds the cached function, so an edited kernel in another file would silently
run old code. The folder's name therefore carries a hash of all kernel sources, of the versions and of the CPU. Folders
that nobody has used for long go when a new one is made.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
import platformdirs
from numba.core import event

from hotcold.runtime.kernels import isa
from hotcold.runtime.kernels.numba_start import without_blas

_KEEP, _KEEP_DAYS = 3, 30  # so many folders stay, and those used in so many days


def cache_folder() -> Path:
    """The folder of compiled kernels for these sources on this machine."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    triple, cpu, features = isa.target()
    versions = (sys.version, numba.__version__, llvmlite.__version__, np.__version__)
    digest.update(repr((versions, triple, cpu, sorted(features), isa.CHOSEN.name)).encode())
    return Path(platformdirs.user_cache_dir("hotcold", appauthor=False)) / f"kernels-{digest.hexdigest()[:16]}"


def prune(folder: Path, now: float) -> list[Path]:
    """Remove the folders beside `folder` that are neither among the last ones used nor used of late; -> those.

    A process that uses one all the same loses time only: it has loaded its code, or compiles it again.
    """
    found = []
    for other in folder.parent.glob("kernels-*"):
        with contextlib.suppress(OSError):  # another process removes it as well
            if other != folder and other.is_dir():
                found.append((other.stat().st_mtime, other))
    found.sort(reverse=True)
    old = [path for used, path in found[_KEEP - 1 :] if now - used > _KEEP_DAYS * 86400]
    for path in old:
        shutil.rmtree(path, ignore_errors=True)
    return old


class _Watch(event.Listener):
    """Numba's events -> names of the functions that are being compiled, as they begin."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress

    def on_start(self, event: Any) -> None:
        self._progress(event.data["dispatcher"].py_func.__name__)

    def on_end(self, event: Any) -> None:
        pass


_compiling = threading.Lock()  # Numba's setting of where to cache is one for the process


def compile_cached(
    functions: list[tuple[Any, tuple]],
    notify: Callable[[str], None],
    progress: Callable[[str], None] | None = None,
) -> bool:
    """Compile (or load) njit functions for the given argument types; `notify` is told when that takes time.

    progress: called in another thread with the name of each function whose compilation begins. Returns False where the
    code could not be kept; `notify` was told that, too.
    """
    errors: list[BaseException] = []
    kept: list[bool] = []

    def work() -> None:
        try:
            with _compiling, without_blas(), contextlib.ExitStack() as stack:
                if progress:
                    stack.enter_context(event.install_listener("numba:compile", _Watch(progress)))
                kept.append(_compile_pending(functions, notify))
        except BaseException as error:
            errors.append(error)

    # In a thread of its own: Ctrl-C in the middle of LLVM's callbacks would be printed and forgotten.
    thread = threading.Thread(target=work, name="hotcold-compile", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return kept[0]


def compiling() -> bool:
    """Whether a compilation that was interrupted goes on in the background."""
    return _compiling.locked()


def _compile_pending(functions: list[tuple[Any, tuple]], notify: Callable[[str], None]) -> bool:
    pending = [(f, signature) for f, signature in functions if signature not in f.overloads]
    if not pending:
        return True
    folder = cache_folder()
    config: Any = numba.config
    before, kept = config.CACHE_DIR, True
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)  # used now
        config.CACHE_DIR = str(folder)  # read when a function's cache is enabled
        for f, _ in pending:
            f.enable_caching()
        # Numba keeps a folder for each place that the sources lie in.
        own = {Path(f._cache.cache_path) for f, _ in pending}
        compiled = {path.name.split("-")[0] for one in own for path in one.glob("*.nbi")}
    except (OSError, RuntimeError) as error:  # a folder that cannot be written
        notify(_not_kept(folder, error))
        compiled, kept = set(), False
    finally:
        config.CACHE_DIR = before
    new = any(f"walk.{f.py_func.__name__}" not in compiled for f, _ in pending)
    if new:
        notify("compiling the kernels for this CPU: once, about a minute ...")
    lost = [_compile(f, signature, folder, notify) for f, signature in pending]
    for failure in [failure for failure in lost if failure][:1]:
        notify(_not_kept(folder, failure))
        kept = False
    if new:
        notify("kernels compiled")
        prune(folder, time.time())
    return kept


def _compile(f: Any, signature: tuple, folder: Path, notify: Callable[[str], None]) -> OSError | None:
    """Load or compile one function. A damaged cache costs time only; so does one that cannot be filled: its error."""
    try:
        f.compile(signature)
    except (EOFError, pickle.UnpicklingError):  # files cut short, by a power failure for example
        notify(f"compiled kernels in {folder} are damaged: compiling them again, about a minute ...")
        for path in folder.rglob("*.nb[ic]"):
            path.unlink(missing_ok=True)
        return _compile(f, signature, folder, notify)
    except OSError as error:  # a full disk: compiled all the same
        if signature not in f.overloads:
            raise
        return error
    return None


def _not_kept(folder: Path, error: Exception) -> str:
    return f"compiled kernels cannot be kept in {folder} ({error}): compiling them at every start"
