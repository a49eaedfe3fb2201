"""A stock or neuron-split GGUF -> StockModel.

In: a GGUF that runtime/gguf_file.py has checked. Out: StockModel with the neurons in the source model's order.
Next: neuron_split.py or stock.py.
"""

from __future__ import annotations

import re

import numpy as np
from gguf import GGUFValueType

from hotcold.convert.lazy import LazyTensor, QType, from_array, gathered, renamed, transposed
from hotcold.convert.model import STOCK_ACTIVATION, Metadata, MetaValue, StockModel
from hotcold.convert.precision import Report
from hotcold.runtime import schema
from hotcold.runtime.errors import GGUFError, HotcoldError
from hotcold.runtime.gguf_file import DEQUANTIZABLE_TYPES, GGUFFile, safe_text

# Written anew for the target, or about this file's own layout.
OWN_KEYS = ("general.architecture", "general.alignment", "general.file_type", "general.quantization_version",
            "split.no", "split.count", "split.tensors.count")
TOP_TENSORS = ("token_embd.weight", "position_embd.weight", "output_norm.weight", "output_norm.bias", "output.weight",
               "rope_freqs.weight")
BLOCK_TENSORS = (
    "attn_norm.weight", "attn_norm.bias", "attn_q.weight", "attn_q.bias", "attn_k.weight", "attn_k.bias",
    "attn_v.weight", "attn_v.bias", "attn_output.weight", "attn_output.bias", "attn_q_norm.weight",
    "attn_k_norm.weight", "ffn_norm.weight", "ffn_norm.bias", "ffn_gate.weight", schema.FFN_GATE_BIAS, "ffn_up.weight",
    "ffn_up.bias", "ffn_down.weight", "ffn_down.bias",
)
SPLIT_TENSORS = (schema.FFN_UP_DOWN, schema.FFN_DOWN_T, schema.FFN_NEURON_ID)
HARMLESS_TENSORS = ("attn_rot_embd.weight",)  # frequencies that old converters stored beside freq_base
MAX_LAYERS = 1024


def load_gguf(f: GGUFFile, report: Report) -> StockModel:
    """Describe a GGUF as a stock model. Raises HotcoldError for what hotcold cannot compute, naming it."""
    arch = f.get("general.architecture")
    if not isinstance(arch, str):
        raise GGUFError(f"{f.path}: general.architecture is missing: not a model file")
    _refuse_unsupported(f, arch)
    n_layer = f.get(f"{arch}.block_count")
    if not isinstance(n_layer, int) or not 1 <= n_layer <= MAX_LAYERS:
        raise GGUFError(f"{f.path}: {arch}.block_count is {safe_text(str(n_layer))}: allowed: 1 to {MAX_LAYERS}")
    split = schema.KEY_VERSION in f.metadata
    tensors = _named_tensors(f, n_layer, split, report)
    gated = schema.block(0, schema.FFN_GATE) in tensors
    if split:
        tensors = _unsplit(f, tensors, n_layer, gated)
    n_ff = []
    for layer in range(n_layer):
        n_ff.append(_check_ffn(f, tensors, layer, gated))
    activation = f.get(schema.KEY_ACTIVATION, STOCK_ACTIVATION[arch])
    if activation not in schema.ACTIVATIONS:
        raise GGUFError(f"{f.path}: {schema.KEY_ACTIVATION} is {safe_text(str(activation))}: "
                        f"allowed: {', '.join(schema.ACTIVATIONS)}")
    return StockModel(
        arch=arch, source="neuron-split GGUF" if split else "stock GGUF", metadata=_metadata(f, report),
        tensors=tensors, activation=activation, thresholds=_thresholds(f, n_layer), gated=gated,
        n_layer=n_layer, n_ff=n_ff, release=f.release_pages)


