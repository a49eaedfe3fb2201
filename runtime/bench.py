"""`hotcold bench MODEL…`: how fast models run, in the terms and fields of llama-bench.

In: models and lists of settings. Out: one Result per test, timed. Next: bench_report.py prints them; bandwidth.py is
what they are compared with.

As llama-bench does it: random token ids, one warm-up run, neither tokenizing nor sampling is timed; a prompt goes
through in one call, generated tokens one call each. Depth is filled before, untimed, and kept between repetitions.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
from numba import njit

from hotcold.runtime import bench_report
from hotcold.runtime.arguments import add_gpu_options, add_memory_options, count, counts, gpu_options, wholes
from hotcold.runtime.bandwidth import ReadTest, last_level_cache
from hotcold.runtime.buffers import KV_TYPES
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.console import note
from hotcold.runtime.engine import MAX_THREADS, Engine
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import open_gguf, safe_text
from hotcold.runtime.kernels.simd import read_cycles
from hotcold.runtime.op_costs import OpCost, op_costs, token_bytes
from hotcold.runtime.plan import SPARSITY_MODES
from hotcold.runtime.stats import HybridStats
from hotcold.runtime.threads import default_threads

if TYPE_CHECKING:
    from hotcold.runtime.gpu.choose import GpuOptions

_SEED = 0


@dataclass(frozen=True)
class Setting:
    """What a model is opened with."""

    model: Path
    sparsity: str
    kv_type: str
    threads: int


@dataclass(frozen=True)
class Case:
    """n_prompt tokens in one block, then n_gen one by one, after n_depth that are not timed."""

    n_prompt: int
    n_gen: int
    n_depth: int

    @property
    def n_tokens(self) -> int:
        return self.n_prompt + self.n_gen

    @property
    def name(self) -> str:
        """pp512, tg128, pp512+tg128 @ d4096"""
        parts = [f"pp{self.n_prompt}"] * (self.n_prompt > 0) + [f"tg{self.n_gen}"] * (self.n_gen > 0)
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")


@dataclass(frozen=True)
class Result:
    """A test's samples and what was measured beside them. None: not known of this test."""

    setting: Setting
    test: Case
    engine_sparsity: str  # what `auto` became
    model_type: str
    model_size: int  # bytes of tensors
    model_n_params: int
    n_batch: int
    samples_ns: list[int]
    samples_cpu_ns: list[int]
    share_checked: float | None  # neurons whose key row was read, in generated tokens
    share_computed: float | None  # neurons computed
    bytes_share: float | None  # FFN bytes read, as a share of dense
    bytes_per_token: float | None  # weights and KV cache, for generated tokens
    bandwidth: float | None  # bytes per second that as many threads read from RAM
    load_s: float
    peak_rss: int  # bytes, since this model was opened
    use_mmap: bool
    mlock: bool  # whether it is locked, not whether that was asked for
    load_average: float
    test_time: str
    ops: list[OpCost] = field(default_factory=list)
    hybrid: HybridStats | None = None  # None: the CPU alone
    gpu_plan: str = ""
    n_gpu_layers: int = 0

    def rates(self) -> np.ndarray:
        """f64: tokens per second of each sample."""
        return 1e9 * self.test.n_tokens / np.array(self.samples_ns, np.float64)

    @property
    def tokens_per_cpu_s(self) -> float | None:
        cpu = sum(self.samples_cpu_ns)
        return 1e9 * self.test.n_tokens * len(self.samples_cpu_ns) / cpu if cpu else None

    @property
    def bytes_per_second(self) -> float | None:
        return None if self.bytes_per_token is None else float(self.bytes_per_token * self.rates().mean())

    @property
    def bandwidth_share(self) -> float | None:
        rate = self.bytes_per_second
        return rate / self.bandwidth if rate is not None and self.bandwidth else None


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(parser=parser, place=None)
    parser.add_argument("models", metavar="MODEL", nargs="+", type=_path, help="GGUF file")
    tests = parser.add_argument_group("tests (lists are separated by commas; every combination is measured)")
    tests.add_argument("-p", "--n-prompt", metavar="N", type=wholes, default=[512],
                       help="tokens of prompt; 0: no such test (default 512)")
    tests.add_argument("-n", "--n-gen", metavar="N", type=wholes, default=[128],
                       help="tokens to generate; 0: no such test (default 128)")
    tests.add_argument("-pg", metavar="P,N", type=_pair, action="append", default=[],
                       help="a prompt of P tokens and N generated ones, timed together; may be repeated")
    tests.add_argument("-d", "--n-depth", metavar="N", type=wholes, default=[0],
                       help="tokens that are in the context before (default 0)")
    tests.add_argument("-r", "--repetitions", metavar="N", type=count, default=5, help="of each test (default 5)")
    tests.add_argument("--no-warmup", dest="warmup", action="store_false", help="time the first run too")
    model = parser.add_argument_group("model")
    model.add_argument("-t", "--threads", metavar="N", type=counts, help="default: what the machine gives this process")
    model.add_argument("--sparsity", metavar="MODE", type=_choices(SPARSITY_MODES), default=["auto"],
                       help=f"of {', '.join(SPARSITY_MODES)} (default auto)")
    model.add_argument("--kv-type", metavar="TYPE", type=_choices(tuple(KV_TYPES)), default=["f16"],
                       help=f"type of the KV cache, of {', '.join(KV_TYPES)} (default f16)")
    add_memory_options(model)
    add_gpu_options(parser.add_argument_group("GPU (default: off)"))
    output = parser.add_argument_group("output")
    output.add_argument("-o", "--output", choices=bench_report.FORMATS, default="md", help="default md")
    output.add_argument("--ops", action="store_true",
                        help="then run each test once more and say where its time goes, by kind of operator (not csv)")
    output.add_argument("--no-bandwidth", dest="bandwidth", action="store_false",
                        help="do not measure how fast RAM is read (1 to 3 seconds)")


