"""A Hugging Face folder -> config and memory-mapped tensors. Nothing in the folder is trusted.

In: a folder with config.json and safetensors (one file, or shards named by an index). Out: Checkpoint.
Next: families/, which give the tensors their stock names.
"""

from __future__ import annotations

import json
import math
import mmap
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hotcold.convert.lazy import LazyTensor, QType, from_array
from hotcold.convert.precision import Report
from hotcold.runtime.errors import HotcoldError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 100 << 20  # bytes; the safetensors library's own limit
MAX_JSON = 256 << 20    # bytes; a tokenizer.json of 256k tokens is about 35 MB

DTYPES: dict[str, tuple[QType, type[np.generic]]] = {
    "F64": (QType.F64, np.float64), "F32": (QType.F32, np.float32),
    "F16": (QType.F16, np.float16), "BF16": (QType.BF16, np.uint16),
}
# Bits per element of every dtype the format knows, to check sizes of tensors we then refuse by name.
DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
    "C64": 64,
}


Container = TypeVar("Container", dict[str, Any], list[Any])


@dataclass(frozen=True)
class StoredTensor:
    """One entry of a safetensors header. `begin`, `end`: bytes from the start of the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass
class Checkpoint:
    """A folder, opened: `config` is config.json; tensors by their Hugging Face names."""

    folder: Path
    config: dict[str, Any]
    stored: dict[str, StoredTensor]
    maps: dict[Path, mmap.mmap] = field(default_factory=dict)

    def tensor(self, name: str) -> LazyTensor:
        """The named tensor as a view; HotcoldError for a dtype that is not F64, F32, F16 or BF16."""
        s = self.stored[name]
        if s.dtype not in DTYPES:
            raise HotcoldError(f"{s.path.name}: tensor {name} has dtype {s.dtype}: supported are {', '.join(DTYPES)}")
        qtype, dtype = DTYPES[s.dtype]
        if s.path not in self.maps:
            with s.path.open("rb") as file:
                self.maps[s.path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        raw = np.frombuffer(self.maps[s.path], np.uint8, s.end - s.begin, s.begin)
        return from_array(name, raw.view(dtype).reshape(s.shape), qtype, s.shape, s.dtype)

    def release(self) -> None:
        """Let the system take back the pages read so far; they are read again if needed."""
        for pages in self.maps.values():
            release_pages(pages)

    def json(self, name: str) -> dict[str, Any] | None:
        """A JSON object of the folder, or None when there is no such file."""
        path = self.folder / name
        return read_json(path) if path.is_file() else None

    def text(self, name: str) -> str | None:
        path = self.folder / name
        if not path.is_file():
            return None
        return _read_text(path)


def release_pages(pages: mmap.mmap) -> None:
    """Drop a file mapping's pages from this process's memory, where the system can."""
    if hasattr(mmap, "MADV_DONTNEED"):
        pages.madvise(mmap.MADV_DONTNEED)


def open_checkpoint(folder: Path, report: Report) -> Checkpoint:
    """Open and validate a checkpoint folder without reading tensor data.

    Raises HotcoldError naming the file and what is wrong: missing config, shards or tensors, pickle-only folders,
    index names that are not plain file names, damaged headers.
    """
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise HotcoldError(f"{folder}: no config.json: not a Hugging Face model folder "
                           "(expected config.json, *.safetensors and tokenizer files)")
    config = read_json(config_path)
    index_path = folder / INDEX
    if index_path.is_file():
        stored = _open_indexed(folder, index_path, report)
    else:
        stored = read_header(_single_file(folder))
    if not stored:
        raise HotcoldError(f"{folder}: the safetensors files hold no tensors")
    return Checkpoint(folder, config, stored)


def _single_file(folder: Path) -> Path:
    if (folder / SINGLE).is_file():
        return folder / SINGLE
    found = sorted(p.name for p in folder.glob("*.safetensors") if p.is_file())
    if len(found) == 1:
        return folder / found[0]
    if found:
        raise HotcoldError(f"{folder}: {len(found)} safetensors files but no {INDEX} to say which belong together: "
                           "download the index as well")
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles:
        raise HotcoldError(
            f"{folder}: only pickle weights ({', '.join(pickles[:3])}): loading pickle can run any code, so it is "
            "refused: download the safetensors version, or convert it in a sandbox with "
            "transformers' save_pretrained(safe_serialization=True)")
    raise HotcoldError(f"{folder}: no weights: expected {SINGLE}, or {INDEX} and its shards")


def _open_indexed(folder: Path, index_path: Path, report: Report) -> dict[str, StoredTensor]:
    index = read_json(index_path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise HotcoldError(f"{index_path}: weight_map is missing or empty: download the index again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_plain_name(file):
            raise HotcoldError(f"{index_path}: tensor {name!r} is said to be in {file!r}: allowed are plain names of "
                               "safetensors files in the same folder")
    files = sorted(set(weight_map.values()))
    if (folder / SINGLE).is_file() and SINGLE not in files:
        raise HotcoldError(f"{folder}: has both {SINGLE} and {INDEX} with other shards: remove the one not wanted")
    missing = [f for f in files if not (folder / f).is_file()]
    if missing:
        raise HotcoldError(f"{folder}: {len(missing)} of {len(files)} shards are missing: {_some(missing)}: "
                           "download them again")
    stored: dict[str, StoredTensor] = {}
    for file in files:
        for name, entry in read_header(folder / file).items():
            home = weight_map.get(name)
            if home is None:
                report.note(f"{file}: tensor {name} is not listed in {INDEX}; used all the same")
            elif home != file:
                continue
            if name in stored:
                raise HotcoldError(f"{file}: tensor {name} is also in {stored[name].path.name} and the index lists "
                                   "neither: download the checkpoint again")
            stored[name] = entry
    absent = [f"{name} ({file})" for name, file in weight_map.items() if name not in stored]
    if absent:
        raise HotcoldError(f"{folder}: {len(absent)} tensors listed in {INDEX} are not in their shards: "
                           f"{_some(absent)}: download the checkpoint again")
    return stored


def _is_plain_name(file: str) -> bool:
    return (file.endswith(".safetensors") and not file.startswith(".")
            and not any(c in "/\\:" or ord(c) < 32 for c in file))


def _some(names: Iterable[str], limit: int = 5) -> str:
    names = list(names)
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read and check one safetensors header: sizes, offsets, overlap, dtype times shape, before any data is mapped."""
    # A symbolic link is followed: Hugging Face's cache consists of links. What it points to must be a file.
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        raise HotcoldError(f"{path}: not a regular file")
    with path.open("rb") as f:
        head = f.read(8)
        size = int.from_bytes(head, "little")
        if len(head) < 8 or size > info.st_size - 8:
            raise HotcoldError(f"{path}: header length {size} in a file of {info.st_size} bytes: the file is cut off "
                               "or not safetensors: download it again")
        if size > MAX_HEADER:
            raise HotcoldError(f"{path}: header length {size}, allowed up to {MAX_HEADER} bytes")
        raw = f.read(size)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (UnicodeDecodeError, ValueError, RecursionError) as e:
        raise HotcoldError(f"{path}: the header is not valid JSON ({e}): download the file again") from None
    if not isinstance(header, dict):
        raise HotcoldError(f"{path}: the header is not a JSON object: download the file again")
    header.pop("__metadata__", None)
    base = 8 + size
    stored = {name: _entry(path, name, value, base, info.st_size) for name, value in header.items()}
    end, before = base, "the header"
    for name, entry in sorted(stored.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            what = "overlaps" if entry.begin < end else "leaves a hole after"
            raise HotcoldError(f"{path}: tensor {name} {what} {before}: the file is damaged")
        end, before = entry.end, name
    if end != info.st_size:
        raise HotcoldError(f"{path}: tensors end at byte {end}, the file at {info.st_size}: the file is cut off or "
                           "damaged: download it again")
    return stored


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{twice[:60]!r} stands twice in one object")
    return result


def _entry(path: Path, name: str, value: Any, base: int, file_size: int) -> StoredTensor:
    where = f"{path}: tensor {name[:200]!r}"
    if not isinstance(value, dict):
        raise HotcoldError(f"{where}: its entry is not a JSON object")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise HotcoldError(f"{where}: dtype {str(dtype)[:40]!r}: supported are {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**48 for n in shape) or len(shape) > 8:
        raise HotcoldError(f"{where}: shape {str(shape)[:100]}: allowed are up to 8 non-negative integers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        raise HotcoldError(f"{where}: data_offsets {str(offsets)[:100]}: allowed are two non-negative integers")
    begin, end = offsets
    if begin > end or base + end > file_size:
        raise HotcoldError(f"{where}: data_offsets {offsets} outside the file of {file_size} bytes: the file is cut "
                           "off: download it again")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (end - begin):
        raise HotcoldError(f"{where}: {dtype} {shape} needs {bits / 8:g} bytes, data_offsets give {end - begin}")
    return StoredTensor(path, dtype, tuple(shape), base + begin, base + end)


def _read_text(path: Path) -> str:
    size = path.stat().st_size
    if size > MAX_JSON:
        raise HotcoldError(f"{path}: {size} bytes, allowed up to {MAX_JSON}")
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as e:
        raise HotcoldError(f"{path}: not UTF-8 text ({e.reason} at byte {e.start}): download it again") from None


def typed(value: Any, kind: type[Container], where: str) -> Container:
    """A JSON object (dict) or array (list), empty for null; HotcoldError naming `where` for anything else."""
    if value is None:
        return kind()
    if not isinstance(value, kind):
        allowed = "an object" if kind is dict else "an array"
        raise HotcoldError(f"{where} is {str(value)[:60]!r}: allowed: {allowed} or null")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that must hold an object."""
    try:
        value = json.loads(_read_text(path), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as e:
        raise HotcoldError(f"{path}: not valid JSON ({e}): download it again") from None
    if not isinstance(value, dict):
        raise HotcoldError(f"{path}: holds {type(value).__name__}, expected a JSON object")
    return value
