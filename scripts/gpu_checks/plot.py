"""Tokens per second over the budget of VRAM, a line for each plan and for llama.cpp.

In: the result of gpu_check.py. Out: an SVG. Next: nothing.
"""

from __future__ import annotations

from pathlib import Path

from comparison.settings import STOCK

from gpu_checks import burst
from gpu_checks.report import Result, card_name, median, speeds
from hotcold.placement.plots import BLUE, GREEN, GREY, ORANGE, RED, SKY, check_matplotlib

COLOURS = {"all": SKY, "keys": ORANGE, "predict": GREEN, "layers": BLUE, STOCK: GREY, burst.CPU: RED}
TESTS = {"tg": "decode", "pp": "prompt"}


def plot(result: Result, path: Path) -> bool:
    """Whether there was something to draw. Raises HotcoldError without matplotlib, OSError."""
    found = speeds(result)
    if not any(seen["tg"] for row in found.values() for seen in row.values()):
        return False
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (test, title) in zip(figure.subplots(2, 1), TESTS.items(), strict=True):
        for who, colour in COLOURS.items():
            points = [(budget / 2**30, value) for budget, row in found.items()
                      if (value := median(row.get(who, {}).get(test, []))) is not None]  # fmt: skip
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", color=colour, label=who)
        axis.set_title(f"{card_name(result)}: {title}", fontsize=9)
        axis.set_xlabel("budget of VRAM, GiB (0: CPU only)")
        axis.set_ylabel("tokens per second")
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path)
    return True
