"""config.json -> numbers, with nothing overlooked: every key is used, known to be harmless, or an error.

In: the parsed config of transformers 4 (`rope_scaling`, `rope_theta`) or 5 (`rope_parameters`). Out: ConfigReader,
Rope, windows. Next: families/.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotcold.convert.model import Metadata, array, f32, relufy_metadata, string, u32
from hotcold.convert.precision import Report
from hotcold.runtime.errors import HotcoldError

# Keys that do not change what a trained model computes: training, generation defaults (read elsewhere), bookkeeping.
HARMLESS = frozenset("""
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _flash_attn_2_enabled
    _name_or_path activation_dropout add_cross_attention architectures attention_dropout
    attention_probs_dropout_prob attn_implementation attn_pdrop auto_map bad_words_ids begin_suppress_tokens
    bos_token_id chunk_size_feed_forward classifier_dropout cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample dropout dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing
    hidden_dropout hidden_dropout_prob id2label init_std initializer_range is_decoder is_encoder_decoder
    is_llama_config label2id layerdrop length_penalty max_length max_new_tokens max_sequence_length min_length
    model_max_length model_type no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_past output_scores pad_token_id prefix pretraining_tp problem_type
    pruned_heads remove_invalid_values repetition_penalty resid_pdrop return_dict return_dict_in_generate
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class
    tokenizer_model_max_length tokenizer_padding_side top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache
