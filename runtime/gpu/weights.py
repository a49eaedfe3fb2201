"""The GPU's share of the weights, uploaded.

In: a Plan, an open model's weights, a device. Out: DeviceWeights: matrices and vectors by their names in the file.
Next: lower.py.

Rows of quantized matrices are blocks of a scale and 32 weights in the file; on the GPU scales and weights lie apart
(memory.py). They are parted on the way, a chunk at a time, so that loading takes no second copy of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gpu.device import Array, Device, DeviceMemoryError
from hotcold.runtime.gpu.memory import Arena, Layout, Rows, parts, uploads, weight_blocks
from hotcold.runtime.gpu.placement import TYPES
from hotcold.runtime.kernels import formats
from hotcold.runtime.plan import Plan
from hotcold.runtime.weights import Matrix

CHUNK = 16 << 20  # bytes of rows that are on their way


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
        """Raises HotcoldError where the GPU has no room, naming what is missing."""
        layout = Layout(weight_blocks(plan))
        self.arena = allocate(device, layout, "weights")
        self._rows: dict[str, Rows] = {}
        for rows in uploads(plan):
            self._rows[rows.matrix.name] = rows
            upload(device, rows, lambda suffix, name=rows.matrix.name: self.arena[name + suffix])  # type: ignore[misc]

    @property
    def n_bytes(self) -> int:
        return self.arena.layout.n_bytes

    def matrix(self, of: Matrix) -> DeviceMatrix:
        rows = self._rows[of.name]
        return DeviceMatrix(TYPES[of.ggml_type], rows.rows, of.cols, self.arena[f"{of.name}.q"],
                            self.arena.get(f"{of.name}.d"))  # fmt: skip

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


def upload(device: Device, rows: Rows, place: Callable[[str], Array]) -> None:
    """Copy the rows to where place(suffix) says."""
    matrix = rows.matrix
    if rows.is_vector:
        device.upload(np.ascontiguousarray(matrix.data.reshape(-1)[: rows.rows]), place(""))
        return
    if not parts(rows)[0][0]:  # signs
        device.upload(np.ascontiguousarray(matrix.data[: rows.rows]), place(""))
        return
    raw = raw_rows(matrix)
    step = max(1, CHUNK // matrix.stride)
    for first in range(0, rows.rows, step):
        end = min(first + step, rows.rows)
        for (suffix, *_), values in zip(parts(rows), split_rows(matrix, raw[first:end]), strict=True):
            device.upload(values, place(suffix)[first:end])


def raw_rows(matrix: Matrix) -> np.ndarray:
    """uint8 [rows, stride], a view of the file."""
    data = matrix.data
    return data.view(np.uint8).reshape(matrix.rows, matrix.stride)


def split_rows(matrix: Matrix, raw: np.ndarray) -> tuple[np.ndarray, ...]:
    """Rows as they are in the file, uint8 [n, stride] -> (q,) or (q, d) as on the GPU."""
    if matrix.ggml_type == formats.F16:
        return (np.ascontiguousarray(raw).view(np.float16),)
    n, blocks = len(raw), matrix.cols // formats.BLOCK
    each = raw.reshape(n, blocks, -1)  # [n, blocks, 34 or 18]
    d = np.ascontiguousarray(each[:, :, :2]).view(np.float16).reshape(n, blocks)
    q = np.ascontiguousarray(each[:, :, 2:]).reshape(n, -1)
    return (q.view(np.int8) if matrix.ggml_type == formats.Q8_0 else q), d
