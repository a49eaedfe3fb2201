"""console.py: what reaches a terminal, and the timing lines."""

from __future__ import annotations

import dataclasses
import io

import numpy as np

from hotcold.runtime.console import TextOut, hybrid_line, printable, share_line, timing_summary
from hotcold.runtime.generate import GenerationStats
from hotcold.runtime.stats import HybridStats, LayerStats


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_are_spelled_out_and_text_is_not() -> None:
    assert printable("a\tb\n\x1b[31m\r\x07\x9b\x7f\x00") == "a\tb\n\\x1b[31m\\x0d\\x07\\x9b\\x7f\\x00"
    assert printable("žluťoučký 😀 \u00a0") == "žluťoučký 😀 \u00a0"


def test_a_terminal_gets_escaped_text_and_a_pipe_gets_it_as_it_is() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    TextOut(terminal).write("\x1b]0;owned\x07")
    TextOut(pipe).write("\x1b]0;owned\x07")
    assert terminal.getvalue() == "\\x1b]0;owned\\x07"
    assert pipe.getvalue() == "\x1b]0;owned\x07"


def test_end_line_adds_a_newline_only_where_one_is_missing() -> None:
    stream = io.StringIO()
    out = TextOut(stream)
    out.end_line()
    out.write("a")
    out.write("")
    out.end_line()
    out.end_line()
    out.write("b\n")
    out.end_line()
    assert stream.getvalue() == "a\nb\n"


def stats(shares: list[float]) -> GenerationStats:
    return GenerationStats(
        prompt_tokens=12, reused_tokens=2, generated_tokens=6, prompt_seconds=0.5, eval_runs=5, eval_seconds=0.25,
        layers=LayerStats(5, np.ones(len(shares)), np.array(shares), np.array([2.0, 3.0]), np.array([5.0, 5.0])),
    )  # fmt: skip


def test_summary_counts_evaluated_tokens_and_rates() -> None:
    text = "\n".join(timing_summary(stats([0.5, 0.251]), load_seconds=1.5, total_seconds=3))
    assert "load time =    1500.00 ms" in text
    assert "prompt eval time =     500.00 ms /    10 tokens (   50.00 ms per token,    20.00 tokens per second)" in text
    assert " eval time =     250.00 ms /     5 runs   (   50.00 ms per token,    20.00 tokens per second)" in text
    assert "total time =    3000.00 ms /    15 tokens" in text
    assert "neurons computed = 37.5 % (layers 0-1: 50 25); 50.0 % of the feed-forward bytes read" in text


def test_summary_with_lookup_counts_tokens_and_says_what_drafts_saved() -> None:
    some = stats([1.0])
    some.lookup, some.drafted, some.accepted = 7, 9, 5
    text = "\n".join(timing_summary(some, 0, 0))
    assert " eval time =     250.00 ms /    10 tokens (   25.00 ms per token,    40.00 tokens per second)" in text
    assert "         lookup = 5 of 9 drafted tokens accepted; 10 tokens in 5 runs (2.00 per run)" in text
    assert "lookup" not in "\n".join(timing_summary(stats([1.0]), 0, 0))
    assert "0 of 0 drafted" in "\n".join(timing_summary(GenerationStats(lookup=7), 0, 0))


def test_summary_of_nothing_divides_by_nothing() -> None:
    text = "\n".join(timing_summary(GenerationStats(), 0, 0))
    assert "0.00 tokens per second" in text and "neurons" not in text


def test_layers_that_are_alike_are_not_listed() -> None:
    line = share_line(stats([1.0, 1.0, 1.0]).layers)
    assert line == "100.0 % in each of 3 layers; 50.0 % of the feed-forward bytes read"
    assert share_line(None) == "no token generated yet"


def test_what_the_gpu_had_and_how_often_it_did_not_wait() -> None:
    """Shares are of the layers on the GPU: the first of these three is the CPU's."""
    gpu, cpu, asked = np.array([0.0, 60.0, 30.0]), np.array([0.0, 10.0, 0.0]), np.array([0.0, 0.75, 0.0])
    shared = HybridStats(1, gpu, cpu, asked, 3 << 20, "card")
    line = ("layers 1-2 on card, 3 MiB of VRAM; 10.0 % of their neurons by the CPU, 0.8 waits and transfers per token, "
            "62.5 % of layers skipped")  # fmt: skip
    assert hybrid_line(shared) == line
    some = stats([1.0, 1.0, 1.0])
    assert some.layers is not None
    some.layers = dataclasses.replace(some.layers, hybrid=shared)
    assert f"             GPU = {line}" in timing_summary(some, 0, 0)
    alone = HybridStats(2, gpu, np.zeros(3), np.zeros(3), 1 << 20, "card")
    assert hybrid_line(alone) == "layer 2 on card, 1 MiB of VRAM; no neurons left to the CPU"


def test_key_rows_are_named_where_some_were_not_read() -> None:
    layers = LayerStats(1, np.array([0.25, 0.35]), np.array([0.1, 0.2]), np.array([1.0]), np.array([4.0]))
    assert share_line(layers) == "15.0 % (layers 0-1: 10 20), key rows of 30.0 %; 25.0 % of the feed-forward bytes read"
