"""Weights -> the operators of one token or one block of tokens: what is computed, where, and from what.

In: ModelConfig, Weights, the sparsity mode, what is on the GPU. Out: Plan, a list of operators in an order that
respects their prerequisites. Next: program.py lowers it for the CPU's workers, gpu/lower.py for the GPU.

The device of every operator is chosen here, once: "cpu", or "gpu" (gpu/operators.py) in the layers that a placement
puts there. An operator names the buffers it reads and writes; prerequisites() follow from these, and program.py derives
from them where threads must wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.facts import fires
from hotcold.runtime.kernels import formats
from hotcold.runtime.weights import Matrix, Weights, by_column

if TYPE_CHECKING:
    from hotcold.runtime.gpu.placement import GpuPlacement

_KEYS = tuple("." + name for name in (schema.FFN_GATE, schema.FFN_UP))
SPARSITY_MODES = ("auto", "dense", "exact", "predict")


@dataclass(frozen=True)
class Op:
    """One operator: its kind is one of program.py's, or of gpu/operators.py's.

    One that reads `list` computes only the neurons listed there, and holds their values one beside the other.
    """

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
    mode: str = ""  # of neurons: keys, scores, all or dense, see gpu/placement.py
    neurons: tuple[int, int] | None = None  # first and end of those it has to do with; None: all of the layer
    early: bool = False  # on the GPU's second stream, ahead of where its result is needed


@dataclass(frozen=True)
class Reading:
    """Rows of a matrix that an operator reads for one token."""

    matrix: str
    rows: int  # at most
    row_bytes: int
    chosen: bool  # only those of neurons that fire, or that a predictor names


@dataclass(frozen=True)
class Plan:
    """Operators in order. token: one token at a time (sparse FFN as one operator); block: many tokens at once."""

    config: ModelConfig
    sparsity: str  # "dense" | "exact" | "predict"
    token: tuple[Op, ...]
    block: tuple[Op, ...]
    notes: tuple[str, ...] = field(default=())  # what a user must know of the choices made
    placement: GpuPlacement | None = None  # None: nothing is on the GPU

    def cpu(self, many: bool) -> tuple[Op, ...]:
        """The CPU's operators of the token program, or with `many` of the block program."""
        return tuple(op for op in (self.block if many else self.token) if op.device == "cpu")

    @property
    def cached_layers(self) -> int:
        """So many layers, from the first on, have their keys and values with the CPU."""
        return max((op.layer + 1 for op in (*self.cpu(False), *self.cpu(True)) if op.kind == "rope"), default=0)

    def gpu(self, many: bool) -> tuple[Op, ...]:
        return tuple(op for op in (self.block if many else self.token) if op.device == "gpu")


def choose_sparsity(config: ModelConfig, wanted: str) -> tuple[str, str]:
    """Resolve `auto`; returns (mode, one line that says which and why). Raises for a mode the model cannot do."""
    if wanted not in SPARSITY_MODES:
        raise HotcoldError(f"sparsity {wanted!r} is unknown, choose from {', '.join(SPARSITY_MODES)}")
    c = config
    sparse = fires(c)
    split = c.layout == "neuron-split"
    if wanted in ("exact", "predict") and not sparse:
        raise HotcoldError(
            f"--sparsity {wanted}: activation {c.activation!r} has no neurons that are off; it needs one of "
            f"{', '.join(schema.SPARSE_ACTIVATIONS)} (hotcold relufy makes one), or thresholds (hotcold calibrate); "
            "use --sparsity dense"
        )
    if wanted in ("exact", "predict") and not split:
        raise HotcoldError(
            f"--sparsity {wanted} needs the neuron-split layout: run hotcold convert on this file first"
        )
    if wanted == "predict":
        return wanted, _predict_note(c)
    if wanted != "auto":
        return wanted, f"sparsity: {wanted} (asked for)"
    if sparse and split:
        return "exact", f"sparsity: exact ({c.activation}: neurons that are off are skipped, same result)"
    if sparse:
        return "dense", "sparsity: dense (stock layout; hotcold convert makes a file that can skip neurons)"
    return "dense", f"sparsity: dense (activation {c.activation} has no neurons that are off)"


def _predict_note(c: ModelConfig) -> str:
    using = [layer for layer in range(c.n_layer) if predicts(c, layer)]
    if not using:
        raise HotcoldError(
            "--sparsity predict: no layer of this file has a predictor that is used: hotcold train-predictor adds them"
        )
    exact = [str(layer) for layer in range(c.n_layer) if layer not in using]
    rest = f"; exact in layers {', '.join(exact)}, which have no predictor that pays" if exact else ""
    return f"sparsity: predict in {len(using)} of {c.n_layer} layers{rest}"


def predicts(config: ModelConfig, layer: int) -> bool:
    """Whether predict mode uses a predictor in this layer. Key matrices stored by column have no rows to choose."""
    return bool(config.predictors) and config.predictors[layer].kind != "none" and not by_column(config, layer)


