"""What a report shows, as numbers: gathered from a model and perhaps a profile, computed once, checked.

In: an open GGUF, its ModelConfig, a Profile or None. Out: Facts. Next: report_page.py, plots.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from hotcold.placement.placement_index import read_placements
from hotcold.placement.plan_vram import Placement
from hotcold.placement.predictor import Quality, Rows, computed, rows_of
from hotcold.placement.profile import Profile, check_profile, persistence, skew
from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.facts import read_counts, read_predictor_facts
from hotcold.runtime.gguf_file import GGUFFile, safe_text
from hotcold.runtime.keys import Keys
from hotcold.runtime.weights import load_weights

_MAX_SUM = 1 << 62  # of a layer's counts: i64 must hold it
_MAX_RANK = 1 << 20


@dataclass(frozen=True)
class Predictors:
    """Per layer. Arrays are None where the file does not say."""

    kinds: tuple[str, ...]
    ranks: tuple[int, ...]
    look_ahead: tuple[bool, ...]
    recall: np.ndarray | None
    recall_magnitude: np.ndarray | None
    precision: np.ndarray | None
    density: np.ndarray | None
    n_bytes: np.ndarray  # i64 [n_layer]

    @property
    def falls_back(self) -> np.ndarray:
        """bool [n_layer]: layers without predictor, which run exact."""
        return np.array([kind == "none" for kind in self.kinds])


@dataclass(frozen=True)
class Relufication:
    rank: int
    tokens: int
    error: np.ndarray | None  # f64 [n_layer]


@dataclass(frozen=True)
class Facts:
    """Arrays have one entry per layer; shares are of 1."""

    config: ModelConfig
    path: str
    size: int  # bytes of the file
    n_weights: int
    types: dict[str, int]  # of matrices -> bytes
    tokens: int
    corpus: str
    sha256: str
    source: str  # where the counts are from
    sorted: bool  # the file's neurons are in order of frequency
    fired: tuple[np.ndarray, ...]  # i64 [n_ff], descending
    sparsity: np.ndarray
    skew: np.ndarray
    never: np.ndarray  # share of the neurons that never fired
    top_tenth: np.ndarray  # share of the firings that the most active tenth makes
    persistence: np.ndarray | None  # share of the firings that go on with the next token
    ffn_bytes: np.ndarray
    exact: np.ndarray  # share of the FFN's bytes that a token reads in exact mode
    predict: np.ndarray | None
    predictors: Predictors | None
    relufication: Relufication | None
    placements: tuple[Placement, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def n_layer(self) -> int:
        return self.config.n_layer

    def mean(self, values: np.ndarray, used: np.ndarray | None = None) -> float:
        """Over all layers, or (bool [n_layer]) these; a layer weighs what it has of the neurons."""
        layers = np.ones(self.n_layer, bool) if used is None else used
        return float(np.average(values[layers], weights=np.array(self.config.n_ff)[layers]))


def gather(file: GGUFFile, config: ModelConfig, profile: Profile | None, profile_name: str = "") -> Facts:
    """Raises HotcoldError for a model without counts, and for what cannot be."""
    shown = safe_text(str(file.path))
    if config.layout != "neuron-split":
        raise HotcoldError(f"{shown}: is a stock file, nothing is known of its neurons: run hotcold convert, hotcold "
                           "profile and hotcold place on it first")  # fmt: skip
    load_weights(file, config)
    counts = read_counts(file, config)
    if profile is not None:
        check_profile(profile, file, config)
        tokens, corpus, sha256, raw = profile.n_tokens, profile.corpus, profile.sha256, profile.fired
        source = f"the profile {safe_text(profile_name)}"
    elif counts is not None:
        tokens, corpus, sha256, raw = counts.tokens, counts.corpus, counts.sha256, counts.fired
        source = "the model file"
    else:
        raise HotcoldError(f"{shown}: how often its neurons fire is not known: run hotcold profile on it and hotcold "
                           "place with the result, or give the result with --profile")  # fmt: skip
    if tokens < 1 or tokens * max(config.n_ff) >= _MAX_SUM:
        raise HotcoldError(f"{source}: {tokens} tokens profiled, allowed are 1 to {_MAX_SUM // max(config.n_ff)}")
    fired = tuple(np.sort(np.asarray(f, np.int64))[::-1] for f in raw)
    share = np.array([f.sum() / (tokens * len(f)) for f in fired])
    predictors = _predictors(file, config)
    rows = [rows_of(file, config, layer) for layer in range(config.n_layer)]
    n_bytes = np.array([r.total for r in rows], np.float64)
    exact, predict = _bytes_shares(config, rows, share, predictors)
    placements, notes = _placements(file, config)
    return Facts(
        config=config, path=str(file.path), size=file.size,
        n_weights=sum(math.prod(t.shape) for t in file.tensors.values()), types=_types(file),
        tokens=tokens, corpus=corpus, sha256=sha256, source=source, sorted=counts is not None and counts.sorted,
        fired=fired, sparsity=1 - share, skew=np.array([skew(f) for f in fired]),
        never=np.array([np.mean(f == 0) for f in fired]), top_tenth=np.array([_top(f, 0.1) for f in fired]),
        persistence=persistence(profile) if profile is not None and profile.n_pairs > 0 else None,
        ffn_bytes=n_bytes, exact=exact, predict=predict, predictors=predictors,
        relufication=_relufication(file, config), placements=placements, notes=notes,
    )  # fmt: skip


def cumulative(fired: np.ndarray) -> np.ndarray:
    """fired: i64 [n], descending -> f64 [n + 1]: share of the firings that the first i neurons make; 0 where none."""
    sums = np.concatenate([np.zeros(1), np.cumsum(fired, dtype=np.float64)])
    return sums / max(sums[-1], 1.0)


def _top(fired: np.ndarray, share: float) -> float:
    return float(cumulative(fired)[max(1, round(share * len(fired)))])


def _types(file: GGUFFile) -> dict[str, int]:
    """Bytes per type, of tensors with two dimensions, largest first."""
    found: dict[str, int] = {}
    for t in file.tensors.values():
        if len(t.shape) == 2:
            found[t.ggml_type.name] = found.get(t.ggml_type.name, 0) + t.n_bytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


# ------------------------------------------------------------------ bytes


def _total(file: GGUFFile, layer: int, names: tuple[str, ...]) -> int:
    """Bytes of those of the tensors that the layer has."""
    infos = (file.tensors.get(schema.block(layer, name)) for name in names)
    return sum(info.n_bytes for info in infos if info is not None)


def _bytes_shares(
    config: ModelConfig, rows: list[Rows], fired: np.ndarray, found: Predictors | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Shares of the FFN's bytes that a token reads, exact and predict. fired: f64 [n_layer], share of the neurons."""
    active = [computed(config, layer, float(share)) for layer, share in enumerate(fired)]
    exact = np.array([r.exact(a) for r, a in zip(rows, active, strict=True)])
    if found is None or found.density is None or found.recall is None:
        return exact, None
    predict = exact.copy()
    for layer in np.flatnonzero(~found.falls_back).tolist():
        # Precision and recall by magnitude make no bytes.
        q = Quality(float(found.recall[layer]), 1.0, 1.0, float(found.density[layer]), active[layer])
        predict[layer] = rows[layer].predict(float(found.n_bytes[layer]), q)
    return exact, predict


