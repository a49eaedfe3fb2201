"""hotcold against stock llama.cpp: same machine, same bits, same threads, same token ids.

In: models (neuron-split or stock GGUF) and a built llama.cpp. Out: a Markdown table on stdout, JSON with -o.
Next: comparison/twins.py makes the two files, speed.py and quality.py compare, report.py writes.

    scripts/get_llama_cpp.sh                                   # once
    python scripts/compare_llama_cpp.py MODEL.gguf --threads 1,2 --modes dense,exact -o result.json

Speed: llama-bench and hotcold take turns in short bursts, each in a process of its own; the table gives the median of
the ratios of neighbours. A burst during which others used the machine is flagged, repeated, and left out.
Quality: both compute logits for the same ids; beside it stands how far llama.cpp is from itself, one token at a time
against a batch, and another build of it (--quality-baseline). Without llama.cpp our half still runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from comparison.bursts import machine_facts
from comparison.quality import compare_quality
from comparison.report import report
from comparison.settings import STOCK, Settings, say
from comparison.speed import compare_speed, speed_rows
from comparison.twins import make_twins

from hotcold.runtime.errors import HotcoldError

SCRIPTS = Path(__file__).resolve().parent
DEFAULT_LLAMA = Path.home() / ".cache" / "hotcold" / "llama.cpp"  # where get_llama_cpp.sh leaves it


def versions() -> dict[str, str]:
    """Of Python and what the figures depend on; hotcold with its commit."""
    found = {name: importlib.metadata.version(name) for name in ("hotcold", "numpy", "numba", "llvmlite")}
    if git := shutil.which("git"):
        command = [git, "-C", str(SCRIPTS), "describe", "--always", "--dirty"]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        found["hotcold"] += f" ({commit})" if commit else ""
    return {"Python": platform.python_version(), **found}


def compare(settings: Settings, model: Path, stock: Path | None, folder: Path) -> dict[str, Any]:
    """Everything about one model, as JSON takes it. Raises HotcoldError, OSError."""
    twins = make_twins(model, stock, folder)
    result: dict[str, Any] = {
        "model": model.name, "files": {"ours": str(twins.ours), "stock": str(twins.stock)},
        "date": time.strftime("%Y-%m-%d %H:%M"), "machine": machine_facts(), "versions": versions(),
        "notes": [], "llama_cpp": {}, "speed": [], "rounds": [], "commands": [], "quality": [],
    }  # fmt: skip
    for threads in settings.threads if settings.reps else ():
        rounds, seen = compare_speed(settings, twins, threads)
        result["speed"] += speed_rows(rounds, seen, threads, settings)
        result["rounds"] += [dataclasses.asdict(r) for r in rounds]
        result["commands"] += [burst.command for burst in rounds[0].bursts.values()]
        if line := seen.get(STOCK):
            flash = {-1: "auto", 0: "off", 1: "on"}.get(line.get("flash_attn"), line.get("flash_attn"))
            result["llama_cpp"]["llama-bench"] = (
                f"build {line['build_commit']} ({line['build_number']}), repack {line.get('repack')}, "
                f"KV {line['type_k']}/{line['type_v']}, flash attention {flash}"
            )
    if settings.llama_lib and settings.quality_tokens:
        result["quality"], builds = compare_quality(settings, twins)
        result["llama_cpp"] |= builds
    result["notes"] = [*twins.notes, *settings.notes]
    result["load_at_end"] = machine_facts()["load average"]
    return result


def find_llama(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of llama.cpp's side: what is missing is None, explained in `notes` and on stderr."""
    notes = []
    folder = args.llama_bin or DEFAULT_LLAMA / "bin"
    bench: Path | None = folder / "llama-bench"
    if not (folder / "llama-bench").exists():
        found = shutil.which("llama-bench") if args.llama_bin is None else None
        bench = Path(found) if found else None
        if bench is None:
            notes.append(f"No llama-bench in {folder}: only our speed was measured. scripts/get_llama_cpp.sh builds "
                         "it; --llama-bin names its folder.")  # fmt: skip
    lib: Path | None = args.llama_lib or folder
    if not any((args.llama_lib or folder).glob("libllama.*")):
        notes.append(f"No libllama in {lib}: logits were not compared; --llama-lib names its folder.")
        lib = None
    bindings = args.llama_bindings
    if bindings is None and (DEFAULT_LLAMA / "llama_cpp").exists():
        bindings = DEFAULT_LLAMA / "llama_cpp"
    for note in notes:
        say(note)
    return {"llama_bench": bench, "llama_lib": lib, "llama_bindings": bindings, "notes": notes}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse_args() -> argparse.Namespace:
    default = Settings()
    parser = argparse.ArgumentParser(description="hotcold against stock llama.cpp: speed and logits.")
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL", help="neuron-split or stock GGUF")
    parser.add_argument("--stock", type=Path, help="llama.cpp's file, if not made from MODEL (one MODEL only)")
    parser.add_argument("--twins", type=Path, help="folder for files made here; default: beside MODEL")
    parser.add_argument("--llama-bin", type=Path, help=f"folder with llama-bench; default {DEFAULT_LLAMA}/bin, PATH")
    parser.add_argument("--llama-lib", type=Path, help="folder with libllama; default: that of --llama-bin")
    parser.add_argument("--llama-bindings", type=Path, help="folder with llama-cpp-python's llama_cpp")
    parser.add_argument("--quality-baseline", type=Path, help="folder with another build's libllama")
    parser.add_argument("--threads", type=numbers, default=default.threads, help="as in 1,2")
    parser.add_argument("--prompt-tokens", type=int, default=default.prompt_tokens)
    parser.add_argument("--gen-tokens", type=int, default=default.gen_tokens)
    parser.add_argument("--reps", type=int, default=default.reps, help="clean rounds wanted; 0: no speed")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=default.modes,
                        help="as in dense,exact,predict")
    parser.add_argument("--quality-tokens", type=int, default=default.quality_tokens, help="0: no quality")
    parser.add_argument("--text", default=default.text, help="file to take tokens from, or `random` for random ids")
    parser.add_argument("--noise", type=float, default=default.noise, help="cores others may use in a clean burst")
    parser.add_argument("--wait", type=float, default=default.wait, help="seconds to wait for quiet before a burst")
    parser.add_argument("--timeout", type=float, default=default.timeout, help="seconds for one burst")
    parser.add_argument("-o", "--out", type=Path, help="JSON with every burst")
    args = parser.parse_args()
    if args.stock and len(args.models) > 1:
        parser.error("--stock goes with one MODEL")
    return args


def main() -> int:
    args = parse_args()
    common = {
        name: getattr(args, name)
        for name in ("threads", "prompt_tokens", "gen_tokens", "reps", "modes", "quality_tokens", "noise", "wait",
                     "timeout")
    }  # fmt: skip
    text = None if str(args.text) == "random" else Path(args.text)
    results = []
    try:
        for model in args.models:
            settings = Settings(text=text, baseline_lib=args.quality_baseline, **common, **find_llama(args))
            results.append(compare(settings, model, args.stock, args.twins or model.parent))
            print(report(results[-1]), flush=True)
    except (HotcoldError, OSError) as error:
        say(f"compare_llama_cpp: {error}")
        return 1
    finally:
        if args.out and results:
            args.out.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
