"""convert/relufy*.py: a tiny SiLU model from end to end; test_relufy_fit.py has the arithmetic."""

from __future__ import annotations

import argparse
import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from small_models import Reference, Spec, make_tensors, write_model

from hotcold.convert import relufy, relufy_fit, relufy_layers
from hotcold.convert.hf_config import ConfigReader
from hotcold.convert.relufy_layers import Relufier, Settings
from hotcold.convert.relufy_text import make_contexts
from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.corpus import HELDOUT, read_corpus
from hotcold.runtime.engine import Engine
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.kernels import formats
from hotcold.runtime.tokenizer import Tokenizer
from hotcold.runtime.trace import Trace

Get = Callable[..., Path]


def relufy_run(*arguments: Any) -> int:
    parser = argparse.ArgumentParser()
    relufy.add_arguments(parser)
    return relufy.run(parser.parse_args([str(a) for a in arguments]))


def relufy_error(*arguments: Any) -> str:
    with pytest.raises(HotcoldError) as e:
        relufy_run(*arguments)
    assert "\n" not in str(e.value)
    return str(e.value)


# ------------------------------------------------------------------ text


def test_contexts_depend_on_the_seed_only(tiny_model: Get) -> None:
    with open_gguf(tiny_model("llama")) as f:
        tokenizer = Tokenizer.from_gguf(f)
    text = read_corpus()
    first = make_contexts(text, tokenizer, 128, 1024, 2, 3, "the text")
    assert first.shape == (8, 128) and first.dtype == np.int32
    np.testing.assert_array_equal(first, make_contexts(text, tokenizer, 128, 1024, 2, 3, "the text"))
    assert not np.array_equal(first, make_contexts(text, tokenizer, 128, 1024, 2, 4, "the text"))
    if tokenizer.add_bos:
        assert (first[:, 0] == tokenizer.bos_id).all()


def test_bad_text(tmp_path: Path) -> None:
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    for path, said in ((tmp_path / "latin1.txt", "not UTF-8: byte 3 is 0xe9"), (tmp_path, "is a folder"),
                       (tmp_path / "none", "cannot be read"), (Path("a\0b"), "cannot be read")):
        with pytest.raises(HotcoldError, match=said):
            read_corpus([path])


def test_every_text_is_taken() -> None:
    parser = argparse.ArgumentParser()
    relufy.add_arguments(parser)
    args = parser.parse_args(["--text", "a", "--text", "b", "SRC", "-o", "x"])
    assert args.text == [Path("a"), Path("b")] and args.src == Path("SRC")
    assert parser.parse_args(["SRC", "-o", "x"]).text == []


# ------------------------------------------------------------------ a tiny model from end to end

@pytest.fixture(autouse=True, scope="module")
def little_text() -> Iterator[None]:
    """Less held-out text than users get: these models are tiny."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relufy, "HELD_OUT_TOKENS", 1024)
        yield


COMMON = ("--rank", 16, "--tokens", 4096, "-t", 1, "--sparsity", "0.5")


@pytest.fixture(scope="module")
def made(tiny_model: Get, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("relufy") / "relu.gguf"
    assert relufy_run(tiny_model("llama"), "-o", out, *COMMON) == 0
    return out


def logits(path: Path, sparsity: str, one_by_one: bool = False) -> np.ndarray:
    tokens = list(range(3, 43))
    with Engine.open(path, sparsity=sparsity, threads=1) as engine:
        if not one_by_one:
            return engine.forward(tokens, "all")
        return np.stack([engine.forward([t]) for t in tokens])


def test_the_result_is_an_ordinary_relu_model(made: Path, tiny_model: Get) -> None:
    with open_gguf(made) as f, open_gguf(tiny_model("llama")) as source:
        config = ModelConfig.from_gguf(f)
        assert (config.activation, config.gated, config.layout) == ("relu", True, "neuron-split")
        assert config.n_ff == (176 + 16,) * 3 and not any(config.thresholds)
        assert f.metadata["llama.feed_forward_length"] == 192
        assert f.metadata[schema.KEY_RELUFY_RANK] == 16 and f.metadata[schema.KEY_RELUFY_TOKENS] == 4096
        assert len(f.metadata[schema.KEY_RELUFY_ERROR]) == 3
        for name in source.tensors:  # what is not of the FFN stays, bit for bit; gate and up rows too
            if ".ffn_" not in name or "norm" in name:
                assert np.array_equal(f.data(name), source.data(name)), name
        np.testing.assert_array_equal(f.data("blk.1.ffn_up_down.weight")[:352:2],
                                      source.data("blk.1.ffn_up_down.weight")[::2])
        always_on = f.data("blk.1.ffn_gate.weight")[176:]
        assert (always_on == always_on[0]).all() and np.abs(always_on[0]).max() > 0
        moved = f.data("blk.1.ffn_gate.weight")[:176] - source.data("blk.1.ffn_gate.weight")  # along always_on
        assert np.linalg.matrix_rank(np.concatenate([moved, always_on]), tol=1e-4) == 1


def test_sparse_and_dense_agree(made: Path) -> None:
    dense = logits(made, "dense", one_by_one=True)
    np.testing.assert_array_equal(dense, logits(made, "exact", one_by_one=True))
    np.testing.assert_allclose(Reference(made).logits(list(range(3, 43)))[0], dense, atol=2e-2, rtol=1e-3)


def test_the_fit_is_nearer_to_the_source_than_relu_alone(made: Path, tiny_model: Get) -> None:
    """Whatever the table says: the file's own logits are."""
    wanted, got = logits(tiny_model("llama"), "dense"), logits(made, "dense")
    naive = logits(tiny_model("llama", hidden_act="relu"), "dense")
    assert np.square(got - wanted).mean() < 0.8 * np.square(naive - wanted).mean()


