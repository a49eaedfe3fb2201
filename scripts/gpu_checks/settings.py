"""What one run of gpu_check.py does, and in which parts.

In: the command line. Out: frozen Settings, which child processes get as JSON; PARTS. Next: child.py, boxed.py.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).resolve().parent.parent.parent


class Part(NamedTuple):
    """share: of the time; what a part leaves over goes to those after it."""

    name: str
    title: str
    share: float
    correctness: bool  # a failure in it makes the whole run fail
    patience: float  # seconds after which one item has hung
    module: str  # has items()


PARTS = (
    Part("environment", "Environment", 0.10, False, 120, "gpu_checks.environment"),
    Part("kernels", "Kernels against NumPy in float64", 0.12, True, 60, "gpu_checks.kernels"),
    Part("plans", "Plans against the CPU's engine", 0.18, True, 90, "gpu_checks.plans"),
    Part("latencies", "Latencies and bandwidths", 0.12, False, 60, "gpu_checks.latencies"),
    Part("speed", "Tokens per second", 0.48, False, 240, "gpu_checks.speed"),
)


@dataclass(frozen=True)
class Settings:
    device: str  # gpu, or sim: the emulated device, tiny sizes, figures that mean nothing
    out: Path  # folder of the results
    models: Path  # folder for models made here
    minutes: float = 10.0
    parts: tuple[str, ...] = tuple(part.name for part in PARTS)
    only: str = ""  # regular expression: run nothing but items in whose names it is found
    shape: str = "auto"  # of make_synthetic.py
    kind: str = "q4_0"
    model: str = ""  # a file in place of a synthetic model; "": none
    stock: str = ""  # the same for llama.cpp
    made: bool = True  # both were made here: 10 % of the neurons are active
    llama_bench: str = ""  # program; "": not given
    budgets: tuple[int, ...] = ()  # bytes of VRAM; (): shares of what the whole model takes
    threads: int = 0  # 0: what the machine gives
    prompt: int = 256
    gen: int = 48
    rounds: int = 5

    @property
    def sim(self) -> bool:
        return self.device == "sim"

    def to_json(self) -> str:
        fields = dataclasses.asdict(self)
        return json.dumps({**fields, "out": str(self.out), "models": str(self.models)})

    @staticmethod
    def from_json(text: str) -> Settings:
        found = json.loads(text)
        for name in ("parts", "budgets"):
            found[name] = tuple(found[name])
        return Settings(**{**found, "out": Path(found["out"]), "models": Path(found["models"])})
