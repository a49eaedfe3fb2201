"""What the GPU and the CPU computed of each layer, from both sides' counters.

In: the counters of the GPU's splits, of the CPU's workers, of the mailbox. Out: LayerStats with HybridStats. Next:
generate.py, repl.py and bench.py print them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hotcold.runtime.config import ModelConfig
from hotcold.runtime.gpu.placement import cold_mode
from hotcold.runtime.kernels import walk
from hotcold.runtime.plan import Plan
from hotcold.runtime.stats import HybridStats, LayerStats, layer_stats
from hotcold.runtime.weights import Weights


def shared_stats(
    config: ModelConfig, weights: Weights, plan: Plan, listed: np.ndarray, counts: np.ndarray, worked: np.ndarray,
    tokens: int, *, vram: int, name: str,
) -> LayerStats:  # fmt: skip
    """listed: int64 [n_layer, 2], what splits listed for the GPU and for the CPU; counts: int64 [n_layer, 2], key rows
    read and neurons computed by the CPU; worked: int64 [n_layer], how often the CPU had something to do. All are sums
    over `tokens` tokens."""
    placement = plan.placement
    assert placement is not None
    both = np.array(counts, np.float64)  # [n_layer, 2]
    gpu, cpu, asked = (np.zeros(config.n_layer) for _ in range(3))
    n = max(1, tokens)
    for layer in range(placement.first, config.n_layer):
        mode, n_ff = cold_mode(config, plan.sparsity, placement, layer), config.n_ff[layer]
        mine = float(listed[layer, 0]) if config.layout == "neuron-split" and mode != "dense" else float(n * n_ff)
        candidates = float(listed[layer].sum())
        both[layer, walk.CHECKED] = candidates if mode == "scores" else n * n_ff
        both[layer, walk.COMPUTED] += mine
        gpu[layer], cpu[layer] = mine / n, counts[layer, walk.COMPUTED] / n
        asked[layer] = worked[layer] / n
    stats = layer_stats(config, weights, plan, both, tokens)
    return replace(stats, hybrid=HybridStats(placement.first, gpu, cpu, asked, vram, name))
