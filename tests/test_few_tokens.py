"""A few tokens at once have the bits of one at a time, in every mode: what verifying a draft rests on.

In: small models. The truth is the same engine, fed one token at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from one_op import same_bits
from small_models import Spec, all_of, write_model
from test_modes import with_predictors

from hotcold.runtime.buffers import FEW_TOKENS
from hotcold.runtime.engine import Engine
from hotcold.runtime.errors import HotcoldError

TOKENS = [(7 * i + i * i) % 101 for i in range(40)]
SIZES = (3, 1, 8, 5, 2, 7, 6, 4)  # 36 tokens in pieces
SPECS: dict[str, dict[str, Any]] = {
    "relu": {"n_ff": (1100, 1003), "patterns": ("mixed", "free")},
    "quantized": {"n_ff": (1100, 33), "biases": True, **all_of(Type.Q8_0)},
    "mixed types": {"n_ff": (640, 96), "attn": Type.F16, "key": Type.Q8_0, "value": Type.Q4_0},
    "silu": {"activation": "silu", **all_of(Type.Q4_0)},
    "norm_relu and a window": {"norm_relu": (True, False), "window": 7, **all_of(Type.F16)},
    "thresholds": {"activation": "silu", "threshold": 0.05, "n_ff": 1100},
    "stock": {"layout": "stock", **all_of(Type.Q8_0)},
}


def one_by_one(engine: Engine) -> tuple[np.ndarray, np.ndarray]:
    """Logits of each token, and the counters."""
    engine.truncate(0)
    engine.reset_stats()
    rows = np.array([engine.forward([t]) for t in TOKENS[: sum(SIZES)]])
    return rows, counters(engine)


def in_pieces(engine: Engine) -> tuple[np.ndarray, np.ndarray]:
    engine.truncate(0)
    engine.reset_stats()
    rows, at = [], 0
    for size in SIZES:
        rows.append(engine.verify(TOKENS[at : at + size]))
        at += size
    return np.concatenate(rows), counters(engine)


def counters(engine: Engine) -> np.ndarray:
    stats = engine.layer_stats()
    return np.stack([stats.checked, stats.computed])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", SPECS)
def test_every_mode_that_computes_what_it_finds(name: str, threads: int, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", Spec(**SPECS[name]))
    for mode in ("dense", "auto"):
        with Engine.open(path, threads=threads, sparsity=mode) as engine:
            rows, counts = one_by_one(engine)
            together, counts_together = in_pieces(engine)
            assert same_bits(rows, together)
            assert np.array_equal(counts, counts_together)


@pytest.mark.parametrize("kind", ["lowrank", "mlp", "signbit"])
@pytest.mark.parametrize("stored", [Type.F32, Type.Q8_0], ids=lambda t: t.name)
def test_predictors(kind: str, stored: Type, tmp_path: Path) -> None:
    spec = Spec(n_ff=(1100, 700), patterns=("mixed", "mixed"), **all_of(Type.Q8_0))
    ahead = [0, 0 if kind == "signbit" else 1]
    path = with_predictors(tmp_path / "m.gguf", spec, [kind, kind], kind=stored, ahead=ahead)
    with Engine.open(path, threads=2, sparsity="predict") as engine:
        rows, counts = one_by_one(engine)
        together, counts_together = in_pieces(engine)
    assert same_bits(rows, together)
    assert np.array_equal(counts, counts_together)
    assert counts[0].max() < 1  # candidates were chosen


def test_short_texts_are_single_tokens(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", Spec(**SPECS["relu"]))
    with Engine.open(path, threads=2) as engine:
        single = np.array([engine.forward([t]) for t in TOKENS[:5]])
        engine.truncate(0)
        assert same_bits(engine.forward(TOKENS[:5], "all"), single)
        engine.truncate(2)  # what was not accepted is forgotten
        assert same_bits(engine.verify(TOKENS[2:5]), single[2:])


def test_what_verify_refuses(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", Spec(**SPECS["relu"]))
    with Engine.open(path, threads=1, n_ctx=10) as engine:
        with pytest.raises(HotcoldError, match="9 tokens to verify at once, allowed are 1 to 8"):
            engine.verify(TOKENS[: FEW_TOKENS + 1])
        with pytest.raises(HotcoldError, match="outside the vocabulary"):
            engine.verify([0, 101])
        engine.verify(TOKENS[:8])
        with pytest.raises(HotcoldError, match="context is full"):
            engine.verify(TOKENS[:3])
        assert engine.n_past == 8


def test_every_operator_is_timed_when_asked(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", Spec(**SPECS["relu"]))
    with Engine.open(path, threads=2) as engine:
        engine.forward([1])
        assert engine.op_times() == []
        engine.time_ops(True)
        engine.forward([1])
        engine.verify([1, 2])
        engine.forward(TOKENS[:9])
        times = engine.op_times()
        assert [t.op for t in times] == [*engine.plan.token, *engine.plan.block]
        assert [t.calls for t in times] == [2] * len(engine.plan.token) + [1] * len(engine.plan.block)
        matmuls = [t for t in times if t.op.kind == "matmul"]
        assert all(t.cycles.shape == (2,) and (t.cycles > 0).all() for t in matmuls)
        engine.time_ops(False)
        assert engine.op_times() == []
