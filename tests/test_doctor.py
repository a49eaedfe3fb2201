"""`hotcold doctor`: what it finds, measures and prints; a GPU is played by NumPy."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import pytest
from cuda_on_cpu.build import compiler
from cuda_on_cpu.sim_device import SimDevice
from gguf import GGMLQuantizationType as Type
from small_models import Spec, make_tensors, write_model

from hotcold.placement import doctor, machine, measure_gpu
from hotcold.placement.doctor import would_do
from hotcold.placement.hardware import Hardware, from_json
from hotcold.placement.identity import model_id
from hotcold.placement.machine import Machine, machine_hardware, measure, memory_limit
from hotcold.placement.memory import model_bytes
from hotcold.runtime import bandwidth, schema
from hotcold.runtime.bandwidth import last_level_cache
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import GGUFError, HotcoldError
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.gpu.device import DeviceError

MACHINE = Machine(cpu="a CPU", features=("avx2",), kernels="avx2", missing=(), logical=4, cores=2, allowed=4,
                  cgroup=math.inf, threads=2, cache=1 << 20, ram=8 << 30, gpus=(),
                  gpu_reason="CuPy is not installed")  # fmt: skip


def quick(monkeypatch: pytest.MonkeyPatch, cache: Path) -> list[int]:
    """No real measuring, no cache of the user; returns a list that grows with each measurement."""
    calls: list[int] = []

    def measured(threads: int, *_: object) -> tuple[float, float]:
        calls.append(threads)
        return 10e9, 20e9

    monkeypatch.setattr(machine, "measure_cpu", measured)
    monkeypatch.setattr(machine, "busy", lambda _: "")
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda *_: str(cache))
    return calls


def call(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return doctor.run(parser.parse_args(list(arguments)))


def counted_model(path: Path, share: float = 0.25, thresholds: tuple[float, ...] = (), **changes: Any) -> Path:
    metadata = {schema.KEY_PROFILE_TOKENS: 1000, schema.KEY_PROFILE_CORPUS: "a text"}
    spec = Spec(metadata=metadata | ({schema.KEY_THRESHOLD: list(thresholds)} if thresholds else {}), **changes)
    tensors = make_tensors(spec)
    for layer in range(spec.n_layer):
        counts = np.full(96, round(1000 * share), np.int64)
        tensors[schema.block(layer, schema.FFN_NEURON_COUNT)] = (Type.I64, counts)
    return write_model(path, spec, tensors)


def test_measures_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "_LEAST_BUFFER", 4 << 20)
    monkeypatch.setattr(bandwidth, "_MOST_BUFFER", 4 << 20)
    said: list[str] = []
    one, both = machine.measure_cpu(2, 0, said.append)
    assert 1e7 < one < 1e13 and one <= both < 1e13
    assert said == ["reading RAM with one thread", "reading RAM with 2 threads"]


def test_last_level_cache(tmp_path: Path) -> None:
    for index, text in enumerate(("32K\n", "1024K", "32M", "rubbish", "")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(text)
    assert last_level_cache(tmp_path) == 32 << 20
    assert last_level_cache(tmp_path / "nothing") == 0


def test_memory_limit(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    assert memory_limit(tmp_path, own) >= 1 << 60
    own.write_text("0::/a/b\n3:memory,cpu:/m\n5:cpu:/x\nrubbish\n0::/../../etc\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "memory.max").write_text("max\n")
    assert memory_limit(tmp_path, own) >= 1 << 60
    (tmp_path / "a" / "memory.max").write_text("5000000\n")
    assert memory_limit(tmp_path, own) == 5000000
    (tmp_path / "memory" / "m").mkdir(parents=True)
    (tmp_path / "memory" / "m" / "memory.limit_in_bytes").write_text("4000000")
    assert memory_limit(tmp_path, own) == 4000000


@pytest.mark.skipif(not compiler()[0], reason="no C++ compiler")
def test_a_gpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    device, said = SimDevice(memory=5 << 20), []  # type: ignore[var-annotated]
    monkeypatch.setattr(machine, "measure_cpu", lambda *_: (10e9, 20e9))
    monkeypatch.setattr(machine, "busy", lambda _: "")
    monkeypatch.setattr(machine, "open_device", lambda: device)
    hardware, problem = measure(replace(MACHINE, gpus=("a name",)), said.append)
    assert problem == "" and hardware.gpu == device.name and hardware.vram == 5 << 20
    assert 1e6 < hardware.gpu_bandwidth < 1e12 and 1e6 < hardware.pcie < 1e12
    assert 0 < hardware.t_sync < 1 and 0 < hardware.gpu_overhead < 1 and hardware.gpu_context == device.context_bytes
    assert said[-3:] == ["reading VRAM", "copying over PCIe", "waiting for the GPU"]
    assert device.launches["read_memory"] == 24 and device.launches["echo"] == 1 and device.counts["h2d"] == 12


def test_a_kernel_that_never_answers_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_gpu, "_PATIENCE", 0.05)
    device = SimDevice()
    with pytest.raises(DeviceError, match="simulated: a kernel did not see the CPU's flag"):
        measure_gpu._round_trip(device, lambda *_, **__: None, device.stream())


def test_a_gpu_that_fails_is_no_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quick(monkeypatch, tmp_path)
    with_card = replace(MACHINE, gpus=("Card",))

    def broken() -> None:
        raise RuntimeError("cudaErrorUnknown:\nsecond line \x1b[31m")

    monkeypatch.setattr(machine, "open_device", broken)
    hardware, problem = measure(with_card)
    assert not hardware.has_gpu
    assert "Card could not be measured: RuntimeError: cudaErrorUnknown: second line" in problem
    assert "\x1b" not in problem
    machine_hardware(machine=with_card, folder=tmp_path)
    assert not list(tmp_path.iterdir())  # such figures are not kept


def test_figures_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = quick(monkeypatch, tmp_path)
    first = machine_hardware(machine=MACHINE, folder=tmp_path)
    assert machine_hardware(machine=MACHINE, folder=tmp_path) == first and len(calls) == 1
    machine_hardware(refresh=True, machine=MACHINE, folder=tmp_path)
    assert len(calls) == 2
    machine_hardware(machine=replace(MACHINE, threads=1), folder=tmp_path)
    assert len(calls) == 3


def test_a_busy_machine_is_said_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    busy = machine.busy
    quick(monkeypatch, tmp_path)
    monkeypatch.setattr(machine, "busy", busy)
    monkeypatch.setattr(doctor, "describe_machine", lambda: MACHINE)
    monkeypatch.setattr("os.getloadavg", lambda: (3.5, 0.0, 0.0))
    call()
    assert "other programs kept the CPUs busy (load 3.5 on 4 CPUs)" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 9.0, 9.0))
    call()
    assert "busy" not in capsys.readouterr().out and list(tmp_path.iterdir())


def test_prints_plain_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    quick(monkeypatch, tmp_path)
    monkeypatch.setattr(doctor, "describe_machine", lambda: MACHINE)
    assert call() == 0
    out, err = capsys.readouterr()
    assert err == "" and "\x1b" not in out and all(line == line.rstrip() for line in out.splitlines())
    assert "10.0 GB/s by one thread, 20.0 GB/s by all" in out
    assert "no GPU (CuPy is not installed): everything is computed on the CPU, 2 threads" in out
    assert "measured now" in out
    call()
    assert "measured before (--refresh measures again)" in capsys.readouterr().out


def test_json_has_a_hardware_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    quick(monkeypatch, tmp_path)
    assert call("--json", "--refresh") == 0
    data = json.loads(capsys.readouterr().out)
    hardware = from_json(json.dumps(data["hardware"]), "x")
    assert isinstance(hardware, Hardware) and hardware.cpu_bandwidth == 20e9
    assert data["machine"]["threads"] >= 1 and data["would_do"]


def test_bytes_of_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    quick(monkeypatch, tmp_path)
    path = counted_model(tmp_path / "m.gguf", share=0.25)
    with open_gguf(path) as file:
        reads = doctor.model_reads(file, ModelConfig.from_gguf(file))
        skipped = (schema.FFN_NEURON_ID, schema.FFN_NEURON_COUNT)
        dense = sum(t.n_bytes for name, t in file.tensors.items() if not name.endswith(skipped))
    values = 2 * 2 * 96 * 64 * 4  # layers, up and down, neurons, width, F32
    assert reads.dense == dense and reads.exact == dense - values * 3 // 4
    assert call(str(path)) == 0
    out = capsys.readouterr().out
    assert f"at most {20e9 / dense:.1f} tokens/s" in out and "m.gguf: exact mode" in out
    assert call("--json", str(path)) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert model["exact"] == reads.exact and model["exact_tokens_per_second"] == pytest.approx(20e9 / reads.exact)


def test_models_that_cannot_be_exact(tmp_path: Path) -> None:
    for spec, words in (
        (Spec(), "hotcold profile counts"),
        (Spec(layout="stock", activation="relu"), "hotcold convert makes"),
        (Spec(activation="silu"), "hotcold relufy makes"),
    ):
        with open_gguf(write_model(tmp_path / "m.gguf", spec)) as file:
            reads = doctor.model_reads(file, ModelConfig.from_gguf(file))
        assert reads.exact is None and words in reads.why
        assert words in " ".join(would_do(MACHINE, reads))


def test_models_with_thresholds_run_exact(tmp_path: Path) -> None:
    """Key and up rows are read to know the values; layers without threshold compute all."""
    path = counted_model(tmp_path / "m.gguf", share=0.25, activation="silu", thresholds=(0.1, 0.0))
    with open_gguf(path) as file:
        reads = doctor.model_reads(file, ModelConfig.from_gguf(file))
    down = 96 * 64 * 4  # bytes of a layer's down rows
    assert reads.mode == "exact" and reads.exact == reads.dense - down * 3 // 4
    assert would_do(MACHINE, reads)[1].endswith("m.gguf: exact mode")


def test_types_that_are_not_computed(tmp_path: Path) -> None:
    spec = Spec(layout="stock")
    tensors = make_tensors(spec)
    tensors["blk.0.attn_q.weight"] = (Type.F64, tensors["blk.0.attn_q.weight"][1].astype(np.float64))
    with open_gguf(write_model(tmp_path / "m.gguf", spec, tensors)) as file:
        reads = doctor.model_reads(file, ModelConfig.from_gguf(file))
    assert reads.exact is None and "does not run this file" in would_do(MACHINE, reads)[1]
    assert "hotcold convert" in would_do(MACHINE, reads)[1]


@pytest.mark.parametrize("name", ["blk.x.ffn_up_down.weight", "blk.7", "blk.", "blk.0."])
def test_tensor_names_that_are_none(name: str, tmp_path: Path) -> None:
    spec = Spec()
    tensors = make_tensors(spec) | {name: (Type.F32, np.zeros(4, np.float32))}
    with open_gguf(write_model(tmp_path / "m.gguf", spec, tensors)) as file:
        config = ModelConfig.from_gguf(file)
        for read in (doctor.model_reads, model_id, lambda f, c: model_bytes(f, c, 64)):
            with pytest.raises(GGUFError, match="is not part of architecture"):
                read(file, config)


def test_says_what_stands_in_the_way() -> None:
    lacking = replace(MACHINE, missing=("avx2", "fma"))
    assert would_do(lacking, None) == ["this CPU lacks avx2, fma, which the kernels need: hotcold does not run here"]
    reads = doctor.ModelReads("m.gguf", "relu", "neuron-split", 9 << 30, 5 << 30, "", 9 << 30, "exact")
    assert "the file (9.0 GiB) is larger than RAM (8.0 GiB)" in would_do(MACHINE, reads)[-1]
    gpu = replace(MACHINE, gpus=("Card",))
    assert would_do(gpu, None)[0].startswith("Card: hotcold place plans")


def test_a_wrong_model_is_told_before_measuring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = quick(monkeypatch, tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    for name in ("none.gguf", "x.gguf", "."):
        with pytest.raises(HotcoldError) as e:
            call(str(tmp_path / name))
        assert "\n" not in str(e.value)
    assert not calls
