"""Makes the models that figures need, and carries out their runs.

In: figures.py. Out: one JSON file per figure in the folder of results. Next: page.py.

A figure's file keeps one entry per job. What has an entry is not run again, so that an interrupted run goes on where it
was. A job that fails has no entry; the others are run all the same.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from comparison.bursts import Burst, load_average, machine_facts, run_burst, wait_for_quiet
from comparison.facts import versions
from comparison.plain import plain
from comparison.settings import HOTCOLD, say

from benchmarking.figures import DEMO, Figure, Job, Model
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.kernels.isa import CHOSEN

SCRIPTS = Path(__file__).resolve().parent.parent
TINY = {"llama": "llama-tiny", "opt": "opt-tiny"}  # shapes that try out the machinery, not the speed
TINY_NUMBERS = {"--prompt-tokens": 16, "--gen-tokens": 4, "-n": 4, "--quality-tokens": 16, "--tokens": 8}

TINY_LISTS = {"-d": "0,64,128,256", "-t": "1", "--threads": "1"}
RESULTS = SCRIPTS / "benchmarking" / "results"  # of all machines, in git
ANYWHERE = "anywhere"  # the folder of results that are the same on every machine
SAME = ("CPU", "CPU model", "instruction sets", "cores", "memory")  # facts of a machine that a folder's results share
TRIES = 3  # of a burst that others disturb
# What the page shows of a comparison, and of a test of `hotcold bench`.
KEPT = ("speed", "use", "quality", "notes", "commands", "llama_cpp", "machine", "versions", "load_at_end")
KEPT_OF_LINES = ("n_threads", "n_depth", "n_prompt", "n_gen", "samples_ns", "peak_rss", "load_s")


@dataclass(frozen=True)
class Options:
    """Of a run of benchmarks.py."""

    models: Path  # folder of models made here
    results: Path
    demo: Path
    reps: int
    compare: tuple[str, ...]  # further options of compare_llama_cpp.py
    noise: float
    wait: float
    force: bool = False
    tiny: bool = False


def file_of(results: Path, figure: Figure) -> Path:
    """In the folder of a machine's results. What is the same everywhere: beside it, or in it if it is one's own."""
    anywhere = (RESULTS if results.parent == RESULTS else results) / ANYWHERE
    return (anywhere if figure.anywhere else results) / f"{figure.name}.json"


def load(results: Path, figure: Figure) -> dict[str, Any]:
    """What has been measured of a figure. Raises HotcoldError for a file that is no such JSON."""
    path = file_of(results, figure)
    if not path.exists():
        return {"name": figure.name, "jobs": {}}
    try:
        found = json.loads(path.read_text())
        jobs = found.get("jobs") if isinstance(found, dict) else None
        if not isinstance(jobs, dict) or not all(map(is_result, jobs.values())):
            raise ValueError("no object with jobs")
    except ValueError as error:
        raise HotcoldError(f"{path}: not a file of results: {error}; remove it to measure again") from None
    return found


def is_result(job: Any) -> bool:
    """Of a job: an object that says, itself or in its `result`, on which machine it ran."""
    facts = job.get("result", job) if isinstance(job, dict) else None
    return isinstance(facts, dict) and isinstance(facts.get("machine", {}), dict)


def save(results: Path, figure: Figure, found: dict[str, Any]) -> None:
    path = file_of(results, figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(rounded(plain(found)), indent=1) + "\n")
    os.replace(part, path)


def rounded(value: Any) -> Any:
    """What JSON holds with numbers of six digits: results are kept in the repository."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def this_machine() -> str:
    """A name for the folder of its results: processor and kernels."""
    cpu = re.sub(r"\(R\)|\(TM\)|CPU|Processor|@.*", "", machine_facts()["CPU"])
    return "-".join(re.findall(r"[a-z0-9]+", f"{cpu} {CHOSEN.name}".lower()))


# ---- models


