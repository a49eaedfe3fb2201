"""Recipe -> the tensors and metadata of a file, in our layout or as the stock twin.

In: Recipe, Plan. Out: Target for convert/writer.py, which writes it a slab at a time. Next: ../make_synthetic.py.

Both files come from the same random numbers: a tensor's rows depend on its stock name and the seed only. The twin of a
gated ReLU model, for an engine that only knows SiLU, holds gate * 2^K, up and down * 2^-(K/2) (convert/stock.py says
why), quantized from the scaled values.
"""

from __future__ import annotations

from functools import lru_cache, partial

import gguf
import numpy as np
from gguf import GGUFValueType as V

from hotcold.convert.lazy import LazyTensor, QType, from_array, interleaved
from hotcold.convert.model import Metadata, MetaValue, array, f32, string, u32
from hotcold.convert.target import FILE_TYPES, Target
from hotcold.placement import predictor as predictors
from hotcold.placement.predictor import Predictor, Quality
from hotcold.runtime import schema
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.kernels import formats
from synthetic import lowrank
from synthetic.planted import CONSTANT, HEAD, POSITIONS, RESIDUAL, UP, Plan
from synthetic.rows import (
    POOL_ROWS,
    RowPool,
    drawn,
    make_tiles,
    pack,
    random_rows,
    rng_for,
    tile_choice,
    tiled_tensor,
)
from synthetic.shapes import Recipe
from synthetic.vocabulary import vocabulary

COUNTED = 1_000_000  # tokens that the neuron counts in the file pretend to come from
OUTPUT_BIAS = 0.3  # rows of the output matrix repeat: a constant of this size per token tells them apart


def twin_factors(recipe: Recipe) -> int:
    """K of the stock twin; 0 where the architecture computes the activation itself. Raises HotcoldError: no twin."""
    s = recipe.shape
    if s.arch == "opt":
        raise HotcoldError("--stock: stock llama.cpp has no opt architecture, so there is no twin that it runs")
    if recipe.activation == s.stock_activation:
        return 0
    if recipe.activation == "drelu":
        raise HotcoldError("--stock: stock llama.cpp has no ReLU on up values (drelu), so there is no twin")
    return 10 if recipe.kind in (QType.F16, QType.BF16) else 8


