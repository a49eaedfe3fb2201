"""placement/predictor*.py, lowrank.py, mlp.py, signbit.py: pure functions, on planted data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from hotcold.placement import lowrank, mlp, signbit
from hotcold.placement.predictor import (
    ALWAYS,
    Predictor,
    Quality,
    Rows,
    as_stored,
    evaluate,
    export,
    fitting_type,
    quality,
)
from hotcold.placement.predictor_bias import histogram, neuron_thresholds, shift_for
from hotcold.placement.predictor_layer import (
    MIN_SAMPLES,
    Sampled,
    Wanted,
    split_contexts,
    thinned,
    train_layer,
)
from hotcold.runtime.kernels import reference

N, D, FF = 3000, 64, 96
ROWS = Rows(FF, D * 4, D * 8)


def planted(rank: int = 8, seed: int = 0, bias: float = -0.8, n: int = N) -> Sampled:
    """A layer whose key matrix has this rank; inputs of one size in all directions."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, D)).astype(np.float32)
    keys = x @ (rng.standard_normal((FF, rank)) @ rng.standard_normal((rank, D)) / (rank * D) ** 0.5).T + bias
    return sampled(x, keys.astype(np.float32), rng)


def sampled(x: np.ndarray, keys: np.ndarray, rng: np.random.Generator) -> Sampled:
    up = rng.standard_normal(keys.shape).astype(np.float32)
    return Sampled(x, keys, keys > 0, np.abs(np.maximum(keys, 0) * up), 0.0)


def contexts(n: int = N) -> np.ndarray:
    return np.arange(n) // 50


# ------------------------------------------------------------------ what the figures mean


def test_quality_by_hand() -> None:
    fired = np.array([[True, True, False, False]])
    predicted = np.array([[True, False, True, False]])
    q = quality(predicted, fired, np.array([[3.0, -1.0, 9.0, 9.0]], np.float32))
    assert q == Quality(recall=0.5, recall_magnitude=0.75, precision=0.5, density=0.5, active=0.5)


def test_quality_where_nothing_fires_or_is_predicted() -> None:
    nothing = np.zeros((3, 4), bool)
    assert quality(nothing, nothing, np.zeros((3, 4), np.float32)) == Quality(1.0, 1.0, 1.0, 0.0, 0.0)


def test_bytes_of_a_gated_layer() -> None:
    rows = Rows(n_ff=10, check=5, value=10)
    q = Quality(recall=0.5, recall_magnitude=1, precision=1, density=0.3, active=0.4)
    assert rows.exact(0.4) == pytest.approx((50 + 100 * 0.4) / 150)
    assert rows.predict(6, q) == pytest.approx((6 + 50 * 0.3 + 100 * 0.2) / 150)


def test_bytes_of_a_predictor_are_those_of_the_file() -> None:
    p = Predictor("lowrank", False, 0.0, np.zeros(FF, np.float32), np.zeros((32, D), np.float32), None,
                  np.zeros((FF, 32), np.float32), type_out=Type.Q4_0)
    assert p.n_bytes == 32 * D // 32 * 34 + FF * 18 + FF * 4
    assert p.n_parameters == 32 * D + FF * 32 + FF


def test_columns_that_are_no_whole_blocks_are_f16() -> None:
    assert fitting_type(Type.Q4_0, 48) == Type.F16
    p = as_stored(Predictor("lowrank", False, 0.0, np.zeros(4, np.float32), np.ones((32, 48), np.float32), None,
                            np.ones((4, 32), np.float32)))
    assert (p.type_in, p.type_out) == (Type.F16, Type.Q8_0)


def test_rounding_to_the_stored_type_is_done_once() -> None:
    rng = np.random.default_rng(0)
    p = Predictor("lowrank", False, 0.0, np.zeros(FF, np.float32),
                  rng.standard_normal((32, D)).astype(np.float32), None,
                  rng.standard_normal((FF, 32)).astype(np.float32), None, Type.Q8_0, Type.Q4_0)
    once = as_stored(p)
    twice = as_stored(once)
    assert once.w_in is not None and once.w_out is not None and twice.w_in is not None and twice.w_out is not None
    assert not np.array_equal(p.w_out, once.w_out)
    np.testing.assert_allclose(once.w_in, twice.w_in, rtol=2e-3, atol=1e-6)
    assert sorted(export([None, once])) == sorted(f"blk.1.{n}" for n in once.tensors())


