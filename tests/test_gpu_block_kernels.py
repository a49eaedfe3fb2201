"""The kernels of prompts against NumPy in float64: every kernel and format, odd sizes, several orders of threads.

In: random arrays. The kernels are the GPU's own sources, compiled for the CPU (cuda_on_cpu/); a second run of part of
this file has them compiled with a sanitizer.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
from cuda_on_cpu.build import asan_env, compiler
from cuda_on_cpu.sim_device import SimDevice
from encode import encode

from hotcold.runtime.gpu import launch_block as launches
from hotcold.runtime.gpu import reference_block
from hotcold.runtime.gpu.device import Device
from hotcold.runtime.gpu.launch_block import Act, Columns, Heads, Launch, whole
from hotcold.runtime.gpu.source import module_source, signatures
from hotcold.runtime.kernels import formats, reference
from hotcold.runtime.kernels.vector import ACTIVATION_CODES

ASAN = "HOTCOLD_TEST_ASAN"  # set in the process of test_sanitizer
MODULES = ("attention_block", "half", "matmul", "tokens", "unpack")
KINDS = {formats.F16: "f16", formats.Q8_0: "q8_0", formats.Q4_0: "q4_0"}
TYPES = tuple(KINDS)
ROUNDING = 3e-6  # relative to the sum of absolute values: sums in F32 of up to a few thousand random terms
MARK = np.float32(12345)  # in what must not be written
needs_compiler = pytest.mark.skipif(not compiler()[0], reason="no C++ compiler")
pytestmark = needs_compiler


class Matrix(NamedTuple):
    kind: str
    cols: int
    q: Any
    d: Any

    def rows_from(self, first: int) -> Matrix:
        return self._replace(q=self.q[first:], d=None if self.d is None else self.d[first:])


class Gpu:
    """A device with the kernels of prompts. Every launch runs to its end before the next.

    scripts/gpu_check.py runs the functions below on a card.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream = self.device.stream()
        self.kernels: dict[str, Any] = {}
        for name in MODULES:
            source = module_source(name)
            get = self.device.module(source)
            self.kernels |= {kernel: get(kernel) for kernel in signatures(source)}

    def up(self, values: Any, dtype: Any = None) -> Any:
        return None if values is None else self.device.upload(np.ascontiguousarray(values, dtype))

    def floats(self, values: Any) -> Any:
        return self.up(values, np.float32)

    def run(self, launch: Launch) -> None:
        launch.queue(self.kernels.__getitem__, self.stream)
        self.device.sync(self.stream)
        if isinstance(self.device, SimDevice):
            self.device.check_guards()

    def down(self, array: Any) -> np.ndarray:
        return self.device.download(array)

    def matrix(self, ggml_type: int, raw: np.ndarray, cols: int) -> Matrix:
        q, d = reference_block.split_rows(ggml_type, raw, cols)
        return Matrix(KINDS[ggml_type], cols, self.up(q), self.up(d))

    def act(self, x: np.ndarray) -> Act:
        q, d = reference.quantize(x)
        return Act(self.up(q), self.up(d))

    def marked(self, *shape: int) -> Any:
        return self.up(np.full(shape, MARK))


_gpus: dict[int, Gpu] = {}


def gpu_of(schedule: int) -> Gpu:
    if schedule not in _gpus:
        _gpus[schedule] = Gpu(SimDevice(schedule=schedule, asan=ASAN in os.environ))
    return _gpus[schedule]


@pytest.fixture
def gpu() -> Gpu:
    return gpu_of(0)


@pytest.fixture(params=[0, 1, 2, 3], ids=lambda n: f"schedule{n}")
def any_order(request: pytest.FixtureRequest) -> Gpu:
    return gpu_of(request.param)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """The same numbers for the same test, whichever tests run beside it."""
    return np.random.default_rng(list(request.node.name.encode()))


def rows_of(rng: np.random.Generator, ggml_type: int, rows: int, cols: int) -> np.ndarray:
    return encode(ggml_type, rng.standard_normal((rows, cols)).astype(np.float32))


