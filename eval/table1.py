"""Print Table 1 for a trained and certified model folder.

    python -m eval.table1 checkpoint=runs/demo/model n=500

Rows: the first sentence, full depth, half depth, each measure at its certified threshold and at a given one, and the
oracle. On a CPU the articles are spread over processes, one per core; ``accelerate launch -m eval.table1 ...`` spreads
them over its own. Writes records.parquet, summary.json, the table as Markdown and CSV, and figures where matplotlib is
installed.
"""

import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.cli import program
from calm.config import Table1Config
from calm.device import choose_device

from .common import (
    Stamp,
    choose_dtype,
    choose_model,
    choose_runner,
    corpus_settings,
    decoder_maker,
    finish,
    open_decoder,
    say,
)

if TYPE_CHECKING:
    from calm.data import Corpus
    from calm.decode_spec import Decode
    from calm.models.speaking import SpeakingModel
    from calm.policies import Policy
    from calm.records import DecodeTrace, Example

    from .records import Scored
    from .rows import Plan, Row


def run(config: Table1Config, run_dir: Path) -> int:
    stamp = Stamp("eval.table1", config)
    folder = choose_model(config.checkpoint)
    device, dtype = choose_device(config.device), choose_dtype(config.precision)
    from calm.calibration.bars import Bars
    from calm.decode_spec import DecodeSpec

    from .tracked import track

    spec = DecodeSpec(
        str(folder), device, dtype, config.decoder, config.batch_size, config.backfill, head=config.head,
        head_k=config.head_k, **choose_runner(config.decoder, config.runner, device, folder), weights=config.weights,
        cross_kv=config.cross_kv, make=decoder_maker(config.decoder), record_confidences=True,
    )  # fmt: skip
    bars = Bars()
    with open_decoder(spec, config.processes, bars.rows) as decode:
        if decode is None:
            return 0
        plan, identity = _plan(config, folder, decode.model, spec.arithmetic)
        corpus = _corpus(config, decode.model)
        examples = corpus.splits["test"][: config.n]
        say(f"corpus: {corpus.name}, {len(examples)} articles of the test split, one of each family")
        decode.warm(len(examples))
        scored = decode_rows(plan.rows, examples, decode, bars)
        model = decode.model
    table = _table(config, model, corpus.name, scored)
    summary = {
        **stamp.values(),
        "checkpoint": str(folder),
        "model": _name(model),
        "layers": model.num_layers,
        "identity": identity,
        "corpus": {"name": corpus.name, "content_hash": corpus.content_hash},
        "notes": plan.notes,
        "table1": table,
    }
    _write(run_dir, summary, corpus, examples, scored, plan)
    _show(summary, run_dir)
    track(config, run_dir, summary, model, scored)
    finish(summary, run_dir)
    return 0


def decode_rows(
    rows: Sequence["Row"],
    examples: Sequence["Example"],
    decode: "Decode",
    progress: Callable[[str, int, int], None],
) -> list["Scored"]:
    """Decode and score every row; what is the same decode is done once."""
    from calm.policies import Full

    from .records import check_whole, score

    done: list[tuple[Policy, list[DecodeTrace], float]] = []

    def decoded(name: str, policy: "Policy") -> tuple[list["DecodeTrace"], float]:
        for known, traces, seconds in done:
            if known == policy:
                return traces, seconds
        progress(name, 0, len(examples))
        begun = time.perf_counter()
        traces = decode(examples, policy)
        seconds = time.perf_counter() - begun
        progress(name, len(examples), len(examples))
        check_whole(traces, examples)
        done.append((policy, traces, seconds))
        return traces, seconds

    full, _ = decoded("full", Full())
    scored = []
    for row in rows:
        traces, seconds = (None, None) if row.policy is None else decoded(row.name, row.policy)
        scored.append(score(row, examples, traces, full, seconds))
    return scored


def _plan(config: Table1Config, folder: Path, model: "SpeakingModel", dtype: str) -> tuple["Plan", dict[str, Any]]:
    from calm.calibration import ModelIdentity, load_artifacts
    from calm.calibration.artifact import served_as
    from calm.models.settings import need_exits
    from calm.papers import given_thresholds

    from .rows import plan_rows

    need_exits(model.settings, "eval.table1")
    corpus = corpus_settings(config.data, model.settings.data).name
    chosen = {**given_thresholds(corpus, _name(model)), **config.given}
    given = {name: value for name, value in chosen.items() if value is not None}
    identity = ModelIdentity.of(
        model,
        folder,
        dtype=dtype,
        backfill=config.backfill,
        head=config.head,
        head_k=config.head_k,
        decoder=config.decoder,
    )
    return plan_rows(
        config, given, model.settings, identity, served_as(load_artifacts(folder), identity)
    ), identity.to_json()


