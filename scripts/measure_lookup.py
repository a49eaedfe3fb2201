#!/usr/bin/env python3
"""What prompt-lookup decoding (--lookup) gains and costs on this machine, and whether the text stays the same.

In: models (neuron-split or stock GGUF). Out: two Markdown tables. The first says what a run of several tokens costs, in
runs of one, and how many neurons and feed-forward bytes it needs; a model without vocabulary has only this one. The
second is of texts that repeat their prompt and texts that do not: both ways take turns, speeds are medians, the ratio
is the median (lowest-highest) of neighbours. A text that differs is an error.

    python scripts/measure_lookup.py MODEL.gguf [--modes dense,exact,predict] [--threads 2] [--tokens 128] [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hotcold.runtime.api import Model
from hotcold.runtime.arguments import count
from hotcold.runtime.engine import Engine
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.generate import GenerationStats
from hotcold.runtime.lookup import MAX_DRAFT, draft_limit
from hotcold.runtime.sampling import Sampler, SamplingParams
from hotcold.runtime.stats import layer_stats
from hotcold.runtime.trace import Trace

SIZES = (1, 2, 4, 8)  # tokens in a run
CONTEXT = 64  # tokens before it
PASSAGE = """\
The harbour of Orsund lies at the end of a narrow fjord, and in winter the sun reaches it for two hours a day. Forty \
families live there. They mend nets in the morning, sail at noon when the wind turns, and come home by the light of \
the tower that the town built after the storm of 1871. The tower has a lamp with eleven lenses, which Karin Holm \
cleans every evening, as her mother did before her. When the lamp is dark, the old people say, the fish will not come. \
Last spring the town voted to replace it with a lamp that needs no cleaning. Karin voted for it too, but she kept one \
of the lenses, and it stands in her window, where it throws a small rainbow on the wall at noon."""
CODE = """def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)


def variance(values):
    center = mean(values)
    total = 0
    for value in values:
        total += (value - center) ** 2
    return total / len(values)


def deviation(values):
    return variance(values) ** 0.5
