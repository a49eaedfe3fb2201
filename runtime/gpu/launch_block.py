"""How the kernels of prompts are launched: grid, block and arguments from shapes.

In: device arrays of a block of tokens. Out: Launch. Next: prompt.py queues them, weights.py those that
unpack; cuda/{unpack,half,matmul,attention_block,tokens}.cu compute.

Arrays are taken as their memory, [n_tok, columns] without gaps unless a Columns says otherwise; they may be longer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from hotcold.runtime.gpu.device import Array, Device, Dim, Kernel, Stream
from hotcold.runtime.kernels import formats

FEW = 32  # tokens up to which tiles of 16 leave less of a tile empty than tiles of 64
TILE_ROWS = 64
UNPACK_BLOCKS = 64  # of 32 weights, per CUDA block
GEMM_UNIT = 8  # halves: rows of operands of gemm are padded to a multiple of it
i32, f32 = np.int32, np.float32


class Weights(Protocol):
    """A matrix on the device: rows of one format (f16, q8_0, q4_0), quants and scales apart. See cuda/formats.cuh."""

    @property
    def kind(self) -> str: ...
    @property
    def cols(self) -> int: ...
    @property
    def q(self) -> Array: ...
    @property
    def d(self) -> Array | None: ...


class Launch(NamedTuple):
    kernel: str
    grid: Dim
    block: Dim
    args: tuple[Any, ...]

    def queue(self, kernels: Callable[[str], Kernel], stream: Stream) -> None:
        kernels(self.kernel)(self.grid, self.block, self.args, stream=stream)


class Columns(NamedTuple):
    """Columns first .. first + n - 1 of an F32 array [n_tok, ld]."""

    array: Array
    n: int
    ld: int
    first: int = 0


class Act(NamedTuple):
    """Act blocks of n_tok vectors: int8 [n_tok, n] and F32 [n_tok, n / 32]."""

    q: Array
    d: Array


class Heads(NamedTuple):
    """Shapes of attention: q [n_tok, n_head, head_dim], k and v [n_tok, n_head_kv, head_dim], caches half [n_head_kv,
    n_ctx, head_dim]. head_dim is a multiple of 8, up to 256."""

    n_head: int
    n_head_kv: int
    head_dim: int
    n_ctx: int


def whole(array: Array, n: int) -> Columns:
    """An array [n_tok, n]."""
    return Columns(array, n, n)


def _up(n: int, unit: int) -> int:
    """n / unit, rounded up."""
    return -(-n // unit)


def _tile(n_tok: int) -> tuple[str, int]:
    """What the name of a product's kernel has in it, and tokens per tile."""
    return ("_few", 16) if n_tok <= FEW else ("", 64)


# ------------------------------------------------------------------ matrices


