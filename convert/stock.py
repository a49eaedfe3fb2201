"""StockModel -> stock GGUF (`--to-stock`): what llama.cpp runs, for comparison and for taking a model elsewhere.

In: StockModel from any source, `--outtype`, `--relu-as-silu`. Out: Target. Next: writer.py.
"""

from __future__ import annotations

from gguf import GGUFValueType

from hotcold.convert.lazy import LazyTensor, scaled
from hotcold.convert.model import Metadata, StockModel, array, string, u32
from hotcold.convert.outtype import plain_type, writable
from hotcold.convert.precision import Report, cast
from hotcold.convert.target import Target
from hotcold.runtime import schema
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.ffn_config import STOCK_ACTIVATIONS

MAX_K = 14  # 2^15 times any weight of 2 would not fit F16


def to_stock(model: StockModel, outtype: str, relu_as_silu: int | None, report: Report) -> Target:
    """Stock names, stock order of neurons, stock orientation of the down matrix.

    `relu_as_silu` K: see `relu_factors`. Raises HotcoldError where K does not apply to the model.
    """
    factors = {} if relu_as_silu is None else relu_factors(model, relu_as_silu)
    tensors: list[LazyTensor] = []
    for name, t in model.tensors.items():
        part = name.split(".", 2)[2] if name.startswith("blk.") else ""
        qtype = plain_type(t, outtype, model.auto_type, report)
        value = t
        if part in factors:
            qtype, value = writable(t, qtype, "are scaled", report), scaled(t, factors[part])
        tensors.append(cast(value, qtype, report, measure=t.was is not None))
    metadata = model.metadata | _activation_metadata(model, relu_as_silu, report)
    _warn_of_ignored_keys(model, report)
    target = Target(model.arch, metadata, tensors, model.activation)
    target.add_file_type()
    return target


def relu_factors(model: StockModel, k: int) -> dict[str, float]:
    """Powers of two that let an engine which only knows SiLU compute ReLU almost exactly.

    SiLU(2^K x) is near 2^K ReLU(x): gate rows times 2^K, up rows and down columns together times 2^-K, half each (for
    an odd K the down columns take the larger half, so that all factors stay exact).
    """
    if not 1 <= k <= MAX_K:
        raise HotcoldError(f"--relu-as-silu {k}: allowed are 1 to {MAX_K}; 8 to 10 is usual")
    if any(model.norm_relu):
        raise HotcoldError("--relu-as-silu: this model has a ReLU after its norms, which llama.cpp cannot compute")
    if not model.gated or model.activation not in ("relu", "fatrelu") or any(model.thresholds):
        threshold = f", threshold {max(model.thresholds):g}" if any(model.thresholds) else ""
        raise HotcoldError(
            f"--relu-as-silu works for gated ReLU models with threshold 0 only; this one is {model.activation}"
            f"{threshold}{'' if model.gated else ', not gated'}")
    up, down = 2.0 ** -(k // 2), 2.0 ** -(k - k // 2)
    return {schema.FFN_GATE: 2.0**k, schema.FFN_GATE_BIAS: 2.0**k, schema.FFN_UP: up, schema.FFN_UP_BIAS: up,
            schema.FFN_DOWN: down}


def _warn_of_ignored_keys(model: StockModel, report: Report) -> None:
    """Keys that hotcold reads for these architectures and llama.cpp (as of 2025) does not."""
    window = model.metadata.get(f"{model.arch}.attention.sliding_window")
    if window is not None and window.value:
        report.note(f"warning: stock llama.cpp gives {model.arch} models full attention: its results differ after "
                    f"{window.value} tokens, the sliding window")
    betas = [k for k in ("yarn_beta_fast", "yarn_beta_slow") if f"{model.arch}.rope.scaling.{k}" in model.metadata]
    if betas:
        report.note(f"warning: stock llama.cpp ignores {' and '.join(betas)} of {model.arch} models: results "
                    "differ")


def _activation_metadata(model: StockModel, k: int | None, report: Report) -> Metadata:
    """What stock keys cannot say, and a warning where stock llama.cpp would compute something else."""
    if k is not None:
        report.note(f"gate x 2^{k}, up x 2^-{k // 2}, down x 2^-{k - k // 2}: SiLU then acts as ReLU")
        return {schema.KEY_RELU_AS_SILU: u32(k)}
    if model.arch == "opt":
        report.note("warning: stock llama.cpp has no opt architecture: hotcold reads this file, llama.cpp does not")
    metadata: Metadata = {}
    if any(model.norm_relu):
        report.note("warning: stock llama.cpp knows no ReLU after the norms: hotcold reads the key "
                    f"{schema.KEY_NORM_RELU}, llama.cpp computes something else")
        metadata[schema.KEY_NORM_RELU] = array([int(flag) for flag in model.norm_relu], GGUFValueType.UINT32)
    usual = STOCK_ACTIVATIONS[model.arch]
    if model.activation == usual and not any(model.thresholds):
        return metadata
    metadata[schema.KEY_ACTIVATION] = string(model.activation)
    if any(model.thresholds):
        metadata[schema.KEY_THRESHOLD] = array(model.thresholds, GGUFValueType.FLOAT32)
    if model.activation == usual:
        report.note("warning: stock llama.cpp ignores the thresholds of this file and computes all neurons (hotcold "
                    f"reads the key {schema.KEY_THRESHOLD})")
        return metadata
    advice = "" if model.activation != "relu" or not model.gated else "; --relu-as-silu 10 makes one that it runs right"
    report.note(f"warning: stock llama.cpp runs this file with {usual} instead of {model.activation}, which is wrong "
                f"(hotcold reads the key {schema.KEY_ACTIVATION}){advice}")
    return metadata
