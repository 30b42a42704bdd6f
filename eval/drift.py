"""What the drift alarm is worth: other traffic on the engine of a certified model, and what each action does about it.

    python -m eval.drift checkpoint=runs/demo/model traffic=pydoc

For each ``on_drift`` an engine serves the model's own test split, on which no alarm is expected, and then that of
another corpus. Requests that come after the alarm are compared, one by one, with what ``warn``, which only says so,
answers to them. Risk is the mean loss against full depth that was certified (CALM section 4.1); of other traffic no
certificate speaks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.cli import program
from calm.config import CONF_DIR, DataConfig, OnDrift
from calm.device import choose_device
from calm.drift_config import DriftConfig
from calm.errors import ConfigError

from .common import Stamp, articles_of, choose_model, finish, say
from .drift_table import TRAFFIC, USUAL, as_lines, table_of
from .tables import aligned, markdown

if TYPE_CHECKING:
    from calm.models.speaking import SpeakingModel
    from calm.records import DecodeTrace, Example
    from serve.engine import Engine
    from serve.model import ServedModel

    from .drift_figures import Judge
    from .drift_served import Client, Served


@dataclass(frozen=True)
class Corpora:
    """Requests of both stretches and what they are called."""

    usual: "Sequence[Example]"
    traffic: "Sequence[Example]"
    names: dict[str, str]


@dataclass(frozen=True)
class Outcome:
    """One action's engine on both stretches."""

    on_drift: OnDrift
    usual: "Served"
    traffic: "Served"


def run(config: DriftConfig, run_dir: Path) -> int:
    stamp = Stamp("eval.drift", config)
    if config.traffic is None:
        there = ", ".join(sorted(path.stem for path in (CONF_DIR / "data").glob("*.yaml")))
        raise ConfigError(f"no traffic to change to: give traffic=NAME ({there})")
    folder, device = choose_model(config.checkpoint), choose_device(config.device)
    from calm.calibration.grid import point_to_json
    from calm.models.folder import load
    from serve.drift import Reference
    from serve.model import served

    from .drift_figures import shares, shuffled

    loaded = load(folder, device)
    model = served(loaded, folder=folder)
    engine, client = _client(model, config, OnDrift.warn)  # a wrong tolerance is told before a corpus is read
    corpora = _corpora(config, loaded, config.traffic)
    artifact, asked, layers = client.artifact, client.asked, model.spec.num_layers
    say(f"{artifact.name} at threshold {asked}, certified for tolerance {config.tolerance:g}")
    warned = _served(client, corpora, OnDrift.warn)
    judges = {
        name: _judge(engine, config, examples, layers, name)
        for name, examples in ((USUAL, corpora.usual), (TRAFFIC, corpora.traffic))
    }
    outcomes = [warned]
    outcomes += [
        _served(_client(model, config, action)[1], corpora, action)
        for action in config.on_drift
        if action is not OnDrift.warn
    ]
    reference = Reference.of(artifact, asked)
    clean = {
        name: shuffled(reference, config.requests_per_alarm, shares(traces, layers), config.shuffles, config.seed)
        for name, traces in ((USUAL, warned.usual.traces), (TRAFFIC, warned.traffic.traces))
    }
    usual = judges[USUAL].scores(warned.usual.traces)
    summary = {
        **stamp.values(),
        "checkpoint": str(folder),
        "corpora": corpora.names,
        "requests": {USUAL: len(corpora.usual), TRAFFIC: len(corpora.traffic)},
        "artifact": artifact.name,
        "threshold": point_to_json(asked),
        "tolerance": config.tolerance,
        "error_prob": artifact.error_prob,
        "runner": engine.runner_name.value,
        "calibrated": {
            "answer_skipped": reference.mean, "deviation": reference.deviation, "n": reference.n,
            "slack": reference.slack, "log_evidence_of_alarm": log(2.0 * config.requests_per_alarm),
        },
        USUAL: judges[USUAL].summary(usual, range(len(corpora.usual))),
        "actions": [_action(each, warned, judges[TRAFFIC], artifact.grid) for each in outcomes],
        "clean": clean[USUAL],
        "shifted": clean[TRAFFIC],
    }  # fmt: skip
    for line in as_lines(summary):
        say(line)
    table = table_of(summary)
    say("\n".join(aligned(table, left=1)))
    (run_dir / "drift.md").write_text(markdown([[cell.strip() for cell in row] for row in table]), encoding="utf-8")
    finish(summary, run_dir)
    return 0


