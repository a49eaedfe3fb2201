"""Prompt and generation speed: everybody takes turns in short bursts, disturbed bursts do not count.

In: Settings, Twins. Out: rows for the report, and every round. Next: report.py.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from typing import Any

from comparison.bursts import Burst, run_burst, wait_for_quiet
from comparison.settings import STOCK, Settings, say
from comparison.twins import Twins
from hotcold.runtime.errors import HotcoldError


@dataclass
class Round:
    """One turn of everybody: label -> burst, and label -> {"pp256": tok/s, "tg64": tok/s}."""

    bursts: dict[str, Burst] = field(default_factory=dict)
    speeds: dict[str, dict[str, float]] = field(default_factory=dict)


def stock_command(settings: Settings, twins: Twins, threads: int) -> list[str]:
    program = [str(settings.llama_bench), "-m", str(twins.stock), *token_options(settings), "-t", str(threads)]
    return [*program, "-r", "1", "-ngl", "0", "-o", "jsonl"]


def our_command(settings: Settings, twins: Twins, threads: int, mode: str) -> list[str]:
    return settings.our_worker("bench", str(twins.ours), *token_options(settings), threads=threads, mode=mode)


def token_options(settings: Settings) -> list[str]:
    """Both programs call them the same."""
    return ["-p", str(settings.prompt_tokens), "-n", str(settings.gen_tokens)]


def parse_bench(output: str) -> tuple[dict[str, float], dict[str, Any]]:
    """jsonl of llama-bench or engine_worker -> ({"pp256": tok/s, …}, the last line with everything)."""
    speeds, last = {}, {}
    for line in output.splitlines():
        if line.startswith("{"):
            last = json.loads(line)
            test = f"pp{last['n_prompt']}" if last["n_prompt"] else f"tg{last['n_gen']}"
            speeds[test] = last["samples_ts"][0]
    return speeds, last


def ready_players(settings: Settings, twins: Twins, threads: int) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Label -> (command, environment) of everybody who can run. Raises HotcoldError if one of ours cannot.

    The first run is outside the measurement: kernels compile once per machine, and the files come into memory.
    """
    players: dict[str, tuple[list[str], dict[str, str]]] = {}
    if settings.llama_bench:
        players[STOCK] = (stock_command(settings, twins, threads), {"OMP_PROC_BIND": "true"})
    for mode in settings.modes:
        players[mode] = (our_command(settings, twins, threads, mode), {})
    for name, (command, env) in list(players.items()):
        first = run_burst(command, env, timeout=settings.timeout)
        if first.status == 0:
            continue
        failure = f"{name} with {threads} threads failed ({first.errors or first.status}): {first.command}"
        if name != STOCK:
            raise HotcoldError(failure)
        say(failure)
        settings.notes.append(f"llama-bench failed, so only our speed was measured. {failure}")
        del players[STOCK]
    return players


def compare_speed(settings: Settings, twins: Twins, threads: int) -> tuple[list[Round], dict[str, Any]]:
    """Rounds of bursts until every mode has `reps` clean ones, or three times as many rounds have passed."""
    players = ready_players(settings, twins, threads)
    rounds: list[Round] = []
    seen: dict[str, Any] = {}
    while len(rounds) < 3 * settings.reps and clean_everywhere(rounds, settings) < settings.reps:
        this = Round()
        names = list(players) if len(rounds) % 2 == 0 else list(players)[::-1]
        for name in names:
            wait_for_quiet(settings.noise, settings.wait)
            command, env = players[name]
            burst = run_burst(command, env, timeout=settings.timeout)
            this.bursts[name] = burst
            if burst.status:
                say(f"{name}: ended with status {burst.status}: {burst.errors}")
            this.speeds[name], line = parse_bench(burst.output) if burst.status == 0 else ({}, {})
            seen[name] = line or seen.get(name, {})
            flag = "  (others were busy)" if burst.others > settings.noise else ""
            figures = "  ".join(f"{test} {speed:.2f}" for test, speed in this.speeds[name].items())
            say(f"{threads} threads  round {len(rounds) + 1}  {name:10} {figures}  others {burst.others:.2f}{flag}")
        rounds.append(this)
    return rounds, seen


def clean(this: Round, mode: str, noise: float) -> bool:
    """Did this mode and llama.cpp, if it takes part, both run undisturbed?"""
    bursts = [burst for name, burst in this.bursts.items() if name in (mode, STOCK)]
    return all(burst.status == 0 and burst.others <= noise for burst in bursts)


def clean_everywhere(rounds: list[Round], settings: Settings) -> int:
    """The smallest number of clean rounds that a mode has."""
    return min(sum(clean(this, mode, settings.noise) for this in rounds) for mode in settings.modes)


def speed_rows(rounds: list[Round], seen: dict[str, Any], threads: int, settings: Settings) -> list[dict]:
    """One row per test and mode: medians over the clean rounds."""
    rows = []
    sizes = {"pp": settings.prompt_tokens, "tg": settings.gen_tokens}
    for test in [f"{kind}{n}" for kind, n in sizes.items() if n]:
        for mode in settings.modes:
            good = [r.speeds for r in rounds if clean(r, mode, settings.noise)]
            ours = [s[mode][test] for s in good]
            stock = [s[STOCK][test] for s in good if STOCK in s]
            ratios = [s[mode][test] / s[STOCK][test] for s in good if STOCK in s]
            share = seen.get(mode, {}).get("share_computed")
            rows.append({
                "threads": threads, "test": test, "mode": mode, "ours": ours, "stock": stock, "ratio": ratios,
                "ratio_median": statistics.median(ratios) if ratios else None,
                "share_computed": share if test.startswith("tg") else None,
                "clean": f"{len(good)}/{len(rounds)}",
            })  # fmt: skip
    return rows
