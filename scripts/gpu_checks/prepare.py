"""What later parts need: the CPU's kernels compiled and the large model made, beside parts 1 to 3.

In: Settings. Out: Preparation, which says when each is ready. Next: gpu_check.py waits for it.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from comparison.settings import HOTCOLD

from gpu_checks.boxed import child_env, end_tree
from gpu_checks.models import speed_files, speed_options
from gpu_checks.settings import CHECKOUT, Settings


class Preparation(threading.Thread):
    """Two commands, one after the other; what they print goes to prepare.log."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(daemon=True)
        self.settings = settings
        self.compiled, self.made = threading.Event(), threading.Event()
        self.problem = ""  # of the model
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def run(self) -> None:
        s = self.settings
        s.out.mkdir(parents=True, exist_ok=True)
        with open(s.out / "prepare.log", "wb") as log:
            self._command([*HOTCOLD, "compile", "--quiet"], log)
            self.compiled.set()
            ours, stock = speed_files(s)
            if not s.model and "speed" in s.parts and not (ours.exists() and stock.exists()):
                s.models.mkdir(parents=True, exist_ok=True)
                script = [sys.executable, str(CHECKOUT / "scripts" / "make_synthetic.py")]
                if self._command([*script, *speed_options(s)], log):
                    self.problem = "the model could not be made, see prepare.log"
            self.made.set()

    def _command(self, command: list[str], log: object) -> int:
        if self._stopped:
            return -1
        self._process = subprocess.Popen(command, stdout=log, stderr=log, env=child_env())  # type: ignore[call-overload]
        return self._process.wait()

    def model(self) -> tuple[str, str]:
        """The files of part 5; "" where there is none, and `problem` says why."""
        if self.settings.model:
            return self.settings.model, self.settings.stock
        if not self.made.is_set():
            self.problem = (
                "the model was not made in time: a second run finds what is made then; or name one by --model"
            )
        if self.problem:
            return "", ""
        ours, stock = speed_files(self.settings)
        return str(ours), str(stock)

    def stop(self) -> None:
        self._stopped = True
        if self._process is not None and self._process.poll() is None:
            end_tree(self._process)


def default_models() -> Path:
    return Path.home() / ".cache" / "hotcold" / "gpu-check"
