"""Which of the four plans a model runs in: each solved for the budget, the fastest that is exact taken.

In: an open GGUF, Hardware, a budget. Out: Choice, whose GpuPlacement the engine takes. Next: runtime/cli.py runs it,
plan_command.py prints it.

A placement that the file has for the same budget, context and machine is used as it is; `hotcold place` made it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hotcold.placement.hardware import Hardware
from hotcold.placement.placement_index import read_placements
from hotcold.placement.plan_model import PlanModel, read_model
from hotcold.placement.plan_vram import CPU_ONLY, SHARED, Placement, plan, to_the_byte
from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import GGUFFile
from hotcold.runtime.gpu.placement import KINDS, GpuPlacement
from hotcold.runtime.inspect import format_bytes
from hotcold.runtime.keys import Keys
from hotcold.runtime.plan import choose_sparsity
from hotcold.runtime.weights import load_weights

if TYPE_CHECKING:
    from hotcold.runtime.gpu.choose import Place, Wanted

AUTO = "auto"
SOLVE_SECONDS = 0.4  # of a plan that a user waits for; the gap that is left is told


@dataclass(frozen=True)
class Candidate:
    """One plan for the budget."""

    kind: str  # of KINDS, or CPU_ONLY
    placement: Placement | None
    reason: str = ""  # why there is none


@dataclass(frozen=True)
class Choice:
    """What a model runs in."""

    placement: Placement
    why: str  # one line: which plan, and why this one
    notes: tuple[str, ...]  # what else a user must know
    candidates: tuple[Candidate, ...] = ()  # those that were looked at; empty: the file's own placement

    @property
    def gpu(self) -> GpuPlacement:
        return self.placement.for_engine

    @property
    def sparsity(self) -> str:
        """What --sparsity auto becomes with this placement."""
        return self.placement.sparsity


def choose_placement(
    file: GGUFFile, config: ModelConfig, budget: int, n_ctx: int, hardware: Hardware, kind: str = AUTO, *,
    sparsity: str = AUTO, n_layers: int | None = None, every: bool = False,
) -> Choice:  # fmt: skip
    """The placement a model runs with.

    kind: of gpu/placement.py, or auto. sparsity: as --sparsity. n_layers: exactly so many layers on the GPU. every:
    also solve the plans that cannot be chosen, to compare with. Raises HotcoldError for what the model or the machine
    cannot have; a budget that is too small for any plan is a Choice of the CPU, unless a plan was named.
    """
    kept: Placement | None = None
    notes: list[str] = []
    kind = "layers" if n_layers is not None and kind == AUTO else kind
    if n_layers is None:
        kept, notes = _kept(file, config, budget, n_ctx, hardware, kind, sparsity)
        if kept is not None and not every:
            return Choice(kept, _own(kept, config, sparsity), kept.notes)
    model = read_model(file, config, n_ctx)
    weights = load_weights(file, config)
    found = [c if c.placement is None else replace(c, placement=to_the_byte(c.placement, config, weights))
             for c in candidates(model, hardware, budget, kind, sparsity, n_layers=n_layers, every=every)]  # fmt: skip
    placement, why = pick(found, kind, sparsity, budget) if kept is None else (
        kept, _own(kept, config, sparsity))  # fmt: skip
    more = [*model.notes, *notes, *placement.notes]
    return Choice(placement, why, tuple(dict.fromkeys(more)), tuple(found))


def placer(notify: Callable[[str], None]) -> Place:
    """What runtime/gpu/choose.py asks for a placement, on this machine's figures; notify gets what a user must know."""

    def place(wanted: Wanted) -> tuple[GpuPlacement, str]:
        from hotcold.placement.machine import machine_hardware

        figures = machine_hardware(say=lambda what: notify(f"measuring this machine, once: {what}"))
        if not figures.has_gpu:
            raise HotcoldError(f"{wanted.device.name}: its speed could not be measured, so nothing can be planned: run "
                               "hotcold doctor, or say what is on the GPU by --gpu-layers")  # fmt: skip
        hardware = replace(figures, gpu_context=wanted.device.context_bytes)
        budget = min(wanted.budget, hardware.vram)
        choice = choose_placement(wanted.file, wanted.config, budget, wanted.n_ctx, hardware, wanted.kind,
                                  sparsity=wanted.sparsity)  # fmt: skip
        for line in (choice.why, *choice.notes):
            notify(f"GPU: {line}")
        return choice.gpu, choice.sparsity

    return place


