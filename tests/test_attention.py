"""Rotary embedding, the KV cache and attention over it, against kernels/reference.py in float64.

In: random arrays. The operators run as the engine runs them (one_op.py), with canaries around what they write and NaN
where nothing may be read; reads past the end of the cache are tried in a process of their own (attention_guard.py).
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from one_op import CANARY, Runner, address, attention, close, encode, record, same_bits
from small_models import Spec, write_model

from hotcold.runtime.engine import Engine
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.kernels import formats, reference, walk
from hotcold.runtime.kernels.attention import CHUNK

KV = {"f32": formats.F32, "f16": formats.F16, "q8_0": formats.Q8_0}
DIMS = {"f32": (2, 8, 24, 64, 100, 128), "f16": (2, 7, 16, 24, 80, 100, 256), "q8_0": (32, 64, 96, 128, 256)}
KINDS_AND_DIMS = [(kind, head_dim) for kind, dims in DIMS.items() for head_dim in dims]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """The same numbers for the same test, whichever tests run beside it."""
    return np.random.default_rng(list(request.node.name.encode()))


class Case:
    """A cache filled up to the last of n_tok tokens from `pos`, and their queries. NaN where no token may look."""

    def __init__(
        self, rng: np.random.Generator, kind: str, head_dim: int, heads: int, kv_heads: int, pos: int, n_tok: int,
        window: int = 0, size: float = 1.0,
    ) -> None:  # fmt: skip
        self.head_dim, self.pos, self.window, self.size = head_dim, pos, window, size
        end = pos + n_tok
        values = (rng.standard_normal((2, kv_heads, end + 3, head_dim)) * size).astype(np.float32)
        unseen = np.ones(end + 3, bool)
        unseen[max(0, pos + 1 - window) if window else 0 : end] = False
        self.q = (rng.standard_normal((n_tok, heads, head_dim)) * size).astype(np.float32)
        self.cache, seen = stored(kind, values)
        self.cache[:, :, unseen] = 0xFF if kind == "q8_0" else np.nan  # a scale of 0xFFFF is NaN
        self.want = reference.attention(self.q, seen[0], seen[1], pos, window, head_dim**-0.5).reshape(n_tok, -1)

    def run(self, n_threads: int = 1, many_tokens: bool = False, first: int = 0, end: int | None = None) -> np.ndarray:
        """Output of tokens first..end-1, [tokens, heads * head_dim]."""
        q = self.q[first:end]
        out = attention(q, self.cache, pos=self.pos + first, window=self.window, scale=self.head_dim**-0.5,
                        n_threads=n_threads, many_tokens=many_tokens)  # fmt: skip
        width = self.want.shape[1]
        assert (out[-1] == CANARY).all() and (out[:, -(-width // 16) * 16 :] == CANARY).all()
        return out[:-1, :width].copy()

    def check(self, n_threads: int = 1, many_tokens: bool = False) -> None:
        got = self.run(n_threads, many_tokens)
        assert close(got, self.want, 3 * self.size, 2e-6 * self.size)


def stored(kind: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f32 [..., head_dim] -> the cache's memory, and what it stands for."""
    if kind == "q8_0":
        raw = encode(formats.Q8_0, values.reshape(-1, values.shape[-1]))
        seen = reference.decode(formats.Q8_0, raw, values.shape[-1])
        return raw.reshape(*values.shape[:-1], -1).copy(), seen.reshape(values.shape)
    cache = values.astype(np.float16 if kind == "f16" else np.float32)
    return cache, cache


# ------------------------------------------------------------------ what is put into the cache


