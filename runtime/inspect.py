"""`hotcold inspect FILE`: what a GGUF holds, as tables.

In: a path. Out: tables on a rich console, or plain lines for a pipe. Next: nothing; config.py is where the numbers go.

Names and texts come from strangers: they are escaped and given to rich as plain text, never as markup.
"""

from __future__ import annotations

import io
import math
import os
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import GGUFError, HotcoldError
from hotcold.runtime.facts import fires, read_counts, read_placement_facts, read_predictor_facts, read_sparsity
from hotcold.runtime.gguf_file import GGUFFile, open_gguf, safe_text
from hotcold.runtime.gguf_parse import type_text
from hotcold.runtime.weights import load_weights

_SHOWN_ELEMENTS = 6
_SHOWN_CHARACTERS = 160
_UNLIMITED = 1 << 20  # columns: more than any line has


def format_bytes(n: int) -> str:
    """1536 -> '1.5 KiB'."""
    value, units = float(n), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{n} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def format_value(f: GGUFFile, key: str) -> str:
    """A metadata value on one printable line; of a long array the first elements and how many there are."""
    value: Any = f.metadata[key]
    if isinstance(value, str):
        return safe_text(value, _SHOWN_CHARACTERS)
    if isinstance(value, list | np.ndarray):
        shown = [f"'{safe_text(v, 30)}'" if isinstance(v, str) else _number(v) for v in value[:_SHOWN_ELEMENTS]]
        more = f", ... ({len(value)} in all)" if len(value) > _SHOWN_ELEMENTS else ""
        return "[" + ", ".join(shown) + more + "]"
    return _number(value)


