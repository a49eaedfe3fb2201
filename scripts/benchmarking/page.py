"""BENCHMARKS.md from the results: a table per figure, with its command, date, machine and target.

In: results of runs.py of each machine, the page as it is. Out: the page. Next: nothing; summary.py judges.

Remarks written by hand between the markers of a figure and a machine are kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from comparison.plain import each_text, plain
from comparison.report import optional, spread, table
from comparison.settings import NO_REPACK, STOCK, Settings
from gpu_checks.page import section as gpu_section

from benchmarking.figures import DEMO, DEMO_STEM, FIGURES, Figure, Model
from benchmarking.runs import ANYWHERE
from benchmarking.summary import (
    NOT_MEASURED,
    START_S,
    Jobs,
    Machines,
    Results,
    fits,
    growth,
    jobs_of,
    sources,
    summary,
    wanted_share,
    was_disturbed,
)

HEAD = """\
# Benchmarks

hotcold against stock llama.cpp and against what memory allows. This page is written by `scripts/benchmarks.py --write`
from the results in `scripts/benchmarking/results/`, a folder for each machine; only the remarks between the markers are
by hand. Each table is measured again by

```sh
scripts/run                                           # once, for the environment and the demo model
scripts/get_llama_cpp.sh                              # once
.venv/bin/python scripts/benchmarks.py NAME --force   # or `all`; --list tells the names, --write writes this page
```

Models are synthetic but for SmolLM2: real sizes, random weights, planted sparsity (`scripts/make_synthetic.py`). They
are made in `~/.cache/hotcold/benchmarks`, the demo model in `.models`; commands below name the files only. Speeds are
tokens per second, median (lowest-highest) of the clean rounds; everybody takes turns, rounds in which others used the
machine do not count. A ratio is the median of those of neighbours. llama.cpp runs with its weights repacked, as it does
by default; where a command does not say `--repack on`, also as they lie in the file: the faster counts. Where it has
`--no-mmap`, both read their file into memory before they start, which makes both faster: hotcold then has huge pages,
which a mapped file has not. Each section says which models and numbers of threads it covers: nothing larger than 7B and
nothing with more than two threads was measured.

"""
TWINS = re.compile(r" --twins \S+")  # of a command: the folder where its models are


def write_page(machines: Machines, old: str, gpus: Results | None = None) -> str:
    """machines: name -> figure -> what runs.load gives. `old`: the page as it is, for its remarks. gpus: results of
    gpu_check.py."""
    shown = {machine: {figure.name: as_shown(figure, results[figure.name]) for figure in FIGURES}
             for machine, results in machines.items()}  # fmt: skip
    parts = [HEAD + summary(shown)]
    for figure in FIGURES:
        parts.append(section(figure, shown, old))
    parts.append(gpu_section(gpus or {}, partial(remarks, old, "gpu-check")))
    return "\n".join(parts)


def as_shown(figure: Figure, found: dict[str, Any]) -> dict[str, Any]:
    """No paths of the machine that measured, and the demo model by the name that scripts/run gives it."""
    found = dict(plain(found))
    for job in figure.jobs:
        if job.model == DEMO and job.key in found["jobs"]:
            found["jobs"][job.key] = as_demo(found["jobs"][job.key])
    return found


def as_demo(job: dict[str, Any]) -> dict[str, Any]:
    stem = Path(job["model"]).stem
    if stem == DEMO_STEM:
        return job
    name = re.compile(rf"(?<![\w.-]){re.escape(stem)}(?=\.[\w.-]*gguf)")
    job = dict(each_text(job, partial(name.sub, DEMO_STEM)))
    facts = job.get("result", job)
    facts["notes"] = [*facts.get("notes", ()), "The model was named with --demo: not what scripts/run had made."]
    return job


def remarks(page: str, name: str, machine: str) -> str:
    found = re.search(rf"<!-- remarks {name} {re.escape(machine)} -->\n(.*?)<!-- end -->", page, re.DOTALL)
    return found[1] if found else ""


def section(figure: Figure, machines: Machines, old: str) -> str:
    """What is measured, then what each machine gave."""
    parts = [f"## {figure.title} (`{figure.name}`)", "", figure.text, ""]
    if figure.anywhere:
        results = next(iter(machines.values()))
        there = bool(jobs_of(figure, results))
        return "\n".join([*parts, part(figure, results, ANYWHERE, old) if there else f"*{NOT_MEASURED}*\n"])
    none = [machine for machine, results in machines.items() if not VIEWS[figure.view](jobs_of(figure, results))]
    for machine, results in machines.items():
        if machine not in none:
            parts += [f"### {cpu(results)} (`{machine}`)", "", part(figure, results, machine, old)]
    if none:
        where = ", ".join(f"`{machine}`" for machine in none) if len(none) < len(machines) else ""
        parts += [f"*{NOT_MEASURED}*" + f" on {where}" * bool(where), ""]
    return "\n".join(parts)


def part(figure: Figure, results: Results, machine: str, old: str) -> str:
    """One machine's: the table, what it leaves out, remarks, how it was measured."""
    jobs = jobs_of(figure, results)
    parts = [*covered(figure, results), ""] if not figure.source else []
    parts += [VIEWS[figure.view](jobs), ""]
    if missing := left_out(figure, results):
        parts += [f"{NOT_MEASURED.capitalize()}: {', '.join(missing)}.", ""]
    parts += [f"<!-- remarks {figure.name} {machine} -->\n{remarks(old, figure.name, machine)}<!-- end -->", ""]
    if not figure.source:
        parts += ["<details><summary>How it was measured</summary>", "", *details(jobs), "", "</details>", ""]
    return "\n".join(parts)


