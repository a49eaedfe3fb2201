"""The comparison as Markdown.

In: the result of compare_llama_cpp.py, a dictionary that JSON can hold. Out: text. Next: nothing.
"""

from __future__ import annotations

import statistics
from typing import Any

from comparison.settings import STOCK


def spread(values: list[float], digits: int = 2) -> str:
    """Median with the extremes: `20.1 (19.8-20.3)`."""
    if not values:
        return "none clean"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def report(result: dict[str, Any]) -> str:
    """The whole comparison as Markdown."""
    parts = [f"## {result['model']}", ""]
    facts = {**result["machine"], "date": result["date"], "load average at the end": result["load_at_end"]}
    parts += [f"- {name}: {value}" for name, value in facts.items()]
    parts.append("- " + ", ".join(f"{name} {value}" for name, value in result["versions"].items()))
    parts += [f"- {label}: {line}" for label, line in result["llama_cpp"].items()]
    parts += [f"- {note}" for note in result["notes"]]
    if result["speed"]:
        parts += ["", "Speed in tokens per second, median (lowest-highest) of the clean rounds:", ""]
        parts.append(table(
            ["threads", "test", "mode", "hotcold", STOCK, "ratio", "neurons computed", "clean rounds"],
            [[str(r["threads"]), r["test"], r["mode"], spread(r["ours"]), spread(r["stock"]) if r["stock"] else "",
              spread(r["ratio"]) if r["ratio"] else "",
              f"{r['share_computed']:.0%}" if r["share_computed"] is not None else "", r["clean"]]
             for r in result["speed"]],
        ))  # fmt: skip
        parts += ["", "Commands, taking turns:", "", "```", *result["commands"], "```"]
    if result["quality"]:
        parts += ["", f"Logits of {result['quality'][0]['tokens']} tokens against {STOCK} in one batch:", ""]
        parts.append(table(
            ["who", "max abs difference", "relative L2", "same top token", "KL mean", "KL max"],
            [[q["who"], f"{q['max_abs']:.3g}", f"{q['relative_l2']:.2e}", f"{q['top1']:.1%}", f"{q['kl_mean']:.2e}",
              f"{q['kl_max']:.2e}"] for q in result["quality"]],
        ))  # fmt: skip
    return "\n".join(parts) + "\n"
