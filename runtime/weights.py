"""Named, read-only views of a model's tensors, checked against its configuration.

In: an open GGUFFile and its ModelConfig. Out: Weights. Nothing is copied: matrices stay in the file's memory map.
Next: plan.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType

from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import GGUFError, HotcoldError
from hotcold.runtime.ffn_config import PredictorConfig
from hotcold.runtime.gguf_file import GGUFFile, safe_text
from hotcold.runtime.kernels import formats

_VECTOR_DTYPES = (np.float32, np.float16)
Shapes = dict[str, tuple[tuple[int, ...], bool]]  # tensor name -> shape, whether it must be there


@dataclass(frozen=True)
class Matrix:
    """A weight matrix in the file, one row after the other. A vector is a matrix of one row."""

    name: str
    data: np.ndarray  # keeps the memory map alive
    ggml_type: int
    rows: int
    cols: int
    stride: int  # bytes from one row to the next
    addr: int

    @property
    def n_bytes(self) -> int:
        return self.rows * self.stride


class Weights:
    """Tensors by name. Indexing a tensor the model does not have is a KeyError; get() returns None."""

    def __init__(self, tensors: dict[str, Matrix]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Matrix:
        return self._tensors[name]

    def __iter__(self) -> Iterator[Matrix]:
        return iter(self._tensors.values())

    def get(self, name: str) -> Matrix | None:
        return self._tensors.get(name)

    def layer(self, layer: int, name: str) -> Matrix | None:
        return self._tensors.get(schema.block(layer, name))


def expected_tensors(config: ModelConfig) -> Shapes:
    """Every tensor a model of this configuration may have: name -> (shape, required)."""
    c = config
    layer_norm = c.norm == "layer"
    shapes: Shapes = {
        "token_embd.weight": ((c.n_vocab, c.n_embd), True),
        "output_norm.weight": ((c.n_embd,), True),
        "output_norm.bias": ((c.n_embd,), layer_norm),
        "output.weight": ((c.n_vocab, c.n_embd), False),
    }
    if c.rope is None:
        shapes["position_embd.weight"] = ((c.n_ctx_train, c.n_embd), True)
    else:
        shapes["rope_freqs.weight"] = ((c.rope.n_dims // 2,), False)
    for layer in range(c.n_layer):
        block = _attention_tensors(c, layer) | _ffn_tensors(c, layer)
        shapes.update({schema.block(layer, name): entry for name, entry in block.items()})
    return shapes


def _attention_tensors(c: ModelConfig, layer: int) -> Shapes:
    q, kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
    layer_norm = c.norm == "layer"
    block: Shapes = {"attn_norm.weight": ((c.n_embd,), True), "attn_norm.bias": ((c.n_embd,), layer_norm)}
    for name, rows in zip(schema.ATTN_T, (q, kv, kv), strict=True):
        turned = by_column(c, layer)
        block[schema.ATTN_T[name] if turned else name] = ((c.n_embd, rows) if turned else (rows, c.n_embd), True)
    return block | {
        "attn_output.weight": ((c.n_embd, q), True),
        "attn_q.bias": ((q,), False),
        "attn_k.bias": ((kv,), False),
        "attn_v.bias": ((kv,), False),
        "attn_output.bias": ((c.n_embd,), False),
        "attn_q_norm.weight": ((c.head_dim,), c.arch == "qwen3"),
        "attn_k_norm.weight": ((c.head_dim,), c.arch == "qwen3"),
        "ffn_norm.weight": ((c.n_embd,), True),
        "ffn_norm.bias": ((c.n_embd,), layer_norm),
    }


def _ffn_tensors(c: ModelConfig, layer: int) -> Shapes:
    n_ff = c.n_ff[layer]
    block: Shapes = {schema.FFN_UP_BIAS: ((n_ff,), False), schema.FFN_DOWN_BIAS: ((c.n_embd,), False)}
    turned = by_column(c, layer)
    block[schema.key_matrix(c.gated, turned)] = ((c.n_embd, n_ff) if turned else (n_ff, c.n_embd), True)
    if c.gated:
        block[schema.FFN_GATE_BIAS] = ((n_ff,), False)
    if c.layout == "stock":
        return block | {schema.FFN_UP: ((n_ff, c.n_embd), True), schema.FFN_DOWN: ((c.n_embd, n_ff), True)}
    if c.gated:
        block[schema.FFN_UP_DOWN] = ((2 * n_ff, c.n_embd), True)
    else:
        block[schema.FFN_DOWN_T] = ((n_ff, c.n_embd), True)
    block |= {schema.FFN_NEURON_ID: ((n_ff,), True), schema.FFN_NEURON_COUNT: ((n_ff,), False)}
    return block | _predictor_tensors(c, layer)


def _predictor_tensors(c: ModelConfig, layer: int) -> Shapes:
    predictor = c.predictors[layer] if c.predictors else PredictorConfig("none")
    if predictor.kind == "none":
        return {}
    n_ff, rank = c.n_ff[layer], predictor.rank
    block: Shapes = {schema.FFN_PRED_OUT_BIAS: ((n_ff,), True)}
    if predictor.kind == "signbit":
        return block | {schema.FFN_PRED_SIGN: ((n_ff, 2 * -(-c.n_embd // 64)), True)}
    block |= {schema.FFN_PRED_IN: ((rank, c.n_embd), True), schema.FFN_PRED_OUT: ((n_ff, rank), True)}
    return block | ({schema.FFN_PRED_IN_BIAS: ((rank,), True)} if predictor.kind == "mlp" else {})


def by_column(c: ModelConfig, layer: int) -> bool:
    """Whether the matrices that read the layer's norms hold one row per input, so that inputs of 0 can be skipped."""
    return c.layout == "neuron-split" and c.norm_relu[layer]


