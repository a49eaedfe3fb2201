"""The operators of a model, and the barriers between them.

The checks here do not share the code that places barriers: they look at every pair of operators, and at the addresses
in the lowered records.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st
from one_op import config as small_config
from small_models import Spec, all_of, write_model

from hotcold.runtime.buffers import Buffers
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.plan import Op, Plan, choose_sparsity, make_plan
from hotcold.runtime.program import Lowering, lower
from hotcold.runtime.weights import load_weights

SPECS = {
    "gated": Spec(biases=True),
    "quantized": Spec(**all_of(Type.Q8_0)),
    "mixed types": Spec(attn=Type.Q4_0, key=Type.F16, value=Type.Q8_0),
    "not gated": Spec(gated=False, activation="relu2"),
    "stock": Spec(layout="stock", activation="silu", **all_of(Type.Q4_0)),
    "stock float": Spec(layout="stock"),
    "opt": Spec(arch="opt", gated=False, biases=True, n_head_kv=4),
    "qwen3": Spec(arch="qwen3", patterns=("free",) * 3, window=8),
}
# Of one token, every thread keeps its own copy of these; of many, tokens are shared out and all buffers are shared.
PRIVATE_OF_ONE_TOKEN = {"h", "hq"}


@pytest.fixture(scope="module", params=SPECS)
def planned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(plan, buffers, token records, block records, names of all tensors) of a small model."""
    path = write_model(tmp_path_factory.mktemp("plan") / "model.gguf", SPECS[request.param])
    with open_gguf(path) as file:
        config = ModelConfig.from_gguf(file)
        weights = load_weights(file, config)
        plan = make_plan(config, weights, "auto")
        buffers = Buffers(config, 3, 64, 32, "f16")
        yield plan, buffers, *lower(plan, buffers), {m.name for m in weights}


def conflicts(a: Op, b: Op, private: set[str]) -> set[str]:
    """Shared buffers that one of two operators writes and the other touches."""
    both = (set(a.writes) & (set(b.reads) | set(b.writes))) | (set(a.reads) & set(b.writes))
    return both - private


def check_barriers(ops: tuple[Op, ...], sync: list[int], private: set[str]) -> None:
    """Between any two operators in conflict lies a barrier, and no barrier is there for nothing."""
    assert sync[-1] == 1  # the run ends when all threads are done
    for i, j in itertools.combinations(range(len(ops)), 2):
        if conflicts(ops[i], ops[j], private):
            assert any(sync[i:j]), f"no barrier between operators {i} ({ops[i].kind}) and {j} ({ops[j].kind})"
    for at in [k for k in range(len(ops) - 1) if sync[k]]:
        start = max((k + 1 for k in range(at) if sync[k]), default=0)
        end = next(k + 1 for k in range(at + 1, len(ops)) if sync[k])
        pairs = itertools.product(range(start, at + 1), range(at + 1, end))
        assert any(conflicts(ops[i], ops[j], private) for i, j in pairs), f"barrier after operator {at} is not needed"


def test_every_hazard_between_threads_is_separated(planned: Any) -> None:
    plan, _, token, block, _ = planned
    check_barriers(plan.token, token["sync"].tolist(), PRIVATE_OF_ONE_TOKEN)
    check_barriers(plan.block, block["sync"].tolist(), {"list"})


def test_barriers_per_layer_are_few(planned: Any) -> None:
    """q k v, rope, attention, its projection, FFN, reduction: what each needs of the other threads is one barrier."""
    plan, _, token, _, _ = planned
    if plan.config.layout == "neuron-split":
        assert all(token["sync"][token["layer"] == layer].sum() <= 6 for layer in range(plan.config.n_layer))


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.sampled_from("abch"), max_size=2, unique=True),
            st.lists(st.sampled_from("abch"), min_size=1, max_size=2, unique=True),
        ),
        min_size=1,
        max_size=12,
    ),
    many=st.booleans(),
)
def test_barriers_of_any_program(steps: list[tuple[list[str], list[str]]], many: bool) -> None:
    """Buffer h is private to each thread when there is one token."""
    ops = tuple(Op("norm", 0, tuple(reads), tuple(writes)) for reads, writes in steps)
    config = small_config()
    plan = Plan(config, "dense", ops, ops)
    sync = Lowering(plan, Buffers(config, 1, 8, 8, "f16"), many).barriers(ops)
    check_barriers(ops, sync, set() if many else PRIVATE_OF_ONE_TOKEN)


