"""Names of the neuron-split layout: keys, tensors, versions. The one place.

In: nothing. Out: constants used by convert/ (which writes them) and runtime/ (which reads them). Next: gguf_file.py.

A neuron-split file is an ordinary GGUF v3. All stock keys and all tensors outside the FFN keep llama.cpp's names
and layout. Matrices of the FFN hold one row per neuron:

    gated       blk.N.ffn_gate.weight     [n_ff, n_embd]      key rows
                blk.N.ffn_up_down.weight  [2*n_ff, n_embd]    row 2i: up row of neuron i, row 2i+1: its down column
    not gated   blk.N.ffn_up.weight       [n_ff, n_embd]      key rows
                blk.N.ffn_down_t.weight   [n_ff, n_embd]      down columns
    both        blk.N.ffn_neuron_id       i32 [n_ff]          stored position -> position in the source model
    optional    blk.N.ffn_neuron_count    i64 [n_ff]          how often it fired in profiling
                blk.N.ffn_pred_*                              predictor of the layer, rows in stored order

Layers whose norms are followed by a ReLU (KEY_NORM_RELU) hold the matrices that read the norm's output by input
column instead, one row per input: attn_q_t, attn_k_t, attn_v_t and the key matrix, ffn_gate_t or ffn_up_t.
"""

VERSION = 1

KEY_VERSION = "hotcold.version"                # u32
KEY_ACTIVATION = "hotcold.ffn.activation"      # string, one of ACTIVATIONS
KEY_THRESHOLD = "hotcold.ffn.threshold"        # f32[n_layer]
KEY_NEURONS = "hotcold.ffn.neurons"            # u32[n_layer]
KEY_NORM_RELU = "hotcold.norm_relu"            # u32[n_layer], 1: a ReLU follows the layer's norms

# Where ffn_neuron_count comes from.
KEY_PROFILE_TOKENS = "hotcold.profile.tokens"  # u64
KEY_PROFILE_CORPUS = "hotcold.profile.corpus"  # string, for people
KEY_PROFILE_SHA256 = "hotcold.profile.sha256"  # string, of the text

# Predictors, all per layer. A layer of kind "none" runs exact in predict mode.
KEY_PREDICTOR_KIND = "hotcold.predictor.kind"            # string[n_layer], one of PREDICTORS
KEY_PREDICTOR_INPUT = "hotcold.predictor.input"          # u32[n_layer]: 0 the layer's own FFN input, 1 that of the
                                                         # layer before (look-ahead); never 1 in layer 0 or for signbit
KEY_PREDICTOR_RANK = "hotcold.predictor.rank"            # u32[n_layer]: rows of ffn_pred_in; 0 for signbit and none
KEY_PREDICTOR_THRESHOLD = "hotcold.predictor.threshold"  # f32[n_layer]: a candidate scores above it
KEY_PREDICTOR_RECALL = "hotcold.predictor.recall"                      # f32[n_layer], measured on held-out tokens
KEY_PREDICTOR_RECALL_MAGNITUDE = "hotcold.predictor.recall_magnitude"  # f32[n_layer], by length of what is added
KEY_PREDICTOR_PRECISION = "hotcold.predictor.precision"                # f32[n_layer]
KEY_PREDICTOR_DENSITY = "hotcold.predictor.density"                    # f32[n_layer]: share of candidates
KEY_SPARSITY = "hotcold.profile.sparsity"                              # f32[n_layer]: share of neurons off
PREDICTORS = ("none", "lowrank", "mlp", "signbit")

# The placement index: parallel arrays, one entry per solved budget; the per-layer ones have n_layer entries for each.
KEY_PLACEMENT_MODEL = "hotcold.placement.model"              # string: placement/identity.py of the placed model
KEY_PLACEMENT_BUDGET = "hotcold.placement.budget"            # u64[k]: bytes of VRAM
KEY_PLACEMENT_N_CTX = "hotcold.placement.n_ctx"              # u32[k]
KEY_PLACEMENT_PLAN = "hotcold.placement.plan"                # string[k], one of gpu/placement.py's KINDS
KEY_PLACEMENT_SPARSITY = "hotcold.placement.sparsity"        # string[k]: "dense" | "exact" | "predict"
KEY_PLACEMENT_OBJECTIVE = "hotcold.placement.objective"      # string[k]: "paper" | "time"
KEY_PLACEMENT_HARDWARE = "hotcold.placement.hardware"        # string[k]: the hardware figures as JSON
KEY_PLACEMENT_HOT = "hotcold.placement.hot"                  # u32[k * n_layer]: neurons 0..hot-1 are on the GPU
KEY_PLACEMENT_KEYS_ON_GPU = "hotcold.placement.keys_on_gpu"  # u32[k * n_layer]: 1: so are all key rows
KEY_PLACEMENT_LAYER_ON_GPU = "hotcold.placement.layer_on_gpu"  # u32[k * n_layer]: 1: attention and norms are

