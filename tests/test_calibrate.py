"""Thresholds: quantiles and shares are right, the model skips what it was to skip, and bad input is one line."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType
from profile_cases import random_contexts
from small_models import Reference, Spec, make_tensors, write_model

from hotcold.convert.lazy import QType
from hotcold.convert.model import array, string, u32
from hotcold.placement.calibrate import Calibration, calibrate, default_output, summary, write_thresholds
from hotcold.placement.rewrite import rewrite
from hotcold.placement.threshold import STEPS, Histogram, allocate, error_curve, relative_error
from hotcold.placement.threshold_run import LayerRun, evaluate, open_with
from hotcold.runtime import schema
from hotcold.runtime.cli import main
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.corpus import Contexts
from hotcold.runtime.engine import Engine
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.facts import read_counts
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.kernels import reference

TEXT = " ".join(f"The {i}th word of a text about {'sea' if i % 3 else 'land'} and {i * 7} ships." for i in range(90))
Get = Callable[..., Path]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "ships.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def gelu(tiny_model: Get, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without gates: OPT with another activation."""
    out = tmp_path_factory.mktemp("gelu") / "gelu.gguf"
    rewrite(tiny_model("opt"), out, metadata={schema.KEY_ACTIVATION: string("gelu")})
    return out


def thresholds_of(path: Path) -> np.ndarray:
    with open_gguf(path) as file:
        return np.array(ModelConfig.from_gguf(file).thresholds, np.float32)


def histogram(*parts: np.ndarray) -> Histogram:
    result = Histogram()
    for part in parts:
        result.add(part)
    return result


# --- pure functions


@pytest.mark.parametrize("share", [0.001, 0.1, 0.3, 0.5, 0.7, 0.95, 0.999, 1.0])
@pytest.mark.parametrize(
    "draw",
    [
        lambda rng: rng.standard_normal(40_000) * rng.standard_normal(40_000),
        lambda rng: np.exp(6 * rng.standard_normal(40_000)),
        lambda rng: rng.random(40_000) * 1e-38,
        lambda rng: 1 + rng.random(40_000),
    ],
    ids=["product", "lognormal", "denormal", "uniform"],
)
def test_quantiles(draw: Callable[[np.random.Generator], np.ndarray], share: float) -> None:
    values = draw(np.random.default_rng(1)).astype(np.float32)
    h = histogram(values[:999].reshape(27, 37), values[999:])
    got = h.quantile(share)
    assert h.total == values.size and h.finite
    assert got == np.float32(got)
    low, high = np.quantile(np.abs(values), [max(0, share - 5e-5), min(1, share + 5e-5)])
    assert low * 0.998 <= got <= max(high, np.finfo(np.float32).tiny) * 1.002
    if got > 2e-38:
        np.testing.assert_allclose(h.share_up_to(got), share, atol=1e-6)
        np.testing.assert_allclose((np.abs(values) <= got).mean(), share, atol=1e-3)


def test_quantiles_of_values_that_are_0() -> None:
    h = histogram(np.array([0, 0, 0, -2.0], np.float32))
    assert h.quantile(0) == 0 and Histogram().quantile(0.5) == 0
    assert 0 < h.quantile(0.5) < 1e-30, "a threshold of 0 would mean none"
    assert 1.99 < h.quantile(1.0) < 2.01


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_seen(bad: float) -> None:
    largest = np.finfo(np.float32).max
    assert histogram(np.array([largest, -largest], np.float32)).finite
    assert not histogram(np.ones(5, np.float32), np.array([1, bad], np.float32)).finite


def curves(rng: np.random.Generator, n_layer: int, k: int) -> np.ndarray:
    return np.cumsum(np.concatenate([np.zeros((n_layer, 1)), rng.random((n_layer, k)) ** 4], axis=1), axis=1)


