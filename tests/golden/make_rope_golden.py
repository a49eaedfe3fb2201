"""Rotary frequencies as transformers computes them -> rope.npz.

Run with transformers >= 5 and torch installed: python tests/golden/make_rope_golden.py
"""

from pathlib import Path

import numpy as np
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# name -> (head_dim, context, rope_parameters)
CASES = {
    "linear": (64, 8192, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "yarn": (64, 8192, {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                        "original_max_position_embeddings": 2048}),
    "yarn_qwen": (128, 131072, {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0,
                                "original_max_position_embeddings": 32768}),
    "yarn_all_keys": (80, 4096, {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 8.0, "attention_factor": 1.5,
                                 "beta_fast": 16.0, "beta_slow": 2.0, "original_max_position_embeddings": 512}),
    "llama3": (64, 131072, {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
                            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}),
}  # fmt: skip


def main() -> None:
    arrays = {}
    for name, (head_dim, context, parameters) in CASES.items():
        config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim,
                             max_position_embeddings=context, rope_parameters=parameters)  # fmt: skip
        frequencies, magnitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
        arrays[f"{name}.frequencies"] = frequencies.numpy()
        arrays[f"{name}.magnitude"] = np.float32(magnitude)
    np.savez(Path(__file__).with_name("rope.npz"), **arrays)


if __name__ == "__main__":
    main()
