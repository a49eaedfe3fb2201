"""The bytes of a GGUF header -> checked tables.

In: the mapped bytes of a file. Out: Header (metadata entries, tensor table). Next: gguf_file.py, which uses it.

Nothing is allocated in proportion to a number found in the file before that number has been compared with the bytes
that are left. Long arrays are stepped over here, with every length checked, and decoded when first asked for.
"""

from __future__ import annotations

import codecs
import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType
from gguf import GGUFValueType as ValueType

from hotcold.runtime.errors import GGUFError

# Type ids llama.cpp once had: files of 2023-2024 still carry them.
_WITHDRAWN = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
              36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}  # fmt: skip
SCALARS = {
    ValueType.UINT8: "<B", ValueType.INT8: "<b", ValueType.UINT16: "<H", ValueType.INT16: "<h",
    ValueType.UINT32: "<I", ValueType.INT32: "<i", ValueType.FLOAT32: "<f", ValueType.BOOL: "<?",
    ValueType.UINT64: "<Q", ValueType.INT64: "<q", ValueType.FLOAT64: "<d",
}  # fmt: skip
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # length, one letter, type, value
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # length, one letter, n_dims, one dimension, type, offset
# Far above any real file; they keep the Python objects of a hostile header small.
_MAX_KEYS = _MAX_TENSORS = 1 << 16
_MAX_KEY_LENGTH = 1024
_MAX_TENSOR_NAME_LENGTH = 255
_MAX_DIMS = 4
_MAX_STRING = 64 << 20
_MAX_STRINGS = 1 << 24
_MAX_ALIGNMENT = 1 << 22
_MAX_BYTES = (1 << 63) - 1

_OTHER_MAGICS = {
    b"PWRI": "a PowerInfer file: hotcold has its own layout, run `hotcold convert` on the original checkpoint",
    b"lmgg": "a llama.cpp file from before GGUF (2023): convert the original checkpoint again",
    b"fmgg": "a llama.cpp file from before GGUF (2023): convert the original checkpoint again",
    b"tjgg": "a llama.cpp file from before GGUF (2023): convert the original checkpoint again",
    b"FUGG": "a big-endian GGUF: only little-endian files are supported",
    b"PK\x03\x04": "a zip or PyTorch pickle file: `hotcold convert` takes a folder with config.json and safetensors",
    b"vers": "a Git LFS pointer, not the file itself: fetch it with `git lfs pull`",
    b"<!DO": "an HTML page: the download went wrong",
}


@dataclass(frozen=True)
class TensorInfo:
    """One line of the tensor table. `shape` is in NumPy order: rows first, the reverse of the file's."""

    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLType
    offset: int  # bytes from the start of the file
    n_bytes: int


class Entry(NamedTuple):
    """Where a metadata value lies: (value type, element type of an array), first byte, elements, end."""

    types: tuple[ValueType, ValueType | None]
    offset: int
    n: int
    end: int


class Header(NamedTuple):
    """A checked header."""

    version: int
    alignment: int
    entries: dict[str, Entry]
    tensors: dict[str, TensorInfo]


def safe_text(text: str | bytes, max_length: int = 200) -> str:
    """Text from a file made safe to print: control and other unprintable characters escaped, long text shortened."""
    if isinstance(text, bytes):
        text = text[: 4 * max_length].decode("utf-8", "backslashreplace")
    shown = text[:max_length]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown)
    return shown if len(text) <= max_length else f"{shown}... ({len(text)} characters)"


