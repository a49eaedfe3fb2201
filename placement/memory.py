"""How many bytes each part of a model takes on the GPU and in RAM, exactly, from the file's own tensors.

In: an open GGUF, its ModelConfig. Out: ModelBytes. Next: plan_model.py.

On the GPU go, in this order: driver and workspaces; then per layer attention, norms, KV cache and predictor; then key
rows; then value rows of hot neurons. The output head goes with the last layer. The token embedding stays in RAM: a
token reads one row of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.gguf_file import GGUFFile
from hotcold.runtime.kernels import formats
from hotcold.runtime.weights import load_weights

ALIGNMENT = 256  # every array on the GPU starts at a multiple
_ARRAYS = 40  # on the GPU, at most: per layer, and outside the layers
# Key rows as layers with a ReLU after their norms have them: by input column.
_KEYS_BY_COLUMN = (schema.FFN_GATE_T, schema.FFN_UP_T)


@dataclass(frozen=True)
class LayerBytes:
    """One layer. A neuron's bias counts with its row."""

    n_ff: int
    attention: int  # matrices, norms, biases; the FFN's norm and down bias too
    kv: int  # KV cache of n_ctx tokens
    predictor: int
    key_row: int  # per neuron
    value_row: int  # per neuron
    keys_by_column: bool

    @property
    def fixed(self) -> int:
        """What the GPU holds of the layer before any neuron."""
        return self.attention + self.kv + self.predictor

    @property
    def ffn(self) -> int:
        return self.n_ff * (self.key_row + self.value_row)


@dataclass(frozen=True)
class ModelBytes:
    layers: tuple[LayerBytes, ...]
    head: int  # output norm and matrix
    embedding: int  # token and position embeddings
    tied: bool  # the output matrix is the token embedding
    workspace: int  # activations, logits, lists; alignment of all arrays

    def of_context(self, n_ctx: int) -> ModelBytes:
        """From those of a context of one token: the same with n_ctx tokens in the KV cache."""
        return replace(self, layers=tuple(replace(layer, kv=layer.kv * n_ctx) for layer in self.layers))

    def without_predictors(self) -> ModelBytes:
        """As they are for modes that do not predict, which leave them in the file."""
        return replace(self, layers=tuple(replace(layer, predictor=0) for layer in self.layers))

    def on_gpu(self, layer_on_gpu: tuple[bool, ...], hot: tuple[int, ...], keys: tuple[bool, ...]) -> int:
        """Bytes on the GPU without the driver's."""
        if not any(layer_on_gpu):
            return 0
        total = self.workspace + (self.head if layer_on_gpu[-1] else 0)
        for layer, on_gpu, n_hot, all_keys in zip(self.layers, layer_on_gpu, hot, keys, strict=True):
            total += layer.fixed if on_gpu else 0
            total += n_hot * layer.value_row + (layer.n_ff if all_keys else n_hot) * layer.key_row
        return total

    def in_ram(self, layer_on_gpu: tuple[bool, ...], hot: tuple[int, ...], keys: tuple[bool, ...]) -> int:
        """Bytes of the model that a CPU reads: all that is not on the GPU."""
        total = self.embedding
        if not layer_on_gpu[-1] and not self.tied:
            total += self.head
        for layer, on_gpu, n_hot, all_keys in zip(self.layers, layer_on_gpu, hot, keys, strict=True):
            total += 0 if on_gpu else layer.fixed
            total += layer.ffn - n_hot * layer.value_row - (layer.n_ff if all_keys else n_hot) * layer.key_row
        return total


def model_bytes(file: GGUFFile, config: ModelConfig, n_ctx: int, kv_type: str = "f16") -> ModelBytes:
    """Raises HotcoldError for a file whose tensors are not those of its model, or of a type that is not computed."""
    from hotcold.runtime.program import KV_TYPES  # imports the compiler: not for `place --help`

    load_weights(file, config)
    parts: list[dict[str, int]] = [{} for _ in range(config.n_layer)]
    outside: dict[str, int] = {}
    for name, info in file.tensors.items():
        if name.startswith("blk."):
            _, number, part = name.split(".", 2)
            parts[int(number)][part] = info.n_bytes
        else:
            outside[name] = info.n_bytes
    kv = 2 * config.n_head_kv * n_ctx * formats.row_bytes(KV_TYPES[kv_type], config.head_dim)
    layers = tuple(_layer(config, number, part, kv) for number, part in enumerate(parts))
    embedding = outside.pop("token_embd.weight")
    tied = "output.weight" not in outside
    positions = outside.pop("position_embd.weight", 0)
    head = sum(outside.values()) + (embedding if tied else 0)
    return ModelBytes(layers, head, embedding + positions, tied, workspace_bytes(config))


def _layer(config: ModelConfig, number: int, sizes: dict[str, int], kv: int) -> LayerBytes:
    """Sort the tensors of one layer; what is neither FFN nor table belongs to attention."""
    n_ff = config.n_ff[number]
    by_column = any(name in sizes for name in _KEYS_BY_COLUMN)
    keys = (schema.FFN_GATE, schema.FFN_GATE_BIAS) if config.gated else (schema.FFN_UP, schema.FFN_UP_BIAS)
    values: tuple[str, ...] = (schema.FFN_UP_DOWN, schema.FFN_UP_BIAS) if config.gated else (schema.FFN_DOWN_T,)
    if config.layout == "stock":  # a neuron's share: its rows do not lie together, only whole layers move
        values = (schema.FFN_DOWN, *((schema.FFN_UP, schema.FFN_UP_BIAS) if config.gated else ()))
    tables = (schema.FFN_NEURON_ID, schema.FFN_NEURON_COUNT)
    key, value, predictor, attention = 0, 0, 0, 0
    for name, n_bytes in sizes.items():
        if name in keys or name in _KEYS_BY_COLUMN:
            key += n_bytes
        elif name in values:
            value += n_bytes
        elif name in schema.PRED_TENSORS:
            predictor += n_bytes
        elif name not in tables:
            attention += n_bytes
    return LayerBytes(n_ff, attention, kv, predictor, -(-key // n_ff), -(-value // n_ff), by_column)


def workspace_bytes(config: ModelConfig) -> int:
    """Activations of a block of tokens in f32 and as act blocks, scores, logits, lists of neurons, alignment."""
    from hotcold.runtime.engine import N_BATCH  # compiles kernels: not for `place --help`

    c = config
    q, kv, n_ff = c.n_head * c.head_dim, c.n_head_kv * c.head_dim, max(c.n_ff)
    values = 2 * c.n_embd + 2 * q + 2 * kv + n_ff * (2 if c.gated else 1)  # x, h, q, att, k, v, g, u
    act_blocks = -(-max(c.n_embd, q, n_ff) // formats.BLOCK) * formats.ACT_BYTES
    lists = 2 * 4 * n_ff + 4 * n_ff  # who fires on the GPU and on the CPU, and with what value
    padding = ALIGNMENT * _ARRAYS * (c.n_layer + 1)
    return N_BATCH * (4 * values + act_blocks) + 4 * c.n_vocab + lists + 4 * c.n_embd + padding
