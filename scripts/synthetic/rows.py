"""Matrices made of few random pieces that are quantized once: so writing runs at the speed of the disk.

In: random values. Out: LazyTensors of any size. Next: model.py.

RowPool draws whole rows. A down matrix must exist in two orientations, so it is made of square tiles: a tile turned is
a tile of the turned matrix, and both are quantized from the same values.
"""

from __future__ import annotations

import zlib

import gguf
import numpy as np

from hotcold.convert.lazy import LazyTensor, QType
from hotcold.convert.precision import BLOCK_MAX, quantize
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import dequantize
from hotcold.runtime.kernels import formats
from synthetic.planted import HEAD

POOL_ROWS = 1024
TILE = 256  # a K-quant's block
TILES = 32


def pack(values: np.ndarray, kind: QType) -> np.ndarray:
    """float32 [..., cols] -> uint8 [..., row bytes]."""
    values = np.ascontiguousarray(values, np.float32)
    if kind == QType.F32:
        return values.view(np.uint8)
    if kind in BLOCK_MAX:
        return quantize(values.reshape(-1, values.shape[-1]), kind).reshape(*values.shape[:-1], -1)
    return np.asarray(gguf.quants.quantize(values, kind)).view(np.uint8)


def unpack(raw: np.ndarray, kind: QType) -> np.ndarray:
    """The reverse, for rows [n, row bytes]."""
    if kind in (QType.F32, QType.F16):
        return raw.view(np.float32 if kind == QType.F32 else np.float16).astype(np.float32)
    return dequantize(raw.view(np.uint16) if kind == QType.BF16 else raw, kind)


def check_cols(cols: int, kind: QType, what: str) -> None:
    """Raise HotcoldError unless rows of `cols` are whole blocks."""
    block = gguf.GGML_QUANT_SIZES[kind][0]
    if cols % block:
        raise HotcoldError(f"{what} of {cols} columns: {kind.name} needs a multiple of {block}")


def rng_for(seed: int, name: str) -> np.random.Generator:
    """The same numbers for the same name, in whichever file and order it is made."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


class RowPool:
    """Random rows of one type. Values f32 [rows, cols]; one more row, of zeros, is index `zero`."""

    def __init__(self, values: np.ndarray, kind: QType) -> None:
        self.kind, self.cols, self.zero = kind, values.shape[1], len(values)
        check_cols(self.cols, kind, "a matrix")
        block = max(HEAD, gguf.GGML_QUANT_SIZES[kind][0])
        values = np.vstack([values, np.zeros((1, self.cols), np.float32)])
        self.first = values[:, :block].copy()  # f32: the columns that are quantized with a row's own head
        self.packed = pack(values, kind)  # uint8 [rows, row bytes]

    def draw(self, index: np.ndarray, head: np.ndarray | None) -> np.ndarray:
        """uint8 [n, row bytes]: rows `index`; head f32 [n]: what each of its first HEAD columns is instead."""
        rows = self.packed[index]
        if head is not None:
            part = self.heads(index, head)
            rows[:, : part.shape[1]] = part
        return rows

    def heads(self, index: np.ndarray, head: np.ndarray) -> np.ndarray:
        """uint8 [n, bytes of the first block or blocks]."""
        part = self.first[index]
        part[:, :HEAD] = head[:, None]
        return pack(part, self.kind)


def random_rows(
    rng: np.random.Generator, cols: int, std: float, head: float = 0.0, rows: int = POOL_ROWS
) -> np.ndarray:
    """f32 [rows, cols] of standard deviation std; `head` in the first HEAD columns."""
    values = rng.standard_normal((rows, cols), dtype=np.float32) * np.float32(std)
    values[:, :HEAD] = head
    return values


def make_tiles(rng: np.random.Generator, std: float, kind: QType, by_neuron: bool, paired: bool) -> np.ndarray:
    """Random square tiles: uint8 [2 * TILES, TILE, bytes of TILE columns]; rows are neurons, or else outputs.

    Tile TILES + i is tile i for the first columns of the residual: its first HEAD outputs are 0.
    paired: every second neuron adds the negative of what the one before it adds.
    """
    values = rng.standard_normal((TILES, TILE, TILE), dtype=np.float32) * np.float32(std)
    if paired:
        values[:, 1::2] = -values[:, ::2]
    both = np.concatenate([values, values])  # [tile, neuron, output]
    both[TILES:, :, :HEAD] = 0
    return pack(both if by_neuron else both.swapaxes(1, 2), kind)


def tile_choice(rng: np.random.Generator, n_ff: int, n_embd: int) -> np.ndarray:
    """int [tiles of neurons, tiles of outputs]: which tile lies where in a down matrix."""
    choice = rng.integers(0, TILES, (-(-n_ff // TILE), -(-n_embd // TILE)))
    choice[:, 0] += TILES
    return choice


def tiled(tiles: np.ndarray, choice: np.ndarray, a: int, b: int, n_bytes: int) -> np.ndarray:
    """uint8 [b - a, n_bytes]: rows a to b of the matrix; what hangs over its last column is cut off."""
    out = np.empty((b - a, n_bytes), np.uint8)
    for i in range(a // TILE, -(-b // TILE)):
        first, last = max(a, i * TILE), min(b, (i + 1) * TILE)
        rows = tiles[choice[i], first - i * TILE : last - i * TILE]  # [tiles, rows, tile bytes]
        out[first - a : last - a] = rows.swapaxes(0, 1).reshape(last - first, -1)[:, :n_bytes]
    return out


def drawn(name: str, pool: RowPool, index: np.ndarray, head: np.ndarray | None = None) -> LazyTensor:
    """Rows of a pool as a tensor."""

    def read(a: int, b: int) -> np.ndarray:
        return pool.draw(index[a:b], None if head is None else head[a:b])

    return LazyTensor(name, (len(index), pool.cols), pool.kind, read)


def tiled_tensor(name: str, tiles: np.ndarray, choice: np.ndarray, shape: tuple[int, int], kind: QType) -> LazyTensor:
    """A matrix of tiles; rows of `choice` are rows of tiles."""
    check_cols(shape[1], kind, "a down matrix")
    n_bytes = formats.row_bytes(kind, shape[1])
    return LazyTensor(name, shape, kind, lambda a, b: tiled(tiles, choice, a, b, n_bytes))
