"""What was counted: how often each neuron fires. One GGUF file per profile.

In: counts of counting.py, or a file. Out: Profile, checked; merged profiles; a file. Next: place.py, train.py,
report.py.

Neurons are in the order of the source model, so a profile fits every file made of it, however that is sorted. Files
come from strangers: every number is checked before it is used.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hotcold.placement.identity import model_id
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import GGUFFile, safe_text

MAX_COUNT = 1 << 52  # tokens, and firings of a layer: such sums stay exact, in i64 and in f64


@dataclass(frozen=True)
class Part:
    """Which contexts of one run over one text a profile holds. Shards of a run differ in nothing but `contexts`."""

    corpus: str
    sha256: str
    n_ctx: int
    total: int  # contexts of the whole run
    samples: int  # most tokens sampled in the whole run
    contexts: np.ndarray  # i64, ascending

    @property
    def run(self) -> tuple[str, int, int, int]:
        return self.sha256, self.n_ctx, self.total, self.samples


@dataclass(frozen=True)
class Profile:
    """Counts per layer and neuron (source order), and FFN inputs of some tokens."""

    model: str  # identity.model_id
    n_tokens: int  # tokens counted
    n_pairs: int  # adjacent pairs of them within one context
    corpus: str  # name of the text, for people
    sha256: str  # of the text
    fired: tuple[np.ndarray, ...]  # i64 [n_ff] per layer
    pairs: tuple[np.ndarray, ...]  # i64 [n_ff]: fired on a token and on the next
    magnitude: tuple[np.ndarray, ...]  # f64 [n_ff]: sum of |activation| (act(key) * up)
    samples: tuple[np.ndarray, ...]  # f16 [n_samples, n_embd]: FFN inputs; row i is the same token in every layer
    sample_text: np.ndarray  # i64 [n_samples], ascending: the context a sample is from
    parts: tuple[Part, ...] = field(default=())

    def own_parts(self) -> tuple[Part, ...]:
        """`parts`, or one made up of everything where nobody said what was counted."""
        if self.parts:
            return self.parts
        contexts = np.unique(self.sample_text) if len(self.sample_text) else np.zeros(1, np.int64)
        return (Part(self.corpus, self.sha256, 0, int(contexts[-1]) + 1, 0, contexts),)

    @property
    def n_layer(self) -> int:
        return len(self.fired)

    @property
    def n_ff(self) -> tuple[int, ...]:
        return tuple(len(f) for f in self.fired)

    def frequency(self, layer: int) -> np.ndarray:
        """f64 [n_ff]: share of the tokens on which each neuron fired."""
        return self.fired[layer] / max(1, self.n_tokens)


def sparsity(profile: Profile) -> np.ndarray:
    """f64 [n_layer]: 1 - fired / (tokens * neurons)."""
    return np.array([1 - f.sum() / max(1, profile.n_tokens * len(f)) for f in profile.fired])


def skew(fired: np.ndarray, share: float = 0.8) -> float:
    """Smallest share of the neurons that makes `share` of the firings; 1 where nothing fires."""
    total = int(fired.sum())
    if total == 0:
        return 1.0
    sums = np.cumsum(np.sort(fired)[::-1])
    return float(np.searchsorted(sums, share * total) + 1) / len(fired)


def persistence(profile: Profile) -> np.ndarray:
    """f64 [n_layer]: of the firings that have a next token, the share that fires there too (estimate); 0 where none."""
    with_next = profile.n_pairs / max(1, profile.n_tokens)
    fired = np.array([f.sum() for f in profile.fired]) * with_next
    pairs = np.array([p.sum() for p in profile.pairs], np.float64)
    return np.minimum(1.0, np.divide(pairs, fired, out=np.zeros_like(pairs), where=fired > 0))


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read and check a finished profile. Arrays are views of the file. Raises HotcoldError naming file and layer."""
    from hotcold.placement.profile_file import read_profile

    profile, state = read_profile(path)
    if not state.complete:
        done = sum(len(p.contexts) for p in profile.parts)
        raise HotcoldError(
            f"{safe_text(str(path))}: is not finished: {done} of {state.wanted} contexts are counted; go on with "
            "hotcold profile --resume"
        )
    return profile


def save_profile(path: str | os.PathLike[str], profile: Profile, force: bool = False) -> None:
    """Write a profile: complete under its name, or not at all. Raises HotcoldError."""
    from hotcold.placement.profile_file import State, write_profile

    write_profile(Path(path), profile, State(), force)


def check_profile(profile: Profile, file: GGUFFile, config: ModelConfig) -> None:
    """Raise HotcoldError unless the profile is of this model."""
    path = safe_text(str(file.path))
    if profile.n_layer != config.n_layer:
        raise HotcoldError(f"{path}: the profile is of another model: it has {profile.n_layer} layers, the model "
                           f"{config.n_layer}")  # fmt: skip
    for layer, (found, n_ff) in enumerate(zip(profile.n_ff, config.n_ff, strict=True)):
        if found != n_ff:
            raise HotcoldError(f"{path}: the profile is of another model: layer {layer} has {found} neurons there, "
                               f"{n_ff} in the model")  # fmt: skip
    width = profile.samples[0].shape[1] if len(profile.sample_text) else config.n_embd
    if width != config.n_embd:
        raise HotcoldError(f"{path}: the profile is of another model: samples have {width} numbers, the model's "
                           f"inputs {config.n_embd}")  # fmt: skip
    if profile.model != model_id(file, config):
        raise HotcoldError(f"{path}: the profile is of another model (same shape, other weights): profile this one "
                           "with hotcold profile")  # fmt: skip


