"""Predictors, thresholds on magnitudes, ReLU after norms: right numbers, and what they skip changes nothing else.

In: small models with random predictors, or switches. The truth is kernels/reference.py, or the exact mode of a model in
which the neurons that a predictor leaves out are switched off.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from small_models import Reference, Spec, all_of, make_tensors, write_model

from hotcold.runtime import schema
from hotcold.runtime.engine import Engine
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.kernels import reference
from hotcold.runtime.trace import Trace

TOKENS = [int(t) for t in np.arange(9) * 37 % 101]


def keys_of(kinds: list[str], rank: int, ahead: list[int], threshold: float = 0.0) -> dict[str, Any]:
    n = len(kinds)
    return {
        schema.KEY_PREDICTOR_KIND: kinds,
        schema.KEY_PREDICTOR_RANK: [rank if kind in ("lowrank", "mlp") else 0 for kind in kinds],
        schema.KEY_PREDICTOR_INPUT: ahead,
        schema.KEY_PREDICTOR_THRESHOLD: [float(threshold)] * n,
    }


def with_predictors(
    path: Path, spec: Spec, kinds: list[str], *, rank: int = 32, kind: Type = Type.F32, ahead: list[int] | None = None,
    bias: float = 0.0, threshold: float = 0.0,
) -> Path:  # fmt: skip
    """A model whose layers have random predictors; `bias` moves all their scores."""
    rng = np.random.default_rng(7)
    tensors = make_tensors(spec)
    for layer, (name, n_ff) in enumerate(zip(kinds, spec.neurons(), strict=True)):
        block: dict[str, tuple[Type, np.ndarray]] = {}
        if name != "none":
            scale = 8.0 if name == "signbit" else 1.0
            block[schema.FFN_PRED_OUT_BIAS] = (Type.F32, (scale * rng.standard_normal(n_ff) + bias).astype(np.float32))
        if name == "signbit":
            key = tensors[schema.block(layer, schema.key_matrix(spec.gated, False))][1]
            block[schema.FFN_PRED_SIGN] = (Type.I32, reference.sign_planes(key))
        if name in ("lowrank", "mlp"):
            enter = rng.standard_normal((rank, spec.n_embd)).astype(np.float32) / np.float32(spec.n_embd**0.5)
            leave = rng.standard_normal((n_ff, rank)).astype(np.float32) / np.float32(rank**0.5)
            block |= {schema.FFN_PRED_IN: (kind, enter), schema.FFN_PRED_OUT: (kind, leave)}
        if name == "mlp":
            block[schema.FFN_PRED_IN_BIAS] = (Type.F32, rng.standard_normal(rank).astype(np.float32))
        tensors |= {schema.block(layer, part): tensor for part, tensor in block.items()}
    keys = keys_of(kinds, rank, ahead or [0] * len(kinds), threshold)
    changed = Spec(**{**spec.__dict__, "metadata": {**spec.metadata, **keys}})
    return write_model(path, changed, tensors)


def inputs(path: Path, token: int) -> list[np.ndarray]:
    """FFN inputs [n_embd] of every layer for one token at the beginning, of the exact model."""
    out = []
    with Trace.open(path, threads=1, n_ctx=8) as trace:
        trace.embed([token])
        for layer in range(trace.config.n_layer):
            trace.attention(layer, 1, 0)
            trace.keys(layer, 1)
            out.append(trace.h[0].copy())
            trace.values(layer, 1)
            trace.down(layer, 1)
    return out


def candidates(model: Reference, layer: int, h: np.ndarray) -> np.ndarray:
    """Scores of the layer's predictor above the threshold, float64."""
    p, predictor = f"blk.{layer}.", model.config.predictors[layer]
    bias = model.vector(p + schema.FFN_PRED_OUT_BIAS)
    if predictor.kind == "signbit":
        planes = model.tensors[p + schema.FFN_PRED_SIGN][1].view(np.int32)
        return reference.sign_scores(planes, h) + bias - predictor.threshold
    kind, raw = model.tensors[p + schema.FFN_PRED_IN]
    hidden = reference.matmul(kind, raw, h[None], model.vector(p + schema.FFN_PRED_IN_BIAS))
    if predictor.kind == "mlp":
        hidden = np.maximum(hidden, 0)
    kind, raw = model.tensors[p + schema.FFN_PRED_OUT]
    return reference.matmul(kind, raw, hidden.astype(np.float32), bias)[0] - predictor.threshold


