"""What all families share: from named tensors of a checkpoint to a StockModel, every tensor accounted for.

In: Checkpoint, ConfigReader. Out: StockModel without vocabulary. Next: llama.py and the other families, which fill in
the differences; __init__.py adds the vocabulary.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hotcold.convert.checkpoint import Checkpoint
from hotcold.convert.hf_config import ConfigReader, read_rope, read_windows, window_metadata
from hotcold.convert.lazy import LazyTensor, QType, from_array, gathered, renamed
from hotcold.convert.model import Metadata, StockModel, f32, string, u32
from hotcold.convert.precision import Report
from hotcold.runtime.errors import HotcoldError

SOURCE = "Hugging Face folder"


@dataclass(frozen=True)
class Family:
    """A registered family: `build` makes the model (metadata without vocabulary) of a checkpoint."""

    architectures: tuple[str, ...]  # of config.json
    arch: str                       # of the GGUF
    build: Callable[[Checkpoint, ConfigReader, Report], StockModel]


@dataclass(frozen=True)
class Activation:
    name: str  # schema.ACTIVATIONS
    threshold: float = 0.0


@dataclass(frozen=True)
class Shapes:
    """Sizes of a decoder with llama's tensor names."""

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int


class TensorSource:
    """Takes tensors out of a checkpoint by their Hugging Face names and notices the ones nobody took."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.left = dict.fromkeys(checkpoint.stored)

    def __contains__(self, name: str) -> bool:
        return name in self.checkpoint.stored

    def take(self, name: str, shape: tuple[int, ...], stock: str) -> LazyTensor:
        """The tensor, renamed to `stock`; HotcoldError when it is missing or has another shape."""
        if name not in self.checkpoint.stored:
            raise HotcoldError(f"{self.checkpoint.folder}: tensor {name} is missing (needed for {stock}); shape "
                               f"{list(shape)}")
        found = self.checkpoint.stored[name].shape
        if found != shape:
            raise HotcoldError(f"{self.checkpoint.folder}: tensor {name} has shape {list(found)}, config.json asks "
                               f"for {list(shape)}")
        self.left.pop(name, None)
        return renamed(self.checkpoint.tensor(name), stock)

    def drop(self, pattern: str, report: Report) -> None:
        """Leave out tensors known to hold nothing the runtime needs."""
        for name in [n for n in self.left if re.fullmatch(pattern, n)]:
            del self.left[name]
            report.dropped.append(name)

    def finish(self, family: str) -> None:
        if self.left:
            names = list(self.left)
            rest = f" and {len(names) - 6} more" if len(names) > 6 else ""
            raise HotcoldError(f"{self.checkpoint.folder}: {len(names)} tensors that a {family} model does not have: "
                               f"{', '.join(names[:6])}{rest}: nothing is left out silently")


def add_optional_bias(source: TensorSource, hf: str, size: int, stock: str, expected: bool, flag: str,
                      report: Report) -> LazyTensor | None:
    """A bias that config.json may or may not announce; a stored one is used in any case."""
    if f"{hf}.bias" in source:
        if not expected:
            report.note(f"{flag} is not set but bias tensors are stored ({re.sub(r'[.][0-9]+[.]', '.N.', hf)}): used")
        return source.take(f"{hf}.bias", (size,), stock)
    if expected:
        raise HotcoldError(f"{source.checkpoint.folder}: tensor {hf}.bias is missing, though {flag} says it exists")
    return None


def rope_order(rows: int, heads: int) -> np.ndarray:
    """Row order [rows] from halves (i, i + d/2) to the interleaved pairs (2i, 2i+1) of llama.cpp, in each head."""
    return np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(-1)


def output_tensor(source: TensorSource, embedding: LazyTensor, tied: bool, report: Report) -> LazyTensor | None:
    """output.weight, or None when the embedding serves: by flag and by what is stored."""
    name = "lm_head.weight"
    if name not in source:
        if not tied:
            raise HotcoldError(f"{source.checkpoint.folder}: tensor {name} is missing and tie_word_embeddings is "
                               "false: the output matrix is unknown")
        return None
    head = source.take(name, embedding.shape, "output.weight")
    if not tied:
        return head
    if _equal(head, embedding):
        report.note(f"{name} equals the embedding: stored once")
        return None
    report.note(f"tie_word_embeddings is true but {name} differs from the embedding: both are kept")
    return head


def _equal(a: LazyTensor, b: LazyTensor) -> bool:
    return a.qtype == b.qtype and all(np.array_equal(a.read(i, j), b.read(i, j)) for i, j in a.slabs())


def auto_float_type(checkpoint: Checkpoint) -> tuple[QType, str]:
    """What `--outtype auto` means for a checkpoint: BF16 or F16 as stored; F32 becomes F16."""
    sizes: Counter[str] = Counter()
    for stored in checkpoint.stored.values():
        if len(stored.shape) > 1:
            sizes[stored.dtype] += stored.end - stored.begin
    dtype = sizes.most_common(1)[0][0] if sizes else "F32"
    qtype = QType.BF16 if dtype == "BF16" else QType.F16
    return qtype, f" (auto: the checkpoint is {dtype})"


@dataclass(frozen=True)
class Traits:
    """How a family with llama's tensor names differs from llama."""

    arch: str
    name: str
    permute: bool = True       # llama.cpp's interleaved rotation for this architecture
    gated: bool = True
    qk_norm: bool = False
    qkv_bias: bool = False     # always there, whatever config.json says
    bias_keys: bool = True     # config.json has attention_bias and mlp_bias
    default_tie: bool = False  # tie_word_embeddings when config.json does not say
    default_eps: float = 1e-6  # rms_norm_eps when config.json does not say
    windows: str = "none"      # hf_config.read_windows
    default_head_dim: int | None = None


