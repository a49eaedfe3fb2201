"""repl.py with a fake model: what each command does, and that a turn leaves the conversation whole."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeModel, HashEngine, ScriptedEngine

from hotcold.runtime.console import TextOut
from hotcold.runtime.repl import COMMANDS, Repl, ReplOptions, run_lines
from hotcold.runtime.sampling import SamplingParams


class Bench:
    """A Repl, what it printed and what it said."""

    def __init__(self, engine: Any = None, terminal: bool = True, **options: Any) -> None:
        self.engine = engine or HashEngine()
        self.stream = io.StringIO()
        self.said: list[str] = []
        options = dict[str, Any](sampling=SamplingParams(temperature=0), max_tokens=5) | options
        self.repl = Repl(
            FakeModel(self.engine),  # type: ignore[arg-type]
            ReplOptions(**options),
            TextOut(self.stream),
            self.said.append,
            contextlib.nullcontext if terminal else None,
        )

    def __call__(self, line: str) -> str:
        """Enter a line; the text printed."""
        self.stream.seek(0)
        self.stream.truncate()
        self.said.clear()
        assert self.repl.handle(line)
        return self.stream.getvalue()

    @property
    def messages(self) -> list[tuple[str, str]]:
        return [(m["role"], m["content"]) for m in self.repl.conversation.messages]


def test_a_turn_prints_the_answer_and_keeps_both_messages() -> None:
    bench = Bench()
    answer = bench("hello")
    assert len(answer) == 6 and answer.endswith("\n")
    assert bench.messages == [("user", "hello"), ("assistant", answer[:-1])]


def test_the_second_turn_evaluates_only_what_is_new() -> None:
    bench = Bench()
    bench("hello")
    bench.engine.forwards.clear()
    bench("more")
    assert bench.engine.forwards[0] == len("x|u:more|a:")  # the last token of the answer was not evaluated before


def test_empty_lines_are_nothing() -> None:
    bench = Bench()
    assert bench("") == bench("   \n ") == ""
    assert bench.messages == []


def test_an_unknown_command_is_not_sent() -> None:
    bench = Bench()
    assert bench("/quux now") == ""
    assert "unknown command /quux" in bench.said[0] and "/help" in bench.said[0]
    assert bench.messages == [] and bench.engine.forwards == []


def test_a_space_before_the_slash_sends_it() -> None:
    bench = Bench()
    bench(" /etc/passwd is a file")
    assert bench.messages[0] == ("user", "/etc/passwd is a file")


def test_help_names_every_command() -> None:
    bench = Bench()
    bench("/help")
    assert all(any(name in line for line in bench.said) for name in COMMANDS)


def test_exit_leaves() -> None:
    assert not Bench().repl.handle("/exit")


def test_clear_keeps_the_system_prompt() -> None:
    bench = Bench(system="be brief")
    bench("hello")
    bench("/clear")
    assert bench.messages == [] and bench.repl.conversation.system == "be brief"


def test_regen_answers_the_same_message_again() -> None:
    bench = Bench(sampling=SamplingParams(temperature=30, seed=1, top_k=0, top_p=1, min_p=0))
    bench("hello")
    first = bench.messages
    bench("/regen")
    assert bench.messages[0] == first[0] and len(bench.messages) == 2
    assert bench.messages[1] != first[1]


def test_regen_without_a_message_says_so() -> None:
    bench = Bench()
    bench("/regen")
    assert "no message" in bench.said[0]


def test_system_is_shown_set_and_used() -> None:
    bench = Bench()
    bench("/system")
    assert "(none)" in bench.said[0]
    bench("/system talk like a pirate")
    bench("hello")
    assert bytes(bench.engine.cache).startswith(b"s:talk like a pirate|u:hello|")


def test_system_minus_removes_the_prompt() -> None:
    bench = Bench(system="old")
    bench("/system")
    assert bench.said == ["system prompt: old (/system - removes it)"]
    bench("/system -")
    bench("hello")
    assert bytes(bench.engine.cache).startswith(b"u:hello|")
    assert "/system -" in COMMANDS["/system"]


def test_a_system_prompt_the_template_refuses_is_not_kept() -> None:
    bench = Bench(system="old")
    bench("/system forbidden")
    assert "no system prompt allowed" in bench.said[0]
    assert bench.repl.conversation.system == "old"


def test_a_template_error_takes_the_message_back() -> None:
    bench = Bench(system="forbidden")
    bench("hello")
    assert "no system prompt allowed" in bench.said[0] and "taken back" in bench.said[0]
    assert bench.messages == [] and bench.repl.failed


def test_stats_name_tokens_context_and_neurons() -> None:
    bench = Bench()
    bench("/stats")
    assert "context: 0 of 100" in bench.said[0]
    bench("hello")
    bench("/stats")
    text = "\n".join(bench.said)
    assert "prompt: 10 new tokens (0 reused)" in text
    assert "generation: 5 tokens" in text
    assert "context: 14 of 100" in text
    assert "neurons computed: 37.5 % (layers 0-1: 25 50)" in text


def test_save_clear_load(tmp_path: Path) -> None:
    bench, path = Bench(system="s"), tmp_path / "my talk.json"
    bench("hello")
    before = bench.messages
    bench(f"/save {path}")
    assert "2 messages" in bench.said[0]
    fresh = Bench()
    fresh(f"/load {path}")
    assert fresh.messages == before and fresh.repl.conversation.system == "s"


@pytest.mark.parametrize("line", ["/save", "/load", "/load /nonexistent/file", "/save /nonexistent/file"])
def test_save_and_load_that_cannot_work_say_why_and_change_nothing(line: str) -> None:
    bench = Bench()
    bench("hello")
    before = bench.messages
    bench(line)
    assert len(bench.said) == 1
    assert bench.messages == before


def test_overflow_is_announced_with_numbers_and_nothing_is_cut() -> None:
    bench = Bench()
    bench("hello")
    before, cached = bench.messages, list(bench.engine.cache)
    assert bench("x" * 100) == ""
    assert "needs 121 tokens, the limit is 100" in bench.said[0]
    assert "/clear" in bench.said[0] and "taken back" in bench.said[0]
    assert bench.messages == before and bench.engine.cache == cached


def test_an_answer_that_fills_the_context_says_so_and_is_kept() -> None:
    bench = Bench(max_tokens=-1)
    answer = bench("x" * 80)
    assert "context full: 100 of 100" in bench.said[0]
    assert bench.messages[1] == ("assistant", answer.rstrip("\n"))


def test_the_limit_of_tokens_is_announced() -> None:
    bench = Bench()
    bench("hello")
    assert "-n 5" in bench.said[0]


def test_an_empty_answer_is_announced() -> None:
    bench = Bench(ScriptedEngine(b"", len("u:hello|a:")))
    bench("hello")
    assert "without saying anything" in bench.said[0]
    assert bench.messages[1] == ("assistant", "")


def test_interrupted_before_the_answer_the_message_is_taken_back() -> None:
    bench = Bench()
    bench("hello")
    before = bench.messages
    bench.engine.interrupt_in = 1
    bench("more")
    assert "taken back" in bench.said[0]
    assert bench.messages == before
    bench("more")
    assert len(bench.messages) == 4


def test_interrupted_in_the_answer_what_was_shown_is_kept() -> None:
    bench = Bench()
    bench.engine.interrupt_in = 3
    shown = bench("hello")
    assert "stopped" in bench.said[0]
    assert bench.messages == [("user", "hello"), ("assistant", shown.rstrip("\n"))]
    assert len(shown.rstrip("\n")) == 2


def test_interrupted_regen_keeps_the_earlier_answer() -> None:
    bench = Bench()
    bench("hello")
    before = bench.messages
    bench.engine.interrupt_in = 1
    bench("/regen")
    assert "earlier answer stays" in bench.said[0]
    assert bench.messages == before


def test_without_a_terminal_an_interruption_ends_the_program() -> None:
    bench = Bench(terminal=False)
    bench.engine.interrupt_in = 2
    with pytest.raises(KeyboardInterrupt):
        bench("hello")


def test_half_surrogates_are_refused() -> None:
    bench = Bench()
    bench("caf\udce9")
    assert "UTF-8" in bench.said[0] and bench.messages == []


def test_lines_of_a_pipe_are_messages_and_a_backslash_joins_them() -> None:
    bench = Bench(terminal=False)
    assert run_lines(bench.repl, [b"one\n", b"\n", b"two \\\r\n", b"three\r\n", b"/exit\n", b"never\n"]) == 0
    assert [m[1] for m in bench.messages[::2]] == ["one", "two \nthree"]


def test_a_last_line_with_a_backslash_is_sent_too() -> None:
    bench = Bench(terminal=False)
    assert run_lines(bench.repl, [b"one\\"]) == 0
    assert [m[1] for m in bench.messages[::2]] == ["one"]


@pytest.mark.parametrize("line", [b"caf\xe9\n", b"x" * 200 + b"\n"])
def test_a_pipe_with_a_line_that_cannot_be_answered_goes_on_and_fails_at_the_end(
    line: bytes,
) -> None:
    bench = Bench(terminal=False)
    assert run_lines(bench.repl, [line, b"next\n"]) == 1
    assert [m[1] for m in bench.messages[::2]] == ["next"]
