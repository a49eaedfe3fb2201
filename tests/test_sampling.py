"""sampling.py against a plain slow reference, and its corner cases."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.sampling import Sampler, SamplingParams, _candidates


def reference_candidates(logits: list[float], params: SamplingParams) -> list[int]:
    """llama.cpp's chain, one filter after the other on a sorted list."""
    left = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.top_k > 0:
        left = left[: params.top_k]
    if params.top_p < 1:
        weights = [math.exp(logits[i] - logits[left[0]]) for i in left]
        total, running, kept = sum(weights), 0.0, []
        for i, w in zip(left, weights, strict=True):
            kept.append(i)
            running += w
            if running / total >= params.top_p:
                break
        left = kept
    if params.min_p > 0:
        least = np.float32(logits[left[0]]) + np.float32(math.log(params.min_p))
        left = [i for i in left if logits[i] >= least]
    return left


# Multiples of 1/4 give many ties, and sums that do not fall within rounding of top_p by accident.
logit_lists = st.lists(st.integers(-60, 60).map(lambda i: i / 4), min_size=1, max_size=80)
some_params = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 5),
    top_k=st.integers(-1, 100),
    top_p=st.floats(0.01, 1.2).map(lambda p: round(p, 5) + 3e-7),
    min_p=st.sampled_from([0.0, 0.01, 0.05, 0.3, 1.0]),
    seed=st.integers(0, 1000),
)


@settings(deadline=None, max_examples=300)
@given(logit_lists, some_params)
def test_candidates_equal_the_slow_reference(logits: list[float], params: SamplingParams) -> None:
    ids, values = _candidates(np.array(logits, np.float32), params)
    assert ids.tolist() == reference_candidates(logits, params)
    assert values.tolist() == [logits[i] for i in ids]


@settings(deadline=None, max_examples=100)
@given(logit_lists, some_params)
def test_a_drawn_token_is_one_of_the_candidates(logits: list[float], params: SamplingParams) -> None:
    sampler = Sampler(params)
    allowed = set(reference_candidates(logits, params))
    assert {sampler.sample(np.array(logits, np.float32)) for _ in range(5)} <= allowed


def test_large_vocabulary_where_top_p_needs_more_than_the_first_sorted_part() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 0.1, 20_000).astype(np.float32)  # nearly flat: top-p keeps thousands
    params = SamplingParams(top_k=0, top_p=0.9, min_p=0)
    ids, _ = _candidates(logits, params)
    expected = reference_candidates([float(x) for x in logits], params)
    assert abs(len(ids) - len(expected)) <= 1  # a sum of 18000 terms may cross 0.9 one term earlier
    n = min(len(ids), len(expected))
    assert n > 10_000
    assert ids[:n].tolist() == expected[:n]


def test_top_k_on_all_equal_logits_takes_the_lowest_ids() -> None:
    ids, _ = _candidates(np.zeros(150_000, np.float32), SamplingParams(top_k=5, top_p=1, min_p=0))
    assert ids.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_temperature_zero_is_argmax_and_the_lowest_id_wins_a_tie(temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature))
    assert sampler.sample(np.array([1, 3, 3, 2], np.float32)) == 1


def test_a_tiny_temperature_does_not_overflow() -> None:
    sampler = Sampler(SamplingParams(temperature=1e-300, top_k=0, top_p=1, min_p=0, seed=1))
    assert sampler.sample(np.array([-1e30, 5, 1e30], np.float32)) == 2


def test_draws_follow_the_tempered_distribution() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2])).astype(np.float32)
    sampler = Sampler(SamplingParams(temperature=0.5, top_k=0, top_p=1, min_p=0, seed=7))
    counts = Counter(sampler.sample(logits) for _ in range(20_000))
    expected = np.array([0.25, 0.09, 0.04]) / 0.38  # p ** (1 / 0.5), normalised
    assert np.allclose([counts[i] / 20_000 for i in range(3)], expected, atol=0.02)


def test_top_k_larger_than_the_vocabulary_is_all() -> None:
    ids, _ = _candidates(np.arange(4, dtype=np.float32), SamplingParams(top_k=99, top_p=1, min_p=0))
    assert ids.tolist() == [3, 2, 1, 0]


