"""placement/place.py: every layer in the order of its own counts, the same whatever order the file had."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from small_models import Reference, Spec, all_of, make_tensors, write_model

from hotcold.placement.identity import model_id
from hotcold.placement.place import add_arguments, as_sorted, run, sort_by, write_sorted
from hotcold.placement.profile import Profile, save_profile
from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.facts import read_counts
from hotcold.runtime.gguf_file import open_gguf

TOKENS = 1000
N_LAYER = 12  # more than ten: sorted as text, layer 10 would come before layer 2
TWELVE = Spec(patterns=("free",) * N_LAYER, n_ff=40, n_embd=32, n_head=2, n_head_kv=1, **all_of(Type.F16))


def profile_of(path: Path, fired: list[Any] | None = None, **changes: Any) -> Profile:
    """A profile of the model; without `fired`, layer 7 k has its own hot neurons."""
    with open_gguf(path) as file:
        config = ModelConfig.from_gguf(file)
        model = model_id(file, config)
    if fired is None:
        fired = [np.random.default_rng(100 + layer).permutation(n) * 20 for layer, n in enumerate(config.n_ff)]
    counts = tuple(np.asarray(f, np.int64) for f in fired)
    fields: dict[str, Any] = {
        "model": model, "n_tokens": TOKENS, "n_pairs": TOKENS - 1, "corpus": "a text", "sha256": "ab" * 32,
        "fired": counts, "pairs": tuple(f // 2 for f in counts), "magnitude": tuple(f * 0.5 for f in counts),
        "samples": tuple(np.zeros((0, config.n_embd), np.float16) for _ in counts),
        "sample_text": np.zeros(0, np.int64),
    }  # fmt: skip
    return Profile(**{**fields, **changes})


def place(src: Path, out: Path, profile: Profile) -> None:
    """What `hotcold place src --profile P -o out` writes."""
    with open_gguf(src) as file:
        sorting = sort_by(profile, file, ModelConfig.from_gguf(file))
    write_sorted(src, out, sorting, {}, force=False)


@pytest.fixture
def twelve(tmp_path: Path) -> Path:
    return write_model(tmp_path / "twelve.gguf", TWELVE)


def test_each_layer_has_its_own_order(twelve: Path, tmp_path: Path) -> None:
    """Planted counts of twelve layers, all different. The table of the source is a permutation already."""
    profile = profile_of(twelve)
    place(twelve, tmp_path / "o.gguf", profile)
    with open_gguf(twelve) as a, open_gguf(tmp_path / "o.gguf") as b:
        orders = set()
        for layer in range(N_LAYER):
            ids = b.data(schema.block(layer, schema.FFN_NEURON_ID))
            np.testing.assert_array_equal(ids, np.argsort(-profile.fired[layer]))  # source positions, hottest first
            np.testing.assert_array_equal(b.data(schema.block(layer, schema.FFN_NEURON_COUNT)),
                                          np.arange(40)[::-1] * 20)  # fmt: skip
            stored = np.argsort(a.data(schema.block(layer, schema.FFN_NEURON_ID)))  # source -> stored in `a`
            for part, rows in ((schema.FFN_GATE, 1), (schema.FFN_UP_DOWN, 2)):
                old, new = (f.data(schema.block(layer, part)).reshape(40, rows, -1) for f in (a, b))
                np.testing.assert_array_equal(new, old[stored[ids]])
            orders.add(tuple(ids))
        assert len(orders) == N_LAYER
        assert b.metadata[schema.KEY_PROFILE_TOKENS] == TOKENS and b.metadata[schema.KEY_PROFILE_SHA256] == "ab" * 32
        assert b.metadata[schema.KEY_PROFILE_CORPUS] == "a text"
        np.testing.assert_allclose(b.metadata[schema.KEY_SPARSITY], [1 - 390 / TOKENS] * N_LAYER, rtol=1e-6)


def test_the_model_stays_the_same_model(twelve: Path, tmp_path: Path) -> None:
    place(twelve, tmp_path / "o.gguf", profile_of(twelve))
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    want, fired = Reference(twelve).logits(tokens)
    got, fired_sorted = Reference(tmp_path / "o.gguf").logits(tokens)
    assert np.abs(got - want).max() <= 1e-12 * np.abs(want).max()
    with open_gguf(twelve) as a, open_gguf(tmp_path / "o.gguf") as b:
        assert model_id(a, ModelConfig.from_gguf(a)) == model_id(b, ModelConfig.from_gguf(b))
        for layer in range(N_LAYER):
            name = schema.block(layer, schema.FFN_NEURON_ID)
            source, source_sorted = np.argsort(a.data(name)), np.argsort(b.data(name))
            np.testing.assert_allclose(fired[layer][:, source], fired_sorted[layer][:, source_sorted], atol=1e-9)


def test_the_result_depends_on_the_profile_alone(twelve: Path, tmp_path: Path) -> None:
    """Sorted again by the same profile, or first by another one: the same bytes."""
    profile = profile_of(twelve)
    other = profile_of(twelve, [f[::-1] for f in profile.fired])
    place(twelve, tmp_path / "a.gguf", profile)
    place(tmp_path / "a.gguf", tmp_path / "b.gguf", profile)
    place(twelve, tmp_path / "c.gguf", other)
    place(tmp_path / "c.gguf", tmp_path / "d.gguf", profile)
    want = (tmp_path / "a.gguf").read_bytes()
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "d.gguf").read_bytes() == want
    assert (tmp_path / "c.gguf").read_bytes() != want


def test_ties_go_by_magnitude_then_by_source_position(tmp_path: Path) -> None:
    src = write_model(tmp_path / "s.gguf", Spec(patterns=("free",), n_ff=6, n_embd=32, n_head=2, n_head_kv=1))
    profile = profile_of(src, [[5, 7, 5, 0, 5, 0]], magnitude=(np.array([1.0, 0.5, 3.0, 0.0, 1.0, 0.0]),))
    place(src, tmp_path / "o.gguf", profile)
    with open_gguf(tmp_path / "o.gguf") as f:
        assert f.data("blk.0.ffn_neuron_id").tolist() == [1, 2, 0, 4, 3, 5]
        assert f.data("blk.0.ffn_neuron_count").tolist() == [7, 5, 5, 5, 0, 0]


def test_a_sorted_file_is_its_own_profile(twelve: Path, tmp_path: Path) -> None:
    profile = profile_of(twelve)
    place(twelve, tmp_path / "o.gguf", profile)
    with open_gguf(tmp_path / "o.gguf") as f:
        config = ModelConfig.from_gguf(f)
        sorting, counts = as_sorted(f, config), read_counts(f, config)
        assert counts is not None and counts.sorted and sorting.counts.tokens == TOKENS
        again = sort_by(profile, f, config)
        for layer in range(N_LAYER):
            np.testing.assert_array_equal(again.order[layer], np.arange(40))
            np.testing.assert_array_equal(sorting.frequency[layer], np.arange(40)[::-1] * 20 / TOKENS)


# ------------------------------------------------------------------ the command


def command(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args([str(a) for a in arguments])
    args.parser = parser
    return run(args)


def failure(*arguments: str | Path) -> str:
    with pytest.raises(HotcoldError) as e:
        command(*arguments)
    assert "\n" not in str(e.value)
    return str(e.value)


@pytest.fixture
def saved(twelve: Path, tmp_path: Path) -> Path:
    save_profile(tmp_path / "p.gguf", profile_of(twelve))
    return tmp_path / "p.gguf"


def test_the_table(twelve: Path, saved: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Without -o nothing is written. Layers are in the order of numbers."""
    before = sorted(tmp_path.iterdir())
    assert command(twelve, "--profile", saved) == 0
    assert sorted(tmp_path.iterdir()) == before
    out = capsys.readouterr().out
    assert "1000 tokens of a text" in out
    rows = [line.split() for line in out.splitlines() if re.match(r" *\d+ +40 ", line)]
    assert [row[0] for row in rows] == [str(layer) for layer in range(N_LAYER)]
    # Counts 780, 760, ... 20, 0 sum to 15600; the first 22 make 12540, which is 80.4 %.
    assert all(row[1:] == ["40", "61.0%", "22", "55.0%", "78.00%", "0.00%", "1"] for row in rows)


