"""Part 1: what is there. Card, driver, packages, processor; and that the kernels compile for this card.

In: Settings. Out: items with "facts". Next: report.py.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Iterator

from comparison.bursts import machine_facts
from comparison.facts import versions

from gpu_checks.child import Item, Payload
from gpu_checks.devices import open_for
from gpu_checks.nvml import Card
from gpu_checks.settings import Settings
from hotcold.runtime.gpu.device import DeviceUnavailable
from hotcold.runtime.gpu.source import module_names, module_source, signatures

PACKAGES = ("cupy", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cublas")  # beginnings of their names
CARD = "card"


def items(settings: Settings) -> Iterator[Item]:
    yield Item(CARD, lambda: card(settings))
    if not settings.sim:
        yield Item("driver", driver)
    yield Item("machine", lambda: {"ok": None, "facts": machine_facts()})
    yield Item("packages", packages)
    yield Item("kernels compile", lambda: compiled(settings))


def card(settings: Settings) -> Payload:
    try:
        device = open_for(settings)
    except DeviceUnavailable as error:
        return {"ok": False, "note": str(error), "none": True}
    free, total = device.memory()
    facts = {
        "card": device.name,
        "compute capability": "{}.{}".format(*device.compute_capability),
        "multiprocessors": str(device.multiprocessors),
        "VRAM": f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free, {device.context_bytes / 2**20:.0f} MiB the "
                "driver's for this process",
        "cuBLAS": "there" if device.has_gemm else "not installed",
    }  # fmt: skip
    device.close()
    return {"ok": True, "facts": facts, "note": facts["card"], "free": free, "total": total}


def driver() -> Payload:
    facts = Card().facts()
    return {"ok": None, "facts": facts, "note": ", ".join(f"{name} {text}" for name, text in facts.items())}


def packages() -> Payload:
    found = versions()
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if name.startswith(PACKAGES):
            found[name] = distribution.version
    return {"ok": None, "facts": {"versions": ", ".join(f"{name} {text}" for name, text in sorted(found.items()))}}


def compiled(settings: Settings) -> Payload:
    """Each file by itself, so that a mistake in one is told beside the others."""
    device, wrong, count, began = open_for(settings), [], 0, time.perf_counter()
    for name in module_names():
        source = module_source(name)
        try:
            get = device.module(source)
            for kernel in signatures(source):
                get(kernel)
                count += 1
        except Exception as error:  # a compiler's or a driver's
            print(error)
            wrong.append(f"{name}.cu: {' '.join(str(error).split())[:200]}")
    note = "; ".join(wrong) or f"{count} kernels in {time.perf_counter() - began:.1f} s"
    return {"ok": not wrong, "note": note, "facts": {"kernels": note}}
