"""SkipDecode, multi-layer exit and exits by confidence: Tables 4 and 5 of arXiv 2307.02628 in shape, and the clock.

    python -m eval.skipdecode checkpoint=FOLDER scheduled=[FOLDER,FOLDER] exits=FOLDER [variants=[FOLDER,FOLDER]]
    python -m eval.skipdecode merge=[A/summary.json,B/summary.json]

``checkpoint`` is a model of full depth. Each of ``scheduled`` was trained with finetune.skip_schedule and is decoded
by that schedule: side top is SkipDecode, side bottom the multi-layer exit network. ``exits`` was trained so that every
layer speaks; its thresholds (CALM-DEC) are sought on dev, so that tokens run as many layers as under SkipDecode of the
same speed-up there, or without one 1/2, 1/3, ... of them. Nothing is trained here: conf/experiment has an arm of one
budget for each method. A speed-up is a ratio of layers: a schedule's own over the longest answer, while the layers of a
token are counted, the first one's full depth among them; the clock is that of calm's batch decoder, plain eager torch,
which has every method alike. There a row that has left is held until its mates have, and its skipped keys and values
are filled in.
``variants`` are other schedules of SkipDecode (warm-up layers, decay) beside the one of ``variants_of``: an ablation,
which no clock reads. A rerun with the same hydra.run.dir= decodes nothing again and may add ``batches``. Writes
summary.json, tables.md, rows.parquet (with the scores of all articles), samples.parquet and the figure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.cli import program
from calm.experiment_config import SkipDecodeConfig

from .bleu import MISSING, bleu_signature, corpus_bleu
from .common import Stamp, asked_of, choose_model, finish, first_articles, say
from .experiment import UNFINISHED, draw
from .skipdecode_rows import ablation, clock_row, pairs, quality_rows, slot_rows
from .skipdecode_tables import Paper, ablation_table, table4, table5
from .skipdecode_ways import (
    BASE,
    SKIP,
    VARIANT,
    Way,
    check_folders,
    check_variants,
    decoder,
    exit_way,
    layers_on,
    opened,
    scheduled_ways,
    sought,
)
from .tables import aligned, markdown
from .trials import Ledger, Row, Trial
from .way_clock import clock_rows

if TYPE_CHECKING:
    from calm.records import Example

UNIMPORTANT = ("checkpoint", "scheduled", "variants", "variants_of", "merge", "exits", "paper", "paper_model",
               "speedups", "batches", "slots", "attempts", "allow_noisy", "bootstrap")  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What every trial needs."""

    config: SkipDecodeConfig
    ways: list[Way]
    articles: "list[Example]"


def run(config: SkipDecodeConfig, run_dir: Path) -> int:
    stamp, paper = Stamp("eval.skipdecode", config), Paper(config.paper, config.paper_model)
    if config.merge:
        from .skipdecode_merge import merged

        finish({**stamp.values(), **merged(config.merge)}, run_dir)
        return 0
    folder = choose_model(config.checkpoint)
    import torch

    torch.set_num_threads(config.threads)
    from calm.calibration.identity import MODEL_FILES, code_version, hash_files, hash_rows
    from calm.policies import Full

    scheduled = [choose_model(each) for each in config.scheduled]
    exits = None if config.exits is None else choose_model(config.exits)
    variants = [choose_model(each) for each in config.variants]
    folders = [*scheduled, *variants, *([] if exits is None else [exits])]
    check_folders(folder, folders)
    layers = opened(folder).num_layers
    ways = [Way(BASE, 1, folder, Full(), float(layers)), *scheduled_ways(scheduled)]
    ways += scheduled_ways(variants, variants=True)
    check_variants(config, ways)
    corpus, splits = first_articles(config.data, opened(folder), {"dev": config.dev_rows, "test": config.n})
    dev, articles = splits["dev"], splits["test"]
    told = {
        "models": [hash_files(each, MODEL_FILES) for each in (folder, *folders)],
        "schedules": [opened(each).settings.skip_schedule for each in (*scheduled, *variants)],
        "bleu": bleu_signature(),
        "rows_hash": hash_rows([*dev, *articles]),
        "code": code_version(),
    }
    ledger = Ledger(run_dir, {**asked_of(config, UNIMPORTANT), **told})
    failed: dict[str, str] = {}
    if exits is None:
        say("no exits=: CALM-DEC is left out")
    else:
        chosen = ledger.run(searches(config, exits, dev, layers, ways), "thresholds", say)
        failed |= chosen.failed
        ways.append(exit_way(exits, 1, config.measure, 1.0))
        ways += [exit_way(exits, row["speedup"], config.measure, row["threshold"]) for row in chosen.rows]
    if told["bleu"] is None:
        say(MISSING)
    asked = Asked(config, ways, articles)
    say(f"corpus: {corpus}, {len(articles)} articles of the test split; {len(ways)} ways of decoding")
    found = ledger.run(trials(asked), "skipdecode", say)
    answered = {row["way"]: row for row in found.rows if row["kind"] == "quality"}
    timed = [row for row in found.rows if row["kind"] == "clock"]
    keep(run_dir, answered, timed)
    rows, clocks = quality_rows(config, answered, paper), [clock_row(row) for row in timed]
    varied = ablation(config, ways, answered)
    show(run_dir, [table4(rows, clocks), table5(rows, paper), *([ablation_table(varied)] if varied else [])])
    summary: dict[str, Any] = {
        **stamp.values(), "checkpoint": str(folder), "scheduled": [str(each) for each in scheduled],
        "variants": [str(each) for each in variants],
        "exits": None if exits is None else str(exits), "corpus": corpus, "articles": len(articles), **told,
        "num_layers": layers, "measure": config.measure.value,
        "paper": {"corpus": paper.corpus, "model": paper.model}, "noisy": any(row["noisy"] for row in timed),
        "rows": rows, "clocks": clocks, "pairs": pairs(config, answered),
        "variants_of": config.variants_of, "ablation": varied,
        "slots": slot_rows(config, ways, answered), "failed": {**failed, **found.failed},
    }  # fmt: skip
    if rows:
        summary["figures"] = draw("skipdecode", summary, run_dir)
    finish(summary, run_dir)
    return UNFINISHED if summary["failed"] else 0


