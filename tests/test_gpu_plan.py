"""What is computed where: operators of a hybrid plan, their prerequisites, placements that cannot be."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from small_models import Spec, all_of, write_model
from test_modes import with_predictors

from hotcold.runtime.buffers import Buffers
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.gpu.placement import GpuPlacement, LayerPlacement, last_layers
from hotcold.runtime.plan import Op, Plan, make_plan, prerequisites, readings
from hotcold.runtime.program import lower
from hotcold.runtime.weights import load_weights

F16 = all_of(Type.F16)
CPU = LayerPlacement(False)


def plan_of(path: Path, sparsity: str, *layers: LayerPlacement, kind: str = "keys") -> Plan:
    with open_gguf(path) as file:
        config = ModelConfig.from_gguf(file)
        return make_plan(config, load_weights(file, config), sparsity, GpuPlacement(kind, layers, 1 << 30, 64))


def kinds(ops: tuple[Op, ...], layer: int) -> list[str]:
    return [f"{op.kind}/{op.mode}" if op.mode else op.kind for op in ops if op.layer == layer]


@pytest.fixture
def gated(tmp_path: Path) -> Path:
    return write_model(tmp_path / "gated.gguf", Spec(patterns=("free",) * 3, **F16))


def test_layers_before_the_first_on_the_gpu_are_the_cpus(gated: Path) -> None:
    plan = plan_of(gated, "exact", CPU, LayerPlacement(True, 32, True), LayerPlacement(True, 96, True))
    devices = {layer: {op.device for op in plan.token if op.layer == layer} for layer in range(3)}
    assert devices == {0: {"cpu"}, 1: {"cpu", "gpu"}, 2: {"gpu"}}
    assert [op.kind for op in plan.cpu(False) if op.layer == 1] == ["cold"]
    assert {op.device for op in plan.block if op.layer == 1} == {"gpu"}
    assert plan.token[-1].device == "gpu" and plan.token[-1].writes == ("logits",)


def test_operators_of_each_way_to_know_who_fires(gated: Path) -> None:
    plan = plan_of(gated, "exact", LayerPlacement(True, 32, True), LayerPlacement(True, 32), LayerPlacement(True, 0))
    ffn = [kinds(plan.token, layer)[8:] for layer in range(3)]
    assert ffn[0] == ["matmul", "split/keys", "cold/keys", "values/keys", "axpy/keys", "merge/keys"]
    assert ffn[1] == ["post/all", "cold/all", "matmul", "split/all", "values/all", "axpy/all", "merge/all"]
    assert ffn[2] == ["post/all", "cold/all", "merge/all"]
    keys = [op for op in plan.token if op.kind == "matmul" and op.weights[0].name.endswith("ffn_gate.weight")]
    assert [op.neurons for op in keys] == [None, (0, 32)]
    assert [op.neurons for op in plan.token if op.kind == "cold"] == [(32, 96), (32, 96), (0, 96)]


def test_predictors_of_this_layer_and_of_the_next(tmp_path: Path) -> None:
    path = with_predictors(tmp_path / "p.gguf", Spec(patterns=("free",) * 3, **F16), ["lowrank", "mlp", "signbit"],
                           kind=Type.F16, ahead=[0, 1, 0])  # fmt: skip
    some = LayerPlacement(True, 32)
    plan = plan_of(path, "predict", some, some, some, kind="predict")
    early = [op for op in plan.token if op.early]
    assert [op.kind for op in early] == ["hidden", "matmul"] and {op.layer for op in early} == {1}
    assert plan.token.index(early[1]) < next(i for i, op in enumerate(plan.token) if op.kind == "merge")
    assert [op.mode for op in plan.token if op.kind == "split"] == ["scores"] * 3
    # Without layer 0 on the GPU, its input is not there: layer 1 is exact.
    plan = plan_of(path, "predict", CPU, some, some, kind="predict")
    assert [op.mode for op in plan.token if op.kind == "split"] == ["all", "scores"]
    # All key rows are there to be exact.
    plan = plan_of(path, "predict", some, some, LayerPlacement(True, 32, True), kind="keys")
    assert [op.mode for op in plan.token if op.kind == "split"] == ["all", "all", "keys"]


@pytest.mark.parametrize("spec", [
    Spec(gated=False, activation="relu2", **F16), Spec(arch="opt", gated=False, biases=True, n_head_kv=4, **F16),
    Spec(layout="stock", activation="silu", **all_of(Type.Q4_0)), Spec(activation="gelu", **all_of(Type.Q8_0)),
], ids=["relu2", "opt", "stock", "gelu"])  # fmt: skip
def test_whole_layers_of_every_kind(tmp_path: Path, spec: Spec) -> None:
    path = write_model(tmp_path / "m.gguf", spec)
    plan = plan_of(path, "auto", CPU, LayerPlacement(True, 96, True), kind="layers")
    assert not [op for op in plan.token if op.kind == "cold"]
    assert {op.device for op in plan.token if op.layer == 1} == {"gpu"}


def test_prerequisites_order_every_conflict(gated: Path) -> None:
    plan = plan_of(gated, "exact", CPU, LayerPlacement(True, 32, True), LayerPlacement(True, 0, True))
    for ops in (plan.token, plan.block):
        direct = prerequisites(ops)
        after: list[set[int]] = []
        for needs in direct:
            after.append(set(needs).union(*(after[i] for i in needs)))
        for i, j in itertools.combinations(range(len(ops)), 2):
            a, b = ops[i], ops[j]
            if set(a.writes) & {*b.reads, *b.writes} or set(a.reads) & set(b.writes):
                assert i in after[j], f"{b.kind} of layer {b.layer} does not follow {a.kind}"
    cold = next(i for i, op in enumerate(plan.token) if op.kind == "cold")
    later = [i for i, op in enumerate(plan.token) if op.layer == 1 and i > cold]
    beside = {plan.token[i].kind for i in later if cold not in direct_all(plan, i)}
    assert beside >= {"values", "axpy"}, "the GPU works on its own neurons meanwhile"


def direct_all(plan: Plan, at: int) -> set[int]:
    needs = prerequisites(plan.token)
    found, todo = set(), [at]
    while todo:
        for i in needs[todo.pop()]:
            if i not in found:
                found.add(i)
                todo.append(i)
    return found


def test_readings_say_rows_and_bytes(gated: Path) -> None:
    plan = plan_of(gated, "exact", CPU, LayerPlacement(True, 32, True), LayerPlacement(True, 32))
    by = {(op.kind, op.layer): readings(op) for op in plan.token}
    row = 2 * 64
    assert [(r.rows, r.row_bytes, r.chosen) for r in by["cold", 1]] == [(64, 2 * row, True)]
    assert [(r.rows, r.row_bytes, r.chosen) for r in by["cold", 2]] == [(64, row, False), (64, 2 * row, True)]
    assert [(r.rows, r.row_bytes, r.chosen) for r in by["values", 1]] == [(32, row, True)]
    assert [(r.rows, r.row_bytes, r.chosen) for r in by["axpy", 1]] == [(32, row, True)]
    assert [(r.rows, r.row_bytes, r.chosen) for r in by["ffn", 0]] == [(96, row, False), (96, 2 * row, True)]
    assert [(r.rows, r.row_bytes) for r in by["embed", -1]] == [(1, row)]


def test_the_cpus_program_is_lowered_without_the_gpus_operators(gated: Path) -> None:
    plan = plan_of(gated, "exact", CPU, CPU, LayerPlacement(True, 96, True), kind="layers")
    token, block = lower(plan, Buffers(plan.config, 2, 16, 8, "f16"))
    assert len(token) == len(plan.cpu(False)) and set(token["layer"]) == {-1, 0, 1}
    assert len(block) == len(plan.cpu(True))


# ---- what cannot be


@pytest.mark.parametrize(("layers", "kind", "said"), [
    ((CPU, CPU), "keys", "placement of 2 layers, the model has 3"),
    ((CPU, CPU, LayerPlacement(True, 97)), "keys", "97 hot neurons, allowed are 0 to its 96"),
    ((LayerPlacement(True, 96, True), CPU, LayerPlacement(True, 96, True)), "keys", "follows one on the GPU"),
    ((LayerPlacement(False, 3), CPU, CPU), "keys", "has neurons there"),
    ((CPU, CPU, LayerPlacement(True, 95)), "layers", "has whole layers"),
    ((CPU, CPU, CPU), "all of it", "'all of it' is unknown"),
])  # fmt: skip
def test_placements_that_cannot_be(gated: Path, layers: Any, kind: str, said: str) -> None:
    with pytest.raises(HotcoldError, match=said):
        plan_of(gated, "exact", *layers, kind=kind)


def test_neurons_that_are_always_computed_are_not_left_to_the_cpu(tmp_path: Path, gated: Path) -> None:
    silu = write_model(tmp_path / "silu.gguf", Spec(activation="silu", **F16))
    stock = write_model(tmp_path / "stock.gguf", Spec(layout="stock", **F16))
    for path, layers, said in ((silu, 2, "all its neurons"), (stock, 2, "stock layout"), (gated, 3, "all its")):
        with pytest.raises(HotcoldError, match=said):
            plan_of(path, "dense", *([CPU] * (layers - 1)), LayerPlacement(True, 32, True))


@pytest.mark.parametrize(("spec", "first", "said"), [
    (Spec(**all_of(Type.F32)), None, "output.weight is F32"),
    (Spec(**F16 | {"key": Type.Q5_0}), None, "layers 0 to 1 stay on the CPU: layer 1: blk.1.ffn_gate.weight is Q5_0"),
    (Spec(norm_relu=(True, False), **F16), 1, "layer 0 stays on the CPU: layer 0: a ReLU follows its norms"),
    (Spec(n_embd=72, **F16), None, "width 72 is not a multiple of 32"),
    (Spec(head_dim=20, **F16), None, "heads of 20"),
], ids=["f32", "q5_0", "norm_relu", "width", "heads"])  # fmt: skip
def test_what_the_gpu_cannot_compute_stays_on_the_cpu_and_is_told(
    tmp_path: Path, spec: Spec, first: int | None, said: str
) -> None:  # fmt: skip
    path = write_model(tmp_path / "m.gguf", spec)
    plan = plan_of(path, "auto", LayerPlacement(True, 96, True), LayerPlacement(True, 96, True), kind="layers")
    assert any(said in note for note in plan.notes)
    assert (plan.placement.first if plan.placement else None) == first
    if first is None:
        assert not plan.gpu(False) and not plan.gpu(True)


def test_last_layers_are_whole(gated: Path) -> None:
    with open_gguf(gated) as file:
        config = ModelConfig.from_gguf(file)
    placement = last_layers(config, 2, budget=1, n_ctx=8)
    assert placement.first == 1 and placement.layers == (CPU, *[LayerPlacement(True, 96, True)] * 2)
    assert np.all([layer.hot == 0 for layer in placement.without(3).layers])
    with pytest.raises(HotcoldError, match="allowed are 0 to the model's 3"):
        last_layers(config, 4, budget=1, n_ctx=8)
