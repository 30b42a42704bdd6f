"""What batching does to a certificate: the risk of a certified threshold under every batch rule and batch size.

    python -m eval.engine_rules checkpoint=runs/demo/model

Row-exact rules must repeat what ``decode_batch`` gives, answer for answer; how far batch-coupled rules are off is
what this program measures. Risk is the mean loss against the full model that was certified (CALM section 4.1).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.cli import program
from calm.config import BatchRule, DecoderName, EngineRulesConfig, Measure

from .common import (
    Stamp,
    choose_device,
    choose_model,
    corpus_settings,
    decoder_maker,
    finish,
    open_decoder,
    say,
)

if TYPE_CHECKING:
    from calm.calibration import Artifact, ConsistencyLoss
    from calm.policies import Policy
    from calm.records import DecodeTrace, Example

UNEXPLAINED = 4  # exit status: a row-exact rule did not repeat the reference
COLUMNS = ("decoder", "rule", "batch", "risk", "risk_high", "rouge_l", "skipped", "not_run", "changed", "near_ties")


def run(config: EngineRulesConfig, run_dir: Path) -> int:
    stamp = Stamp("eval.engine_rules", config)
    folder, device = choose_model(config.checkpoint), choose_device(config.device)
    from calm.calibration import ConsistencyLoss
    from calm.calibration.bars import Bars
    from calm.decode_spec import DecodeSpec
    from calm.policies import Full

    artifact = choose_artifact(folder, config)
    threshold = artifact.threshold_for(config.tolerance)
    policy = artifact.policy(threshold)
    bars = Bars()
    plain = DecodeSpec(str(folder), device, record_confidences=True)
    with open_decoder(plain, config.processes, bars.rows) as decode:
        if decode is None:
            return 0
        examples, corpus = _articles(config, decode.model)
        say(f"corpus: {corpus}, {len(examples)} articles; {artifact.name} at threshold {threshold}")
        bars("decode_batch full", 0, len(examples))
        full = decode(examples, Full())
        bars("decode_batch", 0, len(examples))
        reference = decode(examples, policy)
        loss, num_layers = ConsistencyLoss(config.consistency, examples, full), decode.model.num_layers
    rows = [_entry("batch", None, plain.batch_size, examples, reference, reference, loss, policy, num_layers, config)]
    for rule in config.rules:
        for size in config.batch_sizes:
            spec = DecodeSpec(
                str(folder), device, decoder=DecoderName.engine, batch_size=size, rule=rule,
                quantile=config.quantile,
                make=decoder_maker(DecoderName.engine),
            )  # fmt: skip
            with open_decoder(spec, config.processes, bars.rows) as decode:
                if decode is None:
                    return 0
                bars(f"{rule.value} at {size}", 0, len(examples))
                traces = decode(examples, policy)
            rows.append(_entry("engine", rule, size, examples, traces, reference, loss, policy, num_layers, config))
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
        "threshold": list(threshold) if isinstance(threshold, tuple) else threshold,
        "tolerance": config.tolerance,
        "error_prob": artifact.error_prob,
        "rules": rows,
    }
    summary["unexplained"] = unexplained(rows)
    for name in summary["unexplained"]:
        say(f"{name}: answers differ from decode_batch's where no confidence lay at its threshold")
    (run_dir / "engine_rules.md").write_text(as_markdown(rows), encoding="utf-8")
    finish(summary, run_dir)
    return UNEXPLAINED if summary["unexplained"] else 0


def unexplained(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Row-exact rules, with their batch size, that changed answers for no reason that can be seen."""
    from calm.rules import ROW_EXACT

    exact = {rule.value for rule in ROW_EXACT}
    return [
        f"{row['rule']} at {row['batch']}" for row in rows if row["rule"] in exact and row["changed"] > row["near_ties"]
    ]


