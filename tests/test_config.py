"""config.py: what each architecture and key means, and the refusal of numbers that cannot be."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import hostile
import pytest
from hostile import ARRAY, BOOL, F32, I32, STRING, U32, array

from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig, Rope
from hotcold.runtime.errors import GGUFError
from hotcold.runtime.gguf_file import open_gguf


def read(tmp_path: Path, content: hostile.Builder | bytes) -> ModelConfig:
    path = tmp_path / "file.gguf"
    path.write_bytes(content if isinstance(content, bytes) else content.build())
    with open_gguf(path) as f:
        return ModelConfig.from_gguf(f)


def with_keys(builder: hostile.Builder, keys: dict[str, tuple[int, Any]]) -> hostile.Builder:
    for key, (kind, value) in keys.items():
        if isinstance(value, list):
            builder.raw(key, ARRAY, array(kind, value))
        else:
            builder.put(key, kind, value)
    return builder


@pytest.mark.parametrize("name", hostile.MODEL_CASES)
def test_impossible_model_is_refused(name: str, tmp_path: Path) -> None:
    case = hostile.MODEL_CASES[name]
    with pytest.raises(GGUFError, match=case.error) as caught:
        read(tmp_path, case.content)
    message = str(caught.value)
    assert re.match(r".*file.gguf: .*: found .*, allowed: .*", message)
    assert message.isprintable()


def test_stock_llama(tmp_path: Path) -> None:
    assert read(tmp_path, hostile.model()) == ModelConfig(
        arch="llama", name="tiny", layout="stock", n_layer=2, n_embd=16, n_head=2, n_head_kv=1, head_dim=8,
        n_vocab=12, n_ctx_train=64, n_ff=(24, 24), norm="rms", norm_eps=pytest.approx(1e-5), activation="silu",
        gated=True, thresholds=(0.0, 0.0), rope=Rope(8, True, 10000.0, "none"), window=(0, 0),
            norm_relu=(False, False),
    )  # fmt: skip


def test_neuron_split(tmp_path: Path) -> None:
    config = read(tmp_path, hostile.model(split=True))
    assert (config.layout, config.activation, config.gated) == ("neuron-split", "fatrelu", True)
    assert config.thresholds == (0.25, 0.5) and config.n_ff == (24, 24)


@pytest.mark.parametrize(
    ("arch", "activation", "gated", "norm", "interleaved"),
    [
        ("llama", "silu", True, "rms", True),
        ("qwen2", "silu", True, "rms", False),
        ("qwen3", "silu", True, "rms", False),
        ("minicpm", "silu", True, "rms", True),
        ("arcee", "relu2", False, "rms", True),
        ("opt", "relu", False, "layer", None),
    ],
)
def test_architectures(
    arch: str, activation: str, gated: bool, norm: str, interleaved: bool | None, tmp_path: Path
) -> None:
    config = read(tmp_path, hostile.model(arch=arch))
    assert (config.arch, config.activation, config.gated, config.norm) == (arch, activation, gated, norm)
    assert (config.rope.interleaved if config.rope else None) == interleaved
    relu = read(tmp_path, hostile.model(arch=arch).put("hotcold.ffn.activation", STRING, "relu"))
    assert relu.activation == "relu" and relu.layout == "stock", "the key is believed in a stock file too"


def test_every_architecture_has_a_test() -> None:
    assert set(schema.ARCHITECTURES) == {"llama", "qwen2", "qwen3", "minicpm", "arcee", "opt"}


def test_sizes_that_differ_from_the_usual(tmp_path: Path) -> None:
    b = with_keys(hostile.model(), {
        "llama.attention.key_length": (U32, 16), "llama.attention.value_length": (U32, 16),
        "llama.attention.head_count": (U32, [2, 2]), "llama.attention.head_count_kv": (I32, 2),
        "llama.feed_forward_length": (U32, [24, 32]), "llama.rope.dimension_count": (U32, 4),
        "llama.attention.scale": (F32, 0.125),
    })  # fmt: skip
    gate = b.tensor("blk.1.ffn_gate.weight")
    b.tensors[b.tensors.index(gate)] = hostile.f32("blk.1.ffn_gate.weight", 32, 16)
    config = read(tmp_path, b)
    assert (config.head_dim, config.n_head, config.n_head_kv, config.n_ff) == (16, 2, 2, (24, 32))
    assert config.rope is not None and config.rope.n_dims == 4
    assert config.attn_scale == 0.125


def test_name_is_the_file_s_when_the_key_is_absent_and_always_printable(tmp_path: Path) -> None:
    assert read(tmp_path, hostile.model().drop("general.name")).name == "file"
    assert read(tmp_path, hostile.model().put("general.name", STRING, "a\x1b[31mb")).name == r"a\x1b[31mb"


def test_learned_positions_bound_the_context(tmp_path: Path) -> None:
    assert read(tmp_path, hostile.model(arch="opt").put("opt.context_length", U32, 2048)).n_ctx_train == 64
    assert read(tmp_path, hostile.model(arch="opt").put("opt.context_length", U32, 10)).n_ctx_train == 10


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, (0, 0)),
        ({"": (U32, 8)}, (8, 8)),
        ({"": (U32, 0), "_pattern": (BOOL, [1, 0])}, (0, 0)),
        ({"": (U32, 8), "_pattern": (BOOL, [1, 0])}, (8, 0)),
        ({"": (U32, 8), "_pattern": (U32, [0, 1])}, (0, 8)),
        ({"": (U32, 8), "_pattern": (U32, 2)}, (8, 0)),
        ({"": (U32, 8), "_pattern": (U32, 1)}, (0, 0)),
        ({"": (U32, 8), "_pattern": (U32, 0)}, (8, 8)),
    ],
)
def test_sliding_window(keys: dict[str, tuple[int, Any]], expected: tuple[int, ...], tmp_path: Path) -> None:
    keys = {f"llama.attention.sliding_window{k}": v for k, v in keys.items()}
    assert read(tmp_path, with_keys(hostile.model(), keys)).window == expected


def rope(tmp_path: Path, **keys: tuple[int, Any]) -> Rope:
    short = {"base": "freq_base", "linear": "scale_linear"}
    full = {f"llama.rope.{short.get(k, 'scaling.' + k)}": v for k, v in keys.items()}
    config = read(tmp_path, with_keys(hostile.model(), full))
    assert config.rope is not None
    return config.rope


def test_rope_scaling_linear(tmp_path: Path) -> None:
    plain = Rope(8, True, 10000.0, "none")
    assert rope(tmp_path, base=(F32, 5e5)) == Rope(8, True, 5e5, "none")
    linear = Rope(8, True, 10000.0, "linear", factor=4.0)
    assert rope(tmp_path, type=(STRING, "linear"), factor=(F32, 4.0)) == linear
    assert rope(tmp_path, factor=(F32, 4.0)) == linear, "linear is what a factor alone means"
    assert rope(tmp_path, linear=(F32, 4.0)) == linear, "the key's old name"
    assert rope(tmp_path, type=(STRING, "none"), factor=(F32, 4.0)) == plain
    assert rope(tmp_path, original_context_length=(U32, 16)) == plain


def test_rope_scaling_yarn(tmp_path: Path) -> None:
    yarn: dict[str, tuple[int, Any]] = {"type": (STRING, "yarn"), "factor": (F32, 4.0)}
    assert rope(tmp_path, **yarn) == Rope(8, True, 10000.0, "yarn", 4.0, orig_ctx=64)
    assert rope(tmp_path, **yarn, original_context_length=(U32, 16)).orig_ctx == 16
    full = rope(tmp_path, **yarn, yarn_beta_fast=(F32, 16.0), yarn_beta_slow=(F32, 2.0), yarn_ext_factor=(F32, 0.5),
                attn_factor=(F32, 1.5))  # fmt: skip
    assert (full.beta_fast, full.beta_slow, full.ext_factor, full.attn_factor) == (16.0, 2.0, 0.5, 1.5)
    # The whole magnitude, of which rope_table supplies 1 + 0.1 ln 4.
    whole = rope(tmp_path, **yarn, yarn_attn_factor=(F32, 1.25))
    assert whole.attn_factor * (1 + 0.1 * math.log(4)) == pytest.approx(1.25)
    assert rope(tmp_path, **yarn, yarn_attn_factor=(F32, 1.25), yarn_ext_factor=(F32, 0.0)).attn_factor == 1.25


def test_minicpm_scales(tmp_path: Path) -> None:
    old = read(tmp_path, hostile.model(arch="minicpm"))
    assert old.embedding_scale == 12.0
    assert old.residual_scale == pytest.approx(1.4 / math.sqrt(2))
    assert old.logit_scale == pytest.approx(256 / 16), "files without the keys: dim_model_base / hidden_size"
    keys = {f"minicpm.{name}_scale": (F32, v) for name, v in (("embedding", 2.0), ("residual", 0.5), ("logit", 4.0))}
    new = read(tmp_path, with_keys(hostile.model(arch="minicpm"), keys))
    assert (new.embedding_scale, new.residual_scale, new.logit_scale) == (2.0, 0.5, 0.25), "the file's value divides"


def test_keys_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    keys = {"llama.expert_count": (U32, 0), "llama.attention.causal": (BOOL, 1), "llama.logit_scale": (F32, 1.0),
            "llama.attn_logit_softcapping": (F32, 0.0), "general.type": (STRING, "model")}  # fmt: skip
    assert read(tmp_path, with_keys(hostile.model(), keys)) == read(tmp_path, hostile.model())


def test_thresholds(tmp_path: Path) -> None:
    key = "hotcold.ffn.threshold"
    b = with_keys(hostile.model(split=True), {"hotcold.ffn.activation": (STRING, "relu"), key: (F32, [0.0, 0.0])})
    assert read(tmp_path, b).thresholds == (0.0, 0.0)
    assert read(tmp_path, b.drop(key)).thresholds == (0.0, 0.0)
    stock = with_keys(hostile.model(), {"hotcold.ffn.activation": (STRING, "fatrelu"), key: (F32, [0.5, 1.0])})
    assert read(tmp_path, stock).thresholds == (0.5, 1.0)
    negative = with_keys(hostile.model(split=True), {key: (F32, [-0.5, 0.0])})
    assert read(tmp_path, negative).thresholds == (-0.5, 0.0), "fatrelu may keep neurons a ReLU would not"
    magnitude = with_keys(hostile.model(), {"hotcold.ffn.activation": (STRING, "silu"), key: (F32, [-0.5, 0.0])})
    with pytest.raises(GGUFError, match=f"{key}.*found -0.5"):
        read(tmp_path, magnitude)
