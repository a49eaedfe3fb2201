"""Runs a model layer by layer, so that a caller can see and change activations between the stages of a layer.

In: an Engine. Out: NumPy views of its buffers, filled stage by stage by the kernels that run prompts. Next:
placement/profiling.py counts with it, convert/relufy.py replaces what a layer computes.

    x --attention()--> x --keys()--> h, g, u --values()--> g --down()--> x

A block is up to `n_batch` tokens. Every layer keeps its own KV cache, so blocks of a text may go through one layer
after the other or the layers one block after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike

import numpy as np

from hotcold.runtime import schema
from hotcold.runtime.engine import Engine
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.kernels.reference import neuron_values
from hotcold.runtime.plan import Op


class Trace:
    """The block program of an engine in pieces. The engine must not be used otherwise meanwhile."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.config, self.weights = engine, engine.config, engine.weights
        self.n_batch = engine.n_batch
        values = engine.buffer_values()
        self.x, self.h, self.g = values["x"], values["h"], values["g"]  # f32 [n_batch, n_embd], .., [n_batch, max n_ff]
        self.u = values.get("u", self.g[:, :0])  # f32 [n_batch, max n_ff], gated models only
        self._stages = _stages(engine.plan.block, self.config.n_layer)
        self._ids = np.zeros(self.n_batch, np.int64)
        self._no_rows = np.empty((0, self.config.n_vocab), np.float32)

    @classmethod
    def open(
        cls,
        path: str | PathLike[str],
        *,
        threads: int | None = None,
        n_ctx: int = 512,
        notify: Callable[[str], None] = lambda line: None,
    ) -> Trace:
        """Load a model for tracing texts of up to n_ctx tokens. Raises HotcoldError as Engine.open does."""
        return cls(Engine.open(path, sparsity="dense", threads=threads, n_ctx=n_ctx, notify=notify))

    def embed(self, tokens: Sequence[int] | np.ndarray, pos: int = 0) -> None:
        """x[:n] = embeddings of n tokens; pos matters only to models with learned positions."""
        n = len(tokens)
        self._check(n, pos)
        ids = np.asarray(tokens, np.int64)
        bad = ids[(ids < 0) | (ids >= self.config.n_vocab)]
        if len(bad):
            raise HotcoldError(f"token id {bad[0]} is outside the vocabulary of {self.config.n_vocab}")
        self._ids[:n] = ids
        self._run("embed", 0, n, pos)

    def attention(self, layer: int, n: int, pos: int) -> None:
        """x[:n] += attention of the layer at positions pos..pos+n-1; its cache holds what was at positions before."""
        self._check(n, pos)
        self._run("attention", layer, n, pos)

    def keys(self, layer: int, n: int) -> None:
        """h = norm(x), g = keys (gate rows . h + bias; up rows where not gated), u = up rows . h + bias (gated)."""
        self._run("keys", layer, n)

    def values(self, layer: int, n: int) -> None:
        """g = act(g) * u, or act(g) where not gated, in place; neurons under the layer's threshold become 0."""
        self._run("values", layer, n)

    def down(self, layer: int, n: int) -> None:
        """x[:n] += residual_scale * (down rows weighted by g + bias)."""
        self._run("down", layer, n)

    def logits(self, n: int) -> np.ndarray:
        """f32 [n, n_vocab] of x[:n], which stays as it is."""
        rows = np.empty((n, self.config.n_vocab), np.float32)
        self._run("head", 0, n, rows=rows)
        return rows

    def fired(self, layer: int, n: int) -> np.ndarray:
        """bool [n, n_ff]: which neurons fire; between keys() and values(). NaN counts as firing, as in the kernels.

        Neurons of a SiLU or GELU model fire where |act(key) * up| exceeds the layer's threshold.
        """
        c, n_ff = self.config, self.config.n_ff[layer]
        key, threshold = self.g[:n, :n_ff], np.float32(self.config.thresholds[layer])
        if c.activation in schema.SPARSE_ACTIVATIONS:
            return ~(key <= threshold)
        return neuron_values(c.activation, key, self.u[:n, :n_ff] if c.gated else None, float(threshold)) != 0

    def _check(self, n: int, pos: int) -> None:
        if not 0 < n <= self.n_batch:
            raise HotcoldError(f"a block of {n} tokens: allowed are 1 to {self.n_batch}")
        if not 0 <= pos <= self.engine.n_ctx - n:
            raise HotcoldError(f"{n} tokens at position {pos} do not fit into a context of {self.engine.n_ctx}")

    def _run(self, stage: str, layer: int, n: int, pos: int = 0, rows: np.ndarray | None = None) -> None:
        first, end = self._stages[stage, layer]
        self.engine.run_ops(True, first, end, self._ids[:n], pos, self._no_rows if rows is None else rows)

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _stages(ops: Sequence[Op], n_layer: int) -> dict[tuple[str, int], tuple[int, int]]:
    """(stage, layer) -> its operators in the block program: first, end."""
    stages = {("embed", 0): (0, 1)}
    for layer in range(n_layer):
        own = [i for i, op in enumerate(ops) if op.layer == layer]
        start, end = own[0], own[-1] + 1
        ffn_norm = [i for i in own if ops[i].kind == "norm"][1]
        activate = next(i for i in own if ops[i].kind == "activate")
        stages["attention", layer] = (start, ffn_norm)
        stages["keys", layer] = (ffn_norm, activate)
        stages["values", layer] = (activate, activate + 1)
        stages["down", layer] = (activate + 1, end)
    stages["head", 0] = (stages["down", n_layer - 1][1], len(ops))
    return stages
