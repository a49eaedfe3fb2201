"""The two kinds of vocabulary as objects that turn plain text into ids and ids into bytes.

In: a Vocabulary. Out: BPEModel or SPMModel, working on text without special tokens. Next: tokenizer.py.

Merging is done by `tokenizers` (BPE) and `sentencepiece` (SPM). Neither model knows the control tokens, so plain text
can never become one.
"""

from __future__ import annotations

from typing import Any, Protocol

import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as _pb2
from tokenizers import Tokenizer, models

from hotcold.runtime import pretokenizers
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.vocab import P, TokenType, Vocabulary

SPACE = "\u2581"  # how SentencePiece writes a space


class VocabularyModel(Protocol):
    """What Tokenizer needs of either kind."""

    def encode(self, text: str, first: bool) -> list[int]:
        """Ids of text in which no special token is looked for. `first`: it starts the text or follows a special."""

    def piece(self, token_id: int) -> bytes:
        """UTF-8 (or a part of it) that the token stands for."""


def _byte_alphabet() -> dict[str, int]:
    """Printable character -> byte, GPT-2's mapping."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in plain}
    shifted = [b for b in range(256) if chr(b) not in table]
    table.update({chr(256 + i): b for i, b in enumerate(shifted)})
    return table


pb2: Any = _pb2  # made at import time, so mypy cannot see its members
_BYTE_OF = _byte_alphabet()


class BPEModel:
    """Byte-level BPE."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens, self._types = vocabulary.tokens, vocabulary.types.tobytes()
        row = pretokenizers.kind(vocabulary.pre)
        hidden = set(vocabulary.ids_of(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED))
        vocab = {t: i for i, t in enumerate(vocabulary.tokens) if i not in hidden}
        merges = vocabulary.merges
        if hidden:
            texts = {vocabulary.tokens[i] for i in hidden}
            merges = [m for m in merges if m[0] + m[1] not in texts and m[0] not in texts and m[1] not in texts]
        self._tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges), ignore_merges=row.ignore_merges))
        normalizer, self._tokenizer.pre_tokenizer = pretokenizers.build(row)
        if normalizer is not None:
            self._tokenizer.normalizer = normalizer

    def encode(self, text: str, first: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def piece(self, token_id: int) -> bytes:
        text = self._tokens[token_id]
        if self._types[token_id] == TokenType.NORMAL:
            try:
                return bytes([_BYTE_OF[c] for c in text])
            except KeyError:
                pass  # an added token stored as normal: its text is meant as it is
        return text.encode("utf-8")


class SPMModel:
    """SentencePiece BPE: pieces merge in the order of their scores, unknown characters become byte tokens."""

    def __init__(self, vocabulary: Vocabulary, where: str = "GGUF") -> None:
        self._tokens = vocabulary.tokens
        self._prefix = SPACE if vocabulary.space_prefix else ""
        self._byte_of = _byte_tokens(vocabulary, where)
        self._n_vocab = len(vocabulary.tokens)
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=self._proto(vocabulary, where))
        except RuntimeError as e:  # its rules differ between versions, so they are not repeated here
            why = ascii(str(e)[:200])
            raise HotcoldError(f"{where}: {P}tokens: sentencepiece refuses the vocabulary: {why}; convert the model "
                               "again") from None  # fmt: skip

    def _proto(self, vocabulary: Vocabulary, where: str) -> bytes:
        """A SentencePiece model with the same ids. The library refuses duplicates and wants one unknown piece."""
        fallback = len(self._byte_of) == 256
        unknown = vocabulary.ids_of(TokenType.UNKNOWN)
        unk_id = vocabulary.unk_id if vocabulary.unk_id in unknown else (unknown[0] if unknown else None)
        if unk_id is None and not fallback:
            raise HotcoldError(f"{where}: {P}token_type: found neither an unknown token nor all 256 byte tokens")
        proto = pb2.ModelProto()
        kinds = pb2.ModelProto.SentencePiece
        # Special tokens are taken out of the text before it comes here: as control pieces they match nothing.
        kind_of = {
            TokenType.NORMAL: kinds.NORMAL, TokenType.UNDEFINED: kinds.NORMAL, TokenType.BYTE: kinds.BYTE,
            TokenType.UNUSED: kinds.UNUSED,
        }  # fmt: skip
        scores = vocabulary.scores if vocabulary.scores is not None else [0.0] * self._n_vocab
        for i, (text, kind, score) in enumerate(zip(vocabulary.tokens, vocabulary.types.tolist(), scores, strict=True)):
            proto.pieces.add(piece=text, score=score, type=kind_of.get(kind, kinds.CONTROL))
            if i == unk_id:
                proto.pieces[i].type = kinds.UNKNOWN
        if unk_id is None:  # never produced: every byte has a token
            name = "<unknown>"
            while name in vocabulary.tokens:
                name += ">"
            proto.pieces.add(piece=name, score=0.0, type=kinds.UNKNOWN)
        proto.trainer_spec.model_type = pb2.TrainerSpec.BPE
        proto.trainer_spec.byte_fallback = fallback
        proto.normalizer_spec.name = "identity"
        proto.normalizer_spec.add_dummy_prefix = False
        proto.normalizer_spec.remove_extra_whitespaces = False
        proto.normalizer_spec.escape_whitespaces = False
        return proto.SerializeToString()

    def encode(self, text: str, first: bool) -> list[int]:
        text = text.replace(" ", SPACE)
        return self._processor.encode(self._prefix + text if first else text)

    def piece(self, token_id: int) -> bytes:
        if token_id in self._byte_of:
            return bytes([self._byte_of[token_id]])
        return self._tokens[token_id].replace(SPACE, " ").encode("utf-8")

    def is_byte(self, token_id: int) -> bool:
        return token_id in self._byte_of


def _byte_tokens(vocabulary: Vocabulary, where: str) -> dict[int, int]:
    """Token id -> byte, for tokens "<0x00>" to "<0xFF>"."""
    out: dict[int, int] = {}
    names = {f"<0x{b:02X}>": b for b in range(256)}
    for i in vocabulary.ids_of(TokenType.BYTE):
        byte = names.get(vocabulary.tokens[i])
        if byte is None:
            found = ascii(vocabulary.tokens[i][:60])
            raise HotcoldError(f"{where}: {P}token_type: token {i} ({found}) is a byte, allowed: <0x00> to <0xFF>")
        out[i] = byte
    if out and len(out) < len(names):
        missing = next(name for name, byte in names.items() if byte not in out.values())
        raise HotcoldError(f"{where}: {P}token_type: found {len(out)} byte tokens, {missing} is not among them; "
                           "allowed: none or all 256")  # fmt: skip
    return out


