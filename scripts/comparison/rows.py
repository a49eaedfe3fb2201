"""What the rounds amount to: medians, ratios, what a CPU second and the memory gave.

In: Session, Settings, Twins. Out: dictionaries that JSON can hold. Next: report.py, plot.py.
"""

from __future__ import annotations

import statistics
from typing import Any

from comparison.settings import Settings
from comparison.speed import STOCK_NAMES, Round, Session
from comparison.twins import Twins, dense_bytes


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def best_stock(rounds: list[Round], test: str) -> str | None:
    """Which of llama.cpp's two ways counts: the one with the higher median."""
    found = {}
    for name in STOCK_NAMES:
        values = [this.speeds[name][test] for this in rounds if test in this.speeds.get(name, {})]
        if values:
            found[name] = statistics.median(values)
    return max(found, key=lambda name: found[name]) if found else None


def speed_rows(session: Session, settings: Settings) -> list[dict[str, Any]]:
    """One row per test and mode, over the clean rounds."""
    rows = []
    for test in settings.tests:
        for mode in settings.modes:
            good = session.clean(settings.noise, mode)
            who = best_stock(good, test)
            ours = [this.speeds[mode][test] for this in good]
            stock = [this.speeds[who][test] for this in good] if who else []
            ratios = [a / b for a, b in zip(ours, stock, strict=True)] if who else []
            pairs = session.clean(settings.noise, mode, "dense") if "dense" in settings.modes else []
            to_dense = [this.speeds[mode][test] / this.speeds["dense"][test] for this in pairs if mode != "dense"]
            rows.append({
                "threads": session.threads, "test": test, "mode": mode, "ours": ours, "stock": stock,
                "stock_is": who, "ratio": ratios, "ratio_median": median(ratios), "to_dense": to_dense,
                "to_dense_median": median(to_dense), "clean": f"{len(good)}/{len(session.rounds)}",
            })  # fmt: skip
    return rows


def use_rows(session: Session, settings: Settings, twins: Twins) -> list[dict[str, Any]]:
    """One row per test and who ran it: what it took of the CPU and of the memory, over the rounds clean for it."""
    bandwidths = [this.bandwidth for this in session.rounds if this.bandwidth]
    bandwidth = median(bandwidths)
    context = settings.depth + (settings.gen_tokens + 1) / 2
    stock_bytes = dense_bytes(twins.stock, settings.kv_type, context) if twins.stock else None
    rows = []
    for test in settings.tests:
        names = [name for name in (*STOCK_NAMES, *settings.modes) if name in session.start_s]
        for name in names:
            good = [r for r in session.clean(settings.noise, name) if test in r.speeds.get(name, {})]
            if not good:
                continue
            last = good[-1].lines[name][test]
            speed = statistics.median([this.speeds[name][test] for this in good])
            n_bytes = None
            if test.startswith("tg"):
                n_bytes = stock_bytes if name in STOCK_NAMES else last["bytes_per_token"]
            per_cpu = [x for this in good if (x := tokens_per_cpu_second(this, name, test, settings)) is not None]
            rows.append({
                "threads": session.threads, "test": test, "who": name, "speed": speed, "cpu_speed": median(per_cpu),
                "bytes_per_token": n_bytes, "bandwidth": bandwidth, "bandwidths": bandwidths,
                "bandwidth_share": n_bytes * speed / bandwidth if n_bytes and bandwidth else None,
                "rss_mb": max(this.bursts[name].peak_rss_mb for this in good), "start_s": session.start_s[name],
                "load_s": last.get("load_s"), "share_checked": last.get("share_checked"),
                "share_computed": last.get("share_computed"), "ffn_bytes_share": last.get("bytes_share"),
            })  # fmt: skip
    return rows


def tokens_per_cpu_second(this: Round, name: str, test: str, settings: Settings) -> float | None:
    """From the CPU time that a worker tells. llama-bench tells none: how many cores its process kept busy meanwhile.

    Its tests end with the generation, and with the process; before that come one token to warm up and the prompt.
    """
    line, burst, speed = this.lines[name][test], this.bursts[name], this.speeds[name][test]
    n = line["n_prompt"] or line["n_gen"]
    if "cpu_s" in line:
        return float(n / line["cpu_s"][0]) if line["cpu_s"][0] > 0 else None
    seconds, end = n / speed, burst.wall_s
    if test.startswith("pp") and settings.gen_tokens:
        if settings.depth:  # between the two the context is filled again, for an unknown time
            return None
        generation = next(s for other, s in this.speeds[name].items() if other.startswith("tg"))
        end -= (settings.gen_tokens + 1) / generation
    cores = burst.cores(end - 0.9 * seconds, end - 0.1 * seconds)
    return speed / cores if cores else None
