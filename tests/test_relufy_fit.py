"""convert/relufy_fit.py against plain NumPy, and the file that holds the fits."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from hotcold.convert import relufy_fit
from hotcold.convert.relufy_fit import (
    Bends,
    Equations,
    LayerFit,
    balanced,
    bypass_input,
    cheapest,
    choose_bends,
    constant_gate,
    first_guess,
    fit_layer,
    reduced_rank,
    token_weights,
)
from hotcold.convert.relufy_layers import negative_log_likelihood
from hotcold.convert.relufy_model import Fits
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.kernels import reference


def normals(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_blocks_of_rows_add_up_to_least_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = normals(300, 7), normals(300, 3, seed=1)
    w = np.abs(normals(300, seed=2)) + np.float32(0.1)
    monkeypatch.setattr(relufy_fit, "PANEL", 2)
    equations = Equations(5, 2, 3)
    for start in range(0, 300, 64):
        rows = slice(start, start + 64)
        equations.add(x[rows].copy(), y[rows], w[rows])
    assert equations.rows == 300
    exact = x.astype(np.float64)
    equations.complete()
    gram = np.block([[equations.values, equations.mixed], [equations.mixed.T, equations.inputs]])
    cross = np.concatenate([equations.value_cross, equations.input_cross])
    np.testing.assert_allclose(gram, exact.T @ (w[:, None] * exact), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(cross, exact.T @ (w[:, None] * y), rtol=1e-4, atol=1e-4)


def test_token_weights_hold_outliers_down() -> None:
    y = normals(100, 8)
    y[3] *= 3000
    w = token_weights(y)
    assert w.dtype == np.float32 and w.mean() == pytest.approx(1, rel=1e-5)
    assert w[3] < 1e-5 < w.min(initial=np.inf, where=np.arange(100) != 3)
    assert np.isfinite(token_weights(np.zeros((4, 8), np.float32))).all()


def test_the_constant_gate_is_on_everywhere() -> None:
    h = normals(500, 16) * np.float32(0.3) + np.float32(1)
    c = h @ constant_gate(h, np.ones(500, np.float32))
    assert c.mean() == pytest.approx(1, rel=0.05) and c.std() < 0.4 and (c > 0).mean() > 0.98
    np.testing.assert_allclose(bypass_input(h, c), h * np.where(c > 0, c, 0)[:, None], rtol=1e-6)


@pytest.mark.parametrize("sparsity", [0.5, 0.75])
def test_bends_switch_the_wanted_share_off_where_it_matters_least(sparsity: float) -> None:
    keys, ups = normals(600, 300), normals(600, 300, seed=1)
    energy = np.where(np.arange(300) < 100, 100.0, 1.0)
    ones = np.ones(600, np.float32)
    bends = choose_bends(keys, ups, ones, ones, energy, "silu", sparsity)
    off = keys + bends.shift <= 0
    assert off.mean() == pytest.approx(sparsity, abs=0.02) and off.mean() >= sparsity - 1e-6
    assert off[:, :100].mean() < off[:, 100:].mean() - 0.05
    natural = choose_bends(keys, ups, ones, ones, np.ones(300), "gelu", None)
    assert (keys + natural.shift <= 0).mean() == pytest.approx((keys <= 0).mean(), abs=0.02)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_a_bend_imitates_the_activation_better_than_none(activation: str) -> None:
    """scale * relu(g + b) + constant is near act(g), much nearer than relu(g) with any scale and constant."""
    keys, ups, ones = normals(2000, 1) * np.float32(0.5), normals(2000, 1, seed=1), np.ones(2000, np.float32)
    wanted = reference.activate(activation, keys, 0.0) * ups
    bends = choose_bends(keys, ups, ones, ones, np.ones(1), activation, 0.01)
    got = (bends.scale * np.maximum(keys + bends.shift, 0) + bends.constant) * ups
    columns = np.concatenate([np.maximum(keys, 0) * ups, ups], axis=1)
    best = columns @ np.linalg.lstsq(columns, wanted, rcond=None)[0]
    assert np.square(got - wanted).mean() < 0.7 * np.square(best - wanted).mean()


def test_the_first_guess_is_the_ffn_that_the_bends_stand_for() -> None:
    up, down, h = normals(20, 8), normals(20, 6, seed=1), normals(50, 8, seed=2)
    down = np.concatenate([down, normals(20, 2, seed=3)], axis=1)
    bends = Bends(*(np.abs(normals(20, seed=seed)) for seed in (4, 5, 6)))
    r, ones = np.maximum(normals(50, 20, seed=7), 0), np.ones(50, np.float32)
    wanted = ((bends.scale * r + bends.constant) * (h @ up.T)) @ down
    features = np.concatenate([r * (h @ up.T), bypass_input(h, ones)], axis=1)
    np.testing.assert_allclose(features @ first_guess(bends, up, down), wanted, rtol=1e-4, atol=1e-3)


def test_cheapest_stays_within_the_budget() -> None:
    rng = np.random.default_rng(0)
    costs, fires = rng.random((5, 200)), np.sort(rng.random((5, 200)), axis=0)
    for budget in (0.3, 0.5, 0.9):
        chosen = cheapest(costs, fires, budget)
        used = np.take_along_axis(fires, chosen[None], axis=0).mean()
        assert used <= budget
        others = rng.integers(0, 5, (2000, 200))  # nothing tried at random is as good
        costs_of = np.take_along_axis(costs[None], others[:, None], axis=1)[:, 0].sum(axis=1)
        fires_of = np.take_along_axis(fires[None], others[:, None], axis=1)[:, 0].mean(axis=1)
        best = costs_of[fires_of <= used].min(initial=np.inf)
        assert np.take_along_axis(costs, chosen[None], axis=0).sum() <= best
    np.testing.assert_array_equal(cheapest(costs, fires, 0.0), fires.argmin(axis=0))
    np.testing.assert_array_equal(cheapest(costs, fires, 1.0), costs.argmin(axis=0))


def test_neurons_make_the_linear_map_they_stand_for() -> None:
    b, x = normals(12, 3).astype(np.float64) @ normals(3, 10, seed=1), normals(200, 12, seed=2)
    p, q = reduced_rank(b, (x.T @ x).astype(np.float64), 3)
    np.testing.assert_allclose(p @ q, b, atol=1e-9)  # rank 3 is all there is
    up, down = balanced(p, q, 0.05)
    assert up.shape == (3, 12) and down.shape == (3, 10)
    np.testing.assert_allclose(np.sqrt((up**2).mean(axis=1)), 0.05, rtol=1e-5)
    np.testing.assert_allclose(x @ up.T @ down, x @ b, atol=1e-4)


def test_giving_up_rank_costs_least_where_the_inputs_are() -> None:
    """Inputs that hardly vary in a direction make its part of the map worth little, however large it is."""
    x = normals(500, 3) * np.array([1, 1, 0.01], np.float32)
    b = np.diag([1.0, 2.0, 9.0])
    p, q = reduced_rank(b, (x.T @ x).astype(np.float64), 2)
    np.testing.assert_allclose((p @ q)[:2, :2], b[:2, :2], atol=0.05)
    assert abs((p @ q)[2, 2]) < 0.1


@pytest.mark.parametrize("rank", [0, 4, 12])
def test_a_layer_is_found_again(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets made of other down columns and a map of rank 4: the fit finds both, as far as its rank allows."""
    for name in ("DOWN_RIDGE", "BYPASS_RIDGE"):
        monkeypatch.setattr(relufy_fit, name, 1e-3)
    n, n_ff, d = 4000, 20, 12
    values, z = np.maximum(normals(n, n_ff), 0), normals(n, d, seed=1)
    old = normals(n_ff, d, seed=2)
    new = old + normals(n_ff, d, seed=3)
    linear = normals(d, 4, seed=4) @ normals(4, d, seed=5)
    targets = values @ new + z @ linear
    equations = Equations(n_ff, d, d)
    equations.add(np.concatenate([values, z], axis=1), targets, np.ones(n, np.float32))
    fit = fit_layer(equations, np.concatenate([old, np.zeros((d, d))]), 1.0, rank)
    assert fit.up.shape == fit.hot_down.shape == (rank, d)
    error = np.square(values @ fit.down + z @ fit.up.T @ fit.hot_down - targets).mean() / np.square(targets).mean()
    untouched = np.square(values @ old - targets).mean() / np.square(targets).mean()
    assert error < (0.9 * untouched if rank == 0 else 1e-4)


