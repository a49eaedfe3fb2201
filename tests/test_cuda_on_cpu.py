"""The emulator must see mistakes that a GPU would punish: what it misses, the tests of the kernels miss."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from cuda_on_cpu.build import asan_env, compiler
from cuda_on_cpu.sim_device import SimDevice

from hotcold.runtime.gpu.device import DeviceError, DeviceMemoryError
from hotcold.runtime.gpu.source import module_source

pytestmark = pytest.mark.skipif(not compiler()[0], reason="no C++ compiler")

i32, i64, f32 = np.int32, np.int64, np.float32
SCHEDULES = range(7)
SUM = r"""
extern "C" __global__ void total(const float* __restrict__ x, float* __restrict__ y, int n) {
    __shared__ float parts[8];
    float v = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) v += x[i];
    for (int m = 16; m; m >>= 1) v += __shfl_xor_sync(0xffffffffu, v, m);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x > 0) return;
    v = 0;
    for (int i = 0; i < blockDim.x / 32; i++) v += parts[i];
    y[blockIdx.x] = v;
}
"""
ADD = r"""
extern "C" __global__ void add(float* x, float by, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += by;
}
extern "C" __global__ void copy(float* to, const float* from, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = from[i];
}
extern "C" __global__ void wait_for(const long long* flag, long long wanted, int* spun, int limit) {
    int n = 0;
    while (load_acquire_system(flag) != wanted && n < limit) n++;
    *spun = n;
}
extern "C" __global__ void announce(long long* flag, long long value) { store_release_system(flag, value); }
"""


@pytest.fixture
def device() -> Iterator[SimDevice]:
    made = SimDevice(jitter=2e-3)
    yield made
    made.close()


def run(source: str, kernel: str, *args: object, schedule: int = 0, block: int = 64, n: int = 64) -> np.ndarray:
    """Run a kernel whose first argument is a float array of n, which is returned."""
    device = SimDevice(schedule=schedule)
    stream, out = device.stream(), device.empty((n,), f32)
    try:
        device.module(source)(kernel)((1,), (block,), (out, *args), stream=stream)
        device.sync(stream)
        return device.download(out)
    finally:
        device.close()


def held(until: threading.Event) -> None:
    assert until.wait(60)


# ------------------------------------------------------------------ threads of a block


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_correct_kernel(schedule: int) -> None:
    device = SimDevice(schedule=schedule)
    stream = device.stream()
    x, y = device.upload(np.arange(1000, dtype=f32)), device.empty((3,), f32)
    for block in (256, 32, 96):
        device.module(SUM)("total")((3,), (block,), (x, y, i32(1000)), stream=stream)
        device.sync(stream)
        assert device.download(y).tolist() == [499500.0] * 3
    device.close()


def test_a_missing_barrier_shows_in_some_order() -> None:
    wrong, results = SUM.replace("__syncthreads();", ""), []
    for schedule in SCHEDULES:
        device = SimDevice(schedule=schedule)
        stream, x, y = device.stream(), device.upload(np.ones(1000, f32)), device.empty((1,), f32)
        device.module(wrong)("total")((1,), (256,), (x, y, i32(1000)), stream=stream)
        device.sync(stream)
        results.append(float(device.download(y)[0]))
    assert any(np.isnan(r) for r in results)  # shared memory that nobody has written is NaN
    assert results[1] == 1000.0  # the order that hides it: last thread first


def test_running_ahead_into_the_next_round_shows() -> None:
    """The barrier before shared memory is written again."""
    source = r"""
    extern "C" __global__ void rounds(float* y) {
        __shared__ float box[1];
        float v = 0;
        for (int round = 1; round <= 4; round++) {
            if (threadIdx.x == 40) box[0] = round;
            __syncthreads();
            v += box[0];
            __syncthreads();  // next
        }
        y[threadIdx.x] = v;
    }"""
    wrong = source.replace("__syncthreads();  // next", "")
    assert all((run(source, "rounds", schedule=s) == 10).all() for s in SCHEDULES)
    assert any((run(wrong, "rounds", schedule=s) != 10).any() for s in SCHEDULES)


def test_a_warp_far_ahead_shows() -> None:
    """Warps that meet in shuffles advance together in turns; one that runs as far as it gets does not hide this."""
    source = r"""
    extern "C" __global__ void late(float* y) {
        __shared__ float box[64];
        box[threadIdx.x] = threadIdx.x;
        __syncwarp();
        __syncwarp();
        y[threadIdx.x] = box[(threadIdx.x + 32) % 64];
    }"""
    right = np.roll(np.arange(64, dtype=f32), -32)
    assert [s for s in SCHEDULES if not (run(source, "late", schedule=s) == right).all()] == [2, 3]


def test_divergence_is_a_deadlock_report() -> None:
    source = r"""
    extern "C" __global__ void diverge(float* y) {
        float v = 1;
        if (threadIdx.x < 20) v += __shfl_xor_sync(0xffffffffu, v, 1);
        else __syncthreads();
        y[threadIdx.x] = v;
    }"""
    with pytest.raises(DeviceError, match=r"kernel diverge: deadlock in block \(0, 0, 0\), 64 threads wait: "
                                          r"threads 0-19 in __shfl_xor_sync, mask ffffffff; "
                                          r"threads 20-63 in __syncthreads"):  # fmt: skip
        run(source, "diverge")
    other = source.replace("else __syncthreads()", "else v += __shfl_down_sync(0xffffffffu, v, 1)")
    with pytest.raises(DeviceError, match="threads 20-31 in __shfl_down_sync, mask ffffffff"):
        run(other, "diverge")


def test_a_mask_must_name_its_caller_and_all_others() -> None:
    source = r"""
    extern "C" __global__ void half_of(float* y) {
        float v = threadIdx.x;
        if (threadIdx.x % 32 < 16) v = __shfl_sync(0xffffu, v, 3);
        else if (threadIdx.x % 32 < 24) v = __shfl_sync(0xffff0000u, v, 16);
        y[threadIdx.x] = v;
    }"""
    lanes_exit = run(source, "half_of", block=32)  # lanes that ended count as there
    assert lanes_exit[:16].tolist() == [3.0] * 16 and lanes_exit[16:24].tolist() == [16.0] * 8
    with pytest.raises(DeviceError, match="thread 8 calls __shfl_sync with mask 000000ff, in which it is not"):
        run(source.replace("0xffffu", "0xffu"), "half_of")


def test_a_lane_that_takes_no_part_gives_nothing() -> None:
    source = r"""
    extern "C" __global__ void ended(float* y) {
        if (threadIdx.x >= 16) return;
        y[threadIdx.x] = __shfl_down_sync(0xffffffffu, (float)threadIdx.x, 8);
    }"""
    out = run(source, "ended", block=32, n=16)
    assert out[:8].tolist() == [8, 9, 10, 11, 12, 13, 14, 15] and np.isnan(out[8:]).all()


def test_votes_and_counts() -> None:
    source = r"""
    extern "C" __global__ void votes(float* y) {
        const int t = threadIdx.x;
        const int some = __syncthreads_or(t == 5), all = __syncthreads_and(t < 63);
        y[t] = __ballot_sync(0xffffffffu, t % 32 < 3) + 100 * __syncthreads_count(t % 2)
             + 10000 * __all_sync(~0u, t < 32) + 20000 * __any_sync(~0u, t == 40) + 100000 * some + 200000 * all;
    }"""
    for schedule in SCHEDULES:
        out = run(source, "votes", schedule=schedule)
        assert (out == 7 + 3200 + 100000 + np.repeat([10000, 20000], 32)).all()


def test_a_kernel_that_sleeps_lets_others_go_on(device: SimDevice) -> None:
    """One stream polls a flag that a kernel of another stream sets."""
    kernels, one, two = device.module(ADD), device.stream(), device.stream()
    (_, flag_d), (spun, spun_d) = device.pinned((1,), i64), device.pinned((1,), i32)
    kernels("wait_for")((1,), (1,), (flag_d, i64(1 << 40), spun_d, i32(1 << 30)), stream=one)
    kernels("announce")((1,), (1,), (flag_d, i64(1 << 40)), stream=two)
    device.sync(one)
    kernels("wait_for")((1,), (1,), (flag_d, i64(3), spun_d, i32(50)), stream=one)
    device.sync(one)
    assert spun[0] == 50


# ------------------------------------------------------------------ memory

OUT_OF_BOUNDS = {
    "array": ("__shared__ float s[8]; s[threadIdx.x % 8] = x[threadIdx.x]; x[threadIdx.x + 1] = s[threadIdx.x % 8];",
              "use-after-poison"),
    "shared": ("__shared__ float s[8]; s[threadIdx.x] = 1; x[threadIdx.x] = s[threadIdx.x % 8];", "out of bounds"),
    "dynamic": ("SHARED_DYNAMIC(float, s); s[threadIdx.x] = 1; x[threadIdx.x] = s[threadIdx.x];",
                "heap-buffer-overflow"),
    "misaligned": ("x[threadIdx.x] = ((float4*)(x + 1))->x;", "misaligned"),
    "right": ("x[threadIdx.x] = 1;", "")}  # fmt: skip
ASAN_SCRIPT = """
import sys
import numpy as np
from cuda_on_cpu.sim_device import SimDevice
device = SimDevice(asan=True)
stream, x = device.stream(), device.empty((32,), np.float32)
kernel = device.module('extern "C" __global__ void k(float* x) {' + sys.argv[1] + '}')("k")
kernel((1,), (32,), (x,), shared_mem=31 * 4, stream=stream)
device.sync(stream)
print("passed", flush=True)
"""


@pytest.mark.parametrize("case", OUT_OF_BOUNDS)
def test_out_of_bounds(case: str) -> None:
    env = asan_env()
    if not env:
        pytest.skip("the compiler has no address sanitizer")
    body, report = OUT_OF_BOUNDS[case]
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run([sys.executable, "-c", ASAN_SCRIPT, body], env=env, capture_output=True, text=True)
    if report:
        assert done.returncode != 0 and report in done.stderr and "passed" not in done.stdout
    else:
        assert done.returncode == 0 and done.stdout == "passed\n", done.stderr


def test_writing_beside_an_array_is_seen_without_a_sanitizer() -> None:
    device = SimDevice()
    stream, x = device.stream(), device.empty((64,), f32)
    device.module(ADD)("add")((1,), (65,), (x, f32(1), i32(65)), stream=stream)
    with pytest.raises(AssertionError, match="beside a device array"):
        device.close()


def test_memory_begins_and_ends_as_nan(device: SimDevice) -> None:
    stream = device.stream()
    x, y = device.empty((8,), f32), device.upload(np.ones(8, f32))
    assert np.isnan(device.download(x)).all() and (device.download(device.empty((8,), i32)) == -1).all()
    slow = threading.Event()
    stream.put(lambda: held(slow))
    device.module(ADD)("copy")((1,), (8,), (x, y, i32(8)), stream=stream)
    del y  # too early: the kernel has not run
    gc.collect()
    slow.set()
    device.sync(stream)
    assert np.isnan(device.download(x)).all()


def test_memory_is_counted() -> None:
    device = SimDevice(memory=(1 << 20) + 1000)
    x = device.empty((100,), f32)
    y = device.upload(np.zeros(50, f32))
    view = y[10:20]
    assert (device.used, device.peak, device.memory()) == (600, 600, (400, (1 << 20) + 1000))
    with pytest.raises(DeviceMemoryError, match="404 bytes wanted, 400 free") as e:
        device.empty((101,), f32)
    assert (e.value.wanted, e.value.free) == (404, 400)
    del x, y
    gc.collect()
    assert (device.used, device.peak) == (200, 600)  # the view keeps its array
    del view
    gc.collect()
    assert device.used == 0


# ------------------------------------------------------------------ calls


@pytest.mark.parametrize("args, words", [
    (lambda x: (x, 1.0, i32(8)), "argument by wants np.float32, got float"),
    (lambda x: (x, np.float64(1), i32(8)), "argument by wants np.float32, got float64"),
    (lambda x: (x, f32(1), 8), "argument n wants np.int32, got int"),
    (lambda x: (x, f32(1), i64(8)), "argument n wants np.int32, got int64"),
    (lambda x: (x.view(i32), f32(1), i32(8)), "argument x wants an array of float32, got int32"),
    (lambda x: (x[::2], f32(1), i32(4)), "argument x wants a C-contiguous array"),
    (lambda x: (np.zeros(8, f32), f32(1), i32(8)), "argument x wants a device array, got ndarray"),
    (lambda x: (x, f32(1)), "2 arguments, it has 3"),
])  # fmt: skip
def test_wrong_arguments(device: SimDevice, args, words: str) -> None:
    x = device.empty((8,), f32)
    with pytest.raises(DeviceError, match=f"kernel add: {words}"):
        device.module(ADD)("add")((1,), (8,), args(x), stream=device.stream())


def test_limits_of_a_launch(device: SimDevice) -> None:
    add, stream, args = device.module(ADD)("add"), device.stream(), (None, f32(1), i32(0))
    for grid, block, shared in (((1,), (1025,), 0), ((1,), (32, 33), 0), ((1,), (0,), 0), ((1,), (1,), 49153),
                                ((1, 65536), (1,), 0), ((1, 1, 1, 1), (1,), 0)):  # fmt: skip
        with pytest.raises(DeviceError, match="kernel add: "):
            add(grid, block, args, shared_mem=shared, stream=stream)
    add((0,), (32,), args, stream=stream)
    add((4, 0), (32,), args, stream=stream)
    device.sync(stream)
    assert not device.launches and device.counts["launch"] == 0


def test_copies_need_pinned_memory(device: SimDevice) -> None:
    stream, x = device.stream(), device.empty((8,), f32)
    host, _ = device.pinned((3, 8), f32)
    with pytest.raises(DeviceError, match="h2d: the host's array is not pinned"):
        device.h2d(x, np.zeros(8, f32), stream)
    with pytest.raises(DeviceError, match="d2h: the host's array is not pinned"):
        device.d2h(np.zeros(8, f32), x, stream)
    for wrong in (host[0, :7], host.astype(i32)[0], host[:, 0]):
        with pytest.raises(DeviceError):
            device.h2d(x if wrong.size == 7 else x[: wrong.size], wrong, stream)
    host[1] = 5
    device.h2d(x, host[1], stream)
    device.module(ADD)("add")((1,), (8,), (x, f32(2), i32(8)), stream=stream)
    device.d2h(host[2], x, stream)
    device.sync(stream)
    assert (host[2] == 7).all() and (device.counts["h2d"], device.counts["d2h"]) == (1, 1)


def test_a_copy_reads_its_source_when_its_turn_comes() -> None:
    device = SimDevice()
    stream, x, go = device.stream(), device.empty((1,), f32), threading.Event()
    host, _ = device.pinned((1,), f32)
    stream.put(lambda: held(go))
    device.h2d(x, host, stream)
    host[0] = 9  # the engine must not write here before the copy is done
    go.set()
    device.sync(stream)
    assert device.download(x)[0] == 9
    device.close()


def test_numpy_cannot_use_device_arrays(device: SimDevice) -> None:
    with pytest.raises(DeviceError, match="download"):
        np.asarray(device.empty((8,), f32)).sum()


def test_gemm(device: SimDevice) -> None:
    rng, stream = np.random.default_rng(1), device.stream()
    a, b = rng.normal(size=(3, 16)).astype(np.float16), rng.normal(size=(5, 16)).astype(np.float16)
    x, w, c = device.upload(a), device.upload(b), device.upload(np.ones((3, 5), f32))
    device.gemm(x, w, c, stream)
    device.sync(stream)
    np.testing.assert_allclose(device.download(c), a.astype(f32) @ b.astype(f32).T, rtol=1e-5)
    with pytest.raises(DeviceError, match="gemm"):
        device.gemm(x, w.reshape(16, 5), c, stream)


# ------------------------------------------------------------------ streams, events, graphs


def test_streams_wait_for_events() -> None:
    for seed in range(5):
        device = SimDevice(jitter=3e-3, seed=seed)
        one, two, event = device.stream(), device.stream(), device.event()
        kernels, x, y = device.module(ADD), device.upload(np.zeros(8, f32)), device.empty((8,), f32)
        for _ in range(3):
            kernels("add")((1,), (8,), (x, f32(1), i32(8)), stream=one)
        device.record(event, one)
        device.wait(two, event)
        kernels("copy")((1,), (8,), (y, x, i32(8)), stream=two)
        device.sync_event(event)
        assert device.download(x)[0] == 3
        device.sync(two)
        assert device.download(y)[0] == 3
        device.close()


def test_a_graph_over_two_streams() -> None:
    device = SimDevice(jitter=2e-3)
    one, two = device.stream(), device.stream()
    fork, join = device.event(), device.event()
    kernels, x, y = device.module(ADD), device.upload(np.zeros(8, f32)), device.upload(np.zeros(8, f32))

    def work() -> None:
        kernels("add")((1,), (8,), (x, f32(1), i32(8)), stream=one)
        device.record(fork, one)
        device.wait(two, fork)
        kernels("copy")((1,), (8,), (y, x, i32(8)), stream=two)
        kernels("add")((1,), (8,), (y, f32(10), i32(8)), stream=two)
        device.record(join, two)
        device.wait(one, join)
        kernels("add")((1,), (8,), (y, f32(100), i32(8)), stream=one)

    graph = device.capture(one, work)
    assert not device.launches and (device.download(x) == 0).all()
    for _ in range(5):
        device.replay(graph, one)
    kernels("add")((1,), (8,), (y, f32(1000), i32(8)), stream=one)  # after the graphs, whatever stream they took
    device.sync(one)
    assert (device.download(x) == 5).all() and (device.download(y) == 1115).all()
    assert device.launches == {"add": 16, "copy": 5} and device.counts["replay"] == 5
    device.close()


def test_what_a_capture_must_not_do(device: SimDevice) -> None:
    one, two, early, late = device.stream(), device.stream(), device.event(), device.event()
    host, _ = device.pinned((8,), f32)
    kernels, x = device.module(ADD), device.empty((8,), f32)
    device.record(early, one)

    def unjoined() -> None:
        device.record(late, one)
        device.wait(two, late)
        kernels("add")((1,), (8,), (x, f32(1), i32(8)), stream=two)

    cases: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: device.h2d(x, host, one), "h2d is not allowed while capturing"),
        (lambda: device.d2h(host, x, one), "d2h is not allowed while capturing"),
        (lambda: device.upload(host), "not allowed while capturing"),
        (lambda: device.empty((1,), f32), "allocating is not allowed while capturing"),
        (lambda: device.sync(one), "a sync is not allowed while capturing"),
        (lambda: device.gemm(x, x, x, one), "gemm is not allowed while capturing"),
        (lambda: device.wait(one, early), "outside the capture"),
        (unjoined, "unjoined work"),
    )
    for work, words in cases:
        with pytest.raises(DeviceError, match=words):
            device.capture(one, work)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="another capture"):
        device.wait(one, late)
    device.h2d(x, host, one)  # the stream is as before
    device.sync(one)
    assert (device.download(x) == 0).all()


# ------------------------------------------------------------------ errors


def test_errors_show_at_the_next_sync_and_stay(device: SimDevice) -> None:
    one, two, event = device.stream(), device.stream(), device.event()
    kernels, x = device.module(ADD), device.upload(np.zeros(8, f32))
    device.fail("add", after=1)
    for _ in range(3):
        kernels("add")((1,), (8,), (x, f32(1), i32(8)), stream=one)
    device.record(event, one)
    device.wait(two, event)
    kernels("add")((1,), (8,), (x, f32(1), i32(8)), stream=two)
    for _ in range(2):
        with pytest.raises(DeviceError, match="kernel add: failed while running"):
            device.sync(two)
    with pytest.raises(DeviceError):
        device.sync_event(event)
    assert device.download(x)[0] == 1


def test_a_launch_may_fail_at_once(device: SimDevice) -> None:
    add, stream, x = device.module(ADD)("add"), device.stream(), device.upload(np.zeros(8, f32))
    device.fail("add", at_launch=True)
    with pytest.raises(DeviceError, match="launch failed"):
        add((1,), (8,), (x, f32(1), i32(8)), stream=stream)
    add((1,), (8,), (x, f32(1), i32(8)), stream=stream)
    device.sync(stream)
    assert device.download(x)[0] == 1


# ------------------------------------------------------------------ building


def test_libraries_are_built_once_by_several_processes(tmp_path: Path) -> None:
    script = (
        "import numpy as np\nfrom cuda_on_cpu.build import Library\n"
        "library = Library('extern \"C\" __global__ void one(float* x) { x[threadIdx.x] = 1; }')\n"
        "x = np.zeros(4, np.float32)\nassert library.run('one', (1,), (4,), (x.ctypes.data,), 0, 0) == ''\n"
        "assert x.sum() == 4"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path)}
    both = [subprocess.Popen([sys.executable, "-c", script], env=env) for _ in range(2)]
    assert [p.wait(60) for p in both] == [0, 0]
    assert len(list(tmp_path.rglob("*.so"))) == 1 and not list(tmp_path.rglob("*.part"))


def test_what_the_compiler_says_names_the_file(device: SimDevice, tmp_path: Path) -> None:
    (tmp_path / "a.cuh").write_text("#pragma once\n// nothing\n")
    (tmp_path / "wrong.cu").write_text('#include "a.cuh"\nextern "C" __global__ void k(int n) {\n    oops;\n}\n')
    with pytest.raises(RuntimeError, match="wrong.cu:3:"):
        device.module(module_source("wrong", tmp_path))
