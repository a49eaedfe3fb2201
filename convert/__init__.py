"""hotcold.convert: from a Hugging Face folder or a stock GGUF to a neuron-split GGUF."""
