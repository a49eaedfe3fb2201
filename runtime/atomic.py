"""A file that appears under its name complete, or not at all.

In: a path and the bytes that a caller writes. Out: the file, synced and renamed, or nothing. Next: perplexity.py,
placement/report.py (convert/writer.py has its own, which checks a model too).
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import safe_text

MARGIN = 16 << 20  # bytes left free beside the file


def check_output(path: Path, force: bool, n_bytes: int = 0) -> None:
    """Raise HotcoldError unless a file of n_bytes may be made at `path`: before the work, not after it."""
    shown = safe_text(str(path))
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise HotcoldError(f"{shown}: is not a regular file and is never replaced: give another name")
        if not force:
            raise _exists(path)
    except FileNotFoundError:
        if os.path.islink(path):
            raise HotcoldError(f"{shown}: is a symbolic link that leads nowhere: give another name") from None
    except (OSError, ValueError) as e:  # ValueError: a NUL in the path
        raise HotcoldError(f"{shown}: cannot be written: {getattr(e, 'strerror', None) or e}") from None
    folder = path.absolute().parent
    if not folder.is_dir():
        raise HotcoldError(f"{safe_text(str(folder))}: no such folder")
    free = shutil.disk_usage(folder).free
    if n_bytes and free < n_bytes + MARGIN:
        raise HotcoldError(
            f"{shown}: {(n_bytes + MARGIN) / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free: free some or choose "
            "another folder"
        )


@contextmanager
def replacing(path: Path, force: bool = False, n_bytes: int = 0) -> Iterator[BinaryIO]:
    """A file to write to, which gets the name `path` when the context ends without an exception.

    force: replace a file of that name. n_bytes: how large it becomes, if known. Raises HotcoldError.
    """
    check_output(path, force, n_bytes)
    temporary = path.absolute().parent / f".{path.name}.{os.getpid()}.part"
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path, force)
    except FileExistsError:
        raise _exists(path) from None
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "no space left on the device" if full else e.strerror or str(e)
        raise HotcoldError(f"{safe_text(str(path))}: cannot be written: {what}") from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def _exists(path: Path) -> HotcoldError:
    return HotcoldError(f"{safe_text(str(path))}: exists already: use --force to replace it or give another name")


def publish(temporary: Path, path: Path, replace: bool) -> None:
    """Give a complete file its name, durably. Raises FileExistsError when the name was taken meanwhile."""
    if replace:
        os.replace(temporary, path)
    else:
        try:
            os.link(temporary, path)  # fails where there is one, which a rename does not
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
            os.replace(temporary, path)
    with suppress(OSError):  # makes the name itself durable; not every system lets a folder be opened
        folder = os.open(path.absolute().parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
