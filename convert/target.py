"""What is to be written: metadata and tensors in order, all types and sizes known before the first byte.

In: neuron_split.py or stock.py. Out: Target. Next: writer.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import gguf

from hotcold.convert.lazy import FLOAT_TYPES, LazyTensor, QType
from hotcold.convert.model import Metadata, check_fits, u32

FILE_TYPES = {
    QType.F32: gguf.LlamaFileType.ALL_F32, QType.F16: gguf.LlamaFileType.MOSTLY_F16,
    QType.BF16: gguf.LlamaFileType.MOSTLY_BF16, QType.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
    QType.Q4_0: gguf.LlamaFileType.MOSTLY_Q4_0, QType.Q4_1: gguf.LlamaFileType.MOSTLY_Q4_1,
    QType.Q5_0: gguf.LlamaFileType.MOSTLY_Q5_0, QType.Q5_1: gguf.LlamaFileType.MOSTLY_Q5_1,
    QType.Q4_K: gguf.LlamaFileType.MOSTLY_Q4_K_M, QType.Q5_K: gguf.LlamaFileType.MOSTLY_Q5_K_M,
    QType.Q6_K: gguf.LlamaFileType.MOSTLY_Q6_K,
}


@dataclass
class Target:
    """A GGUF to be: everything but its bytes."""

    arch: str
    metadata: Metadata  # without general.architecture
    tensors: list[LazyTensor]
    activation: str

    def __post_init__(self) -> None:
        check_fits(self.metadata)

    @property
    def n_bytes(self) -> int:
        """Bytes of tensor data, padding included."""
        return sum(gguf.GGUFWriter.ggml_pad(t.n_bytes, gguf.GGUF_DEFAULT_ALIGNMENT) for t in self.tensors)

    @property
    def n_parameters(self) -> int:
        return sum(t.n_elements for t in self.tensors if t.qtype != QType.I32)

    def type_counts(self) -> Counter[str]:
        return Counter(t.qtype.name for t in self.tensors)

    def main_type(self) -> QType:
        """The type that most bytes of the matrices have."""
        sizes: Counter[QType] = Counter()
        for t in self.tensors:
            if len(t.shape) > 1:
                sizes[t.qtype] += t.n_bytes
        return sizes.most_common(1)[0][0]

    def add_file_type(self) -> None:
        """general.file_type and general.quantization_version, as llama.cpp's converter writes them."""
        self.metadata["general.file_type"] = u32(FILE_TYPES[self.main_type()])
        if any(t.qtype not in (*FLOAT_TYPES, QType.I32) for t in self.tensors):
            self.metadata["general.quantization_version"] = u32(gguf.GGML_QUANT_VERSION)
