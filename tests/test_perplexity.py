"""`hotcold perplexity` against float64, and llama.cpp's base files: as they are, and as strangers make them."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType
from small_models import Reference, Spec, write_model

from hotcold.convert.model import array
from hotcold.placement.rewrite import rewrite
from hotcold.runtime import cli, perplexity, schema
from hotcold.runtime.engine import Engine
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.kl import Base, base_bytes, encode_rows, log_softmax, n_scored, write_header
from hotcold.runtime.kl_stats import KLStats, estimate, mean_error
from hotcold.runtime.perplexity import cut_chunks, measure

SPEC = Spec(head=Type.F32)
N_CTX = 40
TEXT = "the rain in the woods is on the other side of a hill, and so the sea is at rest. " * 8


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("small") / "model.gguf", SPEC)


@pytest.fixture(scope="module")
def chunks() -> np.ndarray:
    return np.random.default_rng(3).integers(0, SPEC.n_vocab, (7, N_CTX)).astype(np.int32)


def engine(path: Path, **options: Any) -> Engine:
    return Engine.open(path, threads=1, n_ctx=N_CTX, kv_type="f32", **options)


def log_probs(path: Path, chunks: np.ndarray, bos: int | None = None) -> np.ndarray:
    """float64 [n_chunk, scored, n_vocab], by the plain functions."""
    reference = Reference(path, kv=np.float32)
    out = []
    for chunk in chunks:
        ids = chunk.copy()
        if bos is not None:
            ids[0] = bos
        logits = reference.logits(ids)[0].astype(np.float64)[N_CTX // 2 : -1]
        out.append(logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
                   - logits.max(1, keepdims=True))  # fmt: skip
    return np.stack(out)


def nll_of(values: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    targets = chunks[:, N_CTX // 2 + 1 :]
    return -np.take_along_axis(values, targets[..., None].astype(np.int64), 2)[..., 0].reshape(-1)


def save_base(path: Path, model: Path, chunks: np.ndarray) -> Path:
    with path.open("wb") as file, engine(model) as e:
        measure(e, chunks, save=file)
    return path


# ------------------------------------------------------------------ perplexity


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("bos", [None, 5])
def test_perplexity_equals_float64(small: Path, chunks: np.ndarray, per_token: bool, bos: int | None) -> None:
    expected = nll_of(log_probs(small, chunks, bos), chunks)
    seen: list[int] = []
    with engine(small, sparsity="exact") as e:
        m = measure(e, chunks, bos=bos, per_token=per_token, advance=seen.append)
    assert (m.done, m.tokens, sum(seen)) == (7, 7 * (N_CTX - 1), 7 * (N_CTX - 1))
    np.testing.assert_allclose(m.nll, expected, atol=2e-3)
    ppl, error = m.ppl
    assert ppl == pytest.approx(math.exp(expected.mean()), rel=1e-3)
    # standard error of the mean log-probability, carried over to its exponential
    assert error == pytest.approx(ppl * expected.std() / math.sqrt(len(expected) - 1), rel=1e-3)


def test_dense_and_exact_agree(small: Path, chunks: np.ndarray) -> None:
    results = []
    for mode in ("dense", "exact"):
        with engine(small, sparsity=mode) as e:
            results.append(measure(e, chunks, per_token=True).nll)
    np.testing.assert_allclose(*results, atol=1e-4)


def test_pieces_of_logits_change_nothing(small: Path, chunks: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(small) as e:
        whole = measure(e, chunks[:2]).nll
        monkeypatch.setattr(perplexity, "LOGITS_BYTES", 4 * SPEC.n_vocab * 7)
        monkeypatch.setattr(perplexity, "_SLICE_BYTES", 4 * SPEC.n_vocab * 3)
        np.testing.assert_array_equal(measure(e, chunks[:2]).nll, whole)


def test_chunks_are_cut_and_short_texts_refused() -> None:
    tokens = np.arange(100)
    np.testing.assert_array_equal(cut_chunks(tokens, 40), tokens[:80].reshape(2, 40))
    assert cut_chunks(tokens, 40, 1).shape == (1, 40)
    assert cut_chunks(tokens, 40, 9).shape == (2, 40)
    with pytest.raises(HotcoldError, match="too short: it has 100 tokens, at least 102 are needed"):
        cut_chunks(tokens, 51)
    with pytest.raises(HotcoldError, match="allowed are 8"):
        cut_chunks(tokens, 7)


def test_error_bars() -> None:
    values = np.array([1.0, 2.0, 4.0])
    assert estimate(values)[1] == pytest.approx(math.exp(7 / 3) * math.sqrt(values.var() / 2))
    assert mean_error(values) == (pytest.approx(7 / 3), 0.0)  # too few
    assert mean_error(np.zeros(0)) == (0.0, 0.0)
    assert estimate(np.array([1e4])) == (math.inf, pytest.approx(math.nan, nan_ok=True))


def test_logits_that_are_no_numbers_are_refused() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        logits = np.zeros((2, 5), np.float32)
        logits[1, 2] = bad
        with pytest.raises(HotcoldError, match="NaN or infinite"):
            log_softmax(logits)


# ------------------------------------------------------------------ base files


# Rows that llama.cpp's own function makes of LOGITS, and of a vocabulary of odd size: one u16 of padding.
LOGITS = np.array([[0, 1, 2, 3, -30], [1.5] * 5, [-1, 7, 0.25, -3, 4]], np.float32)
ROWS = bytes.fromhex(
    "80008039828583c1ffcfffdfffefffff00000000"
    "000000001002cebf000000000000000000000000"
    "a000203910cd20c13333ffff3353000032b30000"
)


def golden_file(path: Path) -> Path:
    """n_ctx 8, so 3 rows per chunk; 5 tokens; 1 chunk."""
    tokens = struct.pack("<8i", 0, 1, 2, 3, 4, 3, 0, 4)
    path.write_bytes(b"_logits_" + struct.pack("<iii", 8, 5, 1) + tokens + ROWS)
    return path


def test_layout_is_llama_cpps(tmp_path: Path) -> None:
    path = golden_file(tmp_path / "base")
    assert base_bytes(8, 5, 1) == path.stat().st_size
    with Base(path, 5) as base:
        assert (base.n_ctx, base.n_vocab, base.n_chunk) == (8, 5, 1)
        assert base.tokens.tolist() == [[0, 1, 2, 3, 4, 3, 0, 4]]
        values = base.log_probs(0, 0, 3)
    expected = LOGITS - np.log(np.exp(LOGITS.astype(np.float64)).sum(1, keepdims=True))
    expected[0, 4] = expected[0, 3] - 16  # what is further below the highest counts as this far below
    np.testing.assert_allclose(values, expected, atol=1.3e-4)
    with (tmp_path / "ours").open("wb") as file:
        write_header(file, np.array([[0, 1, 2, 3, 4, 3, 0, 4]]), 5)
        file.write(encode_rows(log_softmax(LOGITS)).data)
    assert (tmp_path / "ours").read_bytes() == path.read_bytes()


def test_a_base_goes_round_and_a_model_equals_itself(small: Path, chunks: np.ndarray, tmp_path: Path) -> None:
    path = save_base(tmp_path / "base", small, chunks)
    expected = log_probs(small, chunks)
    expected = np.maximum(expected, expected.max(2, keepdims=True) - 16)
    with Base(path, SPEC.n_vocab) as base, engine(small) as e:
        np.testing.assert_array_equal(base.tokens, chunks)
        for i in range(len(chunks)):
            np.testing.assert_allclose(base.log_probs(i, 0, n_scored(N_CTX)), expected[i], atol=3e-3)
        m = measure(e, base.tokens, base=base)
    n = m.kl.numbers()
    assert m.kl.count == 7 * n_scored(N_CTX)
    assert abs(n["kld"][0]) < 2e-5 and np.abs(m.kl.values("kld")).max() < 1.3e-4  # half a step of 16 / 65535
    assert n["same_top"][0] > 0.99
    assert n["correlation"][0] == pytest.approx(1, abs=1e-2)  # improbable tokens are cut off in the base
    assert n["ppl"] == pytest.approx(m.ppl)


def test_comparison_equals_float64(small: Path, chunks: np.ndarray, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other.gguf", Spec(head=Type.F32, attn=Type.Q4_0, key=Type.Q4_0, value=Type.Q4_0))
    path = save_base(tmp_path / "base", small, chunks)
    with Base(path, SPEC.n_vocab) as base, engine(other) as e:
        kl = measure(e, base.tokens, base=base).kl
    p, q = log_probs(small, chunks), log_probs(other, chunks)
    p = np.maximum(p, p.max(2, keepdims=True) - 16)
    kld = (np.exp(p) * (p - q)).sum(2).reshape(-1)
    nll, nll_base = nll_of(q, chunks), nll_of(p, chunks)
    p_diff = np.exp(-nll) - np.exp(-nll_base)
    n, got = len(kld), kl.numbers()

    def error(values: np.ndarray) -> float:
        return float(values.std() / math.sqrt(n - 1))

    expected = {
        "ppl": (math.exp(nll.mean()), math.exp(nll.mean()) * error(nll)),
        "ppl_base": (math.exp(nll_base.mean()), math.exp(nll_base.mean()) * error(nll_base)),
        "correlation": (np.corrcoef(nll, nll_base)[0, 1], 0),
        "ln_ratio": ((nll - nll_base).mean(), error(nll - nll_base)),
        "ratio": (math.exp((nll - nll_base).mean()), math.exp((nll - nll_base).mean()) * error(nll - nll_base)),
        "kld": (kld.mean(), error(kld)),
        "p_diff": (p_diff.mean(), error(p_diff)),
        "p_diff_rms": (math.sqrt((p_diff**2).mean()), error(p_diff**2) / 2 / math.sqrt((p_diff**2).mean())),
    }
    for key, value in expected.items():
        assert got[key] == pytest.approx(value, rel=2e-2, abs=2e-4), key
    same = (p.argmax(2) == q.argmax(2)).mean()
    assert got["same_top"][0] == pytest.approx(same, abs=0.02)
    assert got["same_top"][1] == pytest.approx(math.sqrt(same * (1 - same) / (n - 1)), rel=0.1)
    assert got["difference"][0] == pytest.approx(got["ppl"][0] - got["ppl_base"][0])
    percent = kl.kld_percentiles()
    assert list(percent) == ["Maximum", "99.9%", "99.0%", "95.0%", "90.0%", "Median", "10.0%", "5.0%", "1.0%", "0.1%",
                             "Minimum"]  # fmt: skip
    assert percent["90.0%"] == pytest.approx(np.quantile(kld, 0.9), rel=1e-2)
    assert len(kl.p_diff_percentiles()) == 13


def test_improbable_tokens_of_the_base_do_not_count() -> None:
    model = log_softmax(np.zeros((1, 3), np.float32))
    kl = KLStats()
    kl.add(model, np.array([[0.0, -16.0, -17.0]], np.float32), np.array([0]))
    assert kl.values("kld")[0] == pytest.approx(math.log(3))


def _patched(raw: bytes, at: int, data: bytes) -> bytes:
    return raw[:at] + data + raw[at + len(data) :]


HOSTILE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda b: b"", "0 bytes"),
    "short": (lambda b: b[:19], "19 bytes"),
    "magic": (lambda b: b"_Logits_" + b[8:], "begins with b'_Logits_'"),
    "n_ctx 0": (lambda b: _patched(b, 8, struct.pack("<i", 0)), "n_ctx is 0"),
    "n_ctx negative": (lambda b: _patched(b, 8, struct.pack("<i", -8)), "n_ctx is -8"),
    "n_ctx huge": (lambda b: _patched(b, 8, struct.pack("<i", 2**31 - 1)), "n_ctx is 2147483647"),
    "n_vocab": (lambda b: _patched(b, 12, struct.pack("<i", 6)), "6 tokens in its vocabulary, this one has 5"),
    "n_vocab negative": (lambda b: _patched(b, 12, struct.pack("<i", -5)), "n_vocab is -5"),
    "n_chunk 0": (lambda b: _patched(b, 16, struct.pack("<i", 0)), "n_chunk is 0"),
    "n_chunk huge": (lambda b: _patched(b, 16, struct.pack("<i", 1 << 30)), "incomplete"),
    "cut": (lambda b: b[:-1], "incomplete"),
    "longer": (lambda b: b + b"\0", "damaged"),
    "token": (lambda b: _patched(b, 24, struct.pack("<i", 5)), "token 1 of chunk 0 is 5"),
    "token negative": (lambda b: _patched(b, 24, struct.pack("<i", -1)), "token 1 of chunk 0 is -1"),
    "scale NaN": (lambda b: _patched(b, 52, struct.pack("<f", math.nan)), "row 0 of chunk 0 has scale nan"),
    "scale inf": (lambda b: _patched(b, 72, struct.pack("<f", math.inf)), "row 1 of chunk 0 has scale inf"),
    "scale negative": (lambda b: _patched(b, 52, struct.pack("<f", -1e-4)), "no probabilities have"),
    "probability": (lambda b: _patched(b, 56, struct.pack("<f", 3e38)), "no probabilities have"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_bases_are_refused(case: str, tmp_path: Path) -> None:
    change, message = HOSTILE[case]
    path = golden_file(tmp_path / "base")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(HotcoldError) as e, Base(path, 5) as base:
        base.log_probs(0, 0, 3)
    assert message in str(e.value) and "\n" not in str(e.value) and str(path) in str(e.value)


def test_mutated_bases_are_read_or_refused(tmp_path: Path) -> None:
    whole, rng = golden_file(tmp_path / "base").read_bytes(), np.random.default_rng(11)
    refused = 0
    for _ in range(400):
        raw = bytearray(whole)
        for at in rng.integers(0, len(raw) if rng.random() < 0.5 else 80, rng.integers(1, 4)):
            raw[at] = rng.choice([0, 1, 127, 128, 255, rng.integers(256)])
        (tmp_path / "base").write_bytes(raw[: len(raw) - int(rng.integers(0, 3) ** 2) // 4])
        try:
            with Base(tmp_path / "base", 5) as base:
                assert base.tokens.min() >= 0 and base.tokens.max() < 5
                for chunk in range(base.n_chunk):
                    assert np.isfinite(base.log_probs(chunk, 0, n_scored(base.n_ctx))).all()
        except HotcoldError as e:
            refused += 1
            assert "\n" not in str(e)
    assert 100 < refused < 400


def test_what_is_no_file_is_no_base(tmp_path: Path) -> None:
    for path, message in ((tmp_path, "not a regular file"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(HotcoldError, match=message):
            Base(path, 5)


# ------------------------------------------------------------------ the command


def hotcold(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        code = cli.main(["perplexity", *map(str, arguments)])
    except SystemExit as e:
        code = int(e.code or 0)
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT + "\n")
    return path


def test_command(tiny_model: Callable[..., Path], text: Path, tmp_path: Path,
                 capsys: pytest.CaptureFixture[str]) -> None:
    from hotcold.runtime.tokenizer import Tokenizer

    model, base, result = tiny_model("llama"), tmp_path / "base", tmp_path / "result.json"
    code, out, err = hotcold(capsys, model, "-f", text, "-c", 64, "--chunks", 3, "-t", 1, "--save-kl-base", base)
    assert code == 0, err
    lines = out.splitlines()
    assert [v.split("]")[0] for v in lines[0].rstrip(",").split(",")] == ["[1", "[2", "[3"]
    assert lines[1].startswith("Final estimate: PPL = ") and " +/- " in lines[1]
    assert lines[0].split("]")[-1].rstrip(",") == lines[1].split()[4]
    assert "3 chunks of 64 tokens, 31 of each are scored" in err
    tokenizer = Tokenizer.from_gguf(model)
    expected = cut_chunks(tokenizer.encode(TEXT), 64, 3)
    with Base(base, 288) as b:
        np.testing.assert_array_equal(b.tokens, expected)

    code, out, err = hotcold(capsys, model, "-f", text, "--kl-base", base, "-t", 1, "-o", result)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].split()[0] == "chunk" and [line.split()[0] for line in lines[1:4]] == ["1", "2", "3"]
    assert "Final estimate" in out and "only 93 tokens" in out  # too few for statistics
    record = json.loads(result.read_text())
    assert record["scored"] == 93 and abs(record["kl"]["kld"]["value"]) < 1e-4
    assert record["kl"]["same_top"]["value"] == pytest.approx(1, abs=0.03)

    assert hotcold(capsys, model, "-f", text, "-c", 64, "-t", 1, "--save-kl-base", base, "--force")[0] == 0
    code, out, err = hotcold(capsys, model, "--kl-base", base, "-t", 1)
    assert code == 0, err
    for label in ("Mean PPL(Q)                   : ", "Cor(ln(PPL(Q)), ln(PPL(base))): ", "Mean    KLD: ",
                  " 5.0%   KLD: ", "Median  KLD: ", "Maximum Δp: ", "RMS Δp    : ", "Same top p: "):  # fmt: skip
        assert sum(line.startswith(label) for line in out.splitlines()) == 1, label
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".part")] == []


def test_per_token_counts_neurons(tiny_model: Callable[..., Path], text: Path, tmp_path: Path,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    model, result = tiny_model("relu"), tmp_path / "result.json"
    options = (model, "-f", text, "-c", 32, "--chunks", 2, "-t", 1)
    code, out, err = hotcold(capsys, *options, "--per-token", "-o", result)
    assert code == 0 and "token by token (exact)" in err
    assert "neurons computed = " in out and "FFN bytes read   = " in out
    layers = json.loads(result.read_text())["layers"]
    assert len(layers["computed"]) == 3 and all(0 < share < 1 for share in layers["computed"])
    # gated, rows of one size: every key row, and the other two of what fires
    np.testing.assert_allclose(layers["bytes_share"], [(1 + 2 * a) / 3 for a in layers["computed"]], rtol=1e-6)
    blocks = hotcold(capsys, *options)[1].splitlines()[1].split()
    single = out.splitlines()[1].split()
    assert float(single[4]) == pytest.approx(float(blocks[4]), rel=1e-3)


def test_a_text_over_the_limit_is_not_called_damaged(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading stops within its last character."""
    monkeypatch.setattr("hotcold.runtime.perplexity.MAX_INPUT", 1 << 20)
    long = tmp_path / "long.txt"
    long.write_text("a" * (1 << 20) + "\u20ac", encoding="utf-8")
    code, _, err = hotcold(capsys, tiny_model("llama"), "-f", long)
    assert code == 1 and "long.txt: is larger than 1 MiB" in err


