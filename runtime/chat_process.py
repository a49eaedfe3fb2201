"""The process that renders chat templates, seen from the program that asks.

In: a template's source and its variables, plain data. Out: the rendered text. Next: back to chat.py.

A template is a program from a stranger: it runs in jinja2's sandbox (chat_worker.py) inside a process with a limit on
memory and computing time. Checks inside this process could not stop it: a single filter or method call
(`'%9999999999d' % 1`, `x | center(10**9)`, a string joined to itself forty times) runs in C without ever coming back
to Python.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from hotcold.runtime.errors import HotcoldError

MAX_TEXT = 1 << 24  # characters of output
MAX_BYTES = 512 << 20  # memory of the rendering process
MAX_SECONDS = 2  # computing time of one rendering
MAX_WAIT = 20.0  # seconds on the clock, for machines that are busy with other work


class Renderer:
    """A rendering process: started when first needed, killed when it takes too long, started anew after that.

    It ends with close(), with the last reference to this object, or with the program. A rendering by a process that
    runs already costs about a millisecond. Calls from several threads take turns.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0  # of the process that started it: a fork must not share it
        self._end: weakref.finalize[[subprocess.Popen[bytes], int], Renderer] | None = None

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """The text. Raises HotcoldError with the template's own complaint, or for the limit it ran into."""
        job = {"source": source, "variables": variables, "max_chars": MAX_TEXT, "max_bytes": MAX_BYTES,
               "max_seconds": MAX_SECONDS}  # fmt: skip
        line = json.dumps(job).encode("ascii") + b"\n"
        with self._lock:
            reply = json.loads(self._ask(line))
        if "error" in reply:
            raise HotcoldError(f"chat template: {reply['error']}")
        return reply["text"]

    def close(self) -> None:
        """End the process, if there is one. A later rendering starts another."""
        with self._lock:
            self._stop()

    def _ask(self, line: bytes) -> bytes:
        process = self._started()
        done = False
        try:
            reply = _exchange(process, line)
            done = True
            return reply
        finally:
            if not done:  # an error or Ctrl-C: an answer still on its way would be taken for the next one's
                self._stop()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._pid == os.getpid() and self._process.poll() is None:
            return self._process
        self._stop()
        # Isolated, with this process's module path: neither the current folder nor the environment can put
        # other modules in the way. In a session of its own: Ctrl-C is meant for the program that asked.
        script = str(Path(__file__).with_name("chat_worker.py"))
        start = "import runpy, sys; sys.path[:] = sys.argv[2:]; runpy.run_path(sys.argv[1], run_name='__main__')"
        path = [p for p in sys.path if p and os.path.isabs(p)]
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", start, script, *path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            start_new_session=True,
        )  # fmt: skip
        self._process, self._pid = process, os.getpid()
        self._end = weakref.finalize(self, _kill, process, self._pid)
        return process

    def _stop(self) -> None:
        self._process = None
        if self._end is not None:
            self._end()


def _kill(process: subprocess.Popen[bytes], pid: int) -> None:
    """End a process that `pid` started, and its pipes; in a fork of `pid` it is somebody else's."""
    if pid != os.getpid():
        return
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()


def _exchange(process: subprocess.Popen[bytes], line: bytes) -> bytes:
    """Send a line, wait for a line. Raises HotcoldError when the process ends or takes too long."""
    if process.stdin is None or process.stdout is None:
        raise HotcoldError("chat template: the rendering process has no pipes")
    deadline = time.monotonic() + MAX_WAIT
    out, got = process.stdout.fileno(), bytearray()
    try:
        view = memoryview(line)
        while view:
            view = view[process.stdin.write(view) or 0 :]
    except BrokenPipeError:
        raise _ended(process) from None
    while not got.endswith(b"\n"):
        if not select.select([out], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise HotcoldError(f"chat template: no answer within {MAX_WAIT:.0f} s")
        part = os.read(out, 1 << 16)
        if not part:
            raise _ended(process)
        got += part
    return bytes(got)


def _ended(process: subprocess.Popen[bytes]) -> HotcoldError:
    code = process.wait(timeout=5)
    if code == -signal.SIGPROF:
        return HotcoldError(f"chat template: it computes for longer than {MAX_SECONDS} s")
    return HotcoldError(f"chat template: the rendering process ended with status {code}")
