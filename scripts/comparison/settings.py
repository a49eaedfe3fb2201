"""What is compared, how often and how long.

In: nothing. Out: Settings. Next: twins.py makes the two files.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
STOCK = "llama.cpp"  # its label in tables


def say(line: str) -> None:
    """Progress and explanations go to stderr; stdout is for the report."""
    print(line, file=sys.stderr, flush=True)


@dataclass
class Settings:
    """Of one comparison. Paths that are None: llama.cpp's part is left out, `notes` says why."""

    llama_bench: Path | None = None  # the program
    llama_lib: Path | None = None  # folder with libllama
    llama_bindings: Path | None = None  # folder with llama-cpp-python's llama_cpp; None: installed
    baseline_lib: Path | None = None  # folder with another build's libllama
    threads: Sequence[int] = (1,)
    prompt_tokens: int = 256
    gen_tokens: int = 64
    reps: int = 5  # clean rounds wanted; 0: no speed
    modes: Sequence[str] = ("dense",)
    quality_tokens: int = 512  # 0: no quality
    text: Path | None = FOLDER / "text.txt"  # None: random ids
    noise: float = 0.15  # cores others may use during a clean burst
    wait: float = 60.0  # seconds to wait for a quiet machine before a burst
    timeout: float = 900.0  # seconds for one burst
    notes: list[str] = field(default_factory=list)

    def our_worker(self, command: str, *arguments: str, threads: int, mode: str) -> list[str]:
        """Command line of our side: `bench` or `logits`, see engine_worker.py."""
        worker = [sys.executable, str(FOLDER / "engine_worker.py"), command, *arguments]
        return [*worker, "-t", str(threads), "--sparsity", mode]
