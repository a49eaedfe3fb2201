"""The kernels of one instruction-set path, few enough to be compiled in seconds, against reference.py.

In: the path's name; NUMBA_CPU_NAME and NUMBA_CPU_FEATURES name the CPU. Out: exit 0, or an error. Next: test_isa.py
runs it.
"""

from __future__ import annotations

import itertools
import re
import sys

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit

from hotcold.runtime.kernels import isa

if sys.argv[1] == "generic":  # what another kind of machine gets; the compiler still makes code for this one
    isa.CHOSEN = isa.choose("generic", frozenset())

from one_op import (
    CANARY,
    FFN,
    NAMES,
    Runner,
    address,
    attention,
    block_length,
    canaries,
    close,
    encode,
    inside,
    magnitude,
    matmul,
    padded,
    random_rows,
    record,
    same_bits,
)

from hotcold.runtime.kernels import blocks, formats, reference, simd, walk
from hotcold.runtime.kernels.attention import attend_few
from hotcold.runtime.kernels.attention_block import attend_block
from hotcold.runtime.kernels.ffn import active_columns, sparse_ffn
from hotcold.runtime.kernels.vector import quantize

# Tails of every kind: of 16, of 8, of single numbers, and rows shorter than any of them.
LENGTHS = {1: (1, 7, 72, 100, 323), formats.BLOCK: (64, 96, 320), formats.SUPER_BLOCK: (256, 768)}
ROUNDING = 3e-6  # relative to the sum of absolute values
CACHES = (("f32", 7), ("f16", 100), ("q8_0", 96))  # head_dim of each


@njit(nogil=True)
def by_rows(o, n_tok):
    """Operators of a few tokens, o.few."""
    if o.op == walk.MATMUL:
        blocks.few_tokens(o, 0, o.rows, n_tok, o.src, o.ld_src, o.srcb, o.ld_srcb, o.dst, o.ld_dst)
    elif o.op == walk.COLUMNS:
        active_columns(o, 0, o.rows, 0, o.src, o.aux, o.aux2, o.dst)
    else:
        for t in range(n_tok):
            quantize(o.src + t * o.ld_src, o.dstb + t * o.ld_dstb, o.cols)


@njit(nogil=True)
def ffn_step(o, n_tok):
    if o.op == walk.FFN:
        sparse_ffn(o, 0, 1, n_tok, 0, o.dst)
    elif o.op == walk.NORM:
        walk._norm(o, o.src, o.dst, o.dstb)
    else:
        walk._reduce(o, 0, 1, n_tok, 0)


@njit(nogil=True)
def by_panels(o, n_tok, scratch):
    if o.op == walk.MATMUL:
        n = simd.load_i64(o.lengths) if o.ids else o.rows
        blocks.matmul(o, 0, n, n_tok, o.src, o.ld_src, o.srcb, o.ld_srcb, o.dst, o.ld_dst, scratch, o.ids)
    else:
        blocks.matmul_columns(o, 0, o.cols, n_tok, o.src, o.ld_src, o.dst, o.ld_dst, scratch, 0, 0)


@njit(nogil=True)
def attend(o, n_tok, pos, scratch):
    if o.few:
        attend_few(o, 0, 1, n_tok, pos, o.srcb)
    else:
        attend_block(o, 0, 1, n_tok, pos, scratch, o.srcb)


COMPILED = (by_rows, by_panels, ffn_step, attend)


class Alone(Runner):
    """One thread and the operators above; few: how products of tokens are made."""

    def __init__(self, few: bool) -> None:
        self.few = few
        self.scratch = np.zeros(blocks.panel_bytes(4096), np.uint8)

    def run(self, *records: np.ndarray, n_tok: int = 1, pos: int = 0, first_out: int = 0, **arguments: int) -> None:
        for o in np.concatenate(records):
            if o["op"] == walk.ATTEND:
                attend(o, n_tok, pos, arguments["arena"])
            elif o["op"] in (walk.NORM, walk.FFN, walk.REDUCE):
                ffn_step(o, n_tok)
            elif self.few:
                by_rows(o, n_tok)
            else:
                by_panels(o, n_tok, address(self.scratch))


FEW, MANY = Alone(True), Alone(False)


def rows_of(ggml_type: int, rng: np.random.Generator, rows: int, cols: int) -> np.ndarray:
    """Encoded rows; the first ones of Q8_0 hold the most extreme bytes, -128 among them."""
    raw = encode(ggml_type, random_rows(rng, rows, cols))
    if ggml_type == formats.Q8_0:
        each = raw.reshape(rows, -1, formats.Q8_0_BYTES)
        each[0, :, 2:], each[1, :, 2:] = 128, 127
        each[2, :, 2:] = rng.choice([127, 128, 129], each[2, :, 2:].shape)
    return raw


