"""Text -> contexts of tokens, all of one length: those relufication is fitted on, and those it is judged by.

In: text files, or the texts that come with hotcold; a tokenizer. Out: int32 [contexts, length]. Next: relufy_layers.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np

from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import safe_text
from hotcold.runtime.tokenizer import Tokenizer

CALIBRATION, HELD_OUT = "calibration.txt", "heldout.txt"  # of the package's data
SEPARATOR = "\f"  # between documents
MAX_TEXT = 1 << 30  # bytes
PIECE = 1 << 14  # characters: a text longer than needed is taken in pieces from all over it


def read_text(paths: Sequence[Path], bundled: str) -> str:
    """The text of the files, or of the bundled one where there are none. Raises HotcoldError naming the file."""
    if not paths:
        return files("hotcold.placement").joinpath("data", bundled).read_text("utf-8")
    left, parts = MAX_TEXT, []
    for path in paths:
        raw = _read(path, left)
        left -= len(raw)
        try:
            parts.append(raw.decode("utf-8").removeprefix("\ufeff"))
        except UnicodeDecodeError as e:
            raise HotcoldError(f"{safe_text(str(path))}: is not UTF-8: byte {e.start} is {raw[e.start]:#04x}: convert "
                               "it, for example with iconv") from None
    return SEPARATOR.join(parts)


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
        raise HotcoldError(f"{shown}: more than {MAX_TEXT >> 30} GiB of text: give a part of it")
    return raw


def make_contexts(text: str, tokenizer: Tokenizer, length: int, n_tokens: int, at_least: int, seed: int,
                  what: str) -> np.ndarray:
    """i32 [n, length] with about n_tokens tokens, or what the text has of them; each begins with BOS where models do.

    Which parts of a longer text are taken follows from `seed`. Raises HotcoldError for fewer than at_least contexts.
    """
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    body = length - len(bos)
    wanted = max(at_least, n_tokens // length)
    pieces = list(_pieces(text))
    stream: list[int] = []
    for index in np.random.default_rng(seed).permutation(len(pieces)):
        stream += tokenizer.encode(pieces[index], add_special=False)
        if len(stream) >= wanted * body:
            break
    n = min(wanted, len(stream) // body)
    if n < at_least:
        raise HotcoldError(f"{what} is too short: it has {len(stream)} tokens, at least {at_least * body} are needed: "
                           "give a longer text")
    contexts = np.empty((n, length), np.int32)
    contexts[:, :len(bos)] = bos
    contexts[:, len(bos):] = np.reshape(stream[:n * body], (n, body))
    return contexts


def _pieces(text: str) -> Iterator[str]:
    """Pieces of about PIECE characters, none of which crosses a document's end; they end with a line if they can."""
    for document in text.split(SEPARATOR):
        start = 0
        while start < len(document):
            end = start + PIECE
            if end < len(document):
                end = document.rfind("\n", start, end) + 1 or end
            if document[start:end].strip():
                yield document[start:end]
            start = end
