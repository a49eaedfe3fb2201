"""Metadata of a GGUF -> frozen ModelConfig.

In: a GGUFFile. Out: ModelConfig, every number checked. Next: weights.py.

Keys mean what llama.cpp means by them. A property the runtime cannot compute is an error that names its key: a model
run without one of its properties answers plausible nonsense.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from hotcold.runtime.ffn_config import FfnConfig, PredictorConfig, read_ffn
from hotcold.runtime.gguf_file import GGUFFile, safe_text
from hotcold.runtime.keys import Keys, show

# Limits far above any real model: they keep a wrong number from becoming a huge allocation.
_MAX_LAYERS = 1024
_MAX_WIDTH = 1 << 20  # n_embd
_MAX_HEADS = 4096
_MAX_HEAD_DIM = 1024
_MAX_CONTEXT = 1 << 24
_MAX_VOCAB = 1 << 24

_INTERLEAVED_ROPE = ("llama", "minicpm", "arcee")
_LEARNED_POSITIONS = ("opt",)
_LAYER_NORM = ("opt",)
_ROPE_SCALINGS = ("none", "linear", "yarn")

# Keys of properties the runtime does not compute -> the value with which they change nothing (None: no value does).
_NOT_SUPPORTED: dict[str, bool | float | None] = {
    "expert_count": 0,
    "nextn_predict_layers": 0,
    "use_parallel_residual": False,
    "pooling_type": 0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "rope.scaling.alpha": 0.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.freq_base_swa": None,
    "rope.dimension_count_swa": None,
    "rope.dimension_sections": None,
    "attention.key_length_swa": None,
    "attention.value_length_swa": None,
}


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. `interleaved`: pairs (2i, 2i+1) (llama.cpp NORM); otherwise (i, i + n_dims/2) (NEOX).

    `attn_factor` multiplies cos and sin; yarn with `ext_factor` above 0 multiplies them by `yarn_mscale(factor)` too.
    """

    n_dims: int  # rotated dimensions per head
    interleaved: bool
    freq_base: float
    scaling: str  # "none" | "linear" | "yarn"; llama3 scaling is the tensor rope_freqs.weight
    factor: float = 1.0
    orig_ctx: int = 0
    ext_factor: float = 1.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """Everything the engine needs to know of a model besides its weights. Names follow GGUF and llama.cpp."""

    arch: str
    name: str
    layout: str  # "neuron-split" | "stock"
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_ctx_train: int
    n_ff: tuple[int, ...]  # [n_layer]
    norm: str  # "rms" | "layer"
    norm_eps: float
    activation: str  # schema.ACTIVATIONS
    gated: bool
    thresholds: tuple[float, ...]  # [n_layer]
    rope: Rope | None  # None: learned positions (position_embd.weight)
    window: tuple[int, ...]  # [n_layer], 0: full attention; w: a token sees itself and the w-1 before it
    norm_relu: tuple[bool, ...]  # [n_layer]: a ReLU follows the layer's norms
    predictors: tuple[PredictorConfig, ...] = ()  # [n_layer]; empty: the file has none
    embedding_scale: float = 1.0  # multiplies the token embedding
    residual_scale: float = 1.0  # multiplies what attention and FFN add to the residual
    logit_scale: float = 1.0  # multiplies the logits
    attn_scale: float = 0.0  # multiplies q.k; 0: 1/sqrt(head_dim)

    @classmethod
    def from_gguf(cls, f: GGUFFile) -> ModelConfig:
        """Read and check the metadata of a model.

        Raises GGUFError naming file, key, what was found and what is allowed.
        """
        return cls.from_keys(Keys(f))

    @classmethod
    def from_keys(cls, keys: Keys) -> ModelConfig:
        """The same; afterwards `keys.used` tells which keys were looked at."""
        _check_supported(keys)
        n_layer = _layers(keys)
        n_embd = keys.integer("embedding_length", 1, _MAX_WIDTH)
        n_head, n_head_kv, head_dim = _heads(keys, n_layer, n_embd)
        n_vocab = _vocab(keys, n_embd)
        n_ctx = _context(keys, n_embd)
        ffn: FfnConfig = read_ffn(keys, n_layer, n_embd)
        norm = "layer" if keys.arch in _LAYER_NORM else "rms"
        eps_key = "attention.layer_norm_epsilon" if norm == "layer" else "attention.layer_norm_rms_epsilon"
        embedding_scale, residual_scale, logit_scale = _scales(keys, n_layer, n_embd)
        attn_scale = keys.real("attention.scale", 0.0, 1e4, default=0.0)
        return cls(
            arch=keys.arch,
            name=safe_text(keys.text("general.name", default=keys.file.path.stem)),
            layout=ffn.layout,
            n_layer=n_layer,
            n_embd=n_embd,
            n_head=n_head,
            n_head_kv=n_head_kv,
            head_dim=head_dim,
            n_vocab=n_vocab,
            n_ctx_train=n_ctx,
            n_ff=ffn.n_ff,
            norm=norm,
            norm_eps=keys.real(eps_key, 1e-12, 0.1),
            activation=ffn.activation,
            gated=ffn.gated,
            thresholds=ffn.thresholds,
            rope=None if keys.arch in _LEARNED_POSITIONS else _rope(keys, head_dim, n_ctx),
            window=_window(keys, n_layer),
            norm_relu=ffn.norm_relu,
            predictors=ffn.predictors,
            embedding_scale=embedding_scale,
            residual_scale=residual_scale,
            logit_scale=logit_scale,
            attn_scale=attn_scale,
        )


