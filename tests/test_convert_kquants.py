"""convert/q4k.py and what K-quants and the older types of 4 and 5 bits become on the way through `hotcold convert`.

In: golden/kquants.npz (stock llama.cpp), the files of kquants.py. The logits show that a stock file means here what it
means there: how far ours are from those of the same weights in F32 is compared with how far llama.cpp's are.
"""

from __future__ import annotations

import _thread
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import kquants
import numpy as np
import pytest
from conftest import convert_error, run_convert
from golden_layout import MAIN_LENGTH, POSITIONS, columns
from hypothesis import given, settings
from hypothesis import strategies as st
from test_convert_gguf import quantize_weights, rewrite
from tiny import token_ids

from hotcold.convert import parallel, q4k
from hotcold.convert.lazy import from_array, to_float32
from hotcold.convert.precision import BLOCK_MAX, SCALES, Report, cast, count_not_finite
from hotcold.convert.relufy_model import extended
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import dequantize, open_gguf

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


def test_ctrl_c_leaves_the_parts_that_wait_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    def make(rows: np.ndarray) -> np.ndarray:
        begun.append(len(begun))
        if len(begun) == 1:
            _thread.interrupt_main()
        time.sleep(0.02)
        return rows

    monkeypatch.setattr(parallel, "PART", 8)
    monkeypatch.setattr(parallel, "default_threads", lambda: 2)
    with pytest.raises(KeyboardInterrupt):
        parallel.by_rows(make, np.zeros((64, 8), np.float32), 8, np.float32)
    assert len(begun) < 60


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


# hotcold convert --outtype q4_k


def types(path: Path) -> dict[str, str]:
    with open_gguf(path) as f:
        return {n: t.ggml_type.name for n, t in f.tensors.items() if len(t.shape) > 1}