def sized(job: Job, tiny: bool) -> Job:
    """The job itself, or a tiny one of the same kind."""
    if not tiny:
        return job
    model = job.model
    if isinstance(model, Model):
        small = TINY[model.shape.split("-")[0]]
        layers, n_ff = model.layers and max(1, model.layers // 6), model.n_ff and model.n_ff // 11
        model = replace(model, shape=small, layers=layers, n_ff=n_ff, n_ctx=512)
    words = list(job.options)
    for i, word in enumerate(words[:-1]):
        if word in TINY_NUMBERS:
            words[i + 1] = str(min(int(words[i + 1]), TINY_NUMBERS[word]))
        elif word in TINY_LISTS:
            words[i + 1] = TINY_LISTS[word]
    return replace(job, model=model, options=tuple(words))


def make_model(model: Model | str | None, options: Options) -> tuple[Path, Path | None]:
    """(the model, its twin for llama.cpp if it has one), made if they are not there. Raises HotcoldError.

    Of a run without a model, an empty path.
    """
    if model is None:
        return Path(), None
    if model == DEMO:
        if not options.demo.exists():
            raise HotcoldError(f"{options.demo}: the demo model is not there; scripts/run makes it, --demo names it")
        return options.demo, None
    assert isinstance(model, Model)
    out = options.models / f"{model.name}.gguf"
    twin = options.models / f"{model.name}.stock.gguf" if model.has_twin else None
    if not out.exists() or twin and not twin.exists():
        options.models.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(SCRIPTS / "make_synthetic.py"), *model.options(), "-o", str(out)]
        command += ["--stock", str(twin)] if twin else []
        say(f"making {out.name}")
        if subprocess.run(command, stdout=sys.stderr).returncode:
            raise HotcoldError(f"{out}: could not be made, see above")
    return out, twin


# ---- runs


def run_figure(figure: Figure, options: Options) -> int:
    """Carry out what has no result yet; returns how many jobs failed. Raises HotcoldError, OSError."""
    found = load(options.results, figure)
    if not figure.anywhere:
        of_this_machine(found, file_of(options.results, figure))
    failed = 0
    for full in figure.jobs:
        key = full.key
        if key in found["jobs"] and not options.force:
            say(f"{figure.name}, {key}: measured before")
            continue
        job, start = sized(full, options.tiny), time.monotonic()
        say(f"{figure.name}, {key}: measuring")
        try:
            paths = make_model(job.model, options)
            found["jobs"][key] = {
                "label": job.label, "kind": job.kind, "target": job.target, "model": paths[0].name,
                "date": time.strftime("%Y-%m-%d %H:%M"), **RUNNERS[job.kind](job, *paths, options),
            }  # fmt: skip
            save(options.results, figure, found)
            say(f"{figure.name}, {key}: done in {time.monotonic() - start:.0f} s")
        except HotcoldError as error:
            say(f"{figure.name}, {key}: {error}")
            failed += 1
    return failed


def of_this_machine(found: dict[str, Any], path: Path) -> None:
    """Raises HotcoldError where another machine of that name has measured: virtual ones hide what they are."""
    here = machine_facts()
    for job in found["jobs"].values():
        there = job.get("result", job).get("machine", {})
        for fact in SAME:
            if there.get(fact, here[fact]) != here[fact]:
                raise HotcoldError(f"{path}: measured on another machine, {fact} {there[fact]}, here {here[fact]}; use "
                                   "another folder, --results")  # fmt: skip


def run_compare(job: Job, model: Path, twin: Path | None, options: Options) -> dict[str, Any]:
    out = options.results / "compare.part"
    options.results.mkdir(parents=True, exist_ok=True)
    command = [str(SCRIPTS / "compare_llama_cpp.py"), str(model), "--twins", str(options.models)]
    command += ["--stock", str(twin)] if twin else []
    command += [*job.options, "--reps", str(options.reps), "--noise", str(options.noise), "--wait", str(options.wait)]
    command += options.compare
    try:
        done = subprocess.run([sys.executable, *command, "-o", str(out)], stdout=subprocess.DEVNULL)
        if done.returncode or not out.exists():
            raise HotcoldError(f"compare_llama_cpp.py ended with status {done.returncode}, see above")
        (result,) = json.loads(out.read_text())
    finally:
        out.unlink(missing_ok=True)
    if failed := [note for note in result["notes"] if "failed and is left out" in note]:
        raise HotcoldError(failed[0])
    if not any(row["ours"] for row in result["speed"]):
        raise HotcoldError("no round was clean: others used the machine in each; --noise allows more")
    bursts = [(who, burst) for turn in result["rounds"] for who, burst in turn["bursts"].items()]
    others = {who: [burst["others"] for name, burst in bursts if name == who] for who, _ in bursts}
    result = {name: result[name] for name in KEPT} | {"players": sorted(others), "others_by_player": others}
    command[0] = "scripts/compare_llama_cpp.py"
    return {"command": shown(["python", *command]), "noise": options.noise, "result": result}


