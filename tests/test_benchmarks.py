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
from benchmarking.page import remarks, write_page  # noqa: E402
from benchmarking.runs import Options, file_of, load, run_figure, save, sized  # noqa: E402
from benchmarking.summary import fit  # noqa: E402
from comparison.bursts import Burst  # noqa: E402
from synthetic.model import predictor_share  # noqa: E402

NOTHING: dict[str, dict[str, Any]] = {figure.name: {"name": figure.name, "jobs": {}} for figure in FIGURES}
HERE = "here"  # the name of the machine
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


def bench(label: str, others: float, *lines: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"label": label, "kind": "bench", "target": None, "model": "m.gguf", "date": "d", "command": "c",
            "lines": list(lines), "others": others, "noise": 0.2, **more, **MACHINE}  # fmt: skip


def page_of(results: dict[str, dict[str, Any]], old: str = "") -> str:
    return write_page({HERE: results}, old)


def measured(name: str, *jobs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """As results of the first runs of that figure."""
    figure = by_name(name)
    assert figure is not None
    return {name: {"name": name, "jobs": dict(zip((job.key for job in figure.jobs), jobs, strict=False))}}


def test_names_and_files_are_unique_and_models_can_be_asked_for():
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)
    models = {job.model for figure in FIGURES for job in figure.jobs if isinstance(job.model, Model)}
    assert len({model.name for model in models}) == len(models)
    for model in models:
        recipe = make_synthetic.recipe_of(make_synthetic.arguments().parse_args([*model.options(), "-o", "x"]))
        assert recipe.sparsity == model.sparsity
        assert (0 < predictor_share(recipe) <= 0.04) is model.predictor
    for figure in FIGURES:
        keys = [job.key for job in figure.jobs]
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
    page = page_of(NOTHING)
    assert page.count("*not measured*") == len(FIGURES)
    assert all(f"(`{figure.name}`)" in page for figure in FIGURES)


def test_page_tells_what_was_reached_and_keeps_remarks():
    old = ("x <!-- remarks exact-gated here -->\nBy hand.\nTwo lines.\n<!-- end -->"
           "<!-- remarks exact-gated there -->\nno<!-- end --> <!-- remarks predict here -->\nno<!-- end -->")
    page = page_of(NOTHING | measured("exact-gated", compared(2.0), compared(1.7, share=0.8)), old)
    assert "| Exact, gated, 10 % of the neurons active | ratio ≥ 1.8 | 1.70 to 2.00 | 1 of 2, 2 not measured |" in page
    assert "| Share of the bound by memory | ≥ 75% to 90% | 50% to 80% | 1 of 2, 15 not measured |" in page
    assert "| exact | 20.00 (20.00-20.00) | 10.00 (10.00-10.00) | 2.00 (2.00-2.00) | ≥ 1.8 | yes | 10.0% |" in page
    assert "| 40.0 | 50.0% | ≥ 75% | no | 10.00 |" in page, "its share of the bound"
    assert "| 80.0% | ≥ 75% | yes |" in page
    assert "Not measured: llama-1.3b Q4_0, llama-7b Q4_0." in page
    assert "Not measured: dense-f16 llama-1.3b F16, dense-f16 llama-7b F16, dense-q8_0 llama-1.3b Q8_0, " in page
    assert "\n\nCovers llama-1.3b F16, Q8_0 with 2 threads only.\n" in page
    assert "2026-01-02 03:04, `compare it`" in page and "build: -O3" in page and page.count("- a CPU") == 1
    assert remarks(page, "exact-gated", HERE) == "By hand.\nTwo lines.\n"
    again = page_of(NOTHING | measured("exact-gated", compared(2.0), compared(1.7, share=0.8)), page)
    assert again == page, "writing it again changes nothing"


def test_machines_stand_side_by_side():
    here = NOTHING | measured("predict", compared(2.5)) | measured("dense-f16", compared(1.5))
    there = NOTHING | measured("predict", compared(1.5))
    page = write_page({HERE: here, "there": there}, "<!-- remarks predict there -->\nSlow.\n<!-- end -->")
    assert "| figure | wanted | here | reached | there | reached |" in page
    assert "| ratio ≥ 2.4 | 2.50 | 1 of 1, 3 not measured | 1.50 | 0 of 1, 3 not measured |" in page
    section = page.partition("(`predict`)")[2].partition("\n## ")[0]
    assert section.index("### a CPU (`here`)") < section.index("### a CPU (`there`)") < section.index("Slow.")
    assert "*not measured* on `there`" in page.partition("(`dense-f16`)")[2].partition("\n## ")[0]


