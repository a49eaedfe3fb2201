"""Stock llama.cpp through its library, in a process of its own: logits for given ids, or timings like llama-bench's.

In: a stock GGUF and a folder with libllama. Out: a .npy of logits (`logits`), or one JSON line per test (`bench`).
Next: compare_llama_cpp.py, which starts it.

    python scripts/comparison/stock_worker.py logits MODEL IDS.npy OUT.npy --lib DIR [--bindings DIR] [-t N] [--step]
    python scripts/comparison/stock_worker.py bench MODEL -p 256 -n 64 --lib DIR [--bindings DIR] [-t N]

The bindings are plain Python: the folder `llama_cpp` of llama-cpp-python's sdist is enough, it need not be installed.
Only its low-level module is imported, so none of its dependencies is needed except typing_extensions. They must be of
the same days as the library: its structures are laid out in them.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import importlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import numpy as np

KV_TYPES = {"f32": 0, "f16": 1, "q8_0": 8}  # as ggml numbers them


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
    lib = plain_names(lib)
    os.environ["LLAMA_CPP_LIB_PATH"] = str(lib.resolve())
    package = types.ModuleType("llama_cpp")  # a package without its __init__, which would import the server's needs
    package.__path__ = [str(folder)]
    sys.modules["llama_cpp"] = package
    extensions: Any = importlib.import_module("llama_cpp._ctypes_extensions")
    load = extensions.load_shared_library
    extensions.load_shared_library = lambda *names: Library(load(*names)._name)
    api = importlib.import_module("llama_cpp.llama_cpp")
    load_backends(lib)
    api.llama_backend_init()
    return api


class Library(ctypes.CDLL):
    """A library that may lack some of what the bindings know, being of another day."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not name.startswith(("llama_", "ggml_")):
                raise
            return Missing(name)


