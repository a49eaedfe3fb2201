"""The relufied model: the source's tensors, with other feed-forward matrices.

In: StockModel of the source, the fits of all layers. Out: StockModel with n_ff + rank neurons. Next: neuron_split.py.

Weights that stay keep their bytes, whatever their type; the new rows join them in the same type where the runtime
computes with it. The fits of all layers are as large as a third of the model: they wait in a file without a name, which
the system removes with the process.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGUFValueType

from hotcold.convert.checkpoint import Checkpoint
from hotcold.convert.lazy import FLOAT_TYPES, LazyTensor, QType, from_array, to_float32
from hotcold.convert.model import Metadata, StockModel, array, u32
from hotcold.convert.precision import BLOCK_MAX, Report, cast
from hotcold.convert.relufy_fit import LayerFit
from hotcold.runtime import schema
from hotcold.runtime.atomic import MARGIN
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import safe_text
from hotcold.runtime.kernels import formats


class Fits:
    """LayerFits on disk, given back as views. folder: where there is room for them.

    They are written to the file and only read through the mapping: on a full disk a write fails, where a page of a
    mapping that has no block ends the process.
    """

    def __init__(self, folder: Path, n_ff: tuple[int, ...], n_embd: int, rank: int) -> None:
        self.n_ff, self.n_embd, self.rank = n_ff, n_embd, rank
        self._bends = [np.zeros(n, np.float32) for n in n_ff]
        rows = [n + 1 + 2 * rank for n in n_ff]  # down, gate, up, hot down
        self._starts = np.concatenate([[0], np.cumsum(rows)])
        self._folder, self._n_bytes = folder, 4 * n_embd * int(self._starts[-1])
        free = shutil.disk_usage(folder).free
        if free < self._n_bytes + MARGIN:
            raise self._full(f"{free / 1e9:.2f} GB free")
        try:
            self._file = tempfile.TemporaryFile(dir=folder)
            self._file.truncate(max(1, self._n_bytes))
            self._rows = np.memmap(self._file, np.float32, "r", shape=(int(self._starts[-1]), n_embd))
        except OSError as e:
            raise self._failed(e) from None

    def _full(self, found: str) -> HotcoldError:
        return HotcoldError(f"{safe_text(str(self._folder))}: {(self._n_bytes + MARGIN) / 1e9:.2f} GB needed for the "
                            f"fits of all layers until they are written, {found}: free some or choose another folder "
                            "with -o")

    def _failed(self, e: OSError) -> HotcoldError:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            return self._full("no space left")
        return HotcoldError(f"{safe_text(str(self._folder))}: a temporary file cannot be written: {e.strerror or e}")

    def _parts(self, layer: int) -> list[np.ndarray]:
        own = self._rows[self._starts[layer]:self._starts[layer + 1]]
        n, r = self.n_ff[layer], self.rank
        return np.split(own, [n, n + 1, n + 1 + r])

    def __setitem__(self, layer: int, fit: LayerFit) -> None:
        try:
            self._file.seek(4 * self.n_embd * int(self._starts[layer]))
            for part in (fit.down, fit.gate, fit.up, fit.hot_down):
                self._file.write(np.ascontiguousarray(part, np.float32).reshape(-1).view(np.uint8).data)
            self._file.flush()
        except OSError as e:
            raise self._failed(e) from None
        self._bends[layer] = fit.bend

    def __getitem__(self, layer: int) -> LayerFit:
        down, gate, up, hot_down = self._parts(layer)
        return LayerFit(self._bends[layer], down, gate[0], up, hot_down)

    def close(self) -> None:
        with suppress(OSError):  # what could not be written is still waiting to be
            self._file.close()


def relufied(model: StockModel, fits: Fits, orders: list[np.ndarray], report: Report) -> StockModel:
    """The new model. orders[l][i]: row of fits[l].down that belongs to neuron i of `model`."""
    tensors: dict[str, LazyTensor] = {}
    for name, t in model.tensors.items():
        part = name.split(".", 2)[2] if name.startswith("blk.") else ""
        if part in _PARTS:
            layer = int(name.split(".")[1])
            t = _PARTS[part](t, fits[layer], orders[layer], report)
        tensors[name] = t
    n_ff = [n + fits.rank for n in model.n_ff]
    return replace(
        model, metadata=model.metadata | _neuron_count(model, n_ff), tensors=tensors, n_ff=n_ff,
        activation="relu", thresholds=[0.0] * model.n_layer)


def _neuron_count(model: StockModel, n_ff: list[int]) -> Metadata:
    key = f"{model.arch}.feed_forward_length"
    if len(set(n_ff)) == 1:
        return {key: u32(n_ff[0])}
    return {key: array(n_ff, GGUFValueType.UINT32)}


def extended(t: LazyTensor, rows: np.ndarray, report: Report, change: np.ndarray | None = None) -> LazyTensor:
    """`t`, to which `change` may be added, with float32 rows (or, of a vector, elements) behind its own.

    The type stays where the runtime computes with it and rows can be written in it. Others become Q8_0, and so do
    quantized rows that change: quantizing them again in 4 bits would cost as much as the first time.
    """
    new = from_array(t.name, rows, QType.F32, rows.shape, "new")
    own = t
    if change is not None:
        own = replace(t, qtype=QType.F32, read_columns=None,
                      read=lambda a, b: to_float32(t.read(a, b), t.qtype) + change[a:b])
    kept = t.qtype in formats.NATIVE and (t.qtype in FLOAT_TYPES or (change is None and t.qtype in BLOCK_MAX))
    qtype = t.qtype if kept else QType.F32 if t.qtype == QType.F64 or t.shape[-1] % 32 else QType.Q8_0
    own, new = cast(own, qtype, report), cast(new, qtype, report)

    def read(a: int, b: int) -> np.ndarray:
        n = own.n_rows
        if b <= n:
            return own.read(a, b)
        tail = new.read(max(a - n, 0), b - n)
        return tail if a >= n else np.concatenate([own.read(a, n), tail])

    return LazyTensor(t.name, (t.n_rows + len(rows), *t.shape[1:]), qtype, read, t.origin)


def _gate(t: LazyTensor, fit: LayerFit, order: np.ndarray, report: Report) -> LazyTensor:
    change = fit.bend[order][:, None] * fit.gate
    return extended(t, np.broadcast_to(fit.gate, fit.up.shape), report, change)


def _up(t: LazyTensor, fit: LayerFit, order: np.ndarray, report: Report) -> LazyTensor:
    del order
    return extended(t, fit.up, report)


def _bias(t: LazyTensor, fit: LayerFit, order: np.ndarray, report: Report) -> LazyTensor:
    del order
    return extended(t, np.zeros(len(fit.up), np.float32), report)


def _down(t: LazyTensor, fit: LayerFit, order: np.ndarray, report: Report) -> LazyTensor:
    """[n_embd, n_ff + rank], read by columns: the fit holds them as rows. A half-precision matrix stays one."""
    n_ff, rank = len(order), len(fit.hot_down)
    qtype = t.qtype if t.qtype in (QType.F16, QType.BF16) else QType.F32

    def made(rows: np.ndarray) -> np.ndarray:
        return cast(from_array(t.name, rows, QType.F32, rows.shape, "new"), qtype, report).read(0, len(rows)).T

    def columns(a: int, b: int) -> np.ndarray:
        own = fit.down[order[a:min(b, n_ff)]]
        return made(np.concatenate([own, fit.hot_down[max(a - n_ff, 0):max(b - n_ff, 0)]]))  # of [b - a, n_embd]

    def read(a: int, b: int) -> np.ndarray:
        return np.ascontiguousarray(made(np.concatenate([fit.down[:, a:b][order], fit.hot_down[:, a:b]])))

    return LazyTensor(t.name, (t.n_rows, n_ff + rank), qtype, read, t.origin, columns)


_PARTS = {schema.FFN_GATE: _gate, schema.FFN_UP: _up, schema.FFN_DOWN: _down, schema.FFN_GATE_BIAS: _bias,
          schema.FFN_UP_BIAS: _bias}


def relufied_tensors(checkpoint: Checkpoint, fits: Fits, report: Report) -> dict[str, LazyTensor]:
    """The new feed-forward tensors of a Hugging Face folder, by its own names and in its own types."""
    tensors: dict[str, LazyTensor] = {}
    for layer, n_ff in enumerate(fits.n_ff):
        for hf, part in _HF_PARTS.items():
            name = f"model.layers.{layer}.mlp.{hf}"
            if name in checkpoint.stored:
                t = checkpoint.tensor(name)
                new = _PARTS[part](t, fits[layer], np.arange(n_ff), report)
                tensors[name] = new if t.qtype == QType.F64 else cast(new, t.qtype, report)
    return tensors


_HF_PARTS = {
    "gate_proj.weight": schema.FFN_GATE, "gate_proj.bias": schema.FFN_GATE_BIAS, "up_proj.weight": schema.FFN_UP,
    "up_proj.bias": schema.FFN_UP_BIAS, "down_proj.weight": schema.FFN_DOWN,
}