ONE_LAYER = [("lowrank", Type.F32), ("lowrank", Type.Q8_0), ("mlp", Type.F16), ("mlp", Type.Q4_0),
             ("signbit", Type.F32)]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), ONE_LAYER, ids=lambda v: v if isinstance(v, str) else v.name)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("key", "threads"), [(Type.Q8_0, 1), (Type.Q8_0, 3), (Type.F32, 2), (Type.F16, 1)])
def test_only_candidates_are_checked(
    name: str, kind: Type, gated: bool, key: Type, threads: int, tmp_path: Path
) -> None:
    """The same bits as the exact model whose other neurons are off; also where only the predictor is quantized."""
    spec = Spec(patterns=("free",), n_ff=235, n_embd=96, gated=gated, biases=True, key=key)
    path = with_predictors(tmp_path / "model.gguf", spec, [name], kind=kind, threshold=0.25)
    h = inputs(path, TOKENS[0])[0]
    scores = candidates(Reference(path), 0, h)
    clear = np.abs(scores) > (1e-4 if kind in (Type.F32, Type.F16) else 3e-2)
    chosen = scores > 0
    assert 0.2 < chosen.mean() < 0.8

    with Engine.open(path, sparsity="predict", threads=threads) as engine:
        got = engine.forward([TOKENS[0]])
        stats = engine.layer_stats()
    n_checked = round(stats.checked[0] * 235)
    assert chosen[clear].sum() <= n_checked <= (chosen | ~clear).sum()
    if not clear.all():
        return  # a score too near the threshold to say which side it falls on
    tensors = make_tensors(spec)
    bias_name = schema.block(0, schema.FFN_GATE_BIAS if gated else schema.FFN_UP_BIAS)
    bias = tensors[bias_name][1].copy()
    bias[~chosen] = -1e6
    tensors[bias_name] = (Type.F32, bias)
    with Engine.open(write_model(tmp_path / "off.gguf", spec, tensors), sparsity="exact", threads=threads) as engine:
        want = engine.forward([TOKENS[0]])
        assert round(stats.computed[0] * 235) == round(engine.layer_stats().computed[0] * 235)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("kinds", [["lowrank", "mlp", "signbit"], ["none", "lowrank", "none"]])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_predicting_every_neuron_is_exact(kinds: list[str], threads: int, tmp_path: Path) -> None:
    spec = Spec(patterns=("free", "mixed", "free"), n_ff=(70, 131, 64))
    path = with_predictors(tmp_path / "model.gguf", spec, kinds, bias=1e6)
    with Engine.open(path, sparsity="predict", threads=threads) as a, Engine.open(path, threads=threads) as b:
        for token in TOKENS:
            np.testing.assert_array_equal(a.forward([token]), b.forward([token]))
        np.testing.assert_array_equal(a.layer_stats().computed, b.layer_stats().computed)
        assert (a.layer_stats().checked == 1).all()
        assert (a.layer_stats().bytes_read >= b.layer_stats().bytes_read).all()


def test_predicting_no_neuron_leaves_only_attention(tmp_path: Path) -> None:
    spec = Spec(patterns=("free", "free"))
    path = with_predictors(tmp_path / "model.gguf", spec, ["lowrank", "signbit"], bias=-1e6)
    with Engine.open(path, sparsity="predict", threads=2) as engine:
        got = engine.forward([TOKENS[0]])
        assert (engine.layer_stats().checked == 0).all() and (engine.layer_stats().computed == 0).all()
    off = write_model(tmp_path / "off.gguf", Spec(patterns=("off", "off")))  # the same weights
    with Engine.open(off, threads=2) as engine:
        np.testing.assert_array_equal(got, engine.forward([TOKENS[0]]))


