"""How fast the engine decodes beside its peers: the same rows for everyone, in one interleaved run, one thread each.

    make peers
    python -m eval.peers shapes=[small] sources=[128] batches=[8] peers=[transformers,ctranslate2-int8]

transformers ``generate`` (eager with a dynamic cache; compiled with a static one), CTranslate2, OpenVINO and ONNX
Runtime, each in a process of its own (eval/peer_workers), and ours likewise: full depth in fp32, bf16 and int8, and
replayed exits. Tokens of everyone are compared with transformers' fp32 first. EOS is ignored while timing, and every
row must bring exactly the tokens that were asked for. With ``checkpoint=`` a trained model is timed on its articles,
and a second run to EOS gives ROUGE-L.

A case that is in the run folder already is not measured again: give the same ``hydra.run.dir=`` to go on. What was
measured in several runs becomes one record by ``merge=[A/summary.json,B/summary.json]``.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.cli import program
from calm.engine_config import PeersConfig
from calm.errors import CalmError, CheckpointError

from .common import Stamp, articles_of, choose_model, finish, say

if TYPE_CHECKING:
    from .peer_case import Model
    from .peer_crew import Crew
    from .peer_plan import Case, WorkerPlan

UNFINISHED = 5  # exit status: cases were refused for noise or could not be measured


@dataclass(frozen=True)
class Articles:
    """What a trained model answers.

    Attributes:
        sources: ids of the articles.
        targets: their references.
        longest: tokens of an answer at most.
    """

    corpus: str
    sources: list[list[int]]
    targets: list[str]
    to_text: Callable[[Sequence[int]], str]
    longest: int


def run(config: PeersConfig, run_dir: Path) -> int:
    stamp = Stamp("eval.peers", config)
    if config.merge:
        from .peer_merge import merged
        from .peer_ratios import as_text

        parts = merged(config.merge)
        say(as_text(parts["ratios"]))
        finish({**stamp.values(), **parts}, run_dir)
        return 0
    work = Path(config.work) if config.work else Path(config.environments) / "models"
    missing: dict[str, str] = {}
    if config.checkpoint is not None:
        records = _model(config, choose_model(config.checkpoint), None, work, run_dir, missing)
    else:
        folders = {shape: shape_folder(shape, work, config.seed) for shape in config.shapes}
        made = [_model(config, folder, shape, work, run_dir, missing) for shape, folder in folders.items()]
        records = [record for each in made for record in each]
    rows = [row for record in records for row in record.get("ratios", ())]
    write_samples(run_dir / "samples.parquet", [record for record in records if "seconds" in record])
    from .peer_ratios import as_text

    say(as_text(rows))
    kept = ("ratios", "seconds", "entrants")
    summary = {
        **stamp.values(),
        "ratios": rows,
        "cases": [{name: value for name, value in record.items() if name not in kept} for record in records],
        "missing": missing,
    }
    for name, reason in missing.items():
        say(f"{name}: not measured: {reason}")
    finish(summary, run_dir)
    return UNFINISHED if missing else 0


def _model(
    config: PeersConfig, folder: Path, shape: str | None, work: Path, run_dir: Path, missing: dict[str, str]
) -> list[dict[str, Any]]:
    """The records of one model's cases: those of the ledger, and measured now what it lacks.

    ``missing`` hears of cases that could not be measured, with the reason.
    """
    from .clocks import look
    from .peer_crew import Crew
    from .peer_plan import cases, our_workers, peer_workers

    model, weights = describe(folder, shape), weights_name(folder)
    articles = _articles(config, folder) if shape is None else None
    asked = [case for case in cases(config, None if shape else model.name) if case.shape == model.name]
    ledger = run_dir / "cases" / weights
    paths = {ledger / f"{case.key(config)}.json": case for case in asked}
    scores = None if articles is None else ledger / f"rouge-l-{config.n}-{next(iter(paths)).stem[-8:]}.json"
    if any(not path.is_file() for path in [*paths, scores] if path is not None):
        if not config.allow_noisy:
            look().check()  # before an hour is spent on a busy machine
        ledger.mkdir(parents=True, exist_ok=True)
        plans = [*peer_workers(config), *our_workers(config)]
        with Crew(config, folder, work / f"{weights}-converted", run_dir / "workers") as crew:
            crew.start(plans, say)
            for path, case in paths.items():
                _measure(config, path, case, model, crew, plans, articles, missing)
            if articles is not None and scores is not None and not scores.is_file():
                _to_the_end(scores, crew, articles, model.eos)
    return [json.loads(path.read_text("utf-8")) for path in [*paths, scores] if path is not None and path.is_file()]


def _measure(
    config: PeersConfig,
    path: Path,
    case: "Case",
    model: "Model",
    crew: "Crew",
    plans: Sequence["WorkerPlan"],
    articles: Articles | None,
    missing: dict[str, str],
) -> None:
    """Measure a case that has no record yet, and leave one."""
    from calm.checkpoint import write_json

    from .peer_case import measure_case
    from .shapes import random_sources

    if path.is_file():
        return
    if articles is None:
        sources = random_sources(model.vocab_size, case.batch, case.source, config.seed, model.eos)
    else:
        sources = articles.sources[: case.batch]
    try:
        write_json(path, measure_case(config, case, model, crew, plans, sources))
    except CalmError as error:
        missing[path.stem] = str(error)
    else:
        say(f"measured: {path.stem}")


def describe(folder: Path, shape: str | None) -> "Model":
    """What the cases need to know of a folder.

    Raises:
        CheckpointError: it has no readable config.json of a T5.
    """
    from .peer_case import Model
    from .shapes import PAPER_NAMES

    try:
        told = json.loads((folder / "config.json").read_text("utf-8"))
        layers = int(told.get("num_decoder_layers") or told["num_layers"])
        sizes = int(told["vocab_size"]), int(told["eos_token_id"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: its config.json is not that of a T5 ({error})") from None
    name = shape or folder.resolve().name
    return Model(name, layers, *sizes, PAPER_NAMES.get(name, name))


def shape_folder(shape: str, work: Path, seed: int) -> Path:
    """A model folder of this shape with random weights, written the first time."""
    from .shapes import write_folder

    folder = work / f"{shape}-{seed}"
    if not (folder / "config.json").is_file():
        say(f"writing {folder}: shape {shape}, random weights")
        write_folder(shape, folder, seed)
    return folder


def weights_name(folder: Path) -> str:
    """A folder's name with a hash of its weights: others are converted, and measured, anew."""
    from calm.checkpoint import sha256_bytes, sha256_file

    parts = [sha256_file(folder / name) for name in ("model.safetensors", "config.json")]
    return f"{folder.resolve().name}-{sha256_bytes(''.join(parts).encode())[:12]}"


