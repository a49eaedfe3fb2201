"""Rotary tables against transformers' frequencies and against formulas written another way."""

import cmath
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hotcold.runtime.config import Rope
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.rope import rope_frequencies, rope_table

GOLDEN = np.load(Path(__file__).with_name("golden") / "rope.npz")
PLAIN = Rope(n_dims=64, interleaved=True, freq_base=10000.0, scaling="none")
ALL_KEYS = Rope(80, False, 500000.0, "yarn", 8.0, 512, 1.0, 1.5 / (1 + 0.1 * math.log(8)), 16.0, 2.0)
YARN = replace(PLAIN, scaling="yarn", factor=4.0, orig_ctx=2048)


def llama3_factors(n_dims, base, factor, low, high, context):
    """The content of rope_freqs.weight, one pair at a time."""
    factors = []
    for i in range(n_dims // 2):
        turns = context * base ** (-2 * i / n_dims) / (2 * math.pi)
        if turns > high:
            factors.append(1.0)
        elif turns < low:
            factors.append(factor)
        else:
            share = (turns - low) / (high - low)
            factors.append(1 / (share + (1 - share) / factor))
    return np.array(factors, np.float32)


@pytest.mark.parametrize(
    ("name", "rope", "factors"),
    [
        ("linear", replace(PLAIN, scaling="linear", factor=4.0), None),
        ("yarn", YARN, None),
        ("yarn_qwen", replace(YARN, n_dims=128, freq_base=1e6, orig_ctx=32768), None),
        ("yarn_all_keys", ALL_KEYS, None),
        ("llama3", replace(PLAIN, freq_base=500000.0), llama3_factors(64, 500000.0, 32.0, 1.0, 4.0, 8192)),
    ],
    ids=["linear", "yarn", "yarn_qwen", "yarn_all_keys", "llama3"],
)  # fmt: skip
def test_transformers_computes_the_same(name, rope, factors):
    frequencies, magnitude = rope_frequencies(rope, factors)
    np.testing.assert_allclose(frequencies, GOLDEN[f"{name}.frequencies"], rtol=2e-6)
    assert magnitude == pytest.approx(float(GOLDEN[f"{name}.magnitude"]), rel=1e-6)
    cos, sin = rope_table(rope, 40, factors)
    angles = np.outer(np.arange(40), GOLDEN[f"{name}.frequencies"].astype(np.float64))
    np.testing.assert_allclose(cos, np.cos(angles) * magnitude, atol=2e-5)
    np.testing.assert_allclose(sin, np.sin(angles) * magnitude, atol=2e-5)


def test_table_is_the_powers_of_one_turn():
    cos, sin = rope_table(PLAIN, 300)
    assert cos.shape == sin.shape == (300, 32) and cos.dtype == sin.dtype == np.float32
    for pair in (0, 1, 17, 31):
        turn = cmath.exp(1j * 10000.0 ** (-pair / 32))
        value = 1.0 + 0j
        for position in range(300):
            assert abs(value - complex(cos[position, pair], sin[position, pair])) < 1e-6
            value *= turn


def test_rows_do_not_depend_on_the_length_of_the_table():
    long_cos, long_sin = rope_table(YARN, 4100)  # more than one block of rows
    cos, sin = rope_table(YARN, 5)
    np.testing.assert_array_equal(long_cos[:5], cos)
    np.testing.assert_array_equal(long_sin[:5], sin)
    frequencies, magnitude = rope_frequencies(YARN)
    np.testing.assert_allclose(long_cos[4099], np.cos(4099 * frequencies) * magnitude, rtol=1e-6, atol=1e-6)


def test_late_positions_are_exact():
    cos, _ = rope_table(PLAIN, 100001)
    assert cos[100000, 0] == np.float32(math.cos(100000.0))


def yarn_one_pair(rope, i, ff):
    """The operator of llama.cpp, one pair, as its definition reads: ramp, then mix of two angles per position."""
    def turning(rotations):
        return rope.n_dims * math.log(rope.orig_ctx / (rotations * 2 * math.pi)) / (2 * math.log(rope.freq_base))

    start = max(0, math.floor(turning(rope.beta_fast)))
    end = min(rope.n_dims - 1, math.ceil(turning(rope.beta_slow)))
    ramp = 1 - min(1, max(0, (i - start) / max(0.001, end - start)))
    theta = rope.freq_base ** (-2 * i / rope.n_dims) / ff
    mix = ramp * rope.ext_factor
    return theta / rope.factor * (1 - mix) + theta * mix


@pytest.mark.parametrize("ext_factor", [1.0, 0.25])
@pytest.mark.parametrize("orig_ctx", [2048, 16, 3])
def test_yarn_pair_by_pair(ext_factor, orig_ctx):
    rope = replace(YARN, ext_factor=ext_factor, orig_ctx=orig_ctx)
    factors = np.linspace(1.0, 3.0, 32)
    frequencies, magnitude = rope_frequencies(rope, factors)
    expected = [yarn_one_pair(rope, i, factors[i]) for i in range(32)]
    np.testing.assert_allclose(frequencies, expected, rtol=1e-12)
    assert magnitude == pytest.approx(1 + 0.1 * math.log(4))


def test_yarn_without_extrapolation_is_linear_scaling():
    frequencies, magnitude = rope_frequencies(replace(YARN, ext_factor=0.0, attn_factor=1.25))
    linear, _ = rope_frequencies(replace(PLAIN, scaling="linear", factor=4.0))
    np.testing.assert_array_equal(frequencies, linear)
    assert magnitude == 1.25


def test_fast_pairs_keep_their_frequency_and_slow_ones_do_not():
    frequencies, _ = rope_frequencies(YARN)
    plain, _ = rope_frequencies(PLAIN)
    assert frequencies[0] == plain[0]
    assert frequencies[31] == pytest.approx(plain[31] / 4)
    assert np.all(np.diff(frequencies) < 0)


def test_attn_factor_scales_plain_tables():
    cos, sin = rope_table(replace(PLAIN, attn_factor=0.5), 3)
    assert cos[0, 0] == 0.5
    np.testing.assert_allclose(cos**2 + sin**2, 0.25, rtol=1e-6)


@pytest.mark.parametrize(
    ("factors", "named"),
    [
        (np.ones(31), r"\[31\].*\[32\]"),
        (np.ones((1, 32)), r"\[1, 32\]"),
        (np.r_[np.ones(31), 0.0], r"weight\[31\]: found 0"),
        (np.r_[np.nan, np.ones(31)], r"weight\[0\]: found nan"),
        (np.r_[1.0, -2.0, np.ones(30)], r"weight\[1\]: found -2"),
    ],
    ids=["short", "two dimensions", "zero", "nan", "negative"],
)
def test_unusable_frequency_factors(factors, named):
    with pytest.raises(HotcoldError, match=named):
        rope_table(PLAIN, 4, factors)


def test_unknown_scaling_is_named():
    with pytest.raises(HotcoldError, match="'longrope'.*none, linear, yarn"):
        rope_table(replace(PLAIN, scaling="longrope"), 4)
