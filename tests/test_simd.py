"""Single intrinsics: products of bytes on every path, the CPU's counter, its treatment of denormal numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from llvmlite import ir
from numba import njit, types

from hotcold.runtime.kernels import isa, simd

FLUSHED = 0x8040  # bits of the state on x86

on_x86 = pytest.mark.skipif(not simd.X86, reason="other CPUs have other counters and states")


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


def test_a_name_of_a_function_of_its_own_is_taken_once() -> None:
    """Otherwise the second intrinsic would run the code of the first where both are called."""
    simd.emit(types.void, apart="taken_once")
    with pytest.raises(ValueError, match="taken_once.*choose"):
        simd.emit(types.void, apart="taken_once")


@on_x86
def test_the_counter_counts() -> None:
    short = min(spin(1000)[0] for _ in range(20))
    long = min(spin(100_000)[0] for _ in range(20))
    assert 0 < short < long


@on_x86
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


@on_x86
def test_denormals_are_a_matter_of_each_thread() -> None:
    states: list[int] = []
    thread = threading.Thread(target=lambda: states.extend([flush(), flush()]))
    thread.start()
    thread.join()
    assert states[0] & FLUSHED == 0 and states[1] & FLUSHED == FLUSHED
    before = flush()
    restore(before)
    assert before & FLUSHED == 0


# ------------------------------------------------------------------ products of bytes, on every path this CPU can run

HOST = isa.choose("x86_64-any", isa.FEATURES)
PATHS = {
    "avx512-vnni": isa.choose("x86_64-any", {"avx512f", "avx512bw", "avx512vl", "avx512vnni"}),
    "avx512": isa.choose("x86_64-any", {"avx512f", "avx512bw", "avx512vl"}),
    "avx-vnni": isa.choose("x86_64-any", {"avxvnni"}),
    "avx2": isa.choose("x86_64-any", set()),
    "generic": isa.choose("aarch64-any", set()),
}
RUNS = [
    name
    for name, path in PATHS.items()
    if not path.x86 or simd.X86 and path.vnni <= HOST.vnni and path.madd <= HOST.madd
]
EDGES = (-128, -127, -64, -1, 0, 1, 63, 126, 127)


def products(kind: str, lanes: int, most: int = 255) -> Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """acc i32[n, lanes], x and y i8[n, 4 * lanes] -> i32[n, lanes], with the instructions chosen at this moment."""
    wide, narrow = ir.VectorType(simd.I32, lanes), ir.VectorType(simd.I8, 4 * lanes)

    @simd.emit(types.void, simd.addr, simd.addr, simd.addr)
    def step(b, acc, x, y):
        sums, v, w = simd.load(b, acc, wide), simd.load(b, x, narrow), simd.load(b, y, narrow)
        simd.store(b, acc, simd.dot_q8_value(b, sums, v, w) if kind == "q8" else simd.dpbusd_value(b, sums, v, w, most))

    @njit
    def run(n, acc, x, y):
        for i in range(n):
            step(acc + 4 * lanes * i, x + 4 * lanes * i, y + 4 * lanes * i)

    def call(acc: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        out = acc.copy()
        run(len(acc), out.ctypes.data, x.ctypes.data, y.ctypes.data)
        return out

    return call


def fours(products_of: np.ndarray) -> np.ndarray:
    out: np.ndarray = products_of.reshape(len(products_of), -1, 4).sum(axis=2, dtype=np.int32)
    return out


def pairs_of(xs: Sequence[int], ys: Sequence[int], lanes: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows in which every x meets every y, beside the same pair (where sums are largest) and beside any other."""
    x, y = (v.ravel() for v in np.meshgrid(np.asarray(xs), np.asarray(ys)))
    alike = np.repeat(x[:, None], 4 * lanes, 1), np.repeat(y[:, None], 4 * lanes, 1)
    rng = np.random.default_rng(lanes)
    order = rng.integers(0, len(x), (200, 4 * lanes))
    return np.concatenate([alike[0], x[order]]), np.concatenate([alike[1], y[order]])


@pytest.mark.parametrize("most", [255, 128, 15])
@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("name", RUNS)
def test_unsigned_times_signed_bytes(name: str, lanes: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No intermediate sum may saturate or wrap, whatever the bytes."""
    monkeypatch.setattr(simd, "CHOSEN", PATHS[name])
    x, y = pairs_of([v for v in (0, 1, 2, 15, 63, 127, 128, 129, 254, 255) if v <= most], EDGES, lanes)
    acc = np.random.default_rng(most).integers(-(2**30), 2**30, (len(x), lanes)).astype(np.int32)
    got = products("u8", lanes, most)(acc, x.astype(np.uint8), y.astype(np.int8))
    assert np.array_equal(got, acc + fours(x * y))


@pytest.mark.parametrize("name", RUNS)
def test_weights_of_q8_0_times_activations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight, -128 too, with every value an activation can have."""
    monkeypatch.setattr(simd, "CHOSEN", PATHS[name])
    x, y = pairs_of(range(-128, 128), [q for q in EDGES if q > -128], 8)
    got = products("q8", 8)(-8 * fours(y), x.astype(np.int8), y.astype(np.int8))
    assert np.array_equal(got, fours(x * y))


@pytest.mark.parametrize(
    ("triple", "features", "name", "missing"),
    [
        ("x86_64-unknown-linux-gnu", {"avx2", "fma", "f16c"}, "avx2", ()),
        ("x86_64-apple-darwin", {"avx2", "fma"}, "avx2", ("f16c",)),
        ("x86_64-pc-windows-msvc", {"avx2", "fma", "f16c", "avxvnni"}, "avx-vnni", ()),
        ("x86_64-unknown-linux-gnu", {"avx2", "fma", "f16c", "avx512f"}, "avx2", ()),  # no words in 512 bits
        ("x86_64-unknown-linux-gnu", {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl"}, "avx512", ()),
        ("aarch64-unknown-linux-gnu", {"neon", "dotprod"}, "generic", ()),
        ("arm64-apple-darwin", {"neon"}, "generic", ()),
        ("riscv64-unknown-linux-gnu", set(), "generic", ()),
    ],
)
def test_the_path_follows_the_features(triple: str, features: set[str], name: str, missing: tuple[str, ...]) -> None:
    chosen = isa.choose(triple, features)
    assert (chosen.name, chosen.missing, chosen.x86) == (name, missing, triple.startswith("x86"))
    assert chosen.wide == name.startswith("avx512")