def _articles(config: PeersConfig, folder: Path) -> Articles:
    from calm.data.text import decode_ids, encode_source
    from calm.models.folder import load

    model = load(folder)
    tokenizer, settings = model.tokenizer, model.settings
    corpus, examples = articles_of(config.data, model, max(config.n, *config.batches))
    return Articles(
        corpus,
        [encode_source(tokenizer, example.source, settings) for example in examples],
        [example.target for example in examples],
        lambda ids: decode_ids(tokenizer, ids),
        settings.max_target_tokens,
    )


def _to_the_end(path: Path, crew: "Crew", articles: Articles, eos: int) -> None:
    """Leave a record of ROUGE-L of everyone's answers to EOS."""
    from calm.checkpoint import write_json

    from .peer_text import scores

    told = scores(crew.answers(articles.sources, articles.longest), articles.targets, eos, articles.to_text)
    for name, entry in told.items():
        say(f"{name}: ROUGE-L {entry['rouge_l']:.4f}, {entry['tokens']:.1f} tokens a row")
    seen = {"corpus": articles.corpus, "articles": len(articles.sources)}
    write_json(path, {**seen, "rouge_l": told, "failures": dict(crew.failures)})


def write_samples(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Every timed call: one row of ``samples.parquet`` each."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    labels = ("shape", "source_tokens", "batch", "threads")
    rows = [
        {**{name: record[name] for name in labels}, "contender": name, "round": number, "tokens": tokens, "seconds": s}
        for record in records
        for name, pairs in record["seconds"].items()
        for number, pair in enumerate(pairs)
        for tokens, s in zip((record["few"], record["many"]), pair, strict=True)
    ]
    kinds = [
        ("shape", pa.string()), ("source_tokens", pa.int64()), ("batch", pa.int64()), ("threads", pa.int64()),
        ("contender", pa.string()), ("round", pa.int64()), ("tokens", pa.int64()), ("seconds", pa.float64()),
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(kinds)), path)


main = program("peers", PeersConfig, run)

if __name__ == "__main__":
    main()