def test_the_same_seed_makes_the_same_file(made: Path, tiny_model: Get, tmp_path: Path) -> None:
    for seed, same in ((0, True), (1, False)):
        out = tmp_path / f"{seed}.gguf"
        relufy_run(tiny_model("llama"), "-o", out, *COMMON, "--seed", seed)
        assert (out.read_bytes() == made.read_bytes()) is same
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.gguf", "1.gguf"]  # nothing temporary stays


def test_the_table(tiny_model: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    relufy_run(tiny_model("llama"), "-o", tmp_path / "x.gguf", *COMMON)
    lines = capsys.readouterr().err.splitlines()
    rows = [line.split() for line in lines if line.strip()[:1].isdecimal()]
    assert [int(row[0]) for row in rows] == [0, 1, 2]
    for row in rows:
        assert 0 < float(row[2]) < float(row[1])
        assert 20 < float(row[4].rstrip("%")) < float(row[3].rstrip("%")) < 80
    assert any(line.startswith("held-out perplexity") for line in lines)


def test_a_wanted_sparsity(tiny_model: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.gguf"
    relufy_run(tiny_model("llama"), "-o", out, *COMMON, "--sparsity", "0.8")
    rows = [line.split() for line in capsys.readouterr().err.splitlines() if line.strip()[:1].isdecimal()]
    with open_gguf(out) as f:
        tokens = make_contexts(read_corpus([HELDOUT]), Tokenizer.from_gguf(f), 256, 256, 1, 0, "the text")[0]
    with Engine.open(out, sparsity="exact", threads=1) as engine:
        assert engine.config.activation == "relu"
        for token in tokens:
            engine.forward([token])
        computed = engine.layer_stats().computed * 192 - 16  # the always-on ones always are
    np.testing.assert_allclose(computed / 176, 0.2, atol=0.1)
    np.testing.assert_allclose([float(row[3].rstrip("%")) for row in rows], 80, atol=4)
    assert sum(float(row[3].rstrip("%")) for row in rows) / 3 == pytest.approx(80, abs=2)


def test_rank_0_only_fits_the_down_columns(tiny_model: Get, tmp_path: Path) -> None:
    out = tmp_path / "x.gguf"
    relufy_run(tiny_model("llama"), "-o", out, *COMMON, "--rank", 0)
    with open_gguf(out) as f:
        assert ModelConfig.from_gguf(f).n_ff == (176,) * 3
    wanted, naive = logits(tiny_model("llama"), "dense"), logits(tiny_model("llama", hidden_act="relu"), "dense")
    assert np.square(logits(out, "dense") - wanted).mean() < np.square(naive - wanted).mean()


@pytest.mark.parametrize("case, options", [
    ("llama-bias", {}), ("qwen3", {}), ("mistral", {}), ("llama", {"stock": True}), ("llama", {"outtype": "q8_0"})])
def test_other_sources(case: str, options: dict[str, Any], tiny_model: Get, tmp_path: Path) -> None:
    out = tmp_path / "x.gguf"
    relufy_run(tiny_model(case, **options), "-o", out, *COMMON)
    wanted, got = logits(tiny_model(case, **options), "dense"), logits(out, "dense")
    naive = logits(tiny_model(case, hidden_act="relu"), "dense")
    assert np.square(got - wanted).mean() < 0.9 * np.square(naive - wanted).mean()


@pytest.mark.parametrize("outtype", ["f16", "q8_0", "auto"])
def test_a_sorted_source_gives_the_same_model(outtype: str, tmp_path: Path) -> None:
    """small_models writes shuffled neurons: the same weights in stock order, and a GELU, end in the same numbers."""
    found = []
    for layout in ("neuron-split", "stock"):
        spec = Spec(layout=layout, activation="gelu", biases=True, n_ff=(96, 64), n_ctx=256)
        source = write_model(tmp_path / f"{layout}.gguf", spec)
        fits, trace, model = fit_tokens(source, tmp_path)
        report = relufy.Report()
        new = relufy.relufied(model, fits, relufy._orders(trace), report)
        target = relufy.split_neurons(new, outtype, report)
        out = tmp_path / f"{layout}-{outtype}.gguf"
        relufy.write_target(target, out, lambda name, n: None, model.release, True)
        trace.close()
        with open_gguf(out) as f:
            assert ModelConfig.from_gguf(f).n_ff == (96 + 8, 64 + 8)
            kind = f.tensors["blk.0.ffn_up_down.weight"].ggml_type
            assert kind == {"f16": Type.F16, "q8_0": Type.Q8_0, "auto": Type.F32}[outtype]
        found.append(logits(out, "dense"))
    np.testing.assert_allclose(found[0], found[1], atol=0.02 if outtype == "auto" else 0.2)


def fit_tokens(source: Path, folder: Path) -> tuple[Any, Trace, Any]:
    """A model without vocabulary, fitted on random tokens."""
    trace = Trace.open(source, threads=1, n_ctx=128)
    model = relufy.load_gguf(open_gguf(source), relufy.Report())
    contexts = np.random.default_rng(0).integers(0, 101, (20, 128)).astype(np.int32)
    relufier = Relufier(trace, contexts, 4, Settings(8, None))
    fits = relufy.Fits(folder, trace.config.n_ff, trace.config.n_embd, 8)
    for layer in range(trace.config.n_layer):
        fits[layer], report = relufier.layer(layer)
        assert report.error < report.naive and report.always_on > 0.95
    return fits, trace, model


def test_half_precision_stays_half_precision(tiny_model: Get, tmp_path: Path) -> None:
    for outtype, kind in (("f16", Type.F16), ("bf16", Type.BF16)):
        relufy_run(tiny_model("llama", outtype), "-o", tmp_path / outtype, *COMMON)
        with open_gguf(tmp_path / outtype) as f:
            assert {t.ggml_type for n, t in f.tensors.items() if "ffn_gate" in n or "up_down" in n} == {kind}


@pytest.mark.parametrize("runs", [True, False])
def test_quantized_sources(runs: bool, tiny_model: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A type that the runtime does not compute is converted to a temporary file first, which goes again.

    Either way the gate, whose rows change, is not quantized in 4 bits a second time.
    """
    if not runs:
        monkeypatch.setattr(formats, "NATIVE", tuple(t for t in formats.NATIVE if t != Type.Q4_1))
    source = tmp_path / "q4_1.gguf"
    spec = Spec(layout="stock", activation="silu", attn=Type.F32, key=Type.Q4_1, value=Type.Q4_1)
    with open_gguf(tiny_model("llama", stock=True)) as f:
        write_with_vocabulary(source, f, spec)
    relufy_run(source, "-o", tmp_path / "out.gguf", "--rank", 8, "--tokens", 2048, "-t", 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.gguf", "q4_1.gguf"]
    with open_gguf(tmp_path / "out.gguf") as f:
        assert f.tensors["blk.0.ffn_gate.weight"].ggml_type == Type.Q8_0
        assert ModelConfig.from_gguf(f).activation == "relu"


def write_with_vocabulary(path: Path, f: Any, spec: Spec) -> None:
    """A small model with the vocabulary of the open GGUF `f`, written as a neighbour of `path` would be."""
    import gguf

    n_vocab = f.length("tokenizer.ggml.tokens")
    spec = Spec(**{**spec.__dict__, "n_vocab": n_vocab, "n_ctx": 512})
    writer = gguf.GGUFWriter(path, "llama")
    for key in f.metadata:
        kind, element = f.types[key]
        if key.startswith("tokenizer."):
            value = f.metadata[key]
            writer.add_key_value(key, value.tolist() if isinstance(value, np.ndarray) else value, kind, element)
    for key, value in {"block_count": 2, "context_length": 512, "embedding_length": 64, "feed_forward_length": 96,
                       "attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 16}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for name, (kind, values) in make_tensors(spec).items():
        if kind == Type.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ------------------------------------------------------------------ Hugging Face folders


@pytest.mark.parametrize("case, options", [("llama", {}), ("llama-bias", {}), ("llama-bf16", {}), ("llama-f16", {}),
                                           ("qwen2", {})])
def test_a_folder_comes_back_as_a_folder(case: str, options: dict[str, Any], tiny_checkpoint: Get, tmp_path: Path,
                                         ) -> None:
    from conftest import run_convert

    source = tiny_checkpoint(case, **options)
    folder, own, direct = tmp_path / "hf", tmp_path / "own.gguf", tmp_path / "direct.gguf"
    relufy_run(source, "-o", folder, "--to-hf", *COMMON)
    config = json.loads((folder / "config.json").read_text())
    before = json.loads((source / "config.json").read_text())
    mark = config.pop("hotcold_relufy")
    assert config == before | {"hidden_act": "relu", "intermediate_size": 176 + 16}
    run_convert(folder, "-o", own, "--outtype", "f32")
    relufy_run(source, "-o", direct, "--outtype", "f32", *COMMON)
    with open_gguf(own) as f, open_gguf(direct) as g:
        for key in (schema.KEY_RELUFY_RANK, schema.KEY_RELUFY_TOKENS):
            assert f.metadata[key] == g.metadata[key] == mark[key.rsplit(".", 1)[1]]
        np.testing.assert_array_equal(f.metadata[schema.KEY_RELUFY_ERROR], np.float32(mark["error"]))
        np.testing.assert_allclose(f.metadata[schema.KEY_RELUFY_ERROR], g.metadata[schema.KEY_RELUFY_ERROR], rtol=0.01)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["direct.gguf", "hf", "own.gguf"]
    np.testing.assert_allclose(logits(own, "dense"), logits(direct, "dense"), atol=1e-5 if case == "llama" else 0.3)
    np.testing.assert_array_equal(logits(own, "exact", True), logits(own, "dense", True))


@pytest.mark.parametrize("mark", [
    7, {}, {"rank": -1, "tokens": 5, "error": [0.1] * 3}, {"rank": 4, "tokens": 5, "error": [0.1] * 2},
    {"rank": True, "tokens": 5, "error": [0.1] * 3}, {"rank": 4, "tokens": 5, "error": [0.1, float("nan"), 0.1]}])
def test_a_damaged_mark_is_refused(mark: Any) -> None:
    with pytest.raises(HotcoldError, match=r"config\.json: hotcold_relufy is .*: allowed: rank, tokens and error"):
        ConfigReader({"hotcold_relufy": mark}).relufied(3)
    assert ConfigReader({}).relufied(3) == {}


# ------------------------------------------------------------------ what is refused


def test_models_that_cannot_be(tiny_model: Get, tmp_path: Path) -> None:
    out = tmp_path / "x.gguf"
    assert "no gate" in relufy_error(tiny_model("opt"), "-o", out)
    assert "activation is relu already" in relufy_error(tiny_model("relu"), "-o", out)
    assert "activation is fatrelu already" in relufy_error(tiny_model("prosparse"), "-o", out)
    assert "--rank 65: allowed are 0 to 64" in relufy_error(tiny_model("llama"), "-o", out, "--rank", 65)
    assert "No such file" in relufy_error(tmp_path / "none.gguf", "-o", out)
    assert not list(tmp_path.iterdir())


def test_texts_that_are_too_short(tiny_model: Get, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a few words")
    out, text = tmp_path / "x.gguf", tmp_path / "short.txt"
    for option in ("--text", "--held-out"):
        said = relufy_error(tiny_model("llama"), "-o", out, option, text)
        assert "too short: it has" in said and "are needed" in said
    (tmp_path / "short.txt").write_text("a few words\n" * 2000)
    assert "--tokens asks for 1000000" in relufy_error(
        tiny_model("llama"), "-o", out, "--text", text, "--tokens", 1000000)
    assert "--tokens 100: the fit needs at least 4 contexts" in relufy_error(
        tiny_model("llama"), "-o", out, "--text", text, "--tokens", 100)


@pytest.mark.parametrize("option, value", [("--sparsity", "0"), ("--sparsity", "1"), ("--sparsity", "nan"),
                                           ("--sparsity", "-0.5"), ("--rank", "-1"), ("--rank", "1e3"),
                                           ("--tokens", "0"), ("--outtype", "q2_k")])
def test_wrong_usage(option: str, value: str, tiny_model: Get, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as e:
        relufy_run(tiny_model("llama"), "-o", tmp_path / "x", f"{option}={value}")
    assert e.value.code == 2


def test_outputs_that_cannot_be(tiny_model: Get, tiny_checkpoint: Get, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    source = tiny_model("llama")
    assert "exists already" in relufy_error(source, "-o", taken)
    assert "is the source" in relufy_error(source, "-o", source, "--force")
    assert "is a folder" in relufy_error(source, "-o", tmp_path)
    assert "no such folder" in relufy_error(source, "-o", tmp_path / "none" / "x")
    assert "not a Hugging Face folder" in relufy_error(source, "-o", tmp_path / "x", "--to-hf")
    assert "is not a folder" in relufy_error(tiny_checkpoint("llama"), "-o", taken, "--to-hf", "--force")
    assert taken.read_text() == "mine"


def test_damaged_weights_name_the_layer(tmp_path: Path) -> None:
    spec = Spec(activation="silu", n_ctx=256)
    tensors = make_tensors(spec)
    tensors["blk.1.ffn_gate.weight"][1][5, 7] = np.nan
    with Trace.open(write_model(tmp_path / "x.gguf", spec, tensors), threads=1, n_ctx=64) as trace:
        relufier = Relufier(trace, np.full((4, 64), 5, np.int32), 1, Settings(4, None))
        relufier.layer(0)
        with pytest.raises(HotcoldError, match=r"layer 1, the model's own hidden states: \d+ values are NaN"):
            relufier.layer(1)


def test_logits_that_are_not_finite_name_the_model(tmp_path: Path) -> None:
    spec = Spec(activation="relu", n_ctx=256)
    tensors = make_tensors(spec)
    tensors["output_norm.weight"][1][3] = np.nan
    path = write_model(tmp_path / "x.gguf", spec, tensors)
    with pytest.raises(HotcoldError, match=r"^its-name.gguf: the model's logits are NaN"):
        relufy.perplexity(path, np.full((1, 64), 5, np.int32), 1, Path("its-name.gguf"))


def test_what_a_killed_run_left_goes_with_the_next(tmp_path: Path) -> None:
    own = f".out.gguf.{os.getpid()}.relufy"
    for name in (".out.gguf.999999999.relufy", ".out.gguf.x.relufy", f".out.gguf.{os.getppid()}.relufy", own):
        (tmp_path / name).mkdir()
        (tmp_path / name / "source.gguf").write_text("half")
    with relufy.scratch(tmp_path / "out.gguf") as folder:
        assert folder == tmp_path / own and not list(folder.iterdir())
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [".out.gguf.x.relufy", f".out.gguf.{os.getppid()}.relufy"])


@pytest.mark.parametrize("n_ff, n_embd, n_contexts", [(1500, 64, 4), (96, 256, 4), (96, 64, 200)])
def test_memory_is_as_foretold(n_ff: int, n_embd: int, n_contexts: int, tmp_path: Path,
                               monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's own count of what it allocates. The fixed numbers of tokens are made small, as the model is."""
    for name, value in (("BEND_TOKENS", 256), ("GATE_TOKENS", 256), ("ROWS", 256)):
        monkeypatch.setattr(relufy_layers, name, value)
    monkeypatch.setattr(relufy_fit, "PANEL", 128)
    spec = Spec(activation="silu", n_ff=n_ff, n_embd=n_embd, n_ctx=256, patterns=("free",))
    contexts = np.random.default_rng(0).integers(0, 101, (n_contexts, 256)).astype(np.int32)
    with Trace.open(write_model(tmp_path / "x.gguf", spec), threads=1, n_ctx=256) as trace:
        tracemalloc.start()
        Relufier(trace, contexts, 1, Settings(8, None)).layer(0)
        peak, needed = tracemalloc.get_traced_memory()[1], relufy_layers.needed_bytes(n_ff, n_embd, contexts.size)
        tracemalloc.stop()
    assert 0.5 * needed < peak < 1.05 * needed + (2 << 20)
    free = type("Memory", (), {"available": needed - 1})
    monkeypatch.setattr("hotcold.convert.relufy_layers.psutil.virtual_memory", lambda: free)
    with pytest.raises(HotcoldError, match="GiB of memory are needed, .* for the hidden states of"):
        Relufier(trace, contexts, 1, Settings(8, None))
