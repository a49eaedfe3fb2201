"""Weights -> the operators of one token or one block of tokens: what is computed, where, and from what.

In: ModelConfig, Weights, the sparsity mode. Out: Plan, a list of operators in an order that respects their
prerequisites. Next: program.py lowers it for the CPU's workers.

The device of every operator is chosen here, once; today there is one device, "cpu". An operator names the buffers it
reads and writes; program.py derives from them where threads must wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.kernels import formats
from hotcold.runtime.weights import Matrix, Weights

SPARSITY_MODES = ("auto", "dense", "exact")


@dataclass(frozen=True)
class Op:
    """One operator. kind: embed, norm, quant, matmul, rope, attend, ffn, reduce, activate, down."""

    kind: str
    layer: int  # -1: outside the layers
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    weights: tuple[Matrix | None, ...] = ()
    bias: Matrix | None = None
    bias2: Matrix | None = None
    scale: float = 1.0
    add: bool = False  # adds to what `writes` holds
    head_only: bool = False  # only the tokens whose logits are wanted
    device: str = "cpu"


@dataclass(frozen=True)
class Plan:
    """Operators in order. token: one token at a time (sparse FFN as one operator); block: many tokens at once."""

    config: ModelConfig
    sparsity: str  # "dense" | "exact"
    token: tuple[Op, ...]
    block: tuple[Op, ...]
    notes: tuple[str, ...] = field(default=())  # what a user must know of the choices made


def choose_sparsity(config: ModelConfig, wanted: str) -> tuple[str, str]:
    """Resolve `auto`; returns (mode, one line that says which and why). Raises for a mode the model cannot do."""
    if wanted not in SPARSITY_MODES:
        raise HotcoldError(f"sparsity {wanted!r} is unknown, choose from {', '.join(SPARSITY_MODES)}")
    fires = config.activation in schema.SPARSE_ACTIVATIONS
    split = config.layout == "neuron-split"
    if wanted == "exact" and not fires:
        raise HotcoldError(
            f"--sparsity exact: activation {config.activation!r} has no neurons that are off; "
            f"exact needs one of {', '.join(schema.SPARSE_ACTIVATIONS)}, use --sparsity dense"
        )
    if wanted == "exact" and not split:
        raise HotcoldError("--sparsity exact needs the neuron-split layout: run hotcold convert on this file first")
    if wanted != "auto":
        return wanted, f"sparsity: {wanted} (asked for)"
    if fires and split:
        return "exact", f"sparsity: exact ({config.activation}: neurons that are off are skipped, same result)"
    if fires:
        return "dense", "sparsity: dense (stock layout; hotcold convert makes a file that can skip neurons)"
    return "dense", f"sparsity: dense (activation {config.activation} has no neurons that are off)"


def make_plan(config: ModelConfig, weights: Weights, sparsity: str) -> Plan:
    mode, note = choose_sparsity(config, sparsity)
    token, block = (_operators(config, weights, many_tokens) for many_tokens in (False, True))
    return Plan(config, mode, token, block, (note,))


def _operators(c: ModelConfig, w: Weights, many_tokens: bool) -> tuple[Op, ...]:
    tables = (w["token_embd.weight"], w.get("position_embd.weight"))
    ops = [Op("embed", -1, (), ("x",), tables, scale=c.embedding_scale)]
    for layer in range(c.n_layer):
        ops += _attention(c, w, layer)
        if c.layout == "stock":
            ops += _ffn_stock(c, w, layer)
        elif many_tokens:
            ops += _ffn_block(c, w, layer)
        else:
            ops += _ffn_token(c, w, layer)
    head = w.get("output.weight") or w["token_embd.weight"]
    norm = (w["output_norm.weight"],)
    ops.append(Op("norm", -1, ("x",), ("h",), norm, w.get("output_norm.bias"), head_only=True))
    ops.append(Op("matmul", -1, ("h",), ("logits",), (head,), scale=c.logit_scale, head_only=True))
    return tuple(ops)


def _attention(c: ModelConfig, w: Weights, layer: int) -> list[Op]:
    def get(name: str) -> Matrix | None:
        return w.layer(layer, name)

    ops = [Op("norm", layer, ("x",), ("h",), (get("attn_norm.weight"),), get("attn_norm.bias"))]
    for name in "qkv":
        ops.append(Op("matmul", layer, ("h",), (name,), (get(f"attn_{name}.weight"),), get(f"attn_{name}.bias")))
    norms = (get("attn_q_norm.weight"), get("attn_k_norm.weight"))
    cache = f"cache{layer}"
    return ops + [
        Op("rope", layer, ("q", "k", "v"), ("q", "k", cache), norms),
        Op("attend", layer, ("q", cache), ("att",), scale=c.attn_scale or c.head_dim**-0.5),
        *_project(c, layer, "att", w[schema.block(layer, "attn_output.weight")], get("attn_output.bias")),
    ]


def _project(c: ModelConfig, layer: int, source: str, matrix: Matrix, bias: Matrix | None) -> list[Op]:
    """x += matrix @ source; a quantized matrix wants its activations quantized first, into `hq`."""
    if matrix.ggml_type not in formats.QUANTIZED:
        return [Op("matmul", layer, (source, "x"), ("x",), (matrix,), bias, scale=c.residual_scale, add=True)]
    return [
        Op("quant", layer, (source,), ("hq",), (matrix,)),
        Op("matmul", layer, ("hq", "x"), ("x",), (matrix,), bias, scale=c.residual_scale, add=True),
    ]


def _ffn_norm(w: Weights, layer: int) -> Op:
    return Op("norm", layer, ("x",), ("h",), (w.layer(layer, "ffn_norm.weight"),), w.layer(layer, "ffn_norm.bias"))


def _ffn_token(c: ModelConfig, w: Weights, layer: int) -> list[Op]:
    """Key row, test, up row, down row: one operator per thread's own neurons, then one reduction."""
    up_bias = w.layer(layer, schema.FFN_UP_BIAS)
    key = w.layer(layer, schema.FFN_GATE if c.gated else schema.FFN_UP)
    value = w.layer(layer, schema.FFN_UP_DOWN if c.gated else schema.FFN_DOWN_T)
    key_bias = w.layer(layer, schema.FFN_GATE_BIAS) if c.gated else up_bias
    return [
        _ffn_norm(w, layer),
        Op("ffn", layer, ("h",), ("acc",), (key, value), key_bias, up_bias if c.gated else None),
        Op("reduce", layer, ("acc", "x"), ("x",), (), w.layer(layer, schema.FFN_DOWN_BIAS), scale=c.residual_scale),
    ]


