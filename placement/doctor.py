"""`hotcold doctor`: measure this machine and say what hotcold does here.

In: machine.py's findings, and a GGUF if one is named. Out: tables, or JSON. Next: nothing; the figures are in the
user's cache, where plan_vram.py finds them.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hotcold.placement.hardware import Hardware
from hotcold.placement.machine import Machine, Say, describe_machine, figures
from hotcold.placement.predictor import computed, rows_of
from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.console import emit
from hotcold.runtime.errors import GGUFError, HotcoldError
from hotcold.runtime.facts import fires, read_counts
from hotcold.runtime.gguf_file import GGUFFile, open_gguf, safe_text
from hotcold.runtime.inspect import format_bytes
from hotcold.runtime.plan import choose_sparsity
from hotcold.runtime.weights import load_weights


@dataclass(frozen=True)
class ModelReads:
    """Bytes a token reads, without the KV cache."""

    path: str
    activation: str
    layout: str
    dense: int
    exact: int | None  # None: not possible or not known, see `why`
    why: str
    size: int  # bytes of the file
    mode: str  # what hotcold runs it in: "exact" | "dense"; "": it does not


def model_reads(file: GGUFFile, config: ModelConfig) -> ModelReads:
    """Dense: every matrix once, of the embedding one row. Exact: the rest of a neuron's rows only if it fires.

    Raises GGUFError for tensors that the model cannot have.
    """
    mode = why = ""
    try:
        load_weights(file, config)
        mode = choose_sparsity(config, "auto")[0]
    except GGUFError:
        raise
    except HotcoldError as e:  # of types that are not computed
        why = str(e)
    tables = (schema.FFN_NEURON_ID, schema.FFN_NEURON_COUNT, *schema.PRED_TENSORS)
    tied = "output.weight" not in file.tensors
    dense = 0
    for name, info in file.tensors.items():
        part = name.split(".", 2)[2] if name.startswith("blk.") else ""
        if part in tables or name == "position_embd.weight" or name == "token_embd.weight" and not tied:
            continue
        dense += info.n_bytes
    exact = None
    counts = read_counts(file, config)
    if why:
        pass
    elif not fires(config):
        why = (f"activation {config.activation} has no neurons that are off: hotcold relufy makes a model that has, "
               "hotcold calibrate sets thresholds")  # fmt: skip
    elif config.layout != "neuron-split":
        why = "stock layout: hotcold convert makes a file that can skip neurons"
    elif counts is None:
        why = "not known how many neurons fire: hotcold profile counts, hotcold place stores"
    else:
        layers = [(rows_of(file, config, n), computed(config, n, 1 - s)) for n, s in enumerate(counts.sparsity)]
        exact = dense - round(sum(rows.total * (1 - rows.exact(share)) for rows, share in layers))
    return ModelReads(safe_text(str(file.path)), config.activation, config.layout, dense, exact, why, file.size, mode)


def would_do(machine: Machine, reads: ModelReads | None) -> list[str]:
    """What hotcold does on this machine, in sentences."""
    if machine.missing:
        return [f"this CPU lacks {', '.join(machine.missing)}, which the kernels need: hotcold does not run here"]
    threads = f"{machine.threads} thread{'s' * (machine.threads > 1)}"
    if machine.gpus:
        lines = [f"{machine.gpus[0]}: hotcold place plans what it would hold; the CPU computes, {threads}"]
    else:
        lines = [f"no GPU ({machine.gpu_reason}): everything is computed on the CPU, {threads}"]
    if reads is None:
        return [*lines, "ReLU models run in exact mode (neurons that are off are skipped), so do "
                "SiLU and GELU models with thresholds, others dense"]
    if not reads.mode:
        return [*lines, f"it does not run this file: {reads.why}"]
    lines.append(f"{reads.path}: {reads.mode} mode" + (f" ({reads.why})" if reads.why else ""))
    if reads.size > machine.ram:
        lines.append(f"the file ({format_bytes(reads.size)}) is larger than RAM ({format_bytes(machine.ram)}): tokens "
                     "wait for the disk")  # fmt: skip
    return lines


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `hotcold doctor`."""
    parser.add_argument("model", metavar="MODEL", type=Path, nargs="?", help="GGUF file: also say what it does here")
    parser.add_argument("--json", action="store_true", help="print JSON; \"hardware\" in it is a file for --hardware")
    parser.add_argument("--refresh", action="store_true", help="measure again, even if the figures are known")


