"""The model families, one file each. A new one: write its file, add its FAMILIES here.

In: a checkpoint folder. Out: StockModel with vocabulary. Next: neuron_split.py or stock.py.
"""

from __future__ import annotations

from pathlib import Path

from hotcold.convert.checkpoint import Checkpoint, open_checkpoint
from hotcold.convert.families import arcee, bamboo, llama, minicpm, opt, qwen, sparse_llama
from hotcold.convert.families.base import Family
from hotcold.convert.hf_config import ConfigReader
from hotcold.convert.model import StockModel
from hotcold.convert.precision import Report
from hotcold.convert.vocab import vocabulary_metadata
from hotcold.runtime.errors import HotcoldError

REGISTRY: dict[str, Family] = {
    name: family
    for module in (llama, qwen, sparse_llama, minicpm, bamboo, opt, arcee)
    for family in module.FAMILIES
    for name in family.architectures
}


def load_checkpoint(folder: Path, report: Report, vocab: bool = True, ignore_unknown: bool = False) -> StockModel:
    """A Hugging Face folder as a stock model. Raises HotcoldError naming what is not supported or damaged."""
    try:
        return _load(open_checkpoint(folder, report), report, vocab, ignore_unknown)
    except RecursionError:  # what one JSON parser takes, another step may not
        raise HotcoldError(f"{folder}: a JSON file is nested too deeply: download it again") from None


def _load(checkpoint: Checkpoint, report: Report, vocab: bool, ignore_unknown: bool) -> StockModel:
    names = checkpoint.config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    family = REGISTRY.get(name) if isinstance(name, str) else None
    if family is None:
        raise HotcoldError(f"{checkpoint.folder}: config.json: architecture {name if name else 'missing'}: supported "
                           f"are {', '.join(sorted(REGISTRY))}")
    reader = ConfigReader(checkpoint.config)
    model = family.build(checkpoint, reader, report)
    model.release = checkpoint.release
    model.norm_relu = reader.norm_relu(model.n_layer)
    model.metadata |= reader.relufied(model.n_layer)
    reader.finish(str(name), ignore_unknown, report)
    if vocab:
        model.metadata |= vocabulary_metadata(checkpoint, model.tensors["token_embd.weight"].n_rows, report)
    else:
        report.note("no vocabulary written: only token ids can be used with this file")
    return model
