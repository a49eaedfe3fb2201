"""The models that are run: small ones for what must be right, a large one for what must be fast.

In: Settings. Out: files in the folder for models, made by make_synthetic.py, 10 % of their neurons active. Next:
plans.py, prepare.py.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import psutil
from make_synthetic import make
from synthetic.shapes import SHAPES, TYPES, PredictorRecipe, Recipe, Shape

from gpu_checks.settings import Settings

OFF = 0.9  # share of neurons that are off
LARGE, MEDIUM, TINY = "llama-7b", "llama-1.3b", "llama-tiny"
LARGE_CORES, LARGE_BYTES = 8, 24 << 30  # that a machine must have for LARGE: cores, RAM and space for files


def recipe(name: str, shape: Shape, kind: str, rank: int) -> Recipe:
    predictor = PredictorRecipe(rank, TYPES["q8_0" if kind != "q4_0" else "q4_0"], noise=0.1, recall=0.995)
    return Recipe(f"gpu_check {name}", shape, TYPES[kind], 0, shape.activation, OFF, 0.7, predictor=predictor)


def small_shapes(settings: Settings) -> dict[str, Shape]:
    tiny = SHAPES[TINY]
    if settings.sim:
        return {TINY: replace(tiny, n_embd=128, n_ff=192, n_vocab=500)}
    return {TINY: tiny, "llama-160m": SHAPES["llama-160m"]}


def make_small(settings: Settings, name: str, kind: str) -> Path:
    """A model of small_shapes()."""
    shape = small_shapes(settings)[name]
    path = settings.models / f"small-{name}-{shape.n_embd}-{shape.n_ff}.{kind}.gguf"
    if not path.exists():
        settings.models.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        make(recipe(name, shape, kind, 32 if shape.n_embd < 512 else 64), part)
        part.replace(path)
    return path


def speed_shape(settings: Settings) -> str:
    """The largest that this machine makes and runs within the time."""
    if settings.shape != "auto":
        return settings.shape
    if settings.sim:
        return TINY
    settings.models.mkdir(parents=True, exist_ok=True)
    free = min(psutil.virtual_memory().available, shutil.disk_usage(settings.models).free)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return LARGE if cores >= LARGE_CORES and free >= LARGE_BYTES else MEDIUM


def speed_files(settings: Settings) -> tuple[Path, Path]:
    """Where the model of part 5 and its twin for llama.cpp are, or will be."""
    stem = f"{speed_shape(settings)}-{OFF:g}-off-predictor.{settings.kind}"
    return settings.models / f"{stem}.gguf", settings.models / f"{stem}.stock.gguf"


def speed_options(settings: Settings) -> list[str]:
    """Of make_synthetic.py."""
    ours, stock = speed_files(settings)
    return ["--shape", speed_shape(settings), "--type", settings.kind, "--sparsity", str(OFF), "--predictor", "lowrank",
            "-o", str(ours), "--stock", str(stock)]  # fmt: skip
