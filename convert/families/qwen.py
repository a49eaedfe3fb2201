"""Qwen2, Qwen2.5 (biases on q, k, v) and Qwen3 (norms on q and k): Qwen2ForCausalLM, Qwen3ForCausalLM.

In: Checkpoint. Out: StockModel of architecture qwen2 or qwen3. Next: families/__init__.py.
"""

from __future__ import annotations

from hotcold.convert.checkpoint import Checkpoint
from hotcold.convert.families.base import Family, Traits, build_decoder, read_activation
from hotcold.convert.hf_config import ConfigReader
from hotcold.convert.model import StockModel
from hotcold.convert.precision import Report

QWEN2 = Traits(arch="qwen2", name="qwen2", permute=False, qkv_bias=True, bias_keys=False, windows="qwen")
QWEN3 = Traits(arch="qwen3", name="qwen3", permute=False, qk_norm=True, windows="qwen", default_head_dim=128)
ACTIVATIONS = ("silu", "relu", "fatrelu")


def build_qwen2(checkpoint: Checkpoint, reader: ConfigReader, report: Report) -> StockModel:
    reader.only("use_mrope", (False,), "multimodal rotation")
    return build_decoder(checkpoint, reader, report, QWEN2, read_activation(reader, ACTIVATIONS, "silu"))


def build_qwen3(checkpoint: Checkpoint, reader: ConfigReader, report: Report) -> StockModel:
    return build_decoder(checkpoint, reader, report, QWEN3, read_activation(reader, ACTIVATIONS, "silu"))


FAMILIES = (
    Family(("Qwen2ForCausalLM",), "qwen2", build_qwen2),
    Family(("Qwen3ForCausalLM",), "qwen3", build_qwen3),
)
