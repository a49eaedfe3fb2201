"""`hotcold place`: neurons sorted by how often they fire, and divided between GPU and CPU for the budgets given.

In: a neuron-split GGUF, a profile (or the counts the file has), budgets. Out: tables, and with -o a sorted GGUF with
counts and placement index. Next: rewrite.py (writing), budget.py (dividing).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGUFValueType
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from hotcold.convert.lazy import QType
from hotcold.convert.main import writing_progress
from hotcold.convert.model import Metadata, MetaValue, array, string
from hotcold.placement.identity import model_id
from hotcold.placement.rewrite import rewrite, split_config
from hotcold.runtime import schema
from hotcold.runtime.atomic import check_output
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.facts import Counts, read_counts
from hotcold.runtime.gguf_file import GGUFFile, open_gguf, safe_text

if TYPE_CHECKING:
    from hotcold.placement.plan_vram import Placement
    from hotcold.placement.profile import Profile

SHARE = 0.8  # of a layer's firings, for its skew
PLACEMENT_KEYS = (
    schema.KEY_PLACEMENT_MODEL, schema.KEY_PLACEMENT_BUDGET, schema.KEY_PLACEMENT_N_CTX, schema.KEY_PLACEMENT_PLAN,
    schema.KEY_PLACEMENT_SPARSITY, schema.KEY_PLACEMENT_OBJECTIVE, schema.KEY_PLACEMENT_HARDWARE,
    schema.KEY_PLACEMENT_HOT, schema.KEY_PLACEMENT_KEYS_ON_GPU, schema.KEY_PLACEMENT_LAYER_ON_GPU,
)  # fmt: skip


@dataclass(frozen=True)
class Sorting:
    """New order of a file's neurons, and what is then to be written."""

    order: tuple[np.ndarray, ...]  # per layer i64 [n_ff]: stored position of the neuron that goes to i
    counts: Counts                 # in the new order

    @property
    def frequency(self) -> list[np.ndarray]:
        """Per layer f64 [n_ff], descending: share of tokens on which a neuron fires."""
        return [fired / self.counts.tokens for fired in self.counts.fired]

    @property
    def tensors(self) -> dict[str, tuple[np.ndarray, QType]]:
        return {schema.block(layer, schema.FFN_NEURON_COUNT): (fired, QType.I64)
                for layer, fired in enumerate(self.counts.fired)}  # fmt: skip

    @property
    def metadata(self) -> Metadata:
        return {
            schema.KEY_PROFILE_TOKENS: MetaValue(self.counts.tokens, GGUFValueType.UINT64),
            schema.KEY_PROFILE_CORPUS: string(self.counts.corpus),
            schema.KEY_PROFILE_SHA256: string(self.counts.sha256),
            schema.KEY_SPARSITY: array(self.counts.sparsity, GGUFValueType.FLOAT32),
        }


def sort_by(profile: Profile, file: GGUFFile, config: ModelConfig) -> Sorting:
    """Neurons of `file` in descending count; equal counts by magnitude, then by position in the source model.

    The result depends on the profile alone, not on the order the file has now. Raises HotcoldError for a profile of
    another model.
    """
    from hotcold.placement.profile import check_profile

    check_profile(profile, file, config)
    if profile.n_tokens < 1:
        raise HotcoldError(f"{safe_text(str(file.path))}: the profile counts no token: profile the model again")
    orders, fired = [], []
    for layer in range(config.n_layer):
        ids = file.data(schema.block(layer, schema.FFN_NEURON_ID))  # stored -> source
        count, magnitude = profile.fired[layer], profile.magnitude[layer]
        source = np.lexsort((np.arange(len(ids)), -magnitude, -count))  # the last key is the first criterion
        orders.append(np.argsort(ids)[source])
        fired.append(np.ascontiguousarray(count[source], np.int64))
    counts = Counts(profile.n_tokens, profile.corpus, profile.sha256, tuple(fired))
    return Sorting(tuple(orders), counts)


