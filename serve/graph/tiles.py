"""How the launches of a step are cut into programs. What fits was found by compiling for sm_90; nothing was timed."""

from dataclasses import dataclass

import torch

FEW = 8  # rows: fewer programs than the card has processors, so that each of them has to be quick by itself


@dataclass(frozen=True)
class Tile:
    """Of a product, which one program works on.

    Attributes:
        n, k: columns of the result, and numbers that are summed up at a time: powers of two, at least 16.
        stages: of ``k`` numbers, those that are on their way at once.
        warps: of 32 threads.
    """

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


class Tiles:
    """Cuts by the numbers' dtype and the bucket's rows."""

    def product(self, dtype: torch.dtype) -> Tile:
        """fp32 has no tensor cores here ('ieee'): its products are spelled out, and larger tiles would not fit."""
        return Tile(32, 32) if dtype is torch.float32 else Tile(32, 128)

    def words(self, dtype: torch.dtype) -> Tile:
        """Of the head: ``n`` words."""
        return Tile(64, 32) if dtype is torch.float32 else Tile(128, 128)

    def keys(self, rows: int, dtype: torch.dtype) -> Block:
        """``dtype``: of the keys. Beyond a few rows all programs of 64 rows have room at once."""
        if rows <= FEW:
            return Block(64 if dtype is torch.float32 else 128, warps=8)
        return Block(64) if dtype is torch.int8 else Block(32, stages=4)
