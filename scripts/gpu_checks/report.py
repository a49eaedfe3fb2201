"""What a run of gpu_check.py found, as Markdown: all of it, and the short table at the end.

In: a result, a dictionary that JSON can hold. Out: text. Next: plot.py draws the speeds, page.py keeps them.
"""

from __future__ import annotations

import statistics
from typing import Any

from comparison.report import optional, spread, table
from comparison.settings import STOCK

from gpu_checks.speed import NONE, size
from hotcold.runtime.gpu.placement import KINDS
from hotcold.runtime.gpu.source import module_names, module_source, signatures

Result = dict[str, Any]
Rows = list[dict[str, Any]]
PLAN_LETTERS = {"all": "(a)", "keys": "(b)", "predict": "(c)", "layers": "(d)"}
SHOWN = 6  # names in a line that lists them


def part_of(result: Result, name: str) -> dict[str, Any]:
    return next((part for part in result["parts"] if part["name"] == name), {"items": [], "left_out": []})


def item_of(result: Result, part: str, name: str) -> dict[str, Any]:
    return next((item for item in part_of(result, part)["items"] if item["name"] == name), {})


def failures(result: Result, correctness: bool = True) -> Rows:
    """Items that failed, of the parts that decide whether a run did, or of all."""
    return [item for part in result["parts"] if part["correctness"] or not correctness for item in part["items"]
            if item.get("ok") is False]  # fmt: skip


def card_name(result: Result) -> str:
    return str(item_of(result, "environment", "card").get("facts", {}).get("card", "unknown card"))


# ------------------------------------------------------------------ speeds


