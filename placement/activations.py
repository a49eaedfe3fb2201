"""Which neurons fire on which token: recorded from a model that reads a text, or drawn from counts.

In: a GGUF and a text; or frequencies. Out: frozen Activations, also as an .npz file. Next: simulate.py replays them.

A file holds bits in the order of the source model, so it fits the model however its neurons are sorted. It may come
from a stranger: sizes are compared with what they must be before anything is read.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.placement.identity import model_id
from hotcold.runtime.atomic import replacing
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.corpus import Corpus, cut_contexts
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import GGUFFile, open_gguf, safe_text

VERSION = 1
N_CTX = 512  # tokens of a context that is recorded
PASSAGES = 4  # that the tokens come from, at least
MAX_TOKENS = 1 << 20
_HEADER = 1024  # bytes, at most, of an array's header in a file
_MAX_TEXT = 400


@dataclass(frozen=True)
class Activations:
    """Bits per layer, token and neuron, packed along the neurons (first neuron: highest bit), in stored order."""

    fired: tuple[np.ndarray, ...]  # per layer u8 [tokens, ceil(n_ff / 8)]
    n_ff: tuple[int, ...]
    source: str  # where they are from, for people
    measured: bool

    @property
    def n_tokens(self) -> int:
        return len(self.fired[0])

    def bits(self, layer: int) -> np.ndarray:
        """bool [tokens, n_ff]"""
        return np.unpackbits(self.fired[layer], axis=1, count=self.n_ff[layer]).view(bool)

    def frequency(self, layer: int) -> np.ndarray:
        """f64 [n_ff]"""
        out: np.ndarray = self.bits(layer).mean(axis=0)
        return out


def pack(bits: Sequence[np.ndarray], source: str, measured: bool) -> Activations:
    """bits: per layer bool [tokens, n_ff]."""
    return Activations(tuple(np.packbits(b, axis=1) for b in bits), tuple(b.shape[1] for b in bits), source, measured)


# ---- measured


def record(
    path: Path, corpus: Corpus, tokens: int, threads: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Activations:  # fmt: skip
    """Let the model read about so many tokens, taken evenly from the text. Raises HotcoldError as Trace.open does."""
    from hotcold.runtime.engine import block_sizes
    from hotcold.runtime.tokenizer import Tokenizer
    from hotcold.runtime.trace import Trace

    with open_gguf(path) as file:
        n_ctx = min(N_CTX, ModelConfig.from_gguf(file).n_ctx_train, max(16, tokens // PASSAGES + 1))
        contexts = cut_contexts(corpus, Tokenizer.from_gguf(file), n_ctx, tokens + n_ctx)  # it takes whole contexts
    total = sum(map(len, contexts.tokens))
    done = 0
    with Trace.open(path, threads=threads, n_ctx=n_ctx) as trace:
        rows: list[list[np.ndarray]] = [[] for _ in trace.config.n_ff]
        for ids in contexts.tokens:
            pos = 0
            for n in block_sizes(len(ids), trace.n_batch):
                trace.embed(ids[pos : pos + n], pos)
                first = max(0, int(contexts.bos) - pos)  # a BOS is computed but does not count
                for layer in range(trace.config.n_layer):
                    trace.attention(layer, n, pos)
                    trace.keys(layer, n)
                    rows[layer].append(np.packbits(trace.fired(layer, n)[first:], axis=1))
                    trace.values(layer, n)
                    trace.down(layer, n)
                pos += n
                done += n
                progress(done, total)
        n_ff = trace.config.n_ff
    fired = tuple(np.concatenate(r)[:tokens] for r in rows)
    return Activations(fired, n_ff, f"measured on {len(fired[0])} tokens of {corpus.name}", True)


# ---- drawn


def draw(
    frequency: Sequence[np.ndarray], persistence: Sequence[np.ndarray] | None, tokens: int, source: str, seed: int = 0
) -> Activations:  # fmt: skip
    """Every neuron a chain of two states of its own: on for `frequency` of the tokens, and after a token on which it
    fired with chance `persistence` again (None: whatever the token before was).

    In a model neurons fire together; here the number that fires varies less from token to token.
    """
    rng = np.random.default_rng(seed)
    fired = []
    for layer, f in enumerate(frequency):
        stay = f if persistence is None else np.clip(persistence[layer], 0.0, 1.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            start = np.where(f < 1, f * (1 - stay) / (1 - f), 1.0)  # so that the share of `on` stays f
        start = np.clip(start, 0.0, 1.0)
        bits = np.empty((tokens, len(f)), bool)
        bits[:1] = rng.random((min(tokens, 1), len(f))) < f
        for t in range(1, tokens):
            bits[t] = rng.random(len(f)) < np.where(bits[t - 1], stay, start)
        fired.append(np.packbits(bits, axis=1))
    return Activations(tuple(fired), tuple(map(len, frequency)), source, False)


# ---- files


def save_activations(path: Path, activations: Activations, file: GGUFFile, config: ModelConfig, force: bool) -> None:
    """Complete under its name, or not at all. Raises HotcoldError."""
    from hotcold.placement.counting import source_positions  # compiles kernels: not for `plan --help`

    arrays: dict[str, Any] = {
        "version": np.array([VERSION]), "measured": np.array([activations.measured]),
        "model": np.frombuffer(model_id(file, config).encode(), np.uint8),
        "source": np.frombuffer(activations.source.encode()[:_MAX_TEXT], np.uint8),
        "shape": np.array([activations.n_tokens, *activations.n_ff], np.int64),
    }  # fmt: skip
    for layer, positions in enumerate(source_positions(file, config)):
        bits = np.empty((activations.n_tokens, config.n_ff[layer]), bool)
        bits[:, positions] = activations.bits(layer)
        arrays[f"fired{layer}"] = np.packbits(bits, axis=1)
    with replacing(path, force, sum(f.nbytes for f in activations.fired)) as out:
        np.savez_compressed(out, **arrays)


def load_activations(path: Path, file: GGUFFile, config: ModelConfig) -> Activations:
    """Raises HotcoldError for what is no such file, or is of another model."""
    from hotcold.placement.counting import source_positions

    shown = safe_text(str(path))
    try:
        if path.exists() and not path.is_file():  # a device has no end
            raise HotcoldError(f"{shown}: not a regular file")
        with zipfile.ZipFile(path) as archive:
            members = {info.filename: info for info in archive.infolist()}

            def array(name: str, dtype: Any, shape: tuple[int, ...] | None, most: int) -> np.ndarray:
                info = members.get(f"{name}.npy")
                if info is None or info.file_size > most + _HEADER:
                    raise HotcoldError(f"{shown}: {name}: found {'nothing' if info is None else info.file_size} bytes, "
                                       f"allowed: up to {most}")  # fmt: skip
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
                    raise HotcoldError(f"{shown}: {name}: encrypted, or compressed otherwise than --save-trace does")
                with archive.open(info) as member:
                    values: np.ndarray = np.lib.format.read_array(member, allow_pickle=False)
                if values.dtype != dtype or shape is not None and values.shape != shape:
                    raise HotcoldError(f"{shown}: {name}: found {values.dtype} {list(values.shape)}, allowed: {dtype} "
                                       f"{list(shape or ('n',))}")  # fmt: skip
                return values

            if array("version", np.int64, (1,), 8)[0] != VERSION:
                raise HotcoldError(f"{shown}: version of another hotcold, record it again with --save-trace")
            if array("model", np.uint8, (64,), 64).tobytes() != model_id(file, config).encode():
                raise HotcoldError(f"{shown}: is of another model: record this one with --save-trace")
            n_tokens, *n_ff = array("shape", np.int64, (config.n_layer + 1,), 8 * (config.n_layer + 1)).tolist()
            if not 1 <= n_tokens <= MAX_TOKENS or tuple(n_ff) != config.n_ff:
                raise HotcoldError(f"{shown}: found {n_tokens} tokens, allowed: 1 to {MAX_TOKENS} of this model")
            source = array("source", np.uint8, None, _MAX_TEXT).tobytes().decode("utf-8", "replace")
            measured = bool(array("measured", np.bool_, (1,), 1)[0])
            fired = []
            for layer, positions in enumerate(source_positions(file, config)):
                width = -(-n_ff[layer] // 8)
                packed = array(f"fired{layer}", np.uint8, (n_tokens, width), n_tokens * width)
                bits = np.unpackbits(packed, axis=1, count=n_ff[layer])
                fired.append(np.packbits(bits[:, positions], axis=1))
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, MemoryError) as e:
        reason = getattr(e, "strerror", None) or safe_text(str(e), 120)
        raise HotcoldError(f"{shown}: cannot be read as recorded activations: {reason}") from None
    return Activations(tuple(fired), config.n_ff, safe_text(source, _MAX_TEXT), measured)
