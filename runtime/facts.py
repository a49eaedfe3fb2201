"""What profiling, training and placing left in a file, checked: counts per neuron, predictors, placement index.

In: an open GGUF and its ModelConfig. Out: Counts, PredictorFacts, PlacementFacts, or None where there is nothing.
Next: inspect.py, placement/place.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType

from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.gguf_file import GGUFFile
from hotcold.runtime.keys import Keys, show

MAX_TOKENS = 1 << 53
MAX_PLACEMENTS = 256
_U32 = (1 << 32) - 1


def fires(config: ModelConfig, layer: int | None = None) -> bool:
    """Whether some neurons of the model, or of a layer, can be off: by activation, or by a threshold on their value."""
    thresholds = config.thresholds if layer is None else config.thresholds[layer : layer + 1]
    return config.activation in schema.SPARSE_ACTIVATIONS or any(thresholds)


@dataclass(frozen=True)
class Counts:
    """How often each neuron fired. Neurons in stored order."""

    tokens: int
    corpus: str  # a name for people, as it is in the file: escape it before printing
    sha256: str
    fired: tuple[np.ndarray, ...]  # per layer i64 [n_ff]

    @property
    def sorted(self) -> bool:
        """Whether every layer's neurons are in descending order."""
        return all(bool((np.diff(fired) <= 0).all()) for fired in self.fired)

    @property
    def sparsity(self) -> list[float]:
        """Per layer, the share of neurons that are off."""
        return [1.0 - float(fired.sum()) / (self.tokens * len(fired)) for fired in self.fired]

    @property
    def mean_sparsity(self) -> float:
        """Of all pairs of a token and a neuron of the model, the share that is off: layers weigh by their neurons."""
        return 1.0 - sum(float(f.sum()) for f in self.fired) / (self.tokens * sum(map(len, self.fired)))


def read_counts(file: GGUFFile, config: ModelConfig) -> Counts | None:
    """Raises GGUFError for counts that only some layers have, or that cannot be."""
    names = [schema.block(layer, schema.FFN_NEURON_COUNT) for layer in range(config.n_layer)]
    present = [name in file.tensors for name in names]
    if not any(present):
        return None
    keys = Keys(file)
    if not all(present):
        raise keys.error(f"tensor '{names[present.index(False)]}'", "nothing", "counts in all layers or in none")
    tokens = keys.integer(schema.KEY_PROFILE_TOKENS, 1, MAX_TOKENS)
    fired = []
    for name, n_ff in zip(names, config.n_ff, strict=True):
        info = file.tensors[name]
        if info.ggml_type != GGMLQuantizationType.I64 or info.shape != (n_ff,):
            raise keys.error(f"tensor '{name}'", f"{info.ggml_type.name} {list(info.shape)}", f"I64 [{n_ff}]")
        counts = file.data(name)
        bad = counts[(counts < 0) | (counts > tokens)]
        if len(bad):
            raise keys.error(f"tensor '{name}'", f"a count of {bad[0]}", f"0 to the {tokens} tokens profiled")
        fired.append(counts)
    return Counts(tokens, keys.text(schema.KEY_PROFILE_CORPUS, default=""),
                  keys.text(schema.KEY_PROFILE_SHA256, default=""), tuple(fired))  # fmt: skip


def read_sparsity(file: GGUFFile, config: ModelConfig) -> list[float] | None:
    """Per layer, as the file says it; it may say it without counts. Raises GGUFError for what is no share."""
    keys = Keys(file)
    if not keys.has(schema.KEY_SPARSITY):
        return None
    return [float(s) for s in keys.per_layer(schema.KEY_SPARSITY, config.n_layer, 0.0, 1.0, "f")]


@dataclass(frozen=True)
class PredictorFacts:
    """Per layer."""

    kinds: tuple[str, ...]
    recall: tuple[float, ...]
    density: tuple[float, ...]

    @property
    def falls_back(self) -> list[int]:
        """Layers that run exact in predict mode."""
        return [layer for layer, kind in enumerate(self.kinds) if kind == "none"]


def read_predictor_facts(file: GGUFFile, config: ModelConfig) -> PredictorFacts | None:
    """Only what the metadata says of quality; the runtime checks tensors. Raises GGUFError for what cannot be."""
    if not config.predictors:
        return None
    keys, kinds = Keys(file), tuple(p.kind for p in config.predictors)
    recall, density = (
        tuple(keys.per_layer(key, config.n_layer, 0.0, 1.0 + 1e-6, "f")) if keys.has(key) else ()
        for key in (schema.KEY_PREDICTOR_RECALL, schema.KEY_PREDICTOR_DENSITY)
    )
    return PredictorFacts(kinds, recall, density)


@dataclass(frozen=True)
class PlacementFacts:
    """One solved budget."""

    budget: int  # bytes
    n_ctx: int
    hot: tuple[int, ...]  # per layer: neurons 0..hot-1 are on the GPU


def read_placement_facts(file: GGUFFile, config: ModelConfig) -> list[PlacementFacts]:
    """The placement index, empty where there is none. Raises GGUFError for arrays that do not fit each other."""
    keys = Keys(file)
    if not keys.has(schema.KEY_PLACEMENT_BUDGET):
        return []
    n = file.length(schema.KEY_PLACEMENT_BUDGET) or 0
    if not 1 <= n <= MAX_PLACEMENTS:
        raise keys.error(f"key '{schema.KEY_PLACEMENT_BUDGET}'", f"{n} entries", f"1 to {MAX_PLACEMENTS}")
    budgets = keys.per_layer(schema.KEY_PLACEMENT_BUDGET, n, 0, 1 << 62, "iu")
    contexts = keys.per_layer(schema.KEY_PLACEMENT_N_CTX, n, 0, _U32, "iu")
    key = schema.KEY_PLACEMENT_HOT
    hot = np.asarray(keys.raw(key, f"{n} x {config.n_layer} numbers"))
    if hot.dtype.kind not in "iu" or hot.shape != (n * config.n_layer,):
        raise keys.error(f"key '{key}'", show(file.metadata[key]), f"{n} x {config.n_layer} numbers")
    hot = hot.reshape(n, config.n_layer)
    for layer, n_ff in enumerate(config.n_ff):
        if hot[:, layer].min() < 0 or hot[:, layer].max() > n_ff:
            raise keys.error(f"key '{key}'", f"{hot[:, layer].max()} in layer {layer}", f"0 to its {n_ff} neurons")
    return [PlacementFacts(budget, n_ctx, tuple(row)) for budget, n_ctx, row
            in zip(budgets, contexts, hot.tolist(), strict=True)]  # fmt: skip