def yarn_mscale(factor: float) -> float:
    """What yarn multiplies cos and sin by when the context grows `factor` times."""
    return 1.0 if factor <= 1.0 else 1.0 + 0.1 * math.log(factor)


def _check_supported(keys: Keys) -> None:
    kind = keys.text("general.type", default="model")
    if kind != "model":
        raise keys.error("key 'general.type'", show(kind), "'model'")
    for key, neutral in _NOT_SUPPORTED.items():
        if not keys.has(key):
            continue
        value = keys.raw(key)
        if isinstance(value, str | list | np.ndarray) or value != neutral:
            raise keys.error(f"key '{keys.full(key)}'", show(value),
                             f"{'no such key' if neutral is None else neutral}: this is not supported")  # fmt: skip


def _layers(keys: Keys) -> int:
    n_layer = keys.integer("block_count", 1, _MAX_LAYERS)
    numbers = [int(m[1]) for m in map(re.compile(r"blk\.(\d{1,9})\.", re.ASCII).match, keys.file.tensors) if m]
    if n_layer != max(numbers, default=-1) + 1:
        raise keys.error(f"key '{keys.full('block_count')}'", n_layer,
                         f"the {max(numbers, default=-1) + 1} layers that have tensors")  # fmt: skip
    return n_layer


