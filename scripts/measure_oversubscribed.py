#!/usr/bin/env python3
"""How long decoding takes where others want the same cores, and more threads are asked for than there are cores.

In: a model (neuron-split or stock GGUF). Out: a Markdown table. Beside the decoding runs one process per core, never at
rest. All ways take turns, each in a model opened anew; times are medians (lowest-highest), a ratio is the median of
those within a round.

    python scripts/measure_oversubscribed.py MODEL.gguf [--tokens 64] [--rounds 3] [--sparsity auto]

As many busy processes as cores leave about half of the machine, so twice the time is the fair share; at most three
times that is wanted, six times the time alone. Threads that wait for each other without yielding would need far more.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from comparison.report import spread, table

from hotcold.runtime.arguments import count
from hotcold.runtime.engine import Engine
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.plan import SPARSITY_MODES
from hotcold.runtime.threads import usable_cpus

FAIR, WANTED = 2, 3  # times alone; times the fair share
WARM_UP = 4  # tokens before the clock starts
# Busy until its parent is gone, so that none is left behind.
BURN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(10000))"

Way = tuple[int, int]  # threads that decode, busy processes beside them


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=count, default=64, help="to generate per run (64)")
    parser.add_argument("--rounds", type=count, default=3, help="of all ways (3)")
    parser.add_argument("--sparsity", choices=SPARSITY_MODES, default="auto")
    args = parser.parse_args()
    try:
        cores = max(1, int(usable_cpus()))
        rounds = [{way: seconds(args.model, args.sparsity, *way, args.tokens) for way in ways(cores)}
                  for _ in range(args.rounds)]  # fmt: skip
    except (HotcoldError, OSError) as error:
        print(f"measure_oversubscribed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("measure_oversubscribed: interrupted", file=sys.stderr)
        return 130
    print(f"{args.model.name}, {args.tokens} tokens, {cores} cores\n")
    print(report(rounds, cores, args.tokens))
    return 0


def ways(cores: int) -> list[Way]:
    """Alone with as many threads as cores, and with twice as many; then the same beside busy processes; 2 threads."""
    alone = [(cores, 0), (2 * cores, 0), (min(2, cores), 0)]
    beside = [(cores, cores), (2 * cores, cores), (2, cores)]
    return list(dict.fromkeys(alone + beside))


def seconds(path: Path, sparsity: str, threads: int, busy: int, tokens: int) -> float:
    """To decode so many tokens, one by one. Raises HotcoldError."""
    with Engine.open(path, sparsity=sparsity, threads=threads, n_ctx=WARM_UP + tokens) as engine, burners(busy):
        ids = [(7919 * i + 13) % engine.config.n_vocab for i in range(WARM_UP + tokens)]
        for token in ids[:WARM_UP]:
            engine.forward([token])
        began = time.perf_counter()
        for token in ids[WARM_UP:]:
            engine.forward([token])
        return time.perf_counter() - began


@contextmanager
def burners(n: int) -> Iterator[None]:
    running = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(n)]
    try:
        time.sleep(0.5 if n else 0.0)  # until they are at work
        yield
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


def report(rounds: list[dict[Way, float]], cores: int, tokens: int) -> str:
    rows = []
    for threads, busy in rounds[0]:
        base = (min(threads, cores), 0)
        ratios = [this[threads, busy] / this[base] for this in rounds]
        wanted = FAIR * WANTED if busy else None
        rows.append([
            str(threads), str(busy), spread([1e3 * this[threads, busy] / tokens for this in rounds]),
            "" if (threads, busy) == base else spread(ratios), f"≤ {wanted}" if wanted else "",
            ("yes" if statistics.median(ratios) <= wanted else "no") if wanted else "",
        ])  # fmt: skip
    header = ["threads", "busy processes beside", "ms per token", "times alone", "wanted", "reached"]
    return table(header, rows) + (
        f"\n\nAlone: as many threads, at most one per core. A fair share is about half of the machine, {FAIR} times "
        f"the time alone; wanted is at most {WANTED} times that."
    )


if __name__ == "__main__":
    sys.exit(main())
