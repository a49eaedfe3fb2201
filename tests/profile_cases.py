"""What the profiling tests share: a model whose hot neurons are known, and a recount in float64.

In: a Spec of small_models.py. Out: a file, contexts, counts. Next: test_profile.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Type
from small_models import Reference, Spec, make_tensors, write_model

from hotcold.placement.counting import Counter, Job, source_positions
from hotcold.placement.profile import Profile
from hotcold.runtime import schema
from hotcold.runtime.corpus import Contexts
from hotcold.runtime.kernels import reference
from hotcold.runtime.trace import Trace


def planted(path: Path, n_layer: int = 12, seed: int = 3) -> tuple[Path, list[dict[str, list[int]]]]:
    """A model whose layers differ in size and in which neurons are hot; -> per layer its neurons, in source order.

    "on" fire on every token, "free" on about half of them, all others never.
    """
    sizes = tuple(40 + 4 * layer for layer in range(n_layer))
    spec = Spec(patterns=("free",) * n_layer, n_ff=sizes, seed=seed)
    tensors, rng, sets = make_tensors(spec), np.random.default_rng(seed), []
    for layer, n_ff in enumerate(sizes):
        chosen = rng.permutation(n_ff)
        on, free = chosen[:5], chosen[5:11]
        bias = np.full(n_ff, -1e4, np.float32)
        bias[on], bias[free] = 50, 0
        ids = tensors[schema.block(layer, schema.FFN_NEURON_ID)][1]
        tensors[schema.block(layer, schema.FFN_GATE_BIAS)] = (Type.F32, bias[ids])  # rows are in stored order
        kind, bundles = tensors[schema.block(layer, schema.FFN_UP_DOWN)]
        tensors[schema.block(layer, schema.FFN_UP_DOWN)] = (kind, bundles * np.float32(0.2))
        sets.append({"on": sorted(on.tolist()), "free": sorted(free.tolist())})
    return write_model(path, spec, tensors), sets


def random_contexts(n: int, length: int, n_vocab: int = 101, bos: bool = False, seed: int = 5) -> Contexts:
    """Contexts of random tokens; the last one is shorter."""
    rng = np.random.default_rng(seed)
    lengths = [length] * (n - 1) + [max(2, length // 3)]
    tokens = tuple(rng.integers(0, n_vocab, size).astype(np.int32) for size in lengths)
    return Contexts("random", "0" * 64, length, bos, tokens)


def count(path: Path, contexts: Contexts, samples: int = 20, wanted: Sequence[int] | None = None) -> Profile:
    """The profile of these contexts, without the command."""
    job = Job("m", contexts, samples, 0, (0, 1), tuple(range(len(contexts.tokens)) if wanted is None else wanted))
    with Trace.open(path, threads=1, n_ctx=contexts.n_ctx) as trace:
        counter = Counter(job, trace.config, source_positions(trace.engine.file, trace.config))
        for k in counter.left:
            counter.read(trace, k)
        return counter.profile()


@dataclass
class Recount:
    """float64 counts of one layer, source order, with the distance of the closest call."""

    fired: np.ndarray
    pairs: np.ndarray
    magnitude: np.ndarray
    margin: float


class _Recorder(Reference):
    """Keeps what every layer's neurons did, before thresholds."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.layers: list[tuple[np.ndarray, np.ndarray]] = []  # criterion minus threshold, value; f64 [n, n_ff]

    def _neurons(self, p: str, layer: int, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values, keys = super()._neurons(p, layer, h)
        c, criterion = self.config, keys
        if c.activation in schema.DENSE_ACTIVATIONS:
            up = None
            if c.gated:
                kind, raw = self.tensors[p + schema.FFN_UP_DOWN]
                up = reference.matmul(kind, raw[::2], h, self.vector(p + schema.FFN_UP_BIAS))
            criterion = np.abs(reference.neuron_values(c.activation, keys, up, 0.0))
        self.layers.append((criterion - c.thresholds[layer], values))
        return values, keys


def recount(path: Path, contexts: Contexts) -> list[Recount]:
    """The same counts in NumPy."""
    ref = _Recorder(path)
    c, skip = ref.config, int(contexts.bos)
    out = [Recount(np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n), np.inf) for n in c.n_ff]
    for tokens in contexts.tokens:
        ref.layers = []
        ref.logits(tokens.tolist())
        for layer, (criterion, values) in enumerate(ref.layers):
            ids = np.arange(c.n_ff[layer])
            if c.layout == "neuron-split":
                ids = ref.tensors[schema.block(layer, schema.FFN_NEURON_ID)][1]
            fired = criterion[skip:] > 0
            r = out[layer]
            r.fired[ids] += fired.sum(axis=0)
            r.pairs[ids] += (fired[1:] & fired[:-1]).sum(axis=0)
            r.magnitude[ids] += np.abs(values[skip:]).sum(axis=0)
            r.margin = min(r.margin, float(np.abs(criterion[skip:]).min()))
    return out
