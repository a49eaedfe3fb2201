"""Tiny but complete Hugging Face checkpoints, one per case, the same bits everywhere, without torch.

In: a folder and the name of a case. Out: config.json, model.safetensors (or shards with their index), a tokenizer.
Next: reference_model.py (computes them in NumPy), golden/make_golden.py (computes them with transformers).

Weights come from an integer hash of tensor name and index, so they depend on no library's random generator. Scales
are chosen so that every path matters: logits of size 1..10, attention neither flat nor one-hot, ReLU about half on,
thresholds that switch off neurons a plain ReLU would keep, norm weights away from 1, every bias nonzero.

    write_checkpoint(folder, "qwen2")                       a case as it is
    write_checkpoint(folder, "qwen2", dialect=4)            config.json as transformers 4 wrote it
    write_checkpoint(folder, "llama", intermediate_size=72) any other name overrides a key of config.json
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tiny_tokenizer import N_TOKENS, write_tokenizer

# Options of write_checkpoint that are no keys of config.json. `rope`: rope_parameters, or rope_theta + rope_scaling.
OPTIONS: dict[str, Any] = {
    "dialect": 5,  # 4 or 5: which transformers release's spelling config.json uses
    "dtype": "float32",  # float32, float16, bfloat16: of every tensor
    "shards": 1,  # more than one: an index, file names in no pattern, and a stray file the index does not mention
    "tokenizer": "llama-bpe",  # see tiny_tokenizer.py
    "rope": None,
    "gate_gain": 1.0,  # size of the key pre-activations; small ones make a FATReLU threshold matter
    "mixed": False,  # bias of the keys: layer 0 all off, layer 1 all on, then blocks of both
    "keep_lm_head": False,  # store lm_head.weight (equal to the embedding) although it is tied
}

LLAMA: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=64, intermediate_size=176, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, hidden_act="silu", max_position_embeddings=512, rms_norm_eps=1e-5,
    vocab_size=N_TOKENS, tie_word_embeddings=False, attention_bias=False, mlp_bias=False,
    rope={"rope_type": "default", "rope_theta": 10000.0},
)  # fmt: skip
MISTRAL = {k: v for k, v in LLAMA.items() if k not in ("attention_bias", "mlp_bias")} | dict(
    architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=None, tokenizer="spm"
)
QWEN2 = {k: v for k, v in LLAMA.items() if k not in ("attention_bias", "mlp_bias")} | dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", rms_norm_eps=1e-6, use_sliding_window=False,
    sliding_window=4096, max_window_layers=28, tokenizer="qwen2", rope={"rope_type": "default", "rope_theta": 1e6},
)  # fmt: skip
QWEN3 = QWEN2 | dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=32, attention_bias=False, sliding_window=None
)
OPT: dict[str, Any] = dict(
    architectures=["OPTForCausalLM"], model_type="opt", hidden_size=64, ffn_dim=200, num_hidden_layers=3,
    num_attention_heads=4, activation_function="relu", max_position_embeddings=512, word_embed_proj_dim=64,
    do_layer_norm_before=True, enable_bias=True, layer_norm_elementwise_affine=True, vocab_size=N_TOKENS,
    tie_word_embeddings=True, tokenizer="gpt-2",
)  # fmt: skip
RELU = LLAMA | dict(hidden_act="relu", intermediate_size=1000)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}

CASES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-mha": LLAMA | dict(num_key_value_heads=4, rms_norm_eps=1e-2),
    "llama-gqa-32-4": LLAMA | dict(hidden_size=256, num_attention_heads=32, num_key_value_heads=4, num_hidden_layers=2),
    "llama-gqa-64-8": LLAMA | dict(hidden_size=512, num_attention_heads=64, num_key_value_heads=8, num_hidden_layers=2),
    "llama-tied": LLAMA | dict(tie_word_embeddings=True),
    "llama-tied-stored": LLAMA | dict(tie_word_embeddings=True, keep_lm_head=True),
    "llama-bias": LLAMA | dict(attention_bias=True, mlp_bias=True),
    "llama-ff1000": LLAMA | dict(intermediate_size=1000),
    "llama-ff1003": LLAMA | dict(hidden_size=96, intermediate_size=1003),
    "llama-ff72": LLAMA | dict(hidden_size=160, intermediate_size=72),
    "llama-embd72": LLAMA | dict(hidden_size=72, num_attention_heads=3, num_key_value_heads=1, intermediate_size=100),
    "llama-embd100": LLAMA | dict(hidden_size=100, head_dim=40, num_key_value_heads=1, intermediate_size=72),
    "llama-12-layers": LLAMA | dict(num_hidden_layers=12, intermediate_size=72, shards=3, tokenizer="smollm"),
    "llama-headdim": LLAMA | dict(head_dim=24, tokenizer="spm"),
    "llama-vocab": LLAMA | dict(vocab_size=N_TOKENS + 32),
    "llama-bf16": LLAMA | dict(dtype="bfloat16"),
    "llama-f16": LLAMA | dict(dtype="float16", shards=2),
    "rope-linear": LLAMA | dict(rope={"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5}),
    "rope-llama3": LLAMA | dict(
        hidden_size=128, rope={"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                               "high_freq_factor": 4.0, "original_max_position_embeddings": 64}),
    "rope-yarn": LLAMA | dict(hidden_size=128, rope=YARN),
    "rope-yarn-tuned": QWEN2 | dict(
        hidden_size=128, rope=YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3, "rope_theta": 1e5}),
    "mistral": MISTRAL | dict(head_dim=24, dtype="bfloat16"),
    "mistral-window8": MISTRAL | dict(sliding_window=8),
    "qwen2": QWEN2,
    "qwen2-window": QWEN2 | dict(num_hidden_layers=4, use_sliding_window=True, sliding_window=8, max_window_layers=2),
    "qwen3": QWEN3,
    "qwen3-tied": QWEN3 | dict(tie_word_embeddings=True, hidden_size=96, intermediate_size=104),
    "relu": RELU,
    "relu-bf16": RELU | dict(dtype="bfloat16", num_key_value_heads=4, intermediate_size=1003, tokenizer="spm"),
    "relu-mixed": RELU | dict(mlp_bias=True, attention_bias=True, mixed=True, intermediate_size=176),
    "prosparse": LLAMA | dict(
        architectures=["SparseLlamaForCausalLM"], model_type="sparsellama", hidden_act="fatrelu", hidden_act_param=0.01,
        gate_gain=0.04, num_key_value_heads=4, intermediate_size=344, tokenizer="spm"),
    "minicpm-s": {k: v for k, v in LLAMA.items() if k not in ("attention_bias", "mlp_bias")} | dict(
        architectures=["MiniCPMForCausalLM"], model_type="minicpm", hidden_act="fatrelu", hidden_act_param=0.03,
        gate_gain=0.085, hidden_size=96, intermediate_size=344, scale_emb=3, scale_depth=1.4, dim_model_base=32,
        tokenizer="spm"),
    "bamboo": MISTRAL | dict(
        architectures=["BambooForCausalLM"], model_type="bamboo", hidden_act="relu", intermediate_size=344),
    "opt": OPT,
    "opt-mixed": OPT | dict(mixed=True, ffn_dim=1003, hidden_size=104, word_embed_proj_dim=104, num_attention_heads=13),
    "arcee": LLAMA | dict(
        architectures=["ArceeForCausalLM"], model_type="arcee", hidden_act="relu2", intermediate_size=344),
}  # fmt: skip

SPARSE = ("relu", "relu-bf16", "relu-mixed", "prosparse", "minicpm-s", "bamboo", "opt", "opt-mixed", "arcee")


def token_ids(n: int, n_vocab: int = N_TOKENS) -> list[int]:
    """The fixed token sequence of all tests: n ids below n_vocab, any prefix of it is the shorter sequence."""
    return [int(x) for x in _hash64("tokens", n) % np.uint64(n_vocab)]


def checkpoint_config(case: str, **overrides: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(keys of config.json without dialect, options) of a case. KeyError: no such case."""
    both = OPTIONS | CASES[case] | overrides
    return {k: v for k, v in both.items() if k not in OPTIONS}, {k: both[k] for k in OPTIONS}


