"""Which draft of self-speculative decoding pays: what the first layers draft, the others check (calm/drafting.py).

    python -m eval.speculative checkpoint=FOLDER [data=NAME] [n=500]

Every layer, length and threshold is simulated from one pass over full depth's own answers (eval/speculative_simulated):
acceptance, words a round, and how many passes of layers and head a word takes. The best on dev are then decoded, by the
reference decoders and by the engine, and their answers compared with full depth's: they must be the same. The clock
last: at each batch size in turns with full depth, a static depth and certified exits of the same engine, which all but
drafts change answers. Of decoder-only folders transformers' own early-exit drafts stand beside its greedy search. A
bound by passes is no speed-up. Intervals are over articles, of clocks over rounds. Writes summary.json, rows.parquet
and the figure.
"""

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.cli import program
from calm.drafting import Draft
from calm.errors import CalibrationError, CalmError, DataError
from calm.experiment_config import SpeculativeConfig

from .common import Stamp, asked_of, choose_model, finish, first_articles, say
from .experiment import UNFINISHED, draw, keep_rows, say_columns
from .trials import Found, Ledger, Trial

if TYPE_CHECKING:
    from calm.models.speaking import SpeakingModel
    from calm.records import Example
    from serve.model import ServedModel

UNIMPORTANT = ("checkpoint", "drafts", "engine", "peer", "batches", "attempts")  # to a trial's numbers
UNEXPLAINED = 4  # exit status: an answer is not full depth's, and no near tie explains it
SIMULATED = ("way", "acceptance", "words_a_round", "layer_passes", "head_passes", "layers_run", "fewer_passes")
DECODED = ("way", "decoder", "dtype", "articles", "changed", "near_ties", "acceptance", "words_a_round")
CLOCKED = ("way", "batch", "decode_tokens_ratio", "decode_tokens_ratio_low", "decode_tokens_ratio_high", "tokens_ratio")
PEERS = ("way", "tokens_ratio", "tokens_ratio_low", "tokens_ratio_high", "changed")


def run(config: SpeculativeConfig, run_dir: Path) -> int:
    stamp, folder = Stamp("eval.speculative", config), choose_model(config.checkpoint)
    import torch

    torch.set_num_threads(config.threads)
    from calm.architectures import spec_of
    from calm.calibration.identity import code_version, hash_rows

    from .layer_answers import open_any, weights_hash
    from .speculative_decoded import Compared
    from .speculative_simulated import chosen, draft_from, head_layers, simulated

    model = open_any(folder, config.data, "cpu")
    spec, dtype = spec_of(model), config.dtype or certified_dtype(config, folder)
    corpus, splits = first_articles(config.data, model, {"dev": config.dev_rows, "test": config.n})
    dev, articles = splits["dev"], splits["test"]
    if len(articles) < 2:
        raise DataError(f"the test split of {corpus} has {len(articles)} articles; two at least are needed")
    say(f"corpus: {corpus}, {len(articles)} articles of the test split; {model.num_layers} decoder layers")
    told = {
        "model": weights_hash(folder), "rows_hash": hash_rows([*dev, *articles]), "dtype": dtype, "code": code_version()
    }  # fmt: skip
    ledger = Ledger(run_dir, {**asked_of(config, UNIMPORTANT), **told})
    first = [
        Trial({"kind": "chosen"}, lambda: chosen(config, model, spec, dev)),
        Trial({"kind": "simulated"}, lambda: simulated(config, model, spec, articles)),
    ]
    found = ledger.run(first, "speculative", say)
    if found.failed:
        raise CalmError(next(iter(found.failed.values())))
    drafts = [draft_from(row) for row in found.rows if row["kind"] == "chosen"]
    served = cache(partial(as_served, model, folder))
    compared = Compared(config, model, articles, served)
    todo = compared.trials(drafts, list(dict.fromkeys((dtype, "fp32"))) if config.engine else [])
    todo += clock_trials(config, dtype, drafts, articles, served) if config.engine else []
    todo += peer_trials(config, model, drafts, articles)
    more = ledger.run(todo, "speculative", say)
    found = Found([*found.rows, *more.rows], more.failed)
    rows = keep_rows(found, run_dir)
    tell(rows, drafts)
    summary: dict[str, Any] = {
        **stamp.values(),
        "checkpoint": str(folder),
        "corpus": corpus,
        "articles": len(articles),
        "dev_articles": len(dev),
        **told,
        "num_layers": model.num_layers,
        "head_layers": head_layers(spec),
        "tolerance": config.tolerance,
        "peer": peer_note(config, model),
        "noisy": any(row["noisy"] for row in rows if row["kind"] in ("clock", "peer")),
        "unexplained": sum(row["unexplained"] or 0 for row in rows if row["kind"] == "decoded"),
        "rows": rows,
        "failed": found.failed,
    }
    summary["figures"] = draw("speculative", summary, run_dir)
    finish(summary, run_dir)
    return UNEXPLAINED if summary["unexplained"] else UNFINISHED if found.failed else 0


