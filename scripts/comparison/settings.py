"""What is compared, how often and how long.

In: nothing. Out: Settings. Next: twins.py makes the two files.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
HOTCOLD = [sys.executable, "-m", "hotcold.runtime.cli"]  # the command of this very Python, installed or not
STOCK = "llama.cpp"  # its label in tables
ANSWER_S = 10.0  # seconds that a program has to tell its version or options
NO_REPACK = "llama.cpp, no repack"  # the same with weights left as they lie in the file
REPACK = {"on": (STOCK,), "off": (NO_REPACK,), "both": (STOCK, NO_REPACK)}


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
    prompt_tokens: int = 256  # 0: no prompt
    gen_tokens: int = 64  # 0: no generation
    depth: int = 0  # tokens in the context before either
    kv_type: str = "f16"
    repack: str = "both"  # of REPACK
    reps: int = 5  # clean rounds wanted; 0: no speed
    modes: Sequence[str] = ("dense",)
    mmap: bool = True  # False: both read their file into memory instead of mapping it
    bandwidth: bool = True  # measure plain reads between the rounds
    quality_tokens: int = 512  # 0: no quality
    text: Path | None = FOLDER / "text.txt"  # None: random ids
    noise: float = 0.15  # cores others may use during a clean burst
    wait: float = 60.0  # seconds to wait for a quiet machine before a burst
    timeout: float = 900.0  # seconds for one burst
    notes: list[str] = field(default_factory=list)

    @property
    def tests(self) -> list[str]:
        """As llama-bench calls them: pp256, tg64, tg64@d1024."""
        sizes = (("pp", self.prompt_tokens), ("tg", self.gen_tokens))
        return [test_name(kind, n, self.depth) for kind, n in sizes if n]

    @property
    def token_options(self) -> list[str]:
        """Both programs call them the same."""
        return ["-p", str(self.prompt_tokens), "-n", str(self.gen_tokens), "-d", str(self.depth)]

    def our_bench(self, model: Path, options: list[str], threads: int, mode: str) -> list[str]:
        """Command line of `hotcold bench` for one repetition."""
        command = [*HOTCOLD, "bench", str(model), *options, *([] if self.mmap else ["--no-mmap"])]
        engine = ["-t", str(threads), "--sparsity", mode, "--kv-type", self.kv_type]
        return [*command, *engine, "-r", "1", "--no-bandwidth", "-o", "jsonl"]

    def our_logits(self, *arguments: str, threads: int, mode: str) -> list[str]:
        """Command line of engine_logits.py."""
        worker = [sys.executable, str(FOLDER / "engine_logits.py"), *arguments]
        return [*worker, "-t", str(threads), "--sparsity", mode, "--kv-type", self.kv_type]

    def stock_worker(self, command: str, *arguments: str, threads: int, lib: Path) -> list[str]:
        """Command line of llama.cpp through its library: `bench` or `logits`, see stock_worker.py."""
        worker = [sys.executable, str(FOLDER / "stock_worker.py"), command, *arguments, "--lib", str(lib)]
        bindings = ["--bindings", str(self.llama_bindings)] if self.llama_bindings else []
        return [*worker, *bindings, "-t", str(threads)]


def test_name(kind: str, tokens: int, depth: int) -> str:
    return f"{kind}{tokens}" + (f"@d{depth}" if depth else "")
