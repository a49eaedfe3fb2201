"""How high each neuron must score: the biases that read the fewest bytes at a wanted recall.

In: scores of calibration tokens, which neurons fired, their weight (predictor_layer.py: the length of what each adds).
Out: a threshold per neuron, and one shift for all. Next: lowrank.py, mlp.py, signbit.py.

Fewest bytes at a weighted recall is a Lagrangian problem that splits into neurons: with a price on missed weight, each
neuron's best threshold is the one where the price of what lies above exceeds its bytes by the most.
The price is found by bisection. Neurons that are worth it always, or never, come out of that by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hotcold.placement.predictor import ALWAYS

BINS = 128  # of a neuron's scores
SPREAD = 4.0  # standard deviations that the bins cover on each side of the mean
STEPS = 50  # of the bisection


@dataclass(frozen=True)
class Histogram:
    """Per neuron and bin of its scores. Bin edges are low + width * (1..BINS-1)."""

    low: np.ndarray  # f32 [n_ff]
    width: np.ndarray  # f32 [n_ff]
    cells: np.ndarray  # i64 [n_ff, BINS]: tokens
    fired: np.ndarray  # i64 [n_ff, BINS]: of them fired
    weight: np.ndarray  # f64 [n_ff, BINS]: and their weight


def histogram(scores: np.ndarray, fired: np.ndarray, weight: np.ndarray) -> Histogram:
    """scores f32 [n, n_ff]; fired bool [n, n_ff]; weight f32 [n, n_ff], 0 where not fired."""
    n_ff = scores.shape[1]
    mean, deviation = scores.mean(axis=0), scores.std(axis=0)
    low = mean - SPREAD * deviation
    width = np.maximum(2 * SPREAD * deviation / BINS, np.float32(1e-12))
    bins = np.clip((scores - low) / width, 0, BINS - 1).astype(np.int32)
    flat = (bins + BINS * np.arange(n_ff, dtype=np.int32)).ravel()
    size = BINS * n_ff
    cells = np.bincount(flat, minlength=size)
    on = fired.ravel()
    hits = flat[on]
    weights = np.bincount(hits, weight.ravel()[on], minlength=size)
    shape = (n_ff, BINS)
    return Histogram(low, width, cells.reshape(shape), np.bincount(hits, minlength=size).reshape(shape),
                     weights.reshape(shape))  # fmt: skip


def neuron_thresholds(h: Histogram, value_cost: float, target: float) -> np.ndarray:
    """f32 [n_ff]: scores above it are candidates; -ALWAYS: every score is, ALWAYS: none.

    value_cost: bytes read of a neuron that fires, per byte of those that tell whether it does.
    """
    # Candidates from each bin on; column BINS: none.
    gain, cost = (np.zeros((len(h.low), BINS + 1)) for _ in range(2))
    gain[:, :BINS] = _from_top(h.weight)
    cost[:, :BINS] = _from_top(h.cells + value_cost * h.fired)
    total = float(gain[:, 0].sum())
    if total == 0:
        return np.full(len(h.low), ALWAYS, np.float32)  # nothing ever fires
    low, high = 1e-9, 1e9
    for _ in range(STEPS):
        price = np.sqrt(low * high)
        first = _best(price * (cost[:, 0].sum() / total) * gain - cost)
        found = float(np.take_along_axis(gain, first[:, None], 1).sum())
        low, high = (low, price) if found >= target * total else (price, high)
    first = _best(high * (cost[:, 0].sum() / total) * gain - cost)
    thresholds = (h.low + first * h.width).astype(np.float32)
    # A neuron that was a candidate on all tokens stays one on others.
    thresholds[np.take_along_axis(cost, first[:, None], 1)[:, 0] == cost[:, 0]] = -ALWAYS
    thresholds[first == BINS] = ALWAYS
    return thresholds


def _from_top(counts: np.ndarray) -> np.ndarray:
    """Sums of each bin and those above it."""
    return np.cumsum(counts[:, ::-1], axis=1, dtype=np.float64)[:, ::-1]


def _best(gain: np.ndarray) -> np.ndarray:
    """First bin of the largest gain, the highest of equals: it names the fewest candidates."""
    last: np.ndarray = BINS - np.argmax(gain[:, ::-1], axis=1)
    return last


def shift_for(margins: np.ndarray, weight: np.ndarray, target: float) -> float:
    """The highest threshold above which margins f32 [n, n_ff] hold `target` of the weight (0 where not fired).

    Margins are scores less the neuron's threshold, on tokens that did not choose those.
    """
    on = weight > 0
    values, sizes = margins[on], weight[on]
    if not len(values):
        return 0.0
    order = np.argsort(-values)
    sums = np.cumsum(sizes[order], dtype=np.float64)
    last = min(int(np.searchsorted(sums, target * sums[-1])), len(order) - 1)
    at = values[order[last]]
    return float(np.nextafter(np.float32(at), np.float32(-np.inf)))
