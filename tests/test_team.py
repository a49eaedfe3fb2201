"""The worker team at its edges: closed while it computes, dropped, forked, interrupted, failing, on busy cores."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from tiny import token_ids

from hotcold.runtime import HotcoldError
from hotcold.runtime.engine import MAX_THREADS, Engine, block_sizes
from hotcold.runtime.kernels import walk
from hotcold.runtime.kernels.formats import PACK_TOKENS


@pytest.fixture(scope="module")
def path(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("relu")


def workers() -> int:
    return sum(thread.name.startswith("hotcold-") for thread in threading.enumerate())


def test_close_ends_a_run_of_another_thread(path: Path) -> None:
    for _ in range(5):
        engine = Engine.open(path, threads=2)
        ended: list[str] = []

        def compute(engine: Engine = engine, ended: list[str] = ended) -> None:
            try:
                while True:
                    engine.truncate(0)
                    engine.forward(token_ids(300), "all")
            except HotcoldError as error:
                ended.append(str(error))

        thread = threading.Thread(target=compute, daemon=True)
        thread.start()
        time.sleep(0.05)
        closers = [threading.Thread(target=engine.close, daemon=True) for _ in range(2)]
        for each in closers:
            each.start()
        for each in (*closers, thread):
            each.join(60)
            assert not each.is_alive()
        assert "closed" in ended[0]


def test_a_dropped_engine_sends_its_workers_away(path: Path) -> None:
    before = workers()
    for _ in range(3):
        Engine.open(path, threads=2).forward([1, 2, 3])
        gc.collect()
    for _ in range(600):
        if workers() == before:
            break
        time.sleep(0.1)
    assert workers() == before


# ------------------------------------------------------------------ a worker that fails

RUNS = 3  # that go well before, at least: the compiled function may serve further ones before it returns


def failing(which: int, how: Callable[[], int]) -> Callable[..., int]:
    """walk.serve, but one worker does `how` instead of its part of a later run."""
    serve, seen = walk.serve, [0]

    def stand_in(*arguments: Any) -> int:
        *_, t, _, control = arguments
        if t == which:
            words = np.ctypeslib.as_array((ctypes.c_int64 * (walk.GO + 1)).from_address(control))
            while words[walk.GO] == seen[0]:  # the compiled function would have waited here
                time.sleep(0.001)
            seen[0] = int(words[walk.GO])
            if seen[0] > RUNS:
                return how()
        return int(serve(*arguments))

    return stand_in


def raises() -> int:
    raise ZeroDivisionError("the cause")


def leaves() -> int:
    return -1


@pytest.mark.parametrize("how", [raises, leaves])
@pytest.mark.parametrize(("which", "n_threads"), [(0, 1), (0, 3), (1, 3), (2, 3)])
def test_a_worker_that_fails_ends_the_call_with_an_error(
    how: Callable[[], int], which: int, n_threads: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that wait for it at a barrier are let go; nobody writes any more when the error is raised."""
    before = workers()
    with monkeypatch.context() as patched:
        patched.setattr(walk, "serve", failing(which, how))
        patched.setattr("hotcold.runtime.team.compile_cached", lambda functions, notify: None)
        engine = Engine.open(path, threads=n_threads)
        with pytest.raises(HotcoldError, match=f"open it again: worker {which} ") as caught:
            for _ in range(200):
                n_past = engine.n_past
                engine.forward([1, 2, 3] if n_past % 2 else [1])
    assert "\n" not in str(caught.value)
    assert ("ZeroDivisionError: the cause" in str(caught.value)) == (how is raises)
    assert engine.n_past == n_past >= RUNS and workers() == before
    with pytest.raises(HotcoldError, match="open it again"):
        engine.forward([1])
    engine.close()
    with Engine.open(path, threads=n_threads) as engine:
        assert np.isfinite(engine.forward([1])).all()


