"""What each layer's FFN can do on GPU and CPU, and what each choice costs in bytes and seconds. Pure functions.

In: per layer the neurons' frequencies and row sizes, seconds per byte, bytes of memory. Out: Problem, the choices of
every layer. Next: solve.py, which picks one per layer.

Neurons are sorted by frequency, so a layer's hot neurons are a prefix and its choices few: 0, 64, 128, ... neurons,
with all its key rows on the GPU or without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hotcold.runtime.errors import HotcoldError

OBJECTIVES = ("paper", "time")
BATCH = 64  # neurons that are placed together


@dataclass(frozen=True)
class Rates:
    """Seconds per byte read: `read` whole matrices one row after the other, `rows` chosen rows; t_sync in seconds."""

    cpu_read: float
    cpu_rows: float
    gpu_read: float
    gpu_rows: float
    t_sync: float


@dataclass(frozen=True)
class Layer:
    """The FFN of one layer. `decide` and `fire` are what a token reads, `key_row` and `value_row` what is stored."""

    frequency: np.ndarray  # f64 [n]: share of tokens a neuron fires on, descending
    key_row: int  # bytes per neuron
    value_row: int  # bytes per neuron: up row and down column, or the down column
    decide: np.ndarray  # f64 [n]: expected bytes read to learn whether the neuron fires (all of key_row in exact mode)
    fire: float  # bytes read of a neuron that fires
    usable: bool = True  # the layer's attention is on the GPU; without it the FFN is the CPU's
    decide_scattered: bool = False  # what `decide` reads are chosen rows (a predictor's candidates), not whole matrices
    fire_scattered: bool = True  # so are the value rows
    split_keys: bool = True  # the GPU may hold all key rows without the values
    own_keys: bool = True  # hot neurons may bring their own key rows only
    p_cold: np.ndarray | None = field(default=None)  # f64 [n + 1]: chance that the CPU has work when n are hot

    @property
    def n(self) -> int:
        return len(self.frequency)

    @property
    def row(self) -> int:
        return self.key_row + self.value_row


@dataclass(frozen=True)
class Times:
    """Expected seconds of a layer's FFN. before: key rows on the GPU; then GPU and CPU side by side; then the wait."""

    before: float
    gpu: float
    cpu: float
    p_cold: float
    sync: float

    @property
    def total(self) -> float:
        return self.before + max(self.gpu, self.cpu) + self.sync


@dataclass(frozen=True)
class Choices:
    """What one layer can do; arrays of one length. Smaller cost is better for both objectives."""

    hot: np.ndarray  # i64
    keys: np.ndarray  # bool
    size: np.ndarray  # i64, bytes on the GPU
    cost: np.ndarray  # f64


@dataclass(frozen=True)
class Problem:
    layers: Sequence[Layer]
    rates: Rates
    objective: str
    batch: int
    choices: list[Choices]
    capacity: int  # bytes on the GPU
    floor: int  # bytes that must be there, because the CPU cannot hold them

    def size(self, picked: Sequence[int]) -> int:
        return sum(int(c.size[i]) for c, i in zip(self.choices, picked, strict=True))

    def cost(self, picked: Sequence[int]) -> float:
        return math.fsum(float(c.cost[i]) for c, i in zip(self.choices, picked, strict=True))


def check_layers(layers: Sequence[Layer]) -> None:
    """Raise HotcoldError, naming the layer, for numbers that are not frequencies in descending order."""
    for number, layer in enumerate(layers):
        f = layer.frequency
        if f.ndim != 1 or not len(f):
            raise HotcoldError(f"layer {number}: frequencies have shape {list(f.shape)}, expected one per neuron")
        bad = ~((f >= 0) & (f <= 1))  # NaN too
        if bad.any():
            at = int(bad.argmax())
            raise HotcoldError(f"layer {number}: frequency {f[at]} of neuron {at} is not a share from 0 to 1")
        if (np.diff(f) > 0).any():
            raise HotcoldError(f"layer {number}: neurons are not in descending order of frequency: sort the file first "
                               "(hotcold place --profile)")  # fmt: skip
        for what, values, n in (("decide", layer.decide, layer.n), ("p_cold", layer.p_cold, layer.n + 1)):
            if values is not None and (values.shape != (n,) or not (np.isfinite(values) & (values >= 0)).all()):
                raise HotcoldError(f"layer {number}: {what} must be {n} finite numbers of at least 0")


def chance_of_cold(chance: np.ndarray) -> np.ndarray:
    """[n + 1]: chance that any neuron from i on has work for the CPU, if they are independent."""
    with np.errstate(divide="ignore"):
        none = np.cumsum(np.log1p(-np.minimum(chance, 1.0))[::-1])[::-1]
    return np.append(-np.expm1(none), 0.0)


def layer_times(layer: Layer, rates: Rates, hot: int, keys: bool) -> Times:
    """Expected seconds of one layer's FFN per token."""
    before, gpu, cpu, p = (float(v[0]) for v in _times(layer, rates, np.array([hot]), keys))
    return Times(before, gpu, cpu, p, rates.t_sync * p)