def make_plan(config: ModelConfig, weights: Weights, sparsity: str, placement: GpuPlacement | None = None) -> Plan:
    """Raises HotcoldError for a sparsity mode or a placement that the model cannot have."""
    mode, note = choose_sparsity(config, sparsity)
    notes: tuple[str, ...] = (note,)
    if placement is not None:
        from hotcold.runtime.gpu.placement import usable

        placement, why = usable(config, weights, mode, placement)
        notes += why
        if placement.first == config.n_layer:
            placement = None
    token, block = (_operators(config, weights, mode, placement, many_tokens) for many_tokens in (False, True))
    return Plan(config, mode, token, block, notes, placement)


def prerequisites(ops: tuple[Op, ...]) -> tuple[tuple[int, ...], ...]:
    """Per operator, the indices of those that must have ended before it starts, of either device.

    Of what it reads, the last that wrote it; of what it writes, also those that have read it since.
    """
    wrote: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    out = []
    for i, op in enumerate(ops):
        needs = {wrote[name] for name in (*op.reads, *op.writes) if name in wrote}
        for name in op.writes:
            needs.update(readers.pop(name, ()))
        for name in op.reads:
            readers.setdefault(name, []).append(i)
        for name in op.writes:
            wrote[name] = i
            readers.pop(name, None)
        out.append(tuple(sorted(needs)))
    return tuple(out)


def readings(op: Op) -> tuple[Reading, ...]:
    """The matrices an operator reads for one token. Not those whose type alone it needs to know."""
    if op.kind == "quant" or op.kind == "hidden" and op.device == "cpu":
        return ()
    found = []
    for matrix in op.weights[: 1 if op.kind == "hidden" else None]:
        if matrix is None or op.mode == "keys" and op.kind == "cold" and matrix.name.endswith(_KEYS):
            continue
        rows, row_bytes = matrix.rows, matrix.stride
        if matrix.name.endswith(schema.FFN_UP_DOWN):
            rows //= 2
            row_bytes *= 2 if op.kind in ("ffn", "cold") else 1
        if op.kind == "embed":
            rows = 1
        if op.neurons is not None:
            rows = min(rows, op.neurons[1] - op.neurons[0])
        all_keys = matrix.name.endswith(_KEYS) and op.mode != "scores" and len(op.weights) == 2
        chosen = op.kind in ("values", "axpy") or op.kind in ("ffn", "cold") and not all_keys
        found.append(Reading(matrix.name, rows, row_bytes, chosen))
    return tuple(found)


def _operators(
    c: ModelConfig, w: Weights, mode: str, placement: GpuPlacement | None, many_tokens: bool
) -> tuple[Op, ...]:  # fmt: skip
    tables = (w["token_embd.weight"], w.get("position_embd.weight"))
    ops = [Op("embed", -1, (), ("x",), tables, scale=c.embedding_scale)]
    for layer in range(placement.first if placement else c.n_layer):
        ops += _attention(c, w, layer, many_tokens)
        if c.layout == "stock":
            ops += _ffn_stock(c, w, layer)
        elif many_tokens:
            ops += _ffn_block(c, w, layer, mode)
        else:
            ops += _ffn_token(c, w, layer, mode)
    if placement is not None:
        from hotcold.runtime.gpu.operators import block_operators, token_operators

        return (*ops, *(block_operators if many_tokens else token_operators)(c, w, mode, placement))
    head = w.get("output.weight") or w["token_embd.weight"]
    norm = (w["output_norm.weight"],)
    ops.append(Op("norm", -1, ("x",), ("h",), norm, w.get("output_norm.bias"), head_only=True))
    ops.append(Op("matmul", -1, ("h",), ("logits",), (head,), scale=c.logit_scale, head_only=True))
    return tuple(ops)


def _from_norm(
    c: ModelConfig, w: Weights, layer: int, name: str, to: str, bias: Matrix | None, many_tokens: bool
) -> Op:
    """to = matrix @ h (+ bias); where a ReLU follows the norm, a matrix by columns of which those of 0 are skipped."""
    if not by_column(c, layer):
        return Op("matmul", layer, ("h",), (to,), (w.layer(layer, name),), bias)
    matrix = w.layer(layer, schema.ATTN_T.get(name) or schema.key_matrix(c.gated, True))
    return Op("down" if many_tokens else "columns", layer, ("h",), (to,), (matrix,), bias)


def _attention(c: ModelConfig, w: Weights, layer: int, many_tokens: bool) -> list[Op]:
    def get(name: str) -> Matrix | None:
        return w.layer(layer, name)

    ops = [Op("norm", layer, ("x",), ("h",), (get("attn_norm.weight"),), get("attn_norm.bias"))]
    for name in "qkv":
        ops.append(_from_norm(c, w, layer, f"attn_{name}.weight", name, get(f"attn_{name}.bias"), many_tokens))
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


