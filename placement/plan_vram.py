"""What of a model lies on the GPU for a budget of VRAM: attention first, then key rows, then hot neurons.

In: a neuron-split GGUF (sizes), frequencies per layer, a budget, Hardware. Out: Placement, as a table and as the
placement index of a file. Next: place.py, which writes it; report.py, which draws it.

The last layers go to the GPU first, so that a token changes sides once and ends where the output head is. Within them
solve.py divides the FFN. Expected times count bytes over bandwidth; layers with a predictor are planned for predict
mode, the others for exact mode.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from gguf import GGUFValueType
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotcold.convert.model import Metadata, array, string
from hotcold.placement.choices import OBJECTIVES, Layer, Rates, layer_times
from hotcold.placement.hardware import PRESETS, Hardware, from_json, load_hardware, to_json
from hotcold.placement.identity import model_id
from hotcold.placement.memory import LayerBytes, ModelBytes, model_bytes
from hotcold.placement.solve import solve
from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.facts import read_counts, read_placement_facts, read_predictor_facts
from hotcold.runtime.gguf_file import GGUFFile, safe_text
from hotcold.runtime.inspect import format_bytes
from hotcold.runtime.keys import Keys, show

DEFAULT_N_CTX = 4096
_MAX_N_CTX = 1 << 24
_MAX_BUDGET = 1 << 48
_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


@dataclass(frozen=True)
class Placement:
    """One budget's answer. Per-layer tuples have n_layer entries; times are expected seconds per token."""

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
    gpu_bytes: tuple[int, ...]
    used: int  # bytes of VRAM, driver and workspaces included; never above the budget
    ram: int  # bytes of the model that the CPU reads
    t_token: float
    t_token_cpu: float  # everything on the CPU, exact mode
    load: float  # share of all activations on the GPU
    notes: tuple[str, ...]

    @property
    def tokens_per_second(self) -> float:
        return 1 / self.t_token


def place_on(
    file: GGUFFile, config: ModelConfig, frequency: Sequence[np.ndarray], *, budget: int, n_ctx: int,
    hardware: Hardware, objective: str,
) -> Placement:  # fmt: skip
    """Solve one budget. frequency[l]: f64 [n_ff], fired / tokens, descending.

    Raises HotcoldError: frequencies that are not, no GPU, a budget below the least or above the card.
    """
    check_frequencies(config, frequency)
    _check_numbers(config, budget, n_ctx, hardware)
    sizes = model_bytes(file, config, n_ctx)
    on_gpu = _layers_on_gpu(sizes, config, budget, n_ctx, hardware)
    layers = _layers(file, config, sizes, frequency, on_gpu)
    none = (0,) * config.n_layer, (False,) * config.n_layer
    gpu_left = budget - hardware.gpu_context - sizes.on_gpu(on_gpu, *none)
    ffn = sum(layer.ffn for layer in sizes.layers)
    ram_left = hardware.ram - (sizes.in_ram(on_gpu, *none) - ffn)
    if ram_left < 0 or gpu_left + ram_left < ffn:
        needed = hardware.ram - ram_left + max(0, ffn - gpu_left)
        raise HotcoldError(
            f"the model does not fit: {format_bytes(needed)} of RAM are needed, {format_bytes(hardware.ram)} given, "
            f"beside {format_bytes(budget)} of VRAM: raise --vram-budget, lower --n-ctx or use a smaller type"
        )
    solution = solve(layers, hardware.rates(), objective, gpu_bytes=gpu_left, cpu_bytes=ram_left)
    plan = _evaluate(sizes, layers, config, hardware, budget=budget, n_ctx=n_ctx, objective=objective,
                     hot=solution.hot, keys=solution.keys, on_gpu=on_gpu)  # fmt: skip
    notes = list(plan.notes)
    if solution.status != "optimal":
        notes.append(f"solver stopped by {solution.status}: at most {solution.gap:.2%} from the best")
    if (n_on := sum(on_gpu)) < config.n_layer:
        whole = hardware.gpu_context + sizes.on_gpu((True,) * config.n_layer, *none)
        notes.append(f"only the last {n_on} of {config.n_layer} layers have their attention on the GPU: all would need "
                     f"{format_bytes(whole)} at --n-ctx {n_ctx}")  # fmt: skip
    if plan.t_token > plan.t_token_cpu:
        notes.append("the CPU alone would be faster than this placement")
    return replace(plan, notes=tuple(notes))


