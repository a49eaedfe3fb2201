"""Which neurons go to the GPU: the integer programs of placement. Pure functions.

In: layers, seconds per byte, bytes of memory. Out: Solution, per layer how many of its first neurons are hot and
whether all its key rows are on the GPU. Next: plan_vram.py.

paper  the PowerInfer paper's program: the most activations on the GPU. A layer has none there, or enough of them that
       what the GPU saves covers one synchronisation.
time   the least expected time per token: sum over layers of max(GPU, CPU) + t_sync * P(a cold neuron fires).

Both first relax the memory limit with one price per byte. That gives a bound, a good first solution, and the proof
that most choices cannot be part of a better one; HiGHS solves what is left exactly. So 80 layers take seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hotcold.placement.choices import BATCH, Choices, Layer, Problem, Rates, make_problem, minimum_neurons
from hotcold.runtime.errors import HotcoldError

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


@dataclass(frozen=True)
class Solution:
    hot: tuple[int, ...]
    keys: tuple[bool, ...]
    objective: float  # paper: activations per token on the GPU; time: seconds of all FFNs
    bound: float  # no solution is better than this
    status: str  # "optimal", or what stopped the search
    used: int  # bytes on the GPU

    @property
    def gap(self) -> float:
        """Distance to the bound, relative to the objective."""
        return abs(self.bound - self.objective) / max(abs(self.objective), 1e-300)


def solve(
    layers: Sequence[Layer], rates: Rates, objective: str, *, gpu_bytes: int, cpu_bytes: int | None = None,
    batch: int = BATCH, time_limit: float = 8.0,
) -> Solution:  # fmt: skip
    """The best placement of FFN rows in `gpu_bytes` of VRAM and, if given, `cpu_bytes` of RAM for the cold rows.

    Never worse than greedy(). Raises HotcoldError where no placement fits.
    """
    return solve_problem(make_problem(layers, rates, objective, gpu_bytes, cpu_bytes, batch), cpu_bytes, time_limit)


def solve_problem(p: Problem, cpu_bytes: int | None, time_limit: float) -> Solution:
    """The same for a problem that is made already. cpu_bytes: for the message if nothing fits."""
    price, bound = _price(p)
    picked = _greedy(p)
    if picked is not None:
        _exchange(p, picked)
    cost = math.inf if picked is None else p.cost(picked)
    status = "optimal"
    if cost - bound > 1e-12 * abs(bound):
        program = _paper_program if p.objective == "paper" else _choice_program
        found, status, least = program(p, _worth_keeping(p, price, cost - bound), time_limit)
        bound = max(bound, min(least, cost))
        if found is not None and p.floor <= p.size(found) <= p.capacity and p.cost(found) < cost:
            picked = found
    if picked is None:
        raise HotcoldError(f"{_in_words(cpu_bytes)} of RAM and {_in_words(p.capacity)} of VRAM cannot hold the FFN's "
                           f"{_in_words(sum(layer.row * layer.n for layer in p.layers))} of rows")  # fmt: skip
    return _solution(p, picked, bound, status)


def greedy(
    layers: Sequence[Layer], rates: Rates, objective: str, *, gpu_bytes: int, cpu_bytes: int | None = None,
    batch: int = BATCH,
) -> Solution | None:  # fmt: skip
    """The first solution that solve() improves on: best gain per byte first; None where it finds nothing that fits."""
    p = make_problem(layers, rates, objective, gpu_bytes, cpu_bytes, batch)
    picked = _greedy(p)
    return None if picked is None else _solution(p, picked, _price(p)[1], "greedy")


# ---- one price per byte: bound, greedy, pruning


def _hull(c: Choices) -> np.ndarray:
    """Indices of the lower convex hull of (size, cost), from the smallest size to the least cost."""
    order = _pareto(c)
    size, cost = c.size[order].tolist(), c.cost[order].tolist()
    hull: list[int] = []
    for i in range(len(order)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (cost[b] - cost[a]) * (size[i] - size[a]) < (cost[i] - cost[a]) * (size[b] - size[a]):
                break
            hull.pop()
        hull.append(i)
    return order[hull]


def _steps(p: Problem) -> tuple[list[np.ndarray], list[tuple[float, int, int]]]:
    """-> hulls, and all their steps (gain per byte, layer, position of the hull it leads to), best first."""
    hulls = [_hull(c) for c in p.choices]
    steps = []
    for number, (c, hull) in enumerate(zip(p.choices, hulls, strict=True)):
        rate = -np.diff(c.cost[hull]) / np.diff(c.size[hull])
        steps += [(r, number, k + 1) for k, r in enumerate(rate.tolist())]
    return hulls, sorted(steps, key=lambda step: (-step[0], step[1], step[2]))


def _price(p: Problem) -> tuple[float, float]:
    """-> price per byte at which the memory is just used up, and the bound it gives on the total cost."""
    hulls, steps = _steps(p)
    left = p.capacity - p.size([int(h[0]) for h in hulls])
    price = 0.0
    for rate, number, k in steps:
        left -= int(np.diff(p.choices[number].size[hulls[number][k - 1 : k + 1]])[0])
        if left < 0:
            price = rate
            break
    return price, math.fsum(float((c.cost + price * c.size).min()) for c in p.choices) - price * p.capacity


def greedy_cost(p: Problem) -> float:
    """What the first solution costs; infinity where there is none that fits."""
    picked = _greedy(p)
    return math.inf if picked is None else p.cost(picked)


def relaxed(p: Problem, capacity: Sequence[int]) -> list[float]:
    """capacity[n]: bytes that there are if only the last n layers may use them -> the least cost of those layers, were
    it possible to mix two choices of a layer; infinity where their smallest choices need more."""
    hulls, steps = _steps(p)
    first = [(int(c.size[h[0]]), float(c.cost[h[0]])) for c, h in zip(p.choices, hulls, strict=True)]
    rate, owner = np.array([s[0] for s in steps]), np.array([s[1] for s in steps], np.int64)
    size = np.array([int(np.diff(p.choices[n].size[hulls[n][k - 1 : k + 1]])[0]) for _, n, k in steps], np.int64)
    out = []
    for n, n_bytes in enumerate(capacity):
        own = owner >= len(p.choices) - n
        tail = first[len(first) - n :]
        left = n_bytes - sum(s for s, _ in tail)
        taken = np.clip(left - (np.cumsum(size[own]) - size[own]), 0, size[own])
        out.append(math.fsum(c for _, c in tail) - float(taken @ rate[own]) if left >= 0 else math.inf)
    return out


def _greedy(p: Problem) -> list[int] | None:
    """Hull steps in order of gain per byte while they fit, then the best use of what is left; None if under `floor`."""
    hulls, steps = _steps(p)
    picked = [int(h[0]) for h in hulls]
    left = p.capacity - p.size(picked)
    full: set[int] = set()
    for _, number, k in steps:
        size, to = p.choices[number].size, int(hulls[number][k])
        extra = int(size[to] - size[picked[number]])
        if number in full or extra > left:
            full.add(number)
            continue
        picked[number], left = to, left - extra
    if p.size(picked) < p.floor:  # the CPU cannot hold the rest: fill the GPU
        for number, c in enumerate(p.choices):
            left = _refill(p, picked, number, left, -c.size)
    for _ in range(3):
        before = list(picked)
        for number, c in enumerate(p.choices):
            left = _refill(p, picked, number, left, c.cost, p.size(picked) - p.floor)
        if picked == before:
            break
    return picked if p.size(picked) >= p.floor else None


def _refill(p: Problem, picked: list[int], number: int, left: int, cost: np.ndarray, slack: int = 0) -> int:
    """Give one layer its best choice that fits into what is left (and frees at most `slack`); returns what is left."""
    now = picked[number]
    extra = p.choices[number].size - p.choices[number].size[now]
    best = int(np.where((extra <= left) & (extra >= -slack), cost, np.inf).argmin())
    if cost[best] < cost[now]:
        picked[number] = best
        return left - int(extra[best])
    return left


def _pareto(c: Choices) -> np.ndarray:
    """Indices of the choices that no smaller one equals, by size."""
    order = np.lexsort((c.cost, c.size))
    return order[np.append(True, np.minimum.accumulate(c.cost[order])[:-1] > c.cost[order][1:])]


def _exchange(p: Problem, picked: list[int], rounds: int = 4) -> None:
    """Improve a solution by giving two layers at a time the best pair of choices, until no pair gets better."""
    useful = [_pareto(c) for c in p.choices]
    sizes, costs = ([getattr(c, name)[i] for c, i in zip(p.choices, useful, strict=True)] for name in ("size", "cost"))
    used = p.size(picked)
    for _ in range(rounds):
        improved = False
        for a in range(len(picked)):
            for b in range(a):
                now = sum(int(p.choices[k].size[picked[k]]) for k in (a, b))
                cost = sum(float(p.choices[k].cost[picked[k]]) for k in (a, b))
                partner = np.searchsorted(sizes[b], p.capacity - used + now - sizes[a], side="right") - 1
                total = np.where(partner < 0, np.inf, costs[a] + costs[b][partner])
                best = int(total.argmin())
                size = int(sizes[a][best] + sizes[b][partner[best]])
                if total[best] < cost - 1e-12 * abs(cost) and used - now + size >= p.floor:
                    picked[a], picked[b] = int(useful[a][best]), int(useful[b][partner[best]])
                    used, improved = used - now + size, True
        if not improved:
            return


def _worth_keeping(p: Problem, price: float, slack: float) -> list[np.ndarray]:
    """Masks of the choices that a solution better than the known one may contain: the others alone cost too much."""
    slack += 1e-12 * sum(float(np.abs(c.cost).max()) for c in p.choices)  # for rounding
    masks = []
    for c in p.choices:
        reduced = c.cost + price * c.size
        masks.append(reduced - reduced.min() <= slack)
        if not p.floor:  # with one, a larger choice may be needed although it gains nothing
            masks[-1] &= np.isin(np.arange(len(reduced)), _pareto(c))
    return masks


def _solution(p: Problem, picked: Sequence[int], bound: float, status: str) -> Solution:
    sign = -1.0 if p.objective == "paper" else 1.0
    chosen = list(zip(p.choices, picked, strict=True))
    return Solution(
        tuple(int(c.hot[i]) for c, i in chosen), tuple(bool(c.keys[i]) for c, i in chosen), sign * p.cost(picked),
        sign * min(bound, p.cost(picked)), status, p.size(picked),
    )  # fmt: skip


def _in_words(n_bytes: int | None) -> str:
    return "unlimited" if n_bytes is None else f"{n_bytes / 2**30:.2f} GiB"


# ---- the programs for HiGHS


def _choice_program(
    p: Problem, kept: Sequence[np.ndarray], time_limit: float
) -> tuple[list[int] | None, str, float]:  # fmt: skip
    """Time: one binary per kept choice, exactly one in each layer, their bytes within the limits."""
    from scipy.sparse import csr_matrix, vstack

    index = [np.flatnonzero(k) for k in kept]
    owner = np.repeat(np.arange(len(index)), [len(i) for i in index])
    size, cost = (np.concatenate([getattr(c, name)[i] for c, i in zip(p.choices, index, strict=True)])
                  for name in ("size", "cost"))  # fmt: skip
    one = csr_matrix((np.ones(len(owner)), (owner, np.arange(len(owner)))))
    unit = _unit(size)
    rows = vstack([one, csr_matrix(size // unit)]).tocsr()
    ones = np.ones(len(index))
    low, high = np.append(ones, -(-p.floor // unit)), np.append(ones, p.capacity // unit)
    least = np.array([cost[owner == number].min() for number in range(len(index))])
    z, status, bound = _milp(cost - least[owner], rows, low, high, np.zeros(len(owner)), np.ones(len(owner)),
                             time_limit)  # fmt: skip
    if z is None:
        return None, status, -math.inf
    picked = [int(i[z[owner == number].argmax()]) for number, i in enumerate(index)]
    return picked, status, bound + float(least.sum())


def _paper_program(
    p: Problem, kept: Sequence[np.ndarray], time_limit: float
) -> tuple[list[int] | None, str, float]:  # fmt: skip
    """The paper's: a = 1 for a batch on the GPU (else it is the CPU's), y = 1 for a layer that has any there.

    a is fixed where every kept choice agrees. A set of batches is then read as the prefix of as many neurons: it is
    as large, and holds at least as many activations.
    """
    from scipy.sparse import csr_matrix

    n_layer, at = len(p.layers), 0
    cost, counts, size, low, high, entries = [], [], [], [], [], []
    for number, (layer, c, keep) in enumerate(zip(p.layers, p.choices, kept, strict=True)):
        n_a = -(-layer.n // p.batch)
        batch = np.arange(n_a)
        count = np.minimum(p.batch, layer.n - p.batch * batch)
        first, last = int(c.hot[keep].min()) // p.batch, -(-int(c.hot[keep].max()) // p.batch)
        stand_in = (count < p.batch) & (last > 0)  # a smaller last batch may take the place of any other
        cost.append(np.append(-np.add.reduceat(layer.frequency, p.batch * batch), 0.0))
        counts.append(count)
        size.append(np.append(count * layer.row, 0))
        low.append(np.append(batch < first - int(stand_in[-1]), False))
        high.append(np.append((batch < last) | stand_in, True))
        n_min = min(minimum_neurons(layer, p.rates), layer.n + 1)  # more than there are: y must be 0
        for line, factor in ((2 * number, n_min), (2 * number + 1, layer.n)):  # sum >= C_l y;  sum <= K y
            entries.append((np.full(n_a + 1, line), np.arange(at, at + n_a + 1), np.append(count, -factor)))
        at += n_a + 1
    sizes = np.concatenate(size)
    unit = _unit(sizes)
    entries.append((np.full(at, 2 * n_layer), np.arange(at), sizes // unit))
    row, column, value = (np.concatenate([e[k] for e in entries]) for k in range(3))
    least = np.append(np.tile([0.0, -np.inf], n_layer), -(-p.floor // unit))
    most = np.append(np.tile([np.inf, 0.0], n_layer), p.capacity // unit)
    z, status, bound = _milp(np.concatenate(cost), csr_matrix((value, (row, column))), least, most,
                             np.concatenate(low), np.concatenate(high), time_limit)  # fmt: skip
    if z is None:
        return None, status, -math.inf
    picked, at = [], 0
    for c, count in zip(p.choices, counts, strict=True):
        picked.append(int(np.searchsorted(c.hot, int(z[at : at + len(count)] @ count))))
        at += len(count) + 1
    return picked, status, bound


def _unit(sizes: np.ndarray) -> int:
    """Bytes are handed over in this unit, which divides them all."""
    return int(np.gcd.reduce(sizes)) or 1


def _milp(
    cost: np.ndarray, rows: csr_matrix, least: np.ndarray, most: np.ndarray, low: np.ndarray, high: np.ndarray,
    time_limit: float,
) -> tuple[np.ndarray | None, str, float]:  # fmt: skip
    """HiGHS on binaries within [low, high] -> the best it found, rounded (or None), status, bound on the cost."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    scale = 1e4 / max(float(np.abs(cost).max()), 1e-300)  # its gap of 1e-6 must be far below what one choice changes
    result = milp(cost * scale, constraints=LinearConstraint(rows, least, most), integrality=np.ones(len(cost)),
                  bounds=Bounds(low, high), options={"time_limit": time_limit, "mip_rel_gap": 1e-9})  # fmt: skip
    bound = getattr(result, "mip_dual_bound", None)
    status = {0: "optimal", 1: f"time limit of {time_limit:g} s"}.get(result.status, "not solved by HiGHS")
    x = None if result.x is None else np.rint(result.x).astype(np.int64)
    return x, status, -math.inf if bound is None or not math.isfinite(bound) else bound / scale
