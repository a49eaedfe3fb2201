"""The command `hotcold compile`: compiles the kernels for this CPU ahead of their first use.

In: the command line. Out: code in the cache, where every later start finds it. Next: kernels/cache.py.
"""

from __future__ import annotations

import argparse
import time

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hotcold.runtime.console import note
from hotcold.runtime.errors import HotcoldError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `hotcold compile`."""
    parser.add_argument("-q", "--quiet", action="store_true", help="say nothing where all is compiled already")


def run(args: argparse.Namespace) -> int:
    """Compile what is not in the cache yet. Raises HotcoldError where the kernels cannot run or not be kept."""
    from hotcold.runtime.kernels import cache, simd
    from hotcold.runtime.team import check_cpu, compiled_functions

    check_cpu()
    began, compiled, console = time.perf_counter(), False, Console(stderr=True, highlight=False)
    columns = (SpinnerColumn("line"), TextColumn("{task.description}"), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def show(name: str) -> None:
        nonlocal compiled
        compiled = True
        bar.update(task, description=f"compiling {name}")

    with bar:
        task = bar.add_task("loading the kernels", total=None)
        kept = cache.compile_cached(compiled_functions(), note, show)
    if not kept:
        raise HotcoldError(f"compiled, but not kept in {cache.cache_folder()}: make that folder writable")
    if compiled:
        note(f"compiled for {simd.ISA} in {time.perf_counter() - began:.0f} s, kept in {cache.cache_folder()}")
    elif not args.quiet:
        note(f"compiled already for {simd.ISA}, in {cache.cache_folder()}")
    return 0
