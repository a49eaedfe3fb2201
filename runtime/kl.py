"""llama.cpp's file of log-probabilities ("KL divergence base"): read with suspicion, and written.

In: a path, or logits. Out: the tokens a base was computed from and its rows. Next: kl_stats.py, perplexity.py.

Little-endian, without padding:
    "_logits_", i32 n_ctx, i32 n_vocab, i32 n_chunk, i32 tokens[n_chunk * n_ctx]  (as in the text, no BOS put in)
    per chunk n_ctx - 1 - n_ctx // 2 rows, for the positions n_ctx // 2 to n_ctx - 2, each
        f32 scale, f32 low, u16 q[n_vocab], one u16 of padding where n_vocab is odd:  log p = low + scale * q
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import safe_text

MAGIC = b"_logits_"
HEADER = struct.Struct("<8siii")
MIN_CTX = 8  # fewer tokens leave hardly one to score
MAX_CTX = 1 << 24
STEPS = 65535  # of a row between its lowest and its highest log-probability
RANGE = np.float32(16)  # what is further below the highest logit counts as this far below
_HEAD = 4  # u16 in front of a row's values: scale and low


@dataclass(frozen=True)
class LogSoftmax:
    """Logits of some positions, shifted: log p = shifted - log_sum."""

    shifted: np.ndarray  # f32 [n, n_vocab], the highest is 0
    log_sum: np.ndarray  # f64 [n]

    def nll(self, targets: np.ndarray) -> np.ndarray:
        """f64 [n]: -log p of one token per position."""
        result: np.ndarray = self.log_sum - self.shifted[np.arange(len(targets)), targets]
        return result


def log_softmax(logits: np.ndarray) -> LogSoftmax:
    """logits: f32 [n, n_vocab]. Raises HotcoldError where one is NaN or infinite."""
    with np.errstate(all="ignore"):
        shifted = logits - logits.max(axis=1, keepdims=True)
        sums = np.exp(shifted).sum(axis=1, dtype=np.float64)
    # Infinities become NaN here or above: one look at the sums finds both; -inf alone needs the minimum.
    if not (np.isfinite(sums).all() and np.isfinite(shifted.min())):
        raise HotcoldError("the model's logits are NaN or infinite: the model is damaged, or its activations overflow")
    return LogSoftmax(shifted, np.log(sums))


def row_width(n_vocab: int) -> int:
    """u16 per row."""
    return 2 * ((n_vocab + 1) // 2) + _HEAD


def n_scored(n_ctx: int) -> int:
    """Positions of a chunk whose next token is scored: the second half, but for the last."""
    return n_ctx - 1 - n_ctx // 2


def base_bytes(n_ctx: int, n_vocab: int, n_chunk: int) -> int:
    """Size of the file."""
    return HEADER.size + 4 * n_ctx * n_chunk + 2 * n_chunk * n_scored(n_ctx) * row_width(n_vocab)


# ------------------------------------------------------------------ writing


def write_header(file: BinaryIO, tokens: np.ndarray, n_vocab: int) -> None:
    """tokens: int [n_chunk, n_ctx]."""
    n_chunk, n_ctx = tokens.shape
    file.write(HEADER.pack(MAGIC, n_ctx, n_vocab, n_chunk))
    file.write(np.ascontiguousarray(tokens, "<i4").data)


def encode_rows(values: LogSoftmax) -> np.ndarray:
    """u16 [n, row_width]: the rows of some positions."""
    n, n_vocab = values.shifted.shape
    low = np.maximum(values.shifted.min(axis=1), -RANGE)  # f32 [n]
    scale = np.abs(low) / np.float32(STEPS)
    usable = scale > 1e-30  # the inverse of less is infinite
    inverse = np.divide(np.float32(1), scale, out=np.zeros(n, np.float32), where=usable)
    steps = (values.shifted - low[:, None]) * inverse[:, None]
    rows = np.zeros((n, row_width(n_vocab)), "<u2")
    rows[:, _HEAD : _HEAD + n_vocab] = np.clip(np.rint(steps, out=steps), 0, STEPS, out=steps)
    head = np.stack([scale, low - values.log_sum.astype(np.float32)], axis=1).astype("<f4")
    rows[:, :_HEAD] = head.view("<u2")
    return rows


# ------------------------------------------------------------------ reading


class Base:
    """A base file, mapped. A context manager.

    tokens: i32 [n_chunk, n_ctx], each inside the vocabulary.
    """

    def __init__(self, path: str | os.PathLike[str], n_vocab: int) -> None:
        """Raises HotcoldError for what is no complete base of a model with `n_vocab` tokens."""
        self.path = Path(path)
        self._shown = safe_text(str(path))
        self._map = self._opened()
        try:
            self.n_ctx, self.n_vocab, self.n_chunk = self._header(n_vocab)
            count = self.n_ctx * self.n_chunk
            self.tokens = np.frombuffer(self._map, "<i4", count, HEADER.size).reshape(self.n_chunk, self.n_ctx).copy()
            self._check_tokens()
        except BaseException:
            self._map.close()
            raise

    def _opened(self) -> mmap.mmap:
        try:
            if not stat.S_ISREG(os.stat(self.path).st_mode):  # before open(): opening a FIFO would wait for a writer
                raise HotcoldError(f"{self._shown}: is not a regular file")
            with open(self.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < HEADER.size:
                    raise HotcoldError(f"{self._shown}: is no file of log-probabilities: it has {size} bytes, the "
                                       f"header alone {HEADER.size}")  # fmt: skip
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as e:
            raise HotcoldError(f"{self._shown}: cannot be read: {getattr(e, 'strerror', None) or e}") from None

    def _header(self, model_vocab: int) -> tuple[int, int, int]:
        magic, n_ctx, n_vocab, n_chunk = HEADER.unpack_from(self._map, 0)
        if magic != MAGIC:
            raise HotcoldError(f"{self._shown}: is no file of log-probabilities: it begins with {magic!r}, "
                               f"not {MAGIC!r}")  # fmt: skip
        for name, value, low, high in (("n_ctx", n_ctx, MIN_CTX, MAX_CTX), ("n_vocab", n_vocab, 1, 1 << 30),
                                       ("n_chunk", n_chunk, 1, 1 << 30)):  # fmt: skip
            if not low <= value <= high:
                raise HotcoldError(f"{self._shown}: {name} is {value}, allowed are {low} to {high}: the file is "
                                   "damaged")  # fmt: skip
        if n_vocab != model_vocab:
            raise HotcoldError(f"{self._shown}: was made by a model with {n_vocab} tokens in its vocabulary, this one "
                               f"has {model_vocab}: compare models with the same vocabulary")  # fmt: skip
        size, expected = len(self._map), base_bytes(n_ctx, n_vocab, n_chunk)
        if size != expected:
            raise HotcoldError(f"{self._shown}: {n_chunk} chunks of {n_ctx} tokens take {expected} bytes, the file has "
                               f"{size}: it is {'incomplete' if size < expected else 'damaged'}")  # fmt: skip
        return n_ctx, n_vocab, n_chunk

    def _check_tokens(self) -> None:
        bad = (self.tokens < 0) | (self.tokens >= self.n_vocab)
        if bad.any():
            chunk, at = np.argwhere(bad)[0]
            raise HotcoldError(f"{self._shown}: token {at} of chunk {chunk} is {self.tokens[chunk, at]}, the "
                               f"vocabulary has {self.n_vocab}: the file is damaged")  # fmt: skip

    def log_probs(self, chunk: int, first: int, last: int) -> np.ndarray:
        """f32 [last - first, n_vocab]: rows first to last - 1 of a chunk. Raises HotcoldError for impossible ones."""
        width = row_width(self.n_vocab)
        start = HEADER.size + self.tokens.nbytes + 2 * width * (chunk * n_scored(self.n_ctx) + first)
        rows = np.frombuffer(self._map, "<u2", (last - first) * width, start).reshape(-1, width)
        head = rows[:, :_HEAD].copy().view("<f4").astype(np.float32)  # [n, 2]
        scale, low = head[:, :1], head[:, 1:]
        with np.errstate(all="ignore"):  # numbers from a stranger
            # A probability is at most 1; and what the format cannot have made would overflow later on.
            fine = np.isfinite(head).all(axis=1) & (head[:, 0] >= 0) & (head[:, 1] + head[:, 0] * STEPS <= 1e-2)
        if not fine.all():
            row = int(np.argmin(fine))
            raise HotcoldError(f"{self._shown}: row {first + row} of chunk {chunk} has scale {scale[row, 0]:g} and "
                               f"lowest log-probability {low[row, 0]:g}, which no probabilities have: the file is "
                               "damaged")  # fmt: skip
        values = rows[:, _HEAD : _HEAD + self.n_vocab].astype(np.float32)
        values *= scale
        values += low
        return values

    def close(self) -> None:
        try:
            self._map.close()
        except BufferError:  # a view is still in use: the mapping goes with it
            pass

    def __enter__(self) -> Base:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
