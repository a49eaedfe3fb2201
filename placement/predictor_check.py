"""What predicting costs: perplexity on held-out text in exact and in predict mode, and the FFN bytes both read.

In: a neuron-split GGUF with predictors. Out: Cost, as a line for people. Next: train.py and pipeline.py print it.

A predictor's recall is of neurons; what their loss does to the text is told here, where predict mode is offered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotcold.runtime.config import ModelConfig
from hotcold.runtime.corpus import HELDOUT, Contexts, cut_contexts, read_corpus
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.kl import log_softmax
from hotcold.runtime.plan import predicts
from hotcold.runtime.tokenizer import Tokenizer

TOKENS = 1024
N_CTX = 512
MUCH = 0.01  # more perplexity by predicting


@dataclass(frozen=True)
class Cost:
    """The same text twice, token by token."""

    tokens: int  # scored
    exact: float  # perplexity
    predict: float
    bytes_exact: float  # share of all FFN rows' bytes that a token reads
    bytes_predict: float

    @property
    def loss(self) -> float:
        """How much larger the perplexity is in predict mode, as a share."""
        return self.predict / self.exact - 1

    def lines(self) -> list[str]:
        """What people should know; a second line where it is much."""
        out = [f"perplexity exact {self.exact:.2f}, predict {self.predict:.2f} ({100 * self.loss:+.2f} %), FFN bytes "
               f"read {100 * self.bytes_exact:.1f} % and {100 * self.bytes_predict:.1f} % ({self.tokens} held-out "
               "tokens)"]  # fmt: skip
        if not self.loss <= MUCH:
            out.append(f"predicting costs more than {100 * MUCH:g} % of perplexity: raise --target-recall of hotcold "
                       "train-predictor, or use --sparsity exact")  # fmt: skip
        return out


def check_predictors(
    model: Path, n_tokens: int = TOKENS, progress: Callable[[int, int], None] = lambda done, total: None
) -> Cost | None:
    """About n_tokens tokens of the bundled held-out text. progress gets the tokens done and in all.

    None: no layer has a predictor. Raises HotcoldError for a model without vocabulary, or that cannot compute.
    """
    with open_gguf(model) as file:
        config = ModelConfig.from_gguf(file)
        if not any(predicts(config, layer) for layer in range(config.n_layer)):
            return None
        n_ctx = min(N_CTX, config.n_ctx_train, max(n_tokens, 4))
        contexts = cut_contexts(read_corpus([HELDOUT]), Tokenizer.from_gguf(file), n_ctx, n_tokens)
    total = 2 * sum(len(ids) - 1 for ids in contexts.tokens)
    progress(0, total)
    exact, bytes_exact = _run(model, "exact", contexts, lambda n: progress(n, total))
    predict, bytes_predict = _run(model, "predict", contexts, lambda n: progress(total // 2 + n, total))
    return Cost(total // 2, exact, predict, bytes_exact, bytes_predict)


def checked(model: Path, n_tokens: int) -> list[str]:
    """Lines for people: what check_predictors found, or why it could not. Shows its progress."""
    from hotcold.placement.profiling import progress_bar

    try:
        with progress_bar("measuring what predicting costs") as progress:
            cost = check_predictors(model, n_tokens, progress)
    except HotcoldError as e:  # the file is there and complete
        return [f"what predicting costs was not measured: {e}"]
    return ["no layer is predicted: predict mode has nothing to offer here"] if cost is None else cost.lines()


def _run(model: Path, mode: str, contexts: Contexts, tell: Callable[[int], None]) -> tuple[float, float]:
    """Perplexity, and the share of the FFN's bytes that a token reads."""
    from hotcold.runtime.engine import Engine

    nll, done = 0.0, 0
    with Engine.open(model, sparsity=mode, n_ctx=contexts.n_ctx) as engine:
        for ids in contexts.tokens:
            engine.truncate(0)
            for token, following in zip(ids[:-1], ids[1:], strict=True):
                values = log_softmax(engine.forward([token], "last")[None, :])
                nll += float(values.nll(np.array([following]))[0])
                done += 1
                tell(done)
        share = engine.layer_stats().bytes_share
    with np.errstate(over="ignore"):
        return float(np.exp(nll / done)), share