class Assembly:
    """One file in the making. `k`: exponent of the scaled gates; `split`: our layout, otherwise llama.cpp's."""

    def __init__(self, recipe: Recipe, plan: Plan, split: bool, k: int = 0) -> None:
        self.recipe, self.plan, self.split, self.k = recipe, plan, split, k
        s, keep = recipe.shape, recipe.shape.n_embd**-0.5
        self.key_factor, self.up_factor, self.down_factor = 2.0**k, 2.0 ** -(k // 2), 2.0 ** -(k - k // 2)
        self.keep = self._pool("keep", s.n_embd, keep)  # an output as large as the input
        self.out = self._pool("attention output", s.n_embd, plan.output_std, whole=True)
        self.up = self._pool("up", s.n_embd, UP * keep * self.up_factor)
        self.tiles = make_tiles(rng_for(recipe.seed, "down"), plan.down_std * self.down_factor, recipe.kind, split,
                                paired=not s.gated)  # fmt: skip
        self.factors = lru_cache(1)(partial(lowrank.key_factors, recipe))  # by layer, one at a time
        self.keys = lru_cache(1)(self._keys)
        self.found: list[tuple[Predictor, Quality]] = []  # per layer, where predictors are planted

    def target(self) -> Target:
        """Everything but the bytes. Raises HotcoldError for types that do not fit the shape."""
        s, c = self.recipe.shape, CONSTANT * RESIDUAL
        embedding = RowPool(random_rows(rng_for(self.recipe.seed, "embedding"), s.n_embd, RESIDUAL, c),
                            self.recipe.kind)  # fmt: skip
        tensors = [self._drawn("token_embd.weight", embedding, s.n_vocab)]
        if s.arch == "opt":
            table = self._pool("positions", s.n_embd, POSITIONS * RESIDUAL, kind=QType.F32)
            tensors.append(self._drawn("position_embd.weight", table, s.n_ctx))
        for layer in range(s.n_layer):
            tensors += self._attention(layer) + self._ffn(layer)
        tensors += self._norm("output_norm")
        biases = rng_for(self.recipe.seed, "output").standard_normal(s.n_vocab) * OUTPUT_BIAS / HEAD
        tensors.append(self._drawn("output.weight", self.keep, s.n_vocab, biases))
        if self.split and self.recipe.predictor:
            self.found = [self._measure(layer) for layer in range(s.n_layer)]
        return Target(s.arch, self._metadata(), tensors, self.recipe.activation)

    # ---- matrices

    def _pool(self, name: str, cols: int, std: float, whole: bool = False, kind: QType | None = None) -> RowPool:
        """whole: its columns are not those of the residual, so none is left out."""
        rng = rng_for(self.recipe.seed, name)
        values = random_rows(rng, cols, std)
        if whole:
            values[:, :HEAD] = rng.standard_normal((POOL_ROWS, HEAD)) * std
        return RowPool(values, self.recipe.kind if kind is None else kind)

    def _index(self, name: str, rows: int) -> np.ndarray:
        return rng_for(self.recipe.seed, name).integers(0, POOL_ROWS, rows)

    def _drawn(self, name: str, pool: RowPool, rows: int, head: np.ndarray | None = None) -> LazyTensor:
        return drawn(name, pool, self._index(name, rows), head)

    def _norm(self, name: str, head: float = 1.0) -> list[LazyTensor]:
        n_embd = self.recipe.shape.n_embd
        weight = np.ones(n_embd, np.float32)
        weight[:HEAD] = head
        out = [_vector(name + ".weight", weight)]
        if self.recipe.shape.arch == "opt":
            out.append(_vector(name + ".bias", np.zeros(n_embd, np.float32)))
        return out

    def _attention(self, layer: int) -> list[LazyTensor]:
        s = self.recipe.shape
        kv = s.n_embd // s.n_head * s.n_head_kv
        out = self._norm(schema.block(layer, "attn_norm"))
        for name, rows in (("attn_q", s.n_embd), ("attn_k", kv), ("attn_v", kv)):
            out.append(self._drawn(schema.block(layer, name + ".weight"), self.keep, rows))
        name = schema.block(layer, "attn_output.weight")
        index = self._index(name, s.n_embd)
        index[:HEAD] = self.out.zero  # nothing is added to the constant columns
        return [*out, drawn(name, self.out, index)]

    # ---- the FFN

    def _key_name(self, layer: int) -> str:
        return schema.block(layer, schema.key_matrix(self.recipe.shape.gated, False))

    def _shift_head(self) -> np.ndarray:
        """f64 [n_ff]: what key rows hold in the constant columns."""
        s = self.recipe.shape
        return self.plan.shift * 0 if s.arch == "opt" else self.plan.shift * s.n_embd**-0.5 * self.key_factor

    def _bias(self, layer: int) -> np.ndarray:
        """f32 [n_ff]: what is added to the keys."""
        s = self.recipe.shape
        shift = self.plan.shift * self.plan.deviation(layer, s.n_embd) if s.arch == "opt" else self.plan.shift * 0
        return shift.astype(np.float32)

    def _keys(self, layer: int) -> RowPool:
        if self.recipe.predictor:
            rows = self.factors(layer).rows
        else:
            rows = lowrank.full_rank_keys(self.recipe)
        return RowPool(rows * np.float32(self.key_factor), self.recipe.kind)

    def _key_rows(self, layer: int) -> LazyTensor:
        s, name = self.recipe.shape, self._key_name(layer)
        of_pool = layer if self.recipe.predictor else 0
        index, head = self._index(name, s.n_ff), self._shift_head()
        return LazyTensor(name, (s.n_ff, s.n_embd), self.recipe.kind,
                          lambda a, b: self.keys(of_pool).draw(index[a:b], head[a:b]))  # fmt: skip

    def _ffn(self, layer: int) -> list[LazyTensor]:
        s = self.recipe.shape
        opt = s.arch == "opt"
        out = self._norm(schema.block(layer, "ffn_norm"), 1.0 if opt else self.plan.head_weight(layer, s.n_embd))
        out.append(self._key_rows(layer))
        if opt:
            out.append(_vector(schema.block(layer, schema.FFN_UP_BIAS), self._bias(layer)))
        down_name = schema.block(layer, schema.FFN_DOWN)
        choice = tile_choice(rng_for(self.recipe.seed, down_name), s.n_ff, s.n_embd)
        up = self._drawn(schema.block(layer, schema.FFN_UP), self.up, s.n_ff)
        if not self.split:
            down = tiled_tensor(down_name, self.tiles, choice.T, (s.n_embd, s.n_ff), self.recipe.kind)
            return [*out, *([up] if s.gated else []), down]
        name = schema.block(layer, schema.FFN_DOWN_T)
        down = tiled_tensor(name, self.tiles, choice, (s.n_ff, s.n_embd), self.recipe.kind)
        out.append(interleaved(schema.block(layer, schema.FFN_UP_DOWN), up, down) if s.gated else down)
        ids = np.arange(s.n_ff, dtype=np.int32)
        out.append(from_array(schema.block(layer, schema.FFN_NEURON_ID), ids, QType.I32, ids.shape, ""))
        if self.plan.probability is not None:
            counts = np.rint(self.plan.probability * COUNTED).astype(np.int64)
            name = schema.block(layer, schema.FFN_NEURON_COUNT)
            out.append(from_array(name, counts, QType.I64, counts.shape, ""))
        return out + (self._predictor(layer) if self.recipe.predictor else [])

    def _predictor(self, layer: int) -> list[LazyTensor]:
        """Made again when it is written; what it finds is known by then."""
        p, s = self.recipe.predictor, self.recipe.shape
        assert p is not None
        index = self._index(self._key_name(layer), s.n_ff)

        def w_in(a: int, b: int) -> np.ndarray:
            return pack(self.factors(layer).w_in[a:b], p.kind)

        def w_out(a: int, b: int) -> np.ndarray:
            return pack(self.factors(layer).w_out, p.kind)[index[a:b]]

        def bias(a: int, b: int) -> np.ndarray:
            return self.found[layer][0].bias[a:b]

        return [LazyTensor(schema.block(layer, schema.FFN_PRED_IN), (p.rank, s.n_embd), p.kind, w_in),
                LazyTensor(schema.block(layer, schema.FFN_PRED_OUT), (s.n_ff, p.rank), p.kind, w_out),
                LazyTensor(schema.block(layer, schema.FFN_PRED_OUT_BIAS), (s.n_ff,), QType.F32, bias)]  # fmt: skip

    def _measure(self, layer: int) -> tuple[Predictor, Quality]:
        factors, index = self.factors(layer), self._index(self._key_name(layer), self.recipe.shape.n_ff)
        return lowrank.measured(self.recipe, self.plan, layer, factors, RowPool(factors.rows, self.recipe.kind), index,
                                self._shift_head(), self._bias(layer))  # fmt: skip

    # ---- metadata

    def _metadata(self) -> Metadata:
        r, s = self.recipe, self.recipe.shape
        norm = "layer_norm_epsilon" if s.arch == "opt" else "layer_norm_rms_epsilon"
        meta: Metadata = {
            "general.type": string("model"),
            "general.name": string(r.name),
            "general.file_type": u32(FILE_TYPES[r.kind]),
            "general.quantization_version": u32(gguf.GGML_QUANT_VERSION),
            f"{s.arch}.context_length": u32(s.n_ctx),
            f"{s.arch}.embedding_length": u32(s.n_embd),
            f"{s.arch}.block_count": u32(s.n_layer),
            f"{s.arch}.feed_forward_length": u32(s.n_ff),
            f"{s.arch}.attention.head_count": u32(s.n_head),
            f"{s.arch}.attention.head_count_kv": u32(s.n_head_kv),
            f"{s.arch}.attention.{norm}": f32(1e-5),
            f"{s.arch}.vocab_size": u32(s.n_vocab),
        }
        if s.arch != "opt":
            meta[f"{s.arch}.rope.dimension_count"] = u32(s.n_embd // s.n_head)
            meta[f"{s.arch}.rope.freq_base"] = f32(10000.0)
        return meta | vocabulary(s.n_vocab) | (self._split_metadata() if self.split else self._stock_metadata())

    def _stock_metadata(self) -> Metadata:
        r = self.recipe
        if self.k:
            return {schema.KEY_RELU_AS_SILU: u32(self.k)}
        return {} if r.activation == r.shape.stock_activation else {schema.KEY_ACTIVATION: string(r.activation)}

    def _split_metadata(self) -> Metadata:
        r, s = self.recipe, self.recipe.shape
        meta: Metadata = {
            schema.KEY_VERSION: u32(schema.VERSION),
            schema.KEY_ACTIVATION: string(r.activation),
            schema.KEY_THRESHOLD: array([r.threshold] * s.n_layer, V.FLOAT32),
            schema.KEY_NEURONS: array([s.n_ff] * s.n_layer, V.UINT32),
        }
        if self.plan.probability is not None:
            meta[schema.KEY_PROFILE_TOKENS] = MetaValue(COUNTED, V.UINT64)
            meta[schema.KEY_PROFILE_CORPUS] = string("none: the frequencies that were planted")
        if self.found:
            own: list[Predictor | None] = [p for p, _ in self.found]
            meta |= predictors.metadata(own, [q for _, q in self.found])
        return meta


def predictor_share(recipe: Recipe) -> float:
    """Bytes of a layer's predictor as a share of those of its FFN rows; 0 without one."""
    p, s = recipe.predictor, recipe.shape
    if p is None:
        return 0.0
    ffn = s.n_ff * (3 if s.gated else 2) * formats.row_bytes(recipe.kind, s.n_embd)
    own = p.rank * formats.row_bytes(p.kind, s.n_embd) + s.n_ff * formats.row_bytes(p.kind, p.rank) + 4 * s.n_ff
    return own / ffn


def _vector(name: str, values: np.ndarray) -> LazyTensor:
    return from_array(name, values, QType.F32, values.shape, "")
