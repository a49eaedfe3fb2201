"""Budgets of VRAM as options of a command, and the table of a placement.

In: what a user typed. Out: Placements, and what is printed of one. Next: place.py, plan_command.py.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotcold.placement.choices import OBJECTIVES
from hotcold.placement.hardware import PRESETS, load_hardware
from hotcold.placement.plan_model import MAX_N_CTX
from hotcold.placement.plan_vram import Placement, to_the_byte
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import GGUFFile, safe_text
from hotcold.runtime.inspect import format_bytes
from hotcold.runtime.weights import load_weights

DEFAULT_N_CTX = 4096
AUTO = "auto"
_MAX_BUDGET = 1 << 48
_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def placement_table(p: Placement) -> RenderableType:
    """One row per layer, then totals."""
    machine = safe_text(p.hardware.name, 80)
    title = (f"Placement for {format_bytes(p.budget)} of VRAM, context {p.n_ctx}, plan {p.kind}, {p.sparsity}, "
             f"objective {p.objective}, on {machine}")  # fmt: skip
    table = Table(header_style="bold", box=None, pad_edge=False)
    for heading in ("layer", "attention", "key rows", "hot neurons", "activations on GPU", "T GPU us", "T CPU us",
                    "T us", "waits", "on GPU", "bytes"):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for layer in range(len(p.hot)):
        keys = "GPU" if p.keys_on_gpu[layer] or p.hot[layer] == p.n_ff[layer] else "hot" if p.hot[layer] else "CPU"
        times = (p.t_gpu[layer], p.t_cpu[layer], p.t_layer[layer])
        table.add_row(str(layer), "GPU" if p.layer_on_gpu[layer] else "CPU", keys, f"{p.hot[layer]} of {p.n_ff[layer]}",
                      f"{p.share[layer]:.1%}", *(f"{t * 1e6:.1f}" for t in times), f"{p.p_cold[layer]:.0%}",
                      format_bytes(p.gpu_bytes[layer]), str(p.gpu_bytes[layer]))  # fmt: skip
    faster = p.t_token_cpu / p.t_token
    driver = f", {format_bytes(p.hardware.gpu_context)} of it the driver's" if p.used else ""
    lines = [
        f"VRAM used      {format_bytes(p.used)} of {format_bytes(p.budget)} ({p.used} of {p.budget} bytes){driver}",
        f"RAM read       {format_bytes(p.ram)} ({p.ram} bytes)",
        f"neuron load    {p.load:.1%} GPU, {1 - p.load:.1%} CPU",
        f"expected       {p.tokens_per_second:.1f} tokens/s with a context half full; all on the CPU, {p.sparsity}: "
        f"{1 / p.t_token_cpu:.1f} ({faster:.2f} times)",
        *(f"note           {note}" for note in p.notes),
    ]
    return Group(Text(title, style="bold"), table, *(Text(line) for line in lines))


def add_hardware_argument(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--hardware", metavar="FILE|PRESET",
        help=f"JSON of a machine's figures, or {', '.join(PRESETS)} (default: this machine, measured)",
    )  # fmt: skip


def add_context_argument(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--n-ctx", type=_context, metavar="N",
        help=f"tokens of context to keep room for (default: the model's, at most {DEFAULT_N_CTX})",
    )  # fmt: skip


def add_plan_argument(group: argparse._ActionsContainer) -> None:
    from hotcold.runtime.gpu.placement import KINDS

    group.add_argument(
        "--gpu-plan", choices=(AUTO, *KINDS), default=AUTO,
        help="all: everything on the GPU; keys: attention, key rows and hot neurons on the GPU, exact; predict: "
             "predictors and hot neurons on the GPU; layers: whole layers; auto: the fastest that is exact (default)",
    )  # fmt: skip


def add_budget_arguments(parser: argparse.ArgumentParser) -> None:
    """--vram-budget, --n-ctx, --hardware, --gpu-plan, --objective."""
    group = parser.add_argument_group("placement on a GPU")
    group.add_argument(
        "--vram-budget", type=parse_size, action="append", metavar="SIZE",
        help="VRAM to use, such as 8GiB, 8000MB or bytes; may be repeated",
    )  # fmt: skip
    add_context_argument(group)
    add_hardware_argument(group)
    add_plan_argument(group)
    group.add_argument(
        "--objective", choices=OBJECTIVES, default="time",
        help="time: least expected time per token (default); paper: most activations on the GPU",
    )  # fmt: skip


def placements_from_args(
    args: argparse.Namespace, file: GGUFFile, config: ModelConfig, frequency: Sequence[np.ndarray]
) -> list[Placement]:  # fmt: skip
    """One placement per budget asked for; with --hardware alone the card's whole VRAM; none without either."""
    from hotcold.placement.choose import solve_budget
    from hotcold.placement.plan_model import read_model

    if not args.vram_budget and args.hardware is None:
        if args.n_ctx is not None:
            raise HotcoldError("--n-ctx is for a placement: give --vram-budget or --hardware too")
        return []
    if args.hardware is not None:
        hardware = load_hardware(args.hardware)
    else:
        from hotcold.placement.machine import machine_hardware

        hardware = machine_hardware()
    budgets = list(dict.fromkeys(args.vram_budget or [hardware.vram]))
    model = read_model(file, config, args.n_ctx or min(config.n_ctx_train, DEFAULT_N_CTX), frequency)
    weights = load_weights(file, config)
    solved = [solve_budget(model, hardware, budget, args.gpu_plan, objective=args.objective) for budget in budgets]
    return [to_the_byte(placement, config, weights) for placement in solved]


def parse_size(text: str) -> int:
    """8GiB, 1.5GB, 8000MB, 8589934592 -> bytes."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s?([A-Za-z]{0,3})", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    value = float(match[1]) * unit if match and unit else math.nan
    if not 1 <= value <= _MAX_BUDGET or match is not None and "." in match[1] and unit == 1:
        shown = repr(text if len(text) <= 40 else text[:40] + "...")
        raise argparse.ArgumentTypeError(f"must be a size such as 8GiB, 8000MB or bytes, got {shown}")
    return int(value)


def _context(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= MAX_N_CTX:
        shown = repr(text if len(text) <= 40 else text[:40] + "...")
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {MAX_N_CTX}, got {shown}")
    return int(text)
