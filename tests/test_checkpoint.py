"""convert/checkpoint.py: safetensors folders, hostile and damaged ones above all."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import write_checkpoint, write_safetensors

from hotcold.convert import checkpoint
from hotcold.convert.checkpoint import INDEX, open_checkpoint, read_header
from hotcold.convert.families import load_checkpoint
from hotcold.convert.lazy import QType, to_float32
from hotcold.convert.precision import Report
from hotcold.runtime.errors import HotcoldError


def raw_file(path: Path, header: Any, data: bytes = b"", size: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + data)
    return path


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def refuse(folder: Path, text: str) -> None:
    with pytest.raises(HotcoldError, match=text):
        open_checkpoint(folder, Report())


def test_deeply_nested_json_is_refused(tmp_path: Path) -> None:
    """What one parser still takes, a later step may not."""
    folder = write_checkpoint(tmp_path / "c", "llama")
    path = folder / "tokenizer.json"
    deep = '{"type": "Sequence", "pretokenizers": [' * 400 + "]}" * 400
    keys = json.loads(path.read_text()) | {"pre_tokenizer": json.loads(deep)}
    path.write_text(json.dumps(keys))
    with pytest.raises(HotcoldError, match="unknown pre-tokenizer|nested too deeply|not valid JSON"):
        load_checkpoint(folder, Report())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_survive(folder: Path, dtype: str) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3) / 4
    write_safetensors(folder / "model.safetensors", {"x": x}, dtype)
    t = open_checkpoint(folder, Report()).tensor("x")
    assert t.shape == (2, 3)
    assert t.origin == {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    np.testing.assert_array_equal(to_float32(t.read(0, 2), t.qtype), x)


def test_float64_is_read(folder: Path) -> None:
    x = np.array([1.5, -2.25])
    raw_file(folder / "model.safetensors", {"x": entry("F64", (2,), (0, 16))}, x.tobytes())
    t = open_checkpoint(folder, Report()).tensor("x")
    assert t.qtype == QType.F64
    np.testing.assert_array_equal(t.read(0, 2), x)


def test_other_dtypes_are_refused_by_name(folder: Path) -> None:
    raw_file(folder / "model.safetensors", {"x": entry("F8_E4M3", (8,), (0, 8))}, bytes(8))
    with pytest.raises(HotcoldError, match="tensor x has dtype F8_E4M3: supported are F64, F32, F16, BF16"):
        open_checkpoint(folder, Report()).tensor("x")


HEADERS: dict[str, tuple[Any, bytes, int | None, str]] = {
    "too-long": ({}, b"", 1 << 62, "header length 4611686018427387904 in a file of"),
    "longer-than-file": ({}, b"", 100, "header length 100 in a file of"),
    "not-json": (b"{nonsense", b"", None, "not valid JSON"),
    "not-utf8": (b'{"\xff": 1}', b"", None, "not valid JSON"),
    "deep": (b"[" * 100000, b"", None, "not valid JSON"),
    "list": ([], b"", None, "not a JSON object"),
    "duplicate": (b'{"x": {}, "x": {}}', b"", None, "stands twice"),
    "entry": ({"x": 1}, b"", None, "'x': its entry is not a JSON object"),
    "dtype": ({"x": entry("Q8", (8,), (0, 8))}, bytes(8), None, "dtype 'Q8'"),
    "negative": ({"x": entry(shape=(-2,))}, bytes(8), None, "shape"),
    "bool-shape": ({"x": entry(shape=(True, 2))}, bytes(8), None, "shape"),
    "huge": ({"x": entry(shape=(2**60, 2**60))}, bytes(8), None, "shape"),
    "outside": ({"x": entry(offsets=(0, 9))}, bytes(8), None, "outside the file"),
    "backwards": ({"x": entry(offsets=(8, 0))}, bytes(8), None, "outside the file"),
    "text-offsets": ({"x": entry(offsets=("0", "8"))}, bytes(8), None, "two non-negative integers"),
    "size": ({"x": entry(shape=(3,))}, bytes(8), None, r"F32 \[3\] needs 12 bytes, data_offsets give 8"),
    "overlap": ({"x": entry(), "y": entry(offsets=(4, 12))}, bytes(12), None, "tensor y overlaps x"),
    "hole": ({"x": entry(), "y": entry(offsets=(12, 20))}, bytes(20), None, "tensor y leaves a hole after x"),
    "trailing": ({"x": entry()}, bytes(12), None, "tensors end at byte"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_damaged_headers_are_refused(tmp_path: Path, case: str) -> None:
    header, data, size, text = HEADERS[case]
    path = raw_file(tmp_path / "m.safetensors", header, data, size)
    with pytest.raises(HotcoldError, match=text) as e:
        read_header(path)
    assert str(path) in str(e.value)


@pytest.mark.parametrize("size", [0, 3, 8])
def test_tiny_files_are_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"\x01" + bytes(size - 1) if size else b"")
    with pytest.raises(HotcoldError, match="header length"):
        read_header(path)


def test_header_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "MAX_HEADER", 10)
    with pytest.raises(HotcoldError, match="allowed up to 10 bytes"):
        read_header(raw_file(tmp_path / "m.safetensors", {"x": entry()}, bytes(8)))


@pytest.mark.parametrize("name", [
    "../evil.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b.safetensors", "C:x.safetensors",
    "model.bin", ".hidden.safetensors", "a\0.safetensors", 7, None,
])  # fmt: skip
def test_index_names_must_be_plain(folder: Path, name: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
    refuse(folder, "plain names of safetensors files")


def test_missing_shards_are_named(folder: Path) -> None:
    write_safetensors(folder / "a.safetensors", {"x": np.ones(2, np.float32)})
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    refuse(folder, "1 of 2 shards are missing: b.safetensors")


def test_tensors_missing_from_their_shard_are_named(folder: Path) -> None:
    write_safetensors(folder / "a.safetensors", {"x": np.ones(2, np.float32)})
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "a.safetensors"}}))
    refuse(folder, r"1 tensors listed in .* not in their shards: y \(a.safetensors\)")


def test_index_decides_where_a_tensor_is(folder: Path) -> None:
    write_safetensors(folder / "a.safetensors", {"x": np.full(2, 1, np.float32), "y": np.full(2, 9, np.float32)})
    write_safetensors(folder / "b.safetensors", {"y": np.full(2, 2, np.float32), "z": np.full(2, 3, np.float32)})
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    report = Report()
    ckpt = open_checkpoint(folder, report)
    assert {n: float(ckpt.tensor(n).read(0, 1)[0]) for n in ckpt.stored} == {"x": 1, "y": 2, "z": 3}
    assert any("tensor z is not listed" in n for n in report.notes)


def test_a_tensor_twice_outside_the_index_is_refused(folder: Path) -> None:
    one = np.ones(2, np.float32)
    write_safetensors(folder / "a.safetensors", {"x": one, "z": one})
    write_safetensors(folder / "b.safetensors", {"y": one, "z": one})
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    refuse(folder, "tensor z is also in a.safetensors")


@pytest.mark.parametrize("weight_map", [None, {}, []])
def test_index_without_map(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refuse(folder, "weight_map is missing or empty")


def test_single_file_and_foreign_index(folder: Path) -> None:
    write_safetensors(folder / "model.safetensors", {"x": np.ones(2, np.float32)})
    write_safetensors(folder / "a.safetensors", {"x": np.ones(2, np.float32)})
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    refuse(folder, "remove the one not wanted")


def test_shards_without_index(folder: Path) -> None:
    for name in ("a", "b"):
        write_safetensors(folder / f"{name}.safetensors", {name: np.ones(2, np.float32)})
    refuse(folder, "2 safetensors files but no model.safetensors.index.json")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_with_the_reason(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"\x80\x04.")
    refuse(folder, rf"only pickle weights \({name}\): loading pickle can run any code.*safetensors")


def test_no_weights(folder: Path) -> None:
    refuse(folder, "no weights: expected model.safetensors")


def test_no_config(tmp_path: Path) -> None:
    refuse(tmp_path, "no config.json")


@pytest.mark.parametrize(("text", "message"), [("[]", "holds list"), ("{", "not valid JSON"), ("\x00", "not valid")])
def test_damaged_config(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    refuse(tmp_path, message)


def test_config_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"x": "\xff"}')
    refuse(tmp_path, "not UTF-8 text")


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    real = write_checkpoint(tmp_path / "blobs", "llama")
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for file in real.iterdir():
        (linked / file.name).symlink_to(file)
    assert open_checkpoint(linked, Report()).stored.keys() == open_checkpoint(real, Report()).stored.keys()


def test_a_shard_that_is_a_folder_is_missing(folder: Path) -> None:
    (folder / "a.safetensors").mkdir()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    refuse(folder, "shards are missing: a.safetensors")
