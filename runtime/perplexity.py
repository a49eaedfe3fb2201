"""`hotcold perplexity MODEL -f TEXT`: how well a model predicts a text, and how far it is from a saved base.

In: a model and a text, or the tokens of a base file. Out: running values and estimates as llama-perplexity prints
them, a base file, JSON. Next: kl.py (base files), kl_stats.py (statistics).

The text is cut into chunks of n_ctx tokens; each is evaluated on its own, its first token replaced by BOS where the
model wants one, and the tokens of its second half are scored.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hotcold.runtime.arguments import add_memory_options, count
from hotcold.runtime.atomic import check_output, replacing
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.console import MAX_INPUT, emit, note
from hotcold.runtime.engine import LOGITS_BYTES, Engine, block_sizes
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import open_gguf, safe_text
from hotcold.runtime.kernels.formats import PACK_TOKENS
from hotcold.runtime.kl import (
    MAX_CTX,
    MIN_CTX,
    Base,
    base_bytes,
    encode_rows,
    log_softmax,
    n_scored,
    write_header,
)
from hotcold.runtime.kl_stats import COLUMNS, KLStats, estimate
from hotcold.runtime.perplexity_progress import Reporter
from hotcold.runtime.stats import LayerStats
from hotcold.runtime.tokenizer import Tokenizer
from hotcold.runtime.vocab import P

DEFAULT_CTX = 512
_SLICE_BYTES = 16 << 20  # of logits that are turned into probabilities at a time
INTERRUPTED = 130


class Measurement:
    """What has been measured so far. `kl` is filled where there is a base."""

    def __init__(self, n_chunk: int, n_ctx: int) -> None:
        self.n_chunk, self.n_ctx = n_chunk, n_ctx
        self.done = 0  # chunks
        self.tokens = 0  # evaluated
        self.seconds = 0.0
        self.kl = KLStats()
        self._nll: list[np.ndarray] = []

    def add(self, nll: np.ndarray) -> None:
        self._nll.append(nll)

    @property
    def nll(self) -> np.ndarray:
        """f64: -log p of every scored token."""
        if len(self._nll) > 1:
            self._nll[:] = [np.concatenate(self._nll)]
        return self._nll[0] if self._nll else np.zeros(0)

    @property
    def ppl(self) -> tuple[float, float]:
        """Perplexity and its standard error."""
        return estimate(self.nll)


def cut_chunks(tokens: np.ndarray | list[int], n_ctx: int, most: int | None = None) -> np.ndarray:
    """i32 [n_chunk, n_ctx]: at most `most` chunks; what is left over at the end is not used.

    Raises HotcoldError for a text of less than two chunks.
    """
    if not MIN_CTX <= n_ctx <= MAX_CTX:
        raise HotcoldError(f"--ctx-size {n_ctx}: allowed are {MIN_CTX} to {MAX_CTX} tokens per chunk")
    if len(tokens) < 2 * n_ctx:
        raise HotcoldError(
            f"the text is too short: it has {len(tokens)} tokens, at least {2 * n_ctx} are needed for chunks of "
            f"{n_ctx}: use a longer text or a smaller -c"
        )
    n = len(tokens) // n_ctx if most is None else min(most, len(tokens) // n_ctx)
    return np.asarray(tokens[: n * n_ctx], np.int32).reshape(n, n_ctx)


def measure(
    engine: Engine,
    chunks: np.ndarray,
    *,
    bos: int | None = None,
    base: Base | None = None,
    save: BinaryIO | None = None,
    per_token: bool | None = None,
    advance: Callable[[int], None] = lambda n: None,
    chunk_done: Callable[[Measurement], None] = lambda m: None,
    result: Measurement | None = None,
) -> Measurement:
    """Evaluate chunks (int [n_chunk, n_ctx]); the engine's context must hold n_ctx tokens.

    bos: replaces the first token of each chunk. base: what to compare with; its chunks must be these. save: gets a base
    file. per_token: evaluate token by token; None: where the engine's mode acts only then. advance(n) is called after n
    more tokens, chunk_done after a chunk. `result` is filled, so that an interrupted caller has what was done.
    """
    per_token = engine.sparsity == "predict" if per_token is None else per_token
    n_chunk, n_ctx = chunks.shape
    result = Measurement(n_chunk, n_ctx) if result is None else result
    if save is not None:
        write_header(save, chunks, engine.config.n_vocab)
    began = time.perf_counter()
    for i, chunk in enumerate(chunks):
        ids = chunk.astype(np.int64)
        if bos is not None:
            ids[0] = bos
        targets, row, nll = chunk[n_ctx // 2 + 1 :], 0, []
        for logits in (_single if per_token else _blocks)(engine, ids, advance):
            for part in _slices(logits):
                wanted = targets[row : row + len(part)]
                values = log_softmax(part)
                nll.append(values.nll(wanted))
                if save is not None:
                    save.write(encode_rows(values).data)
                if base is not None:
                    result.kl.add(values, base.log_probs(i, row, row + len(part)), wanted)
                row += len(part)
        result.add(np.concatenate(nll))
        result.done, result.tokens = i + 1, result.tokens + n_ctx - 1
        result.seconds = time.perf_counter() - began
        chunk_done(result)
    return result


def _blocks(engine: Engine, ids: np.ndarray, advance: Callable[[int], None]) -> Iterator[np.ndarray]:
    """Logits f32 [n, n_vocab] of the scored positions of a chunk, in order, by the kernels of many tokens."""
    first = len(ids) // 2
    engine.truncate(0)
    engine.forward(ids[:first], "none")
    advance(first)
    step = max(PACK_TOKENS, min(engine.n_batch, LOGITS_BYTES // (4 * engine.config.n_vocab)))
    for size in block_sizes(n_scored(len(ids)), step):
        yield engine.forward(ids[first : first + size], "all")
        advance(size)
        first += size


def _single(engine: Engine, ids: np.ndarray, advance: Callable[[int], None]) -> Iterator[np.ndarray]:
    """The same, token by token."""
    first = len(ids) // 2
    engine.truncate(0)
    for token in ids[:first]:
        engine.forward([token], "none")
        advance(1)
    step = max(1, min(engine.n_batch, LOGITS_BYTES // (4 * engine.config.n_vocab)))
    for at in range(first, len(ids) - 1, step):
        part = ids[at : min(at + step, len(ids) - 1)]
        rows = np.empty((len(part), engine.config.n_vocab), np.float32)
        for row, token in zip(rows, part, strict=True):
            row[:] = engine.forward([token], "last")
            advance(1)
        yield rows


def _slices(logits: np.ndarray) -> Iterator[np.ndarray]:
    step = max(1, _SLICE_BYTES // (4 * logits.shape[1]))
    for first in range(0, len(logits), step):
        yield logits[first : first + step]


# ------------------------------------------------------------------ the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `hotcold perplexity`."""
    parser.add_argument("model", metavar="MODEL", type=_path, help="GGUF file")
    parser.add_argument("-f", "--file", metavar="TEXT", type=_path,
                        help="the text, UTF-8; one newline at the end is dropped (with --kl-base: may be left out, the "
                             "base holds its tokens)")
    parser.add_argument("-c", "--ctx-size", metavar="N", type=count,
                        help=f"tokens per chunk; the second half of each is scored (default {DEFAULT_CTX})")
    parser.add_argument("--chunks", metavar="N", type=count, help="evaluate the first N chunks (default: all)")
    parser.add_argument("--sparsity", choices=("auto", "dense", "exact", "predict"), default="auto",
                        help="which neurons are computed (default auto). Blocks of tokens are always dense")
    parser.add_argument("--per-token", action="store_true",
                        help="evaluate token by token, as in generation, and count neurons (always with predict)")
    parser.add_argument("-t", "--threads", metavar="N", type=count, help="default: what the machine gives")
    parser.add_argument("--kv-type", choices=("f16", "q8_0", "f32"), default="f16",
                        help="type of the KV cache (default f16)")
    add_memory_options(parser)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--save-kl-base", metavar="FILE", type=_path,
                       help="save all log-probabilities, to compare other models with (llama.cpp's format)")
    group.add_argument("--kl-base", metavar="FILE", type=_path,
                       help="compare with log-probabilities that this command or llama-perplexity saved")
    parser.add_argument("-o", "--output", metavar="FILE", type=_path, help="write the results as JSON, too")
    parser.add_argument("--force", action="store_true", help="replace files that exist")


