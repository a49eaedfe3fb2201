"""Text -> contexts of tokens, all of one length: those relufication is fitted on, and those it is judged by.

In: Corpus, a tokenizer. Out: int32 [contexts, length]. Next: relufy_layers.py.
"""

from __future__ import annotations

import numpy as np

from hotcold.runtime.corpus import Corpus, pieces_of
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.tokenizer import Tokenizer

PIECE = 1 << 14  # characters: a text longer than needed is taken in pieces from all over it


def make_contexts(text: Corpus, tokenizer: Tokenizer, length: int, n_tokens: int, at_least: int, seed: int,
                  what: str) -> np.ndarray:
    """i32 [n, length] with about n_tokens tokens, or what the text has of them; each begins with BOS where models do.

    Which parts of a longer text are taken follows from `seed`. Raises HotcoldError for fewer than at_least contexts.
    """
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    body = length - len(bos)
    wanted = max(at_least, n_tokens // length)
    pieces = [piece for document in text.documents for piece in pieces_of(document, PIECE) if piece.strip()]
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
