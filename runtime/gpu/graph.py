"""The fast way to run a token: one launch of a captured graph, one run of the CPU's workers; they meet in the mailbox.

In: the queue of a token's launches. Out: logits on the GPU. Next: engine.py.

What changes from token to token (position, sequence number) is read from memory, so the graph is captured once. Its
merges wait for the workers, and these for its lists; nobody asks the host. streams.py gives the same bits and is the
check of this.
"""

from __future__ import annotations

from hotcold.runtime.gpu.device import Device
from hotcold.runtime.gpu.streams import Queue, RunCold
from hotcold.runtime.plan import Plan


class GraphExecutor:
    def __init__(self, device: Device, plan: Plan, queue: Queue) -> None:
        self._device, self._queue = device, queue
        self._n_cold = sum(op.kind == "cold" for op in plan.token)
        self._graphs = [device.capture(queue.main, lambda end=end: queue.put(0, end)) for end in queue.ends]  # type: ignore[misc]

    def token(self, seq: int, run_cold: RunCold, head: bool) -> None:
        """Queue a token's work and do the CPU's part of it. seq: its base number, which is in the control words too.

        head: its logits are wanted.
        """
        del seq
        self._device.replay(self._graphs[head], self._queue.main)
        if self._n_cold:
            run_cold(0, self._n_cold)