class Missing:
    """A function that is not there, until it is called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any) -> None:
        raise RuntimeError(f"this libllama has no {self.__name__}: it and the bindings are of different days")


def plain_names(lib: Path) -> Path:
    """The folder itself, or one of links to its files where a version is part of the library's name (npm's are so)."""
    versioned = [file for name in ("libllama", "libggml") for file in lib.glob(f"{name}.v*")]
    if any(lib.glob("libllama.so*")) or any(lib.glob("libllama.dylib")) or not versioned:
        return lib
    links = Path(tempfile.mkdtemp(prefix="hotcold-llama-"))
    atexit.register(shutil.rmtree, links, ignore_errors=True)
    for file in lib.iterdir():
        (links / file.name).symlink_to(file.resolve())
    for file in versioned:
        (links / (file.name.split(".")[0] + file.suffix)).symlink_to(file.resolve())
    return links


def load_backends(lib: Path) -> None:
    """Builds for many CPUs keep their kernels in libraries of their own, which must be asked for."""
    for name in ("libggml.so", "libggml.dylib"):
        if (lib / name).exists() and any(lib.glob("libggml-cpu-*")):
            load = ctypes.CDLL(str(lib / name)).ggml_backend_load_all_from_path
            load.argtypes, load.restype = [ctypes.c_char_p], None
            load(str(lib.resolve()).encode())


class Stock:
    """A model loaded by llama.cpp; `decode` runs tokens at a position."""

    def __init__(self, api: Any, path: Path, repack: bool = True, mmap: bool = True) -> None:
        self.api = api
        params = api.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = repack
        if not mmap:
            params.use_mmap = False  # of older ones
            params.load_mode = 0  # LLAMA_LOAD_MODE_NONE
        self.model = api.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load {path}")
        self.n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.context: Any = None
        self.batch: Any = None

    def start(self, n_ctx: int, threads: int, n_batch: int = 2048, kv_type: str = "f16") -> None:
        """An empty context of n_ctx tokens."""
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_batch, min(n_batch, 512)
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = KV_TYPES[kv_type]
        self.context = self.api.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp could not make a context of {n_ctx} tokens")
        self.batch = self.api.llama_batch_init(n_batch, 0, 1)

    def decode(self, ids: np.ndarray, pos: int, every: bool = False) -> None:
        """Logits of the last token, or of every one. At most n_batch tokens."""
        batch = self.batch
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids.tolist()):
            batch.token[i], batch.pos[i] = token, pos + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = int(every or i == len(ids) - 1)
        status = self.api.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status} at position {pos}")
        self.api.llama_synchronize(self.context)

    def truncate(self, pos: int) -> None:
        self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.context), 0, pos, -1)

    def logits(self, i: int) -> np.ndarray:
        """float32 [n_vocab] of the i-th token of the last batch; a copy."""
        row = np.empty(self.n_vocab, np.float32)
        ctypes.memmove(row.ctypes.data, self.api.llama_get_logits_ith(self.context, i), row.nbytes)
        return row


def logits(api: Any, args: argparse.Namespace) -> None:
    """float32 [n, n_vocab] for the ids from an empty context; in one batch, or one by one with --step."""
    ids = np.load(args.ids)
    n = len(ids)
    stock = Stock(api, args.model)
    stock.start(n, args.threads, n_batch=n, kv_type=args.kv_type)
    out = np.empty((n, stock.n_vocab), np.float32)
    size = 1 if args.step else n
    for start in range(0, n, size):
        stock.decode(ids[start : start + size], start, every=True)
        for i in range(size):
            out[start + i] = stock.logits(i)
    np.save(args.out, out)
    print(api.llama_print_system_info().decode())


def bench(api: Any, args: argparse.Namespace) -> None:
    """As llama-bench does it: random ids, one warm-up, prompts in batches, generated tokens one by one."""
    rng = np.random.default_rng(0)
    stock = Stock(api, args.model, bool(args.repack), args.mmap)
    n_ctx = args.depth + max(args.prompt_tokens, args.gen_tokens)
    stock.start(n_ctx, args.threads, kv_type=args.kv_type)

    def feed(ids: np.ndarray, pos: int, step: int) -> None:
        for start in range(0, len(ids), step):
            stock.decode(ids[start : start + step], pos + start)

    if args.depth:
        feed(rng.integers(0, stock.n_vocab, args.depth), 0, 512)
    for n_prompt, n_gen in ((args.prompt_tokens, 0), (0, args.gen_tokens)):
        n = n_prompt + n_gen
        if n == 0:
            continue
        ids = rng.integers(0, stock.n_vocab, n)
        step = 512 if n_prompt else 1
        if args.warmup:
            feed(ids[:step], args.depth, step)
            stock.truncate(args.depth)
        wall, cpu = time.perf_counter(), time.process_time()
        feed(ids, args.depth, step)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        stock.truncate(args.depth)
        print(json.dumps({
            "build_commit": "library", "build_number": api.llama_print_system_info().decode().strip(),
            "model_filename": str(args.model), "n_threads": args.threads, "type_k": args.kv_type,
            "type_v": args.kv_type, "repack": bool(args.repack), "n_prompt": n_prompt, "n_gen": n_gen,
            "n_depth": args.depth, "samples_ts": [n / wall], "cpu_s": [cpu],
        }), flush=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Logits and timings of stock llama.cpp through its library.")
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("logits")
    one.add_argument("model", type=Path)
    one.add_argument("ids", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--step", action="store_true", help="one token at a time instead of one batch")
    one.set_defaults(run=logits)
    two = commands.add_parser("bench")
    two.add_argument("model", type=Path)
    two.add_argument("-p", "--prompt-tokens", type=int, default=256)
    two.add_argument("-n", "--gen-tokens", type=int, default=64)
    two.add_argument("-d", "--depth", type=int, default=0)
    two.add_argument("--repack", type=int, choices=(0, 1), default=1)
    two.add_argument("--no-mmap", dest="mmap", action="store_false")
    two.add_argument("--no-warmup", dest="warmup", action="store_false")
    two.set_defaults(run=bench)
    for command in (one, two):
        command.add_argument("--lib", type=Path, required=True, help="folder with libllama")
        command.add_argument("--bindings", type=Path, help="folder with llama-cpp-python's llama_cpp, if not installed")
        command.add_argument("-t", "--threads", type=int, default=1)
        command.add_argument("--kv-type", choices=KV_TYPES, default="f16", help="of the KV cache")
    args = parser.parse_args()
    try:
        args.run(load_bindings(args.lib, args.bindings), args)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        print(f"stock_worker: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
