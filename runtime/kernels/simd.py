"""SIMD for Numba: vector types backed by LLVM vectors, and intrinsics on raw int64 addresses.

In: nothing. Out: types and intrinsics that the kernels are written in. Next: rows.py.

A kernel written with these is ordinary @njit code in which every call becomes one or a few machine instructions.
Everything takes addresses (int64), never arrays: no reference counts, no strides, no bounds, no GIL. Loads and stores
are unaligned (align 1): rows of a GGUF are only 2-byte aligned.

Which instructions they become is chosen once, when this module is imported: see isa.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

from hotcold.runtime.kernels.isa import CHOSEN

ISA = CHOSEN.name
X86, WIDE, MISSING = CHOSEN.x86, CHOSEN.wide, CHOSEN.missing
# Sums of pairs of products stay 16-bit numbers for a while: see paired(). Where there is no instruction for four
# products, and only 16 registers: avx512 multiplies in pairs too, but its 32 hold a tile's weights and all its sums.
PAIRS = CHOSEN.name == "avx2"
_DPBUSD_TAKES_BYTES = llvm.llvm_version_info[0] >= 22  # the intrinsic's operands became byte vectors in LLVM 22

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
VOID = ir.VoidType()
_ELEMENTS = {"i8": I8, "i16": I16, "i32": I32, "f32": F32}

addr = types.int64


class VecType(types.Type):
    """Numba type of an LLVM vector. Holds only str and int, so that it pickles into Numba's disk cache."""

    def __init__(self, element: str, lanes: int) -> None:
        self.element, self.lanes = element, lanes
        super().__init__(f"{element}x{lanes}")

    @property
    def ll(self) -> ir.VectorType:
        return ir.VectorType(_ELEMENTS[self.element], self.lanes)


@register_model(VecType)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: VecType) -> None:
        super().__init__(dmm, fe_type, fe_type.ll)


f32x8, i32x8, i8x32 = VecType("f32", 8), VecType("i32", 8), VecType("i8", 32)
f32x16, i32x16, i8x64 = VecType("f32", 16), VecType("i32", 16), VecType("i8", 64)


_APART: set[str] = set()  # names that are taken


def emit(ret: types.Type, *arg_types: types.Type, apart: str = "") -> Callable[[Callable[..., Any]], Any]:
    """Decorator: f(builder, *llvm_values) -> llvm_value becomes an intrinsic of fixed signature.

    apart: the name of a function of its own, without a result. A loop that needs all registers must not share them with
    the large functions around it: there, LLVM keeps a sum in memory now and then, and the loop takes twice the time.
    A name is one function's: a module that has it already would run that one's code.
    """
    if apart:
        if apart in _APART:
            raise ValueError(f"emit(apart={apart!r}): another intrinsic has this name already, choose one of its own")
        _APART.add(apart)

    def decorate(f: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, values: Sequence[Any]) -> Any:
            if apart:
                _call_apart(builder, apart, f, values)
                return context.get_dummy_value()
            result = f(builder, *values)
            return context.get_dummy_value() if ret is types.void else result

        def typer(context: Any, *args: Any) -> Any:
            return ret(*arg_types), codegen

        # Numba reads the number of arguments from the signature.
        names = ["context", *(f"a{i}" for i in range(len(arg_types)))]
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        typer.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        typer.__name__ = f.__name__
        return intrinsic(typer)

    return decorate


def _call_apart(b: ir.IRBuilder, name: str, f: Callable[..., Any], values: Sequence[Any]) -> None:
    """Call f as a function of this module, which is made at its first call."""
    kind = ir.FunctionType(VOID, [value.type for value in values])
    function = b.module.globals.get(name)
    if function is None:
        function = ir.Function(b.module, kind, name)
        function.linkage = "internal"  # another module's is never taken for it
        function.attributes.add("noinline")
        function.attributes.add("nounwind")
        inner = ir.IRBuilder(function.append_basic_block("entry"))
        f(inner, *function.args)
        inner.ret_void()
    b.call(function, values)


