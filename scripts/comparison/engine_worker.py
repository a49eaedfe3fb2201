"""Our side of the comparison, in a process of its own: timings like llama-bench's, or logits for given ids.

In: a model that hotcold runs. Out: one JSON line per test (`bench`), or a .npy of logits (`logits`).
Next: compare_llama_cpp.py, which starts it.

    python scripts/engine_worker.py bench MODEL -p 256 -n 64 -t 2 --sparsity exact
    python scripts/engine_worker.py logits MODEL IDS.npy OUT.npy -t 2

As llama-bench does, `bench` feeds random ids, warms up once, and times neither tokenizing nor sampling: the prompt in
one call of Engine.forward, generated tokens one call each from an empty context.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

from hotcold.runtime.engine import Engine
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.plan import SPARSITY_MODES


def note(line: str) -> None:
    print(line, file=sys.stderr)


def time_prompt(engine: Engine, ids: np.ndarray) -> tuple[float, float]:
    """(wall, CPU) seconds for the whole prompt; the last token's logits."""
    engine.truncate(0)
    wall, cpu = time.perf_counter(), time.process_time()
    engine.forward(ids.tolist())
    return time.perf_counter() - wall, time.process_time() - cpu


def time_generation(engine: Engine, ids: np.ndarray) -> tuple[float, float]:
    """(wall, CPU) seconds for the ids one by one, logits of each."""
    engine.truncate(0)
    engine.reset_stats()
    wall, cpu = time.perf_counter(), time.process_time()
    for token in ids.tolist():
        engine.forward([token])
    return time.perf_counter() - wall, time.process_time() - cpu


def bench(args: argparse.Namespace) -> None:
    rng = np.random.default_rng(args.seed)
    n_ctx = max(args.prompt_tokens, args.gen_tokens)
    start = time.perf_counter()
    engine = Engine.open(args.model, sparsity=args.sparsity, threads=args.threads, n_ctx=n_ctx, notify=note)
    loaded = time.perf_counter() - start
    try:
        for n_prompt, n_gen in ((args.prompt_tokens, 0), (0, args.gen_tokens)):
            n = n_prompt + n_gen
            if n == 0:
                continue
            ids = rng.integers(0, engine.config.n_vocab, n)
            measure = time_prompt if n_prompt else time_generation
            measure(engine, ids if n_prompt else ids[:1])  # warm-up, as llama-bench does it
            samples = [measure(engine, ids) for _ in range(args.reps)]
            line = {
                "n_prompt": n_prompt, "n_gen": n_gen, "n_threads": engine.threads,
                "sparsity": engine.sparsity, "load_s": loaded,
                "samples_ts": [n / wall for wall, _ in samples], "cpu_s": [cpu for _, cpu in samples],
                "share_computed": float(engine.layer_stats().computed.mean()) if n_gen else None,
            }  # fmt: skip
            print(json.dumps(line), flush=True)
    finally:
        engine.close()


def logits(args: argparse.Namespace) -> None:
    ids = np.load(args.ids).tolist()
    engine = Engine.open(args.model, sparsity=args.sparsity, threads=args.threads, n_ctx=len(ids), notify=note)
    try:
        np.save(args.out, engine.forward(ids, logits="all"))
    finally:
        engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="Timings and logits of hotcold, for compare_llama_cpp.py.")
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("bench")
    one.add_argument("model", type=Path)
    one.add_argument("-p", "--prompt-tokens", type=int, default=256)
    one.add_argument("-n", "--gen-tokens", type=int, default=64)
    one.add_argument("-r", "--reps", type=int, default=1)
    one.add_argument("--seed", type=int, default=0)
    one.set_defaults(run=bench)
    two = commands.add_parser("logits")
    two.add_argument("model", type=Path)
    two.add_argument("ids", type=Path)
    two.add_argument("out", type=Path)
    two.set_defaults(run=logits)
    for command in (one, two):
        command.add_argument("-t", "--threads", type=int, default=None)
        command.add_argument("--sparsity", default="auto", choices=SPARSITY_MODES)
    args = parser.parse_args()
    try:
        args.run(args)
    except (HotcoldError, OSError) as error:
        print(f"engine_worker: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
