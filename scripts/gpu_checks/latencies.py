"""Part 4: what a launch, a graph, a flag and a copy cost, and how much of the memory's speed our kernels reach.

In: a device. Out: an item per figure: "value" and "unit", and what it is compared with. Next: report.py.

Arrays are larger than the card's cache: a matrix of the benchmark is cut into pieces that are read in turn. So are the
rows of all lists together, though one list reads a tenth of them. Weights are random: zeros take less power, and what
kernels make of them may be zeros whose rows the next launch need not read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
from device_runner import DeviceRunner

from gpu_checks.child import Item, Payload
from gpu_checks.devices import open_for, seconds_of
from gpu_checks.settings import Settings
from hotcold.runtime.bandwidth import ReadTest, last_level_cache
from hotcold.runtime.gpu import launch, launch_block
from hotcold.runtime.gpu.launch_block import Act, whole
from hotcold.runtime.threads import default_threads

KINDS = {"f16": 2.0, "q8_0": 1.0625, "q4_0": 0.5625}  # bytes per weight
i32, f32 = np.int32, np.float32
LISTS = 10  # of neurons, each of a tenth of them


class Bench:
    """The device, its kernels, sizes."""

    def __init__(self, settings: Settings) -> None:
        self.device = open_for(settings)
        self.stream = self.device.stream()
        tiny = settings.sim
        self.launches = 20 if tiny else 1000
        self.rounds = 20 if tiny else 2000
        self.array = 1 << 16 if tiny else 512 << 20  # bytes that are read from VRAM
        self.bus = 1 << 16 if tiny else 128 << 20  # bytes that are copied over the bus
        self.shape = (64, 64) if tiny else (11008, 4096)  # rows, columns of a matrix
        self.tokens = 8 if tiny else 256
        self.at_least = 0.0 if tiny else 0.1  # seconds of a series

    @cached_property
    def runner(self) -> DeviceRunner:
        return DeviceRunner(self.device)

    def kernel(self, name: str) -> Any:
        return self.runner.kernel(name)

    def seconds(self, work: Callable[[], None]) -> float:
        return seconds_of(self.device, self.stream, work, self.at_least)

    def graph_seconds(self, work: Callable[[], None]) -> float:
        """Of work() in a graph: without the cost of its launches."""
        work()  # compiles and loads what it needs
        self.device.sync(self.stream)
        graph = self.device.capture(self.stream, work)
        return self.seconds(lambda: self.device.replay(graph, self.stream))

    def nothing(self) -> Callable[[], None]:
        kernel = self.kernel("nothing")
        return lambda: kernel((1,), (32,), (i32(0),), stream=self.stream)


def items(settings: Settings) -> Iterator[Item]:
    bench = Bench(settings)
    yield Item("kernel launch", lambda: launched(bench))
    yield Item("graph", lambda: graph(bench))
    yield Item("graph, event, wait of the host", lambda: graph_event(bench))
    yield Item("flag: CPU to GPU to CPU", lambda: flags(bench))
    yield Item("copy of 4 KB to the host, wait", lambda: small_copy(bench))
    yield Item("copy to the GPU", lambda: over_bus(bench, True))
    yield Item("copy to the host", lambda: over_bus(bench, False))
    yield Item("kernel that reads pinned memory", lambda: mapped(bench))
    yield Item("plain read of VRAM", lambda: plain_read(bench))
    for kind in KINDS:
        yield Item(f"matvec {kind}", lambda kind=kind: matvec(bench, kind))  # type: ignore[misc]
        yield Item(f"listed up rows {kind}", lambda kind=kind: listed_values(bench, kind))  # type: ignore[misc]
        yield Item(f"listed down rows {kind}", lambda kind=kind: listed_down(bench, kind))  # type: ignore[misc]
    for kind in KINDS:
        yield Item(f"prompt product {kind}", lambda kind=kind: product(bench, kind))  # type: ignore[misc]
    if bench.device.has_gemm:
        yield Item("prompt product by cuBLAS", lambda: library_product(bench))
    yield Item("plain read of RAM", lambda: read_ram(settings))


def figure(value: float, unit: str, note: str = "", **more: Any) -> Payload:
    """note: what to say beside the figure."""
    return {"ok": None, "value": value, "unit": unit, "note": f"{value:.4g} {unit}{', ' * bool(note)}{note}",
            "more": note, **more}  # fmt: skip


# ------------------------------------------------------------------ latencies


def launched(bench: Bench) -> Payload:
    work, n = bench.nothing(), bench.launches
    work()
    bench.device.sync(bench.stream)
    began = time.perf_counter()
    for _ in range(n):
        work()
    queued = time.perf_counter()
    bench.device.sync(bench.stream)
    done = time.perf_counter()
    return figure((done - began) / n * 1e6, "µs", f"{(queued - began) / n * 1e6:.2f} µs of them on the host")


def graph(bench: Bench) -> Payload:
    work, n = bench.nothing(), bench.launches

    def many() -> None:
        for _ in range(n):
            work()

    made = bench.device.capture(bench.stream, many)
    whole_seconds = bench.seconds(lambda: bench.device.replay(made, bench.stream))
    began = time.perf_counter()
    bench.device.replay(made, bench.stream)
    call = time.perf_counter() - began
    bench.device.sync(bench.stream)
    return figure(whole_seconds / n * 1e6, "µs per kernel", f"{n} kernels; the call takes {call * 1e6:.1f} µs")


def graph_event(bench: Bench) -> Payload:
    device, work = bench.device, bench.nothing()
    made, event = device.capture(bench.stream, work), device.event()

    def once() -> None:
        device.replay(made, bench.stream)
        device.record(event, bench.stream)
        device.sync_event(event)

    return figure(bench.seconds(once) * 1e6, "µs", "graph of one kernel")


def flags(bench: Bench) -> Payload:
    """A kernel and a thread of the host answer each other through pinned memory."""
    device, n = bench.device, bench.rounds
    ping, device_ping = device.pinned((16,), np.int32)
    pong, device_pong = device.pinned((16,), np.int32)
    player = host_player()
    player(ping.ctypes.data, pong.ctypes.data, 0, 10**9)
    bench.kernel("echo")((1,), (1,), (device_ping, device_pong, i32(n), i32(1 << 28)), stream=bench.stream)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(player(ping.ctypes.data, pong.ctypes.data, n, 10**10)))
    thread.start()
    thread.join()
    device.sync(bench.stream)
    if not found or found[0] < 0:
        return {"ok": False, "note": "no answer within 10 s"}
    return figure(found[0] / max(1, n - 1) / 1e3, "µs", f"mean of {n}")


def host_player() -> Callable[[int, int, int, int], int]:
    """Sends 1 .. n, each after the answer to the one before. -> ns from the first answer on; -1: none in `limit` ns.

    Words have 64 bits here, and 32 on the other side: the upper half is 0.
    """
    from numba import njit

    from hotcold.runtime.kernels.sync import atomic_load, atomic_store, now_ns, pause

    @njit(nogil=True)
    def play(ping, pong, n, limit):
        began = now_ns()
        for i in range(1, n + 1):
            atomic_store(ping, i)
            looks = 0
            while atomic_load(pong) != i:
                pause()
                looks += 1
                if looks % 4096 == 0 and now_ns() - began > limit:
                    return -1
            if i == 1:
                began = now_ns()
        return now_ns() - began

    player: Callable[[int, int, int, int], int] = play
    return player


def small_copy(bench: Bench) -> Payload:
    device = bench.device
    host, _ = device.pinned((1024,), np.float32)
    source = device.empty((1024,), np.float32)

    def once() -> None:
        device.d2h(host, source, bench.stream)
        device.sync(bench.stream)

    return figure(bench.seconds(once) * 1e6, "µs")


# ------------------------------------------------------------------ bandwidths


def speed(n_bytes: float, seconds: float, note: str = "") -> Payload:
    return figure(n_bytes / seconds / 1e9, "GB/s", note)


def over_bus(bench: Bench, to_gpu: bool) -> Payload:
    device, n = bench.device, bench.bus // 4
    host, _ = device.pinned((n,), np.float32)
    array = device.empty((n,), np.float32)

    def copy() -> None:
        if to_gpu:
            device.h2d(array, host, bench.stream)
        else:
            device.d2h(host, array, bench.stream)

    return speed(4 * n, bench.seconds(copy))


def mapped(bench: Bench) -> Payload:
    _, x = bench.device.pinned((bench.bus // 4,), np.float32)
    return speed(bench.bus, bench.seconds(_read(bench, x, bench.bus // 4)))


def plain_read(bench: Bench) -> Payload:
    n = bench.array // 4
    return speed(4 * n, bench.seconds(_read(bench, _zeros(bench, n), n)))


def _zeros(bench: Bench, n: int) -> Any:
    return bench.device.upload(np.zeros(n, np.float32))


def _read(bench: Bench, x: Any, n: int) -> Callable[[], None]:
    kernel, blocks = bench.kernel("read_memory"), 8 * bench.device.multiprocessors
    sums = bench.device.empty((256 * blocks,), np.float32)
    return lambda: kernel((blocks,), (256,), (x, sums, i32(n // 4)), stream=bench.stream)


class Matrices:
    """Enough matrices of one format to exceed the card's cache, and vectors to go with them."""

    def __init__(self, bench: Bench, kind: str) -> None:
        rng, device = np.random.default_rng(1), bench.device
        self.kind, self.rows, self.cols = kind, *bench.shape
        self.n_bytes = int(self.rows * self.cols * KINDS[kind])
        self.n = max(2, min(64, bench.array // self.n_bytes))
        q = random_weights(rng, kind, self.rows, self.cols)
        scales = np.ones((self.rows, self.cols // 32), np.float16)
        self.q = [device.upload(q) for _ in range(self.n)]
        self.d = [None if kind == "f16" else device.upload(scales) for _ in range(self.n)]
        self.vector = self.vector_of(bench, rng.standard_normal(self.cols).astype(np.float32))
        # As lists of an FFN: up and down rows in turn.
        self.neurons = self.rows // 2
        self.active = max(1, self.neurons // LISTS)
        order, rest = rng.permutation(self.neurons).astype(np.int32), np.zeros(self.neurons - self.active, np.int32)
        lists = [np.sort(order[i * self.active : (i + 1) * self.active]) for i in range(LISTS)]
        self.ids = [device.upload(np.concatenate([ids, rest])) for ids in lists]
        self.count = device.upload(np.array([self.active], np.int32))
        self.ones = device.upload(np.ones(self.neurons, np.float32))
        self.vals = device.upload(np.ones(self.neurons, np.float32))

    def vector_of(self, bench: Bench, x: np.ndarray) -> tuple[Any, Any, Any]:
        """x, or act blocks of about its size, whichever the format meets."""
        if self.kind == "f16":
            return bench.device.upload(x), None, None
        scales = np.abs(x).reshape(-1, 32).max(axis=1) / np.float32(127)
        return None, bench.device.upload(np.ones(self.cols, np.int8)), bench.device.upload(scales)

    def down(self, k: int) -> tuple[Any, Any]:
        d = self.d[k]
        return self.q[k][1:], None if d is None else d[1:]

    def speed_of_lists(self, seconds: float) -> Payload:
        n_bytes = self.n * LISTS * self.active * self.cols * KINDS[self.kind]
        return speed(n_bytes, seconds, f"{LISTS} lists, each of {self.active} of {self.neurons} rows")


def random_weights(rng: np.random.Generator, kind: str, rows: int, cols: int) -> np.ndarray:
    if kind == "f16":
        return rng.standard_normal((rows, cols), np.float32).astype(np.float16)
    if kind == "q8_0":
        return rng.integers(-127, 128, (rows, cols), np.int8)
    return rng.integers(0, 256, (rows, cols // 2), np.uint8)


def matvec(bench: Bench, kind: str) -> Payload:
    m, kernel = Matrices(bench, kind), bench.kernel(f"matvec_{kind}")
    y, made = bench.device.empty((m.rows,), np.float32), launch.matvec(kind, m.rows, m.cols)

    def all_of_them() -> None:
        for q, d in zip(m.q, m.d, strict=True):
            args = (q, d, *m.vector, None, y, i32(m.rows), i32(m.cols), i32(1), f32(1), i32(0), i32(0))
            kernel(made.grid, made.block, args, shared_mem=made.shared, stream=bench.stream)

    return speed(m.n * m.n_bytes, bench.graph_seconds(all_of_them), f"{m.rows} x {m.cols}")


def listed_values(bench: Bench, kind: str) -> Payload:
    """Each value times its up row: rows of values that are 0 are not read, so every row must make 1 of 1."""
    m, kernel = Matrices(bench, kind), bench.kernel(f"neuron_values_{kind}")
    made = launch.neuron_values(kind, m.neurons, m.cols, bench.device.multiprocessors)
    zeros = m.vector_of(bench, np.zeros(m.cols, np.float32))

    def all_of_them() -> None:
        for ids in m.ids:
            for q, d in zip(m.q, m.d, strict=True):
                args = (None, None, q, d, *zeros, None, m.ones, ids, m.count, m.vals, i32(m.neurons), i32(m.cols),
                        i32(2), i32(0), i32(0), f32(0))  # fmt: skip
                kernel(made.grid, made.block, args, shared_mem=made.shared, stream=bench.stream)

    seconds = bench.graph_seconds(all_of_them)
    if np.any(bench.device.download(m.vals) != 1):
        return {"ok": False, "note": "values are not 1 any more: rows may not have been read"}
    return m.speed_of_lists(seconds)


def listed_down(bench: Bench, kind: str) -> Payload:
    m, kernel = Matrices(bench, kind), bench.kernel(f"axpy_down_{kind}")
    slices = launch.slices(kind, m.neurons, m.cols, bench.device.multiprocessors)
    part, made = bench.device.empty((slices, m.cols), np.float32), launch.axpy_down(kind, m.cols, slices)

    def all_of_them() -> None:
        for ids in m.ids:
            for k in range(m.n):
                args = (*m.down(k), ids, m.vals, m.count, part, i32(m.neurons), i32(m.cols), i32(2))
                kernel(made.grid, made.block, args, shared_mem=made.shared, stream=bench.stream)

    return m.speed_of_lists(bench.graph_seconds(all_of_them))


# ------------------------------------------------------------------ prompts


class OneMatrix:
    """As launch_block.Weights."""

    def __init__(self, m: Matrices) -> None:
        self.kind, self.cols, self.q, self.d = m.kind, m.cols, m.q[0], m.d[0]


def operations(m: tuple[int, int], tokens: int, seconds: float) -> Payload:
    return figure(2 * m[0] * m[1] * tokens / seconds / 1e12, "TFLOP/s", f"{tokens} tokens, {m[0]} x {m[1]}")


def product(bench: Bench, kind: str) -> Payload:
    m, n, device = Matrices(bench, kind), bench.tokens, bench.device
    x = device.upload(np.random.default_rng(2).standard_normal((n, m.cols), np.float32))
    act = Act(device.upload(np.ones((n, m.cols), np.int8)), device.upload(np.ones((n, m.cols // 32), np.float32)))
    y = device.empty((n, m.rows), np.float32)
    made = launch_block.matmul(OneMatrix(m), whole(x, m.cols), act, n, whole(y, m.rows))
    kernel = bench.kernel(made.kernel)
    seconds = bench.seconds(lambda: kernel(made.grid, made.block, made.args, stream=bench.stream))
    return operations(bench.shape, n, seconds)


def library_product(bench: Bench) -> Payload:
    (rows, cols), n, device = bench.shape, bench.tokens, bench.device
    rng = np.random.default_rng(1)
    a, b = (device.upload(random_weights(rng, "f16", k, cols)) for k in (n, rows))
    c = device.empty((n, rows), np.float32)
    return operations(bench.shape, n, bench.seconds(lambda: device.gemm(a, b, c, bench.stream)))


def read_ram(settings: Settings) -> Payload:
    threads = settings.threads or default_threads()
    return speed(ReadTest(last_level_cache()).measure(threads), 1.0, f"{threads} threads")
