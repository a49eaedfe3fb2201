"""Logits of a Hugging Face checkpoint in float64 NumPy: simple, slow, independent of the product.

In: a folder with config.json and safetensors. Out: logits [n_tokens, n_vocab]. Next: test_golden.py.

It reads the folder with its own few lines and follows the families' published definitions (named in comments), so
it can stand beside transformers: make_golden.py checks that both agree. Matrices are [out, in] as Hugging Face stores
them. T tokens, H heads, K key-value heads, D head dimension.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray


def reference_logits(folder: str | Path, tokens: Sequence[int]) -> Array:
    """float64 [len(tokens), n_vocab] for the checkpoint in `folder`."""
    return compute_logits(read_config(folder), read_tensors(folder), tokens)


def compute_logits(config: dict[str, Any], w: dict[str, Array], tokens: Sequence[int]) -> Array:
    """The same from the contents of config.json and the tensors by their Hugging Face names."""
    ids = np.asarray(tokens)
    return _opt(config, w, ids) if config["model_type"] == "opt" else _llama(config, w, ids)


def read_config(folder: str | Path) -> dict[str, Any]:
    return json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))


def read_tensors(folder: str | Path) -> dict[str, Array]:
    """All tensors as float64. With an index, only what it lists and from the file it names."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return _read_safetensors(folder / "model.safetensors")
    where: dict[str, str] = json.loads(index.read_text())["weight_map"]
    files = {file: _read_safetensors(folder / file) for file in set(where.values())}
    return {name: files[file][name] for name, file in where.items()}