def test_outtype_q4_k(tiny_model: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint: everything Q4_K but the vocabulary's matrices and vectors; and back to a stock file."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4}
    path = tiny_model("llama", "q4_k", **wide)
    plain = tiny_model("llama", "f32", **wide)
    with open_gguf(path) as f, open_gguf(plain) as g:
        for name, info in g.tensors.items():
            got = f.tensors[name].ggml_type
            if len(info.shape) == 1:
                assert got == info.ggml_type
            elif name in ("token_embd.weight", "output.weight"):
                assert got == Q.Q8_0
            else:
                assert got == Q.Q4_K
                np.testing.assert_array_equal(f.data(name), q4k.quantize(g.data(name)))
        assert f.metadata["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q4_K_M
    run_convert(path, "--to-stock", "-o", tmp_path / "stock.gguf")
    assert "auto: Q4_K down matrices are quantized again, as Q8_0" in " ".join(capsys.readouterr().err.split())
    with open_gguf(path) as f, open_gguf(tmp_path / "stock.gguf") as g:
        for part in ("attn_q", "ffn_gate"):
            np.testing.assert_array_equal(f.data(f"blk.1.{part}.weight"), g.data(f"blk.1.{part}.weight"))
        pairs = f.data("blk.1.ffn_up_down.weight")
        np.testing.assert_array_equal(g.data("blk.1.ffn_up.weight"), pairs[0::2])
        down = np.ascontiguousarray(dequantize(pairs[1::2], Q.Q4_K).T)
        np.testing.assert_array_equal(g.data("blk.1.ffn_down.weight"), gguf.quants.quantize(down, Q.Q8_0))
    run_convert(path, "--to-stock", "-o", tmp_path / "stock4.gguf", "--outtype", "q4_k")
    assert types(tmp_path / "stock4.gguf")["blk.1.ffn_down.weight"] == "Q4_K"


def test_rows_that_do_not_divide_fall_back_as_in_llama_cpp(
    tiny_checkpoint: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_convert(tiny_checkpoint("llama"), "-o", tmp_path / "64.gguf", "--outtype", "q4_k")
    err = capsys.readouterr().err
    assert "attn_q.weight: Q5_0 instead of Q4_K, as rows of 64 do not divide into blocks of 256" in err
    assert types(tmp_path / "64.gguf")["blk.0.ffn_up_down.weight"] == "Q5_0"
    run_convert(tiny_checkpoint("llama-embd72"), "-o", tmp_path / "72.gguf", "--outtype", "q4_k")
    assert set(types(tmp_path / "72.gguf").values()) == {"F16"}


# Stock files


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("kquants")
    return lambda mixture: kquants.write_stock(folder / f"{mixture}.gguf", mixture)


@pytest.mark.parametrize("mixture", kquants.MIXTURES)
def test_what_is_not_a_neuron_row_keeps_its_bytes(
    mixture: str, stock: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src = stock(mixture)
    run_convert(src, "-o", tmp_path / "o.gguf")
    err = " ".join(capsys.readouterr().err.split())
    with open_gguf(src) as a, open_gguf(tmp_path / "o.gguf") as b:
        for name, info in a.tensors.items():
            if not name.endswith(("ffn_up.weight", "ffn_down.weight")):
                assert b.tensors[name].ggml_type == info.ggml_type
                np.testing.assert_array_equal(a.data(name), b.data(name))
        for layer in range(kquants.N_LAYER):
            up, down = (dequantize(a.data(n), a.tensors[n].ggml_type)
                        for n in (f"blk.{layer}.ffn_up.weight", f"blk.{layer}.ffn_down.weight"))
            pairs = b.data(f"blk.{layer}.ffn_up_down.weight")
            np.testing.assert_array_equal(pairs[0::2], gguf.quants.quantize(up, Q.Q8_0))
            np.testing.assert_array_equal(pairs[1::2], gguf.quants.quantize(np.ascontiguousarray(down.T), Q.Q8_0))
    first = kquants.kind_of(mixture, "blk.0.ffn_up").name
    assert f"auto: {first} up rows and down columns are quantized again, as Q8_0: turning" in err


def test_4_bits_again_keep_what_is_4_bits(stock: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--outtype q4_k on a Q4_K_M file: what is Q4_K stays, up rows too; the vocabulary's matrices stay whatever."""
    src = stock("Q4_K_M")
    run_convert(src, "-o", tmp_path / "o.gguf", "--outtype", "q4_k")
    with open_gguf(src) as a, open_gguf(tmp_path / "o.gguf") as b:
        for name in ("token_embd.weight", "output.weight", "blk.0.attn_v.weight", "blk.1.ffn_gate.weight"):
            np.testing.assert_array_equal(a.data(name), b.data(name))
        np.testing.assert_array_equal(b.data("blk.1.ffn_up_down.weight")[0::2], a.data("blk.1.ffn_up.weight"))
        assert b.tensors["blk.1.attn_v.weight"].ggml_type == Q.Q4_K
    assert "q4_k: output.weight stays Q6_K, as it is in the source" in capsys.readouterr().err


def test_types_that_are_only_read_become_q8_0(
    tiny_model: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = tiny_model("llama", stock=True, hidden_size=256, intermediate_size=256)
    src = rewrite(wide, tmp_path / "s.gguf", quantize_weights(Q.TQ2_0))
    run_convert(src, "-o", tmp_path / "o.gguf")
    assert set(types(tmp_path / "o.gguf").values()) == {"Q8_0"}
    assert "auto: TQ2_0 tensors become Q8_0: the runtime computes with F32" in capsys.readouterr().err


@pytest.mark.parametrize(("mixture", "name"), [
    ("Q4_K_M", "blk.0.attn_q.weight"), ("Q4_K_M", "output.weight"), ("Q5_K_M", "blk.0.ffn_gate.weight"),
    ("Q5_0", "blk.0.attn_k.weight"), ("Q4_1 and Q5_1", "blk.0.attn_q.weight"),
    ("Q4_1 and Q5_1", "blk.1.attn_q.weight"), ("Q4_K_M", "blk.0.ffn_down.weight"),
])  # fmt: skip
def test_scales_that_are_not_finite_are_refused(mixture: str, name: str, stock: Any, tmp_path: Path) -> None:
    kind = kquants.kind_of(mixture, name.removesuffix(".weight"))
    for place in SCALES[kind]:
        for bits in (0x7C00, 0xFE01):  # infinity, -NaN

            def spoil(metadata: Any, tensors: Any, place: int = place, bits: int = bits) -> None:
                raw, _ = tensors[name]
                raw[7, place:place + 2] = np.frombuffer(np.uint16(bits).tobytes(), np.uint8)

            src = rewrite(stock(mixture), tmp_path / "s.gguf", spoil)
            error = convert_error(src, "-o", tmp_path / "o.gguf", "--force")
            assert "NaN or infinite: the source is damaged" in error and name.split(".")[1] in error
            assert not (tmp_path / "o.gguf").exists()


def test_relu_as_silu_of_types_that_are_only_read(
    tmp_path: Path, stock: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def relu(metadata: dict[str, Any], tensors: Any) -> None:
        metadata["hotcold.ffn.activation"] = "relu"

    src = rewrite(stock("Q5_K_M"), tmp_path / "s.gguf", relu)
    run_convert(src, "--to-stock", "--relu-as-silu", "8", "-o", tmp_path / "o.gguf")
    assert "Q5_K tensors that are scaled become Q8_0" in capsys.readouterr().err
    got = types(tmp_path / "o.gguf")
    assert got["blk.0.ffn_gate.weight"] == "Q8_0" and got["blk.0.attn_q.weight"] == "Q5_K"


@pytest.mark.parametrize(("kind", "changed", "want"), [
    (Q.Q4_K, False, Q.Q4_K), (Q.Q4_K, True, Q.Q8_0), (Q.Q6_K, False, Q.Q8_0), (Q.Q5_0, False, Q.Q5_0),
    (Q.Q8_0, True, Q.Q8_0), (Q.F16, True, Q.F16),
])  # fmt: skip
def test_rows_that_relufy_adds(kind: Q, changed: bool, want: Q) -> None:
    """Beside rows that stay as they are, the same type if it can be written; rows that change are never made coarse."""
    new = np.random.default_rng(0).standard_normal((8, 256), dtype=np.float32)
    if kind == Q.F16:
        own = from_array("x", new.astype(np.float16), kind, new.shape, "")
    else:
        own = from_array("x", kquants.blocks(kind, "x", 8, 256, 16.0), kind, new.shape, "")
    t = extended(own, new, Report(), np.ones((8, 256), np.float32) if changed else None)
    assert (t.qtype, t.shape) == (want, (16, 256))
    rows = t.read(0, 16)
    if want == kind and not changed:
        np.testing.assert_array_equal(rows[:8], own.read(0, 8))
    values, source = to_float32(rows, want), to_float32(own.read(0, 8), kind)
    assert np.linalg.norm(values[:8] - source - changed) <= 0.01 * np.linalg.norm(source)
    assert np.linalg.norm(values[8:] - new) <= 0.1 * np.linalg.norm(new)


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


# Logits


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b.astype(np.float64)))


@pytest.mark.parametrize("mixture", kquants.MIXTURES)
def test_logits_of_stock_files(mixture: str, stock: Any, golden: Any, tmp_path: Path) -> None:
    """At once and one by one, stock and converted: no further from the exact ones than llama.cpp is, and near both."""
    from hotcold.runtime.engine import Engine

    theirs, exact = golden[mixture], golden[f"{mixture} exact"]
    ids = token_ids(MAIN_LENGTH, kquants.N_VOCAB)
    chosen = np.ix_(POSITIONS, columns(kquants.N_VOCAB))
    noise = distance(theirs, exact)
    run_convert(stock(mixture), "-o", tmp_path / "o.gguf")
    # A converted file has other down matrices: Q8_0 adds an error of half a percent in two layers.
    for path, allowed in ((stock(mixture), noise), (tmp_path / "o.gguf", noise + 0.005)):
        engine = Engine.open(path, threads=2, kv_type="f16", notify=lambda line: None)
        try:
            at_once = engine.forward(ids, logits="all")[chosen]
            engine.truncate(0)
            one_by_one = np.stack([engine.forward([t]) for t in ids])[chosen]
        finally:
            engine.close()
        for ours in (at_once, one_by_one):
            assert distance(ours, exact) <= 1.1 * allowed
            assert distance(ours, theirs) <= 1.5 * allowed  # two errors of that size at a right angle: 1.41
