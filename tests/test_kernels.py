"""Every operator of the compiled program against kernels/reference.py, in all formats and at awkward sizes.

In: random arrays. The operators run as the engine runs them (one_op.py), with canaries around what they write; reads
past the end of a file's memory are the business of guard_pages.py, run here in a process of its own.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numba import njit
from one_op import (
    CANARY,
    MINIMUM,
    NAMES,
    Runner,
    address,
    block_length,
    canaries,
    cases,
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

from hotcold.runtime.kernels import formats, reference, walk
from hotcold.runtime.kernels.sync import barrier
from hotcold.runtime.kernels.vector import ACTIVATION_CODES

LENGTHS = (1, 7, 8, 15, 16, 31, 64, 72, 100, 576)
BLOCK_LENGTHS = (32, 64, 96, 576, 1056)
TINY = np.finfo(np.float32).tiny  # kernels take smaller numbers for 0
ROUNDING = 3e-6  # relative to the sum of absolute values: sums in float32 of up to a few thousand random terms


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """The same numbers for the same test, whichever tests run beside it."""
    return np.random.default_rng(list(request.node.name.encode()))


def is_super(ggml_type: int) -> bool:
    return block_length(ggml_type) == formats.SUPER_BLOCK


def check_matmul(
    runner: Runner, ggml_type: int, raw: np.ndarray, x: np.ndarray, *, bias: bool, scale: float, add: bool,
    rounding: float = ROUNDING,
) -> np.ndarray:  # fmt: skip
    rng = np.random.default_rng(len(raw) * x.size)
    b = rng.standard_normal(len(raw)).astype(np.float32) if bias else None
    old = rng.standard_normal((len(x), len(raw))).astype(np.float32) if add else None
    got = inside(matmul(runner, ggml_type, raw, x, bias=b, scale=scale, old=old), len(raw))
    want = reference.matmul(ggml_type, raw, x, b, scale) + (0 if old is None else old)
    size = abs(scale) * (magnitude(ggml_type, raw, x) + bias * 4) + add * 4
    assert close(got, want, size, rounding)
    return got


# ------------------------------------------------------------------ formats


@pytest.mark.parametrize("ggml_type", formats.NATIVE, ids=NAMES.get)
def test_every_value_of_every_format_is_decoded_exactly(ggml_type: int, runner: Runner) -> None:
    """All patterns of F16 and BF16, all values of block formats under scales of every kind: as gguf decodes them."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    if ggml_type == formats.F32:
        raw = np.random.default_rng(1).standard_normal((1, 777)).astype(np.float32).view(np.uint8)
    elif ggml_type == formats.F16:
        raw = halves[np.isfinite(halves.view(np.float16))].view(np.uint8)[None]
    elif ggml_type == formats.BF16:
        raw = halves[np.isfinite((halves.astype(np.uint32) << 16).view(np.float32))].view(np.uint8)[None]
    else:
        raw = all_values(ggml_type).reshape(1, -1)
    want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(ggml_type)).reshape(1, -1)
    cols = want.size
    assert np.array_equal(reference.decode(ggml_type, raw, cols).astype(np.float32), want)
    want = np.where(np.abs(want) < TINY, 0, want)
    out = canaries(1, cols + 4)
    token = np.zeros(1, np.int64)
    op = record(walk.EMBED, qt=ggml_type, w=raw, stride=raw.shape[1], cols=cols, dst=out, ld_dst=out.strides[0])
    runner.run(op, tokens=address(token))
    assert np.array_equal(out[:, :cols], want)
    assert (out[:, cols:] == CANARY).all()


