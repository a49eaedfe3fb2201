"""`hotcold plan`: bytes that add up, the plans side by side, operators with devices, and what it says without a GPU."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type
from small_models import Spec, all_of, write_model
from test_plan_vram import CARD, SPECS, counted, small_buffers  # noqa: F401 (a fixture)

from hotcold.placement.hardware import to_json
from hotcold.placement.memory import model_bytes
from hotcold.placement.place import show
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.gpu.device import DeviceUnavailable
from hotcold.runtime.gpu.memory import vram
from hotcold.runtime.gpu.placement import GpuPlacement, LayerPlacement
from hotcold.runtime.plan import make_plan
from hotcold.runtime.weights import load_weights

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    counted(folder / "m.gguf", SPECS["gated"])
    write_model(folder / "stock.gguf", Spec(layout="stock", activation="silu", **all_of(Type.Q8_0)))
    (folder / "card.json").write_text(to_json(CARD))
    return folder


@pytest.fixture
def plan(run: Run, folder: Path) -> Callable[..., tuple[int, str, str]]:
    def call(*options: object, name: str = "m.gguf") -> tuple[int, str, str]:
        return run("plan", folder / name, "--hardware", folder / "card.json", "--n-ctx", "64", *map(str, options))

    return call


def half(folder: Path) -> int:
    """A budget for attention and half of the FFN."""
    with open_gguf(folder / "m.gguf") as file:
        sizes = model_bytes(file, ModelConfig.from_gguf(file), 64)
    attention = CARD.gpu_context + sizes.on_gpu((True,) * 5, (0,) * 5, (False,) * 5)
    return attention + sum(layer.ffn for layer in sizes.layers) // 2


def test_tables(plan: Run, folder: Path) -> None:
    budget = half(folder)
    code, out, err = plan("--vram-budget", budget)
    assert code == 0 and not err
    lines = out.splitlines()
    assert f"({budget} bytes), context 64, on a [bold]card[/bold]" in lines[0]
    kinds = [line.split()[0] if line[0] != "*" else line.split()[1] for line in lines[2:7]]
    assert kinds == ["all", "keys", "predict", "layers", "cpu"]
    assert sum(line.startswith("* ") for line in lines) == 1 and "* keys" in out
    assert "chosen         plan keys: the fastest that is exact" in out
    assert "are needed for plan all" in out and "no layer has a predictor" in out
    assert f"of {budget} bytes)" in out


def test_tables_have_the_numbers_of_the_json(plan: Run, folder: Path) -> None:
    """Microseconds of each layer; VRAM by kind with its total, and what is left."""
    budget = half(folder)
    found = json.loads(plan("--vram-budget", budget, "--json")[1])
    lines = plan("--vram-budget", budget)[1].splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("layer "))
    headings = re.split(r"  +", lines[start].strip())
    rows = [re.split(r"  +", line.strip()) for line in lines[start + 1 : start + 6]]
    times = [[row[headings.index(name)] for name in ("T GPU us", "T CPU us", "T us")] for row in rows]
    assert times == [[f"{x[key]:.1f}" for key in ("gpu_us", "cpu_us", "us")] for x in found["layers"]]
    assert all(x["gpu_us"] > 0 for x in found["layers"]) and any(x["cpu_us"] > 0 for x in found["layers"])
    start = next(n for n, line in enumerate(lines) if line.strip() == "VRAM by kind")
    kinds = {line.split("  ")[0]: int(line.split()[-1]) for line in lines[start + 1 :] if line.strip()}
    assert kinds == found["memory"] | {"total": found["used"], "left of the budget": budget - found["used"]}


def test_json_adds_up(plan: Run, folder: Path) -> None:
    budget = half(folder)
    code, out, _ = plan("--vram-budget", budget, "--json")
    found = json.loads(out)
    assert code == 0 and found["budget"] == budget and found["n_ctx"] == 64 and found["chosen"] == "keys"
    with open_gguf(folder / "m.gguf") as file:
        config = ModelConfig.from_gguf(file)
        sizes, weights = model_bytes(file, config, 64), load_weights(file, config)
        layers = tuple(LayerPlacement(x["on_gpu"], x["hot"], x["keys_on_gpu"]) for x in found["layers"])
        plan_ = make_plan(config, weights, "exact", GpuPlacement("keys", layers, budget, 64))
        assert found["used"] == vram(plan_, 64, 64, CARD.gpu_context).total, "what the engine allocates"
    assert found["used"] == sum(found["memory"].values()) <= budget and found["memory"]["driver"] == CARD.gpu_context
    bound = CARD.gpu_context + sizes.workspace + sizes.cold + sizes.head + sum(x["bytes"] for x in found["layers"])
    assert found["used"] <= bound <= budget and bound - found["used"] < 8 << 20
    assert [p["plan"] for p in found["plans"]] == ["all", "keys", "predict", "layers", "cpu"]
    keys = found["plans"][1]
    assert keys["tokens_per_second"] == found["tokens_per_second"] and keys["used"] == found["used"]
    assert "reason" in found["plans"][0] and "operators" not in found


def test_a_plan_that_is_named(plan: Run) -> None:
    found = json.loads(plan("--vram-budget", "1GiB", "--gpu-plan", "layers", "--gpu-layers", "2", "--json")[1])
    assert found["chosen"] == "layers" and [layer["on_gpu"] for layer in found["layers"]] == [False] * 3 + [True] * 2
    assert json.loads(plan("--gpu-layers", "1", "--json")[1])["chosen"] == "layers"
    assert all(layer["on_gpu"] for layer in json.loads(plan("-ngl", "99", "--json")[1])["layers"])
    assert json.loads(plan("--json")[1])["budget"] == CARD.vram, "auto: the whole card"
    code, out, err = plan("--gpu-plan", "predict")
    assert code == 1 and not out and "--gpu-plan predict: sparsity predict: no layer has a predictor" in err
    code, _, err = plan("--vram-budget", "2GiB")
    assert code == 1 and "more than the 1.0 GiB of card" in err


def test_operators_have_devices_and_prerequisites(plan: Run, folder: Path) -> None:
    budget = half(folder)
    every = json.loads(plan("--vram-budget", budget, "--all-ops", "--json")[1])["operators"]
    assert [op["number"] for op in every] == list(range(len(every)))
    assert all(need < op["number"] for op in every for need in op["needs"])
    assert {op["device"] for op in every} == {"cpu", "gpu"}
    cold = [op for op in every if op["kind"] == "cold"]
    merges = [op for op in every if op["kind"] == "merge" and op["layer"] in {c["layer"] for c in cold}]
    assert cold and all(op["device"] == "cpu" for op in cold)
    for op, merge in zip(cold, merges, strict=True):
        split = next(o for o in every if o["kind"] == "split" and o["layer"] == op["layer"])
        assert split["number"] in op["needs"] and op["number"] in merge["needs"]
    code, out, _ = plan("--vram-budget", budget, "--ops")
    assert code == 0 and " cold (" in out and out.count(" attend ") < 5, "one layer of each kind"
    assert "layers" in out or "layer " in out


def test_operators_read_what_the_layers_cost(plan: Run, folder: Path) -> None:
    """Everything on the GPU: the operators of a layer take the layer's time but for launches."""
    found = json.loads(plan("--vram-budget", "1GiB", "--all-ops", "--json")[1])
    assert found["chosen"] == "all"
    for layer in found["layers"]:
        own = sum(op["seconds"] for op in found["operators"] if op["layer"] == layer["layer"])
        assert own * 1e6 == pytest.approx(layer["us"] - CARD.gpu_overhead * 1e6, rel=0.05)


