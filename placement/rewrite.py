"""A neuron-split GGUF to another one: neurons in another order, tensors and keys added, replaced or left out.

In: the path of a neuron-split GGUF and what is to change. Out: a GGUF; the runtime's own readers have checked both.
Next: convert/writer.py, which writes it slab by slab under a temporary name.

Rows are moved byte for byte: nothing is decoded, so nothing is lost, whatever the order and however often.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np

from hotcold.convert.gguf_source import copied_value
from hotcold.convert.lazy import FLOAT_TYPES, LazyTensor, QType, from_array, gathered
from hotcold.convert.model import Metadata, MetaValue, u32
from hotcold.convert.precision import Report, cast
from hotcold.convert.target import Target
from hotcold.convert.writer import write_target
from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import GGUFError, HotcoldError
from hotcold.runtime.gguf_file import GGUFFile, open_gguf, safe_text
from hotcold.runtime.weights import load_weights

# Tensors of a layer that hold something per neuron -> rows of one neuron.
NEURON_ROWS = {
    schema.FFN_GATE: 1, schema.FFN_GATE_BIAS: 1, schema.FFN_UP: 1, schema.FFN_UP_BIAS: 1, schema.FFN_UP_DOWN: 2,
    schema.FFN_DOWN_T: 1, schema.FFN_NEURON_ID: 1, schema.FFN_NEURON_COUNT: 1, schema.FFN_PRED_OUT: 1,
    schema.FFN_PRED_OUT_BIAS: 1, schema.FFN_PRED_SIGN: 1,
}  # fmt: skip
# Key matrices held by input column, for layers with a ReLU after the norm: one column per neuron.
NEURON_COLUMNS = (schema.FFN_GATE_T, schema.FFN_UP_T)
# Tensors of the FFN that have nothing per neuron.
OF_THE_LAYER = ("ffn_norm.weight", "ffn_norm.bias", schema.FFN_DOWN_BIAS, schema.FFN_PRED_IN, schema.FFN_PRED_IN_BIAS)
# The writer's own, or about how the source was stored.
_NOT_KEPT = ("general.architecture", "general.alignment", "split.no", "split.count", "split.tensors.count")
_OWN_TYPES = {np.dtype(np.float32): QType.F32, np.dtype(np.float16): QType.F16, np.dtype(np.int32): QType.I32,
              np.dtype(np.int64): QType.I64}  # fmt: skip
_STORED_AS = (*FLOAT_TYPES[1:], QType.Q8_0, QType.Q4_0)  # what floats can become


def rewrite(
    src: Path,
    out: Path,
    *,
    order: Sequence[np.ndarray] | None = None,
    tensors: Mapping[str, tuple[np.ndarray, QType]] | None = None,
    drop: Iterable[str] = (),
    metadata: Mapping[str, MetaValue] | None = None,
    drop_keys: Iterable[str] = (),
    force: bool = False,
    progress: Callable[[str, int], None] | None = None,
) -> int:
    """Write `src` with the changes as `out` and return its size in bytes.

    order: per layer, the present stored position of the neuron that goes to position i; None: as it is.
    tensors: added or replaced; rows per neuron in the new order; floats are stored as the type given.
    drop, drop_keys: tensors and keys to leave out; names that are not there are fine.
    progress: called with the tensor's name and the bytes written.
    Raises HotcoldError, naming what and where; then there is no `out` (or the old one).
    """
    with open_gguf(src) as file:
        target = plan_rewrite(file, order, tensors or {}, drop, metadata or {}, drop_keys)
        return write_target(target, out, progress or (lambda name, n_bytes: None), file.release_pages, force)


def plan_rewrite(
    file: GGUFFile,
    order: Sequence[np.ndarray] | None,
    tensors: Mapping[str, tuple[np.ndarray, QType]],
    drop: Iterable[str],
    metadata: Mapping[str, MetaValue],
    drop_keys: Iterable[str],
) -> Target:
    """What `rewrite` writes: checked, nothing read but the neuron tables."""
    config = split_config(file)
    load_weights(file, config)
    orders = _checked_orders(file, config, order)
    dropped = set(drop)
    kept = {name: info for name, info in file.tensors.items() if name not in dropped}
    lazy = {name: _moved(file, name, orders) for name in kept if name not in tensors}
    new = {name: _new(name, array, qtype) for name, (array, qtype) in tensors.items()}
    target = Target(
        config.arch, _metadata(file, metadata, set(drop_keys)),
        [(new if name in new else lazy)[name] for name in _names(list(kept), new)], config.activation,
    )  # fmt: skip
    if any(t.qtype not in (*FLOAT_TYPES, QType.I32, QType.I64) for t in target.tensors):
        target.metadata.setdefault("general.quantization_version", u32(gguf.GGML_QUANT_VERSION))
    return target


def split_config(file: GGUFFile) -> ModelConfig:
    """The configuration of a neuron-split file. Raises HotcoldError for another layout, saying what to do."""
    config = ModelConfig.from_gguf(file)
    if config.layout != "neuron-split":
        path = safe_text(str(file.path))
        raise HotcoldError(f"{path}: has the stock layout: its neurons cannot be told apart; first run: "
                           f"hotcold convert {path} -o OUT.gguf")
    return config


def _checked_orders(file: GGUFFile, config: ModelConfig, order: Sequence[np.ndarray] | None) -> list[np.ndarray | None]:
    """Per layer the order, or None where neurons stay where they are."""
    if order is None:
        return [None] * config.n_layer
    if len(order) != config.n_layer:
        raise HotcoldError(f"{file.path}: an order of neurons for {len(order)} layers, the model has {config.n_layer}")
    result: list[np.ndarray | None] = []
    for layer, (given, n_ff) in enumerate(zip(order, config.n_ff, strict=True)):
        positions = np.asarray(given)
        whole = positions.dtype.kind in "iu" and positions.shape == (n_ff,)
        if not whole or not np.array_equal(np.sort(positions), np.arange(n_ff)):
            raise HotcoldError(f"{file.path}: layer {layer}: the order of neurons is no permutation of 0..{n_ff - 1}")
        same = np.array_equal(positions, np.arange(n_ff))
        result.append(None if same else positions.astype(np.int64))
    return result


def _moved(file: GGUFFile, name: str, orders: list[np.ndarray | None]) -> LazyTensor:
    """A tensor of the source, its neurons in the new order."""
    info = file.tensors[name]
    t = from_array(name, file.data(name), QType(info.ggml_type), tuple(info.shape), "")
    match = re.fullmatch(r"blk\.([0-9]+)\.(ffn_.*)", name)
    if match is None:
        return t
    order, part = orders[int(match[1])], match[2]
    if order is None or part in OF_THE_LAYER:
        return t
    if part in NEURON_COLUMNS:
        return _moved_columns(file, t, order)
    if part not in NEURON_ROWS:  # better than a model that is quietly wrong
        raise GGUFError(f"{file.path}: tensor {safe_text(name)}: neurons of this tensor cannot be reordered: update "
                        "hotcold")
    n = NEURON_ROWS[part]
    rows = (n * order[:, None] + np.arange(n)).reshape(-1)  # all rows of a neuron, side by side
    return gathered(t, rows)


def _moved_columns(file: GGUFFile, t: LazyTensor, order: np.ndarray) -> LazyTensor:
    if t.qtype not in FLOAT_TYPES:
        raise HotcoldError(f"{file.path}: tensor {t.name} is {t.qtype.name} and holds one neuron per column: columns "
                           "lie inside blocks, so neurons cannot be reordered; convert the model with --outtype f16")
    return replace(t, read=lambda a, b: t.read(a, b)[:, order])


def _new(name: str, array: np.ndarray, qtype: QType) -> LazyTensor:
    """A tensor that the caller made, stored as `qtype`."""
    own = _OWN_TYPES.get(array.dtype)
    shown = f"tensor {safe_text(name)}: {array.dtype} {list(array.shape)}"
    if own is None or array.ndim not in (1, 2) or array.size == 0:
        raise HotcoldError(f"{shown} cannot be written: allowed are vectors and matrices of float32, float16, int32, "
                           "int64")
    t = from_array(name, array, own, array.shape, "new")
    if own == qtype:
        return t
    if own not in FLOAT_TYPES or qtype not in _STORED_AS:
        raise HotcoldError(f"{shown} cannot be stored as {qtype.name}")
    block = gguf.GGML_QUANT_SIZES[qtype][0]
    if array.shape[-1] % block:
        raise HotcoldError(f"{shown} cannot be stored as {qtype.name}: rows do not divide into blocks of {block}")
    return cast(t, qtype, Report())


def _names(kept: list[str], new: Mapping[str, LazyTensor]) -> list[str]:
    """Names in file order; a new tensor of a layer goes after the last one that the layer has."""
    added = [name for name in new if name not in kept]
    last = {_block(name): i for i, name in enumerate(kept)}
    result = []
    for i, name in enumerate(kept):
        result.append(name)
        block = _block(name)
        if block and last[block] == i:
            result += [n for n in added if _block(n) == block]
    return result + [n for n in added if not _block(n) or _block(n) not in last]


def _block(name: str) -> str:
    """'blk.3.' of a tensor of layer 3, '' of others."""
    match = re.match(r"blk\.[0-9]+\.", name)
    return match[0] if match else ""


def _metadata(file: GGUFFile, changes: Mapping[str, MetaValue], drop: set[str]) -> Metadata:
    """All keys with their types and in their order, those that change in place, new ones at the end."""
    kept: Metadata = {}
    for key in file.metadata:
        value = None if key in _NOT_KEPT or key in drop else copied_value(file, key)
        if value is not None:
            kept[key] = value
    return kept | dict(changes)