def run(args: argparse.Namespace) -> int:
    """Measure as the arguments say; returns the exit status. Raises HotcoldError with one line for the user."""
    if args.file is None and args.kl_base is None:
        args.parser.error("no text: give -f TEXT")
    for path in (args.output, args.save_kl_base):
        if path is not None:
            _check_target(path, args)
    with ExitStack() as stack:
        base, chunks, bos = _input(args, stack)
        n_chunk, n_ctx = chunks.shape
        engine = stack.enter_context(Engine.open(
            args.model, sparsity=args.sparsity, threads=args.threads, n_ctx=n_ctx, kv_type=args.kv_type,
            mmap=args.mmap, mlock=args.mlock, notify=note,
        ))  # fmt: skip
        save = None
        if args.save_kl_base is not None:
            n_bytes = base_bytes(n_ctx, engine.config.n_vocab, n_chunk)
            save = stack.enter_context(replacing(args.save_kl_base, args.force, n_bytes))
        per_token = args.per_token or engine.sparsity == "predict"
        how = f"{n_chunk} chunks of {n_ctx} tokens, {n_scored(n_ctx)} of each are scored"
        if per_token:
            why = "" if args.per_token else ": predictors act only in single tokens, so this is slower than in blocks"
            how += f"; token by token ({engine.sparsity}){why}"
        note(how)
        engine.reset_stats()
        result = Measurement(n_chunk, n_ctx)
        try:
            with Reporter(n_chunk, n_ctx, COLUMNS if base is not None else "") as reporter:
                measure(engine, chunks, bos=bos, base=base, save=save, per_token=per_token, advance=reporter.advance,
                        chunk_done=reporter.chunk_done, result=result)  # fmt: skip
        except KeyboardInterrupt:
            if not result.done:
                raise
            ppl, error = result.ppl
            shown = f"PPL = {ppl:.4f} +/- {error:.5f}"
            emit(sys.stdout, f"\ninterrupted after {result.done} of {n_chunk} chunks: {shown}\n")
            if save is not None:
                raise  # drops the incomplete base
            return INTERRUPTED
        _print(result, base is not None, stats_lines(engine.layer_stats()) if per_token else [])
        if args.output is not None:
            text = json.dumps(_record(args, engine, result, base, per_token), indent=1, allow_nan=False)
            stack.enter_context(replacing(args.output, args.force)).write(text.encode() + b"\n")
    if args.save_kl_base is not None:
        note(f"wrote {args.save_kl_base} ({args.save_kl_base.stat().st_size / 1e6:.1f} MB)")
    return 0