def searches(
    config: SkipDecodeConfig, folder: Path, dev: "Sequence[Example]", layers: int, ways: Sequence[Way]
) -> list[Trial]:
    """The threshold of each speed-up of CALM-DEC: for the layers that SkipDecode of this speed-up runs on dev."""
    from calm.records import mean_layers

    layers_at = layers_on(folder, dev, config.measure, config.batch_size)
    wanted = {times: layers / times for times in config.speedups}
    for way in ways:
        if way.method == SKIP and way.speedup in wanted:
            wanted[way.speedup] = mean_layers(decoder(way.folder, config.batch_size)(dev, way.policy))
    return [
        Trial(
            {"kind": "threshold", "speedup": times, "wanted": f"{aim:.6f}"},
            lambda aim=aim: [sought(layers_at, aim, config.search)],  # type: ignore[misc]
        )
        for times, aim in wanted.items()
    ]


def trials(asked: Asked) -> list[Trial]:
    """Quality of every way; then the clocks of a batch size, all ways in turn."""
    from calm.calibration.identity import hash_json

    quality = [
        Trial(
            {"kind": "quality", **way.values()},
            lambda w=way: [answered_by(asked, w)],  # type: ignore[misc]
        )
        for way in asked.ways
    ]
    timed = [way for way in asked.ways if way.method != VARIANT]
    together = hash_json([way.values() for way in timed])[:12]  # a clock is of all that took turns
    clocks = [
        Trial(
            {"kind": "clock", "batch": batch, "ways": together},
            lambda b=batch: timed_at(asked, timed, b),  # type: ignore[misc]
        )
        for batch in asked.config.batches
    ]
    return [*quality, *clocks]


def answered_by(asked: Asked, way: Way) -> Row:
    """ROUGE-L of every article and BLEU of all to their references, and how many layers a token ran."""
    from calm.metrics import depth_summary, rouge_l_many

    traces = decoder(way.folder, asked.config.batch_size)(asked.articles, way.policy)
    texts, references = [trace.text for trace in traces], [each.target for each in asked.articles]
    depth = depth_summary(traces, opened(way.folder).num_layers)
    return {
        "layers": depth["mean_layers"],
        "executed": depth["mean_executed"],
        "backfilled": depth["mean_backfilled"],
        "layers_skipped": depth["layers_skipped"],
        "tokens": depth["tokens"],
        "finished": sum(trace.finished for trace in traces) / len(traces),
        "bleu": corpus_bleu(texts, references),
        "lengths": [len(trace.tokens) for trace in traces],
        "scores": [float(score) for score in rouge_l_many(texts, references)],
    }


def timed_at(asked: Asked, ways: Sequence[Way], batch: int) -> list[Row]:
    """Each of ``ways`` in turn on one batch of articles, EOS ignored; the layers its tokens ran in the time counted.

    Raises:
        CalmError: as clock_rows does.
    """
    from .clocks import Contender

    config = asked.config
    rows = [asked.articles[i % len(asked.articles)] for i in range(batch)]

    def contender(way: Way) -> Contender:
        by_length = {
            n: decoder(way.folder, batch, max_new_tokens=n, ignore_eos=True) for n in (config.few, config.many)
        }
        return Contender(way.name, lambda n: by_length[n](rows, way.policy))

    def layers(way: Way) -> float:
        traces = decoder(way.folder, batch, max_new_tokens=config.many, ignore_eos=True)(rows, way.policy)
        counted = [each for trace in traces for each in trace.own_layers[config.few :]]
        return sum(counted) / len(counted)

    found = clock_rows([contender(way) for way in ways], config, f"batch {batch}")
    return [{**row, "layers": layers(way)} for row, way in zip(found, ways, strict=True)]


def show(run_dir: Path, tables: Sequence[list[list[str]]]) -> None:
    """On the terminal, and as ``tables.md``."""
    say("\n\n".join("\n".join(aligned(table, left=1)) for table in tables))
    (run_dir / "tables.md").write_text("\n".join(markdown(table) for table in tables), encoding="utf-8")


def keep(run_dir: Path, answered: dict[str, Row], timed: Sequence[Row]) -> None:
    """``rows.parquet``: every article's score of every way; ``samples.parquet``: every reading of the clock."""
    import pandas as pd

    scores = [{"way": name, "scores": row["scores"]} for name, row in answered.items()]
    pd.DataFrame(scores).to_parquet(run_dir / "rows.parquet", compression="zstd")
    if timed:
        pd.DataFrame(timed).to_parquet(run_dir / "samples.parquet", compression="zstd")


main = program("skipdecode", SkipDecodeConfig, run)

if __name__ == "__main__":
    main()