def write_checkpoint(folder: str | Path, case: str, **overrides: Any) -> Path:
    """Writes the checkpoint of `case` (a key of CASES) into `folder` and returns it. Overrides: see module text."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config, options = checkpoint_config(case, **overrides)
    tensors = dict(checkpoint_tensors(config, options))
    special = write_tokenizer(folder, options["tokenizer"], bos=config["model_type"] not in ("qwen2", "qwen3"))
    text = json.dumps(_dialect(config, options) | special, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    if options["shards"] == 1:
        write_safetensors(folder / "model.safetensors", tensors, options["dtype"])
        return folder
    # Neighbours land in different files, names say nothing about order, and a file outside the index holds nonsense.
    names = [f"weights-{chr(ord('z') - i)}.safetensors" for i in range(options["shards"])]
    where = {name: names[i % len(names)] for i, name in enumerate(tensors)}
    for file in names:
        write_safetensors(folder / file, {n: t for n, t in tensors.items() if where[n] == file}, options["dtype"])
    stray = {n: np.full_like(t, 7) for n, t in list(tensors.items())[:3]}
    write_safetensors(folder / "consolidated.safetensors", stray, options["dtype"])
    size = sum(t.size for t in tensors.values()) * (4 if options["dtype"] == "float32" else 2)
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return folder


def _dialect(config: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Keys of config.json as transformers 4 or 5 spells them."""
    out = dict(config)
    rope = options["rope"]
    if options["dialect"] == 5:
        out |= {"dtype": options["dtype"], "transformers_version": "5.0.0"}
        if rope is not None:
            out["rope_parameters"] = dict(rope)
        if config.get("use_sliding_window"):
            first = config["max_window_layers"]
            out["layer_types"] = [
                "sliding_attention" if i >= first else "full_attention" for i in range(config["num_hidden_layers"])
            ]
        return out
    out |= {"torch_dtype": options["dtype"], "transformers_version": "4.44.0"}
    if rope is not None:
        scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
        if scaling["rope_type"] in ("linear", "yarn"):  # the spelling of before release 4.43, still common
            scaling["type"] = scaling.pop("rope_type")
        out["rope_theta"] = rope["rope_theta"]
        out["rope_scaling"] = None if scaling.get("rope_type") == "default" else scaling
    return out


