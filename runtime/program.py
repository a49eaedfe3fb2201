"""Plan -> flat arrays of operator records, with addresses and barriers, for the CPU's workers.

In: Plan, Buffers (buffers.py). Out: two arrays of kernels.walk.OP (one token; a block of tokens). Next: engine.py.

Barriers are derived, not written: one is needed before an operator that touches a shared buffer which an operator
since the last barrier wrote (or writes one that was read). Private buffers never need one.
"""

from __future__ import annotations

import numpy as np

from hotcold.runtime import schema
from hotcold.runtime.buffers import Area, Buffers
from hotcold.runtime.facts import fires
from hotcold.runtime.kernels import formats, walk
from hotcold.runtime.kernels.attention import part_bytes
from hotcold.runtime.kernels.ffn import CANDIDATES, SCORES, SIGNS, VALUES
from hotcold.runtime.kernels.vector import ACTIVATION_CODES
from hotcold.runtime.plan import Op, Plan
from hotcold.runtime.weights import Matrix

_PRIVATE = ("h", "hq", "hidden")  # of the token program: every thread makes its own copy
_ALWAYS_PRIVATE = ("list",)  # of both
_OPCODES = {
    "embed": walk.EMBED,
    "norm": walk.NORM,
    "quant": walk.QUANT,
    "matmul": walk.MATMUL,
    "rope": walk.ROPE,
    "attend": walk.ATTEND,
    "ffn": walk.FFN,
    "reduce": walk.REDUCE,
    "activate": walk.ACTIVATE,
    "down": walk.DOWN,
    "hidden": walk.HIDDEN,
    "columns": walk.COLUMNS,
    "mark": walk.MARK,
    "list": walk.LIST,
    "cold": walk.COLD,
}
_PREDICTOR_CODES = {"lowrank": SCORES, "mlp": SCORES, "signbit": SIGNS}
_COLD_CODES = {"keys": VALUES, "scores": CANDIDATES, "all": 0}


