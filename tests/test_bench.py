"""`hotcold bench`: its formats parse, its numbers are consistent, and its bytes per token are counted by hand."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from numba.core import event
from small_models import Spec, write_model

from hotcold.runtime import bench
from hotcold.runtime.bench import Bench, Case, list_tests
from hotcold.runtime.engine import Engine
from hotcold.runtime.kernels import simd
from hotcold.runtime.op_costs import WAITING, cache_bytes, op_costs, op_name, token_bytes

FEW = ["-p", "9", "-n", "3", "-r", "2", "-t", "1", "--no-bandwidth"]

# What llama-bench writes and readers of its output ask for.
LLAMA_BENCH = {
    "build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_filename", "model_type", "model_size",
    "model_n_params", "n_batch", "n_ubatch", "n_threads", "type_k", "type_v", "n_gpu_layers", "n_prompt", "n_gen",
    "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "samples_ns", "samples_ts", "use_mmap",
}  # fmt: skip
OURS = {
    "gpu_plan", "vram", "gpu_skips",
    "sparsity", "share_checked", "share_computed", "bytes_share", "bytes_per_token", "bytes_per_s", "read_bandwidth",
    "bandwidth_share", "cpu_s", "tokens_per_cpu_s", "load_s", "peak_rss", "mlock", "load_average",
    "kernels",
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("bench") / "model.gguf", Spec())


@pytest.fixture
def run(run: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str, str]]:
    """Arguments of bench -> exit status, stdout, stderr."""
    return lambda *arguments: run("bench", *arguments)


Run = Callable[..., tuple[int, str, str]]


# ------------------------------------------------------------------ formats


def test_json_and_json_lines_hold_the_same_fields_and_they_fit_together(run: Run, small: Path) -> None:
    code, out, err = run(small, *FEW, "-o", "json")
    records = json.loads(out)
    assert code == 0 and "2 of 2 tests done" in err
    code, out, _ = run(small, *FEW, "-o", "jsonl")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and len(lines) == len(records) == 2
    for record in records + lines:
        assert record.keys() == LLAMA_BENCH | OURS
        n = record["n_prompt"] + record["n_gen"]
        ns, rates = np.array(record["samples_ns"]), np.array(record["samples_ts"])
        assert len(ns) == len(rates) == len(record["cpu_s"]) == 2
        np.testing.assert_allclose(rates, 1e9 * n / ns)
        np.testing.assert_allclose(record["avg_ts"], rates.mean())
        np.testing.assert_allclose(record["stddev_ts"], rates.std(ddof=1))
        np.testing.assert_allclose(record["avg_ns"], ns.mean(), atol=1)
        assert record["kernels"] == simd.ISA and record["peak_rss"] > 1 << 20
        assert record["load_s"] > 0 and record["n_threads"] == 1
        assert record["model_size"] > 0 and record["model_type"].startswith("llama ")
    prompt, gen = records
    assert (prompt["n_prompt"], prompt["n_gen"], gen["n_prompt"], gen["n_gen"]) == (9, 0, 0, 3)
    assert prompt["share_computed"] is None and prompt["bytes_per_s"] is None
    assert 0 < gen["share_computed"] < 1 and 0 < gen["bytes_share"] < 1 and gen["sparsity"] == "exact"
    np.testing.assert_allclose(gen["bytes_per_s"], gen["bytes_per_token"] * gen["avg_ts"])


def test_csv_has_one_heading_and_quoted_fields(run: Run, small: Path) -> None:
    code, out, _ = run(small, *FEW, "-o", "csv", "--sparsity", "exact,dense")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and [r["sparsity"] for r in rows] == ["exact", "exact", "dense", "dense"]
    assert rows[0].keys() == (LLAMA_BENCH | OURS) - {"samples_ns", "samples_ts", "cpu_s"}
    assert rows[0]["share_computed"] == "" and float(rows[1]["share_computed"]) < float(rows[3]["share_computed"]) == 1
    assert rows[0]["use_mmap"] == "1" and rows[0]["mlock"] == "0"


def test_the_table_begins_with_the_columns_of_llama_bench(run: Run, small: Path) -> None:
    code, out, _ = run(small, *FEW, "-d", "0,20", "-pg", "4,2")
    lines = out.splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert code == 0 and len({len(c) for c in cells}) == 1
    head = cells[0]
    assert head[:5] == ["model", "size", "params", "backend", "threads"]
    assert head.index("test") + 1 == head.index("t/s")
    tests = [c[head.index("test")] for c in cells[2:]]
    assert tests == ["pp9", "tg3", "pp4+tg2", "pp9 @ d20", "tg3 @ d20", "pp4+tg2 @ d20"]
    assert all("±" in c[head.index("t/s")] for c in cells[2:])
    assert lines[-1].startswith("build: hotcold ") and lines[-1].endswith(f", {simd.ISA} kernels")


def test_models_threads_and_modes_are_combined(run: Run, small: Path) -> None:
    code, out, _ = run(small, small, "-p", "0", "-n", "2", "-r", "1", "-t", "1,2", "--sparsity", "dense,auto",
                       "--kv-type", "f16,f32", "--no-bandwidth", "--no-mmap", "-o", "jsonl")  # fmt: skip
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and len(records) == 16
    seen = {(r["n_threads"], r["sparsity"], r["type_k"]) for r in records}
    assert len(seen) == 8 and all(not r["use_mmap"] for r in records)
    assert all(r["stddev_ts"] == 0 for r in records)


def test_bandwidth_is_measured_once_per_number_of_threads(run: Run, small: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    asked: list[int] = []

    class Fake:
        def __init__(self, cache: int) -> None:
            pass

        def measure(self, threads: int) -> float:
            asked.append(threads)
            return 1e9 * threads

    monkeypatch.setattr(bench, "ReadTest", Fake)
    _, out, _ = run(small, "-p", "0", "-n", "2,3", "-r", "1", "-t", "2,1,2", "-o", "jsonl")
    assert asked == [1, 2]
    for record in map(json.loads, out.splitlines()):
        assert record["read_bandwidth"] == 1e9 * record["n_threads"]
        np.testing.assert_allclose(record["bandwidth_share"], record["bytes_per_s"] / record["read_bandwidth"])


# ------------------------------------------------------------------ what is measured


def test_tests_go_depth_by_depth_and_empty_ones_are_left_out() -> None:
    tests = list_tests([0, 512], [128, 0], [(0, 0), (4, 2)], [0, 64])
    assert [t.name for t in tests] == [
        "pp512", "tg128", "pp4+tg2", "pp512 @ d64", "tg128 @ d64", "pp4+tg2 @ d64",
    ]  # fmt: skip


def test_depth_is_filled_once_and_every_run_starts_there(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.open(small, threads=1, n_ctx=64) as engine:
        seen: list[tuple[int, int]] = []
        forward = engine.forward

        def watched(tokens: Any, logits: str = "last") -> np.ndarray:
            seen.append((engine.n_past, len(tokens)))
            return forward(tokens, logits)

        monkeypatch.setattr(engine, "forward", watched)
        b = Bench(engine)
        assert len(b.run(Case(9, 0, 20), 2, True)) == 2
        assert seen == [(0, 20), (20, 9), (20, 9), (20, 9)]  # depth, warm-up, twice
        seen.clear()
        b.run(Case(0, 2, 20), 1, True)
        assert seen == [(20, 1), (20, 1), (21, 1)]
        assert engine.layer_stats().tokens == 2  # not the warm-up
        seen.clear()
        b.run(Case(6, 1, 0), 1, False)
        assert seen == [(0, 6), (6, 1)]


@pytest.mark.parametrize("spec", [
    Spec(), Spec(attn=Type.Q8_0, key=Type.Q4_0, value=Type.Q8_0, embd=Type.F16, head=Type.Q8_0, window=8),
    Spec(gated=False), Spec(layout="stock", activation="silu"), Spec(norm_relu=(True, False)),
], ids=["f32", "quantized", "not-gated", "stock", "norm-relu"])  # fmt: skip
def test_bytes_per_token_are_those_of_the_file(spec: Spec, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", spec)
    with Engine.open(path, threads=1, n_ctx=32, sparsity="dense") as engine:
        for token in range(5):
            engine.forward([token])
        contexts = np.array([10, 20])
        n_bytes = sum(i.n_bytes for n, i in engine.file.tensors.items() if "neuron" not in n and "rope" not in n)
        embedding = engine.file.tensors["token_embd.weight"].n_bytes
        row = embedding // spec.n_vocab
        tied = "output.weight" not in engine.file.tensors
        expected = n_bytes - (0 if tied else embedding) + row
        biases = sum(i.n_bytes for n, i in engine.file.tensors.items() if n.endswith(".bias"))
        seen = [min(c, spec.window) if spec.window else c for c in contexts]
        kv = 2 * 2 * spec.n_head_kv * spec.head_dim * float(np.mean(seen)) * spec.n_layer
        stats = engine.layer_stats()
        assert token_bytes(engine, stats, contexts) == expected - biases + kv
        assert cache_bytes(engine, 0, contexts) == kv / spec.n_layer


def test_exact_counts_what_it_read(small: Path) -> None:
    with Engine.open(small, threads=1, n_ctx=32) as engine:
        for token in range(8):
            engine.forward([token])
        stats = engine.layer_stats()
        saved = (stats.bytes_dense - stats.bytes_read).sum()
        dense = stats.__class__(8, stats.checked, stats.computed, stats.bytes_dense, stats.bytes_dense)
        one = np.array([1])
        assert 0 < saved == pytest.approx(token_bytes(engine, dense, one) - token_bytes(engine, stats, one))


# ------------------------------------------------------------------ operators


def test_operators_of_one_name_are_one_line_and_waiting_is_the_rest(small: Path) -> None:
    with Engine.open(small, threads=2, n_ctx=32) as engine:
        for token in range(4):
            engine.forward([token])
        contexts = np.array([1, 2, 3, 4])
        clocks = [(op, False, 4, np.array([100.0, 300.0])) for op in engine.plan.token]
        clocks += [(op, True, 0, np.zeros(2)) for op in engine.plan.block]  # did not run
        work = 200.0 * len(engine.plan.token)
        lines = op_costs(engine, clocks, 2 * work, contexts)
        names = [line.name for line in lines]
        assert len(set(names)) == len(names) and names[-1] == WAITING
        assert {"matmul attn_q", "matmul attn_output", "attend", "ffn", "matmul output", "norm"} <= set(names)
        assert sum(line.share for line in lines) == pytest.approx(1) and lines[-1].share == pytest.approx(0.5)
        assert all(a.ns >= b.ns for a, b in zip(lines[:-1], lines[1:-1], strict=False))
        by_name = {line.name: line for line in lines}
        assert by_name["ffn"].calls == 8 and by_name["ffn"].slowest_ns == 600
        # Whatever is read is on one line: all together it is what a token reads.
        read = sum((line.bytes_per_second or 0) * line.ns / 1e9 for line in lines)
        assert read == pytest.approx(4 * token_bytes(engine, engine.layer_stats(), contexts))


def test_operators_are_named_by_their_weights(small: Path) -> None:
    with Engine.open(small, threads=1, n_ctx=16) as engine:
        names = {op_name(op) for op in (*engine.plan.token, *engine.plan.block)}
    assert {"embed", "matmul attn_k", "rope", "matmul ffn_gate", "matmul ffn_up_down", "down ffn_up_down"} <= names


@pytest.mark.parametrize("threads", ["1", "2"])
def test_ops_adds_a_table_and_a_list(run: Run, small: Path, threads: str) -> None:
    options = ["-p", "9", "-n", "3", "-r", "1", "-t", threads, "--no-bandwidth", "--ops"]
    code, out, _ = run(small, *options)
    assert code == 0 and out.count("| operator ") == 2 and out.count("| waiting ") == 2 and "| attend " in out
    code, out, _ = run(small, *options, "-o", "jsonl")
    for record in map(json.loads, out.splitlines()):
        assert sum(op["share"] for op in record["ops"]) >= 0.999
        assert {"name", "calls", "ns", "slowest_ns", "share", "bytes_per_s"} == record["ops"][0].keys()
    assert any(op["name"] == "ffn" and op["calls"] == 6 for op in record["ops"])  # 3 tokens, 2 layers
    assert run(small, *options, "-o", "csv")[0] == 2


def test_what_was_counted_is_of_the_timed_runs(run: Run, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run for --ops counts anew: nothing is read after it."""
    order: list[str] = []

    def watch(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def watched(*arguments: Any) -> Any:
            result = original(*arguments)
            order.append(name)
            return result

        monkeypatch.setattr(owner, name, watched)

    for owner, name in ((Bench, "run"), (Bench, "ops"), (Engine, "layer_stats")):
        watch(owner, name)
    assert run(small, *FEW, "--ops")[0] == 0
    assert order.count("ops") == 2 and ("ops", "layer_stats") not in list(zip(order, order[1:], strict=False))


class _Compilations(event.Listener):
    """Names of what Numba compiles."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_start(self, event: Any) -> None:
        self.names.append(event.data["dispatcher"].py_func.__name__)

    def on_end(self, event: Any) -> None:
        pass


def test_work_and_waiting_of_one_thread_add_up_and_nothing_is_compiled_meanwhile(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.cycle_counter.cache_clear()
    test, heard = Case(200, 0, 0), _Compilations()
    with Engine.open(small, threads=1, n_ctx=256) as engine:
        b = Bench(engine)
        once = b._once

        def watched(case: Case) -> tuple[int, int]:
            assert heard.names  # the clock was compiled before
            heard.names.clear()
            return once(case)

        monkeypatch.setattr(b, "_once", watched)
        with event.install_listener("numba:compile", heard):
            lines = b.ops(test)
        assert heard.names == []
    work = sum(line.share for line in lines[:-1])
    assert lines[-1].name == WAITING and work + lines[-1].share == pytest.approx(1)
    assert 0.1 < work <= 1.001  # a compilation would take a hundred times as long as the work
    assert all(line.ns == line.slowest_ns for line in lines)


def test_a_clock_that_stands_still_gives_no_times(run: Run, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "cycle_counter", lambda: lambda: 0)
    code, out, err = run(small, *FEW, "--ops")
    assert code == 0 and "| operator " not in out and "build: " in out and "cannot read the clock" in err
    code, out, _ = run(small, *FEW, "--ops", "-o", "jsonl")
    assert code == 0 and all(json.loads(line)["ops"] == [] for line in out.splitlines())


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize("arguments, said", [
    (["-p", "0", "-n", "0"], "nothing to measure"),
    (["-p", "1,x"], "must be a whole number"),
    (["-t", "0"], "must be a whole number from 1"),
    (["-r", "0"], "must be a whole number from 1"),
    (["-pg", "3"], "must be two numbers"),
    (["--sparsity", "dense,some"], "'some' is unknown, choose from auto, dense, exact, predict"),
    (["--kv-type", "f64"], "'f64' is unknown, choose from"),
    (["-o", "sql"], "invalid choice"),
])  # fmt: skip
def test_wrong_usage_is_2(run: Run, small: Path, arguments: list[str], said: str) -> None:
    code, out, err = run(small, *arguments)
    assert code == 2 and out == "" and said in err.splitlines()[-1]


def test_errors_are_one_line_and_what_was_printed_stays_readable(run: Run, small: Path, tmp_path: Path) -> None:
    code, out, err = run(tmp_path / "missing.gguf", *FEW)
    assert code == 1 and out == "" and "missing.gguf: cannot be opened" in err
    code, _, err = run(small, "-t", "1000")
    assert code == 1 and "--threads 1000: allowed are 1 to" in err
    dense = write_model(tmp_path / "dense.gguf", Spec(layout="stock", activation="silu"))
    code, out, err = run(small, dense, *FEW, "--sparsity", "exact", "-o", "json")
    assert code == 1 and len(json.loads(out)) == 2 and "--sparsity exact" in err.splitlines()[-1]
    opt = write_model(tmp_path / "opt.gguf", Spec(arch="opt", gated=False, biases=True))
    code, out, err = run(opt, *[word for word in FEW if word != "--no-bandwidth"], "-d", "120")
    assert code == 1 and "test pp9 @ d120 needs 129 tokens of context, the model has positions for 128" in err
    assert "how fast RAM is read" not in err, "refused before anything is measured"