def _check_target(path: Path, args: argparse.Namespace) -> None:
    check_output(path, args.force)
    for source in (args.model, args.file, args.kl_base):
        if source is not None and path.exists() and source.exists() and path.samefile(source):
            raise HotcoldError(f"{safe_text(str(path))}: is read by this command: choose another name")
    if args.output is not None and args.save_kl_base is not None and args.output == args.save_kl_base:
        raise HotcoldError(f"{safe_text(str(path))}: is given for two files: choose two names")


def _input(args: argparse.Namespace, stack: ExitStack) -> tuple[Base | None, np.ndarray, int | None]:
    """The base if there is one, the chunks to evaluate, and the token each begins with."""
    with open_gguf(args.model) as file:
        if f"{P}tokens" not in file.metadata:
            raise HotcoldError(f"{safe_text(str(args.model))}: the file has no vocabulary, so no text can be read")
        tokenizer = Tokenizer.from_gguf(file)
        n_vocab = ModelConfig.from_gguf(file).n_vocab
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    tokens = None if args.file is None else _tokens(args.file, tokenizer)
    if args.kl_base is None:
        if tokens is None:
            raise HotcoldError("no text: give -f TEXT")
        return None, cut_chunks(tokens, args.ctx_size or DEFAULT_CTX, args.chunks), bos
    base = stack.enter_context(Base(args.kl_base, n_vocab))
    shown = safe_text(str(args.kl_base))
    if args.ctx_size not in (None, base.n_ctx):
        raise HotcoldError(f"{shown}: was made with chunks of {base.n_ctx} tokens: leave out -c {args.ctx_size}")
    if tokens is not None:
        given = np.asarray(tokens[: base.tokens.size], np.int32)
        same = given == base.tokens.reshape(-1)[: len(given)]
        if len(given) < base.tokens.size or not same.all():
            at = int(np.argmin(same)) if not same.all() else len(given)
            raise HotcoldError(f"{shown}: was made from another text or tokenizer: token {at} differs; without -f the "
                               "tokens in the base are used")  # fmt: skip
    return base, base.tokens[: args.chunks], bos


