"""scripts/profile_ray.py on a local Ray of two workers: the same profile as one run; needs `pip install ray`."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hotcold.placement.profile import load_profile
from hotcold.placement.profiling import profile_model

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "profile_ray.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True)


def test_shards_on_ray_are_one_run(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (pip install hotcold[cluster])")
    model, text, out = tiny_model("relu", intermediate_size=72), tmp_path / "text.txt", tmp_path / "p.gguf"
    text.write_text(" ".join(f"Sentence {i} of a text that is cut into shards." for i in range(60)))
    options = [model, "--text", text, "--all", "-c", 64, "--samples", 50, "-o", out]
    done = run(*options, "--shards", 99, "--cpus", 2)  # there are fewer contexts
    assert done.returncode == 0, done.stderr
    found, whole = load_profile(out), profile_model(model, [text], tokens=None, n_ctx=64, samples=50, threads=1)
    assert found.n_tokens == whole.n_tokens and np.array_equal(found.sample_text, whole.sample_text)
    for name in ("fired", "pairs", "samples"):
        for a, b in zip(getattr(found, name), getattr(whole, name), strict=True):
            assert np.array_equal(a, b), name
    assert "sparsity" in done.stdout
    again = run(*options)
    assert again.returncode == 1 and "exists already" in again.stderr


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("-t", "0"), "argument -t/--threads: must be a whole number from 1 to"),
        (("--shards", "0"), "argument --shards: must be a whole number from 1 to"),
        (("--tokens", "1_000"), "argument --tokens: must be a whole number"),
        (("--samples", "-1"), "argument --samples: "),
        (("--cpus", "0"), "argument --cpus: must be a whole number from 1 to"),
    ],
)
def test_numbers_are_checked(option: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        runpy.run_path(str(SCRIPT))["main"](["m.gguf", "-o", "o.gguf", *option])
    assert e.value.code == 2 and message in capsys.readouterr().err


def test_more_threads_than_ray_has_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tasks would wait for ever."""
    ray = SimpleNamespace(init=lambda **options: None, cluster_resources=lambda: {"CPU": 1.0}, shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")  # as the script sets it
    assert runpy.run_path(str(SCRIPT))["main"](["m.gguf", "-o", str(tmp_path / "o.gguf"), "-t", "2"]) == 1
    assert "--threads 2: Ray has 1 CPUs here" in capsys.readouterr().err


def test_without_ray_the_script_says_what_to_install(tmp_path: Path) -> None:
    code = f"import sys; sys.modules['ray'] = None; sys.argv[0] = 'p'; exec(open({str(SCRIPT)!r}).read())"
    command = [sys.executable, "-c", code, "m.gguf", "-o", str(tmp_path / "o.gguf")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and 'pip install "hotcold[cluster]"' in done.stderr
