"""What an engine is timed on: a trained folder's articles at its thresholds, or random weights on traces."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.config import BatchRule, Head, Measure, Schedule, TraceKind
from calm.device import choose_device
from calm.engine_config import ServingConfig, served_numbers
from calm.errors import ConfigError

from .common import articles_of, choose_model, say
from .sessions import FULL

if TYPE_CHECKING:
    from calm.cost import CostTable
    from calm.policies import Policy
    from calm.records import Example
    from calm.traces import Traces
    from serve.engine import Engine
    from serve.model import ServedModel
    from serve.options import EngineOptions

LIVE = "live"  # trace of a folder: what its own confidences say


@dataclass(frozen=True)
class Entry:
    """One way of decoding that is timed.

    Attributes:
        role: full, static or exit.
        rule: batch rule of its engine.
        depth: of a static one.
        trace: of an exit; a TraceKind's value, or ``live``.
        head: of its engine.
    """

    name: str
    role: str
    head: Head
    rule: BatchRule = BatchRule.own
    measure: Measure | None = None
    trace: str | None = None
    depth: int | None = None


@dataclass
class Workload:
    """A model and what it shall decode.

    Attributes:
        name: of the shape, or of the folder.
        paper: the name under which the paper's figures have this model; empty: they have not.
        about: for the record.
        policies: of a folder, by measure and head.
        articles: of a folder; none of a shape.
        few, many: tokens that its answers can have.
        notes: for the user.
    """

    name: str
    paper: str
    model: "ServedModel"
    config: ServingConfig
    few: int
    many: int
    about: dict[str, Any]
    policies: dict[tuple[Measure, Head], "Policy"] = field(default_factory=dict)
    articles: Sequence["Example"] = ()
    notes: list[str] = field(default_factory=list)
    _traces: dict[tuple[str, Measure], "Traces"] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        return self.model.spec.num_layers

    @property
    def trained(self) -> bool:
        return bool(self.articles)

    def entries(self) -> list[Entry]:
        """Full depth first, then every measure by every rule and trace."""
        traces = [LIVE] if self.trained else [kind.value for kind in self.config.traces]
        plain = self.config.head
        pairs = list(self.policies) if self.trained else speaking(self.config)
        exits = [
            Entry(" ".join([measure.value, rule.value, trace, *named(head, plain)]), "exit", head, rule, measure, trace)
            for trace in traces
            for measure, head in pairs
            for rule in self.config.rules
        ]
        return [Entry(FULL, FULL, plain), *exits]

    def sources(self, batch: int, tokens: int | None) -> list[list[int]]:
        """Of one batch; ``tokens``: of each of a shape's sources."""
        if self.trained:
            return [self.model.to_ids(self.articles[i % len(self.articles)].source) for i in range(batch)]
        from .shapes import random_sources

        assert tokens is not None
        return random_sources(self.model.spec.vocab_size, batch, tokens, self.config.seed)

    def policy(self, entry: Entry, names: Sequence[str]) -> "Policy":
        """Of requests with these names, which are those of one batch."""
        from calm.policies import Full, Static

        if entry.role == FULL:
            return Full()
        if entry.depth is not None:
            return Static(entry.depth)
        assert entry.measure is not None and entry.trace is not None
        if self.trained:
            return self.policies[entry.measure, entry.head]
        return self.traces(entry.trace, entry.measure).replay(names, entry.measure)

    def traces(self, trace: str, measure: Measure) -> "Traces":
        """Of a shape: as many rows as the largest batch has, drawn once."""
        from calm.traces import draw, measured, table1_depth

        key, config = (trace, measure), self.config
        if key not in self._traces:
            rows, kind = max(config.batches), TraceKind(trace)
            if kind is TraceKind.measured:
                assert config.records is not None
                path = Path(config.records)
                self._traces[key] = measured(path, measure.value, self.num_layers, rows, self.many, config.seed)
            else:
                mean = table1_depth(self.paper, measure, self.num_layers)
                self._traces[key] = draw(kind, self.num_layers, mean, rows, self.many, config.seed)
        return self._traces[key]

    def all_traces(self) -> dict[str, "Traces"]:
        """Those of all exits, by name; of a folder there are none."""
        pairs = [(e.trace, e.measure) for e in self.entries() if not self.trained and e.role == "exit"]
        return {
            f"{trace}-{m.value}": self.traces(trace, m) for trace, m in pairs if trace is not None and m is not None
        }

    def engine(
        self,
        most: int,
        rule: BatchRule = BatchRule.own,
        head: Head | None = None,
        costs: "CostTable | None" = None,
        **others: Any,
    ) -> "Engine":
        """Encodes every request, those of a batch of ``most`` before its first step.

        ``costs``: what rule ``rebatch`` decides by; None measures it. ``others``: further options of the engine.
        """
        from serve.engine import Engine
        from serve.options import at_once

        options = engine_options(
            self.config, head or self.config.head, rule=rule, max_waiting=max(most, 1024), **at_once(most), **others
        )
        return Engine(self.model, options, costs=costs)


def speaking(config: ServingConfig) -> list[tuple[Measure, Head]]:
    """Measures, and the heads that each is timed with: of those that do not read the vocabulary one is enough."""
    from calm.confidence import HEAD_MEASURES

    heads = config.exit_heads or [config.head]
    return [(m, head) for m in config.measures for head in (heads if m in HEAD_MEASURES else [config.head])]


