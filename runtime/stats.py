"""What a run of single tokens computed and read, per layer, and what operators took.

In: the engine's counters. Out: LayerStats, OpTime. Next: generate.py, perplexity.py and bench.py print them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.kernels import walk
from hotcold.runtime.plan import Op, Plan, predicts
from hotcold.runtime.weights import Weights, by_column


@dataclass(frozen=True)
class HybridStats:
    """How layers on the GPU were shared with the CPU. Per layer, float64 [n_layer]; 0 in layers of the CPU."""

    first: int  # layers from this one on are on the GPU
    gpu: np.ndarray  # neurons computed there per token (of predicted ones: looked at)
    cpu: np.ndarray  # neurons the CPU computed per token
    asked: np.ndarray  # share of tokens with something for the CPU to do; the others cost no wait and no transfer
    vram: int  # bytes of the GPU's memory, driver included
    name: str  # of the card

    @property
    def skips(self) -> float:
        """Of all pairs of a token and a layer on the GPU, the share in which the GPU did not wait for the CPU."""
        return 1.0 - float(self.asked[self.first :].mean()) if self.first < len(self.asked) else 1.0

    @property
    def cpu_share(self) -> float:
        """Of the neurons computed in layers on the GPU, the CPU's share."""
        total = float(self.gpu.sum() + self.cpu.sum())
        return float(self.cpu.sum()) / total if total else 0.0


@dataclass(frozen=True)
class LayerStats:
    """Per layer, float64 [n_layer] each; all 1 where nothing was counted.

    Key matrices held by input column count as read whole: which inputs were 0 is not counted.
    """

    tokens: int
    checked: np.ndarray  # share of neurons whose key row was read
    computed: np.ndarray  # share of neurons whose value was added
    bytes_read: np.ndarray  # FFN bytes read per token, predictor included
    bytes_dense: np.ndarray  # bytes of all rows of the FFN
    hybrid: HybridStats | None = None  # what the GPU and the CPU had of it; None: there is no GPU in it

    @property
    def bytes_share(self) -> float:
        """FFN bytes read per token as a share of dense, over all layers."""
        return float(self.bytes_read.sum() / self.bytes_dense.sum())


@dataclass(frozen=True)
class OpTime:
    """What one operator of a program has taken so far. Waiting for the others is not part of it."""

    op: Op
    many: bool  # of the program for blocks; otherwise of the one for single tokens
    calls: int
    cycles: np.ndarray  # int64 [n_threads], sums over the calls, of a counter that runs at a fixed rate


def layer_stats(config: ModelConfig, weights: Weights, plan: Plan, counts: np.ndarray, tokens: int) -> LayerStats:
    """counts: int64 [n_layer, 2], sums over tokens of key rows read and neurons computed."""
    c = config
    n_ff = np.array(c.n_ff, np.float64)
    counted = tokens > 0 and c.layout == "neuron-split"
    share = counts / (tokens * n_ff[:, None]) if counted else np.ones((c.n_layer, 2))
    checked, computed = share[:, walk.CHECKED], share[:, walk.COMPUTED]
    key, up, down, predictor = (np.array(x, np.float64) for x in zip(*(_sizes(c, weights, n) for n in range(c.n_layer)),
                                                                     strict=True))  # fmt: skip
    if plan.sparsity != "predict" or not counted:
        predictor = np.zeros_like(predictor)
    # With a threshold on the magnitude, up rows are read to know it.
    magnitude = np.array([c.activation in schema.DENSE_ACTIVATIONS and t > 0 for t in c.thresholds])
    read = predictor + checked * key + np.where(magnitude, checked, computed) * up + computed * down
    return LayerStats(tokens if counted else 0, checked, computed, read, key + up + down)


def _sizes(c: ModelConfig, w: Weights, layer: int) -> tuple[int, int, int, int]:
    """Bytes of a layer: key rows, up rows (0 where not gated), down rows, predictor."""

    def size(name: str) -> int:
        matrix = w.layer(layer, name)
        return matrix.n_bytes if matrix else 0

    predictor = sum(size(name) for name in schema.PRED_TENSORS) if predicts(c, layer) else 0
    if c.layout == "stock":
        up = size(schema.FFN_UP)
        return (size(schema.FFN_GATE), up, size(schema.FFN_DOWN), 0) if c.gated else (up, 0, size(schema.FFN_DOWN), 0)
    key = size(schema.key_matrix(c.gated, by_column(c, layer)))
    if c.gated:
        half = size(schema.FFN_UP_DOWN) // 2
        return key, half, half, predictor
    return key, 0, size(schema.FFN_DOWN_T), predictor
