"""`hotcold convert`: any supported model to a neuron-split GGUF, or back to a stock one.

In: a Hugging Face folder or a GGUF, and options. Out: a GGUF under its final name, complete, or none.
Next: gguf_source.py or families/ (reading), neuron_split.py or stock.py (layout), writer.py (writing);
placement/pipeline.py with --calibrate.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from hotcold.convert.gguf_source import load_gguf
from hotcold.convert.model import StockModel
from hotcold.convert.neuron_split import split_neurons
from hotcold.convert.outtype import OUTTYPES
from hotcold.convert.precision import Report
from hotcold.convert.stock import to_stock
from hotcold.convert.target import Target
from hotcold.convert.writer import check_name, write_target
from hotcold.runtime import schema
from hotcold.runtime.arguments import count
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import GGUFFile, open_gguf, safe_text

if TYPE_CHECKING:
    from hotcold.placement.pipeline import Calibration

PREDICTORS = ("lowrank", "mlp", "signbit", "none")  # of --calibrate; the first is the default


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `hotcold convert`."""
    parser.add_argument("src", metavar="SRC", type=Path,
                        help="Hugging Face folder (config.json, *.safetensors, tokenizer) or a GGUF file")
    parser.add_argument("-o", "--outfile", metavar="OUT", type=Path,
                        help="file to write; {ftype} is replaced by the type (default: derived from SRC's name)")
    parser.add_argument("--outtype", choices=[*OUTTYPES, "auto"], default="auto",
                        help="type of the matrices; auto keeps the source's where that loses nothing (default)")
    parser.add_argument("--dry-run", action="store_true", help="show what would be written, write nothing")
    parser.add_argument("--verbose", action="store_true", help="list every tensor: name, source type, target, shape")
    parser.add_argument("--to-stock", action="store_true",
                        help="write a stock GGUF (llama.cpp's layout), from a neuron-split or any other source")
    parser.add_argument("--relu-as-silu", metavar="K", type=int,
                        help="with --to-stock, ReLU models: scale weights by powers of 2^K so that llama.cpp, which "
                             "runs them with SiLU, computes ReLU (8 to 10)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--name", help="general.name to write (default: the source's)")
    parser.add_argument("--no-vocab", action="store_true",
                        help="Hugging Face folder without tokenizer files: only token ids can be used then")
    parser.add_argument("--ignore-unknown-keys", action="store_true",
                        help="model keys of config.json or the GGUF that hotcold does not know: list them instead of "
                             "refusing")
    parser.add_argument("--calibrate", action="store_true",
                        help="also count over a text how often neurons fire, sort them by it and train predictors; "
                             "ReLU models only")
    parser.add_argument("--calibrate-text", metavar="FILE", action="append", default=[], type=Path,
                        help="with --calibrate: text to count over; may be given several times (default: one that "
                             "comes with hotcold)")
    parser.add_argument("--calibrate-tokens", metavar="N", type=count,
                        help="with --calibrate: tokens of the text to count over (default 100000)")
    parser.add_argument("--predictor", choices=PREDICTORS,
                        help="with --calibrate: predictors to train, for --sparsity predict (default lowrank; a layer "
                             "that they do not help goes without)")


