"""make_synthetic.py: planted sparsity is real, both files hold the same model, predictors find what they say."""

from __future__ import annotations

import hashlib
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hotcold.convert.lazy import QType
from hotcold.runtime import schema
from hotcold.runtime.engine import Engine
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import dequantize, open_gguf
from hotcold.runtime.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))  # the scripts import by plain names

import make_synthetic  # noqa: E402
from synthetic.planted import firing, make_plan  # noqa: E402
from synthetic.rows import RowPool, unpack  # noqa: E402
from synthetic.shapes import SHAPES, PredictorRecipe, Recipe  # noqa: E402

TOKENS = np.random.default_rng(3).integers(3, 2000, 40)
TINY = Recipe("tiny", replace(SHAPES["llama-tiny"], n_layer=3), QType.F16, seed=0, activation="relu", sparsity=0.9,
              skew=0.7)  # fmt: skip
PREDICTOR = PredictorRecipe(rank=64, kind=QType.Q8_0, noise=0.1, recall=0.995)


def recipe(*options: str) -> Recipe:
    """What the command line means."""
    return make_synthetic.recipe_of(make_synthetic.arguments().parse_args([*options, "-o", "out.gguf"]))


def run(path: Path, sparsity: str = "auto") -> tuple[np.ndarray, np.ndarray]:
    """Logits f32 [n, n_vocab] of TOKENS one by one, and the share of neurons computed [n_layer]."""
    with Engine.open(path, sparsity=sparsity, threads=1, n_ctx=64) as engine:
        logits = np.stack([engine.forward([token]).copy() for token in TOKENS])
        return logits, engine.layer_stats().computed


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Relative L2."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> SimpleNamespace:
    """A ReLU llama with predictors, and its twin."""
    folder = tmp_path_factory.mktemp("synthetic")
    ours, stock = folder / "ours.gguf", folder / "stock.gguf"
    found = make_synthetic.make(replace(TINY, predictor=PREDICTOR), ours, stock)
    return SimpleNamespace(ours=ours, stock=stock, found=found)


# --- stock files


def test_stock_model_has_its_shape_and_runs(tmp_path):
    out = tmp_path / "tiny.gguf"
    make_synthetic.make(recipe("--shape", "llama-tiny", "--type", "q8_0", "--activation", "relu"), out)
    shape = SHAPES["llama-tiny"]
    with open_gguf(out) as file:
        assert file.tensors["blk.1.ffn_down.weight"].shape == (shape.n_embd, shape.n_ff)
        assert file.tensors["blk.0.attn_k.weight"].shape == (shape.n_embd // 2, shape.n_embd)
        assert file.metadata["hotcold.ffn.activation"] == "relu"
    with Engine.open(out, threads=1, n_ctx=16) as engine:
        logits = engine.forward([1, 300, 500, 7], logits="all")
    assert np.isfinite(logits).all()
    assert 0.1 < logits.std() < 10, "activations neither vanish nor explode"


def test_vocabulary_spells_any_text(planted):
    tokenizer = Tokenizer.from_gguf(planted.ours)
    text = "words, Ünïcode and 42 numbers"
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)).strip() == text


def test_model_is_the_same_for_the_same_seed(tmp_path):
    digests = []
    for seed in (1, 1, 2):
        make_synthetic.make(replace(TINY, kind=QType.F16, seed=seed), tmp_path / "x.gguf")
        digests.append(hashlib.sha256((tmp_path / "x.gguf").read_bytes()).hexdigest())
    assert digests[0] == digests[1] != digests[2]


def test_model_that_does_not_fit_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(HotcoldError, match="0.00 GB free"):
        make_synthetic.make(TINY, tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())


# --- planted sparsity


@pytest.mark.parametrize("shape, kind, sparsity", [
    ("llama-tiny", "q4_0", 0.9), ("llama-tiny", "q4_k", 0.9), ("llama-tiny", "q8_0", 0.5), ("prosparse-7b", "f16", 0.9),
    ("bamboo-7b", "bf16", 0.85), ("arcee-tiny", "q8_0", 0.9), ("opt-tiny", "q8_0", 0.95),
])  # fmt: skip
def test_neurons_are_off_as_often_as_wanted_in_every_layer(tmp_path, shape, kind, sparsity):
    r = recipe("--shape", shape, "--type", kind, "--sparsity", str(sparsity), "--layers", "3")
    if r.shape.n_embd > 256:  # a small one of the same kind
        r = replace(r, shape=replace(r.shape, n_embd=256, n_ff=768, n_head=4, n_head_kv=2, n_vocab=2000))
    out = tmp_path / "x.gguf"
    make_synthetic.make(r, out)
    exact, computed = run(out, "exact")
    dense, everything = run(out, "dense")
    assert np.abs(1 - computed - sparsity).max() < 0.03
    assert (everything == 1).all()
    assert np.array_equal(exact, dense), "exact equals dense, bit for bit"
    assert 0.3 < exact.std() < 5