def cpu(results: Results) -> str:
    """Of the machine; a text that its results tell."""
    own = [figure.name for figure in FIGURES if not figure.anywhere]
    jobs = [job for name in own for job in results[name]["jobs"].values()]
    return str(jobs[0].get("result", jobs[0])["machine"]["CPU"]) if jobs else "unknown"


def covered(figure: Figure, results: Results) -> list[str]:
    """A sentence: which models, how many threads, how llama.cpp ran. What a table leaves out cannot be seen in it."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for job in figure.jobs:
        found = results[figure.name]["jobs"].get(job.key)
        if found and job.model is not None:
            model = job.model
            what, kind = (model.shape, model.kind.upper()) if isinstance(model, Model) else ("SmolLM2-135M", "")
            kinds.setdefault((what, conditions(found, kind)), []).append(kind)
    parts = [" ".join([what, ", ".join(dict.fromkeys(of))]).strip() + how for (what, how), of in kinds.items()]
    return [f"Covers {'; '.join(parts)}."] if parts else []


def conditions(found: dict[str, Any], kind: str) -> str:
    """Of one result: threads, and whether llama.cpp had only one way to win (F16 has no other)."""
    result = found.get("result", {})
    rows = [*result.get("speed", ()), *found.get("lines", ())]
    threads = sorted({row["threads"] if "threads" in row else row["n_threads"] for row in rows})
    how = f" with {' and '.join(map(str, threads))} thread{'s' * (threads[-1] > 1)}" if threads else ""
    how += " only" * (len(threads) == 1)
    players = result.get("players", ())
    return how + " (llama.cpp repacked only)" * (kind != "F16" and STOCK in players and NO_REPACK not in players)


def left_out(figure: Figure, results: Results) -> list[str]:
    """The runs that have no result."""
    return [f"{one.name} " * bool(figure.source) + (job.label if job.kind == "compare" else job.key)
            for one in sources(figure) for job in one.jobs if job.key not in results[one.name]["jobs"]]  # fmt: skip


def details(jobs: Jobs) -> list[str]:
    """Commands, dates, machine, versions: each different line once."""
    lines: list[str] = []
    for job in jobs:
        facts = job.get("result", job)
        lines.append(f"- {job['date']}, `{TWINS.sub('', job['command'])}`")
        machine = {name: value for name, value in facts["machine"].items() if name != "load average"}
        lines.append("- " + "; ".join(machine.values()))
        lines.append("- " + ", ".join(f"{name} {value}" for name, value in facts["versions"].items()))
        lines += [f"- {label}: {line}" for label, line in facts.get("llama_cpp", {}).items()]
        stock = [line for line in facts.get("commands", ()) if "hotcold bench" not in line]
        lines += [f"- llama.cpp's command: `{line}`" for line in stock]
        if others := [share for of in facts.get("others_by_player", {}).values() for share in of]:
            lines.append(f"- others kept {max(others):.2f} cores busy in the worst burst, which counts only up to "
                         f"{job.get('noise', Settings.noise):.2f}")  # fmt: skip
        lines.append(f"- load average {facts['machine']['load average']} before, {facts['load_at_end']} after")
        lines += [f"- {note}" for note in facts.get("notes", ())]
    return list(dict.fromkeys(lines))


# ---- views


def ratio_view(jobs: Jobs, to_dense: bool = False) -> str:
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


def quality_lines(jobs: Jobs) -> str:
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


def bandwidth_view(jobs: Jobs) -> str:
    rows = []
    for job in jobs:
        for u in job["result"]["use"]:
            if u["bandwidth_share"] is None:
                continue
            wanted = wanted_share(job, u)
            rows.append([
                job["label"], str(u["threads"]), u["who"], f"{u['bytes_per_token'] / 1e9:.3f}",
                f"{u['bytes_per_token'] * u['speed'] / 1e9:.1f}", f"{u['bandwidth'] / 1e9:.1f}",
                f"{u['bandwidth_share']:.1%}", f"≥ {wanted:.0%}" if wanted else "",
                reached(u["bandwidth_share"], wanted), optional(u["cpu_speed"], ".2f"),
            ])  # fmt: skip
    header = ["model", "threads", "who", "GB per token", "GB/s", "plain read GB/s", "share", "wanted", "reached",
              "tokens per CPU-second"]  # fmt: skip
    unique = [list(row) for row in dict.fromkeys(map(tuple, rows))]
    return table(header, unique) if unique else ""


def linear_view(jobs: Jobs) -> str:
    """Time per token and memory against what grows, and how well a straight line describes them."""
    rows, lines = [], []
    for threads, points in growth(jobs).items():
        rows += [[str(threads), f"{size:.0f}", f"{ms:.2f}", f"{1e3 / ms:.1f}", f"{gb:.2f}"] for size, ms, gb in points]
        many = 1000 if points[-1][0] > 100 else 1
        per = f"per {many} ({jobs[0]['label']})" if many > 1 else f"for each of the {jobs[0]['label']}"
        who = f"{threads} thread{'s' * (threads > 1)}"
        lines += [f"- {who}, {name}: {start:.3g} {unit} + {many * slope:.3g} {unit} {per}, R² = {r2:.4f}"
                  for name, unit, slope, start, r2 in fits(points)]  # fmt: skip
    if not rows:
        return ""
    body = [table(["threads", jobs[0]["label"], "ms per token", "tok/s", "peak RSS GB"], rows), "\n".join(lines)]
    return "\n\n".join(filter(None, [*body, *disturbed(jobs)]))


def disturbed(jobs: Jobs) -> list[str]:
    """A line for each run in which others used the machine, however often it was tried."""
    return [f"**Disturbed:** others kept {job['others']:.2f} cores busy meanwhile: {job['label']}, {job['model']}."
            for job in jobs if was_disturbed(job)]  # fmt: skip


def startup_view(jobs: Jobs) -> str:
    rows = []
    for job in jobs:
        for line in job["lines"]:
            rss, file = line["peak_rss"] / 1e6, job["file_mb"]
            mark = " (disturbed)" if disturbed([job]) else ""
            rows.append([job["label"] + mark, f"{file / 1e3:.2f}", f"{line['load_s']:.2f}",
                         f"< {START_S:g}" if job["label"] == "mapped" else "", f"{job['wall_s']:.2f}",
                         f"{rss / 1e3:.2f}", f"{rss / file:.2f}"])  # fmt: skip
    header = ["how", "file GB", "opening s", "wanted", "process, one token, s", "peak RSS GB", "RSS ÷ file"]
    return "\n\n".join([table(header, rows), *disturbed(jobs)]) if rows else ""


def text_view(jobs: Jobs) -> str:
    """The Markdown of a script, its headings below ours."""
    texts = [re.sub(r"^#+ ", "### ", job["text"].strip(), flags=re.MULTILINE) for job in jobs]
    return "\n\n".join([*texts, *disturbed(jobs)])


VIEWS: dict[str, Callable[[Jobs], str]] = {
    "ratio": ratio_view, "dense": lambda jobs: ratio_view(jobs, to_dense=True), "bandwidth": bandwidth_view,
    "linear": linear_view, "startup": startup_view, "judged": text_view,
    "text": text_view,
}  # fmt: skip
