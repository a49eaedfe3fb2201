"""`hotcold train-predictor`: predictors for a model, from what a profile sampled.

In: a neuron-split GGUF and its profile. Out: a table, and with -o a GGUF with predictors for `--sparsity predict`.
Next: predictor_layer.py (one layer), rewrite.py (writing).

Layer by layer: memory holds the samples and labels of one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hotcold.convert.main import writing_progress
from hotcold.convert.model import array
from hotcold.placement import lowrank
from hotcold.placement.place import PLACEMENT_KEYS, show
from hotcold.placement.predictor import KEYS, computed, export, metadata, rows_of
from hotcold.placement.predictor_check import TOKENS, checked
from hotcold.placement.predictor_layer import (
    MIN_SAMPLES,
    TARGET,
    Result,
    Split,
    Wanted,
    key_signs,
    label,
    split_contexts,
    thinned,
    train_layer,
    without,
)
from hotcold.placement.profile import Profile, check_profile, load_profile, skew, sparsity
from hotcold.placement.rewrite import rewrite, split_config
from hotcold.runtime import schema
from hotcold.runtime.arguments import fraction, whole
from hotcold.runtime.atomic import check_output
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.console import emit, note
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.facts import fires
from hotcold.runtime.gguf_file import GGUFFile, open_gguf, safe_text
from hotcold.runtime.gpu.device import DeviceUnavailable, open_device
from hotcold.runtime.weights import by_column

BUDGET = 0.1  # share of the model's parameters that all nets together may have
FEW_PER_INPUT = 2  # samples per number of an input, below which a fit is shaky
MAX_RANK = 4096
EVERY = 10.0  # seconds between lines of progress, without a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `hotcold train-predictor`."""
    parser.add_argument("model", metavar="MODEL", type=Path, help="neuron-split GGUF file (from hotcold convert)")
    parser.add_argument("--profile", metavar="P", type=Path, required=True, help="what hotcold profile sampled of it")
    parser.add_argument("--kind", choices=schema.PREDICTORS[1:], default="lowrank",
                        help="lowrank: closed form (default); mlp: a trained net, minutes; signbit: signs only")
    parser.add_argument("--target-recall", type=fraction, default=TARGET, metavar="R",
                        help=f"share of what neurons add, by its length, to be found (default {TARGET})")
    parser.add_argument("--rank", type=_rank, metavar="N",
                        help="rank or hidden size of all layers, a multiple of 32 (default: what reads least)")
    parser.add_argument("--look-ahead", action="store_true",
                        help="predict from the input of the layer before, so that answers are ready early")
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="the same gives the same (default 0)")
    parser.add_argument("-o", "--outfile", metavar="OUT", type=Path,
                        help="file to write: MODEL with predictors (default: only show the table)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--check-tokens", type=whole, default=TOKENS, metavar="N",
                        help="with -o: tokens of held-out text to measure perplexity and bytes on, in exact and in "
                             f"predict mode (default {TOKENS}; 0: not)")


def run(args: argparse.Namespace) -> int:
    """Train as the arguments say; returns the exit status. Raises HotcoldError with one line for the user."""
    if args.kind == "signbit" and (args.look_ahead or args.rank is not None):
        args.parser.error("--kind signbit compares with the layer's own keys: no --look-ahead, no --rank")
    for path in (args.model, args.profile):
        if not path.exists():
            raise HotcoldError(f"{safe_text(str(path))}: no such file")
    if args.outfile is not None:
        check_output(args.outfile, args.force, args.model.stat().st_size)
    console = Console(stderr=True, highlight=False)
    profile = load_profile(args.profile)
    wanted = Wanted(args.kind, args.target_recall, args.rank, args.look_ahead, args.seed,
                    array_module() if args.kind == "mlp" else np)  # fmt: skip
    with layer_progress(args.kind) as progress:
        results, notes = train_predictors(args.model, profile, wanted, progress)
    if args.outfile is not None:  # before the table, whose reader may go away
        with writing_progress(console, args.model.stat().st_size) as advance:
            size = write_predictors(args.model, args.outfile, profile, results, args.force, advance)
        console.print(f"wrote {escape(safe_text(str(args.outfile)))} ({size / 1e6:.1f} MB)", soft_wrap=True)
    show([result_table(results, profile, wanted)])
    for line in notes:
        console.print(escape(f"note: {line}"), soft_wrap=True)
    if args.outfile is not None and args.check_tokens:
        emit(sys.stdout, "".join(f"{line}\n" for line in checked(args.outfile, args.check_tokens)))
    return 0


