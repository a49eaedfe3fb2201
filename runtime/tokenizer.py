"""Text to token ids and back.

In: a GGUF's vocabulary (vocab.py) and text. Out: token ids, text, a decoder for streaming. Next: chat.py.

Special tokens are cut out of the text first (longest match at the leftmost place, as Hugging Face does), the runs
between go to the vocabulary's model. With parse_special=False only user-defined tokens are cut out, never control
tokens: that is the mode for text from people. Thread-safe after construction.
"""

from __future__ import annotations

import codecs
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as _Library

from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import GGUFFile, open_gguf, safe_text
from hotcold.runtime.vocab import TokenType, Vocabulary, read_vocabulary
from hotcold.runtime.vocab_models import BPEModel, SPMModel, VocabularyModel

_HIDDEN = (TokenType.CONTROL, TokenType.UNKNOWN)
# llama.cpp and Hugging Face leave these three of Phi-3 their spaces.
_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")


class Tokenizer:
    """Encodes and decodes with a model's vocabulary.

    n_vocab: number of tokens (the embedding may have more rows) · bos_id, eos_id: or None · eog_ids: ids that end a
    turn · add_bos, add_eos: what add_special adds · chat_template: Jinja source from the file, or None.
    """

    def __init__(self, vocabulary: Vocabulary, where: str = "GGUF") -> None:
        self.vocabulary = vocabulary
        self.n_vocab = len(vocabulary.tokens)
        self.bos_id, self.eos_id = vocabulary.bos_id, vocabulary.eos_id
        self.eog_ids = vocabulary.eog_ids
        self.add_bos, self.add_eos = vocabulary.add_bos, vocabulary.add_eos
        self.chat_template = vocabulary.chat_template
        self._model: VocabularyModel
        self._model = SPMModel(vocabulary, where) if vocabulary.kind == "spm" else BPEModel(vocabulary)
        self._hidden = frozenset(vocabulary.ids_of(*_HIDDEN))
        user_defined = vocabulary.ids_of(TokenType.USER_DEFINED)
        self._find_user_defined = _Finder(vocabulary, user_defined)
        self._find_special = _Finder(vocabulary, [*user_defined, *self._hidden])

    @classmethod
    def from_gguf(cls, source: str | os.PathLike[str] | GGUFFile) -> Tokenizer:
        """From a path or an open file; a file with only a vocabulary is enough. Raises HotcoldError."""
        if isinstance(source, GGUFFile):
            return cls.from_metadata(source.metadata, safe_text(str(source.path)))
        with open_gguf(source) as f:
            return cls.from_gguf(f)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], where: str = "GGUF") -> Tokenizer:
        """From `tokenizer.*` keys. `where` is the file's name in errors. Raises HotcoldError naming the key."""
        return cls(read_vocabulary(metadata, where), where)

    def is_control(self, token_id: int) -> bool:
        """Whether the token is not text: control or unknown."""
        return token_id in self._hidden

    def token_text(self, token_id: int) -> str:
        """The token as the file spells it, "" for ids past the vocabulary."""
        return self.vocabulary.tokens[token_id] if 0 <= token_id < self.n_vocab else ""

    def control_texts(self) -> list[str]:
        """Texts of all control tokens."""
        return [self.vocabulary.tokens[i] for i in sorted(self._hidden)]

    def special_texts(self) -> list[str]:
        """Texts of all tokens that are cut out of text: control, unknown, user-defined."""
        return [self.vocabulary.tokens[i] for i in self.vocabulary.ids_of(*_HIDDEN, TokenType.USER_DEFINED)]

    def special_in(self, text: str) -> list[int]:
        """Ids of the control and user-defined tokens that `text` spells, in order."""
        return [i for i, _ in self._find_special.cut(_encodable(text)) if i is not None]

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`.

        add_special: BOS in front and EOS behind where the model wants them; a BOS already there is not doubled.
        parse_special: control tokens written in the text become those tokens.
        Raises HotcoldError for what is not a str, and for lone surrogates, which are no characters.
        """
        ids = self._encode(text, parse_special)
        return self._with_special(ids) if add_special else ids

    def encode_chat(self, rendered: str) -> list[int]:
        """Token ids of a rendered chat template, which brings its own special tokens.

        Only for text no stranger wrote a part of; ChatTemplate.encode is the safe way.
        """
        return self._encode(rendered, parse_special=True)

    def encode_marked(self, text: str, stand_ins: Mapping[str, str]) -> list[int]:
        """Token ids of text in which some characters are replaced by `stand_ins` (stand-in -> original character).

        A stand-in keeps what surrounds it from being a control token; the ids are those of the original characters.
        """
        original = {ord(k): v for k, v in stand_ins.items()}
        ids: list[int] = []
        for token_id, run in self._find_special.cut(_encodable(text)):
            if token_id is not None:
                ids.append(token_id)
            else:
                ids.extend(self._encode(run.translate(original), parse_special=False))
        return ids

    def _encode(self, text: str, parse_special: bool) -> list[int]:
        finder = self._find_special if parse_special else self._find_user_defined
        ids: list[int] = []
        first = True
        for token_id, run in finder.cut(_encodable(text)):
            if token_id is not None:
                ids.append(token_id)
            else:
                ids.extend(self._model.encode(run, first))
            first = token_id is not None
        return ids

    def _with_special(self, ids: list[int]) -> list[int]:
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        if self.add_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids = [*ids, self.eos_id]
        return ids

    def decode(self, ids: Iterable[int], keep_special: bool = False) -> str:
        """Text of `ids`, as Hugging Face decodes it.

        Control tokens are skipped unless keep_special. Bytes that are no UTF-8 become U+FFFD. The space that
        SentencePiece vocabularies put in front of text is taken away. The embedding of a model may have more rows
        than the vocabulary has tokens: ids from n_vocab on are "", up to twice n_vocab or n_vocab + 1024, whichever
        is more. Raises HotcoldError for ids that no model has (negative, larger) and for what is not a whole number.
        """
        ids = self._checked(ids)
        if isinstance(self._model, SPMModel):
            return self._decode_spm(self._model, ids, keep_special)
        return b"".join(self._piece(i, keep_special) for i in ids).decode("utf-8", "replace")

    def _checked(self, ids: Iterable[int]) -> list[int]:
        try:
            each = iter(ids)
        except TypeError:
            raise HotcoldError(f"decode: expected token ids, got {ids!r:.60}: [id] decodes a single one") from None
        limit = max(2 * self.n_vocab, self.n_vocab + 1024)
        checked: list[int] = []
        for token_id in each:
            try:
                number = operator.index(token_id)
            except TypeError:
                raise HotcoldError(f"decode: a token id must be a whole number, got {token_id!r:.60}") from None
            if not 0 <= number < limit:
                raise HotcoldError(f"decode: no token has the id {number}: the vocabulary has {self.n_vocab} tokens")
            checked.append(number)
        return checked

    def _decode_spm(self, model: SPMModel, ids: Iterable[int], keep_special: bool) -> str:
        out: list[str] = []
        run = bytearray()  # of byte tokens: text only if all of it is UTF-8

        def end_run() -> None:
            try:
                out.append(run.decode("utf-8"))
            except UnicodeDecodeError:
                out.append("\ufffd" * len(run))
            run.clear()

        for i in ids:
            piece = self._piece(i, keep_special)
            if model.is_byte(i):
                run += piece
            elif piece:
                end_run()
                out.append(piece.decode("utf-8"))
        end_run()
        text = "".join(out)
        return text[1:] if self.vocabulary.space_prefix and text.startswith(" ") else text

    def _piece(self, token_id: int, keep_special: bool) -> bytes:
        """UTF-8, perhaps a part of a character; b"" for what is not shown."""
        if not 0 <= token_id < self.n_vocab or (token_id in self._hidden and not keep_special):
            return b""
        return self._model.piece(token_id)

    def stream(self, continues: bool = False, keep_special: bool = False) -> Stream:
        """A decoder for tokens that come one at a time.

        continues: the text goes on after other text, so a leading space is part of it (SentencePiece vocabularies);
        otherwise it is taken away as in decode.
        """
        strip = self.vocabulary.space_prefix and not continues
        return Stream(lambda i: self._piece(i, keep_special), strip)


class Stream:
    """Joins tokens to text and gives out whole characters only."""

    def __init__(self, piece: Any, strip_space: bool) -> None:
        self._piece = piece  # id -> bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = strip_space

    def put(self, token_id: int) -> str:
        """The characters this token completes, possibly "". Bytes that cannot become a character are U+FFFD."""
        return self._stripped(self._decoder.decode(self._piece(token_id)))

    def flush(self) -> str:
        """What is left at the end: "" or U+FFFD for a character that was cut off. The stream can go on after it."""
        text = self._stripped(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        return text

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text[1:] if text.startswith(" ") else text
        return text


class _Finder:
    """Cuts given tokens out of text: the leftmost, and of those that start there the longest.

    `tokenizers` does the search: in a vocabulary of just these tokens everything else is one unknown piece.
    """

    def __init__(self, vocabulary: Vocabulary, ids: Iterable[int]) -> None:
        texts = {vocabulary.tokens[i]: i for i in ids}
        self._library: _Library | None = None
        if not texts:
            return
        self._unknown = len(vocabulary.tokens)  # an id no token has
        other = "\0other"
        while other in texts:
            other += "\0"
        self._library = _Library(models.WordLevel(vocab={**texts, other: self._unknown}, unk_token=other))
        self._library.add_tokens([
            AddedToken(t, normalized=False, rstrip=vocabulary.strip_right and t not in _KEEPS_SPACES) for t in texts
        ])  # fmt: skip

    def cut(self, text: str) -> Iterator[tuple[int | None, str]]:
        """Parts of `text` in order: (id, "") for a token, (None, run) for text between."""
        if not text:
            return
        if self._library is None:
            yield None, text
            return
        found = self._library.encode(text, add_special_tokens=False)
        for token_id, (start, end) in zip(found.ids, found.offsets, strict=True):
            yield (None, text[start:end]) if token_id == self._unknown else (token_id, "")


def _encodable(text: str) -> str:
    """Surrogate pairs joined: the libraries take only real characters. Raises HotcoldError for anything else."""
    if not isinstance(text, str):
        raise HotcoldError(f"encode: the text must be a str, got {text!r:.60}")
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return _joined(text)
    return text


def _joined(text: str) -> str:
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        at, code = next((i, ord(c)) for i, c in enumerate(text) if 0xD800 <= ord(c) < 0xE000)
        raise HotcoldError(
            f"encode: the text has half a surrogate pair (U+{code:04X} near character {at}), which is no character"
        ) from None