class Lowering:
    """Turns operators into records for one of the two programs."""

    def __init__(self, plan: Plan, buffers: Buffers, many_tokens: bool) -> None:
        self.plan, self.config, self.buffers, self.many = plan, plan.config, buffers, many_tokens
        # Predictors, which may be quantized in a model that is not, are in one program only.
        ops = (*plan.cpu(many=True), *plan.cpu(many=False))
        self.quantized = any(
            m is not None and m.ggml_type in formats.QUANTIZED for op in ops for m in op.weights
        )  # then norms quantize their output too

    def area(self, name: str) -> Area:
        return self.buffers.shared[name] if self.many else self.buffers.token_area(name)

    def program(self, ops: tuple[Op, ...]) -> np.ndarray:
        records = np.zeros(len(ops), walk.OP)
        for record, op in zip(records, ops, strict=True):
            fields = {"op": _OPCODES[op.kind], "layer": op.layer, "head_only": op.head_only, "scale": op.scale,
                      "add": op.add}  # fmt: skip
            fields |= {name: m.addr for name, m in (("bias", op.bias), ("bias2", op.bias2)) if m is not None}
            fields |= getattr(self, f"_{op.kind}")(op)
            if "list" in op.reads:
                fields |= self._list_fields()
            for name, value in fields.items():
                record[name] = value
        records["sync"] = self.barriers(ops)
        return records

    def barriers(self, ops: tuple[Op, ...]) -> list[int]:
        """1 where a barrier must follow. The last operator always has one: it ends the run."""
        sync = [0] * len(ops)
        read: set[str] = set()
        written: set[str] = set()
        for i, op in enumerate(ops):
            reads, writes = (self._shared(names) for names in (op.reads, op.writes))
            if op.kind == "cold":
                if i and ops[i - 1].kind == "cold":
                    continue  # the next list comes after the answer, and with an empty list nobody waits
                writes |= {"acc"}  # each thread adds up its neurons there
            if (reads | writes) & written or writes & read:
                sync[i - 1] = 1
                read, written = set(), set()
            read |= reads
            written |= writes
        return sync[:-1] + [1] * len(sync[-1:])

    def _shared(self, names: tuple[str, ...]) -> set[str]:
        return {n for n in names if n not in _ALWAYS_PRIVATE and (self.many or n not in _PRIVATE)}

    def _private(self, name: str) -> bool:
        return not self.many and name in _PRIVATE

    # ---- one method per kind of operator: the fields its kernel reads

    def _embed(self, op: Op) -> dict:
        table, positions = op.weights
        assert table is not None
        fields = {"qt": table.ggml_type, "w": table.addr, "stride": table.stride, "cols": table.cols}
        if positions is not None:
            fields |= {"w2": positions.addr, "stride2": positions.stride, "qt2": positions.ggml_type}
        return fields | self._to(op.writes[0])

    def _norm(self, op: Op) -> dict:
        (weight,) = op.weights
        assert weight is not None
        source = self.area(op.reads[0])
        quantize = self.quantized and self.config.n_embd % formats.BLOCK == 0
        return {
            "src": source.addr, "ld_src": source.ld, "w": weight.addr, "cols": self.config.n_embd,
            "eps": self.config.norm_eps, "flag": self.config.norm == "layer", "quant": quantize,
            "relu": op.layer >= 0 and self.config.norm_relu[op.layer],
            "private": self._private(op.writes[0]),
        } | self._to(op.writes[0])  # fmt: skip

    def _quant(self, op: Op) -> dict:
        (matrix,) = op.weights
        assert matrix is not None
        source = self.area(op.reads[0])
        return {
            "src": source.addr, "ld_src": source.ld, "cols": matrix.cols, "private": self._private(op.writes[0])
        } | self._to(op.writes[0])  # fmt: skip

    def _matmul(self, op: Op) -> dict:
        (matrix,) = op.weights
        assert matrix is not None
        stride = matrix.stride
        rows = matrix.rows
        if matrix.name.endswith(schema.FFN_UP_DOWN):  # the up rows of the bundles
            stride, rows = 2 * stride, rows // 2
        fields = {"qt": matrix.ggml_type, "w": matrix.addr, "stride": stride, "rows": rows, "cols": matrix.cols}
        fields |= self._from(op.reads[0]) | {"private": self._private(op.reads[0]), "few": not self.many}
        if op.writes[0] == "logits":  # its address is an argument of the run
            return fields | {"dst": 0, "ld_dst": 4 * self.config.n_vocab}
        return fields | self._to(op.writes[0])

    def _columns(self, op: Op) -> dict:
        """One row per input: rows counts the outputs here, cols the inputs."""
        (matrix,) = op.weights
        assert matrix is not None
        return {
            "qt": matrix.ggml_type, "w": matrix.addr, "stride": matrix.stride, "rows": matrix.cols, "cols": matrix.rows,
            "sparse": self.plan.sparsity != "dense", "aux": self.buffers.private["ids"],
            "aux2": self.buffers.private["values"],
        } | self._from(op.reads[0]) | self._to(op.writes[0])  # fmt: skip

    def _list_fields(self) -> dict:
        return {"ids": self.buffers.private["ids"], "lengths": self.buffers.private["lengths"]}

    def _mark(self, op: Op) -> dict:
        fields = {"cols": self.config.n_ff[op.layer], "aux": self.buffers.marks}
        return fields | self._from("g") | self._activation(op.layer)

    def _list(self, op: Op) -> dict:
        return {"cols": self.config.n_ff[op.layer], "aux": self.buffers.marks} | self._list_fields()

    def _hidden(self, op: Op) -> dict:
        (score,) = op.weights
        assert score is not None
        return {
            "cols": score.cols, "quant": score.ggml_type in formats.QUANTIZED,
            "relu": self.config.predictors[op.layer].kind == "mlp",
        } | self._from(op.reads[0]) | self._to(op.writes[0])  # fmt: skip

    def _heads(self, layer: int) -> dict:
        c, b = self.config, self.buffers
        k, v = b.cache[layer]
        return {
            "rows": c.n_head, "cols": c.n_head_kv, "unit": c.head_dim, "qt": b.kv_type, "w3": k, "aux": v,
            "aux2": b.n_ctx, "stride3": b.cache_row, "src": self.area("q").addr, "ld_src": self.area("q").ld,
        }  # fmt: skip

    def _rope(self, op: Op) -> dict:
        c, k, v = self.config, self.area("k"), self.area("v")
        q_norm, k_norm = op.weights
        return self._heads(op.layer) | {
            "w": q_norm.addr if q_norm else 0, "w2": k_norm.addr if k_norm else 0, "eps": c.norm_eps,
            "stride": c.rope.n_dims if c.rope else 0, "flag": bool(c.rope and c.rope.interleaved),
            "dst": k.addr, "ld_dst": k.ld, "dstb": v.addr, "ld_dstb": v.ld,
        }  # fmt: skip

    def _attend(self, op: Op) -> dict:
        c, b = self.config, self.buffers
        fields = {
            "window": c.window[op.layer], "srcb": b.private["scores"], "few": not self.many, "w4": b.parts,
            "stride": part_bytes(c.head_dim), "signs": b.merged,
        }  # fmt: skip
        return self._heads(op.layer) | fields | self._to("att")

    def _ffn(self, op: Op) -> dict:
        key, value, *predictor = op.weights
        assert value is not None
        fields = self._neurons(op.layer, key, value)
        return fields | self._predictor(op.layer, *predictor) if predictor else fields

    def _neurons(self, layer: int, key: Matrix | None, value: Matrix) -> dict:
        """What each thread's own neurons are computed from, and into. key None: the keys are there already."""
        b, acc = self.buffers, self.area("acc")
        fields = self._from("h") | self._activation(layer) | {
            "rows": self.config.n_ff[layer], "cols": value.cols, "sparse": self._skips(layer),
            "aux": b.shared["g"].addr, "ld_aux": b.shared["g"].ld, "aux2": b.private["ids"],
            "dstb": b.private["values"], "ld_list": b.ld_list, "lengths": b.private["lengths"], "private": 1,
        } | {"dst": acc.addr, "ld_dst": acc.ld}  # fmt: skip
        if key is not None:
            fields |= {"qt": key.ggml_type, "w": key.addr, "stride": key.stride}
        if not self.config.gated:
            return fields | {"qt3": value.ggml_type, "w3": value.addr, "stride3": value.stride}
        bundle = 2 * value.stride  # up row, down column
        return fields | {
            "qt2": value.ggml_type, "w2": value.addr, "stride2": bundle,
            "qt3": value.ggml_type, "w3": value.addr + value.stride, "stride3": bundle,
        }  # fmt: skip

    def _cold(self, op: Op) -> dict:
        """An FFN whose input and list of neurons come from the mailbox; its answer goes there."""
        key, value = op.weights
        mailbox = self.buffers.mailbox
        assert value is not None and mailbox is not None and not self.many
        key = None if op.mode == "keys" else key
        rows = (key, value if self.config.gated else None)  # those that meet the input
        return self._neurons(op.layer, key, value) | mailbox.addresses(op.layer) | {
            "predictor": _COLD_CODES[op.mode], "first": op.neurons[0] if op.neurons else 0,
            "quant": any(m is not None and m.ggml_type in formats.QUANTIZED for m in rows),
        }  # fmt: skip

    def _skips(self, layer: int) -> bool:
        """Whether neurons of the layer are left out: never where none is off by itself nor by a threshold."""
        return self.plan.sparsity != "dense" and fires(self.config, layer)

    def _predictor(self, layer: int, score: Matrix | None, bias: Matrix | None) -> dict:
        assert score is not None and bias is not None
        predictor, hidden = self.config.predictors[layer], self.buffers.token_area("hidden")
        return {
            "predictor": _PREDICTOR_CODES[predictor.kind], "threshold4": predictor.threshold, "bias4": bias.addr,
            "qt4": score.ggml_type, "w4": score.addr, "stride4": score.stride, "cols4": score.cols,
            "hidden": hidden.addr, "ld_hidden": hidden.ld, "hiddenb": hidden.addr_b, "ld_hiddenb": hidden.ld_b,
            "signs": self.buffers.private["signs"],
        }  # fmt: skip

    def _reduce(self, op: Op) -> dict:
        return {"cols": self.config.n_embd} | self._from("acc") | self._to("x")

    def _activation(self, layer: int) -> dict:
        c = self.config
        magnitude = c.activation in schema.DENSE_ACTIVATIONS and c.thresholds[layer] > 0
        return {"act": ACTIVATION_CODES[c.activation], "threshold": c.thresholds[layer], "magnitude": magnitude}

    def _activate(self, op: Op) -> dict:
        g = self.area("g")
        fields = {"cols": self.config.n_ff[op.layer], "src": g.addr, "ld_src": g.ld} | self._activation(op.layer)
        if self.config.gated:
            u = self.area("u")
            fields |= {"srcb": u.addr, "ld_srcb": u.ld}
        return fields

    def _down(self, op: Op) -> dict:
        (matrix,) = op.weights
        assert matrix is not None
        bundled = matrix.name.endswith(schema.FFN_UP_DOWN)
        return {
            "qt3": matrix.ggml_type, "w3": matrix.addr + (matrix.stride if bundled else 0),
            "stride3": matrix.stride * (2 if bundled else 1), "rows": matrix.rows // (2 if bundled else 1),
            "cols": matrix.cols,
        } | self._from(op.reads[0]) | self._to(op.writes[0])  # fmt: skip

    def _from(self, name: str) -> dict:
        a = self.area(name)
        return {"src": a.addr, "ld_src": a.ld, "srcb": a.addr_b, "ld_srcb": a.ld_b}

    def _to(self, name: str) -> dict:
        a = self.area(name)
        return {"dst": a.addr, "ld_dst": a.ld, "dstb": a.addr_b, "ld_dstb": a.ld_b}


def lower(plan: Plan, buffers: Buffers) -> tuple[np.ndarray, np.ndarray]:
    """The CPU's two programs of a plan: (token, block), arrays of kernels.walk.OP."""
    return (
        Lowering(plan, buffers, many_tokens=False).program(plan.cpu(many=False)),
        Lowering(plan, buffers, many_tokens=True).program(plan.cpu(many=True)),
    )
