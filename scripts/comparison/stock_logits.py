"""Logits of stock llama.cpp for given token ids, through the ctypes bindings of llama-cpp-python.

In: a stock GGUF, ids (.npy int32 [n]), a folder with libllama. Out: logits (.npy float32 [n, n_vocab]).
Next: compare_llama_cpp.py, which starts this in a process of its own, one per build of llama.cpp.

    python scripts/stock_logits.py MODEL IDS.npy OUT.npy --lib DIR [--bindings DIR] [--threads N] [--step]

The bindings are plain Python: the folder `llama_cpp` of llama-cpp-python's sdist is enough, it need not be installed.
Only its low-level module is imported, so none of its dependencies is needed except typing_extensions.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np


def load_bindings(lib: Path, bindings: Path | None) -> Any:
    """The module llama_cpp.llama_cpp, bound to the library in `lib`. Raises ImportError, OSError, RuntimeError.

    `bindings` is the folder llama_cpp itself or the one that holds it; None: an installed llama-cpp-python.
    """
    if bindings is None:
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None or not spec.submodule_search_locations:
            raise ImportError("llama-cpp-python is not installed: name its folder llama_cpp with --bindings")
        folder = Path(spec.submodule_search_locations[0])
    else:
        folder = bindings if (bindings / "llama_cpp.py").exists() else bindings / "llama_cpp"
        if not (folder / "llama_cpp.py").exists():
            raise ImportError(f"{bindings} holds no llama_cpp/llama_cpp.py")
    os.environ["LLAMA_CPP_LIB_PATH"] = str(lib.resolve())
    package = types.ModuleType("llama_cpp")  # a package without its __init__, which would import the server's needs
    package.__path__ = [str(folder)]
    sys.modules["llama_cpp"] = package
    return importlib.import_module("llama_cpp.llama_cpp")


def logits(api: Any, model_path: Path, ids: np.ndarray, threads: int, step: bool) -> np.ndarray:
    """float32 [n, n_vocab] for `ids` from an empty context; in one batch, or one by one when `step`."""
    api.llama_backend_init()
    model_params = api.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model = api.llama_model_load_from_file(str(model_path).encode(), model_params)
    if not model:
        raise RuntimeError(f"llama.cpp could not load {model_path}")
    n = len(ids)
    params = api.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = n, n, min(n, 512)
    params.n_threads = params.n_threads_batch = threads
    context = api.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError(f"llama.cpp could not make a context of {n} tokens")
    n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    out = np.empty((n, n_vocab), np.float32)
    size = 1 if step else n
    batch = api.llama_batch_init(size, 0, 1)
    for start in range(0, n, size):
        batch.n_tokens = size
        for i in range(size):
            batch.token[i], batch.pos[i] = int(ids[start + i]), start + i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
        status = api.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status} at position {start}")
        for i in range(size):
            row = api.llama_get_logits_ith(context, i)
            ctypes.memmove(out[start + i].ctypes.data, row, 4 * n_vocab)
    api.llama_batch_free(batch)
    api.llama_free(context)
    api.llama_model_free(model)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description="Logits of stock llama.cpp for given token ids.")
    parser.add_argument("model", type=Path)
    parser.add_argument("ids", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lib", type=Path, required=True, help="folder with libllama")
    parser.add_argument("--bindings", type=Path, help="folder with llama-cpp-python's llama_cpp, if not installed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--step", action="store_true", help="one token at a time instead of one batch")
    args = parser.parse_args()
    try:
        api = load_bindings(args.lib, args.bindings)
        np.save(args.out, logits(api, args.model, np.load(args.ids), args.threads, args.step))
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        print(f"stock_logits: {error}", file=sys.stderr)
        return 1
    print(api.llama_print_system_info().decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
