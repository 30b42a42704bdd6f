"""What eval.drift prints: its table, and in words what that does not hold."""

from typing import Any

USUAL, TRAFFIC = "usual", "traffic"  # the model's own corpus, and what comes after it
WORDS = {USUAL: "usual traffic", TRAFFIC: "other traffic"}
COLUMNS = (
    "part",
    "requests",
    "mean_exit_layer",
    "answer_skipped",
    "risk",
    "rouge_l",
    "rouge_l_to_full",
    "full_rouge_l",
)


def as_lines(summary: dict[str, Any]) -> list[str]:
    """What the table does not hold, in words."""
    calibrated, lines = summary["calibrated"], [""]
    lines.append(
        f"an answer skipped {calibrated['answer_skipped']:.3f} of the layers at calibration "
        f"(n = {calibrated['n']}, up to {calibrated['slack']:.3f} is nothing)"
    )
    for told in summary["actions"]:
        alarm, more = told["alarm"], told["alarms"]
        came = "no alarm" if alarm is None else f"alarm after {alarm['after']} answers of the {WORDS[alarm['phase']]}"
        count = len(more[USUAL]) + len(more[TRAFFIC])
        lines.append(f"{told['on_drift']}: {came}" + (f", {count} in all" if count > 1 else ""))
    for name, key in ((USUAL, "clean"), (TRAFFIC, "shifted")):
        told = summary[key]
        line = f"{WORDS[name]}, shuffled: {told['alarms']} of {told['shuffles']} orders of {told['requests']} alarm"
        if told["after"] is not None:
            least, median, most = told["after"]
            line += f", after {median:g} answers (median; {least} to {most})"
        lines.append(
            f"{line}; log evidence up to {told['log_evidence']:.1f} of {calibrated['log_evidence_of_alarm']:.1f}"
        )
    return [*lines, ""]


def table_of(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table, header first."""
    parts: list[tuple[str, dict[str, Any] | None]] = [(USUAL, summary[USUAL])]
    for told in summary["actions"]:
        name = told["on_drift"]
        parts += [(f"{name}, before", told["before"]), (f"{name}, after", told["after"])]
        parts += [("  warn on the same", told["after_warn"])] if "after_warn" in told else []
    return [
        COLUMNS,
        *((part, *(_shown(name, values[name]) for name in COLUMNS[1:])) for part, values in parts if values),
    ]


def _shown(name: str, value: Any) -> str:
    if name == "requests":
        return str(value)
    return f"{value:.2f}" if name == "mean_exit_layer" else f"{value:.4f}"
