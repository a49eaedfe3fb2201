"""Prompt and generation speed: everybody takes turns in short bursts, disturbed bursts do not count.

In: Settings, Twins. Out: every round. Next: rows.py, which sums them up.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comparison.bursts import Burst, run_burst, wait_for_quiet
from comparison.settings import ANSWER_S, NO_REPACK, REPACK, STOCK, Settings, say, test_name
from comparison.twins import Twins
from hotcold.runtime.bandwidth import ReadTest, last_level_cache
from hotcold.runtime.errors import HotcoldError

Player = tuple[list[str], dict[str, str]]  # command, environment
STOCK_NAMES = (STOCK, NO_REPACK)
TRIAL = 64  # tokens of each test in the first run: a prompt that is computed as a long one is
BIND = {"OMP_PROC_BIND": "true"}  # threads of llama.cpp stay where they are


@dataclass
class Round:
    """One turn of everybody: label -> burst, and label -> {"pp256": tok/s, "tg64": tok/s}."""

    bursts: dict[str, Burst] = field(default_factory=dict)
    speeds: dict[str, dict[str, float]] = field(default_factory=dict)
    lines: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)  # label -> test -> all that was told
    bandwidth: float | None = None  # bytes per second of a plain read by as many threads, after the bursts


@dataclass
class Session:
    """All rounds with one number of threads, and how long each needs until its first token."""

    threads: int
    rounds: list[Round] = field(default_factory=list)
    start_s: dict[str, float] = field(default_factory=dict)  # label -> seconds of a process that computes one token
    tests: Sequence[str] = ()  # what each burst must have told

    def clean(self, noise: float, *names: str) -> list[Round]:
        """The rounds in which all of these ran undisturbed and told all tests."""
        return [this for this in self.rounds if clean(this, noise, *names, tests=self.tests)]


def clean(this: Round, noise: float, *names: str, tests: Sequence[str] = ()) -> bool:
    """Did these and llama.cpp, if it takes part, all run undisturbed, and tell a speed of each test?"""
    bursts = {name: burst for name, burst in this.bursts.items() if name in names or name in STOCK_NAMES}
    return all(burst.status == 0 and burst.others <= noise and set(tests) <= set(this.speeds.get(name, ()))
               for name, burst in bursts.items())  # fmt: skip


def stock_player(settings: Settings, twins: Twins, threads: int, label: str, options: list[str]) -> Player:
    """llama-bench, or the library where only that is there."""
    model = str(twins.stock)
    repack = ["--repack", str(int(label == STOCK))]
    if settings.llama_bench is None:
        assert settings.llama_lib is not None
        options = [*options, "--kv-type", settings.kv_type, *repack, *([] if settings.mmap else ["--no-mmap"])]
        return settings.stock_worker("bench", model, *options, threads=threads, lib=settings.llama_lib), BIND
    program = [str(settings.llama_bench), "-m", model, *options, "-t", str(threads), "-r", "1", "-ngl", "0"]
    types = ["-ctk", settings.kv_type, "-ctv", settings.kv_type] if settings.kv_type != "f16" else []
    load = ["--load-mode", "none"] if "--load-mode" in usage_of(settings.llama_bench) else ["-mmp", "0"]
    more = [*types, *(repack if has_repack(settings) else []), *([] if settings.mmap else load)]
    return [*program, *more, "-o", "jsonl"], BIND


def has_repack(settings: Settings) -> bool:
    """Whether this llama.cpp lets weights lie as they are; older ones do not."""
    return settings.llama_bench is None or "--repack" in usage_of(settings.llama_bench)


@functools.cache
def usage_of(program: Path) -> str:
    """What it says of its options, which differ between versions; "" where it says nothing."""
    try:
        done = subprocess.run([program, "--help"], capture_output=True, text=True, errors="replace", timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def our_player(settings: Settings, twins: Twins, threads: int, mode: str, options: list[str]) -> Player:
    return settings.our_bench(twins.ours, options, threads, mode), {}


def parse_bench(output: str) -> dict[str, dict[str, Any]]:
    """jsonl of a bench -> {"pp256": line, …}. Lines that are no such JSON are skipped."""
    lines = {}
    for text in output.splitlines():
        try:
            line = json.loads(text) if text.startswith("{") else {}
            kind, n = ("pp", line["n_prompt"]) if line["n_prompt"] else ("tg", line["n_gen"])
            line["samples_ts"][0]
        except (ValueError, LookupError, TypeError):
            continue
        lines[test_name(kind, n, line.get("n_depth", 0))] = line
    return lines


def ready_players(settings: Settings, twins: Twins, session: Session) -> dict[str, Player]:
    """Label -> command of everybody who can run. Raises HotcoldError if one of ours cannot.

    The first run, a short one, is outside the measurement: kernels compile once per machine, and the files come into
    memory. The second one computes a single token: how long a process takes until then.
    """
    sizes = {name: min(TRIAL, getattr(settings, name)) for name in ("prompt_tokens", "gen_tokens", "depth")}
    small = dataclasses.replace(settings, **sizes)
    makers: dict[str, Any] = {mode: our_player for mode in settings.modes}
    if twins.stock and (settings.llama_bench or settings.llama_lib):
        names = REPACK[settings.repack] if has_repack(settings) else (STOCK,)
        makers = {**{name: stock_player for name in names}, **makers}
    players: dict[str, Player] = {}
    for name, maker in makers.items():
        command, env = maker(settings, twins, session.threads, name, small.token_options)
        why, shown = try_out(command, env, small)
        if why:
            failure = f"{name} with {session.threads} threads failed ({why}): {shown}"
            if name not in STOCK_NAMES:
                raise HotcoldError(failure)
            say(failure)
            settings.notes.append(f"A run of llama.cpp failed and is left out. {failure}")
            continue
        players[name] = maker(settings, twins, session.threads, name, settings.token_options)
        one_token = ["-p", "0", "-n", "1", "-d", "0", "--no-warmup"]
        start, env = maker(settings, twins, session.threads, name, one_token)
        session.start_s[name] = run_burst(start, env, timeout=settings.timeout).wall_s
    return players


def try_out(command: list[str], env: dict[str, str], settings: Settings) -> tuple[str, str]:
    """(why it cannot be measured, "" if it can; the command as it is shown)"""
    try:
        first = run_burst(command, env, timeout=settings.timeout)
    except OSError as error:  # no program, or none for this machine
        return str(error.strerror), " ".join(command)
    missing = [test for test in settings.tests if test not in parse_bench(first.output)]
    why = f"status {first.status}" if first.status else f"no line for {', '.join(missing)}" if missing else ""
    return why and (first.errors or why), first.command


def compare_speed(settings: Settings, twins: Twins, threads: int) -> Session:
    """Rounds of bursts until every mode has `reps` clean ones, or three times as many rounds have passed."""
    session = Session(threads, tests=settings.tests)
    players = ready_players(settings, twins, session)
    memory = ReadTest(last_level_cache()) if settings.bandwidth else None
    while len(session.rounds) < 3 * settings.reps and fewest_clean(session, settings) < settings.reps:
        this = Round()
        names = list(players) if len(session.rounds) % 2 == 0 else list(players)[::-1]
        for name in names:
            wait_for_quiet(settings.noise, settings.wait)
            command, env = players[name]
            burst = run_burst(command, env, timeout=settings.timeout)
            if burst.status:
                say(f"{name}: ended with status {burst.status}: {burst.errors}")
            if burst.status and name in STOCK_NAMES:
                leave_out(session, settings, players, name, burst)
                continue
            this.bursts[name] = burst
            this.lines[name] = parse_bench(burst.output) if burst.status == 0 else {}
            this.speeds[name] = {test: line["samples_ts"][0] for test, line in this.lines[name].items()}
            flag = "  (others were busy)" if burst.others > settings.noise else ""
            figures = "  ".join(f"{test} {speed:.2f}" for test, speed in this.speeds[name].items())
            turn = f"{threads} threads  round {len(session.rounds) + 1}"
            say(f"{turn}  {name:20} {figures}  others {burst.others:.2f}{flag}")
        if memory:
            wait_for_quiet(settings.noise, settings.wait)
            this.bandwidth = memory.measure(threads)
        session.rounds.append(this)
    return session


def leave_out(session: Session, settings: Settings, players: dict[str, Player], name: str, burst: Burst) -> None:
    """One of llama.cpp's ways that fails in the full run: the others, ours above all, still count."""
    why = burst.errors or f"status {burst.status}"
    settings.notes.append(f"A run of llama.cpp failed and is left out. {name} with {session.threads} threads failed "
                          f"({why}): {burst.command}")  # fmt: skip
    del players[name]
    for this in session.rounds:
        for of in (this.bursts, this.speeds, this.lines):
            of.pop(name, None)


def fewest_clean(session: Session, settings: Settings) -> int:
    """The smallest number of clean rounds that a mode has."""
    return min(len(session.clean(settings.noise, mode)) for mode in settings.modes)