def run(args: argparse.Namespace) -> int:
    """Convert as the arguments say; returns the exit status. Raises HotcoldError with one line for the user."""
    console = Console(stderr=True, highlight=False)
    report = Report()
    if args.relu_as_silu is not None and not args.to_stock:
        raise HotcoldError("--relu-as-silu needs --to-stock: it prepares a file for stock llama.cpp")
    calibration = _calibration(args)
    with _opened(args, report) as model:
        if calibration:
            _check_sparse(args, model)
        target = _plan(args, model, report)
        out = output_path(args, target)
        if _same_file(out, args.src):
            raise HotcoldError(f"{out}: is the source: choose another name with -o")
        if args.verbose:
            _list_tensors(target, report)
        _summary(console, args, model, target, out)
        if args.dry_run:
            _say_notes(console, report)
            console.print("dry run: nothing written")
            return 0
        check_name(out, args.force)
        if not out.absolute().parent.is_dir():
            raise HotcoldError(f"{out.absolute().parent}: no such folder")
        if calibration:
            size = calibration.make(lambda path: _written(target, path, model.release, False, console),
                                    target.n_bytes, out, args.force, console)
        else:
            size = _written(target, out, model.release, args.force, console)
    _say_notes(console, report)
    _say_losses(console, report, args.verbose)
    console.print(f"wrote {escape(str(out))} ({size / 1e6:.1f} MB)")
    return 0


def _written(target: Target, out: Path, release: Callable[[], None], force: bool, console: Console) -> int:
    with writing_progress(console, target.n_bytes) as progress:
        return write_target(target, out, progress, release, force)


def _calibration(args: argparse.Namespace) -> Calibration | None:
    """What --calibrate asks for, its text read: before any work."""
    if not args.calibrate:
        for name in ("predictor", "calibrate_tokens", "calibrate_text"):
            if getattr(args, name):
                raise HotcoldError(f"--{name.replace('_', '-')} needs --calibrate: it is about what comes after "
                                   "converting")
        return None
    if args.to_stock:
        raise HotcoldError("--calibrate is not for --to-stock: a stock file has no place for what it finds")
    # The one place where convert/ calls placement/. It is the command that joins the two, not the converter: nothing
    # else here knows of profiles, and importing hotcold.convert alone stays as light as it was.
    from hotcold.placement.pipeline import read_calibration

    return read_calibration(args.calibrate_text, args.calibrate_tokens, args.predictor or PREDICTORS[0])


def _check_sparse(args: argparse.Namespace, model: StockModel) -> None:
    """Raise HotcoldError, before any work, for a model that --calibrate can do nothing for."""
    if model.activation not in schema.SPARSE_ACTIVATIONS and not any(model.thresholds):
        raise HotcoldError(f"{args.src}: --calibrate: its activation is {model.activation}, so its neurons never "
                           "switch off: make it sparse with hotcold relufy, or convert it and set thresholds with "
                           "hotcold calibrate; then hotcold profile and hotcold place")
    if args.no_vocab or "tokenizer.ggml.model" not in model.metadata:
        raise HotcoldError(f"{args.src}: --calibrate: the model has no vocabulary, so no text can be read with it")


@contextmanager
def _opened(args: argparse.Namespace, report: Report) -> Iterator[StockModel]:
    """The source as a stock model, open as long as the context is."""
    src: Path = args.src
    if src.is_dir():
        from hotcold.convert.families import load_checkpoint

        yield load_checkpoint(src, report, vocab=not args.no_vocab, ignore_unknown=args.ignore_unknown_keys)
        return
    if not src.exists():
        raise HotcoldError(f"{src}: no such file or folder")
    file: GGUFFile = open_gguf(src)
    with file:
        yield load_gguf(file, report, args.ignore_unknown_keys)


def _plan(args: argparse.Namespace, model: StockModel, report: Report) -> Target:
    if args.name:
        from hotcold.convert.model import string

        model.metadata["general.name"] = string(args.name)
    if args.to_stock:
        return to_stock(model, args.outtype, args.relu_as_silu, report)
    if model.source == "neuron-split GGUF":
        raise HotcoldError(f"{args.src}: is neuron-split already: run it as it is, or use --to-stock to go back")
    return split_neurons(model, args.outtype, report)


