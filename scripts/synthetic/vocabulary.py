"""A vocabulary that spells any text.

In: its size. Out: metadata of a sentencepiece tokenizer. Next: model.py.
"""

from __future__ import annotations

import itertools
import string

import gguf
from gguf import GGUFValueType as V

from hotcold.convert.model import Metadata, array, u32
from hotcold.convert.model import string as text
from hotcold.runtime.errors import HotcoldError


def vocabulary(size: int) -> Metadata:
    """Control tokens, the 256 bytes, characters, then letter combinations. Raises HotcoldError."""
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL] + [gguf.TokenType.BYTE] * 256
    letters = string.ascii_lowercase
    pieces = itertools.chain(
        ["▁"],
        string.ascii_letters + string.digits + string.punctuation,
        (start + "".join(p) for n in range(1, 5) for start in ("▁", "") for p in itertools.product(letters, repeat=n)),
    )
    unique = list(dict.fromkeys(itertools.islice(pieces, 2 * size)))[: max(0, size - len(tokens))]
    if len(tokens) + len(unique) != size:
        raise HotcoldError(f"no vocabulary of {size} tokens: {len(tokens)} to {len(tokens) + len(unique)} are possible")
    scores = [0.0] * len(tokens) + [-float(rank) for rank in range(len(unique))]
    kinds += [gguf.TokenType.NORMAL] * len(unique)
    return {
        "tokenizer.ggml.model": text("llama"),
        "tokenizer.ggml.pre": text("default"),
        "tokenizer.ggml.tokens": array([token.encode() for token in tokens + unique], V.STRING),
        "tokenizer.ggml.scores": array(scores, V.FLOAT32),
        "tokenizer.ggml.token_type": array([int(kind) for kind in kinds], V.INT32),
        "tokenizer.ggml.bos_token_id": u32(1),
        "tokenizer.ggml.eos_token_id": u32(2),
        "tokenizer.ggml.unknown_token_id": u32(0),
    }
