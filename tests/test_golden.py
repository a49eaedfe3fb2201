"""Logits of every tiny model family against an independent implementation.

In: golden/logits.npz (transformers, float64) and reference_model.py (NumPy, float64). The way tested is the user's:
checkpoint -> convert -> engine. Errors are relative: max |difference| / max |reference|.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import reference_model
from gguf import quants
from golden_layout import LENGTH_CASES, LENGTHS, MAIN_LENGTH, POSITIONS, columns
from reference_model import compute_logits, read_config, read_tensors, reference_logits
from tiny import CASES, SPARSE, token_ids

F32, F16 = 1e-4, 5e-3
INT8 = 0.1  # what one activation rounded the other way can do in a tiny model with random weights
SAME = 1e-5  # two ways to compute the same thing in float32
TOKENS = token_ids(MAIN_LENGTH)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    return float(np.abs(got.astype(np.float64) - want).max() / np.abs(want).max())


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parent / "golden" / "logits.npz") as file:
        return {name: file[name] for name in file.files}


@pytest.fixture
def open_engine() -> Iterator[Callable[..., Any]]:
    """Engine.open with an F32 KV cache, closed at the end of the test."""
    from hotcold.runtime.engine import Engine

    engines: list[Any] = []

    def open_one(path: Path, **options: Any) -> Any:
        engines.append(Engine.open(path, **{"kv_type": "f32", "threads": 2, "notify": lambda line: None} | options))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()


# The references themselves


@pytest.mark.parametrize("case", CASES)
def test_reference_model_equals_transformers(case: str, tiny_checkpoint: Any, golden: Any) -> None:
    got = reference_logits(tiny_checkpoint(case), TOKENS)
    assert relative_error(got[np.ix_(POSITIONS, columns(got.shape[1]))], golden[case]) < 1e-6
    if case in LENGTH_CASES:
        for n in LENGTHS:
            last = reference_logits(tiny_checkpoint(case), token_ids(n))[-1]
            assert relative_error(last, golden[f"{case}@{n}"]) < 1e-6


# What a converter or an engine could get wrong, as a change of config.json or of the tensors.
def _change(w: dict[str, np.ndarray], end: str, f: Callable[[np.ndarray], np.ndarray]) -> None:
    hit = [name for name in w if name.endswith(end)]
    assert hit
    for name in hit:
        w[name] = f(w[name])


def _zero(end: str) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda w: _change(w, end, np.zeros_like)


MISTAKES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "kv heads in the wrong order": (
        "llama-gqa-32-4", {}, lambda w: _change(w, "k_proj.weight", lambda t: np.roll(t, 8, 0))),
    "kv heads in the wrong order, 64": (
        "llama-gqa-64-8", {}, lambda w: _change(w, "v_proj.weight", lambda t: np.roll(t, 8, 0))),
    "rope base": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, None),
    "linear scaling dropped": ("rope-linear", {"rope_parameters": {"rope_theta": 5000.0}}, None),
    "llama3 scaling dropped": ("rope-llama3", {"rope_parameters": {"rope_theta": 10000.0}}, None),
    "yarn dropped": ("rope-yarn", {"rope_parameters": {"rope_theta": 10000.0}}, None),
    "yarn betas dropped": ("rope-yarn-tuned", {"beta_fast": None, "beta_slow": None}, None),
    "yarn factor dropped": ("rope-yarn-tuned", {"attention_factor": None}, None),
    "window off by one": ("mistral-window8", {"sliding_window": 9}, None),
    "window dropped": ("mistral-window8", {"sliding_window": None}, None),
    "window on every layer": ("qwen2-window", {"layer_types": ["sliding_attention"] * 4}, None),
    "window on no layer": ("qwen2-window", {"layer_types": ["full_attention"] * 4}, None),
    "wrong epsilon": ("llama-mha", {"rms_norm_eps": 1e-5}, None),
    "silu for relu": ("relu", {"hidden_act": "silu"}, None),
    "silu for fatrelu": ("prosparse", {"hidden_act": "silu"}, None),
    "threshold dropped": ("prosparse", {"hidden_act_param": 0.0}, None),
    "threshold wrong": ("minicpm-s", {"hidden_act_param": 0.01}, None),
    "scale_emb dropped": ("minicpm-s", {"scale_emb": 1}, None),
    "scale_depth dropped": ("minicpm-s", {"scale_depth": 3**0.5}, None),
    "dim_model_base dropped": ("minicpm-s", {"dim_model_base": 96}, None),
    "relu for drelu": ("bamboo", {"model_type": "mistral"}, None),
    "qkv biases dropped": ("qwen2", {}, _zero("_proj.bias")),
    "q norm dropped": ("qwen3", {}, lambda w: _change(w, "q_norm.weight", np.ones_like)),
    "k norm dropped": ("qwen3", {}, lambda w: _change(w, "k_norm.weight", np.ones_like)),
    "attention output bias dropped": ("llama-bias", {}, _zero("o_proj.bias")),
    "gate bias dropped": ("llama-bias", {}, _zero("gate_proj.bias")),
    "up bias dropped": ("llama-bias", {}, _zero("up_proj.bias")),
    "down bias dropped": ("llama-bias", {}, _zero("down_proj.bias")),
    "positions dropped": ("opt", {}, _zero("embed_positions.weight")),
    "position offset": ("opt", {}, lambda w: _change(w, "positions.weight", lambda t: np.roll(t, -2, 0))),
    "norm bias dropped": ("opt", {}, _zero("layer_norm.bias")),
    "fc1 bias dropped": ("opt", {}, _zero("fc1.bias")),
    "fc2 bias dropped": ("opt", {}, _zero("fc2.bias")),
    "layer 10 read as layer 2": (
        "llama-12-layers", {}, lambda w: w.update({n: w[n.replace(".10.", ".2.")] for n in w if ".10.mlp" in n})),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_show_in_the_logits(mistake: str, tiny_checkpoint: Any) -> None:
    """The checkpoints are sharp enough: each mistake moves the logits further than the widest tolerance of a float."""
    case, changed, change_tensors = MISTAKES[mistake]
    config, w = read_config(tiny_checkpoint(case)), read_tensors(tiny_checkpoint(case))
    right = compute_logits(config, w, TOKENS)
    if change_tensors:
        change_tensors(w)
    for key, value in changed.items():
        holder = config["rope_parameters"] if key in config.get("rope_parameters", {}) else config
        holder[key] = value
        if value is None:
            del holder[key]
    assert relative_error(compute_logits(config, w, TOKENS), right) > 4 * F16


# The product: convert, then compute


@pytest.mark.parametrize("case", CASES)
def test_f32_logits(case: str, tiny_model: Any, tiny_checkpoint: Any, open_engine: Any, golden: Any) -> None:
    """The whole prompt at once against both references, then the same token by token."""
    engine = open_engine(tiny_model(case))
    at_once = engine.forward(TOKENS, logits="all")
    assert relative_error(at_once[np.ix_(POSITIONS, columns(at_once.shape[1]))], golden[case]) <= F32
    assert relative_error(at_once, reference_logits(tiny_checkpoint(case), TOKENS)) <= F32
    engine.truncate(0)
    one_by_one = np.stack([engine.forward([t]) for t in TOKENS])
    assert engine.n_past == MAIN_LENGTH
    assert relative_error(one_by_one, at_once) <= SAME


# Where a threshold cuts, rounding a weight can switch a neuron, so no bound on the logits follows from its bits.
CONTINUOUS = [case for case in CASES if CASES[case].get("hidden_act") != "fatrelu"]


@pytest.mark.parametrize("head_dim", [2, 10, 20, 100])
def test_head_sizes_that_fit_no_vector(head_dim: int, tiny_model: Any, tiny_checkpoint: Any, open_engine: Any) -> None:
    want = reference_logits(tiny_checkpoint("llama-headdim", head_dim=head_dim), TOKENS)
    engine = open_engine(tiny_model("llama-headdim", head_dim=head_dim))
    assert relative_error(engine.forward(TOKENS, "all"), want) < 1e-4
    engine.truncate(0)
    assert relative_error(np.stack([engine.forward([i]) for i in TOKENS]), want) < 1e-4


@pytest.mark.parametrize("case", CONTINUOUS)
def test_f16_logits(case: str, tiny_model: Any, open_engine: Any, golden: Any) -> None:
    engine = open_engine(tiny_model(case, "f16"))
    at_once = engine.forward(TOKENS, logits="all")
    assert relative_error(at_once[np.ix_(POSITIONS, columns(at_once.shape[1]))], golden[case]) <= F16
    engine.truncate(0)
    one_by_one = np.stack([engine.forward([t]) for t in TOKENS])
    assert relative_error(one_by_one[np.ix_(POSITIONS, columns(at_once.shape[1]))], golden[case]) <= F16


def stored(w: dict[str, np.ndarray], outtype: str) -> dict[str, np.ndarray]:
    """Tensors by their Hugging Face names with the values the neuron-split file holds for `outtype`.

    Vectors and learned positions stay F32; rows that do not divide into blocks of 32 are F16; the down matrix is
    quantized along its columns; embedding and output are Q8_0 when the rest is Q4_0.
    """
    out = dict(w)
    for name, t in w.items():
        if t.ndim == 1 or "embed_positions" in name:
            continue
        turned = name.endswith(("down_proj.weight", "fc2.weight"))
        rows = (t.T if turned else t).astype(np.float32)
        kind = "q8_0" if outtype == "q4_0" and ("embed_tokens" in name or "lm_head" in name) else outtype
        if kind.startswith("q") and rows.shape[1] % 32:
            kind = "f16"
        qtype = gguf.GGMLQuantizationType[kind.upper()]
        rows = quants.dequantize(quants.quantize(np.ascontiguousarray(rows), qtype), qtype)
        out[name] = (rows.T if turned else rows).astype(np.float64)
    return out


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("outtype", ["f16", "bf16"])
def test_float_formats_are_computed_in_f32(
    case: str, outtype: str, tiny_model: Any, tiny_checkpoint: Any, open_engine: Any
) -> None:
    """Against the reference on the rounded weights there is no other error than that of F32."""
    folder = tiny_checkpoint(case)
    want = compute_logits(read_config(folder), stored(read_tensors(folder), outtype), TOKENS)
    engine = open_engine(tiny_model(case, outtype))
    assert relative_error(engine.forward(TOKENS, logits="all"), want) <= F32
    engine.truncate(0)
    engine.forward(TOKENS[:-4], logits="none")
    assert relative_error(np.stack([engine.forward([t]) for t in TOKENS[-4:]]), want[-4:]) <= F32


def in_8_bits(x: np.ndarray) -> np.ndarray:
    """x [..., n] rounded to 8 bits in blocks of 32, as the engine does before a dot product with a quantized row."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    step = np.maximum(np.abs(blocks).max(axis=-1, keepdims=True) / 127, 1e-30)
    return (np.round(blocks / step) * step).reshape(x.shape)


