"""Write a stock GGUF of real size with random weights: for speed, where no checkpoint is at hand.

In: a shape's name and a type. Out: a GGUF that stock llama.cpp loads. Next: `hotcold convert`, then
compare_llama_cpp.py.

    python scripts/make_synthetic.py --shape llama-1.3b --type q8_0 -o synthetic-1.3b.Q8_0.gguf

Rows are drawn from a pool of random quantized rows, so writing runs at the speed of the disk. Weights are scaled so
that activations keep their size through the layers. With `--activation relu` the file says so in the key
`hotcold.ffn.activation`; random gates are then off half of the time. The text such a model writes means nothing.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import shutil
import string
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type


@dataclass(frozen=True)
class Shape:
    """Sizes of a llama model: layers, width, neurons per layer, query and key/value heads."""

    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    n_vocab: int = 32000
    n_ctx: int = 4096


SHAPES = {
    "llama-tiny": Shape(n_layer=2, n_embd=256, n_ff=704, n_head=4, n_head_kv=2),
    "llama-160m": Shape(n_layer=12, n_embd=768, n_ff=2048, n_head=12, n_head_kv=12),
    "llama-1.3b": Shape(n_layer=24, n_embd=2048, n_ff=5632, n_head=32, n_head_kv=32),
    "llama-7b": Shape(n_layer=32, n_embd=4096, n_ff=11008, n_head=32, n_head_kv=32),
}
TYPES = {"f16": Type.F16, "q8_0": Type.Q8_0, "q4_0": Type.Q4_0}
FILE_TYPES = {"f16": 1, "q4_0": 2, "q8_0": 7}  # general.file_type, as llama.cpp numbers them
POOL_ROWS = 1024
CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class Tensor:
    """One tensor to write: `std` 0 is a vector of ones (a norm), anything else a matrix of that standard deviation."""

    name: str
    rows: int
    cols: int
    std: float


def tensors(shape: Shape) -> Iterator[Tensor]:
    """All tensors of a llama model in file order."""
    d, ff = shape.n_embd, shape.n_ff
    kv = d // shape.n_head * shape.n_head_kv
    keep = 1 / math.sqrt(d)  # an output as large as the input
    residual = 1 / math.sqrt(2 * shape.n_layer)  # 2 n_layer additions grow the residual to about 1.4
    yield Tensor("token_embd.weight", shape.n_vocab, d, 1.0)
    for layer in range(shape.n_layer):
        prefix = f"blk.{layer}."
        yield Tensor(prefix + "attn_norm.weight", 1, d, 0.0)
        yield Tensor(prefix + "attn_q.weight", d, d, keep)
        yield Tensor(prefix + "attn_k.weight", kv, d, keep)
        yield Tensor(prefix + "attn_v.weight", kv, d, keep)
        yield Tensor(prefix + "attn_output.weight", d, d, keep * residual)
        yield Tensor(prefix + "ffn_norm.weight", 1, d, 0.0)
        yield Tensor(prefix + "ffn_gate.weight", ff, d, keep)
        yield Tensor(prefix + "ffn_up.weight", ff, d, keep)
        yield Tensor(prefix + "ffn_down.weight", d, ff, 2 * residual / math.sqrt(ff))
    yield Tensor("output_norm.weight", 1, d, 0.0)
    yield Tensor("output.weight", shape.n_vocab, d, keep)


class RowPool:
    """Random rows, quantized once per (columns, standard deviation) and then drawn in random order."""

    def __init__(self, kind: Type, seed: int) -> None:
        self.kind = kind
        self.rng = np.random.default_rng(seed)
        self.rows: dict[tuple[int, float], np.ndarray] = {}

    def draw(self, count: int, cols: int, std: float) -> np.ndarray:
        """uint8 [count, row_bytes]."""
        pool = self.rows.get((cols, std))
        if pool is None:
            values = self.rng.standard_normal((POOL_ROWS, cols), dtype=np.float32) * np.float32(std)
            pool = gguf.quants.quantize(values, self.kind).view(np.uint8).reshape(POOL_ROWS, -1)
            self.rows[cols, std] = pool
        return pool[self.rng.integers(0, POOL_ROWS, count)]


def vocabulary(size: int) -> tuple[list[bytes], list[float], list[int]]:
    """A sentencepiece vocabulary: control tokens, the 256 bytes, characters, then letter combinations."""
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL] + [gguf.TokenType.BYTE] * 256
    letters = string.ascii_lowercase
    pieces = itertools.chain(
        ["▁"],
        string.ascii_letters + string.digits + string.punctuation,
        (start + "".join(p) for n in (1, 2, 3) for start in ("▁", "") for p in itertools.product(letters, repeat=n)),
    )
    unique = list(dict.fromkeys(itertools.islice(pieces, 2 * size)))[: size - len(tokens)]
    if len(tokens) + len(unique) != size:
        raise ValueError(f"no vocabulary of {size} tokens: the most is {len(tokens) + len(unique)}")
    scores = [0.0] * len(tokens) + [-float(rank) for rank in range(len(unique))]
    kinds += [gguf.TokenType.NORMAL] * len(unique)
    return [token.encode() for token in tokens + unique], scores, [int(kind) for kind in kinds]


def add_metadata(writer: gguf.GGUFWriter, shape: Shape, name: str, kind: str, activation: str) -> None:
    """Everything llama.cpp asks of a llama model besides tensors."""
    tokens, scores, kinds = vocabulary(shape.n_vocab)
    writer.add_name(name)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.n_embd // shape.n_head)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if activation != "silu":
        writer.add_string("hotcold.ffn.activation", activation)


def row_bytes(cols: int, kind: Type) -> int:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if cols % block:
        raise ValueError(f"{cols} columns are not a multiple of {kind.name}'s block of {block}")
    return cols // block * size


def write_tensors(file, shape: Shape, pool: RowPool, alignment: int) -> None:
    """The data section: every tensor padded to the alignment, at most CHUNK_BYTES in memory."""
    for tensor in tensors(shape):
        if tensor.std == 0:
            data = np.ones(tensor.cols, np.float32)
            file.write(data.tobytes())
            written = data.nbytes
        else:
            width = row_bytes(tensor.cols, pool.kind)
            step = max(1, CHUNK_BYTES // width)
            for start in range(0, tensor.rows, step):
                file.write(pool.draw(min(step, tensor.rows - start), tensor.cols, tensor.std).tobytes())
            written = tensor.rows * width
        file.write(bytes(-written % alignment))


def make(out: Path, shape: Shape, name: str, kind: str, activation: str, seed: int) -> int:
    """Write the file through a temporary name. Returns its size in bytes. Raises OSError, ValueError."""
    quantized = TYPES[kind]
    writer = gguf.GGUFWriter(None, "llama")
    add_metadata(writer, shape, name, kind, activation)
    total = 0
    for tensor in tensors(shape):
        if tensor.std == 0:
            n_bytes = tensor.cols * 4
            writer.add_tensor_info(tensor.name, (tensor.cols,), np.dtype(np.float32), n_bytes)
        else:
            n_bytes = tensor.rows * row_bytes(tensor.cols, quantized)
            # A quantized tensor is announced by its bytes; the writer turns them back into elements.
            size = (tensor.rows, row_bytes(tensor.cols, quantized)) if kind != "f16" else (tensor.rows, tensor.cols)
            dtype = np.dtype(np.uint8 if kind != "f16" else np.float16)
            writer.add_tensor_info(tensor.name, size, dtype, n_bytes, quantized)
        total += n_bytes
    free = shutil.disk_usage(out.parent).free
    if free < total * 1.01:
        raise OSError(f"{out.parent} has {free / 1e9:.1f} GB free, {total / 1e9:.1f} GB are needed")
    part = out.with_name(out.name + ".part")
    try:
        writer.write_header_to_file(part)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        with open(part, "r+b") as file:
            file.seek(0, os.SEEK_END)
            file.write(bytes(-file.tell() % writer.data_alignment))
            write_tensors(file, shape, RowPool(quantized, seed), writer.data_alignment)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, out)
    finally:
        part.unlink(missing_ok=True)
    return out.stat().st_size


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Write a stock GGUF of real size with random weights.",
        epilog="shapes: " + "; ".join(
            f"{name} {s.n_layer} layers, width {s.n_embd}, {s.n_ff} neurons, {s.n_head}/{s.n_head_kv} heads"
            for name, s in SHAPES.items()
        ),
    )  # fmt: skip
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--type", choices=TYPES, required=True, help="of all matrices; norms are F32")
    parser.add_argument("--activation", choices=["silu", "relu"], default="silu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    name = f"synthetic {args.shape} {args.activation}"
    try:
        size = make(args.out, SHAPES[args.shape], name, args.type, args.activation, args.seed)
    except (OSError, ValueError) as error:
        print(f"make_synthetic: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: {size / 1e9:.2f} GB, {name}, {args.type}, seed {args.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
