"""How the launches of a step are cut into programs. What fits was found by compiling for sm_90; nothing was timed."""

from dataclasses import dataclass

import torch

FEW = 8  # rows: fewer programs than the card has processors, so that each of them has to be quick by itself
ENOUGH = 120  # programs that keep the card busy; a Hopper has 132 processors


@dataclass(frozen=True)
class Tile:
    """Of a product, which one program works on. Powers of two.

    Attributes:
        rows: at least 16, which is what tensor cores take; 1 in a bucket of one row.
        n, k: columns of the result, and numbers that are summed up at a time; at least 16. Of one row columns may be
            fewer.
        stages: of ``k`` numbers, those that are on their way at once.
        warps: of 32 threads.
    """

    rows: int
    n: int
    k: int
    stages: int = 3
    warps: int = 4


@dataclass(frozen=True)
class Block:
    """Of an attention: keys that are looked at at a time, a power of two; stages and warps as of a tile."""

    keys: int
    stages: int = 3
    warps: int = 4


# The larger a tile, the more seldom rows and weights are read again; the smaller, the more programs there are. fp32 has
# no tensor cores here ('ieee'): its products are spelled out, and what is as large as in bf16 would not fit.
PRODUCTS = {
    torch.bfloat16: (
        Tile(64, 64, 64, stages=4, warps=8), Tile(64, 32, 128), Tile(32, 32, 128, stages=4),
        Tile(32, 16, 128, stages=4), Tile(16, 32, 256), Tile(16, 16, 256, stages=4),
    ),
    torch.float32: (
        Tile(64, 64, 32, warps=8), Tile(32, 32, 64, warps=8), Tile(32, 16, 64), Tile(16, 32, 64), Tile(16, 16, 128),
    ),
}  # fmt: skip
WORDS = {
    torch.bfloat16: (Tile(64, 128, 64, stages=4, warps=8), Tile(32, 128, 128, warps=8), Tile(16, 128, 128, warps=8)),
    torch.float32: (Tile(64, 64, 32, warps=8), Tile(32, 64, 64, warps=8), Tile(16, 64, 64, warps=8)),
}


class Tiles:
    """Cuts by the numbers' dtype, the bucket's rows and what is multiplied."""

    def product(self, rows: int, n: int, k: int, dtype: torch.dtype) -> Tile:
        """Of ``rows`` by a weight (n, k): the largest tile that leaves enough programs; else the smallest."""
        if rows == 1:
            return _vector(n, k)
        tiles = [tile for tile in PRODUCTS[dtype] if tile.rows < 2 * rows or tile.rows == 16]
        return next((tile for tile in tiles if -(-rows // tile.rows) * -(-n // tile.n) >= ENOUGH), tiles[-1])

    def words(self, rows: int, n: int, k: int, dtype: torch.dtype) -> Tile:
        """Of ``rows`` by the head (n, k): no weight is read twice for up to 64 rows."""
        if rows == 1:
            return _vector(n, k)
        return next(tile for tile in WORDS[dtype] if tile.rows < 2 * rows or tile.rows == 16)

    def keys(self, rows: int, dtype: torch.dtype) -> Block:
        """``dtype``: of the keys. Beyond a few rows all programs of 64 rows have room at once."""
        if rows <= FEW:
            return Block(64 if dtype is torch.float32 else 128, warps=8)
        return Block(64) if dtype is torch.int8 else Block(32, stages=4)


def _vector(n: int, k: int) -> Tile:
    """Of one row: few columns a program where there are few, and as much of ``k`` on its way as can be."""
    block = 256 if k <= 1024 else 512
    return Tile(1, 16 if n >= 64 * ENOUGH else 4, block, stages=min(6, -(-k // block) + 1))