def _heads(keys: Keys, n_layer: int, n_embd: int) -> tuple[int, int, int]:
    n_head = keys.same_for_all("attention.head_count", n_layer, 1, _MAX_HEADS)
    n_head_kv = keys.same_for_all("attention.head_count_kv", n_layer, 1, _MAX_HEADS, default=n_head)
    if n_head % n_head_kv:
        raise keys.error(f"key '{keys.full('attention.head_count_kv')}'", n_head_kv, f"a divisor of {n_head} heads")
    if not keys.has("attention.key_length") and n_embd % n_head:
        raise keys.error(f"key '{keys.full('attention.head_count')}'", n_head,
                         f"a divisor of embedding_length {n_embd}, or the key attention.key_length")  # fmt: skip
    head_dim = keys.integer("attention.key_length", 1, _MAX_HEAD_DIM, default=n_embd // n_head)
    value_dim = keys.integer("attention.value_length", 1, _MAX_HEAD_DIM, default=n_embd // n_head)
    if head_dim != value_dim:
        raise keys.error(f"key '{keys.full('attention.value_length')}'", value_dim,
                         f"attention.key_length, {head_dim}: different sizes are not supported")  # fmt: skip
    if head_dim % 2 or head_dim > _MAX_HEAD_DIM:
        raise keys.error("head size (attention.key_length or embedding_length / head_count)", head_dim,
                         f"an even number up to {_MAX_HEAD_DIM}")  # fmt: skip
    return n_head, n_head_kv, head_dim


def _vocab(keys: Keys, n_embd: int) -> int:
    """Rows of the embedding, with every token id of the metadata inside."""
    allowed = f"a matrix of up to {_MAX_VOCAB} rows of embedding_length, {n_embd}"
    n_vocab, columns = keys.matrix("token_embd.weight", allowed)
    if columns != n_embd or n_vocab > _MAX_VOCAB:
        raise keys.error("tensor 'token_embd.weight'", f"shape [{n_vocab}, {columns}]", allowed)
    n_tokens = keys.file.length("tokenizer.ggml.tokens")
    if n_tokens is not None and n_tokens > n_vocab:
        raise keys.error("key 'tokenizer.ggml.tokens'", f"{n_tokens} tokens",
                         f"at most the {n_vocab} rows of token_embd.weight")  # fmt: skip
    for key in keys.file.metadata:
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
            keys.integer(key, 0, n_vocab - 1)
    return n_vocab


def _context(keys: Keys, n_embd: int) -> int:
    n_ctx = keys.integer("context_length", 1, _MAX_CONTEXT)
    if keys.arch not in _LEARNED_POSITIONS:
        return n_ctx
    allowed = f"a matrix with one row of {n_embd} per position"
    rows, columns = keys.matrix("position_embd.weight", allowed)
    if columns != n_embd:
        raise keys.error("tensor 'position_embd.weight'", f"shape [{rows}, {columns}]", allowed)
    return min(n_ctx, rows)


def _rope(keys: Keys, head_dim: int, n_ctx: int) -> Rope:
    n_dims = keys.integer("rope.dimension_count", 2, head_dim, default=head_dim)
    if n_dims % 2:
        raise keys.error(f"key '{keys.full('rope.dimension_count')}'", n_dims, "an even number")
    factor_key = "rope.scaling.factor" if keys.has("rope.scaling.factor") else "rope.scale_linear"  # the old name
    factor = keys.real(factor_key, 1e-3, 1e6, default=1.0)
    scaling = keys.text("rope.scaling.type", default="linear" if factor != 1.0 else "none")
    if scaling not in _ROPE_SCALINGS:
        raise keys.error(f"key '{keys.full('rope.scaling.type')}'", show(scaling), ", ".join(_ROPE_SCALINGS))
    yarn = scaling == "yarn"
    orig_ctx = keys.integer("rope.scaling.original_context_length", 1, _MAX_CONTEXT, default=n_ctx)
    ext_factor = keys.real("rope.scaling.yarn_ext_factor", 0.0, 1.0, default=1.0)
    attn_factor = keys.real("rope.scaling.attn_factor", 1e-3, 1e3, default=1.0)
    if yarn and keys.has("rope.scaling.yarn_attn_factor"):
        # transformers' attention_factor: the whole magnitude, in place of the one that follows from the factor.
        attn_factor *= keys.real("rope.scaling.yarn_attn_factor", 1e-3, 1e3)
        if ext_factor > 0.0:
            attn_factor /= yarn_mscale(factor)
    beta_fast = keys.real("rope.scaling.yarn_beta_fast", 1e-3, 1e6, default=32.0)
    beta_slow = keys.real("rope.scaling.yarn_beta_slow", 1e-3, 1e6, default=1.0)
    if beta_slow > beta_fast:
        key = keys.full("rope.scaling.yarn_beta_slow")
        raise keys.error(f"key '{key}'", beta_slow, f"at most yarn_beta_fast, {beta_fast}")
    return Rope(
        n_dims=n_dims,
        interleaved=keys.arch in _INTERLEAVED_ROPE,
        freq_base=keys.real("rope.freq_base", 1.0 + 1e-6, 1e15, default=10000.0),
        scaling=scaling,
        factor=factor if scaling != "none" else 1.0,
        orig_ctx=orig_ctx if yarn else 0,
        ext_factor=ext_factor,
        attn_factor=attn_factor,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
    )


def _window(keys: Keys, n_layer: int) -> tuple[int, ...]:
    """Sliding window per layer. The pattern is a flag per layer, or a period whose last layer sees everything."""
    size = keys.integer("attention.sliding_window", 0, (1 << 31) - 1, default=0)
    pattern = "attention.sliding_window_pattern"
    if size == 0 or not keys.has(pattern):
        return (size,) * n_layer
    if isinstance(keys.raw(pattern), np.ndarray):
        slides = keys.per_layer(pattern, n_layer, 0, 1, "biu")
    else:
        period = keys.integer(pattern, 0, _MAX_LAYERS)
        slides = [period == 0 or layer % period < period - 1 for layer in range(n_layer)]
    return tuple(size if s else 0 for s in slides)


def _scales(keys: Keys, n_layer: int, n_embd: int) -> tuple[float, float, float]:
    """-> multipliers of embedding, residual additions, logits: MiniCPM's, 1 for every other architecture.

    The file's `logit_scale` divides the logits (hidden_size / dim_model_base). MiniCPM files from before the keys
    existed mean 12, 1.4/sqrt(n_layer) and a base of 256.
    """
    names = ("embedding_scale", "residual_scale", "logit_scale")
    if keys.arch != "minicpm":
        for name in names:
            if keys.has(name) and keys.real(name, -1e30, 1e30) not in (0.0, 1.0):
                raise keys.error(f"key '{keys.full(name)}'", show(keys.raw(name)), "1 for this architecture")
        return 1.0, 1.0, 1.0
    defaults = (12.0, 1.4 / math.sqrt(n_layer), n_embd / 256)
    embedding, residual, logit = (keys.real(n, 1e-6, 1e6, default=d) for n, d in zip(names, defaults, strict=True))
    return embedding, residual, 1.0 / logit