def output_path(args: argparse.Namespace, target: Target) -> Path:
    """-o, with {ftype} filled in, or a name beside (GGUF) or inside (folder) the source."""
    ftype = target.main_type().name
    if args.outfile is not None:
        out = Path(str(args.outfile).replace("{ftype}", ftype))
        if os.path.isdir(out):  # unlike Path.is_dir, no error for impossible names
            raise HotcoldError(f"{out}: is a folder: give a file name, for example -o {out / 'model.gguf'}")
        return out
    src: Path = args.src
    kind = "stock" if args.to_stock else "hotcold"
    if src.is_dir():
        return src / f"{src.resolve().name}-{ftype}.{kind}.gguf"
    stem = re.sub(r"(\.hotcold|\.stock)?\.gguf$", "", src.name)
    return src.with_name(f"{stem}.{kind}.gguf")


def _same_file(a: Path, b: Path) -> bool:
    try:
        return a.samefile(b)
    except OSError:  # one of them is not there, or its name is impossible
        return False


def _list_tensors(target: Target, report: Report) -> None:
    """One line per tensor on stdout, as llama.cpp's converter has it, and what was left out."""
    for t in target.tensors:
        shape = "{" + ", ".join(map(str, reversed(t.shape))) + "}"
        print(f"{t.name}, {t.origin} --> {t.qtype.name}, shape = {shape}")
    for name in report.dropped:
        print(f"{safe_text(name)}, left out: recomputed by the runtime")
    sys.stdout.flush()


def _summary(console: Console, args: argparse.Namespace, model: StockModel, target: Target, out: Path) -> None:
    threshold = f", threshold {max(model.thresholds):g}" if any(model.thresholds) else ""
    n_ff = f"{model.n_ff[0]}" if len(set(model.n_ff)) == 1 else f"{min(model.n_ff)}..{max(model.n_ff)}"
    counts = ", ".join(f"{n} {name}" for name, n in sorted(target.type_counts().items()))
    gate = "gated" if model.gated else "not gated"
    lines = [
        f"source       {model.source}, architecture {model.arch}, {target.n_parameters / 1e6:.1f} M parameters",
        f"feed-forward {n_ff} neurons x {model.n_layer} layers, {model.activation}{threshold}, {gate}",
        f"tensors      {counts}{model.auto_reason if args.outtype == 'auto' else ''}",
        f"output       {out} ({target.n_bytes / 1e6:.1f} MB of tensors)",
    ]
    for line in lines:
        console.print(escape(safe_text(line)), soft_wrap=True)


def _say_notes(console: Console, report: Report) -> None:
    notes = list(report.notes)
    if report.outlier_layers:
        layers = ", ".join(map(str, sorted(report.outlier_layers)))
        notes.append(f"auto: but F16 in layers {layers}, whose down matrices have outliers that make Q8_0 too coarse "
                     "(--outtype q8_0: one type everywhere)")
    for note in notes:
        console.print(escape(f"note: {safe_text(note)}"), soft_wrap=True)


def _say_losses(console: Console, report: Report, verbose: bool) -> None:
    """What casting to F16 and quantizing again lost."""
    if report.f16:
        subnormal = sum(loss.subnormal for loss in report.f16.values())
        flushed = sum(loss.flushed for loss in report.f16.values())
        console.print(f"F16: no overflow; {subnormal} values are subnormal (fewer bits), {flushed} became 0, "
                      f"in {len(report.f16)} tensors", soft_wrap=True)
        if verbose:
            for name, loss in report.f16.items():
                console.print(escape(f"  {name}: {loss.subnormal} subnormal, {loss.flushed} became 0"))
    if report.requantized:
        console.print(f"quantized again: relative error {report.total_relative_error():.5f} over "
                      f"{len(report.requantized)} down matrices", soft_wrap=True)
        if verbose:
            for name in report.requantized:
                console.print(escape(f"  {name}: {report.relative_error(name):.5f}"))


@contextmanager
def writing_progress(console: Console, total: int) -> Iterator[Callable[[str, int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
               TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("writing", total=total)

        def advance(name: str, n_bytes: int) -> None:
            bar.update(task, advance=n_bytes, description=escape(name[:32].ljust(32)))

        yield advance
