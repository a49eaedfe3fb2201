"""Target -> file, so that a file under the final name is always complete.

In: Target. Out: a GGUF. Written under a temporary name in the same folder, synced, renamed; on any error the
temporary file goes, and what a killed run left behind goes with the next run. The runtime's own readers check the file
before it gets its name. Next: runtime/gguf_file.py reads it.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np
import psutil

from hotcold.convert.lazy import LazyTensor
from hotcold.convert.model import Metadata
from hotcold.convert.precision import SCALES, count_not_finite
from hotcold.convert.target import Target
from hotcold.runtime.atomic import MARGIN, publish
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.tokenizer import Tokenizer
from hotcold.runtime.vocab import P
from hotcold.runtime.weights import load_weights

TOKENS = P + "tokens"


def write_target(target: Target, out: Path, progress: Callable[[str, int], None], release: Callable[[], None],
                 replace: bool = False) -> int:
    """Write `target` as `out` and return its size in bytes.

    After each slab of rows, `progress(tensor name, bytes)` and `release()` (memory mapped by reading) are called.
    replace: a file of this name may be replaced; otherwise one that appears in the meantime is kept.

    Raises HotcoldError when there is not enough space, a weight is not finite, or the file system fails otherwise.
    """
    folder = out.absolute().parent
    check_name(out, replace)
    remove_leftovers(out)
    check_space(folder, target.n_bytes + metadata_bytes(target.metadata))
    temporary = folder / f".{out.name}.{os.getpid()}.part"
    try:
        _write(target, temporary, out, progress, release)
        _check(temporary, out, weights=True)
        publish(temporary, out, replace)
    except FileExistsError:
        raise exists_already(out) from None
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HotcoldError(f"{folder}: no space left while writing {out.name}: free some or choose another "
                               "folder with -o") from None
        raise HotcoldError(f"{out}: cannot be written: {e.strerror or e}") from None
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
    return out.stat().st_size


def check_name(out: Path, replace: bool) -> None:
    """Raise HotcoldError unless `out` may be made: a new name, or with `replace` a regular file."""
    try:
        os.lstat(out)
    except FileNotFoundError:
        return
    except OSError as e:
        raise HotcoldError(f"{out}: cannot be written: {e.strerror or e}") from None
    try:
        mode = os.stat(out).st_mode
    except OSError:
        raise HotcoldError(f"{out}: is a symbolic link that leads nowhere: remove it or choose another name") from None
    if not stat.S_ISREG(mode):
        raise HotcoldError(f"{out}: is not a regular file and is never replaced: give a file name with -o")
    if not replace:
        raise exists_already(out)


def exists_already(out: Path) -> HotcoldError:
    return HotcoldError(f"{out}: exists already: use --force to replace it (llama.cpp's converter would do so without "
                        "asking) or -o for another name")


def check_space(folder: Path, needed: int) -> None:
    """Raise HotcoldError unless the folder's file system has `needed` bytes and a margin."""
    free = shutil.disk_usage(folder).free
    if free < needed + MARGIN:
        raise HotcoldError(f"{folder}: {(needed + MARGIN) / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free: free some, "
                           "choose another folder with -o, or a smaller --outtype")


def remove_leftovers(out: Path) -> None:
    """Remove temporary files that a killed conversion to the same name left."""
    for path in out.absolute().parent.glob(f".{glob_escape(out.name)}.*.part"):
        match = re.fullmatch(r"\d+", path.name[len(out.name) + 2:-len(".part")])
        if match and not psutil.pid_exists(int(match[0])):
            with suppress(OSError):
                path.unlink()


def glob_escape(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def metadata_bytes(metadata: Metadata) -> int:
    """Upper estimate of the header's key-value part."""
    total = 0
    for key, meta in metadata.items():
        values = meta.value if isinstance(meta.value, list) else [meta.value]
        total += len(key) + 32 + sum(8 + (4 * len(v) if isinstance(v, str | bytes) else 0) for v in values)
    return total


def _check(path: Path, out: Path, weights: bool) -> None:
    """Raise HotcoldError unless the runtime opens `path`. Without `weights`, tensor data need not be there yet."""
    try:
        with open_gguf(path) as file:
            config = ModelConfig.from_gguf(file)
            if weights:
                load_weights(file, config)
            elif TOKENS in file.metadata:
                Tokenizer.from_gguf(file)
    except HotcoldError as e:
        raise HotcoldError(f"the result could not be run: {str(e).replace(str(path), str(out))}") from None


def _write(target: Target, path: Path, out: Path, progress: Callable[[str, int], None],
           release: Callable[[], None]) -> None:
    writer = gguf.GGUFWriter(path, target.arch)
    for key, meta in target.metadata.items():
        writer.add_key_value(key, meta.value, meta.type, meta.sub_type)
    for t in target.tensors:
        # The shape is in elements; a dtype other than uint8 makes the writer take it as it is.
        writer.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.n_bytes, raw_dtype=t.qtype)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if writer.fout is None:
            raise HotcoldError(f"{path}: the gguf package did not open the file")
        file = writer.fout[0]
        writer.write_padding(file, file.tell())
        # At full size the header can be checked before hours of data are written.
        file.flush()
        file.truncate(file.tell() + target.n_bytes)
        _check(path, out, weights=False)
        for t in target.tensors:
            writer.write_padding(file, _write_tensor(file, t, progress, release))
        file.flush()
        os.fsync(file.fileno())
    finally:
        writer.close()


def _write_tensor(file: BinaryIO, t: LazyTensor, progress: Callable[[str, int], None],
                  release: Callable[[], None]) -> int:
    """Slab by slab: GGUFWriter's own method wants a whole tensor in memory. Returns the bytes written."""
    written = 0
    for a, b in t.slabs():
        raw = np.ascontiguousarray(t.read(a, b))
        broken = count_not_finite(raw, t.qtype)
        if broken:
            raise HotcoldError(f"tensor {t.name}: {broken} {'scales' if t.qtype in SCALES else 'values'} in rows "
                               f"{a} to {b - 1} are NaN or infinite: the source is damaged")
        file.write(raw.reshape(-1).view(np.uint8).data)
        written += raw.nbytes
        progress(t.name, raw.nbytes)
        release()
    if written != t.n_bytes:
        raise HotcoldError(f"tensor {t.name}: {written} bytes made, {t.n_bytes} planned: please report this")
    return written