def test_nothing_to_add_changes_nothing() -> None:
    values, z, old = np.maximum(normals(500, 6), 0), normals(500, 4, seed=1), normals(6, 4, seed=2)
    equations = Equations(6, 4, 4)
    equations.add(np.concatenate([values, z], axis=1), values @ old, np.ones(500, np.float32))
    fit = fit_layer(equations, np.concatenate([old, np.zeros((4, 4))]), 1.0, 2)
    np.testing.assert_allclose(fit.down, old, atol=1e-4)
    assert np.isfinite(fit.up).all() and np.abs(fit.up.T @ fit.hot_down).max() < 1e-3


def test_negative_log_likelihood_of_huge_logits() -> None:
    logits = np.array([[1e4, 0, -1e4], [0, 0, 0]], np.float32)
    np.testing.assert_allclose(negative_log_likelihood(logits, np.array([0, 2])), [0, np.log(3)], atol=1e-6)
    for bad in (np.nan, np.inf):
        with pytest.raises(HotcoldError, match="logits are NaN or infinite"):
            negative_log_likelihood(np.array([[0, bad]], np.float32), np.array([0]))


def test_fits_come_back(tmp_path: Path) -> None:
    fits, made = Fits(tmp_path, (6, 4), 8, 2), {}
    for layer, n_ff in ((1, 4), (0, 6)):
        made[layer] = LayerFit(normals(n_ff), normals(n_ff, 8), normals(8), normals(2, 8), normals(2, 8, seed=1))
        fits[layer] = made[layer]
    for layer, fit in made.items():
        for name in ("bend", "down", "gate", "up", "hot_down"):
            np.testing.assert_array_equal(getattr(fits[layer], name), getattr(fit, name))
    fits.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = Fits(tmp_path, (6,), 8, 2)
    with open("/dev/full", "r+b", buffering=1 << 20) as fits._file:
        with pytest.raises(HotcoldError, match="for the fits of all layers until they are written, no space left"):
            fits[0] = LayerFit(normals(6), normals(6, 8), normals(8), normals(2, 8), normals(2, 8))
        fits.close()  # does not raise, either
    usage = type("Usage", (), {"free": 1 << 20})
    monkeypatch.setattr("hotcold.convert.relufy_model.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(HotcoldError, match=r"0\.02 GB needed for the fits .*, 0\.00 GB free"):
        Fits(tmp_path, (6,), 8, 2)
