"""Stock llama.cpp in part 5: as many layers on the GPU as the same budget of VRAM allows.

In: llama-bench of a CUDA build, a model. Out: speeds, bytes of VRAM. Next: speed.py.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comparison.bursts import run_burst
from comparison.speed import parse_bench

from gpu_checks.vram import Meter
from hotcold.runtime.errors import HotcoldError


class TooLong(HotcoldError):
    """It was ended before it said anything: neither that it fits nor that it does not."""


def largest_fitting(budget: int, most: int, need: Callable[[int], float]) -> int:
    """The largest n up to `most` with need(n) <= budget; 0 if even that takes more. need grows, nearly in a line."""
    low, high = 0, most
    if need(high) <= budget:
        return high
    if need(low) > budget:
        return 0
    while high - low > 1:
        n = (low + high) // 2
        if math.isfinite(need(high)):
            n = low + int((budget - need(low)) / (need(high) - need(low)) * (high - low))
        n = min(max(n, low + 1), high - 1)
        low, high = (n, high) if need(n) <= budget else (low, n)
    return low


def bench(program: str, model: str, layers: int, threads: int, prompt: int, gen: int, samples: int, meter: Meter | None,
          timeout: float) -> dict[str, Any]:  # fmt: skip
    """Speeds of one run. layers 0: without a GPU. Raises HotcoldError with what it says when it fails, TooLong.

    Flash attention is asked for: builds differ in whether they use it by themselves. All know `-fa 1`.
    """
    options = ["-p", str(prompt), "-n", str(gen), "-r", str(samples), "-ngl", str(layers), "-fa", "1",
               "-t", str(threads), "-o", "jsonl"]  # fmt: skip
    command = [program, "-m", model, *options]
    env = {} if layers else {"CUDA_VISIBLE_DEVICES": ""}
    if meter is None:
        burst, peak = run_burst(command, env, timeout=timeout), None
    else:
        before = meter.read()
        with meter.watch() as seen:
            burst = run_burst(command, env, timeout=timeout)
        peak = seen.value - before
    if burst.status == -signal.SIGKILL:
        raise TooLong(f"llama-bench was ended after {burst.wall_s:.0f} of {timeout:.0f} s: {burst.command}")
    lines = parse_bench(burst.output)
    if burst.status or len(lines) < (prompt > 0) + (gen > 0):
        told = (burst.errors.splitlines() or ["it says nothing"])[-1]
        raise HotcoldError(f"llama-bench ended with status {burst.status}: {told}: {burst.command}")
    found = {test[:2]: line["samples_ts"] for test, line in lines.items()}
    line = next(iter(lines.values()))
    shown = " ".join([*(f"{k}={v}" for k, v in env.items()), "llama-bench", "-m", Path(model).name, *options])
    build = f"{line.get('build_commit', '?')} ({line.get('build_number', '?')}), {line.get('backends', '?')}"
    return {"pp": found.get("pp", []), "tg": found.get("tg", []), "vram": peak, "others": burst.others, "build": build,
            "command": shown}  # fmt: skip
