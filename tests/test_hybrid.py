"""Both halves of a token against the CPU alone: families, formats, plans, executors; what crosses the bus; how it ends.

The GPU is simulated: its kernels are the real ones, compiled for the CPU, its streams are threads.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu.build import compiler
from cuda_on_cpu.sim_device import SimDevice
from gguf import GGMLQuantizationType as Type
from hybrid import CPU, config_of, error, hybrid, on_cpu, part, shares, steps
from small_models import Spec, all_of, write_model
from test_modes import with_predictors
from tiny import SPARSE, token_ids

from hotcold.runtime.engine import Engine
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gpu.choose import GpuOptions
from hotcold.runtime.gpu.engine import HybridEngine
from hotcold.runtime.kernels import walk

pytestmark = pytest.mark.skipif(not compiler()[0], reason="no C++ compiler")

TOKENS = [int(t) for t in np.arange(5) * 37 % 101]
# Of relative L2 norms. The same numbers are added in another order; where F16 rounding of the KV cache or of an act
# block falls on the other side, the difference is that of one rounding.
F16_ERROR, QUANT_ERROR = 3e-4, 2e-2
JITTER = 2e-4  # seconds that streams pause at most before an operator: what is not ordered comes in any order


def both(path: Path, layers: Any, kind: str, sparsity: str, tokens: list[int], jitter: float = 0.0) -> np.ndarray:
    """Logits of both executors, which must be the same bits."""
    found = []
    for executor in ("stream", "graph"):
        with hybrid(path, layers, kind, sparsity=sparsity, executor=executor, jitter=jitter) as engine:
            found.append(steps(engine, tokens))
    assert np.array_equal(*found)
    return found[0]


def same_text(found: np.ndarray, wanted: np.ndarray) -> bool:
    return bool((found.argmax(axis=1) == wanted.argmax(axis=1)).all())


# ------------------------------------------------------------------ the same numbers

FAMILIES = ("llama", "llama-bias", "llama-headdim", "llama-tied", "llama-ff72", "mistral-window8", "qwen2", "qwen3",
            "rope-yarn")  # fmt: skip


@pytest.mark.parametrize("case", FAMILIES)
def test_dense_families_by_whole_layers(case: str, tiny_model: Callable[..., Path]) -> None:
    """Plans (a) and (d), neuron-split and stock."""
    tokens = token_ids(10)
    for stock in (False, True):
        path = tiny_model(case, outtype="f16", stock=stock)
        wanted, config = on_cpu(path, tokens), config_of(path)
        for first in (0, config.n_layer - 1):
            with hybrid(path, shares(config, first, 1.0), "layers") as engine:
                found = steps(engine, tokens)
            assert error(found, wanted) < F16_ERROR and same_text(found, wanted)


@pytest.mark.parametrize("case", [case for case in SPARSE if case != "opt-mixed"])  # whose width is 104
def test_sparse_families_shared_between_both(case: str, tiny_model: Callable[..., Path]) -> None:
    """Plan (b), with all key rows on the GPU or only those of the hot neurons, from nothing to everything."""
    path, tokens = tiny_model(case, outtype="f16"), token_ids(6)
    wanted, config = on_cpu(path, tokens), config_of(path)
    for first, share, keys in ((0, 0.0, False), (0, 0.4, True), (1, 0.4, False), (0, 1.0, True)):
        with hybrid(path, shares(config, first, share, keys), jitter=JITTER) as engine:
            found = steps(engine, tokens)
            assert engine.plan.placement is not None and engine.plan.placement.first == first
        assert error(found, wanted) < F16_ERROR and same_text(found, wanted), (first, share, keys)


@pytest.mark.parametrize("kind", [Type.F16, Type.Q8_0, Type.Q4_0])
@pytest.mark.parametrize("gated", [True, False])
def test_formats_and_budgets_in_both_executors(kind: Type, gated: bool, tmp_path: Path) -> None:
    spec = Spec(patterns=("free", "mixed", "free"), n_ff=(96, 100, 33), gated=gated, biases=True, **all_of(kind))
    path = write_model(tmp_path / "m.gguf", spec)
    wanted = on_cpu(path, TOKENS)
    for layers in ((CPU, CPU, part(0)), (CPU, part(1, True), part(32)), (part(32), part(0, True), part(33, True)),
                   (part(0), part(99), part(31, True)), (part(96), part(100), part(33))):  # fmt: skip
        found = both(path, layers, "keys", "exact", TOKENS)
        assert error(found, wanted) < (F16_ERROR if kind == Type.F16 else QUANT_ERROR), layers


@pytest.mark.parametrize("pattern", ["off", "on", "mixed"])
def test_all_neurons_off_and_all_on(pattern: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", Spec(patterns=(pattern,) * 2, **all_of(Type.F16)))
    wanted = on_cpu(path, TOKENS)
    for layers in ((part(32, True), part(32)), (part(96), part(96))):
        assert error(both(path, layers, "keys", "exact", TOKENS), wanted) < F16_ERROR


def test_formats_mixed_in_a_layer(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", Spec(embd=Type.F16, attn=Type.Q4_0, key=Type.F16, value=Type.Q8_0))
    for layers, sparsity in (((part(32, True), part(64)), "exact"), ((CPU, part(96)), "dense")):
        kind = "layers" if sparsity == "dense" else "keys"
        assert error(both(path, layers, kind, sparsity, TOKENS), on_cpu(path, TOKENS, sparsity)) < QUANT_ERROR


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "drelu", "fatrelu", "relu2"])
def test_every_activation_dense_and_with_thresholds(activation: str, tmp_path: Path) -> None:
    threshold = 0.05 if activation not in ("drelu", "relu2") else 0.0
    path = write_model(tmp_path / "m.gguf", Spec(activation=activation, threshold=threshold, **all_of(Type.F16)))
    for sparsity in ("dense", "exact"):
        found = both(path, (CPU, part(96)), "layers", sparsity, TOKENS)
        assert error(found, on_cpu(path, TOKENS, sparsity)) < F16_ERROR


@pytest.mark.parametrize("kind", [Type.F16, Type.Q8_0])
def test_predictors_name_the_same_neurons(kind: Type, tmp_path: Path) -> None:
    """Plan (c): what a predictor leaves out is left out on both sides. Ahead on the second stream, too."""
    spec = Spec(patterns=("free",) * 4, **all_of(kind))
    path = with_predictors(tmp_path / "p.gguf", spec, ["lowrank", "mlp", "signbit", "lowrank"], kind=kind,
                           ahead=[0, 1, 0, 1], bias=-0.2)  # fmt: skip
    wanted = on_cpu(path, TOKENS, "predict")
    assert error(wanted, on_cpu(path, TOKENS, "exact")) > 0.05, "a predictor that leaves nothing out tests nothing"
    for hot in (0, 40, 96):
        found = both(path, [part(hot)] * 4, "predict", "predict", TOKENS, JITTER)
        assert error(found, wanted) < (F16_ERROR if kind == Type.F16 else QUANT_ERROR), hot


def test_the_gpu_lists_the_neurons_that_the_cpu_would(tmp_path: Path) -> None:
    """Exact plans: per layer as many neurons in all, with every division."""
    path = write_model(tmp_path / "m.gguf", Spec(patterns=("free", "mixed"), **all_of(Type.F16)))
    with Engine.open(path, threads=2, n_ctx=64) as engine:
        steps(engine, TOKENS)
        wanted = engine.layer_stats()
    for layers in ((part(0), part(0, True)), (part(32, True), part(64)), (part(96), part(96))):
        with hybrid(path, layers) as engine:
            steps(engine, TOKENS)
            found = engine.layer_stats()
        assert found.hybrid is not None
        np.testing.assert_array_equal(found.computed, wanted.computed)
        np.testing.assert_array_equal(found.checked, wanted.checked)
        np.testing.assert_allclose((found.hybrid.gpu + found.hybrid.cpu) / 96, wanted.computed)


def test_texts_are_continued_as_on_the_cpu(tiny_model: Callable[..., Path]) -> None:
    """Forward in blocks, take tokens back, verify several at once."""
    path, tokens = tiny_model("relu", outtype="f16"), token_ids(12)
    config = config_of(path)
    with Engine.open(path, threads=2, n_ctx=64) as engine:
        wanted = steps(engine, tokens)
    with hybrid(path, shares(config, 1, 0.5, True)) as engine:
        single = steps(engine, tokens)
        assert error(single, wanted) < F16_ERROR
        engine.truncate(4)
        assert np.array_equal(engine.verify(tokens[4:9]), single[4:9])
        engine.truncate(0)
        assert error(engine.forward(tokens, "all"), wanted) < F16_ERROR
        assert engine.n_past == len(tokens)
        engine.truncate(0)
        engine.forward(tokens[:11], "none")
        assert error(engine.forward(tokens[11:]), wanted[11]) < F16_ERROR


# ------------------------------------------------------------------ what crosses the bus


def counted(path: Path, layers: Any, executor: str, kind: str = "keys") -> tuple[dict[str, int], HybridEngine]:
    """Calls of the device for one token."""
    device = SimDevice()
    with hybrid(path, layers, kind, executor=executor, device=device) as engine:
        engine.forward([1])
        device.reset_counts()
        engine.forward([2])
        engine.layer_stats()
        counts = dict(device.counts)
    device.close()
    return counts, engine


def test_a_token_costs_the_waits_that_the_plan_has(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", Spec(patterns=("on", "on", "off"), **all_of(Type.F16)))
    layers = (part(32, True), part(96), part(32, True))
    counts, _ = counted(path, layers, "stream")
    assert counts["sync_event"] == 2, "one per layer that leaves neurons to the CPU"
    assert counts["d2h"] == 1 and counts["sync"] == 1 and "h2d" not in counts, "logits, and nothing else"
    counts, _ = counted(path, layers, "graph")
    assert counts == {"replay": 1, "d2h": 1, "sync": 1, "download": 1}, "the download is of the statistics"


def test_a_layer_without_work_for_the_cpu_is_skipped(tmp_path: Path) -> None:
    """No answer is written where nothing was asked."""
    path = write_model(tmp_path / "m.gguf", Spec(patterns=("off", "on"), **all_of(Type.F16)))
    with hybrid(path, (part(32, True), part(32, True))) as engine:
        steps(engine, TOKENS)
        stats = engine.layer_stats().hybrid
        assert stats is not None and stats.asked.tolist() == [0.0, 1.0] and stats.skips == 0.5
        assert stats.cpu.tolist() == [0.0, 64.0]
        assert engine._mailbox.host.done[0, 0] == 0 and engine._mailbox.host.done[1, 0] > 0
        engine.reset_stats()
        engine.forward([1])
        stats = engine.layer_stats().hybrid
        assert stats is not None and stats.gpu.tolist() == [0.0, 32.0]


# ------------------------------------------------------------------ lasting


def toy_spec(**changes: Any) -> Spec:
    small = {"patterns": ("free",) * 2, "n_ff": 32, "n_embd": 32, "n_head": 1, "n_head_kv": 1, "n_vocab": 17}
    return Spec(**(small | changes), **all_of(Type.F16))  # type: ignore[arg-type]


def toy(folder: Path, **changes: Any) -> Path:
    return write_model(folder / "toy.gguf", toy_spec(**changes))


def toy_that_looks_ahead(folder: Path) -> Path:
    """Its second and third layer's predictors run on the second stream."""
    spec = toy_spec(patterns=("free",) * 3)
    return with_predictors(folder / "ahead.gguf", spec, ["signbit", "lowrank", "lowrank"], kind=Type.F16,
                           ahead=[0, 1, 1], bias=-0.2)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "executor", "n"), [("keys", "graph", 1600), ("predict", "graph", 300), ("predict", "stream", 300)]
)
def test_many_tokens_with_jitter_on_both_sides(
    kind: str, executor: str, n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody misses a message, and nothing depends on who is early: neither a side nor a stream."""
    path, rng = toy(tmp_path) if kind == "keys" else toy_that_looks_ahead(tmp_path), np.random.default_rng(3)
    device = SimDevice(jitter=1e-4)
    plan = {"layers": (part(8, kind == "keys"),) * config_of(path).n_layer, "kind": kind, "threads": 3,
            "executor": executor, "sparsity": "exact" if kind == "keys" else "predict"}  # fmt: skip
    with hybrid(path, **plan) as engine:
        wanted = np.stack([engine.forward([t % 17]) for t in range(60)])
    with hybrid(path, **plan, device=device) as engine:
        monkeypatch.setattr("hotcold.runtime.mailbox.LAST_NUMBER", 500)  # numbers start again several times
        run = engine.run_ops

        def late(*arguments: Any, **named: Any) -> None:
            if rng.random() < 0.2:
                time.sleep(rng.random() * 1e-3)
            run(*arguments, **named)

        monkeypatch.setattr(engine, "run_ops", late)
        for t in range(n):
            if t % 60 == 0:
                engine.truncate(0)
            assert np.array_equal(engine.forward([t % 60 % 17]), wanted[t % 60]), t
        shared = engine.layer_stats().hybrid
        assert shared is not None and shared.cpu.all() and (shared.gpu > 0).all(), "both sides have work in every layer"
    device.close()


# ------------------------------------------------------------------ ending early


def test_a_worker_that_dies_ends_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, serve, runs, fails = toy(tmp_path), walk.serve, [0], [False]

    def stand_in(*arguments: Any) -> int:
        *_, t, _, control = arguments
        if t == 1:
            words = np.ctypeslib.as_array((ctypes.c_int64 * (walk.GO + 1)).from_address(control))
            while words[walk.GO] == runs[0]:
                time.sleep(0.001)
            runs[0] = int(words[walk.GO])
            if fails[0]:
                raise ZeroDivisionError("the cause")
        return int(serve(*arguments))

    with monkeypatch.context() as patched:
        patched.setattr(walk, "serve", stand_in)
        patched.setattr("hotcold.runtime.team.compile_cached", lambda functions, notify: None)
        with hybrid(path, (part(8), part(8))) as engine:
            fails[0] = True
            with pytest.raises(HotcoldError, match="open it again: worker 1 .*the cause"):
                for _ in range(200):  # the compiled function may serve several before it returns
                    engine.truncate(0)
                    engine.forward([1])
            assert engine.n_past == 0
            with pytest.raises(HotcoldError, match="open it again"):
                engine.forward([1])


@pytest.mark.parametrize("executor", ["graph", "stream"])
@pytest.mark.parametrize("kernel", ["compact_split", "merge"])
def test_a_gpu_that_fails_is_told_and_the_workers_stop(executor: str, kernel: str, tmp_path: Path) -> None:
    device = SimDevice()
    with hybrid(toy(tmp_path), (part(8, True), part(8, True)), executor=executor, device=device) as engine:
        engine._patience = 1.0
        engine.forward([1])
        device.fail(kernel)
        with pytest.raises(HotcoldError, match="the GPU failed, open the model again: .*as the test wants"):
            engine.forward([1])
        assert engine.n_past == 1
        with pytest.raises(HotcoldError, match="cannot compute any more, open it again"):
            engine.forward([1])
    device.close()


def test_ctrl_c_stops_both_sides_and_the_next_call_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, layers = toy(tmp_path), (part(8, True), part(8))
    for executor in ("graph", "stream"):
        with hybrid(path, layers, executor=executor) as engine:
            wanted = steps(engine, [1, 2, 3, 4])
            engine.truncate(1)
            wait = engine._team._wait  # type: ignore[union-attr]

            def interrupted() -> None:
                raise KeyboardInterrupt

            for when in (1, 2):  # the CPU's own layers; its part of the GPU's
                calls = [0]

                def second(when: int = when, calls: list[int] = calls, wait: Callable[[], None] = wait) -> None:
                    calls[0] += 1
                    if calls[0] == when:
                        interrupted()
                    wait()

                with monkeypatch.context() as patched:
                    patched.setattr(engine._team, "_wait", second)
                    with pytest.raises(KeyboardInterrupt):
                        engine.forward([2])
                assert engine.n_past == 1
            assert np.array_equal(steps(engine, [2, 3, 4]), wanted[1:])


def test_a_cpu_that_does_not_answer_in_time_is_an_error_of_the_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hybrid(toy(tmp_path, patterns=("on", "on")), (part(8, True), part(8, True)), patience=0.05) as engine:
        run = engine.run_ops

        def never(*arguments: Any, **named: Any) -> None:
            if "seq" not in named:
                run(*arguments, **named)

        first = engine.forward([1])
        with monkeypatch.context() as patched:
            patched.setattr(engine, "run_ops", never)
            with pytest.raises(HotcoldError, match=r"layer 0: the GPU waited 0.05 s for the CPU's neurons"):
                engine.forward([2])
        engine.truncate(0)
        assert np.array_equal(engine.forward([1]), first)


def test_close_ends_a_token_of_another_thread(tmp_path: Path) -> None:
    device = SimDevice(jitter=2e-3)
    errors: list[str] = []
    with hybrid(toy(tmp_path), (part(8, True), part(8)), device=device) as engine:

        def work() -> None:
            try:
                while True:
                    engine.truncate(0)
                    engine.forward([1, 2, 3])
            except HotcoldError as e:
                errors.append(str(e))

        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.3)
        engine.close()
        thread.join(20)
        assert not thread.is_alive() and len(errors) == 1 and "closed" in errors[0]
        engine.close()
        for call in (lambda: engine.forward([1]), engine.layer_stats):
            with pytest.raises(HotcoldError, match="the model is closed"):
                call()
    device.close()


def test_an_engine_that_was_closed_leaves_the_gpu_as_it_was(tmp_path: Path) -> None:
    device = SimDevice()
    for _ in range(2):
        with hybrid(toy(tmp_path), (part(8, True), part(8)), device=device) as engine:
            engine.forward([1])
        del engine
        assert device.used == 0
    device.close()


def test_unknown_executors_are_refused(tmp_path: Path) -> None:
    device = SimDevice()
    with pytest.raises(HotcoldError, match="executor 'fast' is unknown, choose from graph, stream"):
        with hybrid(toy(tmp_path), (part(8), part(8)), executor="fast", device=device):
            pass
    assert device.used == 0
    with pytest.raises(HotcoldError, match="gpu 'maybe' is unknown"):
        GpuOptions(gpu="maybe")
    device.close()
