"""inspect.py: everything is shown, and nothing a stranger wrote reaches the terminal as a command or as markup."""

from __future__ import annotations

import io
from pathlib import Path

import hostile
import pytest
from hostile import ARRAY, STRING, U32, array
from rich.console import Console

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
