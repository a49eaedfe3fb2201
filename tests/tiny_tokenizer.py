"""Tiny tokenizers of 288 tokens for tiny.py: byte-level BPE (tokenizer.json) and SentencePiece (tokenizer.model).

In: a folder and a kind. Out: the tokenizer's files with a ChatML template. Next: tiny.py.

Everything is spelled out, nothing is trained, so the files are the same everywhere. Ids of BPE kinds: 0..255 bytes,
256..284 merges, then the three special tokens. Ids of "spm": <unk> <s> </s>, 256 bytes, 27 pieces, 2 added tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2 as spm
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

N_TOKENS = 288
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Pairs to merge, in order; "Ġ" stands for the space byte.
MERGES = (
    "Ġ t", "Ġ a", "h e", "i n", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t", "Ġ w", "Ġ o", "e n", "Ġ c", "i t", "i s",
    "a n", "o r", "e s", "Ġ b", "e d", "Ġ f", "in g", "Ġ p", "o u", "Ġa n", "a l", "a r", "Ġt o",
)  # fmt: skip
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_tokenizer(folder: Path, kind: str, bos: bool) -> dict[str, Any]:
    """Writes kind "llama-bpe", "qwen2", "gpt-2", "smollm" or "spm"; returns the special ids for config.json.

    bos: the tokenizer puts the beginning-of-sequence token in front of every text.
    """
    if kind == "spm":
        return _write_spm(folder, bos)
    tokenizer = build_bpe(kind, bos)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {t: N_TOKENS - len(SPECIAL) + i for i, t in enumerate(SPECIAL)}
    config = {
        "tokenizer_class": "Qwen2Tokenizer" if kind == "qwen2" else "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0] if bos else None,
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "unk_token": None,
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {str(i): _added(t) for t, i in ids.items()},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return {"bos_token_id": ids[SPECIAL[0]] if bos else None, "eos_token_id": ids[SPECIAL[2]]}


def build_bpe(kind: str, bos: bool) -> Tokenizer:
    """The byte-level BPE tokenizer with the pre-tokenizer of `kind`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # one printable character for each of the 256 bytes
    merges = [(a, b) for a, b in (m.split(" ") for m in MERGES)]
    vocab = {t: i for i, t in enumerate(alphabet + [a + b for a, b in merges])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if kind == "gpt-2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    elif kind == "smollm":
        with_regex = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), with_regex])
    elif kind in ("llama-bpe", "qwen2"):
        words = Regex(_WORDS % ("{1,3}" if kind == "llama-bpe" else ""))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"), byte_level])
        if kind == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
    else:
        raise ValueError(f"no tokenizer kind {kind!r}")
    post: Any = processors.ByteLevel(trim_offsets=False)
    if bos:
        first = SPECIAL[0]
        template = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first} $B", special_tokens=[(first, tokenizer.token_to_id(first))]
        )
        post = processors.Sequence([post, template])
    tokenizer.post_processor = post
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _write_spm(folder: Path, bos: bool) -> dict[str, Any]:
    model = spm.ModelProto()
    kinds = spm.ModelProto.SentencePiece
    model.pieces.add(piece="<unk>", score=0, type=kinds.UNKNOWN)
    model.pieces.add(piece="<s>", score=0, type=kinds.CONTROL)
    model.pieces.add(piece="</s>", score=0, type=kinds.CONTROL)
    for b in range(256):
        model.pieces.add(piece=f"<0x{b:02X}>", score=0, type=kinds.BYTE)
    words = ["▁t", "he", "in", "▁a", "▁the", "er", "on", "▁s", "re", "▁w"]
    for i, piece in enumerate(words + list("▁etaoinshrdlcumwf")):
        model.pieces.add(piece=piece, score=-i, type=kinds.NORMAL)
    added = SPECIAL[1:]
    model.trainer_spec.model_type = spm.TrainerSpec.BPE
    model.trainer_spec.vocab_size = N_TOKENS - len(added)
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.unk_id, model.trainer_spec.bos_id, model.trainer_spec.eos_id = 0, 1, 2
    model.trainer_spec.pad_id = -1
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = True
    model.normalizer_spec.remove_extra_whitespaces = False
    model.normalizer_spec.escape_whitespaces = True
    if len(model.pieces) != N_TOKENS - len(added):
        raise ValueError(f"{len(model.pieces)} pieces")
    (folder / "tokenizer.model").write_bytes(model.SerializeToString(deterministic=True))
    ids = {t: N_TOKENS - len(added) + i for i, t in enumerate(added)}
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": bos,
        "add_eos_token": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": None,
        "legacy": False,
        "chat_template": CHATML,
        "added_tokens_decoder": {str(i): _added(t) for t, i in ({"<unk>": 0, "<s>": 1, "</s>": 2} | ids).items()},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (folder / "added_tokens.json").write_text(json.dumps(ids, indent=2), encoding="utf-8")
    return {"bos_token_id": 1, "eos_token_id": 2}


def _added(token: str) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": token} | flags
