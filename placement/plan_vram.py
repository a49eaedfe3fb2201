"""What of a model lies on the GPU for a budget of VRAM, in one of four plans: bytes, and the time of a token.

In: PlanModel, Hardware, a budget. Out: Placement. Next: choose.py compares the plans; placement_index.py keeps them.

    all      everything is on the GPU
    keys     attention first, then key rows, then hot neurons: the GPU learns what fires, the result is exact
    predict  attention and predictors first, then hot neurons with their key rows
    layers   whole layers, as llama.cpp divides a model

The last layers go to the GPU first, so that a token changes sides once and ends where the output head is. In keys and
predict, solve.py divides the FFN of each. Expected times count bytes over bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hotcold.placement.choices import BATCH, Choices, Layer, Problem, Rates, layer_times, make_problem
from hotcold.placement.hardware import PRESETS, Hardware
from hotcold.placement.memory import LayerBytes, engine_vram
from hotcold.placement.plan_model import PlanModel, read_model
from hotcold.placement.solve import greedy_cost, relaxed, solve_problem
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import GGUFFile, safe_text
from hotcold.runtime.gpu.placement import KINDS, GpuPlacement, LayerPlacement
from hotcold.runtime.inspect import format_bytes
from hotcold.runtime.weights import Weights

CPU_ONLY = "cpu"  # a plan with nothing on the GPU, to compare with
_TRIED = 8  # numbers of layers, of those that promise most
SHARED = ("keys", "predict")  # plans in which a layer's FFN is divided between GPU and CPU


@dataclass(frozen=True)
class Placement:
    """One budget's answer. Per-layer tuples have n_layer entries; times are expected seconds per token."""

    kind: str  # of gpu.placement.KINDS, or CPU_ONLY
    sparsity: str  # dense | exact | predict
    budget: int  # bytes of VRAM
    n_ctx: int
    objective: str
    hardware: Hardware
    hot: tuple[int, ...]  # neurons 0..hot-1 are on the GPU
    keys_on_gpu: tuple[bool, ...]  # so are all key rows
    layer_on_gpu: tuple[bool, ...]  # attention, norms, KV cache and predictor are
    n_ff: tuple[int, ...]
    share: tuple[float, ...]  # of the layer's activations, on the GPU
    t_gpu: tuple[float, ...]  # attention and FFN, where they are the GPU's
    t_cpu: tuple[float, ...]
    t_layer: tuple[float, ...]  # GPU and CPU overlap in the FFN
    p_cold: tuple[float, ...]  # chance that the GPU waits for the CPU in this layer
    gpu_bytes: tuple[int, ...]
    used: int  # bytes of VRAM, driver and workspaces included, at most; never above the budget
    ram: int  # bytes of the model that the CPU reads
    t_rest: float  # of a token outside the layers: head, crossings, logits
    t_token: float
    t_token_cpu: float  # everything on the CPU, same sparsity
    load: float  # share of all activations on the GPU
    notes: tuple[str, ...]

    @property
    def tokens_per_second(self) -> float:
        return 1 / self.t_token

    @property
    def n_on_gpu(self) -> int:
        return sum(self.layer_on_gpu)

    @property
    def for_engine(self) -> GpuPlacement:
        layers = tuple(LayerPlacement(on, hot, keys) for on, hot, keys
                       in zip(self.layer_on_gpu, self.hot, self.keys_on_gpu, strict=True))  # fmt: skip
        return GpuPlacement("layers" if self.kind == CPU_ONLY else self.kind, layers, self.budget, self.n_ctx)


def place_on(
    file: GGUFFile, config: ModelConfig, frequency: Sequence[np.ndarray], *, budget: int, n_ctx: int,
    hardware: Hardware, objective: str, kind: str = "keys",
) -> Placement:  # fmt: skip
    """plan() for a file. frequency[l]: f64 [n_ff], fired / tokens, descending."""
    model = read_model(file, config, n_ctx, frequency)
    sparsity = "predict" if kind == "predict" else "exact" if kind in SHARED or "exact" in model.modes else "dense"
    return plan(model, hardware, budget, kind, sparsity, objective=objective)


