"""The arithmetic of relufication: where each neuron bends, weighted least squares, always-on neurons.

In: arrays of one layer. Out: its new weights. Nothing here knows of files or models. Next: relufy_layers.py, which
feeds it.

A gated FFN adds D @ (act(g) * u). With ReLU in place of SiLU or GELU three things together win most of it back:

    D' @ (relu(g + b * c) * u)  +  Q @ (c * (P @ h)),    c = v . h, about 1 for every token

- b moves the point where a neuron switches off. A neuron that matters gets a bend that imitates act well, one that
  does not gets one that is rarely passed: as many fire as was asked for, where they are worth most.
- D', the down columns fitted anew: least squares.
- The second term. What act(g) - relu(g + b) is on average, times u, is linear in the input h. A linear map of rank R
  is R neurons that never switch off: their gate row is v, their up rows are P, their down columns Q.

So the result is an ordinary ReLU FFN of n_ff + R neurons whose gate rows are g's plus b * v.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import linalg

from hotcold.runtime.kernels.reference import activate

# Added to the diagonal of the equations, as a share of its mean: what holds D' and the bypass near the first guess,
# which is good where the text says too little. Found on SmolLM2-135M with 12 thousand tokens; a factor of 4 either way
# hardly matters.
DOWN_RIDGE = 1.0
BYPASS_RIDGE = 1.0
GATE_RIDGE = 1e-3
# Bends to choose from, in root mean squares of the neuron's key.
BENDS = (-2.0, -1.5, -1.2, -0.9, -0.7, -0.5, -0.35, -0.2, -0.1, 0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)
NONE = np.zeros(0, np.float32)
LARGEST_SCALE = 3.0
PANEL = 1024  # rows of a square of sums that are added to at once
COLUMNS = 256  # neurons looked at together: their arrays stay in the cache


@dataclass(frozen=True)
class Bends:
    """act(g) is about scale * relu(g + shift * c) + constant, per neuron: f32 [n_ff] each."""

    shift: np.ndarray
    scale: np.ndarray
    constant: np.ndarray


@dataclass(frozen=True)
class LayerFit:
    """New weights of a layer: `down` replaces the old columns, bend * gate is added to the old gate rows, the rest
    makes the always-on neurons.
    """

    bend: np.ndarray  # f32 [n_ff]
    down: np.ndarray  # f32 [n_ff, n_embd], one row per neuron
    gate: np.ndarray  # f32 [n_embd], v: the same for all always-on neurons
    up: np.ndarray  # f32 [rank, n_embd]
    hot_down: np.ndarray  # f32 [rank, n_embd]


def token_weights(y: np.ndarray) -> np.ndarray:
    """f32 [n], mean 1: so that the few tokens with huge targets do not decide alone. y: [n, n_embd]."""
    square = np.einsum("ij,ij->i", y, y, dtype=np.float64) / y.shape[1]
    weights = 1 / (square + max(float(np.median(square)), 1e-30))
    return np.asarray(weights / weights.mean(), np.float32)


def constant_gate(h: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """f32 [n_embd]: v with v . h about 1 for all rows of h [n, n_embd]."""
    scaled = h * np.sqrt(weights)[:, None]
    gram = (scaled.T @ scaled).astype(np.float64)
    add_ridge(gram, GATE_RIDGE)
    v = linalg.solve(gram, scaled.T @ np.sqrt(weights).astype(np.float64), assume_a="pos")
    return np.asarray(v, np.float32)


def bypass_input(h: np.ndarray, c: np.ndarray) -> np.ndarray:
    """f32 [n, n_embd]: what the always-on neurons make of h before their up rows, c = h @ gate being their keys."""
    return h * np.maximum(c, np.float32(0))[:, None]


def choose_bends(keys: np.ndarray, ups: np.ndarray, c: np.ndarray, weights: np.ndarray, energy: np.ndarray,
                 activation: str, sparsity: float | None) -> Bends:
    """The bend of every neuron, so that the error is least with at least `sparsity` of the neurons off.

    keys, ups: f32 [n, n_ff] of a sample of tokens; c, weights: f32 [n]; energy: [n_ff], squared lengths of the down
    columns. sparsity None: as many as b = 0 switches off.
    """
    parts = [_bend_costs(keys[:, i:i + COLUMNS], ups[:, i:i + COLUMNS], c, weights, energy[i:i + COLUMNS], activation)
             for i in range(0, keys.shape[1], COLUMNS)]
    costs, fires, *rest = (np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
    if sparsity is None:
        sparsity = 1 - float(fires[BENDS.index(0.0)].mean())
    chosen = cheapest(costs, fires, 1 - sparsity)
    return Bends(*(np.take_along_axis(values, chosen[None], axis=0)[0].astype(np.float32) for values in rest))


def _bend_costs(g: np.ndarray, u: np.ndarray, c: np.ndarray, weights: np.ndarray, energy: np.ndarray,
                activation: str) -> tuple[np.ndarray, ...]:
    """[bends, neurons] each: squared error of the neuron's value, share of tokens it fires for, and the best shift,
    scale and constant.
    """
    w = weights[:, None] * u * u
    total = w.sum(axis=0, dtype=np.float64)
    w /= np.maximum(total, 1e-30).astype(np.float32)
    act = np.asarray(activate(activation, g, 0.0), np.float32)
    act_mean = np.einsum("ij,ij->j", w, act)
    act -= act_mean
    variance = np.einsum("ij,ij,ij->j", w, act, act)
    unit = np.sqrt(np.einsum("ij,ij,ij->j", w, g, g))
    weighted = w * act
    found: list[tuple[np.ndarray, ...]] = []
    for bend in BENDS:
        shift = np.float32(bend) * unit
        r = g + shift * c[:, None]
        np.maximum(r, np.float32(0), out=r)
        mean, shared = np.einsum("ij,ij->j", w, r), np.einsum("ij,ij->j", weighted, r)
        spread = np.einsum("ij,ij,ij->j", w, r, r) - mean**2
        scale = np.clip(shared / np.maximum(spread, 1e-6 * np.maximum(unit, 1e-12)**2), 0, LARGEST_SCALE)
        left = variance - 2 * scale * shared + scale**2 * np.maximum(spread, 0)
        fires = np.count_nonzero(r, axis=0) / len(r)
        found.append((np.maximum(left, 0) * total * energy, fires, shift, scale, act_mean - scale * mean))
    return tuple(np.array(values, np.float64) for values in zip(*found, strict=True))


def cheapest(costs: np.ndarray, fires: np.ndarray, budget: float) -> np.ndarray:
    """i64 [neurons]: the choice of each with the least sum of costs while their mean of `fires` is within the budget.

    costs, fires: [choices, neurons]. By one price for firing, found by bisection; the choice that fires least for all,
    where even that is over the budget.
    """
    chosen = fires.argmin(axis=0)
    low, high = 0.0, 1e3 * float(costs.max(initial=0.0)) + 1e-30
    for _ in range(100):
        price = high / 2 if low == 0 and high > 1e-30 else (low * high) ** 0.5
        found = (costs + price * fires).argmin(axis=0)
        if np.take_along_axis(fires, found[None], axis=0).mean() <= budget:
            chosen, high = found, price
        else:
            low = price
    return chosen


class Equations:
    """Sums of weighted least squares, in float64, over any number of blocks of rows.

    Features are values of neurons, then inputs of the bypass. The square of the values is by far the largest array of a
    fit: sums go into it a panel at a time, into its lower triangle, and fit_layer() works in place.
    """

    def __init__(self, n_values: int, n_inputs: int, n_targets: int) -> None:
        self.values = np.zeros((n_values, n_values))  # values.T @ values; also above the diagonal after complete()
        self.mixed = np.zeros((n_values, n_inputs))  # values.T @ inputs
        self.inputs = np.zeros((n_inputs, n_inputs))
        self.value_cross = np.zeros((n_values, n_targets), order="F")  # values.T @ targets; as LAPACK solves in place
        self.input_cross = np.zeros((n_inputs, n_targets))
        self.rows = 0

    def add(self, features: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> None:
        """features: f32 [n, n_values + n_inputs]; targets: f32 [n, n_targets]; weights: f32 [n]. Changes `features`."""
        roots = np.sqrt(weights)[:, None]
        features *= roots
        values, inputs = np.split(features, [len(self.values)], axis=1)
        wanted = targets * roots
        for sums, x in ((self.values, values), (self.inputs, inputs)):
            for a, b in panels(len(sums)):
                sums[a:b, :b] += x[:, a:b].T @ x[:, :b]  # float32 within a block, whose rows are few
        self.mixed += values.T @ inputs
        self.value_cross += values.T @ wanted
        self.input_cross += inputs.T @ wanted
        self.rows += len(features)

    def complete(self) -> None:
        """Copy what is below the diagonals above them."""
        for sums in (self.values, self.inputs):
            for a, b in panels(len(sums)):
                sums[a:b, b:] = sums[b:, a:b].T


def panels(n: int) -> list[tuple[int, int]]:
    return [(a, min(a + PANEL, n)) for a in range(0, n, PANEL)]


def fit_bytes(n_ff: int, n_embd: int, rows: int) -> int:
    """Most memory that Equations, what is added to it at a time and fit_layer() take."""
    tall, square = 8 * (n_ff + n_embd) * n_embd, 8 * n_embd**2
    added = 4 * (rows + PANEL) * (n_ff + 3 * n_embd) + tall
    return 8 * n_ff**2 + 2 * tall + max(added, 2 * tall + 6 * square)


def add_ridge(gram: np.ndarray, share: float) -> None:
    """Add `share` of its mean diagonal (at least a tiny number) to the diagonal of gram."""
    diagonal = np.diag_indices(len(gram))
    gram[diagonal] += share * float(gram[diagonal].mean()) + 1e-30


def first_guess(bends: Bends, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """f64 [n_ff + n_embd, n_embd]: down columns and bypass as the bends alone would have them.

    up, down: [n_ff, n_embd]. What is fitted is held near it: where the text says little, this remains.
    """
    return np.concatenate([bends.scale[:, None] * down, up.T @ (bends.constant[:, None] * down)]).astype(np.float64)


def fit_layer(equations: Equations, guess: np.ndarray, up_scale: float, rank: int) -> LayerFit:
    """Solve for D', P and Q; bend and gate are left empty. Uses up the equations and the guess.

    equations: features are the values of the n_ff neurons, then bypass_input; targets are what the FFN should add.
    guess: of first_guess. up_scale: root mean square of the up rows, which the new ones get too. rank 0: only D'.
    """
    n_ff, n_embd = equations.mixed.shape
    equations.complete()
    values, mixed, left = equations.values, equations.mixed, equations.inputs
    if rank == 0:
        guess[n_ff:] = 0
    own, cross = equations.value_cross, equations.input_cross  # from here on: what is left to explain
    own -= values @ guess[:n_ff]
    own -= mixed @ guess[n_ff:]
    cross -= mixed.T @ guess[:n_ff]
    cross -= left @ guess[n_ff:]
    # The down columns are eliminated: for any bypass B their best change is own - seen @ B.
    add_ridge(values, DOWN_RIDGE)
    if not np.isfinite(values.sum()):
        raise np.linalg.LinAlgError("the sums are not finite")
    factor = linalg.cho_factor(values.T, overwrite_a=True, check_finite=False)  # transposed: LAPACK's order
    own = linalg.cho_solve(factor, own, overwrite_b=True)
    if rank == 0:
        empty = np.zeros((0, n_embd), np.float32)
        return LayerFit(NONE, (guess[:n_ff] + own).astype(np.float32), NONE, empty, empty)
    seen = linalg.cho_solve(factor, mixed)
    # What is left are equations for B alone, and in their terms the loss of giving up some of B's rank.
    add_ridge(left, BYPASS_RIDGE)
    left -= mixed.T @ seen
    cross -= mixed.T @ own
    p, q = reduced_rank(guess[n_ff:] + linalg.solve(left, cross, assume_a="pos"), left, rank)
    own -= seen @ (p @ q - guess[n_ff:])
    own += guess[:n_ff]
    up, hot_down = balanced(p, q, up_scale)
    return LayerFit(NONE, own.astype(np.float32, order="C"), NONE, up, hot_down)


def reduced_rank(b: np.ndarray, gram: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """P [n_in, rank], Q [rank, n_out] in float64: p @ q comes nearest to the map b [n_in, n_out] by the inner product
    gram [n_in, n_in] of its inputs: the principal directions of its outputs.
    """
    _, v = linalg.eigh(b.T @ gram @ b)
    v = v[:, ::-1][:, :rank]
    return b @ v, v.T


def balanced(p: np.ndarray, q: np.ndarray, up_scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Up rows [rank, n_in] and down columns [rank, n_out] of the same map p @ q, the up rows as large as others are."""
    size = np.sqrt(np.mean(p**2, axis=0))
    factor = np.where(size > 0, up_scale / np.maximum(size, 1e-30), 1.0)
    return (p * factor).T.astype(np.float32), (q / factor[:, None]).astype(np.float32)


def relative_error(found: np.ndarray, wanted: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Weighted sums of |found - wanted|^2 and |wanted|^2 over rows [n, n_embd]; their quotient is the error."""
    difference = found - wanted
    error = np.einsum("ij,ij,i->", difference, difference, weights, dtype=np.float64, optimize=True)
    return float(error), float(np.einsum("ij,ij,i->", wanted, wanted, weights, dtype=np.float64, optimize=True))