def check_frequencies(config: ModelConfig, frequency: Sequence[np.ndarray]) -> None:
    """One array per layer, one number per neuron. solve.py checks the numbers."""
    if len(frequency) != config.n_layer:
        raise HotcoldError(f"frequencies of {len(frequency)} layers, the model has {config.n_layer}")
    for layer, (values, n_ff) in enumerate(zip(frequency, config.n_ff, strict=True)):
        if values.shape != (n_ff,):
            raise HotcoldError(f"layer {layer}: frequencies of shape {list(values.shape)}, it has {n_ff} neurons")


def _check_numbers(config: ModelConfig, budget: int, n_ctx: int, hardware: Hardware) -> None:
    name = safe_text(hardware.name, 80)
    if not hardware.has_gpu:
        raise HotcoldError(f"{name}: there is no GPU to place neurons on; name a card with --hardware, for example "
                           f"{', '.join(PRESETS)}")  # fmt: skip
    if budget > hardware.vram:
        raise HotcoldError(f"--vram-budget {format_bytes(budget)}: more than the {format_bytes(hardware.vram)} of "
                           f"{safe_text(hardware.gpu or hardware.name, 80)}")  # fmt: skip
    if not 1 <= n_ctx <= _MAX_N_CTX:
        raise HotcoldError(f"--n-ctx {n_ctx}: must be from 1 to {_MAX_N_CTX}")
    if config.rope is None and n_ctx > config.n_ctx_train:
        raise HotcoldError(f"--n-ctx {n_ctx}: this model has learned positions for {config.n_ctx_train} tokens only")


def _layers_on_gpu(
    sizes: ModelBytes, config: ModelConfig, budget: int, n_ctx: int, hardware: Hardware
) -> tuple[bool, ...]:  # fmt: skip
    """As many of the last layers as fit; HotcoldError if not even one does."""
    left = budget - hardware.gpu_context - sizes.workspace - sizes.head
    n_on = 0
    for layer in reversed(sizes.layers):
        if layer.fixed > left:
            break
        left -= layer.fixed
        n_on += 1
    if n_on == 0:
        last = sizes.layers[-1]
        least = hardware.gpu_context + sizes.workspace + sizes.head + last.fixed
        raise HotcoldError(
            f"--vram-budget {format_bytes(budget)}: at least {format_bytes(least)} ({least} bytes) are needed: driver "
            f"{format_bytes(hardware.gpu_context)}, workspaces {format_bytes(sizes.workspace)}, output head "
            f"{format_bytes(sizes.head)}, one layer {format_bytes(last.fixed)} of which {format_bytes(last.kv)} are KV "
            f"cache for --n-ctx {n_ctx}: raise the budget, lower --n-ctx or stay on the CPU"
        )
    return tuple(layer >= config.n_layer - n_on for layer in range(config.n_layer))


def _layers(
    file: GGUFFile, config: ModelConfig, sizes: ModelBytes, frequency: Sequence[np.ndarray], on_gpu: Sequence[bool]
) -> list[Layer]:
    """What the solver needs to know. Sparse activations are decided by the key row, thresholds by key and up row."""
    predictors = read_predictor_facts(file, config)
    sparse = config.activation in schema.SPARSE_ACTIVATIONS
    layers = []
    for number, (size, f) in enumerate(zip(sizes.layers, frequency, strict=True)):
        up_too = config.gated and not sparse
        decide = size.key_row + (size.value_row / 2 if up_too else 0)
        candidates: np.ndarray = np.ones(len(f))
        if predictors is not None and predictors.density and number not in predictors.falls_back:
            candidates = np.minimum(1.0, f * predictors.density[number] / max(float(f.mean()), 1e-12))
        layers.append(
            Layer(
                np.asarray(f, np.float64), size.key_row, size.value_row, decide * candidates,
                size.value_row / (2 if up_too else 1), usable=on_gpu[number], split_keys=not up_too,
                own_keys=not size.keys_by_column,
            )  # fmt: skip
        )
    return layers


