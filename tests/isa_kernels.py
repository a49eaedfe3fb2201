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
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from llvmlite import ir
from numba import njit

from hotcold.runtime.kernels import isa

if sys.argv[1] == "generic":  # what another kind of machine gets; the compiler still makes code for this one
    isa.CHOSEN = isa.choose("generic", frozenset())

from one_op import CANARY, NAMES, address, canaries, close, encode, inside, padded, random_rows, record

from hotcold.runtime.kernels import formats, reference, simd, walk
from hotcold.runtime.kernels.blocks import matmul, matmul_columns, panel_bytes
from hotcold.runtime.kernels.ffn import active_columns
from hotcold.runtime.kernels.rows import matvec
from hotcold.runtime.kernels.vector import quantize


@njit(nogil=True)
def product(program, n_tok, x, ldx, xb, ldxb, dst, ldd, scratch):
    o = program[0]
    for t in range(n_tok):
        quantize(x + t * ldx, xb + t * ldxb, o.cols // 32 * 32)
    matmul(o, 0, o.rows, n_tok, x, ldx, xb, ldxb, dst, ldd, scratch, 0)


@njit(nogil=True)
def rows_alone(program, x, xb, dst):
    o = program[0]
    quantize(x, xb, o.cols // 32 * 32)
    matvec(o.qt, o.w, o.stride, 0, o.rows, o.cols, x, xb, dst, 0)


@njit(nogil=True)
def columns(program, n_tok, x, ldx, dst, ldd, scratch):
    o = program[0]
    matmul_columns(o, 0, o.cols, n_tok, x, ldx, dst, ldd, scratch, 0, 0)


@njit(nogil=True)
def active(program, x, ids, values, dst):
    o = program[0]
    return active_columns(o, 0, o.rows, 0, x, ids, values, dst)


def rows_of(ggml_type: int, rng: np.random.Generator, rows: int, cols: int) -> np.ndarray:
    """Encoded rows; the first ones of Q8_0 hold the most extreme bytes, -128 among them."""
    raw = encode(ggml_type, random_rows(rng, rows, cols))
    if ggml_type == formats.Q8_0:
        blocks = raw.reshape(rows, -1, formats.Q8_0_BYTES)
        blocks[0, :, 2:], blocks[1, :, 2:] = 128, 127
        blocks[2, :, 2:] = rng.choice([127, 128, 129], blocks[2, :, 2:].shape)
    return raw


def check_product(ggml_type: int, raw: np.ndarray, x: np.ndarray) -> None:
    n_tok, cols = x.shape
    out, wide = canaries(n_tok + 2, len(raw) + 3), padded(x)
    acts = np.zeros((n_tok, (cols // 32 + 1) * formats.ACT_BYTES), np.uint8)
    scratch = np.zeros(panel_bytes(cols), np.uint8)
    op = record(walk.MATMUL, rows=len(raw), cols=cols, qt=ggml_type, w=raw, stride=raw.shape[1])
    product(op, n_tok, address(wide), wide.strides[0], address(acts), acts.strides[0], address(out[1:]),
            out.strides[0], address(scratch))  # fmt: skip
    want = reference.matmul(ggml_type, raw, x, None, 1.0)
    size = np.abs(reference.seen(ggml_type, x)) @ np.abs(reference.decode(ggml_type, raw, cols)).T
    assert close(inside(out, len(raw)), want, size, 3e-6), (NAMES[ggml_type], raw.shape, n_tok)
    alone = canaries(len(raw) + 3)
    rows_alone(op, address(wide), address(acts), address(alone))
    assert close(alone[: len(raw)], want[0], size[0], 3e-6), (NAMES[ggml_type], raw.shape, "one token")
    assert (alone[len(raw) :] == CANARY).all()


def check_columns(ggml_type: int, raw: np.ndarray, cols: int, x: np.ndarray) -> None:
    """x: [n_tok, rows]; one token through the sums of rows, all of them through tiles."""
    weights = reference.decode(ggml_type, raw, cols)
    want, size = x @ weights, np.abs(x) @ np.abs(weights)
    out, wide = canaries(len(x), cols), padded(x)
    scratch = np.zeros(panel_bytes(cols), np.uint8)
    op = record(walk.DOWN, rows=len(raw), cols=cols, qt3=ggml_type, w3=raw, stride3=raw.shape[1])
    columns(op, len(x), address(wide), wide.strides[0], address(out), out.strides[0], address(scratch))
    assert close(out, want, size, 3e-6), (NAMES[ggml_type], raw.shape, "tiles")
    op = record(walk.COLUMNS, rows=cols, cols=len(raw), qt=ggml_type, w=raw, stride=raw.shape[1], sparse=1)
    ids, values, sums = np.zeros(len(raw) + 16, np.int32), np.zeros(len(raw) + 16, np.float32), canaries(cols + 64)
    active(op, address(wide), address(ids), address(values), address(sums))
    assert close(sums[:cols], want[0], size[0], 3e-6), (NAMES[ggml_type], raw.shape, "rows")
    assert (sums[-(-cols // 64) * 64 :] == CANARY).all()


def check_code(name: str) -> None:
    code = "".join(product.inspect_asm().values())
    wide, instruction, pairs = "zmm" in code, "vpdpbusd" in code, "vpmaddubsw" in code
    assert simd.ISA == name, simd.ISA
    assert wide == name.startswith("avx512"), "registers of 512 bits"
    assert instruction == name.endswith("vnni"), "vpdpbusd"
    if name in ("avx512", "avx2"):
        assert pairs, "vpmaddubsw"
    if name == "generic":
        # Numba's reference counts are not ours; LLVM has made an instruction of x86 of them by now.
        code = "".join(product.inspect_llvm().values()).replace("llvm.x86.atomic", "numba.atomic")
        ours = set(re.findall(r"@(llvm\.x86[\w.]+)", code))
        assert not ours, ours
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
    builder.ret(simd.cycles_value(builder))
    text = target.emit_assembly(_for(target, str(module))).lower()
    assert "cntvct_el0" in text and text.count("fpcr") >= 3, text


def _for(target: llvm.TargetMachine, code: str) -> llvm.ModuleRef:
    module = llvm.parse_assembly(code)
    module.triple, module.data_layout = target.triple, str(target.target_data)
    return module


def main(name: str) -> None:
    rng = np.random.default_rng(7)
    for ggml_type in formats.NATIVE:
        block = GGML_QUANT_SIZES[GGMLQuantizationType(ggml_type)][0]
        lengths = (64, 96, 320) if block <= 32 else (block, 3 * block)
        for cols, rows, n_tok in itertools.product(lengths, (3, 37), (1, 2, 9, 17)):
            raw = rows_of(ggml_type, rng, rows, cols)
            check_product(ggml_type, raw, rng.standard_normal((n_tok, cols)).astype(np.float32))
        for cols, rows in ((lengths[0], 37), (lengths[1], 70)):
            raw = rows_of(ggml_type, rng, rows, cols)
            x = rng.standard_normal((5, rows)).astype(np.float32)
            x[:, ::3] = 0
            check_columns(ggml_type, raw, cols, x)
    check_code(name)


if __name__ == "__main__":
    main(sys.argv[1])
    print("all right")
