"""The arithmetic of relufication: weighted least squares, and a linear map made of always-on neurons.

In: arrays of one layer. Out: its new weights. Nothing here knows of files or models. Next: relufy_layers.py, which
feeds it.

With ReLU in place of SiLU or GELU a gated FFN loses `act(g) - relu(g)`, an even bump that is nearly constant where g
usually is. What is lost is therefore nearly linear in the input, and two things together win most of it back:

    y  =  D' @ (relu(g) * u)  +  Q @ (c * (P @ h))

D' are the down columns fitted anew. The second term is a linear map of rank R, written as R neurons that never switch
off: their gate row v gives c = v . h, about 1 for every token, their up rows are P, their down columns Q. So the
result is an ordinary ReLU FFN of n_ff + R neurons, and both terms are least squares: one system of equations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import linalg

# Added to the diagonal of the equations, as a share of its mean: what holds D' and the bypass back where the text says
# too little. Found on SmolLM2-135M with 16 to 32 thousand tokens; a factor of 3 either way hardly matters.
DOWN_RIDGE = 0.01
BYPASS_RIDGE = 0.02
GATE_RIDGE = 1e-3
LEVEL = 1.0  # what the always-on gates aim at
MARGIN = 2.0  # ... and at least this many times the layer's threshold


@dataclass(frozen=True)
class LayerFit:
    """New weights of a layer: `down` replaces the old columns, the other three make the always-on neurons."""

    down: np.ndarray  # f32 [n_ff, n_embd], one row per neuron
    gate: np.ndarray  # f32 [n_embd], the same for all
    up: np.ndarray  # f32 [rank, n_embd]
    hot_down: np.ndarray  # f32 [rank, n_embd]


def token_weights(y: np.ndarray) -> np.ndarray:
    """f32 [n], mean 1: so that the few tokens with huge targets do not decide alone. y: [n, n_embd]."""
    square = np.einsum("ij,ij->i", y, y, dtype=np.float64) / y.shape[1]
    weights = 1 / (square + max(float(np.median(square)), 1e-30))
    return np.asarray(weights / weights.mean(), np.float32)


def constant_gate(h: np.ndarray, weights: np.ndarray, threshold: float = 0.0) -> np.ndarray:
    """f32 [n_embd]: v with v . h about 1 for all rows of h [n, n_embd], or MARGIN thresholds where that is more."""
    scaled = h * np.sqrt(weights)[:, None]
    gram = (scaled.T @ scaled).astype(np.float64)
    v = linalg.solve(ridged(gram, GATE_RIDGE), scaled.T @ np.sqrt(weights).astype(np.float64), assume_a="pos")
    return np.asarray(v * max(LEVEL, MARGIN * threshold), np.float32)


def bypass_input(h: np.ndarray, gate: np.ndarray, threshold: float) -> np.ndarray:
    """f32 [n, n_embd]: what the always-on neurons make of h before their up rows: c * h, 0 where c is not above."""
    c = h @ gate
    return h * np.where(c > max(threshold, 0.0), c, np.float32(0))[:, None]


def threshold_for(keys: np.ndarray, sparsity: float) -> float:
    """The least threshold >= 0 that at least `sparsity` of the keys do not exceed; 0 where ReLU alone does it."""
    flat = np.sort(keys, axis=None)
    return max(0.0, float(flat[max(0, int(np.ceil(sparsity * flat.size)) - 1)]))


class Equations:
    """Sums of weighted least squares, in float64, over any number of blocks of rows."""

    def __init__(self, n_features: int, n_targets: int) -> None:
        self.gram = np.zeros((n_features, n_features))
        self.cross = np.zeros((n_features, n_targets))
        self.rows = 0

    def add(self, features: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> None:
        """features: f32 [n, n_features]; targets: f32 [n, n_targets]; weights: f32 [n]. Changes `features`."""
        features *= np.sqrt(weights)[:, None]
        self.gram += features.T @ features  # float32 within a block, whose rows are few
        self.cross += features.T @ (targets * np.sqrt(weights)[:, None])
        self.rows += len(features)


def ridged(gram: np.ndarray, share: float) -> np.ndarray:
    """gram with `share` of its mean diagonal (at least a tiny number) added to it."""
    diagonal = np.diag_indices(len(gram))
    out = gram.copy()
    out[diagonal] += share * float(gram[diagonal].mean()) + 1e-30
    return out


def fit_layer(equations: Equations, down: np.ndarray, up_scale: float, rank: int) -> LayerFit:
    """Solve for D', P and Q; the gate is left 0.

    equations: features are the values of the n_ff neurons, then bypass_input; targets are what the FFN should add.
    down: f32 [n_ff, n_embd], the columns it has now: D' is held near them. up_scale: root mean square of the up rows,
    which the new ones get too. rank 0: only D'.
    """
    n_ff, n_embd = down.shape
    gram = equations.gram
    cross = equations.cross - gram[:, :n_ff] @ down.astype(np.float64)  # what is left to explain
    mixed = gram[:n_ff, n_ff:]
    # The down columns are eliminated: for any bypass B their best change is own - seen @ B.
    factor = linalg.cho_factor(ridged(gram[:n_ff, :n_ff], DOWN_RIDGE))
    own = linalg.cho_solve(factor, cross[:n_ff])
    if rank == 0:
        empty = np.zeros((0, n_embd), np.float32)
        return LayerFit((down + own).astype(np.float32), np.zeros(n_embd, np.float32), empty, empty)
    seen = linalg.cho_solve(factor, mixed)
    # What is left are equations for B alone, and in their terms the loss of giving up some of B's rank.
    left = ridged(gram[n_ff:, n_ff:], BYPASS_RIDGE) - mixed.T @ seen
    full = linalg.solve(left, cross[n_ff:] - mixed.T @ own, assume_a="pos")
    p, q = reduced_rank(full, left, rank)
    up, hot_down = balanced(p, q, up_scale)
    return LayerFit((down + own - seen @ (p @ q)).astype(np.float32), np.zeros(n_embd, np.float32), up, hot_down)


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
