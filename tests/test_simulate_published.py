"""scripts/simulate_published.py: models of the published sizes and statistics, and ratios that hang together."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import simulate_published  # noqa: E402
from simulate_published import ROWS, model_of, report, simulate, skewed, without_a_check  # noqa: E402
from synthetic.planted import hottest_for  # noqa: E402
from synthetic.shapes import Shape  # noqa: E402


@pytest.mark.parametrize(("off", "hottest"), [(0.97, 0.26), (0.9, 0.43), (0.7, 0.43)])
def test_frequencies_are_as_sparse_and_as_uneven_as_published(off: float, hottest: float) -> None:
    f = skewed(4096, off, hottest)
    assert f.mean() == pytest.approx(1 - off, rel=1e-3) and (np.diff(f) <= 0).all()
    assert hottest_for(f, 0.8) == pytest.approx(hottest, abs=0.01)


def test_models_are_as_large_as_published() -> None:
    sizes = {"OPT-30B": 60e9, "Falcon(ReLU)-40B": 83e9, "LLaMA2(ReGLU)-70B": 39e9, "OPT-175B": 98e9, "Bamboo-7B": 14e9}
    for row in ROWS:
        if row.model in sizes:
            s = model_of(row).sizes
            whole = sum(layer.attention + layer.ffn for layer in s.layers) + s.head + s.embedding
            assert whole == pytest.approx(sizes[row.model], rel=0.05), row.model
            predictor = sum(layer.predictor for layer in s.layers)
            assert predictor == pytest.approx(row.statistics.predictor * whole, rel=0.05)


def test_looking_first_reads_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(simulate_published.MORE_SHAPES, "small", Shape(4, 1024, 4096, 16, 16))
    row = dataclasses.replace(ROWS[4], shape="small")
    named = without_a_check(model_of(row))
    assert named.density[0] == pytest.approx(named.frequency[0].mean()) and named.predicts
    for where in ("hybrid", "cpu"):
        s = simulate(dataclasses.replace(row, where=where), 8)
        assert s.predict > s.powerinfer > s.llama_cpp > 0 and s.exact > s.llama_cpp
    text = report([row], 4)
    assert "simulated" in text and text.count("\n| Bamboo-7B") == 1
    assert all(row.why and row.ratio for row in ROWS)
