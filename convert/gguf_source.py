"""A stock or neuron-split GGUF -> StockModel.

In: a GGUF that runtime/gguf_file.py has checked. Out: StockModel with the neurons in the source model's order.
Next: neuron_split.py or stock.py.
"""

from __future__ import annotations

import numpy as np
from gguf import GGUFValueType

from hotcold.convert.lazy import LazyTensor, QType, from_array, gathered, renamed, transposed
from hotcold.convert.model import Metadata, MetaValue, StockModel
from hotcold.convert.precision import Report
from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import GGUFError, HotcoldError
from hotcold.runtime.gguf_file import DEQUANTIZABLE_TYPES, GGUFFile, safe_text
from hotcold.runtime.keys import Keys, show
from hotcold.runtime.weights import expected_tensors

# Written anew for the target, or about this file's own layout.
OWN_KEYS = ("general.architecture", "general.alignment", "general.file_type", "general.quantization_version",
            "split.no", "split.count", "split.tensors.count")
# What profiling and training added: about neurons in this file's order, for this runtime only.
PROFILED = (schema.FFN_NEURON_COUNT, *schema.PRED_TENSORS)
# Facts about the model itself, whatever the layout.
KEPT_KEYS = (schema.KEY_RELUFY_RANK, schema.KEY_RELUFY_TOKENS, schema.KEY_RELUFY_ERROR, schema.KEY_RELU_AS_SILU)
HARMLESS_TENSORS = ("attn_rot_embd.weight",)  # frequencies that old converters stored beside freq_base
# Keys behind the architecture's name that change nothing here: bookkeeping, and what only counts beside another key
# (config.py asks for those only where they count).
HARMLESS_KEYS = (
    "vocab_size", "tensor_data_layout", "expert_used_count", "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window_pattern", "rope.scale_linear",
    "rope.scaling.finetuned", "rope.scaling.yarn_attn_factor",
)


def load_gguf(f: GGUFFile, report: Report, ignore_unknown: bool = False) -> StockModel:
    """Describe a GGUF as a stock model. Raises HotcoldError for what hotcold cannot compute, naming it.

    `ignore_unknown`: keys of the architecture that nobody understands are listed in `report` instead of refused.
    """
    arch = f.get("general.architecture")
    if not isinstance(arch, str):
        raise GGUFError(f"{f.path}: general.architecture is missing: not a model file")
    _refuse_unsupported(f, arch)
    keys = Keys(f)
    config = ModelConfig.from_keys(keys)
    _refuse_unknown_keys(keys, ignore_unknown, report)
    split = config.layout == "neuron-split"
    tensors = _named_tensors(f, config, report)
    if split:
        tensors = _unsplit(f, tensors, config.n_layer, config.gated)
    return StockModel(
        arch=arch, source="neuron-split GGUF" if split else "stock GGUF", metadata=_metadata(f, report),
        tensors=tensors, activation=config.activation, thresholds=list(config.thresholds), gated=config.gated,
        n_layer=config.n_layer, n_ff=list(config.n_ff), norm_relu=list(config.norm_relu), release=f.release_pages)


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


def _refuse_unknown_keys(keys: Keys, ignore_unknown: bool, report: Report) -> None:
    """Every key of the architecture is understood by config.py, known to change nothing, or an error."""
    prefix = f"{keys.arch}."
    unknown = [k for k in keys.file.metadata
               if k.startswith(prefix) and k not in keys.used and k.removeprefix(prefix) not in HARMLESS_KEYS]
    if not unknown:
        return
    shown = ", ".join(f"{safe_text(k, 80)} = {show(keys.file.metadata[k])}" for k in unknown[:8])
    if ignore_unknown:
        report.note(f"ignored keys not known for {keys.arch}: {shown}")
        return
    raise GGUFError(f"{safe_text(str(keys.file.path))}: keys not known for {keys.arch}, which may change the "
                    f"computation: {shown}: if these do not matter, --ignore-unknown-keys lists them instead of "
                    "refusing")


