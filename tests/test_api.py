"""api.py on tiny real models: the names others build on, and what happens at the edges."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import token_ids

import hotcold.runtime
from hotcold.runtime import ChatTemplate, HotcoldError, Model, Tokenizer, api
from hotcold.runtime.cli import main
from hotcold.runtime.sampling import Sampler, SamplingParams

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def path(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("relu")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    # F32 keys and values: texts evaluated in other blocks give the same logits but for rounding of sums
    with Model.open(path, threads=1, kv_type="f32") as m:
        yield m


def test_the_package_exports_the_public_names() -> None:
    assert {"Model", "Tokenizer", "ChatTemplate"} <= set(dir(hotcold.runtime))
    assert Tokenizer.__module__ == "hotcold.runtime.tokenizer" and ChatTemplate.__module__ == "hotcold.runtime.chat"
    with pytest.raises(AttributeError, match="Modle"):
        _ = hotcold.runtime.Modle


def test_importing_the_package_loads_no_compiler() -> None:
    code = "import sys, hotcold.runtime; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_logits_have_one_row_per_token(model: Model) -> None:
    ids = token_ids(9)
    logits = model.logits(ids)
    assert logits.shape == (9, model.config.n_vocab) and logits.dtype == np.float32
    assert np.array_equal(model.logits(np.array(ids, np.int32)), logits)
    assert np.allclose(model.logits(ids[:4]), logits[:4], rtol=1e-4, atol=1e-4)


def test_text_and_its_token_ids_are_the_same_prompt(model: Model) -> None:
    ids = model.tokenizer.encode("the inn")
    a = "".join(model.generate("the inn", max_tokens=12, **GREEDY))
    b = "".join(model.generate(np.array(ids), 12, **GREEDY))
    assert a == b and a


def test_generation_is_what_logits_say_step_by_step(model: Model) -> None:
    ids = token_ids(5)
    stats_text = "".join(model.generate(ids, max_tokens=6, **GREEDY))
    tokens = list(ids)
    for _ in range(6):
        row = model.logits(tokens)[-1]
        row[list(model.tokenizer.eog_ids)] = -np.inf
        tokens.append(int(row.argmax()))
    stream = model.tokenizer.stream(continues=True)
    text = "".join(stream.put(t) for t in tokens[5:] if not model.tokenizer.is_control(t)) + stream.flush()
    assert stats_text == text


def test_logits_and_other_generations_do_not_disturb_one_in_progress(model: Model) -> None:
    alone = list(model.generate("abc", max_tokens=10, **GREEDY))
    other = list(model.generate("xyz", max_tokens=10, **GREEDY))
    mixed, mixed_other = [], []
    running, running_other = model.generate("abc", max_tokens=10, **GREEDY), model.generate("xyz", 10, **GREEDY)
    for piece in running:
        mixed.append(piece)
        model.logits(token_ids(4))
        mixed_other += [p for p in [next(running_other, None)] if p]
    mixed_other += running_other
    assert "".join(mixed) == "".join(alone)
    assert "".join(mixed_other) == "".join(other)


def test_threads_take_turns(model: Model) -> None:
    prompts = ["one", "two", "three"]
    alone = ["".join(model.generate(p, max_tokens=15, **GREEDY)) for p in prompts]
    out: dict[int, str] = {}

    def work(i: int) -> None:
        out[i] = "".join(model.generate(prompts[i], max_tokens=15, **GREEDY))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [out[i] for i in range(3)] == alone


def test_a_generation_counts_its_own_tokens(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when another one begins while it is being set up."""
    alone = list(model.generate("abc", 10, **GREEDY))
    others: list[Iterator[str]] = []

    def sampler(params: SamplingParams) -> Sampler:
        if not others:
            others.append(iter(()))
            others[0] = model.generate("xyz", 10, **GREEDY)
        return Sampler(params)

    monkeypatch.setattr(api, "Sampler", sampler)
    running = model.generate("abc", 10, **GREEDY)
    list(others[0])
    assert list(running) == alone


def test_two_models_in_one_process(model: Model, tiny_model: Callable[..., Path]) -> None:
    ids = token_ids(7)
    before = model.logits(ids)
    with Model.open(tiny_model("qwen2"), threads=2, n_ctx=64) as other:
        theirs = other.logits(ids)
        assert np.array_equal(model.logits(ids), before)
        assert np.array_equal(other.logits(ids), theirs)
        assert other.n_ctx == 64
    assert np.array_equal(model.logits(ids), before)