def test_a_figure_is_reached_when_all_of_it_was_measured_and_all_rows_reach_it():
    whole = measured("dense-q4_k", *[compared(2.0)] * 2)
    line = "| Dense decoding, Q4_K | ratio ≥ 1.0 |"
    assert f"{line} 2.00 | yes |" in page_of(NOTHING | whole)
    whole["dense-q4_k"]["jobs"].popitem()
    assert f"{line} 2.00 | 1 of 1, 1 not measured |" in page_of(NOTHING | whole)
    without_clean_rounds = compared(2.0)
    without_clean_rounds["result"]["speed"][0] |= {"ratio": [], "ratio_median": None, "ours": []}
    page = page_of(NOTHING | measured("dense-q4_k", compared(2.0), without_clean_rounds))
    assert f"{line} 2.00 | 1 of 1, 1 not measured |" in page
    assert f"{line}  | not measured |" in page_of(NOTHING)


def test_a_section_says_how_llama_cpp_ran():
    first, second = compared(2.0), compared(2.0)
    first["result"]["players"] = ["dense", "llama.cpp"]
    second["result"]["players"] = ["dense", "llama.cpp", "llama.cpp, no repack"]
    second["result"]["speed"].append({**second["result"]["speed"][0], "threads": 1})
    page = page_of(NOTHING | measured("dense-q4_k", first, second))
    assert ("Covers llama-1.3b Q4_K with 2 threads only (llama.cpp repacked only); llama-7b Q4_K with 1 and 2 threads."
            in page)  # fmt: skip


def test_start_up_is_judged_and_disturbed_runs_are_marked():
    jobs = [bench(label, others, {"load_s": seconds, "peak_rss": 4e9, "n_threads": 2}, wall_s=1.0, file_mb=4000.0)
            for label, others, seconds in (("mapped", 0.1, 0.4), ("--no-mmap", 0.3, 3.0))]  # fmt: skip
    page = page_of(NOTHING | measured("startup", *jobs))
    assert "| Start-up | < 1 s | 0.40 | yes |" in page
    assert "| mapped | 4.00 | 0.40 |" in page and "| --no-mmap (disturbed) | 4.00 | 3.00 |" in page
    assert "**Disturbed:** others kept 0.30 cores busy meanwhile: --no-mmap, m.gguf." in page


def test_a_text_that_judges_itself_is_in_the_summary():
    text = "| 2 | 2 | 9 (8-9) | 2.50 (2.40-2.60) | ≤ 6 | yes |\n| 4 | 2 | 9 (8-9) | 7.00 (6-8) | ≤ 6 | no |"
    job = bench("demo", 0.0, text=text)
    page = page_of(NOTHING | measured("oversubscribed", job))
    assert "| A machine that is busy | ≤ 6 times the time alone | 2.50 to 7.00 | 1 of 2 |" in page


def test_neither_results_nor_page_name_folders_of_the_machine(tmp_path):
    """Whatever a run told; results of another checkout, as the page finds them, too."""
    figure, job = by_name("relu-smollm2"), compared(2.0)
    assert figure is not None
    job |= {"model": "my-own.gguf", "command": "python scripts/compare_llama_cpp.py my-own.gguf --twins m --reps 3"}
    job["result"]["notes"] = [f"failed: {sys.executable} -m hotcold.runtime.cli bench {Path.home()}/x.gguf",
                              "its file is `my-own.relu-as-silu.gguf`", f"No llama-bench in {tmp_path}/bin",
                              "/opt/v/bin/python3 /opt/hotcold/scripts/comparison/stock_worker.py"]  # fmt: skip
    job["result"]["files"] = {"ours": str(SCRIPTS.parent / ".models" / "my-own.gguf")}
    found = measured(figure.name, job)[figure.name]
    save(tmp_path, figure, found)
    page = page_of(NOTHING | {figure.name: found})
    assert page_of(NOTHING | {figure.name: load(tmp_path, figure)}) == page
    for text in (page, (tmp_path / f"{figure.name}.json").read_text()):
        assert not [folder for folder in (str(Path.home()), sys.executable, str(SCRIPTS.parent), str(tmp_path), "/opt")
                    if folder in text]  # fmt: skip
    assert "- failed: hotcold bench ~/x.gguf\n" in page and "- python scripts/comparison/stock_worker.py\n" in page
    assert "`python scripts/compare_llama_cpp.py smollm2-135m-instruct.gguf --reps 3`" in page
    assert "smollm2-135m-instruct.relu-as-silu.gguf" in page and "my-own" not in page
    assert "- The model was named with --demo" in page


