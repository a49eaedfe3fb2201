"""Vocabulary of a model: the `tokenizer.*` keys of a GGUF, every one checked.

In: GGUF metadata. Out: a frozen Vocabulary (texts, types, merges or scores, special ids). Next: vocab_models.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import concat, itemgetter
from typing import Any

import numpy as np

from hotcold.runtime import pretokenizers
from hotcold.runtime.errors import HotcoldError

P = "tokenizer.ggml."


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Texts that end a model's turn when they are control tokens; files often name only one of several.
END_TEXTS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> [e~[ "
    "<\uff5cend\u2581of\u2581sentence\uff5c>".split()
)
# A code model that starts another file has finished as well.
FILE_END_TEXTS = frozenset(
    "<|fim_pad|> <fim-pad> <fim_pad> <PAD> <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>".split()
)
END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# Formats in which "<|end|>" separates parts of one turn.
_END_IS_INNER = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"}, {"<|call|>", "<|flush|>"})


@dataclass(frozen=True)
class Vocabulary:
    """Checked vocabulary. Ids index `tokens` and `types`."""

    kind: str  # "spm" | "bpe"
    pre: str  # key of pretokenizers.KINDS; "" for spm
    tokens: Sequence[str]  # [n_vocab] byte-level characters (bpe) or U+2581 for spaces (spm); control tokens as text
    types: np.ndarray  # uint8 [n_vocab], TokenType
    scores: np.ndarray | None  # float32 [n_vocab], spm only
    merges: Sequence[tuple[str, str]]  # bpe only
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    eog_ids: frozenset[int]  # every id that ends a turn
    add_bos: bool
    add_eos: bool
    space_prefix: bool  # spm: a space is put before text and taken away again
    strip_right: bool  # spaces after a special token belong to it (Phi-3)
    chat_template: str | None

    def ids_of(self, *types: TokenType) -> list[int]:
        """Ids of the given types, ascending."""
        return np.flatnonzero(np.isin(self.types, types)).tolist()


class _Keys:
    """Typed access to metadata; errors name file, key, what was found and what is allowed."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.metadata = metadata
        self.where = where

    def error(self, key: str, text: str) -> HotcoldError:
        return HotcoldError(f"{self.where}: {key}: {text}")

    def get(self, key: str, allowed: type, default: Any) -> Any:
        value = self.metadata.get(key)
        if value is None:
            return default
        if not isinstance(value, allowed) or (allowed is int and isinstance(value, bool)):
            raise self.error(key, f"found {type(value).__name__}, allowed: {allowed.__name__}")
        return value

    def strings(self, key: str) -> list[str]:
        value = self.metadata.get(key)
        if value is None:
            raise self.error(key, "missing; the file has no complete vocabulary, convert the model again")
        if not isinstance(value, list) or not set(map(type, value)) <= {str}:
            raise self.error(key, f"found {type(value).__name__}, allowed: an array of strings")
        return value

    def numbers(self, key: str, kinds: str, n: int) -> np.ndarray | None:
        """Array of `n` numbers whose dtype kind is in `kinds` ("iu", "iuf"), None when the key is absent."""
        value = self.metadata.get(key)
        if value is None:
            return None
        value = np.asarray(value)
        if value.dtype.kind not in kinds or value.ndim != 1:
            allowed = "numbers" if "f" in kinds else "integers"
            raise self.error(key, f"found an array of {value.dtype}, allowed: {allowed}")
        if len(value) != n:
            raise self.error(key, f"found {len(value)} entries, allowed: {n}, one for each of {P}tokens")
        return value

    def token_id(self, name: str, n: int, default: int | None = None) -> int | None:
        key = f"{P}{name}_token_id"
        value = self.get(key, int, default)
        if value is not None and not 0 <= value < n:
            if key not in self.metadata:
                return None
            raise self.error(key, f"found {value}, allowed: 0 to {n - 1}")
        return value


def read_vocabulary(metadata: Mapping[str, Any], where: str = "GGUF") -> Vocabulary:
    """Check the `tokenizer.*` keys. `where`: the file's name for errors. Raises HotcoldError naming the key."""
    keys = _Keys(metadata, where)
    model = keys.get(P + "model", str, None)
    if model not in ("llama", "gpt2"):
        raise keys.error(P + "model", f"found {model!r}, supported: 'llama' (SentencePiece), 'gpt2' (byte-level BPE)")
    spm = model == "llama"
    tokens = _tokens(keys)
    n = len(tokens)
    types = _types(keys, n, spm)
    pre = "" if spm else keys.get(P + "pre", str, "default")
    row = None if spm else pretokenizers.kind(pre)
    bos_id, eos_id = keys.token_id("bos", n, 1 if spm else None), keys.token_id("eos", n, 2 if spm else None)
    _settle_types(tokens, types)
    ends = _end_ids(keys, tokens, types, eos_id)
    add_bos = keys.get(P + "add_bos_token", bool, spm if row is None else row.add_bos)
    add_eos = keys.get(P + "add_eos_token", bool, False)
    for add, token_id, name in ((add_bos, bos_id, "bos"), (add_eos, eos_id, "eos")):
        if add and token_id is None:
            raise keys.error(f"{P}{name}_token_id", f"missing, needed because {P}add_{name}_token is true")
    types.flags.writeable = False
    return Vocabulary(
        kind="spm" if spm else "bpe",
        pre=pre,
        tokens=tokens,
        types=types,
        scores=_scores(keys, n) if spm else None,
        merges=() if spm else _merges(keys, tokens),
        bos_id=bos_id,
        eos_id=eos_id,
        unk_id=keys.token_id("unknown", n, 0 if spm else None),
        eog_ids=ends,
        add_bos=add_bos,
        add_eos=add_eos,
        space_prefix=spm and keys.get(P + "add_space_prefix", bool, True),
        # GGUF has no place for this property of single tokens, so llama.cpp too goes by the model's name.
        strip_right=spm and re.search("phi-?3", keys.get("general.name", str, "").lower()) is not None,
        chat_template=keys.get("tokenizer.chat_template", str, None),
    )


