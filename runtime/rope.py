"""Rotary positions: which angle each pair of dimensions turns by at each position.

In: the Rope of a ModelConfig and, for llama3 scaling, the tensor rope_freqs.weight. Out: tables of cosines and sines
for the kernels. Next: plan.py.
"""

from __future__ import annotations

import math

import numpy as np

from hotcold.runtime.config import Rope, yarn_mscale
from hotcold.runtime.errors import HotcoldError

_ROWS_AT_ONCE = 4096  # bounds the float64 temporaries


def rope_frequencies(rope: Rope, freq_factors: np.ndarray | None = None) -> tuple[np.ndarray, float]:
    """Angle per position of every pair, float64 [n_dims//2], and the factor for cosines and sines.

    `freq_factors` [n_dims//2] divides the frequencies. Raises HotcoldError when it has another length or a value that
    is not a positive number.
    """
    half = rope.n_dims // 2
    pairs = np.arange(half)
    frequencies = rope.freq_base ** (-2.0 * pairs / rope.n_dims)  # [half]
    if freq_factors is not None:
        factors = np.asarray(freq_factors, np.float64)
        if factors.shape != (half,):
            raise HotcoldError(f"rope_freqs.weight: found shape {list(factors.shape)}, allowed: [{half}]")
        bad = ~(np.isfinite(factors) & (factors > 0))
        if bad.any():
            at = int(np.argmax(bad))
            raise HotcoldError(f"rope_freqs.weight[{at}]: found {factors[at]}, allowed: positive finite numbers")
        frequencies = frequencies / factors
    if rope.scaling == "none":
        return frequencies, rope.attn_factor
    slowed = frequencies / rope.factor
    if rope.scaling == "linear":
        return slowed, rope.attn_factor
    if rope.scaling != "yarn":
        raise HotcoldError(f"rope scaling: found '{rope.scaling}', allowed: none, linear, yarn")
    if rope.ext_factor == 0.0:
        return slowed, rope.attn_factor
    # Fast pairs keep their frequency, slow ones are slowed down, those between are mixed.
    low = max(math.floor(_pair_that_turns(rope, rope.beta_fast)), 0)
    high = min(math.ceil(_pair_that_turns(rope, rope.beta_slow)), rope.n_dims - 1)
    kept = (1.0 - np.clip((pairs - low) / max(high - low, 1e-3), 0.0, 1.0)) * rope.ext_factor  # [half]
    return slowed * (1.0 - kept) + frequencies * kept, rope.attn_factor * yarn_mscale(rope.factor)


def _pair_that_turns(rope: Rope, rotations: float) -> float:
    """The (fractional) pair that turns `rotations` times over the original context."""
    wavelengths = rope.orig_ctx / (rotations * 2.0 * math.pi)
    return rope.n_dims * math.log(wavelengths) / (2.0 * math.log(rope.freq_base))


def rope_table(rope: Rope, n_ctx: int, freq_factors: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines for positions 0 to n_ctx-1: two float32 [n_ctx, n_dims//2].

    Yarn's magnitude is part of them. Angles are float64: at position 100000 a float32 angle is off by 4e-3.
    Raises HotcoldError as `rope_frequencies` does.
    """
    frequencies, magnitude = rope_frequencies(rope, freq_factors)
    cos = np.empty((n_ctx, len(frequencies)), np.float32)
    sin = np.empty_like(cos)
    for start in range(0, n_ctx, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, n_ctx)
        angles = np.outer(np.arange(start, stop, dtype=np.float64), frequencies)  # [rows, half]
        cos[start:stop] = np.cos(angles) * magnitude
        sin[start:stop] = np.sin(angles) * magnitude
    return cos, sin
