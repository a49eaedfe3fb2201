"""`hotcold plan MODEL --simulate CARD`: tokens per second of all plans over budgets, by replaying activations.

In: a GGUF, cards, activations (recorded now, from a file, or drawn from counts). Out: a table per card, or JSON. Next:
nothing; simulate.py has the model of time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hotcold.placement.activations import MAX_TOKENS, Activations, draw, load_activations, record, save_activations
from hotcold.placement.budget import AUTO, DEFAULT_N_CTX
from hotcold.placement.choose import candidates
from hotcold.placement.hardware import PRESETS, Hardware, load_hardware
from hotcold.placement.plan_model import PlanModel, read_model
from hotcold.placement.plan_vram import CPU_ONLY, Placement, plan
from hotcold.placement.simulate import Replay, replay
from hotcold.runtime.arguments import count
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.console import emit, note
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import GGUFFile, safe_text
from hotcold.runtime.gpu.placement import KINDS
from hotcold.runtime.inspect import format_bytes

TOKENS = 256
LLAMA_CPP = "llama.cpp"
_OPTIONS = ("trace_text", "trace", "save_trace", "tokens", "profile")
_BUDGETS = 4  # rows of a table, where none are asked for


def add_simulation_arguments(parser: argparse.ArgumentParser) -> None:
    """--simulate and what belongs to it."""
    group = parser.add_argument_group("simulation")
    group.add_argument(
        "--simulate", metavar="CARD[,CARD...]", type=_cards,
        help="replay tokens through the timing model for these machines and compare all plans, and llama.cpp's split "
             f"by layers: {', '.join(PRESETS)}, or JSON files as for --hardware. Nothing runs on a GPU",
    )  # fmt: skip
    source = group.add_mutually_exclusive_group()
    source.add_argument("--trace-text", metavar="FILE", type=Path, action="append",
                        help="text whose tokens are replayed (default: one that comes with hotcold; may be repeated)")
    source.add_argument("--trace", metavar="FILE", type=Path, help="replay what --save-trace kept (.npz)")
    group.add_argument("--save-trace", metavar="FILE", type=Path, help="keep which neurons fired (.npz)")
    group.add_argument("--tokens", metavar="N", type=count, help=f"tokens to replay (default {TOKENS})")
    source.add_argument("--profile", metavar="P", type=Path,
                        help="draw tokens instead of reading a text: from this profile's counts, and how often neurons "
                             "fire twice in a row")  # fmt: skip


def check_simulation_arguments(args: argparse.Namespace) -> None:
    """Ends the program where options do not go together."""
    given = [f"--{name.replace('_', '-')}" for name in _OPTIONS if getattr(args, name) is not None]
    if args.simulate is None and given:
        args.parser.error(f"{given[0]} is for --simulate")
    if args.simulate is not None:
        for name in ("hardware", "ops", "all_ops", "gpu_layers"):
            if getattr(args, name) not in (None, False):
                args.parser.error(f"--{name.replace('_', '-')} is not for --simulate, which compares all plans")
        if args.gpu_plan != AUTO or args.sparsity != AUTO:
            args.parser.error("--gpu-plan and --sparsity are not for --simulate, which compares all plans")
        if args.trace is not None and args.save_trace is not None:
            args.parser.error("--save-trace keeps what is recorded now: not with --trace")


@dataclass(frozen=True)
class Row:
    """One budget: what each plan does with it."""

    budget: int
    plans: dict[str, Replay | None]  # KINDS, CPU_ONLY and LLAMA_CPP; None: it does not fit, or the model cannot

    def speed(self, kind: str) -> float:
        """Tokens per second; 0 where there is none."""
        found = self.plans[kind]
        return 0.0 if found is None else found.tokens_per_second

    @property
    def best(self) -> str:
        """The fastest plan that is exact."""
        return max((kind for kind in (*KINDS, CPU_ONLY) if kind != "predict"), key=self.speed)


def simulate(
    model: PlanModel, hardware: Hardware, budgets: Sequence[int], activations: Activations, time_limit: float = 2.0
) -> list[Row]:  # fmt: skip
    """Solve every plan for every budget and replay the tokens. Budgets above the card are left out."""
    tables: list[tuple[int, dict[str, Placement | None]]] = []
    for budget in dict.fromkeys(budgets):
        if budget > hardware.vram:
            continue
        found = candidates(model, hardware, budget, every=True, time_limit=time_limit)
        placements = {c.kind: c.placement for c in found}
        tables.append((budget, placements | {LLAMA_CPP: split_of_llama_cpp(model, hardware, budget)}))
    flat = [p for _, placements in tables for p in placements.values() if p is not None]
    replays = dict(zip(map(id, flat), replay(model, flat, activations), strict=True))
    return [Row(budget, {kind: None if p is None else replays[id(p)] for kind, p in placements.items()})
            for budget, placements in tables]  # fmt: skip


def split_of_llama_cpp(model: PlanModel, hardware: Hardware, budget: int) -> Placement | None:
    """-ngl of as many layers as fit (the output head counts as one), every neuron computed; else the CPU alone."""
    for kind in ("layers", CPU_ONLY):
        try:
            return plan(model, hardware, budget, kind, "dense")
        except HotcoldError:
            continue
    return None


def default_budgets(model: PlanModel, hardware: Hardware) -> list[int]:
    """Evenly from what holds no layer to what holds all, or to the card's end."""
    base = hardware.gpu_context + model.sizes.workspace + model.sizes.head
    whole = base + sum(layer.fixed + layer.ffn for layer in model.sizes.layers)
    end = min(whole, hardware.vram)
    steps = [base + (end - base) * k // _BUDGETS for k in range(1, _BUDGETS)] if end > base else []
    return [-(-b >> 20) << 20 if b < end else b for b in [*steps, end]]


# ---- the command


def run_simulation(args: argparse.Namespace, file: GGUFFile, config: ModelConfig) -> int:
    """Simulate as the arguments say; returns the exit status."""
    n_ctx = args.n_ctx or min(config.n_ctx_train, DEFAULT_N_CTX)
    cards = [load_hardware(card, "--simulate") for card in args.simulate]
    for card, hardware in zip(args.simulate, cards, strict=True):
        if not hardware.has_gpu:
            raise HotcoldError(f"--simulate {safe_text(card, 80)}: has no GPU; presets with one are "
                               f"{', '.join(PRESETS)}")  # fmt: skip
    model = read_model(file, config, n_ctx)
    activations = _activations(args, file, config, model)
    results = []
    for hardware in cards:
        wanted = [hardware.vram if b == AUTO else b for b in args.vram_budget or ()]
        for budget in wanted:
            if budget > hardware.vram:
                note(f"--vram-budget {format_bytes(budget)}: left out, more than the {format_bytes(hardware.vram)} of "
                     f"{safe_text(hardware.name, 80)}")  # fmt: skip
        results.append((hardware, simulate(model, hardware, wanted or default_budgets(model, hardware), activations)))
    if args.json:
        emit(sys.stdout, json.dumps(_as_json(args, n_ctx, activations, results), indent=2) + "\n")
        return 0
    from hotcold.placement.place import show

    lines = [f"Simulated, not measured: {activations.source}, context {n_ctx}, half full. Tokens per second.",
             *(f"note: {text}" for text in model.notes)]  # fmt: skip
    show([Text("\n".join(lines)), *(simulation_table(hardware, rows) for hardware, rows in results)])
    return 0


def simulation_table(hardware: Hardware, rows: Sequence[Row]) -> RenderableType:
    """One row per budget."""
    title = Text(safe_text(hardware.name, 100))
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    headings = ("VRAM", *KINDS, CPU_ONLY, LLAMA_CPP, "-ngl", "best exact", "times llama.cpp", "CPU skips", "GPU busy",
                "CPU busy")  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = [f"{row.speed(kind):.1f}" if row.plans[kind] is not None else "-"
                 for kind in (*KINDS, CPU_ONLY, LLAMA_CPP)]  # fmt: skip
        split, best = row.plans[LLAMA_CPP], row.plans[row.best]
        n_gpu = split.placement.n_on_gpu if split is not None else 0
        more = ["-"] * 4
        if best is not None:
            total = float(best.seconds.sum())
            ratio = f"{row.speed(row.best) / row.speed(LLAMA_CPP):.2f}" if split is not None else "-"
            more = [ratio, f"{best.skipped:.1%}" if best.shared else "-", f"{best.gpu.sum() / total:.0%}",
                    f"{best.cpu.sum() / total:.0%}"]  # fmt: skip
        table.add_row(format_bytes(row.budget), *cells, str(n_gpu + bool(n_gpu)), row.best, *more)
    return table


def _as_json(
    args: argparse.Namespace, n_ctx: int, activations: Activations, results: Sequence[tuple[Hardware, list[Row]]]
) -> dict[str, Any]:  # fmt: skip
    def one(found: Replay) -> dict[str, Any]:
        p = found.placement
        return {"tokens_per_second": found.tokens_per_second, "expected": p.tokens_per_second, "used": p.used,
                "sparsity": p.sparsity, "layers_on_gpu": p.n_on_gpu, "skipped": found.skipped,
                "waits_per_token": float(found.waits.mean()), "gpu_seconds": float(found.gpu.mean()),
                "cpu_seconds": float(found.cpu.mean())}  # fmt: skip

    return {
        "model": safe_text(str(args.model)), "n_ctx": n_ctx, "activations": activations.source,
        "measured": activations.measured, "tokens": activations.n_tokens,
        "cards": [{"hardware": hardware.name, "budgets": [
            {"budget": row.budget, "best": row.best,
             "plans": {kind: one(found) for kind, found in row.plans.items() if found is not None}} for row in rows]}
            for hardware, rows in results],
    }  # fmt: skip


def _activations(args: argparse.Namespace, file: GGUFFile, config: ModelConfig, model: PlanModel) -> Activations:
    """Recorded before, recorded now, or drawn: the latter where nothing fires differently, or the model is too big."""
    tokens = min(args.tokens or TOKENS, MAX_TOKENS)
    if args.trace is not None:
        found = load_activations(args.trace, file, config)
        if args.tokens is not None and args.tokens > found.n_tokens:
            note(f"--tokens {args.tokens}: {safe_text(str(args.trace))} holds {found.n_tokens}, all are replayed")
        return found if args.tokens is None else _first(found, args.tokens)
    if args.save_trace is not None and args.save_trace.exists():
        raise HotcoldError(f"{safe_text(str(args.save_trace))}: exists already: choose another name, or replay it with "
                           "--trace")  # fmt: skip
    if args.save_trace is not None and not args.save_trace.parent.is_dir():
        raise HotcoldError(f"{safe_text(str(args.save_trace.parent))}: no such folder")  # not only after the recording
    too_big = file.size > psutil.virtual_memory().available
    if not model.fires or args.profile is not None or too_big and args.trace_text is None:
        found = _drawn(args, file, config, model, tokens, too_big)
    else:
        from hotcold.placement.profiling import progress_bar
        from hotcold.runtime.corpus import read_corpus

        corpus = read_corpus(args.trace_text or ())
        with progress_bar("recording") as progress:
            found = record(args.model, corpus, tokens, progress=progress)
    if args.save_trace is not None:
        save_activations(args.save_trace, found, file, config, force=False)
        note(f"wrote {args.save_trace} ({args.save_trace.stat().st_size / 1e6:.1f} MB)")
    return found


def _drawn(
    args: argparse.Namespace, file: GGUFFile, config: ModelConfig, model: PlanModel, tokens: int, too_big: bool
) -> Activations:  # fmt: skip
    if not model.fires:
        return draw(model.frequency, None, min(tokens, 1), "every neuron computed on every token")
    if args.profile is None:
        why = f"the file ({format_bytes(file.size)}) is larger than the memory that is free; " if too_big else ""
        return draw(model.frequency, None, tokens, f"{why}{tokens} tokens drawn from the file's counts, each by itself")
    from hotcold.placement.counting import source_positions
    from hotcold.placement.profile import check_profile, load_profile

    profile = load_profile(args.profile)
    check_profile(profile, file, config)
    order = source_positions(file, config)
    frequency = [profile.frequency(layer)[ids] for layer, ids in enumerate(order)]
    # Of a neuron's firings with a next token, the share after which it fires again.
    with_next = profile.n_pairs / max(1, profile.n_tokens)
    again = [np.divide(pairs[ids], fired[ids] * with_next, out=np.zeros(len(ids)), where=fired[ids] > 0)
             for pairs, fired, ids in zip(profile.pairs, profile.fired, order, strict=True)]  # fmt: skip
    name = safe_text(str(args.profile.name), 60)
    return draw(frequency, again, tokens, f"{tokens} tokens drawn from the counts and pairs of {name}")


def _first(activations: Activations, tokens: int) -> Activations:
    fired = tuple(f[:tokens] for f in activations.fired)
    return Activations(fired, activations.n_ff, activations.source, activations.measured)


def _cards(text: str) -> list[str]:
    cards = [part.strip() for part in text.split(",")]
    if not all(cards):
        raise argparse.ArgumentTypeError("must be names of machines with commas between them")
    return cards
