"""Launches in order on two streams, and the simple way to run a token: the host looks at what the GPU has found.

In: steps of lower.py, the CPU's cold operators. Out: logits on the GPU. Next: engine.py; graph.py does the same without
the host in between, and both must give the same bits.

The second stream takes operators that are early, predictors of the next layer. Where an operator needs one of the other
stream (plan.prerequisites), it waits for an event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gpu.device import Device, Event, Stream
from hotcold.runtime.gpu.lower import Step
from hotcold.runtime.mailbox import Mailbox
from hotcold.runtime.plan import Plan, prerequisites

RunCold = Callable[[int, int], None]  # cold operators first..end-1 of the token program, by their number among these

Stamp = Callable[[int, int, Stream], None]  # 0 or 1, number of the step, stream


class Queue:
    """Puts steps on the streams, in order."""

    def __init__(self, device: Device, steps: Sequence[Step], main: Stream, stamp: Stamp | None = None) -> None:
        """stamp: queues that the time is noted at which a step begins (0) or has ended (1); for a trace."""
        self._stamp = stamp
        self._device, self._steps, self.main = device, steps, main
        ops = tuple(step.op for step in steps)
        needs = prerequisites(ops)
        self._across = [[i for i in needs[j] if ops[i].early != op.early] for j, op in enumerate(ops)]
        self._events = {i: device.event() for i in sorted({i for across in self._across for i in across})}
        self.side = device.stream() if any(op.early for op in ops) else main
        self.ends = tuple(sum(not op.head_only or head for op in ops) for head in (False, True))  # steps of a token

    def put(self, first: int, end: int) -> None:
        device = self._device
        for n in range(first, end):
            step = self._steps[n]
            stream = self.side if step.op.early else self.main
            for i in self._across[n]:
                device.wait(stream, self._events[i])
            if self._stamp is not None:
                self._stamp(0, n, stream)
            for call in step.calls:
                call.put(stream)
            if self._stamp is not None:
                self._stamp(1, n, stream)
            if n in self._events:
                device.record(self._events[n], stream)


@dataclass(frozen=True)
class _Stop:
    """Before step `at`: the cold operator number `cold` of `layer`, whose list is there when `told` has passed."""

    at: int
    cold: int
    layer: int
    told: Event
    told_after: int  # step


class StreamExecutor:
    """A token with a stop of the host in every layer where the CPU may have neurons."""

    def __init__(self, device: Device, plan: Plan, queue: Queue, mailbox: Mailbox) -> None:
        self._device, self._queue, self._mailbox = device, queue, mailbox
        self._stops = _stops(device, plan)

    def token(self, seq: int, run_cold: RunCold, head: bool) -> None:
        """Queue a token's work; the CPU's part of a layer is done when this goes on to the next.

        seq: its base number. head: its logits are wanted.
        """
        at = 0
        for stop in self._stops:
            self._queue.put(at, stop.told_after + 1)
            self._device.record(stop.told, self._queue.main)
            self._queue.put(stop.told_after + 1, stop.at)  # what the GPU does meanwhile
            self._device.sync_event(stop.told)
            if self._count(stop.layer, seq):
                run_cold(stop.cold, stop.cold + 1)
            at = stop.at
        self._queue.put(at, self._queue.ends[head])

    def _count(self, layer: int, seq: int) -> int:
        header = int(self._mailbox.host.hdr[layer])
        if header >> 32 != seq + layer:
            raise HotcoldError(f"layer {layer}: the GPU has said nothing of its neurons, which is an error in hotcold "
                               "or of the GPU; run without the GPU")  # fmt: skip
        return header & 0xFFFFFFFF


def _stops(device: Device, plan: Plan) -> list[_Stop]:
    """Where the host looks."""
    stops: list[_Stop] = []
    told: dict[str, int] = {}
    colds: dict[str, tuple[int, int]] = {}
    n = 0
    for op in (op for op in plan.token if op.device == "gpu" or op.kind == "cold"):
        if op.kind == "cold":
            colds[op.writes[0]] = len(colds), told[op.reads[0]]
            continue
        for name in op.reads:
            if name in colds:
                number, after = colds[name]
                stops.append(_Stop(n, number, op.layer, device.event(), after))
        told |= {name: n for name in op.writes if name.startswith("mail")}
        n += 1
    return stops
