"""Profiling: counts are right, belong to their layer, and are the same however the work is divided or interrupted."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from profile_cases import count, planted, random_contexts, recount
from small_models import Spec, make_tensors, write_model

from hotcold.placement import profile_run
from hotcold.placement.identity import model_id
from hotcold.placement.profile import (
    Part,
    Profile,
    check_profile,
    load_profile,
    merge_profiles,
    save_profile,
    skew,
    sparsity,
)
from hotcold.placement.profile_file import State, read_profile, write_profile
from hotcold.placement.profiling import profile_model
from hotcold.runtime import schema
from hotcold.runtime.cli import main
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.corpus import CALIBRATION, HELDOUT, Corpus, cut_contexts, read_corpus, sampled
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.tokenizer import Tokenizer

TEXT = " ".join(f"The {i}th word of a text about {'sea' if i % 3 else 'land'} and {i * 7} ships." for i in range(90))
CTX = 64


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "ships.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("relu", intermediate_size=72)


@pytest.fixture(scope="module")
def whole(model: Path, text: Path) -> Profile:
    """All of the text in one run."""
    return profile_model(model, [text], tokens=None, n_ctx=CTX, samples=100, threads=1)


def same(a: Profile, b: Profile, exactly: bool = False) -> None:
    """Both hold the same counts and samples."""
    assert (a.n_tokens, a.n_pairs, a.model, a.corpus, a.sha256) == (b.n_tokens, b.n_pairs, b.model, b.corpus, b.sha256)
    assert np.array_equal(a.sample_text, b.sample_text)
    for name in ("fired", "pairs", "samples"):
        for layer, (x, y) in enumerate(zip(getattr(a, name), getattr(b, name), strict=True)):
            assert np.array_equal(x, y), (name, layer)
    for x, y in zip(a.magnitude, b.magnitude, strict=True):
        np.testing.assert_allclose(x, y, rtol=0 if exactly else 1e-12)


def profile_of(n_layer: int = 3, n_ff: int = 8, n_samples: int = 4, sha256: str = "a" * 64, total: int = 4) -> Profile:
    """A valid profile of no model, over contexts 0 and 2 of `total`."""
    rng = np.random.default_rng(n_ff)
    fired = tuple(rng.integers(1, 90, n_ff) for _ in range(n_layer))
    return Profile(
        "m" * 64, 100, 98, "a text", sha256, fired, tuple(f // 2 for f in fired), tuple(f * 0.5 for f in fired),
        tuple(rng.standard_normal((n_samples, 6)).astype(np.float16) for _ in range(n_layer)),
        np.sort(rng.choice([0, 2], n_samples)), (Part("a text", sha256, 50, total, 10, np.array([0, 2])),),
    )  # fmt: skip


# --- counts


def test_every_layer_counts_its_own_hot_neurons(tmp_path: Path) -> None:
    path, sets = planted(tmp_path / "planted.gguf")
    contexts = random_contexts(3, 40)
    profile, truth = count(path, contexts), recount(path, contexts)
    assert profile.n_layer == 12 and profile.n_tokens == 93 and profile.n_pairs == 90
    for layer, (own, expected) in enumerate(zip(sets, truth, strict=True)):
        assert expected.margin > 1e-6, "choose another seed: a key is too close to call"
        fired = profile.fired[layer]
        assert np.flatnonzero(fired == 93).tolist() == own["on"]
        assert set(np.flatnonzero(fired).tolist()) <= {*own["on"], *own["free"]}
        assert sorted(np.argsort(-fired, kind="stable")[:5].tolist()) == own["on"]
        assert np.array_equal(fired, expected.fired), layer
        assert np.array_equal(profile.pairs[layer], expected.pairs), layer
        np.testing.assert_allclose(profile.magnitude[layer], expected.magnitude, rtol=1e-3)
    assert len({tuple(s["on"]) for s in sets}) == 12


@pytest.mark.parametrize(
    "spec",
    [
        Spec(activation="fatrelu", threshold=0.5, biases=True),
        Spec(activation="drelu"),
        Spec(activation="relu2", gated=False, arch="arcee"),
        Spec(arch="opt", activation="relu", gated=False, biases=True),
        Spec(activation="relu", layout="stock", gated=False, arch="opt", biases=True),
        Spec(activation="silu", threshold=0.3),
    ],
    ids=lambda s: f"{s.activation}-{s.layout}",
)
def test_counts_equal_a_float64_recount(tmp_path: Path, spec: Spec) -> None:
    path = write_model(tmp_path / "m.gguf", spec)
    contexts = random_contexts(2, 30)
    profile, truth = count(path, contexts), recount(path, contexts)
    for layer, expected in enumerate(truth):
        assert expected.margin > 1e-7, "choose another seed: a key is too close to call"
        assert 0 < profile.fired[layer].sum() < profile.n_tokens * profile.n_ff[layer]
        assert np.array_equal(profile.fired[layer], expected.fired), layer
        assert np.array_equal(profile.pairs[layer], expected.pairs), layer
        np.testing.assert_allclose(profile.magnitude[layer], expected.magnitude, rtol=1e-3, atol=1e-3)


def test_bos_is_computed_but_not_counted(tmp_path: Path) -> None:
    path, _ = planted(tmp_path / "planted.gguf", n_layer=2)
    contexts = random_contexts(2, 20, bos=True)
    profile, truth = count(path, contexts, samples=1000), recount(path, contexts)
    assert profile.n_tokens == 19 + 5 and profile.n_pairs == 18 + 4
    assert profile.sample_text.tolist() == [0] * 19 + [1] * 5
    assert all(np.array_equal(profile.fired[i], truth[i].fired) for i in range(2))


def test_a_context_of_several_blocks_counts_the_pair_across_them(tmp_path: Path) -> None:
    path, sets = planted(tmp_path / "planted.gguf", n_layer=1)
    profile = count(path, dataclasses.replace(random_contexts(2, 300), n_ctx=300), samples=7)
    on = sets[0]["on"]
    assert profile.n_tokens == 400
    assert set(profile.pairs[0][on].tolist()) == {profile.n_pairs}


def test_samples_are_the_inputs_of_evenly_spread_tokens(tmp_path: Path) -> None:
    path, _ = planted(tmp_path / "planted.gguf", n_layer=2)
    contexts = random_contexts(4, 30)
    every, some = count(path, contexts, samples=1000), count(path, contexts, samples=25)
    assert len(every.sample_text) == every.n_tokens == 100 and len(some.sample_text) == 25
    rows = np.flatnonzero(np.isin(np.arange(100), np.arange(3, 100, 4)))
    for layer in range(2):
        assert np.array_equal(some.samples[layer], every.samples[layer][rows])


@pytest.mark.parametrize(("limit", "total"), [(0, 50), (7, 50), (50, 50), (49, 50), (99, 50), (1, 10**12)])
def test_sampling_keeps_exactly_the_limit_whoever_counts(limit: int, total: int) -> None:
    if total > 1000:
        assert len(sampled(total - 3, 3, limit, total)) == 1
        return
    at_once = sampled(0, total, limit, total)
    assert len(at_once) == min(limit, total)
    in_parts = [a + sampled(a, 5, limit, total) for a in range(0, total, 5)]
    assert np.array_equal(np.concatenate(in_parts), at_once)


def test_sparsity_and_skew() -> None:
    p = dataclasses.replace(profile_of(1, 4), n_tokens=10, fired=(np.array([10, 0, 0, 10]),))
    assert sparsity(p).tolist() == [0.5]
    assert skew(np.array([10, 0, 0, 10])) == 0.5
    assert skew(np.array([80, 10, 10, 0])) == 0.25
    assert skew(np.zeros(4, np.int64)) == 1.0


# --- however the work is divided


def test_shards_merged_are_one_run(model: Path, text: Path, whole: Profile, tmp_path: Path) -> None:
    files = [tmp_path / f"{i}.gguf" for i in (1, 2, 3)]
    options = ["--text", str(text), "--all", "-c", str(CTX), "--samples", "100", "-t", "1"]
    for i, path in enumerate(files):
        assert main(["profile", str(model), *options, "--shard", f"{i + 1}/3", "-o", str(path)]) == 0
    merged = tmp_path / "merged.gguf"
    assert main(["profile", "merge", *map(str, reversed(files)), "-o", str(merged)]) == 0
    same(load_profile(merged), whole)
    two = merge_profiles([load_profile(files[2]), load_profile(files[0])])
    same(merge_profiles([two, load_profile(files[1])]), whole)
    with pytest.raises(HotcoldError, match="counted twice"):
        merge_profiles([two, load_profile(files[0])])


def test_threads_and_workers_do_not_change_counts(model: Path, text: Path, whole: Profile, tmp_path: Path) -> None:
    out = tmp_path / "w.gguf"
    seen: list[int] = []
    found = profile_model(model, [text], tokens=None, n_ctx=CTX, samples=100, threads=2, workers=2, out=out,
                          progress=lambda done, total: seen.append(total - done))  # fmt: skip
    same(found, whole)
    same(load_profile(out), whole)
    assert seen[-1] == 0 and sorted(seen, reverse=True) == seen
    assert [p.name for p in tmp_path.iterdir()] == ["w.gguf"]
    same(profile_model(model, [text], tokens=None, n_ctx=CTX, samples=100, threads=2), whole, exactly=True)


def test_fewer_tokens_are_taken_evenly_from_the_text(model: Path, text: Path) -> None:
    with open_gguf(model) as file:
        tokenizer = Tokenizer.from_gguf(file)
    every = cut_contexts(read_corpus([text]), tokenizer, CTX, None)
    some = cut_contexts(read_corpus([text]), tokenizer, CTX, 3 * CTX + 5)
    n = len(every.tokens)
    assert len(some.tokens) == 3
    for i in range(3):
        assert np.array_equal(some.tokens[i], every.tokens[i * n // 3])


def test_documents_do_not_share_a_context(model: Path, tmp_path: Path) -> None:
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    a.write_text(TEXT[:700] + "\f" + TEXT[:300])
    b.write_text(TEXT[:700])
    with open_gguf(model) as file:
        tokenizer = Tokenizer.from_gguf(file)
    corpus = read_corpus([a, b])
    assert corpus.documents == (TEXT[:700], TEXT[:300], TEXT[:700])
    assert corpus.name == "a.txt, b.txt"
    assert corpus.sha256 != read_corpus([b, a]).sha256
    assert read_corpus([b]).sha256 == hashlib.sha256(TEXT[:700].encode()).hexdigest()
    contexts = cut_contexts(corpus, tokenizer, CTX, None)
    starts = [c for c in contexts.tokens if np.array_equal(c[-5:], contexts.tokens[0][-5:])]
    assert len(starts) == 3 and np.array_equal(starts[1][:20], starts[0][:20])


# --- interrupts


def interrupt_after(n: int) -> Callable[[int, int], None]:
    """A progress function that presses Ctrl-C in its n-th call."""
    calls = [0]

    def progress(done: int, total: int) -> None:
        calls[0] += 1
        if calls[0] == n:
            os.kill(os.getpid(), signal.SIGINT)

    return progress


def test_a_stopped_run_goes_on_to_the_same_bits(model: Path, text: Path, whole: Profile, tmp_path: Path) -> None:
    out = tmp_path / "p.gguf"
    settings = dict(tokens=None, n_ctx=CTX, samples=100, threads=1, out=out)
    for resume in (False, True, True):
        with pytest.raises(profile_run.Stopped) as e:
            profile_model(model, [text], resume=resume, progress=interrupt_after(4), **settings)
        assert e.value.kept == read_profile(out)[0].n_tokens > 0
        assert not read_profile(out)[1].complete
    with pytest.raises(HotcoldError, match="is not finished: 9 of"):
        load_profile(out)
    same(profile_model(model, [text], resume=True, **settings), whole, exactly=True)
    same(load_profile(out), whole, exactly=True)
    notes: list[str] = []
    same(profile_model(model, [text], resume=True, notify=notes.append, **settings), whole, exactly=True)
    assert "complete already" in notes[-1]


def test_stopped_workers_keep_what_they_counted(model: Path, text: Path, whole: Profile, tmp_path: Path) -> None:
    out = tmp_path / "p.gguf"
    settings = dict(tokens=None, n_ctx=CTX, samples=100, threads=1, out=out)
    with pytest.raises(profile_run.Stopped) as e:
        profile_model(model, [text], workers=2, progress=interrupt_after(3), **settings)
    assert e.value.kept > 0 and [p.name for p in tmp_path.iterdir()] == ["p.gguf"]
    same(profile_model(model, [text], resume=True, **settings), whole)


def test_a_killed_run_loses_only_what_came_after_the_last_checkpoint(
    model: Path, text: Path, whole: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_run, "EVERY", 0.0)
    monkeypatch.setattr(profile_run, "SHARE", 0.0)
    out = tmp_path / "p.gguf"
    settings = dict(tokens=None, n_ctx=CTX, samples=100, threads=1, out=out)

    class Killed(BaseException):
        pass

    def progress(done: int, total: int) -> None:
        if done > 4 * CTX:
            raise Killed

    with pytest.raises(Killed):
        profile_model(model, [text], progress=progress, **settings)
    assert len(read_profile(out)[0].parts[0].contexts) == 4
    # What workers of a run that was killed leave behind; one of the files is in OUT already.
    kept, state = read_profile(out)
    write_profile(tmp_path / "p.gguf.worker-1", kept, state, force=True)
    other = profile_model(model, [text], **{**settings, "out": None, "shard": (7, 8)})
    write_profile(tmp_path / "p.gguf.worker-2", other, state, force=True)
    same(profile_model(model, [text], resume=True, **settings), whole)
    assert [p.name for p in tmp_path.iterdir()] == ["p.gguf"]


def test_the_command_says_how_to_go_on(model: Path, text: Path, tmp_path: Path) -> None:
    """As a process of its own: exit status and message after SIGINT, then after --resume."""
    out = tmp_path / "p.gguf"
    code = (
        "import sys, os, signal\n"
        "from hotcold.placement import profiling, counting\n"
        "read = counting.Counter.read\n"
        "def once(self, *a):\n"
        "    n = read(self, *a)\n"
        "    if len(self.done) == 2: os.kill(os.getpid(), signal.SIGTERM if 'term' in sys.argv else signal.SIGINT)\n"
        "    return n\n"
        "counting.Counter.read = once\n"
        "from hotcold.runtime.cli import main\n"
        "sys.exit(main([a for a in sys.argv[1:] if a != 'term']))\n"
    )
    command = ["profile", str(model), "--text", str(text), "-c", str(CTX), "-t", "1", "-o", str(out)]
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
    assert f"{2 * (CTX - 1)} tokens are kept" in done.stderr and "--resume" in done.stderr
    assert "Traceback" not in done.stderr
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True)
    assert done.returncode == 1 and "--resume goes on with it, --force begins again" in done.stderr
    assert main([*command, "--resume"]) == 0
    done = subprocess.run([sys.executable, "-c", code, *command, "--force", "term"], capture_output=True, text=True)
    assert done.returncode == 143, done.stderr


def test_resume_needs_the_same_run(model: Path, text: Path, tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    out, other = tmp_path / "p.gguf", tmp_path / "other.txt"
    other.write_text(TEXT[::-1])
    settings: dict = dict(tokens=None, n_ctx=CTX, samples=100, threads=1, out=out)
    with pytest.raises(profile_run.Stopped):
        profile_model(model, [text], progress=interrupt_after(3), **settings)
    for what, path, source, change in (
        ("model", tiny_model("relu", intermediate_size=80), text, {}),
        ("text", model, other, {}),
        ("--ctx", model, text, {"n_ctx": 32}),
        ("--tokens", model, text, {"tokens": 2 * CTX}),
        ("--samples", model, text, {"samples": 99}),
        ("--shard", model, text, {"shard": (1, 2)}),
    ):
        with pytest.raises(HotcoldError, match=f"begun with another {what}"):
            profile_model(path, [source], resume=True, **{**settings, **change})
    out.write_bytes(out.read_bytes()[:-1000])
    with pytest.raises(HotcoldError, match="cannot resume: .*p.gguf.*; delete the file, or begin again with --force"):
        profile_model(model, [text], resume=True, **settings)


def test_a_worker_that_fails_is_told(tmp_path: Path, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker cannot open the model any more when it starts."""
    moved = tmp_path / "m.gguf"
    moved.write_bytes(model.read_bytes())
    start = profile_run._start

    def remove_first(*args):
        moved.unlink(missing_ok=True)
        return start(*args)

    monkeypatch.setattr(profile_run, "_start", remove_first)
    with pytest.raises(HotcoldError, match="m.gguf: cannot be opened"):
        profile_model(moved, [text], tokens=None, n_ctx=CTX, threads=1, workers=2, out=tmp_path / "p.gguf")
    assert list(tmp_path.iterdir()) == []


