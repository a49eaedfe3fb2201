"""Relufication of a model, layer by layer: two runs over the same text, one of which is repaired as it goes.

In: a Trace of the model as it is, contexts of tokens. Out: a LayerFit and a LayerReport per layer. Next: relufy_fit.py
does the arithmetic, relufy_model.py writes what comes out.

The teacher computes each layer as it is. The student has the new FFN in all layers before this one, so its hidden
states have gone astray a little; its FFN here is fitted to add what is missing to the teacher's hidden state behind
this layer. So every layer repairs what those before it left. In memory are the hidden states of both, for all tokens,
and what one layer needs; blocks of tokens go through the engine's own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import psutil

from hotcold.convert.relufy_fit import (
    Equations,
    LayerFit,
    bypass_input,
    constant_gate,
    fit_layer,
    relative_error,
    threshold_for,
    token_weights,
)
from hotcold.runtime import schema
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import dequantize
from hotcold.runtime.trace import Trace
from hotcold.runtime.weights import Matrix

GATE_TOKENS = 8192  # that the always-on gate is fitted on
KEY_TOKENS = 2048  # whose keys choose the threshold
ROWS = 2048  # tokens whose features are multiplied at once


@dataclass(frozen=True)
class Settings:
    rank: int
    sparsity: float | None  # wanted share of the old neurons that are off; None: as ReLU leaves it


@dataclass(frozen=True)
class LayerReport:
    """What became of a layer, on held-out tokens; errors are relative squares against what the FFN should add."""

    layer: int
    naive: float  # ReLU put in place of the activation, nothing else
    error: float  # after the fit
    sparsity: float  # of the old neurons
    overall: float  # with the always-on ones
    threshold: float
    always_on: float  # share of tokens for which the always-on neurons are on


class Relufier:
    """State of the two runs. contexts: i32 [n, length]; the last n_held_out of them are not fitted on."""

    def __init__(self, trace: Trace, contexts: np.ndarray, n_held_out: int, settings: Settings) -> None:
        self.trace, self.config, self.settings = trace, trace.config, settings
        self.contexts, self.n_fit = contexts, len(contexts) - n_held_out
        self.length = contexts.shape[1]
        self._check_memory()
        self.teacher = np.empty((*contexts.shape, self.config.n_embd), np.float32)
        for index, start, n in self._blocks(range(len(contexts))):
            trace.embed(contexts[index, start:start + n], start)
            self.teacher[index, start:start + n] = trace.x[:n]
        self.student = self.teacher.copy()
        self.check("token embedding", self.teacher)

    def _check_memory(self) -> None:
        """Compare with what is free now: the system would promise any amount and kill the process later."""
        c, n_ff = self.config, max(self.config.n_ff)
        states = 4 * c.n_embd * self.contexts.size * 4  # teacher, student, targets and one temporary
        system = 4 * 8 * (n_ff + c.n_embd) ** 2
        layer = 4 * (3 * n_ff * c.n_embd + ROWS * (2 * n_ff + 4 * c.n_embd) + KEY_TOKENS * n_ff)
        needed, free = states + system + layer, psutil.virtual_memory().available
        if needed > free:
            raise HotcoldError(f"{needed / 2**30:.1f} GiB of memory are needed for {self.contexts.size} tokens and "
                               f"{n_ff} neurons per layer, {free / 2**30:.1f} GiB are free: use fewer --tokens")

    def layer(self, layer: int, advance: Callable[[int], None] = lambda n: None) -> tuple[LayerFit, LayerReport]:
        """Fit one layer and take both runs past it. advance(n): n more of 3 * contexts steps are done."""
        for index in range(len(self.contexts)):
            self._teach(layer, index)
            self._attend(layer, index)
            advance(1)
        for name, states in (("the model's own", self.teacher), ("the new model's", self.student)):
            self.check(f"layer {layer}, {name}", states)
        targets = self._targets(layer)
        weights = token_weights(targets[:self.n_fit].reshape(-1, self.config.n_embd))
        gate, threshold = self._gate(layer, weights.reshape(self.n_fit, -1))
        down = down_columns(self.trace, layer)
        equations = self._equations(layer, targets, weights.reshape(self.n_fit, -1), gate, threshold, advance)
        up_scale = float(np.sqrt(np.mean(up_rows(self.trace, layer)**2)))
        try:
            fit = fit_layer(equations, down, up_scale, self.settings.rank)
        except np.linalg.LinAlgError:
            raise HotcoldError(f"layer {layer}: its activations are too far apart in size for the fit's equations: "
                               "use more --tokens or another text") from None
        fit = LayerFit(fit.down, gate, fit.up, fit.hot_down)
        self.check(f"layer {layer}, the fit's", fit.down, fit.up, fit.hot_down)
        return fit, self._finish(layer, fit, threshold, down, targets, advance)

    # ---- the two runs

    def _blocks(self, contexts: range) -> Iterator[tuple[int, int, int]]:
        """(context, first position, tokens) of every block."""
        for index in contexts:
            for start in range(0, self.length, self.trace.n_batch):
                yield index, start, min(self.trace.n_batch, self.length - start)

    def _teach(self, layer: int, index: int) -> None:
        trace = self.trace
        for _, start, n in self._blocks(range(index, index + 1)):
            trace.x[:n] = self.teacher[index, start:start + n]
            trace.attention(layer, n, start)
            trace.keys(layer, n)
            trace.values(layer, n)
            trace.down(layer, n)
            self.teacher[index, start:start + n] = trace.x[:n]

    def _attend(self, layer: int, index: int) -> None:
        for _, start, n in self._blocks(range(index, index + 1)):
            self.trace.x[:n] = self.student[index, start:start + n]
            self.trace.attention(layer, n, start)
            self.student[index, start:start + n] = self.trace.x[:n]

    def _targets(self, layer: int) -> np.ndarray:
        """f32 [contexts, length, n_embd]: what the student's neurons should add up to, biases and scale taken off."""
        targets = self.teacher - self.student
        if self.config.residual_scale != 1.0:
            targets /= np.float32(self.config.residual_scale)
        bias = self._down_bias(layer)
        return targets if bias is None else targets - bias

    def _down_bias(self, layer: int) -> np.ndarray | None:
        bias = self.trace.weights.layer(layer, schema.FFN_DOWN_BIAS)
        return None if bias is None else bias.data

    def _keys(self, layer: int, index: int, start: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Views of the student's FFN input [n, n_embd], keys and up values [n, n_ff]; its states are past attention."""
        n_ff = self.config.n_ff[layer]
        self.trace.x[:n] = self.student[index, start:start + n]
        self.trace.keys(layer, n)
        return self.trace.h[:n], self.trace.g[:n, :n_ff], self.trace.u[:n, :n_ff]

    # ---- the fit

    def _gate(self, layer: int, weights: np.ndarray) -> tuple[np.ndarray, float]:
        """The always-on gate row [n_embd], and the layer's threshold, from a sample of the tokens fitted on."""
        blocks = list(self._blocks(range(self.n_fit)))
        step = max(1, len(blocks) * self.trace.n_batch // GATE_TOKENS)
        inputs: list[np.ndarray] = []
        keys: list[np.ndarray] = []
        parts: list[np.ndarray] = []
        for index, start, n in blocks[::step]:
            h, g, _ = self._keys(layer, index, start, n)
            inputs.append(h.copy())
            parts.append(weights[index, start:start + n])
            if self.settings.sparsity is not None and sum(len(k) for k in keys) < KEY_TOKENS:
                keys.append(g.copy())
        threshold = 0.0 if not keys else threshold_for(np.concatenate(keys), self.settings.sparsity or 0.0)
        gate = constant_gate(np.concatenate(inputs), np.concatenate(parts), threshold)
        return gate, threshold

    def _values(self, g: np.ndarray, u: np.ndarray, threshold: float, out: np.ndarray) -> None:
        """out [n, n_ff] = what the old neurons give under the new activation."""
        np.multiply(g, u, out=out)
        out[g <= np.float32(threshold)] = 0

    def _equations(self, layer: int, targets: np.ndarray, weights: np.ndarray, gate: np.ndarray, threshold: float,
                   advance: Callable[[int], None]) -> Equations:
        n_embd, n_ff = self.config.n_embd, self.config.n_ff[layer]
        rows = max(ROWS, self.trace.n_batch)
        equations = Equations(n_ff + n_embd, n_embd)
        features = np.empty((rows, n_ff + n_embd), np.float32)
        wanted, weight, filled = np.empty((rows, n_embd), np.float32), np.empty(rows, np.float32), 0
        for index, start, n in self._blocks(range(self.n_fit)):
            if filled + n > rows:
                equations.add(features[:filled], wanted[:filled], weight[:filled])
                filled = 0
            h, g, u = self._keys(layer, index, start, n)
            here = slice(filled, filled + n)
            self._values(g, u, threshold, features[here, :n_ff])
            features[here, n_ff:] = bypass_input(h, gate, threshold)
            wanted[here], weight[here] = targets[index, start:start + n], weights[index, start:start + n]
            filled += n
            if start + n == self.length:
                advance(1)
        equations.add(features[:filled], wanted[:filled], weight[:filled])
        return equations

    def _finish(self, layer: int, fit: LayerFit, threshold: float, down: np.ndarray, targets: np.ndarray,
                advance: Callable[[int], None]) -> LayerReport:
        """Take the student past the layer; measure on the held-out contexts."""
        held_out = targets[self.n_fit:].reshape(-1, self.config.n_embd)
        weights = token_weights(held_out).reshape(-1, self.length) if len(held_out) else np.zeros((0, self.length))
        naive, fitted = np.zeros(2), np.zeros(2)
        off = on = rows = 0
        n_ff, bias = self.config.n_ff[layer], self._down_bias(layer)
        values = np.empty((self.trace.n_batch, n_ff), np.float32)
        for index, start, n in self._blocks(range(len(self.contexts))):
            h, g, u = self._keys(layer, index, start, n)
            self._values(g, u, threshold, values[:n])
            added = values[:n] @ fit.down + bypass_input(h, fit.gate, threshold) @ fit.up.T @ fit.hot_down
            if index >= self.n_fit:
                here, weight = targets[index, start:start + n], weights[index - self.n_fit, start:start + n]
                naive += relative_error(values[:n] @ down, here, weight)
                fitted += relative_error(added, here, weight)
                off += int(np.count_nonzero(g <= np.float32(threshold)))
                on += int(np.count_nonzero(h @ fit.gate > threshold))
                rows += n
            if bias is not None:
                added += bias
            self.student[index, start:start + n] += np.float32(self.config.residual_scale) * added
            if start + n == self.length:
                advance(1)
        rank, always = len(fit.up), on / max(rows, 1)
        sparsity = off / max(rows * n_ff, 1)
        overall = (sparsity * n_ff + (1 - always) * rank) / (n_ff + rank)
        return LayerReport(layer, naive[0] / max(naive[1], 1e-30), fitted[0] / max(fitted[1], 1e-30), sparsity, overall,
                           threshold, always)

    def held_out_nll(self) -> float:
        """Mean negative log likelihood of the held-out tokens under the teacher, once all layers are done."""
        total, count = 0.0, 0
        for index, start, n in self._blocks(range(self.n_fit, len(self.contexts))):
            self.trace.x[:n] = self.teacher[index, start:start + n]
            following = self.contexts[index, start + 1:start + n + 1]
            nll = negative_log_likelihood(self.trace.logits(n)[:len(following)], following)
            total, count = total + float(nll.sum()), count + len(nll)
        return total / max(count, 1)

    def check(self, what: str, *arrays: np.ndarray) -> None:
        """Raise HotcoldError for NaN or infinity."""
        for array in arrays:
            with np.errstate(over="ignore", invalid="ignore"):
                if np.isfinite(array.sum(dtype=np.float64)):
                    continue
            raise HotcoldError(f"{what} hidden states: {np.count_nonzero(~np.isfinite(array))} values are NaN or "
                               "infinite: the weights are damaged or overflow; check the source")


def negative_log_likelihood(logits: np.ndarray, following: np.ndarray) -> np.ndarray:
    """f64 [n] of the tokens that followed. logits: f32 [n, n_vocab], overwritten."""
    chosen = logits[np.arange(len(following)), following].astype(np.float64)
    top = logits.max(axis=1, keepdims=True, initial=-np.inf)
    logits -= top
    np.exp(logits, out=logits)
    return np.asarray(np.log(logits.sum(axis=1, dtype=np.float64)) + top[:, 0] - chosen)


def down_columns(trace: Trace, layer: int) -> np.ndarray:
    """f32 [n_ff, n_embd]: the down columns, one row per neuron in stored order."""
    if trace.config.layout == "stock":
        return np.ascontiguousarray(_floats(trace.weights[schema.block(layer, schema.FFN_DOWN)]).T)
    return _floats(trace.weights[schema.block(layer, schema.FFN_UP_DOWN)], 1)


def up_rows(trace: Trace, layer: int) -> np.ndarray:
    """f32 [n_ff, n_embd] in stored order."""
    if trace.config.layout == "stock":
        return _floats(trace.weights[schema.block(layer, schema.FFN_UP)])
    return _floats(trace.weights[schema.block(layer, schema.FFN_UP_DOWN)], 0)


def _floats(matrix: Matrix, part: int | None = None) -> np.ndarray:
    """All rows as f32, or with `part` every second one from there."""
    from gguf import GGMLQuantizationType

    rows = matrix.data if part is None else matrix.data[part::2]
    return dequantize(np.ascontiguousarray(rows), GGMLQuantizationType(matrix.ggml_type))
