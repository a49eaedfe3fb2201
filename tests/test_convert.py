"""convert/main.py: the command as a whole - plans of every family, errors, files that are complete or not there."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import convert_error, run_convert
from tiny import CASES

from hotcold.convert import writer
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.weights import load_weights

Get = Callable[..., Path]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stock", [False, True], ids=["split", "stock"])
def test_the_runtime_accepts_every_family(case: str, stock: bool, tiny_model: Get) -> None:
    with open_gguf(tiny_model(case, stock=stock)) as f:
        config = ModelConfig.from_gguf(f)
        assert config.layout == ("stock" if stock else "neuron-split")
        load_weights(f, config)


ACTIVATIONS = {"relu": "relu", "prosparse": "fatrelu", "minicpm-s": "fatrelu", "bamboo": "drelu", "opt": "relu",
               "arcee": "relu2", "llama": "silu", "qwen3": "silu"}  # fmt: skip


@pytest.mark.parametrize("stock", [False, True], ids=["split", "stock"])
@pytest.mark.parametrize("case", ACTIVATIONS)
def test_activation_and_threshold_survive(case: str, stock: bool, tiny_model: Get) -> None:
    with open_gguf(tiny_model(case, stock=stock)) as f:
        assert f.get("hotcold.ffn.activation", "absent") == (
            ACTIVATIONS[case] if not stock or case in ("relu", "prosparse", "minicpm-s", "bamboo") else "absent")
        t = {"prosparse": 0.01, "minicpm-s": 0.03}.get(case)
        if t:
            np.testing.assert_allclose(f.metadata["hotcold.ffn.threshold"], t, rtol=1e-6)


def test_plan_of_a_gated_layer(tiny_model: Get) -> None:
    with open_gguf(tiny_model("llama-bias")) as f:
        n_ff, n_embd = 176, 64
        got = {n.removeprefix("blk.1."): t.shape for n, t in f.tensors.items() if n.startswith("blk.1.")}
        assert {k: v for k, v in got.items() if "ffn" in k} == {
            "ffn_norm.weight": (n_embd,), "ffn_gate.weight": (n_ff, n_embd), "ffn_up_down.weight": (2 * n_ff, n_embd),
            "ffn_neuron_id": (n_ff,), "ffn_gate.bias": (n_ff,), "ffn_up.bias": (n_ff,), "ffn_down.bias": (n_embd,),
        }  # fmt: skip
        np.testing.assert_array_equal(f.data("blk.1.ffn_neuron_id"), np.arange(n_ff))
        assert f.metadata["hotcold.version"] == 1
        assert f.metadata["hotcold.ffn.neurons"].tolist() == [n_ff] * 3


def test_plan_of_a_layer_without_gate(tiny_model: Get) -> None:
    with open_gguf(tiny_model("opt")) as f:
        got = {n.removeprefix("blk.2."): t.shape for n, t in f.tensors.items() if n.startswith("blk.2.ffn")}
        assert got == {"ffn_norm.weight": (64,), "ffn_norm.bias": (64,), "ffn_up.weight": (200, 64), "ffn_neuron_id":
                       (200,), "ffn_down_t.weight": (200, 64), "ffn_up.bias": (200,), "ffn_down.bias": (64,)}
        assert f.tensors["position_embd.weight"].shape == (512, 64)  # the two padding rows are gone


def test_up_rows_and_down_columns_are_bundled(tiny_model: Get, tiny_checkpoint: Get) -> None:
    from hotcold.convert.checkpoint import open_checkpoint
    from hotcold.convert.precision import Report

    ckpt = open_checkpoint(tiny_checkpoint("llama-ff1003"), Report())
    up, down = (ckpt.tensor(f"model.layers.2.mlp.{p}_proj.weight") for p in ("up", "down"))
    with open_gguf(tiny_model("llama-ff1003")) as f:
        both = f.data("blk.2.ffn_up_down.weight")
        np.testing.assert_array_equal(both[0::2], up.read(0, 1003))
        np.testing.assert_array_equal(both[1::2], down.read(0, 96).T)


@pytest.mark.parametrize(("case", "heads"), [("llama-gqa-32-4", 32), ("llama-gqa-64-8", 64), ("llama-bias", 4)])
def test_rotation_order_uses_the_right_head_counts(
    case: str, heads: int, tiny_model: Get, tiny_checkpoint: Get
) -> None:
    """Row 2i of a head is row i of the checkpoint's, row 2i+1 its row i + d/2: for q by n_head, for k by n_head_kv."""
    from hotcold.convert.checkpoint import open_checkpoint
    from hotcold.convert.precision import Report

    kv = CASES[case]["num_key_value_heads"]
    ckpt = open_checkpoint(tiny_checkpoint(case), Report())
    with open_gguf(tiny_model(case)) as f:
        for part, n in (("q", heads), ("k", kv)):
            for kind in ("weight", "bias") if case == "llama-bias" else ("weight",):
                hf = ckpt.tensor(f"model.layers.1.self_attn.{part}_proj.{kind}")
                want, got = hf.read(0, hf.n_rows), f.data(f"blk.1.attn_{part}.{kind}")
                d = len(want) // n
                for h in (0, n - 1):
                    np.testing.assert_array_equal(got[h * d:h * d + d:2], want[h * d:h * d + d // 2])
                    np.testing.assert_array_equal(got[h * d + 1:h * d + d:2], want[h * d + d // 2:h * d + d])


def test_qwen_rows_are_not_permuted(tiny_model: Get, tiny_checkpoint: Get) -> None:
    from hotcold.convert.checkpoint import open_checkpoint
    from hotcold.convert.precision import Report

    hf = open_checkpoint(tiny_checkpoint("qwen2"), Report()).tensor("model.layers.0.self_attn.q_proj.weight")
    with open_gguf(tiny_model("qwen2")) as f:
        np.testing.assert_array_equal(f.data("blk.0.attn_q.weight"), hf.read(0, hf.n_rows))


@pytest.mark.parametrize(("overrides", "stored"), [
    (dict(tie_word_embeddings=True), False), (dict(tie_word_embeddings=True, keep_lm_head=True), False),
    (dict(tie_word_embeddings=False), True),
])  # fmt: skip
def test_tied_embeddings(overrides: dict[str, Any], stored: bool, tiny_model: Get) -> None:
    with open_gguf(tiny_model("llama", **overrides)) as f:
        assert ("output.weight" in f.tensors) == stored


def test_head_kept_when_it_differs_from_a_tied_embedding(
    tiny_checkpoint: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = edited(tiny_checkpoint("llama"), tmp_path, tie_word_embeddings=True)  # lm_head of the untied case stays
    run_convert(folder, "-o", tmp_path / "o.gguf")
    with open_gguf(tmp_path / "o.gguf") as f:
        assert "output.weight" in f.tensors
    assert "differs from the embedding: both are kept" in capsys.readouterr().err.replace("\n", " ")


def test_missing_head(tiny_checkpoint: Get, tmp_path: Path) -> None:
    folder = edited(tiny_checkpoint("llama-tied"), tmp_path, tie_word_embeddings=False)
    assert "tensor lm_head.weight is missing and tie_word_embeddings is false" in convert_error(folder)


def edited(checkpoint: Path, tmp_path: Path, remove: tuple[str, ...] = (), **keys: Any) -> Path:
    """A copy of a checkpoint with keys of config.json changed."""
    import json

    folder = tmp_path / "edited"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text()) | keys
    for key in remove:
        del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


QUANT = {"quant_method": "gptq", "bits": 4}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "architecture": ("llama", dict(architectures=["GPT9ForCausalLM"]),
                     "architecture GPT9ForCausalLM: supported are ArceeForCausalLM, BambooForCausalLM"),
    "no-architecture": ("llama", dict(architectures=None), "architecture missing: supported are"),
    "key": ("llama", dict(attention_softcap=30.0), "keys not known for LlamaForCausalLM.*attention_softcap = 30.0"),
    "activation": ("llama", dict(hidden_act="xielu"), "hidden_act 'xielu': supported .* silu, relu, fatrelu"),
    "prosparse-silu": ("prosparse", dict(hidden_act="silu"), "hidden_act 'silu': supported .* relu, fatrelu"),
    "threshold": ("prosparse", dict(hidden_act_param=None), "hidden_act_param is missing"),
    "threshold-of-relu": ("relu", dict(hidden_act_param=0.5), "only fatrelu has a threshold"),
    "rope": ("llama", dict(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}),
             "type 'longrope': supported are default, linear, llama3, yarn"),
    "rope-dynamic": ("llama", dict(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "type 'dynamic'"),
    "rope-key": ("rope-linear", dict(rope_parameters={"rope_type": "linear", "factor": 2.0, "magic": 1}),
                 "keys that are not supported: magic"),
    "rope-factor": ("rope-linear", dict(rope_parameters={"rope_type": "linear"}), "lacks factor"),
    "rope-key-of-default": ("llama", dict(rope_parameters={"rope_theta": 1e4, "mrope_section": [4, 4]}),
                            "of type default has keys that are not supported: mrope_section"),
    "rope-factor-of-default": ("llama", dict(rope_parameters={"rope_theta": 1e4, "factor": 8.0}), "supported: factor"),
    "rope-twice": ("llama", dict(rope_scaling={"type": "linear", "factor": 2.0}),
                   "rope_parameters .*default.* and rope_scaling .*linear.* differ"),
    "theta-twice": ("llama", dict(rope_theta=5e5), "rope_theta is 500000.0 and, elsewhere, "),
    "rope-partial": ("llama", dict(partial_rotary_factor=0.5), "partial rotation"),
    "rope-nested": ("llama", dict(rope_parameters={"full_attention": {"rope_theta": 1e4},
                                                   "sliding_attention": {"rope_theta": 1e6}}),
                    "differs between kinds of layers"),
    "quantized": ("llama", dict(quantization_config=QUANT), "quantization_config .*GPTQ.*original checkpoint"),
    "encoder": ("llama", dict(is_encoder_decoder=True), "only decoders"),
    "heads": ("llama", dict(num_key_value_heads=3), "4 is not a multiple of num_key_value_heads 3"),
    "head-dim": ("llama", dict(head_dim=15), "head_dim is 15: allowed: an even number"),
    "layers": ("llama", dict(num_hidden_layers=-1), "num_hidden_layers is -1: allowed: an integer from 1"),
    "layers-text": ("llama", dict(num_hidden_layers="3"), "num_hidden_layers is '3'"),
    "too-few-layers": ("llama", dict(num_hidden_layers=2), "tensors that a llama model does not have: model.layers.2."),
    "too-many-layers": ("llama", dict(num_hidden_layers=4),
                        "tensor model.layers.3.input_layernorm.weight is missing"),
    "shape": ("llama", dict(intermediate_size=175), r"gate_proj.weight has shape \[176, 64\], .* asks for \[175, 64\]"),
    "eps": ("llama", dict(rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
    "bias": ("llama", dict(attention_bias=True), "q_proj.bias is missing, though attention_bias says it exists"),
    "window-in-llama": ("llama", dict(sliding_window=8), "this family's attention has no window"),
    "layer-types": ("qwen2", dict(layer_types=["sliding_attention"] * 3), "full_attention only"),
    "window-types": ("qwen2-window", dict(layer_types=["chunked"] * 4), "of full_attention, sliding_attention"),
    "scales": ("minicpm-s", dict(scale_emb=None), "scale_emb is missing"),
    "opt-350m": ("opt", dict(word_embed_proj_dim=32), "word_embed_proj_dim is '32'.*embeddings narrower"),
    "opt-post-norm": ("opt", dict(do_layer_norm_before=False), "do_layer_norm_before is 'False'.*norms after"),
    "opt-gelu": ("opt", dict(activation_function="gelu"), "activation_function is 'gelu'"),
    "arcee-silu": ("arcee", dict(hidden_act="silu"), "hidden_act 'silu': supported .* relu2"),
    "bamboo-silu": ("bamboo", dict(hidden_act="silu"), "hidden_act 'silu': supported .* relu, drelu"),
    "mrope": ("qwen2", dict(use_mrope=True), "multimodal rotation"),
    "layer-types-number": ("qwen2", dict(layer_types=7), "layer_types is 7: allowed: full_attention only"),
    "eps-large": ("llama", dict(rms_norm_eps=9.0), "epsilon': found 9.0, allowed"),
    "theta-f32": ("llama", dict(rope_parameters={"rope_theta": 1e300}), "freq_base: 1e[+]300 does not fit FLOAT32"),
    "theta-int": ("llama", dict(rope_parameters={"rope_theta": 10**400}), "rope_theta is 1000"),
    "llama3-factor": ("rope-llama3", dict(rope_parameters={
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 1e300, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}), "its frequencies are not finite"),
    "original-context": ("rope-yarn", dict(rope_parameters={
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2**40}), "does not fit UINT32"),
    "vocab": ("llama", dict(vocab_size=100), r"embed_tokens.weight has shape \[288, 64\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused_by_name(case: str, tiny_checkpoint: Get, tmp_path: Path) -> None:
    base, keys, text = REFUSED[case]
    error = convert_error(edited(tiny_checkpoint(base), tmp_path, **keys), "-o", tmp_path / "o.gguf")
    assert re.search(text, error), error
    assert not (tmp_path / "o.gguf").exists()


def test_unknown_keys_can_be_ignored_and_are_listed(
    tiny_checkpoint: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = edited(tiny_checkpoint("llama"), tmp_path, my_note="x", null_thing=None, unsloth_version="1")
    run_convert(folder, "-o", tmp_path / "o.gguf", "--ignore-unknown-keys")
    err = capsys.readouterr().err
    assert "my_note = x" in err and "null_thing" not in err and "unsloth" not in err


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    from tiny import checkpoint_config, checkpoint_tensors, write_checkpoint, write_safetensors

    folder = write_checkpoint(tmp_path / "c", "llama")
    tensors = dict(checkpoint_tensors(*checkpoint_config("llama"))) | {"model.extra.weight": np.ones(3, np.float32)}
    write_safetensors(folder / "model.safetensors", tensors)
    assert "1 tensors that a llama model does not have: model.extra.weight" in convert_error(folder)


def test_harmless_tensors_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tiny import checkpoint_config, checkpoint_tensors, write_checkpoint, write_safetensors

    folder = write_checkpoint(tmp_path / "c", "llama")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors = dict(checkpoint_tensors(*checkpoint_config("llama"))) | {name: np.ones(8, np.float32)}
    write_safetensors(folder / "model.safetensors", tensors)
    run_convert(folder, "-o", tmp_path / "o.gguf", "--verbose")
    assert f"{name}, left out" in capsys.readouterr().out


def test_windows(tiny_model: Get) -> None:
    def window(case: str, **overrides: Any) -> tuple[int, ...]:
        with open_gguf(tiny_model(case, **overrides)) as f:
            return ModelConfig.from_gguf(f).window

    assert window("mistral-window8") == (8, 8, 8)
    assert window("mistral") == (0, 0, 0)
    assert window("qwen2") == (0, 0, 0)  # sliding_window 4096 is there, use_sliding_window is false
    assert window("qwen2-window") == (0, 0, 8, 8)
    assert window("qwen2-window", dialect=4) == (0, 0, 8, 8)  # without layer_types


def test_windows_of_qwen_where_config_json_says_nothing(tiny_checkpoint: Get, tmp_path: Path) -> None:
    """As transformers has it: 4096 tokens, from layer 28 on."""
    folder = edited(tiny_checkpoint("qwen2-window", num_hidden_layers=30), tmp_path,
                    remove=("sliding_window", "max_window_layers", "layer_types"))
    run_convert(folder, "-o", tmp_path / "o.gguf")
    with open_gguf(tmp_path / "o.gguf") as f:
        assert ModelConfig.from_gguf(f).window == (0,) * 28 + (4096,) * 2


def test_a_window_of_null_is_none(tiny_checkpoint: Get, tmp_path: Path) -> None:
    folder = edited(tiny_checkpoint("qwen2-window"), tmp_path, remove=("layer_types",), sliding_window=None)
    run_convert(folder, "-o", tmp_path / "o.gguf")
    with open_gguf(tmp_path / "o.gguf") as f:
        assert ModelConfig.from_gguf(f).window == (0, 0, 0, 0)


def test_rope_said_twice_alike(tiny_checkpoint: Get, tmp_path: Path) -> None:
    folder = edited(tiny_checkpoint("rope-linear"), tmp_path, rope_theta=5000.0,
                    rope_scaling={"type": "linear", "factor": 2.5})
    run_convert(folder, "-o", tmp_path / "o.gguf")
    with open_gguf(tmp_path / "o.gguf") as f:
        rope = ModelConfig.from_gguf(f).rope
        assert rope is not None and (rope.scaling, rope.factor, rope.freq_base) == ("linear", 2.5, 5000.0)


def test_mistral_without_the_key_has_the_default_window(tiny_checkpoint: Get, tmp_path: Path) -> None:
    folder = edited(tiny_checkpoint("mistral"), tmp_path, remove=("sliding_window",))
    run_convert(folder, "-o", tmp_path / "o.gguf")
    with open_gguf(tmp_path / "o.gguf") as f:
        assert f.metadata["llama.attention.sliding_window"] == 4096


def test_rope_scaling(tiny_model: Get) -> None:
    with open_gguf(tiny_model("rope-yarn-tuned")) as f:
        rope = ModelConfig.from_gguf(f).rope
        assert rope is not None
        assert (rope.scaling, rope.factor, rope.orig_ctx) == ("yarn", 4.0, 128)
        assert (rope.beta_fast, rope.beta_slow) == (16.0, 2.0)
        # The runtime multiplies by 1 + 0.1 ln 4 as well: together attention_factor 1.3.
        assert rope.attn_factor * (1 + 0.1 * np.log(4)) == pytest.approx(1.3, rel=1e-6)
    with open_gguf(tiny_model("rope-llama3")) as f:
        factors = f.data("rope_freqs.weight")
        assert factors.shape == (16,) and factors[0] == 1 and factors[-1] == 8 and len(set(factors)) > 2


def test_dry_run_writes_nothing(tiny_checkpoint: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_convert(tiny_checkpoint("llama"), "-o", tmp_path / "o.gguf", "--dry-run", "--verbose")
    assert list(tmp_path.iterdir()) == []
    out, err = capsys.readouterr()
    assert "blk.0.ffn_up_down.weight, F32 --> F16, shape = {64, 352}" in out
    assert "dry run: nothing written" in err


def test_summary_without_verbose(tiny_checkpoint: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_convert(tiny_checkpoint("prosparse"), "-o", tmp_path / "o.gguf")
    out, err = capsys.readouterr()
    assert out == ""
    assert "architecture llama" in err and "fatrelu, threshold 0.01" in err and "auto: the checkpoint is F32" in err


def test_existing_output_needs_force(tiny_checkpoint: Get, tmp_path: Path) -> None:
    out = tmp_path / "o.gguf"
    out.write_bytes(b"precious")
    assert "exists already: use --force" in convert_error(tiny_checkpoint("llama"), "-o", out)
    assert out.read_bytes() == b"precious"
    run_convert(tiny_checkpoint("llama"), "-o", out, "--force")
    assert out.read_bytes()[:4] == b"GGUF"


def test_source_is_never_the_output(tiny_model: Get, tmp_path: Path) -> None:
    src = tmp_path / "m.gguf"
    shutil.copy(tiny_model("llama", stock=True), src)
    before = src.read_bytes()
    link = tmp_path / "link.gguf"
    link.symlink_to(src)
    for out in (src, link, tmp_path / "." / "m.gguf"):
        assert "is the source" in convert_error(src, "-o", out, "--force")
    assert src.read_bytes() == before


@pytest.mark.parametrize(("arguments", "text"), [
    (["nothing-there"], "no such file or folder"),
    (["{ckpt}", "-o", "{tmp}"], "is a folder: give a file name"),
    (["{ckpt}", "-o", "{tmp}/no/such/o.gguf"], "no such folder"),
    (["{split}"], "is neuron-split already"),
    (["{ckpt}", "--relu-as-silu", "8"], "needs --to-stock"),
])  # fmt: skip
def test_wrong_arguments(
    arguments: list[str], text: str, tiny_checkpoint: Get, tiny_model: Get, tmp_path: Path
) -> None:
    values = dict(ckpt=tiny_checkpoint("llama"), split=tiny_model("llama"), tmp=tmp_path)
    assert text in convert_error(*(a.format(**values) for a in arguments))


def test_default_names(tiny_checkpoint: Get, tiny_model: Get, tmp_path: Path) -> None:
    folder = tmp_path / "MyModel"
    shutil.copytree(tiny_checkpoint("llama"), folder)
    run_convert(folder, "--outtype", "q8_0")
    assert (folder / "MyModel-Q8_0.hotcold.gguf").is_file()
    src = tmp_path / "m.Q8_0.gguf"
    shutil.copy(tiny_model("llama", stock=True), src)
    run_convert(src)
    run_convert(tmp_path / "m.Q8_0.hotcold.gguf", "--to-stock")
    assert (tmp_path / "m.Q8_0.stock.gguf").is_file()
    run_convert(src, "-o", tmp_path / "x-{ftype}.gguf", "--outtype", "f16")
    assert (tmp_path / "x-F16.gguf").is_file()


def test_too_little_space(tiny_checkpoint: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)  # type: ignore[attr-defined]
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: usage)
    assert "GB needed, 0.00 GB free" in convert_error(tiny_checkpoint("llama"), "-o", tmp_path / "o.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), OSError(5, "I/O"), KeyboardInterrupt()])
def test_a_failed_write_leaves_nothing(
    failure: BaseException, tiny_checkpoint: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: Any, t: Any, *rest: Any) -> int:
        if t.name == "blk.1.attn_norm.weight":
            raise failure
        return written(file, t, *rest)

    written = writer._write_tensor
    monkeypatch.setattr(writer, "_write_tensor", fail)
    out = tmp_path / "o.gguf"
    out.write_bytes(b"old")
    expected = HotcoldError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        run_convert(tiny_checkpoint("llama"), "-o", out, "--force")
    assert [p.name for p in tmp_path.iterdir()] == ["o.gguf"] and out.read_bytes() == b"old"


SLOW = textwrap.dedent("""
    import sys, time
    from hotcold.convert import writer
    from hotcold.runtime.cli import main
    original = writer._write_tensor
    def slow(file, t, *rest):
        n = original(file, t, *rest)
        file.flush()
        if t.name == "blk.0.attn_norm.weight":
            print("writing", flush=True)
            time.sleep(60)
        return n
    writer._write_tensor = slow
    sys.exit(main(["convert", *sys.argv[1:]]))
""")


def interrupted(checkpoint: Path, out: Path, sig: signal.Signals) -> int:
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(checkpoint), "-o", str(out)], stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "writing"
    process.send_signal(sig)
    return process.wait(30)


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_conversion_cleans_up(sig: signal.Signals, tiny_checkpoint: Get, tmp_path: Path) -> None:
    assert interrupted(tiny_checkpoint("llama"), tmp_path / "o.gguf", sig) != 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_killed_conversion_leaves_no_model_and_the_next_run_tidies(tiny_checkpoint: Get, tmp_path: Path) -> None:
    out = tmp_path / "o.gguf"
    assert interrupted(tiny_checkpoint("llama"), out, signal.SIGKILL) == -signal.SIGKILL
    left = [p.name for p in tmp_path.iterdir()]
    assert len(left) == 1 and re.fullmatch(r"\.o\.gguf\.\d+\.part", left[0])
    run_convert(tiny_checkpoint("llama"), "-o", out)
    assert [p.name for p in tmp_path.iterdir()] == ["o.gguf"]


def test_leftovers_of_living_processes_stay(tiny_checkpoint: Get, tmp_path: Path) -> None:
    other = tmp_path / f".o.gguf.{os.getppid()}.part"
    other.write_bytes(b"x")
    run_convert(tiny_checkpoint("llama"), "-o", tmp_path / "o.gguf")
    assert other.exists()


def test_memory_stays_near_one_slab(tmp_path: Path) -> None:
    """Two matrices of 128 MB are converted in less than 120 MB more memory, mapped files included."""
    from tiny import checkpoint_config, checkpoint_tensors, write_checkpoint, write_safetensors

    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc")
    folder = write_checkpoint(tmp_path / "c", "llama", tokenizer="llama-bpe")
    config, options = checkpoint_config("llama")
    tensors = dict(checkpoint_tensors(config, options))
    big = np.zeros((1 << 19, 64), np.float32)  # 128 MB
    tensors["model.embed_tokens.weight"] = tensors["lm_head.weight"] = big
    write_safetensors(folder / "model.safetensors", tensors)
    folder = edited(folder, tmp_path, vocab_size=1 << 19)
    code = textwrap.dedent("""
        import argparse, re, sys, threading, time
        from pathlib import Path
        from hotcold.convert import main
        peak = 0
        def own():
            text = Path("/proc/self/status").read_text()
            return int(re.search(r"VmRSS:\\s+(\\d+)", text)[1])
        def watch():
            global peak
            while True:
                peak = max(peak, own())
                time.sleep(0.005)
        parser = argparse.ArgumentParser()
        main.add_arguments(parser)
        import hotcold.convert.families
        base = own()
        threading.Thread(target=watch, daemon=True).start()
        main.run(parser.parse_args(sys.argv[1:]))
        print((peak - base) // 1024)
    """)

    def peak(*arguments: str | Path) -> int:
        done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True,
                              check=True)
        return int(done.stdout)

    assert peak(folder, "-o", tmp_path / "o.gguf", "--no-vocab", "--to-stock", "--outtype", "f32") < 120
    assert peak(tmp_path / "o.gguf", "-o", tmp_path / "p.gguf", "--outtype", "f16") < 120
    for file in tmp_path.rglob("*.*"):  # not to be kept for the last three runs
        file.unlink()
