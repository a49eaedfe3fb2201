"""PowerInfer's published speed-ups beside what the timing model of `hotcold plan --simulate` says of the same settings.

In: published figures (below, with their sources), shapes of models. Out: Markdown. Next: BENCHMARKS.md.

    python scripts/simulate_published.py

No model is read and nothing runs on a GPU. Which neurons fire is drawn: as many as published (sparsity), as unevenly as
published (the share of the neurons that makes 80 % of the firings), each neuron by itself. Machines are the two PCs of
the paper, the presets rtx-4090 and rtx-2080-ti.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from comparison.report import table
from synthetic.planted import firing, hottest_for
from synthetic.shapes import SHAPES, Shape

from hotcold.placement.activations import draw
from hotcold.placement.hardware import PRESETS, Hardware
from hotcold.placement.memory import LayerBytes, ModelBytes
from hotcold.placement.plan_model import PlanModel
from hotcold.placement.plan_vram import CPU_ONLY, Placement, candidates, plan
from hotcold.placement.simulate import replay
from hotcold.placement.simulate_command import split_of_llama_cpp
from hotcold.runtime.errors import HotcoldError

N_CTX = 512  # prompts of 8 to 128 tokens and answers of up to 512
TOKENS = 24
NAMED = 1.25  # a predictor names so many times the neurons that fire
WORKSPACE = 64 << 20
BYTES = {"F16": 2.0, "INT4": 18 / 32}  # per weight; INT4 is Q4_0
MORE_SHAPES = {  # not gated: what OPT's architecture stands for here
    "falcon-40b": Shape(60, 8192, 32768, 128, 8, n_vocab=65024, arch="opt"),
    "opt-175b": Shape(96, 12288, 49152, 96, 96, n_vocab=50272, n_ctx=2048, arch="opt"),
}
CARDS = {"rtx-4090": "RTX 4090, i9-13900K", "rtx-2080-ti": "RTX 2080 Ti, i7-12700K"}
INTRODUCTION = f"""\
Tokens per second of PowerInfer against llama.cpp with the same card, as published (tables, figures and sections are
those of PowerInfer, SOSP '24, arXiv 2312.12456v2) and as simulated: PowerInfer's way, which computes all rows of every
neuron that its predictor names, against whole layers on the GPU and the rest dense on the CPU. Then hotcold in exact
mode (keys) and in predict mode, with what that makes against the same simulated llama.cpp.

Neurons are drawn: of as many as the paper's table 3 says, {NAMED} times as many are named; 26 % (OPT, Falcon) or 43 %
(LLaMA, Bamboo) of them make 80 % of the firings, as in its figure 4a; predictors are as large as in its table 6. The
machines are presets, {' and '.join(f"`{name}`" for name in CARDS)}: of the makers' bandwidths dense reading gets 65 %
(CPU) and 75 % (GPU), reading chosen rows 50 % and 55 %, whoever reads. Context {N_CTX}, half full.

The paper's GPU has 70 % of the firings on average with the 4090, and 42 % of OPT-30B's with the 2080 Ti. Here it has
fewer, because attention goes to the GPU first, and because drawn layers are all alike: in the paper the first half of
OPT-30B's layers hardly fires."""


@dataclass(frozen=True)
class Sparse:
    """Activation statistics: the paper's table 3 and figure 4a; predictors of its table 6, as a share of the model."""

    off: float
    hottest: float  # share of a layer's neurons that makes 80 % of the firings
    predictor: float


OPT, FALCON = Sparse(0.97, 0.26, 0.058), Sparse(0.95, 0.26, 0.087)
BAMBOO, LLAMA_7B, LLAMA_70B = Sparse(0.90, 0.43, 0.07), Sparse(0.70, 0.43, 0.07), Sparse(0.82, 0.43, 0.081)


@dataclass(frozen=True)
class Published:
    """One published comparison of PowerInfer with llama.cpp."""

    model: str
    shape: str
    kind: str
    statistics: Sparse
    machine: str  # of PRESETS
    where: str  # "hybrid", "cpu"
    ours: str  # PowerInfer's tokens/s, as published; "" where it is not
    theirs: str
    ratio: str
    source: str
    why: str  # the simulated ratio differs


LAUNCHES = "here one graph per token: launches cost 20 us a layer, kernels always get their share of the bandwidth"
FOUR_BITS = "here 4-bit rows cost what their bytes cost; unpacking them is free"
RAM = "llama.cpp's speed needs more than the 67.2 GB/s that the paper names; here it gets 44"
ROWS = (
    Published("OPT-30B", "opt-30b", "F16", OPT, "rtx-4090", "hybrid", "12.0", "1.1", "10.9", "table 8", LAUNCHES),
    Published("Falcon(ReLU)-40B", "falcon-40b", "F16", FALCON, "rtx-4090", "hybrid", "13", "1.1", "11.69",
              "figures 10, 14", "the CPU's part: llama.cpp alone on that CPU read 71 GB/s (last row), here 44"),
    Published("LLaMA2(ReGLU)-70B", "llama-70b", "INT4", LLAMA_70B, "rtx-4090", "hybrid", "", "",
              "2.89 mean, 4.28 best of four models", "section 8.2", FOUR_BITS),
    Published("OPT-175B", "opt-175b", "INT4", OPT, "rtx-4090", "hybrid", "nearly 2", "", "2.66", "section 8.2",
              "llama.cpp: the CPU's bandwidth, as for Falcon"),
    Published("Bamboo-7B", "bamboo-7b", "F16", BAMBOO, "rtx-2080-ti", "hybrid", "26", "", "3.62", "table 5, figure 15",
              f"the GPU has nearly all firings, so its overheads decide: {LAUNCHES}; PowerInfer's KV cache was in RAM"),
    Published("Bamboo-7B", "bamboo-7b", "F16", BAMBOO, "rtx-2080-ti", "hybrid", "33.5", "7.64", "4.38",
              "Bamboo's README, i7-13700", "as above, with another CPU"),
    Published("OPT-30B", "opt-30b", "F16", OPT, "rtx-2080-ti", "hybrid", "", "", "4.71 mean, 7.06 best of four models",
              "section 8.2", "attention alone is 20 GB: the CPU has most of it; the mean is of smaller models too"),
    Published("Bamboo-7B", "bamboo-7b", "F16", BAMBOO, "rtx-4090", "hybrid", "92.5", "58.3", "1.58", "Bamboo's README",
              LAUNCHES),
    Published("Bamboo-7B", "bamboo-7b", "F16", BAMBOO, "rtx-4090", "cpu", "9.94", "4.78", "2.08", "Bamboo's README",
              f"{RAM}; the ratio depends on how many neurons are named"),
    Published("ReluLLaMA-7B", "llama-7b", "F16", LLAMA_7B, "rtx-4090", "cpu", "8.21", "5.17", "1.59", "its model card",
              RAM),
    Published("ReluFalcon-40B", "falcon-40b", "F16", FALCON, "rtx-4090", "cpu", "2.26", "0.85", "2.66",
              "its model card", RAM),
)  # fmt: skip


def skewed(n_ff: int, off: float, hottest: float) -> np.ndarray:
    """f64 [n_ff], descending: a power law of the rank such that `hottest` of the neurons make 80 % of the firings."""
    low, high = 0.0, 3.0
    for _ in range(40):
        skew = (low + high) / 2
        low, high = (skew, high) if hottest_for(firing(n_ff, off, skew), 0.8) > hottest else (low, skew)
    return firing(n_ff, off, high)


def model_of(row: Published) -> PlanModel:
    """Sizes of the shape's matrices; biases and norms are left out."""
    s = SHAPES.get(row.shape) or MORE_SHAPES[row.shape]
    one = BYTES[row.kind]
    kv = s.n_embd // s.n_head * s.n_head_kv
    n_row, value = round(s.n_embd * one), 2 if s.gated else 1
    attention = round((2 * s.n_embd + 2 * kv) * s.n_embd * one)
    whole = s.n_layer * (attention + s.n_ff * n_row * (1 + value)) + s.n_vocab * n_row
    layer = LayerBytes(s.n_ff, attention, 2 * 2 * kv * N_CTX, round(row.statistics.predictor * whole / s.n_layer),
                       n_row, value * n_row, False)  # fmt: skip
    f = skewed(s.n_ff, row.statistics.off, row.statistics.hottest)
    density = min(1.0, NAMED * float(f.mean()))
    return PlanModel(
        sizes=ModelBytes((layer,) * s.n_layer, s.n_vocab * n_row, s.n_vocab * n_row, False, WORKSPACE), n_ctx=N_CTX,
        n_embd=s.n_embd, n_vocab=s.n_vocab, window=(0,) * s.n_layer, gated=s.gated, split=True, fires=True, by_key=True,
        frequency=(f,) * s.n_layer, density=(density,) * s.n_layer, gpu_from={"exact": 0, "predict": 0},
    )  # fmt: skip


def without_a_check(model: PlanModel) -> PlanModel:
    """PowerInfer's own way: all rows of every neuron that is named, where hotcold first looks at its key."""
    named = tuple(candidates(f, d) for f, d in zip(model.frequency, model.density, strict=True) if d is not None)
    return dataclasses.replace(model, frequency=named, density=tuple(float(f.mean()) for f in named))


@dataclass(frozen=True)
class Simulated:
    """Tokens per second; `load`: share of the firings that are the GPU's, in PowerInfer's way."""

    llama_cpp: float
    powerinfer: float
    exact: float
    predict: float
    load: float


def simulate(row: Published, tokens: int) -> Simulated:
    model, card = model_of(row), PRESETS[row.machine]
    theirs = split_of_llama_cpp(model, card, card.vram) if row.where == "hybrid" else _cpu(model, card, "dense")
    assert theirs is not None
    exact, predict = _best(model, card, row.where, "exact"), _best(model, card, row.where, "predict")
    speeds = replay(model, [theirs, exact, predict], draw(model.frequency, None, tokens, ""))
    named = without_a_check(model)
    own = _best(named, card, row.where, "predict")
    (powerinfer,) = replay(named, [own], draw(named.frequency, None, tokens, ""))
    first, second, third = (found.tokens_per_second for found in speeds)
    return Simulated(first, powerinfer.tokens_per_second, second, third, own.load)


def _cpu(model: PlanModel, card: Hardware, mode: str) -> Placement:
    return plan(model, card, card.vram, CPU_ONLY, mode)


def _best(model: PlanModel, card: Hardware, where: str, mode: str) -> Placement:
    """The fastest plan of a mode for the whole card."""
    if where == "cpu":
        return _cpu(model, card, mode)
    found = []
    for kind in ("all", "predict" if mode == "predict" else "keys"):
        try:
            found.append(plan(model, card, card.vram, kind, mode, time_limit=1.0))
        except HotcoldError:
            continue
    return min(found, key=lambda p: p.t_token)


def report(rows: Sequence[Published], tokens: int) -> str:
    header = ["model", "where", "published, tokens/s", "times llama.cpp", "simulated, tokens/s", "times llama.cpp",
              "hotcold exact", "hotcold predict", "GPU's share of firings", "why they differ"]  # fmt: skip
    body = []
    for row in rows:
        s = simulate(row, tokens)
        where = CARDS[row.machine] if row.where == "hybrid" else "i9-13900K alone"
        published = f"{row.ours or '?'} against {row.theirs or '?'}" if row.ours else "?"
        body.append([f"{row.model} {row.kind}", where, published, f"{row.ratio} ({row.source})",
                     f"{s.powerinfer:.1f} against {s.llama_cpp:.1f}", f"{s.powerinfer / s.llama_cpp:.2f}",
                     f"{s.exact:.1f} ({s.exact / s.llama_cpp:.2f})", f"{s.predict:.1f} ({s.predict / s.llama_cpp:.2f})",
                     f"{s.load:.0%}" if row.where == "hybrid" else "", row.why])  # fmt: skip
    return "\n\n".join([INTRODUCTION, table(header, body)])


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulate the settings of PowerInfer's published comparisons.")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"drawn per model (default {TOKENS})")
    args = parser.parse_args()
    print(report(ROWS, args.tokens))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
