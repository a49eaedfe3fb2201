"""BENCHMARKS.md from the results: a table per figure, with its command, date, machine and target.

In: results of runs.py, the page as it is. Out: the page. Next: nothing.

Remarks written by hand between a figure's markers are kept.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from comparison.report import optional, spread, table
from comparison.settings import STOCK

from benchmarking.figures import FIGURES, Figure

HEAD = """\
# Benchmarks

hotcold against stock llama.cpp and against what memory allows. This page is written by `scripts/benchmarks.py --write`
from the results in `.benchmarks/`; only the remarks between the markers are by hand. Each table is measured again by

```sh
scripts/get_llama_cpp.sh                              # once
python scripts/benchmarks.py NAME --force --write     # or `all`; --list tells the names
```

Models are synthetic but for SmolLM2: real sizes, random weights, planted sparsity (`scripts/make_synthetic.py`). Speeds
are tokens per second, median (lowest-highest) of the clean rounds; everybody takes turns, rounds in which others used
the machine do not count. A ratio is the median of those of neighbours. llama.cpp runs with its weights repacked and as
they lie in the file; the faster counts.
"""
SHARES = {"f16": 0.9, "q8_0": 0.8, "q4_0": 0.8}  # wanted of the plain read, dense decoding
SPARSE_SHARE = 0.75
NOT_MEASURED = "not measured"


def write_page(results: dict[str, dict[str, Any]], old: str) -> str:
    """results: name -> what runs.load gives. `old`: the page as it is, for its remarks."""
    parts = [HEAD, summary(results)]
    for figure in FIGURES:
        parts.append(section(figure, results, remarks(old, figure.name)))
    return "\n".join(parts)


def remarks(page: str, name: str) -> str:
    found = re.search(rf"<!-- remarks {name} -->\n(.*?)<!-- end -->", page, re.DOTALL)
    return found[1] if found else ""


def section(figure: Figure, results: dict[str, dict[str, Any]], by_hand: str) -> str:
    jobs = list(results[figure.name]["jobs"].values())
    parts = [f"## {figure.title} (`{figure.name}`)", "", figure.text, ""]
    body = VIEWS[figure.view](jobs if not figure.source else jobs_of(figure.source, results))
    parts += [body or f"*{NOT_MEASURED}*", ""]
    wanted = {job.label + job.kind for job in figure.jobs}
    if body and len(wanted) > 0 and len(jobs) < len(figure.jobs):
        parts += [f"{len(figure.jobs) - len(jobs)} of {len(figure.jobs)} runs: {NOT_MEASURED}.", ""]
    parts += [f"<!-- remarks {figure.name} -->\n{by_hand}<!-- end -->", ""]
    if jobs:
        parts += ["<details><summary>How it was measured</summary>", "", *details(jobs), "", "</details>", ""]
    return "\n".join(parts)


def jobs_of(names: tuple[str, ...], results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**job, "figure": name} for name in names for job in results[name]["jobs"].values()]


def details(jobs: list[dict[str, Any]]) -> list[str]:
    """Commands, dates, machine, versions: each different line once."""
    lines: list[str] = []
    for job in jobs:
        facts = job.get("result", job)
        lines.append(f"- {job['date']}, `{job['command']}`")
        machine = {name: value for name, value in facts["machine"].items() if name != "load average"}
        lines.append("- " + "; ".join(machine.values()))
        lines.append("- " + ", ".join(f"{name} {value}" for name, value in facts["versions"].items()))
        lines += [f"- {label}: {line}" for label, line in facts.get("llama_cpp", {}).items()]
        lines.append(f"- load average {facts['machine']['load average']} before, {facts['load_at_end']} after")
        lines += [f"- {note}" for note in facts.get("notes", ())]
    return list(dict.fromkeys(lines))


# ---- the summary


def summary(results: dict[str, dict[str, Any]]) -> str:
    """One line per figure that has a target: the worst of its rows."""
    rows = []
    for figure in FIGURES:
        if figure.view not in ("ratio", "dense"):
            continue
        found = [(value, target) for job in results[figure.name]["jobs"].values()
                 for value, target in targets(job, figure.view)]  # fmt: skip
        wanted = figure.jobs[0].target
        if not found:
            rows.append([figure.title, f"≥ {wanted}", NOT_MEASURED, ""])
            continue
        values = [value for value, _ in found]
        good = sum(value >= target for value, target in found)
        got = f"{min(values):.2f}" if len(values) == 1 else f"{min(values):.2f} to {max(values):.2f}"
        rows.append([figure.title, f"≥ {wanted}", got, "yes" if good == len(found) else f"{good} of {len(found)}"])
    return table(["figure", "wanted ratio", "got", "reached"], rows) + "\n"


def targets(job: dict[str, Any], view: str) -> list[tuple[float, float]]:
    """(ratio, target) of each row that has both."""
    if job["target"] is None:
        return []
    name = "to_dense_median" if view == "dense" else "ratio_median"
    return [(row[name], job["target"]) for row in job["result"]["speed"] if row[name] is not None]


# ---- views


def ratio_view(jobs: list[dict[str, Any]], to_dense: bool = False) -> str:
    rows = []
    for job in jobs:
        for r in job["result"]["speed"]:
            if to_dense and not r["to_dense"]:
                continue
            values = r["to_dense"] if to_dense else r["ratio"]
            median = r["to_dense_median"] if to_dense else r["ratio_median"]
            other = dense_speed(job, r) if to_dense else (spread(r["stock"]) if r["stock"] else NOT_MEASURED)
            other += "" if to_dense or r["stock_is"] in (STOCK, None) else ", no repack"
            use = use_of(job, r)
            rows.append([
                job["label"], str(r["threads"]), r["test"], r["mode"], spread(r["ours"]), other,
                spread(values) if values else "", f"≥ {job['target']}", reached(median, job["target"]),
                optional(use.get("share_computed"), ".1%"), optional(use.get("ffn_bytes_share"), ".1%"), r["clean"],
            ])  # fmt: skip
    if not rows:
        return ""
    header = ["model", "threads", "test", "mode", "hotcold", "our dense" if to_dense else STOCK, "ratio", "wanted",
              "reached", "neurons", "FFN bytes", "clean rounds"]  # fmt: skip
    return table(header, rows) + quality_lines(jobs)


def quality_lines(jobs: list[dict[str, Any]]) -> str:
    lines = []
    for job in jobs:
        for q in job["result"]["quality"]:
            far = f", KL divergence {q['kl_mean']:.1e}, same top token {q['top1']:.1%}" if "kl_mean" in q else ""
            lines.append(f"- {job['label']}, {q['who']}: perplexity {q['perplexity']:.3f}{far}")
    head = "\n\nQuality on the same tokens, differences from llama.cpp in one batch:\n\n"
    return head + "\n".join(lines) if lines else ""


def dense_speed(job: dict[str, Any], row: dict[str, Any]) -> str:
    same = [r for r in job["result"]["speed"]
            if r["mode"] == "dense" and (r["threads"], r["test"]) == (row["threads"], row["test"])]  # fmt: skip
    return spread(same[0]["ours"]) if same else NOT_MEASURED


def use_of(job: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return next((u for u in job["result"]["use"]
                 if (u["threads"], u["test"], u["who"]) == (row["threads"], row["test"], row["mode"])), {})  # fmt: skip


def reached(value: float | None, target: float | None) -> str:
    return "" if value is None or target is None else "yes" if value >= target else "no"


def bandwidth_view(jobs: list[dict[str, Any]]) -> str:
    rows = []
    for job in jobs:
        kind = job["model"].removesuffix(".gguf").rpartition(".")[2]
        for u in job["result"]["use"]:
            if u["bandwidth_share"] is None:
                continue
            wanted = None
            if not u["who"].startswith(STOCK):
                wanted = SHARES.get(kind) if u["who"] == "dense" else SPARSE_SHARE
            rows.append([
                job["label"], str(u["threads"]), u["who"], f"{u['bytes_per_token'] / 1e9:.3f}",
                f"{u['bytes_per_token'] * u['speed'] / 1e9:.1f}", f"{u['bandwidth'] / 1e9:.1f}",
                f"{u['bandwidth_share']:.0%}", f"≥ {wanted:.0%}" if wanted else "",
                reached(u["bandwidth_share"], wanted), optional(u["cpu_speed"], ".2f"),
            ])  # fmt: skip
    header = ["model", "threads", "who", "GB per token", "GB/s", "plain read GB/s", "share", "wanted", "reached",
              "tokens per CPU-second"]  # fmt: skip
    unique = [list(row) for row in dict.fromkeys(map(tuple, rows))]
    return table(header, unique) if unique else ""


def linear_view(jobs: list[dict[str, Any]]) -> str:
    """Time per token and memory against what grows, and how well a straight line describes them."""
    points: dict[int, list[tuple[float, float, float]]] = {}  # threads -> (size, ms per token, peak GB)
    what = jobs[0]["label"] if jobs else ""
    for job in jobs:
        for line in job["lines"]:
            size = {"depth": line["n_depth"], "layers": job["layers"], "neurons per layer": job["n_ff"]}[what]
            ms = statistics.median(line["samples_ns"]) / 1e6 / (line["n_gen"] or line["n_prompt"])
            points.setdefault(line["n_threads"], []).append((size, ms, line["peak_rss"] / 1e9))
    rows, fits = [], []
    for threads, of in sorted(points.items()):
        of.sort()
        rows += [[str(threads), f"{size:.0f}", f"{ms:.2f}", f"{1e3 / ms:.1f}", f"{gb:.2f}"] for size, ms, gb in of]
        for name, index, unit in (("time", 1, "ms"), ("memory", 2, "GB")):
            if len(of) > 2:
                slope, start, r2 = fit([p[0] for p in of], [p[index] for p in of])
                fits.append(f"- {threads} threads, {name}: {start:.3g} {unit} + {1000 * slope:.3g} {unit} per 1000 "
                            f"({what}), R² = {r2:.4f}")  # fmt: skip
    if not rows:
        return ""
    return table(["threads", what, "ms per token", "tok/s", "peak RSS GB"], rows) + "\n\n" + "\n".join(fits)


def fit(x: list[float], y: list[float]) -> tuple[float, float, float]:
    """Slope, intercept and R² of the line through the points."""
    slope, start = np.polyfit(x, y, 1)
    left = np.sum((np.array(y) - (slope * np.array(x) + start)) ** 2)
    total = np.sum((np.array(y) - np.mean(y)) ** 2)
    return float(slope), float(start), float(1 - left / total) if total > 0 else 1.0


def startup_view(jobs: list[dict[str, Any]]) -> str:
    rows = []
    for job in jobs:
        for line in job["lines"]:
            rss, file = line["peak_rss"] / 1e6, job["file_mb"]
            rows.append([job["label"], f"{file / 1e3:.2f}", f"{line['load_s']:.2f}",
                         "< 1" if job["label"] == "mapped" else "", f"{job['wall_s']:.2f}", f"{rss / 1e3:.2f}",
                         f"{rss / file:.2f}"])  # fmt: skip
    header = ["how", "file GB", "opening s", "wanted", "process, one token, s", "peak RSS GB", "RSS ÷ file"]
    return table(header, rows) if rows else ""


def text_view(jobs: list[dict[str, Any]]) -> str:
    """The Markdown of a script, its headings below ours."""
    return "\n\n".join(re.sub(r"^#+ ", "### ", job["text"].strip(), flags=re.MULTILINE) for job in jobs)


VIEWS: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "ratio": ratio_view, "dense": lambda jobs: ratio_view(jobs, to_dense=True), "bandwidth": bandwidth_view,
    "linear": linear_view, "startup": startup_view, "text": text_view,
}  # fmt: skip
