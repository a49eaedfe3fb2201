"""The kernels' sources, and what their signatures say.

In: cuda/*.cu and *.cuh. Out: one source per .cu file, its kernels' signatures, the check of a launch that all devices
share, and load_kernels(), the table of all kernels on a device. Next: nvrtc.py, cupy_device.py.

A signature is read from the text, strictly: what cannot be read is an error, not a guess. Kernels may be written in a
macro (one #define with `extern "C" __global__` in it, used at the beginning of a line with plain words); nothing else
is expanded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.runtime.gpu.device import Device, DeviceError, Dim, Kernel

FOLDER = Path(__file__).parent / "cuda"
MAX_THREADS, MAX_SHARED = 1024, 48 << 10  # of a block, on every card without asking for more

_SCALARS: dict[str, type[np.generic]] = {"int": np.int32, "float": np.float32, "long long": np.int64}
_POINTEES: dict[str, type[np.generic]] = {
    "__half": np.float16, "float": np.float32, "int": np.int32, "unsigned": np.uint32, "unsigned int": np.uint32,
    "signed char": np.int8, "unsigned char": np.uint8, "long long": np.int64,
}  # fmt: skip
_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\(([^()]*)\)\s*)?([^\s(]+)\s*\(')
_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*")', re.S)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[^\n]*$', re.M)
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)\(([\w\s,]*)\)((?:\\\n|[^\n])*)$", re.M)


@dataclass(frozen=True)
class Parameter:
    name: str
    pointer: bool
    dtype: np.dtype[Any]  # of the scalar, or of what the pointer points to

    def problem(self, value: Any) -> str:
        """Why `value` cannot be passed; "" if it can."""
        if not self.pointer:
            return "" if type(value) is self.dtype.type else f"wants np.{self.dtype}, got {type(value).__name__}"
        if value is None:
            return ""
        if isinstance(value, np.ndarray) or not hasattr(value, "dtype") or not hasattr(value, "flags"):
            return f"wants a device array, got {type(value).__name__}"
        if value.dtype != self.dtype:
            return f"wants an array of {self.dtype}, got {value.dtype}"
        return "" if value.flags.c_contiguous else "wants a C-contiguous array"


@dataclass(frozen=True)
class Signature:
    name: str
    parameters: tuple[Parameter, ...]

    def check(self, grid: Dim, block: Dim, args: Sequence[Any], shared_mem: int) -> bool:
        """Raise DeviceError where a launch is wrong; -> whether there is anything to launch."""
        if len(args) != len(self.parameters):
            raise DeviceError(f"kernel {self.name}: {len(args)} arguments, it has {len(self.parameters)}")
        for parameter, value in zip(self.parameters, args, strict=True):
            if problem := parameter.problem(value):
                raise DeviceError(f"kernel {self.name}: argument {parameter.name} {problem}")
        if not 1 <= len(grid) <= 3 or not 1 <= len(block) <= 3:
            raise DeviceError(f"kernel {self.name}: grid {grid} and block {block} must have 1 to 3 numbers")
        threads = int(np.prod(block))
        if min(block) < 1 or threads > MAX_THREADS or not 0 <= shared_mem <= MAX_SHARED:
            raise DeviceError(
                f"kernel {self.name}: block {block} with {shared_mem} bytes of shared memory, at most {MAX_THREADS} "
                f"threads and {MAX_SHARED} bytes are allowed"
            )
        if max(grid[1:], default=0) > 65535 or grid[0] >= 1 << 31:
            raise DeviceError(f"kernel {self.name}: grid {grid}, at most (2147483647, 65535, 65535) is allowed")
        return min(grid) > 0


# ------------------------------------------------------------------ text -> signatures


@cache
def signatures(source: str) -> Mapping[str, Signature]:
    """The kernels of a source in the order of their text."""
    text = _expanded(_COMMENT.sub(lambda m: m[1] or " ", source))
    found: dict[str, Signature] = {}
    for match in _KERNEL.finditer(text):
        name = match[2]
        if not re.fullmatch(r"[a-z]\w*", name):
            raise DeviceError(f"kernel {name}: not a kernel's name")
        if name in found:
            raise DeviceError(f"kernel {name}: defined twice")
        inside, _, rest = text[match.end() :].partition(")")
        if "(" in inside or not rest.lstrip().startswith("{"):
            raise DeviceError(f"kernel {name}: cannot read its parameters: no parentheses in them, then a body")
        words = [p for p in (" ".join(p.split()) for p in inside.split(",")) if p]
        found[name] = Signature(name, tuple(_parameter(name, p) for p in words))
    if text.count("__global__") != len(found):
        raise DeviceError('kernels: every __global__ function must be written as extern "C" __global__ void name(…)')
    return found


def _parameter(kernel: str, text: str) -> Parameter:
    """`const __half* __restrict__ w` -> Parameter"""
    words = re.findall(r"\w+|\S", text)
    kind, name = [w for w in words[:-1] if w not in ("const", "volatile", "*", "__restrict__")], words[-1]
    star = words.count("*")
    table = _POINTEES if star else _SCALARS
    if star > 1 or " ".join(kind) not in table or not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise DeviceError(f"kernel {kernel}: parameter {text!r}: no such type is passed to kernels")
    return Parameter(name, bool(star), np.dtype(table[" ".join(kind)]))


def _expanded(text: str) -> str:
    """The text with macros that hold kernels replaced by what they make."""
    macros: dict[str, tuple[list[str], str]] = {}

    def take(match: re.Match[str]) -> str:
        if "__global__" not in match[3]:
            return match[0]
        macros[match[1]] = ([p.strip() for p in match[2].split(",")], match[3].replace("\\\n", " "))
        return ""

    def use(match: re.Match[str]) -> str:
        names, body = macros[match[1]]
        values = [v.strip() for v in match[2].split(",")]
        if len(values) != len(names):
            raise DeviceError(f"macro {match[1]}: {len(values)} arguments, it has {len(names)}")
        body = re.sub(r"\b(\w+)\b", lambda m: values[names.index(m[1])] if m[1] in names else m[1], body)
        return re.sub(r"\s*##\s*", "", body)

    text = _DEFINE.sub(take, text)
    if not macros:
        return text
    return re.sub(rf"^[ \t]*({'|'.join(macros)})\s*\(([\w\s,]*)\)", use, text, flags=re.M)


# ------------------------------------------------------------------ files -> sources


def module_names(folder: Path = FOLDER) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.cu"))


def module_source(name: str, folder: Path = FOLDER) -> str:
    """The text of name.cu with its headers in it; compilers then name the file and line of a mistake."""
    seen: set[str] = set()

    def read(file: str, indent: str) -> str:
        path = folder / file
        if path.parent != folder or not path.is_file():
            raise DeviceError(f"kernels: {indent}{file}: no such file")

        def include(match: re.Match[str]) -> str:
            if match[1] in seen:
                return ""
            seen.add(match[1])
            line = text[: match.start()].count("\n") + 2
            return f'{read(match[1], f"{file}: ")}\n#line {line} "{file}"'

        text = path.read_text(encoding="utf-8").replace("#pragma once", "")  # compilers complain: no header is left
        return f'#line 1 "{file}"\n' + _INCLUDE.sub(include, text)

    return read(f"{name}.cu", "")


def load_kernels(device: Device, folder: Path = FOLDER) -> Callable[[str], Kernel]:
    """All kernels on a device, by name. A module is compiled and loaded as a whole when this is called."""
    table: dict[str, Kernel] = {}
    for name in module_names(folder):
        source = module_source(name, folder)
        get = device.module(source)
        for kernel in signatures(source):
            if kernel in table:
                raise DeviceError(f"kernel {kernel}: defined in two files")
            table[kernel] = get(kernel)

    def find(name: str) -> Kernel:
        if name not in table:
            raise DeviceError(f"kernel {name}: no such kernel")
        return table[name]

    return find