def as_sorted(file: GGUFFile, config: ModelConfig) -> Sorting:
    """The order and counts that the file has. Raises HotcoldError where it is not sorted."""
    path = safe_text(str(file.path))
    counts = read_counts(file, config)
    if counts is None:
        raise HotcoldError(f"{path}: how often its neurons fire is not known: run hotcold profile {path}, then give "
                           "the result with --profile")
    for layer, fired in enumerate(counts.fired):
        if (np.diff(fired) > 0).any():
            raise HotcoldError(f"{path}: layer {layer}: neurons are not in descending order of their counts: give "
                               "the profile with --profile to sort them")
    return Sorting(tuple(np.arange(n) for n in config.n_ff), counts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `hotcold place`."""
    from hotcold.placement.budget import add_budget_arguments

    parser.add_argument("model", metavar="MODEL", type=Path, help="neuron-split GGUF file (from hotcold convert)")
    parser.add_argument("--profile", metavar="P", type=Path,
                        help="what hotcold profile counted; not needed for a file that is sorted already")
    parser.add_argument("-o", "--outfile", metavar="OUT", type=Path,
                        help="file to write: sorted, with counts and placements (default: only show the tables)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    add_budget_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Sort and place as the arguments say; returns the exit status. Raises HotcoldError with one line for the user."""
    from hotcold.placement.budget import placement_table, placements_from_args
    from hotcold.placement.placement_index import read_placements

    if not args.model.exists():
        raise HotcoldError(f"{safe_text(str(args.model))}: no such file")
    if args.outfile is not None:
        check_output(args.outfile, args.force, args.model.stat().st_size)
    with open_gguf(args.model) as file:
        config = split_config(file)
        if args.profile is not None:
            from hotcold.placement.profile import load_profile

            sorting = sort_by(load_profile(args.profile), file, config)
        else:
            sorting = as_sorted(file, config)
        placements = placements_from_args(args, file, config, sorting.frequency)
        stored = [] if placements or args.profile is not None else read_placements(file, config)
        model = model_id(file, config)
    if args.outfile is not None and args.profile is None and not placements:
        raise HotcoldError(f"{safe_text(str(args.outfile))}: would be a copy of MODEL: give --profile to sort, or "
                           "--vram-budget to place")
    if args.outfile is not None:  # before the tables, whose reader may go away
        console = Console(stderr=True, highlight=False)
        write_sorted(args.model, args.outfile, sorting, placement_keys(model, placements), args.force, console)
    shown = placements or stored
    show([layer_table(sorting.counts, shown), *(placement_table(p) for p in shown)])
    return 0


def placement_keys(model: str, placements: Sequence[Placement]) -> Metadata:
    """The placement index; nothing for no placements."""
    if not placements:
        return {}
    from hotcold.placement.placement_index import placement_metadata

    return placement_metadata(model, placements)


def write_sorted(src: Path, out: Path, sorting: Sorting, more: Mapping[str, MetaValue], force: bool,
                 console: Console | None = None) -> int:  # fmt: skip
    """Write the sorted file, showing progress on `console`; returns its size.

    A placement index that the file had goes: its hot sets were of another order or are solved anew in `more`.
    """
    bar = nullcontext(None) if console is None else writing_progress(console, src.stat().st_size)
    old = [key for key in PLACEMENT_KEYS if key not in more]
    with bar as progress:
        size = rewrite(src, out, order=sorting.order, tensors=sorting.tensors, metadata={**sorting.metadata, **more},
                       drop_keys=old, force=force, progress=progress)  # fmt: skip
    if console is not None:
        console.print(f"wrote {escape(safe_text(str(out)))} ({size / 1e6:.1f} MB)", soft_wrap=True)
    return size


def layer_table(counts: Counts, placements: Sequence[Placement] = ()) -> Table:
    """One row per layer: how sparse and how skewed it is, and how many neurons each budget makes hot."""
    from hotcold.placement.profile import skew
    from hotcold.runtime.inspect import format_bytes

    where = f"{counts.tokens} tokens of {safe_text(counts.corpus, 80) or 'an unnamed text'}"
    table = Table(title=escape(f"Neurons, counted over {where}"), title_justify="left", title_style="bold", box=None,
                  header_style="bold", pad_edge=False)  # fmt: skip
    headings = ["layer", "neurons", "sparsity", f"for {SHARE:.0%} of firings", "skew", "hottest", "coldest", "never"]
    for heading in [*headings, *(f"hot at {format_bytes(p.budget)}" for p in placements)]:
        table.add_column(heading, justify="right")
    for layer, (fired, sparsity) in enumerate(zip(counts.fired, counts.sparsity, strict=True)):
        share = skew(fired, SHARE)
        needed = [str(round(share * len(fired))), f"{share:.1%}"] if fired.any() else ["-", "-"]
        first, last = fired[0] / counts.tokens, fired[-1] / counts.tokens
        table.add_row(str(layer), str(len(fired)), f"{sparsity:.1%}", *needed, f"{first:.2%}", f"{last:.2%}",
                      str(int((fired == 0).sum())), *(str(p.hot[layer]) for p in placements))  # fmt: skip
    return table


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Called while one is handled. Rich would end the program with status 1: main() knows better."""
        raise BrokenPipeError


def show(tables: Sequence[RenderableType]) -> None:
    """Tables on stdout in whole lines, whatever the width of the terminal: it wraps them, but no digit is lost."""
    for table in tables:
        console = _Console(file=sys.stdout, highlight=False, width=1 << 12)
        console.width = console.measure(table).maximum
        console.print(table)
        console.print()
