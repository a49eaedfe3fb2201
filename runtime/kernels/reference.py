"""The NumPy truth of every kernel: plain, slow, in float64.

In: arrays; weights as the raw bytes of a file, uint8 [rows, row bytes]. Out: float64 arrays. Next: tests compare the
kernels of the other modules with these.

Only what defines the numbers is kept from the kernels: how weights are decoded, and that activations meet rows of block
formats as blocks of 32 int8. Orders of additions are not.
"""

from __future__ import annotations

import numpy as np
from scipy.special import erf, expit

from hotcold.runtime.kernels.formats import (
    ACT_BYTES,
    ACT_D,
    ACT_DSUM,
    ACT_HALF,
    ACT_SUM,
    ACT_SUMS,
    BF16,
    BLOCK,
    F16,
    F32,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    QUANTIZED,
    SUPER_BLOCK,
)
from hotcold.runtime.schema import DENSE_ACTIVATIONS

Array = np.ndarray


# ------------------------------------------------------------------ formats


def decode(ggml_type: int, raw: Array, cols: int) -> Array:
    """Raw rows, uint8 [rows, row bytes] -> their weights, float64 [rows, cols]."""
    rows = len(raw)
    if ggml_type == F32:
        return raw.view(np.float32).astype(np.float64)
    if ggml_type == F16:
        return raw.view(np.float16).astype(np.float64)
    if ggml_type == BF16:
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if ggml_type in (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1):
        return _decode_blocks(ggml_type, raw.reshape(rows * cols // BLOCK, -1)).reshape(rows, cols)
    if ggml_type in (Q4_K, Q5_K, Q6_K):
        blocks = raw.reshape(rows * cols // SUPER_BLOCK, -1)
        return (_decode_q6k(blocks) if ggml_type == Q6_K else _decode_q45k(ggml_type, blocks)).reshape(rows, cols)
    raise ValueError(f"type {ggml_type} is not computed natively")


def _halves(raw: Array) -> Array:
    """f16 numbers: uint8 [n, 2k] -> float64 [n, k]."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float64)


def _nibbles(raw: Array) -> Array:
    """uint8 [n, k] -> [n, 2k]: all low nibbles, then all high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=1)


def _decode_blocks(ggml_type: int, blocks: Array) -> Array:
    """Blocks of 32: uint8 [n, bytes] -> float64 [n, 32]."""
    d = _halves(blocks[:, :2])
    if ggml_type == Q8_0:
        return d * blocks[:, 2:].view(np.int8).astype(np.float64)
    values = _nibbles(blocks[:, -16:]).astype(np.float64)
    if ggml_type in (Q5_0, Q5_1):
        values += 16 * np.unpackbits(blocks[:, -20:-16], axis=1, bitorder="little")
    if ggml_type in (Q4_1, Q5_1):
        return d * values + _halves(blocks[:, 2:4])
    return d * (values - (8 if ggml_type == Q4_0 else 16))


def _decode_q45k(ggml_type: int, blocks: Array) -> Array:
    """Blocks of 256 as eight of 32, each with a scale and a minimum of 6 bits: uint8 [n, bytes] -> float64 [n, 256]."""
    d, dmin = _halves(blocks[:, :2]), _halves(blocks[:, 2:4])
    a, b, c = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=1)
    minimums = np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=1)
    low = blocks[:, -128:].reshape(-1, 4, 32)
    values = np.stack([low & 15, low >> 4], axis=2).reshape(-1, 8, 32).astype(np.float64)
    if ggml_type == Q5_K:  # bit j of byte i belongs to value i of the j-th 32
        bits = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little")
        values += 16.0 * bits.swapaxes(1, 2)
    return ((d * scales)[:, :, None] * values - (dmin * minimums)[:, :, None]).reshape(-1, SUPER_BLOCK)


