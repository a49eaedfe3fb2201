"""A block of a prompt's tokens through the layers on the GPU: every weight is read once for all of them.

In: the plan's operators of a block, x of the CPU's layers. Out: the KV cache filled, logits of the last tokens.
Next: engine.py. launch_block.py says how the kernels are launched.

Neurons that are the CPU's when single tokens are computed come to the GPU for the block, some at a time, through the
staging. All neurons are computed: of many tokens, hardly one is off for all.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hotcold.runtime.gpu import launch_block as lb
from hotcold.runtime.gpu.device import Array, Device, Kernel, Stream
from hotcold.runtime.gpu.memory import HALF_ROWS, LOGIT_ROWS
from hotcold.runtime.gpu.placement import TYPES
from hotcold.runtime.gpu.staging import Staging
from hotcold.runtime.gpu.state import GpuState
from hotcold.runtime.gpu.streams import Stamp
from hotcold.runtime.gpu.weights import DeviceMatrix, DeviceWeights, raw_rows
from hotcold.runtime.kernels import formats
from hotcold.runtime.kernels.vector import ACTIVATION_CODES
from hotcold.runtime.plan import Op, Plan
from hotcold.runtime.weights import Matrix

GROUP = 32  # neurons come in multiples of it


class Prompt:
    def __init__(
        self, plan: Plan, weights: DeviceWeights, state: GpuState, staging: Staging,
        kernels: Callable[[str], Kernel], device: Device, stream: Stream, n_ctx: int, stamp: Stamp | None = None,
    ) -> None:  # fmt: skip
        """stamp: as of streams.Queue."""
        self._stamp = stamp
        self._plan, self._config, self._weights, self._state, self._staging = plan, plan.config, weights, state, staging
        self._kernels, self._device, self._stream = kernels, device, stream
        c = plan.config
        self._heads = lb.Heads(c.n_head, c.n_head_kv, c.head_dim, n_ctx)
        self._ops = plan.gpu(many=True)
        self._quantized = any(m and m.ggml_type in formats.QUANTIZED for op in self._ops for m in op.weights)
        self._halved = ""  # whose values block.halves holds
        self.streamed = sum(self._cold_bytes(op) for op in self._ops if op.kind == "ffn")  # bytes per block

    def run(self, n: int, pos: int, rows: np.ndarray) -> None:
        """Tokens at positions pos..pos+n-1, their x in state.x. rows: f32 [wanted, n_vocab]: logits of the last ones.

        Waits for the GPU where logits are wanted.
        """
        for step, op in enumerate(self._ops[:-2]):
            self._note(0, step)
            getattr(self, f"_{op.kind}")(op, n, pos)
            self._note(1, step)
        norm, head = self._ops[-2:]
        for first in range(n - len(rows), n, LOGIT_ROWS):
            end = min(first + LOGIT_ROWS, n)
            self._logits(norm, head, first, end, rows[first - n + len(rows) : end - n + len(rows)])

    def _note(self, which: int, step: int) -> None:
        if self._stamp is not None:
            self._stamp(which, step, self._stream)

    def _cold_bytes(self, op: Op) -> int:
        return sum((m.rows - self._have(m)) * m.stride for m in op.weights if m is not None)

    def _have(self, m: Matrix) -> int:
        """Rows of it that are always on the GPU."""
        return self._weights.rows(m)

    # ---- helpers

    def _put(self, launch: lb.Launch) -> None:
        launch.queue(self._kernels, self._stream)

    def _array(self, name: str) -> Array:
        return self._state[f"block.{name.removeprefix('gpu.')}"]

    def _columns(self, name: str) -> lb.Columns:
        array = self._array(name)
        return lb.whole(array, array.shape[1])

    def _act_blocks(self, name: str) -> lb.Act:
        return lb.Act(self._array(f"{name}.q"), self._array(f"{name}.d"))

    def _product(
        self, w: DeviceMatrix, rows: int, source: str, act: str, n: int, y: lb.Columns, *, stride: int = 1,
        bias: Array | None = None, scale: float = 1.0, add: bool = False,
    ) -> None:  # fmt: skip
        """y = (add: y +) scale * (rows 0, stride, … of w . source + bias). By the library where the block is long."""
        if n <= lb.FEW or not self._device.has_gemm:
            x = self._columns(source)
            used = x if w.cols == x.n else lb.Columns(x.array, w.cols, x.ld)
            self._put(lb.matmul(w, used, self._act_blocks(act) if self._quantized else None, n, y, stride=stride,
                                bias=bias, scale=scale, add=add))  # fmt: skip
            return
        x = self._columns(source)
        k, halves, scales, sums = lb.padded(w.cols), self._array("halves"), self._array("scales"), self._array("sums")
        if self._halved != source:
            self._put(lb.to_half(lb.Columns(x.array, w.cols, x.ld), n, halves, scales))
            self._halved = source
        step = max(1, min(HALF_ROWS, self._array("weights").shape[0] // k))
        for first in range(0, rows, step):
            m = min(step, rows - first)
            part = w.from_row(first * stride)
            b = part.q
            if w.kind != "f16" or stride > 1:
                b = self._array("weights")
                self._put(lb.rows_to_half(part, m, b, stride))
            lb.gemm(self._device, halves, b.reshape(-1), sums, n, m, k, self._stream)
            to = lb.Columns(y.array, m, y.ld, y.first + first)
            self._put(lb.finish_half(sums, scales, n, to, bias=None if bias is None else bias[first : first + m],
                                     scale=scale, add=add))  # fmt: skip

    def _down(self, w: DeviceMatrix, v: lb.Columns, n: int, *, stride: int, bias: Array | None, scale: float) -> None:
        """block.x += scale * (sum of v[i] * row i * stride of w + bias)"""
        x = self._array("x")
        if n <= lb.FEW or not self._device.has_gemm:
            self._put(lb.down(w, v, n, x, stride=stride, bias=bias, scale=scale, add=True))
            return
        halves, scales, sums, out = (self._array(name) for name in ("halves", "scales", "sums", "weights"))
        step = max(8, out.shape[0] // w.cols // 8 * 8)
        self._halved = ""
        for first in range(0, v.n, step):
            m = min(step, v.n - first)
            k = lb.padded(m)
            self._put(lb.to_half(lb.Columns(v.array, m, v.ld, v.first + first), n, halves, scales))
            self._put(lb.columns_to_half(w.from_row(first * stride), m, out, stride))
            lb.gemm(self._device, halves, out, sums, n, w.cols, k, self._stream)
            last = first + m == v.n
            self._put(lb.finish_half(sums, scales, n, lb.whole(x, w.cols), bias=bias if last else None, scale=scale,
                                     add=True))  # fmt: skip

    # ---- one method per kind of operator

    def _begin(self, op: Op, n: int, pos: int) -> None:
        self._device.h2d(self._array("x")[:n], self._state.x[:n], self._stream)

    def _norm(self, op: Op, n: int, pos: int, first: int = 0) -> None:
        """Of the tokens from `first` on."""
        c, (weight,) = self._config, op.weights
        w = self._weights.vector(weight)
        assert w is not None
        act = self._act_blocks("h") if self._quantized else None
        self._put(lb.norm_tokens(self._array("x")[first:], n, c.n_embd, w, self._weights.vector(op.bias),
                                 self._array("h"), act, eps=c.norm_eps, layer_norm=c.norm == "layer"))  # fmt: skip
        self._halved = ""

    def _quant(self, op: Op, n: int, pos: int) -> None:
        self._put(lb.quantize_tokens(self._columns(op.reads[0]), n, self._act_blocks("act")))

    def _matmul(self, op: Op, n: int, pos: int) -> None:
        (matrix,) = op.weights
        assert matrix is not None
        w, y = self._weights.matrix(matrix), self._columns(op.writes[0])
        source = "att" if op.add else "h"  # from its act blocks, if the matrix is quantized
        if source == "att":
            self._halved = ""
        self._product(w, matrix.rows, source, "act" if op.add else "h", n, y, bias=self._weights.vector(op.bias),
                      scale=op.scale, add=op.add)  # fmt: skip

    def _rope(self, op: Op, n: int, pos: int) -> None:
        c, s = self._config, self._state
        q_norm, k_norm = (self._weights.vector(m) for m in op.weights)
        table = (s["cos"], s["sin"]) if c.rope else None
        caches = s[f"cache{op.layer}.k"], s[f"cache{op.layer}.v"]
        self._put(lb.rope_kv_tokens(
            self._array("q"), self._array("k"), self._array("v"), (q_norm, k_norm), table, caches, self._heads, n, pos,
            n_rot=c.rope.n_dims if c.rope else 0, interleaved=bool(c.rope and c.rope.interleaved), eps=c.norm_eps,
        ))  # fmt: skip

    def _attend(self, op: Op, n: int, pos: int) -> None:
        caches = self._state[f"cache{op.layer}.k"], self._state[f"cache{op.layer}.v"]
        self._put(lb.attention_block(self._array("q"), caches, self._array("att"), self._heads, n, pos,
                                     window=self._config.window[op.layer], scale=op.scale))  # fmt: skip

    def _ffn(self, op: Op, n: int, pos: int) -> None:
        if self._config.layout == "stock":
            self._ffn_stock(op, n)
            return
        key, value = op.weights
        assert key is not None and value is not None
        per_value = 2 if self._config.gated else 1  # rows
        keys, values = self._have(key), self._have(value) // per_value
        n_ff, first = self._config.n_ff[op.layer], 0
        if values:
            self._neurons(op, n, 0, values, self._weights.matrix(key), self._weights.matrix(value))
            first = values
        size = per_value * value.stride + (0 if keys == n_ff else key.stride)
        step = self._staging.rows_at_once(size, GROUP)
        for start in range(first, n_ff, step):
            end = min(start + step, n_ff)
            sent = [] if keys == n_ff else [(key, start, end)]
            w = self._send([*sent, (value, per_value * start, per_value * end)])
            self._neurons(op, n, start, end, self._weights.matrix(key).from_row(start) if not sent else w[0], w[-1])
            self._staging.free()

    def _send(self, wanted: list[tuple[Matrix, int, int]]) -> list[DeviceMatrix]:
        """Rows first..end-1 of matrices, unpacked on the GPU. The last of them is of value rows."""
        sent = self._staging.send([raw_rows(m)[first:end] for m, first, end in wanted])
        out = []
        for (m, first, end), raw, side in zip(wanted, sent, ("key", "value")[-len(wanted) :], strict=True):
            kind, rows = TYPES[m.ggml_type], end - first
            d = None
            if kind == "f16":
                q = self._state[f"cold.{side}.q"][: 2 * rows * m.cols].view(np.float16)
            else:
                width, dtype = (m.cols, np.int8) if kind == "q8_0" else (m.cols // 2, np.uint8)
                q = self._state[f"cold.{side}.q"][: rows * width].view(dtype)
                scales = self._state[f"cold.{side}.d"][: 2 * rows * m.cols // formats.BLOCK]
                d = scales.view(np.float16).reshape(rows, -1)
            w = DeviceMatrix(kind, rows, m.cols, q.reshape(rows, -1), d)
            self._put(lb.unpack_rows(raw, w, 0, rows))
            out.append(w)
        return out

    def _neurons(self, op: Op, n: int, first: int, end: int, key: DeviceMatrix, value: DeviceMatrix) -> None:
        """Neurons first..end-1 of a layer, whose rows are the first ones of key and value: block.x += their sum."""
        c, m = self._config, end - first
        biases = (self._weights.vector(b) for b in (op.bias, op.bias2))
        key_bias, up_bias = (None if b is None else b[first:end] for b in biases)
        g = lb.Columns(self._array("g"), m, self._array("g").shape[1], first)
        self._product(key, m, "h", "h", n, g, bias=key_bias)
        u = None
        if c.gated:
            u = lb.Columns(self._array("u"), m, self._array("u").shape[1], first)
            self._product(value, m, "h", "h", n, u, stride=2, bias=up_bias)
        act, threshold = ACTIVATION_CODES[c.activation], c.thresholds[op.layer]
        self._put(lb.activate_tokens(g, u, n, act=act, threshold=threshold))
        down_bias = self._down_bias(op.layer) if end == c.n_ff[op.layer] else None
        self._down(value.from_row(1) if c.gated else value, g, n, stride=2 if c.gated else 1, bias=down_bias,
                   scale=op.scale)  # fmt: skip

    def _down_bias(self, layer: int) -> Array | None:
        """What ends a layer adds it."""
        return self._weights.vector([op for op in self._plan.gpu(False) if op.layer == layer][-1].bias)

    def _ffn_stock(self, op: Op, n: int) -> None:
        c = self._config
        key, up, down = (None if m is None else self._weights.matrix(m) for m in op.weights)
        assert key is not None and down is not None
        n_ff, ld = c.n_ff[op.layer], self._array("g").shape[1]
        g = lb.Columns(self._array("g"), n_ff, ld)
        self._product(key, n_ff, "h", "h", n, g, bias=self._weights.vector(op.bias))
        u = None
        if up is not None:
            u = lb.Columns(self._array("u"), n_ff, ld)
            self._product(up, n_ff, "h", "h", n, u, bias=self._weights.vector(op.bias2))
        act, threshold = ACTIVATION_CODES[c.activation], c.thresholds[op.layer]
        self._put(lb.activate_tokens(g, u, n, act=act, threshold=threshold))
        if self._quantized:
            self._put(lb.quantize_tokens(g, n, self._act_blocks("act")))
        self._halved = ""
        self._product(down, c.n_embd, "g", "act", n, self._columns("x"), bias=self._down_bias(op.layer), scale=op.scale,
                      add=True)  # fmt: skip

    def _logits(self, norm: Op, head: Op, first: int, end: int, rows: np.ndarray) -> None:
        """Of the tokens first..end-1 of the block."""
        (matrix,) = head.weights
        assert matrix is not None
        n, logits = end - first, self._array("logits")
        step = len(self._ops) - 2
        self._note(0, step)
        self._norm(norm, n, 0, first)
        self._note(1, step)
        to = lb.whole(logits, matrix.rows)
        self._note(0, step + 1)
        self._product(self._weights.matrix(matrix), matrix.rows, "h", "h", n, to, scale=head.scale)
        self._note(1, step + 1)
        self._device.d2h(self._state.logits[:n], logits[:n], self._stream)
        self._device.sync(self._stream)
        rows[:] = self._state.logits[:n]
