"""Results of bench.py as tables and records.

In: Results, one after the other. Out: Markdown, JSON, one JSON object per line, or CSV on a stream. Next: nothing.

Columns and fields that llama-bench has keep its names and meaning; ours follow behind them. use_mmap is its name in
older builds, today's have load_mode.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from hotcold.runtime.bandwidth import cpu_name
from hotcold.runtime.console import emit
from hotcold.runtime.gguf_file import safe_text
from hotcold.runtime.kernels import simd

if TYPE_CHECKING:
    from hotcold.runtime.bench import Result

FORMATS = ("md", "json", "jsonl", "csv")


def record(result: Result) -> dict[str, Any]:
    """All fields, as JSON has them. Times of llama-bench's fields are nanoseconds, others say their unit."""
    r, s = result, result.setting
    ns, rates = np.array(r.samples_ns, np.float64), r.rates()
    return {
        "build_commit": version("hotcold"), "build_number": 0, "cpu_info": cpu_name(),
        "gpu_info": r.hybrid.name if r.hybrid else "", "backends": _backend(r),
        "model_filename": str(s.model), "model_type": r.model_type, "model_size": r.model_size,
        "model_n_params": r.model_n_params, "n_batch": r.n_batch, "n_ubatch": r.n_batch, "n_threads": s.threads,
        "type_k": s.kv_type, "type_v": s.kv_type, "n_gpu_layers": r.n_gpu_layers, "n_prompt": r.test.n_prompt,
        "n_gen": r.test.n_gen, "n_depth": r.test.n_depth, "test_time": r.test_time,
        "avg_ns": round(float(ns.mean())), "stddev_ns": round(_spread(ns)),
        "avg_ts": float(rates.mean()), "stddev_ts": _spread(rates),
        "samples_ns": r.samples_ns, "samples_ts": rates.tolist(),
        "sparsity": r.engine_sparsity, "share_checked": r.share_checked, "share_computed": r.share_computed,
        "bytes_share": r.bytes_share, "bytes_per_token": r.bytes_per_token, "bytes_per_s": r.bytes_per_second,
        "read_bandwidth": r.bandwidth, "bandwidth_share": r.bandwidth_share,
        "cpu_s": [n / 1e9 for n in r.samples_cpu_ns], "tokens_per_cpu_s": r.tokens_per_cpu_s, "load_s": r.load_s,
        "peak_rss": r.peak_rss, "use_mmap": r.use_mmap, "mlock": r.mlock, "load_average": r.load_average,
        "kernels": simd.ISA, "gpu_plan": r.gpu_plan, "vram": r.hybrid.vram if r.hybrid else 0,
        "gpu_skips": r.hybrid.skips if r.hybrid else None,
    }  # fmt: skip


def _backend(r: Result) -> str:
    if r.hybrid is None:
        return "CPU"
    return "CUDA" if r.gpu_plan == "all" else "CUDA+CPU"


def _spread(values: np.ndarray) -> float:
    """Standard deviation of a sample; 0 for a single one."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def ops_records(result: Result) -> list[dict[str, Any]]:
    return [{"name": op.name, "calls": op.calls, "ns": op.ns, "slowest_ns": op.slowest_ns, "share": op.share,
             "bytes_per_s": op.bytes_per_second} for op in result.ops]  # fmt: skip


# ---- one writer per format


class Writer:
    """A context manager; add() writes one result and flushes."""

    def __init__(self, stream: TextIO, ops: bool) -> None:
        self._stream, self._ops = stream, ops
        self._n = 0

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def add(self, result: Result) -> None:
        emit(self._stream, self.text(result))
        self._n += 1

    def text(self, result: Result) -> str:
        raise NotImplementedError

    def end(self) -> None:
        """After the last result, also when an error ends the measurement: what is there stays readable."""

    def fields(self, result: Result) -> dict[str, Any]:
        return record(result) | ({"ops": ops_records(result)} if self._ops else {})


class JsonLines(Writer):
    def text(self, result: Result) -> str:
        return json.dumps(self.fields(result)) + "\n"


class JsonArray(Writer):
    def text(self, result: Result) -> str:
        body = json.dumps(self.fields(result), indent=2).replace("\n", "\n  ")
        return ("[\n" if self._n == 0 else ",\n") + "  " + body

    def end(self) -> None:
        emit(self._stream, "\n]\n" if self._n else "[]\n")


class Csv(Writer):
    """Lists of samples are not in it, as in llama-bench's."""

    def text(self, result: Result) -> str:
        fields = {name: value for name, value in record(result).items() if not isinstance(value, list)}
        out = io.StringIO()
        lines = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n")
        if self._n == 0:
            out.write(",".join(fields) + "\n")
        lines.writerow(["" if v is None else int(v) if isinstance(v, bool) else v for v in fields.values()])
        return out.getvalue()


