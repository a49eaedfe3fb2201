"""placement/choose.py: the fastest plan that is exact, one that was asked for, or the file's own; and why."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from small_models import Spec, all_of, write_model
from test_plan_vram import CARD, HALF, SPECS, counted, frequencies, small_buffers  # noqa: F401 (a fixture)

from hotcold.placement.choose import candidates, choose_placement, pick, placer, solve_budget
from hotcold.placement.hardware import PRESETS, Hardware
from hotcold.placement.identity import model_id
from hotcold.placement.memory import LayerBytes, ModelBytes, model_bytes
from hotcold.placement.placement_index import placement_metadata
from hotcold.placement.plan_model import PlanModel, read_model
from hotcold.placement.plan_vram import place_on
from hotcold.placement.rewrite import rewrite
from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.gpu.choose import Wanted
from hotcold.runtime.gpu.memory import vram
from hotcold.runtime.gpu.placement import check
from hotcold.runtime.plan import make_plan
from hotcold.runtime.weights import load_weights

N_CTX = 64


def large(n_layer: int = 32, n_ff: int = 11008, n_embd: int = 4096, mean: float = 0.1, **changes: Any) -> PlanModel:
    """A model of a real size, without a file: Q4_0, Zipf-like frequencies."""
    row = n_embd // 32 * 18
    layer = LayerBytes(n_ff, 4 * n_embd * row, 4096 * 4 * n_embd, 0, row, 2 * row, False)
    f = np.arange(1, n_ff + 1.0) ** -0.7
    f = np.minimum(1.0, f * mean / f.mean())
    fields: dict[str, Any] = {
        "sizes": ModelBytes((layer,) * n_layer, 32000 * row, 32000 * row, False, 50 << 20), "n_ctx": 4096,
        "n_embd": n_embd, "n_vocab": 32000, "window": (0,) * n_layer, "gated": True, "split": True, "fires": True,
        "by_key": True, "frequency": (f,) * n_layer, "density": (None,) * n_layer,
        "gpu_from": {"exact": 0, "predict": 0},
    }  # fmt: skip
    return PlanModel(**fields | changes)


def predicting(model: PlanModel, density: float = 0.15) -> PlanModel:
    layers = tuple(dataclasses.replace(layer, predictor=4 << 20) for layer in model.sizes.layers)
    return dataclasses.replace(model, sizes=dataclasses.replace(model.sizes, layers=layers),
                               density=(density,) * model.n_layer)  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return counted(tmp_path_factory.mktemp("m") / "m.gguf", SPECS["gated"])


def choose(path: Path, budget: int, hardware: Hardware = CARD, **options: Any) -> Any:
    with open_gguf(path) as file:
        return choose_placement(file, ModelConfig.from_gguf(file), budget, N_CTX, hardware, **options)


def test_everything_fits(path: Path) -> None:
    choice = choose(path, CARD.vram)
    assert choice.gpu.kind == "all" and choice.sparsity == "exact"
    assert choice.why.startswith("plan all: the fastest that is exact (")
    assert [(layer.on_gpu, layer.hot) for layer in choice.gpu.layers] == [(True, n) for n in SPECS["gated"].neurons()]
    assert choice.gpu.budget == CARD.vram and choice.gpu.n_ctx == N_CTX


def test_a_budget_in_between_is_shared(path: Path) -> None:
    with open_gguf(path) as file:
        config = ModelConfig.from_gguf(file)
        sizes = model_bytes(file, config, N_CTX)
        attention = CARD.gpu_context + sizes.on_gpu((True,) * 5, (0,) * 5, (False,) * 5)
        half = attention + sum(layer.ffn for layer in sizes.layers) // 2
        choice = choose_placement(file, config, half, N_CTX, CARD)
        check(config, choice.gpu, choice.sparsity)
    assert choice.gpu.kind == "keys" and choice.placement.used <= half
    times = {c.kind: c.placement.t_token for c in choice.candidates if c.placement is not None}
    assert set(times) == {"keys", "layers", "cpu"} and min(times, key=times.__getitem__) == "keys"
    (whole,) = (c for c in choice.candidates if c.kind == "all")
    assert whole.placement is None and "are needed for plan all" in whole.reason
    one = choose(path, half, n_layers=1)
    assert one.gpu.kind == "layers" and sum(layer.on_gpu for layer in one.gpu.layers) == 1
    assert one.why == "plan layers: asked for"


def test_a_plan_that_is_asked_for(path: Path) -> None:
    for kind in ("all", "keys", "layers"):
        choice = choose(path, CARD.vram, kind=kind)
        assert choice.gpu.kind == kind and choice.why == f"plan {kind}: asked for"
    with pytest.raises(HotcoldError, match="--gpu-plan predict: sparsity predict: no layer has a predictor"):
        choose(path, CARD.vram, kind="predict")
    with pytest.raises(HotcoldError, match="--gpu-plan all: .* at least .* are needed for plan all"):
        choose(path, 2 << 20, kind="all")
    with pytest.raises(HotcoldError, match="--gpu-plan keys: not for --sparsity dense"):
        choose(path, CARD.vram, kind="keys", sparsity="dense")
    dense = choose(path, CARD.vram, sparsity="dense")
    assert dense.sparsity == "dense" and dense.gpu.kind == "all"
    with pytest.raises(HotcoldError, match="--gpu-layers 6: allowed are 1 to the model's 5"):
        choose(path, CARD.vram, kind="layers", n_layers=6)
    with pytest.raises(HotcoldError, match=r"5 layers .* of which .* are KV cache"):
        choose(path, 2 << 20, kind="layers", n_layers=5)


def test_too_small_a_budget_stays_on_the_cpu_and_says_so(path: Path) -> None:
    choice = choose(path, 1 << 20)
    assert choice.gpu.kind == "layers" and not any(layer.on_gpu for layer in choice.gpu.layers)
    assert choice.why.startswith("nothing on the GPU: --vram-budget 1.0 MiB: at least ") and "\n" not in choice.why
    assert choice.placement.used == 0
    slow = dataclasses.replace(CARD, gpu_bandwidth=1e9)
    assert "the CPU alone is faster than any plan" in choose(path, CARD.vram, slow).why


def test_stock_models_have_whole_layers(tmp_path: Path) -> None:
    stock = write_model(tmp_path / "m.gguf", Spec(layout="stock", activation="silu", **all_of(Type.Q4_0)))
    with open_gguf(stock) as file:
        config = ModelConfig.from_gguf(file)
        sizes = model_bytes(file, config, N_CTX)
    one = CARD.gpu_context + sizes.workspace + sizes.head + sizes.layers[1].fixed + sizes.layers[1].ffn
    choice = choose(stock, one)
    assert choice.gpu.kind == "layers" and [layer.hot for layer in choice.gpu.layers] == [0, 96]
    assert choice.sparsity == "dense" and "only the last 1 of 2 layers are on the GPU" in choice.notes[0]
    assert choose(stock, CARD.vram).gpu.kind == "all"


def test_nobody_counted(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", Spec(n_ff=256, **HALF))
    choice = choose(path, CARD.vram, kind="keys")
    assert choice.notes[0].startswith("how often neurons fire is not known: 50% of them are assumed")
    told = Spec(n_ff=256, metadata={schema.KEY_SPARSITY: [0.9, 0.8]}, **HALF)
    with open_gguf(write_model(tmp_path / "told.gguf", told)) as file:
        model = read_model(file, ModelConfig.from_gguf(file), N_CTX)
    assert [f[0] for f in model.frequency] == pytest.approx([0.1, 0.2]) and "only how many do" in model.notes[0]


def test_predict_is_never_chosen_unasked() -> None:
    model, card = predicting(large()), PRESETS["rtx-3060-12g"]
    budget = 3 << 30
    found = candidates(model, card, budget, every=True)
    assert [c.kind for c in found] == ["all", "keys", "predict", "layers", "cpu"]
    speed = {c.kind: c.placement.tokens_per_second for c in found if c.placement is not None}
    assert speed["predict"] > speed["keys"] > speed["layers"]
    assert pick(found, "auto", "auto", budget)[0].kind == "keys"
    assert pick(found, "auto", "predict", budget)[0].kind == "predict"
    placement, why = pick(found, "predict", "auto", budget)
    assert placement.sparsity == "predict" and why == "plan predict: asked for"


def test_every_plan_keeps_the_budget_and_more_is_never_slower() -> None:
    model, card = predicting(large()), PRESETS["rtx-3060-12g"]
    before: dict[str, float] = {}
    for budget in np.linspace(1.5 * 2**30, 11 * 2**30, 6).astype(int).tolist():
        for c in candidates(model, card, budget, every=True):
            if c.placement is None:
                continue
            assert c.placement.used <= budget
            assert c.placement.t_token <= before.get(c.kind, np.inf) * 1.001
            before[c.kind] = c.placement.t_token


# Chosen rows are read at a twentieth of the speed of whole matrices: what fires costs more than what is skipped gains.
SCATTERED = dataclasses.replace(CARD, gpu_sparse_efficiency=0.04, cpu_sparse_efficiency=0.04)


def test_dense_where_it_is_faster_and_why(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same in every command: `plan`, `run`, and what `place` keeps."""
    choice = choose(path, CARD.vram, SCATTERED, every=True)
    assert (choice.gpu.kind, choice.sparsity) == ("all", "dense")
    exact = choose(path, CARD.vram, SCATTERED, sparsity="exact")
    assert exact.sparsity == "exact" and exact.placement.t_token > choice.placement.t_token
    (why,) = (note for note in choice.notes if note.startswith("dense instead of sparse: "))
    assert f"{choice.placement.tokens_per_second:.1f} tokens/s are expected" in why
    assert {c.kind: c.placement.sparsity for c in choice.candidates if c.placement is not None} == {
        "all": "dense", "keys": "exact", "layers": "dense", "cpu": "exact",  # the CPU alone asks no solver
    }  # fmt: skip
    assert choose(path, CARD.vram, SCATTERED, n_layers=5).sparsity == "exact"  # nor does a number of layers

    told: list[str] = []
    monkeypatch.setattr("hotcold.placement.machine.machine_hardware", lambda say: SCATTERED)
    device: Any = SimpleNamespace(context_bytes=CARD.gpu_context)
    with open_gguf(path) as file:
        config = ModelConfig.from_gguf(file)
        wanted = Wanted(file, config, load_weights(file, config), "auto", "auto", CARD.vram, N_CTX, N_CTX, device)
        assert placer(told.append)(wanted) == (choice.gpu, "dense")
        assert f"GPU: {why}" in told
        model = read_model(file, config, N_CTX, frequencies(file, config))
        kept = solve_budget(model, SCATTERED, CARD.vram, "all", objective="time")
        identity = model_id(file, config)
    assert kept.sparsity == "dense" and kept.notes[0] == why
    rewrite(path, tmp_path / "placed.gguf", metadata=placement_metadata(identity, [kept]))
    own = choose(tmp_path / "placed.gguf", CARD.vram, SCATTERED)
    assert own.sparsity == "dense" and not own.candidates
    assert own.why == ("plan all: the file's own placement for this budget, dense instead of sparse: hotcold place "
                       "found that to be faster")  # fmt: skip
    assert choose(tmp_path / "placed.gguf", CARD.vram, SCATTERED, sparsity="exact").sparsity == "exact"


