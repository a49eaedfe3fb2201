"""The engine on small models: exact is dense bit for bit, blocks are tokens, threads change nothing, errors say what.

In: models from small_models.py. Right numbers come from its Reference; families and their quirks are the business of
test_golden.py.
"""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from one_op import same_bits
from small_models import Reference, Spec, all_of, write_model

from hotcold.runtime.engine import Engine
from hotcold.runtime.errors import GGUFError, HotcoldError
from hotcold.runtime.kernels import walk
from hotcold.runtime.program import lower
from hotcold.runtime.threads import default_threads

TYPES = (Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0)
THREADS = (1, 2, 3, 8)
TOKENS = [(7 * i + i * i) % 101 for i in range(100)]
# One layer with every neuron off, one with every neuron on, one with both, at sizes that fill no chunk.
PATTERNS: dict[str, Any] = {"patterns": ("off", "on", "mixed", "free", "mixed"), "n_ff": (1000, 1003, 333, 33, 1)}
MIXED_TYPES = {"attn": Type.F16, "key": Type.Q8_0, "value": Type.Q4_0, "embd": Type.BF16, "head": Type.F32}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(**fields of Spec) -> file, written once per session."""
    made: dict[str, Path] = {}

    def get(**fields: Any) -> Path:
        spec = Spec(**fields)
        key = repr(spec)
        if key not in made:
            made[key] = write_model(tmp_path_factory.mktemp("small") / "small.gguf", spec)
        return made[key]

    return get


@pytest.fixture
def opened() -> Iterator[Callable[..., Engine]]:
    """Engine.open, closed at the end of the test."""
    engines: list[Engine] = []

    def open_one(path: Path, **options: Any) -> Engine:
        engines.append(Engine.open(path, **({"threads": 2} | options)))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()


def one_by_one(engine: Engine, tokens: list[int]) -> np.ndarray:
    """Logits [n, n_vocab] of tokens appended one at a time."""
    return np.array([engine.forward([token]) for token in tokens])


def error(got: np.ndarray, want: np.ndarray) -> float:
    assert got.shape == want.shape and np.isfinite(got).all()
    return float(np.abs(got - want).max() / np.abs(want).max())


# ------------------------------------------------------------------ right numbers


@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("layout", ["neuron-split", "stock"])
def test_logits_of_every_format(kind: Type, layout: str, model: Any, opened: Any) -> None:
    path = model(layout=layout, biases=True, **all_of(kind))
    want, _ = Reference(path, np.float32).logits(TOKENS[:40])
    engine = opened(path, kv_type="f32")
    whole = engine.forward(TOKENS[:40], "all")
    engine.truncate(0)
    for got in (whole, one_by_one(engine, TOKENS[:40])):
        if kind in (Type.F32, Type.F16, Type.BF16):
            assert error(got, want) < 2e-5
        else:  # where the rounding of an activation to int8 falls to the other side, all later layers see it
            errors = [error(row, right) for row, right in zip(got, want, strict=True)]
            assert max(errors) < 3e-2 and np.quantile(errors, 0.25) < 2e-5


@pytest.mark.parametrize(
    "fields",
    [
        {"layout": "stock", "activation": "silu"},
        {"arch": "qwen3", "activation": "silu", "head_dim": 24, "n_embd": 72, "n_head_kv": 1},
        {"arch": "opt", "gated": False, "biases": True, "n_head_kv": 4, "n_embd": 40, "n_ff": 33},
        {"arch": "arcee", "gated": False, "activation": "relu2", "patterns": ("free", "mixed", "off")},
        {"activation": "fatrelu", "threshold": 0.5},
        {"activation": "fatrelu", "threshold": -0.2, "biases": True},
        {"activation": "drelu", "biases": True},
        {"activation": "gelu"},
        {"activation": "gelu_tanh", "gated": False},
        {"window": 8, "n_head": 8, "n_head_kv": 1, "head_dim": 8},
        {"window": 1},
        {"n_vocab": 1, "n_embd": 32, "n_head": 1, "n_head_kv": 1, "head_dim": 128},
        MIXED_TYPES | PATTERNS,
        {"layout": "stock", "attn": Type.Q4_0, "key": Type.Q8_0, "value": Type.F16, "embd": Type.Q4_0},
        {"head_dim": 100, "n_embd": 200, "n_head": 2, "n_head_kv": 1},
        {"head_dim": 6, "n_embd": 18, "n_head": 3, "n_head_kv": 3, "window": 20},
        {"n_embd": 8, "n_ff": 1, "n_head": 1, "n_head_kv": 1, "head_dim": 8},
    ],
    ids=lambda f: "-".join(str(v) for v in f.values())[:60],
)
def test_logits_of_every_shape(fields: dict[str, Any], model: Any, opened: Any) -> None:
    path = model(**fields)
    tokens = [token % fields.get("n_vocab", 101) for token in TOKENS[:33]]
    want, _ = Reference(path, np.float32).logits(tokens)
    engine = opened(path, kv_type="f32", threads=3)
    quantized = any(isinstance(v, Type) for v in fields.values())
    assert error(engine.forward(tokens, "all"), want) < (5e-3 if quantized else 2e-5)
    engine.truncate(0)
    assert error(one_by_one(engine, tokens), want) < (5e-3 if quantized else 2e-5)


@pytest.mark.parametrize("n", [1, 2, 5, 6, 7, 8, 9, 17, 63, 64, 65, 100])
def test_prompt_at_once_equals_token_by_token(n: int, model: Any, opened: Any) -> None:
    for kinds in (all_of(Type.F32), all_of(Type.Q8_0), MIXED_TYPES):
        engine = opened(model(biases=True, **kinds))
        whole = engine.forward(TOKENS[:n])
        after = engine.forward([5])
        engine.truncate(0)
        single = one_by_one(engine, [*TOKENS[:n], 5])
        bound = 1e-3 if kinds == all_of(Type.F32) else 3e-2  # an F16 cache and int8 activations round
        assert error(whole, single[-2]) < bound and error(after, single[-1]) < bound


def test_prompts_longer_than_a_block(model: Any, opened: Any) -> None:
    path = model(n_ctx=600, window=50)
    tokens = (TOKENS * 6)[:515]
    want, _ = Reference(path, np.float32).logits(tokens)
    engine = opened(path, kv_type="f32")
    assert error(engine.forward(tokens, "all"), want) < 5e-5
    engine.truncate(0)
    engine.forward(tokens[:257], "none")
    assert error(engine.forward(tokens[257:514]), want[513]) < 5e-5


def test_layouts_agree(model: Any, opened: Any) -> None:
    for gated, activation in ((True, "relu"), (False, "relu"), (True, "silu")):
        logits = []
        for layout in ("stock", "neuron-split"):
            path = model(layout=layout, gated=gated, activation=activation, patterns=("free",))
            logits.append(opened(path, kv_type="f32").forward(TOKENS[:20], "all"))
        assert error(logits[0], logits[1]) < 1e-5


# ------------------------------------------------------------------ exact = dense, threads


@pytest.mark.parametrize("kinds", [*map(all_of, TYPES), MIXED_TYPES], ids=[*(t.name for t in TYPES), "mixed"])
@pytest.mark.parametrize("threads", THREADS)
def test_exact_equals_dense_bit_for_bit(kinds: dict[str, Type], threads: int, model: Any, opened: Any) -> None:
    path = model(**PATTERNS, **kinds)
    compare_modes(path, threads, opened)


@pytest.mark.parametrize(("activation", "gated"), [("relu", False), ("fatrelu", True), ("fatrelu", False),
                                                   ("drelu", True), ("relu2", True), ("relu2", False)])  # fmt: skip
@pytest.mark.parametrize("kind", [Type.F32, Type.Q8_0], ids=lambda t: t.name)
def test_exact_equals_dense_for_every_activation(
    activation: str, gated: bool, kind: Type, model: Any, opened: Any
) -> None:
    threshold = 0.2 if activation == "fatrelu" else 0.0
    path = model(activation=activation, gated=gated, threshold=threshold, biases=True, **PATTERNS, **all_of(kind))
    compare_modes(path, 3, opened)


def compare_modes(path: Path, threads: int, opened: Any) -> None:
    dense, exact = (opened(path, sparsity=mode, threads=threads) for mode in ("dense", "exact"))
    assert same_bits(dense.forward(TOKENS[:5], "all"), exact.forward(TOKENS[:5], "all"))
    assert same_bits(one_by_one(dense, TOKENS[5:12]), one_by_one(exact, TOKENS[5:12]))
    assert (dense.layer_stats().computed == 1).all()
    shares = exact.layer_stats().computed
    assert shares[0] == 0 and shares[1] == 1 and 0.2 < shares[2] < 0.8  # off, on, mixed


def test_block_results_do_not_depend_on_threads(model: Any, opened: Any) -> None:
    for kinds in ({}, all_of(Type.Q8_0), MIXED_TYPES, {"layout": "stock"}):
        path = model(biases=True, n_ff=99 if kinds == {} else 96, **kinds)
        logits = []
        for threads in (*THREADS, 16):
            engine = opened(path, threads=threads)
            logits.append(np.vstack([engine.forward(part, "all") for part in (TOKENS[:7], TOKENS[7:60])]))
        assert all(same_bits(logits[0], other) for other in logits[1:])


@pytest.mark.parametrize("threads", THREADS)
def test_tokens_are_reproducible(threads: int, model: Any, opened: Any) -> None:
    path = model(**PATTERNS, **MIXED_TYPES)
    first, second = (one_by_one(opened(path, threads=threads), TOKENS[:20]) for _ in range(2))
    assert same_bits(first, second)


def test_threads_change_tokens_by_rounding_only(model: Any, opened: Any) -> None:
    path = model(**PATTERNS)
    runs = [one_by_one(opened(path, threads=threads, kv_type="f32"), TOKENS[:10]) for threads in (1, 2, 7)]
    assert error(runs[1], runs[0]) < 1e-5 and error(runs[2], runs[0]) < 1e-5


def test_more_threads_than_neurons_rows_and_heads(model: Any, opened: Any) -> None:
    path = model(n_ff=1, n_vocab=3, n_embd=8, n_head=1, n_head_kv=1, head_dim=8)
    want, _ = Reference(path, np.float32).logits([0, 1, 2, 0])
    engine = opened(path, threads=12, kv_type="f32")
    assert error(engine.forward([0, 1, 2, 0], "all"), want) < 1e-5
    engine.truncate(0)
    assert error(one_by_one(engine, [0, 1, 2, 0]), want) < 1e-5


@pytest.mark.parametrize("kind", [Type.F32, Type.Q8_0], ids=lambda t: t.name)
@pytest.mark.parametrize("activation", ["relu", "fatrelu", "relu2", "drelu"])
def test_share_computed_is_the_share_that_fires(activation: str, kind: Type, model: Any, opened: Any) -> None:
    fields = {"activation": activation, "threshold": 0.3 if activation == "fatrelu" else 0.0}
    path = model(**fields, **PATTERNS, **all_of(kind))
    _, keys = Reference(path).logits(TOKENS[:20])
    engine = opened(path, sparsity="exact")
    engine.forward(TOKENS[:6])  # blocks are not counted
    assert (engine.layer_stats().computed == 1).all()
    one_by_one(engine, TOKENS[6:20])
    for share, key in zip(engine.layer_stats().computed, keys, strict=True):
        borderline = (np.abs(key[6:]) < (1e-3 if kind == Type.F32 else 5e-2)).mean()
        assert abs(share - (key[6:] > 0).mean()) <= borderline
    engine.reset_stats()
    assert (engine.layer_stats().computed == 1).all()
    engine.forward([1])
    assert engine.layer_stats().computed[0] == 0


def test_share_computed_of_stock_files_is_one(model: Any, opened: Any) -> None:
    engine = opened(model(layout="stock"))
    engine.forward([1])
    assert (engine.layer_stats().computed == 1).all()


# ------------------------------------------------------------------ tokens in and out


def test_what_logits_are_returned(model: Any, opened: Any) -> None:
    engine = opened(model())
    every = engine.forward(TOKENS[:9], "all")
    assert every.shape == (9, 101) and every.dtype == np.float32
    engine.truncate(0)
    last = engine.forward(TOKENS[:9])
    assert last.shape == (101,) and error(last, every[-1]) < 1e-5
    engine.truncate(0)
    assert engine.forward(TOKENS[:9], "none").size == 0 and engine.n_past == 9
    kept = last.copy()
    engine.forward([3])
    assert same_bits(last, kept)  # the caller's own copy
    with pytest.raises(HotcoldError, match="first.*last, all, none"):
        engine.forward([1], "first")


def test_all_logits_of_a_large_vocabulary_come_in_smaller_blocks(
    model: Any, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model()
    whole = opened(path).forward(TOKENS[:50], "all")
    monkeypatch.setattr("hotcold.runtime.engine.LOGITS_BYTES", 7 * 4 * 101)
    assert error(opened(path).forward(TOKENS[:50], "all"), whole) < 1e-3
    monkeypatch.setattr("hotcold.runtime.engine.LOGITS_BYTES", 1)
    assert error(opened(path).forward(TOKENS[:50], "all"), whole) < 1e-3


def test_tokens_as_array_and_tuple(model: Any, opened: Any) -> None:
    engine = opened(model())
    results = []
    for tokens in ([1, 2, 3], (1, 2, 3), np.array([1, 2, 3], np.uint16)):
        engine.truncate(0)
        results.append(engine.forward(tokens))
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


def test_truncate_and_continue_equals_fresh(model: Any, opened: Any) -> None:
    path = model(window=6)
    engine, fresh = opened(path), opened(path)
    engine.forward(TOKENS[:40], "none")
    engine.truncate(10)
    assert engine.n_past == 10
    fresh.forward(TOKENS[:10], "none")
    assert same_bits(engine.forward(TOKENS[50:70], "all"), fresh.forward(TOKENS[50:70], "all"))
    assert same_bits(engine.forward([9]), fresh.forward([9]))
    for bad in (-1, 32):
        with pytest.raises(HotcoldError, match="31 tokens"):
            engine.truncate(bad)


def test_full_context(model: Any, opened: Any) -> None:
    engine = opened(model(), n_ctx=20)
    assert engine.n_ctx == 20
    with pytest.raises(HotcoldError, match=r"context is full.*21 more.*20.*--ctx-size"):
        engine.forward(TOKENS[:21])
    engine.forward(TOKENS[:19])
    engine.forward([1])
    with pytest.raises(HotcoldError, match="20 tokens are in it, 1 more"):
        engine.forward([1])
    assert engine.n_past == 20
    engine.truncate(19)
    engine.forward([1])


@pytest.mark.parametrize("bad", [-1, 101, 1 << 40])
def test_token_outside_the_vocabulary(bad: int, model: Any, opened: Any) -> None:
    engine = opened(model())
    with pytest.raises(HotcoldError, match=f"token id {bad} is outside the vocabulary of 101"):
        engine.forward([1, bad, 2])
    assert engine.n_past == 0
    with pytest.raises(HotcoldError, match="no tokens"):
        engine.forward([])


def test_two_engines_interleaved(model: Any, opened: Any) -> None:
    paths = model(**all_of(Type.Q8_0)), model(arch="opt", gated=False, biases=True, n_head_kv=4)
    alone = [one_by_one(opened(path), TOKENS[:10]) for path in paths]
    engines = [opened(path) for path in paths]
    together: list[list[np.ndarray]] = [[], []]
    for token in TOKENS[:10]:
        for engine, logits in zip(engines, together, strict=True):
            logits.append(engine.forward([token]))
    assert all(same_bits(np.array(a), b) for a, b in zip(together, alone, strict=True))


def test_same_file_twice(model: Any, opened: Any) -> None:
    """Files are mapped read-only and shared: closing one engine leaves the other alone."""
    a, b = opened(model()), opened(model())
    want = a.forward(TOKENS[:5])
    a.close()
    assert same_bits(b.forward(TOKENS[:5]), want)


def test_close(model: Any) -> None:
    engine = Engine.open(model(), threads=2)
    engine.forward([1])
    engine.close()
    engine.close()
    with pytest.raises(HotcoldError, match="closed"):
        engine.forward([1])
    with Engine.open(model(), threads=2) as inside:
        inside.forward([1])
    with pytest.raises(HotcoldError, match="closed"):
        inside.forward([1])


def test_close_ends_the_threads(model: Any) -> None:
    before = threading.active_count()
    engine = Engine.open(model(), threads=5)
    assert threading.active_count() == before + 5
    engine.close()
    assert threading.active_count() == before


# ------------------------------------------------------------------ options


@pytest.mark.parametrize("threads", [0, -1, 257, 100000])
def test_threads_out_of_range(threads: int, model: Any) -> None:
    with pytest.raises(HotcoldError, match=f"{threads}.*1 to 256"):
        Engine.open(model(), threads=threads)


def test_threads_by_default(model: Any, opened: Any) -> None:
    assert opened(model(), threads=None).threads == default_threads()


def test_kv_types(model: Any, opened: Any) -> None:
    path = model()
    wide, narrow = (opened(path, kv_type=kind).forward(TOKENS[:20]) for kind in ("f32", "f16"))
    assert 0 < error(narrow, wide) < 1e-2
    with pytest.raises(HotcoldError, match="q4_0.*f16, f32, q8_0"):
        Engine.open(path, kv_type="q4_0")


@pytest.mark.parametrize(
    ("activation", "layout", "wanted", "resolved", "says"),
    [
        ("relu", "neuron-split", "auto", "exact", "relu"),
        ("relu2", "neuron-split", "auto", "exact", "relu2"),
        ("relu", "neuron-split", "dense", "dense", "asked"),
        ("relu", "neuron-split", "exact", "exact", "asked"),
        ("silu", "neuron-split", "auto", "dense", "silu"),
        ("relu", "stock", "auto", "dense", "convert"),
        ("silu", "stock", "dense", "dense", "asked"),
    ],
)
def test_sparsity_is_resolved_and_said(
    activation: str, layout: str, wanted: str, resolved: str, says: str, model: Any, opened: Any
) -> None:
    lines: list[str] = []
    engine = opened(model(activation=activation, layout=layout), sparsity=wanted, notify=lines.append)
    assert engine.sparsity == resolved
    assert any(line.startswith(f"sparsity: {resolved}") and says in line for line in lines)


@pytest.mark.parametrize(
    ("fields", "wanted", "text"),
    [
        ({"activation": "silu"}, "exact", "silu.*--sparsity dense"),
        ({"layout": "stock"}, "exact", "neuron-split.*hotcold convert"),
        ({}, "sparse", "'sparse' is unknown.*auto, dense, exact"),
    ],
)
def test_sparsity_that_cannot_be(fields: dict[str, Any], wanted: str, text: str, model: Any) -> None:
    with pytest.raises(HotcoldError, match=text):
        Engine.open(model(**fields), sparsity=wanted)


def test_context_size(model: Any, opened: Any) -> None:
    lines: list[str] = []
    long, short = model(n_ctx=5000), model(n_ctx=100)
    assert opened(long, notify=lines.append).n_ctx == 4096
    assert any("4096" in line and "5000" in line and "--ctx-size" in line for line in lines)
    assert opened(long, n_ctx=0).n_ctx == 5000
    assert opened(long, n_ctx=300).n_ctx == 300
    lines.clear()
    assert opened(short, notify=lines.append).n_ctx == 100
    assert not any(line.startswith("context") for line in lines)
    assert opened(short, n_ctx=150, notify=lines.append).n_ctx == 150
    assert any("150" in line and "trained on 100" in line for line in lines)
    with pytest.raises(HotcoldError, match="--ctx-size -1"):
        Engine.open(short, n_ctx=-1)


def test_learned_positions_cannot_be_stretched(model: Any) -> None:
    path = model(arch="opt", gated=False, n_head_kv=4, n_ctx=50)
    with pytest.raises(HotcoldError, match="51.*50"):
        Engine.open(path, n_ctx=51)


def test_context_that_does_not_fit_into_memory(model: Any) -> None:
    with pytest.raises(HotcoldError, match="GiB.*--ctx-size"):
        Engine.open(model(), n_ctx=1 << 40)


def test_cpu_that_is_too_old(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without F16C the compiler would end the process."""
    monkeypatch.setattr("hotcold.runtime.kernels.simd.MISSING", ["f16c"])
    with pytest.raises(HotcoldError, match="this CPU lacks f16c"):
        Engine.open(model())


