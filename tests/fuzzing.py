"""Broken copies of valid files, and what must survive them.

In: a seed. Out: mutants of the two layouts; `exercise` opens one, touches all of it and plans its conversion. Run by
test_fuzz.py in a process of its own with a memory limit: python -W error tests/fuzzing.py FOLDER SEED COUNT prints how
they ended. FolderMutator breaks Hugging Face folders.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import hostile
import numpy as np
from rich.console import Console

from hotcold.convert.gguf_source import load_gguf
from hotcold.convert.neuron_split import split_neurons
from hotcold.convert.precision import Report
from hotcold.convert.stock import to_stock
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import GGUFError, HotcoldError
from hotcold.runtime.gguf_file import DEQUANTIZABLE_TYPES, dequantize, open_gguf
from hotcold.runtime.inspect import print_file
from hotcold.runtime.rope import rope_table
from hotcold.runtime.tokenizer import Tokenizer
from hotcold.runtime.weights import load_weights

# What a process may grow by while it reads mutants of a file of 50 kB.
MEMORY_LIMIT = 64 << 20

_NUMBERS = [0, 1, 2, 7, 8, 31, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 61, 1 << 62,
            (1 << 63) - 1, 1 << 63, (1 << 64) - 32, (1 << 64) - 1]  # fmt: skip


class Valid(NamedTuple):
    """A file to break: its bytes, where its data begins, and where its metadata values lie."""

    content: bytes
    header: int
    values: list[int]


def read_valid(path: Path) -> Valid:
    if exercise(path) != "opened":
        raise SystemExit(f"{path}: a valid file was refused")
    with open_gguf(path) as f:
        Tokenizer.from_gguf(f)
        load_gguf(f, Report())
        values = [entry.offset for entry in f._entries.values()]
        return Valid(path.read_bytes(), min(t.offset for t in f.tensors.values()), values)


class Mutator:
    """Endless mutants of valid files, most of them broken in the header. The same seed gives the same ones."""

    def __init__(self, valid: list[Valid], seed: int) -> None:
        self.valid = valid
        # Where a small number stands: most of them are lengths, counts, types and offsets.
        self.fields = [
            [i for i in range(4, v.header - 8) if 0 < struct.unpack_from("<Q", v.content, i)[0] < 1 << 20]
            for v in valid
        ]
        self.random = random.Random(seed)

    def __iter__(self) -> Iterator[bytes]:
        kinds: list[Callable[[bytearray, int], None]] = [
            self.flip, self.flip, self.field, self.field, self.value, self.value, self.value, self.number, self.byte,
            self.truncate, self.delete, self.repeat, self.swap, self.splice,
        ]  # fmt: skip
        while True:
            which = self.random.randrange(len(self.valid))
            content = bytearray(self.valid[which].content)
            for _ in range(self.random.choice((1, 1, 1, 2, 4))):
                self.random.choice(kinds)(content, which)
            yield bytes(content)

    def place(self, content: bytearray, which: int) -> int:
        """A position, nine times in ten inside the header."""
        end = self.valid[which].header if self.random.random() < 0.9 else len(content)
        return self.random.randrange(max(1, min(end, len(content))))

    def flip(self, content: bytearray, which: int) -> None:
        for _ in range(self.random.choice((1, 1, 2, 8))):
            at = self.place(content, which)
            content[at : at + 1] = bytes(b ^ 1 << self.random.randrange(8) for b in content[at : at + 1])

    def byte(self, content: bytearray, which: int) -> None:
        at = self.place(content, which)
        content[at : at + 1] = self.random.choice((b"\0", b"\x01", b"\x7f", b"\x80", b"\xff"))

    def write(self, content: bytearray, at: int) -> None:
        number = self.random.choice([*_NUMBERS, len(content), len(content) - at, self.random.randrange(100)])
        size = self.random.choice((4, 8))
        content[at : at + size] = (number % (1 << 8 * size)).to_bytes(size, "little")

    def number(self, content: bytearray, which: int) -> None:
        self.write(content, self.place(content, which))

    def field(self, content: bytearray, which: int) -> None:
        self.write(content, self.random.choice(self.fields[which]))

    def value(self, content: bytearray, which: int) -> None:
        """Another number, or another bit, where a metadata value begins: such files mostly open."""
        at = self.random.choice(self.valid[which].values)
        special = struct.pack("<f", self.random.choice((0.0, -1.0, 1e-45, 1e38, float("nan"), float("inf"))))
        number = struct.pack("<I", self.random.choice((0, 1, 3, 5, 100, 1 << 20, (1 << 32) - 1)))
        bit = bytes([content[at] ^ 1 << self.random.randrange(8)]) if at < len(content) else b""
        new = self.random.choice((special, number, bit))
        content[at : at + len(new)] = new

    def truncate(self, content: bytearray, which: int) -> None:
        del content[self.place(content, which) :]

    def piece(self, content: bytearray, which: int) -> tuple[int, int]:
        start = self.place(content, which)
        return start, start + self.random.choice((1, 4, 8, 32, 200))

    def delete(self, content: bytearray, which: int) -> None:
        start, end = self.piece(content, which)
        del content[start:end]

    def repeat(self, content: bytearray, which: int) -> None:
        start, end = self.piece(content, which)
        content[start:start] = content[start:end]

    def swap(self, content: bytearray, which: int) -> None:
        start, end = self.piece(content, which)
        other = self.place(content, which)
        piece = content[start:end]
        content[start:end] = content[other : other + len(piece)]
        content[other : other + len(piece)] = piece

    def splice(self, content: bytearray, which: int) -> None:
        other = self.random.choice(self.valid).content
        at = self.place(content, which)
        content[at:] = other[at + self.random.choice((0, 0, 8, -8)) :]


def exercise(path: Path) -> str:
    """Open a file, read all its metadata and tensors as a model would: how far it got.

    Only HotcoldError may come out of the product; anything else passes through and is a bug.
    """
    try:
        file = open_gguf(path)
    except GGUFError:
        return "refused when opened"
    with file:
        touched = 0
        for value in file.metadata.values():
            touched += len(str(value))
        for name, info in file.tensors.items():
            view = file.data(name)
            touched += int(np.bitwise_xor.reduce(view.reshape(-1).view(np.uint8), axis=None))
            if info.ggml_type in DEQUANTIZABLE_TYPES:
                touched += dequantize(view, info.ggml_type).size
        try:
            config = ModelConfig.from_gguf(file)
        except GGUFError:
            return "no model"
        if config.rope is not None:
            rope_table(config.rope, min(config.n_ctx_train, 16))
        try:
            load_weights(file, config)
        except HotcoldError:
            return "not its weights"
        with suppress(HotcoldError):
            Tokenizer.from_gguf(file).encode("t12 \u00e9")
        with suppress(HotcoldError):
            report = Report()
            model = load_gguf(file, report)
            plan = split_neurons(model, "auto", report) if config.layout == "stock" else to_stock(
                model, "auto", None, report)  # fmt: skip
            touched += plan.n_bytes
        return "opened"


JSON_VALUES: list[Any] = [
    None, 0, 1, -1, 2, 10**400, 1e308, float("nan"), True, False, "", [], {}, "x", [1], ["x"], {"a": 1}, 2**31, 2**64,
    -(2**63), 3.5, [[]], "silu", "\ud800", "<s>", [None], [{"id": 1}],
]  # fmt: skip


class FolderMutator:
    """Broken copies of Hugging Face folders: JSON files and safetensors headers with other values, or flipped bytes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def mutate(self, folder: Path) -> str:
        """Break one file of `folder` in place; returns its name."""
        kinds = (".json", ".safetensors", ".model")
        path = self.random.choice(sorted(p for p in folder.iterdir() if p.suffix in kinds))
        content = path.read_bytes()
        if path.suffix == ".model" or self.random.random() < 0.15:
            broken = bytearray(content)
            for _ in range(self.random.choice((1, 3))):
                broken[self.random.randrange(min(len(broken), 4000))] = self.random.randrange(256)
            path.write_bytes(broken)
        elif path.suffix == ".json":
            path.write_text(json.dumps(self.values(json.loads(content))))
        else:
            size = int.from_bytes(content[:8], "little")
            header = json.dumps(self.values(json.loads(content[8 : 8 + size]))).encode()
            path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
        return path.name

    def values(self, root: Any) -> Any:
        """Delete, replace or copy one to three values."""
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            places = list(_places(root))
            if not places:
                return root
            where, key = self.random.choice(places)
            chance = self.random.random()
            if chance < 0.2:
                del where[key]
            elif chance < 0.8:
                where[key] = copy.deepcopy(self.random.choice(JSON_VALUES))  # later changes must not reach the list
            else:
                source, name = self.random.choice(places)
                where[key] = copy.deepcopy(source[name])
        return root


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything below a JSON value; long containers by their beginning."""
    keys = list(node)[:60] if isinstance(node, dict) else range(min(len(node), 25)) if isinstance(node, list) else ()
    for key in keys:
        yield node, key
        yield from _places(node[key])


def limit_memory(extra: int) -> None:
    """Let this process grow by no more than `extra` bytes of address space."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + extra
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def main(folder: Path, seed: int, count: int) -> None:
    valid = [read_valid(hostile.write_valid(folder / f"{split}.gguf", split)) for split in (False, True)]
    path = folder / "mutant.gguf"
    ends: Counter[str] = Counter()
    with (folder / "shown.txt").open("w") as shown:
        console = Console(file=shown)
        print_file(folder / "True.gguf", console)  # imports what it needs before memory is limited
        limit_memory(MEMORY_LIMIT)
        for number, mutant in zip(range(count), Mutator(valid, seed), strict=False):
            path.unlink(missing_ok=True)  # a new file each time: the last one may still be mapped
            path.write_bytes(mutant)
            end = exercise(path)
            ends[end] += 1
            if end != "refused when opened" and number % 20 == 0:
                print_file(path, console)
    print(json.dumps(ends))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
