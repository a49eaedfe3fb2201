"""Blocks of tokens in exact mode: neurons that are off for every token are left out, and no bit changes.

In: small models in which neurons are off for all, some or no tokens. The truth is dense mode.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from one_op import same_bits
from small_models import Spec, all_of, write_model

from hotcold.runtime.engine import Engine
from hotcold.runtime.kernels import blocks, walk

TOKENS = [(7 * i + i * i) % 101 for i in range(60)]
WIDE = blocks.DEPTH + 77  # more neurons than one pass of a down projection takes
SPECS: dict[str, dict[str, Any]] = {
    "f32": {"n_ff": (1100, 1003, 333, WIDE), "patterns": ("mixed", "off", "on", "mixed")},
    "q8_0 biases": {"n_ff": (1100, 33), "patterns": ("mixed", "free"), "biases": True, **all_of(Type.Q8_0)},
    "q4_0 f16": {"n_ff": (640, 1, 77), "patterns": ("mixed", "mixed", "off"), "key": Type.Q4_0, "value": Type.F16},
    "not gated": {"arch": "opt", "gated": False, "n_ff": (WIDE, 96), "patterns": ("mixed", "free"), "biases": True},
    "relu2": {"activation": "relu2", "n_ff": 777, "patterns": ("mixed", "mixed")},
    "drelu": {"activation": "drelu", "n_ff": 777, "patterns": ("mixed", "mixed"), **all_of(Type.BF16)},
    "fatrelu": {"activation": "fatrelu", "threshold": 0.3, "n_ff": 777, "patterns": ("mixed", "mixed")},
    "norm_relu": {"norm_relu": (True, False), "n_ff": 768, "patterns": ("mixed", "mixed"), **all_of(Type.Q8_0)},
}


@pytest.mark.parametrize("name", SPECS)
def test_exact_blocks_are_dense_blocks(name: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", Spec(**SPECS[name]))
    with Engine.open(path, threads=1, sparsity="dense") as dense:
        want = np.concatenate([dense.forward(part, "all") for part in (TOKENS[:6], TOKENS[6:23], TOKENS[23:])])
    for threads in (1, 2, 3):
        with Engine.open(path, threads=threads, sparsity="exact") as exact:
            kinds = [op.kind for op in exact.plan.block]
            assert kinds.count("list") == exact.config.n_layer
            got = np.concatenate([exact.forward(part, "all") for part in (TOKENS[:6], TOKENS[6:23], TOKENS[23:])])
        assert same_bits(got, want)


@pytest.mark.parametrize("pattern", ["free", "mixed", "off"])
def test_a_block_is_dense_where_nearly_all_neurons_fire(pattern: str, tmp_path: Path) -> None:
    """Both ways give the same bits, so only the length of the list tells which one was taken."""
    path = write_model(tmp_path / "m.gguf", Spec(n_ff=777, patterns=(pattern,)))
    with Engine.open(path, threads=1, sparsity="exact") as engine:
        engine.forward(TOKENS[:9])
        listed = ctypes.c_int64.from_address(engine._buffers.private["lengths"]).value
    if pattern == "free":  # each is on for half of the tokens, so nearly all are on for one of nine
        assert listed == 777
    else:
        assert listed == 0 if pattern == "off" else 777 / 3 < listed < walk.MOST * 777


def test_thresholds_on_magnitudes_stay_dense(tmp_path: Path) -> None:
    """There the up rows are read to know which neurons are off."""
    path = write_model(tmp_path / "m.gguf", Spec(activation="silu", threshold=0.05))
    with Engine.open(path, threads=1, sparsity="exact") as engine:
        assert "list" not in [op.kind for op in engine.plan.block]
