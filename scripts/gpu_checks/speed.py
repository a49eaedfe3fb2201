"""Part 5: tokens per second of the four plans over budgets of VRAM, and of llama.cpp under the same budgets.

In: the model that was made or named. Out: an item per burst: who, budget, speeds. Next: report.py takes medians.

Everybody takes turns, each in a process of its own, first forwards, then backwards, until the time is over. A budget
counts all that a process takes of the card, the driver's part too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from comparison.bursts import run_burst
from comparison.settings import STOCK

from gpu_checks import burst, llama
from gpu_checks.boxed import child_env
from gpu_checks.child import Item, Payload
from gpu_checks.settings import Settings
from gpu_checks.vram import Meter
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gpu.placement import KINDS
from hotcold.runtime.inspect import format_bytes
from hotcold.runtime.threads import default_threads

SHARES = (0.5, 1.0, 0.25, 0.75)  # budgets, from one layer to the whole model; the one that tells most first
RESERVE = 128 << 20  # bytes of VRAM that others may take
BURST_S = 120.0  # of one process
SEARCH_S = 480.0  # for the layers of llama.cpp that fit: up to ten such processes
WHOLE, SHARED, NONE = ("all", "predict"), ("keys", "predict", "layers"), (burst.CPU, burst.CPU_PREDICT)


class Bench:
    """What is found is kept in a file: another process goes on from there, if it is about the same."""

    def __init__(self, settings: Settings) -> None:
        s = self.settings = settings
        self.file, about = s.out / "speed-state.json", [s.model, s.stock, s.llama_bench, s.prompt, s.gen]
        kept: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.state: dict[str, Any] = kept if kept.get("about") == about else {"about": about}
        self.threads = settings.threads or default_threads()
        try:
            self.meter: Meter | None = None if settings.sim else Meter()
        except OSError:
            self.meter = None

    def keep(self, **found: Any) -> None:
        """Whole at any time: this process may be ended while it writes."""
        self.state |= found
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(self.state))
        part.replace(self.file)

    def ask(self, who: str, budget: int = 0) -> dict[str, Any]:
        """Run a burst of ours. Raises HotcoldError with its last line where it fails."""
        s = self.settings
        request = {"who": who, "budget": budget, "model": s.model, "threads": self.threads, "prompt": s.prompt,
                   "gen": s.gen, "hardware": self.state.get("hardware")}  # fmt: skip
        command = [burst.sys.executable, "-m", "gpu_checks.burst", json.dumps(request), s.to_json()]
        if self.meter is None:
            done, taken = run_burst(command, child_env(), timeout=BURST_S), {}
        else:
            before = self.meter.read()
            with self.meter.watch() as seen:
                done = run_burst(command, child_env(), timeout=BURST_S)
            taken = {"vram": seen.value - before}
        if done.status:
            raise HotcoldError((done.errors.splitlines() or [f"ended with status {done.status}"])[-1])
        found: dict[str, Any] = json.loads(done.output.strip().splitlines()[-1])
        return found | taken | {"others": done.others}


def items(settings: Settings) -> Iterator[Item]:
    bench = Bench(settings)
    yield Item("model and machine", lambda: facts(bench), always=True)
    if "budgets" not in bench.state:
        return
    budgets: list[int] = bench.state["budgets"]
    for number in range(1, settings.rounds + 1):
        turns = [(budget, who) for budget in [*budgets, 0] for who in players(bench, budget)]
        for budget, who in turns if number % 2 else turns[::-1]:
            if who == STOCK and budget and number == 1:  # a long search costs none of ours its turn before
                search = partial(layers_of, bench, budget)
                yield Item(f"layers of {STOCK} in {size(budget)}", search, always=True, patience=SEARCH_S)
            yield Item(f"round {number}, {size(budget)}: {who}", partial(turn, bench, number, budget, who))


def size(budget: int) -> str:
    return format_bytes(budget) if budget else "no VRAM"


def facts(bench: Bench) -> Payload:
    found = bench.ask("facts")
    whole, least = found["whole"], found["least"]
    budgets = bench.settings.budgets or tuple(int(least + share * (whole - least)) for share in SHARES)
    if bench.settings.sim:  # a tiny model is smaller than the buffers
        budgets = (2 * whole,)
    room = found["free"] + found["context"] - RESERVE
    fit = [budget for budget in budgets if least < budget <= room]
    known = {layers: taken for layers, taken in bench.state.get("needed", {}).items() if math.isfinite(taken)}
    bench.keep(budgets=fit, layers={}, needed=known, **found)  # what an earlier run could not find is tried again
    out = [size(budget) for budget in budgets if budget not in fit]
    note = f"the whole model takes {size(whole)} of VRAM" + f"; no room for {', '.join(out)}" * bool(out)
    hardware = found["hardware"]
    return {"ok": None, "note": note, "model": Path(bench.settings.model).name, "budgets": fit, "whole": whole,
            "made": bench.settings.made,
            "n_layer": found["n_layer"], "threads": bench.threads, "hardware": hardware}  # fmt: skip


def players(bench: Bench, budget: int) -> Sequence[str]:
    if not budget:
        ours: tuple[str, ...] = NONE
    elif bench.settings.sim:
        ours = KINDS
    else:
        ours = WHOLE if budget >= bench.state["whole"] else SHARED
    return (*ours, STOCK) if bench.settings.llama_bench else ours


def turn(bench: Bench, number: int, budget: int, who: str) -> Payload:
    s, more = bench.settings, {}
    try:
        if who == STOCK:
            layers = bench.state.get("layers", {}).get(str(budget)) if budget else 0
            if layers is None:
                raise HotcoldError("how many layers fit was not found")
            found = llama.bench(s.llama_bench, s.stock, layers, bench.threads, s.prompt, s.gen, burst.SAMPLES,
                                bench.meter, BURST_S)  # fmt: skip
            more["layers"] = layers
        else:
            found = bench.ask(who, budget)
    except HotcoldError as error:
        return {"ok": None, "note": f"not measured: {error}", "round": number, "budget": budget, "who": who}
    pp, tg = (max(found[test], default=0.0) for test in ("pp", "tg"))
    over = found.get("vram") is not None and budget and found["vram"] > budget
    note = f"prompt {pp:.1f}, decode {tg:.2f} tokens/s" + f"; took {size(found['vram'])}" * bool(over)
    return {"ok": None if who == STOCK or not over else False, "note": note, "round": number, "budget": budget,
            "who": who, "over": bool(over), **found, **more}  # fmt: skip


def layers_of(bench: Bench, budget: int) -> Payload:
    """The largest -ngl whose VRAM fits, by trying."""
    s, seen = bench.settings, bench.state.setdefault("needed", {})
    if bench.meter is None:
        return {"ok": None, "note": "not found: the driver cannot be asked how much VRAM it takes"}

    def need(layers: int) -> float:
        if not layers:
            return 0.0  # runs without a GPU
        if str(layers) not in seen:
            try:
                found = llama.bench(s.llama_bench, s.stock, layers, bench.threads, s.prompt, 1, 1, bench.meter, BURST_S)
                seen[str(layers)] = found["vram"]
            except llama.TooLong:
                raise
            except HotcoldError as error:
                print(error)
                seen[str(layers)] = math.inf  # most likely out of memory
            bench.keep(needed=seen)
        return float(seen[str(layers)])

    try:
        layers = llama.largest_fitting(budget, bench.state["n_layer"] + 1, need)
    except llama.TooLong as error:
        return {"ok": None, "note": f"not found: {error}"}
    if not layers and math.isinf(need(1)):
        return {"ok": None, "note": "not found: it fails with one layer already, see speed.log"}
    bench.keep(layers=bench.state.get("layers", {}) | {str(budget): layers})
    taken = int(need(layers))
    return {"ok": None, "note": f"-ngl {layers}, takes {size(taken)}", "budget": budget, "layers": layers,
            "vram": taken}  # fmt: skip
