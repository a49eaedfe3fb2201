#!/usr/bin/env python3
"""What quantizing again costs when a quantized GGUF becomes neuron-split: KL divergence against the source.

In: a stock GGUF of a llama-like model with its vocabulary, and a text. Out: a Markdown table. The model is computed in
NumPy with float32 activations, so the table shows the weights' error alone, and no kernel of the runtime can hide or
add any. Which type a matrix gets is asked of the converter.

    python scripts/measure_requant.py MODEL.gguf [TEXT] [--tokens 512] [--source-type q4_0]

`--source-type T` first quantizes the model to T the stock way (blocks along the rows), as if that were the source.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from hotcold.convert.gguf_source import load_gguf
from hotcold.convert.lazy import QType, from_array, to_float32
from hotcold.convert.model import StockModel
from hotcold.convert.neuron_split import split_neurons
from hotcold.convert.outtype import OUTTYPES, fits, keeps_f32
from hotcold.convert.precision import Report, cast
from hotcold.runtime import Tokenizer, schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.rope import rope_table

Weights = dict[str, np.ndarray]
TEXT = Path(__file__).resolve().parent / "comparison" / "text.txt"
# What is stored again -> what a tensor's name must contain.
PARTS = {"down only": ("ffn_down",), "up and down": ("ffn_down", "ffn_up"), "every matrix": ("",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path, nargs="?", default=TEXT, help="UTF-8 text (default: that of comparison/)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens per chunk; all of the text is used")
    parser.add_argument("--source-type", choices=list(OUTTYPES))
    args = parser.parse_args()
    try:
        measure(args.model, args.text, args.tokens, args.source_type)
    except (HotcoldError, OSError, UnicodeDecodeError) as e:
        sys.exit(f"error: {e}")


def measure(path: Path, text: Path, n_chunk: int, source_type: str | None) -> None:
    """Print the table. Raises HotcoldError for a model or text that cannot be measured."""
    with open_gguf(path) as f:
        config = ModelConfig.from_gguf(f)
        if config.arch != "llama" or not config.gated or config.layout != "stock":
            raise HotcoldError(f"{path}: {config.layout} {config.arch}: this script computes stock gated llama models")
        model = load_gguf(f, Report())
        if source_type:
            model = quantized(model, OUTTYPES[source_type])
        weights = {n: to_float32(t.read(0, t.n_rows), t.qtype).copy() for n, t in model.tensors.items()}
        types = {name: types_of(model, name) for name in ("q4_0", "q4_k", "q8_0", "auto", "f16", "bf16")}
        ids = Tokenizer.from_gguf(f).encode(text.read_text("utf-8"), add_special=False)
    # A token alone has no successor to judge.
    chunks = [c for i in range(0, len(ids), max(n_chunk, 1)) if len(c := ids[i:i + n_chunk]) > 1]
    if not chunks:
        raise HotcoldError(f"{text}: {len(ids)} tokens in chunks of {n_chunk}: allowed: 2 or more in a chunk")
    base = [log_softmax(forward(config, weights, c)) for c in chunks]
    n_tokens = sum(map(len, chunks))
    print(f"source {source_type or path.name}, {n_tokens} tokens, perplexity {perplexity(base, chunks):.3f}\n")
    print("| what is stored again | as | rel. error of down | KL mean | KL 99 % | same top token | perplexity |")
    print("|---|---|---|---|---|---|---|")
    for what, chosen in PARTS.items():
        for name, wanted in types.items():
            some = {n: t for n, t in wanted.items() if any(part in n for part in chosen)}
            variant, error = stored_again(weights, some)
            logs = [log_softmax(forward(config, variant, c)) for c in chunks]
            kl = np.concatenate([(np.exp(b) * (b - v)).sum(1) for b, v in zip(base, logs, strict=True)])
            same = np.concatenate([b.argmax(1) == v.argmax(1) for b, v in zip(base, logs, strict=True)])
            print(f"| {what} | {name} | {error:.5f} | {kl.mean():.2e} | {np.quantile(kl, 0.99):.2e} | "
                  f"{100 * same.mean():.2f} % | {perplexity(logs, chunks):.3f} |", flush=True)


def quantized(model: StockModel, qtype: QType) -> StockModel:
    """The model as a stock file of that type would have it."""
    tensors = dict(model.tensors)
    for name, t in model.tensors.items():
        if not keeps_f32(name, t.shape):
            kind = fits(name, t.shape[-1], qtype, Report())
            tensors[name] = cast(t, kind, Report())
    return replace(model, tensors=tensors)


def types_of(model: StockModel, outtype: str) -> dict[str, QType]:
    """Stock name of a matrix -> the type that `hotcold convert --outtype` gives it; up and down share a tensor.

    Without those that keep their bytes.
    """
    chosen = {t.name: t.qtype for t in split_neurons(model, outtype, Report()).tensors}
    types: dict[str, QType] = {}
    for name, t in model.tensors.items():
        if not keeps_f32(name, t.shape):
            layer = name.split(".")[1]
            shared = name.endswith((schema.FFN_UP, schema.FFN_DOWN))
            wanted = chosen[schema.block(int(layer), schema.FFN_UP_DOWN) if shared else name]
            if wanted != t.qtype or name.endswith(schema.FFN_DOWN):
                types[name] = wanted
    return types


def stored(w: np.ndarray, qtype: QType) -> np.ndarray:
    """What is left of float32 [rows, cols] after storing it with blocks along the rows."""
    return to_float32(cast(from_array("", w, QType.F32, w.shape, ""), qtype, Report()).read(0, len(w)), qtype)


def stored_again(weights: Weights, types: dict[str, QType]) -> tuple[Weights, float]:
    """The matrices named in `types` stored as the neuron-split layout does (down turned, so its blocks run along the
    other axis), the rest left alone. Returns them and the relative error of the down ones.
    """
    result, error, square = dict(weights), 0.0, 0.0
    for name, wanted in types.items():
        w = weights[name]
        if "ffn_down" in name:
            result[name] = stored(np.ascontiguousarray(w.T), wanted).T
            error += float(np.sum((result[name] - w) ** 2, dtype=np.float64))
            square += float(np.sum(w**2, dtype=np.float64))
        else:
            result[name] = stored(w, wanted)
    return result, (error / square) ** 0.5


def forward(config: ModelConfig, weights: Weights, ids: list[int]) -> np.ndarray:
    """Logits float32 [n, n_vocab] of a llama: RMS norms, interleaved rotation, grouped queries, gated FFN."""
    if config.rope is None:
        raise HotcoldError("this script computes models with rotary embedding")
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
