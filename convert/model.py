"""The one form every source is brought to: a model with stock names and stock layout, read lazily.

In: families/ (Hugging Face) or gguf_source.py. Out: StockModel and typed metadata values.
Next: neuron_split.py or stock.py, which lay it out for the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gguf import GGUFValueType

from hotcold.convert.lazy import LazyTensor, QType
from hotcold.runtime import schema
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import safe_text


@dataclass(frozen=True)
class MetaValue:
    """A metadata value with its GGUF type; arrays are lists with an element type."""

    value: Any
    type: GGUFValueType
    sub_type: GGUFValueType | None = None


Metadata = dict[str, MetaValue]


def u32(value: int) -> MetaValue:
    return MetaValue(int(value), GGUFValueType.UINT32)


def f32(value: float) -> MetaValue:
    return MetaValue(float(value), GGUFValueType.FLOAT32)


def boolean(value: bool) -> MetaValue:
    return MetaValue(bool(value), GGUFValueType.BOOL)


def string(value: str) -> MetaValue:
    return MetaValue(value, GGUFValueType.STRING)


def array(values: list, sub_type: GGUFValueType) -> MetaValue:
    return MetaValue(values, GGUFValueType.ARRAY, sub_type)


def relufy_metadata(rank: int, n_tokens: int, errors: list[float]) -> Metadata:
    """What hotcold relufy did, for people and reports. errors: [n_layer]."""
    return {
        schema.KEY_RELUFY_RANK: u32(rank),
        schema.KEY_RELUFY_TOKENS: MetaValue(n_tokens, GGUFValueType.UINT64),
        schema.KEY_RELUFY_ERROR: array(errors, GGUFValueType.FLOAT32),
    }


# Ranges of the GGUF types that this package writes from numbers of a stranger's JSON.
_RANGES = {
    GGUFValueType.FLOAT32: (-float(np.finfo(np.float32).max), float(np.finfo(np.float32).max)),
    GGUFValueType.UINT32: (0, 2**32 - 1),
    GGUFValueType.INT32: (-(2**31), 2**31 - 1),
}


def check_fits(metadata: Metadata) -> None:
    """Raise HotcoldError, naming the key, for a value that its GGUF type cannot hold, or text that is not Unicode."""
    for key, meta in metadata.items():
        kind = meta.sub_type if meta.type == GGUFValueType.ARRAY else meta.type
        for value in meta.value if isinstance(meta.value, list) else [meta.value]:
            if isinstance(value, str):
                try:
                    value.encode("utf-8")
                except UnicodeEncodeError:
                    raise HotcoldError(f"{safe_text(key)}: {ascii(value[:60])} is not valid Unicode: a lone "
                                       "surrogate or an undecodable name: correct the source") from None
            elif kind in _RANGES:
                low, high = _RANGES[kind]
                if math.isfinite(value) and not low <= value <= high:
                    raise HotcoldError(f"{safe_text(key)}: {value:g} does not fit {kind.name}, allowed: {low:g} to "
                                       f"{high:g}: correct the source")


@dataclass
class StockModel:
    """A model as llama.cpp would name and lay it out, whatever it came from."""

    arch: str
    source: str  # "Hugging Face folder" | "stock GGUF" | "neuron-split GGUF"
    metadata: Metadata  # without general.architecture, general.file_type and, but for hotcold.relufy.*, hotcold.*
    tensors: dict[str, LazyTensor]  # stock name -> tensor, in the order they are to be written
    activation: str
    thresholds: list[float]  # [n_layer]
    gated: bool
    n_layer: int
    n_ff: list[int] = field(default_factory=list)  # [n_layer]
    norm_relu: list[bool] = field(default_factory=list)  # [n_layer]: a ReLU follows the layer's norms; empty: nowhere
    auto_type: QType | None = None  # what `--outtype auto` means for matrices; None: their own type
    auto_reason: str = ""
    release: Callable[[], None] = lambda: None  # gives back memory that reading tensors has mapped
