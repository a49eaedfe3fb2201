"""Tokenizer files of a Hugging Face folder -> the `tokenizer.*` keys of a GGUF, as llama.cpp writes them.

In: tokenizer.json and/or tokenizer.model (or vocab.json + merges.txt of GPT-2 tokenizers), tokenizer_config.json,
special_tokens_map.json, added_tokens.json, generation_config.json. Out: metadata. Next: vocab_special.py (special ids).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gguf import GGUFValueType, Keys, TokenType
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from hotcold.convert.checkpoint import Checkpoint, typed
from hotcold.convert.model import Metadata, array, boolean, string
from hotcold.convert.precision import Report
from hotcold.convert.vocab_special import SpecialFiles, chat_template_metadata, read_special_files, special_metadata
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.pretokenizers import SPM, identify, spm_space_prefix

_SPM_PB: Any = sentencepiece_model_pb2  # its classes are made at run time, out of a type checker's sight

ADDED_SCORE = -1000.0
PAD_SCORE = -10000.0
NEEDED = "tokenizer.json, or tokenizer.model, or vocab.json and merges.txt of a GPT-2 tokenizer"
# Control tokens that some published tokenizers forget to mark as special.
LOOKS_SPECIAL = (("<|", "|>"), ("<\uff5c", "\uff5c>"))


@dataclass
class Vocab:
    """Tokens by id while they are collected; ids without a token are None."""

    tokens: list[str | None]
    types: list[TokenType]
    scores: list[float] | None = None  # SentencePiece only
    merges: list[str] = field(default_factory=list)  # byte-level BPE only
    pre: str = "default"
    space_prefix: bool | None = None
    spm_ids: dict[str, int] = field(default_factory=dict)  # special ids that tokenizer.model names


def vocabulary_metadata(checkpoint: Checkpoint, n_rows: int, report: Report) -> Metadata:
    """All `tokenizer.*` keys for an embedding of `n_rows` rows; ids without a token become "[PADi]".

    Raises HotcoldError when the files are missing, damaged, of an unsupported kind, or have ids beyond the rows.
    """
    special = read_special_files(checkpoint)
    tokenizer_json = checkpoint.json("tokenizer.json")
    kind = identify(tokenizer_json) if tokenizer_json is not None else None
    has_model = (checkpoint.folder / "tokenizer.model").is_file()
    if kind is not None and kind != SPM:
        if has_model:
            report.note("tokenizer.json is byte-level BPE: tokenizer.model beside it is not used")
        vocab = _from_bpe(tokenizer_json or {}, kind, n_rows)
    elif has_model:
        vocab = _from_sentencepiece(checkpoint, n_rows, tokenizer_json, report)
    elif tokenizer_json is not None:
        vocab = _from_spm_json(tokenizer_json, n_rows)
    else:
        tokenizer_json = _gpt2_files(checkpoint, special)
        vocab = _from_bpe(tokenizer_json, identify(tokenizer_json), n_rows)
    _add_tokens(vocab, special, tokenizer_json, checkpoint, report)
    n_pad = vocab.tokens.count(None)
    if n_pad:
        report.note(f"vocabulary: {n_pad} of {n_rows} rows have no token: filled up as unused [PAD...]")
    tokens = [f"[PAD{i}]" if t is None else t for i, t in enumerate(vocab.tokens)]
    metadata = _token_metadata(vocab, tokens)
    metadata |= special_metadata(special, tokens, tokenizer_json, vocab.scores is not None, vocab.spm_ids, report)
    return metadata | chat_template_metadata(checkpoint, special, report)


def _token_metadata(vocab: Vocab, tokens: list[str]) -> Metadata:
    for i, token in enumerate(tokens):
        try:
            token.encode("utf-8")
        except UnicodeEncodeError:
            raise HotcoldError(f"tokenizer files: token {i} is not valid Unicode: {ascii(token[:60])}") from None
    spm = vocab.scores is not None
    metadata: Metadata = {
        Keys.Tokenizer.MODEL: string("llama" if spm else "gpt2"),
        Keys.Tokenizer.PRE: string(vocab.pre),
        Keys.Tokenizer.LIST: array(tokens, GGUFValueType.STRING),
        Keys.Tokenizer.TOKEN_TYPE: array([int(t) for t in vocab.types], GGUFValueType.INT32),
    }
    if vocab.scores is not None:
        metadata[Keys.Tokenizer.SCORES] = array(vocab.scores, GGUFValueType.FLOAT32)
    if vocab.merges:
        metadata[Keys.Tokenizer.MERGES] = array(vocab.merges, GGUFValueType.STRING)
    if vocab.space_prefix is not None:
        metadata[Keys.Tokenizer.ADD_PREFIX] = boolean(vocab.space_prefix)
    return metadata


def _empty(n_rows: int, spm: bool) -> Vocab:
    return Vocab([None] * n_rows, [TokenType.UNUSED] * n_rows, [PAD_SCORE] * n_rows if spm else None)


def _place(vocab: Vocab, token: str, token_id: Any, where: str) -> None:
    """Put a normal token at its id; HotcoldError for ids that are no rows of the embedding."""
    n = len(vocab.tokens)
    if type(token_id) is not int or not 0 <= token_id < n:
        raise HotcoldError(f"{where}: token {token[:60]!r} has id {token_id}, the embedding has rows 0 to {n - 1}: the "
                           "tokenizer does not belong to these weights")
    vocab.tokens[token_id] = token
    vocab.types[token_id] = TokenType.NORMAL


def _model_vocab(tokenizer_json: dict[str, Any]) -> dict[str, Any]:
    vocab = tokenizer_json["model"].get("vocab")  # identify() has checked that model is an object
    if not isinstance(vocab, dict) or not vocab:
        raise HotcoldError("tokenizer.json: model.vocab is missing or empty: download the file again")
    return vocab


def merge_lines(tokenizer_json: dict[str, Any]) -> list[str]:
    """Merges as "left right", from either form; spaces inside a part are written as llama.cpp's converter does."""
    merges = tokenizer_json["model"].get("merges")
    if not isinstance(merges, list):
        raise HotcoldError("tokenizer.json: model.merges is missing: download the file again")
    lines = []
    for i, merge in enumerate(merges):
        if isinstance(merge, str) and merge.count(" ") == 1:
            lines.append(merge)
        elif isinstance(merge, list) and len(merge) == 2 and all(isinstance(p, str) for p in merge):
            lines.append(" ".join(p.replace(" ", chr(256 + ord(" "))) for p in merge))
        else:
            raise HotcoldError(f"tokenizer.json: model.merges[{i}] is {str(merge)[:60]!r}: allowed are two tokens")
    return lines


