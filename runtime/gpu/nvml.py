"""Bytes of a card's memory that are used, asked of the driver without making a context.

In: a card's PCI address. Out: used_bytes(). Next: cupy_device.py, which measures what a context takes.
"""

from __future__ import annotations

import ctypes
import sys


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def used_bytes(pci: str) -> int | None:
    """Of all processes; None where the driver's management library does not answer."""
    try:
        library = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        if library.nvmlInit_v2():
            return None
        try:
            handle, memory = ctypes.c_void_p(), _Memory()
            if library.nvmlDeviceGetHandleByPciBusId_v2(pci.encode(), ctypes.byref(handle)):
                return None
            if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
                return None
            return int(memory.used)
        finally:
            library.nvmlShutdown()
    except (OSError, AttributeError):  # no such library, or one without these functions
        return None