def _number(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    return f"{value:.7g}" if isinstance(value, float | np.floating) else str(value)


def _plain_table(title: str, *columns: tuple[str, bool]) -> Table:
    """A table of (heading, right-aligned) columns."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for heading, right in columns:
        table.add_column(heading, justify="right" if right else "left", overflow="fold", no_wrap=right)
    return table


def _add(table: Table, *cells: object) -> None:
    table.add_row(*(Text(str(cell)) for cell in cells))  # Text: brackets in a name are no markup


def _summary(f: GGUFFile) -> Table:
    table = _plain_table("File", ("", False), ("", False))
    table.show_header = False
    n_weights = sum(math.prod(t.shape) for t in f.tensors.values())
    n_bytes = sum(t.n_bytes for t in f.tensors.values())
    _add(table, "path", safe_text(str(f.path)))
    _add(table, "size", f"{format_bytes(f.size)} ({f.size} bytes)")
    _add(table, "GGUF version", f"{f.version}, alignment {f.alignment}")
    _add(table, "tensors", f"{len(f.tensors)}, {n_weights / 1e6:.1f} M elements, {format_bytes(n_bytes)}")
    if n_weights:
        _add(table, "bits per weight", f"{8 * n_bytes / n_weights:.2f}")
    _add(table, "layout", "neuron-split" if schema.KEY_VERSION in f.metadata else "stock")
    try:
        config = ModelConfig.from_gguf(f)
        _add(table, "runs", _runs(f, config))
    except GGUFError as e:
        _add(table, "runs", f"no: {_without_path(f, e)}")
        return table
    _add(table, "layers", f"{config.n_layer}, embedding {config.n_embd}, vocabulary {config.n_vocab}")
    _add(table, "attention", f"{config.n_head} heads, {config.n_head_kv} for keys and values, size {config.head_dim}")
    _add(table, "FFN", f"{_range(config.n_ff)} neurons, {'gated' if config.gated else 'not gated'}, "
                       f"{config.activation} ({_off(config)})")  # fmt: skip
    if any(config.thresholds):
        _add(table, "thresholds", _range(config.thresholds))
    if any(config.window):
        _add(table, "sliding window", f"{max(config.window)} in {sum(w > 0 for w in config.window)} layers")
    _add(table, "trained context", config.n_ctx_train)
    if config.layout == "neuron-split":
        for row, lines in (("neurons", _counts), ("predictors", _predictors), ("placements", _placements)):
            try:
                for line in lines(f, config):
                    _add(table, row, line)
            except GGUFError as e:
                _add(table, row, f"unusable: {_without_path(f, e)}")
    return table


def _off(config: ModelConfig) -> str:
    if not fires(config):
        return "dense"
    if config.activation in schema.SPARSE_ACTIVATIONS:
        return "neurons switch off"
    n = sum(t > 0 for t in config.thresholds)
    return f"neurons switch off by thresholds in {n} of {config.n_layer} layers"


def _counts(f: GGUFFile, config: ModelConfig) -> Iterator[str]:
    counts = read_counts(f, config)
    if counts is None:
        shares = read_sparsity(f, config)
        yield "in no order of frequency: " + ("not profiled" if shares is None else "profiled, but not placed")
        if shares is not None:
            yield _sparsity(float(np.average(shares, weights=config.n_ff)), shares)
        return
    source = f"{counts.tokens} tokens of {safe_text(counts.corpus, _SHOWN_CHARACTERS) or 'an unnamed text'}"
    yield f"sorted by frequency: {'yes' if counts.sorted else 'no, but counted'}, {source}"
    yield _sparsity(counts.mean_sparsity, counts.sparsity)


def _sparsity(mean: float, shares: list[float]) -> str:
    return f"sparsity {mean:.1%} ({min(shares):.1%} to {max(shares):.1%} in {len(shares)} layers)"


def _predictors(f: GGUFFile, config: ModelConfig) -> Iterator[str]:
    facts = read_predictor_facts(f, config)
    if facts is None:
        return
    used = [layer for layer, kind in enumerate(facts.kinds) if kind != "none"]
    kinds = ", ".join(kind for kind in schema.PREDICTORS[1:] if kind in facts.kinds) or "none"
    quality = [("recall", facts.recall), ("density", facts.density)] if used else []
    weights = [config.n_ff[i] for i in used]  # a layer weighs what it has of the neurons
    means = [f"mean {name} {np.average([values[i] for i in used], weights=weights):.1%}"
             for name, values in quality if values]  # fmt: skip
    yield ", ".join([kinds, *means])
    if facts.falls_back:
        layers = ", ".join(map(str, facts.falls_back))
        yield f"exact in {len(facts.falls_back)} of {config.n_layer} layers: {layers}"


def _placements(f: GGUFFile, config: ModelConfig) -> Iterator[str]:
    counts = read_counts(f, config)
    for entry in read_placement_facts(f, config):
        share = sum(entry.hot) / sum(config.n_ff)
        line = f"{format_bytes(entry.budget)}, context {entry.n_ctx}: {share:.1%} of neurons"
        fired = sum(float(c.sum()) for c in counts.fired) if counts else 0.0
        if counts and fired:
            share = sum(float(c[:n].sum()) for c, n in zip(counts.fired, entry.hot, strict=True)) / fired
            line += f" on the GPU, which make {share:.1%} of firings"
        yield line if fired else line + " on the GPU"


def _runs(f: GGUFFile, config: ModelConfig) -> str:
    try:
        load_weights(f, config)
    except HotcoldError as e:
        return f"no: {_without_path(f, e)}"
    return f"yes, as {config.arch}"


def _without_path(f: GGUFFile, error: HotcoldError) -> str:
    return safe_text(str(error), 1000).removeprefix(safe_text(str(f.path)) + ": ")


def _range(values: tuple[float, ...]) -> str:
    low, high = min(values), max(values)
    return f"{low:.7g}" if low == high else f"{low:.7g} to {high:.7g}"


def _metadata(f: GGUFFile) -> Table:
    table = _plain_table("Metadata", ("key", False), ("type", False), ("value", False))
    for key, types in f.types.items():
        _add(table, safe_text(key), type_text(types).lower(), format_value(f, key))
    return table


def _tensors(f: GGUFFile) -> Table:
    table = _plain_table("Tensors", ("name", False), ("type", False), ("shape", True), ("size", True), ("offset", True))
    for t in f.tensors.values():
        shape = " x ".join(map(str, t.shape))
        _add(table, safe_text(t.name), t.ggml_type.name, shape, format_bytes(t.n_bytes), t.offset)
    return table


def _totals(f: GGUFFile) -> Table:
    table = _plain_table("Totals by type", ("type", False), ("tensors", True), ("elements", True), ("size", True),
                         ("bits per weight", True))  # fmt: skip
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for t in f.tensors.values():
        total = totals[t.ggml_type.name]
        total[0] += 1
        total[1] += math.prod(t.shape)
        total[2] += t.n_bytes
    for name, (count, elements, n_bytes) in sorted(totals.items(), key=lambda item: -item[1][2]):
        _add(table, name, count, elements, format_bytes(n_bytes), f"{8 * n_bytes / elements:.2f}")
    return table


def print_file(path: str | os.PathLike[str], console: Console) -> None:
    """Print summary, metadata, tensors and totals of a GGUF. Raises GGUFError if it cannot be trusted."""
    with open_gguf(path) as f:
        tables = [_summary(f), _metadata(f)]
        if f.tensors:
            tables += [_tensors(f), _totals(f)]
        for table in tables:
            console.print(table)
            console.print()


def file_lines(path: str | os.PathLike[str]) -> list[str]:
    """What print_file shows, as unstyled lines that are never wrapped and have no spaces at their ends, for a pipe.

    Raises GGUFError as print_file does.
    """
    console = Console(file=io.StringIO(), width=_UNLIMITED, force_terminal=False, color_system=None)
    with console.capture() as capture:
        print_file(path, console)
    return [line.rstrip(" ") for line in capture.get().removesuffix("\n").split("\n")]
