"""The GPU's operators of one token, and what the CPU computes beside them.

In: configuration, weights, a checked GpuPlacement. Out: operators (plan.Op) in order. Next: plan.py puts them behind
the CPU's; lower.py turns the GPU's into launches, program.py the CPU's into records.

Buffers of the GPU are called gpu.*; mail<l> and out<l> lie in pinned memory that both sides see: what layer l's split
tells the CPU, and the sum that the CPU answers with.

    begin            x of the CPU's layers, and the token's position, to the GPU
    post             the FFN's input to mail<l>, where the CPU needs nothing else to begin
    split            keys or scores -> neurons of the GPU (gpu.list) and, with that input, of the CPU (mail<l>)
    values           up rows (for scores also key rows) of the listed neurons -> what each multiplies its down row by
    axpy             sums of down rows -> gpu.part
    cold             on the CPU: all that for its neurons -> out<l>
    merge            gpu.x += scale * (gpu.part + out<l> + bias)
"""

from __future__ import annotations

from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.gpu.placement import GpuPlacement, cold_mode, head_matrix
from hotcold.runtime.kernels import formats
from hotcold.runtime.plan import Op
from hotcold.runtime.weights import Matrix, Weights


def token_operators(c: ModelConfig, w: Weights, sparsity: str, placement: GpuPlacement) -> list[Op]:
    """From the first layer on the GPU to the logits."""
    ops = [_gpu("begin", -1, ("x",), ("gpu.x",))]
    for layer in range(placement.first, c.n_layer):
        ops += _attention(c, w, layer)
        stock = c.layout == "stock"
        ops += _ffn_stock(c, w, layer) if stock else _ffn(c, w, sparsity, placement, layer)
    norm = (w["output_norm.weight"],)
    ops.append(_gpu("norm", -1, ("gpu.x",), ("gpu.h",), norm, w.get("output_norm.bias"), head_only=True))
    return [*ops, _gpu("matmul", -1, ("gpu.h",), ("logits",), (head_matrix(w),), scale=c.logit_scale, head_only=True)]


def block_operators(c: ModelConfig, w: Weights, sparsity: str, placement: GpuPlacement) -> list[Op]:
    """The same for a block of tokens: every layer's FFN is one operator, dense, on the GPU; what is in RAM goes there.

    sparsity does not matter: neurons that are off add nothing.
    """
    del sparsity
    ops = [_gpu("begin", -1, ("x",), ("gpu.x",))]
    for layer in range(placement.first, c.n_layer):
        ops += _attention(c, w, layer)
        split = c.layout == "neuron-split"
        value = w.layer(layer, schema.FFN_UP_DOWN if c.gated else schema.FFN_DOWN_T) if split else None
        key = w.layer(layer, schema.FFN_GATE if c.gated else schema.FFN_UP)
        weights = (key, value) if split else (
            key, w.layer(layer, schema.FFN_UP) if c.gated else None, w.layer(layer, schema.FFN_DOWN))  # fmt: skip
        ops.append(_ffn_norm(w, layer, "gpu.h"))
        ops.append(_gpu("ffn", layer, ("gpu.h", "gpu.x"), ("gpu.x",), weights, *_biases(c, w, layer),
                        scale=c.residual_scale, neurons=(0, c.n_ff[layer])))  # fmt: skip
    norm = (w["output_norm.weight"],)
    ops.append(_gpu("norm", -1, ("gpu.x",), ("gpu.h",), norm, w.get("output_norm.bias"), head_only=True))
    return [*ops, _gpu("matmul", -1, ("gpu.h",), ("logits",), (head_matrix(w),), scale=c.logit_scale, head_only=True)]


def _gpu(kind: str, layer: int, reads: tuple[str, ...], writes: tuple[str, ...],
         weights: tuple[Matrix | None, ...] = (), bias: Matrix | None = None, bias2: Matrix | None = None, *,
         scale: float = 1.0, add: bool = False, head_only: bool = False, mode: str = "",
         neurons: tuple[int, int] | None = None, early: bool = False) -> Op:  # fmt: skip
    return Op(kind, layer, reads, writes, weights, bias, bias2, scale, add, head_only, "gpu", mode, neurons, early)


