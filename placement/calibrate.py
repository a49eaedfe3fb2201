"""`hotcold calibrate`: thresholds on magnitudes, with which a SiLU or GELU model skips a wanted share of its neurons.

In: a neuron-split GGUF, text, the wanted sparsity. Out: the same model with a threshold per layer, and a table of what
they do. Next: threshold.py (the arithmetic), threshold_run.py (running the model), rewrite.py (writing).

A neuron counts as off where |act(key) * up| is up to its layer's threshold. Layers get their thresholds one after the
other, each from inputs that the layers before it produced with theirs.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
from gguf import GGUFValueType

from hotcold.convert.model import array
from hotcold.placement.place import PLACEMENT_KEYS, show
from hotcold.placement.predictor import KEYS
from hotcold.placement.rewrite import rewrite, split_config
from hotcold.placement.threshold import MEASURED, allocate, error_curve
from hotcold.placement.threshold_run import Evaluation, LayerRun, evaluate, open_with
from hotcold.runtime import schema
from hotcold.runtime.arguments import count, fraction
from hotcold.runtime.atomic import check_output
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.console import note
from hotcold.runtime.corpus import HELDOUT, Contexts, cut_contexts, read_corpus
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import GGUFFile, open_gguf, safe_text
from hotcold.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PER_LAYER = ("even", "error")
TOKENS = 8192
N_CTX = 512
HELDOUT_TOKENS = 4096
CURVES = 4  # error curves are measured on every fourth context: they are smooth, and need fewer tokens than quantiles

# What is known of a model's neurons holds for the thresholds it was measured with.
OF_THE_THRESHOLDS = {
    "counts": (schema.KEY_PROFILE_TOKENS, schema.KEY_PROFILE_CORPUS, schema.KEY_PROFILE_SHA256, schema.KEY_SPARSITY),
    "predictors": KEYS,
    "placements": PLACEMENT_KEYS,
}  # fmt: skip


@dataclass(frozen=True)
class Calibration:
    """Thresholds of a model and what they do. Arrays have one entry per layer."""

    per_layer: str  # PER_LAYER
    thresholds: np.ndarray  # f32; 0: none
    sparsity: np.ndarray  # f64: on the calibration text
    errors: np.ndarray  # f64: relative squared error of the FFN's output
    before: Evaluation  # on the held-out text, without thresholds
    after: Evaluation


def calibrate(
    path: Path, target: float, text: Contexts, heldout: Contexts, *, per_layer: str = PER_LAYER[-1],
    threads: int | None = None, progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:  # fmt: skip
    """Thresholds for a mean sparsity of `target` over the layers of the model at `path`, which is not changed.

    per_layer: "even": the same sparsity in all layers; "error": less where it would do more harm. progress gets the
    tokens done so far and in all passes. Raises HotcoldError for a model that has no use for thresholds, and where
    activations are not finite.
    """
    if not 0 < target < 1:
        raise HotcoldError(f"a target sparsity of {target:g}: must be between 0 and 1")
    if per_layer not in PER_LAYER:
        raise HotcoldError(f"per_layer {safe_text(per_layer)!r}: choose from {', '.join(PER_LAYER)}")
    with open_gguf(path) as file:
        config = check_model(file)
    _check_memory(text, config)
    some = replace(text, tokens=text.tokens[::CURVES])
    passes = [text, heldout, heldout, *([some] if per_layer == "error" else [])]
    total = sum(len(tokens) for contexts in passes for tokens in contexts.tokens)
    done = 0.0

    def tell(n: float) -> None:
        nonlocal done
        done += n
        progress(round(done), total)

    def tell_layer(n: int) -> None:  # a LayerRun sees every token twice in every layer
        tell(n / (2 * config.n_layer))

    progress(0, total)
    n_ctx = max(text.n_ctx, heldout.n_ctx)
    with open_with(path, (0.0,) * config.n_layer, threads, n_ctx) as trace:
        shares = np.full(config.n_layer, target)
        if per_layer == "error":
            shares = allocate(_curves(LayerRun(trace, some, tell_layer), config.n_layer), target)
        thresholds, sparsity, errors = _choose(LayerRun(trace, text, tell_layer), shares)
        before = evaluate(trace, heldout, tell)
    with open_with(path, thresholds.tolist(), threads, n_ctx) as trace:
        after = evaluate(trace, heldout, tell)
    return Calibration(per_layer, thresholds, sparsity, errors, before, after)


def _curves(run: LayerRun, n_layer: int) -> np.ndarray:
    """f64 [n_layer, STEPS + 1]: error of each layer by its share of neurons off, when no other layer has any.

    Errors are relative to the residual stream: the same relative error of an FFN's output does more harm where that
    output is a large part of the stream, as in the first and the last layer.
    """
    curves = []
    for layer in range(n_layer):
        magnitudes = run.magnitudes(layer)
        cuts = [magnitudes.quantile(share) for share in MEASURED[:-1]] + [np.inf]
        curves.append(error_curve(MEASURED, run.finish(layer, 0.0, cuts).stream))
    return np.stack(curves)


def _choose(run: LayerRun, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Thresholds for these shares, the shares they make, and their errors."""
    thresholds, sparsity, errors = np.zeros(len(shares), np.float32), np.zeros(len(shares)), np.zeros(len(shares))
    for layer, share in enumerate(shares):
        magnitudes = run.magnitudes(layer)
        thresholds[layer] = t = magnitudes.quantile(float(share))
        errors[layer] = run.finish(layer, t, [t]).output[0]
        sparsity[layer] = magnitudes.share_up_to(t) if t > 0 else 0.0
    return thresholds, sparsity, errors


