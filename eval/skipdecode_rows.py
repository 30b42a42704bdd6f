"""Rows of eval.skipdecode's summary, from what its trials left: means, intervals, paired differences."""

from collections.abc import Sequence

from calm.experiment_config import SkipDecodeConfig

from .skipdecode_slots import slot_row
from .skipdecode_tables import Paper
from .skipdecode_ways import BASE, METHODS, SKIP, VARIANT, Way, opened
from .trials import Row


def quality_rows(config: SkipDecodeConfig, answered: dict[str, Row], paper: Paper) -> list[Row]:
    """A row for each way, with intervals, the difference to the base and the paper's numbers beside."""
    import numpy as np

    from calm.metrics import with_interval

    base, found = answered.get(f"{BASE}-1x"), []
    for row in answered.values() if base is not None else ():
        if row["method"] == VARIANT:
            continue
        scores, first = np.array(row["scores"]), np.array(base["scores"] if base else [])
        found.append(
            {
                **{name: value for name, value in row.items() if name not in ("scores", "lengths", "kind")},
                **with_interval("rouge_l", scores, config.seed, config.bootstrap),
                **with_interval("rouge_l_minus_full", scores - first, config.seed, config.bootstrap),
                **{
                    f"paper_{what}": paper.at(what, row["method"], row["speedup"])
                    for what in ("rouge_l", "bleu", "layers")
                },
            }
        )
    return found


def clock_row(row: Row) -> Row:
    """Of a reading what a summary keeps; samples.parquet has all of it."""
    names = ("way", "batch", "layers", "decode_tokens_ratio", "decode_tokens_ratio_low", "decode_tokens_ratio_high")
    return {**{name: row[name] for name in names}, "call_over_full": row["call_over_full"]}


def pairs(config: SkipDecodeConfig, answered: dict[str, Row]) -> list[Row]:
    """SkipDecode against each other method at the same speed-up: paired differences in ROUGE-L."""
    import numpy as np

    from calm.metrics import with_interval

    found = []
    for row in answered.values():
        for other in METHODS if row["method"] == SKIP else ():
            rival = answered.get(f"{other}-{row['speedup']}x")
            if other != SKIP and rival is not None:
                gained = np.array(row["scores"]) - np.array(rival["scores"])
                found.append(
                    {
                        "speedup": row["speedup"], "against": other, "layers": row["layers"],
                        "other_layers": rival["layers"],
                        **with_interval("rouge_l_gained", gained, config.seed, config.bootstrap),
                    }
                )  # fmt: skip
    return found


def ablation(config: SkipDecodeConfig, ways: Sequence[Way], answered: dict[str, Row]) -> list[Row]:
    """SkipDecode at the speed-up ``variants_of`` and each variant of it: settings, quality, paired differences."""
    import numpy as np

    from calm.metrics import with_interval

    reference = f"{SKIP}-{config.variants_of}x"
    chosen = [way for way in ways if way.name == reference or way.method == VARIANT]
    if reference not in answered or len(chosen) < 2:
        return []
    first, found = np.array(answered[reference]["scores"]), []
    for way in chosen:
        row, schedule = answered.get(way.name), way.schedule
        if row is not None and schedule is not None:
            scores = np.array(row["scores"])
            found.append(
                {
                    "way": way.name, **schedule.to_json(), "layers": row["layers"],
                    "layers_nominal": row["layers_nominal"], "bleu": row["bleu"],
                    **with_interval("rouge_l", scores, config.seed, config.bootstrap),
                    **with_interval("rouge_l_gained", scores - first, config.seed, config.bootstrap),
                }
            )  # fmt: skip
    return found


def slot_rows(config: SkipDecodeConfig, ways: Sequence[Way], answered: dict[str, Row]) -> list[Row]:
    """What a schedule is worth where requests come and go (eval.skipdecode_slots), by way and number of places."""
    from calm.models.causal import CausalModel

    found = []
    for way in ways:
        if way.schedule is None or way.method == VARIANT or way.name not in answered:
            continue
        model, lengths = opened(way.folder), answered[way.name]["lengths"]
        first = int(isinstance(model, CausalModel))
        for slots in config.slots:
            found.append({"way": way.name, **slot_row(way.schedule, model.num_layers, lengths, slots, first)})
    return found
