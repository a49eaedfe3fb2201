#!/usr/bin/env python3
"""What quantizing again costs when a quantized GGUF becomes neuron-split: KL divergence against the source.

In: a stock GGUF of a llama-like model and its vocabulary. Out: a Markdown table. The model is computed in NumPy with
float32 activations, so the table shows the weights' error alone, and no kernel of the runtime can hide or add any.

    python scripts/measure_requant.py MODEL.gguf [--tokens 512] [--chunks 2] [--source-type q4_0]

`--source-type T` first quantizes the model to T the stock way (blocks along the rows), as if that were the source.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import gguf
import numpy as np

from hotcold.convert.gguf_source import load_gguf
from hotcold.convert.lazy import QType, from_array, to_float32
from hotcold.convert.outtype import OUTLIER, OUTTYPES, keeps_f32, outlier_ratio
from hotcold.convert.precision import Report
from hotcold.runtime import Tokenizer
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.rope import rope_table

Weights = dict[str, np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=512, help="tokens per chunk")
    parser.add_argument("--chunks", type=int, default=2)
    parser.add_argument("--source-type", choices=list(OUTTYPES))
    args = parser.parse_args()
    with open_gguf(args.model) as f:
        config = ModelConfig.from_gguf(f)
        model = load_gguf(f, Report())
        weights = {n: to_float32(t.read(0, t.n_rows), t.qtype).copy() for n, t in model.tensors.items()}
        tokenizer = Tokenizer.from_gguf(f)
    if args.source_type:
        weights = {n: stored(w, OUTTYPES[args.source_type]) if is_matrix(n, w) else w for n, w in weights.items()}
    # Python's own documentation: text that is on every machine.
    text = "\n".join(topics[k] for k in sorted(topics))
    ids = tokenizer.encode(text, add_special=False)
    chunks = [ids[i * args.tokens:(i + 1) * args.tokens] for i in range(args.chunks)]
    base = [log_softmax(forward(config, weights, c)) for c in chunks]
    print(f"source {args.source_type or args.model.name}, {args.chunks} x {args.tokens} tokens, "
          f"perplexity {perplexity(base, chunks):.3f}\n")
    print("| what is stored again | as | rel. error of down | KL mean | KL 99 % | same top token | perplexity |")
    print("|---|---|---|---|---|---|---|")
    outliers = {n.split(".")[1] for n, w in weights.items() if "ffn_down" in n
                and outlier_ratio(from_array(n, w, QType.F32, w.shape, "")) > OUTLIER}
    parts: dict[str, tuple[str, ...]] = {"down only": ("ffn_down",), "up and down": ("ffn_down", "ffn_up"),
                                         "every matrix": ("",)}
    for what, chosen in parts.items():
        for name in ("q4_0", "q8_0", "auto", "f16", "bf16"):

            def wanted(tensor: str, name: str = name, chosen: tuple[str, ...] = chosen) -> QType | None:
                if not any(part in tensor for part in chosen):
                    return None
                if name == "auto":
                    bundle = "ffn_down" in tensor or "ffn_up" in tensor
                    return QType.F16 if bundle and tensor.split(".")[1] in outliers else QType.Q8_0
                # as --outtype q4_0
                return QType.Q8_0 if name == "q4_0" and not tensor.startswith("blk.") else OUTTYPES[name]

            variant, error = stored_again(weights, wanted)
            logs = [log_softmax(forward(config, variant, c)) for c in chunks]
            kl = np.concatenate([(np.exp(b) * (b - v)).sum(1) for b, v in zip(base, logs, strict=True)])
            same = np.concatenate([b.argmax(1) == v.argmax(1) for b, v in zip(base, logs, strict=True)])
            print(f"| {what} | {name} | {error:.5f} | {kl.mean():.2e} | {np.quantile(kl, 0.99):.2e} | "
                  f"{100 * same.mean():.2f} % | {perplexity(logs, chunks):.3f} |", flush=True)


def is_matrix(name: str, w: np.ndarray) -> bool:
    return not keeps_f32(name, w.shape)


def stored(w: np.ndarray, qtype: QType) -> np.ndarray:
    """What is left of float32 [rows, cols] after storing it with blocks along the rows."""
    raw = gguf.quants.quantize(w, qtype)
    return to_float32(raw.view(np.uint16) if qtype == QType.BF16 else raw, qtype)


def stored_again(weights: Weights, wanted_type: Callable[[str], QType | None]) -> tuple[Weights, float]:
    """Matrices stored as the neuron-split layout does (down turned, so its blocks run along the other axis) in the
    type that `wanted_type` gives for their names, or left alone. Returns them and the relative error of the down ones.
    """
    result, error, square = dict(weights), 0.0, 0.0
    for name, w in weights.items():
        wanted = wanted_type(name) if is_matrix(name, w) else None
        if wanted is None:
            continue
        if "ffn_down" in name:
            result[name] = stored(np.ascontiguousarray(w.T), wanted).T
            error += float(np.sum((result[name] - w) ** 2, dtype=np.float64))
            square += float(np.sum(w**2, dtype=np.float64))
        else:
            result[name] = stored(w, wanted)
    return result, (error / square) ** 0.5


def forward(config: ModelConfig, weights: Weights, ids: list[int]) -> np.ndarray:
    """Logits float32 [n, n_vocab] of a llama: RMS norms, interleaved rotation, grouped queries, gated FFN."""
    if config.arch != "llama" or not config.gated or config.rope is None:
        raise SystemExit("this script computes gated llama models only")
    n, hd, groups = len(ids), config.head_dim, config.n_head // config.n_head_kv
    factors = weights.get("rope_freqs.weight")
    cos, sin = rope_table(config.rope, n, factors)  # [n, hd/2]
    mask = np.triu(np.full((n, n), -np.inf, np.float32), 1)
    x = weights["token_embd.weight"][ids]  # [n, n_embd]
    for layer in range(config.n_layer):
        w = {k.split(".", 2)[2]: v for k, v in weights.items() if k.startswith(f"blk.{layer}.")}
        h = rms(x, w["attn_norm.weight"], config.norm_eps)
        q = rotate((h @ w["attn_q.weight"].T).reshape(n, -1, hd), cos, sin)
        k = rotate((h @ w["attn_k.weight"].T).reshape(n, -1, hd), cos, sin).repeat(groups, 1)
        v = (h @ w["attn_v.weight"].T).reshape(n, -1, hd).repeat(groups, 1)
        scores = q.swapaxes(0, 1) @ k.transpose(1, 2, 0) / np.float32(hd**0.5) + mask  # [n_head, n, n]
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (scores / scores.sum(-1, keepdims=True)) @ v.swapaxes(0, 1)  # [n_head, n, hd]
        x = x + mixed.swapaxes(0, 1).reshape(n, -1) @ w["attn_output.weight"].T
        h = rms(x, w["ffn_norm.weight"], config.norm_eps)
        gate = h @ w["ffn_gate.weight"].T  # [n, n_ff]
        gate = np.maximum(gate, 0) if config.activation == "relu" else gate / (1 + np.exp(-gate))
        x = x + (gate * (h @ w["ffn_up.weight"].T)) @ w["ffn_down.weight"].T
    x = rms(x, weights["output_norm.weight"], config.norm_eps)
    return x @ weights.get("output.weight", weights["token_embd.weight"]).T


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + np.float32(eps)) * weight


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Pairs (2i, 2i+1) of [n, heads, hd] by the angles [n, hd/2]."""
    even, odd, c, s = x[..., 0::2], x[..., 1::2], cos[:, None], sin[:, None]
    return np.stack([even * c - odd * s, even * s + odd * c], -1).reshape(x.shape).astype(np.float32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 [n, n_vocab]."""
    x = logits.astype(np.float64)
    x -= x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def perplexity(logs: list[np.ndarray], chunks: list[list[int]]) -> float:
    losses = [-lp[np.arange(len(c) - 1), c[1:]] for lp, c in zip(logs, chunks, strict=True)]
    return float(np.exp(np.concatenate(losses).mean()))


if __name__ == "__main__":
    main()