@pytest.mark.parametrize("case", ["llama", "llama-ff1003", "qwen2", "relu", "minicpm-s", "bamboo", "opt", "arcee"])
@pytest.mark.parametrize("outtype", ["q8_0", "q4_0"])
def test_quantized_formats(
    case: str, outtype: str, tiny_model: Any, tiny_checkpoint: Any, open_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the reference on the quantized weights, with activations in 8 bits: equal but for F32's error.

    Unless that error makes an activation round the other way, which is visible. It happens in one of many prompts, so
    most of eight prompts must be equal, and all must be near.
    """
    linear = reference_model._linear

    def linear_of_8_bits(w: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
        return linear(w, name, x if name.endswith(("down_proj", "fc2")) else in_8_bits(x))

    monkeypatch.setattr(reference_model, "_linear", linear_of_8_bits)
    config, w = read_config(tiny_checkpoint(case)), stored(read_tensors(tiny_checkpoint(case)), outtype)
    engine = open_engine(tiny_model(case, outtype))
    at_once, one_by_one = [], []
    for prompt in np.reshape(TOKENS, (8, 5)):
        want = compute_logits(config, w, prompt)
        engine.truncate(0)
        at_once.append(relative_error(engine.forward(prompt, logits="all"), want))
        engine.truncate(0)
        one_by_one.append(relative_error(np.stack([engine.forward([t]) for t in prompt]), want))
    for errors in (at_once, one_by_one):
        assert sorted(errors)[4] <= F32
        assert max(errors) <= INT8


@pytest.mark.parametrize("case", LENGTH_CASES)
def test_prompt_lengths(case: str, tiny_model: Any, open_engine: Any, golden: Any) -> None:
    """At once, as two uneven blocks, and with the last token alone."""
    engine = open_engine(tiny_model(case))
    for n in LENGTHS:
        tokens, want = token_ids(n), golden[f"{case}@{n}"]
        for first in {0, n // 3, n - 1}:
            engine.truncate(0)
            if first:
                engine.forward(tokens[:first], logits="none")
            assert relative_error(engine.forward(tokens[first:]), want) <= F32, (n, first)


@pytest.mark.parametrize("case", CASES)
def test_stock_layout_gives_the_same(case: str, tiny_model: Any, open_engine: Any) -> None:
    """convert --to-stock of the neuron-split file."""
    split = open_engine(tiny_model(case)).forward(TOKENS, logits="all")
    stock = open_engine(tiny_model(case, stock=True)).forward(TOKENS, logits="all")
    assert relative_error(stock, split) <= SAME


@pytest.mark.parametrize("case", SPARSE)
@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_exact_equals_dense_bit_for_bit(case: str, outtype: str, tiny_model: Any, open_engine: Any) -> None:
    for threads in (1, 2, 3, 7):
        results = []
        for sparsity in ("dense", "exact"):
            engine = open_engine(tiny_model(case, outtype), sparsity=sparsity, threads=threads)
            prompt = engine.forward(TOKENS[:20], logits="all")
            steps = [engine.forward([t]) for t in TOKENS[20:30]]
            results.append(np.vstack([prompt, steps]))
            engine.close()
        assert results[0].tobytes() == results[1].tobytes(), threads


@pytest.mark.parametrize("case", ["llama-embd100", "qwen2-window", "relu", "opt-mixed"])
def test_threads(case: str, tiny_model: Any, open_engine: Any, golden: Any) -> None:
    for threads in (1, 2, 3, 7):
        engine = open_engine(tiny_model(case), threads=threads)
        prompt = engine.forward(TOKENS[:20], logits="all")
        logits = np.vstack([prompt, [engine.forward([t]) for t in TOKENS[20:]]])
        engine.close()
        assert relative_error(logits[np.ix_(POSITIONS, columns(logits.shape[1]))], golden[case]) <= F32, threads


@pytest.mark.parametrize("case", ["relu-mixed", "opt-mixed"])
def test_share_computed_counts_neurons(case: str, tiny_model: Any, open_engine: Any) -> None:
    """Layer 0 is all off, layer 1 all on, layer 2 has a third of each kind."""
    engine = open_engine(tiny_model(case), sparsity="exact")
    engine.forward(TOKENS[:20], logits="none")
    engine.reset_stats()
    for t in TOKENS[20:]:
        engine.forward([t])
    off, on, mixed = engine.layer_stats().computed
    assert (off, on) == (0, 1)
    assert 0.4 < mixed < 0.6


@pytest.mark.parametrize("case", ["llama", "mistral-window8", "qwen3", "opt"])
def test_f16_cache(case: str, tiny_model: Any, open_engine: Any, golden: Any) -> None:
    engine = open_engine(tiny_model(case), kv_type="f16")
    prompt = engine.forward(TOKENS[:20], logits="all")
    logits = np.vstack([prompt, [engine.forward([t]) for t in TOKENS[20:]]])
    assert relative_error(logits[np.ix_(POSITIONS, columns(logits.shape[1]))], golden[case]) <= F16


def test_truncate_forgets(tiny_model: Any, open_engine: Any) -> None:
    engine = open_engine(tiny_model("llama"))
    want = engine.forward(TOKENS)
    engine.truncate(10)
    engine.forward(TOKENS[:10][::-1], logits="none")  # something else
    engine.truncate(10)
    assert relative_error(engine.forward(TOKENS[10:]), want) <= SAME


@pytest.mark.parametrize("case", CASES)
def test_both_dialects_convert_to_the_same_file(case: str, tiny_model: Any) -> None:
    """config.json of transformers 4 and 5."""
    assert tiny_model(case).read_bytes() == tiny_model(case, dialect=4).read_bytes()