def test_command_errors(tiny_model: Callable[..., Path], small: Path, text: Path, tmp_path: Path,
                        capsys: pytest.CaptureFixture[str]) -> None:
    model, base = tiny_model("llama"), tmp_path / "base"
    assert hotcold(capsys, model, "-f", text, "-c", 64, "-t", 1, "--chunks", 1, "--save-kl-base", base)[0] == 0
    other = tmp_path / "other.txt"
    other.write_text(TEXT.replace("rain", "snow"))
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    for arguments, code, message in (
        ((model,), 2, "no text: give -f TEXT"),
        ((model, "-f", text, "-c", "0"), 2, "must be a whole number from 1 to"),
        ((model, "-f", text, "-c", "512"), 1, "too short"),
        ((model, "-f", latin), 1, "is not UTF-8: byte 3 is 0xe9"),
        ((model, "-f", tmp_path / "none"), 1, "cannot be read"),
        ((small, "-f", text), 1, "no vocabulary"),
        ((model, "-f", text, "-c", 64, "--save-kl-base", base), 1, "exists already"),
        ((model, "-f", text, "-o", text, "--force"), 1, "is read by this command"),
        ((model, "-f", text, "-o", tmp_path / "no" / "file"), 1, "no such folder"),
        ((model, "-f", other, "--kl-base", base), 1, "made from another text"),
        ((model, "--kl-base", base, "-c", 32), 1, "leave out -c 32"),
        ((model, "--kl-base", base, "--save-kl-base", base), 2, "not allowed with"),
        ((tiny_model("llama-vocab"), "--kl-base", base), 1, "vocabulary"),
    ):
        got, _, err = hotcold(capsys, *arguments)
        assert got == code and message in err.splitlines()[-1], (arguments, err)


