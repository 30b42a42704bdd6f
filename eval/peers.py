"""How fast the engine decodes beside its peers: the same rows for everyone, in one interleaved run, one thread each.

    make peers
    python -m eval.peers shapes=[small] sources=[128] batches=[8] peers=[transformers,ctranslate2-int8]

transformers ``generate`` (eager with a dynamic cache; compiled with a static one), CTranslate2, OpenVINO and ONNX
Runtime, each in a process of its own (eval/peer_workers), and ours likewise: full depth in fp32, bf16 and int8, and
replayed exits. Tokens of everyone are compared with transformers' fp32 first. EOS is ignored while timing, and every
row must bring exactly the tokens that were asked for. With ``checkpoint=`` a trained model is timed on its articles,
and a second run to EOS gives ROUGE-L.

A case that is in the run folder already is not measured again: give the same ``hydra.run.dir=`` to go on.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.cli import program
from calm.config import PeersConfig
from calm.errors import CalmError, CheckpointError

from .common import Stamp, choose_model, corpus_settings, finish, say

if TYPE_CHECKING:
    from .peer_case import Model
    from .peer_crew import Crew

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
    work = Path(config.work) if config.work else Path(config.environments) / "models"
    ledger = run_dir / "cases"
    missing: dict[str, str] = {}
    if config.checkpoint is not None:
        folder = choose_model(config.checkpoint)
        _model(config, folder, None, work, ledger, run_dir, missing)
    else:
        for shape in config.shapes:
            _model(config, shape_folder(shape, work, config.seed), shape, work, ledger, run_dir, missing)
    records = _asked(config, ledger)
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
    config: PeersConfig,
    folder: Path,
    shape: str | None,
    work: Path,
    ledger: Path,
    run_dir: Path,
    missing: dict[str, str],
) -> None:
    """Measure the cases of one model that the ledger lacks; ``missing`` hears of those that it lacks afterwards."""
    from calm.checkpoint import write_json

    from .clocks import look
    from .peer_case import measure_case
    from .peer_crew import Crew
    from .peer_plan import cases, our_workers, peer_workers
    from .shapes import random_sources

    model = describe(folder, shape)
    articles = _articles(config, folder) if shape is None else None
    todo = [case for case in cases(config, model.name if shape is None else None) if case.shape == model.name]
    todo = [case for case in todo if not _record(ledger, case.key(config)).is_file()]
    scores = ledger / f"{model.name}-rouge-l.json"
    if not todo and (articles is None or scores.is_file()):
        return
    if not config.allow_noisy:
        look().check()  # before an hour is spent on a busy machine
    plans = [*peer_workers(config), *our_workers(config)]
    ledger.mkdir(parents=True, exist_ok=True)
    with Crew(config, folder, work / store_name(folder), run_dir / "workers") as crew:
        crew.start(plans, say)
        for case in todo:
            key = case.key(config)
            sources = (
                random_sources(model.vocab_size, case.batch, case.source, config.seed, model.eos)
                if articles is None
                else articles.sources[: case.batch]
            )
            try:
                record = measure_case(config, case, model, crew, plans, sources)
            except CalmError as error:
                missing[key] = str(error)
                continue
            write_json(_record(ledger, key), record)
            say(f"measured: {key}")
        if articles is not None and not scores.is_file():
            write_json(scores, _to_the_end(crew, articles, model.eos))


def _record(ledger: Path, key: str) -> Path:
    return ledger / f"{key}.json"


def _asked(config: PeersConfig, ledger: Path) -> list[dict[str, Any]]:
    """Records in the ledger of what this command asks for, in order."""
    from .peer_plan import cases

    trained = None if config.checkpoint is None else Path(config.checkpoint).resolve().name
    paths = [_record(ledger, case.key(config)) for case in cases(config, trained)]
    if trained is not None:
        paths.append(ledger / f"{trained}-rouge-l.json")
    return [json.loads(path.read_text("utf-8")) for path in paths if path.is_file()]


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


def store_name(folder: Path) -> str:
    """Where conversions of a folder are kept: by its weights, so that other weights are converted anew."""
    from calm.checkpoint import sha256_bytes, sha256_file

    parts = [sha256_file(folder / name) for name in ("model.safetensors", "config.json")]
    return f"{folder.resolve().name}-{sha256_bytes(''.join(parts).encode())[:12]}-converted"


def _articles(config: PeersConfig, folder: Path) -> Articles:
    from calm.data import load_corpus
    from calm.data.text import decode_ids, encode_source
    from calm.models.folder import load

    model = load(folder)
    tokenizer, settings = model.tokenizer, model.settings
    data = corpus_settings(config.data, settings.data)
    corpus = load_corpus(data, splits=("test",), tokenizer=tokenizer if data.max_article_tokens is not None else None)
    examples = corpus.splits["test"][: max(config.n, *config.batches)]
    return Articles(
        corpus.name,
        [encode_source(tokenizer, example.source, settings) for example in examples],
        [example.target for example in examples],
        lambda ids: decode_ids(tokenizer, ids),
        settings.max_target_tokens,
    )


def _to_the_end(crew: "Crew", articles: Articles, eos: int) -> dict[str, Any]:
    """ROUGE-L of everyone's answers to EOS."""
    from .peer_text import scores

    answers = crew.answers(articles.sources, articles.longest)
    told = scores(answers, articles.targets, eos, articles.to_text)
    for name, entry in told.items():
        say(f"{name}: ROUGE-L {entry['rouge_l']:.4f}, {entry['tokens']:.1f} tokens a row")
    return {
        "corpus": articles.corpus, "articles": len(articles.sources), "rouge_l": told, "failures": dict(crew.failures)
    }  # fmt: skip


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