def _refuse_unsupported(f: GGUFFile, arch: str) -> None:
    if arch not in schema.ARCHITECTURES:
        raise HotcoldError(f"{f.path}: architecture {safe_text(arch)!r}: supported are "
                           f"{', '.join(schema.ARCHITECTURES)}")
    version = f.get(schema.KEY_VERSION)
    if version is not None and (not isinstance(version, int) or version != schema.VERSION):
        raise HotcoldError(f"{f.path}: {schema.KEY_VERSION} is {safe_text(str(version))}, this program knows "
                           f"{schema.VERSION}: update hotcold or convert the model again")
    experts = f.get(f"{arch}.expert_count", 0)
    if experts or any("_exps" in name or "ffn_gate_inp" in name for name in f.tensors):
        raise HotcoldError(f"{f.path}: a mixture of experts ({safe_text(str(experts))} experts): not supported, "
                           "only dense feed-forward networks are")
    fused = next((n for n in f.tensors if ".attn_qkv." in n), None)
    if fused:
        raise HotcoldError(f"{f.path}: tensor {safe_text(fused)}: fused q/k/v matrices are not supported, attn_q, "
                           "attn_k and attn_v are")
    scaling = f.get(f"{arch}.rope.scaling.type", "none")
    if scaling not in ("none", "linear", "yarn") or any("rope_factors_" in n for n in f.tensors):
        raise HotcoldError(f"{f.path}: rope scaling {safe_text(str(scaling))!r}: supported are none, linear, yarn and "
                           "Llama 3's rope_freqs.weight")


def _named_tensors(f: GGUFFile, n_layer: int, split: bool, report: Report) -> dict[str, LazyTensor]:
    """All tensors, every name known."""
    allowed = BLOCK_TENSORS + (SPLIT_TENSORS if split else ())
    tensors: dict[str, LazyTensor] = {}
    unknown = []
    for name, info in f.tensors.items():
        match = re.fullmatch(r"blk\.(0|[1-9][0-9]{0,4})\.(.+)", name)
        known = name in TOP_TENSORS or (match and int(match[1]) < n_layer and match[2] in allowed)
        if not known:
            if match and match[2] in HARMLESS_TENSORS:
                report.dropped.append(name)
            else:
                unknown.append(safe_text(name))
            continue
        if info.ggml_type not in (*DEQUANTIZABLE_TYPES, QType.F64) and not name.endswith(schema.FFN_NEURON_ID):
            raise HotcoldError(f"{f.path}: tensor {name} has type {info.ggml_type.name}: readable are "
                               f"{', '.join(t.name for t in DEQUANTIZABLE_TYPES)}")
        if len(info.shape) > 2:
            raise HotcoldError(f"{f.path}: tensor {name} has {len(info.shape)} dimensions: allowed are 1 and 2")
        tensors[name] = from_array(name, f.data(name), QType(info.ggml_type), tuple(info.shape), "")
    if unknown:
        raise HotcoldError(f"{f.path}: {len(unknown)} tensors that hotcold does not know: {', '.join(unknown[:5])}: "
                           f"known in a block are {', '.join(allowed)}")
    for name in ("token_embd.weight", "output_norm.weight"):
        if name not in tensors:
            raise HotcoldError(f"{f.path}: tensor {name} is missing")
    return tensors


