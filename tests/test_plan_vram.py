"""Placement of a real (small) file: bytes to the last one, budgets that do not suffice, the index of a file."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from rich.console import Console
from small_models import Spec, all_of, make_tensors, write_model
from test_convert_gguf import rewrite as edit

from hotcold.placement.budget import add_budget_arguments, parse_size, placement_table, placements_from_args
from hotcold.placement.hardware import PRESETS, Hardware, to_json
from hotcold.placement.identity import model_id
from hotcold.placement.memory import model_bytes
from hotcold.placement.placement_index import placement_metadata, read_placements
from hotcold.placement.plan_model import read_model
from hotcold.placement.plan_vram import Placement, ffn_layers, place_on, plan
from hotcold.placement.rewrite import rewrite
from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import GGUFFile, open_gguf
from hotcold.runtime.gpu import memory as gpu_memory
from hotcold.runtime.gpu.placement import KINDS

TOKENS = 1000
CARD = Hardware("a [bold]card[/bold]", cpu_bandwidth=20e9, threads=2, ram=1 << 30, gpu="card", gpu_bandwidth=400e9,
                pcie=10e9, vram=1 << 30, gpu_context=1 << 20, t_sync=1e-7, gpu_overhead=1e-7)  # fmt: skip
HALF: dict[str, Any] = {"attn": Type.Q8_0, "key": Type.F16, "value": Type.F16, "embd": Type.Q4_0}
SPECS = {
    "gated": Spec(patterns=("free",) * 5, n_ff=(512, 300, 512, 512, 640), **all_of(Type.Q8_0)),
    "tied, biases": Spec(patterns=("free",) * 3, n_ff=257, biases=True, **HALF),
    "not gated": Spec(arch="opt", gated=False, biases=True, n_head_kv=4, n_ff=256, **HALF | {"value": Type.Q8_0}),
}


@pytest.fixture(autouse=True, scope="module")
def small_buffers() -> Iterator[None]:
    """Buffers of megabytes for prompts would be most of what these small models take."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("STAGE", "HALVES"):
            patch.setattr(gpu_memory, name, 1 << 12)
        yield


