"""Llama 2/3, Mistral, SmolLM, TinyLlama, ReLULLaMA: LlamaForCausalLM and MistralForCausalLM.

In: Checkpoint. Out: StockModel of architecture llama. Next: families/__init__.py.
"""

from __future__ import annotations

from dataclasses import replace

from hotcold.convert.checkpoint import Checkpoint
from hotcold.convert.families.base import Family, Traits, build_decoder, read_activation
from hotcold.convert.hf_config import ConfigReader
from hotcold.convert.model import StockModel
from hotcold.convert.precision import Report

LLAMA = Traits(arch="llama", name="llama")
MISTRAL = replace(LLAMA, name="mistral", windows="mistral", bias_keys=False)
ACTIVATIONS = ("silu", "relu", "fatrelu")


def build_llama(checkpoint: Checkpoint, reader: ConfigReader, report: Report) -> StockModel:
    """`hidden_act` may be silu, relu or fatrelu: ReLU variants of llama are published under its name."""
    return build_decoder(checkpoint, reader, report, LLAMA, read_activation(reader, ACTIVATIONS, "silu"))


def build_mistral(checkpoint: Checkpoint, reader: ConfigReader, report: Report) -> StockModel:
    """Llama with a sliding window in every layer, unless sliding_window is null."""
    return build_decoder(checkpoint, reader, report, MISTRAL, read_activation(reader, ACTIVATIONS, "silu"))


FAMILIES = (
    Family(("LlamaForCausalLM", "LLaMAForCausalLM"), "llama", build_llama),
    Family(("MistralForCausalLM",), "llama", build_mistral),
)
