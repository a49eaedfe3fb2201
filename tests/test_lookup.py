"""lookup.py: where drafts come from and how long they are; generate.py with them: never another text."""

from __future__ import annotations

import io
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import EOG, ByteTokenizer, FakeEngine, FakeModel, RepeatingEngine, ScriptedEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from hotcold.runtime import lookup
from hotcold.runtime.api import Model
from hotcold.runtime.buffers import FEW_TOKENS
from hotcold.runtime.cli import main
from hotcold.runtime.console import TextOut
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.generate import GenerationStats, Session
from hotcold.runtime.lookup import LONGEST, MAX_DRAFT, NGRAMS, DraftPolicy, Lookup, TokenIndex, draft_limit
from hotcold.runtime.repl import Repl, ReplOptions
from hotcold.runtime.sampling import Sampler, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import measure_lookup  # noqa: E402

GREEDY = SamplingParams(temperature=0)
PROMPT = list(b"abcabdab")


class Eager(DraftPolicy):
    """Drafts whatever it may, so that tests do not depend on what runs cost."""

    def length(self, agreed: int, most: int) -> int:
        return most


def session(engine: FakeEngine) -> Session:
    ours = Session(engine, ByteTokenizer())  # type: ignore[arg-type]
    ours._policy = Eager()
    return ours


# --- limits


@pytest.mark.parametrize(
    ("value", "limit"), [(False, 0), (0, 0), (1, 1), (np.int32(3), 3), (MAX_DRAFT, MAX_DRAFT), (True, MAX_DRAFT)]
)
def test_limits(value: Any, limit: int) -> None:
    assert draft_limit(value) == limit


@pytest.mark.parametrize("value", [-1, MAX_DRAFT + 1, 2.0, "3", None, 10**30])
def test_wrong_limits_are_refused_with_what_is_allowed(value: Any) -> None:
    with pytest.raises(HotcoldError, match=f"0 \\(off\\) to {MAX_DRAFT} tokens, got"):
        draft_limit(value)


def test_the_engine_checks_the_longest_draft_in_one_run() -> None:
    assert MAX_DRAFT + 1 == FEW_TOKENS


# --- the index


def naive(tokens: list[int]) -> tuple[int, int]:
    end = len(tokens)
    for n in NGRAMS:
        for at in range(end - 1, n - 1, -1):
            if tokens[at - n : at] == tokens[end - n :]:
                while n < min(LONGEST, at) and tokens[at - 1 - n] == tokens[end - 1 - n]:
                    n += 1
                return at, n
    return 0, 0


@given(st.lists(st.integers(0, 3), max_size=60))
def test_the_index_finds_what_a_scan_of_the_text_finds(tokens: list[int]) -> None:
    index = TokenIndex()
    for n, token in enumerate(tokens):
        index.append(token)
        assert index.find() == naive(tokens[: n + 1])
    assert TokenIndex(tokens).find() == naive(tokens)


def test_a_token_costs_the_index_the_same_in_a_long_text() -> None:
    """Counted in tokens looked at and in memory, not in seconds."""

    class Counted(list[int]):
        touched = 0

        def __getitem__(self, at: Any) -> Any:
            got = super().__getitem__(at)
            Counted.touched += len(got) if isinstance(at, slice) else 1
            return got

    index = TokenIndex()
    index.tokens = Counted()
    text = np.random.default_rng(0).integers(0, 9, 12000).tolist()
    per_token = []
    tracemalloc.start()
    for part in (text[:6000], text[6000:]):
        Counted.touched = 0
        for token in part:
            index.append(token)
            index.find()
        per_token.append(Counted.touched / len(part))
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert per_token[1] < 1.1 * per_token[0] < 60
    assert memory < 6e6


# --- drafts


def test_a_draft_is_what_followed_last_time() -> None:
    text = Lookup(list(b"abcX abcY ab"), Eager())
    assert bytes(text.draft(4)) == b"cY a"
    text.append(ord("c"))
    assert bytes(text.draft(4)) == b"Y ab"
    text.append(ord("Z"))
    assert text.draft(4) == []


def test_a_draft_beyond_the_end_of_the_text_repeats_its_period() -> None:
    assert bytes(Lookup(list(b"abcabc"), Eager()).draft(7)) == b"abcabca"
    assert bytes(Lookup(list(b"xxx"), Eager()).draft(3)) == b"xxx"


def test_a_draft_ends_before_what_ends_a_text() -> None:
    assert Lookup([1, 2, 3, EOG, 5, 1, 2], Eager()).draft(5, {EOG}) == [3]
    assert Lookup([1, 2, EOG, 5, 1, 2], Eager()).draft(5, {EOG}) == []


def test_short_texts_have_none() -> None:
    for n in range(4):
        assert Lookup(list(range(n)), Eager()).draft(7) == []


# --- the policy


