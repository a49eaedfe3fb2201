"""What a person sees while a text is measured: running values on stdout, a bar or plain lines on stderr.

In: tokens and chunks done. Out: text on two streams. Next: nothing.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hotcold.runtime.console import emit, note

if TYPE_CHECKING:
    from hotcold.runtime.perplexity import Measurement

_EVERY = 10.0  # seconds between lines where there is no terminal
_PER_LINE = 6  # values on a line of a terminal that also shows a bar


class Reporter:
    """A context manager around a measurement. columns: heading of a comparison with a base; "" without one."""

    def __init__(self, n_chunk: int, n_ctx: int, columns: str = "") -> None:
        self._n_chunk, self._total = n_chunk, n_chunk * (n_ctx - 1)
        self._columns = columns
        self._tokens = 0
        self._began = self._told = time.perf_counter()
        self._text = ""  # of the bar
        self._line: list[str] = []
        console = Console(stderr=True, highlight=False)
        self._bar = console.is_terminal
        # Where both streams are the same screen, the bar must know of what is printed above it.
        self._shared = self._bar and sys.stdout.isatty()
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn(),
            console=console, transient=True, disable=not self._bar, redirect_stdout=self._shared,
            redirect_stderr=self._bar,
        )  # fmt: skip
        self._task = self._progress.add_task(f"chunk 1 of {n_chunk}", total=self._total, rate="")

    def __enter__(self) -> Reporter:
        self._progress.start()
        if self._columns:
            emit(sys.stdout, self._columns + "\n")
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._line:
            emit(sys.stdout, "".join(self._line) + "\n")
        elif not self._columns and not self._shared and kind is None:
            emit(sys.stdout, "\n")
        self._progress.stop()

    def advance(self, n: int) -> None:
        """n more tokens were evaluated."""
        self._tokens += n
        now = time.perf_counter()
        rate = self._tokens / max(now - self._began, 1e-9)
        chunk = min(self._n_chunk, 1 + self._tokens * self._n_chunk // self._total)
        if self._bar:
            self._progress.update(self._task, completed=self._tokens, rate=f"{rate:.1f} tokens/s",
                                  description=f"chunk {chunk} of {self._n_chunk}{self._text}")  # fmt: skip
        elif now - self._told >= _EVERY:
            self._told = now
            left = round((self._total - self._tokens) / rate)
            note(f"chunk {chunk} of {self._n_chunk}, {rate:.1f} tokens/s, {left // 60}:{left % 60:02} left")

    def chunk_done(self, m: Measurement) -> None:
        """Print the running value after a chunk."""
        ppl = m.ppl[0]
        self._text = f", PPL {ppl:.4f}"
        if self._columns:
            emit(sys.stdout, m.kl.running_line(m.done) + "\n")
            return
        value = f"[{m.done}]{ppl:.4f},"
        if not self._shared:
            emit(sys.stdout, value)
            return
        self._line.append(value)
        if len(self._line) == _PER_LINE:
            emit(sys.stdout, "".join(self._line) + "\n")
            self._line.clear()
