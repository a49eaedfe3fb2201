"""Weight formats the kernels compute natively, and the layout of quantized activations.

In: nothing. Out: numbers and sizes shared by kernels and Python. Next: simd.py.

Activations for block formats ('act blocks', one cache line for 32 values x[0..31]):

    offset  0   32 x i8   q = round(x / d)
    offset 32    8 x i16  -8 * (sum of 4 consecutive q)
    offset 48   f32       d = max|x| / 127
    offset 52   i32       -8 * (sum of all q)

Starting an integer dot product at the negative sums removes the zero point of Q4_0 (8) for free, and times 16 that of
Q8_0 stored with an offset of 128.
"""

from __future__ import annotations

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

F32, F16, Q4_0, Q8_0, BF16 = (
    int(t)
    for t in (
        GGMLQuantizationType.F32,
        GGMLQuantizationType.F16,
        GGMLQuantizationType.Q4_0,
        GGMLQuantizationType.Q8_0,
        GGMLQuantizationType.BF16,
    )
)
NATIVE = (F32, F16, BF16, Q8_0, Q4_0)
QUANTIZED = (Q8_0, Q4_0)

BLOCK = 32  # weights per block of Q8_0 and Q4_0
Q8_0_BYTES = 34  # f16 d, 32 x i8
Q4_0_BYTES = 18  # f16 d, 16 bytes of nibbles

ACT_BYTES = 64
ACT_SUMS, ACT_D, ACT_SUM = 32, 48, 52


def row_bytes(ggml_type: int, cols: int) -> int:
    """Bytes of one row of `cols` weights."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(ggml_type)]
    return cols // block * size

PACK_TOKENS = 6  # from so many tokens on a matrix product packs its weights: see blocks.py