def test_nothing_is_drafted_where_guesses_are_wrong_and_much_where_they_are_right() -> None:
    policy = DraftPolicy()
    for _ in range(100):
        policy.judge(2, False)
    assert policy.length(2, MAX_DRAFT) == 0
    for agreed in range(2, LONGEST + 1):
        for _ in range(100):
            policy.judge(agreed, True)
    assert policy.length(2, MAX_DRAFT) == MAX_DRAFT
    assert policy.length(2, 0) == 0


def test_guesses_are_judged_where_nothing_is_drafted() -> None:
    """So a text that begins to repeat itself is noticed without a run that checks drafts in vain."""
    policy = DraftPolicy()
    policy.rates = [0.0] * (LONGEST + 1)
    text = Lookup(list(b"abcdefgh" * 3), policy)
    assert text.draft(MAX_DRAFT) == []
    for token in b"abcdefgh" * 6:
        text.append(token)
    assert len(text.draft(MAX_DRAFT)) == MAX_DRAFT


def test_a_draft_is_as_long_as_its_cost_allows() -> None:
    lengths = []
    for cost in (0.02, 0.3, 0.6, 0.9, 1.2):
        policy = DraftPolicy()
        policy.rates = [0.8] * (LONGEST + 1)
        policy.measured(1, 1.0)
        policy.measured(8, 1 + 7 * cost)
        assert policy.cost == pytest.approx(cost)
        lengths.append(policy.length(5, MAX_DRAFT))
    assert lengths[0] == MAX_DRAFT and lengths[-1] == 0
    assert lengths == sorted(lengths, reverse=True) and len(set(lengths)) > 2


def test_a_cost_once_too_high_is_measured_again_later() -> None:
    policy = DraftPolicy()
    policy.measured(1, 1.0)
    policy.measured(8, 100.0)  # something else used the machine
    policy.rates = [0.95] * (LONGEST + 1)
    assert policy.length(5, MAX_DRAFT) == 0
    for _ in range(500):
        policy.measured(1, 1.0)
    assert policy.length(5, MAX_DRAFT) > 0


def test_outliers_and_coarse_clocks_change_little() -> None:
    policy = DraftPolicy()
    for seconds in (0.0, 1.0, 1.0, 1000.0, 0.0, 1.0):
        policy.measured(1, seconds)
    policy.measured(8, 0.0)
    assert policy.cost is None
    policy.measured(8, 3.1)
    assert policy.cost == pytest.approx(0.3, abs=0.05)


# --- generating with drafts


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0, 0.5, 1, 3]),
    st.sampled_from([1.0, 1.3]),
    st.sampled_from([0, 1, 2, 13, 60, None]),
    st.booleans(),
    st.sampled_from([(), "ba", ["cab", "d"]]),
    st.integers(1, MAX_DRAFT),
    st.sampled_from([12, 30, 100]),
    st.lists(st.integers(97, 100), min_size=1, max_size=12),
)
def test_text_random_numbers_and_cache_are_those_without(
    seed: int, temperature: float, penalty: float, max_tokens: int | None, ignore_eog: bool,
    stop: Any, most: int, n_ctx: int, prompt: list[int],
) -> None:  # fmt: skip
    params = SamplingParams(temperature=temperature, seed=seed, repeat_penalty=penalty, repeat_last_n=8)
    kept = []
    for limit in (0, most):
        engine, stats, sampler = RepeatingEngine(), GenerationStats(), Sampler(params)
        engine.n_ctx = n_ctx
        ours = session(engine)
        text = list(ours.generate(prompt, sampler, max_tokens=max_tokens, ignore_eog=ignore_eog, stop=stop,
                                  lookup=limit, stats=stats))  # fmt: skip
        cached = ours.n_cached
        ours._common([])
        kept.append((
            text, stats.stop_reason, stats.generated_tokens, stats.eval_tokens, cached, engine.cache,
            ours._cached, sampler._rng.bit_generator.state, list(sampler._last),
        ))  # fmt: skip
        assert cached == engine.n_past
        assert 0 <= stats.accepted <= stats.drafted
        assert limit or stats.drafted == 0
    assert kept[0] == kept[1]


def test_fewer_runs_give_the_same_text() -> None:
    stats = GenerationStats()
    engine = ScriptedEngine(b"abcdefgh" * 6, len(PROMPT))
    text = "".join(session(engine).generate(PROMPT, Sampler(GREEDY), lookup=True, stats=stats))
    assert text == "abcdefgh" * 6 and stats.stop_reason == "eog"
    assert stats.eval_tokens == 48 and stats.eval_runs < 20
    assert stats.eval_runs + stats.accepted == 48 and stats.lookup == MAX_DRAFT
    assert stats.eval_rate == pytest.approx(48 / stats.eval_seconds)


