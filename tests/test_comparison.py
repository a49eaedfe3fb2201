"""compare_llama_cpp.py: turns, what counts, what is told of a llama.cpp that is missing or fails."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import psutil
import pytest

from hotcold.runtime.errors import HotcoldError

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))  # the scripts import each other by plain names

import compare_llama_cpp  # noqa: E402
from comparison import bursts, stock_worker  # noqa: E402
from comparison.bursts import Burst, run_burst  # noqa: E402
from comparison.facts import build_facts  # noqa: E402
from comparison.plain import plain, plain_text  # noqa: E402
from comparison.plot import plot  # noqa: E402
from comparison.quality import LogitsSource, differences, perplexity  # noqa: E402
from comparison.report import report  # noqa: E402
from comparison.rows import speed_rows, tokens_per_cpu_second, use_rows  # noqa: E402
from comparison.settings import NO_REPACK, STOCK, Settings  # noqa: E402
from comparison.speed import Round, Session, clean, our_player, parse_bench, stock_player  # noqa: E402
from comparison.twins import Twins, make_twins, possible_modes  # noqa: E402


def script(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("synthetic") / "tiny.gguf"
    done = script("make_synthetic.py", "--shape", "llama-tiny", "--type", "q8_0", "--activation", "relu", "-o", out)
    assert done.returncode == 0, done.stderr
    return out


# --- logits


def test_differences_of_logits():
    rng = np.random.default_rng(0)
    reference = rng.normal(size=(5, 50)).astype(np.float32)
    same = differences(reference + 3, reference)  # a shift of all logits changes no probability
    assert same["kl_mean"] == pytest.approx(0, abs=1e-9) and same["top1"] == 1
    other = reference.copy()
    other[0, reference[0].argmin()] += 100
    assert differences(other, reference)["top1"] == pytest.approx(0.8)
    assert differences(other, reference)["max_abs"] == pytest.approx(100)
    p = np.exp([1.0, 2.0]) / np.exp([1.0, 2.0]).sum()
    expected = (p * np.log(p / 0.5)).sum()
    assert differences(np.zeros((1, 2)), np.array([[1.0, 2.0]]))["kl_mean"] == pytest.approx(expected)


def test_perplexity_is_of_the_next_token():
    logits = np.full((3, 10), -50.0, np.float32)
    ids = np.array([4, 7, 2])
    logits[0, 7] = logits[1, 2] = 50  # each row knows what comes; the last row's next token is not there
    assert perplexity(logits, ids) == pytest.approx(1)
    assert perplexity(np.zeros((3, 10)), ids) == pytest.approx(10)
    assert np.isfinite(perplexity(logits * 100, ids[::-1]))


# --- bursts


BURN = [sys.executable, "-c", "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"]


@pytest.mark.parametrize(("machine_s", "others_s"), [(30.0, 30.0), (0.0, 0.0)])
def test_burst_counts_its_own_work_and_not_others(machine_s, others_s, monkeypatch):
    """`others` is what the machine's meter shows beyond the burst's own time, and never less than nothing."""
    meter = iter([1000.0, 1000.0 + machine_s])
    monkeypatch.setattr(bursts, "busy_seconds", lambda: next(meter))
    burst = run_burst(BURN)
    assert burst.status == 0
    assert 0.5 <= burst.cpu_s < 5
    expected = others_s - burst.cpu_s if others_s else 0
    assert burst.others * burst.wall_s == pytest.approx(expected)


def test_the_machines_meter_sees_work_and_not_idling():
    before = bursts.busy_seconds()
    burst = run_burst(BURN)
    after = bursts.busy_seconds()
    assert after - before > 0.9 * burst.cpu_s
    assert after < sum(psutil.cpu_times()), "idle time is no work"


def test_burst_that_takes_too_long_is_ended():
    burst = run_burst([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.5)
    assert burst.status == -9
    assert burst.wall_s < 30


def test_memory_of_a_burst_is_its_own_and_not_its_parents():
    ballast = np.ones(400 << 17)  # 400 MiB
    burst = run_burst([sys.executable, "-c", "import time; x = bytearray(100 << 20); time.sleep(0.3)"])
    assert ballast.any()
    assert 100 < burst.peak_rss_mb < 350


def burst(others: float = 0.0, track: list[tuple[float, float]] | None = None) -> Burst:
    return Burst("x", 0, "", "", wall_s=10.0, cpu_s=1.0, peak_rss_mb=1.0, others=others, load_before=0.0,
                 track=track or [])  # fmt: skip


def test_cores_kept_busy_in_a_span():
    one = burst(track=[(0.1 * i, 0.05 * i if i < 50 else 2.5 + 0.2 * (i - 50)) for i in range(100)])
    assert one.cores(1, 4) == pytest.approx(0.5)
    assert one.cores(6, 9) == pytest.approx(2)
    assert one.cores(6, 6.15) is None, "too short to tell"


def test_disturbed_rounds_do_not_count():
    this = Round({STOCK: burst(0.0), "dense": burst(0.1), "exact": burst(0.5)})
    assert clean(this, 0.15, "dense")
    assert not clean(this, 0.15, "exact")
    assert not clean(this, 0.15, "dense", "exact")
    assert not clean(Round({NO_REPACK: burst(0.5), "dense": burst(0.0)}), 0.15, "dense")


def test_rounds_in_which_a_test_was_not_told_do_not_count():
    some = session([10, 11], [9, 9], [20, 22], [30, 33])
    some.tests = ["tg4"]
    del some.rounds[1].speeds["exact"]["tg4"]
    dense, exact = speed_rows(some, SETTINGS)
    assert dense["ours"] == [20, 22] and exact["ours"] == [30] and exact["clean"] == "1/2"
    del some.rounds[0].speeds[NO_REPACK]["tg4"]
    assert [row["ours"] for row in speed_rows(some, SETTINGS)] == [[22], []]


# --- what the rounds amount to


def session(stock: list[float], no_repack: list[float], dense: list[float], exact: list[float]) -> Session:
    rounds = []
    for values in zip(stock, no_repack, dense, exact, strict=True):
        named = dict(zip((STOCK, NO_REPACK, "dense", "exact"), values, strict=True))
        told = {"n_prompt": 0, "n_gen": 4, "cpu_s": [2.0], "bytes_per_token": 1e9, "share_computed": 0.1}
        rounds.append(Round({name: burst() for name in named}, {name: {"tg4": v} for name, v in named.items()},
                            {name: {"tg4": told} for name in named}, 20e9))  # fmt: skip
    return Session(2, rounds, dict.fromkeys((STOCK, NO_REPACK, "dense", "exact"), 0.5))


SETTINGS = Settings(prompt_tokens=0, gen_tokens=4, modes=("dense", "exact"))


def test_the_faster_way_of_llama_cpp_counts_and_ratios_are_of_neighbours():
    dense, exact = speed_rows(session([10, 11, 9], [12, 13, 12], [12, 26, 18], [24, 26, 27]), SETTINGS)
    assert dense["stock_is"] == NO_REPACK and dense["stock"] == [12, 13, 12]
    assert dense["ratio"] == [1, 2, 1.5] and dense["ratio_median"] == 1.5 and dense["to_dense"] == []
    assert exact["to_dense"] == [2, 1, 1.5]
    assert dense["clean"] == "3/3"


def test_disturbed_rounds_are_in_no_figure():
    disturbed = session([10, 1000], [9, 1000], [20, 1000], [30, 1000])
    disturbed.rounds[1].bursts["dense"] = burst(others=1.0)
    dense, exact = speed_rows(disturbed, SETTINGS)
    assert dense["ours"] == [20] and dense["clean"] == "1/2"
    assert exact["ours"] == [30, 1000] and exact["to_dense"] == [1.5], "dense took part in the ratio"
    (row,) = [row for row in use_rows(disturbed, SETTINGS, NO_TWIN) if row["who"] == "dense"]
    assert row["speed"] == 20


NO_TWIN = Twins(Path("ours.gguf"), None, False, ())


def test_bandwidth_and_cpu_seconds():
    rows = {row["who"]: row for row in use_rows(session([1], [1], [10], [15]), SETTINGS, NO_TWIN)}
    assert rows["dense"]["bandwidth_share"] == pytest.approx(0.5), "10 GB/s of 20"
    assert rows["exact"]["bandwidth_share"] == pytest.approx(0.75)
    assert rows["exact"]["cpu_speed"] == 2, "4 tokens in 2 CPU seconds"
    assert rows[STOCK]["bytes_per_token"] is None, "there is no such file"


def test_cpu_seconds_of_a_program_that_does_not_tell_them():
    """8 prompt tokens at 2/s, one to warm up and 4 generated at 1/s: the prompt runs from 1 to 5 s, the rest from 6."""
    track = [(0.05 * i, 0.05 * i * (2 if 0.05 * i < 5 else 0) + (10 if 0.05 * i >= 5 else 0)) for i in range(200)]
    this = Round({STOCK: burst(track=track)}, {STOCK: {"pp8": 2.0, "tg4": 1.0}},
                 {STOCK: {"pp8": {"n_prompt": 8, "n_gen": 0}, "tg4": {"n_prompt": 0, "n_gen": 4}}})  # fmt: skip
    settings = Settings(prompt_tokens=8, gen_tokens=4)
    assert tokens_per_cpu_second(this, STOCK, "pp8", settings) == pytest.approx(1.0)
    assert tokens_per_cpu_second(this, STOCK, "tg4", settings) is None, "it kept no core busy: nothing to divide by"


def test_bench_lines_are_read_by_kind():
    lines = ('{"n_prompt": 8, "n_gen": 0, "samples_ts": [5.0]}\n'
             '{"n_prompt": 0, "n_gen": 4, "samples_ts": [2.5]}\n'
             '{"n_prompt": 0, "n_gen": 4, "n_depth": 32, "samples_ts": [1.5]}\n'
             '{"n_prompt": 1\n{"other": 1}\n')  # fmt: skip
    speeds = {test: line["samples_ts"][0] for test, line in parse_bench("noise\n" + lines).items()}
    assert speeds == {"pp8": 5.0, "tg4": 2.5, "tg4@d32": 1.5}


def test_plot_and_report_of_one_result(tmp_path):
    some = session([10, 11], [12, 13], [12, 26], [24, 26])
    result = {"model": "m.gguf", "date": "today", "machine": {"CPU": "x"}, "load_at_end": "0", "versions": {"a": "1"},
              "llama_cpp": {}, "notes": ["a note"], "speed": speed_rows(some, SETTINGS),
              "use": use_rows(some, SETTINGS, NO_TWIN), "commands": ["run it"], "quality": []}  # fmt: skip
    text = report(result)
    assert "| 2 | tg4 | exact | 25.00 (24.00-26.00) | 12.50 (12.00-13.00), no repack | 2.00 (2.00-2.00) |" in text
    assert "| 2 | tg4 | dense | 19.00 | 2.00 | 1.000 | 19.0 | 95% | 10.0% |" in text
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (the extras report and dev have it)")
    for name, magic in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        plot([result], tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(magic)


# --- files


def test_modes_that_a_file_cannot_do_are_left_out_and_explained(synthetic, tmp_path):
    twins = make_twins(synthetic, None, tmp_path, None, ["exact"])
    modes, notes = possible_modes(twins.ours, ["dense", "predict"])
    assert modes == ["dense"]
    assert len(notes) == 1 and "predict" in notes[0] and "hotcold train-predictor" in notes[0]
    with pytest.raises(HotcoldError, match="predictor"):
        possible_modes(twins.ours, ["predict"])


def test_stock_file_is_run_as_it_is_where_only_dense_is_asked_for(tmp_path):
    model = tmp_path / "silu.gguf"
    assert script("make_synthetic.py", "--shape", "llama-tiny", "--type", "q4_0", "-o", model).returncode == 0
    twins = make_twins(model, None, tmp_path, None, ["dense"])
    assert twins.ours == twins.stock == model and not twins.scaled
    assert make_twins(model, None, tmp_path, False, ["dense"]).ours != model


def test_twins_are_made_once_per_converter_and_options(synthetic, tmp_path, monkeypatch):
    first = make_twins(synthetic, None, tmp_path, None, ["exact"])
    assert not [note for note in first.notes if "was made before" in note]
    made = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    second = make_twins(synthetic, None, tmp_path, None, ["exact"])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == made
    assert [note.split("`")[1] for note in second.notes if "was made before, by the same converter" in note] == [
        "tiny.hotcold.gguf", "tiny.relu-as-silu.gguf"]  # fmt: skip
    assert first.stock and first.stock.name == "tiny.relu-as-silu.gguf"
    stamp = first.stock.with_name(first.stock.name + ".made")
    stamp.write_text("another converter")
    make_twins(synthetic, None, tmp_path, None, ["exact"])
    assert stamp.read_text() != "another converter" and first.stock.stat().st_mtime_ns > made[first.stock]
    stamp.unlink()
    notes = make_twins(synthetic, None, tmp_path, None, ["exact"]).notes
    assert any("nothing says how it was made" in note for note in notes)


def test_build_flags_come_from_cmakes_cache(tmp_path):
    (tmp_path / "build" / "bin").mkdir(parents=True)
    (tmp_path / "build" / "CMakeCache.txt").write_text(
        "CMAKE_BUILD_TYPE:STRING=Release\nGGML_NATIVE:BOOL=ON\nGGML_AVX2:BOOL=OFF\nGGML_CUDA_GRAPHS:BOOL=ON\n"
    )
    (tmp_path / "changes.txt").write_text("mended this\n")
    program = fake_llama_bench(tmp_path / "build" / "bin", 1.0)
    assert build_facts(program) == "CMAKE_BUILD_TYPE=Release; GGML_NATIVE=ON; mended this"
    assert "no CMakeCache.txt" in build_facts(tmp_path / "llama-bench")


# --- the whole script


def fake_llama_bench(folder: Path, speed: float, status: int = 0, repack: bool = True, only: str = "") -> Path:
    """A llama-bench that prints fixed figures, or fails: `only` with these words among its arguments."""
    program = folder / "llama-bench"
    common = {"build_commit": "abc", "build_number": 1, "type_k": "f16", "type_v": "f16", "flash_attn": -1}
    sizes = ((8, 0), (0, 4), (0, 64), (0, 70))
    lines = [{"n_prompt": p, "n_gen": n, "samples_ts": [speed], **common} for p, n in sizes]
    echo = "\n".join(f"echo '{json.dumps(line)}'" for line in lines)
    usage = f"[ \"$1\" = --help ] && {{ echo '{'--repack' * repack}'; exit 0; }}; [ \"$1\" = --version ] && exit 0"
    exits = f"[ {status} = 0 ] || {{ echo 'no such model' >&2; exit {status}; }}"
    fail = f'case "$*" in *"{only}"*) {exits};; esac'
    program.write_text(f"#!/bin/sh\n{usage}\n{fail}\n{echo}\n")
    program.chmod(0o755)
    return program


def compare(synthetic: Path, folder: Path, *options: object) -> subprocess.CompletedProcess[str]:
    return script("compare_llama_cpp.py", synthetic, "--twins", folder, "--llama-bin", folder, "--reps", 1,
                  "--prompt-tokens", 8, "--gen-tokens", 4, "--quality-tokens", 0, "--no-bandwidth", "--noise", 1000,
                  "--wait", 0, "-o", folder / "out.json", *options)  # fmt: skip


def test_comparison_takes_turns_and_writes_everything(synthetic, tmp_path):
    fake_llama_bench(tmp_path, 1e-6)
    done = compare(synthetic, tmp_path, "--modes", "dense,exact", "--reps", 2, "--quality-tokens", 16,
                   "--markdown", tmp_path / "out.md", "--plot", tmp_path / "out.svg")  # fmt: skip
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / "out.json").read_text())
    everybody = [STOCK, NO_REPACK, "dense", "exact"]
    assert [list(r["bursts"]) for r in result["rounds"]] == [everybody, everybody[::-1]]
    rows = {(row["test"], row["mode"]): row for row in result["speed"]}
    assert set(rows) == {(test, mode) for test in ("pp8", "tg4") for mode in ("dense", "exact")}
    assert all(row["ratio_median"] > 1 for row in rows.values())
    use = {row["who"]: row for row in result["use"] if row["test"] == "tg4"}
    assert use["dense"]["share_computed"] == 1
    assert use["exact"]["share_computed"] < 0.9, "half of the random ReLU gates are off"
    assert use["exact"]["bytes_per_token"] < use["dense"]["bytes_per_token"]
    assert use[STOCK]["bytes_per_token"] == pytest.approx(use["dense"]["bytes_per_token"], rel=0.01)
    assert use["dense"]["cpu_speed"] > 0 and use["dense"]["rss_mb"] > 10 and use["dense"]["start_s"] > 0
    assert {row["who"] for row in result["quality"]} == {"hotcold dense", "hotcold exact"}
    assert result["quality"][0]["perplexity"] == result["quality"][1]["perplexity"] > 1
    assert result["files"]["stock"].endswith("relu-as-silu.gguf"), "llama.cpp would run SiLU"
    assert [c.split(" -", 1)[0] for c in result["commands"]][2:] == ["hotcold bench tiny.hotcold.gguf"] * 2
    assert result["commands"][0].startswith("OMP_PROC_BIND=true llama-bench -m tiny.relu-as-silu.gguf -p 8 -n 4 ")
    for text in ((tmp_path / "out.json").read_text(), done.stdout, (tmp_path / "out.svg").read_text()):
        assert not [folder for folder in (str(Path.home()), sys.executable, str(SCRIPTS.parent), str(tmp_path))
                    if folder in text]  # fmt: skip
    assert "| 1 | pp8 | dense |" in done.stdout == (tmp_path / "out.md").read_text() + "\n"
    assert "logits were not compared" in done.stderr


def test_comparison_without_llama_cpp_runs_our_half(synthetic, tmp_path):
    done = compare(synthetic, tmp_path, "--modes", "dense,predict")
    assert done.returncode == 0, done.stderr
    assert "No llama-bench" in done.stdout
    assert "| 1 | tg4 | dense |" in done.stdout
    assert "Mode predict was left out" in done.stdout


def test_comparison_with_a_failing_llama_bench_says_why(synthetic, tmp_path):
    fake_llama_bench(tmp_path, 1.0, status=3, repack=False)
    done = compare(synthetic, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "A run of llama.cpp failed" in done.stdout and "no such model" in done.stdout
    assert "| 1 | tg4 | dense |" in done.stdout


def test_one_way_of_llama_cpp_that_fails_in_the_middle_is_left_out(synthetic, tmp_path):
    """It passed its short trial of 64 tokens."""
    fake_llama_bench(tmp_path, 1.0, status=3, only="-n 70 -d 0 -t 1 -r 1 -ngl 0 --repack 0")
    done = compare(synthetic, tmp_path, "--gen-tokens", 70, "--prompt-tokens", 0, "--reps", 2)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / "out.json").read_text())
    assert [list(this["bursts"]) for this in result["rounds"]] == [[STOCK, "dense"], ["dense", STOCK]]
    (row,) = result["speed"]
    assert row["clean"] == "2/2" and row["stock_is"] == STOCK and row["ratio_median"] > 0
    assert "A run of llama.cpp failed and is left out. llama.cpp, no repack with 1 threads failed" in done.stdout


@pytest.mark.parametrize(("usage", "words"), [("--load-mode", "--load-mode none"), ("--mmap", "-mmp 0")])
def test_without_mapping_both_read_their_file(tmp_path, usage, words):
    program = tmp_path / "llama-bench"
    program.write_text(f"#!/bin/sh\necho '{usage}'\n")
    program.chmod(0o755)
    twins = Twins(tmp_path / "ours.gguf", tmp_path / "stock.gguf", False, ())
    for mmap in (True, False):
        settings = Settings(llama_bench=program, mmap=mmap)
        stock, _ = stock_player(settings, twins, 1, STOCK, ["-n", "4"])
        assert (words in " ".join(stock)) is not mmap
        ours, _ = our_player(settings, twins, 1, "dense", ["-n", "4"])
        assert ("--no-mmap" in ours) is not mmap
    stock, _ = stock_player(Settings(llama_lib=tmp_path, mmap=False), twins, 1, STOCK, [])
    assert "--no-mmap" in stock


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\nprintf '\\377\\n'\n"])
def test_a_llama_bench_that_is_no_program_or_prints_no_text_is_left_out(synthetic, tmp_path, content):
    (tmp_path / "llama-bench").write_bytes(content)
    (tmp_path / "llama-bench").chmod(0o755)
    done = compare(synthetic, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "A run of llama.cpp failed and is left out" in done.stdout and "| 1 | tg4 | dense |" in done.stdout


def test_comparison_of_a_broken_model_is_one_line(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    done = compare(broken, tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "broken.gguf" in done.stderr


@pytest.mark.parametrize(("options", "why"), [
    (["--reps", "-1"], "must be a whole number from 0"), (["--threads", "1,0"], "must be a whole number from 1"),
    (["--gen-tokens", "-8"], "must be a whole number from 0"), (["--quality-tokens", "1"], "allowed are 0, and 2"),
    (["--noise", "-1"], "must be 0 or more"), (["--timeout", "0"], "must be more than 0"),
    (["--text", "none.txt"], "no such file"), (["-o", "none/x.json"], "no such folder: none"),
    (["--gen-tokens", "0", "--prompt-tokens", "0"], "nothing to measure"),
])  # fmt: skip
def test_numbers_that_cannot_be_are_usage_errors(options, why, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare_llama_cpp.py", "m.gguf", *options])
    with pytest.raises(SystemExit) as stop:
        compare_llama_cpp.main()
    assert stop.value.code == 2 and why in capsys.readouterr().err


def test_ctrl_c_keeps_what_is_done(monkeypatch, capsys, tmp_path):
    def interrupted(settings: object, model: Path, args: object) -> dict[str, str]:
        if model.name == "b.gguf":
            raise KeyboardInterrupt
        return {"model": model.name}

    monkeypatch.setattr(compare_llama_cpp, "compare", interrupted)
    monkeypatch.setattr(compare_llama_cpp, "report", lambda result: "")
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["compare_llama_cpp.py", "a.gguf", "b.gguf", "-o", str(out)])
    assert compare_llama_cpp.main() == 130
    assert json.loads(out.read_text()) == [{"model": "a.gguf"}]
    assert capsys.readouterr().err.splitlines()[-1].startswith("compare_llama_cpp: interrupted; ")


# --- what is shown


@pytest.mark.parametrize(("text", "shown"), [
    (f"{sys.executable} -m hotcold.runtime.cli bench {Path.home()}/x/m.gguf -p 0", "hotcold bench ~/x/m.gguf -p 0"),
    (f"{sys.executable} {SCRIPTS}/comparison/stock_worker.py", "python scripts/comparison/stock_worker.py"),
    ("/v/bin/python3.12 -m hotcold.runtime.cli bench '/tmp/m.gguf'", "hotcold bench 'm.gguf'"),
    ("/v/bin/python /w/run/scripts/x.py --lib=/tmp/a/ (/tmp/b)", "python scripts/x.py --lib=a (b)"),
    (f"in {SCRIPTS.parent} {SCRIPTS.parent}/README.md {Path.home()}", "in . README.md ~"),
    *[(text, text) for text in (
        "12 tok/s, 1/2 and/or ~/x/y ../a/b ./scripts/run", "see https://host/a/b, </details>", "python3 a.py 3 / 4",
        "~/v/bin/python x", "~/hotcold/scripts/x.py")],
])  # fmt: skip
def test_texts_without_folders_of_this_machine(text, shown):
    assert plain_text(text) == shown == plain_text(shown)
    assert plain({"a": [text, 1.5, None], text: True}) == {"a": [shown, 1.5, None], shown: True}


# --- llama.cpp through its library


def test_library_is_timed_like_llama_bench(monkeypatch, capsys, tmp_path):
    """A library that records what it is asked: the depth once, a warm-up, the prompt in one batch, single tokens."""
    asked: list[tuple[int, int]] = []

    class Batch:
        def __init__(self, n: int) -> None:
            self.token, self.pos, self.n_seq_id, self.logits = [0] * n, [0] * n, [0] * n, [0] * n
            self.seq_id = [[0] for _ in range(n)]
            self.n_tokens = 0

    def decode(context: object, batch: Batch) -> int:
        asked.append((batch.pos[0], batch.n_tokens))
        assert batch.logits[batch.n_tokens - 1] == 1
        return 0

    nothing = {name: lambda *args: 1 for name in (
        "llama_backend_init", "llama_model_load_from_file", "llama_model_get_vocab", "llama_init_from_model",
        "llama_synchronize", "llama_get_memory", "llama_memory_seq_rm")}  # fmt: skip
    api = types.SimpleNamespace(
        **nothing, llama_decode=decode, llama_vocab_n_tokens=lambda vocab: 50,
        llama_model_default_params=types.SimpleNamespace, llama_context_default_params=types.SimpleNamespace,
        llama_batch_init=lambda n, embd, seqs: Batch(n), llama_print_system_info=lambda: b"AVX2 = 1",
    )  # fmt: skip
    monkeypatch.setattr(stock_worker, "load_bindings", lambda lib, bindings: api)
    command = ["stock_worker.py", "bench", "m.gguf", "-p", "6", "-n", "2", "-d", "4", "--lib", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert stock_worker.main() == 0
    assert asked == [(0, 4), (4, 6), (4, 6), (4, 1), (4, 1), (5, 1)]
    assert set(parse_bench(capsys.readouterr().out)) == {"pp6@d4", "tg2@d4"}


def test_llama_cpp_computes_logits_with_the_same_type_of_kv_cache(monkeypatch, tmp_path, synthetic):
    settings = Settings(kv_type="q8_0", text=None, quality_tokens=4)
    source = LogitsSource(settings, Twins(synthetic, synthetic, False, ()), tmp_path)
    ran: list[list[str]] = []
    monkeypatch.setattr(source, "_run", lambda label, command: (ran.append(list(command)), (None, ""))[1])
    source.stock(STOCK, tmp_path, "--step")
    source.ours("dense", synthetic)
    types: list[str] = []
    monkeypatch.setattr(stock_worker, "logits", lambda api, args: types.append(args.kv_type))
    monkeypatch.setattr(stock_worker, "load_bindings", lambda lib, bindings: None)
    monkeypatch.setattr(sys, "argv", ran[0][1:])
    assert stock_worker.main() == 0
    assert types == ["q8_0"] and ran[1][-2:] == ["--kv-type", "q8_0"]


def test_libraries_with_versions_in_their_names_are_found(tmp_path):
    for name in ("libllama.v0.5.0.so", "libggml.v0.5.0.so", "libggml-base.so"):
        (tmp_path / name).touch()
    links = stock_worker.plain_names(tmp_path)
    assert links != tmp_path
    assert (links / "libllama.so").resolve() == tmp_path / "libllama.v0.5.0.so"
    assert (links / "libggml.so").resolve() == tmp_path / "libggml.v0.5.0.so"
    assert (links / "libggml-base.so").exists()
    (tmp_path / "libllama.so").touch()
    assert stock_worker.plain_names(tmp_path) == tmp_path


def test_a_function_that_the_library_lacks_is_told_when_it_is_called():
    library = stock_worker.Library(None)
    missing = library.llama_of_another_day
    missing.argtypes = []  # as the bindings do
    with pytest.raises(RuntimeError, match="llama_of_another_day"):
        missing()
    with pytest.raises(AttributeError):
        _ = library.something_else