def check_product(ggml_type: int, raw: np.ndarray, x: np.ndarray) -> None:
    """By rows and by panels, and of a list of rows."""
    (rows, stride), (n_tok, cols) = raw.shape, x.shape
    bias = np.linspace(-2, 2, rows, dtype=np.float32)
    want = reference.matmul(ggml_type, raw, x, bias, 0.5)
    size = magnitude(ggml_type, raw, x) + 2
    for runner in (FEW, MANY):
        got = inside(matmul(runner, ggml_type, raw, x, bias=bias, scale=0.5), rows)
        assert close(got, want, size, ROUNDING), (NAMES[ggml_type], raw.shape, n_tok, "rows" if runner.few else "tiles")
    ids = np.arange(1, rows, 2, dtype=np.int32)
    length = np.array([len(ids)], np.int64)
    out, wide, acts = canaries(n_tok + 2, len(ids) + 3), padded(x), np.zeros((n_tok, 64), np.uint8)
    if ggml_type in formats.QUANTIZED:
        acts = reference.act_blocks(x)
    op = record(
        walk.MATMUL, qt=ggml_type, w=raw, stride=stride, rows=rows, cols=cols, src=wide, ld_src=wide.strides[0],
        srcb=acts, ld_srcb=acts.strides[0], dst=out[1:], ld_dst=out.strides[0], bias=bias, scale=0.5, ids=ids,
        lengths=length,
    )  # fmt: skip
    MANY.run(op, n_tok=n_tok)
    assert same_bits(inside(out, len(ids)).copy(), got[:, ids]), (NAMES[ggml_type], raw.shape, n_tok, "list")


