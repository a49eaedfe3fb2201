"""MiniCPM and the sparse MiniCPM-S: MiniCPMForCausalLM, a Llama with scales on embedding, residual and logits.

In: Checkpoint. Out: StockModel of architecture minicpm. Next: families/__init__.py.
"""

from __future__ import annotations

import math

from hotcold.convert.checkpoint import Checkpoint
from hotcold.convert.families.base import Family, Shapes, Traits, build_decoder, read_activation
from hotcold.convert.hf_config import ConfigReader
from hotcold.convert.model import Metadata, StockModel, f32
from hotcold.convert.precision import Report

TRAITS = Traits(arch="minicpm", name="minicpm", default_tie=True)


def build_minicpm(checkpoint: Checkpoint, reader: ConfigReader, report: Report) -> StockModel:
    """Keys as llama.cpp writes them: logit_scale divides the logits."""
    embedding, depth = reader.number("scale_emb"), reader.number("scale_depth")
    base = reader.number("dim_model_base")

    def scales(shapes: Shapes) -> Metadata:
        return {
            "minicpm.embedding_scale": f32(embedding),
            "minicpm.residual_scale": f32(depth / math.sqrt(shapes.n_layer)),
            "minicpm.logit_scale": f32(shapes.n_embd / base),
        }

    activation = read_activation(reader, ("silu", "relu", "fatrelu"))
    return build_decoder(checkpoint, reader, report, TRAITS, activation, scales)


FAMILIES = (Family(("MiniCPMForCausalLM",), "minicpm", build_minicpm),)
