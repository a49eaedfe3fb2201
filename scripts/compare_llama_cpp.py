"""hotcold against stock llama.cpp: same machine, same bits, same threads, same token ids.

In: models (neuron-split or stock GGUF) and a built llama.cpp. Out: a Markdown table on stdout, JSON with -o, a plot.
Next: comparison/twins.py makes the two files, speed.py and quality.py compare, report.py and plot.py write.

    scripts/get_llama_cpp.sh                                   # once
    python scripts/compare_llama_cpp.py MODEL.gguf --threads 1,2 --modes dense,exact -o result.json --plot result.svg

Speed: llama-bench and hotcold take turns in short bursts, each in a process of its own; the table gives the median of
the ratios of neighbours. A burst during which others used the machine is flagged, repeated, and left out. llama.cpp
runs with its weights repacked and as they lie in the file; the faster of the two counts.
Quality: both compute logits for the same ids; beside it stands how far llama.cpp is from itself, one token at a time
against a batch, and another build of it (--quality-baseline). Without llama.cpp our half still runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from comparison.bursts import load_average, machine_facts
from comparison.facts import bench_facts, build_facts, versions
from comparison.plain import plain
from comparison.plot import plot
from comparison.quality import compare_quality
from comparison.report import report
from comparison.rows import speed_rows, use_rows
from comparison.settings import REPACK, Settings, say
from comparison.speed import STOCK_NAMES, Session, compare_speed
from comparison.twins import make_twins, possible_modes

from hotcold.runtime.arguments import counts, whole
from hotcold.runtime.buffers import KV_TYPES
from hotcold.runtime.errors import HotcoldError

DEFAULT_LLAMA = Path.home() / ".cache" / "hotcold" / "llama.cpp"  # where get_llama_cpp.sh leaves it


def compare(settings: Settings, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Everything about one model, as JSON takes it. Raises HotcoldError, OSError."""
    folder = args.twins or model.parent
    twins = make_twins(model, args.stock, folder, args.as_is, list(settings.modes))
    settings.modes, lines = possible_modes(twins.ours, list(settings.modes))
    settings.notes += lines
    for line in lines:
        say(line)
    result: dict[str, Any] = {
        "model": model.name, "files": {"ours": str(twins.ours), "stock": str(twins.stock) if twins.stock else None},
        "bytes": {path.name: path.stat().st_size for path in (twins.ours, twins.stock) if path},
        "date": time.strftime("%Y-%m-%d %H:%M"), "machine": machine_facts(), "versions": versions(),
        "notes": [], "llama_cpp": {}, "speed": [], "use": [], "rounds": [], "commands": [], "quality": [],
    }  # fmt: skip
    if settings.llama_bench and twins.stock:
        result["llama_cpp"]["build"] = build_facts(settings.llama_bench)
    for threads in settings.threads if settings.reps else ():
        session = compare_speed(settings, twins, threads)
        result["speed"] += speed_rows(session, settings)
        result["use"] += use_rows(session, settings, twins)
        result["rounds"] += [plain_round(session, number) for number in range(len(session.rounds))]
        result["commands"] += [burst.command for burst in session.rounds[0].bursts.values()]
        for name in STOCK_NAMES:
            for told in session.rounds[-1].lines.get(name, {}).values():
                result["llama_cpp"][name] = bench_facts(told)
    if settings.quality_tokens:
        result["quality"], builds = compare_quality(settings, twins)
        result["llama_cpp"] |= {f"{label}: CPU features of the build": line for label, line in builds.items()}
    result["notes"] = [*twins.notes, *settings.notes]
    result["load_at_end"] = load_average()
    return dict(plain(result))


def plain_round(session: Session, number: int) -> dict[str, Any]:
    """A round for JSON, without what is in it twice."""
    this = session.rounds[number]
    skipped = ("output", "track")
    bursts = {
        name: {key: value for key, value in dataclasses.asdict(burst).items() if key not in skipped}
        for name, burst in this.bursts.items()
    }
    return {"threads": session.threads, "round": number + 1, "bursts": bursts, "speeds": this.speeds,
            "bandwidth": this.bandwidth}  # fmt: skip