@pytest.mark.parametrize("seed", range(12))
def test_shares_are_the_best_there_are(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_layer, k = int(rng.integers(1, 5)), int(rng.integers(2, 6))
    errors = curves(rng, n_layer, k)
    for units in range(n_layer * k):
        shares = allocate(errors, units / (n_layer * k))
        np.testing.assert_allclose(shares.sum() * k, units)
        steps = np.rint(shares * k).astype(int)
        got = errors[np.arange(n_layer), steps].sum()
        best = min(
            errors[np.arange(n_layer), list(choice)].sum()
            for choice in itertools.product(range(k + 1), repeat=n_layer)
            if sum(choice) == units
        )
        np.testing.assert_allclose(got, best)


@pytest.mark.parametrize("target", [0.0001, 0.123456, 0.5, 0.9999])
def test_any_target_is_met(target: float) -> None:
    shares = allocate(curves(np.random.default_rng(3), 7, STEPS), target)
    assert ((shares >= 0) & (shares <= 1)).all()
    np.testing.assert_allclose(shares.mean(), target, atol=1e-9)


def test_layers_that_are_alike_get_the_same() -> None:
    np.testing.assert_allclose(allocate(np.tile((np.arange(11) / 10) ** 3, (4, 1)), 0.6), 0.6)
    easy_first = np.stack([0.01 * (np.arange(11) / 10) ** 3, (np.arange(11) / 10) ** 3])
    assert allocate(easy_first, 0.5)[0] > 0.8


def test_curves_pass_through_what_was_measured() -> None:
    curve = error_curve([0.1, 0.5, 0.9, 1.0], [0.001, 0.04, 0.03, 0.5])
    assert curve[0] == 0 and (np.diff(curve) >= 0).all()
    np.testing.assert_allclose(curve[[10, 50, 90, 100]], [0.001, 0.04, 0.04, 0.5])


def test_errors_are_relative() -> None:
    rng = np.random.default_rng(0)
    whole = rng.standard_normal((50, 64))
    assert relative_error(np.zeros_like(whole), whole) == 0
    np.testing.assert_allclose(relative_error(0.1 * whole, whole), 0.01)
    np.testing.assert_allclose(relative_error(whole, whole), 1)
    missing = 0.1 * whole
    whole[0] *= 1e4  # one token, of which nothing is missing, would hide all others
    assert 0.009 < relative_error(missing, whole) < 0.011
    assert relative_error(np.zeros((3, 2)), np.zeros((3, 2))) == 0


# --- models


def constant_values(path: Path, n_ff: int, activation: str = "gelu") -> np.ndarray:
    """A model of one layer whose neurons have the same values whatever the token; -> their magnitudes, ascending."""
    spec = Spec(activation=activation, gated=False, patterns=("free",), n_ff=n_ff)
    tensors = make_tensors(spec)
    keys = np.random.default_rng(8).permutation(np.geomspace(0.01, 8, n_ff)).astype(np.float32)
    name = schema.block(0, schema.FFN_UP)
    tensors[name] = (Type.F32, np.zeros_like(tensors[name][1]))
    tensors[schema.block(0, schema.FFN_UP_BIAS)] = (Type.F32, keys)
    write_model(path, spec, tensors)
    return np.sort(np.abs(reference.neuron_values(activation, keys, None)))


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
@pytest.mark.parametrize("per_layer", ["even", "error"])
def test_known_values_are_cut_at_their_quantile(share: float, per_layer: str, tmp_path: Path) -> None:
    values = constant_values(tmp_path / "m.gguf", 200)
    contexts = random_contexts(3, 30)
    result = calibrate(tmp_path / "m.gguf", share, contexts, contexts, per_layer=per_layer, threads=1)
    below = round(200 * share)
    assert values[below - 1] <= result.thresholds[0] < values[below]
    np.testing.assert_allclose([result.sparsity[0], result.after.sparsity[0]], share, atol=1e-3)


class _Recorder(Reference):
    """Keeps the magnitudes of all layers, before thresholds."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.magnitudes: list[list[np.ndarray]] = [[] for _ in range(self.config.n_layer)]

    def _neurons(self, p: str, layer: int, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values, keys = super()._neurons(p, layer, h)
        up = None
        if self.config.gated:
            kind, raw = self.tensors[p + schema.FFN_UP_DOWN]
            up = reference.matmul(kind, raw[::2], h, self.vector(p + schema.FFN_UP_BIAS))
        self.magnitudes[layer].append(np.abs(reference.neuron_values(self.config.activation, keys, up, 0.0)))
        return values, keys


@pytest.mark.parametrize(
    "spec",
    [
        Spec(activation="silu", patterns=("free",) * 4, n_ff=(96, 131, 70, 96), biases=True),
        Spec(activation="gelu", gated=False, arch="opt", biases=True, n_head_kv=4),
        Spec(activation="gelu_tanh", key=Type.Q8_0, value=Type.Q8_0, threshold=0.7),
        Spec(activation="silu", norm_relu=(True, False)),
    ],
    ids=lambda s: f"{s.activation}-{s.arch}",
)
@pytest.mark.parametrize("bos", [False, True])
def test_thresholds_hold_for_inputs_that_have_them(spec: Spec, bos: bool, tmp_path: Path) -> None:
    """Each is the quantile in a float64 model with the thresholds of all layers before it, and none of its own."""
    path = write_model(tmp_path / "m.gguf", spec)
    contexts, share = random_contexts(4, 50, bos=bos), 0.6
    result = calibrate(path, share, contexts, contexts, per_layer="even", threads=2)
    write_thresholds(path, tmp_path / "out.gguf", result.thresholds)
    np.testing.assert_array_equal(thresholds_of(tmp_path / "out.gguf"), result.thresholds)
    model = _Recorder(tmp_path / "out.gguf")
    logits = [model.logits(tokens.tolist())[0] for tokens in contexts.tokens]
    for layer, parts in enumerate(model.magnitudes):
        magnitudes = np.concatenate([m[int(bos) :] for m in parts])
        np.testing.assert_allclose(result.thresholds[layer], np.quantile(magnitudes, share), rtol=2e-2)
        assert abs((magnitudes <= result.thresholds[layer]).mean() - result.after.sparsity[layer]) < 3e-3
    np.testing.assert_allclose(result.sparsity, share, atol=1e-6)
    nll = [np.log(np.exp(rows[:-1]).sum(axis=1)) - rows[np.arange(len(t) - 1), t[1:]]
           for rows, t in zip(logits, contexts.tokens, strict=True)]  # fmt: skip
    assert len(result.after.nll) == sum(len(t) - 1 for t in contexts.tokens)
    np.testing.assert_allclose(result.after.perplexity, np.exp(np.concatenate(nll).mean()), rtol=2e-2)


def test_what_is_measured_does_not_depend_on_blocks(tmp_path: Path) -> None:
    """Contexts longer than a block, and their errors: the same as all of a context at once."""
    spec = Spec(activation="silu", n_ctx=700)
    path = write_model(tmp_path / "m.gguf", spec)
    contexts = random_contexts(2, 600)
    with open_with(path, (0.0, 0.0), 1, 700) as trace:
        run = LayerRun(trace, contexts, lambda n: None)
        magnitudes = run.magnitudes(0)
        t = magnitudes.quantile(0.5)
        errors = run.finish(0, 0.0, [0.0, t, np.inf])
        assert magnitudes.total == 800 * 96
        assert errors.output[0] == errors.stream[0] == 0 and 0 < errors.output[1] < 0.5
        np.testing.assert_allclose(errors.output[2], 1, rtol=1e-5)
        assert 0 < errors.stream[1] < errors.stream[2]
        dense = evaluate(trace, contexts, lambda n: None)
    with Engine.open(path, threads=1, n_ctx=700) as engine:
        rows = engine.forward(contexts.tokens[0].astype(np.int64), "all").astype(np.float64)
    own = np.log(np.exp(rows[:-1]).sum(axis=1)) - rows[np.arange(599), contexts.tokens[0][1:]]
    np.testing.assert_allclose(dense.nll[:599], own, atol=1e-4)
    assert dense.bytes_share == 1 and dense.tokens == 800


def test_even_layers_differ_from_layers_by_error(tmp_path: Path) -> None:
    """A layer of which a few neurons do all the work can do without more of the others."""
    spec = Spec(activation="silu", patterns=("free", "free"))
    tensors = make_tensors(spec)
    name = schema.block(1, schema.FFN_UP_DOWN)
    bundles = tensors[name][1].copy()
    bundles[20::2] *= np.float32(1e-3)  # up rows of all but ten neurons
    tensors[name] = (Type.F32, bundles)
    path = write_model(tmp_path / "m.gguf", spec, tensors)
    contexts = random_contexts(4, 60)
    even, error = (calibrate(path, 0.5, contexts, contexts, per_layer=how, threads=1) for how in ("even", "error"))
    np.testing.assert_allclose(even.sparsity, 0.5, atol=1e-6)
    np.testing.assert_allclose(error.sparsity.mean(), 0.5, atol=1e-6)
    assert error.sparsity[1] > 0.8 > 0.3 > error.sparsity[0]
    assert error.errors.sum() < even.errors.sum()
    assert np.isfinite(error.after.perplexity)


@pytest.mark.parametrize(("layer", "name"), [(0, schema.FFN_GATE), (1, schema.FFN_UP_DOWN), (1, "attn_output.weight")])
def test_activations_that_are_not_finite_name_the_layer(layer: int, name: str, tmp_path: Path) -> None:
    spec = Spec(activation="silu", patterns=("free",) * 3)
    tensors = make_tensors(spec)
    broken = tensors[schema.block(layer, name)][1].copy()
    broken[2, 5] = np.nan
    tensors[schema.block(layer, name)] = (Type.F32, broken)
    path = write_model(tmp_path / "m.gguf", spec, tensors)
    with pytest.raises(HotcoldError, match=f"layer {layer}: NaN or infinite activations in context 0 of the text"):
        calibrate(path, 0.5, random_contexts(2, 20), random_contexts(2, 20), threads=1)


def test_logits_that_are_not_finite(tmp_path: Path) -> None:
    spec = Spec(activation="silu")
    tensors = make_tensors(spec)
    tensors["output_norm.weight"] = (Type.F32, np.full(64, np.inf, np.float32))
    path = write_model(tmp_path / "m.gguf", spec, tensors)
    with pytest.raises(HotcoldError, match="logits are NaN or infinite"):
        calibrate(path, 0.5, random_contexts(2, 20), random_contexts(2, 20), threads=1)


def test_targets_that_make_no_sense(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", Spec(activation="silu"))
    for target in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(HotcoldError, match="between 0 and 1"):
            calibrate(path, target, random_contexts(1, 20), random_contexts(1, 20))
    with pytest.raises(HotcoldError, match="choose from even, error"):
        calibrate(path, 0.5, random_contexts(1, 20), random_contexts(1, 20), per_layer="odd")


def test_progress_ends_at_the_end(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", Spec(activation="silu"))
    seen: list[tuple[int, int]] = []
    calibrate(path, 0.5, random_contexts(5, 20), random_contexts(2, 20), threads=1, per_layer="error",
              progress=lambda done, total: seen.append((done, total)))  # fmt: skip
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1] and len({total for _, total in seen}) == 1
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


# --- the command


def command(*arguments: str | Path) -> int:
    return main(["calibrate", *map(str, arguments)])


@pytest.mark.parametrize("which", ["llama", "gelu"])
@pytest.mark.parametrize("per_layer", ["even", "error"])
def test_from_a_model_to_a_sparse_one(
    which: str, per_layer: str, tiny_model: Get, gelu: Path, text: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    model, out = gelu if which == "gelu" else tiny_model("llama"), tmp_path / "out.gguf"
    options = ["--text", text, "-c", "64", "-t", "1", "--per-layer", per_layer]
    assert command(model, "--target-sparsity", "0.6", *options, "-o", out) == 0
    said = capsys.readouterr()
    table = said.out.splitlines()
    assert table[0].strip() == "Thresholds" and [line.split()[0] for line in table[2:5]] == ["0", "1", "2"]
    assert "perplexity" in said.out and "nan" not in said.out and "\x1b" not in said.out + said.err
    assert f"wrote {out}" in said.err and "calibrating: " in said.err
    thresholds = thresholds_of(out)
    assert (thresholds > 0).all()
    with open_gguf(out) as file:
        assert ModelConfig.from_gguf(file).activation == ("gelu" if which == "gelu" else "silu")
    tokens = [int(t) for t in np.random.default_rng(0).integers(0, 255, 40)]
    with Engine.open(out, threads=2) as exact, Engine.open(out, threads=2, sparsity="dense") as dense:
        assert exact.sparsity == "exact"
        for token in tokens:
            a, b = exact.forward([token]), dense.forward([token])
            np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))
        stats = exact.layer_stats()
    assert abs(1 - stats.computed.mean() - 0.6) < 0.1
    shown = next(line for line in table if line.startswith("FFN bytes read")).split()[4]
    whole = 3 if which == "llama" else 2
    sparsity = float(next(line for line in table if line.startswith("sparsity ")).split()[2].rstrip("%")) / 100
    assert abs(sparsity - 0.6) < 0.06
    assert abs(float(shown.rstrip("%")) / 100 - (whole - sparsity) / whole) < 2e-3


def with_old_facts(model: Path, out: Path) -> Path:
    """The model with counts, a predictor and thresholds."""
    with open_gguf(model) as file:
        config = ModelConfig.from_gguf(file)
    n, tensors = config.n_layer, {}
    for layer, n_ff in enumerate(config.n_ff):
        tensors |= {
            schema.block(layer, schema.FFN_NEURON_COUNT): (np.arange(n_ff, dtype=np.int64)[::-1].copy(), QType.I64),
            schema.block(layer, schema.FFN_PRED_IN): (np.ones((32, config.n_embd), np.float32), QType.F32),
            schema.block(layer, schema.FFN_PRED_OUT): (np.ones((n_ff, 32), np.float32), QType.F32),
            schema.block(layer, schema.FFN_PRED_OUT_BIAS): (np.ones(n_ff, np.float32), QType.F32),
        }
    metadata = {
        schema.KEY_THRESHOLD: array([0.25] * n, GGUFValueType.FLOAT32), schema.KEY_PROFILE_TOKENS: u32(1 << 20),
        schema.KEY_PREDICTOR_KIND: array(["lowrank"] * n, GGUFValueType.STRING),
        schema.KEY_PREDICTOR_RANK: array([32] * n, GGUFValueType.UINT32),
        schema.KEY_PREDICTOR_INPUT: array([0] * n, GGUFValueType.UINT32),
        schema.KEY_PREDICTOR_THRESHOLD: array([0.0] * n, GGUFValueType.FLOAT32),
        schema.KEY_PLACEMENT_MODEL: string("m"),
    }  # fmt: skip
    rewrite(model, out, tensors=tensors, metadata=metadata)
    return out


def test_calibrating_again_begins_from_no_thresholds(
    tiny_model: Get, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("llama")
    old = with_old_facts(model, tmp_path / "old.gguf")
    options = ["--target-sparsity", ".5", "--text", text, "-c", "64", "-t", "1"]
    assert command(model, *options, "-o", tmp_path / "a.gguf") == 0
    first = capsys.readouterr()
    assert "left out" not in first.err
    assert command(old, *options, "-o", tmp_path / "b.gguf") == 0
    again = capsys.readouterr()
    assert "left out, for they hold for the old thresholds: counts and predictors and placements" in again.err
    assert again.out == first.out
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    with open_gguf(tmp_path / "b.gguf") as file:
        config = ModelConfig.from_gguf(file)
        assert not config.predictors and read_counts(file, config) is None
        assert not any(key.startswith(("hotcold.profile", "hotcold.pred", "hotcold.place")) for key in file.metadata)


def test_in_place_and_the_default_name(
    tiny_model: Get, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert default_output(Path("a/b.hotcold.gguf"), 0.5) == Path("a/b-s50.gguf")
    assert default_output(Path("b.gguf"), 0.625) == Path("b-s62.5.gguf")
    model = tmp_path / "m.gguf"
    model.write_bytes(tiny_model("llama").read_bytes())
    options = ["--target-sparsity", "0.5", "--text", text, "-c", "64", "-t", "1"]
    assert command(model, *options) == 0
    made = tmp_path / "m-s50.gguf"
    assert (thresholds_of(made) > 0).all()
    capsys.readouterr()
    assert command(model, *options) == 1
    assert "exists already" in capsys.readouterr().err
    assert command(model, *options, "-o", model, "--force") == 0
    np.testing.assert_array_equal(thresholds_of(model), thresholds_of(made))


@pytest.mark.parametrize("share", ["0", "1", "1.0", "-0.5", "nan", "50%", "1e-1", "\u0660.\u0665", ""])
def test_shares_that_are_none(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        command("m.gguf", f"--target-sparsity={share}")
    assert e.value.code == 2
    assert "between 0 and 1" in capsys.readouterr().err


def test_what_cannot_be_calibrated(
    tiny_model: Get, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short, model, no_vocab = tmp_path / "short.txt", tiny_model("llama"), tmp_path / "v.gguf"
    short.write_text("too short")
    write_model(no_vocab, Spec(activation="silu"))
    (tmp_path / "there.gguf").write_bytes(b"mine")
    cases: list[tuple[list[str | Path], str]] = [
        ([tiny_model("llama", stock=True)], "first run: hotcold convert"),
        ([tiny_model("relu")], "activation 'relu' switches neurons off by itself"),
        ([tiny_model("opt")], "activation 'relu' switches neurons off by itself"),
        ([model, "--text", short], "is too short"),
        ([model, "--text", tmp_path / "none.txt"], "none.txt: cannot be read"),
        ([model, "-c", "100000"], "--ctx 100000: the model was trained on contexts of 512 tokens"),
        ([model, "-o", tmp_path / "there.gguf"], "there.gguf: exists already"),
        ([model, "-o", tmp_path / "none" / "x.gguf"], "no such folder"),
        ([no_vocab], "has no vocabulary"),
        ([tmp_path / "none.gguf"], "none.gguf"),
        ([short], "short.txt"),
    ]
    capsys.readouterr()  # what making the models said
    for arguments, expected in cases:
        named = arguments if "-o" in arguments else [*arguments, "-o", tmp_path / "out.gguf"]
        assert command(*named, "--target-sparsity", "0.5") == 1
        said = capsys.readouterr().err
        assert expected in said and said.count("\n") == 1, said
        assert not (tmp_path / "out.gguf").exists()
    assert (tmp_path / "there.gguf").read_bytes() == b"mine"


def test_an_interrupt_leaves_nothing(
    tiny_model: Get, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: LayerRun, layer: int) -> Histogram:
        raise KeyboardInterrupt

    monkeypatch.setattr(LayerRun, "magnitudes", interrupted)
    options = ["--target-sparsity", "0.5", "--text", text, "-o", tmp_path / "out.gguf"]
    assert command(tiny_model("llama"), *options) == 130
    assert list(tmp_path.iterdir()) == []
    assert "Traceback" not in capsys.readouterr().err


def test_the_summary_compares(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", Spec(activation="silu"))
    contexts: Contexts = random_contexts(2, 40)
    result: Calibration = calibrate(path, 0.5, contexts, contexts, threads=1)
    lines = summary(result)
    assert f"{result.before.perplexity:.3f} -> {result.after.perplexity:.3f}" in lines[1]
    assert f"{(2 + 1 - result.after.sparsity.mean()) / 3:.1%} of dense" in lines[2]
