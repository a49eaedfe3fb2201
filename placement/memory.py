"""How many bytes each part of a model takes on the GPU and in RAM, from the file's own tensors.

What an engine allocates is runtime/gpu/memory.py's to say. Here its sum is taken apart, so that a solver can count with
it: bytes per layer and per neuron, and the rest as a bound that holds for every division. engine_vram() is the sum of
one division to the byte, and never above.

In: an open GGUF, its ModelConfig. Out: ModelBytes. Next: plan_model.py.

On the GPU go, in this order: driver and workspaces; then per layer attention, norms, KV cache and predictor; then key
rows; then value rows of hot neurons. The output head goes with the last layer. The token embedding stays in RAM: a
token reads one row of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.gguf_file import GGUFFile
from hotcold.runtime.gpu.placement import GpuPlacement, LayerPlacement
from hotcold.runtime.kernels import formats
from hotcold.runtime.weights import Weights, load_weights

if TYPE_CHECKING:
    from hotcold.runtime.gpu.memory import Vram
    from hotcold.runtime.plan import Plan

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
    workspace: int  # activations, logits, lists, prompts; alignment of all arrays
    cold: int = 0  # more of it where a layer on the GPU leaves neurons to the CPU: in prompts they come through

    def of_context(self, n_ctx: int, room: Room) -> ModelBytes:
        """From those of a context of one token: the same with n_ctx tokens in the KV cache."""
        workspace, cold = room.at(n_ctx)
        return replace(self, workspace=workspace, cold=cold,
                       layers=tuple(replace(layer, kv=layer.kv * n_ctx) for layer in self.layers))  # fmt: skip

    def without_predictors(self) -> ModelBytes:
        """As they are for modes that do not predict, which leave them in the file."""
        return replace(self, layers=tuple(replace(layer, predictor=0) for layer in self.layers))

    def on_gpu(self, layer_on_gpu: tuple[bool, ...], hot: tuple[int, ...], keys: tuple[bool, ...]) -> int:
        """Bytes on the GPU without the driver's."""
        if not any(layer_on_gpu):
            return 0
        total = self.workspace + (self.head if layer_on_gpu[-1] else 0)
        if any(on and n < layer.n_ff for layer, on, n in zip(self.layers, layer_on_gpu, hot, strict=True)):
            total += self.cold
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


class Room:
    """Bytes of VRAM that are no layer's and no neuron's: at least what any division of this model needs."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        from hotcold.runtime.plan import choose_sparsity, make_plan, predicts

        mode, _ = choose_sparsity(config, "auto")
        kind = "keys" if mode == "exact" else "layers"
        if mode == "exact" and any(predicts(config, layer) for layer in range(config.n_layer)):
            mode = kind = "predict"

        def plan(less: int) -> Plan:
            layers = tuple(LayerPlacement(True, n - less, not less) for n in config.n_ff)
            return make_plan(config, weights, mode, GpuPlacement(kind, layers, 0, 1))

        self._plans = [plan(0)] + ([plan(1)] if kind != "layers" and min(config.n_ff) > 1 else [])

    def at(self, n_ctx: int) -> tuple[int, int]:
        """-> workspace, cold of a context of n_ctx tokens. 0 where the GPU can compute no layer."""
        sizes = [self._bytes(plan, n_ctx) for plan in self._plans if plan.placement is not None] or [0]
        return sizes[0], max(0, sizes[-1] - sizes[0])

    @staticmethod
    def _bytes(plan: Plan, n_ctx: int) -> int:
        from hotcold.runtime.engine import N_BATCH  # compiles kernels: not for `place --help`
        from hotcold.runtime.gpu.memory import ALIGNMENT, PAGE, state_blocks, uploads, weight_blocks

        state = list(state_blocks(plan, n_ctx, min(N_BATCH, n_ctx)))
        own = sum(block.n_bytes for block in state if block.kind != "kv")
        widened = sum(2 * rows.rows for rows in uploads(plan) if rows.is_vector)  # a file may have them in F16
        arrays = len(state) + sum(1 for _ in weight_blocks(plan))
        return own + widened + arrays * (ALIGNMENT - 1) + 2 * PAGE


def engine_vram(
    config: ModelConfig, weights: Weights, placement: GpuPlacement, sparsity: str, context: int
) -> Vram | None:  # fmt: skip
    """What the engine allocates for this placement, to the byte; None where nothing is on the GPU."""
    from hotcold.runtime.engine import N_BATCH
    from hotcold.runtime.gpu.memory import vram
    from hotcold.runtime.plan import make_plan

    plan = make_plan(config, weights, sparsity, placement)
    n_ctx = placement.n_ctx
    return None if plan.placement is None else vram(plan, n_ctx, min(N_BATCH, n_ctx), context)


def model_bytes(file: GGUFFile, config: ModelConfig, n_ctx: int, kv_type: str = "f16") -> ModelBytes:
    """Raises HotcoldError for a file whose tensors are not those of its model, or of a type that is not computed."""
    from hotcold.runtime.buffers import KV_TYPES  # imports the compiler: not for `place --help`

    workspace, cold = Room(config, load_weights(file, config)).at(n_ctx)
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
    return ModelBytes(layers, head, embedding + positions, tied, workspace, cold)


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
