"""Open a GGUF from a stranger: check everything, then hand out read-only views.

In: a path. Out: GGUFFile (metadata, tensor table, zero-copy views of the mapped file). Next: config.py.

Nothing else in the project parses GGUF; the checks are in gguf_parse.py.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType
from gguf import GGUFValueType as ValueType

from hotcold.runtime.errors import GGUFError
from hotcold.runtime.gguf_parse import SCALARS, Entry, Header, TensorInfo, parse, safe_text, type_text
from hotcold.runtime.resident import lock, prefetch, read_into_memory

__all__ = ["DEQUANTIZABLE_TYPES", "GGUFFile", "TensorInfo", "dequantize", "open_gguf", "safe_text"]

# What gguf.quants turns into float32. Names, because older gguf packages lack the newest types.
_DEQUANTIZABLE_NAMES = (
    "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K TQ1_0 TQ2_0 MXFP4 NVFP4 "
    "IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS"
).split()
DEQUANTIZABLE_TYPES = tuple(GGMLType[n] for n in _DEQUANTIZABLE_NAMES if n in GGMLType.__members__)

# Types whose elements are numbers by themselves; bfloat16 has no NumPy dtype and stays uint16.
_PLAIN_DTYPES = {
    GGMLType.F32: "<f4", GGMLType.F16: "<f2", GGMLType.F64: "<f8", GGMLType.BF16: "<u2",
    GGMLType.I8: "<i1", GGMLType.I16: "<i2", GGMLType.I32: "<i4", GGMLType.I64: "<i8",
}  # fmt: skip
class _Metadata(Mapping[str, Any]):
    """Key -> value, decoded on first access and kept. Numbers: int, float, bool; arrays: ndarray or list of str."""

    def __init__(self, path: Path, buffer: mmap.mmap, entries: dict[str, Entry]) -> None:
        self._path = path
        self._buffer = buffer
        self._entries = entries
        self._decoded: dict[str, Any] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            self._decoded[key] = self._decode(self._entries[key])
        return self._decoded[key]

    def strings(self, entry: Entry) -> list[bytes]:
        if self._buffer.closed:
            raise GGUFError(f"{safe_text(str(self._path))}: the file is closed")
        raw, pos, unpack = self._buffer[entry.offset : entry.end], 0, struct.Struct("<Q").unpack_from
        out = []
        for _ in range(entry.n):
            (length,) = unpack(raw, pos)
            pos += 8
            out.append(raw[pos : pos + length])
            pos += length
        return out

    def _decode(self, entry: Entry) -> Any:
        kind, element = entry.types
        if kind == ValueType.STRING:
            return self.strings(entry)[0].decode("utf-8")
        if element == ValueType.STRING:
            # surrogateescape keeps the bytes of a token that is not UTF-8: encode it the same way to get them back.
            return [s.decode("utf-8", "surrogateescape") for s in self.strings(entry)]
        if self._buffer.closed:
            raise GGUFError(f"{safe_text(str(self._path))}: the file is closed")
        if element is None:
            return struct.unpack_from(SCALARS[kind], self._buffer, entry.offset)[0]
        # A copy: the file does not align arrays, and compiled code wants aligned ones.
        values = np.frombuffer(self._buffer, SCALARS[element], entry.n, entry.offset).copy()
        values.flags.writeable = False
        return values


class GGUFFile:
    """An open GGUF whose header has been checked. A context manager; `open_gguf` makes it.

    `metadata`: key -> int, float, bool, str, read-only ndarray or list[str], decoded on first access.
    `types`: key -> (value type, element type or None). `tensors`: name -> TensorInfo in file order.
    """

    def __init__(self, path: Path, buffer: mmap.mmap, header: Header, mapped: bool = True) -> None:
        self.path = path
        self.mapped = mapped  # False: the buffer is a copy of the file
        self.locked = False  # whether the buffer is kept in RAM
        self._prefetching: threading.Event | None = None
        self.size = len(buffer)  # bytes
        self.version = header.version
        self.alignment = header.alignment
        self._entries = header.entries
        self._metadata = _Metadata(path, buffer, header.entries)
        self.metadata: Mapping[str, Any] = self._metadata
        self.types: Mapping[str, tuple[ValueType, ValueType | None]] = MappingProxyType(
            {key: entry.types for key, entry in header.entries.items()}
        )
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(header.tensors)
        self._buffer = buffer
        self._bytes: np.ndarray | None = np.frombuffer(buffer, np.uint8)
        self._bytes.flags.writeable = False

    def get(self, key: str, default: Any = None) -> Any:
        """Metadata value, or `default` when the key is absent."""
        return self.metadata.get(key, default)

    def length(self, key: str) -> int | None:
        """Elements of an array (1 for a scalar) without decoding it; None when the key is absent."""
        entry = self._entries.get(key)
        return None if entry is None else entry.n

    def string_bytes(self, key: str) -> list[bytes]:
        """A string array as it is in the file. Raises KeyError when absent, GGUFError when it is something else."""
        entry = self._entries[key]
        if entry.types[1] != ValueType.STRING:
            raise GGUFError(f"{safe_text(str(self.path))}: '{safe_text(key)}': found {type_text(entry.types)}, "
                            "allowed: an array of strings")  # fmt: skip
        return self._metadata.strings(entry)

    def data(self, name: str) -> np.ndarray:
        """Read-only view of a tensor, without a copy. Raises KeyError for a name that `tensors` lacks.

        F32, F16, F64, I8, I16, I32, I64: typed, `shape`. BF16: uint16, `shape`.
        Quantized: uint8 [*shape[:-1], bytes per row].
        """
        info = self.tensors[name]
        if self._bytes is None:
            raise GGUFError(f"{safe_text(str(self.path))}: the file is closed")
        raw = self._bytes[info.offset : info.offset + info.n_bytes]
        dtype = _PLAIN_DTYPES.get(info.ggml_type)
        if dtype is not None:
            return raw.view(dtype).reshape(info.shape)
        return raw.reshape(*info.shape[:-1], -1)

    def release_pages(self) -> None:
        """Give the memory of pages read so far back to the system, where it can; they are read again when needed."""
        if self.mapped and not self._buffer.closed and hasattr(mmap, "MADV_DONTNEED"):  # a copy would be zeroed
            self._buffer.madvise(mmap.MADV_DONTNEED)

    def lock(self, notify: Callable[[str], None]) -> bool:
        """Keep the file's bytes in RAM; False where the system does not allow that, and `notify` is told why."""
        self.locked = lock(self._buffer, notify)
        return self.locked

    def prefetch(self) -> None:
        """Have all of a mapped file read in the background, for those who will need it soon. Ends with close()."""
        if self.mapped and self._prefetching is None:
            self._prefetching = prefetch(self.path)

    def close(self) -> None:
        """Give the mapping back. Views handed out stay valid: the last one to go unmaps the file."""
        if self._prefetching is not None:
            self._prefetching.set()
        self._bytes = None
        _unmap(self._buffer)

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _unmap(buffer: mmap.mmap) -> None:
    try:
        buffer.close()
    except BufferError:
        pass  # a view is still in use: the mapping goes with it


