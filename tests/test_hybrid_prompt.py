"""Blocks of a prompt's tokens on the simulated GPU, with the CPU's neurons sent there, against the CPU alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu.build import compiler
from cuda_on_cpu.sim_device import SimDevice
from gguf import GGMLQuantizationType as Type
from hybrid import CPU, config_of, error, hybrid, part, steps
from small_models import Spec, all_of, write_model

from hotcold.runtime.engine import Engine
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.kernels.formats import PACK_TOKENS

pytestmark = pytest.mark.skipif(not compiler()[0], reason="no C++ compiler")

TOKENS = [int(t) for t in np.arange(50) * 37 % 101]
SPECS = {
    "gated": Spec(patterns=("free", "mixed"), biases=True, n_ff=(100, 33)),
    "not gated": Spec(gated=False, activation="relu2", biases=True),
    "stock": Spec(layout="stock", activation="silu"),
    "opt": Spec(arch="opt", gated=False, biases=True, n_head_kv=4),
    "qwen3": Spec(arch="qwen3", window=8),
}


class NoLibrary(SimDevice):
    """Without the library's product."""

    has_gemm = False


def model(folder: Path, name: str, kind: Type) -> Path:
    return write_model(folder / "m.gguf", Spec(**{**SPECS[name].__dict__, **all_of(kind)}))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kind", [Type.F16, Type.Q8_0, Type.Q4_0])
@pytest.mark.parametrize("device", [SimDevice, NoLibrary])
def test_blocks_have_the_logits_of_the_cpu(name: str, kind: Type, device: Any, tmp_path: Path) -> None:
    """Long blocks and short ones, after others, and a token after them. The library's product is of halves: its
    activations are rounded to 11 bits and not, as the CPU's for quantized matrices, to 8."""
    path = model(tmp_path, name, kind)
    n_ff = config_of(path).n_ff
    with Engine.open(path, threads=2, n_ctx=64) as engine:
        wanted = engine.forward(TOKENS, "all")
        after = engine.forward([3])
    near = 1e-3 if kind == Type.F16 else 3e-2
    plans: list[Any] = [("layers", (CPU, part(n_ff[1], True)))]
    if name != "stock":
        plans += [("keys", (part(32, True), part(n_ff[1] - 1))), ("keys", (part(0), part(0, True)))]
    for plan, layers in plans:
        gpu = device()
        with hybrid(path, layers, plan, device=gpu, blocks_from=PACK_TOKENS) as engine:
            assert error(engine.forward(TOKENS, "all"), wanted) < near
            assert error(engine.forward([3]), after) < near
            engine.truncate(0)
            engine.forward(TOKENS[:40], "none")
            assert error(engine.forward(TOKENS[40:]), wanted[-1]) < near
            assert (gpu.counts["gemm"] > 0) == gpu.has_gemm
        gpu.close()


@pytest.mark.parametrize("kind", [Type.F16, Type.Q4_0])
def test_neurons_that_come_in_many_parts(kind: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The staging is small, so that a layer needs several of its turns."""
    path = write_model(tmp_path / "m.gguf", Spec(n_ff=300, biases=True, **all_of(kind)))
    with Engine.open(path, threads=2, n_ctx=64) as engine:
        wanted = engine.forward(TOKENS)
    rows = 3 * (128 if kind == Type.F16 else 36)  # of a neuron, bytes
    monkeypatch.setattr("hotcold.runtime.gpu.memory.STAGE", 64 * rows + 8 * 256)
    for layers in ((part(32), part(0)), (part(70, True), part(299))):
        device = SimDevice(jitter=1e-3)
        with hybrid(path, layers, device=device, blocks_from=PACK_TOKENS) as engine:
            sent = device.counts["h2d"]
            assert error(engine.forward(TOKENS), wanted) < (1e-3 if kind == Type.F16 else 3e-2)
            assert device.counts["h2d"] - sent >= 5
        device.close()


def test_short_prompts_go_token_by_token(tmp_path: Path) -> None:
    path = model(tmp_path, "gated", Type.F16)
    layers, notes = (part(32, True), part(33)), []  # type: ignore[var-annotated]
    with hybrid(path, layers, blocks_from=20) as engine:
        single = steps(engine, TOKENS[:19])
        engine.truncate(0)
        assert np.array_equal(engine.forward(TOKENS[:19], "all"), single)
        engine.truncate(0)
        engine.forward(TOKENS[:20])
        assert engine._calls == [38, 1]
    with hybrid(path, layers, notes=notes) as engine:
        assert engine._blocks_from >= PACK_TOKENS, "measured"
        assert any("tokens and more in blocks" in note for note in notes)
    with hybrid(path, (part(100), part(33)), notes=notes) as engine:
        assert engine._blocks_from == PACK_TOKENS, "nothing has to be sent"


def test_an_interrupted_block_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model(tmp_path, "gated", Type.F16)
    with hybrid(path, (part(32), part(0)), blocks_from=PACK_TOKENS) as engine:
        wanted = engine.forward(TOKENS)
        engine.truncate(10)
        send = engine._staging.send

        def interrupted(parts: Any) -> Any:
            send(parts)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(engine._staging, "send", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.forward(TOKENS[10:])
        assert engine.n_past == 10
        engine.truncate(0)
        assert np.array_equal(engine.forward(TOKENS), wanted)


def test_a_gpu_that_fails_in_a_block_is_told(tmp_path: Path) -> None:
    device = SimDevice()
    with hybrid(model(tmp_path, "gated", Type.F16), (part(32), part(0)), device=device, blocks_from=6) as engine:
        device.fail("activate_tokens")
        with pytest.raises(HotcoldError, match="the GPU failed, open the model again: .*activate_tokens"):
            engine.forward(TOKENS)
        assert engine.n_past == 0
    device.close()
