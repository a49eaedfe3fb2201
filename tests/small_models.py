"""Small models of any format and layout, written straight as GGUF, and their logits in NumPy.

In: a Spec. Out: a file; logits and which neurons fire, by kernels/reference.py on the file's own bytes. Next:
test_engine.py, test_weights.py, test_plan.py. (tiny.py makes checkpoints of real families for the converter.)

The same Spec in both layouts is the same model. Weights are scaled so that logits are of size 1 to 10.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from encode import encode
from gguf import GGMLQuantizationType as Type

from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.gguf_file import GGUFFile, open_gguf
from hotcold.runtime.kernels import reference
from hotcold.runtime.rope import rope_table

SHIFTS = {"off": -1e4, "on": 1e2}  # added to the keys of a layer; "mixed": some of each, some free


@dataclass(frozen=True)
class Spec:
    """Shape, types and switches of a small model."""

    arch: str = "llama"
    layout: str = "neuron-split"
    activation: str = "relu"
    gated: bool = True
    patterns: tuple[str, ...] = ("free", "free")  # one per layer: free, off, on, mixed
    n_ff: tuple[int, ...] | int = 96
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 16
    n_vocab: int = 101
    n_ctx: int = 128
    attn: Type = Type.F32
    key: Type = Type.F32
    value: Type = Type.F32
    embd: Type = Type.F32
    head: Type | None = None  # None: the embedding again
    threshold: float = 0.0
    biases: bool = False
    window: int = 0
    norm_relu: tuple[bool, ...] = ()  # per layer; empty: none
    seed: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)  # written last, may replace keys

    @property
    def n_layer(self) -> int:
        return len(self.patterns)

    def neurons(self) -> tuple[int, ...]:
        return (self.n_ff,) * self.n_layer if isinstance(self.n_ff, int) else self.n_ff


def all_of(kind: Type) -> dict[str, Any]:
    """Keyword arguments of a Spec whose matrices are all of one type."""
    return {"attn": kind, "key": kind, "value": kind, "embd": kind, "head": kind}


Tensors = dict[str, tuple[Type, np.ndarray]]  # name -> (type in the file, float32 values or integers)


def make_tensors(spec: Spec) -> Tensors:
    """All tensors of the model in file order."""
    rng = np.random.default_rng(spec.seed)

    def matrix(rows: int, cols: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((rows, cols)) * gain / cols**0.5).astype(np.float32)

    def vector(n: int, mean: float, deviation: float) -> tuple[Type, np.ndarray]:
        return Type.F32, (mean + deviation * rng.standard_normal(n)).astype(np.float32)

    q, kv, d = spec.n_head * spec.head_dim, spec.n_head_kv * spec.head_dim, spec.n_embd
    out: Tensors = {"token_embd.weight": (spec.embd, matrix(spec.n_vocab, d, d**0.5))}
    if spec.arch == "opt":
        out["position_embd.weight"] = (spec.embd, matrix(spec.n_ctx, d, d**0.5 / 3))
    for layer, (n_ff, pattern) in enumerate(zip(spec.neurons(), spec.patterns, strict=True)):
        block: Tensors = {"attn_norm.weight": vector(d, 1, 0.2)}
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            block[f"attn_{name}.weight"] = (spec.attn, matrix(rows, d, 1.4))
            if spec.biases:
                block[f"attn_{name}.bias"] = vector(rows, 0, 0.3)
        block["attn_output.weight"] = (spec.attn, matrix(d, q))
        if spec.arch == "qwen3":
            block |= {f"attn_{name}_norm.weight": vector(spec.head_dim, 1, 0.2) for name in "qk"}
        block["ffn_norm.weight"] = vector(d, 1, 0.2)
        block |= _ffn(spec, matrix, vector, n_ff, pattern, rng)
        if spec.biases:
            block |= {"attn_output.bias": vector(d, 0, 0.3), schema.FFN_DOWN_BIAS: vector(d, 0, 0.3)}
        if spec.arch == "opt":
            block |= {"attn_norm.bias": vector(d, 0, 0.2), "ffn_norm.bias": vector(d, 0, 0.2)}
        if spec.norm_relu and spec.norm_relu[layer] and spec.layout == "neuron-split":
            block = by_column(spec, block)
        out |= {schema.block(layer, name): tensor for name, tensor in block.items()}
    out["output_norm.weight"] = vector(d, 1, 0.2)
    if spec.arch == "opt":
        out["output_norm.bias"] = vector(d, 0, 0.2)
    if spec.head is not None:
        out["output.weight"] = (spec.head, matrix(spec.n_vocab, d, 3))
    return out


def by_column(spec: Spec, block: Tensors) -> Tensors:
    """The tensors of a layer with the matrices that read its norms turned."""
    names = schema.turned(spec.gated)
    return {
        names.get(name, name): (kind, np.ascontiguousarray(values.T) if name in names else values)
        for name, (kind, values) in block.items()
    }


def _ffn(spec: Spec, matrix: Any, vector: Any, n_ff: int, pattern: str, rng: np.random.Generator) -> Tensors:
    d = spec.n_embd
    gate, up, down = matrix(n_ff, d), matrix(n_ff, d), matrix(d, n_ff, 1.5)
    biases = {name: vector(n_ff, 0, 0.3)[1] if spec.biases else np.zeros(n_ff, np.float32) for name in ("key", "up")}
    which = rng.integers(0, 3, n_ff) if pattern == "mixed" else {"off": 0, "on": 1}.get(pattern, 2)
    shift = np.choose(which, [np.float32(SHIFTS["off"]), np.float32(SHIFTS["on"]), np.float32(0)])
    if pattern == "on" or pattern == "mixed":
        down = down * np.float32(1 / SHIFTS["on"] ** (2 if spec.activation == "relu2" else 1))
    biases["key"] = biases["key"] + shift
    out: Tensors = {}
    if spec.gated:
        out[schema.FFN_GATE] = (spec.key, gate)
    if spec.layout == "stock":
        out |= {schema.FFN_UP: (spec.value if spec.gated else spec.key, up), schema.FFN_DOWN: (spec.value, down)}
    elif spec.gated:
        bundles = np.stack([up, down.T], axis=1).reshape(2 * n_ff, d)
        out[schema.FFN_UP_DOWN] = (spec.value, bundles)
    else:
        out |= {schema.FFN_UP: (spec.key, up), schema.FFN_DOWN_T: (spec.value, np.ascontiguousarray(down.T))}
    if biases["key"].any():
        out[schema.FFN_GATE_BIAS if spec.gated else schema.FFN_UP_BIAS] = (Type.F32, biases["key"])
    if spec.gated and biases["up"].any():
        out[schema.FFN_UP_BIAS] = (Type.F32, biases["up"])
    if spec.layout == "neuron-split":
        ids = np.random.default_rng(n_ff).permutation(n_ff)  # not from rng: both layouts draw the same numbers
        out[schema.FFN_NEURON_ID] = (Type.I32, ids.astype(np.int32))
    return out


def write_model(path: Path, spec: Spec, tensors: Tensors | None = None) -> Path:
    """Write the model of `spec`, or other tensors under its metadata."""
    writer = gguf.GGUFWriter(path, spec.arch)
    keys: dict[str, Any] = {
        "block_count": spec.n_layer, "context_length": spec.n_ctx, "embedding_length": spec.n_embd,
        "feed_forward_length": list(spec.neurons()), "attention.head_count": spec.n_head,
        "attention.head_count_kv": spec.n_head_kv, "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim, "attention.sliding_window": spec.window,
        "rope.dimension_count": spec.head_dim,
    }  # fmt: skip
    keys["attention.layer_norm_epsilon" if spec.arch == "opt" else "attention.layer_norm_rms_epsilon"] = 1e-5
    metadata: dict[str, Any] = {f"{spec.arch}.{key}": value for key, value in keys.items()}
    metadata |= {schema.KEY_ACTIVATION: spec.activation, schema.KEY_THRESHOLD: [spec.threshold] * spec.n_layer}
    if spec.norm_relu:
        metadata[schema.KEY_NORM_RELU] = [int(flag) for flag in spec.norm_relu]
    if spec.layout == "neuron-split":
        metadata |= {schema.KEY_VERSION: 1, schema.KEY_NEURONS: list(spec.neurons())}
    for key, value in (metadata | dict(spec.metadata)).items():
        _add(writer, key, value)
    for name, (kind, values) in (make_tensors(spec) if tensors is None else tensors).items():
        if values.dtype != np.float32 or kind in (Type.F32, Type.F16):
            writer.add_tensor(name, values.astype(np.float16) if kind == Type.F16 else values)
        else:
            writer.add_tensor(name, encode(kind, values), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


# ------------------------------------------------------------------ the same in NumPy


class Reference:
    """Logits of a small model by the plain functions of kernels/reference.py, on the bytes of its file."""

    def __init__(self, path: Path, kv: type = np.float16) -> None:
        self.kv = kv
        with open_gguf(path) as file:
            self.config = ModelConfig.from_gguf(file)
            self.tensors = {name: self._read(file, name) for name in file.tensors}
            self.columns = {name: info.shape[-1] for name, info in file.tensors.items()}

    @staticmethod
    def _read(file: GGUFFile, name: str) -> tuple[int, np.ndarray]:
        info, data = file.tensors[name], file.data(name)
        if len(info.shape) == 1:
            return int(info.ggml_type), data.copy()
        return int(info.ggml_type), data.copy().view(np.uint8).reshape(info.shape[0], -1)

    def vector(self, name: str) -> np.ndarray | None:
        entry = self.tensors.get(name)
        return None if entry is None else entry[1]

    def _product(self, name: str, x: np.ndarray) -> np.ndarray:
        if name + "_t.weight" in self.tensors:  # one row per input; meets the activations as they are
            kind, raw = self.tensors[name + "_t.weight"]
            rows = reference.decode(kind, raw, self.columns[name + "_t.weight"])
            bias = self.vector(name + ".bias")
            return x.astype(np.float32).astype(np.float64) @ rows + (0 if bias is None else bias)
        kind, raw = self.tensors[name + ".weight"]
        return reference.matmul(kind, raw, x.astype(np.float32), self.vector(name + ".bias"))

    def _layer_norm(self, name: str, layer: int, x: np.ndarray) -> np.ndarray:
        h = self._norm(f"blk.{layer}.{name}", x)
        return np.maximum(h, 0) if self.config.norm_relu[layer] else h

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        weight, eps = self.vector(name + ".weight"), self.config.norm_eps
        assert weight is not None
        if self.config.norm == "layer":
            return reference.layer_norm(x, weight, self.vector(name + ".bias"), eps)
        return reference.rms_norm(x, weight, eps)

    def logits(self, tokens: Sequence[int]) -> tuple[np.ndarray, list[np.ndarray]]:
        """float64 [n, n_vocab], and per layer the keys minus the threshold [n, n_ff]: positive where it fires."""
        c, ids = self.config, np.asarray(tokens)
        kind, raw = self.tensors["token_embd.weight"]
        x = reference.embed(kind, raw, ids, c.n_embd, c.embedding_scale)
        if "position_embd.weight" in self.tensors:
            kind, raw = self.tensors["position_embd.weight"]
            x = x + reference.decode(kind, raw[: len(ids)], c.n_embd)
        fired = []
        for layer in range(c.n_layer):
            p = f"blk.{layer}."
            x = x + self._attention(p, self._layer_norm("attn_norm", layer, x), c.window[layer])
            values, keys = self._neurons(p, layer, self._layer_norm("ffn_norm", layer, x).astype(np.float32))
            fired.append(keys - c.thresholds[layer])
            x = x + self._down(p, values)
        head = "output" if "output.weight" in self.tensors else "token_embd"
        return self._product(head, self._norm("output_norm", x)) * c.logit_scale, fired

    def _attention(self, p: str, h: np.ndarray, window: int) -> np.ndarray:
        c = self.config
        q, k, v = (self._product(p + f"attn_{name}", h).reshape(len(h), -1, c.head_dim) for name in "qkv")
        for name, x in (("q", q), ("k", k)):
            if p + f"attn_{name}_norm.weight" in self.tensors:
                x[:] = self._norm(p + f"attn_{name}_norm", x)
        if c.rope:
            cos, sin = (table[:, None] for table in rope_table(c.rope, len(h)))
            q, k = (reference.rotate(x, cos, sin, c.rope.interleaved) for x in (q, k))
        caches: list[np.ndarray] = [x.astype(self.kv).swapaxes(0, 1) for x in (k, v)]
        a = reference.attention(q, caches[0], caches[1], 0, window, c.head_dim**-0.5)
        return self._product(p + "attn_output", a.reshape(len(h), -1))

    def _neurons(self, p: str, layer: int, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        c = self.config
        keys, up = self._product(p + ("ffn_gate" if c.gated else "ffn_up"), h), None
        if c.gated and c.layout == "stock":
            up = self._product(p + "ffn_up", h)
        elif c.gated:
            kind, raw = self.tensors[p + schema.FFN_UP_DOWN]
            up = reference.matmul(kind, raw[::2], h, self.vector(p + schema.FFN_UP_BIAS))
        return reference.neuron_values(c.activation, keys, up, c.thresholds[layer]), keys

    def _down(self, p: str, values: np.ndarray) -> np.ndarray:
        c = self.config
        if c.layout == "stock":
            return self._product(p + "ffn_down", values)
        kind, raw = self.tensors[p + (schema.FFN_UP_DOWN if c.gated else schema.FFN_DOWN_T)]
        down = raw[1::2] if c.gated else raw
        return reference.down(kind, down, values, c.n_embd, self.vector(p + schema.FFN_DOWN_BIAS))
