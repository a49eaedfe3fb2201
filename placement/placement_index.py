"""The placement index of a file: solved budgets, kept as metadata.

In: Placements, or an open GGUF. Out: metadata for rewrite.py, or Placements with bytes and times computed anew. Next:
choose.py, which looks there first; report.py, which draws them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gguf import GGUFValueType

from hotcold.convert.model import Metadata, array, string
from hotcold.placement.choices import OBJECTIVES
from hotcold.placement.hardware import Hardware, from_json, to_json
from hotcold.placement.identity import model_id
from hotcold.placement.plan_model import MAX_N_CTX, in_context, read_model
from hotcold.placement.plan_vram import SHARED, Placement, evaluate, to_the_byte
from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.facts import read_counts, read_placement_facts
from hotcold.runtime.gguf_file import GGUFFile, safe_text
from hotcold.runtime.gpu.placement import KINDS, GpuPlacement, LayerPlacement
from hotcold.runtime.keys import Keys, show
from hotcold.runtime.plan import SPARSITY_MODES
from hotcold.runtime.weights import load_weights


def placement_metadata(model: str, placements: Sequence[Placement]) -> Metadata:
    """hotcold.placement.*, for rewrite(). model: placement/identity.py of the file."""
    u32, text = GGUFValueType.UINT32, GGUFValueType.STRING

    def flat(rows: Sequence[Sequence[int]]) -> list[int]:
        return [int(value) for row in rows for value in row]

    return {
        schema.KEY_PLACEMENT_MODEL: string(model),
        schema.KEY_PLACEMENT_BUDGET: array([p.budget for p in placements], GGUFValueType.UINT64),
        schema.KEY_PLACEMENT_N_CTX: array([p.n_ctx for p in placements], u32),
        schema.KEY_PLACEMENT_PLAN: array([p.kind for p in placements], text),
        schema.KEY_PLACEMENT_SPARSITY: array([p.sparsity for p in placements], text),
        schema.KEY_PLACEMENT_OBJECTIVE: array([p.objective for p in placements], text),
        schema.KEY_PLACEMENT_HARDWARE: array([to_json(p.hardware) for p in placements], text),
        schema.KEY_PLACEMENT_HOT: array(flat([p.hot for p in placements]), u32),
        schema.KEY_PLACEMENT_KEYS_ON_GPU: array(flat([p.keys_on_gpu for p in placements]), u32),
        schema.KEY_PLACEMENT_LAYER_ON_GPU: array(flat([p.layer_on_gpu for p in placements]), u32),
    }


def read_placements(file: GGUFFile, config: ModelConfig) -> list[Placement]:
    """The placements a file has, with times and bytes computed anew; empty where there are none.

    Raises HotcoldError for an index that is malformed, of another model, or does not fit its own budget.
    """
    facts = read_placement_facts(file, config)
    if not facts:
        return []
    keys, n = Keys(file), len(facts)
    if (model := keys.text(schema.KEY_PLACEMENT_MODEL)) != model_id(file, config):
        raise keys.error(f"key '{schema.KEY_PLACEMENT_MODEL}'", show(model),
                         "this model's id: the placement is of another model, run hotcold place again")  # fmt: skip
    machines = _texts(keys, schema.KEY_PLACEMENT_HARDWARE, n)
    kinds = _words(keys, schema.KEY_PLACEMENT_PLAN, n, KINDS)
    modes = _words(keys, schema.KEY_PLACEMENT_SPARSITY, n, [mode for mode in SPARSITY_MODES if mode != "auto"])
    objectives = _words(keys, schema.KEY_PLACEMENT_OBJECTIVE, n, OBJECTIVES)
    flags = {key: np.array(keys.per_layer(key, n * config.n_layer, 0, 1, "iu"), bool).reshape(n, -1).tolist()
             for key in (schema.KEY_PLACEMENT_KEYS_ON_GPU, schema.KEY_PLACEMENT_LAYER_ON_GPU)}  # fmt: skip
    counts = read_counts(file, config)
    if any(kind in SHARED for kind in kinds) and (counts is None or not counts.sorted):
        raise keys.error("ffn_neuron_count", "nothing" if counts is None else "counts that are not sorted",
                         "descending counts wherever there is a placement")  # fmt: skip
    out, token, weights = [], read_model(file, config, n_ctx=1), load_weights(file, config)
    for i, fact in enumerate(facts):
        hardware = _machine(keys, machines[i], i)
        on_gpu, all_keys = (flags[key][i] for key in (schema.KEY_PLACEMENT_LAYER_ON_GPU,
                                                      schema.KEY_PLACEMENT_KEYS_ON_GPU))  # fmt: skip
        if not 1 <= fact.n_ctx <= MAX_N_CTX:
            raise keys.error(f"key '{schema.KEY_PLACEMENT_N_CTX}'", fact.n_ctx, f"1 to {MAX_N_CTX}")
        for layer in range(config.n_layer):
            if not on_gpu[layer] and (fact.hot[layer] or all_keys[layer] or any(on_gpu[:layer])):
                raise keys.error(f"key '{schema.KEY_PLACEMENT_LAYER_ON_GPU}'", f"0 for layer {layer}",
                                 "1 for layers with neurons or keys on the GPU and for all after one")  # fmt: skip
        if modes[i] not in token.modes:
            raise keys.error(f"key '{schema.KEY_PLACEMENT_SPARSITY}'", show(modes[i]), ", ".join(token.modes))
        layers = tuple(LayerPlacement(on, hot, every) for on, hot, every
                       in zip(on_gpu, fact.hot, all_keys, strict=True))  # fmt: skip
        gpu = GpuPlacement(kinds[i], layers, fact.budget, fact.n_ctx)
        plan = evaluate(in_context(token, config, fact.n_ctx), hardware, fact.budget, kinds[i], modes[i],
                        objectives[i], gpu)  # fmt: skip
        plan = to_the_byte(plan, config, weights)
        if plan.used > fact.budget:
            raise keys.error(f"key '{schema.KEY_PLACEMENT_BUDGET}'", f"{fact.budget} bytes",
                             f"at least the {plan.used} bytes that this placement takes")  # fmt: skip
        out.append(plan)
    return out


def _machine(keys: Keys, text: str, entry: int) -> Hardware:
    where = f"key '{schema.KEY_PLACEMENT_HARDWARE}' entry {entry}"
    hardware = from_json(text.encode("utf-8", "surrogateescape"), f"{safe_text(str(keys.file.path))}: {where}")
    if not hardware.has_gpu:
        raise keys.error(where, "a machine without GPU", "one with gpu_bandwidth and vram above 0")
    return hardware


def _texts(keys: Keys, key: str, n: int) -> list[str]:
    value = keys.raw(key, f"{n} strings")
    if not isinstance(value, list) or len(value) != n:
        raise keys.error(f"key '{key}'", show(value), f"{n} strings")
    return value


def _words(keys: Keys, key: str, n: int, allowed: Sequence[str]) -> list[str]:
    values = _texts(keys, key, n)
    for value in values:
        if value not in allowed:
            raise keys.error(f"key '{key}'", show(value), ", ".join(allowed))
    return values
