"""One layer's predictor, from samples of its input to what is written: labels, fit, calibration, measurement.

In: an open model, a profile's samples, what is wanted. Out: Result, whose figures are of held-out contexts. Next:
train.py, which goes through the layers.

Contexts are divided in three: one part to fit and to place each neuron's threshold, one to choose sizes and shift all
thresholds to the wanted recall, one only to measure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hotcold.convert.lazy import QType
from hotcold.placement import lowrank, mlp
from hotcold.placement.predictor import (
    ALWAYS,
    Predictor,
    Quality,
    Rows,
    as_stored,
    evaluate,
    quality,
    seen,
)
from hotcold.placement.predictor_bias import histogram, neuron_thresholds, shift_for
from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import GGUFFile, dequantize
from hotcold.runtime.kernels import formats, reference

TARGET = 0.999  # of the recall by length; 0.99 costs a small relufied model 4 to 11 % of perplexity
MIN_SAMPLES = 256
CELLS = 1 << 26  # tokens x neurons held per array: bounds memory where layers are wide
FEW = (2048, 1024)  # tokens of the first and second part that sizes are chosen with
RANKS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
TYPES = ((QType.Q8_0, QType.Q4_0), (QType.Q4_0, QType.Q4_0), (QType.Q8_0, QType.Q8_0))  # in, out
ON_ALWAYS = 0.999  # share of tokens: such a neuron is no work for a predictor


@dataclass(frozen=True)
class Wanted:
    """What to train."""

    kind: str
    target: float  # recall weighted by the length of what neurons add
    rank: int | None = None  # None: the one that reads the fewest bytes
    look_ahead: bool = False
    seed: int = 0
    xp: Any = np  # numpy or cupy


@dataclass(frozen=True)
class Split:
    """Rows of the samples; no context is in two parts."""

    fit: np.ndarray
    choose: np.ndarray
    test: np.ndarray


@dataclass(frozen=True)
class Sampled:
    """A layer's samples with their labels."""

    x: np.ndarray  # f32 [n, n_embd], what the predictor reads
    keys: np.ndarray  # f32 [n, n_ff], what a neuron fires by
    fired: np.ndarray  # bool [n, n_ff]
    size: np.ndarray  # f32 [n, n_ff]: length of what a neuron adds, |value| * |down row|; 0 where not fired
    threshold: float  # of the keys
    signs: np.ndarray | None = None  # i32 [n_ff, words], sign planes of the key rows; signbit only


@dataclass(frozen=True)
class Result:
    """A layer's outcome. Without predictor the layer runs exact."""

    predictor: Predictor | None
    quality: Quality  # on the held-out part
    rows: Rows
    n_bytes: int  # of the predictor, also of one that does not pay
    rank: int
    note: str = ""

    @property
    def exact(self) -> float:
        return self.rows.exact(self.quality.active)

    @property
    def predict(self) -> float:
        """What predicting reads; exact's where the layer falls back."""
        return self.exact if self.predictor is None else self.rows.predict(self.n_bytes, self.quality)


def without(rows: Rows, active: float, note: str) -> Result:
    """A layer that is not predicted; active: share of its neurons that fire."""
    return Result(None, Quality(1.0, 1.0, active, 1.0, active), rows, 0, 0, note)


def split_contexts(contexts: np.ndarray, seed: int) -> Split:
    """70 %, 15 % and 15 % of the contexts, drawn by seed; with fewer than three of them, of the tokens in order."""
    names = np.unique(contexts)
    if len(names) < 3:
        a, b = int(0.7 * len(contexts)), int(0.85 * len(contexts))
        rows = np.arange(len(contexts))
        return Split(rows[:a], rows[a:b], rows[b:])
    names = np.random.default_rng(seed).permutation(names)
    part = max(1, round(0.15 * len(names)))
    of = [names[2 * part:], names[:part], names[part:2 * part]]
    fit, choose, test = (np.flatnonzero(np.isin(contexts, group)) for group in of)
    return Split(fit, choose, test)


