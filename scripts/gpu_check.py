"""Is hotcold right and fast on this machine's GPU? One command, ten minutes.

In: a machine with an NVIDIA GPU. Out: a folder with report.md, result.json, speed.svg, logs; a short table on stdout.
Next: gpu_checks/, a module per part; `benchmarks.py --write` puts into BENCHMARKS.md what --keep keeps.

    pip install -e '.[gpu,report]' pytest       # for CUDA 13: '.[gpu-cuda13,report]'
    python scripts/gpu_check.py
    python scripts/gpu_check.py --llama-bin ~/llama.cpp/build/bin --shape llama-7b --vram-budgets 2GiB,4GiB
    python scripts/gpu_check.py --device sim --minutes 2      # a dry run without a GPU: the emulated device, tiny sizes

Packages: hotcold's own, those of its extra `gpu` (cupy-cuda12x or cupy-cuda13x, never both, nvidia-cuda-nvrtc,
nvidia-cuda-runtime, nvidia-cublas), pytest, whose cases are run, and for the picture matplotlib (`report`). With
--device sim a C++ compiler in the place of the GPU's.

Models are made in ~/.cache/hotcold/gpu-check, up to 9 GB.

Parts: environment; every kernel against NumPy; every plan, executor and format against the CPU's engine; latencies and
bandwidths; tokens per second over budgets of VRAM, against stock llama.cpp if --llama-bin names a CUDA build. Each has
a share of the time, what does not fit is left out and told. Exit status: 0, 1 where something is wrong (in a kernel or
a plan), 2 where there is no GPU or an option is wrong, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]  # the parts import both by plain names

from comparison.plain import plain  # noqa: E402
from comparison.settings import say  # noqa: E402
from gpu_checks.boxed import Outcome, run_part  # noqa: E402
from gpu_checks.page import keep  # noqa: E402
from gpu_checks.plot import plot  # noqa: E402
from gpu_checks.prepare import Preparation, default_models  # noqa: E402
from gpu_checks.report import card_name, failures, kernel_rows, report, short_table  # noqa: E402
from gpu_checks.settings import CHECKOUT, PARTS, Part, Settings  # noqa: E402
from synthetic.shapes import SHAPES, TYPES  # noqa: E402

from hotcold.placement.budget import parse_size  # noqa: E402
from hotcold.runtime.arguments import count  # noqa: E402
from hotcold.runtime.errors import HotcoldError  # noqa: E402
from hotcold.runtime.gpu.placement import TYPES as GPU_TYPES  # noqa: E402

NO_GPU = 2
RESULTS = HERE / "benchmarking" / "results"
FIRST_LOOK_S = 60.0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check hotcold on this machine's GPU: right, and how fast.")
    parser.add_argument("--device", choices=["gpu", "sim"], default="gpu", help="sim: a dry run on the emulated device")
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything (default 10)")
    parser.add_argument(
        "--parts",
        type=lambda text: tuple(text.split(",")),
        default=tuple(p.name for p in PARTS),
        help=f"of {','.join(p.name for p in PARTS)}",
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="only items in whose names it is found")
    parser.add_argument("-o", "--out", type=Path, help="folder; default .benchmarks/gpu-check-DATE")
    parser.add_argument("--keep", action="store_true", help="keep the result for BENCHMARKS.md, in the repository")
    group = parser.add_argument_group("tokens per second")
    group.add_argument(
        "--shape",
        choices=["auto", *SHAPES],
        default="auto",
        help="of a synthetic model made now (default: the largest that this machine makes in time)",
    )
    group.add_argument("--type", choices=[t for t in TYPES if t in GPU_TYPES.values()], default="q4_0")
    group.add_argument("--model", type=Path, help="this file in its place")
    group.add_argument("--stock", type=Path, help="the same model for llama.cpp; goes with --model")
    group.add_argument("--models", type=Path, default=default_models(), help=f"folder; default {default_models()}")
    group.add_argument("--llama-bin", type=Path, metavar="DIR", help="folder with llama-bench of a CUDA build")
    group.add_argument(
        "--vram-budgets",
        type=budgets,
        default=(),
        metavar="SIZE,…",
        help="default: quarters of what the whole model takes",
    )
    group.add_argument("--threads", type=count, default=0, help="CPU threads; default: what the machine gives")
    group.add_argument("--prompt", type=count, help="tokens (default 256)")
    group.add_argument("--gen", type=count, help="tokens (default 48)")
    group.add_argument("--rounds", type=count, help="at most (default 5)")
    args = parser.parse_args()
    unknown = set(args.parts) - {part.name for part in PARTS}
    if unknown:
        parser.error(f"--parts {','.join(sorted(unknown))}: there are {','.join(part.name for part in PARTS)}")
    try:
        re.compile(args.only)
    except re.error as error:
        parser.error(f"--only {args.only}: not a regular expression: {error}")
    if not args.minutes > 0:
        parser.error(f"--minutes {args.minutes}: must be above 0")
    if args.keep and args.device == "sim":
        parser.error("--keep: a dry run has no figures to keep")
    if args.stock and not args.model:
        parser.error("--stock goes with --model")
    if args.llama_bin and not (args.llama_bin / "llama-bench").exists():
        parser.error(f"--llama-bin {args.llama_bin}: no llama-bench in it")
    if args.llama_bin and args.model and not args.stock:
        parser.error("--llama-bin with --model: name the same model for llama.cpp with --stock")
    for path in (args.model, args.stock):
        if path and not path.exists():
            parser.error(f"{path}: no such file")
    return args


def budgets(text: str) -> tuple[int, ...]:
    try:
        return tuple(parse_size(word) for word in text.split(","))
    except HotcoldError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def settings_of(args: argparse.Namespace) -> Settings:
    out = args.out or CHECKOUT / ".benchmarks" / time.strftime("gpu-check-%Y%m%d-%H%M%S")
    sim = args.device == "sim"
    few = {"prompt": args.prompt or (16 if sim else 256), "gen": args.gen or (4 if sim else 48)}
    return Settings(
        device=args.device, out=out.resolve(), models=args.models.resolve(), minutes=args.minutes, parts=args.parts,
        only=args.only, shape=args.shape, kind=args.type, model=str(args.model.resolve()) if args.model else "",
        stock=str(args.stock.resolve()) if args.stock else "", made=not args.model,
        llama_bench=str((args.llama_bin / "llama-bench").resolve()) if args.llama_bin else "",
        budgets=args.vram_budgets, threads=args.threads, rounds=args.rounds or (1 if sim else 5), **few,
    )  # fmt: skip


class Check:
    """One run: its outcomes are written after every part, so that a run that ends early leaves what it has."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.began = settings, time.monotonic()
        self.outcomes: list[tuple[Part, Outcome]] = []
        self.preparation = Preparation(settings)
        self.date = time.strftime("%Y-%m-%d %H:%M")

    def run(self) -> int:
        """The exit status."""
        parts = [part for part in PARTS if part.name in self.settings.parts]
        if self.settings.device == "gpu":
            settings = dataclasses.replace(self.settings, only="^card$")
            card = run_part(PARTS[0], settings, self.began + FIRST_LOOK_S, lambda line: None).get("card")
            if card.get("none"):
                say(f"gpu_check: {card['note']}")
                return NO_GPU
        self.preparation.start()
        used, shares = 0.0, sum(part.share for part in parts)
        try:
            for part in parts:
                used += part.share / shares
                deadline = self.began + 60 * self.settings.minutes * used
                settings = self.ready(part, deadline)
                say(f"{part.title}: until {60 * self.settings.minutes * used:.0f} s after the start")
                self.outcomes.append((part, run_part(part, settings, deadline, say)))
                self.write()
        finally:
            self.preparation.stop()
        result = self.write()
        print(short_table(result))
        print(f"report, JSON, logs: {self.settings.out}")
        return int(bool(failures(result)))

    def ready(self, part: Part, deadline: float) -> Settings:
        """Wait for what a part needs; figures also need a machine with nothing else to do."""
        left = max(0.0, deadline - time.monotonic())
        if part.name == "plans":
            self.preparation.compiled.wait(left)
        if part.name in ("latencies", "speed"):
            self.preparation.made.wait(left / 2)
        if part.name != "speed":
            return self.settings
        model, stock = self.preparation.model()
        if not model:
            say(self.preparation.problem)
        return dataclasses.replace(self.settings, model=model, stock=stock)

    def result(self) -> dict[str, Any]:
        parts = [
            {"name": part.name, "title": part.title, "correctness": part.correctness, "seconds": outcome.seconds,
             "items": outcome.items, "left_out": outcome.left_out}
            for part, outcome in self.outcomes
        ]  # fmt: skip
        kernels = next((outcome.items for part, outcome in self.outcomes if part.name == "kernels"), [])
        return dict(plain({
            "date": self.date, "seconds": time.monotonic() - self.began, "parts": parts,
            "settings": json.loads(self.settings.to_json()), "kernels": kernel_rows(kernels),
        }))  # fmt: skip

    def write(self) -> dict[str, Any]:
        result, out = self.result(), self.settings.out
        out.mkdir(parents=True, exist_ok=True)
        (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
        (out / "report.md").write_text(report(result))
        try:
            plot(result, out / "speed.svg")
        except HotcoldError as error:
            say(f"no plot: {error}")
        return result


def main() -> int:
    args = parse_args()
    check = Check(settings_of(args))
    try:
        status = check.run()
        if args.keep and check.outcomes:
            say(f"kept in {keep(check.result(), RESULTS)}")
        return status
    except KeyboardInterrupt:
        if check.outcomes:
            print(short_table(check.write()))
        say(f"gpu_check: interrupted; {check.settings.out} holds what was done on {card_name(check.result())}")
        return 130
    except OSError as error:
        say(f"gpu_check: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
