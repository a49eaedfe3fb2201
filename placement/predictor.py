"""A layer's predictor: which neurons may fire, from x, before any of their rows is read.

In: arrays, or an open GGUF. Out: Predictor, its scores, how good it is, what it costs, its tensors. Next: lowrank.py,
mlp.py and signbit.py make them; train.py writes them.

Everything here computes as the runtime does: with the weights as they are stored, and with x in blocks of int8 before
rows of a quantized type. So the numbers printed are those of `--sparsity predict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import gguf
import numpy as np

from hotcold.convert.lazy import QType
from hotcold.convert.model import Metadata, MetaValue, array
from hotcold.placement import signbit
from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.facts import fires
from hotcold.runtime.gguf_file import GGUFFile, dequantize
from hotcold.runtime.kernels import formats, reference
from hotcold.runtime.weights import by_column

ALWAYS = np.float32(1e6)  # bias of a neuron that is always a candidate; never: its negative
ROWS = 1024  # tokens at a time, where int8 blocks are made


@dataclass(frozen=True)
class Predictor:
    """One layer's predictor; rows in stored order of the file it is for. Formulas: runtime/schema.py."""

    kind: str  # "lowrank" | "mlp" | "signbit"
    lookahead: bool
    threshold: float
    bias: np.ndarray  # f32 [n_ff]
    w_in: np.ndarray | None = None  # f32 [rank, n_embd]
    b_in: np.ndarray | None = None  # f32 [rank], mlp only
    w_out: np.ndarray | None = None  # f32 [n_ff, rank]
    signs: np.ndarray | None = None  # i32 [n_ff, words], signbit only
    type_in: QType = QType.Q8_0
    type_out: QType = QType.Q8_0

    @property
    def rank(self) -> int:
        return 0 if self.w_in is None else len(self.w_in)

    def scores(self, x: np.ndarray) -> np.ndarray:
        """f32 [n, n_ff] for x f32 [n, n_embd]. A neuron is a candidate where its score is above the threshold."""
        if self.signs is not None:
            return signbit.agreement(self.signs, x) + self.bias
        if self.w_in is None or self.w_out is None:
            raise HotcoldError(f"a predictor of kind {self.kind!r} without matrices")
        hidden = seen(self.type_in, x) @ self.w_in.T  # [n, rank]
        if self.b_in is not None:
            hidden = np.maximum(hidden + self.b_in, 0)
        result: np.ndarray = seen(self.type_out, hidden) @ self.w_out.T + self.bias
        return result

    @property
    def n_bytes(self) -> int:
        """Bytes a token reads, as stored."""
        return sum(_stored_bytes(a, t) for a, t in self.tensors().values())

    @property
    def n_parameters(self) -> int:
        return sum(a.size for a, _ in self.tensors().values())

    def tensors(self) -> dict[str, tuple[np.ndarray, QType]]:
        """Name within the layer -> (values, type in the file)."""
        out: dict[str, tuple[np.ndarray, QType]] = {}
        for name, values, kind in (
            (schema.FFN_PRED_IN, self.w_in, self.type_in), (schema.FFN_PRED_IN_BIAS, self.b_in, QType.F32),
            (schema.FFN_PRED_OUT, self.w_out, self.type_out), (schema.FFN_PRED_OUT_BIAS, self.bias, QType.F32),
            (schema.FFN_PRED_SIGN, self.signs, QType.I32),
        ):  # fmt: skip
            if values is not None:
                out[name] = (values, kind)
        return out


def seen(kind: QType, x: np.ndarray) -> np.ndarray:
    """What rows of this type are multiplied with instead of x: float32 [n, cols]."""
    if kind not in formats.QUANTIZED:
        return np.asarray(x, np.float32)
    out = np.empty(x.shape, np.float32)
    for a in range(0, len(x), ROWS):  # its float64 blocks are large
        out[a:a + ROWS] = reference.seen(kind, x[a:a + ROWS])
    return out


def fitting_type(wanted: QType, cols: int) -> QType:
    """The type, or F16 where rows are no whole number of blocks."""
    return wanted if wanted == QType.F16 or cols % formats.BLOCK == 0 else QType.F16


def rounded(values: np.ndarray, kind: QType) -> np.ndarray:
    """float32 values as they come back from a file of this type. Rounding them again changes nothing."""
    raw = gguf.quants.quantize(np.ascontiguousarray(values, np.float32), kind)
    return dequantize(raw, kind)


def as_stored(p: Predictor) -> Predictor:
    """The predictor with weights as they come back from the file."""
    if p.w_in is None or p.w_out is None:
        return p
    type_in, type_out = fitting_type(p.type_in, p.w_in.shape[1]), fitting_type(p.type_out, p.w_out.shape[1])
    return replace(p, w_in=rounded(p.w_in, type_in), w_out=rounded(p.w_out, type_out),
                   type_in=type_in, type_out=type_out)  # fmt: skip


def _stored_bytes(values: np.ndarray, kind: QType) -> int:
    if kind in (QType.F32, QType.I32):
        return int(values.nbytes)
    return len(values) * formats.row_bytes(kind, values.shape[1])


# ------------------------------------------------------------------ how good, how expensive


@dataclass(frozen=True)
class Quality:
    """Shares; every one is defined in one place, here."""

    recall: float  # fired and predicted / fired
    recall_magnitude: float  # the same weighted by the length of what neurons add, |value| * |down row|
    precision: float  # fired and predicted / predicted
    density: float  # predicted / all
    active: float  # fired / all

    @property
    def hits(self) -> float:
        """Fired and predicted / all."""
        return self.recall * self.active


