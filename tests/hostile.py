"""Files a stranger could send: one named case per way a GGUF header can lie.

In: nothing. Out: CASES (refused by open_gguf) and MODEL_CASES (open, but no model), each with a pattern its error
must match; write_valid for the two layouts. Used by test_gguf_file.py, test_config.py and test_fuzz.py.

GGUF bytes are made by hand here: the gguf package's writer refuses to write most of this.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# Numbers of the value types in the file format.
U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}
T_F32, T_F16, T_Q4_0, T_Q8_0, T_Q4_K, T_I32 = 0, 1, 2, 8, 12, 26
HUGE = 1 << 62


def string(text: bytes | str) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: int, value: Any) -> bytes:
    return string(value) if kind == STRING else struct.pack("<" + _FORMATS[kind], value)


def array(kind: int, values: list[Any], count: int | None = None) -> bytes:
    """Payload of an array value; `count` is what the file claims."""
    head = struct.pack("<IQ", kind, len(values) if count is None else count)
    return head + b"".join(scalar(kind, v) for v in values)


@dataclass
class Tensor:
    """A record of the tensor table. `offset` None: where it belongs."""

    name: bytes | str
    dims: list[int]  # the file's order: row length first
    kind: int = T_F32
    data: bytes = b""
    offset: int | None = None
    n_dims: int | None = None


@dataclass
class Builder:
    """A GGUF in pieces, each of which can be made wrong before `build`."""

    keys: list[tuple[bytes | str, int, bytes]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: bytes = struct.pack("<I", 3)
    n_keys: int | None = None
    n_tensors: int | None = None
    alignment: int = 32

    def put(self, name: bytes | str, kind: int, value: Any) -> Builder:
        """Set a scalar key, in place of the one of that name."""
        return self.raw(name, kind, scalar(kind, value))

    def raw(self, name: bytes | str, kind: int, payload: bytes) -> Builder:
        entry = (name, kind, payload)
        at = next((i for i, k in enumerate(self.keys) if k[0] == name), None)
        if at is None:
            self.keys.append(entry)
        else:
            self.keys[at] = entry
        return self

    def drop(self, name: str) -> Builder:
        self.keys = [k for k in self.keys if k[0] != name]
        self.tensors = [t for t in self.tensors if t.name != name]
        return self

    def tensor(self, name: str) -> Tensor:
        return next(t for t in self.tensors if t.name == name)

    def build(self) -> bytes:
        table, data = b"", b""
        for t in self.tensors:
            data += b"\0" * (-len(data) % self.alignment)
            offset = len(data) if t.offset is None else t.offset
            n_dims = len(t.dims) if t.n_dims is None else t.n_dims
            table += string(t.name) + struct.pack("<I", n_dims) + struct.pack(f"<{len(t.dims)}Q", *t.dims)
            table += struct.pack("<IQ", t.kind, offset)
            data += t.data
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_keys = len(self.keys) if self.n_keys is None else self.n_keys
        header = self.magic + self.version + struct.pack("<QQ", n_tensors, n_keys)
        header += b"".join(string(n) + struct.pack("<I", k) + p for n, k, p in self.keys) + table
        return header + b"\0" * (-len(header) % self.alignment) + data


def f32(name: str, *shape: int, seed: int = 0) -> Tensor:
    values = np.random.default_rng(seed).standard_normal(shape).astype("<f4")
    return Tensor(name, list(reversed(shape)), T_F32, values.tobytes())


def model(split: bool = False, arch: str = "llama") -> Builder:
    """A valid model: 2 layers, n_embd 16, 2 heads, n_ff 24, 12 tokens. `split`: in the neuron-split layout."""
    b = Builder()
    b.put("general.architecture", STRING, arch).put("general.name", STRING, "tiny")
    for key, value in {"block_count": 2, "context_length": 64, "embedding_length": 16, "feed_forward_length": 24,
                       "attention.head_count": 2, "attention.head_count_kv": 1}.items():  # fmt: skip
        b.put(f"{arch}.{key}", U32, value)
    opt = arch == "opt"
    b.put(f"{arch}.attention.layer_norm_{'' if opt else 'rms_'}epsilon", F32, 1e-5)
    b.raw("tokenizer.ggml.tokens", ARRAY, array(STRING, [f"<{i}>" for i in range(10)] + [b"\xff\xfe", ""]))
    b.raw("tokenizer.ggml.token_type", ARRAY, array(I32, [1] * 12))
    b.put("tokenizer.ggml.bos_token_id", U32, 1).put("tokenizer.ggml.add_bos_token", BOOL, 1)
    b.tensors += [f32("token_embd.weight", 12, 16), f32("output_norm.weight", 16)]
    if opt:
        b.tensors.append(f32("position_embd.weight", 64, 16))
    if split:
        b.put("hotcold.version", U32, 1).put("hotcold.ffn.activation", STRING, "fatrelu")
        b.raw("hotcold.ffn.threshold", ARRAY, array(F32, [0.25, 0.5]))
        b.raw("hotcold.ffn.neurons", ARRAY, array(U32, [24, 24]))
    gated = arch not in ("opt", "arcee")
    for layer in range(2):
        rows = {"attn_norm.weight": (16,), "attn_q.weight": (16, 16), "attn_k.weight": (8, 16),
                "attn_v.weight": (8, 16), "attn_output.weight": (16, 16), "ffn_norm.weight": (16,)}  # fmt: skip
        b.tensors += [f32(f"blk.{layer}.{name}", *shape) for name, shape in rows.items()]
        key = "ffn_gate.weight" if gated else "ffn_up.weight"
        b.tensors.append(f32(f"blk.{layer}.{key}", 24, 16))
        if split:
            b.tensors.append(f32(f"blk.{layer}.ffn_up_down.weight", 48, 16))
            order = np.arange(24, dtype="<i4")[::-1]
            b.tensors.append(Tensor(f"blk.{layer}.ffn_neuron_id", [24], T_I32, order.tobytes()))
        else:
            if gated:
                b.tensors.append(f32(f"blk.{layer}.ffn_up.weight", 24, 16))
            b.tensors.append(f32(f"blk.{layer}.ffn_down.weight", 16, 24))
    return b


def write_valid(path: Path, split: bool) -> Path:
    """A small valid model written by the gguf package, with F32, F16, BF16, Q8_0 and Q4_0 tensors."""
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*(f"t{i}" for i in range(37)), "t", "1", "2"])
    writer.add_token_types([1] * 40)
    writer.add_token_merges(["t 1", "t 2"])
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(True)
    if split:
        writer.add_uint32("hotcold.version", 1)
        writer.add_string("hotcold.ffn.activation", "relu")
        writer.add_array("hotcold.ffn.threshold", [0.0, 0.0])
        writer.add_array("hotcold.ffn.neurons", [64, 64])

    def add(name: str, kind: gguf.GGMLQuantizationType, *shape: int) -> None:
        values = rng.standard_normal(shape).astype(np.float32)
        if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            writer.add_tensor(name, values.astype(np.float16 if kind == gguf.GGMLQuantizationType.F16 else np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    types = gguf.GGMLQuantizationType
    add("token_embd.weight", types.Q8_0, 40, 32)
    add("output_norm.weight", types.F32, 32)
    for layer in range(2):
        at = f"blk.{layer}."
        add(at + "attn_norm.weight", types.F32, 32)
        add(at + "attn_q.weight", types.F16, 32, 32)
        add(at + "attn_k.weight", types.BF16, 16, 32)
        add(at + "attn_v.weight", types.Q8_0, 16, 32)
        add(at + "attn_output.weight", types.Q4_0, 32, 32)
        add(at + "ffn_norm.weight", types.F32, 32)
        add(at + "ffn_gate.weight", types.Q8_0, 64, 32)
        if split:
            add(at + "ffn_up_down.weight", types.Q8_0, 128, 32)
            writer.add_tensor(at + "ffn_neuron_id", np.arange(64, dtype=np.int32))
        else:
            add(at + "ffn_up.weight", types.Q8_0, 64, 32)
            add(at + "ffn_down.weight", types.Q4_0, 32, 64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@dataclass(frozen=True)
class Case:
    """The bytes of a file and a pattern (re.search) that the error about it must match."""

    content: bytes
    error: str


CASES: dict[str, Case] = {}  # refused when opened
MODEL_CASES: dict[str, Case] = {}  # opened, refused as a model


def _add(name: str, builder: Builder | bytes, error: str, into: dict[str, Case] = CASES) -> None:
    into[name] = Case(builder if isinstance(builder, bytes) else builder.build(), error)


def _header(n_tensors: int, n_keys: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_keys) + rest


def _preamble_cases() -> None:
    _add("empty file", b"", "empty file")
    _add("magic only", b"GGUF", "version.*4 bytes needed.*0 bytes left")
    _add("three bytes", b"GGU", "magic.*'GGU'.*'GGUF'")
    _add("random text", b"hello, world\n" * 20, "magic.*'hell'.*'GGUF'")
    _add("powerinfer", b"PWRI" + model().build()[4:], "PowerInfer.*hotcold convert")
    _add("before gguf", b"tjgg" + b"\0" * 60, "before GGUF")
    _add("pytorch zip", b"PK\x03\x04" + b"\0" * 60, "pickle.*safetensors")
    _add("escape codes in magic", b"\x1b[2J" + b"\0" * 60, r"'\\x1b\[2J'")
    for version in (0, 1, 4, 99):
        wrong = model()
        wrong.version = struct.pack("<I", version)
        _add(f"version {version}", wrong, f"offset 4: version: found {version}.*2 and 3")
    big = model()
    big.version = struct.pack(">I", 3)
    _add("big-endian", big, "big-endian.*little-endian")
    _add("2^62 keys", _header(0, HUGE, b"\0" * 76), f"number of keys: found {HUGE}.*at most 5 in the 76 bytes left")
    _add("2^64-1 keys", _header(0, (1 << 64) - 1), "number of keys")
    _add("2^62 tensors", _header(HUGE, 0, b"\0" * 76), f"number of tensors: found {HUGE}")
    greedy = model()
    greedy.n_keys = len(greedy.keys) + 1  # the tensor table is taken for a key
    _add("one key too many", greedy, "name of tensor 0: found length")
    full = model().build()
    for share in (5, 20, 30, 200, 600, len(full) - 1):
        _add(f"cut after {share} bytes", full[:share], "bytes? (left|needed)|complete|length")


def _key_cases() -> None:
    def keys(name: bytes | str, kind: int, payload: bytes) -> Builder:
        return Builder(keys=[(name, kind, payload)])

    one = scalar(U32, 1)
    _add("key length 2^62", _header(0, 1, struct.pack("<Q", HUGE) + b"x" * 60), f"length {HUGE}.*at most 60 bytes")
    _add("empty key", keys("", U32, one), "name of key 0: found an empty name")
    _add("100 kB key", keys("k" * 100_000, U32, one), "name of key 0: found length 100000, allowed: at most 1024 bytes")
    _add("NUL in key", keys("a\0b", U32, one), r"a\\x00b.*control")
    _add("escape code in key", keys("a\x1b[31mb", U32, one), r"a\\x1b\[31mb.*control")
    _add("C1 control in key", keys("a\x9bb", U32, one), r"a\\x9bb.*control")
    _add("key not UTF-8", keys(b"a\xff\xfe", U32, one), r"a\\xff\\xfe.*UTF-8")
    _add("duplicate key", Builder(keys=[("a.b", U32, one), ("a.b", U32, one)]), "'a.b' a second time")
    _add("value type 13", keys("a.b", 13, one), "value type 13.*0 UINT8.*12 FLOAT64")
    _add("bool 2", keys("a.b", BOOL, b"\x02"), "byte 2 as bool.*0 or 1")
    _add("bool 255 in array", keys("a.b", ARRAY, array(BOOL, [0, 1, 255, 1])), "byte 255 as bool.*0 or 1")
    _add("string length 2^62", keys("a.b", STRING, struct.pack("<Q", HUGE) + b"x"), f"'a.b'.*length {HUGE}")
    _add("string length 2^64-1", keys("a.b", STRING, struct.pack("<Q", (1 << 64) - 1) + b"x"), "'a.b'.*length 184467")
    _add("string one too long", keys("a.b", STRING, struct.pack("<Q", 33) + b"x" * 3), "'a.b'.*length 33")
    _add("string not UTF-8", keys("a.b", STRING, string(b"ok\xc3\x28")), r"'a.b'.*ok\\xc3\(.*UTF-8")
    _add("string cut in a character", keys("a.b", STRING, string(b"ok\xe2\x82")), r"'a.b'.*ok\\xe2\\x82.*UTF-8")
    for kind, size in ((U8, 1), (U16, 2), (F32, 4), (F64, 8), (BOOL, 1)):
        claim = array(kind, [0] * 8, count=HUGE)
        _add(f"2^62 elements of {size} bytes, type {kind}", keys("a.b", ARRAY, claim), f"array 'a.b': found {HUGE}")
    wraps = array(U64, [0], count=(1 << 61) + 1)  # times 8 is 8 in 64 bits
    _add("array bytes wrap to 8", keys("a.b", ARRAY, wraps), "length of array 'a.b'")
    _add("2^62 strings", keys("a.b", ARRAY, array(STRING, ["x"] * 4, count=HUGE)), f"array 'a.b': found {HUGE}")
    short = string("a.b") + struct.pack("<I", ARRAY) + array(STRING, ["12345678", "", ""], count=4)
    _add("one string too many", _header(0, 1, short), r"array 'a.b'\[3\]: found 8 bytes needed.*0 bytes left")
    inner = struct.pack("<IQ", STRING, 3) + string("x") + struct.pack("<Q", HUGE) + b"\0" * 40
    _add("string in array 2^62", keys("a.b", ARRAY, inner), rf"array 'a.b'\[1\]: found length {HUGE}")
    inner = struct.pack("<IQ", STRING, 3) + struct.pack("<Q", (1 << 64) - 8) + b"\0" * 40
    _add("string in array wraps", keys("a.b", ARRAY, inner), r"array 'a.b'\[0\]: found length 1844674")
    nested = struct.pack("<IQ", ARRAY, 1) + array(U32, [1])
    _add("nested array", keys("a.b", ARRAY, nested), "array of arrays")
    _add("element type 77", keys("a.b", ARRAY, struct.pack("<IQ", 77, 1) + b"\0" * 8), "value type 77")
    for alignment in (0, 1, 3, 48, 1 << 31):
        wrong = model().put("general.alignment", U32, alignment)
        _add(f"alignment {alignment}", wrong, f"general.alignment.*found {alignment}.*power of two")
    _add("alignment as text", model().put("general.alignment", STRING, "32"), "general.alignment.*STRING.*UINT32")
    _add("alignment as array", model().raw("general.alignment", ARRAY, array(U32, [32])), "alignment.*ARRAY of UINT32")
    _add("split", model().put("split.count", U16, 3), "split into 3 files.*merge")


def _tensor_cases() -> None:
    def one(**changes: Any) -> Builder:
        b = model()
        for key, value in changes.items():
            setattr(b.tensor("token_embd.weight"), key, value)
        return b

    _add("n_dims 0", one(dims=[]), "token_embd.weight': n_dims: found 0, allowed: 1 to 4")
    _add("n_dims 5", one(dims=[1] * 5), "n_dims: found 5")
    _add("n_dims 2^32-1", one(n_dims=(1 << 32) - 1), "n_dims: found 4294967295")
    _add("zero dimension", one(dims=[16, 0]), "token_embd.weight': dimensions.*no zero")
    _add("dimension 2^62", one(dims=[HUGE]), "token_embd.weight': d")
    _add("product overflows to 0", one(dims=[1 << 32, 1 << 32]), "dimensions.*product")
    _add("product overflows to 4", one(dims=[(1 << 63) + 2, 2]), "dimensions.*product")
    _add("product overflows in 4", one(dims=[1 << 16] * 4), "dimensions.*product")
    _add("bytes overflow", one(dims=[1 << 31, 1 << 31]), "end of the file")
    _add("type 999", one(kind=999), "type: found 999, allowed: F32, F16.*Q4_K")
    _add("type Q4_0_4_4", one(kind=31), r"type: found 31 \(Q4_0_4_4, withdrawn")
    _add("row of half a block", one(kind=T_Q8_0), "row length: found 16, allowed: a multiple of 32 for Q8_0")
    _add("row of half a K block", one(kind=T_Q4_K, dims=[128, 2]), "multiple of 256 for Q4_K")
    _add("offset unaligned", one(offset=4), "offset: found 4, allowed: a multiple of the alignment 32")
    _add("offset wraps into the header", one(offset=(1 << 64) - 256), "end of the file")
    _add("offset past the end", one(offset=1 << 40), "end of the file")
    _add("tensor larger than the file", one(dims=[16, 1 << 20]), "token_embd.weight': data.*end of the file")
    _add("same offset twice", one(offset=768), "overlap")
    overlap = model()
    overlap.tensor("output_norm.weight").offset = 32
    _add("overlapping tensors", overlap, "'output_norm.weight'.*inside 'token_embd.weight'.*overlap")
    for name, new, error in (
        ("empty tensor name", "", "name of tensor 0: found an empty name"),
        ("100 kB tensor name", "t" * 100_000, "name of tensor 0: found length 100000"),
        ("NUL in tensor name", "a\0b", r"a\\x00b.*control"),
        ("escape code in tensor name", "\x1b]0;owned\x07", r"\\x1b\]0;owned\\x07.*control"),
        ("newline in tensor name", "a\nb", r"a\\nb.*control"),
        ("tensor name not UTF-8", b"\xc0\xaf", r"\\xc0\\xaf.*UTF-8"),
        ("duplicate tensor name", "output_norm.weight", "'output_norm.weight' a second time"),
    ):
        _add(name, one(name=new), error)
    _add("tensor name length 2^63", _header(1, 0, struct.pack("<Q", 1 << 63) + b"\0" * 60), "name of tensor 0")


def _model_cases() -> None:
    def put(name: str, kind: int, value: Any, split: bool = False) -> Builder:
        return model(split).put(name, kind, value)

    def add(name: str, builder: Builder, error: str) -> None:
        _add(name, builder, error, MODEL_CASES)

    add("no architecture", model().drop("general.architecture"), "general.architecture.*nothing")
    add("unknown architecture", put("general.architecture", STRING, "mamba"), "'mamba'.*llama, qwen2.*arcee")
    add("escape code in architecture", put("general.architecture", STRING, "\x1b[31m"), r"'\\x1b\[31m'")
    add("architecture as number", put("general.architecture", U32, 3), "general.architecture.*found 3.*a string")
    add("adapter", put("general.type", STRING, "adapter"), "general.type.*'adapter'.*'model'")
    for key in ("block_count", "embedding_length", "context_length", "attention.head_count", "feed_forward_length",
                "attention.head_count_kv"):  # fmt: skip
        for value in (0, 1 << 30, (1 << 32) - 1):
            add(f"{key} {value}", put(f"llama.{key}", U32, value), f"llama.{key}.*found {value}|embedding_length")
        add(f"{key} negative", put(f"llama.{key}", I32, -4), f"llama.{key}.*found -4")
        add(f"{key} as text", put(f"llama.{key}", STRING, "2"), f"llama.{key}.*found '2'")
        add(f"{key} NaN", put(f"llama.{key}", F32, float("nan")), f"llama.{key}.*found nan")
        if key != "attention.head_count_kv":
            add(f"no {key}", model().drop(f"llama.{key}"), f"llama.{key}.*nothing")
    add("heads do not divide", put("llama.attention.head_count", U32, 3), "head_count.*found 3.*16")
    add("kv heads do not divide", put("llama.attention.head_count_kv", U32, 3), "head_count_kv.*found 3.*2 heads")
    add("head counts differ", model().raw("llama.attention.head_count", ARRAY, array(U32, [2, 1])), "every layer")
    add("head size 1", put("llama.attention.head_count", U32, 16), "head size.*found 1.*even number")
    add("key and value sizes differ", put("llama.attention.value_length", U32, 16), "value_length.*found 16.*8")
    for eps in (float("nan"), float("inf"), 0.0, -1e-5, 1e30):
        add(f"eps {eps}", put("llama.attention.layer_norm_rms_epsilon", F32, eps), "layer_norm_rms_epsilon.*found")
    add("more layers than tensors", put("llama.block_count", U32, 3), "block_count.*found 3.*the 2 layers")
    add("fewer layers than tensors", put("llama.block_count", U32, 1), "block_count.*found 1.*the 2 layers")
    vocabulary = model()
    vocabulary.tensors = []
    add("vocabulary only", vocabulary, "block_count.*found 2.*the 0 layers")
    add("n_ff not the tensors'", put("llama.feed_forward_length", U32, 25), r"ffn_gate.*\[24, 16\].*\[25, 16\]")
    add("n_ff of 3 layers", model().raw("llama.feed_forward_length", ARRAY, array(U32, [24] * 3)), "array of 3.*2 num")
    add("n_ff as strings", model().raw("llama.feed_forward_length", ARRAY, array(STRING, ["24"] * 2)), "array of 2")
    add("no embedding", model().drop("token_embd.weight"), "token_embd.weight.*nothing")
    add("embedding of another width", put("llama.embedding_length", U32, 32), r"token_embd.*\[12, 16\].*32")
    flat = model()
    flat.tensor("token_embd.weight").dims = [192]
    add("embedding of one dimension", flat, r"token_embd.*\[192\]")
    one_gate = model().drop("blk.1.ffn_gate.weight")
    add("gate in one layer only", one_gate, "ffn_gate tensors.*in 1 of 2 layers")
    for key in ("bos", "eos", "eot", "unknown", "padding"):
        name = f"tokenizer.ggml.{key}_token_id"
        add(f"{key} beyond the vocabulary", put(name, U32, 12), f"{name}.*found 12.*0 to 11")
    add("eos -1", put("tokenizer.ggml.eos_token_id", I32, -1), "eos_token_id.*found -1")
    many = model().raw("tokenizer.ggml.tokens", ARRAY, array(STRING, ["x"] * 13))
    add("more tokens than rows", many, "tokenizer.ggml.tokens.*13 tokens.*12 rows")
    add("experts", put("llama.expert_count", U32, 8), "expert_count.*found 8.*not supported")
    add("experts as array", model().raw("llama.expert_count", ARRAY, array(U32, [0, 8])), "expert_count.*not supp")
    add("soft capping", put("llama.attn_logit_softcapping", F32, 50.0), "softcapping.*50.*not supported")
    add("not causal", put("llama.attention.causal", BOOL, 0), "attention.causal.*False.*not supported")
    add("window -1", put("llama.attention.sliding_window", I32, -1), "sliding_window.*found -1")
    window = put("llama.attention.sliding_window", U32, 8)
    window.raw("llama.attention.sliding_window_pattern", ARRAY, array(BOOL, [1, 0, 1]))
    add("window pattern of 3 layers", window, "sliding_window_pattern.*array of 3")
    _rope_cases(put, add)
    _layout_cases(put, add)


def _rope_cases(put: Callable[..., Builder], add: Callable[[str, Builder, str], None]) -> None:
    scaling = "llama.rope.scaling"
    add("rope scaling unknown", put(f"{scaling}.type", STRING, "longrope"), "scaling.type.*'longrope'.*linear, yarn")
    for value in (0.0, -2.0, float("nan"), float("inf")):
        add(f"rope factor {value}", put(f"{scaling}.factor", F32, value), "scaling.factor.*found")
        add(f"rope base {value}", put("llama.rope.freq_base", F32, value), "freq_base.*found")
    add("rope base 1", put("llama.rope.freq_base", F32, 1.0), "freq_base.*found 1.0")
    for dims in (0, 3, 10, 1 << 31):
        add(f"rope dimensions {dims}", put("llama.rope.dimension_count", U32, dims), f"dimension_count.*found {dims}")
    yarn = put(f"{scaling}.type", STRING, "yarn").put(f"{scaling}.factor", F32, 4.0)
    add("yarn beta order", yarn.put(f"{scaling}.yarn_beta_slow", F32, 64.0), "yarn_beta_slow.*64.*32")
    add("original context 0", put(f"{scaling}.original_context_length", U32, 0), "original_context_length.*found 0")
    add("yarn ext_factor 7", put(f"{scaling}.yarn_ext_factor", F32, 7.0), "yarn_ext_factor.*7")


def _layout_cases(put: Callable[..., Builder], add: Callable[[str, Builder, str], None]) -> None:
    add("layout version 2", put("hotcold.version", U32, 2, True), "hotcold.version.*found 2.*newer hotcold")
    add("layout version 0", put("hotcold.version", U32, 0, True), "hotcold.version.*found 0")
    add("layout version as text", put("hotcold.version", STRING, "1", True), "hotcold.version.*found '1'")
    add("unknown activation", put("hotcold.ffn.activation", STRING, "swish", True), "'swish'.*relu, relu2.*silu")
    add("no activation", model(True).drop("hotcold.ffn.activation"), "hotcold.ffn.activation.*nothing")
    key = "hotcold.ffn.threshold"
    add("no threshold", model(True).drop(key), f"{key}.*nothing.*fatrelu")
    for name, values in (("short", [0.1]), ("long", [0.1] * 3), ("NaN", [0.1, float("nan")]),
                         ("infinite", [float("inf"), 0.0])):  # fmt: skip
        add(f"threshold {name}", model(True).raw(key, ARRAY, array(F32, values)), f"{key}.*found")
    add("threshold of integers", model(True).raw(key, ARRAY, array(I32, [0, 0])), f"{key}.*array of 2")
    relu = put("hotcold.ffn.activation", STRING, "relu", True)
    add("relu with a threshold", relu, f"{key}.*found 0.25.*0 for relu")
    neurons = model(True).raw("hotcold.ffn.neurons", ARRAY, array(U32, [24, 23]))
    add("neurons not n_ff", neurons, "hotcold.ffn.neurons.*feed_forward_length")
    add("no neurons", model(True).drop("hotcold.ffn.neurons"), "hotcold.ffn.neurons.*nothing")
    drelu = model(arch="opt").put("hotcold.ffn.activation", STRING, "drelu")
    add("drelu without gate", drelu, "drelu.*gated")
    add("opt without positions", model(arch="opt").drop("position_embd.weight"), "position_embd.weight.*nothing")
    add("minicpm scale NaN", model(arch="minicpm").put("minicpm.logit_scale", F32, float("nan")), "logit_scale.*nan")
    add("llama with logit_scale", put("llama.logit_scale", F32, 0.5), "logit_scale.*0.5")


_preamble_cases()
_key_cases()
_tensor_cases()
_model_cases()
