"""The ways to a GPU: options of the commands, Model.open, what they print; the timeline of a run."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu.build import compiler
from cuda_on_cpu.sim_device import SimDevice
from gguf import GGMLQuantizationType as Type
from hybrid import CPU, config_of, hybrid, part, steps
from small_models import Spec, all_of, write_model
from tiny import token_ids

from hotcold.placement import machine
from hotcold.placement.hardware import PRESETS
from hotcold.runtime import Model
from hotcold.runtime.arguments import add_gpu_options, budget, gpu_options
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gpu import choose, device
from hotcold.runtime.gpu.choose import EXECUTORS, GpuOptions
from hotcold.runtime.gpu.engine import HybridEngine
from hotcold.runtime.gpu.placement import last_layers

pytestmark = pytest.mark.skipif(not compiler()[0], reason="no C++ compiler")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimDevice]:
    """The simulated GPU is the machine's. A command closes it at its end."""
    made = SimDevice(memory=1 << 30)
    monkeypatch.setattr(device, "open_device", lambda ordinal=0: made)
    monkeypatch.setattr(machine, "machine_hardware", lambda say: PRESETS["rtx-2080-ti"])
    yield made
    made.close()


@pytest.fixture
def path(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("relu", outtype="f16")


def test_options_are_those_of_the_runtime() -> None:
    parser = argparse.ArgumentParser()
    add_gpu_options(parser)
    by_name = {action.dest: action for action in parser._actions}
    assert tuple(by_name["gpu"].choices or ()) == choose.MODES
    assert tuple(by_name["gpu_plan"].choices or ()) == choose.PLANS
    assert tuple(by_name["executor"].choices or ()) == EXECUTORS
    typed = ["--vram-budget", "1.5GiB", "--gpu-plan", "keys", "--executor", "stream", "--trace", "t.json"]
    found = gpu_options(parser.parse_args(typed))
    assert found == GpuOptions(None, 3 << 29, "keys", None, "stream", "t.json") and found.asked
    assert gpu_options(parser.parse_args(["-ngl", "3"])).layers == 3
    assert gpu_options(parser.parse_args(["--vram-budget", "auto"])) == GpuOptions("auto")
    assert not gpu_options(parser.parse_args([])).asked


@pytest.mark.parametrize("text", ["", "8 GiBs", "-1", "nan", "1e9", "0", "1_0", "99999999GiB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be a size such as 8GiB"):
        budget(text)


def test_run_says_what_is_where_and_what_was_skipped(path: Path, card: SimDevice, run: Run) -> None:
    typed = ("run", path, "-p", "once upon", "-n", "4", "--temp", "0", "-t", "2", "-c", "64")
    code, plain, _ = run(*typed, "--gpu", "off")
    assert code == 0
    for options in (("-ngl", "2"), ("--gpu-plan", "keys"), ("--gpu-plan", "layers", "--executor", "stream")):
        fresh = SimDevice(memory=1 << 30)
        card.__dict__.update(fresh.__dict__)  # the command before has closed it
        code, out, err = run(*typed, "--gpu", "required", *options)
        assert (code, out) == (0, plain), err
        assert "GPU: " in err and "of VRAM" in err and "GPU = layer" in err
    assert card.launches["merge"] or card.launches["axpy_down_f16"]
    card.__dict__.update(SimDevice(memory=1 << 30).__dict__)
    code, out, err = run(*typed, "--vram-budget", "auto")
    assert (code, out) == (0, plain)
    assert "the best plan for 768 MiB of VRAM has nothing on it; everything runs on the CPU" in err, "it is too small"


def test_without_a_gpu_commands_run_and_say_so_if_asked(path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(ordinal: int = 0) -> Any:
        raise device.DeviceUnavailable("this is a test")

    monkeypatch.setattr(device, "open_device", none)
    monkeypatch.setattr(choose, "hardware_exists", lambda: False)
    typed = ("run", path, "-p", "a", "-n", "1", "-t", "1", "-c", "32")
    code, _, err = run(*typed)
    assert code == 0 and "GPU" not in err
    for options in (("--gpu", "auto"), ("--vram-budget", "8GiB"), ("-ngl", "99")):
        code, _, err = run(*typed, *options)
        assert code == 0 and "no GPU: this is a test; everything runs on the CPU" in err
    code, _, err = run(*typed, "--gpu", "required")
    assert code == 1 and err.strip().endswith("--gpu required, but there is no GPU: this is a test")
    code, _, err = run(*typed, "-ngl", "1", "--gpu-plan", "keys")
    assert code == 1 and "--gpu-layers is for --gpu-plan layers" in err


def test_stats_of_a_conversation_tell_of_the_gpu(path: Path, card: SimDevice, run: Run) -> None:
    code, _, err = run("chat", path, "-n", "2", "-t", "1", "-c", "128", "-ngl", "1", stdin=b"hello\n/stats\n")
    assert code == 0
    assert "GPU: layer 2 on simulated" in err and "MiB of VRAM; no neurons left to the CPU" in err
    typed = ("chat", path, "-n", "2", "-t", "1", "-c", "128", "--gpu-plan", "keys", "--vram-budget")
    card.__dict__.update(SimDevice(memory=1 << 30).__dict__)
    code, _, err = run(*typed, "1MiB")
    least = re.search(r"at least .* \((\d+) bytes\) are needed", err)
    assert code == 1 and least is not None
    card.__dict__.update(SimDevice(memory=1 << 30).__dict__)
    code, _, err = run(*typed, int(least[1]) + (1 << 18), stdin=b"hello\n/stats\n")  # key rows and some neurons more
    assert code == 0 and re.search(
        r"GPU: layer 2 on simulated, \d+ MiB of VRAM; \d+\.\d % of their neurons by the CPU, "
        r"1\.0 waits and transfers per token, 0\.0 % of layers skipped\n", err), err  # fmt: skip


def test_bench_uses_a_gpu_only_if_asked(path: Path, card: SimDevice, run: Run) -> None:
    typed = ("bench", path, "-p", "0", "-n", "2", "-r", "1", "-t", "1", "--no-bandwidth", "-o", "json")
    code, out, _ = run(*typed)
    (found,) = json.loads(out)
    assert (found["backends"], found["n_gpu_layers"], found["gpu_info"]) == ("CPU", 0, "")
    code, out, err = run(*typed, "-ngl", "2")
    (found,) = json.loads(out)
    assert (found["backends"], found["n_gpu_layers"], found["gpu_plan"]) == ("CUDA+CPU", 2, "layers"), err
    assert found["gpu_info"] == "simulated" and found["vram"] > 0 and found["gpu_skips"] == 1.0


def test_the_python_interface_takes_words_and_options(path: Path, card: SimDevice) -> None:
    with Model.open(path, threads=1, n_ctx=32, gpu="off") as model:
        wanted = model.logits([1, 2])
    with pytest.raises(HotcoldError, match="gpu 'yes' is unknown, choose from auto, off, required"):
        Model.open(path, gpu="yes")
    with pytest.raises(HotcoldError, match="gpu must be off, auto, required, None or GpuOptions"):
        Model.open(path, gpu=8 << 30)  # type: ignore[arg-type]
    options = GpuOptions(device=card, placement=last_layers(config_of(path), 2, budget=0, n_ctx=32))
    with Model.open(path, threads=1, n_ctx=32, gpu=options) as model:
        assert isinstance(model.session.engine, HybridEngine)
        np.testing.assert_allclose(model.logits([1, 2]), wanted, rtol=1e-3, atol=1e-3)
        assert "".join(model.generate([1, 2], max_tokens=2, seed=1)) is not None
        assert model.stats.layers is not None and model.stats.layers.hybrid is not None


# ------------------------------------------------------------------ the timeline


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_timeline_of_both_sides(executor: str, path: Path, tmp_path: Path) -> None:
    out, tokens = tmp_path / "trace.json", token_ids(3)
    with hybrid(path, (CPU, part(300, True), part(1000)), executor=executor) as engine:
        wanted = steps(engine, tokens)
    with hybrid(path, (CPU, part(300, True), part(1000)), executor=executor, trace=out) as engine:
        assert np.array_equal(steps(engine, tokens), wanted), "looking changes nothing"
        n_steps = len(engine.plan.gpu(False))
    events = json.loads(out.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    gpu = [e for e in spans if e["pid"] == 2]
    assert len(gpu) == 3 * n_steps and all(e["dur"] > 0 for e in gpu)
    whole = [e for e in spans if e["name"].startswith("token at")]
    assert [e["name"] for e in whole] == ["token at 0", "token at 1", "token at 2"]
    slack = 5e3  # us: how far apart the clocks may seem on a busy machine
    for token, first in zip(whole, range(0, len(gpu), n_steps), strict=True):
        for e in gpu[first : first + n_steps]:
            assert token["ts"] - slack <= e["ts"] <= e["ts"] + e["dur"] <= token["ts"] + token["dur"] + slack, e["name"]
    colds = [e for e in spans if e["name"] == "cold 1"]
    assert {e["tid"] for e in colds} <= {1, 2} and len(colds) >= 3
    assert not [e for e in spans if e["name"] == "cold 2"], "the whole layer is on the GPU"
    assert {e["name"] for e in gpu} >= {"matmul attn_q 1", "attend 2", "split 1", "merge 1", "matmul output"}
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names >= {"CPU", "GPU: simulated", "worker 0", "worker 1", "stream"}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_timeline_tells_of_waits_and_skips(executor: str, tmp_path: Path) -> None:
    """Whatever a worker waited for, it had neurons to compute then, or nothing, as in the first layer here."""
    out = tmp_path / "trace.json"
    path = write_model(tmp_path / "m.gguf", Spec(patterns=("off", "on"), **all_of(Type.F16)))
    with hybrid(path, (part(32, True), part(32, True)), executor=executor, trace=out) as engine:
        steps(engine, [1, 2, 3])
    events = [e for e in json.loads(out.read_text())["traceEvents"] if e["pid"] == 1 and e["ph"] != "M"]
    waits = [e for e in events if e["name"].startswith("wait")]
    after = [e for e in events if e["name"].startswith(("cold", "skip"))]
    assert waits and len(waits) == len(after)
    for wait in waits:
        (then,) = (e for e in after if e["tid"] == wait["tid"] and abs(e["ts"] - wait["ts"] - wait["dur"]) < 1e-2)
        assert then["name"].split()[1] == wait["name"].split()[1] == str(wait["args"]["layer"])
    colds, skips = ([e for e in after if e["name"] == name] for name in ("cold 1", "skip 0"))
    assert len(colds) >= 3 and not [e for e in after if e["name"] == "cold 0"]
    if executor == "stream":
        assert not skips, "the host sees that the list is empty, and asks no worker"
    else:
        assert len(skips) >= 3 and all(e["ph"] == "i" and e["s"] == "t" and e["tid"] in (1, 2) for e in skips)


def test_a_timeline_of_a_prompt_and_where_it_cannot_be_written(path: Path, tmp_path: Path) -> None:
    out, layers = tmp_path / "trace.json", (CPU, part(300, True), part(300, True))
    with hybrid(path, layers, blocks_from=6) as engine:
        wanted = engine.forward(token_ids(40), logits="all")
    with hybrid(path, layers, trace=out, blocks_from=6) as engine:
        assert np.array_equal(engine.forward(token_ids(40), logits="all"), wanted), "looking changes nothing"
        engine.forward(token_ids(8), logits="none")
        n_steps = len(engine.plan.gpu(True))
    spans = [e for e in json.loads(out.read_text())["traceEvents"] if e["ph"] == "X"]
    gpu, blocks = [e for e in spans if e["pid"] == 2], [e for e in spans if e["name"].startswith("block of ")]
    assert len(gpu) == len(blocks) * n_steps - 2, "of the last block no logits are wanted"
    assert {e["name"] for e in gpu} >= {"begin", "attend 1", "ffn 2", "matmul output"}
    assert len([e for e in spans if e["name"] == "layers of the CPU"]) == len(blocks)
    slack, ends = 5e3, [e["ts"] + e["dur"] for e in blocks]  # us: how far apart the clocks may seem
    assert blocks[0]["ts"] - slack <= gpu[0]["ts"] and gpu[-1]["ts"] + gpu[-1]["dur"] <= ends[-1] + slack
    with pytest.raises(HotcoldError, match="no such folder"):
        with hybrid(path, (part(300),) * 3, trace=tmp_path / "nowhere" / "t.json"):
            pass


def test_a_timeline_that_is_too_long_says_so(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, notes = tmp_path / "trace.json", []  # type: ignore[var-annotated]
    monkeypatch.setattr("hotcold.runtime.gpu.trace.MAX_RUNS", 3)
    with hybrid(path, (CPU, part(300, True), part(1000)), trace=out, blocks_from=6, notes=notes) as engine:
        engine.forward(token_ids(8))
        steps(engine, token_ids(5))
    found = json.loads(out.read_text())
    assert [e["name"] for e in found["traceEvents"] if e["ph"] == "X" and " at " in e["name"]] == [
        "block of 8 tokens at 0", "token at 8", "token at 9"]  # fmt: skip
    assert found["otherData"] == {"tokens and blocks": 3, "left out after them": 3}
    told = [note for note in notes if note.startswith("--trace")]
    assert told == [f"--trace {out}: has the first 3 tokens and blocks of prompts, 3 more are left out"]
