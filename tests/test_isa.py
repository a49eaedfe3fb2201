"""The kernels as other CPUs get them, tested on one that can do the same and more.

In: nothing. Processes of their own compile for another CPU, named by Numba's settings: for AVX2, whose tiles and byte
products differ most, tests of other modules run there; for the others isa_kernels.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hotcold.runtime.kernels import isa, simd

TESTS = Path(__file__).resolve().parent

on_x86 = pytest.mark.skipif(not simd.X86 or bool(simd.MISSING), reason="needs an x86 CPU with AVX2, F16C and FMA")

# What computes: logits of blocks and of single tokens in every format, exact against dense, single operators, and
# models of some families against the independent reference.
SELECTED = [
    *(f"test_golden.py::test_f32_logits[{case}]" for case in ("llama-ff1003", "qwen2-window", "opt-mixed")),
    *(
        f"test_golden.py::test_quantized_formats[{kind}-{case}]"
        for kind in ("q8_0", "q4_0")
        for case in ("relu", "opt")
    ),
    "test_engine.py::test_logits_of_every_format",
    "test_ffn.py::test_exact_equals_dense",
    "test_kernels.py",
    "test_attention.py",
]

RUN = """
import sys
import pytest
status = pytest.main(sys.argv[1:])

from hotcold.runtime.kernels import simd, tiles, walk
if simd.ISA != "avx2" or tiles.TILE_TOKENS != 4:
    sys.exit("the newer instructions were not hidden")
code = "".join(walk.serve.inspect_asm().values())
if "ymm" not in code or "zmm" in code or "vpdpbusd" in code:
    sys.exit("the code was not compiled for AVX2")
sys.exit(int(status))
"""

NEEDED = {*isa.NEEDED, "avx"}
WORDS = NEEDED | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}
PATHS = {  # name, as LLVM knows it, of a CPU that gets it; what else it needs
    "avx512-vnni": ("cascadelake", WORDS | {"avx512vnni"}),
    "avx512": ("skylake-avx512", WORDS),
    "avx-vnni": ("alderlake", NEEDED | {"avxvnni"}),
    "generic": ("haswell", NEEDED),
}


def start(path: str, cache: Path, *command: str) -> subprocess.Popen[str]:
    """A Python process that compiles for another CPU; the cache of its own is for the time of the test."""
    cpu, features = PATHS.get(path, ("haswell", NEEDED))
    env = os.environ | {
        "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in sorted(features)),
        "XDG_CACHE_HOME": str(cache), "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    return subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env=env)  # fmt: skip


@on_x86
@pytest.mark.skipif(simd.ISA == "avx2", reason="all tests run the kernels for AVX2 already on this CPU")
def test_the_kernels_for_avx2_are_right(tmp_path: Path) -> None:
    arguments = ["-x", "-p", "no:cacheprovider", *(str(TESTS / name) for name in SELECTED)]
    child = start("avx2", tmp_path, "-c", RUN, *arguments)
    printed, _ = child.communicate()
    assert child.returncode == 0, printed[-6000:]
    passed = re.search(r"(\d+) passed", printed)
    assert passed and int(passed[1]) > 100, printed


@pytest.fixture(scope="module")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[int, str]]]:
    """Runs isa_kernels.py for a path; the next one is started beside it, as most of the time goes into compiling."""
    children: dict[str, subprocess.Popen[str]] = {}

    def run(path: str) -> tuple[int, str]:
        able = [name for name in PATHS if PATHS[name][1] <= isa.FEATURES]
        for name in able[able.index(path) :][:2]:
            if name not in children:
                cache = tmp_path_factory.mktemp(name)
                children[name] = start(name, cache, str(TESTS / "isa_kernels.py"), name)
        printed, _ = children[path].communicate()
        return children[path].returncode, printed

    yield run
    for child in children.values():
        if child.poll() is None:  # of a test that was not chosen
            child.kill()
            child.communicate()


@on_x86
@pytest.mark.parametrize("path", PATHS)
def test_the_kernels_of_every_path_are_right(path: str, run_path: Callable[[str], tuple[int, str]]) -> None:
    missing = PATHS[path][1] - isa.FEATURES
    if missing:
        pytest.skip(f"this CPU cannot run the code for {path}: it has no {', '.join(sorted(missing))}")
    status, printed = run_path(path)
    assert status == 0 and printed.endswith("all right\n"), printed[-6000:]
