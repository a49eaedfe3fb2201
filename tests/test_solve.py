"""Placement programs: against brute force where that is possible, against a plain greedy where it is not.

The expected costs are written out here again, from the formulas, so that solve.py is not compared with itself.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotcold.placement.choices import Layer, Rates, chance_of_cold, layer_times, minimum_neurons
from hotcold.placement.solve import Solution, greedy, solve
from hotcold.runtime.errors import HotcoldError

RATES = Rates(cpu_read=1 / 50e9, cpu_rows=1 / 40e9, gpu_read=1 / 800e9, gpu_rows=1 / 600e9, t_sync=10e-6)


def make_layer(frequency: np.ndarray, key: int = 4096, value: int = 8192, **changes: object) -> Layer:
    f = np.asarray(frequency, np.float64)
    return replace(Layer(f, key, value, np.full(len(f), float(key)), float(value)), **changes)  # type: ignore[arg-type]


def skewed(n_layer: int, n: int, seed: int, mean: float = 0.1, equal: bool = False) -> list[np.ndarray]:
    """Zipf-like frequencies whose skew and mean differ from layer to layer."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(n_layer):
        f = np.arange(1, n + 1.0) ** (-0.9 if equal else -rng.uniform(0.5, 1.3))
        f *= mean * (1.0 if equal else rng.uniform(0.5, 2)) / f.mean()
        out.append(np.sort(np.minimum(1.0, f if equal else f * rng.uniform(0.9, 1, n)))[::-1].copy())
    return out


def seconds(layer: Layer, rates: Rates, hot: int, keys: bool) -> float:
    """max(GPU, CPU) + t_sync * P(cold), neuron by neuron."""
    f = layer.frequency
    if not layer.usable:
        return sum(layer.decide) * rates.cpu_read + sum(f) * layer.fire * rates.cpu_rows
    gpu = sum(f[:hot]) * layer.fire * rates.gpu_rows
    cpu = sum(f[hot:]) * layer.fire * rates.cpu_rows
    if keys:
        nobody = math.prod(1 - p for p in f[hot:])
        return sum(layer.decide) * rates.gpu_read + max(gpu, cpu) + rates.t_sync * (1 - nobody)
    nobody = math.prod(1 - min(1.0, d / layer.key_row) for d in layer.decide[hot:])
    gpu += sum(layer.decide[:hot]) * rates.gpu_read
    cpu += sum(layer.decide[hot:]) * rates.cpu_read
    return max(gpu, cpu) + rates.t_sync * (1 - nobody)


def n_bytes(layer: Layer, hot: int, keys: bool) -> int:
    return hot * layer.value_row + (layer.n if keys else hot) * layer.key_row


def batch_sums(n: int, batch: int) -> list[int]:
    """All neuron counts that sets of batches can have."""
    rest = n % batch
    return sorted({h + r for h in range(0, n + 1, batch) for r in (0, rest) if h + r <= n})


def best_time(layers: list[Layer], gpu_bytes: int, cpu_bytes: int | None, batch: int) -> float:
    options = []
    for layer in layers:
        hots = batch_sums(layer.n, batch) if layer.usable else [0]
        keys = (False, True) if layer.usable and layer.split_keys else (False,)
        options.append([(h, k) for h in hots for k in keys if k or layer.own_keys or h == 0])
    total = sum(layer.row * layer.n for layer in layers)
    best = math.inf
    for picked in itertools.product(*options):
        used = sum(n_bytes(layer, *p) for layer, p in zip(layers, picked, strict=True))
        if used <= gpu_bytes and (cpu_bytes is None or total - used <= cpu_bytes):
            best = min(best, sum(seconds(layer, RATES, *p) for layer, p in zip(layers, picked, strict=True)))
    return best


