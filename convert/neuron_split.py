"""StockModel -> neuron-split layout (runtime/schema.py): one row per neuron, up row and down column side by side.

In: StockModel, `--outtype`. Out: Target. Neurons keep the source's order; placement/ sorts them. Next: writer.py.
"""

from __future__ import annotations

import numpy as np
from gguf import GGUFValueType

from hotcold.convert.lazy import LazyTensor, QType, from_array, interleaved, renamed, transposed
from hotcold.convert.model import Metadata, StockModel, array, string, u32
from hotcold.convert.outtype import plain_type, turned_type
from hotcold.convert.precision import Report, cast
from hotcold.convert.target import Target
from hotcold.runtime import schema


def split_neurons(model: StockModel, outtype: str, report: Report) -> Target:
    """Lay the model out for the runtime. Everything outside the FFN keeps its name and layout."""
    tensors: list[LazyTensor] = []
    names = schema.turned(model.gated)
    for name, t in model.tensors.items():
        part = name.split(".", 2)[2] if name.startswith("blk.") else ""
        layer = int(name.split(".")[1]) if part else -1
        turned = bool(model.norm_relu) and layer >= 0 and model.norm_relu[layer] and part in names
        if turned:
            tensors.append(_turned(t, schema.block(layer, names[part]), outtype, model, report))
        if part == schema.FFN_UP:
            tensors += _values(model, layer, outtype, report, with_up=not turned)
        elif turned:
            continue
        elif part != schema.FFN_DOWN:  # went with its up rows
            tensors.append(cast(t, plain_type(t, outtype, model.auto_type, report), report))
    target = Target(model.arch, model.metadata | split_metadata(model), tensors, model.activation)
    target.add_file_type()
    return target


def split_metadata(model: StockModel) -> Metadata:
    """The keys that make a file neuron-split."""
    flags = [int(flag) for flag in model.norm_relu]
    norm_relu = {schema.KEY_NORM_RELU: array(flags, GGUFValueType.UINT32)} if any(flags) else {}
    return norm_relu | {
        schema.KEY_VERSION: u32(schema.VERSION),
        schema.KEY_ACTIVATION: string(model.activation),
        schema.KEY_THRESHOLD: array(model.thresholds, GGUFValueType.FLOAT32),
        schema.KEY_NEURONS: array(model.n_ff, GGUFValueType.UINT32),
    }


def _turned(t: LazyTensor, name: str, outtype: str, model: StockModel, report: Report) -> LazyTensor:
    """A matrix by input column: inputs that a ReLU after the norm makes 0 are then rows that need not be read."""
    columns = renamed(transposed(t), name)
    return cast(columns, turned_type(columns, None, outtype, model.auto_type, report), report,
                measure=columns.was is not None)


def _values(model: StockModel, layer: int, outtype: str, report: Report, with_up: bool) -> list[LazyTensor]:
    """Up rows (where they are not there by column), down columns and the neuron table of one layer."""
    up = model.tensors[schema.block(layer, schema.FFN_UP)]      # [n_ff, n_embd]
    down = model.tensors[schema.block(layer, schema.FFN_DOWN)]  # [n_embd, n_ff]
    turned = transposed(down)                                   # [n_ff, n_embd]
    ids = np.arange(up.n_rows, dtype=np.int32)
    id_name = schema.block(layer, schema.FFN_NEURON_ID)
    table = from_array(id_name, ids, QType.I32, ids.shape, "new")
    qtype = turned_type(turned, up if model.gated else None, outtype, model.auto_type, report)
    # Values that were quantized before are quantized a second time: worth measuring.
    values = cast(turned, qtype, report, measure=turned.was is not None)
    if model.gated:
        name = schema.block(layer, schema.FFN_UP_DOWN)
        return [interleaved(name, cast(up, qtype, report), values), table]
    name = schema.block(layer, schema.FFN_DOWN_T)
    rows = [cast(up, plain_type(up, outtype, model.auto_type, report), report)] if with_up else []
    return [*rows, renamed(values, name), table]
