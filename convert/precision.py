"""Casts between storage types, and what they cost.

In: LazyTensor of any type. Out: LazyTensor of the wanted type, and a Report of what the casts lost.
Next: outtype.py, which chooses the types.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import gguf
import numpy as np

from hotcold.convert.lazy import LazyTensor, QType, to_float32
from hotcold.convert.parallel import by_rows
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.kernels import formats

F16_MAX = 65504.0
F16_MAGNITUDE, F16_INFINITY, F16_MIN_NORMAL = np.uint16(0x7FFF), 0x7C00, 0x0400  # bits
BF16_INFINITY = 0x7F80
# Block types that can be written -> the largest magnitude whose block scales still fit F16.
BLOCK_MAX = {
    QType.Q8_0: 127 * F16_MAX, QType.Q4_0: 8 * F16_MAX, QType.Q4_1: F16_MAX, QType.Q5_0: 16 * F16_MAX,
    QType.Q5_1: F16_MAX, QType.Q4_K: 63 * F16_MAX,
}
# Where in a block its F16 scales lie, in bytes; of all block types the runtime computes with.
SCALES = {
    QType.Q8_0: (0,), QType.Q4_0: (0,), QType.Q5_0: (0,), QType.Q4_1: (0, 2), QType.Q5_1: (0, 2), QType.Q4_K: (0, 2),
    QType.Q5_K: (0, 2), QType.Q6_K: (208,),
}


@dataclass
class Loss:
    """What casting one tensor to F16 lost, in elements."""

    subnormal: int = 0  # smaller than F16's smallest normal number: fewer bits kept
    flushed: int = 0    # too small for F16: became 0


@dataclass
class Report:
    """Everything a user should hear about a conversion, gathered while it runs."""

    notes: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)  # tensors known to be without meaning for the computation
    outlier_layers: list[int] = field(default_factory=list)  # kept in F16, see outtype.OUTLIER
    f16: dict[str, Loss] = field(default_factory=dict)  # tensor -> loss
    requantized: dict[str, list[float]] = field(default_factory=dict)  # tensor -> [sum of error^2, sum of value^2]

    def note(self, text: str) -> None:
        """Keep a line for the summary, once."""
        if text not in self.notes:
            self.notes.append(text)

    def relative_error(self, name: str) -> float:
        """Relative L2 error of one requantized tensor."""
        error, square = self.requantized[name]
        return math.sqrt(error / square) if square else 0.0

    def total_relative_error(self) -> float:
        """Relative L2 error over all requantized tensors."""
        error = sum(e for e, _ in self.requantized.values())
        square = sum(s for _, s in self.requantized.values())
        return math.sqrt(error / square) if square else 0.0


def cast(t: LazyTensor, qtype: QType, report: Report, measure: bool = False) -> LazyTensor:
    """`t` stored as `qtype`. Equal types pass through byte for byte.

    `measure`: add the error of quantizing to `report.requantized` (for values that come from another quantization).
    Reading raises HotcoldError when a value does not fit, naming the tensor, how many, and what to use instead.
    """
    if t.qtype == qtype:
        return t

    def read(a: int, b: int) -> np.ndarray:
        x = to_float32(t.read(a, b), t.qtype)
        if t.qtype == QType.F64 and not np.isfinite(x).all():
            _refuse(t, qtype)
        if qtype == QType.F32:
            return x
        if qtype == QType.F16:
            return _to_f16(x, t, report)
        if qtype == QType.BF16:
            return gguf.quants.quantize(x, qtype).view(np.uint16)
        if not (np.abs(x).max(initial=0.0) <= BLOCK_MAX[qtype]):  # also false for NaN
            _refuse(t, qtype)
        packed = quantize(x, qtype)
        if measure:
            sums = report.requantized.setdefault(t.name, [0.0, 0.0])
            sums[0] += float(np.sum((to_float32(packed, qtype) - x) ** 2, dtype=np.float64))
            sums[1] += float(np.sum(x**2, dtype=np.float64))
        return packed

    return replace(t, qtype=qtype, read=read, read_columns=None)


def quantize(x: np.ndarray, qtype: QType) -> np.ndarray:
    """float32 [n, columns] -> uint8 [n, row bytes] of a type of BLOCK_MAX, on all cores; values must fit it."""
    if qtype == QType.Q4_K:
        from hotcold.convert import q4k  # compiled code: only for those who need it

        rows: Callable[[np.ndarray], np.ndarray] = q4k.quantize
    else:
        def rows(part: np.ndarray) -> np.ndarray:
            return gguf.quants.quantize(part, qtype)

    return by_rows(rows, x, formats.row_bytes(qtype, x.shape[-1]), np.uint8)


def _to_f16(x: np.ndarray, t: LazyTensor, report: Report) -> np.ndarray:
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
    if t.qtype == QType.F16 or not x.size:
        return half
    magnitude = half.view(np.uint16) & F16_MAGNITUDE  # as integers: half the bytes to look at
    if magnitude.max() >= F16_INFINITY:  # or NaN
        _refuse(t, QType.F16)
    n_small = int(np.count_nonzero(magnitude < F16_MIN_NORMAL))
    n_zero = int(np.count_nonzero(magnitude == 0))
    n_flushed = n_zero - (x.size - int(np.count_nonzero(x))) if n_zero else 0
    if n_flushed or n_small > n_zero:
        loss = report.f16.setdefault(t.name, Loss())
        loss.flushed += n_flushed
        loss.subnormal += n_small - n_zero
    return half


def _refuse(t: LazyTensor, qtype: QType) -> None:
    """Count over the whole tensor what does not fit, and raise."""
    limit = BLOCK_MAX.get(qtype, F16_MAX if qtype == QType.F16 else float(np.finfo(np.float32).max))
    bad = n_broken = 0
    largest = 0.0
    for a, b in t.slabs():
        raw = t.read(a, b)
        x = np.abs(raw if t.qtype == QType.F64 else to_float32(raw, t.qtype))
        n_broken += int(np.count_nonzero(~np.isfinite(x)))
        # F16 rounds up to infinity from 65520 on; blocks overflow beyond the limit itself.
        bad += int(np.count_nonzero(x >= 65520.0 if qtype == QType.F16 else x > limit))
        largest = max(largest, float(np.max(x, initial=0.0, where=np.isfinite(x))))
    if n_broken:
        raise HotcoldError(f"tensor {t.name}: {n_broken} of {t.n_elements} values are NaN or infinite: "
                           "the source is damaged")
    advice = "use --outtype bf16, f32 or q8_0" if qtype == QType.F16 else "use --outtype bf16 or f32"
    raise HotcoldError(
        f"tensor {t.name}: {bad} of {t.n_elements} values do not fit {qtype.name} "
        f"(largest magnitude {largest:g}, limit {limit:g}): {advice}")



def count_not_finite(raw: np.ndarray, qtype: QType) -> int:
    """How many values (of block types: scales) of stored rows are NaN or infinite.

    raw: rows as they are written, any shape; one such value spoils every text, or, in a key row, hides a neuron.
    """
    data = raw.reshape(-1).view(np.uint8)
    if qtype == QType.F32:
        return data.size // 4 - int(np.count_nonzero(np.isfinite(data.view(np.float32))))
    if qtype in (QType.F16, QType.BF16):
        exponent = F16_INFINITY if qtype == QType.F16 else BF16_INFINITY
        return int(np.count_nonzero(data.view(np.uint16) & F16_MAGNITUDE >= exponent))
    if qtype in SCALES:
        blocks = data.reshape(-1, gguf.GGML_QUANT_SIZES[qtype][1])
        return sum(int(np.count_nonzero(np.ascontiguousarray(blocks[:, i:i + 2]).view(np.uint16) & F16_MAGNITUDE
                                        >= F16_INFINITY)) for i in SCALES[qtype])
    return 0