def _tokens(path: Path, tokenizer: Tokenizer) -> list[int]:
    shown = safe_text(str(path))
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_INPUT + 1)
    except (OSError, ValueError) as e:
        raise HotcoldError(f"{shown}: cannot be read: {getattr(e, 'strerror', None) or e}") from None
    if len(raw) > MAX_INPUT:  # before decoding: it may be cut within a character
        raise HotcoldError(f"{shown}: is larger than {MAX_INPUT >> 20} MiB: use a part of it")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise HotcoldError(f"{shown}: is not UTF-8: byte {e.start} is {raw[e.start]:#04x}") from None
    tokens = tokenizer.encode(text.removesuffix("\n"))
    if tokenizer.add_eos and tokens and tokens[-1] == tokenizer.eos_id:
        tokens.pop()  # the text goes on, as far as the model is concerned
    return tokens


def _print(result: Measurement, compared: bool, stats: list[str]) -> None:
    lines = ["", *result.kl.lines()] if compared else []
    if not compared or result.kl.count < 100:
        ppl, error = result.ppl
        lines.append(f"Final estimate: PPL = {ppl:.4f} +/- {error:.5f}")
    emit(sys.stdout, "".join(line + "\n" for line in [*lines, *stats]))
    if result.seconds > 0:
        note(f"{result.tokens} tokens in {result.seconds:.1f} s ({result.tokens / result.seconds:.1f} tokens/s)")


def stats_lines(stats: LayerStats) -> list[str]:
    """What the single tokens computed and read, for people."""
    shown = (("key rows read", stats.checked, float(stats.checked.mean())),
             ("neurons computed", stats.computed, float(stats.computed.mean())),
             ("FFN bytes read", stats.bytes_read / stats.bytes_dense, stats.bytes_share))  # fmt: skip
    out = []
    for name, shares, mean in shown:
        each = " ".join(f"{100 * share:.0f}" for share in shares)
        out.append(f"{name:16} = {100 * mean:.1f} % (layers 0-{len(shares) - 1}: {each})")
    return out


def _record(args: argparse.Namespace, engine: Engine, result: Measurement, base: Base | None,
            per_token: bool) -> dict[str, Any]:
    """The results for programs. Numbers that are not finite become null."""
    ppl, error = result.ppl
    record: dict[str, Any] = {
        "model": str(args.model), "text": None if args.file is None else str(args.file), "sparsity": engine.sparsity,
        "per_token": per_token, "kv_type": args.kv_type, "threads": engine.threads, "n_ctx": result.n_ctx,
        "n_chunk": result.n_chunk, "scored": len(result.nll), "ppl": ppl, "ppl_error": error,
        "tokens_per_second": result.tokens / result.seconds if result.seconds > 0 else None,
    }  # fmt: skip
    if base is not None:
        record["kl_base"] = str(args.kl_base)
        record["kl"] = {k: {"value": v, "error": e} for k, (v, e) in result.kl.numbers().items()}
        record["kld_percentiles"] = result.kl.kld_percentiles()
        record["p_diff_percentiles"] = result.kl.p_diff_percentiles()
    if per_token:
        stats = engine.layer_stats()
        record["layers"] = {"checked": stats.checked.tolist(), "computed": stats.computed.tolist(),
                            "bytes_share": (stats.bytes_read / stats.bytes_dense).tolist()}  # fmt: skip
        record["bytes_share"] = stats.bytes_share
    finite: dict[str, Any] = _finite(record)
    return finite


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _path(text: str) -> Path:
    if not text:  # Path("") would be the current folder
        raise HotcoldError("no such file: ''")
    return Path(text)
