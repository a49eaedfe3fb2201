"""What the driver says of a card, through NVIDIA's management library, without a CUDA context that would take VRAM.

In: nothing. Out: Card: facts, memory in use by all processes. Next: environment.py, vram.py.

The library comes with the driver; only plain C calls of it are used.
"""

from __future__ import annotations

import ctypes
from typing import Any

from hotcold.runtime.gpu.cards import load_cupy, usable_cards
from hotcold.runtime.gpu.device import DeviceUnavailable

_NAMES = ("libnvidia-ml.so.1", "libnvidia-ml.so", "nvml.dll")
_GRAPHICS, _MEMORY = 0, 2  # clocks


class Card:
    """The card that open_device() opens."""

    def __init__(self) -> None:
        """Makes no context. Raises OSError where library or card cannot be asked."""
        pci = pci_address()
        self._library = _load()
        self._call("nvmlInit_v2")
        self._handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByPciBusId_v2", pci.encode(), ctypes.byref(self._handle))

    def memory(self) -> tuple[int, int]:
        """-> bytes in use by whoever, and in all."""
        sizes = (ctypes.c_ulonglong * 3)()  # total, free, used
        self._call("nvmlDeviceGetMemoryInfo", self._handle, sizes)
        return sizes[0] - sizes[1], sizes[0]

    def facts(self) -> dict[str, str]:
        """What a reader needs to place the figures; what the driver does not say is left out."""
        cuda = self._number("nvmlSystemGetCudaDriverVersion_v2", of_card=False)
        generation, width = (self._number(f"nvmlDeviceGetCurrPcieLink{what}") for what in ("Generation", "Width"))
        most, lanes = (self._number(f"nvmlDeviceGetMaxPcieLink{what}") for what in ("Generation", "Width"))
        clocks = [self._number("nvmlDeviceGetMaxClockInfo", kind) for kind in (_GRAPHICS, _MEMORY)]
        power = self._number("nvmlDeviceGetPowerManagementLimit")
        found = {
            "driver": self._text("nvmlSystemGetDriverVersion", of_card=False),
            "CUDA of the driver": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
            "PCIe now": f"{generation}.0 x{width}" if generation else "",
            "PCIe at most": f"{most}.0 x{lanes}" if most else "",
            "clocks at most": f"{clocks[0]} MHz, memory {clocks[1]} MHz" if clocks[0] else "",
            "power limit": f"{power / 1000:.0f} W" if power else "",
            "temperature": f"{self._number('nvmlDeviceGetTemperature', 0)} °C",
        }
        return {name: text for name, text in found.items() if text}

    def _number(self, function: str, *kind: int, of_card: bool = True) -> int:
        value = ctypes.c_uint()
        arguments = [self._handle] * of_card + [ctypes.c_uint(k) for k in kind] + [ctypes.byref(value)]
        try:
            self._call(function, *arguments)
        except OSError:
            return 0
        return value.value

    def _text(self, function: str, of_card: bool = True) -> str:
        text = ctypes.create_string_buffer(96)
        try:
            self._call(function, *([self._handle] * of_card), text, ctypes.c_uint(len(text)))
        except OSError:
            return ""
        return text.value.decode(errors="replace")

    def _call(self, function: str, *arguments: Any) -> None:
        try:
            status = getattr(self._library, function)(*arguments)
        except AttributeError:
            raise OSError(f"the driver has no {function}") from None
        if status:
            raise OSError(f"{function} says {status}")


def pci_address() -> str:
    """Of the first card that can be used. Raises OSError."""
    try:
        cupy = load_cupy()
        return str(cupy.cuda.runtime.deviceGetPCIBusId(next(iter(usable_cards(cupy)))))
    except (DeviceUnavailable, RuntimeError) as error:
        raise OSError(f"no card to ask: {error}") from error


def _load() -> ctypes.CDLL:
    for name in _NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError(f"no {_NAMES[0]}: is there a driver?")
