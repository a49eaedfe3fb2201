"""The GPU's operators of one token -> launches of kernels, with their arguments.

In: a Plan, weights and state on the device, the mailbox, the kernels. Out: Steps, an operator and its launches each.
Next: streams.py puts them on streams, graph.py captures them.

Arguments are made once: nothing in them changes from token to token. Positions and sequence numbers are in `ctl`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotcold.runtime import schema
from hotcold.runtime.gpu import launch
from hotcold.runtime.gpu.device import Array, Device, Dim, Kernel, Stream
from hotcold.runtime.gpu.state import GpuState
from hotcold.runtime.gpu.weights import DeviceMatrix, DeviceWeights
from hotcold.runtime.kernels import formats
from hotcold.runtime.kernels.vector import ACTIVATION_CODES, RELU
from hotcold.runtime.mailbox import Mailbox
from hotcold.runtime.plan import Op, Plan
from hotcold.runtime.weights import Matrix

LOOK_SECONDS = 1e-6  # what one look of a waiting kernel at the answer's word takes at least

i32, f32 = np.int32, np.float32


@dataclass(frozen=True)
class Call:
    name: str
    kernel: Kernel
    grid: Dim
    block: Dim
    args: tuple[Any, ...]
    shared: int = 0

    def put(self, stream: Stream) -> None:
        self.kernel(self.grid, self.block, self.args, shared_mem=self.shared, stream=stream)


@dataclass(frozen=True)
class Step:
    op: Op
    calls: tuple[Call, ...]


class Lowering:
    def __init__(
        self, plan: Plan, weights: DeviceWeights, state: GpuState, mailbox: Mailbox, kernels: Callable[[str], Kernel],
        device: Device, n_ctx: int, patience: float,
    ) -> None:  # fmt: skip
        """patience: seconds after which a merge gives up waiting."""
        self.plan, self.config, self.weights, self.state, self.mailbox = plan, plan.config, weights, state, mailbox
        self._kernels, self._device, self._n_ctx = kernels, device, n_ctx
        self._looks = min(int(patience / LOOK_SECONDS), (1 << 31) - 1)
        self._slices: dict[int, int] = {}  # of a layer's list, as axpy has cut it
        ops = plan.gpu(many=False)
        self._quantized = any(m is not None and m.ggml_type in formats.QUANTIZED for op in ops for m in op.weights)

    def steps(self) -> list[Step]:
        return [Step(op, tuple(getattr(self, f"_{op.kind}")(op))) for op in self.plan.gpu(many=False)]

    # ---- helpers

    def _call(self, name: str, how: launch.Launch, *args: Any) -> Call:
        return Call(name, self._kernels(name), how.grid, how.block, args, how.shared)

    def _vector(self, name: str) -> tuple[Array | None, Array | None, Array | None]:
        """x, its act blocks' q and d."""
        return self.state.get(name), self.state.get(f"{name}.q"), self.state.get(f"{name}.d")

    def _matvec(
        self, m: DeviceMatrix, source: str, bias: Array | None, to: Array, rows: int, *, scale: float = 1.0,
        add: bool = False, relu: bool = False,
    ) -> Call:  # fmt: skip
        return self._call(
            f"matvec_{m.kind}", launch.matvec(m.kind, rows, m.cols), m.q, m.d, *self._vector(source), bias, to,
            i32(rows), i32(m.cols), i32(1), f32(scale), i32(add), i32(relu),
        )  # fmt: skip

    def _quantize(self, source: Array, to: str, n: int) -> Call:
        q, d = self.state[f"{to}.q"], self.state[f"{to}.d"]
        return self._call("quantize", launch.quantize(n), source, q[:n], d[: n // formats.BLOCK], i32(n))

    def _matrix(self, of: Matrix | None) -> DeviceMatrix:
        assert of is not None
        return self.weights.matrix(of)

    def _activation(self, layer: int) -> tuple[np.int32, np.float32]:
        c = self.config
        return i32(ACTIVATION_CODES[c.activation]), f32(c.thresholds[layer])

    # ---- one method per kind of operator

    def _begin(self, op: Op) -> list[Call]:
        s, n = self.state, self.config.n_embd
        return [self._call("begin", launch.begin(n), s.ctl_device, s.x_device[0], s["ctl"], s["gpu.x"], i32(n))]

    def _norm(self, op: Op) -> list[Call]:
        c, (weight,) = self.config, op.weights
        h, hq, hd = self._vector(op.writes[0])
        return [self._call(
            "norm_token", launch.norm_token(c.n_embd), self.state["gpu.x"], self.weights.vector(weight),
            self.weights.vector(op.bias), h, hq if self._quantized else None, hd if self._quantized else None,
            i32(c.n_embd), f32(c.norm_eps), i32(c.norm == "layer"),
        )]  # fmt: skip

    def _quant(self, op: Op) -> list[Call]:
        (matrix,) = op.weights
        assert matrix is not None
        source = op.reads[0]
        made = source == "gpu.g" or self.config.head_dim % formats.BLOCK == 0  # by `activate` and `attend` already
        return [] if made else [self._quantize(self.state[source], "gpu.act", matrix.cols)]

    def _act(self, layer: int, source: str, n: int) -> tuple[Array | None, Array | None]:
        """Where an operator that makes `source` leaves its act blocks too; None where nobody wants them from it."""
        wanted = any(op.kind == "quant" and op.layer == layer and op.reads[0] == source for op in self.plan.gpu(False))
        if not wanted or self.config.head_dim % formats.BLOCK and source == "gpu.att":
            return None, None
        return self.state["gpu.act.q"][:n], self.state["gpu.act.d"][: n // formats.BLOCK]

    def _matmul(self, op: Op) -> list[Call]:
        m, to = self._matrix(op.weights[0]), self.state[op.writes[0]]
        rows = m.rows if op.neurons is None else op.neurons[1]
        return [self._matvec(m, op.reads[0], self.weights.vector(op.bias), to, rows, scale=op.scale, add=op.add)]

    def _rope(self, op: Op) -> list[Call]:
        c, s = self.config, self.state
        q_norm, k_norm = (self.weights.vector(m) for m in op.weights)
        n_rot, interleaved = (c.rope.n_dims, c.rope.interleaved) if c.rope else (0, False)
        return [self._call(
            "rope_kv", launch.rope_kv(c.n_head, c.n_head_kv), s["gpu.q"], s["gpu.k"], s["gpu.v"], q_norm, k_norm,
            s["cos"], s["sin"], s[f"cache{op.layer}.k"], s[f"cache{op.layer}.v"], s["ctl"], i32(c.n_head),
            i32(c.n_head_kv), i32(c.head_dim), i32(n_rot), i32(interleaved), i32(self._n_ctx), f32(c.norm_eps),
        )]  # fmt: skip

    def _attend(self, op: Op) -> list[Call]:
        c, s = self.config, self.state
        part, window = s["gpu.attend"], i32(c.window[op.layer])
        splits = launch.attend_splits(c.n_head, c.n_head_kv, self._n_ctx, self._device.multiprocessors)
        return [
            self._call(
                "attend_part", launch.attend_part(c.n_head, c.n_head_kv, splits), s["gpu.q"], s[f"cache{op.layer}.k"],
                s[f"cache{op.layer}.v"], part, s["ctl"], i32(c.n_head), i32(c.n_head_kv), i32(c.head_dim),
                i32(self._n_ctx), window, f32(op.scale),
            ),
            self._call(
                "attend_merge", launch.attend_merge(c.n_head, c.head_dim), part, s["gpu.att"],
                *self._act(op.layer, "gpu.att", c.n_head * c.head_dim), s["ctl"], i32(c.head_dim), window, i32(splits),
            ),
        ]  # fmt: skip

    def _activate(self, op: Op) -> list[Call]:
        n, g = self.config.n_ff[op.layer], self.state["gpu.g"]
        u = self.state["gpu.u"] if "gpu.u" in op.reads else None
        act = self._act(op.layer, "gpu.g", n)
        return [self._call("activate", launch.activate(n), g, u, g, *act, i32(n), *self._activation(op.layer))]

    # ---- predictors

    def _hidden(self, op: Op) -> list[Call]:
        enter, leave = op.weights
        m, (to,) = self._matrix(enter), op.writes
        assert leave is not None
        relu = self.config.predictors[op.layer].kind == "mlp"
        calls = [self._matvec(m, op.reads[0], self.weights.vector(op.bias), self.state[to], m.rows, relu=relu)]
        if leave.ggml_type in formats.QUANTIZED:
            calls.append(self._quantize(self.state[to], to, m.rows))
        return calls

    def _signs(self, op: Op) -> list[Call]:
        n, cols, s = self.config.n_ff[op.layer], self.config.n_embd, self.state
        how = launch.sign_scores(n, cols, self._device.multiprocessors)
        planes = self.weights.vector(op.weights[0])
        return [self._call("sign_scores", how, planes, s[op.reads[0]], s[op.writes[0]], i32(n), i32(cols))]

    # ---- neurons

    def _mail(self, layer: int) -> tuple[Array, Array, Array, Array]:
        """Of the CPU: ids, values, input, header of a layer."""
        device = self.mailbox.device
        return device.ids[layer], device.vals[layer], device.h[layer], device.hdr[layer : layer + 1]

    def _post(self, op: Op) -> list[Call]:
        s, (first, end) = self.state, op.neurons or (0, 0)
        _, _, h, header = self._mail(op.layer)
        return [self._call(
            "post", launch.post(), s[op.reads[0]], h, header, s["gpu.cpu_count"], s["ctl"], i32(self.config.n_embd),
            i32(op.layer), i32(end - first),
        )]  # fmt: skip

    def _split(self, op: Op) -> list[Call]:
        c, s, (_, hot) = self.config, self.state, op.neurons or (0, 0)
        source, h = op.reads
        scores, told = op.mode == "scores", len(op.writes) > 1
        act, threshold = self._activation(op.layer)
        if scores:
            act, threshold = i32(RELU), f32(c.predictors[op.layer].threshold)
        ids, vals, mail_h, header = self._mail(op.layer) if told else (None, None, None, None)
        n = hot if op.mode == "all" else c.n_ff[op.layer]
        return [self._call(
            "compact_split", launch.compact_split(), s[source], self.weights.vector(op.bias), s[h], s["gpu.ids"],
            None if scores else s["gpu.values"], s["gpu.count"], ids, None if scores else vals, mail_h, header,
            s["gpu.cpu_count"] if told else None, s["counters"][op.layer], s["ctl"], i32(n), i32(hot), i32(c.n_embd),
            i32(op.layer), act, threshold,
        )]  # fmt: skip

    def _list(self, op: Op) -> tuple[Array | None, Array, Array | None]:
        """ids, values, length of the GPU's list; without a list all neurons, their values in place of the keys."""
        s = self.state
        return (None, s["gpu.g"], None) if op.mode == "dense" else (s["gpu.ids"], s["gpu.values"], s["gpu.count"])

    def _values(self, op: Op) -> list[Call]:
        """Key and up rows in one launch where they are of one format, else in two."""
        key, value = (None if m is None else self._matrix(m) for m in op.weights)
        key_bias, up_bias = self.weights.vector(op.bias), self.weights.vector(op.bias2)
        if key is not None and value is not None and key.kind != value.kind:
            return [self._neurons(op, key, None, key_bias, None, 0), self._neurons(op, None, value, None, up_bias, 0)]
        return [self._neurons(op, key, value, key_bias, up_bias, int(op.mode == "dense"))]

    def _neurons(self, op: Op, key: DeviceMatrix | None, value: DeviceMatrix | None, key_bias: Array | None,
                 up_bias: Array | None, raw: int) -> Call:  # fmt: skip
        _, hot = op.neurons or (0, 0)
        ids, vals, count = self._list(op)
        kind = (key or value).kind if key or value else "f16"  # type: ignore[union-attr]
        cols = self.config.n_embd
        rows = [array for m in (key, value) for array in ((None, None) if m is None else (m.q, m.d))]
        return self._call(
            f"neuron_values_{kind}", launch.neuron_values(kind, hot, cols, self._device.multiprocessors), *rows,
            *self._vector(op.reads[0]), key_bias, up_bias, ids, count, vals, i32(hot), i32(cols), i32(2), i32(raw),
            *self._activation(op.layer),
        )  # fmt: skip

    def _axpy(self, op: Op) -> list[Call]:
        _, hot = op.neurons or (0, 0)
        (value,) = op.weights
        m = self._matrix(value)
        stride, down = (2, m.from_row(1)) if value and value.name.endswith(schema.FFN_UP_DOWN) else (1, m)
        slices = launch.slices(m.kind, hot, m.cols, self._device.multiprocessors)
        self._slices[op.layer] = slices
        ids, vals, count = self._list(op)
        return [self._call(
            f"axpy_down_{m.kind}", launch.axpy_down(m.kind, m.cols, slices), down.q, down.d, ids, vals, count,
            self.state["gpu.part"], i32(hot), i32(m.cols), i32(stride),
        )]  # fmt: skip

    def _merge(self, op: Op) -> list[Call]:
        c, s, box, (_, hot) = self.config, self.state, self.mailbox.device, op.neurons or (0, 0)
        part, count = (s["gpu.part"], self._list(op)[2]) if hot else (None, None)
        cpu: tuple[Array | None, ...] = (None,) * 5
        if any(name.startswith("out") for name in op.reads):
            cpu = s["gpu.cpu_count"], box.out[op.layer], box.done[op.layer], box.status, box.abort
        return [self._call(
            "merge", launch.merge(c.n_embd), part, count, self.weights.vector(op.bias), *cpu, s["ctl"], s["gpu.x"],
            i32(hot), i32(c.n_embd), i32(self._slices.get(op.layer, 1)), i32(op.layer), f32(op.scale), i32(self._looks),
        )]  # fmt: skip