def build_decoder(checkpoint: Checkpoint, reader: ConfigReader, report: Report, traits: Traits, activation: Activation,
                  extra: Callable[[Shapes], Metadata] | None = None) -> StockModel:
    """A decoder with llama's tensor names. `extra` adds keys of the family."""
    shapes = read_shapes(reader, checkpoint, traits)
    n_ctx = reader.integer("max_position_embeddings", high=1 << 26)
    rope = read_rope(reader, n_ctx)
    windows = read_windows(reader, shapes.n_layer, traits.windows)
    arch = traits.arch
    metadata: Metadata = {
        "general.type": string("model"),
        "general.name": string(checkpoint.folder.resolve().name),
        f"{arch}.block_count": u32(shapes.n_layer),
        f"{arch}.context_length": u32(n_ctx),
        f"{arch}.embedding_length": u32(shapes.n_embd),
        f"{arch}.feed_forward_length": u32(shapes.n_ff),
        f"{arch}.attention.head_count": u32(shapes.n_head),
        f"{arch}.attention.head_count_kv": u32(shapes.n_head_kv),
        f"{arch}.attention.layer_norm_rms_epsilon": f32(reader.number("rms_norm_eps", traits.default_eps)),
        f"{arch}.attention.key_length": u32(shapes.head_dim),
        f"{arch}.attention.value_length": u32(shapes.head_dim),
        f"{arch}.vocab_size": u32(shapes.n_vocab),
    }
    metadata |= rope.metadata(arch, shapes.head_dim) | window_metadata(arch, windows)
    if extra is not None:
        metadata |= extra(shapes)
    source = TensorSource(checkpoint)
    tensors = decoder_tensors(source, reader, report, traits, shapes)
    factors = rope.freq_factors(shapes.head_dim)
    if factors is not None:
        tensors["rope_freqs.weight"] = from_array("rope_freqs.weight", factors, QType.F32, factors.shape, "config.json")
    source.finish(traits.name)
    auto, reason = auto_float_type(checkpoint)
    return StockModel(
        arch=arch, source=SOURCE, metadata=metadata, tensors=tensors, activation=activation.name,
        thresholds=[activation.threshold] * shapes.n_layer, gated=traits.gated, n_layer=shapes.n_layer,
        n_ff=[shapes.n_ff] * shapes.n_layer, auto_type=auto, auto_reason=reason)


def read_shapes(reader: ConfigReader, checkpoint: Checkpoint, traits: Traits) -> Shapes:
    """Sizes from config.json, checked against each other and the embedding."""
    n_embd, n_head = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    n_head_kv = reader.integer("num_key_value_heads", n_head)
    if n_head % n_head_kv:
        raise HotcoldError(f"config.json: num_attention_heads {n_head} is not a multiple of num_key_value_heads "
                           f"{n_head_kv}")
    head_dim = reader.get("head_dim", traits.default_head_dim)
    if head_dim is None:
        if n_embd % n_head:
            raise HotcoldError(f"config.json: hidden_size {n_embd} is not a multiple of num_attention_heads {n_head} "
                               "and there is no head_dim")
        head_dim = n_embd // n_head
    if type(head_dim) is not int or not 2 <= head_dim <= 4096 or head_dim % 2:
        raise reader.fail("head_dim", head_dim, "an even number from 2 to 4096")
    return Shapes(
        n_layer=reader.integer("num_hidden_layers", high=1024), n_embd=n_embd, n_head=n_head, n_head_kv=n_head_kv,
        head_dim=head_dim, n_ff=reader.integer("intermediate_size"), n_vocab=reader.integer("vocab_size"))