def check_model(file: GGUFFile) -> ModelConfig:
    """Raise HotcoldError unless thresholds on magnitudes are for this model."""
    config = split_config(file)
    if config.activation not in schema.DENSE_ACTIVATIONS:
        raise HotcoldError(
            f"{safe_text(str(file.path))}: activation {config.activation!r} switches neurons off by itself; "
            f"calibrate sets thresholds for {', '.join(schema.DENSE_ACTIVATIONS)}: go on with hotcold profile"
        )
    return config


def _check_memory(text: Contexts, config: ModelConfig) -> None:
    needed = 4 * config.n_embd * sum(len(tokens) for tokens in text.tokens)
    free = psutil.virtual_memory().available
    if needed > free:
        raise HotcoldError(f"the text needs {needed / 2**30:.1f} GiB of memory for activations, {free / 2**30:.1f} "
                           "GiB are free: use a smaller --tokens")  # fmt: skip


def write_thresholds(src: Path, out: Path, thresholds: Sequence[float] | np.ndarray, *, force: bool = False,
                     progress: Callable[[str, int], None] | None = None) -> int:  # fmt: skip
    """`src` with these thresholds as `out`, without what holds for other thresholds only; returns its size."""
    with open_gguf(src) as file:
        tensors = stale_tensors(file)
    values = np.asarray(thresholds, np.float32)
    return rewrite(
        src, out, drop=tensors, drop_keys=[key for keys in OF_THE_THRESHOLDS.values() for key in keys],
        metadata={schema.KEY_THRESHOLD: array(values.tolist(), GGUFValueType.FLOAT32)}, force=force, progress=progress,
    )  # fmt: skip


def stale_tensors(file: GGUFFile) -> list[str]:
    """Counts and predictors of a file."""
    names = (schema.FFN_NEURON_COUNT, *schema.PRED_TENSORS)
    return [n for n in file.tensors if re.fullmatch(r"blk\.[0-9]+\.(.*)", n) and n.split(".", 2)[2] in names]


def stale(file: GGUFFile) -> list[str]:
    """What write_thresholds() leaves out, for people."""
    return [what for what, keys in OF_THE_THRESHOLDS.items() if any(key in file.metadata for key in keys)]


# ------------------------------------------------------------------ the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `hotcold calibrate`."""
    parser.add_argument("model", metavar="MODEL", type=Path, help="neuron-split GGUF file of a SiLU or GELU model")
    parser.add_argument("--target-sparsity", metavar="S", type=fraction, required=True,
                        help="share of neurons that are to be off, mean over the layers: between 0 and 1")
    parser.add_argument("--per-layer", choices=PER_LAYER, default=PER_LAYER[-1],
                        help="even: the same share in every layer; error: fewer off where that does more harm "
                             f"(default {PER_LAYER[-1]})")
    parser.add_argument("-o", "--outfile", metavar="OUT", type=Path,
                        help="file to write (default: MODEL's name with the sparsity, as in model-s50.gguf)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--text", metavar="FILE", action="append", default=[], type=Path,
                        help="text to read; may be given several times (default: one that comes with hotcold)")
    parser.add_argument("--tokens", metavar="N", type=count, default=TOKENS,
                        help=f"read about N tokens, taken evenly from the text (default {TOKENS})")
    parser.add_argument("-c", "--ctx", metavar="N", type=count,
                        help=f"tokens of a context (default {N_CTX}, or what the model was trained on)")
    parser.add_argument("-t", "--threads", metavar="N", type=count, help="default: what the machine gives")


