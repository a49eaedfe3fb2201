"""One part of the check, in a process of its own: a kernel that hangs or breaks the card ends this process only.

In: settings, the items to skip, seconds left. Out: a line of JSON per event on stdout. Next: the part's module;
boxed.py reads the lines.

    python -m gpu_checks.child MODULE SETTINGS SKIP SECONDS
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gpu_checks.settings import Settings
from hotcold.runtime.gpu.device import DeviceError

BROKEN = 3  # exit status: the device is of no use any more, a new process is
Payload = dict[str, Any]  # "ok": True, False, or None where there is nothing to be right; "note"; the part's own fields


class Item(NamedTuple):
    name: str
    run: Callable[[], Payload]
    always: bool = False  # others need what it finds
    patience: float = 0.0  # seconds after which it has hung; 0: as its part says


def main() -> int:
    module, settings, skip, seconds = sys.argv[1], Settings.from_json(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
    end = time.monotonic() + float(seconds)
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed must not look like an event

    def tell(**event: Any) -> None:
        print(json.dumps(event), file=events, flush=True)

    late = False
    for item in chosen(importlib.import_module(module).items(settings), settings.only, skip):
        late = late or time.monotonic() > end
        if late:
            tell(left_out=item.name)
            continue
        tell(begin=item.name, patience=item.patience)
        began, broken = time.monotonic(), False
        try:
            payload = item.run()
        except Exception as error:  # whatever it is, the next item is tried
            traceback.print_exc()
            payload = {"ok": False, "note": told(error)}
            broken = isinstance(error, DeviceError)
        broken = payload.pop("broken", broken)
        tell(end=item.name, seconds=time.monotonic() - began, **payload)
        if broken:
            return BROKEN
    tell(finished=True)
    return 0


def chosen(items: Iterator[Item], only: str, skip: list[str]) -> Iterator[Item]:
    return (item for item in items if (item.always or re.search(only, item.name)) and item.name not in skip)


def told(error: BaseException) -> str:
    """One line: what, and the line of the code it comes from."""
    text = " ".join(str(error).split())[:300]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return f"{type(error).__name__}: {text}{where}"


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a card that hangs must not hang the end too
