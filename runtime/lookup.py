"""Drafts of what comes next, taken from the text itself: no second model, and the text stays what it would have been.

In: the tokens so far, one more at a time, and what runs of the engine cost. Out: tokens that may follow, for the engine
to check in one run. Next: generate.py, which samples every token itself and only saves runs where the draft agrees.

    tokens … the cat sat on the mat . […] the cat sat          the last three tokens occurred before,
                         └─────── draft ──────┘                 and this followed

A draft is as long as it pays. Two things decide that, and both are learned while the text grows. How often such a guess
is right, by how many tokens before it agree: a guess is made and judged for every token, also where none is drafted, so
learning costs nothing. And what a further token in a run costs, in runs of one token.
"""

from __future__ import annotations

import numbers
from collections.abc import Collection, Sequence

from hotcold.runtime.errors import HotcoldError

MAX_DRAFT = 7  # the engine checks eight tokens in one run: the last one of the text and these
NGRAMS = (3, 2)  # tokens that must have occurred before, the longer ones first
LONGEST = 16  # agreement beyond this many tokens is not told apart

RATE_WEIGHT = 1 / 16  # of the newest guess in the share of right ones
COST_GUESS = 0.3  # of a further token in a run, in runs of one token, before any was measured
COST_RETURN = 1 / 256  # of the way back to that guess per token without a draft: a cost once too high is tried again
LEAST_GAIN = 1.02  # in tokens per second, as expected, or no draft


def draft_limit(value: object) -> int:
    """Most tokens to draft: a number from 0 (off) to MAX_DRAFT, or True (MAX_DRAFT) or False. Raises HotcoldError."""
    if isinstance(value, bool):
        return MAX_DRAFT if value else 0
    if isinstance(value, numbers.Integral) and 0 <= int(value) <= MAX_DRAFT:
        return int(value)
    raise HotcoldError(f"lookup drafts 0 (off) to {MAX_DRAFT} tokens, got {value!r}")


class TokenIndex:
    """A text that grows, and where its last tokens stood before. Each token costs the same, however long the text."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._after: list[tuple[int, dict[tuple[int, ...], int]]] = [(n, {}) for n in NGRAMS]
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """The text goes on."""
        end = len(self.tokens)
        for n, after in self._after:
            if end >= n:
                after[tuple(self.tokens[end - n :])] = end  # noted once something follows: the end never finds itself
        self.tokens.append(token)

    def find(self) -> tuple[int, int]:
        """Position of what followed the last tokens when they stood in the text before, the last time; and how many
        tokens agree there, at most LONGEST. (0, 0) if they never did."""
        tokens, end = self.tokens, len(self.tokens)
        for n, after in self._after:
            at = after.get(tuple(tokens[end - n :])) if end >= n else None
            if at is not None:
                while n < min(LONGEST, at) and tokens[at - 1 - n] == tokens[end - 1 - n]:
                    n += 1
                return at, n
        return 0, 0


class DraftPolicy:
    """How long a draft pays. Kept over the generations of a session: the next answer is much like the last.

    rates: by how many tokens agree before it, the share of guesses that were right. cost: of a further token in a run,
    in runs of one token; None until measured.
    """

    def __init__(self) -> None:
        # Before any is judged: 0.28 with 2 tokens that agree, 0.93 with 16. Rather less than measured, so that a text
        # which does not repeat itself loses nothing.
        self.rates = [1 - 0.85**n for n in range(LONGEST + 1)]
        self.cost: float | None = None
        self._single: float | None = None  # seconds of a run of one token

    def judge(self, agreed: int, right: bool) -> None:
        """A guess with `agreed` tokens before it was right or not."""
        self.rates[agreed] += RATE_WEIGHT * (right - self.rates[agreed])

    def measured(self, n_tokens: int, seconds: float) -> None:
        """A run of so many tokens took so long. An outlier changes little: another program may have been in the way."""
        if seconds <= 0:  # a clock too coarse
            return
        if n_tokens == 1:
            single = self._single or seconds
            self._single = single + (min(max(seconds, single / 2), 2 * single) - single) / 8
            if self.cost is not None and self.cost > COST_GUESS:
                self.cost += COST_RETURN * (COST_GUESS - self.cost)
        elif self._single is not None:
            cost = min(max((seconds / self._single - 1) / (n_tokens - 1), 0.0), 2.0)
            self.cost = cost if self.cost is None else self.cost + (cost - self.cost) / 8

    def length(self, agreed: int, most: int) -> int:
        """Tokens to draft where `agreed` tokens agree, at most `most`; 0 where none pays."""
        cost = COST_GUESS if self.cost is None else self.cost
        best, best_gain = 0, LEAST_GAIN
        expected = share = 1.0  # tokens the run gives; chance that it gets as far as this one
        for n in range(1, most + 1):
            share *= self.rates[min(agreed + n - 1, LONGEST)]
            expected += share
            gain = expected / (1 + n * cost)
            if gain > best_gain:
                best, best_gain = n, gain
        return best


class Lookup:
    """Drafts for one text."""

    def __init__(self, tokens: Sequence[int], policy: DraftPolicy) -> None:
        self._index = TokenIndex(tokens)
        self._policy = policy
        self._at, self._agreed = self._index.find()

    def append(self, token: int) -> None:
        """The text goes on with `token`, which judges the guess."""
        if self._agreed:
            right = self._index.tokens[self._at] == token
            self._policy.judge(self._agreed, right)
            self._index.append(token)
            if right:
                self._at, self._agreed = self._at + 1, min(self._agreed + 1, LONGEST)
                return
        else:
            self._index.append(token)
        self._at, self._agreed = self._index.find()

    def draft(self, most: int, ends: Collection[int] = ()) -> list[int]:
        """At most `most` tokens that may come next; up to the first of `ends`, after which nothing can come."""
        if not self._agreed:
            return []
        tokens, period = self._index.tokens, len(self._index.tokens) - self._at  # beyond its end the draft repeats
        found = (tokens[self._at + i % period] for i in range(self._policy.length(self._agreed, most)))
        draft: list[int] = []
        for token in found:
            if token in ends:
                break
            draft.append(token)
        return draft
