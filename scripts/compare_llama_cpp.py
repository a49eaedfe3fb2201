"""hotcold against stock llama.cpp: same machine, same bits, same threads, same token ids.

In: a model (neuron-split or stock GGUF) and a built llama.cpp. Out: a Markdown table on stdout, JSON with -o.
Next: engine_worker.py (our runs), stock_logits.py (llama.cpp's logits), bursts.py (measuring a process).

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
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from bursts import Burst, machine_facts, run_burst, wait_for_quiet

from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.schema import KEY_ACTIVATION, KEY_VERSION
from hotcold.runtime.tokenizer import Tokenizer

SCRIPTS = Path(__file__).resolve().parent
DEFAULT_LLAMA = Path.home() / ".cache" / "hotcold" / "llama.cpp"
RELU_AS_SILU = 10  # gate * 2^10: SiLU becomes ReLU to within a few 1e-4 in F16
STOCK = "llama.cpp"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass
class Twins:
    """The two files that are compared, and what a reader must know of how they came about."""

    ours: Path
    stock: Path
    scaled: bool  # llama.cpp's file holds other numbers: gates scaled so that SiLU comes close to ReLU
    notes: list[str]


@dataclass
class Round:
    """One turn of everybody: label -> burst, and label -> {"pp256": tok/s, "tg64": tok/s}."""

    bursts: dict[str, Burst] = field(default_factory=dict)
    speeds: dict[str, dict[str, float]] = field(default_factory=dict)


# --- the two files ---------------------------------------------------------------------------------------------------


def convert(source: Path, out: Path, *options: str) -> None:
    """`hotcold convert`, skipped when `out` is newer than `source`. Raises HotcoldError."""
    if out.exists() and out.stat().st_mtime > source.stat().st_mtime:
        return
    command = [str(Path(sys.executable).with_name("hotcold")), "convert", str(source), *options, "-o", str(out)]
    say("making the twin: " + " ".join(command))
    if subprocess.run(command, stdout=sys.stderr).returncode:
        raise HotcoldError(f"{out}: hotcold convert failed, see above")


def make_twins(model: Path, stock: Path | None, folder: Path) -> Twins:
    """Both forms of the model. A ReLU model that stock llama.cpp would run as SiLU gets its gates scaled."""
    with open_gguf(model) as file:
        split = KEY_VERSION in file.metadata
        relu = file.get(KEY_ACTIVATION) == "relu" and file.get("general.architecture") == "llama"
    notes = []
    ours = model
    if not split:
        ours = folder / f"{model.stem}.hotcold.gguf"
        convert(model, ours)
    if stock is None:
        stock = model
        if relu:
            stock = folder / f"{model.stem}.relu-as-silu.gguf"
            convert(ours, stock, "--to-stock", "--relu-as-silu", str(RELU_AS_SILU))
        elif split:
            stock = folder / f"{model.stem}.stock.gguf"
            convert(ours, stock, "--to-stock")
    if relu:
        notes.append(f"llama.cpp has no ReLU for this architecture: its file is `{stock.name}`, gates scaled so that "
                     "SiLU comes close to ReLU.")  # fmt: skip
    notes.append(
        "Quantized down matrices have their blocks along the other axis in the neuron-split file, so part of its "
        "difference in quality is that step; F16 has none of it, nor has the row that runs on llama.cpp's own file."
    )
    return Twins(ours, stock, relu, notes)


# --- speed -----------------------------------------------------------------------------------------------------------


def stock_command(args: argparse.Namespace, twins: Twins, threads: int) -> list[str]:
    return [
        str(args.llama_bench), "-m", str(twins.stock), "-p", str(args.prompt_tokens), "-n", str(args.gen_tokens),
        "-t", str(threads), "-r", "1", "-ngl", "0", "-o", "jsonl",
    ]  # fmt: skip


def our_command(args: argparse.Namespace, twins: Twins, threads: int, mode: str) -> list[str]:
    return [
        sys.executable, str(SCRIPTS / "engine_worker.py"), "bench", str(twins.ours), "-p", str(args.prompt_tokens),
        "-n", str(args.gen_tokens), "-t", str(threads), "--sparsity", mode,
    ]  # fmt: skip


def parse_bench(output: str) -> tuple[dict[str, float], dict[str, Any]]:
    """jsonl of llama-bench or engine_worker -> ({"pp256": tok/s, …}, the last line with everything)."""
    speeds, last = {}, {}
    for line in output.splitlines():
        if line.startswith("{"):
            last = json.loads(line)
            test = f"pp{last['n_prompt']}" if last["n_prompt"] else f"tg{last['n_gen']}"
            speeds[test] = last["samples_ts"][0]
    return speeds, last


def compare_speed(args: argparse.Namespace, twins: Twins, threads: int) -> tuple[list[Round], dict[str, Any]]:
    """Rounds of bursts until every mode has `reps` clean pairs, or three times as many rounds have passed."""
    players: dict[str, tuple[list[str], dict[str, str]]] = {}
    if args.llama_bench:
        players[STOCK] = (stock_command(args, twins, threads), {"OMP_PROC_BIND": "true"})
    for mode in args.modes:
        players[mode] = (our_command(args, twins, threads, mode), {})
        # Outside the measurement: kernels compile once per machine, and the file comes into memory.
        first = run_burst(players[mode][0], timeout=args.timeout)
        if first.status:
            raise HotcoldError(f"{mode}, {threads} threads: {first.errors or first.status}\n  {first.command}")
    rounds: list[Round] = []
    seen: dict[str, Any] = {}
    while len(rounds) < 3 * args.reps and min(clean_count(rounds, m, args) for m in args.modes) < args.reps:
        this = Round()
        names = list(players) if len(rounds) % 2 == 0 else list(players)[::-1]
        for name in names:
            wait_for_quiet(args.noise, args.wait)
            command, env = players[name]
            burst = run_burst(command, env, timeout=args.timeout)
            this.bursts[name] = burst
            if burst.status:
                say(f"{name}: ended with status {burst.status}: {burst.errors}")
            this.speeds[name], line = parse_bench(burst.output) if burst.status == 0 else ({}, {})
            seen[name] = line or seen.get(name, {})
            flag = "  (others were busy)" if burst.others > args.noise else ""
            figures = "  ".join(f"{test} {speed:.2f}" for test, speed in this.speeds[name].items())
            say(f"{threads} threads  round {len(rounds) + 1}  {name:10} {figures}  others {burst.others:.2f}{flag}")
        rounds.append(this)
    return rounds, seen


def clean(this: Round, mode: str, args: argparse.Namespace) -> bool:
    names = [mode, STOCK] if args.llama_bench else [mode]
    return all(this.bursts[n].status == 0 and this.bursts[n].others <= args.noise for n in names)


def clean_count(rounds: list[Round], mode: str, args: argparse.Namespace) -> int:
    return sum(clean(this, mode, args) for this in rounds)


def spread(values: list[float], digits: int = 2) -> str:
    """Median with the extremes: `20.1 (19.8-20.3)`."""
    if not values:
        return "none clean"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def speed_rows(rounds: list[Round], seen: dict[str, Any], threads: int, args: argparse.Namespace) -> list[dict]:
    """One row per test and mode: medians over the clean rounds."""
    rows = []
    for test in (f"pp{args.prompt_tokens}", f"tg{args.gen_tokens}"):
        for mode in args.modes:
            good = [r.speeds for r in rounds if clean(r, mode, args)]
            ours = [s[mode][test] for s in good if test in s[mode]]
            stock = [s[STOCK][test] for s in good] if args.llama_bench else []
            ratios = [a / b for a, b in zip(ours, stock, strict=False)]
            share = seen.get(mode, {}).get("share_computed")
            rows.append({
                "threads": threads, "test": test, "mode": mode, "ours": ours, "stock": stock, "ratio": ratios,
                "ratio_median": statistics.median(ratios) if ratios else None,
                "share_computed": share if test.startswith("tg") else None,
                "clean": f"{len(good)}/{len(rounds)}",
            })  # fmt: skip
    return rows


# --- quality ---------------------------------------------------------------------------------------------------------


def token_ids(args: argparse.Namespace, twins: Twins) -> np.ndarray:
    """int32 [n]: the comparison text by the model's own tokenizer; random ids when --text is `random`."""
    if str(args.text) == "random":
        with open_gguf(twins.ours) as file:
            n_vocab = file.tensors["token_embd.weight"].shape[0]
        return np.random.default_rng(0).integers(0, n_vocab, args.quality_tokens).astype(np.int32)
    ids = Tokenizer.from_gguf(twins.ours).encode(args.text.read_text())
    return np.array(ids[: args.quality_tokens], np.int32)


