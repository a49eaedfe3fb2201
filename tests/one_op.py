"""Runs single operators of the compiled worker function, on plain arrays.

In: fields of an operator record (kernels/walk.py) as arrays and numbers. Out: what the operator wrote. Next:
test_kernels.py, guard_pages.py.

The function is the one the engine runs, already compiled and cached, so tests need no compiling of their own and are
indifferent to how kernels call each other.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from encode import encode as encode
from numba import typeof, types

from hotcold.runtime import plan, program, weights
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.kernels import formats, reference, walk
from hotcold.runtime.kernels.blocks import panel_bytes
from hotcold.runtime.kernels.cache import compile_cached

FLOATS = (formats.F32, formats.F16, formats.BF16)
NAMES = {t: gguf.GGMLQuantizationType(t).name for t in formats.NATIVE}
CANARY = np.float32(-12345.5)


def canaries(*shape: int) -> np.ndarray:
    """float32 memory in which every value not written shows."""
    return np.full(shape, CANARY, np.float32)


def padded(x: np.ndarray, to: int = 64) -> np.ndarray:
    """x [..., n] with its last axis padded to a multiple of `to` by NaN, as the engine pads its buffers."""
    wide = np.full((*x.shape[:-1], -(-x.shape[-1] // to) * to), np.nan, np.float32)
    wide[..., : x.shape[-1]] = x
    return wide


def address(array: np.ndarray | None) -> int:
    return 0 if array is None else array.ctypes.data


class Runner:
    """A team of threads for the programs of one test: run() returns when all operators are done."""

    def __init__(self, n_threads: int = 1, cols: int = 4096) -> None:
        record, i64 = typeof(np.zeros(1, walk.OP)), types.int64
        compile_cached([(walk.serve, (record, record, i64, i64, i64)), (walk.raise_go, (i64,))], lambda line: None)
        self.n_threads = n_threads
        self.control = np.zeros(walk.control_words(n_threads), np.int64)
        self.arena_size = (panel_bytes(cols) + 4095) // 4096 * 4096
        self.arena = np.zeros(self.arena_size * n_threads, np.uint8)

    def run(self, *records: np.ndarray, n_tok: int = 1, pos: int = 0, first_out: int = 0, **arguments: int) -> None:
        """arguments: other words of the control block, tokens=address for A_TOKENS and so on."""
        records_in_order = np.concatenate(records)
        records_in_order["sync"] = 1
        words = {"n_tok": n_tok, "pos": pos, "first_out": first_out, "arena": self.arena.ctypes.data,
                 "arena_size": self.arena_size, "end_op": len(records_in_order)} | arguments  # fmt: skip
        for name, value in words.items():
            self.control[getattr(walk, f"A_{name.upper()}")] = value
        walk.raise_go(self.control.ctypes.data)
        others = [threading.Thread(target=self._work, args=(records_in_order, t)) for t in range(1, self.n_threads)]
        for thread in others:
            thread.start()
        self._work(records_in_order, 0)
        for thread in others:
            thread.join()

    def _work(self, records: np.ndarray, t: int) -> None:
        """Thread 0 returns after its run; the others when they find no further one."""
        while walk.serve(records, records, t, self.n_threads, self.control.ctypes.data) != (1 if t == 0 else 0):
            pass
        self.control[walk.OWN + 8 * t + walk.OWN_PARKED] = 0


def record(op: int, **fields: Any) -> np.ndarray:
    """One operator, array [1] of walk.OP; arrays become addresses. They must outlive the run."""
    out = np.zeros(1, walk.OP)
    out["op"], out["scale"] = op, 1
    for name, value in fields.items():
        out[name] = address(value) if isinstance(value, np.ndarray) else value
    return out


def matmul(
    runner: Runner,
    ggml_type: int,
    raw: np.ndarray,
    x: np.ndarray,
    *,
    bias: np.ndarray | None = None,
    scale: float = 1.0,
    old: np.ndarray | None = None,
    weights_at: int | None = None,
) -> np.ndarray:
    """The MATMUL operator: x float32 [n_tok, cols] -> the whole output buffer [n_tok + 2, >= rows], canaries around.

    Row 0 and the last row, and columns past `rows`, are not the operator's. old [n_tok, rows]: what it adds to.
    weights_at: address of the rows if they are not in `raw`.
    """
    n_tok, cols = x.shape
    rows, stride = raw.shape
    out = canaries(n_tok + 2, rows + 3)
    if old is not None:
        out[1:-1, :rows] = old
    wide = padded(x)
    # Rows of block formats never see the floats: NaN there would show.
    floats = wide if ggml_type in FLOATS else np.full_like(wide, np.nan)
    blocks = reference.act_blocks(x) if ggml_type not in FLOATS else np.zeros((n_tok, 64), np.uint8)
    op = record(
        walk.MATMUL, qt=ggml_type, w=address(raw) if weights_at is None else weights_at, stride=stride, rows=rows,
        cols=cols, src=floats, ld_src=floats.strides[0], srcb=blocks, ld_srcb=blocks.strides[0], dst=out[1:],
        ld_dst=out.strides[0], bias=address(bias), scale=scale, add=old is not None,
    )  # fmt: skip
    runner.run(op, n_tok=n_tok)
    return out


def config(**fields: Any) -> ModelConfig:
    """A configuration of one layer in which only what a test needs is said."""
    small: dict[str, Any] = dict(
        arch="llama", name="", layout="neuron-split", n_layer=1, n_embd=8, n_head=1, n_head_kv=1, head_dim=8,
        n_vocab=8, n_ctx_train=8, n_ff=(8,), norm="rms", norm_eps=1e-6, activation="relu", gated=False,
        thresholds=(0.0,), rope=None, window=(0,), norm_relu=(False,),
    )  # fmt: skip
    return ModelConfig(**(small | fields))


def memory(at: int, rows: int, row_bytes: int, dtype: type = np.float32) -> np.ndarray:
    """The memory at an address as an array [rows, row_bytes / itemsize]. Its owner must outlive it."""
    raw = (ctypes.c_uint8 * (rows * row_bytes)).from_address(at)
    return np.ctypeslib.as_array(raw).view(dtype).reshape(rows, -1)


KV_NAMES = {np.dtype(np.float16): "f16", np.dtype(np.float32): "f32", np.dtype(np.uint8): "q8_0"}


def attention(
    q: np.ndarray, caches: np.ndarray, *, pos: int, window: int, scale: float, n_threads: int, many_tokens: bool,
    caches_at: tuple[int, int] | None = None, runner: Runner | None = None,
) -> np.ndarray:  # fmt: skip
    """The ATTEND operator as the engine lowers it: q [n_tok, heads, head_dim], caches [2, kv heads, n_ctx, head_dim].

    caches of uint8: rows of Q8_0 in the place of head_dim. caches_at: where K and V lie, if not where the engine puts
    them. runner: in the place of one of n_threads. Returns the output buffer [n_tok + 1, >= heads * head_dim] with
    canaries around what is the operator's.
    """
    n_tok, heads, head_dim = q.shape
    _, kv_heads, n_ctx, _ = caches.shape
    c = config(n_head=heads, n_head_kv=kv_heads, head_dim=head_dim, window=(window,))
    buffers = program.Buffers(c, n_threads, n_ctx, n_tok + 1, KV_NAMES[caches.dtype])
    ops = (plan.Op("attend", 0, ("q", "cache0"), ("att",), scale=scale),)
    lowered = program.Lowering(plan.Plan(c, "dense", ops, ops), buffers, many_tokens).program(ops)
    source, to = buffers.shared["q"], buffers.shared["att"]
    memory(source.addr, n_tok, source.ld)[:, : heads * head_dim] = q.reshape(n_tok, -1)
    for at, cache in zip(buffers.cache[0], caches, strict=True):
        ctypes.memmove(at, np.ascontiguousarray(cache).ctypes.data, cache.nbytes)
    if caches_at:
        lowered["w3"], lowered["aux"] = caches_at
    out = memory(to.addr, n_tok + 1, to.ld)
    out[:] = CANARY
    runner = runner or Runner(n_threads)
    runner.run(lowered, n_tok=n_tok, pos=pos, arena=buffers.arena, arena_size=buffers.arena_size)
    return out.copy()


@dataclass
class FFN:
    """The matrices of one feed-forward network in the neuron-split layout, raw rows of n_embd columns.

    value: down columns; with a gate, rows 2i and 2i+1 are up row and down column of neuron i. Biases may be None.
    """

    activation: str
    threshold: float
    gated: bool
    key_type: int
    key: np.ndarray
    value_type: int
    value: np.ndarray
    n_embd: int
    key_bias: np.ndarray | None = None
    up_bias: np.ndarray | None = None
    down_bias: np.ndarray | None = None
    scale: float = 1.0

    @property
    def n_ff(self) -> int:
        return len(self.key)

    def _matrix(self, name: str, ggml_type: int, raw: np.ndarray | None) -> weights.Matrix | None:
        if raw is None:
            return None
        rows = raw.reshape(1, -1) if raw.ndim == 1 else raw
        cols = raw.size if raw.ndim == 1 else self.n_embd
        return weights.Matrix(name, raw, ggml_type, len(rows), cols, rows.strides[0], address(raw))

    def config(self) -> ModelConfig:
        return config(n_embd=self.n_embd, n_ff=(self.n_ff,), activation=self.activation, gated=self.gated,
                      thresholds=(self.threshold,))  # fmt: skip

    def operators(self) -> tuple[plan.Op, ...]:
        """Norm with weights of 1, FFN, reduction: x += scale * (FFN(norm(x)) + bias)."""
        ones = self._matrix("norm", formats.F32, np.ones(self.n_embd, np.float32))
        biases = [self._matrix("bias", formats.F32, b) for b in (self.key_bias, self.up_bias, self.down_bias)]
        key = self._matrix("key", self.key_type, self.key)
        value = self._matrix("value", self.value_type, self.value)
        return (
            plan.Op("norm", 0, ("x",), ("h",), (ones,)),
            plan.Op("ffn", 0, ("h",), ("acc",), (key, value), biases[0], biases[1]),
            plan.Op("reduce", 0, ("acc", "x"), ("x",), (), biases[2], scale=self.scale),
        )

    def run(
        self, x: np.ndarray, sparsity: str, n_threads: int, runner: Runner | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """One token through the engine's operators: x float32 [n_embd] -> (x after, neurons computed per thread)."""
        ops = self.operators()
        buffers = program.Buffers(self.config(), n_threads, 8, 8, "f32")
        lowered = program.Lowering(plan.Plan(self.config(), sparsity, ops, ops), buffers, False).program(ops)
        at = buffers.shared["x"].addr
        ctypes.memmove(at, x.ctypes.data, x.nbytes)
        counts = np.zeros((n_threads, 2), np.int64)
        runner = runner or Runner(n_threads)
        runner.run(lowered, arena=buffers.arena, arena_size=buffers.arena_size, counts=address(counts))
        after = np.empty_like(x)
        ctypes.memmove(after.ctypes.data, at, x.nbytes)
        return after, counts[:, walk.COMPUTED]

    def reference(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """float64: (x after, neuron values [n_ff])."""
        h = reference.rms_norm(x, np.ones(self.n_embd), 1e-6).astype(np.float32)
        keys = reference.matmul(self.key_type, self.key, h, self.key_bias)
        up, down = None, self.value
        if self.gated:
            up, down = reference.matmul(self.value_type, self.value[::2], h, self.up_bias), self.value[1::2]
        values = reference.neuron_values(self.activation, keys, up, self.threshold)
        y = reference.down(self.value_type, down, values, self.n_embd, self.down_bias, self.scale)
        return x + y, values


def inside(out: np.ndarray, rows: int) -> np.ndarray:
    """The operator's part of a buffer with canaries around, after checking them."""
    canary = CANARY.view(np.uint32)
    bits = out.view(np.uint32)
    assert (bits[0] == canary).all() and (bits[-1] == canary).all() and (bits[1:-1, rows:] == canary).all()
    return out[1:-1, :rows]


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equality of float32 arrays bit for bit, so that -0 is not 0 and NaN is NaN."""
    return a.shape == b.shape and bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


def close(got: np.ndarray, want: np.ndarray, size: np.ndarray | float, tolerance: float) -> bool:
    """|got - want| <= tolerance * size, the size of what was added up."""
    return bool((np.abs(got - want) <= tolerance * size + 1e-30).all())


MINIMUM = (formats.Q4_1, formats.Q5_1, formats.Q4_K, formats.Q5_K)


def magnitude(ggml_type: int, raw: np.ndarray, x: np.ndarray) -> np.ndarray:
    """What the rounding of a product is relative to: [n_tok, rows]."""
    weights = np.abs(reference.decode(ggml_type, raw, x.shape[1]))
    if ggml_type in (*MINIMUM, formats.Q4_0):  # a weight is the sum of two numbers, which may be larger than it
        largest = weights.reshape(len(raw), -1, formats.BLOCK).max(axis=-1)
        weights = 3 * np.repeat(largest, formats.BLOCK, axis=1)
    size: np.ndarray = np.abs(reference.seen(ggml_type, x)) @ weights.T
    return size


def random_rows(rng: np.random.Generator, rows: int, cols: int) -> np.ndarray:
    """float32 [rows, cols] whose rows differ in size."""
    sizes = np.exp(rng.normal(0, 1, (rows, 1)))
    values: np.ndarray = (rng.standard_normal((rows, cols)) * sizes).astype(np.float32)
    return values


def block_length(ggml_type: int) -> int:
    """Columns per block of a format."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(ggml_type)][0]


def cases(
    lengths: Sequence[int], block_lengths: Sequence[int], super_lengths: Sequence[int] = (256, 768)
) -> list[tuple[int, int]]:
    """(type, columns) for every format with lengths it allows: of float formats, of blocks of 32, of 256."""
    by_block = {1: lengths, formats.BLOCK: block_lengths, formats.SUPER_BLOCK: super_lengths}
    return [(t, n) for t in formats.NATIVE for n in by_block[block_length(t)]]