def run(args: argparse.Namespace) -> int:
    """Measure, print; returns the exit status. Raises HotcoldError for a MODEL that cannot be read."""
    reads = None
    if args.model is not None:  # first, so that a wrong name is told before measuring
        with open_gguf(args.model) as file:
            reads = model_reads(file, ModelConfig.from_gguf(file))
    with _status() as say:
        say("looking at the machine")
        machine = describe_machine()
        hardware, cached, problem = figures(machine, args.refresh, say, None)
    if args.json:
        emit(sys.stdout, json.dumps(_as_json(machine, hardware, cached, problem, reads), indent=2) + "\n")
    else:
        _print(_tables(machine, hardware, cached, problem, reads), [*would_do(machine, reads)])
    return 0


@contextmanager
def _status() -> Iterator[Say]:
    """A line on stderr that says what is being measured, on a terminal only."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("measuring") as status:
        yield lambda text: status.update(f"measuring: {text}")


def _bounds(hardware: Hardware, reads: ModelReads) -> tuple[float, float | None]:
    """Tokens per second that RAM allows: dense, exact."""
    bandwidth = hardware.cpu_bandwidth
    return bandwidth / max(reads.dense, 1), None if reads.exact is None else bandwidth / max(reads.exact, 1)


def _as_json(
    machine: Machine, hardware: Hardware, cached: bool, problem: str, reads: ModelReads | None
) -> dict[str, Any]:  # fmt: skip
    described = dataclasses.asdict(machine) | {"cgroup": machine.cgroup if math.isfinite(machine.cgroup) else None}
    out = {"hardware": dataclasses.asdict(hardware), "cached": cached, "machine": described, "problem": problem,
           "would_do": would_do(machine, reads)}  # fmt: skip
    if reads is not None:
        dense, exact = _bounds(hardware, reads)
        out["model"] = dataclasses.asdict(reads) | {"dense_tokens_per_second": dense, "exact_tokens_per_second": exact}
    return out


def _tables(
    machine: Machine, hardware: Hardware, cached: bool, problem: str, reads: ModelReads | None
) -> list[Table]:  # fmt: skip
    def rate(value: float) -> str:
        return f"{value / 1e9:.1f} GB/s"

    limit = f"{machine.cgroup:g}" if math.isfinite(machine.cgroup) else "no limit"
    rows = [
        ("CPU", f"{machine.cpu}; {', '.join(machine.features) or 'no features that the kernels use'}"),
        ("kernels", f"{machine.kernels} path"),
        ("cores", f"{machine.cores} ({machine.logical} logical), {machine.allowed} allowed, control group: {limit}"),
        ("threads", f"{machine.threads} by default"),
        ("RAM", f"{format_bytes(machine.ram)}, last-level cache {format_bytes(machine.cache)}"),
        ("RAM bandwidth", f"{rate(hardware.cpu_bandwidth_1)} by one thread, {rate(hardware.cpu_bandwidth)} by all"),
    ]
    if hardware.has_gpu:
        rows += [
            ("GPU", f"{hardware.gpu}, {format_bytes(hardware.vram)}"),
            ("VRAM bandwidth", rate(hardware.gpu_bandwidth)),
            ("PCIe", rate(hardware.pcie)),
            ("synchronisation", f"{hardware.t_sync * 1e6:.1f} us"),
        ]
    else:
        rows.append(("GPU", machine.gpu_reason or "there, but see below"))
        rows.append(("VRAM, PCIe", "not measured: no GPU that can be used"))
    if problem:
        rows.append(("caution", problem))
    rows.append(("figures", "measured before (--refresh measures again)" if cached else "measured now"))
    tables = [_table("This machine", rows)]
    if reads is not None:
        dense, exact = _bounds(hardware, reads)
        rows = [("dense", f"{format_bytes(reads.dense)} read per token: at most {dense:.1f} tokens/s")]
        if reads.exact is None or exact is None:
            rows.append(("exact", reads.why))
        else:
            rows.append(("exact", f"{format_bytes(reads.exact)} read per token ({reads.exact / reads.dense:.1%} of "
                                  f"dense): at most {exact:.1f} tokens/s"))  # fmt: skip
        tables.append(_table(f"Model {reads.path}", rows))
    return tables


def _table(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(title=Text(title), title_justify="left", title_style="bold", show_header=False, box=None,
                  pad_edge=False)  # fmt: skip
    for what, value in rows:
        table.add_row(Text(what), Text(value, overflow="fold"))
    return table


def _print(tables: Sequence[Table], lines: Sequence[str]) -> None:
    """On a terminal in its width; for a pipe in whole lines."""
    terminal = sys.stdout.isatty()
    console = Console() if terminal else Console(file=io.StringIO(), width=1 << 12, color_system=None)
    with console.capture() as capture:
        for table in tables:
            console.print(table)
            console.print()
        for line in lines:
            console.print(Text(line, overflow="fold"))
    text = capture.get()
    emit(sys.stdout, text if terminal else "".join(line.rstrip() + "\n" for line in text.splitlines()))
