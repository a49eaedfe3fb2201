"""benchmarks.py: what is run, what is kept, and the page that is written of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hotcold.runtime.errors import HotcoldError

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))  # the scripts import each other by plain names

import make_synthetic  # noqa: E402
from benchmarking import runs  # noqa: E402
from benchmarking.figures import FIGURES, Model, by_name  # noqa: E402
from benchmarking.page import fit, remarks, write_page  # noqa: E402
from benchmarking.runs import Options, job_key, load, run_figure, sized  # noqa: E402

NOTHING: dict[str, dict[str, Any]] = {figure.name: {"name": figure.name, "jobs": {}} for figure in FIGURES}
MACHINE = {"machine": {"CPU": "a CPU", "load average": "0.1"}, "versions": {"hotcold": "1"}, "load_at_end": "0.2"}


def options(folder: Path, **changes: Any) -> Options:
    return Options(folder / "models", folder / "results", folder / "demo.gguf", 1, (), 1000.0, 0.0, **changes)


def compared(ratio: float, share: float = 0.5) -> dict[str, Any]:
    row = {"threads": 2, "test": "tg32", "mode": "exact", "ours": [20.0], "stock": [10.0], "stock_is": "llama.cpp",
           "ratio": [ratio], "ratio_median": ratio, "to_dense": [1.5], "to_dense_median": 1.5,
           "clean": "1/1"}  # fmt: skip
    use = {"threads": 2, "test": "tg32", "who": "exact", "speed": 20.0, "bytes_per_token": 1e9, "bandwidth": 40e9,
           "bandwidth_share": share, "cpu_speed": 10.0, "share_computed": 0.1, "ffn_bytes_share": 0.4}  # fmt: skip
    return {"label": "a model", "kind": "compare", "target": 1.8, "model": "m.q8_0.gguf", "date": "2026-01-02 03:04",
            "command": "compare it",
            "result": {"speed": [row], "use": [use], "quality": [], "notes": ["a note"], "llama_cpp": {"build": "-O3"},
                       **MACHINE}}  # fmt: skip


def test_names_and_files_are_unique_and_models_can_be_asked_for():
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)
    models = {job.model for figure in FIGURES for job in figure.jobs if isinstance(job.model, Model)}
    assert len({model.name for model in models}) == len(models)
    for model in models:
        recipe = make_synthetic.recipe_of(make_synthetic.arguments().parse_args([*model.options(), "-o", "x"]))
        assert recipe.sparsity == model.sparsity
    for figure in FIGURES:
        keys = [job_key(job) for job in figure.jobs]
        assert len(set(keys)) == len(keys) and (keys or figure.source)
        assert all(by_name(name) for name in figure.source)


def test_tiny_runs_keep_their_kind():
    for figure in FIGURES:
        for job in figure.jobs:
            tiny = sized(job, tiny=True)
            assert tiny.kind == job.kind and len(tiny.options) == len(job.options)
            if isinstance(job.model, Model):
                assert isinstance(tiny.model, Model) and tiny.model.shape.endswith("tiny")
                assert tiny.model.sparsity == job.model.sparsity


def test_page_without_results_says_so_everywhere():
    page = write_page(NOTHING, "")
    assert page.count("*not measured*") == len(FIGURES)
    assert all(f"(`{figure.name}`)" in page for figure in FIGURES)


def test_page_tells_what_was_reached_and_keeps_remarks():
    old = "x <!-- remarks exact-gated -->\nBy hand.\nTwo lines.\n<!-- end --> <!-- remarks predict -->\nno<!-- end -->"
    results = NOTHING | {"exact-gated": {"jobs": {"a": compared(2.0), "b": compared(1.7, share=0.8)}}}
    page = write_page(results, old)
    assert "| Exact, gated, 10 % of the neurons active | ≥ 1.8 | 1.70 to 2.00 | 1 of 2 |" in page
    assert "| exact | 20.00 (20.00-20.00) | 10.00 (10.00-10.00) | 2.00 (2.00-2.00) | ≥ 1.8 | yes | 10.0% |" in page
    assert "| 40.0 | 50% | ≥ 75% | no | 10.00 |" in page and "| 80% | ≥ 75% | yes |" in page, "its share of the bound"
    assert "2 of 4 runs: not measured." in page
    assert "2026-01-02 03:04, `compare it`" in page and "build: -O3" in page and page.count("- a CPU") == 1
    assert remarks(page, "exact-gated") == "By hand.\nTwo lines.\n"
    assert write_page(results, page) == page, "writing it again changes nothing"


def test_growth_is_fitted_by_a_line():
    slope, start, r2 = fit([1, 2, 4], [5, 7, 11])
    assert (slope, start, r2) == (pytest.approx(2), pytest.approx(3), pytest.approx(1))
    assert fit([1, 2, 4], [1, 4, 16])[2] < 0.99
    lines = [{"n_depth": d, "n_gen": 4, "n_prompt": 0, "n_threads": 2, "samples_ns": [4e6 * (10 + d)],
              "peak_rss": 1e9} for d in (0, 100, 200)]  # fmt: skip
    job = {"label": "depth", "layers": None, "n_ff": None, "lines": lines, "date": "d", "command": "c", **MACHINE}
    page = write_page(NOTHING | {"scaling-ctx": {"jobs": {"depth": job}}}, "")
    assert "| 2 | 200 | 210.00 | 4.8 | 1.00 |" in page
    assert "time: 10 ms + 1e+03 ms per 1000 (depth), R² = 1.0000" in page


def test_what_is_measured_is_not_measured_again_and_failures_stop_nothing(tmp_path, monkeypatch):
    figure = by_name("dense-q4_0")
    assert figure is not None
    ran: list[str] = []

    def runner(job: Any, model: Path, twin: Path | None, given: Options) -> dict[str, Any]:
        ran.append(job.label)
        if job.label.startswith("llama-7b") and len(ran) == 2:
            raise HotcoldError("it broke")
        return {"command": "c"}

    monkeypatch.setitem(runs.RUNNERS, "compare", runner)
    monkeypatch.setattr(runs, "make_model", lambda model, given: (tmp_path / "m.gguf", None))
    assert run_figure(figure, options(tmp_path)) == 1
    assert ran == ["llama-1.3b Q4_0", "llama-7b Q4_0"]
    assert run_figure(figure, options(tmp_path)) == 0
    assert ran[2:] == ["llama-7b Q4_0"], "only what has no result"
    assert run_figure(figure, options(tmp_path)) == 0 and len(ran) == 3
    assert run_figure(figure, options(tmp_path, force=True)) == 0 and len(ran) == 5
    assert len(load(tmp_path / "results", figure)["jobs"]) == 2


def test_broken_results_are_told(tmp_path):
    figure = FIGURES[0]
    (tmp_path / f"{figure.name}.json").write_text("[]")
    with pytest.raises(HotcoldError, match="not a file of results"):
        load(tmp_path, figure)


def benchmarks(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "benchmarks.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_one_figure_from_model_to_page(tmp_path):
    page = tmp_path / "BENCHMARKS.md"
    done = benchmarks("scaling-layers", "--tiny", "--results", tmp_path / "r", "--models", tmp_path / "m",
                      "--noise", 1000, "--wait", 0, "--write", page, "--list")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "3 of 3 runs measured" in done.stdout
    found = json.loads((tmp_path / "r" / "scaling-layers.json").read_text())
    assert [job["layers"] for job in found["jobs"].values()] == [1, 2, 4]
    assert "R² =" in page.read_text()


def test_unknown_figures_and_missing_models_are_one_line(tmp_path):
    done = benchmarks("speed-of-light", "--results", tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("benchmarks: no figure 'speed-of-light', choose from all, ")
    done = benchmarks("relu-smollm2", "--results", tmp_path, "--demo", tmp_path / "none.gguf")
    assert done.returncode == 1 and "scripts/run makes it" in done.stderr and "Traceback" not in done.stderr