def test_hot_neurons_fire_more_often_than_cold_ones():
    flat, skewed = firing(1000, 0.9, 0.0), firing(1000, 0.9, 1.0)
    assert flat.mean() == pytest.approx(0.1) and skewed.mean() == pytest.approx(0.1)
    assert np.ptp(flat) < 1e-9
    assert (np.diff(skewed) <= 0).all() and skewed[0] > 0.9 and skewed[-1] < 0.05


def test_neurons_fire_as_often_as_the_file_says(planted):
    """Counts in the file against keys of the file's own rows."""
    plan = make_plan(TINY)
    with open_gguf(planted.ours) as file:
        gate = dequantize(file.data("blk.1.ffn_gate.weight"), QType.F16)
        counts = file.data("blk.1.ffn_neuron_count") / file.metadata[schema.KEY_PROFILE_TOKENS]
    from synthetic.lowrank import sample

    fired = (sample(TINY, plan, 1, 4000) @ gate.T > 0).mean(axis=0)
    assert np.abs(fired - counts).max() < 0.1
    assert np.corrcoef(fired, counts)[0, 1] > 0.98
    assert np.array_equal(np.sort(counts)[::-1], counts), "hot first"


def test_shuffled_neurons_are_in_no_order(tmp_path):
    make_synthetic.make(replace(TINY, order="shuffled"), tmp_path / "x.gguf")
    with open_gguf(tmp_path / "x.gguf") as file:
        counts = file.data("blk.0.ffn_neuron_count")
    assert abs(np.corrcoef(counts, np.arange(len(counts)))[0, 1]) < 0.2
    _, computed = run(tmp_path / "x.gguf", "exact")
    assert np.abs(computed - 0.1).max() < 0.03


@pytest.mark.parametrize("shape", ["llama-tiny", "opt-tiny", "arcee-tiny"])
def test_tokens_do_not_grow_alike_with_depth(tmp_path, shape):
    """Otherwise the neurons of one token would be those of the next."""
    r = recipe("--shape", shape, "--type", "f16", "--sparsity", "0.9", "--layers", "8")
    make_synthetic.make(r, tmp_path / "x.gguf")
    logits = run(tmp_path / "x.gguf", "exact")[0]
    similar = np.corrcoef(logits)[np.triu_indices(len(TOKENS), 1)]
    assert similar.mean() < 0.15


@pytest.mark.parametrize("kind", [QType.F16, QType.Q8_0, QType.Q4_0, QType.Q4_K])
def test_rows_of_a_pool_get_heads_of_their_own(kind):
    values = np.random.default_rng(0).standard_normal((8, 512), dtype=np.float32) / 16
    index, head = np.array([3, 3, 0, 7]), np.array([-0.1, 0.05, 0.0, 0.12])
    rows = unpack(RowPool(values, kind).draw(index, head), kind)
    wanted = values[index]
    wanted[:, :32] = head[:, None]
    assert np.abs(rows - wanted).max() < 0.02
    assert np.abs(rows[:, :32].mean(axis=1) - head).max() < 4e-3, "what decides how often a neuron fires"


# --- predictors


def test_predictor_finds_what_its_keys_say(planted):
    """Recall in the file against what predict mode computes of what exact mode computes."""
    assert min(q.recall for q in planted.found) > 0.99
    assert max(q.density for q in planted.found) < 0.25
    _, exact = run(planted.ours, "exact")
    _, predicted = run(planted.ours, "predict")
    with open_gguf(planted.ours) as file:
        recall = file.metadata[schema.KEY_PREDICTOR_RECALL]
    assert recall == pytest.approx([q.recall for q in planted.found], abs=1e-6)
    assert np.abs(predicted / exact - recall).max() < 0.015


