"""Tensors that are read only when they are written: views of the source with row orders, transposes and casts.

In: memory-mapped arrays of checkpoint.py or gguf_source.py. Out: LazyTensor, read a slab of rows at a time, so that
the peak of memory stays near one slab and never depends on the size of the model. Next: precision.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import gguf
import numpy as np

from hotcold.convert.parallel import by_rows
from hotcold.runtime.gguf_file import dequantize
from hotcold.runtime.kernels import formats

QType = gguf.GGMLQuantizationType

FLOAT_TYPES = (QType.F64, QType.F32, QType.F16, QType.BF16)

SLAB_BYTES = 32 << 20  # float32 bytes of one slab of rows
SLAB_ALIGN = 256       # slabs of a transposed matrix cut its source at whole blocks of any type (K-quants: 256)


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of the source or one derived from it.

    `read(start, stop)` gives rows [start, stop) in the type's own form: float64/float32/float16 [n, cols], uint16
    [n, cols] for BF16, uint8 [n, row_bytes] for quantized types; a 1-D tensor gives elements. `read_columns(start,
    stop)`, if there is a better way than reading whole rows, gives [rows, n] as floats (see `columns`).
    """

    name: str
    shape: tuple[int, ...]  # rows first
    qtype: QType
    read: Callable[[int, int], np.ndarray]
    origin: str = ""  # the source's name of the type, for the listing
    read_columns: Callable[[int, int], np.ndarray] | None = None
    was: QType | None = None  # the quantized type these float values were taken from by transposing

    @property
    def n_rows(self) -> int:
        return self.shape[0]

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        return self.n_elements // self.shape[-1] * formats.row_bytes(self.qtype, self.shape[-1])

    def slabs(self) -> list[tuple[int, int]]:
        """Row ranges [(start, stop)] that together cover the tensor."""
        per_row = 4 * (self.n_elements // self.n_rows)
        step = max(SLAB_ALIGN, SLAB_BYTES // per_row // SLAB_ALIGN * SLAB_ALIGN)
        return [(a, min(a + step, self.n_rows)) for a in range(0, self.n_rows, step)]


def from_array(name: str, array: np.ndarray, qtype: QType, shape: tuple[int, ...], origin: str) -> LazyTensor:
    """A tensor over an array (usually a view of a memory map) in the type's own form."""
    return LazyTensor(name, shape, qtype, lambda a, b: array[a:b], origin or qtype.name)


def to_float32(raw: np.ndarray, qtype: QType) -> np.ndarray:
    """Own form -> float32 [n, cols] (or [n])."""
    if qtype in (QType.F64, QType.F32):
        with np.errstate(over="ignore"):  # float64 that becomes infinite is refused by cast()
            return raw.astype(np.float32, copy=False)
    if raw.ndim == 2 and qtype not in FLOAT_TYPES:
        block, size = gguf.GGML_QUANT_SIZES[qtype]
        return by_rows(lambda rows: dequantize(rows, qtype), raw, raw.shape[1] // size * block, np.float32)
    return dequantize(raw, qtype)


def columns(t: LazyTensor, start: int, stop: int) -> np.ndarray:
    """Columns [start, stop) of a matrix: [rows, n] in own form for float types, float32 for quantized ones."""
    if t.read_columns is not None:
        return t.read_columns(start, stop)
    raw = t.read(0, t.n_rows)
    if t.qtype in FLOAT_TYPES:
        return raw[:, start:stop]
    block, size = gguf.GGML_QUANT_SIZES[t.qtype]
    first, last = start // block, -(-stop // block)
    part = to_float32(np.ascontiguousarray(raw[:, first * size:last * size]), t.qtype)
    return part[:, start - first * block:stop - first * block]


def renamed(t: LazyTensor, name: str) -> LazyTensor:
    return replace(t, name=name)


def gathered(t: LazyTensor, order: np.ndarray) -> LazyTensor:
    """Row i of the result is row order[i] of `t`; `t` must be cheap to read whole (a view). Works for any type."""

    def read(a: int, b: int) -> np.ndarray:
        return t.read(0, t.n_rows)[order[a:b]]

    def read_columns(a: int, b: int) -> np.ndarray:
        return columns(t, a, b)[order]

    return replace(t, shape=(len(order), *t.shape[1:]), read=read, read_columns=read_columns)


def transposed(t: LazyTensor) -> LazyTensor:
    """Matrix transposed; float types keep their bits, quantized ones become F32 (their blocks run along the rows)."""

    def read(a: int, b: int) -> np.ndarray:
        return np.ascontiguousarray(columns(t, a, b).T)

    shape = (t.shape[1], t.shape[0])
    if t.qtype in FLOAT_TYPES:
        return LazyTensor(t.name, shape, t.qtype, read, t.origin)
    return LazyTensor(t.name, shape, QType.F32, read, t.origin, was=t.qtype)


def scaled(t: LazyTensor, factor: float) -> LazyTensor:
    """All elements times `factor`, as F32."""

    def read(a: int, b: int) -> np.ndarray:
        return to_float32(t.read(a, b), t.qtype) * np.float32(factor)

    return replace(t, qtype=QType.F32, read=read, read_columns=None)


def interleaved(name: str, even: LazyTensor, odd: LazyTensor) -> LazyTensor:
    """Rows 2i from `even`, rows 2i+1 from `odd`; both of one shape and type."""

    def read(a: int, b: int) -> np.ndarray:
        first, last = a // 2, (b + 1) // 2  # neurons
        x, y = even.read(first, last), odd.read(first, last)  # [n, ...]
        both = np.empty((2 * len(x), *x.shape[1:]), x.dtype)
        both[0::2], both[1::2] = x, y
        return both[a - 2 * first:b - 2 * first]

    origin = even.origin if even.origin == odd.origin else f"{even.origin}+{odd.origin}"
    return LazyTensor(name, (2 * even.n_rows, *even.shape[1:]), even.qtype, read, origin)
