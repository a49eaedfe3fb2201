"""The way to the first token: what is not loaded, what Ctrl-C does, that collecting garbage is on again."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotcold.runtime import cli, entry


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("relu")


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_a_model_is_opened_without_scipy_linalg_and_others_still_get_it(model: Path) -> None:
    out = python(f"""
import sys
from hotcold.runtime import Model
Model.open({str(model)!r}, threads=1).close()
print("scipy.linalg" in sys.modules, any(type(f).__name__ == "_NotNow" for f in sys.meta_path))
import numba, numpy as np
print(numba.njit(lambda a, b: a @ b)(np.eye(2), np.array([[1.0, 2.0], [3.0, 4.0]])).tolist())
print("scipy.linalg" in sys.modules)
""")
    assert out.splitlines() == ["False False", "[[1.0, 2.0], [3.0, 4.0]]", "True"]


def test_another_thread_may_load_it_meanwhile() -> None:
    out = python("""
import sys, threading
from hotcold.runtime.kernels.numba_start import without_blas
def other():
    import scipy.linalg
with without_blas():
    try:
        import scipy.linalg
    except ImportError as error:
        print(error)
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    print("scipy.linalg" in sys.modules)
""")
    assert out.splitlines() == ["not before it is needed", "True"]


@pytest.mark.parametrize("arguments", [["run", "MODEL", "-p", "hello", "-n", "1", "-t", "1"], ["inspect", "MODEL"],
                                       ["run", "nothing.gguf", "-p", "x"]])  # fmt: skip
def test_garbage_is_collected_again(model: Path, arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """As it was before, and nothing that a command made stays out of reach."""
    call = [str(model) if a == "MODEL" else a for a in arguments]
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    cli.main(call)
    assert gc.isenabled() and gc.get_freeze_count() == frozen
    gc.disable()
    try:
        cli.main(call)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_ctrl_c_while_modules_load_is_130_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == "hotcold.runtime.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "hotcold.runtime.cli")
    monkeypatch.delattr("hotcold.runtime.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert entry.main() == 130


def test_ctrl_c_outside_what_the_command_catches_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "main", interrupted)
    assert entry.main() == 130


def test_a_process_that_ends_does_not_look_at_all_objects_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "main", lambda: 3)
    try:
        assert entry.main() == 3 and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