def all_values(ggml_type: int) -> np.ndarray:
    """Blocks, uint8 [n, block bytes]: enough random ones for every value at every place, under scales of every kind."""
    n, size = 3000, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(ggml_type)][1]
    blocks = np.random.default_rng(ggml_type).integers(0, 256, (n, size), dtype=np.uint8)
    scales = np.array([0, 6e-8, 1e-5, -0.37, 1, -65504], np.float16).view(np.uint8).reshape(-1, 2)
    d_at = 208 if ggml_type == formats.Q6_K else 0
    blocks[:, d_at : d_at + 2] = scales[np.arange(n) % len(scales)]
    if ggml_type in MINIMUM:
        blocks[:, 2:4] = scales[np.arange(n) // len(scales) % len(scales)]
    return blocks


# ------------------------------------------------------------------ matrix times vector, matrix times tokens


@pytest.mark.parametrize(("ggml_type", "cols"), cases(LENGTHS, BLOCK_LENGTHS))
def test_one_token_any_number_of_rows(ggml_type: int, cols: int, runner: Runner, rng: np.random.Generator) -> None:
    x = rng.standard_normal((1, cols)).astype(np.float32)
    combinations = itertools.cycle(itertools.product((False, True), (1.0, -0.3), (False, True)))
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 37):
        raw = encode(ggml_type, random_rows(rng, rows, cols))
        bias, scale, add = next(combinations)
        check_matmul(runner, ggml_type, raw, x, bias=bias, scale=scale, add=add)


@pytest.mark.parametrize(("ggml_type", "cols"), cases((1, 15, 16, 31, 72, 100), (32, 96)))
def test_blocks_of_tokens(ggml_type: int, cols: int, runner: Runner, rng: np.random.Generator) -> None:
    combinations = itertools.cycle(itertools.product((False, True), (1.0, -0.3), (False, True)))
    for n_tok, rows in itertools.product((1, 2, 5, 6, 7, 8, 9, 16, 17), (1, 9, 16, 17, 31, 40)):
        raw = encode(ggml_type, random_rows(rng, rows, cols))
        x = rng.standard_normal((n_tok, cols)).astype(np.float32)
        bias, scale, add = next(combinations)
        check_matmul(runner, ggml_type, raw, x, bias=bias, scale=scale, add=add)


@pytest.mark.parametrize("ggml_type", formats.NATIVE, ids=NAMES.get)
@pytest.mark.parametrize("n_tok", [1, 3, 17])
def test_a_row_has_one_result_wherever_it_stands(
    ggml_type: int, n_tok: int, runner: Runner, rng: np.random.Generator
) -> None:
    """Position in a group of four or in a panel, neighbours, number of threads: none may change a bit."""
    cols = 2 * formats.SUPER_BLOCK if is_super(ggml_type) else 96
    raw = encode(ggml_type, random_rows(rng, 70, cols))
    x = rng.standard_normal((n_tok, cols)).astype(np.float32)
    whole = inside(matmul(runner, ggml_type, raw, x), 70)
    for start in (1, 2, 3, 16, 33, 69):
        assert same_bits(inside(matmul(runner, ggml_type, raw[start:], x), 70 - start), whole[:, start:].copy())
    order = rng.permutation(70)
    assert same_bits(inside(matmul(runner, ggml_type, raw[order], x), 70).copy(), whole[:, order])
    for n_threads in (2, 3, 7):
        assert same_bits(inside(matmul(Runner(n_threads), ggml_type, raw, x), 70).copy(), whole.copy())
    if n_tok > 8:  # nor the other tokens
        alone = inside(matmul(runner, ggml_type, raw, x[8:]), 70)
        assert same_bits(alone.copy(), whole[8:].copy())


@pytest.mark.parametrize("ggml_type", formats.NATIVE, ids=NAMES.get)
@pytest.mark.parametrize("n_tok", [1, 2, 9])
def test_zero_denormal_and_large_activations(ggml_type: int, n_tok: int, runner: Runner) -> None:
    cols = formats.SUPER_BLOCK if is_super(ggml_type) else 64
    raw = encode(ggml_type, random_rows(np.random.default_rng(1), 19, cols))
    zero = np.zeros((n_tok, cols), np.float32)
    assert (inside(matmul(runner, ggml_type, raw, zero), 19) == 0).all()
    bias = np.arange(19, dtype=np.float32)
    assert (inside(matmul(runner, ggml_type, raw, zero, bias=bias), 19) == bias).all()
    assert (inside(matmul(runner, ggml_type, raw, -zero), 19) == 0).all()
    for tiny in (1e-45, 1e-40, 1e-38):
        got = inside(matmul(runner, ggml_type, raw, np.full((n_tok, cols), tiny, np.float32)), 19)
        assert (np.abs(got) < 1e-34).all()  # and so neither NaN nor infinite
    large = np.random.default_rng(2).standard_normal((n_tok, cols)).astype(np.float32) * np.float32(1e30)
    check_matmul(runner, ggml_type, raw, large, bias=False, scale=1.0, add=False)


