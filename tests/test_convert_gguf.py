"""convert/gguf_source.py, neuron_split.py, stock.py, outtype.py: GGUF in, GGUF out, and back again byte for byte."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from conftest import convert_error, run_convert

from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import dequantize, open_gguf
from hotcold.runtime.kernels import formats
from hotcold.runtime.weights import load_weights

Get = Callable[..., Path]
Q = gguf.GGMLQuantizationType
ROUND_TRIPS = ("llama-bias", "llama-ff1003", "llama-ff1000", "qwen3-tied", "prosparse", "bamboo", "opt-mixed", "arcee",
               "rope-llama3", "llama-12-layers")


def rewrite(src: Path, out: Path, change: Callable[[dict[str, Any], dict[str, tuple[np.ndarray, Q]]], None]) -> Path:
    """Copy a GGUF after `change(metadata, tensors)`; tensors: name -> (array in own form, type)."""
    with open_gguf(src) as f:
        kinds = dict(f.types)
        metadata = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in f.metadata.items()}
        tensors = {n: (f.data(n).copy(), Q(t.ggml_type)) for n, t in f.tensors.items()}
        shapes = {n: t.shape for n, t in f.tensors.items()}
    change(metadata, tensors)
    arch = metadata.pop("general.architecture")
    w = gguf.GGUFWriter(out, arch)
    for key, value in metadata.items():
        guess = gguf.GGUFValueType.get_type(value)
        if guess == gguf.GGUFValueType.INT32:
            guess = gguf.GGUFValueType.UINT32
        w.add_key_value(key, value, *kinds.get(key, (guess, None)))
    for name, (array, qtype) in tensors.items():
        shape = shapes.get(name, array.shape)
        shape = array.shape if array.dtype != np.uint8 else (*array.shape[:-1], shape[-1])
        w.add_tensor_info(name, shape, np.dtype(np.float32), array.nbytes, raw_dtype=qtype)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    for array, _ in tensors.values():
        w.write_tensor_data(array)
    w.close()
    return out


def quantize_weights(qtype: Q) -> Callable[[dict[str, Any], dict[str, tuple[np.ndarray, Q]]], None]:
    """A change for `rewrite`: F32 matrices whose rows divide into blocks become `qtype`, as in a stock file."""

    def change(metadata: dict[str, Any], tensors: dict[str, tuple[np.ndarray, Q]]) -> None:
        block = gguf.GGML_QUANT_SIZES[qtype][0]
        for name, (array, old) in tensors.items():
            if array.ndim == 2 and old == Q.F32 and array.shape[1] % block == 0:
                tensors[name] = (gguf.quants.quantize(array, qtype), qtype)

    return change


def shuffle(metadata: dict[str, Any], tensors: dict[str, tuple[np.ndarray, Q]]) -> None:
    """What placement does: another order of neurons in every tensor of the layer, told by ffn_neuron_id."""
    rng = np.random.default_rng(1)
    for layer, n_ff in enumerate(metadata["hotcold.ffn.neurons"]):
        order = rng.permutation(n_ff)
        both = np.stack([2 * order, 2 * order + 1], 1).reshape(-1)
        for part in ("ffn_gate.weight", "ffn_gate.bias", "ffn_up.weight", "ffn_up.bias", "ffn_down_t.weight",
                     "ffn_up_down.weight"):  # fmt: skip
            name = f"blk.{layer}.{part}"
            if name in tensors:
                array, qtype = tensors[name]
                tensors[name] = (array[both if part == "ffn_up_down.weight" else order], qtype)
        tensors[f"blk.{layer}.ffn_neuron_id"] = (order.astype(np.int32), Q.I32)


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("case", ROUND_TRIPS)
def test_round_trip_is_byte_identical(
    case: str, outtype: str, tiny_model: Get, tiny_checkpoint: Get, tmp_path: Path
) -> None:
    """HF -> stock, and HF -> neuron-split -> stock: the same file. And stock -> neuron-split -> stock."""
    direct = tmp_path / "direct.gguf"
    run_convert(tiny_checkpoint(case), "--to-stock", "-o", direct, "--outtype", outtype)
    assert tiny_model(case, outtype, stock=True).read_bytes() == direct.read_bytes()
    run_convert(direct, "-o", tmp_path / "split.gguf")
    assert (tmp_path / "split.gguf").read_bytes() == tiny_model(case, outtype).read_bytes()
    run_convert(tmp_path / "split.gguf", "--to-stock", "-o", tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == direct.read_bytes()


@pytest.mark.parametrize("case", ["llama-bias", "llama-ff1003", "opt-mixed", "bamboo"])
def test_shuffled_neurons_are_put_back(case: str, tiny_model: Get, tmp_path: Path) -> None:
    shuffled = rewrite(tiny_model(case), tmp_path / "s.gguf", shuffle)
    assert shuffled.read_bytes() != tiny_model(case).read_bytes()
    run_convert(shuffled, "--to-stock", "-o", tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == tiny_model(case, stock=True).read_bytes()


@pytest.mark.parametrize("ids", [[0] * 176, list(range(1, 177)), [-1, *range(1, 176)]])
def test_neuron_table_must_be_a_permutation(ids: list[int], tiny_model: Get, tmp_path: Path) -> None:
    def change(metadata: Any, tensors: dict[str, tuple[np.ndarray, Q]]) -> None:
        tensors["blk.1.ffn_neuron_id"] = (np.array(ids, np.int32), Q.I32)

    bad = rewrite(tiny_model("llama"), tmp_path / "s.gguf", change)
    assert "blk.1.ffn_neuron_id: must be int32 and hold every neuron once" in convert_error(bad, "--to-stock")


@pytest.mark.parametrize("qtype", [Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0])
def test_auto_keeps_native_types_and_requantizes_the_rest(
    qtype: Q, tiny_model: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src = rewrite(tiny_model("llama-ff1000", stock=True), tmp_path / "s.gguf", quantize_weights(qtype))
    run_convert(src, "-o", tmp_path / "o.gguf")
    err = capsys.readouterr().err
    with open_gguf(src) as a, open_gguf(tmp_path / "o.gguf") as b:
        native = qtype in formats.NATIVE
        assert a.tensors["blk.0.ffn_down.weight"].ggml_type == Q.F32  # rows of 1000 do not divide into blocks
        for name in ("token_embd.weight", "blk.1.attn_q.weight", "blk.2.ffn_gate.weight"):
            if native:
                np.testing.assert_array_equal(a.data(name), b.data(name))
            else:
                assert b.tensors[name].ggml_type == Q.Q8_0
                want = gguf.quants.quantize(dequantize(a.data(name), qtype), Q.Q8_0)
                np.testing.assert_array_equal(b.data(name), want)
        assert b.tensors["blk.0.ffn_up_down.weight"].ggml_type == Q.Q8_0
        if qtype == Q.Q8_0:
            np.testing.assert_array_equal(a.data("blk.0.ffn_up.weight"), b.data("blk.0.ffn_up_down.weight")[0::2])
        load_weights(b, ModelConfig.from_gguf(b))
    assert "down columns are quantized again, as Q8_0: turning" in err
    assert ("tensors become Q8_0" in err) == (not native)


def test_a_quantized_down_matrix_is_turned_and_quantized_again(
    tiny_model: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """n_ff 1024: every matrix is quantized in the source; the error of the second time is measured and printed."""
    stock = tiny_model("llama", stock=True, intermediate_size=1024)
    src = rewrite(stock, tmp_path / "s.gguf", quantize_weights(Q.Q8_0))
    run_convert(src, "-o", tmp_path / "o.gguf", "--verbose")
    out, err = capsys.readouterr()
    error = 0.0
    square = 0.0
    with open_gguf(src) as a, open_gguf(tmp_path / "o.gguf") as b:
        for layer in range(3):
            down = dequantize(a.data(f"blk.{layer}.ffn_down.weight"), Q.Q8_0)
            got = b.data(f"blk.{layer}.ffn_up_down.weight")[1::2]
            np.testing.assert_array_equal(got, gguf.quants.quantize(np.ascontiguousarray(down.T), Q.Q8_0))
            error += float(((dequantize(got, Q.Q8_0) - down.T) ** 2).sum())
            square += float((down**2).sum())
    assert f"relative error {(error / square) ** 0.5:.5f} over 3 down matrices" in err
    assert "blk.0.ffn_up_down.weight, Q8_0 --> Q8_0, shape = {64, 2048}" in out


def test_layers_with_outliers_stay_f16(
    tiny_model: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One large weight would make its whole block coarse: that layer's bundle is F16, and the user is told."""

    def change(metadata: Any, tensors: dict[str, tuple[np.ndarray, Q]]) -> None:
        down, _ = tensors["blk.1.ffn_down.weight"]
        down[7, 70] = 40 * down.std()
        quantize_weights(Q.Q8_0)(metadata, tensors)

    stock = tiny_model("llama", stock=True, intermediate_size=1024)
    src = rewrite(stock, tmp_path / "s.gguf", change)
    run_convert(src, "-o", tmp_path / "o.gguf")
    err = " ".join(capsys.readouterr().err.split())
    assert "but F16 in layers 1, whose down matrices have outliers" in err
    assert "over 2 down matrices" in err
    with open_gguf(src) as a, open_gguf(tmp_path / "o.gguf") as b:
        types = [b.tensors[f"blk.{i}.ffn_up_down.weight"].ggml_type for i in range(3)]
        assert types == [Q.Q8_0, Q.F16, Q.Q8_0]
        down = dequantize(a.data("blk.1.ffn_down.weight"), Q.Q8_0).astype(np.float16)
        np.testing.assert_array_equal(b.data("blk.1.ffn_up_down.weight")[1::2], down.T)
    run_convert(src, "-o", tmp_path / "q.gguf", "--outtype", "q8_0")
    with open_gguf(tmp_path / "q.gguf") as f:
        assert f.tensors["blk.1.ffn_up_down.weight"].ggml_type == Q.Q8_0