def choose_artifact(folder: Path, config: EngineRulesConfig) -> "Artifact":
    """The calibration of the measure asked for, or of the one that dev picked.

    Raises:
        CalibrationError: the folder has none for this consistency and measure.
    """
    from calm.calibration import load_artifacts
    from calm.errors import CalibrationError

    fitting = [a for a in load_artifacts(folder) if a.consistency is config.consistency]
    if config.measure is not None:
        fitting = [a for a in fitting if a.measure is config.measure]
    picked = [a for a in fitting if a.certificate(config.tolerance).picked]
    if not fitting:
        asked = config.measure.value if config.measure else "any measure"
        raise CalibrationError(
            f"{folder} has no calibration of {asked} for {config.consistency.value} consistency; "
            f"run python -m eval.calibrate checkpoint={folder}"
        )
    return (picked or fitting)[0]


def _articles(config: EngineRulesConfig, model: Any) -> tuple[Sequence["Example"], str]:
    from calm.data import load_corpus

    data = corpus_settings(config.data, model.settings.data)
    tokenizer = model.tokenizer if data.max_article_tokens is not None else None
    corpus = load_corpus(data, splits=("test",), tokenizer=tokenizer)
    return corpus.splits["test"][: config.n], corpus.name


def _entry(
    decoder: str,
    rule: BatchRule | None,
    size: int,
    examples: Sequence["Example"],
    traces: list["DecodeTrace"],
    reference: list["DecodeTrace"],
    loss: "ConsistencyLoss",
    policy: "Policy",
    num_layers: int,
    config: EngineRulesConfig,
) -> dict[str, Any]:
    from calm.metrics import bootstrap_ci, depth_summary, mean, rouge_l_many

    losses = loss(traces)
    depth = depth_summary(traces, num_layers)
    changed = [(mine, theirs) for mine, theirs in zip(traces, reference, strict=True) if mine.tokens != theirs.tokens]
    return {
        "decoder": decoder,
        "rule": None if rule is None else rule.value,
        "batch": size,
        "risk": mean(losses),
        "risk_high": bootstrap_ci(losses, config.seed, config.bootstrap)[1],
        "rouge_l": mean(rouge_l_many([t.text for t in traces], [e.target for e in examples])),
        "skipped": depth["layers_skipped"],
        "not_run": depth["layers_not_run"],
        "changed": len(changed),
        "near_ties": sum(near_tie(mine, theirs, policy) for mine, theirs in changed),
    }


def near_tie(trace: "DecodeTrace", reference: "DecodeTrace", policy: "Policy", relative: float = 1e-5) -> bool:
    """Whether a confidence of the reference lay at its threshold where the two first differ, in token or depth.

    Args:
        relative: what counts as at: a difference below this share of the threshold.
    """
    from calm.policies import Confident

    if not isinstance(policy, Confident) or policy.measure is Measure.agreement:  # which is at its threshold often
        return False
    mine, theirs = (zip(t.tokens, t.crossing_layers, strict=True) for t in (trace, reference))
    step = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
    if step is None:  # equal as far as the shorter one goes
        return False
    wanted = (policy.schedule.at(step, layer) for layer in range(1, len(reference.confidences[step])))
    return any(
        abs(confidence - at) < relative * at
        for confidence, at in zip(reference.confidences[step], wanted, strict=False)
    )


def as_line(row: dict[str, Any]) -> str:
    return (
        f"{row['rule'] or 'decode_batch':>12} at {row['batch']:>3}: risk {row['risk']:.4f}, "
        f"skipped {row['skipped']:.1%}, not run {row['not_run']:.1%}, {row['changed']} answers changed"
    )


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    """A table for the terminal."""
    table = [COLUMNS, *(tuple(_shown(name, row[name]) for name in COLUMNS) for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table)


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(_shown(name, row[name]) for name in COLUMNS) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _shown(name: str, value: Any) -> str:
    if name in ("skipped", "not_run"):
        return f"{value:.1%}"
    return f"{value:.4f}" if isinstance(value, float) else "" if value is None else str(value)


main = program("engine_rules", EngineRulesConfig, run)

if __name__ == "__main__":
    main()
