"""The bytes that a plan says are the bytes that an engine takes; budgets that are too small; memory that is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu.build import compiler
from cuda_on_cpu.sim_device import SimDevice
from gguf import GGMLQuantizationType as Type
from hybrid import CPU, config_of, hybrid, part
from small_models import Spec, all_of, write_model

from hotcold.runtime.engine import Engine
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.gpu import choose, device, memory
from hotcold.runtime.gpu.choose import RESERVE, GpuOptions, Wanted
from hotcold.runtime.gpu.engine import HybridEngine
from hotcold.runtime.gpu.placement import GpuPlacement, last_layers
from hotcold.runtime.plan import make_plan
from hotcold.runtime.weights import load_weights

pytestmark = pytest.mark.skipif(not compiler()[0], reason="no C++ compiler")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf", Spec(patterns=("free",) * 3, biases=True, **all_of(Type.Q8_0)))


def planned(path: Path, placement: GpuPlacement, n_ctx: int = 64) -> memory.Vram:
    with open_gguf(path) as file:
        config = config_of(path)
        plan = make_plan(config, load_weights(file, config), "auto", placement)
        return memory.vram(plan, n_ctx, min(256, n_ctx), SimDevice.context_bytes)


@pytest.mark.parametrize("layers", [(CPU, CPU, part(96)), (CPU, part(32, True), part(0)), (part(96),) * 3])
def test_the_peak_is_what_was_planned(layers: Any, path: Path) -> None:
    """To the byte, while a model is loaded, reads a prompt and goes on."""
    gpu = SimDevice()
    with hybrid(path, layers, device=gpu) as engine:
        engine.forward(list(range(40)))
        engine.forward([1])
        need = planned(path, engine.placement)
        assert gpu.peak == need.weights + need.state
        assert engine.vram_bytes == need.total == gpu.peak + gpu.context_bytes
        assert 0 <= need.weights + need.state - sum(need.by_kind.values()) < 2 * memory.PAGE
    gpu.close()


def test_the_caches_bytes_grow_with_the_context_alone(path: Path) -> None:
    config = config_of(path)
    small, large = (planned(path, last_layers(config, 2, budget=0, n_ctx=n), n) for n in (1024, 4096))
    per_token = 2 * 2 * config.n_head_kv * config.head_dim * 2  # layers, K and V, heads, halves
    assert large.by_kind["kv"] - small.by_kind["kv"] == per_token * 3072
    assert large.weights == small.weights


def test_every_neuron_of_a_hot_set_costs_its_rows(path: Path) -> None:
    """Rows of Q8_0: 34 bytes for 32 weights."""
    config = config_of(path)
    fewer, more = (
        planned(path, GpuPlacement("keys", (CPU, CPU, part(hot)), 0, 64)).by_kind for hot in (32, 64)
    )
    row = config.n_embd // 32 * 34
    for kind, rows in (("values", 2 * 32), ("keys", 32)):  # but for the alignment of two arrays
        assert abs(more[kind] - fewer[kind] - rows * row) < 2 * memory.ALIGNMENT


# ------------------------------------------------------------------ choosing


def opened(path: Path, card: SimDevice, notes: list[str], **options: Any) -> Engine:
    return Engine.open(path, threads=1, n_ctx=64, notify=notes.append, gpu=GpuOptions(device=card, **options))


def test_as_many_whole_layers_as_fit(path: Path) -> None:
    config, found = config_of(path), []
    gpu = SimDevice()
    sizes = [planned(path, last_layers(config, n, budget=0, n_ctx=64)).total for n in range(1, 4)]
    for budget in (sizes[0] - 1, sizes[0], sizes[2], sizes[2] + memory.PAGE):
        notes: list[str] = []
        with opened(path, gpu, notes, vram_budget=budget) as engine:
            found.append(config.n_layer - engine.placement.first if isinstance(engine, HybridEngine) else 0)
            engine.forward([1])
        assert gpu.used == 0 and (found[-1] or any("everything runs on the CPU" in note for note in notes))
        gpu.peak = 0
    assert found[0] == 0 and found[1] >= 1 and found[2:] == [3, 3]
    gpu.close()


def test_layers_by_number_and_everything_on_the_cpu(path: Path) -> None:
    gpu = SimDevice()
    for n, first in ((1, 2), (99, 0)):
        with opened(path, gpu, [], layers=n) as engine:
            assert isinstance(engine, HybridEngine) and engine.placement.first == first
    for options in ({"layers": 0}, {"gpu": "off"}):
        with opened(path, gpu, [], **options) as engine:
            assert type(engine) is Engine
    with pytest.raises(HotcoldError, match="--gpu-layers is for --gpu-plan layers, not keys"):
        GpuOptions(layers=1, plan="keys")
    with pytest.raises(HotcoldError, match="what is to be on the GPU needs .* --vram-budget is 2 MiB"):
        opened(path, gpu, [], layers=2, vram_budget=2 << 20)
    gpu.close()


def test_a_solver_is_asked_for_the_budget_and_again_where_its_sizes_are_off(path: Path) -> None:
    gpu, asked = SimDevice(), []
    config = config_of(path)
    need = planned(path, last_layers(config, 3, budget=0, n_ctx=64)).total

    def place(wanted: Wanted) -> tuple[GpuPlacement, str]:
        asked.append(wanted.budget)
        n = 3 if len(asked) == 1 else 1
        return last_layers(config, n, budget=wanted.budget, n_ctx=wanted.n_ctx), "exact"

    with opened(path, gpu, [], place=place, vram_budget=need - 1) as engine:
        one = planned(path, last_layers(config, 1, budget=0, n_ctx=64)).total
        if one < need:
            assert isinstance(engine, HybridEngine) and engine.placement.first == 2
            assert asked == [need - 1, need - 2]
    gpu.close()


def test_a_solver_may_choose_dense(path: Path) -> None:
    """Where nothing is asked for: the plan has that mode, and says that it was chosen."""
    gpu, notes, asked = SimDevice(), [], []

    def place(wanted: Wanted) -> tuple[GpuPlacement, str]:
        asked.append(wanted.sparsity)
        mode = "dense" if wanted.sparsity == "auto" else wanted.sparsity
        return last_layers(wanted.config, 3, budget=wanted.budget, n_ctx=wanted.n_ctx, kind="all"), mode

    logits = {}
    for sparsity in ("auto", "dense", "exact"):
        with Engine.open(path, sparsity=sparsity, threads=1, n_ctx=64, notify=notes.append,
                         gpu=GpuOptions(device=gpu, place=place)) as engine:  # fmt: skip
            assert engine.sparsity == ("exact" if sparsity == "exact" else "dense")
            assert sorted({op.mode for op in engine.plan.token} - {""}) == (
                ["keys"] if sparsity == "exact" else ["dense"])  # fmt: skip
            logits[sparsity] = engine.forward([3])
    assert asked == ["auto", "dense", "exact"]
    assert [note for note in notes if note.startswith("sparsity: ")] == [
        "sparsity: dense instead of exact: faster with what is on the GPU", "sparsity: dense (asked for)",
        "sparsity: exact (asked for)",
    ]  # fmt: skip
    assert (logits["auto"] == logits["dense"]).all()
    np.testing.assert_allclose(logits["exact"], logits["dense"], rtol=1e-4, atol=1e-5)
    with pytest.raises(HotcoldError, match="--sparsity predict: no layer of this file has a predictor"):
        Engine.open(path, sparsity="predict", gpu=GpuOptions(device=gpu, place=place))
    assert len(asked) == 3  # no solver works on what cannot be
    gpu.close()


def test_an_automatic_budget_leaves_something_to_others(path: Path) -> None:
    gpu, asked = SimDevice(memory=1 << 30), []

    def place(wanted: Wanted) -> tuple[GpuPlacement, str]:
        asked.append(wanted.budget)
        return last_layers(wanted.config, 3, budget=wanted.budget, n_ctx=wanted.n_ctx), "exact"

    with opened(path, gpu, [], place=place):
        assert asked == [(1 << 30) - RESERVE]
    gpu.close()


def test_memory_taken_by_others_is_an_error_or_a_smaller_plan(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(path)
    need = planned(path, last_layers(config, 3, budget=0, n_ctx=64)).total
    gpu = SimDevice(memory=need - (1 << 20))
    with pytest.raises(HotcoldError, match="1 MiB are missing: another program may use the GPU"):
        opened(path, gpu, [], placement=last_layers(config, 3, budget=need, n_ctx=64))
    free = [SimDevice.memory(gpu)[0] + RESERVE + (1 << 21)]  # what is seen first is taken a moment later

    def shrinking() -> tuple[int, int]:
        return (free.pop() if free else SimDevice.memory(gpu)[0]), gpu.total

    notes: list[str] = []
    monkeypatch.setattr(gpu, "memory", shrinking)
    monkeypatch.setattr(choose, "RESERVE", 1 << 20)
    with opened(path, gpu, notes) as engine:
        engine.forward([1])
    assert any("have taken" in note and "making a smaller plan" in note for note in notes)
    gpu.close()


def test_memory_that_goes_while_loading_is_an_error_and_all_is_given_back(path: Path) -> None:
    gpu = SimDevice()
    take, taken = gpu.empty, []

    def second_fails(shape: Any, dtype: Any) -> Any:
        taken.append(shape)
        return take((1 << 40,), dtype) if len(taken) == 2 else take(shape, dtype)

    gpu.empty = second_fails  # type: ignore[method-assign]
    with pytest.raises(HotcoldError, match="MiB are wanted for the KV cache and activations, .* MiB are missing"):
        opened(path, gpu, [], layers=3, vram_budget=gpu.memory()[1])
    assert gpu.used == 0
    taken.clear()
    notes: list[str] = []
    opened(path, gpu, notes, layers=3).close()  # nobody has named a budget: again, with what is there now
    assert any("other programs have taken VRAM" in note for note in notes)
    gpu.close()


def test_options_that_cannot_be_are_told_at_once() -> None:
    for wrong, said in ((dict(executor="fast"), "executor 'fast' is unknown"), (dict(layers="2"), "whole number"),
                        (dict(vram_budget="8GiB"), "whole number"), (dict(gpu="off", vram_budget=1 << 30), "--gpu off"),
                        (dict(gpu="off", layers=3), "--gpu off")):  # fmt: skip
        with pytest.raises(HotcoldError, match=said):
            GpuOptions(**wrong)  # type: ignore[arg-type]


def test_without_a_gpu_the_reason_is_told_and_required_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(ordinal: int = 0) -> Any:
        raise device.DeviceUnavailable("no driver; install one")

    monkeypatch.setattr(device, "open_device", none)
    monkeypatch.setattr(choose, "hardware_exists", lambda: False)
    for options, told in ((GpuOptions(), False), (GpuOptions(gpu="auto"), True), (GpuOptions(vram_budget=1), True)):
        notes: list[str] = []
        with Engine.open(path, threads=1, notify=notes.append, gpu=options) as engine:
            assert type(engine) is Engine
        assert ("no GPU: no driver; install one; everything runs on the CPU" in notes) == told
    with pytest.raises(HotcoldError, match="--gpu required, but there is no GPU: no driver; install one"):
        Engine.open(path, threads=1, gpu=GpuOptions(gpu="required"))


@pytest.mark.parametrize(("options", "said"), [
    ({"gpu": "required", "layers": 0}, "--gpu required, but --gpu-layers 0 leaves it nothing to do"),
    ({"gpu": "off", "trace": "t.json"}, "--trace is of a run on the GPU"),
    ({"layers": 0, "trace": "t.json"}, "--trace is of a run on the GPU"),
    ({"layers": -1}, "--gpu-layers -1: must be 0 or more"), ({"vram_budget": 0}, "--vram-budget 0: must be 1 byte"),
    ({"vram_budget": -5}, "--vram-budget -5: "), ({"patience": 0.0}, "patience of 0.0 s"),
    ({"patience": float("nan")}, "patience of nan s"), ({"patience": float("inf")}, "patience of inf s"),
])  # fmt: skip
def test_options_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(HotcoldError, match=said):
        GpuOptions(**options)


def test_a_placement_that_finds_no_gpu_is_told(path: Path) -> None:
    assert GpuOptions(placement=last_layers(config_of(path), 1, budget=1 << 30, n_ctx=64)).asked


def test_what_the_gpu_cannot_compute_is_told(tmp_path: Path) -> None:
    path = write_model(tmp_path / "f32.gguf", Spec())
    gpu, notes = SimDevice(), []  # type: ignore[var-annotated]
    with opened(path, gpu, notes, layers=2) as engine:
        assert type(engine) is Engine
    assert any("is F32, the GPU computes F16" in note and "everything runs on the CPU" in note for note in notes)
    with pytest.raises(HotcoldError, match="--gpu required, but nothing is computed there: token_embd.weight is F32"):
        opened(path, gpu, [], layers=2, gpu="required")
    gpu.close()
