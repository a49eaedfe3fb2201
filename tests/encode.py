"""float32 values -> rows of any format the kernels compute.

In: values, a type. Out: the raw rows. Next: one_op.py, small_models.py.

Formats of 256 weights, which the gguf package only decodes, are encoded here: plainly, not as well as can be.
"""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type


def encode(ggml_type: int, values: np.ndarray) -> np.ndarray:
    """float32 [rows, cols] -> raw rows, uint8 [rows, row bytes]."""
    kind = Type(ggml_type)
    if kind in (Type.Q4_K, Type.Q5_K, Type.Q6_K):
        blocks = np.ascontiguousarray(values, np.float32).reshape(-1, 256)
        raw = _q6k(blocks) if kind == Type.Q6_K else _q45k(kind, blocks)
    else:
        raw = np.ascontiguousarray(gguf.quants.quantize(values, kind)).view(np.uint8)
    return np.ascontiguousarray(raw).reshape(len(values), -1)


def _f16(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[n, 1] -> its bytes [n, 2], and its value as it comes back. Large values are the tests' own business."""
    half = np.clip(x, -65504, 65504).astype(np.float16)
    return half.view(np.uint8).reshape(-1, 2), half.astype(np.float64)


def _divided(x: np.ndarray, by: np.ndarray) -> np.ndarray:
    return np.divide(x, by, out=np.zeros(np.broadcast_shapes(x.shape, by.shape)), where=by != 0)


def _q45k(kind: Type, blocks: np.ndarray) -> np.ndarray:
    top = 15 if kind == Type.Q4_K else 31
    parts = blocks.reshape(-1, 8, 32).astype(np.float64)
    minimum = np.maximum(-parts.min(axis=2), 0)  # [n, 8]
    step = np.maximum(parts.max(axis=2) + minimum, 0) / top
    d_bytes, d = _f16(step.max(axis=1, keepdims=True) / 63)
    m_bytes, m = _f16(minimum.max(axis=1, keepdims=True) / 63)
    scales, minimums = (
        np.clip(np.rint(_divided(x, by)), 0, 63).astype(np.uint8) for x, by in ((step, d), (minimum, m))
    )
    values = _divided(parts + (m * minimums)[..., None], (d * scales)[..., None])
    q = np.clip(np.rint(values), 0, top).astype(np.uint8)  # [n, 8, 32]
    packed = np.concatenate([
        scales[:, :4] | scales[:, 4:] >> 4 << 6, minimums[:, :4] | minimums[:, 4:] >> 4 << 6,
        scales[:, 4:] & 15 | minimums[:, 4:] << 4,
    ], axis=1)  # fmt: skip
    nibbles = ((q[:, ::2] & 15) | q[:, 1::2] << 4).reshape(len(blocks), 128)
    fifths = [np.packbits(q >> 4, axis=1, bitorder="little").reshape(-1, 32)] if kind == Type.Q5_K else []
    return np.concatenate([d_bytes, m_bytes, packed, *fifths, nibbles], axis=1)


def _q6k(blocks: np.ndarray) -> np.ndarray:
    parts = blocks.reshape(-1, 16, 16).astype(np.float64)
    extreme = np.take_along_axis(parts, np.abs(parts).argmax(axis=2, keepdims=True), axis=2)[..., 0]
    step = extreme / -32  # [n, 16]
    d_bytes, d = _f16(np.abs(step).max(axis=1, keepdims=True) / 127)
    scales = np.clip(np.rint(_divided(step, d)), -128, 127).astype(np.int8)
    q = np.clip(np.rint(_divided(parts, (d * scales)[..., None])), -32, 31).astype(np.int8) + 32
    q = q.astype(np.uint8).reshape(-1, 2, 4, 32)
    nibbles = (q[:, :, :2] & 15 | q[:, :, 2:] << 4).reshape(-1, 128)
    upper = q >> 4
    high = (upper[:, :, 0] | upper[:, :, 1] << 2 | upper[:, :, 2] << 4 | upper[:, :, 3] << 6).reshape(-1, 64)
    return np.concatenate([nibbles, high, scales.view(np.uint8), d_bytes], axis=1)