@pytest.mark.parametrize("ggml_type", formats.NATIVE, ids=NAMES.get)
@pytest.mark.parametrize("n_tok", [2, 9, 17])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_token_of_nan_spoils_no_other(ggml_type: int, n_tok: int, bad: float, runner: Runner) -> None:
    rng = np.random.default_rng(n_tok)
    cols = formats.SUPER_BLOCK if is_super(ggml_type) else 64
    raw = encode(ggml_type, random_rows(rng, 19, cols))
    x = rng.standard_normal((n_tok, cols)).astype(np.float32)
    clean = inside(matmul(runner, ggml_type, raw, x), 19)
    x[1, 5] = bad
    got = inside(matmul(runner, ggml_type, raw, x), 19)
    others = np.arange(n_tok) != 1
    assert same_bits(got[others], clean[others])
    assert not np.isfinite(got[1]).any()  # and it shows where it belongs


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape_and_value(data: st.DataObject) -> None:
    ggml_type = data.draw(st.sampled_from(formats.NATIVE))
    unit = block_length(ggml_type)
    cols = unit * data.draw(st.integers(1, {1: 150, 32: 6, 256: 3}[unit]))
    rows, n_tok = data.draw(st.integers(1, 50)), data.draw(st.integers(1, 20))
    number = st.floats(-1e4, 1e4, width=32, allow_subnormal=False)
    x = data.draw(arrays(np.float32, (n_tok, cols), elements=number, fill=st.just(0.25)))
    weights = data.draw(arrays(np.float32, (rows, cols), elements=number, fill=st.just(-1.5)))
    runner = Runner(data.draw(st.sampled_from([1, 1, 1, 2, 3])))
    check_matmul(
        runner, ggml_type, encode(ggml_type, weights), x, bias=data.draw(st.booleans()),
        scale=data.draw(st.sampled_from([1.0, 0.5, -3.0])), add=data.draw(st.booleans()),
        rounding=(cols + 8) * 2**-24,  # the worst case of adding one after the other: values here are adversarial
    )  # fmt: skip


def test_only_tokens_whose_logits_are_wanted(runner: Runner) -> None:
    """head_only: tokens first_out.. of the block, and the output starts with the first of them."""
    rng = np.random.default_rng(3)
    raw, x = encode(formats.F32, random_rows(rng, 21, 40)), rng.standard_normal((9, 40)).astype(np.float32)
    wide = padded(x)
    for first in (0, 1, 8, 9):
        out = canaries(11, 21)
        op = record(walk.MATMUL, qt=formats.F32, w=raw, stride=raw.shape[1], rows=21, cols=40, src=wide,
                    ld_src=wide.strides[0], ld_dst=out.strides[0], head_only=1, scale=2)  # fmt: skip
        runner.run(op, n_tok=9, first_out=first, logits=address(out[1:]))
        n = 9 - first
        assert close(out[1 : 1 + n], reference.matmul(formats.F32, raw, x[first:], None, 2.0), 100, ROUNDING)
        assert (out[0] == CANARY).all() and (out[1 + n :] == CANARY).all()


# ------------------------------------------------------------------ down columns


@pytest.mark.parametrize(("ggml_type", "cols"), cases((8, 16, 33, 72, 100), (32, 96, 160)))
def test_down_columns(ggml_type: int, cols: int, runner: Runner, rng: np.random.Generator) -> None:
    sizes = itertools.cycle((1, 33, 100, 7))
    combinations = itertools.cycle(itertools.product((False, True), (1.0, 0.7)))
    for n_tok in (2, 6, 8, 9, 17):
        check_down(runner, rng, ggml_type, next(sizes), cols, n_tok, *next(combinations))


