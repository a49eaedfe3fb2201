"""What lies in the GPU's memory, to the byte: every array has its place before anything is allocated.

In: a Plan, the context's size. Out: Layout of weights and Layout of state, Vram (bytes by kind). Next: weights.py and
state.py allocate by these, placement/ plans by them, so that what is planned is what is taken.

All weights are one allocation and all state is one: the driver gives memory by pages of 2 MiB, and an allocator that
rounds every array up would make the sum a guess.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotcold.runtime import schema
from hotcold.runtime.gpu import launch
from hotcold.runtime.gpu.device import Array, Device
from hotcold.runtime.gpu.placement import TYPES
from hotcold.runtime.kernels import formats
from hotcold.runtime.plan import Op, Plan
from hotcold.runtime.weights import Matrix

ALIGNMENT = 256  # of every array: what one memory access of a warp takes
PAGE = 2 << 20  # what the driver allocates by
STAGE = 8 << 20  # at most, of each of the two buffers that rows of a file come through
CTL_WORDS = 16  # of the control block, see cuda/common.cuh
COUNTERS = 2  # of a layer: neurons listed for the GPU, for the CPU
KINDS = ("attention", "keys", "values", "predictors", "output", "kv", "rope", "activations", "prompt", "staging")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """One array."""

    name: str
    kind: str  # one of KINDS
    shape: Shape
    dtype: np.dtype[Any]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Layout:
    """Arrays one after the other in one piece of memory."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self.blocks: dict[str, Block] = {}
        self.offsets: dict[str, int] = {}
        end = 0
        for block in blocks:
            self.blocks[block.name], self.offsets[block.name] = block, end
            end += _up(block.n_bytes, ALIGNMENT)
        self.n_bytes = _up(end, PAGE)

    def by_kind(self) -> dict[str, int]:
        """Bytes of each kind; what rounding to pages adds is none's."""
        out: dict[str, int] = {}
        for block in self.blocks.values():
            out[block.kind] = out.get(block.kind, 0) + _up(block.n_bytes, ALIGNMENT)
        return out


class Arena:
    """A layout's memory on a device."""

    def __init__(self, device: Device, layout: Layout) -> None:
        """Raises DeviceMemoryError where there is no room."""
        self.layout = layout
        self._memory = device.empty((layout.n_bytes,), np.uint8) if layout.n_bytes else None

    def __getitem__(self, name: str) -> Array:
        block, first = self.layout.blocks[name], self.layout.offsets[name]
        assert self._memory is not None
        return self._memory[first : first + block.n_bytes].view(block.dtype).reshape(*block.shape)

    def get(self, name: str) -> Array | None:
        return self[name] if name in self.layout.blocks else None


@dataclass(frozen=True)
class Vram:
    """Bytes of the GPU's memory that a plan takes."""

    weights: int
    state: int
    context: int  # driver, kernels: measured, or what the hardware's figures say
    by_kind: dict[str, int]

    @property
    def total(self) -> int:
        return self.weights + self.state + self.context


def vram(plan: Plan, n_ctx: int, n_batch: int, context: int) -> Vram:
    """What an engine of this plan allocates. n_batch: tokens of a prompt's block; 0: no blocks."""
    layouts = Layout(weight_blocks(plan)), Layout(state_blocks(plan, n_ctx, n_batch))
    kinds = dict.fromkeys(KINDS, 0)
    for layout in layouts:
        for kind, n_bytes in layout.by_kind().items():
            kinds[kind] += n_bytes
    return Vram(layouts[0].n_bytes, layouts[1].n_bytes, context, kinds)


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _block(name: str, kind: str, dtype: Any, *shape: int) -> Block:
    return Block(name, kind, shape, np.dtype(dtype))


# ------------------------------------------------------------------ weights


@dataclass(frozen=True)
class Rows:
    """The first rows of a matrix, or the first values of a vector, as the GPU needs them."""

    matrix: Matrix
    rows: int  # of a vector: values

    @property
    def is_vector(self) -> bool:
        return self.matrix.rows == 1 and self.matrix.ggml_type == formats.F32


def uploads(plan: Plan) -> list[Rows]:
    """Every matrix and vector that operators of one token read on the GPU, with as many rows as the GPU has."""
    found: dict[str, Rows] = {}
    for op in plan.gpu(many=False):
        for matrix, rows in _needed(op):
            before = found.get(matrix.name)
            if rows and (before is None or before.rows < rows):
                found[matrix.name] = Rows(matrix, rows)
    for op in plan.gpu(many=True):  # of all neurons, whoever computes them for single tokens
        found |= {bias.name: Rows(bias, bias.cols) for bias in (op.bias, op.bias2) if bias is not None}
    return list(found.values())


