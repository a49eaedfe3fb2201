"""The training-free predictor: signs of x against signs of the key rows.

In: key rows; x. Out: packed sign planes; how much signs agree. Next: predictor.py, whose Predictor uses both.

Where a weight and its input have the same sign, their product is positive. With n_embd - 2 * differing signs for a
score, neurons whose products are mostly positive score high; the bias per neuron says what is high enough.
"""

from __future__ import annotations

import numpy as np

# Set bits of a byte; older NumPy has no bitwise_count.
_BITS = np.array([bin(i).count("1") for i in range(256)], np.uint8)
_CELLS = 1 << 22  # bytes of differing signs held at a time


def words(n_embd: int) -> int:
    """32-bit words of a row: whole 64-bit ones."""
    return 2 * -(-n_embd // 64)


def planes(values: np.ndarray) -> np.ndarray:
    """f32 [n, n_embd] -> i32 [n, words]: bit j % 32 of word j // 32 is 1 where value j is negative (-0 is not)."""
    n, n_embd = values.shape
    padded = np.zeros((n, 32 * words(n_embd)), bool)
    padded[:, :n_embd] = values < 0
    return np.packbits(padded, axis=1, bitorder="little").view("<i4")


def agreement(signs: np.ndarray, x: np.ndarray) -> np.ndarray:
    """n_embd - 2 * (signs that differ), f32 [n, n_ff], of sign planes i32 [n_ff, words] and x f32 [n, n_embd]."""
    rows = np.ascontiguousarray(signs).view(np.uint8)  # [n_ff, bytes]
    own = planes(x).view(np.uint8)  # [n, bytes]
    out = np.empty((len(x), len(rows)), np.float32)
    step = max(1, _CELLS // rows.size)
    for a in range(0, len(x), step):
        differing = _BITS[own[a:a + step, None] ^ rows].sum(axis=2, dtype=np.int32)  # [step, n_ff]
        out[a:a + step] = x.shape[1] - 2 * differing
    return out
