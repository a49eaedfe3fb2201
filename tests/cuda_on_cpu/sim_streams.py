"""Streams, events and captured graphs of the simulated device.

In: functions. Out: their order. Next: sim_device.py.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from hotcold.runtime.gpu.device import DeviceError

LIMIT = 120.0  # seconds until waiting counts as hanging
LAG, LAG_RATE = 1e-2, 0.03  # long pauses of second streams, with jitter: seconds, and share of operators
Op = Callable[[], None]


class State(Protocol):
    """What streams need to know of their device."""

    jitter: float
    error: BaseException | None


class SimEvent:
    def __init__(self) -> None:
        self.wanted = self.done = 0  # records queued, and passed
        self.changed = threading.Condition()
        self.captured: tuple[Capture, object] | None = None

    def passed(self, turn: int) -> None:
        with self.changed:
            self.done = max(self.done, turn)
            self.changed.notify_all()


class SimStream:
    """In-order queue on a thread. After an error of the device only what others wait for is still done."""

    def __init__(self, device: State, seed: int, second: bool = False) -> None:
        self.device, self.capture = device, None  # type: State, Capture | None
        self._second = second
        self._queue: queue.SimpleQueue[tuple[Op, bool] | None] = queue.SimpleQueue()
        self._random = random.Random(seed)
        self._thread = threading.Thread(target=self._run, name="sim stream", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            op, always = item
            if self.device.jitter:
                self._pause()
            if self.device.error is None or always:
                try:
                    op()
                except BaseException as e:
                    self.device.error = self.device.error or e

    def _pause(self) -> None:
        """Often a little; on a second stream sometimes so long that the first gets a layer ahead, if it may."""
        dice = self._random.random()
        if self._second and dice < LAG_RATE:
            time.sleep(LAG)
        elif dice < 0.5:
            time.sleep(self._random.random() * self.device.jitter)

    def put(self, op: Op, always: bool = False) -> None:
        self._queue.put((op, always))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(LIMIT)


@dataclass
class Captured:
    """One operator of a captured branch: work, or a meeting point that is recorded or waited for."""

    work: Op | None = None
    record: object | None = None
    wait: object | None = None


class Capture:
    def __init__(self, origin: SimStream) -> None:
        self.origin = origin
        self.branches: dict[SimStream, list[Captured]] = {origin: []}
        self.points: dict[object, tuple[SimStream, int]] = {}  # meeting point -> its branch, operators before it
        self.open = True

    def check_joined(self) -> None:
        """Everything on other streams must lie before a point that the first stream waits for."""
        covered = dict.fromkeys(self.branches, 0)
        todo = [(self.origin, len(self.branches[self.origin]))]
        while todo:
            stream, upto = todo.pop()
            fresh = self.branches[stream][covered[stream] : upto]
            covered[stream] = max(covered[stream], upto)
            todo += [self.points[op.wait] for op in fresh if op.wait is not None]
        for stream, ops in self.branches.items():
            if any(op.work for op in ops[covered[stream] :]):
                raise DeviceError("capture: a stream that joined was not waited for at the end (unjoined work)")


@dataclass
class SimGraph:
    origin: list[Captured]
    branches: list[list[Captured]]
    streams: list[SimStream] = field(default_factory=list)  # of the branches