def close(got: np.ndarray, want: np.ndarray, scale: Any, rounding: float = ROUNDING) -> None:
    """Differences up to `rounding` of `scale`, the sum of the absolute values that were added."""
    assert np.isfinite(got).all()
    error = np.abs(got - want) / (np.asarray(scale) + 1e-30)
    assert error.max(initial=0) <= rounding, f"off by {error.max()} at {np.unravel_index(error.argmax(), error.shape)}"


# ------------------------------------------------------------------ matrices


@pytest.mark.parametrize("ggml_type", TYPES)
@pytest.mark.parametrize(("rows", "cols"), [(1, 32), (3, 32), (7, 96), (33, 64), (65, 224)])
def test_unpack_rows(any_order: Gpu, rng: np.random.Generator, ggml_type: int, rows: int, cols: int) -> None:
    gpu, first = any_order, 2
    raw = rng.integers(0, 256, (rows, formats.row_bytes(ggml_type, cols)), np.uint8)
    shapes = reference_block.split_rows(ggml_type, np.concatenate([raw[:1]] * (rows + 3)), cols)
    to = Matrix(KINDS[ggml_type], cols, *(None if a is None else gpu.device.empty(a.shape, a.dtype) for a in shapes))
    before = gpu.device.upload(np.concatenate([[0, 0], raw.reshape(-1)]).astype(np.uint8))  # raw rows at 2 bytes more
    gpu.run(launches.unpack_rows(before[2:], to, first, rows))
    for got, want in zip((to.q, to.d), reference_block.split_rows(ggml_type, raw, cols), strict=True):
        if got is None or want is None:
            assert got is want
            continue
        values = gpu.down(got)
        assert values[first : first + rows].tobytes() == want.tobytes()
        assert (values[:first].view(np.uint8) == 255).all() and (values[first + rows :].view(np.uint8) == 255).all()


@pytest.mark.parametrize("ggml_type", TYPES)
@pytest.mark.parametrize(("n", "cols", "stride"), [(1, 32, 1), (7, 96, 2), (33, 64, 1), (65, 1056, 2)])
def test_halves(gpu: Gpu, rng: np.random.Generator, ggml_type: int, n: int, cols: int, stride: int) -> None:
    """Rows of a matrix and their transpose, as the library takes them."""
    raw = rows_of(rng, ggml_type, n * stride, cols)
    w = gpu.matrix(ggml_type, raw, cols).rows_from(stride - 1)
    want = reference.decode(ggml_type, raw[stride - 1 :: stride], cols).astype(np.float16)
    rows = gpu.device.empty((n, cols), np.float16)
    gpu.run(launches.rows_to_half(w, n, rows, stride))
    assert (gpu.down(rows) == want).all()
    columns = gpu.device.empty((cols, launches.padded(n)), np.float16)
    gpu.run(launches.columns_to_half(w, n, columns, stride))
    got = gpu.down(columns)
    assert (got[:, :n] == want.T).all() and (got[:, n:] == 0).all()


@pytest.mark.parametrize(("n_tok", "n"), [(1, 1), (3, 32), (7, 999)])
def test_to_half(any_order: Gpu, rng: np.random.Generator, n_tok: int, n: int) -> None:
    """Values that a half cannot hold, and tiny ones beside them; zeros; numbers that are none."""
    gpu = any_order
    x = (rng.standard_normal((n_tok, n + 5)) * 10.0 ** rng.integers(-12, 12, (n_tok, 1))).astype(np.float32)
    x[:, 3] *= 1000
    if n_tok == 7:
        x[1], x[2], x[3] = 0, float(np.finfo(np.float32).max), 1e-44
        x[4, 5], x[5, 6] = np.inf, np.nan
    used = x[:, 2 : 2 + n]
    out, scales = gpu.device.empty((n_tok, launches.padded(n)), np.float16), gpu.device.empty((n_tok,), np.float32)
    gpu.run(launches.to_half(Columns(gpu.up(x), n, n + 5, 2), n_tok, out, scales))
    want, want_scales = reference_block.to_half(used)
    got, got_scales = gpu.down(out), gpu.down(scales)
    assert (got_scales == want_scales).all()
    np.testing.assert_array_equal(got[:, :n], want)
    assert (got[:, n:] == 0).all()
    finite = np.isfinite(used).all(axis=1)
    assert np.isfinite(got[finite]).all()


