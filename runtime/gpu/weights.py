"""The GPU's share of the weights, uploaded.

In: a Plan, an open model's weights, a device. Out: DeviceWeights: matrices and vectors by their names in the file.
Next: lower.py.

Rows of quantized matrices are blocks of a scale and 32 weights in the file; on the GPU scales and weights lie apart
(memory.py). The GPU parts them, a chunk at a time, so that loading takes no second copy of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hotcold.runtime import schema
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gpu import launch_block
from hotcold.runtime.gpu.device import Array, Device, DeviceMemoryError, Kernel, Stream
from hotcold.runtime.gpu.memory import Arena, Layout, uploads, weight_blocks
from hotcold.runtime.gpu.placement import TYPES
from hotcold.runtime.gpu.staging import Staging
from hotcold.runtime.plan import Plan
from hotcold.runtime.weights import Matrix


@dataclass(frozen=True)
class DeviceMatrix:
    """The first rows of a matrix. q: its weights, half or packed; d: scales of 32 weights, None for F16."""

    kind: str  # placement.TYPES
    rows: int
    cols: int
    q: Array
    d: Array | None

    def from_row(self, first: int) -> DeviceMatrix:
        return DeviceMatrix(self.kind, self.rows - first, self.cols, self.q[first:],
                            None if self.d is None else self.d[first:])  # fmt: skip


class DeviceWeights:
    """Read-only once made. Names that the GPU does not need are not there."""

    def __init__(self, device: Device, plan: Plan) -> None:
        """Memory for them. Raises HotcoldError where the GPU has no room, naming what is missing."""
        self._device = device
        self.arena = allocate(device, Layout(weight_blocks(plan)), "weights")
        self._rows = {rows.matrix.name: rows for rows in uploads(plan)}

    def load(self, staging: Staging, kernels: Callable[[str], Kernel], stream: Stream) -> None:
        """Copy all of them from the file. stream: the one that the staging's rows come to."""
        for rows in self._rows.values():
            matrix = rows.matrix
            if rows.is_vector or matrix.name.endswith(schema.FFN_PRED_SIGN):
                values = matrix.data.reshape(-1) if rows.is_vector else matrix.data
                self._device.upload(np.ascontiguousarray(values[: rows.rows]), self.arena[matrix.name])
                continue
            to, raw, step = self.matrix(matrix), raw_rows(matrix), staging.rows_at_once(matrix.stride)
            for first in range(0, rows.rows, step):
                end = min(first + step, rows.rows)
                (sent,) = staging.send([raw[first:end]])
                launch_block.unpack_rows(sent, to, first, end - first).queue(kernels, stream)
                staging.free()
        self._device.sync(stream)

    @property
    def n_bytes(self) -> int:
        return self.arena.layout.n_bytes

    def matrix(self, of: Matrix) -> DeviceMatrix:
        rows = self._rows[of.name]
        return DeviceMatrix(TYPES[of.ggml_type], rows.rows, of.cols, self.arena[f"{of.name}.q"],
                            self.arena.get(f"{of.name}.d"))  # fmt: skip

    def rows(self, of: Matrix) -> int:
        """How many of its rows are here."""
        return self._rows[of.name].rows if of.name in self._rows else 0

    def vector(self, of: Matrix | None) -> Array | None:
        """A vector, or a table of signs; None for none."""
        return None if of is None else self.arena[of.name]


def allocate(device: Device, layout: Layout, what: str) -> Arena:
    try:
        return Arena(device, layout)
    except DeviceMemoryError as error:
        wanted, free, missing = (n / 2**20 for n in (error.wanted, error.free, error.wanted - error.free))
        raise HotcoldError(
            f"{device.name}: {wanted:.1f} MiB are wanted for {what}, {free:.1f} MiB are free, {missing:.1f} MiB are "
            f"missing: another program may use the GPU; use a smaller --vram-budget, or auto"
        ) from error


def raw_rows(matrix: Matrix) -> np.ndarray:
    """uint8 [rows, stride], a view of the file."""
    return matrix.data.view(np.uint8).reshape(matrix.rows, matrix.stride)
