"""convert/q4k.py against llama.cpp's quantizer (golden/kquants.npz), block types that convert/precision.py writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import kquants
import numpy as np
import pytest
from conftest import run_convert
from hypothesis import given, settings
from hypothesis import strategies as st
from test_convert_gguf import rewrite

from hotcold.convert import parallel, q4k
from hotcold.convert.lazy import from_array
from hotcold.convert.precision import BLOCK_MAX, Report, cast, count_not_finite
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import open_gguf

Get = Callable[..., Path]
Q = gguf.GGMLQuantizationType
LIMIT = BLOCK_MAX[Q.Q4_K]


def round_trip(x: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(q4k.quantize(x), Q.Q4_K)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parent / "golden" / "kquants.npz") as file:
        return {name: file[name] for name in file.files}


# Quantizing to Q4_K


@pytest.mark.parametrize("name", kquants.samples())
def test_q4_k_is_as_good_as_llama_cpps(name: str, golden: Any) -> None:
    x = kquants.samples()[name]
    error = np.linalg.norm(round_trip(x) - x) / np.linalg.norm(x)
    assert error <= 1.001 * golden[f"Q4_K {name}"]


@pytest.mark.parametrize(("value", "error"), [
    (0.0, 0.0), (1.0, 1e-3), (-1.0, 1e-3), (LIMIT, 1e-3), (-LIMIT, 1e-3), (1e-3, 1e-2), (1e-8, 1.0), (1e-30, 1.0),
    (-1e-30, 1.0), (1e-45, 1.0),
])  # fmt: skip
def test_q4_k_of_equal_values(value: float, error: float) -> None:
    x = np.full((1, 256), value, np.float32)
    assert np.abs(round_trip(x) - x).max() <= error * abs(x[0, 0])


def test_q4_k_finds_values_that_it_can_hold() -> None:
    """Blocks whose scale and minimum of 6 bits are used to the full come back as they were, but for rounding."""
    rng = np.random.default_rng(0)
    s, t = rng.integers(8, 64, (2, 50, 8, 1))
    s[:, 3], t[:, 5] = 63, 63
    q = rng.integers(0, 16, (50, 8, 32))
    q[..., 0], q[..., 1] = 0, 15
    x = (np.float32(2**-9) * (s * q) - np.float32(2**-6) * t).astype(np.float32).reshape(50, 256)
    assert np.linalg.norm(round_trip(x) - x) <= 1e-3 * np.linalg.norm(x)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_q4_k_of_anything_is_better_than_zeros(data: st.DataObject) -> None:
    """Sets of very different sizes in one block, whatever their signs: finite, never worse than leaving them out."""
    sizes = data.draw(st.lists(st.floats(2.0**-120, 2.0**18, width=32), min_size=8, max_size=8))
    offset = data.draw(st.sampled_from([0.0, 1.0, -1.0, 7.0, -7.0]))
    noise = np.random.default_rng(data.draw(st.integers(0, 99))).uniform(-1, 1, (8, 32))
    x = ((noise + offset) * np.array(sizes)[:, None]).astype(np.float32).reshape(1, 256)
    y = round_trip(x)
    assert np.isfinite(y).all()
    assert np.sum((y - x).astype(np.float64) ** 2) <= 1.0001 * np.sum(x.astype(np.float64) ** 2)


@pytest.mark.parametrize("rows", [1, 3, 31, 33])
def test_q4_k_of_any_number_of_blocks(rows: int) -> None:
    """Blocks do not depend on what stands beside them: a row alone gives the same bytes."""
    x = np.random.default_rng(rows).standard_normal((rows, 768), dtype=np.float32)
    np.testing.assert_array_equal(q4k.quantize(x), np.concatenate([q4k.quantize(row[None]) for row in x]))


@pytest.mark.parametrize("qtype", BLOCK_MAX)
def test_parts_and_threads_change_nothing(qtype: Q, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).standard_normal((67, 512), dtype=np.float32)
    t = from_array("x", x, Q.F32, x.shape, "")
    at_once = cast(t, qtype, Report()).read(0, 67)
    monkeypatch.setattr(parallel, "PART", 1024)
    monkeypatch.setattr(parallel, "default_threads", lambda: 3)
    np.testing.assert_array_equal(cast(t, qtype, Report()).read(0, 67), at_once)
    back = from_array("x", at_once, qtype, x.shape, "")
    np.testing.assert_array_equal(cast(back, Q.F32, Report()).read(0, 67), gguf.quants.dequantize(at_once, qtype))


def test_an_error_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(rows: np.ndarray) -> np.ndarray:
        raise HotcoldError("no")

    monkeypatch.setattr(parallel, "PART", 8)
    monkeypatch.setattr(parallel, "default_threads", lambda: 2)
    with pytest.raises(HotcoldError, match="no"):
        parallel.by_rows(fail, np.zeros((64, 8), np.float32), 8, np.float32)


@pytest.mark.parametrize("qtype", [q for q in BLOCK_MAX if q not in (Q.Q8_0, Q.Q4_0)])
def test_what_does_not_fit_is_refused(qtype: Q) -> None:
    x = np.random.default_rng(0).standard_normal((2, 256), dtype=np.float32)

    def read() -> np.ndarray:
        return cast(from_array("x", x, Q.F32, x.shape, ""), qtype, Report()).read(0, 2)

    for value in (BLOCK_MAX[qtype], -BLOCK_MAX[qtype]):
        x[1, 3] = value
        assert count_not_finite(read(), qtype) == 0
        assert np.isfinite(gguf.quants.dequantize(read(), qtype)).all()
        x[1, 3] = value * 1.01
        with pytest.raises(HotcoldError, match=f"1 of 512 values do not fit {qtype.name}"):
            read()
    for bad in (np.nan, np.inf, -np.inf):
        x[1, 3] = bad
        with pytest.raises(HotcoldError, match="1 of 512 values are NaN or infinite"):
            read()


# hotcold convert


@pytest.mark.parametrize("to_stock", [True, False])
def test_facts_about_the_model_survive(to_stock: bool, tiny_model: Get, tmp_path: Path) -> None:
    """What relufy did and what factors the weights carry; not what placement found of an order of neurons."""
    facts = {"hotcold.relufy.rank": 4, "hotcold.relufy.tokens": 1000, "hotcold.relufy.error": [0.5, 0.25, 0.125],
             "hotcold.relu_as_silu": 8}

    def change(metadata: dict[str, Any], tensors: Any) -> None:
        metadata.update(facts | {"hotcold.profile.corpus": "a text"})

    src = rewrite(tiny_model("relu", stock=not to_stock), tmp_path / "s.gguf", change)
    run_convert(src, "-o", tmp_path / "o.gguf", *(["--to-stock"] if to_stock else []))
    with open_gguf(src) as a, open_gguf(tmp_path / "o.gguf") as b:
        for key, value in facts.items():
            np.testing.assert_array_equal(b.metadata[key], value)
            assert a.types[key] == b.types[key]
        assert "hotcold.profile.corpus" not in b.metadata
