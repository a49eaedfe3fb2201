"""gpu_check.py: a dry run on the emulated device; parts that hang, break and run out of time; what is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu.build import compiler

from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gpu.device import DeviceUnavailable, open_device
from hotcold.runtime.stats import HybridStats, LayerStats

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))  # the scripts import each other by plain names

from comparison.settings import STOCK  # noqa: E402
from gpu_checks import kernels, latencies, plans  # noqa: E402
from gpu_checks.boxed import run_part  # noqa: E402
from gpu_checks.page import FILE, NO_GPU, keep, load, section  # noqa: E402
from gpu_checks.plot import plot  # noqa: E402
from gpu_checks.report import failures, kernel_rows, ratio, report, short_table, speeds  # noqa: E402
from gpu_checks.settings import Part, Settings  # noqa: E402
from gpu_checks.vram import Meter  # noqa: E402


def run_script(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


# ------------------------------------------------------------------ the whole


@pytest.mark.skipif(not compiler()[0], reason="no C++ compiler")
def test_a_dry_run_goes_through_all_parts(tmp_path: Path) -> None:
    only = (
        r"card|machine|token: (norm|axpy)|prompt: quantize|q8_0: (keys|predict), (s|g)|launch|flag|matvec q4|"
        r"round 1, .*(keys|cpu)$"
    )
    done = run_script("--device", "sim", "--minutes", 8, "-o", tmp_path / "out", "--models", tmp_path, "--only", only)
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    found = {part["name"]: part["items"] for part in result["parts"]}
    assert [len(found[name]) for name in ("environment", "kernels", "plans", "latencies")] == [2, 3, 4, 3]
    assert all(item["ok"] for name in ("kernels", "plans") for item in found[name])
    assert {(item["who"], len(item["tg"])) for item in found["speed"] if "who" in item} == {("keys", 2), ("cpu", 2)}
    rows = {row["kernel"]: row for row in result["kernels"]}
    assert rows["norm_token"]["worst"] < 1e-6 and rows["merge"]["ok"] and rows["attend_part"]["ok"] is None
    text = (tmp_path / "out" / "report.md").read_text()
    assert "Dry run" in text and "| norm_token |" in text and "llama-tiny q8_0: keys, graph" in text
    assert len(done.stdout.splitlines()) < 45 and "plans:   4 of 4 right" in done.stdout
    assert str(tmp_path) not in text


def test_without_a_gpu_one_line_says_why(tmp_path: Path) -> None:
    try:
        open_device().close()
        pytest.skip("there is a GPU")
    except DeviceUnavailable as error:
        why = error.reason
    done = run_script("-o", tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr == f"gpu_check: no GPU: {why}\n"


def test_options_that_do_not_go_together_are_told(tmp_path: Path) -> None:
    for options, words in (
        (["--stock", "x"], "--stock goes with --model"),
        (["--llama-bin", tmp_path], "no llama-bench in it"),
        (["--parts", "speed,sound"], "--parts sound: there are environment,"),
        (["--only", "("], "--only (: not a regular expression"),
        (["--minutes", "nan"], "must be above 0"),
        (["--vram-budgets", "2GiB,many"], "many"),
    ):
        done = run_script(*options)
        assert done.returncode == 2 and words in done.stderr


# ------------------------------------------------------------------ parts in boxes

FAKE = """
import os, time
from gpu_checks.child import Item
from hotcold.runtime.gpu.device import DeviceError

def fail(error): raise error

def items(settings):
    yield Item("well", lambda: {"ok": True, "note": settings.kind})
    yield Item("wrong", lambda: fail(AssertionError("3 is not\\n4")))
    yield Item("breaks the card", lambda: fail(DeviceError("illegal address")))
    yield Item("dies", lambda: os._exit(7))
    yield Item("prints", lambda: print("not an event") or {"ok": None, "process": os.getpid()})
    yield Item("hangs", lambda: time.sleep(60), patience=2)
    yield Item("last", lambda: {"ok": True, "process": os.getpid()})