def _ffn_token(c: ModelConfig, w: Weights, layer: int, mode: str) -> list[Op]:
    """Key row, test, up row, down row: one operator per thread's own neurons, then one reduction."""
    up_bias = w.layer(layer, schema.FFN_UP_BIAS)
    value = w.layer(layer, schema.FFN_UP_DOWN if c.gated else schema.FFN_DOWN_T)
    key = w.layer(layer, schema.FFN_GATE if c.gated else schema.FFN_UP)
    key_bias = w.layer(layer, schema.FFN_GATE_BIAS) if c.gated else up_bias
    other_bias = up_bias if c.gated else None
    ops, reads, weights = [_ffn_norm(w, layer)], ["h"], [key, value]
    if by_column(c, layer):
        ops.append(_from_norm(c, w, layer, "", "g", key_bias, many_tokens=False))
        ffn = Op("ffn", layer, ("h", "g"), ("acc",), (None, value), None, other_bias)
    else:
        if mode == "predict":
            ops += _predict(c, w, layer)
            if predicts(c, layer):
                kind = c.predictors[layer].kind
                score = schema.FFN_PRED_SIGN if kind == "signbit" else schema.FFN_PRED_OUT
                reads += [] if kind == "signbit" else ["hidden"]
                weights += [w.layer(layer, score), w.layer(layer, schema.FFN_PRED_OUT_BIAS)]
        ffn = Op("ffn", layer, tuple(reads), ("acc",), tuple(weights), key_bias, other_bias)
    down_bias = w.layer(layer, schema.FFN_DOWN_BIAS)
    return [*ops, ffn, Op("reduce", layer, ("acc", "x"), ("x",), (), down_bias, scale=c.residual_scale)]


def _predict(c: ModelConfig, w: Weights, layer: int) -> list[Op]:
    """What predictors need of this layer's FFN input: for this layer, and for the next one if that looks ahead."""
    ops = []
    for of in (layer, layer + 1):
        if of == c.n_layer or not predicts(c, of):
            continue
        predictor = c.predictors[of]
        if predictor.kind == "signbit" or predictor.look_ahead != (of > layer):
            continue
        matrix, bias = w.layer(of, schema.FFN_PRED_IN), w.layer(of, schema.FFN_PRED_IN_BIAS)
        # Two buffers in turn: a layer's answer and the next one's are there at the same time.
        ops.append(Op("matmul", layer, ("h",), (f"hidden{of % 2}",), (matrix,), bias))
    if predicts(c, layer) and c.predictors[layer].kind != "signbit":
        score = w.layer(layer, schema.FFN_PRED_OUT)
        ops.append(Op("hidden", layer, (f"hidden{layer % 2}",), ("hidden",), (score,)))
    return ops


def _ffn_keys(c: ModelConfig, w: Weights, layer: int, up: Matrix | None, listed: bool = False) -> list[Op]:
    """Keys into `g` (and up into `u`), activated in place in `g`. Many tokens, or a stock layout.

    listed: neurons that are off for every token of the block are left out after their keys.
    """
    up_bias = w.layer(layer, schema.FFN_UP_BIAS)
    name = schema.FFN_GATE if c.gated else schema.FFN_UP
    key_bias = w.layer(layer, schema.FFN_GATE_BIAS) if c.gated else up_bias
    ops = [_ffn_norm(w, layer), _from_norm(c, w, layer, name, "g", key_bias, many_tokens=True)]
    also: tuple[str, ...] = ()
    if listed:
        also = ("list",)
        ops += [Op("mark", layer, ("g",), ("marks",)), Op("list", layer, ("marks",), also)]
    if not c.gated:
        return [*ops, Op("activate", layer, ("g", *also), ("g",))]
    matmul = Op("matmul", layer, ("h", *also), ("u",), (up,), up_bias)
    return [*ops, matmul, Op("activate", layer, ("g", "u", *also), ("g",))]


def _ffn_block(c: ModelConfig, w: Weights, layer: int, mode: str) -> list[Op]:
    listed = mode != "dense" and c.activation in schema.SPARSE_ACTIVATIONS
    up = w.layer(layer, schema.FFN_UP_DOWN) if c.gated else None
    down = w.layer(layer, schema.FFN_UP_DOWN if c.gated else schema.FFN_DOWN_T)
    bias = w.layer(layer, schema.FFN_DOWN_BIAS)
    reads = ("g", "x", "list") if listed else ("g", "x")
    return _ffn_keys(c, w, layer, up, listed) + [
        Op("down", layer, reads, ("x",), (down,), bias, scale=c.residual_scale, add=True)
    ]


def _ffn_stock(c: ModelConfig, w: Weights, layer: int) -> list[Op]:
    down = w[schema.block(layer, schema.FFN_DOWN)]
    keys = _ffn_keys(c, w, layer, w.layer(layer, schema.FFN_UP))
    return keys + _project(c, layer, "g", down, w.layer(layer, schema.FFN_DOWN_BIAS))
