"""Rows of formats with 256 weights per block (Q4_K, Q5_K, Q6_K): dot products, sums of rows, single parts.

In: addresses of rows and activations. Out: dot4_*, axpy4_*, part_* as intrinsics. Next: rows.py.

A block's sixteen scales (or eight scales and eight minimums) are decoded once, as one vector, and multiplied by the
scales of its eight act blocks; 64 columns at a time then take their scales from there. The values of the act blocks are
gathered once for four rows. Generated as LLVM IR: a block of four rows unrolls to straight code.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from hotcold.runtime.kernels.formats import ACT_BYTES, ACT_D, ACT_DSUM, ACT_SUMS, SUPER_BLOCK
from hotcold.runtime.kernels.quants import (
    Q4_K_BLOCK,
    Q5_K_BLOCK,
    Q6_K_BLOCK,
    SuperBlock,
    Value,
    at,
    joined,
)
from hotcold.runtime.kernels.simd import (
    F32,
    I8,
    I16,
    I32,
    I64,
    VOID,
    WIDE,
    addr,
    call,
    const,
    dpbusd_value,
    emit,
    f32x16,
    fma_value,
    i8x32,
    i32x16,
    load,
    pointer,
    shuffle,
    splat_value,
    store,
)

_FOUR = types.UniTuple(types.float32, 4)
_S8 = ir.VectorType(I16, 8)
CHUNKS = SUPER_BLOCK // 64  # of 64 columns: one vector of bytes
ACTS = SUPER_BLOCK // 32 * ACT_BYTES  # bytes of act blocks that meet one block


def _prefetch(b: ir.IRBuilder, a: Value, size: int) -> None:
    for line in range(0, size, 64):
        call(b, "llvm.prefetch.p0", VOID, pointer(b, at(b, a, line), I8), I32(0), I32(2), I32(1))


def _total(b: ir.IRBuilder, v: Value) -> Value:
    """Sum of all lanes, as a fixed tree."""
    while v.type.count > 1:
        half = v.type.count // 2
        v = b.fadd(shuffle(b, v, v, range(half)), shuffle(b, v, v, range(half, 2 * half)))
    return b.extract_element(v, I32(0))


def _act_scales(b: ir.IRBuilder, f: SuperBlock, xb: Value) -> Value:
    """What the sixteen scales of a block are multiplied by: d of each act block, then d * sum; or d of each, twice."""
    v = ir.Constant(f32x16.ll, ir.Undefined)
    for j in range(8):
        v = b.insert_element(v, load(b, at(b, xb, ACT_BYTES * j + ACT_D), F32), I32(j))
    if not f.minimum:
        return shuffle(b, v, v, [i // 2 for i in range(16)])
    for j in range(8):
        v = b.insert_element(v, load(b, at(b, xb, ACT_BYTES * j + ACT_DSUM), F32), I32(8 + j))
    return v


def _act_values(b: ir.IRBuilder, f: SuperBlock, xb: Value, c: int) -> tuple[Value, Value]:
    """64 activations, and what their integer sums start at: minus the zero point times the sum of each four."""
    first, second = (at(b, xb, ACT_BYTES * (2 * c + i)) for i in range(2))
    q = joined(b, load(b, first, i8x32.ll), load(b, second, i8x32.ll))
    if f.minimum:
        return q, const(i32x16.ll, [0] * 16)
    sums = joined(b, load(b, at(b, first, ACT_SUMS), _S8), load(b, at(b, second, ACT_SUMS), _S8))
    return q, b.shl(b.sext(sums, i32x16.ll), const(i32x16.ll, [2] * 16))  # act blocks carry -8 times the sums


def _lanes_of_chunk(f: SuperBlock, c: int) -> list[int]:
    """Which of the sixteen scales belongs to each four columns of a chunk."""
    return [2 * c + i // 8 if f.minimum else 4 * c + i // 4 for i in range(16)]


def _cells(b: ir.IRBuilder) -> list:
    cells = [cgutils.alloca_once(b, f32x16.ll) for _ in range(4)]
    for cell in cells:
        b.store(const(f32x16.ll, [0.0] * 16), cell)
    return cells


def _dot4(f: SuperBlock) -> Any:
    @emit(_FOUR, *[addr] * 4, *[types.int64] * 4, types.int64, addr)
    def dot4(b, a0, a1, a2, a3, p0, p1, p2, p3, n, xb):
        rows, ahead = (a0, a1, a2, a3), (p0, p1, p2, p3)
        sums, minimums = _cells(b), _cells(b)
        with cgutils.for_range(b, b.lshr(n, I64(8))) as loop:
            act = b.add(xb, b.mul(loop.index, I64(ACTS)))
            start = b.mul(loop.index, I64(f.size))
            act_scales = _act_scales(b, f, act)
            chunks = [_act_values(b, f, act, c) for c in range(CHUNKS)]
            for row, p, cell, low in zip(rows, ahead, sums, minimums, strict=True):
                a = b.add(row, start)
                _prefetch(b, b.add(a, p), f.size)
                scales = b.fmul(f.scales(b, a), act_scales)
                if f.minimum:  # its upper lanes; the lower ones are added too and left out in the end
                    b.store(b.fadd(b.load(low), scales), low)
                total = b.load(cell)
                for c, (q, zero) in enumerate(chunks):
                    v = b.sitofp(dpbusd_value(b, zero, f.sixty_four(b, a, c), q, most=63), f32x16.ll)
                    total = fma_value(b, v, shuffle(b, scales, scales, _lanes_of_chunk(f, c)), total)
                b.store(total, cell)
        result = ir.Constant(ir.ArrayType(F32, 4), ir.Undefined)
        for i, (cell, low) in enumerate(zip(sums, minimums, strict=True)):
            y = _total(b, b.load(cell))
            if f.minimum:
                v = b.load(low)
                y = b.fadd(y, _total(b, shuffle(b, v, v, range(8, 16))))
            result = b.insert_value(result, y, i)
        return result

    return dot4


_AHEAD = 4  # blocks of a row whose scales are decoded before the first of them is used
_TABLE = const(f32x16.ll, range(16))


def _weights(b: ir.IRBuilder, f: SuperBlock, a: Value, scales: Value, i: int) -> Value:
    """Weights 16i..16i+15 of a block; its sixteen numbers are in memory at `scales`."""

    def number(lane: int) -> Value:
        return splat_value(b, load(b, at(b, scales, 4 * lane), F32), 16)

    if not f.minimum:
        v = f.sixteen(b, a, I64(16 * i))
        return b.fmul(b.sitofp(b.sub(v, const(v.type, [32] * 16)), f32x16.ll), number(i))
    d, m = number(i // 2), number(8 + i // 2)
    if WIDE and f.nibble:  # one look-up among the sixteen possible weights, by the low four bits
        return call(
            b, "llvm.x86.avx512.permvar.sf.512", f32x16.ll, fma_value(b, _TABLE, d, m), f.nibble(b, a, I64(16 * i))
        )
    return fma_value(b, b.sitofp(f.sixteen(b, a, I64(16 * i)), f32x16.ll), d, m)


def _axpy4(f: SuperBlock) -> Any:
    @emit(types.void, *[addr] * 4, *[types.int64] * 4, *[types.float32] * 4, types.int64, addr)
    def axpy4(b, a0, a1, a2, a3, p0, p1, p2, p3, c0, c1, c2, c3, n, acc):
        """Scales go through memory: a number loaded into all lanes costs nothing, one taken from a register does."""
        rows = list(zip((a0, a1, a2, a3), (p0, p1, p2, p3), (c0, c1, c2, c3), strict=True))
        cell = cgutils.alloca_once(b, ir.ArrayType(f32x16.ll, 4 * _AHEAD))
        buffer, blocks = b.ptrtoint(cell, I64), b.lshr(n, I64(8))
        with cgutils.for_range(b, b.lshr(b.add(blocks, I64(_AHEAD - 1)), I64(2))) as outer:
            first = b.mul(outer.index, I64(_AHEAD))
            left = b.sub(blocks, first)
            count = b.select(b.icmp_signed("<", left, I64(_AHEAD)), left, I64(_AHEAD))
            with cgutils.for_range(b, count) as loop:
                start, numbers = b.mul(b.add(first, loop.index), I64(f.size)), b.mul(loop.index, I64(4 * 64))
                for r, (row, p, _) in enumerate(rows):
                    a = b.add(row, start)
                    _prefetch(b, b.add(a, p), f.size)
                    store(b, at(b, b.add(buffer, numbers), 64 * r), f.scales(b, a))
            with cgutils.for_range(b, count) as loop:
                block, numbers = b.add(first, loop.index), b.mul(loop.index, I64(4 * 64))
                to, start = b.add(acc, b.mul(block, I64(4 * SUPER_BLOCK))), b.mul(block, I64(f.size))
                parts = [load(b, at(b, to, 64 * i), f32x16.ll) for i in range(16)]
                for r, (row, _, c) in enumerate(rows):
                    a, factor, scales = b.add(row, start), splat_value(b, c, 16), at(b, b.add(buffer, numbers), 64 * r)
                    parts = [fma_value(b, _weights(b, f, a, scales, i), factor, v) for i, v in enumerate(parts)]
                for i, v in enumerate(parts):
                    store(b, at(b, to, 64 * i), v)

    return axpy4


def _part(f: SuperBlock) -> Any:
    @emit(f32x16, addr, types.int64)
    def part(b, a, i):
        """Weights i..i+15 of the row at a, i a multiple of 16."""
        a = b.add(a, b.mul(b.lshr(i, I64(8)), I64(f.size)))
        i = b.and_(i, I64(SUPER_BLOCK - 1))
        scales, v = f.scales(b, a), f.sixteen(b, a, i)
        if f.minimum:
            j = b.trunc(b.lshr(i, I64(5)), I32)
            d, m = (b.extract_element(scales, lane) for lane in (j, b.add(j, I32(8))))
            return fma_value(b, b.sitofp(v, f32x16.ll), splat_value(b, d, 16), splat_value(b, m, 16))
        v = b.sitofp(b.sub(v, const(v.type, [32] * 16)), f32x16.ll)
        return b.fmul(v, splat_value(b, b.extract_element(scales, b.trunc(b.lshr(i, I64(4)), I32)), 16))

    return part


dot4_q4k, dot4_q5k, dot4_q6k = (_dot4(f) for f in (Q4_K_BLOCK, Q5_K_BLOCK, Q6_K_BLOCK))
axpy4_q4k, axpy4_q5k, axpy4_q6k = (_axpy4(f) for f in (Q4_K_BLOCK, Q5_K_BLOCK, Q6_K_BLOCK))
part_q4k, part_q5k, part_q6k = (_part(f) for f in (Q4_K_BLOCK, Q5_K_BLOCK, Q6_K_BLOCK))