def plan(
    model: PlanModel, hardware: Hardware, budget: int, kind: str, sparsity: str, *, objective: str = "time",
    n_layers: int | None = None, time_limit: float = 8.0,
) -> Placement:  # fmt: skip
    """The best division of one kind. n_layers: exactly so many of the last layers on the GPU; None: what is best.

    Raises HotcoldError: no GPU, a budget below the least or above the card, a plan that the model cannot have,
    frequencies that are none.
    """
    _check(model, hardware, budget, kind, sparsity, n_layers)
    if kind == CPU_ONLY:
        return _evaluate(model, hardware, budget, kind, sparsity, objective, _nowhere(model))
    n_on, notes = _layers_on_gpu(model, hardware, budget, kind, sparsity, n_layers)
    on_gpu = _last(model, n_on)
    if kind not in SHARED:
        hot = tuple(n if on else 0 for n, on in zip(model.n_ff, on_gpu, strict=True))
        p = _evaluate(model, hardware, budget, kind, sparsity, objective, (hot, on_gpu, on_gpu))
        if p.ram > hardware.ram:
            raise _too_large(model, hardware, budget, p.ram)
        return replace(p, notes=(*notes, *p.notes))
    return _shared(model, hardware, budget, kind, sparsity, objective, n_on, notes, time_limit, n_layers is None)


def to_the_byte(placement: Placement, config: ModelConfig, weights: Weights) -> Placement:
    """The same with `used` as the engine allocates it: the solver counts with a bound that is some MiB above."""
    if placement.kind == CPU_ONLY:
        return placement
    found = engine_vram(config, weights, placement.for_engine, placement.sparsity, placement.hardware.gpu_context)
    used = 0 if found is None else found.total
    assert used <= placement.used
    return replace(placement, used=used)


def evaluate(
    model: PlanModel, hardware: Hardware, budget: int, kind: str, sparsity: str, objective: str, gpu: GpuPlacement
) -> Placement:  # fmt: skip
    """Bytes and times of a placement that was solved before."""
    hot, keys, on = zip(*((p.hot, p.keys_on_gpu, p.on_gpu) for p in gpu.layers), strict=True)
    return _evaluate(model, hardware, budget, kind, sparsity, objective, (hot, keys, on))


Division = tuple[tuple[int, ...], tuple[bool, ...], tuple[bool, ...]]  # hot, keys_on_gpu, layer_on_gpu


def _last(model: PlanModel, n_on: int) -> tuple[bool, ...]:
    return tuple(layer >= model.n_layer - n_on for layer in range(model.n_layer))


def _nowhere(model: PlanModel) -> Division:
    return (0,) * model.n_layer, (False,) * model.n_layer, (False,) * model.n_layer


def _check(model: PlanModel, hardware: Hardware, budget: int, kind: str, sparsity: str, n_layers: int | None) -> None:
    name = safe_text(hardware.name, 80)
    if kind not in (*KINDS, CPU_ONLY):
        raise HotcoldError(f"GPU plan {kind!r} is unknown, choose from {', '.join(KINDS)}")
    if not hardware.has_gpu:
        raise HotcoldError(f"{name}: there is no GPU to place neurons on; name a card with --hardware, for example "
                           f"{', '.join(PRESETS)}")  # fmt: skip
    if budget > hardware.vram:
        raise HotcoldError(f"--vram-budget {format_bytes(budget)}: more than the {format_bytes(hardware.vram)} of "
                           f"{safe_text(hardware.gpu or hardware.name, 80)}")  # fmt: skip
    if kind in SHARED and not model.split:
        raise HotcoldError("the stock layout keeps no neuron's rows together, only whole layers can be on the GPU: use "
                           "--gpu-plan layers, or run hotcold convert on this file first")  # fmt: skip
    if kind in SHARED and not model.fires:
        raise HotcoldError("no neuron of this model is ever off, so none can be left to the CPU: use --gpu-plan "
                           "layers, or make it sparse with hotcold relufy")  # fmt: skip
    if kind in SHARED and not model.by_key:
        raise HotcoldError("neurons of this model are off by the size of their value, which their key row does not "
                           "tell, so they cannot be divided: use --gpu-plan layers")  # fmt: skip
    if sparsity not in model.modes:
        what = {"predict": "no layer has a predictor that pays: hotcold train-predictor adds them"}
        raise HotcoldError(f"sparsity {sparsity}: {what.get(sparsity, 'this model has ' + ', '.join(model.modes))}")
    if kind in SHARED and sparsity != ("predict" if kind == "predict" else "exact"):
        raise HotcoldError(f"--gpu-plan {kind} is not for sparsity {sparsity}")
    if n_layers is not None and not 0 < n_layers <= model.n_layer:
        raise HotcoldError(f"--gpu-layers {n_layers}: allowed are 1 to the model's {model.n_layer}")


