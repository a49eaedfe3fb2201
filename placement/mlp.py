"""The trained predictor: d -> hidden -> n_ff with a ReLU between, as PowerInfer and DejaVu have it.

In: FFN inputs, which neurons fired, their size; weights to begin with. Out: trained weights, and how many hidden
units a layer needs. Next: predictor_layer.py, which calibrates them like the others.

Minibatch Adam on a weighted binary cross-entropy, in float32 with NumPy, or with CuPy where the module is given. It
begins at the closed form (lowrank.py) with the ReLU out of the way, so few epochs are enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotcold.placement.lowrank import Regression

ACCURACY = 0.95  # of PowerInfer's rule for the hidden size
SKEWED = 0.5  # a layer is skewed when this share of its neurons or less makes 80 % of its firings
STEP = 32  # hidden sizes are multiples of it: a block of the quantized types
OFFSET = 2.0  # standard deviations that hidden units are above the ReLU's kink at the beginning
LOGITS = 2.0  # logits of a score one standard deviation above the mean, at the beginning
ENOUGH = 2e-3  # relative gain of the loss that makes an epoch worth another
BETAS, EPSILON = (0.9, 0.98), 1e-8
MOST_WEIGHT = 4.0  # of a firing, in units of the mean one


@dataclass(frozen=True)
class Weights:
    """d -> hidden -> n_ff."""

    w_in: np.ndarray  # f32 [hidden, n_embd]
    b_in: np.ndarray  # f32 [hidden]
    w_out: np.ndarray  # f32 [n_ff, hidden]
    bias: np.ndarray  # f32 [n_ff]

    def arrays(self) -> list[np.ndarray]:
        return [self.w_in, self.b_in, self.w_out, self.bias]

    def logits(self, x: np.ndarray) -> np.ndarray:
        """f32 [n, n_ff]"""
        result: np.ndarray = np.maximum(x @ self.w_in.T + self.b_in, 0) @ self.w_out.T + self.bias
        return result


@dataclass(frozen=True)
class Data:
    """Tokens to learn from or to stop by."""

    x: np.ndarray  # f32 [n, n_embd]
    fired: np.ndarray  # bool [n, n_ff]
    weight: np.ndarray  # f32 [n, n_ff], of the loss


def weighted(x: np.ndarray, fired: np.ndarray, size: np.ndarray) -> Data:
    """A firing weighs by its size (f32 [n, n_ff]) in units of the mean, up to a limit; a silence 1/2."""
    mean = float(size.sum(dtype=np.float64)) / max(1, int(np.count_nonzero(fired)))
    weight = size * np.float32(1 / max(mean, 1e-20))
    weight += np.float32(0.25)
    np.minimum(weight, np.float32(MOST_WEIGHT), out=weight)
    weight[~fired] = 0.5
    return Data(x, fired, weight)


@dataclass(frozen=True)
class Settings:
    """How to train."""

    seed: int = 0
    epochs: int = 8
    batch: int = 256
    rate: float = 1.5e-3
    patience: int = 1  # epochs without a better loss on the stopping tokens


def beginning(regression: Regression, hidden: int, rate: np.ndarray, seed: int) -> Weights:
    """The closed form of this rank as a net. rate: f32 [n_ff], how often each neuron fires."""
    w_in, w_out, _ = regression.of_rank(hidden, seed)
    w_out = LOGITS * w_out
    odds = np.log((rate + 1e-3) / (1 - rate + 1e-3)).astype(np.float32)
    # hidden - OFFSET is the centred hidden value of the closed form.
    return Weights(w_in, OFFSET - w_in @ regression.mean_x, w_out, odds - OFFSET * w_out.sum(axis=1))


def train(start: Weights, data: Data, stop: Data, settings: Settings, xp: Any = np) -> tuple[Weights, float]:
    """The best weights by loss on `stop`, and their accuracy there: share of (token, neuron) decided rightly at 0.

    xp: numpy or cupy. The same seed gives the same weights.
    """
    rng = np.random.default_rng(settings.seed)
    weights = [xp.asarray(a) for a in start.arrays()]
    state = [(xp.zeros_like(w), xp.zeros_like(w)) for w in weights]
    x, fired, weight = (xp.asarray(a) for a in (data.x, data.fired, data.weight))
    watched = tuple(xp.asarray(a) for a in (stop.x, stop.fired, stop.weight))
    best, kept, waited, step = _loss(weights, watched, xp), weights, 0, 0
    batches = max(1, len(x) // settings.batch)
    for epoch in range(settings.epochs):
        order = rng.permutation(len(x))
        rate = settings.rate * 0.5 * (1 + np.cos(np.pi * epoch / settings.epochs))
        for rows in np.array_split(order, batches):
            pick = xp.asarray(rows)
            step += 1
            gradients = _gradients(weights, x[pick], fired[pick], weight[pick], xp)
            weights = _adam(weights, gradients, state, rate, step, xp)
        loss = _loss(weights, watched, xp)
        waited = 0 if loss < best * (1 - ENOUGH) else waited + 1
        if loss < best:
            best, kept = loss, weights
        if waited == settings.patience:
            break
    arrays = [a if xp is np else xp.asnumpy(a) for a in kept]
    done = Weights(*arrays)
    return done, accuracy(done, stop)


def accuracy(weights: Weights, data: Data) -> float:
    """Share of (token, neuron) whose logit has the right sign."""
    right = 0
    for a in range(0, len(data.x), 1024):
        logits = weights.logits(data.x[a:a + 1024])
        right += int(np.count_nonzero((logits > 0) == data.fired[a:a + 1024]))
    return right / max(1, data.fired.size)


def _gradients(weights: list[Any], x: Any, fired: Any, weight: Any, xp: Any) -> list[Any]:
    w_in, b_in, w_out, bias = weights
    hidden = xp.maximum(x @ w_in.T + b_in, 0)
    slope = hidden @ w_out.T + bias  # [n, n_ff]; from here on in place: these arrays are what takes the time
    with np.errstate(over="ignore"):  # exp of a large number is infinite, its inverse 0: right
        xp.exp(xp.negative(slope, out=slope), out=slope)
    slope += 1
    xp.divide(1, slope, out=slope)
    slope -= fired
    slope *= weight
    slope *= xp.float32(1 / len(x))
    back = (slope @ w_out) * (hidden > 0)
    return [back.T @ x, back.sum(axis=0), slope.T @ hidden, slope.sum(axis=0)]


def _adam(weights: list[Any], gradients: list[Any], state: list[tuple[Any, Any]], rate: float, step: int,
          xp: Any) -> list[Any]:
    """One step; `state` (first and second moments) is updated in place, weights are new arrays."""
    out = []
    size = rate * (1 - BETAS[1] ** step) ** 0.5 / (1 - BETAS[0] ** step)
    for w, g, (m, v) in zip(weights, gradients, state, strict=True):
        m *= BETAS[0]
        m += (1 - BETAS[0]) * g
        v *= BETAS[1]
        v += (1 - BETAS[1]) * g * g
        out.append((w - size * m / (xp.sqrt(v) + EPSILON)).astype(xp.float32, copy=False))
    return out


def _loss(weights: list[Any], data: tuple[Any, ...], xp: Any) -> float:
    w_in, b_in, w_out, bias = weights
    total = 0.0
    for a in range(0, len(data[0]), 512):
        x, fired, weight = (part[a:a + 512] for part in data)
        logits = xp.maximum(x @ w_in.T + b_in, 0) @ w_out.T + bias
        entropy = xp.where(fired, -logits, logits)
        entropy = xp.maximum(entropy, 0) + xp.log1p(xp.exp(-xp.abs(entropy)))
        total += float((entropy * weight).sum())
    return total / max(1, data[1].size)


# ------------------------------------------------------------------ hidden size


@dataclass(frozen=True)
class Trial:
    """A hidden size that was tried."""

    hidden: int
    accuracy: float
    cost: float  # share of the FFN's bytes read
    result: Any = None


def start_size(density: float, most: int) -> int:
    """Where the search begins: the share of the largest size that the layer's neurons are on, a multiple of STEP."""
    return min(most, max(STEP, round(most * density / 2 / STEP) * STEP))


