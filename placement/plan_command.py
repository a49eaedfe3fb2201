"""`hotcold plan`: how a model would be divided between GPU and CPU, and how fast each way is expected to be.

In: a GGUF, a budget of VRAM, a machine. Out: tables, or JSON; nothing is written or run. Next: choose.py decides,
plan_ops.py lists operators, simulate_command.py replays tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hotcold.placement.budget import (
    AUTO,
    DEFAULT_N_CTX,
    add_context_argument,
    add_hardware_argument,
    add_plan_argument,
    parse_size,
    placement_table,
)
from hotcold.placement.choose import Candidate, Choice, choose_placement
from hotcold.placement.hardware import PRESETS, Hardware, load_hardware
from hotcold.placement.memory import engine_vram
from hotcold.placement.plan_vram import CPU_ONLY, Placement
from hotcold.runtime.arguments import count
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.console import emit
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import GGUFFile, open_gguf, safe_text
from hotcold.runtime.inspect import format_bytes
from hotcold.runtime.plan import SPARSITY_MODES
from hotcold.runtime.weights import load_weights

if TYPE_CHECKING:
    from hotcold.placement.plan_ops import OpLine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `hotcold plan`."""
    from hotcold.placement.simulate_command import add_simulation_arguments

    parser.add_argument("model", metavar="MODEL", type=Path, help="GGUF file")
    parser.add_argument(
        "--vram-budget", type=_budget, action="append", metavar="SIZE",
        help="VRAM to use, such as 8GiB or 8000MB; auto: all that is free on this machine's card, or all that the card "
             "of --hardware has (default); may be repeated with --simulate",
    )  # fmt: skip
    add_context_argument(parser)
    add_hardware_argument(parser)
    add_plan_argument(parser)
    parser.add_argument("-ngl", "--gpu-layers", type=count, metavar="N",
                        help="exactly so many of the last layers on the GPU (plan layers, unless --gpu-plan says); "
                             "more than the model has: all")
    parser.add_argument("--sparsity", choices=SPARSITY_MODES, default=AUTO,
                        help="as in hotcold run; predict: plans that are not exact may be chosen (default auto)")
    parser.add_argument("--ops", action="store_true", help="also the operators of a token, of one layer of each kind")
    parser.add_argument("--all-ops", action="store_true", help="the same, of all layers")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_simulation_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Plan as the arguments say; returns the exit status. Raises HotcoldError with one line for the user."""
    from hotcold.placement.simulate_command import check_simulation_arguments, run_simulation

    check_simulation_arguments(args)
    if not args.model.exists():
        raise HotcoldError(f"{safe_text(str(args.model))}: no such file")
    with open_gguf(args.model) as file:
        config = ModelConfig.from_gguf(file)
        if args.simulate is not None:
            return run_simulation(args, file, config)
        if len(args.vram_budget or ()) > 1:
            args.parser.error("argument --vram-budget: only once without --simulate")
        report = make_report(args, file, config)
    if args.json:
        emit(sys.stdout, json.dumps(report.as_json(), indent=2) + "\n")
    else:
        from hotcold.placement.place import show

        show(report.tables())
    return 0


@dataclass(frozen=True)
class Report:
    """What `hotcold plan` says of a model."""

    model: str
    choice: Choice
    memory: dict[str, int]  # bytes of VRAM by kind, as the engine allocates them; their sum is what it takes
    ops: Sequence[OpLine]
    alike: dict[int, list[int]]  # a layer whose operators are listed -> all layers that have the same

    def tables(self) -> list[RenderableType]:
        p = self.choice.placement
        out: list[RenderableType] = [plans_table(self.choice)]
        head = [Text(f"chosen         {self.choice.why}", style="bold")]
        out += head + [placement_table(dataclasses.replace(p, notes=self.choice.notes))]
        if self.memory:
            out.append(memory_table(self.memory, p.budget))
        if self.ops:
            from hotcold.placement.plan_ops import ops_table

            names = [f"layer {first}: as {_ranges(layers)}" for first, layers in self.alike.items() if len(layers) > 1]
            out += [ops_table(self.ops), *map(Text, names)]
        return out

    def as_json(self) -> dict[str, Any]:
        p = self.choice.placement
        layers = [
            {"layer": n, "on_gpu": p.layer_on_gpu[n], "hot": p.hot[n], "neurons": p.n_ff[n],
             "keys_on_gpu": p.keys_on_gpu[n], "activations_on_gpu": p.share[n], "bytes": p.gpu_bytes[n],
             "gpu_us": 1e6 * p.t_gpu[n], "cpu_us": 1e6 * p.t_cpu[n], "us": 1e6 * p.t_layer[n], "waits": p.p_cold[n]}
            for n in range(len(p.hot))
        ]  # fmt: skip
        out = {
            "model": self.model, "hardware": dataclasses.asdict(p.hardware), "budget": p.budget, "n_ctx": p.n_ctx,
            "chosen": p.kind, "sparsity": p.sparsity, "why": self.choice.why, "notes": list(self.choice.notes),
            "used": p.used, "memory": self.memory, "ram": p.ram, "tokens_per_second": p.tokens_per_second,
            "plans": [_as_json(c) for c in self.choice.candidates], "layers": layers,
        }  # fmt: skip
        return out | ({"operators": [dataclasses.asdict(op) for op in self.ops]} if self.ops else {})


def make_report(args: argparse.Namespace, file: GGUFFile, config: ModelConfig) -> Report:
    hardware, free = hardware_of(args.hardware)
    wanted = (args.vram_budget or [AUTO])[0]
    budget = free if wanted == AUTO else wanted
    n_ctx = args.n_ctx or min(config.n_ctx_train, DEFAULT_N_CTX)
    n_layers = None if args.gpu_layers is None else min(args.gpu_layers, config.n_layer)
    choice = choose_placement(file, config, budget, n_ctx, hardware, args.gpu_plan, sparsity=args.sparsity,
                              n_layers=n_layers, every=True)  # fmt: skip
    lines: Sequence[OpLine] = ()
    alike: dict[int, list[int]] = {}
    if args.ops or args.all_ops:
        from hotcold.placement.plan_model import read_model
        from hotcold.placement.plan_ops import one_of_each, op_lines, plan_of

        plan = plan_of(file, config, choice.placement)
        lines = op_lines(plan, read_model(file, config, n_ctx), choice.placement)
        if not args.all_ops:
            lines, alike = one_of_each(lines)
    return Report(safe_text(str(args.model)), choice, _by_kind(file, config, choice.placement), lines, alike)


def _by_kind(file: GGUFFile, config: ModelConfig, p: Placement) -> dict[str, int]:
    """Bytes of VRAM that the engine allocates; their sum is p.used."""
    if p.kind == CPU_ONLY:
        return {}
    found = engine_vram(config, load_weights(file, config), p.for_engine, p.sparsity, p.hardware.gpu_context)
    if found is None:
        return {}
    kinds = {kind: n_bytes for kind, n_bytes in found.by_kind.items() if n_bytes}
    pages = found.weights + found.state - sum(kinds.values())
    return {"driver": found.context, **kinds, "whole pages": pages}


def hardware_of(text: str | None) -> tuple[Hardware, int]:
    """-> figures of the machine named, or of this one; bytes of VRAM that may be used at most.

    Raises HotcoldError where no machine is named and this one has no GPU.
    """
    if text is not None:
        hardware = load_hardware(text)
        if not hardware.has_gpu:
            raise HotcoldError(f"--hardware {safe_text(text, 80)}: has no GPU; presets with one are "
                               f"{', '.join(PRESETS)}")  # fmt: skip
        return hardware, hardware.vram
    from hotcold.runtime.gpu.device import DeviceUnavailable, open_device

    try:
        device = open_device()
    except DeviceUnavailable as e:
        raise HotcoldError(f"no GPU to plan for ({e.reason}): name a card with --hardware: {', '.join(PRESETS)}, or a "
                           "file") from None
    from hotcold.placement.machine import machine_hardware
    from hotcold.runtime.gpu.source import load_kernels

    try:
        load_kernels(device)  # so that their code counts, as when a model runs
        hardware = dataclasses.replace(machine_hardware(), gpu_context=device.context_bytes)
        return hardware, min(hardware.vram, device.memory()[0] + device.context_bytes)
    finally:
        device.close()


# ---- tables


def plans_table(choice: Choice) -> RenderableType:
    """The plans side by side; a star before the one that is taken."""
    p = choice.placement
    title = (f"Plans for {format_bytes(p.budget)} of VRAM ({p.budget} bytes), context {p.n_ctx}, on "
             f"{safe_text(p.hardware.name, 80)}")  # fmt: skip
    table = Table(title=Text(title), title_justify="left", title_style="bold", header_style="bold", box=None,
                  pad_edge=False)  # fmt: skip
    for heading in ("plan", "tokens/s", "mode", "VRAM", "layers on GPU", "activations on GPU", "waits per token", ""):
        right = heading in ("tokens/s", "VRAM", "layers on GPU", "activations on GPU", "waits per token")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for c in choice.candidates or (Candidate(p.kind, p),):
        mark = "* " if c.placement is not None and c.kind == p.kind else "  "
        if c.placement is None:
            table.add_row(mark + c.kind, "-", "", "", "", "", "", Text(c.reason))
            continue
        table.add_row(mark + c.kind, *_cells(c.placement), Text("; ".join(c.placement.notes)))
    return table


def _cells(p: Placement) -> list[str]:
    load = f"{p.load:.1%}" if p.kind != CPU_ONLY else ""
    return [f"{p.tokens_per_second:.1f}", p.sparsity, format_bytes(p.used), f"{p.n_on_gpu} of {len(p.hot)}", load,
            f"{sum(p.p_cold):.1f}"]  # fmt: skip


def memory_table(memory: dict[str, int], budget: int) -> RenderableType:
    table = Table(title=Text("VRAM by kind"), title_justify="left", title_style="bold", show_header=False, box=None,
                  pad_edge=False)  # fmt: skip
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_column(justify="right")
    total = sum(memory.values())
    for kind, n_bytes in [*memory.items(), ("total", total), ("left of the budget", budget - total)]:
        table.add_row(kind, format_bytes(n_bytes), str(n_bytes))
    return table


def _as_json(c: Candidate) -> dict[str, Any]:
    if c.placement is None:
        return {"plan": c.kind, "reason": c.reason}
    p = c.placement
    return {"plan": c.kind, "sparsity": p.sparsity, "tokens_per_second": p.tokens_per_second, "used": p.used,
            "ram": p.ram, "layers_on_gpu": p.n_on_gpu, "activations_on_gpu": p.load, "waits_per_token": sum(p.p_cold),
            "notes": list(p.notes)}  # fmt: skip


def _ranges(numbers: Sequence[int]) -> str:
    """3, 4, 5, 9 -> "3 to 5, 9"."""
    out: list[list[int]] = []
    for n in numbers:
        if out and n == out[-1][-1] + 1:
            out[-1].append(n)
        else:
            out.append([n])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in out)


def _budget(text: str) -> int | str:
    return AUTO if text == AUTO else parse_size(text)
