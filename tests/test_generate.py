"""generate.py: where text ends, what the cache saves, and what an interruption leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fakes import CONTROL, EOG2, ByteTokenizer, FakeEngine, HashEngine, ScriptedEngine
from hypothesis import given
from hypothesis import strategies as st

from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.generate import ContextFull, GenerationStats, Session, StopFilter
from hotcold.runtime.sampling import Sampler, SamplingParams

GREEDY = SamplingParams(temperature=0)


def session(engine: FakeEngine) -> Session:
    return Session(engine, ByteTokenizer())  # type: ignore[arg-type]


def pieces(engine: FakeEngine, prompt: Sequence[int], **options: Any) -> list[str]:
    return list(session(engine).generate(prompt, Sampler(GREEDY), **options))


def test_text_ends_at_any_end_of_generation_token() -> None:
    for eog in ByteTokenizer.eog_ids:
        stats = GenerationStats()
        assert pieces(ScriptedEngine(b"hello", 2, eog), [1, 2], stats=stats) == list("hello")
        assert (stats.stop_reason, stats.prompt_tokens, stats.generated_tokens, stats.eval_runs) == ("eog", 2, 5, 5)
        assert stats.layers is not None and stats.layers.computed.tolist() == [0.25, 0.5]


def test_ignore_eog_makes_the_model_choose_another_token() -> None:
    stats = GenerationStats()
    out = pieces(ScriptedEngine(b"hi", 1, EOG2), [1], ignore_eog=True, max_tokens=4, stats=stats)
    assert "".join(out) == "hixx"
    assert stats.stop_reason == "length"


@pytest.mark.parametrize(("max_tokens", "text"), [(0, ""), (1, "h"), (3, "hel"), (-1, "hello"), (None, "hello")])
def test_max_tokens(max_tokens: int | None, text: str) -> None:
    engine, stats = ScriptedEngine(b"hello", 3), GenerationStats()
    assert "".join(pieces(engine, [1, 2, 3], max_tokens=max_tokens, stats=stats)) == text
    assert engine.cache[:3] == [1, 2, 3]  # evaluated also when nothing is wanted
    assert stats.stop_reason == ("eog" if text == "hello" else "length")


def test_pieces_are_whole_characters_and_an_unfinished_one_comes_at_the_end() -> None:
    assert pieces(ScriptedEngine("aé😀".encode(), 1), [1]) == ["a", "é", "😀"]
    assert pieces(ScriptedEngine("é😀".encode()[:-1], 1), [1]) == ["é", "�"]


def test_control_tokens_are_not_text() -> None:
    assert "".join(pieces(ScriptedEngine([104, CONTROL, 105], 1), [1])) == "hi"


def test_generation_stops_where_the_context_ends_and_says_so() -> None:
    engine, stats = HashEngine(), GenerationStats()
    engine.n_ctx = 10
    text = "".join(pieces(engine, [1] * 7, stats=stats))
    assert stats.stop_reason == "context"
    assert len(text) == 4  # the last one needs no place in the cache
    assert engine.n_past == 10


def test_a_prompt_as_long_as_the_context_gives_one_token() -> None:
    engine = HashEngine()
    engine.n_ctx = 10
    assert len(pieces(engine, [1] * 10)) == 1


def test_a_longer_prompt_is_refused_with_numbers_and_nothing_is_evaluated() -> None:
    engine = HashEngine()
    engine.n_ctx = 10
    with pytest.raises(ContextFull, match=r"11 tokens .* holds 10"):
        pieces(engine, [1] * 11)
    assert engine.forwards == []


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(HotcoldError, match="no tokens"):
        pieces(HashEngine(), [])


def test_only_the_new_suffix_is_evaluated() -> None:
    engine = HashEngine()
    ours, stats = session(engine), GenerationStats()
    first = "".join(ours.generate([1, 2, 3], Sampler(GREEDY), max_tokens=4))
    engine.forwards.clear()
    longer = [1, 2, 3, *first.encode(), *[9] * 6]
    second = "".join(ours.generate(longer, Sampler(GREEDY), max_tokens=4, stats=stats))
    assert second == "".join(pieces(HashEngine(), longer, max_tokens=4))
    assert engine.forwards == [7, 1, 1, 1]  # the last token of the first text was never evaluated
    assert stats.reused_tokens == 6


def test_a_text_read_again_is_read_by_the_kernels_of_many_tokens() -> None:
    engine = HashEngine()
    ours = session(engine)
    for _ in range(2):
        engine.forwards.clear()
        list(ours.generate(list(range(1, 11)), Sampler(GREEDY), max_tokens=3))
    assert engine.forwards == [6, 1, 1]
    engine.forwards.clear()
    list(ours.generate([1, 2, 3], Sampler(GREEDY), max_tokens=3))
    assert engine.forwards == [3, 1, 1]


@pytest.mark.parametrize("prompt", [[1, 2, 3, 4], [1, 2, 3], [1, 2], [1, 2, 9, 4, 5], [9]])
def test_any_other_prompt_on_a_used_cache_gives_what_a_fresh_one_gives(prompt: list[int]) -> None:
    engine = HashEngine()
    ours = session(engine)
    list(ours.generate([1, 2, 3, 4], Sampler(GREEDY), max_tokens=5))
    out = "".join(ours.generate(prompt, Sampler(GREEDY), max_tokens=5))
    assert out == "".join(pieces(HashEngine(), prompt, max_tokens=5))


def test_generations_that_take_turns_do_not_disturb_each_other() -> None:
    ours = session(HashEngine())
    a = ours.generate([1, 2], Sampler(GREEDY), max_tokens=6)
    b = ours.generate([1, 3], Sampler(GREEDY), max_tokens=6)
    mixed = list(zip(a, b, strict=True))
    assert [x for x, _ in mixed] == pieces(HashEngine(), [1, 2], max_tokens=6)
    assert [y for _, y in mixed] == pieces(HashEngine(), [1, 3], max_tokens=6)


def test_a_cache_emptied_by_others_is_filled_again() -> None:
    engine = HashEngine()
    ours = session(engine)
    running = ours.generate([1, 2], Sampler(GREEDY), max_tokens=6)
    out = [next(running), next(running)]
    engine.truncate(0)
    out += running
    assert out == pieces(HashEngine(), [1, 2], max_tokens=6)


@pytest.mark.parametrize("where", ["prompt", "step"])
def test_an_interruption_leaves_the_session_usable(where: str) -> None:
    engine = HashEngine()
    ours, stats = session(engine), GenerationStats()
    running = ours.generate([1, 2], Sampler(GREEDY), max_tokens=6, stats=stats)
    if where == "step":
        next(running)
    engine.interrupt_in = 1
    with pytest.raises(KeyboardInterrupt):
        list(running)
    assert stats.stop_reason == ""
    again = "".join(ours.generate([1, 2], Sampler(GREEDY), max_tokens=6))
    assert again == "".join(pieces(HashEngine(), [1, 2], max_tokens=6))


def test_an_iterator_that_is_dropped_leaves_the_session_usable() -> None:
    ours = session(HashEngine())
    running = ours.generate([1, 2], Sampler(GREEDY))
    next(running)
    running.close()  # type: ignore[attr-defined]
    assert "".join(ours.generate([7], Sampler(GREEDY), max_tokens=3)) == "".join(
        pieces(HashEngine(), [7], max_tokens=3)
    )


def test_the_prompt_counts_for_the_repeat_penalty() -> None:
    sampler = Sampler(SamplingParams(temperature=0, repeat_penalty=1.1))
    list(session(ScriptedEngine(b"a", 2)).generate([120, 5], sampler, ignore_eog=True, max_tokens=1))
    assert np.flatnonzero(sampler._penalized(np.ones(256, np.float32)) < 1).tolist() == [5, 97, 120]


def test_stop_string_ends_the_text_before_it() -> None:
    stats = GenerationStats()
    out = pieces(ScriptedEngine(b"one two three", 1), [1], stop=["two", "zzz"], stats=stats)
    assert "".join(out) == "one "
    assert stats.stop_reason == "stop"


def test_text_held_back_for_a_stop_string_comes_when_it_was_none() -> None:
    assert "".join(pieces(ScriptedEngine(b"a tw", 1), [1], stop="two")) == "a tw"


@pytest.mark.parametrize("stop", [[""], [3], ["ok", ""]])
def test_empty_stop_strings_are_refused(stop: list[Any]) -> None:
    with pytest.raises(HotcoldError, match="stop strings"):
        StopFilter(stop)


@given(
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("abc", max_size=5), max_size=12),
)
def test_stop_filter_gives_the_same_for_any_pieces(stops: list[str], parts: list[str]) -> None:
    text = "".join(parts)
    ends = sorted((text.find(s) + len(s), text.find(s)) for s in stops if s in text)
    expected = text[: ends[0][1]] if ends else text
    filter_, out = StopFilter(stops), ""
    for part in parts:
        out += filter_.put(part)
        assert expected.startswith(out)
    assert filter_.hit == bool(ends)
    assert out + filter_.flush() == expected