@pytest.mark.parametrize("ggml_type", formats.NATIVE, ids=NAMES.get)
def test_down_columns_of_more_neurons_than_one_pass(ggml_type: int, rng: np.random.Generator) -> None:
    cols = formats.SUPER_BLOCK if is_super(ggml_type) else 64
    for neurons in (2047, 2048, 2049, 4100):
        check_down(Runner(cols=8192), rng, ggml_type, neurons, cols, 3, True, 0.5)


def check_down(
    runner: Runner, rng: np.random.Generator, ggml_type: int, neurons: int, cols: int, n_tok: int, biased: bool,
    scale: float,
) -> None:  # fmt: skip
    """Down rows stand at every other row, as in the bundles of a gated FFN."""
    raw = encode(ggml_type, random_rows(rng, 2 * neurons, cols))
    values = rng.standard_normal((n_tok, neurons)).astype(np.float32) * (rng.random((n_tok, neurons)) < 0.5)
    values = values.astype(np.float32)
    bias = rng.standard_normal(cols).astype(np.float32) if biased else None
    out, wide = canaries(n_tok + 2, cols + 5), padded(values)
    old = rng.standard_normal((n_tok, cols)).astype(np.float32)
    out[1:-1, :cols] = old
    op = record(
        walk.DOWN, qt3=ggml_type, w3=raw[1:], stride3=2 * raw.shape[1], rows=neurons, cols=cols, src=wide,
        ld_src=wide.strides[0], dst=out[1:], ld_dst=out.strides[0], bias=address(bias), scale=scale, add=1,
    )  # fmt: skip
    runner.run(op, n_tok=n_tok)
    want = old + reference.down(ggml_type, raw[1::2], values, cols, bias, scale)
    size = np.abs(values) @ np.abs(reference.decode(ggml_type, raw[1::2], cols)) + 8
    assert close(inside(out, cols), want, size, ROUNDING)


# ------------------------------------------------------------------ vectors


