"""Bamboo / TurboSparse-Mistral: BambooForCausalLM, a Mistral with ReLU on gate and on up (dReLU).

In: Checkpoint. Out: StockModel of architecture llama. Next: families/__init__.py.
"""

from __future__ import annotations

from dataclasses import replace

from hotcold.convert.checkpoint import Checkpoint
from hotcold.convert.families.base import Activation, Family, build_decoder, read_activation
from hotcold.convert.families.llama import MISTRAL
from hotcold.convert.hf_config import ConfigReader
from hotcold.convert.model import StockModel
from hotcold.convert.precision import Report

TRAITS = replace(MISTRAL, name="bamboo")


def build_bamboo(checkpoint: Checkpoint, reader: ConfigReader, report: Report) -> StockModel:
    """config.json says relu (or drelu); the model applies it to gate and up."""
    read_activation(reader, ("relu", "drelu"), "relu")
    return build_decoder(checkpoint, reader, report, TRAITS, Activation("drelu"))


FAMILIES = (Family(("BambooForCausalLM",), "llama", build_bamboo),)