class _Dies:
    """In place of _work: ends a worker while it reads what it is to do, as a lack of memory would."""

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return os._exit, (3,)


def test_a_worker_that_dies_at_its_start_is_told(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a job is more than a pipe holds."""
    monkeypatch.setattr(profile_run, "_work", _Dies())
    corpus = Corpus("long", "0" * 64, (TEXT * 30,))
    with pytest.raises(HotcoldError, match=r"a worker died \(exit status 3\).*fewer --workers"):
        profile_model(model, corpus, tokens=None, n_ctx=CTX, threads=1, workers=2, out=tmp_path / "p.gguf")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_workers_start_ends_quietly(model: Path, tmp_path: Path) -> None:
    """A terminal sends it to all processes; the children have not even begun to import."""
    text = tmp_path / "long.txt"
    text.write_text(TEXT * 30)
    code = (
        "import sys, os, signal\n"
        "from hotcold.placement import profile_run\n"
        "start, started = profile_run._start, []\n"
        "def interrupted(*a):\n"
        "    started.append(start(*a))\n"
        "    if len(started) == 2: os.killpg(0, signal.SIGINT)\n"
        "    return started[-1]\n"
        "profile_run._start = interrupted\n"
        "from hotcold.runtime.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = ["profile", str(model), "--text", str(text), "--all", "-c", str(CTX), "-t", "1", "--workers", "2"]
    done = subprocess.run([sys.executable, "-c", code, *command, "-o", str(tmp_path / "p.gguf")], capture_output=True,
                          text=True, start_new_session=True, timeout=120)  # fmt: skip
    assert done.returncode == 130, done.stderr
    assert "stopped before the first context was counted" in done.stderr and "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["long.txt"]


# --- files


def test_a_profile_comes_back_as_it_was(tmp_path: Path) -> None:
    before = profile_of()
    save_profile(tmp_path / "p.gguf", before)
    after = load_profile(tmp_path / "p.gguf")
    same(after, before, exactly=True)
    assert [p.run for p in after.parts] == [p.run for p in before.parts]
    with pytest.raises(HotcoldError, match="exists already"):
        save_profile(tmp_path / "p.gguf", before)
    bare = dataclasses.replace(before, parts=(), samples=(np.zeros((0, 6), np.float16),) * 3,
                               sample_text=np.zeros(0, np.int64))  # fmt: skip
    save_profile(tmp_path / "p.gguf", bare, force=True)
    assert load_profile(tmp_path / "p.gguf").parts == ()


def _with(name: str, layer: int, index: int | slice, value: float) -> Callable[[Profile], Profile]:
    def change(p: Profile) -> Profile:
        arrays = [a.copy() for a in getattr(p, name)]
        arrays[layer].reshape(-1)[index] = value
        return dataclasses.replace(p, **{name: tuple(arrays)})

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with("fired", 1, 3, -1), r"layer 1: fired of neuron 3: found -1, allowed: counts from 0 to 100"),
        (_with("fired", 2, 0, 101), r"layer 2: fired of neuron 0: found 101"),
        (_with("pairs", 1, 3, 1000), r"layer 1: pairs of neuron 3: found 1000"),
        (_with("pairs", 0, 0, -5), r"layer 0: pairs of neuron 0: found -5"),
        (_with("magnitude", 2, 7, np.nan), r"layer 2: magnitude of neuron 7: found nan"),
        (_with("magnitude", 2, 7, np.inf), r"layer 2: magnitude of neuron 7: found inf"),
        (_with("magnitude", 2, 7, -1.0), r"layer 2: magnitude of neuron 7: found -1"),
        (_with("samples", 1, 5, np.nan), r"layer 1: samples: found NaN or infinities"),
        (lambda p: dataclasses.replace(p, sample_text=np.array([0, 0, 1, 2])), "sample_text"),
        (lambda p: dataclasses.replace(p, sample_text=np.array([2, 0, 0, 2])), "sample_text"),
        (lambda p: dataclasses.replace(p, n_tokens=101), "hotcold.profile.tokens"),
        (lambda p: dataclasses.replace(p, n_pairs=101), "hotcold.profile.pairs"),
        (lambda p: dataclasses.replace(p, pairs=p.pairs[:2] + (p.pairs[2][:5],)), "blk.2.pairs"),
        (lambda p: dataclasses.replace(p, samples=p.samples[:2] + (p.samples[0][:, :3],)), "blk.2.samples"),
        (lambda p: dataclasses.replace(p, parts=(dataclasses.replace(p.parts[0], total=2),)), "contexts"),
        (lambda p: dataclasses.replace(p, parts=(dataclasses.replace(p.parts[0], contexts=np.array([2, 0])),)),
         "contexts"),
    ],
)  # fmt: skip
def test_wrong_numbers_in_a_file_are_named(tmp_path: Path, change: Callable[[Profile], Profile], message: str) -> None:
    path = tmp_path / "p.gguf"
    write_profile(path, change(profile_of()), State(), force=False)
    with pytest.raises(HotcoldError, match=message) as e:
        load_profile(path)
    assert str(path) in str(e.value) and "\n" not in str(e.value)


def test_counts_whose_sums_would_wrap_are_refused(tmp_path: Path) -> None:
    """Each number is allowed; 2^63 is what i64 cannot hold."""
    n, path = 1 << 52, tmp_path / "p.gguf"
    p = dataclasses.replace(profile_of(n_ff=4096, n_samples=0), n_tokens=n, n_pairs=0, parts=())
    p = dataclasses.replace(p, samples=(), sample_text=np.zeros(0, np.int64), pairs=(np.zeros(4096, np.int64),) * 3)
    many = dataclasses.replace(p, fired=(p.fired[0], np.full(4096, n), p.fired[2]))
    write_profile(path, many, State(), force=False)
    with pytest.raises(HotcoldError, match=r"p.gguf: layer 1: sum of fired: found 1.84467e\+19, allowed: up to"):
        load_profile(path)
    write_profile(path, _with("magnitude", 2, slice(None), 1e308)(p), State(), force=True)
    with pytest.raises(HotcoldError, match=r"p.gguf: layer 2: sum of magnitude: found inf"):
        load_profile(path)
    half = _with("fired", 0, 7, n // 2 + 1)(p)
    with pytest.raises(HotcoldError, match="layer 0: the profiles count more firings than can be added up"):
        merge_profiles([half, dataclasses.replace(half, sha256="b" * 64)])


def test_a_damaged_file_is_an_error_of_ours(tmp_path: Path) -> None:
    path, damaged = tmp_path / "p.gguf", tmp_path / "damaged.gguf"
    save_profile(path, profile_of())
    good = path.read_bytes()
    rng = np.random.default_rng(1)
    refused = 0
    for i in range(300):
        raw = bytearray(good if i % 2 else good[: int(rng.integers(1, len(good)))])
        for _ in range(3):
            raw[int(rng.integers(len(raw)))] = int(rng.integers(256))
        damaged.write_bytes(raw)
        try:
            load_profile(damaged)
        except HotcoldError:
            refused += 1
    assert refused > 200


def test_another_gguf_is_not_a_profile(model: Path) -> None:
    with pytest.raises(HotcoldError, match="general.architecture: found 'llama', allowed: hotcold-profile"):
        load_profile(model)


def test_check_profile_knows_other_models(tmp_path: Path, whole: Profile, model: Path) -> None:
    with open_gguf(model) as file:
        check_profile(whole, file, ModelConfig.from_gguf(file))
    for spec, message in (
        (Spec(patterns=("free",) * 3, n_ff=72, seed=1), "another model .same shape, other weights"),
        (Spec(patterns=("free",) * 2, n_ff=72), "it has 3 layers, the model 2"),
        (Spec(patterns=("free",) * 3, n_ff=(72, 72, 96)), "layer 2 has 72 neurons there, 96 in the model"),
        (Spec(patterns=("free",) * 3, n_ff=72, n_embd=96), "samples have 64 numbers"),
    ):
        with open_gguf(write_model(tmp_path / "m.gguf", spec)) as file, pytest.raises(HotcoldError, match=message):
            check_profile(whole, file, ModelConfig.from_gguf(file))


def test_a_profile_fits_the_file_whatever_its_neuron_order(tmp_path: Path) -> None:
    """The same model, stored in another order, has the same counts."""
    spec = Spec(patterns=("free", "free"), n_ff=48)
    tensors = make_tensors(spec)
    first = write_model(tmp_path / "a.gguf", spec, tensors)
    order = np.random.default_rng(0).permutation(48)
    for layer in range(2):
        for name, per in ((schema.FFN_GATE, 1), (schema.FFN_UP_DOWN, 2), (schema.FFN_NEURON_ID, 1)):
            kind, values = tensors[schema.block(layer, name)]
            moved = values.reshape(48, per, -1)[order].reshape(values.shape)
            tensors[schema.block(layer, name)] = (kind, moved)
    second = write_model(tmp_path / "b.gguf", spec, tensors)
    contexts = random_contexts(2, 30)
    a, b = count(first, contexts), count(second, contexts)
    assert all(np.array_equal(x, y) for x, y in zip(a.fired, b.fired, strict=True))
    ids = []
    for path in (first, second):
        with open_gguf(path) as file:
            ids.append(model_id(file, ModelConfig.from_gguf(file)))
    assert ids[0] == ids[1]


# --- merging


def test_profiles_of_different_texts_add_up_in_any_order() -> None:
    a, b, c = profile_of(sha256="a" * 64), profile_of(sha256="b" * 64, total=9), profile_of(sha256="c" * 64)
    merged = merge_profiles([a, b, c])
    assert merged.n_tokens == 300 and [p.total for p in merged.parts] == [4, 9, 4]
    assert np.array_equal(merged.fired[1], a.fired[1] * 3)
    assert merged.sample_text.tolist() == [*a.sample_text, *(b.sample_text + 4), *(c.sample_text + 13)]
    for order in ([c, a, b], [b, c, a]):
        same(merge_profiles(order), merged)
    same(merge_profiles([merge_profiles([c, b]), a]), merged)
    with pytest.raises(HotcoldError, match="counted twice"):
        merge_profiles([merged, b])


def test_what_cannot_be_merged_is_said() -> None:
    a = profile_of()
    other = dataclasses.replace(a.parts[0], n_ctx=60, contexts=np.array([1]))
    for profiles, message in (
        ([], "no profiles"),
        ([a, dataclasses.replace(profile_of(sha256="b" * 64), model="x" * 64)], "profile 2 is of another model"),
        ([a, profile_of(n_ff=9, sha256="b" * 64)], "profile 2 is of another model"),
        ([a, dataclasses.replace(a, parts=(other,))], "different settings .4 contexts of 50 tokens.* of 60 tokens"),
    ):
        with pytest.raises(HotcoldError, match=message):
            merge_profiles(profiles)


# --- what users do wrong


def error(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The last line of stderr of a command that fails."""
    capsys.readouterr()
    try:
        assert main(["profile", *map(str, arguments)]) == 1
    except SystemExit as e:
        assert e.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_bad_texts_are_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short, latin, empty, out = (tmp_path / name for name in ("short.txt", "latin.txt", "empty.txt", "o.gguf"))
    short.write_text("A short text.")
    latin.write_bytes(b"caf\xe9 " * 50)
    empty.write_text("")
    said = error(capsys, model, "--text", short, "-o", out)
    assert "short.txt" in said and "is too short: " in said and "at least 511 are needed" in said
    assert "is not UTF-8: byte 3 is 0xe9" in error(capsys, model, "--text", latin, "-o", out)
    assert "0 tokens, at least 511" in error(capsys, model, "--text", empty, "-o", out)
    assert "is a folder" in error(capsys, model, "--text", tmp_path, "-o", out)
    assert "none.txt: cannot be read" in error(capsys, model, "--text", tmp_path / "none.txt", "-o", out)
    assert not out.exists()


def test_models_that_cannot_be_profiled(
    tmp_path: Path, text: Path, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    said = error(capsys, tiny_model("llama"), "--text", text)
    assert "'silu' has no neurons that are off" in said and "hotcold relufy" in said and "hotcold calibrate" in said
    bare = write_model(tmp_path / "bare.gguf", Spec())
    assert "has no vocabulary" in error(capsys, bare, "--text", text)
    stock = write_model(tmp_path / "stock.gguf", Spec(activation="relu", layout="stock"))
    assert "is a stock GGUF" in (said := error(capsys, stock, "--text", text)) and "hotcold convert" in said
    assert "cannot be opened" in error(capsys, tmp_path / "none.gguf")


@pytest.mark.parametrize("name", [schema.FFN_GATE, schema.FFN_UP_DOWN, "ffn_norm.weight", "attn_output.weight"])
@pytest.mark.parametrize("layer", [0, 2])
def test_nan_weights_name_the_layer(tmp_path: Path, name: str, layer: int) -> None:
    spec = Spec(patterns=("free",) * 3, n_ff=40)
    tensors = make_tensors(spec)
    kind, values = tensors[schema.block(layer, name)]
    assert kind == Type.F32
    values = values.copy()
    values.reshape(-1)[:] = np.nan
    tensors[schema.block(layer, name)] = (kind, values)
    path = write_model(tmp_path / "nan.gguf", spec, tensors)
    with pytest.raises(HotcoldError, match=rf"nan.gguf: layer {layer}: NaN or infinite activations in context 0"):
        count(path, random_contexts(2, 20))


def test_options_may_come_before_the_model(model: Path, text: Path, tmp_path: Path) -> None:
    other, out = tmp_path / "other.txt", tmp_path / "p.gguf"
    other.write_text(TEXT[::-1])
    options = ["-c", str(CTX), "-t", "1", "--samples", "0", "-o", str(out)]
    assert main(["profile", *options, "--text", str(text), "--text", str(other), str(model)]) == 0
    assert load_profile(out).corpus == "ships.txt, other.txt"
    assert main(["profile", "-o", str(tmp_path / "m.gguf"), "merge", str(out)]) == 0


def test_wrong_usage(model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "o.gguf"
    assert "must be I/N" in error(capsys, model, "--shard", "0/3")
    assert "must be I/N" in error(capsys, model, "--shard", "4/3")
    assert "must be a whole number from 1 to" in error(capsys, model, "--tokens", "0")
    assert "must be a whole number" in error(capsys, model, "--tokens", "1_000")
    assert "give one of them" in error(capsys, model, "--resume", "--force")
    assert "merge needs the profiles" in error(capsys, "merge", "-o", out)
    assert "texts are given with --text" in error(capsys, model, text)
    assert "too short to profile" in error(capsys, model, "--text", text, "-c", "1", "-o", out)
    said = error(capsys, model, "--text", text, "-c", "512", "--shard", "99/99", "-o", out)
    assert "shard 99 of 99 is empty" in said
    out.write_text("mine")
    assert "exists already: use --force" in error(capsys, model, "--text", text, "-o", out)
    assert "no such folder" in error(capsys, model, "--text", text, "-o", tmp_path / "none" / "o.gguf")
    many = Corpus("many", "0" * 64, (TEXT,))
    huge = dict(tokens=None, n_ctx=CTX, samples=10**9)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(HotcoldError, match="use a smaller --samples"):
        patch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
        profile_model(model, many, **huge)
    assert out.read_text() == "mine"


def test_the_command_prints_a_table_and_tells_where_the_file_is(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "small.hotcold.gguf"
    copy.write_bytes(model.read_bytes())
    assert main(["profile", str(copy), "--text", str(text), "-c", str(CTX), "-t", "1"]) == 0
    out, err = capsys.readouterr()
    assert "sparsity" in out and "80 % of the firings are by" in out
    assert len([line for line in out.splitlines() if line.strip().startswith(("0 ", "1 ", "2 "))]) == 3
    assert f"wrote {tmp_path / 'small.profile.gguf'}" in err and "tokens/s" in err
    assert load_profile(tmp_path / "small.profile.gguf").corpus == "ships.txt"


# --- the bundled texts


def test_the_bundled_texts_are_clean_and_different() -> None:
    calibration, heldout = read_corpus(), read_corpus([HELDOUT])
    assert 450_000 < CALIBRATION.stat().st_size < 600_000 and 60_000 < HELDOUT.stat().st_size < 100_000
    paragraphs = []
    for corpus in (calibration, heldout):
        whole_text = "\n".join(corpus.documents)
        assert not {c for c in whole_text if ord(c) < 32} - {"\n"}
        assert "gutenberg" not in whole_text.lower()
        assert len(corpus.documents) >= 5
        paragraphs.append({p for p in whole_text.split("\n") if len(p) > 80})
    assert not paragraphs[0] & paragraphs[1]
    assert (CALIBRATION.parent / "README.md").exists()
