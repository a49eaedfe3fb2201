"""Runs single kernels on any device with arrays of the host as arguments, for tests and scripts/gpu_check.py.

In: a Device. Out: DeviceRunner.run(), which leaves what a kernel wrote in the arrays that were passed. Next:
kernel_cases.py, kernel_cases_ffn.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hotcold.runtime.gpu.device import Device, Kernel
from hotcold.runtime.gpu.launch import Launch
from hotcold.runtime.gpu.source import module_names, module_source, signatures

Array = np.ndarray


class DeviceRunner:
    """Compiles a kernel's file when the first kernel of it is wanted."""

    def __init__(self, device: Device) -> None:
        self.device, self.stream = device, device.stream()
        self.modules = {kernel: name for name in module_names() for kernel in signatures(module_source(name))}
        self._kernels: dict[str, Kernel] = {}

    def kernel(self, name: str) -> Kernel:
        if name not in self._kernels:
            source = module_source(self.modules[name])
            get = self.device.module(source)
            self._kernels |= {kernel: get(kernel) for kernel in signatures(source)}
        return self._kernels[name]

    def start(self, name: str, launch: Launch, *args: Any) -> dict[int, tuple[Array, Any]]:
        """Queue a kernel; -> what was uploaded for it.

        Arrays of the host are uploaded, one that is passed twice only once; arrays of the device go as they are; plain
        numbers become int32 or float32.
        """
        held: dict[int, tuple[Array, Any]] = {}

        def passed(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                if id(value) not in held:
                    held[id(value)] = value, self.device.upload(np.ascontiguousarray(value))
                return held[id(value)][1]
            if type(value) is float:
                return np.float32(value)
            return np.int32(value) if type(value) in (int, bool) else value

        values = tuple(passed(value) for value in args)
        self.kernel(name)(launch.grid, launch.block, values, shared_mem=launch.shared, stream=self.stream)
        return held

    def finish(self, held: dict[int, tuple[Array, Any]]) -> None:
        """Wait, and copy back."""
        self.device.sync(self.stream)
        for host, array in held.values():
            host[...] = self.device.download(array)
        check = getattr(self.device, "check_guards", None)
        if check is not None:
            check()

    def run(self, name: str, launch: Launch, *args: Any) -> None:
        self.finish(self.start(name, launch, *args))
