"""Part 2: every kernel against NumPy in float64, by the cases that the tests have.

In: tests/kernel_cases_ffn.py (one token), tests/test_gpu_block_kernels.py (prompts), a device. Out: an item per case:
which kernels ran how often, their worst error. Next: report.py makes one table of it.

An error is relative to the sum of the absolute values that were added. What must be the same bits has none.
"""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import kernel_cases
import kernel_cases_ffn
import numpy as np
import test_gpu_block_kernels as block
from device_runner import DeviceRunner

from gpu_checks.child import Item, Payload, told
from gpu_checks.devices import open_for
from gpu_checks.settings import Settings
from hotcold.runtime.gpu.device import Device, DeviceError

FIXTURES = ("gpu", "any_order", "rng")  # of test_gpu_block_kernels.py, that are given here


class Watch:
    """Which kernels a case runs, and the largest of the errors that its checks see."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self._since: list[str] = []  # run since the last check
        self._checked = False

    def begin(self) -> None:
        self.rows, self._since = {}, []

    def launched(self, kernel: str) -> None:
        if self._checked:
            self._since, self._checked = [], False
        self._since.append(kernel)
        row = {"launches": 0, "worst": None, "of_allowed": None, "wrong": False}
        self.rows.setdefault(kernel, row)["launches"] += 1

    def blame(self) -> None:
        """What ran since the last check but one is wrong."""
        for kernel in self._since:
            self.rows[kernel]["wrong"] = True

    def error(self, got: Any, want: Any, size: Any, allowed: float) -> None:
        with np.errstate(all="ignore"):
            found = np.abs(np.asarray(got, np.float64) - want) / (np.abs(np.asarray(size, np.float64)) + 1e-30)
        worst = min(1e30, float(np.nan_to_num(found, nan=np.inf, posinf=np.inf).max(initial=0.0)))
        self._checked = True
        for row in (self.rows[kernel] for kernel in self._since):
            row["worst"] = max(row["worst"] or 0.0, worst)
            row["of_allowed"] = max(row["of_allowed"] or 0.0, worst / allowed)

    def watch(self, module: types.ModuleType) -> None:
        """See the arguments of a module's close(got, want, size, …); a number that follows is the error allowed."""
        close = module.close

        def watched(got: Any, want: Any, size: Any, *rest: Any) -> None:
            given = [value for value in rest if isinstance(value, float)]
            self.error(got, want, size, *given or [close.__globals__["ROUNDING"]])
            close(got, want, size, *rest)

        module.close = watched  # type: ignore[attr-defined]


class Watched(DeviceRunner):
    """Of cases of one token."""

    def __init__(self, device: Device, watch: Watch) -> None:
        super().__init__(device)
        self.watch = watch

    def start(self, name: str, *arguments: Any) -> Any:
        self.watch.launched(name)
        return super().start(name, *arguments)


class WatchedGpu(block.Gpu):
    """Of cases of prompts."""

    def __init__(self, device: Device, watch: Watch) -> None:
        super().__init__(device)
        self.watch = watch

    def run(self, launch: Any) -> None:
        self.watch.launched(launch.kernel)
        super().run(launch)


class Bench:
    """Both kinds of runner on one device, each made when it is needed."""

    def __init__(self, settings: Settings) -> None:
        self.device, self.watch = open_for(settings), Watch()
        self._runner: Watched | None = None
        self._gpu: WatchedGpu | None = None
        for module in (kernel_cases, kernel_cases_ffn, block):
            self.watch.watch(module)

    @property
    def runner(self) -> Watched:
        self._runner = self._runner or Watched(self.device, self.watch)
        return self._runner

    @property
    def gpu(self) -> WatchedGpu:
        if self._gpu is None:
            self._gpu = WatchedGpu(self.device, self.watch)
            block._gpus = {n: self._gpu for n in range(4)}  # the cases compare with other orders of threads
        return self._gpu


def items(settings: Settings) -> Iterator[Item]:
    bench = Bench(settings)
    for name, case in kernel_cases_ffn.CASES.items():
        yield Item(f"token: {name}", lambda name=name, case=case: token_case(bench, name, case))  # type: ignore[misc]
    for name, function in vars(block).items():
        wanted = set(inspect.signature(function).parameters) if name.startswith("test_") else set()
        if wanted & {"gpu", "any_order"} and wanted <= {*FIXTURES, *parametrized(function)}:
            yield Item(f"prompt: {name[5:]}", lambda name=name, f=function: block_case(bench, name, f))  # type: ignore[misc]


def token_case(bench: Bench, name: str, case: Callable[..., None]) -> Payload:
    runner = bench.runner
    bench.watch.begin()
    return attempt(bench, [lambda: case(runner, np.random.default_rng(list(name.encode())))])


def block_case(bench: Bench, name: str, function: Callable[..., None]) -> Payload:
    """A function with all its parameters."""
    gpu, wanted = bench.gpu, inspect.signature(function).parameters
    calls: list[Callable[[], None]] = []
    for number, values in enumerate(combinations(function)):
        given = {"gpu": gpu, "any_order": gpu, "rng": np.random.default_rng(list(f"{name}{number}".encode()))}
        arguments = {key: value for key, value in given.items() if key in wanted} | values
        calls.append(lambda arguments=arguments: function(**arguments))  # type: ignore[misc]
    bench.watch.begin()
    return attempt(bench, calls)


def attempt(bench: Bench, calls: list[Callable[[], None]]) -> Payload:
    """Run all; what a broken device leaves undone counts as failed."""
    notes, done, broken = [], 0, False
    for call in calls:
        try:
            call()
            done += 1
        except Exception as error:  # an assertion, a compiler, the device
            notes.append(told(error))
            bench.watch.blame()
            if broken := isinstance(error, DeviceError):
                break
    failed = f"{len(calls) - done} of {len(calls)} failed: " if len(calls) > 1 else ""
    note = failed + notes[0] if notes else ""
    return {"ok": not notes, "note": note, "rows": bench.watch.rows, "cases": len(calls), "broken": broken}


# ------------------------------------------------------------------ what pytest would do with a function's marks


def parametrized(function: Callable[..., None]) -> list[str]:
    """Names of the parameters that marks give values to."""
    return [name for names, _ in _marks(function) for name in names]


def combinations(function: Callable[..., None]) -> Iterator[dict[str, Any]]:
    parts = [[dict(zip(names, row, strict=True)) for row in rows] for names, rows in _marks(function)]
    for chosen in itertools.product(*parts):
        yield {name: value for part in chosen for name, value in part.items()}


def _marks(function: Callable[..., None]) -> list[tuple[list[str], list[tuple[Any, ...]]]]:
    found = []
    for mark in getattr(function, "pytestmark", ()):
        if mark.name == "parametrize":
            names, rows = mark.args[:2]
            if isinstance(names, str):
                names, rows = [names], [(row,) for row in rows]
            found.append((list(names), list(rows)))
    return found