def run_bench(job: Job, model: Path, twin: Path | None, options: Options) -> dict[str, Any]:
    command = ["bench", str(model), *job.options, "-o", "jsonl", "--no-bandwidth"]
    run_burst([*HOTCOLD, "bench", str(model), "-p", "0", "-n", "1", "-r", "1", "--no-bandwidth"])  # into the page cache
    burst = quiet_burst([*HOTCOLD, *command], "hotcold bench", options)
    lines = [{name: value for name, value in json.loads(line).items() if name in KEPT_OF_LINES}
             for line in burst.output.splitlines()]  # fmt: skip
    return {"command": shown(["hotcold", *command]), "lines": lines, "wall_s": burst.wall_s,
            "rss_mb": burst.peak_rss_mb, "file_mb": model.stat().st_size / 1e6, **quiet(burst, options),
            **job_size(job), **where()}  # fmt: skip


def run_text(job: Job, model: Path, twin: Path | None, options: Options) -> dict[str, Any]:
    script, *rest = job.options
    if not (SCRIPTS / script).exists():
        raise HotcoldError(f"scripts/{script} is not there")
    words = [*([str(model)] if job.model is not None else []), *rest]
    burst = quiet_burst([sys.executable, str(SCRIPTS / script), *words], script, options)
    command = shown(["python", f"scripts/{script}", *words])
    return {"command": command, "text": burst.output, **quiet(burst, options), **where()}


def run_plan(job: Job, model: Path, twin: Path | None, options: Options) -> dict[str, Any]:
    """Speeds do not matter here, so neither does who else computes."""
    command = ["plan", str(model), *job.options]
    burst = run_burst([*HOTCOLD, *command])
    if burst.status:
        raise HotcoldError(f"hotcold plan ended with status {burst.status}: {burst.errors}")
    lines = [line.rstrip() for line in burst.output.strip().splitlines()]
    return {"command": shown(["hotcold", *command]), "text": "\n".join(["```", *lines, "```"]), **where()}


def quiet_burst(command: list[str], who: str, options: Options) -> Burst:
    """The first of a few bursts that nobody disturbs, else the quietest of them. Raises HotcoldError if one fails."""
    bursts: list[Burst] = []
    while len(bursts) < TRIES and all(burst.others > options.noise for burst in bursts):
        wait_for_quiet(options.noise, options.wait)
        bursts.append(run_burst(command))
        if bursts[-1].status:
            raise HotcoldError(f"{who} ended with status {bursts[-1].status}: {bursts[-1].errors}")
        if bursts[-1].others > options.noise:
            say(f"{who}: others kept {bursts[-1].others:.2f} cores busy")
    return min(bursts, key=lambda burst: burst.others)


def quiet(burst: Burst, options: Options) -> dict[str, Any]:
    """What tells whether it was."""
    return {"others": burst.others, "noise": options.noise}


RUNNERS = {"compare": run_compare, "bench": run_bench, "text": run_text, "plan": run_plan}


def job_size(job: Job) -> dict[str, Any]:
    """What the figure varies, where that is the model."""
    model = job.model
    return {"layers": model.layers, "n_ff": model.n_ff} if isinstance(model, Model) else {}


def where() -> dict[str, Any]:
    return {"machine": machine_facts(), "versions": versions(), "load_at_end": load_average()}


def shown(command: list[str]) -> str:
    """A command as one would type it, with the names of files only."""
    return shlex.join([Path(word).name if word.startswith("/") else word for word in command])
