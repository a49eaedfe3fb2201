"""The pictures of a report, as SVG, by matplotlib.

In: arrays with one entry per layer. Out: bytes of an SVG image that refers to nothing outside itself. Next:
report_page.py, which embeds them.

No pyplot: figures belong to nobody but their function. Colours are Okabe and Ito's, told apart by people who do not
see all colours, and lines differ in their markers too.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hotcold.placement.report_facts import Facts, cumulative
from hotcold.runtime.errors import HotcoldError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hotcold.placement.plan_vram import Placement

BLUE, ORANGE, GREEN, RED, SKY, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#8a8f98"
POINTS = 150  # of a curve
_STYLE: Any = {  # of rcParams
    "svg.hashsalt": "hotcold", "font.size": 10, "font.family": "DejaVu Sans", "axes.spines.top": False,
    "axes.spines.right": False, "axes.edgecolor": "#9aa0a6", "axes.labelcolor": "#333333", "xtick.color": "#555555",
    "ytick.color": "#555555", "axes.grid": True, "grid.color": "#e6e8eb", "axes.axisbelow": True,
    "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left", "legend.frameon": False,
}  # fmt: skip


def check_matplotlib() -> None:
    """Raise HotcoldError unless pictures can be drawn."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # its remarks on folders it cannot write say nothing to us
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise HotcoldError("the report's pictures need matplotlib: pip install matplotlib") from None


def _draw(width: float, height: float, panels: tuple[int, int], paint: Any, **options: Any) -> bytes:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        paint(figure, figure.subplots(*panels, squeeze=False, **options))
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    return svg[svg.index(b"<svg") :]  # the prolog names a DTD on the network


def _percent(axis: Axes, x: bool = False, top: float | None = 100) -> None:
    from matplotlib.ticker import PercentFormatter

    if x:
        axis.xaxis.set_major_formatter(PercentFormatter(decimals=0, symbol=" %"))
        axis.set_xlim(0, 100)
    axis.yaxis.set_major_formatter(PercentFormatter(decimals=0, symbol=" %"))
    axis.set_ylim(0, top)


