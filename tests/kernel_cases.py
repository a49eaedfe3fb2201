"""Kernels of one token on a device against the NumPy truth, in all formats and at awkward sizes: all but the FFN's.

In: a DeviceRunner, random numbers. Out: CASES; each raises AssertionError where a kernel is wrong. Next:
kernel_cases_ffn.py adds the others.

Outputs begin as NaN or as numbers that do not occur, so that what was not written shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from device_runner import DeviceRunner

from hotcold.runtime.gpu import launch, reference
from hotcold.runtime.kernels import reference as truth
from hotcold.runtime.kernels.vector import ACTIVATION_CODES

Array = np.ndarray
Rng = np.random.Generator
Case = Callable[[DeviceRunner, Rng], None]

CASES: dict[str, Case] = {}
KINDS = ("f16", "q8_0", "q4_0")
SIZES = {"f16": (8, 72, 264, 1032, 2056), "q8_0": (32, 96, 544, 2080), "q4_0": (32, 96, 544, 4128)}  # columns
CTL_POS, CTL_SEQ = 0, 1
UNWRITTEN = -7
ROUNDING = 3e-6  # relative to the sum of absolute values
GPUS = 2  # multiprocessors that launches are made for: few, so that blocks take several rows


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


# ------------------------------------------------------------------ random arrays, comparisons


def floats(rng: Rng, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def empty(*shape: int) -> Array:
    return np.full(shape, np.nan, np.float32)


def no_ints(*shape: int) -> Array:
    return np.full(shape, UNWRITTEN, np.int32)


def matrix(rng: Rng, kind: str, rows: int, cols: int) -> tuple[Array, Array | None]:
    """q and d of a DeviceMatrix; weights are about as large as 1 / sqrt(cols)."""
    if kind == "f16":
        return (floats(rng, rows, cols) / cols**0.5).astype(np.float16), None
    d = (rng.uniform(0.5, 2, (rows, cols // 32)) / cols**0.5 / (64 if kind == "q8_0" else 4)).astype(np.float16)
    if kind == "q8_0":
        return rng.integers(-127, 128, (rows, cols)).astype(np.int8), d
    return rng.integers(0, 256, (rows, cols // 2)).astype(np.uint8), d


def vector(kind: str, x: Array) -> tuple[Array | None, Array | None, Array | None]:
    """x as the kernels for rows of this kind want it: F32, or act blocks; what they must not touch is null."""
    if kind == "f16":
        return x, None, None
    q, d = truth.quantize(x)
    return None, q.reshape(-1), d


def close(got: Array, want: Array, size: Array | float, what: str = "") -> None:
    """size: sum of the absolute values that were added."""
    error = np.abs(got.astype(np.float64) - want)
    bad = ~(error <= ROUNDING * np.asarray(size) + 1e-30)
    assert not bad.any(), f"{what}: {bad.sum()} of {bad.size} are wrong, one by {error[bad][0]}"


def same(got: Array, want: Any, what: str = "") -> None:
    np.testing.assert_array_equal(got, want, what)


def ctl(pos: int = 0, seq: int = 0) -> Array:
    words = np.zeros(16, np.int32)
    words[[CTL_POS, CTL_SEQ]] = pos, seq
    return words


# ------------------------------------------------------------------ vectors


@case
def begin(run: DeviceRunner, rng: Rng) -> None:
    for n in (8, 300, 1024):
        host, words, out, x = floats(rng, n), rng.integers(-9, 9, 16).astype(np.int32), no_ints(16), empty(n)
        run.run("begin", launch.begin(n), words, host, out, x, n)
        same(out, words)
        same(x, host)


def awkward(rng: Rng, n: int) -> Array:
    """Values whose act blocks are special: zeros, tiny, infinite, NaN, ties."""
    x = floats(rng, n)
    for i, special in enumerate((0.0, 1e-40, np.inf, np.nan)):
        if n >= 32 * (i + 2):
            x[32 * i : 32 * i + 32] *= np.float32(0 if special != special or special == np.inf else special)
            x[32 * i + 3] = special
    x[-32:] = np.arange(32) / 2 - 7.5
    x[-1] = 63.5
    return x


@case
def quantize(run: DeviceRunner, rng: Rng) -> None:
    for n in (32, 96, 576, 1056):
        x, q, d = awkward(rng, n), np.full(n, 99, np.int8), empty(n // 32)
        run.run("quantize", launch.quantize(n), x, q, d, n)
        with np.errstate(all="ignore"):
            want_q, want_d = truth.quantize(x)
        same(q, want_q.reshape(-1))
        same(d, want_d)


@case
def norm_token(run: DeviceRunner, rng: Rng) -> None:
    for n, layer, with_bias, blocks in ((8, 0, 0, 0), (100, 1, 1, 0), (576, 0, 0, 1), (2080, 1, 0, 1), (64, 1, 1, 1)):
        x, w, b = floats(rng, n) * 3 + 1, floats(rng, n), floats(rng, n) if with_bias else None
        h = empty(n)
        hq, hd = (np.full(n, 99, np.int8), empty(n // 32)) if blocks else (None, None)
        run.run("norm_token", launch.norm_token(n), x, w, b, h, hq, hd, n, 1e-5, layer)
        want = truth.layer_norm(x, w, b, 1e-5) if layer else truth.rms_norm(x, w, 1e-5)
        close(h, want, 10.0)
        if hq is not None and hd is not None:
            q, d = truth.quantize(h)
            same(hq, q.reshape(-1))
            same(hd, d)


@case
def activate(run: DeviceRunner, rng: Rng) -> None:
    for name, act in ACTIVATION_CODES.items():
        for n, gated, threshold in ((100, True, 0.0), (576, False, 0.25), (320, True, 0.25)):
            g, u = floats(rng, n) * 3, floats(rng, n) if gated else None
            g[:2] = np.nan, 0.25
            keys, blocks = g.copy(), n % 32 == 0
            q, d = (np.full(n, 99, np.int8), empty(n // 32)) if blocks else (None, None)
            out = g if gated else empty(n)
            run.run("activate", launch.activate(n), g, u, out, q, d, n, act, threshold)
            with np.errstate(invalid="ignore"):
                want = truth.neuron_values(name, keys, u, threshold)
            want[0] = np.nan  # a broken key must show, which plain comparisons do not
            same(np.isnan(out), np.isnan(want), name)
            near = np.abs(np.abs(want) - threshold) < 1e-5  # a threshold on magnitudes decides these by rounding
            close(out[1:], np.where(near | (out == 0), out, want)[1:], 10.0, name)
            assert ((out == 0) == (want == 0))[~near].all()
            if q is not None and d is not None:
                same(q, truth.quantize(out)[0].reshape(-1))
                same(d, truth.quantize(out)[1])


# ------------------------------------------------------------------ products


@case
def matvec(run: DeviceRunner, rng: Rng) -> None:
    for kind in KINDS:
        for cols in SIZES[kind]:
            for rows, stride, add, relu in ((1, 1, 0, 0), (9, 1, 1, 0), (30, 2, 0, 1)):
                q, d = matrix(rng, kind, rows * stride, cols)
                x, bias = floats(rng, cols), floats(rng, rows) if rows > 1 else None
                y = floats(rng, rows) if add else empty(rows)
                want = 0.5 * (reference.matvec(q, d, x, stride) + (0 if bias is None else bias)) + (y if add else 0)
                size = np.abs(reference.weights(q, d)[::stride]) @ np.abs(x) + 5
                run.run(f"matvec_{kind}", launch.matvec(kind, rows, cols), q, d, *vector(kind, x), bias, y, rows, cols,
                        stride, 0.5, add, relu)  # fmt: skip
                close(y, np.maximum(want, 0) if relu else want, size, f"{kind} {rows} x {cols}")


@case
def matvec_any_grid(run: DeviceRunner, rng: Rng) -> None:
    """Fewer blocks than rows, and NaN weights that must come out."""
    q, d = matrix(rng, "f16", 50, 72)
    q[7, 3] = np.nan
    x, y = floats(rng, 72), empty(50)
    block = launch.matvec("f16", 50, 72).block
    run.run("matvec_f16", launch.Launch((3,), block), q, d, x, None, None, None, y, 50, 72, 1, 1.0, 0, 0)
    assert np.isnan(y[7]) and np.isnan(y).sum() == 1


# ------------------------------------------------------------------ attention


HEADS = [  # heads, KV heads, head_dim, rotated dimensions, interleaved, norms of heads
    (4, 4, 64, 64, 1, 0), (6, 2, 80, 32, 0, 1), (8, 1, 128, 128, 0, 0), (5, 1, 24, 10, 1, 1), (2, 1, 256, 64, 0, 0),
    (3, 3, 96, 0, 0, 0),
]  # fmt: skip


@case
def rope_kv(run: DeviceRunner, rng: Rng) -> None:
    n_ctx = 40
    for n_head, n_kv, hd, n_rot, interleaved, norms in HEADS:
        pos = int(rng.integers(n_ctx))
        q, k, v = floats(rng, n_head, hd), floats(rng, n_kv, hd), floats(rng, n_kv, hd)
        q_norm, k_norm = (floats(rng, hd), floats(rng, hd)) if norms else (None, None)
        angles = rng.uniform(0, 9, (n_ctx, n_rot // 2))
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        caches = [np.full((n_kv, n_ctx, hd), np.nan, np.float16) for _ in "kv"]

        want_q, want_k = (
            truth.rotate(x if w is None else truth.rms_norm(x, w, 1e-5), cos[pos], sin[pos], bool(interleaved))
            for x, w in ((q, q_norm), (k, k_norm))
        )
        tables = (cos, sin) if n_rot else (None, None)
        run.run("rope_kv", launch.rope_kv(n_head, n_kv), q, k, v, q_norm, k_norm, *tables, *caches, ctl(pos), n_head,
                n_kv, hd, n_rot, interleaved, n_ctx, 1e-5)  # fmt: skip
        close(q, want_q, 10.0)
        for cache, want in zip(caches, (want_k, v), strict=True):
            assert (np.abs(cache[:, pos] - want) <= np.abs(want) * 2**-10 + 1e-6).all()
            assert np.isnan(np.delete(cache, pos, axis=1)).all()


@case
def attention(run: DeviceRunner, rng: Rng) -> None:
    n_ctx = 200
    for pos, window in ((0, 0), (31, 0), (150, 40), (199, 0), (63, 500)):
        for n_head, n_kv, hd, *_ in HEADS:
            _attend(run, rng, n_head, n_kv, hd, n_ctx, pos, window)


def _attend(run: DeviceRunner, rng: Rng, n_head: int, n_kv: int, hd: int, n_ctx: int, pos: int, window: int) -> None:
    splits = launch.attend_splits(n_head, n_kv, n_ctx, GPUS)
    q = floats(rng, n_head, hd) * 2
    caches = [np.full((n_kv, n_ctx, hd), np.nan, np.float16) for _ in "kv"]
    first = max(0, pos + 1 - window) if window else 0
    for cache in caches:
        cache[:, first : pos + 1] = floats(rng, n_kv, pos + 1 - first, hd)
    part, att = empty(n_head, splits, hd + 2), empty(n_head, hd)
    blocks = hd % 32 == 0
    aq, ad = (np.full(n_head * hd, 99, np.int8), empty(n_head * hd // 32)) if blocks else (None, None)
    run.run("attend_part", launch.attend_part(n_head, n_kv, splits), q, *caches, part, ctl(pos), n_head, n_kv, hd,
            n_ctx, window, hd**-0.5)  # fmt: skip
    run.run("attend_merge", launch.attend_merge(n_head, hd), part, att, aq, ad, ctl(pos), hd, window, splits)
    k, v = (c[:, : pos + 1].astype(np.float64) for c in caches)
    want = truth.attention(q[None], k, v, pos, window, hd**-0.5)[0]
    close(att, want, 3.0, f"{n_head} heads of {hd}, position {pos}")
    if aq is not None and ad is not None:
        want_q, want_d = truth.quantize(att.reshape(-1))
        same(aq, want_q.reshape(-1))
        same(ad, want_d)


# ------------------------------------------------------------------ what cards are measured with, and traces


@case
def read_memory(run: DeviceRunner, rng: Rng) -> None:
    for blocks, n4 in ((1, 3), (2, 512), (3, 5000)):
        threads = 256 * blocks
        x, sums = floats(rng, 4 * n4), empty(threads)
        run.run("read_memory", launch.Launch((blocks,), (256,)), x, sums, n4)
        parts = np.zeros((-(-n4 // threads) * threads, 4))
        parts[:n4] = x.reshape(n4, 4)
        close(sums, parts.reshape(-1, threads, 4).sum((0, 2)), 100.0)


@case
def echo(run: DeviceRunner, rng: Rng) -> None:
    """Answers flags one by one; leaves where none comes."""
    (ping, ping_d), (pong, pong_d) = (run.device.pinned((1,), np.int32) for _ in range(2))
    held = run.start("echo", launch.Launch((1,), (1,)), ping_d, pong_d, 3, 1 << 28)
    for number in (1, 2, 3):
        assert pong[0] == number - 1
        ping[0], end = number, time.monotonic() + 30
        while pong[0] != number and time.monotonic() < end:
            time.sleep(1e-4)
    run.finish(held)
    same(pong, 3)
    run.run("echo", launch.Launch((1,), (1,)), ping_d, pong_d, 3, 100)
    same(pong, 3)


@case
def stamp(run: DeviceRunner, rng: Rng) -> None:
    run.run("nothing", launch.Launch((1,), (32,)), 0)
    before, after = np.zeros(1, np.int64), np.zeros(1, np.int64)
    run.run("stamp", launch.Launch((1,), (1,)), before)
    time.sleep(0.02)
    run.run("stamp", launch.Launch((1,), (1,)), after)
    assert 0.01e9 < after[0] - before[0] < 60e9