def run(args: argparse.Namespace) -> int:
    """Calibrate as the arguments say; returns the exit status. Raises HotcoldError with one line for the user."""
    from rich.console import Console

    from hotcold.convert.main import writing_progress
    from hotcold.placement.profiling import progress_bar

    out = args.outfile or default_output(args.model, args.target_sparsity)
    size = args.model.stat().st_size if args.model.is_file() else 0
    check_output(out, args.force, size)
    text, heldout, left_out = _read(args)
    with progress_bar("calibrating") as progress:
        result = calibrate(args.model, args.target_sparsity, text, heldout, per_layer=args.per_layer,
                           threads=args.threads, progress=progress)  # fmt: skip
    console = Console(stderr=True, highlight=False)
    with writing_progress(console, size) if console.is_terminal else nullcontext(None) as writing:
        written = write_thresholds(args.model, out, result.thresholds, force=args.force, progress=writing)
    note(f"wrote {safe_text(str(out))} ({written / 1e6:.1f} MB)")
    if left_out:
        note(f"left out, for they hold for the old thresholds: {' and '.join(left_out)}; next: hotcold profile "
             f"{safe_text(str(out))}")  # fmt: skip
    show([layer_table(result)])
    _print(summary(result))
    return 0


def _read(args: argparse.Namespace) -> tuple[Contexts, Contexts, list[str]]:
    """The text, the held-out text, and what of the file will not be kept."""
    with open_gguf(args.model) as file:
        config = check_model(file)
        if file.get("tokenizer.ggml.model", "no_vocab") == "no_vocab":
            raise HotcoldError(f"{safe_text(str(args.model))}: has no vocabulary, so no text can be read with it")
        n_ctx = min(N_CTX, config.n_ctx_train) if args.ctx is None else args.ctx
        if n_ctx > config.n_ctx_train:
            raise HotcoldError(f"--ctx {n_ctx}: the model was trained on contexts of {config.n_ctx_train} tokens")
        tokenizer = Tokenizer.from_gguf(file)
        text = cut_contexts(read_corpus(args.text), tokenizer, n_ctx, args.tokens)
        heldout = cut_contexts(read_corpus([HELDOUT]), tokenizer, min(n_ctx, N_CTX), HELDOUT_TOKENS)
        return text, heldout, stale(file)


def default_output(model: Path, target: float) -> Path:
    """Beside the model, under its name and the sparsity in per cent."""
    stem = re.sub(r"(\.hotcold)?\.gguf$", "", model.name)
    return model.with_name(f"{stem}-s{100 * target:.4g}.gguf")


def layer_table(result: Calibration) -> Table:
    """One row per layer."""
    from rich.table import Table

    table = Table(title="Thresholds", title_justify="left", title_style="bold", box=None, header_style="bold",
                  pad_edge=False)  # fmt: skip
    for heading in ("layer", "threshold", "sparsity", "on held-out text", "error of the FFN's output"):
        table.add_column(heading, justify="right")
    for layer, threshold in enumerate(result.thresholds):
        table.add_row(str(layer), f"{threshold:.4g}", f"{result.sparsity[layer]:.1%}",
                      f"{result.after.sparsity[layer]:.1%}", f"{result.errors[layer]:.2%}")  # fmt: skip
    return table


def summary(result: Calibration) -> list[str]:
    """What the thresholds do to the whole model."""
    before, after = result.before, result.after
    ratio = after.perplexity / before.perplexity - 1
    return [
        f"sparsity         = {after.sparsity.mean():.1%} on {after.tokens} tokens of held-out text "
        f"({result.sparsity.mean():.1%} on the text calibrated with)",
        f"perplexity       = {before.perplexity:.3f} -> {after.perplexity:.3f} ({ratio:+.2%})",
        f"FFN bytes read   = {after.bytes_share:.1%} of dense",
    ]


def _print(lines: Sequence[str]) -> None:
    from rich.console import Console

    console: Console = Console(highlight=False)
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)


# ------------------------------------------------------------------ numbers of the command line
