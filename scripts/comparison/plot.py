"""The comparison as a picture: tokens per second of everybody, one panel per test.

In: results of compare_llama_cpp.py. Out: a PNG or SVG file. Next: nothing.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from comparison.settings import STOCK
from hotcold.placement.plots import BLUE, GREEN, GREY, ORANGE, check_matplotlib

COLOURS = {STOCK: GREY, "dense": BLUE, "exact": ORANGE, "predict": GREEN}


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Bars with the lowest and highest round as whiskers. Raises HotcoldError without matplotlib, OSError."""
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [(result, kind) for result in results for kind in ("pp", "tg")
              if any(row["test"].startswith(kind) and row["ours"] for row in result["speed"])]  # fmt: skip
    figure = Figure(figsize=(5.5, 0.6 + 3 * max(1, len(panels))), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (result, kind) in zip(figure.subplots(max(1, len(panels)), 1, squeeze=False)[:, 0], panels, strict=False):
        rows = [row for row in result["speed"] if row["test"].startswith(kind) and row["ours"]]
        what = "prompt" if kind == "pp" else "generation"
        axis.set_title(f"{result['model']}: {what} ({rows[0]['test']})", fontsize=9)
        axis.set_ylabel("tokens per second")
        groups = list(dict.fromkeys(row["threads"] for row in rows))
        bars = [(who, threads, values) for threads in groups for who, values in group_bars(rows, threads)]
        names = list(dict.fromkeys(who for who, _, _ in bars))
        width = 0.8 / max(1, len(names))
        for who, threads, values in bars:
            x = groups.index(threads) + (names.index(who) - (len(names) - 1) / 2) * width
            middle = statistics.median(values)
            axis.bar(x, middle, width * 0.92, color=COLOURS.get(who, GREY),
                     yerr=[[middle - min(values)], [max(values) - middle]], ecolor="#333333",
                     label=who if threads == groups[0] else None)  # fmt: skip
            axis.annotate(f"{middle:.1f}", (x, middle), ha="center", va="bottom", fontsize=8)
        axis.set_xticks(range(len(groups)), [f"{n} thread{'s' * (n > 1)}" for n in groups])
        axis.margins(y=0.15)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def group_bars(rows: list[dict[str, Any]], threads: int) -> list[tuple[str, list[float]]]:
    """(who, tokens per second of the rounds): llama.cpp once, then the modes."""
    here = [row for row in rows if row["threads"] == threads]
    stock = next((row["stock"] for row in here if row["stock"]), None)
    return ([(STOCK, stock)] if stock else []) + [(row["mode"], row["ours"]) for row in here]
