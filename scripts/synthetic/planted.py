"""How often each neuron fires, and the numbers in the weights that make it so: closed forms.

In: Recipe. Out: Plan. Next: rows.py.

After the norm, activations are about standard normal, so the key of a row of length 1 is too, and a neuron fires with
probability a if Phi^-1(a) is added to its key. OPT has biases for that. Models without biases get a direction of the
residual stream that is the same for every token and that no layer writes to: the first HEAD columns. They are CONSTANT
in each row of the embedding, and in a key row Phi^-1(a) / sqrt(n_embd); every other matrix has zeros there. How large
the constant is after the norm depends on how far the rest of the residual has grown, which is known, because every
layer adds a planned variance; the norm's weights of these columns make up for it.

Without a gate, values are never negative: what the neurons add on average would be the same for all tokens, grow with
the layers and make tokens alike. So there neurons come in pairs that fire equally often and add opposite rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.kernels import reference
from synthetic.shapes import Recipe

HEAD = 32  # columns of the constant direction: one block of Q8_0 and Q4_0
CONSTANT = 1.0  # of an embedding row there, in units of RESIDUAL
# Size of the embedding. The norms undo it; it keeps the block scales of the twin's scaled matrices normal F16 numbers.
RESIDUAL = 64.0
UP = 4.0  # length of an up row, for the same reason
POSITIONS = 0.3  # size of learned positions, in units of the embedding
# Variance that the FFNs and the attentions of all layers add to the residual, in units of the embedding's.
FFN_GROWTH, ATTENTION_GROWTH = 0.8, 0.3
AVERAGED = 0.15  # of a value's variance is left after attention has averaged over some dozens of tokens
HOTTEST, COLDEST = 0.98, 1e-5  # firing probabilities


@dataclass(frozen=True)
class Plan:
    """Numbers that both files share."""

    probability: np.ndarray | None  # f64 [n_ff]: how often neurons fire, in stored order; None: nothing planted
    shift: np.ndarray  # f64 [n_ff]: to be added to the keys, in their standard deviations
    spread: np.ndarray  # f64 [n_layer]: standard deviation of the residual before the FFN, in units of RESIDUAL
    down_std: float  # of a down matrix's weights
    output_std: float  # of an attention output matrix's weights

    def head_weight(self, layer: int, n_embd: int) -> float:
        """Weight of the FFN's norm in the constant columns: there key . x is then the shift."""
        return float(self.spread[layer]) * math.sqrt(n_embd) / (HEAD * CONSTANT)

    def deviation(self, layer: int, n_embd: int) -> float:
        """Standard deviation of the activations after the FFN's norm, outside of the constant columns."""
        s = float(self.spread[layer])
        return s / math.sqrt(s * s * (n_embd - HEAD) / n_embd + CONSTANT**2 * HEAD / n_embd)


def make_plan(recipe: Recipe) -> Plan:
    """Raises HotcoldError for a sparsity or skew that cannot be."""
    s = recipe.shape
    probability = None
    shift = np.zeros(s.n_ff)
    if recipe.sparsity is not None:
        probability = firing(s.n_ff, recipe.sparsity, recipe.skew)
        if recipe.order == "shuffled":
            pairs = np.random.default_rng([recipe.seed, 1]).permutation(s.n_ff // 2)
            probability = probability.reshape(-1, 2)[pairs].ravel()
        shift = ndtri(probability) + recipe.threshold
    layers = np.arange(s.n_layer)
    ffn, attention = FFN_GROWTH / s.n_layer, ATTENTION_GROWTH / s.n_layer
    start = 1.0 + (POSITIONS**2 if s.arch == "opt" else 0.0)
    spread = np.sqrt(start + layers * ffn + (layers + 1) * attention * AVERAGED)
    size = value_variance(recipe.activation, shift, recipe.threshold, s.gated)
    down = RESIDUAL * math.sqrt(ffn / (s.n_ff * size))
    return Plan(probability, shift, spread, down, RESIDUAL * math.sqrt(attention / s.n_embd))


def firing(n_ff: int, sparsity: float, skew: float) -> np.ndarray:
    """f64 [n_ff], descending: proportional to rank^-skew, cut off at HOTTEST, with a mean of 1 - sparsity."""
    if not 0.02 <= sparsity <= 0.999:
        raise HotcoldError(f"--sparsity {sparsity:g}: allowed are 0.02 to 0.999, the share of neurons that are off")
    if not 0 <= skew <= 3:
        raise HotcoldError(f"--skew {skew:g}: allowed are 0 (all neurons fire equally often) to 3")
    ranks = np.arange(1.0, n_ff + 1) ** -skew
    low, high = 0.0, n_ff**skew
    for _ in range(200):  # the mean grows with the factor
        factor = (low + high) / 2
        mean = np.clip(factor * ranks, COLDEST, HOTTEST).mean()
        low, high = (factor, high) if mean < 1 - sparsity else (low, factor)
    return np.clip(high * ranks, COLDEST, HOTTEST)


def value_variance(activation: str, shift: np.ndarray, threshold: float, gated: bool) -> float:
    """Mean over neurons of the variance of their values, for keys N(shift, 1) and up values N(0, UP^2)."""
    nodes = np.linspace(-6, 6, 241)
    weights = np.exp(-(nodes**2) / 2)
    weights /= weights.sum()
    total = 0.0
    for part in np.array_split(shift, -(-len(shift) // 1024)):
        values = reference.activate(activation, nodes + part[:, None], threshold)
        square, mean = values**2 @ weights, values @ weights
        total += float((square * UP**2 if gated else square - mean**2).sum())
    return total / len(shift) * (0.5 if activation == "drelu" else 1.0)


def hottest_for(probability: np.ndarray, share: float) -> float:
    """Share of the neurons, hottest first, that make `share` of all activations."""
    sums = np.cumsum(np.sort(probability)[::-1])
    return float(np.searchsorted(sums, share * sums[-1]) + 1) / len(sums)