def _needed(op: Op) -> Iterator[tuple[Matrix, int]]:
    for matrix in op.weights:
        if matrix is None or op.kind == "quant":
            continue
        rows = matrix.cols if matrix.rows == 1 and matrix.ggml_type == formats.F32 else matrix.rows
        if op.neurons is not None:
            per_neuron = 2 if matrix.name.endswith(schema.FFN_UP_DOWN) else 1
            rows = per_neuron * op.neurons[1]
        yield matrix, rows
    for bias in (op.bias, op.bias2):
        if bias is not None:
            yield bias, bias.cols if op.neurons is None or op.kind in ("split", "merge") else op.neurons[1]


def kind_of(name: str) -> str:
    """Of a weight."""
    part = name.split(".", 2)[2] if name.startswith("blk.") else ""
    if not part:
        return "output"
    if part in schema.PRED_TENSORS:
        return "predictors"
    if part in (schema.FFN_UP_DOWN, schema.FFN_DOWN_T, schema.FFN_DOWN):
        return "values"
    return "keys" if part in (schema.FFN_GATE, schema.FFN_UP, schema.FFN_GATE_BIAS, schema.FFN_UP_BIAS) else "attention"


def weight_blocks(plan: Plan) -> Iterator[Block]:
    for rows in uploads(plan):
        for suffix, dtype, shape in parts(rows):
            yield _block(rows.matrix.name + suffix, kind_of(rows.matrix.name), dtype, *shape)