def check_columns(ggml_type: int, raw: np.ndarray, cols: int, x: np.ndarray) -> None:
    """x: [n_tok, rows]; one token through the sums of rows, all of them through tiles."""
    weights = reference.decode(ggml_type, raw, cols)
    want, size = x @ weights, np.abs(x) @ np.abs(weights)
    out, wide = canaries(len(x), cols), padded(x)
    MANY.run(record(walk.DOWN, rows=len(raw), cols=cols, qt3=ggml_type, w3=raw, stride3=raw.shape[1], src=wide,
                    ld_src=wide.strides[0], dst=out, ld_dst=out.strides[0]), n_tok=len(x))  # fmt: skip
    assert close(out, want, size, ROUNDING), (NAMES[ggml_type], raw.shape, "tiles")
    ids, values, sums = np.zeros(len(raw) + 16, np.int32), np.zeros(len(raw) + 16, np.float32), canaries(cols + 64)
    FEW.run(record(walk.COLUMNS, rows=cols, cols=len(raw), qt=ggml_type, w=raw, stride=raw.shape[1], sparse=1,
                   src=wide, aux=ids, aux2=values, dst=sums))  # fmt: skip
    assert close(sums[:cols], want[0], size[0], ROUNDING), (NAMES[ggml_type], raw.shape, "rows")
    assert (sums[-(-cols // 64) * 64 :] == CANARY).all()


def check_ffn(ggml_type: int, rng: np.random.Generator, cols: int) -> None:
    """The sparse FFN of a token: right, and exact is dense bit for bit."""
    n_ff = 75
    key, value = (random_rows(rng, n, cols) / np.float32(cols**0.5) for n in (n_ff, 2 * n_ff))
    ffn = FFN("relu", 0.0, True, ggml_type, encode(ggml_type, key), ggml_type, encode(ggml_type, value), cols,
              rng.standard_normal(n_ff).astype(np.float32))  # fmt: skip
    x = rng.standard_normal(cols).astype(np.float32)
    dense, exact = (ffn.run(x, sparsity, 1, FEW)[0] for sparsity in ("dense", "exact"))
    assert same_bits(dense, exact), (NAMES[ggml_type], "exact is not dense")
    want, values = ffn.reference(x)
    assert 0 < np.count_nonzero(values) < n_ff
    # Of quantized rows: an activation between two int8 numbers may be rounded to either.
    tolerance = 2e-2 if ggml_type in formats.QUANTIZED else 2e-5
    assert close(dense, want, 1 + np.abs(want).max(), tolerance), (NAMES[ggml_type], "ffn")


def check_attention(rng: np.random.Generator, kind: str, head_dim: int) -> None:
    """Over two chunks of positions, with a window and without; heads share a KV head in groups of 3."""
    pos, kv_heads = 290, 2
    for n_tok, window in ((1, 0), (3, 40), (19, 0), (19, 40)):
        cache = rng.standard_normal((2, kv_heads, pos + n_tok, head_dim)).astype(np.float32)
        if kind == "q8_0":
            raw = encode(formats.Q8_0, cache.reshape(-1, head_dim))
            seen = reference.decode(formats.Q8_0, raw, head_dim).reshape(cache.shape)
            cache = raw.reshape(*cache.shape[:-1], -1)
        else:
            seen = cache = cache.astype(np.float16 if kind == "f16" else np.float32)
        q = rng.standard_normal((n_tok, 3 * kv_heads, head_dim)).astype(np.float32)
        want = reference.attention(q, seen[0], seen[1], pos, window, head_dim**-0.5).reshape(n_tok, -1)
        got = attention(q, cache, pos=pos, window=window, scale=head_dim**-0.5, n_threads=1, many_tokens=n_tok > 8,
                        runner=FEW)  # fmt: skip
        assert close(got[:-1, : want.shape[1]], want, 3, 2e-6), (kind, n_tok, window)
        assert (got[-1] == CANARY).all()


def check_quantize(rng: np.random.Generator) -> None:
    """Act blocks are the same on every path, bit for bit."""
    x = rng.standard_normal((9, 96)).astype(np.float32) * np.logspace(-30, 30, 9, dtype=np.float32)[:, None]
    x[0], x[1] = 0, np.arange(96) - 48
    out = np.zeros((9, 192), np.uint8)
    FEW.run(record(walk.QUANT, src=x, ld_src=x.strides[0], cols=96, dstb=out, ld_dstb=192), n_tok=9)
    assert np.array_equal(out, reference.act_blocks(x))


def check_code(name: str) -> None:
    code = "".join(text for f in COMPILED for text in f.inspect_asm().values())
    wide, instruction, pairs = "zmm" in code, "vpdpbusd" in code, "vpmaddubsw" in code
    assert simd.ISA == name, simd.ISA
    assert wide == name.startswith("avx512"), "registers of 512 bits"
    assert instruction == name.endswith("vnni"), "vpdpbusd"
    if name in ("avx512", "avx2"):
        assert pairs, "vpmaddubsw"
    if name == "generic":
        # Numba's reference counts are not ours; LLVM has made an instruction of x86 of them by now.
        for function in COMPILED:
            code = "".join(function.inspect_llvm().values()).replace("llvm.x86.atomic", "numba.atomic")
            ours = set(re.findall(r"@(llvm\.x86[\w.]+)", code))
            assert not ours, ours
            if code:
                check_arm(code)


def check_arm(code: str) -> None:
    """The same code for ARM: it cannot be run here, but what LLVM cannot translate would end the process."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine(features="+neon")
    code = re.sub(r"(?m)^target (triple|datalayout) = .*$", "", code)
    assert "fmla" in target.emit_assembly(_for(target, code)), "vector code"
    module = ir.Module()
    simd.CHOSEN = isa.choose("aarch64-unknown-linux-gnu", frozenset())
    builder = ir.IRBuilder(ir.Function(module, ir.FunctionType(simd.I64, []), "f").append_basic_block())
    simd.restore_value(builder, simd.flush_value(builder))
    simd.pause_value(builder)
    builder.ret(simd.cycles_value(builder))
    text = target.emit_assembly(_for(target, str(module))).lower()
    assert "cntvct_el0" in text and text.count("fpcr") >= 3 and "\tisb" in text, text


def _for(target: llvm.TargetMachine, code: str) -> llvm.ModuleRef:
    module = llvm.parse_assembly(code)
    module.triple, module.data_layout = target.triple, str(target.target_data)
    return module


def main(name: str) -> None:
    rng = np.random.default_rng(7)
    for ggml_type in formats.NATIVE:
        lengths = LENGTHS[block_length(ggml_type)]
        for cols, rows, n_tok in itertools.product(lengths, (3, 37), (1, 2, 9, 17)):
            raw = rows_of(ggml_type, rng, rows, cols)
            check_product(ggml_type, raw, rng.standard_normal((n_tok, cols)).astype(np.float32))
        for cols, rows in zip(lengths, (37, 70, 37, 70, 37), strict=False):
            raw = rows_of(ggml_type, rng, rows, cols)
            x = rng.standard_normal((5, rows)).astype(np.float32)
            x[:, ::3] = 0
            check_columns(ggml_type, raw, cols, x)
        check_ffn(ggml_type, rng, lengths[-1])
    for kind, head_dim in CACHES:
        check_attention(rng, kind, head_dim)
    check_quantize(rng)
    check_code(name)


if __name__ == "__main__":
    main(sys.argv[1])
    print("all right")
