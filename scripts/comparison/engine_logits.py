"""Our logits for given ids, in a process of its own.

In: a model that hotcold runs, ids (.npy int [n]). Out: logits (.npy float32 [n, n_vocab]). Next: compare_llama_cpp.py,
which starts it.

    python scripts/comparison/engine_logits.py MODEL IDS.npy OUT.npy -t 2 --sparsity exact
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from hotcold.runtime.buffers import KV_TYPES
from hotcold.runtime.engine import Engine
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.plan import SPARSITY_MODES


def logits(args: argparse.Namespace) -> None:
    """Raises HotcoldError, OSError."""
    ids = np.load(args.ids)
    with Engine.open(args.model, sparsity=args.sparsity, threads=args.threads, n_ctx=len(ids), kv_type=args.kv_type,
                     notify=lambda line: print(line, file=sys.stderr)) as engine:  # fmt: skip
        if engine.sparsity == "predict":  # it predicts for single tokens only, blocks are computed in full
            rows = np.stack([engine.forward([token]) for token in ids.tolist()])
        else:
            rows = engine.forward(ids, logits="all")
        np.save(args.out, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description="Logits of hotcold for given token ids.")
    parser.add_argument("model", type=Path)
    parser.add_argument("ids", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("-t", "--threads", type=int, default=None)
    parser.add_argument("--sparsity", default="auto", choices=SPARSITY_MODES)
    parser.add_argument("--kv-type", default="f16", choices=list(KV_TYPES))
    try:
        logits(parser.parse_args())
    except (HotcoldError, OSError) as error:
        print(f"engine_logits: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
