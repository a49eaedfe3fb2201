"""Engines on the simulated GPU, beside the same model on the CPU alone: shared by the tests of both halves.

    with hybrid(path, layers=[CPU, part(32)], kind="keys") as engine: engine.forward([1])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from cuda_on_cpu.sim_device import SimDevice

from hotcold.runtime.config import ModelConfig
from hotcold.runtime.engine import Engine
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.gpu.choose import GpuOptions
from hotcold.runtime.gpu.engine import HybridEngine
from hotcold.runtime.gpu.placement import GpuPlacement, LayerPlacement

CPU = LayerPlacement(False)
N_CTX = 64


def part(hot: int, keys: bool = False) -> LayerPlacement:
    return LayerPlacement(True, hot, keys)


def config_of(path: Path) -> ModelConfig:
    with open_gguf(path) as file:
        return ModelConfig.from_gguf(file)


def shares(config: ModelConfig, first: int, share: float, keys: bool = False) -> list[LayerPlacement]:
    """Layers from `first` on, with a share of their neurons."""
    return [LayerPlacement(True, int(share * n), keys or share == 1) if layer >= first else CPU
            for layer, n in enumerate(config.n_ff)]  # fmt: skip


@contextmanager
def hybrid(
    path: Path, layers: Sequence[LayerPlacement], kind: str = "keys", *, sparsity: str = "auto",
    executor: str = "graph", device: SimDevice | None = None, threads: int = 2, n_ctx: int = N_CTX,
    notes: list[str] | None = None, jitter: float = 0.0, **options: Any,
) -> Iterator[HybridEngine]:  # fmt: skip
    """An engine with these layers on a simulated GPU, which is checked for writes beside its arrays at the end."""
    gpu = device or SimDevice(jitter)
    placement = GpuPlacement(kind, tuple(layers), 1 << 32, n_ctx)
    try:
        with Engine.open(
            path, sparsity=sparsity, threads=threads, n_ctx=n_ctx, notify=(notes if notes is not None else []).append,
            gpu=GpuOptions(placement=placement, device=gpu, executor=executor, **options),
        ) as engine:  # fmt: skip
            assert isinstance(engine, HybridEngine)
            yield engine
    finally:
        if device is None:
            gpu.close()


def steps(engine: Engine, tokens: Sequence[int]) -> np.ndarray:
    """Logits after each token, one at a time: f32 [n, n_vocab]."""
    return np.stack([engine.forward([token]) for token in tokens])


def on_cpu(path: Path, tokens: Sequence[int], sparsity: str = "auto") -> np.ndarray:
    with Engine.open(path, sparsity=sparsity, threads=2, n_ctx=N_CTX) as engine:
        return steps(engine, tokens)


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Relative L2."""
    return float(np.linalg.norm(found.astype(np.float64) - wanted) / np.linalg.norm(wanted.astype(np.float64)))
