"""Which storage type every tensor of the target gets.

In: tensors of a StockModel and `--outtype`. Out: types, with the reasons in the Report.
Next: neuron_split.py, stock.py.

`auto` keeps what the source has wherever that loses nothing: types the runtime computes with stay byte for byte. What
must change:
- a quantized down matrix has its blocks along the other axis, so it is quantized again, and the up rows that share
  its tensor with it: as Q8_0, or as F16 where it has outliers, whatever the source's type. Measured on SmolLM2 (467
  tokens; `scripts/measure_requant.py` repeats it for the types a model's width allows), KL divergence from the source:

      source   down matrices again as   Q8_0 (or F16)   Q8_0 alone   Q5_1     Q5_0     Q4_K     source from its F16
      Q4_K_M                            5.7e-4          2.3e-3       9.9e-3   1.8e-2   3.6e-2   5.5e-2
      Q5_K_M                            6.2e-4          2.6e-3       1.2e-2   2.0e-2   4.0e-2   9.0e-2

  A second time in 4 or 5 bits costs a good part of the first. Q8_0 costs a hundredth, and nearly all of that comes
  from the few layers whose down matrix has an outlier that spoils the block it falls into. Its bytes are those of
  neurons that fire; who wants them smaller says so (`--outtype q4_k`).
- types the runtime does not compute with (Q3_K, IQ4_XS, ...) become Q8_0.
"""

from __future__ import annotations

import math
import re

import gguf
import numpy as np

from hotcold.convert.lazy import FLOAT_TYPES, LazyTensor, QType, to_float32
from hotcold.convert.precision import BLOCK_MAX, Report
from hotcold.runtime.kernels import formats

OUTTYPES = {"f32": QType.F32, "f16": QType.F16, "bf16": QType.BF16, "q8_0": QType.Q8_0, "q4_0": QType.Q4_0,
            "q4_k": QType.Q4_K}
FOUR_BITS = (QType.Q4_0, QType.Q4_K)
EMBEDDINGS = ("token_embd.weight", "output.weight")
TURNED = "turning a matrix moves its blocks to the other axis"
# Largest magnitude of a down matrix in standard deviations, from which Q8_0 is too coarse for it. SmolLM2-135M (Q4_1):
# 4 of 30 layers are above, and keeping them in F16 takes the KL divergence from 2.5e-3 to 4.2e-4 for 5 % more bytes.
OUTLIER = 25.0


def keeps_f32(name: str, shape: tuple[int, ...]) -> bool:
    """Vectors, norms, biases and learned positions are F32 in every file: they are small and matter."""
    return len(shape) == 1 or name == "position_embd.weight"


def plain_type(t: LazyTensor, outtype: str, auto: QType | None, report: Report) -> QType:
    """Type of a tensor whose rows stay rows."""
    if keeps_f32(t.name, t.shape):
        return QType.F32
    if outtype != "auto":
        wanted = OUTTYPES[outtype]
        if wanted in FOUR_BITS and t.name in EMBEDDINGS:
            if t.qtype in formats.NATIVE and t.qtype not in FLOAT_TYPES:
                report.note(f"{outtype}: {t.name} stays {t.qtype.name}, as it is in the source")
                return t.qtype
            wanted = QType.Q8_0
            report.note(f"{outtype}: token embedding and output matrix are stored as Q8_0 (4 bits cost too much there)")
    elif auto is not None:
        wanted = auto
    elif t.was is not None:
        wanted = _again(t, f"{t.was.name} down matrices", report)
    elif t.qtype in formats.NATIVE:
        return t.qtype
    elif t.qtype == QType.F64:
        wanted = QType.F32
    else:
        wanted = QType.Q8_0
        report.note(f"auto: {t.qtype.name} tensors become Q8_0: the runtime computes with "
                    f"{', '.join(QType(n).name for n in formats.NATIVE)}")
    return fits(t.name, t.shape[-1], wanted, report)


def turned_type(turned: LazyTensor, row_mate: LazyTensor | None, outtype: str, auto: QType | None,
                report: Report) -> QType:
    """Type of the transposed down matrix [n_ff, n_embd], and of the up rows that share a tensor with it.

    `row_mate`: the up rows, or None when they have a tensor of their own.
    """
    columns = turned.shape[1]
    if outtype != "auto":
        return fits(turned.name, columns, OUTTYPES[outtype], report)
    if auto is not None:
        return fits(turned.name, columns, auto, report)
    types = {turned.was or turned.qtype} | ({row_mate.qtype} if row_mate else set())
    if types <= set(FLOAT_TYPES):
        return types.pop() if len(types) == 1 and QType.F64 not in types else QType.F32
    quantized = ", ".join(sorted(t.name for t in types if t not in FLOAT_TYPES))
    wanted = _again(turned, f"{quantized} {'up rows and ' if row_mate else ''}down columns", report)
    return fits(turned.name, columns, wanted, report)


def _again(t: LazyTensor, what: str, report: Report) -> QType:
    """Type for values that are quantized a second time, along the other axis."""
    report.note(f"auto: {what} are quantized again, as Q8_0: {TURNED}")
    if t.was not in (None, QType.Q8_0):
        report.note("--outtype q4_k gives them half the bytes, at a loss")
    if outlier_ratio(t) <= OUTLIER:
        return QType.Q8_0
    report.outlier_layers.append(int(t.name.split(".")[1]))
    return QType.F16


def outlier_ratio(t: LazyTensor) -> float:
    """Largest magnitude over the standard deviation (about 0), reading the matrix once; NaN if any value is."""
    largest = square = 0.0
    for a, b in t.slabs():
        x = to_float32(t.read(a, b), t.qtype)
        largest = max(largest, float(np.abs(x).max()))
        with np.errstate(over="ignore", invalid="ignore"):
            square += float(np.sum(x**2, dtype=np.float64))
    if math.isinf(square):  # x^2 beyond float32
        return math.inf
    return largest / (square / t.n_elements) ** 0.5 if square else 0.0


def fits(name: str, columns: int, wanted: QType, report: Report) -> QType:
    """`wanted`, or where rows do not divide into its blocks Q5_0 instead of Q4_K, then F16 (as llama.cpp does)."""
    block = gguf.GGML_QUANT_SIZES[wanted][0]
    if columns % block == 0:
        return wanted
    other = QType.Q5_0 if wanted == QType.Q4_K and columns % gguf.GGML_QUANT_SIZES[QType.Q5_0][0] == 0 else QType.F16
    part = re.sub(r"^blk\.\d+\.", "", name)  # one note for all layers
    report.note(f"{part}: {other.name} instead of {wanted.name}, as rows of {columns} do not divide into blocks of "
                f"{block}")
    return other


def writable(t: LazyTensor, qtype: QType, what: str, report: Report) -> QType:
    """`qtype`, or Q8_0 where it can only be read, for values that are to be changed."""
    if qtype in FLOAT_TYPES or qtype in BLOCK_MAX:
        return qtype
    report.note(f"{qtype.name} tensors that {what} become Q8_0")
    return fits(t.name, t.shape[-1], QType.Q8_0, report)
