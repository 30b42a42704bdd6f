"""How much a checkpoint could gain from early exit at all, before anybody trains or certifies anything.

    python -m eval.suitability checkpoint=FOLDER [data=NAME] [n=200]

FOLDER is a model folder of ours or a plain folder (config, weights, tokenizer). Articles of the test split
are answered at full depth in fp32; along these answers every layer is asked what it would have said. An oracle's depth,
a bound by bytes on what exits could save in a decode step, and a verdict by rule (eval/verdict.py) follow. A share of
layers is no speed-up, and the bound is of steps whose time goes by their bytes: where products take the time, as in
large batches, exits may bring more. Writes summary.json, rows.parquet and the figure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calm.cli import program
from calm.device import choose_device
from calm.errors import CalmError, DataError
from calm.experiment_config import SuitabilityConfig
from calm.metrics import with_ratio

from .common import Stamp, articles_of, asked_of, choose_model, finish, say
from .experiment import draw, keep_rows
from .tables import aligned
from .trials import Ledger, Row, Trial

if TYPE_CHECKING:
    from calm.models.speaking import SpeakingModel
    from calm.records import Example

UNIMPORTANT = ("checkpoint", "batches", "bootstrap", "seed", "n")  # to an article's own record


def run(config: SuitabilityConfig, run_dir: Path) -> int:
    stamp, folder = Stamp("eval.suitability", config), choose_model(config.checkpoint)
    device = choose_device(config.device)
    from calm.calibration.identity import hash_rows

    from .layer_answers import is_ours, open_any, weights_hash

    model, weights = open_any(folder, config.data, device), weights_hash(folder)
    corpus, examples = articles_of(config.data, model, config.n)
    if not examples:
        raise DataError(f"the test split of {corpus} is empty; choose another corpus with data=NAME")
    say(f"corpus: {corpus}, {len(examples)} articles of the test split; {model.num_layers} decoder layers")
    asked = {**asked_of(config, UNIMPORTANT), "model": weights, "articles": hash_rows(examples)}
    found = Ledger(run_dir, asked).run(list(trials(model, examples, config.batch_size)), "suitability", say)
    if found.failed:
        raise CalmError(next(iter(found.failed.values())))
    rows = keep_rows(found, run_dir)
    trained = is_ours(folder) and bool(model.settings.data)  # a folder that was only imported names no corpus
    measured = findings(config, model, rows, trained)
    say("\n".join(aligned(table_of(measured["layers"]), left=1)))
    say("\n".join(aligned(bytes_table(measured["bounds"]), left=2)))
    say(measured["verdict"]["because"])
    summary = {
        **stamp.values(),
        "checkpoint": str(folder),
        "weights_sha256": weights,
        "corpus": corpus,
        **measured,
    }
    summary["figures"] = draw("suitability", summary, run_dir)
    finish(summary, run_dir)
    return 0


def trials(model: "SpeakingModel", examples: "Sequence[Example]", batch_size: int) -> Iterator[Trial]:
    """A batch of articles each, in the order of the split."""
    from .layer_answers import answers

    for begin in range(0, len(examples), batch_size):
        chosen = examples[begin : begin + batch_size]
        yield Trial({"begin": begin}, lambda rows=chosen: answers(model, rows, batch_size))  # type: ignore[misc]


def findings(config: SuitabilityConfig, model: "SpeakingModel", rows: Sequence[Row], ours: bool) -> dict[str, Any]:
    """All that is averaged over the articles: means over tokens, with 95 % intervals over articles."""
    from calm.architectures import spec_of

    from .exit_bytes import bounds, parts
    from .verdict import Evidence, verdict

    spec, tokens = spec_of(model), np.array([row["tokens"] for row in rows])
    first, settled = (counted(rows, name, spec.num_layers) for name in ("first", "settled"))
    keys = round(float((tokens * (tokens + 1) / 2).sum() / tokens.sum()))  # of the mean token, itself included
    source = model.settings.max_source_tokens
    layers = layer_rows(config, rows, tokens, first, settled)
    oracle = {name: oracle_row(counts, tokens, config) for name, counts in (("first", first), ("settled", settled))}
    made_of = {batch: parts(spec, batch, keys, source) for batch in config.batches}
    reached = bounds(spec, first, config.batches, keys, source, config.seed, config.bootstrap)
    ended = float(np.mean([row["ended"] for row in rows]))
    evidence = Evidence(
        spec.num_layers,
        ours,
        oracle["first"]["depth"],
        oracle["settled"]["depth"],
        {batch: each["head"] / each["step"] for batch, each in made_of.items()},
        ended,
        reached,
    )
    said = verdict(evidence)
    return {
        "early_exit_folder": ours,
        "num_layers": spec.num_layers,
        "articles": len(rows),
        "tokens": int(tokens.sum()),
        "ended": ended,
        "near_ties": sum(row["near_ties"] for row in rows),
        "source_tokens": {
            "counted": source,
            "mean_of_articles": float(np.mean([row["source_tokens"] for row in rows])),
        },
        "keys": keys,
        "oracle": oracle,
        "layers": layers,
        "step_bytes_per_token": made_of,
        "bounds": reached,
        "verdict": asdict(said),
    }


def counted(rows: Sequence[Row], name: str, num_layers: int) -> np.ndarray:
    """Tokens of each article by layer 1..L, (articles, L)."""
    return np.stack([np.bincount(row[name], minlength=num_layers + 1)[1:] for row in rows])


def oracle_row(counts: np.ndarray, tokens: np.ndarray, config: SuitabilityConfig) -> dict[str, float]:
    """Mean depth in layers and the share of the layers above it, with intervals, of tokens that leave as counted."""
    layers = counts.shape[1]
    row = with_ratio("depth", counts @ np.arange(1, layers + 1), tokens, config.seed, config.bootstrap)
    above = {"skipped": "depth", "skipped_low": "depth_high", "skipped_high": "depth_low"}
    return {**row, **{name: 1 - row[depth] / layers for name, depth in above.items()}}


def layer_rows(
    config: SuitabilityConfig, rows: Sequence[Row], tokens: np.ndarray, first: np.ndarray, settled: np.ndarray
) -> list[dict[str, Any]]:
    """A record for each layer: shares of tokens 0..1; ``cosine`` is with the layer below and null at layer 1."""
    again = {"seed": config.seed, "n": config.bootstrap}
    found = []
    for layer in range(1, first.shape[1] + 1):
        row: dict[str, Any] = {"layer": layer}
        for name in ("agree", "margin"):
            row |= with_ratio(name, np.array([each[name][layer - 1] for each in rows]), tokens, **again)
        row |= dict.fromkeys(("cosine", "cosine_low", "cosine_high"))
        if layer > 1:
            row |= with_ratio("cosine", np.array([each["cosine"][layer - 2] for each in rows]), tokens, **again)
        for name, counts in (("first", first), ("settled", settled)):
            row[name] = float(counts[:, layer - 1].sum() / tokens.sum())
        found.append(row)
    return found


def table_of(layers: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """For people: per layer what share of the tokens says the last layer's word, and how sure it is."""
    head = ("layer", "agrees %", "first here %", "settled here %", "margin", "cosine")
    body = [
        (
            str(row["layer"]),
            f"{100 * row['agree']:.1f} [{100 * row['agree_low']:.1f}, {100 * row['agree_high']:.1f}]",
            f"{100 * row['first']:.1f}",
            f"{100 * row['settled']:.1f}",
            f"{row['margin']:.3f}",
            "" if row["cosine"] is None else f"{row['cosine']:.4f}",
        )
        for row in layers
    ]
    return [head, *body]


def bytes_table(bounds: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """For people: what a decode step moves per token with an oracle's exits, and the bound that follows."""
    head = ("checks", "batch", "MB a token", "bound by bytes", "if all left at layer 1")
    body = [
        (
            row["checks"],
            str(row["batch"]),
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['bound']:.2f} [{row['bound_low']:.2f}, {row['bound_high']:.2f}]",
            f"{row['most']:.2f}",
        )
        for row in bounds
    ]
    return [head, *body]


main = program("suitability", SuitabilityConfig, run)

if __name__ == "__main__":
    main()