def _layers_on_gpu(
    model: PlanModel, hardware: Hardware, budget: int, kind: str, sparsity: str, wanted: int | None
) -> tuple[int, list[str]]:  # fmt: skip
    """-> how many of the last layers are on the GPU: as many as fit, or `wanted`; what must be said of it.

    Raises HotcoldError if not even one fits, or not all that are asked for.
    """
    sizes, whole = model.sizes_in(sparsity), kind not in SHARED
    each = [layer.fixed + (layer.ffn if whole else 0) for layer in sizes.layers]
    mode = "predict" if sparsity == "predict" else "exact"
    why = (model.gpu_notes or {}).get(mode, ())
    able = model.n_layer - model.gpu_from[mode]
    if not able or (wanted or 0) > able or kind == "all" and able < model.n_layer:
        raise HotcoldError("; ".join(why) or f"the GPU can compute {able} of {model.n_layer} layers")
    base = hardware.gpu_context + sizes.workspace + sizes.head + (0 if whole else sizes.cold)
    left, fit = budget - base, 0
    for size in reversed(each[model.n_layer - able :]):
        if size > left:
            break
        left -= size
        fit += 1
    n_on = fit if wanted is None else wanted
    if kind == "all":
        n_on = model.n_layer
    if n_on == 0 or n_on > fit:
        raise _needs_more(model, hardware, budget, sizes.layers, each, base, max(1, n_on), kind)
    notes = list(why)
    if n_on == fit < able:
        total = base + sum(each)
        what = "are on the GPU" if whole else "have their attention on the GPU"
        notes.append(f"only the last {n_on} of {model.n_layer} layers {what}: all would need {format_bytes(total)} at "
                     f"--n-ctx {model.n_ctx}")  # fmt: skip
    return n_on, notes


def _needs_more(
    model: PlanModel, hardware: Hardware, budget: int, layers: Sequence[LayerBytes], each: Sequence[int], base: int,
    n_on: int, kind: str,
) -> HotcoldError:  # fmt: skip
    least = base + sum(each[model.n_layer - n_on :])
    workspace = model.sizes.workspace + (model.sizes.cold if kind in SHARED else 0)
    kv = sum(layer.kv for layer in layers[model.n_layer - n_on :])
    what = "one layer" if n_on == 1 else f"{n_on} layers"
    way_out = "raise the budget, lower --n-ctx or stay on the CPU" if n_on == 1 else "raise the budget, lower --n-ctx"
    return HotcoldError(
        f"--vram-budget {format_bytes(budget)}: at least {format_bytes(least)} ({least} bytes) are needed for plan "
        f"{kind}: driver {format_bytes(hardware.gpu_context)}, workspaces {format_bytes(workspace)}, "
        f"output head {format_bytes(model.sizes.head)}, {what} {format_bytes(least - base)} of which "
        f"{format_bytes(kv)} are KV cache for --n-ctx {model.n_ctx}: {way_out}"
    )


def _shared(
    model: PlanModel, hardware: Hardware, budget: int, kind: str, sparsity: str, objective: str,
    n_on: int, notes: list[str], time_limit: float, may_have_fewer: bool,
) -> Placement:  # fmt: skip
    """Neurons of the last n_on layers, divided by the solver; of fewer layers where that is faster."""
    sizes, on_gpu = model.sizes_in(sparsity), _last(model, n_on)
    layers = ffn_layers(model, kind, sparsity, on_gpu)
    none = (0,) * model.n_layer, (False,) * model.n_layer
    gpu_left = budget - hardware.gpu_context - sizes.on_gpu(on_gpu, *none)
    ffn = sum(layer.ffn for layer in sizes.layers)
    ram_left = hardware.ram - (sizes.in_ram(on_gpu, *none) - ffn)
    if ram_left < 0 or gpu_left + ram_left < ffn:
        raise _too_large(model, hardware, budget, hardware.ram - ram_left + max(0, ffn - gpu_left))
    problem = make_problem(layers, rates(model, hardware), objective, gpu_left, ram_left, BATCH)
    most = n_on
    if may_have_fewer and objective == "time":
        n_on, problem, ram_left = _fewer_layers(model, hardware, sparsity, most, problem, ram_left)
        on_gpu = _last(model, n_on)
    solution = solve_problem(problem, ram_left, time_limit)
    p = _evaluate(model, hardware, budget, kind, sparsity, objective, (solution.hot, solution.keys, on_gpu))
    if n_on < most:
        notes = [f"only the last {n_on} of {model.n_layer} layers are on the GPU: {most} would fit, with fewer neurons "
                 "of each"]  # fmt: skip
    if solution.status != "optimal":
        notes = [f"solver stopped by {solution.status}: at most {solution.gap:.2%} from the best", *notes]
    return replace(p, notes=(*notes, *p.notes))


