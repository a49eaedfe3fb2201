"""What planning must know of a model: bytes, how often its neurons fire, what the GPU can compute of it.

In: an open GGUF and its ModelConfig. Out: frozen PlanModel. Next: plan_vram.py divides it, simulate.py replays it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hotcold.placement.memory import ModelBytes, Room, model_bytes
from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.facts import fires, read_counts, read_predictor_facts, read_sparsity
from hotcold.runtime.gguf_file import GGUFFile
from hotcold.runtime.weights import load_weights

MAX_N_CTX = 1 << 24
UNKNOWN = 0.5  # share of the neurons that fire in a model that nobody has counted: that of random keys


@dataclass(frozen=True)
class PlanModel:
    """Per-layer tuples have n_layer entries."""

    sizes: ModelBytes  # with the KV cache of n_ctx tokens, and predictors
    n_ctx: int
    n_embd: int
    n_vocab: int
    window: tuple[int, ...]  # as in ModelConfig
    gated: bool
    split: bool  # the neuron-split layout: a neuron's rows lie together
    fires: bool  # some neurons are off
    by_key: bool  # the key row alone tells whether a neuron fires
    frequency: tuple[np.ndarray, ...]  # f64 [n_ff]: share of tokens a neuron fires on, descending; 1 where all do
    density: tuple[float | None, ...]  # share of the neurons that the layer's predictor names; None: it has none
    gpu_from: Mapping[str, int]  # "exact" (and dense), "predict" -> the first layer that the GPU can compute
    notes: tuple[str, ...] = ()  # what a user must know of these numbers
    gpu_notes: Mapping[str, tuple[str, ...]] | None = None  # as gpu_from: why it cannot compute the layers before
    room: Room | None = field(default=None, compare=False)  # for other contexts

    @property
    def n_layer(self) -> int:
        return len(self.frequency)

    @property
    def n_ff(self) -> tuple[int, ...]:
        return tuple(len(f) for f in self.frequency)

    @property
    def predicts(self) -> bool:
        return any(d is not None for d in self.density)

    @property
    def modes(self) -> tuple[str, ...]:
        """Ways to compute the FFN, as --sparsity names them."""
        if not (self.fires and self.split):
            return ("dense",)
        return ("dense", "exact", "predict") if self.predicts else ("dense", "exact")

    def sizes_in(self, sparsity: str) -> ModelBytes:
        """Predictors stay in the file where they are not used."""
        return self.sizes if sparsity == "predict" else self.sizes.without_predictors()


def read_model(
    file: GGUFFile, config: ModelConfig, n_ctx: int, frequency: Sequence[np.ndarray] | None = None
) -> PlanModel:  # fmt: skip
    """frequency: per layer f64 [n_ff] in stored order, descending; None: what the file says.

    Raises HotcoldError for frequencies of another shape, a context that the model cannot have, tensors that are none.
    """
    check_context(config, n_ctx)
    if frequency is None:
        frequency, notes = known_frequencies(file, config)
    else:
        check_frequencies(config, frequency)
        notes = ()
    gpu_from, gpu_notes = _usable(file, config)
    return PlanModel(
        sizes=model_bytes(file, config, n_ctx), n_ctx=n_ctx, n_embd=config.n_embd, n_vocab=config.n_vocab,
        window=config.window, gated=config.gated, split=config.layout == "neuron-split", fires=fires(config),
        by_key=config.activation in schema.SPARSE_ACTIVATIONS, frequency=tuple(np.asarray(f) for f in frequency),
        density=_density(file, config), gpu_from=gpu_from, notes=notes, gpu_notes=gpu_notes,
        room=Room(config, load_weights(file, config)),
    )  # fmt: skip


def in_context(model: PlanModel, config: ModelConfig, n_ctx: int) -> PlanModel:
    """A model read for a context of one token, with room for n_ctx."""
    check_context(config, n_ctx)
    assert model.n_ctx == 1 and model.room is not None
    return replace(model, sizes=model.sizes.of_context(n_ctx, model.room), n_ctx=n_ctx)


def check_context(config: ModelConfig, n_ctx: int) -> None:
    if not 1 <= n_ctx <= MAX_N_CTX:
        raise HotcoldError(f"--n-ctx {n_ctx}: must be from 1 to {MAX_N_CTX}")
    if config.rope is None and n_ctx > config.n_ctx_train:
        raise HotcoldError(f"--n-ctx {n_ctx}: this model has learned positions for {config.n_ctx_train} tokens only")


def check_frequencies(config: ModelConfig, frequency: Sequence[np.ndarray]) -> None:
    """One array per layer, one number per neuron. choices.py checks the numbers."""
    if len(frequency) != config.n_layer:
        raise HotcoldError(f"frequencies of {len(frequency)} layers, the model has {config.n_layer}")
    for layer, (values, n_ff) in enumerate(zip(frequency, config.n_ff, strict=True)):
        if values.shape != (n_ff,):
            raise HotcoldError(f"layer {layer}: frequencies of shape {list(values.shape)}, it has {n_ff} neurons")


def known_frequencies(file: GGUFFile, config: ModelConfig) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """-> per layer f64 [n_ff], descending; what must be said where they are not counts of sorted neurons."""
    if not fires(config):
        return [np.ones(n) for n in config.n_ff], ()
    counts = read_counts(file, config)
    if counts is not None and counts.sorted:
        return [fired / counts.tokens for fired in counts.fired], ()
    if counts is not None:
        note = "neurons are not sorted by how often they fire, so none is hotter than another: hotcold place sorts them"
        return [np.full(len(f), f.mean() / counts.tokens) for f in counts.fired], (note,)
    sparsity = read_sparsity(file, config)
    if sparsity is not None:
        note = ("how often each neuron fires is not known, only how many do, so none is hotter than another: hotcold "
                "profile counts, hotcold place sorts")  # fmt: skip
        return [np.full(n, 1 - s) for n, s in zip(config.n_ff, sparsity, strict=True)], (note,)
    note = (f"how often neurons fire is not known: {UNKNOWN:.0%} of them are assumed, none hotter than another: "
            "hotcold profile counts, hotcold place sorts")  # fmt: skip
    return [np.full(n, UNKNOWN) for n in config.n_ff], (note,)


def _density(file: GGUFFile, config: ModelConfig) -> tuple[float | None, ...]:
    """A predictor whose density the file does not tell names all neurons: nothing is expected of it."""
    facts = read_predictor_facts(file, config)
    if facts is None:
        return (None,) * config.n_layer
    density = facts.density or (1.0,) * config.n_layer
    none = {layer for layer in range(config.n_layer) if layer in facts.falls_back or config.norm_relu[layer]}
    return tuple(None if layer in none else d for layer, d in enumerate(density))


def _usable(file: GGUFFile, config: ModelConfig) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """-> the first layer that the GPU can compute, and why not one before; without and with predictors."""
    from hotcold.runtime.gpu.placement import last_layers, usable

    weights, whole = load_weights(file, config), last_layers(config, config.n_layer, budget=0, n_ctx=1)
    first, notes = {}, {}
    for mode in ("exact", "predict"):
        placement, why = usable(config, weights, mode, whole)
        first[mode], notes[mode] = placement.first, why
    return first, notes