def checkpoint_tensors(config: dict[str, Any], options: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (Hugging Face's name, float32 array) of every tensor."""
    yield from _opt_tensors(config, options) if config["model_type"] == "opt" else _llama_tensors(config, options)


def _llama_tensors(config: dict[str, Any], options: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    kind, act = config["model_type"], config["hidden_act"]
    d, ff, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    hd = config.get("head_dim") or d // heads
    qkv_bias = kind == "qwen2" or config.get("attention_bias", False)
    o_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    gate_gain = options["gate_gain"]
    deep = min(1.0, (3 / config["num_hidden_layers"]) ** 0.5)  # rounding errors grow with depth: keep them comparable

    embedding = _uniform("model.embed_tokens.weight", (vocab, d), (3 / d) ** 0.5 * 3)
    yield "model.embed_tokens.weight", embedding
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        yield p + "input_layernorm.weight", _norm(p + "input_layernorm.weight", d)
        yield from _linear(p + "self_attn.q_proj", heads * hd, d, 1.4, qkv_bias)
        yield from _linear(p + "self_attn.k_proj", kv * hd, d, 1.4, qkv_bias)
        yield from _linear(p + "self_attn.v_proj", kv * hd, d, 1.0, qkv_bias)
        yield from _linear(p + "self_attn.o_proj", d, heads * hd, deep, o_bias)
        if kind == "qwen3":
            for n in ("q_norm.weight", "k_norm.weight"):
                yield p + "self_attn." + n, _norm(p + "self_attn." + n, hd)
        yield p + "post_attention_layernorm.weight", _norm(p + "post_attention_layernorm.weight", d)
        if kind != "arcee":
            for name, t in _linear(p + "mlp.gate_proj", ff, d, gate_gain, mlp_bias):
                if name.endswith("weight") and act != "silu":
                    t[0] = 0  # a pre-activation of exactly zero
                yield name, _switch(t, i) if options["mixed"] and name.endswith("bias") else t
        yield from _linear(p + "mlp.up_proj", ff, d, 1 / gate_gain, mlp_bias)
        yield from _linear(p + "mlp.down_proj", d, ff, 1.5 * deep, mlp_bias)
    yield "model.norm.weight", _norm("model.norm.weight", d)
    if not config["tie_word_embeddings"]:
        gain = config.get("hidden_size", 0) / config["dim_model_base"] if kind == "minicpm" else 1.0
        yield from _linear("lm_head", vocab, d, 2.5 * gain, False)
    elif options["keep_lm_head"]:
        yield "lm_head.weight", embedding


def _opt_tensors(config: dict[str, Any], options: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    d, ff = config["hidden_size"], config["ffn_dim"]
    p = "model.decoder."
    yield p + "embed_tokens.weight", _uniform(p + "embed_tokens.weight", (config["vocab_size"], d), (3 / d) ** 0.5 * 3)
    positions = (config["max_position_embeddings"] + 2, d)  # row = position + 2
    yield p + "embed_positions.weight", _uniform(p + "embed_positions.weight", positions, 0.4)
    yield from _layer_norm(p + "final_layer_norm", d)
    for i in range(config["num_hidden_layers"]):
        p = f"model.decoder.layers.{i}."
        yield from _layer_norm(p + "self_attn_layer_norm", d)
        for name, gain in (("q_proj", 1.4), ("k_proj", 1.4), ("v_proj", 1.0), ("out_proj", 1.0)):
            yield from _linear(p + "self_attn." + name, d, d, gain, True)
        yield from _layer_norm(p + "final_layer_norm", d)
        for name, t in _linear(p + "fc1", ff, d, 1.0, True):
            yield name, _switch(t, i) if options["mixed"] and name.endswith("bias") else t
        yield from _linear(p + "fc2", d, ff, 1.2, True)
    if not config["tie_word_embeddings"]:
        yield from _linear("lm_head", config["vocab_size"], d, 2.5, False)


def _switch(bias: np.ndarray, layer: int) -> np.ndarray:
    """Key bias [n_ff] that turns the neurons of layer 0 off, of layer 1 on, of later ones off/on/free in blocks."""
    block = {0: 0, 1: 1}.get(layer, np.arange(bias.size) // 16 % 3)
    return (bias + np.where(block == 0, -12, np.where(block == 1, 9, 0))).astype(np.float32)


def _linear(name: str, rows: int, cols: int, gain: float, bias: bool) -> Iterator[tuple[str, np.ndarray]]:
    yield name + ".weight", _uniform(name + ".weight", (rows, cols), gain * (3 / cols) ** 0.5)
    if bias:
        yield name + ".bias", _uniform(name + ".bias", (rows,), 0.4)


def _layer_norm(name: str, n: int) -> Iterator[tuple[str, np.ndarray]]:
    yield name + ".weight", _norm(name + ".weight", n)
    yield name + ".bias", _uniform(name + ".bias", (n,), 0.3)


def _norm(name: str, n: int) -> np.ndarray:
    return np.float32(1) + _uniform(name, (n,), 0.5)


def _uniform(name: str, shape: tuple[int, ...], scale: float) -> np.ndarray:
    """float32 `shape`, uniform in (-scale, scale), exactly: 24 hashed bits times a float32 constant."""
    bits = (_hash64(name, int(np.prod(shape))) >> np.uint64(40)).astype(np.float32)  # exact: below 2^24
    unit = (bits - np.float32(2**23 - 0.5)) * np.float32(2.0**-23)
    return (unit * np.float32(scale)).reshape(shape)


def _hash64(name: str, n: int) -> np.ndarray:
    """uint64 [n]: the splitmix64 finalizer of index + seed(name)."""
    seed = np.uint64(zlib.crc32(name.encode()) << 20)
    z = (np.arange(1, n + 1, dtype=np.uint64) + seed) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def write_safetensors(path: str | Path, tensors: dict[str, np.ndarray], dtype: str = "float32") -> None:
    """Writes float32 arrays as a safetensors file of one dtype; bfloat16 is rounded to nearest, ties to even."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs, offset = [], 0
    for name, t in tensors.items():
        if dtype == "bfloat16":
            bits = np.ascontiguousarray(t, dtype="<f4").view("<u4")
            blob = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
        else:
            blob = t.astype({"float32": "<f4", "float16": "<f2"}[dtype]).tobytes()
        tag = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
        header[name] = {"dtype": tag, "shape": list(t.shape), "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))
