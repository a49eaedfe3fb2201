"""Which instructions the kernels are written for: chosen once, for the CPU that Numba compiles for.

In: Numba's target. Out: CHOSEN. Next: simd.py.

Numba's own settings (NUMBA_CPU_NAME and NUMBA_CPU_FEATURES, or numba.config before anything is compiled) choose another
CPU; code and instructions then fit each other. CHOSEN may be replaced before simd.py is imported: tests do that.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from numba.core.registry import cpu_target

NEEDED = ("avx2", "f16c", "fma")  # of an x86 CPU


@dataclass(frozen=True)
class Isa:
    """name: as users see it. The rest: what kernels ask."""

    name: str
    x86: bool = False
    aarch64: bool = False
    wide: bool = False  # 32 registers of 512 bits
    vnni: frozenset[int] = frozenset()  # lanes of i32 for which the u8 x s8 product is one instruction
    madd: frozenset[int] = frozenset()  # lanes for which it can be made of x86's pair products
    missing: tuple[str, ...] = ()  # what this CPU lacks to run the kernels at all


def choose(triple: str, features: Set[str]) -> Isa:
    """triple: LLVM's name of a machine. features: LLVM's names of what its CPU has."""
    machine = triple.split("-")[0]
    if machine not in ("x86_64", "i686"):
        return Isa("generic", aarch64=machine in ("aarch64", "arm64"))
    missing = tuple(name for name in NEEDED if name not in features)
    if {"avx512f", "avx512bw", "avx512vl"} <= features:
        both = frozenset({8, 16})
        if "avx512vnni" in features:
            return Isa("avx512-vnni", x86=True, wide=True, vnni=both, madd=both, missing=missing)
        return Isa("avx512", x86=True, wide=True, madd=both, missing=missing)
    if "avxvnni" in features:
        return Isa("avx-vnni", x86=True, vnni=frozenset({8}), madd=frozenset({8}), missing=missing)
    return Isa("avx2", x86=True, madd=frozenset({8}), missing=missing)


def target() -> tuple[str, str, frozenset[str]]:
    """(triple, CPU, features) that Numba compiles for."""
    triple, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    return triple, cpu, frozenset(name[1:] for name in features.split(",") if name.startswith("+"))


FEATURES = target()[2]
CHOSEN = choose(target()[0], FEATURES)