def _from_bpe(tokenizer_json: dict[str, Any], pre: str, n_rows: int) -> Vocab:
    vocab = _empty(n_rows, spm=False)
    vocab.pre = pre
    for token, token_id in _model_vocab(tokenizer_json).items():
        _place(vocab, token, token_id, "tokenizer.json")
    vocab.merges = merge_lines(tokenizer_json)
    return vocab


def _from_spm_json(tokenizer_json: dict[str, Any], n_rows: int) -> Vocab:
    """Without tokenizer.model there are no scores: the order of the merges gives an equivalent."""
    vocab = _empty(n_rows, spm=True)
    rank: dict[str, int] = {}
    lines = merge_lines(tokenizer_json)
    for i, line in enumerate(lines):
        rank.setdefault(line.replace(" ", "", 1), i)
    unknown = tokenizer_json["model"].get("unk_token")
    for token, token_id in _model_vocab(tokenizer_json).items():
        _place(vocab, token, token_id, "tokenizer.json")
        vocab.scores[token_id] = float(-rank.get(token, len(lines) + token_id))  # type: ignore[index]
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            vocab.types[token_id] = TokenType.BYTE
        elif token == unknown:
            vocab.types[token_id] = TokenType.UNKNOWN
    vocab.space_prefix = spm_space_prefix(tokenizer_json)
    return vocab


def _from_sentencepiece(checkpoint: Checkpoint, n_rows: int, tokenizer_json: dict[str, Any] | None,
                        report: Report) -> Vocab:
    path = checkpoint.folder / "tokenizer.model"
    model = _SPM_PB.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError:
        model.Clear()
    if not model.pieces:
        raise HotcoldError(f"{path}: not a SentencePiece model: download it again, or add tokenizer.json")
    broken = next((i for i, p in enumerate(model.pieces) if not isinstance(p.piece, str)), None)
    if broken is not None:
        raise HotcoldError(f"{path}: piece {broken} is not UTF-8: download the file again")
    if model.trainer_spec.model_type != _SPM_PB.TrainerSpec.BPE:
        name = _SPM_PB.TrainerSpec.ModelType.Name(model.trainer_spec.model_type)
        raise HotcoldError(f"{path}: SentencePiece model type {name}: supported is BPE")
    if tokenizer_json is not None:
        known = _model_vocab(tokenizer_json)
        if any(known.get(p.piece) != i for i, p in enumerate(model.pieces) if p.piece in known or i < len(known)):
            report.note("tokenizer.model and tokenizer.json differ: tokenizer.json is used, as transformers does")
            return _from_spm_json(tokenizer_json, n_rows)
    if model.normalizer_spec.precompiled_charsmap:
        report.note(f"warning: tokenizer.model normalizes text ({model.normalizer_spec.name}), which the runtime and "
                    "llama.cpp do not: ids of unusual characters may differ from Hugging Face's")
    kinds = _SPM_PB.ModelProto.SentencePiece
    types = {kinds.NORMAL: TokenType.NORMAL, kinds.UNKNOWN: TokenType.UNKNOWN, kinds.CONTROL: TokenType.CONTROL,
             kinds.USER_DEFINED: TokenType.USER_DEFINED, kinds.UNUSED: TokenType.UNUSED, kinds.BYTE: TokenType.BYTE}
    vocab = _empty(n_rows, spm=True)
    for i, piece in enumerate(model.pieces):
        _place(vocab, piece.piece, i, "tokenizer.model")
        vocab.types[i] = types[piece.type]
        vocab.scores[i] = piece.score  # type: ignore[index]
    spec = model.trainer_spec
    vocab.spm_ids = {"bos": spec.bos_id, "eos": spec.eos_id, "unk": spec.unk_id, "pad": spec.pad_id}
    vocab.space_prefix = model.normalizer_spec.add_dummy_prefix
    if tokenizer_json is not None:
        vocab.space_prefix = spm_space_prefix(tokenizer_json)
    return vocab