def test_files_that_are_no_models(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.gguf"
    nothing.write_bytes(b"GGUF")
    with pytest.raises(GGUFError, match="nothing.gguf"):
        Engine.open(nothing)
    with pytest.raises((HotcoldError, OSError), match="absent.gguf"):
        Engine.open(tmp_path / "absent.gguf")


# ------------------------------------------------------------------ interruption

INTERRUPTIONS = """
import faulthandler, random, signal, sys, time
import numpy as np
from hotcold.runtime.engine import Engine

faulthandler.dump_traceback_later(60, exit=True)
path, tokens = sys.argv[1], [i % 101 for i in range(200)]
engine = Engine.open(path, threads=3, n_ctx=512)
engine.forward(tokens[:7], "none")
want = engine.forward(tokens[7:200], "all")
start = time.perf_counter()
engine.truncate(7)
engine.forward(tokens[7:200], "none")
usual = time.perf_counter() - start
single = Engine.open(path, threads=3, n_ctx=512).forward([1])
rng = random.Random(1)
hits = left = 0

def handler(signum, frame):
    global left
    left -= 1
    if left >= 0 and frame.f_code.co_filename != "<string>":  # not into this script's own handling of the last one
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, handler)
for attempt in range(400):
    engine.truncate(7)
    part = tokens[7:200] if attempt % 2 else tokens[7:8]
    seconds = rng.uniform(0, 1.1 * usual) if attempt % 2 else rng.uniform(1e-6, 2e-4)
    left = 3  # people press Ctrl-C more than once
    try:
        signal.setitimer(signal.ITIMER_REAL, max(1e-6, seconds), rng.choice([0, 1e-3, 1e-4]))
        engine.forward(part, "none")
        left = 0
    except KeyboardInterrupt:
        left = 0
        hits += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    if engine.n_past not in (7, 7 + len(part)):
        sys.exit(f"n_past is {engine.n_past}")
    if attempt % 40 == 1:
        engine.truncate(7)
        if not np.array_equal(engine.forward(tokens[7:200], "all"), want):
            sys.exit("other logits after an interruption")
engine.truncate(0)
if not np.array_equal(engine.forward([1]), single):
    sys.exit("other logits of a single token after interruptions")
engine.close()
print("hits", hits)
"""


def test_interruptions_at_any_moment_leave_the_engine_usable(model: Any, tmp_path: Path) -> None:
    """In a process of its own: an engine that hangs must not hang the tests."""
    path = model(n_ctx=512, n_ff=500, **all_of(Type.Q8_0))
    done = subprocess.run([sys.executable, "-c", INTERRUPTIONS, path], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-6000:]
    assert int(done.stdout.split()[1]) > 50  # signals did come while it worked


def test_one_ctrl_c_stops_a_long_prompt_in_the_middle_of_a_block(model: Any, opened: Any) -> None:
    """Pressed once, in the second layer: the team leaves at a barrier, long before the block it works on is done.

    Late in a long context a block takes seconds, nearly all of them for attention, so an engine that only looked
    between blocks would pass every barrier of this one.
    """
    path = model(n_ctx=40000, n_head=32, patterns=("free",) * 8)
    engine = opened(path, n_ctx=40000)
    engine.forward([1, 2], "none")
    want = engine.forward([3])
    engine.n_past = 38000  # what the cache holds there does not matter
    control, word = engine._team.control, walk.OWN + walk.OWN_PHASE
    before = int(control[word])
    needed = int(lower(engine.plan, engine._buffers)[1]["sync"].sum())  # barriers of one block; the prompt has seven

    def press() -> None:
        while control[word] < before + 12:  # a layer has fewer; the main thread waits by now
            time.sleep(1e-3)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        engine.forward((TOKENS * 17)[:1700], "none")
    presser.join()
    passed = int(control[word]) - before
    assert 12 <= passed < needed, "barriers"
    assert engine.n_past == 38000
    engine.truncate(2)
    assert same_bits(engine.forward([3]), want)


def test_engine_in_several_threads_one_after_the_other(model: Any, opened: Any) -> None:
    """The caller may be any thread."""
    engine = opened(model())
    want = engine.forward(TOKENS[:6])
    results: list[np.ndarray] = []
    for _ in itertools.repeat(None, 3):
        engine.truncate(0)
        thread = threading.Thread(target=lambda: results.append(engine.forward(TOKENS[:6])))
        thread.start()
        thread.join()
    assert all(same_bits(result, want) for result in results)
