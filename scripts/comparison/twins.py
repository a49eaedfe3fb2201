"""The same model twice: a neuron-split file for us, a stock file for llama.cpp.

In: either form. Out: Twins; the missing form is made by `hotcold convert`. Next: speed.py and quality.py.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from comparison.settings import say
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.schema import KEY_ACTIVATION, KEY_VERSION

RELU_AS_SILU = 10  # gate * 2^10: SiLU becomes ReLU to within a few 1e-4 in F16


@dataclass(frozen=True)
class Twins:
    """The two files that are compared, and what a reader must know of how they came about."""

    ours: Path
    stock: Path
    scaled: bool  # llama.cpp's file holds other numbers: gates scaled so that SiLU comes close to ReLU
    notes: tuple[str, ...]


def convert(source: Path, out: Path, *options: str) -> None:
    """`hotcold convert`, skipped when `out` is newer than `source`. Raises HotcoldError."""
    if out.exists() and out.stat().st_mtime > source.stat().st_mtime:
        return
    hotcold = Path(sys.executable).with_name("hotcold")
    command = [str(hotcold), "convert", str(source), *options, "--force", "-o", str(out)]
    say("making the twin: " + " ".join(command))
    if subprocess.run(command, stdout=sys.stderr).returncode:
        raise HotcoldError(f"{out}: hotcold convert failed, see above")


def make_twins(model: Path, stock: Path | None, folder: Path) -> Twins:
    """Both forms of `model`, in `folder` if they must be made; `stock` names llama.cpp's file if it is there already.

    A ReLU model that stock llama.cpp would run as SiLU gets its gates scaled. Raises HotcoldError.
    """
    with open_gguf(model) as file:
        split = KEY_VERSION in file.metadata
        relu = file.get(KEY_ACTIVATION) == "relu" and file.get("general.architecture") == "llama"
    notes = []
    ours = model
    if not split:
        ours = folder / f"{model.stem}.hotcold.gguf"
        convert(model, ours)
    if stock is None:
        stock = model
        if relu:
            stock = folder / f"{model.stem}.relu-as-silu.gguf"
            convert(ours, stock, "--to-stock", "--relu-as-silu", str(RELU_AS_SILU))
        elif split:
            stock = folder / f"{model.stem}.stock.gguf"
            convert(ours, stock, "--to-stock")
    if relu:
        notes.append(f"llama.cpp has no ReLU for this architecture: its file is `{stock.name}`, gates scaled so that "
                     "SiLU comes close to ReLU.")  # fmt: skip
    notes.append(
        "Quantized down matrices have their blocks along the other axis in the neuron-split file, so part of its "
        "difference in quality is that step; F16 has none of it, nor has the row that runs on llama.cpp's own file."
    )
    return Twins(ours, stock, relu, tuple(notes))
