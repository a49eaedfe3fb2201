"""Work on the rows of one slab, on all cores that this process may use.

In: rows and a function of them that gives one row per row. Out: an array. Next: lazy.py and precision.py.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from hotcold.runtime.threads import default_threads

PART = 1 << 19  # elements that a thread takes at a time: 2 MiB of float32, so temporaries stay small


def by_rows(make: Callable[[np.ndarray], np.ndarray], rows: np.ndarray, columns: int, dtype: type) -> np.ndarray:
    """`make(rows)`, an array [n, columns] of `dtype`, made of parts of the rows; each row must depend on itself alone.

    Threads, as NumPy and compiled functions let others run while they work.
    """
    step = max(1, PART // max(1, rows.shape[1]))
    starts = range(0, len(rows), step)
    threads = min(default_threads(), len(starts))
    if threads < 2:
        return make(rows)
    result: np.ndarray = np.empty((len(rows), columns), dtype)

    def part(start: int) -> None:
        result[start:start + step] = make(rows[start:start + step])

    with ThreadPoolExecutor(threads) as pool:
        try:
            for _ in pool.map(part, starts):  # an error in a thread is raised here
                pass
        except BaseException:  # Ctrl-C above all: not one of the parts that wait is begun
            pool.shutdown(cancel_futures=True)
            raise
    return result
