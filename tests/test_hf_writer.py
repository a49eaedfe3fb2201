"""convert/hf_writer.py: a folder with some tensors replaced, complete or not there at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hotcold.convert import hf_writer
from hotcold.convert.checkpoint import INDEX, Checkpoint, open_checkpoint
from hotcold.convert.hf_writer import check_folder, files_to_copy, write_folder
from hotcold.convert.lazy import LazyTensor, QType, from_array
from hotcold.convert.precision import Report
from hotcold.runtime.errors import HotcoldError

Get = Callable[..., Path]
NAME = "model.layers.1.mlp.gate_proj.weight"


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(folder, Report())


def ignore(name: str, n_bytes: int) -> None:
    del name, n_bytes


def values(checkpoint: Checkpoint, name: str) -> np.ndarray:
    t = checkpoint.tensor(name)
    return t.read(0, t.n_rows)


def new_tensor(rows: int = 300, cols: int = 64) -> LazyTensor:
    array = np.arange(rows * cols, dtype=np.float32).reshape(rows, cols)
    return from_array(NAME, array, QType.F32, array.shape, "new")


@pytest.mark.parametrize("max_shard", [1 << 30, 100_000, 1])
@pytest.mark.parametrize("case", ["llama", "llama-bf16", "llama-f16", "llama-12-layers"])
def test_what_is_not_replaced_stays(case: str, max_shard: int, tiny_checkpoint: Get, tmp_path: Path) -> None:
    source, out, written = opened(tiny_checkpoint(case)), tmp_path / "out", []
    size = write_folder(source, out, {NAME: new_tensor()}, {"hidden_act": "relu"},
                        lambda name, n: written.append(n), max_shard=max_shard)
    result = opened(out)
    assert list(result.stored) and set(result.stored) == set(source.stored)
    for name in source.stored:
        if name != NAME:
            assert result.stored[name].dtype == source.stored[name].dtype
            assert np.array_equal(values(result, name), values(source, name)), name
    np.testing.assert_array_equal(values(result, NAME), new_tensor().read(0, 300))
    assert result.config == source.config | {"hidden_act": "relu"}
    assert size == sum(written) == sum(s.end - s.begin for s in result.stored.values())
    shards = sorted(p.name for p in out.glob("*.safetensors"))
    assert (out / INDEX).is_file() == (len(shards) > 1) == (max_shard < 1 << 30)
    assert max_shard > 1 or len(shards) == len(source.stored)
    copied = {p.name for p in source.folder.iterdir()} & set(hf_writer.COPIED)
    assert copied and all((out / name).read_bytes() == (source.folder / name).read_bytes() for name in copied)
    assert {p.name for p in out.iterdir()} == copied | set(shards) | {"config.json"} | (
        {INDEX} if len(shards) > 1 else set())
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_other_libraries_read_it(tiny_checkpoint: Get, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed (the extra dev has it)")
    write_folder(opened(tiny_checkpoint("llama")), tmp_path / "out", {NAME: new_tensor()}, {}, ignore)
    found = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(found[NAME], new_tensor().read(0, 300))


def test_names_that_are_taken(tiny_checkpoint: Get, tmp_path: Path) -> None:
    file, full, empty, model = (tmp_path / name for name in ("file", "full", "empty", "model"))
    file.write_text("mine")
    (full / "sub").mkdir(parents=True)
    (full / "config.json").write_text("{}")
    empty.mkdir()
    model.mkdir()
    (model / "config.json").write_text("{}")
    for path, force, said in ((file, True, "is not a folder"), (full, False, "exists already"),
                              (full, True, "not a model folder of plain files"), (model, False, "exists already"),
                              (tmp_path / "none" / "x", False, "no such folder")):
        with pytest.raises(HotcoldError, match=said):
            check_folder(path, force)
    source = opened(tiny_checkpoint("llama"))
    write_folder(source, empty, {}, {}, ignore)
    write_folder(source, model, {}, {}, ignore, force=True)
    for path in (empty, model):
        assert set(opened(path).stored) == set(source.stored)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "file", "full", "model"]


def test_a_failure_leaves_nothing_behind(tiny_checkpoint: Get, tmp_path: Path) -> None:
    source, out = opened(tiny_checkpoint("llama")), tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    broken = new_tensor().read(0, 300).copy()
    broken[7, 7] = np.inf

    def interrupted(a: int, b: int) -> np.ndarray:
        raise KeyboardInterrupt

    cases = ((from_array(NAME, broken, QType.F32, broken.shape, "new"), HotcoldError),
             (LazyTensor(NAME, (300, 64), QType.F32, interrupted), KeyboardInterrupt),
             (LazyTensor(NAME, (300, 64), QType.F32, lambda a, b: broken[:1]), HotcoldError))
    for tensor, error in cases:
        with pytest.raises(error):
            write_folder(source, out, {NAME: tensor}, {}, ignore, force=True)
        assert [p.name for p in tmp_path.iterdir()] == ["out"]
        assert [p.name for p in out.iterdir()] == ["config.json"]


def test_what_a_killed_run_left_goes_with_the_next(tiny_checkpoint: Get, tmp_path: Path) -> None:
    for name in (".out.999999999.part", ".out.x.part", f".out.{os.getppid()}.part", f".out.{os.getpid()}.part",
                 ".out.999999999.old"):
        (tmp_path / name).mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    write_folder(opened(tiny_checkpoint("llama")), tmp_path / "out", {}, {}, ignore, force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([".out.x.part", f".out.{os.getppid()}.part", "out"])


@pytest.mark.parametrize("force", [False, True])
def test_a_kill_between_the_renames_loses_nothing(force: bool, tiny_checkpoint: Get, tmp_path: Path) -> None:
    source, out = opened(tiny_checkpoint("llama")), tmp_path / "out"
    for name in (".out.999999999.part", ".out.999999999.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    if force:
        write_folder(source, out, {}, {}, ignore, force=True)
        assert set(opened(out).stored) == set(source.stored)
    else:
        with pytest.raises(HotcoldError, match="exists already"):
            write_folder(source, out, {}, {}, ignore)
        assert (out / "config.json").read_text() == ".out.999999999.old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_links_are_followed_inside_the_folder_only(tiny_checkpoint: Get, tmp_path: Path) -> None:
    source, folder = tiny_checkpoint("llama"), tmp_path / "in"
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "tokenizer.json").rename(folder / "blob")
    (folder / "tokenizer.json").symlink_to("blob")
    write_folder(opened(folder), tmp_path / "out", {}, {}, ignore)
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "blob").read_bytes()
    assert not (tmp_path / "out" / "blob").exists()

    secret = tmp_path / "secret"
    secret.write_text("mine")
    link = folder / "merges.txt"
    link.unlink(missing_ok=True)
    for target, said in ((secret, "leads out of its folder"), (folder / "none", "not a regular file")):
        link.symlink_to(target)
        with pytest.raises(HotcoldError, match=said):
            files_to_copy(folder)
        link.unlink()
    os.mkfifo(link)
    with pytest.raises(HotcoldError, match="not a regular file"):
        files_to_copy(folder)


def test_config_keeps_what_nobody_knows(tiny_checkpoint: Get, tmp_path: Path) -> None:
    source = opened(tiny_checkpoint("llama"))
    source.config["odd \u00e9\ud800"] = [1, {"x": None}]
    write_folder(source, tmp_path / "out", {}, {}, ignore)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == source.config