def counted(path: Path, spec: Spec, **metadata: Any) -> Path:
    """The model with counts that fall from every token to hardly any."""
    spec = dataclasses.replace(spec, metadata={schema.KEY_PROFILE_TOKENS: TOKENS, **metadata})
    tensors = make_tensors(spec)
    for layer, n_ff in enumerate(spec.neurons()):
        counts = np.sort(np.minimum(TOKENS, TOKENS * 3 * (layer + 1) // np.arange(1, n_ff + 1)))[::-1]
        tensors[schema.block(layer, schema.FFN_NEURON_COUNT)] = (Type.I64, np.ascontiguousarray(counts, np.int64))
    return write_model(path, spec, tensors)


def frequencies(file: GGUFFile, config: ModelConfig) -> list[np.ndarray]:
    return [file.data(schema.block(n, schema.FFN_NEURON_COUNT)) / TOKENS for n in range(config.n_layer)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: counted(folder / f"{k}.gguf", spec) for k, (name, spec) in enumerate(SPECS.items())}


@pytest.fixture(params=SPECS)
def model(paths: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[tuple[GGUFFile, ModelConfig]]:
    with open_gguf(paths[request.param]) as file:
        yield file, ModelConfig.from_gguf(file)


@pytest.fixture
def gated(paths: dict[str, Path]) -> Iterator[tuple[GGUFFile, ModelConfig]]:
    with open_gguf(paths["gated"]) as file:
        yield file, ModelConfig.from_gguf(file)


def place(model: tuple[GGUFFile, ModelConfig], budget: int, **changes: Any) -> Placement:
    file, config = model
    options: dict[str, Any] = {"n_ctx": 64, "hardware": CARD, "objective": "time"} | changes
    frequency = options.pop("frequency", None)
    return place_on(file, config, frequency or frequencies(file, config), budget=budget, **options)


def error(model: tuple[GGUFFile, ModelConfig], budget: int, **changes: Any) -> str:
    with pytest.raises(HotcoldError) as e:
        place(model, budget, **changes)
    assert "\n" not in str(e.value)
    return str(e.value)


def least(model: tuple[GGUFFile, ModelConfig], n_ctx: int = 64) -> int:
    sizes = model_bytes(*model, n_ctx)
    return CARD.gpu_context + sizes.workspace + sizes.cold + sizes.head + sizes.layers[-1].fixed


# ---- bytes


def test_every_byte_of_the_file_is_counted_once(model: tuple[GGUFFile, ModelConfig]) -> None:
    file, config = model
    sizes = model_bytes(file, config, n_ctx=100)
    tables = (schema.FFN_NEURON_ID, schema.FFN_NEURON_COUNT)
    stored = sum(t.n_bytes for name, t in file.tensors.items() if not name.endswith(tables))
    embedding = file.tensors["token_embd.weight"].n_bytes
    assert sizes.tied == ("output.weight" not in file.tensors)
    counted = sum(s.attention + s.predictor + s.ffn for s in sizes.layers) + sizes.head + sizes.embedding
    assert counted - (embedding if sizes.tied else 0) == stored
    kv = 2 * config.n_head_kv * config.head_dim * 100 * 2  # f16
    assert {s.kv for s in sizes.layers} == {kv}
    assert model_bytes(file, config, 100, "f32").layers[0].kv == 2 * kv


def test_what_is_not_on_the_gpu_is_in_ram(model: tuple[GGUFFile, ModelConfig]) -> None:
    file, config = model
    sizes = model_bytes(file, config, n_ctx=10)
    n = config.n_layer
    nothing = sizes.in_ram((False,) * n, (0,) * n, (False,) * n)
    assert sizes.on_gpu((False,) * n, (0,) * n, (False,) * n) == 0
    for keys, part in itertools.product((False, True), (0, 0.5, 1)):
        hot = tuple(int(part * n_ff) for n_ff in config.n_ff)
        on, all_keys = (True,) * n, (keys,) * n
        gone = nothing - sizes.in_ram(on, hot, all_keys)
        extra = sizes.workspace + (sizes.head if sizes.tied else 0)  # RAM keeps the table a tied head is made of
        extra += sizes.cold if part < 1 else 0
        assert sizes.on_gpu(on, hot, all_keys) - extra == gone
    everything = sizes.on_gpu((True,) * n, config.n_ff, (True,) * n)
    assert everything == sizes.workspace + sizes.head + sum(s.fixed + s.ffn for s in sizes.layers)


# ---- budgets


@pytest.mark.parametrize("objective", ["time", "paper"])
def test_never_above_the_budget_and_better_with_more(model: tuple[GGUFFile, ModelConfig], objective: str) -> None:
    _, config = model
    low, speed = least(model), 0.0
    all_of_it = CARD.gpu_context + model_bytes(*model, 64).on_gpu((True,) * config.n_layer, config.n_ff,
                                                                  (True,) * config.n_layer)  # fmt: skip
    all_of_it += model_bytes(*model, 64).cold  # which is set aside wherever neurons may be divided
    for budget in np.linspace(low, all_of_it + 5000, 9).astype(int).tolist():
        p = place(model, budget, objective=objective)
        assert p.used <= budget and p.used == CARD.gpu_context + model_bytes(*model, 64).on_gpu(
            p.layer_on_gpu, p.hot, p.keys_on_gpu
        )
        assert list(p.layer_on_gpu) == sorted(p.layer_on_gpu)  # the last layers
        assert all(on or not (hot or keys) for on, hot, keys in zip(p.layer_on_gpu, p.hot, p.keys_on_gpu, strict=True))
        assert p.t_token == pytest.approx(sum(p.t_layer), rel=0.9) and 0 <= p.load <= 1
        if objective == "time" and sum(p.layer_on_gpu) == config.n_layer:
            assert p.tokens_per_second >= speed * (1 - 1e-9)
            speed = p.tokens_per_second
    assert p.hot == config.n_ff and p.load == pytest.approx(1) and p.share == pytest.approx((1.0,) * config.n_layer)


def test_the_least_budget_is_exact(model: tuple[GGUFFile, ModelConfig]) -> None:
    low = least(model)
    p = place(model, low)
    assert p.used == low and p.layer_on_gpu[-1] and sum(p.hot) == 0
    message = error(model, low - 1)
    for words in (f"({low} bytes) are needed", "KV cache for --n-ctx 64", "lower --n-ctx"):
        assert words in message


def test_fewer_layers_are_said(gated: tuple[GGUFFile, ModelConfig]) -> None:
    fixed = model_bytes(*gated, 64).layers[-2].fixed
    p = place(gated, least(gated) + fixed, objective="paper")
    assert p.layer_on_gpu == (False, False, False, True, True)
    assert any(note.startswith("only the last 2 of 5 layers have their attention on the GPU: all would need")
               for note in p.notes)
    assert not place(gated, CARD.vram).notes


def test_the_best_number_of_layers_is_found(gated: tuple[GGUFFile, ModelConfig]) -> None:
    """Against every number: attention of a layer more, or neurons of those there are."""
    slow = dataclasses.replace(CARD, t_sync=2e-6)
    fewer = 0
    for budget in np.linspace(least(gated), least(gated) + 900000, 7).astype(int).tolist():
        model = read_model(*gated, 64, frequencies(*gated))
        times = []
        for n in range(1, 6):
            try:
                times.append(plan(model, slow, budget, "keys", "exact", n_layers=n).t_token)
            except HotcoldError as e:
                assert "are needed for plan keys" in str(e)
        p = plan(model, slow, budget, "keys", "exact")
        assert p.t_token <= min(times) * 1.01
        if p.n_on_gpu < len(times):
            fewer += 1
            assert f"only the last {p.n_on_gpu} of 5 layers are on the GPU: {len(times)} would fit" in p.notes[0]
    assert fewer, "the case occurs"


def test_more_context_leaves_less_for_neurons(gated: tuple[GGUFFile, ModelConfig]) -> None:
    budget = least(gated, 2048) + 5 * model_bytes(*gated, 2048).layers[0].fixed + 100000
    assert place(gated, budget, n_ctx=64).load > place(gated, budget, n_ctx=2048).load


def test_ram_that_does_not_suffice(tmp_path: Path) -> None:
    with open_gguf(counted(tmp_path / "m.gguf", Spec(n_ff=2048, **HALF))) as file:
        model = file, ModelConfig.from_gguf(file)
        poor = dataclasses.replace(CARD, ram=1 << 20)
        message = error(model, least(model), hardware=poor)  # the GPU is full, so all of the FFN must be in RAM
        needed = place(model, least(model)).ram
        assert f"{needed / 2**20:.1f} MiB of RAM are needed, 1.0 MiB given" in message
        assert "raise --vram-budget" in message
        assert place(model, CARD.vram, hardware=poor).ram <= poor.ram
        tight = place(model, least(model) + needed - poor.ram + 200000, hardware=poor)
        assert tight.ram <= poor.ram


def test_attention_comes_first_then_keys(gated: tuple[GGUFFile, ModelConfig]) -> None:
    sizes = model_bytes(*gated, 64)
    with_attention = CARD.gpu_context + sizes.on_gpu((True,) * 5, (0,) * 5, (False,) * 5)
    keys = sum(s.n_ff * s.key_row for s in sizes.layers)
    flat = [np.full(n, 0.01) for n in gated[1].n_ff]
    p = place(gated, with_attention + keys, frequency=flat)
    assert p.keys_on_gpu == (True,) * 5 and p.layer_on_gpu == (True,) * 5
    assert p.t_token < p.t_token_cpu


def test_times_by_hand(tmp_path: Path) -> None:
    """One layer, everything on the GPU: bytes over bandwidth."""
    path = counted(tmp_path / "m.gguf", Spec(patterns=("free",), n_ff=256, **HALF))
    with open_gguf(path) as file:
        config = ModelConfig.from_gguf(file)
        p = place((file, config), CARD.vram)
        s = model_bytes(file, config, 64)
        layer, f = s.layers[0], frequencies(file, config)[0]
    dense, rows = 1 / (CARD.gpu_bandwidth * CARD.gpu_efficiency), 1 / (CARD.gpu_bandwidth * CARD.gpu_sparse_efficiency)
    fixed = (layer.attention + layer.kv / 2 + 256 * layer.key_row) * dense + CARD.gpu_overhead
    assert p.t_layer[0] == pytest.approx(fixed + f.sum() * layer.value_row * rows)
    assert p.t_token == pytest.approx(p.t_layer[0] + s.head * dense + 4 * config.n_vocab / CARD.pcie + CARD.t_sync)
    cpu, cpu_rows = 1 / (20e9 * CARD.cpu_efficiency), 1 / (20e9 * CARD.cpu_sparse_efficiency)
    by_cpu = (layer.attention + layer.kv / 2 + 256 * layer.key_row + s.head) * cpu
    assert p.t_token_cpu == pytest.approx(by_cpu + f.sum() * layer.value_row * cpu_rows)


def test_predictors_are_counted_and_used(tmp_path: Path) -> None:
    spec = dataclasses.replace(SPECS["gated"], patterns=("free",) * 2, n_ff=256, metadata={
        schema.KEY_PROFILE_TOKENS: TOKENS, schema.KEY_PREDICTOR_KIND: ["signbit", "none"],
        schema.KEY_PREDICTOR_RANK: [0, 0], schema.KEY_PREDICTOR_INPUT: [0, 0],
        schema.KEY_PREDICTOR_THRESHOLD: [0.0, 0.0], schema.KEY_PREDICTOR_DENSITY: [0.125, 1.0],
    })  # fmt: skip
    tensors = make_tensors(spec)
    tensors["blk.0.ffn_pred_sign"] = (Type.I32, np.zeros((256, 2), np.int32))
    tensors["blk.0.ffn_pred_out.bias"] = (Type.F32, np.zeros(256, np.float32))
    with open_gguf(write_model(tmp_path / "m.gguf", spec, tensors)) as file:
        config = ModelConfig.from_gguf(file)
        sizes = model_bytes(file, config, 64)
        assert [s.predictor for s in sizes.layers] == [256 * 3 * 4, 0]
        model = read_model(file, config, 64, [np.full(256, 0.1)] * 2)
    assert model.modes == ("dense", "exact", "predict") and model.density == (0.125, None)
    key = sizes.layers[0].key_row
    first, second = ffn_layers(model, "predict", "predict", (True, True))
    assert first.decide == pytest.approx(np.full(256, 0.125 * key)) and first.decide_scattered
    assert not first.split_keys, "what it names is checked where the neuron is"
    assert second.decide == pytest.approx(np.full(256, key)) and not second.decide_scattered
    assert ffn_layers(model, "keys", "exact", (True, True))[0].decide == pytest.approx(np.full(256, key))
    whole = [plan(model, CARD, 1 << 29, "all", mode) for mode in ("exact", "predict")]
    assert whole[1].used - whole[0].used == 256 * 3 * 4, "exact mode leaves predictors in the file"
    assert plan(model, CARD, 1 << 29, "predict", "predict").sparsity == "predict"


# ---- bad input


def test_bad_numbers(gated: tuple[GGUFFile, ModelConfig], paths: dict[str, Path]) -> None:
    assert "more than the 1.0 GiB of card" in error(gated, CARD.vram + 1)
    assert "there is no GPU to place neurons on; name a card with --hardware, for example rtx-3060-12g" in error(
        gated, 1 << 29, hardware=Hardware("cpu", cpu_bandwidth=1e9, threads=1, ram=1 << 30)
    )
    assert "--n-ctx 0: must be from 1" in error(gated, 1 << 29, n_ctx=0)
    assert "objective 'fast' is unknown" in error(gated, 1 << 29, objective="fast")
    with open_gguf(paths["not gated"]) as file:
        assert "learned positions for 128 tokens only" in error((file, ModelConfig.from_gguf(file)), 1 << 29, n_ctx=129)


def test_bad_frequencies(gated: tuple[GGUFFile, ModelConfig]) -> None:
    good = frequencies(*gated)
    assert "frequencies of 4 layers, the model has 5" in error(gated, 1 << 29, frequency=good[:4])
    assert "layer 1: frequencies of shape [299], it has 300" in error(gated, 1 << 29, frequency=[
        good[0], good[1][:299], *good[2:]])  # fmt: skip
    for bad, words in ((math.nan, "frequency nan"), (-1, "frequency -1"), (2, "frequency 2")):
        values = [f.copy() for f in good]
        values[3][7] = bad
        assert f"layer 3: {words}" in error(gated, 1 << 29, frequency=values)
    values = [f[::-1].copy() for f in good]
    assert "layer 0: neurons are not in descending order" in error(gated, 1 << 29, frequency=values)


def test_stock_layout_has_whole_layers_only(tmp_path: Path) -> None:
    with open_gguf(write_model(tmp_path / "m.gguf", Spec(layout="stock", **all_of(Type.Q8_0)))) as file:
        config = ModelConfig.from_gguf(file)
        model, frequency = (file, config), [np.ones(96)] * 2
        message = error(model, 1 << 29, frequency=frequency)
        assert "only whole layers can be on the GPU: use --gpu-plan layers, or run hotcold convert" in message
        sizes = model_bytes(file, config, 64)
        base = CARD.gpu_context + sizes.workspace + sizes.head
        one = base + sizes.layers[1].fixed + sizes.layers[1].ffn
        p = place(model, one, kind="layers", frequency=frequency)
        assert (p.layer_on_gpu, p.hot, p.used, p.sparsity) == ((False, True), (0, 96), one, "dense")
        assert "at least" in error(model, one - 1, kind="layers", frequency=frequency)
        stored = sum(t.n_bytes for name, t in file.tensors.items() if name.startswith("blk.1."))
        assert sizes.layers[1].attention + sizes.layers[1].ffn == stored


GPU_CANNOT = {
    "by column": (Spec(n_ff=256, norm_relu=(False, True), **HALF), "layer 1: a ReLU follows its norms"),
    "type": (Spec(n_ff=256, **HALF | {"value": Type.F32}), "ffn_up_down.weight is F32, the GPU computes F16, Q8_0"),
    "head": (Spec(n_ff=256, **HALF | {"embd": Type.F32}), "nothing is computed there: token_embd.weight is F32"),
}


@pytest.mark.parametrize("case", GPU_CANNOT)
def test_what_the_gpu_cannot_compute_is_said(tmp_path: Path, case: str) -> None:
    spec, words = GPU_CANNOT[case]
    with open_gguf(counted(tmp_path / "m.gguf", spec)) as file:
        model = file, ModelConfig.from_gguf(file)
        for kind in KINDS:
            if kind != "predict":
                assert words in error(model, 1 << 29, kind=kind)


def test_neurons_that_are_off_by_value_are_not_divided(tmp_path: Path) -> None:
    spec = Spec(activation="silu", threshold=0.1, n_ff=256, **HALF)
    with open_gguf(counted(tmp_path / "m.gguf", spec)) as file:
        model = file, ModelConfig.from_gguf(file)
        assert "off by the size of their value" in error(model, 1 << 29, kind="keys")
        assert place(model, 1 << 29, kind="layers").layer_on_gpu == (True, True)


def test_layers_before_one_that_the_gpu_cannot_compute_stay(tmp_path: Path) -> None:
    spec = Spec(patterns=("free",) * 3, n_ff=256, norm_relu=(False, True, False), **HALF)
    with open_gguf(counted(tmp_path / "m.gguf", spec)) as file:
        model = file, ModelConfig.from_gguf(file)
        p = place(model, CARD.vram)
        assert p.layer_on_gpu == (False, False, True) and "layers 0 to 1 stay on the CPU" in p.notes[0]
        assert "layers 0 to 1 stay" in error(model, CARD.vram, kind="all")


# ---- the index of a file


@pytest.fixture(scope="module")
def placed(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Placement]]:
    """The gated model with three placements."""
    out = tmp_path_factory.mktemp("placed") / "m.gguf"
    with open_gguf(paths["gated"]) as file:
        config = ModelConfig.from_gguf(file)
        model = file, config
        made = [place(model, least(model) + extra, objective=objective)
                for extra, objective in ((5000, "time"), (400000, "paper"), (900000, "time"))]  # fmt: skip
        identity = model_id(file, config)
    rewrite(paths["gated"], out, metadata=placement_metadata(identity, made))
    return out, made


def test_index_round_trip(placed: tuple[Path, list[Placement]]) -> None:
    path, made = placed
    with open_gguf(path) as file:
        read = read_placements(file, ModelConfig.from_gguf(file))
    assert [dataclasses.replace(p, notes=(), used=0) for p in made] == [
        dataclasses.replace(p, notes=(), used=0) for p in read]
    assert all(0 < b.used <= a.used for a, b in zip(made, read, strict=True)), "made with a bound"


def test_no_index(gated: tuple[GGUFFile, ModelConfig]) -> None:
    assert read_placements(*gated) == []


GOOD = to_json(CARD)
CORRUPT = {
    "another model": ({schema.KEY_PLACEMENT_MODEL: "0" * 64}, "the placement is of another model"),
    "no model": ({schema.KEY_PLACEMENT_MODEL: None}, "key 'hotcold.placement.model': found nothing"),
    "two objectives": ({schema.KEY_PLACEMENT_OBJECTIVE: ["time", "time"]}, "found an array of 2, allowed: 3 strings"),
    "no plan": ({schema.KEY_PLACEMENT_PLAN: None}, "key 'hotcold.placement.plan': found nothing"),
    "plan": ({schema.KEY_PLACEMENT_PLAN: ["keys", "some", "keys"]}, "found 'some', allowed: all, keys, predict"),
    "sparsity": ({schema.KEY_PLACEMENT_SPARSITY: ["exact", "auto", "exact"]}, "found 'auto', allowed: dense, exact"),
    "no predictor": ({schema.KEY_PLACEMENT_SPARSITY: ["predict"] * 3}, "found 'predict', allowed: dense, exact"),
    "objective": ({schema.KEY_PLACEMENT_OBJECTIVE: ["time", "\x1b[2J", "time"]}, "allowed: paper, time"),
    "hardware": ({schema.KEY_PLACEMENT_HARDWARE: [GOOD, GOOD, "{"]}, "entry 2: not valid JSON"),
    "hardware NaN": ({schema.KEY_PLACEMENT_HARDWARE: [GOOD.replace("1e-07", "NaN", 1), GOOD, GOOD]}, "found nan"),
    "no GPU": ({schema.KEY_PLACEMENT_HARDWARE: [to_json(Hardware("c", 1e9, 1, 1 << 30))] * 3}, "a machine without GPU"),
    "hot too short": ({schema.KEY_PLACEMENT_HOT: [0] * 14}, "found an array of 14, allowed: 3 x 5 numbers"),
    "hot too many": ({schema.KEY_PLACEMENT_HOT: [600] * 15}, "found 600 in layer 0, allowed: 0 to its 512 neurons"),
    "above budget": ({schema.KEY_PLACEMENT_BUDGET: [1000, 1000, 1000]}, "found 1000 bytes, allowed: at least the"),
    "keys flag": ({schema.KEY_PLACEMENT_KEYS_ON_GPU: [2] * 15}, "found 2, allowed: 15 numbers"),
    "keys length": ({schema.KEY_PLACEMENT_KEYS_ON_GPU: [1] * 16}, "found an array of 16, allowed: 15 numbers"),
    "layer flag": ({schema.KEY_PLACEMENT_LAYER_ON_GPU: [1] * 4 + [0] + [1] * 10}, "found 0 for layer 4"),
    "context 0": ({schema.KEY_PLACEMENT_N_CTX: [0, 64, 64]}, "found 0, allowed: 1 to 16777216"),
    "contexts": ({schema.KEY_PLACEMENT_N_CTX: [64, 64]}, "found an array of 2"),
    "no hot": ({schema.KEY_PLACEMENT_HOT: None}, "key 'hotcold.placement.hot': found nothing"),
}  # fmt: skip


@pytest.mark.parametrize("case", CORRUPT)
def test_a_corrupt_index_is_refused(placed: tuple[Path, list[Placement]], tmp_path: Path, case: str) -> None:
    changes, words = CORRUPT[case]

    def change(metadata: dict[str, Any], _: object) -> None:
        metadata.update(changes)
        for key in [key for key, value in changes.items() if value is None]:
            del metadata[key]

    path = edit(placed[0], tmp_path / "bad.gguf", change)
    with open_gguf(path) as file, pytest.raises(HotcoldError) as e:
        read_placements(file, ModelConfig.from_gguf(file))
    assert words in str(e.value) and "\n" not in str(e.value) and "\x1b" not in str(e.value)
    assert "bad.gguf" in str(e.value)


# ---- tables and arguments


def test_table_shows_every_layer(gated: tuple[GGUFFile, ModelConfig]) -> None:
    p = place(gated, least(gated) + 300000)
    console = Console(width=200, record=True, file=open("/dev/null", "w"))
    console.print(placement_table(p))
    lines = console.export_text().splitlines()
    assert "on a [bold]card[/bold]" in lines[0]  # a name is no markup
    assert [line.split()[0] for line in lines[2:7]] == ["0", "1", "2", "3", "4"]
    assert f"({p.used} of {p.budget} bytes)" in lines[7]
    assert f"{p.tokens_per_second:.1f} tokens/s" in console.export_text() or any("tokens/s" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8GiB", 8 << 30), ("8gib", 8 << 30), ("1.5 GiB", 3 << 29), ("8000MB", 8 * 10**9), ("700MiB", 700 << 20),
        ("1", 1), ("8589934592", 8 << 30), ("64B", 64), ("2KiB", 2048),
    ],
)  # fmt: skip
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "0", "-1", "8G", "8 TiB", "1.5", "1e9", "8GiBs", "GiB", "٣GiB", "1_000", "nan",
                                  "inf", "9" * 15 + "GiB", "8GiB ", " 8GiB", "0x10", "9" * 40])  # fmt: skip