@pytest.mark.parametrize("ggml_type", TYPES)
@pytest.mark.parametrize(("n_tok", "n", "cols"), [(3, 7, 64), (33, 65, 96)])
def test_products_by_the_library(
    gpu: Gpu, rng: np.random.Generator, ggml_type: int, n_tok: int, n: int, cols: int
) -> None:
    """matmul and down by way of halves; activations of an FFN that no half can hold."""
    raw = rows_of(rng, ggml_type, n, cols)
    w = gpu.matrix(ggml_type, raw, cols)
    x = (rng.standard_normal((n_tok, cols)) * 1e6).astype(np.float32)
    v = (rng.standard_normal((n_tok, n)) * 1e6).astype(np.float32)
    bias = rng.standard_normal(n).astype(np.float32)
    half, scales = gpu.device.empty((n_tok * 128,), np.float16), gpu.device.empty((n_tok,), np.float32)
    weights, c = gpu.device.empty((128 * 128,), np.float16), gpu.device.empty((n_tok * 128,), np.float32)

    gpu.run(launches.to_half(whole(gpu.up(x), cols), n_tok, half, scales))
    gpu.run(launches.rows_to_half(w, n, weights))
    launches.gemm(gpu.device, half, weights, c, n_tok, n, cols, gpu.stream)
    y = gpu.marked(n_tok, n + 3)
    gpu.run(launches.finish_half(c, scales, n_tok, Columns(y, n, n + 3, 2), bias=gpu.up(bias), scale=0.5))
    decoded = reference.decode(ggml_type, raw, cols)
    size = np.abs(x) @ np.abs(decoded).T
    want = 0.5 * (x.astype(np.float64) @ decoded.T + bias)
    got = gpu.down(y)
    close(got[:, 2:-1], want, size, 2**-10)
    close(got[:, 2:-1], 0.5 * (reference_block.half_matmul(ggml_type, raw, x) + bias), size)
    assert (got[:, :2] == MARK).all() and (got[:, -1] == MARK).all()

    gpu.run(launches.to_half(whole(gpu.up(v), n), n_tok, half, scales))
    gpu.run(launches.columns_to_half(w, n, weights))
    launches.gemm(gpu.device, half, weights, c, n_tok, cols, launches.padded(n), gpu.stream)
    y = gpu.marked(n_tok, cols)
    gpu.run(launches.finish_half(c, scales, n_tok, whole(y, cols), add=True))
    close(gpu.down(y), MARK + v.astype(np.float64) @ decoded, np.abs(v) @ np.abs(decoded) + MARK, 2**-10)


SHAPES = [(1, 1, 32), (7, 33, 160), (16, 64, 128), (33, 65, 96), (65, 130, 288), (128, 7, 64)]


def run_matmul(gpu: Gpu, ggml_type: int, raw: np.ndarray, x: np.ndarray, n: int, *, stride: int = 1, pad: int = 0,
               **options: Any) -> np.ndarray:  # fmt: skip
    """y of n rows, within `pad` marked columns on both sides."""
    n_tok, cols = x.shape
    w = gpu.matrix(ggml_type, raw, cols)
    y = gpu.marked(n_tok, n + 2 * pad)
    wide = np.concatenate([x, np.full((n_tok, 3), np.nan, np.float32)], axis=1)
    to = Columns(y, n, n + 2 * pad, pad)
    gpu.run(launches.matmul(w, Columns(gpu.up(wide), cols, cols + 3), gpu.act(x), n_tok, to, stride=stride, **options))
    got = gpu.down(y)
    assert (got[:, :pad] == MARK).all() and (got[:, pad + n :] == MARK).all()
    return got[:, pad : pad + n]