@pytest.mark.parametrize("outtype", ["q8_0", "q4_0"])
def test_quantized_outtypes_equal_the_gguf_package(outtype: str, tiny_model: Get) -> None:
    qtype = {"q8_0": Q.Q8_0, "q4_0": Q.Q4_0}[outtype]
    with open_gguf(tiny_model("llama")) as a, open_gguf(tiny_model("llama", outtype)) as b:
        for name, info in a.tensors.items():
            got = b.tensors[name].ggml_type
            if len(info.shape) == 1:
                assert got == info.ggml_type
                np.testing.assert_array_equal(a.data(name), b.data(name))
                continue
            # 4 bits cost too much in the vocabulary's matrices.
            want = Q.Q8_0 if name in ("token_embd.weight", "output.weight") else qtype
            assert got == want, name
            np.testing.assert_array_equal(b.data(name), gguf.quants.quantize(a.data(name), want))


def test_rows_that_do_not_divide_become_f16(
    tiny_checkpoint: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_convert(tiny_checkpoint("llama-embd72"), "-o", tmp_path / "o.gguf", "--outtype", "q8_0")
    err = capsys.readouterr().err
    with open_gguf(tmp_path / "o.gguf") as f:
        assert {t.ggml_type for t in f.tensors.values() if len(t.shape) == 2} == {Q.F16}
    assert "attn_q.weight: F16 instead of Q8_0, as rows of 72 do not divide into blocks of 32" in err
    assert err.count("attn_q.weight") == 1  # once, not once per layer


@pytest.mark.parametrize(("case", "want"), [("llama", Q.F16), ("llama-f16", Q.F16), ("llama-bf16", Q.BF16)])
def test_auto_for_checkpoints(case: str, want: Q, tiny_model: Get) -> None:
    with open_gguf(tiny_model(case, "auto")) as f:
        assert {t.ggml_type for t in f.tensors.values() if len(t.shape) == 2} == {want}
        assert {t.ggml_type for n, t in f.tensors.items() if len(t.shape) == 1} == {Q.F32, Q.I32}
        assert f.metadata["general.file_type"] == {Q.F16: 1, Q.BF16: 32}[want]


def test_mixed_float_types_in_a_bundle_become_f32(tiny_model: Get, tmp_path: Path) -> None:
    def change(metadata: Any, tensors: dict[str, tuple[np.ndarray, Q]]) -> None:
        name = "blk.0.ffn_up.weight"
        tensors[name] = (tensors[name][0].astype(np.float16), Q.F16)

    src = rewrite(tiny_model("llama", stock=True), tmp_path / "s.gguf", change)
    run_convert(src, "-o", tmp_path / "o.gguf")
    with open_gguf(tmp_path / "o.gguf") as f:
        assert f.tensors["blk.0.ffn_up_down.weight"].ggml_type == Q.F32


def test_metadata_is_copied_with_its_types(tiny_model: Get, tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: Any) -> None:
        metadata.update({"my.float": 1.5, "my.flag": True, "my.text": "é", "my.floats": [1.5, 2.5], "split.count": 1})

    src = rewrite(tiny_model("llama", stock=True), tmp_path / "s.gguf", change)
    run_convert(src, "-o", tmp_path / "o.gguf")
    with open_gguf(src) as a, open_gguf(tmp_path / "o.gguf") as b:
        for key in a.metadata:
            if key == "split.count":
                assert key not in b.metadata
                continue
            assert a.types[key] == b.types[key], key
            np.testing.assert_array_equal(a.metadata[key], b.metadata[key], err_msg=key)


@pytest.mark.parametrize("k", [8, 9])
def test_relu_as_silu_scales_by_exact_powers_of_two(k: int, tiny_model: Get, tmp_path: Path) -> None:
    run_convert(tiny_model("relu-mixed"), "--to-stock", "--relu-as-silu", str(k), "-o", tmp_path / "o.gguf")
    up, down = 2.0 ** -(k // 2), 2.0 ** -(k - k // 2)
    assert 2.0**k * up * down == 1
    factors = {"ffn_gate.weight": 2.0**k, "ffn_gate.bias": 2.0**k, "ffn_up.weight": up, "ffn_up.bias": up,
               "ffn_down.weight": down}
    with open_gguf(tiny_model("relu-mixed", stock=True)) as a, open_gguf(tmp_path / "o.gguf") as b:
        assert a.tensors.keys() == b.tensors.keys()
        for name in a.tensors:
            factor = factors.get(name.split(".", 2)[-1], 1.0)
            np.testing.assert_array_equal(a.data(name) * np.float32(factor), b.data(name), err_msg=name)
        assert "hotcold.ffn.activation" not in b.metadata
        assert b.metadata["hotcold.relu_as_silu"] == k


@pytest.mark.parametrize(("case", "text"), [
    ("llama", "this one is silu"), ("prosparse", "this one is fatrelu, threshold 0.01"),
    ("bamboo", "this one is drelu"), ("opt", "this one is relu, not gated"), ("arcee", "this one is relu2, not gated"),
])  # fmt: skip
def test_relu_as_silu_is_for_gated_relu_only(case: str, text: str, tiny_model: Get, tmp_path: Path) -> None:
    error = convert_error(tiny_model(case), "--to-stock", "--relu-as-silu", "8", "-o", tmp_path / "o.gguf")
    assert text in error


@pytest.mark.parametrize("k", ["0", "15", "-3"])
def test_relu_as_silu_range(k: str, tiny_model: Get, tmp_path: Path) -> None:
    assert "allowed are 1 to 14" in convert_error(tiny_model("relu"), "--to-stock", "--relu-as-silu", k)


def test_relu_as_silu_overflow_is_refused(tiny_model: Get, tmp_path: Path) -> None:
    def change(metadata: Any, tensors: dict[str, tuple[np.ndarray, Q]]) -> None:
        tensors["blk.1.ffn_gate.weight"][0][3, 5] = 100.0

    src = rewrite(tiny_model("relu", "f16"), tmp_path / "s.gguf", change)
    error = convert_error(src, "--to-stock", "--relu-as-silu", "10", "-o", tmp_path / "o.gguf")
    assert re.search(r"blk.1.ffn_gate.weight: 1 of 64000 values do not fit F16 \(largest magnitude 102400", error)
    assert not (tmp_path / "o.gguf").exists()


def test_stock_files_that_llama_cpp_computes_differently_come_with_a_warning(
    tiny_model: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for case, warning in (("relu", "--relu-as-silu 10"), ("prosparse", "silu instead of fatrelu"),
                          ("opt", "no opt architecture"), ("mistral-window8", "differ after 8 tokens"),
                          ("rope-yarn-tuned", "ignores yarn_beta_fast and yarn_beta_slow"), ("rope-yarn", ""),
                          ("llama", ""), ("arcee", "")):
        run_convert(tiny_model(case), "--to-stock", "-o", tmp_path / f"{case}.gguf")
        err = " ".join(capsys.readouterr().err.split())
        assert ("warning" in err) == bool(warning) and warning in err


def test_activation_key_of_a_stock_source_is_honoured(tiny_model: Get, tmp_path: Path) -> None:
    run_convert(tiny_model("relu", stock=True), "-o", tmp_path / "o.gguf")
    with open_gguf(tmp_path / "o.gguf") as f:
        assert ModelConfig.from_gguf(f).activation == "relu"


def set_key(key: str, value: Any) -> Callable[..., None]:
    return lambda metadata, tensors: metadata.__setitem__(key, value)


def add_tensor(name: str, shape: tuple[int, ...] = (4, 64)) -> Callable[..., None]:
    return lambda metadata, tensors: tensors.__setitem__(name, (np.ones(shape, np.float32), Q.F32))


def drop_tensor(name: str) -> Callable[..., None]:
    return lambda metadata, tensors: tensors.pop(name)


REFUSED: dict[str, tuple[Callable[..., None], str]] = {
    "architecture": (set_key("general.architecture", "gemma7"), "architecture 'gemma7': supported are llama, qwen2"),
    "parts": (set_key("split.count", 3), "split.count.*merge them first"),
    "experts": (set_key("llama.expert_count", 8), "mixture of experts"),
    "expert-tensor": (add_tensor("blk.0.ffn_up_exps.weight"), "mixture of experts"),
    "fused": (add_tensor("blk.0.attn_qkv.weight"), "fused q/k/v"),
    "rope": (set_key("llama.rope.scaling.type", "longrope"), "rope scaling 'longrope': supported are none, linear"),
    "rope-factors": (add_tensor("blk.0.rope_factors_long.weight"), "rope scaling"),
    "unknown-tensor": (add_tensor("blk.0.attn_sinks.weight"), "does not know: blk.0.attn_sinks.weight"),
    "layer-beyond": (add_tensor("blk.3.ffn_norm.weight"), "found 3, allowed: the 4 layers"),
    "missing-up": (drop_tensor("blk.1.ffn_up.weight"), r"tensor blk.1.ffn_up.weight \[176, 64\] is missing"),
    "missing-gate": (drop_tensor("blk.1.ffn_gate.weight"), "ffn_gate tensors: found in 2 of 3 layers"),
    "missing-embedding": (drop_tensor("token_embd.weight"), "tensor 'token_embd.weight': found nothing"),
    "down-shape": (add_tensor("blk.1.ffn_down.weight", (64, 175)), r"shape \[64, 175\], expected \[64, 176\]"),
    "bias-shape": (add_tensor("blk.1.ffn_up.bias", (175,)), r"shape \[175\]"),
    "activation": (set_key("hotcold.ffn.activation", "xielu"), "found 'xielu', allowed: relu, relu2"),
    "version": (set_key("hotcold.version", 2), "hotcold.version is 2, this program knows 1"),
    "layers": (set_key("llama.block_count", 0), "block_count': found 0"),
    "layers-many": (set_key("llama.block_count", 10**9), "block_count': found 1000000000"),
    "thresholds": (set_key("hotcold.ffn.threshold", [0.5]), "found an array of 1, allowed: 3 numbers"),
    "softcapping": (set_key("llama.attn_logit_softcapping", 30.0), "attn_logit_softcapping': found 30.0, allowed: 0.0"),
    "residual-scale": (set_key("llama.residual_scale", 0.5), "residual_scale': found 0.5, allowed: 1"),
    "eps": (set_key("llama.attention.layer_norm_rms_epsilon", 9.0), "epsilon': found 9.0, allowed"),
    "norm-shape": (add_tensor("blk.1.attn_norm.weight", (63,)), r"shape \[63\], expected \[64\]"),
    "unknown-key": (set_key("llama.foo.bar", 7), r"llama.foo.bar = 7: .*--ignore-unknown-keys lists"),
    "unknown-text": (set_key("llama.hidden_act", "gelu"), "llama.hidden_act = 'gelu'"),
    "tokens": (set_key("tokenizer.ggml.tokens", [f"t{i}" for i in range(9)]), "the result could not be run: .*o.gguf"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(case: str, tiny_model: Get, tmp_path: Path) -> None:
    change, text = REFUSED[case]
    src = rewrite(tiny_model("llama", stock=True), tmp_path / "s.gguf", change)
    error = convert_error(src, "-o", tmp_path / "o.gguf")
    assert re.search(text, error), error


def test_unknown_keys_can_be_listed(tiny_model: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src = rewrite(tiny_model("llama", stock=True), tmp_path / "s.gguf", set_key("llama.foo.bar", 7))
    run_convert(src, "-o", tmp_path / "o.gguf", "--ignore-unknown-keys")
    assert "ignored keys not known for llama: llama.foo.bar = 7" in " ".join(capsys.readouterr().err.split())


def test_harmless_keys_pass(tiny_model: Get, tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: Any) -> None:
        metadata.update({f"llama.{key}": 1 for key in ("vocab_size", "expert_used_count")})
        metadata["llama.tensor_data_layout"] = "Meta AI original pth"

    run_convert(rewrite(tiny_model("llama", stock=True), tmp_path / "s.gguf", change), "-o", tmp_path / "o.gguf")


@pytest.mark.parametrize("stage", [True, False])
def test_a_result_that_does_not_open_is_not_kept(
    stage: bool, tiny_model: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At either check, before the data and after it."""

    def refuse(*args: Any) -> None:
        raise HotcoldError(f"{next(tmp_path.glob('.o.gguf.*'))}: broken")

    monkeypatch.setattr(f"hotcold.convert.writer.{'load_weights' if stage else 'Tokenizer.from_gguf'}", refuse)
    error = convert_error(tiny_model("llama", stock=True), "-o", tmp_path / "o.gguf")
    assert error == f"the result could not be run: {tmp_path / 'o.gguf'}: broken"
    assert not list(tmp_path.iterdir())


def test_rotation_frequencies_of_old_files_are_listed(
    tiny_model: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src = rewrite(tiny_model("llama", stock=True), tmp_path / "s.gguf", add_tensor("blk.0.attn_rot_embd.weight", (8,)))
    run_convert(src, "-o", tmp_path / "o.gguf", "--verbose")
    assert "blk.0.attn_rot_embd.weight, left out" in capsys.readouterr().out


def test_measure_requant_script(tiny_model: Get, tmp_path: Path) -> None:
    """The table of a model that is stored again: coarser types lose more; a refusal is one line."""
    script = Path(__file__).parent.parent / "scripts" / "measure_requant.py"
    text = tmp_path / "text.txt"
    text.write_text("the other one, tell them in the end an hour. " * 8)

    def run(model: Path, *more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), str(model), str(text), *more]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = run(tiny_model("llama-ff1000", stock=True), "--source-type", "q8_0")
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[4:]]
    kl = {(what, name): float(mean) for what, name, _, mean, *_ in rows}
    assert kl["down only", "q4_0"] > kl["down only", "q8_0"] > kl["down only", "f16"] >= 0
    assert kl["every matrix", "q4_0"] > kl["every matrix", "auto"] > 0
    done = run(tiny_model("llama-ff1000"))
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_name_option(tiny_model: Get, tmp_path: Path) -> None:
    run_convert(tiny_model("llama", stock=True), "-o", tmp_path / "o.gguf", "--name", "Mine")
    with open_gguf(tmp_path / "o.gguf") as f:
        assert f.metadata["general.name"] == "Mine"
