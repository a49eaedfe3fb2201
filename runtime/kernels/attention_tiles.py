"""Register tiles of attention over the KV cache, generated as LLVM IR: up to HEADS query heads share a load.

In: addresses of cache rows (F32, F16, Q8_0), of queries, of weights. Out: score tiles, value tiles, and the store of a
row in F16. Next: attention.py.

A score is one accumulator of 16 lanes over the row, then a fixed tree over the lanes; a value is one accumulator per
column over the positions in order. So a head has the same bits whichever heads it is computed beside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from hotcold.runtime.kernels.formats import Q8_0_BYTES
from hotcold.runtime.kernels.isa import CHOSEN
from hotcold.runtime.kernels.simd import (
    F32,
    I8,
    I32,
    I64,
    VOID,
    addr,
    call,
    emit,
    f32x16,
    fma_value,
    i32x16,
    load,
    pointer,
    shuffle,
    splat_value,
    store,
)

# As many accumulators as the registers hold: HEADS * POSITIONS of scores, HEADS * WIDTH of values.
HEADS, POSITIONS, WIDTH = (4, 4, 4) if CHOSEN.wide else (2, 2, 2)
_H16, _B16 = ir.VectorType(ir.HalfType(), 16), ir.VectorType(I8, 16)


@dataclass(frozen=True)
class Kind:
    """How a cache row is read: a step is `n_bytes` of it and gives `vectors` vectors of 16 values."""

    vectors: int
    n_bytes: int
    load: Callable[[ir.IRBuilder, Any], list]


def _load_q8(b: ir.IRBuilder, a: Any) -> list:
    d = splat_value(b, b.fpext(load(b, a, ir.HalfType()), F32), 16)
    halves = [b.sext(load(b, b.add(a, I64(2 + 16 * i)), _B16), i32x16.ll) for i in range(2)]
    return [b.fmul(b.sitofp(half, f32x16.ll), d) for half in halves]  # exact: 11 bits times 8


ROW_F32 = Kind(1, 64, lambda b, a: [load(b, a, f32x16.ll)])
ROW_F16 = Kind(1, 32, lambda b, a: [b.fpext(load(b, a, _H16), f32x16.ll)])
ROW_Q8 = Kind(2, Q8_0_BYTES, _load_q8)


@emit(types.void, addr, f32x16)
def store_wh(b, a, v):
    store(b, a, b.fptrunc(v, _H16))


@emit(types.float32, f32x16)
def first_lane(b, v):
    return b.extract_element(v, I32(0))


@emit(types.float32, f32x16)
def largest(b, v):  # which of several NaNs or zeros is not said
    while v.type.count > 1:
        half = v.type.count // 2
        x, y = shuffle(b, v, v, range(half)), shuffle(b, v, v, range(half, 2 * half))
        v = b.select(b.fcmp_ordered("<", x, y), y, x)
    return b.extract_element(v, I32(0))


def _folded(b: ir.IRBuilder, v: Any, lanes: int) -> Any:
    """Halves added until `lanes` are left: the tree of simd.hsum_w."""
    while v.type.count > lanes:
        half = v.type.count // 2
        v = b.fadd(shuffle(b, v, v, range(half)), shuffle(b, v, v, range(half, 2 * half)))
    return v


def _sums(b: ir.IRBuilder, vectors: list) -> Any:
    """Sums over the lanes of POSITIONS vectors, as one vector."""
    quarters = [_folded(b, v, 4) for v in vectors]
    pairs = [
        b.fadd(shuffle(b, x, y, [0, 1, 4, 5]), shuffle(b, x, y, [2, 3, 6, 7]))
        for x, y in zip(quarters[::2], quarters[1::2], strict=True)
    ]
    x, y = pairs[0], pairs[-1]
    even, odd = [0, 2, 4, 6][:POSITIONS], [1, 3, 5, 7][:POSITIONS]
    return b.fadd(shuffle(b, x, y, even), shuffle(b, x, y, odd))


def score_tile(kind: Kind, heads: int) -> Any:
    """tile(k, row, last, steps, q, ld_q, out, ld_out): out[h][p] = q[h] . (row min(p, last) of k), p < POSITIONS.

    Only the first steps * kind.vectors * 16 columns. row, ld_*: bytes.
    """

    @emit(types.void, addr, types.int64, types.int64, types.int64, addr, types.int64, addr, types.int64)
    def tile(b, k, row, last, steps, q, ld_q, out, ld_out):
        rows = []
        for p in range(POSITIONS):
            rows.append(b.add(k, b.mul(row, b.select(b.icmp_signed("<", I64(p), last), I64(p), last))))
        queries = [b.add(q, b.mul(ld_q, I64(h))) for h in range(heads)]
        cells = [[_cell(b, ir.Constant(f32x16.ll, None)) for _ in rows] for _ in queries]
        with cgutils.for_range(b, steps) as loop:
            at, column = b.mul(loop.index, I64(kind.n_bytes)), b.mul(loop.index, I64(64 * kind.vectors))
            keys = [kind.load(b, b.add(r, at)) for r in rows]
            for query, of_head in zip(queries, cells, strict=True):
                for i in range(kind.vectors):
                    x = load(b, b.add(query, b.add(column, I64(64 * i))), f32x16.ll)
                    for key, cell in zip(keys, of_head, strict=True):
                        b.store(fma_value(b, key[i], x, b.load(cell)), cell)
        for h, of_head in enumerate(cells):
            store(b, b.add(out, b.mul(ld_out, I64(h))), _sums(b, [b.load(cell) for cell in of_head]))

    return tile


def value_tile(kind: Kind, heads: int, width: int) -> Any:
    """tile(v, row, n, w, ld_w, out, ld_out, ahead): out[h][0:16 * width] += sum over p < n of w[h][p] * (row p of v).

    width: a multiple of kind.vectors. row, ld_*: bytes. ahead: bytes from a row to what is prefetched meanwhile.
    """
    steps = width // kind.vectors

    @emit(types.void, addr, types.int64, types.int64, addr, types.int64, addr, types.int64, types.int64)
    def tile(b, v, row, n, w, ld_w, out, ld_out, ahead):
        weights = [b.add(w, b.mul(ld_w, I64(h))) for h in range(heads)]
        places = [[b.add(b.add(out, b.mul(ld_out, I64(h))), I64(64 * i)) for i in range(width)] for h in range(heads)]
        cells = [[_cell(b, load(b, place, f32x16.ll)) for place in of_head] for of_head in places]
        with cgutils.for_range(b, n) as loop:
            a = b.add(v, b.mul(loop.index, row))
            values = [x for s in range(steps) for x in kind.load(b, b.add(a, I64(s * kind.n_bytes)))]
            for line in range(0, max(1, steps * kind.n_bytes // 64)):
                there = pointer(b, b.add(b.add(a, ahead), I64(64 * line)), I8)
                call(b, "llvm.prefetch.p0", VOID, there, I32(0), I32(2), I32(1))
            for weight, of_head in zip(weights, cells, strict=True):
                x = splat_value(b, load(b, b.add(weight, b.mul(loop.index, I64(4))), F32), 16)
                for value, cell in zip(values, of_head, strict=True):
                    b.store(fma_value(b, value, x, b.load(cell)), cell)
        for of_head, there in zip(cells, places, strict=True):
            for cell, place in zip(of_head, there, strict=True):
                store(b, place, b.load(cell))

    return tile


def _cell(b: ir.IRBuilder, start: Any) -> Any:
    """A variable that LLVM keeps in a register."""
    cell = cgutils.alloca_once(b, f32x16.ll)
    b.store(start, cell)
    return cell
