"""Hardware figures: presets, JSON of strangers, the cache."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from hotcold.placement.hardware import (
    PRESETS,
    Hardware,
    cache_path,
    find_preset,
    from_json,
    load_cached,
    load_hardware,
    save_cached,
    save_hardware,
    to_json,
)
from hotcold.runtime.errors import HotcoldError

CPU_ONLY = Hardware("a machine", cpu_bandwidth=40e9, threads=4, ram=16 << 30)


def error(text: str | bytes) -> str:
    with pytest.raises(HotcoldError) as e:
        from_json(text, "h.json")
    assert "\n" not in str(e.value) and len(str(e.value)) < 600
    assert str(e.value).startswith("h.json: ")
    return str(e.value)


def test_presets_are_plausible() -> None:
    assert set(PRESETS) == {"rtx-3060-12g", "rtx-4070-ti", "rtx-4090", "rtx-2080-ti"}
    for hardware in PRESETS.values():
        rates = hardware.rates()
        assert hardware.has_gpu and hardware.gpu
        assert 0 < rates.gpu_read < rates.cpu_read and 0 < rates.gpu_rows < rates.cpu_rows
        assert hardware.vram < hardware.ram
        assert from_json(to_json(hardware), "x") == hardware


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("rtx-4090", "rtx-4090"), ("RTX 4090", "rtx-4090"), ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("RTX 3060 12GB", "rtx-3060-12g"), ("rtx3060", "rtx-3060-12g"), ("4070ti", "rtx-4070-ti"),
        ("2080 Ti", "rtx-2080-ti"),
    ],
)  # fmt: skip
def test_presets_by_any_spelling(text: str, name: str) -> None:
    assert find_preset(text) == PRESETS[name] == load_hardware(text)


@pytest.mark.parametrize("text", ["", "rtx", "4080", "rtx-4090-super", "no/such/file.json", "a\0b", "x" * 5000])
def test_unknown_hardware_lists_the_presets(text: str) -> None:
    assert find_preset(text) is None
    with pytest.raises(HotcoldError) as e:
        load_hardware(text)
    assert "\n" not in str(e.value) and len(str(e.value)) < 600
    if text in ("rtx", "4080"):
        assert "neither a file nor a preset, presets are rtx-3060-12g, rtx-4070-ti" in str(e.value)


def test_a_file_may_start_from_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "h.json"
    path.write_text('{"preset": "4090", "ram": 34359738368, "cpu_bandwidth": 90e9, "name": "mine"}')
    assert load_hardware(str(path)) == dataclasses.replace(PRESETS["rtx-4090"], ram=32 << 30, cpu_bandwidth=90e9,
                                                           name="mine")  # fmt: skip


def test_round_trip_through_a_file(tmp_path: Path) -> None:
    for hardware in (CPU_ONLY, *PRESETS.values()):
        save_hardware(tmp_path / "h.json", hardware)
        assert load_hardware(str(tmp_path / "h.json")) == hardware
    assert [p.name for p in tmp_path.iterdir()] == ["h.json"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cpu_bandwidth": -1}, "'cpu_bandwidth': found -1, allowed: a number from 1e+06"),
        ({"cpu_bandwidth": 0}, "'cpu_bandwidth': found 0"),
        ({"cpu_bandwidth": math.nan}, "'cpu_bandwidth': found nan"),
        ({"cpu_bandwidth": math.inf}, "'cpu_bandwidth': found inf"),
        ({"cpu_bandwidth": "fast"}, "'cpu_bandwidth': found 'fast'"),
        ({"cpu_bandwidth": None}, "'cpu_bandwidth': found None"),
        ({"cpu_bandwidth": True}, "'cpu_bandwidth': found True"),
        ({"cpu_bandwidth": [1]}, "'cpu_bandwidth': found [1]"),
        ({"cpu_bandwidth": 10**400}, "'cpu_bandwidth': found a number that is far too large"),
        ({"threads": 2.5}, "'threads': found 2.5, allowed: a whole number"),
        ({"threads": 0}, "'threads': found 0"),
        ({"ram": 1e10}, "'ram': found 10000000000.0, allowed: a whole number"),
        ({"t_sync": -1e-9}, "'t_sync': found -1e-09"),
        ({"t_sync": 2}, "'t_sync': found 2"),
        ({"gpu_efficiency": 0}, "'gpu_efficiency': found 0"),
        ({"vram": -1}, "'vram': found -1"),
        ({"name": ""}, "'name': found ''"),
        ({"name": "a\u001b[31m"}, "'name': found"),
        ({"name": "x" * 300}, "'name': found"),
        ({"gpu": "card"}, "has a 'gpu', so gpu_bandwidth, pcie and vram must be above 0"),
        ({"speed": 1}, "field 'speed' is unknown, allowed: preset, name, cpu_bandwidth"),
        ({"\u001b[2J": 1}, "is unknown"),
        ({"preset": "rtx-9090"}, "preset 'rtx-9090' is unknown, choose from rtx-3060-12g"),
        ({"preset": 4090}, "preset 4090 is unknown"),
        ({"preset": {}}, "preset {} is unknown"),
    ],
)
def test_bad_fields_are_named(change: dict, words: str) -> None:
    message = error(json.dumps({**dataclasses.asdict(CPU_ONLY), **change}))
    assert words in message and "\x1b" not in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON"), ("{", "not valid JSON"), ("{'name': 1}", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"), ("[" * 5000, "not valid JSON"), ("1", "found int"), ("null", "found"),
        ("[]", "found list, allowed: a JSON object"),
        ('{"name": "a", "name": "b"}', "a field is given twice"), ("{}", "field 'name' is missing"),
        ('{"name": "a", "threads": 1}', "field 'cpu_bandwidth' is missing"), (" " * 70000, "more than 64 KiB"),
        ('{"ram": ' + "9" * 6000 + "}", ""),
    ],
)  # fmt: skip
def test_malformed_json_is_one_line(text: str | bytes, words: str) -> None:
    assert words in error(text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(HotcoldError, match="not a regular file"):
        load_hardware(str(tmp_path))
    (tmp_path / "h.json").write_text("{")
    with pytest.raises(HotcoldError, match="h.json: not valid JSON"):
        load_hardware(str(tmp_path / "h.json"))


def test_cache(tmp_path: Path) -> None:
    path, again, other = (cache_path(("cpu", n, ("gpu",)), tmp_path / "new") for n in (4, 4, 5))
    assert path == again != other
    assert path.name.startswith("hardware-") and path.suffix == ".json"
    assert load_cached(path) is None
    assert save_cached(path, CPU_ONLY) and load_cached(path) == CPU_ONLY
    path.write_text("{}")
    assert load_cached(path) is None  # measured again, no error
    (tmp_path / "file").write_text("")
    assert not save_cached(tmp_path / "file" / "h.json", CPU_ONLY)


def test_without_a_gpu_the_rates_are_infinite() -> None:
    assert not CPU_ONLY.has_gpu and CPU_ONLY.rates().gpu_read == math.inf
