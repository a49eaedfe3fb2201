"""Single intrinsics: the CPU's counter and its treatment of denormal numbers."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from numba import njit

from hotcold.runtime.kernels import simd

FLUSHED = 0x8040  # bits of the state on x86

pytestmark = pytest.mark.skipif(not simd.X86, reason="other CPUs have other counters and states")


@njit(nogil=True)
def spin(n):
    start, total = simd.read_cycles(), 0.0
    for i in range(n):
        total += 1.0 / (i + 1)
    return simd.read_cycles() - start, total


@njit(nogil=True)
def flush():
    return simd.flush_denormals()


@njit(nogil=True)
def restore(state):
    simd.restore_denormals(state)


@njit(nogil=True)
def product(x, y):
    return x * y


def test_the_counter_counts() -> None:
    short = min(spin(1000)[0] for _ in range(20))
    long = min(spin(100_000)[0] for _ in range(20))
    assert 0 < short < long


@pytest.mark.parametrize(("x", "y"), [(1.2e-38, 0.5), (1e-40, 1e30)])  # a denormal result, a denormal operand
def test_denormals_are_flushed_and_come_back(x: float, y: float) -> None:
    a, b = np.float32(x), np.float32(y)
    assert product(a, b) > 0
    before = flush()
    try:
        flushed = product(a, b)
    finally:
        restore(before)
    assert flushed == 0
    assert product(a, b) > 0


def test_denormals_are_a_matter_of_each_thread() -> None:
    states: list[int] = []
    thread = threading.Thread(target=lambda: states.extend([flush(), flush()]))
    thread.start()
    thread.join()
    assert states[0] & FLUSHED == 0 and states[1] & FLUSHED == FLUSHED
    before = flush()
    restore(before)
    assert before & FLUSHED == 0
