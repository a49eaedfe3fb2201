"""What a machine can do: the figures that placement works with, presets for known cards, JSON files, the cache.

In: a preset's name, a JSON file, or what doctor.py measured. Out: frozen Hardware. Next: plan_vram.py.

A JSON file holds one object with the fields of Hardware. With "preset" among them the fields not given are the
preset's: {"preset": "rtx-4090", "ram": 68719476736, "cpu_bandwidth": 6.1e10} is a 4090 in another machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotcold.placement.choices import Rates
from hotcold.runtime.atomic import replacing
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import safe_text

GIB = 1 << 30
CACHE_VERSION = 1
_MAX_FILE = 64 << 10  # bytes of JSON
_MAX_TEXT = 200  # characters of a name

SLOWEST = 1e6  # bytes per second: below it is no memory


@dataclass(frozen=True)
class Hardware:
    """Bandwidths in bytes per second, times in seconds, memory in bytes, efficiencies as shares of the bandwidth."""

    name: str
    cpu_bandwidth: float  # plain reading of RAM by all threads
    threads: int  # CPU threads that compute
    ram: int  # bytes of RAM
    cpu_bandwidth_1: float = 0.0  # plain reading by one thread; 0: not known
    gpu: str = ""  # name of the card; empty: there is none
    gpu_bandwidth: float = 0.0  # plain reading of VRAM
    pcie: float = 0.0  # copying from pinned RAM to VRAM
    t_sync: float = 10e-6  # seconds until the GPU has the CPU's part of a layer (both ways)
    vram: int = 0  # bytes of VRAM
    gpu_context: int = 512 << 20  # bytes of VRAM that driver, context and kernels take
    gpu_overhead: float = 20e-6  # seconds a layer on the GPU takes besides reading: launches within the graph
    cpu_efficiency: float = 0.75  # kernels that read whole matrices
    cpu_sparse_efficiency: float = 0.6  # kernels that read chosen rows
    gpu_efficiency: float = 0.8
    gpu_sparse_efficiency: float = 0.6

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            _check(item.name, getattr(self, item.name))
        if self.gpu and not (self.gpu_bandwidth > 0 and self.vram > 0 and self.pcie > 0):
            raise HotcoldError(f"hardware {self.name!r}: has a 'gpu', so gpu_bandwidth, pcie and vram must be above 0")
        for field in ("gpu_bandwidth", "pcie"):
            if 0 < getattr(self, field) < SLOWEST:
                raise HotcoldError(f"hardware {self.name!r}: {field} is {getattr(self, field):g}, allowed: 0 (none) or "
                                   f"bytes per second from {SLOWEST:g} on")  # fmt: skip

    @property
    def has_gpu(self) -> bool:
        return self.gpu_bandwidth > 0 and self.vram > 0

    def rates(self, handover: int = 0) -> Rates:
        """Seconds per byte, as the solver wants them. handover: bytes over PCIe wherever the GPU waits for the CPU."""
        return Rates(
            cpu_read=1 / (self.cpu_bandwidth * self.cpu_efficiency),
            cpu_rows=1 / (self.cpu_bandwidth * self.cpu_sparse_efficiency),
            gpu_read=1 / (self.gpu_bandwidth * self.gpu_efficiency) if self.has_gpu else math.inf,
            gpu_rows=1 / (self.gpu_bandwidth * self.gpu_sparse_efficiency) if self.has_gpu else math.inf,
            t_sync=self.t_sync + (handover / self.pcie if self.pcie > 0 else 0.0),
        )


# field -> (type, least, most). Limits keep a slip of the keyboard from becoming a plan.
_LIMITS: dict[str, tuple[type, float, float]] = {
    "name": (str, 1, _MAX_TEXT), "gpu": (str, 0, _MAX_TEXT),
    "cpu_bandwidth": (float, SLOWEST, 1e14), "cpu_bandwidth_1": (float, 0, 1e14),
    "threads": (int, 1, 1 << 14), "ram": (int, 1 << 20, 1 << 50),
    "gpu_bandwidth": (float, 0, 1e14), "pcie": (float, 0, 1e13), "t_sync": (float, 0, 1.0),
    "vram": (int, 0, 1 << 48), "gpu_context": (int, 0, 1 << 40), "gpu_overhead": (float, 0, 1.0),
    "cpu_efficiency": (float, 0.01, 2), "cpu_sparse_efficiency": (float, 0.01, 2),
    "gpu_efficiency": (float, 0.01, 2), "gpu_sparse_efficiency": (float, 0.01, 2),
}  # fmt: skip


def _check(field: str, value: Any) -> None:
    kind, low, high = _LIMITS[field]
    if kind is str:
        if not isinstance(value, str) or not low <= len(value) <= high or not value.isprintable():
            raise HotcoldError(f"hardware field {field!r}: found {_shown(value)}, allowed: {int(low)} to {int(high)} "
                               "printable characters")  # fmt: skip
        return
    allowed = (int,) if kind is int else (int, float)
    # NaN fails the comparison too.
    if isinstance(value, bool) or not isinstance(value, allowed) or not low <= value <= high:
        what = "a whole number" if kind is int else "a number"
        raise HotcoldError(f"hardware field {field!r}: found {_shown(value)}, allowed: {what} from {low:g} to {high:g}")


def _shown(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 64:
        return "a number that is far too large"
    return safe_text(str(value) if isinstance(value, int | float) else repr(value)[:200], 60)


# ---- presets

# Cards: memory size, memory bandwidth and PCIe generation are the makers' (TechPowerUp lists them). What a copy over
# PCIe reaches is taken as 80 % of the link. The machine around a card is an assumption and written in its name; the
# hosts of the 4090 and the 2080 Ti are the two PCs of the PowerInfer paper. CPU bandwidths are the modules' nominal
# ones, so the efficiencies are lower than those of a machine that was measured.
_PCIE_3, _PCIE_4 = 12.6e9, 25.2e9


def _preset(name: str, gpu: str, vram: int, gpu_bandwidth: float, pcie: float, threads: int, ram: int,
            cpu_bandwidth: float) -> Hardware:  # fmt: skip
    return Hardware(name=name, cpu_bandwidth=cpu_bandwidth, threads=threads, ram=ram * GIB, gpu=gpu, vram=vram * GIB,
                    gpu_bandwidth=gpu_bandwidth, pcie=pcie, cpu_efficiency=0.65, cpu_sparse_efficiency=0.5,
                    gpu_efficiency=0.75, gpu_sparse_efficiency=0.55)  # fmt: skip


PRESETS = {
    "rtx-3060-12g": _preset("RTX 3060 12 GB, 6 cores, 32 GB DDR4-3200", "NVIDIA GeForce RTX 3060", 12, 360e9, _PCIE_4,
                            6, 32, 51.2e9),
    "rtx-4070-ti": _preset("RTX 4070 Ti, 8 cores, 64 GB DDR5-5600", "NVIDIA GeForce RTX 4070 Ti", 12, 504.2e9, _PCIE_4,
                           8, 64, 89.6e9),
    "rtx-4090": _preset("RTX 4090, 8 cores (i9-13900K), 192 GB at 67.2 GB/s", "NVIDIA GeForce RTX 4090", 24, 1008e9,
                        _PCIE_4, 8, 192, 67.2e9),
    "rtx-2080-ti": _preset("RTX 2080 Ti, 8 cores (i7-12700K), 64 GB at 38.4 GB/s", "NVIDIA GeForce RTX 2080 Ti", 11,
                           616e9, _PCIE_3, 8, 64, 38.4e9),
}  # fmt: skip


def find_preset(text: str) -> Hardware | None:
    """A preset by its name, however it is spelled: rtx-4090, "RTX 4090", "NVIDIA GeForce RTX 4090", 4090."""
    def plain(name: str) -> str:
        letters = re.sub(r"[^a-z0-9]", "", name.lower())
        return re.sub(r"^(nvidia)?(geforce)?(rtx)?", "", letters).removesuffix("b")

    wanted = plain(text)
    names = {plain(name): hardware for name, hardware in PRESETS.items()} | {"3060": PRESETS["rtx-3060-12g"]}
    return names.get(wanted)


# ---- files


def to_json(hardware: Hardware) -> str:
    return json.dumps(dataclasses.asdict(hardware), indent=2)


def from_json(text: str | bytes, where: str) -> Hardware:
    """Read one object. Raises HotcoldError naming `where`, the field, what was found and what is allowed."""
    if len(text) > _MAX_FILE:
        raise HotcoldError(f"{where}: more than {_MAX_FILE >> 10} KiB, allowed: the JSON of one machine's figures")
    try:
        data = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as e:
        reason = "nested too deeply" if isinstance(e, RecursionError) else safe_text(str(e), 120)
        raise HotcoldError(f"{where}: not valid JSON: {reason}") from None
    if not isinstance(data, dict):
        raise HotcoldError(f"{where}: found {safe_text(type(data).__name__)}, allowed: a JSON object of figures, such "
                           "as hotcold doctor --json prints under \"hardware\"")  # fmt: skip
    if isinstance(data.get("hardware"), dict):  # all that hotcold doctor --json prints
        data = data["hardware"]
    return _from_fields(data, where)


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a field is given twice")
    return out


def _from_fields(data: dict[str, Any], where: str) -> Hardware:
    fields = dict(data)
    base = None
    if "preset" in fields:
        name = fields.pop("preset")
        base = find_preset(name) if isinstance(name, str) else None
        if base is None:
            raise HotcoldError(f"{where}: preset {_shown(name)} is unknown, choose from {', '.join(PRESETS)}")
    known = {item.name: item for item in dataclasses.fields(Hardware)}
    for field in fields:
        if field not in known:
            raise HotcoldError(f"{where}: field {safe_text(field, 60)!r} is unknown, allowed: preset, "
                               f"{', '.join(known)}")  # fmt: skip
    missing = [n for n, item in known.items() if item.default is dataclasses.MISSING and n not in fields]
    if missing and base is None:
        raise HotcoldError(f"{where}: field {missing[0]!r} is missing (or give \"preset\")")
    try:
        return Hardware(**fields) if base is None else dataclasses.replace(base, **fields)
    except HotcoldError as e:
        raise HotcoldError(f"{where}: {e}") from None


def load_hardware(text: str, option: str = "--hardware") -> Hardware:
    """FILE|PRESET, as --hardware and --simulate take it."""
    preset = find_preset(text)
    if preset is not None:
        return preset
    shown = safe_text(text, 200)
    path = Path(text)
    try:
        if not path.exists():
            raise HotcoldError(f"{option} {shown}: neither a file nor a preset, presets are {', '.join(PRESETS)}")
        if not path.is_file():
            raise HotcoldError(f"{option} {shown}: not a regular file")
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE + 1)
    except (OSError, ValueError) as e:
        raise HotcoldError(f"{option} {shown}: cannot be read: {getattr(e, 'strerror', None) or e}") from None
    return from_json(raw, f"{option} {shown}")


def save_hardware(path: Path, hardware: Hardware) -> None:
    """Write the JSON, whole or not at all. Raises HotcoldError."""
    with replacing(path, force=True) as file:
        file.write(to_json(hardware).encode() + b"\n")


# ---- the cache of what was measured


def cache_path(signature: Sequence[object], folder: Path | None = None) -> Path:
    """Where the figures of the machine with this signature (CPU, cores, memory, cards) are kept."""
    if folder is None:
        import platformdirs

        folder = Path(platformdirs.user_cache_dir("hotcold"))
    digest = hashlib.sha256(repr((CACHE_VERSION, *signature)).encode()).hexdigest()[:16]
    return folder / f"hardware-{digest}.json"


def load_cached(path: Path) -> Hardware | None:
    """Figures measured before; None where there are none, or none that can be used."""
    try:
        with path.open("rb") as file:
            return from_json(file.read(_MAX_FILE + 1), str(path))
    except (OSError, HotcoldError):
        return None


def save_cached(path: Path, hardware: Hardware) -> bool:
    """Keep the figures where that is possible; False where it is not (a read-only home is no error)."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_hardware(path, hardware)
    except (OSError, HotcoldError):
        return False
    return True
