"""Runs a model over text layer by layer, with and without thresholds, and measures what they do.

In: a model's path, thresholds, contexts. Out: magnitudes, errors of the FFN's output, sparsity, log-probabilities.
Next: calibrate.py.

All contexts go through one layer before any goes through the next. So a layer's threshold is chosen from inputs that
the thresholds of the layers before it have changed already, as they will be when the model is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hotcold.placement.threshold import Histogram, relative_error
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.corpus import Contexts, sampled
from hotcold.runtime.engine import LOGITS_BYTES, Engine, block_sizes
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import open_gguf, safe_text
from hotcold.runtime.kernels.formats import PACK_TOKENS
from hotcold.runtime.kl import log_softmax
from hotcold.runtime.plan import make_plan
from hotcold.runtime.stats import layer_stats
from hotcold.runtime.threads import default_threads
from hotcold.runtime.trace import Trace
from hotcold.runtime.weights import load_weights

ERROR_TOKENS = 256  # tokens on which errors of the FFN's output are measured
Tell = Callable[[int], None]  # gets the tokens done since the last call


def open_with(path: Path, thresholds: Sequence[float], threads: int | None, n_ctx: int) -> Trace:
    """A Trace of the model with these thresholds instead of those it has."""
    file = open_gguf(path)
    try:
        config = replace(ModelConfig.from_gguf(file), thresholds=tuple(thresholds))
        weights = load_weights(file, config)
        plan = make_plan(config, weights, "dense")
        n_threads = default_threads() if threads is None else threads
        return Trace(Engine(file, config, weights, plan, n_threads=n_threads, n_ctx=n_ctx, kv_type="f16",
                            notify=lambda line: None))  # fmt: skip
    except BaseException:
        file.close()
        raise


@dataclass(frozen=True)
class Errors:
    """Squared errors that leaving values out makes. f64 [cuts]."""

    output: np.ndarray  # relative to what the FFN adds to the residual stream
    stream: np.ndarray  # relative to the residual stream after that, which is what the next layers see


class LayerRun:
    """Contexts on their way through the layers: for each layer magnitudes(), then finish(), in ascending order.

    The model must have no thresholds of its own.
    """

    def __init__(self, trace: Trace, contexts: Contexts, tell: Tell) -> None:
        self._trace, self._contexts, self._tell = trace, contexts, tell
        self._blocks = [_blocks(len(tokens), trace.n_batch) for tokens in contexts.tokens]
        total = sum(contexts.counted(k) for k in range(len(contexts.tokens)))
        self._sampled = [sampled(int(first), contexts.counted(k), ERROR_TOKENS, total) + contexts.bos
                         for k, first in enumerate(contexts.starts()[:-1])]  # fmt: skip
        self._x = [np.empty((len(tokens), trace.config.n_embd), np.float32) for tokens in contexts.tokens]
        for k, tokens in enumerate(contexts.tokens):
            for pos, n in self._blocks[k]:
                trace.embed(tokens[pos : pos + n], pos)
                self._x[k][pos : pos + n] = trace.x[:n]

    def magnitudes(self, layer: int) -> Histogram:
        """All contexts through the layer's attention; how large its neurons' values are then.

        Raises HotcoldError where they are not finite.
        """
        trace, n_ff, result = self._trace, self._trace.config.n_ff[layer], Histogram()
        for k, blocks in enumerate(self._blocks):
            for pos, n in blocks:
                trace.x[:n] = self._x[k][pos : pos + n]
                trace.attention(layer, n, pos)
                self._x[k][pos : pos + n] = trace.x[:n]
                trace.keys(layer, n)
                trace.values(layer, n)
                skip = int(self._contexts.bos and pos == 0)
                result.add(trace.g[skip:n, :n_ff])
                self._tell(n)
            if not result.finite:
                raise HotcoldError(
                    f"{safe_text(str(trace.engine.file.path))}: layer {layer}: NaN or infinite activations in context "
                    f"{k} of the text ({safe_text(self._contexts.corpus)}): the model is damaged, or its activations "
                    "overflow"
                )
        return result

    def finish(self, layer: int, threshold: float, cuts: Sequence[float] = ()) -> Errors:
        """All contexts through the layer's FFN, values up to the threshold left out.

        Returns the errors, measured on some tokens, that each of `cuts` would make.
        """
        trace, n_ff = self._trace, self._trace.config.n_ff[layer]
        kept: list[tuple[np.ndarray, np.ndarray]] = []  # of the sampled tokens: values, residual stream before the FFN
        for k, blocks in enumerate(self._blocks):
            for pos, n in blocks:
                trace.x[:n] = self._x[k][pos : pos + n]
                trace.keys(layer, n)
                trace.values(layer, n)
                values = trace.g[:n, :n_ff]
                if len(cuts):
                    rows = self._sampled[k]
                    rows = rows[(rows >= pos) & (rows < pos + n)] - pos
                    kept.append((values[rows], trace.x[rows]))  # copies
                if threshold > 0:
                    values[np.abs(values) <= np.float32(threshold)] = 0
                trace.down(layer, n)
                self._x[k][pos : pos + n] = trace.x[:n]
                self._tell(n)
        if not len(cuts):
            return Errors(np.zeros(0), np.zeros(0))
        return self._errors(layer, np.concatenate([v for v, _ in kept]), np.concatenate([x for _, x in kept]), cuts)

    def _errors(self, layer: int, values: np.ndarray, x: np.ndarray, cuts: Sequence[float]) -> Errors:
        """values: f32 [tokens, n_ff], nothing left out; x: f32 [tokens, n_embd]."""
        nothing = self._output(layer, np.zeros_like(values[:1]))  # the bias
        output = self._output(layer, values)
        result = Errors(np.zeros(len(cuts)), np.zeros(len(cuts)))
        for i, cut in enumerate(cuts):
            small = np.where(np.abs(values) <= np.float32(cut), values, np.float32(0))
            missing = self._output(layer, small) - nothing
            result.output[i] = relative_error(missing, output - nothing)
            result.stream[i] = relative_error(missing, x + output)
        return result

    def _output(self, layer: int, values: np.ndarray) -> np.ndarray:
        """What the layer adds to the residual stream for these values: f32 [tokens, n_embd]."""
        trace, n_ff = self._trace, self._trace.config.n_ff[layer]
        out = np.empty((len(values), trace.config.n_embd), np.float32)
        for pos in range(0, len(values), trace.n_batch):
            part = values[pos : pos + trace.n_batch]
            trace.x[: len(part)] = 0
            trace.g[: len(part), :n_ff] = part
            trace.down(layer, len(part))
            out[pos : pos + len(part)] = trace.x[: len(part)]
        return out


@dataclass(frozen=True)
class Evaluation:
    """A model with its thresholds on a text."""

    tokens: int  # whose neurons were counted
    sparsity: np.ndarray  # f64 [n_layer]: share of neurons off
    nll: np.ndarray  # f64: -log p of every token but the first of each context
    bytes_share: float  # FFN bytes that single tokens read, as a share of dense

    @property
    def perplexity(self) -> float:
        with np.errstate(over="ignore"):
            return float(np.exp(self.nll.mean()))


def evaluate(trace: Trace, contexts: Contexts, tell: Tell) -> Evaluation:
    """Run the contexts through the model. Raises HotcoldError for logits that are not finite."""
    c = trace.config
    step = max(PACK_TOKENS, min(trace.n_batch, LOGITS_BYTES // (4 * c.n_vocab)))
    fired, nll, tokens = np.zeros(c.n_layer, np.int64), [], 0
    for ids in contexts.tokens:
        for pos, n in _blocks(len(ids), step):
            skip = int(contexts.bos and pos == 0)
            trace.embed(ids[pos : pos + n], pos)
            for layer in range(c.n_layer):
                trace.attention(layer, n, pos)
                trace.keys(layer, n)
                trace.values(layer, n)
                fired[layer] += np.count_nonzero(trace.g[skip:n, : c.n_ff[layer]])
                trace.down(layer, n)
            tokens += n - skip
            targets = ids[pos + 1 : pos + n + 1]
            if len(targets):
                nll.append(log_softmax(trace.logits(n)[: len(targets)]).nll(targets))
            tell(n)
    plan = make_plan(c, trace.weights, "exact") if any(c.thresholds) else trace.engine.plan
    checked = tokens * np.array(c.n_ff, np.int64)
    stats = layer_stats(c, trace.weights, plan, np.stack([checked, fired], axis=1), tokens)
    return Evaluation(tokens, 1 - fired / checked, np.concatenate(nll), stats.bytes_share)


def _blocks(n_tok: int, step: int) -> list[tuple[int, int]]:
    """(position, tokens) of the blocks of a context."""
    out, pos = [], 0
    for size in block_sizes(n_tok, step):
        out.append((pos, size))
        pos += size
    return out
