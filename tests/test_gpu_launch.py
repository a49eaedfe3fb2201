"""Grids and blocks stay within what every card allows, for models of all sizes."""

from __future__ import annotations

import itertools

import pytest

from hotcold.runtime.gpu import launch

SHAPES = list(itertools.product((64, 576, 4096, 16384), (1, 1536, 57344, 152064), (1, 30, 148)))


@pytest.mark.parametrize("kind", launch.WEIGHTS_PER_LOAD)
def test_limits(kind: str) -> None:
    for n_embd, rows, gpus in SHAPES:
        slices = launch.slices(kind, rows, n_embd, gpus)
        assert 1 <= slices <= launch.MAX_SLICES
        for made in (
            launch.begin(n_embd), launch.norm_token(n_embd), launch.quantize(rows), launch.activate(rows),
            launch.matvec(kind, rows, n_embd), launch.neuron_values(kind, rows, n_embd, gpus),
            launch.axpy_down(kind, n_embd, slices), launch.merge(n_embd), launch.sign_scores(rows, n_embd, gpus),
        ):  # fmt: skip
            threads = made.block[0] * (made.block[1] if len(made.block) > 1 else 1)
            assert 32 <= threads <= 1024 and made.block[0] % 32 == 0
            assert min(made.grid) >= 1 and max(made.grid[1:], default=1) <= 65535 and made.shared <= 48 << 10


def test_everything_is_covered() -> None:
    for kind, (n_embd, rows, _) in itertools.product(launch.WEIGHTS_PER_LOAD, SHAPES):
        grid, block, _ = launch.matvec(kind, rows, n_embd)
        assert grid[0] * block[1] >= rows and block[0] * block[1] == launch.ROW_THREADS
        grid, block, _ = launch.axpy_down(kind, n_embd, 5)
        assert grid[0] * block[0] * launch.WEIGHTS_PER_LOAD[kind] >= n_embd and grid[1] == 5


def test_attention() -> None:
    for heads, kv, n_ctx, gpus in ((32, 32, 4096, 82), (28, 4, 32768, 128), (1, 1, 1, 1), (64, 8, 131072, 148)):
        splits = launch.attend_splits(heads, kv, n_ctx, gpus)
        grid, _, _ = launch.attend_part(heads, kv, splits)
        assert 1 <= splits <= launch.MAX_SPLITS and 32 * (splits - 1) < n_ctx
        assert grid[0] * launch.ATTEND_HEADS >= heads
    assert launch.attend_merge(7, 80) == ((7,), (96,), 0)