def _tokens(keys: _Keys) -> list[str]:
    key = P + "tokens"
    tokens = keys.strings(key)
    if not tokens:
        raise keys.error(key, "found no tokens")
    if "" in tokens:  # a hole in the numbering; a name nobody types keeps texts unique
        tokens = [t or f"[EMPTY_{i}]" for i, t in enumerate(tokens)]
    if len(set(tokens)) != len(tokens):
        seen: dict[str, int] = {}
        for i, t in enumerate(tokens):
            if t in seen:
                raise keys.error(key, f"{ascii(t[:60])} is both token {seen[t]} and token {i}")
            seen[t] = i
    try:
        "".join(tokens).encode("utf-8")  # all at once: a start-up waits for this
    except UnicodeEncodeError:
        i, t = next((i, t) for i, t in enumerate(tokens) if any("\ud800" <= c < "\ue000" for c in t))
        raise keys.error(key, f"token {i} is not UTF-8: {ascii(t[:60])}") from None
    return tokens


def _types(keys: _Keys, n: int, spm: bool) -> np.ndarray:
    key = P + "token_type"
    values = keys.numbers(key, "iu", n)
    if values is None:
        if spm:
            raise keys.error(key, "missing; a SentencePiece vocabulary needs it")
        return np.full(n, TokenType.NORMAL, np.uint8)
    bad = np.flatnonzero((values < 0) | (values > TokenType.BYTE))
    if len(bad):
        raise keys.error(key, f"token {bad[0]} has type {values[bad[0]]}, allowed: 0 to {int(TokenType.BYTE)}")
    return values.astype(np.uint8)


def _scores(keys: _Keys, n: int) -> np.ndarray:
    key = P + "scores"
    scores = keys.numbers(key, "iuf", n)
    if scores is None:
        raise keys.error(key, "missing; a SentencePiece vocabulary needs it")
    bad = np.flatnonzero(~np.isfinite(scores))
    if len(bad):
        raise keys.error(key, f"token {bad[0]} has score {scores[bad[0]]}, allowed: finite numbers")
    return scores.astype(np.float32)


def _merges(keys: _Keys, tokens: list[str]) -> list[tuple[str, str]]:
    key = P + "merges"
    known = set(tokens)
    lines = keys.strings(key)
    out: list[tuple[str, str]] = [tuple(line.split(" ")) for line in lines]  # type: ignore[misc]
    if set(map(len, out)) <= {2}:
        left_of, right_of = (tuple(map(itemgetter(side), out)) for side in (0, 1))
        if all(map(known.issuperset, (left_of, right_of, map(concat, left_of, right_of)))):
            return out
    for i, pair in enumerate(out):
        if len(pair) != 2 or not pair[0] or not pair[1]:
            raise keys.error(key, f"entry {i} is {ascii(lines[i][:60])}, allowed: two tokens with a space between")
        left, right = pair
        if left not in known or right not in known or left + right not in known:
            unknown = next(t for t in (left, right, left + right) if t not in known)
            raise keys.error(key, f"entry {i} ({ascii(lines[i][:60])}) needs {ascii(unknown[:60])}, not in {P}tokens")
    return out


def _settle_types(tokens: Sequence[str], types: np.ndarray) -> None:
    """Correct what converters are known to get wrong. Changes `types`."""
    for i in np.flatnonzero(types == TokenType.USER_DEFINED).tolist():
        text = tokens[i]
        if text == f"[PAD{i}]":
            types[i] = TokenType.UNUSED  # filling up to the embedding's rows
        elif text in END_TEXTS or text in FILE_END_TEXTS:
            types[i] = TokenType.CONTROL  # or anyone could end a turn by writing it


def _end_ids(keys: _Keys, tokens: Sequence[str], types: np.ndarray, eos_id: int | None) -> frozenset[int]:
    control = np.flatnonzero(types == TokenType.CONTROL).tolist()
    ends = {i for i in control if tokens[i] in END_TEXTS or tokens[i] in FILE_END_TEXTS}
    texts = {tokens[i] for i in ends}
    named = [eos_id, *(keys.token_id(name, len(tokens)) for name in END_KEYS[1:])]
    if any(inner <= texts for inner in _END_IS_INNER):
        ends = {i for i in ends if tokens[i] != "<|end|>"}
    return frozenset(ends | {i for i in named if i is not None})