def _client(model: "ServedModel", config: DriftConfig, on_drift: OnDrift) -> "tuple[Engine, Client]":
    """A new engine with this action, and who sends it requests."""
    from serve.engine import Engine
    from serve.options import RequestOptions

    from .drift_served import Client

    engine = Engine(
        model,
        max_batch=config.batch_size,
        runner=config.runner,
        on_drift=on_drift,
        requests_per_alarm=config.requests_per_alarm,
        drift_patience=config.drift_patience,
    )
    measure = None if config.measure is None else config.measure.value
    asked = RequestOptions(tolerance=config.tolerance, consistency=config.consistency, measure=measure)
    return engine, Client(engine, asked)


def _corpora(config: DriftConfig, model: "SpeakingModel", traffic: DataConfig) -> Corpora:
    (usual, own), (other, new) = (articles_of(data, model, config.n) for data in (config.data, traffic))
    say(f"usual traffic: {usual}, {len(own)} requests; then {other}, {len(new)}; of each the test split")
    return Corpora(own, new, {USUAL: usual, TRAFFIC: other})


def _served(client: "Client", corpora: Corpora, on_drift: OnDrift) -> Outcome:
    from calm.progress import Progress

    stretches = []
    for name, examples in ((USUAL, corpora.usual), (TRAFFIC, corpora.traffic)):
        with Progress(len(examples), f"{on_drift.value}, {name}", "request") as bar:
            stretches.append(client.serve(examples, bar.update))
    return Outcome(on_drift, *stretches)


def _judge(engine: "Engine", config: DriftConfig, examples: "Sequence[Example]", layers: int, name: str) -> "Judge":
    """Of one stretch, by the answers of the same engine at full depth, which drift does not look at."""
    from calm.policies import Full
    from serve.decoder import trace_of

    from .drift_figures import Judge

    say(f"full depth, {name}")
    names = [example.id for example in examples]
    answers = engine.generate([example.source for example in examples], names=names, policy=Full())
    full: list[DecodeTrace] = [trace_of(answer) for answer in answers]
    return Judge(config.consistency, examples, full, layers, config.seed, config.bootstrap)


def _action(outcome: Outcome, warned: Outcome, judge: "Judge", grid: Sequence[Any]) -> dict[str, Any]:
    """What one action did on the other traffic, before and after the alarm, beside ``warn`` on the same requests."""
    from .drift_figures import spans

    traffic = outcome.traffic
    mine, theirs = judge.scores(traffic.traces), judge.scores(warned.traffic.traces)
    after = [number for number, late in enumerate(traffic.after) if late]
    before = [number for number, late in enumerate(traffic.after) if not late]
    told = {
        "on_drift": outcome.on_drift.value,
        "alarm": first_alarm(outcome),
        "alarms": {USUAL: outcome.usual.alarms, TRAFFIC: traffic.alarms},
        "before": judge.summary(mine, before),
        "after": judge.summary(mine, after),
    }
    if outcome.on_drift is not OnDrift.warn:
        told["after_warn"] = judge.summary(theirs, after)
        told["change"] = judge.change(mine, theirs, after)
    return {**told, "thresholds": spans(traffic.thresholds, grid, judge, mine)}


def first_alarm(outcome: Outcome) -> dict[str, Any] | None:
    """On which stretch it came and after how many of its answers; None: it did not."""
    for name, stretch in ((USUAL, outcome.usual), (TRAFFIC, outcome.traffic)):
        if stretch.alarms:
            return {"phase": name, "after": stretch.alarms[0]}
    return None


main = program("drift", DriftConfig, run)

if __name__ == "__main__":
    main()