def minimum_neurons(layer: Layer, rates: Rates) -> float:
    """C_l: fewest neurons on the GPU whose gain over the CPU covers t_sync; infinity if the GPU is not faster."""
    gain = layer.row * (rates.cpu_rows - rates.gpu_rows)
    return math.ceil(rates.t_sync / gain - 1e-9) if gain > 0 else math.inf


def make_problem(
    layers: Sequence[Layer], rates: Rates, objective: str, gpu_bytes: int, cpu_bytes: int | None, batch: int
) -> Problem:  # fmt: skip
    if objective not in OBJECTIVES:
        raise HotcoldError(f"objective {objective!r} is unknown, choose from {', '.join(OBJECTIVES)}")
    if gpu_bytes < 0 or cpu_bytes is not None and cpu_bytes < 0:
        raise HotcoldError(f"memory for neurons is {min(gpu_bytes, cpu_bytes or 0)} bytes, must be at least 0")
    check_layers(layers)
    floor = 0 if cpu_bytes is None else max(0, sum(layer.row * layer.n for layer in layers) - cpu_bytes)
    choices = [_choices(layer, rates, objective, batch) for layer in layers]
    return Problem(layers, rates, objective, batch, choices, gpu_bytes, floor)


def _grid(n: int, batch: int) -> np.ndarray:
    """Sums of batches, the last of which may be smaller."""
    whole = np.arange(0, n + 1, batch)
    rest = n % batch
    return np.unique(np.concatenate([whole, whole + rest])) if rest else whole


def _choices(layer: Layer, rates: Rates, objective: str, batch: int) -> Choices:
    hot = _grid(layer.n, batch) if layer.usable else np.zeros(1, np.int64)
    if objective == "paper":
        if not layer.own_keys:
            raise HotcoldError("objective 'paper' places whole neurons, but this model's key rows are stored by input "
                               "column: use --objective time")  # fmt: skip
        hot = hot[(hot == 0) | (hot >= minimum_neurons(layer, rates))]
        activations = np.append(0.0, np.cumsum(layer.frequency))
        return Choices(hot, np.zeros(len(hot), bool), hot * layer.row, -activations[hot])
    parts = []
    for keys in (False, True):
        if keys and not (layer.usable and layer.split_keys):
            continue
        some = hot if keys or layer.own_keys else hot[:1]
        before, gpu, cpu, p = _times(layer, rates, some, keys)
        size = some * layer.value_row + (layer.n if keys else some) * layer.key_row
        parts.append(Choices(some, np.full(len(some), keys), size, before + np.maximum(gpu, cpu) + rates.t_sync * p))
    return Choices(*(np.concatenate([getattr(p, name) for p in parts]) for name in ("hot", "keys", "size", "cost")))


def _times(layer: Layer, rates: Rates, hot: np.ndarray, keys: bool) -> tuple[np.ndarray, ...]:
    """Seconds [len(hot)] before, on the GPU, on the CPU, and the chance that the GPU waits for the CPU."""
    fires = np.append(0.0, np.cumsum(layer.frequency)) * layer.fire
    decides = np.append(0.0, np.cumsum(layer.decide))
    seconds = read_seconds(layer, rates, keys, (fires[hot], fires[-1] - fires[hot]),
                           (decides[hot], decides[-1] - decides[hot]))  # fmt: skip
    if not layer.usable:
        return (*seconds, np.zeros(len(hot)))
    # Who has the key rows learns what fires, so the GPU waits whenever the CPU has anything to look at.
    chance = layer.frequency if keys else layer.decide / layer.key_row
    p_cold = chance_of_cold(chance) if layer.p_cold is None else layer.p_cold
    return (*seconds, np.where(hot < layer.n, p_cold[hot], 0.0))


def read_seconds(
    layer: Layer, rates: Rates, keys: bool, fires: tuple[np.ndarray, np.ndarray],
    decides: tuple[np.ndarray, np.ndarray],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Seconds before, on the GPU, on the CPU, from the bytes that the hot and the cold neurons read.

    fires, decides: (hot, cold), expected or of a token, any shape.
    """
    cpu_decide, gpu_decide = ((rates.cpu_rows, rates.gpu_rows) if layer.decide_scattered
                              else (rates.cpu_read, rates.gpu_read))  # fmt: skip
    cpu_fire, gpu_fire = ((rates.cpu_rows, rates.gpu_rows) if layer.fire_scattered
                          else (rates.cpu_read, rates.gpu_read))  # fmt: skip
    zero = np.zeros(np.shape(fires[0]))
    if not layer.usable:
        return zero, zero, (decides[0] + decides[1]) * cpu_decide + (fires[0] + fires[1]) * cpu_fire
    gpu, cpu = fires[0] * gpu_fire, fires[1] * cpu_fire
    if keys:
        return zero + (decides[0] + decides[1]) * gpu_decide, gpu, cpu
    return zero, gpu + decides[0] * gpu_decide, cpu + decides[1] * cpu_decide