""".split())
MISSING: Any = object()

# Where config.json says nothing, as in transformers.
DEFAULT_WINDOW = 4096
QWEN_FULL_LAYERS = 28  # Qwen: layers before the first with a window
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class ConfigReader:
    """Reads config.json and remembers which keys were used, so that `finish` can name the ones nobody understood."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.used: set[str] = set()

    def fail(self, key: str, found: Any, allowed: str) -> HotcoldError:
        text = repr(found)
        return HotcoldError(f"config.json: {key} is {text[:200]}: allowed: {allowed}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default` when the key is missing or null."""
        self.used.add(key)
        value = self.config.get(key)
        return default if value is None else value

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is MISSING:
            raise HotcoldError(f"config.json: {key} is missing")
        return value

    def integer(self, key: str, default: Any = MISSING, low: int = 1, high: int = 1 << 24) -> int:
        value = self._required(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self.fail(key, value, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: Any = MISSING, positive: bool = True) -> float:
        return self.check_number(key, self._required(key, default), positive)

    def check_number(self, key: str, value: Any, positive: bool = True) -> float:
        # Not isfinite(): it fails for integers beyond a float's range.
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max or (positive and value <= 0):
            raise self.fail(key, value, "a positive number" if positive else "a finite number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.fail(key, value, "true or false")
        return value

    def text(self, key: str, default: Any = MISSING) -> str:
        value = self._required(key, default)
        if not isinstance(value, str):
            raise self.fail(key, value, "a string")
        return value

    def norm_relu(self, n_layer: int) -> list[bool]:
        """`norm_relu`, hotcold's own key: true, or a flag per layer, where a ReLU follows the norms of a layer.

        No transformers class has such a key; a fine-tune as in "ReLU Strikes Back", stage 2, changes the code.
        """
        value = self.get("norm_relu", False)
        flags = value if isinstance(value, list) else [value] * n_layer
        if len(flags) != n_layer or any(type(flag) is not bool for flag in flags):
            raise self.fail("norm_relu", value, f"true, false or {n_layer} of them, one per layer")
        return flags if any(flags) else []

    def relufied(self, n_layer: int) -> Metadata:
        """`hotcold_relufy`, what hotcold relufy --to-hf writes: rank, tokens and the error of every layer."""
        value = self.get("hotcold_relufy")
        if value is None:
            return {}
        known = value if isinstance(value, dict) else {}
        rank, tokens, error = (known.get(key) for key in ("rank", "tokens", "error"))
        if not (type(rank) is int and 0 <= rank <= 1 << 20 and type(tokens) is int and 0 <= tokens < 1 << 62
                and isinstance(error, list) and len(error) == n_layer
                and all(type(e) in (int, float) and 0 <= e <= 1e30 for e in error)):
            raise self.fail("hotcold_relufy", value, f"rank, tokens and error, a list of {n_layer} numbers from 0, as "
                            "hotcold relufy writes them: or leave it out")
        return relufy_metadata(rank, tokens, [float(e) for e in error])

    def only(self, key: str, allowed: tuple[Any, ...], reason: str) -> None:
        """The key may be missing, null or one of `allowed`: anything else changes the computation."""
        value = self.get(key)
        if value is not None and not any(value == a and type(value) is type(a) for a in allowed):
            raise HotcoldError(f"config.json: {key} is {str(value)[:100]!r}: not supported ({reason}); "
                               f"supported: {', '.join(map(str, allowed)) or 'leaving it out'}")

    def finish(self, family: str, ignore_unknown: bool, report: Report) -> None:
        """Raise, naming the keys that were neither read nor known to be harmless."""
        self.only("quantization_config", (), "weights quantized with GPTQ, AWQ, FP8 or bitsandbytes are packed: "
                  "use the original checkpoint and --outtype q8_0 or q4_0")
        pruned = self.config.get("pruned_heads")
        if pruned:
            raise HotcoldError("config.json: pruned_heads is not empty: not supported")
        if self.config.get("is_encoder_decoder") is True:
            raise HotcoldError("config.json: is_encoder_decoder is true: only decoders are supported")
        unknown = sorted(k for k in self.config if k not in self.used and k not in HARMLESS)
        # A null or empty value cannot switch anything on.
        unknown = [k for k in unknown if self.config[k] not in (None, {}, [])]
        if not unknown:
            return
        shown = ", ".join(f"{k} = {str(self.config[k])[:60]}" for k in unknown[:8])
        if ignore_unknown:
            report.note(f"config.json: ignored keys not known for {family}: {shown}")
            return
        raise HotcoldError(f"config.json: keys not known for {family}, which may change the computation: {shown}: "
                           f"known are {', '.join(sorted(self.used))} and harmless ones: if these do not matter, "
                           "use --ignore-unknown-keys")


@dataclass(frozen=True)
class Rope:
    """Rotary embedding as config.json describes it, both dialects."""

    theta: float
    kind: str  # ROPE_TYPES
    factor: float = 1.0
    orig_ctx: int = 0
    attention_factor: float | None = None  # yarn; None: the usual 1 + 0.1 ln(factor)
    beta_fast: float | None = None
    beta_slow: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0

    def metadata(self, arch: str, head_dim: int) -> Metadata:
        """llama.cpp's keys."""
        meta: Metadata = {f"{arch}.rope.dimension_count": u32(head_dim), f"{arch}.rope.freq_base": f32(self.theta)}
        prefix = f"{arch}.rope.scaling."
        if self.kind in ("linear", "yarn"):
            meta[prefix + "type"] = string(self.kind)
            meta[prefix + "factor"] = f32(self.factor)
        if self.kind == "yarn":
            meta[prefix + "original_context_length"] = u32(self.orig_ctx)
            if self.attention_factor is not None:
                # The runtime multiplies by 1 + 0.1 ln(factor) itself, so the key holds what is left.
                usual = 1.0 + 0.1 * math.log(self.factor) if self.factor > 1 else 1.0
                meta[prefix + "attn_factor"] = f32(self.attention_factor / usual)
            if self.beta_fast is not None:
                meta[prefix + "yarn_beta_fast"] = f32(self.beta_fast)
            if self.beta_slow is not None:
                meta[prefix + "yarn_beta_slow"] = f32(self.beta_slow)
        return meta

    def freq_factors(self, head_dim: int) -> np.ndarray | None:
        """Llama 3 scaling as divisors of the frequencies, float32 [head_dim/2] (tensor rope_freqs.weight)."""
        if self.kind != "llama3":
            return None
        inverse = self.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        low, high = self.orig_ctx / self.low_freq_factor, self.orig_ctx / self.high_freq_factor
        with np.errstate(all="ignore"):  # absurd numbers are refused below
            wavelength = 2 * math.pi / inverse
            smooth = (self.orig_ctx / wavelength - self.low_freq_factor) / (
                self.high_freq_factor - self.low_freq_factor)
            between = 1.0 / ((1 - smooth) / self.factor + smooth)
            factors = np.where(wavelength < high, 1.0, np.where(wavelength > low, self.factor, between))
            result = factors.astype(np.float32)
        if not (np.isfinite(result) & (result > 0)).all():
            raise HotcoldError(f"config.json: rope of type llama3 with theta {self.theta:g}, factor {self.factor:g}: "
                               "its frequencies are not finite: use the original config.json")
        return result


def read_rope(reader: ConfigReader, n_ctx: int, default_theta: float = 10000.0) -> Rope:
    """`rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (transformers 4)."""
    reader.only("partial_rotary_factor", (1, 1.0), "partial rotation")
    reader.only("rope_interleaved", (False,), "interleaved rotation in the checkpoint")
    params, key, theta = _rope_parameters(reader)
    kind = params.pop("rope_type")
    if kind not in ROPE_TYPES:
        raise HotcoldError(f"config.json: {key} has type {kind!r}: supported are {', '.join(ROPE_TYPES)}")
    theta = reader.check_number("rope_theta", default_theta if theta is None else theta)
    if params.pop("partial_rotary_factor", 1.0) != 1.0:
        raise HotcoldError(f"config.json: {key}.partial_rotary_factor is not 1: partial rotation is not supported")
    top_ctx = reader.get("original_max_position_embeddings")
    if top_ctx is not None:
        params["original_max_position_embeddings"] = top_ctx
    rope = _scaling(reader, key, kind, theta, params, n_ctx)
    if params:
        raise HotcoldError(f"config.json: {key} of type {kind} has keys that are not supported: "
                           f"{', '.join(sorted(map(str, params)))}")
    return rope


def _rope_parameters(reader: ConfigReader) -> tuple[dict[str, Any], str, Any]:
    """-> parameters with `rope_type`, the key they are from, and theta or None. Contradictions are errors."""
    new, old = _one_set(reader, "rope_parameters"), _one_set(reader, "rope_scaling")
    theta = reader.get("rope_theta")
    for params in (new, old):
        inner = params.pop("rope_theta", theta)
        if theta is not None and inner != theta:
            raise HotcoldError(f"config.json: rope_theta is {str(theta)[:40]} and, elsewhere, {str(inner)[:40]}: keep "
                               "the one that the model was trained with")
        theta = inner
    if new and old and new != old:
        raise HotcoldError(f"config.json: rope_parameters {str(new)[:100]} and rope_scaling {str(old)[:100]} differ: "
                           "keep the one that the model was trained with")
    return (new, "rope_parameters", theta) if new else (old or {"rope_type": "default"}, "rope_scaling", theta)


def _one_set(reader: ConfigReader, key: str) -> dict[str, Any]:
    """The parameters under `key` without nulls, with `rope_type`; {} when the key is missing, null or empty."""
    params = reader.get(key, {})
    if not isinstance(params, dict):
        raise reader.fail(key, params, "an object or null")
    nested = [v for v in params.values() if isinstance(v, dict)]
    if nested:  # one set per kind of layer
        if len(nested) != sum(v is not None for v in params.values()) or any(v != nested[0] for v in nested):
            raise HotcoldError(f"config.json: {key} differs between kinds of layers, which is not supported: "
                               f"{str(params)[:200]}")
        params = nested[0]
    params = {k: v for k, v in params.items() if v is not None}
    if not params:
        return {}
    kind = params.pop("type", "default")
    return {"rope_type": kind} | params


def _scaling(reader: ConfigReader, key: str, kind: str, theta: float, params: dict[str, Any], n_ctx: int) -> Rope:
    """Takes the keys it understands out of `params`."""
    if kind == "default":
        params.pop("original_max_position_embeddings", None)  # where scaling would begin
        if params.get("factor") == 1:
            del params["factor"]
        return Rope(theta, kind)

    def number(name: str, default: Any = MISSING) -> Any:
        value = params.pop(name, default)
        if value is MISSING:
            raise HotcoldError(f"config.json: {key} of type {kind} lacks {name}")
        return value if value is None else reader.check_number(f"{key}.{name}", value)

    factor = number("factor")
    if kind == "linear":
        params.pop("original_max_position_embeddings", None)  # has no part in linear scaling
        return Rope(theta, kind, factor)
    orig_ctx = int(number("original_max_position_embeddings", n_ctx))
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if low >= high:
            raise HotcoldError(f"config.json: {key}: low_freq_factor {low} must be below high_freq_factor {high}")
        return Rope(theta, kind, factor, orig_ctx, low_freq_factor=low, high_freq_factor=high)
    attention = number("attention_factor", None)
    mscale, mscale_all = number("mscale", None), number("mscale_all_dim", None)
    if attention is None and mscale and mscale_all and factor > 1:
        attention = (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all * math.log(factor) + 1)
    if params.pop("truncate", True) is not True:
        raise HotcoldError(f"config.json: {key}.truncate is false: not supported")
    return Rope(theta, kind, factor, orig_ctx, attention, number("beta_fast", None), number("beta_slow", None))


def read_windows(reader: ConfigReader, n_layer: int, style: str) -> list[int]:
    """Sliding window per layer [n_layer], 0 = full attention. A token sees itself and the window-1 before it.

    `style`: "none" (the key has no effect and must be null), "mistral" (every layer), "qwen" (`use_sliding_window`,
    from `max_window_layers` on, or as `layer_types` says).
    """
    if style == "none":
        reader.only("sliding_window", (), "this family's attention has no window")
        reader.only("layer_types", (["full_attention"] * n_layer,), "this family has full attention only")
        return [0] * n_layer
    if style == "mistral":
        reader.only("layer_types", (["full_attention"] * n_layer, ["sliding_attention"] * n_layer), "mixed layers")
        if "sliding_window" in reader.config and reader.get("sliding_window") is None:  # null: no window
            return [0] * n_layer
        return [reader.integer("sliding_window", DEFAULT_WINDOW)] * n_layer
    window = reader.get("sliding_window", None if "sliding_window" in reader.config else DEFAULT_WINDOW)
    use = reader.flag("use_sliding_window", False)
    first = reader.integer("max_window_layers", QWEN_FULL_LAYERS, low=0)
    types = reader.get("layer_types")
    if not use or window is None:
        if types is not None and types != ["full_attention"] * n_layer:
            raise reader.fail("layer_types", types, "full_attention only, as use_sliding_window is false")
        return [0] * n_layer
    window = reader.integer("sliding_window", DEFAULT_WINDOW)
    if types is None:
        return [window if i >= first else 0 for i in range(n_layer)]
    if not isinstance(types, list) or len(types) != n_layer or \
            any(t not in ("full_attention", "sliding_attention") for t in types):
        raise reader.fail("layer_types", types, f"{n_layer} of full_attention, sliding_attention")
    return [window if t == "sliding_attention" else 0 for t in types]


def window_metadata(arch: str, windows: list[int]) -> Metadata:
    """llama.cpp's keys for a window; the pattern only when some layers have full attention."""
    from gguf import GGUFValueType

    if not any(windows):
        return {}
    meta: Metadata = {f"{arch}.attention.sliding_window": u32(max(windows))}
    if not all(windows):
        pattern = [w > 0 for w in windows]
        meta[f"{arch}.attention.sliding_window_pattern"] = array(pattern, GGUFValueType.BOOL)
    return meta
