"""The kernels of a sparse FFN on a device against the NumPy truth: lists and mailbox, neurons, sums, predictors.

In: a DeviceRunner, random numbers. Out: CASES, those of kernel_cases.py included. Next: test_gpu_kernels.py runs them
in the emulator in several thread orders, scripts/gpu_check.py on a card.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
from device_runner import DeviceRunner
from kernel_cases import (
    CASES,
    GPUS,
    KINDS,
    SIZES,
    UNWRITTEN,
    Array,
    Rng,
    case,
    close,
    ctl,
    empty,
    floats,
    matrix,
    same,
    vector,
)

from hotcold.runtime.gpu import launch, reference
from hotcold.runtime.kernels import reference as truth
from hotcold.runtime.kernels.vector import ACTIVATION_CODES

__all__ = ["CASES"]
RELU, DRELU, RELU2, SILU = (ACTIVATION_CODES[name] for name in ("relu", "drelu", "relu2", "silu"))


def no_ints(*shape: int) -> Array:
    return np.full(shape, UNWRITTEN, np.int32)


# ------------------------------------------------------------------ lists


def compact(run: DeviceRunner, rng: Rng, keys: Array, hot: int, act: int, threshold: float, *,
            bias: Array | None = None, ids_only: bool = False, seq: int = 5, cpu: bool = True) -> None:  # fmt: skip
    layer = 2
    n, n_embd = len(keys), 100
    h, mail = floats(rng, n_embd), empty(n_embd)
    lists = [no_ints(hot + 1), no_ints(n - hot + 1)]
    vals: list[Array | None] = [None, None] if ids_only else [empty(hot + 1), empty(n - hot + 1)]
    counts, header, totals = [no_ints(1), no_ints(1)], np.full(1, -1, np.int64), np.array([10, 20], np.int64)
    side = (lists[1], vals[1], mail, header, counts[1]) if cpu else (None,) * 5
    run.run("compact_split", launch.compact_split(), keys, bias, h if cpu else None, lists[0], vals[0], counts[0],
            *side, totals, ctl(seq=seq), n, hot, n_embd, layer, act, threshold)  # fmt: skip
    seen = keys if bias is None else keys + bias
    want = reference.split(act, seen, threshold, hot)
    for i in range(2 if cpu else 1):
        count = len(want[i])
        same(counts[i], count)
        same(lists[i][:count], want[i])
        same(lists[i][count:], UNWRITTEN)
        values = vals[i]
        if values is not None:
            broken = np.isnan(seen[want[i]])
            same(np.isnan(values), np.concatenate([broken, np.ones(len(values) - count, bool)]))
            close(values[:count][~broken], reference.activate(act, seen[want[i]][~broken], threshold), 10.0)
    on_cpu = len(want[1])
    same(totals, [10 + len(want[0]), 20 + on_cpu])
    if cpu:
        same(header, reference.header(seq + layer, on_cpu))
        same(mail, h) if on_cpu else same(mail, np.nan)


@case
def compact_split(run: DeviceRunner, rng: Rng) -> None:
    for n in (1, 40, 1000, 4096, 9001):
        keys = floats(rng, n)
        keys[rng.random(n) < 0.02] = np.nan
        for hot in {0, 1, n // 3, n}:
            compact(run, rng, keys, hot, RELU, 0.8)
    keys = floats(rng, 777)
    for threshold in (-100.0, 100.0):  # all, none
        for hot in (0, 300, 777):
            compact(run, rng, keys, hot, RELU, threshold)
            compact(run, rng, keys, hot, DRELU, threshold, ids_only=True, bias=floats(rng, 777))
    compact(run, rng, keys, 777, RELU2, 0.0, cpu=False)
    compact(run, rng, keys, 100, SILU, 0.1)
    compact(run, rng, keys, 100, reference.FINAL, 0.5, seq=1 << 29)


@case
def post(run: DeviceRunner, rng: Rng) -> None:
    for n in (8, 1500):
        h, mail, header, count = floats(rng, n), empty(n), np.full(1, -1, np.int64), no_ints(1)
        run.run("post", launch.post(), h, mail, header, count, ctl(seq=70), n, 3, 55)
        same(mail, h)
        same(header, reference.header(73, 55))
        same(count, 55)


@case
def header_comes_last(run: DeviceRunner, rng: Rng) -> None:
    """The header lies on the last words of the input that is sent, so whichever is written last stays."""
    n_embd = 2500
    for kernel in ("post", "compact_split"):
        mail = run.device.upload(empty(n_embd))
        header, h, counts, ids = mail[n_embd - 2 :].view(np.int64), floats(rng, n_embd), no_ints(1), no_ints(9)
        if kernel == "post":
            run.run("post", launch.post(), h, mail, header, counts, ctl(seq=70), n_embd, 3, 9)
        else:
            run.run("compact_split", launch.compact_split(), floats(rng, 9), None, h, ids, None, counts, no_ints(9),
                    None, mail, header, counts, None, ctl(seq=70), 9, 0, n_embd, 3, RELU, -100.0)  # fmt: skip
        got = run.device.download(mail)
        same(got[-2:].view(np.int64), reference.header(73, 9), kernel)
        same(got[:-2], h[:-2], kernel)


# ------------------------------------------------------------------ neurons


def _list(rng: Rng, n: int, count: int) -> tuple[Array, Array]:
    ids = no_ints(n)
    ids[:count] = np.sort(rng.permutation(n)[:count])
    return ids, np.array([count], np.int32)


@case
def neuron_values_keys(run: DeviceRunner, rng: Rng) -> None:
    """Activated values are there; up rows lie in bundles."""
    for kind in KINDS:
        for cols in SIZES[kind]:
            n = 70
            for count in (0, 1, 37, n):
                q, d = matrix(rng, kind, 2 * n, cols)
                x, bias, (ids, length) = floats(rng, cols), floats(rng, n), _list(rng, n, count)
                vals = np.maximum(floats(rng, n), 0)
                vals[0] = np.nan
                before, act = vals.copy(), DRELU if count > 1 else RELU
                run.run(f"neuron_values_{kind}", launch.neuron_values(kind, n, cols, GPUS), None, None, q, d,
                        *vector(kind, x), None, bias, ids, length, vals, n, cols, 2, 0, act, 0.0)  # fmt: skip
                up = reference.matvec(q, d, x, 2) + bias
                if act == DRELU:
                    up = np.maximum(up, 0)
                size = np.abs(reference.weights(q, d)[::2]) @ np.abs(x) + 5
                same(vals[count:], before[count:])
                assert not count or np.isnan(vals[0])
                used = ids[1:count]
                close(vals[1:count], before[1:count] * up[used], before[1:count] * size[used] + 1e-3)


@case
def neuron_values_scores(run: DeviceRunner, rng: Rng) -> None:
    """Key rows of the listed neurons, then up rows of those that fire. Not gated: keys only."""
    for kind in KINDS:
        cols, n, threshold = SIZES[kind][2], 45, 0.1
        for count, gated, act in ((0, 1, RELU), (1, 1, RELU), (30, 0, RELU2), (45, 1, DRELU), (20, 1, SILU)):
            (kq, kd), (uq, ud) = matrix(rng, kind, n, cols), matrix(rng, kind, 2 * n, cols)
            x, key_bias, (ids, length), vals = floats(rng, cols), floats(rng, n), _list(rng, n, count), empty(n)
            up_rows = (uq, ud) if gated else (None, None)
            run.run(f"neuron_values_{kind}", launch.neuron_values(kind, n, cols, GPUS), kq, kd, *up_rows,
                    *vector(kind, x), key_bias, None, ids, length, vals, n, cols, 2, 0, act, threshold)  # fmt: skip
            used = ids[:count]
            keys = (reference.matvec(kq, kd, x) + key_bias)[used]
            up = reference.matvec(uq, ud, x, 2)[used] if gated else None
            name = next(name for name, code in ACTIVATION_CODES.items() if code == act)
            want = truth.neuron_values(name, keys, up, threshold)
            clear = np.abs(keys - threshold) > 1e-4
            if act == SILU:
                clear = np.abs(np.abs(truth.neuron_values(name, keys, up)) - threshold) > 1e-4
            close(vals[:count][clear], want[clear], 100.0)
            assert np.isnan(vals[count:]).all()


@case
def neuron_values_dense(run: DeviceRunner, rng: Rng) -> None:
    """All neurons, no list: keys are there but not activated, or come from key rows."""
    for kind in KINDS:
        n, cols = 33, SIZES[kind][1]
        for name, act in ACTIVATION_CODES.items():
            (kq, kd), (uq, ud), x = matrix(rng, kind, n, cols), matrix(rng, kind, n, cols), floats(rng, cols)
            keys = reference.matvec(kq, kd, x).astype(np.float32)
            want = truth.neuron_values(name, keys, reference.matvec(uq, ud, x))
            for key_rows in (False, True):
                vals, rows = (empty(n), (kq, kd)) if key_rows else (keys.copy(), (None, None))
                run.run(f"neuron_values_{kind}", launch.neuron_values(kind, n, cols, GPUS), *rows, uq, ud,
                        *vector(kind, x), None, None, None, None, vals, n, cols, 1, 1, act, 0.0)  # fmt: skip
                close(vals, want, 50.0, f"{kind} {name}")


@case
def axpy_and_merge(run: DeviceRunner, rng: Rng) -> None:
    for kind in KINDS:
        for n_embd in SIZES[kind]:
            n = 400 if n_embd < 600 else 90
            for count in (0, 1, n // 3, n):
                _axpy_merge(run, rng, kind, n, n_embd, count, listed=True)
        _axpy_merge(run, rng, kind, 150, 96, 150, listed=False)
    _axpy_merge(run, rng, "f16", 1300, 1032, 1290, listed=True)  # slices longer than a block looks at at once


def _axpy_merge(run: DeviceRunner, rng: Rng, kind: str, n: int, n_embd: int, count: int, listed: bool) -> None:
    q, d = matrix(rng, kind, 2 * n, n_embd)
    ids, length = _list(rng, n, count)
    vals = floats(rng, n)
    vals[rng.random(n) < 0.4] = 0  # predicted, but off: their rows are not read
    off = np.setdiff1d(np.arange(n), ids[:count][vals[:count] != 0]) if listed else np.flatnonzero(vals == 0)
    (q if d is None else d)[2 * off + 1] = np.nan
    slices = launch.slices(kind, n, n_embd, GPUS)
    part, x, bias = empty(slices, n_embd), floats(rng, n_embd), floats(rng, n_embd)
    rows = q[1:], None if d is None else d[1:]
    lists = (ids, length) if listed else (None, None)
    run.run(f"axpy_down_{kind}", launch.axpy_down(kind, n_embd, slices), *rows, lists[0], vals, lists[1], part, n,
            n_embd, 2)  # fmt: skip
    used = ids[:count] if listed else np.arange(n)
    on = vals[: len(used)] != 0
    sums = reference.down_sum(*rows, used[on], vals[: len(used)][on], 2)
    want = x + 0.5 * (sums + bias)
    run.run("merge", launch.merge(n_embd), part, lists[1], bias, None, None, None, None, None, ctl(), x, n, n_embd,
            slices, 0, 0.5, 10)  # fmt: skip
    size = np.abs(vals[: len(used)][on]) @ np.abs(reference.weights(*rows)[used[on] * 2]) + 5
    close(x, want, size, f"{kind} {count} of {n}, {n_embd} columns")


def _mailbox(run: DeviceRunner, n: int) -> list[tuple[Array, Any]]:
    """cpu_out, done, status, stop: (host, device)."""
    return [run.device.pinned((n,), np.float32), run.device.pinned((1,), np.int64), run.device.pinned((1,), np.int32),
            run.device.pinned((1,), np.int32)]  # fmt: skip


def _merge(run: DeviceRunner, x: Array, cpu_count: int, box: list[tuple[Array, Any]], spin_limit: int) -> dict:
    n, count = len(x), np.array([cpu_count], np.int32)
    return run.start("merge", launch.merge(n), None, None, None, count, *(device for _, device in box), ctl(seq=40), x,
                     0, n, 0, 2, 2.0, spin_limit)  # fmt: skip


@case
def merge_waits(run: DeviceRunner, rng: Rng) -> None:
    """The answer comes late; it is old; it never comes; the host says stop; nothing was asked."""
    n = 150
    out, done, status, stop = box = _mailbox(run, n)
    answer = floats(rng, n)
    for late in (0.0, 0.05):
        x = floats(rng, n)
        want = x + 2 * answer.astype(np.float64)
        out[0][:], done[0][:] = np.nan, 41

        def reply(after: float = late) -> None:
            time.sleep(after)
            out[0][:] = answer
            done[0][:] = 42

        thread = threading.Thread(target=reply)
        thread.start()
        held = _merge(run, x, 3, box, 1 << 30)
        thread.join()
        run.finish(held)
        close(x, want, 10.0)
        assert status[0][0] == 0

    x = floats(rng, n)
    before = x.copy()
    run.finish(_merge(run, x, 0, box, 1))
    same(x, before)
    assert status[0][0] == 0
    done[0][:] = 41
    run.finish(_merge(run, x, 1, box, 200))
    same(x, before)
    assert status[0][0] == 3
    status[0][:] = 9  # an earlier failure keeps its layer, and nobody waits long after it
    run.finish(_merge(run, x, 1, box, 1 << 30))
    assert status[0][0] == 9
    status[0][:], stop[0][:] = 0, 1
    run.finish(_merge(run, x, 1, box, 1 << 30))
    same(x, before)
    assert status[0][0] == 3


# ------------------------------------------------------------------ predictors


@case
def sign_scores(run: DeviceRunner, rng: Rng) -> None:
    for n, cols in ((1, 8), (100, 100), (77, 576), (40, 2056)):
        x, planes, scores = floats(rng, cols), truth.sign_planes(floats(rng, n, cols)), empty(n)
        x[:3] = 0.0, -0.0, np.nan
        run.run("sign_scores", launch.sign_scores(n, cols, GPUS), planes, x, scores, n, cols)
        same(scores, truth.sign_scores(planes, x))
