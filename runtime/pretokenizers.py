"""How text is cut into words before BPE merges run: one table of the kinds llama.cpp names.

In: a kind ("llama-bpe") or the contents of a Hugging Face tokenizer.json. Out: the normalizer and pre-tokenizer
objects for it, or the kind's name. Next: tokenizer.py (reading) and convert/vocab.py (writing).

GGUF stores only the kind's name (`tokenizer.ggml.pre`). The steps here are the ones of the Hugging Face tokenizer
the name stands for, so ids equal Hugging Face's also where llama.cpp is known to differ (it skips NFC).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from hotcold.runtime.errors import HotcoldError

# What identify() returns for vocabularies of the SentencePiece kind: `tokenizer.ggml.model` is then "llama".
SPM = "spm"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _TAIL
_QWEN35 = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Words of o200k and its relatives: capitals then small letters, so "helloWorld" is two words.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_CASED = f"{_FIRST}{_UPPER}*{_LOWER}+{{0}}|{_FIRST}{_UPPER}+{_LOWER}*{{0}}|"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O = _CASED.replace("{0}", _CONTRACTIONS + "?") + r"\p{N}{1,3}" + _CASED_TAIL
_TEKKEN = _CASED.replace("{0}", "") + r"\p{N}" + _CASED_TAIL
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Letters of alphabets with upper and lower case, as DeepSeek's tokenizer.json lists them.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-"
    "\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-"
    "\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf"
    "\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-"
    "\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e"
    "\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-"
    "\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-"
    "\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CJK_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CJK_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_PUNCTUATION = r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"

Step = tuple[str, Any]
_BYTES: Step = ("bytes", False)  # only map bytes to printable characters
_WORDS: Step = ("bytes", True)  # cut as GPT-2 does, then map
_DIGITS: Step = ("digits", True)


@dataclass(frozen=True)
class Kind:
    """One pre-tokenizer: `steps` run in order, each cutting the pieces of the one before.

    ("split", regex): cut around every match · ("digits", one by one?) · ("punctuation", None): runs of it ·
    ("bytes", cut as GPT-2 does?). `add_bos` is what applies when the file does not say.
    """

    steps: tuple[Step, ...]
    nfc: bool = False
    ignore_merges: bool = False  # a word that is in the vocabulary is taken whole
    add_bos: bool = False


def _split(*patterns: str) -> tuple[Step, ...]:
    return tuple(("split", p) for p in patterns)


# Order matters for identify(): of kinds that cut alike, the first one is named.
KINDS: dict[str, Kind] = {
    "gpt-2": Kind((_WORDS,)),
    "phi-2": Kind((_WORDS,)),
    "mpt": Kind((_WORDS,), nfc=True),
    "olmo": Kind((_WORDS,), nfc=True),
    "smollm": Kind((_DIGITS, _WORDS)),
    "starcoder": Kind((_DIGITS, _WORDS)),
    "refact": Kind((_DIGITS, _WORDS)),
    "command-r": Kind((_DIGITS, _WORDS), nfc=True),
    "falcon": Kind((("punctuation", None), _WORDS, ("digits", False), *_split("[0-9][0-9][0-9]"))),
    "llama-bpe": Kind((*_split(_LLAMA3), _BYTES), ignore_merges=True, add_bos=True),
    "llama3": Kind((*_split(_LLAMA3), _BYTES), ignore_merges=True, add_bos=True),
    "llama-v3": Kind((*_split(_LLAMA3), _BYTES), ignore_merges=True, add_bos=True),
    "dbrx": Kind((*_split(_LLAMA3), _BYTES)),  # also Phi-4
    "smaug-bpe": Kind((*_split(_LLAMA3), _BYTES)),
    "qwen2": Kind((*_split(_QWEN2), _BYTES), nfc=True),
    "deepseek-r1-qwen": Kind((*_split(_QWEN2), _BYTES), nfc=True),
    "stablelm2": Kind((*_split(_QWEN2), _BYTES)),
    "qwen35": Kind((*_split(_QWEN35), _BYTES), nfc=True),
    "deepseek-llm": Kind((
        *_split(r"[\r\n]", r"\s?[" + _DEEPSEEK_LETTERS + "]+", _DEEPSEEK_PUNCTUATION, r"\s+$", _CJK_HANGUL),
        _DIGITS, _BYTES,
    )),
    "deepseek-coder": Kind((*_split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_HANGUL), _DIGITS, _BYTES)),
    "deepseek-v3": Kind((*_split(r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK3), _BYTES)),
    "gpt-4o": Kind((*_split(_GPT4O), _BYTES)),  # also Phi-4-mini
    "llama4": Kind((*_split(_GPT4O), _BYTES)),
    "tekken": Kind((*_split(_TEKKEN), _BYTES), ignore_merges=True, add_bos=True),  # Mistral Nemo
    # llama.cpp's own cut for files that do not say; no Hugging Face tokenizer stands behind it.
    "default": Kind((*_split(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"), _BYTES)),
}  # fmt: skip


def kind(name: str) -> Kind:
    """The table's row for a `tokenizer.ggml.pre`. Raises HotcoldError naming an unknown one and those supported."""
    try:
        return KINDS[name]
    except KeyError:
        raise HotcoldError(
            f"tokenizer.ggml.pre: unknown pre-tokenizer {name[:60]!r}; supported: {', '.join(sorted(KINDS))}"
        ) from None


def build(row: Kind) -> tuple[normalizers.Normalizer | None, pre_tokenizers.PreTokenizer]:
    """The `tokenizers` objects that do what the row says."""
    steps = [_step(name, value) for name, value in row.steps]
    return (normalizers.NFC() if row.nfc else None), pre_tokenizers.Sequence(steps)


