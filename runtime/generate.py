"""Prompt tokens -> pieces of text.

In: token ids from tokenizer.py or chat.py, the engine, a sampler. Out: an iterator of strings, each made of whole
characters, and GenerationStats. Next: api.py for Python, repl.py for a conversation.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.kernels.formats import PACK_TOKENS
from hotcold.runtime.lookup import DraftPolicy, Lookup, draft_limit
from hotcold.runtime.sampling import Sampler
from hotcold.runtime.stats import LayerStats

if TYPE_CHECKING:
    from hotcold.runtime.engine import Engine
    from hotcold.runtime.tokenizer import Tokenizer


@dataclass
class GenerationStats:
    """What one generation did. Filled while it runs; complete once its iterator has ended, however it ended."""

    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompt: already in the KV cache, not evaluated again
    generated_tokens: int = 0
    prompt_seconds: float = 0.0  # evaluating prompt_tokens - reused_tokens
    eval_runs: int = 0  # forward passes of generated tokens; the first token comes from the prompt's pass
    eval_seconds: float = 0.0
    lookup: int = 0  # most tokens drafted for a run; 0: off
    drafted: int = 0  # tokens checked beside the last one of the text
    accepted: int = 0  # of these: what the sampler chose too, and so needed no run of its own
    sample_seconds: float = 0.0
    stop_reason: str = ""  # "eog" | "length" | "context" | "stop"; "" while running or when interrupted
    layers: LayerStats | None = None  # what generated and drafted tokens computed; None where there were none

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens evaluated per second; 0 if none was."""
        n = self.prompt_tokens - self.reused_tokens
        return n / self.prompt_seconds if n > 0 and self.prompt_seconds > 0 else 0.0

    @property
    def eval_tokens(self) -> int:
        """Generated tokens evaluated and kept."""
        return self.eval_runs + self.accepted

    @property
    def eval_rate(self) -> float:
        """Generated tokens evaluated and kept per second; 0 if none was."""
        return self.eval_tokens / self.eval_seconds if self.eval_seconds > 0 else 0.0


class ContextFull(HotcoldError):
    """The prompt has more tokens than the context holds. Nothing was evaluated or cut."""

    def __init__(self, needed: int, n_ctx: int) -> None:
        super().__init__(
            f"the text is {needed} tokens long but the context holds {n_ctx}: shorten it, "
            f"or use --ctx-size (n_ctx= in Python) with at least {needed + 1}"
        )
        self.needed = needed
        self.n_ctx = n_ctx


@dataclass
class _Run:
    """The last token of a text and its draft, in the cache at `start`, with the logits after each.

    used: tokens, from the first on, that are part of the text.
    """

    start: int
    tokens: list[int]
    logits: npt.NDArray[np.float32]  # [n_tokens, n_vocab]
    used: int = 1


