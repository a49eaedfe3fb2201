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


def optional(value: float | None, form: str, factor: float = 1.0) -> str:
    return "" if value is None else format(value * factor, form)


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
        parts.append(speed_table(result["speed"]))
        parts += ["", use_text(result["use"]), "", use_table(result["use"])]
        parts += ["", "Commands, taking turns:", "", "```", *result["commands"], "```"]
    if result["quality"]:
        against = f" against {STOCK} in one batch" if any("kl_mean" in q for q in result["quality"]) else ""
        parts += ["", f"Logits of {result['quality'][0]['tokens']} tokens{against}:", ""]
        parts.append(quality_table(result["quality"]))
    return "\n".join(parts) + "\n"


def speed_table(rows: list[dict[str, Any]]) -> str:
    sparse = any(row["to_dense"] for row in rows)
    header = ["threads", "test", "mode", "hotcold", STOCK, "ratio"]
    header += [*(["÷ our dense"] if sparse else []), "clean rounds"]
    return table(header, [
        [str(r["threads"]), r["test"], r["mode"], spread(r["ours"]), stock_figure(r),
         spread(r["ratio"]) if r["ratio"] else "",
         *([spread(r["to_dense"]) if r["to_dense"] else ""] if sparse else []), r["clean"]]
        for r in rows
    ])  # fmt: skip


def stock_figure(row: dict[str, Any]) -> str:
    """With a mark where llama.cpp is faster with weights left as they lie."""
    if not row["stock"]:
        return ""
    return spread(row["stock"]) + ("" if row["stock_is"] == STOCK else ", no repack")


def use_text(rows: list[dict[str, Any]]) -> str:
    read = {row["threads"]: row["bandwidths"] for row in rows if row["bandwidths"]}
    text = ("What it took: bytes are those of weights and KV cache that a token reads; start is a process that loads "
            "the model and computes one token, with the file in the page cache.")  # fmt: skip
    if read:
        speeds = "; ".join(
            f"{n} thread{'s' * (n > 1)} {spread([b / 1e9 for b in values], 1)}" for n, values in read.items()
        )
        text += f" A plain read of memory, measured between the rounds, runs at (GB/s): {speeds}."
    return text


def use_table(rows: list[dict[str, Any]]) -> str:
    header = ["threads", "test", "who", "tok/s", "tokens per CPU-second", "GB per token", "GB/s", "of the plain read",
              "neurons computed", "FFN bytes read", "peak RSS GB", "start s"]  # fmt: skip
    return table(header, [
        [str(r["threads"]), r["test"], r["who"], f"{r['speed']:.2f}", optional(r["cpu_speed"], ".2f"),
         optional(r["bytes_per_token"], ".3f", 1e-9),
         optional(r["bytes_per_token"], ".1f", r["speed"] / 1e9), optional(r["bandwidth_share"], ".0%"),
         optional(r["share_computed"], ".1%"), optional(r["ffn_bytes_share"], ".1%"),
         optional(r["rss_mb"], ".2f", 1e-3), optional(r["start_s"], ".2f")]
        for r in rows
    ])  # fmt: skip


def quality_table(rows: list[dict[str, Any]]) -> str:
    header = ["who", "max abs difference", "relative L2", "same top token", "KL mean", "KL max", "perplexity"]
    return table(header, [
        [q["who"], *(optional(q.get(name), form) for name, form in (
            ("max_abs", ".3g"), ("relative_l2", ".2e"), ("top1", ".1%"), ("kl_mean", ".2e"), ("kl_max", ".2e"),
            ("perplexity", ".3f")))]
        for q in rows
    ])  # fmt: skip