@pytest.mark.parametrize("kind", ["rms", "layer", "layer without bias"])
@pytest.mark.parametrize("n", [1, 7, 8, 16, 31, 32, 64, 100, 576])
def test_norms(kind: str, n: int, runner: Runner, rng: np.random.Generator) -> None:
    x = (rng.standard_normal((5, n)) * [[1], [1e-3], [3000], [0], [1]] + 0.5 * (n > 1)).astype(np.float32)
    w, b = rng.standard_normal((2, n)).astype(np.float32)
    wide, out = padded(x), canaries(7, n + 3)
    blocks = np.zeros((5, 64 * max(1, n // 32)), np.uint8)
    quantized = n % 32 == 0
    op = record(
        walk.NORM, src=wide, ld_src=wide.strides[0], w=w, bias=b if kind == "layer" else 0, cols=n, eps=1e-5,
        flag=kind != "rms", dst=out[1:], ld_dst=out.strides[0], dstb=blocks, ld_dstb=blocks.strides[0],
        quant=quantized,
    )  # fmt: skip
    runner.run(op, n_tok=5)
    want = reference.rms_norm(x, w, 1e-5)
    if kind != "rms":
        want = reference.layer_norm(x, w, b if kind == "layer" else None, 1e-5)
    got = inside(out, n)
    # A layer norm subtracts the mean: what rounding left of nearly equal values grows by 1 / their deviation.
    growth = 1 if kind == "rms" else 1 + 2 / np.sqrt(x.astype(np.float64).var(axis=1, keepdims=True) + 1e-5)
    assert close(got, want, (1 + np.abs(w) * 4) * growth, 1e-6)
    if quantized:
        assert np.array_equal(blocks, reference.act_blocks(got.copy()))


def test_norm_of_some_tokens_only(runner: Runner) -> None:
    x, w = np.random.default_rng(1).standard_normal((2, 6, 16)).astype(np.float32)
    out = canaries(6, 16)
    op = record(walk.NORM, src=x, ld_src=64, w=w, cols=16, eps=1e-5, dst=out, ld_dst=64, head_only=1)
    runner.run(op, n_tok=6, first_out=4)
    assert (out[:4] == CANARY).all() and (out[4:] != CANARY).all()


def quantized(runner: Runner, x: np.ndarray) -> np.ndarray:
    """The QUANT operator on x [n_tok, n]."""
    out = np.full((len(x) + 1, 2 * x.shape[1]), 77, np.uint8)
    op = record(walk.QUANT, src=x, ld_src=x.strides[0], cols=x.shape[1], dstb=out, ld_dstb=out.strides[0])
    runner.run(op, n_tok=len(x))
    assert (out[-1] == 77).all()
    return out[:-1].reshape(len(x), -1, formats.ACT_BYTES)


def fields(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    """act blocks [..., 64] -> q [..., 32], sums of four [..., 8], d [...], sum [...]."""
    q = np.ascontiguousarray(blocks[..., : formats.ACT_SUMS]).view(np.int8)
    fours = np.ascontiguousarray(blocks[..., formats.ACT_SUMS : formats.ACT_D]).view(np.int16)
    d = np.ascontiguousarray(blocks[..., formats.ACT_D : formats.ACT_SUM]).view(np.float32)[..., 0]
    total = np.ascontiguousarray(blocks[..., formats.ACT_SUM : formats.ACT_SUM + 4]).view(np.int32)[..., 0]
    return q, fours, d, total


def test_quantization_is_the_reference_bit_for_bit(runner: Runner, rng: np.random.Generator) -> None:
    x = rng.standard_normal((40, 96)).astype(np.float32) * np.logspace(-30, 30, 40, dtype=np.float32)[:, None]
    x[0] = 0
    x[1] = np.arange(96) - 48  # ties: 127/47 is no binary fraction, 127/127 is
    x[2, :32] = np.where(np.arange(32) == 0, 127, np.arange(32) - 15.5)
    x[3] = 5e-39
    got, want = quantized(runner, x), reference.act_blocks(x).reshape(40, 3, formats.ACT_BYTES)
    normal = np.arange(40) != 3
    assert np.array_equal(got[normal], want[normal])
    q, _, d, _ = fields(got[3])
    assert (np.abs(q * d[:, None].astype(np.float64) - 5e-39) <= 5e-39).all()


@settings(max_examples=40, deadline=None)
@given(x=arrays(np.float32, (2, 64), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_quantization_is_within_half_a_step(x: np.ndarray) -> None:
    q, fours, d, total = fields(quantized(Runner(), x))
    back = q * d.astype(np.float64)[..., None]
    # Blocks whose scale, the largest value by 127, is denormal may become 0.
    assert (np.abs(back - x.reshape(back.shape)) <= d[..., None] * 0.5001 + 1.5e-36).all()
    assert np.array_equal(fours, -8 * q.reshape(*fours.shape, 4).sum(axis=-1, dtype=np.int32))
    assert np.array_equal(total, fours.sum(axis=-1, dtype=np.int32))


def test_embedding_with_scale_and_learned_positions(rng: np.random.Generator) -> None:
    for n_threads, (ggml_type, cols) in zip(itertools.cycle((1, 2)), cases((1, 8, 31, 100), (32, 96)), strict=False):
        raw = encode(ggml_type, random_rows(rng, 11, cols))
        raw_positions = encode(ggml_type, random_rows(rng, 30, cols))
        tokens = np.array([10, 0, 3, 3, 7], np.int64)
        for scale, positions in ((1.0, False), (12.0, False), (1.0, True)):
            out = canaries(7, cols + 3)
            op = record(walk.EMBED, qt=ggml_type, w=raw, stride=raw.shape[1], cols=cols, scale=scale, dst=out[1:],
                        ld_dst=out.strides[0])  # fmt: skip
            if positions:
                op["qt2"], op["w2"], op["stride2"] = ggml_type, address(raw_positions), raw_positions.shape[1]
            Runner(n_threads).run(op, n_tok=5, pos=20, tokens=address(tokens))
            want = reference.embed(ggml_type, raw, tokens, cols, scale)
            if positions:
                want += reference.decode(ggml_type, raw_positions[20:25], cols)
            assert close(inside(out, cols), want, np.abs(want) + 1, 1e-6)


@pytest.mark.parametrize("activation", ACTIVATION_CODES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("n", [1, 15, 16, 33, 1000])
def test_activations(activation: str, gated: bool, n: int, runner: Runner, rng: np.random.Generator) -> None:
    threshold = 0.25 if activation == "fatrelu" else 0.0
    sizes = np.array([1, 20, 1e-6, 80], np.float32)[:, None]
    keys = (rng.standard_normal((4, n)) * sizes).astype(np.float32)
    special = [0.0, -0.0, threshold, np.nextafter(np.float32(threshold), np.float32(1)), 1e-40, -1e-40, 88, -88, -1e4]
    keys[0, : len(special)] = special[:n]
    up = rng.standard_normal((4, n)).astype(np.float32)
    wide_keys, wide_up = padded(keys), padded(up)
    op = record(walk.ACTIVATE, act=ACTIVATION_CODES[activation], threshold=threshold, cols=n, src=wide_keys,
                ld_src=wide_keys.strides[0])  # fmt: skip
    if gated:
        op["srcb"], op["ld_srcb"] = address(wide_up), wide_up.strides[0]
    runner.run(op, n_tok=4)
    want = reference.neuron_values(activation, keys, up if gated else None, threshold)
    # gelu cancels in its left tail: there it is as exact as float32's erf.
    size = np.abs(want) + (np.abs(keys) * 0.1 if activation in ("gelu", "gelu_tanh") else 0) + 1e-30
    assert close(wide_keys[:, :n], want, size, 2e-6)
    if activation in ("relu", "fatrelu", "drelu", "relu2"):
        assert np.array_equal(wide_keys[:, :n] != 0, np.abs(want) >= TINY)


# ------------------------------------------------------------------ barrier


@njit(nogil=True)
def rounds(base, n_threads, t, n_rounds, slots):
    """Each thread writes its slot, meets the others, and counts slots that are not yet written; then once more."""
    missed = 0
    for i in range(n_rounds):
        slots[t] = i + 1
        barrier(base, n_threads, 2 * i + 1, base + 128)
        for other in range(n_threads):
            missed += slots[other] != i + 1
        barrier(base, n_threads, 2 * i + 2, base + 128)
    return missed


@njit(nogil=True)
def until_abort(base, n_threads):
    phase = 0
    while True:
        phase += 1
        if barrier(base, n_threads, phase, base + 128):
            return phase


def run_threads(n_threads: int, body: Callable[[int], int]) -> list[int]:
    results = [-1] * n_threads

    def work(t: int) -> None:
        results[t] = body(t)

    threads = [threading.Thread(target=work, args=(t,), daemon=True) for t in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread waits for ever"
    return results


@pytest.mark.parametrize(("n_threads", "n_rounds"), [(1, 10), (2, 3000), (3, 300), (8, 50), (16, 10)])
def test_barrier_holds_every_thread_back(n_threads: int, n_rounds: int) -> None:
    """Also with more threads than cores."""
    words, slots = np.zeros(64, np.int64), np.zeros(n_threads, np.int64)
    base = address(words[: 64 // 8])
    assert run_threads(n_threads, lambda t: rounds(base, n_threads, t, n_rounds, slots)) == [0] * n_threads


@pytest.mark.parametrize("n_threads", [2, 5])
def test_abort_makes_all_threads_leave_at_the_same_barrier(n_threads: int) -> None:
    for delay in (0.0, 0.001, 0.01, 0.02):
        words = np.zeros(64, np.int64)
        timer = threading.Timer(delay, words.__setitem__, (128 // 8, 1))
        timer.start()
        base = address(words)
        phases = run_threads(n_threads, lambda t, base=base: until_abort(base, n_threads))  # type: ignore[misc]
        timer.join()
        assert len(set(phases)) == 1 and phases[0] >= 1


# ------------------------------------------------------------------ memory


def test_nothing_is_read_past_the_end_of_a_file() -> None:
    """guard_pages.py puts matrices right before a page that may not be read; reading it kills that process."""
    script = Path(__file__).with_name("guard_pages.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert "all read" in done.stdout
