"""Weight formats the kernels compute natively, and the layout of quantized activations.

In: nothing. Out: numbers and sizes shared by kernels and Python. Next: simd.py.

Activations for block formats ('act blocks', one cache line for 32 values x[0..31]):

    offset  0   32 x i8   q = round(x / d)
    offset 32    8 x i16  -8 * (sum of 4 consecutive q)
    offset 48   f32       d = max|x| / 127
    offset 52   i32       -8 * (sum of all q)
    offset 56   f32       d * (sum of all q)
    offset 60   i32       -8 * (sum of the first 16 q)

Starting an integer dot product at the negative sums removes the zero point of Q4_0 (8) for free, times 2 that of Q5_0
(16), times 4 that of Q6_K (32), times 16 that of Q8_0 stored with an offset of 128. Formats with a minimum per block
(value = scale * q + minimum) need d * sum, once per block: it multiplies the minimum.
"""

from __future__ import annotations

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, BF16 = (
    int(t)
    for t in (
        GGMLQuantizationType.F32,
        GGMLQuantizationType.F16,
        GGMLQuantizationType.Q4_0,
        GGMLQuantizationType.Q4_1,
        GGMLQuantizationType.Q5_0,
        GGMLQuantizationType.Q5_1,
        GGMLQuantizationType.Q8_0,
        GGMLQuantizationType.Q4_K,
        GGMLQuantizationType.Q5_K,
        GGMLQuantizationType.Q6_K,
        GGMLQuantizationType.BF16,
    )
)
QUANTIZED = (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K)
NATIVE = (F32, F16, BF16, *QUANTIZED)

BLOCK = 32  # weights per block of Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1; values per act block
Q8_0_BYTES = 34  # f16 d, 32 x i8
Q4_0_BYTES = 18  # f16 d, 16 bytes of nibbles: value = d * (q - 8)
Q4_1_BYTES = 20  # f16 d, f16 m, nibbles: value = d * q + m
Q5_0_BYTES = 22  # f16 d, 32 fifth bits, nibbles: value = d * (q - 16)
Q5_1_BYTES = 24  # f16 d, f16 m, fifth bits, nibbles: value = d * q + m

SUPER_BLOCK = 256  # weights per block of Q4_K, Q5_K and Q6_K
Q4_K_BYTES = 144  # f16 d, f16 dmin, 12 bytes of 6-bit scales and minimums, 128 bytes of nibbles
Q5_K_BYTES = 176  # the same with 32 bytes of fifth bits before the nibbles
Q6_K_BYTES = 210  # 128 bytes of nibbles, 64 bytes of upper bits, 16 x i8 scales, f16 d: value = d * scale * (q - 32)

ACT_BYTES = 64
ACT_SUMS, ACT_D, ACT_SUM, ACT_DSUM, ACT_HALF = 32, 48, 52, 56, 60

PACK_TOKENS = 6  # from so many tokens on a matrix product packs its weights: see blocks.py


def row_bytes(ggml_type: int, cols: int) -> int:
    """Bytes of one row of `cols` weights."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(ggml_type)]
    return cols // block * size
