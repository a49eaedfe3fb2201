"""What the commands print: the model's text on stdout, notes and timings on stderr.

In: pieces of text, GenerationStats. Out: streams that scripts can use and terminals can survive. Next: cli.py, repl.py.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, TextIO

from hotcold.runtime.errors import HotcoldError

if TYPE_CHECKING:
    from hotcold.runtime.generate import GenerationStats

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but newline and tab


def printable(text: str) -> str:
    """Text with control characters spelled out (\\x1b), so that a model cannot send commands to the terminal."""
    return _CONTROL.sub(lambda m: f"\\x{ord(m[0]):02x}", text)


def discard(stream: TextIO) -> None:
    """Send what is left in a stream that cannot be written to nowhere: the interpreter flushes it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def note(line: str) -> None:
    """One line on stderr about what the program does or decided."""
    print(f"hotcold: {printable(line)}", file=sys.stderr, flush=True)


class TextOut:
    """A stream for the model's text: flushed piece by piece, control characters escaped if it is a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._escape = stream.isatty()
        self._at_line_start = True

    def write(self, text: str) -> None:
        """Write and flush. Raises HotcoldError when that fails, but BrokenPipeError passes through."""
        if not text:
            return
        self._at_line_start = text.endswith("\n")
        try:
            self._stream.write(printable(text) if self._escape else text)
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            discard(self._stream)
            raise HotcoldError(f"cannot write the text: {error.strerror or error}") from error

    def end_line(self) -> None:
        """A newline, unless the text ended with one."""
        if not self._at_line_start:
            self.write("\n")


def timing_summary(stats: GenerationStats, load_seconds: float, total_seconds: float) -> list[str]:
    """llama.cpp-like lines: milliseconds, tokens, ms per token, tokens per second, share of neurons computed."""
    n_prompt = stats.prompt_tokens - stats.reused_tokens
    lines = [
        f"       load time = {load_seconds * 1e3:10.2f} ms",
        f"prompt eval time = {_rate(stats.prompt_seconds, n_prompt, 'tokens')}",
        f"       eval time = {_rate(stats.eval_seconds, stats.eval_runs, 'runs')}",
        f"   sampling time = {stats.sample_seconds * 1e3:10.2f} ms / {stats.generated_tokens:5d} tokens",
        f"      total time = {total_seconds * 1e3:10.2f} ms / {n_prompt + stats.eval_runs:5d} tokens",
    ]
    if stats.shares.size:
        lines.append(f"neurons computed = {share_line(stats)}")
    return lines


def share_line(stats: GenerationStats) -> str:
    """Share of neurons computed for the generated tokens: the mean, and per layer where layers differ."""
    if not stats.shares.size:
        return "no token generated yet"
    percent = stats.shares * 100
    mean = f"{percent.mean():.1f} %"
    whole = [f"{p:.0f}" for p in percent]
    if percent.max() - percent.min() < 0.05:
        return f"{mean} in each of {len(whole)} layers"
    return f"{mean} (layers 0-{len(whole) - 1}: {' '.join(whole)})"


def _rate(seconds: float, n: int, what: str) -> str:
    per_token = seconds * 1e3 / n if n else 0.0
    per_second = n / seconds if seconds > 0 else 0.0
    return (
        f"{seconds * 1e3:10.2f} ms / {n:5d} {what:6s} "
        f"({per_token:8.2f} ms per token, {per_second:8.2f} tokens per second)"
    )
