"""convert/precision.py and lazy.py: casts equal the gguf package's, and what they lose is counted or refused."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotcold.convert import lazy
from hotcold.convert.lazy import LazyTensor, QType, columns, from_array, gathered, interleaved, scaled, to_float32
from hotcold.convert.lazy import transposed as turn
from hotcold.convert.precision import Report, cast
from hotcold.runtime.errors import HotcoldError


def tensor(x: np.ndarray, qtype: QType = QType.F32, name: str = "blk.0.ffn_down.weight") -> LazyTensor:
    """A float32 array stored as `qtype`."""
    raw = x if qtype == QType.F32 else gguf.quants.quantize(x, qtype)
    raw = raw.view(np.uint16) if qtype == QType.BF16 else raw
    return from_array(name, raw, qtype, x.shape, "")


def whole(t: LazyTensor) -> np.ndarray:
    return t.read(0, t.n_rows)


def normal(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, cols), dtype=np.float32)


@pytest.mark.parametrize("qtype", [QType.Q8_0, QType.Q4_0])
def test_quantization_equals_the_gguf_package(qtype: QType) -> None:
    x = normal(300, 96)
    x[0] = 0
    x[1, :32] = 1e-30
    np.testing.assert_array_equal(whole(cast(tensor(x), qtype, Report())), gguf.quants.quantize(x, qtype))


def test_bf16_rounds_to_nearest_even() -> None:
    x = np.array([[1.0, 1.00390625, 1.01171875, -3.1415927]], np.float32)  # two ties
    got = whole(cast(tensor(x), QType.BF16, Report()))
    assert got.dtype == np.uint16
    np.testing.assert_array_equal(to_float32(got, QType.BF16), [[1.0, 1.0, 1.015625, -3.140625]])


def test_equal_types_pass_untouched() -> None:
    t = tensor(np.array([[np.nan, np.inf]], np.float32))
    assert cast(t, QType.F32, Report()) is t


def bf16(*values: float) -> LazyTensor:
    return tensor(np.array([values], np.float32), QType.BF16, "blk.7.ffn_up.weight")


def test_bf16_to_f16_overflow_is_an_error_with_a_count() -> None:
    t = cast(bf16(1.0, 70144.0, -(2.0**100), 3.0), QType.F16, Report())
    with pytest.raises(HotcoldError) as e:
        whole(t)
    assert str(e.value) == ("tensor blk.7.ffn_up.weight: 2 of 4 values do not fit F16 (largest magnitude 1.26765e+30, "
                            "limit 65504): use --outtype bf16, f32 or q8_0")  # fmt: skip


def test_the_largest_f16_values_fit() -> None:
    x = np.array([[65504.0, -65519.0]], np.float32)  # 65519 rounds down
    np.testing.assert_array_equal(whole(cast(tensor(x), QType.F16, Report())), np.array([[65504, -65504]], np.float16))


def test_bf16_to_f16_counts_subnormal_and_flushed() -> None:
    report = Report()
    whole(cast(bf16(1.0, 0.0, 2.0**-14, 2.0**-15, -(2.0**-20), 2.0**-24, 2.0**-26, -1e-30), QType.F16, report))
    loss = report.f16["blk.7.ffn_up.weight"]
    assert (loss.subnormal, loss.flushed) == (3, 2)


def test_nothing_lost_is_not_reported() -> None:
    report = Report()
    whole(cast(bf16(1.0, -0.5, 0.0), QType.F16, report))
    assert report.f16 == {}


@pytest.mark.parametrize("qtype", [QType.F16, QType.Q8_0, QType.Q4_0])
def test_nan_is_refused(qtype: QType) -> None:
    x = normal(2, 32)
    x[1, 3] = np.nan
    with pytest.raises(HotcoldError, match="1 of 64 values are NaN"):
        whole(cast(tensor(x), qtype, Report()))


@pytest.mark.parametrize(("qtype", "limit"), [(QType.Q8_0, 127 * 65504.0), (QType.Q4_0, 8 * 65504.0)])
def test_block_scales_beyond_f16_are_refused(qtype: QType, limit: float) -> None:
    x = normal(2, 32)
    x[1, 3] = limit
    assert np.isfinite(gguf.quants.dequantize(whole(cast(tensor(x), qtype, Report())), qtype)).all()
    x[1, 3] = limit * 1.01
    with pytest.raises(HotcoldError, match=f"1 of 64 values do not fit {qtype.name}.*use --outtype bf16 or f32"):
        whole(cast(tensor(x), qtype, Report()))


def test_float64_beyond_float32_is_refused() -> None:
    t = from_array("x", np.array([1.0, 1e300]), QType.F64, (2,), "F64")
    with pytest.raises(HotcoldError, match="1 of 2 values do not fit F32"):
        whole(cast(t, QType.F32, Report()))


def test_requantization_error_is_measured() -> None:
    report = Report()
    t = turn(tensor(normal(64, 96), QType.Q4_1))
    got = gguf.quants.dequantize(whole(cast(t, QType.Q8_0, report, measure=True)), QType.Q8_0)
    want = whole(t)
    error = np.sqrt(((got - want) ** 2).sum() / (want**2).sum())
    assert report.relative_error(t.name) == pytest.approx(error, rel=1e-5)
    assert report.total_relative_error() == pytest.approx(error, rel=1e-5)


@pytest.mark.parametrize("qtype", [QType.F32, QType.F16, QType.BF16, QType.Q8_0, QType.Q4_1])
@pytest.mark.parametrize(("start", "stop"), [(0, 96), (0, 1), (31, 33), (32, 64), (95, 96), (10, 90)])
def test_columns(qtype: QType, start: int, stop: int) -> None:
    t = tensor(normal(40, 96), qtype)
    want = to_float32(whole(t), qtype)[:, start:stop]
    got = columns(t, start, stop)
    np.testing.assert_array_equal(to_float32(got, qtype) if got.dtype == np.uint16 else got.astype(np.float32), want)


@pytest.mark.parametrize("qtype", [QType.F32, QType.F16, QType.BF16])
def test_transposing_floats_moves_bits_only(qtype: QType) -> None:
    t = tensor(normal(33, 64), qtype)
    turned = turn(t)
    assert (turned.qtype, turned.shape) == (qtype, (64, 33))
    np.testing.assert_array_equal(whole(turned), whole(t).T)
    np.testing.assert_array_equal(whole(turn(turned)), whole(t))


def test_transposing_quantized_values_gives_f32_and_remembers() -> None:
    t = turn(tensor(normal(8, 64), QType.Q8_0))
    assert (t.qtype, t.was) == (QType.F32, QType.Q8_0)


def test_gathered_rows_keep_their_bytes() -> None:
    t = tensor(normal(10, 64), QType.Q8_0)
    order = np.array([3, 9, 0])
    g = gathered(t, order)
    assert g.shape == (3, 64) and g.n_bytes == 3 * 68
    np.testing.assert_array_equal(whole(g), whole(t)[order])
    np.testing.assert_array_equal(g.read(1, 3), whole(t)[order[1:3]])
    np.testing.assert_array_equal(columns(g, 5, 9), to_float32(whole(t), QType.Q8_0)[order, 5:9])


def test_scaled() -> None:
    x = normal(3, 32)
    t = scaled(tensor(x, QType.F16), 0.25)
    assert t.qtype == QType.F32
    np.testing.assert_array_equal(whole(t), x.astype(np.float16).astype(np.float32) * 0.25)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 40), data=st.data())
def test_any_slab_of_interleaved_rows(n: int, data: st.DataObject) -> None:
    even, odd = normal(n, 4, 1), normal(n, 4, 2)
    want = np.stack([even, odd], 1).reshape(2 * n, 4)
    t = interleaved("x", tensor(even), tensor(odd))
    a = data.draw(st.integers(0, 2 * n - 1))
    b = data.draw(st.integers(a + 1, 2 * n))
    np.testing.assert_array_equal(t.read(a, b), want[a:b])


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 3000), cols=st.sampled_from([1, 64, 100000]))
def test_slabs_cover_every_row_once(rows: int, cols: int) -> None:
    t = LazyTensor("x", (rows, cols), QType.F32, lambda a, b: np.zeros(0))
    slabs = t.slabs()
    assert slabs[0][0] == 0 and slabs[-1][1] == rows
    assert all(a[1] == b[0] for a, b in zip(slabs, slabs[1:], strict=False))
    assert all(a % lazy.SLAB_ALIGN == 0 and b > a for a, b in slabs)


def test_slabs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(700, 64)
    t = turn(tensor(np.ascontiguousarray(x.T), QType.F32))
    at_once = whole(cast(t, QType.Q8_0, Report()))
    monkeypatch.setattr(lazy, "SLAB_BYTES", 1)
    parts = [cast(t, QType.Q8_0, Report()).read(a, b) for a, b in t.slabs()]
    assert len(parts) == 3
    np.testing.assert_array_equal(np.concatenate(parts), at_once)
