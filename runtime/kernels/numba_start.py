"""What Numba loads before the first function is compiled or read from the cache, without the part we do not need.

In: nothing. Out: a context manager around that. Next: cache.py.

Numba asks whether there is a BLAS by importing all of scipy.linalg: a tenth of the time until the first token. Our
kernels call no BLAS. For anyone else in the process who does, Numba loads it then.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ASKED = "scipy.linalg"
_ASKING = "numba.np.arraymath"  # asks once, when it is loaded, and keeps the answer in _HAVE_BLAS


class _NotNow(MetaPathFinder):
    """Says to one thread that there is no such module."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == _ASKED and threading.get_ident() == self._thread:
            raise ImportError("not before it is needed")
        return None


@contextlib.contextmanager
def without_blas() -> Iterator[None]:
    """Numba's parts that are loaded in this block, by this thread, do not load scipy.linalg."""
    if _ASKED in sys.modules or _ASKING in sys.modules:
        yield
        return
    finder = _NotNow()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        asking: Any = sys.modules.get(_ASKING)
        if asking is not None and hasattr(asking, "_HAVE_BLAS"):
            asking._HAVE_BLAS = True  # from now on whoever needs it loads it, or gets Numba's error