def _read_safetensors(path: Path) -> dict[str, Array]:
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    out = {}
    for name, entry in json.loads(raw[8:start]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        blob = raw[start + begin : start + end]
        if entry["dtype"] == "BF16":
            flat = (np.frombuffer(blob, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            flat = np.frombuffer(blob, {"F32": "<f4", "F16": "<f2"}[entry["dtype"]])
        out[name] = flat.astype(np.float64).reshape(entry["shape"])
    return out


def _linear(w: dict[str, Array], name: str, x: Array) -> Array:
    y = x @ w[name + ".weight"].T
    return y + w[name + ".bias"] if name + ".bias" in w else y


def _rms(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _layer_norm(w: dict[str, Array], name: str, x: Array) -> Array:
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * w[name + ".weight"] + w[name + ".bias"]


def _attention(q: Array, k: Array, v: Array, window: int) -> Array:
    """q [T, H, D], k and v [T, K, D] -> [T, H*D]. window 0: all earlier tokens; else itself and the window-1 before."""
    n, heads, dim = q.shape
    group = heads // k.shape[1]
    age = np.arange(n)[:, None] - np.arange(n)[None, :]  # [T, T]: how much older the key is
    hidden = (age < 0) | ((age >= window) if window else False)
    out = np.empty_like(q)
    for h in range(heads):
        scores = q[:, h] @ k[:, h // group].T / math.sqrt(dim)
        scores[hidden] = -np.inf
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, h] = (p / p.sum(axis=-1, keepdims=True)) @ v[:, h // group]
    return out.reshape(n, heads * dim)


def rope_angles(config: dict[str, Any], dim: int, n: int) -> tuple[Array, float]:
    """(angles [n, dim/2], magnitude of cos and sin) for either dialect of config.json."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    pair = np.arange(dim // 2)
    freq = base ** (-2.0 * pair / dim)
    magnitude = 1.0
    if kind == "linear":  # position interpolation
        freq = freq / rope["factor"]
    elif kind == "llama3":  # Llama 3.1: long waves stretched, short ones kept, a linear blend between
        turns = rope["original_max_position_embeddings"] * freq / (2 * math.pi)  # in the original context
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = np.clip((turns - low) / (high - low), 0, 1)
        freq = freq * keep + freq / rope["factor"] * (1 - keep)
    elif kind == "yarn":  # YaRN (arXiv 2309.00071), bounds rounded outwards as in its code
        original = rope["original_max_position_embeddings"]

        def pair_with(turns: float) -> float:
            return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(pair_with(rope.get("beta_fast", 32))), 0)
        high = min(math.ceil(pair_with(rope.get("beta_slow", 1))), dim - 1)
        stretch = np.clip((pair - low) / max(high - low, 1e-3), 0, 1)
        freq = freq * (1 - stretch) + freq / rope["factor"] * stretch
        magnitude = rope.get("attention_factor") or 0.1 * math.log(rope["factor"]) + 1
    elif kind != "default":
        raise ValueError(f"rope type {kind!r}")
    return np.arange(n)[:, None] * freq, magnitude


def _rotate(x: Array, angles: Array, magnitude: float) -> Array:
    """x [T, H, D]: rotates pairs (i, i + D/2)."""
    cos, sin = (f(angles)[:, None, :] * magnitude for f in (np.cos, np.sin))  # [T, 1, D/2]
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _windows(config: dict[str, Any]) -> list[int]:
    """Attention window of each layer, 0: none."""
    n, window = config["num_hidden_layers"], config.get("sliding_window") or 0
    if config["model_type"] in ("qwen2", "qwen3"):
        if not config.get("use_sliding_window"):
            return [0] * n
        if config.get("layer_types"):
            return [window if t == "sliding_attention" else 0 for t in config["layer_types"]]
        return [window if i >= config["max_window_layers"] else 0 for i in range(n)]
    return [window] * n


def _ffn(config: dict[str, Any], w: dict[str, Array], p: str, x: Array) -> Array:
    up = _linear(w, p + "up_proj", x)
    if config["model_type"] == "arcee":  # not gated
        return _linear(w, p + "down_proj", np.maximum(up, 0) ** 2)
    gate = _linear(w, p + "gate_proj", x)
    if config["model_type"] == "bamboo":  # dReLU (TurboSparse, arXiv 2406.05955): ReLU on both
        return _linear(w, p + "down_proj", np.maximum(gate, 0) * np.maximum(up, 0))
    match config["hidden_act"]:
        case "silu":
            gate = gate / (1 + np.exp(-gate))
        case "relu":
            gate = np.maximum(gate, 0)
        case "fatrelu":  # ProSparse (arXiv 2402.13516): kept as it is above the threshold, else 0
            gate = np.where(gate > config["hidden_act_param"], gate, 0)
        case other:
            raise ValueError(f"activation {other!r}")
    return _linear(w, p + "down_proj", gate * up)


def _llama(config: dict[str, Any], w: dict[str, Array], ids: Array) -> Array:
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    eps, layers, windows = config["rms_norm_eps"], config["num_hidden_layers"], _windows(config)
    angles, magnitude = rope_angles(config, dim, len(ids))
    embedding_scale = residual_scale = logit_scale = 1.0
    if config["model_type"] == "minicpm":  # MiniCPM (arXiv 2404.06395), its table of scaling by width and depth
        embedding_scale = config["scale_emb"]
        residual_scale = config["scale_depth"] / math.sqrt(layers)
        logit_scale = config["dim_model_base"] / config["hidden_size"]

    x = w["model.embed_tokens.weight"][ids] * embedding_scale  # [T, d]
    for i in range(layers):
        p = f"model.layers.{i}."
        h = _rms(x, w[p + "input_layernorm.weight"], eps)
        q, k, v = (
            _linear(w, p + f"self_attn.{n}_proj", h).reshape(len(ids), m, dim)
            for n, m in (("q", heads), ("k", kv), ("v", kv))
        )
        if config["model_type"] == "qwen3":
            q = _rms(q, w[p + "self_attn.q_norm.weight"], eps)
            k = _rms(k, w[p + "self_attn.k_norm.weight"], eps)
        a = _attention(_rotate(q, angles, magnitude), _rotate(k, angles, magnitude), v, windows[i])
        x = x + _linear(w, p + "self_attn.o_proj", a) * residual_scale
        h = _rms(x, w[p + "post_attention_layernorm.weight"], eps)
        x = x + _ffn(config, w, p + "mlp.", h) * residual_scale
    head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return _linear(w, head, _rms(x, w["model.norm.weight"], eps)) * logit_scale


def _opt(config: dict[str, Any], w: dict[str, Array], ids: Array) -> Array:
    heads, d = config["num_attention_heads"], config["hidden_size"]
    m = "model.decoder."
    x = w[m + "embed_tokens.weight"][ids] + w[m + "embed_positions.weight"][np.arange(len(ids)) + 2]
    for i in range(config["num_hidden_layers"]):
        p = f"{m}layers.{i}."
        h = _layer_norm(w, p + "self_attn_layer_norm", x)
        q, k, v = (_linear(w, p + f"self_attn.{n}_proj", h).reshape(len(ids), heads, d // heads) for n in "qkv")
        x = x + _linear(w, p + "self_attn.out_proj", _attention(q, k, v, 0))
        h = _layer_norm(w, p + "final_layer_norm", x)
        x = x + _linear(w, p + "fc2", np.maximum(_linear(w, p + "fc1", h), 0))
    head = m + "embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return _linear(w, head, _layer_norm(w, m + "final_layer_norm", x))