def test_declared_buffers_are_the_addresses_in_the_records(planned: Any) -> None:
    """Barriers follow from what operators say they touch, so what they say must be what they do."""
    plan, buffers, token, block, _ = planned
    starts = {area.addr: name for name, area in buffers.shared.items()}
    starts |= {area.addr_b: name for name, area in buffers.shared.items()} | {buffers.marks: "marks"}
    for layer, (k, v) in enumerate(buffers.cache):
        starts |= {k: f"cache{layer}", v: f"cache{layer}"}
    fields = ("src", "srcb", "dst", "dstb", "aux", "w3")
    for ops, records in ((plan.token, token), (plan.block, block)):
        for op, record in zip(ops, records, strict=True):
            found = {starts[int(record[f])] for f in fields if int(record[f]) in starts}
            declared = set(op.reads) | set(op.writes)
            if op.kind == "ffn":  # keys: each thread writes and reads those of its own neurons only
                found -= {"g"}
            assert found <= declared, op.kind
            if ops is plan.block:  # of one token some buffers are private
                assert declared - found <= {"logits", "list"}, op.kind


def test_private_buffers_lie_in_every_threads_arena(planned: Any) -> None:
    plan, buffers, token, _, _ = planned
    first = range(buffers.arena, buffers.arena + buffers.arena_size)
    names = {"norm": ("dst", "dstb"), "ffn": ("src", "srcb", "dst", "dstb", "aux2"), "reduce": ("src",)}
    for op, record in zip(plan.token, token, strict=True):
        for name in names.get(op.kind, ()):
            assert int(record[name]) in first, (op.kind, name)
        if op.kind in ("norm", "ffn"):
            assert record["private"] == 1


def test_weights_in_the_records_are_those_of_the_operator(planned: Any) -> None:
    plan, _, token, block, _ = planned
    for ops, records in ((plan.token, token), (plan.block, block)):
        for op, record in zip(ops, records, strict=True):
            for matrix in op.weights:
                if matrix is None:
                    continue
                if op.kind == "quant":
                    assert record["cols"] == matrix.cols
                    continue
                addresses = {int(record[f]) for f in ("w", "w2", "w3")}
                assert addresses & {matrix.addr, matrix.addr + matrix.stride}, op.kind
            assert op.bias is None or int(record["bias"]) == op.bias.addr


def test_every_operator_has_a_device(planned: Any) -> None:
    plan, *_ = planned
    assert {op.device for op in (*plan.token, *plan.block)} == {"cpu"}


def test_operators_come_after_what_they_read(planned: Any) -> None:
    plan, *_ = planned
    for ops in (plan.token, plan.block):
        written: set[str] = set()
        for op in ops:
            assert set(op.reads) <= written, (op.kind, op.layer)
            written |= set(op.writes)
        assert written >= {"logits", *(f"cache{layer}" for layer in range(plan.config.n_layer))}


def test_every_tensor_is_used(planned: Any) -> None:
    """A tensor that no operator names would be a property of the model left out."""
    plan, _, _, _, names = planned
    for ops in (plan.token, plan.block):
        assert {m.name for op in ops for m in (*op.weights, op.bias, op.bias2) if m is not None} == names


@pytest.mark.parametrize(
    ("layout", "activation", "mode"),
    [("neuron-split", a, "exact") for a in ("relu", "relu2", "fatrelu", "drelu")]
    + [("neuron-split", a, "dense") for a in ("silu", "gelu", "gelu_tanh")]
    + [("stock", "relu", "dense"), ("stock", "silu", "dense")],
)
def test_auto_sparsity(layout: str, activation: str, mode: str) -> None:
    chosen, line = choose_sparsity(small_config(layout=layout, activation=activation), "auto")
    assert chosen == mode and line.startswith(f"sparsity: {mode} (")


def test_estimate_of_memory_is_about_what_is_allocated() -> None:
    for kv_type, n_ctx, n_threads in (("f16", 4096, 2), ("f32", 100, 64), ("q8_0", 5000, 8)):
        config = small_config(n_layer=4, n_ff=(3000,) * 4, n_embd=512, n_head=8, n_head_kv=4, head_dim=64,
                              window=(0,) * 4, thresholds=(0.0,) * 4)  # fmt: skip
        needed = Buffers.estimate(config, n_threads, n_ctx, 64, kv_type)
        buffers = Buffers(config, n_threads, n_ctx, 64, kv_type)
        made = sum(memory.nbytes for memory in buffers._memory)
        made += 3 * 2 * 4 * n_ctx * config.head_dim // 2  # rotary tables, in f32 and, while they are made, in f64
        assert 0.95 * made <= needed <= 1.05 * made


def test_buffers_do_not_overlap() -> None:
    buffers = Buffers(small_config(n_layer=2, n_ff=(33, 7), window=(0, 0), thresholds=(0.0, 0.0)), 3, 10, 4, "f16")
    spans = [(a.addr, a.ld * 4) for a in buffers.shared.values()]
    spans += [(a.addr_b, a.ld_b * 4) for a in buffers.shared.values()]
    spans += [(at, 10 * buffers.cache_row) for pair in buffers.cache for at in pair]
    spans.append((buffers.arena, 3 * buffers.arena_size))
    spans = sorted(s for s in spans if s[1])
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
    offsets = np.sort(list(buffers.private.values()))
    assert (np.diff(offsets) >= 64).all() and (offsets % 64 == 0).all()
