"""How far the logits of the same token ids are apart: ours from llama.cpp's, and llama.cpp's from its own.

In: Settings, Twins. Out: rows for the report. Next: report.py.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from comparison.bursts import run_burst
from comparison.settings import STOCK, Settings, say
from comparison.twins import Twins
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.tokenizer import Tokenizer


def token_ids(settings: Settings, twins: Twins) -> np.ndarray:
    """int32 [n]: the text by the model's own tokenizer, or random ids."""
    if settings.text is None:
        with open_gguf(twins.ours) as file:
            n_vocab = file.tensors["token_embd.weight"].shape[0]
        return np.random.default_rng(0).integers(0, n_vocab, settings.quality_tokens).astype(np.int32)
    ids = Tokenizer.from_gguf(twins.ours).encode(settings.text.read_text())
    return np.array(ids[: settings.quality_tokens], np.int32)


def log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def differences(ours: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Of two float [n, n_vocab] logits: max |Δ|, relative L2, top-1 agreement, KL(reference || ours) mean and max."""
    a, b = ours.astype(np.float64), reference.astype(np.float64)
    log_a, log_b = log_softmax(a), log_softmax(b)
    kl = (np.exp(log_b) * (log_b - log_a)).sum(1)
    return {
        "max_abs": float(np.abs(a - b).max()),
        "relative_l2": float(np.linalg.norm(a - b) / np.linalg.norm(b)),
        "top1": float((a.argmax(1) == b.argmax(1)).mean()),
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
    }


def perplexity(logits: np.ndarray, ids: np.ndarray) -> float:
    """exp of the mean of -log p over all tokens but the first, each from those before it."""
    log_p = log_softmax(logits[:-1].astype(np.float64))
    return math.exp(min(700.0, -float(log_p[np.arange(len(ids) - 1), ids[1:]].mean())))


class LogitsSource:
    """Starts the processes that compute logits of one list of ids."""

    def __init__(self, settings: Settings, twins: Twins, folder: Path) -> None:
        self.settings, self.twins, self.folder = settings, twins, folder
        self.threads = max(settings.threads)
        self.ids = token_ids(settings, twins)
        self.builds: dict[str, str] = {}  # label -> what that build of llama.cpp says about itself
        np.save(folder / "ids.npy", self.ids)

    def _run(self, label: str, command: Sequence[str]) -> tuple[np.ndarray | None, str]:
        burst = run_burst(list(command), timeout=self.settings.timeout)
        if burst.status:
            say(f"no logits of {label}: {burst.errors or burst.status}\n  {burst.command}")
            return None, ""
        return np.load(self.folder / "out.npy"), burst.output

    def stock(self, label: str, lib: Path, *options: str) -> np.ndarray | None:
        """float32 [n, n_vocab] of llama.cpp, None if it fails."""
        arrays = [str(self.folder / "ids.npy"), str(self.folder / "out.npy")]
        kv_type = ["--kv-type", self.settings.kv_type]
        command = self.settings.stock_worker("logits", str(self.twins.stock), *arrays, *kv_type, *options,
                                             threads=self.threads, lib=lib)  # fmt: skip
        logits, output = self._run(label, command)
        if logits is not None:
            self.builds[label] = " ".join(re.findall(r"(\w+) = 1\b", output))  # CPU features it was built with
        return logits

    def ours(self, mode: str, model: Path) -> np.ndarray | None:
        """float32 [n, n_vocab] of hotcold, None if it fails."""
        arrays = [str(self.folder / "ids.npy"), str(self.folder / "out.npy")]
        command = self.settings.our_logits(str(model), *arrays, threads=self.threads, mode=mode)
        return self._run(f"hotcold {mode} on {model.name}", command)[0]


def compare_quality(settings: Settings, twins: Twins) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """(one row for each who computed logits, what the builds of llama.cpp say of themselves).

    Differences are those from llama.cpp's logits of one batch; without them only perplexities are told.
    """
    lib = settings.llama_lib if twins.stock else None
    with tempfile.TemporaryDirectory() as folder:
        source = LogitsSource(settings, twins, Path(folder))
        reference = source.stock(STOCK, lib) if lib else None
        found = {STOCK: reference} | {f"hotcold {mode}": source.ours(mode, twins.ours) for mode in settings.modes}
        if lib and reference is not None:
            if not twins.scaled and twins.stock and twins.stock != twins.ours:
                found["hotcold dense, on llama.cpp's file"] = source.ours("dense", twins.stock)
            steps = f"{STOCK}, one token at a time"
            found[steps] = source.stock(steps, lib, "--step")
            source.builds.pop(steps, None)  # the same build
            if settings.baseline_lib:
                other = f"{STOCK}, the other build"
                found[other] = source.stock(other, settings.baseline_lib)
        rows = []
        for who, logits in found.items():
            if logits is not None:
                row = {"who": who, "tokens": len(source.ids), "perplexity": perplexity(logits, source.ids)}
                rows.append(row | (differences(logits, reference) if reference is not None and who != STOCK else {}))
        return rows, source.builds
