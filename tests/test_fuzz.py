"""Thousands of broken copies of valid files: each is refused cleanly or opens and can be read to the last byte."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import fuzzing
import hostile
import pytest

from hotcold.runtime.errors import GGUFError
from hotcold.runtime.gguf_file import open_gguf

MUTANTS = 8_000


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
