"""runtime/trace.py: stages run in turn are the block program; activations can be read and replaced in between."""

from __future__ import annotations

import numpy as np
import pytest
from small_models import Spec, write_model

from hotcold.runtime.engine import Engine
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.trace import Trace

TOKENS = np.arange(40) * 7 % 101


def run_layers(trace: Trace, tokens: np.ndarray, pos: int) -> np.ndarray:
    n = len(tokens)
    trace.embed(tokens, pos)
    for layer in range(trace.config.n_layer):
        trace.attention(layer, n, pos)
        trace.keys(layer, n)
        trace.values(layer, n)
        trace.down(layer, n)
    return trace.logits(n)


@pytest.mark.parametrize("layout", ["neuron-split", "stock"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_stages_are_the_block_program(tmp_path, layout, gated, threads):
    path = tmp_path / "model.gguf"
    write_model(path, Spec(layout=layout, gated=gated, patterns=("mixed", "free", "free")))
    with Engine.open(path, sparsity="dense", threads=threads) as engine:
        expected = engine.forward(TOKENS, "all")
    with Trace.open(path, threads=threads, n_ctx=len(TOKENS)) as trace:
        got = np.concatenate([run_layers(trace, TOKENS[:24], 0), run_layers(trace, TOKENS[24:], 24)])
    np.testing.assert_array_equal(got, expected)


def test_layers_one_after_the_other_for_several_blocks(tmp_path):
    """Every layer has its own cache, so all blocks may pass a layer before the next layer begins."""
    path = tmp_path / "model.gguf"
    write_model(path, Spec())
    blocks = [(0, TOKENS[:16]), (16, TOKENS[16:])]
    with Trace.open(path, threads=1, n_ctx=len(TOKENS)) as trace:
        expected = np.concatenate([run_layers(trace, tokens, pos) for pos, tokens in blocks])
        x = []
        for pos, tokens in blocks:
            trace.embed(tokens, pos)
            x.append(trace.x[: len(tokens)].copy())
        for layer in range(trace.config.n_layer):
            for i, (pos, tokens) in enumerate(blocks):
                n = len(tokens)
                trace.x[:n] = x[i]
                trace.attention(layer, n, pos)
                trace.keys(layer, n)
                trace.values(layer, n)
                trace.down(layer, n)
                x[i] = trace.x[:n].copy()
        got = []
        for i, (_, tokens) in enumerate(blocks):
            trace.x[: len(tokens)] = x[i]
            got.append(trace.logits(len(tokens)))
    np.testing.assert_array_equal(np.concatenate(got), expected)


def test_values_can_be_replaced(tmp_path):
    path = tmp_path / "model.gguf"
    write_model(path, Spec(activation="silu"))
    n = 12
    with Trace.open(path, threads=2, n_ctx=n) as trace:
        n_ff = trace.config.n_ff[0]
        trace.embed(TOKENS[:n])
        trace.attention(0, n, 0)
        before = trace.x[:n].copy()
        trace.keys(0, n)
        trace.g[:n, :n_ff] = 0
        trace.down(0, n)
        np.testing.assert_array_equal(trace.x[:n], before)


def test_fired_neurons_are_those_with_a_value(tmp_path):
    path = tmp_path / "model.gguf"
    write_model(path, Spec(patterns=("free", "off", "on", "mixed")))
    n = 12
    with Trace.open(path, threads=1, n_ctx=n) as trace:
        trace.embed(TOKENS[:n])
        for layer, share in enumerate((None, 0.0, 1.0, None)):
            trace.attention(layer, n, 0)
            trace.keys(layer, n)
            fired = trace.fired(layer, n)
            trace.values(layer, n)
            np.testing.assert_array_equal(fired, trace.g[:n, : trace.config.n_ff[layer]] != 0)
            assert share is None or fired.mean() == share
            trace.down(layer, n)


def test_what_does_not_fit_is_an_error(tmp_path):
    path = tmp_path / "model.gguf"
    write_model(path, Spec())
    with Trace.open(path, threads=1, n_ctx=16) as trace:
        for call in (lambda: trace.embed(TOKENS[:17]), lambda: trace.embed([]), lambda: trace.attention(0, 4, 13)):
            with pytest.raises(HotcoldError, match="allowed are 1 to 16|do not fit into a context of 16"):
                call()
        with pytest.raises(HotcoldError, match="outside the vocabulary"):
            trace.embed([5000])
