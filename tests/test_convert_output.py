"""convert/writer.py: what may be replaced, what is kept, and weights that are not numbers."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from conftest import run_convert

from hotcold.convert import writer
from hotcold.convert.precision import count_not_finite
from hotcold.runtime.errors import HotcoldError


@pytest.fixture(scope="module")
def source(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("llama")


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_only_regular_files_are_replaced(force: tuple[str, ...], source: Path, tmp_path: Path) -> None:
    fifo, loop, nowhere = tmp_path / "fifo", tmp_path / "loop", tmp_path / "nowhere"
    os.mkfifo(fifo)
    loop.symlink_to(loop)
    nowhere.symlink_to(tmp_path / "absent")
    for out, said in ((fifo, "not a regular file"), (loop, "leads nowhere"), (nowhere, "leads nowhere"),
                      (tmp_path / ("x" * 300), "cannot be written")):  # fmt: skip
        with pytest.raises(HotcoldError, match=said):
            run_convert(source, "-o", out, *force)
    assert stat.S_ISFIFO(fifo.stat().st_mode) and loop.is_symlink() and nowhere.is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fifo", "loop", "nowhere"]


def test_a_file_that_appears_meanwhile_is_kept(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.gguf"
    monkeypatch.setattr(writer, "_check", lambda *args, **kw: out.write_text("mine"))
    with pytest.raises(HotcoldError, match="exists already"):
        run_convert(source, "-o", out)
    assert out.read_text() == "mine" and list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_damaged_weights_are_counted_in_every_type(kind: str, bad: float) -> None:
    qtype = gguf.GGMLQuantizationType[kind]
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    raw = gguf.quants.quantize(x, qtype)
    assert count_not_finite(raw, qtype) == 0
    raw = raw.copy()
    if kind in ("Q8_0", "Q4_0"):
        raw.reshape(-1)[:2] = np.array([bad], np.float16).view(np.uint8)
    elif kind == "BF16":
        raw.view(np.uint16).reshape(-1)[5] = np.array([bad], np.float32).view(np.uint32)[0] >> 16
    else:
        raw.reshape(-1)[5] = bad
    assert count_not_finite(raw, qtype) == 1
