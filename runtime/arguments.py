"""Numbers of the command line, in plain digits: int() and float() also take underscores, spaces and all scripts.

In: what a user typed. Out: a checked number, or argparse's error. Next: the commands that have such options.
"""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotcold.runtime.gpu.choose import GpuOptions, Place

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


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


def add_gpu_options(group: argparse._ActionsContainer) -> None:
    """--gpu and what goes with it, for the commands that run a model on a GPU. gpu_options() reads them."""
    group.add_argument(
        "--gpu", choices=("auto", "off", "required"),
        help="auto: use a GPU if there is one, and say why if not; required: that is an error (default: auto, saying "
             "nothing where there is no card)",
    )  # fmt: skip
    group.add_argument(
        "--vram-budget", type=budget, metavar="SIZE",
        help="VRAM to use at most, such as 8GiB or 8000MB; auto: what is free (default)",
    )  # fmt: skip
    group.add_argument(
        "--gpu-plan", choices=("auto", "all", "keys", "predict", "layers"), default="auto",
        help="all: everything on the GPU; keys: attention, key rows and hot neurons there, exact; predict: predictors "
             "and hot neurons there; layers: whole layers; auto: the fastest that is exact (default)",
    )  # fmt: skip
    group.add_argument("-ngl", "--gpu-layers", type=whole, metavar="N", help="the last N layers whole on the GPU")
    group.add_argument(
        "--executor", choices=("graph", "stream"), default="graph",
        help="graph: one launch per token; stream: the host looks at every layer, slower and simpler (default graph)",
    )  # fmt: skip
    group.add_argument(
        "--trace", metavar="FILE",
        help="write a timeline of the first 200 tokens and blocks of prompts on GPU and CPU, for ui.perfetto.dev",
    )  # fmt: skip


def gpu_options(args: argparse.Namespace, place: Place | None = None) -> GpuOptions:
    """What was typed. Raises HotcoldError for options that contradict each other."""
    from hotcold.runtime.gpu.choose import GpuOptions

    wanted, size = args.gpu, args.vram_budget
    if size == "auto":
        wanted, size = wanted or "auto", None
    return GpuOptions(wanted, size, args.gpu_plan, args.gpu_layers, args.executor, args.trace, place=place)


def budget(text: str) -> int | str:
    """8GiB, 1.5GB, 8000MB, 8589934592 -> bytes; auto as it is."""
    if text == "auto":
        return text
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s?([A-Za-z]{0,3})", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or not 1 <= float(match[1]) * unit <= 1 << 48:
        raise argparse.ArgumentTypeError(f"must be a size such as 8GiB, 8000MB or bytes, or auto, got {_shown(text)}")
    return int(float(match[1]) * unit)


def _from(text: str, low: int) -> int:
    if not re.fullmatch(r"[0-9]{1,15}", text) or int(text) < low:
        raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {10**15 - 1}, got {_shown(text)}")
    return int(text)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")
