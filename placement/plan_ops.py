"""The operators of a token with their devices and prerequisites, and what each is expected to read.

In: a placement, the model's file. Out: OpLines, as a table or for JSON. Next: plan_command.py prints them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from hotcold.placement.plan_model import PlanModel
from hotcold.placement.plan_vram import CPU_ONLY, Placement, candidates, rates
from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.gguf_file import GGUFFile
from hotcold.runtime.plan import Op, Plan, make_plan, prerequisites, readings
from hotcold.runtime.weights import load_weights


@dataclass(frozen=True)
class OpLine:
    """One operator. Numbers of operators count from 0 in the order of the token's program."""

    number: int
    layer: int  # -1: outside the layers
    kind: str
    device: str
    mode: str
    early: bool  # on the GPU's second stream
    needs: tuple[int, ...]  # must have ended before it starts
    writes: tuple[str, ...]
    matrices: tuple[str, ...]  # name, how many rows, whether they are chosen
    n_bytes: float  # expected, of one token with a context half full
    seconds: float  # what reading them takes


def plan_of(file: GGUFFile, config: ModelConfig, placement: Placement) -> Plan:
    """The runtime's own plan, as it would run."""
    gpu = None if placement.kind == CPU_ONLY else placement.for_engine
    return make_plan(config, load_weights(file, config), placement.sparsity, gpu)


def op_lines(plan: Plan, model: PlanModel, placement: Placement) -> list[OpLine]:
    one = rates(model, placement.hardware)
    lines = []
    for number, (op, needs) in enumerate(zip(plan.token, prerequisites(plan.token), strict=True)):
        gpu = op.device == "gpu"
        read, rows = (one.gpu_read, one.gpu_rows) if gpu else (one.cpu_read, one.cpu_rows)
        parts, n_bytes, seconds = [], 0.0, 0.0
        for reading in readings(op):
            count = _chosen(op, reading.matrix, model, placement) if reading.chosen else float(reading.rows)
            n_bytes += count * reading.row_bytes
            seconds += count * reading.row_bytes * (rows if reading.chosen else read)
            name = reading.matrix.removesuffix(".weight").split(".", 2 if reading.matrix.startswith("blk.") else 0)[-1]
            chosen = f"{count:.0f} of " if reading.chosen else ""
            parts.append(f"{name} {chosen}{reading.rows} rows")
        if op.kind == "attend":
            window = model.window[op.layer]
            seen = min(window, model.n_ctx / 2) if window else model.n_ctx / 2
            n_bytes = model.sizes.layers[op.layer].kv * seen / model.n_ctx
            seconds = n_bytes * read
            parts.append(f"cache of {seen:.0f} tokens")
        if op.kind == "merge":
            seconds += one.t_sync * placement.p_cold[op.layer]
        lines.append(OpLine(number, op.layer, op.kind, op.device, op.mode, op.early, needs, op.writes, tuple(parts),
                            n_bytes, seconds))  # fmt: skip
    return lines


def _chosen(op: Op, matrix: str, model: PlanModel, placement: Placement) -> float:
    """Expected rows that are read of those that an operator chooses among."""
    f, density = model.frequency[op.layer], model.density[op.layer]
    if placement.sparsity == "dense":
        f = np.ones(len(f))
    first, end = op.neurons or (0, len(f))
    predicted = placement.sparsity == "predict" and density is not None
    if predicted and density is not None and matrix.endswith((schema.FFN_GATE, schema.FFN_UP)):
        f = candidates(f, density)
    return float(f[first:end].sum())


def one_of_each(lines: Sequence[OpLine]) -> tuple[list[OpLine], dict[int, list[int]]]:
    """-> operators outside the layers and of the first layer of each kind; that layer -> all layers like it."""
    by_layer: dict[int, list[OpLine]] = {}
    for line in lines:
        by_layer.setdefault(line.layer, []).append(line)
    alike: dict[tuple[tuple[str, str, str, bool], ...], list[int]] = {}
    for layer, own in by_layer.items():
        if layer >= 0:
            alike.setdefault(tuple((x.kind, x.device, x.mode, x.early) for x in own), []).append(layer)
    groups = {layers[0]: layers for layers in alike.values()}
    return [line for line in lines if line.layer < 0 or line.layer in groups], groups


def ops_table(lines: Sequence[OpLine]) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False)
    for heading in ("#", "layer", "operator", "device", "after", "reads", "KiB", "us"):
        right = heading in ("#", "layer", "KiB", "us")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for line in lines:
        kind = f"{line.kind} ({line.mode})" if line.mode else line.kind
        device = {"gpu": "GPU", "cpu": "CPU"}[line.device] + (", early" if line.early else "")
        table.add_row(str(line.number), "" if line.layer < 0 else str(line.layer), kind, device,
                      " ".join(map(str, line.needs)), ", ".join(line.matrices),
                      f"{line.n_bytes / 1024:.1f}" if line.n_bytes else "",
                      f"{line.seconds * 1e6:.1f}" if line.seconds else "")  # fmt: skip
    return table