def _step(name: str, value: Any) -> pre_tokenizers.PreTokenizer:
    if name == "split":
        return pre_tokenizers.Split(Regex(value), behavior="isolated")
    if name == "digits":
        return pre_tokenizers.Digits(individual_digits=value)
    if name == "punctuation":
        return pre_tokenizers.Punctuation(behavior="contiguous")
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=value)


def identify(tokenizer_json: dict[str, Any]) -> str:
    """Name of the pre-tokenizer that a Hugging Face tokenizer.json describes, as `tokenizer.ggml.pre` wants it.

    `tokenizer_json`: the parsed file. Returns a key of KINDS, or SPM ("spm") for a vocabulary of the SentencePiece
    kind: BPE with byte fallback, spaces as U+2581 through a Metaspace pre-tokenizer or a Replace normalizer
    (Llama 2, Mistral, Gemma); see also `spm_space_prefix`. Names that cut alike cannot be told apart from the
    file (starcoder and refact are called smollm, llama3 is llama-bpe); they give the same ids.
    Raises HotcoldError with the structure in one short line when no kind has it.
    """
    model = tokenizer_json.get("model")
    model_type = model.get("type", "BPE") if isinstance(model, dict) else None
    if not isinstance(model, dict) or model_type != "BPE":
        raise HotcoldError(f"tokenizer.json: model type {str(model_type)[:40]!r} is not supported; supported: BPE")
    normalizer, cutter = tokenizer_json.get("normalizer"), tokenizer_json.get("pre_tokenizer")
    if _marks_spaces(normalizer, cutter):
        if not model.get("byte_fallback"):
            raise HotcoldError("tokenizer.json: spaces are U+2581 but model.byte_fallback is not true; not supported")
        return SPM
    nfc, steps = _canonical_normalizer(normalizer), _canonical_steps(cutter)
    if nfc is not None and steps is not None:
        alike = [n for n, k in KINDS.items() if (k.nfc, k.steps) == (nfc, steps)]
        # Llama 3 takes whole words first, DBRX and Phi-4 do not: only this flag tells them apart.
        whole = bool(model.get("ignore_merges"))
        for name in alike:
            if KINDS[name].ignore_merges == whole:
                return name
        if alike and not whole:
            return alike[0]
    found = json.dumps({"normalizer": normalizer, "pre_tokenizer": cutter}, separators=(",", ":"))
    found = found if len(found) <= 300 else found[:300] + "..."
    raise HotcoldError(
        f"tokenizer.json: unknown pre-tokenizer {found} (ignore_merges {bool(model.get('ignore_merges'))}); "
        f"supported: {SPM}, {', '.join(sorted(KINDS))}"
    )


def spm_space_prefix(tokenizer_json: dict[str, Any]) -> bool:
    """Whether a tokenizer.json that `identify` calls SPM puts a space before the text (`add_space_prefix`)."""
    cutters = _flatten(tokenizer_json.get("pre_tokenizer"), "pretokenizers")
    for step in cutters:
        if step.get("type") == "Metaspace":
            scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
            return scheme != "never"
    return any(s.get("type") == "Prepend" for s in _flatten(tokenizer_json.get("normalizer"), "normalizers"))


def _flatten(node: Any, key: str) -> list[dict[str, Any]]:
    """Steps of a (possibly nested) Sequence; [] for null."""
    if not isinstance(node, dict):
        return []
    if node.get("type") == "Sequence":
        children = node.get(key) or []
        if not isinstance(children, list):
            raise HotcoldError(f"tokenizer.json: {key} is {str(children)[:60]!r}: allowed: an array")
        return [s for child in children for s in _flatten(child, key)]
    return [node]


def _marks_spaces(normalizer: Any, cutter: Any) -> bool:
    replaces = any(
        s.get("type") == "Replace" and s.get("pattern") == {"String": " "} and s.get("content") == "\u2581"
        for s in _flatten(normalizer, "normalizers")
    )
    return replaces or any(s.get("type") == "Metaspace" for s in _flatten(cutter, "pretokenizers"))


def _canonical_normalizer(node: Any) -> bool | None:
    """True: NFC, False: nothing, None: something the table has no name for."""
    names = [s.get("type") for s in _flatten(node, "normalizers")]
    return False if not names else (True if names == ["NFC"] else None)


def _canonical_steps(node: Any) -> tuple[Step, ...] | None:
    out: list[Step] = []
    for s in _flatten(node, "pretokenizers"):
        name, pattern = s.get("type"), s.get("pattern")
        if name == "ByteLevel" and not s.get("add_prefix_space"):
            out.append(("bytes", bool(s.get("use_regex", True))))
        elif name == "Digits":
            out.append(("digits", bool(s.get("individual_digits"))))
        elif name == "Punctuation" and s.get("behavior") == "Contiguous":
            out.append(("punctuation", None))
        elif name == "Split" and isinstance(pattern, dict) and "Regex" in pattern:
            # "Removed" with "invert" keeps the matches: the same as "Isolated" when the pattern matches all text,
            # and every pattern of the table written that way does.
            if (s.get("behavior"), bool(s.get("invert"))) not in (("Isolated", False), ("Removed", True)):
                return None
            regex = str(pattern["Regex"]).replace("\r", r"\r").replace("\n", r"\n")
            if s.get("behavior") == "Removed" and regex not in (_LLAMA3, _QWEN2, _QWEN35, _GPT4O, _TEKKEN):
                return None
            out.append(("split", regex))
        else:
            return None
    return tuple(out)
