"""Metadata of a GGUF -> frozen ModelConfig.

In: a GGUFFile. Out: ModelConfig, every number checked. Next: weights.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. `interleaved`: pairs (2i, 2i+1) (llama.cpp NORM); otherwise (i, i + n_dims/2) (NEOX)."""

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
    embedding_scale: float = 1.0  # multiplies the token embedding
    residual_scale: float = 1.0  # multiplies what attention and FFN add to the residual
    logit_scale: float = 1.0  # multiplies the logits
    attn_scale: float = 0.0  # multiplies q.k; 0: 1/sqrt(head_dim)
