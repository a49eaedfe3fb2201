"""`hotcold relufy`: a SiLU or GELU model to one whose neurons switch off, without training.

In: a Hugging Face folder or a GGUF with a gated FFN, text. Out: a neuron-split GGUF (or with --to-hf a folder) whose
activation is ReLU, with a few always-on neurons per layer; a table of what it cost. Next: relufy_layers.py (fitting),
relufy_fit.py (the arithmetic), relufy_model.py (the new model); placement/profiling.py finds its hot neurons.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hotcold.convert.checkpoint import Checkpoint, open_checkpoint
from hotcold.convert.gguf_source import load_gguf
from hotcold.convert.main import writing_progress
from hotcold.convert.model import Metadata, StockModel, relufy_metadata
from hotcold.convert.neuron_split import split_neurons
from hotcold.convert.outtype import OUTTYPES
from hotcold.convert.precision import Report
from hotcold.convert.relufy_layers import LayerReport, Relufier, Settings, negative_log_likelihood
from hotcold.convert.relufy_model import Fits, relufied, relufied_tensors
from hotcold.convert.relufy_text import make_contexts
from hotcold.convert.writer import check_name, glob_escape, write_target
from hotcold.runtime import schema
from hotcold.runtime.arguments import count, fraction, whole
from hotcold.runtime.corpus import HELDOUT, Corpus, read_corpus
from hotcold.runtime.engine import Engine
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import open_gguf, safe_text
from hotcold.runtime.kernels import formats
from hotcold.runtime.kl_stats import estimate
from hotcold.runtime.tokenizer import Tokenizer
from hotcold.runtime.trace import Trace

RANK, TOKENS, SEED = 256, 32768, 0
SPARSITY = 0.63  # more or less as many as ReLU alone switches off, but the same in all layers, which costs less
CONTEXT = 512  # tokens of each text the model sees
LEAST_CONTEXTS = 4  # to fit on
HELD_OUT_TOKENS = 8192


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `hotcold relufy`."""
    parser.add_argument("src", metavar="SRC", type=Path, help="Hugging Face folder or GGUF; SiLU or GELU, gated")
    parser.add_argument("-o", "--outfile", metavar="OUT", type=Path, required=True,
                        help="file to write, neuron-split; with --to-hf a folder")
    parser.add_argument("--rank", type=whole, metavar="R",
                        help=f"always-on neurons per layer that repair the rest (default {RANK}, or the model's width "
                             "where that is less)")
    parser.add_argument("--sparsity", type=fraction, default=SPARSITY, metavar="S",
                        help=f"share of each layer's neurons to be off (default {SPARSITY}); more costs quality")
    parser.add_argument("--tokens", type=count, metavar="N",
                        help=f"tokens of text to fit on (default {TOKENS}, or what the text has; at least "
                             f"{LEAST_CONTEXTS * CONTEXT}); {HELD_OUT_TOKENS} others judge")
    parser.add_argument("--text", type=Path, action="append", default=[], metavar="FILE",
                        help="text to fit on; may be given several times (default: one that comes with hotcold)")
    parser.add_argument("--held-out", type=Path, metavar="FILE",
                        help="other text, for perplexity and errors (default: one that comes with hotcold)")
    parser.add_argument("--outtype", choices=[*OUTTYPES, "auto"], default="auto",
                        help="type of the matrices, as for hotcold convert (default auto)")
    parser.add_argument("--to-hf", action="store_true",
                        help="write a Hugging Face folder instead (SRC must be one; types stay)")
    parser.add_argument("-t", "--threads", type=count, metavar="N",
                        help="default: what the machine gives this process")
    parser.add_argument("--seed", type=whole, default=SEED, metavar="N",
                        help=f"which parts of a longer text are taken (default {SEED})")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")


@dataclass
class Source:
    """The model to change: described for writing (`model`), and in a file that the engine runs (`path`)."""

    model: StockModel
    path: Path
    checkpoint: Checkpoint | None
    report: Report


