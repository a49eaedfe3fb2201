"""gpu_check.py's part on speed: how llama.cpp's share of a budget is found, what cannot be measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.runtime.errors import HotcoldError

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))  # the scripts import each other by plain names

from comparison.settings import STOCK  # noqa: E402
from gpu_checks import llama, speed  # noqa: E402
from gpu_checks.settings import Settings  # noqa: E402
from gpu_checks.vram import Meter  # noqa: E402


def test_as_many_layers_of_llama_cpp_as_fit() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        most, base, each = int(rng.integers(1, 90)), rng.uniform(0, 9), rng.uniform(0.1, 3, 100)
        needs = [0.0, *(base + np.cumsum(each))[:most]]  # with no layer there, no GPU is used
        asked: list[int] = []

        def need(n: int, needs: list[float] = needs, asked: list[int] = asked) -> float:
            asked.append(n)
            return needs[n]

        budget = rng.uniform(-1, 1.1) * needs[-1]
        want = max((n for n in range(most + 1) if needs[n] <= budget), default=0)
        assert llama.largest_fitting(budget, most, need) == want
        assert len(set(asked)) < 24


def test_as_many_layers_as_fit_where_more_run_out_of_memory() -> None:
    assert llama.largest_fitting(10, 33, lambda n: n + 3 if n < 15 else float("inf")) == 7
    assert llama.largest_fitting(100, 33, lambda n: n + 3 if n < 15 else float("inf")) == 14


def fake_bench(folder: Path, text: str) -> str:
    program = folder / "llama-bench"
    program.write_text(f"#!{sys.executable}\n{text}")
    program.chmod(0o755)
    return str(program)


def test_llama_bench_is_run_and_read(tmp_path: Path) -> None:
    program = fake_bench(
        tmp_path,
        """
import json, os, sys
assert sys.argv[sys.argv.index("-ngl") + 1] == "0" and sys.argv[sys.argv.index("-fa") + 1] == "1"
assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
for n_prompt, n_gen, speed in ((8, 0, 90.0), (0, 4, 30.0)):
    print(json.dumps({"n_prompt": n_prompt, "n_gen": n_gen, "samples_ts": [speed, speed + 1], "build_commit": "abc",
                      "build_number": 5, "backends": "CUDA"}))
""",
    )
    found = llama.bench(program, "models/m.gguf", 0, 2, 8, 4, 2, None, 60)
    assert found["command"] == (
        "CUDA_VISIBLE_DEVICES= llama-bench -m m.gguf -p 8 -n 4 -r 2 -ngl 0 -fa 1 -t 2 -o jsonl"
    )
    assert (found["pp"], found["tg"], found["vram"], found["build"]) == ([90, 91], [30, 31], None, "abc (5), CUDA")
    program = fake_bench(tmp_path, "import sys; sys.exit('out of memory')")
    with pytest.raises(HotcoldError, match="status 1: out of memory: .*llama-bench -m m.gguf"):
        llama.bench(program, "m.gguf", 9, 2, 8, 4, 2, None, 60)
    program = fake_bench(tmp_path, "import time; time.sleep(60)")
    with pytest.raises(llama.TooLong, match="was ended after 0 of 0 s"):
        llama.bench(program, "m.gguf", 9, 2, 8, 4, 2, None, 0.2)


def searching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs: Any) -> tuple[speed.Bench, list[int]]:
    """A Bench of 8 layers, and with how many llama.cpp was tried. needs(layers): bytes, or raises."""
    tmp_path.mkdir(exist_ok=True)
    tried: list[int] = []
    bench = speed.Bench(Settings("sim", tmp_path, tmp_path, model="m", stock="s", llama_bench="b"))
    bench.meter = Meter(bench)
    bench.keep(n_layer=8)

    def run(program: str, model: str, layers: int, *_: Any) -> dict[str, Any]:
        tried.append(layers)
        return {"vram": needs(layers), "pp": [5.0], "tg": [5.0]}

    monkeypatch.setattr(llama, "bench", run)
    return bench, tried


def test_what_a_search_that_was_killed_found_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(layers: int) -> int:
        if layers == 4:
            raise KeyboardInterrupt  # no time to tidy up
        return 10 * layers

    bench, tried = searching(tmp_path, monkeypatch, killed)
    with pytest.raises(KeyboardInterrupt):
        speed.layers_of(bench, 40)
    assert tried == [9, 4]
    told = speed.turn(bench, 1, 40, STOCK)
    assert told["note"] == "not measured: how many layers fit was not found" and "tg" not in told and tried == [9, 4]
    assert speed.turn(bench, 1, 0, STOCK)["layers"] == 0  # without VRAM there is nothing to find
    bench, tried = searching(tmp_path, monkeypatch, lambda layers: 10 * layers)
    assert speed.layers_of(bench, 40)["layers"] == 4 and 9 not in tried
    assert speed.turn(bench, 1, 40, STOCK)["layers"] == 4
    other = speed.Bench(Settings("sim", tmp_path, tmp_path, model="m2", stock="s", llama_bench="b"))
    assert set(other.state) == {"about"}


def test_layers_that_cannot_be_found_are_not_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: HotcoldError) -> Any:
        raise error

    for needs, words in (
        (lambda layers: fail(HotcoldError("no such option")), "not found: it fails with one layer already"),
        (lambda layers: fail(llama.TooLong("was ended")), "not found: was ended"),
    ):
        bench, _ = searching(tmp_path / words[-1], monkeypatch, needs)
        assert words in speed.layers_of(bench, 40)["note"] and not bench.state.get("layers")
    bench.meter = None
    assert "the driver cannot be asked" in speed.layers_of(bench, 40)["note"]
    bench, _ = searching(tmp_path / "none", monkeypatch, lambda layers: 100)
    assert speed.layers_of(bench, 40)["layers"] == 0  # it was found that not one fits


def test_a_plan_that_cannot_be_measured_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = speed.Bench(Settings("sim", tmp_path, tmp_path))
    said = {"pp": [10.0], "tg": [5.0], "vram": 80}
    monkeypatch.setattr(bench, "ask", lambda who, budget: said)
    assert speed.turn(bench, 1, 100, "keys")["ok"] is None
    over = speed.turn(bench, 1, 70, "keys")
    assert over["ok"] is False and "took 80 B" in over["note"]

    def fail(who: str, budget: int) -> None:
        raise HotcoldError("too small")

    monkeypatch.setattr(bench, "ask", fail)
    assert speed.turn(bench, 1, 100, "keys")["note"] == "not measured: too small"
