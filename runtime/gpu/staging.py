"""Rows of a file on their way to the GPU: copied to pinned memory, sent, and unpacked there.

In: raw rows of matrices, as the file has them. Out: the same in the GPU's memory. Next: weights.py loads a model this
way, prompt.py the cold neurons of a layer each time it needs them.

There are two buffers on either side, so that the host copies one while the bus carries the other and the GPU works with
the one before. A stream of its own carries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hotcold.runtime.gpu.device import Array, Device, Stream
from hotcold.runtime.gpu.memory import ALIGNMENT


class Staging:
    """Mutable: which buffer is next. One user at a time."""

    def __init__(self, device: Device, memory: Array, main: Stream) -> None:
        """memory: uint8 [2, bytes] of the GPU. main: the stream that works with what has come."""
        self._device, self._memory, self._main = device, memory, main
        self.size = memory.shape[1]  # of a buffer
        self._host, _ = device.pinned((2, self.size), np.uint8)
        self._carrier = device.stream()
        self._sent = [device.event() for _ in range(2)]  # the pinned buffer may be filled again
        self._used = [device.event() for _ in range(2)]  # so may the GPU's
        self._turn = 0
        self.bytes_sent = 0

    def send(self, parts: Sequence[np.ndarray]) -> list[Array]:
        """Queue the way of raw rows, uint8 each, together at most `size` bytes; what is queued in the main stream from
        now on finds them in the arrays returned, until free() is called and two more have been sent."""
        device, b = self._device, self._turn
        device.sync_event(self._sent[b])
        at = 0
        places = []
        for part in parts:
            flat = part.reshape(-1)
            self._host[b, at : at + len(flat)] = flat
            places.append((at, at + len(flat)))
            at += -(-len(flat) // ALIGNMENT) * ALIGNMENT
        end = places[-1][1]
        device.wait(self._carrier, self._used[b])
        device.h2d(self._memory[b][:end], self._host[b, :end], self._carrier)
        device.record(self._sent[b], self._carrier)
        device.wait(self._main, self._sent[b])
        self.bytes_sent += end
        return [self._memory[b][first:last] for first, last in places]

    def free(self) -> None:
        """What was sent last is used by nothing that is queued in the main stream later."""
        self._device.record(self._used[self._turn], self._main)
        self._turn ^= 1

    def settle(self) -> None:
        """Wait until nothing is on its way."""
        self._device.sync(self._carrier)

    def rows_at_once(self, row_bytes: int, unit: int = 1) -> int:
        """How many rows of so many bytes fit, a multiple of unit."""
        return max(unit, (self.size - 8 * ALIGNMENT) // row_bytes // unit * unit)