def load_weights(file: GGUFFile, config: ModelConfig) -> Weights:
    """Check names, shapes and types of all tensors and return views of them.

    Raises GGUFError for a missing, unknown or misshapen tensor, HotcoldError for a type the kernels do not compute.
    """
    expected = expected_tensors(config)
    for name in file.tensors:
        if name not in expected:
            raise GGUFError(
                f"{file.path}: tensor {safe_text(name)!r} is not part of architecture {config.arch!r} "
                f"({config.layout} layout); this model cannot be run without it"
            )
    tensors: dict[str, Matrix] = {}
    for name, (shape, required) in expected.items():
        info = file.tensors.get(name)
        if info is None:
            if required:
                raise GGUFError(f"{file.path}: tensor {name!r} {list(shape)} is missing: the file is incomplete")
            continue
        if info.shape != shape:
            raise GGUFError(f"{file.path}: tensor {name!r} has shape {list(info.shape)}, expected {list(shape)}")
        part = name.rpartition(".")[2]
        if part == schema.FFN_NEURON_ID:
            _check_neuron_ids(file, name, shape[0])
            continue
        if part == schema.FFN_NEURON_COUNT:
            _check_counts(file, name)
            continue
        if part == schema.FFN_PRED_SIGN:
            tensors[name] = _signs(file, name)
            continue
        tensors[name] = _vector(file, name) if len(shape) == 1 else _matrix(file, name)
    return Weights(tensors)


def _matrix(file: GGUFFile, name: str) -> Matrix:
    info = file.tensors[name]
    if int(info.ggml_type) not in formats.NATIVE:
        native = ", ".join(GGMLQuantizationType(t).name for t in formats.NATIVE)
        raise HotcoldError(
            f"{file.path}: tensor {name!r} is {info.ggml_type.name}, computed natively are {native}; "
            f"run: hotcold convert {file.path} -o OUT.gguf"
        )
    data = file.data(name)
    rows, cols = info.shape
    return Matrix(name, data, int(info.ggml_type), rows, cols, info.n_bytes // rows, data.ctypes.data)


def _vector(file: GGUFFile, name: str) -> Matrix:
    """Norms and biases as f32; the few that a file keeps in F16 are widened (kilobytes)."""
    data = file.data(name)
    if data.dtype not in _VECTOR_DTYPES:
        raise HotcoldError(
            f"{file.path}: vector {name!r} is {file.tensors[name].ggml_type.name}, allowed are F32 and F16"
        )
    if data.dtype != np.float32:
        data = data.astype(np.float32)
    return Matrix(name, data, formats.F32, 1, len(data), data.nbytes, data.ctypes.data)


def _check_neuron_ids(file: GGUFFile, name: str, n_ff: int) -> None:
    ids = file.data(name)
    if ids.dtype != np.int32 or not np.array_equal(np.bincount(ids[(ids >= 0) & (ids < n_ff)], minlength=n_ff),
                                                   np.ones(n_ff, np.int64)):
        raise GGUFError(f"{file.path}: tensor {name!r} is not a permutation of 0..{n_ff - 1} in i32")


def _check_counts(file: GGUFFile, name: str) -> None:
    counts = file.data(name)
    if counts.dtype != np.int64 or counts.min() < 0:
        raise GGUFError(f"{file.path}: tensor {name!r} must hold counts, 0 or more, in i64")


def _signs(file: GGUFFile, name: str) -> Matrix:
    data = file.data(name)
    if data.dtype != np.int32:
        raise GGUFError(f"{file.path}: tensor {name!r} is {file.tensors[name].ggml_type.name}, must be I32")
    rows, cols = data.shape
    return Matrix(name, data, int(GGMLQuantizationType.I32), rows, cols, 4 * cols, data.ctypes.data)
