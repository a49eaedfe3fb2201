"""Register tiles of the blocked matrix product, generated as LLVM IR so that they unroll to fixed register use.

In: addresses of a packed panel and of activations. Out: a tile of sums in scratch. Next: blocks.py.

A panel holds LANES = 16 rows of the weight matrix side by side: lane = row, so that no sum needs a reduction and no
scale a broadcast.

    float panel   [k][16] f32                                   (two of them side by side: [k][32])
    byte panel    [k/32] x { [8][16][4] u8 values, [16] f32 scale, [16] f32 second }    (Q8_0 with PAIRS: s8 values)

What `second` is depends on the format: nothing (and absent), a minimum to add, or the scale of the last 16 columns.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types

from hotcold.runtime.kernels.formats import ACT_BYTES, ACT_D, ACT_DSUM, ACT_HALF, ACT_SUM, Q4_0_BYTES, Q8_0_BYTES
from hotcold.runtime.kernels.quants import (
    Q4_1_BLOCK,
    Q4_K_BLOCK,
    Q5_0_BLOCK,
    Q5_1_BLOCK,
    Q5_K_BLOCK,
    Q6_K_BLOCK,
    Block,
    SuperBlock,
    block_values,
)
from hotcold.runtime.kernels.simd import (
    F32,
    I8,
    I32,
    I64,
    PAIRS,
    WIDE,
    addr,
    const,
    dpbusd_value,
    emit,
    f32x16,
    fma_value,
    i8x64,
    i32x16,
    load,
    pair_totals,
    paired,
    paired_signed,
    shuffle,
    splat_value,
    store,
)

LANES = 16
TILE_TOKENS = 8 if WIDE else 4  # as many accumulators as the registers hold
FLOAT_VECTORS = 2 if WIDE else 1  # panels of 16 rows side by side
FLOAT_ROWS = LANES * FLOAT_VECTORS
SCALE, SECOND = 8 * 64, 8 * 64 + 64  # where they lie in a block of a byte panel
BYTE_BLOCK, WIDE_BLOCK = SECOND, SECOND + 64  # bytes of such a block, without and with a second vector


def _accumulators(b: ir.IRBuilder, ll: ir.VectorType, count: int) -> list:
    cells = [cgutils.alloca_once(b, ll) for _ in range(count)]
    for cell in cells:
        b.store(ir.Constant(ll, None), cell)
    return cells


def _add(b: ir.IRBuilder, base, offset: int):
    return b.add(base, I64(offset))


@emit(types.void, addr, types.int64, addr, types.int64, types.int64, addr, apart="float_tile")
def float_tile(b, panel, k, x, ldx, last, out):
    """out[t][FLOAT_ROWS] = sum over i < k of panel[i] * x[min(t, last)][i], t < TILE_TOKENS. ldx in bytes."""
    rows = [b.add(x, b.mul(ldx, _smaller(b, t, last))) for t in range(TILE_TOKENS)]
    cells = _accumulators(b, f32x16.ll, TILE_TOKENS * FLOAT_VECTORS)
    with cgutils.for_range(b, k) as loop:
        at = b.add(panel, b.mul(loop.index, I64(4 * FLOAT_ROWS)))
        weights = [load(b, _add(b, at, 64 * v), f32x16.ll) for v in range(FLOAT_VECTORS)]
        for t, row in enumerate(rows):
            value = splat_value(b, load(b, b.add(row, b.mul(loop.index, I64(4))), F32), LANES)
            for v, weight in enumerate(weights):
                cell = cells[t * FLOAT_VECTORS + v]
                b.store(fma_value(b, weight, value, b.load(cell)), cell)
    for i, cell in enumerate(cells):
        store(b, _add(b, out, 64 * i), b.load(cell))


def _byte_tile(name: str, minimum: bool = False, halves: bool = False, most: int = 63, signed: bool = False):
    """Tiles of formats with a zero point, with a minimum, or with a zero point and a scale per 16 columns.

    most: what no value of the panel exceeds. signed: its bytes are signed, without a zero point.
    """

    @emit(types.void, addr, types.int64, types.int32, addr, types.int64, types.int64, addr, apart=name)
    def byte_tile(b, panel, blocks, zero_times, xb, ldx, last, out):
        """out[t][16] = sum over blocks of (u8 panel . act block) * scales, t < TILE_TOKENS. ldx in bytes.

        zero_times: the zero point by 8, as act blocks carry -8 * sum; unused with a minimum and with signed bytes.
        """
        rows = [b.add(xb, b.mul(ldx, _smaller(b, t, last))) for t in range(TILE_TOKENS)]
        cells = _accumulators(b, f32x16.ll, TILE_TOKENS)
        with cgutils.for_range(b, blocks) as loop:
            at = b.add(panel, b.mul(loop.index, I64(WIDE_BLOCK if minimum or halves else BYTE_BLOCK)))
            weights = [load(b, _add(b, at, 64 * g), i8x64.ll) for g in range(8)]
            scale = load(b, _add(b, at, SCALE), f32x16.ll)
            second = load(b, _add(b, at, SECOND), f32x16.ll) if minimum or halves else None
            acts = [b.add(row, b.mul(loop.index, I64(ACT_BYTES))) for row in rows]
            totals = [b.load(cell) for cell in cells]
            ds = [_splat_at(b, _add(b, act, ACT_D)) for act in acts]
            parts = [(weights, 0, scale)]
            if minimum:
                lows = [_splat_at(b, _add(b, act, ACT_DSUM)) for act in acts]
                totals = [fma_value(b, second, low, total) for low, total in zip(lows, totals, strict=True)]
            elif halves:
                parts = [(weights[:4], 0, scale), (weights[4:], 4, second)]
            for some, first, numbers in parts:
                starts = None if minimum or signed else [_start(b, act, zero_times, first, halves) for act in acts]
                sums = _products(b, starts, some, acts, first, most, signed)
                for t, d in enumerate(ds):
                    totals[t] = fma_value(b, b.sitofp(sums[t], f32x16.ll), b.fmul(numbers, d), totals[t])
            for cell, total in zip(cells, totals, strict=True):
                b.store(total, cell)
        for i, cell in enumerate(cells):
            store(b, _add(b, out, 64 * i), b.load(cell))

    return byte_tile


def _start(b: ir.IRBuilder, act, zero_times, first: int, halves: bool):
    """What an integer sum starts at: minus the share of the zero point, of a whole act block or of a half of it."""
    total = load(b, _add(b, act, ACT_HALF if halves and not first else ACT_SUM), I32)
    if first:
        total = b.sub(total, load(b, _add(b, act, ACT_HALF), I32))
    return splat_value(b, b.mul(total, zero_times), LANES)


def _splat_at(b: ir.IRBuilder, a):
    return splat_value(b, load(b, a, F32), LANES)


def _products(b: ir.IRBuilder, starts: list | None, weights: list, acts: list, first: int, most: int, signed: bool):
    """Of each token starts + weights . values 4 * first.. of its act block.

    Without an instruction for it, products of bytes are summed in pairs as 16-bit numbers, and as many pairs are added
    in 16 bits as surely fit. The tokens are then the inner loop: weights stay in the few registers, sums too.
    """
    sums = starts or [ir.Constant(i32x16.ll, None)] * len(acts)

    def four(act, g):
        return b.bitcast(splat_value(b, load(b, _add(b, act, 4 * (first + g)), I32), LANES), i8x64.ll)

    if not PAIRS:
        for t, act in enumerate(acts):
            for g, weight in enumerate(weights):
                sums[t] = dpbusd_value(b, sums[t], weight, four(act, g), most)
        return sums
    fit = 1 if signed else 32767 // (2 * 127 * most)
    sums = list(sums)
    for group in range(0, len(weights), fit):
        words: list = [None] * len(acts)
        for g in range(group, min(group + fit, len(weights))):
            for t, act in enumerate(acts):
                new = (paired_signed if signed else paired)(b, weights[g], four(act, g))
                words[t] = new if words[t] is None else b.add(words[t], new)
        sums = [b.add(total, pair_totals(b, word)) for total, word in zip(sums, words, strict=True)]
    return sums


# Formats with a zero point: of Q8_0 all 256 values occur, of the others at most 32.
byte_tile_q8 = _byte_tile("byte_tile_q8", most=255, signed=PAIRS)
byte_tile = _byte_tile("byte_tile", most=31)
byte_tile_minimum = _byte_tile("byte_tile_minimum", minimum=True, most=31)
byte_tile_halves = _byte_tile("byte_tile_halves", halves=True)


def _smaller(b: ir.IRBuilder, t: int, last):
    return b.select(b.icmp_signed("<", I64(t), last), I64(t), last)


def _transpose(b: ir.IRBuilder, rows: list) -> list:
    """16 vectors of 16 lanes -> their transpose, in four exchange steps."""
    rows = list(rows)
    for width in (8, 4, 2, 1):
        low = [i if not i & width else 16 + i - width for i in range(16)]
        high = [i + width if not i & width else 16 + i for i in range(16)]
        for i in range(16):
            if not i & width:
                x, y = rows[i], rows[i + width]
                rows[i], rows[i + width] = shuffle(b, x, y, low), shuffle(b, x, y, high)
    return rows


def _pack_values(b: ir.IRBuilder, rows: list, dst) -> None:
    """<32 x i8> of each of 16 rows -> [8][16][4] u8."""
    words = [b.bitcast(row, ir.VectorType(I32, 8)) for row in rows]
    wide = [shuffle(b, row, row, [i % 8 for i in range(16)]) for row in words]
    for g, group in enumerate(_transpose(b, wide)[:8]):
        store(b, _add(b, dst, 64 * g), group)


def _rows_at(b: ir.IRBuilder, a, stride, last, ids, panel) -> list:
    """Addresses of 16 rows: rows 0..last of a matrix, or of a list of i32 (ids is not 0); the last one repeated.

    panel: memory to read instead of a list; a matrix at the end of a file may be shorter than an i32.
    """
    listed = b.icmp_signed("!=", ids, I64(0))
    rows = []
    for r in range(LANES):
        index = _smaller(b, r, last)
        entry = b.select(listed, b.add(ids, b.mul(index, I64(4))), panel)
        rows.append(b.add(a, b.mul(stride, b.select(listed, b.sext(load(b, entry, I32), I64), index))))
    return rows


def _ahead(b: ir.IRBuilder, rows: list, index, size: int) -> list:
    """The rows from their block `index` on."""
    offset = b.mul(index, I64(size))
    return [b.add(row, offset) for row in rows]


def _byte_packer(name: str, decode, size: int, minimum: bool = False):
    """decode(b, address of a block) -> its 32 unsigned values. Returns pack(a, stride, last, ids, blocks, panel)."""

    @emit(types.void, addr, types.int64, types.int64, addr, types.int64, addr, apart=name)
    def pack(b, a, stride, last, ids, blocks, panel):
        """A byte panel of `blocks` blocks of 32 columns of 16 rows, see _rows_at."""
        rows = _rows_at(b, a, stride, last, ids, panel)
        with cgutils.for_range(b, blocks) as loop:
            dst = b.add(panel, b.mul(loop.index, I64(WIDE_BLOCK if minimum else BYTE_BLOCK)))
            starts = _ahead(b, rows, loop.index, size)
            _pack_values(b, [decode(b, at) for at in starts], dst)
            for offset, place in ((0, SCALE), (2, SECOND))[: 1 + minimum]:
                v = ir.Constant(f32x16.ll, ir.Undefined)
                for r, at in enumerate(starts):
                    half = load(b, _add(b, at, offset), ir.HalfType())
                    v = b.insert_element(v, b.fpext(half, F32), I32(r))
                store(b, _add(b, dst, place), v)

    return pack


def _super_packer(name: str, f: SuperBlock):
    """The same for formats of 256 columns: the sixteen numbers of a block (scales, minimums) are turned as a whole."""

    @emit(types.void, addr, types.int64, types.int64, addr, types.int64, addr, apart=name)
    def pack(b, a, stride, last, ids, blocks, panel):
        rows = _rows_at(b, a, stride, last, ids, panel)
        with cgutils.for_range(b, b.lshr(blocks, I64(3))) as outer:
            to = b.add(panel, b.mul(outer.index, I64(8 * WIDE_BLOCK)))
            starts = _ahead(b, rows, outer.index, f.size)
            for i, numbers in enumerate(_transpose(b, [f.scales(b, at) for at in starts])):
                block, second = (i % 8, i // 8) if f.minimum else (i // 2, i % 2)
                store(b, _add(b, to, block * WIDE_BLOCK + (SECOND if second else SCALE)), numbers)
            with cgutils.for_range(b, I64(8)) as inner:
                values = [f.thirty_two(b, at, inner.index) for at in starts]
                _pack_values(b, values, b.add(to, b.mul(inner.index, I64(WIDE_BLOCK))))

    return pack


def _decode_q8(b, a):
    v = load(b, _add(b, a, 2), ir.VectorType(I8, 32))
    return v if PAIRS else b.xor(v, const(v.type, [128] * 32))


def _decode_q4(b, a):
    v = load(b, _add(b, a, 2), ir.VectorType(I8, 16))
    low = b.and_(v, const(v.type, [15] * 16))
    high = b.lshr(v, const(v.type, [4] * 16))
    return shuffle(b, low, high, list(range(32)))


def _block_packer(name: str, f: Block):
    return _byte_packer(name, lambda b, a: block_values(b, f, a), f.size, f.minimum)


pack_q8 = _byte_packer("pack_q8", _decode_q8, Q8_0_BYTES)
pack_q4 = _byte_packer("pack_q4", _decode_q4, Q4_0_BYTES)
pack_q4_1 = _block_packer("pack_q4_1", Q4_1_BLOCK)
pack_q5_0 = _block_packer("pack_q5_0", Q5_0_BLOCK)
pack_q5_1 = _block_packer("pack_q5_1", Q5_1_BLOCK)
pack_q4k = _super_packer("pack_q4k", Q4_K_BLOCK)
pack_q5k = _super_packer("pack_q5k", Q5_K_BLOCK)
pack_q6k = _super_packer("pack_q6k", Q6_K_BLOCK)

_H16, _S16 = ir.VectorType(ir.HalfType(), 16), ir.VectorType(ir.IntType(16), 16)


def _row_bf16(b, a):
    return b.bitcast(b.shl(b.zext(load(b, a, _S16), i32x16.ll), const(i32x16.ll, [16] * 16)), f32x16.ll)


def _float_packer(name: str, load_row, size: int):
    """Returns pack(a, stride, last, ids, blocks, panel): 16 columns of 16 rows a block, 4*FLOAT_ROWS bytes apart."""

    @emit(types.void, addr, types.int64, types.int64, addr, types.int64, addr, apart=name)
    def pack(b, a, stride, last, ids, blocks, panel):
        rows = _rows_at(b, a, stride, last, ids, panel)
        with cgutils.for_range(b, blocks) as loop:
            dst = b.add(panel, b.mul(loop.index, I64(4 * FLOAT_ROWS * 16)))
            values = [load_row(b, at) for at in _ahead(b, rows, loop.index, 16 * size)]
            for i, column in enumerate(_transpose(b, values)):
                store(b, _add(b, dst, 4 * FLOAT_ROWS * i), column)

    return pack


pack_f32 = _float_packer("pack_f32", lambda b, a: load(b, a, f32x16.ll), 4)
pack_f16 = _float_packer("pack_f16", lambda b, a: b.fpext(load(b, a, _H16), f32x16.ll), 2)
pack_bf16 = _float_packer("pack_bf16", _row_bf16, 2)
