"""Numbers per scored token -> means with errors, percentiles, and the lines llama.cpp prints.

In: log-probabilities of a model and of a base. Out: KLStats, lines of text. Next: perplexity.py.

Errors are standard errors of means, as llama.cpp computes them; those of a ratio or a difference of two perplexities
take into account that both were measured on the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hotcold.runtime.kl import LogSoftmax

LOWEST = np.float32(-16)  # probabilities of the base below e^-16 do not count
MIN_COUNT = 100  # tokens from which on percentiles say something
COLUMNS = (
    "chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence              Δp RMS"
    "            Same top p"
)


def mean_error(values: np.ndarray, least: int = 11) -> tuple[float, float]:
    """Mean and its standard error, which is 0 for fewer than `least` values."""
    n = len(values)
    if not n:
        return 0.0, 0.0
    variance = float(np.var(values, dtype=np.float64))
    return float(np.mean(values, dtype=np.float64)), math.sqrt(variance / (n - 1)) if n >= max(2, least) else 0.0


def estimate(nll: np.ndarray) -> tuple[float, float]:
    """Perplexity and its error from -log p of each scored token."""
    mean, error = mean_error(nll, 2)
    return _exp(mean), _exp(mean) * error


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


class KLStats:
    """Collects, for each scored token, how far a model is from its base."""

    def __init__(self) -> None:
        self._parts: dict[str, list[np.ndarray]] = {k: [] for k in ("nll", "nll_base", "kld", "p_diff", "same")}

    def add(self, model: LogSoftmax, base: np.ndarray, targets: np.ndarray) -> None:
        """base: f32 [n, n_vocab] log-probabilities, is overwritten. targets: int [n], the tokens that came next."""
        each = np.arange(len(targets))
        nll, nll_base = model.nll(targets), -base[each, targets].astype(np.float64)
        self._parts["same"].append(model.shifted.argmax(axis=1) == base.argmax(axis=1))
        p = np.exp(base)
        p[base <= LOWEST] = 0
        base -= model.shifted  # log p_base - log p, but for log_sum
        # sum p (base - shifted + log_sum); the p of a row need not add up to exactly 1
        kld = np.einsum("ij,ij->i", p, base, dtype=np.float64) + p.sum(axis=1, dtype=np.float64) * model.log_sum
        for name, values in (("nll", nll), ("nll_base", nll_base), ("kld", kld),
                             ("p_diff", np.exp(-nll) - np.exp(-nll_base))):  # fmt: skip
            self._parts[name].append(values)

    def values(self, name: str) -> np.ndarray:
        """One number per scored token: nll, nll_base, kld, p_diff or same."""
        parts = self._parts[name]
        if len(parts) > 1:
            parts[:] = [np.concatenate(parts)]
        return parts[0] if parts else np.zeros(0)

    @property
    def count(self) -> int:
        return len(self.values("nll"))

    # ---- numbers

    def numbers(self) -> dict[str, tuple[float, float]]:
        """Every mean with its error. Probabilities are shares of 1, not per cent."""
        nll, base = self.values("nll"), self.values("nll_base")
        n, (q_mean, q_error), (b_mean, b_error) = len(nll), mean_error(nll), mean_error(base)
        covariance = float(np.mean((nll - q_mean) * (base - b_mean))) / (n - 1) if n >= 10 else 0.0
        ratio = q_mean - b_mean
        ratio_error = math.sqrt(max(0.0, q_error**2 + b_error**2 - 2 * covariance))
        q, b = _exp(q_mean), _exp(b_mean)
        difference = (q * q_error) ** 2 + (b * b_error) ** 2 - 2 * q * b * covariance
        square, square_error = mean_error(self.values("p_diff") ** 2)
        rms = math.sqrt(square)
        same = float(np.mean(self.values("same")))
        return {
            "ppl": (q, q * q_error),
            "ppl_base": (b, b * b_error),
            "correlation": (covariance / (q_error * b_error) if q_error and b_error else 1.0, 0.0),
            "ln_ratio": (ratio, ratio_error),
            "ratio": (_exp(ratio), _exp(ratio) * ratio_error),
            "difference": (q - b, math.sqrt(max(0.0, difference))),
            "kld": mean_error(self.values("kld")),
            "p_diff": mean_error(self.values("p_diff")),
            "p_diff_rms": (rms, 0.5 / rms * square_error if rms else 0.0),
            "same_top": (same, math.sqrt(same * (1 - same) / (n - 1)) if n > 1 else 0.0),
        }

    def percentiles(self, name: str, percents: Sequence[float]) -> dict[str, float]:
        """Label ("99.9%", "Maximum", "Median", "Minimum") -> value."""
        names: dict[float, str] = {100: "Maximum", 50: "Median", 0: "Minimum"}
        found = np.percentile(self.values(name), percents)
        return {names.get(p, f"{p:.1f}%"): float(v) for p, v in zip(percents, found, strict=True)}

    def kld_percentiles(self) -> dict[str, float]:
        return self.percentiles("kld", (100, 99.9, 99, 95, 90, 50, 10, 5, 1, 0.1, 0))

    def p_diff_percentiles(self) -> dict[str, float]:
        return self.percentiles("p_diff", (100, 99.9, 99, 95, 90, 75, 50, 25, 10, 5, 1, 0.1, 0))

    # ---- lines

    def running_line(self, chunk: int) -> str:
        """What is known after `chunk` chunks."""
        n = self.numbers()
        ppl, ratio, kld, rms, same = (n[k] for k in ("ppl", "ln_ratio", "kld", "p_diff_rms", "same_top"))
        return (
            f"{chunk:4d}    {ppl[0]:9.4f} ± {ppl[1]:9.4f}    {ratio[0]:10.5f} ± {ratio[1]:10.5f}"
            f"    {kld[0]:10.5f} ± {kld[1]:10.5f}    {100 * rms[0]:6.3f} ± {100 * rms[1]:6.3f} %"
            f"    {100 * same[0]:6.3f} ± {100 * same[1]:6.3f} %"
        )

    def lines(self) -> list[str]:
        """The blocks at the end."""
        if self.count < MIN_COUNT:
            return [f"only {self.count} tokens are scored: no statistics of fewer than {MIN_COUNT}"]
        n = self.numbers()
        means = ((f"{label:30}: ", n[key]) for label, key in (
            ("Mean PPL(Q)", "ppl"), ("Mean PPL(base)", "ppl_base"), ("Cor(ln(PPL(Q)), ln(PPL(base)))", "correlation"),
            ("Mean ln(PPL(Q)/PPL(base))", "ln_ratio"), ("Mean PPL(Q)/PPL(base)", "ratio"),
            ("Mean PPL(Q)-PPL(base)", "difference")))  # fmt: skip
        out = ["====== Perplexity statistics ======"]
        for label, (value, error) in means:
            shown = f"{100 * value:6.2f}%" if label.startswith("Cor") else f"{value:10.6f} ± {error:10.6f}"
            out.append(label + shown)
        out += ["", "====== KL divergence statistics ======", f"Mean    KLD: {n['kld'][0]:10.6f} ± {n['kld'][1]:10.6f}"]
        out += [f"{_label(k)} KLD: {v:10.6f}" for k, v in self.kld_percentiles().items()]
        p, rms, same = (tuple(100 * v for v in n[k]) for k in ("p_diff", "p_diff_rms", "same_top"))
        out += ["", "====== Token probability statistics ======", f"Mean    Δp: {p[0]:6.3f} ± {p[1]:5.3f} %"]
        out += [f"{_label(k)} Δp: {100 * v:6.3f}%" for k, v in self.p_diff_percentiles().items()]
        out += [f"RMS Δp    : {rms[0]:6.3f} ± {rms[1]:5.3f} %", f"Same top p: {same[0]:6.3f} ± {same[1]:5.3f} %"]
        return out


def _label(name: str) -> str:
    """As llama.cpp pads them: "99.9%  ", " 5.0%  ", "Median "."""
    return f"{name:>5}".ljust(7)