@pytest.mark.parametrize("ggml_type", TYPES)
@pytest.mark.parametrize(("n_tok", "n", "cols"), SHAPES)
@pytest.mark.parametrize("stride", [1, 2])
def test_matmul(gpu: Gpu, rng: np.random.Generator, ggml_type: int, n_tok: int, n: int, cols: int, stride: int) -> None:
    raw = rows_of(rng, ggml_type, (n - 1) * stride + 1, cols)  # the last of a bundle's up rows ends the memory
    x = rng.standard_normal((n_tok, cols)).astype(np.float32)
    bias = rng.standard_normal(n).astype(np.float32)
    got = run_matmul(gpu, ggml_type, raw, x, n, stride=stride, pad=2, bias=gpu.up(bias), scale=0.5, add=stride == 2)
    used = raw[::stride]
    want = reference.matmul(ggml_type, used, x, bias, 0.5) + (MARK if stride == 2 else 0)
    size = np.abs(x) @ np.abs(reference.decode(ggml_type, used, cols)).T + (MARK if stride == 2 else 1)
    close(got, want, size)


@pytest.mark.parametrize("ggml_type", TYPES)
@pytest.mark.parametrize("n_tok", [9, 65])
def test_matmul_in_any_order_of_threads(any_order: Gpu, rng: np.random.Generator, ggml_type: int, n_tok: int) -> None:
    raw, x = rows_of(rng, ggml_type, 70, 288), rng.standard_normal((n_tok, 288)).astype(np.float32)
    got = run_matmul(any_order, ggml_type, raw, x, 70)
    assert got.tobytes() == run_matmul(gpu_of(0), ggml_type, raw, x, 70).tobytes()
    close(got, reference.matmul(ggml_type, raw, x), np.abs(x) @ np.abs(reference.decode(ggml_type, raw, 288)).T)


@pytest.mark.parametrize("ggml_type", TYPES)
def test_a_tokens_bits_depend_on_no_other_token(gpu: Gpu, rng: np.random.Generator, ggml_type: int) -> None:
    """Neither on how many there are, nor on the size of the tiles."""
    raw, x = rows_of(rng, ggml_type, 66, 160), rng.standard_normal((70, 160)).astype(np.float32)
    v = rng.standard_normal((70, 66)).astype(np.float32)
    all_rows, all_down = run_matmul(gpu, ggml_type, raw, x, 66), run_down(gpu, ggml_type, raw, v, 160)
    for first, n in ((0, 1), (3, 17), (64, 6)):
        part = slice(first, first + n)
        assert run_matmul(gpu, ggml_type, raw, x[part], 66).tobytes() == all_rows[part].tobytes()
        assert run_down(gpu, ggml_type, raw, v[part], 160).tobytes() == all_down[part].tobytes()


def test_integers_are_the_cpus(gpu: Gpu) -> None:
    """Sums of one block are exact: the largest quants of both sides, of both signs."""
    signs = np.where(np.arange(32) % 3, 1, -1).astype(np.float32)
    x = np.stack([signs * 127, -signs * 127, np.arange(32) * 4.0]).astype(np.float32)
    for ggml_type in (formats.Q8_0, formats.Q4_0):
        raw = encode(ggml_type, np.stack([signs * 2, -signs * 2, np.linspace(-1, 1, 32)]).astype(np.float32))
        got = run_matmul(gpu, ggml_type, raw, x, 3)
        q, d = reference_block.split_rows(ggml_type, raw, 32)
        assert d is not None
        weights = reference.decode(ggml_type, raw, 32) / d.astype(np.float64)
        quants, scales = reference.quantize(x)
        dots = np.rint(quants.reshape(3, 32) @ weights.T).astype(np.float32)  # integers
        assert (got == (scales * d.astype(np.float32).T) * dots).all()


