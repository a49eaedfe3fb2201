"""Profiles as files: the names in them, writing, and reading with every number checked.

In: Profile, or a path. Out: a GGUF of general.architecture "hotcold-profile", or Profile. Next: profile.py, which
has the functions for everyone; profiling.py, which also keeps unfinished runs in such files.

    blk.N.fired, blk.N.pairs  i64 [n_ff]     blk.N.magnitude  f64 [n_ff]     neurons in the source model's order
    blk.N.samples             f16 [n_samples, n_embd]     sample_text  i64 [n_samples]     both absent: no samples
    contexts                  i64 [counted contexts], of all parts one after the other
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType
from gguf import GGUFValueType as ValueType

from hotcold.placement.profile import MAX_COUNT, Part, Profile, offsets
from hotcold.runtime import schema
from hotcold.runtime.atomic import replacing
from hotcold.runtime.errors import GGUFError
from hotcold.runtime.gguf_file import GGUFFile, open_gguf, safe_text
from hotcold.runtime.keys import show

ARCHITECTURE = "hotcold-profile"
VERSION = 1
_P = "hotcold.profile."
_KEY_VERSION, _KEY_MODEL, _KEY_LAYERS, _KEY_PAIRS = _P + "version", _P + "model", _P + "layers", _P + "pairs"
_KEY_COMPLETE, _KEY_WANTED, _KEY_SHARD, _KEY_SHARDS = _P + "complete", _P + "wanted", _P + "shard", _P + "shards"
_PART = _P + "part."  # arrays, one entry per part: .corpus .sha256 .n_ctx .total .samples .contexts (how many)

_MAX_LAYERS = 4096
_MAX_PARTS = 4096
_TYPES = {"fired": GGMLType.I64, "pairs": GGMLType.I64, "magnitude": GGMLType.F64}
_CHECKED_AT_ONCE = 1 << 24  # elements


@dataclass(frozen=True)
class State:
    """Whether a run is finished, and what it is to count in all."""

    complete: bool = True
    wanted: int = 0  # contexts that the file will hold in the end
    shard: tuple[int, int] = (0, 1)  # shard i (from 0) of n


def write_profile(path: Path, profile: Profile, state: State, force: bool) -> None:
    """Complete under its name, or not at all. Raises HotcoldError."""
    parts = profile.parts
    n_bytes = 24 * sum(profile.n_ff) + sum(s.nbytes for s in profile.samples) + (1 << 16)
    with replacing(path, force, n_bytes) as file:
        # The writer opens the temporary file itself; `file` is the same one, synced and renamed afterwards.
        writer = gguf.GGUFWriter(file.name, ARCHITECTURE)
        writer.add_uint32(_KEY_VERSION, VERSION)
        writer.add_string(_KEY_MODEL, profile.model)
        writer.add_uint32(_KEY_LAYERS, profile.n_layer)
        writer.add_uint64(schema.KEY_PROFILE_TOKENS, profile.n_tokens)
        writer.add_uint64(_KEY_PAIRS, profile.n_pairs)
        writer.add_key_value(schema.KEY_PROFILE_CORPUS, profile.corpus, ValueType.STRING)
        writer.add_key_value(schema.KEY_PROFILE_SHA256, profile.sha256, ValueType.STRING)
        writer.add_bool(_KEY_COMPLETE, state.complete)
        for key, value in ((_KEY_WANTED, state.wanted), (_KEY_SHARD, state.shard[0]), (_KEY_SHARDS, state.shard[1])):
            writer.add_uint64(key, value)
        if parts:
            _write_parts(writer, parts)
        for layer in range(profile.n_layer):
            for name, arrays in (("fired", profile.fired), ("pairs", profile.pairs), ("magnitude", profile.magnitude)):
                dtype = np.float64 if name == "magnitude" else np.int64
                writer.add_tensor(schema.block(layer, name), np.ascontiguousarray(arrays[layer], dtype))
            if len(profile.sample_text):
                samples = np.ascontiguousarray(profile.samples[layer], np.float16)
                writer.add_tensor(schema.block(layer, "samples"), samples)
        if len(profile.sample_text):
            writer.add_tensor("sample_text", np.ascontiguousarray(profile.sample_text, np.int64))
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


def _write_parts(writer: gguf.GGUFWriter, parts: tuple[Part, ...]) -> None:
    columns: tuple[tuple[str, list[Any], ValueType], ...] = (
        ("corpus", [p.corpus for p in parts], ValueType.STRING),
        ("sha256", [p.sha256 for p in parts], ValueType.STRING),
        ("n_ctx", [p.n_ctx for p in parts], ValueType.UINT64),
        ("total", [p.total for p in parts], ValueType.UINT64),
        ("samples", [p.samples for p in parts], ValueType.UINT64),
        ("contexts", [len(p.contexts) for p in parts], ValueType.UINT64),
    )
    for name, values, kind in columns:
        writer.add_key_value(_PART + name, values, ValueType.ARRAY, kind)
    contexts = np.concatenate([p.contexts for p in parts]).astype(np.int64)
    if len(contexts):
        writer.add_tensor("contexts", contexts)


# ------------------------------------------------------------------ reading


def read_profile(path: str | os.PathLike[str]) -> tuple[Profile, State]:
    """Read and check a file, finished or not. Raises HotcoldError naming the file and the layer."""
    file = open_gguf(path)
    try:
        return _Reader(file).read()
    finally:
        file.close()  # the arrays keep the mapping alive


class _Reader:
    """Checked access to one open file."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file

    def _error(self, what: str, found: object, allowed: str) -> GGUFError:
        return GGUFError(f"{safe_text(str(self._file.path))}: {what}: found {found}, allowed: {allowed}")

    def _integer(self, key: str, low: int, high: int) -> int:
        value = self._file.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            found = "nothing" if value is None else show(value)
            raise self._error(f"key '{key}'", found, f"an integer from {low} to {high}")
        return value

    def _text(self, key: str, longest: int = 4096) -> str:
        value = self._file.get(key)
        if not isinstance(value, str) or len(value) > longest:
            raise self._error(f"key '{key}'", "no string, or a long one", f"a string of up to {longest} characters")
        return value

    def _tensor(self, name: str, kind: GGMLType, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """A tensor of this type, and this shape or any vector."""
        info = self._file.tensors.get(name)
        allowed = f"{kind.name} of shape {list(shape)}" if shape else f"a vector of {kind.name}"
        if info is None:
            raise self._error(f"tensor '{name}'", "nothing", allowed)
        if info.ggml_type != kind or (tuple(info.shape) != shape if shape else len(info.shape) != 1):
            raise self._error(f"tensor '{name}'", f"{info.ggml_type.name} of shape {list(info.shape)}", allowed)
        return self._file.data(name)

    def read(self) -> tuple[Profile, State]:
        arch = self._file.get("general.architecture")
        if arch != ARCHITECTURE:
            found = "nothing" if arch is None else show(arch)
            raise self._error("general.architecture", found, f"{ARCHITECTURE}: this is not a profile")
        if self._integer(_KEY_VERSION, 1, (1 << 32) - 1) > VERSION:
            raise self._error(f"key '{_KEY_VERSION}'", "a newer version", f"up to {VERSION}: upgrade hotcold")
        n_layer = self._integer(_KEY_LAYERS, 1, _MAX_LAYERS)
        n_tokens = self._integer(schema.KEY_PROFILE_TOKENS, 0, MAX_COUNT)
        n_pairs = self._integer(_KEY_PAIRS, 0, n_tokens)
        parts = self._parts()
        most = sum(len(p.contexts) * p.n_ctx for p in parts)
        if parts and n_tokens > most:
            allowed = f"at most {most}: as many as its contexts hold"
            raise self._error(f"key '{schema.KEY_PROFILE_TOKENS}'", n_tokens, allowed)
        samples, sample_text = self._samples(n_layer, n_tokens, parts)
        layers = [self._layer(layer, n_tokens, n_pairs) for layer in range(n_layer)]
        profile = Profile(
            model=safe_text(self._text(_KEY_MODEL)),
            n_tokens=n_tokens,
            n_pairs=n_pairs,
            corpus=safe_text(self._text(schema.KEY_PROFILE_CORPUS, 1 << 20), 1 << 20),
            sha256=safe_text(self._text(schema.KEY_PROFILE_SHA256)),
            fired=tuple(x[0] for x in layers),
            pairs=tuple(x[1] for x in layers),
            magnitude=tuple(x[2] for x in layers),
            samples=samples,
            sample_text=sample_text,
            parts=parts,
        )
        return profile, self._state(parts)

    def _state(self, parts: tuple[Part, ...]) -> State:
        complete = self._file.get(_KEY_COMPLETE)
        if not isinstance(complete, bool):
            raise self._error(f"key '{_KEY_COMPLETE}'", "nothing, or no bool", "true or false")
        shards = self._integer(_KEY_SHARDS, 1, 1 << 32)
        done = sum(len(p.contexts) for p in parts)
        wanted = self._integer(_KEY_WANTED, 0 if complete else done, MAX_COUNT)
        return State(complete, wanted, (self._integer(_KEY_SHARD, 0, shards - 1), shards))

    def _layer(self, layer: int, n_tokens: int, n_pairs: int) -> list[np.ndarray]:
        names = [schema.block(layer, name) for name in _TYPES]
        fired = self._tensor(names[0], GGMLType.I64)
        rest = [self._tensor(n, t, fired.shape) for n, t in zip(names[1:], list(_TYPES.values())[1:], strict=True)]
        pairs, magnitude = rest
        for name, bad, allowed in (
            ("fired", (fired < 0) | (fired > n_tokens), f"counts from 0 to {n_tokens}, the tokens"),
            ("pairs", (pairs < 0) | (pairs > fired) | (pairs > n_pairs), f"at most fired, and {n_pairs}, the pairs"),
            ("magnitude", ~(np.isfinite(magnitude) & (magnitude >= 0)), "finite numbers from 0"),
            ("magnitude", (fired == 0) & (magnitude != 0), "0 for a neuron that never fired"),
        ):
            if bad.any():
                i = int(np.flatnonzero(bad)[0])
                value = {"fired": fired, "pairs": pairs, "magnitude": magnitude}[name][i]
                raise self._error(f"layer {layer}: {name} of neuron {i}", value, allowed)
        for name, values, most in (("fired", fired, MAX_COUNT), ("magnitude", magnitude, np.finfo(np.float64).max)):
            with np.errstate(over="ignore"):
                total = values.sum(dtype=np.float64)  # i64 would wrap
            if total > most:
                raise self._error(f"layer {layer}: sum of {name}", f"{total:.6g}", f"up to {most:.6g}")
        return [fired, pairs, magnitude]

    def _samples(
        self, n_layer: int, n_tokens: int, parts: tuple[Part, ...]
    ) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """-> FFN inputs per layer, contexts they are from."""
        first = self._file.tensors.get(schema.block(0, "samples"))
        if first is None:
            if "sample_text" in self._file.tensors:
                raise self._error("tensor 'sample_text'", "it", "it only together with blk.0.samples")
            return tuple(np.zeros((0, 0), np.float16) for _ in range(n_layer)), np.zeros(0, np.int64)
        if len(first.shape) != 2 or first.shape[0] > n_tokens:
            allowed = f"a matrix of up to {n_tokens} rows"
            raise self._error("tensor 'blk.0.samples'", f"shape {list(first.shape)}", allowed)
        shape = (int(first.shape[0]), int(first.shape[1]))
        samples = tuple(self._tensor(schema.block(i, "samples"), GGMLType.F16, shape) for i in range(n_layer))
        for layer, s in enumerate(samples):
            step = max(1, _CHECKED_AT_ONCE // shape[1])
            if not all(np.isfinite(s[i : i + step]).all() for i in range(0, len(s), step)):
                raise self._error(f"layer {layer}: samples", "NaN or infinities", "finite numbers")
        text = self._tensor("sample_text", GGMLType.I64, shape[:1])
        counted = [p.contexts + o for p, o in zip(parts, offsets(parts), strict=False)]
        known = not parts or bool(np.isin(text, np.concatenate(counted)).all())
        if (np.diff(text) < 0).any() or text[0] < 0 or text[-1] > MAX_COUNT or not known:
            raise self._error("tensor 'sample_text'", "other numbers", "numbers of counted contexts, ascending")
        return samples, text

    def _parts(self) -> tuple[Part, ...]:
        if _PART + "corpus" not in self._file.metadata:
            return ()
        n = self._file.length(_PART + "corpus") or 0
        if not 1 <= n <= _MAX_PARTS:
            raise self._error(f"key '{_PART}corpus'", n, f"1 to {_MAX_PARTS} strings")
        corpus, sha256 = (self._column(name, n, list) for name in ("corpus", "sha256"))
        n_ctx, total, samples, counts = (
            self._column(name, n, np.ndarray) for name in ("n_ctx", "total", "samples", "contexts")
        )
        if sum(counts) > MAX_COUNT or sum(total) > MAX_COUNT:
            raise self._error(f"keys '{_PART}*'", "absurd numbers of contexts", "real ones")
        contexts = self._tensor("contexts", GGMLType.I64, (sum(counts),)) if sum(counts) else np.zeros(0, np.int64)
        out, start = [], 0
        for i in range(n):
            own = contexts[start : start + counts[i]]
            start += counts[i]
            if len(own) and (own[0] < 0 or own[-1] >= total[i] or (np.diff(own) <= 0).any()):
                raise self._error("tensor 'contexts'", f"other numbers in part {i}", f"0 to {total[i] - 1}, ascending")
            name = safe_text(corpus[i], 1 << 16)
            out.append(Part(name, safe_text(sha256[i]), n_ctx[i], total[i], samples[i], own))
        return tuple(out)

    def _column(self, name: str, n: int, kind: type) -> list[Any]:
        key, allowed = _PART + name, f"an array of {n} {'strings' if kind is list else 'integers'}, one per part"
        if self._file.length(key) != n:
            raise self._error(f"key '{key}'", self._file.length(key), allowed)
        values: Any = self._file.metadata[key]
        numbers = isinstance(values, np.ndarray) and values.dtype.kind in "iu"
        if not (isinstance(values, list) if kind is list else numbers):
            raise self._error(f"key '{key}'", "another type", allowed)
        out: list[Any] = list(values)
        if numbers:
            out = [int(v) for v in out]
        if numbers and not all(0 <= v <= MAX_COUNT for v in out):
            raise self._error(f"key '{key}'", "a number out of range", f"0 to {MAX_COUNT}")
        return out
