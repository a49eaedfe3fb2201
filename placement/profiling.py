"""`hotcold profile`: count over a text how often each neuron fires; `hotcold profile merge`: add such counts.

In: a model, text, options. Out: a profile file, and a table. Next: profile_run.py, which runs it; then place.py and
train.py.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from hotcold.placement.counting import Job, default_samples
from hotcold.placement.identity import model_id
from hotcold.placement.profile import Profile, load_profile, merge_profiles, persistence, save_profile, skew, sparsity
from hotcold.placement.profile_file import State, read_profile
from hotcold.placement.profile_run import Keeper, Run, Stopped, execute, gather, refuse_other_job, worker_files
from hotcold.runtime.arguments import count, whole
from hotcold.runtime.atomic import check_output
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.console import note
from hotcold.runtime.corpus import Corpus, cut_contexts, read_corpus
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.facts import fires
from hotcold.runtime.gguf_file import open_gguf, safe_text
from hotcold.runtime.threads import default_threads
from hotcold.runtime.tokenizer import Tokenizer

TOKENS = 100_000
N_CTX = 512
MAX_WORKERS = 256
LINE_EVERY = 10.0  # seconds between lines where there is no terminal


def profile_model(
    path: str | os.PathLike[str],
    texts: Corpus | Sequence[str | os.PathLike[str]] = (),
    *,
    tokens: int | None = TOKENS,
    n_ctx: int | None = None,
    samples: int | None = None,
    threads: int | None = None,
    workers: int = 1,
    shard: tuple[int, int] = (0, 1),
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    notify: Callable[[str], None] = lambda line: None,
) -> Profile:
    """Profile a model over text.

    texts: files, or a Corpus; none: the bundled calibration text. tokens: about so many, taken evenly from the text;
    None: all. n_ctx: tokens of a context; None: 512, or what the model was trained on where that is less. samples: how
    many tokens' FFN inputs are kept for training predictors; None: what fits into 256 MiB, at most 8192. threads: of
    all workers together. shard: count only contexts i, i + n, i + 2n, ... for (i, n), i from 0. out: the file to
    write; with it, what is counted survives an interrupt, and `resume` goes on. progress gets the tokens counted so
    far and in all. Raises HotcoldError, and Stopped (a KeyboardInterrupt) after Ctrl-C or SIGTERM.
    """
    target = None if out is None else Path(out)
    if target is not None:
        _check_target(target, resume, force)
    job = _job(Path(path), texts, tokens, n_ctx, samples, shard)
    _check_room(job, target)
    state = State(complete=False, wanted=len(job.wanted), shard=shard)
    base = None
    if target is not None and resume:
        base, finished = _resumed(target, job, notify)
        if finished and base is not None:
            notify(f"{safe_text(str(target))} is complete already: nothing to do")
            return base
    elif target is not None:
        for stale in worker_files(target):
            stale.unlink()
    total = sum(job.contexts.counted(k) for k in job.wanted)
    done = 0 if base is None else base.n_tokens
    progress(done, total)

    def tell(n: int) -> None:
        nonlocal done
        done += n
        progress(done, total)

    threads = default_threads() if threads is None else threads
    run = Run(Path(path), job, max(1, threads // workers), workers, notify, tell)
    keeper = None if target is None else Keeper(target, state, force or resume)
    with tempfile.TemporaryDirectory(prefix="hotcold-") as folder:
        return execute(run, base, keeper, Path(folder) / "profile" if target is None else target)


def count_contexts(path: str | os.PathLike[str], texts: Corpus | Sequence[str | os.PathLike[str]] = (),
                   tokens: int | None = TOKENS, n_ctx: int | None = None) -> int:
    """Contexts that profile_model() would count, so the most shards there can be. Raises the same errors."""
    return len(_job(Path(path), texts, tokens, n_ctx, 0, (0, 1)).wanted)


def _job(path: Path, texts: Corpus | Sequence[str | os.PathLike[str]], tokens: int | None, n_ctx: int | None,
         samples: int | None, shard: tuple[int, int]) -> Job:
    if not 0 <= shard[0] < shard[1]:
        raise HotcoldError(f"shard {shard[0]} of {shard[1]}: shards of {shard[1]} are 0 to {shard[1] - 1}")
    with open_gguf(path) as file:
        config = ModelConfig.from_gguf(file)
        check_sparse(config, path)
        if config.layout == "stock":
            raise HotcoldError(f"{safe_text(str(path))}: is a stock GGUF, whose profile fits no file that can be "
                               "sorted by it: hotcold convert makes it neuron-split; profile that")
        if file.get("tokenizer.ggml.model", "no_vocab") == "no_vocab":
            raise HotcoldError(f"{safe_text(str(path))}: has no vocabulary, so no text can be read with it")
        size = min(N_CTX, config.n_ctx_train) if n_ctx is None else n_ctx
        corpus = texts if isinstance(texts, Corpus) else read_corpus(texts)
        contexts = cut_contexts(corpus, Tokenizer.from_gguf(file), size, tokens)
        most = default_samples(config) if samples is None else samples
        model = model_id(file, config)
    wanted = tuple(range(shard[0], len(contexts.tokens), shard[1]))
    if not wanted:
        raise HotcoldError(f"shard {shard[0] + 1} of {shard[1]} is empty: the text makes {len(contexts.tokens)} "
                           f"contexts of {size} tokens, so at most as many shards")  # fmt: skip
    return Job(model, contexts, most, config.n_layer * config.n_embd, shard, wanted)


def _check_room(job: Job, out: Path | None) -> None:
    """Samples are held in memory and written to the file: say now if they will not fit."""
    needed = 2 * job.width * min(job.samples, sum(job.contexts.counted(k) for k in job.wanted))
    free = psutil.virtual_memory().available
    if needed > free:
        raise HotcoldError(f"samples need {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free: use a "
                           "smaller --samples")  # fmt: skip
    if out is not None:
        check_output(out, True, needed)
        folder = out.absolute().parent
        if not os.access(folder, os.W_OK):
            raise HotcoldError(f"{safe_text(str(folder))}: may not be written to: choose another -o")


def check_sparse(config: ModelConfig, path: Path) -> None:
    """Raise HotcoldError for a model whose neurons never switch off."""
    if not fires(config):
        raise HotcoldError(
            f"{safe_text(str(path))}: activation {config.activation!r} has no neurons that are off, so there is "
            "nothing to count: make it sparse with hotcold relufy, or set thresholds with hotcold calibrate"
        )


def _check_target(out: Path, resume: bool, force: bool) -> None:
    """Raise HotcoldError unless a run may write `out`."""
    if resume or force:
        check_output(out, True)
        return
    left = worker_files(out)
    unfinished = bool(left)
    if out.is_file() and not unfinished:
        try:
            unfinished = not read_profile(out)[1].complete
        except HotcoldError:
            unfinished = False
    if unfinished:
        raise HotcoldError(f"{safe_text(str(out))}: is the beginning of a profile: --resume goes on with it, --force "
                           "begins again")  # fmt: skip
    check_output(out, False)


def _resumed(out: Path, job: Job, notify: Callable[[str], None]) -> tuple[Profile | None, bool]:
    """What an earlier run left, and whether that was all."""
    files = ([out] if out.exists() else []) + worker_files(out)
    for path in files:
        try:
            profile, state = read_profile(path)
        except HotcoldError as e:
            raise HotcoldError(f"cannot resume: {e}; delete the file, or begin again with --force") from None
        refuse_other_job(path, profile, state, job)
    if not files:
        notify(f"nothing to resume: {safe_text(str(out))} does not exist, so this begins at the beginning")
    base = gather(None, files)
    complete = base is not None and len(base.parts[0].contexts) == len(job.wanted)
    if base is not None and (complete or len(files) > 1):
        kept = State(complete, len(job.wanted), job.shard)
        Keeper(out, kept, force=True).save(base, complete)
    for path in worker_files(out):
        path.unlink()
    return base, complete


# ------------------------------------------------------------------ the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `hotcold profile`."""
    parser.usage = "%(prog)s MODEL [options]\n       %(prog)s merge PROFILE... -o OUT [--force]"
    parser.add_argument("model", metavar="MODEL", help="GGUF whose neurons are counted; or the word merge")
    parser.add_argument("profiles", metavar="PROFILE", nargs="*", help="after merge: profiles of one model to add up")
    parser.add_argument("-o", "--outfile", metavar="OUT", type=Path,
                        help="file to write (default: MODEL's name with .profile.gguf)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    group = parser.add_argument_group("text")
    group.add_argument("--text", metavar="FILE", action="append", default=[], type=Path,
                       help="text to read; may be given several times (default: one that comes with hotcold)")
    group.add_argument("--tokens", metavar="N", type=count, default=TOKENS,
                       help=f"count about N tokens, taken evenly from the text (default {TOKENS})")
    group.add_argument("--all", action="store_true", help="count all of the text")
    group.add_argument("-c", "--ctx", metavar="N", type=count,
                       help=f"tokens of a context (default {N_CTX}, or what the model was trained on)")
    group.add_argument("--samples", metavar="N", type=whole,
                       help="keep the inputs of N tokens for training predictors; 0: none (default: 8192, "
                            "fewer where that is over 256 MiB, at least 1024)")
    group = parser.add_argument_group("work")
    group.add_argument("-t", "--threads", metavar="N", type=count,
                       help="threads of all workers together (default: all cores)")
    group.add_argument("--workers", metavar="N", type=count, default=1,
                       help="processes that share the text (default 1)")
    group.add_argument("--shard", metavar="I/N", type=_shard, default=(0, 1),
                       help="count only the I-th of N shares of the text; hotcold profile merge adds the shares")
    group.add_argument("--resume", action="store_true", help="go on with an interrupted run, same options otherwise")


def run(args: argparse.Namespace) -> int:
    """Profile or merge as the arguments say; returns the exit status."""
    if args.model == "merge":
        return _merge(args)
    if args.profiles:
        args.parser.error(f"unrecognized arguments: {' '.join(args.profiles)}; texts are given with --text")
    if args.workers > MAX_WORKERS:
        args.parser.error(f"argument --workers: must be at most {MAX_WORKERS}")
    if args.resume and args.force:
        args.parser.error("--resume goes on with a file, --force replaces it: give one of them")
    out = args.outfile or default_output(Path(args.model), args.shard)
    try:
        with progress_bar("profiling") as progress:
            profile = profile_model(
                args.model, args.text, tokens=None if args.all else args.tokens, n_ctx=args.ctx, samples=args.samples,
                threads=args.threads, workers=args.workers, shard=args.shard, out=out, resume=args.resume,
                force=args.force, progress=progress, notify=_note,
            )  # fmt: skip
    except Stopped as e:
        if e.kept:
            note(f"stopped: {e.kept} tokens are kept in {out}; the same command with --resume goes on")
        else:
            note("stopped before the first context was counted: nothing to keep")
        return 128 + e.signum
    print_summary(profile)
    note(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB)")
    return 0


def _merge(args: argparse.Namespace) -> int:
    if not args.profiles or args.outfile is None:
        args.parser.error("merge needs the profiles to add and -o OUT")
    check_output(args.outfile, args.force)
    profile = merge_profiles([load_profile(p) for p in args.profiles])
    save_profile(args.outfile, profile, args.force)
    print_summary(profile)
    note(f"wrote {args.outfile} ({args.outfile.stat().st_size / 1e6:.1f} MB)")
    return 0


def default_output(model: Path, shard: tuple[int, int] = (0, 1)) -> Path:
    """Where a model's profile goes: beside it, under its name."""
    stem = re.sub(r"(\.hotcold)?\.gguf$", "", model.name)
    part = f".{shard[0] + 1}of{shard[1]}" if shard[1] > 1 else ""
    return model.with_name(f"{stem}{part}.profile.gguf")


def _note(line: str) -> None:
    if not line.startswith("sparsity:"):  # counting computes all neurons, whatever the model could skip
        note(line)


def print_summary(profile: Profile) -> None:
    """A line about the model and a table of its layers, on stdout."""
    from rich.console import Console
    from rich.table import Table

    per_layer, skews, stays = sparsity(profile), [skew(f) for f in profile.fired], persistence(profile)
    table = Table(box=None, pad_edge=False)
    for heading in ("layer", "neurons", "sparsity", "80 % of firings by", "fires again", "never fired"):
        table.add_column(heading, justify="right")
    for i, fired in enumerate(profile.fired):
        table.add_row(str(i), str(len(fired)), f"{per_layer[i]:.1%}", f"{skews[i]:.1%}", f"{stays[i]:.1%}",
                      str(int((fired == 0).sum())))  # fmt: skip
    console = Console(highlight=False)
    console.print(table)
    weights = profile.n_ff
    mean = sum(s * n for s, n in zip(per_layer, weights, strict=True)) / sum(weights)
    low, high = int(per_layer.argmin()), int(per_layer.argmax())
    console.print(
        f"{profile.n_tokens} tokens, {len(profile.sample_text)} sampled: sparsity {mean:.1%} (layer {low}: "
        f"{per_layer[low]:.1%}, layer {high}: {per_layer[high]:.1%}); 80 % of the firings are by "
        f"{sum(skews) / len(skews):.1%} of the neurons", soft_wrap=True, markup=False,
    )  # fmt: skip


# ------------------------------------------------------------------ progress


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A function (done, total) that shows tokens, tokens/s and time left: a bar, or lines without a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(what, total=None, rate="")
    speed = _Speed()

    def show(done: int, total: int) -> None:
        rate = speed.rate(done)
        text = f"{rate:.0f} tokens/s" if rate else ""
        bar.update(task, completed=done, total=total, rate=f"{done}/{total} tokens  {text}")
        if not console.is_terminal and speed.line_due(done, total):
            left = f", {(total - done) / rate:.0f} s left" if rate and done < total else ""
            note(f"{what}: {done} of {total} tokens{', ' + text if text else ''}{left}")

    with bar:
        yield show


class _Speed:
    """Tokens per second since the first call, and when to print a line."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._told = time.monotonic()

    def rate(self, done: int) -> float:
        now = time.monotonic()
        if self._first is None:
            self._first = (now, done)
        began, before = self._first
        return (done - before) / (now - began) if done > before and now > began else 0.0

    def line_due(self, done: int, total: int) -> bool:
        now = time.monotonic()
        if now - self._told < LINE_EVERY and done < total:
            return False
        self._told = now
        return True


# ------------------------------------------------------------------ numbers of the command line


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError("must be I/N, from 1/N to N/N")
    return int(match[1]) - 1, int(match[2])