def run_down(gpu: Gpu, ggml_type: int, raw: np.ndarray, v: np.ndarray, cols: int, *, stride: int = 1,
             y: Any = None, **options: Any) -> np.ndarray:  # fmt: skip
    n_tok, n = v.shape
    w = gpu.matrix(ggml_type, raw, cols).rows_from(stride - 1)
    y = gpu.marked(n_tok, cols) if y is None else y
    wide = np.concatenate([np.full((n_tok, 1), np.nan), v, np.full((n_tok, 2), np.nan)], axis=1)
    gpu.run(launches.down(w, Columns(gpu.floats(wide), n, n + 3, 1), n_tok, y, stride=stride, **options))
    return gpu.down(y)


@pytest.mark.parametrize("ggml_type", TYPES)
@pytest.mark.parametrize(("n_tok", "cols", "n"), [(1, 32, 1), (7, 160, 33), (33, 96, 65), (65, 288, 100), (16, 64, 32)])
@pytest.mark.parametrize("stride", [1, 2])
def test_down(gpu: Gpu, rng: np.random.Generator, ggml_type: int, n_tok: int, cols: int, n: int, stride: int) -> None:
    raw = rows_of(rng, ggml_type, n * stride, cols)
    v = rng.standard_normal((n_tok, n)).astype(np.float32) * (rng.random((n_tok, n)) < 0.5)
    bias = rng.standard_normal(cols).astype(np.float32)
    used = raw[stride - 1 :: stride]
    size = np.abs(v) @ np.abs(reference.decode(ggml_type, used, cols)) + 1
    got = run_down(gpu, ggml_type, raw, v, cols, stride=stride, bias=gpu.up(bias), scale=1.5)
    close(got, reference.down(ggml_type, used, v, cols, bias, 1.5), size)
    got = run_down(gpu, ggml_type, raw, v, cols, stride=stride, add=True)
    close(got, MARK + reference.down(ggml_type, used, v, cols), size + MARK)


@pytest.mark.parametrize("ggml_type", TYPES)
def test_down_of_streamed_rows(any_order: Gpu, rng: np.random.Generator, ggml_type: int) -> None:
    """Cold neurons come in chunks: each adds to what is there."""
    gpu = any_order
    raw, v = rows_of(rng, ggml_type, 2 * 90, 64), rng.standard_normal((20, 90)).astype(np.float32)
    x = rng.standard_normal((20, 64)).astype(np.float32)
    y = gpu.floats(x)
    for first in range(0, 90, 40):
        chunk = slice(first, first + 40)
        run_down(gpu, ggml_type, raw[2 * first : 2 * first + 80], v[:, chunk], 64, stride=2, y=y, scale=2, add=True)
    decoded = reference.decode(ggml_type, raw[1::2], 64)
    close(gpu.down(y), x + 2 * v.astype(np.float64) @ decoded, np.abs(x) + np.abs(v) @ np.abs(decoded) * 2)


# ------------------------------------------------------------------ tokens


