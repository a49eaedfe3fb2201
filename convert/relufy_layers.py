"""Relufication of a model, layer by layer: two runs over the same text, one of which is repaired as it goes.

In: a Trace of the model as it is, contexts of tokens. Out: a LayerFit and a LayerReport per layer. Next: relufy_fit.py
does the arithmetic, relufy_model.py writes what comes out.

The teacher computes each layer as it is. The student has the new FFN in all layers before this one, so its hidden
states have gone astray a little; its FFN here is fitted to add what is missing to the teacher's hidden state behind
this layer. So every layer repairs what those before it left. Blocks of tokens go through the engine's own kernels.

In memory are the hidden states of both and their difference for all tokens (12 bytes times n_embd each) and the
equations of one layer: 8 n_ff^2 bytes and about 32 (n_ff + n_embd) n_embd. For n_embd 4096, n_ff 14336 and 40960 tokens
that makes 2 and 5.6 GB; needed_bytes() adds it up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import psutil

from hotcold.convert.relufy_fit import (
    Bends,
    Equations,
    LayerFit,
    bypass_input,
    choose_bends,
    constant_gate,
    first_guess,
    fit_bytes,
    fit_layer,
    relative_error,
    token_weights,
)
from hotcold.runtime import schema
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import dequantize
from hotcold.runtime.kl import log_softmax
from hotcold.runtime.trace import Trace
from hotcold.runtime.weights import Matrix

GATE_TOKENS = 8192  # that the always-on gate is fitted on
BEND_TOKENS = 3072  # that the neurons' bends are chosen on
ROWS = 2048  # tokens whose features are multiplied at once
STATES = 3  # f32 [tokens, n_embd] that are in memory: teacher, student, targets
SLICE_BYTES = 16 << 20  # of logits that are turned into probabilities at a time


@dataclass(frozen=True)
class Settings:
    rank: int
    sparsity: float | None  # wanted share of a layer's old neurons that are off; None: as many as ReLU switches off


@dataclass(frozen=True)
class LayerReport:
    """What became of a layer, on held-out tokens; errors are relative squares against what the FFN should add."""

    layer: int
    naive: float  # ReLU put in place of the activation, nothing else
    error: float  # after the fit
    sparsity: float  # of the old neurons
    overall: float  # with the always-on ones
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
        c, n_ff, n_tokens = self.config, max(self.config.n_ff), self.contexts.size
        needed, free = needed_bytes(n_ff, c.n_embd, n_tokens), psutil.virtual_memory().available
        if needed > free:
            states = STATES * 4 * c.n_embd * n_tokens
            raise HotcoldError(f"{needed / 2**30:.1f} GiB of memory are needed, {states / 2**30:.1f} for the hidden "
                               f"states of {n_tokens} tokens and {(needed - states) / 2**30:.1f} for the equations of "
                               f"{n_ff} neurons, {free / 2**30:.1f} GiB are free: "
                               + ("use fewer --tokens" if states > needed - free else "this needs a machine with more"))

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
        weights = weights.reshape(self.n_fit, -1)
        down = down_columns(self.trace, layer)
        gate, bends = self._gate(layer, weights, down)
        equations = self._equations(layer, targets, weights, gate, bends.shift, advance)
        up = up_rows(self.trace, layer)
        guess, up_scale = first_guess(bends, up, down), float(np.sqrt(np.mean(up**2)))
        del up
        try:
            fit = fit_layer(equations, guess, up_scale, self.settings.rank)
        except np.linalg.LinAlgError:
            raise HotcoldError(f"layer {layer}: its activations are too far apart in size for the fit's equations: "
                               "use more --tokens or another text") from None
        del equations, guess
        fit = replace(fit, bend=bends.shift, gate=gate)
        self.check(f"layer {layer}, the fit's", fit.down, fit.up, fit.hot_down)
        return fit, self._finish(layer, fit, down, targets, advance)

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
        if bias is not None:
            targets -= bias
        return targets

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

    def _gate(self, layer: int, weights: np.ndarray, down: np.ndarray) -> tuple[np.ndarray, Bends]:
        """The always-on gate row [n_embd] and the neurons' bends, from samples of the tokens fitted on."""
        gate = constant_gate(*self._sample(layer, GATE_TOKENS, weights, keys=False))
        h, w, g, u = self._sample(layer, BEND_TOKENS, weights, keys=True)
        energy = np.einsum("ij,ij->i", down, down, dtype=np.float64)
        return gate, choose_bends(g, u, h @ gate, w, energy, self.config.activation, self.settings.sparsity)

    def _sample(self, layer: int, n_tokens: int, weights: np.ndarray, keys: bool) -> tuple[np.ndarray, ...]:
        """FFN inputs, weights and with `keys` keys and up values of about n_tokens tokens from all over the text."""
        blocks = list(self._blocks(range(self.n_fit)))
        step = max(1, len(blocks) * self.trace.n_batch // n_tokens)
        parts: list[tuple[np.ndarray, ...]] = []
        for index, start, n in blocks[::step]:
            h, g, u = self._keys(layer, index, start, n)
            part = (h.copy(), weights[index, start:start + n])
            parts.append((*part, g.copy(), u.copy()) if keys else part)
        return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))

    def _equations(self, layer: int, targets: np.ndarray, weights: np.ndarray, gate: np.ndarray, bend: np.ndarray,
                   advance: Callable[[int], None]) -> Equations:
        n_embd, n_ff = self.config.n_embd, self.config.n_ff[layer]
        rows = max(ROWS, self.trace.n_batch)
        equations = Equations(n_ff, n_embd, n_embd)
        features = np.empty((rows, n_ff + n_embd), np.float32)
        wanted, weight, filled = np.empty((rows, n_embd), np.float32), np.empty(rows, np.float32), 0
        for index, start, n in self._blocks(range(self.n_fit)):
            if filled + n > rows:
                equations.add(features[:filled], wanted[:filled], weight[:filled])
                filled = 0
            h, g, u = self._keys(layer, index, start, n)
            here = slice(filled, filled + n)
            c = h @ gate
            new_values(g, u, c, bend, features[here, :n_ff])
            features[here, n_ff:] = bypass_input(h, c)
            wanted[here], weight[here] = targets[index, start:start + n], weights[index, start:start + n]
            filled += n
            if start + n == self.length:
                advance(1)
        equations.add(features[:filled], wanted[:filled], weight[:filled])
        return equations

    def _finish(self, layer: int, fit: LayerFit, down: np.ndarray, targets: np.ndarray,
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
            c = h @ fit.gate
            new_values(g, u, c, fit.bend, values[:n])
            added = values[:n] @ fit.down + bypass_input(h, c) @ fit.up.T @ fit.hot_down
            if index >= self.n_fit:
                here, weight = targets[index, start:start + n], weights[index - self.n_fit, start:start + n]
                fitted += relative_error(added, here, weight)
                on += int(np.count_nonzero(c > 0))
                off += int(np.count_nonzero(g + c[:, None] * fit.bend <= 0))
                naive += relative_error(np.maximum(g, np.float32(0)) * u @ down, here, weight)
                rows += n
            if bias is not None:
                added += bias
            self.student[index, start:start + n] += np.float32(self.config.residual_scale) * added
            if start + n == self.length:
                advance(1)
        rank, always = len(fit.up), on / max(rows, 1)
        sparsity = off / max(rows * n_ff, 1)
        overall = (sparsity * n_ff + (1 - always) * rank) / (n_ff + rank)
        error_before, error = (float(sums[0] / max(sums[1], 1e-30)) for sums in (naive, fitted))
        return LayerReport(layer, error_before, error, sparsity, overall, always)

    def held_out_nll(self) -> np.ndarray:
        """f64: negative log likelihood of each held-out token under the teacher, once all layers are done."""
        nll = [np.zeros(0)]
        for index, start, n in self._blocks(range(self.n_fit, len(self.contexts))):
            self.trace.x[:n] = self.teacher[index, start:start + n]
            following = self.contexts[index, start + 1:start + n + 1]
            nll.append(negative_log_likelihood(self.trace.logits(n)[:len(following)], following))
        return np.concatenate(nll)

    def check(self, what: str, *arrays: np.ndarray) -> None:
        """Raise HotcoldError for NaN or infinity."""
        for array in arrays:
            with np.errstate(over="ignore", invalid="ignore"):
                if np.isfinite(array.sum(dtype=np.float64)):
                    continue
            raise HotcoldError(f"{what} hidden states: {np.count_nonzero(~np.isfinite(array))} values are NaN or "
                               "infinite: the weights are damaged or overflow; check the source")


def needed_bytes(n_ff: int, n_embd: int, n_tokens: int) -> int:
    """Most memory that a Relufier takes beside its Trace: hidden states of all tokens, and the larger of what choosing
    the bends and fitting take in the widest layer.
    """
    sample = 2 * 4 * max(BEND_TOKENS * 2 * (n_ff + n_embd), GATE_TOKENS * 2 * n_embd)
    columns = 4 * 3 * n_ff * n_embd  # down, up, and one more while they are read
    return STATES * 4 * n_embd * n_tokens + columns + max(sample, fit_bytes(n_ff, n_embd, ROWS))


def new_values(g: np.ndarray, u: np.ndarray, c: np.ndarray, bend: np.ndarray, out: np.ndarray) -> None:
    """out [n, n_ff] = relu(g + bend c) u: what the old neurons give from now on."""
    np.multiply(c[:, None], bend, out=out)
    out += g
    np.maximum(out, np.float32(0), out=out)
    out *= u


def negative_log_likelihood(logits: np.ndarray, following: np.ndarray) -> np.ndarray:
    """f64 [n] of the tokens that followed. logits: f32 [n, n_vocab]. Raises HotcoldError for NaN or infinity."""
    step = max(1, SLICE_BYTES // (4 * logits.shape[1]))
    parts = [log_softmax(logits[i:i + step]).nll(following[i:i + step]) for i in range(0, len(following), step)]
    return np.concatenate(parts) if parts else np.zeros(0)


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
