"""The report's sections: for each a picture, a sentence that explains it, and a table with its numbers.

In: Facts. Out: a whole HTML page. Next: nothing; a browser shows it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hotcold.placement import plots
from hotcold.placement.plan_vram import Placement
from hotcold.placement.report_facts import Facts
from hotcold.placement.report_html import Section, figure, notes, page, paragraph, table
from hotcold.runtime.facts import fires
from hotcold.runtime.inspect import format_bytes

MOST_BUDGETS = 6  # that are drawn; the table has all


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"


def report_page(facts: Facts) -> str:
    """The document."""
    config = facts.config
    name = config.name or facts.path.rsplit("/", 1)[-1]
    sections = [_activity(facts), _sparsity(facts), _bytes(facts)]
    missing: list[str] = list(facts.notes)
    for section, how in (
        (_predictors(facts), "Predictors: the file has none; hotcold train-predictor adds them."),
        (_placement(facts), "Placement and expected times: the file has none; hotcold place with --vram-budget adds "
                            "them."),
        (_times(facts), ""),
        (_relufication(facts), "Relufication: the file is not the work of hotcold relufy, so it has no errors."),
    ):  # fmt: skip
        if section is not None:
            sections.append(section)
        elif how:
            missing.append(how)
    if facts.persistence is None:
        missing.append("Persistence (neurons that go on firing with the next token): give the profile with --profile.")
    sections.append(_model(facts))
    if missing:
        sections.append(Section("missing", "Not in this report", [notes(missing)]))
    tiles = [
        ("neurons off (sparsity)", percent(facts.mean(facts.sparsity))),
        ("make 80 % of the firings", percent(facts.mean(facts.skew))),
        ("FFN bytes read, exact", percent(_weighted(facts, facts.exact))),
    ]
    if facts.predict is not None:
        tiles.append(("FFN bytes read, predict", percent(_weighted(facts, facts.predict))))
    if facts.placements:
        best = max(facts.placements, key=lambda p: p.tokens_per_second)
        tiles.append(("tokens/s expected, best plan", f"{best.tokens_per_second:.1f}"))
    counted = f"counts of {facts.source}: {facts.tokens} tokens"
    return page(f"Neurons of {name}", f"{facts.path}; {counted}{' of ' + facts.corpus if facts.corpus else ''}",
                tiles, sections)  # fmt: skip


def _weighted(facts: Facts, shares: np.ndarray) -> float:
    """Over all bytes."""
    return float(np.average(shares, weights=facts.ffn_bytes)) if facts.ffn_bytes.sum() > 0 else float(shares.mean())


def _extremes(values: np.ndarray) -> str:
    low, high = int(np.argmin(values)), int(np.argmax(values))
    return f"least in layer {low} ({percent(values[low])}), most in layer {high} ({percent(values[high])})"


def _activity(facts: Facts) -> Section:
    top = facts.mean(facts.top_tenth)
    seen = ("The most active tenth of a layer's neurons makes "
            f"{percent(top)} of its firings on average: {_extremes(facts.top_tenth)}.")  # fmt: skip
    headings = ["layer", "neurons", "never fired", "most active", "median", "top 10 % of neurons make"]
    extra = facts.persistence is not None
    rows = []
    for layer, fired in enumerate(facts.fired):
        row = [layer, len(fired), percent(facts.never[layer]), percent(fired[0] / facts.tokens),
               percent(float(np.median(fired)) / facts.tokens, 2), percent(facts.top_tenth[layer])]  # fmt: skip
        rows.append([*row, percent(facts.persistence[layer])] if facts.persistence is not None else row)
    return Section("activity", "How firings are spread over neurons", [
        paragraph("Left: going through a layer's neurons from the most active on, how much of all its firings they "
                  "have made; the further a curve bends to the upper left, the fewer neurons do the work. Right: on "
                  "how many of the tokens each of them fires. There is a curve per layer, dark for the first."),
        figure(plots.activity(facts), seen, seen),
        table("Activity per layer; most active and median: share of the tokens on which that neuron fires",
              [*headings, "fire again with the next token"] if extra else headings, rows),
    ])  # fmt: skip


def _sparsity(facts: Facts) -> Section:
    seen = f"{percent(facts.mean(facts.sparsity))} of the neurons are off for a token: {_extremes(facts.sparsity)}."
    rows = [[layer, percent(s, 2), percent(k, 2)] for layer, (s, k) in enumerate(zip(facts.sparsity, facts.skew,
                                                                                    strict=True))]  # fmt: skip
    return Section("sparsity", "Sparsity and skew", [
        paragraph("Left: the share of a layer's neurons that a token leaves off; what is off need not be computed. "
                  "Right: the smallest share of its neurons that makes 80 % of its firings; the lower, the more is "
                  "gained by keeping these few where reading is fast."),
        figure(plots.sparsity(facts), seen, seen),
        table("Sparsity and skew per layer", ["layer", "sparsity", "skew"], rows,
              last=["mean", percent(facts.mean(facts.sparsity), 2), percent(facts.mean(facts.skew), 2)]),
    ])  # fmt: skip


def _bytes(facts: Facts) -> Section:
    seen = f"Exact mode reads {percent(_weighted(facts, facts.exact))} of what dense reads"
    body = ("Bytes of the feed-forward part that one token reads, as a share of all of them. Exact mode reads every "
            "key row and the other rows of neurons that fire")  # fmt: skip
    headings, rows = ["layer", "FFN", "exact"], []
    worse: list[int] = []
    if facts.predict is not None:
        headings += ["predict", "better"]
        seen += f", predict mode {percent(_weighted(facts, facts.predict))}"
        body += ("; predict mode reads the predictor, the key rows of the neurons it names, and the other rows of "
                 "those that then fire")  # fmt: skip
        worse = np.flatnonzero(facts.predict > facts.exact).tolist()
    for layer in range(facts.n_layer):
        row: list[object] = [layer, format_bytes(int(facts.ffn_bytes[layer])), percent(facts.exact[layer], 2)]
        if facts.predict is not None:
            difference = facts.exact[layer] - facts.predict[layer]
            row += [percent(facts.predict[layer], 2), "same" if not difference else
                    "predict" if difference > 0 else "exact"]  # fmt: skip
        rows.append(row)
    last: list[object] = ["all", format_bytes(int(facts.ffn_bytes.sum())), percent(_weighted(facts, facts.exact), 2)]
    if facts.predict is not None:
        last += [percent(_weighted(facts, facts.predict), 2), ""]
    remarks = []
    if worse:
        remarks.append(f"Predicting reads more than exact mode in layers {', '.join(map(str, worse))}.")
    if any(facts.config.norm_relu):
        remarks.append("Layers with a ReLU after their norms read less still: what inputs of 0 would take is skipped.")
    return Section("bytes", "Bytes read per token", [
        paragraph(body + "."), figure(plots.bytes_read(facts), seen + ".", seen + "."), notes(remarks),
        table("FFN bytes per layer and token, as a share of dense", headings, rows, last=last, words=(4,)),
    ])  # fmt: skip


def _predictors(facts: Facts) -> Section | None:
    found = facts.predictors
    if found is None:
        return None
    body = [paragraph("Recall: of the neurons that fire, the share that the predictor names. Precision: of those it "
                      "names, the share that fires. Density: the share of all neurons that it names. Measured on "
                      "tokens it was not trained on; a layer whose kind is none runs exact.")]  # fmt: skip
    used = ~found.falls_back
    measured = found.recall is not None or found.density is not None
    if measured and used.any():
        seen = f"{int(used.sum())} of {facts.n_layer} layers are predicted"
        if found.recall is not None:
            seen += f", with a recall of {percent(facts.mean(found.recall, used))} on average"
        if found.density is not None:
            seen += f"; {percent(facts.mean(found.density, used))} of their neurons are predicted to fire and "
            seen += f"{percent(facts.mean(1 - facts.sparsity, used))} do"
        body.append(figure(plots.predictors(facts), seen + ".", seen + "."))
    elif not measured:
        body.append(notes(["The file does not say how good its predictors are: hotcold train-predictor measures it."]))
    else:
        body.append(notes(["No layer is predicted: all run exact."]))
    headings = ["layer", "kind", "input", "hidden size", "bytes", "of the FFN"]
    all_columns = (("recall", found.recall), ("by magnitude", found.recall_magnitude), ("precision", found.precision),
                   ("density", found.density))  # fmt: skip
    columns = [(name, values) for name, values in all_columns if values is not None]
    rows = []
    for layer, kind in enumerate(found.kinds):
        none = kind == "none"
        row: list[object] = [layer, kind, "" if none else "layer before" if found.look_ahead[layer] else "own",
                             found.ranks[layer] or "", format_bytes(int(found.n_bytes[layer])),
                             percent(found.n_bytes[layer] / max(facts.ffn_bytes[layer], 1))]  # fmt: skip
        rows.append(row + ["" if none else percent(v[layer], 2) for _, v in columns])
    body.append(table("Predictors per layer", headings + [n for n, _ in columns], rows, words=(1, 2)))
    return Section("predictors", "Predictors", body)


def _placement(facts: Facts) -> Section | None:
    if not facts.placements:
        return None
    plans, drawn = facts.placements, facts.placements[:MOST_BUDGETS]
    seen = " ".join(f"With {format_bytes(p.budget)} of VRAM {sum(p.hot)} of {sum(p.n_ff)} neurons, which make "
                    f"{percent(p.load)} of the firings, are on the GPU." for p in drawn)  # fmt: skip
    rows = [[format_bytes(p.budget), p.n_ctx, p.objective, p.hardware.name, format_bytes(p.used), format_bytes(p.ram),
             f"{sum(p.hot)} of {sum(p.n_ff)}", percent(p.load)] for p in plans]  # fmt: skip
    body = [
        paragraph("Bars: of each layer's neurons, sorted by how often they fire, the first ones are on the GPU and the "
                  "rest on the CPU. The line is higher than the bar, because the neurons on the GPU are the busy ones. "
                  "Squares above: what else of a layer is on the GPU."),
        figure(plots.placement(drawn), seen, seen),
        table("Placements", ["budget", "context", "objective", "machine", "VRAM used", "RAM read", "neurons on the GPU",
                             "of the firings"], rows, words=(2, 3)),
    ]  # fmt: skip
    if len(plans) > len(drawn):
        body.append(notes([f"The first {len(drawn)} of {len(plans)} placements are drawn."]))
    body += [_placement_table(p) for p in drawn]
    return Section("placement", "Placement on GPU and CPU", body)


def _placement_table(p: Placement) -> str:
    def keys(layer: int) -> str:
        all_of_them = p.keys_on_gpu[layer] or p.hot[layer] == p.n_ff[layer]
        return "GPU" if all_of_them else "both" if p.hot[layer] else "CPU"

    def row(layer: int) -> list[object]:
        return [layer, f"{p.hot[layer]} of {p.n_ff[layer]}", percent(p.share[layer]), keys(layer),
                "GPU" if p.layer_on_gpu[layer] else "CPU", format_bytes(p.gpu_bytes[layer]),
                *(f"{1e6 * t[layer]:.1f}" for t in (p.t_gpu, p.t_cpu, p.t_layer))]  # fmt: skip

    return table(f"Per layer, with {format_bytes(p.budget)} of VRAM; times in microseconds per token",
                 ["layer", "neurons on the GPU", "of the firings", "key rows on", "attention on", "on the GPU",
                  "GPU time", "CPU time", "layer time"], map(row, range(len(p.hot))), words=(3, 4))  # fmt: skip


def _times(facts: Facts) -> Section | None:
    if not facts.placements:
        return None
    plans, drawn = facts.placements, facts.placements[:MOST_BUDGETS]
    seen = " ".join(f"With {format_bytes(p.budget)} of VRAM {p.tokens_per_second:.1f} tokens/s are expected, "
                    f"{p.t_token_cpu / p.t_token:.2f} times what the CPU alone gives." for p in drawn)  # fmt: skip
    rows = [[format_bytes(p.budget), p.objective, f"{1e3 * p.t_token:.2f}", f"{p.tokens_per_second:.1f}",
             f"{1 / p.t_token_cpu:.1f}", f"{p.t_token_cpu / p.t_token:.2f}"] for p in plans]  # fmt: skip
    return Section("times", "Expected time per layer", [
        paragraph("Computed from the bytes that a token reads and the bandwidths of the machine, for a context that is "
                  "half full; not measured. GPU and CPU work side by side in the feed-forward part, so a layer takes "
                  "less than both bars together."),
        figure(plots.times(drawn), seen, seen),
        table("Expected speed", ["budget", "objective", "ms per token", "tokens/s", "CPU alone, tokens/s", "times"],
              rows, words=(1,)),
        notes(note for p in drawn for note in p.notes),
    ])  # fmt: skip


def _relufication(facts: Facts) -> Section | None:
    found = facts.relufication
    if found is None:
        return None
    fitted = f"fitted on {found.tokens} tokens" if found.tokens else "fitted"
    body = [paragraph("The model was made sparse by hotcold relufy: its neurons were refitted so that a ReLU can "
                      f"switch them off, {found.rank} neurons that are always on were added per layer, {fitted}.")]
    if found.error is not None:
        worst = int(np.argmax(found.error))
        seen = (f"Squared error of each layer's output, relative to its size: {found.error.mean():.3g} on average, "
                f"most in layer {worst} ({found.error[worst]:.3g}).")  # fmt: skip
        body += [figure(plots.relufication(found.error), seen, seen),
                 table("Error after the fit", ["layer", "relative squared error"],
                       [[i, f"{e:.4g}"] for i, e in enumerate(found.error)],
                       last=["mean", f"{found.error.mean():.4g}"])]  # fmt: skip
    return Section("relufication", "Relufication", body)


def _model(facts: Facts) -> Section:
    c = facts.config
    neurons = f"{min(c.n_ff)}" if len(set(c.n_ff)) == 1 else f"{min(c.n_ff)} to {max(c.n_ff)}"
    rows: list[Sequence[object]] = [
        ("name", c.name or "(none)"), ("file", facts.path),
        ("size", f"{format_bytes(facts.size)} ({facts.size} bytes)"),
        ("elements", f"{facts.n_weights / 1e6:.1f} M"), ("architecture", c.arch),
        ("layers", f"{c.n_layer}, embedding {c.n_embd}, vocabulary {c.n_vocab}"),
        ("attention", f"{c.n_head} heads, {c.n_head_kv} for keys and values, size {c.head_dim}"),
        ("feed-forward", f"{neurons} neurons per layer, {'gated' if c.gated else 'not gated'}"),
        ("activation", f"{c.activation} ({'neurons switch off' if fires(c) else 'neurons are small, not off'})"),
        ("thresholds", f"{min(c.thresholds):g} to {max(c.thresholds):g}" if any(c.thresholds) else "none"),
        ("types of the matrices", ", ".join(f"{n} {format_bytes(b)}" for n, b in facts.types.items())),
        ("neurons are sorted", "yes" if facts.sorted else "no: hotcold place sorts them"),
        ("counts from", f"{facts.source}, {facts.tokens} tokens"), ("text", facts.corpus or "(not named)"),
        ("its SHA-256", facts.sha256 or "(not given)"),
    ]  # fmt: skip
    return Section("model", "The model", [table("Facts", ["what", "value"], rows, words=(0, 1))])