def decoder_tensors(source: TensorSource, reader: ConfigReader, report: Report, traits: Traits,
                    shapes: Shapes) -> dict[str, LazyTensor]:
    """All tensors under their stock names, q and k in the row order that llama.cpp's rotation wants."""
    tensors: dict[str, LazyTensor] = {}

    def add(t: LazyTensor | None) -> None:
        if t is not None:
            tensors[t.name] = t

    embedding = source.take("model.embed_tokens.weight", (shapes.n_vocab, shapes.n_embd), "token_embd.weight")
    add(embedding)
    attention_bias = mlp_bias = False
    if traits.bias_keys:
        attention_bias, mlp_bias = reader.flag("attention_bias"), reader.flag("mlp_bias")
    for layer in range(shapes.n_layer):
        hf, stock = f"model.layers.{layer}.", f"blk.{layer}."
        add(source.take(hf + "input_layernorm.weight", (shapes.n_embd,), stock + "attn_norm.weight"))
        _add_attention(source, report, traits, shapes, attention_bias, layer, add)
        add(source.take(hf + "post_attention_layernorm.weight", (shapes.n_embd,), stock + "ffn_norm.weight"))
        n_ff, n_embd = shapes.n_ff, shapes.n_embd
        matrices = [("gate", n_ff, n_embd), ("up", n_ff, n_embd), ("down", n_embd, n_ff)][0 if traits.gated else 1:]
        for part, rows, cols in matrices:
            name = f"{hf}mlp.{part}_proj"
            add(source.take(name + ".weight", (rows, cols), f"{stock}ffn_{part}.weight"))
            add(add_optional_bias(source, name, rows, f"{stock}ffn_{part}.bias", mlp_bias, "mlp_bias", report))
    add(source.take("model.norm.weight", (shapes.n_embd,), "output_norm.weight"))
    add(output_tensor(source, embedding, reader.flag("tie_word_embeddings", traits.default_tie), report))
    # Frequencies that old checkpoints store; they follow from config.json.
    source.drop(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)", report)
    return tensors


def _add_attention(source: TensorSource, report: Report, traits: Traits, shapes: Shapes, attention_bias: bool,
                   layer: int, add: Callable[[LazyTensor | None], None]) -> None:
    q, kv = shapes.n_head * shapes.head_dim, shapes.n_head_kv * shapes.head_dim
    hf, stock = f"model.layers.{layer}.self_attn.", f"blk.{layer}.attn_"
    for part, rows, heads in (("q", q, shapes.n_head), ("k", kv, shapes.n_head_kv), ("v", kv, 0)):
        expected = traits.qkv_bias or attention_bias
        weight = source.take(f"{hf}{part}_proj.weight", (rows, shapes.n_embd), f"{stock}{part}.weight")
        bias = add_optional_bias(source, f"{hf}{part}_proj", rows, f"{stock}{part}.bias", expected, "attention_bias",
                                 report)
        for t in (weight, bias):
            add(gathered(t, rope_order(rows, heads)) if t is not None and heads and traits.permute else t)
    add(source.take(f"{hf}o_proj.weight", (shapes.n_embd, q), f"{stock}output.weight"))
    add(add_optional_bias(source, f"{hf}o_proj", shapes.n_embd, f"{stock}output.bias", attention_bias,
                          "attention_bias", report))
    if traits.qk_norm:
        for part in ("q", "k"):
            add(source.take(f"{hf}{part}_norm.weight", (shapes.head_dim,), f"{stock}{part}_norm.weight"))


def read_activation(reader: ConfigReader, allowed: tuple[str, ...], default: str | None = None) -> Activation:
    """`hidden_act` (and FATReLU's `hidden_act_param`) as one of the `allowed` names of schema.ACTIVATIONS."""
    name = reader.text("hidden_act", default) if default else reader.text("hidden_act")
    name = {"swish": "silu"}.get(name, name)
    if name not in allowed:
        raise HotcoldError(f"config.json: hidden_act {name!r}: supported for this architecture are "
                           f"{', '.join(allowed)}")
    if name == "fatrelu":
        return Activation(name, reader.number("hidden_act_param", positive=False))
    reader.only("hidden_act_param", (0, 0.0), f"only fatrelu has a threshold, hidden_act is {name}")
    return Activation(name)