def _gpt2_files(checkpoint: Checkpoint, special: SpecialFiles) -> dict[str, Any]:
    """vocab.json + merges.txt, as OPT's and GPT-2's own tokenizers store them, in the form of tokenizer.json."""
    vocab, merges = checkpoint.json("vocab.json"), checkpoint.text("merges.txt")
    name = special.config.get("tokenizer_class")
    if vocab is None or merges is None or name not in (None, "GPT2Tokenizer", "GPT2TokenizerFast"):
        found = f" (vocab.json of a {name} does not say how text is cut)" if vocab is not None and name else ""
        raise HotcoldError(f"{checkpoint.folder}: no tokenizer: needed are {NEEDED}{found}; --no-vocab converts "
                           "without one")
    lines = [line for line in merges.split("\n") if line.strip() and not line.startswith("#version")]
    return {
        "model": {"type": "BPE", "vocab": vocab, "merges": lines},
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    }


def _add_tokens(vocab: Vocab, special: SpecialFiles, tokenizer_json: dict[str, Any] | None, checkpoint: Checkpoint,
                report: Report) -> None:
    """Added and special tokens over the base vocabulary."""
    added: dict[int, tuple[str, bool]] = {}  # id -> text, special

    def add(token_id: Any, text: Any, is_special: bool, where: str) -> None:
        if isinstance(token_id, str) and len(token_id) < 12 and token_id.isdecimal():
            token_id = int(token_id)
        if not isinstance(text, str) or type(token_id) is not int:
            raise HotcoldError(f"{where}: an added token has id {str(token_id)[:40]!r} and text {str(text)[:40]!r}")
        if not 0 <= token_id < len(vocab.tokens):
            raise HotcoldError(f"{where}: added token {text[:60]!r} has id {token_id}, the embedding has rows 0 to "
                               f"{len(vocab.tokens) - 1}: the tokenizer does not belong to these weights")
        if token_id in added and added[token_id][0] != text:
            report.note(f"{where}: token {token_id} is {text!r}, elsewhere {added[token_id][0]!r}: the former is used")
        added[token_id] = (text, is_special)

    for text, token_id in (checkpoint.json("added_tokens.json") or {}).items():
        add(token_id, text, text in special.texts, "added_tokens.json")
    for entry in typed((tokenizer_json or {}).get("added_tokens"), list, "tokenizer.json: added_tokens"):
        if not isinstance(entry, dict):
            raise HotcoldError(f"tokenizer.json: an added token is {str(entry)[:60]!r}, expected an object")
        add(entry.get("id"), entry.get("content"), bool(entry.get("special")), "tokenizer.json")
    where = "tokenizer_config.json: added_tokens_decoder"
    for token_id, entry in typed(special.config.get("added_tokens_decoder"), dict, where).items():
        if isinstance(entry, dict):
            add(token_id, entry.get("content"), bool(entry.get("special")), "tokenizer_config.json")
    for i, token in enumerate(vocab.tokens):  # special tokens of the base vocabulary, as in OPT
        if token in special.texts and i not in added and vocab.types[i] == TokenType.NORMAL:
            added[i] = (token, True)
    for token_id, (text, is_special) in added.items():
        if vocab.types[token_id] in (TokenType.UNKNOWN, TokenType.BYTE):
            continue
        if is_special or any(text.startswith(a) and text.endswith(b) for a, b in LOOKS_SPECIAL):
            vocab.types[token_id] = TokenType.CONTROL
        else:
            vocab.types[token_id] = TokenType.USER_DEFINED
            text = text.replace("\u2581", " ")  # the runtime looks for it in plain text
        vocab.tokens[token_id] = text
        if vocab.scores is not None:
            vocab.scores[token_id] = ADDED_SCORE