def test_minus_infinity_is_never_drawn() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf], np.float32)
    sampler = Sampler(SamplingParams(temperature=100, top_k=0, top_p=1, min_p=0, seed=3))
    assert {sampler.sample(logits) for _ in range(50)} == {1}


@pytest.mark.parametrize("bad", [[0.0, math.nan], [0.0, math.inf], [-math.inf, -math.inf]])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_broken_logits_are_an_error_not_a_token(bad: list[float], temperature: float) -> None:
    with pytest.raises(HotcoldError, match="largest logit"):
        Sampler(SamplingParams(temperature=temperature)).sample(np.array(bad, np.float32))


def test_same_seed_same_tokens_and_other_seed_other_tokens() -> None:
    logits = np.zeros(50, np.float32)

    def draw(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(top_k=0, top_p=1, min_p=0, seed=seed))
        return [sampler.sample(logits) for _ in range(20)]

    assert draw(5) == draw(5)
    assert draw(5) != draw(6)


def test_a_random_seed_can_be_repeated() -> None:
    logits = np.zeros(1000, np.float32)
    first = Sampler(SamplingParams(top_k=0, top_p=1, seed=-1))
    again = Sampler(SamplingParams(top_k=0, top_p=1, seed=first.seed))
    assert [first.sample(logits) for _ in range(5)] == [again.sample(logits) for _ in range(5)]


def test_repeat_penalty_divides_positive_and_multiplies_negative_logits_once() -> None:
    sampler = Sampler(SamplingParams(temperature=0, repeat_penalty=2.0))
    sampler.accept([0, 0, 2])
    logits = np.array([4.0, 2.5, -1.0, -1.5], np.float32)
    assert sampler._penalized(logits).tolist() == [2.0, 2.5, -2.0, -1.5]
    assert logits.tolist() == [4.0, 2.5, -1.0, -1.5]
    assert sampler.sample(logits) == 1
    sampler.forget()
    assert sampler.sample(logits) == 0


@pytest.mark.parametrize(("last_n", "penalized"), [(0, set()), (2, {1, 2}), (-1, {0, 1, 2})])
def test_repeat_penalty_looks_back_over_the_last_n(last_n: int, penalized: set[int]) -> None:
    sampler = Sampler(SamplingParams(repeat_penalty=2.0, repeat_last_n=last_n))
    sampler.accept([0, 1, 2])
    out = sampler._penalized(np.full(4, 4, np.float32))
    assert {i for i in range(4) if out[i] != 4} == penalized


def test_penalty_ignores_ids_outside_the_logits() -> None:
    sampler = Sampler(SamplingParams(temperature=0, repeat_penalty=2.0))
    sampler.accept([-1, 7])
    assert sampler.sample(np.array([0.0, 1.0], np.float32)) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan), ("temperature", math.inf), ("temperature", "hot"), ("top_p", 0.0), ("top_p", -1.0),
        ("min_p", 1.5), ("repeat_penalty", 0.0), ("repeat_penalty", -1.0), ("repeat_last_n", -2), ("seed", -2),
        ("top_k", 1.5), ("seed", True), ("temperature", True), ("temperature", np.True_), ("top_p", np.float32("nan")),
        ("temperature", 10**400), ("temperature", 1j), ("top_k", np.float32(4)), ("top_k", np.True_),
    ],
)  # fmt: skip
def test_params_outside_their_range_are_named(field: str, value: object) -> None:
    with pytest.raises(HotcoldError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_numbers_of_any_kind_mean_the_same() -> None:
    kinds = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(7), top_p=Fraction(1, 2), min_p=np.float16(0.25),  # type: ignore[arg-type]
        repeat_penalty=np.int32(1), repeat_last_n=np.uint8(3), seed=np.uint64(2**63),  # type: ignore[arg-type]
    )  # fmt: skip
    assert kinds == SamplingParams(0.5, 7, 0.5, 0.25, 1.0, 3, 2**63)
    types = {type(value) for value in vars(kinds).values()}
    assert types == {int, float}


def test_logits_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(HotcoldError, match="n_vocab"):
        Sampler(SamplingParams()).sample(np.zeros((2, 3), np.float32))
