"""Models in memory instead of mapped, and locked: the same logits, and what the system refuses is said."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_models import Spec, write_model

from hotcold.runtime import resident
from hotcold.runtime.engine import Engine
from hotcold.runtime.errors import GGUFError, HotcoldError
from hotcold.runtime.gguf_file import open_gguf

IDS = list(range(1, 20))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("resident") / "model.gguf", Spec())


def logits(path: Path, **options: Any) -> np.ndarray:
    with Engine.open(path, threads=2, n_ctx=32, **options) as engine:
        return np.concatenate([engine.forward(IDS, "all"), engine.forward([3], "all")])


def test_a_copy_in_memory_gives_the_same_bits(small: Path) -> None:
    mapped = logits(small)
    assert (logits(small, mmap=False) == mapped).all()
    assert (logits(small, mmap=False, mlock=True) == mapped).all()
    assert (logits(small, mlock=True) == mapped).all()


def test_a_copy_is_read_only_and_survives_release_and_close(small: Path) -> None:
    with open_gguf(small) as mapped, open_gguf(small, mapped=False) as copied:
        assert not copied.mapped and copied.size == mapped.size
        name = "output_norm.weight"
        view, expected = copied.data(name), mapped.data(name).copy()
        assert not view.flags.writeable
        copied.release_pages()  # would zero a private mapping
        assert (view == expected).all()
        assert dict(copied.metadata).keys() == dict(mapped.metadata).keys()
    assert (view == expected).all()


def test_a_copy_that_does_not_fit_is_refused(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident.psutil, "virtual_memory", lambda: SimpleNamespace(available=100))
    with pytest.raises(HotcoldError, match="--no-mmap reads the whole file into memory: .* are needed, .* are free"):
        open_gguf(small, mapped=False)


@pytest.mark.parametrize("change", ["cut", "other"])
def test_a_file_that_changes_while_it_is_read(small: Path, tmp_path: Path, change: str,
                                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    path = tmp_path / "model.gguf"
    content = small.read_bytes()
    path.write_bytes(content)
    real = resident.read_into_memory

    def changed(path: Path, size: int, notify: Callable[[str], None]) -> Any:
        other = path.with_name("other")  # another file under the same name: the first one stays mapped as it was
        other.write_bytes(content[:1000] if change == "cut" else content[:100] + b"x" + content[101:])
        other.replace(path)
        return real(path, size, notify)

    monkeypatch.setattr("hotcold.runtime.gguf_file.read_into_memory", changed)
    with pytest.raises(GGUFError, match="something changed it while it was read"):
        open_gguf(path, mapped=False)


def test_reading_is_announced(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "_LARGE", 1)
    monkeypatch.setattr(resident, "_SLAB", 4096)
    monkeypatch.setattr(resident, "_EVERY", 0.0)
    said: list[str] = []
    open_gguf(small, mapped=False, notify=said.append).close()
    assert said[0].startswith("reading into memory 0.0 GiB") and len(said) > 2
    assert all(line.startswith("reading into memory: ") for line in said[1:])


class _Refusing:
    """A C library in which some mlock fails."""

    def __init__(self, after: int) -> None:
        self.after, self.locked, self.undone = after, 0, 0

    def mlock(self, start: Any, size: Any) -> int:
        if self.locked == self.after:
            ctypes.set_errno(12)
            return -1
        self.locked += 1
        return 0

    def munlock(self, start: Any, size: Any) -> int:
        self.undone += 1
        return 0


@pytest.mark.parametrize("after", [0, 2])
def test_a_limit_on_locked_memory_is_a_warning(small: Path, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource", reason="this system has no limits on locked memory")
    libc = _Refusing(after)
    monkeypatch.setattr(resident, "_libc", lambda: libc)
    monkeypatch.setattr(resident, "_SLAB", 4096)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 10, 8 << 10))
    said: list[str] = []
    with open_gguf(small) as file:
        assert not file.lock(said.append) and not file.locked
    assert len(said) == 1 and libc.undone == 1
    assert said[0].startswith("warning: --mlock: ") and "RLIMIT_MEMLOCK is 8 KiB; raise it by ulimit -l" in said[0]
    assert said[0].endswith("it goes on with a model that is not locked")


def test_a_system_without_mlock_says_so(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "_libc", lambda: None)
    said: list[str] = []
    with Engine.open(small, threads=1, mlock=True, notify=said.append) as engine:
        assert not engine.file.locked
        assert engine.forward([1]).shape == (engine.config.n_vocab,)
    assert any(line == "warning: --mlock: this system has no mlock; the model is not locked in memory" for line in said)


def test_prefetching_asks_for_the_whole_file_and_ends_with_it(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(resident.os, "posix_fadvise"):
        pytest.skip("this system has no posix_fadvise")
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resident, "_AHEAD", 4096)
    monkeypatch.setattr(resident.os, "posix_fadvise", lambda fd, start, n, how: asked.append((start, n)))

    def finished() -> list[tuple[int, int]]:
        for thread in resident.threading.enumerate():
            if thread.name == "hotcold-prefetch":
                thread.join()
        return asked

    with open_gguf(small) as file:
        file.prefetch()
        assert finished() == [(start, 4096) for start in range(0, file.size, 4096)]
        file.prefetch()  # once is enough
    asked.clear()
    with open_gguf(small, mapped=False) as file:
        file.prefetch()
        assert not finished()
    monkeypatch.setattr(resident.psutil, "virtual_memory", lambda: SimpleNamespace(available=100))
    with open_gguf(small) as file:
        file.prefetch()
        assert not finished()


def test_the_cache_takes_memory_as_it_fills(small: Path) -> None:
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        pytest.skip("this system does not say what its mappings are")
    with Engine.open(small, threads=1, n_ctx=128, kv_type="f32") as engine:
        addresses = [address for pair in engine._buffers.cache for address in pair]
        assert all(address % 4096 == 0 for address in addresses)
        found, inside = 0, False
        for line in smaps.read_text().splitlines():
            head = line.split()
            if "-" in head[0] and not head[0].endswith(":"):
                start, end = (int(part, 16) for part in head[0].split("-"))
                inside = any(start <= address < end for address in addresses)
            elif inside and line.startswith("VmFlags:"):
                assert "nh" in head  # no huge pages: the first token of each head would take one
                found += 1
        assert found > 0
