"""How launches are cut: enough programs where the numbers allow it, and no tile that is mostly empty."""

from itertools import product

import pytest
import torch

from serve.graph.tiles import ENOUGH, Tile, Tiles

DTYPES = (torch.float32, torch.bfloat16)


def programs(tile: Tile, rows: int, n: int) -> int:
    return -(-rows // tile.rows) * -(-n // tile.n)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_every_product_is_cut(dtype: torch.dtype) -> None:
    for rows, n, k in product((*range(2, 70), 128, 200, 256), (32, 384, 512, 768, 2304, 32128), (16, 384, 768, 2048)):
        tile = Tiles().product(rows, n, k, dtype)
        assert tile.rows == 16 or tile.rows < 2 * rows
        assert programs(tile, rows, n) >= ENOUGH or (tile.rows, tile.n) == (16, 16)
        for cut in (tile, Tiles().words(rows, n, k, dtype)):
            assert all(size >= 16 and size & (size - 1) == 0 for size in (cut.rows, cut.n, cut.k))


def test_more_rows_take_larger_tiles_and_the_head_is_read_once() -> None:
    tiles = Tiles()
    sizes = [tiles.product(rows, 2304, 768, torch.bfloat16) for rows in (8, 64, 256)]
    assert [(tile.rows, tile.n) for tile in sizes] == [(16, 16), (32, 32), (64, 64)]
    for rows, dtype in product((8, 16, 24, 32, 48, 64), DTYPES):
        assert tiles.words(rows, 32128, 768, dtype).rows >= rows


@pytest.mark.parametrize("k", [16, 384, 512, 768, 1024, 2048, 3072, 10240])
def test_one_row_has_programs_enough(k: int) -> None:
    for n, dtype in product((384, 768, 2304, 32128), DTYPES):
        for tile in (Tiles().product(1, n, k, dtype), Tiles().words(1, n, k, dtype)):
            assert tile.rows == 1 and tile.stages <= -(-k // tile.k) + 1
            assert n < 4 * ENOUGH or programs(tile, 1, n) >= ENOUGH
