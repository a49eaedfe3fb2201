"""gguf_file.py and gguf_parse.py: the same as the gguf package on good files, a clear refusal of every bad one."""

from __future__ import annotations

import contextlib
import os
import re
import struct
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import gguf
import hostile
import numpy as np
import pytest

from hotcold.runtime.errors import GGUFError
from hotcold.runtime.gguf_file import DEQUANTIZABLE_TYPES, GGUFFile, dequantize, open_gguf, safe_text
from hotcold.runtime.kernels.formats import NATIVE

Types = gguf.GGMLQuantizationType


def opened(tmp_path: Path, content: bytes | hostile.Builder) -> GGUFFile:
    path = tmp_path / "file.gguf"
    path.write_bytes(content if isinstance(content, bytes) else content.build())
    return open_gguf(path)


@contextlib.contextmanager
def at_most(lines: int) -> Iterator[None]:
    """Fails when the code inside runs more lines of Python than that, so that endless work is not endless."""
    left = lines

    def count(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            pytest.fail(f"more than {lines} lines of Python")
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("name", hostile.CASES)
def test_hostile_file_is_refused_before_much_work(name: str, tmp_path: Path) -> None:
    """Whatever count or length a file claims, the work is that of a file of its size (18 kB)."""
    path = tmp_path / "file.gguf"
    path.write_bytes(hostile.CASES[name].content)
    with at_most(20_000), pytest.raises(GGUFError):
        open_gguf(path)


@pytest.mark.parametrize("name", hostile.CASES)
def test_hostile_file_is_refused(name: str, tmp_path: Path) -> None:
    case = hostile.CASES[name]
    path = tmp_path / "file.gguf"
    path.write_bytes(case.content)
    tracemalloc.start()
    try:
        with pytest.raises(GGUFError, match=case.error) as caught:
            open_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert name == "empty file" or re.search(r": offset \d+: .*: found .*, allowed: ", message)
    assert message.isprintable(), "an error must not carry escape codes or line breaks to the terminal"
    assert peak < 2 * len(case.content) + (1 << 20)


@pytest.mark.parametrize("split", [False, True])
def test_agrees_with_the_gguf_package(split: bool, tmp_path: Path) -> None:
    path = hostile.write_valid(tmp_path / "m.gguf", split)
    reader = gguf.GGUFReader(path)
    theirs = {k: v for k, v in reader.fields.items() if not k.startswith("GGUF.")}
    with open_gguf(path) as f:
        assert f.version == 3 and f.alignment == 32
        assert list(f.metadata) == list(theirs)
        for key, value in theirs.items():
            ours = f.metadata[key]
            assert (ours.tolist() if isinstance(ours, np.ndarray) else ours) == value.contents()
            assert f.types[key] == (value.types[0], value.types[1] if len(value.types) > 1 else None)
        assert list(f.tensors) == [t.name for t in reader.tensors]
        for t in reader.tensors:
            info = f.tensors[t.name]
            assert (info.ggml_type, info.offset, info.n_bytes) == (t.tensor_type, t.data_offset, t.n_bytes)
            assert info.shape == tuple(reversed(t.shape.tolist()))
            assert f.data(t.name).tobytes() == t.data.tobytes()


def test_views_are_typed_read_only_and_no_copies(tmp_path: Path) -> None:
    f = open_gguf(hostile.write_valid(tmp_path / "m.gguf", split=True))
    for name, dtype, shape in [
        ("output_norm.weight", np.float32, (32,)),
        ("blk.0.attn_q.weight", np.float16, (32, 32)),
        ("blk.0.attn_k.weight", np.uint16, (16, 32)),
        ("blk.0.ffn_up_down.weight", np.uint8, (128, 34)),
        ("blk.1.attn_output.weight", np.uint8, (32, 18)),
        ("blk.1.ffn_neuron_id", np.int32, (64,)),
    ]:
        view = f.data(name)
        assert view.dtype == dtype and view.shape == shape and view.flags.c_contiguous and view.flags.aligned
        assert np.shares_memory(view, f.data(name)), "each call gives the same bytes of the mapping"
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0
        with pytest.raises(ValueError):
            view.flags.writeable = True
    with pytest.raises(KeyError):
        f.data("blk.2.attn_q.weight")


def test_close_leaves_views_alive_and_refuses_new_ones(tmp_path: Path) -> None:
    f = open_gguf(hostile.write_valid(tmp_path / "m.gguf", split=False))
    norm = f.data("output_norm.weight")
    before = norm.copy()
    f.close()
    f.close()
    np.testing.assert_array_equal(norm, before)
    with pytest.raises(GGUFError, match="closed"):
        f.data("output_norm.weight")
    del norm
    f.close()
    with pytest.raises(GGUFError, match="closed"):
        f.metadata["tokenizer.ggml.tokens"]
    with pytest.raises(GGUFError, match="closed"):
        f.metadata["llama.block_count"]


def test_metadata_of_every_type(tmp_path: Path) -> None:
    b = hostile.Builder()
    scalars = {hostile.U8: 255, hostile.I8: -128, hostile.U16: 65535, hostile.I16: -3, hostile.U32: 1 << 31,
               hostile.I32: -5, hostile.U64: (1 << 64) - 1, hostile.I64: -(1 << 63), hostile.F32: 0.5,
               hostile.F64: 0.1, hostile.BOOL: 1, hostile.STRING: "naïve 🜁\n"}  # fmt: skip
    for kind, value in scalars.items():
        b.put(f"scalar.{kind}", kind, value)
        b.raw(f"array.{kind}", hostile.ARRAY, hostile.array(kind, [value] * 3))
        b.raw(f"empty.{kind}", hostile.ARRAY, hostile.array(kind, []))
    with opened(tmp_path, b) as f:
        for kind, value in scalars.items():
            assert f.metadata[f"scalar.{kind}"] == value
            assert list(f.metadata[f"array.{kind}"]) == [value] * 3
            assert len(f.metadata[f"empty.{kind}"]) == 0
            assert f.length(f"array.{kind}") == 3 and f.length(f"scalar.{kind}") == 1
        assert f.metadata["scalar.7"] is True and f.metadata["array.7"].dtype == bool
        assert f.get("absent") is None and f.get("absent", 4) == 4 and f.length("absent") is None
        assert "absent" not in f.metadata and len(f.metadata) == 36
        numbers = f.metadata["array.11"]
        assert numbers.flags.aligned and not numbers.flags.writeable
        assert f.metadata["array.11"] is numbers, "decoded once"
        assert f.types["array.8"] == (gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING)


def test_tokens_may_be_any_bytes(tmp_path: Path) -> None:
    raw = [b"plain", b"\xff\xfe", b"\xe2\x96\x81x", b"nul\0", b""]
    b = hostile.Builder().raw("t", hostile.ARRAY, hostile.array(hostile.STRING, raw)).put("n", hostile.U32, 1)
    with opened(tmp_path, b) as f:
        assert [s.encode("utf-8", "surrogateescape") for s in f.metadata["t"]] == raw
        assert f.metadata["t"][2] == "▁x"
        assert f.string_bytes("t") == raw
        with pytest.raises(GGUFError, match="'n': found UINT32, allowed: an array of strings"):
            f.string_bytes("n")
        with pytest.raises(KeyError):
            f.string_bytes("absent")


def test_a_large_vocabulary_is_not_decoded_before_it_is_asked_for(tmp_path: Path) -> None:
    tokens = [f"token {i}" for i in range(256_000)]
    path = tmp_path / "file.gguf"
    path.write_bytes(
        hostile.Builder()
        .raw("tokenizer.ggml.tokens", hostile.ARRAY, hostile.array(hostile.STRING, tokens))
        .raw("tokenizer.ggml.scores", hostile.ARRAY, hostile.array(hostile.F32, [0.5] * len(tokens)))
        .build()
    )
    tracemalloc.start()
    try:
        f = open_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200_000
    f.close()
    with at_most(6 * len(tokens)):  # five for the length of each string; nothing is looked at twice
        f = open_gguf(path)
    assert f.metadata["tokenizer.ggml.tokens"] == tokens
    assert f.metadata["tokenizer.ggml.scores"].sum() == len(tokens) / 2
    f.close()


def test_long_text_is_checked_across_its_pieces(tmp_path: Path) -> None:
    # A three-byte character lies over the border of the first MiB.
    text = "x" * ((1 << 20) - 1) + "▁" + "y" * 100
    with opened(tmp_path, hostile.Builder().put("a", hostile.STRING, text)) as f:
        assert f.metadata["a"] == text
    broken = text.encode()[: (1 << 20) + 1] + b"y" * 100
    payload = struct.pack("<Q", len(broken)) + broken
    with pytest.raises(GGUFError, match="'a'.*UTF-8"):
        opened(tmp_path, hostile.Builder().raw("a", hostile.STRING, payload))


def test_version_2_and_other_alignments(tmp_path: Path) -> None:
    b = hostile.model()
    b.version = struct.pack("<I", 2)
    for alignment in (8, 64, 4096):
        b.alignment = alignment
        b.put("general.alignment", hostile.U32, alignment)
        with opened(tmp_path, b) as f:
            assert (f.version, f.alignment) == (2, alignment)
            for t in b.tensors:
                assert isinstance(t.name, str) and f.tensors[t.name].offset % alignment == 0
                assert f.data(t.name).tobytes() == t.data


def test_small_things_that_are_allowed(tmp_path: Path) -> None:
    with opened(tmp_path, hostile.Builder()) as f:
        assert len(f.metadata) == 0 and len(f.tensors) == 0
    name = "../../etc/passwd"
    b = hostile.Builder(tensors=[hostile.f32(name, 2, 3, 4, 5)])
    b.put("split.count", hostile.U16, 1).put("k" * 1024, hostile.U8, 1)
    with opened(tmp_path, b) as f:
        assert f.data(name).shape == (2, 3, 4, 5), "a name is only a name"
    with_gap = hostile.model()
    with_gap.tensors[-1].data = b"\0" * 32 + with_gap.tensors[-1].data
    with_gap.tensors[-1].offset = 14944
    with opened(tmp_path, with_gap.build() + b"something after the last tensor") as f:
        assert "blk.1.ffn_down.weight" in f.tensors


def test_not_a_regular_file(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="directory.*hotcold convert"):
        open_gguf(tmp_path)
    with pytest.raises(GGUFError, match="cannot be opened: No such file"):
        open_gguf(tmp_path / "missing.gguf")
    with pytest.raises(GGUFError, match="cannot be opened"):
        open_gguf("nul\0byte.gguf")
    os.mkfifo(tmp_path / "pipe")  # open() would wait for a writer
    with pytest.raises(GGUFError, match="pipe.*regular"):
        open_gguf(tmp_path / "pipe")
    with pytest.raises(GGUFError, match=r"\\x1b\[31mred.gguf") as caught:
        open_gguf(tmp_path / "\x1b[31mred.gguf")
    assert "\x1b" not in str(caught.value)


def test_a_refused_file_is_unmapped(tmp_path: Path) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    for name in ("bool 255 in array", "version 99", "overlapping tensors"):
        path = tmp_path / "refused.gguf"
        path.write_bytes(hostile.CASES[name].content)
        with pytest.raises(GGUFError):
            open_gguf(path)
        assert "refused.gguf" not in maps.read_text()


def test_safe_text() -> None:
    assert safe_text("blk.0.ffn_up") == "blk.0.ffn_up"
    assert safe_text("naïve ▁x") == "naïve ▁x"
    assert safe_text("\x1b[2J\n\0\x9b") == r"\x1b[2J\n\x00\x9b"
    assert safe_text("a\u202eb\udcffc") == r"a\u202eb\udcffc", "direction overrides and stray surrogates"
    assert safe_text(b"ok\xff") == r"ok\xff"
    assert safe_text("x" * 300) == "x" * 200 + "... (300 characters)"
    assert safe_text("x" * 30, 10) == "x" * 10 + "... (30 characters)"


def _rows(kind: Types, seed: int = 3) -> np.ndarray:
    """Two rows of two blocks in the form GGUFFile.data has for the type, of finite values."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    if kind == Types.BF16:
        return (rng.standard_normal((2, 64)).astype("<f4").view("<u4") >> 16).astype("<u2")
    if kind in (Types.F32, Types.F16):
        return rng.standard_normal((2, 64)).astype("<f4" if kind == Types.F32 else "<f2")
    # Bytes below 0x3c keep every float16 and E8M0 scale inside them finite.
    return rng.integers(0, 0x3C, (2, 2 * size), dtype=np.uint8)


@pytest.mark.parametrize("kind", DEQUANTIZABLE_TYPES, ids=lambda t: t.name)
def test_dequantize_every_type_the_package_knows(kind: Types) -> None:
    rows = _rows(kind)
    rows.flags.writeable = False
    out = dequantize(rows, kind)
    assert out.dtype == np.float32 and out.flags.writeable and out.flags.c_contiguous
    assert not np.shares_memory(out, rows)
    columns = 64 if kind in (Types.F32, Types.F16, Types.BF16) else 2 * gguf.GGML_QUANT_SIZES[kind][0]
    assert out.shape == (2, columns)
    np.testing.assert_array_equal(out, gguf.quants.dequantize(rows.view(np.uint8), kind))
    one_row = dequantize(rows[1], kind)
    np.testing.assert_array_equal(one_row.ravel(), out[1])


def test_the_list_of_dequantizable_types_is_the_package_s() -> None:
    able = set()
    for kind in Types:
        size = gguf.GGML_QUANT_SIZES[kind][1]
        try:
            gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
            able.add(kind)
        except NotImplementedError:
            pass
    assert able == set(DEQUANTIZABLE_TYPES)
    assert set(NATIVE) <= able


def test_dequantize_refuses_other_types() -> None:
    with pytest.raises(GGUFError, match="Q8_K.*allowed: F32, F16"):
        dequantize(np.zeros((1, 292), np.uint8), Types.Q8_K)