def _named_tensors(f: GGUFFile, config: ModelConfig, report: Report) -> dict[str, LazyTensor]:
    """All tensors, every name and shape as the runtime expects it."""
    expected = expected_tensors(config)
    tensors: dict[str, LazyTensor] = {}
    unknown = []
    for name, info in f.tensors.items():
        if name not in expected:
            if name.startswith("blk.") and name.split(".", 2)[-1] in HARMLESS_TENSORS:
                report.dropped.append(name)
            else:
                unknown.append(safe_text(name))
            continue
        if name.split(".", 2)[-1] in PROFILED:
            continue
        shape, _ = expected[name]
        if info.shape != shape:
            raise HotcoldError(f"{f.path}: tensor {name} has shape {list(info.shape)}, expected {list(shape)}")
        if info.ggml_type not in (*DEQUANTIZABLE_TYPES, QType.F64) and not name.endswith(schema.FFN_NEURON_ID):
            raise HotcoldError(f"{f.path}: tensor {name} has type {info.ggml_type.name}: readable are "
                               f"{', '.join(t.name for t in DEQUANTIZABLE_TYPES)}")
        tensors[name] = from_array(name, f.data(name), QType(info.ggml_type), tuple(info.shape), "")
    if unknown:
        known = ", ".join(n.split(".", 2)[2] for n in expected if n.startswith("blk.0."))
        raise HotcoldError(f"{f.path}: {len(unknown)} tensors that hotcold does not know: {', '.join(unknown[:5])}: "
                           f"known in a block are {known}")
    for name, (shape, required) in expected.items():
        if required and name not in tensors and name.split(".", 2)[-1] not in PROFILED:
            raise HotcoldError(f"{f.path}: tensor {name} {list(shape)} is missing: the file is incomplete")
    return tensors


def _unsplit(f: GGUFFile, tensors: dict[str, LazyTensor], n_layer: int, gated: bool) -> dict[str, LazyTensor]:
    """Stock names, and neurons back in the order that ffn_neuron_id tells."""
    result: dict[str, LazyTensor] = {}
    inverse: dict[int, np.ndarray] = {}  # layer -> source position -> stored position
    for layer in range(n_layer):
        name = schema.block(layer, schema.FFN_NEURON_ID)
        ids = tensors[name].read(0, tensors[name].n_rows)
        if ids.dtype != np.int32 or not np.array_equal(np.sort(ids), np.arange(len(ids))):
            raise GGUFError(f"{f.path}: tensor {name}: must be int32 and hold every neuron once")
        inverse[layer] = np.argsort(ids)
    pairs = schema.FFN_UP_DOWN if gated else schema.FFN_DOWN_T
    rows_of = {turned: name for name, turned in schema.turned(gated).items()}
    for name, t in tensors.items():
        if not name.startswith("blk."):
            result[name] = t
            continue
        _, number, part = name.split(".", 2)
        order = inverse[int(number)]
        if part in rows_of:
            part = rows_of[part]
            name = schema.block(int(number), part)
            t = renamed(transposed(t), name)
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


def _metadata(f: GGUFFile, report: Report) -> Metadata:
    """Copy of all keys but the ones written anew and those about the file's own layout; types stay as they are."""
    meta: Metadata = {}
    for key in f.metadata:
        if key in OWN_KEYS or key.startswith("hotcold.") and key not in KEPT_KEYS:
            continue
        value = copied_value(f, key)
        if value is None:
            report.note(f"metadata key {safe_text(key)} is an empty array: left out")
            continue
        meta[key] = value
    return meta


def copied_value(f: GGUFFile, key: str) -> MetaValue | None:
    """A key's value as it is to be written again, with its type; None for an empty array, which cannot be written."""
    kind, element = f.types[key]
    if kind == GGUFValueType.ARRAY and f.length(key) == 0:
        return None
    if element == GGUFValueType.STRING:
        return MetaValue(f.string_bytes(key), kind, element)  # bytes: tokens need not be UTF-8
    value = f.metadata[key]
    return MetaValue(value.tolist() if isinstance(value, np.ndarray) else value, kind, element)
