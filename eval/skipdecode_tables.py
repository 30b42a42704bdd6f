"""Tables 4 and 5 of the SkipDecode paper in shape: ours, and the paper's numbers beside."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from calm.config import CONF_DIR
from calm.errors import ConfigError

from .skipdecode_ways import BASE, CALM, METHODS, SKIP

NAMES = {BASE: "full depth", SKIP: "SkipDecode", "multi_layer_exit": "multi-layer exit", CALM: "CALM-DEC"}


@dataclass(frozen=True)
class Paper:
    """What the paper reports for a corpus and a model; None where it says nothing."""

    corpus: str
    model: str

    def __post_init__(self) -> None:
        told = _numbers()["rouge_l"]
        if self.corpus not in told or self.model not in told[self.corpus]:
            there = ", ".join(f"{corpus} ({', '.join(models)})" for corpus, models in told.items())
            raise ConfigError(f"paper={self.corpus} paper_model={self.model}: the paper has {there}")

    def at(self, what: str, method: str, speedup: int) -> float | None:
        """``rouge_l``, ``bleu`` (0-1) or ``layers`` of a method at a nominal speed-up."""
        numbers = _numbers()
        by_method = numbers[what].get(self.corpus, {}).get(self.model, {})
        values = by_method.get(SKIP if method == BASE else method)  # Table 4's 1x is the base model
        if values is None or speedup not in numbers["speedups"]:
            return None
        return float(values[numbers["speedups"].index(speedup)])


@cache
def _numbers() -> dict[str, Any]:
    import yaml

    numbers: dict[str, Any] = yaml.safe_load((CONF_DIR / "papers" / "skipdecode.yaml").read_text(encoding="utf-8"))
    return numbers


def table4(rows: Sequence[Mapping[str, Any]], clocks: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A line for each way: quality, generated layers, and the clock at each batch size beside full depth."""
    batches = list(dict.fromkeys(clock["batch"] for clock in clocks))
    head = ["method", "speed-up", "ROUGE-L [95 %]", "BLEU", "layers", "of them nominal"]
    head += [*(f"steps by time, batch {batch}" for batch in batches), "paper ROUGE-L", "paper BLEU", "paper layers"]
    ratios = {(clock["way"], clock["batch"]): clock["decode_tokens_ratio"] for clock in clocks}
    body = [
        [
            NAMES[row["method"]],
            f"{row['speedup']}x",
            f"{row['rouge_l']:.4f} [{row['rouge_l_low']:.4f}, {row['rouge_l_high']:.4f}]",
            _shown(row["bleu"], 4),
            _shown(row["layers"], 2),
            _shown(row["layers_nominal"], 2),
            *(_shown(ratios.get((row["way"], batch)), 2) for batch in batches),
            _shown(row["paper_rouge_l"], 3),
            _shown(row["paper_bleu"], 3),
            _shown(row["paper_layers"], 1),
        ]
        for row in rows
    ]
    return [head, *body]


def table5(rows: Sequence[Mapping[str, Any]], paper: Paper) -> list[list[str]]:
    """A line for each method: ROUGE-L by speed-up, the paper's in brackets. 1x of a schedule is the base model."""
    speedups = sorted({row["speedup"] for row in rows})
    cells = {(row["method"], row["speedup"]): row for row in rows}
    body = []
    for method in METHODS:
        line = [NAMES[method]]
        for speedup in speedups:
            row = cells.get((BASE if speedup == 1 and method != CALM else method, speedup))
            beside = paper.at("rouge_l", method, speedup)
            told = "" if beside is None else f" ({beside:.3f})"
            line.append("" if row is None else f"{row['rouge_l']:.4f}{told}")
        if any(each == method for each, _ in cells):
            body.append(line)
    return [["ROUGE-L (paper)", *(f"{speedup}x" for speedup in speedups)], *body]


def ablation_table(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A line for each schedule of an ablation; differences are to the first, SkipDecode as it stands."""
    head = ["decay", "layers from", "to", "warm-up", "layers", "ROUGE-L [95 %]", "BLEU", "ROUGE-L gained [95 %]"]
    body = [
        [
            row["decay"] + (f" {row['power']:g}" if row["decay"] == "power" else ""),
            str(row["max_layers"]),
            str(row["min_layers"]),
            str(row["warmup_layers"]),
            _shown(row["layers"], 2),
            f"{row['rouge_l']:.4f} [{row['rouge_l_low']:.4f}, {row['rouge_l_high']:.4f}]",
            _shown(row["bleu"], 4),
            ""
            if place == 0
            else f"{row['rouge_l_gained']:.4f} [{row['rouge_l_gained_low']:.4f}, {row['rouge_l_gained_high']:.4f}]",
        ]
        for place, row in enumerate(rows)
    ]
    return [head, *body]


def _shown(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