def _evaluate(
    sizes: ModelBytes, layers: Sequence[Layer], config: ModelConfig, hardware: Hardware, *, budget: int, n_ctx: int,
    objective: str, hot: tuple[int, ...], keys: tuple[bool, ...], on_gpu: tuple[bool, ...],
) -> Placement:  # fmt: skip
    """Bytes and expected times of a placement."""
    rates = hardware.rates()
    t_gpu, t_cpu, t_layer, share = [], [], [], []
    for number, (layer, size) in enumerate(zip(layers, sizes.layers, strict=True)):
        ffn = layer_times(layer, rates, hot[number], keys[number])
        attention = _read_by_attention(size, config.window[number], n_ctx)
        if on_gpu[number]:
            attention = attention * rates.gpu_read + hardware.gpu_overhead
            t_gpu.append(attention + ffn.before + ffn.gpu)
            t_cpu.append(ffn.cpu)
        else:
            attention = attention * rates.cpu_read
            t_gpu.append(0.0)
            t_cpu.append(attention + ffn.cpu)
        t_layer.append(attention + ffn.total)
        total = float(layer.frequency.sum())
        share.append(float(layer.frequency[: hot[number]].sum()) / total if total > 0 else 0.0)
    head = sizes.head * (rates.gpu_read if on_gpu[-1] else rates.cpu_read)
    copies = 4 * config.n_vocab / hardware.pcie if hardware.pcie > 0 else 0.0  # logits
    crossings = rates.t_sync * (1 if all(on_gpu) else 2)
    activations = sum(float(layer.frequency.sum()) for layer in layers)
    on_gpu_activations = sum(float(layer.frequency[:n].sum()) for layer, n in zip(layers, hot, strict=True))
    per_layer = [
        (size.fixed if on else 0) + n * size.value_row + (size.n_ff if all_keys else n) * size.key_row
        for size, on, n, all_keys in zip(sizes.layers, on_gpu, hot, keys, strict=True)
    ]
    return Placement(
        budget=budget, n_ctx=n_ctx, objective=objective, hardware=hardware, hot=hot, keys_on_gpu=keys,
        layer_on_gpu=on_gpu, n_ff=config.n_ff, share=tuple(share), t_gpu=tuple(t_gpu), t_cpu=tuple(t_cpu),
        t_layer=tuple(t_layer), gpu_bytes=tuple(per_layer),
        used=hardware.gpu_context + sizes.on_gpu(on_gpu, hot, keys), ram=sizes.in_ram(on_gpu, hot, keys),
        t_token=sum(t_layer) + head + copies + crossings,
        t_token_cpu=cpu_seconds(sizes, config, [layer.frequency for layer in layers], n_ctx, rates),
        load=on_gpu_activations / activations if activations > 0 else 0.0, notes=(),
    )  # fmt: skip


def _read_by_attention(size: LayerBytes, window: int, n_ctx: int) -> float:
    """Bytes a token reads: matrices, predictor, and the cache of a context that is half full."""
    seen = min(window, n_ctx / 2) if window else n_ctx / 2
    return size.attention + size.predictor + size.kv * seen / n_ctx


def cpu_seconds(
    sizes: ModelBytes, config: ModelConfig, frequency: Sequence[np.ndarray], n_ctx: int, rates: Rates
) -> float:  # fmt: skip
    """Expected seconds per token with everything on the CPU, in exact mode."""
    up_too = config.gated and config.activation not in schema.SPARSE_ACTIVATIONS
    total = sizes.head * rates.cpu_read
    for size, f, window in zip(sizes.layers, frequency, config.window, strict=True):
        always = size.key_row + (size.value_row / 2 if up_too else 0)
        attention = _read_by_attention(size, window, n_ctx) - size.predictor
        total += (attention + always * size.n_ff) * rates.cpu_read
        total += float(f.sum()) * (size.key_row + size.value_row - always) * rates.cpu_rows
    return total


# ---- the placement index of a file


def placement_metadata(model: str, placements: Sequence[Placement]) -> Metadata:
    """hotcold.placement.*, for rewrite(). model: placement/identity.py of the file."""
    u32 = GGUFValueType.UINT32

    def flat(rows: Sequence[Sequence[int]]) -> list[int]:
        return [int(value) for row in rows for value in row]

    return {
        schema.KEY_PLACEMENT_MODEL: string(model),
        schema.KEY_PLACEMENT_BUDGET: array([p.budget for p in placements], GGUFValueType.UINT64),
        schema.KEY_PLACEMENT_N_CTX: array([p.n_ctx for p in placements], u32),
        schema.KEY_PLACEMENT_OBJECTIVE: array([p.objective for p in placements], GGUFValueType.STRING),
        schema.KEY_PLACEMENT_HARDWARE: array([to_json(p.hardware) for p in placements], GGUFValueType.STRING),
        schema.KEY_PLACEMENT_HOT: array(flat([p.hot for p in placements]), u32),
        schema.KEY_PLACEMENT_KEYS_ON_GPU: array(flat([p.keys_on_gpu for p in placements]), u32),
        schema.KEY_PLACEMENT_LAYER_ON_GPU: array(flat([p.layer_on_gpu for p in placements]), u32),
    }