def test_a_disturbed_burst_is_tried_again_and_the_quietest_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "wait_for_quiet", lambda noise, wait: 0.0)
    for others, ran, kept in (([0.1], 1, 0.1), ([0.9, 0.2], 2, 0.2), ([0.9, 0.6, 0.7], 3, 0.6)):
        bursts = iter([Burst("x", 0, "", "", 1.0, 1.0, 1.0, value, 0.0) for value in others])
        monkeypatch.setattr(runs, "run_burst", lambda command, bursts=bursts: next(bursts))
        given = Options(tmp_path, tmp_path, tmp_path, 1, (), noise=0.2, wait=0.0)
        assert runs.quiet_burst([], "it", given).others == kept
        assert next(bursts, None) is None, f"{ran} bursts ran"
    monkeypatch.setattr(runs, "run_burst", lambda command: Burst("x", 1, "", "broke", 1.0, 1.0, 1.0, 0.0, 0.0))
    with pytest.raises(HotcoldError, match="it ended with status 1: broke"):
        runs.quiet_burst([], "it", given)


def test_growth_is_fitted_by_a_line():
    slope, start, r2 = fit([1, 2, 4], [5, 7, 11])
    assert (slope, start, r2) == (pytest.approx(2), pytest.approx(3), pytest.approx(1))
    assert fit([1, 2, 4], [1, 4, 16])[2] < 0.99
    lines = [{"n_depth": d, "n_gen": 4, "n_prompt": 0, "n_threads": 2, "samples_ns": [4e6 * (10 + d)],
              "peak_rss": 1e9} for d in (0, 100, 200)]  # fmt: skip
    jobs = [bench("tokens", 0.0, line, layers=None, n_ff=None) for line in lines]
    page = page_of(NOTHING | measured("scaling-ctx", *jobs))
    assert "| A longer context | R² ≥ 0.99 | 1.0000 | 2 of 2, 3 not measured |" in page
    assert "| 2 | 200 | 210.00 | 4.8 | 1.00 |" in page
    assert "time: 10 ms + 1e+03 ms per 1000 (tokens), R² = 1.0000" in page
    jobs[1]["others"] = 0.3
    page = page_of(NOTHING | measured("scaling-ctx", *jobs))
    assert "| A longer context | R² ≥ 0.99 |  | not measured |" in page and "**Disturbed:**" in page


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


def test_machines_of_one_name_do_not_share_a_folder(tmp_path, monkeypatch):
    figure = by_name("dense-q4_k")
    assert figure is not None
    facts = {"CPU": "a CPU", "CPU model": "family 6, model 1, stepping 1", "instruction sets": "avx2", "cores": "2",
             "memory": "25 GB", "load average": "0.1"}  # fmt: skip
    monkeypatch.setattr(runs, "machine_facts", lambda: facts)
    monkeypatch.setitem(runs.RUNNERS, "compare", lambda *args: {"result": {"machine": facts}})
    monkeypatch.setattr(runs, "make_model", lambda model, given: (tmp_path / "m.gguf", None))
    assert run_figure(figure, options(tmp_path)) == 0
    assert run_figure(figure, options(tmp_path, force=True)) == 0
    monkeypatch.setattr(runs, "machine_facts", lambda: facts | {"instruction sets": "avx2, avx512f"})
    with pytest.raises(HotcoldError, match="another machine, instruction sets avx2, here avx2, avx512f; use another"):
        run_figure(figure, options(tmp_path, force=True))


def test_a_shown_command_is_the_one_that_ran(tmp_path, monkeypatch):
    """With the options that all figures get, and what llama.cpp was asked."""
    ran: list[list[str]] = []

    def start(command: list[str], **given: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        burst = {"others": 0.25}
        Path(command[command.index("-o") + 1]).write_text(json.dumps([
            compared(2.0)["result"] | {"rounds": [{"bursts": {"exact": burst}}], "commands": ["llama-bench -t 2"]}
        ]))  # fmt: skip
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(runs.subprocess, "run", start)
    figure = by_name("exact-opt")
    assert figure is not None
    given = Options(tmp_path / "m", tmp_path / "r", tmp_path, 3, ("--llama-bin", "/bins"), 0.3, 0.0)
    found = runs.run_compare(figure.jobs[0], Path("/m/x.gguf"), None, given)
    words = found["command"].split()
    assert words[:3] == ["python", "scripts/compare_llama_cpp.py", "x.gguf"]
    assert [Path(word).name for word in ran[0][2:-2]] == [Path(word).name for word in words[2:]]
    assert words[-2:] == ["--llama-bin", "bins"] and "--no-mmap" in words
    page = page_of(NOTHING | measured("exact-opt", compared(2.0) | found | {"noise": 0.3}))
    assert "- llama.cpp's command: `llama-bench -t 2`" in page
    assert "- others kept 0.25 cores busy in the worst burst, which counts only up to 0.30" in page


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"notes": ["A run of llama.cpp failed and is left out. It died."]}, "failed and is left out. It died"),
     ({"speed": [{"ours": []}]}, "no round was clean")],
)  # fmt: skip
def test_comparisons_that_compare_nothing_are_no_results(tmp_path, monkeypatch, changes, why):
    def start(command: list[str], **given: Any) -> subprocess.CompletedProcess[str]:
        result = compared(2.0)["result"] | {"rounds": [], "commands": []} | changes
        Path(command[command.index("-o") + 1]).write_text(json.dumps([result]))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(runs.subprocess, "run", start)
    figure = by_name("exact-opt")
    assert figure is not None
    with pytest.raises(HotcoldError, match=why):
        runs.run_compare(figure.jobs[0], Path("/m/x.gguf"), None, options(tmp_path))


