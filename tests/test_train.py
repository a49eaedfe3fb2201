"""placement/train.py: `hotcold train-predictor` on small models: what is written, printed and refused."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from small_models import Spec, all_of, make_tensors, write_model

from hotcold.placement import train
from hotcold.placement.identity import model_id
from hotcold.placement.predictor import Predictor, rows_of
from hotcold.placement.predictor_layer import MIN_SAMPLES, Wanted, label, split_contexts
from hotcold.placement.profile import Profile, save_profile
from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.ffn_config import PredictorConfig
from hotcold.runtime.gguf_file import GGUFFile, dequantize, open_gguf
from hotcold.runtime.gpu.device import DeviceUnavailable
from hotcold.runtime.weights import load_weights

N = 600
LOW = 4  # rank of the key matrices


def write_low_rank(path: Path, spec: Spec, bias: float = -0.7) -> Path:
    """A model whose keys a predictor can tell from few numbers."""
    tensors = make_tensors(spec)
    rng = np.random.default_rng(9)
    for layer, n_ff in enumerate(spec.neurons()):
        key = rng.standard_normal((n_ff, LOW)) @ rng.standard_normal((LOW, spec.n_embd)) / (LOW * spec.n_embd) ** 0.5
        name = schema.block(layer, schema.FFN_GATE if spec.gated else schema.FFN_UP)
        tensors[name] = (tensors[name][0], key.astype(np.float32))
        tensors[name.replace("weight", "bias")] = (Type.F32, np.full(n_ff, bias, np.float32))
    return write_model(path, spec, tensors)


def make_profile(model: Path, n: int = N, seed: int = 1) -> Profile:
    """Counts and samples of made-up FFN inputs; in the layer before they are turned, so that look-ahead can work."""
    rng = np.random.default_rng(seed)
    with open_gguf(model) as file:
        c = ModelConfig.from_gguf(file)
        x = rng.standard_normal((n, c.n_embd)).astype(np.float16)
        samples = tuple(np.roll(x, layer, axis=1) for layer in range(c.n_layer))
        fired = []
        for layer in range(c.n_layer):
            own = samples[layer].astype(np.float32)
            counts = label(file, c, layer, own, own).fired.sum(axis=0, dtype=np.int64) if n else np.zeros(c.n_ff[layer])
            source = np.zeros(c.n_ff[layer], np.int64)
            source[file.data(schema.block(layer, schema.FFN_NEURON_ID))] = counts
            fired.append(source)
        zeros = tuple(np.zeros(k, np.int64) for k in c.n_ff)
        return Profile(model_id(file, c), max(n, 1), 0, "made up", "0" * 64, tuple(fired), zeros,
                       tuple(z.astype(np.float64) for z in zeros), samples, np.arange(n) // 20)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_low_rank(tmp_path_factory.mktemp("model") / "m.gguf", Spec(**all_of(Type.Q8_0)))


@pytest.fixture(scope="module")
def profile(model: Path) -> Path:
    path = model.with_name("p.gguf")
    save_profile(path, make_profile(model))
    return path


def train_predictor(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    args = parser.parse_args([str(a) for a in arguments])
    args.parser = parser
    return train.run(args)


def predictors_of(path: Path) -> list[Predictor | None]:
    with open_gguf(path) as file:
        config = ModelConfig.from_gguf(file)
        load_weights(file, config)
        return [_predictor(file, layer, p) for layer, p in enumerate(config.predictors)]


def _predictor(file: GGUFFile, layer: int, p: PredictorConfig) -> Predictor | None:
    if p.kind == "none":
        return None

    def get(name: str) -> Any:
        info = file.tensors.get(schema.block(layer, name))
        data = None if info is None else file.data(info.name)
        return data if info is None or info.ggml_type == Type.I32 else dequantize(data, info.ggml_type)

    types = [file.tensors[schema.block(layer, n)].ggml_type for n in (schema.FFN_PRED_IN, schema.FFN_PRED_OUT)
             if p.kind != "signbit"]  # fmt: skip
    return Predictor(p.kind, p.look_ahead, p.threshold, *map(get, (
        schema.FFN_PRED_OUT_BIAS, schema.FFN_PRED_IN, schema.FFN_PRED_IN_BIAS, schema.FFN_PRED_OUT,
        schema.FFN_PRED_SIGN)), *types)  # fmt: skip


# ------------------------------------------------------------------ what is written


@pytest.mark.parametrize("kind", ["lowrank", "mlp", "signbit"])
def test_predictors_come_back_from_the_file(kind: str, model: Path, profile: Path, tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "BUDGET", 10.0)  # nets of 32 units are more than 10 % of so small a model
    wanted = Wanted(kind, 0.9)
    loaded = train.load_profile(profile)
    results, _ = train.train_predictors(model, loaded, wanted)
    train.write_predictors(model, tmp_path / "out.gguf", loaded, results)
    x = np.random.default_rng(0).standard_normal((9, 64)).astype(np.float32)
    found = predictors_of(tmp_path / "out.gguf")
    assert [p and p.kind for p in found] == [r.predictor and r.predictor.kind for r in results]
    for read, result in zip(found, results, strict=True):
        made = result.predictor
        if kind != "signbit":
            assert made is not None
        if made is None or read is None:
            continue
        assert (read.n_bytes, read.type_in, read.type_out) == (made.n_bytes, made.type_in, made.type_out)
        np.testing.assert_allclose(read.scores(x) - read.threshold, made.scores(x) - made.threshold, atol=2e-3,
                                   rtol=2e-3)  # fmt: skip
    with open_gguf(tmp_path / "out.gguf") as file, open_gguf(model) as source:
        for key in (schema.KEY_PREDICTOR_RECALL, schema.KEY_PREDICTOR_DENSITY, schema.KEY_SPARSITY):
            assert len(file.metadata[key]) == 2 and all(0 <= v <= 1 for v in file.metadata[key])
        for name in source.tensors:
            assert np.array_equal(file.data(name), source.data(name)), name


def test_written_again_old_predictors_are_replaced(model: Path, profile: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    assert train_predictor(model, "--profile", profile, "--target-recall", "0.9", "-o", first) == 0
    with pytest.raises(HotcoldError, match="exists"):
        train_predictor(model, "--profile", profile, "-o", first)
    assert train_predictor(first, "--profile", profile, "--kind", "signbit", "-o", second) == 0
    with open_gguf(second) as file:
        assert not [n for n in file.tensors if n.endswith((schema.FFN_PRED_IN, schema.FFN_PRED_OUT))]
        assert set(file.metadata[schema.KEY_PREDICTOR_KIND]) <= {"signbit", "none"}


def test_look_ahead_reads_the_input_of_the_layer_before(model: Path, profile: Path, tmp_path: Path) -> None:
    out = tmp_path / "ahead.gguf"
    assert train_predictor(model, "--profile", profile, "--look-ahead", "--target-recall", "0.9", "-o", out) == 0
    with open_gguf(out) as file:
        assert file.metadata[schema.KEY_PREDICTOR_INPUT].tolist() == [0, 1]
    p = predictors_of(out)[1]
    assert p is not None and p.lookahead
    samples = train.load_profile(profile).samples
    with open_gguf(model) as file:
        config = ModelConfig.from_gguf(file)
        own, before = samples[1].astype(np.float32), samples[0].astype(np.float32)
        fired = label(file, config, 1, own, own).fired
    right = float(((p.scores(before) > p.threshold) & fired).sum() / fired.sum())
    wrong = float(((p.scores(own) > p.threshold) & fired).sum() / fired.sum())
    assert right > 0.6 and wrong < right - 0.2


def test_labels_are_those_of_the_model(tmp_path: Path) -> None:
    for case, spec in enumerate((Spec(), Spec(arch="opt", gated=False), Spec(activation="fatrelu", threshold=0.2),
                                 Spec(activation="silu", threshold=0.1))):
        path = write_model(tmp_path / f"{case}.gguf", spec)
        x = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
        with open_gguf(path) as file:
            c = ModelConfig.from_gguf(file)
            data = label(file, c, 0, x, x)
            rows = rows_of(file, c, 0)
            key = file.data(schema.block(0, schema.FFN_GATE if spec.gated else schema.FFN_UP)) @ x.T
            if spec.activation == "silu":
                up = file.data(schema.block(0, schema.FFN_UP_DOWN))[::2] @ x.T
                assert np.array_equal(data.fired, np.abs(key / (1 + np.exp(-key)) * up).T > 0.1)
                assert (rows.check, rows.value) == (512, 256)
            else:
                assert np.array_equal(data.fired, key.T > spec.threshold)
                assert (rows.check, rows.value) == (256, 512 if spec.gated else 256)
        assert not data.size[~data.fired].any() and (data.size[data.fired] >= 0).all()


def test_nets_keep_the_budget_of_all_layers(model: Path, profile: Path) -> None:
    results, notes = train.train_predictors(model, train.load_profile(profile), Wanted("mlp", 0.9))
    with open_gguf(model) as file:
        total = train._parameters(file)
    assert sum(r.predictor.n_parameters for r in results if r.predictor) <= train.BUDGET * total
    assert any("budget" in note for note in notes)


# ------------------------------------------------------------------ what is printed


def test_layers_weigh_by_their_neurons_in_means(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", Spec(n_ff=(96, 160), patterns=("on", "free"), biases=True))
    profile, wanted = make_profile(path), Wanted("signbit", 0.9)
    results, _ = train.train_predictors(path, profile, wanted)
    off = 1 - sum(f.sum() for f in profile.fired) / (profile.n_tokens * (96 + 160))
    table = train.result_table(results, profile, wanted)
    assert list(table.columns[2].cells)[-1] == f"{off:.1%}"


def test_without_outfile_only_the_table(model: Path, profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(model.parent.iterdir())
    assert train_predictor(model, "--profile", profile, "--target-recall", "0.9") == 0
    out, _ = capsys.readouterr()
    assert sorted(model.parent.iterdir()) == before
    assert [line.split()[0] for line in out.splitlines()[1:] if line.strip()] == ["layer", "0", "1", "mean"]
    assert "\x1b" not in out


def test_where_nets_are_trained_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise DeviceUnavailable("CuPy cannot be loaded: ImportError: libfoo")

    monkeypatch.setattr(train, "open_device", none)
    assert train.array_module() is np and "CPU: CuPy cannot be loaded: ImportError" in capsys.readouterr().err
    gpu = object()
    device = SimpleNamespace(name="A Card", has_gemm=True, array_module=lambda: gpu)
    monkeypatch.setattr(train, "open_device", lambda: device)
    assert train.array_module() is gpu and "on A Card" in capsys.readouterr().err
    device.has_gemm = False
    assert train.array_module() is np and "CPU: A Card has no cuBLAS: pip install" in capsys.readouterr().err


def test_progress_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "EVERY", 0.0)
    with train.layer_progress("mlp") as progress:
        for done in range(4):
            progress(done, 3)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and "kind mlp" in lines[0] and "2 of 3 layers, " in lines[3]


def test_what_predicting_costs_needs_a_vocabulary(
    model: Path, profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "o.gguf"
    assert train_predictor(model, "--profile", profile, "--target-recall", "0.9", "-o", out) == 0
    assert "was not measured" in capsys.readouterr().out and out.exists()
    assert train_predictor(model, "--profile", profile, "-o", out, "--force", "--check-tokens", "0") == 0
    assert "measured" not in capsys.readouterr().out


def test_a_layer_that_does_not_pay_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_model(tmp_path / "m.gguf", Spec(patterns=("on", "free"), biases=True))
    save_profile(tmp_path / "p.gguf", make_profile(path))
    out = tmp_path / "o.gguf"
    assert train_predictor(path, "--profile", tmp_path / "p.gguf", "--target-recall", "0.9999", "-o", out) == 0
    printed, notes = capsys.readouterr()
    assert "runs exact" in notes and " none " in printed
    with open_gguf(out) as file:
        assert file.metadata[schema.KEY_PREDICTOR_KIND][0] == "none"


# ------------------------------------------------------------------ what is refused


def refusal(model: Path, profile: Profile) -> str:
    with pytest.raises(HotcoldError) as e:
        train.train_predictors(model, profile, Wanted("lowrank", 0.99))
    assert "\n" not in str(e.value)
    return str(e.value)


def broken(change: Callable[[Profile], dict[str, Any]], model: Path) -> Profile:
    profile = make_profile(model)
    return replace(profile, **change(profile))


def test_bad_profiles_are_refused(model: Path) -> None:
    few = make_profile(model, 50)
    assert str(MIN_SAMPLES) in refusal(model, few) and "50 samples" in refusal(model, few)
    none = broken(lambda p: {"samples": tuple(s[:0] for s in p.samples), "sample_text": p.sample_text[:0]}, model)
    assert "no samples" in refusal(model, none)
    other = broken(lambda p: {"model": "f" * 64}, model)
    assert "another model" in refusal(model, other)
    damaged = make_profile(model)
    damaged.samples[1][3, 5] = np.nan
    assert "layer 1" in refusal(model, damaged) and "NaN" in refusal(model, damaged)


def test_models_without_sparsity_are_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", Spec(activation="silu"))
    assert "relufy" in refusal(path, make_profile(path))


def test_wrong_arguments(model: Path, profile: Path) -> None:
    for wrong in (["--rank", "33"], ["--rank", "0"], ["--target-recall", "1"], ["--target-recall", "nan"],
                  ["--kind", "signbit", "--look-ahead"], ["--kind", "none"]):
        with pytest.raises(SystemExit) as e:
            train_predictor(model, "--profile", profile, *wrong)
        assert e.value.code == 2
    with pytest.raises(HotcoldError, match="no such file"):
        train_predictor(model, "--profile", profile.with_name("missing"))


def test_few_contexts_and_few_samples_are_noted(model: Path) -> None:
    profile = make_profile(model)
    one = replace(profile, sample_text=np.zeros(N, np.int64))
    _, notes = train.train_predictors(model, one, Wanted("lowrank", 0.9))
    assert any("three contexts" in note for note in notes)
    assert len(split_contexts(profile.sample_text, 0).fit) > N / 2