def named(head: Head, plain: Head) -> list[str]:
    return [] if head is plain else [head.value]


def open_workload(config: ServingConfig) -> Workload:
    """The folder or shape asked for; without either the newest folder under ``runs/``, else shape small. Says which.

    Raises:
        CheckpointError, CalibrationError, DataError: of the folder.
    """
    if config.shape is not None:
        return shape_workload(config, config.shape)
    try:
        folder = choose_model(config.checkpoint)
    except ConfigError:
        if config.checkpoint is not None:
            raise
        say("no trained model under runs/; shape small with random weights instead")
        return shape_workload(config, "small")
    return folder_workload(config, folder)


def model_dtype(dtype: str) -> Any:
    """Arithmetic of the encoder and of what is not int8."""
    import torch

    return getattr(torch, served_numbers(dtype)[0])


def shape_workload(config: ServingConfig, shape: str) -> Workload:
    """Random weights; depths from traces of Table 1's means."""
    from .shapes import PAPER_NAMES, served_shape

    device = choose_device(config.device)
    model = served_shape(shape, model_dtype(config.dtype), max(config.source_tokens), config.many, config.seed, device)
    say(f"model: shape {shape}, random weights; depths replayed from traces ({', '.join(config.traces)})")
    return Workload(
        name=shape,
        paper=PAPER_NAMES.get(shape, ""),
        model=model,
        config=config,
        few=config.few,
        many=config.many,
        about={"shape": shape, "weights": "random", "layers": model.spec.num_layers},
    )


def folder_workload(config: ServingConfig, folder: Path) -> Workload:
    """A trained folder on articles of its test split, each measure at its threshold."""
    from calm.models.folder import load
    from calm.papers import model_name
    from serve.model import served

    loaded = load(folder, choose_device(config.device), dtype=model_dtype(config.dtype))
    corpus, articles = articles_of(config.data, loaded, config.n)
    name = model_name(loaded.settings.model, loaded.hf.config.to_dict())
    model = served(loaded, folder=folder)
    many = min(config.many, model.max_target)
    few = min(config.few, max(1, many // 2))
    if few >= many:
        raise ConfigError(f"{folder}: answers of {model.max_target} token cannot be timed step by step")
    say(f"corpus: {corpus}, {len(articles)} articles of the test split, one of each family")
    workload = Workload(
        name=name or folder.name,
        paper=name,
        model=model,
        config=config,
        few=few,
        many=many,
        about={
            "checkpoint": str(folder),
            "model": name,
            "weights": "trained",
            "layers": model.spec.num_layers,
            "corpus": corpus,
            "articles": len(articles),
        },
        articles=articles,
    )
    choose_thresholds(workload, corpus)
    return workload


def choose_thresholds(workload: Workload, corpus: str) -> None:
    """Each measure's policy: the threshold certified for the tolerance, else the papers' one; the notes say so."""
    from calm.calibration.artifact import served_as
    from calm.papers import given_thresholds
    from serve.backend import decoding_identity

    config, model = workload.config, workload.model
    told: dict[str, Any] = {}
    for measure, head in speaking(config):
        name = " ".join([measure.value, *named(head, config.head)])
        if measure is Measure.classifier and model.classifier is None:
            workload.notes.append("classifier: this model has none; it is left out")
            continue
        identity = decoding_identity(model, engine_options(config, head))
        fitting = list(model.artifacts) if identity is None else served_as(model.artifacts, identity)
        found = next((a for a in fitting if (a.measure, a.consistency) == (measure, config.consistency)), None)
        if found is not None and found.certificate(config.tolerance).certified_below_one:
            threshold = found.threshold_for(config.tolerance)
            workload.policies[measure, head] = found.policy(threshold)
            differs = [] if identity is None else found.identity.differences(identity)
            told[name] = {"threshold": threshold, "certified_for": None if differs else config.tolerance}
            if differs:
                workload.notes.append(
                    f"{name}: certified for {config.consistency.value} tolerance {config.tolerance:g}, but not as it "
                    f"is decoded here ({'; '.join(differs)}); its threshold is used, and nothing is certified of it"
                )
            continue
        given = given_thresholds(corpus, workload.paper).get(measure.value)
        if given is None:
            workload.notes.append(f"{name}: neither certified nor given by a paper; it is left out")
            continue
        workload.policies[measure, head] = _papers_policy(measure, given, model.max_target)
        told[name] = {"threshold": given, "certified_for": None}
        workload.notes.append(
            f"{name}: nothing below 1 is certified for {config.consistency.value} tolerance "
            f"{config.tolerance:g}; the paper's threshold {given:g} instead"
        )
    if not workload.policies:
        raise ConfigError("none of the measures asked for can be served by this model; calibrate it first")
    workload.about["thresholds"] = told


def _papers_policy(measure: Measure, threshold: float, length: int) -> "Policy":
    from calm.policies import Confident
    from calm.thresholds import ThresholdSchedule, measure_schedule

    return Confident(measure, ThresholdSchedule(threshold, measure_schedule(measure, Schedule.decaying), length=length))


def engine_options(config: ServingConfig, head: Head, **others: Any) -> "EngineOptions":
    """Of the engines that are timed, as far as they are the same for all batches and rules."""
    from serve.options import EngineOptions

    return EngineOptions(
        head=head,
        head_k=config.head_k,
        runner=config.runner,
        weights=served_numbers(config.dtype)[1],
        cross_kv=config.cross_kv,
        **others,
    )
