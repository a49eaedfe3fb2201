"""What of a model is on the GPU: whole layers from some layer on, and of each the neurons that fire most.

In: numbers of a solver (placement/), of the command line, or of a test. Out: frozen GpuPlacement, checked against the
model. Next: plan.py, which gives every operator its device by it.

kind    (a) all      everything is on the GPU
        (b) keys     all key rows are: the GPU learns exactly which neurons fire, the CPU computes the cold ones of them
        (c) predict  predictors are: they name neurons, and each side checks and computes its own
        (d) layers   some layers whole, the others on the CPU, as llama.cpp divides a model
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gguf import GGMLQuantizationType

from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.facts import fires
from hotcold.runtime.kernels import formats
from hotcold.runtime.weights import Matrix, Weights, by_column

KINDS = ("all", "keys", "predict", "layers")
TYPES = {formats.F16: "f16", formats.Q8_0: "q8_0", formats.Q4_0: "q4_0"}  # of matrices the GPU has kernels for
WIDTH_UNIT = 32  # n_embd is a multiple of it
MAX_HEAD_DIM = 256
HEAD_UNIT = 8  # head_dim is a multiple of it


@dataclass(frozen=True)
class LayerPlacement:
    """hot: neurons 0..hot-1 are on the GPU; with all of them the whole FFN is, and the CPU has no part in the layer."""

    on_gpu: bool
    hot: int = 0
    keys_on_gpu: bool = False  # key rows of all neurons, not of the hot ones alone


@dataclass(frozen=True)
class GpuPlacement:
    kind: str
    layers: tuple[LayerPlacement, ...]
    budget: int  # bytes of VRAM that may be used
    n_ctx: int  # tokens the KV cache is planned for

    @property
    def first(self) -> int:
        """The first layer on the GPU; n_layer where none is."""
        return next((n for n, layer in enumerate(self.layers) if layer.on_gpu), len(self.layers))

    def without(self, n: int) -> GpuPlacement:
        """The same with the first n layers on the CPU."""
        cpu = LayerPlacement(False)
        return replace(self, layers=(cpu,) * n + self.layers[n:])


def last_layers(config: ModelConfig, n: int, *, budget: int, n_ctx: int, kind: str = "layers") -> GpuPlacement:
    """The last n layers whole."""
    if not 0 <= n <= config.n_layer:
        raise HotcoldError(f"{n} layers on the GPU: allowed are 0 to the model's {config.n_layer}")
    first = config.n_layer - n
    layers = (LayerPlacement(layer >= first, n_ff if layer >= first else 0, layer >= first)
              for layer, n_ff in enumerate(config.n_ff))  # fmt: skip
    return GpuPlacement(kind, tuple(layers), budget, n_ctx)


def cold_mode(config: ModelConfig, sparsity: str, placement: GpuPlacement, layer: int) -> str:
    """How it is learned which neurons of a layer on the GPU are computed.

    keys: by all key rows, on the GPU. scores: by a predictor, on the GPU; who has a neuron then checks its key. all:
    each side by the key rows of its own neurons. dense: nobody asks, all are. Where a predictor would look ahead from a
    layer of the CPU, its input is not here: the layer is exact.
    """
    from hotcold.runtime.plan import predicts

    place = placement.layers[layer]
    if sparsity == "predict" and placement.kind != "keys" and predicts(config, layer):
        if layer > placement.first or not config.predictors[layer].look_ahead:
            return "scores"
    if place.hot == config.n_ff[layer] and (sparsity == "dense" or config.activation in schema.DENSE_ACTIVATIONS):
        return "dense"
    return "keys" if place.keys_on_gpu or place.hot == config.n_ff[layer] else "all"


def check(config: ModelConfig, placement: GpuPlacement, sparsity: str) -> None:
    """Raises HotcoldError for a placement that cannot be of this model. sparsity: dense, exact or predict."""
    if placement.kind not in KINDS:
        raise HotcoldError(f"GPU plan {placement.kind!r} is unknown, choose from {', '.join(KINDS)}")
    if len(placement.layers) != config.n_layer:
        raise HotcoldError(f"placement of {len(placement.layers)} layers, the model has {config.n_layer}")
    for n, (place, n_ff) in enumerate(zip(placement.layers, config.n_ff, strict=True)):
        if not 0 <= place.hot <= n_ff:
            raise HotcoldError(f"placement of layer {n}: {place.hot} hot neurons, allowed are 0 to its {n_ff}")
        if not place.on_gpu and (place.hot or place.keys_on_gpu or n > placement.first):
            what = "follows one on the GPU" if n > placement.first else "has neurons there"
            raise HotcoldError(f"placement of layer {n}: it is not on the GPU but {what}; allowed: the last layers")
        if place.on_gpu and place.hot < n_ff:
            _check_cold(config, placement.kind, sparsity, n)


def _check_cold(config: ModelConfig, kind: str, sparsity: str, layer: int) -> None:
    """Whether a layer may leave neurons to the CPU."""
    if kind in ("all", "layers"):
        raise HotcoldError(f"placement of layer {layer}: GPU plan {kind!r} has whole layers, this one leaves neurons "
                           "to the CPU")  # fmt: skip
    if config.layout == "stock":
        raise HotcoldError(f"placement of layer {layer}: the stock layout keeps no neuron's rows together, only whole "
                           "layers can be on the GPU (--gpu-plan layers), or run hotcold convert first")  # fmt: skip
    if sparsity == "dense" or not fires(config, layer):
        raise HotcoldError(f"placement of layer {layer}: all its neurons are computed for every token, so none can be "
                           "left to the CPU: use --gpu-plan layers")  # fmt: skip


def usable(
    config: ModelConfig, weights: Weights, sparsity: str, placement: GpuPlacement
) -> tuple[GpuPlacement, tuple[str, ...]]:
    """The placement without layers that the GPU cannot compute, nor those before them; and notes that say why."""
    check(config, placement, sparsity)
    if placement.first == config.n_layer:
        return placement, ()
    reason = _whole_model(config, weights)
    if reason:
        return placement.without(config.n_layer), (f"GPU: nothing is computed there: {reason}",)
    for layer in range(config.n_layer - 1, placement.first - 1, -1):
        reason = _layer_reason(config, weights, sparsity, placement, layer)
        if reason:
            which = "layer 0 stays" if layer == 0 else f"layers 0 to {layer} stay"
            return placement.without(layer + 1), (f"GPU: {which} on the CPU: layer {layer}: {reason}",)
    return placement, ()


def _whole_model(c: ModelConfig, weights: Weights) -> str:
    if c.n_embd % WIDTH_UNIT:
        return f"its width {c.n_embd} is not a multiple of {WIDTH_UNIT}"
    if c.head_dim % HEAD_UNIT or c.head_dim > MAX_HEAD_DIM:
        return f"heads of {c.head_dim}, the GPU's kernels take multiples of {HEAD_UNIT} up to {MAX_HEAD_DIM}"
    return _matrix_reason(head_matrix(weights))


def head_matrix(weights: Weights) -> Matrix:
    """The output matrix: its own, or the token embedding."""
    return weights.get("output.weight") or weights["token_embd.weight"]


def _layer_reason(c: ModelConfig, weights: Weights, sparsity: str, placement: GpuPlacement, layer: int) -> str:
    """Why the GPU cannot compute a layer, "" where it can."""
    if c.norm_relu[layer]:
        return "a ReLU follows its norms" + (" and matrices are stored by column" if by_column(c, layer) else "")
    scores = cold_mode(c, sparsity, placement, layer) == "scores"
    if c.activation in schema.DENSE_ACTIVATIONS and placement.layers[layer].hot < c.n_ff[layer] and not scores:
        return "its neurons are off by the size of their value: the GPU cannot tell which without their up rows"
    for matrix in weights:
        of_layer = matrix.name.startswith(f"blk.{layer}.")
        predictor = matrix.name.partition(f"blk.{layer}.")[2] in schema.PRED_TENSORS
        if of_layer and matrix.rows > 1 and (scores or not predictor) and _matrix_reason(matrix):
            return _matrix_reason(matrix)
    return ""


def _matrix_reason(m: Matrix) -> str:
    if m.name.endswith(schema.FFN_PRED_SIGN):
        return ""
    if m.ggml_type not in TYPES:
        return (f"{m.name} is {GGMLQuantizationType(m.ggml_type).name}, the GPU computes "
                f"{', '.join(GGMLQuantizationType(t).name for t in TYPES)}")  # fmt: skip
    return f"rows of {m.name} have {m.cols} values, not a multiple of 8" if m.cols % 8 else ""
