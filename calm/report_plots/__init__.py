"""Figures of the experiments, a file for each: a DataFrame in, Axes out. No file is read or written here."""

from .backfill import plot_backfill
from .length import plot_length
from .slowest_row import plot_slowest_row
from .suitability import plot_suitability

__all__ = ["plot_backfill", "plot_length", "plot_slowest_row", "plot_suitability"]
