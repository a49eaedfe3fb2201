"""Key rows of low rank, and the predictor that knows them: what it finds is measured, not assumed.

In: Recipe and Plan. Out: per layer a pool of key rows, a Predictor, its Quality. Next: model.py.

Key rows are U V plus noise, normalized to length 1; the predictor is U and V as they are stored. It is measured on
activations as they are after the norm (Gaussian, of the planned size), with weights as they come back from the file:
half of the tokens choose the threshold, the other half tell recall, precision and density.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hotcold.placement.predictor import Predictor, Quality, as_stored, quality, seen
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.kernels import reference
from synthetic.planted import CONSTANT, HEAD, Plan
from synthetic.rows import POOL_ROWS, RowPool, check_cols, random_rows, rng_for, unpack
from synthetic.shapes import PredictorRecipe, Recipe

SAMPLE = 512  # tokens, of which half choose the threshold


@dataclass(frozen=True)
class Factors:
    """Key rows of one layer's pool and the thin matrices behind them."""

    rows: np.ndarray  # f32 [POOL_ROWS, n_embd], of length 1
    w_out: np.ndarray  # f32 [POOL_ROWS, rank]
    w_in: np.ndarray  # f32 [rank, n_embd]


def key_factors(recipe: Recipe, layer: int) -> Factors:
    """Hidden values w_in . x have variance 1 for activations of variance 1."""
    p, n_embd = _predictor(recipe), recipe.shape.n_embd
    rng = rng_for(recipe.seed, f"keys {layer}")
    w_in = random_rows(rng, n_embd, n_embd**-0.5, rows=p.rank)
    w_out = rng.standard_normal((POOL_ROWS, p.rank), dtype=np.float32) * np.float32(p.rank**-0.5)
    rows = w_out @ w_in + random_rows(rng, n_embd, p.noise * n_embd**-0.5)
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return Factors(rows / length, w_out / length, w_in)


def full_rank_keys(recipe: Recipe) -> np.ndarray:
    """f32 [POOL_ROWS, n_embd], rows of length 1: where no predictor is planted."""
    rows = random_rows(rng_for(recipe.seed, "keys"), recipe.shape.n_embd, 1.0)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def sample(recipe: Recipe, plan: Plan, layer: int, n: int) -> np.ndarray:
    """f32 [n, n_embd]: what the FFN's norm gives for random tokens."""
    s, n_embd = recipe.shape, recipe.shape.n_embd
    residual = random_rows(rng_for(recipe.seed, f"sample {layer}"), n_embd, float(plan.spread[layer]), CONSTANT, n)
    weight = np.ones(n_embd)
    if s.arch == "opt":
        return reference.layer_norm(residual, weight, None, 1e-5).astype(np.float32)
    weight[:HEAD] = plan.head_weight(layer, n_embd)
    return reference.rms_norm(residual, weight, 1e-5).astype(np.float32)


def keys_of(x: np.ndarray, pool: RowPool, index: np.ndarray, head: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """f32 [n, n_ff]: the keys that the runtime computes, but for the order of additions."""
    seen_x = seen(pool.kind, x)
    n_first = pool.first.shape[1]
    rows = unpack(pool.packed, pool.kind)
    keys: np.ndarray = (seen_x[:, n_first:] @ rows[:, n_first:].T)[:, index]
    keys += seen_x[:, :n_first] @ unpack(pool.heads(index, head), pool.kind).T
    return keys + bias


def measured(recipe: Recipe, plan: Plan, layer: int, factors: Factors, pool: RowPool, index: np.ndarray,
             head: np.ndarray, bias: np.ndarray) -> tuple[Predictor, Quality]:
    """The layer's predictor with the threshold that finds the wanted share, and how good it is on other tokens."""
    p, t = _predictor(recipe), recipe.threshold
    x = sample(recipe, plan, layer, SAMPLE)
    keys = keys_of(x, pool, index, head, bias)
    constant = (plan.shift * plan.deviation(layer, recipe.shape.n_embd) - t).astype(np.float32)
    predictor = as_stored(Predictor("lowrank", False, 0.0, constant, w_in=factors.w_in, w_out=factors.w_out[index],
                                    type_in=p.kind, type_out=p.kind))  # fmt: skip
    scores = predictor.scores(x)
    fired = reference.fires(keys, t)
    half = SAMPLE // 2
    threshold = float(np.quantile(scores[:half][fired[:half]], 1 - p.recall))
    size = reference.activate(recipe.activation, keys[half:], t)
    return replace(predictor, threshold=threshold), quality(scores[half:] > threshold, fired[half:], size)


def check_rank(p: PredictorRecipe, n_embd: int) -> None:
    """Raise HotcoldError for a predictor that cannot be stored."""
    if not 1 <= p.rank <= n_embd:
        raise HotcoldError(f"--rank {p.rank}: allowed are 1 to the model's width, {n_embd}")
    if not 0 <= p.noise <= 1:
        raise HotcoldError(f"--noise {p.noise:g}: allowed are 0 to 1")
    if not 0.5 <= p.recall < 1:
        raise HotcoldError(f"--recall {p.recall:g}: allowed are 0.5 to less than 1")
    check_cols(p.rank, p.kind, "--rank: a predictor matrix")


def _predictor(recipe: Recipe) -> PredictorRecipe:
    if recipe.predictor is None:
        raise HotcoldError("no predictor is to be made: please report this")
    return recipe.predictor
