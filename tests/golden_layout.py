"""Which logits golden/logits.npz keeps.

In: nothing. Out: positions, columns, lengths. Next: golden/make_golden.py and test_golden.py.
"""

import numpy as np

MAIN_LENGTH = 40
POSITIONS = [0, 1, 6, 7, 8, 9, 15, 16, 31, 32, 39]
N_COLUMNS = 64
LENGTHS = (1, 8, 9, 63, 64, 65, 300)
LENGTH_CASES = ("llama", "mistral-window8", "relu")


def columns(n_vocab: int) -> np.ndarray:
    """Vocabulary columns kept: N_COLUMNS of them, first and last included."""
    return np.linspace(0, n_vocab - 1, N_COLUMNS).astype(np.int64)
