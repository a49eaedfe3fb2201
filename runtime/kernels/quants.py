"""How the bytes of block formats become numbers, as LLVM IR: every format beyond Q8_0 and Q4_0.

In: IR values: the address of a block. Out: vectors of unsigned values, scales and minimums; the intrinsics of single
blocks. Next: superblocks.py (dot products), rows.py (dispatch), tiles.py (panels).

A weight is scale * value + minimum (value unsigned), or scale * (value - zero point). Formats of 32 weights (Q4_1,
Q5_0, Q5_1) have one scale per block; formats of 256 (Q4_K, Q5_K, Q6_K) one per 32 or 16 weights, itself in few bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import types

from hotcold.runtime.kernels.formats import Q4_1_BYTES, Q4_K_BYTES, Q5_0_BYTES, Q5_1_BYTES, Q5_K_BYTES, Q6_K_BYTES
from hotcold.runtime.kernels.simd import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    addr,
    const,
    dpbusd_value,
    emit,
    f32x8,
    f32x16,
    fma_value,
    i8x32,
    i8x64,
    i32x8,
    i32x16,
    load,
    shuffle,
    splat_value,
)

Value = Any  # an IR value

_B4, _B16, _D4 = ir.VectorType(I8, 4), ir.VectorType(I8, 16), ir.VectorType(I32, 4)
_H4, _H8 = ir.VectorType(F16, 4), ir.VectorType(F16, 8)
_S16, _S32 = ir.VectorType(I16, 16), ir.VectorType(I16, 32)


# ------------------------------------------------------------------ IR helpers


def at(b: ir.IRBuilder, base: Value, offset: int) -> Value:
    return b.add(base, I64(offset))


def masked(b: ir.IRBuilder, v: Value, mask: int) -> Value:
    return b.and_(v, const(v.type, [mask] * v.type.count))


def words_shifted(b: ir.IRBuilder, v: Value, right: list[int]) -> Value:
    """Bytes v, as 16-bit words, shifted right by right[i] bits (left where negative). The caller masks the bytes."""
    words = b.bitcast(v, ir.VectorType(I16, v.type.count // 2))
    if min(right) < 0 < max(right):
        raise ValueError("one vector is shifted one way")
    shift = b.shl if min(right) < 0 else b.lshr
    return b.bitcast(shift(words, const(words.type, [abs(n) for n in right])), v.type)


def _shifted_by(b: ir.IRBuilder, v: Value, n: Value) -> Value:
    """Bytes v, as 16-bit words, shifted right by a number known when it runs (i64). The caller masks the bytes."""
    words = b.bitcast(v, ir.VectorType(I16, v.type.count // 2))
    return b.bitcast(b.lshr(words, splat_value(b, b.trunc(n, I16), words.type.count)), v.type)


def twice(b: ir.IRBuilder, v: Value) -> Value:
    """v followed by itself."""
    n = v.type.count
    return shuffle(b, v, v, [i % n for i in range(2 * n)])


def joined(b: ir.IRBuilder, x: Value, y: Value) -> Value:
    return shuffle(b, x, y, range(2 * x.type.count))


def _times(b: ir.IRBuilder, index: Value, factor: int) -> Value:
    return b.mul(index, I64(factor))


# ------------------------------------------------------------------ formats of 32 weights


@dataclass(frozen=True)
class Block:
    """A format of 32 weights: bytes per block, and where its parts lie."""

    size: int
    nibbles: int
    fifths: int = 0  # 0: it has no fifth bits
    minimum: bool = False  # f16 at offset 2


Q4_1_BLOCK = Block(Q4_1_BYTES, 4, minimum=True)
Q5_0_BLOCK = Block(Q5_0_BYTES, 6, fifths=2)
Q5_1_BLOCK = Block(Q5_1_BYTES, 8, fifths=4, minimum=True)


def block_values(b: ir.IRBuilder, f: Block, a: Value) -> Value:
    """The 32 unsigned values of a block, <32 x i8>: low nibbles first."""
    v = masked(b, words_shifted(b, twice(b, load(b, at(b, a, f.nibbles), _B16)), [0] * 8 + [4] * 8), 15)
    if f.fifths:
        v = b.or_(v, _where(b, load(b, at(b, a, f.fifths), I32), i8x32.ll, 16))
    return v


def _where(b: ir.IRBuilder, bits: Value, ll: ir.VectorType, value: int) -> Value:
    """`value` in every lane whose bit is set."""
    lanes = ll.count
    chosen = b.bitcast(bits, ir.VectorType(ir.IntType(1), lanes))
    return b.select(chosen, const(ll, [value] * lanes), const(ll, [0] * lanes))


def _pair(b: ir.IRBuilder, a: Value) -> Value:
    """The two f16 at a, as the first lanes of <4 x f32>. Blocks that have two are longer than the eight bytes read."""
    return b.fpext(load(b, a, _H4), ir.VectorType(F32, 4))


def _block_dot(f: Block) -> Any:
    @emit(f32x8, addr, i8x32, i32x8, f32x8, f32x8, f32x8)
    def dot(b, a, q, sums, d, dsum, acc):
        """acc += this block . act block; sums, d, dsum: of the act block (dsum in its second lane, the others 0)."""
        if not f.minimum:  # the zero point is 16
            start = b.shl(sums, const(i32x8.ll, [1] * 8))
            scale = splat_value(b, b.fpext(load(b, a, F16), F32), 8)
        else:
            start = const(i32x8.ll, [0] * 8)
            pair = _pair(b, a)
            scale = shuffle(b, pair, pair, [0] * 8)
            zero = const(pair.type, [0.0] * 4)
            acc = fma_value(b, shuffle(b, pair, zero, [4, 1, 4, 4, 4, 4, 4, 4]), dsum, acc)
        total = b.sitofp(dpbusd_value(b, start, block_values(b, f, a), q, most=31), f32x8.ll)
        return fma_value(b, total, b.fmul(scale, d), acc)

    return dot


def _block_part(f: Block) -> Any:
    @emit(f32x16, addr, types.int64)
    def part(b, a, half):
        """Weights 0..15 (half = 0) or 16..31 (half = 1) of the block."""
        wide = b.zext(load(b, at(b, a, f.nibbles), _B16), i32x16.ll)
        shift = splat_value(b, b.trunc(_times(b, half, 4), I32), 16)
        v = masked(b, b.lshr(wide, shift), 15)
        if f.fifths:
            bits = b.lshr(load(b, at(b, a, f.fifths), I32), b.trunc(_times(b, half, 16), I32))
            v = b.or_(v, _where(b, b.trunc(bits, I16), i32x16.ll, 16))
        if not f.minimum:
            v = b.sitofp(b.sub(v, const(v.type, [16] * 16)), f32x16.ll)
            return b.fmul(v, splat_value(b, b.fpext(load(b, a, F16), F32), 16))
        pair = _pair(b, a)
        d, m = (shuffle(b, pair, pair, [lane] * 16) for lane in (0, 1))
        return fma_value(b, b.sitofp(v, f32x16.ll), d, m)

    return part


@emit(f32x8, addr)
def load_second(b, a):
    """The f32 at a in the second lane, the others 0."""
    return b.insert_element(const(f32x8.ll, [0.0] * 8), load(b, a, F32), I32(1))


@emit(types.int32, i32x8)
def first_half(b, v):
    """Sum of the first four lanes."""
    v = shuffle(b, v, v, range(4))
    v = b.add(shuffle(b, v, v, range(2)), shuffle(b, v, v, range(2, 4)))
    return b.add(b.extract_element(v, I32(0)), b.extract_element(v, I32(1)))


dot_q4_1, dot_q5_0, dot_q5_1 = (_block_dot(f) for f in (Q4_1_BLOCK, Q5_0_BLOCK, Q5_1_BLOCK))
part_q4_1, part_q5_0, part_q5_1 = (_block_part(f) for f in (Q4_1_BLOCK, Q5_0_BLOCK, Q5_1_BLOCK))


# ------------------------------------------------------------------ formats of 256 weights


@dataclass(frozen=True)
class SuperBlock:
    """A format of 256 weights. Columns are counted within the block; `a` is its address.

    scales: 16 x f32: d * scale of each 32 columns, then minus their minimum (minimum), or d * scale of each 16 columns.
    """

    size: int
    minimum: bool  # if not, the zero point is 32
    scales: Callable[[ir.IRBuilder, Value], Value]
    sixty_four: Callable[[ir.IRBuilder, Value, int], Value]  # values 64c..64c+63, c known: <64 x i8>
    thirty_two: Callable[[ir.IRBuilder, Value, Value], Value]  # values 32j..32j+31: <32 x i8>
    sixteen: Callable[[ir.IRBuilder, Value, Value], Value]  # values i..i+15, i a multiple of 16: <16 x i32>
    nibble: Callable[[ir.IRBuilder, Value, Value], Value] | None = None  # the same in four bits, with rubbish above


def _scales_and_minimums(b: ir.IRBuilder, a: Value) -> Value:
    """Q4_K and Q5_K. Twelve bytes A0-3 B0-3 C0-3 hold eight 6-bit scales and eight 6-bit minimums:

    scale i < 4: A_i & 63, else the low nibble of C_(i-4) and, above it, the two upper bits of A_(i-4);
    minimum i < 4: B_i & 63, else the high nibble of C_(i-4) and the two upper bits of B_(i-4).
    """
    words = load(b, a, _D4)  # d and dmin, A, B, C
    low = b.lshr(shuffle(b, words, words, [1, 3, 2, 3]), const(_D4, [0, 0, 0, 4]))
    low = b.and_(low, const(_D4, [0x3F3F3F3F, 0x0F0F0F0F, 0x3F3F3F3F, 0x0F0F0F0F]))
    high = b.lshr(shuffle(b, words, words, [1, 1, 2, 2]), const(_D4, [2] * 4))
    high = b.and_(high, const(_D4, [0, 0x30303030, 0, 0x30303030]))
    integers = b.zext(b.bitcast(b.or_(low, high), _B16), i32x16.ll)
    halves = b.fpext(b.bitcast(words, _H8), f32x8.ll)
    d = shuffle(b, halves, b.fneg(halves), [0] * 8 + [9] * 8)
    return b.fmul(b.sitofp(integers, f32x16.ll), d)


def _scales_q6(b: ir.IRBuilder, a: Value) -> Value:
    d = splat_value(b, b.fpext(load(b, at(b, a, 208), F16), F32), 16)
    return b.fmul(b.sitofp(b.sext(load(b, at(b, a, 192), _B16), i32x16.ll), f32x16.ll), d)


def _nibbles_k(nibbles: int, fifths: int) -> dict[str, Any]:
    """Q4_K and Q5_K: byte i of the j-th 32 bytes holds values 64j + i (low) and 64j + 32 + i (high nibble); bit s of
    byte i of the fifth bits belongs to value 32s + i."""

    def sixty_four(b: ir.IRBuilder, a: Value, c: int) -> Value:
        v = twice(b, load(b, at(b, a, nibbles + 32 * c), i8x32.ll))
        v = masked(b, words_shifted(b, v, [0] * 16 + [4] * 16), 15)
        if fifths:
            bits = twice(b, load(b, at(b, a, fifths), i8x32.ll))
            v = b.or_(v, masked(b, words_shifted(b, bits, [2 * c - 4] * 16 + [2 * c - 3] * 16), 16))
        return v

    def thirty_two(b: ir.IRBuilder, a: Value, j: Value) -> Value:
        where = b.add(a, _times(b, b.lshr(j, I64(1)), 32))
        v = load(b, at(b, where, nibbles), i8x32.ll)
        v = masked(b, _shifted_by(b, v, _times(b, b.and_(j, I64(1)), 4)), 15)
        if fifths:
            bits = masked(b, _shifted_by(b, load(b, at(b, a, fifths), i8x32.ll), j), 1)
            v = b.or_(v, masked(b, words_shifted(b, bits, [-4] * 16), 16))
        return v

    def nibble(b: ir.IRBuilder, a: Value, i: Value) -> Value:
        j, half = b.lshr(i, I64(5)), b.and_(i, I64(16))
        where = b.add(b.add(a, half), _times(b, b.lshr(j, I64(1)), 32))
        v = b.zext(load(b, at(b, where, nibbles), _B16), i32x16.ll)
        return _lanes_shifted(b, v, _times(b, b.and_(j, I64(1)), 4))

    def sixteen(b: ir.IRBuilder, a: Value, i: Value) -> Value:
        v = masked(b, nibble(b, a, i), 15)
        if fifths:
            j, half = b.lshr(i, I64(5)), b.and_(i, I64(16))
            bits = b.zext(load(b, at(b, b.add(a, half), fifths), _B16), i32x16.ll)
            bits = masked(b, _lanes_shifted(b, bits, j), 1)
            v = b.or_(v, b.shl(bits, const(bits.type, [4] * 16)))
        return v

    return {
        "sixty_four": sixty_four, "thirty_two": thirty_two, "sixteen": sixteen, "nibble": None if fifths else nibble,
    }  # fmt: skip


def _lanes_shifted(b: ir.IRBuilder, v: Value, n: Value) -> Value:
    """<16 x i32> shifted right by an i64."""
    return b.lshr(v, splat_value(b, b.trunc(n, I32), 16))


def _sixty_four_q6(b: ir.IRBuilder, a: Value, c: int) -> Value:
    """Half h = c / 2 of the block: 64 bytes of nibbles (low: columns 0..63, high: 64..127), 32 bytes of upper bits
    (bits 2k and 2k+1: columns 32k..32k+31)."""
    h, high = c // 2, c % 2
    v = words_shifted(b, load(b, at(b, a, 64 * h), i8x64.ll), [4 * high] * 32)
    bits = twice(b, load(b, at(b, a, 128 + 32 * h), i8x32.ll))
    shifts = [0] * 16 + [2] * 16 if high else [-4] * 16 + [-2] * 16
    return b.or_(masked(b, v, 15), masked(b, words_shifted(b, bits, shifts), 48))


def _thirty_two_q6(b: ir.IRBuilder, a: Value, j: Value) -> Value:
    h, k = b.lshr(j, I64(2)), b.and_(j, I64(3))
    where = b.add(a, b.add(_times(b, h, 64), _times(b, b.and_(k, I64(1)), 32)))
    v = masked(b, _shifted_by(b, load(b, where, i8x32.ll), _times(b, b.lshr(k, I64(1)), 4)), 15)
    bits = load(b, at(b, b.add(a, _times(b, h, 32)), 128), i8x32.ll)
    bits = masked(b, _shifted_by(b, bits, _times(b, k, 2)), 3)
    return b.or_(v, masked(b, words_shifted(b, bits, [-4] * 16), 48))


def _sixteen_q6(b: ir.IRBuilder, a: Value, i: Value) -> Value:
    h, k, half = b.lshr(i, I64(7)), b.and_(b.lshr(i, I64(5)), I64(3)), b.and_(i, I64(16))
    a = b.add(a, half)
    where = b.add(a, b.add(_times(b, h, 64), _times(b, b.and_(k, I64(1)), 32)))
    v = masked(b, _lanes_shifted(b, b.zext(load(b, where, _B16), i32x16.ll), _times(b, b.lshr(k, I64(1)), 4)), 15)
    bits = b.zext(load(b, at(b, b.add(a, _times(b, h, 32)), 128), _B16), i32x16.ll)
    bits = masked(b, _lanes_shifted(b, bits, _times(b, k, 2)), 3)
    return b.or_(v, b.shl(bits, const(bits.type, [4] * 16)))


Q4_K_BLOCK = SuperBlock(Q4_K_BYTES, True, _scales_and_minimums, **_nibbles_k(nibbles=16, fifths=0))
Q5_K_BLOCK = SuperBlock(Q5_K_BYTES, True, _scales_and_minimums, **_nibbles_k(nibbles=48, fifths=16))
Q6_K_BLOCK = SuperBlock(Q6_K_BYTES, False, _scales_q6, _sixty_four_q6, _thirty_two_q6, _sixteen_q6)