# ------------------------------------------------------------------ IR helpers


def call(b: ir.IRBuilder, name: str, ret: ir.Type, *args: Any, fastmath: tuple[str, ...] = ()) -> Any:
    fn = cgutils.get_or_insert_function(b.module, ir.FunctionType(ret, [a.type for a in args]), name)
    return b.call(fn, args, fastmath=fastmath)


def pointer(b: ir.IRBuilder, a: Any, ll: ir.Type) -> Any:
    return b.inttoptr(a, ll.as_pointer())


def load(b: ir.IRBuilder, a: Any, ll: ir.Type) -> Any:
    value = b.load(pointer(b, a, ll))
    value.align = 1
    return value


def store(b: ir.IRBuilder, a: Any, value: Any) -> None:
    b.store(value, pointer(b, a, value.type)).align = 1


def const(ll: ir.VectorType, values: Sequence[float]) -> ir.Constant:
    return ir.Constant(ll, list(values))


def splat_value(b: ir.IRBuilder, scalar: Any, lanes: int) -> Any:
    ll = ir.VectorType(scalar.type, lanes)
    v = b.insert_element(ir.Constant(ll, ir.Undefined), scalar, I32(0))
    return b.shuffle_vector(v, v, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def shuffle(b: ir.IRBuilder, x: Any, y: Any, lanes: Sequence[int]) -> Any:
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


def fma_value(b: ir.IRBuilder, x: Any, y: Any, acc: Any) -> Any:
    return call(b, f"llvm.fma.v{x.type.count}f32", x.type, x, y, acc)


def dpbusd_value(b: ir.IRBuilder, acc: Any, unsigned: Any, signed: Any, most: int = 255) -> Any:
    """acc[i] += sum over j of unsigned[4i+j] * signed[4i+j]; 8 or 16 lanes of i32.

    most: what no unsigned byte exceeds. Up to 128 the sum is cheaper where there is no instruction for it.
    """
    lanes = acc.type.count
    if lanes in CHOSEN.vnni:
        if not _DPBUSD_TAKES_BYTES:
            unsigned, signed = b.bitcast(unsigned, acc.type), b.bitcast(signed, acc.type)
        return call(b, f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", acc.type, acc, unsigned, signed)
    if lanes == 16 and CHOSEN.x86 and 16 not in CHOSEN.madd:
        (a0, a1), (u0, u1), (s0, s1) = (_halves(b, v) for v in (acc, unsigned, signed))
        return shuffle(b, dpbusd_value(b, a0, u0, s0, most), dpbusd_value(b, a1, u1, s1, most), range(16))
    if lanes in CHOSEN.madd and most <= 128:
        return b.add(acc, _pair_products(b, byte_pairs(b, unsigned, signed), _ones(lanes)))
    # Even and odd bytes as 16-bit numbers, then pairs of products.
    words = ir.VectorType(I16, 2 * lanes)
    u, s, eight = b.bitcast(unsigned, words), b.bitcast(signed, words), const(words, [8] * (2 * lanes))
    even = _pair_products(b, b.and_(u, const(words, [255] * (2 * lanes))), b.ashr(b.shl(s, eight), eight))
    return b.add(b.add(acc, even), _pair_products(b, b.lshr(u, eight), b.ashr(s, eight)))


def dot_q8_value(b: ir.IRBuilder, sums: Any, weights: Any, q: Any) -> Any:
    """i32x8 of sums of four products: any s8 weights with act values q, -127..127; sums: their -8 * sum of four."""
    lanes = sums.type.count
    if lanes in CHOSEN.madd and lanes not in CHOSEN.vnni:
        return _pair_products(b, _signed_pairs(b, weights, q), _ones(lanes))
    start = b.shl(sums, const(sums.type, [4] * lanes))  # weights are offset by 128, 16 times 8
    return dpbusd_value(b, start, b.xor(weights, const(weights.type, [128] * (4 * lanes))), q)


def byte_pairs(b: ir.IRBuilder, unsigned: Any, signed: Any) -> Any:
    """x86: i16 sums of two products each. The instruction saturates; unsigned bytes up to 128 never make it:
    2 * 128 * 127 = 32512 and 2 * 128 * -128 = -32768 are still 16-bit numbers."""
    words = ir.VectorType(I16, unsigned.type.count // 2)
    name = "llvm.x86.avx2.pmadd.ub.sw" if words.count == 16 else "llvm.x86.avx512.pmaddubs.w.512"
    return call(b, name, words, unsigned, signed)


def paired(b: ir.IRBuilder, unsigned: Any, signed: Any) -> Any:
    """byte_pairs() of vectors of twice the width, PAIRS only: what two registers hold."""
    return _joined(b, [byte_pairs(b, u, s) for u, s in zip(_halves(b, unsigned), _halves(b, signed), strict=True)])


def paired_signed(b: ir.IRBuilder, weights: Any, q: Any) -> Any:
    """The same of signed bytes: the sign of a weight goes to the value, -127..127, that it meets."""
    return _joined(b, [_signed_pairs(b, w, x) for w, x in zip(_halves(b, weights), _halves(b, q), strict=True)])


def pair_totals(b: ir.IRBuilder, words: Any) -> Any:
    """What paired() gave -> <16 x i32> sums of four products."""
    return _joined(b, [_pair_products(b, half, _ones(8)) for half in _halves(b, words)])


def _signed_pairs(b: ir.IRBuilder, weights: Any, q: Any) -> Any:
    """|w| <= 128 as an unsigned byte, and q with the sign of w."""
    size = call(b, f"llvm.abs.v{weights.type.count}i8", weights.type, weights, ir.IntType(1)(0))
    return byte_pairs(b, size, call(b, "llvm.x86.avx2.psign.b", q.type, q, weights))


def _joined(b: ir.IRBuilder, halves: list) -> Any:
    return shuffle(b, halves[0], halves[1], range(2 * halves[0].type.count))


def _pair_products(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    """i16 vectors -> i32 of half as many lanes: x[2i]*y[2i] + x[2i+1]*y[2i+1]."""
    lanes = x.type.count
    wide = ir.VectorType(I32, lanes // 2)
    if lanes // 2 in CHOSEN.madd:
        return call(b, "llvm.x86.avx2.pmadd.wd" if lanes == 16 else "llvm.x86.avx512.pmaddw.d.512", wide, x, y)
    p = b.mul(b.sext(x, ir.VectorType(I32, lanes)), b.sext(y, ir.VectorType(I32, lanes)))
    return b.add(shuffle(b, p, p, range(0, lanes, 2)), shuffle(b, p, p, range(1, lanes, 2)))


def _ones(lanes: int) -> ir.Constant:
    return const(ir.VectorType(I16, 2 * lanes), [1] * (2 * lanes))


def _halves(b: ir.IRBuilder, v: Any) -> tuple[Any, Any]:
    half = v.type.count // 2
    return shuffle(b, v, v, range(half)), shuffle(b, v, v, range(half, 2 * half))


# ------------------------------------------------------------------ memory access


def _loader(nty: types.Type, ll: ir.Type, convert: Callable[..., Any] | None = None) -> Any:
    @emit(nty, addr)
    def load_from(b: ir.IRBuilder, a: Any) -> Any:
        value = load(b, a, ll)
        return convert(b, value) if convert else value

    return load_from


def _storer(nty: types.Type, convert: Callable[..., Any] | None = None) -> Any:
    @emit(types.void, addr, nty)
    def store_to(b: ir.IRBuilder, a: Any, value: Any) -> None:
        store(b, a, convert(b, value) if convert else value)

    return store_to


def _bf16(lanes: int) -> Callable[..., Any]:
    wide = ir.VectorType(I32, lanes)
    return lambda b, v: b.bitcast(b.shl(b.zext(v, wide), const(wide, [16] * lanes)), ir.VectorType(F32, lanes))


def _half(lanes: int) -> Callable[..., Any]:
    return lambda b, v: b.fpext(v, ir.VectorType(F32, lanes))


H8, H16 = ir.VectorType(F16, 8), ir.VectorType(F16, 16)
S8, S16 = ir.VectorType(I16, 8), ir.VectorType(I16, 16)
B8, B16 = ir.VectorType(I8, 8), ir.VectorType(I8, 16)

load_i32, store_i32 = _loader(types.int32, I32), _storer(types.int32)
load_i64, store_i64 = _loader(types.int64, I64), _storer(types.int64)
load_f32, store_f32 = _loader(types.float32, F32), _storer(types.float32)
load_f16 = _loader(types.float32, F16, lambda b, v: b.fpext(v, F32))
store_f16 = _storer(types.float32, lambda b, v: b.fptrunc(v, F16))
load_bf16 = _loader(types.float32, I16, lambda b, v: b.bitcast(b.shl(b.zext(v, I32), I32(16)), F32))

# 8 lanes
load_v, store_v = _loader(f32x8, f32x8.ll), _storer(f32x8)
load_vh = _loader(f32x8, H8, _half(8))
load_vb = _loader(f32x8, S8, _bf16(8))
load_dup = _loader(f32x8, F32, lambda b, v: splat_value(b, v, 8))
load_b32 = _loader(i8x32, i8x32.ll)
load_s16 = _loader(i32x8, S8, lambda b, v: b.sext(v, i32x8.ll))
store_s16 = _storer(i32x8, lambda b, v: b.trunc(v, S8))
store_s8 = _storer(i32x8, lambda b, v: b.trunc(v, B8))

# 16 lanes
load_w, store_w = _loader(f32x16, f32x16.ll), _storer(f32x16)
load_wh = _loader(f32x16, H16, _half(16))
load_wb = _loader(f32x16, S16, _bf16(16))
load_s8w = _loader(i32x16, B16, lambda b, v: b.sext(v, i32x16.ll))
load_u8w = _loader(i32x16, B16, lambda b, v: b.zext(v, i32x16.ll))


def _prefetcher(locality: int) -> Any:
    @emit(types.void, addr)
    def prefetch(b: ir.IRBuilder, a: Any) -> None:
        call(b, "llvm.prefetch.p0", VOID, pointer(b, a, I8), I32(0), I32(locality), I32(1))

    return prefetch


prefetch_l2 = _prefetcher(2)


# ------------------------------------------------------------------ arithmetic, 8 and 16 lanes


def _float_ops(ty: VecType) -> tuple[Any, ...]:
    lanes = ty.lanes

    @emit(ty, types.float32)
    def splat(b, s):
        return splat_value(b, s, lanes)

    @emit(ty)
    def zero(b):
        return const(ty.ll, [0.0] * lanes)

    @emit(ty, ty, ty, ty)
    def fma(b, x, y, acc):
        return fma_value(b, x, y, acc)

    @emit(ty, ty, ty)
    def add(b, x, y):
        return b.fadd(x, y)

    @emit(ty, ty, ty)
    def mul(b, x, y):
        return b.fmul(x, y)

    @emit(types.float32, ty)
    def total(b, v):  # a fixed tree: the order of additions never depends on the caller
        while v.type.count > 1:
            half = v.type.count // 2
            v = b.fadd(shuffle(b, v, v, range(half)), shuffle(b, v, v, range(half, 2 * half)))
        return b.extract_element(v, I32(0))

    return splat, zero, fma, add, mul, total


splat, vzero, fma, vadd, vmul, hsum = _float_ops(f32x8)
splat_w, zero_w, fma_w, add_w, mul_w, hsum_w = _float_ops(f32x16)


@emit(f32x16, f32x16, f32x16)
def sub_w(b, x, y):
    return b.fsub(x, y)


@emit(f32x16, f32x16, f32x16)
def div_w(b, x, y):
    return b.fdiv(x, y)


@emit(f32x16, f32x16, f32x16)
def max_w(b, x, y):  # a NaN in x stays
    return b.select(b.fcmp_ordered("<", x, y), y, x)


@emit(f32x16, f32x16, f32x16)
def min_w(b, x, y):  # a NaN in x stays
    return b.select(b.fcmp_ordered(">", x, y), y, x)


@emit(f32x8, f32x8, f32x8)
def vmax(b, x, y):  # NaN if either is
    return call(b, "llvm.maximum.v8f32", f32x8.ll, x, y)


@emit(f32x8, f32x8)
def vabs(b, x):
    return call(b, "llvm.fabs.v8f32", f32x8.ll, x)


@emit(types.float32, f32x8)
def hmax(b, v):
    return call(b, "llvm.vector.reduce.fmaximum.v8f32", F32, v)


@emit(i32x16, f32x16)
def round_w(b, x):
    return b.fptosi(call(b, "llvm.rint.v16f32", f32x16.ll, x), i32x16.ll)


@emit(i32x8, f32x8)
def round_v(b, x):
    return b.fptosi(call(b, "llvm.rint.v8f32", f32x8.ll, x), i32x8.ll)


@emit(f32x16, f32x16, i32x16)
def ldexp_w(b, x, n):  # x * 2**n through the exponent field; the caller clamps n
    shifted = b.shl(n, const(i32x16.ll, [23] * 16))
    return b.bitcast(b.add(b.bitcast(x, i32x16.ll), shifted), f32x16.ll)


@emit(f32x8, i32x8)
def to_f32(b, x):
    return b.sitofp(x, f32x8.ll)


@emit(f32x16, i32x16)
def to_f32w(b, x):
    return b.sitofp(x, f32x16.ll)


# ------------------------------------------------------------------ quantized weights


@emit(i32x8)
def izero(b):
    return const(i32x8.ll, [0] * 8)


@emit(i32x8, i32x8)
def ineg(b, x):
    return b.sub(const(i32x8.ll, [0] * 8), x)


@emit(types.int32, i32x8)
def isum(b, v):
    return call(b, "llvm.vector.reduce.add.v8i32", I32, v)


@emit(i32x8, i32x8, i8x32, i8x32)
def dpbusd_small(b, acc, unsigned, signed):  # unsigned bytes up to 128
    return dpbusd_value(b, acc, unsigned, signed, most=128)


@emit(i32x8, i32x8, i8x32, i8x32)
def dot_q8(b, sums, weights, q):
    return dot_q8_value(b, sums, weights, q)


@emit(f32x8, addr, addr, i8x32, i8x32)
def nibble_products(b, first, second, low, high):
    """Sums of products of two blocks of Q4_0 nibbles, 16 bytes each: one block in lanes 0..3, the other in 4..7.

    low, high: values 0..15 of both act blocks, and values 16..31.
    """
    v = shuffle(b, load(b, first, B16), load(b, second, B16), range(32))
    fifteen, word_type = const(i8x32.ll, [15] * 32), ir.VectorType(I16, 16)
    lower, shifted = b.and_(v, fifteen), b.lshr(b.bitcast(v, word_type), const(word_type, [4] * 16))
    upper = b.and_(b.bitcast(shifted, i8x32.ll), fifteen)
    if PAIRS:  # four products of 15 * 127 fit into 16 bits
        pairs = b.add(byte_pairs(b, lower, low), byte_pairs(b, upper, high))
        return b.sitofp(_pair_products(b, pairs, _ones(8)), f32x8.ll)
    zero = const(i32x8.ll, [0] * 8)
    return b.sitofp(dpbusd_value(b, dpbusd_value(b, zero, lower, low, 15), upper, high, 15), f32x8.ll)


@emit(f32x8, addr, addr, i8x32, i8x32)
def signed_products(b, first, second, low, high):
    """The same of two blocks of 32 signed bytes; PAIRS only."""
    lower = shuffle(b, load(b, first, B16), load(b, second, B16), range(32))
    upper = shuffle(b, load(b, b.add(first, I64(16)), B16), load(b, b.add(second, I64(16)), B16), range(32))
    sums = [_pair_products(b, _signed_pairs(b, w, q), _ones(8)) for w, q in ((lower, low), (upper, high))]
    return b.sitofp(b.add(*sums), f32x8.ll)


@emit(i8x32, addr, addr)
def load_two(b, first, second):  # 16 bytes each
    return shuffle(b, load(b, first, B16), load(b, second, B16), range(32))


@emit(f32x8, addr, addr)
def load_fours(b, first, second):  # four f32 each
    four = ir.VectorType(F32, 4)
    return shuffle(b, load(b, first, four), load(b, second, four), range(8))


@emit(i8x32)
def eights(b):
    return const(i8x32.ll, [8] * 32)


@emit(i8x32, addr)
def load_nibbles(b, a):  # 16 bytes -> 32 values 0..15, the low nibbles first
    v = load(b, a, B16)
    v = shuffle(b, v, v, [i % 16 for i in range(32)])
    v = b.lshr(b.bitcast(v, i32x8.ll), const(i32x8.ll, [0] * 4 + [4] * 4))
    return b.and_(b.bitcast(v, i8x32.ll), const(i8x32.ll, [15] * 32))


@emit(f32x16, i32x16)
def low_nibble_w(b, v):  # (v & 15) - 8
    nibble = b.and_(v, const(i32x16.ll, [15] * 16))
    if WIDE:  # one table look-up instead of and, subtract, convert; it reads only the low four bits of an index
        table = const(f32x16.ll, [float(i - 8) for i in range(16)])
        return call(b, "llvm.x86.avx512.permvar.sf.512", f32x16.ll, table, v)
    return b.sitofp(b.sub(nibble, const(i32x16.ll, [8] * 16)), f32x16.ll)


@emit(i32x16, i32x16)
def shr4w(b, v):
    return b.lshr(v, const(i32x16.ll, [4] * 16))


@emit(f32x8, addr, addr, addr, addr, types.int64)
def load_scales(b, a0, a1, a2, a3, size):  # f16 at the beginning of a block of four rows, then of the next block
    v = ir.Constant(S8, ir.Undefined)
    for i, a in enumerate([a0, a1, a2, a3, *(b.add(a, size) for a in (a0, a1, a2, a3))]):
        v = b.insert_element(v, load(b, a, I16), I32(i))
    return b.fpext(b.bitcast(v, H8), f32x8.ll)


@emit(f32x8, addr, addr)
def load_four_each(b, first, second):  # f32 at `first` in lanes 0..3, at `second` in lanes 4..7
    x, y = (splat_value(b, load(b, a, F32), 8) for a in (first, second))
    return shuffle(b, x, y, [0, 1, 2, 3, 12, 13, 14, 15])


def _lane(i: int) -> Any:
    @emit(f32x8, f32x8)
    def lane(b, v):
        return shuffle(b, v, v, [i] * 8)

    return lane


lane0, lane1, lane2, lane3, lane4, lane5, lane6, lane7 = (_lane(i) for i in range(8))


def _each_half(i: int) -> Any:
    @emit(f32x8, f32x8)
    def each(b, v):  # lane i of each half in all lanes of that half
        return shuffle(b, v, v, [i] * 4 + [4 + i] * 4)

    return each


each0, each1, each2, each3 = (_each_half(i) for i in range(4))


@emit(types.UniTuple(types.float32, 4), f32x8)
def add_halves(b, v):
    four = b.fadd(shuffle(b, v, v, range(4)), shuffle(b, v, v, range(4, 8)))
    result = ir.Constant(ir.ArrayType(F32, 4), ir.Undefined)
    for i in range(4):
        result = b.insert_value(result, b.extract_element(four, I32(i)), i)
    return result


# ------------------------------------------------------------------ sign bits


@emit(types.int64, addr)
def negative16(b, a):  # bit i: the i-th of 16 f32 is below 0 (not for -0 and NaN)
    v = load(b, a, f32x16.ll)
    below = b.fcmp_ordered("<", v, ir.Constant(f32x16.ll, None))
    return b.zext(b.bitcast(below, I16), I64)


@emit(types.int64, addr, types.float32)
def above16(b, a, limit):  # bit i: the i-th of 16 f32 is above the limit, or NaN
    v = load(b, a, f32x16.ll)
    above = b.fcmp_unordered(">", v, splat_value(b, limit, 16))
    return b.zext(b.bitcast(above, I16), I64)


@emit(types.int64, types.int64)
def popcount(b, x):
    return call(b, "llvm.ctpop.i64", I64, x)


# ------------------------------------------------------------------ the CPU itself

_FTZ_DAZ = 0x8040  # x86, MXCSR: results and operands too small for a normal number are 0
_FZ = 1 << 24  # AArch64, FPCR: the same


def cycles_value(b: ir.IRBuilder) -> Any:
    """Ticks of a counter that runs at a fixed rate, for differences; 0 where the CPU has none for user programs."""
    if CHOSEN.x86:
        return call(b, "llvm.readcyclecounter", I64)
    if CHOSEN.aarch64:  # its cycle counter is for the system alone
        kind = ir.FunctionType(I64, [ir.MetaDataType()])
        read = cgutils.get_or_insert_function(b.module, kind, "llvm.read_volatile_register.i64")
        return b.call(read, [b.module.add_metadata(["cntvct_el0"])])
    return I64(0)


def pause_value(b: ir.IRBuilder) -> None:
    """Wait some tens of cycles, in favour of the core's other thread; nothing where no instruction for it is known."""
    if CHOSEN.x86:
        call(b, "llvm.x86.sse2.pause", VOID)
    elif CHOSEN.aarch64:  # `yield` takes no time on nearly all of them, and waits are counted in pauses
        call(b, "llvm.aarch64.isb", VOID, I32(15))


def flush_value(b: ir.IRBuilder) -> Any:
    """Numbers too small for a normal number count as 0 in this thread from here on; -> the state before."""
    if CHOSEN.x86:
        state = _mxcsr(b)
        _set_mxcsr(b, b.or_(state, I32(_FTZ_DAZ)))
        return b.zext(state, I64)
    if CHOSEN.aarch64:
        state = call(b, "llvm.aarch64.get.fpcr", I64)
        call(b, "llvm.aarch64.set.fpcr", VOID, b.or_(state, I64(_FZ)))
        return state
    return I64(0)


def restore_value(b: ir.IRBuilder, state: Any) -> None:
    """state: what flush_denormals() returned."""
    if CHOSEN.x86:
        _set_mxcsr(b, b.trunc(state, I32))
    elif CHOSEN.aarch64:
        call(b, "llvm.aarch64.set.fpcr", VOID, state)


def _mxcsr(b: ir.IRBuilder) -> Any:
    cell = cgutils.alloca_once(b, I32)
    call(b, "llvm.x86.sse.stmxcsr", VOID, b.bitcast(cell, I8.as_pointer()))
    return b.load(cell)


def _set_mxcsr(b: ir.IRBuilder, state: Any) -> None:
    cell = cgutils.alloca_once(b, I32)
    b.store(state, cell)
    call(b, "llvm.x86.sse.ldmxcsr", VOID, b.bitcast(cell, I8.as_pointer()))


read_cycles = emit(types.int64)(cycles_value)
pause = emit(types.void)(pause_value)
flush_denormals = emit(types.int64)(flush_value)
restore_denormals = emit(types.void, types.int64)(restore_value)