def array_module() -> Any:
    """The GPU's array package where there is one that multiplies matrices, else NumPy; a line says which, and why."""
    try:
        device = open_device()
        reason = "" if device.has_gemm else f"{device.name} has no cuBLAS: pip install nvidia-cublas-cu12"
    except DeviceUnavailable as e:
        reason = e.reason
    note(f"nets are trained on the CPU: {reason}" if reason else f"nets are trained on {device.name}")
    return np if reason else device.array_module()


# ------------------------------------------------------------------ for convert --calibrate and others


def train_predictors(
    model: Path, profile: Profile, wanted: Wanted, progress: Callable[[int, int], None] = lambda done, of: None
) -> tuple[list[Result], list[str]]:
    """One result per layer, and notes for the user. Raises HotcoldError for samples or a model that do not do."""
    with open_gguf(model) as file:
        config = split_config(file)
        _check_sparse(file, config)
        check_profile(profile, file, config)
        contexts = np.asarray(profile.sample_text)
        notes = _check_samples(len(contexts), config, profile)
        use = thinned(len(contexts), max(config.n_ff))
        split = split_contexts(contexts[use], wanted.seed)
        left = int(BUDGET * _parameters(file)) if wanted.kind == "mlp" else 0
        results = []
        for layer in range(config.n_layer):
            progress(layer, config.n_layer)
            result = _train(file, config, profile, layer, wanted, use, split, left // (config.n_layer - layer))
            left -= 0 if result.predictor is None else result.predictor.n_parameters
            results.append(result)
            file.release_pages()
        progress(config.n_layer, config.n_layer)
    return results, notes + _layer_notes(results)


def write_predictors(
    model: Path, out: Path, profile: Profile, results: Sequence[Result], force: bool = False,
    progress: Callable[[str, int], None] | None = None,
) -> int:  # fmt: skip
    """`model` with these predictors instead of any it has, as `out`; returns its size."""
    predictors = [r.predictor for r in results]
    tensors = export(predictors)
    with open_gguf(model) as file:
        old = [name for name in file.tensors if name.startswith("blk.") and name.endswith(schema.PRED_TENSORS)]
    keys = metadata(predictors, [r.quality for r in results])
    gone = [key for key in (*KEYS, *PLACEMENT_KEYS) if key not in keys]  # predictors take room that a placement needs
    keys[schema.KEY_SPARSITY] = array([float(s) for s in sparsity(profile)], GGUFValueType.FLOAT32)
    return rewrite(model, out, tensors=tensors, drop=[name for name in old if name not in tensors], metadata=keys,
                   drop_keys=gone, force=force, progress=progress)  # fmt: skip


def _train(file: GGUFFile, config: ModelConfig, profile: Profile, layer: int, wanted: Wanted, use: np.ndarray,
           split: Split, budget: int) -> Result:
    rows = rows_of(file, config, layer)
    active = computed(config, layer, 1 - float(sparsity(profile)[layer]))
    if by_column(config, layer):
        return without(rows, active, "its keys are held by input, for the ReLU after its norm: runs exact")
    if not fires(config, layer):
        return without(rows, active, "has no threshold, so all its neurons fire: runs exact")
    own = _inputs(profile, layer, use)
    ahead = wanted.look_ahead and layer > 0
    data = label(file, config, layer, own, _inputs(profile, layer - 1, use) if ahead else own)
    if wanted.kind == "signbit":
        data = replace(data, signs=key_signs(file, config, layer))
    return train_layer(data, split, rows, replace(wanted, look_ahead=ahead), skew(profile.fired[layer]), budget)


def _inputs(profile: Profile, layer: int, use: np.ndarray) -> np.ndarray:
    x = np.asarray(profile.samples[layer])[use].astype(np.float32)  # [n, n_embd]
    bad = int(np.count_nonzero(~np.isfinite(x)))
    if bad:
        raise HotcoldError(f"the profile's samples of layer {layer} hold {bad} values that are NaN or infinite: the "
                           "profile or the model is damaged; run hotcold profile again")  # fmt: skip
    return x


def _check_sparse(file: GGUFFile, config: ModelConfig) -> None:
    if not fires(config):
        path = safe_text(str(file.path))
        raise HotcoldError(f"{path}: all its neurons fire always ({config.activation} without thresholds): there is "
                           "nothing to predict; first run hotcold relufy or hotcold calibrate")  # fmt: skip


def _check_samples(n: int, config: ModelConfig, profile: Profile) -> list[str]:
    """Notes. Raises HotcoldError when the samples are too few."""
    if n == 0:
        raise HotcoldError(f"the profile has no samples of FFN inputs, at least {MIN_SAMPLES} are needed: run hotcold "
                           "profile without --samples 0")  # fmt: skip
    if n < MIN_SAMPLES:
        raise HotcoldError(f"the profile has {n} samples of FFN inputs, at least {MIN_SAMPLES} are needed: run hotcold "
                           "profile over more text")  # fmt: skip
    good = FEW_PER_INPUT * config.n_embd
    if n < good:
        return [f"the profile has {n} samples, from {good} on (twice the model's width) a fit is reliable: "
                "trust the held-out figures only roughly"]  # fmt: skip
    if len(np.unique(profile.sample_text)) < 3:
        return ["the samples are from fewer than three contexts: held-out tokens are from the same text"]
    return []


def _parameters(file: GGUFFile) -> int:
    """Of the model without what was added to it."""
    added = (schema.FFN_NEURON_ID, schema.FFN_NEURON_COUNT, *schema.PRED_TENSORS)
    return sum(int(np.prod(info.shape)) for name, info in file.tensors.items() if not name.endswith(added))


def _layer_notes(results: Sequence[Result]) -> list[str]:
    """Layers with the same remark but for its numbers are one note."""
    grouped: dict[str, list[int]] = {}
    for layer, result in enumerate(results):
        if result.note:
            grouped.setdefault(result.note, []).append(layer)
    return [f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}: {note}" for note, layers in grouped.items()]


# ------------------------------------------------------------------ showing


def result_table(results: Sequence[Result], profile: Profile, wanted: Wanted) -> Table:
    """One row per layer, and the means. Shares of bytes are of all rows of the layer's FFN."""
    before = ", looking one layer ahead" if wanted.look_ahead else ""
    title = f"Predictors of kind {wanted.kind}{before}, for a recall of {wanted.target:g} of the magnitude; held-out"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="bold", pad_edge=False)
    for heading in ("layer", "kind", "sparsity", "skew", "hidden", "recall", "of magnitude", "precision", "density",
                    "predictor", "bytes, exact", "bytes, predict"):  # fmt: skip
        table.add_column(heading, justify="right")
    off = sparsity(profile)
    for layer, r in enumerate(results):
        q = r.quality
        kind = "none" if r.predictor is None else r.predictor.kind
        table.add_row(str(layer), kind, f"{off[layer]:.1%}", f"{skew(profile.fired[layer]):.1%}", str(r.rank or "-"),
                      *_percent(q.recall, q.recall_magnitude, q.precision, q.density), f"{r.n_bytes / 1e3:.1f} kB",
                      *_percent(r.exact, r.predict))  # fmt: skip
    table.add_row("mean", "", *_percent(float(np.average(off, weights=profile.n_ff))), "", "", *_means(results))
    return table


