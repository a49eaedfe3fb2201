"""Counts neurons while a model reads contexts.

In: a Trace, Contexts, which of them. Out: a Profile of those contexts. Next: profiling.py, which runs it, and keeps
what it has counted.

A context counts as a whole or not at all: whenever a run is stopped, its counts are those of whole contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hotcold.placement.profile import Part, Profile
from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.corpus import Contexts, sampled
from hotcold.runtime.engine import block_sizes
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import GGUFFile
from hotcold.runtime.trace import Trace

SAMPLES = 8192  # tokens kept for training predictors, unless that takes more than SAMPLE_BYTES
SAMPLE_BYTES = 256 << 20
FEW_SAMPLES = 1024  # kept whatever they take: fewer are of no use
F16_MAX = np.float32(65504)


def default_samples(config: ModelConfig) -> int:
    """Tokens sampled when nobody says how many."""
    per_token = 2 * config.n_layer * config.n_embd
    return min(SAMPLES, max(FEW_SAMPLES, SAMPLE_BYTES // per_token))


def source_positions(file: GGUFFile, config: ModelConfig) -> tuple[np.ndarray, ...]:
    """Per layer i32 [n_ff]: stored position of a neuron -> position in the source model."""
    if config.layout == "stock":
        return tuple(np.arange(n, dtype=np.int32) for n in config.n_ff)
    return tuple(file.data(schema.block(i, schema.FFN_NEURON_ID)).copy() for i in range(config.n_layer))


@dataclass(frozen=True)
class Job:
    """What one run over a text is to count: the contexts `wanted` of all that there are."""

    model: str  # identity.model_id
    contexts: Contexts
    samples: int  # most tokens sampled in all contexts together
    width: int  # numbers per sample: layers * n_embd
    shard: tuple[int, int]  # i (from 0) of n
    wanted: tuple[int, ...]  # ascending

    def part(self, done: Sequence[int]) -> Part:
        c = self.contexts
        return Part(c.corpus, c.sha256, c.n_ctx, len(c.tokens), self.samples, np.array(sorted(done), np.int64))


class Counter:
    """Counts of the contexts read so far, in source order. base: counts to go on from."""

    def __init__(
        self, job: Job, config: ModelConfig, positions: Sequence[np.ndarray], base: Profile | None = None
    ) -> None:
        self._job, self._config, self._positions = job, config, positions
        self._starts = job.contexts.starts()
        self.done: list[int] = [] if base is None else base.parts[0].contexts.tolist()
        self.n_tokens, self.n_pairs, self.clipped = 0, 0, 0
        n_ff = config.n_ff
        self._fired = [np.zeros(n, np.int64) for n in n_ff]
        self._pairs = [np.zeros(n, np.int64) for n in n_ff]
        self._magnitude = [np.zeros(n, np.float64) for n in n_ff]
        before = 0 if base is None else len(base.sample_text)
        rows = before + sum(len(self._positions_sampled(k)) for k in self.left)
        # Memory that is not written to yet costs nothing.
        self._samples = [np.empty((rows, config.n_embd), np.float16) for _ in n_ff]
        self._sample_text = np.zeros(rows, np.int64)
        self._n_samples = before
        if base is not None:
            self._take(base)

    def _take(self, base: Profile) -> None:
        self.n_tokens, self.n_pairs = base.n_tokens, base.n_pairs
        for layer in range(base.n_layer):
            self._fired[layer][:] = base.fired[layer]
            self._pairs[layer][:] = base.pairs[layer]
            self._magnitude[layer][:] = base.magnitude[layer]
            if self._n_samples:
                self._samples[layer][: self._n_samples] = base.samples[layer]
        self._sample_text[: self._n_samples] = base.sample_text

    @property
    def left(self) -> list[int]:
        """Contexts still to be counted."""
        done = set(self.done)
        return [k for k in self._job.wanted if k not in done]

    def _positions_sampled(self, k: int) -> np.ndarray:
        first = int(self._starts[k])
        return sampled(first, int(self._starts[k + 1]) - first, self._job.samples, int(self._starts[-1]))

    def read(self, trace: Trace, k: int, check: Callable[[], None] = lambda: None) -> int:
        """Count context k; returns its counted tokens. check: called often, may raise to stop.

        Raises HotcoldError where activations are not finite.
        """
        tokens, skip = self._job.contexts.tokens[k], int(self._job.contexts.bos)
        own = _Context(self._config, self._positions_sampled(k) + skip)
        pos = 0
        for n in block_sizes(len(tokens), trace.n_batch):
            trace.embed(tokens[pos : pos + n], pos)
            first = max(0, skip - pos)  # a BOS is not counted
            for layer in range(self._config.n_layer):
                check()
                trace.attention(layer, n, pos)
                self._layer(trace, own, layer, k, pos, first, n)
            if not np.isfinite(trace.x[:n]).all():
                raise self._not_finite(trace, self._config.n_layer - 1, k)
            pos += n
        self._add(own, k, len(tokens) - skip)
        return len(tokens) - skip

    def _layer(self, trace: Trace, own: _Context, layer: int, k: int, pos: int, first: int, n: int) -> None:
        """One block through the FFN of one layer; rows first..n-1 count."""
        c, n_ff = self._config, self._config.n_ff[layer]
        trace.keys(layer, n)
        h = trace.h[:n]
        if not np.isfinite(h).all():
            raise self._not_finite(trace, layer, k)
        own.sample(layer, h, pos)
        # With thresholds on values, those that fire are those that are left.
        fired = trace.fired(layer, n) if c.activation in schema.SPARSE_ACTIVATIONS else None
        trace.values(layer, n)
        g = trace.g[:n, :n_ff]
        own.count(layer, (g != 0 if fired is None else fired)[first:], g[first:])
        if not np.isfinite(own.magnitude[layer]).all():
            raise self._not_finite(trace, layer, k)
        trace.down(layer, n)

    def _not_finite(self, trace: Trace, layer: int, k: int) -> HotcoldError:
        return HotcoldError(
            f"{trace.engine.file.path}: layer {layer}: NaN or infinite activations in context {k} of the text "
            f"({self._job.contexts.corpus}): the model's weights are damaged, or overflow"
        )

    def _add(self, own: _Context, k: int, n: int) -> None:
        """All of a context at once, so that no interrupt leaves a part of one."""
        rows = slice(self._n_samples, self._n_samples + len(own.wanted))
        for layer, ids in enumerate(self._positions):
            self._fired[layer][ids] += own.fired[layer]
            self._pairs[layer][ids] += own.pairs[layer]
            self._magnitude[layer][ids] += own.magnitude[layer]
            self._samples[layer][rows] = own.samples[layer]
        self._sample_text[rows] = k
        self._n_samples = rows.stop
        self.n_tokens += n
        self.n_pairs += max(0, n - 1)
        self.clipped += own.clipped
        self.done.append(k)

    def profile(self) -> Profile:
        """What has been counted. Its arrays are copies, but for samples that need no sorting."""
        text = self._sample_text[: self._n_samples]
        samples = [s[: self._n_samples] for s in self._samples]
        if (np.diff(text) < 0).any():
            order = np.argsort(text, kind="stable")
            text, samples = text[order], [s[order] for s in samples]
        return Profile(
            model=self._job.model,
            n_tokens=self.n_tokens,
            n_pairs=self.n_pairs,
            corpus=self._job.contexts.corpus,
            sha256=self._job.contexts.sha256,
            fired=tuple(f.copy() for f in self._fired),
            pairs=tuple(p.copy() for p in self._pairs),
            magnitude=tuple(m.copy() for m in self._magnitude),
            samples=tuple(samples),
            sample_text=text.copy(),
            parts=(self._job.part(self.done),),
        )


class _Context:
    """Counts of one context, in stored order."""

    def __init__(self, config: ModelConfig, wanted: np.ndarray) -> None:
        self.wanted = wanted  # i64: positions in the context that are sampled
        self.fired = [np.zeros(n, np.int64) for n in config.n_ff]
        self.pairs = [np.zeros(n, np.int64) for n in config.n_ff]
        self.magnitude = [np.zeros(n, np.float64) for n in config.n_ff]
        self.samples = [np.zeros((len(wanted), config.n_embd), np.float16) for _ in config.n_ff]
        self.clipped = 0
        self._last: list[np.ndarray | None] = [None] * config.n_layer  # bool [n_ff]: fired on the last counted token

    def sample(self, layer: int, h: np.ndarray, pos: int) -> None:
        """h: f32 [n, n_embd], of tokens pos..pos+n-1."""
        a, b = np.searchsorted(self.wanted, (pos, pos + len(h)))
        rows = h[self.wanted[a:b] - pos]
        clipped = np.clip(rows, -F16_MAX, F16_MAX)
        self.clipped += int((clipped != rows).sum())
        self.samples[layer][a:b] = clipped

    def count(self, layer: int, fired: np.ndarray, values: np.ndarray) -> None:
        """fired: bool [n, n_ff], values: f32 [n, n_ff]."""
        if not len(fired):
            return
        self.fired[layer] += _column_sums(fired)
        self.pairs[layer] += _column_sums(fired[1:] & fired[:-1])
        last = self._last[layer]
        if last is not None:
            self.pairs[layer] += last & fired[0]
        self._last[layer] = fired[-1].copy()
        self.magnitude[layer] += np.add.reduce(np.abs(values), axis=0, dtype=np.float64)


def _column_sums(bits: np.ndarray) -> np.ndarray:
    """bool [n, columns] -> u32 [columns]; several times faster than bits.sum(axis=0)."""
    sums: np.ndarray = np.add.reduce(np.ascontiguousarray(bits).view(np.uint8), axis=0, dtype=np.uint32)
    return sums
