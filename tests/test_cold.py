"""The CPU's part of layers on the GPU: a thread plays the GPU and sends lists, the real workers answer.

In: random matrices in the neuron-split layout. The truth is the CPU's own sparse FFN, bit for bit, and float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from one_op import FFN, FLOATS, NAMES, block_length, close, memory, same_bits
from test_ffn import ALL_OFF, ALL_ON, SPARSE, make

from hotcold.runtime import plan, program
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.engine import PATIENCE
from hotcold.runtime.kernels import formats, walk
from hotcold.runtime.mailbox import Mailbox
from hotcold.runtime.team import Team

THREADS = (1, 2, 3, 8)


class Workers:
    """The workers of an engine whose layers are all on the GPU, some of their neurons excepted."""

    def __init__(self, layers: Sequence[FFN], modes: Sequence[str], hot: Sequence[int], n_threads: int) -> None:
        self.config = stack(layers)
        self.mailbox = Mailbox(self.config)
        self.buffers = program.Buffers(self.config, n_threads, 8, 8, "f32", 0, self.mailbox)
        ops = []
        for i, (layer, mode, n) in enumerate(zip(layers, modes, hot, strict=True)):
            _, ffn, _ = layer.operators()
            ops.append(plan.Op("cold", i, (f"mail{i}",), (f"out{i}",), ffn.weights, ffn.bias, ffn.bias2, mode=mode,
                               neurons=(n, layer.n_ff)))  # fmt: skip
        self.plan = plan.Plan(self.config, "exact", tuple(ops), ())
        self.programs = program.lower(self.plan, self.buffers)
        self.counts = np.zeros((len(layers), n_threads, 2), np.int64)
        self.stamps = np.zeros((len(layers), n_threads, 3), np.int64)
        self.team = Team(self.programs, n_threads, lambda line: None)

    def run(self, seq: int, patience: float = PATIENCE) -> None:
        """The layers of one token."""
        arguments = {
            walk.A_PROGRAM: 0, walk.A_FIRST_OP: 0, walk.A_END_OP: len(self.programs[0]), walk.A_N_TOK: 1, walk.A_POS: 0,
            walk.A_FIRST_OUT: 0, walk.A_COUNTS: self.counts.ctypes.data, walk.A_ARENA: self.buffers.arena,
            walk.A_ARENA_SIZE: self.buffers.arena_size, walk.A_CYCLES: 0, walk.A_SEQ: seq,
            walk.A_PATIENCE: int(patience * 1e9), walk.A_STAMPS: self.stamps.ctypes.data,
        }  # fmt: skip
        self.team.run(arguments)

    def one(
        self, h: np.ndarray, ids: np.ndarray, vals: np.ndarray | None = None, count: int | None = None
    ) -> np.ndarray:
        """The answer of the only layer."""
        seq = self.mailbox.next_base()
        self.mailbox.host.h[0, : len(h)] = h
        self.mailbox.host.out[:] = np.nan
        self.mailbox.post(0, seq, ids, vals)
        if count is not None:
            self.mailbox.post_count(0, seq, count)
        self.run(seq)
        assert self.mailbox.answered(0, seq) == (self.mailbox.host.hdr[0] & 0xFFFFFFFF > 0)
        out: np.ndarray = self.mailbox.host.out[0]
        assert np.isnan(out[len(h) :]).all()
        return out[: len(h)].copy()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.team.close()


def stack(layers: Sequence[FFN]) -> ModelConfig:
    """The configuration of a model of these layers."""
    n, first = len(layers), layers[0].config()
    return replace(first, n_layer=n, n_ff=tuple(f.n_ff for f in layers), thresholds=tuple(f.threshold for f in layers),
                   window=(0,) * n, norm_relu=(False,) * n)  # fmt: skip


def whole(ffn: FFN, x: np.ndarray, n_threads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The CPU's own FFN of norm(x): (h, keys, answer before bias and scale, all float32)."""
    ops = ffn.operators()
    buffers = program.Buffers(ffn.config(), n_threads, 8, 8, "f32")
    lowered = program.lower(plan.Plan(ffn.config(), "exact", ops, ()), buffers)
    answer = np.zeros(buffers.shared["x"].ld // 4, np.float32)
    lowered[0][2]["dst"], lowered[0][2]["bias"], lowered[0][2]["scale"] = answer.ctypes.data, 0, 1
    buffers.values["x"][0] = x
    team = Team(lowered, n_threads, lambda line: None)
    counts = np.zeros((n_threads, 2), np.int64)
    team.run({walk.A_PROGRAM: 0, walk.A_FIRST_OP: 0, walk.A_END_OP: 3, walk.A_N_TOK: 1, walk.A_FIRST_OUT: 0,
              walk.A_COUNTS: counts.ctypes.data, walk.A_ARENA: buffers.arena,
              walk.A_ARENA_SIZE: buffers.arena_size})  # fmt: skip
    team.close()
    h = memory(buffers.private["h"], 1, 4 * len(x))[0].copy()
    return h, buffers.values["g"][0].copy(), answer[: len(x)]


def activated(ffn: FFN, keys: np.ndarray) -> np.ndarray:
    """float32 values of keys that fire, as the GPU sends them."""
    return keys * keys if ffn.activation == "relu2" else keys


def without_hot(ffn: FFN, hot: int) -> FFN:
    """The same with the first neurons off: what the cold ones add alone."""
    bias = np.zeros(ffn.n_ff, np.float32) if ffn.key_bias is None else ffn.key_bias.copy()
    bias[:hot] = ALL_OFF
    return replace(ffn, key_bias=bias)


def check(ffn: FFN, x: np.ndarray, hot: int, n_threads: int, tolerance: float) -> None:
    """Each mode gives the bits of the CPU's own FFN, which is right, and counts what it read and computed."""
    truth = without_hot(ffn, hot)
    h, keys, want = whole(truth, x, n_threads)
    after, _ = replace(truth, down_bias=None, scale=1.0).reference(x)
    assert close(want, after - x, 1 + np.abs(want).max(), tolerance)
    fired = np.flatnonzero(~(keys <= ffn.threshold)).astype(np.int32)
    rng = np.random.default_rng(hot)
    others = rng.choice(np.arange(hot, ffn.n_ff), (ffn.n_ff - hot) // 3, replace=False)
    candidates = np.union1d(fired, others).astype(np.int32)
    nothing = np.zeros(0, np.int32)
    for mode, ids, vals, count in (
        ("keys", fired, activated(ffn, keys[fired]), None),
        ("scores", candidates, None, None),
        ("all", nothing, None, ffn.n_ff - hot),
    ):
        with Workers([ffn], [mode], [hot], n_threads) as workers:
            got = workers.one(h, ids, vals, count)
            checked, computed = workers.counts[0].sum(axis=0)
            listed = len(ids) if count is None else count
            skipped, worked = workers.mailbox.visits()
            assert (skipped[0], worked[0]) == ((0, 1) if listed else (1, 0))
            if listed:
                assert same_bits(got, want), mode
                assert (checked, computed) == (0 if mode == "keys" else listed, len(fired))
            else:  # nothing was touched
                assert np.isnan(got).all() and not want.any()


@pytest.mark.parametrize(("activation", "gated"), SPARSE)
@pytest.mark.parametrize("ggml_type", formats.NATIVE, ids=NAMES.get)
def test_every_format(activation: str, gated: bool, ggml_type: int) -> None:
    rng = np.random.default_rng(len(activation) + gated)
    n_ff, n_embd = 235, {1: 100, 32: 96, 256: 256}[block_length(ggml_type)]
    x = rng.standard_normal(n_embd).astype(np.float32)
    patterns = {"off": ALL_OFF, "on": ALL_ON, "half": 0.0, "lonely": np.where(np.arange(n_ff) == 200, ALL_ON, ALL_OFF)}
    for shift, n_threads, hot in zip(patterns.values(), THREADS, (0, 0, 77, 200), strict=True):
        ffn = make(rng, activation, gated, (ggml_type, ggml_type), n_ff, n_embd, shift, scale=0.7)
        check(ffn, x, hot, n_threads, 2e-5 if ggml_type in FLOATS else 2e-2)


@pytest.mark.parametrize("n_ff", [1, 2, 31, 32, 33, 65, 96, 1003])
@pytest.mark.parametrize("n_threads", THREADS)
def test_any_number_of_neurons_and_threads(n_ff: int, n_threads: int) -> None:
    rng = np.random.default_rng(n_ff)
    pairs = itertools.cycle(itertools.combinations(formats.NATIVE, 2))
    for (activation, gated), types, part in zip(SPARSE, pairs, itertools.cycle((0, 0.3, 0.97)), strict=False):
        ffn = make(rng, activation, gated, types, n_ff, max(64, *map(block_length, types)))
        check(ffn, rng.standard_normal(ffn.n_embd).astype(np.float32), int(part * n_ff), n_threads, 2e-2)
