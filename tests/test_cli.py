"""cli.py: the real program on a tiny real model."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hotcold.runtime import cli
from hotcold.runtime.api import Model

HOTCOLD = [sys.executable, "-m", "hotcold.runtime.cli"]
GREEDY = ["--temp", "0", "--ignore-eos", "-t", "1"]


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("relu")


Run = Callable[..., tuple[int, str, str]]


def test_help_and_version(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0 and all(c in out for c in ("convert", "run", "chat", "inspect"))
    for command in ("convert", "run", "chat", "inspect"):
        code, out, _ = run(command, "--help")
        assert code == 0 and f"usage: hotcold {command}" in out
    code, out, _ = run("--version")
    assert code == 0 and out.startswith("hotcold 0.")


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("arguments", [["inspect", "MODEL"], ["--version"], ["inspect", "/nowhere"], ["run"]])
def test_a_program_that_calls_the_command_keeps_its_signals(run: Run, arguments: list[str], model: Path) -> None:
    def own(signum: int, frame: object) -> None:
        del signum, frame

    before = signal.signal(signal.SIGHUP, own), signal.getsignal(signal.SIGTERM)
    try:
        run(*(str(model) if a == "MODEL" else a for a in arguments))
        assert signal.getsignal(signal.SIGHUP) is own and signal.getsignal(signal.SIGTERM) == before[1]
    finally:
        signal.signal(signal.SIGHUP, before[0])


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["inspect", "MODEL"], ["convert", "--help"]])
def test_commands_that_need_no_engine_do_not_load_the_compiler(arguments: list[str], model: Path) -> None:
    arguments = [str(model) if a == "MODEL" else a for a in arguments]
    code = (
        "import sys\nfrom hotcold.runtime.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["profile"], ["run"], ["run", "m", "-p", "x", "--nonsense"], ["run", "m", "-p", "x", "-f", "y"],
        ["run", "m", "-p", "x", "-n", "-2"], ["run", "m", "-p", "x", "-c", "-1"], ["run", "m", "-p", "x", "-t", "0"],
        ["run", "m", "-p", "x", "--top-p", "0"], ["run", "m", "-p", "x", "--temp", "nan"],
        ["run", "m", "-p", "x", "--stop", ""], ["run", "m", "-p", "x", "--sparsity", "guess"],
        ["run", "m", "-p", "x", "-sys", "be nice"], ["run", "m", "-p", "x", "-st", "--special"],
        ["chat", "m", "--min-p", "2"], ["chat", "m", "--top-p", "5"],
    ],
)  # fmt: skip
def test_wrong_usage_is_2_and_names_the_command(run: Run, arguments: list[str]) -> None:
    code, out, err = run(*arguments)
    assert code == 2 and out == ""
    assert "usage: hotcold" in err and "error:" in err


@pytest.mark.parametrize("command", ["convert", "run", "chat", "inspect"])
def test_an_unknown_option_is_named_by_its_command(run: Run, command: str) -> None:
    code, _, err = run(command, "m", "--no\x1bsuch")
    usage, error = err.splitlines()
    assert code == 2 and usage.startswith(f"usage: hotcold {command} [options] ")
    assert error == f"hotcold {command}: error: unrecognized arguments: --no\\x1bsuch; see hotcold {command} --help"


@pytest.mark.parametrize("number", ["2.0", "\u0663", "1_000", " 1", "", "x" * 99, "9" * 99])
@pytest.mark.parametrize("option", ["-n", "-t", "-c", "-s", "--top-k", "--repeat-last-n"])
def test_what_is_no_whole_number_is_named(run: Run, option: str, number: str) -> None:
    code, _, err = run("run", "m", "-p", "x", option, number)
    assert code == 2
    usage, error = err.splitlines()
    assert usage == "usage: hotcold run [options] MODEL"
    assert "must be a whole number, got" in error and option in error and len(error) < 200


@pytest.mark.parametrize("number", ["1_0", "nan", "inf", "\u0663", "1e", ".", "0x1"])
@pytest.mark.parametrize("option", ["--temp", "--top-p", "--min-p", "--repeat-penalty"])
def test_what_is_no_number_is_named(run: Run, option: str, number: str) -> None:
    code, _, err = run("run", "m", "-p", "x", option, number)
    assert code == 2 and f"{option}: must be a number, got {number!r}" in err


@pytest.mark.parametrize("path", ["", "/", "/dev/zero", "/nonexistent.gguf"])
def test_the_model_is_complained_about_before_the_prompt(run: Run, path: str) -> None:
    code, out, err = run("run", path)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert (path or "no such file: ''") in err and "prompt" not in err


def test_an_empty_path_is_no_folder(run: Run, model: Path) -> None:
    for arguments in (["chat", ""], ["inspect", ""], ["run", model, "-f", ""]):
        assert run(*arguments)[::2] == (1, "hotcold: error: no such file: ''\n")


@pytest.mark.parametrize("command", [["run", "-p", "x"], ["chat"], ["inspect"]])
def test_a_missing_or_broken_model_is_one_line(run: Run, command: list[str], tmp_path: Path) -> None:
    broken = tmp_path / "bad\x1b[31m\n.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    for path in (tmp_path / "none.gguf", broken):
        code, out, err = run(command[0], path, *command[1:])
        assert code == 1 and out == ""
        lines = err.splitlines()
        assert lines[-1].startswith("hotcold: error: ") and "\x1b" not in err and "Traceback" not in err


def test_an_unexpected_exception_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(cli, "_add_inspect", lambda parser: parser.set_defaults(run=lambda args: 1 // 0))
    with pytest.raises(ZeroDivisionError):
        cli.main(["inspect"])


def test_run_prints_what_the_python_interface_generates(run: Run, model: Path) -> None:
    code, out, err = run("run", model, "-p", "the inn", "-n", "20", *GREEDY)
    with Model.open(model, threads=1) as m:
        expected = "".join(m.generate("the inn", max_tokens=20, temperature=0, ignore_eos=True))
    assert code == 0
    assert out.rstrip("\n") == expected.rstrip("\n") and expected
    for part in ("load time", "prompt eval time", "tokens per second", "total time", "neurons computed"):
        assert part in err


def test_prompts_from_file_and_pipe_are_the_same_prompt(run: Run, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("the inn\n")
    arguments = ["-n", "12", *GREEDY, "--no-perf"]
    given = run("run", model, "-p", "the inn", *arguments)
    assert given[0] == 0 and given[1] and "time" not in given[2]
    assert run("run", model, "-f", file, *arguments)[:2] == given[:2]
    assert run("run", model, *arguments, stdin=b"the inn\r\n")[:2] == given[:2]


def test_display_prompt(run: Run, model: Path) -> None:
    _, plain, _ = run("run", model, "-p", "the inn", "-n", "3", *GREEDY)
    _, shown, _ = run("run", model, "-p", "the inn", "-n", "3", *GREEDY, "--display-prompt")
    assert shown == "the inn" + plain


def test_the_seed_makes_text_reproducible(run: Run, model: Path) -> None:
    def text(seed: str) -> str:
        return run("run", model, "-p", "a", "-n", "24", "--temp", "2", "-s", seed, "-t", "1")[1]

    assert text("7") == text("7")
    assert text("7") != text("8")


def test_exact_and_dense_give_the_same_text_and_exact_says_what_it_saved(run: Run, model: Path) -> None:
    dense = run("run", model, "-p", "the inn", "-n", "16", *GREEDY, "--sparsity", "dense")
    exact = run("run", model, "-p", "the inn", "-n", "16", *GREEDY, "--sparsity", "exact")
    assert dense[0] == exact[0] == 0 and dense[1] == exact[1]
    assert "neurons computed = 100.0 %" in dense[2]
    assert "neurons computed" in exact[2] and "neurons computed = 100.0 %" not in exact[2]


def test_n_zero_evaluates_the_prompt_only(run: Run, model: Path) -> None:
    code, out, err = run("run", model, "-p", "the inn", "-n", "0")
    assert (code, out) == (0, "")
    assert "prompt eval time" in err and "/     0 runs" in err


def test_stop_strings_end_the_text(run: Run, model: Path) -> None:
    _, whole, _ = run("run", model, "-p", "the inn", "-n", "30", *GREEDY)
    stop = whole[6:8]
    _, cut, _ = run("run", model, "-p", "the inn", "-n", "30", *GREEDY, "--stop", stop)
    assert cut.rstrip("\n") == whole[: whole.index(stop)].rstrip("\n")


def test_a_prompt_longer_than_the_context_is_refused_with_numbers(run: Run, model: Path) -> None:
    code, out, err = run("run", model, "-p", "q" * 100, "-c", "32")
    assert (code, out) == (1, "")
    assert "tokens long but the context holds 32" in err


def test_the_end_of_the_context_is_announced(run: Run, model: Path) -> None:
    code, out, err = run("run", model, "-p", "the inn", "-c", "32", *GREEDY)
    assert code == 0 and out
    assert "context full: all 32 tokens" in err


def test_single_turn_answers_like_chat(run: Run, model: Path) -> None:
    with Model.open(model, threads=1) as m:
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
        expected = "".join(m.chat(messages, max_tokens=10, temperature=0))
        plain = "".join(m.generate("hi", max_tokens=10, temperature=0))
    options = ["-n", "10", "--temp", "0", "-t", "1", "-sys", "be brief"]
    code, out, _ = run("run", model, "-st", "-p", "hi", *options)
    assert code == 0 and out.rstrip("\n") == expected.rstrip("\n") != plain.rstrip("\n")
    code, out, _ = run("chat", model, "-p", "hi", *options)
    assert code == 0 and out.rstrip("\n") == expected.rstrip("\n")
    code, out, _ = run("chat", model, *options, stdin=b"hi\n")
    assert code == 0 and out.rstrip("\n") == expected.rstrip("\n")


def test_chat_without_a_terminal_answers_each_line_and_obeys_commands(run: Run, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    lines = f"one\n/quux\n\ntwo\n/save {path}\n".encode()
    code, out, err = run("chat", model, "-n", "4", *GREEDY, stdin=lines)
    assert code == 0 and out
    assert "unknown command /quux" in err and "saved 4 messages" in err
    assert path.exists()


def test_chat_without_input_ends_well(run: Run, model: Path) -> None:
    assert run("chat", model)[:2] == (0, "")


def test_chat_that_could_not_answer_is_1(run: Run, model: Path) -> None:
    code, out, err = run("chat", model, "-c", "32", stdin=b"q" * 100 + b"\n")
    assert (code, out) == (1, "")
    assert "the limit is 32" in err
    assert run("chat", model, "-c", "32", "-p", "q" * 100)[0] == 1


@pytest.mark.parametrize("stdin", [b"", b"caf\xe9"])
def test_run_without_a_usable_prompt(run: Run, model: Path, stdin: bytes) -> None:
    code, out, err = run("run", model, stdin=stdin)
    assert out == "" and "Traceback" not in err
    assert (code, "UTF-8" in err) == ((1, True) if stdin else (2, False))


def test_a_prompt_file_that_is_missing_is_named(run: Run, model: Path) -> None:
    code, _, err = run("run", model, "-f", "/nonexistent.txt")
    assert code == 1 and "/nonexistent.txt" in err


def test_endless_input_is_refused(run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotcold.runtime.console.MAX_INPUT", 1 << 20)
    monkeypatch.setattr("hotcold.runtime.repl.MAX_INPUT", 1 << 20)
    text = bytes((1 << 20) + 1)
    file = tmp_path / "prompt.txt"
    file.write_bytes(text)
    for arguments, stdin in (
        (["run", model, "-f", file], b""), (["run", model], text), (["chat", model], text),
        (["chat", model], (b"a" * 1000 + b"\\\n") * 1100),
    ):  # fmt: skip
        code, out, err = run(*arguments, stdin=stdin)
        assert (code, out) == (1, "")
        assert "er than 1 MiB: not read further" in err.splitlines()[-1]


def test_a_prompt_that_cannot_be_read_is_named(run: Run, model: Path, tmp_path: Path) -> None:
    code, out, err = run("run", model, "-f", tmp_path)
    assert (code, out) == (1, "") and f"cannot read the prompt from {tmp_path}" in err


@pytest.mark.parametrize("error", [MemoryError(), MemoryError("Unable to allocate\n9 PiB")])
def test_lack_of_memory_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch, model: Path, error: MemoryError) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(Model, "open", refuse)
    code, _, err = run("run", model, "-p", "a")
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("hotcold: error: not enough memory") and ("9 PiB" in err) == bool(error.args)


def test_inspect_prints_the_model(run: Run, model: Path) -> None:
    code, out, _ = run("inspect", model)
    assert code == 0 and "ffn_up_down" in out
    assert "llama.attention.layer_norm_rms_epsilon  float32" in out, "no wrapping in a pipe"


def test_a_reader_that_goes_away_ends_the_program_quietly(model: Path) -> None:
    program = subprocess.Popen(
        [*HOTCOLD, "run", model, "-p", "a", *GREEDY], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert program.stdout and program.stderr
    assert program.stdout.read(1)
    program.stdout.close()
    err = program.stderr.read().decode()
    assert program.wait() == cli.BROKEN_PIPE
    assert "Traceback" not in err and "Exception" not in err and "BrokenPipe" not in err


@pytest.mark.parametrize("arguments", [["--help"], ["run", "MODEL", "-p", "a", "-n", "3", *GREEDY]])
def test_a_closed_pipe_is_no_complaint(model: Path, arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [*HOTCOLD, *(str(model) if a == "MODEL" else a for a in arguments)]
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    program = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=buffered)
    os.close(write)
    assert program.returncode == cli.BROKEN_PIPE
    assert b"Traceback" not in program.stderr and b"Broken" not in program.stderr


ANSWER = ["run", "MODEL", "-p", "a", "-n", "3", *GREEDY]


def shell(model: Path, arguments: list[str], redirection: str) -> subprocess.CompletedProcess[str]:
    """The program started by a shell, which can close its streams."""
    command = shlex.join([*HOTCOLD, *(str(model) if a == "MODEL" else a for a in arguments)])
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    return subprocess.run(["sh", "-c", f"{command} {redirection}"], capture_output=True, text=True, env=buffered)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["inspect", "MODEL"], ANSWER])
@pytest.mark.parametrize("redirection", [">/dev/full", ">&-"])
def test_output_that_cannot_be_written_is_one_line(model: Path, arguments: list[str], redirection: str) -> None:
    program = shell(model, arguments, redirection)
    assert program.returncode == 1
    assert program.stderr.splitlines()[-1].startswith("hotcold: error: cannot write the text")
    assert "Traceback" not in program.stderr


@pytest.mark.parametrize("redirection", ["2>&-", pytest.param("2>/dev/full", marks=pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="needs /dev/full"))])  # fmt: skip
def test_notes_that_cannot_be_written_do_not_keep_the_answer_back(model: Path, redirection: str) -> None:
    program = shell(model, ANSWER, redirection)
    assert (program.returncode, program.stdout) == (0, shell(model, ANSWER, "").stdout)
    assert program.stdout
    assert shell(model, ["run"], redirection).returncode == 2
    assert shell(model, ["inspect", "/nonexistent"], redirection).returncode == 1


def test_a_closed_standard_input_is_an_empty_one(model: Path) -> None:
    assert "standard input is empty" in shell(model, ["run", "MODEL"], "<&-").stderr
    program = shell(model, ["chat", "MODEL"], "<&-")
    assert (program.returncode, program.stdout) == (0, "")
    assert "Traceback" not in program.stderr


def test_the_seed_chosen_at_random_is_told(run: Run, model: Path) -> None:
    arguments = ["run", model, "-p", "a", "-n", "24", "--temp", "2", "-t", "1"]
    _, first, err = run(*arguments)
    seed = err.rsplit("seed = ", 1)[1].split()[0]
    assert run(*arguments, "-s", seed)[1] == first


def test_ctrl_c_ends_run_with_130_and_its_timings(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("relu", max_position_embeddings=65536)
    program = subprocess.Popen(
        [*HOTCOLD, "run", model, "-p", "a", *GREEDY, "-c", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert program.stdout
    assert program.stdout.read(1)
    os.kill(program.pid, signal.SIGINT)
    _, err = program.communicate()
    assert program.returncode == cli.INTERRUPTED
    assert b"total time" in err and b"Traceback" not in err
