"""Metadata of the feed-forward layers: layout, activation, neurons, thresholds, predictors.

In: Keys of a GGUF. Out: FfnConfig, every number checked. Next: config.py, whose ModelConfig holds them.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotcold.runtime import schema
from hotcold.runtime.keys import Keys, show

_MAX_WIDTH = 1 << 20  # n_ff
_MAX_RANK = 1 << 16

# What a stock file of an architecture computes when no key says otherwise.
STOCK_ACTIVATIONS = {"llama": "silu", "qwen2": "silu", "qwen3": "silu", "minicpm": "silu", "arcee": "relu2",
                     "opt": "relu"}  # fmt: skip


@dataclass(frozen=True)
class PredictorConfig:
    """What a layer's predictor computes; schema.py has the formulas."""

    kind: str  # schema.PREDICTORS
    rank: int = 0  # rows of ffn_pred_in
    look_ahead: bool = False  # it reads the FFN input of the layer before
    threshold: float = 0.0  # a candidate scores above it


@dataclass(frozen=True)
class FfnConfig:
    """The feed-forward part of a ModelConfig, which explains the fields."""

    layout: str
    activation: str
    gated: bool
    n_ff: tuple[int, ...]
    thresholds: tuple[float, ...]
    norm_relu: tuple[bool, ...]
    predictors: tuple[PredictorConfig, ...]


def read_ffn(keys: Keys, n_layer: int, n_embd: int) -> FfnConfig:
    """Raises GGUFError naming the key or tensor, what was found and what is allowed."""
    split = keys.has(schema.KEY_VERSION)
    if split and keys.integer(schema.KEY_VERSION, 1, (1 << 32) - 1) > schema.VERSION:
        raise keys.error(f"key '{schema.KEY_VERSION}'", keys.raw(schema.KEY_VERSION),
                         f"up to {schema.VERSION}: the file is from a newer hotcold, upgrade this one")  # fmt: skip
    activation = keys.text(schema.KEY_ACTIVATION, default=None if split else STOCK_ACTIVATIONS[keys.arch])
    if activation not in schema.ACTIVATIONS:
        raise keys.error(f"key '{schema.KEY_ACTIVATION}'", show(activation), ", ".join(schema.ACTIVATIONS))
    turned = (False,) * n_layer
    if keys.has(schema.KEY_NORM_RELU):
        turned = tuple(bool(flag) for flag in keys.per_layer(schema.KEY_NORM_RELU, n_layer, 0, 1, "biu"))
    gates = [schema.FFN_GATE_T if split and turned[layer] else schema.FFN_GATE for layer in range(n_layer)]
    with_gate = [schema.block(layer, name) in keys.file.tensors for layer, name in enumerate(gates)]
    if any(with_gate) and not all(with_gate):
        raise keys.error("ffn_gate tensors", f"in {sum(with_gate)} of {n_layer} layers", "in all layers or in none")
    gated = with_gate[0]
    if activation == "drelu" and not gated:
        raise keys.error(f"key '{schema.KEY_ACTIVATION}'", "'drelu' without ffn_gate tensors",
                         "drelu only in a gated FFN")  # fmt: skip
    n_ff = _neurons(keys, n_layer, n_embd, split, gated, turned)
    predictors = _predictors(keys, n_layer) if split else ()
    return FfnConfig("neuron-split" if split else "stock", activation, gated, n_ff,
                     _thresholds(keys, n_layer, activation), turned, predictors)  # fmt: skip


def _neurons(
    keys: Keys, n_layer: int, n_embd: int, split: bool, gated: bool, turned: tuple[bool, ...]
) -> tuple[int, ...]:
    key = schema.KEY_NEURONS if split else "feed_forward_length"
    n_ff = [int(n) for n in keys.per_layer(key, n_layer, 1, _MAX_WIDTH, "iu")]
    if split and keys.has("feed_forward_length"):
        stock = keys.per_layer("feed_forward_length", n_layer, 1, _MAX_WIDTH, "iu")
        if stock != n_ff:
            raise keys.error(f"key '{schema.KEY_NEURONS}'", show(keys.raw(key)), "the same as feed_forward_length")
    for layer, n in enumerate(n_ff):
        by_column = split and turned[layer]
        name = schema.block(layer, schema.key_matrix(gated, by_column))
        wanted = (n_embd, n) if by_column else (n, n_embd)
        allowed = f"shape {list(wanted)}, one {'column' if by_column else 'row'} per neuron"
        shape = keys.matrix(name, allowed)
        if shape != wanted:
            raise keys.error(f"tensor '{name}'", f"shape {list(shape)}", allowed)
    return tuple(n_ff)


def _thresholds(keys: Keys, n_layer: int, activation: str) -> tuple[float, ...]:
    if not keys.has(schema.KEY_THRESHOLD):
        if activation == "fatrelu":
            raise keys.error(f"key '{schema.KEY_THRESHOLD}'", "nothing", "one threshold per layer for fatrelu")
        return (0.0,) * n_layer
    # Dense activations compare a magnitude with the threshold.
    low = 0.0 if activation in schema.DENSE_ACTIVATIONS else -1e30
    thresholds = tuple(float(t) for t in keys.per_layer(schema.KEY_THRESHOLD, n_layer, low, 1e30, "f"))
    if activation == "relu" and any(thresholds):
        raise keys.error(f"key '{schema.KEY_THRESHOLD}'", next(t for t in thresholds if t),
                         "0 for relu: with a threshold it is fatrelu")  # fmt: skip
    return thresholds


def _predictors(keys: Keys, n_layer: int) -> tuple[PredictorConfig, ...]:
    if not keys.has(schema.KEY_PREDICTOR_KIND):
        return ()
    kinds = keys.raw(schema.KEY_PREDICTOR_KIND)
    allowed = f"{n_layer} strings of {', '.join(schema.PREDICTORS)}"
    if not isinstance(kinds, list) or len(kinds) != n_layer:
        raise keys.error(f"key '{schema.KEY_PREDICTOR_KIND}'", show(kinds), allowed)
    for kind in kinds:
        if kind not in schema.PREDICTORS:
            raise keys.error(f"key '{schema.KEY_PREDICTOR_KIND}'", show(kind), allowed)
    ranks = keys.per_layer(schema.KEY_PREDICTOR_RANK, n_layer, 0, _MAX_RANK, "iu")
    ahead = keys.per_layer(schema.KEY_PREDICTOR_INPUT, n_layer, 0, 1, "iu")
    thresholds = keys.per_layer(schema.KEY_PREDICTOR_THRESHOLD, n_layer, -1e30, 1e30, "f")
    for layer, (kind, rank) in enumerate(zip(kinds, ranks, strict=True)):
        with_rank = kind in ("lowrank", "mlp")
        if with_rank != bool(rank):
            raise keys.error(f"key '{schema.KEY_PREDICTOR_RANK}'", f"{rank} in layer {layer}",
                             f"{'1 or more' if with_rank else '0'} for a predictor of kind {kind}")  # fmt: skip
        if ahead[layer] and (layer == 0 or not with_rank):
            raise keys.error(f"key '{schema.KEY_PREDICTOR_INPUT}'", f"1 in layer {layer} of kind {kind}",
                             "0 in the first layer and for kinds other than lowrank and mlp")  # fmt: skip
    return tuple(
        PredictorConfig(kind, rank, bool(a), float(t))
        for kind, rank, a, t in zip(kinds, ranks, ahead, thresholds, strict=True)
    )
