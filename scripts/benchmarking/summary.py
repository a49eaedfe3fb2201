"""What was to be reached and what was: one line per figure that has a target.

In: results of runs.py. Out: a table, and what page.py shares with it. Next: page.py.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from comparison.report import table
from comparison.settings import STOCK, Settings

from benchmarking.figures import FIGURES, Figure

SHARES = {"f16": 0.9, "q8_0": 0.8, "q4_0": 0.8}  # wanted of the plain read, dense decoding
SPARSE_SHARE = 0.75
LINEAR_R2 = 0.99  # of the line through the points of what grows
START_S = 1.0  # to open a mapped file of 4 GB
JUDGED = re.compile(r"\| ([\d.]+) \([^|]*\) \| ≤ [\d.]+ \| (yes|no) \|")
NOT_MEASURED = "not measured"

Jobs = list[dict[str, Any]]
Results = dict[str, dict[str, Any]]  # figure -> what runs.load gives
Machines = dict[str, Results]
Values = list[tuple[float, bool]]  # what was got, and whether that reaches what was wanted
Points = list[tuple[float, float, float]]  # (size, ms per token, peak GB)


def summary(machines: Machines) -> str:
    """For each machine what was got and whether that is enough."""
    rows = []
    for figure in FIGURES:
        if figure.view in LINES:
            cells = [cell for results in machines.values() for cell in got(figure, results)]
            rows.append([figure.title, LINES[figure.view][0](figure), *cells])
    header = [cell for machine in machines for cell in (machine, "reached")]
    return table(["figure", "wanted", *header], rows) + "\n"


def got(figure: Figure, results: Results) -> tuple[str, str]:
    """Of a figure's own runs, or of those of the figures it shows in another way: (values, verdict)."""
    _, form, of = LINES[figure.view]
    jobs = jobs_of(figure, results)
    values, missing = of(jobs)
    missing += sum(len(one.jobs) for one in sources(figure)) - len(jobs)
    texts = [format(value, form) for value in sorted(value for value, _ in values)]
    return " to ".join(dict.fromkeys((texts[0], texts[-1]))) if texts else "", verdict(values, missing)


def verdict(values: Values, missing: int) -> str:
    if not values:
        return NOT_MEASURED
    good = sum(reached for _, reached in values)
    if good == len(values) and not missing:
        return "yes"
    return f"{good} of {len(values)}" + (f", {missing} {NOT_MEASURED}" if missing else "")


def sources(figure: Figure) -> list[Figure]:
    return [one for one in FIGURES if one.name in figure.source] or [figure]


def jobs_of(figure: Figure, results: Results) -> Jobs:
    """The results of its runs, in their order; of runs that it no longer has there may be more in the file."""
    return [results[one.name]["jobs"][job.key] for one in sources(figure) for job in one.jobs
            if job.key in results[one.name]["jobs"]]  # fmt: skip


# ---- what each kind of figure is judged by: (values, how many rows have none)


def ratios(jobs: Jobs, name: str) -> tuple[Values, int]:
    rows = [(row[name], job["target"]) for job in jobs for row in job["result"]["speed"]
            if name == "ratio_median" or row["mode"] != "dense"]  # fmt: skip
    found = [(value, value >= target) for value, target in rows if value is not None and target is not None]
    return found, sum(value is None for value, _ in rows)


def shares(jobs: Jobs) -> tuple[Values, int]:
    uses = [(use["bandwidth_share"], wanted_share(job, use)) for job in jobs for use in job["result"]["use"]]
    return [(share, share >= wanted) for share, wanted in uses if share is not None and wanted is not None], 0


def wanted_share(job: dict[str, Any], use: dict[str, Any]) -> float | None:
    """Of the plain read; None for llama.cpp and for types without a target."""
    if use["who"].startswith(STOCK):
        return None
    return SHARES.get(job["model"].removesuffix(".gguf").rpartition(".")[2]) if use["who"] == "dense" else SPARSE_SHARE


def was_disturbed(job: dict[str, Any]) -> bool:
    """Whether others used the machine in a run that is not a comparison, however often it was tried."""
    return bool(job.get("others", 0.0) > job.get("noise", Settings.noise))


def lines(jobs: Jobs) -> tuple[Values, int]:
    """Of points that were all measured undisturbed."""
    if any(map(was_disturbed, jobs)):
        return [], 0
    found = [r2 for points in growth(jobs).values() for *_, r2 in fits(points)]
    return [(r2, r2 >= LINEAR_R2) for r2 in found], 0


def starts(jobs: Jobs) -> tuple[Values, int]:
    mapped = [job for job in jobs if job["label"] == "mapped"]
    quiet = [job for job in mapped if not was_disturbed(job)]
    found = [line["load_s"] for job in quiet for line in job["lines"]]
    return [(seconds, seconds < START_S) for seconds in found], len(mapped) - len(quiet)


def judged(jobs: Jobs) -> tuple[Values, int]:
    """Of a text whose table ends its rows with: | times (lowest-highest) | ≤ wanted | yes or no |."""
    found = [JUDGED.findall(job["text"]) for job in jobs if not was_disturbed(job)]
    return [(float(value), verdict == "yes") for rows in found for value, verdict in rows], 0


def wanted_ratio(figure: Figure) -> str:
    return f"ratio ≥ {figure.jobs[0].target}"


LINES: dict[str, tuple[Callable[[Figure], str], str, Callable[[Jobs], tuple[Values, int]]]] = {
    "ratio": (wanted_ratio, ".2f", lambda jobs: ratios(jobs, "ratio_median")),
    "dense": (wanted_ratio, ".2f", lambda jobs: ratios(jobs, "to_dense_median")),
    "bandwidth": (lambda figure: f"≥ {min(SPARSE_SHARE, *SHARES.values()):.0%} to {max(SHARES.values()):.0%}", ".0%",
                  shares),
    "linear": (lambda figure: f"R² ≥ {LINEAR_R2}", ".4f", lines),
    "startup": (lambda figure: f"< {START_S:g} s", ".2f", starts),
    "judged": (lambda figure: "≤ 6 times the time alone", ".2f", judged),
}  # fmt: skip


# ---- growth


def growth(jobs: Jobs) -> dict[int, Points]:
    """Number of threads -> points in the order of what grows."""
    points: dict[int, Points] = {}
    for job in jobs:
        for line in job["lines"]:
            size = {"tokens": line["n_depth"], "layers": job["layers"], "neurons per layer": job["n_ff"]}[job["label"]]
            ms = statistics.median(line["samples_ns"]) / 1e6 / (line["n_gen"] or line["n_prompt"])
            points.setdefault(line["n_threads"], []).append((size, ms, line["peak_rss"] / 1e9))
    return {threads: sorted(of) for threads, of in sorted(points.items())}


def fits(points: Points) -> list[tuple[str, str, float, float, float]]:
    """(what, unit, slope, start, R²) of time and memory; none of too few points to tell."""
    if len(points) < 3:
        return []
    return [(name, unit, *fit([p[0] for p in points], [p[index] for p in points]))
            for name, index, unit in (("time", 1, "ms"), ("memory", 2, "GB"))]  # fmt: skip


def fit(x: list[float], y: list[float]) -> tuple[float, float, float]:
    """Slope, intercept and R² of the line through the points."""
    slope, start = np.polyfit(x, y, 1)
    left = np.sum((np.array(y) - (slope * np.array(x) + start)) ** 2)
    total = np.sum((np.array(y) - np.mean(y)) ** 2)
    return float(slope), float(start), float(1 - left / total) if total > 0 else 1.0