def _means(results: Sequence[Result]) -> list[str]:
    """Of all layers, weighted by their neurons; bytes by theirs. A layer that falls back has what exact has."""
    qualities = [without(r.rows, r.quality.active, "").quality if r.predictor is None else r.quality for r in results]
    neurons = [r.rows.n_ff for r in results]
    means = [float(np.average([getattr(q, name) for q in qualities], weights=neurons))
             for name in ("recall", "recall_magnitude", "precision", "density")]  # fmt: skip
    sizes = [r.rows.total for r in results]
    n_bytes = sum(r.n_bytes for r in results if r.predictor is not None)
    shares = [float(np.average([getattr(r, name) for r in results], weights=sizes)) for name in ("exact", "predict")]
    return [*_percent(*means), f"{n_bytes / 1e6:.2f} MB in all", *_percent(*shares)]


def _percent(*shares: float) -> list[str]:
    return [f"{share:.1%}" for share in shares]


@contextmanager
def layer_progress(kind: str) -> Iterator[Callable[[int, int], None]]:
    """A function (layers done, layers) that shows a bar, or lines without a terminal."""
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("training predictors"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        began = told = time.monotonic()
        if not console.is_terminal:
            note(f"training predictors of kind {kind}")

        def advance(done: int, of: int) -> None:
            nonlocal told
            bar.update(task, completed=done, total=of)
            now = time.monotonic()
            if not console.is_terminal and now - told >= EVERY and done < of:
                told = now
                left = f", {(now - began) * (of - done) / done:.0f} s left" if done else ""
                note(f"training predictors: {done} of {of} layers{left}")

        yield advance


# ------------------------------------------------------------------ arguments


def _rank(text: str) -> int:
    value = whole(text)
    if value % lowrank.STEP or not 0 < value <= MAX_RANK:
        raise argparse.ArgumentTypeError(f"must be a multiple of {lowrank.STEP} up to {MAX_RANK}, got {value}")
    return value