@pytest.mark.parametrize("text", ["[]", "{", '{"jobs": {"a": 5}}', '{"jobs": {"a": {"result": null}}}',
                                  '{"jobs": {"a": {"machine": "x"}}}'])  # fmt: skip
def test_broken_results_are_told(tmp_path, text):
    figure = FIGURES[0]
    (tmp_path / f"{figure.name}.json").write_text(text)
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
    done = benchmarks("--results", tmp_path, "--write", tmp_path / "none" / "page.md")
    assert done.returncode == 2 and "no such folder" in done.stderr
    (tmp_path / "page.md").write_bytes(b"\xff")
    done = benchmarks("--results", tmp_path, "--write", tmp_path / "page.md")
    assert done.returncode == 1 and done.stderr.startswith("benchmarks: 'utf-8' codec")


def test_what_is_the_same_everywhere_stands_once(tmp_path):
    text = {"label": "demo", "kind": "text", "target": None, "model": "", "date": "d", "command": "c",
            "text": "# Heading\n\nnumbers", "others": 0.0, "noise": 0.2, **MACHINE}  # fmt: skip
    found = measured("hybrid-simulated", text)
    figure = by_name("hybrid-simulated")
    assert figure is not None
    for results in (runs.RESULTS / HERE, runs.RESULTS / "there"):
        assert file_of(results, figure) == runs.RESULTS / "anywhere" / f"{figure.name}.json"
    assert file_of(runs.RESULTS / HERE, FIGURES[0]) == runs.RESULTS / HERE / f"{FIGURES[0].name}.json"
    save(tmp_path, figure, found[figure.name])
    assert load(tmp_path, figure)["jobs"] and (tmp_path / "anywhere" / f"{figure.name}.json").exists()
    page = write_page({HERE: NOTHING | found, "there": NOTHING | found | measured("predict", compared(2.0))}, "")
    section = page.partition("(`hybrid-simulated`)")[2].partition("\n## ")[0]
    assert section.count("numbers") == 1 and "(`here`)" not in section and "Covers" not in section
    assert "### a CPU (`there`)" in page and "### a CPU (`here`)" not in page
    by_hand = section.replace("hybrid-simulated anywhere -->\n", "hybrid-simulated anywhere -->\nA remark.\n")
    assert "A remark." in page_of(NOTHING | found, page.replace(section, by_hand))


def test_runs_without_a_model(tmp_path, monkeypatch):
    ran: list[list[str]] = []

    def burst(command: list[str]) -> Burst:
        ran.append(command[1:])
        return Burst("x", 0, "a table", "", 1.0, 1.0, 1.0, 0.0, 0.0)

    monkeypatch.setattr(runs, "wait_for_quiet", lambda noise, wait: 0.0)
    monkeypatch.setattr(runs, "run_burst", burst)
    monkeypatch.setattr(runs, "make_model", lambda model, given: (tmp_path / "m.gguf" if model else Path(), None))
    figure = by_name("hybrid-simulated")
    assert figure is not None and run_figure(figure, options(tmp_path)) == 0
    found = load(tmp_path / "results", figure)["jobs"]
    assert (tmp_path / "results" / "anywhere" / "hybrid-simulated.json").exists()
    assert ran[0] == [str(SCRIPTS / "simulate_published.py"), "--tokens", "24"]
    texts = [job["text"] for job in found.values()]
    assert texts == ["a table", "```\na table\n```"] and [job["model"] for job in found.values()] == ["", "m.gguf"]
