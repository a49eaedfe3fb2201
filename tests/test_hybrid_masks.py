"""The neurons that fire, named by the GPU and by the CPU alone; and a real model on the simulated GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cuda_on_cpu.build import compiler
from gguf import GGMLQuantizationType as Type
from hybrid import config_of, error, hybrid, on_cpu, part, shares, steps
from small_models import Spec, all_of, write_model

from hotcold.runtime.gpu.engine import HybridEngine
from hotcold.runtime.trace import Trace

pytestmark = pytest.mark.skipif(not compiler()[0], reason="no C++ compiler")

TOKENS = [int(t) for t in np.arange(12) * 37 % 101]
DEMO = Path(__file__).resolve().parents[1] / ".models/smollm2-135m-instruct.gguf"


def fired_on_cpu(path: Path) -> list[list[set[int]]]:
    """Per layer and token, by the CPU's kernels for many tokens."""
    with Trace.open(path, threads=2, n_ctx=len(TOKENS)) as trace:
        n, found = len(TOKENS), []
        trace.embed(TOKENS)
        for layer in range(trace.config.n_layer):
            trace.attention(layer, n, 0)
            trace.keys(layer, n)
            found.append([set(np.flatnonzero(row).tolist()) for row in trace.fired(layer, n)])
            trace.values(layer, n)
            trace.down(layer, n)
        return found


def sent_to_cpu(engine: HybridEngine, layer: int) -> set[int]:
    """What the GPU has last listed for the CPU in a layer."""
    box = engine._mailbox.host
    return set(box.ids[layer, : int(box.hdr[layer]) & 0xFFFFFFFF].tolist())


@pytest.mark.parametrize("kind", [Type.F16, Type.Q8_0, Type.Q4_0])
@pytest.mark.parametrize("executor", ["graph", "stream"])
def test_exact_plans_name_the_neurons_that_fire(tmp_path: Path, kind: Type, executor: str) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, Spec(patterns=("mixed", "free"), **all_of(kind)))
    wanted = fired_on_cpu(path)
    for hot in (0, 37):
        with hybrid(path, (part(hot, True),) * 2, executor=executor) as engine:
            for t, token in enumerate(TOKENS):
                engine.forward([token])
                for layer in range(2):
                    cold = {i for i in wanted[layer][t] if i >= hot}
                    assert cold and sent_to_cpu(engine, layer) == cold, (hot, t, layer)


@pytest.mark.skipif(not DEMO.exists(), reason="the demo model is not there: scripts/run makes it")
@pytest.mark.parametrize("executor", ["graph", "stream"])
def test_the_relufied_demo_model(executor: str) -> None:
    tokens, config = [504, 3575, 282, 260], config_of(DEMO)
    wanted = on_cpu(DEMO, tokens)
    for first, share, kind in ((0, 0.3, "keys"), (20, 0.0, "keys"), (0, 1.0, "all")):
        with hybrid(DEMO, shares(config, first, share, keys=True), kind, executor=executor, blocks_from=6) as engine:
            found = steps(engine, tokens)
        assert error(found, wanted) < 3e-2  # Q8_0: roundings of act blocks that fall on the other side
        assert (found.argmax(axis=1) == wanted.argmax(axis=1)).all()
