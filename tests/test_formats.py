"""Whole models in every block format: stock files run without being quantized again, and exact equals dense.

In: small models with rows of whole super-blocks. The truth is kernels/reference.py on the file's own bytes; that it
decodes as the gguf package does is shown in test_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from small_models import Reference, Spec, all_of, write_model

from hotcold.runtime.engine import Engine
from hotcold.runtime.kernels import formats

TOKENS = [(7 * i + i * i) % 101 for i in range(36)]
SHORT = [TOKENS[i : i + 3] for i in range(0, 36, 3)]  # texts of their own, for the program of single tokens
LONGER = [TOKENS[i : i + 6] for i in range(0, 36, 6)]  # for that of blocks
WHOLE = [TOKENS[:21]]
WIDE: dict[str, Any] = {"n_embd": 256, "head_dim": 64, "n_ff": 256, "n_ctx": 32}
NEW = [Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q4_K, Type.Q5_K, Type.Q6_K]
# What llama.cpp's Q4_K_M and Q5_0 files hold: the output matrix, some values and the embedding in more bits.
Q4_K_M = {"attn": Type.Q4_K, "key": Type.Q4_K, "value": Type.Q6_K, "embd": Type.Q4_K, "head": Type.Q6_K}
Q5_K_M = {"attn": Type.Q5_K, "key": Type.Q5_K, "value": Type.Q6_K, "embd": Type.Q5_K, "head": Type.Q6_K}
Q5_0 = {"attn": Type.Q5_0, "key": Type.Q5_0, "value": Type.Q5_1, "embd": Type.Q5_0, "head": Type.Q6_K}
MIXED = {"attn": Type.Q6_K, "key": Type.Q4_K, "value": Type.Q4_K, "embd": Type.Q4_1, "head": None}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def get(**fields: Any) -> Path:
        return write_model(tmp_path_factory.mktemp("wide") / "wide.gguf", Spec(**(WIDE | fields)))

    return get


def logits(path: Path, texts: list[list[int]], one_by_one: bool, **options: Any) -> np.ndarray:
    """f32 [tokens, n_vocab] of all texts, each in a context of its own."""
    rows = []
    with Engine.open(path, **({"threads": 2, "kv_type": "f32"} | options)) as engine:
        for text in texts:
            engine.truncate(0)
            rows += [engine.forward([token]) for token in text] if one_by_one else [*engine.forward(text, "all")]
    return np.array(rows)


def check_errors(path: Path, got: np.ndarray, texts: list[list[int]]) -> None:
    """Most tokens are exact, at every position of the texts: a later one is right if attention is.

    Where the rounding of an activation to int8 falls to the other side, all later layers see it, and all later tokens
    of the text.
    """
    reference = Reference(path, np.float32)
    want = np.concatenate([reference.logits(text)[0] for text in texts])
    errors = (np.abs(got - want).max(axis=1) / np.abs(want).max(axis=1)).reshape(len(texts), -1)
    assert errors.max() < 3e-2
    assert (np.quantile(errors, 0.2, axis=0) < 2e-5).all(), errors


@pytest.mark.parametrize(
    "fields",
    [
        *({"layout": layout} | all_of(kind) for layout in ("stock", "neuron-split") for kind in NEW),
        *({"layout": "stock", "activation": "silu"} | kinds for kinds in (Q4_K_M, Q5_K_M, Q5_0)),
        {"gated": False, "biases": True} | MIXED,
    ],
    ids=lambda f: "-".join(getattr(v, "name", str(v)) for v in f.values())[:60],
)
def test_logits(fields: dict[str, Any], model: Any) -> None:
    path = model(**fields)
    check_errors(path, logits(path, LONGER, False), LONGER)
    check_errors(path, logits(path, SHORT, True, threads=3), SHORT)


@pytest.mark.parametrize("kinds", [*map(all_of, NEW), MIXED], ids=[*(t.name for t in NEW), "mixed"])
def test_exact_equals_dense_and_threads_share_alike(kinds: dict[str, Type], model: Any) -> None:
    path = model(patterns=("off", "on", "mixed", "free"), n_ff=(100, 33, 333, 257), **kinds)
    for threads, one_by_one in ((1, True), (1, False), (3, True), (3, False)):
        exact, dense = (logits(path, WHOLE, one_by_one, threads=threads, sparsity=mode) for mode in ("exact", "dense"))
        assert np.array_equal(exact.view(np.uint32), dense.view(np.uint32))
    stock = model(layout="stock", **kinds)
    for one_by_one in (False, True):
        one, two, five = (logits(stock, WHOLE, one_by_one, threads=n).view(np.uint32) for n in (1, 2, 5))
        assert np.array_equal(one, two) and np.array_equal(one, five)


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q6_K, Type.Q5_1], ids=lambda t: t.name)
def test_matrices_by_input_column(kind: Type, model: Any) -> None:
    """Threads divide rows at whole blocks; there are fewer blocks than threads here."""
    path = model(norm_relu=(True, True), layout="neuron-split", n_ff=512, n_head_kv=4, **all_of(kind))
    for threads in (1, 4):
        exact, dense = (logits(path, SHORT, True, threads=threads, sparsity=mode) for mode in ("exact", "dense"))
        assert np.array_equal(exact.view(np.uint32), dense.view(np.uint32))
        check_errors(path, exact, SHORT)


def test_every_quantized_format_is_tested_here_or_in_test_engine() -> None:
    assert set(formats.QUANTIZED) == {int(t) for t in (Type.Q8_0, Type.Q4_0, *NEW)}
