"""The closed-form predictor: a matrix of low rank instead of the key matrix.

In: FFN inputs of some tokens, and per neuron what is to be predicted of them. Out: the best pair of thin matrices,
for every rank. Next: predictor_layer.py, which picks the rank.

Reduced-rank regression: minimise sum over tokens and neurons of w_i (y_ti - a_i (B x_t) - c_i)^2. With C the second
moment of x (centred) and L its Cholesky factor, the solution is the truncated singular value decomposition of
L^-1 cov(x, y) sqrt(w), so directions in which x hardly moves cost nothing, which a decomposition of the key matrix
alone does not know. y is the key in units of its standard deviation, cut off at 1: how far beyond that a key lies says
nothing more about whether it fires.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

STEP = 32  # ranks are multiples of it: a block of the quantized types
RIDGE = 3e-3  # of the mean variance of x, added to each
CLIP = 1.0  # standard deviations
ROWS = 2048  # tokens at a time


@dataclass(frozen=True)
class Regression:
    """All ranks at once. Hidden values are uncorrelated and of variance 1 on the tokens it was made from."""

    mean_x: np.ndarray  # f32 [n_embd]
    inputs: np.ndarray  # f32 [most, n_embd], by importance
    outputs: np.ndarray  # f32 [n_ff, most]

    def of_rank(self, rank: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """w_in f32 [rank, n_embd], w_out f32 [n_ff, rank] and bias f32 [n_ff]; scores have mean 0, deviation 1.

        Hidden values are turned by a random rotation: so all are of one size, and 4 bits hold each row well.
        Ranks above what the inputs have are filled with zeros.
        """
        have = min(rank, len(self.inputs))
        w_in = np.zeros((rank, self.inputs.shape[1]), np.float32)
        w_out = np.zeros((len(self.outputs), rank), np.float32)
        w_in[:have], w_out[:, :have] = self.inputs[:have], self.outputs[:, :have]
        turn = rotation(rank, seed)
        w_in, w_out = turn @ w_in, w_out @ turn.T
        norm = np.linalg.norm(w_out, axis=1, keepdims=True)
        w_out = np.divide(w_out, norm, out=np.zeros_like(w_out), where=norm > 1e-20)
        return w_in, w_out, -w_out @ (w_in @ self.mean_x)


def rotation(n: int, seed: int) -> np.ndarray:
    """A random orthogonal matrix, f32 [n, n]."""
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((n, n)))
    return (q * np.sign(np.diag(r))).astype(np.float32)


def regress(x: np.ndarray, targets: np.ndarray, weights: np.ndarray, most: int, ridge: float = RIDGE) -> Regression:
    """x f32 [n, n_embd]; targets f32 [n, n_ff]; weights f32 [n_ff], 0: the neuron does not matter. most: highest rank.

    Raises numpy.linalg.LinAlgError for x that is not finite.
    """
    mean_x, mean_y = x.mean(axis=0), targets.mean(axis=0)
    second, cross = _moments(x - mean_x, targets, mean_y)
    n_embd = len(second)
    second[np.diag_indices(n_embd)] += ridge * max(float(np.trace(second)) / n_embd, 1e-20)
    factor = np.linalg.cholesky(second)  # [n_embd, n_embd], lower
    white = np.linalg.solve(factor, cross)  # [n_embd, n_ff]: coefficients for whitened inputs
    weighted = white * np.sqrt(weights)
    _, vectors = np.linalg.eigh(weighted @ weighted.T)
    basis = vectors[:, ::-1][:, :most]  # [n_embd, most]
    inputs = np.linalg.solve(factor.T, basis).T
    outputs = (basis.T @ white).T * (weights > 0)[:, None]
    return Regression(mean_x, inputs.astype(np.float32), outputs.astype(np.float32))


def _moments(x: np.ndarray, targets: np.ndarray, mean_y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x^T x / n and x^T (targets - mean_y) / n in float64; x is centred."""
    second = np.zeros((x.shape[1], x.shape[1]))
    cross = np.zeros((x.shape[1], targets.shape[1]))
    for a in range(0, len(x), ROWS):  # float32 products of few rows, summed in float64
        part = x[a:a + ROWS]
        second += part.T @ part
        cross += part.T @ (targets[a:a + ROWS] - mean_y)
    return second / len(x), cross / len(x)


def key_targets(keys: np.ndarray, threshold: float, clip: float = CLIP) -> np.ndarray:
    """Keys f32 [n, n_ff] -> how far they are above the threshold, in standard deviations within +-clip."""
    deviation = np.maximum(keys.std(axis=0), np.float32(1e-20))
    return np.clip((keys - np.float32(threshold)) / deviation, -clip, clip)
