"""inspect.py: everything is shown, and nothing a stranger wrote reaches the terminal as a command or as markup."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import hostile
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hostile import ARRAY, STRING, U32, array
from rich.console import Console
from small_models import Spec, make_tensors, write_model

from hotcold.runtime import schema
from hotcold.runtime.errors import GGUFError
from hotcold.runtime.inspect import file_lines, format_bytes, print_file


def shown(path: Path) -> str:
    console = Console(width=240, record=True, file=io.StringIO(), force_terminal=True)
    print_file(path, console)
    return console.export_text(styles=True)


def write(tmp_path: Path, builder: hostile.Builder) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(builder.build())
    return path


@pytest.mark.parametrize("split", [False, True])
def test_shows_a_model(split: bool, tmp_path: Path) -> None:
    path = hostile.write_valid(tmp_path / "m.gguf", split)
    console = Console(width=200, record=True, file=io.StringIO())
    print_file(path, console)
    text = console.export_text()
    size = path.stat().st_size
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.split()}
    assert f"{size} bytes" in text
    assert lines["layout"] == ["layout", "neuron-split" if split else "stock"]
    assert lines["runs"] == ["runs", "yes,", "as", "llama"]
    assert lines["llama.block_count"] == ["llama.block_count", "uint32", "2"]
    assert lines["tokenizer.ggml.tokens"][1:4] == ["array", "of", "string"]
    assert "['t0', 't1', 't2', 't3', 't4', 't5', ... (40 in all)]" in text
    assert lines["blk.1.ffn_gate.weight"][1:7] == ["Q8_0", "64", "x", "32", "2.1", "KiB"]
    assert ("ffn_up_down" in text) == split
    assert "64 neurons, gated, " + ("relu (neurons switch off)" if split else "silu (dense)") in text
    assert lines["BF16"] == ["BF16", "2", "1024", "2.0", "KiB", "16.00"]


def test_strangers_text_is_neither_commands_nor_markup(tmp_path: Path) -> None:
    b = hostile.model()
    b.put("general.name", STRING, "\x1b]0;owned\x07 [bold red]name[/] \u202e :smile:")
    b.put("[blink]key", STRING, "[link=file:///etc/passwd]click[/link]")
    b.raw("strings", ARRAY, array(STRING, ["\x1b[2J", "[red]x", b"\xff", "[/]"]))
    b.tensors.append(hostile.f32("[reverse]../../tensor[/]", 4))
    text = shown(write(tmp_path, b))
    for wanted in (r"\x1b]0;owned\x07 [bold red]name[/] \u202e :smile:", "[blink]key",
                   "[link=file:///etc/passwd]click[/link]", r"['\x1b[2J', '[red]x', '\udcff', '[/]']",
                   "[reverse]../../tensor[/]"):  # fmt: skip
        assert wanted in text
    for escape in ("\x1b]", "\x1b[2J", "\x1b[31m", "\x1b[7m", "\x1b[5m", "\x07", "\u202e"):
        assert escape not in text


def test_lines_for_a_pipe_are_whole_whatever_the_terminal_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    b = hostile.model()
    key, value = "llama.attention.layer_norm_rms_epsilon", "a value of many words " * 7
    b.put("a.long." + "name." * 20, STRING, value.strip())
    lines = file_lines(write(tmp_path, b))
    assert [line.split() for line in lines if key in line] == [[key, "float32", "1e-05"]]
    assert any("name." * 20 in line and line.endswith(value.strip()) for line in lines)
    assert all(line == line.rstrip() and "\x1b" not in line for line in lines)


def test_says_why_a_file_does_not_run(tmp_path: Path) -> None:
    text = shown(write(tmp_path, hostile.model().put("llama.expert_count", U32, 8)))
    assert "no: key 'llama.expert_count': found 8" in text and "blk.1.ffn_down.weight" in text
    text = shown(write(tmp_path, hostile.model().drop("blk.1.attn_q.weight")))
    assert "no: tensor 'blk.1.attn_q.weight'" in text
    text = shown(write(tmp_path, hostile.Builder()))
    assert "no: key 'general.architecture': found nothing" in text


def test_a_file_that_cannot_be_trusted_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(hostile.CASES["overlapping tensors"].content)
    with pytest.raises(GGUFError, match="overlap"):
        print_file(path, Console(file=io.StringIO()))


def test_format_bytes() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 1536, 5 << 30, 1 << 52)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 GiB", "4096.0 TiB",
    ]  # fmt: skip


# ------------------------------------------------------------------ what profiling, training and placing left


def known(tmp_path: Path, more: dict[str, Any], counts: list[list[int]] | None) -> dict[str, list[str]]:
    """Rows of the summary of a file of 4 and 8 neurons: heading -> texts."""
    spec = Spec(n_ff=(4, 8), metadata=more)
    tensors = make_tensors(spec)
    for layer, fired in enumerate(counts or []):
        tensors[schema.block(layer, schema.FFN_NEURON_COUNT)] = (Type.I64, np.array(fired, np.int64))
    lines = file_lines(write_model(tmp_path / "k.gguf", spec, tensors))
    rows: dict[str, list[str]] = {}
    for line in lines[1 : lines.index("")]:
        heading, _, text = line.partition("  ")
        rows.setdefault(heading, []).append(text.strip())
    return rows


COUNTS = [[100, 50, 10, 0], [80, 0, 0, 0, 0, 0, 0, 0]]
PROFILED = {schema.KEY_PROFILE_TOKENS: 100, schema.KEY_PROFILE_CORPUS: "a \x1b[31mtext"}


def test_shows_the_sparsity_of_a_file_without_counts(tmp_path: Path) -> None:
    rows = known(tmp_path, {schema.KEY_SPARSITY: [0.6, 0.9]}, None)
    assert rows["neurons"] == ["in no order of frequency: profiled, but not placed",
                               "sparsity 80.0% (60.0% to 90.0% in 2 layers)"]  # fmt: skip


def test_shows_the_profile(tmp_path: Path) -> None:
    rows = known(tmp_path, PROFILED, COUNTS)
    assert rows["neurons"] == [r"sorted by frequency: yes, 100 tokens of a \x1b[31mtext",
                               "sparsity 80.0% (60.0% to 90.0% in 2 layers)"]  # fmt: skip
    assert "predictors" not in rows and "placements" not in rows
    rows = known(tmp_path, PROFILED, [COUNTS[0], COUNTS[1][::-1]])
    assert rows["neurons"][0].startswith("sorted by frequency: no, but counted, 100 tokens")
    assert known(tmp_path, {}, None)["neurons"] == ["in no order of frequency: not profiled"]


@pytest.mark.parametrize(("more", "counts", "text"), [
    ({}, COUNTS, "key 'hotcold.profile.tokens': found nothing"),
    ({schema.KEY_PROFILE_TOKENS: 99}, COUNTS, "a count of 100, allowed: 0 to the 99 tokens"),
    ({schema.KEY_PROFILE_TOKENS: 0}, COUNTS, "found 0"),
    (PROFILED, COUNTS[:1], "tensor 'blk.1.ffn_neuron_count': found nothing, allowed: counts in all layers or in none"),
    (PROFILED, [COUNTS[0], [-1] * 8], "a count of -1"),
    (PROFILED, [COUNTS[0], [1] * 7], r"I64 [7], allowed: I64 [8]"),
])  # fmt: skip
def test_counts_that_cannot_be(more: dict[str, Any], counts: Any, text: str, tmp_path: Path) -> None:
    row, = known(tmp_path, more, counts)["neurons"]
    assert row.startswith("unusable: ") and text in row


PREDICTORS = {
    schema.KEY_PREDICTOR_KIND: ["none", "signbit"], schema.KEY_PREDICTOR_RANK: [0, 0],
    schema.KEY_PREDICTOR_INPUT: [0, 0], schema.KEY_PREDICTOR_THRESHOLD: [0.0, 0.5],
    schema.KEY_PREDICTOR_RECALL: [0.0, 0.98], schema.KEY_PREDICTOR_DENSITY: [1.0, 0.25],
}  # fmt: skip


def test_shows_predictors(tmp_path: Path) -> None:
    assert known(tmp_path, PREDICTORS, None)["predictors"] == [
        "signbit, mean recall 98.0%, mean density 25.0%", "exact in 1 of 2 layers: 0"]  # fmt: skip
    none = PREDICTORS | {schema.KEY_PREDICTOR_KIND: ["none", "none"]}
    assert known(tmp_path, none, None)["predictors"] == ["none", "exact in 2 of 2 layers: 0, 1"]
    row, = known(tmp_path, PREDICTORS | {schema.KEY_PREDICTOR_RECALL: [0.0, 2.0]}, None)["predictors"]
    assert row.startswith("unusable: ") and "recall': found 2.0" in row


PLACED = {
    schema.KEY_PLACEMENT_BUDGET: [1 << 29, 1 << 30], schema.KEY_PLACEMENT_N_CTX: [512, 1024],
    schema.KEY_PLACEMENT_HOT: [1, 2, 4, 8],
}  # fmt: skip


def test_shows_placements(tmp_path: Path) -> None:
    assert known(tmp_path, PROFILED | PLACED, COUNTS)["placements"] == [
        "512.0 MiB, context 512: 25.0% of neurons on the GPU, which make 75.0% of firings",
        "1.0 GiB, context 1024: 100.0% of neurons on the GPU, which make 100.0% of firings",
    ]
    assert known(tmp_path, PLACED, None)["placements"][0] == "512.0 MiB, context 512: 25.0% of neurons on the GPU"


@pytest.mark.parametrize(("change", "text"), [
    ({schema.KEY_PLACEMENT_HOT: [1, 2, 4]}, "an array of 3, allowed: 2 x 2 numbers"),
    ({schema.KEY_PLACEMENT_HOT: [1, 2, 5, 8]}, "5 in layer 0, allowed: 0 to its 4 neurons"),
    ({schema.KEY_PLACEMENT_HOT: ["1", "2", "4", "8"]}, "an array of 4, allowed: 2 x 2 numbers"),
    ({schema.KEY_PLACEMENT_N_CTX: [512]}, "n_ctx': found an array of 1"),
    ({schema.KEY_PLACEMENT_BUDGET: "8 GiB"}, "budget': found '8 GiB'"),
    ({schema.KEY_PLACEMENT_BUDGET: [1.5, 2.5]}, "budget': found an array of 2"),
])  # fmt: skip
def test_placements_that_cannot_be(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    row, = known(tmp_path, PROFILED | PLACED | change, COUNTS)["placements"]
    assert row.startswith("unusable: ") and text in row


def test_thresholds_switch_neurons_off(tmp_path: Path) -> None:
    spec = Spec(activation="silu", metadata={schema.KEY_THRESHOLD: [0.5, 0.0]})
    text = "\n".join(file_lines(write_model(tmp_path / "m.gguf", spec)))
    assert "silu (neurons switch off by thresholds in 1 of 2 layers)" in text
