"""Small stock llama files in the types that llama-quantize gives its mixtures, the same bytes everywhere.

In: a mixture's name. Out: a GGUF without vocabulary, which stock llama.cpp loads. Next: golden/make_kquants_golden.py
(logits by stock llama.cpp), test_convert_kquants.py.

Types of a block of 32 are quantized by the gguf package. It does not write K-quants, so their blocks are hashed bytes:
every pattern of scales and bits occurs. Width 256, so that rows divide into blocks of K-quants.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from tiny import _hash64, _uniform

Q = gguf.GGMLQuantizationType
N_LAYER, N_EMBD, N_FF, N_HEAD, N_HEAD_KV, HEAD_DIM, N_VOCAB = 2, 256, 512, 4, 2, 64, 320
TWO_SCALES = {Q.Q4_K: 4, Q.Q5_K: 5}  # weight = d * s * q - m * t -> bits of q

# What llama-quantize chooses for a model of two layers; the last is none of its mixtures.
MIXTURES: dict[str, dict[str, Q]] = {
    "Q4_K_M": {"": Q.Q4_K, "output": Q.Q6_K, "blk.1.attn_v": Q.Q6_K, "blk.1.ffn_down": Q.Q6_K},
    "Q5_K_M": {"": Q.Q5_K, "output": Q.Q6_K, "blk.1.attn_v": Q.Q6_K, "blk.1.ffn_down": Q.Q6_K},
    "Q5_0": {"": Q.Q5_0, "output": Q.Q6_K},
    "Q4_1 and Q5_1": {"": Q.Q4_1, "output": Q.Q8_0, "blk.0": Q.Q5_1},
}


def matrices() -> dict[str, tuple[int, int, float]]:
    """Stock name -> rows, columns, size of a product of a row and values of size 1."""
    shapes = {"token_embd": (N_VOCAB, N_EMBD, 48.0), "output": (N_VOCAB, N_EMBD, 2.5)}
    for layer in range(N_LAYER):
        block = {
            "attn_q": (N_HEAD * HEAD_DIM, N_EMBD, 1.4), "attn_k": (N_HEAD_KV * HEAD_DIM, N_EMBD, 1.4),
            "attn_v": (N_HEAD_KV * HEAD_DIM, N_EMBD, 1.0), "attn_output": (N_EMBD, N_HEAD * HEAD_DIM, 1.0),
            "ffn_gate": (N_FF, N_EMBD, 1.0), "ffn_up": (N_FF, N_EMBD, 1.0), "ffn_down": (N_EMBD, N_FF, 1.5),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def kind_of(mixture: str, name: str) -> Q:
    """The type of a matrix: that of the longest beginning of its name."""
    chosen = MIXTURES[mixture]
    return chosen[max((part for part in chosen if name.startswith(part)), key=len)]


def blocks(kind: Q, name: str, rows: int, cols: int, gain: float) -> np.ndarray:
    """Stored rows, uint8 [rows, bytes], of weights with a standard deviation of gain / sqrt(cols)."""
    if kind not in (*TWO_SCALES, Q.Q6_K):
        values = _uniform(name, (rows, cols), gain * (3 / cols) ** 0.5)
        return np.asarray(gguf.quants.quantize(values, kind)).view(np.uint8).reshape(rows, -1)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = _hash64(name, rows * cols // block * size).astype(np.uint8).reshape(-1, size)  # the low bytes
    values = _as_blocks(raw, kind, 1.0)
    unit = np.float16(gain / cols**0.5 / gguf.quants.dequantize(values, kind).std(dtype=np.float64))
    return _as_blocks(raw, kind, float(unit)).reshape(rows, -1)


def _as_blocks(raw: np.ndarray, kind: Q, unit: float) -> np.ndarray:
    """Hashed bytes with F16 scales of one size and both signs in their place."""
    raw = raw.copy()
    d = np.where(raw[:, 0] < 128, unit, -unit).astype(np.float16)
    if kind == Q.Q6_K:
        raw[:, 208:210] = d[:, None].view(np.uint8)
        return raw
    m = (d * np.float16((2 ** TWO_SCALES[kind] - 1) / 2)).astype(np.float16)  # so that the mean is 0
    raw[:, 0:2], raw[:, 2:4] = d[:, None].view(np.uint8), m[:, None].view(np.uint8)
    return raw


def samples() -> dict[str, np.ndarray]:
    """Name of a matrix of N_FF rows -> values float32 [N_FF, N_EMBD] to judge a quantizer by."""

    def bell(name: str) -> np.ndarray:
        parts = [_uniform(f"{name} {i}", (N_FF, N_EMBD), 1.0) for i in range(4)]
        return (parts[0] + parts[1]) + (parts[2] + parts[3])

    sizes = np.exp2(4 * _uniform("sizes", (N_FF, N_EMBD // 32, 1), 1.0)).repeat(32, 2).reshape(N_FF, N_EMBD)
    return {
        "blk.0.ffn_gate": bell("bell"), "blk.0.ffn_up": bell("heavy tails") ** 3,
        "blk.1.ffn_gate": bell("sizes that differ") * sizes, "blk.1.ffn_up": bell("below zero") / 8 - 3,
    }  # fmt: skip


def write_stock(path: Path, mixture: str, in_f32: bool = False, values: dict[str, np.ndarray] | None = None) -> Path:
    """The file of a mixture; `in_f32`: its very weights in F32, but for `values`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(N_LAYER)
    writer.add_context_length(512)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(N_VOCAB)
    writer.add_tokenizer_model("none")
    norms = ["output_norm", *(f"blk.{i}.{part}_norm" for i in range(N_LAYER) for part in ("attn", "ffn"))]
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.float32(1) + _uniform(name, (N_EMBD,), 0.5))
    for name, (rows, cols, gain) in matrices().items():
        kind = kind_of(mixture, name)
        raw = blocks(kind, name, rows, cols, gain)
        if in_f32:
            writer.add_tensor(f"{name}.weight", (values or {}).get(name, gguf.quants.dequantize(raw, kind)))
        else:
            writer.add_tensor(f"{name}.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
