"""Whether a GPU is used, and what is put there: from what was asked for, what is there, and what fits.

In: an open model, GpuOptions. Out: a HybridEngine, or None for the CPU alone, with the reason told. Next: engine.py.

Where to put what is placement/'s to solve; runtime does not import it, so a caller hands over its function (`place`).
Without one, as many whole layers as fit are on the GPU.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import GGUFFile
from hotcold.runtime.gpu.device import Device, DeviceMemoryError, DeviceUnavailable
from hotcold.runtime.gpu.placement import KINDS, GpuPlacement, last_layers
from hotcold.runtime.plan import Plan, choose_sparsity, make_plan
from hotcold.runtime.weights import Weights

if TYPE_CHECKING:
    from hotcold.runtime.gpu.engine import HybridEngine

MODES = ("auto", "off", "required")
PLANS = ("auto", *KINDS)
EXECUTORS = ("graph", "stream")
RESERVE = 256 << 20  # bytes of VRAM left to others by an automatic budget
TRIES = 4  # of a smaller plan, where others take memory meanwhile


@dataclass(frozen=True)
class Wanted:
    """What a solver is asked for."""

    file: GGUFFile
    config: ModelConfig
    weights: Weights
    sparsity: str  # as --sparsity; auto: what is fastest of those that give the exact result
    kind: str  # one of PLANS
    budget: int  # bytes of VRAM, the driver's included
    n_ctx: int
    n_batch: int
    device: Device


Place = Callable[[Wanted], tuple[GpuPlacement, str]]  # -> what is on the GPU; dense, exact or predict


@dataclass(frozen=True)
class GpuOptions:
    """gpu: None: use one if it is there, and say nothing if not. device, placement: for who has them already."""

    gpu: str | None = None  # one of MODES
    vram_budget: int | None = None  # bytes; None: what is free
    plan: str = "auto"
    layers: int | None = None  # whole layers, the last ones; more than the model has: all
    executor: str = "graph"
    trace: str | os.PathLike[str] | None = None
    patience: float | None = None  # seconds that CPU and GPU wait for each other; None: PATIENCE
    blocks_from: int | None = None  # tokens from which on prompts are computed in blocks; None: measured
    place: Place | None = None
    placement: GpuPlacement | None = None
    device: Device | None = None

    def __post_init__(self) -> None:
        if self.gpu is not None and self.gpu not in MODES:
            raise HotcoldError(f"gpu {self.gpu!r} is unknown, choose from {', '.join(MODES)}")
        if self.plan not in PLANS:
            raise HotcoldError(f"GPU plan {self.plan!r} is unknown, choose from {', '.join(PLANS)}")
        if self.executor not in EXECUTORS:
            raise HotcoldError(f"executor {self.executor!r} is unknown, choose from {', '.join(EXECUTORS)}")
        for what, value in (("layers", self.layers), ("vram_budget", self.vram_budget)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise HotcoldError(f"{what} must be a whole number or None, got {value!r}")
        if self.gpu == "off" and (self.vram_budget is not None or self.plan != "auto" or self.layers):
            raise HotcoldError("--gpu off leaves nothing for --vram-budget, --gpu-plan or --gpu-layers to do")
        if self.layers is not None and self.layers < 0:
            raise HotcoldError(f"--gpu-layers {self.layers}: must be 0 or more")
        if self.layers == 0 and self.gpu == "required":
            raise HotcoldError("--gpu required, but --gpu-layers 0 leaves it nothing to do")
        if self.vram_budget is not None and self.vram_budget < 1:
            raise HotcoldError(f"--vram-budget {self.vram_budget}: must be 1 byte or more")
        if self.patience is not None and not 0 < self.patience < math.inf:
            raise HotcoldError(f"patience of {self.patience} s: must be above 0")
        if self.trace is not None and (self.layers == 0 or self.gpu == "off"):
            raise HotcoldError("--trace is of a run on the GPU: not with --gpu off or --gpu-layers 0")
        if self.layers is not None and self.plan not in ("auto", "layers"):
            raise HotcoldError(f"--gpu-layers is for --gpu-plan layers, not {self.plan}")

    @property
    def asked(self) -> bool:
        """Whether a user would miss the GPU."""
        return (self.gpu is not None or self.vram_budget is not None or self.plan != "auto" or self.layers is not None
                or self.trace is not None or self.placement is not None)  # fmt: skip


def open_hybrid(
    file: GGUFFile, config: ModelConfig, weights: Weights, sparsity: str, options: GpuOptions, *, n_threads: int,
    n_ctx: int, n_batch: int, kv_type: str, notify: Callable[[str], None],
) -> HybridEngine | None:  # fmt: skip
    """None: everything on the CPU, and `notify` knows why. Raises HotcoldError where that is not wanted."""
    if options.gpu == "off" or options.layers == 0:
        return None
    if options.plan == "predict" and sparsity == "auto":
        sparsity = "predict"
    device = options.device or _device(options, notify)
    if device is None:
        return None
    try:
        engine = _on_device(file, config, weights, sparsity, options, device, n_threads=n_threads, n_ctx=n_ctx,
                            n_batch=n_batch, kv_type=kv_type, notify=notify)  # fmt: skip
    except BaseException as error:
        if options.device is None:
            device.close()
        if options.asked or not isinstance(error, HotcoldError):
            raise
        notify(f"the GPU is not used: {error}; everything runs on the CPU")
        return None
    if engine is None and options.device is None:
        device.close()
    return engine


def hardware_exists() -> bool:
    """Whether this machine seems to have an NVIDIA card. Cheap: nothing is loaded."""
    return any(Path(p).exists() for p in ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg")) or bool(
        shutil.which("nvidia-smi")
    )


def _device(options: GpuOptions, notify: Callable[[str], None]) -> Device | None:
    from hotcold.runtime.gpu.device import open_device

    if not options.asked and not hardware_exists():
        return None
    try:
        return open_device()
    except DeviceUnavailable as error:
        if options.gpu == "required":
            raise HotcoldError(f"--gpu required, but there is no GPU: {error.reason}") from error
        notify(f"no GPU: {error.reason}; everything runs on the CPU{_untraced(options)}")
        return None


def _on_device(
    file: GGUFFile, config: ModelConfig, weights: Weights, sparsity: str, options: GpuOptions, device: Device, *,
    n_threads: int, n_ctx: int, n_batch: int, kv_type: str, notify: Callable[[str], None],
) -> HybridEngine | None:  # fmt: skip
    from hotcold.runtime.gpu.engine import PATIENCE, HybridEngine
    from hotcold.runtime.gpu.memory import vram
    from hotcold.runtime.gpu.source import load_kernels

    load_kernels(device)  # before memory is planned: their code takes some
    if not device.has_gemm:
        notify("GPU: cuBLAS is not installed (pip install 'hotcold[gpu]' brings it): prompts are slower without it")
    automatic = options.vram_budget is None and options.placement is None
    for attempt in range(TRIES):
        budget = _budget(options, device)
        plan = _plan(file, config, weights, sparsity, options, device, budget, n_ctx, n_batch)
        if plan.placement is None:
            _nothing(options, plan, budget, notify)
            return None
        need = vram(plan, n_ctx, n_batch, device.context_bytes).total
        missing = need - device.memory()[0] - device.context_bytes
        if missing > 0 and not (automatic and attempt + 1 < TRIES):
            raise HotcoldError(
                f"{device.name}: the plan needs {_mib(need)} of VRAM, {_mib(need - missing)} are free for it, "
                f"{_mib(missing)} are missing: another program may use the GPU; use a smaller --vram-budget, or auto"
            )
        if missing > 0:
            notify(f"GPU: other programs have taken {_mib(missing)} of VRAM meanwhile: making a smaller plan")
            continue
        for note in plan.notes:
            notify(note)
        if kv_type != "f16":
            notify(f"--kv-type {kv_type} is for layers of the CPU: the GPU's cache is F16")
        try:
            engine = HybridEngine(
                file, config, weights, plan, device=device, executor=options.executor, n_threads=n_threads,
                n_ctx=n_ctx, kv_type=kv_type, notify=notify, owns_device=options.device is None,
                patience=options.patience or PATIENCE, blocks_from=options.blocks_from, trace=options.trace,
            )  # fmt: skip
        except HotcoldError as error:
            if not (automatic and attempt + 1 < TRIES and isinstance(error.__cause__, DeviceMemoryError)):
                raise
            notify("GPU: other programs have taken VRAM meanwhile: making a smaller plan")
            continue
        notify(describe(plan, device, need, budget))
        return engine
    raise AssertionError("the last attempt returns or raises")


def _mib(n: int) -> str:
    return f"{n / 2**20:.0f} MiB"


def _nothing(options: GpuOptions, plan: Plan, budget: int, notify: Callable[[str], None]) -> None:
    if options.place is not None:  # it has said why
        nothing = f"GPU: the best plan for {_mib(budget)} of VRAM has nothing on it"
    else:
        nothing = f"GPU: {_mib(budget)} of VRAM do not hold a single layer beside driver and workspaces"
    why = next((note for note in plan.notes if note.startswith("GPU: ")), nothing)
    if options.gpu == "required":
        raise HotcoldError(f"--gpu required, but {why.removeprefix('GPU: ')}")
    notify(f"{why}; everything runs on the CPU{_untraced(options)}")


def _untraced(options: GpuOptions) -> str:
    return "" if options.trace is None else ", and --trace writes nothing"


def _budget(options: GpuOptions, device: Device) -> int:
    """Bytes of VRAM this process may have in all."""
    free, total = device.memory()
    if options.vram_budget is None:
        return max(0, free + device.context_bytes - RESERVE)
    if options.vram_budget > total:
        raise HotcoldError(f"--vram-budget {_mib(options.vram_budget)}: {device.name} has {_mib(total)}")
    return options.vram_budget


def _plan(
    file: GGUFFile, config: ModelConfig, weights: Weights, sparsity: str, options: GpuOptions, device: Device,
    budget: int, n_ctx: int, n_batch: int,
) -> Plan:  # fmt: skip
    """A plan that fits the budget; its placement is None where nothing does. Raises HotcoldError for a placement that
    was given and does not fit."""
    from hotcold.runtime.gpu.memory import vram

    def size(plan: Plan) -> int:
        return 0 if plan.placement is None else vram(plan, n_ctx, n_batch, device.context_bytes).total

    given = options.placement
    if options.layers is not None:
        given = last_layers(config, min(options.layers, config.n_layer), budget=budget, n_ctx=n_ctx)
    if given is not None:
        plan = make_plan(config, weights, sparsity, given)
        if size(plan) > budget and options.vram_budget is not None:
            raise HotcoldError(f"what is to be on the GPU needs {_mib(size(plan))} of VRAM with a context of {n_ctx} "
                               f"tokens, --vram-budget is {_mib(budget)}")  # fmt: skip
        return plan
    if options.place is None:
        return _whole_layers(config, weights, sparsity, options, budget, n_ctx, size)
    mode, _ = choose_sparsity(config, sparsity)  # before a solver works on one that the model cannot have
    left = budget
    for _ in range(TRIES):  # a solver's sizes may be off by little
        wanted = Wanted(file, config, weights, sparsity, options.plan, left, n_ctx, n_batch, device)
        placement, chosen = options.place(wanted)
        plan = make_plan(config, weights, sparsity if chosen == mode else chosen, placement)
        if chosen != mode:  # the solver has said why
            note = f"sparsity: {chosen} instead of {mode}: faster with what is on the GPU"
            plan = replace(plan, notes=(note, *plan.notes[1:]))
        if size(plan) <= budget:
            return plan
        left -= size(plan) - budget
    return make_plan(config, weights, sparsity)


def _whole_layers(
    config: ModelConfig, weights: Weights, sparsity: str, options: GpuOptions, budget: int, n_ctx: int,
    size: Callable[[Plan], int],
) -> Plan:  # fmt: skip
    """As many of the last layers as fit."""
    if options.plan not in ("auto", "all", "layers"):
        raise HotcoldError(f"--gpu-plan {options.plan} needs a placement: use the command hotcold, or give one")
    low, high = 0, config.n_layer  # low fits
    while low < high:
        n = (low + high + 1) // 2
        plan = make_plan(config, weights, sparsity, last_layers(config, n, budget=budget, n_ctx=n_ctx))
        low, high = (n, high) if size(plan) <= budget else (low, n - 1)
    if options.plan == "all" and low < config.n_layer:
        return make_plan(config, weights, sparsity)
    return make_plan(config, weights, sparsity, last_layers(config, low, budget=budget, n_ctx=n_ctx))


def describe(plan: Plan, device: Device, need: int, budget: int) -> str:
    """One line: what is where."""
    place, c = plan.placement, plan.config
    assert place is not None
    on = c.n_layer - place.first
    hot = sum(layer.hot for layer in place.layers)
    layers = f"all {c.n_layer} layers" if on == c.n_layer else f"the last {on} of {c.n_layer} layers"
    neurons = "" if hot == sum(c.n_ff[place.first :]) else f", {hot / sum(c.n_ff[place.first :]):.0%} of their neurons"
    return f"GPU: {layers}{neurons} on {device.name}, plan {place.kind}: {_mib(need)} of {_mib(budget)} of VRAM"
