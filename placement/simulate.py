"""Replays tokens through the timing model of a placement: what each token's own neurons cost on each side.

In: PlanModel, Placements, Activations. Out: Replays, seconds per token. Next: simulate_command.py prints them.

The times are those of plan_vram.py with a token's neurons in the place of expected ones: GPU and CPU side by side
within a layer, and no wait where the CPU has nothing to do. So what is expected of unlikely neurons shows: layers that
the CPU skips, tokens on which it has much to do. Nothing here has run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hotcold.placement.activations import Activations
from hotcold.placement.choices import Layer, Rates, read_seconds
from hotcold.placement.plan_model import PlanModel
from hotcold.placement.plan_vram import Placement, attention_seconds, candidates, ffn_layers, outside_seconds, rates
from hotcold.runtime.errors import HotcoldError

_BITS = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)


@dataclass(frozen=True)
class Replay:
    """What one placement does with the tokens."""

    placement: Placement
    seconds: np.ndarray  # f64 [tokens]
    waits: np.ndarray  # i64 [tokens]: layers in which the GPU waits for the CPU
    shared: int  # layers in which it may have to
    gpu: np.ndarray  # f64 [tokens]: seconds the GPU works
    cpu: np.ndarray  # f64 [tokens]: seconds the CPU does

    @property
    def tokens_per_second(self) -> float:
        return len(self.seconds) / float(self.seconds.sum())

    @property
    def skipped(self) -> float:
        """Share of the layers of all tokens that the CPU could have had a part in and had none; 0 where none could."""
        return 1.0 - float(self.waits.sum()) / (self.shared * len(self.waits)) if self.shared else 0.0


def replay(
    model: PlanModel, placements: Sequence[Placement], activations: Activations, seed: int = 0
) -> list[Replay]:  # fmt: skip
    """seed: of the neurons that predictors name in vain. Raises HotcoldError for activations of another model."""
    if activations.n_ff != model.n_ff:
        raise HotcoldError("the activations are of another model: other numbers of neurons")
    runs = [_Run(model, p, activations.n_tokens) for p in placements]
    rng = np.random.default_rng(seed)
    for layer in range(model.n_layer):
        fired = activations.bits(layer)
        counts = _Counts(np.packbits(fired, axis=1))
        named = None
        density = model.density[layer]
        if density is not None and any(run.placement.sparsity == "predict" for run in runs):
            named = _Counts(np.packbits(fired | _in_vain(fired, model.frequency[layer], density, rng), axis=1))
        for run in runs:
            run.layer(layer, counts, named)
    return [run.result() for run in runs]


def _in_vain(fired: np.ndarray, frequency: np.ndarray, density: float, rng: np.random.Generator) -> np.ndarray:
    """bool [tokens, n_ff]: neurons that a predictor names although they do not fire."""
    with np.errstate(divide="ignore", invalid="ignore"):
        chance = np.where(frequency < 1, (candidates(frequency, density) - frequency) / (1 - frequency), 0.0)
    out: np.ndarray = rng.random(fired.shape, np.float32) < chance
    return out


class _Counts:
    """How many of the first neurons are set, for every token and any number of neurons."""

    def __init__(self, packed: np.ndarray) -> None:
        self._packed = packed
        before = np.zeros((len(packed), packed.shape[1] + 1), np.int64)
        np.cumsum(_BITS[packed], axis=1, out=before[:, 1:])
        self._before = before  # i64 [tokens, bytes + 1]

    @property
    def all(self) -> np.ndarray:
        """i64 [tokens]"""
        return self._before[:, -1]

    def first(self, n: int) -> np.ndarray:
        """i64 [tokens]: set among neurons 0..n-1."""
        whole, rest = divmod(n, 8)
        out = self._before[:, whole].copy()
        if rest:
            out += _BITS[self._packed[:, whole] >> (8 - rest)]
        return out


class _Run:
    """One placement, layer after layer."""

    def __init__(self, model: PlanModel, placement: Placement, n_tokens: int) -> None:
        self.model, self.placement = model, placement
        self._rates: Rates = rates(model, placement.hardware)
        self._layers = ffn_layers(model, placement.kind, placement.sparsity, placement.layer_on_gpu)
        self._sizes = model.sizes_in(placement.sparsity).layers
        rest = outside_seconds(model, placement.hardware, placement.layer_on_gpu)
        self._seconds = np.full(n_tokens, rest)
        self._waits = np.zeros(n_tokens, np.int64)
        self._shared = 0
        self._gpu, self._cpu = np.zeros(n_tokens), np.zeros(n_tokens)
        (self._gpu if any(placement.layer_on_gpu) else self._cpu)[:] = rest

    def layer(self, number: int, fired: _Counts, named: _Counts | None) -> None:
        p, layer = self.placement, self._layers[number]
        hot, keys = p.hot[number], p.keys_on_gpu[number]
        fires, decides, waits = self._work(layer, hot, keys, fired, named)
        before, gpu, cpu = read_seconds(layer, self._rates, keys, fires, decides)
        attention = attention_seconds(self.model, p.hardware, self._sizes[number], number, layer.usable)
        self._seconds += attention + before + np.maximum(gpu, cpu) + self._rates.t_sync * waits
        self._gpu += before + gpu + (attention if layer.usable else 0.0)
        self._cpu += cpu + (0.0 if layer.usable else attention)
        self._waits += waits
        self._shared += int(layer.usable and hot < layer.n)

    def _work(
        self, layer: Layer, hot: int, keys: bool, fired: _Counts, named: _Counts | None
    ) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray], np.ndarray]:  # fmt: skip
        """-> bytes of values and of keys that hot and cold neurons read; whether the GPU waits. [tokens] each."""
        n_tokens = len(self._seconds)
        if self.placement.sparsity == "dense":
            on_hot, on_cold = np.full(n_tokens, hot), np.full(n_tokens, layer.n - hot)
        else:
            on_hot = fired.first(hot)
            on_cold = fired.all - on_hot
        if layer.decide_scattered and named is not None:
            look_hot = named.first(hot)
            look_cold = named.all - look_hot
        else:
            look_hot, look_cold = np.full(n_tokens, hot), np.full(n_tokens, layer.n - hot)
        per_key = layer.key_row + layer.value_row - layer.fire  # bytes of a neuron that is looked at
        waits = (on_cold if keys else look_cold) > 0 if layer.usable else np.zeros(n_tokens, bool)
        fires = on_hot * layer.fire, on_cold * layer.fire
        return fires, (look_hot * per_key, look_cold * per_key), waits.astype(np.int64)

    def result(self) -> Replay:
        return Replay(self.placement, self._seconds, self._waits, self._shared, self._gpu, self._cpu)
