"""Where a model's bytes lie: the mapped file, a copy in anonymous memory, either one locked.

In: an open GGUF. Out: its buffer, copied or locked. Next: gguf_file.py, which hands out views of it.

A copy is asked to lie on huge pages, which spares the CPU most look-ups of addresses; a mapped file lies on small ones.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

from hotcold.runtime.errors import GGUFError, HotcoldError
from hotcold.runtime.gguf_parse import safe_text

Notify = Callable[[str], None]

_SLAB = 256 << 20  # bytes between two looks at the clock and at Ctrl-C
_AHEAD = 4 << 20  # bytes asked for at a time
_LARGE = 1 << 30  # bytes from where on reading is announced
_EVERY = 5.0  # seconds between lines
_READ_ONLY = 1  # PROT_READ


def read_into_memory(path: Path, size: int, notify: Notify) -> mmap.mmap:
    """The first `size` bytes of a file in private memory, read-only where the system can do that."""
    free = psutil.virtual_memory().available
    if size > free:
        raise HotcoldError(f"--no-mmap reads the whole file into memory: {_gib(size)} are needed, "
                           f"{_gib(free)} are free; leave --no-mmap out")  # fmt: skip
    if hasattr(mmap, "MAP_PRIVATE"):
        # Private, or the memory would be a file of the system's, which rarely gets huge pages.
        buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        buffer = mmap.mmap(-1, size)
    try:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                buffer.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without them
        _fill(buffer, path, size, notify)
        _protect(buffer)
    except BaseException:
        buffer.close()
        raise
    return buffer


def _fill(buffer: mmap.mmap, path: Path, size: int, notify: Notify) -> None:
    progress = _Progress("reading into memory", size, notify)
    try:
        with open(path, "rb", buffering=0) as file, memoryview(buffer) as view:
            done = 0
            while done < size:
                with view[done : min(size, done + _SLAB)] as part:
                    n = file.readinto(part)
                if not n:
                    raise GGUFError(f"{safe_text(str(path))}: ends after {done} of {size} bytes: something changed it "
                                    "while it was read")  # fmt: skip
                done += n
                progress.at(done)
    except OSError as e:
        raise GGUFError(f"{safe_text(str(path))}: cannot be read: {e.strerror or e}") from None


def _protect(buffer: mmap.mmap) -> None:
    """A kernel that writes where it must not should fail as it does on a mapped file."""
    libc = _libc()
    if libc is not None:
        libc.mprotect(ctypes.c_void_p(address(buffer)), ctypes.c_size_t(len(buffer)), _READ_ONLY)


def lock(buffer: mmap.mmap, notify: Notify) -> bool:
    """Keep the buffer in RAM. Where the system does not allow that, a line says why, and the program goes on."""
    libc, size, start = _libc(), len(buffer), address(buffer)
    if libc is None or not hasattr(libc, "mlock"):
        notify("warning: --mlock: this system has no mlock; the model is not locked in memory")
        return False
    progress = _Progress("locking in memory", size, notify)
    for done in range(0, size, _SLAB):
        n = min(_SLAB, size - done)
        if libc.mlock(ctypes.c_void_p(start + done), ctypes.c_size_t(n)) != 0:
            error = ctypes.get_errno()
            libc.munlock(ctypes.c_void_p(start), ctypes.c_size_t(size))
            notify(f"warning: --mlock: {_gib(size)} cannot be locked in memory: {os.strerror(error)}{_limit(size)}; "
                   "it goes on with a model that is not locked")  # fmt: skip
            return False
        progress.at(done + n)
    return True


def _limit(size: int) -> str:
    """What RLIMIT_MEMLOCK has to do with it."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    except (ImportError, AttributeError, OSError):
        return ""
    if limit == resource.RLIM_INFINITY or limit >= size:
        return ""
    return (f" (RLIMIT_MEMLOCK is {limit >> 10} KiB; raise it by ulimit -l unlimited, "
            "or by memlock in /etc/security/limits.conf)")  # fmt: skip


def prefetch(path: Path) -> threading.Event | None:
    """Have a file read in the background that is not in the page cache; -> set it to stop. None: not done.

    A thread that misses a page of a mapped file waits for it, one after the other; asked for ahead, they come at the
    speed of the disk. A file that does not fit into the free memory is left to what is really read.
    """
    if not hasattr(os, "posix_fadvise"):
        return None
    stop = threading.Event()

    def work() -> None:
        try:
            with open(path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size >= psutil.virtual_memory().available:
                    return
                for start in range(0, size, _AHEAD):  # one call for all would read no more than its beginning
                    if stop.is_set():
                        return
                    os.posix_fadvise(file.fileno(), start, _AHEAD, os.POSIX_FADV_WILLNEED)
        except OSError:
            pass  # only a hint

    threading.Thread(target=work, name="hotcold-prefetch", daemon=True).start()
    return stop


def address(buffer: mmap.mmap) -> int:
    """Where a mapping begins."""
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def _libc() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None, use_errno=True)
    except (OSError, TypeError):  # Windows
        return None


class _Progress:
    """A line when something large begins, and one every few seconds."""

    def __init__(self, what: str, size: int, notify: Notify) -> None:
        self._what, self._size, self._notify = what, size, notify
        self._told = time.perf_counter()
        if size >= _LARGE:
            notify(f"{what} {_gib(size)} ...")

    def at(self, done: int) -> None:
        now = time.perf_counter()
        if now - self._told >= _EVERY and done < self._size:
            self._told = now
            self._notify(f"{self._what}: {_gib(done)} of {_gib(self._size)}")


def _gib(n: int) -> str:
    return f"{n / 2**30:.1f} GiB"
