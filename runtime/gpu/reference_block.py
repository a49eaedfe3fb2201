"""The NumPy truth of the kernels of prompts, where kernels/reference.py has none: plain, slow.

In: arrays; raw rows of a file. Out: arrays. Next: tests compare cuda/unpack.cu, half.cu and matmul.cu with these.
"""

from __future__ import annotations

import numpy as np

from hotcold.runtime.kernels import reference
from hotcold.runtime.kernels.formats import BLOCK, F16, Q8_0

Array = np.ndarray


def split_rows(ggml_type: int, raw: Array, cols: int) -> tuple[Array, Array | None]:
    """Raw rows, uint8 [rows, row bytes] -> q and d of the matrix on a device."""
    rows = len(raw)
    if ggml_type == F16:
        return raw.view(np.float16).reshape(rows, cols), None
    blocks = raw.reshape(rows * cols // BLOCK, -1)
    d = np.ascontiguousarray(blocks[:, :2]).view(np.float16).reshape(rows, -1)
    q = np.ascontiguousarray(blocks[:, 2:]).reshape(rows, -1)
    return (q.view(np.int8) if ggml_type == Q8_0 else q), d


def to_half(x: Array) -> tuple[Array, Array]:
    """Activations f32 [n_tok, n] -> (half [n_tok, n], f32 [n_tok]): x is about half * scale.

    A scale is the power of two that brings the token's largest value to 2^14 .. 2^15.
    """
    finite = np.where(np.isnan(x), 0, np.abs(x)).max(axis=1, initial=0)
    _, exponents = np.frexp(finite)  # finite = m * 2^e with 0.5 <= m < 1
    exponents = np.where((finite > 0) & np.isfinite(finite), np.maximum(exponents - 15, -126), 0)
    scales = np.ldexp(np.float32(1), exponents).astype(np.float32)
    with np.errstate(over="ignore"):
        return (x / scales[:, None]).astype(np.float16), scales


def half_matmul(ggml_type: int, raw: Array, x: Array) -> Array:
    """x [n_tok, cols] times raw rows as the library multiplies them, both in halves: float64 [n_tok, rows]."""
    half, scales = to_half(x)
    weights = reference.decode(ggml_type, raw, x.shape[1]).astype(np.float16).astype(np.float64)
    return scales[:, None] * (half.astype(np.float64) @ weights.T)
