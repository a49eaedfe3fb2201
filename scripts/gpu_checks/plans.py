"""Part 3: every plan, executor and format on small models, against the CPU's engine on the same file.

In: models of models.py, a device. Out: an item per combination: error of the logits, tokens, neurons, VRAM. Next:
report.py.

Both get the same tokens, a prompt first, then one after the other; the next token of the text is the CPU's choice.
The executor "stream" takes the prompt token by token, "graph" as a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from gpu_checks.child import Item, Payload
from gpu_checks.devices import open_for
from gpu_checks.models import make_small, small_shapes
from gpu_checks.settings import Settings
from gpu_checks.vram import Meter
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.engine import Engine
from hotcold.runtime.gpu.choose import GpuOptions
from hotcold.runtime.gpu.device import Device
from hotcold.runtime.gpu.memory import vram
from hotcold.runtime.gpu.placement import GpuPlacement, LayerPlacement, last_layers
from hotcold.runtime.stats import LayerStats

KINDS = ("f16", "q8_0", "q4_0")
EXECUTORS = {"stream": 1 << 30, "graph": 8}  # -> tokens from which on a prompt is computed as a block
# Relative L2. The same numbers are added in another order. Where that turns the rounding of an act block, or a neuron
# on or off that is about 0, the difference is larger. Blocks are multiplied as halves.
ERROR = {"f16": 1e-3, "q8_0": 3e-2, "q4_0": 3e-2}
DEVIATIONS = 6  # of single logits from their mean error
NEURONS = {"f16": 2e-3, "q8_0": 2e-2, "q4_0": 2e-2}  # of those that the CPU computes, so many more or less
N_CTX, PROMPT, GEN = 64, 40, 12  # the prompt is longer than what kernels for few tokens take


@dataclass(frozen=True)
class Variant:
    """A plan with one division. hot: share of the neurons that are on the GPU, in layers from `first` of them on."""

    name: str
    kind: str
    sparsity: str
    first: float = 0.0
    hot: float = 1.0
    keys: bool = False

    def placement(self, config: ModelConfig, budget: int) -> GpuPlacement:
        first = int(self.first * config.n_layer)
        if self.hot == 1:
            return last_layers(config, config.n_layer - first, budget=budget, n_ctx=N_CTX, kind=self.kind)
        layers = (LayerPlacement(True, int(self.hot * n), self.keys) if layer >= first else LayerPlacement(False)
                  for layer, n in enumerate(config.n_ff))  # fmt: skip
        return GpuPlacement(self.kind, tuple(layers), budget, N_CTX)


VARIANTS = (
    Variant("all", "all", "exact"),
    Variant("all, dense", "all", "dense"),
    Variant("keys", "keys", "exact", hot=0.3, keys=True),
    Variant("keys of hot neurons only", "keys", "exact", first=0.5, hot=0.3),
    Variant("keys, none hot", "keys", "exact", hot=0.0, keys=True),
    Variant("predict", "predict", "predict", hot=0.3),
    Variant("layers", "layers", "exact", first=0.5),
    Variant("layers, dense", "layers", "dense", first=0.5),
)


@dataclass(frozen=True)
class Answer:
    logits: np.ndarray  # f32 [1 + GEN, n_vocab]: after the prompt, after each further token
    tokens: list[int]
    stats: LayerStats


class Bench:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.threads = settings.threads or None
        self._answers: dict[tuple[Path, str], Answer] = {}

    def open(self, path: Path, sparsity: str, gpu: GpuOptions | None, notify: Callable[[str], None]) -> Engine:
        return Engine.open(path, sparsity=sparsity, threads=self.threads, n_ctx=N_CTX, notify=notify, gpu=gpu)

    def meter(self, device: Device) -> Meter:
        """Of what the driver counts, or else of arrays alone."""
        try:
            return Meter(device if self.settings.sim else None)
        except OSError as error:
            print(f"{error}; only arrays are counted")
            return Meter(device)

    def on_cpu(self, path: Path, sparsity: str) -> Answer:
        if (path, sparsity) not in self._answers:
            with self.open(path, sparsity, None, print) as engine:
                self._answers[path, sparsity] = run(engine, None)
        return self._answers[path, sparsity]


def items(settings: Settings) -> Iterator[Item]:
    bench = Bench(settings)
    for shape in small_shapes(settings):
        for kind in KINDS:
            for variant in VARIANTS:
                for executor in EXECUTORS:
                    name = f"{shape} {kind}: {variant.name}, {executor}"
                    yield Item(name, partial(compare, bench, shape, kind, variant, executor))


def run(engine: Engine, tokens: list[int] | None) -> Answer:
    """tokens: what follows the prompt; None: what the engine would say."""
    prompt = np.arange(PROMPT) * 37 % engine.config.n_vocab
    logits, said = [engine.forward(prompt)], []
    engine.reset_stats()
    for n in range(GEN):
        said.append(int(logits[-1].argmax()) if tokens is None else tokens[n])
        logits.append(engine.forward([said[-1]]))
    return Answer(np.stack(logits), said, engine.layer_stats())


def compare(bench: Bench, shape: str, kind: str, variant: Variant, executor: str) -> Payload:
    path = make_small(bench.settings, shape, kind)
    want, notes = bench.on_cpu(path, variant.sparsity), list[str]()
    device = open_for(bench.settings)  # each time: what one leaves behind is not counted as the next one's
    meter = bench.meter(device)
    before = meter.read() - device.context_bytes
    options = GpuOptions(placement=variant.placement(config_of(path), 1 << 62), device=device, executor=executor,
                         blocks_from=EXECUTORS[executor])  # fmt: skip
    try:
        with meter.watch() as seen, bench.open(path, variant.sparsity, options, notes.append) as engine:
            found = run(engine, want.tokens)
            planned = vram(engine.plan, engine.n_ctx, engine.n_batch, device.context_bytes).total
    finally:
        device.close()
    return judge(want, found, planned, seen.value - before, kind, variant.sparsity != "predict", notes)


def judge(want: Answer, found: Answer, planned: int, peak: int, kind: str, exact: bool,
          notes: list[str]) -> Payload:  # fmt: skip
    difference = found.logits.astype(np.float64) - want.logits
    error = float(np.linalg.norm(difference) / np.linalg.norm(want.logits.astype(np.float64)))
    top2 = np.sort(want.logits, axis=1)[:, -2:]
    # Where the best two are as close as what is allowed at one of several deviations, rounding decides between them.
    close = top2[:, 1] - top2[:, 0] <= DEVIATIONS * ERROR[kind] * np.sqrt((want.logits**2).mean(axis=1))
    others = int(((found.logits.argmax(1) != want.logits.argmax(1)) & ~close).sum())
    neurons = float(np.abs(found.stats.computed - want.stats.computed).sum() / max(want.stats.computed.sum(), 1e-9))
    hybrid = found.stats.hybrid
    wrong = []
    if hybrid is None:
        wrong.append(f"it did not run on the GPU ({'; '.join(notes)})")
    if not error <= ERROR[kind]:
        wrong.append(f"logits are off by {error:.1e}, allowed {ERROR[kind]:.0e}")
    if others:
        wrong.append(f"{others} of {len(want.logits)} tokens are others")
    if exact and neurons > NEURONS[kind]:
        wrong.append(f"{neurons:.2%} of the neurons are others")
    skips = None if hybrid is None else hybrid.skips
    cpu = None if hybrid is None else hybrid.cpu_share
    over = max(0, peak - planned)
    if over:
        wrong.append(f"{over} bytes of VRAM more than the {planned} planned")
    note = "; ".join(wrong) or f"error {error:.1e}, {skips or 0:.0%} of the waits skipped"
    return {"ok": not wrong, "note": note, "over": over, "right": len(wrong) == bool(over), "error": error,
            "others": others, "neurons": neurons, "planned": planned, "peak": peak, "skips": skips,
            "cpu_share": cpu}  # fmt: skip


def config_of(path: Path) -> ModelConfig:
    from hotcold.runtime.gguf_file import open_gguf

    with open_gguf(path) as file:
        return ModelConfig.from_gguf(file)
