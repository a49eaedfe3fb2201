"""The memory in which the GPU and the CPU's workers meet: lists of neurons one way, answers the other.

In: sizes, and who provides memory that both see. Out: arrays for the host, the same for the device, addresses for
records. Next: program.py, kernels/cold.py; gpu/ writes the lists and reads the answers.

Each token has a base number, each layer of it the number base + layer. The GPU writes h, ids and vals of a layer, then
its header, number << 32 | count. With a count of 0 it goes on at once. Otherwise the workers write `out`, then the
number to `done`, and the GPU adds `out` when it sees that. Numbers only grow, so nothing is cleared between tokens and
what is left of a token that was abandoned is never taken for a newer one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hotcold.runtime.buffers import aligned
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.kernels import cold

Pinned = Callable[[tuple[int, ...], type], tuple[np.ndarray, Any]]  # shape, dtype -> host's view, device's view
LAST_NUMBER = 1 << 30  # of a layer: they must stay below 2^31
_LINE = 8  # int64 in a cache line


class MailArrays(NamedTuple):
    """Rows of layers; widths are rounded up to cache lines."""

    hdr: Any  # i64 [n_layer]: number << 32 | count
    ids: Any  # i32 [n_layer, >= n_ff]: the listed neurons, ascending
    vals: Any  # f32 [n_layer, >= n_ff]: their activated keys, where those are sent
    h: Any  # f32 [n_layer, >= n_embd]: input of the FFN
    out: Any  # f32 [n_layer, >= n_embd]: sum of the listed neurons
    done: Any  # i64 [n_layer, 8]: word 0 is the number of the layer that `out` answers
    status: Any  # i32 [1]: 1 + the layer whose answer the GPU has not waited for any longer; 0: none
    abort: Any  # i32 [1]: not 0: the GPU shall wait for no answer


def plain(shape: tuple[int, ...], dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Memory that starts on a page, for a `device` that is another thread."""
    array: np.ndarray = aligned(int(np.prod(shape)) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)
    return array, array


class Mailbox:
    """Mutable; one run of the workers at a time. While a token is computed, only the GPU and the workers write."""

    def __init__(self, config: ModelConfig, pinned: Pinned = plain) -> None:
        n, n_ff, n_embd = config.n_layer, _whole_lines(max(config.n_ff)), _whole_lines(config.n_embd)
        pairs = MailArrays(
            hdr=pinned((n,), np.int64), ids=pinned((n, n_ff), np.int32), vals=pinned((n, n_ff), np.float32),
            h=pinned((n, n_embd), np.float32), out=pinned((n, n_embd), np.float32), done=pinned((n, _LINE), np.int64),
            status=pinned((1,), np.int32), abort=pinned((1,), np.int32),
        )  # fmt: skip
        self.host, self.device = (MailArrays(*(pair[i] for pair in pairs)) for i in (0, 1))
        self._desk = aligned(8 * _LINE * n).view(np.int64).reshape(n, _LINE)  # the workers' own; see cold.py
        self._n_layer = n
        self._next = 1
        self.reset()

    def reset(self) -> None:
        """Begin anew. Nothing may be under way on either side."""
        array: np.ndarray
        for array in (self.host.hdr, self.host.done, self.host.status, self.host.abort):
            array[...] = 0
        self._desk[:, [cold.SEEN // 8, cold.WRITTEN // 8]] = 0
        self._next = 1

    def next_base(self) -> int:
        """The base number of another token. Nothing may be under way on either side."""
        if self._next + self._n_layer > LAST_NUMBER:
            self.reset()
        base = self._next
        self._next += self._n_layer + 1
        return base

    def addresses(self, layer: int) -> dict[str, int]:
        """Fields of a cold operator's record."""
        names = {"header": "hdr", "mail_ids": "ids", "mail_values": "vals", "mail_h": "h", "mail_out": "out",
                 "done": "done"}  # fmt: skip
        rows: dict[str, np.ndarray] = {field: getattr(self.host, name)[layer:] for field, name in names.items()}
        return {field: row.ctypes.data for field, row in (rows | {"desk": self._desk[layer:]}).items()}

    @property
    def given_up(self) -> int | None:
        """The layer whose answer the GPU has not waited for any longer, if there is one since reset()."""
        status = int(self.host.status[0])
        return status - 1 if status else None

    def stop_waiting(self) -> None:
        """The GPU shall wait for no answer from now on: the workers have stopped."""
        self.host.abort[0] = 1

    @property
    def told_to_stop(self) -> bool:
        """Whether stop_waiting() was called since reset()."""
        return bool(self.host.abort[0])

    # ---- what happened

    def visits(self) -> tuple[np.ndarray, np.ndarray]:
        """Per layer, int64 [n_layer] each: how often there was nothing to do for the CPU, and how often there was."""
        return self._desk[:, cold.SKIPPED // 8].copy(), self._desk[:, cold.WORKED // 8].copy()

    def reset_visits(self) -> None:
        """Count from here on."""
        self._desk[:, [cold.SKIPPED // 8, cold.WORKED // 8]] = 0

    @property
    def pinned_bytes(self) -> int:
        """Of what both sides see."""
        return sum(array.nbytes for array in self.host)

    # ---- the GPU's part, for one whose kernels do not write here themselves

    def post(self, layer: int, seq: int, ids: np.ndarray, vals: np.ndarray | None = None) -> None:
        """Send a list of neurons; h is to be there already. x86 keeps the order of these stores."""
        self.host.ids[layer, : len(ids)] = ids
        if vals is not None:
            self.host.vals[layer, : len(vals)] = vals
        self.post_count(layer, seq, len(ids))

    def post_count(self, layer: int, seq: int, count: int) -> None:
        """Send a header alone."""
        self.host.hdr[layer] = seq << 32 | count

    def answered(self, layer: int, seq: int) -> bool:
        """Whether `out` of the layer is there."""
        return int(self.host.done[layer, 0]) == seq


def _whole_lines(n: int) -> int:
    return (n + 15) // 16 * 16