def unpack_rows(raw: Array, to: Weights, first: int, n: int) -> Launch:
    """Rows first .. first + n - 1 of a matrix from raw rows of a file, uint8, at any even address."""
    weights = n * to.cols
    blocks = _up(weights, 8 * 128) if to.kind == "f16" else _up(weights // formats.BLOCK, UNPACK_BLOCKS)
    return Launch(f"unpack_rows_{to.kind}", (blocks,), (128,), (raw, to.q, to.d, i32(first), i32(n), i32(to.cols)))


def rows_to_half(w: Weights, n: int, out: Array, stride: int = 1) -> Launch:
    """Rows 0, stride, 2 * stride, … as halves, n of them -> out [n, cols]."""
    grid = (n, _up(w.cols, 8 * 128))
    return Launch(f"rows_to_half_{w.kind}", grid, (128,), (w.q, w.d, out, i32(w.cols), i32(stride)))


def columns_to_half(w: Weights, n: int, out: Array, stride: int = 1) -> Launch:
    """The transpose of the same: out [cols, padded(n)]."""
    ldo = padded(n)
    grid = (_up(w.cols, 64), _up(ldo, 64))
    args = (w.q, w.d, out, i32(n), i32(w.cols), i32(ldo), i32(stride))
    return Launch(f"columns_to_half_{w.kind}", grid, (128,), args)


def padded(n: int) -> int:
    """Length of a row of halves that holds n of them, for gemm."""
    return _up(n, GEMM_UNIT) * GEMM_UNIT


def to_half(x: Columns, n_tok: int, out: Array, scales: Array) -> Launch:
    """Activations as halves, out [n_tok, padded(x.n)], and the power of two that each token was divided by."""
    args = (x.array, out, scales, i32(x.n), i32(x.ld), i32(x.first), i32(padded(x.n)))
    return Launch("to_half", (n_tok,), (256,), args)


def finish_half(c: Array, scales: Array, n_tok: int, y: Columns, *, bias: Array | None = None, scale: float = 1.0,
                add: bool = False) -> Launch:  # fmt: skip
    """y = (add: y +) scale * (c * scales + bias): c F32 [n_tok, y.n], what gemm made of to_half's halves."""
    args = (c, scales, bias, y.array, i32(y.n), i32(y.ld), i32(y.first), f32(scale), i32(add))
    return Launch("finish_half", (_up(y.n, 256), n_tok), (256,), args)


def gemm(device: Device, a: Array, b: Array, c: Array, m: int, n: int, k: int, stream: Stream) -> None:
    """c [m, n] = a [m, k] . b [n, k]^T of flat arrays that may be longer."""
    device.gemm(a[: m * k].reshape(m, k), b[: n * k].reshape(n, k), c[: m * n].reshape(m, n), stream)


def matmul(w: Weights, x: Columns | None, act: Act | None, n_tok: int, y: Columns, *, stride: int = 1,
           bias: Array | None = None, scale: float = 1.0, add: bool = False) -> Launch:  # fmt: skip
    """y = (add: y +) scale * (rows 0, stride, … of w . x + bias), y.n rows; F16 takes x (first 0), others act."""
    name, tokens = _tile(n_tok)
    grid = (_up(n_tok, tokens), _up(y.n, TILE_ROWS))
    array, ld = (x.array, x.ld) if x is not None and w.kind == "f16" else (None, 0)
    xq, xd = act if act is not None and w.kind != "f16" else (None, None)
    args = (w.q, w.d, array, xq, xd, bias, y.array, i32(n_tok), i32(y.n), i32(w.cols), i32(stride), i32(ld), i32(y.ld),
            i32(y.first), f32(scale), i32(add))  # fmt: skip
    return Launch(f"matmul{name}_{w.kind}", grid, (128,), args)


def down(w: Weights, v: Columns, n_tok: int, y: Array, *, stride: int = 1, bias: Array | None = None,
         scale: float = 1.0, add: bool = False) -> Launch:  # fmt: skip
    """y [n_tok, cols] = (add: y +) scale * (sum of v[i] * row i * stride + bias) over v.n neurons."""
    name, tokens = _tile(n_tok)
    grid = (_up(n_tok, tokens), _up(w.cols, TILE_ROWS))
    args = (w.q, w.d, v.array, bias, y, i32(n_tok), i32(v.n), i32(w.cols), i32(stride), i32(v.ld), i32(v.first),
            f32(scale), i32(add))  # fmt: skip
    return Launch(f"down{name}_{w.kind}", grid, (128,), args)


# ------------------------------------------------------------------ tokens


def norm_tokens(x: Array, n_tok: int, n: int, w: Array, b: Array | None, h: Array, act: Act | None, *, eps: float,
                layer_norm: bool) -> Launch:  # fmt: skip
    """h = norm of x, and its act blocks if wanted (n % 32 == 0)."""
    q, d = act or (None, None)
    args = (x, w, b, h, q, d, i32(n), f32(eps), i32(layer_norm))
    return Launch("norm_tokens", (n_tok,), (256,), args)


def quantize_tokens(x: Columns, n_tok: int, act: Act) -> Launch:
    args = (x.array, act.q, act.d, i32(x.n), i32(x.ld), i32(x.first))
    return Launch("quantize_tokens", (_up(x.n, 256), n_tok), (256,), args)


def rope_kv_tokens(q: Array, k: Array, v: Array, norms: tuple[Array | None, Array | None],
                   table: tuple[Array, Array] | None, caches: tuple[Array, Array], heads: Heads, n_tok: int, pos: int,
                   *, n_rot: int, interleaved: bool, eps: float) -> Launch:  # fmt: skip
    """q turned in place; k, turned, and v to the caches. table: cosines and sines [n_ctx, n_rot / 2]; None: no rope."""
    n_head, n_head_kv, head_dim, n_ctx = heads
    args = (q, k, v, *norms, *(table or (None, None)), *caches, i32(pos), i32(n_head), i32(n_head_kv), i32(head_dim),
            i32(n_rot if table else 0), i32(interleaved), i32(n_ctx), f32(eps))  # fmt: skip
    return Launch("rope_kv_tokens", (_up(n_head + n_head_kv, 4), n_tok), (128,), args)


def attention_block(q: Array, caches: tuple[Array, Array], out: Array, heads: Heads, n_tok: int, pos: int, *,
                    window: int, scale: float) -> Launch:  # fmt: skip
    """out = softmax(scale * q k^T) v over each token's past, the last `window` positions of it if that is not 0."""
    size, rows = next((size, rows) for size, rows in ((64, 32), (128, 32), (256, 16)) if heads.head_dim <= size)
    grid = (_up(n_tok * (heads.n_head // heads.n_head_kv), rows), heads.n_head_kv)
    args = (q, *caches, out, i32(n_tok), i32(pos), *map(i32, heads), i32(window), f32(scale))
    return Launch(f"attention_block_{size}", grid, (128,), args)


def activate_tokens(g: Columns, u: Columns | None, n_tok: int, *, act: int, threshold: float) -> Launch:
    """g = act(g) * u in place. act: a code of kernels/vector.py's ACTIVATION_CODES."""
    array, ld, first = (u.array, u.ld, u.first) if u is not None else (None, 0, 0)
    args = (g.array, array, i32(g.n), i32(g.ld), i32(g.first), i32(ld), i32(first), i32(act), f32(threshold))
    return Launch("activate_tokens", (_up(g.n, 256), n_tok), (256,), args)
