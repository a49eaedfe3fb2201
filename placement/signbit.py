"""The training-free predictor: signs of x against signs of the key rows.

In: packed sign planes of key rows; x. Out: how much signs agree. Next: predictor.py, whose Predictor uses it.

Where a weight and its input have the same sign, their product is positive. With n_embd - 2 * differing signs for a
score, neurons whose products are mostly positive score high; the bias per neuron says what is high enough.
"""

from __future__ import annotations

import numpy as np

from hotcold.runtime.kernels.reference import sign_planes

# Set bits of a byte; older NumPy has no bitwise_count.
_BITS = np.array([bin(i).count("1") for i in range(256)], np.uint8)
_CELLS = 1 << 22  # bytes of differing signs held at a time


def agreement(signs: np.ndarray, x: np.ndarray) -> np.ndarray:
    """n_embd - 2 * (signs that differ), f32 [n, n_ff], of sign planes i32 [n_ff, words] and x f32 [n, n_embd]."""
    rows = np.ascontiguousarray(signs).view(np.uint8)  # [n_ff, bytes]
    own = sign_planes(x).view(np.uint8)  # [n, bytes]
    out = np.empty((len(x), len(rows)), np.float32)
    step = max(1, _CELLS // rows.size)
    for a in range(0, len(x), step):
        differing = _BITS[own[a:a + step, None] ^ rows].sum(axis=2, dtype=np.int32)  # [step, n_ff]
        out[a:a + step] = x.shape[1] - 2 * differing
    return out
