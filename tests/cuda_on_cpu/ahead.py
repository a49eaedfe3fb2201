"""Builds the libraries of all kernel files, plain and with the sanitizer, before a test asks for them.

In: runtime/gpu/cuda/*.cu. Out: libraries in the cache of build.py. scripts/test runs it beside Numba's compiler, which
uses one core. Tests build what is missing, so a failure here is told by the test that it concerns.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cuda_on_cpu.build import asan_env, built, compiler
from hotcold.runtime.gpu.source import module_names, module_source, signatures


def main() -> None:
    if not compiler()[0]:
        return
    for asan in (False, True) if asan_env() else (False,):
        for name in module_names():
            source = module_source(name)
            built(source, tuple(signatures(source)), asan)


if __name__ == "__main__":
    main()
