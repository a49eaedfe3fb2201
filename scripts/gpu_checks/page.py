"""The section of BENCHMARKS.md on GPUs: a card per subsection, from the results that are kept in the repository.

In: results of gpu_check.py. Out: the kept ones, Markdown. Next: ../benchmarking/page.py puts it at the end of the page.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarking.runs import rounded

from gpu_checks.report import (
    Result,
    card_name,
    kernel_lines,
    latencies_view,
    part_of,
    plan_lines,
    speed_view,
    speeds,
)
from hotcold.runtime.errors import HotcoldError

NO_GPU = "*No GPU has been available yet: nothing here was measured.*"
FILE = "gpu-check.json"  # in a folder of benchmarking/results/ that has the card's name
HEAD = """\
## On a GPU (`gpu-check`)

Hot neurons on the GPU, cold ones on the CPU: `python scripts/gpu_check.py --keep`, with `--llama-bin` for a CUDA build
of llama.cpp. Plans: (a) everything on the GPU, (b) keys there and exact, (c) predictors there, (d) whole layers, as
llama.cpp divides a model. A budget counts all that a process takes of the card, the driver's part too.
"""
SHOWN = ("VRAM", "compute capability", "driver", "CUDA of the driver", "PCIe now", "CPU", "cores", "memory", "versions")
KEPT = {  # fields of a part's items
    "environment": ("name", "ok", "note", "facts"),
    "kernels": ("name", "ok", "note", "cases"),
    "plans": ("name", "ok", "note", "error", "over", "right"),
    "latencies": ("name", "ok", "note", "value", "unit", "more"),
    "speed": ("name", "ok", "note", "round", "budget", "who", "pp", "tg", "skips", "cpu_share", "computed", "vram",
              "planned", "layers", "over", "build", "expected", "model", "made", "threads", "whole", "hardware",
              "command"),
}  # fmt: skip


def folder_name(card: str) -> str:
    """NVIDIA GeForce RTX 4090 -> nvidia-geforce-rtx-4090"""
    return "-".join(re.findall(r"[a-z0-9]+", card.lower()))


def keep(result: Result, results: Path) -> Path:
    """Write what the page shows of a result. Raises HotcoldError for a dry run, OSError."""
    if result["settings"]["device"] != "gpu":
        raise HotcoldError("--keep: a dry run has no figures to keep")
    parts = [part | {"items": [{k: v for k, v in item.items() if k in KEPT[part["name"]]} for item in part["items"]]}
             for part in result["parts"]]  # fmt: skip
    path = results / folder_name(card_name(result)) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(FILE + ".part")
    temporary.write_text(json.dumps(rounded(result | {"parts": parts}), indent=1) + "\n")
    os.replace(temporary, path)
    return path


def load(results: Path) -> dict[str, Result]:
    """What was kept, by the name of its folder. Raises HotcoldError for a file that is no such result."""
    found: dict[str, Result] = {}
    for path in sorted(results.glob(f"*/{FILE}")):
        try:
            result = json.loads(path.read_text())
            card_name(result)
        except (ValueError, LookupError, TypeError) as error:
            raise HotcoldError(f"{path}: not a result of gpu_check.py: {error}") from None
        found[path.parent.name] = result
    return found


def section(results: Mapping[str, Result], remarks: Callable[[str], str]) -> str:
    """results: by the name of their folder. remarks: what was written by hand below a machine's figures."""
    parts = [HEAD]
    for name, result in results.items():
        parts += [subsection(name, result), "", f"<!-- remarks gpu-check {name} -->\n{remarks(name)}<!-- end -->", ""]
    return "\n".join(parts if results else [HEAD, NO_GPU, ""])


def subsection(name: str, result: Result) -> str:
    items: list[dict[str, Any]] = part_of(result, "environment")["items"]
    facts = {key: text for item in items for key, text in item.get("facts", {}).items()}
    lines = [f"### {card_name(result)} (`{name}`)", "", f"{result['date']}."]
    lines += ["", *(f"- {key}: {facts[key]}" for key in SHOWN if key in facts)]
    lines += ["- " + line.strip() for line in (*kernel_lines(result), *plan_lines(result))]
    if part_of(result, "latencies")["items"]:
        lines += ["", latencies_view(result, part_of(result, "latencies")["items"])]
    if speeds(result):
        lines += ["", speed_view(result, part_of(result, "speed")["items"])]
    return "\n".join(lines)