def _map_file(path: Path) -> mmap.mmap:
    """Map a regular file that is not empty, read-only."""
    shown = safe_text(str(path))
    try:
        mode = path.stat().st_mode  # before open(): opening a FIFO would wait for a writer
        if stat.S_ISDIR(mode):
            raise GGUFError(f"{shown}: found a directory, allowed: a GGUF file (`hotcold convert` takes checkpoints)")
        if not stat.S_ISREG(mode):
            raise GGUFError(f"{shown}: found a device, pipe or socket, allowed: a regular GGUF file")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise GGUFError(f"{shown}: found an empty file, allowed: a GGUF file")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as e:
        raise GGUFError(f"{shown}: cannot be opened: {e.strerror or e}") from None
    except ValueError as e:  # a NUL in the path
        raise GGUFError(f"{shown}: cannot be opened: {e}") from None


def open_gguf(
    path: str | os.PathLike[str], *, mapped: bool = True, notify: Callable[[str], None] = lambda line: None
) -> GGUFFile:
    """Map a GGUF and check all of its header; with mapped=False read the file into memory after that.

    notify is told when reading takes long. Raises GGUFError naming file, offset, field, what was found and what is
    allowed, HotcoldError where the copy does not fit into the free memory.
    """
    path = Path(path)
    buffer = _map_file(path)
    try:
        header = parse(path, buffer)
        if not mapped:
            checked, buffer = buffer, read_into_memory(path, len(buffer), notify)
            head = min((info.offset for info in header.tensors.values()), default=len(buffer))
            same = buffer[:head] == checked[:head]  # what was checked is what was read
            _unmap(checked)
            if not same:
                raise GGUFError(f"{safe_text(str(path))}: something changed it while it was read")
        return GGUFFile(path, buffer, header, mapped)
    except BaseException:
        _unmap(buffer)
        raise


def dequantize(rows: np.ndarray, ggml_type: GGMLType) -> np.ndarray:
    """Rows as `GGUFFile.data` gives them -> float32 [rows..., columns], a fresh array.

    Raises GGUFError for a type that the gguf package cannot dequantize.
    """
    if ggml_type not in DEQUANTIZABLE_TYPES:
        raise GGUFError(f"type {ggml_type.name}: no way to dequantize it, allowed: "
                        + ", ".join(t.name for t in DEQUANTIZABLE_TYPES))  # fmt: skip
    if ggml_type in (GGMLType.F32, GGMLType.F16):
        return rows.astype(np.float32)
    raw = np.ascontiguousarray(rows)
    if ggml_type == GGMLType.BF16:
        # A shift, not gguf's: it accepts rows of any number of dimensions.
        return (raw.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):  # scales from a stranger may be inf or NaN
        return np.asarray(gguf.quants.dequantize(raw, ggml_type), np.float32)
