"""Matrix products by cuBLAS, through CuPy's binding.

In: addresses on the card. Out: Cublas, or ImportError where the library is not installed. Next: cupy_device.py.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from hotcold.runtime.gpu import nvrtc

CUDA_R_16F, CUDA_R_32F = 2, 0  # cudaDataType_t


class Cublas:
    """A handle of the current card. Its workspace is made by the first product."""

    def __init__(self) -> None:
        self._blas = _binding()
        self._handle = self._blas.create()

    def product(self, m: int, n: int, k: int, a: int, b: int, c: int) -> None:
        """c[m, n] = a[m, k] @ b[n, k].T; a and b F16, c and sums F32. In CuPy's current stream."""
        blas = self._blas
        one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
        # cuBLAS counts by columns: c.T[n, m] = b[n, k] @ a.T[k, m]
        blas.gemmEx(self._handle, blas.CUBLAS_OP_T, blas.CUBLAS_OP_N, n, m, k, one.ctypes.data, b, CUDA_R_16F, k,
                    a, CUDA_R_16F, k, zero.ctypes.data, c, CUDA_R_32F, n, blas.CUBLAS_COMPUTE_32F,
                    blas.CUBLAS_GEMM_DEFAULT)  # fmt: skip

    def close(self) -> None:
        self._blas.destroy(self._handle)


def _binding() -> Any:
    """With constants of its own."""
    try:
        return importlib.import_module("cupy_backends.cuda.libs.cublas")
    except ImportError:  # CuPy 13 does not look into NVIDIA's packages
        if not nvrtc.preload("libcublasLt.so.1?", "libcublas.so.1?", "cublasLt64_*.dll", "cublas64_*.dll"):
            raise
        return importlib.import_module("cupy_backends.cuda.libs.cublas")
