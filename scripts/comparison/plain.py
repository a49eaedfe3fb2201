"""What is saved and shown, without the folders of the machine that it was measured on.

In: a text, or what JSON holds. Out: the same in forms that a reader can type: `hotcold bench`, `python scripts/x.py`,
`~/x`, names of files. Next: whoever saves or shows results.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comparison.settings import FOLDER

CHECKOUT = FOLDER.parent.parent
NAME = r"[\w.+@%-]"
# Where an absolute path begins: not the rest of a relative one, of one below ~, of an address.
START = r"(?<![\w/.~<+@%-])(?!//)"
ABSOLUTE = re.compile(rf"{START}(?:/{NAME}+)+/?")
PYTHON = re.compile(rf"{START}(?:/{NAME}+)+/python[0-9.]*(?!{NAME}|/)")
OUR_SCRIPT = re.compile(rf"{START}(?:/{NAME}+)*/scripts/(?=[\w/]+\.(?:py|sh)\b)")
OUR_COMMAND = "python -m hotcold.runtime.cli"


def plain(value: Any) -> Any:
    """What JSON holds, every text in it made plain."""
    return each_text(value, plain_text)


def each_text(value: Any, change: Callable[[str], str]) -> Any:
    """What JSON holds, every text in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {each_text(key, change): each_text(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [each_text(item, change) for item in value]
    return value


def plain_text(text: str) -> str:
    """Doing it twice changes nothing more. Results may come from another checkout, Python or home than ours."""
    text = PYTHON.sub("python", text).replace(sys.executable, "python")  # the latter for folders with odd names
    text = OUR_SCRIPT.sub("scripts/", text.replace(OUR_COMMAND, "hotcold"))
    text = re.sub(rf"{re.escape(str(CHECKOUT))}(?!{NAME})(/?)", lambda found: "" if found[1] else ".", text)
    if len(Path.home().parts) > 1:
        text = re.sub(rf"{re.escape(str(Path.home()))}(?!{NAME})", "~", text)
    return ABSOLUTE.sub(lambda found: found[0].rstrip("/").rpartition("/")[2], text)
