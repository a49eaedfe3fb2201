"""Reads matrices that end where readable memory ends; a read past the end kills this process.

In: nothing. Out: "all read" and exit 0, or death by SIGSEGV. Next: test_kernels.py runs it.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys

import numpy as np
from one_op import FFN, NAMES, Runner, block_length, close, encode, inside, matmul, random_rows, record

from hotcold.runtime.kernels import formats, reference, walk

PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Guarded:
    """Copies arrays to the very end of a mapping whose next page may not be touched."""

    def __init__(self, n_pages: int = 64) -> None:
        self.size = n_pages * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, self.size + mmap.PAGESIZE)
        self.view = np.frombuffer(self.memory, np.uint8)
        end = self.view.ctypes.data + self.size
        if _libc.mprotect(end, mmap.PAGESIZE, PROT_NONE):
            sys.exit(f"mprotect: error {ctypes.get_errno()}")

    def put(self, array: np.ndarray) -> np.ndarray:
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        place = self.view[self.size - len(raw) : self.size]
        place[:] = raw
        return place


def guard_works() -> bool:
    """In a child, because it dies of the read."""
    import os

    child = os.fork()
    if child == 0:
        guarded = Guarded()
        ctypes.string_at(guarded.view.ctypes.data + guarded.size, 1)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def main() -> None:
    if not guard_works():
        sys.exit("the guard page can be read: this test proves nothing")
    rng = np.random.default_rng(1)
    guarded, guarded_vector, runner = Guarded(), Guarded(), Runner()
    for ggml_type in formats.NATIVE:
        lengths = {1: (1, 7, 8, 15, 17, 31, 64, 72, 100), 32: (32, 64, 96), 256: (256, 512)}[block_length(ggml_type)]
        for cols, rows, n_tok in itertools.product(lengths, (1, 2, 5, 16, 17, 33), (1, 2, 6, 9)):
            print(NAMES[ggml_type], cols, rows, n_tok, flush=True)  # the last line tells where it died
            raw = encode(ggml_type, random_rows(rng, rows, cols))
            x = rng.standard_normal((n_tok, cols)).astype(np.float32)
            bias = rng.standard_normal(rows).astype(np.float32)
            address = guarded.put(raw).ctypes.data
            got = matmul(runner, ggml_type, raw, x, weights_at=address, bias=guarded_vector.put(bias))
            if not close(inside(got, rows), reference.matmul(ggml_type, raw, x, bias), 1e3, 1e-5):
                sys.exit("wrong result")
            rest(runner, guarded, guarded_vector, ggml_type, raw, x)
    print("all read")


def rest(runner: Runner, guarded: Guarded, vector: Guarded, ggml_type: int, raw: np.ndarray, x: np.ndarray) -> None:
    """The other operators that read the file: embedding, down columns, norms."""
    rows, stride = raw.shape
    n_tok, cols = x.shape
    weights = guarded.put(raw)
    out = np.zeros((n_tok, 2048), np.float32)
    tokens = np.full(n_tok, rows - 1, np.int64)
    to = {"dst": out, "ld_dst": out.strides[0]}
    runner.run(record(walk.EMBED, qt=ggml_type, w=weights, stride=stride, cols=cols, **to), n_tok=n_tok,
               tokens=tokens.ctypes.data)  # fmt: skip
    positions = record(walk.EMBED, qt=ggml_type, w=weights, stride=stride, cols=cols, qt2=ggml_type, w2=weights,
                       stride2=stride, **to)  # fmt: skip
    runner.run(positions, n_tok=1, pos=rows - 1, tokens=tokens.ctypes.data)
    values = np.ones((n_tok, rows + 64), np.float32)
    bias = vector.put(np.ones(cols, np.float32))
    runner.run(record(walk.DOWN, qt3=ggml_type, w3=weights, stride3=stride, rows=rows, cols=cols, src=values,
                      ld_src=values.strides[0], bias=bias, **to), n_tok=n_tok)  # fmt: skip
    if rows % 2 == 0:
        ffn = FFN("relu", 0.0, True, ggml_type, raw[: rows // 2].copy(), ggml_type, weights.reshape(raw.shape), cols)
        ffn.run(x[0], "dense", 1)
    ffn = FFN("relu", 0.0, False, ggml_type, weights.reshape(raw.shape), ggml_type, raw.copy(), cols)
    ffn.run(x[0], "exact", 1)
    wide = np.zeros((n_tok, cols + 64), np.float32)
    for flag in (0, 1):
        runner.run(record(walk.NORM, w=vector.put(np.ones(cols, np.float32)), cols=cols, eps=1e-5, flag=flag,
                          src=wide, ld_src=wide.strides[0], **to), n_tok=n_tok)  # fmt: skip


if __name__ == "__main__":
    main()
