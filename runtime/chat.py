"""Chat messages to text and to token ids, through the template a model file brings.

In: messages (role, content), a Jinja template from the file. Out: the prompt's text or token ids. Next: generate.py.

Two dangers. The template is a program from a stranger: it runs in a process of its own (chat_process.py).
The messages are text from people: what looks like a control token in them must stay text. See `encode`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hotcold.runtime import chat_fallbacks
from hotcold.runtime.chat_process import Renderer
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.tokenizer import Tokenizer

MAX_SOURCE = 1 << 18  # characters; the longest published templates have about 20 000
MAX_DEPTH = 32  # of nested data in messages

Messages = Sequence[Mapping[str, Any]]
# Roles are chosen by programs and templates build control tokens from them ('<|' + role + '|>').
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")


class ChatTemplate:
    """A chat template: Jinja source and the texts of the special tokens it may write.

    name: "file", or the key of chat_fallbacks.TEMPLATES it was taken from. renderer: the process to render in; by
    default one of its own, which ends with close() or with the template. Raises HotcoldError for a source too long.
    """

    def __init__(
        self,
        source: str,
        bos_token: str | None = None,
        eos_token: str | None = None,
        name: str = "file",
        renderer: Renderer | None = None,
    ) -> None:
        if len(source) > MAX_SOURCE:
            raise HotcoldError(f"chat template: found {len(source)} characters, allowed: {MAX_SOURCE}")
        self.source = source
        self.name = name
        self.bos_token = bos_token
        self.eos_token = eos_token
        self._renderer = Renderer() if renderer is None else renderer

    @classmethod
    def named(cls, name: str, tokenizer: Tokenizer) -> ChatTemplate:
        """A built-in template with the tokenizer's special tokens. Raises HotcoldError for an unknown name."""
        if name not in chat_fallbacks.TEMPLATES:
            known = ", ".join(chat_fallbacks.TEMPLATES)
            raise HotcoldError(f"chat template {name[:60]!r} is not built in; built in: {known}")
        return cls(chat_fallbacks.TEMPLATES[name], *_special_texts(tokenizer), name=name)

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer, notify: Callable[[str], object] | None = None) -> ChatTemplate:
        """The file's template, or a built-in one when the file has none that works; `notify` is told which and why."""
        if tokenizer.chat_template is None:
            problem = "the file has none"
        else:
            try:
                template = cls(tokenizer.chat_template, *_special_texts(tokenizer))
                template._probe()
                return template
            except HotcoldError as error:
                problem = f"the file's does not work ({error})"
        name, reason = chat_fallbacks.choose(tokenizer)
        if notify is not None:
            notify(f"chat template: {problem}; using the built-in '{name}' because {reason}")
        return cls.named(name, tokenizer)

    def render(self, messages: Messages, add_generation_prompt: bool = True, **extra: Any) -> str:
        """The prompt's text, equal to what transformers renders.

        messages: mappings with "role" and usually "content", of plain data (str, numbers, bool, None, lists, mappings);
        `extra` are further variables of the template (tools, documents, ...), plain data too.
        Raises HotcoldError when messages are no plain data, or with the template's own complaint.
        """
        return self._render(_plain_messages(messages), add_generation_prompt, _plain(extra, "extra"))

    def encode(
        self, tokenizer: Tokenizer, messages: Messages, add_generation_prompt: bool = True, **extra: Any
    ) -> list[int]:
        """Token ids of the prompt, in which only the template can write control tokens.

        Where a message spells a control token (or a part that the template's text could complete), one character is
        replaced by an unused private-use character before rendering, so that no control token is found there;
        between control tokens it is replaced back, and text is tokenized in one run as if nothing had happened.
        The rendering must equal the real one afterwards. Should the template look at exactly these characters, the
        safe rendering is used. A BOS is put in front if the vocabulary asks for one and the template wrote none.
        """
        plain, variables = _plain_messages(messages), _plain(extra, "extra")
        text, stand_ins = self._render_marked(tokenizer, plain, add_generation_prompt, variables)
        ids = tokenizer.encode_marked(text, stand_ins)
        if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
            ids.insert(0, tokenizer.bos_id)
        return ids

    def close(self) -> None:
        """End the rendering process, if one runs; the next rendering starts another."""
        self._renderer.close()

    def _render_marked(
        self, tokenizer: Tokenizer, messages: list[dict[str, Any]], prompt: bool, extra: dict[str, Any]
    ) -> tuple[str, dict[str, str]]:
        """The text with stand-ins, and what they stand for."""
        control = tokenizer.control_texts()
        real = self._render(messages, prompt, extra)
        seen = json.dumps([messages, extra, control], ensure_ascii=False) + self.source + real
        safe: tuple[str, dict[str, str]] | None = None
        # First with halves of control tokens at the ends of texts too. When the template notices (it compares short
        # texts, say), only with whole ones, provided that no halves met.
        for edges in (True, False):
            breaker = _Breaker(control, seen, edges)
            marked, marked_extra = breaker.messages(messages), breaker.data(extra, edges=False)
            try:
                text = self._render(marked, prompt, marked_extra) if breaker.stand_ins else real
            except HotcoldError:
                continue
            same = breaker.restore(text) == real
            if same and (safe is None or tokenizer.special_in(text) == tokenizer.special_in(safe[0])):
                return text, breaker.stand_ins
            safe = safe or (text, breaker.stand_ins)
        if safe is None:
            raise HotcoldError("chat template: it fails when control tokens in the messages are kept from it; "
                               "take them out of the messages")  # fmt: skip
        return safe

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, extra: dict[str, Any]) -> str:
        variables = {"tools": None, "documents": None, **extra}
        variables.update(messages=messages, add_generation_prompt=add_generation_prompt)
        for name, token in (("bos_token", self.bos_token), ("eos_token", self.eos_token)):
            if token is not None:
                variables[name] = token
        return self._renderer.render(self.source, variables)

    def _probe(self) -> None:
        """Raises HotcoldError unless a question comes through."""
        question = {"role": "user", "content": "hotcoldprobe"}
        try:
            text = self.render([question])
        except HotcoldError:  # some insist on a system message
            text = self.render([{"role": "system", "content": "Be brief."}, question])
        if question["content"] not in text:
            raise HotcoldError("chat template: it leaves out what the user says")