def run(args: argparse.Namespace) -> int:
    """Relufy as the arguments say; returns the exit status. Raises HotcoldError with one line for the user."""
    console = Console(stderr=True, highlight=False)
    began = time.perf_counter()
    _check_output(args)
    text = read_corpus(args.text)
    held_out = read_corpus([args.held_out or HELDOUT])
    with ExitStack() as stack:
        folder = stack.enter_context(scratch(args.outfile))
        source = _open_source(args, folder, console, stack)
        trace = stack.enter_context(Trace.open(source.path, threads=args.threads, n_ctx=CONTEXT))
        contexts, n_held_out = _contexts(args, trace, text, held_out)
        fits = Fits(args.outfile.absolute().parent, trace.config.n_ff, trace.config.n_embd, args.rank)
        stack.callback(fits.close)
        reports, before = _fit(args, trace, contexts, n_held_out, fits, console)
        n_tokens, errors = contexts[:-n_held_out].size, [float(r.error) for r in reports]
        if args.to_hf:
            mark = {"rank": args.rank, "tokens": n_tokens, "error": errors}
            size = _write_folder(args, source, fits, mark, console)
        else:
            model = relufied(source.model, fits, _orders(trace), source.report)
            metadata = relufy_metadata(args.rank, n_tokens, errors)
            size = _write_file(args, model, metadata, source.report, console)
        trace.close()
        after = _perplexity_of_output(args, contexts[-n_held_out:], folder, console)
    _say_result(args, console, reports, before, after, size, time.perf_counter() - began)
    return 0


def _check_output(args: argparse.Namespace) -> None:
    """Before any work: OUT can be made. Raises HotcoldError."""
    src, out = args.src, args.outfile
    if args.to_hf:
        if not src.is_dir():
            raise HotcoldError(f"--to-hf: {safe_text(str(src))} is not a Hugging Face folder: only one can be written "
                               "back as a folder")
        from hotcold.convert.hf_writer import check_folder, files_to_copy, recover

        recover(out)
        check_folder(out, args.force)
        files_to_copy(src)
    elif os.path.isdir(out):
        raise HotcoldError(f"{safe_text(str(out))}: is a folder: give a file name, or --to-hf to write a folder")
    else:
        check_name(out, args.force)
    parent = out.absolute().parent
    if not parent.is_dir():
        raise HotcoldError(f"{safe_text(str(parent))}: no such folder")
    try:
        same = src.samefile(out)
    except OSError:  # one of them is not there, or its name is impossible
        return
    if same:
        raise HotcoldError(f"{safe_text(str(out))}: is the source: choose another name with -o")


@contextmanager
def scratch(out: Path) -> Iterator[Path]:
    """A folder beside `out` for files that the engine runs; what a killed run to the same name left goes, too."""
    parent, name = out.absolute().parent, out.name[:100]
    for path in parent.glob(f".{glob_escape(name)}.*.relufy"):
        number = path.name[len(name) + 2:-len(".relufy")]
        if path.is_dir() and not path.is_symlink() and number.isdecimal() and not psutil.pid_exists(int(number)):
            shutil.rmtree(path, ignore_errors=True)
    folder = parent / f".{name}.{os.getpid()}.relufy"
    shutil.rmtree(folder, ignore_errors=True)  # process numbers come again, in containers soon
    try:
        folder.mkdir()
    except OSError as e:
        raise HotcoldError(f"{safe_text(str(folder))}: cannot be made: {e.strerror or e}") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _open_source(args: argparse.Namespace, folder: Path, console: Console, stack: ExitStack) -> Source:
    """The model, and a file of it that the engine can run: SRC itself, or a temporary one in `folder`."""
    src, report = args.src, Report()
    checkpoint = None
    if src.is_dir():
        from hotcold.convert.families import load_checkpoint

        model, runs = load_checkpoint(src, report), False
        checkpoint = open_checkpoint(src, report) if args.to_hf else None
    else:
        file = stack.enter_context(open_gguf(src))
        model = load_gguf(file, report)
        runs = all(int(info.ggml_type) in formats.NATIVE for info in file.tensors.values() if len(info.shape) > 1)
    _check_model(args, model)
    if args.rank is None:
        args.rank = min(RANK, _width(model))
    if runs:
        return Source(model, src, checkpoint, report)
    path = folder / "source.gguf"
    console.print("converting the source to a file that runs", soft_wrap=True)
    target = split_neurons(model, "auto", Report())
    with writing_progress(console, target.n_bytes) as progress:
        write_target(target, path, progress, model.release)
    return Source(model, path, checkpoint, report)


