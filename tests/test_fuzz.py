"""Thousands of broken copies of valid files and folders: each is refused cleanly, or opens and can be read."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fuzzing
import hostile
import pytest

from hotcold.convert import main as convert_main
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import GGUFError, HotcoldError
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.tokenizer import Tokenizer
from hotcold.runtime.weights import load_weights

MUTANTS = 8_000
FOLDERS = 120  # mutants of each checkpoint


@pytest.mark.parametrize("seed", [1, 2])
def test_mutants_are_refused_or_readable(seed: int, tmp_path: Path) -> None:
    """In a process of its own: a crash, a warning, a hang or too much memory would end it otherwise."""
    done = subprocess.run(
        [sys.executable, "-W", "error", fuzzing.__file__, tmp_path, str(seed), str(MUTANTS)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    kept = tmp_path / "mutant.gguf"
    assert done.returncode == 0, f"the file that did it: {kept}\n{done.stderr[-3000:]}"
    ends = json.loads(done.stdout)
    assert sum(ends.values()) == MUTANTS
    # Every stage must have been reached often, or the mutants test less than they seem to.
    assert min(ends.get(e, 0) for e in ("refused when opened", "no model", "not its weights", "opened")) > 50, ends


def test_the_memory_limit_limits(tmp_path: Path) -> None:
    code = "import fuzzing as f, numpy; f.limit_memory(f.MEMORY_LIMIT); numpy.ones(f.MEMORY_LIMIT + (8 << 20), 'u1')"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode != 0 and "MemoryError" in done.stderr


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    content = hostile.model(split=True).build()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content)
    with open_gguf(path) as f:
        header = min(t.offset for t in f.tensors.values())
    for size in [*range(header + 1), *range(header + 1, len(content), 97)]:
        path.write_bytes(content[:size])
        with pytest.raises(GGUFError):
            open_gguf(path)


def test_every_header_byte_inverted(tmp_path: Path) -> None:
    content = hostile.model(split=True).build()
    path = tmp_path / "inverted.gguf"
    path.write_bytes(content)
    with open_gguf(path) as f:
        header = min(t.offset for t in f.tensors.values())
    for at in range(header):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
        fuzzing.exercise(path)  # lets nothing but a clean refusal pass


@pytest.mark.parametrize("case", ["llama", "qwen2-window", "opt", "minicpm-s", "rope-llama3", "rope-yarn-tuned",
                                  "llama-f16"])  # fmt: skip
def test_broken_folders_are_refused_or_convert_to_what_opens(
    case: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """A TypeError from deep inside would not pass here, nor a file that convert wrote and run refuses."""
    parser = argparse.ArgumentParser()
    convert_main.add_arguments(parser)
    mutator = fuzzing.FolderMutator(sum(case.encode()))
    folder, out = tmp_path / "m", tmp_path / "o.gguf"
    converted = 0
    for _ in range(FOLDERS):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tiny_checkpoint(case), folder)
        mutator.mutate(folder)
        try:
            convert_main.run(parser.parse_args([str(folder), "-o", str(out), "--force"]))
        except HotcoldError as e:
            assert "\n" not in str(e)
            continue
        converted += 1
        with open_gguf(out) as f:
            load_weights(f, ModelConfig.from_gguf(f))
            Tokenizer.from_gguf(f).encode("hello w\u00f6rld")
    assert 5 < converted < FOLDERS - 5