def _special_texts(tokenizer: Tokenizer) -> tuple[str | None, str | None]:
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    return (
        None if bos is None else tokenizer.token_text(bos),
        None if eos is None else tokenizer.token_text(eos),
    )


# ---- plain data


def _plain_messages(messages: Messages) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise HotcoldError(f"messages: found {type(messages).__name__}, allowed: a list of mappings with 'role'")
    out = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise HotcoldError(f"messages[{i}]: allowed: a mapping with 'role' (a string) and 'content'")
        # None means absent, as in transformers: templates would print it.
        out.append(_plain({k: v for k, v in message.items() if v is not None}, f"messages[{i}]"))
    return out


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of exact dict, list, str, int, float, bool, None."""
    if depth > MAX_DEPTH:
        raise HotcoldError(f"{where[:100]}: nested deeper than {MAX_DEPTH}")
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        if not all(isinstance(k, str) for k in value):
            raise HotcoldError(f"{where[:100]}: allowed: strings as keys")
        return {str.__str__(k): _plain(v, f"{where}.{k}", depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    raise HotcoldError(f"{where[:100]}: found {type(value).__name__}, allowed: strings, numbers, lists, mappings")


class _Breaker:
    """Replaces characters of texts from people so that no control token can be found in them.

    edges: also where a text begins with the end of a control token, ends with the beginning of one, or is the
    inside of one, for the template's own text could complete it.
    """

    def __init__(self, control: list[str], seen: str, edges: bool) -> None:
        self.stand_ins: dict[str, str] = {}  # stand-in -> original
        self._of: dict[str, str] = {}  # original -> stand-in
        self._free = (c for c in map(chr, range(0x10FFFD, 0x100000, -1)) if c not in seen)
        texts = sorted(control, key=len, reverse=True)
        self._whole = re.compile("(?=" + "|".join(map(re.escape, texts)) + ")") if texts else None
        self._edges = edges
        self._tails = tuple({t[i:] for t in texts for i in range(1, len(t))})
        self._heads = tuple({t[:i] for t in texts for i in range(1, len(t))})
        self._texts = texts

    def restore(self, text: str) -> str:
        return text.translate({ord(k): v for k, v in self.stand_ins.items()})

    def messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        out = []
        for message in messages:
            broken = self.data(message, self._edges)
            if _ROLE.fullmatch(message["role"]):
                broken["role"] = message["role"]
            out.append(broken)
        return out

    def data(self, value: Any, edges: bool) -> Any:
        if isinstance(value, str):
            return self._text(value, edges)
        if isinstance(value, dict):
            return {self._text(k, edges=False): self.data(v, edges) for k, v in value.items()}
        if isinstance(value, list):
            return [self.data(v, edges) for v in value]
        return value

    def _text(self, text: str, edges: bool) -> str:
        if self._whole is None or not text:
            return text
        at = {m.start() for m in self._whole.finditer(text)}
        if edges:
            core = text.strip()  # templates often strip
            start = len(text) - len(text.lstrip())
            for part, first in ((text, 0), (core, start)):
                if part and (part.startswith(self._tails) or any(part in t for t in self._texts)):
                    at.add(first)
                if part and part.endswith(self._heads):
                    at.add(first + len(part) - 1)
        if not at:
            return text
        chars = list(text)
        for i in at:
            chars[i] = self._stand_in(chars[i])
        return "".join(chars)

    def _stand_in(self, char: str) -> str:
        if char not in self._of:
            stand_in = next(self._free, None)
            if stand_in is None:
                raise HotcoldError("messages: they use up Unicode's private-use characters; remove them")
            self._of[char] = stand_in
            self.stand_ins[stand_in] = char
        return self._of[char]