# ------------------------------------------------------------------ merging


def merge_profiles(profiles: Sequence[Profile]) -> Profile:
    """Add profiles of one model: shards of a run, or runs over different texts. Counts add up exactly.

    The order does not matter (but for the last bits of magnitude). Samples are united, ordered by context. Raises
    HotcoldError for profiles of different models, and for text that would be counted twice.
    """
    if not profiles:
        raise HotcoldError("no profiles to merge")
    first = profiles[0]
    for i, p in enumerate(profiles):
        if p.model != first.model or p.n_ff != first.n_ff:
            raise HotcoldError(f"profile {i + 1} is of another model than profile 1: only profiles of one model add up")
    for layer in range(first.n_layer):
        if sum(int(p.fired[layer].sum()) for p in profiles) > MAX_COUNT:
            raise HotcoldError(f"layer {layer}: the profiles count more firings than can be added up ({MAX_COUNT})")
    parts = _merged_parts(profiles)
    order, renumbered = _sample_order(profiles, parts)
    corpus, sha256 = describe(parts)
    return Profile(
        model=first.model,
        n_tokens=sum(p.n_tokens for p in profiles),
        n_pairs=sum(p.n_pairs for p in profiles),
        corpus=corpus,
        sha256=sha256,
        fired=_added([p.fired for p in profiles]),
        pairs=_added([p.pairs for p in profiles]),
        magnitude=_added([p.magnitude for p in profiles]),
        samples=_united(profiles, order),
        sample_text=renumbered[order],
        parts=parts,
    )


def describe(parts: Sequence[Part]) -> tuple[str, str]:
    """Name and hash of the text of some parts: of several, the hash of their hashes."""
    if len(parts) == 1:
        return parts[0].corpus, parts[0].sha256
    return " + ".join(p.corpus for p in parts), hashlib.sha256("".join(p.sha256 for p in parts).encode()).hexdigest()


def _added(arrays: Sequence[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    out = []
    for same_layer in zip(*arrays, strict=True):
        total = same_layer[0].copy()
        for a in same_layer[1:]:
            total += a
        out.append(total)
    return tuple(out)


def _merged_parts(profiles: Sequence[Profile]) -> tuple[Part, ...]:
    """Parts of all profiles, those of one run joined, in an order that the profiles' order does not change."""
    joined: dict[tuple[str, int, int, int], Part] = {}
    by_text: dict[str, Part] = {}
    for p in profiles:
        for part in p.own_parts():
            other = by_text.setdefault(part.sha256, part)
            if other.run != part.run:
                raise HotcoldError(
                    f"the text {safe_text(part.corpus, 60)} was counted with different settings ({_settings(other)} "
                    f"and {_settings(part)}): only one of the two may be merged"
                )
            before = joined.get(part.run)
            if before is None:
                joined[part.run] = part
                continue
            contexts = np.concatenate([before.contexts, part.contexts])
            unique = np.unique(contexts)
            if len(unique) != len(contexts):
                raise HotcoldError(f"{len(contexts) - len(unique)} contexts of the text {safe_text(part.corpus, 60)} "
                                   "are in more than one of the profiles: they would be counted twice")  # fmt: skip
            joined[part.run] = Part(part.corpus, *part.run, unique)
    return tuple(joined[run] for run in sorted(joined))


def _settings(part: Part) -> str:
    return f"{part.total} contexts of {part.n_ctx} tokens, at most {part.samples} samples"


def offsets(parts: Sequence[Part]) -> np.ndarray:
    """i64 [parts + 1]: where the numbers of each part's contexts begin in sample_text."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum([p.total for p in parts], dtype=np.int64)])


def _sample_order(profiles: Sequence[Profile], parts: tuple[Part, ...]) -> tuple[np.ndarray, np.ndarray]:
    """-> order that sorts the samples of all profiles by context; their contexts, numbered as in the result."""
    place = dict(zip((p.run for p in parts), offsets(parts).tolist(), strict=False))
    numbers = [np.zeros(0, np.int64)]
    for p in profiles:
        own = offsets(p.own_parts())
        part = np.searchsorted(own, p.sample_text, side="right") - 1
        shift = np.array([place[q.run] for q in p.own_parts()], np.int64) - own[:-1]
        numbers.append(p.sample_text + shift[part] if len(p.sample_text) else p.sample_text)
    renumbered = np.concatenate(numbers)
    return np.argsort(renumbered, kind="stable"), renumbered  # stable: tokens of a context stay in order


def _united(profiles: Sequence[Profile], order: np.ndarray) -> tuple[np.ndarray, ...]:
    if any(len(p.sample_text) and p.samples[0].shape[1] != _width(profiles) for p in profiles):
        raise HotcoldError("the profiles hold samples of different widths: they are not of one model")
    filled = [p for p in profiles if len(p.sample_text)]
    if not filled:
        return profiles[0].samples
    return tuple(np.concatenate(same_layer)[order] for same_layer in zip(*(p.samples for p in filled), strict=True))


def _width(profiles: Sequence[Profile]) -> int:
    return next((p.samples[0].shape[1] for p in profiles if len(p.sample_text)), 0)
