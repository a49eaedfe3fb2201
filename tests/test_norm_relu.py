"""Models with a ReLU after their norms through the converter: turned, turned back, and the same model throughout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import convert_error, run_convert
from gguf import GGMLQuantizationType as Type
from small_models import Reference, Spec, all_of, write_model

from hotcold.runtime import schema
from hotcold.runtime.engine import Engine
from hotcold.runtime.gguf_file import open_gguf

TOKENS = [int(t) for t in np.arange(12) * 37 % 101]


def logits(path: Path) -> np.ndarray:
    with Engine.open(path, threads=2, kv_type="f32") as engine:
        return engine.forward(TOKENS, "all")


@pytest.mark.parametrize(("arch", "gated"), [("llama", True), ("arcee", False)])
@pytest.mark.parametrize("kind", [Type.F32, Type.F16], ids=lambda t: t.name)
def test_split_and_back(arch: str, gated: bool, kind: Type, tmp_path: Path) -> None:
    flags = (True, False, True)
    spec = Spec(arch=arch, gated=gated, layout="stock", patterns=("free",) * 3, norm_relu=flags, biases=True,
                activation="relu" if gated else "relu2", **all_of(kind))  # fmt: skip
    stock = write_model(tmp_path / "stock.gguf", spec)
    split, again = tmp_path / "split.gguf", tmp_path / "again.gguf"
    run_convert(stock, "-o", split)
    with open_gguf(split) as file:
        assert list(file.metadata[schema.KEY_NORM_RELU]) == [1, 0, 1]
        key = schema.key_matrix(gated, True)
        assert [schema.block(n, key) in file.tensors for n in range(3)] == [True, False, True]
        assert "blk.0.attn_q_t.weight" in file.tensors and "blk.1.attn_q.weight" in file.tensors
    want, _ = Reference(stock, np.float32).logits(TOKENS)
    for path in (stock, split):
        assert np.abs(logits(path) - want).max() < (1e-4 if kind == Type.F32 else 2e-3) * np.abs(want).max()
    run_convert(split, "--to-stock", "-o", again)
    with open_gguf(stock) as a, open_gguf(again) as b:
        assert set(a.tensors) == set(b.tensors)
        for name in a.tensors:
            np.testing.assert_array_equal(a.data(name), b.data(name))
        assert list(b.metadata[schema.KEY_NORM_RELU]) == [1, 0, 1]
    message = convert_error(split, "--to-stock", "--relu-as-silu", "8", "-o", tmp_path / "x.gguf")
    assert "ReLU after its norms" in message


def test_quantized_matrices_are_turned_too(tmp_path: Path) -> None:
    spec = Spec(layout="stock", norm_relu=(True, True), **all_of(Type.Q8_0))
    stock = write_model(tmp_path / "stock.gguf", spec)
    split = tmp_path / "split.gguf"
    run_convert(stock, "-o", split)
    with open_gguf(split) as file:
        assert file.tensors["blk.0.attn_q_t.weight"].ggml_type == Type.Q8_0
    want = logits(stock)
    assert np.abs(logits(split) - want).max() < 5e-2 * np.abs(want).max()


def test_key_of_a_hugging_face_folder(tiny_checkpoint: Any, tmp_path: Path) -> None:
    plain, changed = tmp_path / "plain.gguf", tmp_path / "changed.gguf"
    run_convert(tiny_checkpoint("relu"), "-o", plain, "--outtype", "f32")
    run_convert(tiny_checkpoint("relu", norm_relu=True), "-o", changed, "--outtype", "f32")
    with open_gguf(changed) as file:
        assert all(file.metadata[schema.KEY_NORM_RELU])
        assert schema.block(0, schema.FFN_GATE_T) in file.tensors
    assert json.loads((tiny_checkpoint("relu", norm_relu=True) / "config.json").read_text())["norm_relu"] is True
    assert np.abs(logits(plain) - logits(changed)).max() > 0.01
    assert "norm_relu" in convert_error(tiny_checkpoint("relu", norm_relu=[True]), "-o", tmp_path / "x.gguf")
    assert "norm_relu" in convert_error(tiny_checkpoint("relu", norm_relu="yes"), "-o", tmp_path / "y.gguf")
