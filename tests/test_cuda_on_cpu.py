"""The emulator must see mistakes that a GPU would punish: what it misses, the tests of the kernels miss."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_on_cpu.build import compiler
from cuda_on_cpu.sim_device import SimDevice

pytestmark = pytest.mark.skipif(not compiler()[0], reason="no C++ compiler")

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
extern "C" __global__ void add(float* x, float by, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += by;
}
"""
SCHEDULES = range(7)


def run(source: str, kernel: str, *args: object, schedule: int = 0, block: int = 64) -> None:
    device = SimDevice(schedule=schedule)
    stream = device.stream()
    device.module(source)(kernel)((1,), (block,), args, stream=stream)
    try:
        device.sync(stream)
    finally:
        device.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_correct_kernel(schedule: int) -> None:
    device = SimDevice(schedule=schedule, jitter=1e-3)
    stream = device.stream()
    x, y = device.upload(np.arange(1000, dtype=np.float32)), device.empty((4,), np.float32)
    device.module(SUM)("total")((4,), (256,), (x, y, np.int32(1000)), stream=stream)
    device.sync(stream)
    assert device.download(y).tolist() == [499500.0] * 4
    device.close()