def read_placements(file: GGUFFile, config: ModelConfig) -> list[Placement]:
    """The placements a file has, with times and bytes computed anew; empty where there are none.

    Raises HotcoldError for an index that is malformed, of another model, or does not fit its own budget.
    """
    facts = read_placement_facts(file, config)
    if not facts:
        return []
    keys, n = Keys(file), len(facts)
    if (model := keys.text(schema.KEY_PLACEMENT_MODEL)) != model_id(file, config):
        raise keys.error(f"key '{schema.KEY_PLACEMENT_MODEL}'", show(model),
                         "this model's id: the placement is of another model, run hotcold place again")  # fmt: skip
    objectives, machines = (_texts(keys, key, n) for key in (schema.KEY_PLACEMENT_OBJECTIVE,
                                                             schema.KEY_PLACEMENT_HARDWARE))  # fmt: skip
    flags = {key: np.array(keys.per_layer(key, n * config.n_layer, 0, 1, "iu"), bool).reshape(n, -1).tolist()
             for key in (schema.KEY_PLACEMENT_KEYS_ON_GPU, schema.KEY_PLACEMENT_LAYER_ON_GPU)}  # fmt: skip
    counts = read_counts(file, config)
    if counts is None or not counts.sorted:
        raise keys.error("ffn_neuron_count", "nothing" if counts is None else "counts that are not sorted",
                         "descending counts wherever there is a placement")  # fmt: skip
    frequency = [fired / counts.tokens for fired in counts.fired]
    out, token = [], model_bytes(file, config, n_ctx=1)
    for i, fact in enumerate(facts):
        hardware = _machine(keys, machines[i], i)
        on_gpu, all_keys = (tuple(flags[key][i]) for key in (schema.KEY_PLACEMENT_LAYER_ON_GPU,
                                                             schema.KEY_PLACEMENT_KEYS_ON_GPU))  # fmt: skip
        if objectives[i] not in OBJECTIVES:
            raise keys.error(f"key '{schema.KEY_PLACEMENT_OBJECTIVE}'", show(objectives[i]), ", ".join(OBJECTIVES))
        if not 1 <= fact.n_ctx <= _MAX_N_CTX:
            raise keys.error(f"key '{schema.KEY_PLACEMENT_N_CTX}'", fact.n_ctx, f"1 to {_MAX_N_CTX}")
        for layer in range(config.n_layer):
            if not on_gpu[layer] and (fact.hot[layer] or all_keys[layer] or any(on_gpu[:layer])):
                raise keys.error(f"key '{schema.KEY_PLACEMENT_LAYER_ON_GPU}'", f"0 for layer {layer}",
                                 "1 for layers with neurons or keys on the GPU and for all after one")  # fmt: skip
        sizes = token.of_context(fact.n_ctx)
        layers = _layers(file, config, sizes, frequency, on_gpu)
        plan = _evaluate(sizes, layers, config, hardware, budget=fact.budget, n_ctx=fact.n_ctx,
                         objective=objectives[i], hot=fact.hot, keys=all_keys, on_gpu=on_gpu)  # fmt: skip
        if plan.used > fact.budget:
            raise keys.error(f"key '{schema.KEY_PLACEMENT_BUDGET}'", f"{fact.budget} bytes",
                             f"at least the {plan.used} bytes that this placement takes")  # fmt: skip
        out.append(plan)
    return out


def _machine(keys: Keys, text: str, entry: int) -> Hardware:
    where = f"key '{schema.KEY_PLACEMENT_HARDWARE}' entry {entry}"
    hardware = from_json(text.encode("utf-8", "surrogateescape"), f"{safe_text(str(keys.file.path))}: {where}")
    if not hardware.has_gpu:
        raise keys.error(where, "a machine without GPU", "one with gpu_bandwidth and vram above 0")
    return hardware


def _texts(keys: Keys, key: str, n: int) -> list[str]:
    value = keys.raw(key, f"{n} strings")
    if not isinstance(value, list) or len(value) != n:
        raise keys.error(f"key '{key}'", show(value), f"{n} strings")
    return value


# ---- tables