@pytest.mark.parametrize("kind", KV)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "n_dims"), [(8, 8), (16, 16), (24, 8), (64, 64), (80, 20), (128, 2), (96, 66), (32, 0)]
)
def test_rope_turns_queries_and_fills_the_cache(
    kind: str, interleaved: bool, head_dim: int, n_dims: int, rng: np.random.Generator
) -> None:
    if kind == "q8_0" and head_dim % 32:
        return
    heads, kv_heads, n_ctx, pos, n_tok = 6, 2, 13, 3, 4
    for n_threads, normed in ((1, False), (3, True)):
        shapes = [(n_tok + 1, h, head_dim) for h in (heads, kv_heads, kv_heads)]
        q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
        cos, sin = rng.standard_normal((2, n_ctx, max(1, n_dims // 2))).astype(np.float32)
        wq, wk = rng.standard_normal((2, head_dim)).astype(np.float32)
        caches: np.ndarray = np.full((2, kv_heads, n_ctx, formats.row_bytes(KV[kind], head_dim)), 9, np.uint8)
        old = q.copy(), k.copy(), v.copy()
        op = record(
            walk.ROPE, rows=heads, cols=kv_heads, unit=head_dim, qt=KV[kind], w3=caches[0], aux=caches[1], aux2=n_ctx,
            stride3=caches.strides[2], src=q, ld_src=q.strides[0], dst=k, ld_dst=k.strides[0], dstb=v,
            ld_dstb=v.strides[0], stride=n_dims, flag=interleaved, eps=1e-6, w=wq if normed else 0,
            w2=wk if normed else 0,
        )  # fmt: skip
        Runner(n_threads).run(op, n_tok=n_tok, pos=pos, cos=address(cos), sin=address(sin), rope_row=cos.strides[0])
        turn_cos, turn_sin = (a[pos : pos + n_tok, None, : n_dims // 2] for a in (cos, sin))
        want_q, want_k = (
            reference.rotate(reference.rms_norm(x[:-1], w, 1e-6) if normed else x[:-1], turn_cos, turn_sin, interleaved)
            for x, w in ((old[0], wq), (old[1], wk))
        )
        assert close(q[:-1], want_q, 4 + np.abs(want_q), 1e-6)
        assert close(k[:-1], want_k, 4 + np.abs(want_k), 1e-6)
        written = caches[:, :, pos : pos + n_tok]  # [2, kv_heads, n_tok, row]
        assert np.array_equal(written[0], cache_rows(kind, k[:-1]).swapaxes(0, 1))
        assert np.array_equal(written[1], cache_rows(kind, old[2][:-1]).swapaxes(0, 1))
        assert (caches[:, :, :pos] == 9).all() and (caches[:, :, pos + n_tok :] == 9).all()
        assert all(same_bits(a[-1], b[-1]) for a, b in zip((q, k, v), old, strict=True))  # no token of this run


def cache_rows(kind: str, x: np.ndarray) -> np.ndarray:
    """What the cache holds of f32 [..., n], as bytes."""
    if kind != "q8_0":
        return np.ascontiguousarray(x.astype(np.float16 if kind == "f16" else np.float32)).view(np.uint8)
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    top = np.abs(blocks).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    q = np.rint(blocks * inverse).astype(np.int8).view(np.uint8)
    d = (top / np.float32(127)).astype(np.float16).view(np.uint8)
    return np.concatenate([d, q], axis=-1).reshape(*x.shape[:-1], -1)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-3, 1e4])
def test_a_row_of_q8_0_is_what_the_gguf_package_makes_of_it(size: float, rng: np.random.Generator) -> None:
    """But for values that lie half-way between two numbers."""
    x = (rng.standard_normal((50, 64)) * size).astype(np.float32)
    ours, theirs = (reference.decode(formats.Q8_0, raw, 64) for raw in (cache_rows("q8_0", x), encode(formats.Q8_0, x)))
    step = np.abs(x).reshape(50, 2, 32).max(axis=-1) / 127
    assert (np.abs(ours - theirs).reshape(50, 2, 32) <= 1.01 * step[..., None]).all()
    assert (ours != theirs).mean() < 0.01


# ------------------------------------------------------------------ against float64


@pytest.mark.parametrize(("kind", "head_dim"), KINDS_AND_DIMS)
def test_one_token_at_every_length(kind: str, head_dim: int, rng: np.random.Generator) -> None:
    for n_pos in (*range(1, 36), 63, 64, 65, 66, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5):
        case = Case(rng, kind, head_dim, 4, 2, n_pos - 1, 1)
        case.check()
        case.check(many_tokens=True)


@pytest.mark.parametrize("kind", KV)
def test_odd_lengths_to_a_thousand(kind: str, rng: np.random.Generator) -> None:
    for n_pos in range(1, 1001, 14 + 1):
        Case(rng, kind, 32, 3, 1, n_pos - 1 + n_pos % 2, 1).check()


@pytest.mark.parametrize(("kind", "head_dim"), KINDS_AND_DIMS)
def test_blocks_of_tokens(kind: str, head_dim: int, rng: np.random.Generator) -> None:
    for n_tok, pos in itertools.product((2, 5, 6, 9, 17, 70), (0, 31, CHUNK - 4)):
        Case(rng, kind, head_dim, 4, 2, pos, n_tok).check(many_tokens=True)


@pytest.mark.parametrize("kind", KV)
def test_many_positions(kind: str, rng: np.random.Generator) -> None:
    for pos, n_tok, window in ((2047, 1, 0), (2040, 9, 0), (4200, 17, 0), (2500, 20, 2100), (3000, 3, 1000)):
        Case(rng, kind, 32, 2, 1, pos, n_tok, window).check(many_tokens=n_tok > 8)


@pytest.mark.parametrize("kind", KV)
@pytest.mark.parametrize("window", [1, 2, 16, 17, 31, CHUNK, 300])
def test_window(window: int, kind: str, rng: np.random.Generator) -> None:
    for (pos, n_tok), n_threads in itertools.product(((0, 9), (7, 1), (8, 2), (15, 17), (39, 1), (590, 40)), (1, 3)):
        case = Case(rng, kind, 32, 6, 3, pos, n_tok, window)
        case.check(n_threads, many_tokens=True)
        if n_tok <= 8:
            case.check(n_threads)


@pytest.mark.parametrize("kind", KV)
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (2, 1), (3, 1), (4, 1), (8, 1), (40, 1), (32, 4), (7, 7), (9, 3), (35, 5)]
)
def test_heads_share_keys(heads: int, kv_heads: int, kind: str, rng: np.random.Generator) -> None:
    for n_threads, n_tok, pos in itertools.product((1, 2, 7), (1, 4, 20), (5, 300)):
        Case(rng, kind, 32, heads, kv_heads, pos, n_tok).check(n_threads, many_tokens=n_tok > 8)


@pytest.mark.parametrize("kind", KV)
def test_large_scores(kind: str, rng: np.random.Generator) -> None:
    """Scores in the thousands: one position takes all, none overflows."""
    for n_tok, pos in ((1, 40), (20, 40), (1, 700), (20, 700)):
        Case(rng, kind, 32, 2, 1, pos, n_tok, size=30.0).check(many_tokens=n_tok > 8)


# ------------------------------------------------------------------ bits

SHAPES = [(1, 1), (3, 1), (9, 3), (8, 2), (5, 5)]


@pytest.mark.parametrize("kind", KV)
@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
def test_threads_and_company_change_no_bit(heads: int, kv_heads: int, kind: str, rng: np.random.Generator) -> None:
    """A few tokens at once are these tokens one by one; a head alone is the head beside others; at any threads."""
    for pos, n_tok, window in ((0, 8, 0), (CHUNK - 3, 7, 0), (700, 5, 0), (700, 8, 300), (40, 6, 3)):
        case = Case(rng, kind, 64, heads, kv_heads, pos, n_tok, window)
        alone = case.run()
        case.check()
        for n_threads in (2, 3, 8):
            assert same_bits(case.run(n_threads), alone)
        for i in range(n_tok):
            assert same_bits(case.run(3, first=i, end=i + 1), alone[i : i + 1])
        group = heads // kv_heads
        one = Case(rng, kind, 64, kv_heads, kv_heads, pos, n_tok, window)
        one.cache, one.q = case.cache, case.q[:, ::group].copy()
        assert same_bits(one.run(), alone.reshape(n_tok, heads, 64)[:, ::group].reshape(n_tok, -1).copy())


@pytest.mark.parametrize("kind", KV)
@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
def test_a_token_of_a_block_has_its_bits_in_any_block(
    heads: int, kv_heads: int, kind: str, rng: np.random.Generator
) -> None:
    for pos, window in ((0, 0), (CHUNK - 20, 0), (500, 270)):
        case = Case(rng, kind, 32, heads, kv_heads, pos, 90, window)
        whole = case.run(many_tokens=True)
        for first, end in ((0, 6), (6, 37), (37, 90)):
            for n_threads in (1, 3):
                assert same_bits(case.run(n_threads, True, first, end), whole[first:end])


@pytest.mark.parametrize("many_tokens", [False, True])
def test_a_query_of_nan_spoils_no_other(many_tokens: bool, rng: np.random.Generator) -> None:
    case = Case(rng, "f16", 32, 6, 2, 300, 8)
    clean = case.run(many_tokens=many_tokens).reshape(8, 6, 32)
    case.q[3, 4, 5] = np.nan
    got = case.run(many_tokens=many_tokens).reshape(8, 6, 32)
    assert np.isnan(got[3, 4]).all()
    got[3, 4] = clean[3, 4]
    assert same_bits(got, clean)


# ------------------------------------------------------------------ memory and the engine


def test_nothing_past_the_end_is_read() -> None:
    script = Path(__file__).with_name("attention_guard.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("all read\n"), done.stdout[-300:] + done.stderr[-2000:]


@pytest.fixture
def small(tmp_path: Path) -> Callable[[int], Path]:
    def write(head_dim: int) -> Path:
        return write_model(tmp_path / f"{head_dim}.gguf", Spec(head_dim=head_dim, n_head=3, n_head_kv=1, n_ctx=512))

    return write


def test_a_model_with_a_cache_of_q8_0(small: Callable[[int], Path]) -> None:
    """Its logits are near those with F32, in blocks and token by token, and divergence is small."""
    path, tokens = small(32), [(7 * i + i * i) % 101 for i in range(300)]
    logits = {}
    for kind in ("f32", "q8_0"):
        with Engine.open(path, threads=2, kv_type=kind) as engine:
            block = engine.forward(tokens, "all").astype(np.float64)
            engine.truncate(290)
            single = np.array([engine.forward([token]) for token in tokens[290:]], np.float64)
            logits[kind] = block, single
    for exact, got in zip(logits["f32"], logits["q8_0"], strict=True):
        assert 0 < np.linalg.norm(got - exact) / np.linalg.norm(exact) < 1e-2
        p, q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (exact, got))
        assert (np.exp(p) * (p - q)).sum(axis=1).mean() < 1e-3


def test_heads_that_fill_no_block_of_q8_0(small: Callable[[int], Path]) -> None:
    with pytest.raises(HotcoldError, match="q8_0 needs.*multiple of 32, this model's is 16: use --kv-type f16"):
        Engine.open(small(16), kv_type="q8_0")