@pytest.mark.parametrize("threads", [1, 2])
def test_looking_ahead_reads_the_input_of_the_layer_before(threads: int, tmp_path: Path) -> None:
    spec = Spec(patterns=("free", "free", "free"), n_ff=200, n_embd=64)
    kinds = ["none", "mlp", "lowrank"]
    path = with_predictors(tmp_path / "model.gguf", spec, kinds, ahead=[0, 1, 1], bias=0.3)
    model = Reference(path)
    with Engine.open(path, sparsity="predict", threads=threads) as engine:
        engine.forward([TOKENS[0]])
        checked = engine.layer_stats().checked
    # Layer 1's input of the layer before is not changed by any predictor.
    scores = candidates(model, 1, inputs(path, TOKENS[0])[0])
    assert np.abs(scores).min() > 1e-5
    assert round(checked[1] * 200) == (scores > 0).sum()
    own = candidates(model, 1, inputs(path, TOKENS[0])[1])
    assert (own > 0).sum() != (scores > 0).sum()
    assert checked[0] == 1 and 0 < checked[2] < 1


def test_predict_needs_predictors(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", Spec())
    with pytest.raises(HotcoldError, match="train-predictor"):
        Engine.open(path, sparsity="predict")
    none = with_predictors(tmp_path / "none.gguf", Spec(), ["none", "none"])
    with pytest.raises(HotcoldError, match="train-predictor"):
        Engine.open(none, sparsity="predict")


def test_layers_that_fall_back_are_said(tmp_path: Path) -> None:
    path = with_predictors(tmp_path / "model.gguf", Spec(), ["lowrank", "none"])
    notes: list[str] = []
    with Engine.open(path, sparsity="predict", notify=notes.append):
        pass
    assert "predict in 1 of 2 layers; exact in layers 1," in notes[0]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (schema.KEY_PREDICTOR_KIND, ["lowrank"], "2 strings"),
        (schema.KEY_PREDICTOR_KIND, ["lowrank", "oracle"], "oracle"),
        (schema.KEY_PREDICTOR_KIND, "lowrank", "2 strings"),
        (schema.KEY_PREDICTOR_RANK, [0, 32], "0 in layer 0"),
        (schema.KEY_PREDICTOR_RANK, [32, 64], "ffn_pred_in"),
        (schema.KEY_PREDICTOR_RANK, [2**30, 32], "numbers"),
        (schema.KEY_PREDICTOR_INPUT, [1, 0], "1 in layer 0"),
        (schema.KEY_PREDICTOR_THRESHOLD, [float("nan"), 0.0], "threshold"),
    ],
)
def test_hostile_predictor_keys(key: str, value: Any, message: str, tmp_path: Path) -> None:
    spec = Spec()
    good = with_predictors(tmp_path / "good.gguf", spec, ["lowrank", "lowrank"])
    assert good.exists()
    tensors = {}
    rng = np.random.default_rng(0)
    for layer in range(2):
        tensors |= {
            schema.block(layer, schema.FFN_PRED_IN): (Type.F32, rng.random((32, 64)).astype(np.float32)),
            schema.block(layer, schema.FFN_PRED_OUT): (Type.F32, rng.random((96, 32)).astype(np.float32)),
            schema.block(layer, schema.FFN_PRED_OUT_BIAS): (Type.F32, np.zeros(96, np.float32)),
        }
    keys = keys_of(["lowrank", "lowrank"], 32, [0, 0]) | {key: value}
    path = write_model(tmp_path / "bad.gguf", Spec(metadata=keys), make_tensors(spec) | tensors)
    with pytest.raises(HotcoldError, match=message):
        Engine.open(path, sparsity="predict")


# ------------------------------------------------------------------ thresholds on magnitudes


@pytest.mark.parametrize(("activation", "gated"), [("silu", True), ("gelu", False), ("gelu_tanh", True)])
@pytest.mark.parametrize("kind", [Type.F32, Type.Q8_0], ids=lambda t: t.name)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_small_values_are_left_out(activation: str, gated: bool, kind: Type, threads: int, tmp_path: Path) -> None:
    spec = Spec(activation=activation, gated=gated, threshold=0.2, biases=True, n_ff=131, **all_of(kind))
    path = write_model(tmp_path / "model.gguf", spec)
    want, _ = Reference(path, np.float32).logits(TOKENS)
    with Engine.open(path, threads=threads, kv_type="f32") as exact:
        assert exact.sparsity == "exact"
        got = np.array([exact.forward([token]) for token in TOKENS])
        share = exact.layer_stats().computed
        exact.truncate(0)
        block = exact.forward(TOKENS, "all")
    with Engine.open(path, threads=threads, kv_type="f32", sparsity="dense") as dense:
        same = np.array([dense.forward([token]) for token in TOKENS])
        assert (dense.layer_stats().computed == 1).all()
    np.testing.assert_array_equal(got.view(np.uint32), same.view(np.uint32))
    assert ((share > 0.05) & (share < 0.95)).all()
    size = np.abs(want).max()
    if kind == Type.F32:  # a value at the threshold may fall to the other side
        errors = np.abs(got - want).max(axis=1) / size
        assert np.median(errors) < 1e-4 and errors.max() < 0.1
        assert np.median(np.abs(block - want).max(axis=1) / size) < 1e-4


