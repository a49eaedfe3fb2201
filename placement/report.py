"""`hotcold report MODEL -o report.html`: what is known of a model's neurons, as one page with pictures.

In: a neuron-split GGUF with counts, or one and a profile. Out: one HTML file that needs nothing else. Next:
report_facts.py (numbers), plots.py (pictures), report_page.py (page).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hotcold.runtime.atomic import check_output, replacing
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.console import note
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import open_gguf, safe_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `hotcold report`."""
    parser.add_argument("model", metavar="MODEL", type=_path, help="neuron-split GGUF file (from hotcold place)")
    parser.add_argument("--profile", metavar="P", type=_path,
                        help="what hotcold profile counted (default: the counts in the file)")
    parser.add_argument("-o", "--output", metavar="OUT", type=_path,
                        help="HTML file to write (default: MODEL's name, .report.html, in this folder)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")


def run(args: argparse.Namespace) -> int:
    """Write the page; returns the exit status. Raises HotcoldError with one line for the user."""
    out: Path = args.output or Path(args.model.name.removesuffix(".gguf") + ".report.html")
    for source in (args.model, args.profile):
        if source is not None and out.exists() and source.exists() and out.samefile(source):
            raise HotcoldError(f"{safe_text(str(out))}: is read by this command: choose another name with -o")
    check_output(out, args.force)
    html = make_report(args.model, args.profile)
    with replacing(out, args.force) as file:
        file.write(html.encode("utf-8", "backslashreplace"))
    note(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB)")
    return 0


def make_report(model: Path, profile: Path | None = None) -> str:
    """The page. Raises HotcoldError where the model has no counts and no profile is given."""
    from hotcold.placement import plots
    from hotcold.placement.profile import load_profile
    from hotcold.placement.report_facts import gather
    from hotcold.placement.report_page import report_page

    with open_gguf(model) as file:
        config = ModelConfig.from_gguf(file)
        counts = None if profile is None else load_profile(profile)
        facts = gather(file, config, counts, "" if profile is None else str(profile))
        plots.check_matplotlib()
        return report_page(facts)


def _path(text: str) -> Path:
    if not text:  # Path("") would be the current folder
        raise HotcoldError("no such file: ''")
    return Path(text)
