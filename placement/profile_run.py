"""Runs a profiling job to its end, or until it is stopped, and keeps what was counted.

In: a model's path, a Job, how many workers. Out: a Profile, and the file it is kept in meanwhile. Next: profiling.py,
the command.

One worker counts in this process. Several are processes of their own, each with its share of the contexts and a file
`OUT.worker-N`; whole contexts add up, so nothing depends on who counted which. A run that was killed leaves the last
of these files, written every minute; gather() brings them together.
"""

from __future__ import annotations

import glob
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

from hotcold.placement.counting import Counter, Job, source_positions
from hotcold.placement.profile import Profile, merge_profiles
from hotcold.placement.profile_file import State, read_profile, write_profile
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import safe_text
from hotcold.runtime.trace import Trace

EVERY = 60.0  # seconds between checkpoints, at least
SHARE = 20  # and at least so many times what writing the last one took
_POLL = 0.2  # seconds


class Stopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM came; what had been counted is kept where there is a file for it."""

    def __init__(self, signum: int = signal.SIGINT, kept: int = 0) -> None:
        super().__init__()
        self.signum, self.kept = signum, kept  # kept: tokens in the file


class StopSignals:
    """While it is open, the first Ctrl-C, SIGTERM or SIGHUP is only remembered; the second acts as ever."""

    def __init__(self) -> None:
        self._came = 0
        self._before: dict[int, Any] = {}

    def check(self) -> None:
        if self._came:
            raise Stopped(self._came)

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # a closed terminal; nohup ignores it
                number = getattr(signal, name, None)
                if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._remember)
        return self

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self._came = signum
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __exit__(self, *exc: object) -> None:
        self._restore()


@dataclass
class Keeper:
    """The file of a run, with what is counted so far."""

    path: Path
    state: State
    force: bool  # the first time; after that the file is ours
    _last: float = field(default_factory=time.monotonic)
    _took: float = 0.0

    def save(self, profile: Profile, complete: bool) -> None:
        began = time.monotonic()
        write_profile(self.path, profile, replace(self.state, complete=complete), self.force)
        self.force = True
        self._last = time.monotonic()
        self._took = self._last - began

    def due(self) -> bool:
        return time.monotonic() - self._last > max(EVERY, SHARE * self._took)


@dataclass(frozen=True)
class Run:
    """A job, on what, and with whom it talks."""

    model: Path
    job: Job
    threads: int | None
    workers: int
    notify: Callable[[str], None]
    tell: Callable[[int], None]  # gets the tokens counted since the last call


def execute(run: Run, base: Profile | None, keeper: Keeper | None, scratch: Path) -> Profile:
    """Count what `base` lacks. Raises Stopped, after keeping what there is. scratch: where worker files go."""
    with StopSignals() as signals:
        if run.workers == 1:
            return _count_here(run, base, keeper, signals.check)
        return _count_with_workers(run, base, keeper, scratch, signals)


def _count_here(run: Run, base: Profile | None, keeper: Keeper | None, check: Callable[[], None]) -> Profile:
    with Trace.open(run.model, threads=run.threads, n_ctx=run.job.contexts.n_ctx, notify=run.notify) as trace:
        counter = Counter(run.job, trace.config, source_positions(trace.engine.file, trace.config), base)
        try:
            for k in counter.left:
                run.tell(counter.read(trace, k, check))
                if keeper is not None and keeper.due():
                    keeper.save(counter.profile(), complete=False)
        except (Stopped, HotcoldError) as e:
            if keeper is not None and counter.done:
                keeper.save(counter.profile(), complete=False)
                if isinstance(e, Stopped):
                    e.kept = counter.n_tokens
            raise
        profile = counter.profile()
        if counter.clipped:
            run.notify(f"{counter.clipped} numbers of the sampled inputs were too large for F16: set to +-65504")
    if keeper is not None:
        keeper.save(profile, complete=True)
    return profile


# ------------------------------------------------------------------ several processes


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    path: Path
    ended: bool = False
    error: str = ""


def worker_files(out: Path) -> list[Path]:
    """Files that workers of a run with this output keep, or left behind."""
    return sorted(Path(p) for p in glob.glob(f"{glob.escape(str(out))}.worker-*") if p.rpartition("-")[2].isdigit())


def gather(base: Profile | None, files: Sequence[Path]) -> Profile | None:
    """base and the profiles in these files; one that base has already is left out."""
    for path in files:
        found = read_profile(path)[0]
        have = set() if base is None else set(base.parts[0].contexts.tolist())
        if found.parts and not set(found.parts[0].contexts.tolist()) <= have:
            base = found if base is None else merge_profiles([base, found])
    return base


def _count_with_workers(run: Run, base: Profile | None, keeper: Keeper | None, scratch: Path,
                        signals: StopSignals) -> Profile:
    have = set() if base is None else set(base.parts[0].contexts.tolist())
    left = [k for k in run.job.wanted if k not in have]
    shares = [left[i :: run.workers] for i in range(min(run.workers, len(left)))]
    workers: list[_Worker] = []
    stopped: Stopped | None = None
    told: set[str] = set()

    def once(line: str) -> None:
        if line not in told:
            told.add(line)
            run.notify(line)

    try:
        for i in range(len(shares)):
            signals.check()
            workers.append(_start(run, scratch.with_name(f"{scratch.name}.worker-{i + 1}")))
        for w, share in zip(workers, shares, strict=True):
            signals.check()
            with suppress(OSError):  # it died: _listen() finds out
                w.pipe.send(replace(run.job, wanted=tuple(share)))
        _listen(workers, replace(run, notify=once), signals)
    except Stopped as e:
        stopped = e
        _end(workers)
    finally:
        for w in workers:
            if not w.ended:  # a second Ctrl-C, or an error of ours
                w.process.terminate()
            w.process.join()
            w.pipe.close()
    files = [w.path for w in workers if w.path.exists()]
    profile = gather(base, files)
    error = next((w.error for w in workers if w.error), "")
    complete = not error and stopped is None
    if keeper is not None and profile is not None:
        keeper.save(profile, complete)
    for path in files:
        path.unlink()
    if stopped is not None:
        stopped.kept = profile.n_tokens if keeper is not None and profile is not None else 0
        raise stopped
    if error or profile is None:
        raise HotcoldError(error or "there was nothing to count")
    return profile


def _start(run: Run, path: Path) -> _Worker:
    """A process that waits for its Job. What start() itself sends is small: it would hang with more, were the child
    to die before it reads."""
    context = multiprocessing.get_context("spawn")  # fork would copy threads that are not there afterwards
    ours, theirs = context.Pipe()
    # A daemon: it does not outlive us.
    process = context.Process(target=_work, args=(theirs, run.model, run.threads, path), daemon=True)
    resource_tracker.ensure_running()  # start() would, and would end the blocking of signals
    # The terminal sends Ctrl-C to all: a child begins with it blocked, until it can ignore it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    except OSError as e:
        ours.close()
        raise HotcoldError(f"a worker cannot be started: {e.strerror or e}: use fewer --workers") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    return _Worker(process, ours, path)


def _listen(workers: list[_Worker], run: Run, signals: StopSignals) -> None:
    """Until all have ended; where one fails, the others are told to stop."""
    while not all(w.ended for w in workers):
        signals.check()
        for pipe in wait([w.pipe for w in workers if not w.ended], _POLL):
            w = next(w for w in workers if w.pipe is pipe)
            _hear(w, run.tell, run.notify)
        if any(w.error for w in workers):
            _end(workers)


def _hear(w: _Worker, tell: Callable[[int], None], notify: Callable[[str], None]) -> None:
    try:
        kind, value = w.pipe.recv()
    except (EOFError, OSError):
        w.process.join()
        w.ended = True
        w.error = (f"a worker died (exit status {w.process.exitcode}): perhaps memory ran out; use fewer --workers, "
                   "and --resume to go on")  # fmt: skip
        return
    if kind == "tokens":
        tell(value)
    elif kind == "note":
        notify(value)
    else:
        w.ended = True
        w.error = value or ""


def _end(workers: list[_Worker]) -> None:
    """Tell the workers to stop, and wait until they have kept what they counted."""
    for w in workers:
        with suppress(OSError):
            w.pipe.send("stop")
    for w in workers:
        while not w.ended:
            _hear(w, lambda n: None, lambda line: None)


def _work(pipe: Connection, model: Path, threads: int | None, path: Path) -> None:
    """A worker process: counts, and stops when it is told to or when nobody listens any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ours comes through the pipe
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def check() -> None:
        if pipe.poll():  # a message, or the end of the other process
            raise Stopped

    def tell(n: int) -> None:
        with suppress(OSError):
            pipe.send(("tokens", n))

    def note(line: str) -> None:
        with suppress(OSError):
            pipe.send(("note", line))

    message: tuple[str, Any] = ("done", None)
    try:
        job = pipe.recv()
        if isinstance(job, Job):  # not "stop"
            check()
            keeper = Keeper(path, State(wanted=len(job.wanted), shard=job.shard), force=True)
            _count_here(Run(model, job, threads, 1, note, tell), None, keeper, check)
    except (Stopped, EOFError, ConnectionError):
        pass
    except (HotcoldError, MemoryError) as e:
        message = ("error", str(e) or "not enough memory")
    with suppress(OSError):
        pipe.send(message)
        pipe.close()


def refuse_other_job(path: Path, profile: Profile, state: State, job: Job) -> None:
    """Raise HotcoldError, saying what differs, unless an unfinished file is of this job."""
    if len(profile.parts) != 1:
        raise HotcoldError(f"{safe_text(str(path))}: is not an unfinished run over one text: choose another -o")
    part, now = profile.parts[0], job.part(())
    for what, before, wanted in (
        ("model", profile.model, job.model),
        ("text", part.sha256, now.sha256),
        ("--ctx", part.n_ctx, now.n_ctx),
        ("--tokens (contexts)", part.total, now.total),
        ("--samples", part.samples, now.samples),
        ("--shard", f"{state.shard[0] + 1}/{state.shard[1]}", f"{job.shard[0] + 1}/{job.shard[1]}"),
    ):
        if before != wanted:
            raise HotcoldError(
                f"{safe_text(str(path))}: was begun with another {what} ({safe_text(str(before), 16)}, now "
                f"{safe_text(str(wanted), 16)}): --resume needs the same; --force begins again"
            )
    strangers = sorted(set(part.contexts.tolist()) - set(job.wanted))
    if strangers:
        raise HotcoldError(f"{safe_text(str(path))}: holds context {strangers[0]}, which is not of this shard")