"""
TASKS = {
    "repeat": f"Repeat the following text word for word:\n\n{PASSAGE}",
    "summarise": f"Summarize the following text, quoting its most important sentences:\n\n{PASSAGE}",
    "edit code": f"Rename the variable total to result in this code. Print the whole code.\n\n```python\n{CODE}```",
    "chat": "Write a short story about a lighthouse and a storm.",
    "question": "Why is the sky blue, and why are sunsets red?",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--modes", default="dense,exact", help="of the sparsity, separated by commas (dense,exact)")
    parser.add_argument("--threads", type=count, default=None, help="default: what the machine gives this process")
    parser.add_argument("--tokens", type=count, default=128, help="to generate per text (128)")
    parser.add_argument("--rounds", type=count, default=5, help="of each measurement (5)")
    parser.add_argument("--lookup", type=count, default=MAX_DRAFT, help=f"most tokens drafted ({MAX_DRAFT})")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the texts, with a fixed seed (0)")
    args = parser.parse_args()
    try:
        draft_limit(args.lookup)
        params = SamplingParams(temperature=args.temperature, seed=1)
        for path in args.models:
            for mode in args.modes.split(","):
                with Model.open(path, mode, args.threads) as model:
                    print(f"\n{path.name}, {mode}, {model.session.engine.threads} threads\n", flush=True)
                    print_costs(path, model, args.rounds)
                    if model.session.has_vocabulary:
                        print_texts(model, params, args.tokens, args.rounds, args.lookup)
    except KeyboardInterrupt:
        print("measure_lookup: interrupted", file=sys.stderr)
        sys.exit(130)
    except HotcoldError as error:
        sys.exit(f"error: {error}")


# --- what a run of several tokens costs


def print_costs(path: Path, model: Model, rounds: int) -> None:
    engine = model.session.engine
    ids = some_tokens(model)
    cost = run_costs(engine, ids, 4 * rounds)
    union = unions(path, engine, ids)
    print("| tokens in a run | time, in runs of one | per token | neurons needed | per token | FFN bytes | per token |")
    print("|---|---|---|---|---|---|---|")
    for n in SIZES:
        neurons, read = union.get(n, (1.0, 1.0))
        print(f"| {n} | {cost[n]:.2f} | {cost[n] / n:.2f} | {neurons:.1%} | {neurons / n:.1%} | "
              f"{read:.1%} | {read / n:.1%} |")  # fmt: skip
    print(flush=True)


def some_tokens(model: Model) -> list[int]:
    n = 3 * CONTEXT
    if model.session.has_vocabulary:
        return model.tokenizer.encode(f"{PASSAGE}\n\n{CODE}", add_special=True)[:n]
    return [(7919 * i + 13) % model.config.n_vocab for i in range(n)]


def run_costs(engine: Engine, ids: Sequence[int], rounds: int) -> dict[int, float]:
    """Time of a run of n tokens over that of one: medians over rounds in which the sizes take turns."""
    engine.truncate(0)
    engine.forward(ids[:CONTEXT], "none")
    seconds: dict[int, list[float]] = {n: [] for n in SIZES}
    for _ in range(rounds + 1):
        for n in SIZES:
            began = time.perf_counter()
            engine.verify(ids[CONTEXT : CONTEXT + n])
            seconds[n].append(time.perf_counter() - began)
            engine.truncate(CONTEXT)
    return {n: statistics.median(many / one for many, one in zip(seconds[n][1:], seconds[1][1:], strict=True))
            for n in SIZES}  # fmt: skip


def unions(path: Path, engine: Engine, ids: Sequence[int]) -> dict[int, tuple[float, float]]:
    """n -> share of neurons that at least one of n neighbouring tokens needs; share of FFN bytes that a run reads.

    Empty where all are computed, or where predictors choose.
    """
    if engine.sparsity != "exact":
        return {}
    c = engine.config
    windows = {n: range(CONTEXT, len(ids) - n + 1, n) for n in SIZES}
    needed = {n: np.zeros((c.n_layer, 2), np.int64) for n in SIZES}
    with Trace.open(path, threads=engine.threads, n_ctx=len(ids)) as trace:
        trace.embed(ids)
        for layer in range(c.n_layer):
            trace.attention(layer, len(ids), 0)
            trace.keys(layer, len(ids))
            fired = trace.fired(layer, len(ids))
            for n, starts in windows.items():
                needed[n][layer] = len(starts) * c.n_ff[layer], sum(fired[i : i + n].any(0).sum() for i in starts)
            trace.values(layer, len(ids))
            trace.down(layer, len(ids))
    out = {}
    for n, counts in needed.items():
        stats = layer_stats(c, engine.weights, engine.plan, counts, len(windows[n]))
        out[n] = float(stats.computed.mean()), stats.bytes_share
    return out


# --- what that gives for texts


def print_texts(model: Model, params: SamplingParams, tokens: int, rounds: int, lookup: int) -> None:
    print("| text | tokens | tok/s plain | with lookup | ratio | drafted | accepted | tokens per run |")
    print("|---|---|---|---|---|---|---|---|")
    for name, message in TASKS.items():
        ids = model.encode_chat([{"role": "user", "content": message}])
        pairs = []  # generation statistics without and with lookup
        for turn in range(rounds + 1):
            order = (0, lookup) if turn % 2 else (lookup, 0)  # so that neither always comes second
            done = {limit: generate(model, ids, params, tokens, limit) for limit in order}
            (plain_text, plain), (text, stats) = done[0], done[lookup]
            if text != plain_text:
                raise HotcoldError(f"{name}: the text with lookup differs: {text!r}, without: {plain_text!r}")
            pairs.append((plain, stats))
        if not plain.eval_runs:  # the model ends at once
            continue
        clean = pairs[1:]  # the first round warms up and learns
        ratios = [stats.eval_rate / plain.eval_rate for plain, stats in clean]
        slow = statistics.median(plain.eval_rate for plain, _ in clean)
        fast = statistics.median(stats.eval_rate for _, stats in clean)
        print(f"| {name} | {stats.generated_tokens} | {slow:.1f} | {fast:.1f} | "
              f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) | {stats.drafted} | "
              f"{stats.accepted} | {stats.eval_tokens / stats.eval_runs:.2f} |", flush=True)  # fmt: skip


def generate(
    model: Model, ids: list[int], params: SamplingParams, tokens: int, lookup: int
) -> tuple[str, GenerationStats]:
    """The answer, from an empty cache."""
    stats, session = GenerationStats(), model.session
    session.forget()
    pieces = session.generate(ids, Sampler(params), max_tokens=tokens, continues=False, lookup=lookup, stats=stats)
    return "".join(pieces), stats


if __name__ == "__main__":
    main()