def _fewer_layers(
    model: PlanModel, hardware: Hardware, sparsity: str, most: int, problem: Problem, ram_left: int
) -> tuple[int, Problem, int]:  # fmt: skip
    """-> how many of the last `most` layers are best on the GPU, their problem, RAM left for neurons.

    A layer that is shared costs a wait, and a KV cache that is never full: where the budget is tight, room for the
    neurons of later layers gains more than the attention of earlier ones.
    """
    sizes, one, n_layer = model.sizes_in(sparsity).layers, rates(model, hardware), model.n_layer
    by_cpu = [layer_times(replace(layer, usable=False), one, 0, False).total for layer in problem.layers]
    cpu, gpu = ([attention_seconds(model, hardware, size, number, on) for number, size in enumerate(sizes)]
                for on in (False, True))  # fmt: skip
    freed = [sum(size.fixed for size in sizes[n_layer - most : n_layer - n]) for n in range(most + 1)]
    ffn = sum(layer.row * layer.n for layer in problem.layers)
    nothing = np.zeros(1, np.int64)
    on_cpu = [Choices(nothing, nothing.astype(bool), nothing, np.array([t])) for t in by_cpu]

    def with_layers(n: int) -> Problem:
        choices = [*on_cpu[: n_layer - n], *problem.choices[n_layer - n :]]
        return replace(problem, choices=choices, capacity=problem.capacity + freed[n],
                       floor=max(0, ffn - ram_left + freed[n]))  # fmt: skip

    def others(n: int) -> float:
        first = n_layer - n
        return sum(cpu[:first]) + sum(gpu[first:]) + outside_seconds(model, hardware, _last(model, n))

    bounds = relaxed(problem, [problem.capacity + f for f in freed])
    bounds = [bound + sum(by_cpu[: n_layer - n]) + others(n) if freed[n] <= ram_left else np.inf
              for n, bound in enumerate(bounds)]  # fmt: skip
    best, least = most, np.inf
    for n in sorted(range(most, 0, -1), key=bounds.__getitem__)[:_TRIED]:
        if bounds[n] >= least:
            break
        if (t := greedy_cost(with_layers(n)) + others(n)) < least:
            best, least = n, t
    return best, with_layers(best), ram_left - freed[best]


def _too_large(model: PlanModel, hardware: Hardware, budget: int, needed: int) -> HotcoldError:
    return HotcoldError(
        f"the model does not fit: {format_bytes(needed)} of RAM are needed, {format_bytes(hardware.ram)} given, "
        f"beside {format_bytes(budget)} of VRAM: raise --vram-budget, lower --n-ctx or use a smaller type"
    )


# ---- times


def ffn_layers(model: PlanModel, kind: str, sparsity: str, on_gpu: Sequence[bool]) -> list[Layer]:
    """What the FFN of each layer reads. Sparse activations are decided by the key row, thresholds by key and up row."""
    layers = []
    for size, f, density, on in zip(model.sizes.layers, model.frequency, model.density, on_gpu, strict=True):
        up_too = model.gated and not model.by_key
        if sparsity == "dense" or on and not model.by_key:  # the GPU computes all neurons of such layers
            layers.append(Layer(np.ones(len(f)), size.key_row, size.value_row, np.full(len(f), float(size.key_row)),
                                float(size.value_row), usable=on, split_keys=False, fire_scattered=False))  # fmt: skip
            continue
        decide = size.key_row + (size.value_row / 2 if up_too else 0)
        predicted = sparsity == "predict" and density is not None
        layers.append(Layer(
            np.asarray(f, np.float64), size.key_row, size.value_row,
            decide * (candidates(f, density) if predicted and density is not None else np.ones(len(f))),
            size.value_row / (2 if up_too else 1), usable=on, split_keys=not up_too and not predicted,
            own_keys=not size.keys_by_column, decide_scattered=predicted,
        ))  # fmt: skip
    return layers


def candidates(frequency: np.ndarray, density: float) -> np.ndarray:
    """f64 [n_ff]: share of the tokens on which a predictor of this density names each neuron; never less than it fires.

    What it names too much is spread as the firings are.
    """
    named = np.minimum(1.0, frequency * density / max(float(frequency.mean()), 1e-12))
    return np.maximum(named, frequency)


def rates(model: PlanModel, hardware: Hardware) -> Rates:
    """A layer that waits for the CPU also sends it an input and gets a result, both f32 [n_embd], over PCIe."""
    return hardware.rates(8 * model.n_embd)