def _attention(c: ModelConfig, w: Weights, layer: int) -> list[Op]:
    def get(name: str) -> Matrix | None:
        return w.layer(layer, name)

    ops = [_gpu("norm", layer, ("gpu.x",), ("gpu.h",), (get("attn_norm.weight"),), get("attn_norm.bias"))]
    for name in "qkv":
        bias = get(f"attn_{name}.bias")
        ops.append(_gpu("matmul", layer, ("gpu.h",), (f"gpu.{name}",), (get(f"attn_{name}.weight"),), bias))
    norms = (get("attn_q_norm.weight"), get("attn_k_norm.weight"))
    cache = f"gpu.cache{layer}"
    return ops + [
        _gpu("rope", layer, ("gpu.q", "gpu.k", "gpu.v"), ("gpu.q", cache), norms),
        _gpu("attend", layer, ("gpu.q", cache), ("gpu.att",), scale=c.attn_scale or c.head_dim**-0.5),
        *_project(c, layer, "gpu.att", get("attn_output.weight"), get("attn_output.bias")),
    ]


def _project(c: ModelConfig, layer: int, source: str, matrix: Matrix | None, bias: Matrix | None) -> list[Op]:
    """gpu.x += matrix @ source; a quantized matrix wants act blocks of its own, in gpu.act."""
    ops, reads = [], (source, "gpu.x")
    if matrix is not None and matrix.ggml_type in formats.QUANTIZED:
        ops, reads = [_gpu("quant", layer, (source,), ("gpu.act",), (matrix,))], ("gpu.act", "gpu.x")
    return [*ops, _gpu("matmul", layer, reads, ("gpu.x",), (matrix,), bias, scale=c.residual_scale, add=True)]


def _ffn_norm(w: Weights, layer: int, to: str) -> Op:
    weights, bias = (w.layer(layer, "ffn_norm.weight"),), w.layer(layer, "ffn_norm.bias")
    return _gpu("norm", layer, ("gpu.x",), (to,), weights, bias)


def _biases(c: ModelConfig, w: Weights, layer: int) -> tuple[Matrix | None, Matrix | None]:
    """Of keys, and of up rows beside a gate."""
    up = w.layer(layer, schema.FFN_UP_BIAS)
    return (w.layer(layer, schema.FFN_GATE_BIAS), up) if c.gated else (up, None)


def _ffn_stock(c: ModelConfig, w: Weights, layer: int) -> list[Op]:
    key_bias, up_bias = _biases(c, w, layer)
    h = _h(layer)
    key = w.layer(layer, schema.FFN_GATE if c.gated else schema.FFN_UP)
    ops = [_ffn_norm(w, layer, h), _gpu("matmul", layer, (h,), ("gpu.g",), (key,), key_bias)]
    up: tuple[str, ...] = ()
    if c.gated:
        up = ("gpu.u",)
        ops.append(_gpu("matmul", layer, (h,), up, (w.layer(layer, schema.FFN_UP),), up_bias))
    ops.append(_gpu("activate", layer, ("gpu.g", *up), ("gpu.g",)))
    down, bias = w.layer(layer, schema.FFN_DOWN), w.layer(layer, schema.FFN_DOWN_BIAS)
    return ops + _project(c, layer, "gpu.g", down, bias)


def _h(layer: int) -> str:
    """The FFN's input. Two in turn: a predictor that looks ahead may still read one while the next layer writes."""
    return f"gpu.f{layer % 2}"


