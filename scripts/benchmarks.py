"""The figures of BENCHMARKS.md, each by one command.

In: names of figures. Out: results as JSON in benchmarking/results/, a folder for each machine, and BENCHMARKS.md with
--write. Next: benchmarking/figures.py says what each one is, runs.py runs it, page.py writes the page.

    python scripts/benchmarks.py --list
    python scripts/benchmarks.py dense-q8_0 predict --quick
    python scripts/benchmarks.py all --prepare          # makes the models, measures nothing
    python scripts/benchmarks.py all --quick --write

What has a result is not measured again (--force does), so an interrupted run goes on where it was. Models are made in
~/.cache/hotcold/benchmarks, about 30 GB for all.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarking.figures import FIGURES, Figure, by_name
from benchmarking.page import write_page
from benchmarking.runs import ANYWHERE, RESULTS, Options, load, make_model, run_figure, sized, this_machine
from benchmarking.summary import Machines
from comparison.settings import say
from gpu_checks.page import load as load_gpus

from hotcold.runtime.errors import HotcoldError

CHECKOUT = Path(__file__).resolve().parent.parent
MODELS = Path.home() / ".cache" / "hotcold" / "benchmarks"
REPS, QUICK_REPS = 5, 3


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the figures of BENCHMARKS.md.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a figure, or `all`")
    parser.add_argument("--list", action="store_true", help="tell the figures and what has been measured")
    parser.add_argument("--write", type=Path, nargs="?", const=CHECKOUT / "BENCHMARKS.md", metavar="FILE",
                        help="write the page (BENCHMARKS.md) from the results of all machines")
    parser.add_argument("--prepare", action="store_true", help="only make the models")
    parser.add_argument("--force", action="store_true", help="measure again what has a result")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REPS} clean rounds instead of {REPS}")
    parser.add_argument("--tiny", action="store_true", help="tiny models: tries out the machinery; needs --results")
    parser.add_argument("--results", type=Path,
                        help=f"folder of this machine's JSON, default {RESULTS / this_machine()}")
    parser.add_argument("--models", type=Path, default=MODELS, help=f"folder for models made here, default {MODELS}")
    parser.add_argument("--demo", type=Path, default=CHECKOUT / ".models" / "smollm2-135m-instruct.gguf",
                        help="the relufied SmolLM2 that scripts/run makes")
    parser.add_argument("--llama-bin", type=Path, help="folder with llama-bench, as in compare_llama_cpp.py")
    parser.add_argument("--noise", type=float, default=0.15, help="cores others may use in a clean burst")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to wait for quiet before a burst")
    args = parser.parse_args()
    if args.tiny and not args.results:
        parser.error("--tiny: name a folder with --results, its figures do not belong to the others")
    if args.write and not args.write.parent.is_dir():
        parser.error(f"--write {args.write}: no such folder: {args.write.parent}")
    if not (args.names or args.list or args.write):
        parser.error("name figures, or give --list or --write")
    return args


def chosen(names: list[str]) -> list[Figure]:
    """Raises HotcoldError for a name that no figure has."""
    if "all" in names:
        return list(FIGURES)
    figures = []
    for name in names:
        figure = by_name(name)
        if figure is None:
            raise HotcoldError(f"no figure {name!r}, choose from all, {', '.join(f.name for f in FIGURES)}")
        figures += [f for f in map(by_name, figure.source) if f] or [figure]
    return list(dict.fromkeys(figures))


def list_figures(results: Path) -> None:
    for figure in FIGURES:
        if figure.source:
            state = f"from {', '.join(figure.source)}"
        else:
            measured = load(results, figure)["jobs"]
            state = f"{sum(job.key in measured for job in figure.jobs)} of {len(figure.jobs)} runs measured"
        print(f"{figure.name:15} {figure.title}: {state}")


def machines(results: Path, alone: bool) -> Machines:
    """What has been measured here and, unless alone, on other machines: only those that measured anything."""
    folders = {results} if alone or not RESULTS.exists() else {results, *filter(Path.is_dir, RESULTS.iterdir())}
    folders.discard(RESULTS / ANYWHERE)
    found = {folder.name: {figure.name: load(folder, figure) for figure in FIGURES} for folder in sorted(folders)}
    own = [figure.name for figure in FIGURES if not figure.anywhere]
    measured = {name: of for name, of in found.items() if any(of[figure]["jobs"] for figure in own)}
    return measured or {results.name: found[results.name]}


def prepare(figures: list[Figure], options: Options) -> int:
    failed = 0
    for model in dict.fromkeys(sized(job, options.tiny).model for figure in figures for job in figure.jobs):
        if model is None:
            continue
        try:
            say(f"{make_model(model, options)[0]}: there")
        except HotcoldError as error:
            say(str(error))
            failed += 1
    return failed


def main() -> int:
    args = parse_args()
    results = args.results or RESULTS / this_machine()
    reps = 1 if args.tiny else QUICK_REPS if args.quick else REPS
    options = Options(
        models=args.models, results=results, demo=args.demo, reps=reps,
        compare=("--llama-bin", str(args.llama_bin)) if args.llama_bin else (), noise=args.noise, wait=args.wait,
        force=args.force, tiny=args.tiny,
    )  # fmt: skip
    failed = 0
    try:
        figures = chosen(args.names)
        if args.prepare:
            failed = prepare(figures, options)
        else:
            failed = sum(run_figure(figure, options) for figure in figures)
        if args.list:
            list_figures(results)
        if args.write:
            old = args.write.read_text() if args.write.exists() else ""
            args.write.write_text(write_page(machines(results, alone=bool(args.results)), old, load_gpus(RESULTS)))
            say(f"wrote {args.write}")
    except (HotcoldError, OSError, UnicodeDecodeError) as error:  # the latter: --write over what is no text
        say(f"benchmarks: {error}")
        return 1
    except KeyboardInterrupt:
        say("benchmarks: interrupted; run it again to go on")
        return 130
    if failed:
        say(f"benchmarks: {failed} of the runs failed, see above")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