def run(args: argparse.Namespace) -> int:
    if args.ops and args.output == "csv":
        args.parser.error("--ops: a table of operators does not fit into csv; choose -o md, json or jsonl")
    tests = list_tests(args.n_prompt, args.n_gen, args.pg, args.n_depth)
    if not tests:
        args.parser.error("nothing to measure: -p 0 and -n 0, and no -pg")
    threads = args.threads or [default_threads()]
    for n in threads:
        if n > MAX_THREADS:
            raise HotcoldError(f"--threads {n}: allowed are 1 to {MAX_THREADS}")
    for model in args.models:  # a missing model, a context that is too long: told before anything is measured
        _check_context(model, tests)
    writer = bench_report.writer(args.output, sys.stdout, args.ops)
    bandwidth = _bandwidths(threads) if args.bandwidth else {}
    settings = [Setting(*s) for s in itertools.product(args.models, args.sparsity, args.kv_type, threads)]
    done, total = 0, len(settings) * len(tests)
    with writer:
        for setting in settings:
            for result in measure_setting(setting, tests, args, bandwidth.get(setting.threads)):
                writer.add(result)
                done += 1
                note(f"{done} of {total} tests done")
    return 0


def list_tests(prompts: Sequence[int], gens: Sequence[int], pairs: Sequence[tuple[int, int]],
               depths: Sequence[int]) -> list[Case]:  # fmt: skip
    """Depth by depth: the prompts, the generations, the pairs. Tests of no token are left out."""
    kinds = [(p, 0) for p in prompts] + [(0, n) for n in gens] + list(pairs)
    return [Case(p, n, d) for d in depths for p, n in kinds if p + n > 0]


def _bandwidths(threads: Sequence[int]) -> dict[int, float]:
    """Before a model is opened: the buffer that is read would count as the model's memory."""
    note("measuring how fast RAM is read")
    test = ReadTest(last_level_cache())
    return {n: test.measure(n) for n in sorted(set(threads))}


