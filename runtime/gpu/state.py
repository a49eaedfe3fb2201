"""What the GPU's half of an engine writes: KV cache, activations, lists; and the pinned memory beside it.

In: a Plan, a device. Out: GpuState, owned by one engine. Next: lower.py.

Pinned memory is the host's, seen by both: what a token starts from (position, number, x), what it ends with (logits).
What both sides say to each other in between is the mailbox's (mailbox.py).
"""

from __future__ import annotations

import numpy as np

from hotcold.runtime.gpu.device import Array, Device, Stream
from hotcold.runtime.gpu.memory import CTL_WORDS, LOGIT_ROWS, Layout, state_blocks
from hotcold.runtime.gpu.weights import allocate
from hotcold.runtime.plan import Plan

CTL_POS, CTL_SEQ = 0, 1  # words of the control block, as in cuda/common.cuh


class GpuState:
    """Mutable; one token or one block at a time."""

    def __init__(
        self, device: Device, plan: Plan, n_ctx: int, n_batch: int, rope: tuple[np.ndarray, np.ndarray]
    ) -> None:  # fmt: skip
        """rope: cosines and sines, f32 [n_ctx, pairs]. Raises HotcoldError where the GPU has no room."""
        c = plan.config
        self._device = device
        self._arena = allocate(device, Layout(state_blocks(plan, n_ctx, n_batch)), "the KV cache and activations")
        for name, table in zip(("cos", "sin"), rope, strict=True):
            device.upload(np.ascontiguousarray(table), self[name])
        for name in ("counters", "gpu.cpu_count", "gpu.count"):
            self.clear(name)
        self.ctl, self.ctl_device = device.pinned((CTL_WORDS,), np.int32)
        self.x, self.x_device = device.pinned((max(1, n_batch), c.n_embd), np.float32)  # of the CPU's layers
        self.logits, _ = device.pinned((LOGIT_ROWS if n_batch else 1, c.n_vocab), np.float32)

    def __getitem__(self, name: str) -> Array:
        return self._arena[name]

    def get(self, name: str) -> Array | None:
        return self._arena.get(name)

    @property
    def n_bytes(self) -> int:
        return self._arena.layout.n_bytes

    def clear(self, name: str) -> None:
        array = self[name]
        self._device.upload(np.zeros(array.shape, array.dtype), array)

    def begin(self, pos: int, seq: int) -> None:
        """Set the control words that the next token starts with; a block has none. Nothing may be under way."""
        self.ctl[CTL_POS], self.ctl[CTL_SEQ] = pos, seq

    def fetch_logits(self, stream: Stream) -> None:
        """Queue their copy to the host."""
        self._device.d2h(self.logits[0], self["logits"], stream)

    def counters(self) -> np.ndarray:
        """int64 [n_layer, memory.COUNTERS]. Nothing may be under way."""
        return self._device.download(self["counters"])
