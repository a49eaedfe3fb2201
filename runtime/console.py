"""What the commands print and read: the model's text on stdout, notes and timings on stderr, prompts on stdin.

In: pieces of text, GenerationStats. Out: streams that scripts can use and terminals can survive. Next: cli.py, repl.py.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, BinaryIO, TextIO

from hotcold.runtime.errors import HotcoldError

if TYPE_CHECKING:
    from hotcold.runtime.generate import GenerationStats
    from hotcold.runtime.stats import HybridStats, LayerStats

MAX_INPUT = 64 << 20  # bytes of a prompt or a line: more than any context holds
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but newline and tab


def printable(text: str) -> str:
    """Text with control characters spelled out (\\x1b), so that a model cannot send commands to the terminal."""
    return _CONTROL.sub(lambda m: f"\\x{ord(m[0]):02x}", text)


def fill_streams() -> None:
    """Give the program streams where it was started with closed ones (`<&-`, `>&-`, `2>&-`).

    Standard input is empty then, standard error goes nowhere, and to write to standard output is an error. The
    descriptors 0 to 2 are taken by that too, so that no file opened later gets the text meant for a stream.
    """
    for name, mode, flags in (("stdin", "r", os.O_RDONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, flags), mode, encoding="utf-8"))


def discard(stream: TextIO) -> None:
    """Send what is left in a stream that cannot be written to nowhere: the interpreter flushes it at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def emit(stream: TextIO, text: str = "") -> None:
    """Write and flush. Raises HotcoldError when that fails, but BrokenPipeError passes through."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard(stream)
        raise HotcoldError(f"cannot write the text: {error.strerror or error}") from error


def complain(line: str) -> None:
    """A line on stderr, as it is. Where stderr cannot be written the program goes on without."""
    _try_stderr(line + "\n")


def end_notes() -> None:
    """Write what others (argparse) left in stderr, or drop it where it cannot be written."""
    _try_stderr("")


def _try_stderr(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


def note(line: str) -> None:
    """One line on stderr about what the program does or decided."""
    complain(f"hotcold: {printable(line)}")


def read_input(name: str, open_: Callable[[], AbstractContextManager[BinaryIO]]) -> bytes:
    """All of a prompt's source. Raises HotcoldError when it cannot be read or has no end in sight."""
    try:
        with open_() as stream:
            raw = stream.read(MAX_INPUT + 1)
    except OSError as error:
        raise HotcoldError(f"cannot read the prompt from {name}: {error.strerror or error}") from error
    if len(raw) > MAX_INPUT:
        raise HotcoldError(f"the prompt from {name} is larger than {MAX_INPUT >> 20} MiB: not read further")
    return raw


def input_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Lines of standard input. Raises HotcoldError for one that has no end in sight."""
    try:
        while line := stream.readline(MAX_INPUT + 1):
            if len(line) > MAX_INPUT:
                raise HotcoldError(f"a line of standard input is longer than {MAX_INPUT >> 20} MiB: not read further")
            yield line
    except OSError as error:
        raise HotcoldError(f"cannot read standard input: {error.strerror or error}") from error


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
        emit(self._stream, printable(text) if self._escape else text)

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
        f"       eval time = {_rate(stats.eval_seconds, stats.eval_tokens, 'tokens' if stats.lookup else 'runs')}",
        f"   sampling time = {stats.sample_seconds * 1e3:10.2f} ms / {stats.generated_tokens:5d} tokens",
        f"      total time = {total_seconds * 1e3:10.2f} ms / {n_prompt + stats.eval_tokens:5d} tokens",
    ]
    if stats.lookup:
        lines.append(f"          lookup = {lookup_line(stats)}")
    if stats.layers is not None:
        lines.append(f"neurons computed = {share_line(stats.layers)}")
        if stats.layers.hybrid is not None:
            lines.append(f"             GPU = {hybrid_line(stats.layers.hybrid)}")
    return lines


def lookup_line(stats: GenerationStats) -> str:
    """What drafts saved."""
    per_run = stats.eval_tokens / stats.eval_runs if stats.eval_runs else 0.0
    return (
        f"{stats.accepted} of {stats.drafted} drafted tokens accepted; "
        f"{stats.eval_tokens} tokens in {stats.eval_runs} runs ({per_run:.2f} per run)"
    )


def share_line(layers: LayerStats | None) -> str:
    """Share of neurons computed for the generated tokens, mean and per layer where layers differ, and bytes read."""
    if layers is None:
        return "no token generated yet"
    percent = layers.computed * 100
    line = f"{percent.mean():.1f} %"
    if percent.max() - percent.min() < 0.05:
        line += f" in each of {len(percent)} layers"
    else:
        line += f" (layers 0-{len(percent) - 1}: {' '.join(f'{p:.0f}' for p in percent)})"
    if layers.checked.mean() < 1:
        line += f", key rows of {100 * layers.checked.mean():.1f} %"
    return f"{line}; {100 * layers.bytes_share:.1f} % of the feed-forward bytes read"


def hybrid_line(shared: HybridStats) -> str:
    """What the GPU had of the layers, and how often it had to wait for the CPU."""
    n = len(shared.gpu)
    layers = f"layers {shared.first}-{n - 1}" if shared.first < n - 1 else f"layer {n - 1}"
    asked = float(shared.asked.sum())
    work = "no neurons left to the CPU"
    if shared.cpu.any() or asked:
        work = (f"{100 * shared.cpu_share:.1f} % of their neurons by the CPU, {asked:.1f} waits and transfers per "
                f"token, {100 * shared.skips:.1f} % of layers skipped")  # fmt: skip
    return f"{layers} on {shared.name}, {shared.vram / 2**20:.0f} MiB of VRAM; {work}"


def _rate(seconds: float, n: int, what: str) -> str:
    per_token = seconds * 1e3 / n if n else 0.0
    per_second = n / seconds if seconds > 0 else 0.0
    return (
        f"{seconds * 1e3:10.2f} ms / {n:5d} {what:6s} "
        f"({per_token:8.2f} ms per token, {per_second:8.2f} tokens per second)"
    )