def test_place_writes_what_sort_by_says(
    twelve: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(twelve, "--profile", saved, "-o", tmp_path / "o.gguf") == 0
    place(twelve, tmp_path / "want.gguf", profile_of(twelve))
    assert (tmp_path / "o.gguf").read_bytes() == (tmp_path / "want.gguf").read_bytes()
    assert "wrote " in capsys.readouterr().err
    assert command(tmp_path / "o.gguf") == 0  # sorted: needs no profile any more
    assert "1000 tokens of a text" in capsys.readouterr().out
    assert "exists already" in failure(twelve, "--profile", saved, "-o", tmp_path / "o.gguf")
    assert command(twelve, "--profile", saved, "-o", tmp_path / "o.gguf", "--force") == 0


def test_a_layer_that_never_fires(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src = write_model(tmp_path / "s.gguf", Spec(n_ff=(4, 6)))
    save_profile(tmp_path / "p.gguf", profile_of(src, [[0, 0, 0, 0], [1000] * 6]))
    assert command(src, "--profile", tmp_path / "p.gguf", "-o", tmp_path / "o.gguf") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["0", "4", "100.0%", "-", "-", "0.00%", "0.00%", "4"] in rows
    assert ["1", "6", "0.0%", "5", "83.3%", "100.00%", "100.00%", "0"] in rows


def test_budgets(twelve: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Budgets are solved, shown and stored; a new order takes an old index away; other budgets replace it."""
    budgets = ("--vram-budget", "8GiB", "--vram-budget", "12GiB", "--hardware", "rtx3060-12g")
    assert command(twelve, "--profile", saved, "-o", tmp_path / "a.gguf", *budgets) == 0
    out = capsys.readouterr().out
    assert "hot at 8.0 GiB" in out and "hot at 12.0 GiB" in out
    with open_gguf(tmp_path / "a.gguf") as f:
        assert f.metadata[schema.KEY_PLACEMENT_BUDGET].tolist() == [8 << 30, 12 << 30]
        assert len(f.metadata[schema.KEY_PLACEMENT_HOT]) == 2 * N_LAYER
        assert f.metadata[schema.KEY_PLACEMENT_MODEL] == model_id(f, ModelConfig.from_gguf(f))
    assert command(tmp_path / "a.gguf") == 0  # shows what the file has
    again = capsys.readouterr().out.splitlines()
    assert [x for x in again if not x.startswith("note ")] == [x for x in out.splitlines() if not x.startswith("note ")]
    assert command(tmp_path / "a.gguf", "-o", tmp_path / "b.gguf", *budgets[2:]) == 0
    with open_gguf(tmp_path / "b.gguf") as f:
        assert f.metadata[schema.KEY_PLACEMENT_BUDGET].tolist() == [12 << 30]
    other = profile_of(twelve, [c[::-1] for c in profile_of(twelve).fired])
    save_profile(tmp_path / "q.gguf", other)
    assert command(tmp_path / "a.gguf", "--profile", tmp_path / "q.gguf", "-o", tmp_path / "c.gguf") == 0
    with open_gguf(tmp_path / "c.gguf") as f:
        assert not any(key.startswith("hotcold.placement.") for key in f.metadata)


# ------------------------------------------------------------------ errors


def test_stock_layout_says_to_convert(tmp_path: Path) -> None:
    src = write_model(tmp_path / "s.gguf", Spec(layout="stock"))
    assert f"first run: hotcold convert {src}" in failure(src)


def test_a_file_without_counts_needs_a_profile(twelve: Path) -> None:
    assert f"run hotcold profile {twelve}" in failure(twelve)


def test_a_file_in_another_order_needs_a_profile(tmp_path: Path) -> None:
    spec = Spec(n_ff=4, metadata={schema.KEY_PROFILE_TOKENS: 10})
    tensors = make_tensors(spec)
    for layer, counts in enumerate(([4, 3, 2, 1], [4, 3, 2, 3])):
        tensors[schema.block(layer, schema.FFN_NEURON_COUNT)] = (Type.I64, np.array(counts))
    src = write_model(tmp_path / "s.gguf", spec, tensors)
    assert "layer 1: neurons are not in descending order of their counts" in failure(src)


def test_nothing_to_write(twelve: Path, tmp_path: Path) -> None:
    place(twelve, tmp_path / "a.gguf", profile_of(twelve))
    assert "would be a copy of MODEL" in failure(tmp_path / "a.gguf", "-o", tmp_path / "b.gguf")
    assert not (tmp_path / "b.gguf").exists()


def test_no_such_file(tmp_path: Path, twelve: Path) -> None:
    assert "no such file" in failure(tmp_path / "none.gguf")
    assert "none.gguf" in failure(twelve, "--profile", tmp_path / "none.gguf")
    assert "no such folder" in failure(twelve, "--profile", tmp_path / "p.gguf", "-o", tmp_path / "no" / "o.gguf")


OTHERS: dict[str, tuple[Spec, str]] = {
    "layers": (Spec(patterns=("free",) * 11, n_ff=40, n_embd=32, n_head=2, n_head_kv=1), "11 layers"),
    "neurons": (Spec(patterns=("free",) * 12, n_ff=(40,) * 11 + (41,), n_embd=32, n_head=2, n_head_kv=1), "layer 11"),
    "weights": (Spec(patterns=("free",) * 12, n_ff=40, n_embd=32, n_head=2, n_head_kv=1, seed=5), "another model"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_profile_of_another_model(case: str, twelve: Path, tmp_path: Path) -> None:
    spec, text = OTHERS[case]
    profile = profile_of(write_model(tmp_path / "other.gguf", spec))
    save_profile(tmp_path / "p.gguf", profile)
    error = failure(twelve, "--profile", tmp_path / "p.gguf", "-o", tmp_path / "o.gguf")
    assert "another model" in error and text in error
    assert not (tmp_path / "o.gguf").exists()


def test_an_empty_profile(twelve: Path) -> None:
    with open_gguf(twelve) as file, pytest.raises(HotcoldError, match="counts no token"):
        sort_by(profile_of(twelve, n_tokens=0), file, ModelConfig.from_gguf(file))