# ------------------------------------------------------------------ low rank


def test_low_rank_recovers_a_planted_matrix() -> None:
    data = planted(rank=8)
    targets = data.keys  # not clipped: linear
    w_in, w_out, bias = lowrank.regress(data.x, targets, np.ones(FF, np.float32), 32, ridge=1e-7).of_rank(32, 0)
    scores = data.x @ w_in.T @ w_out.T + bias
    for i in range(0, FF, 7):
        assert np.corrcoef(scores[:, i], targets[:, i])[0, 1] > 0.9999


def test_low_rank_beats_a_plain_decomposition_on_uneven_inputs() -> None:
    rng = np.random.default_rng(1)
    scale = np.geomspace(10, 0.01, D)[rng.permutation(D)]
    x = (rng.standard_normal((N, D)) * scale).astype(np.float32)
    key = rng.standard_normal((FF, D)) / scale**0.5  # large weights where inputs hardly move
    y = (x @ key.T).astype(np.float32)
    w_in, w_out, bias = lowrank.regress(x[:2000], y[:2000], np.ones(FF, np.float32), 16, 1e-6).of_rank(16, 0)
    u, s, v = np.linalg.svd(key, full_matrices=False)
    plain = x @ (u[:, :16] * s[:16] @ v[:16]).T
    test = slice(2000, None)

    def explained(scores: np.ndarray) -> float:
        return float(np.mean([np.corrcoef(scores[test, i], y[test, i])[0, 1] ** 2 for i in range(FF)]))

    assert explained(x @ w_in.T @ w_out.T + bias) > explained(plain) + 0.05


def test_neurons_without_weight_take_no_part() -> None:
    data = planted()
    weights = np.ones(FF, np.float32)
    weights[:5] = 0
    regression = lowrank.regress(data.x, data.keys, weights, 32)
    assert not regression.outputs[:5].any() and regression.outputs[5:].any(axis=1).all()


def test_ranks_above_the_width_are_filled_with_zeros() -> None:
    data = planted()
    w_in, w_out, _ = lowrank.regress(data.x, data.keys, np.ones(FF, np.float32), 128).of_rank(128, 0)
    assert w_in.shape == (128, D) and w_out.shape == (FF, 128) and np.isfinite(w_in).all()


# ------------------------------------------------------------------ calibration


@pytest.mark.parametrize("target", [0.9, 0.99])
def test_calibration_meets_the_target_on_held_out_tokens(target: float) -> None:
    rng = np.random.default_rng(2)
    data = planted(seed=2, n=6000)
    noisy = data.keys + rng.standard_normal(data.keys.shape).astype(np.float32) * 0.5
    fit, choose, test = slice(0, 2000), slice(2000, 4000), slice(4000, None)
    thresholds = neuron_thresholds(histogram(noisy[fit], data.fired[fit], data.size[fit]), 2.0, target)
    margins = noisy - thresholds
    shift = shift_for(margins[choose], data.size[choose], target)
    q = quality(margins[test] > shift, data.fired[test], data.size[test])
    assert q.recall_magnitude == pytest.approx(target, abs=0.006)
    # One threshold for all neurons needs at least as many candidates.
    one = quality(noisy[test] > shift_for(noisy[choose], data.size[choose], target), data.fired[test], data.size[test])
    assert ROWS.predict(0, q) < ROWS.predict(0, one) * 1.01


def test_neurons_on_or_off_all_the_time_are_decided_by_their_bias() -> None:
    rng = np.random.default_rng(3)
    scores = rng.standard_normal((1000, 3)).astype(np.float32)
    fired = np.stack([np.ones(1000, bool), np.zeros(1000, bool), scores[:, 2] > 1], axis=1)
    thresholds = neuron_thresholds(histogram(scores, fired, fired.astype(np.float32)), 2.0, 0.999)
    assert thresholds[0] == -ALWAYS and thresholds[1] == ALWAYS
    assert thresholds[2] == pytest.approx(1, abs=0.1)


