"""A Hugging Face folder like another one, with some tensors and some keys of config.json replaced.

In: Checkpoint, the new tensors by their Hugging Face names, the new keys. Out: a folder under its final name, complete,
or none. Next: checkpoint.py reads it again.

Tensors that stay are copied byte for byte. The folder is made under a temporary name beside its own, every file is
synced, and the converter's own reader opens it before it is renamed.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import psutil

from hotcold.convert.checkpoint import INDEX, SINGLE, Checkpoint, StoredTensor, open_checkpoint
from hotcold.convert.lazy import LazyTensor, QType
from hotcold.convert.precision import Report, count_not_finite
from hotcold.convert.writer import check_space, glob_escape
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import safe_text

MAX_SHARD = 4 << 30  # bytes of tensors in one file; a larger tensor has one of its own
COPY_BYTES = 16 << 20
MAX_COPIED = 1 << 28  # bytes of a tokenizer file
# What a model folder holds besides weights and config.json that is copied when it is there.
COPIED = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
          "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
          "generation_config.json")
DTYPES = {QType.F64: "F64", QType.F32: "F32", QType.F16: "F16", QType.BF16: "BF16"}


@dataclass(frozen=True)
class Item:
    """A tensor to be written: copied from a file or made anew."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    n_bytes: int
    source: StoredTensor | LazyTensor