class Session:
    """An engine and the tokens in its KV cache, so that a text that begins like the last one costs only its new part.

    Several generations may take turns on one session: each one holds its own text and evaluates again what another
    has pushed out of the cache.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        """tokenizer: None for a file without vocabulary; then only logits can be computed."""
        self.engine = engine
        self._tokenizer = tokenizer
        self._cached: list[int] = []  # may run ahead of engine.n_past after an interruption: see _common
        self._checked: _Run | None = None  # at the end of the cache; what of it is not used is no part of any text
        self._policy = DraftPolicy()
        self._turn = threading.Lock()

    @property
    def has_vocabulary(self) -> bool:
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises HotcoldError if the file has no vocabulary."""
        if self._tokenizer is None:
            raise HotcoldError("the file has no vocabulary: only logits of token ids can be computed")
        return self._tokenizer

    @property
    def n_cached(self) -> int:
        """Tokens in the KV cache that are part of a text."""
        run = self._checked
        return self.engine.n_past if run is None else min(self.engine.n_past, run.start + run.used)

    def forget(self) -> None:
        """Empty the KV cache."""
        with self._turn:
            self._forget()

    def _forget(self) -> None:
        self._checked = None
        self.engine.truncate(0)
        self._cached.clear()

    def _common(self, tokens: Sequence[int]) -> int:
        """How many tokens at the start of `tokens` are in the cache, at the same positions."""
        cached = self._cached
        if self._checked is not None:
            self.engine.truncate(self.n_cached)  # as if what was rejected had never been there
            self._checked = None
        # An interrupted forward leaves n_past as it was, wherever the interruption struck: n_past has the last word.
        del cached[self.engine.n_past :]
        n = min(len(cached), len(tokens))
        if cached[:n] == list(tokens[:n]):
            return n
        return next(i for i in range(n) if cached[i] != tokens[i])

    def evaluate(self, tokens: Sequence[int]) -> tuple[npt.NDArray[np.float32], int]:
        """Logits [n_vocab] after the last of `tokens`, the whole text; and how many of them the cache gave.

        Raises HotcoldError for an empty text, ContextFull for one that is too long.
        """
        if not tokens:
            raise HotcoldError("nothing to evaluate: the text has no tokens (this model adds none of its own)")
        if len(tokens) > self.engine.n_ctx:
            raise ContextFull(len(tokens), self.engine.n_ctx)
        with self._turn:
            return self._evaluate(tokens, self._common(tokens))

    def _evaluate(self, tokens: Sequence[int], reused: int) -> tuple[npt.NDArray[np.float32], int]:
        appended = reused == self.engine.n_past == len(tokens) - 1  # the next token of a generation
        if not appended and len(tokens) - reused < PACK_TOKENS:
            # As many as the kernels of a block need, so that a text read twice gives the same bits.
            reused = max(0, len(tokens) - PACK_TOKENS)
        if reused < self.engine.n_past:
            self.engine.truncate(reused)
            del self._cached[reused:]
        self._cached.extend(tokens[reused:])
        return self.engine.forward(tokens[reused:], "last"), reused

    def check(self, tokens: Sequence[int], draft: Sequence[int]) -> _Run:
        """Logits after `tokens`, the whole text, and after each token of a draft of what follows.

        The caller says by the run's `used` how many of them became part of the text. The cache loses the others when
        it is used next. Without a draft, or where the cache holds another text now, the run is of one token.
        """
        with self._turn:
            start = self._common(tokens)
            if not draft or not start == self.engine.n_past == len(tokens) - 1:
                return _Run(len(tokens) - 1, [tokens[-1]], self._evaluate(tokens, start)[0][np.newaxis])
            run = _Run(start, [tokens[-1], *draft], np.empty((0, 0), np.float32))
            self._checked = run  # first: wherever an interruption strikes, the draft is not taken for text
            self._cached.extend(run.tokens)
            run.logits = self.engine.verify(run.tokens)
            return run

    def all_logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits [n_tokens, n_vocab] after each of `tokens`, the whole text. Errors as evaluate."""
        if not tokens:
            raise HotcoldError("nothing to evaluate: the list of tokens is empty")
        if len(tokens) > self.engine.n_ctx:
            raise ContextFull(len(tokens), self.engine.n_ctx)
        with self._turn:
            self._forget()
            self._cached.extend(tokens)
            return self.engine.forward(tokens, "all")

    def generate(
        self,
        prompt: Sequence[int],
        sampler: Sampler,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eog: bool = False,
        continues: bool = True,
        lookup: bool | int = 0,
        stats: GenerationStats | None = None,
    ) -> Iterator[str]:
        """Continue `prompt` (token ids). Yields text as soon as it is certain.

        continues: the text goes on where the prompt ends; False for an answer, whose leading space is not shown where
        the vocabulary puts one in front of every text.

        lookup: most tokens to draft from what the text said before and to check in one run (lookup.py); 0 or False:
        off, True: as many as the engine can. The text is the same, and so are the random numbers it takes.

        Ends at an end-of-generation token (not with ignore_eog, which makes the model choose another), after
        max_tokens (None or negative: no limit), when the context is full, or before the first of the `stop` strings,
        no part of which is ever yielded. KeyboardInterrupt passes through and leaves the session usable.
        """
        stats = GenerationStats() if stats is None else stats
        filter_ = StopFilter([stop] if isinstance(stop, str) else stop)
        text = self.tokenizer.stream(continues=continues)
        tokens = [int(t) for t in prompt]
        stats.lookup = draft_limit(lookup)
        self.engine.reset_stats()
        sampler.forget()
        sampler.accept(tokens)
        try:
            for token in self._draw(tokens, sampler, max_tokens, ignore_eog, stats):
                piece = "" if self.tokenizer.is_control(token) else filter_.put(text.put(token))
                if piece:
                    yield piece
                if filter_.hit:
                    stats.stop_reason = "stop"
                    return
            rest = filter_.put(text.flush())
            rest += filter_.flush()
            if rest:
                yield rest
        finally:
            if stats.eval_runs:
                stats.layers = self.engine.layer_stats()

    def _draw(
        self, tokens: list[int], sampler: Sampler, max_tokens: int | None, ignore_eog: bool, stats: GenerationStats
    ) -> Iterator[int]:
        """The tokens that continue `tokens`, appended there too, until the model, max_tokens or the context ends it."""
        stats.prompt_tokens = len(tokens)
        eog = [i for i in self.tokenizer.eog_ids if i < self.engine.config.n_vocab]
        logits = self._timed_prompt(tokens, stats)
        steps = _Steps(self, self._policy, tokens, self.tokenizer.eog_ids, stats)
        limit = sys.maxsize if max_tokens is None or max_tokens < 0 else max_tokens
        while stats.generated_tokens < limit:
            if stats.generated_tokens > 0:
                if len(tokens) > self.engine.n_ctx:
                    stats.stop_reason = "context"
                    return
                # A run gives a token more than its draft has.
                logits = steps.logits(min(limit - stats.generated_tokens - 1, self.engine.n_ctx - len(tokens)))
            began = time.perf_counter()
            if ignore_eog:
                logits[eog] = -np.inf
            token = sampler.sample(logits)
            sampler.accept([token])
            stats.sample_seconds += time.perf_counter() - began
            if token in self.tokenizer.eog_ids:
                stats.stop_reason = "eog"
                return
            tokens.append(token)
            stats.generated_tokens += 1
            yield token
        stats.stop_reason = "length"

    def _timed_prompt(self, tokens: list[int], stats: GenerationStats) -> npt.NDArray[np.float32]:
        began = time.perf_counter()
        logits, stats.reused_tokens = self.evaluate(tokens)
        stats.prompt_seconds = time.perf_counter() - began
        return logits


class _Steps:
    """Logits after each token that one generation appends to `tokens`.

    Every row is given once, for a text that is already sampled up to there. So the sampler sees the same logits in the
    same order as without drafts, and a generation that ends in the middle of a run has drawn no number too many.
    """

    def __init__(
        self,
        session: Session,
        policy: DraftPolicy,
        tokens: list[int],
        ends: Collection[int],
        stats: GenerationStats,
    ) -> None:
        """ends: tokens that end the text."""
        self._session, self._policy, self._tokens, self._ends, self._stats = session, policy, tokens, ends, stats
        self._lookup = Lookup(tokens, policy) if stats.lookup else None
        self._run: _Run | None = None

    def logits(self, room: int) -> npt.NDArray[np.float32]:
        """Logits [n_vocab] after `tokens`, one longer than at the last call. room: tokens a draft may have."""
        token, run, stats = self._tokens[-1], self._run, self._stats
        began = time.perf_counter()
        if self._lookup is not None:
            self._lookup.append(token)
        if run is not None and run.used < len(run.tokens) and run.tokens[run.used] == token:
            run.used += 1
            stats.accepted += 1
        else:
            run = self._run = self._new_run(room)
        stats.eval_seconds += time.perf_counter() - began
        return run.logits[run.used - 1]

    def _new_run(self, room: int) -> _Run:
        draft = self._lookup.draft(min(room, self._stats.lookup), self._ends) if self._lookup is not None else []
        began = time.perf_counter()
        run = self._session.check(self._tokens, draft)
        self._policy.measured(len(run.tokens), time.perf_counter() - began)
        self._stats.eval_runs += 1
        self._stats.drafted += len(run.tokens) - 1
        return run


class StopFilter:
    """Passes text through up to the first stop string; holds back what may turn out to be the beginning of one.

    hit: a stop string has come; nothing is passed any more.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises HotcoldError unless all stops are text with at least one character."""
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise HotcoldError(f"stop strings must be non-empty text, got {stop!r}")
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def put(self, text: str) -> str:
        """Text that can be shown now. After a hit always empty."""
        if self.hit:
            return ""
        text = self._held + text
        # The match that ends first, as if the text had come one character at a time: pieces must not matter.
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)[1]]
        hold = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self) -> str:
        """What was held back, once no more text will come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