# ---- measuring


def measure_setting(setting: Setting, tests: Sequence[Case], args: argparse.Namespace,
                    bandwidth: float | None) -> Iterator[Result]:  # fmt: skip
    """Open the model once and run all tests. Raises HotcoldError."""
    n_ctx = max(t.n_tokens + t.n_depth for t in tests)
    forget_peak_rss()
    began = time.perf_counter()
    with Engine.open(
        setting.model, sparsity=setting.sparsity, threads=setting.threads, n_ctx=n_ctx, kv_type=setting.kv_type,
        mmap=args.mmap, mlock=args.mlock, notify=note, gpu=_gpu(args),
    ) as engine:  # fmt: skip
        load_s = time.perf_counter() - began
        bench = Bench(engine)
        for test in tests:
            note(f"{safe_text(setting.model.name, 60)}, {setting.threads} threads, {engine.sparsity}: {test.name}")
            samples = bench.run(test, args.repetitions, args.warmup)
            counted = engine.layer_stats()  # before the run for --ops, which counts anew
            stats = counted if test.n_gen else None
            read = None
            if stats is not None and not test.n_prompt and stats.hybrid is None:  # of RAM: a GPU reads its own
                read = token_bytes(engine, stats, contexts(test))
            model_type, model_size, model_n_params = describe_model(engine)
            yield Result(
                setting=setting,
                test=test,
                engine_sparsity=engine.sparsity,
                model_type=model_type,
                model_size=model_size,
                model_n_params=model_n_params,
                n_batch=engine.n_batch,
                samples_ns=[wall for wall, _ in samples],
                samples_cpu_ns=[cpu for _, cpu in samples],
                share_checked=None if stats is None else float(stats.checked.mean()),
                share_computed=None if stats is None else float(stats.computed.mean()),
                bytes_share=None if stats is None else stats.bytes_share,
                bytes_per_token=read,
                bandwidth=bandwidth,
                load_s=load_s,
                peak_rss=peak_rss(),
                use_mmap=args.mmap,
                mlock=engine.file.locked,
                load_average=load_average(),
                test_time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                ops=bench.ops(test) if args.ops else [],
                hybrid=counted.hybrid,
                gpu_plan=engine.plan.placement.kind if engine.plan.placement else "",
                n_gpu_layers=engine.config.n_layer - engine.plan.placement.first if engine.plan.placement else 0,
            )


def _gpu(args: argparse.Namespace) -> GpuOptions | None:
    """None: the CPU alone, unless a GPU was asked for: figures must not depend on what else is in the machine."""
    options = gpu_options(args, args.place)
    return options if options.asked else None


def _check_context(model: Path, tests: Sequence[Case]) -> None:
    """Learned positions end; of others, speed does not depend on what the model was trained on."""
    with open_gguf(model) as file:
        config = ModelConfig.from_gguf(file)
    longest = max(tests, key=lambda t: t.n_tokens + t.n_depth)
    n_ctx = longest.n_tokens + longest.n_depth
    if config.rope is None and n_ctx > config.n_ctx_train:
        raise HotcoldError(f"{safe_text(str(model))}: test {longest.name} needs {n_ctx} tokens of context, the "
                           f"model has positions for {config.n_ctx_train}: use a smaller -p, -n or -d")  # fmt: skip


