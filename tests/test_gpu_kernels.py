"""The kernels of one token, compiled for the CPU: right in every thread order, and never outside their arrays."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cuda_on_cpu.build import asan_env, compiler
from cuda_on_cpu.sim_device import SimDevice
from device_runner import DeviceRunner
from kernel_cases_ffn import CASES

pytestmark = pytest.mark.skipif(not compiler()[0], reason="no C++ compiler")
SCHEDULES = (0, 1, 3, 9)  # see cuda_shim.h
SUMS = ("norm_token", "matvec_any_grid", "attention", "compact_split", "neuron_values_scores", "axpy_and_merge")


@pytest.fixture(scope="module", params=SCHEDULES)
def runner(request: pytest.FixtureRequest) -> Iterator[DeviceRunner]:
    device = SimDevice(schedule=request.param)
    yield DeviceRunner(device)
    device.close()


@pytest.mark.parametrize("name", CASES)
def test_kernel(name: str, runner: DeviceRunner) -> None:
    CASES[name](runner, np.random.default_rng(list(name.encode())))


def test_same_bits_in_every_thread_order() -> None:
    """Sums are added in an order that does not depend on who runs first."""
    results = []
    for schedule in SCHEDULES:
        runner, kept = DeviceRunner(SimDevice(schedule=schedule)), []
        plain = runner.finish

        def finish(held: dict, kept: list = kept, plain: object = plain) -> None:
            plain(held)  # type: ignore[operator]
            kept.extend(host.tobytes() for host, _ in held.values())

        runner.finish = finish  # type: ignore[method-assign]
        for name in SUMS:
            CASES[name](runner, np.random.default_rng(3))
        results.append(kept)
    assert all(kept == results[0] for kept in results)


def test_no_access_outside_arrays() -> None:
    """Every kernel once under AddressSanitizer, in a process of its own."""
    environment = asan_env()
    if not environment:
        pytest.skip("no AddressSanitizer")
    program = (
        "import numpy as np\n"
        "from cuda_on_cpu.sim_device import SimDevice\n"
        "from device_runner import DeviceRunner\n"
        "from kernel_cases_ffn import CASES\n"
        "runner = DeviceRunner(SimDevice(asan=True))\n"
        "for name, case in CASES.items():\n"
        "    case(runner, np.random.default_rng(1))\n"
        "    print(name, flush=True)\n"
    )
    paths = [str(Path(__file__).parent), *sys.path]
    environment["PYTHONPATH"] = ":".join(path for path in paths if path)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"after {done.stdout.split()[-1:]}: {done.stderr[-3000:]}"
    assert done.stdout.split() == list(CASES)