def _evaluate(
    model: PlanModel, hardware: Hardware, budget: int, kind: str, sparsity: str, objective: str, division: Division
) -> Placement:  # fmt: skip
    """Bytes and expected times of a placement."""
    hot, keys, on_gpu = division
    sizes = model.sizes_in(sparsity)
    layers = ffn_layers(model, kind, sparsity, on_gpu)
    parts = [_layer_seconds(model, hardware, size, layer, number, n, all_keys) for number, (size, layer, n, all_keys)
             in enumerate(zip(sizes.layers, layers, hot, keys, strict=True))]  # fmt: skip
    t_gpu, t_cpu, t_layer, p_cold = zip(*parts, strict=True)
    firings = [float(layer.frequency.sum()) for layer in layers]
    hot_firings = [float(layer.frequency[:n].sum()) for layer, n in zip(layers, hot, strict=True)]
    per_layer = [
        (size.fixed if on else 0) + n * size.value_row + (size.n_ff if all_keys else n) * size.key_row
        for size, on, n, all_keys in zip(sizes.layers, on_gpu, hot, keys, strict=True)
    ]
    rest = outside_seconds(model, hardware, on_gpu)
    t_token = sum(t_layer) + rest
    t_token_cpu = cpu_seconds(model, hardware, sparsity)
    notes = ("the CPU alone would be faster than this placement",) if t_token > t_token_cpu * (1 + 1e-9) else ()
    return Placement(
        kind=kind, sparsity=sparsity, budget=budget, n_ctx=model.n_ctx, objective=objective, hardware=hardware,
        hot=hot, keys_on_gpu=keys, layer_on_gpu=on_gpu, n_ff=model.n_ff,
        share=tuple(of / all_of if all_of > 0 else 0.0 for of, all_of in zip(hot_firings, firings, strict=True)),
        t_gpu=t_gpu, t_cpu=t_cpu, t_layer=t_layer, p_cold=p_cold, gpu_bytes=tuple(per_layer),
        used=hardware.gpu_context + sizes.on_gpu(on_gpu, hot, keys) if any(on_gpu) else 0,
        ram=sizes.in_ram(on_gpu, hot, keys), t_rest=rest, t_token=t_token, t_token_cpu=t_token_cpu,
        load=sum(hot_firings) / sum(firings) if sum(firings) > 0 else 0.0, notes=notes,
    )  # fmt: skip


def _layer_seconds(
    model: PlanModel, hardware: Hardware, size: LayerBytes, layer: Layer, number: int, hot: int, keys: bool
) -> tuple[float, float, float, float]:  # fmt: skip
    """-> seconds on the GPU, on the CPU, of the layer; chance that the GPU waits."""
    ffn = layer_times(layer, rates(model, hardware), hot, keys)
    attention = attention_seconds(model, hardware, size, number, layer.usable)
    if layer.usable:
        return attention + ffn.before + ffn.gpu, ffn.cpu, attention + ffn.total, ffn.p_cold
    return 0.0, attention + ffn.cpu, attention + ffn.total, 0.0


def attention_seconds(model: PlanModel, hardware: Hardware, size: LayerBytes, number: int, on_gpu: bool) -> float:
    """Matrices, predictor, and the cache of a context that is half full; on the GPU also what launches cost."""
    window, n_ctx = model.window[number], model.n_ctx
    seen = min(window, n_ctx / 2) if window else n_ctx / 2
    n_bytes = size.attention + size.predictor + size.kv * seen / n_ctx
    one = hardware.rates()
    return n_bytes * one.gpu_read + hardware.gpu_overhead if on_gpu else n_bytes * one.cpu_read


def outside_seconds(model: PlanModel, hardware: Hardware, on_gpu: Sequence[bool]) -> float:
    """Head, logits to the CPU, and where the token changes sides."""
    one = hardware.rates()
    if not any(on_gpu):
        return model.sizes.head * one.cpu_read
    copies = 4 * model.n_vocab / hardware.pcie if hardware.pcie > 0 else 0.0
    return model.sizes.head * one.gpu_read + copies + one.t_sync * (1 if all(on_gpu) else 2)


def cpu_seconds(model: PlanModel, hardware: Hardware, sparsity: str) -> float:
    """Expected seconds per token with everything on the CPU."""
    layers = ffn_layers(model, CPU_ONLY, sparsity, (False,) * model.n_layer)
    sizes = model.sizes_in(sparsity).layers
    per_layer = (_layer_seconds(model, hardware, size, layer, number, 0, False)[2]
                 for number, (size, layer) in enumerate(zip(sizes, layers, strict=True)))  # fmt: skip
    return sum(per_layer) + model.sizes.head * hardware.rates().cpu_read