@pytest.mark.parametrize("most", [1, 3, MAX_DRAFT])
def test_no_run_is_longer_than_asked_for_nor_than_there_is_room(most: int) -> None:
    engine = ScriptedEngine(b"ab" * 50, len(PROMPT))
    engine.n_ctx = 40
    list(session(engine).generate(PROMPT, Sampler(GREEDY), lookup=most))
    assert max(engine.forwards[1:]) == most + 1 and engine.n_past == 40
    engine = ScriptedEngine(b"ab" * 50, len(PROMPT))
    list(session(engine).generate(PROMPT, Sampler(GREEDY), lookup=most, max_tokens=21))
    assert sum(engine.forwards[1:]) == 20  # tokens are not drafted beyond max_tokens


@pytest.mark.parametrize("taken", range(0, 30, 3))
def test_an_answer_broken_off_anywhere_leaves_the_next_turn_as_it_was(taken: int) -> None:
    """Dropped iterators too: the same random numbers, the same cache, the same next answer."""
    ends = []
    for limit in (0, MAX_DRAFT):
        engine, sampler = RepeatingEngine(), Sampler(SamplingParams(temperature=1, seed=5))
        ours = session(engine)
        first = ours.generate(PROMPT, sampler, lookup=limit, ignore_eog=True)
        text = "".join(islice(first, taken))
        used = ours.n_cached
        longer = [*PROMPT, *text.encode(), *b"xyzabcab"]
        engine.forwards.clear()
        ends.append((text, used, "".join(ours.generate(longer, sampler, lookup=limit, max_tokens=20))))
        assert engine.forwards[0] == len(longer) - used
    assert ends[0] == ends[1]


@pytest.mark.parametrize("nth", range(1, 12))
def test_an_interrupted_run_leaves_the_session_usable(nth: int) -> None:
    engine = RepeatingEngine()
    ours = session(engine)
    engine.interrupt_in = nth
    with pytest.raises(KeyboardInterrupt):
        list(ours.generate(PROMPT, Sampler(GREEDY), lookup=True, ignore_eog=True))
    assert ours.n_cached <= engine.n_past
    for limit in (MAX_DRAFT, 0):
        again = list(ours.generate(PROMPT, Sampler(GREEDY), lookup=limit, max_tokens=30, ignore_eog=True))
        assert again == list(session(RepeatingEngine()).generate(PROMPT, Sampler(GREEDY), max_tokens=30,
                                                                 ignore_eog=True))  # fmt: skip


def test_generations_that_take_turns_do_not_disturb_each_other() -> None:
    def start(ours: Session, prompt: bytes, limit: int) -> Iterator[str]:
        return ours.generate(list(prompt), Sampler(GREEDY), max_tokens=40, ignore_eog=True, lookup=limit)

    ours = session(RepeatingEngine())
    mixed: list[list[str]] = [[], []]
    for pair in zip(start(ours, b"abcabc", MAX_DRAFT), start(ours, b"bcabca", MAX_DRAFT), strict=True):
        for out, piece in zip(mixed, pair, strict=True):
            out.append(piece)
        if len(mixed[0]) == 20:
            ours.all_logits([1, 2, 3])
    assert mixed == [list(start(session(RepeatingEngine()), p, 0)) for p in (b"abcabc", b"bcabca")]


def test_the_context_shown_does_not_count_rejected_tokens() -> None:
    ours = session(ScriptedEngine(b"abcz" + b"q" * 20, len(PROMPT)))
    running = ours.generate(PROMPT, Sampler(GREEDY), lookup=True)
    for n in range(6):
        next(running)
        assert ours.n_cached == len(PROMPT) + n


# --- with a real engine


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Iterator[Model]:
    with Model.open(tiny_model("relu"), threads=2) as m:
        yield m