@pytest.mark.parametrize(("n_tok", "n"), [(1, 32), (3, 576), (7, 1056), (2, 100)])
@pytest.mark.parametrize("kind", ["rms", "layer", "layer, bias"])
def test_norm_tokens(any_order: Gpu, rng: np.random.Generator, n_tok: int, n: int, kind: str) -> None:
    gpu, layer = any_order, kind.startswith("layer")
    x = (rng.standard_normal((n_tok, n)) * 30 + 2).astype(np.float32)
    w, b = rng.standard_normal(n).astype(np.float32), rng.standard_normal(n).astype(np.float32)
    bias = b if kind == "layer, bias" else None
    h, act = gpu.device.empty((n_tok, n), np.float32), None
    if n % 32 == 0:
        act = Act(gpu.device.empty((n_tok, n), np.int8), gpu.device.empty((n_tok, n // 32), np.float32))
    gpu.run(launches.norm_tokens(gpu.up(x), n_tok, n, gpu.up(w), gpu.up(bias), h, act, eps=1e-5, layer_norm=layer))
    want = reference.layer_norm(x, w, bias, 1e-5) if layer else reference.rms_norm(x, w, 1e-5)
    got = gpu.down(h)
    close(got, want, np.abs(want) + np.abs(w) + 1)
    if act is not None:
        same_act(gpu, act, got)


def same_act(gpu: Gpu, act: Act, x: np.ndarray) -> None:
    """Act blocks are the CPU's, bit for bit."""
    q, d = reference.quantize(x)
    assert (gpu.down(act.q).reshape(q.shape) == q).all()
    np.testing.assert_array_equal(gpu.down(act.d).reshape(d.shape), d)


@pytest.mark.parametrize(("n_tok", "n"), [(1, 32), (7, 288), (33, 64)])
def test_quantize_tokens(any_order: Gpu, rng: np.random.Generator, n_tok: int, n: int) -> None:
    gpu = any_order
    x = (rng.standard_normal((n_tok, n)) * 10.0 ** rng.integers(-20, 20, (n_tok, 1))).astype(np.float32)
    if n_tok == 7:
        x[0], x[1, 5], x[2, 6] = 0, np.inf, np.nan
        x[3, :32], x[4, :32] = 1e-40, np.arange(-16, 16) / 2  # 127 / top is infinite; halves round to even
    act = Act(gpu.device.empty((n_tok, n), np.int8), gpu.device.empty((n_tok, n // 32), np.float32))
    wide = np.concatenate([np.full((n_tok, 3), np.nan, np.float32), x], axis=1)
    gpu.run(launches.quantize_tokens(Columns(gpu.up(wide), n, n + 3, 3), n_tok, act))
    same_act(gpu, act, x)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("n_tok", "n_head", "n_head_kv", "head_dim", "n_rot"),
    [(1, 1, 1, 8, 8), (5, 6, 2, 64, 64), (3, 5, 1, 80, 32), (2, 3, 3, 256, 256), (7, 2, 2, 16, 0)],
)
def test_rope_kv_tokens(any_order: Gpu, rng: np.random.Generator, interleaved: bool, n_tok: int, n_head: int,
                        n_head_kv: int, head_dim: int, n_rot: int) -> None:  # fmt: skip
    gpu, pos, n_ctx, eps = any_order, 4, 16, 1e-6
    q = rng.standard_normal((n_tok, n_head, head_dim)).astype(np.float32)
    k, v = (rng.standard_normal((n_tok, n_head_kv, head_dim)).astype(np.float32) for _ in range(2))
    norms = [rng.standard_normal(head_dim).astype(np.float32) for _ in range(2)] if head_dim != 64 else [None, None]
    angles = rng.uniform(-3, 3, (n_ctx, n_rot // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    caches = [gpu.device.empty((n_head_kv, n_ctx, head_dim), np.float16) for _ in range(2)]
    device_q = gpu.up(q)
    gpu.run(launches.rope_kv_tokens(
        device_q, gpu.up(k), gpu.up(v), (gpu.up(norms[0]), gpu.up(norms[1])),
        (gpu.up(cos), gpu.up(sin)) if n_rot else None, (caches[0], caches[1]),
        Heads(n_head, n_head_kv, head_dim, n_ctx), n_tok, pos, n_rot=n_rot, interleaved=interleaved, eps=eps,
    ))  # fmt: skip
    at = slice(pos, pos + n_tok)
    for x, w, got in ((q, norms[0], gpu.down(device_q)), (k, norms[1], gpu.down(caches[0])[:, at].swapaxes(0, 1))):
        want = x if w is None else reference.rms_norm(x, w, eps)
        want = reference.rotate(want, cos[at, None], sin[at, None], interleaved)
        close(got, want, np.abs(want) + 1, 1e-6 if x is q else 2e-3)
    k_cache, v_cache = gpu.down(caches[0]), gpu.down(caches[1])
    assert (v_cache[:, at] == v.astype(np.float16).swapaxes(0, 1)).all()
    for cache in (k_cache, v_cache):
        assert np.isnan(cache[:, :pos]).all() and np.isnan(cache[:, pos + n_tok :]).all()


@pytest.mark.parametrize("name", sorted(ACTIVATION_CODES))
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("threshold", [0.0, 0.4])
def test_activate_tokens(gpu: Gpu, rng: np.random.Generator, name: str, gated: bool, threshold: float) -> None:
    n_tok, n = 3, 301
    g, u = (rng.standard_normal((n_tok, n + more)).astype(np.float32) * 3 for more in (7, 2))
    g[0, 4:7] = threshold, -100, 80
    keys, up = g[:, 4 : 4 + n], u[:, 1 : 1 + n]
    device_g = gpu.up(g)
    gpu.run(launches.activate_tokens(Columns(device_g, n, n + 7, 4), Columns(gpu.up(u), n, n + 2, 1) if gated else None,
                                     n_tok, act=ACTIVATION_CODES[name], threshold=threshold))  # fmt: skip
    limit = float(np.float32(threshold))
    want = reference.neuron_values(name, keys, up if gated else None, limit)
    got = gpu.down(device_g)
    value = np.abs(reference.neuron_values(name, keys, up if gated else None))
    clear = np.abs(value - limit) > 1e-5 if name in ("silu", "gelu", "gelu_tanh") else np.ones(value.shape, bool)
    size = np.abs(want) + np.abs(keys * (up if gated else 1))  # gelu adds 1 and nearly -1
    close(np.where(clear, got[:, 4 : 4 + n], 0), np.where(clear, want, 0), size, 1e-6)
    g[:, 4 : 4 + n] = got[:, 4 : 4 + n]
    assert (got == g).all()


def test_activate_keeps_nan(gpu: Gpu) -> None:
    for code in ACTIVATION_CODES.values():
        g = gpu.floats([[np.nan, 1, np.nan, 1]])
        u = gpu.floats([[1, np.nan, np.nan, 1]])
        gpu.run(launches.activate_tokens(whole(g, 4), whole(u, 4), 1, act=code, threshold=0.0))
        assert (np.isnan(gpu.down(g)) == [[True, True, True, False]]).all()


# ------------------------------------------------------------------ attention

HEADS = [(1, 1, 64), (3, 1, 64), (4, 2, 80), (7, 1, 96), (2, 2, 128), (8, 2, 256), (2, 1, 16), (6, 3, 8)]


def run_attention(gpu: Gpu, q: np.ndarray, k: np.ndarray, v: np.ndarray, pos: int, window: int,
                  scale: float) -> np.ndarray:  # fmt: skip
    """q [n_tok, n_head, head_dim], caches [n_head_kv, n_ctx, head_dim]."""
    n_tok, n_head, head_dim = q.shape
    out = gpu.device.empty(q.shape, np.float32)
    heads = Heads(n_head, len(k), head_dim, k.shape[1])
    caches = gpu.up(k), gpu.up(v)
    gpu.run(launches.attention_block(gpu.up(q), caches, out, heads, n_tok, pos, window=window, scale=scale))
    return gpu.down(out)


def attention_case(rng: np.random.Generator, n_tok: int, pos: int, n_head: int, n_head_kv: int,
                   head_dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """q and the caches; positions that nobody sees are NaN."""
    q = rng.standard_normal((n_tok, n_head, head_dim)).astype(np.float32)
    k, v = (rng.standard_normal((n_head_kv, pos + n_tok + 9, head_dim)).astype(np.float16) for _ in range(2))
    k[:, pos + n_tok :], v[:, pos + n_tok :] = np.nan, np.nan
    return q, k, v


@pytest.mark.parametrize(("n_head", "n_head_kv", "head_dim"), HEADS)
@pytest.mark.parametrize(("n_tok", "pos"), [(1, 0), (7, 0), (33, 0), (5, 130), (65, 3)])
def test_attention(gpu: Gpu, rng: np.random.Generator, n_head: int, n_head_kv: int, head_dim: int, n_tok: int,
                   pos: int) -> None:  # fmt: skip
    q, k, v = attention_case(rng, n_tok, pos, n_head, n_head_kv, head_dim)
    got = run_attention(gpu, q, k, v, pos, 0, head_dim**-0.5)
    close(got, reference.attention(q, k, v, pos, 0, head_dim**-0.5), 1, 3e-6)


WINDOWS = [(1, 7, 3), (5, 40, 0), (64, 33, 100), (100, 20, 300), (1000, 9, 4)]


@pytest.mark.parametrize(("window", "n_tok", "pos"), WINDOWS)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_sliding_window(any_order: Gpu, rng: np.random.Generator, window: int, n_tok: int, pos: int,
                        head_dim: int) -> None:  # fmt: skip
    (q, k, v), scale = attention_case(rng, n_tok, pos, 4, 2, head_dim), head_dim**-0.5
    k[:, : max(0, pos + 1 - window)] = np.nan  # what no token of the block sees
    v[:, : max(0, pos + 1 - window)] = 0  # is multiplied by 0
    got = run_attention(any_order, q, k, v, pos, window, scale)
    close(got, reference.attention(q, k, v, pos, window, scale), 1, 3e-6)


def test_attention_with_large_scores(gpu: Gpu, rng: np.random.Generator) -> None:
    """The largest score comes late, or all are far below zero."""
    q, k, v = attention_case(rng, 12, 120, 2, 1, 64)
    for factor in (np.linspace(0, 60, k.shape[1]), np.full(k.shape[1], -60.0)):
        turned = (q[0, 0] * factor[:, None])[None].astype(np.float16)
        turned[:, 132:] = np.nan
        got = run_attention(gpu, np.abs(q), np.abs(turned) * np.sign(factor[-1]).astype(np.float16), v, 120, 0, 1.0)
        want = reference.attention(np.abs(q), np.abs(turned) * np.sign(factor[-1]), v, 120, 0, 1.0)
        close(got, want, 1, 1e-3)  # scores of thousands: their own rounding is what is left


def test_attention_of_a_token_depends_on_no_other(gpu: Gpu, rng: np.random.Generator) -> None:
    q, k, v = attention_case(rng, 40, 90, 6, 2, 80)
    for window in (0, 50):
        want = run_attention(gpu, q, k, v, 90, window, 0.1)
        for first, n in ((0, 1), (3, 11), (39, 1)):
            got = run_attention(gpu, q[first : first + n], k, v, 90 + first, window, 0.1)
            assert got.tobytes() == want[first : first + n].tobytes()


# ------------------------------------------------------------------ all of them


def test_every_kernel_is_here() -> None:
    """A new kernel needs a test above."""
    found = {kernel for name in MODULES for kernel in signatures(module_source(name))}
    by_format = ("matmul", "matmul_few", "down", "down_few", "unpack_rows", "rows_to_half", "columns_to_half")
    others = ("to_half", "finish_half", "norm_tokens", "quantize_tokens", "rope_kv_tokens", "activate_tokens")
    want = {f"{name}_{kind}" for name, kind in itertools.product(by_format, KINDS.values())} | {*others}
    assert found == want | {f"attention_block_{n}" for n in (64, 128, 256)}


@pytest.mark.skipif(ASAN in os.environ, reason="this is the sanitizer's process")
def test_sanitizer() -> None:
    """Nothing out of bounds or misaligned, at sizes that fill no tile."""
    env = asan_env()
    if not env:
        pytest.skip("the C++ compiler has no sanitizer")
    sizes = "7-160 or 7-33-160 or 7-96 or 5-130 or 7-999 or 7-288 or streamed or 3-5-1-80 or 7-1056"
    cases = f"({sizes}) and not schedule1 and not schedule2"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", __file__, "-k", cases],
        env={**env, ASAN: "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
