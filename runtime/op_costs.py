"""What single operators read and how long they took: bytes per token, and the table of `hotcold bench --ops`.

In: an engine that has run, its LayerStats, its operators' clocks. Out: bytes, OpCosts. Next: bench.py.

Operators of one name are one line: all layers' attn_q, all attention, all sparse feed-forward parts. A thread that
waits at a barrier works on nothing: what is left of the wall time is the line "waiting".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hotcold.runtime import schema
from hotcold.runtime.engine import Engine
from hotcold.runtime.plan import Op
from hotcold.runtime.stats import LayerStats
from hotcold.runtime.weights import Matrix

WAITING = "waiting"
_PREPARING = ("quant", "hidden")  # they name the matrix whose type their output must suit, and do not read it


@dataclass(frozen=True)
class OpCost:
    """One line of the table."""

    name: str
    calls: int
    ns: float  # of work, mean over the threads
    slowest_ns: float  # of the thread that worked longest
    share: float  # of the wall time
    bytes_per_second: float | None  # weights and KV cache; None where that is not known

    @classmethod
    def of(cls, name: str, calls: int, threads_ns: np.ndarray, wall_ns: float, n_bytes: float) -> OpCost:
        """threads_ns: f64 [n_threads]. n_bytes: read in all calls together; 0 or NaN: not known."""
        mean = float(threads_ns.mean())
        rate = 1e9 * n_bytes / mean if n_bytes > 0 and mean > 0 else None  # NaN is not above 0
        return cls(name, calls, mean, float(threads_ns.max()), mean / wall_ns, rate)


def token_bytes(engine: Engine, stats: LayerStats, contexts: np.ndarray) -> float:
    """Bytes of weights and KV cache read per generated token. contexts: i64, tokens each of them looks back at."""
    other = sum(_matrix_bytes(op, m) for op in engine.plan.token for m in op.weights if m is not None and not _ffn(m))
    layers = range(engine.config.n_layer)
    return float(other + stats.bytes_read.sum() + sum(cache_bytes(engine, n, contexts) for n in layers))


def cache_bytes(engine: Engine, layer: int, contexts: np.ndarray) -> float:
    """Bytes of keys and values that a token reads in a layer, mean over tokens that look back at `contexts`."""
    window = engine.config.window[layer]
    seen = np.minimum(contexts, window) if window else contexts
    return float(engine.cache_token_bytes * seen.mean()) if len(seen) else 0.0


def op_costs(
    engine: Engine, clocks: list[tuple[Op, bool, int, np.ndarray]], wall_ns: float, contexts: np.ndarray
) -> list[OpCost]:
    """Lines in descending order of time, "waiting" last.

    clocks: operator, whether it is of the program for many tokens, calls, f64 [n_threads] nanoseconds. contexts: i64,
    tokens that each token computed by the program for single ones looks back at.
    """
    stats = engine.layer_stats()
    times: dict[str, list[np.ndarray]] = {}
    calls: dict[str, int] = {}
    read: dict[str, float] = {}
    for op, many, n_calls, threads_ns in clocks:
        if not n_calls:
            continue
        name = op_name(op)
        times.setdefault(name, []).append(threads_ns)
        calls[name] = calls.get(name, 0) + n_calls
        read[name] = read.get(name, 0.0) + n_calls * _op_bytes(engine, op, many, stats, contexts)
    lines = [OpCost.of(name, calls[name], np.sum(t, axis=0), wall_ns, read[name]) for name, t in times.items()]
    lines.sort(key=lambda line: -line.ns)
    rest = max(0.0, wall_ns - sum(line.ns for line in lines))
    return [*lines, OpCost(WAITING, 0, rest, rest, rest / wall_ns, None)]


def op_name(op: Op) -> str:
    """matmul attn_q, attend, ffn, matmul output, ..."""
    matrix = next((m for m in op.weights if m is not None), None)
    if op.kind not in ("matmul", "columns", "down") or matrix is None:
        return op.kind
    stem = _stem(matrix).removesuffix(".weight")
    return f"{op.kind} {'output' if stem == 'token_embd' else stem}"


def _op_bytes(engine: Engine, op: Op, many: bool, stats: LayerStats, contexts: np.ndarray) -> float:
    """Bytes that one call reads; NaN where it chooses among the neurons of a block, which nobody counts."""
    if many and "list" in op.reads:
        return math.nan
    if op.kind == "attend":
        return 0.0 if many else cache_bytes(engine, op.layer, contexts)
    if op.kind == "ffn":
        mine = {id(m) for m in op.weights}
        readers = [other for other in engine.plan.token if other.kind not in _PREPARING]
        others = sum(
            m.n_bytes for other in readers for m in other.weights
            if m is not None and _ffn(m) and _layer(m) == op.layer and id(m) not in mine
        )  # fmt: skip
        return float(max(0.0, stats.bytes_read[op.layer] - others))
    return float(sum(_matrix_bytes(op, m) for m in op.weights if m is not None))


def _matrix_bytes(op: Op, matrix: Matrix) -> float:
    if op.kind == "embed":
        return matrix.stride
    if op.kind in _PREPARING:
        return 0
    bundled = matrix.name.endswith(schema.FFN_UP_DOWN) and op.kind != "ffn"
    return matrix.n_bytes / 2 if bundled else matrix.n_bytes  # the up rows or the down rows


def _stem(matrix: Matrix) -> str:
    """blk.3.attn_q.weight -> attn_q.weight"""
    return matrix.name.split(".", 2)[2] if matrix.name.startswith("blk.") else matrix.name


def _layer(matrix: Matrix) -> int:
    return int(matrix.name.split(".", 2)[1]) if matrix.name.startswith("blk.") else -1


def _ffn(matrix: Matrix) -> bool:
    """Whether LayerStats counts it."""
    stem = _stem(matrix)
    return stem.startswith("ffn_") and not stem.startswith("ffn_norm")