def test_bad_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be a size such as 8GiB"):
        parse_size(text)


def from_args(model: tuple[GGUFFile, ModelConfig], *arguments: str) -> list[Placement]:
    parser = argparse.ArgumentParser()
    add_budget_arguments(parser)
    return placements_from_args(parser.parse_args(list(arguments)), *model, frequencies(*model))


def test_arguments(gated: tuple[GGUFFile, ModelConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_args(gated) == []
    with pytest.raises(HotcoldError, match="--n-ctx is for a placement"):
        from_args(gated, "--n-ctx", "64")
    (whole,) = from_args(gated, "--hardware", "rtx-4090")
    assert whole.budget == 24 << 30 and whole.n_ctx == 128 and whole.hardware == PRESETS["rtx-4090"]
    two = from_args(gated, "--hardware", "rtx-4090", "--vram-budget", "1GiB", "--vram-budget", "1024MiB",
                    "--vram-budget", "2GiB", "--n-ctx", "50", "--objective", "paper")  # fmt: skip
    assert [(p.budget, p.n_ctx, p.objective) for p in two] == [(1 << 30, 50, "paper"), (2 << 30, 50, "paper")]
    (tmp_path / "card.json").write_text(to_json(CARD))
    assert from_args(gated, "--hardware", str(tmp_path / "card.json"))[0].hardware == CARD
    with pytest.raises(HotcoldError, match="neither a file nor a preset"):
        from_args(gated, "--hardware", "rtx-1")
    here = Hardware("this machine", cpu_bandwidth=1e9, threads=1, ram=1 << 30)
    monkeypatch.setattr("hotcold.placement.machine.machine_hardware", lambda: here)
    with pytest.raises(HotcoldError, match="this machine: there is no GPU"):
        from_args(gated, "--vram-budget", "1GiB")


@pytest.mark.parametrize("arguments", [("--vram-budget", "8G"), ("--n-ctx", "0"), ("--n-ctx", "1e3"),
                                       ("--objective", "x"), ("--n-ctx", "-5")])  # fmt: skip
def test_bad_arguments_are_usage_errors(gated: tuple[GGUFFile, ModelConfig], arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as e:
        from_args(gated, *arguments)
    assert e.value.code == 2