def test_a_large_model_is_solved_while_one_waits() -> None:
    model = large(80, 28672, 8192)
    began = time.perf_counter()
    found = candidates(model, PRESETS["rtx-4090"], 20 << 30)
    assert pick(found, "auto", "auto", 20 << 30)[0].kind == "keys"
    assert time.perf_counter() - began < 10  # under a second where nobody else computes


def test_the_files_own_placement(path: Path, tmp_path: Path) -> None:
    with open_gguf(path) as file:
        config = ModelConfig.from_gguf(file)
        made = place_on(file, config, frequencies(file, config), budget=9 << 20, n_ctx=N_CTX, hardware=CARD,
                        objective="paper")  # fmt: skip
        identity = model_id(file, config)
    out = tmp_path / "placed.gguf"
    rewrite(path, out, metadata=placement_metadata(identity, [made]))
    choice = choose(out, 9 << 20)
    assert choice.placement.hot == made.hot and choice.placement.objective == "paper" and not choice.candidates
    assert choice.why == "plan keys: the file's own placement for this budget"
    for other in (choose(out, 10 << 20), choose(out, 9 << 20, dataclasses.replace(CARD, threads=1)),
                  choose(out, 9 << 20, kind="layers")):  # fmt: skip
        assert other.candidates and any("(9.0 MiB at --n-ctx 64) are for another budget" in n for n in other.notes)
    bad = tmp_path / "bad.gguf"
    rewrite(path, bad, metadata=placement_metadata("0" * 64, [made]))
    assert any("the file's placements cannot be used, solved anew: " in note for note in choose(bad, 9 << 20).notes)


def test_the_engine_is_handed_a_placement(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the figures of this machine, but with what the driver takes as measured now."""
    told: list[str] = []
    monkeypatch.setattr("hotcold.placement.machine.machine_hardware", lambda say: CARD)
    device: Any = SimpleNamespace(context_bytes=3 << 20)
    with open_gguf(path) as file:
        config = ModelConfig.from_gguf(file)
        weights = load_weights(file, config)
        for sparsity, kind in (("exact", "auto"), ("dense", "layers")):
            wanted = Wanted(file, config, weights, sparsity, kind, 12 << 20, N_CTX, N_CTX, device)
            placement, mode = placer(told.append)(wanted)
            assert mode == sparsity
            plan = make_plan(config, weights, mode, placement)
            assert plan.placement == placement and vram(plan, N_CTX, N_CTX, 3 << 20).total <= 12 << 20
        with pytest.raises(HotcoldError, match="--gpu-plan keys: not for --sparsity dense"):
            placer(told.append)(Wanted(file, config, weights, "dense", "keys", 9 << 20, N_CTX, N_CTX, device))
    assert told[0].startswith("GPU: plan all: the fastest that is exact")