class _Reader:
    """A position in the mapped bytes. Every read is checked against the end of the file first."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.pos = 0

    def error(self, field: str, found: object, allowed: str, offset: int | None = None) -> GGUFError:
        where = self.pos if offset is None else offset
        return GGUFError(f"{safe_text(str(self.path))}: offset {where}: {field}: found {found}, allowed: {allowed}")

    def need(self, n_bytes: int, field: str) -> None:
        left = self.size - self.pos
        if n_bytes > left:
            raise self.error(field, f"{n_bytes} bytes needed", f"the {left} bytes left (is the file complete?)")

    def u32(self, field: str) -> int:
        self.need(4, field)
        value: int = _U32.unpack_from(self.buffer, self.pos)[0]
        self.pos += 4
        return value

    def u64(self, field: str) -> int:
        self.need(8, field)
        value: int = _U64.unpack_from(self.buffer, self.pos)[0]
        self.pos += 8
        return value

    def count(self, field: str, min_bytes: int, limit: int) -> int:
        """A number of things of at least `min_bytes` each that must still fit into the file."""
        start = self.pos
        value = self.u64(field)
        fits = (self.size - self.pos) // min_bytes
        if value > min(fits, limit):
            left = self.size - self.pos
            raise self.error(field, value, f"at most {min(fits, limit)} in the {left} bytes left", start)
        return value

    def string_length(self, field: str, limit: int) -> int:
        start = self.pos
        length = self.u64(field)
        if length > min(self.size - self.pos, limit):
            raise self.error(field, f"length {length}",
                             f"at most {min(self.size - self.pos, limit)} bytes", start)  # fmt: skip
        return length

    def name(self, field: str, limit: int) -> str:
        """A key or tensor name: 1 to `limit` bytes of UTF-8 without control characters."""
        start = self.pos
        length = self.string_length(field, limit)
        raw = self.buffer[self.pos : self.pos + length]
        self.pos += length
        if not raw:
            raise self.error(field, "an empty name", f"1 to {limit} bytes", start)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(field, f"'{safe_text(raw)}'", "valid UTF-8", start) from None
        if any(c < " " or "\x7f" <= c < "\xa0" for c in text):
            raise self.error(field, f"'{safe_text(text)}'", "a name without control characters", start)
        return text

    def text(self, field: str) -> None:
        """Skip a string value after checking that it is UTF-8, piece by piece so that no copy of it is made."""
        length = self.string_length(field, _MAX_STRING)
        decoder = codecs.getincrementaldecoder("utf-8")()
        end = self.pos + length
        try:
            for start in range(self.pos, end, 1 << 20):
                decoder.decode(self.buffer[start : min(end, start + (1 << 20))])
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            raise self.error(field, f"'{safe_text(self.buffer[self.pos : min(end, self.pos + 64)])}'",
                             "valid UTF-8") from None  # fmt: skip
        self.pos = end

    def strings(self, count: int, field: str) -> None:
        """Skip `count` strings, checking each length. Any bytes are allowed: byte-level vocabularies have them."""
        buffer, pos, last = self.buffer, self.pos, self.size - 8
        unpack = _U64.unpack_from
        for i in range(count):
            if pos > last:
                raise self.error(f"{field}[{i}]", "8 bytes needed", f"the {self.size - pos} bytes left", pos)
            length = unpack(buffer, pos)[0]
            if length > last - pos or length > _MAX_STRING:
                raise self.error(f"{field}[{i}]", f"length {length}",
                                 f"at most {min(last - pos, _MAX_STRING)} bytes", pos)  # fmt: skip
            pos += 8 + length
        self.pos = pos


def _value_type(reader: _Reader, field: str) -> ValueType:
    start = reader.pos
    number = reader.u32(field)
    try:
        return ValueType(number)
    except ValueError:
        raise reader.error(field, f"value type {number}", ", ".join(f"{t.value} {t.name}" for t in ValueType),
                           start) from None  # fmt: skip


def _check_bools(reader: _Reader, offset: int, count: int, field: str) -> None:
    values = np.frombuffer(reader.buffer, np.uint8, count, offset)
    if count and int(values.max()) > 1:
        at = int(np.argmax(values > 1))
        raise reader.error(field, f"byte {int(values[at])} as bool", "0 or 1", offset + at)


def _read_value(reader: _Reader, key: str) -> Entry:
    """Check one metadata value and step over it."""
    field = f"value of '{safe_text(key)}'"
    kind = _value_type(reader, field)
    if kind == ValueType.STRING:
        start = reader.pos
        reader.text(field)
        return Entry((kind, None), start, 1, reader.pos)
    if kind != ValueType.ARRAY:
        size = struct.calcsize(SCALARS[kind])
        reader.need(size, field)
        if kind == ValueType.BOOL:
            _check_bools(reader, reader.pos, 1, field)
        reader.pos += size
        return Entry((kind, None), reader.pos - size, 1, reader.pos)
    type_at = reader.pos
    element = _value_type(reader, f"element type of '{safe_text(key)}'")
    if element == ValueType.ARRAY:
        raise reader.error(field, "an array of arrays", "arrays of numbers, bools or strings", type_at)
    field = f"array '{safe_text(key)}'"
    if element == ValueType.STRING:
        count = reader.count(f"length of {field}", 8, _MAX_STRINGS)
        start = reader.pos
        reader.strings(count, field)
        return Entry((kind, element), start, count, reader.pos)
    size = struct.calcsize(SCALARS[element])
    count = reader.count(f"length of {field}", size, _MAX_BYTES)
    if element == ValueType.BOOL:
        _check_bools(reader, reader.pos, count, field)
    reader.pos += count * size
    return Entry((kind, element), reader.pos - count * size, count, reader.pos)


def type_text(types: tuple[ValueType, ValueType | None]) -> str:
    return types[0].name if types[1] is None else f"ARRAY of {types[1].name}"


def _read_preamble(reader: _Reader) -> tuple[int, int, int]:
    """Magic, version and the two counts -> (version, tensors, keys)."""
    magic = reader.buffer[:4]
    if magic != b"GGUF":
        what = _OTHER_MAGICS.get(magic)
        raise reader.error("magic", f"'{safe_text(magic)}'" + (f", {what}" if what else ""), "'GGUF'")
    reader.pos = 4
    version = reader.u32("version")
    if version not in _VERSIONS:
        if version and version & 0xFFFF == 0:
            raise reader.error("version", f"{version:#010x}, a big-endian file", "little-endian files", 4)
        hint = " (version 1 is of August 2023: convert the checkpoint again)" if version == 1 else ""
        raise reader.error("version", f"{version}{hint}", " and ".join(map(str, _VERSIONS)), 4)
    n_tensors = reader.count("number of tensors", _MIN_TENSOR_BYTES, _MAX_TENSORS)
    n_keys = reader.count("number of keys", _MIN_KEY_BYTES, _MAX_KEYS)
    return version, n_tensors, n_keys


def _read_keys(reader: _Reader, n_keys: int) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for i in range(n_keys):
        start = reader.pos
        key = reader.name(f"name of key {i}", _MAX_KEY_LENGTH)
        if key in entries:
            raise reader.error(f"name of key {i}", f"'{safe_text(key)}' a second time", "each key once", start)
        entries[key] = _read_value(reader, key)
    return entries


def _scalar(reader: _Reader, entries: dict[str, Entry], key: str, allowed: tuple[ValueType, ...]) -> int | None:
    entry = entries.get(key)
    if entry is None:
        return None
    if entry.types[0] not in allowed:
        raise reader.error(f"'{key}'", type_text(entry.types), " or ".join(t.name for t in allowed), entry.offset)
    value: int = struct.unpack_from(SCALARS[entry.types[0]], reader.buffer, entry.offset)[0]
    return value


def _read_alignment(reader: _Reader, entries: dict[str, Entry]) -> int:
    value = _scalar(reader, entries, "general.alignment", (ValueType.UINT32,))
    if value is None:
        return _DEFAULT_ALIGNMENT
    if not 8 <= value <= _MAX_ALIGNMENT or value & (value - 1):
        raise reader.error("'general.alignment'", value, f"a power of two from 8 to {_MAX_ALIGNMENT}",
                           entries["general.alignment"].offset)  # fmt: skip
    return value


def _read_tensor(reader: _Reader, index: int) -> TensorInfo:
    """One record of the tensor table; `offset` is still relative to the data section."""
    name = reader.name(f"name of tensor {index}", _MAX_TENSOR_NAME_LENGTH)
    field = f"tensor '{safe_text(name)}'"
    start = reader.pos
    n_dims = reader.u32(f"{field}: n_dims")
    if not 1 <= n_dims <= _MAX_DIMS:
        raise reader.error(f"{field}: n_dims", n_dims, f"1 to {_MAX_DIMS}", start)
    start = reader.pos
    dims = [reader.u64(f"{field}: dimension {d}") for d in range(n_dims)]
    if 0 in dims:
        raise reader.error(f"{field}: dimensions", dims, "no zero", start)
    if math.prod(dims) > _MAX_BYTES:
        raise reader.error(f"{field}: dimensions", dims, f"a product of at most {_MAX_BYTES}", start)
    start = reader.pos
    type_id = reader.u32(f"{field}: type")
    try:
        ggml_type = GGMLType(type_id)
        block, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    except (ValueError, KeyError):
        known = ", ".join(t.name for t in GGMLType)
        gone = f" ({_WITHDRAWN[type_id]}, withdrawn by llama.cpp)" if type_id in _WITHDRAWN else ""
        raise reader.error(f"{field}: type", f"{type_id}{gone}", known, start) from None
    if dims[0] % block:
        raise reader.error(f"{field}: row length", dims[0], f"a multiple of {block} for {ggml_type.name}", start)
    n_bytes = math.prod(dims) // block * block_bytes
    return TensorInfo(name, tuple(reversed(dims)), ggml_type, reader.u64(f"{field}: offset"), n_bytes)


def _read_tensors(reader: _Reader, n_tensors: int, alignment: int) -> dict[str, TensorInfo]:
    """The tensor table, every tensor inside the data section and apart from every other."""
    relative: dict[str, tuple[TensorInfo, int]] = {}
    for i in range(n_tensors):
        start = reader.pos
        info = _read_tensor(reader, i)
        if info.name in relative:
            found = f"'{safe_text(info.name)}' a second time"
            raise reader.error(f"name of tensor {i}", found, "each name once", start)
        if info.offset % alignment:
            raise reader.error(f"tensor '{safe_text(info.name)}': offset", info.offset,
                               f"a multiple of the alignment {alignment}", reader.pos - 8)  # fmt: skip
        relative[info.name] = info, reader.pos - 8
    data_start = -(-reader.pos // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for info, at in relative.values():
        begin, end = data_start + info.offset, data_start + info.offset + info.n_bytes
        if end > reader.size:
            raise reader.error(f"tensor '{safe_text(info.name)}': data", f"bytes {begin} to {end}",
                               f"up to the end of the file, {reader.size} (is the file complete?)", at)  # fmt: skip
        tensors[info.name] = replace(info, offset=begin)
    previous: TensorInfo | None = None
    for info in sorted(tensors.values(), key=lambda t: t.offset):
        if previous is not None and info.offset < previous.offset + previous.n_bytes:
            raise reader.error(f"tensor '{safe_text(info.name)}': data", f"starts at {info.offset}, inside "
                               f"'{safe_text(previous.name)}'", "tensors that do not overlap",
                               relative[info.name][1])  # fmt: skip
        previous = info
    return tensors


def parse(path: Path, buffer: mmap.mmap) -> Header:
    """Check the whole header. Raises GGUFError naming file, offset, field, what was found and what is allowed."""
    reader = _Reader(path, buffer)
    version, n_tensors, n_keys = _read_preamble(reader)
    entries = _read_keys(reader, n_keys)
    integers = tuple(t for t in SCALARS if "INT" in t.name)
    n_parts = _scalar(reader, entries, "split.count", integers)
    if n_parts is not None and n_parts > 1:
        raise reader.error("'split.count'", f"part of a model split into {n_parts} files",
                           "one file: merge them first with `llama-gguf-split --merge FIRST OUT`",
                           entries["split.count"].offset)  # fmt: skip
    alignment = _read_alignment(reader, entries)
    tensors = _read_tensors(reader, n_tensors, alignment)
    return Header(version, alignment, entries, tensors)
