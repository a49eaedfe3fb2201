"""Tensors are named, shaped and typed as the configuration says, and are never copied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from small_models import Spec, Tensors, all_of, make_tensors, write_model

from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import GGUFError, HotcoldError
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.kernels.formats import NATIVE, row_bytes
from hotcold.runtime.weights import Weights, load_weights

SPECS = {
    "gated": Spec(biases=True),
    "not gated": Spec(gated=False, biases=True),
    "stock": Spec(layout="stock"),
    "opt": Spec(arch="opt", gated=False, biases=True, n_head_kv=4),
    "qwen3": Spec(arch="qwen3", head=Type.F32),
}


def load(path: Path) -> Weights:
    with open_gguf(path) as file:
        return load_weights(file, ModelConfig.from_gguf(file))


def changed(tmp_path: Path, spec: Spec, change: Callable[[Tensors], Any]) -> Path:
    tensors = make_tensors(spec)
    change(tensors)
    return write_model(tmp_path / "changed.gguf", spec, tensors)


@pytest.mark.parametrize("name", SPECS)
def test_views_point_into_the_file(name: str, tmp_path: Path) -> None:
    spec = SPECS[name]
    path = write_model(tmp_path / "model.gguf", spec)
    with open_gguf(path) as file:
        weights = load_weights(file, ModelConfig.from_gguf(file))
        raw = path.read_bytes()
        tensors = make_tensors(spec)
        assert {m.name for m in weights} == {n for n in tensors if not n.endswith(schema.FFN_NEURON_ID)}
        base = {m.addr - file.tensors[m.name].offset for m in weights}
        assert len(base) == 1  # one mapping, nothing copied
        for m in weights:
            kind, values = tensors[m.name]
            rows = 1 if values.ndim == 1 else len(values)
            assert (m.rows, m.cols, m.ggml_type) == (rows, values.shape[-1], int(kind))
            assert m.stride == row_bytes(m.ggml_type, m.cols) and m.n_bytes == file.tensors[m.name].n_bytes
            offset = file.tensors[m.name].offset
            assert raw[offset : offset + m.n_bytes] == values.tobytes()
        with pytest.raises((ValueError, RuntimeError)):
            weights["token_embd.weight"].data[0, 0] = 1  # read-only
        del weights, m


@pytest.mark.parametrize("kind", NATIVE)
def test_row_bytes_of_every_native_type(kind: int, tmp_path: Path) -> None:
    weights = load(write_model(tmp_path / "model.gguf", Spec(n_embd=256, head_dim=64, **all_of(Type(kind)))))
    per_256 = {
        Type.F32: 1024, Type.F16: 512, Type.BF16: 512, Type.Q8_0: 272, Type.Q4_0: 144, Type.Q4_1: 160, Type.Q5_0: 176,
        Type.Q5_1: 192, Type.Q4_K: 144, Type.Q5_K: 176, Type.Q6_K: 210,
    }[Type(kind)]  # fmt: skip
    assert weights["token_embd.weight"].stride == per_256
    assert weights["blk.1.attn_q.weight"].ggml_type == kind


def test_lookup(tmp_path: Path) -> None:
    weights = load(write_model(tmp_path / "model.gguf", Spec()))
    assert weights.get("output.weight") is None and weights.layer(0, "attn_q.bias") is None
    ffn = weights.layer(1, schema.FFN_UP_DOWN)
    assert ffn is not None and ffn is weights["blk.1.ffn_up_down.weight"]
    with pytest.raises(KeyError):
        weights["output.weight"]


@pytest.mark.parametrize("name", SPECS)
def test_every_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    spec = SPECS[name]
    for missing in [n for n in make_tensors(spec) if n.startswith(("blk.1.", "output", "position"))]:
        path = changed(tmp_path, spec, lambda tensors, n=missing: tensors.pop(n))  # type: ignore[misc]
        if missing == "output.weight" or missing.endswith(".bias") and "norm" not in missing:
            load(path)  # a tied head, a model without this bias
            continue
        with pytest.raises(GGUFError, match="ffn_gate" if missing.endswith(schema.FFN_GATE) else missing):
            load(path)


@pytest.mark.parametrize("extra", ["blk.0.attn_sinks.weight", "blk.0.ffn_gate_exps.weight", "blk.1.attn_q.weight2",
                                   "output_norm_2.weight", "rope_freqs.bias"])  # fmt: skip
def test_unknown_tensors_are_refused_by_name(extra: str, tmp_path: Path) -> None:
    path = changed(tmp_path, Spec(), lambda tensors: tensors.update({extra: (Type.F32, np.ones(3, np.float32))}))
    with pytest.raises(GGUFError, match=f"{extra}.*is not part of architecture 'llama'"):
        load(path)


def test_tensors_of_the_other_layout_are_unknown(tmp_path: Path) -> None:
    down = (Type.F32, np.ones((64, 96), np.float32))
    path = changed(tmp_path, Spec(), lambda tensors: tensors.update({"blk.0.ffn_down.weight": down}))
    with pytest.raises(GGUFError, match="blk.0.ffn_down.weight.*neuron-split layout"):
        load(path)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("blk.1.attn_k.weight", (64, 64), r"\[64, 64\], expected \[32, 64\]"),
        ("blk.0.ffn_up_down.weight", (96, 64), r"\[96, 64\], expected \[192, 64\]"),
        ("blk.0.attn_norm.weight", (65,), r"\[65\], expected \[64\]"),
        ("blk.0.attn_output.weight", (64, 32), r"\[64, 32\], expected \[64, 64\]"),
        ("output_norm.weight", (1, 64), r"\[1, 64\], expected \[64\]"),
    ],
)
def test_wrong_shapes(name: str, shape: tuple[int, ...], expected: str, tmp_path: Path) -> None:
    path = changed(tmp_path, Spec(), lambda tensors: tensors.update({name: (Type.F32, np.ones(shape, np.float32))}))
    with pytest.raises(GGUFError, match=f"{name}.*{expected}"):
        load(path)


@pytest.mark.parametrize("kind", [Type.TQ1_0, Type.TQ2_0])
def test_types_that_are_not_native_name_the_way_out(kind: Type, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", Spec(attn=kind, n_embd=256, head_dim=64))
    with pytest.raises(HotcoldError, match=f"blk.0.attn_q.weight.*{kind.name}.*F32, F16, BF16, Q8_0, Q4_0.*convert"):
        load(path)


def test_vectors_are_f32_or_widened(tmp_path: Path) -> None:
    def halve(tensors: Tensors) -> None:
        tensors["output_norm.weight"] = (Type.F16, tensors["output_norm.weight"][1])

    norm = load(changed(tmp_path, Spec(), halve))["output_norm.weight"]
    assert norm.data.dtype == np.float32 and norm.stride == 256
    assert np.array_equal(norm.data, make_tensors(Spec())["output_norm.weight"][1].astype(np.float16))

    def quantize(tensors: Tensors) -> None:
        tensors["blk.0.ffn_norm.weight"] = (Type.I32, np.ones(64, np.int32))

    with pytest.raises(HotcoldError, match="vector 'blk.0.ffn_norm.weight' is I32, allowed are F32 and F16"):
        load(changed(tmp_path, Spec(), quantize))


@pytest.mark.parametrize(
    "ids",
    [np.zeros(96, np.int32), np.arange(1, 97, dtype=np.int32), np.arange(-1, 95, dtype=np.int32),
     np.full(96, 2**31 - 1, np.int32), np.arange(96, dtype=np.float32)],
)  # fmt: skip
def test_neuron_table_must_be_a_permutation(ids: np.ndarray, tmp_path: Path) -> None:
    kind = Type.I32 if ids.dtype == np.int32 else Type.F32
    path = changed(tmp_path, Spec(), lambda tensors: tensors.update({"blk.1.ffn_neuron_id": (kind, ids)}))
    with pytest.raises(GGUFError, match=r"blk.1.ffn_neuron_id.*permutation of 0..95"):
        load(path)