"""


def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, patience: float, seconds: float) -> Any:
    (tmp_path / "fake_part.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    part = Part("fake", "Fake", 1.0, True, patience, "fake_part")
    said: list[str] = []
    settings = Settings("sim", tmp_path / "out", tmp_path, kind="q8_0")
    return run_part(part, settings, time.monotonic() + seconds, said.append), said


def test_what_one_item_breaks_the_others_do_not_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, said = box(tmp_path, monkeypatch, FAKE, patience=8, seconds=120)
    notes = {item["name"]: item.get("note", "") for item in outcome.items}
    assert list(notes) == ["well", "wrong", "breaks the card", "dies", "prints", "hangs", "last"]
    assert notes["well"] == "q8_0" and "AssertionError: 3 is not 4 (fake_part.py:" in notes["wrong"]
    assert "illegal address" in notes["breaks the card"] and "status 7" in notes["dies"]
    assert notes["hangs"] == "no result within 2 s, ended"
    assert [item["name"] for item in outcome.failures] == ["wrong", "breaks the card", "dies", "hangs"]
    assert outcome.get("prints")["process"] != outcome.get("last")["process"] and not outcome.left_out
    assert said[0] == "ok   well  q8_0" and said[1].startswith("FAIL wrong")
    assert "not an event" in (tmp_path / "out" / "fake.log").read_text()


def test_what_does_not_fit_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = FAKE.replace('"well", lambda: {', '"well", lambda: time.sleep(3) or {')
    outcome, _ = box(tmp_path, monkeypatch, text, patience=30, seconds=2.5)
    assert [item["name"] for item in outcome.items] in (["well"], [])  # a slow start leaves no time for any
    assert outcome.left_out[-3:] == ["prints", "hangs", "last"] and not outcome.failures


def test_a_part_that_cannot_begin_fails_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, _ = box(tmp_path, monkeypatch, "raise ImportError('no cupy')", patience=30, seconds=60)
    assert [item["note"] for item in outcome.failures] == ["the process ended with status 1, see fake.log"]
    assert "no cupy" in (tmp_path / "out" / "fake.log").read_text()


# ------------------------------------------------------------------ kernels


def test_errors_belong_to_the_kernels_that_ran_before_the_check() -> None:
    watch = kernels.Watch()
    for kernel in ("a", "b"):
        watch.launched(kernel)
    watch.error(np.array([1.0, 2.5]), np.array([1.0, 2.0]), 10.0, 0.1)
    watch.launched("c")
    watch.error(np.array([np.nan]), np.array([1.0]), 1.0, 0.1)
    watch.blame()
    assert watch.rows["a"] == watch.rows["b"]
    assert watch.rows["a"] == {"launches": 1, "worst": 0.05, "of_allowed": 0.5, "wrong": False}
    assert watch.rows["c"]["worst"] > 1e9 and watch.rows["c"]["wrong"]


def test_parameters_of_marks_are_combined_as_pytest_does() -> None:
    @pytest.mark.parametrize("kind", [1, 2])
    @pytest.mark.parametrize(("rows", "cols"), [(3, 4), (5, 6)])
    def function(kind: int, rows: int, cols: int) -> None: ...

    found = list(kernels.combinations(function))
    assert len(found) == 4 and {"kind": 2, "rows": 5, "cols": 6} in found
    assert sorted(kernels.parametrized(function)) == ["cols", "kind", "rows"]
    assert list(kernels.combinations(lambda: None)) == [{}]


def test_a_kernel_is_right_if_all_its_cases_are() -> None:
    def seen(worst: float | None, wrong: bool = False) -> dict[str, Any]:
        return {"launches": 2, "worst": worst, "of_allowed": worst, "wrong": wrong}

    found = [{"rows": {"merge": seen(None), "begin": seen(0.5)}}, {"rows": {"merge": seen(0.25, wrong=True)}},
             {"rows": {"merge": seen(0.125)}}, {}]  # fmt: skip
    rows = {row["kernel"]: row for row in kernel_rows(found)}
    assert rows["merge"] == {
        "kernel": "merge",
        "cases": 3,
        "launches": 6,
        "worst": 0.25,
        "of_allowed": 0.25,
        "ok": False,
    }
    assert rows["begin"]["ok"] is True and rows["norm_token"]["ok"] is None


# ------------------------------------------------------------------ latencies


@pytest.mark.skipif(not compiler()[0], reason="no C++ compiler")
def test_all_rows_of_lists_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = latencies.Bench(Settings("sim", tmp_path, tmp_path))
    for kind in latencies.KINDS:
        assert "10 lists, each of 3 of 32 rows" in latencies.listed_values(bench, kind)["note"]
        assert latencies.listed_down(bench, kind)["unit"] == "GB/s"
    m = latencies.Matrices(bench, "f16")
    lists = [set(bench.device.download(ids)[: m.active]) for ids in m.ids]
    assert len(set.union(*lists)) == latencies.LISTS * m.active
    m.ones = bench.device.upload(np.zeros(m.neurons, np.float32))  # the rows after the first launch are skipped
    monkeypatch.setattr(latencies, "Matrices", lambda bench, kind: m)
    assert latencies.listed_values(bench, "f16")["ok"] is False
    bench.device.close()


# ------------------------------------------------------------------ plans


def answer(logits: np.ndarray, computed: float, hybrid: bool) -> plans.Answer:
    two = np.full(2, computed)
    shared = HybridStats(0, two, two, two, 100, "a card") if hybrid else None
    return plans.Answer(logits, [0], LayerStats(1, two, two, two, two, shared))


def test_plans_are_judged() -> None:
    logits = np.array([[1.0, 2.0, 0.0], [5.0, 1.0, 4.9999]], np.float32)
    want = answer(logits, 0.25, False)

    def judged(found: plans.Answer, peak: int = 90, exact: bool = True) -> str:
        payload = plans.judge(want, found, 100, peak, "f16", exact, ["no GPU"])
        assert payload["ok"] == payload["note"].startswith("error")
        return str(payload["note"])

    assert judged(answer(logits, 0.25, True), 100).startswith("error 0.0e+00")
    near = logits + np.array([[0, 0, 0], [0, 0, 2e-4]], np.float32)  # another top token, by rounding
    assert judged(answer(near, 0.25, True)).startswith("error")
    assert "1 of 2 tokens are others" in judged(answer(logits[:, [1, 0, 2]] + [[0, 0, 0], [4, -4, 0]], 0.25, True))
    assert "logits are off by" in judged(answer(logits * np.float32(1.01), 0.25, True))
    assert "logits are off by nan" in judged(answer(logits * np.float32(np.nan), 0.25, True))
    assert "20.00% of the neurons are others" in judged(answer(logits, 0.3, True))
    assert judged(answer(logits, 0.3, True), exact=False).startswith("error")
    assert "1 bytes of VRAM more than the 100 planned" in judged(answer(logits, 0.25, True), 101)
    assert "did not run on the GPU (no GPU)" in judged(answer(logits, 0.25, False))


def test_the_meter_sees_what_is_taken_meanwhile() -> None:
    class Device:
        used = 5

    device = Device()
    with Meter(device).watch() as peak:
        device.used = 50
        end = time.monotonic() + 10
        while peak.value < 50 and time.monotonic() < end:
            time.sleep(0.001)
        device.used = 7
    assert peak.value == 50


# ------------------------------------------------------------------ what is told


def made_up(device: str = "gpu") -> dict[str, Any]:
    """A result as gpu_check.py writes it."""

    def part(name: str, correctness: bool, *items: dict[str, Any], left_out: tuple[str, ...] = ()) -> dict[str, Any]:
        return {"name": name, "title": name.title(), "correctness": correctness, "seconds": 9.0, "items": list(items),
                "left_out": list(left_out)}  # fmt: skip

    def burst(number: int, budget: int, who: str, pp: float, tg: float, **more: Any) -> dict[str, Any]:
        return {"name": f"{number} {budget} {who}", "ok": None, "note": "", "round": number, "budget": budget,
                "who": who, "pp": [pp, pp / 2], "tg": [tg / 2, tg], **more}  # fmt: skip

    gib = 1 << 30
    return {
        "date": "2026-01-02 03:04", "seconds": 480.0, "kernels": kernel_rows([]),
        "settings": {"device": device, "prompt": 256, "gen": 48, "llama_bench": "llama-bench"},
        "parts": [
            part("environment", False, {"name": "card", "ok": True, "note": "", "facts": {"card": "GeForce 9"}}),
            part("plans", True, {"name": "tiny: keys, graph", "ok": False, "note": "1 token", "error": 0.5}),
            part("latencies", False,
                 {"name": "plain read of VRAM", "ok": None, "value": 500.0, "unit": "GB/s", "more": ""},
                 {"name": "matvec f16", "ok": None, "value": 400.0, "unit": "GB/s", "more": "8 x 8"}),
            part("speed", False, {"name": "model and machine", "ok": None, "note": "", "model": "m.gguf", "made": True},
                 burst(1, 2 * gib, "keys", 100, 20, skips=0.5), burst(1, 2 * gib, STOCK, 150, 10, layers=7, build="b1"),
                 burst(2, 2 * gib, "keys", 100, 30, skips=0.5),
                 burst(2, 2 * gib, STOCK, 150, 10, layers=7, build="b1", command="llama-bench -ngl 7"),
                 burst(1, 4 * gib, "all", 900, 90), left_out=("round 2, 4.0 GiB: all",)),
        ],
    }  # fmt: skip


def test_speeds_are_medians_of_rounds_in_which_all_took_turns() -> None:
    result = made_up()
    found = speeds(result)
    assert list(found) == [2 << 30, 4 << 30] and found[2 << 30]["keys"]["tg"] == [20, 30]
    assert ratio(found[2 << 30], "tg") == 2.5 and ratio(found[4 << 30], "tg") is None
    assert [item["name"] for item in failures(result)] == ["tiny: keys, graph"]


def test_reports_hold_what_a_reader_needs(tmp_path: Path) -> None:
    result = made_up()
    text, short = report(result), short_table(result)
    for words in ("# GPU check: GeForce 9", "8.0 minutes", "| matvec f16 | 400 GB/s | 80% | 8 x 8 |",
                  "- tiny: keys, graph: 1 token",
                  "Left out for lack of time: round 2, 4.0 GiB: all.", "10.0 (10.0-10.0) (-ngl 7)"):  # fmt: skip
        assert words in text
    assert "| 2.0 GiB |  | 25.0 | 10.0 (-ngl 7) | 2.50 |" in short and "| 4.0 GiB | 90.0 |  |  |  |" in short
    result["parts"][3]["items"].append({"round": 1, "budget": 4 << 30, "who": STOCK, "note": "not measured: not found"})
    assert "| 4.0 GiB | 90.0 |  | not measured |  |" in short_table(result)
    assert "- `llama-bench -ngl 7`" in text
    assert "left out for lack of time, items: speed 1" in short and len(short.splitlines()) < 40
    assert plot(result, tmp_path / "speed.svg") and (tmp_path / "speed.svg").stat().st_size > 1000


def test_the_page_says_that_there_was_no_gpu() -> None:
    assert NO_GPU in section({}, lambda name: "") and section({}, lambda name: "").startswith("## On a GPU")
    assert NO_GPU == "*No GPU has been available yet: nothing here was measured.*"


def test_what_is_kept_is_on_the_page(tmp_path: Path) -> None:
    path = keep(made_up(), tmp_path)
    assert path == tmp_path / "geforce-9" / FILE
    results = load(tmp_path)
    assert list(results) == ["geforce-9"]
    page = section(results, lambda name: f"By hand, of {name}.\n")
    for words in ("### GeForce 9 (`geforce-9`)", "2026-01-02 03:04.", "llama.cpp: b1.", "plans:   0 of 1 right",
                  "10.0 (10.0-10.0) (-ngl 7)", "-->\nBy hand, of geforce-9.\n<!-- end -->"):  # fmt: skip
        assert words in page
    assert NO_GPU not in page
    with pytest.raises(HotcoldError, match="a dry run"):
        keep(made_up("sim"), tmp_path)
    path.write_text("[]")
    with pytest.raises(HotcoldError, match="not a result of gpu_check"):
        load(tmp_path)


def test_a_result_of_one_part_is_told(tmp_path: Path) -> None:
    result = made_up()
    result["parts"] = result["parts"][:1]
    assert "GeForce 9" in report(result) and short_table(result).count("\n") == 0
    assert not plot(result, tmp_path / "speed.svg") and not (tmp_path / "speed.svg").exists()
