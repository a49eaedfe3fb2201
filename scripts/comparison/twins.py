"""The same model twice: a neuron-split file for us, a stock file for llama.cpp.

In: either form. Out: Twins; the missing form is made by `hotcold convert`. Next: speed.py and quality.py.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import hotcold.convert
from comparison.settings import HOTCOLD, say
from hotcold.placement.doctor import model_reads
from hotcold.runtime.buffers import KV_TYPES
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.kernels.formats import row_bytes
from hotcold.runtime.plan import choose_sparsity
from hotcold.runtime.schema import KEY_ACTIVATION, KEY_VERSION

UNKNOWN_TO_STOCK = ("opt",)  # architectures
RELU_AS_SILU = 10  # gate * 2^10: SiLU becomes ReLU to within a few 1e-4 in F16


@dataclass(frozen=True)
class Twins:
    """The two files that are compared, and what a reader must know of how they came about."""

    ours: Path
    stock: Path | None  # None: there is no such file, `notes` says why
    scaled: bool  # llama.cpp's file holds other numbers: gates scaled so that SiLU comes close to ReLU
    notes: tuple[str, ...]


def convert(source: Path, out: Path, *options: str) -> str:
    """`hotcold convert`, left out when `out` is newer than `source` and was made by this converter with these options.

    Returns a line about a file that was there, "" for one made now. Raises HotcoldError.
    """
    made, stamp = made_by(source, options), out.with_name(out.name + ".made")
    if out.exists() and out.stat().st_mtime > source.stat().st_mtime:
        if not stamp.exists():
            return f"`{out.name}` was there, and nothing says how it was made: remove it to have it made again."
        if stamp.read_text(errors="replace") == made:
            return f"`{out.name}` was made before, by the same converter with the same options."
    stamp.unlink(missing_ok=True)
    command = ["convert", str(source), *options, "--force", "-o", str(out)]
    say("making the twin: hotcold " + " ".join(command))
    done = subprocess.run([*HOTCOLD, *command], stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise HotcoldError(f"{out}: hotcold convert failed: {lines[-1] if lines else done.returncode}")
    stamp.write_text(made)
    return ""


def made_by(source: Path, options: Sequence[str]) -> str:
    """What a twin depends on: the source by its name and size, the options, the converter's code."""
    code = hashlib.sha256()
    for file in sorted(Path(hotcold.convert.__file__).parent.rglob("*.py")):
        code.update(file.read_bytes())
    return (f"hotcold convert {' '.join([source.name, *options])}\nsource {source.stat().st_size} bytes\n"
            f"converter {code.hexdigest()[:16]}\n")  # fmt: skip


def dense_bytes(path: Path, kv_type: str, context: float) -> float | None:
    """Bytes that a token reads when all neurons are computed: weights, and the KV cache of `context` tokens.

    None where the file is not understood.
    """
    try:
        with open_gguf(path) as file:
            config = ModelConfig.from_gguf(file)
            weights = model_reads(file, config).dense
    except HotcoldError:
        return None
    rows = 2 * config.n_layer * config.n_head_kv
    return weights + rows * row_bytes(KV_TYPES[kv_type], config.head_dim) * context


def possible_modes(path: Path, modes: list[str]) -> tuple[list[str], list[str]]:
    """(the modes this file can run in, a line for each one it cannot). Raises HotcoldError if it can in none."""
    able, notes = [], []
    with open_gguf(path) as file:
        config = ModelConfig.from_gguf(file)
    for mode in modes:
        try:
            choose_sparsity(config, mode)
            able.append(mode)
        except HotcoldError as error:
            notes.append(f"Mode {mode} was left out: {error}")
    if not able:
        raise HotcoldError(f"{path}: " + "; ".join(notes))
    return able, notes


def runs_as_it_is(path: Path) -> bool:
    """Whether we compute this file without converting it: a stock layout of types that have kernels."""
    with open_gguf(path) as file:
        return bool(model_reads(file, ModelConfig.from_gguf(file)).mode)


def make_twins(model: Path, stock: Path | None, folder: Path, as_is: bool | None, modes: list[str]) -> Twins:
    """Both forms of `model`, in `folder` if they must be made; `stock` names llama.cpp's file if it is there already.

    as_is: a stock file is run by us without converting it; None: if only dense is asked for and it can be. A ReLU model
    that stock llama.cpp would run as SiLU gets its gates scaled. Raises HotcoldError if there is nothing for us to run.
    """
    with open_gguf(model) as file:
        split = KEY_VERSION in file.metadata
        architecture = file.get("general.architecture")
        relu = file.get(KEY_ACTIVATION) == "relu" and architecture == "llama"
    notes = []
    if as_is is None:
        as_is = list(modes) == ["dense"] and not split and not relu and runs_as_it_is(model)
    ours = model
    if not split and not as_is:
        ours = folder / f"{model.stem}.hotcold.gguf"
        notes.append(convert(model, ours))
    scaled = relu and stock is None
    if stock is None and architecture in UNKNOWN_TO_STOCK:
        note = f"llama.cpp does not know {architecture}, so only ours was measured."
        return Twins(ours, None, False, tuple(filter(None, [*notes, note])))
    if stock is None:
        try:
            stock = model
            if relu:
                stock = folder / f"{model.stem}.relu-as-silu.gguf"
                notes.append(convert(ours, stock, "--to-stock", "--relu-as-silu", str(RELU_AS_SILU)))
            elif split:
                stock = folder / f"{model.stem}.stock.gguf"
                notes.append(convert(ours, stock, "--to-stock"))
        except HotcoldError as error:
            return Twins(ours, None, False, (f"There is no file for llama.cpp, so only ours was measured: {error}",))
    if relu and not scaled and stock:
        notes.append(f"llama.cpp has no ReLU for this architecture: `{stock.name}` was given as the same model for it.")
    if scaled:
        notes.append(f"llama.cpp has no ReLU for this architecture: its file is `{stock.name}`, gates scaled so that "
                     "SiLU comes close to ReLU.")  # fmt: skip
    if ours == stock:
        notes.append("Both run the same file as it is.")
    else:
        notes.append("Quantized down matrices have their blocks along the other axis in the neuron-split file, so part "
                     "of its difference in quality is that step; F16 has none of it, nor has a row that runs on "
                     "llama.cpp's own file.")  # fmt: skip
    return Twins(ours, stock, scaled, tuple(filter(None, notes)))
