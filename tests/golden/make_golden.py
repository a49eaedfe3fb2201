"""Makes logits.npz: logits of every tiny checkpoint, computed by transformers' own classes in float64.

In: the cases of tests/tiny.py. Out: logits.npz beside this file. Next: tests/test_golden.py, which needs no torch.

    pip install torch transformers sentencepiece numpy
    python tests/golden/make_golden.py

transformers casts norms, softmax and rope to float32 even in a float64 model. So the model's classes run while float32
means float64 in torch: same code, no rounding. The plain float32 run is made too. Both must agree, and so must the two
dialects of config.json and tests/reference_model.py (to 1e-9), or nothing is written.

Contents: "NAME" float32 [len(POSITIONS), len(columns)] for each case (positions and columns below, 40 tokens), and
"NAME@LENGTH" float32 [n_vocab]: the last position's logits of a prompt of LENGTH tokens. "versions": what made it.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import tiny  # noqa: E402
from golden_layout import LENGTH_CASES, LENGTHS, MAIN_LENGTH, POSITIONS, columns  # noqa: E402
from reference_model import reference_logits  # noqa: E402

TRANSFORMERS_CLASS = {
    "llama": transformers.LlamaForCausalLM,
    "mistral": transformers.MistralForCausalLM,
    "qwen2": transformers.Qwen2ForCausalLM,
    "qwen3": transformers.Qwen3ForCausalLM,
    "opt": transformers.OPTForCausalLM,
    "arcee": transformers.ArceeForCausalLM,
    # Not in transformers; their own remote code is Llama's or Mistral's with what `adapt` changes.
    "sparsellama": transformers.LlamaForCausalLM,
    "minicpm": transformers.LlamaForCausalLM,
    "bamboo": transformers.MistralForCausalLM,
}


@contextlib.contextmanager
def float32_is_float64() -> Iterator[None]:
    """While inside, `torch.float32`, `torch.float` and `Tensor.float()` give float64."""
    saved = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = saved
        torch.set_default_dtype(torch.float32)


class FATReLU(nn.Module):
    """max(x, t) replaced by 0 where x <= t: FATReLU of Kurtz et al. 2020, as ProSparse (arXiv 2402.13516) uses it."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.threshold(x, self.threshold, 0.0)


def adapt(model: Any, config: dict[str, Any]) -> None:
    """Turns a Llama or Mistral of transformers into a family it lacks."""
    kind = config["model_type"]
    for layer in model.model.layers:
        if config["hidden_act"] == "fatrelu":
            layer.mlp.act_fn = FATReLU(config["hidden_act_param"])
        if kind == "bamboo":  # dReLU: down(relu(gate(x)) * relu(up(x))), TurboSparse (arXiv 2406.05955), equation 4
            layer.mlp.up_proj.register_forward_hook(lambda _module, _args, out: torch.relu(out))
    if kind == "minicpm":
        # MiniCPM (arXiv 2404.06395), table 7: embedding times scale_emb, what each sublayer adds to the residual times
        # scale_depth / sqrt(layers), the final hidden state divided by hidden_size / dim_model_base.
        depth = config["scale_depth"] / math.sqrt(config["num_hidden_layers"])
        width = config["hidden_size"] / config["dim_model_base"]
        model.model.embed_tokens.register_forward_hook(lambda _module, _args, out: out * config["scale_emb"])
        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(lambda _module, _args, out: (out[0] * depth, *out[1:]))
            layer.mlp.register_forward_hook(lambda _module, _args, out: out * depth)
        model.model.norm.register_forward_hook(lambda _module, _args, out: out / width)


def load(folder: Path, dtype: torch.dtype) -> Any:
    """The model of a folder; every tensor of the file must be one of the model's and the other way round."""
    config = json.loads((folder / "config.json").read_text())
    cls = TRANSFORMERS_CLASS[config["model_type"]]
    given = None
    if config["model_type"] in ("sparsellama", "minicpm", "bamboo"):
        plain = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
        given = cls.config_class(**plain | ({"hidden_act": "relu"} if config["hidden_act"] == "fatrelu" else {}))
    model, info = cls.from_pretrained(
        folder, config=given, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
        raise SystemExit(f"{folder.name}: {info}")
    if config["model_type"] in ("sparsellama", "minicpm", "bamboo"):
        adapt(model, config)
    return model.eval()


@torch.no_grad()
def logits_float64(folder: Path, sequences: list[list[int]]) -> list[np.ndarray]:
    """One float64 [n, n_vocab] per sequence."""
    model = load(folder, torch.float64)
    with float32_is_float64():
        if hasattr(model.model, "rotary_emb"):
            model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        return [model(torch.tensor([ids]), use_cache=False).logits[0].numpy() for ids in sequences]


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    out: dict[str, np.ndarray] = {}
    worst = {"float32 run": 0.0, "reference_model": 0.0, "dialect 4": 0.0}
    for case in tiny.CASES:
        with tempfile.TemporaryDirectory() as temp:
            folder = tiny.write_checkpoint(Path(temp) / case, case)
            lengths = [MAIN_LENGTH, *(LENGTHS if case in LENGTH_CASES else ())]
            sequences = [tiny.token_ids(n) for n in lengths]
            full, *others = logits_float64(folder, sequences)
            with torch.no_grad():
                rounded = load(folder, torch.float32)(torch.tensor([sequences[0]]), use_cache=False).logits[0].numpy()
            old = tiny.write_checkpoint(Path(temp) / "dialect4", case, dialect=4)
            errors = {"float32 run": _error(rounded, full)}
            errors["reference_model"] = max(
                _error(reference_logits(f, s), r)
                for s, r in zip(sequences, [full, *others], strict=True)
                for f in (folder, old)
            )
            errors["dialect 4"] = _error(logits_float64(old, sequences[:1])[0], full)
        figures = "  ".join(f"{k} {v:.1e}" for k, v in errors.items())
        print(case.ljust(20), figures, f" rms {full.std():.2f}", flush=True)
        worst = {k: max(v, errors[k]) for k, v in worst.items()}
        out[case] = full[np.ix_(POSITIONS, columns(full.shape[1]))].astype(np.float32)
        for n, logits in zip(lengths[1:], others, strict=True):
            out[f"{case}@{n}"] = logits[-1].astype(np.float32)
    print("worst:", worst)
    if worst["float32 run"] > 1e-4 or worst["reference_model"] > 1e-9 or worst["dialect 4"] > 1e-12:
        raise SystemExit("disagreement: nothing written")
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}, numpy {np.__version__}"
    np.savez_compressed(HERE / "logits.npz", versions=np.array(versions), **out)
    size = (HERE / "logits.npz").stat().st_size
    print(f"{HERE / 'logits.npz'}: {len(out)} arrays, {size / 1024:.0f} KiB, {versions}")


def _error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


if __name__ == "__main__":
    main()