def _corpus(config: Table1Config, model: "SpeakingModel") -> "Corpus":
    from calm.calibration.trained import training_rows
    from calm.data import check_overlap, load_corpus
    from calm.errors import CalibrationError

    data = corpus_settings(config.data, model.settings.data)
    tokenizer = model.tokenizer if data.max_article_tokens is not None else None
    corpus = load_corpus(data, splits=("calibration", "test"), tokenizer=tokenizer)
    overlap = check_overlap({"test": corpus.splits["test"][: config.n], "train": training_rows(model, data)})
    if overlap:
        raise CalibrationError(
            f"{overlap}: the model was trained on these rows, so they do not show what it does with new articles; "
            "use the split and the columns that it was trained with, or a corpus of other articles"
        )
    return corpus


def _name(model: "SpeakingModel") -> str:
    from calm.papers import model_name

    return model_name(model.settings.model, model.hf.config.to_dict())


def _table(
    config: Table1Config, model: "SpeakingModel", corpus: str, scored: Sequence["Scored"]
) -> list[dict[str, Any]]:
    from calm.papers import paper_row

    from .records import table_row

    table = []
    for each in scored:
        row = each.row
        certified = (config.consistency, config.tolerance) if row.certified else None
        given = row.schedule.threshold if row.schedule is not None and "@" in row.name else None
        name = row.name.partition("@")[0]
        paper = None
        if row.measure is None or certified is not None or isinstance(given, float):
            threshold = given if isinstance(given, float) else None
            paper = paper_row(corpus, _name(model), name, threshold=threshold, certified=certified)
        table.append(table_row(each, model.num_layers, config.seed, config.bootstrap, paper))
    return table


def _write(
    run_dir: Path,
    summary: dict[str, Any],
    corpus: "Corpus",
    examples: Sequence["Example"],
    scored: Sequence["Scored"],
    plan: "Plan",
) -> None:
    """Everything but summary.json, which comes last. Adds what it learns about the rows to the summary."""
    from .records import write_records, write_rows
    from .render import as_csv, as_markdown

    write_records(run_dir / "records.parquet", examples, scored)
    artifacts = [row.artifact for row in plan.rows if row.artifact is not None]
    splits: dict[str, Sequence[Example]] = {"test": examples}
    if artifacts:
        splits["calibration"] = corpus.splits["calibration"][: artifacts[0].n]
    summary["rows"] = write_rows(run_dir / "rows.json", splits)
    certified_on = sorted({artifact.calibration_rows for artifact in artifacts})
    summary["calibration_rows"] = certified_on
    if artifacts and certified_on != [summary["rows"]["calibration"]["hash"]]:
        summary["notes"].append(
            f"the thresholds were not certified on the calibration rows of this corpus ({corpus.name}), so what is "
            "certified need not hold for its articles"
        )
    (run_dir / "table1.md").write_text(as_markdown(summary["table1"]), encoding="utf-8")
    (run_dir / "table1.csv").write_text(as_csv(summary["table1"]), encoding="utf-8")
    if find_spec("matplotlib") is not None:
        _draw(run_dir, summary["table1"])


def _draw(run_dir: Path, table: list[dict[str, Any]]) -> None:
    import logging

    import pandas as pd

    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from calm.plotting import plot_exit_layers, plot_speed_quality

    plot_speed_quality(pd.DataFrame(table)).figure.savefig(run_dir / "speed_quality.png", dpi=150)
    exits = [row for row in table if row["exit_histogram"] and (row["measure"] or row["row"] == "oracle")]
    layers = [
        {"row": row["row"], "layer": layer, "share": count / row["tokens"]}
        for row in exits
        for layer, count in enumerate(row["exit_histogram"], start=1)
    ]
    if layers:
        plot_exit_layers(pd.DataFrame(layers)).figure.savefig(run_dir / "exit_layers.png", dpi=150)


def _show(summary: dict[str, Any], run_dir: Path) -> None:
    from calm.papers import sources

    from .render import as_text

    table = summary["table1"]
    say(as_text(table))
    articles = table[0]["articles"]
    say(f"ROUGE-L over {articles} articles, with a bootstrap interval; layers of {summary['layers']} per emitted token")
    say(f"metric: {summary['metric']}")
    picked = [row for row in table if row["picked"]]
    if picked:
        say(f"* picked on dev: {picked[0]['row']}. A share of layers is no speed-up.")
    for note in summary["notes"]:
        say(f"note: {note}")
    for source in sorted({row["paper"]["source"] for row in table if row["paper"]}):
        say(f"paper: {sources()[source]}")
    say(f"written to {run_dir}")


main = program("table1", Table1Config, run)

if __name__ == "__main__":
    main()