@pytest.mark.parametrize(("activation", "gated"), [("silu", True), ("gelu", False)])
def test_layers_without_a_threshold_compute_everything(activation: str, gated: bool, tmp_path: Path) -> None:
    thresholds = {schema.KEY_THRESHOLD: [0.0, 0.2, 0.0]}
    spec = Spec(activation=activation, gated=gated, patterns=("free",) * 3, metadata=thresholds)
    path = write_model(tmp_path / "model.gguf", spec)
    want, _ = Reference(path, np.float32).logits(TOKENS)
    rows = []
    for mode in ("exact", "dense"):
        with Engine.open(path, threads=2, kv_type="f32", sparsity=mode) as engine:
            rows.append(np.array([engine.forward([token]) for token in TOKENS]))
            share = engine.layer_stats().computed
            if mode == "exact":
                assert share[0] == share[2] == 1 and 0.05 < share[1] < 0.95
    np.testing.assert_array_equal(rows[0].view(np.uint32), rows[1].view(np.uint32))
    errors = np.abs(rows[0] - want).max(axis=1) / np.abs(want).max()
    assert np.median(errors) < 1e-4 and errors.max() < 0.1


def test_bytes_read_with_thresholds_count_up_rows(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", Spec(activation="silu", threshold=0.2))
    with Engine.open(path, threads=1) as engine:
        engine.forward([1])
        stats = engine.layer_stats()
    np.testing.assert_allclose(stats.bytes_read / stats.bytes_dense, (2 + stats.computed) / 3)


# ------------------------------------------------------------------ a ReLU after the norms


@pytest.mark.parametrize(
    "fields",
    [
        {"norm_relu": (True, True)},
        {"norm_relu": (False, True), "biases": True, "n_ff": (96, 160)},
        {"norm_relu": (True, True), "layout": "stock"},
        {"norm_relu": (True, True), "activation": "relu2", "gated": False, "arch": "arcee", "n_embd": 72},
        {"norm_relu": (True, True), "arch": "opt", "gated": False, "biases": True, "n_head_kv": 4},
        {"norm_relu": (True, True), **all_of(Type.F16)},
    ],
)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_norm_relu(fields: dict[str, Any], threads: int, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", Spec(**fields))
    want, _ = Reference(path, np.float32).logits(TOKENS)
    plain = write_model(tmp_path / "plain.gguf", Spec(**{**fields, "norm_relu": ()}))
    different, _ = Reference(plain, np.float32).logits(TOKENS)
    assert np.abs(different - want).max() > 0.1 * np.abs(want).max(), "the ReLU must matter here"
    with Engine.open(path, threads=threads, kv_type="f32") as engine:
        got = np.array([engine.forward([token]) for token in TOKENS])
        engine.truncate(0)
        block = engine.forward(TOKENS, "all")
    for logits in (got, block):
        assert np.abs(logits - want).max() < 3e-5 * np.abs(want).max()
    with Engine.open(path, threads=threads, kv_type="f32", sparsity="dense") as engine:
        dense = np.array([engine.forward([token]) for token in TOKENS])
    np.testing.assert_array_equal(got.view(np.uint32), dense.view(np.uint32))


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0], ids=lambda t: t.name)
def test_norm_relu_quantized(kind: Type, tmp_path: Path) -> None:
    """Rows by input meet the activations in float32: nearer to the truth than rows by output are."""
    spec = Spec(norm_relu=(True, True), **all_of(kind))
    path = write_model(tmp_path / "model.gguf", spec)
    want, _ = Reference(path, np.float32).logits(TOKENS)
    with Engine.open(path, threads=2, kv_type="f32") as engine:
        got = np.array([engine.forward([token]) for token in TOKENS])
        engine.truncate(0)
        block = engine.forward(TOKENS, "all")
    for logits in (got, block):
        assert np.abs(logits - want).max() < 5e-2 * np.abs(want).max()
