"""Which model a profile, a predictor or a placement belongs to, whatever the order of its neurons.

In: an open GGUF and its ModelConfig. Out: a hex digest. Next: profile.py.

The digest covers sizes, activation and samples of the weights' bytes; neurons are taken by their position in the
source model, so sorting a file by frequency, adding counts or adding predictors does not change it. Quantizing does.
"""

from __future__ import annotations

import hashlib

import numpy as np

from hotcold.runtime import schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.gguf_file import GGUFFile
from hotcold.runtime.weights import load_weights

SAMPLED_NEURONS = 16  # per layer, evenly spaced
SAMPLED_BYTES = 4096  # at the beginning and the end of every other tensor
_OF_NEURONS = (schema.FFN_GATE, schema.FFN_UP, schema.FFN_UP_DOWN, schema.FFN_DOWN_T, schema.FFN_GATE_BIAS,
               schema.FFN_UP_BIAS)  # fmt: skip
_BY_COLUMN = (schema.FFN_GATE_T, schema.FFN_UP_T)  # neurons along the columns: only the shape counts
_ADDED = (schema.FFN_NEURON_ID, schema.FFN_NEURON_COUNT, *schema.PRED_TENSORS)


def model_id(file: GGUFFile, config: ModelConfig) -> str:
    """SHA-256 in hex. Reads some kilobytes per tensor. Raises HotcoldError for tensors that the model cannot have."""
    load_weights(file, config)
    digest = hashlib.sha256()
    shape = (config.arch, config.layout, config.n_embd, config.n_ff, config.activation, config.gated,
             config.thresholds)  # fmt: skip
    digest.update(repr(shape).encode())
    for name in sorted(file.tensors):
        part = name.split(".", 2)[2] if name.startswith("blk.") else ""
        if part in _ADDED:
            continue
        info = file.tensors[name]
        digest.update(repr((name, info.ggml_type.name, tuple(info.shape))).encode())
        if part in _BY_COLUMN:
            continue
        data = file.data(name)
        if config.layout == "neuron-split" and part in _OF_NEURONS:
            digest.update(_neurons(file, int(name.split(".")[1]), data))
        else:
            raw = data.reshape(-1).view(np.uint8)
            digest.update(raw[:SAMPLED_BYTES].tobytes() + raw[-SAMPLED_BYTES:].tobytes())
    return digest.hexdigest()


def _neurons(file: GGUFFile, layer: int, data: np.ndarray) -> bytes:
    """Bytes of some neurons of a tensor, in the source's order; bundles are two rows per neuron."""
    ids = file.data(schema.block(layer, schema.FFN_NEURON_ID))
    n_ff = len(ids)
    per_neuron = len(data) // n_ff
    wanted = np.linspace(0, n_ff - 1, min(SAMPLED_NEURONS, n_ff)).astype(np.int64)
    stored = np.argsort(ids)[wanted]
    rows = data.reshape(n_ff, per_neuron, -1)[stored]
    return np.ascontiguousarray(rows).tobytes()