def test_a_worker_that_only_looks_ended_goes_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ctrl-C inside is_alive() leaves behind before Python 3.13: a live thread that is told to have ended."""
    with Engine.open(path, threads=2) as engine:
        want = engine.forward([1, 2, 3])
        engine.truncate(0)
        monkeypatch.setattr(threading.Thread, "is_alive", lambda thread: False)
        assert np.array_equal(engine.forward([1, 2, 3]), want)
        monkeypatch.undo()


CROWDED = """
import sys
import numpy as np
from hotcold.runtime.engine import Engine
path, n_threads, to, *ids = sys.argv[1:]
ids = [int(token) for token in ids]
with Engine.open(path, threads=int(n_threads)) as engine:
    np.save(to, np.stack([engine.forward(ids), *(engine.forward([token]) for token in ids[:20])]))
"""


def test_more_threads_than_cores_and_none_of_them_free(path: Path, tmp_path: Path) -> None:
    """It must end, and with the bits it has otherwise. How long it takes is measured elsewhere."""
    n_threads, limit = min(4 * (os.cpu_count() or 1), MAX_THREADS), 300
    command = [sys.executable, "-c", CROWDED, str(path), str(n_threads)]
    ids = [str(token) for token in token_ids(40)]
    subprocess.run([*command, str(tmp_path / "alone.npy"), *ids], check=True, timeout=limit)  # compiles, if need be
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        subprocess.run([*command, str(tmp_path / "crowded.npy"), *ids], check=True, timeout=limit)
    except subprocess.TimeoutExpired:
        pytest.fail(f"{n_threads} threads on busy cores did not end within {limit} s and were killed")
    finally:
        for process in busy:
            process.kill()
            process.wait()
    alone, crowded = (np.load(tmp_path / f"{name}.npy") for name in ("alone", "crowded"))
    assert np.array_equal(alone.view(np.int32), crowded.view(np.int32))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork()")
def test_a_forked_process_is_told(path: Path) -> None:
    program = f"""
import os, sys
from hotcold.runtime import HotcoldError
from hotcold.runtime.engine import Engine
engine = Engine.open({str(path)!r}, threads=2)
engine.forward([1, 2, 3])
pid = os.fork()
if pid == 0:
    try:
        engine.forward([4])
    except HotcoldError as error:
        engine.close()
        os._exit(7 if "fork" in str(error) else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
engine.forward([4])
engine.close()
"""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", program], timeout=300).returncode == 0


def test_models_opened_at_once_leave_numba_as_it_was(path: Path) -> None:
    before = numba.config.CACHE_DIR
    threads = [threading.Thread(target=lambda: Engine.open(path, threads=1).close()) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert before == numba.config.CACHE_DIR


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_ctrl_c_ends_the_compilation(path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hotcold.runtime.cli", "run", str(path), "-p", "a", "-n", "1"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    child = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert child.stderr is not None
    for line in child.stderr:
        if "compiling" in line:
            break
    time.sleep(2)  # well into it, and far from its end
    child.send_signal(signal.SIGINT)
    rest = child.stderr.read()
    assert child.wait(120) == 130
    assert "kernels compiled" not in rest and "Traceback" not in rest and "ignored" not in rest


@pytest.mark.parametrize("step", [1, 5, 6, 7, 11, 12, 256])
def test_no_block_is_too_short_for_the_kernels_of_many_tokens(step: int) -> None:
    for n in range(1, 530):
        sizes = block_sizes(n, step)
        assert sum(sizes) == n and all(0 < size <= step for size in sizes)
        if step >= 2 * PACK_TOKENS - 1 and len(sizes) > 1:
            assert min(sizes) >= PACK_TOKENS


@pytest.mark.parametrize("outtype", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("n", [3, 30, 257, 300])
def test_a_text_gives_the_same_bits_wherever_it_is_cut(outtype: str, n: int, tiny_model: Callable[..., Path]) -> None:
    ids = token_ids(n)
    with Engine.open(tiny_model("relu", outtype=outtype), threads=2) as engine:
        whole = engine.forward(ids)
        if n > 2 * PACK_TOKENS:
            for cut in (PACK_TOKENS, 17, n - PACK_TOKENS):
                engine.truncate(0)
                engine.forward(ids[:cut], "none")
                assert np.array_equal(engine.forward(ids[cut:]).view(np.int32), whole.view(np.int32))
        engine.truncate(0)
        assert np.array_equal(engine.forward(ids).view(np.int32), whole.view(np.int32))
