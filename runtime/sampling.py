"""Logits -> next token.

In: float32 logits [n_vocab] from engine.py and the tokens so far. Out: one token id. Next: generate.py.

The chain and its order are llama.cpp's: repeat penalty, top-k, top-p, min-p, temperature. So top-p and min-p see
the distribution before the temperature is applied. Ties are broken by the lower token id, everywhere.
"""

from __future__ import annotations

import math
import numbers
import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from hotcold.runtime.errors import HotcoldError

_FIRST_SORTED = 1024  # candidates sorted before top-p asks for the whole vocabulary


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn. Defaults are llama.cpp's. Raises HotcoldError for values outside the ranges.

    Numbers may be of any kind, NumPy's too; they are kept as Python's.
    """

    temperature: float = 0.8  # <= 0: the most likely token
    top_k: int = 40  # <= 0: all
    top_p: float = 0.95  # >= 1: off
    min_p: float = 0.05  # <= 0: off
    repeat_penalty: float = 1.0  # 1: off
    repeat_last_n: int = 64  # 0: off, -1: all tokens so far
    seed: int | None = None  # None or -1: random

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repeat_penalty"):
            object.__setattr__(self, name, _finite(name, getattr(self, name)))
        for name in ("top_k", "repeat_last_n", "seed"):
            value = getattr(self, name)
            if name == "seed" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, numbers.Integral):
                raise HotcoldError(f"sampling: {name} must be a whole number, got {value!r}")
            object.__setattr__(self, name, int(value))
        if self.top_p <= 0:
            raise HotcoldError(f"sampling: top_p must be greater than 0, got {self.top_p}; 1 turns it off")
        if self.min_p > 1:
            raise HotcoldError(f"sampling: min_p must be at most 1, got {self.min_p}; 0 turns it off")
        if self.repeat_penalty <= 0:
            raise HotcoldError(
                f"sampling: repeat_penalty must be greater than 0, got {self.repeat_penalty}; 1 turns it off"
            )
        if self.repeat_last_n < -1:
            raise HotcoldError(f"sampling: repeat_last_n must be -1 or more, got {self.repeat_last_n}")
        if self.seed is not None and self.seed < -1:
            raise HotcoldError(f"sampling: seed must be -1 (random) or more, got {self.seed}")


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingParams as keywords of a call; the defaults are there."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    repeat_last_n: int
    seed: int | None


def _finite(name: str, value: object) -> float:
    """Any kind of real number (NumPy's too) as a Python float, so that all of them compute alike."""
    try:
        if isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except OverflowError:  # a whole number beyond what a float holds
        pass
    raise HotcoldError(f"sampling: {name} must be a finite number, got {value!r}")


class Sampler:
    """Draws tokens; holds the random generator and the last tokens (for the repeat penalty).

    Two samplers with the same params (and a seed) fed the same tokens and logits draw the same tokens.
    `seed` is the seed in use, also when it was chosen at random.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.seed: int = secrets.randbits(32) if params.seed is None or params.seed < 0 else params.seed
        self._rng = np.random.default_rng(self.seed)
        self._last: deque[int] = deque(maxlen=None if params.repeat_last_n < 0 else params.repeat_last_n)

    def forget(self) -> None:
        """Forget the tokens accepted so far; the random generator goes on."""
        self._last.clear()

    def accept(self, tokens: Iterable[int]) -> None:
        """Tokens that are now part of the text: the prompt's, and each one drawn."""
        self._last.extend(tokens)

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        """Draw a token id from logits [n_vocab] (left unchanged). Does not accept it.

        Raises HotcoldError if the logits hold NaN or +inf, or nothing but -inf: the model's numbers are broken, and
        any token drawn from them would be noise.
        """
        if logits.ndim != 1 or logits.size == 0:
            raise HotcoldError(f"sampling: expected logits [n_vocab], got an array of shape {logits.shape}")
        top = float(logits.max())  # NaN if there is one anywhere
        if not math.isfinite(top):
            raise HotcoldError(
                f"sampling: the model's largest logit is {top}: its weights or its file are damaged (or overflow)"
            )
        logits = self._penalized(logits)
        if self.params.temperature <= 0:
            return int(np.argmax(logits))  # the first of equals
        ids, kept = _candidates(logits, self.params)
        with np.errstate(over="ignore"):  # a tiny temperature: everything but the first becomes exp(-inf) = 0
            scaled = (kept.astype(np.float64) - float(kept[0])) / self.params.temperature  # [n], <= 0, first is 0
        total = np.cumsum(np.exp(scaled))
        drawn = int(np.searchsorted(total, self._rng.random() * total[-1], side="right"))
        return int(ids[min(drawn, ids.size - 1)])

    def _penalized(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Logits with the repeat penalty: positive ones divided, others multiplied, so both become less likely."""
        penalty = self.params.repeat_penalty
        if penalty == 1.0 or not self._last:
            return logits
        seen = np.fromiter(set(self._last), dtype=np.int64)
        seen = seen[(seen >= 0) & (seen < logits.size)]
        out = logits.copy()
        values = out[seen]
        out[seen] = np.where(values > 0, values / np.float32(penalty), values * np.float32(penalty))
        return out


def _candidates(
    logits: npt.NDArray[np.float32], params: SamplingParams
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Ids and logits that top-k, top-p and min-p leave, most likely first.

    Each of the three keeps a prefix of the same sorted list, so they may be applied in any order as long as top-p's
    probabilities are those of the list that top-k left. min-p goes first because it needs no sorting.
    """
    ids, values = _largest(logits, params.top_k)
    top = values.max()
    weights = np.exp(values.astype(np.float64) - float(top))  # [n] unnormalised probabilities
    total = float(weights.sum())
    if params.min_p > 0:
        keep = values >= top + np.float32(math.log(params.min_p))
        ids, values = ids[keep], values[keep]
    if params.top_p >= 1:
        return _sorted(ids, values)
    first = ids.size if ids.size <= 4 * _FIRST_SORTED else _FIRST_SORTED
    while True:
        some_ids, some = _sorted(*_largest_of(ids, values, first))
        share = np.cumsum(np.exp(some.astype(np.float64) - float(top))) / total
        enough = int(np.searchsorted(share, params.top_p, side="left")) + 1  # the first that reaches top_p is kept
        if enough <= some.size or first >= ids.size:
            return some_ids[:enough], some[:enough]
        first = ids.size


def _largest(logits: npt.NDArray[np.float32], k: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The k largest logits and their ids, unsorted; all for k <= 0. Of equals the lower ids."""
    return _largest_of(np.arange(logits.size), logits, k)


def _largest_of(
    ids: npt.NDArray[np.int64], values: npt.NDArray[np.float32], k: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    if k <= 0 or k >= values.size:
        return ids, values
    least = np.partition(values, values.size - k)[values.size - k]  # the k-th largest value
    above = np.flatnonzero(values > least)
    equal = np.flatnonzero(values == least)[: k - above.size]
    chosen = np.concatenate([above, equal])
    return ids[chosen], values[chosen]


def _sorted(
    ids: npt.NDArray[np.int64], values: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    order = np.lexsort((ids, -values))
    return ids[order], values[order]
