"""Thresholds on magnitudes: which one makes how many neurons small, and how many each layer should do without.

In: magnitudes of a layer's values, and what leaving out the small ones costs. Out: quantiles, shares per layer. Pure
functions of arrays. Next: threshold_run.py, which takes the magnitudes from a model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SHIFT = 14  # low bits of a float32 that bins do not tell apart: 512 bins for each power of two
BINS = 1 << (31 - SHIFT)
FIRST_INFINITE = 255 << (23 - SHIFT)  # bins from here on hold infinities and NaN
TINY = float(np.finfo(np.float32).tiny)  # a threshold of 0 means none at all
STEPS = 100  # shares that a layer may be given: 0, 1/100, ... 1
# Shares at which errors are measured; 0 needs no measuring.
MEASURED = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)


class Histogram:
    """Magnitudes of float32 values, counted in bins of equal ratio: any number of values in one MiB.

    A bin is the upper bits of the number, so its edges are exact and a quantile is within 0.2 % of the true one.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(BINS, np.int64)

    def add(self, values: np.ndarray) -> None:
        """values: float32 of any shape and sign."""
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF)
        self.counts += np.bincount((bits >> np.uint32(SHIFT)).reshape(-1), minlength=BINS)

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def finite(self) -> bool:
        """Whether no value was NaN or infinite."""
        return not self.counts[FIRST_INFINITE:].any()

    def share_up_to(self, threshold: float) -> float:
        """Share of the magnitudes up to `threshold`, as near as the bins tell."""
        i = int(np.float32(threshold).view(np.uint32)) >> SHIFT
        part = (threshold - _edge(i)) / (_edge(i + 1) - _edge(i))
        return float(self.counts[:i].sum() + part * self.counts[i]) / self.total

    def quantile(self, share: float) -> float:
        """A float32 number up to which this share of the magnitudes lies; 0 for share 0, otherwise above 0."""
        if share <= 0 or not self.total:
            return 0.0
        below = np.cumsum(self.counts)
        wanted = min(1.0, share) * below[-1]
        i = int(np.searchsorted(below, wanted, "left"))
        part = 1.0 - (below[i] - wanted) / self.counts[i]  # of the values in this bin
        low, high = _edge(i), _edge(i + 1)
        return max(TINY, float(np.float32(low + part * (high - low))))


def _edge(i: int) -> float:
    """Where bin i begins."""
    largest = float(np.finfo(np.float32).max)
    return largest if i >= FIRST_INFINITE else float(np.uint32(i << SHIFT).view(np.float32))


def error_curve(shares: Sequence[float], errors: Sequence[float] | np.ndarray) -> np.ndarray:
    """f64 [STEPS + 1]: error at 0, 1/STEPS, ... 1, from errors measured at some shares in ascending order up to 1.

    Nothing left out costs nothing. Errors grow like a power of the share, so their roots are what is joined by straight
    lines. A curve never falls.
    """
    x = np.array([0.0, *shares])
    y = np.maximum.accumulate(np.clip(np.array([0.0, *errors], np.float64), 0.0, None))
    curve: np.ndarray = np.interp(np.arange(STEPS + 1) / STEPS, x, np.sqrt(y)) ** 2
    return curve


def allocate(errors: np.ndarray, target: float) -> np.ndarray:
    """Shares per layer, f64 [n_layer], of mean `target`, for which the sum of errors is least.

    errors: f64 [n_layer, k + 1], non-descending: the error of a layer at shares 0, 1/k, ... 1. Dynamic programming
    over the layers: exact for shares that are multiples of 1/k, whatever the shape of the curves. What is left of the
    target, less than one step of one layer, goes where it costs least.
    """
    n_layer, k = errors.shape[0], errors.shape[1] - 1
    wanted = target * n_layer * k
    units = int(wanted + 1e-9)
    best = np.full(units + 1, np.inf)  # least error of the layers so far, by the units they took
    best[0] = 0.0
    took = np.zeros((n_layer, units + 1), np.int64)
    for layer, curve in enumerate(errors):
        new = np.full(units + 1, np.inf)
        for step in range(min(k, units) + 1):
            cost = best[: units + 1 - step] + curve[step]
            better = cost < new[step:]
            new[step:][better] = cost[better]
            took[layer, step:][better] = step
        best = new
    steps, left = np.zeros(n_layer, np.int64), units
    for layer in reversed(range(n_layer)):
        steps[layer] = took[layer, left]
        left -= steps[layer]
    shares = steps / k
    rest = wanted - units
    if rest > 1e-9:
        nexts = [errors[i, s + 1] - errors[i, s] if s < k else np.inf for i, s in enumerate(steps)]
        shares[int(np.argmin(nexts))] += rest / k
    return shares


def relative_error(missing: np.ndarray, whole: np.ndarray) -> float:
    """Squared error of vectors, relative to their squares; both [tokens, n_embd].

    Tokens count by how much of their own vector is missing: a few tokens (often the first of a text) have vectors
    hundreds of times larger than all others, and would hide what happens to these. 0 where all are 0.
    """
    squares = np.square(whole, dtype=np.float64).sum(axis=1)
    weights = squares + np.median(squares)
    if not weights.all():
        weights = weights + max(float(squares.max()), TINY) * 1e-9
    size = float((squares / weights).sum())
    return float((np.square(missing, dtype=np.float64).sum(axis=1) / weights).sum()) / size if size > 0 else 0.0
