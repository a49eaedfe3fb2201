"""The chat on a terminal: line editing, history, keys, and what Ctrl-C means when.

In: a Repl. Out: lines the user entered, one message each. Next: nothing; this is the end of the way.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType

from platformdirs import user_data_path
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.shortcuts import CompleteStyle

from hotcold.runtime.repl import COMMANDS, Repl


class Interrupts:
    """While entered, Ctrl-C raises KeyboardInterrupt only inside `allowed()`, once; elsewhere it does nothing.

    So it can never strike between the moment a turn ends and the moment the prompt listens to keys.
    """

    def __init__(self) -> None:
        self._armed = False

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        try:
            self._armed = True
            yield
        finally:
            self._armed = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt


class _Completer(Completer):
    """Commands after a leading /, file names after /save and /load."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        name, space, rest = text.partition(" ")
        if not space:
            for command in COMMANDS:
                if command.startswith(name):
                    yield Completion(command, start_position=-len(name))
        elif name in ("/save", "/load"):
            yield from self._paths.get_completions(Document(rest, len(rest)), complete_event)


class _History(FileHistory):
    """A history file that stops being written, with a note, rather than ending the conversation."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        super().__init__(str(path))
        self._say = say
        self._broken = False

    def store_string(self, string: str) -> None:
        try:
            super().store_string(string.encode("utf-8", "replace").decode("utf-8"))
        except OSError as error:
            if not self._broken:
                self._say(f"the history is not saved from here on: {error}")
            self._broken = True


def _open_history(say: Callable[[str], None]) -> History:
    """The history of all conversations, in the user's data directory, readable by the user only."""
    path = user_data_path("hotcold", appauthor=False) / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except OSError as error:
        say(f"the history of earlier conversations is not available: {error}")
        return InMemoryHistory()
    return _History(path, say)


def _key_bindings() -> KeyBindings:
    keys = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)

    @keys.add("enter", filter=typing)
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
            buffer.delete_before_cursor(1)
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=typing)
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=typing)
    @keys.add("<sigint>", filter=typing)
    def _clear(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return keys


def run_terminal(repl: Repl, interrupts: Interrupts, say: Callable[[str], None]) -> int:
    """Read messages until Ctrl-D or /exit. Returns the exit status, 0."""
    session: PromptSession[str] = PromptSession(
        "> ",
        history=_open_history(say),
        completer=_Completer(),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        key_bindings=_key_bindings(),
        multiline=True,
        prompt_continuation="  ",
        enable_suspend=True,
    )
    while True:
        try:
            line = session.prompt()
        except KeyboardInterrupt:
            say("Ctrl-D or /exit leaves")
            continue
        except EOFError:
            return 0
        if not repl.handle(line):
            return 0
