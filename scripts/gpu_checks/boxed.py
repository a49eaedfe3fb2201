"""Runs a part in child processes until it is done or its time is over.

In: a Part, Settings, a deadline. Out: Outcome, with every item's payload. Next: gpu_check.py, report.py.

A child that dies, hangs or says that the device is broken costs the item it was at; another goes on with the next.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from gpu_checks.settings import CHECKOUT, Part, Settings

GRACE = 10.0  # seconds beyond the deadline for the item that is under way


@dataclass
class Outcome:
    part: str
    items: list[dict[str, Any]] = field(default_factory=list)  # {"name", "seconds", "ok", "note", …}
    left_out: list[str] = field(default_factory=list)  # for lack of time
    seconds: float = 0.0

    @property
    def failures(self) -> list[dict[str, Any]]:
        return [item for item in self.items if item.get("ok") is False]

    def get(self, name: str) -> dict[str, Any]:
        return next((item for item in self.items if item["name"] == name), {})


def run_part(part: Part, settings: Settings, deadline: float, say: Callable[[str], None]) -> Outcome:
    """deadline: of time.monotonic()."""
    outcome, began = Outcome(part.name), time.monotonic()
    settings.out.mkdir(parents=True, exist_ok=True)
    with open(settings.out / f"{part.name}.log", "w") as log:
        again = True
        while again:
            again = _run_child(part, settings, deadline, outcome, log, say)
    outcome.seconds = time.monotonic() - began
    return outcome


def _run_child(part: Part, settings: Settings, deadline: float, outcome: Outcome, log: Any,
               say: Callable[[str], None]) -> bool:  # fmt: skip
    """Whether another child is to go on."""
    skip = [item["name"] for item in outcome.items]
    command = [sys.executable, "-m", "gpu_checks.child", part.module, settings.to_json(), json.dumps(skip),
               str(max(0.0, deadline - time.monotonic()))]  # fmt: skip
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                               env=child_env(), text=True)  # fmt: skip
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process, lines), daemon=True).start()
    at, why, patience = "", "", part.patience
    try:
        while True:
            limit = part.patience
            if at:
                limit = min(patience, max(0.1, deadline + GRACE - time.monotonic()))
            try:
                line = lines.get(timeout=limit)
            except queue.Empty:
                why = f"no result within {limit:.0f} s, ended" if at else "no item within its time, ended"
                break
            if line is None:
                process.wait()
                why = f"the process ended with status {process.returncode}, see {part.name}.log"
                break
            event = _event(line)
            if event is None:
                log.write(line)
            elif "finished" in event:
                return False
            elif "left_out" in event:
                outcome.left_out.append(event["left_out"])
            elif "begin" in event:
                at, patience = event["begin"], event["patience"] or part.patience
            elif "end" in event:
                outcome.items.append({"name": event.pop("end"), **event})
                _tell(outcome.items[-1], say)
                at = ""
    finally:
        end_tree(process)
    if at and time.monotonic() > deadline:
        outcome.left_out.append(at)
    elif at:
        outcome.items.append({"name": at, "ok": False, "note": why, "seconds": 0.0})
        _tell(outcome.items[-1], say)
    elif len(skip) == len(outcome.items):  # not one item: another child would do no better
        outcome.items.append({"name": part.name, "ok": False, "note": why, "seconds": 0.0})
        _tell(outcome.items[-1], say)
        return False
    return time.monotonic() < deadline


def child_env() -> dict[str, str]:
    """Scripts and tests import each other by plain names; what a child printed before it was ended must be there."""
    paths = [str(CHECKOUT / "scripts"), str(CHECKOUT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _event(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _tell(item: dict[str, Any], say: Callable[[str], None]) -> None:
    mark = {True: "ok  ", False: "FAIL", None: "    "}[item.get("ok")]
    say(f"{mark} {item['name']}  {item.get('note', '')}".rstrip())


def end_tree(process: subprocess.Popen[Any]) -> None:
    """End a process and all that it started."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.Error:
        family = []
    for member in family:
        try:
            member.kill()
        except psutil.Error:
            pass
    process.wait()
