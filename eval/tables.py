"""Tables of texts for a terminal and for Markdown: rows of cells, the header first."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Lines whose columns stand below each other: the first ``left`` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def markdown(rows: Sequence[Sequence[str]], rule: Sequence[str] | None = None) -> str:
    """``rule``: what stands below the header, a cell each; default: nothing of how it is aligned."""
    header, *others = rows
    lines = [header, rule or ["---"] * len(header), *others]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