def evaluate(predictor: Predictor, x: np.ndarray, fired: np.ndarray, values: np.ndarray) -> Quality:
    """x: f32 [n, n_embd], what the predictor reads; fired: bool [n, n_ff]; values: f32 [n, n_ff], their weight."""
    return quality(predictor.scores(x) > np.float32(predictor.threshold), fired, values)


def quality(predicted: np.ndarray, fired: np.ndarray, values: np.ndarray) -> Quality:
    """All [n, n_ff]. Where nothing fires (or is predicted) recall (precision) is 1: nothing was missed."""
    hits = predicted & fired
    n_fired, n_predicted, n_hits = (int(np.count_nonzero(m)) for m in (fired, predicted, hits))
    size = np.abs(values)
    weight = float(np.sum(size, where=fired, dtype=np.float64))
    found = float(np.sum(size, where=hits, dtype=np.float64))
    return Quality(n_hits / n_fired if n_fired else 1.0, found / weight if weight else 1.0,
                   n_hits / n_predicted if n_predicted else 1.0, n_predicted / fired.size,
                   n_fired / fired.size)  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """Bytes of one neuron's rows: those that tell whether it fires, and those read only if it does."""

    n_ff: int
    check: int
    value: int

    @property
    def total(self) -> int:
        return self.n_ff * (self.check + self.value)

    def exact(self, active: float) -> float:
        """Share of the FFN's bytes that a token reads in exact mode."""
        return self.n_ff * (self.check + self.value * active) / self.total

    def predict(self, n_bytes: float, q: Quality) -> float:
        """The same in predict mode, with a predictor of n_bytes."""
        return (n_bytes + self.n_ff * (self.check * q.density + self.value * q.hits)) / self.total


def rows_of(file: GGUFFile, config: ModelConfig, layer: int) -> Rows:
    """Rows of a layer of a neuron-split file."""
    n_ff = config.n_ff[layer]

    def per_neuron(name: str) -> int:
        return file.tensors[schema.block(layer, name)].n_bytes // n_ff

    key = per_neuron(schema.key_matrix(config.gated, by_column(config, layer)))
    if not config.gated:
        return Rows(n_ff, key, per_neuron(schema.FFN_DOWN_T))
    bundle = per_neuron(schema.FFN_UP_DOWN)
    if config.activation in schema.SPARSE_ACTIVATIONS:
        return Rows(n_ff, key, bundle)
    return Rows(n_ff, key + bundle // 2, bundle // 2)  # |act(key) * up| against a threshold needs the up row too


def computed(config: ModelConfig, layer: int, fired: float) -> float:
    """Share of a layer's neurons that exact mode computes, of which this share fired."""
    return fired if fires(config, layer) else 1.0


# ------------------------------------------------------------------ to files


def export(predictors: list[Predictor | None]) -> dict[str, tuple[np.ndarray, QType]]:
    """Tensors of all layers: name -> (values, type), as rewrite() takes them."""
    return {schema.block(layer, name): entry for layer, p in enumerate(predictors) if p is not None
            for name, entry in p.tensors().items()}  # fmt: skip


def metadata(predictors: list[Predictor | None], qualities: list[Quality]) -> Metadata:
    """Keys of schema.py. A layer without predictor runs exact, so its candidates are all neurons."""
    from gguf import GGUFValueType as V

    def per_layer(kind: V, none: object, get: Mapping[int, object]) -> MetaValue:
        return array([none if p is None else get[i] for i, p in enumerate(predictors)], kind)

    own = {i: p for i, p in enumerate(predictors) if p is not None}
    out = {
        schema.KEY_PREDICTOR_KIND: per_layer(V.STRING, "none", {i: p.kind for i, p in own.items()}),
        schema.KEY_PREDICTOR_INPUT: per_layer(V.UINT32, 0, {i: int(p.lookahead) for i, p in own.items()}),
        schema.KEY_PREDICTOR_RANK: per_layer(V.UINT32, 0, {i: p.rank for i, p in own.items()}),
        schema.KEY_PREDICTOR_THRESHOLD: per_layer(V.FLOAT32, 0.0, {i: p.threshold for i, p in own.items()}),
    }
    for key, name, none in ((schema.KEY_PREDICTOR_RECALL, "recall", 1.0),
                            (schema.KEY_PREDICTOR_RECALL_MAGNITUDE, "recall_magnitude", 1.0),
                            (schema.KEY_PREDICTOR_DENSITY, "density", 1.0)):  # fmt: skip
        out[key] = per_layer(V.FLOAT32, none, {i: float(getattr(qualities[i], name)) for i in own})
    precision = [q.active if p is None else q.precision for p, q in zip(predictors, qualities, strict=True)]
    out[schema.KEY_PREDICTOR_PRECISION] = array([float(v) for v in precision], V.FLOAT32)
    return out


KEYS = (
    schema.KEY_PREDICTOR_KIND, schema.KEY_PREDICTOR_INPUT, schema.KEY_PREDICTOR_RANK, schema.KEY_PREDICTOR_THRESHOLD,
    schema.KEY_PREDICTOR_RECALL, schema.KEY_PREDICTOR_RECALL_MAGNITUDE, schema.KEY_PREDICTOR_PRECISION,
    schema.KEY_PREDICTOR_DENSITY,
)  # fmt: skip
