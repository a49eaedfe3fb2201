"""Arcee AFM: ArceeForCausalLM, a Llama without gate whose FFN squares a ReLU.

In: Checkpoint. Out: StockModel of architecture arcee. Next: families/__init__.py.
"""

from __future__ import annotations

from hotcold.convert.checkpoint import Checkpoint
from hotcold.convert.families.base import Family, Traits, build_decoder, read_activation
from hotcold.convert.hf_config import ConfigReader
from hotcold.convert.model import StockModel
from hotcold.convert.precision import Report

TRAITS = Traits(arch="arcee", name="arcee", gated=False, default_eps=1e-5)


def build_arcee(checkpoint: Checkpoint, reader: ConfigReader, report: Report) -> StockModel:
    return build_decoder(checkpoint, reader, report, TRAITS, read_activation(reader, ("relu2",), "relu2"))


FAMILIES = (Family(("ArceeForCausalLM",), "arcee", build_arcee),)
