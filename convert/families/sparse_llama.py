"""ProSparse: SparseLlamaForCausalLM, a Llama whose gate goes through ReLU or FATReLU.

In: Checkpoint. Out: StockModel of architecture llama. Next: families/__init__.py.
"""

from __future__ import annotations

from dataclasses import replace

from hotcold.convert.checkpoint import Checkpoint
from hotcold.convert.families.base import Family, build_decoder, read_activation
from hotcold.convert.families.llama import LLAMA
from hotcold.convert.hf_config import ConfigReader
from hotcold.convert.model import StockModel
from hotcold.convert.precision import Report

TRAITS = replace(LLAMA, name="sparse llama")


def build_sparse_llama(checkpoint: Checkpoint, reader: ConfigReader, report: Report) -> StockModel:
    """`hidden_act` must be spelled out: the whole point of these models is that it is not SiLU."""
    return build_decoder(checkpoint, reader, report, TRAITS, read_activation(reader, ("relu", "fatrelu")))


FAMILIES = (Family(("SparseLlamaForCausalLM",), "llama", build_sparse_llama),)
