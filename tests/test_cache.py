"""Compiled kernels are kept once per machine, announced, and never served for other sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import pytest
from small_models import Spec, write_model

from hotcold.runtime.engine import Engine
from hotcold.runtime.kernels import cache, isa

KERNELS = Path(cache.__file__).parent

# Compiles the smallest function of the workers and prints what the user is told, then a result: is a worker parked
# whose word is 1, and what is in the word afterwards.
PROGRAM = """
import numba, numpy as np
from hotcold.runtime.kernels import walk
from hotcold.runtime.kernels.cache import cache_folder, compile_cached
i64 = numba.types.int64
compile_cached([(walk.claim_parked, (i64, i64))], lambda line: print("told:", line))
words = np.zeros(walk.control_words(1), np.int64)
words[walk.OWN + walk.OWN_PARKED] = 1
print("result:", walk.claim_parked(words.ctypes.data, 0), words[walk.OWN + walk.OWN_PARKED])
print("folder:", cache_folder())
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a copy of the package's runtime, to be edited."""
    shutil.copytree(KERNELS.parent, tmp_path / "copy" / "hotcold" / "runtime",
                    ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    return tmp_path / "copy"


def run(package: Path, home: Path) -> dict[str, list[str]]:
    """The program above with the package copied; -> lines by their first word."""
    env = os.environ | {"XDG_CACHE_HOME": str(home), "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    out: dict[str, list[str]] = {"told": [], "result": [], "folder": []}
    for line in done.stdout.splitlines():
        kind, _, text = line.partition(": ")
        out[kind].append(text)
    return out


def edit(package: Path, file: str, old: str, new: str) -> None:
    path = package / "hotcold" / "runtime" / "kernels" / file
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_compiled_once_announced_and_never_stale(package: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    first = run(package, home)
    assert first["result"] == ["True 0"]
    assert len(first["told"]) == 2 and "compiling" in first["told"][0] and "once" in first["told"][0]
    assert Path(first["folder"][0]).is_relative_to(home) and list(Path(first["folder"][0]).rglob("*.nbc"))
    again = run(package, home)
    assert again == first | {"told": []}
    # An edit in another file than that of the cached function: Numba's own check would not see it.
    edit(package, "sync.py", 'b.atomic_rmw("xchg"', 'b.atomic_rmw("or"')
    edited = run(package, home)
    assert edited["result"] == ["True 1"]
    assert edited["told"] and edited["folder"] != first["folder"]


def test_folder_follows_every_kernel_source(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = package / "hotcold" / "runtime" / "kernels"
    monkeypatch.setattr(cache, "__file__", str(copy / "cache.py"))
    before = cache.cache_folder()
    assert cache.cache_folder() == before
    seen = {before}
    for source in sorted(copy.glob("*.py")):
        source.write_text(source.read_text() + "\n# another comment\n")
        seen.add(cache.cache_folder())
    assert len(seen) == 1 + len(list(copy.glob("*.py")))
    (copy / "walk.py").rename(copy / "walk2.py")
    assert cache.cache_folder() not in seen


@pytest.mark.parametrize("what", ["numba.__version__", "llvmlite.__version__", "isa.target"])
def test_folder_follows_versions_and_cpu(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache.cache_folder()
    other = (lambda: ("x86_64", "another", frozenset())) if what == "isa.target" else "0.0"
    monkeypatch.setattr(f"hotcold.runtime.kernels.cache.{what}", other)
    assert cache.cache_folder() != before


def test_folder_that_cannot_be_written_is_said_and_harmless(package: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.write_text("a file where a folder should be")
    for _ in range(2):
        out = run(package, home)
        assert out["result"] == ["True 0"]
        assert "cannot be kept" in out["told"][0] and str(home) in out["told"][0]


FULL_DISK = "import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"


def test_full_disk_is_said_and_harmless(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of no more than 0 bytes may be written: the folder can be made, but nothing kept in it."""
    monkeypatch.setattr(sys.modules[__name__], "PROGRAM", FULL_DISK + PROGRAM)
    out = run(package, tmp_path / "home")
    assert out["result"] == ["True 0"]
    assert any("cannot be kept" in line for line in out["told"])


@pytest.mark.parametrize(("suffix", "size"), [("nbi", 0), ("nbi", 40), ("nbc", 0), ("nbc", 100)])
def test_files_cut_short_are_compiled_again(suffix: str, size: int, package: Path, tmp_path: Path) -> None:
    """What a power failure leaves."""
    home = tmp_path / "home"
    first = run(package, home)
    (file,) = home.rglob(f"*.{suffix}")
    os.truncate(file, size)
    damaged = run(package, home)
    assert damaged["result"] == ["True 0"] and "damaged" in damaged["told"][0]
    assert run(package, home) == first | {"told": []}


def test_an_engine_says_nothing_of_compiling_once_it_is_compiled(tmp_path: Path) -> None:
    """In this process it is compiled by now, in the next it is loaded."""
    path = write_model(tmp_path / "model.gguf", Spec())
    Engine.open(path, threads=1).close()
    program = (
        "import sys\nfrom hotcold.runtime.engine import Engine\n"
        "engine = Engine.open(sys.argv[1], threads=1, notify=print)\nprint(engine.forward([1, 2, 3]).sum())"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "sparsity" in done.stdout and "compil" not in done.stdout


def test_folders_of_older_versions_go(tmp_path: Path) -> None:
    """The last three used stay, and all used in the last thirty days; nothing else in the folder is touched."""
    now, day = 1e9, 86400.0
    ages = {"kernels-own": 90, "kernels-a": 1, "kernels-b": 29, "kernels-c": 31, "kernels-d": 40, "kernels-e": 400}
    others = {"llama.cpp": 400, "kernels": 400}
    for name, age in (ages | others).items():
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "inner" / "f.nbi").write_text("x")
        os.utime(tmp_path / name, (now - age * day, now - age * day))
    (tmp_path / "kernels-file").write_text("no folder")
    os.utime(tmp_path / "kernels-file", (0, 0))
    removed = cache.prune(tmp_path / "kernels-own", now)
    assert {path.name for path in removed} == {"kernels-c", "kernels-d", "kernels-e"}
    assert {p.name for p in tmp_path.iterdir()} == {"kernels-own", "kernels-a", "kernels-b", "kernels-file", *others}
    for name in ("kernels-a", "kernels-b"):
        os.utime(tmp_path / name, (now - 50 * day, now - 50 * day))
    assert cache.prune(tmp_path / "kernels-own", now) == []  # old, but two of the last three
    assert cache.prune(tmp_path / "nowhere" / "kernels-own", now) == []


# The command with only the smallest function to compile.
COMMAND = """
import numba, sys
from hotcold.runtime import cli, team
from hotcold.runtime.kernels import walk
i64 = numba.types.int64
team.compiled_functions = lambda: [(walk.claim_parked, (i64, i64))]
sys.exit(cli.main(["compile", *sys.argv[1:]]))
"""


def test_the_command_compiles_and_says_where(package: Path, tmp_path: Path) -> None:
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "home"), "PYTHONPATH": str(package)}
    said = []
    for arguments in ([], [], ["--quiet"]):
        done = subprocess.run([sys.executable, "-c", COMMAND, *arguments], env=env, capture_output=True, text=True)
        assert done.returncode == 0 and not done.stdout, done.stderr
        said.append(done.stderr)
    (folder,) = (tmp_path / "home" / "hotcold").iterdir()
    assert list(folder.rglob("*.nbc"))
    assert "compiling" in said[0] and f"kept in {folder}" in said[0]
    assert said[1] == f"hotcold: compiled already for {isa.CHOSEN.name}, in {folder}\n" and not said[2]


def test_the_command_fails_where_nothing_can_be_kept(package: Path, tmp_path: Path) -> None:
    """That is what it is for."""
    home = tmp_path / "home"
    home.write_text("a file where a folder should be")
    env = os.environ | {"XDG_CACHE_HOME": str(home), "PYTHONPATH": str(package)}
    done = subprocess.run([sys.executable, "-c", COMMAND, "-q"], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout
    last = done.stderr.splitlines()[-1]
    assert f"not kept in {home}" in last and last.endswith("make that folder writable") and "compiled for" not in last


def test_progress_names_the_functions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    @numba.njit
    def inner(x):
        return x + 1

    @numba.njit
    def outer(x):
        return inner(x) * 2

    seen: list[str] = []
    cache.compile_cached([(outer, (numba.types.int64,))], lambda line: None, seen.append)
    assert seen == ["outer", "inner"] and outer(3) == 8
