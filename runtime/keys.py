"""Metadata read with types and bounds.

In: a GGUFFile. Out: Keys, whose methods return plain checked values or raise. Next: config.py, which uses it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hotcold.runtime import schema
from hotcold.runtime.errors import GGUFError
from hotcold.runtime.gguf_file import GGUFFile, safe_text


def show(value: Any) -> str:
    """A metadata value for an error message: short and safe to print."""
    if isinstance(value, str):
        return f"'{safe_text(value, 60)}'"
    if isinstance(value, list | np.ndarray):
        return f"an array of {len(value)}"
    return repr(value)


def _bound(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.7g}"


class Keys:
    """Typed, bounded reading of metadata. Short keys get the architecture in front of them.

    `used`: full names of all keys asked for, so that a converter can tell which ones nobody understood.
    """

    def __init__(self, f: GGUFFile) -> None:
        self.file = f
        self.used: set[str] = set()
        self.arch = ""
        arch = self.text("general.architecture")
        if arch not in schema.ARCHITECTURES:
            raise self.error("general.architecture", f"'{safe_text(arch)}'", ", ".join(schema.ARCHITECTURES))
        self.arch = arch

    def error(self, what: str, found: object, allowed: str) -> GGUFError:
        path = safe_text(str(self.file.path))
        return GGUFError(f"{path}: {safe_text(what)}: found {found}, allowed: {allowed}")

    def full(self, key: str) -> str:
        own = key.startswith(("general.", "hotcold.", "tokenizer."))
        return key if own else f"{self.arch}.{key}"

    def has(self, key: str) -> bool:
        self.used.add(self.full(key))
        return self.full(key) in self.file.metadata

    def raw(self, key: str, allowed: str = "a value") -> Any:
        """The value as it is; GGUFError when the key is absent."""
        key = self.full(key)
        self.used.add(key)
        if key not in self.file.metadata:
            raise self.error(f"key '{key}'", "nothing", allowed)
        return self.file.metadata[key]

    def text(self, key: str, default: str | None = None) -> str:
        if default is not None and not self.has(key):
            return default
        value = self.raw(key, "a string")
        if not isinstance(value, str):
            raise self.error(f"key '{self.full(key)}'", show(value), "a string")
        return value

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        if default is not None and not self.has(key):
            return default
        allowed = f"an integer from {low} to {high}"
        value = self.raw(key, allowed)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(f"key '{self.full(key)}'", show(value), allowed)
        return value

    def real(self, key: str, low: float, high: float, default: float | None = None) -> float:
        if default is not None and not self.has(key):
            return default
        allowed = f"a number from {_bound(low)} to {_bound(high)}"
        value = self.raw(key, allowed)
        # NaN fails the comparison too.
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.error(f"key '{self.full(key)}'", show(value), allowed)
        return float(value)

    def per_layer(self, key: str, n_layer: int, low: float, high: float, kinds: str) -> list[Any]:
        """An array [n_layer] of the NumPy kinds given, or one number for all layers."""
        allowed = f"{n_layer} numbers (one per layer) or one, from {_bound(low)} to {_bound(high)}"
        value = self.raw(key, allowed)
        values = np.atleast_1d(np.asarray(value)) if not isinstance(value, str | list) else np.empty(0, "U1")
        if values.dtype.kind not in kinds or len(values) != n_layer and np.ndim(value):
            raise self.error(f"key '{self.full(key)}'", show(value), allowed)
        bad = [v for v in values.tolist() if not low <= v <= high]
        if bad:
            raise self.error(f"key '{self.full(key)}'", show(bad[0]), allowed)
        out: list[Any] = values.tolist()
        return out if np.ndim(value) else out * n_layer

    def same_for_all(self, key: str, n_layer: int, low: int, high: int, default: int | None = None) -> int:
        if default is not None and not self.has(key):
            return default
        values = self.per_layer(key, n_layer, low, high, "iu")
        if len(set(values)) > 1:
            raise self.error(f"key '{self.full(key)}'", show(self.raw(key)), "the same number in every layer")
        return int(values[0])

    def matrix(self, name: str, allowed: str) -> tuple[int, int]:
        """Shape of a tensor that must be there and have two dimensions."""
        info = self.file.tensors.get(name)
        if info is None:
            raise self.error(f"tensor '{name}'", "nothing", allowed)
        if len(info.shape) != 2:
            raise self.error(f"tensor '{name}'", f"shape {list(info.shape)}", allowed)
        return info.shape[0], info.shape[1]
