"""Kernel sources: signatures are read right or not at all, headers go in once, every file of the product is sound."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotcold.runtime.gpu.device import DeviceError
from hotcold.runtime.gpu.source import FOLDER, load_kernels, module_names, module_source, signatures


def parameters(source: str, kernel: str) -> list[tuple[str, bool, str]]:
    return [(p.name, p.pointer, str(p.dtype)) for p in signatures(source)[kernel].parameters]


def test_types() -> None:
    source = """
    // extern "C" __global__ void commented(out)
    extern "C" __global__ void __launch_bounds__(256, 2)
    all_of_them(const __half* __restrict__ w, volatile long long *flag, unsigned const* words, /* and, more */
                const signed char* q, unsigned char* bytes, float* x,
                int n, const float scale, long long seq, unsigned int* u) {
    }
    extern "C" __global__ void nothing() {}
    """
    assert list(signatures(source)) == ["all_of_them", "nothing"]
    assert parameters(source, "nothing") == []
    assert parameters(source, "all_of_them") == [
        ("w", True, "float16"), ("flag", True, "int64"), ("words", True, "uint32"), ("q", True, "int8"),
        ("bytes", True, "uint8"), ("x", True, "float32"), ("n", False, "int32"), ("scale", False, "float32"),
        ("seq", False, "int64"), ("u", True, "uint32"),
    ]  # fmt: skip


def test_kernels_in_macros() -> None:
    source = """
    #define OTHER(a) ((a) + 1)
    #define MATVEC(T, WEIGHT)                                       \\
        extern "C" __global__ void matvec_##T(const WEIGHT* w, int n) { \\
            body<T>(w, OTHER(n));                                   \\
        }
    MATVEC(f16, __half)
    MATVEC(q8_0, signed char)
    """
    assert parameters(source, "matvec_f16") == [("w", True, "float16"), ("n", False, "int32")]
    assert parameters(source, "matvec_q8_0")[0] == ("w", True, "int8")
    with pytest.raises(DeviceError, match="macro MATVEC: 1 arguments, it has 2"):
        signatures(source + "MATVEC(f16)\n")


@pytest.mark.parametrize("source, words", [
    ('extern "C" __global__ void k(double x) {}', "'double x': no such type"),
    ('extern "C" __global__ void k(unsigned n) {}', "no such type"),  # as a scalar
    ('extern "C" __global__ void k(float** x) {}', "no such type"),
    ('extern "C" __global__ void k(float x[4]) {}', "no such type"),
    ('extern "C" __global__ void k(float) {}', "no such type"),
    ('extern "C" __global__ void k(float& x) {}', "no such type"),
    ('extern "C" __global__ void k(void (*f)(int)) {}', "cannot read its parameters"),
    ('extern "C" __global__ void k(int n);', "cannot read its parameters"),
    ('extern "C" __global__ void k(int n) {}\nextern "C" __global__ void k(int n) {}', "defined twice"),
    ('__global__ void k(int n) {}', "must be written as"),
    ('template <class T> __global__ void k(int n) {}', "must be written as"),
])  # fmt: skip
def test_what_cannot_be_read_is_an_error(source: str, words: str) -> None:
    with pytest.raises(DeviceError, match=words.replace("(", r"\(")):
        signatures(source)


def test_headers_go_in_once(tmp_path: Path) -> None:
    (tmp_path / "a.cuh").write_text("#pragma once\nint a;\n")
    (tmp_path / "b.cuh").write_text('#include "a.cuh"\nint b;\n')
    (tmp_path / "k.cu").write_text('#include "a.cuh"\n#include "b.cuh"\nint k;\n')
    assert module_source("k", tmp_path).split("\n") == [
        '#line 1 "k.cu"', '#line 1 "a.cuh"', "", "int a;", "", '#line 2 "k.cu"',
        '#line 1 "b.cuh"', "", "int b;", "", '#line 3 "k.cu"', "int k;", "",
    ]  # fmt: skip
    (tmp_path / "k.cu").write_text('#include "../k.cuh"\n')
    with pytest.raises(DeviceError, match="no such file"):
        module_source("k", tmp_path)


def test_the_table_of_kernels(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.cu").write_text(f'extern "C" __global__ void {name}(int n) {{}}\n')

    class Device:
        def module(self, source: str):
            return lambda kernel: (kernel, source.count("__global__"))

    kernels = load_kernels(Device(), tmp_path)  # type: ignore[arg-type]
    assert kernels("one") == ("one", 1) and kernels("two") == ("two", 1)
    with pytest.raises(DeviceError, match="kernel three: no such kernel"):
        kernels("three")
    (tmp_path / "three.cu").write_text('extern "C" __global__ void one(int n) {}\n')
    with pytest.raises(DeviceError, match="kernel one: defined in two files"):
        load_kernels(Device(), tmp_path)  # type: ignore[arg-type]


def test_files_of_the_product() -> None:
    names = [kernel for module in module_names() for kernel in signatures(module_source(module))]
    assert len(names) == len(set(names))
    for path in FOLDER.iterdir():
        assert path.suffix in (".cu", ".cuh")
        text = path.read_text(encoding="ascii")
        assert max(map(len, text.splitlines())) <= 120 and "\t" not in text, path.name


def test_checks_of_values() -> None:
    scalar, pointer = signatures('extern "C" __global__ void k(int n, float* x) {}')["k"].parameters
    assert scalar.problem(np.int32(1)) == "" and pointer.problem(None) == ""
    assert "got bool" in scalar.problem(True) and "got int" in pointer.problem(1234)
