"""terminal.py: the real program in a pseudo-terminal, with keys as a person presses them."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pexpect
import psutil
import pytest

READY = "\x1b[?2004h"  # the prompt switches bracketed paste on when it begins to listen
UP, CTRL_C, ALT_ENTER = "\x1b[A", "\x03", "\x1b\r"
TIMEOUT = 120


class Chat:
    """`hotcold chat` in a pseudo-terminal."""

    def __init__(self, model: Path, home: Path, *options: str) -> None:
        env = os.environ | {
            "TERM": "xterm", "XDG_DATA_HOME": str(home), "PROMPT_TOOLKIT_NO_CPR": "1", "LANG": "C.UTF-8",
            "LC_ALL": "C.UTF-8",
        }  # fmt: skip
        command = ["-m", "hotcold.runtime.cli", "chat", str(model), "-t", "1", "--ignore-eos", "-s", "1", *options]
        self.child = pexpect.spawn(
            sys.executable, command, env=env, timeout=TIMEOUT, encoding="utf-8", dimensions=(24, 200)
        )
        self.child.delaybeforesend = None
        self.ready()

    def ready(self) -> str:
        """Wait for the prompt; what was printed before it."""
        self.child.expect_exact(READY)
        return str(self.child.before)

    def enter(self, text: str) -> str:
        """Type a line and wait for the next prompt; what was printed in between."""
        self.child.send(text + "\r")
        return self.ready()

    def saved(self, path: Path) -> list[tuple[str, str]]:
        """The conversation so far, by way of /save."""
        assert "saved" in self.enter(f"/save {path}")
        return [(m["role"], m["content"]) for m in json.loads(path.read_text())["messages"]]

    def works(self, seconds: float = 0.5) -> None:
        """Wait until the program has computed for so long; waiting for keys costs nothing."""
        process = psutil.Process(self.child.pid)
        end = sum(process.cpu_times()[:2]) + seconds
        while sum(process.cpu_times()[:2]) < end:
            time.sleep(0.01)

    def interrupt(self) -> str:
        """Press Ctrl-C, once, and wait for the prompt; what was printed before it."""
        self.child.send(CTRL_C)
        return self.ready()

    def leave(self, how: str = "\x04") -> None:
        self.child.send(how)
        self.child.expect(pexpect.EOF)
        self.child.close()
        assert (self.child.exitstatus, self.child.signalstatus) == (0, None)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("relu", max_position_embeddings=65536)


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[..., Chat]]:
    """(options) -> a conversation; all of one test share the home directory."""
    running: list[Chat] = []

    def begin(*options: str, home: Path = tmp_path / "home") -> Chat:
        running.append(Chat(model, home, *options))
        return running[-1]

    yield begin
    for chat in running:
        chat.child.close(force=True)


Start = Callable[..., Chat]


@pytest.mark.parametrize("how", ["\x04", "/exit\r"])
def test_ctrl_d_and_exit_leave_with_0(start: Start, how: str) -> None:
    start().leave(how)


def test_a_turn_and_its_statistics(start: Start, tmp_path: Path) -> None:
    chat = start("-n", "8")
    chat.enter("hello")
    assert re.search(r"generation: 8 tokens, .* tok/s", chat.enter("/stats"))
    messages = chat.saved(tmp_path / "talk.json")
    assert messages[0] == ("user", "hello") and messages[1][0] == "assistant"


def test_arrow_up_brings_back_earlier_lines_also_after_a_restart(start: Start) -> None:
    chat = start()
    assert "system prompt set" in chat.enter("/system alpha")
    assert "system prompt: alpha" in chat.enter("/system")
    chat.leave()
    again = start()
    assert "(none)" in again.enter("/system")
    assert "system prompt set" in again.enter(UP + UP + UP)
    assert "system prompt: alpha" in again.enter("/system")


def test_the_history_is_for_the_user_only(start: Start, tmp_path: Path) -> None:
    start().enter("/help")
    files = [p for p in (tmp_path / "home").rglob("*") if p.is_file()]
    assert len(files) == 1
    assert files[0].stat().st_mode & 0o077 == 0


def test_without_a_place_for_the_history_the_conversation_goes_on(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    chat = start(home=tmp_path / "file")
    assert "/regen" in chat.enter("/help")
    assert "/regen" in chat.enter(UP)
    chat.leave()


def test_a_paste_of_several_lines_is_one_message(start: Start, tmp_path: Path) -> None:
    chat = start("-n", "2")
    chat.enter("\x1b[200~line one\nline two\r\n  three\x1b[201~")
    assert chat.saved(tmp_path / "talk.json")[0] == ("user", "line one\nline two\n  three")


def test_alt_enter_and_backslash_start_a_new_line(start: Start, tmp_path: Path) -> None:
    chat = start("-n", "2")
    chat.enter("one" + ALT_ENTER + "two\\\rthree")
    assert chat.saved(tmp_path / "talk.json")[0] == ("user", "one\ntwo\nthree")


def test_left_arrow_edits_the_line(start: Start, tmp_path: Path) -> None:
    chat = start("-n", "2")
    chat.enter("helo" + "\x1b[D" + "l")
    assert chat.saved(tmp_path / "talk.json")[0] == ("user", "hello")


def test_unknown_commands_are_not_sent_and_tab_completes_known_ones(start: Start, tmp_path: Path) -> None:
    chat = start()
    assert "unknown command /quux" in chat.enter("/quux")
    assert "/regen" in chat.enter("/he\t")
    assert chat.saved(tmp_path / "talk.json") == []


def test_ctrl_c_at_the_prompt_clears_the_line_and_on_an_empty_one_says_how_to_leave(
    start: Start, tmp_path: Path
) -> None:
    chat = start()
    chat.child.send("some text")
    chat.child.expect_exact("some text")
    assert "unknown command /quux" in chat.enter(CTRL_C + "/quux")
    chat.child.send(CTRL_C)
    assert "/exit leaves" in chat.ready()
    assert chat.saved(tmp_path / "talk.json") == []
    chat.leave()


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(start: Start, tmp_path: Path) -> None:
    chat = start("-c", "0")
    chat.child.send("tell me everything\r")
    chat.child.expect_exact("\x1b[?2004l")
    chat.child.expect(r"\w{3}")
    assert "stopped; what was said so far is kept" in chat.interrupt()
    messages = chat.saved(tmp_path / "talk.json")
    assert messages[0] == ("user", "tell me everything")
    assert messages[1][0] == "assistant" and messages[1][1]
    chat.leave()


def conversation(path: Path, messages: list[dict[str, str]]) -> Path:
    data: dict[str, Any] = {"format": "hotcold-conversation", "version": 1, "system": None, "messages": messages}
    path.write_text(json.dumps(data))
    return path


def test_ctrl_c_stops_a_long_prompt_and_changes_nothing(start: Start, tmp_path: Path) -> None:
    long = "".join(f"{i} " for i in range(11_000))  # about 55000 tokens
    talk = [{"role": "user", "content": long}]
    chat = start("-c", "0", "-n", "4")
    assert "loaded 1 messages" in chat.enter(f"/load {conversation(tmp_path / 'long.json', talk)}")
    chat.child.send("/regen\r")
    chat.child.expect_exact("\x1b[?2004l")
    chat.works()
    assert "stopped before the answer began" in chat.interrupt()
    assert "context: 0 of 65536 tokens used" in chat.enter("/stats")
    assert chat.saved(tmp_path / "talk.json") == [("user", long)]
    chat.enter("/clear")
    chat.enter("hello")
    assert len(chat.saved(tmp_path / "talk.json")) == 2
    chat.leave()


def test_save_and_load(start: Start, tmp_path: Path) -> None:
    first = start("-n", "6")
    first.enter("hello")
    messages = first.saved(tmp_path / "talk.json")
    first.leave()
    second = start("-n", "6")
    assert "loaded 2 messages" in second.enter(f"/load {tmp_path / 'talk.json'}")
    second.enter("and then")
    assert second.saved(tmp_path / "more.json")[:3] == [*messages, ("user", "and then")]
    (tmp_path / "junk.json").write_text("[1, 2")
    assert "not a saved conversation" in second.enter(f"/load {tmp_path / 'junk.json'}")
    assert len(second.saved(tmp_path / "more.json")) == 4


def test_overflow_is_announced_and_the_message_taken_back(start: Start, tmp_path: Path) -> None:
    chat = start("-c", "64", "-n", "2")
    chat.enter("hello")
    before = chat.saved(tmp_path / "talk.json")
    answer = chat.enter("q" * 150)
    assert re.search(r"context full: this conversation needs \d+ tokens, the limit is 64", answer)
    assert "/clear" in answer
    assert chat.saved(tmp_path / "talk.json") == before


def test_regen_and_clear(start: Start, tmp_path: Path) -> None:
    chat = start("-n", "12", "--temp", "5")
    chat.enter("hello")
    first = chat.saved(tmp_path / "talk.json")
    chat.enter("/regen")
    second = chat.saved(tmp_path / "talk.json")
    assert first[0] == second[0] and first[1] != second[1] and len(second) == 2
    assert "new conversation" in chat.enter("/clear")
    assert chat.saved(tmp_path / "talk.json") == []