def _unsplit(f: GGUFFile, tensors: dict[str, LazyTensor], n_layer: int, gated: bool) -> dict[str, LazyTensor]:
    """Stock names, and neurons back in the order that ffn_neuron_id tells."""
    result: dict[str, LazyTensor] = {}
    inverse: dict[int, np.ndarray] = {}  # layer -> source position -> stored position
    for layer in range(n_layer):
        name = schema.block(layer, schema.FFN_NEURON_ID)
        ids = tensors[name].read(0, tensors[name].n_rows) if name in tensors else None
        if ids is None or ids.dtype != np.int32 or not np.array_equal(np.sort(ids), np.arange(len(ids))):
            raise GGUFError(f"{f.path}: tensor {name}: must be int32 and hold every neuron once")
        inverse[layer] = np.argsort(ids)
    pairs = schema.FFN_UP_DOWN if gated else schema.FFN_DOWN_T
    for name, t in tensors.items():
        if not name.startswith("blk."):
            result[name] = t
            continue
        _, number, part = name.split(".", 2)
        order = inverse[int(number)]
        if part in (schema.FFN_GATE, schema.FFN_GATE_BIAS, schema.FFN_UP, schema.FFN_UP_BIAS, *SPLIT_TENSORS):
            rows = 2 * len(order) if part == schema.FFN_UP_DOWN else len(order)
            if t.n_rows != rows:
                raise GGUFError(f"{f.path}: tensor {name} has {t.n_rows} rows, expected {rows}")
        if part == schema.FFN_NEURON_ID:
            continue
        if part == pairs:
            if gated:
                up_name = schema.block(int(number), schema.FFN_UP)
                result[up_name] = renamed(gathered(t, 2 * order), up_name)
            down_name = schema.block(int(number), schema.FFN_DOWN)
            down = gathered(t, 2 * order + 1 if gated else order)
            result[down_name] = renamed(transposed(down), down_name)
        elif part in (schema.FFN_GATE, schema.FFN_GATE_BIAS, schema.FFN_UP, schema.FFN_UP_BIAS):
            result[name] = gathered(t, order)
        elif part == schema.FFN_DOWN_BIAS:
            # A matrix stands before its bias, so that a file comes back byte for byte.
            down_name = schema.block(int(number), schema.FFN_DOWN)
            if down_name in result:
                result[down_name] = result.pop(down_name)
            result[name] = t
        else:
            result[name] = t
    return result


def _check_ffn(f: GGUFFile, tensors: dict[str, LazyTensor], layer: int, gated: bool) -> int:
    """Shapes of one layer's FFN agree; returns its number of neurons."""
    names = [schema.FFN_UP, schema.FFN_DOWN, *([schema.FFN_GATE] if gated else [])]
    for part in names:
        if schema.block(layer, part) not in tensors:
            raise HotcoldError(f"{f.path}: tensor {schema.block(layer, part)} is missing")
    up = tensors[schema.block(layer, schema.FFN_UP)].shape
    if len(up) != 2:
        raise HotcoldError(f"{f.path}: tensor {schema.block(layer, schema.FFN_UP)} is not a matrix")
    wanted = {schema.FFN_DOWN: up[::-1], schema.FFN_GATE: up, schema.FFN_UP_BIAS: up[:1], schema.FFN_GATE_BIAS: up[:1],
              schema.FFN_DOWN_BIAS: up[1:]}
    for part, shape in wanted.items():
        t = tensors.get(schema.block(layer, part))
        if t is not None and t.shape != shape:
            raise HotcoldError(f"{f.path}: tensor {t.name} has shape {list(t.shape)}, {schema.block(layer, 'ffn_up')} "
                               f"asks for {list(shape)}")
    return up[0]


def _thresholds(f: GGUFFile, n_layer: int) -> list[float]:
    values = f.get(schema.KEY_THRESHOLD)
    if values is None:
        return [0.0] * n_layer
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (n_layer,) or not np.isfinite(array).all():
        raise GGUFError(f"{f.path}: {schema.KEY_THRESHOLD} must hold {n_layer} finite numbers")
    return [float(v) for v in array]


def _metadata(f: GGUFFile, report: Report) -> Metadata:
    """Copy of all keys but the ones written anew; types stay as they are."""
    meta: Metadata = {}
    for key in f.metadata:
        if key in OWN_KEYS or key.startswith("hotcold."):
            continue
        kind, element = f.types[key]
        if kind == GGUFValueType.ARRAY and f.length(key) == 0:
            report.note(f"metadata key {safe_text(key)} is an empty array: left out")
            continue
        if element == GGUFValueType.STRING:
            value = f.string_bytes(key)  # bytes: tokens need not be UTF-8
        else:
            value = f.metadata[key]
            if isinstance(value, np.ndarray):
                value = value.tolist()
        meta[key] = MetaValue(value, kind, element)
    return meta