def _layers(axis: Axes, n_layer: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel("layer")
    axis.set_xlim(-0.7, n_layer - 0.3)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.grid(axis="x", visible=False)


def _thinned(n: int) -> np.ndarray:
    """Positions 0 to n, closer together at the beginning, where the hot neurons are."""
    if n <= POINTS:
        return np.arange(n + 1)
    return np.unique(np.r_[np.linspace(0, 1, POINTS) ** 2 * n, n].round().astype(np.int64))


def activity(facts: Facts) -> bytes:
    """Two panels: share of firings and of tokens, over neurons from the most active on; a curve per layer."""

    def paint(figure: Figure, axes: Any) -> None:
        from matplotlib import colormaps
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize
        from matplotlib.ticker import MaxNLocator

        together, each = axes[0]
        scale = Normalize(0, max(1, facts.n_layer - 1))
        colours = colormaps["viridis"]
        for layer, fired in enumerate(facts.fired):
            at = _thinned(len(fired))
            x, colour = 100 * at / len(fired), colours(0.95 * scale(layer))
            together.plot(x, 100 * cumulative(fired)[at], color=colour, linewidth=1.2, alpha=0.85)
            middle = np.minimum(at, len(fired) - 1)
            each.plot(100 * (middle + 1) / len(fired), 100 * fired[middle] / facts.tokens, color=colour, linewidth=1.2,
                      alpha=0.85)  # fmt: skip
        together.plot([0, 100], [0, 100], color=GREY, linestyle="--", linewidth=1)
        together.text(62, 55, "all alike", color="#5f6368", ha="left", va="top", fontsize=9)
        together.set(title="Share of all firings", xlabel="neurons of a layer, most active first",
                     ylabel="firings so far")  # fmt: skip
        each.set(title="How often each neuron fires", xlabel="neurons of a layer, most active first",
                 ylabel="tokens on which it fires")  # fmt: skip
        for axis in (together, each):
            _percent(axis, x=True, top=102)
        bar = figure.colorbar(ScalarMappable(scale, colours), ax=[together, each], pad=0.01, aspect=30)
        bar.set_label("layer")
        bar.locator = MaxNLocator(integer=True)
        bar.update_ticks()

    return _draw(10, 4.2, (1, 2), paint)


def sparsity(facts: Facts) -> bytes:
    """Two panels over layers: neurons that are off, and how few make 80 % of the firings."""

    def paint(figure: Figure, axes: Any) -> None:
        x = np.arange(facts.n_layer)
        for axis, values, colour, title in (
            (axes[0, 0], facts.sparsity, BLUE, "Sparsity: neurons that are off"),
            (axes[0, 1], facts.skew, ORANGE, "Skew: neurons for 80 % of firings"),
        ):
            axis.bar(x, 100 * values, color=colour, width=0.8)
            mean = 100 * facts.mean(values)
            axis.axhline(mean, color="#333333", linewidth=1, linestyle="--")
            axis.set_title(f"{title}, mean {mean:.0f} %")
            axis.set_ylabel("share of neurons")
            _percent(axis)
            _layers(axis, facts.n_layer)

    return _draw(10, 3.4, (1, 2), paint)


def predictors(facts: Facts) -> bytes:
    """Recall, precision and density over layers; layers without predictor are shaded."""
    found = facts.predictors

    def paint(figure: Figure, axes: Any) -> None:
        axis = axes[0, 0]
        x = np.arange(facts.n_layer)
        if found is None:
            return
        for values, label, colour, marker in (
            (found.recall, "recall", BLUE, "o"), (found.recall_magnitude, "recall, by magnitude", SKY, "D"),
            (found.precision, "precision", GREEN, "s"), (found.density, "density (predicted)", ORANGE, "^"),
            (1 - facts.sparsity, "density (fired)", GREY, "x"),
        ):  # fmt: skip
            if values is not None:
                shown = np.where(found.falls_back, np.nan, 100 * values)
                axis.plot(x, shown, color=colour, marker=marker, markersize=4, linewidth=1, label=label)
        for layer in np.flatnonzero(found.falls_back):
            axis.axvspan(layer - 0.5, layer + 0.5, color="#eceff1", linewidth=0,
                         label="exact" if layer == np.flatnonzero(found.falls_back)[0] else None)  # fmt: skip
        axis.set_ylabel("share")
        _percent(axis, top=102)
        _layers(axis, facts.n_layer)
        figure.legend(loc="outside upper center", ncols=6, fontsize=9)

    return _draw(10, 3.6, (1, 1), paint)


def bytes_read(facts: Facts) -> bytes:
    """FFN bytes per token over layers: exact, and predict where the file has predictors."""

    def paint(figure: Figure, axes: Any) -> None:
        axis = axes[0, 0]
        x = np.arange(facts.n_layer)
        shown = [("exact", facts.exact, BLUE)]
        if facts.predict is not None:
            shown.append(("predict", facts.predict, ORANGE))
        width = 0.84 / len(shown)
        for i, (label, values, colour) in enumerate(shown):
            axis.bar(x + (i - (len(shown) - 1) / 2) * width, 100 * values, width=width, color=colour, label=label)
        axis.axhline(100, color=RED, linewidth=1.2, linestyle="--", label="dense")
        axis.set_ylabel("share of the layer's FFN")
        _percent(axis, top=max(104.0, 104 * max(float(v.max()) for _, v, _ in shown)))
        _layers(axis, facts.n_layer)
        figure.legend(loc="outside upper center", ncols=3, fontsize=9)

    return _draw(10, 3.4, (1, 1), paint)


def placement(plans: Sequence[Placement]) -> bytes:
    """One panel per budget: of each layer's neurons, those on the GPU; and where keys and attention are."""

    def paint(figure: Figure, axes: Any) -> None:
        for axis, plan in zip(axes[:, 0], plans, strict=True):
            n_ff, hot = np.array(plan.n_ff, np.float64), np.array(plan.hot, np.float64)
            x, on_gpu = np.arange(len(n_ff)), 100 * hot / n_ff
            axis.bar(x, on_gpu, width=0.85, color=ORANGE, label="neurons on the GPU")
            axis.bar(x, 100 - on_gpu, bottom=on_gpu, width=0.85, color="#c6d8e8", label="neurons on the CPU")
            axis.plot(x, 100 * np.array(plan.share), color="#333333", marker=".", linewidth=0.8,
                      label="share of the layer's firings on the GPU")  # fmt: skip
            keys, attention = np.array(plan.keys_on_gpu, bool), np.array(plan.layer_on_gpu, bool)
            axis.scatter(x[keys], np.full(keys.sum(), 105), marker="s", s=14, color=GREEN, clip_on=False,
                         label="all key rows on the GPU")  # fmt: skip
            axis.scatter(x[attention], np.full(attention.sum(), 113), marker="s", s=14, color=BLUE, clip_on=False,
                         label="attention on the GPU")  # fmt: skip
            axis.set_title(f"{plan.budget / 2**30:.2f} GiB of VRAM, context {plan.n_ctx}, objective {plan.objective}",
                           pad=24)  # fmt: skip
            _percent(axis)
            _layers(axis, len(n_ff))
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=9)

    return _draw(10, 0.7 + 2.9 * len(plans), (len(plans), 1), paint)


def times(plans: Sequence[Placement]) -> bytes:
    """One panel per budget: expected microseconds of each layer, on the GPU, on the CPU, and in all."""

    def paint(figure: Figure, axes: Any) -> None:
        for axis, plan in zip(axes[:, 0], plans, strict=True):
            x = np.arange(len(plan.hot))
            axis.bar(x - 0.21, 1e6 * np.array(plan.t_gpu), width=0.42, color=ORANGE, label="GPU")
            axis.bar(x + 0.21, 1e6 * np.array(plan.t_cpu), width=0.42, color=BLUE, label="CPU")
            axis.plot(x, 1e6 * np.array(plan.t_layer), color="#333333", marker=".", linewidth=0.8,
                      label="layer (both overlap; waiting included)")  # fmt: skip
            axis.set_title(f"{plan.budget / 2**30:.2f} GiB of VRAM: {plan.tokens_per_second:.1f} tokens/s expected")
            axis.set_ylabel("microseconds")
            axis.set_ylim(0)
            _layers(axis, len(x))
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=9)

    return _draw(10, 0.6 + 2.7 * len(plans), (len(plans), 1), paint)


def relufication(error: np.ndarray) -> bytes:
    """Error over layers."""

    def paint(figure: Figure, axes: Any) -> None:
        axis = axes[0, 0]
        axis.bar(np.arange(len(error)), error, color=GREEN, width=0.8)
        axis.set_ylabel("relative squared error")
        _layers(axis, len(error))

    return _draw(10, 3, (1, 1), paint)