def _ffn_keys(c: ModelConfig, w: Weights, layer: int, up: Matrix | None) -> list[Op]:
    """Keys into `g` (and up into `u`), activated in place in `g`."""
    up_bias = w.layer(layer, schema.FFN_UP_BIAS)
    if not c.gated:
        return [
            _ffn_norm(w, layer),
            Op("matmul", layer, ("h",), ("g",), (up,), up_bias),
            Op("activate", layer, ("g",), ("g",)),
        ]
    gate = w.layer(layer, schema.FFN_GATE)
    return [
        _ffn_norm(w, layer),
        Op("matmul", layer, ("h",), ("g",), (gate,), w.layer(layer, schema.FFN_GATE_BIAS)),
        Op("matmul", layer, ("h",), ("u",), (up,), up_bias),
        Op("activate", layer, ("g", "u"), ("g",)),
    ]


def _ffn_block(c: ModelConfig, w: Weights, layer: int) -> list[Op]:
    up = w.layer(layer, schema.FFN_UP_DOWN if c.gated else schema.FFN_UP)
    down = w.layer(layer, schema.FFN_UP_DOWN if c.gated else schema.FFN_DOWN_T)
    bias = w.layer(layer, schema.FFN_DOWN_BIAS)
    return _ffn_keys(c, w, layer, up) + [
        Op("down", layer, ("g", "x"), ("x",), (down,), bias, scale=c.residual_scale, add=True)
    ]


def _ffn_stock(c: ModelConfig, w: Weights, layer: int) -> list[Op]:
    down = w[schema.block(layer, schema.FFN_DOWN)]
    keys = _ffn_keys(c, w, layer, w.layer(layer, schema.FFN_UP))
    return keys + _project(c, layer, "g", down, w.layer(layer, schema.FFN_DOWN_BIAS))
