"""placement/pipeline.py: `hotcold convert --calibrate` is convert, profile and place, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import convert_error, run_convert
from small_models import Reference
from test_convert_gguf import rewrite as edit
from tiny import N_TOKENS, token_ids

from hotcold.placement import pipeline
from hotcold.placement.place import sort_by
from hotcold.placement.profiling import profile_model
from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.facts import read_counts
from hotcold.runtime.gguf_file import open_gguf

Get = Callable[..., Path]
CALIBRATE = ("--calibrate-tokens", "600", "--predictor", "none")
WORDS = "the other one, tell them in the end an hour and then that is all there was to it.\n"


@pytest.fixture
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(WORDS * 60)
    return path


def planted(tiny_model: Get, out: Path) -> tuple[Path, list[np.ndarray]]:
    """A stock file of 12 layers whose own 9 of 72 neurons fire on every token, 9 others on none; the hot ones."""
    hot = [np.random.default_rng(layer).permutation(72) for layer in range(12)]

    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        for layer, order in enumerate(hot):
            bias, kind = tensors[f"blk.{layer}.ffn_gate.bias"]
            bias[order[:9]], bias[order[9:18]] = 100.0, -1e4
            down, _ = tensors[f"blk.{layer}.ffn_down.weight"]
            down[:, order[:9]] /= 100.0  # so that what they add stays small

    src = tiny_model("llama-12-layers", stock=True, hidden_act="relu", mlp_bias=True, max_position_embeddings=64)
    return edit(src, out, change), [order[:9] for order in hot]


def test_every_layer_of_a_planted_model_gets_its_own_hot_neurons(
    tiny_model: Get, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src, hot = planted(tiny_model, tmp_path / "s.gguf")
    run_convert(src, "-o", tmp_path / "o.gguf", "--calibrate", "--calibrate-text", text, *CALIBRATE)
    assert len({tuple(sorted(h)) for h in hot}) == 12
    with open_gguf(tmp_path / "o.gguf") as f:
        counts = read_counts(f, ModelConfig.from_gguf(f))
        assert counts is not None and counts.sorted and counts.corpus == "text.txt"
        for layer, neurons in enumerate(hot):
            ids = f.data(schema.block(layer, schema.FFN_NEURON_ID))
            assert set(ids[:9]) == set(neurons), layer
            assert (counts.fired[layer][:9] == counts.tokens).all() and (counts.fired[layer][-9:] == 0).all()
    rows = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert [row[0] for row in rows if row[1:2] == ["72"] and row[0].isdecimal()] == [str(layer) for layer in range(12)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o.gguf", "s.gguf"]


def test_one_step_equals_the_steps_one_by_one(tiny_model: Get, tmp_path: Path, text: Path) -> None:
    """And the model is the same model, which goes back to stock as it came."""
    src = tiny_model("relu", stock=True, max_position_embeddings=64)
    run_convert(src, "-o", tmp_path / "one.gguf", "--calibrate", "--calibrate-text", text, *CALIBRATE)
    run_convert(src, "-o", tmp_path / "split.gguf")
    profile = profile_model(tmp_path / "split.gguf", [text], tokens=600, samples=0)
    with open_gguf(tmp_path / "split.gguf") as f, open_gguf(tmp_path / "one.gguf") as g:
        sorting = sort_by(profile, f, ModelConfig.from_gguf(f))
        counts = read_counts(g, ModelConfig.from_gguf(g))
        assert counts is not None and counts.tokens == profile.n_tokens and counts.sha256 == profile.sha256
        for got, want in zip(counts.fired, sorting.counts.fired, strict=True):
            np.testing.assert_array_equal(got, want)
    tokens = token_ids(20, N_TOKENS)
    want_logits, _ = Reference(tmp_path / "split.gguf").logits(tokens)
    got_logits, _ = Reference(tmp_path / "one.gguf").logits(tokens)
    assert np.abs(got_logits - want_logits).max() <= 1e-11 * np.abs(want_logits).max()
    run_convert(tmp_path / "one.gguf", "--to-stock", "-o", tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == src.read_bytes()


def test_options_may_come_before_the_source_and_texts_add_up(tiny_model: Get, tmp_path: Path, text: Path) -> None:
    other = text.with_name("other.txt")
    other.write_text(WORDS[::-1] * 60)
    src = tiny_model("relu", stock=True, max_position_embeddings=64)
    run_convert("--calibrate-text", text, "--calibrate-text", other, *CALIBRATE, "-o", tmp_path / "o.gguf",
                "--calibrate", src)  # fmt: skip
    with open_gguf(tmp_path / "o.gguf") as f:
        assert f.metadata[schema.KEY_PROFILE_CORPUS] == "text.txt, other.txt"


def test_from_a_checkpoint_with_the_bundled_text(tiny_checkpoint: Get, tmp_path: Path) -> None:
    run_convert(tiny_checkpoint("prosparse", max_position_embeddings=64), "-o", tmp_path / "o.gguf", *CALIBRATE,
                "--calibrate")  # fmt: skip
    with open_gguf(tmp_path / "o.gguf") as f:
        assert f.metadata[schema.KEY_PROFILE_CORPUS] == "hotcold calibration text"


@pytest.mark.parametrize("kind", [(), ("--predictor", "signbit")])
def test_predictors_are_trained_for_the_sorted_file(
    kind: tuple[str, ...], tiny_model: Get, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default is lowrank. The model is the sorted one in every other byte; to stock nothing of it is left."""
    src = tiny_model("relu", stock=True, max_position_embeddings=64)
    run_convert(src, "-o", tmp_path / "o.gguf", "--calibrate", "--calibrate-text", text, "--calibrate-tokens", "1500",
                *kind)  # fmt: skip
    err = capsys.readouterr().err
    assert f"Predictors of kind {kind[1] if kind else 'lowrank'}" in err
    with open_gguf(tmp_path / "o.gguf") as f:
        any_used = any(p.kind != "none" for p in ModelConfig.from_gguf(f).predictors)
    assert ("perplexity exact " if any_used else "no layer is predicted") in err
    run_convert(src, "-o", tmp_path / "none.gguf", "--calibrate", "--calibrate-text", text,
                "--calibrate-tokens", "1500", "--predictor", "none")  # fmt: skip
    with open_gguf(tmp_path / "o.gguf") as f, open_gguf(tmp_path / "none.gguf") as g:
        config = ModelConfig.from_gguf(f)
        assert len(config.predictors) == config.n_layer and {p.kind for p in config.predictors} <= {
            "none", kind[1] if kind else "lowrank"}  # fmt: skip
        for name in g.tensors:
            np.testing.assert_array_equal(f.data(name), g.data(name), err_msg=name)
        for name in f.tensors.keys() - g.tensors.keys():
            assert ".ffn_pred_" in name
    assert sorted(p.name for p in tmp_path.iterdir()) == ["none.gguf", "o.gguf"]
    run_convert(tmp_path / "o.gguf", "--to-stock", "-o", tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == src.read_bytes()


# ------------------------------------------------------------------ errors


def refused(tmp_path: Path, *arguments: str | Path) -> str:
    """The line that converting fails with; no file is made."""
    before = sorted(tmp_path.iterdir())
    error = convert_error(*arguments, "-o", tmp_path / "o.gguf")
    assert sorted(tmp_path.iterdir()) == before
    return error


@pytest.mark.parametrize(("case", "activation"), [("llama", "silu"), ("qwen2", "silu")])
def test_models_whose_neurons_never_switch_off(
    case: str, activation: str, tiny_checkpoint: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before any work, with what to do."""
    monkeypatch.delattr("hotcold.convert.main.split_neurons")
    error = refused(tmp_path, tiny_checkpoint(case), "--calibrate")
    assert f"its activation is {activation}" in error and "hotcold relufy" in error and "hotcold calibrate" in error


def test_text_that_cannot_be_read(tiny_model: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any work."""
    src = tiny_model("relu", stock=True)
    monkeypatch.delattr("hotcold.convert.main.split_neurons")
    assert "no.txt" in refused(tmp_path, src, "--calibrate", "--calibrate-text", tmp_path / "no.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 99)
    assert "is not UTF-8" in refused(tmp_path, src, "--calibrate", "--calibrate-text", tmp_path / "latin.txt")


def test_text_that_is_too_short(tiny_model: Get, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a word")
    error = refused(tmp_path, tiny_model("relu", stock=True), "--calibrate", "--calibrate-text", tmp_path / "short.txt")
    assert "too short" in error


def test_options_that_do_not_go_together(tiny_model: Get, tmp_path: Path) -> None:
    src = tiny_model("relu", stock=True)
    assert "--predictor needs --calibrate" in refused(tmp_path, src, "--predictor", "lowrank")
    assert "--calibrate-tokens needs --calibrate" in refused(tmp_path, src, "--calibrate-tokens", "5")
    assert "--calibrate-text needs --calibrate" in refused(tmp_path, src, "--calibrate-text", "a")
    assert "--calibrate is not for --to-stock" in refused(tmp_path, src, "--calibrate", "--to-stock")
    few = refused(tmp_path, src, "--calibrate", "--calibrate-tokens", "255")
    assert "at least 256 tokens" in few and "--predictor none" in few
    assert "is neuron-split already" in refused(tmp_path, tiny_model("relu"), "--calibrate")


def test_no_vocabulary(tiny_checkpoint: Get, tmp_path: Path) -> None:
    error = refused(tmp_path, tiny_checkpoint("relu"), "--no-vocab", "--calibrate")
    assert "has no vocabulary" in error


def test_dry_run_writes_nothing(tiny_model: Get, tmp_path: Path) -> None:
    run_convert(tiny_model("relu", stock=True), "-o", tmp_path / "o.gguf", "--calibrate", "--dry-run")
    assert not list(tmp_path.iterdir())


def test_existing_files_are_kept(tiny_model: Get, tmp_path: Path, text: Path) -> None:
    (tmp_path / "o.gguf").write_text("mine")
    src = tiny_model("relu", stock=True, max_position_embeddings=64)
    assert "exists already" in refused(tmp_path, src, "--calibrate", "--calibrate-text", text)
    assert (tmp_path / "o.gguf").read_text() == "mine"
    run_convert(src, "-o", tmp_path / "o.gguf", "--calibrate", "--calibrate-text", text, *CALIBRATE, "--force")
    assert [p.name for p in tmp_path.iterdir()] == ["o.gguf"]


# ------------------------------------------------------------------ nothing is left behind


@pytest.mark.parametrize("step", ["profile_model", "sort_by", "write_sorted", "check_space"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_stopped_at_any_step(
    step: str, error: type[BaseException], tiny_model: Get, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(pipeline, step, stop)
    with pytest.raises(error):
        run_convert(tiny_model("relu", stock=True, max_position_embeddings=64), "-o", tmp_path / "o.gguf",
                    "--calibrate", "--calibrate-text", text)  # fmt: skip
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="signals of Unix")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_while_it_profiles(number: signal.Signals, tiny_model: Get, tmp_path: Path, text: Path) -> None:
    """The program itself: nothing is left after Ctrl-C or SIGTERM, and what SIGKILL left goes with the next run."""
    src = tiny_model("relu", stock=True, max_position_embeddings=64)
    out = tmp_path / "o.gguf"
    command = [sys.executable, "-m", "hotcold.runtime.cli", "convert", str(src), "-o", str(out), "--calibrate"]
    child = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        split = tmp_path / f".o.gguf.{child.pid}.parts" / "split.gguf"
        while child.poll() is None and not split.exists():
            time.sleep(0.01)
        child.send_signal(number)
        _, err = child.communicate()
    finally:
        child.kill()
        child.wait()
    assert child.returncode == {signal.SIGKILL: -9}.get(number, child.returncode) and b"Traceback" not in err
    if number == signal.SIGKILL:
        assert split.exists()
        run_convert(src, "-o", out, "--calibrate", "--calibrate-text", text, *CALIBRATE)
        assert [p.name for p in tmp_path.iterdir()] == ["o.gguf"]
    else:
        assert child.returncode in (130, 143) and not list(tmp_path.iterdir())


def test_stopped_while_it_trains(tiny_model: Get, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(model: Path, *args: Any, **options: Any) -> None:
        assert model.name == "sorted.gguf" and not model.with_name("split.gguf").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr("hotcold.placement.train.train_predictors", stop)
    with pytest.raises(KeyboardInterrupt):
        run_convert(tiny_model("relu", stock=True, max_position_embeddings=64), "-o", tmp_path / "o.gguf",
                    "--calibrate", "--calibrate-text", text, "--calibrate-tokens", "600")  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_intermediate_files_lie_in_one_folder_beside_the_result(
    tiny_model: Get, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def watch(path: Path, *args: Any, **options: Any) -> Any:
        seen.append((path, sorted(p.name for p in tmp_path.iterdir())))
        return profile_model(path, *args, **options)

    monkeypatch.setattr(pipeline, "profile_model", watch)
    src = tiny_model("relu", stock=True, max_position_embeddings=64)
    run_convert(src, "-o", tmp_path / "o.gguf", "--calibrate", "--calibrate-text", text, *CALIBRATE)
    folder = tmp_path / f".o.gguf.{os.getpid()}.parts"
    assert seen == [(folder / "split.gguf", [folder.name])]
    assert [p.name for p in tmp_path.iterdir()] == ["o.gguf"]


def test_what_a_killed_run_left_goes_with_the_next(tiny_model: Get, tmp_path: Path, text: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name in (f".o.gguf.{dead.pid}.parts", f".o.gguf.{os.getppid()}.parts", f".p.gguf.{dead.pid}.parts"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "split.gguf").write_text("half")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f".o.gguf.{dead.pid}0000000.parts").symlink_to(tmp_path / "elsewhere")
    src = tiny_model("relu", stock=True, max_position_embeddings=64)
    run_convert(src, "-o", tmp_path / "o.gguf", "--calibrate", "--calibrate-text", text, *CALIBRATE)
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == sorted([f".o.gguf.{os.getppid()}.parts", f".o.gguf.{dead.pid}0000000.parts",
                           f".p.gguf.{dead.pid}.parts", "elsewhere", "o.gguf"])  # fmt: skip


def test_convert_alone_does_not_load_placement() -> None:
    code = "import sys, hotcold.convert.main; sys.exit(any(m.startswith('hotcold.placement') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
