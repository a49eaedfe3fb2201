"""Shared by all test modules: helper modules importable by name, tiny models converted once per session.

tiny_checkpoint("qwen2")                 folder with the Hugging Face checkpoint of a case of tiny.py
tiny_model("qwen2", outtype="f16")       GGUF made from it by `hotcold convert`
tiny_model("qwen2", stock=True)          the same written back with --to-stock
"""

from __future__ import annotations

import argparse
import io
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # tiny, reference_model, fakes


def run_convert(*arguments: str | Path) -> None:
    """`hotcold convert ARGUMENTS` in this process; fails the test if it does not return 0."""
    from hotcold.convert.main import add_arguments, run

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    code = run(parser.parse_args([str(a) for a in arguments]))
    if code != 0:
        pytest.fail(f"hotcold convert {' '.join(map(str, arguments))} returned {code}")


def convert_error(*arguments: str | Path) -> str:
    """The one line that `hotcold convert ARGUMENTS` fails with."""
    from hotcold.convert.main import add_arguments, run
    from hotcold.runtime.errors import HotcoldError

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(HotcoldError) as e:
        run(parser.parse_args([str(a) for a in arguments]))
    assert "\n" not in str(e.value)
    return str(e.value)


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> Iterator[None]:
    """Tests send themselves and their children Ctrl-C, which a job in a shell's background is started deaf to."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(case, **overrides) -> folder of the checkpoint, written once per session."""
    from tiny import write_checkpoint

    made: dict[tuple[Any, ...], Path] = {}

    def get(case: str, **overrides: Any) -> Path:
        key = (case, repr(sorted(overrides.items())))
        if key not in made:
            # The folder's name becomes the model's name, so it must not depend on the overrides.
            made[key] = write_checkpoint(tmp_path_factory.mktemp("checkpoint") / case, case, **overrides)
        return made[key]

    return get


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]) -> Callable[..., Path]:
    """(case, outtype="f32", stock=False, **overrides) -> GGUF, converted once per session."""
    made: dict[tuple[Any, ...], Path] = {}

    def get(case: str, outtype: str = "f32", stock: bool = False, **overrides: Any) -> Path:
        key = (case, outtype, stock, repr(sorted(overrides.items())))
        if key not in made:
            out = tmp_path_factory.mktemp("model") / f"{case}-{outtype}.gguf"
            if stock:
                run_convert(get(case, outtype, **overrides), "--to-stock", "-o", out)
            else:
                run_convert(tiny_checkpoint(case, **overrides), "-o", out, "--outtype", outtype)
            made[key] = out
        return made[key]

    return get


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """(arguments of hotcold, stdin) -> exit status, stdout, stderr. In this process."""
    from hotcold.runtime import cli


    def call(*arguments: str | Path, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capfd.readouterr()
        try:
            code = cli.main([str(a) for a in arguments])
        except SystemExit as leave:
            code = int(leave.code or 0)
        out, err = capfd.readouterr()
        return code, out, err

    return call