def _own(kept: Placement, config: ModelConfig, sparsity: str) -> str:
    dense = sparsity == AUTO and kept.sparsity == "dense" and choose_sparsity(config, AUTO)[0] != "dense"
    why = ", dense instead of sparse: hotcold place found that to be faster" if dense else ""
    return f"plan {kept.kind}: the file's own placement for this budget{why}"


def solve_budget(model: PlanModel, hardware: Hardware, budget: int, kind: str, *, objective: str) -> Placement:
    """The placement `hotcold place` keeps: of the kind asked for, or the fastest that is exact."""
    if objective == "paper" and kind == AUTO:
        kind = "predict" if model.predicts else "keys"
    if kind != AUTO:
        solved = [plan(model, hardware, budget, kind, mode, objective=objective) for mode in _modes(model, kind, AUTO)]
        return _fastest_mode(solved)
    found = [c for c in candidates(model, hardware, budget, AUTO, AUTO, time_limit=8.0) if c.kind != CPU_ONLY]
    best = _fastest(found)
    if best is None:
        raise HotcoldError(_why_none(found))
    return best


def candidates(
    model: PlanModel, hardware: Hardware, budget: int, kind: str = AUTO, sparsity: str = AUTO, *,
    n_layers: int | None = None, every: bool = False, time_limit: float = SOLVE_SECONDS,
) -> list[Candidate]:  # fmt: skip
    """The plans that can be chosen, and the CPU alone last; with `every` all four."""
    out = []
    for one in (*KINDS, CPU_ONLY):
        if not every and kind not in (AUTO, one):
            continue
        if not every and one == "predict" and kind == AUTO and sparsity != "predict":
            continue
        wanted = n_layers if one == kind else None
        placements, reasons = [], []
        modes = _modes(model, one, sparsity)
        for mode in modes if wanted is None else modes[:1]:  # by number: the engine then asks no solver
            try:
                placements.append(plan(model, hardware, budget, one, mode, n_layers=wanted, time_limit=time_limit))
            except HotcoldError as e:
                reasons.append(str(e))
        best = _fastest_mode(placements) if placements else None
        reason = reasons[0] if reasons else f"not for --sparsity {sparsity}"
        out.append(Candidate(one, best, "" if best is not None else reason))
    return out


def pick(found: Sequence[Candidate], kind: str, sparsity: str, budget: int) -> tuple[Placement, str]:
    """-> the plan asked for, or the fastest that computes what `sparsity` says; one line of why."""
    by_kind = {c.kind: c for c in found}
    if kind != AUTO:
        one = by_kind[kind]
        if one.placement is None:
            raise HotcoldError(f"--gpu-plan {kind}: {one.reason}")
        return one.placement, f"plan {kind}: asked for"
    exact = [c for c in found if sparsity == "predict" or c.placement is None or c.placement.sparsity != "predict"]
    best = _fastest(exact)
    if best is None:
        raise HotcoldError(_why_none(exact))
    if best.kind == CPU_ONLY:
        others = [c for c in exact if c.kind != CPU_ONLY]
        if all(c.placement is None for c in others):
            return best, f"nothing on the GPU: {_why_none(others).removeprefix('GPU: ')}"
        return best, f"nothing on the GPU: the CPU alone is faster than any plan for {format_bytes(budget)}"
    rest = ", ".join(f"{c.kind} {c.placement.tokens_per_second:.1f}" for c in exact
                     if c.placement is not None and c.kind != best.kind)  # fmt: skip
    compared = f" ({best.tokens_per_second:.1f} tokens/s expected; {rest})" if rest else ""
    exactly = "" if sparsity == "predict" else " that is exact"
    return best, f"plan {best.kind}: the fastest{exactly}{compared}"