def best_paper(layers: list[Layer], rates: Rates, gpu_bytes: int, cpu_bytes: int | None, batch: int) -> float:
    """All sets of batches under the paper's constraints."""
    batches = [(number, layer.frequency[i : i + batch]) for number, layer in enumerate(layers)
               for i in range(0, layer.n, batch)]
    total = sum(layer.row * layer.n for layer in layers)
    least = [rates.t_sync / (layer.row * (rates.cpu_rows - rates.gpu_rows)) for layer in layers]
    best = -math.inf
    for on in itertools.product((0, 1), repeat=len(batches)):
        count = [0] * len(layers)
        for a, (number, f) in zip(on, batches, strict=True):
            count[number] += a * len(f)
        used = sum(c * layer.row for c, layer in zip(count, layers, strict=True))
        enough = all(c == 0 or c >= m - 1e-9 for c, m in zip(count, least, strict=True))
        if enough and used <= gpu_bytes and (cpu_bytes is None or total - used <= cpu_bytes):
            best = max(best, sum(float(f.sum()) for a, (_, f) in zip(on, batches, strict=True) if a))
    return best


def naive_greedy(layers: list[Layer], gpu_bytes: int, batch: int) -> float:
    """One batch, or one layer's key rows, at a time: whatever saves most seconds per byte."""
    state = [(0, False)] * len(layers)
    prefix = {(number, keys): [seconds_fast(layer, h, keys) for h in range(0, layer.n + 1, batch)]
              for number, layer in enumerate(layers) for keys in (False, True)}
    left = gpu_bytes
    while True:
        best: tuple[float, int, tuple[int, bool]] | None = None
        for number, (hot, keys) in enumerate(state):
            now = prefix[number, keys][hot // batch]
            moves = [(hot + batch, keys)] if hot < layers[number].n else []
            for move in [*moves, (hot, True)]:
                size = n_bytes(layers[number], *move) - n_bytes(layers[number], hot, keys)
                gain = now - prefix[number, move[1]][move[0] // batch]
                if 0 < size <= left and gain > 0 and (best is None or gain / size > best[0]):
                    best = gain / size, number, move
        if best is None:
            return sum(prefix[number, keys][hot // batch] for number, (hot, keys) in enumerate(state))
        _, number, move = best
        left -= n_bytes(layers[number], *move) - n_bytes(layers[number], *state[number])
        state[number] = move


def seconds_fast(layer: Layer, hot: int, keys: bool) -> float:
    return layer_times(layer, RATES, hot, keys).total


def check_fits(layers: list[Layer], solution: Solution, gpu_bytes: int, cpu_bytes: int | None = None) -> None:
    used = sum(n_bytes(layer, h, k) for layer, h, k in zip(layers, solution.hot, solution.keys, strict=True))
    assert used == solution.used <= gpu_bytes
    assert all(0 <= h <= layer.n for h, layer in zip(solution.hot, layers, strict=True))
    if cpu_bytes is not None:
        assert sum(layer.row * layer.n for layer in layers) - used <= cpu_bytes


# ---- the formulas


def test_minimum_neurons_is_the_papers_constraint() -> None:
    layer = make_layer(np.ones(10), key=1000, value=2000)
    rates = Rates(cpu_read=1e-9, cpu_rows=2e-9, gpu_read=1e-10, gpu_rows=5e-10, t_sync=9e-6)
    # 3000 bytes: 6 us on the CPU, 1.5 us on the GPU; two neurons gain 9 us
    assert minimum_neurons(layer, rates) == 2
    assert minimum_neurons(layer, replace(rates, t_sync=9.1e-6)) == 3
    assert minimum_neurons(layer, replace(rates, gpu_rows=2e-9)) == math.inf


def test_chance_of_cold() -> None:
    assert chance_of_cold(np.array([0.5, 0.5, 0.0])) == pytest.approx([0.75, 0.5, 0.0, 0.0])
    assert chance_of_cold(np.array([0.3, 1.0, 0.1])) == pytest.approx([1.0, 1.0, 0.1, 0.0])


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("hot", [0, 3, 40])
def test_times_follow_the_formula(hot: int, keys: bool) -> None:
    rng = np.random.default_rng(0)
    f = np.sort(rng.uniform(0, 0.1, 40))[::-1]
    for layer in (make_layer(f), make_layer(f, decide=4096.0 * np.minimum(1, 2 * f)), make_layer(f, usable=False)):
        at = (hot, keys) if layer.usable else (0, False)
        assert layer_times(layer, RATES, *at).total == pytest.approx(seconds(layer, RATES, *at), rel=1e-12)


def test_given_chance_of_cold_is_used() -> None:
    layer = make_layer(np.array([0.5, 0.5]), p_cold=np.array([0.9, 0.25, 0.0]))
    assert layer_times(layer, RATES, 1, True).sync == pytest.approx(0.25 * RATES.t_sync)
    assert layer_times(layer, RATES, 2, True).sync == 0


# ---- against brute force


@pytest.mark.parametrize("seed", range(12))
def test_time_is_the_best_of_all_placements(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers = []
    for number in range(3):
        n = int(rng.integers(5, 40))
        kinds = ({}, {"usable": False}, {"split_keys": False}, {"own_keys": False}, {})
        f = np.sort(rng.uniform(0, 1, n) ** rng.integers(1, 6))[::-1].copy()
        key, value = int(rng.integers(100, 90000)), int(rng.integers(100, 90000))
        kind = kinds[int(rng.integers(0, 5))] if number else {}
        if rng.random() < 0.3:
            kind = kind | {"decide": key * np.minimum(1, 3 * f)}
        layers.append(make_layer(f, key, value, **kind))
    total = sum(layer.row * layer.n for layer in layers)
    for share in (0.0, 0.1, 0.4, 0.8, 1.0):
        budget = int(total * share)
        for cpu in (None, int(total * (1 - share * 0.5))):
            best = best_time(layers, budget, cpu, batch=4)
            if best == math.inf:
                with pytest.raises(HotcoldError, match="cannot hold"):
                    solve(layers, RATES, "time", gpu_bytes=budget, cpu_bytes=cpu, batch=4)
                continue
            found = solve(layers, RATES, "time", gpu_bytes=budget, cpu_bytes=cpu, batch=4)
            assert found.objective == pytest.approx(best, rel=1e-9)
            assert found.bound <= found.objective * (1 + 1e-9) and found.status == "optimal"
            check_fits(layers, found, budget, cpu)


@pytest.mark.parametrize("seed", range(12))
def test_paper_is_the_best_of_all_sets_of_batches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers = []
    for _ in range(3):
        f = np.sort(rng.uniform(0, 1, int(rng.integers(3, 17))) ** 3)[::-1].copy()
        layers.append(make_layer(f, int(rng.integers(100, 9000)), int(rng.integers(100, 9000))))
    total = sum(layer.row * layer.n for layer in layers)
    rates = replace(RATES, t_sync=float(rng.uniform(0, 4)) * 5000 * (RATES.cpu_rows - RATES.gpu_rows))
    for share in (0.0, 0.15, 0.4, 0.7, 1.0):
        for cpu in (None, int(total * (1.02 - share))):
            best = best_paper(layers, rates, int(total * share), cpu, batch=4)
            if best == -math.inf:
                continue
            found = solve(layers, rates, "paper", gpu_bytes=int(total * share), cpu_bytes=cpu, batch=4)
            assert found.objective >= best - 1e-9  # the last, smaller batch may stand in for a part of another
            check_fits(layers, found, int(total * share), cpu)
            assert not any(found.keys)
            assert all(h == 0 or h >= minimum_neurons(layer, rates) for h, layer in zip(found.hot, layers, strict=True))
            if not any(layer.n % 4 for layer in layers):
                assert found.objective == pytest.approx(best)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_more_memory_is_never_worse(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 1000))
    layers = [make_layer(f) for f in skewed(4, data.draw(st.integers(1, 200)), seed)]
    total = sum(layer.row * layer.n for layer in layers)
    small, large = sorted(data.draw(st.tuples(st.integers(0, total), st.integers(0, total))))
    for objective, sign in (("paper", -1), ("time", 1)):
        a, b = (solve(layers, RATES, objective, gpu_bytes=b, batch=16) for b in (small, large))
        assert sign * b.objective <= sign * a.objective + 1e-12
        check_fits(layers, a, small)
        check_fits(layers, b, large)


# ---- against greedy


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("equal", [False, True])
def test_time_is_never_worse_than_greedy(share: float, equal: bool) -> None:
    layers = [make_layer(f) for f in skewed(12, 4096, 1, equal=equal)]
    budget = int(share * sum(layer.row * layer.n for layer in layers))
    found = solve(layers, RATES, "time", gpu_bytes=budget)
    first = greedy(layers, RATES, "time", gpu_bytes=budget)
    assert first is not None and found.objective <= first.objective
    assert found.objective <= naive_greedy(layers, budget, 64) * (1 + 1e-12)
    assert found.bound <= found.objective
    check_fits(layers, found, budget)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.95])
def test_paper_is_never_worse_than_the_most_frequent_batches(share: float) -> None:
    layers = [make_layer(f, key=4096 + 512 * k) for k, f in enumerate(skewed(12, 4096, 2))]
    budget = int(share * sum(layer.row * layer.n for layer in layers))
    batches = sorted(((layer.frequency[i : i + 64].sum() / (64 * layer.row), layer.row * 64, number)
                      for number, layer in enumerate(layers) for i in range(0, layer.n, 64)), reverse=True)
    left, value, counts = budget, 0.0, [0] * len(layers)
    for rate, size, number in batches:
        if size <= left:
            left, value = left - size, value + rate * size
            counts[number] += 64
    assert all(c == 0 or c >= minimum_neurons(layer, RATES) for c, layer in zip(counts, layers, strict=True))
    assert solve(layers, RATES, "paper", gpu_bytes=budget).objective >= value * (1 - 1e-12)


@pytest.mark.parametrize("objective", ["paper", "time"])
def test_a_70b_model_is_solved(objective: str) -> None:
    """80 x 28672 neurons, about 30 GiB of rows."""
    layers = [make_layer(f, key=4608, value=9216) for f in skewed(80, 28672, 3)]
    found = solve(layers, RATES, objective, gpu_bytes=15 << 30, cpu_bytes=64 << 30)
    first = greedy(layers, RATES, objective, gpu_bytes=15 << 30, cpu_bytes=64 << 30)
    assert first is not None
    sign = -1 if objective == "paper" else 1
    assert sign * found.objective <= sign * first.objective
    assert found.gap < 1e-6
    check_fits(layers, found, 15 << 30, 64 << 30)


def test_out_of_time_gives_the_greedy_answer_and_says_so() -> None:
    layers = [make_layer(f, key=4000 + 7 * k, value=9000 + 11 * k) for k, f in enumerate(skewed(16, 2048, 5))]
    budget = int(0.31 * sum(layer.row * layer.n for layer in layers))
    stopped = solve(layers, RATES, "time", gpu_bytes=budget, time_limit=0.0)
    first = greedy(layers, RATES, "time", gpu_bytes=budget)
    assert first is not None and stopped.objective <= first.objective
    if stopped.status != "optimal":
        assert stopped.status == "time limit of 0 s" and 0 <= stopped.gap < 0.1
    assert solve(layers, RATES, "time", gpu_bytes=budget).objective <= stopped.objective


# ---- edges


def test_no_budget_means_nothing_on_the_gpu() -> None:
    layers = [make_layer(f) for f in skewed(3, 100, 0)]
    for objective in ("paper", "time"):
        found = solve(layers, RATES, objective, gpu_bytes=0)
        assert found.hot == (0, 0, 0) and found.keys == (False, False, False) and found.used == 0


def test_everything_fits() -> None:
    layers = [make_layer(f) for f in skewed(3, 100, 0)]
    total = sum(layer.row * layer.n for layer in layers)
    assert solve(layers, RATES, "paper", gpu_bytes=total).hot == (100, 100, 100)
    assert solve(layers, RATES, "time", gpu_bytes=total).hot == (100, 100, 100)
    assert solve(layers, RATES, "paper", gpu_bytes=10 * total, cpu_bytes=0).hot == (100, 100, 100)


def test_a_gpu_that_gains_nothing_gets_nothing() -> None:
    layers = [make_layer(f) for f in skewed(3, 256, 0)]
    slow = replace(RATES, gpu_read=RATES.cpu_read, gpu_rows=RATES.cpu_rows)
    assert solve(layers, slow, "paper", gpu_bytes=1 << 30).hot == (0, 0, 0)


def test_key_rows_go_before_cold_values() -> None:
    """Sparse layers: the key rows are read for every token, most value rows hardly ever."""
    layers = [make_layer(np.full(1024, 0.02)) for _ in range(4)]
    found = solve(layers, RATES, "time", gpu_bytes=4 * 1024 * 4096)
    assert found.keys == (True,) * 4 and found.hot == (0,) * 4


def test_silent_and_always_firing_neurons() -> None:
    layers = [make_layer(np.zeros(128)), make_layer(np.ones(128))]
    found = solve(layers, RATES, "paper", gpu_bytes=128 * 12288)
    assert found.hot == (0, 128)
    assert math.isfinite(solve(layers, RATES, "time", gpu_bytes=128 * 12288).objective)


@pytest.mark.parametrize(
    ("frequency", "words"),
    [
        ([0.5, math.nan], "layer 1: frequency nan of neuron 1"),
        ([0.5, -0.1], "layer 1: frequency -0.1 of neuron 1"),
        ([1.5, 0.1], "layer 1: frequency 1.5 of neuron 0"),
        ([math.inf, 0.1], "layer 1: frequency inf of neuron 0"),
        ([0.1, 0.2], "layer 1: neurons are not in descending order"),
        ([], "layer 1: frequencies have shape"),
        ([[0.1]], "layer 1: frequencies have shape"),
    ],
)
def test_bad_frequencies_name_the_layer(frequency: list, words: str) -> None:
    bad = make_layer(np.array(frequency))
    with pytest.raises(HotcoldError, match=words.replace(".", r"\.")) as e:
        solve([make_layer(np.array([0.5])), bad], RATES, "time", gpu_bytes=100)
    assert "\n" not in str(e.value)


def test_bad_arguments() -> None:
    layers = [make_layer(np.array([0.5, 0.1]))]
    with pytest.raises(HotcoldError, match="objective 'speed' is unknown, choose from paper, time"):
        solve(layers, RATES, "speed", gpu_bytes=1)
    with pytest.raises(HotcoldError, match="must be at least 0"):
        solve(layers, RATES, "time", gpu_bytes=-1)
    with pytest.raises(HotcoldError, match=r"layer 0: p_cold must be 3 finite numbers"):
        solve([make_layer(np.array([0.5, 0.1]), p_cold=np.array([1.0]))], RATES, "time", gpu_bytes=1)
    with pytest.raises(HotcoldError, match=r"layer 0: decide must be 2 finite numbers"):
        solve([make_layer(np.array([0.5, 0.1]), decide=np.array([1.0, math.nan]))], RATES, "time", gpu_bytes=1)
    with pytest.raises(HotcoldError, match="use --objective time"):
        solve([make_layer(np.array([0.5]), own_keys=False)], RATES, "paper", gpu_bytes=1)
    with pytest.raises(HotcoldError, match="cannot hold the FFN's"):
        solve(layers, RATES, "time", gpu_bytes=1, cpu_bytes=1)