def parts(rows: Rows) -> list[tuple[str, Any, Shape]]:
    """The arrays a matrix becomes: (suffix of its name, dtype, shape). Weights q and scales d lie apart, so that both
    start at addresses that the GPU reads fast."""
    m, n = rows.matrix, rows.rows
    if rows.is_vector:
        return [("", np.float32, (n,))]
    if m.name.endswith(schema.FFN_PRED_SIGN):
        return [("", np.int32, (n, m.cols))]
    kind = TYPES[m.ggml_type]
    if kind == "f16":
        return [(".q", np.float16, (n, m.cols))]
    q = (np.int8, (n, m.cols)) if kind == "q8_0" else (np.uint8, (n, m.cols // 2))
    return [(".q", *q), (".d", np.float16, (n, m.cols // formats.BLOCK))]


# ------------------------------------------------------------------ state


def state_blocks(plan: Plan, n_ctx: int, n_batch: int) -> Iterator[Block]:
    """KV cache, rotary tables, and what the operators hand to each other."""
    c, placement = plan.config, plan.placement
    assert placement is not None
    q, kv, n_ff = c.n_head * c.head_dim, c.n_head_kv * c.head_dim, max(c.n_ff[placement.first :])
    rank = max((p.rank for p in c.predictors), default=0)
    for layer in range(placement.first, c.n_layer):
        for name in ("k", "v"):
            yield _block(f"cache{layer}.{name}", "kv", np.float16, c.n_head_kv, n_ctx, c.head_dim)
    half = c.rope.n_dims // 2 if c.rope else 1
    for name in ("cos", "sin"):
        yield _block(name, "rope", np.float32, n_ctx if c.rope else 1, half)

    def acts(name: str, n: int) -> Iterator[Block]:
        """Values and their act blocks."""
        yield _block(name, "activations", np.float32, n)
        yield from quantized(name, n)

    def quantized(name: str, n: int) -> Iterator[Block]:
        padded = _up(n, formats.BLOCK)
        yield _block(f"{name}.q", "activations", np.int8, padded)
        yield _block(f"{name}.d", "activations", np.float32, padded // formats.BLOCK)

    for name in ("gpu.h", "gpu.f0", "gpu.f1"):
        yield from acts(name, c.n_embd)
    widths = {"gpu.x": c.n_embd, "gpu.q": q, "gpu.k": kv, "gpu.v": kv, "gpu.att": q, "gpu.g": n_ff, "logits": c.n_vocab,
              "gpu.values": n_ff} | ({"gpu.u": n_ff} if c.layout == "stock" else {})  # fmt: skip
    if rank and plan.sparsity == "predict":
        for name in ("gpu.hidden0", "gpu.hidden1"):
            yield from acts(name, rank)
    if plan.sparsity == "predict":
        widths |= {"gpu.scores0": n_ff, "gpu.scores1": n_ff}
    for name, width in widths.items():
        yield _block(name, "activations", np.float32, width)
    yield from quantized("gpu.act", max(q, n_ff))
    for name, n in (("gpu.ids", n_ff), ("gpu.count", 1), ("gpu.cpu_count", 1), ("ctl", CTL_WORDS)):
        yield _block(name, "activations", np.int32, n)
    steps = max(len(plan.gpu(many)) for many in (False, True))
    yield _block("stamps", "activations", np.int64, 2, steps)  # when operators began and ended
    yield _block("counters", "activations", np.int64, c.n_layer, COUNTERS)
    # As many pieces as on the widest card, so that a plan's size does not depend on which one it is.
    splits = min(launch.MAX_SPLITS, _up(n_ctx, 32) // 32)
    yield _block("gpu.part", "activations", np.float32, launch.MAX_SLICES, c.n_embd)
    yield _block("gpu.attend", "activations", np.float32, c.n_head, splits, c.head_dim + 2)
    yield _block("stage", "staging", np.uint8, 2, stage_bytes(plan))
    if n_batch:
        yield from prompt_blocks(plan, n_batch)


def stage_bytes(plan: Plan) -> int:
    """Of one of the two buffers: no more than the largest thing that comes through it."""
    gpu = [*plan.gpu(many=False), *plan.gpu(many=True)]
    layers = [sum(m.n_bytes for m in op.weights if m is not None) for op in gpu if op.kind == "ffn"]
    matrices = [m.n_bytes for op in gpu for m in op.weights if m is not None]
    return min(STAGE, _up(max(layers + matrices), ALIGNMENT) + 8 * ALIGNMENT)


# ------------------------------------------------------------------ prompts

HALVES = 8 << 20  # weights that are halves at a time, for the library's product
HALF_ROWS = 4096  # rows of them at most
LOGIT_ROWS = 16  # tokens of a block whose logits are computed at a time


def prompt_blocks(plan: Plan, n: int) -> Iterator[Block]:
    """Buffers of a block of n tokens, and of the cold neurons that are on the GPU for its sake."""
    c, placement = plan.config, plan.placement
    assert placement is not None
    q, kv, n_ff = c.n_head * c.head_dim, c.n_head_kv * c.head_dim, max(c.n_ff[placement.first :])
    widths = {"x": c.n_embd, "h": c.n_embd, "q": q, "k": kv, "v": kv, "att": q, "g": n_ff} | (
        {"u": n_ff} if c.gated else {})  # fmt: skip
    for name, width in widths.items():
        yield _block(f"block.{name}", "prompt", np.float32, n, width)
    for name, width in (("h", c.n_embd), ("act", max(q, n_ff))):
        padded = _up(width, formats.BLOCK)
        yield _block(f"block.{name}.q", "prompt", np.int8, n * padded)
        yield _block(f"block.{name}.d", "prompt", np.float32, n * padded // formats.BLOCK)
    yield _block("block.halves", "prompt", np.float16, n * _up(max(c.n_embd, q, n_ff), 8))
    yield _block("block.scales", "prompt", np.float32, n)
    used = [m for op in plan.gpu(many=True) for m in op.weights if m is not None]
    most = max(_up(m.rows, 8) * _up(m.cols, 8) for m in used)
    yield _block("block.weights", "prompt", np.float16, min(HALVES, most))
    yield _block("block.sums", "prompt", np.float32, n * max(min(HALF_ROWS, max(m.rows for m in used)), c.n_embd))
    yield _block("block.logits", "prompt", np.float32, LOGIT_ROWS, c.n_vocab)
    rows = [Rows(m, m.rows) for op in plan.gpu(many=True) if op.kind == "ffn" for m in op.weights
            if m is not None and placement.layers[op.layer].hot < c.n_ff[op.layer]]  # fmt: skip
    for suffix, size in _unpacked(rows, stage_bytes(plan)).items():
        yield _block(f"cold{suffix}", "prompt", np.uint8, size)


def _unpacked(cold: list[Rows], stage: int) -> dict[str, int]:
    """Bytes of the weights, and of the scales, of as many rows of any of these matrices as the staging holds."""
    sizes: dict[str, int] = {}
    for rows in cold:
        for number, (_, dtype, shape) in enumerate(parts(rows)):
            row = np.dtype(dtype).itemsize * shape[1]
            most = stage // rows.matrix.stride * row
            for side in ("key", "value"):
                name = f".{side}.{'qd'[number]}"
                sizes[name] = max(sizes.get(name, 0), most)
    return sizes