def _fastest_mode(solved: Sequence[Placement]) -> Placement:
    """The fastest of one kind's; the first where several are as fast. Where it skips no neurons, a note says why."""
    best = min(solved, key=lambda p: p.t_token)
    sparse = next((p for p in solved if p.sparsity == "exact"), None)
    if best.sparsity != "dense" or sparse is None:
        return best
    note = (f"dense instead of sparse: {best.tokens_per_second:.1f} tokens/s are expected, where neurons that are off "
            f"are skipped {sparse.tokens_per_second:.1f}: so many fire that reading all rows in order takes less time")
    return replace(best, notes=(note, *best.notes))


def _fastest(found: Sequence[Candidate]) -> Placement | None:
    """The first of KINDS where several are as fast."""
    placements = [c.placement for c in found if c.placement is not None]
    least = min((p.t_token for p in placements), default=0.0)
    return next((p for p in placements if p.t_token <= least * (1 + 1e-9)), None)


def _why_none(found: Sequence[Candidate]) -> str:
    """The reason that tells a user most: of the plan that needs least memory."""
    reasons = {c.kind: c.reason for c in found if c.placement is None}
    return next((reasons[kind] for kind in ("keys", "predict", "layers", "all") if kind in reasons), "no plan fits")


def _modes(model: PlanModel, kind: str, sparsity: str) -> tuple[str, ...]:
    """Ways to compute the FFN that a plan is solved for; the fastest is taken."""
    if kind in SHARED:
        mode = "predict" if kind == "predict" else "exact"
        # Where the model has no such mode, plan() says why.
        return (mode,) if sparsity in (AUTO, mode) or sparsity == "predict" else ()
    if sparsity != AUTO:
        return (sparsity,)
    modes = tuple(mode for mode in ("exact", "dense") if mode in model.modes)
    return modes[:1] if kind == CPU_ONLY else modes  # the CPU alone always skips what it can


# ---- the file's own placements


def _with_driver(p: Placement, gpu_context: int) -> Placement:
    """What the driver takes is measured when a GPU is opened, after the file was placed."""
    used = p.used - p.hardware.gpu_context + gpu_context
    return replace(p, used=used, hardware=replace(p.hardware, gpu_context=gpu_context))


def _kept(
    file: GGUFFile, config: ModelConfig, budget: int, n_ctx: int, hardware: Hardware, kind: str, sparsity: str
) -> tuple[Placement | None, list[str]]:  # fmt: skip
    """-> the file's placement for just this, if it has one; a note where it has others only."""
    if not Keys(file).has(schema.KEY_PLACEMENT_BUDGET):
        return None, []
    try:
        placements = read_placements(file, config)
    except HotcoldError as e:
        return None, [f"the file's placements cannot be used, solved anew: {e}"]
    exact = sparsity == AUTO and kind != "predict"
    modes = ("exact", "dense") if exact else ("predict",) if sparsity == AUTO else (sparsity,)
    fitting = [p for p in (_with_driver(p, hardware.gpu_context) for p in placements)
               if (p.budget, p.n_ctx, p.hardware) == (budget, n_ctx, hardware) and p.used <= budget
               and kind in (AUTO, p.kind) and p.sparsity in modes]  # fmt: skip
    if fitting:
        return fitting[-1], []
    budgets = ", ".join(f"{format_bytes(p.budget)} at --n-ctx {p.n_ctx}" for p in placements[:4])
    return None, [f"the file's placements ({budgets}) are for another budget, context, plan or machine: solved anew"]
