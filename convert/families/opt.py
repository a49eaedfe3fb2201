"""OPT: OPTForCausalLM, learned positions, LayerNorm with biases, a ReLU FFN without gate.

In: Checkpoint. Out: StockModel of architecture opt (hotcold's own: llama.cpp has none), named like llama.cpp's
other architectures. Next: families/__init__.py.
"""

from __future__ import annotations

from collections.abc import Callable

from hotcold.convert.checkpoint import Checkpoint
from hotcold.convert.families.base import (
    SOURCE,
    Family,
    TensorSource,
    add_optional_bias,
    auto_float_type,
    output_tensor,
)
from hotcold.convert.hf_config import ConfigReader
from hotcold.convert.lazy import LazyTensor
from hotcold.convert.model import StockModel, f32, string, u32
from hotcold.convert.precision import Report
from hotcold.runtime.errors import HotcoldError

POSITION_OFFSET = 2  # the first rows of the position table stand for padding and are never read
LAYER_NORM_EPS = 1e-5  # torch's default; OPT has no key for it


def build_opt(checkpoint: Checkpoint, reader: ConfigReader, report: Report) -> StockModel:
    """All published OPT models except OPT-350m, whose norms come after the blocks."""
    n_embd, n_head = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    n_layer, n_ff = reader.integer("num_hidden_layers", high=1024), reader.integer("ffn_dim")
    n_vocab, n_ctx = reader.integer("vocab_size"), reader.integer("max_position_embeddings")
    _check(reader, n_embd, n_head)
    source = TensorSource(checkpoint)
    # Checkpoints from before transformers 4.20 lack the first part of the names.
    prefix = "model.decoder." if "model.decoder.embed_tokens.weight" in source else "decoder."
    tensors: dict[str, LazyTensor] = {}

    def add(t: LazyTensor | None) -> None:
        if t is not None:
            tensors[t.name] = t

    embedding = source.take(prefix + "embed_tokens.weight", (n_vocab, n_embd), "token_embd.weight")
    add(embedding)
    table = source.take(prefix + "embed_positions.weight", (n_ctx + POSITION_OFFSET, n_embd), "position_embd.weight")
    add(_without_padding_rows(table))
    enable_bias = reader.flag("enable_bias", True)
    for layer in range(n_layer):
        _add_layer(source, report, prefix, layer, n_embd, n_ff, enable_bias, add)
    _add_norm(source, prefix + "final_layer_norm", n_embd, "output_norm", add)
    add(output_tensor(source, embedding, reader.flag("tie_word_embeddings", True), report))
    source.finish("opt")
    auto, reason = auto_float_type(checkpoint)
    metadata = {
        "general.type": string("model"),
        "general.name": string(checkpoint.folder.resolve().name),
        "opt.block_count": u32(n_layer),
        "opt.context_length": u32(n_ctx),
        "opt.embedding_length": u32(n_embd),
        "opt.feed_forward_length": u32(n_ff),
        "opt.attention.head_count": u32(n_head),
        "opt.attention.head_count_kv": u32(n_head),
        "opt.attention.layer_norm_epsilon": f32(LAYER_NORM_EPS),
        "opt.vocab_size": u32(n_vocab),
    }
    return StockModel(
        arch="opt", source=SOURCE, metadata=metadata, tensors=tensors, activation="relu", thresholds=[0.0] * n_layer,
        gated=False, n_layer=n_layer, n_ff=[n_ff] * n_layer, auto_type=auto, auto_reason=reason)


def _check(reader: ConfigReader, n_embd: int, n_head: int) -> None:
    reader.only("word_embed_proj_dim", (n_embd,), "embeddings narrower than the model, as in OPT-350m")
    reader.only("do_layer_norm_before", (True,), "norms after the blocks, as in OPT-350m")
    reader.only("_remove_final_layer_norm", (False,), "a model without final norm")
    reader.only("layer_norm_elementwise_affine", (True,), "norms without weights")
    reader.only("activation_function", ("relu",), "the runtime computes OPT with ReLU")
    if n_embd % n_head:
        raise HotcoldError(f"config.json: hidden_size {n_embd} is not a multiple of num_attention_heads {n_head}")


def _without_padding_rows(table: LazyTensor) -> LazyTensor:
    n = table.n_rows - POSITION_OFFSET
    return LazyTensor(table.name, (n, *table.shape[1:]), table.qtype,
                      lambda a, b: table.read(a + POSITION_OFFSET, b + POSITION_OFFSET), table.origin)


def _add_norm(source: TensorSource, hf: str, n: int, stock: str, add: Callable[[LazyTensor | None], None]) -> None:
    for part in ("weight", "bias"):
        add(source.take(f"{hf}.{part}", (n,), f"{stock}.{part}"))


def _add_layer(source: TensorSource, report: Report, prefix: str, layer: int, n_embd: int, n_ff: int, biases: bool,
               add: Callable[[LazyTensor | None], None]) -> None:
    hf, stock = f"{prefix}layers.{layer}.", f"blk.{layer}."
    _add_norm(source, hf + "self_attn_layer_norm", n_embd, stock + "attn_norm", add)
    _add_norm(source, hf + "final_layer_norm", n_embd, stock + "ffn_norm", add)
    matrices = (
        ("self_attn.q_proj", "attn_q", n_embd, n_embd), ("self_attn.k_proj", "attn_k", n_embd, n_embd),
        ("self_attn.v_proj", "attn_v", n_embd, n_embd), ("self_attn.out_proj", "attn_output", n_embd, n_embd),
        ("fc1", "ffn_up", n_ff, n_embd), ("fc2", "ffn_down", n_embd, n_ff),
    )
    for name, stock_name, rows, cols in matrices:
        add(source.take(f"{hf}{name}.weight", (rows, cols), f"{stock}{stock_name}.weight"))
        add(add_optional_bias(source, hf + name, rows, f"{stock}{stock_name}.bias", biases, "enable_bias", report))


FAMILIES = (Family(("OPTForCausalLM",), "opt", build_opt),)