def test_predictor_share_of_the_bytes_is_that_of_the_file():
    r = recipe("--shape", "llama-1.3b", "--type", "q8_0", "--sparsity", "0.9", "--predictor", "lowrank")
    assert make_synthetic.predictor_share(r) == pytest.approx(128 * 7680 / (3 * 2048 * 5632), rel=0.03)


def test_predictors_of_models_with_biases_and_square_relu(tmp_path):
    for shape in ("opt-tiny", "arcee-tiny"):
        r = recipe("--shape", shape, "--type", "q8_0", "--sparsity", "0.9", "--predictor", "lowrank", "--rank", "64")
        found = make_synthetic.make(r, tmp_path / "x.gguf")
        assert min(q.recall for q in found) > 0.99
        exact, predicted = run(tmp_path / "x.gguf", "exact")[1], run(tmp_path / "x.gguf", "predict")[1]
        assert (predicted / exact).min() > 0.98


# --- the stock twin


@pytest.mark.parametrize("shape, kind, tolerance", [
    ("llama-tiny", "f16", 5e-3), ("llama-tiny", "q8_0", 4e-2), ("arcee-tiny", "f16", 3e-3),
])  # fmt: skip
def test_stock_twin_is_the_same_model(tmp_path, shape, kind, tolerance):
    ours, stock = tmp_path / "ours.gguf", tmp_path / "stock.gguf"
    make_synthetic.make(recipe("--shape", shape, "--type", kind, "--sparsity", "0.9"), ours, stock)
    assert distance(run(stock)[0], run(ours, "exact")[0]) < tolerance


def test_twin_with_low_rank_keys_is_the_same_model(planted):
    assert distance(run(planted.stock)[0], run(planted.ours, "exact")[0]) < 5e-3


def test_models_without_a_twin_say_so(tmp_path):
    for shape, why in (("opt-tiny", "no opt architecture"), ("bamboo-7b", "drelu")):
        with pytest.raises(HotcoldError, match=why):
            make_synthetic.make(recipe("--shape", shape, "--type", "q8_0", "--sparsity", "0.9"), tmp_path / "x.gguf",
                                tmp_path / "stock.gguf")  # fmt: skip
    assert not list(tmp_path.iterdir())


# --- options


@pytest.mark.parametrize("options, why", [
    (["--sparsity", "1.5"], "allowed are 0.02 to 0.999"),
    (["--sparsity", "0.9", "--skew", "9"], "allowed are 0"),
    (["--predictor", "lowrank"], "need --sparsity"),
    (["--sparsity", "0.9", "--activation", "silu"], "never off"),
    (["--sparsity", "0.9", "--predictor", "lowrank", "--rank", "40"], "multiple of 32"),
    (["--n-ff", "100"], "multiple of 32"),
])  # fmt: skip
def test_options_that_cannot_be_are_explained(tmp_path, options, why):
    with pytest.raises(HotcoldError, match=why):
        make_synthetic.make(recipe("--shape", "llama-tiny", "--type", "q8_0", *options), tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())


def test_numbers_that_cannot_be_are_usage_errors(capsys):
    for option in ("--n-ff", "--layers", "--n-ctx", "--rank", "--check"):
        for value in ("0", "-1", "1.5"):
            with pytest.raises(SystemExit, match="2"):
                recipe("--shape", "llama-tiny", "--type", "q8_0", option, value)
            assert "must be a whole number from 1" in capsys.readouterr().err


def test_ctrl_c_is_one_line(monkeypatch, capsys, tmp_path):
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(make_synthetic, "make", interrupted)
    command = ["make_synthetic.py", "--shape", "llama-tiny", "--type", "q8_0", "-o", str(tmp_path / "x.gguf")]
    monkeypatch.setattr("sys.argv", command)
    assert make_synthetic.main() == 130
    assert capsys.readouterr().err == "make_synthetic: interrupted\n"



def test_sizes_can_be_overridden(tmp_path):
    r = recipe("--shape", "llama-tiny", "--type", "q8_0", "--sparsity", "0.9", "--layers", "1", "--n-ff", "320",
               "--n-ctx", "99")  # fmt: skip
    make_synthetic.make(r, tmp_path / "x.gguf")
    with Engine.open(tmp_path / "x.gguf", threads=1, n_ctx=8) as engine:
        assert (engine.config.n_layer, engine.config.n_ff, engine.config.n_ctx_train) == (1, (320,), 99)
        assert np.isfinite(engine.forward([5])).all()