@pytest.mark.parametrize("temperature", [0, 0.5])
def test_bits_are_those_of_single_tokens(model: Model, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of logits that is sampled, not only the text."""
    rows: list[np.ndarray] = []
    sample = Sampler.sample

    def of_four(self: Sampler, row: np.ndarray) -> int:
        """Four tokens only, so that a text of random weights repeats itself."""
        rows.append(row.copy())
        row[:40] = row[44:] = -np.inf
        return sample(self, row)

    monkeypatch.setattr(Sampler, "sample", of_four)
    monkeypatch.setattr(lookup.DraftPolicy, "length", Eager.length)
    ids = [*model.tokenizer.encode("the inn the inn the sea the inn"), 5, 6, 7, 5, 6, 7, 5, 6]
    texts, seen, accepted = [], [], 0
    for limit in (False, True, 3):
        rows.clear()
        model.session.forget()
        texts.append("".join(model.generate(ids, 60, ignore_eos=True, lookup=limit, temperature=temperature, seed=3)))
        seen.append(np.array(rows).view(np.int32))
        accepted += model.stats.accepted
        assert model.stats.eval_tokens == 59
    assert texts[0] == texts[1] == texts[2]
    assert np.array_equal(seen[0], seen[1]) and np.array_equal(seen[0], seen[2])
    assert accepted > 20


def test_chat_takes_it_too_and_wrong_values_are_refused_at_once(model: Model) -> None:
    messages = [{"role": "user", "content": "the inn the inn"}]
    plain = list(model.chat(messages, 20, temperature=0))
    model.session.forget()
    assert list(model.chat(messages, 20, temperature=0, lookup=2)) == plain
    assert model.stats.lookup == 2
    for call in (model.generate, model.chat):
        with pytest.raises(HotcoldError, match="lookup"):
            call(messages if call == model.chat else "a", lookup=8)  # type: ignore[operator]


def test_the_commands_take_it(model: Model, tiny_model: Callable[..., Path], capfd: pytest.CaptureFixture[str],
                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main([*arguments])
        except SystemExit as leave:
            code = int(leave.code or 0)
        return code, *capfd.readouterr()

    path, common = str(tiny_model("relu")), ("-p", "the inn", "-n", "12", "--temp", "0", "-t", "1")
    plain = run("run", path, *common)
    for option in (["--lookup", path], ["--lookup", "3", path], [path, "--lookup=7"], [path, "--lookup"]):
        code, out, err = run("run", *option, *common)
        assert (code, out) == plain[:2] and "lookup = " in err
    assert "lookup = " not in run("run", path, "--lookup", "0", *common)[2]
    code, out, err = run("chat", "--lookup", path, *common)
    assert code == 0 and out
    for wrong in ("8", "-1"):
        code, _, err = run("run", path, "--lookup", wrong, *common)
        assert code == 2 and f"0 (off) to {MAX_DRAFT} tokens, got {wrong}" in err and err.count("\n") == 2
    assert "unrecognized arguments: x" in run("run", path, "--lookup", "x", *common)[2]


def test_stats_of_a_conversation_say_what_drafts_saved() -> None:
    said: list[str] = []
    model = FakeModel(RepeatingEngine())
    options = ReplOptions(GREEDY, max_tokens=20, ignore_eos=True, lookup=MAX_DRAFT)
    repl = Repl(model, options, TextOut(io.StringIO()), said.append)  # type: ignore[arg-type]
    repl.handle("abcabcabc")
    repl.handle("/stats")
    assert any(line.startswith("lookup: ") and "drafted tokens accepted" in line for line in said)


# --- scripts/measure_lookup.py


def test_the_script_measures_and_checks(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("relu")
    monkeypatch.setattr(measure_lookup, "TASKS", {"again": "the inn the inn the inn"})
    command = ["measure_lookup.py", str(path), "--threads", "1", "--tokens", "8", "--rounds", "1"]
    monkeypatch.setattr("sys.argv", command)
    measure_lookup.main()
    dense, exact = capsys.readouterr().out.split("relu-f32.gguf, ")[1:]
    for text in (dense, exact):
        assert "| again | 8 | " in text or "| again |" not in text  # the model may end at once
        assert "| 8 | " in text
    assert dense.startswith("dense, 1 threads") and "| 100.0% | 12.5% | 100.0% | 12.5% |" in dense
    rows = [row for row in exact.splitlines() if row[:4] in ("| 1 ", "| 2 ", "| 4 ", "| 8 ")]
    shares = [[float(x.strip(" %")) for x in row.split("|")[4:8]] for row in rows]
    assert len(shares) == 4
    assert [row[0] for row in shares] == sorted(row[0] for row in shares)  # the union grows
    assert shares[0][0] < 60 < shares[-1][0] and shares[-1][1] < shares[0][1]

    monkeypatch.setattr("sys.argv", [*command, "--lookup", "0"])
    with pytest.raises(SystemExit, match="2"):
        measure_lookup.main()
    assert "must be a whole number from 1" in capsys.readouterr().err

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure_lookup, "print_costs", interrupted)
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit, match="130"):
        measure_lookup.main()
    assert capsys.readouterr().err == "measure_lookup: interrupted\n"


def test_the_script_gives_the_union_of_neighbours(tiny_model: Callable[..., Path]) -> None:
    """Of one token it is what the engine itself counts."""
    context = measure_lookup.CONTEXT
    with Model.open(tiny_model("relu"), "exact", threads=1) as one:
        engine = one.session.engine
        ids = [(7919 * i + 13) % one.config.n_vocab for i in range(context + 40)]
        share = measure_lookup.unions(tiny_model("relu"), engine, ids)[1]
        engine.forward(ids[:context], "none")
        engine.reset_stats()
        for token in ids[context:]:
            engine.forward([token])
        stats = engine.layer_stats()
    assert share == pytest.approx((stats.computed.mean(), stats.bytes_share), rel=1e-3)
