"""Special tokens and chat templates: which ids begin, end and fill, and what the tokenizer adds to a text.

In: tokenizer_config.json, special_tokens_map.json, config.json, generation_config.json, chat_template files.
Out: metadata. Next: vocab.py puts it together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from gguf import GGUFValueType, Keys

from hotcold.convert.checkpoint import Checkpoint, typed
from hotcold.convert.model import Metadata, array, boolean, string, u32
from hotcold.convert.precision import Report
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.vocab import END_TEXTS

ID_KEYS = {
    "bos": Keys.Tokenizer.BOS_ID, "eos": Keys.Tokenizer.EOS_ID, "unk": Keys.Tokenizer.UNK_ID,
    "sep": Keys.Tokenizer.SEP_ID, "pad": Keys.Tokenizer.PAD_ID, "mask": Keys.Tokenizer.MASK_ID,
}


@dataclass
class SpecialFiles:
    """The small JSON files beside the vocabulary."""

    config: dict[str, Any]      # tokenizer_config.json
    token: dict[str, str]       # "bos" -> text, from tokenizer_config.json or special_tokens_map.json
    model_ids: dict[str, Any]   # "bos_token_id" -> id or list, config.json under generation_config.json
    texts: frozenset[str]       # texts of all special tokens named anywhere


def read_special_files(checkpoint: Checkpoint) -> SpecialFiles:
    """Read them; missing files are empty."""
    config = checkpoint.json("tokenizer_config.json") or {}
    tokens_map = checkpoint.json("special_tokens_map.json") or {}
    token: dict[str, str] = {}
    for name in ID_KEYS:
        text = _text(config.get(f"{name}_token")) or _text(tokens_map.get(f"{name}_token"))
        if text:
            token[name] = text
    more: list[str | None] = []
    for source in (config, tokens_map):
        extra = source.get("additional_special_tokens") or source.get("extra_special_tokens")
        more += [_text(t) for t in (extra if isinstance(extra, list) else [])]
    model_ids = {k: v for k, v in checkpoint.config.items() if k.endswith("_token_id") and v is not None}
    generation = checkpoint.json("generation_config.json") or {}
    model_ids["all_eos"] = [*_ids(generation.get("eos_token_id"), "generation_config.json: eos_token_id"),
                            *_ids(checkpoint.config.get("eos_token_id"), "config.json: eos_token_id")]
    return SpecialFiles(config, token, model_ids, frozenset({*token.values(), *(t for t in more if t)}))


def _text(value: Any) -> str | None:
    """A token's text: a string or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _ids(value: Any, where: str) -> list[int]:
    """Token ids of a config file: one, a list of them, or null. Raises HotcoldError naming `where` otherwise."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    for v in values:
        if type(v) is not int:
            raise HotcoldError(f"{where} is {str(value)[:60]!r}: allowed: a token id, a list of them, or null")
    return values


def special_metadata(special: SpecialFiles, tokens: list[str], tokenizer_json: dict[str, Any] | None, spm: bool,
                     spm_ids: dict[str, int], report: Report) -> Metadata:
    """Ids of special tokens, several end-of-text ids as EOS, EOT, EOM, and whether BOS and EOS are added to a text."""
    id_of: dict[str, int] = {}
    for i, token in enumerate(tokens):
        id_of.setdefault(token, i)
    before, after = template_tokens(tokenizer_json)
    if before and "bos" not in special.token:
        special.token["bos"] = before[0]
    ids: dict[str, int] = {}
    for name in ID_KEYS:
        text = special.token.get(name)
        if text is not None and text not in id_of:
            raise HotcoldError(f"tokenizer_config.json: {name}_token is {text!r}, which is not in the vocabulary")
        from_config = _ids(special.model_ids.get(f"{name}_token_id"), f"config.json: {name}_token_id")
        for n in from_config:
            if not 0 <= n < len(tokens):
                report.note(f"config.json: {name}_token_id {n} is not in the vocabulary of {len(tokens)}: left out")
        candidates = [id_of.get(text or ""), *from_config, spm_ids.get(name)]
        for value in candidates if text is None else candidates[:1]:
            if value is not None and 0 <= value < len(tokens):
                ids[name] = value
                break
    metadata = {ID_KEYS[name]: u32(value) for name, value in ids.items()}
    metadata |= _end_metadata(special, tokens, ids.get("eos"), report)
    add_bos = _added(special, "bos", before, ids, tokens, tokenizer_json, default=spm)
    add_eos = _added(special, "eos", after, ids, tokens, tokenizer_json, default=False)
    metadata[Keys.Tokenizer.ADD_BOS] = boolean(add_bos)
    metadata[Keys.Tokenizer.ADD_EOS] = boolean(add_eos)
    return metadata


def template_tokens(tokenizer_json: dict[str, Any] | None) -> tuple[list[str], list[str]]:
    """Special tokens that the post-processor puts before and after a single text."""
    before: list[str] = []
    after: list[str] = []
    where = "tokenizer.json: post_processor"
    steps = [(tokenizer_json or {}).get("post_processor")]
    while steps:
        step = steps.pop()
        if not isinstance(step, dict):
            continue
        if step.get("type") == "Sequence":
            steps += typed(step.get("processors"), list, f"{where}.processors")
        elif step.get("type") == "TemplateProcessing":
            side = before
            for part in typed(step.get("single"), list, f"{where}.single"):
                if isinstance(part, dict) and "Sequence" in part:
                    side = after
                elif isinstance(part, dict) and isinstance(part.get("SpecialToken"), dict):
                    side.append(str(part["SpecialToken"].get("id")))
        elif step.get("type") in ("RobertaProcessing", "BertProcessing"):
            for name, texts in (("cls", before), ("sep", after)):
                texts += [str(text) for text in typed(step.get(name), list, f"{where}.{name}")[:1]]
    return before, after


def _added(special: SpecialFiles, name: str, template: list[str], ids: dict[str, int], tokens: list[str],
           tokenizer_json: dict[str, Any] | None, default: bool) -> bool:
    """Whether the token is added to a text: tokenizer_config.json's word, else the post-processor's."""
    said = special.config.get(f"add_{name}_token")
    if isinstance(said, bool):
        return said and name in ids
    if tokenizer_json is None or "post_processor" not in tokenizer_json:
        return default and name in ids
    if not template:
        return False
    if len(template) > 1 or name not in ids or template[0] != tokens[ids[name]]:
        raise HotcoldError(f"tokenizer.json: post_processor adds {', '.join(template)} to a text: supported is the "
                           f"{name.upper()} token alone")
    return True


def _end_metadata(special: SpecialFiles, tokens: list[str], eos: int | None, report: Report) -> Metadata:
    """Further ids that end a turn; GGUF has room for an EOT and an EOM beside EOS."""
    metadata: Metadata = {}
    more = [i for i in dict.fromkeys(special.model_ids["all_eos"]) if 0 <= i < len(tokens)]
    if eos is None and more:
        eos = more[0]
        metadata[Keys.Tokenizer.EOS_ID] = u32(eos)
    more = [i for i in more if i != eos]
    # The runtime recognises well-known texts without a key, so room is given to the others first.
    more.sort(key=lambda i: (tokens[i] in END_TEXTS, "eom" in tokens[i]))
    for key, token_id in zip((Keys.Tokenizer.EOT_ID, Keys.Tokenizer.EOM_ID), more, strict=False):
        metadata[key] = u32(token_id)
    lost = [i for i in more[2:] if tokens[i] not in END_TEXTS]
    if lost:
        report.note(f"warning: no key left for the end tokens {', '.join(f'{i} ({tokens[i]})' for i in lost)}: "
                    "generation does not stop at them")
    return metadata


def chat_template_metadata(checkpoint: Checkpoint, special: SpecialFiles, report: Report) -> Metadata:
    """The chat template, from where transformers looks first: chat_template.jinja, .json, tokenizer_config.json."""
    template: Any = checkpoint.text("chat_template.jinja")
    where = "chat_template.jinja"
    if template is None:
        template, where = (checkpoint.json("chat_template.json") or {}).get("chat_template"), "chat_template.json"
    if template is None:
        template, where = special.config.get("chat_template"), "tokenizer_config.json"
    if not template:
        return {}
    if isinstance(template, str):
        return {Keys.Tokenizer.CHAT_TEMPLATE: string(template)}
    if not isinstance(template, list):
        raise HotcoldError(f"{where}: chat_template is {type(template).__name__}, allowed: a text or a list of named "
                           "ones")
    metadata: Metadata = {}
    names: list[str] = []
    for entry in template:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) \
                or not isinstance(entry.get("template"), str):
            raise HotcoldError(f"{where}: a named chat template needs name and template")
        name = re.sub(r"[^A-Za-z0-9]", "_", entry["name"])
        if name == "default":
            metadata[Keys.Tokenizer.CHAT_TEMPLATE] = string(entry["template"])
        elif name:
            names.append(name)
            metadata[Keys.Tokenizer.CHAT_TEMPLATE_N.format(name=name)] = string(entry["template"])
    if names:
        metadata[Keys.Tokenizer.CHAT_TEMPLATES] = array(names, GGUFValueType.STRING)
    if Keys.Tokenizer.CHAT_TEMPLATE not in metadata:
        report.note(f"{where}: no chat template is named default: the runtime's own is used")
    return metadata
