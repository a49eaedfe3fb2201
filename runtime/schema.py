"""Names of the neuron-split layout: keys, tensors, versions. The one place.

In: nothing. Out: constants used by convert/ (which writes them) and runtime/ (which reads them). Next: gguf_file.py.

A neuron-split file is an ordinary GGUF v3. All stock keys and all tensors outside the FFN keep llama.cpp's names
and layout. Matrices of the FFN hold one row per neuron:

    gated       blk.N.ffn_gate.weight     [n_ff, n_embd]      key rows
                blk.N.ffn_up_down.weight  [2*n_ff, n_embd]    row 2i: up row of neuron i, row 2i+1: its down column
    not gated   blk.N.ffn_up.weight       [n_ff, n_embd]      key rows
                blk.N.ffn_down_t.weight   [n_ff, n_embd]      down columns
    both        blk.N.ffn_neuron_id       i32 [n_ff]          stored position -> position in the source model
"""

VERSION = 1

KEY_VERSION = "hotcold.version"                # u32
KEY_ACTIVATION = "hotcold.ffn.activation"      # string, one of ACTIVATIONS
KEY_THRESHOLD = "hotcold.ffn.threshold"        # f32[n_layer]
KEY_NEURONS = "hotcold.ffn.neurons"            # u32[n_layer]

# Neurons of these fire only where the key (gate, or up when not gated) exceeds the layer's threshold.
SPARSE_ACTIVATIONS = ("relu", "relu2", "fatrelu", "drelu")
DENSE_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
ACTIVATIONS = SPARSE_ACTIVATIONS + DENSE_ACTIVATIONS

# GGUF architectures the runtime computes.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "minicpm", "opt", "arcee")


def block(layer: int, name: str) -> str:
    """Tensor name inside a layer: block(3, "ffn_gate.weight") -> "blk.3.ffn_gate.weight"."""
    return f"blk.{layer}.{name}"


FFN_GATE = "ffn_gate.weight"
FFN_UP = "ffn_up.weight"
FFN_DOWN = "ffn_down.weight"                   # stock layout only
FFN_UP_DOWN = "ffn_up_down.weight"
FFN_DOWN_T = "ffn_down_t.weight"
FFN_GATE_BIAS = "ffn_gate.bias"
FFN_UP_BIAS = "ffn_up.bias"
FFN_DOWN_BIAS = "ffn_down.bias"
FFN_NEURON_ID = "ffn_neuron_id"