# ------------------------------------------------------------------ what other commands left


def _predictors(file: GGUFFile, config: ModelConfig) -> Predictors | None:
    facts = read_predictor_facts(file, config)
    if facts is None:
        return None
    keys = Keys(file)

    def shares(key: str) -> np.ndarray | None:
        if not keys.has(key):
            return None
        return np.array(keys.per_layer(key, config.n_layer, 0.0, 1.0 + 1e-6, "f"), np.float64)

    n_bytes = [_total(file, layer, schema.PRED_TENSORS) for layer in range(config.n_layer)]
    return Predictors(
        facts.kinds, tuple(p.rank for p in config.predictors), tuple(p.look_ahead for p in config.predictors),
        shares(schema.KEY_PREDICTOR_RECALL), shares(schema.KEY_PREDICTOR_RECALL_MAGNITUDE),
        shares(schema.KEY_PREDICTOR_PRECISION), shares(schema.KEY_PREDICTOR_DENSITY), np.array(n_bytes, np.int64),
    )  # fmt: skip


def _relufication(file: GGUFFile, config: ModelConfig) -> Relufication | None:
    keys = Keys(file)
    if not any(keys.has(k) for k in (schema.KEY_RELUFY_RANK, schema.KEY_RELUFY_TOKENS, schema.KEY_RELUFY_ERROR)):
        return None
    error = None
    if keys.has(schema.KEY_RELUFY_ERROR):
        error = np.array(keys.per_layer(schema.KEY_RELUFY_ERROR, config.n_layer, 0.0, 1e30, "f"), np.float64)
    return Relufication(keys.integer(schema.KEY_RELUFY_RANK, 0, _MAX_RANK, 0),
                        keys.integer(schema.KEY_RELUFY_TOKENS, 0, 1 << 62, 0), error)  # fmt: skip


def _placements(file: GGUFFile, config: ModelConfig) -> tuple[tuple[Placement, ...], tuple[str, ...]]:
    """A placement that cannot be read does not keep the rest from being shown."""
    try:
        return tuple(read_placements(file, config)), ()
    except HotcoldError as e:
        return (), (f"The placement in the file is not shown: {e}",)