def _check_model(args: argparse.Namespace, model: StockModel) -> None:
    shown = safe_text(str(args.src))
    if not model.gated:
        raise HotcoldError(f"{shown}: its feed-forward network has no gate ({model.activation}): relufy repairs what "
                           "ReLU changes in gated ones (gate, up and down matrices) only")
    if model.activation in schema.SPARSE_ACTIVATIONS:
        raise HotcoldError(f"{shown}: its activation is {model.activation} already: its neurons switch off as "
                           "they are, use hotcold convert")
    if args.rank is not None and args.rank > _width(model):
        raise HotcoldError(f"--rank {args.rank}: allowed are 0 to {_width(model)}, the model's width")


def _width(model: StockModel) -> int:
    return model.tensors["output_norm.weight"].n_rows


def _contexts(args: argparse.Namespace, trace: Trace, text: Corpus, held_out: Corpus) -> tuple[np.ndarray, int]:
    """i32 [n, length] to fit on and, behind them, held-out ones; how many those are."""
    tokenizer = Tokenizer.from_gguf(trace.engine.file)
    length = min(CONTEXT, trace.engine.n_ctx)
    if args.tokens and args.tokens < LEAST_CONTEXTS * length:
        raise HotcoldError(f"--tokens {args.tokens}: the fit needs at least {LEAST_CONTEXTS} contexts, "
                           f"{LEAST_CONTEXTS * length} tokens")
    fitted = make_contexts(text, tokenizer, length, args.tokens or TOKENS, LEAST_CONTEXTS, args.seed,
                           "the text to fit on")
    if args.tokens and fitted.size < args.tokens // length * length:
        raise HotcoldError(f"the text to fit on is too short: it fills {fitted.size} tokens of contexts, --tokens asks "
                           f"for {args.tokens}: give a longer text or fewer --tokens")
    others = make_contexts(held_out, tokenizer, length, HELD_OUT_TOKENS, 1, args.seed, "the held-out text")
    return np.concatenate([fitted, others]), len(others)


def _fit(args: argparse.Namespace, trace: Trace, contexts: np.ndarray, n_held_out: int, fits: Fits,
         console: Console) -> tuple[list[LayerReport], float]:
    """Fit all layers into `fits`, printing a line for each; also the teacher's perplexity on the held-out text."""
    n_layer, n_fit = trace.config.n_layer, len(contexts) - n_held_out
    console.print(f"fitting {n_layer} layers on {n_fit * contexts.shape[1]} tokens, {n_held_out * contexts.shape[1]} "
                  "others judge; errors are squares, relative to what the layer should add", soft_wrap=True)
    console.print("layer   error of ReLU alone   after the fit   neurons off   with always-on")
    reports = []
    with _progress(console, n_layer * (2 * len(contexts) + n_fit)) as advance:
        relufier = Relufier(trace, contexts, n_held_out, Settings(args.rank, args.sparsity))
        for layer in range(n_layer):
            fits[layer], report = relufier.layer(layer, advance)
            reports.append(report)
            console.print(f"{layer:5d}   {report.naive:19.3f}   {report.error:13.3f}   {report.sparsity:11.1%}   "
                          f"{report.overall:14.1%}")
            trace.engine.file.release_pages()
        with naming(args.src):
            return reports, estimate(relufier.held_out_nll())[0]


