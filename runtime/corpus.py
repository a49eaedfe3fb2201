"""Text to the contexts that are profiled: which text, in which pieces, in which order.

In: text files, or the bundled texts of runtime/data; a tokenizer. Out: Corpus, Contexts. Next: placement/counting.py,
convert/relufy_text.py.

A form feed separates documents, and every file is one: no context holds the end of one and the beginning of another.
Which contexts a run takes, and which tokens it samples, depends on nothing but the text and the numbers asked for. So
shards, workers and resumed runs add up to the same whole.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import safe_text
from hotcold.runtime.tokenizer import Tokenizer

DATA = Path(__file__).with_name("data")
CALIBRATION, HELDOUT = DATA / "calibration.txt", DATA / "heldout.txt"

SEPARATOR = "\f"
MAX_TEXT = 1 << 30  # bytes of all files: the text and its tokens are in memory
PIECE = 1 << 20  # characters given to the tokenizer at once
SHORTEST = 8  # the rest of a document is a context of its own if it has an eighth of one


@dataclass(frozen=True)
class Corpus:
    """Documents, with a name for people and a hash for machines."""

    name: str
    sha256: str  # of the bytes; of several files: of their hashes in hex, one after the other
    documents: tuple[str, ...]


@dataclass(frozen=True)
class Contexts:
    """Token ids of one run, all shards: i32 arrays of at most n_ctx tokens."""

    corpus: str
    sha256: str
    n_ctx: int
    bos: bool  # each begins with the model's BOS, which is computed but not counted
    tokens: tuple[np.ndarray, ...]

    def counted(self, index: int) -> int:
        """Tokens of a context that are counted."""
        return len(self.tokens[index]) - self.bos

    def starts(self) -> np.ndarray:
        """i64 [contexts + 1]: number, within the run, of the first counted token of each context."""
        sizes = [self.counted(i) for i in range(len(self.tokens))]
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def read_corpus(paths: Sequence[str | os.PathLike[str]] = ()) -> Corpus:
    """The text of these files; without any, the bundled calibration text. Raises HotcoldError naming the file."""
    files = [Path(p) for p in paths] or [CALIBRATION]
    hashes, documents, left = [], [], MAX_TEXT
    for path in files:
        raw = _read(path, left)
        left -= len(raw)
        hashes.append(hashlib.sha256(raw).hexdigest())
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as e:
            raise HotcoldError(
                f"{safe_text(str(path))}: is not UTF-8: byte {e.start} is {raw[e.start]:#04x}: convert it, for "
                "example with iconv"
            ) from None
        documents += [d for d in text.removeprefix("\ufeff").split(SEPARATOR) if d.strip()]
    name = "hotcold calibration text" if not paths else ", ".join(safe_text(p.name, 60) for p in files[:4])
    if len(files) > 4:
        name += f" and {len(files) - 4} more"
    digest = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    return Corpus(name, digest, tuple(documents))


def _read(path: Path, limit: int) -> bytes:
    shown = safe_text(str(path))
    try:
        if path.is_dir():
            raise HotcoldError(f"{shown}: is a folder: give text files")
        with open(path, "rb") as file:
            raw = file.read(limit + 1)
    except (OSError, ValueError) as e:  # ValueError: a NUL in the path
        raise HotcoldError(f"{shown}: cannot be read: {getattr(e, 'strerror', None) or e}") from None
    if len(raw) > limit:
        raise HotcoldError(f"{shown}: more than {MAX_TEXT >> 30} GiB of text: give a part of it; profiles of "
                           "several parts add up with hotcold profile merge")  # fmt: skip
    return raw


def cut_contexts(corpus: Corpus, tokenizer: Tokenizer, n_ctx: int, n_tokens: int | None) -> Contexts:
    """Contexts of about n_tokens tokens in all (None: all of the text), taken evenly from the whole text.

    Raises HotcoldError when the text does not fill one context.
    """
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    size = n_ctx - len(bos)
    if size < 2:
        raise HotcoldError(f"a context of {n_ctx} tokens is too short to profile: pairs of tokens are counted")
    pieces, total = [], 0
    for document in corpus.documents:
        ids = np.concatenate([_encode(tokenizer, piece) for piece in pieces_of(document, PIECE)])
        total += len(ids)
        parts = [ids[i : i + size] for i in range(0, len(ids), size)]
        pieces += [p for p in parts if len(p) >= max(2, size // SHORTEST)]
    if sum(map(len, pieces)) < size:
        raise HotcoldError(
            f"the text ({corpus.name}) is too short: {total} tokens, at least {size} are needed; give more text or a "
            "smaller --ctx"
        )
    if n_tokens is not None:
        wanted = min(len(pieces), max(1, n_tokens // size))
        pieces = [pieces[i * len(pieces) // wanted] for i in range(wanted)]
    head = np.asarray(bos, np.int32)
    tokens = tuple(np.concatenate([head, p]).astype(np.int32) for p in pieces)
    return Contexts(corpus.name, corpus.sha256, n_ctx, bool(bos), tokens)


def _encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    return np.asarray(tokenizer.encode(text, add_special=False), np.int32)


def pieces_of(document: str, size: int) -> Iterator[str]:
    """A document in pieces of about `size` characters that end with a line, where there are lines."""
    start = 0
    while start < len(document):
        end = start + size
        if end < len(document):
            end = document.rfind("\n", start, end) + 1 or end
        yield document[start:end]
        start = end


def sampled(first: int, n: int, limit: int, total: int) -> np.ndarray:
    """Which of the counted tokens first..first+n-1 are kept for training predictors: i64 positions from 0 to n-1.

    Evenly spread: of all `total` tokens exactly min(limit, total), whoever counts them.
    """
    if limit >= total:
        return np.arange(n)
    # Python's integers where the product would not fit into 64 bits.
    wide = (first + n + 1) * limit > np.iinfo(np.int64).max
    marks = np.arange(first, first + n + 1).astype(object if wide else np.int64) * limit // total
    return np.flatnonzero(marks[1:] > marks[:-1])
