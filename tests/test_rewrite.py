"""placement/rewrite.py: neurons move whole, byte for byte, in every tensor that has something per neuron."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from conftest import run_convert
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType
from one_op import same_bits
from small_models import Reference, Spec, Tensors, all_of, make_tensors, write_model
from test_convert_gguf import rewrite as edit

from hotcold.convert.model import MetaValue, array, string, u32
from hotcold.placement.identity import model_id
from hotcold.placement.rewrite import NEURON_COLUMNS, NEURON_ROWS, OF_THE_LAYER, rewrite
from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.engine import Engine
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.weights import expected_tensors

Get = Callable[..., Path]
N_FF = (97, 61, 33)  # no other size of the model, so that a shape tells which axis is the neurons'
RANK = 32
SHAPE: dict[str, Any] = {"patterns": ("free",) * 3, "n_ff": N_FF}
TOKENS = [(7 * i + i * i) % 101 for i in range(24)]
SPECS = {
    "f32": Spec(biases=True, **SHAPE),
    "q8_0": Spec(**SHAPE, **all_of(Type.Q8_0)),
    "q4_0-bf16": Spec(biases=True, key=Type.BF16, value=Type.Q4_0, **SHAPE),
    "not-gated": Spec(arch="opt", gated=False, biases=True, n_head_kv=4, key=Type.F16, value=Type.Q8_0, **SHAPE),
}
PREDICTOR_KEYS = {
    schema.KEY_PROFILE_TOKENS: 1000,
    schema.KEY_PREDICTOR_KIND: ["lowrank", "mlp", "signbit"],
    schema.KEY_PREDICTOR_RANK: [RANK, RANK, 0],
    schema.KEY_PREDICTOR_INPUT: [0, 1, 0],
    schema.KEY_PREDICTOR_THRESHOLD: [0.5, -0.5, 3.0],
}


def with_everything(spec: Spec) -> tuple[Spec, Tensors]:
    """The model with counts, and a predictor of every kind."""
    rng = np.random.default_rng(5)
    tensors = make_tensors(spec)
    for layer, n_ff in enumerate(spec.neurons()):
        def put(name: str, kind: Type, values: np.ndarray, layer: int = layer) -> None:
            tensors[schema.block(layer, name)] = (kind, values)

        put(schema.FFN_NEURON_COUNT, Type.I64, rng.integers(0, 1000, n_ff))
        put(schema.FFN_PRED_OUT_BIAS, Type.F32, rng.standard_normal(n_ff).astype(np.float32))
        if layer == 2:
            words = 2 * -(-spec.n_embd // 64)
            put(schema.FFN_PRED_SIGN, Type.I32, rng.integers(-(1 << 31), 1 << 31, (n_ff, words)).astype(np.int32))
            continue
        put(schema.FFN_PRED_IN, Type.F16, rng.standard_normal((RANK, spec.n_embd)).astype(np.float32))
        put(schema.FFN_PRED_OUT, Type.Q8_0, rng.standard_normal((n_ff, RANK)).astype(np.float32))
        if layer == 1:
            put(schema.FFN_PRED_IN_BIAS, Type.F32, rng.standard_normal(RANK).astype(np.float32))
    return Spec(**{**vars(spec), "metadata": {**spec.metadata, **PREDICTOR_KEYS}}), tensors


def orders(seed: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.permutation(n) for n in N_FF]


def raw(path: Path) -> dict[str, np.ndarray]:
    """Tensors in their own form."""
    with open_gguf(path) as f:
        return {name: f.data(name).copy() for name in f.tensors}


@pytest.mark.parametrize("spec", SPECS)
def test_every_tensor_with_something_per_neuron_moves_by_rows(spec: str, tmp_path: Path) -> None:
    src = write_model(tmp_path / "a.gguf", *with_everything(SPECS[spec]))
    rewrite(src, tmp_path / "b.gguf", order=orders())
    a, b = raw(src), raw(tmp_path / "b.gguf")
    assert list(a) == list(b)
    moved = set()
    for name, old in a.items():
        layer = int(name.split(".")[1]) if name.startswith("blk.") else -1
        per_neuron = len(old) // N_FF[layer] if layer >= 0 and len(old) in (N_FF[layer], 2 * N_FF[layer]) else 0
        want = old
        if per_neuron:
            moved.add(name.split(".", 2)[2])
            want = old.reshape(N_FF[layer], per_neuron, -1)[orders()[layer]].reshape(old.shape)
        np.testing.assert_array_equal(b[name].view(np.uint8), want.view(np.uint8), err_msg=name)
    assert moved >= {schema.FFN_NEURON_ID, schema.FFN_NEURON_COUNT, schema.FFN_PRED_OUT, schema.FFN_PRED_OUT_BIAS,
                     schema.FFN_PRED_SIGN, schema.FFN_UP_DOWN if SPECS[spec].gated else schema.FFN_DOWN_T}  # fmt: skip


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("norm_relu", [True, False])
def test_no_tensor_of_the_ffn_is_forgotten(gated: bool, norm_relu: bool, tmp_path: Path) -> None:
    """What the runtime may find in a file is known here: to move, or to stay."""
    spec, tensors = with_everything(Spec(gated=gated, **SHAPE))
    with open_gguf(write_model(tmp_path / "a.gguf", spec, tensors)) as f:
        config = ModelConfig.from_gguf(f)
    expected = expected_tensors(ModelConfig(**{**vars(config), "norm_relu": (norm_relu,) * 3}))
    parts = {name.split(".", 2)[2]: layer for name in expected if name.startswith("blk.")
             for layer in [int(name.split(".")[1])]}  # fmt: skip
    for part in parts:
        assert not part.startswith("ffn_") or part in (*NEURON_ROWS, *NEURON_COLUMNS, *OF_THE_LAYER), part


@pytest.mark.parametrize(("spec", "limit"), [("f32", 1e-5), ("q4_0-bf16", 3e-2), ("q8_0", 3e-2), ("not-gated", 3e-2)])
def test_logits_are_equal_to_reordering_error(spec: str, limit: float, tmp_path: Path) -> None:
    src = write_model(tmp_path / "a.gguf", SPECS[spec])
    rewrite(src, tmp_path / "b.gguf", order=orders())
    a, b = (Reference(path).logits(TOKENS)[0] for path in (src, tmp_path / "b.gguf"))
    assert np.abs(a - b).max() <= 1e-12 * np.abs(a).max()  # in float64, the sum of the same terms
    logits = []
    for path in (src, tmp_path / "b.gguf"):
        with Engine.open(path, sparsity="dense", threads=2) as engine:
            logits.append(engine.forward(TOKENS, "all"))
    assert np.abs(logits[0] - logits[1]).max() <= limit * np.abs(logits[0]).max()


@pytest.mark.parametrize("spec", SPECS)
def test_exact_equals_dense_bit_for_bit_on_the_sorted_file(spec: str, tmp_path: Path) -> None:
    rewrite(write_model(tmp_path / "a.gguf", SPECS[spec]), tmp_path / "b.gguf", order=orders())
    got = []
    for sparsity in ("exact", "dense"):
        with Engine.open(tmp_path / "b.gguf", sparsity=sparsity, threads=2) as engine:
            got.append(np.array([engine.forward([token]) for token in TOKENS]))
    assert same_bits(got[0], got[1])


def test_there_and_back_is_the_same_file(tmp_path: Path) -> None:
    src = write_model(tmp_path / "src.gguf", *with_everything(SPECS["q8_0"]))
    rewrite(src, tmp_path / "a.gguf")
    rewrite(tmp_path / "a.gguf", tmp_path / "b.gguf", order=orders())
    rewrite(tmp_path / "b.gguf", tmp_path / "c.gguf", order=[np.argsort(o) for o in orders()])
    assert (tmp_path / "c.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()
    assert (tmp_path / "b.gguf").read_bytes() != (tmp_path / "a.gguf").read_bytes()


@pytest.mark.parametrize("case", ["llama-bias", "llama-ff1003", "opt-mixed", "bamboo", "llama-12-layers"])
@pytest.mark.parametrize("outtype", ["f32", "q8_0"])
def test_to_stock_from_a_sorted_file_with_counts_and_predictors(
    case: str, outtype: str, tiny_model: Get, tmp_path: Path
) -> None:
    """The same bytes as from the file as converted: order, counts and predictors leave no trace."""
    src = tiny_model(case, outtype)
    with open_gguf(src) as f:
        config = ModelConfig.from_gguf(f)
    rng = np.random.default_rng(3)
    extra: dict[str, tuple[np.ndarray, Type]] = {}
    for layer, n_ff in enumerate(config.n_ff):
        parts = {
            schema.FFN_NEURON_COUNT: (np.sort(rng.integers(0, 99, n_ff))[::-1].copy(), Type.I64),
            schema.FFN_PRED_IN: (rng.standard_normal((RANK, config.n_embd)).astype(np.float32), Type.F16),
            schema.FFN_PRED_OUT: (rng.standard_normal((n_ff, RANK)).astype(np.float32), Type.Q8_0),
            schema.FFN_PRED_OUT_BIAS: (np.zeros(n_ff, np.float32), Type.F32),
        }
        extra |= {schema.block(layer, name): entry for name, entry in parts.items()}
    n = config.n_layer
    keys = {
        schema.KEY_PROFILE_TOKENS: MetaValue(99, GGUFValueType.UINT64),
        schema.KEY_PREDICTOR_KIND: array(["lowrank"] * n, GGUFValueType.STRING),
        schema.KEY_PREDICTOR_RANK: array([RANK] * n, GGUFValueType.UINT32),
        schema.KEY_PREDICTOR_INPUT: array([0] * n, GGUFValueType.UINT32),
        schema.KEY_PREDICTOR_THRESHOLD: array([0.0] * n, GGUFValueType.FLOAT32),
    }
    order = [rng.permutation(n_ff) for n_ff in config.n_ff]
    rewrite(src, tmp_path / "sorted.gguf", order=order, tensors=extra, metadata=keys)
    for path in (src, tmp_path / "sorted.gguf"):
        run_convert(path, "--to-stock", "-o", tmp_path / f"{path.stem}.back.gguf")
    back = (tmp_path / "sorted.back.gguf").read_bytes()
    assert back == (tmp_path / f"{src.stem}.back.gguf").read_bytes()
    if outtype == "f32":
        assert back == tiny_model(case, outtype, stock=True).read_bytes()


def test_tensors_and_keys_are_added_replaced_and_left_out(tmp_path: Path) -> None:
    spec, tensors = with_everything(SPECS["f32"])
    src = write_model(tmp_path / "a.gguf", Spec(**{**vars(spec), "metadata": {**spec.metadata, "my.key": 5}}), tensors)
    counts = np.arange(N_FF[1])[::-1].copy()
    values = np.linspace(-1, 1, N_FF[0] * RANK, dtype=np.float32).reshape(N_FF[0], RANK)
    new = {"blk.1.ffn_neuron_count": (counts, Type.I64), "blk.0.ffn_pred_out.weight": (values, Type.Q8_0)}
    dropped = [name for name in tensors if name.startswith("blk.2.ffn_pred")]
    kinds = {schema.KEY_PREDICTOR_KIND: array(["lowrank", "mlp", "none"], GGUFValueType.STRING), "my.new": u32(7),
             "my.text": string("é")}  # fmt: skip
    rewrite(src, tmp_path / "b.gguf", order=orders(), tensors=new, drop=[*dropped, "no.such"], metadata=kinds,
            drop_keys=["my.key", "no.such"])  # fmt: skip
    got = raw(tmp_path / "b.gguf")
    np.testing.assert_array_equal(got["blk.1.ffn_neuron_count"], counts)  # as given: already in the new order
    np.testing.assert_array_equal(got["blk.0.ffn_pred_out.weight"], gguf.quants.quantize(values, Type.Q8_0))
    assert not set(dropped) & set(got)
    with open_gguf(src) as a, open_gguf(tmp_path / "b.gguf") as b:
        assert "my.key" not in b.metadata and b.metadata["my.new"] == 7 and b.metadata["my.text"] == "é"
        assert b.metadata[schema.KEY_PREDICTOR_KIND] == ["lowrank", "mlp", "none"]
        for key in set(a.metadata) & set(b.metadata) - set(kinds):
            assert a.types[key] == b.types[key]
            np.testing.assert_array_equal(a.metadata[key], b.metadata[key])


def test_new_tensors_of_a_layer_stand_with_the_layer(tmp_path: Path) -> None:
    src = write_model(tmp_path / "a.gguf", SPECS["f32"])
    counts = {schema.block(layer, schema.FFN_NEURON_COUNT): (np.zeros(n, np.int64), Type.I64)
              for layer, n in enumerate(N_FF)}  # fmt: skip
    rewrite(src, tmp_path / "b.gguf", tensors=counts)
    names = list(raw(tmp_path / "b.gguf"))
    layers = [int(name.split(".")[1]) for name in names if name.startswith("blk.")]
    assert layers == sorted(layers) and not names[-1].startswith("blk.")


def test_texts_that_are_not_utf8_keep_their_bytes(tiny_model: Get, tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: Any) -> None:
        metadata["my.texts"] = ["a", b"\xff\xfe"]

    src = edit(tiny_model("llama"), tmp_path / "a.gguf", change)
    rewrite(src, tmp_path / "b.gguf")
    with open_gguf(src) as a, open_gguf(tmp_path / "b.gguf") as b:
        for key in a.metadata:
            assert a.types[key] == b.types[key]
            if a.types[key][1] == GGUFValueType.STRING:
                assert a.string_bytes(key) == b.string_bytes(key)
            else:
                np.testing.assert_array_equal(a.metadata[key], b.metadata[key], err_msg=key)


def test_other_alignment_of_the_source(tiny_model: Get, tmp_path: Path) -> None:
    rewrite(tiny_model("llama"), tmp_path / "a.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == tiny_model("llama").read_bytes()
    with open_gguf(tiny_model("llama")) as f:
        w = gguf.GGUFWriter(tmp_path / "wide.gguf", "llama")
        w.data_alignment = 128
        w.add_uint32("general.alignment", 128)
        for key in f.metadata:
            if key != "general.architecture":
                value = f.metadata[key]
                w.add_key_value(key, value.tolist() if isinstance(value, np.ndarray) else value, *f.types[key])
        for name in f.tensors:
            w.add_tensor(name, f.data(name))
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
    rewrite(tmp_path / "wide.gguf", tmp_path / "b.gguf")
    assert (tmp_path / "b.gguf").read_bytes() == tiny_model("llama").read_bytes()


# ------------------------------------------------------------------ errors


def failure(src: Path, out: Path, **changes: Any) -> str:
    """The one line that rewriting fails with; nothing is left behind."""
    before = sorted(out.parent.iterdir())
    with pytest.raises(HotcoldError) as e:
        rewrite(src, out, **changes)
    assert "\n" not in str(e.value)
    assert sorted(out.parent.iterdir()) == before
    return str(e.value)


BAD_ORDERS: dict[str, Callable[[list[np.ndarray]], object]] = {
    "order of neurons for 2 layers, the model has 3": lambda o: o.pop(),
    "layer 1: the order .* no permutation of 0..60": lambda o: o.__setitem__(1, np.zeros(N_FF[1], int)),
    "layer 2: the order .* no permutation": lambda o: o.__setitem__(2, np.arange(1, N_FF[2] + 1)),
    "layer 0: the order .* no permutation": lambda o: o.__setitem__(0, np.arange(N_FF[0] - 1)),
    "layer 0: .* no permutation": lambda o: o.__setitem__(0, np.arange(float(N_FF[0]))),
}


@pytest.mark.parametrize("text", BAD_ORDERS)
def test_orders_that_are_none(text: str, tmp_path: Path) -> None:
    order = orders()
    BAD_ORDERS[text](order)
    assert re.search(text, failure(write_model(tmp_path / "a.gguf", SPECS["f32"]), tmp_path / "b.gguf", order=order))


def counts_of(values: np.ndarray, kind: Type = Type.I64) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__("blk.1.ffn_neuron_count", (kind, values))


HOSTILE: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "counts too short": (counts_of(np.zeros(60, np.int64)), r"blk.1.ffn_neuron_count.*\[60\].*\[61\]"),
    "counts in i32": (counts_of(np.zeros(61, np.int32)), "blk.1.ffn_neuron_count.*i64"),
    "counts in f32": (counts_of(np.zeros(61, np.float32), Type.F32), "blk.1.ffn_neuron_count.*i64"),
    "negative count": (counts_of(-np.ones(61, np.int64)), "blk.1.ffn_neuron_count.*0 or more"),
    "matrix of counts": (counts_of(np.zeros((61, 2), np.int64)), "blk.1.ffn_neuron_count.*shape"),
    "neuron twice": (lambda t: t.__setitem__("blk.1.ffn_neuron_id", (Type.I32, np.zeros(61, np.int32))),
                     "blk.1.ffn_neuron_id.*not a permutation of 0..60"),
    "neuron beyond": (lambda t: t.__setitem__("blk.1.ffn_neuron_id", (Type.I32, np.arange(1, 62, dtype=np.int32))),
                      "blk.1.ffn_neuron_id.*not a permutation of 0..60"),
    "no neuron table": (lambda t: t.pop("blk.1.ffn_neuron_id"), "blk.1.ffn_neuron_id.*missing"),
    "predictor rows": (lambda t: t.__setitem__("blk.0.ffn_pred_out.bias", (Type.F32, np.zeros(96, np.float32))),
                       "blk.0.ffn_pred_out.bias.*shape"),
    "predictor missing": (lambda t: t.pop("blk.2.ffn_pred_sign"), "blk.2.ffn_pred_sign.*missing"),
    "unknown tensor": (lambda t: t.__setitem__("blk.0.ffn_extra", (Type.F32, np.zeros(97, np.float32))),
                       "blk.0.ffn_extra.*not part"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_sources(case: str, tmp_path: Path) -> None:
    spec, tensors = with_everything(SPECS["f32"])
    change, text = HOSTILE[case]
    change(tensors)
    src = write_model(tmp_path / "a.gguf", spec, tensors)
    assert re.search(text, failure(src, tmp_path / "b.gguf", order=orders()))


def test_stock_layout_says_to_convert(tmp_path: Path) -> None:
    src = write_model(tmp_path / "a.gguf", Spec(layout="stock", **SHAPE))
    assert f"first run: hotcold convert {src}" in failure(src, tmp_path / "b.gguf")


NEW: dict[str, tuple[Any, Type, str]] = {
    "nan": (np.full(97, np.nan, np.float32), Type.F32, "blk.0.ffn_pred_out.bias: 97 values .* are NaN or infinite"),
    "float64": (np.zeros(97), Type.F32, r"float64 \[97\] cannot be written"),
    "ints as floats": (np.zeros(97, np.int64), Type.F32, "cannot be stored as F32"),
    "cut blocks": (np.zeros(97, np.float32), Type.Q8_0, "do not divide into blocks of 32"),
    "wrong size": (np.zeros(96, np.float32), Type.F32, "the result could not be run.*ffn_pred_out.bias"),
}


@pytest.mark.parametrize("case", NEW)
def test_new_tensors_that_cannot_be(case: str, tmp_path: Path) -> None:
    values, kind, text = NEW[case]
    src = write_model(tmp_path / "a.gguf", *with_everything(SPECS["f32"]))
    got = failure(src, tmp_path / "b.gguf", tensors={"blk.0.ffn_pred_out.bias": (values, kind)})
    assert re.search(text, got), got


def test_existing_files_are_kept_without_force(tmp_path: Path) -> None:
    src = write_model(tmp_path / "a.gguf", SPECS["f32"])
    (tmp_path / "b.gguf").write_text("mine")
    assert "exists already" in failure(src, tmp_path / "b.gguf")
    assert (tmp_path / "b.gguf").read_text() == "mine"
    rewrite(src, tmp_path / "b.gguf", force=True)
    before = src.read_bytes()
    rewrite(src, src, order=orders(), force=True)  # in place: the old file stays whole until the new one is
    rewrite(src, src, order=[np.argsort(o) for o in orders()], force=True)
    assert src.read_bytes() == (tmp_path / "b.gguf").read_bytes() and len(before) <= src.stat().st_size


@pytest.mark.parametrize("what", ["interrupt", "disk", "killed"])
def test_a_write_that_fails_leaves_nothing(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = write_model(tmp_path / "a.gguf", SPECS["f32"])
    errors: dict[str, BaseException] = {"interrupt": KeyboardInterrupt(), "disk": OSError(28, "No space left"),
                                        "killed": SystemExit(143)}  # fmt: skip

    def progress(name: str, n_bytes: int) -> None:
        if name == "blk.1.ffn_gate.weight":
            raise errors[what]

    with pytest.raises((HotcoldError, KeyboardInterrupt, SystemExit)):
        rewrite(src, tmp_path / "b.gguf", order=orders(), progress=progress)
    assert list(tmp_path.iterdir()) == [src]


def test_what_a_killed_run_left_goes_with_the_next(tmp_path: Path) -> None:
    src = write_model(tmp_path / "a.gguf", SPECS["f32"])
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    (tmp_path / f".b.gguf.{pid}.part").write_bytes(b"half")
    rewrite(src, tmp_path / "b.gguf", order=orders())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gguf", "b.gguf"]


# ------------------------------------------------------------------ layers with a ReLU after the norms


def with_norm_relu(spec: Spec, kind: Type) -> tuple[Spec, Tensors]:
    """Matrices that read the norms, by input column, in layer 1."""
    tensors = {}
    for name, (old, values) in make_tensors(spec).items():
        part = name.split(".", 2)[-1]
        turned = {**schema.ATTN_T, schema.FFN_GATE: schema.FFN_GATE_T}.get(part)
        if name.startswith("blk.1.") and turned:
            tensors[schema.block(1, turned)] = (kind, np.ascontiguousarray(values.T))
        else:
            tensors[name] = (old, values)
    return Spec(**{**vars(spec), "metadata": {schema.KEY_NORM_RELU: [0, 1, 0]}}), tensors


@pytest.mark.parametrize("kind", [Type.F32, Type.F16])
def test_columns_of_turned_key_matrices_move(kind: Type, tmp_path: Path) -> None:
    src = write_model(tmp_path / "a.gguf", *with_norm_relu(SPECS["f32"], kind))
    rewrite(src, tmp_path / "b.gguf", order=orders())
    a, b = raw(src), raw(tmp_path / "b.gguf")
    np.testing.assert_array_equal(b["blk.1.ffn_gate_t.weight"], a["blk.1.ffn_gate_t.weight"][:, orders()[1]])
    np.testing.assert_array_equal(b["blk.1.attn_q_t.weight"], a["blk.1.attn_q_t.weight"])
    np.testing.assert_array_equal(b["blk.1.ffn_neuron_id"], a["blk.1.ffn_neuron_id"][orders()[1]])


def test_columns_inside_blocks_do_not_move(tmp_path: Path) -> None:
    spec = Spec(patterns=("free",) * 3, n_ff=64)
    src = write_model(tmp_path / "a.gguf", *with_norm_relu(spec, Type.Q8_0))
    order = [np.arange(64)[::-1]] * 3
    assert "ffn_gate_t.weight is Q8_0 and holds one neuron per column" in failure(src, tmp_path / "b.gguf", order=order)
    rewrite(src, tmp_path / "b.gguf", order=[order[0], np.arange(64), order[2]])  # that layer stays as it is


def test_they_come_back_to_stock_from_any_order(tmp_path: Path) -> None:
    src = write_model(tmp_path / "a.gguf", *with_norm_relu(SPECS["f32"], Type.F32))
    rewrite(src, tmp_path / "b.gguf", order=orders())
    for name in "ab":
        run_convert(tmp_path / f"{name}.gguf", "--to-stock", "-o", tmp_path / f"{name}.stock.gguf")
    assert (tmp_path / "a.stock.gguf").read_bytes() == (tmp_path / "b.stock.gguf").read_bytes()
    with open_gguf(src) as a, open_gguf(tmp_path / "b.gguf") as b:
        assert model_id(a, ModelConfig.from_gguf(a)) == model_id(b, ModelConfig.from_gguf(b))
