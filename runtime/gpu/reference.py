"""The NumPy truth of the GPU's kernels where kernels/reference.py has none: matrices in two arrays, lists, the mailbox.

In: host arrays as the kernels get them. Out: float64 arrays and lists. Next: tests compare every device with these.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hotcold.runtime.kernels import formats, reference
from hotcold.runtime.kernels.vector import ACTIVATION_CODES

Array = np.ndarray

FINAL = 6  # activation code of values that need none any more
CODES = ACTIVATION_CODES | {"final": FINAL}
_NAMES = {code: name for name, code in reversed(CODES.items())}


# ------------------------------------------------------------------ matrices


def weights(q: Array, d: Array | None) -> Array:
    """A matrix of the device, q and d as DeviceMatrix has them -> float64 [rows, cols]."""
    if q.dtype == np.float16:
        return q.astype(np.float64)
    rows = len(q)
    blocks = q.reshape(rows, -1, formats.BLOCK if q.dtype == np.int8 else formats.BLOCK // 2)
    if q.dtype == np.uint8:  # byte j: weights j and j + 16
        blocks = np.concatenate([blocks & 15, blocks >> 4], axis=2).astype(np.int8) - np.int8(8)
    assert d is not None
    return (blocks * d.astype(np.float64)[:, :, None]).reshape(rows, -1)


def seen(q: Array, x: Array) -> Array:
    """What rows of q's format are multiplied with instead of x, float64."""
    return reference.seen(formats.F16 if q.dtype == np.float16 else formats.Q8_0, x)


def matvec(q: Array, d: Array | None, x: Array, stride: int = 1) -> Array:
    """Rows 0, stride, 2 * stride, ... times x."""
    return weights(q, d)[::stride] @ seen(q, x)


# ------------------------------------------------------------------ FFN


def activate(act: int, keys: Array, threshold: float) -> Array:
    return np.asarray(keys, np.float64) if act == FINAL else reference.activate(_NAMES[act], keys, threshold)


def fires(act: int, keys: Array, threshold: float) -> Array:
    """By the key in the ReLU family, else by the magnitude of the value. NaN fires."""
    if act < ACTIVATION_CODES["silu"]:
        return ~(keys <= threshold)
    return ~(np.abs(activate(act, keys, threshold)) <= threshold)


def split(act: int, keys: Array, threshold: float, hot: int) -> tuple[Array, Array]:
    """-> ids of the neurons that fire, those of the GPU and those of the CPU, rising."""
    ids = np.flatnonzero(fires(act, keys, threshold)).astype(np.int32)
    return ids[ids < hot], ids[ids >= hot]


def header(seq: int, count: int) -> int:
    return seq << 32 | count


def down_sum(q: Array, d: Array | None, ids: Sequence[int] | Array, values: Array, stride: int = 1) -> Array:
    """Sum of values[i] * row ids[i] * stride."""
    return np.asarray(values, np.float64) @ weights(q, d)[np.asarray(ids, int) * stride]
