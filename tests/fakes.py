"""A tokenizer of bytes and an engine whose logits depend on every token in its cache, for tests without a model.

ScriptedEngine says a fixed text after any prompt. HashEngine says something else after any other text, so a wrong
cache shows. RepeatingEngine repeats itself, for drafts. All keep to the interface of hotcold.runtime.engine.Engine.
"""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.generate import Session
from hotcold.runtime.stats import LayerStats

EOG, EOG2, CONTROL, N_VOCAB = 256, 257, 258, 259


class ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def put(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if token < 256 else f"<{token}>"

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    n_vocab = N_VOCAB
    eog_ids = frozenset({EOG, EOG2})

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def stream(self, continues: bool = False) -> ByteStream:
        return ByteStream()

    def is_control(self, token: int) -> bool:
        return token >= 256


class FakeEngine:
    n_ctx = 100
    config = SimpleNamespace(n_vocab=N_VOCAB)
    interrupt_in = 0  # the n-th forward from now is interrupted; 0: none

    def __init__(self) -> None:
        self.cache: list[int] = []
        self.forwards: list[int] = []  # length of each call

    @property
    def n_past(self) -> int:
        return len(self.cache)

    def forward(self, tokens: Sequence[int], logits: str = "last") -> np.ndarray:
        self.interrupt_in -= 1
        if self.interrupt_in == 0:
            raise KeyboardInterrupt
        if not tokens or len(self.cache) + len(tokens) > self.n_ctx:
            raise HotcoldError(f"fake: {len(self.cache)} + {len(tokens)} tokens do not fit {self.n_ctx}")
        if min(tokens) < 0 or max(tokens) >= N_VOCAB:
            raise HotcoldError("fake: token id outside the vocabulary")
        self.forwards.append(len(tokens))
        rows = []
        for token in tokens:
            self.cache.append(token)
            rows.append(self.row())
        return rows[-1] if logits == "last" else np.array(rows)

    def verify(self, tokens: Sequence[int]) -> np.ndarray:
        if len(tokens) > 8:
            raise HotcoldError(f"fake: {len(tokens)} tokens to verify")
        return self.forward(tokens, "all")

    def row(self) -> np.ndarray:
        raise NotImplementedError

    def truncate(self, n_past: int) -> None:
        del self.cache[n_past:]

    def layer_stats(self) -> LayerStats:
        return LayerStats(1, np.ones(2), np.array([0.25, 0.5]), np.array([15.0, 20.0]), np.array([30.0, 30.0]))

    def reset_stats(self) -> None:
        pass

    def close(self) -> None:
        pass


class HashEngine(FakeEngine):
    """Prefers a printable ASCII character that depends on the whole cache."""

    def row(self) -> np.ndarray:
        out = np.zeros(N_VOCAB, np.float32)
        out[97 + zlib.crc32(repr(self.cache).encode()) % 26] = 50
        return out


class RepeatingEngine(FakeEngine):
    """Says much again that it has said, but not all: mostly its last two tokens decide, now and then the whole cache.

    From 15 letters and, rarely, an end.
    """

    def row(self) -> np.ndarray:
        whole = zlib.crc32(repr(self.cache).encode())
        decides = self.cache if whole % 6 == 0 else self.cache[-2:]
        out = np.zeros(N_VOCAB, np.float32)
        out[[*range(97, 112), EOG]] = np.random.default_rng(zlib.crc32(repr(decides).encode())).normal(0, 3, 16)
        out[EOG] -= 3
        return out


class ScriptedEngine(FakeEngine):
    """Says `script` (bytes or ids) after a prompt of n_prompt tokens, then an end-of-generation token."""

    def __init__(self, script: bytes | Sequence[int], n_prompt: int, eog: int = EOG) -> None:
        super().__init__()
        self.script = [*script, eog]
        self.n_prompt = n_prompt

    def row(self) -> np.ndarray:
        out = np.zeros(N_VOCAB, np.float32)
        out[120] = 1  # "x", if the wanted one is forbidden
        at = len(self.cache) - self.n_prompt
        if 0 <= at < len(self.script):
            out[self.script[at]] = 50
        return out


class FakeTemplate:
    """role:content| for each message; refuses a system prompt of "forbidden"."""

    def encode(
        self, tokenizer: ByteTokenizer, messages: list[dict[str, str]], add_generation_prompt: bool
    ) -> list[int]:
        if any(m == {"role": "system", "content": "forbidden"} for m in messages):
            raise HotcoldError("fake template: no system prompt allowed")
        text = "".join(f"{m['role'][0]}:{m['content']}|" for m in messages)
        return tokenizer.encode(text + ("a:" if add_generation_prompt else ""))


class FakeModel:
    """What repl.py uses of hotcold.runtime.api.Model."""

    def __init__(self, engine: FakeEngine) -> None:
        self.session = Session(engine, ByteTokenizer())  # type: ignore[arg-type]
        self.n_ctx = engine.n_ctx

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return FakeTemplate().encode(ByteTokenizer(), messages, True)
