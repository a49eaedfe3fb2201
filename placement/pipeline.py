"""`hotcold convert --calibrate`: convert, profile, sort and train predictors, as one step.

In: how to write the neuron-split file, the text to profile with, where the result goes. Out: a sorted GGUF with
counts and predictors. Next: profiling.py, place.py, train.py, which do the work.

Intermediate files lie in a folder beside the result, where there is room for it, under a name that says whose they
are. The folder goes whatever happens; one that a killed run left goes with the next run.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console
from rich.markup import escape

from hotcold.convert.writer import check_name, check_space, glob_escape
from hotcold.placement.place import layer_table, sort_by, write_sorted
from hotcold.placement.predictor_check import TOKENS as TOKENS_CHECKED
from hotcold.placement.predictor_check import checked
from hotcold.placement.profile import Profile
from hotcold.placement.profiling import TOKENS, profile_model, progress_bar
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.corpus import Corpus, read_corpus
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import open_gguf, safe_text

LEAST_TOKENS = 256    # as many samples as training wants


@dataclass(frozen=True)
class Calibration:
    """What is done with a converted model besides converting it."""

    corpus: Corpus
    tokens: int = TOKENS
    predictor: str = "none"  # schema.PREDICTORS

    def make(self, write_split: Callable[[Path], int], n_bytes: int, out: Path, force: bool, console: Console) -> int:
        """Make `out` and return its size. write_split writes the neuron-split file, of about n_bytes, to a path.

        Raises HotcoldError; then, and after an interrupt, nothing is left but what was there before. Once `out` is
        written it stays: what predicting costs is measured on it.
        """
        check_name(out, force)
        with scratch_folder(out) as folder:
            check_space(folder, int(2.1 * n_bytes))  # the file twice, and predictors
            split = folder / "split.gguf"
            write_split(split)
            profile = self._profile(split)
            with open_gguf(split) as file:
                sorting = sort_by(profile, file, ModelConfig.from_gguf(file))
            console.print(layer_table(sorting.counts))
            if self.predictor == "none":
                return write_sorted(split, out, sorting, {}, force)
            placed = folder / "sorted.gguf"
            write_sorted(split, placed, sorting, {}, force=False)
            split.unlink()
            size = self._train(placed, out, profile, force, console)
        for line in checked(out, TOKENS_CHECKED):  # from here on `out` is complete
            console.print(escape(line), soft_wrap=True)
        return size

    def _profile(self, model: Path) -> Profile:
        samples = 0 if self.predictor == "none" else None  # only training wants them

        with progress_bar("profiling") as progress:
            return profile_model(model, self.corpus, tokens=self.tokens, samples=samples, progress=progress)

    def _train(self, model: Path, out: Path, profile: Profile, force: bool, console: Console) -> int:
        from hotcold.placement.predictor_layer import TARGET, Wanted
        from hotcold.placement.train import (
            array_module,
            layer_progress,
            result_table,
            train_predictors,
            write_predictors,
        )

        wanted = Wanted(self.predictor, TARGET, xp=array_module() if self.predictor == "mlp" else np)
        with layer_progress(self.predictor) as progress:
            results, notes = train_predictors(model, profile, wanted, progress)
        console.print(result_table(results, profile, wanted))
        for line in notes:
            console.print(escape(f"note: {line}"), soft_wrap=True)
        return write_predictors(model, out, profile, results, force)


def read_calibration(texts: Sequence[Path], tokens: int | None, predictor: str) -> Calibration:
    """Read the texts (none: the bundled one) before any other work. Raises HotcoldError naming the file."""
    if predictor != "none" and tokens is not None and tokens < LEAST_TOKENS:
        raise HotcoldError(f"--calibrate-tokens {tokens}: predictors are trained from at least {LEAST_TOKENS} tokens: "
                           "count over more, or --predictor none")
    return Calibration(read_corpus(texts), TOKENS if tokens is None else tokens, predictor)


@contextmanager
def scratch_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` for intermediate files, which goes at the end."""
    parent = out.absolute().parent
    if not parent.is_dir():
        raise HotcoldError(f"{safe_text(str(parent))}: no such folder")
    _remove_leftovers(out)
    folder = parent / f".{out.name}.{os.getpid()}.parts"
    try:
        try:
            folder.mkdir()
        except OSError as e:
            raise HotcoldError(f"{safe_text(str(parent))}: no folder can be made in it: {e.strerror or e}") from None
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(out: Path) -> None:
    """Folders of runs to the same name whose processes are gone."""
    for path in out.absolute().parent.glob(f".{glob_escape(out.name)}.*.parts"):
        match = re.fullmatch(r"\d+", path.name[len(out.name) + 2 : -len(".parts")])
        if match and path.is_dir() and not path.is_symlink() and not psutil.pid_exists(int(match[0])):
            with suppress(OSError):
                shutil.rmtree(path)