def thinned(n_samples: int, n_ff: int) -> np.ndarray:
    """Rows to use of so many samples: all, or evenly spaced ones where tokens x neurons would be too much memory."""
    most = max(MIN_SAMPLES, CELLS // n_ff)
    return np.arange(n_samples) if n_samples <= most else np.linspace(0, n_samples - 1, most).astype(np.int64)


def label(file: GGUFFile, config: ModelConfig, layer: int, own: np.ndarray, x: np.ndarray) -> Sampled:
    """What the layer's neurons do on its inputs own f32 [n, n_embd]; x: what the predictor reads instead."""
    key_name = schema.FFN_GATE if config.gated else schema.FFN_UP
    keys = _product(file, layer, key_name, own, slice(None))
    up = _product(file, layer, schema.FFN_UP_DOWN, own, slice(None, None, 2)) if config.gated else None
    threshold = config.thresholds[layer]
    value = np.empty(keys.shape, np.float32)
    for a in range(0, len(own), 1024):  # the reference computes in float64
        part = slice(a, a + 1024)
        value[part] = reference.neuron_values(config.activation, keys[part], None if up is None else up[part],
                                              threshold)  # fmt: skip
    size = np.abs(value)
    if config.activation in schema.SPARSE_ACTIVATIONS:
        fired = keys > np.float32(threshold)
    else:  # fires by the value, so that is what there is to predict
        fired = size > np.float32(threshold)
        keys = size.copy()
    size[~fired] = 0
    size *= _down_lengths(file, config, layer)
    if not np.isfinite(size).all():
        raise HotcoldError(f"{file.path}: layer {layer}: activations of the profile's samples are not finite: "
                           "the profile or the model is damaged")  # fmt: skip
    return Sampled(x, keys, fired, size, threshold)


def _down_lengths(file: GGUFFile, config: ModelConfig, layer: int) -> np.ndarray:
    """f32 [n_ff]: what a value of 1 adds to the residual. At the same bytes, perplexity suffers less for it."""
    name = schema.block(layer, schema.FFN_UP_DOWN if config.gated else schema.FFN_DOWN_T)
    rows = file.data(name)[1::2] if config.gated else file.data(name)
    lengths: np.ndarray = np.linalg.norm(dequantize(rows, file.tensors[name].ggml_type), axis=1)
    return lengths.astype(np.float32)


def key_signs(file: GGUFFile, config: ModelConfig, layer: int) -> np.ndarray:
    """Sign planes of the key rows, i32 [n_ff, words]."""
    name = schema.block(layer, schema.FFN_GATE if config.gated else schema.FFN_UP)
    planes: np.ndarray = reference.sign_planes(dequantize(file.data(name), file.tensors[name].ggml_type))
    return planes


def _product(file: GGUFFile, layer: int, name: str, x: np.ndarray, rows: slice) -> np.ndarray:
    """Rows of a matrix times x, plus the bias, as the kernels see both: f32 [n, rows]."""
    tensor = schema.block(layer, name)
    info = file.tensors[tensor]
    y = seen(QType(info.ggml_type), x) @ dequantize(file.data(tensor)[rows], info.ggml_type).T
    bias = schema.block(layer, schema.FFN_UP_BIAS if name == schema.FFN_UP_DOWN else name.replace(".weight", ".bias"))
    result: np.ndarray = y + file.data(bias).astype(np.float32) if bias in file.tensors else y
    return result


# ------------------------------------------------------------------ fit, calibrate, measure


def calibrated(p: Predictor, data: Sampled, rows: Rows, target: float, fit: np.ndarray,
               choose: np.ndarray) -> tuple[Predictor, float]:
    """The predictor as stored, with biases and threshold for the target; and the share of FFN bytes it then reads."""
    p = as_stored(p)
    h = histogram(p.scores(data.x[fit]), data.fired[fit], data.size[fit])
    thresholds = neuron_thresholds(h, rows.value / rows.check, target)
    p = replace(p, bias=np.clip(p.bias - thresholds, -ALWAYS, ALWAYS).astype(np.float32), threshold=0.0)
    margins = p.scores(data.x[choose])
    p = replace(p, threshold=shift_for(margins, data.size[choose], target))
    q = quality(margins > np.float32(p.threshold), data.fired[choose], data.size[choose])
    return p, rows.predict(p.n_bytes, q)


class _Layer:
    """A layer's data and what is wanted, for the functions below."""

    def __init__(self, data: Sampled, split: Split, rows: Rows, wanted: Wanted) -> None:
        self.data, self.split, self.rows, self.wanted = data, split, rows, wanted
        self.few = [part[np.linspace(0, len(part) - 1, min(n, len(part))).astype(np.int64)]
                    for part, n in zip((split.fit, split.choose), FEW, strict=True)]  # fmt: skip
        self.rate = data.fired[split.fit].mean(axis=0, dtype=np.float32)  # f32 [n_ff]

    def cost(self, p: Predictor) -> float:
        """About what the predictor reads, from few tokens."""
        return calibrated(p, self.data, self.rows, self.wanted.target, *self.few)[1]

    def final(self, p: Predictor, note: str = "") -> Result:
        """Calibrated on all and measured on tokens that had no part in it."""
        data, split = self.data, self.split
        p, _ = calibrated(p, data, self.rows, self.wanted.target, split.fit, split.choose)
        q = evaluate(p, data.x[split.test], data.fired[split.test], data.size[split.test])
        result = Result(p, q, self.rows, p.n_bytes, p.rank, note)
        if result.predict >= result.exact:
            return replace(result, predictor=None, note=f"predicting would read {result.predict:.1%} of the "
                           f"FFN's bytes, exact reads {result.exact:.1%}: runs exact")  # fmt: skip
        return result

    def regression(self, most: int) -> lowrank.Regression:
        """Neurons that are on or off all the time need no share of the rank: their bias does it."""
        matter = ((self.rate > 0) & (self.rate < ON_ALWAYS)).astype(np.float32)
        fit = self.split.fit
        targets = lowrank.key_targets(self.data.keys[fit], self.data.threshold)
        return lowrank.regress(self.data.x[fit], targets, matter, most)


def train_layer(data: Sampled, split: Split, rows: Rows, wanted: Wanted, skew: float, budget: int) -> Result:
    """skew: of the layer, from the profile. budget: parameters that a net (mlp) may have."""
    layer = _Layer(data, split, rows, wanted)
    if wanted.kind == "signbit":
        return layer.final(Predictor("signbit", False, 0.0, np.zeros(rows.n_ff, np.float32), signs=data.signs))
    most = max(lowrank.STEP, min(data.x.shape[1], rows.n_ff, RANKS[-1]) // lowrank.STEP * lowrank.STEP)
    if wanted.kind == "lowrank":
        return layer.final(_lowrank(layer, most))
    return _mlp(layer, most, skew, budget)


def _lowrank(layer: _Layer, most: int) -> Predictor:
    """The rank and types that read the fewest bytes: ranks upwards until two in a row read more."""
    wanted = layer.wanted
    most = max(wanted.rank or 0, most)
    regression = layer.regression(most)

    def make(rank: int, type_in: QType = QType.Q8_0, type_out: QType = QType.Q4_0) -> Predictor:
        w_in, w_out, bias = regression.of_rank(rank, wanted.seed)
        return Predictor("lowrank", wanted.look_ahead, 0.0, bias, w_in, None, w_out, None, type_in, type_out)

    best, worse = wanted.rank or RANKS[0], 0
    least = layer.cost(make(best))
    for rank in () if wanted.rank else [r for r in RANKS[1:] if r <= most]:
        cost = layer.cost(make(rank))
        worse = 0 if cost < least else worse + 1
        if cost < least:
            best, least = rank, cost
        if worse == 2:
            break
    return min((make(best, a, b) for a, b in TYPES), key=layer.cost)


def _mlp(layer: _Layer, most: int, skew: float, budget: int) -> Result:
    """The hidden size by mlp.adapt_size within the budget."""
    data, split, wanted = layer.data, layer.split, layer.wanted
    n_embd, n_ff = data.x.shape[1], layer.rows.n_ff
    budgeted = mlp.most_hidden(budget, n_embd, n_ff)
    # Beyond this size the net itself would read more than all the key rows it could ever save.
    saved = layer.rows.check * n_ff * (1 - float(layer.rate.mean()))
    paying = int(saved / ((n_embd + n_ff) * formats.Q4_0_BYTES / formats.BLOCK)) // mlp.STEP * mlp.STEP
    limit = min(budgeted, max(mlp.STEP, paying))
    fixed = wanted.rank
    if budgeted < (fixed or mlp.STEP):
        note = f"the budget of parameters leaves {budget}, too few for {fixed or mlp.STEP} hidden units: runs exact"
        return without(layer.rows, float(data.fired[split.test].mean()), note)
    regression = layer.regression(fixed or min(limit, most))
    parts = [mlp.weighted(data.x[p], data.fired[p], data.size[p]) for p in (split.fit, split.choose)]

    def attempt(hidden: int) -> mlp.Trial:
        start = mlp.beginning(regression, hidden, layer.rate, wanted.seed)
        w, accuracy = mlp.train(start, parts[0], parts[1], mlp.Settings(wanted.seed), wanted.xp)
        made = [Predictor("mlp", wanted.look_ahead, 0.0, w.bias, w.w_in, w.b_in, w.w_out, None, a, b)
                for a, b in TYPES]  # fmt: skip
        costs = [layer.cost(p) for p in made]
        least = int(np.argmin(costs))
        return mlp.Trial(hidden, accuracy, costs[least], made[least])

    if fixed:
        return layer.final(attempt(fixed).result)
    start = mlp.start_size(float(layer.rate.mean()), limit)
    trial = mlp.adapt_size(start, limit, skew <= mlp.SKEWED, attempt)
    bound = f"the budget of parameters ends the hidden size at {budgeted}" if trial.hidden == budgeted else ""
    return layer.final(trial.result, bound)
