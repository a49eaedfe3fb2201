"""The CPU's part of a layer on the GPU: what the workers answer to a list, and what they refuse.

In: random matrices in the neuron-split layout. The truth is the CPU's own sparse FFN, bit for bit, and float64.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from cold_workers import Workers
from one_op import FFN, FLOATS, NAMES, block_length, close, memory, same_bits
from test_ffn import ALL_OFF, ALL_ON, SPARSE, make

from hotcold.runtime import plan, program
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.kernels import formats, walk
from hotcold.runtime.mailbox import LAST_NUMBER, Mailbox
from hotcold.runtime.team import Team

THREADS = (1, 2, 3, 8)


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


def toy(n_ff: int = 70, n_embd: int = 24, shift: np.ndarray | float = 0.0, seed: int = 0, gated: bool = True) -> FFN:
    f32 = (formats.F32, formats.F32)
    return make(np.random.default_rng(seed), "relu", gated, f32, n_ff, n_embd, shift)


@pytest.mark.parametrize(("activation", "gated"), [("silu", True), ("gelu", False)])
@pytest.mark.parametrize("threshold", [0.0, 0.05])
def test_activations_that_are_never_0(activation: str, gated: bool, threshold: float) -> None:
    """The CPU reads its own key rows. Under a threshold on magnitudes, neurons are off by their value."""
    rng = np.random.default_rng(4)
    ffn = make(rng, activation, gated, (formats.Q8_0, formats.F16), 100, 96)
    ffn.threshold, ffn.down_bias = threshold, None
    for n_threads, (mode, ids) in itertools.product((1, 3), (("all", []), ("scores", range(100)))):
        h, _, want = whole(ffn, rng.standard_normal(96).astype(np.float32), n_threads)
        with Workers([ffn], [mode], [0], n_threads) as workers:
            assert same_bits(workers.one(h, np.array(ids, np.int32), count=100), want)
            checked, computed = workers.counts[0].sum(axis=0)
            assert checked == 100 and (0 < computed < 100 if threshold else computed == 100)


def test_what_is_not_a_number_shows() -> None:
    ffn = toy()
    h = np.ones(24, np.float32)
    ffn.key.view(np.float32)[60, 3] = np.nan
    for mode in ("scores", "all"):
        with Workers([ffn], [mode], [50], 2) as workers:
            assert np.isnan(workers.one(h, np.array([60], np.int32), count=1 if mode == "scores" else 20)).all()
    with Workers([toy()], ["keys"], [50], 2) as workers:
        assert np.isnan(workers.one(h, np.array([60], np.int32), np.array([np.nan], np.float32))).all()


WRONG = {
    "descending": [55, 54], "twice": [60, 60], "below 0": [-1], "one of the GPU's": [49], "past the end": [51, 70],
    "never written": [-1] * 20, "too many": list(range(50, 71)), "huge": [2**31 - 1],
}  # fmt: skip


@pytest.mark.parametrize("mode", ["keys", "scores"])
@pytest.mark.parametrize("ids", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("n_threads", [1, 3])
def test_no_list_becomes_an_address_unchecked(mode: str, ids: list[int], n_threads: int) -> None:
    h, good = np.ones(24, np.float32), np.array([50, 69], np.int32)
    with Workers([toy()], [mode], [50], n_threads) as workers:
        want = workers.one(h, good, np.ones(2, np.float32))
        for _ in range(3):
            with pytest.raises(HotcoldError, match="layer 0: what came from the GPU is no list") as caught:
                workers.one(h, np.array(ids, np.int32), np.ones(len(ids), np.float32))
            assert "\n" not in str(caught.value)
        assert same_bits(workers.one(h, good, np.ones(2, np.float32)), want)


def test_a_header_of_an_absurd_length() -> None:
    with Workers([toy()], ["keys"], [0], 2) as workers, pytest.raises(HotcoldError, match="layer 0"):
        workers.one(np.ones(24, np.float32), np.array([3], np.int32), np.ones(1, np.float32), count=2**32 - 1)


def test_an_empty_program_runs() -> None:
    """As of an engine whose GPU computes all layers alone. Runs follow each other without one being lost."""
    with Workers([toy()], ["keys"], [0], 3) as workers:
        full, empty = workers.programs[0], 0
        for i in range(300):
            if i % 3:
                empty += 1
                workers.programs = (full[:0], full[:0])
                workers.run(0)
                workers.programs = (full, full[:0])
            else:
                out = workers.one(np.ones(24, np.float32), np.array([7], np.int32), np.ones(1, np.float32))
                assert np.isfinite(out).all()
        assert empty == 200 and workers.mailbox.visits()[1][0] == 100


def test_layers_of_the_cpu_come_before() -> None:
    """One program: a layer of the CPU, then cold neurons of two layers. Barriers are where they must be."""
    layers = [toy(seed=i) for i in range(3)]
    x = np.random.default_rng(1).standard_normal(24).astype(np.float32)
    with Workers(layers, ["keys"] * 3, [0] * 3, 3) as workers:
        ops = layers[0].operators() + workers.plan.token[1:]
        mixed = replace(workers.plan, token=ops)
        lowered = program.lower(mixed, workers.buffers)[0]
        assert list(lowered["sync"]) == [0, 1, 1, 0, 1]  # not between the cold ones
    after, _ = layers[0].run(x, "exact", 3)
    with Workers(layers, ["keys"] * 3, [0] * 3, 3, first=layers[0].operators()) as workers:
        for _ in range(50):
            workers.buffers.values["x"][0] = x
            seq = workers.mailbox.next_base()
            ids, vals = np.arange(70, dtype=np.int32), np.ones(70, np.float32)
            for layer in (1, 2):
                workers.mailbox.host.h[layer, :24] = x
                workers.mailbox.post(layer, seq + layer, ids, vals)
            workers.run(seq)
            assert same_bits(workers.buffers.values["x"][0], after)
            for layer in (1, 2):
                rows = layers[layer].value.view(np.float32).astype(np.float64)
                want = (rows[::2] @ x + layers[layer].up_bias) @ rows[1::2]
                assert close(workers.mailbox.host.out[layer, :24], want, np.abs(want).max(), 1e-4)


def test_memory_is_taken_for_layers_of_the_cpu_only() -> None:
    with Workers([toy()] * 4, ["keys"] * 4, [0] * 4, 1) as workers:
        c = replace(workers.config, n_ctx_train=4096)
    cache = 2 * c.n_head_kv * 4096 * 4 * c.head_dim
    sizes = [program.Buffers.estimate(c, 2, 4096, 8, "f32", n) for n in (0, 1, 4, None)]
    assert np.diff(sizes).tolist() == [cache, 3 * cache, 0]
    assert len(program.Buffers(c, 2, 4096, 8, "f32", 1).cache) == 1
    assert plan.Plan(c, "exact", workers.plan.token, ()).cached_layers == 0


def test_times_are_taken_when_asked() -> None:
    with Workers([toy()] * 2, ["keys"] * 2, [0] * 2, 2) as workers:
        seq = workers.mailbox.next_base()
        workers.mailbox.post_count(0, seq, 0)
        workers.mailbox.post(1, seq + 1, np.array([3], np.int32), np.ones(1, np.float32))
        workers.run(seq)
        listens, received, answered = np.moveaxis(workers.stamps, -1, 0)
        assert (listens > 0).all() and (listens <= received).all()
        assert (answered[0] == 0).all() and (answered[1] >= received[1]).all() and (listens[1] >= received[0]).all()


# ------------------------------------------------------------------ the mailbox alone


def test_numbers_begin_anew_before_they_end() -> None:
    with Workers([toy()] * 3, ["keys"] * 3, [0] * 3, 2) as workers:
        box = workers.mailbox
        bases = [box.next_base() for _ in range(3)]
        assert bases == [1, 5, 9]
        h, ids, vals = np.ones(24, np.float32), np.array([7], np.int32), np.ones(1, np.float32)
        outs = []
        box._next = LAST_NUMBER - 9
        for _ in range(5):
            base = box.next_base()
            assert 1 <= base and base + 3 <= LAST_NUMBER
            for layer in range(3):
                assert not box.answered(layer, base + layer)
                box.host.h[layer, :24] = h
                box.post(layer, base + layer, ids, vals)
            workers.run(base)
            assert all(box.answered(layer, base + layer) for layer in range(3))
            outs.append(box.host.out[:, :24].copy())
        assert base < 100 and all(same_bits(out, outs[0]) for out in outs)


def test_what_the_mailbox_says() -> None:
    shapes = []

    def pinned(shape: tuple[int, ...], dtype: type) -> tuple[np.ndarray, str]:
        shapes.append(shape)
        return np.zeros(shape, dtype), f"device {len(shapes)}"

    config = toy(n_ff=70).config()
    box = Mailbox(config, pinned)
    assert box.device.hdr == "device 1" and box.device.abort == "device 8"
    assert box.host.ids.shape == box.host.vals.shape == (1, 80) and box.host.done.shape == (1, 8)
    assert box.pinned_bytes == 8 + 2 * 4 * 80 + 2 * 4 * 32 + 64 + 8
    assert box.given_up is None
    box.host.status[0] = 1
    box.stop_waiting()
    assert box.given_up == 0 and box.host.abort[0]
    box.reset()
    assert box.given_up is None and not box.host.abort[0]
