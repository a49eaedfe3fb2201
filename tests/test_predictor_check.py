"""placement/predictor_check.py: what predicting costs, measured on a small model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hotcold.placement.predictor import Predictor, Quality, as_stored, export, metadata
from hotcold.placement.predictor_check import Cost, check_predictors, checked
from hotcold.placement.rewrite import rewrite
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.gguf_file import open_gguf

Get = Callable[..., Path]


def with_predictors(model: Path, out: Path, bias: float) -> Path:
    """All scores are this bias: above 0 every neuron is a candidate, below none."""
    with open_gguf(model) as file:
        c = ModelConfig.from_gguf(file)
    made = [Predictor("lowrank", False, 0.0, np.full(n_ff, bias, np.float32), np.zeros((32, c.n_embd), np.float32),
                      None, np.zeros((n_ff, 32), np.float32)) for n_ff in c.n_ff]  # fmt: skip
    stored: list[Predictor | None] = [as_stored(p) for p in made]
    rewrite(model, out, tensors=export(stored), metadata=metadata(stored, [Quality(1, 1, 1, 1, 1)] * c.n_layer))
    return out


@pytest.fixture
def model(tiny_model: Get) -> Path:
    return tiny_model("relu", max_position_embeddings=64)


def test_all_neurons_predicted_cost_bytes_but_no_perplexity(model: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    cost = check_predictors(with_predictors(model, tmp_path / "all.gguf", 1.0), 200,
                            lambda done, total: told.append((done, total)))  # fmt: skip
    assert cost is not None and abs(cost.loss) < 1e-4 and cost.bytes_predict > cost.bytes_exact > 0
    assert told[0][0] == 0 and told[-1] == (2 * cost.tokens, 2 * cost.tokens) and cost.tokens > 100
    assert len(cost.lines()) == 1 and cost.lines()[0].startswith(f"perplexity exact {cost.exact:.2f}, predict ")


def test_no_neuron_predicted_changes_perplexity(model: Path, tmp_path: Path) -> None:
    cost = check_predictors(with_predictors(model, tmp_path / "none.gguf", -1.0), 200)
    assert cost is not None and abs(cost.loss) > 1e-4 and cost.bytes_predict < cost.bytes_exact


def test_nothing_to_measure(model: Path) -> None:
    assert check_predictors(model, 100) is None
    assert "no layer" in checked(model, 100)[0]


def test_a_large_loss_says_what_to_do() -> None:
    assert Cost(10, 20.0, 20.1, 0.6, 0.4).lines() == [
        "perplexity exact 20.00, predict 20.10 (+0.50 %), FFN bytes read 60.0 % and 40.0 % (10 held-out tokens)"]
    for predict in (20.3, float("nan")):
        assert "raise --target-recall" in Cost(10, 20.0, predict, 0.6, 0.4).lines()[1]