def find_llama(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of llama.cpp's side: what is missing is None, explained in `notes` and on stderr."""
    notes = []
    folder = args.llama_bin or DEFAULT_LLAMA / "bin"
    lib: Path | None = args.llama_lib or folder
    if lib and lib.is_file():
        lib = lib.parent
    if not any((lib or folder).glob("libllama.*")):
        notes.append(f"No libllama in {lib}: logits were not compared; --llama-lib names its folder.")
        lib = None
    bench: Path | None = None
    if args.llama_bin or not args.llama_lib:
        found = None if args.llama_bin else shutil.which("llama-bench")
        bench = folder / "llama-bench" if (folder / "llama-bench").exists() else Path(found) if found else None
    if bench is None and lib is None:
        notes.insert(0, f"No llama-bench in {folder}: only our speed was measured. scripts/get_llama_cpp.sh builds "
                        "it; --llama-bin names its folder.")  # fmt: skip
    elif bench is None:
        notes.append(f"llama.cpp was timed through its library in {lib}, not by llama-bench.")
    bindings = args.llama_bindings
    if bindings is None and (DEFAULT_LLAMA / "llama_cpp").exists():
        bindings = DEFAULT_LLAMA / "llama_cpp"
    for note in notes:
        say(note)
    return {"llama_bench": bench, "llama_lib": lib, "llama_bindings": bindings, "notes": notes}


def parse_args() -> argparse.Namespace:
    default = Settings()
    parser = argparse.ArgumentParser(description="hotcold against stock llama.cpp: speed and logits.")
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL", help="neuron-split or stock GGUF")
    group = parser.add_argument_group("files")
    group.add_argument("--stock", type=Path, help="llama.cpp's file, if not made from MODEL (one MODEL only)")
    group.add_argument("--twins", type=Path, help="folder for files made here; default: beside MODEL")
    only = group.add_mutually_exclusive_group()
    only.add_argument("--as-is", action="store_true", default=None,
                      help="run a stock file as it is; default where only dense is asked for and it can be")
    only.add_argument("--convert", dest="as_is", action="store_false", help="convert a stock file in any case")
    group.add_argument("--llama-bin", type=Path, help=f"folder with llama-bench; default {DEFAULT_LLAMA}/bin, PATH")
    group.add_argument("--llama-lib", type=Path,
                       help="folder with libllama; default: that of --llama-bin. Alone: time the library")
    group.add_argument("--llama-bindings", type=Path, help="folder with llama-cpp-python's llama_cpp")
    group.add_argument("--quality-baseline", type=Path, help="folder with another build's libllama")
    group = parser.add_argument_group("work")
    group.add_argument("--threads", type=counts, default=default.threads, help="as in 1,2")
    group.add_argument("--prompt-tokens", type=whole, default=default.prompt_tokens, help="0: no prompt")
    group.add_argument("--gen-tokens", type=whole, default=default.gen_tokens, help="0: no generation")
    group.add_argument("--depth", type=whole, default=default.depth, help="tokens in the context before either")
    group.add_argument("--kv-type", choices=list(KV_TYPES), default=default.kv_type)
    group.add_argument("--repack", choices=list(REPACK), default=default.repack, help="llama.cpp's weights repacked")
    group.add_argument("--no-mmap", dest="mmap", action="store_false", help="both read their file into memory")
    group.add_argument("--modes", type=lambda text: text.split(","), default=default.modes,
                       help="as in dense,exact,predict")
    group.add_argument("--quality-tokens", type=whole, default=default.quality_tokens, help="0: no quality")
    group.add_argument("--text", default=default.text, help="file to take tokens from, or `random` for random ids")
    group = parser.add_argument_group("measuring")
    group.add_argument("--reps", type=whole, default=default.reps, help="clean rounds wanted; 0: no speed")
    group.add_argument("--no-bandwidth", dest="bandwidth", action="store_false", help="no plain reads between rounds")
    group.add_argument("--noise", type=float, default=default.noise, help="cores others may use in a clean burst")
    group.add_argument("--wait", type=float, default=default.wait, help="seconds to wait for quiet before a burst")
    group.add_argument("--timeout", type=float, default=default.timeout, help="seconds for one burst")
    group = parser.add_argument_group("results")
    group.add_argument("-o", "--out", type=Path, help="JSON with every burst")
    group.add_argument("--markdown", type=Path, metavar="FILE", help="the report, as on stdout")
    group.add_argument("--plot", type=Path, metavar="FILE", help="PNG or SVG of tokens per second")
    args = parser.parse_args()
    if args.stock and len(args.models) > 1:
        parser.error("--stock goes with one MODEL")
    if args.plot and args.plot.suffix not in (".png", ".svg"):
        parser.error(f"--plot {args.plot}: its name must end in .png or .svg")
    if args.quality_tokens == 1:
        parser.error("--quality-tokens 1: allowed are 0, and 2 or more: the first token has none before it")
    for name in ("noise", "wait"):
        if not getattr(args, name) >= 0:  # nan is not
            parser.error(f"--{name} {getattr(args, name)}: must be 0 or more")
    if not args.timeout > 0:
        parser.error(f"--timeout {args.timeout}: must be more than 0")
    if str(args.text) != "random" and not Path(args.text).is_file():  # not only after an hour
        parser.error(f"--text {args.text}: no such file, and not the word random")
    for name in ("out", "markdown", "plot"):
        path = getattr(args, name)
        if path and not path.parent.is_dir():
            parser.error(f"--{name} {path}: no such folder: {path.parent}")
    if args.prompt_tokens + args.gen_tokens < 1:
        parser.error("--prompt-tokens and --gen-tokens are both 0: nothing to measure")
    return args


def write(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """What there is, also of a run that ended early. Raises OSError."""
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))
    if args.markdown:
        args.markdown.write_text("\n".join(report(result) for result in results))
    if args.plot:
        try:
            plot(results, args.plot)
        except HotcoldError as error:
            say(f"no plot: {error}")


def main() -> int:
    args = parse_args()
    common = {
        name: getattr(args, name)
        for name in ("threads", "prompt_tokens", "gen_tokens", "depth", "kv_type", "repack", "reps", "modes",
                     "mmap", "bandwidth", "quality_tokens", "noise", "wait", "timeout")
    }  # fmt: skip
    text = None if str(args.text) == "random" else Path(args.text)
    results: list[dict[str, Any]] = []
    try:
        try:
            for model in args.models:
                settings = Settings(text=text, baseline_lib=args.quality_baseline, **common, **find_llama(args))
                results.append(compare(settings, model, args))
                print(report(results[-1]), flush=True)
        finally:
            if results:
                write(results, args)
    except KeyboardInterrupt:
        kept = f"; {args.out} holds the models before" if args.out and results else ""
        say(f"compare_llama_cpp: interrupted{kept}")
        return 130
    except (HotcoldError, OSError) as error:
        say(f"compare_llama_cpp: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
