"""Sizes and activations of real models, and smaller ones of the same kinds.

In: nothing. Out: SHAPES, Recipe. Next: planted.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotcold.convert.lazy import QType
from hotcold.runtime.ffn_config import STOCK_ACTIVATIONS


@dataclass(frozen=True)
class Shape:
    """Sizes of a model: layers, width, neurons per layer, query and key/value heads; architecture and activation."""

    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    n_vocab: int = 32000
    n_ctx: int = 4096
    arch: str = "llama"
    activation: str = "relu"  # where sparsity is planted; without it a llama computes silu
    threshold: float = 0.0

    @property
    def gated(self) -> bool:
        return self.arch == "llama"

    @property
    def stock_activation(self) -> str:
        """What llama.cpp computes for this architecture."""
        return STOCK_ACTIVATIONS[self.arch]


SHAPES = {
    "llama-tiny": Shape(2, 256, 768, 4, 2, n_vocab=2000),
    "llama-160m": Shape(12, 768, 2048, 12, 12),
    "llama-1.3b": Shape(24, 2048, 5632, 32, 32),
    "llama-7b": Shape(32, 4096, 11008, 32, 32),
    "llama-13b": Shape(40, 5120, 13824, 40, 40),
    "llama-70b": Shape(80, 8192, 28672, 64, 8),
    "prosparse-7b": Shape(32, 4096, 11008, 32, 32, activation="fatrelu", threshold=0.01),
    "prosparse-13b": Shape(40, 5120, 13824, 40, 40, activation="fatrelu", threshold=0.01),
    "bamboo-7b": Shape(32, 4096, 14336, 32, 8, activation="drelu"),
    "arcee-tiny": Shape(2, 256, 1024, 4, 2, n_vocab=2000, arch="arcee", activation="relu2"),
    "arcee-4.5b": Shape(36, 2560, 18432, 20, 4, n_vocab=128004, n_ctx=65536, arch="arcee", activation="relu2"),
    "opt-tiny": Shape(2, 256, 1024, 4, 4, n_vocab=2000, n_ctx=256, arch="opt"),
    "opt-1.3b": Shape(24, 2048, 8192, 32, 32, n_vocab=50272, n_ctx=2048, arch="opt"),
    "opt-6.7b": Shape(32, 4096, 16384, 32, 32, n_vocab=50272, n_ctx=2048, arch="opt"),
    "opt-13b": Shape(40, 5120, 20480, 40, 40, n_vocab=50272, n_ctx=2048, arch="opt"),
    "opt-30b": Shape(48, 7168, 28672, 56, 56, n_vocab=50272, n_ctx=2048, arch="opt"),
}
TYPES = {"f16": QType.F16, "bf16": QType.BF16, "q8_0": QType.Q8_0, "q4_0": QType.Q4_0, "q4_k": QType.Q4_K}
PREDICTOR_TYPES = ("f16", "q8_0", "q4_0")
ORDERS = ("hot-first", "shuffled")


@dataclass(frozen=True)
class PredictorRecipe:
    """The predictor to plant: gates are of this rank but for `noise`, a share of their length."""

    rank: int
    kind: QType
    noise: float
    recall: float  # wanted, of the neurons that fire


@dataclass(frozen=True)
class Recipe:
    """What is to be made, whichever file it goes to."""

    name: str
    shape: Shape
    kind: QType
    seed: int
    activation: str
    sparsity: float | None = None  # None: nothing planted; random keys are above 0 half of the time
    skew: float = 0.0
    order: str = "hot-first"
    predictor: PredictorRecipe | None = None

    @property
    def threshold(self) -> float:
        return self.shape.threshold if self.activation == "fatrelu" else 0.0
