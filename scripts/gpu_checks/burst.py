"""One run of ours in part 5, in a process of its own; or what the runs need to know of model and machine.

In: a request as JSON. Out: one line of JSON. Next: speed.py.

    python -m gpu_checks.burst '{"who": "keys", "budget": 2147483648, …}'
    python -m gpu_checks.burst '{"who": "facts", …}'
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from gpu_checks.devices import open_for
from gpu_checks.settings import Settings
from hotcold.placement.choose import choose_placement
from hotcold.placement.hardware import Hardware
from hotcold.placement.machine import machine_hardware
from hotcold.placement.plan_model import read_model
from hotcold.placement.plan_vram import plan as plan_division
from hotcold.runtime.bench import Bench, Case
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.engine import N_BATCH, Engine
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.gpu.choose import GpuOptions, Wanted
from hotcold.runtime.gpu.device import Device
from hotcold.runtime.gpu.memory import vram
from hotcold.runtime.gpu.placement import GpuPlacement, last_layers
from hotcold.runtime.gpu.source import load_kernels
from hotcold.runtime.plan import make_plan
from hotcold.runtime.threads import default_threads
from hotcold.runtime.weights import load_weights

CPU, CPU_PREDICT = "cpu", "cpu, predict"
SAMPLES = 2  # of each test in a burst


def main() -> int:
    request = json.loads(sys.argv[1])
    settings = Settings.from_json(sys.argv[2])
    try:
        answer = facts(request, settings) if request["who"] == "facts" else measure(request, settings)
    except HotcoldError as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    print("\n" + json.dumps(answer), flush=True)
    return 0


def hardware_of(settings: Settings, device: Device) -> Hardware:
    """What plans are solved with; measured once and kept by hotcold."""
    if settings.sim:
        return Hardware("simulated", 2e10, 2, 8 << 30, gpu="simulated", gpu_bandwidth=4e11, pcie=2e10, vram=1 << 33,
                        gpu_context=device.context_bytes)  # fmt: skip
    return dataclasses.replace(machine_hardware(say=print), gpu_context=device.context_bytes)


def facts(request: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Bytes of VRAM that the whole model takes, what there is, the machine's figures."""
    device = open_for(settings)
    load_kernels(device)  # whose code is part of what the device takes
    n_ctx = request["prompt"] + request["gen"]
    with open_gguf(Path(request["model"])) as file:
        config = ModelConfig.from_gguf(file)
        weights = load_weights(file, config)
        hardware = hardware_of(settings, device)
        whole = last_layers(config, config.n_layer, budget=1 << 62, n_ctx=n_ctx, kind="all")
        plans = [make_plan(config, weights, mode, whole) for mode in ("exact", "predict")]
        needs = [vram(plan, n_ctx, min(N_BATCH, n_ctx), device.context_bytes).total for plan in plans]
        # The solver counts with a bound that may be a little more.
        model = read_model(file, config, n_ctx)
        needs += [plan_division(model, hardware, hardware.vram, "all", mode).used for mode in model.modes]
        least = plan_division(model, hardware, hardware.vram, "layers", "exact", n_layers=1).used
    free, total = device.memory()
    return {"whole": max(needs), "least": least, "free": free, "total": total, "context": device.context_bytes,
            "n_layer": config.n_layer, "hardware": dataclasses.asdict(hardware)}  # fmt: skip


def measure(request: dict[str, Any], settings: Settings) -> dict[str, Any]:
    who, prompt, gen = request["who"], request["prompt"], request["gen"]
    sparsity = "predict" if "predict" in who else "auto"
    notes: list[str] = []
    expected: list[float] = []  # tokens per second
    device, gpu = None, None
    if who not in (CPU, CPU_PREDICT):
        device = open_for(settings)
        hardware = Hardware(**request["hardware"])
        mode = {"predict": "predict"}.get(who, "exact")

        def place(wanted: Wanted) -> tuple[GpuPlacement, str]:
            choice = choose_placement(wanted.file, wanted.config, wanted.budget, wanted.n_ctx, hardware, wanted.kind,
                                      sparsity=mode)  # fmt: skip
            expected.append(choice.placement.tokens_per_second)
            return choice.gpu, choice.sparsity

        gpu = GpuOptions(gpu="required", vram_budget=request["budget"], plan=who, place=place, device=device)
    began = time.perf_counter()
    with Engine.open(request["model"], sparsity=sparsity, threads=request["threads"] or default_threads(),
                     n_ctx=prompt + gen, notify=notes.append, gpu=gpu) as engine:  # fmt: skip
        load_s, bench = time.perf_counter() - began, Bench(engine)
        bench.run(Case(min(prompt, 32), 0, 0), 1, False)
        pp = bench.run(Case(prompt, 0, 0), SAMPLES, False)
        tg = bench.run(Case(0, gen, 0), SAMPLES, True)
        stats = engine.layer_stats()
        hybrid = stats.hybrid
        return {
            "pp": [1e9 * prompt / wall for wall, _ in pp], "tg": [1e9 * gen / wall for wall, _ in tg], "load_s": load_s,
            "expected": expected[-1] if expected else None,
            "computed": float(np.mean(stats.computed)), "notes": notes, "threads": engine.threads,
            "vram": None if device is None else peak_of(device),
            "planned": None if hybrid is None else hybrid.vram, "skips": None if hybrid is None else hybrid.skips,
            "cpu_share": None if hybrid is None else hybrid.cpu_share,
        }  # fmt: skip


def peak_of(device: Any) -> int:
    """Bytes of VRAM, where the driver cannot be asked how much a process takes."""
    return int(device.peak + device.context_bytes)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
