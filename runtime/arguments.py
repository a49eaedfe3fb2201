"""Numbers of the command line, in plain digits: int() and float() also take underscores, spaces and all scripts.

In: what a user typed. Out: a checked number, or argparse's error. Next: the commands that have such options.
"""

from __future__ import annotations

import argparse
import re


def whole(text: str) -> int:
    """A whole number, 0 or more."""
    return _from(text, 0)


def count(text: str) -> int:
    """A whole number, 1 or more."""
    return _from(text, 1)


def wholes(text: str) -> list[int]:
    """Whole numbers with commas between them."""
    return [whole(part) for part in text.split(",")]


def counts(text: str) -> list[int]:
    """The same, each 1 or more."""
    return [count(part) for part in text.split(",")]


def fraction(text: str) -> float:
    """A number between 0 and 1, both excluded."""
    if not re.fullmatch(r"[0-9]{0,9}\.?[0-9]{1,18}", text) or not 0 < float(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number between 0 and 1, for example 0.5, got {_shown(text)}")
    return float(text)


def add_memory_options(group: argparse._ActionsContainer) -> None:
    """--mlock and --no-mmap, for the commands that run a model."""
    group.add_argument("--mlock", action="store_true", help="keep the model in RAM, where ulimit -l allows it")
    group.add_argument(
        "--no-mmap", dest="mmap", action="store_false",
        help="read the file into memory, on huge pages where there are any, instead of mapping it",
    )  # fmt: skip


def _from(text: str, low: int) -> int:
    if not re.fullmatch(r"[0-9]{1,15}", text) or int(text) < low:
        raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {10**15 - 1}, got {_shown(text)}")
    return int(text)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")