def test_chat_applies_the_template_and_reuses_what_it_said(model: Model) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = "".join(model.chat(messages, max_tokens=8, temperature=0))
    rendered = model.template.encode(model.tokenizer, messages, add_generation_prompt=True)
    assert "".join(model.generate(rendered, 8, temperature=0)) == answer
    more = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
    list(model.chat(more, max_tokens=2, temperature=0))
    assert model.stats.reused_tokens >= len(rendered)


def test_seeds(model: Model) -> None:
    def text(seed: int | None) -> str:
        return "".join(model.generate("a", 24, temperature=2, seed=seed, ignore_eos=True))

    assert text(3) == text(3)
    assert text(3) != text(4)
    assert text(None) != text(None)


def test_a_keyword_that_does_not_exist_is_refused(model: Model) -> None:
    with pytest.raises(TypeError, match="temprature"):
        model.generate("a", temprature=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="ignore_eos"):
        model.chat([{"role": "user", "content": "a"}], ignore_eos=True)  # type: ignore[call-arg]


def test_text_stops_before_a_stop_string(model: Model) -> None:
    whole = "".join(model.generate("the inn", 30, **GREEDY))
    stop = whole[5:8]
    assert "".join(model.generate("the inn", 30, stop=stop, **GREEDY)) == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"temperature": "hot"}, "temperature"), ({"top_p": 0}, "top_p"), ({"stop": [""]}, "stop strings"),
        ({"max_tokens": "many"}, "max_tokens"), ({"seed": -5}, "seed"), ({"top_k": 1.5}, "top_k"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_at_once(model: Model, arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(HotcoldError, match=what):
        model.generate("a", **arguments)


@pytest.mark.parametrize("ids", [[], [[1, 2]], [1.5], ["a"], [10**6], [-1], [True, False]])
def test_wrong_token_ids_are_refused(model: Model, ids: Any) -> None:
    with pytest.raises(HotcoldError):
        model.logits(ids)
    with pytest.raises(HotcoldError):
        list(model.generate(ids, 1))
    assert model.logits([1]).shape[0] == 1  # and the model goes on


def test_texts_longer_than_the_context_are_refused_with_numbers(path: Path) -> None:
    with Model.open(path, threads=1, n_ctx=16) as m:
        for call in (lambda ids: m.logits(ids), lambda ids: list(m.generate(ids, 1))):
            with pytest.raises(HotcoldError, match=r"17 tokens .* holds 16"):
                call([1] * 17)
        assert m.logits([1] * 16).shape[0] == 16


def test_after_close_every_use_is_an_error(path: Path) -> None:
    m = Model.open(path, threads=1)
    running = m.generate("abc", **GREEDY)
    next(running)
    m.close()
    m.close()
    uses: list[Callable[[], Any]] = [
        lambda: m.logits([1]), lambda: m.generate("a"), lambda: m.chat([{"role": "user", "content": "a"}]),
        lambda: next(running), lambda: m.n_ctx, lambda: m.__enter__(),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(HotcoldError, match="closed"):
            use()


def test_files_that_are_no_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HotcoldError, match="none.gguf"):
        Model.open(tmp_path / "none.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"not a model at all")
    with pytest.raises(HotcoldError, match="bad.gguf"):
        Model.open(tmp_path / "bad.gguf")


@pytest.mark.parametrize(
    "options", [{"sparsity": "guess"}, {"threads": 0}, {"n_ctx": -1}, {"kv_type": "f8"}, {"threads": 10**6}]
)
def test_wrong_options_are_refused(path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(HotcoldError):
        Model.open(path, **options)


def test_a_file_without_vocabulary_gives_logits(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "checkpoint")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    out = tmp_path / "model.gguf"
    assert main(["convert", str(folder), "-o", str(out), "--no-vocab"]) == 0
    with Model.open(out) as model:
        assert model.logits([1, 2, 3]).shape == (3, model.config.n_vocab)
        with pytest.raises(HotcoldError, match="no vocabulary"):
            _ = model.tokenizer
        for prompt in ("text", [1, 2]):
            with pytest.raises(HotcoldError, match="no vocabulary"):
                model.generate(prompt)
