"""Every experiment on a finished model, one after the other, and one page of all: is early exit worth it here?

    python -m eval.report checkpoint=runs/demo/model
    python -m eval.report checkpoint=runs/demo/model only=[backfill,length] overrides.backfill=[n=100] minutes=20
    python -m eval.report checkpoint=runs/demo/model hydra.run.dir=FOLDER run=false    # the page alone, again

The report says at which threshold and under which batch rule, and why not more: made by rule from the numbers. An
experiment that fails does not stop the others; trainings are never started, only collected (``found=[FOLDER]``).
Killed, it goes on where it was with the same ``hydra.run.dir=``. Writes report.html, summary.json, checklist.md and a
folder for each experiment with its data, figures and log.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.cli import program
from calm.experiment_config import ReportConfig

if TYPE_CHECKING:
    from .answer import Answer
    from .collect import Found
    from .plan import Plan


def run(config: ReportConfig, run_dir: Path) -> int:
    from calm.locking import RunLock

    from ..common import Stamp, choose_model, finish, say
    from ..experiment import UNFINISHED
    from ..trials import State
    from .experiments import chosen
    from .page import check_libraries
    from .plan import Plan, corpus_overrides, run_all
    from .tracked import track

    check_libraries()
    experiments = chosen(config.only, config.skip, list(config.overrides))
    stamp, model = Stamp("eval.report", config), choose_model(config.checkpoint)
    plan = Plan(config, model, run_dir, corpus_overrides())
    run_dir.mkdir(parents=True, exist_ok=True)
    with RunLock(run_dir):
        if config.run:
            run_all(plan, [each for each in experiments if plan.place(each) == plan.folder(each)])
        found = [plan.collected(each) for each in experiments]
        answer = write_page(plan, found)
    for sentence in answer.flat():
        say(sentence)
    say(f"the page: {run_dir / 'report.html'}")
    summary = {
        **stamp.values(),
        "checkpoint": str(model),
        "records": str(plan.records) if plan.has_records else None,
        "worth": answer.worth.value,
        "answer": answer.flat(),
        "experiments": {each.experiment.name: each.to_json() for each in found},
        "experiments_s": round(sum(each.seconds for each in found), 3),
    }
    finish(summary, run_dir)
    track(config.tracking, run_dir, summary)
    return 0 if all(each.state == State.done.value for each in found) else UNFINISHED


def write_page(plan: "Plan", found: Sequence["Found"]) -> "Answer":
    """``report.html`` and ``checklist.md`` of the report's folder; the answer that stands at the top of the page."""
    from calm.checkpoint import write_atomic

    from .answer import answered
    from .checklist import checklist
    from .evidence import gathered
    from .page import page

    unknown = [missing(each) for each in found if each.summary is None]
    summaries = {each.experiment.name: each.summary for each in found if each.summary is not None}
    said = {each.experiment.name: each.said for each in found}
    answer = answered(gathered(summaries, plan.records if plan.has_records else None, said, unknown))
    text = page(f"Early exit: {model_name(plan.model)}", about(plan.model, found), answer, found, plan.run_dir)
    write_atomic(plan.run_dir / "report.html", text)
    write_atomic(plan.run_dir / "checklist.md", checklist(found))
    return answer


def missing(found: "Found") -> str:
    """What is not known because an experiment is not there."""
    question = found.experiment.question
    return f"{question} Experiment {found.experiment.name} is {found.state}: {found.why}. To run it: {found.command}"


def model_name(model: Path) -> str:
    """Of its folder, or of the one above where that is called ``model``."""
    folder = model.absolute()
    return folder.parent.name if folder.name == "model" else folder.name


def about(model: Path, found: Sequence["Found"]) -> dict[str, str]:
    """Rows at the top of the page."""
    summaries: list[Any] = [each.summary for each in found if each.summary is not None]
    corpora = dict.fromkeys(str(each["corpus"]) for each in summaries if isinstance(each.get("corpus"), str))
    machines = dict.fromkeys(str(cpu) for each in summaries if (cpu := (each.get("environment") or {}).get("cpu")))
    states = [each.state for each in found]
    values = {
        "model folder": str(model),
        "corpus": ", ".join(corpora),
        "machine": ", ".join(machines),
        "experiments": f"{states.count('done')} of {len(states)} done",
        "flags": "; ".join(dict.fromkeys(flag.partition(":")[0] for each in found for flag in each.flags)),
        "took": f"{sum(each.seconds for each in found) / 60:.1f} minutes",
    }
    return {name: value for name, value in values.items() if value}


main = program("report", ReportConfig, run)

if __name__ == "__main__":
    main()