@contextmanager
def naming(model: Path) -> Iterator[None]:
    """Errors within begin with the model's name."""
    try:
        yield
    except HotcoldError as e:
        raise HotcoldError(f"{safe_text(str(model))}: {e}") from None


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"),
               TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("fitting", total=total)
        yield lambda n: bar.update(task, advance=n)


def _orders(trace: Trace) -> list[np.ndarray]:
    """Per layer: stored position of the neuron that is i-th in the source."""
    config, file = trace.config, trace.engine.file
    if config.layout == "stock":
        return [np.arange(n) for n in config.n_ff]
    return [np.argsort(file.data(schema.block(layer, schema.FFN_NEURON_ID))) for layer in range(config.n_layer)]


def _write_file(args: argparse.Namespace, model: StockModel, metadata: Metadata, report: Report,
                console: Console) -> int:
    target = split_neurons(model, args.outtype, report)
    target.metadata |= metadata
    with writing_progress(console, target.n_bytes) as progress:
        return write_target(target, args.outfile, progress, model.release, args.force)


def _write_folder(args: argparse.Namespace, source: Source, fits: Fits, mark: dict[str, Any], console: Console) -> int:
    from hotcold.convert.hf_writer import write_folder

    if source.checkpoint is None:
        raise HotcoldError("--to-hf: the source is not a Hugging Face folder")
    tensors = relufied_tensors(source.checkpoint, fits, source.report)
    keys = {"hidden_act": "relu", "intermediate_size": fits.n_ff[0] + fits.rank, "hotcold_relufy": mark}
    kept = sum(s.end - s.begin for name, s in source.checkpoint.stored.items() if name not in tensors)
    with writing_progress(console, kept + sum(t.n_bytes for t in tensors.values())) as progress:
        return write_folder(source.checkpoint, args.outfile, tensors, keys, progress, args.force)


def _perplexity_of_output(args: argparse.Namespace, contexts: np.ndarray, folder: Path, console: Console) -> float:
    """Perplexity of what was written, by the engine that will run it. folder: for a file that runs."""
    path = args.outfile
    if args.to_hf:
        from hotcold.convert.families import load_checkpoint

        path, model = folder / "result.gguf", load_checkpoint(args.outfile, Report())
        target = split_neurons(model, "auto", Report())
        with writing_progress(console, target.n_bytes) as progress:
            write_target(target, path, progress, model.release)
    return perplexity(path, contexts, args.threads, args.outfile)


def perplexity(path: Path, contexts: np.ndarray, threads: int | None, name: Path) -> float:
    """Of all tokens but the first of each context (i32 [n, length]). name: of the model, for errors."""
    nll = []
    with Engine.open(path, threads=threads, n_ctx=contexts.shape[1]) as engine, naming(name):
        for tokens in contexts:
            engine.truncate(0)
            nll.append(negative_log_likelihood(engine.forward(tokens, "all")[:-1], tokens[1:]))
    return estimate(np.concatenate(nll))[0]


def _say_result(args: argparse.Namespace, console: Console, reports: list[LayerReport], before: float, after: float,
                size: int, seconds: float) -> None:
    off, overall = (float(np.mean([getattr(r, name) for r in reports])) for name in ("sparsity", "overall"))
    lines = [
        f"held-out perplexity {before:.2f} before, {after:.2f} after",
        f"neurons off: {off:.1%} of the old ones, {overall:.1%} with the always-on ones",
        f"wrote {args.outfile} ({size / 1e6:.1f} MB) in {seconds:.0f} s",
    ]
    for line in lines:
        console.print(escape(safe_text(line)), soft_wrap=True)
