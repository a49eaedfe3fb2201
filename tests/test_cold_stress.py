"""The GPU and the workers at their edges: late, ahead, silent, interrupted, failing. A thread plays the GPU.

In: toy layers. The truth is float64, layer by layer.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import test_team
from cold_workers import Gpu, Workers, wait_for_answer
from one_op import FFN, close
from test_cold import toy
from test_team import failing, leaves, raises

from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.kernels import reference, walk
from hotcold.runtime.kernels.cache import compile_cached
from hotcold.runtime.mailbox import Mailbox
from hotcold.runtime.team import compiled_functions

N_EMBD, N_FF, HOT = 24, 70, 20
SOMETIMES, NEVER = -3.0, -100.0  # added to keys: the layer's cold neurons fire in some tokens, in none


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., int]], None]:
    """Puts another function in the place of the compiled one that each worker runs."""
    compile_cached(compiled_functions(), lambda line: None)

    def put(stand_in: Callable[..., int]) -> None:
        monkeypatch.setattr(walk, "serve", stand_in)
        monkeypatch.setattr("hotcold.runtime.team.compile_cached", lambda functions, notify: None)

    return put


def lagging(which: int | None, seconds: Callable[[], float]) -> Callable[..., int]:
    """walk.serve, but a worker (None: each) comes late to it."""
    real = walk.serve

    def stand_in(*arguments: Any) -> int:
        if which is None or arguments[2] == which:
            time.sleep(seconds())
        return int(real(*arguments))

    return stand_in


def stack() -> list[FFN]:
    """Layers whose cold neurons fire, sometimes fire, never fire."""
    cold = np.arange(N_FF) >= HOT
    shifts = (0.0, np.where(cold, NEVER, 0.0), np.where(cold, SOMETIMES, 0.0), 0.0, np.where(cold, NEVER, 0.0))
    return [toy(N_FF, N_EMBD, shift, seed=i) for i, shift in enumerate(shifts)]


MODES = ("keys", "keys", "scores", "all", "scores")


class Layers:
    """Plays a token on the GPU: decides, computes the hot neurons, adds what the workers answer, checks it."""

    def __init__(self, ffns: list[FFN], modes: tuple[str, ...], mailbox: Mailbox, seed: int, jitter: float) -> None:
        self.mailbox, self.modes, self.ffns = mailbox, modes, ffns
        self.rng, self.jitter = np.random.default_rng(seed), jitter
        self.matrices = [(f.key.view(np.float32).astype(float), f.value.view(np.float32).astype(float)) for f in ffns]
        self.empty = np.zeros(len(ffns), np.int64)

    def play(self, seq: int) -> None:
        x = self.rng.standard_normal(N_EMBD)
        for layer, (ffn, mode) in enumerate(zip(self.ffns, self.modes, strict=True)):
            if self.rng.random() < self.jitter:
                time.sleep(self.rng.random() / 500)
            h = (x / np.sqrt((x * x).mean())).astype(np.float32)
            key, value = self.matrices[layer]
            keys = key @ h + ffn.key_bias
            values = reference.neuron_values("relu", keys, value[::2] @ h + ffn.up_bias)
            fired = np.flatnonzero(keys > 0)
            cold = fired[fired >= HOT].astype(np.int32)
            self.mailbox.host.h[layer, :N_EMBD] = h
            if mode == "all":
                self.mailbox.post_count(layer, seq + layer, N_FF - HOT)
                count = N_FF - HOT
            else:
                self.mailbox.post(layer, seq + layer, cold, keys[cold].astype(np.float32) if mode == "keys" else None)
                count = len(cold)
            self.empty[layer] += count == 0
            y = values[:HOT] @ value[1::2][:HOT]
            if count:
                if not wait_for_answer(self.mailbox, layer, seq + layer):
                    return
                answer = self.mailbox.host.out[layer, :N_EMBD]
                want = values[HOT:] @ value[1::2][HOT:]
                assert close(answer, want, 1 + np.abs(want).max(), 2e-5)
                y = y + answer
            x = x + y


@pytest.mark.parametrize(("n_threads", "jitter", "lag"), [(1, 0.02, 0), (2, 0.02, 0.01), (3, 0, 0.02), (8, 0.02, 0)])
def test_thousands_of_layers(
    n_threads: int, jitter: float, lag: float, serve: Callable[[Callable[..., int]], None]
) -> None:
    rng = np.random.default_rng(n_threads)
    serve(lagging(None, lambda: float(rng.random() < lag) / 200))
    ffns, tokens = stack(), 500
    with Workers(ffns, MODES, [HOT] * len(ffns), n_threads) as workers:
        layers = Layers(ffns, MODES, workers.mailbox, n_threads, jitter)
        gpu = Gpu(layers.play)
        for _ in range(tokens):
            seq = workers.mailbox.next_base()
            gpu.start(seq)
            workers.run(seq)
            gpu.wait()
        gpu.close()
        skipped, worked = workers.mailbox.visits()
        assert (skipped == layers.empty).all() and (skipped + worked == tokens).all()
        assert skipped[1] == skipped[4] == tokens and skipped[0] == skipped[3] == 0 < skipped[2] < tokens


@pytest.mark.parametrize("which", [None, 0, 2])
def test_late_workers_find_what_was_overwritten(which: int | None, serve: Callable[[Callable[..., int]], None]) -> None:
    """The GPU has gone through several tokens, with nothing for the CPU in most layers, before the workers look."""
    lags = iter([0.3, 0.3, 0.3])
    serve(lagging(which, lambda: next(lags, 0.0)))
    n, tokens = 6, 300
    ffns = [toy(N_FF, N_EMBD, seed=i, gated=False) for i in range(n)]
    rng = np.random.default_rng(1)
    lists = [[np.flatnonzero(rng.random(N_FF) < 0.5) if rng.random() < 0.05 else np.zeros(0, int) for _ in range(n)]
             for _ in range(tokens)]  # fmt: skip
    with Workers(ffns, ["keys"] * n, [0] * n, 3) as workers:
        box = workers.mailbox
        bases = [box.next_base() for _ in range(tokens)]

        def play(seq: int) -> None:
            for layer, ids in enumerate(lists[bases.index(seq)]):
                vals = np.linspace(1, 2, len(ids), dtype=np.float32)
                box.post(layer, seq + layer, ids.astype(np.int32), vals)
                if len(ids):
                    assert wait_for_answer(box, layer, seq + layer)
                    want = vals @ ffns[layer].value.view(np.float32)[ids].astype(float)
                    assert close(box.host.out[layer, :N_EMBD], want, 1 + np.abs(want).max(), 2e-5)

        gpu = Gpu(play)
        for seq in bases:
            gpu.start(seq)
        for seq in bases:
            workers.run(seq)
        for _ in bases:
            gpu.wait()
        gpu.close()
        worked = np.array([[len(ids) > 0 for ids in token] for token in lists]).sum(axis=0)
        assert np.array_equal(box.visits()[1], worked) and (box.visits()[0] == tokens - worked).all()
        assert np.array_equal(workers.counts[:, :, 1].sum(axis=1), sum(np.array([len(i) for i in t]) for t in lists))


@pytest.mark.parametrize("n_threads", [1, 2, 8])
def test_a_gpu_that_says_nothing(n_threads: int) -> None:
    """The error names the layer that was waited for; the next run is a good one."""
    n = 5
    with Workers([toy()] * n, ["keys"] * n, [0] * n, n_threads) as workers:
        box = workers.mailbox
        for silent in (0, 3, 4):
            seq = box.next_base()
            for layer in range(silent):
                ids = np.arange(20 * (layer % 2), dtype=np.int32)
                box.post(layer, seq + layer, ids, np.ones(len(ids), np.float32))
            with pytest.raises(HotcoldError, match=rf"layer {silent}: waited 0\.05 s for the GPU's list") as caught:
                workers.run(seq, patience=0.05)
            assert "\n" not in str(caught.value)
            answered = [layer for layer in range(n) if box.answered(layer, seq + layer)]
            assert answered == [layer for layer in range(silent) if layer % 2]
            seq = box.next_base()
            for layer in range(n):
                box.post(layer, seq + layer, np.array([4], np.int32), np.ones(1, np.float32))
            workers.run(seq)
            assert all(box.answered(layer, seq + layer) for layer in range(n))


@pytest.mark.parametrize("n_threads", [1, 3])
def test_close_ends_the_wait(n_threads: int) -> None:
    workers = Workers([toy()] * 2, ["keys"] * 2, [0] * 2, n_threads)
    timer = threading.Timer(0.2, workers.team.close)
    timer.start()
    with pytest.raises(HotcoldError, match="closed"):
        workers.run(workers.mailbox.next_base(), patience=600)
    timer.join(60)
    assert not timer.is_alive()


def interrupted(workers: Workers, seq: int, after: float) -> bool:
    """A run with Ctrl-C in it, or close to it. Whether it has not ended."""
    ended = False
    timer = threading.Timer(after, _thread.interrupt_main)
    try:
        timer.start()
        workers.run(seq, patience=600)
        ended = True
        timer.join()
        time.sleep(60)
    except KeyboardInterrupt:
        return not ended
    raise AssertionError("no signal")


def test_ctrl_c_while_the_gpu_is_silent() -> None:
    with Workers([toy()] * 2, ["keys"] * 2, [0] * 2, 3) as workers:
        for _ in range(3):
            assert interrupted(workers, workers.mailbox.next_base(), 0.05)
        out = workers.one(np.ones(24, np.float32), np.array([7], np.int32), np.ones(1, np.float32), more=1)
        assert np.isfinite(out).all()


def test_ctrl_c_anywhere() -> None:
    """Both sides stop, and the next token is right."""
    ffns, rng, cut = stack(), np.random.default_rng(3), 0
    with Workers(ffns, MODES, [HOT] * len(ffns), 3) as workers:
        box = workers.mailbox
        layers = Layers(ffns, MODES, box, 3, jitter=0.3)
        gpu = Gpu(layers.play)
        for _ in range(40):
            seq = box.next_base()
            gpu.start(seq)
            if interrupted(workers, seq, rng.random() / 200):
                cut += 1
                box.stop_waiting()
            gpu.wait()
            box.reset()
            for _ in range(3):
                seq = box.next_base()
                gpu.start(seq)
                workers.run(seq)
                gpu.wait()
        gpu.close()
    assert cut


@pytest.mark.parametrize("how", [raises, leaves])
@pytest.mark.parametrize(("which", "n_threads"), [(0, 1), (0, 3), (2, 3)])
@pytest.mark.parametrize("silent", [False, True])
def test_a_worker_that_fails(
    silent: bool, which: int, n_threads: int, how: Callable[[], int], serve: Callable[[Callable[..., int]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Those that wait for it, or for a list that never comes, are let go."""
    if silent:
        monkeypatch.setattr(test_team, "RUNS", 0)  # then it fails in the first one
    serve(failing(which, how))
    with Workers([toy()] * 2, ["keys"] * 2, [0] * 2, n_threads) as workers:
        box = workers.mailbox
        with pytest.raises(HotcoldError, match=f"open it again: worker {which} "):
            for _ in range(200):
                seq = box.next_base()
                for layer in range(0 if silent else 2):
                    box.post(layer, seq + layer, np.arange(70, dtype=np.int32), np.ones(70, np.float32))
                workers.run(seq, patience=600)
        with pytest.raises(HotcoldError, match="open it again"):
            workers.run(box.next_base())