class Markdown(Writer):
    """llama-bench's table, then ours to its right; tables of operators follow at the end."""

    def __init__(self, stream: TextIO, ops: bool) -> None:
        super().__init__(stream, ops)
        self._tables: list[str] = []

    def text(self, result: Result) -> str:
        if self._ops:
            self._tables.append(ops_table(result) if result.ops else "")
        cells = [(cell(result), width, right) for _, width, right, cell in COLUMNS]
        line = "| " + " | ".join(_cell(*c) for c in cells) + " |\n"
        if self._n:
            return line
        heads = "| " + " | ".join(_cell(name, width, right) for name, width, right, _ in COLUMNS) + " |\n"
        rules = "| " + " | ".join(_rule(width, right) for _, width, right, _ in COLUMNS) + " |\n"
        return heads + rules + line

    def end(self) -> None:
        build = f"\nbuild: hotcold {version('hotcold')}, {cpu_name()}, {simd.ISA} kernels\n" if self._n else ""
        emit(self._stream, "".join(self._tables) + build)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _giga(value: float | None) -> str:
    return "" if value is None else f"{value / 1e9:.1f}"


def _size(n: int) -> str:
    return f"{n / 2**20:.2f} MiB" if n < 1 << 30 else f"{n / 2**30:.2f} GiB"


def _params(n: int) -> str:
    return f"{n / 1e6:.2f} M" if n < 10**9 else f"{n / 1e9:.2f} B"


# heading, width, right-aligned, what is in it
COLUMNS: tuple[tuple[str, int, bool, Callable[[Result], str]], ...] = (
    ("model", 30, False, lambda r: safe_text(r.model_type, 60)),
    ("size", 10, True, lambda r: _size(r.model_size)),
    ("params", 10, True, lambda r: _params(r.model_n_params)),
    ("backend", 7, False, lambda r: _backend(r)),
    ("threads", 7, True, lambda r: str(r.setting.threads)),
    ("kv", 4, False, lambda r: r.setting.kv_type),
    ("sparsity", 8, False, lambda r: r.engine_sparsity),
    ("test", 15, True, lambda r: r.test.name),
    ("t/s", 18, True, lambda r: f"{r.rates().mean():.2f} ± {_spread(r.rates()):.2f}"),
    ("computed", 8, True, lambda r: _percent(r.share_computed)),
    ("FFN read", 8, True, lambda r: _percent(r.bytes_share)),
    ("GB/s", 6, True, lambda r: _giga(r.bytes_per_second)),
    ("of RAM", 7, True, lambda r: _percent(r.bandwidth_share)),
    ("t/CPU-s", 8, True, lambda r: "" if r.tokens_per_cpu_s is None else f"{r.tokens_per_cpu_s:.2f}"),
    ("load s", 6, True, lambda r: f"{r.load_s:.2f}"),
    ("peak RSS", 10, True, lambda r: _size(r.peak_rss)),
)


def _cell(text: str, width: int, right: bool) -> str:
    text = text.replace("|", "\\|")
    return text.rjust(width) if right else text.ljust(width)


def _rule(width: int, right: bool) -> str:
    return "-" * (width - 1) + (":" if right else "-")


def ops_table(result: Result) -> str:
    """Where the time of one run went, per token of the test."""
    n, unit = result.test.n_tokens, 1e6
    lines = [
        f"\n{safe_text(result.model_type, 60)}, {result.setting.threads} threads, {result.engine_sparsity}, "
        f"{result.test.name}: work of one thread, mean of all\n",
        "| operator                     |    calls | ms/token |   share | slowest thread |   GB/s |",
        "| ---------------------------- | -------: | -------: | ------: | -------------: | -----: |",
    ]
    for op in result.ops:
        slow = op.slowest_ns / op.ns if op.ns > 0 else 1.0
        lines.append(f"| {op.name:28} | {op.calls or '':>8} | {op.ns / n / unit:8.4f} | {_percent(op.share):>7} "
                     f"| {f'× {slow:.2f}' if op.calls else '':>14} | {_giga(op.bytes_per_second):>6} |")  # fmt: skip
    return "\n".join(lines) + "\n"


_WRITERS: dict[str, type[Writer]] = {"md": Markdown, "json": JsonArray, "jsonl": JsonLines, "csv": Csv}


def writer(name: str, stream: TextIO, ops: bool) -> Writer:
    """The writer of one of FORMATS. ops: results hold tables of operators."""
    return _WRITERS[name](stream, ops)