def write_folder(checkpoint: Checkpoint, out: Path, replaced: Mapping[str, LazyTensor], keys: Mapping[str, Any],
                 progress: Callable[[str, int], None], force: bool = False, max_shard: int = MAX_SHARD) -> int:
    """Write the folder `out`; returns the bytes of its tensors.

    replaced: tensors of F64, F32, F16 or BF16 in place of those of the same name. keys: replace those of config.json.
    progress(name, bytes) is called as tensors are written. Raises HotcoldError.
    """
    recover(out)
    check_folder(out, force)
    copied = files_to_copy(checkpoint.folder)
    shards = _shards([_item(name, stored, replaced.get(name)) for name, stored in checkpoint.stored.items()], max_shard)
    total = sum(item.n_bytes for shard in shards for item in shard)
    parent = out.absolute().parent
    check_space(parent, total + sum(path.stat().st_size for path in copied))
    temporary = parent / f".{out.name}.{os.getpid()}.part"
    try:
        temporary.mkdir()
        _write_shards(temporary, shards, total, progress)
        _write_file(temporary / "config.json", _json(checkpoint.config | dict(keys)))
        for path in copied:
            _write_file(temporary / path.name, path.read_bytes())
        open_checkpoint(temporary, Report())
        _sync(temporary)
        _publish(temporary, out, force)
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "no space left on the device" if full else e.strerror or str(e)
        raise HotcoldError(f"{safe_text(str(out))}: cannot be written: {what}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _sync(parent)
    return total


def recover(out: Path) -> None:
    """Undo what killed runs to the same name left: unfinished folders go, a folder that was being replaced returns."""
    for suffix in (".part", ".old"):
        for path in out.absolute().parent.glob(f".{glob_escape(out.name)}.*{suffix}"):
            number = path.name[len(out.name) + 2:-len(suffix)]
            alive = number.isdecimal() and int(number) != os.getpid() and psutil.pid_exists(int(number))
            if not number.isdecimal() or alive or path.is_symlink() or not path.is_dir():
                continue
            if suffix == ".old":
                with suppress(OSError):  # fails where there is a folder with files
                    os.rename(path, out)  # killed between the two renames of _publish
                    continue
                if not (out / "config.json").is_file():
                    continue
            shutil.rmtree(path, ignore_errors=True)


def check_folder(out: Path, force: bool) -> None:
    """Raise HotcoldError unless the folder `out` may be made: a new name, an empty folder, or a model with `force`."""
    shown = safe_text(str(out))
    try:
        mode = os.lstat(out).st_mode
    except FileNotFoundError:
        if not out.absolute().parent.is_dir():
            raise HotcoldError(f"{safe_text(str(out.absolute().parent))}: no such folder") from None
        return
    except (OSError, ValueError) as e:
        raise HotcoldError(f"{shown}: cannot be written: {getattr(e, 'strerror', None) or e}") from None
    if not stat.S_ISDIR(mode):
        raise HotcoldError(f"{shown}: exists and is not a folder, which --to-hf writes: choose another name with -o")
    entries = list(os.scandir(out))
    if not entries:
        return
    if not force:
        raise HotcoldError(f"{shown}: exists already: use --force to replace it or -o for another name")
    plain = all(entry.is_file(follow_symlinks=False) for entry in entries)
    if not plain or not any(entry.name == "config.json" for entry in entries):
        raise HotcoldError(f"{shown}: is not a model folder of plain files, so --force does not replace it: choose "
                           "another name with -o")


def files_to_copy(folder: Path) -> list[Path]:
    """Tokenizer files of a folder. Raises HotcoldError for one that is no regular file or leads out of the folder."""
    found, home = [], folder.resolve()
    for name in COPIED:
        path = folder / name
        if not os.path.lexists(path):
            continue
        real = path.resolve()
        if not real.is_relative_to(home):
            raise HotcoldError(f"{safe_text(str(path))}: is a link that leads out of its folder, which is not "
                               "followed: make a folder of plain files with cp -rL first")
        if not real.is_file():
            raise HotcoldError(f"{safe_text(str(path))}: is not a regular file: remove it or replace it by one")
        if real.stat().st_size > MAX_COPIED:
            raise HotcoldError(f"{safe_text(str(path))}: {real.stat().st_size} bytes, allowed up to {MAX_COPIED}")
        found.append(path)
    return found


def _item(name: str, stored: StoredTensor, new: LazyTensor | None) -> Item:
    if new is None:
        return Item(name, stored.dtype, stored.shape, stored.end - stored.begin, stored)
    return Item(name, DTYPES[new.qtype], new.shape, new.n_bytes, new)


def _shards(items: list[Item], limit: int) -> list[list[Item]]:
    shards: list[list[Item]] = [[]]
    size = 0
    for item in items:
        if shards[-1] and size + item.n_bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.n_bytes
    return shards


def _write_shards(folder: Path, shards: list[list[Item]], total: int, progress: Callable[[str, int], None]) -> None:
    names = [SINGLE] if len(shards) == 1 else [
        f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, items in zip(names, shards, strict=True):
        with open(folder / name, "wb") as file:
            file.write(_header(items))
            for item in items:
                for part in _bytes(item):
                    file.write(part)
                    progress(item.name, len(part))
            _flush(file)
    if len(shards) > 1:
        where = {item.name: name for name, items in zip(names, shards, strict=True) for item in items}
        _write_file(folder / INDEX, _json({"metadata": {"total_size": total}, "weight_map": where}))


def _header(items: list[Item]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for item in items:
        entries[item.name] = {"dtype": item.dtype, "shape": list(item.shape),
                              "data_offsets": [offset, offset + item.n_bytes]}
        offset += item.n_bytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(item: Item) -> Iterator[memoryview]:
    """The tensor's bytes, a few megabytes at a time."""
    if isinstance(item.source, StoredTensor):
        yield from _stored_bytes(item.source)
        return
    written = 0
    for a, b in item.source.slabs():
        raw = np.ascontiguousarray(item.source.read(a, b))
        broken = count_not_finite(raw, item.source.qtype)
        if broken:
            raise HotcoldError(f"tensor {item.name}: {broken} values in rows {a} to {b - 1} are NaN or infinite")
        written += raw.nbytes
        yield raw.reshape(-1).view(np.uint8).data
    if written != item.n_bytes:
        raise HotcoldError(f"tensor {item.name}: {written} bytes made, {item.n_bytes} planned: please report this")


def _stored_bytes(stored: StoredTensor) -> Iterator[memoryview]:
    with stored.path.open("rb") as file:
        file.seek(stored.begin)
        left = stored.end - stored.begin
        while left:
            part = file.read(min(left, COPY_BYTES))
            if not part:
                raise HotcoldError(f"{stored.path}: became shorter while it was read")
            left -= len(part)
            yield memoryview(part)


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _write_file(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        _flush(file)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    with suppress(OSError):  # not every system lets a folder be opened
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _publish(temporary: Path, out: Path, force: bool) -> None:
    """Give the folder its name. A folder that stands there is checked again, and goes only after it was replaced: what
    a kill in between leaves under another name is found by recover().
    """
    check_folder(out, force)
    if not os.path.lexists(out) or not os.listdir(out):
        os.rename(temporary, out)  # onto an empty folder or none
        return
    old = temporary.with_suffix(".old")
    os.rename(out, old)
    try:
        os.rename(temporary, out)
    except BaseException:
        os.rename(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)


