"""The sparse FFN of one token: right, the same bits as dense, every neuron counted. See one_op.py for how it is run.

In: random matrices in the neuron-split layout. The operators are those the engine lowers: norm, FFN, reduction.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_op import FFN, FLOATS, NAMES, block_length, close, encode, random_rows, same_bits

from hotcold.runtime.engine import Engine
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.kernels import formats

THREADS = (1, 2, 3, 8)
SPARSE = [("relu", True), ("relu", False), ("fatrelu", True), ("fatrelu", False), ("drelu", True), ("relu2", True),
          ("relu2", False)]  # fmt: skip
ALL_OFF, ALL_ON = -1e4, 30.0


def make(
    rng: np.random.Generator, activation: str, gated: bool, types: tuple[int, int], n_ff: int, n_embd: int,
    shift: np.ndarray | float = 0.0, biases: bool = True, scale: float = 1.0,
) -> FFN:  # fmt: skip
    """shift: added to the keys through their bias, to switch neurons on or off."""
    key = rng.standard_normal((n_ff, n_embd)).astype(np.float32) / np.float32(n_embd**0.5)
    value = random_rows(rng, (2 if gated else 1) * n_ff, n_embd) / np.float32(n_embd**0.5)
    key_bias = (rng.standard_normal(n_ff) * biases + shift).astype(np.float32)
    return FFN(
        activation, 0.4 if activation == "fatrelu" else 0.0, gated, types[0], encode(types[0], key), types[1],
        encode(types[1], value), n_embd, key_bias if biases or np.any(shift) else None,
        rng.standard_normal(n_ff).astype(np.float32) if biases and gated else None,
        rng.standard_normal(n_embd).astype(np.float32) if biases else None, scale,
    )  # fmt: skip


def check(ffn: FFN, x: np.ndarray, n_threads: int, tolerance: float) -> np.ndarray:
    """Dense is right, exact is dense bit for bit, both count what they computed. Returns the counts of exact."""
    dense, all_of_them = ffn.run(x, "dense", n_threads)
    exact, counts = ffn.run(x, "exact", n_threads)
    assert same_bits(dense, exact)
    want, values = ffn.reference(x)
    assert close(dense, want, 1 + np.abs(want).max(), tolerance)
    assert all_of_them.sum() == ffn.n_ff
    # relu2 of a small key, and drelu's clamped up, make values of 0 from keys that fire.
    assert counts.sum() >= np.count_nonzero(values)
    return counts


@pytest.mark.parametrize(("activation", "gated"), SPARSE)
@pytest.mark.parametrize("ggml_type", formats.NATIVE, ids=NAMES.get)
def test_exact_equals_dense(activation: str, gated: bool, ggml_type: int) -> None:
    """Layers with every neuron off, every neuron on, and mixtures from lonely neurons to whole chunks."""
    rng = np.random.default_rng(len(activation) + gated)
    n_ff, n_embd = 235, {1: 100, 32: 96, 256: 256}[block_length(ggml_type)]
    x = rng.standard_normal(n_embd).astype(np.float32)
    blocks = np.repeat(rng.random(n_ff // 47) < 0.5, 47)
    patterns: dict[str, np.ndarray | float] = {
        "off": ALL_OFF, "on": ALL_ON, "half": 0.0, "blocks": np.where(blocks, ALL_ON, ALL_OFF),
        "lonely": np.where(np.arange(n_ff) == 200, ALL_ON, ALL_OFF),
    }  # fmt: skip
    for (name, shift), n_threads in zip(patterns.items(), itertools.cycle(THREADS), strict=False):
        ffn = make(rng, activation, gated, (ggml_type, ggml_type), n_ff, n_embd, shift, scale=0.7)
        counts = check(ffn, x, n_threads, 2e-5 if ggml_type in FLOATS else 2e-2)
        expected = {"off": 0, "on": n_ff, "blocks": 47 * blocks[::47].sum(), "lonely": 1}.get(name)
        assert expected is None or counts.sum() == expected
        assert name != "half" or 0.1 * n_ff < counts.sum() < 0.9 * n_ff


@pytest.mark.parametrize("n_ff", [1, 2, 31, 32, 33, 64, 65, 96, 1000, 1003])
@pytest.mark.parametrize("n_threads", THREADS)
def test_any_number_of_neurons_and_threads(n_ff: int, n_threads: int) -> None:
    rng = np.random.default_rng(n_ff)
    for (activation, gated), types in zip(
        SPARSE, itertools.cycle(itertools.combinations(formats.NATIVE, 2)), strict=False
    ):
        n_embd = max(64, *map(block_length, types))
        ffn = make(rng, activation, gated, types, n_ff, n_embd)
        check(ffn, rng.standard_normal(n_embd).astype(np.float32), n_threads, 2e-2)


def test_every_neuron_belongs_to_one_thread_and_none_gets_all_of_the_first() -> None:
    """Sorted neurons, the hot ones first: the work must not fall on thread 0."""
    rng = np.random.default_rng(5)
    shift = np.where(np.arange(640) < 160, ALL_ON, ALL_OFF)
    ffn = make(rng, "relu", True, (formats.F32, formats.F32), 640, 64, shift)
    for n_threads in (2, 3, 5):
        counts = check(ffn, rng.standard_normal(64).astype(np.float32), n_threads, 2e-5)
        assert counts.sum() == 160
        assert counts.max() <= 160 / n_threads + 32


@pytest.mark.parametrize(("activation", "gated"), [("silu", True), ("gelu", False), ("gelu_tanh", True)])
def test_dense_activations(activation: str, gated: bool) -> None:
    rng = np.random.default_rng(9)
    for n_threads, n_ff in itertools.product((1, 3), (1, 15, 100)):
        ffn = make(rng, activation, gated, (formats.F32, formats.F16), n_ff, 72)
        x = rng.standard_normal(72).astype(np.float32)
        got, counts = ffn.run(x, "dense", n_threads)
        want, _ = ffn.reference(x)
        assert close(got, want, 1 + np.abs(want).max(), 2e-5) and counts.sum() == n_ff


def test_a_key_at_the_threshold_is_off() -> None:
    rng = np.random.default_rng(2)
    for activation, threshold in (("relu", 0.0), ("fatrelu", 0.5), ("fatrelu", -0.25)):
        ffn = make(rng, activation, True, (formats.F32, formats.F32), 5, 16)
        ffn.key[:] = 0
        up = np.nextafter(np.float32(threshold), np.float32(1)) if threshold else np.finfo(np.float32).tiny
        ffn.key_bias = np.array([threshold, up, -1, threshold - 1, 2], np.float32)
        ffn.threshold = threshold
        counts = check(ffn, rng.standard_normal(16).astype(np.float32), 1, 2e-5)
        assert counts.sum() == (ffn.key_bias > threshold).sum()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_exact_equals_dense_for_any_shape(data: st.DataObject) -> None:
    activation, gated = data.draw(st.sampled_from(SPARSE))
    types = data.draw(st.tuples(st.sampled_from(formats.NATIVE), st.sampled_from(formats.NATIVE)))
    floats = all(t in FLOATS for t in types)
    unit = max(map(block_length, types))
    n_embd = unit * data.draw(st.integers(1, {1: 130, 32: 5, 256: 2}[unit]))
    n_ff, n_threads = data.draw(st.integers(1, 300)), data.draw(st.sampled_from(THREADS))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    pattern = rng.choice([ALL_OFF, ALL_ON, 0.0], n_ff, p=data.draw(st.sampled_from([(0.9, 0.1, 0), (0, 0.5, 0.5)])))
    ffn = make(rng, activation, gated, types, n_ff, n_embd, pattern, data.draw(st.booleans()))
    x = (rng.standard_normal(n_embd) * data.draw(st.sampled_from([0, 1e-6, 1, 1e5]))).astype(np.float32)
    check(ffn, x, n_threads, 2e-5 if floats else 5e-2)


@pytest.mark.parametrize("sparsity", ["exact", "dense"])
def test_a_broken_key_row_shows(sparsity: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """A NaN compares false with every threshold: the neuron must not pass for one that is off."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(tiny_model("relu").read_bytes())
    with open_gguf(path) as file:
        at = file.tensors["blk.1.ffn_gate.weight"].offset
    with path.open("r+b") as stream:
        stream.seek(at)
        stream.write(np.float32(np.nan).tobytes())
    with Engine.open(path, sparsity=sparsity, threads=2) as engine:
        assert np.isnan(engine.forward([1])).all() and np.isnan(engine.forward(list(range(2, 12)))).all()
