"""Runs attention over caches that end where readable memory ends; a read past the end kills this process.

In: nothing. Out: "all read" and exit 0, or death by SIGSEGV. Next: test_attention.py runs it.
"""

from __future__ import annotations

import itertools
import sys

import numpy as np
from guard_pages import Guarded, guard_works
from one_op import attention, close, encode

from hotcold.runtime.kernels import formats, reference

DIMS = {"f32": (2, 24, 64), "f16": (2, 7, 24, 80, 128), "q8_0": (32, 64, 96)}


def main() -> None:
    if not guard_works():
        sys.exit("the guard page can be read: this test proves nothing")
    rng = np.random.default_rng(1)
    memory = Guarded(), Guarded()
    for kind, dims in DIMS.items():
        for head_dim, n_ctx, n_tok in itertools.product(dims, (1, 5, 17, 66, 300), (1, 3, 9)):
            if n_tok > n_ctx:
                continue
            print(kind, head_dim, n_ctx, n_tok, flush=True)  # the last line tells where it died
            values = rng.standard_normal((2, n_ctx, head_dim)).astype(np.float32)
            if kind == "q8_0":
                raw = encode(formats.Q8_0, values.reshape(-1, head_dim))
                seen = reference.decode(formats.Q8_0, raw, head_dim).reshape(values.shape)
                cache = raw.reshape(2, n_ctx, -1)
            else:
                cache = seen = values.astype(np.float16 if kind == "f16" else np.float32)
            at = memory[0].put(cache[0]).ctypes.data, memory[1].put(cache[1]).ctypes.data
            q = rng.standard_normal((n_tok, 3, head_dim)).astype(np.float32)
            pos = n_ctx - n_tok
            want = reference.attention(q, seen[:1], seen[1:], pos, 0, 0.25)
            for many in (False, True) if n_tok <= 8 else (True,):
                got = attention(q, cache[:, None], pos=pos, window=0, scale=0.25, n_threads=1, many_tokens=many,
                                caches_at=at)[:-1, : 3 * head_dim]  # fmt: skip
                if not close(got, want.reshape(n_tok, -1), 3, 2e-6):
                    sys.exit("wrong result")
    print("all read")


if __name__ == "__main__":
    main()