def _ffn(c: ModelConfig, w: Weights, sparsity: str, placement: GpuPlacement, layer: int) -> list[Op]:
    """Neuron-split."""
    n_ff, hot, mode = c.n_ff[layer], placement.layers[layer].hot, cold_mode(c, sparsity, placement, layer)
    key = w.layer(layer, schema.FFN_GATE if c.gated else schema.FFN_UP)
    value = w.layer(layer, schema.FFN_UP_DOWN if c.gated else schema.FFN_DOWN_T)
    key_bias, up_bias = _biases(c, w, layer)
    h, mail, out = _h(layer), f"mail{layer}", f"out{layer}"
    hots, colds = (0, hot), (hot, n_ff)
    cold_op = Op("cold", layer, (mail,), (out,), (key, value), key_bias, up_bias, mode=mode, neurons=colds)
    ops = [_ffn_norm(w, layer, h)]
    to_cpu = hot < n_ff and mode != "all"  # the split tells the CPU what it has to do
    if hot < n_ff and not to_cpu:
        ops += [_gpu("post", layer, (h,), (mail,), mode=mode, neurons=colds), cold_op]
    ops += _predictors(c, w, sparsity, placement, layer)
    source, listed = "gpu.g", "gpu.list" if mode != "dense" else "gpu.g"
    if mode == "scores":
        source = f"gpu.scores{layer % 2}"
    elif hot or to_cpu:
        ops.append(_gpu("matmul", layer, (h,), (source,), (key,), key_bias, neurons=hots if mode == "all" else None))
    if mode != "dense" and (hot or to_cpu):
        score_bias = w.layer(layer, schema.FFN_PRED_OUT_BIAS) if mode == "scores" else None
        writes = (listed, mail) if to_cpu else (listed,)
        ops.append(_gpu("split", layer, (source, h), writes, (), score_bias, mode=mode, neurons=hots))
        ops += [cold_op] if to_cpu else []
    if hot and (c.gated or mode in ("scores", "dense")):
        matrices = (key if mode == "scores" else None, value if c.gated else None)
        ops.append(_gpu("values", layer, (h, listed), (listed,), matrices, key_bias if mode == "scores" else None,
                        up_bias, mode=mode, neurons=hots))  # fmt: skip
    if hot:
        ops.append(_gpu("axpy", layer, (listed,), ("gpu.part",), (value,), mode=mode, neurons=hots))
    reads = ("gpu.x", *(["gpu.part"] if hot else []), *([out] if hot < n_ff else []))
    bias = w.layer(layer, schema.FFN_DOWN_BIAS)
    return [*ops, _gpu("merge", layer, reads, ("gpu.x",), (), bias, scale=c.residual_scale, mode=mode, neurons=hots)]


def _predictors(c: ModelConfig, w: Weights, sparsity: str, placement: GpuPlacement, layer: int) -> list[Op]:
    """Scores from this layer's FFN input: of its own neurons, and of the next layer's, early, if that looks ahead."""
    ops: list[Op] = []
    for of in (layer, layer + 1):
        if of == c.n_layer or cold_mode(c, sparsity, placement, of) != "scores":
            continue
        ahead = c.predictors[of].look_ahead
        if ahead == (of > layer):
            ops += _scores(c, w, layer, of, early=ahead)
    return ops


def _scores(c: ModelConfig, w: Weights, layer: int, of: int, *, early: bool) -> list[Op]:
    h, scores, hidden = _h(layer), f"gpu.scores{of % 2}", f"gpu.hidden{of % 2}"
    neurons = (0, c.n_ff[of])
    if c.predictors[of].kind == "signbit":
        sign = w.layer(of, schema.FFN_PRED_SIGN)
        return [_gpu("signs", of, (h,), (scores,), (sign,), neurons=neurons, early=early)]
    enter, leave = w.layer(of, schema.FFN_PRED_IN), w.layer(of, schema.FFN_PRED_OUT)
    bias = w.layer(of, schema.FFN_PRED_IN_BIAS)
    return [
        _gpu("hidden", of, (h,), (hidden,), (enter, leave), bias, early=early),
        _gpu("matmul", of, (hidden,), (scores,), (leave,), neurons=neurons, early=early),
    ]