def speeds(result: Result) -> dict[int, dict[str, dict[str, Any]]]:
    """budget -> who -> {"pp": [tokens/s of each round], "tg": […], and of the last burst "skips", "layers", …}."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for item in part_of(result, "speed")["items"]:
        if "who" in item:
            here = found.setdefault(item["budget"], {}).setdefault(item["who"], {"pp": [], "tg": []})
            for test in ("pp", "tg"):
                here[test] += [max(item[test])] if item.get(test) else []
            keys = ("skips", "cpu_share", "computed", "vram", "planned", "layers", "over", "build", "expected",
                    "command")  # fmt: skip
            here |= {key: item[key] for key in keys if item.get(key) is not None}
            here |= {"note": item["note"]} if not item.get("tg") else {}
    return dict(sorted(found.items()))


def columns(result: Result) -> list[str]:
    """Who takes part, in the order of the tables."""
    seen = {who for row in speeds(result).values() for who in row}
    return [who for who in (*NONE, *KINDS, STOCK) if who in seen]


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def best_of_ours(row: dict[str, dict[str, Any]], test: str) -> tuple[str, float] | None:
    found = [(who, value) for who, seen in row.items() if who != STOCK and (value := median(seen[test])) is not None]
    return max(found, key=lambda pair: pair[1], default=None)


def ratio(row: dict[str, dict[str, Any]], test: str) -> float | None:
    """Of the best of ours to llama.cpp."""
    best, stock = best_of_ours(row, test), median(row.get(STOCK, {}).get(test, []))
    return best[1] / stock if best and stock else None


def speed_table(result: Result, test: str, short: bool = False) -> str:
    """Tokens per second, a line per budget."""
    names, rows = columns(result), []
    for budget, row in speeds(result).items():
        cells = [size(budget)]
        for who in names:
            values = row.get(who, {}).get(test, [])
            value = median(values)
            if who in row and value is None:
                cells.append("not measured")
            else:
                cells.append(optional(value, ".1f") if short or len(values) < 2 else spread(values, 1))
            if who == STOCK and values and "layers" in row[who]:
                cells[-1] += f" (-ngl {row[who]['layers']})"
        if STOCK in names:
            cells.append(optional(ratio(row, test), ".2f"))
        else:
            cells.append("not given")
        rows.append(cells)
    titles = [f"{PLAN_LETTERS.get(who, '')} {who}".strip() for who in names]
    return table(["VRAM", *titles, f"best ÷ {STOCK}" if STOCK in names else STOCK], rows)


def hybrid_table(result: Result) -> str:
    """What was where in the runs of the plans."""
    rows = []
    for budget, row in speeds(result).items():
        for who, seen in row.items():
            shares = [optional(seen.get(name), ".1%") for name in ("computed", "cpu_share", "skips")]
            rows.append([size(budget), who, optional(seen.get("expected"), ".1f"), *shares, gib(seen.get("planned")),
                         gib(seen.get("vram")), seen.get("note", "")])  # fmt: skip
    return table(["VRAM", "who", "decode as planned", "neurons computed", "by the CPU", "layers without a wait",
                  "planned GiB", "taken GiB", ""], rows)  # fmt: skip


def gib(n_bytes: float | None) -> str:
    return optional(n_bytes, ".2f", 2.0**-30)


def speed_head(result: Result) -> str:
    facts, s = item_of(result, "speed", "model and machine"), result["settings"]
    rounds = [item["round"] for item in part_of(result, "speed")["items"] if item.get("tg")]
    builds = {seen["build"] for row in speeds(result).values() for seen in row.values() if "build" in seen}
    active = ", 10 % of the neurons active" * bool(facts.get("made"))
    line = (f"{facts.get('model', 'no model')}{active}, {facts.get('threads', '?')} CPU threads, prompt of "
            f"{s['prompt']} tokens, {s['gen']} generated from an empty context, medians of up to "
            f"{max(rounds, default=0)} rounds in which everybody took turns.")  # fmt: skip
    return line + "".join(f" {STOCK}: {build}." for build in sorted(builds))


# ------------------------------------------------------------------ the whole report


def report(result: Result) -> str:
    parts = [f"# GPU check: {card_name(result)}", "", f"{result['date']}, {result['seconds'] / 60:.1f} minutes."]
    if result["settings"]["device"] == "sim":
        parts += ["", "**Dry run on the emulated device: speeds mean nothing.**"]
    for part in result["parts"]:
        parts += ["", f"## {part['title']}", "", f"{part['seconds']:.0f} s."]
        parts += ["", VIEWS[part["name"]](result, part["items"])] if part["items"] else []
        wrong = [item for item in part["items"] if item.get("ok") is False]
        parts += ["", "Failed:", "", *(f"- {item['name']}: {item['note']}" for item in wrong)] if wrong else []
        parts += ["", left_out_line(part)] if part["left_out"] else []
    return "\n".join(parts) + "\n"


def left_out_line(part: dict[str, Any]) -> str:
    names = part["left_out"]
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"Left out for lack of time: {'; '.join(names[:SHOWN])}{more}."


def environment_view(result: Result, items: Rows) -> str:
    return "\n".join(f"- {name}: {text}" for item in items for name, text in item.get("facts", {}).items())


def kernel_rows(found: Rows) -> Rows:
    """Per kernel: cases it ran in, launches, worst error (None: compared bit by bit) and its share of what is allowed,
    whether all its cases are right.

    found: the items of part 2. A kernel that no case ran is "ok": None.
    """
    rows: dict[str, dict[str, Any]] = {
        kernel: {"kernel": kernel, "cases": 0, "launches": 0, "worst": None, "of_allowed": None, "ok": None}
        for name in module_names() for kernel in signatures(module_source(name))
    }  # fmt: skip
    for item in found:
        for kernel, seen in item.get("rows", {}).items():
            row = rows[kernel]
            row["cases"] += 1
            row["launches"] += seen["launches"]
            for name in ("worst", "of_allowed"):
                row[name] = max((v for v in (row[name], seen[name]) if v is not None), default=None)
            row["ok"] = row["ok"] is not False and not seen["wrong"]
    return list(rows.values())


def kernels_view(result: Result, items: Rows) -> str:
    rows = [[row["kernel"], str(row["cases"]), str(row["launches"]), error_text(row),
             optional(row["of_allowed"], ".0%"), yes_no(row["ok"])] for row in result["kernels"]]  # fmt: skip
    return table(["kernel", "cases", "launches", "worst error", "of what is allowed", "right"], rows)


def error_text(row: dict[str, Any]) -> str:
    return optional(row["worst"], ".1e") or ("same bits" if row["cases"] else "")


def yes_no(ok: bool | None) -> str:
    return {True: "yes", False: "**no**", None: "not run"}[ok]


def plans_view(result: Result, items: Rows) -> str:
    rows = [[item["name"], optional(item.get("error"), ".1e"), str(item.get("others", "")),
             optional(item.get("neurons"), ".2%"), optional(item.get("cpu_share"), ".0%"),
             optional(item.get("skips"), ".0%"), mib(item.get("planned")), mib(item.get("peak")), yes_no(item["ok"])]
            for item in items]  # fmt: skip
    return table(["plan", "error of logits", "other tokens", "other neurons", "by the CPU", "waits skipped",
                  "VRAM planned MiB", "peak MiB", "right"], rows)  # fmt: skip


def mib(n_bytes: float | None) -> str:
    return optional(n_bytes, ".1f", 2.0**-20)


def latencies_view(result: Result, items: Rows) -> str:
    plain = item_of(result, "latencies", "plain read of VRAM").get("value", 0.0)
    rows = []
    for item in items:
        if "value" in item:
            ours = plain and item["name"].startswith(("matvec", "listed"))
            rows.append([item["name"], f"{item['value']:.4g} {item['unit']}",
                         f"{item['value'] / plain:.0%}" if ours else "", item["more"]])  # fmt: skip
    return table(["what", "", "of the plain read", ""], rows)


def speed_view(result: Result, items: Rows) -> str:
    llama = [f"- {item['name']}: {item['note']}" for item in items if item["name"].startswith("layers of")]
    stock = [row[STOCK] for row in speeds(result).values() if STOCK in row]
    llama += [f"- `{seen['command']}`" for seen in stock if "command" in seen]
    missing = [] if result["settings"]["llama_bench"] else [f"{STOCK}: not given (--llama-bin)."]
    if not speeds(result):
        return "\n".join(f"{item['name']}: {item['note']}" for item in items)
    return "\n\n".join([speed_head(result), *missing, "Decode, tokens per second:", speed_table(result, "tg"),
                        "Prompt, tokens per second:", speed_table(result, "pp"), hybrid_table(result),
                        *(["\n".join(llama)] if llama else [])])  # fmt: skip


VIEWS = {"environment": environment_view, "kernels": kernels_view, "plans": plans_view, "latencies": latencies_view,
         "speed": speed_view}  # fmt: skip


# ------------------------------------------------------------------ short


def short_table(result: Result) -> str:
    """At most some 40 lines."""
    lines = [f"GPU check of {card_name(result)}: {result['seconds'] / 60:.1f} minutes"]
    driver = item_of(result, "environment", "driver").get("note")
    lines += [f"  {driver}"] if driver else []
    lines += [*kernel_lines(result), *plan_lines(result), *latency_lines(result)]
    if speeds(result):
        lines += [speed_head(result), "decode, tokens/s", speed_table(result, "tg", short=True),
                  "prompt, tokens/s", speed_table(result, "pp", short=True)]  # fmt: skip
    elif notes := [item["note"] for item in part_of(result, "speed")["items"] if item.get("ok") is False]:
        lines.append(f"tokens per second: {notes[0]}")
    late = [f"{part['name']} {len(part['left_out'])}" for part in result["parts"] if part["left_out"]]
    lines += [f"left out for lack of time, items: {', '.join(late)}"] if late else []
    return "\n".join(lines)


def kernel_lines(result: Result) -> list[str]:
    rows = result["kernels"]
    if not any(row["cases"] for row in rows):
        return []
    right = sum(row["ok"] is True for row in rows)
    worst = max((row["of_allowed"] for row in rows if row["of_allowed"] is not None), default=0.0)
    cases = sum(item.get("cases", 1) for item in part_of(result, "kernels")["items"])
    lines = [f"kernels: {right} of {len(rows)} right, {cases} cases, the worst error is {worst:.0%} of what is allowed"]
    for what, ok in (("wrong", False), ("not run", None)):
        lines += listed(what, [row["kernel"] for row in rows if row["ok"] is ok])
    return lines


def plan_lines(result: Result) -> list[str]:
    items = part_of(result, "plans")["items"]
    if not items:
        return []
    errors = [item["error"] for item in items if item.get("error") is not None]
    wrong = [item["name"] for item in items if not item.get("right", item["ok"])]
    over = {item["name"]: item["over"] for item in items if item.get("over")}
    worst = f", worst error of logits {max(errors):.1e}" if errors else ""
    lines = [f"plans:   {len(items) - len(wrong)} of {len(items)} right{worst}", *listed("wrong", wrong)]
    if over:
        lines += listed(f"more VRAM than planned, up to {mib(max(over.values()))} MiB, in {len(over)}", list(over))
    return lines


def listed(what: str, names: list[str]) -> list[str]:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return [f"  {what}: {'; '.join(names[:SHOWN])}{more}"] if names else []


def latency_lines(result: Result) -> list[str]:
    """Figures of one unit in one line."""
    by_unit: dict[str, list[str]] = {}
    for item in part_of(result, "latencies")["items"]:
        if "value" in item:
            by_unit.setdefault(item["unit"].split()[0], []).append(f"{item['name']} {item['value']:.3g}")
    return [f"{unit}: {', '.join(texts)}" for unit, texts in by_unit.items()]