def test_an_interrupted_base_leaves_no_file(tiny_model: Callable[..., Path], text: Path, tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    forward, calls = Engine.forward, []

    def interrupted(self: Engine, tokens: Any, logits: str = "last") -> np.ndarray:
        calls.append(len(tokens))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return forward(self, tokens, logits)

    monkeypatch.setattr(Engine, "forward", interrupted)
    options = (tiny_model("llama"), "-f", text, "-c", 64, "-t", 1)
    code, out, err = hotcold(capsys, *options, "--save-kl-base", tmp_path / "base")
    assert code == 130 and "interrupted after 1 of" in out and "Traceback" not in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["text.txt"]


def with_predictors(src: Path, out: Path, bias: Callable[[int], np.ndarray]) -> Path:
    """A copy whose predictors name the neurons with a positive bias, whatever the token."""
    tensors: dict[str, Any] = {}
    for layer in range(3):
        values = {schema.FFN_PRED_IN: np.zeros((32, 64)), schema.FFN_PRED_OUT: np.zeros((1000, 32)),
                  schema.FFN_PRED_OUT_BIAS: bias(1000)}  # fmt: skip
        for name, array_ in values.items():
            kind = Type.F16 if array_.ndim == 2 else Type.F32
            tensors[schema.block(layer, name)] = (array_.astype(np.float32), kind)
    keys = {
        schema.KEY_PREDICTOR_KIND: array(["lowrank"] * 3, GGUFValueType.STRING),
        schema.KEY_PREDICTOR_INPUT: array([0] * 3, GGUFValueType.UINT32),
        schema.KEY_PREDICTOR_RANK: array([32] * 3, GGUFValueType.UINT32),
        schema.KEY_PREDICTOR_THRESHOLD: array([0.0] * 3, GGUFValueType.FLOAT32),
    }
    rewrite(src, out, tensors=tensors, metadata=keys)
    return out


def test_predict_goes_token_by_token(tiny_model: Callable[..., Path], text: Path, tmp_path: Path,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    options = ("-f", text, "-c", 32, "--chunks", 2, "-t", 1, "-o", tmp_path / "r.json", "--force")

    def measured(model: Path, *more: object) -> dict[str, Any]:
        code, _, err = hotcold(capsys, model, *options, *more)
        assert code == 0, err
        record: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
        if record["sparsity"] == "predict":
            assert "token by token (predict): predictors act only in single tokens" in err
        return record

    exact = measured(tiny_model("relu"), "--sparsity", "exact", "--per-token")
    every = with_predictors(tiny_model("relu"), tmp_path / "all.gguf", np.ones)
    found = measured(every, "--sparsity", "predict")
    assert found["per_token"] and found["ppl"] == pytest.approx(exact["ppl"], rel=1e-5)
    assert found["layers"]["checked"] == [1.0] * 3 and found["layers"]["computed"] == exact["layers"]["computed"]
    half = with_predictors(tiny_model("relu"), tmp_path / "half.gguf", lambda n: np.arange(n) % 2 - 0.5)
    found = measured(half, "--sparsity", "predict")
    assert found["layers"]["checked"] == [0.5] * 3
    assert found["ppl"] != pytest.approx(exact["ppl"], rel=1e-5)
    own = 2 * 32 * 64 + 2 * 32 * 1000 + 4 * 1000  # bytes of the predictor
    expected = [(own / (4 * 64) / 1000 + 0.5 + 2 * a) / 3 for a in found["layers"]["computed"]]
    np.testing.assert_allclose(found["layers"]["bytes_share"], expected, rtol=1e-6)
