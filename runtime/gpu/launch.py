"""Grids and blocks of the kernels of one token, and sizes that belong to them.

In: shapes, the number of multiprocessors. Out: Launch, one per kernel of cuda/*.cu. Next: lower.py.

Kernels that add in another order with another block get it from the shapes alone. Only what is cut into `slices` and
`splits` depends on the card. Kernels are right with any grid where their comments say so.
"""

from __future__ import annotations

from typing import NamedTuple

WEIGHTS_PER_LOAD = {"f16": 8, "q8_0": 16, "q4_0": 32}  # in 16 bytes of a row
LOADS_PER_THREAD = 4  # that are in flight together
ROW_THREADS = 128
ATTEND_HEADS = 4  # query heads of a block of attend_part
MAX_SLICES = 64  # more would cost `merge` more than they bring
MAX_SPLITS = 64
SIGN_ROWS = 32


class Launch(NamedTuple):
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int = 0  # bytes of dynamic shared memory


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _warps(threads: int, most: int) -> int:
    """Threads in whole warps."""
    return min(most, max(32, _ceil(threads, 32) * 32))


def _elements(n: int, block: int = 256) -> Launch:
    return Launch((_ceil(n, block),), (block,))


def _row_block(kind: str, cols: int) -> tuple[int, int]:
    """(threads per row, rows): so many threads that none has to start a second round of loads, up to a whole block."""
    loads, threads = cols // WEIGHTS_PER_LOAD[kind], 32
    while threads < ROW_THREADS and threads * LOADS_PER_THREAD < loads:
        threads *= 2
    return threads, ROW_THREADS // threads


def begin(n_embd: int) -> Launch:
    return _elements(max(n_embd, 16))


def norm_token(n: int) -> Launch:
    return Launch((1,), (_warps(n, 1024),))


def quantize(n: int) -> Launch:
    return _elements(n)


def activate(n: int) -> Launch:
    return _elements(n)


def matvec(kind: str, rows: int, cols: int) -> Launch:
    block = _row_block(kind, cols)
    return Launch((_ceil(rows, block[1]),), block)


def rope_kv(n_head: int, n_head_kv: int) -> Launch:
    return Launch((_ceil(n_head + n_head_kv, 4),), (128,))


def _attend_blocks(n_head: int, n_head_kv: int) -> int:
    return n_head_kv * _ceil(n_head // n_head_kv, ATTEND_HEADS)


def attend_splits(n_head: int, n_head_kv: int, n_ctx: int, multiprocessors: int) -> int:
    """Pieces of the context at most: four blocks for every multiprocessor, none shorter than 32 positions."""
    wanted = _ceil(4 * multiprocessors, _attend_blocks(n_head, n_head_kv))
    return max(1, min(wanted, MAX_SPLITS, _ceil(n_ctx, 32)))


def attend_part(n_head: int, n_head_kv: int, splits: int) -> Launch:
    return Launch((_attend_blocks(n_head, n_head_kv), splits), (128,))


def attend_merge(n_head: int, head_dim: int) -> Launch:
    return Launch((n_head,), (_warps(head_dim, 256),))


def post() -> Launch:
    return Launch((1,), (1024,))


def compact_split() -> Launch:
    return Launch((1,), (1024,))


def neuron_values(kind: str, n: int, cols: int, multiprocessors: int) -> Launch:
    """n: most neurons that can be listed. Blocks take more than one where the list is longer than the card is wide."""
    block = _row_block(kind, cols)
    return Launch((min(_ceil(n, block[1]), 16 * multiprocessors),), block)


def _columns(kind: str, n_embd: int) -> int:
    """Threads along a row in axpy_down."""
    return n_embd // WEIGHTS_PER_LOAD[kind]


def slices(kind: str, n: int, n_embd: int, multiprocessors: int) -> int:
    """Of a list of up to n neurons: about 16 warps of axpy_down for every multiprocessor."""
    return max(1, min(n, MAX_SLICES, max(8, _ceil(512 * multiprocessors, _columns(kind, n_embd)))))


def axpy_down(kind: str, n_embd: int, slices: int) -> Launch:
    threads = _warps(_ceil(_columns(kind, n_embd), 4), 128)
    return Launch((_ceil(_columns(kind, n_embd), threads), slices), (threads,))


def merge(n_embd: int) -> Launch:
    return Launch((_ceil(n_embd, 64),), (64, 4))


def sign_scores(n: int, cols: int, multiprocessors: int) -> Launch:
    return Launch((min(_ceil(n, SIGN_ROWS), 8 * multiprocessors),), (256,), 8 * _ceil(cols, 64))