def certified_dtype(config: SpeculativeConfig, folder: Path) -> str:
    """That in which this machine's engine has certified exits, so that drafts stand beside them; fp32 where none is."""
    from calm.calibration import load_artifacts

    from .timed_folder import certified_way

    try:
        return certified_way(load_artifacts(folder), folder, config.tolerance)[1]
    except CalibrationError:
        return "fp32"


def as_served(model: "SpeakingModel", folder: Path, dtype: str) -> "ServedModel":
    """The model as an engine has it in one of SERVED_DTYPES."""
    from serve.model import served

    from .layer_answers import is_ours
    from .shallow_ways import opened

    if is_ours(folder):
        return opened(folder, dtype)
    if dtype != "fp32":
        raise CalmError(f"{folder} is a plain folder, which is served in fp32 here; give dtype=fp32")
    return served(model)


def clock_trials(
    config: SpeculativeConfig, dtype: str, drafts: Sequence[Draft], articles: "Sequence[Example]", served: Any
) -> list[Trial]:
    """One a batch size; ``served`` gives the model by dtype."""
    from .speculative_clock import timed_at

    return [
        Trial(
            {"kind": "clock", "batch": batch},
            lambda b=batch: timed_at(config, dtype, served(dtype), drafts, articles, b),  # type: ignore[misc]
            label=f"clock {batch}",
        )
        for batch in config.batches
    ]


def peer_trials(
    config: SpeculativeConfig, model: "SpeakingModel", drafts: Sequence[Draft], articles: "Sequence[Example]"
) -> list[Trial]:
    """One at batch 1, of decoder-only models."""
    from calm.models.causal import CausalModel

    from .speculative_peer import peer_rows

    if not (config.peer and isinstance(model, CausalModel)):
        return []
    layers = sorted({draft.layer for draft in drafts})
    return [Trial({"kind": "peer", "batch": 1}, lambda: peer_rows(config, model, layers, articles), label="peer")]


def peer_note(config: SpeculativeConfig, model: "SpeakingModel") -> str:
    """Why transformers' own drafts do not stand beside; empty where they do."""
    from calm.models.causal import CausalModel

    from .speculative_peer import NO_T5

    if not config.peer:
        return "not asked for (peer=false)"
    return "" if isinstance(model, CausalModel) else NO_T5


def tell(rows: Sequence[dict[str, Any]], drafts: Sequence[Draft]) -> None:
    """For people: of the simulation the drafts that were chosen, all of what was decoded and timed."""
    from .speculative_simulated import draft_from

    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in ("simulated", "decoded", "clock", "peer")}
    say_columns([row for row in kinds["simulated"] if draft_from(row) in drafts], SIMULATED, digits=3)
    say_columns(kinds["decoded"], DECODED, digits=3, left=3)
    if kinds["clock"]:
        say_columns(kinds["clock"], CLOCKED, digits=3)
    if kinds["peer"]:
        say_columns(kinds["peer"], PEERS, digits=3)


main = program("speculative", SpeculativeConfig, run)

if __name__ == "__main__":
    main()
