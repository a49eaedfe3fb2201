"""The kernels as a CPU with AVX2, but without AVX-512 and VNNI, gets them, tested on a CPU that has those.

In: nothing. A process in which the newer instructions are hidden runs tests of other modules: there other tiles and
another 8-bit dot product are compiled, which no other test reaches on a newer machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hotcold.runtime.kernels import simd

TESTS = Path(__file__).resolve().parent

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
]

# sitecustomize.py of the process and of those it starts.
OLDER_CPU = """
import llvmlite.binding as llvm

features = llvm.get_host_cpu_features()
for name in features:
    if name.startswith(("avx512", "avx10", "avxvnni", "amx", "evex512")):
        features[name] = False
llvm.get_host_cpu_features = lambda: features
llvm.get_host_cpu_name = lambda: "haswell"
"""

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


@pytest.mark.skipif(not simd.X86 or bool(simd.MISSING), reason="needs an x86 CPU with AVX2, F16C and FMA")
@pytest.mark.skipif(simd.ISA == "avx2", reason="this CPU has no VNNI: all tests run the kernels for AVX2 already")
def test_the_kernels_for_avx2_are_right(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OLDER_CPU)
    env = os.environ | {
        "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+f16c,+fma", "XDG_CACHE_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    arguments = ["-x", "-p", "no:cacheprovider", *(str(TESTS / name) for name in SELECTED)]
    done = subprocess.run([sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, env=env)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 100, done.stdout
