"""The parts that report pages are made of: tables, figures, a page. Every text is escaped here, once.

In: texts (of strangers, too) and SVG images. Out: HTML that refers to nothing outside itself. Next: report_page.py.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hotcold.runtime.gguf_file import safe_text

# Nothing is loaded and nothing runs, whatever a model's name says.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_STYLE = """
:root { color-scheme: light; --ink: #202124; --soft: #5f6368; --line: #e3e6ea; --back: #f6f7f9; --accent: #b45f06; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
       font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
header h1 { margin: 0; font-size: 1.7rem; overflow-wrap: anywhere; }
header p { margin: .2rem 0 1.2rem; color: var(--soft); overflow-wrap: anywhere; }
nav ul { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; margin: 0 0 1.2rem; padding: 0; list-style: none; }
nav a { color: var(--accent); }
section { background: #fff; border: 1px solid var(--line); border-radius: .6rem; padding: 1.1rem 1.3rem;
          margin-bottom: 1.2rem; }
h2 { margin: 0 0 .4rem; font-size: 1.2rem; }
p { margin: .3rem 0 .8rem; }
figure { margin: 0 0 1rem; }
figure img { display: block; width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: .92rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .8rem; margin: 0 0 1.2rem; }
.tiles div { background: #fff; border: 1px solid var(--line); border-radius: .6rem; padding: .7rem 1rem; }
.tiles dt { color: var(--soft); font-size: .85rem; }
.tiles dd { margin: 0; font-size: 1.5rem; font-weight: 600; }
.scroll { overflow: auto; max-height: 26rem; border: 1px solid var(--line); border-radius: .4rem;
           margin-bottom: .6rem; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .5rem .7rem; color: var(--soft); }
th, td { padding: .28rem .7rem; text-align: right; border-top: 1px solid var(--line); white-space: nowrap; }
thead th { position: sticky; top: 0; background: #fff; border-top: 0; box-shadow: inset 0 -1px var(--line); }
th.text, td.text { text-align: left; }
td.text { white-space: normal; overflow-wrap: anywhere; min-width: 5.5rem; }
tfoot th, tfoot td { font-weight: 600; }
ul.notes { padding-left: 1.2rem; margin: .3rem 0; }
code { background: var(--back); padding: .05rem .3rem; border-radius: .25rem; overflow-wrap: anywhere; }
@media print { .scroll { max-height: none; overflow: visible; } body { background: #fff; } section { border: 0; } }
"""


def text(value: object, most: int = 400) -> str:
    """Any text, made safe: control characters spelled out, cut where it is very long, escaped."""
    return html.escape(safe_text(str(value), most))


def code(value: object) -> str:
    return f"<code>{text(value)}</code>"


def figure(svg: bytes, alt: str, caption: str) -> str:
    """alt: what the picture shows, in words, for those who do not see it."""
    data = base64.b64encode(svg).decode("ascii")
    return (
        f'<figure><img src="data:image/svg+xml;base64,{data}" alt="{text(alt, 2000)}">'
        f"<figcaption>{text(caption, 2000)}</figcaption></figure>"
    )


def paragraph(sentence: str) -> str:
    return f"<p>{text(sentence, 2000)}</p>"


def notes(sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{text(s, 1000)}</li>" for s in sentences)
    return f'<ul class="notes">{items}</ul>' if items else ""


def table(
    caption: str, headings: Sequence[str], rows: Iterable[Sequence[object]], *, last: Sequence[object] | None = None,
    words: Sequence[int] = (),
) -> str:  # fmt: skip
    """A table whose first column names the row. last: a row of means or sums. words: columns that are no numbers."""

    def row(cells: Sequence[object]) -> str:
        out = []
        for i, cell in enumerate(cells):
            kind = ' class="text"' if i in words else ""
            out.append(f"<td{kind}>{text(cell)}</td>" if i else f'<th scope="row"{kind}>{text(cell)}</th>')
        return f"<tr>{''.join(out)}</tr>"

    heads = "".join(
        f'<th scope="col"{" class=" + chr(34) + "text" + chr(34) if i in words else ""}>{text(h)}</th>'
        for i, h in enumerate(headings)
    )
    foot = f"<tfoot>{row(last)}</tfoot>" if last is not None else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{text(caption)}"><table>'
        f"<caption>{text(caption)}</caption><thead><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(row(r) for r in rows)}</tbody>{foot}</table></div>"
    )


@dataclass
class Section:
    """A part of the page. body: pieces of HTML."""

    name: str  # for links; letters only
    title: str
    body: list[str] = field(default_factory=list)


def page(title: str, subtitle: str, tiles: Sequence[tuple[str, str]], sections: Sequence[Section]) -> str:
    """A whole document."""
    links = "".join(f'<li><a href="#{s.name}">{text(s.title)}</a></li>' for s in sections)
    boxes = "".join(f"<div><dt>{text(k)}</dt><dd>{text(v)}</dd></div>" for k, v in tiles)
    body = "".join(
        f'<section id="{s.name}" aria-labelledby="{s.name}-title"><h2 id="{s.name}-title">{text(s.title)}</h2>\n'
        + "\n".join(s.body)
        + "</section>\n"
        for s in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<header><h1>{text(title)}</h1><p>{text(subtitle)}</p></header>\n"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n<dl class="tiles">{boxes}</dl>\n'
        f"{body}</main>\n</body>\n</html>\n"
    )