class Bench:
    """Runs tests on an open engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._rng = np.random.default_rng(_SEED)
        self._depth = 0  # tokens at the start of the context that _fill() put there

    def run(self, test: Case, repetitions: int, warmup: bool) -> list[tuple[int, int]]:
        """(wall, CPU) nanoseconds of each repetition. What was counted is of generated tokens of timed runs."""
        self._fill(test.n_depth)
        if warmup:
            self._once(Case(test.n_prompt, min(test.n_gen, 1), test.n_depth))
        self.engine.reset_stats()
        return [self._once(test) for _ in range(repetitions)]

    def ops(self, test: Case) -> list[OpCost]:
        """One more run with the clock of the operators on; nothing where the CPU has no such clock."""
        clock = cycle_counter()
        self._fill(test.n_depth)
        self.engine.reset_stats()
        self.engine.time_ops(True)
        try:
            began, ticks = time.perf_counter_ns(), clock()
            wall, _ = self._once(test)
            passed, ticks = time.perf_counter_ns() - began, clock() - ticks
            if ticks <= 0:
                note("--ops: nothing to show, programs cannot read the clock of this CPU")
                return []
            clocks = [(t.op, t.many, t.calls, t.cycles * (passed / ticks)) for t in self.engine.op_times()]
        finally:
            self.engine.time_ops(False)
        return op_costs(self.engine, clocks, wall, contexts(test))

    def _ids(self, n: int) -> np.ndarray:
        return self._rng.integers(0, self.engine.config.n_vocab, n)

    def _fill(self, depth: int) -> None:
        if depth != self._depth:
            self._depth = 0
            self.engine.truncate(0)
            if depth:
                self.engine.forward(self._ids(depth), logits="none")
            self._depth = depth

    def _once(self, test: Case) -> tuple[int, int]:
        engine = self.engine
        engine.truncate(test.n_depth)
        prompt, generated = self._ids(test.n_prompt), self._ids(test.n_gen).reshape(-1, 1)
        wall, cpu = time.perf_counter_ns(), time.process_time_ns()
        if len(prompt):
            engine.forward(prompt)
        for token in generated:
            engine.forward(token)
        return time.perf_counter_ns() - wall, time.process_time_ns() - cpu


@functools.cache
def cycle_counter() -> Callable[[], int]:
    """Reads the counter that operators are timed by. Compiled when asked for, so no reading of it takes that time."""
    read: Callable[[], int] = njit(lambda: read_cycles())
    read()
    return read


def contexts(test: Case) -> np.ndarray:
    """i64 [n_gen]: tokens that each generated one looks back at, itself included."""
    return test.n_depth + test.n_prompt + np.arange(1, test.n_gen + 1)


def describe_model(engine: Engine) -> tuple[str, int, int]:
    """-> "llama 135M Q8_0", bytes of its tensors, parameters."""
    sizes: dict[str, int] = {}
    n_bytes = n_params = 0
    for info in engine.file.tensors.values():
        kind = info.ggml_type.name
        n_bytes += info.n_bytes
        if not kind.startswith("I"):  # the table and counts of neurons are no parameters
            n_params += int(np.prod(info.shape, dtype=np.int64))
            sizes[kind] = sizes.get(kind, 0) + info.n_bytes
    unit, letter = (1e9, "B") if n_params >= 1e9 else (1e6, "M")
    label = f"{n_params / unit:.3g}{letter}"
    return f"{engine.config.arch} {label} {max(sizes, key=lambda k: sizes[k])}", n_bytes, n_params


def forget_peak_rss() -> None:
    """Let the system forget the most memory this process had, where it can."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass


def peak_rss(process: psutil.Process | None = None) -> int:
    """Bytes of RAM that a process, or this one, had at most; pages of a mapped file count when they are in RAM.

    Raises psutil.Error for one that has ended.
    """
    process = process or psutil.Process()
    try:
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return int(process.memory_info().rss)


def load_average() -> float:
    """Of the last minute: how many others wanted the CPUs."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return 0.0


# ---- what was typed


def _choices(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in allowed:
                shown = safe_text(repr(name), 40)
                raise argparse.ArgumentTypeError(f"{shown} is unknown, choose from {', '.join(allowed)}")
        return names

    return parse


def _pair(text: str) -> tuple[int, int]:
    values = wholes(text)
    if len(values) != 2:
        raise argparse.ArgumentTypeError(f"must be two numbers, for example 512,128, got {safe_text(repr(text), 40)}")
    return values[0], values[1]


def _path(text: str) -> Path:
    if not text:  # Path("") would be the current folder
        raise HotcoldError("no such file: ''")
    return Path(text)
