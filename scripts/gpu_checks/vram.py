"""How much of the card's memory is taken while something runs.

In: nothing but the driver's count, or the emulated device's. Out: Meter. Next: plans.py, speed.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpu_checks.nvml import Card

EVERY_S = 0.004  # between two looks: allocations live longer


class Peak:
    """The most that was in use since reading began."""

    value = 0


class Meter:
    """Reads bytes in use, beside whatever runs. By the driver they are those of all processes."""

    def __init__(self, device: Any = None) -> None:
        """device: its arrays alone are counted; None: all that is taken of the card. Raises OSError where the driver
        cannot be asked."""
        if device is not None:
            self.read: Callable[[], int] = lambda: int(device.used)
        else:
            card = Card()
            self.read = lambda: card.memory()[0]

    @contextmanager
    def watch(self) -> Iterator[Peak]:
        peak, done = Peak(), threading.Event()
        peak.value = self.read()

        def look() -> None:
            while not done.wait(EVERY_S):
                peak.value = max(peak.value, self.read())

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield peak
        finally:
            done.set()
            thread.join()