def _decode_q6k(blocks: Array) -> Array:
    """Blocks of 256 as sixteen of 16, each with a scale of 8 bits: uint8 [n, bytes] -> float64 [n, 256]."""
    values = np.empty((len(blocks), 2, 4, 32))
    for half in range(2):
        low = blocks[:, 64 * half :][:, :64].reshape(-1, 2, 32)
        high = blocks[:, 128 + 32 * half :][:, :32]
        for k in range(4):
            values[:, half, k] = (low[:, k % 2] >> 4 * (k // 2) & 15) + 16.0 * (high >> 2 * k & 3)
    scales = _halves(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8)
    return (scales[:, :, None] * (values.reshape(-1, 16, 16) - 32)).reshape(-1, SUPER_BLOCK)


def quantize(x: Array) -> tuple[Array, Array]:
    """Activations float32 [..., n] -> (q int8 [..., n/32, 32], d float32 [..., n/32]): x is about q * d.

    A block whose largest value is below 4e-37, where 127 / largest overflows, becomes 0. One NaN makes d NaN.
    """
    blocks = np.asarray(x, np.float32).reshape(*x.shape[:-1], -1, BLOCK)
    top = np.max(np.abs(blocks), axis=-1, initial=0)
    with np.errstate(over="ignore", invalid="ignore"):
        inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
        q = np.rint(blocks * inverse[..., None])
    return np.where(np.isfinite(q), q, 0).astype(np.int8), top * np.float32(1 / 127)


def act_blocks(x: Array) -> Array:
    """Activations float32 [..., n] -> the act blocks of formats.py, uint8 [..., n/32 * 64]."""
    q, d = quantize(x)
    out = np.zeros((*d.shape, ACT_BYTES), np.uint8)
    sums = q.reshape(*d.shape, 8, 4).sum(axis=-1, dtype=np.int32) * -8
    out[..., :ACT_SUMS] = q.view(np.uint8)
    out[..., ACT_SUMS:ACT_D] = sums.astype(np.int16).view(np.uint8)
    out[..., ACT_D:ACT_SUM] = d[..., None].view(np.uint8)
    total, half = sums.sum(axis=-1, dtype=np.int32), sums[..., :4].sum(axis=-1, dtype=np.int32)
    out[..., ACT_SUM:ACT_DSUM] = total[..., None].view(np.uint8)
    with np.errstate(invalid="ignore"):
        out[..., ACT_DSUM:ACT_HALF] = (d * (total / -8).astype(np.float32))[..., None].view(np.uint8)
    out[..., ACT_HALF:] = half[..., None].view(np.uint8)
    return out.reshape(*x.shape[:-1], -1)


def seen(ggml_type: int, x: Array) -> Array:
    """What rows of this format are multiplied with instead of x [..., n]: float64 [..., n]."""
    if ggml_type not in QUANTIZED:
        return np.asarray(x, np.float64)
    q, d = quantize(x)
    return (q * d.astype(np.float64)[..., None]).reshape(x.shape)


# ------------------------------------------------------------------ matrices


def matmul(ggml_type: int, raw: Array, x: Array, bias: Array | None = None, scale: float = 1.0) -> Array:
    """scale * (x . row + bias) for x [..., cols] and every raw row: float64 [..., rows]."""
    y = seen(ggml_type, x) @ decode(ggml_type, raw, x.shape[-1]).T
    return scale * (y if bias is None else y + bias)


def embed(ggml_type: int, raw: Array, ids: Array, cols: int, scale: float = 1.0) -> Array:
    """The rows of `ids` times scale: float64 [len(ids), cols]."""
    return scale * decode(ggml_type, raw[ids], cols)


def down(ggml_type: int, raw: Array, values: Array, cols: int, bias: Array | None = None, scale: float = 1.0) -> Array:
    """scale * (sum over neurons of value * down row + bias): values [..., neurons] -> float64 [..., cols]."""
    y = np.asarray(values, np.float64) @ decode(ggml_type, raw, cols)
    return scale * (y if bias is None else y + bias)


# ------------------------------------------------------------------ vectors


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Over the last axis."""
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def layer_norm(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    """Over the last axis."""
    x = np.asarray(x, np.float64)
    x = x - x.mean(axis=-1, keepdims=True)
    y = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight
    return y if bias is None else y + bias


def rotate(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Rotary embedding of heads x [..., head_dim]; cos, sin [..., n_dims/2] turn the first n_dims dimensions.

    Pairs are (2i, 2i+1) when interleaved, else (i, i + n_dims/2).
    """
    half = cos.shape[-1]
    out = np.array(x, np.float64)
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = out[..., first].copy(), out[..., second].copy()
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return out


# ------------------------------------------------------------------ FFN


def fires(keys: Array, threshold: float) -> Array:
    """Which neurons of a ReLU-family activation are on: bool, shape of keys."""
    return np.asarray(keys) > threshold


def activate(name: str, keys: Array, threshold: float = 0.0) -> Array:
    """An activation function of schema.ACTIVATIONS, elementwise, float64."""
    x = np.asarray(keys, np.float64)
    if name in ("relu", "fatrelu", "drelu"):
        return np.where(fires(x, threshold), x, 0.0)
    if name == "relu2":
        return np.where(fires(x, threshold), x * x, 0.0)
    if name == "silu":
        return x * expit(x)
    if name == "gelu":
        return 0.5 * x * (1.0 + erf(x * 0.5**0.5))
    if name == "gelu_tanh":
        return 0.5 * x * (1.0 + np.tanh((2.0 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
    raise ValueError(f"activation {name!r} is unknown")


def neuron_values(name: str, keys: Array, up: Array | None, threshold: float = 0.0) -> Array:
    """What each neuron multiplies its down row by: act(key), times up (clamped at 0 by drelu) when gated.

    Activations that are never 0 by themselves become 0 where the magnitude of the result is up to the threshold.
    """
    value = activate(name, keys, threshold)
    if up is not None:
        value = value * (np.maximum(up, 0.0) if name == "drelu" else up)
    if name in DENSE_ACTIVATIONS and threshold > 0:
        return np.where(np.abs(value) <= threshold, 0.0, value)
    return value


# ------------------------------------------------------------------ attention


def attend(q: Array, k: Array, v: Array, scale: float) -> Array:
    """softmax(scale * q k^T) v of one head: q [head_dim], k and v [positions, head_dim] -> float64 [head_dim]."""
    scores = scale * (np.asarray(k, np.float64) @ np.asarray(q, np.float64))
    weights = np.exp(scores - scores.max())
    return weights / weights.sum() @ np.asarray(v, np.float64)


def attention(q: Array, k: Array, v: Array, first: int, window: int, scale: float) -> Array:
    """Causal attention of tokens at positions first, first+1, ...: float64 [tokens, heads, head_dim].

    q: [tokens, heads, head_dim]; k, v: [kv heads, positions, head_dim], the cache. window > 0: a token sees itself
    and the window-1 before it.
    """
    tokens, heads, _ = q.shape
    group = heads // len(k)
    out = np.empty(q.shape, np.float64)
    for t in range(tokens):
        end = first + t + 1
        seen_from = max(0, end - window) if window else 0
        for h in range(heads):
            past = (h // group, slice(seen_from, end))
            out[t, h] = attend(q[t, h], k[past], v[past], scale)
    return out


# ------------------------------------------------------------------ predictors


def sign_planes(rows: Array) -> Array:
    """float [n, n_embd] -> i32 [n, 2 * ceil(n_embd / 64)]: bit j % 32 of word j // 32 is set where weight j is < 0."""
    n, cols = rows.shape
    bits = np.zeros((n, -(-cols // 64) * 64), bool)
    bits[:, :cols] = np.asarray(rows) < 0
    return np.packbits(bits, axis=1, bitorder="little").view("<i4")


def sign_scores(planes: Array, x: Array) -> Array:
    """n_embd - 2 * (number of signs that differ): planes i32 [n, words], x [n_embd] -> int64 [n]."""
    differ = np.unpackbits((planes ^ sign_planes(x[None, :])).view(np.uint8), axis=1).sum(axis=1, dtype=np.int64)
    return len(x) - 2 * differ