def test_stock_files(plan: Run) -> None:
    code, out, _ = plan("--vram-budget", "1GiB", name="stock.gguf")
    assert code == 0 and "* all" in out and "the stock layout keeps no neuron's rows together" in out
    assert plan("--vram-budget", "1GiB", "--gpu-plan", "layers", "--ops", name="stock.gguf")[0] == 0
    code, _, err = plan("--gpu-plan", "keys", name="stock.gguf")
    assert code == 1 and "only whole layers can be on the GPU" in err and err.count("\n") == 1


def test_without_a_gpu_it_names_presets(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(ordinal: int = 0) -> None:
        raise DeviceUnavailable("no driver")

    monkeypatch.setattr("hotcold.runtime.gpu.device.open_device", none)
    code, out, err = run("plan", folder / "m.gguf")
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert "no GPU to plan for (no driver): name a card with --hardware: rtx-3060-12g, rtx-4070-ti" in err


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (("--vram-budget", "8G"), 2, "must be a size"),
        (("--vram-budget", "1GiB", "--vram-budget", "2GiB"), 2, "only once"),
        (("--gpu-plan", "half"), 2, "invalid choice"),
        (("--gpu-layers", "0"), 2, "from 1"),
        (("--hardware", "rtx-1"), 1, "neither a file nor a preset"),
    ],
)
def test_wrong_options(plan: Run, options: tuple[str, ...], status: int, words: str) -> None:
    code, out, err = plan(*options)
    assert code == status and words in err and not out


def test_no_model(run: Run, tmp_path: Path) -> None:
    code, _, err = run("plan", tmp_path / "none.gguf", "--hardware", "rtx-4090")
    assert code == 1 and "none.gguf" in err and err.count("\n") == 1


def test_a_reader_that_went_away_ends_it_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.raises(BrokenPipeError):  # main() makes 141 of it
        show(["a table"])
