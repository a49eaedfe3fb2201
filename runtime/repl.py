"""A conversation with a model: commands, turns, and what happens when one is interrupted or does not fit.

In: lines from terminal.py, or from a pipe. Out: answers on stdout, notes on stderr. Next: terminal.py.

The conversation changes only when a turn has something to keep: a message that does not fit or is interrupted before
the model said anything is taken back, an interrupted answer is kept as far as it was shown.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hotcold.runtime.console import MAX_INPUT, TextOut, hybrid_line, lookup_line, note, share_line
from hotcold.runtime.conversation import Conversation, read_conversation
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.generate import ContextFull, GenerationStats
from hotcold.runtime.sampling import Sampler, SamplingParams

if TYPE_CHECKING:
    from hotcold.runtime.api import Model
    from hotcold.runtime.stats import LayerStats

COMMANDS = {
    "/help": "this list",
    "/clear": "start a new conversation (the system prompt stays)",
    "/regen": "answer the last message again",
    "/system": "/system TEXT sets the system prompt, /system - removes it, /system alone shows it",
    "/stats": "speed of the last answer, context used, share of neurons computed",
    "/save": "/save FILE writes the conversation",
    "/load": "/load FILE reads a saved conversation",
    "/exit": "leave (as Ctrl-D)",
}
KEYS = (
    "Enter sends; Alt-Enter, or a backslash at the end of the line, starts a new line; a paste may have many lines.",
    "Ctrl-C stops an answer. A message that begins with / is a command; put a space before it to send it.",
)


@dataclass
class ReplOptions:
    """What `hotcold chat` was asked for."""

    sampling: SamplingParams
    system: str | None = None
    max_tokens: int = -1
    ignore_eos: bool = False
    stop: list[str] = field(default_factory=list)
    lookup: int = 0  # most tokens drafted for a run


class Repl:
    """One conversation. `handle` takes a line the user entered.

    interruptible: a context in which Ctrl-C raises KeyboardInterrupt; outside it the front end decides what it does.
    failed: some message got no answer (for the exit status of a pipe).
    """

    def __init__(
        self,
        model: Model,
        options: ReplOptions,
        out: TextOut,
        say: Callable[[str], None] = note,
        interruptible: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        self.model = model
        self.options = options
        self.conversation = Conversation(options.system)
        self.failed = False
        self._out = out
        self._say = say
        self._interruptible = interruptible
        self._sampler = Sampler(options.sampling)
        self._stats = GenerationStats()
        self._turn_seconds = 0.0

    def handle(self, line: str) -> bool:
        """Send a message or obey a command. False: the user wants to leave."""
        text = line.rstrip()
        if not text.strip():
            return True
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            self.failed = True
            self._say("that is not valid UTF-8: nothing was sent")
            return True
        if text.startswith("/"):
            return self._command(text)
        self.send(text[1:] if text.startswith(" /") else text)
        return True

    def _command(self, text: str) -> bool:
        name, *others = text.split(maxsplit=1)
        rest = others[0] if others else ""
        try:
            if name == "/exit":
                return False
            if name in ("/save", "/load") and not rest:
                raise HotcoldError(f"{name} needs a file name: {name} FILE")
            if name == "/help":
                self._help()
            elif name == "/clear":
                self.conversation.messages.clear()
                self._say("new conversation")
            elif name == "/regen":
                self._regenerate()
            elif name == "/system":
                self._system(rest)
            elif name == "/stats":
                self._show_stats()
            elif name == "/save":
                self.conversation.save(Path(rest).expanduser())
                self._say(f"saved {len(self.conversation.messages)} messages to {rest}")
            elif name == "/load":
                self.conversation = read_conversation(Path(rest).expanduser())
                self._say(f"loaded {len(self.conversation.messages)} messages from {rest}")
            else:
                self._say(f"unknown command {name}: nothing was sent; /help lists the commands")
        except HotcoldError as error:
            self.failed = True
            self._say(str(error))
        return True

    def _help(self) -> None:
        for name, what in COMMANDS.items():
            self._say(f"{name:8} {what}")
        for line in KEYS:
            self._say(line)

    def _system(self, text: str) -> None:
        if not text:
            system = self.conversation.system
            self._say(f"system prompt: {system} (/system - removes it)" if system else "system prompt: (none)")
            return
        if text == "-":
            self.conversation.system = None
            self._say("no system prompt from the next message on")
            return
        before, self.conversation.system = self.conversation.system, text
        try:
            self.model.encode_chat([*self.conversation.all_messages(), {"role": "user", "content": "?"}])
        except HotcoldError:
            self.conversation.system = before
            raise
        self._say("system prompt set; it holds from the next message on")

    def send(self, text: str) -> None:
        """A turn: the user's message and the model's answer, or neither."""
        messages = self.conversation.messages
        messages.append({"role": "user", "content": text})
        if not self._answer("your message was taken back"):
            messages.pop()

    def _regenerate(self) -> None:
        messages = self.conversation.messages
        if not messages:
            raise HotcoldError("there is no message to answer yet")
        old = messages.pop() if messages[-1]["role"] == "assistant" else None
        if not messages or messages[-1]["role"] != "user":
            messages.extend([old] if old else [])
            raise HotcoldError("the conversation has no user message to answer")
        if not self._answer("the earlier answer stays" if old else "no answer was added") and old:
            messages.append(old)

    def _answer(self, undone: str) -> bool:
        """Generate the assistant's message and append it. False if there is none; `undone` says what that means."""
        said: list[str] = []
        stats, began = GenerationStats(), time.perf_counter()
        interrupted = False
        try:
            with self._interruptible() if self._interruptible else contextlib.nullcontext():
                self._stream(said, stats)
        except KeyboardInterrupt:
            if self._interruptible is None:
                raise
            interrupted = True
        except ContextFull as error:
            self.failed = True
            self._say(
                f"context full: this conversation needs {error.needed} tokens, the limit is {error.n_ctx}; {undone}. "
                "/clear starts a new one, --ctx-size N at the start makes the context larger"
            )
            return False
        except HotcoldError as error:
            self.failed = True
            self._out.end_line()
            self._say(f"{error}; {undone}")
            return False
        self._out.end_line()
        if interrupted and not said:
            self._say(f"stopped before the answer began; {undone}")
            return False
        self._stats, self._turn_seconds = stats, time.perf_counter() - began
        self.conversation.messages.append({"role": "assistant", "content": "".join(said)})
        self._explain_end(stats, interrupted, bool(said))
        return True

    def _stream(self, said: list[str], stats: GenerationStats) -> None:
        """Print the answer; `said` gets each piece before it is shown."""
        options = self.options
        tokens = self.model.encode_chat(self.conversation.all_messages())
        for piece in self.model.session.generate(
            tokens,
            self._sampler,
            max_tokens=options.max_tokens,
            stop=options.stop,
            ignore_eog=options.ignore_eos,
            continues=False,
            lookup=options.lookup,
            stats=stats,
        ):
            said.append(piece)
            self._out.write(piece)

    def _explain_end(self, stats: GenerationStats, interrupted: bool, said_something: bool) -> None:
        if interrupted:
            self._say("stopped; what was said so far is kept")
        elif stats.stop_reason == "context":
            n = self.model.n_ctx
            self._say(
                f"context full: {n} of {n} tokens are used, so the answer ends here. "
                "/clear starts a new conversation, --ctx-size N at the start makes the context larger"
            )
        elif stats.stop_reason == "length":
            self._say(f"the answer ends here: -n {self.options.max_tokens}")
        elif not said_something:
            self._say("the model ended its answer without saying anything")

    @property
    def last_layers(self) -> LayerStats | None:
        """What the tokens of the last answer computed; None where there was none."""
        return self._stats.layers

    def _show_stats(self) -> None:
        s, session = self._stats, self.model.session
        if s.prompt_tokens:
            new = s.prompt_tokens - s.reused_tokens
            self._say(
                f"prompt: {new} new tokens ({s.reused_tokens} reused), "
                f"{s.prompt_seconds:.2f} s, {s.prompt_rate:.2f} tok/s"
            )
            self._say(f"generation: {s.generated_tokens} tokens, {s.eval_seconds:.2f} s, {s.eval_rate:.2f} tok/s")
            if s.lookup:
                self._say(f"lookup: {lookup_line(s)}")
            self._say(f"turn: {self._turn_seconds:.2f} s")
        self._say(f"context: {session.n_cached} of {session.engine.n_ctx} tokens used")
        self._say(f"neurons computed: {share_line(s.layers)}")
        if s.layers is not None and s.layers.hybrid is not None:
            self._say(f"GPU: {hybrid_line(s.layers.hybrid)}")


def run_lines(repl: Repl, lines: Iterable[bytes]) -> int:
    """Answer each line of a pipe; a backslash at the end joins a line to the next. Exit status 1 if one failed.

    Lines that are not UTF-8 are refused, with their number.
    """
    held: list[str] = []
    size = 0  # characters in `held`
    for number, raw in enumerate(lines, 1):
        try:
            line = raw.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            note(f"line {number} of the input is not UTF-8 (byte {error.start}): not sent")
            repl.failed, held, size = True, [], 0
            continue
        size += len(line)
        if size > MAX_INPUT:
            raise HotcoldError(f"a message is longer than {MAX_INPUT >> 20} MiB: not read further (line {number})")
        if line.endswith("\\"):
            held.append(line[:-1] + "\n")
            continue
        message, held, size = "".join([*held, line]), [], 0
        if not repl.handle(message):
            break
    else:
        if held:
            repl.handle("".join(held))
    return 1 if repl.failed else 0
