"""What batching does to a certificate: the risk of a certified threshold under every batch rule and batch size.

    python -m eval.engine_rules checkpoint=runs/demo/model

Row-exact rules must repeat what ``decode_batch`` gives, answer for answer; how far batch-coupled rules are off is
what this program measures. Risk is the mean loss against the full model that was certified (CALM section 4.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.cli import program
from calm.config import BatchRule, DecoderName
from calm.device import choose_device
from calm.engine_config import EngineRulesConfig

from .changed_answers import is_row_exact, near_ties, parting
from .common import (
    Stamp,
    articles_of,
    choose_model,
    choose_runner,
    decoder_maker,
    finish,
    open_decoder,
    say,
)
from .tables import aligned, markdown

if TYPE_CHECKING:
    from calm.calibration import ConsistencyLoss
    from calm.models.speaking import SpeakingModel
    from calm.policies import Policy
    from calm.records import DecodeTrace, Example

UNEXPLAINED = 4  # exit status: a row-exact rule did not repeat the reference
COLUMNS = ("decoder", "rule", "batch", "risk", "risk_high", "rouge_l", "skipped", "not_run", "changed", "near_ties")


def run(config: EngineRulesConfig, run_dir: Path) -> int:
    stamp = Stamp("eval.engine_rules", config)
    folder, device = choose_model(config.checkpoint), choose_device(config.device)
    from calm.calibration import ConsistencyLoss, load_artifacts
    from calm.calibration.artifact import choose_artifact
    from calm.calibration.bars import Bars
    from calm.calibration.grid import point_to_json
    from calm.decode_spec import DecodeSpec
    from calm.policies import Full

    plain_ones = [each for each in load_artifacts(folder) if not each.identity.way]
    artifact = choose_artifact(plain_ones, config.consistency, config.measure, config.tolerance)
    threshold = artifact.threshold_for(config.tolerance)
    policy = artifact.policy(threshold)
    runner = choose_runner(DecoderName.engine, config.runner, device, folder)
    bars = Bars()
    plain = DecodeSpec(str(folder), device, record_confidences=True)
    with open_decoder(plain, config.processes, bars.rows) as decode:
        if decode is None:
            return 0
        corpus, examples = articles_of(config.data, decode.model, config.n)
        say(f"corpus: {corpus}, {len(examples)} articles; {artifact.name} at threshold {threshold}")
        bars("decode_batch full", 0, len(examples))
        full = decode(examples, Full())
        bars("decode_batch", 0, len(examples))
        reference = decode(examples, policy)
        model = decode.model
    whole = Whole(model, examples, reference, policy, ConsistencyLoss(config.consistency, examples, full), config)
    rows = [_entry("batch", None, plain.batch_size, reference, whole)]
    for rule in config.rules:
        for size in config.batch_sizes:
            spec = DecodeSpec(
                str(folder), device, decoder=DecoderName.engine, batch_size=size, rule=rule,
                quantile=config.quantile, **runner,
                make=decoder_maker(DecoderName.engine),
            )  # fmt: skip
            with open_decoder(spec, config.processes, bars.rows) as decode:
                if decode is None:
                    return 0
                bars(f"{rule.value} at {size}", 0, len(examples))
                traces = decode(examples, policy)
            rows.append(_entry("engine", rule, size, traces, whole))
            say(as_line(rows[-1]))
    say()
    say(as_text(rows))
    say(f"tolerance {config.tolerance:g}, certified on n = {artifact.n} with error_prob {artifact.error_prob:g}")
    summary = {
        **stamp.values(),
        "checkpoint": str(folder),
        "corpus": corpus,
        "articles": len(examples),
        "artifact": artifact.name,
        "threshold": point_to_json(threshold),
        "tolerance": config.tolerance,
        "error_prob": artifact.error_prob,
        "runner": runner["runner"].value,
        "rules": rows,
    }
    summary["unexplained"] = unexplained(rows)
    for name in summary["unexplained"]:
        say(f"{name}: answers differ from decode_batch's where neither a confidence nor a word was nearly tied")
    (run_dir / "engine_rules.md").write_text(as_markdown(rows), encoding="utf-8")
    finish(summary, run_dir)
    return UNEXPLAINED if summary["unexplained"] else 0


def unexplained(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Row-exact rules, with their batch size, that changed answers for no reason that can be seen."""
    return [
        f"{row['rule']} at {row['batch']}"
        for row in rows
        if row["rule"] is not None and is_row_exact(BatchRule(row["rule"])) and row["changed"] > row["near_ties"]
    ]


@dataclass(frozen=True)
class Whole:
    """What every entry is compared with: the articles, the reference decode of each, and how losses are counted."""

    model: "SpeakingModel"
    examples: Sequence["Example"]
    reference: list["DecodeTrace"]
    policy: "Policy"
    loss: "ConsistencyLoss"
    config: EngineRulesConfig


def _entry(
    decoder: str, rule: BatchRule | None, size: int, traces: list["DecodeTrace"], whole: Whole
) -> dict[str, Any]:
    from calm.metrics import bootstrap_ci, depth_summary, mean, rouge_l_many

    losses, config = whole.loss(traces), whole.config
    depth = depth_summary(traces, whole.model.num_layers)
    changed = parting(traces, whole.reference)
    exact = rule is None or is_row_exact(rule)
    return {
        "decoder": decoder,
        "rule": None if rule is None else rule.value,
        "batch": size,
        "risk": mean(losses),
        "risk_high": bootstrap_ci(losses, config.seed, config.bootstrap)[1],
        "rouge_l": mean(rouge_l_many([t.text for t in traces], [e.target for e in whole.examples])),
        "skipped": depth["layers_skipped"],
        "not_run": depth["layers_not_run"],
        "changed": len(changed),
        "near_ties": near_ties(whole.model, whole.examples, whole.policy, changed) if exact else None,
    }


def as_line(row: dict[str, Any]) -> str:
    return (
        f"{row['rule'] or 'decode_batch':>12} at {row['batch']:>3}: risk {row['risk']:.4f}, "
        f"skipped {row['skipped']:.1%}, not run {row['not_run']:.1%}, {row['changed']} answers changed"
    )


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    """A table for the terminal."""
    return "\n".join(aligned(_table(rows)))


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    return markdown(_table(rows))


def _table(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [COLUMNS, *(tuple(_shown(name, row[name]) for name in COLUMNS) for row in rows)]


def _shown(name: str, value: Any) -> str:
    if name in ("skipped", "not_run"):
        return f"{value:.1%}"
    return f"{value:.4f}" if isinstance(value, float) else "" if value is None else str(value)


main = program("engine_rules", EngineRulesConfig, run)

if __name__ == "__main__":
    main()