def larger(hidden: int) -> int:
    return hidden + STEP * max(1, hidden // (4 * STEP))


def smaller(hidden: int) -> int:
    return hidden - STEP * max(1, hidden // (5 * STEP))


def adapt_size(start: int, most: int, skewed: bool, attempt: Callable[[int], Trial]) -> Trial:
    """The hidden size of a layer; `attempt` trains one.

    PowerInfer's rule: a skewed layer shrinks while its accuracy stays at least 95 %, a layer under 95 % grows. As
    bytes are what counts, growing ends where it reads more bytes than it saves; if it never paid, smaller sizes are
    tried instead. Of the sizes tried (and accurate, where it shrank) the one that reads the fewest bytes is taken.
    """
    trials = [attempt(start)]
    if trials[0].accuracy < ACCURACY:
        _walk(trials, lambda h: min(most, larger(h)), most, attempt, lambda t: t.accuracy < ACCURACY, True)
        if min(trials, key=lambda t: t.cost) is trials[0]:
            _walk(trials, smaller, STEP, attempt, lambda t: True, True)
    elif skewed:
        _walk(trials, smaller, STEP, attempt, lambda t: t.accuracy >= ACCURACY, False)
        return min((t for t in trials if t.accuracy >= ACCURACY), key=lambda t: t.cost)
    return min(trials, key=lambda t: t.cost)


def _walk(trials: list[Trial], step: Callable[[int], int], end: int, attempt: Callable[[int], Trial],
          go_on: Callable[[Trial], bool], must_pay: bool) -> None:
    """From the first trial on, step by step, until it no longer should or (must_pay) no longer reads fewer bytes."""
    last = trials[0]
    while last.hidden != end and go_on(last):
        trial = attempt(step(last.hidden))
        trials.append(trial)
        if must_pay and trial.cost >= last.cost:
            return
        last = trial


def most_hidden(budget: int, n_embd: int, n_ff: int) -> int:
    """The largest hidden size, a multiple of STEP, whose parameters fit the budget; 0: none does."""
    return max(0, (budget - n_ff) // (n_embd + 1 + n_ff)) // STEP * STEP