def log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def differences(ours: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Of two float [n, n_vocab] logits: max |Δ|, relative L2, top-1 agreement, KL(reference || ours) mean and max."""
    a, b = ours.astype(np.float64), reference.astype(np.float64)
    log_a, log_b = log_softmax(a), log_softmax(b)
    kl = (np.exp(log_b) * (log_b - log_a)).sum(1)
    return {
        "max_abs": float(np.abs(a - b).max()),
        "relative_l2": float(np.linalg.norm(a - b) / np.linalg.norm(b)),
        "top1": float((a.argmax(1) == b.argmax(1)).mean()),
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
    }


def compare_quality(args: argparse.Namespace, twins: Twins, build: dict[str, str]) -> list[dict[str, Any]]:
    """One row per comparison. Fills `build` with llama.cpp's own line about itself."""
    threads = max(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        ids_file = Path(folder) / "ids.npy"
        ids = token_ids(args, twins)
        np.save(ids_file, ids)

        def logits(label: str, command: Callable[[str], list[str]]) -> np.ndarray | None:
            out = str(Path(folder) / "out.npy")
            burst = run_burst(command(out), timeout=args.timeout)
            if burst.status:
                say(f"no logits of {label}: {burst.errors or burst.status}\n  {burst.command}")
                return None
            if label.startswith(STOCK):
                build[label] = burst.output.strip().splitlines()[-1]
            return np.load(out)

        def stock(label: str, lib: Path, *options: str) -> np.ndarray | None:
            bindings = ["--bindings", str(args.llama_bindings)] if args.llama_bindings else []
            return logits(label, lambda out: [
                sys.executable, str(SCRIPTS / "stock_logits.py"), str(twins.stock), str(ids_file), out,
                "--lib", str(lib), "--threads", str(threads), *bindings, *options,
            ])  # fmt: skip

        reference = stock(STOCK, args.llama_lib)
        if reference is None:
            return []
        def ours(mode: str, file: Path) -> np.ndarray | None:
            return logits(mode, lambda out: [
                sys.executable, str(SCRIPTS / "engine_worker.py"), "logits", str(file), str(ids_file), out,
                "-t", str(threads), "--sparsity", mode,
            ])  # fmt: skip

        candidates = {f"hotcold {mode}": ours(mode, twins.ours) for mode in args.modes}
        if not twins.scaled:
            candidates["hotcold dense, on llama.cpp's file"] = ours("dense", twins.stock)
        candidates[f"{STOCK}, one token at a time"] = stock(f"{STOCK} steps", args.llama_lib, "--step")
        if args.quality_baseline:
            candidates[f"{STOCK}, the other build"] = stock(f"{STOCK} other build", args.quality_baseline)
        return [
            {"who": who, "tokens": len(ids), **differences(values, reference)}
            for who, values in candidates.items()
            if values is not None
        ]


# --- report ----------------------------------------------------------------------------------------------------------


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def versions() -> dict[str, str]:
    packages = ("hotcold", "numpy", "numba", "llvmlite")
    found = {name: importlib.metadata.version(name) for name in packages}
    git = shutil.which("git")
    if git:
        command = [git, "-C", str(SCRIPTS), "describe", "--always", "--dirty"]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        found["hotcold"] += f" ({commit})" if commit else ""
    return {"Python": platform.python_version(), **found}


def report(result: dict[str, Any]) -> str:
    """The whole comparison as Markdown."""
    parts = [f"## {result['model']}", ""]
    facts = {**result["machine"], "date": result["date"], "load average at the end": result["load_at_end"]}
    parts += [f"- {name}: {value}" for name, value in facts.items()]
    parts.append("- " + ", ".join(f"{name} {value}" for name, value in result["versions"].items()))
    parts += [f"- {label}: {line}" for label, line in result["llama_cpp"].items()]
    parts += [f"- {note}" for note in result["notes"]]
    if result["speed"]:
        parts += ["", "Speed in tokens per second, median (lowest-highest) of the clean rounds:", ""]
        parts.append(table(
            ["threads", "test", "mode", "hotcold", STOCK, "ratio", "neurons computed", "clean rounds"],
            [[str(r["threads"]), r["test"], r["mode"], spread(r["ours"]), spread(r["stock"]) if r["stock"] else "",
              spread(r["ratio"]) if r["ratio"] else "",
              f"{r['share_computed']:.0%}" if r["share_computed"] is not None else "", r["clean"]]
             for r in result["speed"]],
        ))  # fmt: skip
        parts += ["", "Commands, taking turns:", "", "```", *result["commands"], "```"]
    if result["quality"]:
        parts += ["", f"Logits of {result['quality'][0]['tokens']} tokens against {STOCK} in one batch:", ""]
        parts.append(table(
            ["who", "max abs difference", "relative L2", "same top token", "KL mean", "KL max"],
            [[q["who"], f"{q['max_abs']:.3g}", f"{q['relative_l2']:.2e}", f"{q['top1']:.1%}", f"{q['kl_mean']:.2e}",
              f"{q['kl_max']:.2e}"] for q in result["quality"]],
        ))  # fmt: skip
    return "\n".join(parts) + "\n"


def compare(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    twins = make_twins(model, args.stock, args.twins or model.parent)
    result: dict[str, Any] = {
        "model": model.name, "files": {"ours": str(twins.ours), "stock": str(twins.stock)},
        "date": time.strftime("%Y-%m-%d %H:%M"), "machine": machine_facts(), "versions": versions(),
        "notes": twins.notes + args.notes, "llama_cpp": {}, "speed": [], "rounds": [], "commands": [], "quality": [],
    }  # fmt: skip
    if args.reps:
        for threads in args.threads:
            rounds, seen = compare_speed(args, twins, threads)
            result["speed"] += speed_rows(rounds, seen, threads, args)
            result["rounds"] += [dataclasses.asdict(r) for r in rounds]
            result["commands"] += [burst.command for burst in rounds[0].bursts.values()]
            if line := seen.get(STOCK):
                flash = {-1: "auto", 0: "off", 1: "on"}.get(line.get("flash_attn"), line.get("flash_attn"))
                result["llama_cpp"]["llama-bench"] = (
                    f"build {line['build_commit']} ({line['build_number']}), repack {line.get('repack')}, "
                    f"KV {line['type_k']}/{line['type_v']}, flash attention {flash}"
                )
    if args.llama_lib and args.quality_tokens:
        result["quality"] = compare_quality(args, twins, result["llama_cpp"])
    result["load_at_end"] = machine_facts()["load average"]
    return result


def find_llama(args: argparse.Namespace) -> None:
    """Settle llama_bench, llama_lib and llama_bindings; what is missing is explained in args.notes."""
    args.notes = []
    folder = args.llama_bin or DEFAULT_LLAMA / "bin"
    args.llama_bench = folder / "llama-bench"
    if not args.llama_bench.exists():
        found = shutil.which("llama-bench") if args.llama_bin is None else None
        args.llama_bench = Path(found) if found else None
        if found is None:
            args.notes.append(f"No llama-bench in {folder}: only our speed was measured. scripts/get_llama_cpp.sh "
                              "builds it; --llama-bin names its folder.")  # fmt: skip
    args.llama_lib = args.llama_lib or folder
    if not any(args.llama_lib.glob("libllama.*")):
        args.notes.append(f"No libllama in {args.llama_lib}: logits were not compared; --llama-lib names its folder.")
        args.llama_lib = None
    if args.llama_bindings is None and (DEFAULT_LLAMA / "llama_cpp").exists():
        args.llama_bindings = DEFAULT_LLAMA / "llama_cpp"
    for note in args.notes:
        say(note)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="hotcold against stock llama.cpp: speed and logits.")
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL", help="neuron-split or stock GGUF")
    parser.add_argument("--stock", type=Path, help="llama.cpp's file, if not made from MODEL (one MODEL only)")
    parser.add_argument("--twins", type=Path, help="folder for files made here; default: beside MODEL")
    parser.add_argument("--llama-bin", type=Path, help=f"folder with llama-bench; default {DEFAULT_LLAMA}/bin, PATH")
    parser.add_argument("--llama-lib", type=Path, help="folder with libllama; default: that of --llama-bin")
    parser.add_argument("--llama-bindings", type=Path, help="folder with llama-cpp-python's llama_cpp")
    parser.add_argument("--quality-baseline", type=Path, help="folder with another build's libllama")
    parser.add_argument("--threads", type=numbers, default=[1], help="as in 1,2")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--gen-tokens", type=int, default=64)
    parser.add_argument("--reps", type=int, default=5, help="clean rounds wanted; 0: no speed")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["dense"], help="as in dense,exact")
    parser.add_argument("--quality-tokens", type=int, default=512, help="0: no quality")
    parser.add_argument("--text", type=Path, default=SCRIPTS / "comparison_text.txt", help="file, or `random` ids")
    parser.add_argument("--noise", type=float, default=0.15, help="cores others may use during a clean burst")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to wait for a quiet machine before a burst")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one burst")
    parser.add_argument("-o", "--out", type=Path, help="JSON with every burst")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    find_llama(args)
    results = []
    try:
        for model in args.models:
            results.append(compare(args, model))
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
