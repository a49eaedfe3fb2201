"""Register tiles of the blocked matrix product, generated as LLVM IR so that they unroll to fixed register use.

In: addresses of a packed panel and of activations. Out: a tile of sums in scratch. Next: blocks.py.

A panel holds LANES = 16 rows of the weight matrix side by side: lane = row, so that no sum needs a reduction and no
scale a broadcast.

    float panel   [k][16] f32                                   (two of them side by side: [k][32])
    byte panel    [k/32] x { [8][16][4] u8 values + offset, [16] f32 scale }
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types

from hotcold.runtime.kernels.formats import ACT_BYTES, ACT_D, ACT_SUM
from hotcold.runtime.kernels.simd import (
    F32,
    I32,
    I64,
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
    shuffle,
    splat_value,
    store,
)

LANES = 16
TILE_TOKENS = 8 if WIDE else 4  # as many accumulators as the registers hold
FLOAT_VECTORS = 2 if WIDE else 1  # panels of 16 rows side by side
FLOAT_ROWS = LANES * FLOAT_VECTORS
BYTE_BLOCK = 8 * 64 + 64  # bytes of one block of 32 columns in a byte panel


def _accumulators(b: ir.IRBuilder, ll: ir.VectorType, count: int) -> list:
    cells = [cgutils.alloca_once(b, ll) for _ in range(count)]
    for cell in cells:
        b.store(ir.Constant(ll, None), cell)
    return cells


def _add(b: ir.IRBuilder, base, offset: int):
    return b.add(base, I64(offset))


@emit(types.void, addr, types.int64, addr, types.int64, types.int64, addr)
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


@emit(types.void, addr, types.int64, types.int32, addr, types.int64, types.int64, addr)
def byte_tile(b, panel, blocks, zero_times, xb, ldx, last, out):
    """out[t][16] = sum over blocks of (u8 panel . act block) * scales, t < TILE_TOKENS. ldx in bytes.

    zero_times: 1 for values stored with an offset of 8, 16 for 128 (act blocks carry -8 * sum).
    """
    rows = [b.add(xb, b.mul(ldx, _smaller(b, t, last))) for t in range(TILE_TOKENS)]
    cells = _accumulators(b, f32x16.ll, TILE_TOKENS)
    with cgutils.for_range(b, blocks) as loop:
        at = b.add(panel, b.mul(loop.index, I64(BYTE_BLOCK)))
        weights = [load(b, _add(b, at, 64 * g), i8x64.ll) for g in range(8)]
        scale = load(b, _add(b, at, 512), f32x16.ll)
        for row, cell in zip(rows, cells, strict=True):
            act = b.add(row, b.mul(loop.index, I64(ACT_BYTES)))
            start = b.mul(load(b, _add(b, act, ACT_SUM), I32), zero_times)
            sums = splat_value(b, start, LANES)
            for g, weight in enumerate(weights):
                four = splat_value(b, load(b, _add(b, act, 4 * g), I32), LANES)
                sums = dpbusd_value(b, sums, weight, b.bitcast(four, i8x64.ll))
            d = b.fmul(scale, splat_value(b, load(b, _add(b, act, ACT_D), F32), LANES))
            b.store(fma_value(b, b.sitofp(sums, f32x16.ll), d, b.load(cell)), cell)
    for i, cell in enumerate(cells):
        store(b, _add(b, out, 64 * i), b.load(cell))


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


def _float_packer(row_loader):
    """Returns pack(a, stride, last, dst): 16 columns of 16 rows -> dst[column][16], dst rows 4*FLOAT_ROWS apart."""

    @emit(types.void, addr, types.int64, types.int64, addr)
    def pack(b, a, stride, last, dst):
        rows = [row_loader(b, b.add(a, b.mul(stride, _smaller(b, r, last)))) for r in range(LANES)]
        for i, column in enumerate(_transpose(b, rows)):
            store(b, _add(b, dst, 4 * FLOAT_ROWS * i), column)

    return pack


def _byte_packer(decode):
    @emit(types.void, addr, types.int64, types.int64, addr)
    def pack(b, a, stride, last, dst):
        """One block of 32 columns of 16 rows at `a` -> one block of a byte panel at dst."""
        rows, scales = [], ir.Constant(f32x16.ll, ir.Undefined)
        for r in range(LANES):
            at = b.add(a, b.mul(stride, _smaller(b, r, last)))
            half = load(b, at, ir.HalfType())
            scales = b.insert_element(scales, b.fpext(half, F32), I32(r))
            dwords = b.bitcast(decode(b, _add(b, at, 2)), ir.VectorType(I32, 8))
            rows.append(shuffle(b, dwords, dwords, [i % 8 for i in range(16)]))
        for g, group in enumerate(_transpose(b, rows)[:8]):
            store(b, _add(b, dst, 64 * g), group)
        store(b, _add(b, dst, 512), scales)

    return pack


def _decode_q8(b, a):
    v = load(b, a, ir.VectorType(ir.IntType(8), 32))
    return b.xor(v, const(v.type, [128] * 32))


def _decode_q4(b, a):
    v = load(b, a, ir.VectorType(ir.IntType(8), 16))
    low = b.and_(v, const(v.type, [15] * 16))
    high = b.lshr(v, const(v.type, [4] * 16))
    return shuffle(b, low, high, list(range(32)))


pack_q8, pack_q4 = _byte_packer(_decode_q8), _byte_packer(_decode_q4)

_H16, _S16 = ir.VectorType(ir.HalfType(), 16), ir.VectorType(ir.IntType(16), 16)


def _row_bf16(b, a):
    return b.bitcast(b.shl(b.zext(load(b, a, _S16), i32x16.ll), const(i32x16.ll, [16] * 16)), f32x16.ll)


pack_f32 = _float_packer(lambda b, a: load(b, a, f32x16.ll))
pack_f16 = _float_packer(lambda b, a: b.fpext(load(b, a, _H16), f32x16.ll))
pack_bf16 = _float_packer(_row_bf16)