def test_calibration_where_nothing_fires() -> None:
    scores = np.zeros((10, 4), np.float32)
    nothing = np.zeros((10, 4), bool)
    assert (neuron_thresholds(histogram(scores, nothing, scores), 2.0, 0.99) == ALWAYS).all()
    assert shift_for(scores, scores, 0.99) == 0


def test_split_keeps_contexts_whole() -> None:
    names = contexts()
    split = split_contexts(names, seed=5)
    parts = [set(names[p]) for p in (split.fit, split.choose, split.test)]
    assert not parts[0] & parts[1] and not parts[0] & parts[2] and not parts[1] & parts[2]
    assert sum(map(len, parts)) == len(set(names)) and all(parts)
    few = split_contexts(np.zeros(100, np.int64), 0)
    assert [len(few.fit), len(few.choose), len(few.test)] == [70, 15, 15]


def test_wide_layers_use_fewer_samples() -> None:
    assert len(thinned(8192, 1792)) == 8192
    assert MIN_SAMPLES <= len(thinned(8192, 1 << 15)) < 8192


# ------------------------------------------------------------------ signs


@pytest.mark.parametrize("n_embd", [1, 31, 32, 33, 63, 64, 65, 101])
def test_signs_equal_a_naive_count(n_embd: int) -> None:
    rng = np.random.default_rng(n_embd)
    keys, x = rng.standard_normal((7, n_embd)).astype(np.float32), rng.standard_normal((5, n_embd)).astype(np.float32)
    keys[0, 0], x[0, 0] = 0.0, -0.0  # neither is negative
    planes = reference.sign_planes(keys)
    assert planes.shape == (7, 2 * -(-n_embd // 64)) and planes.dtype == np.int32
    for j in range(n_embd):
        np.testing.assert_array_equal((planes[:, j // 32] >> (j % 32)) & 1, keys[:, j] < 0)
    naive = np.array([[sum(1 if (a < 0) == (b < 0) else -1 for a, b in zip(row, k, strict=True)) for k in keys]
                      for row in x])
    np.testing.assert_array_equal(signbit.agreement(planes, x), naive)


# ------------------------------------------------------------------ nets


def bumps(n: int = 4000) -> tuple[Sampled, np.ndarray]:
    """Neurons that fire where one input is near 0: no linear score finds that out."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((n, 8)).astype(np.float32)
    keys = (0.6 - np.abs(x[:, rng.integers(0, 4, 32)])).astype(np.float32)
    return sampled(x, keys, rng), np.arange(n)


def test_a_net_learns_what_no_line_divides() -> None:
    data, _ = bumps()
    fit, stop = slice(0, 3000), slice(3000, None)
    rate = data.fired[fit].mean(axis=0).astype(np.float32)
    regression = lowrank.regress(data.x[fit], lowrank.key_targets(data.keys[fit], 0.0), np.ones(32, np.float32), 32)
    start = mlp.beginning(regression, 32, rate, 0)
    watched = mlp.weighted(data.x[stop], data.fired[stop], data.size[stop])
    before = mlp.accuracy(start, watched)
    settings = mlp.Settings(seed=0, epochs=30, batch=64, rate=5e-2, patience=30)
    _, after = mlp.train(start, mlp.weighted(data.x[fit], data.fired[fit], data.size[fit]), watched, settings)
    assert after > 0.95 and before < 0.75


def test_the_same_seed_trains_the_same_net() -> None:
    data, split = planted(n=700), split_contexts(contexts(700), 0)
    results = [train_layer(data, split, ROWS, Wanted("mlp", 0.9, rank=32, seed=seed), 0.6, 10**6) for seed in (1, 1, 2)]
    a, b, c = [r.predictor for r in results]
    assert a is not None and b is not None and c is not None
    np.testing.assert_array_equal(a.w_out, b.w_out)
    assert not np.array_equal(a.w_out, c.w_out)


def sizes_tried(start: int, most: int, skewed: bool, accuracy: dict[int, float], cost: dict[int, float]) -> list[int]:
    tried = []

    def attempt(hidden: int) -> mlp.Trial:
        tried.append(hidden)
        return mlp.Trial(hidden, accuracy[hidden], cost[hidden])

    tried.append(mlp.adapt_size(start, most, skewed, attempt).hidden)
    return tried


def test_a_skewed_layer_shrinks_while_accurate() -> None:
    accuracy = {96: 0.99, 64: 0.96, 32: 0.94}
    cost = {96: 0.5, 64: 0.45, 32: 0.4}
    assert sizes_tried(96, 256, True, accuracy, cost) == [96, 64, 32, 64]  # the last is the choice
    assert sizes_tried(96, 256, False, accuracy, cost) == [96, 96]


def test_an_inaccurate_layer_grows_while_it_pays() -> None:
    accuracy = {32: 0.9, 64: 0.93, 96: 0.951, 128: 0.97}
    assert sizes_tried(32, 256, False, accuracy, {32: 0.5, 64: 0.4, 96: 0.3}) == [32, 64, 96, 96]
    assert sizes_tried(32, 64, False, accuracy, {32: 0.5, 64: 0.4}) == [32, 64, 64]  # the limit
    assert sizes_tried(32, 256, True, accuracy, {32: 0.5, 64: 0.4, 96: 0.45}) == [32, 64, 96, 64]


def test_a_layer_that_growing_makes_dearer_shrinks() -> None:
    accuracy = {32: 0.8, 64: 0.85, 96: 0.9, 128: 0.92}
    cost = {32: 0.4, 64: 0.41, 96: 0.42, 128: 0.43}
    assert sizes_tried(96, 256, False, accuracy, cost) == [96, 128, 64, 32, 32]


def test_hidden_sizes_fit_the_budget() -> None:
    for budget in (0, 5000, 10_000, 50_000):
        hidden = mlp.most_hidden(budget, D, FF)
        assert hidden % mlp.STEP == 0
        assert hidden * (D + 1 + FF) + FF <= budget or hidden == 0
    assert mlp.start_size(0.1, 512) < mlp.start_size(0.6, 512) <= 512


def test_a_net_over_the_budget_is_not_made() -> None:
    data, split = planted(n=1000), split_contexts(contexts(1000), 0)
    result = train_layer(data, split, ROWS, Wanted("mlp", 0.9), 0.6, budget=1000)
    assert result.predictor is None and "budget" in result.note and result.predict == result.exact


# ------------------------------------------------------------------ a layer


@pytest.mark.parametrize("kind", ["lowrank", "mlp"])
def test_a_layer_is_predicted_with_fewer_bytes_than_exact(kind: str) -> None:
    data, split = planted(rank=4), split_contexts(contexts(), 0)
    result = train_layer(data, split, ROWS, Wanted(kind, 0.98), 0.6, 10**6)
    assert result.predictor is not None and result.predict < result.exact
    assert result.quality.recall_magnitude == pytest.approx(0.98, abs=0.01)
    again = evaluate(result.predictor, data.x[split.test], data.fired[split.test], data.size[split.test])
    assert again == result.quality


def test_where_predicting_does_not_pay_the_layer_runs_exact() -> None:
    rng = np.random.default_rng(6)
    x = rng.standard_normal((1500, D)).astype(np.float32)
    data = sampled(x, rng.standard_normal((1500, FF)).astype(np.float32), rng)  # has nothing to do with x
    result = train_layer(data, split_contexts(contexts(1500), 0), ROWS, Wanted("lowrank", 0.999), 0.6, 0)
    assert result.predictor is None and "exact" in result.note
    assert result.predict == result.exact


def test_rank_can_be_given() -> None:
    data, split = planted(n=1000), split_contexts(contexts(1000), 0)
    result = train_layer(data, split, ROWS, Wanted("lowrank", 0.9, rank=64), 0.6, 0)
    assert result.rank == 64


def test_signbit_is_calibrated_too() -> None:
    rng = np.random.default_rng(7)
    x, key = (rng.standard_normal(shape).astype(np.float32) for shape in ((N, D), (FF, D)))
    data = replace(sampled(x, x @ key.T - 12, rng), signs=reference.sign_planes(key))
    result = train_layer(data, split_contexts(contexts(), 0), ROWS, Wanted("signbit", 0.95), 0.6, 0)
    assert result.predictor is not None and result.quality.recall_magnitude == pytest.approx(0.95, abs=0.02)
    assert result.quality.density < 0.6