# What relufication did, for people and reports.
KEY_RELUFY_RANK = "hotcold.relufy.rank"        # u32: always-on neurons added per layer
KEY_RELUFY_TOKENS = "hotcold.relufy.tokens"    # u64: tokens it was fitted on
KEY_RELUFY_ERROR = "hotcold.relufy.error"      # f32[n_layer]: relative squared error after the fit

KEY_RELU_AS_SILU = "hotcold.relu_as_silu"  # u32 K: a stock file whose weights carry factors that make SiLU act as ReLU

# Neurons of these fire only where the key (gate, or up when not gated) exceeds the layer's threshold.
SPARSE_ACTIVATIONS = ("relu", "relu2", "fatrelu", "drelu")
DENSE_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
ACTIVATIONS = SPARSE_ACTIVATIONS + DENSE_ACTIVATIONS

# GGUF architectures the runtime computes.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "minicpm", "opt", "arcee")


def block(layer: int, name: str) -> str:
    """Tensor name inside a layer: block(3, "ffn_gate.weight") -> "blk.3.ffn_gate.weight"."""
    return f"blk.{layer}.{name}"


def key_matrix(gated: bool, by_column: bool) -> str:
    """Name of the matrix that decides which neurons fire; by_column: in norm_relu layers of the neuron-split layout."""
    if by_column:
        return FFN_GATE_T if gated else FFN_UP_T
    return FFN_GATE if gated else FFN_UP


def turned(gated: bool) -> dict[str, str]:
    """The matrices of a norm_relu layer that the neuron-split layout holds by input column: stock name -> its name."""
    return ATTN_T | {key_matrix(gated, False): key_matrix(gated, True)}


FFN_GATE = "ffn_gate.weight"
FFN_UP = "ffn_up.weight"
FFN_DOWN = "ffn_down.weight"                   # stock layout only
FFN_UP_DOWN = "ffn_up_down.weight"
FFN_DOWN_T = "ffn_down_t.weight"
FFN_GATE_T = "ffn_gate_t.weight"               # norm_relu layers only, as the next two
FFN_UP_T = "ffn_up_t.weight"
ATTN_T = {"attn_q.weight": "attn_q_t.weight", "attn_k.weight": "attn_k_t.weight", "attn_v.weight": "attn_v_t.weight"}
FFN_GATE_BIAS = "ffn_gate.bias"
FFN_UP_BIAS = "ffn_up.bias"
FFN_DOWN_BIAS = "ffn_down.bias"
FFN_NEURON_ID = "ffn_neuron_id"
FFN_NEURON_COUNT = "ffn_neuron_count"

# Predictors. Scores of all neurons from x [n_embd]; a neuron is a candidate where score > threshold of the layer.
#   lowrank  ffn_pred_out @ (ffn_pred_in @ x) + ffn_pred_out.bias
#   mlp      ffn_pred_out @ relu(ffn_pred_in @ x + ffn_pred_in.bias) + ffn_pred_out.bias
#   signbit  n_embd - 2 * popcount(ffn_pred_sign xor signs of x) + ffn_pred_out.bias
FFN_PRED_IN = "ffn_pred_in.weight"             # [rank, n_embd]
FFN_PRED_IN_BIAS = "ffn_pred_in.bias"          # f32 [rank], mlp only
FFN_PRED_OUT = "ffn_pred_out.weight"           # [n_ff, rank]
FFN_PRED_OUT_BIAS = "ffn_pred_out.bias"        # f32 [n_ff]
FFN_PRED_SIGN = "ffn_pred_sign"                # i32 [n_ff, 2 * ceil(n_embd / 64)]: bit j%32 of word j//32 is 1 where
                                               # the key row's weight j is negative; 0 beyond n_embd
PRED_TENSORS = (FFN_PRED_IN, FFN_PRED_IN_BIAS, FFN_PRED_OUT, FFN_PRED_OUT_BIAS, FFN_PRED_SIGN)
