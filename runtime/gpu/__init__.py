"""The GPU's half of the runtime: placement, memory, kernels and the engine that runs both halves of a token."""
