"""The CPU's memory that a run writes: activations, the KV cache, each thread's own buffers.

In: ModelConfig, sizes. Out: Buffers, owned by one engine. Next: program.py, which writes their addresses into records.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.kernels import formats
from hotcold.runtime.kernels.attention import FEW_BYTES, parts_bytes
from hotcold.runtime.kernels.attention_block import block_bytes
from hotcold.runtime.kernels.blocks import panel_bytes
from hotcold.runtime.kernels.ffn import LIST_PADDING
from hotcold.runtime.kernels.sync import LINE

if TYPE_CHECKING:
    from hotcold.runtime.mailbox import Mailbox

KV_TYPES = {"f16": formats.F16, "f32": formats.F32, "q8_0": formats.Q8_0}
_PAGE = 4096
FEW_TOKENS = 8  # most that the token program takes at once


def aligned(n_bytes: int) -> np.ndarray:
    """Zeroed uint8 memory that starts on a page; the pages are the system's until they are written."""
    raw = np.zeros(n_bytes + _PAGE, np.uint8)
    start = -raw.ctypes.data % _PAGE
    return raw[start : start + n_bytes]


def lazy(n_bytes: int) -> np.ndarray:
    """The same, for memory that fills slowly: on small pages, so that what is not used yet takes no memory.

    Each head has its own stretch of the KV cache: on huge pages its first token would take 2 MiB of each.
    """
    if not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return aligned(n_bytes)
    memory = mmap.mmap(-1, max(1, n_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _padded(n: int) -> int:
    return (n + 63) // 64 * 64


def _scores_bytes(c: ModelConfig) -> int:
    """Attention's scratch of a thread."""
    return max(FEW_BYTES, block_bytes(c.head_dim))


def _marks_bytes(c: ModelConfig) -> int:
    """One bit per neuron of the largest layer."""
    return 4 * (_padded(max(c.n_ff)) // 16)


def _rank(c: ModelConfig) -> int:
    """Hidden values of the largest predictor."""
    return max((p.rank for p in c.predictors), default=0)


@dataclass(frozen=True)
class Area:
    """A buffer: address and bytes per token of its f32 values and of its act blocks (0: it has none)."""

    addr: int
    ld: int
    addr_b: int = 0
    ld_b: int = 0


class Buffers:
    """All memory that a run writes: activations, KV cache, each thread's arena. Owned by one engine.

    cached_layers: that many layers, from the first on, have a cache here; None: all. mailbox: of the cold operators.
    """

    def __init__(
        self, config: ModelConfig, n_threads: int, n_ctx: int, n_batch: int, kv_type: str,
        cached_layers: int | None = None, mailbox: Mailbox | None = None,
    ) -> None:  # fmt: skip
        c = config
        self.n_ctx, self.n_batch, self.kv_type, self.mailbox = n_ctx, n_batch, KV_TYPES[kv_type], mailbox
        self._memory: list[np.ndarray] = []
        self.values: dict[str, np.ndarray] = {}  # f32 [n_batch, width]: what the shared buffers hold
        widths = self._widths(c)
        self.shared = {name: self._activations(name, width, n_batch) for name, width in widths.items()}
        self.cache_row = self._cache_row(c, kv_type)
        cache_bytes = c.n_head_kv * n_ctx * self.cache_row
        layers = c.n_layer if cached_layers is None else cached_layers
        self.cache = [(self._new(cache_bytes, lazy), self._new(cache_bytes, lazy)) for _ in range(layers)]
        self.marks = self._new(_marks_bytes(c))  # a bit per neuron that some token of a block needs
        self.parts = self._new(parts_bytes(FEW_TOKENS, c.n_head, c.head_dim, n_ctx))
        self.merged = self._new(LINE * c.n_head_kv)  # counters, 0 between runs
        self._make_arena(c, n_threads)

    @staticmethod
    def _widths(c: ModelConfig) -> dict[str, int]:
        """Values per token of each shared buffer."""
        q, kv, n_ff = c.n_head * c.head_dim, c.n_head_kv * c.head_dim, max(c.n_ff)
        widths = {"x": c.n_embd, "h": c.n_embd, "hq": max(q, n_ff), "q": q, "k": kv, "v": kv, "att": q, "g": n_ff}
        rank = _rank(c)
        hidden = {"hidden0": rank, "hidden1": rank} if rank else {}
        return widths | ({"u": n_ff} if c.gated else {}) | hidden

    @staticmethod
    def _cache_row(c: ModelConfig, kv_type: str) -> int:
        if kv_type == "q8_0" and c.head_dim % formats.BLOCK:
            raise HotcoldError(
                f"--kv-type q8_0 needs heads whose size is a multiple of {formats.BLOCK}, "
                f"this model's is {c.head_dim}: use --kv-type f16"
            )
        return formats.row_bytes(KV_TYPES[kv_type], c.head_dim)

    @classmethod
    def estimate(
        cls, config: ModelConfig, n_threads: int, n_ctx: int, n_batch: int, kv_type: str,
        cached_layers: int | None = None,
    ) -> int:  # fmt: skip
        """Bytes of all that is allocated and of the rotary tables, before anything is."""
        layers = config.n_layer if cached_layers is None else cached_layers
        cache = 2 * layers * config.n_head_kv * n_ctx * cls._cache_row(config, kv_type)
        activations = 6 * n_batch * sum(cls._widths(config).values())  # f32 and act blocks
        tables = 12 * n_ctx * config.head_dim  # in f32, and in f64 while they are made
        parts = parts_bytes(FEW_TOKENS, config.n_head, config.head_dim, n_ctx)
        arenas = n_threads * cls._arena(config)[1]
        return cache + activations + arenas + _marks_bytes(config) + LINE * config.n_head_kv + parts + tables

    def _new(self, n_bytes: int, allocate: Callable[[int], np.ndarray] = aligned) -> int:
        memory = allocate(n_bytes)
        self._memory.append(memory)
        return memory.ctypes.data

    def _activations(self, name: str, size: int, n_tok: int) -> Area:
        ld, ld_b = 4 * _padded(size), formats.ACT_BYTES * (_padded(size) // formats.BLOCK)
        area = Area(self._new(ld * n_tok), ld, self._new(ld_b * n_tok), ld_b)
        self.values[name] = self._memory[-2].view(np.float32).reshape(n_tok, -1)[:, :size]
        return area

    @classmethod
    def _arena(cls, c: ModelConfig) -> tuple[dict[str, int], int]:
        """-> offsets of a thread's private buffers, bytes of all. First scratch, then those of the token program."""
        few, widest, ld_list = FEW_TOKENS, cls._widths(c)["hq"], cls._list_bytes(c)
        layout = {
            "scratch": panel_bytes(max(c.n_embd, widest)),
            "scores": _scores_bytes(c),
            "h": few * 4 * _padded(c.n_embd),
            "h_b": few * 2 * _padded(c.n_embd),
            "hq_b": few * 2 * _padded(widest),
            "hidden": few * 4 * _padded(_rank(c)),
            "hidden_b": few * 2 * _padded(_rank(c)),
            "signs": _padded(c.n_embd),
            "ids": few * ld_list,
            "values": few * ld_list,
            "lengths": few * 16,
            "acc": few * 4 * _padded(c.n_embd),
        }
        offsets, total = {}, 0
        for name, size in layout.items():
            offsets[name] = total
            total += (size + 127) // 64 * 64  # a free line between buffers
        return offsets, (total + _PAGE) // _PAGE * _PAGE

    @staticmethod
    def _list_bytes(c: ModelConfig) -> int:
        """Of a list of one token's neurons, or of its inputs."""
        return 4 * (_padded(max(*c.n_ff, c.n_embd)) + LIST_PADDING)

    def _make_arena(self, c: ModelConfig, n_threads: int) -> None:
        offsets, self.arena_size = self._arena(c)
        self.ld_list = self._list_bytes(c)
        self.arena = self._new(self.arena_size * n_threads)
        self.private = {name: self.arena + offset for name, offset in offsets.items()}
        at = self.private
        widths = {"h": c.n_embd, "hq": self._widths(c)["hq"], "hidden": _rank(c), "acc": c.n_embd}
        self._token_areas = {
            name: Area(at.get(name, 0), 4 * _padded(width), at.get(name + "_b", 0), 2 * _padded(width))
            for name, width in widths.items()
        }

    def token_area(self, name: str) -> Area:
        """Where the token program finds a buffer: private ones as thread 0 sees them."""
        return self._token_areas.get(name) or self.shared[name]