def placement_table(p: Placement) -> RenderableType:
    """One row per layer, then totals."""
    machine = safe_text(p.hardware.name, 80)
    title = f"Placement for {format_bytes(p.budget)} of VRAM, context {p.n_ctx}, objective {p.objective}, on {machine}"
    table = Table(header_style="bold", box=None, pad_edge=False)
    for heading in ("layer", "attention", "key rows", "hot neurons", "activations on GPU", "T GPU us", "T CPU us",
                    "T us", "on GPU"):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for layer in range(len(p.hot)):
        keys = "GPU" if p.keys_on_gpu[layer] or p.hot[layer] == p.n_ff[layer] else "hot" if p.hot[layer] else "CPU"
        times = (p.t_gpu[layer], p.t_cpu[layer], p.t_layer[layer])
        table.add_row(str(layer), "GPU" if p.layer_on_gpu[layer] else "CPU", keys, f"{p.hot[layer]} of {p.n_ff[layer]}",
                      f"{p.share[layer]:.1%}", *(f"{t * 1e6:.1f}" for t in times),
                      format_bytes(p.gpu_bytes[layer]))  # fmt: skip
    faster = p.t_token_cpu / p.t_token
    lines = [
        f"VRAM used      {format_bytes(p.used)} of {format_bytes(p.budget)} ({p.used} of {p.budget} bytes), "
        f"{format_bytes(p.hardware.gpu_context)} of it the driver's",
        f"RAM read       {format_bytes(p.ram)}",
        f"neuron load    {p.load:.1%} GPU, {1 - p.load:.1%} CPU",
        f"expected       {p.tokens_per_second:.1f} tokens/s with a context half full; all on the CPU, exact: "
        f"{1 / p.t_token_cpu:.1f} ({faster:.2f} times)",
        *(f"note           {note}" for note in p.notes),
    ]
    return Group(Text(title, style="bold"), table, *(Text(line) for line in lines))


# ---- command line


def add_budget_arguments(parser: argparse.ArgumentParser) -> None:
    """--vram-budget, --n-ctx, --hardware, --objective."""
    group = parser.add_argument_group("placement on a GPU")
    group.add_argument(
        "--vram-budget", type=parse_size, action="append", metavar="SIZE",
        help="VRAM to use, such as 8GiB, 8000MB or bytes; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--n-ctx", type=_context, metavar="N",
        help=f"tokens of context to keep room for (default: the model's, at most {DEFAULT_N_CTX})",
    )  # fmt: skip
    group.add_argument(
        "--hardware", metavar="FILE|PRESET",
        help=f"JSON of a machine's figures, or {', '.join(PRESETS)} (default: this machine, measured)",
    )  # fmt: skip
    group.add_argument(
        "--objective", choices=OBJECTIVES, default="time",
        help="time: least expected time per token (default); paper: most activations on the GPU",
    )  # fmt: skip


def placements_from_args(
    args: argparse.Namespace, file: GGUFFile, config: ModelConfig, frequency: Sequence[np.ndarray]
) -> list[Placement]:  # fmt: skip
    """One placement per budget asked for; with --hardware alone the card's whole VRAM; none without either."""
    if not args.vram_budget and args.hardware is None:
        if args.n_ctx is not None:
            raise HotcoldError("--n-ctx is for a placement: give --vram-budget or --hardware too")
        return []
    if args.hardware is not None:
        hardware = load_hardware(args.hardware)
    else:
        from hotcold.placement.machine import machine_hardware

        hardware = machine_hardware()
    budgets = list(dict.fromkeys(args.vram_budget or [hardware.vram]))
    n_ctx = args.n_ctx or min(config.n_ctx_train, DEFAULT_N_CTX)
    return [place_on(file, config, frequency, budget=budget, n_ctx=n_ctx, hardware=hardware, objective=args.objective)
            for budget in budgets]  # fmt: skip


def parse_size(text: str) -> int:
    """8GiB, 1.5GB, 8000MB, 8589934592 -> bytes."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s?([A-Za-z]{0,3})", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    value = float(match[1]) * unit if match and unit else math.nan
    if not 1 <= value <= _MAX_BUDGET or match is not None and "." in match[1] and unit == 1:
        shown = repr(text if len(text) <= 40 else text[:40] + "...")
        raise argparse.ArgumentTypeError(f"must be a size such as 8GiB, 8000MB or bytes, got {shown}")
    return int(value)


def _context(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= _MAX_N_CTX:
        shown = repr(text if len(text) <= 40 else text[:40] + "...")
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {_MAX_N_CTX}, got {shown}")
    return int(text)
